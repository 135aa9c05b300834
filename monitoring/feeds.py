"""Feeds: a run's journals on this disk, a peer of this machine that passes questions on, a past in memory.

See ``telemetry.feed.Feed``; ``node.reporting`` has the one over the network.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from monitoring.history import TIERS
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault, TicketError
from p2p_co2.node.credit import last_counted
from p2p_co2.protocol.reports import Poller
from p2p_co2.system.process import is_kept
from p2p_co2.system.socket_activation import MAX_ASKED, receive_relayed, send_relayed
from p2p_co2.telemetry.events import Event, PeerFinished, PeerStarted
from p2p_co2.telemetry.feed import Feed, FeedState, News, Sighting
from p2p_co2.telemetry.journal import Tail
from p2p_co2.ticket import MAX_TICKET_CHARACTERS, Ticket
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Relayed

MAX_JOURNALS = 1024
QUIET_S = 15.0
"""A run whose journals do not grow for so long, and whose peers have finished or died, is over. Where no lock
tells whether they live, it takes twenty times as long. Nobody looks at a board that was not asked for it."""
MAX_AT_ONCE = MAX_ASKED // 2
"""Questions in flight: ``SocketActivation`` ends a program that asks too much, and a crowd of peers is not
this one's fault."""


class PastFeed(Feed):
    """``events`` of a run that is over, those of peer ``me``."""

    is_whole = True
    state = FeedState("ended")

    def __init__(self, events: Sequence[Event], run: RunConfig | None, me: str) -> None:
        self._events = list(events)
        self.run = run
        self.me = me

    def take(self) -> News:
        events = self._events
        self._events = []
        return News(events)


def read_ticket(*folders: Path) -> str:
    """The open part of the first ticket that lies in one of ``folders`` (a peer's, a seed's), "" if none
    does."""
    for path in (folder / "ticket" for folder in folders):
        with contextlib.suppress(OSError, ValueError, TicketError), path.open(encoding="ascii") as file:
            return str(Ticket.parse(file.read(MAX_TICKET_CHARACTERS)).open_part)
    return ""


