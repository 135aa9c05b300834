"""Buffers, such as batch-norm statistics, from a donor to a newcomer: they are in no fragment and in no mean,
so no digest names them, and one donor's are as good as another's.

Both sides in one, without I/O or clock. One donor after the other is asked for one chunk after the other; its
training thread is asked (``is_wanted``) for the values. Laws: sizes are what the newcomer computes from its
own model; every wait has a timer. Price: chunks may be of different moments, and a donor that lies is not
found out; the receiver looks only whether values are finite.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES, Outbox
from p2p_co2.protocol.catchup.manifest import chunk_at
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Refusal

BUFFERS = Fetch.BUFFERS
FIRST_REQUEST = 1 << 63
"""Requests of ours are numbered from here on: a refusal says of nothing else what it refuses."""
FRESH_S = 15.0
"""Values are given for so long, before the training thread is asked for newer ones."""
AGAIN_S, SILENT_S = 0.25, 10.0
"""A donor that wants to be asked again is, after the first; one that says nothing for the second is left."""


class Buffers:
    """``layout`` names order, shapes and dtypes (64 bits); ``size_bytes``: of all; 0 if there are none."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self.layout = self.size_bytes = 0
        self.is_wanted = False
        """Whether the training thread should ``publish``. It may ask at any time."""
        self._shared, self._shared_at, self._dropped_at = b"", -math.inf, math.inf
        """They are let go of when nobody has asked for ``FRESH_S``."""
        self._donors: deque[PeerId] = deque()
        self._taken, self._request = bytearray(), FIRST_REQUEST
        self._asked_at = self._again_at = self._silent_at = math.inf

    # ---- donor

    def publish(self, data: bytes, now: float) -> None:
        """The values as they are now; empty: there are none any more, and donors are asked elsewhere."""
        self._shared, self._shared_at, self.is_wanted = data, now, False
        self._dropped_at = now + FRESH_S
        if not data:
            self.layout = self.size_bytes = 0
            self._dropped_at = math.inf

    def _serve(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        place = chunk_at(fetch.chunk, self.size_bytes, LEAST_CHUNK_BYTES)
        if fetch.version != self.layout or not self.size_bytes:
            self._refuse(fetch, peer, "other buffers, or none")
        elif place.start >= self.size_bytes:
            raise RemoteProtocolError("unknown chunk", f"{fetch.chunk} of {self.size_bytes} bytes of buffers")
        elif not self._shared or (fetch.chunk == 0 and now - self._shared_at > FRESH_S):
            self.is_wanted = True
            self._refuse(fetch, peer, "not there yet", again=True)
        else:
            chunk = Chunk(request=fetch.request, what=BUFFERS, version=fetch.version, chunk=fetch.chunk)
            chunk.data = self._shared[place]
            self._dropped_at = now + FRESH_S
            self._out.send(peer, chunk)

    def _refuse(self, fetch: Fetch, peer: PeerId, reason: str, *, again: bool = False) -> None:
        self._out.send(peer, Refusal(request=fetch.request, reason=reason, again=again))

    # ---- newcomer

    def want(self, donors: Iterable[PeerId], now: float) -> None:
        """Ask these, one after the other, until one has given all; then ``taken`` has it."""
        self._donors, self._taken = deque(donors), bytearray()
        self._ask(now)

    @property
    def is_asking(self) -> bool:
        return bool(self._donors)

    @property
    def taken(self) -> bytes | bytearray:
        """All that was wanted; empty if nobody gave it, and after ``give_up``."""
        return b"" if self._donors or len(self._taken) != self.size_bytes else self._taken

    def give_up(self) -> None:
        """Ask no more, and let go of what was taken."""
        self._end()
        self._taken = bytearray()

    def _end(self) -> None:
        self._donors.clear()
        self._again_at = self._silent_at = math.inf

    def _ask(self, now: float) -> None:
        self._again_at, self._silent_at = math.inf, now + SILENT_S if self._donors else math.inf
        if self._donors:
            self._request += 1
            fetch = Fetch(what=BUFFERS, version=self.layout, want_chunk=True, request=self._request)
            fetch.chunk = len(self._taken) // LEAST_CHUNK_BYTES
            self._out.send(self._donors[0], fetch)

    def _ask_another(self, now: float) -> None:
        self._donors.popleft()
        self._taken.clear()
        self._ask(now)

    def _take(self, chunk: Chunk, now: float) -> None:
        start = len(self._taken)
        place = chunk_at(chunk.chunk, self.size_bytes, LEAST_CHUNK_BYTES)
        if place.start != start or len(chunk.data) != place.stop - place.start or not chunk.data:
            self._ask_another(now)
            raise RemoteProtocolError("wrong size", f"{len(chunk.data)} bytes of buffers at {start}")
        self._taken += chunk.data
        if len(self._taken) == self.size_bytes:
            self._end()
        else:
            self._ask(now)

    # ---- the machine

    def receive(self, message: Fetch | Chunk | Refusal, sender: PeerId, now: float) -> None:
        """Handle a message about buffers; raises ``RemoteProtocolError``."""
        if isinstance(message, Fetch):
            self._serve(message, sender, now)
        elif not self._donors or sender != self._donors[0] or message.request != self._request:
            return  # too late
        elif isinstance(message, Chunk):
            self._take(message, now)
        elif message.again:
            self._again_at = now + AGAIN_S
        else:
            self._ask_another(now)

    def handle_timer(self, now: float) -> None:
        if now >= self._dropped_at:
            self._shared, self._dropped_at = b"", math.inf
        if now >= self._silent_at:
            self._ask_another(now)
        elif now >= self._again_at:
            silent_at = self._silent_at
            self._ask(now)
            self._silent_at = silent_at  # one that only ever says "again" gives nothing either

    def get_timer(self) -> float | None:
        at = min(self._again_at, self._silent_at, self._dropped_at)
        return at if at < math.inf else None
