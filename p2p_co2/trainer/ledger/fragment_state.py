"""The agreed state of one fragment, and what this peer has in flight for it. Tensors only: no thread, no
network, no clock.

A snapshot of live parameters becomes an offer. A committed mean becomes the next agreed state and an
``FragmentOutcome``, whose ``Merge`` the training thread applies when it next passes by.

Laws: the state changes only in ``commit`` and ``adopt``. A change that fails in its middle poisons the
fragment (``PoisonGuard``). Work that did not reach the mean is in the live parameters, or goes back there,
and is offered again. The residual of error feedback advances where an offer was counted, and nowhere else.

Memory: ``docs/design/memory.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault, LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.ledger import PartWeights, effective_peers, only_peer
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.parts import Values
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.base import PIECE_VALUES, pieces
from p2p_co2.tensors.fragments import large_tensor
from p2p_co2.tensors.outer import AgreedState, Merge, StepReport
from p2p_co2.tensors.outer_rules import OwnWork, get_rule, without
from p2p_co2.trainer.ledger.kept import (
    Compact,
    Encoded,
    Gradient,
    Kept,
    StepChange,
    added,
    copied,
    room_of,
    spliced,
)
from p2p_co2.trainer.ledger.offers import Count, FragmentOffers, KeptOffer
from p2p_co2.wire.schedule import OfferState
from p2p_co2.wire.terms import RunTerms


@dataclass(frozen=True)
class EncodedOffer:
    """An outer gradient ready to travel. ``payload``: uint8 [blocks * block_bytes], host memory. ``merge``:
    how the live parameters set out anew, if they do. ``state_digest``: of the state that it goes upon."""

    round: int
    base_version: int
    payload: Buffer
    merge: Merge | None
    state_digest: bytes = b""


@dataclass(frozen=True)
class FragmentOutcome:
    """News for the training thread: how live parameters change, and what became of an offer. ``report``: of
    the outer step, if one was taken. ``share``: how much of this peer's offer is in its mean, 0 to 1.
    ``peers``: of equal weight, that average as evenly as those in it; 0 if none is told.
    ``ended``: the offer that is in flight no more. ``trouble``: in words, why the mean was not applied.
    ``number``: of the fragment's outcomes, from 1. ``others``: of other fragments, met between the same two
    steps."""

    fragment: int
    version: int
    merge: Merge | None
    report: StepReport | None = None
    share: float = 0.0
    ended: OfferState | None = None
    trouble: str = ""
    peers: float = 0.0
    number: int = 0
    others: Sequence[FragmentOutcome] = ()


class Departure(NamedTuple):
    """Where the live parameters set out, if they do so anew with each offer. ``offset``: how far that lay
    from the params of now, a sum. ``stale``, for corrections: what the newest mean holds of this peer's, with
    the gap and the share there."""

    version: int
    offset: tuple[Kept, ...] = ()
    stale: tuple[Kept, float, float] | None = None


class PoisonGuard:
    """Whether a fragment is consistent: a change that fails in its middle leaves neither the old state nor
    the new one. Then it is not saved nor given away, and no round follows it; whoever asks hears why."""

    def __init__(self) -> None:
        self._poison: EnvironmentFault | LocalProtocolError | None = None

    def check(self) -> None:
        """Raises ``EnvironmentFault`` if a change failed for want of memory, ``LocalProtocolError`` if it
        failed otherwise."""
        if self._poison is not None:
            raise type(self._poison)(*self._poison.args) from self._poison.__cause__

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """A block that poisons the fragment if it is left before its end. Raises as ``check``, also in place
        of what failed, which is the cause."""
        self.check()
        try:
            yield
        except BaseException as error:
            # torch has no error of its own for memory that ended on the host.
            is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
            kind = EnvironmentFault if is_memory else LocalProtocolError
            self._poison = kind(
                f"{what} failed in its middle ({type(error).__name__}: {error}): the agreed state in memory "
                "is not whole, and is neither saved nor given to others; the last checkpoint is as it was: "
                f"join again with --resume{', with more memory free' if is_memory else ''}"
            )
            raise self._poison from error


class FragmentState:
    """One fragment's state. It owns ``state``, memory and all. ``index``: of the fragment. ``uses``: as of
    ``Encoded``, for means. ``terms``: the run's, if they may be amended."""

    def __init__(
        self, run: RunConfig, codec: Codec, peer: str, state: AgreedState, index: int = 0, uses: int = 1,
        terms: RunTerms | None = None,
    ) -> None:  # fmt: skip
        self._uses = uses
        self._run = run
        self._terms = terms or RunTerms(run)
        self._rule = get_rule(run.outer)
        """With the settings of the newest step."""
        self._codec = codec
        self._peer = peer
        self._index = index
        self.state = state
        self.departure = Departure(state.version)
        self.guard = PoisonGuard()
        self._readers = set[str]()
        """Who the state was lent to."""
        self.residual: Compact | None = None
        """Of error feedback, once an offer was counted."""
        self.offers = FragmentOffers(peer, state.params.numel(), codec.block_values)

    @property
    def numel(self) -> int:
        return self.state.params.numel()

    def lend(self, to: str = "others") -> AgreedState:
        """The state, for somebody who reads it while the swarm goes on: its memory is not written to."""
        self.guard.check()
        self._readers.add(to)
        return self.state

    def give_back(self, version: int, reader: str) -> None:
        """``reader`` is through with the state of ``version``."""
        if version == self.state.version:
            self._readers.discard(reader)

    def set_residual(self, values: Values) -> None:
        """Go on from what a checkpoint holds (fp32 [n])."""
        self.residual = room_of(self._codec, self.numel, 4)
        for at in pieces(self.numel):
            self.residual.set_(at, values[at].clone())

    # ---- offers

    def offer(self, snapshot: Tensor, state: OfferState) -> EncodedOffer:
        """Encode what this peer learned. ``snapshot``: fp32 [n], live parameters at the schedule point; owned
        from now on. Raises ``ValueError`` if a value is not finite."""
        self.guard.check()
        self.offers.must_be_free()
        feedback = self._run.codec
        codec = self._codec
        size = self.numel
        room = None
        lost = None
        if feedback.error_feedback:
            lost = None if codec.name == "fp32" else room_of(codec, size, 4)
        elif (bits := self._rule.keeps(codec.spec.bits)) > 0:
            room = room_of(codec, size, bits)
        payload = self._encoded(snapshot, room, lost).numpy().data
        sent = Encoded(codec, payload, size)
        gradient: Kept = room or sent
        if lost is not None:
            gradient = Gradient(sent, lost, self.residual, feedback.error_feedback_decay)
        round_ = self.state.version + 1
        base_version = self.state.version
        merge = None
        if self._rule.returns_work:
            base_version = self.departure.version
            # It sets the live parameters out anew: who does not hear of that must not be saved.
            with self.guard.changing(f"setting out for round {round_}"):
                merge = self._boundary_merge(snapshot, sent)
        self.offers.open = KeptOffer(state, sent, gradient, lost)
        return EncodedOffer(round_, base_version, payload, merge)

    def _encoded(self, snapshot: Tensor, room: Compact | None, lost: Compact | None) -> Tensor:
        """The payload of ``state.params + offset - snapshot``, plus the decayed residual. ``room`` takes the
        gradient, ``lost`` what the codec loses of it and the residual.

        Piece by piece: nothing of the fragment's size is made that is not kept.
        """
        codec = self._codec
        size = self.numel
        payload = large_tensor(codec.payload_bytes(size), torch.uint8)
        scratch = torch.empty(min(PIECE_VALUES, size), dtype=torch.float32, device="cpu")
        decay = self._run.codec.error_feedback_decay
        for at in pieces(size):
            first = at.start // codec.block_values
            blocks = codec.blocks(at.stop - at.start)
            rows = payload[first * codec.block_bytes : (first + blocks) * codec.block_bytes]
            origin = self.state.params[at]
            if self.departure.offset:
                origin = origin + added(self.departure.offset, at)
            values = scratch[: at.stop - at.start]
            codec.encode(
                snapshot[at], rows, base=origin, decay=decay,
                residual=None if self.residual is None else self.residual[at],
                wanted=None if room is None else values, lost=None if lost is None else values,
            )  # fmt: skip
            for kept in (room, lost):
                if kept is not None:
                    kept.set_(at, values)
        return payload

    def _boundary_merge(self, snapshot: Tensor, fresh: Encoded) -> Merge:
        """The live parameters set out from the newest agreed ones. ``snapshot`` is used up; ``fresh``: what
        is offered."""
        stale = self.departure.stale
        self.departure = Departure(self.state.version)
        merge = Merge(1.0, torch.sub(self.state.params, snapshot, out=snapshot))
        if stale is not None:
            was, gap, share = stale
            kept = room_of(self._codec, self.numel, 4)
            for at in pieces(self.numel):
                correction = self._rule.correction(gap, share, fresh[at], was[at])
                assert correction is not None
                kept.set_(at, correction.neg_())
                merge.addend[at].add_(kept[at])  # as it is kept, so that nothing is rounded away
            self.departure = self.departure._replace(offset=(kept,))
        return merge

    def abort(self, offer_id: bytes) -> FragmentOutcome | None:
        """The open offer came to nothing: what that means, or None if it is another one that is open. Its
        work is put back, if it had left the live parameters."""
        mine = self.offers.open_as(offer_id)
        if mine is None:
            return None
        merge = self._plus(lambda at: mine.gradient[at].neg_()) if self._rule.returns_work else None
        self.offers.withdraw()
        return self._outcome(merge, ended=mine.state)

    # ---- rounds

    def commit(
        self, round_: int, base_version: int, encoded: Buffer, parts: Sequence[PartWeights]
    ) -> FragmentOutcome:
        """Take the outer step of an agreed mean: its bytes, which nobody changes, and who is in it.
        ``base_version``: the group's, as ``agreed_base`` has it; where live parameters meet each mean at
        once, no gradient is late, whatever it says. Raises ``LocalProtocolError`` if ``round_`` is not the
        next version."""
        if round_ != self.state.version + 1:
            raise LocalProtocolError(f"round {round_} cannot follow version {self.state.version}")
        offset = self.departure.offset
        if any(isinstance(one, StepChange) for one in offset):  # of the momentum, which is about to move on
            held = copied(offset, room_of(self._codec, self.numel, 16))
            self.departure = self.departure._replace(offset=(held,))
        with self.guard.changing(f"the outer step of round {round_}"):
            mean = Encoded(self._codec, encoded, self.numel, self._uses)
            return self._take_step(round_, base_version, mean, parts)

    def _take_step(
        self, round_: int, base_version: int, mean: Encoded, parts: Sequence[PartWeights]
    ) -> FragmentOutcome:
        old = self.state
        refused = ""
        alone = only_peer(parts) if self._run.outer.rule == "keep" and self._uses == 1 else None
        settings = self._terms.at(round_).outer
        self._rule = get_rule(settings)
        if alone is not None:  # there is nothing to average out
            settings = settings.model_copy(update={"lr": 1.0, "momentum": 0.0, "nesterov": False})
        try:
            # In the old memory where nobody needs it: live parameters that take the step in need the old
            # ones, and meet each mean at once, so that no gradient is late.
            reuse = "" if self._readers else "all" if self._rule.returns_work else "momentum"
            base_version = min(base_version, old.version) if self._rule.returns_work else old.version
            largest = mean.largest()
            new, report = outer.step(
                settings, old, mean, base_version, largest=largest, reuse=reuse, new=large_tensor
            )
        except RemoteProtocolError as error:
            # Every peer holds the same bits, so every peer skips this step and stays agreed.
            refused = str(error)
            new = old._replace(version=round_)
            report = StepReport(1.0, 0.0)
        count = self.offers.count(parts)
        if refused:
            count = count._replace(missed=[slice(0, self.numel)])
        mine = count.offer
        missed = count.missed
        if self._rule.returns_work and not refused:
            moved = StepChange(settings, mean, new.momentum, report.gap)
            self.departure = self.departure._replace(offset=(*self.departure.offset, moved))
        # Alone, live parameters lead: what the codec lost of their work is in the next gradient by itself. A
        # residual of earlier company is not, so it is used up in the usual way first.
        is_whole = mine is not None and mine is self.offers.open and mine.is_live and not missed
        leads = is_whole and alone == self._peer and self.residual is None
        merge = None if leads else self._merge_after(old, new, count)
        if mine is not None and not leads:
            self._advance_residual(mine, missed)
            self._remember_stale(mine, report, parts, missed)
        if mine is not None and not missed and self.offers.open in (None, mine):
            self.offers.in_doubt = False
        ended = self.offers.end()
        self.state = new
        # A merge to the new parameters themselves, or the old ones again, is in somebody else's hands now.
        self._readers = {"others"} if refused or (merge and merge.addend is new.params) else set()
        lost = sum(part.stop - part.start for part in missed) / self.numel
        share = 0.0 if mine is None else 1.0 - lost
        return self._outcome(merge, report, share, ended, refused, effective_peers(parts) / self._uses)

    def _merge_after(self, old: AgreedState, new: AgreedState, count: Count) -> Merge | None:
        if count.is_forgotten:
            # Keeping our work would count the forgotten offer's twice; dropping it loses at most what came
            # after that one.
            self.departure = Departure(new.version)
            return Merge(0.0, new.params)
        mine = count.offer
        if mine is None:
            return self._rule.merge(old, new, OwnWork())
        open_ = self.offers.open
        later = None if open_ is None or open_ is mine else open_.gradient.__getitem__
        work = OwnWork(mine.gradient.__getitem__, count.missed, mine is not open_, later)
        out = None if self._readers or new.params is old.params else old.params
        return self._rule.merge(old, new, work, out)

    def _plus(self, values: Callable[[slice], Tensor], addend: Tensor | None = None) -> Merge:
        """Live parameters plus ``values``, which is asked piece by piece; in ``addend``, if there is one."""
        addend = large_tensor(self.numel) if addend is None else addend
        for at in pieces(self.numel):
            addend[at] = values(at)
        return Merge(1.0, addend)

    # ---- a donor's state

    def adopt(self, state: AgreedState, parts: Sequence[PartWeights] | None = None) -> FragmentOutcome:
        """Replace the agreed state by a donor's. What this peer learned and nobody counted stays in its live
        parameters; nothing does where that is in doubt. ``parts``: who is in the round after our state, None
        if nobody knows."""
        with self.guard.changing(f"taking over the others' version {state.version}"):
            merge = self._take_over(state, parts)
            return self._outcome(merge, ended=self.offers.end())

    def _take_over(self, state: AgreedState, parts: Sequence[PartWeights] | None) -> Merge:
        offers = self.offers
        is_newer = state.version > self.state.version
        count = offers.count(parts) if is_newer else Count(None)
        if offers.in_doubt or count.is_forgotten:
            merge = Merge(0.0, state.params)  # as in ``_merge_after``
            offers.in_doubt = False
        else:
            merge = self._rebased_on(state, count.offer, count.missed)
            if count.offer is not None:
                self._advance_residual(count.offer, count.missed)
            # Of another history: a round there may count what was offered, and we may come back to it.
            offers.in_doubt = not is_newer and (offers.open or offers.withdrawn) is not None
        self.state = state
        self.departure = Departure(state.version)
        self._readers = {"others"}  # its tensors may lie in one block: it goes when both have been replaced
        return merge

    def _rebased_on(self, state: AgreedState, mine: KeptOffer | None, missed: Sequence[slice]) -> Merge:
        """Live parameters keep the work of this peer that is not counted, measured from ``state``; what of
        ``mine`` was not ``missed`` is. In the old parameters' memory if nothing needs them any more."""
        gone = list(self.departure.offset)
        if self._rule.returns_work and self.offers.open is not None:
            gone.append(self.offers.open.gradient)  # it was taken out of them, and is in flight

        def moved(at: slice) -> Tensor:
            values = state.params[at] - self.state.params[at]
            if gone:
                values.sub_(added(gone, at))
            return values if mine is None else values.add_(without(mine.gradient[at], at, missed))

        return self._plus(moved, None if self._readers else self.state.params)

    def reset(self, trouble: str = "") -> FragmentOutcome:
        """Start again from the agreed state; what this peer learned since is dropped. An offer that is in
        flight may still be counted, and live parameters hold nothing of it from now on."""
        open_ = self.offers.open
        if open_ is not None:
            nothing = room_of(self._codec, self.numel, 4)
            for at in pieces(self.numel):
                nothing.set_(at, torch.zeros(at.stop - at.start, dtype=torch.float32, device="cpu"))
            self.offers.open = replace(open_, gradient=nothing, is_live=False)
        self.offers.withdrawn = None
        self.departure = Departure(self.state.version)
        return self._outcome(Merge(0.0, self.lend().params), trouble=trouble)

    # ---- what counted

    def _outcome(
        self, merge: Merge | None, report: StepReport | None = None, share: float = 0.0,
        ended: OfferState | None = None, trouble: str = "", peers: float = 0.0,
    ) -> FragmentOutcome:  # fmt: skip
        return FragmentOutcome(self._index, self.state.version, merge, report, share, ended, trouble, peers)

    def _advance_residual(self, mine: KeptOffer, missed: Sequence[slice]) -> None:
        if mine.residual is not None and missed:
            room = room_of(self._codec, self.numel, 4)
            self.residual = spliced(mine.residual, self.residual, missed, room)
        elif mine.residual is not None:
            self.residual = mine.residual

    def _remember_stale(
        self, mine: KeptOffer, report: StepReport, parts: Sequence[PartWeights], missed: Sequence[slice]
    ) -> None:
        """What the mean holds of this peer's, with the share that it counted with, if the rule corrects."""
        if not self._rule.copies or missed:
            return
        # Parts may have counted it with weights that differ a little: their mean, by their sizes.
        sizes = [part.stop_block - part.start_block for part in parts]
        shares = [part.weights[self._peer] / sum(part.weights.values()) for part in parts]
        share = self._uses * sum(size * one for size, one in zip(sizes, shares, strict=True)) / sum(sizes)
        kept: Kept = mine.sent
        if 8 * self._codec.block_bytes >= 5 * self._codec.block_values and self._codec.name != "fp32":
            kept = copied((kept,), room_of(self._codec, self.numel, 4))  # the payload would be more
        self.departure = self.departure._replace(stale=(kept, report.gap, share))
