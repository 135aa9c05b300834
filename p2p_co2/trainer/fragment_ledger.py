"""The agreed state of one fragment, and what this peer has in flight for it. Tensors only: no thread, no
network, no clock.

One ``FragmentLedger`` lives on the worker thread. It turns a snapshot of live parameters into an offer, and a
committed mean into the next agreed state plus a ``Merge`` that the training thread applies whenever it next
passes by.

Laws: the state changes only in ``commit`` and ``adopt``, and one of them that fails in its middle leaves the
fragment torn (``wholeness``); ``abort`` changes nothing that is agreed; an offer that did not reach the mean,
wholly or in some parts, goes back into this peer's live parameters or stays there, so that its work is
offered again (ALGORITHMS.md, laws 2 and 5). Under "keep" and "blend" residuals of error feedback advance only
where the offer was counted; under "co2" and "eager" with the offer: what comes back there is what was sent.

Memory, in copies of the fragment in fp32: state 2 (params, momentum); in flight what ``offered`` says, at
most a half; with error feedback an eighth for the residual; under "eager" an eighth for the correction at the
last boundary, and from the commit to the next one an eighth for the offer. How far the params have moved
under "co2" and "eager" takes nothing, but a half (1 with fp32) where two rounds commit between two
boundaries. A step takes the memory of the old state, unless somebody else holds it (``lend``); under "keep"
and "blend" it needs 1 for the merge, under the others nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_co2.config import RunConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.node.ledger import PartWeights
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint import Values
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.fragments.large_tensor import large_tensor
from p2p_co2.tensors.outer import Merge, OuterState, StepReport
from p2p_co2.trainer import offered
from p2p_co2.trainer.loan import SETTLE_S, Loan
from p2p_co2.trainer.offer_encoding import OfferEncoding
from p2p_co2.trainer.offered import FromMean, FromPayload, FromStep, Kept, Offered, Rebase, Sum, set_piece
from p2p_co2.trainer.pieces import piece_values, pieces, within
from p2p_co2.trainer.scaled_fp16 import ScaledFp16
from p2p_co2.trainer.scaled_int4 import ScaledInt4
from p2p_co2.trainer.wholeness import Wholeness

COARSE_BITS = 9
"""Codecs with fewer bits per value lose so much that live parameters under "keep" and "blend" shall not hold
it."""


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
    share: float
    """Whether this peer's offer is in every part of the mean, and how much of it is there: 0 to 1."""
    refused: str
    """Why the mean was not applied although it was agreed ("" if it was): every peer refuses alike."""


