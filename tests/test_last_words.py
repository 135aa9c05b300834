"""node.last_words: by hand."""

from __future__ import annotations

from p2p_co2.node.last_words import WORDS_KEPT, Held, LastWords
from p2p_co2.wire.identity import PeerId

A, B = PeerId("a"), PeerId("b")


def held(*versions: int) -> Held:
    return versions, tuple(bytes([version]) * 32 for version in versions)


def is_too_far(fragment: int, version: int) -> bool:
    return version > 9


def test_what_was_said_is_known_until_who_said_it_says_something_else() -> None:
    words = LastWords()
    assert words.newest(0) == -1
    words.note({A: held(3, 4), B: held(5, 2)}, is_too_far)
    assert [words.newest(fragment) for fragment in range(3)] == [5, 4, -1]
    assert words.gone_with(0, 0) == []
    words.note({A: held(3, 4)}, is_too_far)
    assert words.newest(0) == 5
    assert words.gone_with(0, 5) == [(5, bytes([5]) * 32)]
    assert words.gone_with(0, 6) == []
    words.note({A: held(3, 4), B: None}, is_too_far)  # it is back, and joins
    assert words.newest(0) == 3
    words.note({}, is_too_far)
    assert words.gone_with(1, 0) == [(4, bytes([4]) * 32)]
    words.clear()
    assert words.newest(0) == -1


def test_what_nobody_can_have_held_was_not_said() -> None:
    words = LastWords()
    words.note({A: held(200, 4)}, is_too_far)
    words.note({}, lambda fragment, version: False)
    assert [words.newest(fragment) for fragment in range(2)] == [-1, 4]
    assert words.gone_with(0, 0) == []
    assert words.gone_with(1, 0) == [(4, bytes([4]) * 32)]


def test_words_are_bounded() -> None:
    words = LastWords()
    for number in range(WORDS_KEPT + 2):
        words.note({number: held(7)}, is_too_far)
    assert len(words.gone_with(0, 7)) == WORDS_KEPT - 1
