"""What a peer's machines have to send sets out with the turn in which they said so."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.simnet import EventLog, Settings, Storm, VirtualSwarm
from p2p_co2.simnet.oversight import Oversight
from p2p_co2.wire.messages_pb2 import Fetch


def test_nothing_waits_for_another_turn_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    turned, unsent, sent = Oversight.turned, list[str](), Counter[type]()

    def look(oversight: Oversight) -> None:
        node = oversight.node
        if node.life.tasks is not None and not node.life.stopping.is_set():
            for machine in (node.membership, node.rounds, node.catchup):
                unsent.extend(str(message) for _, message in machine.messages_to_send())
        turned(oversight)

    monkeypatch.setattr(Oversight, "turned", look)
    clock = ClockConfig(mode="time", round_s=4.0, rounds=9)
    run = RunConfig(name="unsent", fragments=2, clock=clock)
    settings = Settings(run=run, peers=12, seed=3, faults=Storm(3.0, 19.0), blocks=(6, 3))
    swarm = VirtualSwarm(settings, EventLog(digests=False))
    transmit = type(swarm.internet).deliver

    def deliver(net: object, sender: object, receiver: object, at: float, data: object, size: float) -> None:
        transmit(net, sender, receiver, at, data, size)  # type: ignore[arg-type]
        if (opened := getattr(data, "opened", None)) is not None:
            sent[type(opened.body)] += 1

    monkeypatch.setattr(type(swarm.internet), "deliver", deliver)
    assert swarm.run().violations == []
    assert sent[Fetch] > 4
    assert unsent == []
