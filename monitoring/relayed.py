"""A feed through a peer of this machine: its board asks, the peer passes the questions on.

The board's process has no libp2p and no torch; it speaks to its peer over the socket pair that ``gate`` gave
it. Law: it asks its own peer always, and the others only while somebody looks (``watched``), so that a board
which only answers a scraper costs the swarm nothing. What comes back is signed by each peer and checked here
like any observer's.
"""

from __future__ import annotations

import socket
import threading
import time

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.protocol.reports import Poller
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Relayed
from p2p_co2.system.socket_activation import MAX_ASKED, receive_relayed, send_relayed
from p2p_co2.telemetry.feed import FeedState, News

LIST_EVERY_S = 5.0
WATCHED_FOR_S = 15.0
FIRST_ANSWER_S = 20.0
MAX_AT_ONCE = MAX_ASKED // 2
"""Questions in flight: a gate ends a program that asks too much, and a crowd of peers is not this one's
fault."""


class RelayedFeed:
    """See ``telemetry.feed.Feed``. ``relay`` is this process's end of the pair; closed by ``close``."""

    def __init__(self, relay: socket.socket) -> None:
        self._relay = relay
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._poller: Poller | None = None
        self._run: RunConfig | None = None
        self._me = ""
        self._asked: dict[int, PeerId] = {}
        self._next_id = 1
        self._watched_at = -1e9
        self._state = FeedState("connecting", "asking the peer of this machine")
        self.gone = threading.Event()
        """Set when the peer has ended: then there is nothing more to show."""
        relay.settimeout(None)
        for work in (self._receive, self._ask):
            threading.Thread(target=work, name="p2p-co2 relay", daemon=True).start()

    @property
    def run(self) -> RunConfig | None:
        return self._run

    @property
    def place(self) -> str:
        return f"seen by peer ~{self._me[-6:]} of this machine" if self._me else "this machine's peer"

    @property
    def state(self) -> FeedState:
        return self._state

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def me(self) -> str:
        """The peer that this board belongs to; "" until it is known."""
        return self._me

    def take(self) -> News:
        with self._lock:
            return self._poller.take() if self._poller is not None else News()

    def watched(self, now: float) -> None:
        self._watched_at = now

    def close(self) -> None:
        self.gone.set()
        try:
            self._relay.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster

    def _ask(self) -> None:
        listed_at = -1e9
        while not self.gone.wait(0.1):
            now = time.monotonic()
            if now - listed_at > LIST_EVERY_S:
                listed_at = now
                self._post(Relayed(id=0))
            with self._lock:
                room = MAX_AT_ONCE - len(self._asked)
                due = self._poller.due(now, room) if self._poller is not None else []
                for peer, question in due:
                    self._asked[self._next_id] = peer
                    self._post(Relayed(id=self._next_id, peer=peer, request=question))
                    self._next_id += 1

    def _post(self, message: Relayed) -> None:
        try:
            with self._sending:
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
                self._state = FeedState("lost", "the peer of this machine has ended")
                self.gone.set()
                return
            self._take(message)

    def _take(self, message: Relayed) -> None:
        now, unix_now = time.monotonic(), time.time()
        with self._lock:
            if message.id == 0:
                self._listed(message, now, unix_now)
                return
            peer = self._asked.pop(message.id, None)
            if peer is None or self._poller is None:
                return
            if message.trouble:
                self._poller.failed(peer, message.trouble, now, unix_now)
            else:
                self._poller.answered(peer, message.answer, now, unix_now)
            words = f"{self._poller.answering} of {len(self._poller)} peers answer"
            self._state = FeedState("connected", words)

    def _listed(self, message: Relayed, now: float, unix_now: float) -> None:
        """The peers that ours knows, itself first, and the run's settings."""
        if message.trouble or not message.peers:
            self._state = FeedState("connecting", message.trouble or "the peer is still joining")
            return
        if self._poller is None:
            try:
                self._run = RunConfig.from_canonical_bytes(message.answer)
            except ConfigError as error:
                self._state = FeedState("lost", str(error))
                return
            self._me = message.peers[0]
            self._poller = Poller(self._run.digest())
        others = message.peers[1:] if now - self._watched_at < WATCHED_FOR_S else []
        self._poller.listed([PeerId(peer) for peer in (self._me, *others)], now, unix_now)
