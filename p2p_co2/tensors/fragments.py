"""A module cut into fragments, the same way on every peer, and its live parameters seen through them.

Laws of the cut: every element of every trainable parameter is in exactly one slice, tied weights once under
their first name. The same module gives the same plan and the same ``digest`` on every machine. No fragment is
larger than 1.5 times the mean, or one element above it.

How: the parameters are laid out on a tape and the tape is cut. Transformer blocks are strided, block l beside
blocks l + P, l + 2 P and so on (Streaming DiLoCo, arXiv 2501.18512, section 2.1). What is outside the blocks
has a tape and fragments of its own. Cuts are even, so that traffic is the same at every schedule point. They
move to the end of a block or a parameter when one is near.

Laws of the live parameters: a snapshot is a copy. A merge touches only its fragment's elements, in place, so
the inner optimizer keeps its references and its state. It is computed in fp32 (fp64 for parameters of that)
and rounded once to the parameter's dtype. With 16-bit parameters a merge below half a last place is lost.
Reasons: ``docs/design/memory.md``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.errors import ConfigError, LocalProtocolError
from p2p_co2.system.memory import POOLED_BYTES, large_buffer
from p2p_co2.tensors.device import await_computed, is_accelerator
from p2p_co2.tensors.names import named_modules, named_parameters, trained_parameters, unwrapped
from p2p_co2.tensors.outer import Merge
from p2p_co2.tensors.private import class_of

MAX_OVER_MEAN = 1.5
_SNAP = 0.1
"""A cut moves by at most this share of a fragment to reach the end of a block or a parameter."""
_OWN_FRAGMENT = 0.25
"""Parameters outside the blocks get fragments of their own from this share of the mean fragment on."""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements ``start`` to ``stop`` of the parameter ``name``, in row-major order whatever its strides."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fragment:
    """Slices that synchronise together; its flat layout is their concatenation, ``numel`` elements."""

    index: int
    slices: tuple[ParameterSlice, ...]
    numel: int

    def parts(self) -> Iterator[tuple[ParameterSlice, slice]]:
        """Its slices, and where each lies in the flat layout."""
        at = 0
        for part in self.slices:
            stop = at + part.stop - part.start
            yield part, slice(at, stop)
            at = stop


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
    shapes = {name: tuple(parameter.shape) for name, parameter in trained_parameters(module).items()}
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
    return FragmentPlan(fragments, _table_digest(plan_table(fragments, shapes)))


Table = list[list[list[Any]]]


def plan_table(fragments: Sequence[Fragment], shapes: Mapping[str, tuple[int, ...]]) -> Table:
    """A plan's ``fragments`` as JSON: of each the slices, [name, shape, start, stop] each."""
    return [
        [[part.name, list(shapes[part.name]), part.start, part.stop] for part in fragment.slices]
        for fragment in fragments
    ]


def plan_of_table(table: Table) -> FragmentPlan:
    """The plan of which ``plan_table`` made ``table``; its digest is the table's. Raises ``ValueError`` or
    ``TypeError`` if it is none."""
    fragments = list[Fragment]()
    for index, rows in enumerate(table):
        parts = tuple(ParameterSlice(str(name), int(start), int(stop)) for name, _, start, stop in rows)
        fragments.append(Fragment(index, parts, sum(part.stop - part.start for part in parts)))
    return FragmentPlan(tuple(fragments), _table_digest(table))


def named_values(
    plan: FragmentPlan, shapes: Mapping[str, tuple[int, ...]], flat: Sequence[Tensor]
) -> dict[str, Tensor]:
    """A copy of the values of all fragments (``flat``, fp32 [numel] each) by parameter name: fp32, in the
    parameter's shape, host memory."""
    named = dict[str, Tensor]()
    for fragment, values in zip(plan.fragments, flat, strict=True):
        for part, at in fragment.parts():
            if part.name not in named:
                named[part.name] = torch.empty(shapes[part.name], dtype=torch.float32, device="cpu")
            named[part.name].view(-1)[part.start : part.stop] = values[at]
    return named


def _table_digest(table: Table) -> bytes:
    return hashlib.sha256(b"p2p-co2 plan\0" + json.dumps(table, separators=(",", ":")).encode()).digest()


def _units(module: nn.Module) -> Iterator[_Unit]:
    """Trainable parameters in the module's order, tied ones once."""
    prefix = _block_list(module)
    for name, parameter in trained_parameters(module).items():
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
        if len(children) < 2 or len({class_of(child) for _, child in children}) > 1:
            continue
        if not all(key.isdigit() for key, _ in children):
            continue  # a Sequential with names: positions would be guesses
        if not any(parameter.requires_grad for parameter in candidate.parameters()):
            continue
        prefix = f"{name}." if name else ""
        outer.append(prefix)
        if len(children) > longest:
            best = prefix
            longest = len(children)
    return best


