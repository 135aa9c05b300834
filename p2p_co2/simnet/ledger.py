"""The tensor side of a simulated peer, in whole numbers (``work``): ``trainer.ledger.worker`` of a real one.

``CountingLedger`` takes the steps of ``trainer.ledger`` under the rule "keep" with outer_lr 1 and no
momentum: an offer is what is not counted yet, a commit moves the agreed state and counts this peer's offer
part by part, an abort changes nothing, a state that is adopted takes the place of the old one. One worker
does it all in the order in which it was asked, and takes its time. An ``Auditor`` is told of every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from p2p_co2.digest import chunk_digests
from p2p_co2.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, Exported, PartWeights, Reduced
from p2p_co2.protocol.rounds import Likeness
from p2p_co2.simnet.laws import Auditor
from p2p_co2.simnet.virtual_time import ProcessLoop
from p2p_co2.simnet.work import BLOCK_BYTES, CountedState, Offered, Saved, WorkUnits, add, mean_of, unpack
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.outer import Merge, StepReport
from p2p_co2.trainer.ledger.fragment_state import EncodedOffer, FragmentOutcome
from p2p_co2.wire.schedule import OfferState

TENSOR_BYTES_PER_S = 1e9
"""How fast the worker goes through payloads; all that it is asked takes a millisecond more."""
_T = TypeVar("_T")


class CountingModel:
    """The live parameters of a simulated peer; what ``trainer.exchanged_model`` is in a real one. A snapshot
    is the units in them, and the version that they have met; a ``Merge`` tells them which one they meet."""

    def __init__(self, work: WorkUnits, versions: Sequence[int]) -> None:
        self._work = work
        self._met = list(versions)
        self.live = self

    def look(self, position: float) -> None:
        """Nobody exchanges its parameters."""

    def look_back(self) -> None:
        """Nobody puts back what a merge changed."""

    def warn_once(self, text: str) -> None:
        """Nobody reads it."""

    def take_computing_s(self) -> float:
        return 0.0

    def snapshot(self, fragment: int) -> tuple[int, int]:
        return self._work.units, self._met[fragment]

    def merge_(self, fragment: int, merge: Merge) -> None:
        self._met[fragment] = cast(int, merge.addend)


@dataclass
class _Fragment:
    """``counted`` as in ``work.Saved``; ``withdrawn``: a commit may still hold it; ``told``: outcomes so
    far."""

    state: CountedState
    counted: list[int]
    in_flight: Offered | None = None
    withdrawn: Offered | None = None
    in_doubt: bool = False
    told: int = 0

    @property
    def offers(self) -> list[Offered]:
        return [offer for offer in (self.in_flight, self.withdrawn) if offer is not None]


class CountingLedger:
    """Implements ``protocol.ledger.Ledger`` and what the training thread asks of the worker. ``starts`` by
    fragment; ``scale``: real bytes for each of ours."""

    failure: BaseException | None = None

    def __init__(
        self, peer: str, starts: Sequence[CountedState], scale: float,
        *, work: WorkUnits, audit: Auditor, loop: ProcessLoop,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.work = work
        self.audit = audit
        self.outcomes: SimpleQueue[FragmentOutcome] = SimpleQueue()
        self.on_outcome: Callable[[], None] = lambda: None
        self.fragments = [_Fragment(start, [work.units] * (len(start.sums) // 2)) for start in starts]
        self._scale = scale
        self._loop = loop
        self._free_at = 0.0
        self._unencoded = 0

    def restore(self, saved: Sequence[Saved]) -> None:
        """Go on from a checkpoint, before the node runs."""
        self.fragments = [_Fragment(kept.state, list(kept.counted), in_doubt=True) for kept in saved]

    def save(self) -> list[Saved]:
        return [Saved(fragment.state, tuple(fragment.counted)) for fragment in self.fragments]

    def agreed(self) -> list[AgreedVersion]:
        return [fragment.state.agreed for fragment in self.fragments]

    # ---- what the training thread asks

    @property
    def is_encoding(self) -> bool:
        return self._unencoded > 0

    def submit_offer(
        self, fragment: int, snapshot: tuple[int, int], state: OfferState,
        done: Callable[[EncodedOffer], None],
    ) -> None:  # fmt: skip
        """As ``TensorWorker.submit_offer``."""
        mine = self.fragments[fragment]

        def encode() -> None:
            self._unencoded -= 1
            if state.met != mine.told:
                self._tell(fragment, ended=state)
                return
            offer = self.offer(fragment, snapshot[0], state)
            self.audit.offered(fragment, mine.state, snapshot[1], offer)
            done(EncodedOffer(offer.round, offer.round - 1, offer.payload, None, mine.state.agreed.digest))

        self._unencoded += 1
        self._loop.call_at(self._turn(len(mine.counted) * BLOCK_BYTES), encode)

    def offer(self, fragment: int, units: int, state: OfferState) -> Offered:
        mine = self.fragments[fragment]
        if mine.in_flight is not None:
            raise LocalProtocolError(f"round {mine.in_flight.round} is still in flight")
        payload = self.work.offer(fragment, mine.counted, units)
        mine.in_flight = Offered(state, mine.state.version + 1, units, tuple(mine.counted), payload)
        return mine.in_flight

    # ---- the Ledger protocol

    async def reduce(self, fragment: int, slices: Sequence[tuple[str, float, Buffer]]) -> Reduced:
        size = sum(len(data) for _, _, data in slices)
        weights = tuple(weight for _, weight, _ in slices)
        mean = await self._ask(size, lambda: mean_of([(weight, data) for _, weight, data in slices]))
        return Reduced(mean, weights)

    async def check(self, fragment: int, mine: Buffer, mean: Buffer) -> Likeness:
        return await self._ask(len(mine) + len(mean), lambda: Likeness(1.0, 1.0, 1.0))  # sums have no length

    async def commit(self, mean: AgreedMean) -> AgreedVersion:
        return await self._ask(len(mean.mean), lambda: self._commit(mean))

    async def abort(self, fragment: int, offer_id: bytes) -> None:
        def work() -> None:
            before = self.save()[fragment]
            self.give_up(fragment, offer_id)
            self.audit.aborted(fragment, before, self.save()[fragment])

        await self._ask(0, work)

    async def doubt(self, fragment: int) -> None:
        await self._ask(0, lambda: setattr(self.fragments[fragment], "in_doubt", True))

    async def export(self, fragment: int) -> Exported:
        def work() -> Exported:
            state = self.fragments[fragment].state
            data = state.serialised()
            return Exported(state.agreed, data, list(chunk_digests(data, state.form.chunk_bytes)))

        return await self._ask(self.fragments[fragment].state.form.size_bytes, work)

    async def adopt(
        self, fragment: int, data: Buffer, agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None = None, goes_back: bool = False,
    ) -> AgreedVersion:  # fmt: skip
        return await self._ask(len(data), lambda: self.take_over(fragment, data, agreed, parts, goes_back))

    # ---- the steps, each a place for a test to plant its bug

    def _commit(self, mean: AgreedMean) -> AgreedVersion:
        mine = self.fragments[mean.fragment]
        before = self.fragments[mean.fragment].state
        if (before.version, before.digest) != (mean.round - 1, mean.state_digest):
            return before.agreed
        after = CountedState.of(before.form, mean.round, add(before.sums, unpack(mean.mean)))
        self.audit.committed(mean, before, after)
        offer = self.count(mean.fragment, mean.round, mean.parts)
        blocks = sum(p.stop_block - p.start_block for p in mean.parts if self.peer in p.weights)
        share = blocks / len(mine.counted) if offer is not None else 0.0
        if share == 1.0 and (mine.in_flight is None or mine.in_flight is offer):
            mine.in_doubt = False
        self._move(mean.fragment, after, report=StepReport(1.0, 0.0), share=share)
        self.audit.counted(mean.fragment, after, mine.counted)
        return after.agreed

    def count(self, fragment: int, round_: int, parts: Sequence[PartWeights]) -> Offered | None:
        """Note what a mean holds of this peer's work; which of its offers that was."""
        mine = self.fragments[fragment]
        held = [part for part in parts if self.peer in part.weights]
        names = {part.offer_of(self.peer) for part in held}
        known = (one for one in mine.offers if one.round == round_ and names == {one.offer_id})
        if (offer := next(known, None)) is not None:
            for block in (block for part in held for block in range(part.start_block, part.stop_block)):
                mine.counted[block] = max(mine.counted[block], offer.units)
        elif names:
            self._write_off(fragment, "a forgotten offer was counted", [self.work.units])
        return offer

    def give_up(self, fragment: int, offer_id: bytes) -> None:
        mine = self.fragments[fragment]
        offer = mine.in_flight
        if offer is not None and offer.offer_id == offer_id:
            mine.in_flight, mine.withdrawn = None, offer
            self._tell(fragment, ended=offer.made)

    def take_over(
        self, fragment: int, data: Buffer, agreed: AgreedVersion, parts: Sequence[PartWeights] | None,
        goes_back: bool = False,
    ) -> AgreedVersion:  # fmt: skip
        mine = self.fragments[fragment]
        before = self.fragments[fragment].state
        if agreed == before.agreed:
            return agreed
        lanes = unpack(bytes(data[: 8 * (1 + len(before.sums))]))
        after = CountedState.of(before.form, lanes[0], lanes[1:])
        if after.version != agreed.version or (after.version < before.version and not goes_back):
            raise RemoteProtocolError("bad state", f"version {after.version}, not {agreed.version}")
        if after.digest != agreed.digest:
            raise DigestMismatch("the state does not have the digest its donor promised")
        if mine.in_doubt:
            self._write_off(fragment, "may be in another history", [self.work.units])
            mine.in_doubt = False
        elif after.version <= before.version:
            mine.in_doubt = bool(mine.offers)
        elif parts is not None:
            self.count(fragment, before.version + 1, parts)
        else:
            units = [offer.units for offer in mine.offers]
            self._write_off(fragment, "may be in a state that was adopted", units)
        self._move(fragment, after)
        self.audit.adopted(fragment, before, after, mine.counted)
        return after.agreed

    def _write_off(self, fragment: int, why: str, until: Sequence[int]) -> None:
        """Work up to these units that is not counted yet comes to nothing."""
        mine = self.fragments[fragment]
        until_unit = max(until, default=0)
        for block, counted in enumerate(mine.counted):
            if counted < until_unit:
                self.audit.written_off(fragment, block, counted, until_unit, why)
                mine.counted[block] = until_unit

    def _move(self, fragment: int, after: CountedState, **more: Any) -> None:
        """Another state is the agreed one: offers have ended, and live parameters are to meet it."""
        mine = self.fragments[fragment]
        ended = mine.in_flight.made if mine.in_flight is not None else None
        mine.state = after
        mine.in_flight = None
        mine.withdrawn = None
        self._tell(fragment, Merge(1.0, cast(Any, after.version)), ended=ended, **more)

    def _tell(self, fragment: int, merge: Merge | None = None, **more: Any) -> None:
        mine = self.fragments[fragment]
        mine.told += 1
        self.outcomes.put(FragmentOutcome(fragment, mine.state.version, merge, number=mine.told, **more))
        self.on_outcome()

    # ---- the worker

    def _turn(self, size_bytes: int) -> float:
        """When work on this many bytes, asked for now, is done."""
        took_s = 0.001 + size_bytes * self._scale / TENSOR_BYTES_PER_S
        self._free_at = max(self._free_at, self._loop.time()) + took_s
        return self._free_at

    async def _ask(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        await asyncio.sleep(self._turn(size_bytes) - self._loop.time())
        return work()
