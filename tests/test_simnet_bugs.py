"""Tests of the tests: bugs planted in a simulated peer, each of which a law must catch by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, PartWeights, Reduced
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.rounds import DECISION_CONTEXT, bounds
from p2p_co2.protocol.rounds.assembly import ReorderBuffer
from p2p_co2.protocol.rounds.coordination import Coordination
from p2p_co2.protocol.rounds.fragment import FragmentRounds
from p2p_co2.simnet import EventLog, Settings, Storm, Violation, VirtualSwarm
from p2p_co2.simnet.campaign import STORM_OFFER_S, storm_settings
from p2p_co2.simnet.laws import Auditor, Books, StateRecord
from p2p_co2.simnet.ledger import CountingLedger
from p2p_co2.simnet.oversight import LOOK_EVERY_S
from p2p_co2.simnet.virtual_time import VirtualTime, loop_of
from p2p_co2.simnet.work import CountedState, WorkUnits, add, mean_of, pack, starts, unpack
from p2p_co2.telemetry.events import FragmentSent
from p2p_co2.trainer.synchroniser import Synchroniser
from p2p_co2.wire.messages_pb2 import Outcome
from p2p_co2.wire.schedule import OfferState

ROUND_S = 4.0
CLOCK = ClockConfig(mode="time", round_s=ROUND_S, rounds=5)
ONE_BLOCK = starts([1], [64], 64)
FORM = ONE_BLOCK[0].form
SEEDS = range(1, 9)
"""Storms in which some offers come to nothing: only there can work be lost."""


def violations_with(
    make_ledger: type[CountingLedger] = CountingLedger, seed: int = 5, storm: bool = False
) -> list[Violation]:
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=10 if storm else 5)
    run = RunConfig(name="planted", fragments=2, clock=clock)
    faults = Storm(3.0, 19.0) if storm else None
    settings = Settings(run=run, peers=6, seed=seed, faults=faults, checkpoint_every_s=5.0)
    swarm = VirtualSwarm(settings, EventLog(), make_ledger=make_ledger)
    if storm:  # what a bug breaks it has broken by then, and it may keep all from agreeing
        swarm.world.call_at(60.0, swarm.stop)
    return swarm.run().violations


def swarm_of(peers: int = 3, clock: ClockConfig = CLOCK, **more: Any) -> VirtualSwarm:
    run = RunConfig(name="planted", fragments=2, clock=clock)
    return VirtualSwarm(Settings(run=run, peers=peers, seed=5, **more), EventLog())


def laws(violations: list[Violation]) -> set[str]:
    return {violation.law for violation in violations}


def caught_in_a_storm(bug: type[CountingLedger], law: str) -> list[Violation]:
    """What breaks in the first of ``SEEDS`` in which the ``law`` does; nothing if it never does."""
    storms = (violations_with(bug, seed, storm=True) for seed in SEEDS)
    return next((found for found in storms if law in laws(found)), [])


def test_work_is_conserved_where_weights_are_capped() -> None:
    """Peers are up to 36 times as fast as others: the mean is by what counts, each unit is in it once."""
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=8)
    run = RunConfig(name="unequal", fragments=2, clock=clock, weight_cap=1.0)
    result = VirtualSwarm(
        Settings(run=run, peers=8, seed=3, speed_spread=6.0, faults=Storm(3.0, 12.0)), EventLog()
    ).run()
    assert result.violations == []
    assert result.counts["contribution_capped"] > 0


class CountsTwice(CountingLedger):
    """An owner that puts its first contributor into the mean twice and names it once."""

    async def reduce(self, fragment: int, slices: Any) -> Reduced:
        _, weight, data = slices[0]
        mean = mean_of([*((weight, data) for _, weight, data in slices), (weight, data)])
        return Reduced(mean, tuple(weight for _, weight, _ in slices))


class AppliesWhatItHolds(CountingLedger):
    """A member that takes the mean of its own offer for agreed, without any decision."""

    def offer(self, fragment: int, units: int, state: OfferState) -> Any:
        offer = super().offer(fragment, units, state)
        mine = self.fragments[fragment]
        if mine.state.version == 1 and self.work.name.endswith("/2"):
            own = mean_of([(state.weight, offer.payload)])
            mean = AgreedMean(fragment, offer.round, mine.state.version, mine.state.digest, own, ())
            after = CountedState.of(mine.state.form, offer.round, add(mine.state.sums, unpack(mean.mean)))
            self.audit.committed(mean, mine.state, after)
            mine.state = after
        return offer


class LosesResidual(CountingLedger):
    """A peer whose offer came to nothing and that throws the work away instead of carrying it over."""

    def give_up(self, fragment: int, offer_id: bytes) -> None:
        offer = self.fragments[fragment].in_flight
        super().give_up(fragment, offer_id)
        if offer is not None and offer.offer_id == offer_id:
            self.fragments[fragment].counted = [offer.units] * len(offer.counted)


class ForgetsWhatWasMissed(CountingLedger):
    """A peer that takes a round for its own although the mean was made without it."""

    def count(self, fragment: int, round_: int, parts: Any) -> Any:
        offer, mine = super().count(fragment, round_, parts), self.fragments[fragment]
        if offer is None and mine.in_flight is not None:
            mine.counted = [mine.in_flight.units] * len(mine.counted)
        return offer


class TakesAnyState(CountingLedger):
    """A peer that keeps what a donor sent, though it is not the state that was agreed on; another one each
    time."""

    taken = count(1)

    def take_over(self, fragment: int, data: bytes, agreed: AgreedVersion, *more: Any) -> AgreedVersion:
        super().take_over(fragment, data, agreed, *more)
        mine, wrong = self.fragments[fragment], next(self.taken)
        mine.state = CountedState.of(
            mine.state.form, mine.state.version, [lane + wrong for lane in mine.state.sums]
        )
        return AgreedVersion(mine.state.version, mine.state.digest)


def test_without_a_bug_these_laws_hold() -> None:
    assert violations_with(CountingLedger) == []
    assert "conservation" not in laws(violations_with(CountingLedger, SEEDS[0], storm=True))


def test_a_peer_that_is_counted_twice_is_caught() -> None:
    assert "conservation" in laws(violations_with(CountsTwice))


def test_a_mean_that_nobody_committed_is_caught() -> None:
    assert {"signed", "forks"} <= laws(violations_with(AppliesWhatItHolds))


def test_a_state_that_nobody_agreed_on_is_caught() -> None:
    assert caught_in_a_storm(TakesAnyState, "agreed state")


def test_a_timer_that_nobody_heeds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = swarm_of()
    monkeypatch.setattr(Membership, "handle_timer", lambda rounds, now: None)
    swarm.world.call_at(12.0, swarm.stop)
    assert any("the timer of membership is" in text for text in deadlines(swarm.run().violations))


@pytest.mark.parametrize("stands_s", [4.5, math.inf])
def test_a_process_that_stands_still_is_caught_when_its_timer_is_overdue(stands_s: float) -> None:
    """It takes no turn meanwhile, and nobody told the laws that it was stopped."""
    swarm, due_at = swarm_of(), list[float]()

    def stand_still() -> None:
        process = swarm.processes[0]
        assert process.node is not None
        timers = [at for at in process.node.timers().values() if at is not None]
        due_at.append(swarm.world.now + min(timers) - process.node.now())
        process.loop.stall()
        if stands_s < math.inf:
            swarm.world.call_at(swarm.world.now + stands_s, process.loop.go_on)

    swarm.world.call_at(8.3, stand_still)
    swarm.world.call_at(15.0, swarm.stop)
    found = swarm.run().violations
    assert laws(found) == {"deadlines"}
    assert LOOK_EVERY_S <= found[0].at - due_at[0] <= 2 * LOOK_EVERY_S
    assert found[0].peer == swarm.volunteers[0].identity.peer_id


def test_an_end_that_takes_longer_than_it_was_told_to_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody lingers for five minutes more than it said."""
    swarm, flush = swarm_of(), Synchroniser.flush_waits

    def linger(sync: Synchroniser, finished: bool) -> Iterator[float]:
        yield from flush(sync, finished)
        until = swarm.world.now + 300.0
        while swarm.world.now < until:
            yield 1.0

    monkeypatch.setattr(Synchroniser, "flush_waits", linger)
    found = swarm.run().violations
    assert [one.law for one in found] == ["deadlines"] * 3
    assert all(re.fullmatch(r"is there 14\d s after its training, for 85 s told", one.text) for one in found)


