"""monitoring's feeds, when those whom they read are many or go away."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from monitoring.history import History
from monitoring.journals import QUIET_S, JournalFeed
from monitoring.model import MAX_UNHEARD, Model
from monitoring.relayed import RelayedFeed
from p2p_co2.config import read_run_config
from p2p_co2.protocol.wire.messages_pb2 import Relayed
from p2p_co2.system.process import FolderLock
from p2p_co2.system.socket_activation import MAX_ASKED, receive_relayed, send_relayed
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import FeedState, News, Sighting
from p2p_co2.telemetry.journal import Journal
from tests.made_swarm import peer_id
from tests.swarms import ROOT

PEERS = 200


def test_a_crowd_is_asked_a_few_at_a_time_and_everybody_in_turn() -> None:
    """A gate ends a program with more than ``MAX_ASKED`` questions open, and 65 identities cost nothing."""
    run = read_run_config(ROOT / "examples" / "run.toml")
    ours, theirs = socket.socketpair()
    feed = RelayedFeed(theirs)
    feed.watched(time.monotonic())
    peers = [peer_id(number) for number in range(PEERS)]
    open_, most, asked = list[int](), 0, set[str]()
    ours.settimeout(0.5)
    while len(asked) < PEERS:
        try:
            message = receive_relayed(ours)
        except TimeoutError:
            assert open_, "nobody is asked any more"
            for number in open_:
                send_relayed(ours, Relayed(id=number, trouble="out of reach"))
            open_.clear()
            continue
        if message is not None and message.id == 0:
            send_relayed(ours, Relayed(peers=peers, answer=run.canonical_bytes()))
        elif message is not None:
            open_.append(message.id)
            asked.add(message.peer)
            most = max(most, len(open_))
    assert most < MAX_ASKED
    feed.close()
    ours.close()
    theirs.close()


def test_a_journal_that_is_cleared_away_does_not_hide_the_others(tmp_path: Path) -> None:
    for number in range(2):
        with Journal(tmp_path / "peers" / f"p{number}" / "events.jsonl") as journal:
            journal.write(ev.Warned(at=time.time(), peer=peer_id(number), text="here"))
    feed = JournalFeed(tmp_path)
    assert len(feed.take().events) == 2
    shutil.rmtree(tmp_path / "peers" / "p0")
    with Journal(tmp_path / "peers" / "p1" / "events.jsonl") as journal:
        journal.write(ev.Warned(at=time.time(), peer=peer_id(1), text="still here"))
    assert [event.peer for event in feed.take().events] == [peer_id(1)]


def test_a_run_whose_last_process_was_killed_is_over_without_its_last_word(tmp_path: Path) -> None:
    """By the kernel's lock; a peer whose step takes minutes writes as little, and lives."""
    folder = tmp_path / "peers" / "p0"
    lock = FolderLock(folder)
    with Journal(folder / "events.jsonl") as journal:
        journal.write(ev.PeerStarted(at=1.0, peer=peer_id(0), name="p0", pid=1, software="x", device="cpu",
                                     parameters=1, fragments=1, run="r"))  # fmt: skip
    long_ago = time.time() - 2 * QUIET_S
    os.utime(folder / "events.jsonl", (long_ago, long_ago))
    alive = JournalFeed(tmp_path)
    alive.take()
    assert alive.state.phase == "connected"
    lock.release()  # as the kernel does for whoever is killed
    dead = JournalFeed(tmp_path)
    model = Model(dead, History(None))
    model.step(time.time())
    assert [(peer.state, peer.reason) for peer in model.facts().peers] == [
        ("gone", "it ended without a word")
    ]
    model.history.close()
    assert dead.state == FeedState(
        "ended", "the run is over: of those who wrote it no process lives any more"
    )


class _Listed:
    """A feed of peers that somebody listed and nobody ever heard."""

    run, place, me, is_whole = None, "nowhere", "", False
    state = FeedState("connected", "none answers")

    def __init__(self) -> None:
        self.news = News()

    def take(self) -> News:
        news, self.news = self.news, News()
        return news

    def watched(self, now: float) -> None: ...

    def close(self) -> None: ...


def test_peers_that_are_only_listed_are_forgotten() -> None:
    feed = _Listed()
    model = Model(feed, History(None))
    for second in range(3):
        feed.news.sightings = [
            Sighting(f"listed-{second}-{number}", "unreachable") for number in range(MAX_UNHEARD)
        ]
        feed.news.sightings.append(Sighting("listed-0-0", "unreachable"))
        model.step(float(second))
    assert model.facts().peers_known == MAX_UNHEARD
    assert "listed-0-0" in model.sightings
    assert "listed-0-1" not in model.sightings
    model.history.close()


def test_a_time_that_no_history_can_hold_does_not_stop_the_board(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for at in (1_700_000_000.0, 1e300, 1.1e300):
            journal.write(ev.Warned(at=at, peer=peer_id(0), text="here"))
    model = Model(JournalFeed(tmp_path), History(None))
    model.step(time.time())
    assert model.facts().peers_known == 1
    assert "not written" in model.trouble_with_history
    model.history.close()


BROKEN = """
import asyncio
from monitoring.board.server import Place, listening_socket, serve
from monitoring.history import History
from monitoring.model import Model
from tests.made_swarm import MadeFeed, MadeSwarm

class Broken(MadeFeed):
    def take(self):
        raise RuntimeError("a fault of ours")

async def main():
    model, place = Model(Broken(MadeSwarm(2, start_at=1.8e9)), History(None)), Place()
    async with asyncio.timeout(120):
        await serve(model, place, listening_socket(place), asyncio.Event())

asyncio.run(main())
"""


def test_a_board_that_can_learn_nothing_new_ends_aloud() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 1
    assert "RuntimeError: a fault of ours" in ended.stderr
