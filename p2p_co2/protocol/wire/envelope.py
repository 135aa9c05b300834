"""Messages as bytes: each in an envelope that names the protocol and the group.

Laws: what is sent is what ``Envelope(version, run, body=message)`` would be, byte for byte, but that data
comes last in its body (``bulk``). Nothing is taken out of what comes in before its size, version and group
are checked. Whoever keeps a message keeps little more in memory than what it says.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from google.protobuf.message import DecodeError, Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.wire import bulk
from p2p_co2.protocol.wire.kinds import KINDS, kind_of
from p2p_co2.protocol.wire.limits import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import Envelope
from p2p_co2.system.memory import Joined

Unsent = bytes | Joined
"""A message that may wait before it is sent: ``bytes(message)`` are its bytes, and nobody may change the data
that it was given until then."""
PADDING_BYTES = 4 << 10
"""A message may be so much longer than twice what this version understands of it."""
OTHER_GROUP = "other group"
"""Reason of ``opened`` for a message of another group: its sender has moved, and nobody is to blame."""


class Opened:
    """A message that came in: its ``kind`` and ``body``. Never written to: in a simulation all that receive
    the same bytes share it."""

    def __init__(self, envelope: Envelope, data: memoryview | None = None) -> None:
        """``data``: the body's, if it lies beside it. Raises ``RemoteProtocolError`` for no known kind."""
        kind = KINDS.get(envelope.WhichOneof("body") or "")
        if kind is None:
            raise RemoteProtocolError("unknown message", "no body that this version knows")
        self.kind = kind
        self.body: Any = bulk.body_of(envelope, kind.name, data)

    @cached_property
    def said(self) -> Any:
        """What the check of its kind has read. Raises ``RemoteProtocolError``."""
        return self.kind.check(self.body)


def opened(data: bytes, group: bytes) -> Opened:
    """A message of this version and group (its digest). Raises ``RemoteProtocolError``."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("too large", f"{len(data)} bytes")
    try:
        envelope, beside = bulk.parse(data)
    except DecodeError:
        raise RemoteProtocolError("unreadable", "not an Envelope") from None
    if envelope.version != PROTOCOL_VERSION:
        spoken = f"{envelope.version}, this peer speaks {PROTOCOL_VERSION}"
        raise RemoteProtocolError("unknown version", spoken)
    if envelope.run != group:
        raise RemoteProtocolError(OTHER_GROUP, envelope.run.hex()[:16])
    message = Opened(envelope, beside)
    if len(data) > message.kind.most_bytes:
        raise RemoteProtocolError("too large", f"a {message.kind.name} of {len(data)} bytes")
    _check_padding(envelope, len(data), 0 if beside is None else len(beside))
    return message


def group_of(data: bytes) -> bytes:
    """The digest of the group that a message is for, as it says; empty for one that cannot be read."""
    try:
        return bulk.parse(data)[0].run
    except DecodeError:
        return b""


def _check_padding(envelope: Envelope, size_bytes: int, beside_bytes: int) -> None:
    """A message that is kept keeps all of its envelope: what protobuf read, and the bytes behind data beside
    it. Unknown fields and fields that come twice are in no count of it."""
    if size_bytes - beside_bytes <= PADDING_BYTES:
        return
    envelope.DiscardUnknownFields()
    said_bytes = envelope.ByteSize() + beside_bytes
    if size_bytes > 2 * said_bytes + PADDING_BYTES:
        raise RemoteProtocolError("padded", f"{size_bytes} bytes that say no more than {said_bytes} would")


def head_of(group: bytes) -> bytes:
    """What all envelopes of a group begin with."""
    return Envelope(version=PROTOCOL_VERSION, run=group).SerializeToString()


def unsent(message: Message, head: bytes) -> Unsent:
    """An envelope behind its ``head``, written by hand: setting a field of a message copies what is set, and
    bodies are large. Data beside its message is not even copied to its place before the bytes are asked
    for."""
    body = bulk.serialised(message)
    pieces = head, _KEYS[message.__class__], bulk.varint(sum(map(len, body))), *body
    return b"".join(pieces) if len(body) == 1 else Joined(*pieces)


_KEYS = {kind.type: bulk.varint(kind.number << 3 | 2) for kind in KINDS.values()}
"""Key of the envelope's field; 2 is protobuf's wire type of an embedded message."""
__all__ = [
    "OTHER_GROUP", "Opened", "Unsent", "group_of", "head_of", "kind_of", "opened", "unsent",
]  # fmt: skip