def without_end(monkeypatch: pytest.MonkeyPatch, roles: Callable[[FragmentRounds], list[Mock]]) -> None:
    """All offers wait, and no timer would ever end them."""
    monkeypatch.setattr(FragmentRounds, "roles", roles)
    monkeypatch.setattr(Coordination, "close_complete", lambda coordination, now: False)
    monkeypatch.setattr(Coordination, "get_timer", lambda coordination: None)


def first_offer_of(swarm: VirtualSwarm) -> list[float]:
    """When, once it has come."""
    offered_at = list[float]()
    swarm.log.readers.append(
        lambda event: offered_at.append(swarm.world.now) if isinstance(event, FragmentSent) else None
    )
    return offered_at


def test_an_offer_without_any_timer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    without_end(monkeypatch, lambda fragment: [])
    swarm = swarm_of()
    offered_at = first_offer_of(swarm)
    swarm.world.call_at(12.0, swarm.stop)
    found = swarm.run().violations
    assert deadlines(found)[0] == "an open offer has no timer"
    assert 0 <= found[0].at - offered_at[0] <= LOOK_EVERY_S


def test_an_offer_that_never_ends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timers never come: what is left is that it is open for too long."""

    def asleep(fragment: FragmentRounds) -> list[Mock]:
        mine = fragment.mine
        return [] if mine.offer is None else [Mock(get_timer=lambda: mine.offered_at + 1e6)]

    without_end(monkeypatch, asleep)
    swarm = VirtualSwarm(storm_settings(5, peers=6), EventLog())
    swarm.world.call_at(200.0, swarm.stop)
    result = swarm.run()
    found = deadlines(result.violations)
    assert re.fullmatch(r"an offer is open for 6[01] s", found[0])
    assert result.longest_offer_s > STORM_OFFER_S == swarm.inspector.offer_bound_s


def deadlines(violations: list[Violation]) -> list[str]:
    return [violation.text for violation in violations if violation.law == "deadlines"]


def without_bound(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, bound: str) -> None:
    """``method`` heeds no ``bound`` of ``rounds.bounds`` any more; the machine still names it."""
    once = getattr(kind, method)

    def heedless(machine: Any, *given: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(bounds, bound, 10**9)
            return once(machine, *given)

    monkeypatch.setattr(kind, method, heedless)


def test_what_grows_and_falls_again_within_a_second_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that overtook their BEGIN are kept without a bound, for some milliseconds."""
    most = 10
    without_bound(monkeypatch, ReorderBuffer, "hold", "EARLY_MESSAGES")
    monkeypatch.setattr(bounds, "EARLY_MESSAGES", most)
    swarm, looks = VirtualSwarm(storm_settings(3), EventLog()), list[int]()

    def look() -> None:
        nodes = [process.node for process in swarm.processes.values() if process.node is not None]
        looks.extend(node.rounds.held()["EARLY_MESSAGES"][0] for node in nodes)
        swarm.world.call_at(swarm.world.now + 1.0, look)

    swarm.world.call_at(1.0, look)
    found = swarm.run().violations
    assert max(looks) <= most
    assert laws(found) == {"memory"}
    assert found[0].text.startswith("EARLY_MESSAGES: holds 11, the bound is 10")


