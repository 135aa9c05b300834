"""A mistake on the command line, in one line that says what would be right.

typer's and click's own sentences differ between versions and come with a usage text; here each is one line in
the form of all others: ``command line: --option: problem``. Nothing of theirs is imported but by name: newer
versions of typer carry click inside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import typer

from p2p_co2.errors import ConfigError, in_our_words

Mistake: type[Exception] = typer.BadParameter.__mro__[2]
"""The root of what typer raises for a command line: click's ``ClickException``."""


def explained(error: Any) -> ConfigError:
    """``error`` is a ``Mistake``."""
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else ""
    told = _told(error, context, f"{command} -h".strip())
    return told if isinstance(told, ConfigError) else ConfigError("command line", *told)


def _told(error: Any, context: Any, help_: str) -> tuple[str, str] | ConfigError:
    """The key that is wrong, and how; or the whole error."""
    message = str(error.format_message())
    key = ""
    problem = f"{message[:1].lower()}{message[1:].rstrip('.')}; see {help_}"
    match type(error).__name__:
        case "NoSuchOption":
            known = [flag for param in context.command.get_params(context) for flag in _flags(param)]
            key = error.option_name
            near = _closest(error.option_name, known)
            problem = f"there is no such option; {near or f'{help_} lists them'}"
        case "BadOptionUsage":
            key = error.option_name
            problem = f"needs a value; {help_} says which" if "requires" in message else "takes no value"
        case "MissingParameter":
            key = _name(error.param)
            problem = f"is missing; {help_} says what it is"
        case "BadParameter" if error.param is not None:
            return _bad_value(error, context)
        case _ if found := re.search(r"No such command '(.*?)'\.", message):
            key = found[1]
            near = _closest(found[1], context.command.list_commands(context))
            problem = f"there is no such command; {near or f'{help_} lists them'}"
        case _ if found := re.search(r"unexpected extra arguments? ?(?:\(s\))? ?\((.*)\)", message):
            key = found[1]
            problem = f"one word too many; {help_} says what it takes"
    return key, problem


def _bad_value(error: Any, context: Any) -> ConfigError:
    param = error.param
    problem = in_our_words(error.message)
    source = context.get_parameter_source(param.name) if context is not None else None
    if getattr(source, "name", "") == "ENVIRONMENT" and isinstance(param.envvar, str):
        given = os.environ.get(param.envvar, "")
        return ConfigError("environment", param.envvar, f"{problem} (got {given[:80]!r})")
    return ConfigError.of_option(_name(param), problem)


def _name(param: Any) -> str:
    long = [flag for flag in _flags(param) if flag.startswith("--")]
    return long[0] if long else str(param.metavar or param.name)


def _flags(param: Any) -> list[str]:
    is_option = param.param_type_name == "option"
    return [*param.opts, *param.secondary_opts] if is_option and not getattr(param, "hidden", False) else []


def _closest(given: str, known: Iterable[str]) -> str:
    near = get_close_matches(given, list(known), 1)
    return f"did you mean {near[0]}?" if near else ""
