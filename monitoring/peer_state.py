"""Where a peer stands, in one word and with its reason, from all that is known: its own events, what others
say of it, and whether it answers.

Law: silence alone is not death (a laptop may starve for seconds), and the word of others alone is not either
(they may have lost their links): a peer is "gone" when both come together.
"""

from __future__ import annotations

from p2p_co2.telemetry.feed import Sighting
from p2p_co2.telemetry.peer_view import PeerView

SILENT_AFTER_S = 10.0
GONE_AFTER_S = 3.0
ONLINE = frozenset({"starting", "joining", "training", "draining", "paused", "behind"})
OVER = frozenset({"finished", "left"})
LEFT_PREFIX = "left: "
"""How membership begins the reason of a peer that said goodbye."""


def peer_state(
    peer: PeerView, sighting: Sighting | None, now: float, answer_every_s: float, received_at: float = 0.0
) -> tuple[str, str]:
    """(state, reason) of a peer at ``now`` (unix seconds); ``answer_every_s``: how often it is asked;
    ``received_at``: when words of its last came, which may be old ones."""
    if peer.finished or peer.last_seen_at is None:
        return ("finished", peer.finish_reason) if peer.finished else _unheard(peer, sighting)
    silent_s = now - max(peer.last_seen_at, received_at)
    said = peer.left_reason
    patience_s = answer_every_s - 1.0
    if said and silent_s > GONE_AFTER_S + patience_s:
        left = said.startswith(LEFT_PREFIX)
        return ("left", said.removeprefix(LEFT_PREFIX)) if left else ("gone", f"others say: {said}")
    if silent_s > SILENT_AFTER_S + patience_s:
        unreachable = sighting is not None and sighting.state == "unreachable"
        if sighting is not None and unreachable:
            return "unreachable", sighting.reason
        return "silent", f"no word for {silent_s:.0f} s"
    return peer.phase or "starting", ""


def _unheard(peer: PeerView, sighting: Sighting | None) -> tuple[str, str]:
    """A peer that we have no event of."""
    if peer.seen_left:
        return "gone", f"others say: {peer.left_reason}"
    if sighting is not None and sighting.state == "unreachable":
        return "unreachable", sighting.reason
    if sighting is not None and sighting.refused:
        return "unknown", sighting.reason or "sends nothing that can be read"
    return "unknown", "no word of its own yet"