def _strided(units: Sequence[_Unit], count: int) -> list[_Unit]:
    """Blocks in the order 0, P, 2 P, ..., 1, P + 1, ...: an even cut of equal blocks then is l mod P."""
    numbers = {number: rank for rank, number in enumerate(sorted({unit.block or 0 for unit in units}))}
    ranks = [numbers[unit.block or 0] for unit in units]
    order = sorted(range(len(units)), key=lambda at: (ranks[at] % count, ranks[at], at))
    return [units[at] for at in order]


def _cut_apart(units: Sequence[_Unit], count: int) -> list[list[ParameterSlice]] | None:
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


def _cut_together(units: Sequence[_Unit], count: int) -> list[list[ParameterSlice]]:
    """One tape for everything: blocks first, strided, then the rest."""
    blocks = [unit for unit in units if unit.block is not None]
    rest = [unit for unit in units if unit.block is None]
    return _cut([*_strided(blocks, count), *rest], count, _SNAP)


def _sizes(pieces: Sequence[Sequence[ParameterSlice]]) -> list[int]:
    return [sum(part.stop - part.start for part in piece) for piece in pieces]


def _cut(tape: Sequence[_Unit], count: int, snap: float) -> list[list[ParameterSlice]]:
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


def _slices(tape: Sequence[_Unit], ends: Sequence[int], start: int, stop: int) -> list[ParameterSlice]:
    return [
        ParameterSlice(unit.name, max(start, begin) - begin, min(stop, end) - begin)
        for unit, begin, end in zip(tape, ends, ends[1:], strict=False)
        if begin < stop and end > start
    ]


# ---- the live parameters


