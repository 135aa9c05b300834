"""Which elements synchronise together: a module cut into fragments, the same way on every peer.

Laws: every element of every trainable parameter is in exactly one slice (tied weights once, under their
first name); the same module gives the same plan and the same ``digest`` on every machine; no fragment is
larger than 1.5 times the mean (or one element above it, when there are hardly more elements than
fragments).

How: the parameters are laid out on a tape and the tape is cut. Transformer blocks are strided, block l
beside blocks l + P, l + 2 P and so on (Streaming DiLoCo, arXiv 2501.18512, section 2.1: early and late
layers share a fragment); what is outside the blocks, embeddings and head, has a tape and fragments of its
own. Cuts are even, and move to the end of a block or a parameter when one is near. Even cuts are ours:
traffic is then the same at every schedule point, whatever the model. In small models the embedding
dominates, and it is cut like anything else.

Price: a fragment may hold a part of a parameter, so a fragment is a list of slices and not of parameters.
Buffers (batch-norm statistics) are in no fragment: each peer keeps its own, and a newcomer begins with those
of a donor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.fragments.names import named_modules, named_parameters, unwrapped

MAX_OVER_MEAN = 1.5
_SNAP = 0.1
"""A cut moves by at most this share of a fragment to reach the end of a block or a parameter."""
_OWN_FRAGMENT = 0.25
"""Parameters outside the blocks get fragments of their own from this share of the mean fragment on."""


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of the parameter ``name``, in row-major order whatever its strides."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fragment:
    """Slices that synchronise together; its flat layout is their concatenation, ``numel`` elements."""

    index: int
    slices: tuple[Slice, ...]
    numel: int


@dataclass(frozen=True)
class FragmentPlan:
    """All fragments in order, and a sha256 (32 bytes) over names, shapes and ranges: what two peers
    compare."""

    fragments: tuple[Fragment, ...]
    digest: bytes

    @property
    def numel(self) -> int:
        """Trainable elements of the module."""
        return sum(fragment.numel for fragment in self.fragments)


@dataclass(frozen=True)
class _Unit:
    """A parameter on the tape. ``block``: the repeated block it belongs to, None outside."""

    name: str
    numel: int
    block: int | None


def plan_fragments(module: nn.Module, count: int) -> FragmentPlan:
    """Cut the trainable parameters of ``module`` into exactly ``count`` fragments.

    Raises ``ConfigError`` if there are fewer trainable elements than fragments.
    """
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in named_parameters(module).items()
        if parameter.requires_grad and parameter.numel() > 0
    }
    units = list(_units(module))
    total = sum(unit.numel for unit in units)
    if count < 1 or total < count:
        raise ConfigError(
            "the run's settings",
            "fragments",
            f"cannot cut {total} trainable parameters into {count} fragments; use 1 to {max(1, total)}",
        )
    pieces = _cut_apart(units, count) or _cut_together(units, count)
    fragments = tuple(
        Fragment(index, tuple(slices), sum(part.stop - part.start for part in slices))
        for index, slices in enumerate(pieces)
    )
    return FragmentPlan(fragments, _digest(fragments, shapes))


def _digest(fragments: Sequence[Fragment], shapes: dict[str, tuple[int, ...]]) -> bytes:
    table = [
        [[part.name, list(shapes[part.name]), part.start, part.stop] for part in fragment.slices]
        for fragment in fragments
    ]
    return hashlib.sha256(b"p2p-co2 plan\0" + json.dumps(table, separators=(",", ":")).encode()).digest()


def _units(module: nn.Module) -> Iterator[_Unit]:
    """Trainable parameters in the module's order, tied ones once."""
    prefix = _block_list(module)
    for name, parameter in named_parameters(module).items():
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        key = name[len(prefix) :].split(".", 1)[0] if prefix is not None and name.startswith(prefix) else ""
        yield _Unit(name, parameter.numel(), int(key) if key.isdigit() else None)


