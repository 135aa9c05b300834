"""How long a download waits for anything at all, by hand."""

from __future__ import annotations

from p2p_co2.catchup.waiting import COMES_WITHIN_S, MOVES_WITHIN_S, Waiting


def test_who_stood_still_or_waited_for_its_turn_goes_on_waiting() -> None:
    waiting = Waiting(0.0)
    waiting.looks(10.0, [])
    waiting.looks(1000.0, [])  # nobody looked for so long
    assert waiting.ends_at([]) == 990.0 + MOVES_WITHIN_S  # as long as was left
    assert waiting.nothing_s(1000.0) == MOVES_WITHIN_S
    for at in range(1030, 2000, 30):
        waiting.looks(at, [at - 5.0])  # a donor gives to another download until then
    waiting.moved(2000.0)  # and is gone
    assert waiting.ends_at([]) == 2000.0 + MOVES_WITHIN_S


def test_it_goes_on_with_others_only_once_where_nothing_comes_with_anybody() -> None:
    waiting, now = Waiting(0.0), 0.0
    for others_are_tried in (True, False):
        while now < waiting.ends_at([]):
            now += 50.0
            waiting.looks(now, [])
            waiting.moved(now)
        assert waiting.nothing_s(now) == COMES_WITHIN_S
        assert waiting.goes_on(now, loses=others_are_tried) == others_are_tried
    assert now == 2 * COMES_WITHIN_S


def test_it_may_go_on_once_more_when_something_came_between() -> None:
    waiting = Waiting(0.0)
    assert waiting.goes_on(COMES_WITHIN_S, loses=False)  # though nothing is chosen just then
    assert not waiting.goes_on(2 * COMES_WITHIN_S, loses=True)
    waiting.came(2 * COMES_WITHIN_S)
    assert waiting.goes_on(3 * COMES_WITHIN_S, loses=True)


def test_where_nobody_is_to_be_left_it_does_not_go_on_after_a_minute() -> None:
    waiting = Waiting(0.0)
    assert waiting.goes_on(MOVES_WITHIN_S, loses=True)
    assert not waiting.goes_on(MOVES_WITHIN_S, loses=False)
