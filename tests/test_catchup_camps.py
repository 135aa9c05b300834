"""Which donors promise the same, and for which of them a download leaves those that it has: by hand."""

from __future__ import annotations

import math

import pytest

from p2p_co2.protocol.catchup.camps import (
    CHOOSE_CAP_S,
    LEFT_FLOOR_S,
    LEFT_TIMES,
    LOST_MOST,
    Camp,
    Course,
    Vouched,
    camps_of,
    rank,
    rivals_of,
    sooner_elsewhere,
)
from p2p_co2.protocol.catchup.goals import ROUND, STATE, Goal
from p2p_co2.protocol.catchup.line import Line
from p2p_co2.protocol.catchup.source import Source
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Manifest

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
        line.gave_at = 0.0 if gap_s else -math.inf
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
    found = sooner_elsewhere(ours, [ours, newer], (ALL, ALL), goal, vouched, 0.0)  # type: ignore[arg-type]
    assert (found and found[0]) == (newer if is_left else None)


def test_who_has_given_nothing_is_none_of_the_many() -> None:
    """One real donor and an identity beside it were two against one."""
    ours, newer = donors("a", 7, b"seven", 1.0), [*donors("b", 8, b"eight", 0.1), *donors("c", 8, b"eight")]
    assert sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, nobody, 0.0) is None


def test_a_silence_that_was_waited_out_is_nothing_given() -> None:
    """It counts as a time between two chunks where its donor is asked again."""
    ours, newer = donors("a", 7, b"seven", 1.0), donors("bc", 8, b"eight", 0.1)
    newer[1].line.gave_at = -math.inf
    assert sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, nobody, 0.0) is None


def test_those_who_are_asked_for_nothing_count_among_ours_and_not_among_the_others() -> None:
    """They were slow while others gave, and are left out for a minute."""
    ours, newer = donors("abc", 7, b"seven", 1.0), donors("de", 8, b"eight", 0.1)
    for source in ours[1:]:
        source.line.slow_until = 60.0
    assert sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, nobody, 0.0) is None
    found = sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, newest, 0.0)
    assert found is not None
    assert found[0] is newer
    assert found[1] == pytest.approx(ALL * 0.1 / 2)
    for source in newer:
        source.line.slow_until = 60.0
    few = [*newer, *donors("f", 8, b"eight", 0.1)]
    assert sooner_elsewhere(ours[:1], [few], (ALL, ALL), NOBODY_KNOWS, nobody, 0.0) is None  # one to one
    newer.extend(donors("f", 8, b"eight", 2.0))
    assert sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, newest, 0.0) is None


def test_one_of_ours_that_is_asked_for_nothing_may_be_borne_out_for_all() -> None:
    def second(donor: PeerId, manifest: Manifest) -> bool | None:
        return donor == "b" or None

    ours, newer = donors("ab", 7, b"seven", 1.0), donors("cde", 8, b"eight", 0.1)
    ours[1].line.slow_until = 60.0
    assert sooner_elsewhere(ours, [ours, newer], (ALL, ALL), NOBODY_KNOWS, second, 0.0) is None


def test_what_others_contradict_by_now_is_not_gone_by() -> None:
    """They had nothing to say of it when it was promised."""
    seven, eight = donors("a", 7, b"seven", 1.0), donors("bc", 8, b"eight", 0.1)
    contradicted = set[int]()

    def others(donor: PeerId, manifest: Manifest) -> bool | None:
        return False if manifest.version in contradicted else None

    course = Course(NOBODY_KNOWS, ALL, others)
    assert course.choice([*seven, *eight], (), 0.0) == eight
    contradicted.add(8)
    assert course.choice([*seven, *eight], (), 0.0) == seven
    course.content = seven[0].content
    assert course.elsewhere([*seven, *eight], ALL, 0.0) is None
    contradicted.clear()
    assert course.elsewhere([*seven, *eight], ALL, 0.0) == eight
    assert course.choice(eight, (), 0.0) == eight
    contradicted.add(8)
    assert course.choice(eight, (), 0.0) is course.decides_at(eight) is None


