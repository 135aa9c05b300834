"""How fast a line is found to be, and what a pace admits: stretches, pauses, buffers and liars by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from p2p_co2.net.transport.flow import Seen
from p2p_co2.node.meter import (
    FAST_BYTES_PER_S,
    MEASURABLE_BYTES,
    MOMENT_S,
    LinePace,
    LineRate,
    Pace,
)

TICK_S = 0.01


class Exchanges:
    """Bulk to a few receivers, as a pool tells of it. ``words``: those that alone say what they have."""

    def __init__(self, receivers: str = "bcd", words: str = "") -> None:
        self.there = dict.fromkeys(receivers, 0.0)
        self.rate = LineRate(self._look)
        self._words = words
        self.now = 1000.0

    def _look(self) -> Mapping[str, Seen]:
        return {to: Seen(there_bytes=int(size), is_word=to in self._words) for to, size in self.there.items()}

    def send(
        self, seconds: float, rates: Mapping[str, float], trip_s: float = 0.0, is_full: bool = True
    ) -> float:
        """So many bytes a second come to each, the first after ``trip_s``; then a rest. What is shown."""
        for tick in range(round(seconds / TICK_S)):
            self.rate.watch(True, is_full, self.now)
            self.now += TICK_S
            for to, rate in rates.items():
                self.there[to] += rate * TICK_S * (tick * TICK_S >= trip_s)
        self.rate.watch(False, False, self.now)
        self.now += 5.0
        self.rate.watch(False, False, self.now)
        return self.rate.bytes_per_s


def evenly(rate: float, receivers: str = "bcd") -> dict[str, float]:
    return {to: rate / len(receivers) for to in receivers}


@pytest.mark.parametrize("line", [50e3, 2e6, 12e6])
@pytest.mark.parametrize("trip_s", [0.0, 0.3])
def test_a_full_line_is_known_after_an_exchange(line: float, trip_s: float) -> None:
    seconds = max(4.0, 3 * MEASURABLE_BYTES / line)
    assert Exchanges().send(seconds, evenly(line), trip_s) == pytest.approx(line, rel=0.1)


def test_what_is_too_little_is_no_rate() -> None:
    made = Exchanges()
    assert made.send(0.1, evenly(0.9 * MEASURABLE_BYTES / 0.1)) == 0.0
    assert made.send(2 * MOMENT_S, evenly(20 * MEASURABLE_BYTES)) == pytest.approx(
        20 * MEASURABLE_BYTES, rel=0.3
    )


def test_a_short_pause_joins_what_is_sent_and_a_long_one_does_not_count() -> None:
    made = Exchanges()
    made.send(4.0, evenly(1e6))
    for pause_s in (0.5 * MOMENT_S, 20 * MOMENT_S):
        for _ in range(40):
            made.send(0.05, evenly(1e6))
            made.now += pause_s - 5.0
        assert made.rate.bytes_per_s == pytest.approx(1e6, rel=0.1)


def test_a_line_that_has_become_faster_or_slower_is_found_out() -> None:
    made = Exchanges()
    made.send(4.0, evenly(2e6))
    assert made.send(2.0, evenly(8e6)) == pytest.approx(8e6, rel=0.05)
    assert made.send(0.7, evenly(4e6)) > 6e6  # once may be a busy machine
    assert made.send(8.0, evenly(4e6)) == pytest.approx(4e6, rel=0.1)
    for _ in range(20):  # of exchanges that are too short to say more
        made.send(0.3, evenly(8e6))
    assert made.rate.bytes_per_s == pytest.approx(8e6, rel=0.05)


def test_what_buffers_on_the_way_take_at_once_is_believed_by_and_by() -> None:
    made = Exchanges()
    made.send(4.0, evenly(2e6))
    assert made.send(0.2, evenly(50e6)) <= 1.2 * 2.1e6


@pytest.mark.parametrize("seconds", [1.2, 3.0])
def test_a_long_way_does_not_make_the_line_seem_slower_from_exchange_to_exchange(seconds: float) -> None:
    made, line = Exchanges(), 4e6
    shown = made.send(4.0, evenly(1e6))
    for _ in range(30):
        shown = made.send(seconds, evenly(min(line, 1.2 * shown)), trip_s=0.3)
    assert shown == pytest.approx(line, rel=0.1)


def test_a_receiver_that_reads_slowly_does_not_make_the_line_seem_slower() -> None:
    made = Exchanges()
    made.send(4.0, evenly(3e6))
    for _ in range(20):
        made.send(100.0, {"d": 20_000}, is_full=False)  # its own queue alone waits
    assert made.rate.bytes_per_s == pytest.approx(3e6, rel=0.05)


@pytest.mark.parametrize("words", ["d", "bcd"])
def test_one_that_says_it_has_all_at_once_makes_the_line_seem_little_faster(words: str) -> None:
    made = Exchanges(words=words)
    for _ in range(5):
        shown = made.send(3.0, {"b": 1e6, "c": 1e6, "d": 1e9})
    assert shown == pytest.approx(3e6, rel=0.05)
    assert Exchanges().send(3.0, {"b": 5e6}) == pytest.approx(5e6, rel=0.05)  # kernels count by themselves


@pytest.mark.parametrize("honest", [3, 8, 60])
def test_few_that_lie_together_when_the_others_have_done_move_nothing(honest: int) -> None:
    others = "".join(map(chr, range(1000, 1000 + honest)))
    made = Exchanges(receivers=others + "xy", words=others + "xy")
    for _ in range(3):
        made.send(3.0, evenly(1e6, others))
        made.now -= 5.0  # no pause
        shown = made.send(1.0, {"x": 4e6, "y": 4e6}, is_full=False)
    assert shown < 1.1e6


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


def test_bulk_leaves_at_a_little_more_than_the_line_has_shown() -> None:
    pace = LinePace()
    pace.follow(2e6)
    assert pace.bytes_per_s == pytest.approx(1.2 * 2e6)
    for unlimited in (0.0, FAST_BYTES_PER_S):
        pace.follow(unlimited)
        assert not pace.bytes_per_s
