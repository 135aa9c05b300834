"""All stages of a model in a row, in one process: for held-out loss, for text, and for a whole checkpoint.

Parameters are called ``stage.S.NAME``: the same tensors as in the stages themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class Chain(nn.Module):
    """``forward(inputs)``: through every stage, with nothing encoded in between."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.stage = nn.ModuleList(stages)

    def forward(self, inputs: Any) -> Tensor:
        hidden = inputs
        for stage in self.stage:
            hidden = stage(hidden)
        return hidden  # type: ignore[no-any-return]
