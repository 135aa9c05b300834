"""The exception tree is what its docstring draws, and its members say what they carry."""

from __future__ import annotations

import inspect
import re

from p2p_co2 import errors
from p2p_co2.errors import ConfigError, P2PCo2Error, RemoteProtocolError


def test_the_docstring_draws_the_tree() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, P2PCo2Error) and kind is not P2PCo2Error
    }
    assert drawn == defined


def test_what_errors_say() -> None:
    assert (
        str(ConfigError("run.toml", "outer.lr", "must be positive")) == "run.toml: outer.lr: must be positive"
    )
    assert str(ConfigError("run.toml", "", "no such file")) == "run.toml: no such file"
    error = RemoteProtocolError("wrong size", "7 bytes")
    assert (error.reason, error.detail, str(error)) == ("wrong size", "7 bytes", "wrong size: 7 bytes")