def large_tensor(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor [numel] on the CPU that holds anything. Any thread. Its memory is used again round after
    round: fresh pages would cost each round more than all its arithmetic (``system.memory``)."""
    size_bytes = numel * dtype.itemsize
    if size_bytes < POOLED_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(large_buffer(size_bytes), dtype=dtype)


class LiveParameters:
    """The parameters of ``module`` (or such, by name) by fragment of ``plan``, which was made from the same
    module.

    Raises ``LocalProtocolError`` if the plan names a parameter that the module lacks. Not thread-safe: the
    training thread owns it.
    """

    def __init__(self, module: nn.Module | Mapping[str, Tensor], plan: FragmentPlan) -> None:
        self._plan = plan
        self.computing_s = 0.0
        self.copies: Callable[[str], Sequence[Tensor]] = lambda name: ()
        """Tensors that lie beside a parameter, by its name, in its shape: what moves it moves them, too."""
        self._waited_for = set[torch.device]()
        """Since that was taken: what is queued there now is the copies' own work."""
        self._parameters: Mapping[str, Tensor] = (
            named_parameters(module) if isinstance(module, nn.Module) else module
        )
        for fragment in self._plan.fragments:
            for part in fragment.slices:
                parameter = self._parameters.get(part.name)
                if parameter is None or parameter.numel() < part.stop:
                    raise LocalProtocolError(f"the fragment plan is for another module: {part.name}")

    @torch.no_grad()
    def snapshot(self, index: int, out: Tensor | None = None) -> Tensor:
        """A copy of fragment ``index``: fp32 [numel], host memory. ``out``, if given, is filled and returned.

        From an accelerator it is one transfer, after which the values are on the host.
        """
        fragment = self._plan.fragments[index]
        if out is None:
            out = large_tensor(fragment.numel)
        self._check(index, out)
        devices = self._let_compute(index)
        if len(devices) == 1 and is_accelerator(next(iter(devices))):
            views = [
                self._parameters[part.name].reshape(-1)[part.start : part.stop] for part in fragment.slices
            ]
            return out.copy_(torch.cat([view.float() for view in views]))
        sources = [
            parameter.reshape(-1)[part.start : part.stop] for parameter, part, _ in self._slices(index)
        ]
        if sources:
            torch._foreach_copy_([out[at] for _, _, at in self._slices(index)], sources)
        return out

    @torch.no_grad()
    def merge_(self, index: int, merge: Merge) -> None:
        """``live = keep * live + addend`` for fragment ``index``, in place; with ``keep`` 0 whatever was
        there. ``addend``: fp32 [numel]."""
        self._check(index, merge.addend)
        self._let_compute(index)
        keep = merge.keep
        views = list[Tensor]()
        addends = list[Tensor]()
        for parameter, part, at, addend in self._with(index, merge.addend):
            self._move_copies(parameter, part, keep, addend[at])
            flat = parameter.view(-1) if parameter.is_contiguous() else parameter.reshape(-1)
            view = flat[part.start : part.stop]
            if keep == 0.0:
                view.copy_(addend[at])
            elif view.dtype == torch.float32 and parameter.is_contiguous():
                views.append(view)
                addends.append(addend[at])
            elif view.dtype in (torch.float32, torch.float64):
                (view if keep == 1.0 else view.mul_(keep)).add_(addend[at])
            else:
                view.copy_((view.float() if keep == 1.0 else view.float() * keep).add_(addend[at]))
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))
        if views and keep != 1.0:
            torch._foreach_mul_(views, keep)
        if views:
            torch._foreach_add_(views, addends)

    def load_(self, index: int, values: Tensor) -> None:
        """Overwrite fragment ``index`` with ``values`` (fp32 [numel]), in place."""
        LiveParameters.merge_(self, index, Merge(0.0, values))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Whatever is loaded meanwhile, afterwards the parameters hold what they hold now: one copy."""
        kept = {name: parameter.detach().clone() for name, parameter in self._exchanged()}
        copies, self.copies = self.copies, lambda name: ()
        try:
            yield
        finally:
            self.copies = copies
            with torch.no_grad():
                for name, parameter in self._exchanged():
                    parameter.copy_(kept[name])

    def _move_copies(self, parameter: Tensor, part: ParameterSlice, keep: float, addend: Tensor) -> None:
        """By what is about to be added to ``part`` of the parameter."""
        at = slice(part.start, part.stop)
        for copy in self.copies(part.name):
            flat = copy.reshape(-1)  # a view where it can be
            moved = addend if keep == 1.0 else parameter.reshape(-1)[at].float() * (keep - 1.0) + addend
            flat[at].add_(moved.to(copy.device))
            if not copy.is_contiguous():
                copy.copy_(flat.view(copy.shape))

    def slices(self, index: int) -> Sequence[ParameterSlice]:
        """Of fragment ``index``: what of it lies here."""
        return self._plan.fragments[index].slices

    def _exchanged(self) -> Iterator[tuple[str, Tensor]]:
        names = {part.name: None for fragment in self._plan.fragments for part in fragment.slices}
        for name in names:
            yield name, self._parameters[name]

    # ---- the inner optimizer's state, which lies where the parameters do

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Its ``state_dict``, whose tensors ``copy_`` reads from now on."""
        return optimizer.state_dict()

    def copy_(self, out: Tensor, tensor: Tensor) -> None:
        """The values of one of them, in host memory."""
        out.copy_(tensor.detach())

    def own_state(
        self, state_dict: Mapping[str, Any], optimizer: Optimizer, dtypes: Sequence[str], keeps_rate: bool
    ) -> Mapping[str, Any]:
        """What of a saved ``state_dict`` is for this process's ``optimizer``; arguments as
        ``resuming.take_over`` has them."""
        return state_dict

    def forget_elsewhere(self, index: int) -> None:
        """The inner optimizer's state of what fragment ``index`` touches is dropped here."""

    # ---- time

    def take_computing_s(self) -> float:
        """Seconds, since this was asked last, for which copies waited for what training had queued on
        accelerators: training's time, not the exchange's."""
        taken_s = self.computing_s
        self.computing_s = 0.0
        self._waited_for.clear()
        return taken_s

    def _let_compute(self, index: int) -> set[torch.device]:
        """Wait for the queued work of the devices on which the fragment lies; returns them."""
        devices = {self._parameters[part.name].device for part in self._plan.fragments[index].slices}
        self.await_computed(devices)
        return devices

    def await_computed(self, devices: Iterable[torch.device]) -> None:
        """Wait until they have computed what is queued there; that time is training's."""
        for device in devices:
            if is_accelerator(device) and device not in self._waited_for:
                began_at = time.monotonic()
                await_computed(device)
                self.computing_s += time.monotonic() - began_at
                self._waited_for.add(device)

    def _check(self, index: int, values: Tensor) -> None:
        numel = self._plan.fragments[index].numel
        if values.dtype != torch.float32 or values.shape != (numel,):
            raise LocalProtocolError(
                f"fragment {index} is float32 ({numel},), not {values.dtype} {tuple(values.shape)}"
            )

    def _slices(self, index: int) -> Iterator[tuple[Tensor, ParameterSlice, slice]]:
        """Parameter, its slice, and where that lies in the flat fragment."""
        for part, at in self._plan.fragments[index].parts():
            yield self._parameters[part.name], part, at

    def _with(self, index: int, values: Tensor) -> Iterator[tuple[Tensor, ParameterSlice, slice, Tensor]]:
        """As ``_slices``, with ``values`` on the parameter's device: one transfer per device."""
        there: dict[torch.device, Tensor] = {}
        for parameter, part, at in self._slices(index):
            if parameter.device not in there:
                there[parameter.device] = values.to(parameter.device)
            yield parameter, part, at, there[parameter.device]
