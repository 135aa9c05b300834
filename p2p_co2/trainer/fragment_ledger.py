"""The agreed state of one fragment, and what this peer has in flight for it. Tensors only: no thread, no
network, no clock.

One ``FragmentLedger`` lives on the worker thread. It turns a snapshot of live parameters into an offer, and a
committed mean into the next agreed state plus a ``Merge`` that the training thread applies whenever it next
passes by.

Laws: the state changes only in ``commit`` and ``adopt``; ``abort`` changes nothing that is agreed; an offer
that did not reach the mean, wholly or in some parts, goes back into this peer's live parameters or stays
there, so that its work is offered again (ALGORITHMS.md, laws 2 and 5). Residuals of error feedback advance
only where the offer was counted.

Memory, in copies of the fragment in fp32: state 2 (params, momentum), in flight 1, residual 1 if error
feedback is on, and under "co2" and "eager" the older params until the next boundary 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2 import outer
from p2p_co2.codec import Codec
from p2p_co2.codec.base import CHUNK_BLOCKS
from p2p_co2.codec.feedback import error_energy, error_ratio
from p2p_co2.config import RunConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.outer import Merge, OuterState, StepReport


@dataclass(frozen=True)
class Contribution:
    """One part of an agreed mean: its block range, and the weight of each peer whose slice is in it."""

    start_block: int
    stop_block: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class EncodedOffer:
    """An outer gradient ready to travel. ``payload``: uint8 [blocks * block_bytes], host memory."""

    round: int
    base_version: int
    payload: bytes
    relative_error: float
    merge: Merge | None
    """Rules "co2" and "eager": how the live parameters meet the newest agreed ones at this boundary."""


@dataclass(frozen=True)
class Applied:
    """What a commit did: the merge for the live parameters, if any, and the figures of the step."""

    merge: Merge | None
    report: StepReport
    contributed: bool
    """True if this peer's offer is in every part of the mean."""
    refused: str
    """Why the mean was not applied although it was agreed ("" if it was): every peer refuses alike."""


@dataclass
class _InFlight:
    round: int
    base_version: int
    snapshot: Tensor | None
    gradient: Tensor | None
    residual: Tensor | None


