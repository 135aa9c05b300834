"""What is wrong now, in words, with the peer, the reason, and what to do.

Law: every line rests on something that was observed, counted or said in a signed report, and goes away when
it is over (``RECENT_S``); what happens in every healthy run is none, however often (``SKIPPED_SHARE``); the
worst come first; the list is bounded. Nothing is wrong with a run that is over: nobody asks then. What a peer
said is text, never markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from monitoring.facts import PeerFacts, Trouble
from monitoring.peer_state import ONLINE, OVER
from monitoring.standing import BEHIND_ROUNDS
from monitoring.words import capped_words, clock, percent, plain, size
from p2p_co2.telemetry.events import ContributionCapped, Event, MessageRefused, RoundAborted, Warned
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.view import SwarmView

RECENT_S = 120.0
MAX_TROUBLES = 24
CLOCK_OFF_S = 30.0
EXPOSED_SHARE = 0.05
"""Of a peer's wall time; the aim of the whole house is 1 %."""
SKIPPED_SHARE, MIN_SENDS = 0.2, 5
"""Of the sends of late that were due: below, or among fewer, a skipped one is nothing to act on."""
ALONE_S = 30.0
MOST_NAMED = 4
BAD, ODD = "bad", "odd"
INVITE = "invite others with: p2p-co2 join TICKET (the word that the seed printed)"

Found = tuple[str, str, str, float]
"""(severity, what is wrong, what to do, since when)."""


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
        what = f"The swarm is out of reach: {plain(state.words, 240)}"
        found.append(_trouble("", (BAD, what, "what is shown is old, and it is looked for again", now)))
    leading = max((sum(peer.versions) for peer in peers if peer.versions), default=0)
    # With the swarm out of reach everybody is silent to us, which says nothing of anybody.
    for peer in peers if state.phase != "lost" else ():
        found += _of_peer(peer, sightings.get(peer.peer), now, leading)
    found += _alone(view, peers, now) if state.phase != "lost" else []
    found += _skipped(view, labels, now)
    found += _of_events(view, labels, now)
    found.sort(key=lambda trouble: (trouble.severity != BAD, -trouble.since_at, trouble.words))
    return tuple(found[:MAX_TROUBLES])


def _trouble(peer: str, found: Found) -> Trouble:
    severity, what, advice, since_at = found
    return Trouble(peer=peer, words=f"{what}; {advice}", severity=severity, since_at=since_at)


_ABSENT = {
    "gone": ("is gone", "the others go on; if it is yours, join again there with --resume"),
    "silent": ("is silent", "if it is yours, see whether that machine sleeps or starves"),
    "unreachable": ("cannot be reached", "if it is yours, ask p2p-co2 doctor there"),
}


def _of_peer(peer: PeerFacts, sighting: Sighting | None, now: float, leading: int) -> list[Trouble]:
    name = plain(peer.label, 40)
    seen_at = peer.last_seen_at or now
    lines: list[Found] = []
    if peer.state in _ABSENT:
        word, advice = _ABSENT[peer.state]
        lines.append((BAD, f"{name} {word}: {plain(peer.reason, 160)}", advice, seen_at))
    elif peer.state == "unknown" and peer.reason and sighting is not None and sighting.refused:
        what = f"{name} says nothing that can be read: {plain(peer.reason, 160)}"
        lines.append((BAD, what, "its owner should install the organiser's version", now))
    elif peer.state == "behind":
        lines.append(
            (ODD, f"{name} is left out: {plain(peer.reason, 160)}", "wait until it has caught up", now)
        )
    if peer.nonsense:
        causes = ", ".join(f"{plain(cause, 60)} ({times})" for cause, times in peer.nonsense.items())
        what = f"{name} publishes nonsense, which is left out: {plain(causes, 200)}"
        lines.append((BAD, what, "if you know its owner, ask what runs there", now))
    if peer.state == "training":
        lines += _of_training(peer, name, now, leading)
    if peer.clock_offset_s is not None and abs(peer.clock_offset_s) > CLOCK_OFF_S:
        off = f"{name}'s clock is {peer.clock_offset_s:+.0f} s off; its times are corrected here"
        lines.append((ODD, off, "set that machine's clock by NTP", now))
    return [_trouble(peer.peer, line) for line in lines]


def _of_training(peer: PeerFacts, name: str, now: float, leading: int) -> list[Found]:
    lines: list[Found] = []
    behind = (leading - sum(peer.versions)) / max(1, len(peer.versions))
    if peer.versions and behind >= BEHIND_ROUNDS:
        what = f"{name} is {behind:.0f} rounds behind the foremost peer"
        lines.append((ODD, what, "it fetches them; if that lasts, look at its line with p2p-co2 plan", now))
    spent_s = peer.exposed_s / max(1e-9, peer.exposed_s + peer.hidden_s)
    if peer.utilisation is not None and peer.exposed_s > 5.0 and 1 - peer.utilisation > EXPOSED_SHARE:
        waits = f"{name} spends {percent(1 - peer.utilisation)} of its time waiting"
        of = f"({percent(spent_s)} of its communication is not hidden)"
        lines.append((ODD, f"{waits} {of}", "p2p-co2 plan says what rounds its line bears", now))
    cap, needed = peer.upload_cap_bytes_per_s, peer.needed_bytes_per_s
    if cap and needed and cap < needed:
        what = f"{name} may send {size(cap)}/s, and the rounds need {size(needed)}/s at least"
        lines.append((ODD, what, "its owner may raise --upload; till then it is given a smaller share", now))
    return lines


