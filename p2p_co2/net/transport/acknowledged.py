"""What the other end of a link says it has, and how much may be under way to it: arithmetic on times that are
handed in.

A daemon between us and the line takes megabytes into its own buffers at once. Without a word from the other
end all of that counts as sent: a home line seems to carry hundreds of megabytes a second, and a heartbeat
waits behind seconds of bulk. So the receiver says how many bytes of messages it has read, and bulk waits for
room: as much may be under way as keeps what comes behind it waiting for about ``WAITING_S`` more than the way
itself takes. That much is found as LEDBAT finds it (RFC 6817): the room grows by what arrives sooner and
shrinks by what arrives later, so that it doubles within a round trip where the line is empty.

Laws: nobody has more than was sent, nor less than before (``RemoteProtocolError``); so a receiver that lies
can hold up what goes to itself, as one that does not read always could, and can seem as fast as we hand over,
and no faster. Price: the receiver's word is 14 bytes, at most every ``SAY_EVERY_S``; what arrives late
because this machine is busy also shrinks the room, down to ``LEAST_BYTES``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from p2p_co2.errors import RemoteProtocolError

SAY_EVERY_S = 0.01
"""A receiver says what it has at most this often."""
WAITING_S = 0.25
LEAST_BYTES, MOST_BYTES = 32 << 10, 32 << 20
"""Room that there always is, and that there is at most."""
MOST_MESSAGES = 4096
"""Told apart under way: control messages go to a receiver that never says what it has, too."""
_MAX_DIGITS = 18


class Acknowledged:
    """Of one link, from its first message on."""

    def __init__(self) -> None:
        self.sent_bytes = self.arrived_bytes = 0
        """Of messages: handed over, and known to be there."""
        self.room_bytes = float(LEAST_BYTES)
        self.on_news: Callable[[], None] = _nothing
        """Called when more has arrived."""
        self._messages: deque[tuple[int, float, bool]] = deque()
        """Of those under way: bytes sent up to its end, when it was sent, whether the room was used."""
        self._quickest_s = math.inf
        """The shortest way so far: what is more is waiting."""

    @property
    def has_room(self) -> bool:
        """Whether bulk may be handed over."""
        return self.sent_bytes - self.arrived_bytes < self.room_bytes

    def sent(self, size_bytes: int, now: float) -> None:
        """A message is handed over."""
        self.sent_bytes += size_bytes
        was_used = 2 * (self.sent_bytes - self.arrived_bytes) >= self.room_bytes
        if len(self._messages) == MOST_MESSAGES:
            self._messages.pop()  # its bytes are there when this one's are
        self._messages.append((self.sent_bytes, now, was_used))

    def hear(self, said: bytes, now: float) -> None:
        """Take the other end's word: decimal digits. Raises ``RemoteProtocolError`` for one that cannot be
        true."""
        if not said.isdigit() or len(said) > _MAX_DIGITS:
            raise RemoteProtocolError("wrong acknowledgement", "not a number of bytes")
        total_bytes = int(said)
        if not self.arrived_bytes <= total_bytes <= self.sent_bytes:
            detail = f"{total_bytes} bytes; {self.sent_bytes} were sent and {self.arrived_bytes} there before"
            raise RemoteProtocolError("wrong acknowledgement", detail)
        if total_bytes == self.arrived_bytes:
            return
        while self._messages and self._messages[0][0] <= total_bytes:
            end_bytes, sent_at, was_used = self._messages.popleft()
            self._adjust(end_bytes - self.arrived_bytes, now - sent_at, was_used)
            self.arrived_bytes = end_bytes
        self.arrived_bytes = total_bytes
        self.on_news()

    def _adjust(self, size_bytes: int, took_s: float, was_used: bool) -> None:
        self._quickest_s = min(self._quickest_s, took_s)
        early = max(-1.0, 1 - (took_s - self._quickest_s) / WAITING_S)
        if early < 0 or was_used:
            self.room_bytes = min(MOST_BYTES, max(LEAST_BYTES, self.room_bytes + early * size_bytes))


def _nothing() -> None:
    """Nobody listens."""
