"""Crashes in every phase of a round, come back or not, and membership that is wrong about them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import (
    Aborted,
    Committed,
    OutcomeWithoutBytes,
    PayloadShape,
    PeerView,
    ReduceJob,
    open_decision,
)
from p2p_co2.protocol.rounds.coordination import NEVER_TOLD
from p2p_co2.protocol.rounds.decision import content_of
from p2p_co2.protocol.rounds.repute import NOT_BEGUN
from p2p_co2.protocol.rounds.swarm import coordination_order, short
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from tests.round_machine import SHAPE, begun_member
from tests.round_network import RUN, Faults, Network, make_identity


def crash_when(
    net: Network, victim: PeerId, kind: type[Message], skip: int, sender: PeerId | None = None
) -> None:
    """``victim`` dies when ``sender`` (itself) is about to send its message number ``skip`` of a kind."""
    count = 0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal count
        if isinstance(message, kind) and source == (sender or victim) and net.peers[victim].alive:
            count += 1
            if count > skip:
                net.crash(victim)
                return source != victim
        return True

    net.on_send = on_send


def crash_before_ready(net: Network, victim: PeerId) -> None:
    net.planned.discard(victim)
    net.crash(victim)


def crash_at_reduce(net: Network, victim: PeerId) -> None:
    def on_reduce(peer: PeerId, job: ReduceJob) -> bool:
        if peer == victim:
            net.crash(victim)
        return peer != victim

    net.on_reduce = on_reduce


PHASES: dict[str, Callable[[Network, PeerId], None]] = {
    "before READY": crash_before_ready,
    "at READY": lambda net, victim: crash_when(net, victim, wire.Ready, 0),
    "after the first receipt": lambda net, victim: crash_when(net, victim, wire.Waiting, 1),
    "half of BEGIN": lambda net, victim: crash_when(net, victim, wire.Begin, 2),
    "before PARTS": lambda net, victim: crash_when(net, victim, wire.Part, 0),
    "half of PARTS": lambda net, victim: crash_when(net, victim, wire.Part, 2),
    "before MEAN": crash_at_reduce,
    "half of MEAN": lambda net, victim: crash_when(net, victim, wire.Mean, 2),
    "after MEAN": lambda net, victim: crash_when(
        net, victim, wire.Result, 0, coordination_order(net.names, 0, 1)[3]
    ),
    "before RESULT": lambda net, victim: crash_when(net, victim, wire.Result, 0),
    "before COMMIT": lambda net, victim: crash_when(net, victim, wire.Decision, 0),
    "COMMIT to one peer": lambda net, victim: crash_when(net, victim, wire.Decision, 1),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ["coordinator", "successor", "last"])
def test_a_crash_in_any_phase_leaves_nobody_behind(phase: str, role: str) -> None:
    for seed in range(8):
        for detect_s in (1.0, 100.0):  # membership may be quicker or slower than the rounds' own timers
            net = Network(5, seed, Faults(latency_s=(0.01, 0.1)))
            net.detect_s = detect_s
            order = coordination_order(net.names, 0, 1)
            victim = order[{"coordinator": 0, "successor": 1, "last": -1}[role]]
            net.offer_all()
            PHASES[phase](net, victim)
            net.run_until_settled()
            assert net.undecided() == []
            net.check_agreement()
            contents = {bytes(event.mean) for name, event in net.committed().items()}
            assert len(contents) <= 1
            commits = [e for n, e in net.endings().items() if not isinstance(e, Aborted)]
            if detect_s == 1.0 and phase not in {"half of BEGIN"}:
                assert len(commits) >= 4, [getattr(e, "reason", "") for e in net.endings().values()]


@pytest.mark.parametrize("peers", [4, 6])
def test_a_coordinator_that_dies_before_it_has_told_its_successor_costs_one_attempt(peers: int) -> None:
    """The others vote to a successor that still asks for the round: it ends the attempt that it knows nothing
    of. They waited for it for up to 8 s, in a group of its own too few were left, and it counted their votes
    as offences."""
    net = Network(peers)
    first, successor, *others = coordination_order(net.names, 0, 1)
    net.detect_s = 0.5
    died_at: list[float] = []

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if source == first and isinstance(message, wire.Part):  # it sends its slices after all BEGINs
            net.crash(first)
            died_at.append(net.now)
        return not (source == first and to == successor and isinstance(message, wire.Begin))

    net.on_send = on_send
    net.keep_offering(period_s=0.2)
    net.run(1.0)
    assert died_at
    repute = [net.peers[name].machine._swarm.repute for name in others]
    blamed: set[float] = set()
    while net.now < died_at[0] + 2.5:
        net.run(0.005)
        blamed |= {one._known(successor).spoilt for one in repute}
    assert [net.peers[name].version >= 1 for name in (successor, *others)] == [True] * (peers - 1)
    aborted = {name: event.reason for name, event in net.events if isinstance(event, Aborted)}
    assert aborted == dict.fromkeys(others, NEVER_TOLD)
    assert not net.refused
    assert blamed == {0.0, NOT_BEGUN}  # it could do nothing


@pytest.mark.parametrize(("untold", "asks"), [(1, True), (3, False)])
def test_a_coordinator_that_dies_before_it_has_told_other_members_costs_one_attempt(
    untold: int, asks: bool
) -> None:
    """Who asks the successor for the round shows that it is not in it. One that asks somebody else loses its
    part; the parts of three were given to one another again and again, since these had the fewest by then."""
    net = Network(9)
    order = coordination_order(net.names, 0, 1)
    first, silent = order[0], order[-untold:]
    net.detect_s = 0.5
    died_at: list[float] = []

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if source == first and isinstance(message, wire.Part):
            net.crash(first)
            died_at.append(net.now)
        if source in silent and isinstance(message, wire.Ready) and not asks:
            return to == first
        return not (source == first and to in silent and isinstance(message, wire.Begin))

    net.on_send = on_send
    net.keep_offering(period_s=0.2)
    net.run(1.0)
    assert died_at
    net.run(died_at[0] + (2.5 if asks else 15.0) - net.now)
    assert all(net.peers[name].version >= 1 for name in order[1:] if asks or name not in silent)
    reasons = {event.reason for _, event in net.events if isinstance(event, Aborted)}
    assert reasons == ({f"the coordinator was lost before it had told {short(silent[0])}"} if asks else set())


@pytest.mark.parametrize("peers", [6, 8])
def test_an_owner_that_asks_again_ends_no_attempt_that_was_committed(peers: int) -> None:
    """Restarted, or a liar: its means are there. The successor aborted what its coordinator had committed."""
    net = Network(peers)
    net.detect_s = 0.5
    order, deliver = coordination_order(net.names, 0, 1), net.deliver
    first, successor, owner = order[0], order[1], order[-1]

    def ask_again(source: PeerId, to: PeerId, message: Message) -> None:
        if to == owner and isinstance(message, wire.Begin):
            ready = next(m for s, _, m in net.sent if s == owner and isinstance(m, wire.Ready))
            net.at(net.now + 0.02, lambda: deliver(owner, successor, ready))
        deliver(source, to, message)

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if source == first and isinstance(message, wire.Decision) and to != successor:
            net.crash(first)
            return True  # the only one who hears it
        return source != first or not isinstance(message, wire.Decision)

    net.deliver, net.on_send = ask_again, on_send  # type: ignore[method-assign]
    net.keep_offering(period_s=0.5)
    net.run(5.0)
    assert not net.peers[first].alive
    assert not [event for _, event in net.events if isinstance(event, Aborted)]
    assert [net.peers[name].version >= 1 for name in order[1:]] == [True] * (peers - 1)
    net.check_agreement()


@pytest.mark.parametrize("seed", range(4))
def test_coordinators_that_die_amid_begin_hold_up_the_others_for_seconds(seed: int) -> None:
    """Six of nine, each when it has told a random number of its group: rounds of 4 s stood still for up to
    32 s."""
    net = Network(9, seed, Faults(latency_s=(0.01, 0.1)), shape=PayloadShape(8, (16,), round_s=4.0))
    net.detect_s = 0.7
    next_at, left, deaths = net.now + 10.0, -1, 0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal next_at, left, deaths
        if isinstance(message, wire.Begin) and net.peers[source].alive and net.now >= next_at and deaths < 6:
            left = left - 1 if left >= 0 else net.random.randint(0, 7)
            if left <= 0:
                net.crash(source)
                next_at, left, deaths = net.now + 8.0, -1, deaths + 1
                return False
        return True

    def offer_in_time(name: PeerId, period_s: float) -> None:
        if (
            name not in net.busy
            and net.peers[name].alive
            and net.now >= began_at + 4 * net.peers[name].version
        ):
            net.busy.add(name)
            net.offer(name, net.peers[name].version + 1)
        net.at(net.now + period_s, lambda: offer_in_time(name, period_s))

    began_at, net.on_send = net.now, on_send
    net._offer_again = offer_in_time  # type: ignore[method-assign]
    net.keep_offering(period_s=0.1)
    made_at = [net.now]
    while net.now < began_at + 90.0:
        net.run(0.1)
        if max(peer.version for peer in net.peers.values()) >= len(made_at):
            made_at.append(net.now)
    assert deaths == 6
    assert max(later - at for at, later in pairwise(made_at)) < 7.0
    assert len(made_at) > 22
    assert len({peer.states[0] for peer in net.peers.values() if peer.alive}) == 1


def test_who_ended_an_attempt_for_want_of_a_begin_does_not_take_part_in_it_later() -> None:
    machine, begin, first, other = begun_member()
    vote = wire.Result(key=begin.key)
    machine.set_peers({other: PeerView(1e6)}, 0.9)  # the coordinator is lost
    machine.messages_to_send()
    machine.receive(vote, other, 1.0)
    assert not machine.messages_to_send()  # BEGIN may be on its way
    for _ in range(2):
        machine.receive(vote, other, 2.0)
    told = [(to, message) for to, message in machine.messages_to_send() if isinstance(message, wire.Decision)]
    assert [to for to, _ in told] == [other, other]
    assert len({message.signature for _, message in told}) == 1
    outcome = open_decision(told[0][1], RUN, SHAPE)
    assert (outcome.committed, outcome.reason) == (False, NEVER_TOLD)
    machine.receive(begin, first, 2.1)
    assert not [m for _, m in machine.messages_to_send() if isinstance(m, wire.Part)]
    assert machine.open_offers()
    vote.key.attempt = bytes(range(16))
    machine.receive(vote, make_identity(7).peer_id, 3.2)  # a stranger
    assert not [m for _, m in machine.messages_to_send() if isinstance(m, wire.Decision)]


def test_two_votes_end_at_once_an_attempt_whose_begin_was_lost() -> None:
    machine, begin, _, other = begun_member()
    others = {other, make_identity(7).peer_id}
    machine.set_peers({name: PeerView(1e6) for name in others}, 0.9)  # the coordinator is lost
    machine.messages_to_send()
    for name in others:
        machine.receive(wire.Result(key=begin.key), name, 1.0)
    assert [m for _, m in machine.messages_to_send() if isinstance(m, wire.Decision)]


def test_a_vote_that_overtakes_begin_ends_nothing() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(wire.Result(key=begin.key), other, 1.0)
    assert not machine.messages_to_send()
    machine.receive(begin, first, 1.1)
    assert [m for _, m in machine.messages_to_send() if isinstance(m, wire.Part)]


@pytest.mark.parametrize("seed", range(60))
def test_two_crashes_at_random_moments(seed: int) -> None:
    net = Network(6, seed, Faults(0.02, 0.1, (0.01, 0.3)))
    net.offer_all()
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(0, 4.0), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run_until_settled()
    assert net.undecided() == []
    net.check_agreement()


@pytest.mark.parametrize("seed", range(12))
def test_a_long_run_under_faults_keeps_one_state(seed: int) -> None:
    """Rounds follow one another while messages are lost and peers crash; whoever holds a version holds the
    same."""
    net = Network(5, seed, Faults(0.03, 0.1, (0.01, 0.3)))
    net.keep_offering(period_s=5.0)
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(20, 80), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run(200.0)
    versions = [peer.version for peer in net.peers.values() if peer.alive]
    assert max(versions) >= 25
    assert max(versions) - min(versions) <= 2
    for round_ in range(1, max(versions) + 1):
        net.check_agreement(round_)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_peers_that_crash_and_come_back_end_with_the_others(count: int, seed: int) -> None:
    """Even if so many die that a minority goes on alone, all who are back end with one history."""
    net = Network(count, seed, Faults(0.02, 0.1, (0.01, 0.4)))
    net.keep_offering(period_s=5.0)
    for _ in range(4):
        victim, delay_s = net.random.choice(net.names), net.random.uniform(5, 100)
        net.at(net.now + delay_s, lambda victim=victim: net.crash(victim))  # type: ignore[misc]
        back_at = net.now + delay_s + net.random.uniform(1, 40)
        net.at(back_at, lambda victim=victim: net.restart(victim, 5.0))  # type: ignore[misc]
    net.run(200.0)
    net.faults = Faults()
    net.stop_offering()
    net.run(100.0)
    states = {peer.states[0] for peer in net.peers.values()}
    assert len({version for version, _ in states}) == len(states), "two histories at one version"
    assert max(version for version, _ in states) - min(version for version, _ in states) <= 1
    assert max(version for version, _ in states) >= 20


@pytest.mark.parametrize("seed", range(60))
def test_false_suspicions_never_commit_two_contents_of_one_attempt(seed: int) -> None:
    """Membership is wrong again and again, differently at every peer, while two peers really die."""
    net = Network(5, seed, Faults(0.05, 0.2, (0.01, 0.5)))
    net.offer_all()
    for _ in range(12):
        name = net.random.choice(net.names)
        net.at(net.now + net.random.uniform(0, 8), lambda name=name: net.mislead(name, 0.25))  # type: ignore[misc]
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(0, 6), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run_until_settled()
    net.run(60.0)
    assert net.undecided() == []
    contents: dict[bytes, set[bytes]] = {}
    for _, event in net.events:
        if isinstance(event, Committed | OutcomeWithoutBytes):
            outcome = open_decision(wire.Decision.FromString(event.decision), RUN, net.shape)
            contents.setdefault(outcome.key.attempt, set()).add(content_of(outcome))
    assert all(len(said) == 1 for said in contents.values())
