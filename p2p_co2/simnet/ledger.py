"""The tensor side of a simulated peer: ``trainer.fragment_state`` and ``trainer.worker`` in whole numbers.

The same steps in the same order under the same rule (``keep``): an offer is what is not counted yet, a commit
moves the agreed state and counts this peer's offer part by part, an abort changes nothing, a state that is
adopted takes the place of the old one. One worker does it all in the order in which it was asked, and takes
its time. Every step is told to an ``Audit``, which knows what should have come out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from p2p_co2.digest import chunk_digests, digest_of_chunks
from p2p_co2.errors import DigestMismatch, LocalProtocolError, RemoteProtocolError
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, PartWeights, Reduced
from p2p_co2.simnet.virtual_time import ProcessLoop
from p2p_co2.simnet.work import BLOCK_BYTES, Work, add, mean_of, pack, unpack
from p2p_co2.system.memory import Buffer

TENSOR_BYTES_PER_S = 1e9
"""How fast the worker goes through payloads."""
WORKER_FLOOR_S = 0.001
_T = TypeVar("_T")


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
class Outcome:
    """News for the training thread, as ``trainer.fragment_state.Outcome``."""

    fragment: int
    version: int
    stepped: bool = False
    contributed: bool = False
    ends_offer: bool = True


class Audit(Protocol):
    """Who checks every step; it must not change anything."""

    def offered(self, fragment: int, base: State, merged_version: int, offer: Offered) -> None: ...
    def committed(self, mean: AgreedMean, before: State, after: State) -> None: ...
    def counted(self, fragment: int, after: State, counted: Sequence[int]) -> None: ...
    def aborted(self, fragment: int, before: Saved, after: Saved) -> None: ...
    def adopted(self, fragment: int, before: State, after: State, counted: Sequence[int]) -> None: ...
    def written_off(self, fragment: int, block: int, start: int, stop: int, why: str) -> None: ...


@dataclass
class _Fragment:
    state: State
    counted: list[int]
    """Per block: the last unit of this peer that is in the agreed state, as far as it knows."""
    in_flight: Offered | None = None
    withdrawn: Offered | None = None
    in_doubt: bool = False


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of one fragment."""

    state: State
    counted: tuple[int, ...]


class CountingLedger:
    """Implements ``node.ledger.Ledger``. ``starts`` by fragment; ``scale``: real bytes for each of ours."""

    def __init__(
        self, peer: str, starts: Sequence[State], scale: float,
        *, work: Work, audit: Audit, loop: ProcessLoop,
    ) -> None:  # fmt: skip
        self.peer, self.work, self.audit = peer, work, audit
        self.outcomes: deque[Outcome] = deque()
        self.on_outcome: Callable[[], None] = lambda: None
        self.fragments = [_Fragment(start, [work.units] * (len(start.sums) // 2)) for start in starts]
        self._told = [0] * len(starts)
        self._scale, self._loop = scale, loop
        self._free_at = 0.0

    def restore(self, saved: Sequence[Saved]) -> None:
        """Go on from a checkpoint, before the node runs."""
        for fragment, kept in zip(self.fragments, saved, strict=True):
            fragment.state, fragment.counted = kept.state, list(kept.counted)
            fragment.in_doubt = True

    def save(self) -> list[Saved]:
        return [Saved(fragment.state, tuple(fragment.counted)) for fragment in self.fragments]

    def agreed(self) -> list[AgreedVersion]:
        return [AgreedVersion(f.state.version, f.state.digest) for f in self.fragments]

    # ---- what the training thread asks

    def submit_offer(
        self,
        fragment: int,
        merged_version: int,
        outcomes_taken: int,
        weight: float,
        offer_id: bytes,
        done: Callable[[int, Offered, AgreedVersion], None],
    ) -> None:
        """Encode what was learned up to now; ``merged_version``: the version that the live parameters have
        met; ``outcomes_taken`` as ``trainer.worker`` has it."""
        units = self.work.units

        def encode() -> None:
            mine = self.fragments[fragment]
            if outcomes_taken != self._told[fragment]:
                self._tell(Outcome(fragment, mine.state.version))
                return
            offer = self._offer(fragment, units, weight, offer_id)
            self.audit.offered(fragment, mine.state, merged_version, offer)
            done(fragment, offer, AgreedVersion(mine.state.version, mine.state.digest))

        at = self._turn(len(self.fragments[fragment].counted) * BLOCK_BYTES)
        self._loop.call_at(at, encode)

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
        def work() -> None:
            self.fragments[fragment].in_doubt = True

        await self._ask(0, work)

    async def export(self, fragment: int) -> tuple[AgreedVersion, bytes]:
        def work() -> tuple[AgreedVersion, bytes]:
            state = self.fragments[fragment].state
            return AgreedVersion(state.version, state.digest), state.serialised()

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
            return AgreedVersion(before.version, before.digest)
        after = State.of(before.form, mean.round, add(before.sums, unpack(mean.mean)))
        self.audit.committed(mean, before, after)
        offer = self._count(mean.fragment, mean.round, mean.parts)
        everywhere = offer is not None and all(self.peer in part.weights for part in mean.parts)
        settles = everywhere and (mine.in_flight is None or mine.in_flight is offer)
        ended = mine.in_flight is not None
        mine.state, mine.in_flight, mine.withdrawn = after, None, None
        mine.in_doubt = mine.in_doubt and not settles
        self.audit.counted(mean.fragment, after, mine.counted)
        self._tell(Outcome(mean.fragment, mean.round, True, everywhere, ended))
        return AgreedVersion(after.version, after.digest)

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
        self._tell(Outcome(fragment, mine.state.version))

    def _adopt(
        self,
        fragment: int,
        data: Buffer,
        agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None,
        goes_back: bool = False,
    ) -> AgreedVersion:
        mine, before = self.fragments[fragment], self.fragments[fragment].state
        if agreed == AgreedVersion(before.version, before.digest):
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
        elif after.version > before.version:
            self._settle_doubts(fragment, parts)
        else:
            mine.in_doubt = (mine.in_flight or mine.withdrawn) is not None
        ended = mine.in_flight is not None
        mine.state, mine.in_flight, mine.withdrawn = after, None, None
        self.audit.adopted(fragment, before, after, mine.counted)
        self._tell(Outcome(fragment, after.version, ends_offer=ended))
        return AgreedVersion(after.version, after.digest)

    def _settle_doubts(self, fragment: int, parts: Sequence[PartWeights] | None) -> None:
        """What the last offers came to if a newer state is taken over; as ``FragmentState.adopt``."""
        mine, why = self.fragments[fragment], "may be in a state that was adopted"
        if parts is not None:
            self._count(fragment, mine.state.version + 1, parts)
        else:
            offers = [offer.units for offer in (mine.in_flight, mine.withdrawn) if offer is not None]
            self._write_off(fragment, why, offers)

    def _write_off(self, fragment: int, why: str, until: Sequence[int]) -> None:
        """Work up to these units that is not counted yet comes to nothing."""
        mine, until_unit = self.fragments[fragment], max(until, default=0)
        for block, counted in enumerate(mine.counted):
            if counted < until_unit:
                self.audit.written_off(fragment, block, counted, until_unit, why)
                mine.counted[block] = until_unit

    def _tell(self, outcome: Outcome) -> None:
        self._told[outcome.fragment] += 1
        self.outcomes.append(outcome)
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
