"""What a board remembers, how that ages and is bounded; and its feeds, when those that they read go away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monitoring.feeds import QUIET_S, JournalFeed, RelayedFeed
from monitoring.history import AGREED, MEASURES, SWARM, TIERS, Batch, BoardHistory, Happening
from monitoring.model import MAX_PEERS, Model, Recorder
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.process import FolderLock
from p2p_co2.system.socket_activation import MAX_ASKED, receive_relayed, send_relayed
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, FeedState, News, Sighting
from p2p_co2.telemetry.journal import Journal
from p2p_co2.wire.messages_pb2 import Relayed
from tests.event_samples import started
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id, step
from tests.swarms import ROOT

START = 1_800_000_000.0
PEERS = 200


def sample(value: float) -> tuple[float, ...]:
    return tuple(value + place for place in range(len(MEASURES)))


def filled(history: BoardHistory, seconds: int, step_s: int = 2) -> None:
    for t in range(0, seconds, step_s):
        rows = {"a": sample(float(t)), SWARM: sample(float(-t)), AGREED: sample(1.0)}
        history.write(Batch(at=START + t, samples=rows))


def test_old_samples_become_means_and_finer_ones_go() -> None:
    history = BoardHistory(None)
    seconds = TIERS[0][1] + 1200
    filled(history, seconds)
    long_ago = history.series("a", START, START + seconds)
    assert len(long_ago) <= 720
    at, *values = long_ago[5]
    step = long_ago[6][0] - at
    assert step == TIERS[1][0]
    place = MEASURES.index("loss")
    mean = sum(t + place for t in range(int(at - START), int(at - START + step), 2)) / (step / 2)
    assert values[place] == pytest.approx(mean)
    history.close()


def test_a_board_started_again_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"
    lines = [Happening(START + n, "warned", peer, -1, -1, f"{n}", f"{n}") for n, peer in enumerate("aab")]
    with contextlib.closing(BoardHistory(path)) as first:
        filled(first, 20)
        rows = first.series("a", START, START + 20)
        assert [row[0] for row in rows] == [START + t for t in range(0, 20, 2)]
        assert rows[3][1:] == sample(6.0)
        assert first.series("nobody", START, START + 20) == []
        more = Batch(at=START + 20, happenings=[*lines, lines[0]], counted={"a": 12.5})
        more.counted_rounds = {(0, 3)}
        first.write(more)
    with contextlib.closing(BoardHistory(path)) as again:
        assert (again.counted_rounds(), again.counted()) == ({(0, 3)}, {"a": 12.5})
        assert again.happenings(10) == lines[::-1]
        told = [[line.words for line in again.happenings(most, peer)] for most, peer in ((2, ""), (9, "a"))]
        assert told == [["2", "1"], ["1", "0"]]
        assert again.span() == (START, START + 18)
        filled(again, 24)
        assert len(again.series("a", START, START + 40)) == 12


@pytest.mark.parametrize("what", ["no database", "another format", "damaged in the middle"])
def test_a_file_that_cannot_be_read_is_set_aside(tmp_path: Path, what: str) -> None:
    path = tmp_path / "board.sqlite"
    if what == "no database":
        path.write_bytes(b"this was never a database" * 100)
    elif what == "another format":
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA user_version=99")
    else:
        with contextlib.closing(BoardHistory(path)) as history:
            filled(history, 400)
        data = path.read_bytes()
        path.write_bytes(data[:4096] + b"\x5a" * (len(data) - 4096))
    with contextlib.closing(BoardHistory(path)) as history:
        assert list(tmp_path.glob("board.sqlite.damaged-*"))
        filled(history, 4)
    with contextlib.closing(BoardHistory(path)) as again:
        assert len(again.series("a", START, START + 99)) == 2


def test_a_write_that_fails_changes_nothing() -> None:
    history = BoardHistory(None)
    filled(history, 4)
    before = history.series("a", START, START + 99)
    line = Happening(START, "warned", "a", 2**70, 0, "a number that the file cannot hold", "")
    with pytest.raises(EnvironmentFault):
        history.write(Batch(at=START + 8, samples={"a": sample(1.0)}, happenings=[line]))
    assert history.series("a", START, START + 99) == before
    filled(history, 12)
    assert len(history.series("a", START, START + 99)) == 6
    history.close()


def test_a_history_that_cannot_be_written_is_told_and_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = BoardHistory.or_in_memory(tmp_path / "file" / "board.sqlite")
    recorder = Recorder(Model(MadeFeed(MadeSwarm(2, start_at=START))), history)
    recorder.follow(START + 1)
    assert "--folder" in recorder.trouble
    assert history.span() != (0.0, 0.0)
    history.close()
    assert not BoardHistory.or_in_memory(None).trouble


# ---- feeds


def test_a_crowd_is_asked_a_few_at_a_time_and_everybody_in_turn() -> None:
    """A program with more than ``MAX_ASKED`` questions open is ended, and 65 identities cost nothing."""
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
        journal.write(started(peer_id(0), at=1.0))
    long_ago = time.time() - 2 * QUIET_S
    os.utime(folder / "events.jsonl", (long_ago, long_ago))
    alive = JournalFeed(tmp_path)
    alive.take()
    assert alive.state.phase == "connected"
    lock.release()  # as the kernel does for whoever is killed
    dead = JournalFeed(tmp_path)
    model = Model(dead)
    step(model, time.time())
    (peer,) = model.facts().peers
    assert (peer.state, peer.reason) == ("gone", "it ended without a word")
    assert dead.state == FeedState(
        "ended", "the run is over: of those who wrote it no process lives any more"
    )


class _Listed(Feed):
    """A feed of peers that somebody listed and nobody ever heard."""

    state = FeedState("connected", "none answers")

    def take(self) -> News:
        return News(sightings=[Sighting(f"listed-{number}", "unreachable") for number in self.numbers])

    def __init__(self) -> None:
        self.numbers: list[int] = []


def test_peers_that_are_only_listed_are_forgotten() -> None:
    feed = _Listed()
    model = Model(feed)
    for second in range(3):
        feed.numbers = [*range(second * MAX_PEERS, (second + 1) * MAX_PEERS), 0]
        step(model, float(second))
    assert model.facts().peers_known == MAX_PEERS
    assert "listed-0" in model.sightings
    assert "listed-1" not in model.sightings


def test_a_time_that_no_history_can_hold_does_not_stop_the_board(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for at in (1_700_000_000.0, 1e300, 1.1e300):
            journal.write(ev.Warned(at=at, peer=peer_id(0), text="here"))
    model = Model(JournalFeed(tmp_path))
    recorder = Recorder(model, BoardHistory(None))
    recorder.follow(1e300)
    assert model.facts().peers_known == 1
    assert "not written" in recorder.trouble


BROKEN = """
import asyncio, threading, urllib.request
from monitoring.board.server import BoardPlace, address, listening_socket, serve
from monitoring.history import BoardHistory
from monitoring.model import Model
from tests.made_swarm import MadeFeed, MadeSwarm

