"""How fast a line is found to be, and what a pace admits: bursts, buffers, queues and liars by hand."""

from __future__ import annotations

from collections import deque

import pytest

from p2p_co2.node.meter import (
    DRAINED_BYTES,
    FAST_BYTES_PER_S,
    LONGEST_BURST_S,
    MEASURABLE_BYTES,
    LinePace,
    Pace,
    UploadMeter,
)


def burst(meter: UploadMeter, size_bytes: int, started_at: float, duration_s: float) -> None:
    """Of eight messages, one after the other at an even rate."""
    for number in range(8):
        meter.started(started_at + number * duration_s / 8)
        meter.finished("b", size_bytes // 8, started_at + (number + 1) * duration_s / 8)


def test_the_rate_is_that_of_the_second_best_burst_of_late() -> None:
    meter = UploadMeter()
    at = 0.0
    for wanted, size_bytes, duration_s in (
        (4, 4, 1.0),
        (4, 1, 5.0),  # the machine was busy
        (4, 40, 1.0),  # a queue on the way has filled meanwhile
        (40, 40, 1.0),  # the line is faster now
        (40, 1, 1.0),
        (40, 1, 1.0),
        (40, 1, 1.0),
        (1, 1, 1.0),  # only one of the last five was fast
    ):
        at += 100.0
        burst(meter, MEASURABLE_BYTES * size_bytes, at, duration_s)
        burst(meter, 8, at + 50.0, 0.001)  # too small to tell; it ends the one before
        assert meter.bytes_per_s == pytest.approx(MEASURABLE_BYTES * wanted)


def test_what_buffers_swallow_is_no_rate() -> None:
    meter = UploadMeter()
    burst(meter, DRAINED_BYTES, 1.0, 0.002)  # all of it into buffers
    burst(meter, 8, 10.0, 0.001)
    assert meter.bytes_per_s == 0.0
    for number in range(8):  # the first half into buffers, the rest at the speed of the link
        meter.started(20.0 + 0.1 * max(0, number - 3))
        meter.finished("b", 100_000, 20.0 + 0.1 * max(0, number - 3) + 0.001)
    burst(meter, 8, 30.0, 0.001)
    assert meter.bytes_per_s == pytest.approx(1e6)
    burst(meter, 4 * DRAINED_BYTES, 40.0, 0.02)  # no buffer holds so much
    burst(meter, 8, 50.0, 0.001)
    assert meter.bytes_per_s == pytest.approx(200 * DRAINED_BYTES)


def exchange(meter: UploadMeter, began_at: float, ends_s: dict[str, float], size_bytes: int) -> None:
    """``size_bytes`` to each receiver, who says evenly until its time that they come; then a rest."""
    words = [
        (began_at + end_s * (number + 1) / 20, to) for to, end_s in ends_s.items() for number in range(20)
    ]
    for _ in words:
        meter.started(began_at)
    for at, to in sorted(words):
        meter.finished(to, size_bytes // 20, at)
    meter.started(began_at + 100.0)
    meter.finished("b", 0, began_at + 100.0)


def test_one_receiver_of_three_makes_a_line_neither_slower_nor_faster() -> None:
    honest_s = 3.0  # 3 MB to three receivers over a line of 1 MB/s
    for lie_s in (honest_s, 90.0, 0.001):
        meter = UploadMeter()
        for number in range(5):
            exchange(meter, 200.0 * number, {"b": honest_s, "c": honest_s, "d": lie_s}, 1_000_000)
        # what the liar claims early has not gone in the stretch that is measured, what it claims late has not
        share = 1.0 if lie_s == honest_s else 2 / 3
        assert meter.bytes_per_s == pytest.approx(share * 1e6, rel=0.1)


def test_a_burst_without_end_is_measured_all_the_same() -> None:
    meter = UploadMeter()
    for number in range(int(20 * LONGEST_BURST_S)):
        meter.started(number * 0.1)
        meter.finished("b", 50_000, number * 0.1 + 0.09)
    assert meter.bytes_per_s == pytest.approx(5e5, rel=0.05)


def test_turns_come_in_the_order_of_asking_and_keep_the_rate() -> None:
    pace = Pace(1000.0)
    assert [pace.admit_at(500, 10.0) for _ in range(4)] == [10.0, 10.5, 11.0, 11.5]
    assert pace.admit_at(500, 20.0) == 20.0
    pace.bytes_per_s = 100.0
    assert [pace.admit_at(10, 20.5), pace.admit_at(10, 20.5)] == [20.5, 20.6]


def test_who_asks_late_loses_nothing_up_to_a_bound() -> None:
    pace = Pace(1000.0, late_s=0.2)
    assert [pace.admit_at(100, 10.0) for _ in range(4)] == pytest.approx([10.0, 10.0, 10.0, 10.1])
    assert [pace.admit_at(100, 10.35) for _ in range(3)] == pytest.approx([10.35, 10.35, 10.4])
    assert [pace.admit_at(100, 99.0) for _ in range(4)] == pytest.approx([99.0, 99.0, 99.0, 99.1])


def test_a_line_that_was_measured_low_is_found_out_in_a_few_bursts() -> None:
    pace, line, shown, bursts = LinePace(), 2e6, 1e6, 0
    while shown < 0.99 * line:
        pace.follow(shown)
        shown, bursts = min(line, pace.bytes_per_s), bursts + 1
    assert bursts <= 4
    pace.follow(shown * 0.99)
    assert pace.bytes_per_s == pytest.approx(1.2 * 0.99 * line)  # full: turns bind again
    pace.follow(0.0)
    assert not pace.bytes_per_s
    pace.follow(FAST_BYTES_PER_S)
    assert not pace.bytes_per_s


def test_a_line_is_what_receivers_acknowledge_while_it_is_full_not_what_buffers_take() -> None:
    meter = UploadMeter()
    for number, full_s in enumerate((0.0, 0.0, 1.0, 1.0, 1.0)):
        now = 1000.0 + 10 * number
        for part in range(40):
            meter.started(now)
            is_full = part * 0.05 >= 2.0 - full_s
            meter.came(50_000 if is_full else 40_000, 0.05, is_full, now + 0.05)
            now += 0.05
            meter.finished("b", 250_000 if part > 35 else 20_000, now)  # buffers take it all at the end
        assert meter.rest(now + 1)
        assert meter.bytes_per_s == pytest.approx(
            1e6 if number > 2 else 0.8e6, rel=0.3 if number == 2 else 0.01
        )


@pytest.mark.parametrize("has_queue", [False, True])
def test_a_receiver_that_reads_slowly_does_not_make_the_line_seem_slower(has_queue: bool) -> None:
    meter, message_bytes = UploadMeter(), 16_384
    for number in range(6):
        now = 1000.0 + 100 * number
        for step in range(100):  # "d" goes on alone, behind a queue of its own
            sent = "bbbcccd" if step < 25 else "d"
            for to in sent:
                meter.started(now)
                meter.finished(to, message_bytes, now + 0.05)
            now += 0.05
            meter.came(len(sent) * message_bytes, 0.05, has_queue and step >= 25, now)
        assert meter.rest(now + 1)
        assert meter.bytes_per_s == pytest.approx(7 * message_bytes / 0.05, rel=0.1)


def test_a_long_way_does_not_make_the_line_seem_slower_from_burst_to_burst() -> None:
    meter, trip_s = UploadMeter(), 0.3
    burst(meter, 1_000_000, 1000.0, 1.0)
    for number in range(30):
        now = 2000.0 + 10 * number
        meter.rest(now)
        pace, looked_at, sent, seen = 1.2 * meter.bytes_per_s, now, deque[float](), 0
        for _ in range(92):  # 1.5 MB over a line that has room for more
            meter.started(now)
            now += 16_384 / pace
            sent.append(now)
            meter.finished("b", 16_384, now)
            if now - looked_at >= 0.04:
                there = sum(at + trip_s <= now for at in sent)
                meter.came(16_384 * (there - seen), now - looked_at, False, now)
                looked_at, seen = now, there
        assert meter.rest(now + 1)
        if meter.bytes_per_s > 2e6:
            return
    pytest.fail(f"{meter.bytes_per_s:.0f} after 30 bursts at 1.2 of what was shown")


def test_a_short_burst_that_buffers_took_says_nothing_of_a_line_that_was_seen() -> None:
    meter, line, now = UploadMeter(), 12e6, 1000.0

    def exchange(megabytes: int, handed_bytes_per_s: float) -> None:
        nonlocal now
        for number in range(2 * megabytes):
            meter.started(now)
            took_s = 0.5e6 / handed_bytes_per_s
            now += took_s
            meter.came(int(min(line, handed_bytes_per_s) * took_s), took_s, True, now)
            meter.finished("bcd"[number % 3], 500_000, now)
        now += 5.0
        assert meter.rest(now)

    for rate in (40e6, 30e6):
        exchange(4, rate)
        assert meter.bytes_per_s == pytest.approx(40e6, rel=0.1)  # nothing better is known
    exchange(24, line)
    assert meter.bytes_per_s == pytest.approx(line, rel=0.01)
    for _ in range(6):
        exchange(4, 40e6)
    assert meter.bytes_per_s == pytest.approx(line, rel=0.01)
    exchange(24, 6e6)
    line = 9e6
    for _ in range(5):
        exchange(24, line)
    assert meter.bytes_per_s == pytest.approx(9e6, rel=0.01)


@pytest.mark.parametrize("is_far", [True, False])
def test_a_low_rate_of_busy_first_seconds_does_not_stay_for_good(is_far: bool) -> None:
    meter, now, known_again = UploadMeter(), 1000.0, 120e6

    def exchange(megabytes: int, rate: float, looks: bool) -> None:
        nonlocal now
        for number in range(2 * megabytes):
            meter.started(now)
            now += 0.5e6 / rate
            if looks:
                meter.came(int(0.5e6), 0.5e6 / rate, True, now)
            meter.finished("bcd"[number % 3], 500_000, now)
        if is_far and not looks:
            meter.came(0, 0.0, False, now)  # it was looked at, but too shortly
        now += 1.0
        assert meter.rest(now)

    exchange(6, 5e6, looks=is_far)
    assert meter.bytes_per_s == pytest.approx(5e6, rel=0.1)
    exchange(6, known_again, looks=False)
    assert (meter.bytes_per_s == pytest.approx(5e6, rel=0.1)) == is_far  # once may be a buffer
    for _ in range(10):
        exchange(6, known_again, looks=False)
    assert meter.bytes_per_s == pytest.approx(known_again, rel=0.1)
