"""Tests of the tests: bugs planted in a simulated peer, each of which a law must catch by name."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.membership import Membership
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, PartWeights
from p2p_co2.rounds import DECISION_CONTEXT
from p2p_co2.rounds.bounds import KEEP_DECISIONS, READY_CAP_S, ROUND_CAP_S
from p2p_co2.rounds.coordination import Coordination
from p2p_co2.rounds.decision import Verdicts
from p2p_co2.rounds.fragment import FragmentRounds
from p2p_co2.simnet import EventLog, Settings, Storm, Swarm, Violation
from p2p_co2.simnet.laws import Auditor, Books, History
from p2p_co2.simnet.ledger import CountingLedger, State
from p2p_co2.simnet.virtual_time import VirtualTime
from p2p_co2.simnet.work import Work, add, mean_of, pack, unpack
from p2p_co2.wire.limits import MAX_MEMBERS
from p2p_co2.wire.messages_pb2 import Decision, Outcome

ROUND_S = 4.0
CLOCK = ClockConfig(mode="time", round_s=ROUND_S, rounds=5)
SEEDS = range(1, 9)
"""Storms in which some offers come to nothing: only there can work be lost."""


def violations_with(
    make_ledger: type[CountingLedger] = CountingLedger, seed: int = 5, storm: bool = False
) -> list[Violation]:
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=10 if storm else 5)
    run = RunConfig(name="planted", fragments=2, clock=clock)
    faults = Storm(3.0, 19.0) if storm else None
    settings = Settings(run=run, peers=6, seed=seed, faults=faults, checkpoint_every_s=5.0)
    return Swarm(settings, EventLog(), make_ledger=make_ledger).run().violations


def laws(violations: list[Violation]) -> set[str]:
    return {violation.law for violation in violations}


class CountsTwice(CountingLedger):
    """An owner that puts its first contributor into the mean twice and names it once."""

    async def reduce(self, fragment: int, slices: Any, step: str = "mean") -> bytes:
        _, weight, data = slices[0]
        return mean_of([*((weight, data) for _, weight, data in slices), (weight, data)])


class AppliesWhatItHolds(CountingLedger):
    """A member that takes the mean of its own offer for agreed, without any decision."""

    def _offer(self, fragment: int, units: int, weight: float) -> Any:
        offer = super()._offer(fragment, units, weight)
        mine = self.fragments[fragment]
        if mine.state.version == 1 and self.work.name.endswith("/2"):
            own = mean_of([(weight, offer.payload)])
            mean = AgreedMean(fragment, offer.round, mine.state.version, own, ())
            after = State.of(fragment, offer.round, add(mine.state.sums, unpack(mean.mean)))
            self.audit.committed(mean, mine.state, after)
            mine.state = after
        return offer


class LosesResidual(CountingLedger):
    """A peer whose offer came to nothing and that throws the work away instead of carrying it over."""

    def _abort(self, fragment: int, round_: int) -> None:
        offer = self.fragments[fragment].in_flight
        super()._abort(fragment, round_)
        if offer is not None and offer.round == round_:
            self.fragments[fragment].counted = [offer.units] * len(offer.counted)


class ForgetsWhatWasMissed(CountingLedger):
    """A peer that takes a round for its own although the mean was made without it."""

    def _mine(self, mine: Any, round_: int, parts: Any) -> Any:
        offer, is_foreign = super()._mine(mine, round_, parts)
        if offer is None and mine.in_flight is not None:
            mine.counted = [mine.in_flight.units] * len(mine.counted)
        return offer, is_foreign


class TakesAnyState(CountingLedger):
    """A peer that keeps what a donor sent, though it is not the state that was agreed on."""

    def _adopt(self, fragment: int, data: bytes, agreed: AgreedVersion, *more: Any) -> AgreedVersion:
        super()._adopt(fragment, data, agreed, *more)
        mine = self.fragments[fragment]
        mine.state = State.of(fragment, mine.state.version, [lane + 1 for lane in mine.state.sums])
        return AgreedVersion(mine.state.version, mine.state.digest)


def test_without_a_bug_these_laws_hold() -> None:
    assert violations_with(CountingLedger) == []
    for seed in SEEDS:
        assert "conservation" not in laws(violations_with(CountingLedger, seed, storm=True))


def test_a_peer_that_is_counted_twice_is_caught() -> None:
    assert "conservation" in laws(violations_with(CountsTwice))


def test_a_mean_that_nobody_committed_is_caught() -> None:
    assert {"signed", "forks"} <= laws(violations_with(AppliesWhatItHolds))


def test_a_state_that_nobody_agreed_on_is_caught() -> None:
    assert "agreed state" in laws(violations_with(TakesAnyState, storm=True))


def test_a_timer_that_nobody_heeds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(run=RunConfig(name="planted", fragments=2, clock=CLOCK), peers=3, seed=5)
    swarm = Swarm(settings, EventLog())
    monkeypatch.setattr(Membership, "handle_timer", lambda rounds, now: None)
    swarm.world.call_at(12.0, swarm.stop)
    assert any("the timer of membership is" in text for text in deadlines(swarm.run().violations))


def test_an_offer_without_any_deadline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """All offers wait, and no timer would ever end them: what is left is that they are open for too long."""
    monkeypatch.setattr(FragmentRounds, "get_timer", lambda fragment: None)
    monkeypatch.setattr(FragmentRounds, "handle_timer", lambda fragment, now: None)
    monkeypatch.setattr(Coordination, "close_complete", lambda coordination, now: False)
    monkeypatch.setattr(Coordination, "get_timer", lambda coordination: None)
    monkeypatch.setattr(Coordination, "handle_timer", lambda coordination, now: None)
    clock = CLOCK.model_copy(update={"rounds": 600})
    swarm = Swarm(
        Settings(run=RunConfig(name="planted", fragments=2, clock=clock), peers=3, seed=5), EventLog()
    )
    swarm.world.call_at(READY_CAP_S + ROUND_CAP_S + 60.0, swarm.stop)
    assert any("an offer is open for" in text for text in deadlines(swarm.run().violations))


def deadlines(violations: list[Violation]) -> list[str]:
    return [violation.text for violation in violations if violation.law == "deadlines"]


def test_a_machine_that_keeps_everything_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(verdicts: Verdicts, decision: Decision, outcome: Outcome) -> None:
        verdicts.end(outcome.key.attempt)
        if outcome.committed:
            verdicts._commits[outcome.key.round] = decision, outcome

    monkeypatch.setattr(Verdicts, "keep", keep)
    clock = CLOCK.model_copy(update={"rounds": KEEP_DECISIONS + 2})
    run = RunConfig(name="planted", fragments=2, clock=clock)
    found = Swarm(Settings(run=run, peers=3, seed=5), EventLog()).run().violations
    assert {violation.law for violation in found} == {"memory"}
    assert f"KEEP_DECISIONS: holds {KEEP_DECISIONS + 1}, the bound is {KEEP_DECISIONS}" in found[0].text


def test_every_machine_that_a_node_has_is_looked_over_for_what_it_holds() -> None:
    run = RunConfig(name="cells", fragments=2, clock=CLOCK, cells=2, group_size=MAX_MEMBERS)
    result = Swarm(Settings(run=run, peers=6, seed=5), EventLog()).run()
    assert not result.violations
    for name in (
        "KEEP_DECISIONS",
        "COUNCILS",
        "MAX_PEERS live",
        "HISTORY_ROUNDS_KEPT",
        "MAX_LANES",
        "MAX_WATCHED",
    ):
        held, bound = result.held[name]
        assert 0 < held <= bound, name


@pytest.mark.parametrize("bug", [LosesResidual, ForgetsWhatWasMissed])
def test_lost_work_is_caught(bug: type[CountingLedger]) -> None:
    found = [violation for seed in SEEDS for violation in violations_with(bug, seed, storm=True)]
    assert any(violation.law == "conservation" and "lost" in violation.text for violation in found)
    assert ("failed round" in laws(found)) is (bug is LosesResidual)


@pytest.mark.parametrize("views_differed", [False, True])
def test_a_fork_is_seen_as_it_comes_however_soon_it_goes(views_differed: bool) -> None:
    books = Books([1], lambda: 0.0)
    books.views_differed = views_differed
    for sums in ([1, 1], [1, 1], [2, 1]):
        books.reached("a", 0, History(State.of(0, 1, sums), b"", {}))
        assert bool(books.violations) == (sums == [2, 1] and not views_differed)
    assert laws(books.violations) <= {"forks"}
    assert len(books.histories[0]) == 3


@pytest.mark.parametrize("signed_upon", ["the common start", "nothing", "another state"])
def test_an_offer_counted_in_the_other_half_of_a_split_is_written_off_only_if_it_was(
    signed_upon: str,
) -> None:
    """Seed 150 of the storms: told that its offer was counted, a peer took over the state that the other half
    had made of the same round."""
    books = Books([1], lambda: 0.0)
    work = books.works["a"] = Work("a", 6)
    loop = VirtualTime().loop()
    ledger = CountingLedger("a", [1], [64], 1.0, work=work, audit=Auditor(books, "a"), loop=loop)
    ledger.fragments[0].counted = [0]
    start = ledger.fragments[0].state
    offer = ledger._offer(0, work.units, 2.0)
    ledger.audit.offered(0, start, 0, offer)
    outcome = Outcome(committed=True, state_digest=start.digest)
    outcome.key.round = 1
    outcome.parts.add(start_block=0, stop_block=1).contributors.add(peer="a", weight=2.0)
    if signed_upon == "another state":
        outcome.state_digest = bytes(32)
    if signed_upon != "nothing":
        books.sign(DECISION_CONTEXT, outcome.SerializeToString())
    other = State.of(0, 1, [7, 1])
    books.histories[0][other.digest] = History(other, start.digest, {"b": (1,)})
    told = (PartWeights(0, 1, {"a": 2.0}),)
    ledger._adopt(0, pack((1, *other.sums)), AgreedVersion(1, other.digest), told)
    assert laws(books.violations) == (set() if signed_upon == "the common start" else {"conservation"})
    assert sum(books.written_off.values()) == (6 if signed_upon == "the common start" else 0)