def test_every_machine_that_a_node_has_is_looked_over_for_what_it_holds() -> None:
    result = swarm_of(6).run()
    assert not result.violations
    for name in ("KEEP_DECISIONS", "MAX_PEERS live", "HISTORY_ROUNDS_KEPT"):
        held, bound = result.held[name]
        assert 0 < held <= bound, name


@pytest.mark.parametrize("bug", [LosesResidual, ForgetsWhatWasMissed])
def test_lost_work_is_caught(bug: type[CountingLedger]) -> None:
    found = caught_in_a_storm(bug, "conservation")
    assert any(violation.law == "conservation" and "lost" in violation.text for violation in found)
    assert ("failed round" in laws(found)) is (bug is LosesResidual)


@pytest.mark.parametrize("signed_upon", ["the common start", "nothing", "another state"])
def test_an_offer_counted_in_the_other_half_of_a_split_is_written_off_only_if_it_was(
    signed_upon: str,
) -> None:
    """Seed 150 of the storms: told that its offer was counted, a peer took over the state that the other half
    had made of the same round."""
    books = Books(ONE_BLOCK, lambda: 0.0)
    work = books.works["a"] = WorkUnits("a", 6)
    loop = loop_of(VirtualTime())
    ledger = CountingLedger("a", ONE_BLOCK, 1.0, work=work, audit=Auditor(books, "a"), loop=loop)
    ledger.fragments[0].counted = [0]
    start = ledger.fragments[0].state
    offer = ledger.offer(0, work.units, OfferState(bytes(8), 2))
    ledger.audit.offered(0, start, 0, offer)
    outcome = Outcome(state_digest=start.digest)
    outcome.key.round = 1
    outcome.members.add(peer="a", weight=2.0, offer_id=bytes(8))
    outcome.parts.add(start_block=0, stop_block=1).contributors.add(peer="a", weight=2.0)
    if signed_upon == "another state":
        outcome.state_digest = bytes(32)
    if signed_upon != "nothing":
        books.sign(DECISION_CONTEXT, outcome.SerializeToString())
    other = CountedState.of(FORM, 1, [7, 1])
    books.histories[0][other.digest] = StateRecord(other, start.digest, {"b": (1,)})
    told = (PartWeights(0, 1, {"a": 2.0}, offer_ids={"a": bytes(8)}),)
    ledger.take_over(0, pack((1, *other.sums)), AgreedVersion(1, other.digest), told)
    assert laws(books.violations) == (set() if signed_upon == "the common start" else {"conservation"})
    assert sum(books.written_off.values()) == (6 if signed_upon == "the common start" else 0)
