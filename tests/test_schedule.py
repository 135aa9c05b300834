"""Schedule points and the swarm clock: by hand, against whole numbers, laws under any steps and words."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.config import ClockConfig, OuterConfig, RunConfig
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.schedule import (
    FIRST_ROUND_BOUND_S,
    FLUSH_CAP_S,
    FLUSH_FLOOR_S,
    Ending,
    Lag,
    OfferState,
    Stage,
    SwarmClock,
    WorkAccount,
    due,
    flush_bound_s,
    points_passed,
)


def test_clock_in_steps_mode_counts_inner_steps() -> None:
    clock = SwarmClock(ClockConfig(mode="steps", inner_steps_per_round=30))
    assert clock.position(1e9, 15) == 0.5
    clock.start(7.0, 0.0, inner_steps=100)
    assert clock.position(0.0, 160) == 9.0
    clock.observe(50.0, 0.0)
    assert clock.position(0.0, 160) == 9.0


def test_clock_in_time_mode_slews_and_jumps() -> None:
    clock = SwarmClock(ClockConfig(mode="time", round_s=10.0))
    clock.start(2.0, 1000.0)
    assert clock.position(1005.0, 0) == pytest.approx(2.5)
    clock.observe(2.55, 1005.0)
    # Half a round at one tenth faster is what it takes.
    assert clock.position(1007.5, 0) == pytest.approx(2.775)
    assert clock.position(1010.0, 0) == pytest.approx(3.05)
    assert clock.position(1015.0, 0) == pytest.approx(3.55)
    clock.observe(3.45, 1015.0)
    assert clock.position(1025.0, 0) == pytest.approx(4.45)
    assert clock.position(1035.0, 0) == pytest.approx(5.45)
    clock.observe(9.0, 1035.0)
    assert clock.position(1035.0, 0) == 9.0


# ---- against a reference


@pytest.mark.parametrize("per_round", [3, 7, 30, 48])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_point_falls_on_the_inner_step_that_integers_say(per_round: int, count: int) -> None:
    """steps / H against f / P in floating point and in whole numbers, over many rounds."""
    last = 0.0
    for step in range(1, 40 * per_round):
        position = step / per_round
        expected = [
            tick % count for tick in range((step - 1) * count // per_round + 1, step * count // per_round + 1)
        ]
        assert list(due(count, last, position)) == expected
        last = position


# ---- laws


@given(
    st.integers(1, 8), st.lists(st.floats(0, 5), min_size=1, max_size=30), st.floats(0, 4, exclude_max=True)
)
def test_points_are_counted_once_in_any_steps(count: int, steps: list[float], start: float) -> None:
    positions = [start]
    for step in steps:
        positions.append(positions[-1] + step * 0.1)
    sent = Counter(f for last, now in pairwise(positions) for f in due(count, last, now))
    for fragment in range(count):
        passed = [points_passed(fragment, count, position) for position in positions]
        assert passed == sorted(passed)
        assert sent[fragment] == passed[-1] - passed[0]


@given(st.lists(st.tuples(st.floats(-5, 50), st.floats(-1e6, 1e6) | st.just(math.nan)), max_size=30))
def test_the_clock_never_goes_back(moments: list[tuple[float, float]]) -> None:
    """Whatever others say, and even if the local clock stumbles."""
    clock = SwarmClock(ClockConfig(mode="time", round_s=10.0))
    clock.start(0.0, 0.0)
    now, last = 0.0, 0.0
    for elapsed, others in moments:
        now += elapsed
        clock.observe(others, now)
        position = clock.position(now, 0)
        assert position >= last
        last = position


def test_clocks_of_peers_come_together() -> None:
    clocks = [SwarmClock(ClockConfig(mode="time", round_s=10.0)) for _ in range(4)]
    for clock, start in zip(clocks, (0.0, 0.2, 0.3, 0.7), strict=True):
        clock.start(start, 0.0)
    for second in range(1, 200):
        positions = [clock.position(float(second), 0) for clock in clocks]
        for index, clock in enumerate(clocks):
            others = sorted(positions[:index] + positions[index + 1 :])
            clock.observe(others[1], float(second))
    positions = [clock.position(200.0, 0) for clock in clocks]
    assert max(positions) - min(positions) < 0.01


def test_a_peer_that_slept_sends_each_fragment_once() -> None:
    clock = SwarmClock(ClockConfig(mode="time", round_s=10.0))
    clock.start(0.0, 0.0)
    last = clock.position(1.0, 0)
    clock.observe(40.3, 1.0)
    assert sorted(due(4, last, clock.position(1.0, 0))) == [0, 1, 2, 3]


@given(count=st.integers(1, 6), outcomes=st.lists(st.booleans(), max_size=60))
def test_every_fragment_has_its_turn_again_and_again(count: int, outcomes: list[bool]) -> None:
    ending, uncounted, tried = Ending(count, 0.0, 1e6), set(range(count)), [0] * count
    for number, counted in enumerate(outcomes):
        for fragment in (ending.next(uncounted, (), 2.0 * number) or ([], 0))[0]:
            tried[fragment] += 1
            if counted:
                uncounted.discard(fragment)
        waiting = [tried[fragment] for fragment in uncounted]
        assert not waiting or max(waiting) - min(waiting) <= 1


def test_a_flush_is_given_the_time_that_rounds_take_within_its_bounds() -> None:
    assert flush_bound_s(4, []) == FLUSH_FLOOR_S
    assert flush_bound_s(4, [2.0, 2.0, 90.0]) == FLUSH_FLOOR_S
    assert flush_bound_s(4, [20.0, 20.0, 1.0]) == 80.0
    assert flush_bound_s(64, [100.0]) == FLUSH_CAP_S


# ---- the account of work


def account(
    mode: str = "time", rounds: int = 0, awaited: int = 0, count: int = 2, round_s: float = 60.0
) -> WorkAccount:
    """Of two fragments; 100 tokens were trained before."""
    clock = ClockConfig.model_validate({"mode": mode, "rounds": rounds, "round_s": round_s})
    run = RunConfig(fragments=count, clock=clock, outer=OuterConfig(blocking_rounds=awaited))
    return WorkAccount(run, 100, [0] * count)


def send(made: WorkAccount, fragment: int, position: float, tokens: int) -> OfferState:
    steps = int(10 * position)
    return made.send(
        fragment,
        position=position,
        inner_steps=steps,
        tokens=tokens,
        now=5 * position,
        offer_id=b"%d" % tokens,
    )


def end(made: WorkAccount, fragment: int, position: float, share: float = 1.0) -> Lag:
    offer = made.meet(fragment, made.versions[fragment] + 1, 1, made.in_flight.get(fragment))
    steps = int(10 * position)
    return made.step(fragment, offer, share, 4.0, position=position, inner_steps=steps, now=5 * position)


def test_work_is_offered_until_it_is_counted() -> None:
    made = account()
    assert send(made, 1, 0.5, 140).weight == 40
    assert made.finished(()) == {0}
    assert end(made, 1, 2.0, share=0.25) == Lag(1, 15, 7.5)  # the point at 1.5 passed meanwhile
    assert made.versions == [0, 1]
    assert (
        send(made, 1, 2.5, 150).weight == 40
    )  # three quarters of the forty are not counted, and ten are new
    assert end(made, 1, 2.6) == Lag(0, 1, pytest.approx(0.5))
    assert made.uncounted(150) == [0]
    assert made.finished([0]) == {1}
    assert end(made, 1, 3.0) == Lag(0, 0, 0.0)  # a round that this peer was not in
    assert made.versions == [0, 3]


def test_an_outcome_ends_the_offer_that_it_names_and_the_next_says_what_it_has_met() -> None:
    made = account()
    first = send(made, 0, 1.0, 140)
    assert made.meet(0, 1, 7, None) is first is made.in_flight[0]
    assert made.meet(0, 1, 8, first) is first
    assert made.in_flight == {}
    second = send(made, 0, 2.0, 150)
    assert (first.met, second.met) == (0, 8)
    made.meet(0, 1, 9, first)  # told again, by a late word
    assert made.in_flight == {0: second}


def pass_points(made: WorkAccount, last: float, position: float, *, awaits_begin: bool = False) -> list[int]:
    """What may be sent there."""
    return [fragment for fragment in made.due(last, position) if made.may_send(fragment, awaits_begin)]


@pytest.mark.parametrize(
    ("mode", "count", "is_line_full", "is_due"),
    [
        ("time", 1, False, True), ("time", 2, True, True), ("time", 2, False, False),
        ("steps", 1, True, False), ("steps", 2, True, False),
    ],
)  # fmt: skip
def test_a_point_that_passed_in_flight_is_made_up_as_soon_as_its_round_has_ended(
    mode: str, count: int, is_line_full: bool, is_due: bool
) -> None:
    """Where an exchange takes a little longer than a round, every second point was passed in flight, and the
    line stood idle until the next one. Of a single fragment the members meet the mean around their point,
    some before and some after it."""
    made = account(mode, count=count)
    send(made, 0, 1.0, 140)
    made.due(1.0, 1.5, is_line_full)
    assert [f for f in made.due(1.5, 2.0, is_line_full) if f == 0 and made.may_send(0, False)] == []
    assert 0 not in made.due(2.0, 2.1, is_line_full)
    end(made, 0, 2.1)
    assert (0 in pass_points(made, 2.1, 2.2)) == is_due
    send(made, 0, 2.2, 150)
    end(made, 0, 2.3)
    assert 0 not in made.due(2.3, 2.4)  # once
    assert 0 in made.due(2.9, 3.0)


def test_where_no_line_is_full_two_missed_points_make_a_fragment_due_at_once() -> None:
    """Others that did not miss it send at the next."""
    made = account()
    send(made, 1, 0.5, 140)
    assert pass_points(made, 0.9, 1.6) == [0]
    assert pass_points(made, 1.6, 2.6) == [0]
    end(made, 1, 2.9)
    assert pass_points(made, 2.9, 2.95) == [0, 1]


def test_an_offer_made_before_the_others_is_that_of_the_point_at_which_they_make_theirs() -> None:
    """It was early at every point after that, and weighed a round less than it could."""
    made = account(count=1)
    send(made, 0, 0.9, 140)
    assert pass_points(made, 0.9, 1.0, awaits_begin=True) == []
    end(made, 0, 2.1)
    assert made.due(2.1, 2.2) == []


def is_held(made: WorkAccount, stages: dict[int, Stage], step_s: float = 0.1, now: float = 0.0) -> bool:
    return made.is_held(lambda fragment: stages.get(fragment, ""), step_s, now)


@pytest.mark.parametrize(
    ("stage", "is_line_full", "held"),
    [("slices", True, True), ("slices", False, False), ("means", True, False)],
)
def test_on_a_full_line_the_next_fragment_waits_until_the_slices_of_the_last_have_left(
    stage: Stage, is_line_full: bool, held: bool
) -> None:
    """Where no bulk waits most of the time, rounds wait for others or for a long way: side by side."""
    made = account(round_s=4.0)
    send(made, 0, 1.0, 140)
    assert made.due(1.1, 1.5, is_line_full) == [1]
    assert is_held(made, {0: stage}) == held
    assert made.due(1.5, 1.6, is_line_full) == [1]  # it waits
    assert not is_held(made, {0: "means"})


@pytest.mark.parametrize(("is_line_full", "holds_s"), [(True, 4.0), (False, 2.0)])
def test_a_fragment_that_awaits_its_begin_has_the_line_for_a_round_or_until_the_next_point_if_it_is_idle(
    is_line_full: bool, holds_s: float
) -> None:
    """Else all that wait would be sent in the moment in which a round has ended, and come to the line
    together. But nobody may answer."""
    made = account(round_s=4.0)
    send(made, 0, 1.0, 140)
    made.due(1.1, 1.5, is_line_full=True)
    assert is_held(made, {0: "slices"})
    end(made, 0, 1.8)
    made.due(1.5, 2.0, is_line_full)
    send(made, 0, 2.0, 150)  # at 10 s
    assert is_held(made, {0: ""}, now=10.1)
    assert is_held(made, {0: "asking"}, now=10.0 + holds_s - 0.1)
    assert not is_held(made, {0: "asking"}, now=10.0 + holds_s + 0.1)
    made.due(2.0, 3.1)  # a round later the line counts as full no more
    assert not is_held(made, {0: "asking"}, now=10.1)


def test_slices_that_are_lost_keep_no_other_fragment_waiting_for_good() -> None:
    made = account(round_s=4.0)
    send(made, 0, 1.0, 140)  # at 5 s
    made.due(1.1, 2.5, is_line_full=True)
    assert is_held(made, {0: "slices"}, now=5.0 + 7.9)
    assert not is_held(made, {0: "slices"}, now=5.0 + 8.1)


def test_steps_that_are_longer_than_the_time_between_two_points_send_several_fragments() -> None:
    """With one in each step a round would take four of them."""
    made = account(round_s=4.0, count=4)
    send(made, 0, 1.0, 140)
    made.due(1.2, 1.5, is_line_full=True)
    stages: dict[int, Stage] = {0: "slices"}
    assert is_held(made, stages, step_s=0.9)
    assert not is_held(made, stages, step_s=1.1)
    send(made, 1, 1.5, 140)
    assert is_held(made, {**stages, 1: "asking"}, step_s=1.1, now=7.5)


def test_on_a_full_line_all_peers_send_the_fragments_in_one_order() -> None:
    """That of their outer steps: which point passed while a round was in flight differs from peer to peer."""
    made = account(round_s=4.0, count=4)
    made.versions = [3, 2, 3, 2]
    assert made.due(0.9, 1.75, is_line_full=True) == [0, 1, 2, 3]
    send(made, 0, 1.75, 140)
    assert made.due(1.75, 1.8, is_line_full=True) == [1, 2, 3]
    assert is_held(made, {0: "slices"})
    assert made.due(1.8, 1.9, is_line_full=True) == [1, 3, 2]


@pytest.mark.parametrize(
    ("round_s", "share", "sent"),
    [(4.0, 0.0, [1, 0]), (4.0, 0.5, [0]), (FIRST_ROUND_BOUND_S, 0.0, [1, 0]), (60.0, 0.0, [0])],
)
def test_who_has_no_part_in_a_mean_is_due_at_once_in_short_rounds(
    round_s: float, share: float, sent: list[int]
) -> None:
    """The others offer as soon as they have met it; at its own next point it would come after them again. In
    long rounds it would wait for them alone until its offer is given up."""
    made = account(round_s=round_s)
    send(made, 1, 0.5, 140)
    made.step(1, made.meet(1, 1, 1, made.in_flight.get(1)), share, 4.0, position=0.9, inner_steps=9, now=9.0)
    assert made.due(0.9, 1.0) == sent


@pytest.mark.parametrize(("round_s", "sent"), [(4.0, [1, 0]), (60.0, [0])])
def test_who_loaded_what_others_made_is_due_at_once_in_short_rounds(round_s: float, sent: list[int]) -> None:
    made = account(round_s=round_s)
    made.left_out(1)  # at first it loads what it is to begin with
    assert made.due(0.9, 1.0) == [0]
    send(made, 1, 0.5, 140)
    made.meet(1, 1, 1, made.in_flight[1])
    made.left_out(1)
    assert made.due(0.9, 1.0) == sent


def test_who_loaded_what_others_made_is_due_at_once_in_long_rounds_too_where_the_line_is_full() -> None:
    """There the others send as soon as their round has ended."""
    made = account(round_s=60.0)
    send(made, 1, 0.5, 140)
    made.due(0.6, 1.0, is_line_full=True)
    assert is_held(made, {1: "slices"})
    send(made, 0, 1.0, 140)
    made.meet(1, 1, 1, made.in_flight[1])
    made.left_out(1)
    assert made.due(1.0, 1.1) == [1]


def test_points_of_a_rest_are_not_made_up() -> None:
    made = account()
    send(made, 1, 0.5, 140)
    assert pass_points(made, 0.9, 2.5) == [0]
    made.forget_missed()
    end(made, 1, 2.9)
    assert made.due(2.9, 3.0) == [0]


def test_a_run_is_over_at_its_last_round() -> None:
    assert not account().is_over(1e9)
    assert [account(rounds=2).is_over(position) for position in (1.99, 2.0)] == [False, True]


def test_an_offer_that_ends_at_once_is_not_made_again_at_once() -> None:
    """Else a peer that is alone makes one every two milliseconds at the end of a run."""
    ending, now, offered = Ending(2, 100.0, 30.0), 100.0, list[float]()
    while (todo := ending.next([1], [], now)) is not None:
        fragments, wait_s = todo
        assert wait_s > 0
        offered += [now] * len(fragments)
        now += 0.002 if fragments else wait_s  # it is refused at once
    assert len(offered) == 30
    assert min(b - a for a, b in pairwise(offered)) >= HEARTBEAT_S
    assert Ending(2, 100.0, 30.0).next([0, 1], [], 100.0) == ([0, 1], 15.0)


def test_the_end_offers_few_at_once_then_all_then_nothing() -> None:
    ending = Ending(4, 100.0, 30.0)
    assert ending.next([0, 1, 2, 3], [], 100.0) == ([0, 1], 15.0)
    assert ending.next([0, 2, 3], [0], 104.0) == ([2], 11.0)
    assert ending.next([0, 2, 3], [0, 2], 115.0) == ([3], 15.0)
    assert ending.next([0], [0], 130.0) is None
    assert ending.next([], [0], 120.0) is None
