"""Rounds to which slow links bring a part: what a lie about a link can cost the others, who takes over a lost
part, how long means may trickle in, and that no work is lost or counted twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from p2p_co2.config import CodecConfig, OuterConfig
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.protocol.rounds import PayloadShape, PeerView, ReduceWanted, bounds
from p2p_co2.protocol.rounds.assembly import PIECE_UNIT_BYTES
from p2p_co2.protocol.rounds.attempt import Attempt, Share
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.member import Completion
from p2p_co2.protocol.rounds.owner import Arrivals, PartJob, SliceRoom
from p2p_co2.protocol.rounds.parts import BlockRange, LineRates, divide
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.schedule import OfferState
from tests.fuzz import world
from tests.fuzz.world import STEP_S, Trainer, World, run_virtual
from tests.round_machine import DIGEST

NAMES = tuple(PeerId(f"p{i}") for i in range(4))


def waited_s(*links: LineRates) -> float:
    return divide(1200, 1, dict(zip(NAMES, links, strict=False)), (0, 1), 0.0).transfer_s


# ---- lies


@pytest.mark.parametrize("members", [3, 4, 5, 8, 20])
@pytest.mark.parametrize("claim", [1e6, 16e6, 1e300])
def test_a_claimed_line_is_given_two_equal_shares_at_most(members: int, claim: float) -> None:
    rates = {PeerId(f"p{i:02}"): LineRates(claim if i == 1 else 1e6) for i in range(members)}
    division = divide(10_000, 68, rates, (0, 1), 0.0)
    owned: Counter[PeerId] = Counter()
    for (start, stop), owner in zip(division.ranges, division.owners, strict=True):
        owned[owner] += stop - start
    assert owned.total() == 10_000
    assert max(owned.values()) <= 2 * 10_000 / members + 1
    assert len(owned) >= members / 2


def test_a_link_of_nearly_nothing_makes_nobody_wait() -> None:
    honest = LineRates(1200.0)
    most_s = waited_s(honest, honest, honest, LineRates(120.0))  # an honest link, ten times slower
    assert waited_s(honest, honest, honest, LineRates(1200.0, 1.0)) <= most_s
    assert waited_s(honest, honest, honest, LineRates(1e-300, 1e-300)) <= most_s


def test_where_only_one_names_a_rate_its_boast_is_held_against_home_links() -> None:
    unknown = LineRates(0.0)
    assert waited_s(unknown, unknown, unknown, LineRates(1e300)) >= 0.06 * waited_s(*[unknown] * 4)
    assert waited_s(LineRates(5e6), unknown, unknown, unknown) < waited_s(*[unknown] * 4)  # it may well be so


# ---- memory


def test_an_owner_holds_no_more_than_the_bound_whatever_begin_gives_it() -> None:
    names = tuple(PeerId(f"p{i:02}") for i in range(40))
    size = PIECE_UNIT_BYTES
    swarm, outlet = RoundSwarm(names[0], PayloadShape(size, (1,))), Outlet(names[0])
    swarm.set_live({name: PeerView(1e6) for name in names})
    attempt = Attempt(
        0, 1, bytes(16), dict.fromkeys(names, Share(1.0, 0)), (BlockRange(0, 1),), (names[0],),
        (frozenset(names),), DIGEST, names[1], 5.0, 12.0,
    )  # fmt: skip
    room, place = SliceRoom(int(bounds.MAX_OWNED_PAYLOADS * size)), memoryview(bytearray(size))
    job = PartJob(
        attempt, 0, 0, memoryview(bytes(size)), swarm=swarm, outlet=outlet, room=room,
        arrivals=Arrivals(attempt, swarm, Durations(), (0,)), place=place, now=0.0,
    )  # fmt: skip
    piece = wire.Part(key=attempt.key(), total=size, data=bytes(size))
    taken = [job.add(piece, name, 1.0) for name in names[1:]]
    assert sum(taken) == 1 + bounds.MAX_OWNED_PAYLOADS  # one lies in the mean's place
    job.check(5.0)  # the deadline: those who found room are averaged
    (wanted,) = outlet.events
    assert isinstance(wanted, ReduceWanted)
    assert len(wanted.job.slices) == 2 + bounds.MAX_OWNED_PAYLOADS
    job.reduced(wanted.job, bytes(size), place)
    assert room.take(int(bounds.MAX_OWNED_PAYLOADS * size))  # all is given back


def test_the_first_slice_is_put_together_in_the_means_place() -> None:
    """A message's memory is let go of as it comes; what comes next has a place of its own."""
    me, first, second = (PeerId(f"p{i:02}") for i in range(3))
    size = 2 * PIECE_UNIT_BYTES
    swarm, outlet = RoundSwarm(me, PayloadShape(size, (1,))), Outlet(me)
    swarm.set_live({name: PeerView(1e6) for name in (me, first, second)})
    shares = dict.fromkeys((me, first, second), Share(1.0, 0))
    attempt = Attempt(
        0, 1, bytes(16), shares, (BlockRange(0, 1),), (me,), (frozenset(shares),), DIGEST, first, 5.0, 12.0
    )
    place, slices = memoryview(bytearray(size)), dict[PeerId, bytes]()
    job = PartJob(
        attempt, 0, 0, memoryview(bytes(size)), swarm=swarm, outlet=outlet, room=SliceRoom(2 * size),
        arrivals=Arrivals(attempt, swarm, Durations(), (0,)), place=place, now=0.0,
    )  # fmt: skip
    for number, name in enumerate((first, second), 1):
        slices[name] = bytes([number]) * PIECE_UNIT_BYTES + bytes([number + 7]) * PIECE_UNIT_BYTES
        for offset in (PIECE_UNIT_BYTES, 0):
            data = slices[name][offset : offset + PIECE_UNIT_BYTES]
            assert job.add(wire.Part(total=size, offset=offset, data=data), name, 1.0)
    assert bytes(place) == slices[first]
    wanted = outlet.events.pop()
    assert isinstance(wanted, ReduceWanted)
    assert {one.peer: bytes(one.data) for one in wanted.job.slices} == {me: bytes(size), **slices}


