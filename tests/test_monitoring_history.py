"""monitoring.history: what a board remembers, how it ages, and that it is bounded."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from pathlib import Path

import pytest

from monitoring.history import (
    FRAGMENT_MEASURES,
    MAX_AGREED,
    MAX_NAMES,
    MEASURES,
    SWARM,
    TIERS,
    Batch,
    Happening,
    History,
    RoundRow,
)
from p2p_co2.errors import EnvironmentFault

START = 1_800_000_000.0


def sample(value: float) -> tuple[float, ...]:
    return tuple(value + place for place in range(len(MEASURES)))


def filled(history: History, seconds: int, step_s: int = 2) -> None:
    for t in range(0, seconds, step_s):
        rows = {"a": sample(float(t)), SWARM: sample(float(-t))}
        history.write(Batch(at=START + t, samples=rows, fragments={0: (1.0, 2.0, float(t % 3))}))


def test_samples_come_back_in_order(tmp_path: Path) -> None:
    history = History(tmp_path / "board.sqlite")
    filled(history, 20)
    rows = history.series("a", START, START + 20)
    assert [row[0] for row in rows] == [START + t for t in range(0, 20, 2)]
    assert rows[3][1:] == sample(6.0)
    assert history.series("nobody", START, START + 20) == []
    assert history.fragment_series(0, START, START + 20)[0][1:] == (1.0, 2.0, 0.0)
    assert history.span() == (START, START + 18)
    history.close()


def test_what_is_not_known_comes_back_as_such() -> None:
    history = History(None)
    history.write(Batch(at=START, samples={"a": (math.nan,) * len(MEASURES)}, fragments={}))
    (row,) = history.series("a", START, START)
    assert all(math.isnan(value) for value in row[1:])
    history.close()


def test_old_samples_become_means_and_finer_ones_go() -> None:
    history = History(None)
    seconds = TIERS[0][1] + 1200
    filled(history, seconds)
    long_ago = history.series("a", START, START + seconds)
    assert len(long_ago) <= 720
    at, *values = long_ago[5]
    step = long_ago[6][0] - at
    assert step == TIERS[1][0]
    place = MEASURES.index("loss")
    mean = sum(t + place for t in range(int(at - START), int(at - START + step), 2)) / (step / 2)
    assert values[place] == pytest.approx(mean)
    finest = history._reader.execute("SELECT min(at) FROM samples WHERE step = 2").fetchone()[0]
    assert finest >= START + seconds - TIERS[0][1] - 310
    history.close()


def test_a_board_started_again_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"
    first = History(path)
    filled(first, 10)
    row = RoundRow(0, 3, START + 5, "partial", 4, 3, 1, 0.7, 1, "peer b was late")
    line = Happening(START + 6, "peer_left", "b", -1, -1, "b left: stopped")
    more = Batch(
        at=START + 10, samples={}, fragments={}, rounds=[row],
        time_lines={(0, 3): '{"a":1}'}, happenings=[line], counted={"a": 12.5}, agreed=[(START, 100.0, 3.0)],
    )  # fmt: skip
    first.write(more)
    first.close()
    again = History(path)
    assert again.rounds(10) == [row]
    assert list(again.counted_rounds()) == [(0, 3)]
    assert again.time_line(0, 3) == '{"a":1}'
    assert again.happenings(10) == [line]
    assert again.newest_happening_at() == START + 6
    assert again.counted() == {"a": 12.5}
    assert again.agreed() == [(START, 100.0, 3.0)]
    filled(again, 4)
    assert len(again.series("a", START, START + 20)) == 5
    again.close()


def test_happenings_are_found_by_peer_fragment_and_kind() -> None:
    history = History(None)
    lines = [
        Happening(START + n, kind, peer, fragment, n, f"{n}")
        for n, (kind, peer, fragment) in enumerate(
            [("round_aborted", "a", 0), ("warned", "a", -1), ("round_aborted", "b", 1)]
        )
    ]
    history.write(Batch(at=START, samples={}, fragments={}, happenings=lines))
    assert [line.words for line in history.happenings(9)] == ["2", "1", "0"]
    assert [line.words for line in history.happenings(9, peer="a")] == ["1", "0"]
    assert [line.words for line in history.happenings(9, fragment=1)] == ["2"]
    assert [line.words for line in history.happenings(9, kinds=("warned",))] == ["1"]
    assert history.happenings(9, peer="nobody") == []
    history.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"
    path.write_bytes(b"this was never a database" * 100)
    history = History(path)
    filled(history, 4)
    history.close()
    assert list(tmp_path.glob("board.sqlite.damaged-*"))


def test_a_file_of_another_format_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version=99")
    other.close()
    History(path).close()
    assert list(tmp_path.glob("board.sqlite.damaged-*"))


def test_a_file_that_was_damaged_in_the_middle_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"
    history = History(path)
    filled(history, 400)
    history.close()
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\x5a" * (len(data) - 4096))
    history = History(path)
    assert list(tmp_path.glob("board.sqlite.damaged-*"))
    filled(history, 4)
    history.close()
    with contextlib.closing(History(path)) as again:
        assert len(again.series("a", START, START + 99)) == 2


def test_measurements_of_the_agreed_parameters_are_bounded() -> None:
    """A peer may tell thousands a second."""
    history = History(None)
    told = [(START + number / 1000, 1.0, 2.0) for number in range(MAX_AGREED + 500)]
    history.write(Batch(at=START + 60, samples={}, fragments={}, agreed=told))
    count, newest = history._writer.execute("SELECT count(*), max(at) FROM agreed").fetchone()
    assert count <= MAX_AGREED + 1
    assert newest == told[-1][0]
    history.close()


def test_a_number_that_it_cannot_hold_is_told_and_forgotten() -> None:
    history = History(None)
    for at in (1e300, math.inf):
        with pytest.raises(EnvironmentFault):
            history.write(Batch(at=at, samples={"a": sample(1.0)}, fragments={}))
    filled(history, 4)
    assert len(history.series("a", START, START + 99)) == 2
    history.close()


def test_a_write_that_fails_gives_no_peer_the_rows_of_another() -> None:
    history = History(None)
    line = Happening(START, "warned", "a", 2**70, 0, "a number that the file cannot hold")
    with pytest.raises(EnvironmentFault):
        history.write(Batch(at=START, samples={"a": sample(1.0)}, fragments={}, happenings=[line]))
    history.write(Batch(at=START + 2, samples={"b": sample(2.0)}, fragments={}))
    history.write(Batch(at=START + 4, samples={"a": sample(3.0)}, fragments={}))
    assert [row[0] for row in history.series("a", START, START + 9)] == [START + 4]
    assert [row[0] for row in history.series("b", START, START + 9)] == [START + 2]
    history.close()


def test_a_write_that_fails_leaves_its_means_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    (finer, _), (coarser, _) = TIERS[:2]
    history = History(None)
    for at in range(0, coarser, finer):
        history.write(Batch(at=START + at, samples={"a": sample(1.0)}, fragments={}))
    history._pruned_at = 0.0
    monkeypatch.setattr(history, "_prune", refuse)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        history.write(Batch(at=START + coarser, samples={"a": sample(1.0)}, fragments={}))
    monkeypatch.undo()
    history.write(Batch(at=START + coarser + finer, samples={"a": sample(1.0)}, fragments={}))
    means = "SELECT count(*) FROM samples WHERE step = ? AND at >= ?"
    assert history._writer.execute(means, (coarser, int(START))).fetchone() == (1,)
    history.close()


def refuse(now: float) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_names_of_which_nothing_is_kept_go() -> None:
    history = History(None)
    crowd = {f"peer {number}": sample(1.0) for number in range(MAX_NAMES + 9)}
    history.write(Batch(at=START, samples=crowd, fragments={}, counted={"peer 0": 1.0}))
    later = START + 2 * TIERS[-1][1]
    history.write(Batch(at=later, samples={"peer 7": sample(1.0)}, fragments={}))
    assert {name for (name,) in history._writer.execute("SELECT peer FROM peers")} == {"peer 0", "peer 7"}
    assert len(history.series("peer 7", later - 9, later + 9)) == 1
    history.close()


def test_a_place_that_cannot_be_written_is_told_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="--folder"):
        History(tmp_path / "file" / "board.sqlite")


def test_pages_can_be_read_in_the_middle_of_a_write(tmp_path: Path) -> None:
    for path in (None, tmp_path / "board.sqlite"):
        history = History(path)
        filled(history, 20)
        history._writer.execute("BEGIN")
        history._write(Batch(at=START + 20, samples={"a": sample(1.0)}, fragments={}))
        assert len(history.series("a", START, START + 18)) == 10
        assert history.span()[0] == START
        history._writer.execute("COMMIT")
        history.close()


def test_a_write_that_fails_changes_nothing() -> None:
    history = History(None)
    filled(history, 4)
    before = history.series("a", START, START + 99)
    with pytest.raises(EnvironmentFault):
        history.write(Batch(at=START + 8, samples={"a": sample(1.0)[:-1]}, fragments={}))
    assert history.series("a", START, START + 99) == before
    filled(history, 12)
    assert len(history.series("a", START, START + 99)) == 6
    assert len(FRAGMENT_MEASURES) == 3
    history.close()
