"""The figures of a run by hand, and readers that survive missing, broken and hostile data."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from monitoring.picture import draw_run
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import LiveTerminal, plain_line, print_summary, swarm_frame
from monitoring.words import clock, figure, news, percent, plain, size
from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.events import (
    CaughtUp,
    Event,
    FragmentApplied,
    FragmentSent,
    LinkLost,
    LinkOpened,
    MessageRefused,
    PeerFinished,
    PeerJoined,
    PeerLeft,
    PeerStarted,
    Progress,
    RoundAborted,
    RoundCommitted,
    SendSkipped,
    Warned,
)
from p2p_co2.telemetry.view import SwarmView, fold

IDS = {"ada": "12D3KooWAAAAAA", "bob": "12D3KooWBBBBBB"}
FACTS = RunFacts(
    config=RunConfig(name="demo", fragments=2),
    loss_start=5.5,
    loss_end=2.25,
    expected_peers=2,
    software={"torch": "2"},
)


def story(
    name: str, other: str, *, finish: bool = True, digest: str = "d" * 64, last_loss: float = 2.0
) -> list[Event]:
    """1000 parameters in 2 fragments, 3 committed rounds each, one abort; 60 inner steps, 20 s."""
    me, them = IDS[name], IDS[other]
    events: list[Event] = [
        PeerStarted(
            at=100.0,
            peer=me,
            name=name,
            pid=11 if name == "ada" else 12,
            software="0.1",
            device="cpu",
            parameters=1000,
            fragments=2,
            run="aa",
        ),
        LinkOpened(at=100.5, peer=me, other=them, carrier="grpc"),
    ]
    for second in range(21):
        events.append(
            Progress(
                at=101.0 + second,
                peer=me,
                phase="training",
                position=second / 7,
                inner_steps=3 * second,
                tokens=300 * second,
                tokens_per_s=300.0,
                loss=math.nan if second == 0 else last_loss + 3 * math.exp(-second / 5),
                train_s=0.95 * second,
                exposed_s=0.01 * second if name == "ada" else 0.0,
                wall_s=float(second),
                up_bytes=150 * second,
                down_bytes=140 * second,
                versions=(second // 7, second // 7),
            )
        )
    for number in (1, 2, 3):
        for fragment in (0, 1):
            at = 101.0 + 6 * number + fragment
            key: dict[str, Any] = {"at": at, "peer": me, "fragment": fragment}
            events += [
                FragmentSent(**key, round=number, payload_bytes=266, weight=1.0, relative_error=0.01),
                RoundCommitted(
                    **key,
                    round=number,
                    coordinator=me,
                    group_size=2,
                    contributors=2,
                    partial=0,
                    duration_s=0.5,
                ),
                FragmentApplied(
                    **key,
                    version=number,
                    contributed=True,
                    staleness=number // 3,
                    sync_delay_steps=2 * number,
                    sync_delay_s=1.0,
                    gap=1.0,
                    gradient_norm=1.0,
                    momentum_norm=1.0,
                    clipped_share=0.0,
                ),
            ]
    events.append(RoundAborted(at=121.0, peer=me, fragment=0, round=4, reason="the owner of part 1 was lost"))
    if finish:
        events.append(
            PeerFinished(
                at=122.0,
                peer=me,
                reason="the run ended",
                digest=digest,
                versions=(3, 3),
                peak_memory_bytes=10**8,
            )
        )
    return events


def swarm(**of_bob: Any) -> SwarmView:
    return fold([*story("ada", "bob"), *story("bob", "ada", **of_bob)])


def drawn(renderable: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(renderable)
    return console.export_text()


def frame(view: SwarmView, *, now: float = 123.0, width: int = 120, rows: int = 24) -> str:
    return drawn(
        swarm_frame(view, "demo", now, elapsed_s=23.0, expected_s=60.0, width=width, most_rows=rows), width
    )


def printed(summary: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    print_summary(summary, console)
    return console.export_text()


# ---- summary, by hand


def test_the_figures_of_a_run_of_two() -> None:
    summary = summarise(swarm(), FACTS)
    assert summary["peers"] == 2
    assert summary["processes"] == {"ada": 11, "bob": 12}
    assert (summary["parameters"], summary["tokens"], summary["wall_s"]) == (1000, 12_000, 22.0)
    assert summary["loss"] == {"start": 5.5, "end": 2.25}
    assert (summary["rounds"]["committed"], summary["rounds"]["aborted"]) == (6, 1)
    assert summary["rounds"]["abort_reasons"] == {"the owner of part 1 was lost": 1}
    assert summary["rounds"]["duration_s"] == {"mean": 0.5, "max": 0.5}
    assert summary["staleness"] == {"mean": 0.3333, "max": 1, "histogram": {"0": 8, "1": 4}}
    assert summary["sync_delay_steps"] == {"mean": 4.0, "max": 6, "histogram": {"2": 4, "4": 4, "6": 4}}
    assert summary["utilisation"] == {"mean": 0.95, "per_peer": {"ada": 0.95, "bob": 0.95}}
    assert summary["exposed_s"] == {"max": 0.2, "per_peer": {"ada": 0.2, "bob": 0.0}}
    assert (summary["digests_equal"], summary["carriers"]) == (True, {"grpc": 2})
    assert (summary["codec"], summary["apply_rule"], summary["versions"]) == ("int4", "keep", {"torch": "2"})
    assert summary["outer_versions"] == [3, 3]


def test_bytes_against_data_parallel() -> None:
    counted = summarise(swarm(), FACTS)["bytes"]
    assert counted["up_per_peer"] == {"ada": 3000, "bob": 3000}
    assert counted["down_per_peer"] == {"ada": 2800, "bob": 2800}
    # 6 committed rounds of 2 fragments are 3 sweeps: 3000 bytes / 1000 parameters / 3 sweeps.
    assert counted["per_parameter_per_round"] == 1.0
    # 4 bytes, twice, half of it to the other; 60 inner steps in 3 sweeps.
    assert counted["fp32_data_parallel_per_parameter_per_step"] == 4.0
    assert counted["inner_steps_per_sweep"] == 20.0
    assert counted["times_less_than_data_parallel"] == 80.0
    assert counted["encoded_bits_per_parameter"] == 4.256


def test_a_good_run_has_no_reasons_to_fail() -> None:
    assert verdict(summarise(swarm(), FACTS)) == []


def test_the_summary_is_plain_json() -> None:
    summary = summarise(swarm(), FACTS)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


# ---- verdict, faults


def test_every_fault_is_a_reason() -> None:
    other = verdict(summarise(swarm(digest="e" * 64), FACTS))
    assert other == [f"the peers hold different digests of the agreed state: ada {'d' * 12}, bob {'e' * 12}"]
    facts = RunFacts(config=FACTS.config, loss_start=2.0, loss_end=2.5, expected_peers=3)
    assert verdict(summarise(swarm(), facts)) == [
        "only 2 of 3 peers started",
        "the held-out loss did not fall: 2.0000 at the start, 2.5000 at the end",
    ]
    nan = RunFacts(config=FACTS.config, loss_start=2.0, loss_end=math.nan)
    assert verdict(summarise(swarm(), nan)) == ["the held-out loss at start and end was not measured"]


def test_a_killed_peer_is_named_with_what_others_saw() -> None:
    view = swarm(finish=False)
    view.add(PeerLeft(at=119.0, peer=IDS["ada"], other=IDS["bob"], reason="no sign of life for 6 s"))
    summary = summarise(view, FACTS)
    assert summary["digests_equal"]
    assert verdict(summary) == ["peer bob did not finish (last phase training, no sign of life for 6 s)"]
    assert "not finished: no sign of life" in printed(summary)
    assert "gone" in frame(view, now=130.0)


def test_a_finished_peer_without_a_digest_is_not_equal() -> None:
    assert not summarise(swarm(digest=""), FACTS)["digests_equal"]
    assert not summarise(fold(story("ada", "bob", digest="")), FACTS)["digests_equal"]


def test_nothing_started() -> None:
    summary = summarise(fold([]), RunFacts(config=RunConfig(), expected_peers=4))
    assert (summary["peers"], summary["digests_equal"], summary["wall_s"]) == (0, False, 0.0)
    assert summary["bytes"]["per_parameter_per_round"] is None
    assert "no peer started" in verdict(summary)[0]
    assert "0 of 4 peers finished" in printed(summary)


# ---- terminal, by hand


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
    assert (figure(12345.6), figure(math.inf), percent(0.985)) == ("12,346", "-", "98.5 %")
    assert (plain("a\x1b[31m\n b", 20), plain("abcdef", 4)) == ("a?[31m b", "abc…")


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
    assert [line.split(" of ")[0] for line in lines] == ["[0:00", "[0:10", "[0:20"]
    assert "2 peers, 120 inner steps, loss 2.055, 0 tokens/s, rounds 6 committed 1 aborted" in lines[0]


def test_on_a_terminal_the_table_is_drawn_and_left_standing() -> None:
    stream = io.StringIO()
    with LiveTerminal(
        "demo", None, console=Console(file=stream, width=120, height=40, force_terminal=True)
    ) as live:
        live.show(fold([]))
        live.show(swarm())
    assert "waiting for the first peer" in stream.getvalue()
    assert "finished" in stream.getvalue()


# ---- terminal, faults


def hostile_view() -> SwarmView:
    name = "[red]$x_\x1b[31m\u202e界" * 20
    events: list[Event] = [
        PeerStarted(
            at=1.0, peer="p", name=name, pid=1, software="", device="[/]", parameters=0, fragments=0, run=""
        ),
        Progress(
            at=2.0,
            peer="p",
            phase="[/bold]",
            position=math.nan,
            inner_steps=-1,
            tokens=0,
            tokens_per_s=math.nan,
            loss=math.nan,
            train_s=math.nan,
            exposed_s=math.nan,
            wall_s=math.nan,
            up_bytes=0,
            down_bytes=10**18,
            versions=(),
        ),
        PeerLeft(at=2.0, peer="p", other="", reason="[link]"),
        LinkOpened(at=2.0, peer="p", other="q", carrier="[x]"),
        LinkLost(at=2.0, peer="p", other="z", carrier="[x]", reason="[/x]"),
        RoundAborted(at=3.0, peer="p", fragment=-5, round=10**15, reason="[/]\x07"),
        CaughtUp(
            at=3.0,
            peer="p",
            fragment=0,
            from_version=0,
            to_version=0,
            how="",
            donor="",
            bytes=0,
            duration_s=0.0,
        ),
        MessageRefused(at=3.0, peer="p", other="[/]", reason="[/]"),
        SendSkipped(at=3.0, peer="p", fragment=0, reason="[/]"),
        Warned(at=3.0, peer="p", text="[/]" * 1000),
        FragmentApplied(
            at=3.0,
            peer="p",
            fragment=0,
            version=0,
            contributed=False,
            staleness=-3,
            sync_delay_steps=10**15,
            sync_delay_s=math.nan,
            gap=math.nan,
            gradient_norm=math.nan,
            momentum_norm=0.0,
            clipped_share=math.nan,
        ),
        FragmentApplied(
            at=3.0,
            peer="p",
            fragment=0,
            version=0,
            contributed=False,
            staleness=0,
            sync_delay_steps=-7,
            sync_delay_s=0.0,
            gap=1.0,
            gradient_norm=0.0,
            momentum_norm=0.0,
            clipped_share=0.0,
        ),
    ]
    return fold(events)


def test_markup_control_characters_and_nan_do_not_break_a_reader(tmp_path: Path) -> None:
    view = hostile_view()
    summary = summarise(view, RunFacts(config=RunConfig(), loss_start=math.nan))
    json.dumps(summary, allow_nan=False)
    for text in (
        frame(view),
        printed(summary),
        plain_line(view, 1.0, None),
        "\n".join(w for _, w in news(view, 99)),
    ):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "[red]$x_?[31m?" in frame(view)
    draw_run(view, tmp_path / "hostile.png", title="$", loss_start=math.nan)


# ---- picture


def test_the_picture_has_its_size_and_is_not_blank(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    draw_run(swarm(finish=False), path, title="demo", loss_start=5.5, loss_end=2.25)
    pixels = imread(path)
    assert pixels.shape[:2] == (560, 1400)
    assert 0.02 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


@pytest.mark.parametrize("name", ["_hidden", "$", "名前", ""])
def test_any_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    first = story("ada", "bob")
    renamed = PeerStarted(
        at=100.0,
        peer=IDS["ada"],
        name=name,
        pid=1,
        software="",
        device="cpu",
        parameters=1,
        fragments=1,
        run="",
    )
    draw_run(fold([renamed, *first[1:]]), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_an_empty_run_can_be_drawn_and_a_bad_path_is_said(tmp_path: Path) -> None:
    draw_run(fold([]), tmp_path / "empty.png", loss_start=5.0)
    with pytest.raises(EnvironmentFault, match="cannot write the picture"):
        draw_run(fold([]), tmp_path / "absent" / "loss.png")


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


def test_the_summary_does_not_depend_on_interleaving() -> None:
    ada, bob = story("ada", "bob"), story("bob", "ada")
    mixed = [event for pair in zip(bob, ada, strict=True) for event in pair]
    assert summarise(fold(mixed), FACTS) == summarise(fold([*ada, *bob]), FACTS)