class FragmentLedger:
    """See the module. ``start``: the fragment's values at version 0, fp32 [n]; or a ``state`` to go on
    from. Either is the ledger's from now on, memory and all."""

    def __init__(self, run: RunConfig, codec: Codec, peer: str, state: OuterState) -> None:
        self._run, self._codec, self._peer = run, codec, peer
        self._delayed = run.outer.rule in {"co2", "eager"}
        self._is_coarse = 8 * codec.block_bytes < COARSE_BITS * codec.block_values
        self._is_exact = codec.name == "fp32"
        self.state = state
        self.wholeness = Wholeness()
        self._is_lent, self._loans = False, list[Loan]()
        self.residual: ScaledInt4 | None = None
        """Of error feedback, once an offer was counted; under "co2" and "eager" once one was made."""
        self._in_flight: Offered | None = None
        self._withdrawn: Offered | None = None
        """The last offer for the next version that was given up: a commit may still turn out to hold it."""
        self.is_resumed = False
        """Whether an earlier process may have offered work that is not counted yet."""
        self.in_doubt = False
        """Whether they hold work that may be counted in another history than ``state``'s."""
        self.keeps_offered = False
        """Whether they hold what was offered from the state that was exchanged last."""
        self._origin_version = state.version
        self._offset: Kept | None = None
        """Rules "co2" and "eager": the version from which the live parameters set out at the last boundary,
        and how far from the params of now that was, with what was corrected there."""
        self._stale: tuple[Kept, float, float] | None = None
        """Rule "eager": what the newest mean holds of this peer's, with the gap and its share there."""

    def lend(self, loan: Loan | None = None) -> OuterState:
        """The state, for somebody who holds it while the swarm goes on: its memory is not written to until
        ``loan`` has ended; without one, never."""
        self.wholeness.check()
        if loan is None:
            self._is_lent = True
        else:
            # Without those that are over: where no round commits, checkpoints are written all the same.
            self._loans = [*(one for one in self._loans if not one.has_ended), loan]
        return self.state

    def _settle_loans(self) -> None:
        """The state is about to go: whoever holds it for a while may take what they need first."""
        for loan in self._loans:
            loan.settle(SETTLE_S)

    @property
    def _is_held(self) -> bool:
        return self._is_lent or not all(loan.has_ended for loan in self._loans)

    def set_residual(self, values: Values) -> None:
        """Go on from what a checkpoint holds."""
        self.residual = ScaledInt4(len(values))
        for at in self._pieces():
            self.residual.set(at, values[at])

    def offer(self, snapshot: Tensor, weight: float) -> EncodedOffer:
        """Encode what this peer learned. ``snapshot``: fp32 [n], live parameters at the schedule point; owned
        from now on. ``weight``: the offer's, which tells it from other attempts at the same round. Raises
        ``ValueError`` if a value is not finite."""
        self.wholeness.check()
        if self._in_flight is not None:
            raise LocalProtocolError(f"round {self._in_flight.round} is still in flight")
        base_version = self._origin_version if self._delayed else self.state.version
        feedback, size = self._run.codec, self.state.params.numel()
        room = lost = None
        if feedback.error_feedback:
            lost = None if self._is_exact else ScaledInt4(size)
        elif self._is_coarse and not self._delayed:
            room = ScaledFp16(size, piece_values(self._codec))
        payload, error = OfferEncoding(
            self._codec, self.state, self._offset, snapshot, self.residual, feedback.error_feedback_decay,
            room, lost,
        ).encode()  # fmt: skip
        gradient: Kept | None = room
        if self._delayed:
            gradient = FromPayload(self._codec, payload, size)  # what comes back, if it does: what was sent
        elif gradient is None:
            gradient = FromPayload(
                self._codec, payload, size, lost, self.residual, feedback.error_feedback_decay
            )
        residual = None if self._delayed else lost
        mine = Offered(self.state.version + 1, weight, base_version, gradient, residual)
        merge, encoded = None, payload.numpy().data
        if self._delayed:
            assert isinstance(gradient, FromPayload)
            # It sets the live parameters out anew: who does not hear of that must not be saved.
            with self.wholeness.changing(f"setting out for round {mine.round}"):
                merge = self._boundary_merge(snapshot, gradient)
            self.residual = lost
        self._in_flight = mine
        return EncodedOffer(mine.round, base_version, encoded, error, merge)

    def _boundary_merge(self, snapshot: Tensor, fresh: FromPayload) -> Merge:
        """Rules "co2" and "eager": the live parameters set out from the newest agreed ones. ``snapshot`` is
        used up; ``fresh``: the gradient that is offered."""
        stale = self._stale
        self._set_out(self.state.version)  # lets go of what is not needed any more before more is made
        merge = outer.boundary_merge(self._run.outer, self.state, snapshot, None, None, out=snapshot)
        if stale is not None:
            was, gap, share = stale
            size = self.state.params.numel()
            self._offset = kept = _exact(size) if self._is_exact else ScaledInt4(size)
            for at in self._pieces():
                correction = outer.eager_correction(self._run.outer, gap, share, fresh.counted(at), was[at])
                set_piece(kept, at, correction.neg_())
                merge.addend[at].add_(kept[at])  # as it is kept, so that nothing is rounded away
        return merge

    def commit(
        self, round_: int, base_version: int, decode: Callable[[], Tensor], parts: Sequence[PartWeights],
        encoded: Buffer,
    ) -> Applied:  # fmt: skip
        """Take the outer step of an agreed mean. ``encoded``: its bytes, which nobody changes; ``decode``:
        makes fp32 [n] of them, ours from then on, where it is needed whole; ``base_version`` the oldest in
        the group.

        Raises ``LocalProtocolError`` if ``round_`` is not the next version.
        """
        if round_ != self.state.version + 1:
            raise LocalProtocolError(f"round {round_} cannot follow version {self.state.version}")
        self._settle_loans()
        self._hold_offset()
        with self.wholeness.changing(f"the outer step of round {round_}"):
            return self._take_step(round_, base_version, decode, parts, encoded)

    def _take_step(
        self, round_: int, base_version: int, decode: Callable[[], Tensor], parts: Sequence[PartWeights],
        encoded: Buffer,
    ) -> Applied:  # fmt: skip
        old, refused = self.state, ""
        try:
            new, report = self._step(min(base_version, old.version), decode, encoded)
        except RemoteProtocolError as error:
            # Every peer holds the same bits, so every peer skips this step and stays agreed.
            refused = str(error)
            new, report = old._replace(version=round_), StepReport(1.0, float("inf"), 0.0, 0.0)
        mine, missed = self._mine(round_, parts), self._missed(parts, refused)
        if self._delayed and not refused:
            moved = FromStep(self._run.outer, self._codec, encoded, new.momentum, report.gap)
            self._offset = moved if self._offset is None else offered.both(self._offset, moved, self._codec)
        merge = self._merge_after(old, new, mine, missed, parts)
        if mine is not None:
            self._advance_residual(mine, missed)
            self._remember_stale(mine, report, parts, missed)
        if mine is not None and not missed and (self._in_flight is None or self._in_flight is mine):
            # What an earlier process did, or another attempt may have counted, was in this offer as well.
            self.is_resumed = self.in_doubt = False
        self._in_flight = self._withdrawn = None
        self.state = new
        # A merge to the new parameters themselves, or the old ones again, is in somebody else's hands now.
        self._is_lent = bool(refused) or (merge is not None and merge.addend is new.params)
        self._loans = []  # of the old state
        lost = sum(part.stop - part.start for part in missed) / self.state.params.numel()
        share = 0.0 if mine is None else 1.0 - lost
        return Applied(merge, report, mine is not None and not missed, share, refused)

    def _step(
        self, base_version: int, decode: Callable[[], Tensor], encoded: Buffer
    ) -> tuple[OuterState, StepReport]:
        """In place if nothing needs the old parameters: "keep" and "blend" do, for their merge."""
        if self._delayed and not self._is_held:
            mean = FromMean(self._codec, encoded, self.state.params.numel())
            done = outer.step_in_place(
                self._run.outer, self.state, mean.__getitem__, mean.largest(), base_version
            )
            if done is not None:
                return done
        whole = decode()
        return outer.step(
            self._run.outer, self.state, whole, base_version, whole, not self._is_held, large_tensor
        )

    @property
    def has_offered(self) -> bool:
        """Whether an offer waits for its outcome."""
        return self._in_flight is not None

    def abort(self, round_: int, weight: float) -> tuple[bool, Merge | None]:
        """Our offer of ``weight`` for the round changed nothing: (whether it was in flight, how live
        parameters take its work back). Under "co2" and "eager" the work had been taken out of them; otherwise
        it never left."""
        mine = self._in_flight
        if mine is None or (mine.round, mine.weight) != (round_, weight):
            return False, None
        merge = None
        if self._delayed:
            merge = Merge(1.0, large_tensor(self.state.params.numel()))
            for at in self._pieces():
                torch.neg(mine.gradient[at], out=merge.addend[at])
        self._in_flight, self._withdrawn = None, mine
        return True, merge

    def adopt(self, state: OuterState, parts: Sequence[PartWeights] | None = None) -> Merge:
        """Replace the agreed state by a donor's; what this peer learned and nobody counted stays in its live
        parameters. ``parts``: who is in the round after our state, None if its outcome is not known.

        A newer state may hold this peer's last offers. Where the outcome does not say, they are taken for
        counted: that costs at most the work of one offer, once. The other guess would count it twice, and a
        peer that is often late would pull the swarm its way again and again. Where a round committed in
        another attempt than ours (``in_doubt``), any state may be of a history in which ours did as well:
        nothing is kept.
        """
        self._settle_loans()
        with self.wholeness.changing(f"taking over the others' version {state.version}"):
            return self._take_over(state, parts)

    def _take_over(self, state: OuterState, parts: Sequence[PartWeights] | None) -> Merge:
        is_newer = state.version > self.state.version
        mine, missed, is_foreign = self._fate(parts) if is_newer else (None, [], False)
        if self.in_doubt or (is_newer and (is_foreign or self.is_resumed)):
            merge = Merge(0.0, state.params)  # as in ``_merge_after``
            self.is_resumed = self.in_doubt = self.keeps_offered = False
        else:
            merge, self.keeps_offered = Merge(1.0, self._rebased_on(state)), mine is None
            if mine is not None:
                self._give_counted_work_(merge.addend, mine, missed)
                self._advance_residual(mine, missed)
        self._in_flight = self._withdrawn = None
        self.state = state
        self._set_out(state.version)
        self._is_lent = True  # its tensors may lie in one block: it goes when both have been replaced
        return merge

    def stays_out(self, parts: Sequence[PartWeights]) -> None:
        """A round came upon the state exchanged last: our work in it is not offered again if we go there."""
        if self.keeps_offered and any(self._peer in part.weights for part in parts):
            self.in_doubt = True

    def reset(self) -> Merge:
        """Start again from the agreed state; what this peer learned since is dropped."""
        self._in_flight = self._withdrawn = None
        self._set_out(self.state.version)
        return Merge(0.0, self.lend().params)

    # ---- parts of the above

    def _pieces(self) -> Iterator[slice]:
        return pieces(self._codec, self.state.params.numel())

    def _set_out(self, version: int) -> None:
        """The live parameters set out from the agreed ones of ``version``."""
        self._offset, self._stale, self._origin_version = None, None, version

    def _hold_offset(self) -> None:
        """The state is about to move on, and with it what the offset may be read from."""
        if isinstance(self._offset, FromStep | Sum):
            size = self.state.params.numel()
            room = _exact(size) if self._is_exact else ScaledFp16(size, piece_values(self._codec))
            for at in self._pieces():
                set_piece(room, at, self._offset[at])
            self._offset = room

    def _rebase_on(self, state: OuterState) -> Rebase:
        """Added to live parameters, keeps all work of this peer and measures it from ``state``."""
        mine = self._in_flight
        gradient = mine.gradient if self._delayed and mine is not None else None
        return Rebase(self.state.params, state.params, self._offset, gradient)

    def _rebased_on(self, state: OuterState) -> Tensor:
        """The whole of ``_rebase_on``, in the old parameters' memory if nothing needs them any more."""
        addend = large_tensor(state.params.numel()) if self._is_held else self.state.params
        rebase = self._rebase_on(state)
        for at in self._pieces():
            addend[at] = rebase.addend(at)
        return addend

    def _mine(self, round_: int, parts: Sequence[PartWeights]) -> Offered | None:
        """Which of this peer's offers the mean is about."""
        mine = [offer for offer in (self._in_flight, self._withdrawn) if offer and offer.round == round_]
        weights = {part.offer_of(self._peer) for part in parts if self._peer in part.weights}
        if not weights:
            return mine[0] if mine and mine[0] is self._in_flight else None
        return next((offer for offer in mine if weights == {offer.weight}), None)

    def _fate(self, parts: Sequence[PartWeights] | None) -> tuple[Offered | None, list[slice], bool]:
        """Of the round after our state: our offer that was counted or may have been, where it was missed, and
        whether one was counted that we do not know."""
        if parts is None:
            return self._in_flight or self._withdrawn, [], False
        if not any(self._peer in part.weights for part in parts):
            return None, [], False
        mine = self._mine(self.state.version + 1, parts)
        return mine, self._missed(parts, ""), mine is None

    def _give_counted_work_(self, addend: Tensor, mine: Offered, missed: list[slice]) -> None:
        """Add what an offer took out of the live parameters, as an outer gradient; 0 where it was missed."""
        for at in self._pieces():
            counted = mine.gradient[at]
            lost = outer.lost_work_of(counted, [within(part, at) for part in missed])
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
        mine: Offered | None,
        missed: list[slice],
        parts: Sequence[PartWeights],
    ) -> Merge | None:
        if mine is None and any(self._peer in part.weights for part in parts):
            # An offer that we no longer know (made before a restart) is in the mean. Keeping our work would
            # count it twice; dropping it loses at most what came after that offer.
            self._set_out(new.version)
            return Merge(0.0, new.params)
        if self._delayed:
            return self._work_returned(mine, missed)
        if mine is None:
            return outer.merge(self._run.outer, old, new, None, missed)
        out = None if self._is_held or new.params is old.params else old.params
        return outer.merge_offered(self._run.outer, old, new, mine.gradient.__getitem__, missed, out)

    def _work_returned(self, mine: Offered | None, missed: list[slice]) -> Merge | None:
        """Rules "co2" and "eager": put back what was offered and not counted."""
        if mine is None or (mine is self._in_flight and not missed):
            return None
        # An offer that was given up and put back, and counts after all: what counted is taken out again. A
        # later offer for the same round held that work too, and comes to nothing.
        is_late = mine is not self._in_flight
        later = self._in_flight.gradient if is_late and self._in_flight is not None else None
        addend = large_tensor(self.state.params.numel())
        for at in self._pieces():
            gradient = mine.gradient[at]
            lost = outer.lost_work_of(gradient, [within(part, at) for part in missed])
            addend[at] = torch.zeros_like(gradient) if lost is None else lost.neg_()
            if is_late:
                addend[at].add_(gradient)
            if later is not None:
                addend[at].sub_(later[at])
        return Merge(1.0, addend)

    def _advance_residual(self, mine: Offered, missed: list[slice]) -> None:
        if mine.residual is not None:
            self.residual = mine.residual.with_values_of(self.residual, missed)

    def _remember_stale(
        self, mine: Offered, report: StepReport, parts: Sequence[PartWeights], missed: list[slice]
    ) -> None:
        if self._run.outer.rule != "eager" or missed:
            return
        # Parts may have counted it with weights that differ a little: their mean, by their sizes.
        sizes = [part.stop_block - part.start_block for part in parts]
        shares = [part.weights[self._peer] / sum(part.weights.values()) for part in parts]
        share = sum(size * one for size, one in zip(sizes, shares, strict=True)) / sum(sizes)
        assert isinstance(mine.gradient, FromPayload)
        self._stale = (mine.gradient.as_counted(), report.gap, share)


def _exact(numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.float32, device="cpu")
