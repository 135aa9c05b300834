"""Figures and events in words, safe to print.

Law: no text that came from a peer reaches the terminal with control characters or at unbounded length. Every
function takes "not known" (None or NaN) and says so with a dash.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

from monitoring.facts import SwarmFacts
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView
from p2p_co2.wire.names import words_of

UNKNOWN = "-"
OWN_UNIT = "in the recipe's own unit"
LEFT_PREFIX = "left: "
"""How membership begins the reason of a peer that said goodbye."""
MISSED = {
    "not_asked": (
        "its line is too slow to bring all of it in time, so it was asked for a part",
        "nothing is lost: what was not asked for goes into later exchanges; a faster line brings more",
    ),
    "late": (
        "its slice was not whole at the deadline",
        "look at its upload with p2p-co2 doctor; other traffic on its line delays it",
    ),
    "no_room": (
        "the peer that averaged held as many slices as it may",
        "if that goes on, ask the organiser for smaller groups (group_size)",
    ),
    "not_awaited": (
        "it was late twice in a row, or its link was down, and the others began without it",
        "it is waited for again once a slice is in time: see whether its machine or its line is overloaded",
    ),
    "hostile": (
        "its slice held numbers that cannot be averaged",
        "look for losses that are no numbers there, and install the organiser's version",
    ),
}
"""Why a peer's slice is not in a mean, by the reason of ``events.SliceMissed``: what happened, and what to
do."""
_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
"""A peer id in running text: a name leaves room for the rest."""
_NOBODY: Mapping[str, str] = {}


def loss_unit(recipe: str) -> str:
    """The unit of a run's losses: known for the built-in recipe, the author's affair ("") for others."""
    return "nats per token" if recipe == "byte-gpt" else ""


def plain(text: str, limit: int = 120, labels: Mapping[str, str] = _NOBODY) -> str:
    """``text`` on one line, without control characters (an escape sequence in a name could rewrite a
    terminal), and with what peers are called in the place of their ids."""
    text = _PEER_ID.sub(lambda found: labels.get(found[0]) or words_of(found[0]), text)
    clean = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def size(count: float | None) -> str:
    """Bytes in decimal units: 999 B, 1.2 kB, 34 MB."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    value = float(count)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        # 999.5 would print as 1000
        if value < 999.5:
            break
        value = value / 1000
        unit = larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def figure(value: float | None, digits: int = 0) -> str:
    """A number with ``digits`` decimals and commas between thousands."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def clock(seconds: float | None) -> str:
    """A duration as m:ss or h:mm:ss."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def ago(at: float | None, now: float) -> str:
    """How long before ``now`` a figure was measured; "" if it is not known or it has just been."""
    return "" if at is None or not now - at >= 1.0 else f", {clock(now - at)} ago"


def date(at: float | None) -> str:
    """A moment as local time: hh:mm:ss today, else with the day."""
    if at is None or not math.isfinite(at) or abs(at) > 1e11:
        return UNKNOWN
    then = time.localtime(at)
    today = time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%d %b %H:%M", then)


def links(carriers: Mapping[str, int]) -> str:
    """Open links, by carrier."""
    return plain(", ".join(f"{count} {carrier}" for carrier, count in carriers.items()), 40) or UNKNOWN


