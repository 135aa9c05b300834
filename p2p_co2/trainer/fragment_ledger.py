"""The agreed state of one fragment, and what this peer has in flight for it. Tensors only: no thread, no
network, no clock.

One ``FragmentLedger`` lives on the worker thread. It turns a snapshot of live parameters into an offer, and a
committed mean into the next agreed state plus a ``Merge`` that the training thread applies whenever it next
passes by.

Laws: the state changes only in ``commit`` and ``adopt``; ``abort`` changes nothing that is agreed; an offer
that did not reach the mean, wholly or in some parts, goes back into this peer's live parameters or stays
there, so that its work is offered again (ALGORITHMS.md, laws 2 and 5). Residuals of error feedback advance
only where the offer was counted.

Memory, in copies of the fragment in fp32: state 2 (params, momentum); in flight 1, half with a codec of 8
bits or less; residual 1 if error feedback is on, and as much as in flight for the next one; under "co2" and
"eager" the older params until the next boundary 1, and under "eager" its last offer and the correction,
each as much as in flight. A step takes the memory of the old state, unless somebody else holds it (``lend``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2 import outer
from p2p_co2.codec import Codec
from p2p_co2.config import RunConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.memory import Buffer
from p2p_co2.node.ledger import PartWeights
from p2p_co2.outer import Merge, OuterState, StepReport
from p2p_co2.trainer.offer_encoding import Kept, OfferEncoding, piece_values, pieces, set_piece
from p2p_co2.trainer.scaled_fp16 import ScaledFp16

HALVED_FROM_BITS = 9
"""Codecs with more bits per value give back more than half precision would."""


@dataclass
class Loan:
    """For how long somebody holds a state. Ended by them, once, in any thread."""

    has_ended: bool = False


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
    gradient: Kept | None
    correction: Kept | None

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
    gradient: Kept | None
    """Instead of the snapshot: under "co2" and "eager", and where it is kept at half its size."""
    residual: Kept | None


class FragmentLedger:
    """See the module. ``start``: the fragment's values at version 0, fp32 [n]; or a ``state`` to go on
    from. Either is the ledger's from now on, memory and all."""

    def __init__(self, run: RunConfig, codec: Codec, peer: str, state: OuterState) -> None:
        self._run, self._codec, self._peer = run, codec, peer
        self._delayed = run.outer.rule in {"co2", "eager"}
        self._halves = 8 * codec.block_bytes < HALVED_FROM_BITS * codec.block_values
        self.state = state
        self._is_lent, self._loans = False, list[Loan]()
        self.residual: Tensor | None = None
        if run.codec.error_feedback:
            self.residual = torch.zeros_like(state.params)
        self._in_flight: _InFlight | None = None
        self._withdrawn: _InFlight | None = None
        """The last offer for the next version that was given up: a commit may still turn out to hold it."""
        self.is_resumed = False
        """Whether live parameters hold work that an earlier process may have offered."""
        self.in_doubt = False
        """Whether they hold work that may be counted in another history than ``state``'s."""
        self._measured_from = state
        """Rules "co2" and "eager": the state from which the live parameters set out at the last boundary."""
        self._correction: Kept | None = None
        self._stale: tuple[Kept, float, float] | None = None
        """Rule "eager": this peer's gradient in the newest mean, with the gap and its share there."""

    def lend(self, loan: Loan | None = None) -> OuterState:
        """The state (and the residual), for somebody who holds it while the swarm goes on: its memory is not
        written to until ``loan`` has ended; without one, never."""
        if loan is None:
            self._is_lent = True
        else:
            self._loans.append(loan)
        return self.state

    @property
    def _is_held(self) -> bool:
        return self._is_lent or not all(loan.has_ended for loan in self._loans)

    def offer(self, snapshot: Tensor, weight: float) -> EncodedOffer:
        """Encode what this peer learned. ``snapshot``: fp32 [n], live parameters at the schedule point; owned
        from now on. ``weight``: the offer's, which tells it from other attempts at the same round. Raises
        ``ValueError`` if a value is not finite."""
        if self._in_flight is not None:
            raise LocalProtocolError(f"round {self._in_flight.round} is still in flight")
        base = self._measured_from if self._delayed else self.state
        gradient = self._room() if self._delayed or self._halves else None
        residual = self._room() if self.residual is not None else None
        payload, error = OfferEncoding(
            self._codec, base, snapshot, self._correction, self.residual,
            self._run.codec.error_feedback_decay, gradient, residual,
        ).encode()  # fmt: skip
        merge: Merge | None = None
        if self._delayed:
            assert gradient is not None
            correction = None
            if self._run.outer.rule == "eager" and self._stale is not None:
                stale, gap, share = self._stale
                correction = self._room()
                for at in self._pieces():
                    fresh = outer.eager_correction(self._run.outer, gap, share, gradient[at], stale[at])
                    set_piece(correction, at, fresh)
            merge = outer.boundary_merge(self._run.outer, self.state, snapshot, None, None, out=snapshot)
            if correction is not None:
                for at in self._pieces():
                    merge.addend[at].sub_(correction[at])
            self._correction, self._stale, self._measured_from = (
                correction,
                None,
                _without_momentum(self.state),
            )
        self._in_flight = _InFlight(
            round=self.state.version + 1,
            weight=weight,
            base_version=base.version,
            snapshot=None if gradient is not None else snapshot,
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
        old, refused, residual = self.state, "", self.residual
        try:
            new, report = outer.step(
                self._run.outer, old, mean, min(base_version, old.version), mean, not self._is_held
            )
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
            # What an earlier process did, or another attempt may have counted, was in this offer as well.
            self.is_resumed = self.in_doubt = False
        self._in_flight = self._withdrawn = None
        self.state = new
        # A merge to the new parameters themselves, or the old ones again, is in somebody else's hands now.
        self._is_lent = bool(refused) or (merge is not None and merge.addend is new.params)
        # A residual that did not advance is still with those who hold it.
        has_stayed = residual is not None and self.residual is residual
        self._loans = [loan for loan in self._loans if has_stayed and not loan.has_ended]
        if not self._delayed:
            self._measured_from = new
        lost = sum(part.stop - part.start for part in missed) / self.state.params.numel()
        share = 0.0 if mine is None else 1.0 - lost
        return Applied(merge, report, mine is not None and not missed, share, refused)

    @property
    def has_offered(self) -> bool:
        """Whether an offer waits for its outcome."""
        return self._in_flight is not None

    def abort(self, round_: int) -> tuple[bool, Merge | None]:
        """The round changed nothing: (whether an offer of ours ended, how live parameters take its work
        back). Under "co2" and "eager" the work had been taken out of them; otherwise it never left."""
        mine = self._in_flight
        if mine is None or mine.round != round_:
            return False, None
        self._in_flight, self._withdrawn = None, mine
        if not self._delayed or mine.gradient is None:
            return True, None
        return True, Merge(1.0, mine.gradient[:].neg())

    def adopt(self, state: OuterState, parts: Sequence[PartWeights] | None = None) -> Merge:
        """Replace the agreed state by a donor's; what this peer learned and nobody counted stays in its live
        parameters. ``parts``: who is in the round after our state, None if its outcome is not known.

        A newer state may hold this peer's last offers. Where the outcome does not say, they are taken for
        counted: that costs at most the work of one offer, once. The other guess would count it twice, and a
        peer that is often late would pull the swarm its way again and again. Where a round committed in
        another attempt than ours (``in_doubt``), any state may be of a history in which ours did as well:
        nothing is kept.
        """
        is_newer = state.version > self.state.version
        mine, missed, is_foreign = self._fate(parts) if is_newer else (None, [], False)
        if self.in_doubt or (is_newer and (is_foreign or self.is_resumed)):
            merge = Merge(0.0, state.params)  # as in ``_merge_after``
            self.is_resumed = self.in_doubt = False
        else:
            merge = Merge(1.0, self._rebased_on(state, mine))
            if mine is not None:
                self._give_counted_work_(merge.addend, mine, missed)
                self._advance_residual(mine, missed)
        self._in_flight = self._withdrawn = None
        self._correction, self._stale = None, None
        self.state = self._measured_from = state
        self._is_lent = True  # its tensors may lie in one block: it goes when both have been replaced
        return merge

    def reset(self) -> Merge:
        """Start again from the agreed state; what this peer learned since is dropped."""
        self._in_flight = self._withdrawn = None
        self._correction, self._stale, self._measured_from = None, None, self.state
        return Merge(0.0, self.lend().params)

    def rebase(self) -> Rebase | None:
        """What to add to the live parameters so that they can be saved beside ``state``: a resumed peer
        knows neither what was in flight nor an older state. None if they fit as they are."""
        return self._rebase_on(self.state) if self._delayed else None

    # ---- parts of the above

    def _pieces(self) -> Iterator[slice]:
        return pieces(self._codec, self.state.params.numel())

    def _room(self) -> Kept:
        """For as many values as the fragment has."""
        size = self.state.params.numel()
        return ScaledFp16(size, piece_values(self._codec)) if self._halves else torch.empty(size)

    def _rebase_on(self, state: OuterState) -> Rebase:
        """Added to live parameters, keeps all work of this peer and measures it from ``state``."""
        origin = self._measured_from if self._delayed else self.state
        mine = self._in_flight
        gradient = mine.gradient if self._delayed and mine is not None else None
        return Rebase(origin.params, state.params, gradient, self._correction)

    def _rebased_on(self, state: OuterState, mine: _InFlight | None) -> Tensor:
        """The whole of ``_rebase_on``, in the old parameters' memory if nothing needs them any more."""
        needed = self._is_held or self._delayed or (mine is not None and mine.gradient is None)
        addend = torch.empty_like(state.params) if needed else self.state.params
        rebase = self._rebase_on(state)
        for at in self._pieces():
            addend[at] = rebase.addend(at)
        return addend

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

    def _give_counted_work_(self, addend: Tensor, mine: _InFlight, missed: list[slice]) -> None:
        """Add what an offer took out of the live parameters, as an outer gradient; 0 where it was missed."""
        for at in self._pieces():
            if mine.gradient is not None:
                counted = mine.gradient[at]
            else:
                assert mine.snapshot is not None
                counted = self.state.params[at] - mine.snapshot[at]
            lost = outer.lost_work_of(counted, [_within(part, at) for part in missed])
            addend[at].add_(counted if lost is None else counted - lost)

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
        if mine is not None and mine.gradient is not None:
            out = None if self._is_held or new.params is old.params else old.params
            return outer.merge_offered(self._run.outer, old, new, mine.gradient.__getitem__, missed, out)
        snapshot = None if mine is None else mine.snapshot
        return outer.merge(self._run.outer, old, new, snapshot, missed, out=snapshot)

    def _work_returned(self, mine: _InFlight | None, missed: list[slice]) -> Merge | None:
        """Rules "co2" and "eager": put back what was offered and not counted."""
        if mine is None or mine.gradient is None:
            return None
        if mine is self._in_flight and not missed:
            return None
        gradient = mine.gradient[:]
        lost = outer.lost_work_of(gradient, missed)
        if mine is self._in_flight:
            return None if lost is None else Merge(1.0, lost.neg_())
        # Given up, put back, and counted after all: take out again what counted. A later offer for the same
        # round held that work too, and comes to nothing.
        addend = gradient if lost is None else gradient - lost
        if self._in_flight is not None and self._in_flight.gradient is not None:
            addend = addend - self._in_flight.gradient[:]
        return Merge(1.0, addend)

    def _advance_residual(self, mine: _InFlight, missed: list[slice]) -> None:
        if self.residual is None or mine.residual is None:
            return
        old, new = self.residual, mine.residual
        if not isinstance(new, ScaledFp16):
            for part in missed:
                new[part] = old[part]
            self.residual = new
            return
        self.residual = torch.empty_like(old) if self._is_held else old
        for at in self._pieces():
            values = new[at]
            for part in missed:
                values[_within(part, at)] = old[at][_within(part, at)]
            self.residual[at] = values

    def _remember_stale(
        self, mine: _InFlight, report: StepReport, parts: Sequence[PartWeights], missed: list[slice]
    ) -> None:
        if self._run.outer.rule != "eager" or missed or mine.gradient is None:
            return
        weights = parts[0].weights
        share = weights[self._peer] / sum(weights.values())
        self._stale = (mine.gradient, report.gap, share)


def _within(part: slice, at: slice) -> slice:
    """Where ``part`` lies in the piece ``at``, counted from that one's start."""
    size = at.stop - at.start
    return slice(min(size, max(0, part.start - at.start)), min(size, max(0, part.stop - at.start)))


def _without_momentum(state: OuterState) -> OuterState:
    return state._replace(momentum=state.momentum[:0].clone())
