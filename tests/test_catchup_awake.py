"""The clock that stands with its process, by hand."""

from __future__ import annotations

import random

from p2p_co2.protocol.catchup.awake import STOOD_STILL_S, Awake


def asleep(ran_at: float, due_at: float) -> Awake:
    """Of a process whose timers' task waits."""
    awake = Awake()
    awake.begins(ran_at)
    awake.ends(ran_at)
    awake.is_due(due_at)
    return awake


def test_what_passed_since_it_last_ran_is_no_time_where_it_stood() -> None:
    awake = asleep(10.0, 15.0)
    awake.runs(12.0)  # a message
    assert awake.of(60.0) == 12.0
    assert awake.of(61.0) == 13.0


def test_who_waits_for_its_turn_or_is_a_little_late_does_not_stand() -> None:
    awake = asleep(10.0, 70.0)
    assert awake.of(70.0 + STOOD_STILL_S) == 70.0 + STOOD_STILL_S
    awake = asleep(10.0, 70.0)
    awake.is_due(30.0)  # it is to be woken sooner
    awake.is_due(50.0)
    assert awake.of(40.0) == 10.0


def test_one_stop_counts_once_whatever_runs_first_after_it() -> None:
    awake = asleep(10.0, 11.0)
    awake.runs(60.0)
    for now in (60.1, 61.0, 62.9):  # messages that waited, before the timers' task has its turn
        awake.runs(now)
    awake.begins(62.9)
    awake.ends(62.9)
    assert awake.stood_s == 50.0


def test_a_stop_amid_a_turn_counts_whoever_looks_first() -> None:
    for asks_within in (False, True):
        awake = asleep(10.0, 11.0)
        awake.begins(11.0)
        if asks_within:
            assert awake.of(61.0) == 11.0
        awake.ends(61.0)
        assert awake.stood_s == 50.0
        awake.runs(100.0)
        assert awake.stood_s == 50.0  # nothing is due


def test_it_never_goes_back_where_a_stop_came_after_the_date_was_read() -> None:
    awake = asleep(10.0, 11.0)
    awake.begins(11.0)
    assert awake.of(61.0) == 11.0
    assert awake.of(11.0) == 11.0
    awake.ends(62.0)
    assert awake.stood_s == 50.0


def test_another_thread_that_is_quicker_sees_no_silence_in_a_stop() -> None:
    awake = asleep(10.0, 11.0)
    awake.runs(10.5)
    assert awake.seen(60.0) == 10.5
    assert awake.of(60.0) == 10.5
    assert awake.seen(61.0) == awake.of(61.0) == 11.5


def test_no_timer_comes_too_early_for_what_waits_for_it() -> None:
    random_ = random.Random(5)
    for _ in range(2000):
        awake = Awake()
        awake.stood_s, at = random_.uniform(3.0, 1e4), random_.uniform(0.0, 1e6)
        assert awake.of(awake.until(at)) >= at
    assert Awake().until(at) == at