def test_what_something_was_left_for_may_be_lost_once_and_is_waited_for_a_moment() -> None:
    seven, eight, nine = (
        donors("a", 7, b"seven", 1.0),
        donors("b", 8, b"eight", 0.1),
        donors("b", 9, b"", 0.1),
    )
    asked = donors("b", 8, b"eight", 0.1)
    asked[0].manifest = None

    def left(losses: int) -> Course:
        course = Course(NOBODY_KNOWS, ALL, lambda donor, manifest: manifest.version > 7 or None)
        course.content = seven[0].content
        course.lost(asked, 0.0)  # before anything was left: this counts for nothing
        assert course.elsewhere([*seven, *eight], ALL, 0.0) == eight
        course.content = eight[0].content
        for _ in range(losses):
            course.lost([*seven, *asked], 10.0)
        return course

    waited_at = 10.0 + CHOOSE_CAP_S
    assert left(1).decides_at([*seven, *asked]) == waited_at
    assert left(1).choice([*seven, *asked], (), waited_at - 0.1) is None
    assert left(1).choice([*seven, *asked], (), waited_at) == seven
    assert left(LOST_MOST).choice([*seven, *asked], (), 10.0) == seven
    assert left(1).choice([*seven, *eight], (), 10.0) == eight
    assert left(1).choice([*seven, *nine], (), 10.0) == nine
    assert left(LOST_MOST).choice([*seven, *nine], (), 10.0) == seven
    asked[0].again_at = 10.5
    assert left(1).choice([*seven, *asked], ("b",), 10.0) is None  # has given, and is to be asked again
    assert left(1).choice([*seven, *asked], (), 10.0) == seven


def test_where_all_are_lost_the_first_that_promises_anew_is_no_more_than_the_first() -> None:
    seven, eight = donors("a", 7, b"seven"), donors("b", 8, b"eight")
    silent = donors("c", 8, b"eight")
    silent[0].manifest = None
    course = Course(GOAL, ALL, nobody)
    course.heard(0.0, 1.0)
    assert course.choice([*eight, *silent], (), 1.9) is None
    assert course.choice([*eight, *silent], (), 2.0) == eight
    course.content = eight[0].content
    course.lost(silent, 10.0)
    course.heard(10.0, 10.5)
    assert course.decides_at(eight) == 11.0
    assert course.choice([*eight, *silent], (), 10.9) is None
    assert course.choice([*eight, *seven], (), 10.9) == seven


SEVEN, EIGHT = donors("a", 7, b"seven", 1.0), donors("b", 8, b"eight", 0.125)
BOTH = [*SEVEN, *EIGHT]
LOOK_S = LEFT_FLOOR_S + LEFT_TIMES * ALL * 0.125


def gone_to_eight(vouched: Vouched = newest) -> Course:
    course = Course(NOBODY_KNOWS, ALL, newest)
    course.content = SEVEN[0].content
    assert course.looks_at() is None
    assert course.elsewhere(BOTH, ALL, 0.0) == EIGHT
    course.content = EIGHT[0].content
    course.begun(ALL)
    course._vouched = vouched
    return course


