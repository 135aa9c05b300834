"""What all commands have in common: groups in ``--help``, options from the environment, ``-v`` and ``-q``.

A command is a function whose parameters typer reads; ``add`` puts it into a group. Options of ``join`` and
``seed``, which run as services, and of ``doctor``, which takes join's, can come from environment variables:
``P2P_CO2_`` and the option's name, as ``P2P_CO2_UPLOAD``. To other commands the same words mean other things.
Help is plain text, since rich takes longer to import than all else.
"""

from __future__ import annotations

import copy
import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, fields
from enum import IntEnum
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from bootstrap.options import says
from p2p_co2.errors import ConfigError
from p2p_co2.system.process import VARIABLES

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
ENVIRONMENT = f"Each option can be set in the environment, too: --an-option is {VARIABLES}AN_OPTION."
_OF_SERVICES = {"join", "seed", "doctor"}
_Options = TypeVar("_Options")


class Loudness(IntEnum):
    """How much a command says beside warnings, errors and what it was asked for."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


LOUDNESS = ContextVar("loudness", default=Loudness.NORMAL)
"""Of the command that runs."""
LINE = ContextVar[Sequence[str]]("line", default=("p2p-co2",))
"""The command line as it was typed, the program first."""
_VERBOSE = Annotated[bool, says("Say more; with an error, where it arose.", "--verbose", "-v")]
_QUIET = Annotated[bool, says("Only warnings, errors and results.", "--quiet", "-q")]


class Command(TyperCommand):
    """Help with a section for each panel of options, and without types beside arguments."""

    def get_help_option(self, ctx: Any) -> Any:
        return _ours(super().get_help_option(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            if param.param_type_name == "argument":
                panels["Arguments"].append((record[0].partition(" <")[0], record[1]))
            else:
                panel = getattr(param, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append((record[0], record[1]))
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=28)


class Commands(TyperGroup):
    """All of them: by group, each with its whole short help."""

    def invoke(self, ctx: Any) -> Any:
        """A Ctrl-C that no command took for itself ends the program in one word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None

    def get_help_option(self, ctx: Any) -> Any:
        return _ours(super().get_help_option(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                group = getattr(command, "rich_help_panel", None) or "Commands"
                groups.setdefault(group, []).append((name, command.get_short_help_str(limit=1000)))
        widest = max((len(name) for rows in groups.values() for name, _ in rows), default=0)
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(widest), words) for name, words in rows])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Commands first: options are what somebody looks for who knows them."""
        self.format_commands(ctx, formatter)
        rows = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([row for row in rows if row is not None])


def _ours(option: Any) -> Any:
    if option is not None:
        option.help = "Show this help and end."
    return option


def add(
    app: typer.Typer, group: str, name: str, short: str, run: Callable[..., Any], hidden: bool = False
) -> None:
    """Make ``run`` the command ``name`` of ``group``; ``short`` is its line in the list of all, unless it is
    ``hidden``. Its docstring is its help."""

    def command(**given: Any) -> Any:
        verbose = given.pop("verbose")
        quiet = given.pop("quiet")
        if verbose and quiet:
            raise ConfigError.of_option("--quiet", "says less, and --verbose more; leave one out")
        LOUDNESS.set(Loudness.VERBOSE if verbose else Loudness.QUIET if quiet else Loudness.NORMAL)
        return run(**given)

    taken = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(run, eval_str=True).parameters.values()
    ]
    both = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=False)
        for name, annotation in (("verbose", _VERBOSE), ("quiet", _QUIET))
    ]
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    taken += both
    if name in _OF_SERVICES:
        taken = [one.replace(annotation=_with_variable(one)) for one in taken]
    command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    app.command(
        name,
        cls=Command,
        short_help=short,
        epilog=ENVIRONMENT if name in _OF_SERVICES else None,
        rich_help_panel=group,
        context_settings=SETTINGS,
        hidden=hidden,
    )(command)


def _with_variable(parameter: inspect.Parameter) -> Any:
    """Its annotation, with the environment variable that it is read from, unless that names another; the same
    for what is no option."""
    annotation = parameter.annotation
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *told = get_args(annotation)
    found = [copy.copy(one) if isinstance(one, OptionInfo) else one for one in told]
    for option in found:
        if isinstance(option, OptionInfo) and not option.hidden:
            flags = [option.default, *(option.param_decls or ())]  # typer holds the first as a default
            option.envvar = option.envvar or variable_of(parameter.name, flags)
            option.show_envvar = False
    return Annotated[(kind, *found)]


def variable_of(name: str, flags: Sequence[Any] = ()) -> str:
    """P2P_CO2_JSON of the parameter ``as_json`` with the flag ``--json``; without flags of its ``name``."""
    named = (flag for flag in flags if isinstance(flag, str) and flag.startswith("--"))
    long = next(named, name).split("/")[0]
    return VARIABLES + long.strip("-").replace("-", "_").upper()


def takes(options: type[_Options]) -> Callable[[Callable[[_Options], int]], Callable[..., None]]:
    """Make a function with typer's parameters of one that takes ``options``, a dataclass whose fields are
    annotated as they are, and returns the exit status."""

    def command_of(run: Callable[[_Options], int]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            raise typer.Exit(run(options(**given)))

        hints = get_type_hints(options, include_extras=True)
        command.__name__ = run.__name__
        command.__doc__ = run.__doc__
        command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name],
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
            )
            for field in fields(options)  # type: ignore[arg-type]
        ])  # fmt: skip
        return command

    return command_of
