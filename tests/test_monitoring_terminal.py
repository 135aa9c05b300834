"""The terminal's words, frames and lines: by hand, at any width, from any part of a run."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import LiveTerminal
from monitoring.words import ago, clock, describe, figure, percent, plain, size
from p2p_co2.telemetry.events import PeerJoined
from p2p_co2.telemetry.view import fold
from tests.event_samples import started
from tests.told_run import FACTS, IDS, frame, printed, story, swarm

# ---- by hand


def test_words_for_figures() -> None:
    assert [size(count) for count in (0, 999, 1000, 99_949, 999_600, 34e6, None, math.nan)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "99.9 kB",
        "1.0 MB",
        "34.0 MB",
        "-",
        "-",
    ]
    assert (clock(59.6), clock(3600), clock(-5), clock(None)) == ("1:00", "1:00:00", "0:00", "-")
    assert (ago(40.0, 130.4), ago(130.0, 130.4), ago(140.0, 130.4)) == (", 1:30 ago", "", "")
    assert (ago(None, 130.4), ago(math.nan, 130.4)) == ("", "")
    assert (figure(12345.6), figure(math.inf), percent(0.985)) == ("12,346", "-", "98.5 %")
    assert (plain("a\x1b[31m\n b", 20), plain("abcdef", 4)) == ("a?[31m b", "abc…")


def test_who_goes_on_from_a_checkpoint_is_said_to() -> None:
    anew = started("ada")
    again = replace(anew, resumed_from="runs/peer/checkpoint", inner_steps=1695, position=21.0)
    assert describe(anew, {"ada": "ada"})[1] == "ada started on cpu"
    assert describe(again, {"ada": "ada"})[1] == "ada started on cpu, resumed at step 1,695, round 21.0"


def test_a_frame_shows_every_peer_and_the_rounds() -> None:
    text = frame(swarm(finish=False))
    row = next(line for line in text.splitlines() if line.startswith("bob"))
    assert row.split() == (
        [
            "bob",
            "training",
            "60",
            "2.055",
            "300",
            "2.9",
            "1",
            "6",
            "3.0",
            "kB",
            "2.8",
            "kB",
            "0.0",
            "1",
            "grpc",
        ]
    )
    assert "6 committed, 1 aborted: the owner of part 1 was lost (1)" in text
    assert "round 4 of fragment 0 aborted: the owner of part 1 was lost" in text
    assert text.count("aborted: the owner") == 2
    assert "about 0:37 to go" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_cell_is_shortened_on_a_narrow_terminal(width: int) -> None:
    text = frame(swarm(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    table = text[: text.index("rounds:")]
    assert "…" not in table
    assert "staleness" in text


def test_a_silent_peer_and_a_crowd() -> None:
    assert "silent 1:39" in frame(swarm(finish=False), now=220.0)
    crowd = fold(PeerJoined(at=1.0, peer=IDS["ada"], other=f"peer {number:06d}") for number in range(30))
    text = frame(crowd, rows=5)
    assert "and 26 more" in text


def test_the_summary_is_readable() -> None:
    facts = RunFacts(
        config=FACTS.config, loss_start=5.5, loss_end=2.25, text="def f(\x1b[2J):\n    [bold]pass"
    )
    text = printed(summarise(swarm(), facts))
    for part in (
        "5.5000 to 2.2500 nats per token",
        "yes, 2 of 2 peers finished",
        "80.0 bytes per parameter in the same 20.0 steps (80 times as much)",
        "0 ████████████████████████████████████████ 8",
        "1 ████████████████████ 4",
        "def f(?[2J):\n    [bold]pass",
    ):
        assert part in text


def test_without_a_terminal_there_is_a_plain_line_every_ten_seconds() -> None:
    stream = io.StringIO()
    with LiveTerminal("demo", 60.0, console=Console(file=stream, width=300)) as live:
        begin = live.started_at
        for second in range(25):
            live.show(swarm(), begin + second)
    lines = stream.getvalue().splitlines()
    times = ["[0:00, trained 0:00 of 1:00]", "[0:10, trained 0:10 of 1:00]", "[0:20, trained 0:20 of 1:00]"]
    assert [line[: line.index("]") + 1] for line in lines] == times
    assert "2 peers, 120 inner steps, loss 2.055, 0 tokens/s, rounds 6 committed 1 aborted" in lines[0]


def test_starting_is_not_training_and_a_late_end_is_no_overrun() -> None:
    stream = io.StringIO()
    with LiveTerminal("demo", 20.0, console=Console(file=stream, width=300)) as live:
        for second, view in ((0, fold([])), (40, swarm()), (50, swarm()), (70, swarm())):
            live.show(view, live.started_at + second)
    starts = [line.split("]")[0] for line in stream.getvalue().splitlines()]
    trained = ("0:00", "0:00", "0:10", "0:20")
    assert starts == [
        f"[{at}, trained {of} of 0:20"
        for at, of in zip(("0:00", "0:40", "0:50", "1:10"), trained, strict=True)
    ]


def test_on_a_terminal_the_table_is_drawn_and_left_standing() -> None:
    stream = io.StringIO()
    with LiveTerminal(
        "demo", None, console=Console(file=stream, width=120, height=40, force_terminal=True)
    ) as live:
        live.show(fold([]))
        live.show(swarm())
    assert "waiting for the first peer" in stream.getvalue()
    assert "finished" in stream.getvalue()


# ---- laws


@settings(max_examples=40, deadline=None)
@given(kept=st.lists(st.integers(0, 200), max_size=60, unique=True))
def test_any_part_of_the_story_can_be_shown(kept: list[int]) -> None:
    whole = [*story("ada", "bob"), *story("bob", "ada", digest="e" * 64)]
    view = fold(whole[index] for index in sorted(kept) if index < len(whole))
    summary = summarise(view, FACTS)
    json.dumps(summary, allow_nan=False)
    assert verdict(summary) or summary["peers"] == 2
    assert frame(view)
    assert printed(summary)
