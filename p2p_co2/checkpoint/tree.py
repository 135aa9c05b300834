"""An optimizer's ``state_dict`` as JSON and a list of tensors, and back; never pickle.

Law: what comes back is equal, type by type (tuples stay tuples, integer keys stay integers, floats keep
every bit), so training continues bit for bit. Price: an optimizer that keeps objects other than tensors,
numbers, strings, lists, tuples and dictionaries in its state cannot be saved, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from p2p_co2.errors import ConfigError


def flatten(value: object, tensors: list[Tensor]) -> Any:
    """``value`` as JSON; its tensors are appended to ``tensors`` and stand in it by their index.

    Raises ``ConfigError`` for an object that only pickle could save.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key), flatten(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flatten(item, tensors) for item in value]}
    raise ConfigError(
        "checkpoint",
        "optimizer",
        f"its state holds a {type(value).__name__}, which cannot be saved; use an optimizer whose state_dict "
        "has only tensors, numbers and strings",
    )


def unflatten(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """What ``flatten`` was given. Raises ``ValueError``, ``KeyError``, ``IndexError`` or ``TypeError`` for
    anything else."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content}
    items = [unflatten(item, tensors) for item in content]
    return {"list": items, "tuple": tuple(items)}[kind]


def _key(key: object) -> int | str:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ConfigError("checkpoint", "optimizer", f"its state has a key of type {type(key).__name__}")
    return key
