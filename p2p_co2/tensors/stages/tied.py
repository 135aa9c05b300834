"""A table that two stages hold, as a model of its own, and a stage without it: two groups train them.

    rest, table = apart(module, module.get_parameter("head.weight"))

Law: the tensors are the module's own, so what a group merges is what the stage computes with.
"""

from __future__ import annotations

import copy

from torch import nn


class Table(nn.Module):
    """``values``: under the same name, whatever the stage calls it."""

    def __init__(self, values: nn.Parameter) -> None:
        super().__init__()
        self.values = values


def apart(module: nn.Module, table: nn.Parameter) -> tuple[nn.Module, Table]:
    """``module`` without ``table``, to look at and not to compute with; and the table."""
    kept: dict[int, object] = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, {**kept, id(table): None}), Table(table)
