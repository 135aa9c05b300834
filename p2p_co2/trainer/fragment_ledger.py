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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2 import outer
from p2p_co2.codec import Codec
from p2p_co2.codec.base import CHUNK_BLOCKS
from p2p_co2.codec.feedback import error_energy, error_ratio
from p2p_co2.config import RunConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.memory import Buffer
from p2p_co2.node.ledger import PartWeights
from p2p_co2.outer import Merge, OuterState, StepReport


@dataclass(frozen=True)
class EncodedOffer:
    """An outer gradient ready to travel. ``payload``: uint8 [blocks * block_bytes], host memory."""

    round: int
    base_version: int
    payload: Buffer
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
    share: float
    """Of this peer's offer, how much is in the mean: 0 to 1."""
    refused: str
    """Why the mean was not applied although it was agreed ("" if it was): every peer refuses alike."""


@dataclass(frozen=True)
class Rebase:
    """How live parameters that set out from ``origin`` are measured from ``params`` instead. fp32 [n] each,
    never changed: held, not copied."""

    origin: Tensor
    params: Tensor
    gradient: Tensor | None
    correction: Tensor | None

    def addend(self, at: slice) -> Tensor:
        """What the live parameters gain there; a new tensor."""
        addend = self.params[at] - self.origin[at]
        if self.gradient is not None:
            addend.sub_(self.gradient[at])
        return addend if self.correction is None else addend.add_(self.correction[at])


