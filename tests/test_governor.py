"""Hours and wishes: by hand, and what a wish does when the hours turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import ConfigError
from p2p_co2.system.governor import BY_HAND, DAY_MINUTES, Governor, Span, read_hours

NOON, EVENING, NIGHT, MORNING = 12 * 60, 21 * 60, 23 * 60, 8 * 60


def test_hours_are_read() -> None:
    assert read_hours("") == ()
    assert read_hours("22:00-07:00, 12:30-13:30") == (Span(1320, 420), Span(750, 810))
    assert read_hours("00:00-24:00") == (Span(0, DAY_MINUTES),)


@pytest.mark.parametrize("text", ["22-7", "7:00-8:00", "07:00-07:00", "25:00-26:00", "08:00-24:30", "always"])
def test_other_hours_are_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_hours(text)


def test_without_hours_it_works_until_it_is_told_otherwise() -> None:
    governor = Governor()
    assert governor.resting(NOON) == ""
    governor.toggle(NOON)
    assert governor.resting(NOON) == BY_HAND
    assert governor.resting(NIGHT) == BY_HAND
    governor.toggle(NIGHT)
    assert governor.resting(NIGHT) == ""


def test_outside_its_hours_it_rests_and_says_why() -> None:
    governor = Governor("22:00-07:00")
    assert governor.resting(NOON) == "outside its hours (22:00-07:00)"
    assert governor.resting(22 * 60) == ""
    assert governor.resting(7 * 60 - 1) == ""
    assert governor.resting(7 * 60) != ""


def test_a_wish_holds_until_the_hours_turn() -> None:
    governor = Governor("22:00-07:00")
    assert governor.resting(NOON)
    governor.toggle(NOON)  # work now, though it is day
    assert governor.resting(EVENING) == ""
    assert governor.resting(NIGHT) == ""
    assert governor.resting(MORNING)  # the night is over, and with it the wish
    governor.pause()
    assert governor.resting(MORNING) == BY_HAND
    assert governor.resting(NIGHT) == ""  # so does this one end


@given(st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1), st.integers(0, DAY_MINUTES - 1))
def test_a_span_and_its_complement_share_the_day(start: int, stop: int, minute: int) -> None:
    if start != stop:
        assert Span(start, stop).holds(minute) != Span(stop, start).holds(minute)


@given(st.lists(st.tuples(st.integers(0, DAY_MINUTES - 1), st.booleans())))
def test_two_toggles_are_none(history: list[tuple[int, bool]]) -> None:
    governor = Governor("08:00-20:00")
    for minute, toggled in history:
        before = governor.resting(minute)
        if toggled:
            governor.toggle(minute)
            assert bool(governor.resting(minute)) != bool(before)
            governor.toggle(minute)
            assert bool(governor.resting(minute)) == bool(before)
