"""Lanes of one upload that wait for each other: by hand, and as a law over a played line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from p2p_co2.node.evenness import EMPTIED_S, FETCHED_S, FULL_S, MOVING_S, Evenness

LINE = 1e6
PIECE = 10_000


@dataclass
class Lane:
    bulk_bytes: int
    moved_at: float = 0.0
    fetched_at: float = -1e9


def full() -> Evenness:
    """Of a line that has carried all it can until time 0."""
    evenness = Evenness()
    for number in range(200):
        evenness.took(PIECE, (number - 199) * PIECE / LINE)
    return evenness


def test_who_has_less_left_waits_while_the_line_is_full() -> None:
    ahead, between, behind = lanes = Lane(100_000), Lane(185_000), Lane(200_000)
    evenness = full()
    assert [evenness.is_ahead(lane, lanes, 0.0) for lane in lanes] == [True, False, False]
    assert not evenness.is_ahead(ahead, [ahead, Lane(119_000)], 0.0)  # by too little
    assert not evenness.is_ahead(between, [between, Lane(0)], 0.0)
    assert not Evenness().is_ahead(ahead, lanes, 0.0)  # nothing is known of the line
    assert behind.bulk_bytes == 200_000


def test_what_fills_buffers_says_nothing_of_the_line() -> None:
    ahead, behind = lanes = Lane(100_000), Lane(200_000)
    evenness = full()
    behind.moved_at = ahead.moved_at = now = 1.0
    evenness.took(int(10 * LINE), now)  # a burst that begins
    assert evenness.is_ahead(ahead, lanes, now)
    for number in range(100):
        now = 1.0 + number * PIECE / LINE
        evenness.took(PIECE, now)
    behind.moved_at = ahead.moved_at = now
    assert evenness.is_ahead(ahead, lanes, now)  # its beginning has not raised what is expected


def test_nobody_waits_for_a_lane_that_stands_still_or_is_fetched_from() -> None:
    ahead, behind = lanes = Lane(100_000), Lane(200_000)
    evenness = full()
    behind.moved_at = -MOVING_S
    assert not evenness.is_ahead(ahead, lanes, 0.0)
    behind.moved_at = 0.0
    behind.fetched_at = 0.0
    assert not evenness.is_ahead(ahead, lanes, 0.0)
    behind.fetched_at, ahead.fetched_at = -FETCHED_S, 0.0
    assert not evenness.is_ahead(ahead, lanes, 0.0)
    ahead.fetched_at = -FETCHED_S
    assert evenness.is_ahead(ahead, lanes, 0.0)


def test_waiting_that_has_emptied_the_line_is_not_tried_again_at_once() -> None:
    ahead, behind = lanes = Lane(100_000), Lane(200_000)
    evenness = full()
    assert evenness.is_ahead(ahead, lanes, 0.0)
    behind.moved_at = emptied_at = FULL_S / 4
    assert not evenness.is_ahead(ahead, lanes, emptied_at)
    evenness.took(int(LINE), emptied_at)
    behind.moved_at = ahead.moved_at = now = emptied_at + EMPTIED_S - 0.01
    evenness.took(int(LINE), now)
    assert not evenness.is_ahead(ahead, lanes, now)
    evenness.took(int(LINE), now + 0.02)
    assert evenness.is_ahead(ahead, lanes, now + 0.02)


def ends_s(rates: list[float], even: bool) -> list[float]:
    """When lanes of 3 MB end that TCP would serve at up to ``rates``, on one line that all share in
    proportion."""
    evenness, now = Evenness(), 0.0
    lanes = [Lane(3_000_000) for _ in rates]
    given, ends = [0.0] * len(rates), [0.0] * len(rates)
    tick_s = 0.005
    while not all(ends):
        now += tick_s
        asking = [
            lane.bulk_bytes > 0 and not (even and evenness.is_ahead(lane, lanes, now)) for lane in lanes
        ]
        wanted = [rate * asks for rate, asks in zip(rates, asking, strict=True)]
        factor = min(1.0, LINE / max(1.0, sum(wanted)))
        for index, lane in enumerate(lanes):
            given[index] += wanted[index] * factor * tick_s
            while given[index] >= PIECE and lane.bulk_bytes:
                given[index] -= PIECE
                lane.bulk_bytes -= PIECE
                lane.moved_at = now
                evenness.took(PIECE, now)
            ends[index] = ends[index] or (now if not lane.bulk_bytes else 0.0)
    return ends


def test_lanes_end_together() -> None:
    rates = [800_000.0, 1_500_000.0, 2_000_000.0]
    apart, together = ends_s(rates, even=False), ends_s(rates, even=True)
    assert max(together) - min(together) < 0.2
    assert max(apart) - min(apart) > 2.0
    assert max(together) < 1.06 * 9.0


@pytest.mark.parametrize("slow", [20_000.0, 100_000.0])
def test_a_receiver_that_is_slow_by_nature_costs_the_others_little(slow: float) -> None:
    rates = [600_000.0, 600_000.0, slow]
    alone, beside = ends_s(rates, even=False), ends_s(rates, even=True)
    assert max(beside[:2]) < 1.1 * max(alone[:2])
    assert beside[2] <= 1.02 * alone[2]
