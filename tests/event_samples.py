"""Events with plausible fields, of which a test names only what it is about."""

from __future__ import annotations

from collections.abc import Iterable

from p2p_co2.telemetry.events import (
    Event,
    FragmentApplied,
    PeerStarted,
    Progress,
    RoundAborted,
    RoundCommitted,
    StageProgress,
)
from p2p_co2.telemetry.view import SwarmView


def started(
    peer: str, at: float = 0.0, name: str = "", pid: int = 7, *, stage: int = 0, stages: int = 1
) -> PeerStarted:
    return PeerStarted(
        at=at, peer=peer, name=name, pid=pid, software="0", device="cpu", parameters=1000, fragments=2,
        run="aa", stage=stage, stages=stages,
    )  # fmt: skip


def progress(peer: str, at: float, *, loss: float = 2.0, inner_steps: int = 10) -> Progress:
    return Progress(
        at=at, peer=peer, phase="training", position=at / 10, inner_steps=inner_steps,
        tokens=100 * inner_steps, tokens_per_s=50.0, loss=loss, train_s=9.0, exposed_s=0.5,
        wall_s=10.0, up_bytes=500, down_bytes=400, versions=(1, 0),
    )  # fmt: skip


def between(peer: str, at: float, stage: int) -> StageProgress:
    return StageProgress(
        at=at, peer=peer, stage=stage, waiting=3, in_flight=4, counted=90, dropped=10, waiting_s=2.5,
        before=min(stage, 1), behind=1, waits_for="",
    )  # fmt: skip


def applied(peer: str, staleness: int, delay: int, gap: float = 1.0) -> FragmentApplied:
    return FragmentApplied(
        at=1.0, peer=peer, fragment=0, version=1, contributed=True, staleness=staleness,
        sync_delay_steps=delay, sync_delay_s=0.5, gap=gap, momentum_norm=1.0,
    )  # fmt: skip


def committed(peer: str, number: int, *, contributors: int = 3, duration_s: float = 1.0) -> RoundCommitted:
    return RoundCommitted(
        at=float(number), peer=peer, fragment=0, round=number, coordinator="a", group_size=3,
        contributors=contributors, partial=3 - contributors, duration_s=duration_s,
    )  # fmt: skip


def aborted(peer: str, number: int, reason: str = "too few") -> RoundAborted:
    return RoundAborted(at=float(number), peer=peer, fragment=0, round=number, reason=reason)


def fold(events: Iterable[Event]) -> SwarmView:
    """The view after all ``events``."""
    view = SwarmView()
    for event in events:
        view.add(event)
    return view
