"""Rounds of large payloads on slow lines: deadlines follow the bytes, the lines and the length of a round."""

from __future__ import annotations

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.protocol.rounds import PayloadShape, bounds
from p2p_co2.protocol.rounds.deadline import Durations, parts_deadline_s
from p2p_co2.simnet import EventLog, Settings, VirtualSwarm
from p2p_co2.telemetry.events import Event, RoundAborted, RoundCommitted

PEERS = 6


def test_the_first_round_of_a_large_payload_commits_at_the_first_try() -> None:
    """10 MB each on lines of 2.5 MB/s that nobody has measured yet."""
    clock = ClockConfig(mode="time", round_s=60.0, rounds=1)
    run = RunConfig(name="large", fragments=1, clock=clock)
    events: list[Event] = []
    log = EventLog()
    log.readers.append(events.append)
    settings = Settings(
        run=run, peers=PEERS, seed=1, profile="dsl", blocks=(16,), real_bytes_per_block=1e7 / 16, step_s=2.0
    )
    result = VirtualSwarm(settings, log).run()
    assert not [event for event in events if isinstance(event, RoundAborted)]
    assert sum(isinstance(event, RoundCommitted) for event in events) == PEERS
    assert len(set(result.digests.values())) == 1


def test_slices_are_waited_for_as_long_as_a_round_where_rounds_are_long() -> None:
    short, long = PayloadShape(8, (16,), round_s=20.0), PayloadShape(8, (16,), round_s=3600.0)
    assert (short.parts_cap_s, short.round_cap_s) == (bounds.PARTS_CAP_S, bounds.ROUND_CAP_S)
    assert (long.parts_cap_s, long.round_cap_s) == (3600.0, 6 * 3600.0)
    assert parts_deadline_s(400.0, Durations(), short.parts_cap_s) == 300.0
    assert parts_deadline_s(400.0, Durations(), long.parts_cap_s) == 1600.0
    liar = Durations()
    liar.add(1e9)
    assert parts_deadline_s(400.0, liar, long.parts_cap_s) == 3600.0
    assert parts_deadline_s(1e9, Durations(), long.parts_cap_s) == 3600.0
