"""An optimizer's ``state_dict`` as JSON and tensors, and back; never pickle.

Laws: what comes back is equal, type by type (tuples stay tuples, integer keys stay integers, floats keep
every bit), so training continues bit for bit; numpy's numbers become Python's. What only pickle could save is
left out by whole entries of a group and whole states of a parameter, and named: saving never fails over it.

Price: a parameter whose state is left out begins with a new one after a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2p_co2.tensors.checkpoint.tensorfile import trouble_with


@dataclass(frozen=True)
class Said:
    """What of a ``state_dict`` can be saved. ``tree``: as JSON. ``tensors`` by name, in parts that belong
    together (a parameter's state), held and not copied. ``left_out``: the rest, in words."""

    tree: Any
    tensors: tuple[Mapping[str, Tensor], ...]
    left_out: tuple[str, ...]


class _Odd(Exception):
    """Only pickle could save it; the text says what it is."""


def say(state_dict: Mapping[str, Any]) -> Said:
    """``state_dict`` of an optimizer in torch's layout; of another layout all of an entry, or nothing."""
    said = _Saying()
    tree = [[key, entry] for key in state_dict for entry in said.entry(key, state_dict[key])]
    return Said({"dict": tree}, tuple(said.parts), tuple(said.left_out))


def unsay(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """What ``say`` was given, but for what was left out. Raises ``ValueError``, ``KeyError``, ``IndexError``
    or ``TypeError`` for anything else."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {key: unsay(item, tensors) for key, item in content}
    if kind in _LEAVES:
        return _LEAVES[kind](content, tensors)
    return _KINDS[kind]([unsay(item, tensors) for item in content])


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
        entries = []
        for key, value in values.items():
            for pair in self._try(what.format(key), (key, value)):
                name, said = pair["tuple"]
                entries.append([name, said])
        return entries

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

    def _flatten(self, value: object, part: dict[str, Tensor]) -> Any:
        said: Any = value.item() if isinstance(value, np.generic) else value
        match said:
            case None | bool() | int() | str():
                return said
            case float():
                return {"float": said.hex()}
            case complex():
                return {"complex": [{"float": said.real.hex()}, {"float": said.imag.hex()}]}
            case torch.dtype():
                return {"dtype": str(said).removeprefix("torch.")}
        return self._collection(said, part)

    def _collection(self, value: Any, part: dict[str, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, part)}
        if isinstance(value, np.ndarray):
            return {"array": self._array(value, part)}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key), self._flatten(item, part)] for key, item in value.items()]}
        if isinstance(value, deque):
            return {"deque": [value.maxlen, *(self._flatten(item, part) for item in value)]}
        # A tuple with names would come back without them; torch's sizes are tuples.
        kind = type(value).__name__ if not isinstance(value, torch.Size) else "tuple"
        if _KINDS.get(kind) is not type(value) and not isinstance(value, torch.Size):
            raise _Odd(f"a {kind}")
        return {kind: [self._flatten(item, part) for item in value]}

    def _tensor(self, tensor: Tensor, part: dict[str, Tensor]) -> int:
        trouble = trouble_with(tensor)
        if trouble:
            raise _Odd(trouble)
        part[f"optimizer.{self._count}"] = tensor
        self._count += 1
        return self._count - 1

    def _array(self, array: np.ndarray[Any, Any], part: dict[str, Tensor]) -> int:
        try:
            return self._tensor(torch.from_numpy(array.copy()), part)
        except (TypeError, ValueError):
            raise _Odd(f"an array of {array.dtype}") from None


def _key(key: object) -> int | str:
    if isinstance(key, np.integer):
        return int(key)
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise _Odd(f"a key of type {type(key).__name__}")
    return key


def _dtype(name: str, _: Sequence[Tensor]) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


_LEAVES: dict[str, Callable[[Any, Sequence[Tensor]], Any]] = {
    "float": lambda text, _: float.fromhex(text),
    "dtype": _dtype,
    "tensor": lambda index, tensors: tensors[index],
    "array": lambda index, tensors: tensors[index].numpy(),
}
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "complex": lambda parts: complex(*parts),
    "deque": lambda items: deque(items[1:], items[0]),
}
