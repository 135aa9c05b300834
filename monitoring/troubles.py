"""What is wrong with a swarm now, in words for a person, and how the run is.

Law: a trouble rests on something observed, counted or signed, and goes away when it is over (``RECENT_S``).
None tells of what every healthy run has.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from monitoring.facts import (
    NOT_HEARD,
    ONLINE,
    OVER,
    RECENT_S,
    SILENT_AFTER_S,
    PeerFacts,
    RunState,
    StageFacts,
    Trouble,
)
from monitoring.known import BEHIND_ROUNDS, Known
from monitoring.words import clock, describe, percent, plain, size
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import numbered

OVERDUE_ROUNDS = 3.0
"""Without a committed exchange of any fragment."""
MAX_TROUBLES = 24
EXPOSED_SHARE = 0.05
"""Of a peer's wall time; the aim of the whole house is 1 %."""
SKIPPED_SHARE = 0.2
"""Of the sends of late that were due: as few skipped ones are nothing to act on."""
MIN_SENDS = 5
"""Among fewer, skipped sends are nothing to act on."""
LINE_SHARE = 0.5
"""Of a line's cap or rate; with less traffic over some seconds it is not the line that holds rounds up."""
BAD = "bad"
ODD = "odd"
_UPDATE = "its owner should install the organiser's version"
_ADVICE = {
    "round_aborted": (BAD, "its work goes into the next one; if that goes on, look at the peer it names"),
    "message_refused": (ODD, _UPDATE),
    "warned": (ODD, "its own terminal or log says more"),
}
"""What to do about an event, by its kind."""
INVITE = "invite others with: p2p-co2 join TICKET (the word that the seed printed)"
_ABSENT = {
    "gone": ("is gone", "the others go on; if it is yours, join again there"),
    "silent": ("is silent", "if it is yours, see whether that machine sleeps or starves"),
    "unreachable": ("cannot be reached", "if it is yours, ask p2p-co2 doctor there"),
}


def run_state(
    known: Known, peers: Sequence[PeerFacts], wrong: Sequence[Trouble], stages: Sequence[StageFacts],
    over: str,
) -> tuple[str, str]:  # fmt: skip
    """(the run's ``RunState``, why); both empty until a peer is heard. ``wrong``: its troubles now; ``over``:
    how it ended, empty if it goes on."""
    heard = [peer for peer in peers if peer.state not in NOT_HEARD]
    online = [peer for peer in peers if peer.state in ONLINE]
    at_work = [peer for peer in online if peer.state != "paused"]
    at_work_now = len(at_work) + sum(peer.state == "reached" for peer in peers)
    name = plain(at_work[0].label, 40) if at_work else "one other peer"
    bad = [stage.trouble for stage in stages if stage.is_empty]
    bad += [one.words for one in wrong if one.severity == BAD and known.now - one.since_at <= RECENT_S]
    if (quiet_s := _overdue_s(known, peers)) > 0:
        bad.append(f"no fragment exchange has committed for {clock(quiet_s)}")
    rules = (
        (bool(over) and bool(heard or known.state.position), RunState.OVER, over),
        (known.state.phase == "lost", RunState.LOST, plain(known.state.words, 240)),
        (not heard, "", ""),
        (not online, RunState.LOST, "of the peers that were there none is online"),
        (not at_work_now, RunState.ALONE, "all peers online are paused; it goes on when one resumes"),
        (at_work_now < 2 and known.stages == 1, RunState.ALONE,
         f"only {name} is at work, so nothing is exchanged; {INVITE}"),
        (bool(bad), RunState.DEGRADED, next(iter(bad), "")),
        (True, RunState.HEALTHY, f"{at_work_now} peers are at work, and nothing bad happened of late"),
    )  # fmt: skip
    return next((str(state), words) for holds, state, words in rules if holds)


def _overdue_s(known: Known, peers: Sequence[PeerFacts]) -> float:
    """Seconds without a committed exchange; 0 unless they are too many for how long peers have trained."""
    since = sorted(peer.joined_at or known.now for peer in peers if peer.state == "training")
    if known.round_s is None or len(since) < 2:
        return 0.0
    quiet_s = known.now - max(known.committed_at, since[1])
    return quiet_s if quiet_s > max(OVERDUE_ROUNDS * known.round_s, SILENT_AFTER_S) else 0.0


