"""Groups of two: one is half of it, and goes on alone where only two train, and not where more do."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Aborted, Began, PayloadShape, PeerView
from p2p_co2.protocol.rounds.bounds import GRACE_S, READY_CAP_S
from p2p_co2.protocol.rounds.deadline import Cadence, Durations
from p2p_co2.protocol.rounds.gathering import Gathering, Roster
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.swarm import Outlet
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST
from tests.round_network import Network


@pytest.mark.parametrize(
    ("live", "ready", "is_done"),
    [(2, 2, False), (3, 2, False), (3, 2, True)],
)
def test_of_three_live_peers_a_coordinator_alone_commits_nothing(
    live: int, ready: int, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the third one a group has two, and what one of these made alone the
    others could not load from most of them: they made the round again, another state of its version. So they
    did when the run was over and the third ``is_done``. Of two one goes on when the other is lost."""
    net = Network(live)
    first, other, *rest = coordination_order(net.names, 0, 1)
    view, done = net._view, PeerView(1e6, training=False, versions=(0,), finished=frozenset({0}))
    monkeypatch.setattr(net, "_view", lambda name: done if is_done and name in rest else view(name))
    net.tell_everybody()
    net.on_send = lambda source, to, message: (
        not (
            (to == other and isinstance(message, wire.Mean))
            or (source == other and isinstance(message, wire.Part))
        )
    )
    for name in coordination_order(net.names, 0, 1)[:ready]:
        net.offer(name)
    net.run(READY_CAP_S)
    began = [event.group for _, event in net.events if isinstance(event, Began)]
    assert began[0] == tuple(sorted((first, other)))
    assert (first in net.committed()) is (live == 2)
    assert other not in net.committed()
    if live == 3:
        assert isinstance(net.endings()[first], Aborted)


@pytest.mark.parametrize(
    ("live", "round_s", "parts_s"), [(2, 0.0, 102.4), (3, 0.0, 300.0), (3, 900.0, 409.6), (3, 350.0, 350.0)]
)
def test_two_of_three_have_more_time_since_both_must_have_the_means(
    live: int, round_s: float, parts_s: float
) -> None:
    """Where one had sufficed, three on slow lines made no round any more. Half of 128 bytes to the other and
    half of the means back at 5 bytes/s, four times that, and four times more; no longer than may be."""
    net = Network(live, shape=PayloadShape(8, (16,), round_s=round_s))
    first, other, *_ = coordination_order(net.names, 0, 1)
    swarm = net.peers[first].machine._swarm
    gathering = Gathering(
        Roster(0, 1, swarm), swarm, Outlet(first), cadence=Cadence(), adaptive_s=10.0, now=0.0
    )
    for name in (first, other):
        ready = wire.Ready(fragment=0, round=1, state_digest=DIGEST, weight=1.0, upload_bytes_per_s=5.0)
        gathering.ready(ready, name, 0.0)
    begin = gathering.begin(bytes(16), Durations())
    assert begin.parts_within_s == pytest.approx(parts_s)
    assert begin.result_within_s == 2 * begin.parts_within_s + GRACE_S


def test_of_three_live_peers_two_commit_when_the_means_come_the_second_time() -> None:
    """What the second one lacks is given to it once more: without it nothing is committed."""
    net = Network(3)
    first, other, _ = coordination_order(net.names, 0, 1)
    is_told = False

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal is_told
        is_told = is_told or (isinstance(message, wire.Result) and bool(message.lost))
        return is_told or not (to == other and isinstance(message, wire.Mean))

    net.on_send = on_send
    net.offer(first)
    net.offer(other)
    net.run(READY_CAP_S)
    assert net.committed().keys() == {first, other}
