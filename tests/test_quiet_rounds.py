"""Heartbeats in rounds of minutes: rare, announced, missed in time; and a swarm that makes its rounds with
them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.protocol.membership import (
    QUIET_BEATS_MISSED,
    Membership,
)
from p2p_co2.simnet import EventLog, Settings, VirtualSwarm
from p2p_co2.telemetry.events import PeerLeft
from p2p_co2.wire.heartbeat import (
    LONGEST_HEARTBEAT_S,
    MEASURED_BEATS,
    SILENCE_FLOOR_S,
    quiet_beat_s,
)
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Ping, Pong, Status

ME, OTHER = PeerId("me"), PeerId("other")
QUIET_S = 120.0


def resting() -> Membership:
    """A machine that rests and hears one that does."""
    machine = Membership(ME, QUIET_S)
    machine.receive(Ping(status=Status(heartbeat_s=QUIET_S)), OTHER, 0.0)
    machine.handle_timer(0.0)
    machine.set_rests(True, 0.0)
    machine.messages_to_send()
    return machine


def test_short_rounds_have_no_quiet_and_long_ones_a_bounded_one() -> None:
    assert [quiet_beat_s(round_s) for round_s in (1.0, 20.0, 50.0)] == [0.0, 0.0, 0.0]
    assert quiet_beat_s(100.0) == 10.0
    assert quiet_beat_s(1200.0) == quiet_beat_s(36_000.0) == LONGEST_HEARTBEAT_S


def test_who_claims_a_slower_beat_than_its_run_has_is_missed_as_others_are() -> None:
    machine = Membership(ME)
    machine.receive(Ping(status=Status(heartbeat_s=1e6)), OTHER, 0.0)
    while OTHER in machine.live:
        now = machine.get_timer()
        assert now is not None
        assert now < 4 * SILENCE_FLOOR_S
        machine.handle_timer(now)


def test_who_rests_tells_each_other_once_a_slow_beat_and_measures_now_and_then() -> None:
    machine, told, hour_s = resting(), Counter[bool](), 3600.0
    while (now := machine.get_timer()) is not None and now < hour_s:
        machine.handle_timer(now)
        for _, message in machine.messages_to_send():
            assert isinstance(message, Ping)
            told[message.nonce > 0] += 1
            status = Status(heartbeat_s=QUIET_S)
            answer = Pong(nonce=message.nonce, ping_sent_at=now, status=status)
            machine.receive(answer if message.nonce else Ping(status=status), OTHER, now + 0.1)
    assert told.total() == pytest.approx(hour_s / QUIET_S, abs=2)
    assert told[True] == pytest.approx(hour_s / (MEASURED_BEATS * QUIET_S), abs=3)


def quiet_swarm(round_s: float, **more: Any) -> Settings:
    clock = ClockConfig(mode="time", round_s=round_s, rounds=2)
    return Settings(
        run=RunConfig(name="quiet", fragments=2, clock=clock), peers=6, seed=5, profile="cable", step_s=5.0,
        start_spread_s=2.0, **more,
    )  # fmt: skip


def test_a_swarm_makes_its_long_rounds_and_notices_who_loses_power_and_who_hangs() -> None:
    gone: dict[str, float] = {}
    log = EventLog(digests=False)
    swarm = VirtualSwarm(quiet_swarm(300.0), log)
    powerless, hanging = swarm.volunteers[1].identity.peer_id, swarm.volunteers[2].identity.peer_id
    log.readers.append(
        lambda event: gone.setdefault(event.other, swarm.world.now) if isinstance(event, PeerLeft) else None
    )
    swarm.world.call_at(100.0, swarm.kill, 1, False)
    swarm.world.call_at(350.0, swarm.stall, 2, 1e6)
    swarm.world.call_at(690.0, swarm.kill, 2, True)
    result = swarm.run()
    others = {violation.law for violation in result.violations} - {"end"}  # two did not finish
    assert not others, result.violations
    assert len(set(result.digests.values())) == 1
    assert len(result.digests) == 4
    assert result.counts["round_committed"] >= 4
    assert 100.0 < gone[powerless] < 140.0  # its links break
    assert 350.0 < gone[hanging] < 350.0 + (QUIET_BEATS_MISSED + 1) * quiet_beat_s(300.0) + 10.0
