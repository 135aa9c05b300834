"""system.clock: time stands while the process does."""

from __future__ import annotations

from p2p_co2.system.clock import STOOD_S, ProcessClock


def test_what_a_process_slept_through_did_not_pass_for_it() -> None:
    real = 50.0
    clock = ProcessClock(lambda: real, 1000.0)
    assert clock.now() == 1000.0
    clock.wakes_by(1002.0)
    real += 2.5  # a little late
    assert clock.now() == 1002.5
    assert not clock.woke()
    assert clock.now() == 1002.5
    clock.wakes_by(1003.0)
    real += 3600.0
    assert clock.now() == 1003.0 + STOOD_S  # also for whoever asks before it has looked at its timers
    clock.wakes_by(clock.now() + 0.1)  # a message is handled first, and sets another timer
    assert clock.now() == 1003.0 + STOOD_S
    assert clock.woke()
    assert clock.now() == 1003.0 + STOOD_S
    real += 1.0
    assert clock.now() == 1004.0 + STOOD_S
