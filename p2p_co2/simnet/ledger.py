"""The tensor side of a simulated peer in whole numbers, so that conservation can be checked exactly.

Each inner step of a peer is one *unit* of work, numbered over all its processes from 1. A unit is worth
another number in every block of every fragment. The worth of units (a, b] is a difference of two prefix sums
modulo 2^64: it costs nothing to know, and no two stretches of work look alike. An outer gradient of a block
is 16 bytes: the worth of the units in it and how many they are. A mean is the sum of both lanes, the second
one with weights, so that a wrong weight shows too.

``CountingLedger`` takes the steps of ``trainer.fragment_state`` under the rule "keep" with outer_lr 1 and no
momentum: an offer is what is not counted yet, a commit moves the agreed state and counts this peer's offer
part by part, an abort changes nothing, a state that is adopted takes the place of the old one. One worker
does it all in the order in which it was asked, and takes its time. An ``Audit`` is told of every step.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from p2p_co2.digest import chunk_digests, digest_of_chunks
from p2p_co2.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, PartWeights, Reduced
from p2p_co2.simnet.virtual_time import ProcessLoop
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.outer import Merge, StepReport
from p2p_co2.trainer.fragment_state import EncodedOffer, Outcome
from p2p_co2.trainer.worker import Encoded

BLOCK_BYTES = 16
WEIGHT_UNIT = 2**32
"""Weights count in these fractions."""
TENSOR_BYTES_PER_S = 1e9
"""How fast the worker goes through payloads."""
WORKER_FLOOR_S = 0.001
_MASK = (1 << 64) - 1
_T = TypeVar("_T")


@dataclass
class Work:
    """All units of one peer. ``units``: done so far, by all its processes; ``lost``: stretches (start, stop]
    that went down with a process: sorted, apart, none after the last unit."""

    name: str
    units: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    _coefficients: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def lose(self, start: int, stop: int) -> None:
        """Units (start, stop] went down with the process that did them."""
        while self.lost and self.lost[-1][1] >= start:
            start = min(start, self.lost.pop()[0])
        if stop > start:
            self.lost.append((start, stop))

    def stretch(self, fragment: int, block: int, start: int, stop: int) -> tuple[int, int]:
        """Worth and number of the units in (start, stop], without lost ones."""
        worth = self._until(fragment, block, stop) - self._until(fragment, block, start)
        for lost_start, lost_stop in self.lost:
            first, last = max(start, lost_start), min(stop, lost_stop)
            if first < last:
                worth -= self._until(fragment, block, last) - self._until(fragment, block, first)
        return worth & _MASK, self.count(start, stop)

    def count(self, start: int, stop: int) -> int:
        """How many units (start, stop] holds, without lost ones."""
        return stop - start - sum(max(0, min(stop, b) - max(start, a)) for a, b in self.lost)

    def _until(self, fragment: int, block: int, unit: int) -> int:
        known = self._coefficients.get((fragment, block))
        if known is None:
            rng = random.Random(f"{self.name}/{fragment}/{block}")
            known = self._coefficients[fragment, block] = (rng.getrandbits(64), rng.getrandbits(64))
        return known[0] * unit + known[1] * (unit * (unit + 1) // 2)


def pack(lanes: Sequence[int]) -> bytes:
    """Numbers modulo 2^64 as bytes, eight each."""
    return struct.pack(f"<{len(lanes)}Q", *lanes)


def unpack(data: Buffer) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def add(lanes: Sequence[int], others: Sequence[int]) -> list[int]:
    """Lane by lane, modulo 2^64."""
    return [(a + b) & _MASK for a, b in zip(lanes, others, strict=True)]


def mean_of(slices: Sequence[tuple[float, Buffer]]) -> bytes:
    """The "mean" of a part: of (weight, slice) each, lane by lane; see the module."""
    total: list[int] = []
    for weight, data in slices:
        lanes = unpack(data)
        fixed = int(weight * WEIGHT_UNIT)
        lanes[1::2] = [fixed * (a + b) for a, b in zip(lanes[0::2], lanes[1::2], strict=True)]
        total = add(total, lanes) if total else [lane & _MASK for lane in lanes]
    return pack(total)


class Form(NamedTuple):
    """How a state is given to a newcomer."""

    size_bytes: int
    chunk_bytes: int


@dataclass(frozen=True)
class State:
    """A fragment's agreed state. ``sums``: two lanes per block."""

    version: int
    sums: tuple[int, ...]
    form: Form
    digest: bytes

    @classmethod
    def of(cls, form: Form, version: int, sums: Sequence[int]) -> State:
        data = _serialised(form, version, sums)
        return cls(version, tuple(sums), form, digest_of_chunks(chunk_digests(data, form.chunk_bytes)))

    @property
    def agreed(self) -> AgreedVersion:
        return AgreedVersion(self.version, self.digest)

    def serialised(self) -> bytes:
        """What a donor gives."""
        return _serialised(self.form, self.version, self.sums)