def staffing(stage: int, stages: int, replicas: int | None, unplaced: int, wanted: int) -> str:
    """What is wrong with so many ``replicas`` of a stage, and what to do; "" if nothing is. ``unplaced``:
    peers that may be of any stage."""
    name = f"stage {stage} of {stages}"
    cure = f"join with --stage {stage}"
    if replicas == 0:
        return f"{name} has no replica: training waits; {cure}"
    if replicas is not None and replicas + unplaced < wanted:
        return f"{name} is understaffed: {replicas} of at least {wanted} replicas; {cure}"
    return ""


def troubles(
    known: Known, peers: Sequence[PeerFacts], stages: Sequence[StageFacts] = ()
) -> tuple[Trouble, ...]:
    """All that is wrong at ``known.now``, worst first."""
    found = [*_skipped(known, peers), *_of_events(known)]
    if known.state.phase == "lost":
        # Everybody is silent to us then, which says nothing of anybody.
        what = f"The swarm is out of reach: {plain(known.state.words, 240)}"
        found.append(_trouble("", BAD, what, "what is shown is old, and it is looked for again", known.now))
    else:
        made = defaultdict[int | None, list[int]](list)
        for peer in peers:
            made[peer.stage] += [sum(peer.versions)] if peer.state == "training" else []
        for peer in peers:
            since_at = (peer.last_seen_at or known.now) if peer.state in _ABSENT else known.now
            of_training = _of_training(peer, made[peer.stage])
            found += [_trouble(peer.peer, *told, since_at) for told in (*_of_peer(peer), *of_training)]
        found += _alone(known, peers)
        found += [
            Trouble(peer="", words=one.trouble, severity=BAD if one.is_empty else ODD, since_at=told_at)
            for one in stages
            if (told_at := one.trouble_since_at) is not None
        ]
    first = {one.trouble for one in stages}  # without a stage nobody trains
    found.sort(key=lambda one: (one.severity != BAD, one.words not in first, -one.since_at, one.words))
    return tuple(found[:MAX_TROUBLES])


def _trouble(peer: str, severity: str, what: str, advice: str, since_at: float) -> Trouble:
    return Trouble(peer=peer, words=f"{what}; {advice}", severity=severity, since_at=since_at)


def _of_peer(peer: PeerFacts) -> Iterator[tuple[str, str, str]]:
    """(severity, what, what to do)"""
    name = plain(peer.label, 40)
    reason = plain(peer.reason, 160)
    if peer.state in _ABSENT:
        word, advice = _ABSENT[peer.state]
        yield BAD, f"{name} {word}: {reason}", advice
    elif peer.state == "unknown" and peer.reason and peer.nonsense:
        yield BAD, f"{name} says nothing that can be read: {reason}", _UPDATE
    elif peer.state == "behind":
        yield ODD, f"{name} is left out: {reason}", "wait until it has caught up"
    if peer.nonsense:
        causes = ", ".join(f"{plain(cause, 60)} ({times})" for cause, times in peer.nonsense.items())
        what = f"{name} publishes nonsense, which is left out: {plain(causes, 200)}"
        yield BAD, what, "if you know its owner, ask what runs there"
    if peer.clock_offset_s is not None and abs(peer.clock_offset_s) > 3 * SILENT_AFTER_S:
        what = f"{name}'s clock is {peer.clock_offset_s:+.0f} s off; its times are corrected here"
        yield ODD, what, "set that machine's clock by NTP"


def _of_training(peer: PeerFacts, made: Sequence[int]) -> Iterator[tuple[str, str, str]]:
    """As ``_of_peer``; ``made``: versions, summed over fragments, of each peer that trains. Where most are
    counts: what one claims says nothing of the others."""
    if peer.state != "training":
        return
    name = plain(peer.label, 40)
    behind = (statistics.median_high(made) - sum(peer.versions)) / max(1, len(peer.versions))
    if peer.versions and behind >= BEHIND_ROUNDS:
        advice = "it fetches them; if that lasts, look at its line with p2p-co2 plan"
        yield ODD, f"{name} is {behind:.0f} rounds behind the others", advice
    if peer.exposed_s > max(0.5 * SILENT_AFTER_S, EXPOSED_SHARE * peer.wall_s):
        waiting = percent(peer.exposed_s / max(peer.wall_s, peer.exposed_s))
        share = percent(peer.exposed_s / (peer.exposed_s + peer.hidden_s))
        what = f"{name} spends {waiting} of its time waiting ({share} of its communication is not hidden)"
        yield ODD, what, "p2p-co2 plan says what rounds its line bears"
    cap = peer.upload_cap_bytes_per_s
    needed = peer.needed_bytes_per_s
    if cap and needed and cap < needed:
        advice = "its owner may raise --upload; till then it is given a smaller share"
        yield ODD, f"{name} may send {size(cap)}/s, and the rounds need {size(needed)}/s at least", advice