def missed_words(missed: Mapping[str, int]) -> str:
    """How often slices of a peer were not counted, by reason, most often first; "" if that never was."""
    order = sorted(missed.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{times} {plain(reason.replace('_', ' '), 24)}" for reason, times in order[:6])


def missed_advice(missed: Mapping[str, int]) -> str:
    """What is behind the most frequent of the known reasons, and what to do; "" if there is none."""
    known = {reason: times for reason, times in missed.items() if reason in MISSED}
    return "; ".join(MISSED[max(known, key=lambda reason: (known[reason], reason))]) if known else ""


def staleness_verdict(staleness: Mapping[str, int], is_delayed: bool) -> str:
    """What applied outer steps by staleness come to, and what to do. ``is_delayed``: the run's rule applies
    every answer one round late."""
    total = sum(staleness.values())
    if not total:
        return "No answer of an exchange has been applied yet."
    fresh = staleness.get("0", 0) / total
    late = staleness.get("1", 0) / total
    later = 1.0 - fresh - late
    shares = [(fresh, "fresh"), (late, "one step late"), (later, "later than that")]
    told = ", ".join(f"{100 * share:.0f} % {words}" for share, words in shares if share >= 0.005)
    cure = "make rounds longer (clock.round_s), or choose a codec with fewer bits"
    if later > 0.05:
        return f"{told}: lines or processors are too slow for this run; {cure}."
    if late > 0.5 and not is_delayed:
        return f"{told}: little is lost by it, but most answers miss their round; {cure}."
    return f"{told}: as it should be."


def loading_words(now: ev.StateLoading | None) -> str:
    """How far the agreed state is that a peer loads; "" if it loads none."""
    if now is None:
        return ""
    how_far = f"{size(now.received_bytes)} of {size(now.total_bytes)}"
    return f"loading the agreed state: {how_far} from {now.donors} peer{'s'[: now.donors != 1]}"


def to_owner(reason: str) -> str:
    """Why a peer rests, said to its owner: "you are using the GPU"."""
    return reason.replace("its owner is", "you are").replace("its machine", "your machine")


def capped_words(event: ev.ContributionCapped) -> str:
    """What its peer claims and what it counted as, in the work of the round's median member. It is a share
    where only the size of what it sent was too large."""
    times = event.claimed / event.median if event.median > 0 else math.inf
    if times >= 2:
        counted = event.counted / event.median
        return f"tells of {figure(times)} times the median work: counted as {figure(counted, 1)} times"
    share = percent(event.counted / event.claimed if event.claimed > 0 else 0.0)
    return f"sends far larger changes than the others: counted as {share} of its work"


def news(view: SwarmView, newest: int) -> list[tuple[float, str]]:
    """The ``newest`` lines of what happened, oldest first: (at, words). What every member reports is said
    once."""
    labels = view.labels()
    lines = dict[str, tuple[float, str]]()
    for event in reversed(view.notable):
        key, words = describe(event, labels, view.stage_of(event))
        if words and key not in lines:
            lines[key] = event.at, words
        if len(lines) == newest:
            break
    return list(lines.values())[::-1]


def end_told(facts: SwarmFacts) -> dict[str, tuple[str, str, str, str]]:
    """What a run came to, as tiles say it: caption, number, unit, line below."""
    lasted_s = facts.at - min((peer.joined_at or facts.at for peer in facts.peers), default=facts.at)
    if facts.round_s is not None:
        lasted_s = facts.position * facts.round_s
    total = f" of {figure(facts.rounds_total)}" if facts.rounds_total else ""
    seen = f"certificates seen here: {figure(facts.rounds_counted)}"
    is_measured = facts.loss_best is not None
    best_at = f"held-out, at round {figure(facts.loss_best_round)}" if is_measured else "not measured here"
    gave = [
        f"{plain(peer.label, 24)} {percent(peer.share_counted)}"
        + f" of stage {peer.stage}" * bool(facts.stages)
        for peer in sorted(facts.peers, key=lambda peer: -(peer.share_counted or 0.0))
        if peer.share_counted
    ]
    names = ", ".join(gave[:8] + [f"and {len(gave) - 8} more"] * (len(gave) > 8))
    return {
        "end-ran": ("Ran for", clock(lasted_s), "", f"{figure(facts.position)}{total} rounds"),
        "end-tokens": ("In the model", figure(facts.tokens_counted), "tokens", seen),
        "end-loss": ("Best loss heard", figure(facts.loss_best, 3), facts.loss_unit * is_measured, best_at),
        "end-gave": ("Who gave", figure(len(gave)), "peers"[: 4 + (len(gave) != 1)], names),
    }


def as_lines(told: Mapping[str, tuple[str, str, str, str]]) -> list[str]:
    """What tiles say, a line each."""
    return [
        f"{caption.lower()}: {' '.join(filter(None, (number, unit)))}{f', {sub}' if sub else ''}"
        for caption, number, unit, sub in told.values()
    ]


def describe(event: ev.Event, labels: Mapping[str, str], stage: int | None = None) -> tuple[str, str]:
    """What makes the event the same for all that report it, and the event in words ("" if it is not worth a
    line). ``stage``: that its writer holds, in a run with several."""

    def name(peer: str) -> str:
        return plain(labels.get(peer) or words_of(peer), 24)

    me = name(event.peer)
    key = ""
    words = ""
    match event:
        case ev.PeerJoined():
            # At the start everybody meets everybody: one line for each newcomer is enough.
            key = f"joined {event.other}"
            words = f"{name(event.other)} joined"
        case ev.PeerLeft():
            how = "left" if event.reason.startswith(LEFT_PREFIX) else "is gone"
            key = f"left {event.other}"
            words = f"{name(event.other)} {how}: {event.reason.removeprefix(LEFT_PREFIX)}"
        case ev.LinkOpened():
            why = f" ({event.reason})" if event.reason else ""
            words = f"{me} reaches {name(event.other)} by {event.carrier}{why}"
        case ev.LinkLost():
            words = f"{me} lost its {event.carrier} link to {name(event.other)}: {event.reason}"
        case ev.CaughtUp():
            span = f"version {event.from_version} to {event.to_version}"
            span += f" of {of_fragment(event.fragment, stage)}"
            lost = event.rounds_given_up
            words = f"{me} caught up, {span}, by {event.how} from {name(event.donor)}"
            words += (
                f"; given up: {lost} exchange{'s' if lost > 1 else ''} that it made alone" if lost else ""
            )
        case ev.ContributionCapped():
            key = f"capped {event.other}"
            words = f"{name(event.other)} {capped_words(event)}"
        case ev.MessageRefused():
            words = f"{me} refused a message from {name(event.other)}: {event.reason}"
        case _:
            key, words = _of_round(event, me, stage)
            words = words or _of_itself(event, me)
    return key or words, plain(words, labels=labels)


def of_fragment(fragment: int, stage: int | None) -> str:
    """A fragment's name; ``stage``: whose it is, in a run with several."""
    return f"fragment {fragment}" + ("" if stage is None else f" of stage {stage}")


def exchange(fragment: int, number: int, stage: int | None) -> str:
    """A fragment exchange's name. ``number``: of the round that it belongs to."""
    return f"exchange {number} of {of_fragment(fragment, stage)}"


def _of_round(event: ev.Event, me: str, stage: int | None) -> tuple[str, str]:
    at = "" if stage is None else f"{stage} "
    match event:
        case ev.RoundCommitted(group_size=1):
            return "", f"{me} made {exchange(event.fragment, event.round, stage)} alone"
        case ev.RoundCommitted():
            share = f"{event.contributors} of {event.group_size} are in the mean"
            words = f"{exchange(event.fragment, event.round, stage)} committed: {share}, "
            key = f"commit {at}{event.fragment} {event.round}"
            return key, f"{words}{figure(event.duration_s, 2)} s at {me}"
        case ev.RoundAborted():
            words = f"{exchange(event.fragment, event.round, stage)} aborted: {event.reason}"
            return f"abort {at}{event.fragment} {event.round} {event.reason}", words
        case ev.SliceMissed():
            why = MISSED.get(event.reason, (event.reason,))[0]
            of = exchange(event.fragment, event.round, stage)
            return "", f"{me} is not in {event.parts} part{'s'[: event.parts != 1]} of {of}: {why}"
        case ev.SendSkipped():
            return "", f"{me} skipped a send of {of_fragment(event.fragment, stage)}: {event.reason}"
    return "", ""


def _of_itself(event: ev.Event, me: str) -> str:
    words = ""
    match event:
        case ev.PeerStarted():
            words = f"started on {event.device}"
            words += f" with stage {event.stage} of {event.stages}" if event.stages > 1 else ""
            if event.resumed_from:
                words += f", resumed at step {figure(event.inner_steps)}, round {figure(event.position, 1)}"
        case ev.AgreedMeasured():
            more = "".join(f", {name} {value:.4g}" for name, value in event.figures.items())
            words = f"measured the agreed parameters: held-out loss {figure(event.loss, 4)}{more}"
        case ev.CheckpointSaved():
            words = f"saved a checkpoint in {figure(event.duration_s, 2)} s"
        case ev.Paused():
            words = f"rests: {event.reason}"
        case ev.Resumed():
            words = f"goes on after {clock(event.paused_s)}"
        case ev.TrainingEnded():
            most_s = event.offers_within_s + event.settles_within_s
            words = f"trained to the end of the run; waits until all agree, at most {clock(most_s)}"
        case ev.Warned():
            words = f"warns: {event.text}"
        case ev.PeerFinished():
            words = f"finished: {event.reason}"
    return f"{me} {words}" if words else ""