@dataclass
class _InFlight:
    round: int
    weight: float
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
        self._withdrawn: _InFlight | None = None
        """The last offer for the next version that was given up: a commit may still turn out to hold it."""
        self.is_resumed = False
        """Whether live parameters hold work that an earlier process may have offered."""
        self._measured_from = state
        """Rules "co2" and "eager": the state from which the live parameters set out at the last boundary."""
        self._correction: Tensor | None = None
        self._stale: tuple[Tensor, float, float] | None = None
        """Rule "eager": this peer's gradient in the newest mean, with the gap and its share there."""

    def offer(self, snapshot: Tensor, weight: float) -> EncodedOffer:
        """Encode what this peer learned. ``snapshot``: fp32 [n], live parameters at the schedule point; owned
        from now on. ``weight``: the offer's, which tells it from other attempts at the same round. Raises
        ``ValueError`` if a value is not finite."""
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
            weight=weight,
            base_version=base.version,
            snapshot=None if self._delayed else snapshot,
            gradient=gradient,
            residual=residual,
        )
        return EncodedOffer(self._in_flight.round, base.version, payload, error, merge)

    def commit(self, round_: int, base_version: int, mean: Tensor, parts: Sequence[PartWeights]) -> Applied:
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
        mine, missed = self._mine(round_, parts), self._missed(parts, refused)
        merge = self._merge_after(old, new, mine, missed, parts)
        if mine is not None:
            self._advance_residual(mine, missed)
            self._remember_stale(mine, report, parts, missed)
        if mine is not None and not missed:
            self.is_resumed = False  # what an earlier process did was in this offer, at the latest
        self._in_flight = self._withdrawn = None
        self.state = new
        if not self._delayed:
            self._measured_from = new
        lost = sum(part.stop - part.start for part in missed) / self.state.params.numel()
        share = 0.0 if mine is None else 1.0 - lost
        return Applied(merge, report, mine is not None and not missed, share, refused)

    def abort(self, round_: int) -> tuple[bool, Merge | None]:
        """The round changed nothing: (whether an offer of ours ended, how live parameters take its work
        back). Under "co2" and "eager" the work had been taken out of them; otherwise it never left."""
        mine = self._in_flight
        if mine is None or mine.round != round_:
            return False, None
        self._in_flight, self._withdrawn = None, mine
        return True, Merge(1.0, -mine.gradient) if mine.gradient is not None else None

    def adopt(self, state: OuterState, parts: Sequence[PartWeights] | None = None) -> Merge:
        """Replace the agreed state by a donor's; what this peer learned and nobody counted stays in its live
        parameters. ``parts``: who is in the round after our state, None if its outcome is not known.

        A newer state may hold this peer's last offers. Where the outcome does not say, they are taken for
        counted: that costs at most the work of one offer, once. The other guess would count it twice, and a
        peer that is often late would pull the swarm its way again and again.
        """
        is_newer = state.version > self.state.version
        merge = Merge(1.0, self._rebase_on(state).addend(slice(None)))
        mine, missed, is_foreign = self._fate(parts) if is_newer else (None, [], False)
        if is_newer and (is_foreign or self.is_resumed):
            merge = Merge(0.0, state.params)  # as in ``_merge_after``
            self.is_resumed = False
        elif mine is not None:
            merge.addend.add_(self._counted_work(mine, missed))
            self._advance_residual(mine, missed)
        self._in_flight = self._withdrawn = None
        self._correction, self._stale = None, None
        self.state = self._measured_from = state
        return merge

    def reset(self) -> Merge:
        """Start again from the agreed state; what this peer learned since is dropped."""
        self._in_flight = self._withdrawn = None
        self._correction, self._stale, self._measured_from = None, None, self.state
        return Merge(0.0, self.state.params)

    def rebase(self) -> Rebase | None:
        """What to add to the live parameters so that they can be saved beside ``state``: a resumed peer
        knows neither what was in flight nor an older state. None if they fit as they are."""
        return self._rebase_on(self.state) if self._delayed else None

    # ---- parts of the above

    def _encode(
        self, base: OuterState, snapshot: Tensor, gradient: Tensor | None, residual: Tensor | None
    ) -> tuple[Buffer, float]:
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
        return payload.numpy().data, error_ratio(lost, energy)

    def _rebase_on(self, state: OuterState) -> Rebase:
        """Added to live parameters, keeps all work of this peer and measures it from ``state``."""
        origin = self._measured_from if self._delayed else self.state
        gradient = None if self._in_flight is None else self._in_flight.gradient
        return Rebase(origin.params, state.params, gradient, self._correction)

    def _mine(self, round_: int, parts: Sequence[PartWeights]) -> _InFlight | None:
        """Which of this peer's offers the mean is about."""
        mine = [offer for offer in (self._in_flight, self._withdrawn) if offer and offer.round == round_]
        weights = {part.weights[self._peer] for part in parts if self._peer in part.weights}
        if not weights:
            return mine[0] if mine and mine[0] is self._in_flight else None
        return next((offer for offer in mine if weights == {offer.weight}), None)

    def _fate(self, parts: Sequence[PartWeights] | None) -> tuple[_InFlight | None, list[slice], bool]:
        """Of the round after our state: our offer that was counted or may have been, where it was missed, and
        whether one was counted that we do not know."""
        if parts is None:
            return self._in_flight or self._withdrawn, [], False
        if not any(self._peer in part.weights for part in parts):
            return None, [], False
        mine = self._mine(self.state.version + 1, parts)
        return mine, self._missed(parts, ""), mine is None

    def _counted_work(self, mine: _InFlight, missed: list[slice]) -> Tensor:
        """What an offer took out of the live parameters, as an outer gradient; 0 where it was missed."""
        gradient = mine.gradient
        if gradient is None:
            assert mine.snapshot is not None
            gradient = self.state.params - mine.snapshot
        lost = outer.lost_work_of(gradient, missed)
        return gradient if lost is None else gradient - lost

    def _missed(self, parts: Sequence[PartWeights], refused: str) -> list[slice]:
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
        self,
        old: OuterState,
        new: OuterState,
        mine: _InFlight | None,
        missed: list[slice],
        parts: Sequence[PartWeights],
    ) -> Merge | None:
        if mine is None and any(self._peer in part.weights for part in parts):
            # An offer that we no longer know (made before a restart) is in the mean. Keeping our work would
            # count it twice; dropping it loses at most what came after that offer.
            self._correction, self._stale, self._measured_from = None, None, new
            return Merge(0.0, new.params)
        if self._delayed:
            return self._work_returned(mine, missed)
        snapshot = None if mine is None else mine.snapshot
        return outer.merge(self._run.outer, old, new, snapshot, missed, out=snapshot)

    def _work_returned(self, mine: _InFlight | None, missed: list[slice]) -> Merge | None:
        """Rules "co2" and "eager": put back what was offered and not counted."""
        if mine is None or mine.gradient is None:
            return None
        lost = outer.lost_work_of(mine.gradient, missed)
        if mine is self._in_flight:
            return None if lost is None else Merge(1.0, lost.neg_())
        # Given up, put back, and counted after all: take out again what counted. A later offer for the same
        # round held that work too, and comes to nothing.
        addend = mine.gradient if lost is None else mine.gradient - lost
        if self._in_flight is not None and self._in_flight.gradient is not None:
            addend = addend - self._in_flight.gradient
        return Merge(1.0, addend)

    def _advance_residual(self, mine: _InFlight, missed: list[slice]) -> None:
        if self.residual is None or mine.residual is None:
            return
        for part in missed:
            mine.residual[part] = self.residual[part]
        self.residual = mine.residual

    def _remember_stale(
        self, mine: _InFlight, report: StepReport, parts: Sequence[PartWeights], missed: list[slice]
    ) -> None:
        if self._run.outer.rule != "eager" or missed or mine.gradient is None:
            return
        weights = parts[0].weights
        share = weights[self._peer] / sum(weights.values())
        self._stale = (mine.gradient, report.gap, share)
