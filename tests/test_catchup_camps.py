"""Which donors promise the same, and for which of them a download leaves those that it has: by hand."""

from __future__ import annotations

import pytest

from p2p_co2.catchup.camps import LEFT_FLOOR_S, LEFT_TIMES, Camp, camps_of, rank, rivals_of, sooner_elsewhere
from p2p_co2.catchup.goals import ROUND, STATE, Goal
from p2p_co2.catchup.line import Line
from p2p_co2.catchup.source import Source
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Manifest

GOAL = Goal(STATE, 1, 7, (), digest=b"seven")
NOBODY_KNOWS = Goal(STATE, 1, 7, ())
ALL = 100


def donors(names: str, version: int, digest: bytes, gap_s: float = 0.0, what: int = STATE) -> Camp:
    """One per letter, that give a chunk each ``gap_s``; 0: none has come yet."""
    manifest = Manifest(what=what, version=version, digest=digest)  # type: ignore[arg-type]
    camp = []
    for name in names:
        line = Line(0.0)
        line._gaps_s.extend([gap_s] if gap_s else [])
        camp.append(Source(PeerId(name), 0, 0.0, line, manifest, bytes([version]) + digest))
    return camp


def nobody(donor: PeerId, manifest: Manifest) -> bool | None:
    return None


def newest(donor: PeerId, manifest: Manifest) -> bool | None:
    return manifest.version == 8 or None


def test_those_who_promise_the_same_are_one_camp() -> None:
    seven, other, silent = donors("ab", 7, b"seven"), donors("c", 7, b"other"), donors("d", 7, b"")
    silent[0].manifest = None
    camps = camps_of([seven[0], *other, *silent, seven[1]])
    assert [[source.peer for source in camp] for camp in camps] == [["a", "b"], ["c"]]


def test_what_is_known_goes_before_what_is_vouched_for_and_that_before_what_many_promise() -> None:
    known, sure = donors("a", 7, b"seven"), donors("b", 8, b"eight")
    many, older = donors("cdef", 9, b"nine"), donors("ghij", 6, b"six")
    order = sorted((older, sure, many, known), key=lambda camp: rank(camp, GOAL, newest), reverse=True)
    assert order == [known, sure, older, many]  # of what nobody knows the oldest


def test_one_word_against_another_is_a_dispute_unless_one_of_them_is_known() -> None:
    one, other, elsewhere = donors("a", 7, b"one"), donors("bc", 7, b"two"), donors("d", 8, b"eight")
    assert rivals_of(one, [one, other, elsewhere], NOBODY_KNOWS, nobody) == ["b", "c"]
    assert rivals_of(other, [one, other, elsewhere], NOBODY_KNOWS, nobody) == []
    known = donors("a", 7, b"seven")
    assert rivals_of(known, [known, other], GOAL, nobody) == []


@pytest.mark.parametrize(
    ("goal", "vouched", "count", "gap_s", "is_left"),
    [
        (NOBODY_KNOWS, nobody, 2, 0.1, True),
        (NOBODY_KNOWS, nobody, 1, 0.1, False),  # no more than ours
        (NOBODY_KNOWS, nobody, 5, 0.0, False),  # have given nothing
        (GOAL, nobody, 5, 0.1, False),  # ours is what most know
        (GOAL, newest, 1, 0.1, True),
        (GOAL, newest, 5, 0.0, True),  # a fifth of our time
        (GOAL, newest, 1, 0.0, False),  # no quicker than ours
    ],
)
def test_when_a_slow_donor_is_left(
    goal: Goal, vouched: object, count: int, gap_s: float, is_left: bool
) -> None:
    ours, newer = donors("a", 7, b"seven", 1.0), donors("bcdef"[:count], 8, b"eight", gap_s)
    camp = sooner_elsewhere(ours, [ours, newer], (ALL, ALL), goal, vouched, 0.0)  # type: ignore[arg-type]
    assert camp == (newer if is_left else None)


def test_who_has_given_nothing_is_none_of_the_many() -> None:
    """One real donor and an identity beside it were two against one."""
    ours, newer = donors("a", 7, b"seven", 1.0), [*donors("b", 8, b"eight", 0.1), *donors("c", 8, b"eight")]
    assert sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, nobody, 0.0) is None


def test_nothing_is_left_that_is_nearly_there_or_may_be_quick_or_is_a_round() -> None:
    newer = donors("bc", 8, b"eight", 0.2)  # all of it in 10 s
    enough_s = LEFT_FLOOR_S + LEFT_TIMES * 10.0
    ours = donors("a", 7, b"seven", 1.0)

    def is_left(ours: Camp, missing: int) -> bool:
        camps = [ours, newer, donors("d", 6, b"six", 0.01)]
        return sooner_elsewhere(ours, camps, (missing, ALL), NOBODY_KNOWS, newest, 0.0) is newer

    assert is_left(ours, int(enough_s) + 1)
    assert not is_left(ours, int(enough_s) - 1)
    assert not is_left([*ours, *donors("e", 7, b"seven")], ALL)
    assert not is_left(donors("a", 7, b"seven", 1.0, ROUND), ALL)
