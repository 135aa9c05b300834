"""How a run is, once: for a person in some lines, for a program as the facts themselves.

``look`` waits until the peers that are there have answered, or nobody is there, no longer than it is told.
"""

from __future__ import annotations

import time
from contextlib import closing

from monitoring.facts import SILENT_AFTER_S, SwarmFacts
from monitoring.model import Model, follow
from monitoring.terminal import FRAME_S
from monitoring.words import ago, clock, figure, percent, plain, size
from p2p_co2.telemetry.feed import Feed

MAX_ROWS = 32


def look(feed: Feed, seconds: float) -> SwarmFacts:
    """The facts of ``feed``, which it closes. Raises ``TransportError`` if the run was not reached in
    ``seconds``."""
    answered_at = None
    with closing(follow(feed, FRAME_S, seconds)) as steps:
        for model, moments in steps:
            for _ in moments:
                continue  # the last one counts
            if _is_complete(model):
                answered_at = answered_at or time.monotonic()
                if feed.is_whole or time.monotonic() - answered_at >= 2 * FRAME_S:  # newer figures come
                    break
            else:
                answered_at = None
            if feed.state.phase == "lost":
                break
    model.require_reached()
    return model.facts()


def _is_complete(model: Model) -> bool:
    """Whether there is nothing more to come soon."""
    if model.feed.is_whole:
        return True
    sightings = model.sightings.values()
    if not sightings:
        return model.feed.state.phase == "connected" and "listed yet" not in model.feed.state.words
    since = model.known.now - SILENT_AFTER_S  # a long story comes in several answers, the oldest first
    heard = {peer.peer for peer in model.view.peers.values() if (peer.last_seen_at or 0.0) >= since}
    return all(one.reason or one.refused or one.peer in heard for one in sightings)


def lines_of(facts: SwarmFacts) -> list[str]:
    """The run in words: how it is, where it is, who trains, what is wrong."""
    of = f" of {facts.rounds_total}" if facts.rounds_total else ""
    left = f", {clock(facts.time_left_s)} left" if facts.time_left_s is not None else ""
    lines = [f"{plain(facts.run or 'a run', 64)}: {plain(facts.how, 300)}"]
    if facts.has_figures:
        kind = facts.loss_kind + (
            ago(facts.loss_agreed_at, facts.at) if facts.loss_kind == "held-out" else ""
        )
        unit = f" {facts.loss_unit}" if facts.loss_unit else ""
        lines += [
            f"round {figure(facts.position, 1)}{of}{left}; {facts.peers_online} of {facts.peers_known} peers "
            f"online; loss {figure(facts.loss, 3)}{unit} ({kind})",
            f"{figure(facts.tokens)} tokens, {figure(facts.tokens_per_s)} a second; fragment exchanges: "
            f"{facts.rounds_committed} committed, {facts.rounds_aborted} aborted; "
            f"sent {size(facts.up_bytes)}",
        ]
    rows = [
        (plain(peer.label, 18), plain(peer.state, 12), percent(peer.share_counted),
         f"{figure(peer.tokens_per_s if peer.last_seen_at else None)} tokens/s",
         f"round {figure(peer.position if peer.last_seen_at else None, 1)}")
        for peer in sorted(facts.peers, key=lambda one: (one.peer != facts.me, -(one.share_counted or 0.0)))
        if (peer.state != "unknown" and facts.nothing != "over") or peer.last_seen_at or peer.share_counted
    ]  # fmt: skip
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)]
    for row in rows[:MAX_ROWS]:
        lines.append(
            "  " + "  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip()
        )
    if len(rows) > MAX_ROWS:
        lines.append(f"  and {len(rows) - MAX_ROWS} more")
    return lines + [f"! {plain(one.words, 300)}" for one in facts.troubles[:4]]
