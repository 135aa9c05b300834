"""A run of two peers as their events tell it, healthy and hostile, and what readers make of it."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

from rich.console import Console

from monitoring.known import Known
from monitoring.summary import RunFacts
from monitoring.swarm import swarm_facts
from monitoring.terminal import NEWS_LINES, print_summary
from monitoring.terminal import frame as frame_of
from monitoring.words import news
from p2p_co2.config import RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView
from tests.event_samples import fold, sample, started
from tests.stories import drawn

IDS = {"ada": "12D3KooWAAAAAA", "bob": "12D3KooWBBBBBB"}
FACTS = RunFacts(
    config=RunConfig(name="demo", fragments=2), loss_start=5.5, loss_end=2.25, loss_whole=2.5,
    expected_peers=2, software={"torch": "2"},
)  # fmt: skip


def story(
    name: str, other: str, *, finish: bool = True, digest: str = "d" * 64, last_loss: float = 2.0
) -> list[ev.Event]:
    """1000 parameters in 2 fragments, 3 committed rounds each, one abort; 60 inner steps, 20 s."""
    me = IDS[name]
    events: list[ev.Event] = [
        started(me, 100.0, name, pid=11 if name == "ada" else 12),
        sample("link_opened", me, 100.5, other=IDS[other]),
    ]
    for second in range(21):
        events.append(sample(
            "progress", me, 101.0 + second, inner_steps=3 * second, tokens=300 * second, position=second / 7,
            tokens_per_s=300.0, loss=math.nan if second == 0 else last_loss + 3 * math.exp(-second / 5),
            train_s=0.95 * second, exposed_s=0.01 * second if name == "ada" else 0.0, wall_s=float(second),
            up_bytes=150 * second, down_bytes=140 * second, versions=(second // 7,) * 2,
        ))  # fmt: skip
    for number, fragment in itertools.product((1, 2, 3), (0, 1)):
        key: dict[str, Any] = {"peer": me, "at": 101.0 + 6 * number + fragment, "fragment": fragment}
        events += [
            sample("fragment_sent", **key, round=number, payload_bytes=266),
            sample("round_committed", **key, round=number, group_size=2, contributors=2, duration_s=0.5),
            sample("fragment_applied", **key, version=number, staleness=number // 3,
                   sync_delay_steps=2 * number),
        ]  # fmt: skip
    events.append(sample("round_aborted", me, 121.0, round=4, reason="the owner of part 1 was lost"))
    if finish:
        end = {"reason": "the run ended", "digest": digest, "versions": (3, 3), "peak_memory_bytes": 10**8}
        events.append(sample("peer_finished", me, 122.0, **end))
    return events


def swarm(**of_bob: Any) -> SwarmView:
    return fold([*story("ada", "bob"), *story("bob", "ada", **of_bob)])


def hostile_view() -> SwarmView:
    name, nan = "[red]$x_\x1b[31m\u202e界" * 20, math.nan
    return fold([
        sample("peer_started", "p", 1.0, name=name, parameters=0, fragments=0, device="[/]"),
        sample("progress", "p", 2.0, phase="[/bold]", position=nan, inner_steps=-1, tokens=-100,
               tokens_per_s=nan, loss=nan, train_s=nan, exposed_s=nan, wall_s=nan, down_bytes=10**18,
               versions=()),
        sample("peer_left", "p", 2.0, other="", reason="[link]"),
        sample("link_opened", "p", 2.0, other="q", carrier="[x]"),
        sample("link_lost", "p", 2.0, other="z", carrier="[x]", reason="[/x]"),
        sample("round_aborted", "p", 3.0, round=10**15, fragment=-5, reason="[/]\x07"),
        sample("caught_up", "p", 3.0, to_version=0, how="", donor=""),
        sample("message_refused", "p", 3.0, other="[/]", reason="[/]"),
        sample("send_skipped", "p", 3.0, reason="[/]"),
        sample("warned", "p", 3.0, text="[/]" * 1000),
        sample("fragment_applied", "p", staleness=-3, sync_delay_steps=10**15, gap=nan, sync_delay_s=nan),
        sample("fragment_applied", "p", 1.0, staleness=0, sync_delay_steps=-7),
    ])  # fmt: skip


def frame(view: SwarmView, *, now: float = 123.0, width: int = 120, rows: int = 48) -> str:
    told = news(view, NEWS_LINES)
    return drawn(frame_of(swarm_facts(Known(view, now)), width, rows, news=told), width)


def printed(summary: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    print_summary(summary, console)
    return console.export_text()
