"""Peers that are late for a round, by a step or by a whole round: they are in the next one, or soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.rounds import Aborted, Began, Distrusted, OutcomeWithoutBytes, PayloadShape
from p2p_co2.protocol.rounds.deadline import MISSES
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.telemetry.events import Event, FragmentApplied
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST
from tests.round_network import Network, contributors_of

ROUND_S = 3.0

# ---- a swarm whose rounds take most of the time


def contributions(
    rounds: int,
    left_out: int,
    stall_s: float,
    *,
    seed: int = 3,
    step_s: float = 0.075,
    payload_mb: float = 8.0,
) -> dict[str, str]:
    """Four peers on lines of 100 Mbit/s, 45 ms apart; each exchange of 8 MB takes about 2.0 s of a round of
    3.0 s, and the replay of a round 1.5 s. One peer stands still as a round begins. By peer, a letter for
    each round: x if it contributed, . if not."""
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=rounds)
    settings = Settings(
        run=RunConfig(name="left-out", fragments=1, clock=clock), peers=4, seed=seed, blocks=(64,),
        real_bytes_per_block=payload_mb * 1e6 / 64, step_s=step_s, speed_spread=1.0, start_spread_s=0.1,
        largest_skew_s=0.0, largest_drift=0.0,
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    line = LinkProfile("line", 100_000_000, 100_000_000, 45.0, 0.0, 0.0, "open")
    for volunteer in swarm.volunteers:
        volunteer.profile = line
    names = {volunteer.identity.peer_id: volunteer.name for volunteer in swarm.volunteers}
    marks: dict[str, dict[int, str]] = {name: {} for name in names.values()}

    def read(event: Event) -> None:
        if isinstance(event, FragmentApplied):
            marks[names[PeerId(event.peer)]][event.version] = "x" if event.contributed else "."

    swarm.log.readers.append(read)
    at = (left_out - 0.02) * ROUND_S
    swarm.world.call_at(at, lambda: swarm.stall(1, swarm.world.now + stall_s))
    result = swarm.run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    return {name: "".join(of[version] for version in sorted(of)) for name, of in marks.items()}


def test_a_peer_that_missed_a_round_is_not_behind_for_good() -> None:
    """Its replay takes longer than the pause before the next round: it missed all but the last after that."""
    marks = contributions(rounds=12, left_out=4, stall_s=1.8)
    left_out = marks.pop("peer-1")
    assert set(marks.values()) == {"x" * len(left_out)}
    assert "." in left_out
    assert left_out.count(".") <= 2
    assert left_out.endswith("xxxxx")


@pytest.mark.parametrize(("seed", "payload_mb"), [(6, 8.0), (8, 9.6), (4, 11.0), (5, 11.0)])
def test_where_steps_are_long_and_rounds_short_nobody_is_left_out(seed: int, payload_mb: float) -> None:
    """Steps are a quarter of a round, and an exchange takes 2.3 to 3 s of it: a mean may come just before a
    peer's next point or just after it, and of peers that end their steps at other moments one was ready after
    BEGIN. One of four missed up to nine rounds in a row."""
    marks = contributions(
        rounds=16, left_out=5, stall_s=0.0, seed=seed, step_s=ROUND_S / 4, payload_mb=payload_mb
    )
    assert set("".join(marks.values())) == {"x"}


@pytest.mark.parametrize(
    ("seed", "payload_mb", "stall_s"), [(6, 8.0, 3.0), (6, 9.6, 3.0), (6, 9.6, 4.0), (5, 11.0, 1.8)]
)
def test_who_missed_a_round_is_not_ready_just_after_the_others_have_begun_for_good(
    seed: int, payload_mb: float, stall_s: float
) -> None:
    """Its replay ends as the others begin the next: they wait for it, and it offers as soon as it has met it,
    not at its next point. It missed up to eleven in a row."""
    marks = contributions(
        rounds=16, left_out=5, stall_s=stall_s, seed=seed, step_s=ROUND_S / 4, payload_mb=payload_mb
    )
    assert 1 <= max(of.count(".") for of in marks.values()) <= 2


# ---- one round


def late_network(count: int = 4, late: int = 1) -> tuple[Network, list[PeerId]]:
    """All but the ``late`` ones offer; those are seen, and can offer, when the round has begun."""
    net = Network(count, shape=PayloadShape(8, (1 << 15,)))
    absent = coordination_order(net.names, 0, 1)[-late:]
    views = {name: net._view(name) for name in net.names if name not in absent}
    for name in views:
        net.peers[name].machine.set_peers(views, net.now)
        net.pump(name)
    for name in views:
        net.offer(name)
    for _ in range(1000):
        if any(isinstance(event, Began) for _, event in net.events):
            break
        net.run(0.005)
    net.tell_everybody()
    return net, absent


def test_a_late_peer_waits_for_the_round_and_fetches_it() -> None:
    """Its work is not in it, and nobody is charged."""
    net, (late,) = late_network()
    net.offer(late)
    net.run_until_settled()
    ended = net.endings()[late]
    assert isinstance(ended, OutcomeWithoutBytes)
    assert ended.ends_offer
    assert set(net.committed()) == set(net.names) - {late}
    net.run(5.0)
    assert {peer.states[0] for peer in net.peers.values()} == {net.peers[late].states[0]}
    assert not net.refused
    assert not any(isinstance(event, Aborted | Distrusted) for _, event in net.events)


def test_its_next_offer_is_in_the_next_round() -> None:
    net, (late,) = late_network()
    net.offer(late)
    net.run_until_settled()
    net.tell_everybody()
    net.offer_all(round_=2)
    net.run_until_settled()
    net.run(30.0)
    assert late in net.committed(2)
    assert all(late in part for part in contributors_of(net.committed(2)[late]))


def test_who_is_ready_just_after_begin_counts_as_punctual() -> None:
    net, (late,) = late_network(5)
    coordinator = next(source for source, _, message in net.sent if isinstance(message, wire.Begin))
    readies = net.peers[coordinator].machine._swarm.readies
    for number in range(MISSES):
        readies.missed(late, number)
    assert not readies.is_awaited(late)
    net.offer(late)
    net.run(1.0)
    assert readies.is_awaited(late)


# ---- a step or a whole round behind


def one_behind(count: int, round_s: float = 8.0) -> tuple[Network, PeerId]:
    """All are at version 2 but the last, at 1; the others offer for round 3."""
    net = Network(count, shape=PayloadShape(8, (16,), round_s=round_s))
    behind = coordination_order(net.names, 0, 3)[-1]
    for name in net.names:
        net.set_state(name, 0, 1 if name == behind else 2, DIGEST)
    net.tell_everybody()
    for name in net.names:
        if name != behind:
            net.offer(name, 3)
    return net, behind


def test_a_peer_that_is_one_round_behind_is_in_the_next() -> None:
    """It replays a round while the others train, and was ready just after they had begun, each time."""
    net, behind = one_behind(4)
    net.run(3.0)  # the deadline, a quarter of the time between rounds, is over
    assert not any(isinstance(event, Began) for _, event in net.events)
    net.set_state(behind, 0, 2, DIGEST)
    net.tell_everybody()
    net.offer(behind, 3)
    net.run_until_settled()
    assert len(net.committed(3)) == 4


def test_a_peer_that_stays_one_round_behind_is_waited_for_half_a_round_and_not_for_ever() -> None:
    """Every coordinator finds out for itself, and forgets it once the peer was in a round. One that is in
    none has no vote, so it is none of them."""
    net, behind = one_behind(4)
    waited_s, offered_at = [], net.now
    for round_ in range(3, 66):
        net.run(8.0)
        began = [event for _, event in net.events if isinstance(event, Began) and event.round == round_]
        is_there = 20 <= round_ < 36
        assert [len(event.group) for event in began] == [4 if is_there else 3]
        waited_s.append(net.began_at[round_] - offered_at)
        is_next_there = 20 <= round_ + 1 < 36
        other = net.peers[next(name for name in net.names if name != behind)].states[0][1]
        net.set_state(behind, 0, round_ if is_next_there else round_ - 1, other)
        net.tell_everybody()
        offered_at = net.now
        for name in net.names:
            if name != behind or is_next_there:
                net.offer(name, round_ + 1)
    waits = [round_ for round_, waited in enumerate(waited_s, 3) if waited > 2.0]
    assert max(waited_s) == pytest.approx(4.0, abs=0.2)
    for first, last in ((3, 20), (36, 66)):
        assert sum(first <= round_ < last for round_ in waits) == MISSES * (len(net.names) - 1)
    assert not {18, 19, 64, 65} & set(waits)


def test_one_that_is_behind_holds_up_nobody_before_it_is_known_how_often_rounds_are_made() -> None:
    count = 4
    net, _ = one_behind(count, round_s=0.0)
    offered_at = net.now
    net.run_until_settled()
    began = [event for _, event in net.events if isinstance(event, Began)]
    assert [len(event.group) for event in began] == [count - 1]
    assert net.began_at[3] - offered_at < 0.3


def test_where_steps_are_long_those_whose_step_ends_last_are_waited_for() -> None:
    """They were always there at once, so the deadline is short; a mean that some meet just before their next
    point, and others just after it, makes these ready a step later."""
    for step_s, size in ((0.0, 3), (1.0, 4)):
        net = Network(4, shape=PayloadShape(8, (16,), round_s=4.0))
        *first, last = coordination_order(net.names, 0, 3)
        for name in net.names:
            net.set_state(name, 0, 2, DIGEST)
        views = {name: replace(net._view(name), step_s=step_s) for name in net.names}
        coordinator = net.peers[first[0]].machine
        history = coordinator._coordination._readies[0]
        for round_ in range(1, 3):
            history.arrived(round_, 10.0 * round_)
            history.arrived(round_, 10.0 * round_ + 0.1)
        for name in net.names:
            net.peers[name].machine.set_peers(views, net.now)
        for name in first:
            net.offer(name, 3)
        net.run(0.9)
        if step_s:
            net.offer(last, 3)
            net.run_until_settled()
        (began,) = [event for _, event in net.events if isinstance(event, Began)]
        assert len(began.group) == size
