"""What all commands have in common: options from classes and from the environment, ``-v`` and ``-q``.

A command is a function whose parameters typer reads; ``add`` puts it into a group. A parameter that is a
dataclass stands for its fields, one that is ``PeerSettings`` for the options that ``PeerConfig`` declares. A
number that a command returns is its exit status."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from bootstrap.options import says
from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError
from p2p_co2.peer_options import PeerOption, peer_options
from p2p_co2.system.machine import require_supported_platform
from p2p_co2.system.process import VARIABLES, say

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
FROM_ENVIRONMENT = {"auto_envvar_prefix": VARIABLES.rstrip("_")}
SERVICES = {"join", "seed", "doctor"}
"""The commands whose options can come from the environment: two run as services, ``doctor`` takes join's."""
ANYWHERE = {"init", "plan", "simulate", "credit", "model", "gather", "eval", "sample", "help", "version"}
"""The commands that need no peer, so they work on other systems, too."""
ENVIRONMENT = f"Each option can be set in the environment, too: --an-option is {VARIABLES}AN_OPTION."


class Loudness(IntEnum):
    """How much a command says beside warnings, errors and what it was asked for."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class PeerSettings(dict[str, Any]):
    """What was given of a peer's settings, by their options' names; None for what was not."""


DOINGS = {
    "eval": "measuring the loss on held-out data",
    "model": "taking the model out",
}
"""What commands do that say nothing for long."""
LOUDNESS = ContextVar("loudness", default=Loudness.NORMAL)
"""Of the command that runs."""
LINE = ContextVar[Sequence[str]]("line", default=("p2p-co2",))
"""The command line as it was typed, the program first."""


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Say on stderr what is being done, if that takes longer than a second."""
    timer = threading.Timer(1.0, say, [f"{what} ..."])
    if what and LOUDNESS.get() is not Loudness.QUIET:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def add(
    app: typer.Typer, group: str, name: str, short: str, run: Callable[..., Any], hidden: bool = False,
    kind: type[PeerConfig] = PeerConfig,
) -> None:  # fmt: skip
    """Make ``run`` the command ``name`` of ``group``; ``short`` is its line in the list of all, unless it is
    ``hidden``. Its docstring is its help. ``kind``: whose settings ``PeerSettings`` stands for."""
    given_to = {one.name: one for one in inspect.signature(run, eval_str=True).parameters.values()}
    whole = {one.name: _expanded(one, kind) for one in given_to.values()}

    def command(**given: Any) -> None:
        verbose = given.pop("verbose")
        quiet = given.pop("quiet")
        if verbose and quiet:
            raise ConfigError.of_option("--quiet", "says less, and --verbose more; leave one out")
        LOUDNESS.set(Loudness.VERBOSE if verbose else Loudness.QUIET if quiet else Loudness.NORMAL)
        for one, parts in whole.items():
            if one not in given:
                given[one] = given_to[one].annotation(**{part.name: given.pop(part.name) for part in parts})
        if name not in ANYWHERE:
            require_supported_platform()
        with _telling(DOINGS.get(name, "")):
            status = run(**given)
        if status is not None:
            raise typer.Exit(status)

    words = {"verbose": ("Say more; with an error, where it arose.", "-v")}
    words["quiet"] = ("Say only warnings, errors and results.", "-q")
    loudness = [
        _parameter(name, Annotated[bool, says(told, f"--{name}", short)], False)
        for name, (told, short) in words.items()
    ]
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    parts = [part for parts in whole.values() for part in parts]
    command.__signature__ = inspect.Signature([*parts, *loudness])  # type: ignore[attr-defined]
    is_service = name in SERVICES
    app.command(
        name, short_help=short, epilog=ENVIRONMENT if is_service else None, rich_help_panel=group,
        context_settings=SETTINGS | (FROM_ENVIRONMENT if is_service else {}), hidden=hidden,
        cls=_Service if is_service else None,
    )(command)  # fmt: skip


class _Service(TyperCommand):
    """A command whose options can come from the environment: a mistake there names the variable."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = error.param.name if error.param is not None else None
            source = ctx.get_parameter_source(name) if name else None
            if name and source is not None and source.name == "ENVIRONMENT":
                error.message = f"{error.message} It is from the environment: {variable_of(name)}."
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """Those that help does not name are not taken from the environment; nor is ``--help``."""
        params: list[Any] = list(super().get_params(ctx))
        for one in params:
            if getattr(one, "hidden", False) or one.name == "help":
                one.allow_from_autoenv = False
        return params


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _expanded(given: inspect.Parameter, kind: type[PeerConfig]) -> list[inspect.Parameter]:
    """The parameters of typer's that a command's parameter stands for."""
    if given.annotation is PeerSettings:
        return [
            _parameter(one.name, Annotated[one.kind | None, _option(one)], None)
            for one in peer_options(kind).values()
            if one.declared.on_command_line
        ]
    if is_dataclass(given.annotation):
        hints: Mapping[str, Any] = get_type_hints(given.annotation, include_extras=True)
        return [
            _parameter(
                one.name, hints[one.name], inspect.Parameter.empty if one.default is MISSING else one.default
            )
            for one in fields(given.annotation)
        ]
    return [given.replace(kind=inspect.Parameter.KEYWORD_ONLY)]


def variable_of(name: str) -> str:
    """The environment variable of an option of a service, by its parameter's name."""
    return VARIABLES + name.upper()


def _option(one: PeerOption) -> Any:
    """A setting of a peer as typer's option."""
    declared = one.declared
    flags = f"{one.flag}/--no-{one.flag.removeprefix('--')}" if one.kind is bool else one.flag
    return says(
        declared.help, flags, metavar=declared.unit or None, rich_help_panel=declared.panel or None,
        hidden=declared.hidden,
    )  # fmt: skip