# ---- means that come after the decision


@dataclass
class Receiver:
    """What ``Completion`` asks its member: one mean is missing, and its owner lives."""

    attempt: Attempt
    missing: PeerId = NAMES[1]

    @property
    def exchange(self) -> Receiver:
        return self

    def may_complete(self, outcome: wire.Outcome) -> bool:
        return True

    def owners_of_missing(self) -> set[PeerId]:
        return {self.missing}


def completing_of(parts_within_s: float) -> Completion:
    """Since 100.0 s."""
    swarm = RoundSwarm(NAMES[0], PayloadShape(1, (2,)))
    swarm.set_live({name: PeerView(1e6) for name in NAMES})
    attempt = Attempt(
        0, 1, bytes(16), dict.fromkeys(NAMES, Share(1.0, 0)), (BlockRange(0, 2),), (NAMES[1],),
        (frozenset(NAMES),), DIGEST, NAMES[1], parts_within_s, 12.0,
    )  # fmt: skip
    outcome = wire.Outcome(key=attempt.key())
    return Completion(Receiver(attempt), wire.Decision(), outcome, swarm, 100.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("parts_within_s", "most_s"), [(2.0, 30.0), (60.0, 240.0), (300.0, 1200.0)])
def test_an_owner_that_trickles_its_mean_keeps_nobody_for_ever(parts_within_s: float, most_s: float) -> None:
    completing, now = completing_of(parts_within_s), 100.0
    while not completing.has_stalled:
        now += 0.9 * max(bounds.GRACE_S, parts_within_s)  # just in time, again and again
        completing.handle_timer(now)
        completing.came(now)
        assert now - 100.0 <= most_s + parts_within_s
    assert now - 100.0 >= most_s


def test_who_is_overtaken_waits_for_what_is_on_its_way_and_no_longer() -> None:
    completing = completing_of(60.0)
    completing.overtaken(101.0)
    completing.came(102.0)
    completing.handle_timer(102.0 + 0.9 * bounds.GRACE_S)
    assert not completing.has_stalled
    completing.handle_timer(102.0 + bounds.GRACE_S)
    assert completing.has_stalled


# ---- conservation


