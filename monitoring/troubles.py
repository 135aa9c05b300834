"""What is wrong now, in words, with the peer, the reason, and what to do.

Law: every line rests on something that was observed, counted or said in a signed report, and goes away when
it is over (``RECENT_S``); what happens in every healthy run is none, however often (``SKIPPED_SHARE``); the
worst come first; the list is bounded. Nothing is wrong with a run that is over: nobody asks then. What a peer
said is text, never markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from monitoring.facts import BEHIND_ROUNDS, ONLINE, OVER, PeerFacts, Trouble
from monitoring.words import capped_words, clock, percent, plain, size
from p2p_co2.telemetry import events as ev
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
_ABSENT = {
    "gone": ("is gone", "the others go on; if it is yours, join again there with --resume"),
    "silent": ("is silent", "if it is yours, see whether that machine sleeps or starves"),
    "unreachable": ("cannot be reached", "if it is yours, ask p2p-co2 doctor there"),
}

Label = Callable[[str], str]


def troubles(
    view: SwarmView,
    label: Label,
    peers: Sequence[PeerFacts],
    sightings: Mapping[str, Sighting],
    state: FeedState,
    now: float,
) -> tuple[Trouble, ...]:
    """All that is wrong at ``now``, worst first."""
    found: list[Trouble] = []
    if state.phase == "lost":
        # Everybody is silent to us then, which says nothing of anybody.
        what = f"The swarm is out of reach: {plain(state.words, 240)}"
        found.append(_trouble("", BAD, what, "what is shown is old, and it is looked for again", now))
    else:
        leading = max((sum(peer.versions) for peer in peers if peer.versions), default=0)
        for peer in peers:
            found += _of_peer(peer, sightings.get(peer.peer), now, leading)
        found += _alone(view, peers, now)
    found += _skipped(view, label, now)
    found += _of_events(view, label, now)
    found.sort(key=lambda trouble: (trouble.severity != BAD, -trouble.since_at, trouble.words))
    return tuple(found[:MAX_TROUBLES])


def _trouble(peer: str, severity: str, what: str, advice: str, since_at: float) -> Trouble:
    return Trouble(peer=peer, words=f"{what}; {advice}", severity=severity, since_at=since_at)


def _of_peer(peer: PeerFacts, sighting: Sighting | None, now: float, leading: int) -> Iterator[Trouble]:
    name, reason, me = plain(peer.label, 40), plain(peer.reason, 160), peer.peer
    if peer.state in _ABSENT:
        word, advice = _ABSENT[peer.state]
        yield _trouble(me, BAD, f"{name} {word}: {reason}", advice, peer.last_seen_at or now)
    elif peer.state == "unknown" and peer.reason and sighting is not None and sighting.refused:
        what = f"{name} says nothing that can be read: {reason}"
        yield _trouble(me, BAD, what, "its owner should install the organiser's version", now)
    elif peer.state == "behind":
        yield _trouble(me, ODD, f"{name} is left out: {reason}", "wait until it has caught up", now)
    if peer.nonsense:
        causes = ", ".join(f"{plain(cause, 60)} ({times})" for cause, times in peer.nonsense.items())
        what = f"{name} publishes nonsense, which is left out: {plain(causes, 200)}"
        yield _trouble(me, BAD, what, "if you know its owner, ask what runs there", now)
    if peer.state == "training":
        yield from _of_training(peer, name, now, leading)
    if peer.clock_offset_s is not None and abs(peer.clock_offset_s) > CLOCK_OFF_S:
        what = f"{name}'s clock is {peer.clock_offset_s:+.0f} s off; its times are corrected here"
        yield _trouble(me, ODD, what, "set that machine's clock by NTP", now)


def _of_training(peer: PeerFacts, name: str, now: float, leading: int) -> Iterator[Trouble]:
    behind = (leading - sum(peer.versions)) / max(1, len(peer.versions))
    if peer.versions and behind >= BEHIND_ROUNDS:
        what = f"{name} is {behind:.0f} rounds behind the foremost peer"
        advice = "it fetches them; if that lasts, look at its line with p2p-co2 plan"
        yield _trouble(peer.peer, ODD, what, advice, now)
    if peer.utilisation is not None and peer.exposed_s > 5.0 and 1 - peer.utilisation > EXPOSED_SHARE:
        share = percent(peer.exposed_s / (peer.exposed_s + peer.hidden_s))
        what = f"{name} spends {percent(1 - peer.utilisation)} of its time waiting"
        what += f" ({share} of its communication is not hidden)"
        yield _trouble(peer.peer, ODD, what, "p2p-co2 plan says what rounds its line bears", now)
    cap, needed = peer.upload_cap_bytes_per_s, peer.needed_bytes_per_s
    if cap and needed and cap < needed:
        what = f"{name} may send {size(cap)}/s, and the rounds need {size(needed)}/s at least"
        advice = "its owner may raise --upload; till then it is given a smaller share"
        yield _trouble(peer.peer, ODD, what, advice, now)


def _alone(view: SwarmView, peers: Sequence[PeerFacts], now: float) -> list[Trouble]:
    """One peer trains, and nobody else is there, or only out of our reach."""
    here = [peer for peer in peers if peer.state not in OVER and peer.state != "gone"]
    if len(here) != 1 or here[0].state not in ONLINE or not here[0].inner_steps:
        return []
    together = [
        commit.at
        for known in view.rounds.values()
        if known.outcome == "committed"
        for commit in known.commits.values()
    ]
    left = [peer.last_seen_at or 0.0 for peer in peers if peer is not here[0]]
    since_at = max([here[0].joined_at or now, *together, *left])
    if now - since_at < ALONE_S:
        return []
    what = f"{plain(here[0].label, 40)} has trained alone for {clock(now - since_at)}, and exchanges nothing"
    return [_trouble(here[0].peer, BAD, what, INVITE, since_at)]


def _skipped(view: SwarmView, label: Label, now: float) -> list[Trouble]:
    """One line for all skipped sends of late, if there are many among those that were due."""
    recent = [
        (peer.peer, at, why)
        for peer in view.peers.values()
        for at, why in peer.recent_sends
        if now - at <= RECENT_S
    ]
    skipped = [(peer, at, why) for peer, at, why in recent if why]
    if len(recent) < MIN_SENDS or len(skipped) <= SKIPPED_SHARE * len(recent):
        return []
    reason = Counter(why for _, _, why in skipped).most_common(1)[0][0]
    by_peer = Counter(peer for peer, _, _ in sorted(skipped)).most_common()
    named = ", ".join(plain(label(peer), 24) for peer, _ in by_peer[:MOST_NAMED])
    of = named + (", ..." if len(by_peer) > MOST_NAMED else "")
    share = percent(len(skipped) / len(recent))
    what = f"{share} of the sends of late were skipped ({of}): {plain(reason, 100)}"
    advice = "the lines are too slow for these rounds: p2p-co2 plan says which they bear"
    return [_trouble("", ODD, what, advice, max(at for _, at, _ in skipped))]


def _of_events(view: SwarmView, label: Label, now: float) -> list[Trouble]:
    """Recent events that a person should act on, each kind and reason once, with how often."""
    alike: dict[tuple[str, str], list[ev.Event]] = {}
    for at, _, _, event in view.notable:
        match event:
            case ev.RoundAborted():
                key = "aborted", event.reason
            case ev.ContributionCapped():  # every member tells of it: one line for each peer it is about
                key = "capped", event.other
            case ev.MessageRefused():
                key = f"refused {event.other}", event.reason
            case ev.Warned():
                key = "warned", event.text
            case _:
                continue
        if now - at <= RECENT_S:
            alike.setdefault(key, []).append(event)
    return [_of_alike(told, lambda peer: plain(label(peer), 40)) for told in alike.values()]


def _of_alike(told: Sequence[ev.Event], name: Label) -> Trouble:
    """One line for events of one kind and reason; the newest is last."""
    event, writers = told[-1], sorted({name(one.peer) for one in told})
    is_one = len(writers) == 1
    who = writers[0] if is_one else f"{len(writers)} peers ({', '.join(writers[:MOST_NAMED])})"
    peer, severity = event.peer, ODD
    match event:
        case ev.RoundAborted():
            rounds = {(one.fragment, one.round) for one in told if isinstance(one, ev.RoundAborted)}
            what = f"Round {event.round} of fragment {event.fragment} was aborted: {plain(event.reason, 140)}"
            what += f" ({len(rounds) - 1} more of late)" if len(rounds) > 1 else ""
            advice = "its work goes into the next one; if that goes on, look at the peer that is named"
            severity = BAD
        case ev.ContributionCapped():
            peer, what = event.other, f"{name(event.other)} {capped_words(event)}"
            advice = "if it is honest, raise weight_cap in the next run file"
        case ev.MessageRefused():
            refuse = f"refuse{'s' * is_one} messages of {name(event.other)}"
            what = f"{who} {refuse}: {plain(event.reason, 80)}"
            advice = "its owner should install the organiser's version"
        case _:
            text = event.text if isinstance(event, ev.Warned) else event.kind
            what = f"{who} warn{'s' * is_one}: {plain(text, 200)}"
            advice = "its own terminal or log says more"
    return _trouble(peer, severity, what, advice, event.at)
