"""Buffers, such as batch-norm statistics, from a peer that trains to a newcomer, chunk by chunk.

They are in no fragment and in no mean, so no digest names them, and one donor's are as good as another's.
Both sides in one, without I/O or clock; the caller bounds how long a donor is waited for.

Laws: sizes are what the newcomer computes from its own model; an empty chunk means that the donor gives
none. Price: a donor that lies is not found out; the receiver looks only whether values are finite.
"""

from __future__ import annotations

import math

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.donor import LOADS_S
from p2p_co2.protocol.catchup.goals import BUFFERS, Outbox
from p2p_co2.protocol.catchup.manifest import chunk_at
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Fetch

MAX_ASKING = 8
"""Newcomers that wait for this peer's training thread; more are sent elsewhere."""


class Buffers:
    """``layout`` names order, shapes and dtypes (64 bits); ``size_bytes``: of all; 0 if there are none."""

    def __init__(self, chunk_bytes: int, out: Outbox) -> None:
        self._chunk_bytes = chunk_bytes
        self._out = out
        self.layout = self.size_bytes = 0
        self._published = b""
        self._published_at = -math.inf
        self._asking = dict[PeerId, Fetch]()
        self._donor: PeerId | None = None
        self._taken = bytearray()

    # ---- donor

    @property
    def is_wanted(self) -> bool:
        """Whether the training thread should ``publish``. Any thread."""
        return bool(self._asking)

    def publish(self, data: bytes, now: float) -> None:
        """The values as they are now, given for ``LOADS_S`` and kept until the next ones; empty: there are
        none from now on."""
        self._published = data
        self._published_at = now
        if not data:
            self.size_bytes = 0
        asking = self._asking
        self._asking = {}
        for peer, fetch in asking.items():
            self._serve(fetch, peer, now)

    def _serve(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        place = chunk_at(fetch.chunk, self.size_bytes, self._chunk_bytes)
        is_fresh = fetch.chunk or now - self._published_at <= LOADS_S
        chunk = Chunk(request=fetch.request, what=BUFFERS, version=fetch.version, chunk=fetch.chunk)
        if self.size_bytes and fetch.version == self.layout:
            if place.start == place.stop:
                raise RemoteProtocolError("unknown chunk", f"{fetch.chunk} of {self.size_bytes} bytes")
            if not (self._published and is_fresh) and len(self._asking) < MAX_ASKING:
                self._asking[peer] = fetch
                return
            chunk.data = self._published[place]
        self._out.send(peer, chunk)

    # ---- newcomer

    def ask(self, donor: PeerId) -> None:
        """Forget what came, and ask ``donor`` for all, one chunk after the other."""
        self._donor = donor
        self._taken = bytearray()
        self._ask_next()

    @property
    def is_asking(self) -> bool:
        return self._donor is not None

    def take(self) -> bytearray:
        """All that the donor gave, empty if it has not given all. It is asked no more."""
        taken = self._taken
        self._taken = bytearray()
        self._donor = None
        return taken if len(taken) == self.size_bytes else bytearray()

    def _ask_next(self) -> None:
        if self._donor is not None:
            chunk = len(self._taken) // self._chunk_bytes
            fetch = Fetch(what=BUFFERS, version=self.layout, want_chunk=True, chunk=chunk)
            self._out.send(self._donor, fetch)

    def _receive_chunk(self, chunk: Chunk) -> None:
        place = chunk_at(chunk.chunk, self.size_bytes, self._chunk_bytes)
        is_next = place.start == len(self._taken) and len(chunk.data) == place.stop - place.start
        if not is_next:
            self.take()
            if chunk.data:
                raise RemoteProtocolError("wrong size", f"{len(chunk.data)} bytes of buffers")
            return
        self._taken += chunk.data
        if len(self._taken) == self.size_bytes:
            self._donor = None
        else:
            self._ask_next()

    def receive(self, message: Fetch | Chunk, sender: PeerId, now: float) -> None:
        """Handle a message about buffers; raises ``RemoteProtocolError``."""
        if isinstance(message, Fetch):
            self._serve(message, sender, now)
        elif sender == self._donor and message.version == self.layout:
            self._receive_chunk(message)