def _block_list(module: nn.Module) -> str | None:
    """The name, with its last dot, of the longest list of children of one class; None if there is none.

    A list inside a block of another list (the experts of a layer, say) does not count: blocks are the
    outermost repetition.
    """
    best: str | None = None
    longest = 1
    outer: list[str] = []
    for name, candidate in named_modules(module):
        if not isinstance(candidate, nn.ModuleList | nn.Sequential):
            continue
        if any(name.startswith(prefix) for prefix in outer):
            continue
        children = [(key, unwrapped(child)) for key, child in candidate.named_children()]
        if len(children) < 2 or len({type(child) for _, child in children}) > 1:
            continue
        if not all(key.isdigit() for key, _ in children):
            continue  # a Sequential with names: positions would be guesses
        if not any(parameter.requires_grad for parameter in candidate.parameters()):
            continue
        prefix = f"{name}." if name else ""
        outer.append(prefix)
        if len(children) > longest:
            best, longest = prefix, len(children)
    return best


def _strided(units: Sequence[_Unit], count: int) -> list[_Unit]:
    """Blocks in the order 0, P, 2 P, ..., 1, P + 1, ...: an even cut of equal blocks then is l mod P."""
    numbers = {number: rank for rank, number in enumerate(sorted({unit.block or 0 for unit in units}))}
    ranks = [numbers[unit.block or 0] for unit in units]
    order = sorted(range(len(units)), key=lambda at: (ranks[at] % count, ranks[at], at))
    return [units[at] for at in order]


def _cut_apart(units: Sequence[_Unit], count: int) -> list[list[Slice]] | None:
    """Blocks and the rest as fragments of their own, or None where that would make uneven fragments."""
    blocks = [unit for unit in units if unit.block is not None]
    rest = [unit for unit in units if unit.block is None]
    in_blocks, in_rest = (sum(unit.numel for unit in part) for part in (blocks, rest))
    mean = (in_blocks + in_rest) / count
    if count < 2 or not blocks or in_rest < _OWN_FRAGMENT * mean:
        return None
    possible = [
        rest_count
        for rest_count in range(1, count)
        if rest_count <= in_rest and count - rest_count <= in_blocks
    ]
    if not possible:
        return None
    rest_count = min(possible, key=lambda own: max(in_rest / own, in_blocks / (count - own)))
    block_count = count - rest_count
    for snap in (_SNAP, 0.0):
        pieces = _cut(_strided(blocks, block_count), block_count, snap) + _cut(rest, rest_count, snap)
        if max(_sizes(pieces)) <= MAX_OVER_MEAN * mean:
            return pieces
    return None


def _cut_together(units: Sequence[_Unit], count: int) -> list[list[Slice]]:
    """One tape for everything: blocks first, strided, then the rest."""
    blocks = [unit for unit in units if unit.block is not None]
    rest = [unit for unit in units if unit.block is None]
    return _cut([*_strided(blocks, count), *rest], count, _SNAP)


def _sizes(pieces: Sequence[Sequence[Slice]]) -> list[int]:
    return [sum(part.stop - part.start for part in piece) for piece in pieces]


def _cut(tape: Sequence[_Unit], count: int, snap: float) -> list[list[Slice]]:
    """Cut a tape of at least ``count`` elements into ``count`` near-equal runs."""
    ends = [0]
    for unit in tape:
        ends.append(ends[-1] + unit.numel)
    total = ends[-1]
    block_ends = [
        end
        for end, before, after in zip(ends[1:], tape, tape[1:], strict=False)
        if before.block != after.block
    ]
    reach = snap * total / count
    cuts = [0]
    for index in range(1, count):
        exact = index * total // count
        near = [end for end in block_ends if abs(end - exact) <= reach]
        near = near or [end for end in ends if abs(end - exact) <= reach]
        cuts.append(min(near, key=lambda end: abs(end - exact)) if near else exact)
    cuts.append(total)
    return [_slices(tape, ends, start, stop) for start, stop in pairwise(cuts)]


def _slices(tape: Sequence[_Unit], ends: Sequence[int], start: int, stop: int) -> list[Slice]:
    return [
        Slice(unit.name, max(start, begin) - begin, min(stop, end) - begin)
        for unit, begin, end in zip(tape, ends, ends[1:], strict=False)
        if begin < stop and end > start
    ]
