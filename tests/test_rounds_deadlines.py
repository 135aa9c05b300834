"""How long a round waits: deadlines from what was observed, who is awaited, and who is not."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.protocol.rounds import PayloadShape, PeerView
from p2p_co2.protocol.rounds import bounds as limits
from p2p_co2.protocol.rounds.attempt import Attempt, Share
from p2p_co2.protocol.rounds.deadline import (
    GATHER_LEAST_CAP_S,
    Cadence,
    Durations,
    Punctuality,
    adaptive_deadline_s,
    gather_least_s,
    parts_deadline_s,
)
from p2p_co2.protocol.rounds.owner import Arrivals
from p2p_co2.protocol.rounds.parts import BlockRange
from p2p_co2.protocol.rounds.swarm import RoundSwarm
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST

# ---- by hand


def test_deadline_is_median_and_spread_between_floor_and_cap() -> None:
    assert adaptive_deadline_s((), 10.0, 0.3, 30.0) == 10.0
    assert adaptive_deadline_s((1.0, 2.0, 3.0), 10.0, 0.3, 30.0) == 6.0  # 2 + 4 * 1
    assert adaptive_deadline_s((4.0, 4.0, 4.0), 10.0, 0.3, 30.0) == 5.0  # no spread: a quarter
    assert adaptive_deadline_s((0.01,), 10.0, 0.3, 30.0) == 0.3
    assert adaptive_deadline_s((100.0,), 10.0, 0.3, 30.0) == 30.0


def cadence_of(rounds: range, after_s: float, period_s: float = 0.0, known: Cadence | None = None) -> Cadence:
    """In so many rounds the last READY came so long after the first; a round is made each ``period_s``."""
    cadence = known or Cadence()
    for round_ in rounds:
        cadence.ready_came(round_, 1000.0 * round_)
        cadence.ready_came(round_, 1000.0 * round_ + after_s)  # after BEGIN, perhaps: measured all the same
        if period_s:
            cadence.committed(round_, period_s * round_)
    return cadence


def test_ready_deadline_learns_from_late_arrivals() -> None:
    assert Cadence().gather_s(1) == limits.GATHER_DEFAULT_S
    cadence = cadence_of(range(1, 6), 8.0)
    assert cadence.gather_s(6) == 10.0
    assert cadence_of(range(6, 40), 0.1, known=cadence).gather_s(40) == GATHER_LEAST_CAP_S
    assert cadence_of(range(1, 9), 0.1, period_s=10.6).gather_s(9) == pytest.approx(10.6 / 16)
    assert cadence_of(range(1, 9), 0.1, period_s=2.0).gather_s(9) == limits.GATHER_FLOOR_S


def test_readies_are_waited_for_as_long_as_an_inner_step_within_their_cap() -> None:
    """So no step of 1 s in rounds of 4.3 s is left out."""
    assert gather_least_s(1.1) == limits.GATHER_FLOOR_S
    assert [gather_least_s(4.0, step_s) for step_s in (0.4, 1.0, 2.0, 9.0)] == [1.0, 1.25, 2.5, 4.0]
    cadence = cadence_of(range(1, 9), 0.1, period_s=16.0)
    assert [cadence.gather_s(9, step_s) for step_s in (0.0, 2.0)] == [1.0, 2.5]


def test_who_is_a_round_behind_is_waited_for_half_of_the_time_between_rounds() -> None:
    assert [Cadence().behind_s, Cadence(8.0).behind_s, Cadence(600.0).behind_s] == [0.0, 4.0, 30.0]


def test_parts_deadline_is_the_links_time_with_a_margin_or_what_was_observed() -> None:
    assert parts_deadline_s(10.0, Durations()) == 40.0
    assert parts_deadline_s(0.001, Durations()) == limits.PARTS_FLOOR_S
    slow = Durations()
    slow.add(8.0)
    assert parts_deadline_s(1.0, slow) == 10.0
    slow.add(1000.0)
    assert parts_deadline_s(1.0, slow) == 16.0


def test_ready_is_waited_for_at_most_a_share_of_the_time_between_rounds() -> None:
    assert Cadence().gather_cap_s(5) == limits.GATHER_CAP_S
    cadence = Cadence(planned_s=20.0)
    assert [cadence.gather_cap_s(round_) for round_ in (1, 2)] == [limits.GATHER_CAP_S, 5.0]
    for round_, at in [(1, 100.0), (2, 108.0), (4, 124.0), (3, 125.0), (5, 132.0)]:
        cadence.committed(round_, at)
    assert cadence.period_s == 8.0
    assert cadence.gather_cap_s(6) == 2.0
    assert cadence_of(range(1, 9), 5.0).gather_s(9) == 6.25
    assert cadence_of(range(1, 9), 5.0, period_s=8.0).gather_s(9) == 2.0
    by_steps = Cadence(0.0, limits.GATHER_SHARE_BY_STEPS)
    for round_, at in [(1, 100.0), (2, 108.0)]:
        by_steps.committed(round_, at)
    assert by_steps.gather_cap_s(3) == 6.0


def test_who_missed_two_deadlines_is_not_awaited_until_it_is_in_time() -> None:
    habit, peer = Punctuality(), PeerId("a")
    habit.missed(peer, 1)
    habit.missed(peer, 1)  # another part of the same round
    assert habit.is_awaited(peer)
    habit.missed(peer, 2)
    assert not habit.is_awaited(peer)
    habit.came(peer)
    assert habit.is_awaited(peer)
    for occasion in range(5):
        habit.missed(peer, occasion)
    habit.keep({PeerId("b")})
    assert habit.is_awaited(peer)


def test_who_owes_several_slices_is_in_time_with_all_of_them_or_late() -> None:
    me, other = PeerId("p0"), PeerId("p1")
    both = frozenset((me, other))
    attempt = Attempt(
        0, 1, bytes(16), {me: Share(1.0, 0), other: Share(1.0, 0)}, (BlockRange(0, 8), BlockRange(8, 16)),
        (me, me), (both, both), DIGEST, me, 5.0, 12.0,
    )  # fmt: skip
    swarm, observed = RoundSwarm(me, PayloadShape(8, (16,))), Durations()
    swarm.set_live({other: PeerView()})
    for occasion in range(2):
        swarm.slices.missed(other, occasion)
    arrivals = Arrivals(attempt, swarm, observed, (0, 1))
    arrivals.came(other, 0)
    arrivals.closed(0, 1.0)
    assert not swarm.slices.is_awaited(other)  # the second may still be late
    assert observed.deadline_s(9.0, 0.0, 99.0) == 9.0  # nothing is measured before the last part
    arrivals.came(other, 1)
    arrivals.closed(1, 4.0)
    assert swarm.slices.is_awaited(other)
    assert observed.deadline_s(9.0, 0.0, 99.0) == pytest.approx(5.0)  # the longest wait and a quarter


# ---- against a reference


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_deadline_against_the_statistics_module(samples: list[float]) -> None:
    middle = median(samples)
    mad = median([abs(sample - middle) for sample in samples])
    expected = min(max(middle + max(4 * mad, middle / 4), 0.3), 30.0)
    assert adaptive_deadline_s(samples, 10.0, 0.3, 30.0) == pytest.approx(expected)
