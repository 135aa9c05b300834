"""catchup.policy: where a peer goes by what the others' heartbeats say, by hand; then whole simulated swarms
in which peers sleep, or are cut off."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.protocol.catchup import policy
from p2p_co2.protocol.catchup.policy import NOTICE_AFTER_S, HeldState, Mine, Move, PeerReport, Why
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.simnet import EventLog, Settings, VirtualSwarm
from p2p_co2.simnet.oversight import HEAL_ROUNDS
from p2p_co2.telemetry.events import CaughtUp, Event, RoundCommitted, Warned
from p2p_co2.wire.heartbeat import SLOWEST_HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Status

PHASES = {"t": Status.TRAINING, "d": Status.DRAINING, "j": Status.JOINING, "p": Status.PAUSED}


def held(version: int, history: str = "a") -> HeldState:
    return HeldState(version, f"{history}{version}".encode().ljust(32, b"."))


def view_of(said: str) -> dict[PeerId, PeerReport]:
    """Of "5a 4b:d": the first trains at version 5 of history a, the second is done at version 4 of b."""
    view = {}
    for number, word in enumerate(said.split()):
        state, _, phase = word.partition(":")
        at = HeldState(*held(int(state[:-1]), state[-1]))
        view[PeerId(f"p{number}")] = PeerReport(at, PHASES[phase or "t"], offers=not phase)
    return view


def mine_at(version: int, phase: str = "t", past_from: int = 0) -> Mine:
    """At ``version`` of history a, of which it knows the versions from ``past_from`` on."""
    past = {one: held(one).digest for one in range(past_from, version + 1)}
    return Mine(held(version), past, PHASES[phase], phase == "d")


@pytest.mark.parametrize(
    ("version", "phase", "said", "move"),
    [
        (3, "t", "3a 3a 3a", None),
        (3, "t", "4a 3a 3a", None),  # one word of three moves nobody
        (3, "t", "4a 4a 3a", Move(Why.AHEAD, 4, held(4).digest)),
        (3, "t", "4a", Move(Why.AHEAD, 4, held(4).digest)),  # of two, each is half
        (3, "t", "9a:p 9a:p 3a", None),  # who rests tells where it was left
        (3, "j", "9a:p", Move(Why.AHEAD, 9, held(9).digest)),  # where there are no others, it counts
        (0, "j", "0a:j 0a:j 4a 4a", Move(Why.AHEAD, 4, held(4).digest)),
        (3, "d", "4a:d 3a:d 3a:d", Move(Why.LAST, 4, held(4).digest)),
        (3, "d", "6a:d 3a:d 3a:d", Move(Why.LAST, 4, b"")),  # one round at a time
        (3, "d", "4a:d 3a 3a:d", None),  # while somebody offers, one alone moves nobody
        (3, "d", "4a:j 3a:d 3a:d", None),
        (5, "t", "5b 5b", Move(Why.OTHER, *held(5, "b"))),
        (5, "t", "5b", Move(Why.OTHER, *held(5, "b"))),  # one against one: the larger digest
        (5, "t", "5a 5b", None),
        (5, "t", "4a 4a 5b 5b", None),  # those behind us are on our way
        (6, "t", "3b 3b 4b", Move(Why.OTHER, *held(3, "b"))),  # we made ours alone
        (6, "t", "3b 3b 6a 6a", None),
        (6, "t", "3b 3b 6a", None),  # as many: the higher version
        (6, "t", "3a 3a 3a", None),  # they come to us, or will contradict
        (6, "d", "3a:d 3a:d 3a:d", Move(Why.OTHER, *held(3), NOTICE_AFTER_S + SLOWEST_HEARTBEAT_S)),
        (6, "d", "3a:d 3a:d 3a", None),  # not before all are done
        (6, "d", "5b:d 8c:d", Move(Why.LAST, 7, b"")),  # a replay is tried first
        (6, "d", "6a:d 5b:d 7c:d", Move(Why.LAST, 7, held(7, "c").digest)),  # it may follow ours
        (6, "d", "20b:d 6a:d 6a:d", Move(Why.LAST, 7, b"")),
        (7, "d", "5b:d 6c:d 6c:d", Move(Why.OTHER, *held(6, "c"), NOTICE_AFTER_S + SLOWEST_HEARTBEAT_S)),
    ],
)
def test_where_a_peer_goes(version: int, phase: str, said: str, move: Move | None) -> None:
    view = view_of(said)
    assert policy.decide(view, mine_at(version, phase), replayable=True) == move
    assert move is None or move.wait_s >= NOTICE_AFTER_S


def test_two_histories_become_one_whoever_looks_first() -> None:
    """Each side asks the same question, and exactly one of them moves."""
    for said in ("6a 6a 6b", "6a 6b", "6a 6a 6b 6b", "7a 6b 6b", "7a 7a 6b 6b", "5c 6b 6b 7a"):
        states = [said.held for said in view_of(said).values()]
        stay = set()
        for state in set(states):
            others = list(states)
            others.remove(state)
            view = {
                PeerId(str(n)): PeerReport(at, Status.DRAINING, offers=False) for n, at in enumerate(others)
            }
            mine = Mine(state, {state.version: state.digest}, Status.DRAINING, True)
            move = policy.decide(view, mine, replayable=False)
            stay |= {state} if move is None else set()
        assert len(stay) == 1, said


def test_a_last_round_is_not_for_those_that_cannot_replay() -> None:
    assert policy.decide(view_of("4a:d 3a:d 3a:d"), mine_at(3, "d"), replayable=False) is None


@pytest.mark.parametrize(
    ("said", "promised", "vouched"),
    [
        ("9a 9a 9a", held(9), True),
        ("9a 9a 9a", held(9, "b"), False),
        ("9b 9a 8a", held(9, "b"), None),  # one word against another
        ("9a 9b 8a", held(9), None),
        ("9a 9a 9b", held(9), True),
        ("12b 9a 9a", held(12, "b"), None),  # its own word only
        ("99b 9a 9a", held(9 + AHEAD_AT_MOST + 1, "b"), False),
        ("9a", held(9), None),
    ],
)
def test_who_vouches_for_the_state_of_a_donor(said: str, promised: HeldState, vouched: bool | None) -> None:
    joins = Mine(held(0), {}, Status.JOINING)
    assert policy.bears_out(view_of(said), joins, PeerId("p0"), promised) is vouched


@pytest.mark.parametrize(
    ("said", "here", "givers", "is_wrong"),
    [
        ("9b 9a 9a", 3, 1, True),
        ("9b 9b 9a", 3, 2, False),
        ("9b 9a", 3, 1, False),  # one word against another is nothing
        ("9b 9a", 9, 1, True),  # we are among them
    ],
)
def test_a_state_that_most_contradict_is_refused(said: str, here: int, givers: int, is_wrong: bool) -> None:
    peers = [PeerId(f"p{number}") for number in range(givers)]
    assert policy.is_contradicted(view_of(said), mine_at(here), peers, held(9, "b")) is is_wrong


def test_a_state_that_one_alone_has_reached_is_one_word() -> None:
    assert policy.is_one_word(view_of("9a 3a 3a"), mine_at(3), 9)
    assert not policy.is_one_word(view_of("9a 9a 3a 3a 3a"), mine_at(3), 9)
    assert policy.is_one_word(view_of("9a 9b 3a 3a 3a"), mine_at(3), 9)
    assert not policy.is_one_word(view_of("4a 4b"), mine_at(3), 4)


def test_donors_have_the_state_and_rest_only_where_no_other_has() -> None:
    view = view_of("5a 4a 4b 3a 4a:p")
    assert set(policy.donors(view, 0, 4, held(4).digest)) == {"p0", "p1"}
    assert set(policy.donors(view, 0, 4, b"")) == {"p0", "p1", "p2"}
    assert policy.donors(view_of("4a:p 3a"), 0, 4, b"") == ("p0",)


# ---- whole swarms


@dataclass(frozen=True)
class Asleep:
    """All but the first sleep from ``at`` to ``until``; or (``is_net``) no two hear each other."""

    at: float
    calm_at: float
    is_net: bool = False

    def plan(self, swarm: VirtualSwarm) -> None:
        if self.is_net:
            sides = {peer: index for index, peer in enumerate(swarm.peer_ids())}
            swarm.world.call_at(self.at, swarm.internet.split, sides)
            swarm.world.call_at(self.calm_at, swarm.internet.heal)
            return
        for index in range(1, len(swarm.volunteers)):
            swarm.world.call_at(self.at, swarm.stall, index, self.calm_at)


@pytest.mark.parametrize(
    ("peers", "fault", "text"),
    [
        (3, Asleep(20.0, 45.0), "of this peer alone among it"),  # they wake before its end
        (4, Asleep(20.0, 60.0), ""),  # long after it
        (3, Asleep(20.0, 48.0, is_net=True), "going over to theirs"),
    ],
)
def test_one_that_trained_alone_and_those_who_wake_end_in_one_state(
    peers: int, fault: Asleep, text: str
) -> None:
    """Each ended with a state of its own, after waiting for the others as long as an end may take."""
    clock = ClockConfig(mode="time", round_s=4.0, rounds=12)
    run, told = RunConfig(name="sleepers", fragments=2, clock=clock), list[str]()
    alone, given_up = Counter[tuple[str, int]](), Counter[tuple[str, int]]()

    def hear(event: Event) -> None:
        if isinstance(event, Warned):
            told.append(event.text)
        elif isinstance(event, RoundCommitted) and event.group_size == 1:
            alone[event.peer, event.fragment] += 1
        elif isinstance(event, CaughtUp):
            given_up[event.peer, event.fragment] += event.rounds_given_up

    log = EventLog(digests=False)
    log.readers.append(hear)
    faults = fault  # a plan like ``Churn`` and ``Storm``
    settings = Settings(run=run, peers=peers, seed=1, faults=faults, profile="fibre")  # type: ignore[arg-type]
    swarm = VirtualSwarm(settings, log)
    result = swarm.run()
    assert result.violations == []
    assert swarm.books.written_off["counted in a history that was given up"] > 0
    assert len(result.digests) == peers
    assert len(set(result.digests.values())) == 1
    assert any(text in words for words in told)
    assert given_up.total() > 0
    assert given_up <= alone


@pytest.mark.parametrize(
    ("at", "rounds", "seed"), [(20.0, 12, 1), (20.0, 12, 3), (25.0, 24, 15), (25.0, 24, 19), (25.0, 24, 35)]
)
def test_four_that_were_cut_off_from_one_another_are_soon_in_one_state(
    at: float, rounds: int, seed: int
) -> None:
    """Each was in a state of its own for a minute, or one to the end, when it had taken the others for
    liars."""
    clock = ClockConfig(mode="time", round_s=4.0, rounds=rounds)
    run, fault = RunConfig(name="sleepers", fragments=2, clock=clock), Asleep(at, at + 12.0, is_net=True)
    settings = Settings(run=run, peers=4, seed=seed, faults=fault, profile="fibre")  # type: ignore[arg-type]
    result = VirtualSwarm(settings, EventLog(digests=False)).run()
    assert result.violations == []
    assert result.forks > 0
    assert result.longest_fork_s < 12.0 + HEAL_ROUNDS * clock.round_s
    assert len(set(result.digests.values())) == 1