def test_it_is_gone_back_once_when_what_it_was_left_for_does_not_come_in_time() -> None:
    course = gone_to_eight()
    assert course.is_standing_by(SEVEN[0])
    assert not course.is_standing_by(EIGHT[0])
    assert course.looks_at() == pytest.approx(LOOK_S, rel=1e-4)
    look_s = course.looks_at() or 0.0
    assert course.elsewhere(BOTH, ALL, look_s - 0.1) is None
    assert course.elsewhere(BOTH, ALL // 2, look_s) is None  # the half
    assert course.looks_at() == 2 * look_s
    assert course.elsewhere(BOTH, 31, 2 * look_s) is None  # less, but the rest in 49 s, half as long as SEVEN
    assert course.elsewhere(BOTH, 20, 3 * look_s - 0.1) is None
    assert course.elsewhere(BOTH, 20, 3 * look_s) == SEVEN  # in 54 s
    course.content = SEVEN[0].content
    course.begun(ALL - 10)
    assert course.looks_at() is None
    assert not course.is_standing_by(SEVEN[0])
    assert course.elsewhere(BOTH, ALL, 9 * look_s) is None  # never again
    course.lost(BOTH, 9 * look_s)
    assert course.choice(BOTH, (), 9 * look_s) == SEVEN  # and kept


def test_it_is_gone_back_to_one_that_promises_what_was_left_and_has_given_nothing_yet() -> None:
    """Who gave it is gone: how long it takes is not known, but what it was left for does not come."""
    course, again = gone_to_eight(), donors("e", 7, b"seven")
    look_s = course.looks_at() or 0.0
    assert course.elsewhere([*EIGHT, *again], ALL // 2, look_s) is None
    assert course.elsewhere([*EIGHT, *again], ALL // 2 - 24, 2 * look_s) == again


def test_what_others_contradict_once_it_is_gone_to_is_left_though_it_comes() -> None:
    course = gone_to_eight(lambda donor, manifest: False if manifest.version == 8 else None)
    assert course.elsewhere(BOTH, 1, course.looks_at() or 0.0) == SEVEN


def test_where_nobody_stands_by_any_more_others_are_gone_to_and_given_ever_more_time() -> None:
    nine, ten = donors("cd", 9, b"nine"), donors("ab", 10, b"ten", 0.125)
    course = gone_to_eight(nobody)
    look_s = course.looks_at() or 0.0
    assert course.elsewhere(EIGHT, ALL, look_s) is None  # nobody else is there
    assert course.looks_at() == 2 * look_s
    assert course.elsewhere([*EIGHT, *nine], ALL, 2 * look_s) == nine
    course.content = nine[0].content
    course.begun(ALL)
    assert course.looks_at() == 4 * look_s
    assert course.elsewhere([*EIGHT, *nine], ALL - 1, 4 * look_s) == EIGHT  # sooner by what it has given
    course.content = EIGHT[0].content
    course.begun(ALL)
    assert course.looks_at() == 8 * look_s
    assert course.elsewhere([*BOTH, *ten], ALL, 8 * look_s) == SEVEN  # it stands by


def test_what_comes_is_not_left_for_what_is_less_sure() -> None:
    nine = donors("cd", 9, b"nine", 0.1)
    course = gone_to_eight()  # for which somebody vouches, and for nine nobody
    look_s = course.looks_at() or 0.0
    assert course.elsewhere([*EIGHT, *nine], ALL - 1, look_s) is None
    assert course.elsewhere([*EIGHT, *nine], ALL - 1, 2 * look_s) == nine  # of eight nothing came


def test_a_trickle_is_left_for_who_has_given_nothing_yet_and_for_the_soonest_of_many() -> None:
    quick, many = donors("c", 9, b"nine", 0.1), donors("def", 10, b"ten", 3.0)
    unknown = donors("c", 9, b"nine")
    look_s = gone_to_eight(nobody).looks_at() or 0.0
    is_left = {
        came: gone_to_eight(nobody).elsewhere([*EIGHT, *unknown], ALL - came, look_s) for came in (40, 30)
    }
    assert is_left == {40: None, 30: unknown}  # its rest in 45 s and in 70 s, where 60 s is twice the look
    assert gone_to_eight(nobody).elsewhere([*EIGHT, *quick, *many], ALL - 1, look_s) == quick
    assert gone_to_eight(nobody).choice([*quick, *many], (), look_s) == many  # more promise it


def test_what_is_chosen_when_what_was_gone_back_to_is_lost_has_to_keep_coming_too() -> None:
    course, nine = gone_to_eight(nobody), donors("cd", 9, b"nine", 0.1)
    look_s = course.looks_at() or 0.0
    assert course.elsewhere(BOTH, ALL - 1, look_s) == SEVEN
    course.content = SEVEN[0].content
    course.begun(ALL)
    course.lost(EIGHT, 2 * look_s)
    assert course.choice(EIGHT, (), 2 * look_s) == EIGHT
    course.content = EIGHT[0].content
    course.begun(ALL)
    assert course.looks_at() == 4 * look_s  # twice as long
    assert not course.is_standing_by(SEVEN[0])  # it is not gone back to once more
    assert course.elsewhere([*BOTH, *nine], ALL - 1, 4 * look_s) == nine


def test_what_is_chosen_for_want_of_more_has_to_keep_coming_too() -> None:
    nine, ten = donors("cd", 9, b"nine"), donors("ab", 10, b"ten", 0.125)
    course = gone_to_eight(lambda donor, manifest: manifest.version == 10 or None)
    look_s = course.looks_at() or 0.0
    assert course.elsewhere(BOTH, ALL // 2, look_s) is None
    course.lost(BOTH, look_s + 1.0)
    assert course.choice([*SEVEN, *ten], (), look_s + 1.0) == ten
    course.content, look_at = ten[0].content, course.looks_at() or 0.0
    course.begun(ALL)
    assert course.elsewhere([*SEVEN, *ten], ALL // 2, look_at) is None
    course = gone_to_eight()
    course.lost(nine, 1.0)
    assert course.choice(nine, (), 1.0) == nine
    course.content = nine[0].content
    course.begun(ALL)
    assert course.looks_at() == 1.0 + look_s
    assert course.elsewhere(nine, ALL, 1.0 + look_s) is None
    assert course.elsewhere([*nine, *EIGHT], ALL, 1.0 + 2 * look_s) == EIGHT


def test_nothing_is_left_that_is_nearly_there_or_may_be_quick_or_is_a_round() -> None:
    newer = donors("bc", 8, b"eight", 0.2)  # all of it in 10 s
    enough_s = LEFT_FLOOR_S + LEFT_TIMES * 10.0
    ours = donors("a", 7, b"seven", 1.0)

    def is_left(ours: Camp, missing: int) -> bool:
        camps = [ours, newer, donors("d", 6, b"six", 0.01)]
        return sooner_elsewhere(ours, camps, (missing, ALL), NOBODY_KNOWS, newest, 0.0) is not None

    assert is_left(ours, int(enough_s) + 1)
    assert not is_left(ours, int(enough_s) - 1)
    assert not is_left([*ours, *donors("e", 7, b"seven")], ALL)
    assert not is_left(donors("a", 7, b"seven", 1.0, ROUND), ALL)