def _serialised(form: Form, version: int, sums: Sequence[int]) -> bytes:
    data = pack((version, *sums))
    times = -(-form.size_bytes // len(data))  # no zeros: nobody would have to load them
    return (times * data)[: form.size_bytes]


def starts(blocks: Sequence[int], state_bytes: Sequence[int], chunk_bytes: int) -> list[State]:
    """The states from which all begin, by fragment; ``blocks`` and ``state_bytes`` of each."""
    sizes = zip(blocks, state_bytes, strict=True)
    return [State.of(Form(size, chunk_bytes), 0, [0] * (2 * count)) for count, size in sizes]


@dataclass(frozen=True)
class Offered:
    """An outer gradient on its way. ``counted``: per block, the unit after which it begins; ``units``: the
    last one in it."""

    offer_id: bytes
    round: int
    weight: float
    units: int
    counted: tuple[int, ...]
    payload: bytes


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of one fragment."""

    state: State
    counted: tuple[int, ...]


class Audit(Protocol):
    """Who checks every step; it must not change anything."""

    def offered(self, fragment: int, base: State, met_version: int, offer: Offered) -> None: ...
    def committed(self, mean: AgreedMean, before: State, after: State) -> None: ...
    def counted(self, fragment: int, after: State, counted: Sequence[int]) -> None: ...
    def aborted(self, fragment: int, before: Saved, after: Saved) -> None: ...
    def adopted(self, fragment: int, before: State, after: State, counted: Sequence[int]) -> None: ...
    def written_off(self, fragment: int, block: int, start: int, stop: int, why: str) -> None: ...


class Snapshot(NamedTuple):
    """Live parameters at a schedule point: the units in them, and the version that they have met."""

    units: int
    met_version: int


class CountingModel:
    """The live parameters of a simulated peer; what ``trainer.exchanged_model`` is in a real one. A ``Merge``
    tells them only which version they meet."""

    def __init__(self, work: Work, versions: Sequence[int]) -> None:
        self._work, self._met = work, list(versions)
        self.live = self

    def look(self) -> None:
        """Nobody exchanges its parameters."""

    def take_computing_s(self) -> float:
        return 0.0

    def snapshot(self, fragment: int) -> Snapshot:
        return Snapshot(self._work.units, self._met[fragment])

    def merge_(self, fragment: int, merge: Merge) -> None:
        self._met[fragment] = cast(int, merge.addend)


@dataclass
class _Fragment:
    state: State
    counted: list[int]
    """Per block: the last unit of this peer that is in the agreed state, as far as it knows."""
    in_flight: Offered | None = None
    withdrawn: Offered | None = None
    in_doubt: bool = False
    told: int = 0
    """Outcomes so far."""


class CountingLedger:
    """Implements ``node.ledger.Ledger`` and what the training thread asks of ``trainer.worker``. ``starts``
    by fragment; ``scale``: real bytes for each of ours."""

    failure: BaseException | None = None

    def __init__(
        self, peer: str, starts: Sequence[State], scale: float,
        *, work: Work, audit: Audit, loop: ProcessLoop,
    ) -> None:  # fmt: skip
        self.peer, self.work, self.audit = peer, work, audit
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.on_outcome: Callable[[], None] = lambda: None
        self.fragments = [_Fragment(start, [work.units] * (len(start.sums) // 2)) for start in starts]
        self._scale, self._loop = scale, loop
        self._free_at, self._unencoded = 0.0, 0

    def restore(self, saved: Sequence[Saved]) -> None:
        """Go on from a checkpoint, before the node runs."""
        for fragment, kept in zip(self.fragments, saved, strict=True):
            fragment.state, fragment.counted = kept.state, list(kept.counted)
            fragment.in_doubt = True

    def save(self) -> list[Saved]:
        return [Saved(fragment.state, tuple(fragment.counted)) for fragment in self.fragments]

    def agreed(self) -> list[AgreedVersion]:
        return [fragment.state.agreed for fragment in self.fragments]

    # ---- what the training thread asks

    @property
    def is_encoding(self) -> bool:
        return self._unencoded > 0

    def submit_offer(
        self, fragment: int, snapshot: Snapshot, weight: float, outcomes_taken: int, done: Encoded,
        offer_id: bytes = b"",
    ) -> None:  # fmt: skip
        """As ``TensorWorker.submit_offer``."""
        mine = self.fragments[fragment]

        def encode() -> None:
            self._unencoded -= 1
            if outcomes_taken != mine.told:
                self._tell(fragment)
                return
            offer = self._offer(fragment, snapshot.units, weight, offer_id)
            self.audit.offered(fragment, mine.state, snapshot.met_version, offer)
            encoded = EncodedOffer(offer.round, offer.round - 1, offer.payload, None)
            done(fragment, encoded, mine.state.agreed)

        self._unencoded += 1
        self._loop.call_at(self._turn(len(mine.counted) * BLOCK_BYTES), encode)

    def _offer(self, fragment: int, units: int, weight: float, offer_id: bytes) -> Offered:
        mine = self.fragments[fragment]
        if mine.in_flight is not None:
            raise LocalProtocolError(f"round {mine.in_flight.round} is still in flight")
        lanes: list[int] = []
        for block, counted in enumerate(mine.counted):
            lanes += self.work.stretch(fragment, block, counted, max(units, counted))
        round_, begins = mine.state.version + 1, tuple(mine.counted)
        mine.in_flight = Offered(offer_id, round_, weight, units, begins, pack(lanes))
        return mine.in_flight

    # ---- the Ledger protocol

    async def reduce(self, fragment: int, slices: Sequence[tuple[str, float, Buffer]]) -> Reduced:
        size, weights = sum(len(data) for _, _, data in slices), tuple(weight for _, weight, _ in slices)
        mean = await self._ask(size, lambda: mean_of([(weight, data) for _, weight, data in slices]))
        return Reduced(mean, weights)

    async def commit(self, mean: AgreedMean) -> AgreedVersion:
        return await self._ask(len(mean.mean), lambda: self._commit(mean))

    async def abort(self, fragment: int, offer_id: bytes) -> None:
        def work() -> None:
            before = self.save()[fragment]
            self._abort(fragment, offer_id)
            self.audit.aborted(fragment, before, self.save()[fragment])

        await self._ask(0, work)

    async def doubt(self, fragment: int) -> None:
        await self._ask(0, lambda: setattr(self.fragments[fragment], "in_doubt", True))

    async def export(self, fragment: int) -> tuple[AgreedVersion, bytes]:
        def work() -> tuple[AgreedVersion, bytes]:
            state = self.fragments[fragment].state
            return state.agreed, state.serialised()

        return await self._ask(self.fragments[fragment].state.form.size_bytes, work)

    async def adopt(
        self,
        fragment: int,
        data: Buffer,
        agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None = None,
        goes_back: bool = False,
    ) -> AgreedVersion:
        return await self._ask(len(data), lambda: self._adopt(fragment, data, agreed, parts, goes_back))

    # ---- the steps

    def _commit(self, mean: AgreedMean) -> AgreedVersion:
        mine = self.fragments[mean.fragment]
        before = mine.state
        if (before.version, before.digest) != (mean.round - 1, mean.state_digest):
            return before.agreed
        after = State.of(before.form, mean.round, add(before.sums, unpack(mean.mean)))
        self.audit.committed(mean, before, after)
        offer = self._count(mean.fragment, mean.round, mean.parts)
        blocks = sum(p.stop_block - p.start_block for p in mean.parts if self.peer in p.weights)
        share = blocks / len(mine.counted) if offer is not None else 0.0
        if share == 1.0 and (mine.in_flight is None or mine.in_flight is offer):
            mine.in_doubt = False
        self._move(mean.fragment, after, StepReport(1.0, 0.0, 0.0, 0.0), share)
        self.audit.counted(mean.fragment, after, mine.counted)
        return after.agreed

    def _count(self, fragment: int, round_: int, parts: Sequence[PartWeights]) -> Offered | None:
        """Note what a mean holds of this peer's work; which of its offers that was."""
        mine = self.fragments[fragment]
        offer, is_foreign = self._mine(mine, round_, parts)
        if offer is not None:
            for part in (part for part in parts if self.peer in part.weights):
                for block in range(part.start_block, part.stop_block):
                    mine.counted[block] = max(mine.counted[block], offer.units)
        if is_foreign:
            self._write_off(fragment, "a forgotten offer was counted", [self.work.units])
        return offer

    def _mine(
        self, mine: _Fragment, round_: int, parts: Sequence[PartWeights]
    ) -> tuple[Offered | None, bool]:
        """Which of this peer's offers the mean holds, and whether it holds one that it no longer knows."""
        known = [offer for offer in (mine.in_flight, mine.withdrawn) if offer and offer.round == round_]
        names = {part.offer_of(self.peer) for part in parts if self.peer in part.weights}
        if not names:
            return None, False
        offer = next((offer for offer in known if names == {offer.offer_id}), None)
        return offer, offer is None

    def _abort(self, fragment: int, offer_id: bytes) -> None:
        mine = self.fragments[fragment]
        if mine.in_flight is None or mine.in_flight.offer_id != offer_id:
            return
        mine.in_flight, mine.withdrawn = None, mine.in_flight
        self._tell(fragment)

    def _adopt(
        self,
        fragment: int,
        data: Buffer,
        agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None,
        goes_back: bool = False,
    ) -> AgreedVersion:
        mine, before = self.fragments[fragment], self.fragments[fragment].state
        if agreed == before.agreed:
            return agreed
        lanes = unpack(bytes(data[: 8 * (1 + len(before.sums))]))
        after = State.of(before.form, lanes[0], lanes[1:])
        if after.version != agreed.version or (after.version < before.version and not goes_back):
            raise RemoteProtocolError("bad state", f"version {after.version}, not {agreed.version}")
        if after.digest != agreed.digest:
            raise DigestMismatch("the state does not have the digest its donor promised")
        if mine.in_doubt:
            self._write_off(fragment, "may be in another history", [self.work.units])
            mine.in_doubt = False
        elif after.version <= before.version:
            mine.in_doubt = (mine.in_flight or mine.withdrawn) is not None
        elif parts is not None:
            self._count(fragment, before.version + 1, parts)
        else:
            offers = [offer.units for offer in (mine.in_flight, mine.withdrawn) if offer is not None]
            self._write_off(fragment, "may be in a state that was adopted", offers)
        self._move(fragment, after)
        self.audit.adopted(fragment, before, after, mine.counted)
        return after.agreed

    def _write_off(self, fragment: int, why: str, until: Sequence[int]) -> None:
        """Work up to these units that is not counted yet comes to nothing."""
        mine, until_unit = self.fragments[fragment], max(until, default=0)
        for block, counted in enumerate(mine.counted):
            if counted < until_unit:
                self.audit.written_off(fragment, block, counted, until_unit, why)
                mine.counted[block] = until_unit

    def _move(
        self, fragment: int, after: State, report: StepReport | None = None, share: float = 0.0
    ) -> None:
        """Another state is the agreed one: offers have ended, and live parameters are to meet it."""
        mine = self.fragments[fragment]
        ended = mine.in_flight is not None
        mine.state, mine.in_flight, mine.withdrawn = after, None, None
        merge = Merge(1.0, cast(Any, after.version))
        self._tell(fragment, merge=merge, report=report, share=share, ends_offer=ended)

    def _tell(self, fragment: int, merge: Merge | None = None, **more: Any) -> None:
        mine = self.fragments[fragment]
        mine.told += 1
        self.outcomes.put(Outcome(fragment, mine.state.version, merge, **more))
        self.on_outcome()

    # ---- the worker

    def _turn(self, size_bytes: int) -> float:
        """When work on this many bytes, asked for now, is done."""
        took_s = WORKER_FLOOR_S + size_bytes * self._scale / TENSOR_BYTES_PER_S
        self._free_at = max(self._free_at, self._loop.time()) + took_s
        return self._free_at

    async def _ask(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        future: asyncio.Future[_T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except (DigestMismatch, RemoteProtocolError) as error:
                if not future.done():
                    future.set_exception(error)
                return
            if not future.done():
                future.set_result(result)

        self._loop.call_at(self._turn(size_bytes), run)
        return await future
