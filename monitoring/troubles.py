"""What is wrong now, in words, with the peer and the reason.

Law: every line rests on something that was observed, counted or said in a signed report, and goes away when
it is over (``RECENT_S``); the worst come first; the list is bounded. What a peer said is text, never markup.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from monitoring.facts import PeerFacts, Trouble
from monitoring.words import capped_words, percent, plain, size
from p2p_co2.telemetry.events import ContributionCapped, MessageRefused, RoundAborted, SendSkipped, Warned
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.view import SwarmView

RECENT_S = 120.0
MAX_TROUBLES = 24
BEHIND_ROUNDS = 2
CLOCK_OFF_S = 30.0
EXPOSED_SHARE = 0.05
"""Of a peer's wall time; the aim of the whole house is 1 %."""
BAD, ODD = "bad", "odd"


def troubles(
    view: SwarmView,
    labels: Mapping[str, str],
    peers: Sequence[PeerFacts],
    sightings: Mapping[str, Sighting],
    state: FeedState,
    now: float,
) -> tuple[Trouble, ...]:
    """All that is wrong at ``now``, worst first."""
    found: list[Trouble] = []
    if state.phase == "lost":
        words = f"The swarm is out of reach: {plain(state.words, 300)}"
        found.append(Trouble(peer="", words=words, severity=BAD, since_at=now))
    leading = max((sum(peer.versions) for peer in peers if peer.versions), default=0)
    # With the swarm out of reach everybody is silent to us, which says nothing of anybody.
    for peer in peers if state.phase != "lost" else ():
        found += _of_peer(peer, sightings.get(peer.peer), now, leading)
    found += _of_events(view, labels, now)
    found.sort(key=lambda trouble: (trouble.severity != BAD, -trouble.since_at, trouble.words))
    return tuple(found[:MAX_TROUBLES])


def _of_peer(peer: PeerFacts, sighting: Sighting | None, now: float, leading: int) -> list[Trouble]:
    name = plain(peer.label, 40)
    seen_at = peer.last_seen_at or now
    lines: list[tuple[str, str, float]] = []
    if peer.state in {"gone", "silent", "unreachable"}:
        word = {"gone": "is gone", "silent": "is silent", "unreachable": "cannot be reached"}[peer.state]
        lines.append((BAD, f"{name} {word}: {plain(peer.reason, 200)}", seen_at))
    elif peer.state == "unknown" and peer.reason and sighting is not None and sighting.refused:
        lines.append((BAD, f"{name} says nothing that can be read: {plain(peer.reason, 200)}", now))
    if peer.nonsense:
        causes = ", ".join(f"{plain(cause, 60)} ({times})" for cause, times in peer.nonsense.items())
        lines.append((BAD, f"{name} publishes nonsense, which is left out: {causes}", now))
    if peer.state == "training":
        behind = (leading - sum(peer.versions)) / max(1, len(peer.versions))
        if peer.versions and behind >= BEHIND_ROUNDS:
            lines.append((ODD, f"{name} is {behind:.0f} rounds behind the foremost peer", now))
        spent_s = peer.exposed_s / max(1e-9, peer.exposed_s + peer.hidden_s)
        if peer.utilisation is not None and peer.exposed_s > 5.0 and 1 - peer.utilisation > EXPOSED_SHARE:
            waits = f"{name} spends {percent(1 - peer.utilisation)} of its time waiting"
            lines.append((ODD, f"{waits} ({percent(spent_s)} of its communication is not hidden)", now))
        cap, needed = peer.upload_cap_bytes_per_s, peer.needed_bytes_per_s
        if cap and needed and cap < needed:
            least = f"the rounds need {size(needed)}/s at least"
            lines.append((ODD, f"{name} may send {size(cap)}/s, and {least}", now))
    if peer.clock_offset_s is not None and abs(peer.clock_offset_s) > CLOCK_OFF_S:
        off = f"{name}'s clock is {peer.clock_offset_s:+.0f} s off"
        lines.append((ODD, f"{off}; its times are corrected here", now))
    return [
        Trouble(peer=peer.peer, words=words, severity=severity, since_at=at) for severity, words, at in lines
    ]


def _of_events(view: SwarmView, labels: Mapping[str, str], now: float) -> list[Trouble]:
    """Recent events that a person should act on, each kind and reason once."""
    found: dict[str, Trouble] = {}
    skipped: Counter[str] = Counter()
    for at, peer, _, event in view.notable:
        if now - at > RECENT_S:
            continue
        name = plain(labels.get(peer, f"~{peer[-6:]}"), 40)
        words, severity, key, about = "", ODD, "", peer
        match event:
            case RoundAborted():
                place = f"Round {event.round} of fragment {event.fragment}"
                words = f"{place} was aborted: {plain(event.reason, 160)}"
                severity = BAD
            case SendSkipped():
                skipped[peer] += 1
                sends = "a send" if skipped[peer] == 1 else f"{skipped[peer]} sends of late"
                found.pop(f"skipped {peer}", None)
                words, key = f"{name} skipped {sends}: {plain(event.reason, 120)}", f"skipped {peer}"
            case ContributionCapped():
                # Every member tells of it: one line for each peer that it is about.
                other = plain(labels.get(event.other, f"~{event.other[-6:]}"), 40)
                words = (
                    f"{other} {capped_words(event)}; if it is honest, raise weight_cap in the next run file"
                )
                key, about = f"capped {event.other}", event.other
            case MessageRefused():
                other = plain(labels.get(event.other, f"~{event.other[-6:]}"), 40)
                words = f"{name} refuses messages of {other}: {plain(event.reason, 80)}"
            case Warned():
                words = f"{name} warns: {plain(event.text, 200)}"
        if words:
            found[key or words] = Trouble(peer=about, words=words, severity=severity, since_at=at)
    return list(found.values())


def median_position(peers: Sequence[PeerFacts]) -> float:
    """Median position of the peers that train, else of all; 0 without any."""
    training = [peer.position for peer in peers if peer.state == "training"]
    chosen = training or [peer.position for peer in peers]
    return statistics.median(chosen) if chosen else 0.0