class FragmentLedger:
    """See the module. ``start``: the fragment's values at version 0, fp32 [n]; or a ``state`` to go on
    from."""

    def __init__(self, run: RunConfig, codec: Codec, peer: str, state: OuterState) -> None:
        self._run, self._codec, self._peer = run, codec, peer
        self._delayed = run.outer.rule in {"co2", "eager"}
        self.state = state
        self.residual: Tensor | None = None
        if run.codec.error_feedback:
            self.residual = torch.zeros_like(state.params)
        self._in_flight: _InFlight | None = None
        self._measured_from = state
        """Rules "co2" and "eager": the state from which the live parameters set out at the last boundary."""
        self._correction: Tensor | None = None
        self._stale: tuple[Tensor, float, float] | None = None
        """Rule "eager": this peer's gradient in the newest mean, with the gap and its share there."""

    def offer(self, snapshot: Tensor) -> EncodedOffer:
        """Encode what this peer learned. ``snapshot``: fp32 [n], live parameters at the schedule point; owned
        from now on."""
        if self._in_flight is not None:
            raise LocalProtocolError(f"round {self._in_flight.round} is still in flight")
        base = self._measured_from if self._delayed else self.state
        gradient = torch.empty_like(snapshot) if self._delayed else None
        residual = torch.empty_like(snapshot) if self.residual is not None else None
        payload, error = self._encode(base, snapshot, gradient, residual)
        merge: Merge | None = None
        if gradient is not None:
            correction = None
            if self._run.outer.rule == "eager" and self._stale is not None:
                stale, gap, share = self._stale
                correction = outer.eager_correction(self._run.outer, gap, share, gradient, stale)
            merge = outer.boundary_merge(
                self._run.outer, self.state, snapshot, None, correction, out=snapshot
            )
            self._correction, self._stale, self._measured_from = correction, None, self.state
        self._in_flight = _InFlight(
            round=self.state.version + 1,
            base_version=base.version,
            snapshot=None if self._delayed else snapshot,
            gradient=gradient,
            residual=residual,
        )
        return EncodedOffer(self._in_flight.round, base.version, payload, error, merge)

    def commit(self, round_: int, base_version: int, mean: Tensor, parts: Sequence[Contribution]) -> Applied:
        """Take the outer step of an agreed mean. ``mean``: fp32 [n], decoded, owned from now on;
        ``base_version`` the oldest in the group.

        Raises ``LocalProtocolError`` if ``round_`` is not the next version.
        """
        if round_ != self.state.version + 1:
            raise LocalProtocolError(f"round {round_} cannot follow version {self.state.version}")
        old, refused = self.state, ""
        try:
            new, report = outer.step(self._run.outer, old, mean, min(base_version, old.version), out=mean)
        except RemoteProtocolError as error:
            # Every peer holds the same bits, so every peer skips this step and stays agreed.
            refused = str(error)
            new, report = old._replace(version=round_), StepReport(1.0, float("inf"), 0.0, 0.0)
        mine = self._in_flight if self._in_flight is not None and self._in_flight.round == round_ else None
        missed = self._missed(parts, refused)
        merge = self._merge_after(old, new, mine, missed)
        if mine is not None:
            self._advance_residual(mine, missed)
            self._remember_stale(mine, report, parts, missed)
            self._in_flight = None
        self.state = new
        if not self._delayed:
            self._measured_from = new
        return Applied(merge, report, mine is not None and not missed, refused)

    def abort(self, round_: int) -> Merge | None:
        """The round changed nothing. Under "co2" and "eager" the work that was taken out of the live
        parameters returns."""
        mine = self._in_flight
        if mine is None or mine.round != round_:
            return None
        self._in_flight = None
        return Merge(1.0, -mine.gradient) if mine.gradient is not None else None

    def adopt(self, state: OuterState) -> Merge:
        """Replace the agreed state by a donor's; all that this peer learned since its own stays in its live
        parameters."""
        origin = self._measured_from if self._delayed else self.state
        addend = state.params - origin.params
        mine, self._in_flight = self._in_flight, None
        if mine is not None and mine.gradient is not None:
            addend.sub_(mine.gradient)
        if self._correction is not None:
            addend.add_(self._correction)
        self._correction, self._stale = None, None
        self.state = self._measured_from = state
        return Merge(1.0, addend)

    # ---- parts of the above

    def _encode(
        self, base: OuterState, snapshot: Tensor, gradient: Tensor | None, residual: Tensor | None
    ) -> tuple[bytes, float]:
        """The payload of ``base.params - snapshot`` and its relative error; fills ``gradient`` and the new
        ``residual`` if given. Piece by piece: nothing of the fragment's size is made that is not kept."""
        size, width = snapshot.numel(), CHUNK_BLOCKS * self._codec.block_values
        payload = torch.empty(self._codec.payload_bytes(size), dtype=torch.uint8)
        scratch = torch.empty(self._codec.blocks(min(width, size)) * self._codec.block_values)
        lost = energy = 0.0
        for start in range(0, size, width):
            at = slice(start, min(start + width, size))
            correction = None if self._correction is None else self._correction[at]
            wanted = outer.outer_gradient(base._replace(params=base.params[at]), snapshot[at], correction)
            if gradient is not None:
                gradient[at] = wanted
            if self.residual is not None:
                wanted += self.residual[at] * self._run.codec.error_feedback_decay
            first, blocks = start // self._codec.block_values, self._codec.blocks(len(wanted))
            rows = payload[first * self._codec.block_bytes : (first + blocks) * self._codec.block_bytes]
            self._codec.encode(wanted, rows)
            decoded = self._codec.decode(rows, scratch[: blocks * self._codec.block_values])[: len(wanted)]
            if residual is not None:
                torch.sub(wanted, decoded, out=residual[at])
            piece = error_energy(wanted, decoded)
            lost, energy = lost + piece[0], energy + piece[1]
        return payload.numpy().tobytes(), error_ratio(lost, energy)

    def _missed(self, parts: Sequence[Contribution], refused: str) -> list[slice]:
        size = self.state.params.numel()
        if refused:
            return [slice(0, size)]
        values = self._codec.block_values
        return [
            slice(part.start_block * values, min(size, part.stop_block * values))
            for part in parts
            if self._peer not in part.weights and part.start_block * values < size
        ]

    def _merge_after(
        self, old: OuterState, new: OuterState, mine: _InFlight | None, missed: list[slice]
    ) -> Merge | None:
        if self._delayed:
            lost = (
                None if mine is None or mine.gradient is None else outer.lost_work_of(mine.gradient, missed)
            )
            return None if lost is None else Merge(1.0, lost.neg_())
        snapshot = None if mine is None else mine.snapshot
        return outer.merge(self._run.outer, old, new, snapshot, missed, out=snapshot)

    def _advance_residual(self, mine: _InFlight, missed: list[slice]) -> None:
        if self.residual is None or mine.residual is None:
            return
        for part in missed:
            mine.residual[part] = self.residual[part]
        self.residual = mine.residual

    def _remember_stale(
        self, mine: _InFlight, report: StepReport, parts: Sequence[Contribution], missed: list[slice]
    ) -> None:
        if self._run.outer.rule != "eager" or missed or mine.gradient is None:
            return
        weights = parts[0].weights
        share = weights[self._peer] / sum(weights.values())
        self._stale = (mine.gradient, report.gap, share)
