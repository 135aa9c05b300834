"""What comes from each donor, and when all should be there."""

from __future__ import annotations

import math
import random

import pytest

from p2p_co2.protocol.catchup.line import (
    FIRST_CHUNK_S,
    MAX_LINES,
    OUTRUN_S,
    SLOW_CAP_S,
    SLOW_FLOOR_S,
    STALL_CAP_S,
    Line,
    Lines,
    all_there_in_s,
)
from p2p_co2.protocol.catchup.source import Source
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES

A, B, C = (PeerId(name) for name in "abc")


def line_of(gap_s: float, owes: int = 0, now: float = 0.0) -> Line:
    """One that gave a chunk just now, ``gap_s`` after the one before."""
    line = Line(now - gap_s)
    line.ask((1, 0), now - gap_s)
    line.gave((1, 0), now)
    for chunk in range(owes):
        line.ask((1, 1 + chunk), now)
    return line


def test_all_are_there_when_the_last_giver_is_by_hand() -> None:
    assert all_there_in_s([line_of(1.0), line_of(4.0)], 4, 0.0) == pytest.approx(4.0)  # 3 and 1, or 4 and 0
    assert all_there_in_s([line_of(1.0), line_of(4.0)], 3, 0.0) == pytest.approx(3.0)
    assert all_there_in_s([line_of(1.0), line_of(4.0)], 5, 0.0) == pytest.approx(4.0)
    assert all_there_in_s([line_of(1.0, owes=2), line_of(4.0)], 1, 0.0) == pytest.approx(3.0)
    assert all_there_in_s([Line(0.0), line_of(4.0)], 1, 0.0) == pytest.approx(4.0)
    assert all_there_in_s([Line(0.0)], 1, 0.0) == math.inf


def test_no_order_of_asking_has_all_there_sooner() -> None:
    """Against giving each chunk to whoever has it there first, one by one."""
    random_ = random.Random(1)
    for _ in range(300):
        lines = [
            line_of(random_.uniform(0.1, 9.0), random_.randrange(3)) for _ in range(random_.randint(1, 8))
        ]
        chunks, ends_at = random_.randint(1, 40), 0.0
        next_at = [line.next_in_s(0.0) for line in lines]
        for _ in range(chunks):
            which = min(range(len(lines)), key=next_at.__getitem__)
            ends_at = next_at[which]
            next_at[which] += lines[which].gap_s
        assert all_there_in_s(lines, chunks, 0.0) == pytest.approx(ends_at, abs=1e-4)


def test_a_chunk_that_comes_when_it_is_waited_for_no_more_says_nothing_of_how_long_answers_take() -> None:
    """One that was kept back while nothing was asked made its donor be waited for a minute at each pause."""
    lines = Lines()
    line = lines.of(A, 0.0)
    for chunk in range(3):
        lines.ask(line, (1, chunk), float(chunk))
        lines.gave(line, (1, chunk), chunk + 0.5)
    patience_s, gap_s = line.patience_s(0.0), line.gap_s
    lines.gave(line, (1, 9), 60.0, is_in_turn=False)
    assert (line.patience_s(0.0), line.gap_s) == (patience_s, gap_s)


@pytest.mark.parametrize("is_in_turn", [True, False])
def test_what_was_asked_for_before_something_that_came_is_lost_if_that_answers_what_was_asked_last(
    is_in_turn: bool,
) -> None:
    line = line_of(1.0, owes=2)
    line.gave((1, 2), 1.0, is_in_turn)
    assert math.isfinite(line.lost_at((1, 1))) == is_in_turn


def test_what_is_late_is_expected_later() -> None:
    line = line_of(1.0, owes=2)
    assert line.next_in_s(0.5) == pytest.approx(2.5)
    assert line.next_in_s(5.0) == pytest.approx(5.0 + 1.0)  # it may need as long for each as it has now
    assert line_of(1.0).next_in_s(7.0) == pytest.approx(1.0)


