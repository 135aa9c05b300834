"""Crashes in every phase of a round, come back or not, and membership that is wrong about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import (
    Aborted,
    Committed,
    OutcomeWithoutBytes,
    ReduceJob,
    open_decision,
)
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_network import RUN, Faults, Network


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
    "before DECISION": lambda net, victim: crash_when(net, victim, wire.Decision, 0),
    "DECISION to one peer": lambda net, victim: crash_when(net, victim, wire.Decision, 1),
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


@pytest.mark.parametrize("seed", range(12))
def test_a_long_run_under_faults_keeps_one_state(seed: int) -> None:
    """Rounds follow one another while messages are lost and peers crash; whoever holds a version holds the
    same."""
    net = Network(5, seed, Faults(0.03, 0.1, (0.01, 0.3)))
    net.notices = True  # two of three may go on without the third
    net.keep_offering(period_s=5.0)
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(20, 80), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run(200.0)
    versions = [peer.version for peer in net.peers.values() if peer.alive]
    assert max(versions) >= 25
    assert max(versions) - min(versions) <= 2
    for round_ in range(1, max(versions) + 1):
        net.check_agreement(round_)


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
            contents.setdefault(outcome.key.attempt, set()).add(outcome.SerializeToString(deterministic=True))
    assert all(len(said) == 1 for said in contents.values())
