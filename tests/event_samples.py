"""Events with plausible fields, of which a test names only what it is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from p2p_co2.telemetry.events import (
    EVENT_TYPES,
    Event,
    FragmentApplied,
    PeerStarted,
    Progress,
    RoundAborted,
    RoundCommitted,
    StageProgress,
)
from p2p_co2.telemetry.view import SwarmView

FIELDS: dict[str, dict[str, Any]] = {
    "agreed_measured": {"loss": 2.0, "position": 1.0, "tokens": 1, "duration_s": 0.1},
    "caught_up": {"fragment": 0, "from_version": 0, "to_version": 1, "how": "state", "donor": "b", "bytes": 1,
                  "duration_s": 0.1},
    "checkpoint_saved": {"path": "", "versions": (1,), "duration_s": 2.0},
    "contribution_capped": {"fragment": 0, "round": 9, "claimed": 4e6, "counted": 16.0, "median": 4.0},
    "fragment_applied": {"fragment": 0, "version": 1, "contributed": True, "staleness": 0,
                         "sync_delay_steps": 4, "sync_delay_s": 0.5, "gap": 1.0, "momentum_norm": 1.0},
    "fragment_sent": {"fragment": 0, "round": 1, "payload_bytes": 1, "weight": 1.0},
    "link_lost": {"carrier": "grpc", "reason": "reset"},
    "link_measured": {"carrier": "grpc", "relayed": False, "round_trip_s": 0.02, "bytes_per_s": 1e6,
                      "sent_bytes": 300_000},
    "link_opened": {"carrier": "grpc"},
    "peer_finished": {"reason": "the run is over", "digest": "d", "versions": (1, 1)},
    "peer_started": {"name": "", "pid": 7, "software": "0", "device": "cpu", "parameters": 1000,
                     "fragments": 2, "run": "aa"},
    "progress": {"phase": "training", "position": 0.0, "inner_steps": 10, "tokens": 1000,
                 "tokens_per_s": 50.0, "loss": 2.0, "train_s": 9.0, "exposed_s": 0.5, "wall_s": 10.0,
                 "up_bytes": 500, "down_bytes": 400, "versions": (1, 0)},
    "round_aborted": {"fragment": 0, "round": 1, "reason": "too few"},
    "round_began": {"fragment": 0, "round": 1, "group": ("a", "b")},
    "round_committed": {"fragment": 0, "round": 1, "coordinator": "a", "group_size": 3, "contributors": 3,
                        "partial": 0, "duration_s": 1.0},
    "round_counted": {"fragment": 0, "round": 1, "weights": {}},
    "send_skipped": {"fragment": 0, "reason": "too slow"},
    "stage_progress": {"waiting": 3, "in_flight": 4, "counted": 90, "dropped": 10, "waiting_s": 2.5,
                       "before": 1, "behind": 1, "waits_for": ""},
    "state_loading": {"fragments": (0, 1), "received_bytes": 20_000_000, "total_bytes": 80_000_000,
                      "donors": 3},
    "warned": {"text": "something"},
}  # fmt: skip
"""By kind; who tells it and when are given."""


def sample(kind: str, peer: str, at: float = 0.0, **given: Any) -> Any:
    """An event of that kind."""
    return EVENT_TYPES[kind](at=at, peer=peer, **FIELDS.get(kind, {}) | given)


def started(
    peer: str, at: float = 0.0, name: str = "", pid: int = 7, *, stage: int = 0, stages: int = 1
) -> PeerStarted:
    made: PeerStarted = sample("peer_started", peer, at, name=name, pid=pid, stage=stage, stages=stages)
    return made


def progress(peer: str, at: float, *, loss: float = 2.0, inner_steps: int = 10) -> Progress:
    made: Progress = sample("progress", peer, at, loss=loss, inner_steps=inner_steps)
    return replace(made, position=at / 10, tokens=100 * inner_steps)


def between(peer: str, at: float, stage: int) -> StageProgress:
    made: StageProgress = sample("stage_progress", peer, at, stage=stage, before=min(stage, 1))
    return made


def applied(peer: str, staleness: int, delay: int, gap: float = 1.0) -> FragmentApplied:
    made: FragmentApplied = sample("fragment_applied", peer, 1.0, staleness=staleness, gap=gap)
    return replace(made, sync_delay_steps=delay)


def committed(peer: str, number: int, *, contributors: int = 3, duration_s: float = 1.0) -> RoundCommitted:
    made: RoundCommitted = sample("round_committed", peer, float(number), round=number)
    return replace(made, contributors=contributors, partial=3 - contributors, duration_s=duration_s)


def aborted(peer: str, number: int, reason: str = "too few") -> RoundAborted:
    made: RoundAborted = sample("round_aborted", peer, float(number), round=number, reason=reason)
    return made


def fold(events: Iterable[Event]) -> SwarmView:
    """The view after all ``events``."""
    view = SwarmView()
    for event in events:
        view.add(event)
    return view