def test_when_all_is_there_is_found_whatever_the_gaps_are() -> None:
    """For gaps that are no multiple of a double's step at unix time it looked for ever. (Those that are
    measured there are such multiples.)"""
    random_ = random.Random(2)
    for _ in range(300):
        lines = [line_of(random_.uniform(3e-4, 3e-2)) for _ in range(random_.randint(1, 6))]
        chunks = random_.randint(1, 200)
        least_s, now = all_there_in_s(lines, chunks, 0.0), 1.8e9
        assert all_there_in_s(lines, chunks, now) == least_s
        for line in lines:
            line.ask((2, 0), now)
        assert all_there_in_s(lines, chunks, now) >= least_s


def test_a_window_opens_from_one_chunk_as_far_as_the_rate_carries() -> None:
    for gap_s, most in ((0.01, 6), (0.2, 4), (4.0, 2)):
        line, now, seen = Line(0.0), 0.0, [1]
        for chunk in range(8):
            line.ask((1, chunk), now)
            now += gap_s
            line.gave((1, chunk), now)
            seen.append(line.window)
        assert seen[:2] == [1, 2]
        assert max(seen) == most


def test_a_window_is_bounded_in_bytes_whatever_a_chunk_has() -> None:
    for chunk_bytes, most in ((MAX_DATA_BYTES, 6), (MAX_DATA_BYTES // 8, 48)):
        lines = Lines(chunk_bytes)
        line, now = lines.of(A, 0.0), 0.0
        for chunk in range(12):
            lines.ask(line, (1, chunk), now)
            now += 0.001
            lines.gave(line, (1, chunk), now)
        assert line.window == most


def silence(lines: Lines, line: Line, others_gap_s: float = 0.0) -> float:
    return lines.silent_at(line, others_gap_s)


def test_one_that_gives_nothing_while_others_do_is_silent_and_none_while_nobody_does() -> None:
    lines = Lines()
    a, b = lines.of(A, 0.0), lines.of(B, 0.0)
    for at in range(20):
        lines.ask(a, (1, at), at * 0.5)
        lines.gave(a, (1, at), at * 0.5 + 0.5)
        if at == 3:
            lines.ask(b, (2, 0), 2.0)
    lines.ask(a, (1, 99), 10.0)
    assert silence(lines, b) == 2.0 + FIRST_CHUNK_S
    assert silence(lines, b, 0.1) == 2.0 + 3.2
    assert silence(lines, a) == 10.0 + STALL_CAP_S  # so far nobody gives anything
    lines.gave(b, (2, 0), 18.0)  # our own line stood still
    assert silence(lines, a) == 18.0 + SLOW_FLOOR_S
    lines.ask(b, (2, 1), 18.0)
    lines.gave(b, (2, 1), 18.9)
    lines.ask(b, (2, 2), 18.9)
    lines.gave(b, (2, 2), 19.8)
    assert silence(lines, a) == 18.0 + SLOW_FLOOR_S


def test_one_alone_is_silent_by_its_own_measure_and_never_waited_for_without_end() -> None:
    lines = Lines()
    a, b = lines.of(A, 0.0), lines.of(B, 0.0)
    lines.ask(a, (1, 0), 0.0)
    lines.gave(a, (1, 0), 0.1)
    lines.ask(a, (1, 1), 0.1)
    assert silence(lines, a) == 0.1 + SLOW_FLOOR_S
    at = 0.0
    for chunk in range(60):  # each after a pause
        lines.ask(b, (2, chunk), at)
        at += 1.9
        lines.gave(b, (2, chunk), at)
    lines.ask(b, (2, 60), at)
    assert silence(lines, a) <= 0.1 + SLOW_FLOOR_S + STALL_CAP_S


def test_over_ways_of_10_kb_s_a_donor_has_the_time_that_its_chunks_take() -> None:
    """It was given up after 20 s, beside others no quicker, while what a round sent had its way."""
    lines, slow = Lines(), line_of(6.5, owes=1)
    assert silence(lines, slow, 6.5) == 4 * 6.5
    assert silence(lines, line_of(12.0, owes=1), 12.0) == 4 * 12.0
    assert silence(lines, line_of(20.0, owes=1), 20.0) == SLOW_CAP_S
    assert silence(lines, slow, 0.1) == 3.2  # others are quick
    first = Line(0.0)
    first.ask((1, 0), 0.0)
    assert silence(lines, first, 6.5) == 4 * 6.5
    assert silence(lines, first, 1.0) == FIRST_CHUNK_S


def test_who_was_outrun_is_forgotten_after_a_while_and_lines_are_bounded() -> None:
    lines = Lines()
    a, b = lines.of(A, 0.0), lines.of(B, 0.0)
    lines.ask(a, (1, 0), 0.0)
    lines.ask(b, (2, 0), 0.0)
    lines.outran(a, 4.0)
    assert a.slow_until < 4.0  # nothing came of the other either: it is we
    lines.gave(b, (2, 0), 3.9)
    lines.outran(a, 4.0)
    assert a.slow_until == 4.0 + OUTRUN_S
    assert lines.of(A, 70.0) is a  # it still owes
    a.asked.clear()
    assert lines.of(A, 4.0 + 2 * OUTRUN_S - 1.0) is a
    b.window = 4
    assert lines.of(A, 4.0 + 2 * OUTRUN_S + 1.0).slow_until < 0
    assert (lines.of(B, 200.0).window, lines.of(B, 200.0).gap_s) == (1, 0.0)
    held = lines.of(C, 200.0)
    lines.ask(held, (1, 0), 200.0)
    for number in range(2 * MAX_LINES):
        lines.of(PeerId(f"donor {number}"), 200.0)
    assert len(lines) == MAX_LINES
    assert lines.of(C, 200.0) is held


def test_a_donor_that_was_left_alone_for_long_is_one_line_in_all_downloads() -> None:
    """A download that had it all along went on with a line of its own: the donor owed two windows at once,
    and what it owed there was not seen."""
    lines = Lines()
    held = lines.of(A, 0.0)
    lines.ask(held, (1, 0), 0.0)
    lines.gave(held, (1, 0), 1.0)
    others = lines.of(A, 2.0 + OUTRUN_S)
    assert (others.window, others.gap_s) == (1, 0.0)
    lines.ask(held, (1, 1), 2.0 + OUTRUN_S)
    assert not others.has_room


def test_who_sends_what_a_round_needs_is_not_silent_but_not_for_ever() -> None:
    """Its chunks wait behind its slices: a donor of a crowded line was dropped after 20 s, with two thirds of
    a state given."""
    lines = Lines()
    line = lines.of(A, 0.0)
    lines.ask(line, (1, 0), 0.0)
    lines.gave(line, (1, 0), 2.0)
    lines.ask(line, (1, 1), 2.0)
    alone_at = lines.silent_at(line, 0.0)
    assert alone_at == 2.0 + 4 * 2.0
    lines.is_busy(A, 8.0)
    assert lines.silent_at(line, 0.0) == 8.0 + 4 * 2.0
    lines.is_busy(A, 1e6)
    assert lines.silent_at(line, 0.0) == alone_at + STALL_CAP_S
    lines.is_busy(B, 9.0)  # nothing is asked of it
    assert len(lines) == 1


def test_a_chunk_is_waited_for_as_long_as_those_take_that_were_asked_for_before_it() -> None:
    """Each that came made the rest of the queue shorter, and what was due sooner than it could be there."""
    lines = Lines()
    line = lines.of(A, 0.0)
    first, second = Source(A, 1, 0.0, line), Source(A, 2, 0.0, line)
    assert second.waits_since() == -math.inf
    for chunk in range(8):
        first.ask(chunk, 0.0, lines)
    second.ask(0, 0.0, lines)
    for chunk in range(8):
        first.gave(chunk, 10.0 * (chunk + 1), lines)
    assert second.waits_since() == 80.0  # due after nine gaps
    first.ask(8, 80.0, lines)
    first.gave(8, 100.0, lines)
    assert second.waits_since() == 90.0
