"""The numbers that a training loop tells of each step, as the rest of the house needs them.

Law: an argument is what it should be at the call, or ``ConfigError`` names it there. Nothing is read from an
accelerator, which would wait for all that is queued on it: what lies there is checked by type, and read when
figures are made.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from p2p_co2.errors import ConfigError

MAX_TOKENS = 2**40
"""In one step."""


def tokens_of(tokens: Any) -> int | Tensor:
    """``tokens`` as a plain whole number; a tensor of one number that lies on an accelerator as it is.

    Integers of any library are taken, and floats without a fraction (``mask.sum()``).
    """
    value = tokens
    if isinstance(tokens, Tensor):
        if not _is_one_number(tokens):
            raise _wrong_tokens(f"is {_shape_of(tokens)}")
        if tokens.device.type != "cpu":
            return tokens.detach()
        value = tokens.item()
    is_number = isinstance(value, numbers.Real | SupportsIndex) and not isinstance(value, bool)
    if not is_number:
        raise _wrong_tokens(f"is of type {type(value).__name__}")
    try:
        count = int(value)
    except (ValueError, OverflowError, TypeError):  # NaN, Inf; an array of several
        raise _wrong_tokens(f"is {value!r}") from None
    if count != value or not 0 <= count <= MAX_TOKENS:
        raise _wrong_tokens(f"is {value!r}")
    return count


def loss_of(loss: Any) -> float | Tensor:
    """``loss`` as a plain number, or as a tensor of one number cut off from its graph. NaN and Inf are facts
    of training and taken: such a step has no known loss."""
    if isinstance(loss, Tensor):
        if not _is_one_number(loss):
            raise _wrong_loss(f"is {_shape_of(loss)}")
        return loss.detach()
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise _wrong_loss(f"is of type {type(loss).__name__}" if loss is not None else "is None")
    try:
        return float(loss)
    except OverflowError:
        raise _wrong_loss("is larger than any float") from None


def mean_loss(losses: list[float | Tensor]) -> float:
    """Of the steps whose loss is finite; NaN, for unknown, if there are none."""
    known = [value for value in map(float, losses) if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _is_one_number(tensor: Tensor) -> bool:
    is_real = not tensor.is_complex() and tensor.dtype != torch.bool
    return is_real and tensor.device.type != "meta" and tensor.numel() == 1


def _shape_of(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"


def _wrong_tokens(how: str) -> ConfigError:
    right = "give how many tokens the step was made of, a whole number of 0 or more, such as int(mask.sum())"
    return ConfigError("step", "tokens", f"{how}; {right}")


def _wrong_loss(how: str) -> ConfigError:
    return ConfigError("step", "loss", f"{how}; give the step's training loss as one number: loss.mean()")
