"""A board over a made-up swarm, as a process: ``python -m tests.board_server KIND``. Prints its address.

KIND: a number of peers; ``evil`` (a peer that says all that the checks let pass); ``connecting``, ``empty``,
``gone`` or ``lost`` (states of having nothing, or nothing new, to show).
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter

from monitoring.board.run import run_board
from monitoring.board.server import place_for
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import FeedState, News, Sighting
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id

PAST_S = 150
EVIL = "<img src=x onerror=\"document.title='broken in'\">{a|b} :onclick"
STATES = {
    "connecting": FeedState("connecting", "looking for a seed of the run"),
    "empty": FeedState("connected", "the seed answers, but no peer is listed: nobody trains now"),
    "lost": FeedState("lost", "no seed can be reached; is this machine online, and the organiser's seed up?"),
    "gone": FeedState("lost", "no seed can be reached; is this machine online, and the organiser's seed up?"),
}


class LiveFeed(MadeFeed):
    """A made-up swarm whose time is the clock's."""

    def take(self) -> News:
        if self.state.phase == "connected" and self.swarm.peers:
            self.advance(int(time.time() - self.swarm.start_at) + 1)
        return super().take()


def evil_events(at: float) -> list[ev.Event]:
    """What one hostile peer can say at most: the checks of a report let all of this pass."""
    bad, much = peer_id(99), 2**53
    return [
        ev.PeerStarted(at=at, peer=bad, name=EVIL, pid=0, software=EVIL, device=EVIL, parameters=much,
                       fragments=much, run=EVIL),
        ev.Progress(at=at, peer=bad, phase=EVIL, position=1e15, tokens_per_s=1e15, loss=math.nan,
                    train_s=1e15, exposed_s=1e15, wall_s=0.0, inner_steps=much, tokens=much,
                    up_bytes=much, down_bytes=0,
                    versions=(much,) * 256),
        ev.LinkMeasured(at=at, peer=bad, other=peer_id(0), carrier=EVIL, relayed=True, round_trip_s=1e15,
                        bytes_per_s=1e15, sent_bytes=much),
        ev.FragmentApplied(at=at, peer=bad, fragment=3, version=2**40, contributed=True, staleness=much,
                           sync_delay_steps=much, sync_delay_s=1e15, gap=1e15,
                           momentum_norm=1e15),
        ev.RoundCommitted(at=at, peer=bad, fragment=3, round=2**40, coordinator=EVIL, group_size=much,
                          contributors=0, partial=much, duration_s=1e15),
        ev.RoundAborted(at=at, peer=bad, fragment=2, round=2**40, reason=EVIL),
        ev.Warned(at=at, peer=bad, text=EVIL),
        ev.MessageRefused(at=at, peer=bad, other=EVIL, reason=EVIL),
    ]  # fmt: skip


def feed_of(kind: str) -> MadeFeed:
    start_at = time.time() - PAST_S
    if kind in STATES:
        feed = LiveFeed(MadeSwarm(4 if kind == "lost" else 0, start_at=start_at), STATES[kind])
        if kind == "lost":
            feed.advance(PAST_S - 40)
        return feed
    peers = 4 if kind == "evil" else int(kind)
    round_s = 5.0 if peers < 100 else 30.0
    swarm = MadeSwarm(
        peers, start_at=start_at, round_s=round_s, length_s=2.0 * PAST_S - 40, dead=3 if peers > 4 else -1,
        late=4 if peers > 5 else -1,
    )  # fmt: skip
    feed = LiveFeed(swarm)
    if kind == "evil":
        feed.advance(PAST_S)
        feed.news.events += evil_events(time.time() - 1)
        nonsense = Counter({EVIL[:40]: 3, "an impossible number": 2})
        feed.news.sightings.append(Sighting(peer_id(99), "answering", refused=nonsense))
    return feed


if __name__ == "__main__":
    run_board(feed_of(sys.argv[1]), place_for("127.0.0.1", 0), None, lambda text: print(text, flush=True))