def _alone(view: SwarmView, peers: Sequence[PeerFacts], now: float) -> list[Trouble]:
    """One peer trains, and nobody else is there, or only out of our reach."""
    here = [peer for peer in peers if peer.state not in OVER and peer.state != "gone"]
    if len(here) != 1 or here[0].state not in ONLINE or not here[0].inner_steps:
        return []
    together = [
        report.committed_at
        for known in view.rounds.values()
        if known.outcome == "committed"
        for report in known.reports.values()
    ]
    left = [peer.last_seen_at or 0.0 for peer in peers if peer is not here[0]]
    since_at = max([here[0].joined_at or now, *together, *left])
    if now - since_at < ALONE_S:
        return []
    what = f"{plain(here[0].label, 40)} has trained alone for {clock(now - since_at)}, and exchanges nothing"
    return [_trouble(here[0].peer, (BAD, what, INVITE, since_at))]


def _skipped(view: SwarmView, labels: Mapping[str, str], now: float) -> list[Trouble]:
    """One line for all skipped sends of late, if there are many among those that were due."""
    recent = {
        peer.peer: [(at, why) for at, why in peer.recent_sends if now - at <= RECENT_S]
        for peer in view.peers.values()
    }
    due = sum(map(len, recent.values()))
    skipped = {peer: [at for at, why in sends if why] for peer, sends in recent.items()}
    count = sum(map(len, skipped.values()))
    if due < MIN_SENDS or count <= SKIPPED_SHARE * due:
        return []
    reason = Counter(why for sends in recent.values() for _, why in sends if why).most_common(1)[0][0]
    most = sorted(skipped, key=lambda peer: (-len(skipped[peer]), peer))
    named = [plain(labels.get(peer, f"~{peer[-6:]}"), 24) for peer in most if skipped[peer]]
    of = ", ".join(named[:MOST_NAMED]) + (", ..." if len(named) > MOST_NAMED else "")
    what = f"{percent(count / due)} of the sends of late were skipped ({of}): {plain(reason, 100)}"
    advice = "the lines are too slow for these rounds: p2p-co2 plan says which they bear"
    return [_trouble("", (ODD, what, advice, max(at for ats in skipped.values() for at in ats)))]


def _of_events(view: SwarmView, labels: Mapping[str, str], now: float) -> list[Trouble]:
    """Recent events that a person should act on, each kind and reason once, with how often."""
    alike: dict[tuple[str, str], list[tuple[float, str, Event]]] = {}
    for at, peer, _, event in view.notable:
        match event:
            case RoundAborted():
                key = "aborted", event.reason
            case ContributionCapped():  # every member tells of it: one line for each peer that it is about
                key = "capped", event.other
            case MessageRefused():
                key = f"refused {event.other}", event.reason
            case Warned():
                key = "warned", event.text
            case _:
                continue
        if now - at <= RECENT_S:
            alike.setdefault(key, []).append((at, peer, event))
    return [_of_alike(told, labels) for told in alike.values()]


def _of_alike(told: Sequence[tuple[float, str, Event]], labels: Mapping[str, str]) -> Trouble:
    """One line for events of one kind and reason; the newest is last."""

    def name(peer: str) -> str:
        return plain(labels.get(peer, f"~{peer[-6:]}"), 40)

    at, peer, event = told[-1]
    writers = sorted({name(writer) for _, writer, _ in told})
    who = writers[0] if len(writers) == 1 else f"{len(writers)} peers ({', '.join(writers[:MOST_NAMED])})"
    match event:
        case RoundAborted():
            rounds = {(one.fragment, one.round) for _, _, one in told if isinstance(one, RoundAborted)}
            what = f"Round {event.round} of fragment {event.fragment} was aborted: {plain(event.reason, 140)}"
            what += f" ({len(rounds) - 1} more of late)" if len(rounds) > 1 else ""
            advice = "its work goes into the next one; if that goes on, look at the peer that is named"
            return _trouble(peer, (BAD, what, advice, at))
        case ContributionCapped():
            what = f"{name(event.other)} {capped_words(event)}"
            advice = "if it is honest, raise weight_cap in the next run file"
            return _trouble(event.other, (ODD, what, advice, at))
        case MessageRefused():
            refuse = f"refuse{'s'[: len(writers) == 1]} messages of {name(event.other)}"
            what = f"{who} {refuse}: {plain(event.reason, 80)}"
            return _trouble(peer, (ODD, what, "its owner should install the organiser's version", at))
    text = event.text if isinstance(event, Warned) else event.kind
    return _trouble(
        peer,
        (
            ODD,
            f"{who} warn{'s'[: len(writers) == 1]}: {plain(text, 200)}",
            "its own terminal or log says more",
            at,
        ),
    )