class Books:
    """What one peer learned, and what of it the commits counted, by fragment: fp64 [n] each."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._codec = trainer, trainer.ledger._codec
        self._fragments = trainer.ledger.fragments
        sizes = [ledger.state.params.numel() for ledger in self._fragments]
        self.counted = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        self.partly = 0
        """Commits that counted this peer in some parts and not in others."""
        self._offers: dict[tuple[int, int, float], torch.Tensor] = {}
        self._start = [self._live(fragment) for fragment in range(len(sizes))]
        self.learned = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        for fragment, ledger in enumerate(self._fragments):
            ledger.offer = self._noting_offer(fragment, ledger.offer)  # type: ignore[method-assign]
            ledger.commit = self._noting_commit(fragment, ledger.commit)  # type: ignore[method-assign]

    def _live(self, fragment: int) -> torch.Tensor:
        return self._trainer.exchanged.live.snapshot(fragment).double()

    def _noting_offer(self, fragment: int, offer: Callable[..., Any]) -> Callable[..., Any]:
        def noting(snapshot: torch.Tensor, state: OfferState) -> Any:
            made = offer(snapshot, state)
            size = self._fragments[fragment].state.params.numel()
            codes = torch.frombuffer(bytearray(made.payload), dtype=torch.uint8)
            self._offers[fragment, made.round, state.offer_id] = self._codec.decode(codes)[:size].double()
            return made

        return noting

    def _noting_commit(self, fragment: int, commit: Callable[..., Any]) -> Callable[..., Any]:
        def noting(
            round_: int, base_version: int, mean: torch.Tensor, parts: Sequence[PartWeights], *rest: Any
        ) -> Any:
            me, values = self._trainer.me, self._codec.block_values
            for part in parts:
                if me in part.weights:
                    place = slice(part.start_block * values, part.stop_block * values)
                    offer = self._offers[fragment, round_, part.offer_ids[me]]
                    self.counted[fragment][place] += offer[place]
            self.partly += len({me in part.weights for part in parts}) > 1
            return commit(round_, base_version, mean, parts, *rest)

        return noting

    def step(self) -> None:
        """As ``Trainer.step``, and note what is learned."""
        trainer = self._trainer
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=trainer.noise), alpha=1e-2)
        before = [self._live(fragment) for fragment in range(len(self.learned))]
        for fragment, (now, then) in enumerate(zip(before, self._start, strict=True)):
            self.learned[fragment] += now - then
        trainer.sync.after_step(32, 1.0)
        self.settle()

    def settle(self) -> None:
        self._trainer.sync.take_outcomes()
        self._start = [self._live(fragment) for fragment in range(len(self.learned))]

    def check(self) -> None:
        """All that was learned is in the commits, in the residual, or still in the live parameters: once."""
        self.settle()
        for fragment, ledger in enumerate(self._fragments):
            waiting = ledger.state.params.double() - self._start[fragment]
            if ledger.residual is not None:
                waiting += ledger.residual[:].double()
            torch.testing.assert_close(
                self.counted[fragment] + waiting,
                -self.learned[fragment],
                atol=1e-3 if ledger.residual is not None else 1e-4,  # a residual has half precision
                rtol=0.0,
            )


@pytest.mark.parametrize("codec", ["fp32", "int4", "sign"])
def test_what_a_slow_link_could_not_bring_is_neither_lost_nor_counted_twice(
    codec: Literal["fp32", "int4", "sign"], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OuterConfig(
        lr=1.0, momentum=0.0, nesterov=False, gap_penalty=False, clip="none", blocking_rounds=0
    )
    lossy = CodecConfig(name=codec, error_feedback=codec != "fp32", error_feedback_decay=1.0)
    monkeypatch.setattr(world, "RUN", world.RUN.model_copy(update={"codec": lossy, "outer": plain}))
    monkeypatch.setattr(
        "p2p_co2.protocol.rounds.parts.FINEST_BYTES", 1
    )  # a tiny model's parts, as a large one's

    async def work() -> None:
        swarm = World("a", "b", "c")
        swarm.start()
        await asyncio.sleep(0)
        slow = swarm.trainers[2]
        slow.node.links.upload_bytes_per_s = 0.3 * slow.shape.payload_bytes(0) / bounds.CHEAP_S  # type: ignore[union-attr]
        await asyncio.sleep(1.5)
        books = [Books(trainer) for trainer in swarm.trainers]
        for _ in range(200):
            for book in books:
                book.step()
            await asyncio.sleep(STEP_S)
        for book in books:
            book.check()
        assert books[2].partly >= 10
        assert min(min(versions) for versions in swarm.versions()) >= 15
        assert len({tuple(held.items()) for held in swarm.digests()}) == 1
        await swarm.close()

    torch.set_num_threads(1)
    run_virtual(work())
