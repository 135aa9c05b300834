"""Torch's default dtype as a user's program may have set it, for a whole run of tests
(``P2P_CO2_TEST_DEFAULT_DTYPE``).

It is our code that runs under it. What a test makes itself, the models among it, is fp32 as always: so the
same tests, with the same numbers, say that nothing of ours depends on the default.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch

VARIABLE = "P2P_CO2_TEST_DEFAULT_DTYPE"
_TESTS = str(Path(__file__).resolve().parent)
_FUNCTIONS = ("arange", "empty", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
_LAYERS = ("BatchNorm1d", "Conv2d", "Embedding", "LayerNorm", "Linear")


def set_from_environment() -> None:
    """Once, before tests are imported."""
    if name := os.environ.get(VARIABLE):
        for function in _FUNCTIONS:
            setattr(torch, function, _plain_for_tests(getattr(torch, function)))
        for layer in _LAYERS:
            made = getattr(torch.nn, layer)
            made.__init__ = _plain_for_tests(made.__init__)
        torch.set_default_dtype(getattr(torch, name))


def _plain_for_tests(make: Any) -> Any:
    @wraps(make)
    def plain(*arguments: Any, **named: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_TESTS):
            return make(*arguments, **named)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return make(*arguments, **named)
        finally:
            torch.set_default_dtype(before)

    return plain
