"""A run of two peers as their events tell it, healthy and hostile, and what readers make of it."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from typing import Any

from rich.console import Console

from monitoring.facts import Known, swarm_facts
from monitoring.summary import RunFacts
from monitoring.terminal import NEWS_LINES, print_summary
from monitoring.terminal import frame as frame_of
from monitoring.words import news
from p2p_co2.config import RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView
from tests.event_samples import aborted, applied, committed, fold, progress, started

IDS = {"ada": "12D3KooWAAAAAA", "bob": "12D3KooWBBBBBB"}
FACTS = RunFacts(
    config=RunConfig(name="demo", fragments=2),
    loss_start=5.5,
    loss_end=2.25,
    loss_whole=2.5,
    expected_peers=2,
    software={"torch": "2"},
)


def story(
    name: str, other: str, *, finish: bool = True, digest: str = "d" * 64, last_loss: float = 2.0
) -> list[ev.Event]:
    """1000 parameters in 2 fragments, 3 committed rounds each, one abort; 60 inner steps, 20 s."""
    me = IDS[name]
    events: list[ev.Event] = [
        started(me, 100.0, name, pid=11 if name == "ada" else 12),
        ev.LinkOpened(at=100.5, peer=me, other=IDS[other], carrier="grpc"),
    ]
    for second in range(21):
        now = replace(
            progress(me, 101.0 + second, inner_steps=3 * second), position=second / 7, tokens_per_s=300.0,
            loss=math.nan if second == 0 else last_loss + 3 * math.exp(-second / 5), train_s=0.95 * second,
            exposed_s=0.01 * second if name == "ada" else 0.0, wall_s=float(second), up_bytes=150 * second,
            down_bytes=140 * second, versions=(second // 7,) * 2,
        )  # fmt: skip
        events.append(now)
    for number, fragment in itertools.product((1, 2, 3), (0, 1)):
        key: dict[str, Any] = {"at": 101.0 + 6 * number + fragment, "fragment": fragment}
        round_ = committed(me, number, duration_s=0.5)
        events += [
            ev.FragmentSent(**key, peer=me, round=number, payload_bytes=266, weight=1),
            replace(round_, **key, group_size=2, contributors=2, partial=0),
            replace(applied(me, number // 3, 2 * number), **key, version=number),
        ]
    reason = "the owner of part 1 was lost"
    events.append(replace(aborted(me, 4, reason), at=121.0))
    if finish:
        end = ev.PeerFinished(at=122.0, peer=me, reason="the run ended", digest=digest, versions=(3, 3))
        events.append(replace(end, peak_memory_bytes=10**8))
    return events


def swarm(**of_bob: Any) -> SwarmView:
    return fold([*story("ada", "bob"), *story("bob", "ada", **of_bob)])


def hostile_view() -> SwarmView:
    name, nan = "[red]$x_\x1b[31m\u202e界" * 20, math.nan
    return fold([
        replace(started("p", 1.0, name), parameters=0, fragments=0, device="[/]"),
        replace(progress("p", 2.0, loss=nan, inner_steps=-1), phase="[/bold]", position=nan, tokens_per_s=nan,
                train_s=nan, exposed_s=nan, wall_s=nan, down_bytes=10**18, versions=()),
        ev.PeerLeft(at=2.0, peer="p", other="", reason="[link]"),
        ev.LinkOpened(at=2.0, peer="p", other="q", carrier="[x]"),
        ev.LinkLost(at=2.0, peer="p", other="z", carrier="[x]", reason="[/x]"),
        replace(aborted("p", 10**15, "[/]\x07"), fragment=-5, at=3.0),
        ev.CaughtUp(at=3.0, peer="p", fragment=0, from_version=0, to_version=0, how="", donor="", bytes=0,
                    duration_s=0.0),
        ev.MessageRefused(at=3.0, peer="p", other="[/]", reason="[/]"),
        ev.SendSkipped(at=3.0, peer="p", fragment=0, reason="[/]"),
        ev.Warned(at=3.0, peer="p", text="[/]" * 1000),
        replace(applied("p", -3, 10**15, gap=nan), sync_delay_s=nan),
        applied("p", 0, -7),
    ])  # fmt: skip


def drawn(renderable: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(renderable)
    return console.export_text()


def frame(view: SwarmView, *, now: float = 123.0, width: int = 120, rows: int = 48) -> str:
    told = news(view, NEWS_LINES)
    return drawn(frame_of(swarm_facts(Known(view, now)), width, rows, news=told), width)


def printed(summary: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    print_summary(summary, console)
    return console.export_text()