def _alone(known: Known, peers: Sequence[PeerFacts]) -> list[Trouble]:
    """One peer trains, and nobody else is there, or only out of our reach. In a run with stages a stage that
    is understaffed says so."""
    here = [peer for peer in peers if peer.state not in OVER and peer.state != "gone"]
    if known.stages > 1 or len(here) != 1 or here[0].state not in ONLINE or not here[0].inner_steps:
        return []
    left = [peer.last_seen_at or 0.0 for peer in peers if peer is not here[0]]
    since_at = max([here[0].joined_at or known.now, known.committed_at, *left])
    alone_s = known.now - since_at
    if alone_s < 3 * SILENT_AFTER_S:
        return []
    what = f"{plain(here[0].label, 40)} has trained alone for {clock(alone_s)}, and exchanges nothing"
    return [_trouble(here[0].peer, BAD, what, INVITE, since_at)]


def _skipped(known: Known, peers: Sequence[PeerFacts]) -> list[Trouble]:
    """One line for all skipped sends of late, if there are many among those that were due. A line is at fault
    only where its traffic is near its cap, or near the rate at which it was seen to send."""
    recent = [
        (peer.peer, at, why)
        for peer in known.view.peers.values()
        for at, why in peer.recent_sends
        if known.now - at <= RECENT_S
    ]
    skipped = [(peer, at, why) for peer, at, why in recent if why]
    if len(recent) < MIN_SENDS or len(skipped) <= SKIPPED_SHARE * len(recent):
        return []
    reason = Counter(why for _, _, why in skipped).most_common(1)[0][0]
    by_peer = Counter(peer for peer, _, _ in sorted(skipped)).most_common()
    of = ", ".join([*(plain(known.label(peer), 24) for peer, _ in by_peer[:4]), "..."][: len(by_peer)])
    share = percent(len(skipped) / len(recent))
    what = f"{share} of the sends of late were skipped ({of}): {plain(reason, 100)}"
    advice = "the lines" if _is_a_line_full(peers) else "no line is full, so the machines"
    advice += " are too slow for these rounds: p2p-co2 plan says which they bear"
    return [_trouble("", ODD, what, advice, max(at for _, at, _ in skipped))]


def _is_a_line_full(peers: Sequence[PeerFacts]) -> bool:
    """Whether one moves much of its cap, or of the best rate seen on any of its links, either way."""
    up = Counter[str]()
    down = Counter[str]()
    for sender, link in ((one.peer, link) for one in peers for link in one.links):
        up[sender] = max(up[sender], int(link.bytes_per_s or 0))
        down[link.other] = max(down[link.other], int(link.bytes_per_s or 0))
    ways = [(one.up_bytes_per_s, up[one.peer]) for one in peers]
    ways += [(one.down_bytes_per_s, down[one.peer]) for one in peers]
    ways += [(one.up_bytes_per_s, int(one.upload_cap_bytes_per_s or 0)) for one in peers]
    return any(moved and rate and moved >= LINE_SHARE * rate for moved, rate in ways)


def _of_events(known: Known) -> list[Trouble]:
    """Recent events that a person should act on, each kind and reason once, with how often."""
    alike: dict[tuple[str, str], dict[str, tuple[ev.Event, str]]] = {}
    for event in known.view.notable:
        if event.kind not in _ADVICE or known.now - event.at > RECENT_S:
            continue
        if isinstance(event, ev.RoundAborted):
            place = numbered(known.view.stage_of(event) or 0, event.fragment)
            if (made := known.view.rounds.get((place, event.round))) is not None and made.commits:
                continue  # an attempt of one member, and the others have made that exchange
        about = next(filter(None, (getattr(event, name, "") for name in ("reason", "text", "other"))), "")
        key, words = describe(event, known.labels, known.view.stage_of(event))
        alike.setdefault((event.kind, about), {})[key] = event, words
    found = []
    for (kind, _), told in alike.items():
        event, what = list(told.values())[-1]
        severity, advice = _ADVICE[kind]
        what += f" ({len(told) - 1} more of late)" if len(told) > 1 else ""
        found.append(_trouble(event.peer, severity, what, advice, event.at))
    return found
