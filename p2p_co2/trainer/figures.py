"""What a training loop tells of its steps, and the figures that are made of it: tokens, loss, rates, and
where the time went.

Law: an argument is what it should be at the call, or ``ConfigError`` names it there. Nothing is read from an
accelerator, which would wait for all that is queued on it. What lies there is checked by type, and read when
figures are made. Time is an argument here.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.device import is_accelerator

MAX_TOKENS = 2**40
"""In one step."""
RATE_DECAY = 0.8


class Figures:
    """Of one peer. All time in ``after_step`` is standing still. What an accelerator has yet to compute
    before a fragment can be copied is training's."""

    def __init__(self, tokens: int, now: float) -> None:
        self.train_s = self.exposed_s = 0.0
        self.loss = math.nan
        self.tokens_per_s = 0.0
        self._tokens = tokens
        self._made_of_tokens = tokens
        self._unread = list[Tensor]()
        """Counts that lie on an accelerator, read when the sum is asked for."""
        self.empty_steps = 0
        """Steps in a row that were of no tokens."""
        self._losses = list[float | Tensor]()
        self._first_step_at: float | None = None
        self.since = self.made_at = now
        """From when on time is yet to be counted; when the figures were made."""

    @property
    def tokens(self) -> int:
        """That this peer trained on."""
        while self._unread:
            count = tokens_of(self._unread.pop().cpu())
            assert isinstance(count, int)
            self._tokens += count
        return self._tokens

    @property
    def has_begun(self) -> bool:
        """Whether there was a step."""
        return self._first_step_at is not None

    def trained(self, now: float, tokens: int | Tensor, loss: float | Tensor) -> float:
        """A step was computed until now: how long it took. ``tokens``, ``loss``: as ``tokens_of`` and
        ``loss_of`` give them."""
        step_s = now - self.since
        self.train_s += step_s
        if self._first_step_at is None:
            self._first_step_at = self.since
        self.since = now
        self._losses.append(loss)
        if isinstance(tokens, Tensor):
            self._unread.append(tokens)
            self.empty_steps = 0
        else:
            self._tokens += tokens
            self.empty_steps = 0 if tokens else self.empty_steps + 1
        return step_s

    def stood_still(self, now: float, computing_s: float) -> None:
        """Since the last step, or since this was told last; ``computing_s`` of it were training's."""
        self.train_s += computing_s
        self.exposed_s += now - self.since - computing_s
        self.since = now

    def skip(self, duration_s: float, rested: bool = False) -> None:
        """Time between two steps that was neither; in no figure at all if the peer ``rested``."""
        self.since += duration_s
        if rested and self._first_step_at is not None:
            self._first_step_at += duration_s

    def make(self, now: float, keeps_rate: bool) -> None:
        """Make the loss and the rate of what came since the last time."""
        elapsed_s = now - self.made_at
        if elapsed_s > 0 and not keeps_rate:
            rate = (self.tokens - self._made_of_tokens) / elapsed_s
            known = self.tokens_per_s
            self.tokens_per_s = RATE_DECAY * known + (1 - RATE_DECAY) * rate if known else rate
        if self._losses:
            self.loss = mean_loss(self._losses)
            self._losses.clear()
        self.made_at = now
        self._made_of_tokens = self.tokens

    def wall_s(self, now: float) -> float:
        """Since the first step."""
        return 0.0 if self._first_step_at is None else now - self._first_step_at


def tokens_of(tokens: Any) -> int | Tensor:
    """``tokens`` as a plain whole number; a tensor of one number that lies on an accelerator as it is.

    Integers of any library are taken, and floats without a fraction (``mask.sum()``).
    """
    value = tokens
    if isinstance(tokens, Tensor) and _is_one_number(tokens):
        if is_accelerator(tokens.device):
            return tokens.detach()
        value = tokens.item()
    if isinstance(value, numbers.Real | SupportsIndex) and not isinstance(value, bool | Tensor):
        with contextlib.suppress(ValueError, OverflowError, TypeError):  # NaN, Inf; an array of several
            count = int(value)  # type: ignore[arg-type]
            if count == value and 0 <= count <= MAX_TOKENS:
                return count
    right = "give how many tokens the step was made of, a whole number of 0 or more, such as int(mask.sum())"
    raise ConfigError("step", "tokens", f"is {_described(tokens)}; {right}")


def loss_of(loss: Any) -> float | Tensor:
    """``loss`` as a plain number, or as a tensor of one number cut off from its graph. NaN and Inf are facts
    of training and taken: such a step has no known loss."""
    if isinstance(loss, Tensor) and _is_one_number(loss):
        return loss.detach()
    if isinstance(loss, numbers.Real) and not isinstance(loss, bool):
        with contextlib.suppress(OverflowError):
            return float(loss)
    right = "give the step's training loss as one number: loss.mean()"
    raise ConfigError("step", "loss", f"is {_described(loss)}; {right}")


def mean_loss(losses: list[float | Tensor]) -> float:
    """Of the steps whose loss is finite; NaN, for unknown, if there are none."""
    known = [value for value in map(float, losses) if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _is_one_number(tensor: Tensor) -> bool:
    is_real = not tensor.is_complex() and tensor.dtype != torch.bool
    return is_real and tensor.device.type != "meta" and tensor.numel() == 1


def _described(given: Any) -> str:
    if isinstance(given, Tensor) and given.numel() != 1:
        return f"a tensor of shape {tuple(given.shape)} and {str(given.dtype).removeprefix('torch.')}"
    return f"{given!r:.80} of type {type(given).__name__}"
