"""What every carrier is: bytes between authenticated peers, in order, one direction per link.

Laws. A link carries messages of 1 to ``MAX_MESSAGE_BYTES`` bytes from the peer that dialled, in the order of
``send``, each at most once and unchanged. ``on_message`` of one link is awaited before its next message is
read, so a slow receiver slows its senders and nobody's memory grows. A link that brings no whole message
within ``MESSAGE_TIMEOUT_S`` is dropped. The sender is proved by a signature (``admission``) on a channel that
cannot be changed under way. Both ends notice at once when the other process dies.

Price: two links for a conversation. In return there is no question of who closes what, and each direction
may use another carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_MESSAGE_BYTES
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

CONNECT_TIMEOUT_S = HELLO_TIMEOUT_S = 10.0
"""Bound on one attempt to reach one address, and on a stranger's word who it is."""
MESSAGE_TIMEOUT_S = 60.0
"""A link must bring a whole message within this: peers that live say so every second. Who trickles byte by
byte holds a link and its buffer no longer."""
CLOSE_TIMEOUT_S = 2.0
"""How long ``Link.close`` waits for the other end to have taken everything, and a daemon's answer then."""

OnMessage = Callable[[PeerId, bytes], Coroutine[Any, Any, None]]
"""(sender, message). It may raise ``RemoteProtocolError``: the link is dropped and the error reported. It is
cancelled when the sender's link dies or the carrier closes while it waits."""
OnRefused = Callable[[PeerId | None, RemoteProtocolError], None]
"""(sender if it was proved, what it did): for counting and for the log."""


class Link(Protocol):
    """One way to one peer, ready to send."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def carrier(self) -> str: ...

    @property
    def way(self) -> str:
        """How the bytes travel, in words: "direct", or what is between."""

    @property
    def is_far(self) -> bool:
        """Whether it is a connection of its own to another machine or network: its bulk takes turns."""

    def look(self) -> Seen:
        """What the kernel knows of the way."""

    @property
    def acknowledged(self) -> Acknowledged | None:
        """What the peer says that it has of what was sent; None where ``send`` itself returns when the line
        takes a message, or where the peer does not say."""

    async def send(self, data: bytes) -> None:
        """Hand over one message; returns when there is room for the next.

        Calls from several tasks go out in the order of the calls. Cancelling it gives up the link. Raises
        ``PeerLost`` when the link is gone (what was sent before may be lost with it), ``LocalProtocolError``
        for a message that is empty or over ``MAX_MESSAGE_BYTES``.
        """

    async def close(self) -> None:
        """Say goodbye, wait up to ``CLOSE_TIMEOUT_S`` until the peer has taken all messages, give everything
        back."""

    async def wait_closed(self) -> str:
        """Wait until the link is gone; returns the cause in words. Safe to cancel."""


class Carrier(Protocol):
    """A way to reach peers and to be reached."""

    @property
    def name(self) -> str:
        """ "grpc" or "libp2p"."""

    async def start(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        """Begin to listen. Raises ``EnvironmentFault`` with the fix when this machine does not let us."""

    def keep_places(self, is_known: Callable[[PeerId], bool]) -> None:
        """Keep some places for peers of whom ``is_known`` says that they have worked with us."""

    async def connect(self, record: PeerRecord) -> Link:
        """Open a link to the peer of ``record``, in bounded time.

        Raises ``TransportError`` with the cause in words: nobody there, somebody else there, or refused. Safe
        to cancel.
        """

    async def close(self) -> None:
        """Drop all links, stop listening; no task, thread or socket of this carrier is left. May be called
        twice."""


def check_outgoing(data: bytes) -> None:
    """Raise ``LocalProtocolError`` for a message that no carrier may send."""
    if not 0 < len(data) <= MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a message of {len(data)} bytes; carriers take 1 to {MAX_MESSAGE_BYTES}")


def check_incoming(length_bytes: int) -> None:
    """Raise ``RemoteProtocolError`` for the length of a message that no peer may send."""
    if not 0 < length_bytes <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("wrong message size", f"{length_bytes} bytes; at most {MAX_MESSAGE_BYTES}")
