"""Peers that are late for a round: a step behind the others, or a whole round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.protocol.rounds import Began, PayloadShape
from p2p_co2.protocol.rounds.deadline import MISSES
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.wire.identity import PeerId
from tests.round_machine import DIGEST
from tests.round_network import Network


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
    """Every coordinator finds out for itself, and forgets it once the peer was in a round."""
    net, behind = one_behind(4)
    waited_s = []
    for round_ in range(3, 66):
        net.run(8.0)
        began = [event for _, event in net.events if isinstance(event, Began) and event.round == round_]
        is_there = 20 <= round_ < 36
        assert [len(event.group) for event in began] == [4 if is_there else 3]
        waited_s.append(began[0].waited_s)
        is_next_there = 20 <= round_ + 1 < 36
        other = net.peers[next(name for name in net.names if name != behind)].states[0][1]
        net.set_state(behind, 0, round_ if is_next_there else round_ - 1, other)
        net.tell_everybody()
        for name in net.names:
            if name != behind or is_next_there:
                net.offer(name, round_ + 1)
    waits = [round_ for round_, waited in enumerate(waited_s, 3) if waited > 2.0]
    assert max(waited_s) == pytest.approx(4.0, abs=0.2)
    for first, last in ((3, 20), (36, 66)):
        assert sum(first <= round_ < last for round_ in waits) == MISSES * len(net.names)
    assert not {18, 19, 64, 65} & set(waits)


@pytest.mark.parametrize(("count", "round_s"), [(12, 8.0), (4, 0.0)])
def test_one_of_many_that_is_behind_holds_up_nobody(count: int, round_s: float) -> None:
    net, _ = one_behind(count, round_s)
    net.run_until_settled()
    began = [event for _, event in net.events if isinstance(event, Began)]
    assert [len(event.group) for event in began] == [count - 1]
    assert began[0].waited_s < 0.2


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
        history = coordinator._coordination._history[0]
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
