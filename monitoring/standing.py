"""Where the run is, as a reader concludes it from its peers, and who is behind it.

A newcomer that has not caught up, or that begins a run anew which others have ended or left, is shown, but
its figures are not the run's. Law: the run is where the middle of those is that train; those that ended
together last count instead if they are at least as many and got further, so one liar that comes and goes
moves nothing among several. Price: who watched a run to its end sees those that begin it anew as behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from p2p_co2.telemetry.peer_view import PeerView

BEHIND_ROUNDS = 2.0
TOGETHER_S = 180.0
"""As in ``discovery.records``, which needs a DHT's imports."""
TRAINS = frozenset({"training", "draining", "paused"})
ENDED = frozenset({"finished", "left", "gone", "silent", "unreachable"})
"""States of a peer, as in ``peer_state``."""


def run_position(trains: Sequence[float], ended: Sequence[tuple[float, float]]) -> float:
    """In rounds; 0 without anybody. ``trains``: positions; ``ended``: (last heard at, position)."""
    newest_at = max((at for at, _ in ended), default=0.0)
    last = sorted(position for at, position in ended if at >= newest_at - TOGETHER_S)
    now = statistics.median_low(trains) if trains else 0.0
    if last and len(last) >= len(trains):
        return max(now, last[len(last) // 2])
    return now


def is_behind(position: float, run: float) -> bool:
    """Whether the figures of who is at ``position`` say nothing of a run that is at ``run``."""
    return position < run - BEHIND_ROUNDS


def in_the_run(peers: Iterable[PeerView]) -> list[PeerView]:
    """Those whose figures are the run's, where nothing is known but their events: all but who joins, or was
    behind when it was last heard."""
    known = [peer for peer in peers if peer.started and peer.phase not in {"starting", "joining"}]
    ended = [peer for peer in known if peer.finished or peer.seen_left]
    trains = [peer for peer in known if not (peer.finished or peer.seen_left)]

    def run_as_it_was(peer: PeerView) -> float:
        heard_at = peer.last_seen_at or 0.0
        before = [(at, one.position) for one in ended if (at := one.last_seen_at or 0.0) < heard_at]
        return run_position([one.position for one in trains] if peer in trains else [], before)

    return [peer for peer in known if not is_behind(peer.position, run_as_it_was(peer))]
