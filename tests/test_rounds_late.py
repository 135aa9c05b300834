"""Peers that are late for a round, by a step or by a whole round: they are in the next one, or soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.rounds import Began, PayloadShape
from p2p_co2.protocol.rounds.deadline import MISSES
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.simnet import EventLog, Settings, VirtualSwarm
from p2p_co2.telemetry.events import Event, FragmentApplied
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST
from tests.round_network import Network

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
    swarm = VirtualSwarm(settings, EventLog(digests=False))
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


def test_who_is_ready_just_after_begin_counts_as_punctual() -> None:
    net = Network(5, shape=PayloadShape(8, (1 << 15,)))
    *others, late = coordination_order(net.names, 0, 1)
    readies = net.peers[others[0]].machine.swarm.readies
    for number in range(MISSES):
        readies.missed(late, number)
    for name in others:
        net.offer(name)
    net.run(0.1)
    assert any(isinstance(event, Began) for _, event in net.events)
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
        assert 0 < sum(first <= round_ < last for round_ in waits) <= MISSES * (len(net.names) - 1)
    assert not {18, 19, 64, 65} & set(waits)


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
        cadence = coordinator._coordination.cadences[0]
        for round_ in range(1, 3):
            cadence.ready_came(round_, 10.0 * round_)
            cadence.ready_came(round_, 10.0 * round_ + 0.1)
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
