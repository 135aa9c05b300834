"""Live parameters seen as fragments: flat fp32 snapshots out, merges in.

Laws: a snapshot is a copy, so what crosses to another thread never changes under it; a merge touches only
its fragment's elements, in place, so the inner optimizer keeps its references and its state; a merge is
computed in fp32 (fp64 for parameters of that) and rounded once to the parameter's dtype. All slices are one
call of torch's where they can be: after each call a thread waits for the interpreter, up to 5 ms if the
network's thread has it. On an accelerator a copy comes after the steps that are queued there, and how long
they took is told apart from the copy.

Price: with 16-bit parameters a merge smaller than half a last place is rounded away. Keep fp32 parameters
and use autocast if that matters. A parameter whose memory is not contiguous is copied as a whole for each
merge.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.fragments.large_tensor import large_tensor
from p2p_co2.tensors.fragments.names import named_parameters
from p2p_co2.tensors.fragments.plan import FragmentPlan, Slice
from p2p_co2.tensors.outer import Merge


class LiveParameters:
    """The parameters of ``module`` by fragment of ``plan``, which was made from the same module.

    Raises ``LocalProtocolError`` if the plan names a parameter that the module lacks. Not thread-safe: the
    training thread owns it.
    """

    def __init__(self, module: nn.Module, plan: FragmentPlan) -> None:
        self._plan = plan
        self._computing_s = 0.0
        self._waited_for = set[torch.device]()
        """Since that was taken: what is queued there now is the copies' own work."""
        self._parameters = named_parameters(module)
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
        if len(devices) == 1 and next(iter(devices)).type != "cpu":
            views = [
                self._parameters[part.name].reshape(-1)[part.start : part.stop] for part in fragment.slices
            ]
            return out.copy_(torch.cat([view.float() for view in views]))
        sources = [
            parameter.reshape(-1)[part.start : part.stop] for parameter, part, _ in self._slices(index)
        ]
        torch._foreach_copy_([out[at] for _, _, at in self._slices(index)], sources)
        return out

    @torch.no_grad()
    def merge_(self, index: int, merge: Merge) -> None:
        """``live = keep * live + addend`` for fragment ``index``, in place; ``addend`` is fp32 [numel]."""
        self._check(index, merge.addend)
        self._let_compute(index)
        views, addends = list[Tensor](), list[Tensor]()
        for parameter, part, at, addend in self._with(index, merge.addend):
            flat = parameter.view(-1) if parameter.is_contiguous() else parameter.reshape(-1)
            view = flat[part.start : part.stop]
            if view.dtype == torch.float32 and parameter.is_contiguous():
                views.append(view)
                addends.append(addend[at])
            elif view.dtype in (torch.float32, torch.float64):
                (view if merge.keep == 1.0 else view.mul_(merge.keep)).add_(addend[at])
            else:
                view.copy_(
                    (view.float() if merge.keep == 1.0 else view.float() * merge.keep).add_(addend[at])
                )
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))
        if views and merge.keep != 1.0:
            torch._foreach_mul_(views, merge.keep)
        if views:
            torch._foreach_add_(views, addends)

    @torch.no_grad()
    def load_(self, index: int, values: Tensor) -> None:
        """Overwrite fragment ``index`` with ``values`` (fp32 [numel]), in place."""
        self._check(index, values)
        self._let_compute(index)
        for parameter, part, at, source in self._with(index, values):
            flat = parameter.view(-1) if parameter.is_contiguous() else parameter.reshape(-1)
            flat[part.start : part.stop].copy_(source[at])
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Whatever is loaded meanwhile, afterwards the parameters hold what they hold now: one copy."""
        kept = {name: parameter.detach().clone() for name, parameter in self._exchanged()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._exchanged():
                    parameter.copy_(kept[name])

    def _exchanged(self) -> Iterator[tuple[str, nn.Parameter]]:
        names = {part.name: None for fragment in self._plan.fragments for part in fragment.slices}
        for name in names:
            yield name, self._parameters[name]

    def take_computing_s(self) -> float:
        """Seconds since this was asked last for which copies waited until accelerators had computed what
        training had queued there: time that training used, not the exchange."""
        taken_s, self._computing_s = self._computing_s, 0.0
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
            if device.type != "cpu" and device not in self._waited_for:
                began_at = time.monotonic()
                torch.accelerator.current_stream(device).synchronize()
                self._computing_s += time.monotonic() - began_at
                self._waited_for.add(device)

    def _check(self, index: int, values: Tensor) -> None:
        numel = self._plan.fragments[index].numel
        if values.dtype != torch.float32 or values.shape != (numel,):
            raise LocalProtocolError(
                f"fragment {index} is float32 ({numel},), not {values.dtype} {tuple(values.shape)}"
            )

    def _slices(self, index: int) -> Iterator[tuple[nn.Parameter, Slice, slice]]:
        """Parameter, its slice, and where that lies in the flat fragment."""
        at = 0
        for part in self._plan.fragments[index].slices:
            stop = at + part.stop - part.start
            yield self._parameters[part.name], part, slice(at, stop)
            at = stop

    def _with(self, index: int, values: Tensor) -> Iterator[tuple[nn.Parameter, Slice, slice, Tensor]]:
        """As ``_slices``, with ``values`` on the parameter's device: one transfer per device."""
        there: dict[torch.device, Tensor] = {}
        for parameter, part, at in self._slices(index):
            if parameter.device not in there:
                there[parameter.device] = values.to(parameter.device)
            yield parameter, part, at, there[parameter.device]