def run_of(folder: Path) -> RunConfig | None:
    """The run that the newest checkpoint of a peer's folder is of; None if none tells."""
    for path in sorted(folder.glob("checkpoint/state-*/manifest.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
            text = json.loads(path.read_text(encoding="utf-8"))["metadata"]["run"]
            return RunConfig.from_canonical_bytes(text.encode())
    return None


class JournalFeed(Feed):
    """``folder`` is a run's (``events.jsonl`` of each peer below ``peers/``, or one merged file), or one
    peer's. Files are only read, and followed while they grow; each look stats every journal.

    Raises ``EnvironmentFault`` if there is no such folder, ``ConfigError`` for a ``run.toml`` that is none.
    """

    is_whole = True
    state = FeedState("connected", "no peer has written an event yet")

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise EnvironmentFault(f"there is no folder {folder}; name a run's folder, or a ticket")
        run_file = folder / "run.toml"
        self.run = read_run_config(run_file) if run_file.exists() else None
        self.place = f"journals in {folder.resolve().name}"
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self._looked_at = -math.inf
        self._grew_at = 0.0
        """When the youngest journal grew, unix seconds."""
        self._open: dict[str, bool] = {}
        """By peer that was seen: whether a process of its has not finished."""

    def take(self) -> News:
        news = News()
        is_due = time.monotonic() - self._looked_at > TIERS[0][0]
        if is_due:
            self._looked_at = time.monotonic()
            self.run = self.run or run_of(self._folder)
            single = sorted(self._folder.glob("peers/*/events.jsonl")) or [self._folder / "events.jsonl"]
            for path in single[:MAX_JOURNALS]:
                if path not in self._tails and path.exists():
                    self._tails[path] = Tail(path)
        for tail in self._tails.values():
            news.events += tail.new_events()
        for event in news.events:
            if event.peer not in self._open:
                news.sightings.append(Sighting(event.peer, "answering"))
            ends = isinstance(event, PeerFinished)
            starts = isinstance(event, PeerStarted)
            self._open[event.peer] = not ends and (starts or self._open.get(event.peer, False))
        if len(self._open) == 1 and (self._folder / "lock").exists():  # a peer's own folder
            self.me = next(iter(self._open))
        for path in self._tails if news.events else ():
            with contextlib.suppress(OSError):  # a peer's folder was cleared away while the others write
                self._grew_at = max(self._grew_at, path.stat().st_mtime)
        if self._open and (news.events or is_due):
            self.state = self._state(time.time() - self._grew_at)
        return news

    def invitation(self) -> str:
        return read_ticket(self._folder, *sorted(self._folder.glob("peers/*"))[:MAX_JOURNALS])

    def _state(self, quiet_s: float) -> FeedState:
        count = sum(self._open.values())
        if quiet_s > QUIET_S and not count:
            return FeedState("ended", "the run is over: every peer has finished")
        # By the locks of the peers' folders: some writer's process lives, or none can tell, as in a copy.
        kept = {is_kept(path.parent) for path in self._tails} if quiet_s > QUIET_S else {True}
        if True not in kept and False in kept:
            return FeedState("ended", "the run is over: of those who wrote it no process lives any more")
        if quiet_s > 20 * QUIET_S:
            return FeedState("ended", "the journals have not grown for long: whoever wrote them is gone")
        return FeedState("connected", f"{count} of {len(self._open)} peers are writing")


class RelayedFeed(Feed):
    """A feed through a peer of this machine, which passes the questions of its board on. ``relay``: the
    board's end of the socket pair. ``gone`` is set when the peer has ended. ``folder``: the peer's, where its
    ticket lies. Law: it asks its own peer always, and the others only while somebody looks (``watched``).
    What comes back is signed by each peer and checked here like any observer's."""

    place = "this machine's peer"
    state = FeedState("connecting", "asking the peer of this machine")

    def __init__(self, relay: socket.socket, folder: Path | None = None) -> None:
        self.gone = threading.Event()
        self.folder = folder
        self._relay = relay
        self._lock = threading.Lock()
        self._poller: Poller | None = None
        self._asked: dict[int, PeerId] = {}
        self._watched_at = -math.inf
        relay.settimeout(None)
        for work in (self._receive, self._ask):
            threading.Thread(target=work, name="p2p-co2 relay", daemon=True).start()

    def take(self) -> News:
        with self._lock:
            return self._poller.take() if self._poller is not None else News()

    def watched(self, now: float) -> None:
        self._watched_at = now

    def invitation(self) -> str:
        return read_ticket(self.folder) if self.folder is not None else ""

    def tokens_in_model(self) -> float | None:
        last = last_counted(self.folder) if self.folder is not None else None
        return last.tokens_so_far if last is not None else None

    def close(self) -> None:
        self.gone.set()
        with contextlib.suppress(OSError):  # the peer was faster
            self._relay.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> None:
        """The only thread that sends: who is there (0), and then each of them."""
        listed_at = -math.inf
        numbers = itertools.count(1)
        while not self.gone.wait(0.1):
            now = time.monotonic()
            questions = []
            if now - listed_at > QUIET_S / 3:
                listed_at = now
                questions.append(Relayed(id=0))
            with self._lock:
                room = MAX_AT_ONCE - len(self._asked)
                due = self._poller.due(now, room) if self._poller is not None else []
                for (peer, question), number in zip(due, numbers, strict=False):
                    self._asked[number] = peer
                    questions.append(Relayed(id=number, peer=peer, request=question))
            try:
                for message in questions:
                    send_relayed(self._relay, message)
            except OSError:
                self.gone.set()

    def _receive(self) -> None:
        while not self.gone.is_set():
            try:
                message = receive_relayed(self._relay)
            except OSError:
                message = None
            if message is None:
                self.state = FeedState("lost", "the peer of this machine has ended")
                self.gone.set()
                return
            with self._lock:
                if message.id == 0:
                    self._listed(message, time.monotonic())
                else:
                    self._answered(message, time.monotonic())

    def _answered(self, message: Relayed, now: float) -> None:
        peer = self._asked.pop(message.id, None)
        if peer is None or self._poller is None:
            return
        if message.trouble:
            self._poller.failed(peer, message.trouble, now)
        else:
            self._poller.answered(peer, message.answer, now, time.time())
        words = f"{self._poller.counted('answering')} of {len(self._poller)} peers answer"
        self.state = FeedState("connected", words)

    def _listed(self, message: Relayed, now: float) -> None:
        """The peers that ours knows, itself first, and the run's settings."""
        if message.trouble or not message.peers:
            self.state = FeedState("connecting", message.trouble or "the peer is still joining")
            return
        if self._poller is None:
            try:
                self.run = RunConfig.from_canonical_bytes(message.answer)
            except ConfigError as error:
                self.state = FeedState("lost", str(error))
                return
            self.me = message.peers[0]
            self.place = "seen by the peer of this machine"
            self._poller = Poller(self.run.digest())
        others = message.peers[1:] if now - self._watched_at < QUIET_S else []
        self._poller.listed([PeerId(peer) for peer in (self.me, *others)], now)
