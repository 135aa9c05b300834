"""A board over a made-up swarm, as a process: ``python -m tests.board_server KIND``. Prints its address.

KIND: a number of peers; ``own`` (six peers, and the page is one's own); ``stages`` (four stages, the last
without a replica since half-way); ``evil`` (a peer that says all that the checks let pass); ``connecting``,
``empty``, ``over``, ``gone`` or ``lost`` (states of having nothing, or nothing new, to show).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from monitoring.board.server import place_for, run_board
from p2p_co2.telemetry.feed import FeedState, News
from tests.made_swarm import MadeFeed, MadeSwarm, add_evil, peer_id

PAST_S = 150
STATES = {
    "connecting": FeedState("connecting", "looking for a seed of the run"),
    "empty": FeedState("connected", "the seed answers, but no peer is listed: nobody trains now"),
    "lost": FeedState("lost", "no seed can be reached; is this machine online, and the organiser's seed up?"),
    "over": FeedState("ended", "the run ended at round 1000", 1000.0),
    "gone": FeedState("lost", "no seed can be reached; is this machine online, and the organiser's seed up?"),
}


class LiveFeed(MadeFeed):
    """A made-up swarm whose time is the clock's."""

    def take(self) -> News:
        if self.state.phase == "connected" and self.swarm.peers:
            self.advance(int(time.time() - self.swarm.start_at) + 1)
        return super().take()


def feed_of(kind: str) -> MadeFeed:
    start_at = time.time() - PAST_S
    if kind in STATES:
        feed = LiveFeed(MadeSwarm(4 if kind == "lost" else 0, start_at=start_at), STATES[kind])
        if kind == "lost":
            feed.advance(PAST_S - 40)
        return feed
    peers = {"evil": 4, "stages": 6, "own": 6}.get(kind) or int(kind)
    round_s = 5.0 if peers < 100 else 30.0
    swarm = MadeSwarm(
        peers, start_at=start_at, round_s=round_s, length_s=2.0 * PAST_S - 40, dead=3 if peers > 4 else -1,
        late=4 if peers > 5 else -1, stages=4 if kind == "stages" else 1,
    )  # fmt: skip
    feed = LiveFeed(swarm)
    if kind == "own":
        feed.me = peer_id(1)
    if kind == "evil":
        feed.advance(PAST_S)
        add_evil(feed, time.time() - 1)
    return feed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = feed_of(sys.argv[1])
        made.folder = Path(folder) if sys.argv[1] == "own" else None
        run_board(made, place_for("127.0.0.1", 0), None, lambda text: print(text, flush=True))
