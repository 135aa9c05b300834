"""node.last_words: by hand."""

from __future__ import annotations

import pytest

from p2p_co2.node.last_words import WORDS_KEPT, Held, LastWords
from p2p_co2.protocol.wire.identity import PeerId

A, B = PeerId("a"), PeerId("b")


def held(*versions: int) -> Held:
    return versions, tuple(bytes([version]) * 32 for version in versions)


LIMITS = [9, 9]


def test_what_was_said_is_known_until_who_said_it_says_something_else() -> None:
    words = LastWords()
    assert words.newest(0) == -1
    assert words.note({A: held(3, 4), B: held(5, 2)}, LIMITS)
    assert [words.newest(fragment) for fragment in range(2)] == [5, 4]
    assert not words.gone_with(0)
    words.note({A: held(3, 4)}, LIMITS)
    assert words.newest(0) == 5
    assert words.gone_with(0) == {(5, bytes([5]) * 32): 1}
    words.note({A: held(3, 4), B: None}, LIMITS)  # it is back, and joins
    assert words.newest(0) == 3
    words.note({}, LIMITS)
    assert words.gone_with(1) == {(4, bytes([4]) * 32): 1}
    words.clear()
    assert words.newest(0) == -1


def test_what_nobody_can_have_held_was_not_said() -> None:
    words = LastWords()
    words.note({A: held(200, 4)}, LIMITS)
    words.note({}, [255, 255])
    assert [words.newest(fragment) for fragment in range(2)] == [-1, 4]
    assert not words.gone_with(0)
    assert words.gone_with(1) == {(4, bytes([4]) * 32): 1}


def test_beyond_what_one_may_say_two_that_hold_one_state_are_believed() -> None:
    """Three of five had stood still for most of the run, and left without a word of the fourteen rounds that
    the two others had made."""
    words = LastWords()
    words.note({A: held(200, 4), B: held(200, 4)}, LIMITS)
    assert words.newest(0) == 200
    words.note({}, LIMITS)
    assert words.newest(0) == 200
    words.clear()
    words.note({A: held(200, 4), B: ((200, 4), (b"x" * 32, b"y" * 32))}, LIMITS)
    words.note({A: held(200, 4), B: held(200), PeerId("c"): None}, LIMITS)
    assert words.newest(0) == -1


@pytest.mark.parametrize(
    "word", [held(3), held(3, 3, 3), ((), ()), ((9, 9), ()), ((9, 9), (b"x" * 32,)), ((), (b"x" * 32,) * 2)]
)
def test_what_is_not_of_this_run_is_nothing(word: Held) -> None:
    words = LastWords()
    words.note({A: word}, LIMITS)
    words.note({}, LIMITS)
    for fragment in range(2):
        assert words.newest(fragment) == -1
        assert not words.gone_with(fragment)


def test_it_is_news_that_somebody_has_gone_or_says_something_else() -> None:
    words = LastWords()
    told = [
        words.note(heard, LIMITS)
        for heard in ({A: held(5, 5)}, {A: held(5, 5)}, {}, {}, {A: None}, {A: held(5, 6)}, {A: held(5, 7)})
    ]
    assert told == [True, False, True, False, True, True, True]


def test_words_are_bounded() -> None:
    words = LastWords()
    for number in range(WORDS_KEPT + 2):
        words.note({number: held(7, 7)}, LIMITS)
    assert words.held() == {"WORDS_KEPT": (WORDS_KEPT, WORDS_KEPT)}
    assert words.gone_with(0).total() == WORDS_KEPT - 1
