"""An optimizer's ``state_dict`` as JSON and tensors, and back; never pickle.

Laws: what comes back is equal type by type, floats in every bit, so training continues bit for bit. Numpy's
numbers become Python's. What only pickle could save is left out and named: whole entries of a group, whole
states of a parameter. Saving never fails over it.

Price: a parameter whose state is left out begins with a new one after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2p_co2.tensors.checkpoint.parts import trouble_with


@dataclass(frozen=True)
class SavedTree:
    """What of a ``state_dict`` can be saved. ``tree``: as JSON. ``tensors`` by name, in parts that belong
    together (a parameter's state), held and not copied. ``left_out``: the rest, in words."""

    tree: Any
    tensors: tuple[Mapping[str, Tensor], ...]
    left_out: tuple[str, ...]


class _Odd(Exception):
    """Only pickle could save it; the text says what it is."""


def say(state_dict: Mapping[str, Any]) -> SavedTree:
    """``state_dict`` of an optimizer in torch's layout; of another layout all of an entry, or nothing."""
    said = _Saying()
    tree = [[key, entry] for key in state_dict for entry in said.entry(key, state_dict[key])]
    return SavedTree({"dict": tree}, tuple(said.parts), tuple(said.left_out))


def unsay(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """What ``say`` was given, but for what was left out. Raises ``ValueError``, ``KeyError``, ``IndexError``
    or ``TypeError`` for anything else."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "float":
            return float.fromhex(content)
        case "tensor":
            return tensors[content]
        case "dtype" if isinstance(dtype := getattr(torch, content, None), torch.dtype):
            return dtype
        case "dict":
            return {key: unsay(item, tensors) for key, item in content}
        case "list" | "tuple":
            items = [unsay(item, tensors) for item in content]
            return items if kind == "list" else tuple(items)
    raise ValueError(f"{kind} is no kind of value")


class _Saying:
    """The tensors that are met on the way, and what is odd."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []
        self._count = 0
        self.left_out: dict[str, None] = {}
        """In the order in which it was met, alike ones once."""

    def entry(self, key: str, value: Any) -> list[Any]:
        """One entry of the whole, or nothing."""
        if key == "state" and isinstance(value, Mapping):
            return [{"dict": self._entries(value, "the state of a parameter")}]
        if key == "param_groups" and isinstance(value, list) and all(isinstance(g, Mapping) for g in value):
            return [{"list": [{"dict": self._entries(group, "{!r} of a group")} for group in value]}]
        return self._try(f"{key!r}", value)

    def _entries(self, values: Mapping[Any, Any], what: str) -> list[Any]:
        """Each of them, or nothing of it."""
        said = (pair for key, value in values.items() for pair in self._try(what.format(key), (key, value)))
        return [pair["tuple"] for pair in said]

    def _try(self, what: str, value: object) -> list[Any]:
        """``value`` as JSON in a list, or an empty one; its tensors are one part."""
        part: dict[str, Tensor] = {}
        begins = self._count
        try:
            tree = self._flatten(value, part)
        except (_Odd, RecursionError) as odd:
            self._count = begins
            self.left_out[f"{what} ({odd if isinstance(odd, _Odd) else 'holds itself'})"] = None
            return []
        if part:
            self.parts.append(part)
        return [tree]

    def _flatten(self, value: Any, part: dict[str, Tensor]) -> Any:
        said: Any = value.item() if isinstance(value, np.generic) else value
        match said:
            case None | bool() | int() | str():
                return said
            case float():
                return {"float": said.hex()}
            case torch.dtype():
                return {"dtype": str(said).removeprefix("torch.")}
            case Tensor():
                return {"tensor": self._tensor(said, part)}
            case Mapping():
                return {"dict": [[_key(key), self._flatten(item, part)] for key, item in said.items()]}
        # A tuple with names would come back without them; torch's sizes are tuples.
        if type(said) not in (list, tuple, torch.Size):
            raise _Odd(f"a {type(said).__name__}")
        kind = "list" if isinstance(said, list) else "tuple"
        return {kind: [self._flatten(item, part) for item in said]}

    def _tensor(self, tensor: Tensor, part: dict[str, Tensor]) -> int:
        if trouble := trouble_with(tensor):
            raise _Odd(trouble)
        part[f"optimizer.{self._count}"] = tensor
        self._count += 1
        return self._count - 1


def _key(key: object) -> int | str:
    if isinstance(key, np.integer):
        return int(key)
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise _Odd(f"a key of type {type(key).__name__}")
    return key