looked = threading.Event()

class Broken(MadeFeed):
    def take(self):
        if looked.is_set():
            raise RuntimeError("a fault of ours")
        return super().take()

async def main():
    model, place = Model(Broken(MadeSwarm(2, start_at=1.8e9))), BoardPlace()
    bound = listening_socket(place)

    def recall():
        with urllib.request.urlopen(address(place, bound), timeout=100) as page:
            print("a page before the past:", page.status)
        looked.set()

    async with asyncio.timeout(120):
        await serve(model, BoardHistory(None), bound, recall=recall)

asyncio.run(main())
"""


def test_a_board_shows_itself_before_its_past_and_ends_aloud_when_it_can_learn_nothing_new() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 1
    assert "a page before the past: 200" in ended.stdout
    assert "RuntimeError: a fault of ours" in ended.stderr


def test_the_last_seconds_of_a_run_that_is_over_are_kept(tmp_path: Path) -> None:
    with Journal(tmp_path / "peers" / "p0" / "events.jsonl") as journal:
        journal.write(started(peer_id(0), at=1.0))
        for second in range(2, 40):
            journal.write(ev.Warned(at=float(second), peer=peer_id(0), text=f"at {second}"))
        end = ev.PeerFinished(at=39.1, peer=peer_id(0), reason="the run is over", digest="", versions=())
        journal.write(end)
    os.utime(tmp_path / "peers" / "p0" / "events.jsonl", (40.0, 40.0))
    history = BoardHistory(None)
    Recorder(Model(JournalFeed(tmp_path)), history).follow(time.time())
    newest, *_ = history.happenings(10)
    assert "finished" in newest.words
    history.close()


def test_a_peers_own_folder_says_which_run_it_is_of(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        journal.write(started(peer_id(0), at=time.time()))
    feed = JournalFeed(tmp_path)
    feed.take()
    assert feed.run is None
    run = RunConfig(name="first-run")
    for steps, text in (("000000000001", run.canonical_bytes().decode()), ("000000000002", "{")):
        place = tmp_path / "checkpoint" / f"state-{steps}-001"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"metadata": {"run": text}}), encoding="utf-8")
    feed = JournalFeed(tmp_path)
    feed.take()
    assert feed.run == run
