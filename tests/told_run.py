"""A run of two peers as their events tell it, healthy and hostile, and what readers make of it."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console

from monitoring.known import Known, swarm_facts
from monitoring.summary import RunFacts
from monitoring.terminal import NEWS_LINES, print_summary
from monitoring.terminal import frame as frame_of
from monitoring.words import news
from p2p_co2.config import RunConfig
from p2p_co2.telemetry import events as ev
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
) -> list[ev.Event]:
    """1000 parameters in 2 fragments, 3 committed rounds each, one abort; 60 inner steps, 20 s."""
    me, them = IDS[name], IDS[other]
    events: list[ev.Event] = [
        ev.PeerStarted(
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
        ev.LinkOpened(at=100.5, peer=me, other=them, carrier="grpc"),
    ]
    for second in range(21):
        events.append(
            ev.Progress(
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
                ev.FragmentSent(**key, round=number, payload_bytes=266, weight=1.0, relative_error=0.01),
                ev.RoundCommitted(
                    **key,
                    round=number,
                    coordinator=me,
                    group_size=2,
                    contributors=2,
                    partial=0,
                    duration_s=0.5,
                ),
                ev.FragmentApplied(
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
    events.append(
        ev.RoundAborted(at=121.0, peer=me, fragment=0, round=4, reason="the owner of part 1 was lost")
    )
    if finish:
        events.append(
            ev.PeerFinished(
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


def hostile_view() -> SwarmView:
    name = "[red]$x_\x1b[31m\u202e界" * 20
    events: list[ev.Event] = [
        ev.PeerStarted(
            at=1.0, peer="p", name=name, pid=1, software="", device="[/]", parameters=0, fragments=0, run=""
        ),
        ev.Progress(
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
        ev.PeerLeft(at=2.0, peer="p", other="", reason="[link]"),
        ev.LinkOpened(at=2.0, peer="p", other="q", carrier="[x]"),
        ev.LinkLost(at=2.0, peer="p", other="z", carrier="[x]", reason="[/x]"),
        ev.RoundAborted(at=3.0, peer="p", fragment=-5, round=10**15, reason="[/]\x07"),
        ev.CaughtUp(
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
        ev.MessageRefused(at=3.0, peer="p", other="[/]", reason="[/]"),
        ev.SendSkipped(at=3.0, peer="p", fragment=0, reason="[/]"),
        ev.Warned(at=3.0, peer="p", text="[/]" * 1000),
        ev.FragmentApplied(
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
        ev.FragmentApplied(
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
