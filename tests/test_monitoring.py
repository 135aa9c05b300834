"""The figures of a run by hand, in words, tables and a picture; readers survive missing, broken and
hostile data."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from monitoring.known import Known
from monitoring.lines import SteadyState, exchange_figures
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import LiveTerminal
from monitoring.words import ago, clock, figure, news, percent, plain, size
from p2p_co2.config import RunConfig
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView
from p2p_co2.wire.names import words_of
from tests.event_samples import fold, sample
from tests.told_run import FACTS, IDS, frame, hostile_view, printed, story, swarm

# ---- summary, by hand


def test_the_figures_of_a_run_of_two() -> None:
    summary = summarise(swarm(), FACTS)
    rounds = summary["rounds"]
    expected = {
        "peers": 2, "processes": {"ada": 11, "bob": 12}, "parameters": 1000, "tokens": 12_000, "wall_s": 22.0,
        "loss": {"start": 5.5, "end": 2.25, "whole": 2.5, "unit": "nats per token"},
        "staleness": {"mean": 0.3333, "max": 1, "histogram": {"0": 8, "1": 4}},
        "sync_delay_steps": {"mean": 4.0, "max": 6, "histogram": {"2": 4, "4": 4, "6": 4}},
        "utilisation": {"mean": 0.95, "per_peer": {"ada": 0.95, "bob": 0.95}},
        "exposed_s": {"max": 0.2, "per_peer": {"ada": 0.2, "bob": 0.0}},
        "digests_equal": True, "carriers": {"grpc": 2}, "codec": "q2", "apply_rule": "keep",
        "versions": {"torch": "2"}, "outer_versions": [3, 3],
        "bytes": {
            "up_per_peer": {"ada": 3000, "bob": 3000}, "down_per_peer": {"ada": 2800, "bob": 2800},
            # 6 committed rounds of 2 fragments are 3 sweeps: 3000 bytes / 1000 parameters / 3 sweeps.
            "per_parameter_per_round": 1.0,
            # 4 bytes, twice, half of it to the other; 60 inner steps in 3 sweeps.
            "fp32_data_parallel_per_parameter_per_step": 4.0, "inner_steps_per_sweep": 20.0,
            "times_less_than_data_parallel": 80.0, "encoded_bits_per_parameter": 4.256,
        },
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == expected
    assert (rounds["committed"], rounds["abort_reasons"]) == (6, {"the owner of part 1 was lost": 1})
    assert rounds["duration_s"] == {"mean": 0.5, "max": 0.5}


# ---- verdict, faults


def test_every_fault_is_a_reason_and_a_good_run_has_none() -> None:
    assert verdict(summarise(swarm(), FACTS)) == []
    other = verdict(summarise(swarm(digest="e" * 64), FACTS))
    assert other == [f"the peers hold different digests of the agreed state: ada {'d' * 12}, bob {'e' * 12}"]
    facts = RunFacts(config=FACTS.config, loss_start=2.0, loss_end=2.5, expected_peers=3)
    assert verdict(summarise(swarm(), facts)) == [
        "only 2 of 3 peers started",
        "the held-out loss did not fall: 2.0000 at the start, 2.5000 at the end",
    ]
    nan = RunFacts(config=FACTS.config, loss_start=2.0, loss_end=math.nan)
    assert verdict(summarise(swarm(), nan)) == ["the held-out loss at start and end was not measured"]


def test_nothing_started() -> None:
    summary = summarise(fold([]), RunFacts(config=RunConfig(), expected_peers=4))
    assert (summary["peers"], summary["digests_equal"], summary["wall_s"]) == (0, False, 0.0)
    assert summary["bytes"]["per_parameter_per_round"] is None
    assert "no peer started" in verdict(summary)[0]
    assert "0 of 4 peers finished" in printed(summary)


# ---- hostile data


def test_markup_control_characters_and_nan_do_not_break_a_reader() -> None:
    view = hostile_view()
    summary = summarise(view, RunFacts(config=RunConfig(), loss_start=math.nan))
    json.dumps(summary, allow_nan=False)
    for text in (frame(view), printed(summary), "\n".join(words for _, words in news(view, 99))):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert words_of("p") in frame(view), "what is no name is not shown"


# ---- words and terminal


def test_words_for_figures() -> None:
    assert [size(count) for count in (0, 999, 1000, 99_949, 999_600, 34e6, None, math.nan)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "1.0 MB", "34.0 MB", "-", "-",
    ]  # fmt: skip
    assert (clock(59.6), clock(3600), clock(-5), clock(None)) == ("1:00", "1:00:00", "0:00", "-")
    assert (ago(40.0, 130.4), ago(130.0, 130.4), ago(140.0, 130.4)) == (", 1:30 ago", "", "")
    assert (ago(None, 130.4), ago(math.nan, 130.4)) == ("", "")
    assert (figure(12345.6), figure(math.inf), percent(0.985)) == ("12,346", "-", "98.5 %")
    assert (plain("a\x1b[31m\n b", 20), plain("abcdef", 4)) == ("a?[31m b", "abc…")


def test_a_frame_shows_every_peer_and_the_rounds() -> None:
    text = frame(swarm(finish=False))
    row = next(line for line in text.splitlines() if line.startswith("bob"))
    assert row.split()[:9] == ["bob", "training", "-", "2.055", "300", "2.9", "0.33", "95.0", "%"]
    assert "exchanges 6 committed 1 aborted" in text
    assert "aborted: the owner of part 1 was lost (1)" in text
    assert "exchange 4 of fragment 0 aborted: the owner of part 1 was lost" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_cell_is_shortened_on_a_narrow_terminal(width: int) -> None:
    text = frame(swarm(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    table = text[text.index("\npeer ") : text.index("staleness mean")]
    assert "…" not in table


def test_a_silent_peer_and_a_crowd() -> None:
    assert "bob is silent: no word for 99 s" in frame(swarm(finish=False), now=220.0)
    crowd = fold(ev.PeerJoined(at=1.0, peer=IDS["ada"], other=f"peer {number:06d}") for number in range(30))
    shown = frame(crowd, rows=25)
    left_out = re.search(r"and (\d+) more", shown)
    assert left_out
    assert shown.count(" unknown ") + int(left_out[1]) == 30
    assert f"{words_of(IDS['ada'])} " in shown, "and the one that told of them"


def test_the_summary_is_readable() -> None:
    facts = RunFacts(
        config=FACTS.config, loss_start=5.5, loss_end=2.25, text="def f(\x1b[2J):\n    [bold]pass"
    )
    text = printed(summarise(swarm(), facts))
    for part in (
        "5.5000 to 2.2500 nats per token",
        "yes, 2 of 2 peers finished",
        "80.0 bytes per parameter in the same 20.0 steps (80 times as much)",
        "def f(?[2J):\n    [bold]pass",
    ):
        assert part in text


def shown(console: Console, times: dict[float, bool], expected_s: float | None = 60.0) -> None:
    """Show a swarm at each time since the start, before it trains or (True) when it does."""
    with LiveTerminal(console, expected_s=expected_s) as live:
        for second, trains in times.items():
            live.show(Known(swarm() if trains else fold([]), live.started_at + second))


def test_without_a_terminal_there_is_a_plain_line_every_ten_seconds() -> None:
    stream = io.StringIO()
    shown(Console(file=stream, width=300), {float(second): True for second in range(25)})
    lines = stream.getvalue().splitlines()
    times = ["[0:00, trained 0:00 of 1:00]", "[0:10, trained 0:10 of 1:00]", "[0:20, trained 0:20 of 1:00]"]
    assert [line[: line.index("]") + 1] for line in lines] == times
    assert "of 2 peers" in lines[0]
    assert "loss 2.055 (training), 12,000 tokens, 0 tokens/s, exchanges 6 committed 1 aborted" in lines[0]


def test_that_a_run_is_over_is_told_at_once_and_once() -> None:
    stream = io.StringIO()
    with LiveTerminal(Console(file=stream, width=300)) as live:
        for is_over in (False, False, True, True):  # its time stands from then on
            live.show(Known(swarm(finish=is_over), live.started_at + 3.0, is_over=is_over))
    first, last = stream.getvalue().splitlines()
    assert "Over: " in last
    assert "Over: " not in first


def test_on_a_terminal_the_table_is_drawn_and_left_standing() -> None:
    stream = io.StringIO()
    shown(Console(file=stream, width=120, height=40, force_terminal=True), {0.0: False, 1.0: True}, None)
    assert "Nobody is training right now" in stream.getvalue()
    assert "finished" in stream.getvalue()


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


# ---- lines of a rehearsal

LINES = [PROFILES["dsl"]] * 2
"""20 Mbit/s up."""


def told_exchange(*more: ev.Event) -> SwarmView:
    """One round of two peers: 5 MB encoded, so that each sends 5 MB; 2.5 s until the slower one holds all
    means, 4 s until the last one knows of the commit."""
    return fold([
        sample("fragment_sent", "a", 9.0, payload_bytes=5_000_000),
        sample("round_began", "a", 10.0),
        sample("round_committed", "a", 13.0, means_s=2.0),
        sample("round_committed", "b", 14.0, begun_s=1.0, means_s=3.5),
        *more,
    ])  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exchange_is_held_against_its_line_and_those_that_overlap_share_it(overlap: bool) -> None:
    more = [
        sample("round_began", "b", 11.5, round=2),
        sample("round_committed", "b", 15.0, round=2, begun_s=0.5, means_s=3.5),
    ]
    end = 15.0 if overlap else 14.0
    figures = exchange_figures(told_exchange(*(more if overlap else ())), LINES)
    count = 1 + overlap
    assert figures["count"] == count
    assert figures["goodput_share"]["median"] == pytest.approx(count * 40 / (end - 10) / 20)
    moved_s = 4.5 if overlap else 2.5
    assert figures["transfer_share"]["median"] == pytest.approx(count * 40 / moved_s / 20, abs=1e-4)
    if not overlap:
        assert figures["duration_s"]["median"] == 4.0


def test_checkpoints_are_told_beside_what_the_network_costs() -> None:
    log = SteadyState(1)
    for at, train_s, version in ((5.0, 1.0, 0), (10.0, 2.0, 1), (30.0, 20.0, 2)):
        told = {"train_s": train_s, "wall_s": at, "tokens": int(10 * train_s), "versions": (version,)}
        log.add(sample("progress", "a", at, **told))
    for at in (9.0, 20.0):
        log.add(sample("checkpoint_saved", "a", at))
    assert log.figures()["measuring_share"] == {"a": 0.0}
    log.add(sample("agreed_measured", "a", 21.0, duration_s=1.0))
    assert log.figures() == {
        "utilisation": {"a": 0.9}, "measuring_share": {"a": 0.05}, "tokens_per_s": 9.0,
        "saving_share": {"a": 0.1},  # not the one before the first rounds
    }  # fmt: skip
