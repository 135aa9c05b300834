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


def full(now: float = 0.0) -> Evenness:
    """Of a line that has carried all it can until ``now``."""
    evenness = Evenness()
    for number in range(10):
        evenness.took(int(LINE * FULL_S / 10), now - FULL_S + number * FULL_S / 10)
    return evenness


def test_who_has_less_left_waits_while_the_line_is_full() -> None:
    ahead, between, behind = lanes = Lane(100_000), Lane(110_000), Lane(200_000)
    evenness = full()
    assert [evenness.is_ahead(lane, lanes, LINE, 0.0) for lane in lanes] == [True, False, False]
    assert evenness.is_ahead(between, [between, behind, Lane(0)], LINE, 0.0)  # one that is done has no turn
    assert not evenness.is_ahead(ahead, [ahead, between, Lane(119_000)], LINE, 0.0)  # by too little
    assert not evenness.is_ahead(ahead, lanes, 0.0, 0.0)  # nothing is known of the line


def test_nobody_waits_for_a_lane_that_stands_still_or_is_fetched_from() -> None:
    ahead, behind = lanes = Lane(100_000), Lane(200_000)
    evenness = full()
    behind.moved_at = -MOVING_S
    assert not evenness.is_ahead(ahead, lanes, LINE, 0.0)
    behind.moved_at = 0.0
    behind.fetched_at = 0.0
    assert not evenness.is_ahead(ahead, lanes, LINE, 0.0)
    behind.fetched_at, ahead.fetched_at = -FETCHED_S, 0.0
    assert not evenness.is_ahead(ahead, lanes, LINE, 0.0)
    ahead.fetched_at = -FETCHED_S
    assert evenness.is_ahead(ahead, lanes, LINE, 0.0)


def test_waiting_that_has_emptied_the_line_is_not_tried_again_at_once() -> None:
    ahead, behind = lanes = Lane(100_000), Lane(200_000)
    evenness = full()
    assert evenness.is_ahead(ahead, lanes, LINE, 0.0)
    behind.moved_at = FULL_S / 2
    assert not evenness.is_ahead(ahead, lanes, LINE, FULL_S / 2)
    for number in range(30):
        evenness.took(int(LINE * FULL_S / 10), FULL_S / 2 + number * FULL_S / 10)
    now = FULL_S / 2 + 3 * FULL_S
    assert now < FULL_S / 2 + EMPTIED_S
    behind.moved_at = now
    assert not evenness.is_ahead(ahead, lanes, LINE, now)
    behind.moved_at = ahead.moved_at = now = FULL_S / 2 + EMPTIED_S + 0.01
    evenness.took(int(LINE), now)
    assert evenness.is_ahead(ahead, lanes, LINE, now)


def ends_s(rates: list[float], even: bool) -> list[float]:
    """When lanes of 1 MB end that TCP would serve at up to ``rates``, on one line that all share as they
    ask for it."""
    evenness, now = Evenness(), 0.0
    lanes = [Lane(1_000_000) for _ in rates]
    given, ends = [0.0] * len(rates), [0.0] * len(rates)
    tick_s = 0.005
    while not all(ends):
        now += tick_s
        asking = [
            lane.bulk_bytes > 0 and not (even and evenness.is_ahead(lane, lanes, LINE, now)) for lane in lanes
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


def test_lanes_that_can_fill_the_line_end_together_and_sooner() -> None:
    rates = [400_000.0, 700_000.0, 900_000.0]
    apart, together = ends_s(rates, even=False), ends_s(rates, even=True)
    assert max(together) - min(together) < 0.2
    assert max(apart) - min(apart) > 0.8
    assert max(together) < 1.03 * 3.0
    assert max(apart) > 1.1 * 3.0


@pytest.mark.parametrize("slow", [20_000.0, 100_000.0])
def test_a_receiver_that_is_slow_by_nature_costs_the_others_little(slow: float) -> None:
    rates = [600_000.0, 600_000.0, slow]
    alone, beside = ends_s(rates, even=False), ends_s(rates, even=True)
    assert max(beside[:2]) < 1.1 * max(alone[:2])
    assert beside[2] <= 1.02 * alone[2]
