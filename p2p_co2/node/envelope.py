"""Messages as bytes: each in an envelope that names the protocol and the run.

Laws: what is sent is what ``Envelope(version, run, body=message)`` would be, byte for byte, but that data
comes last in its body (``wire.bulk``); nothing is taken out of what comes in before its size, version and run
are checked. Who keeps a message keeps little more in memory than what it says (``_check_padding``).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from google.protobuf.message import DecodeError, Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.wire import bulk
from p2p_co2.protocol.wire.limits import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import Envelope
from p2p_co2.protocol.wire.status import PeerStatus, read_status
from p2p_co2.system.memory import Joined

Unsent = bytes | Joined
"""A message that may wait before it is sent: ``bytes(message)`` are its bytes, and nobody may change the data
that it was given until then."""
PADDING_BYTES = 4 << 10
"""A message may be so much longer than twice what this version understands of it."""


class Opened:
    """A message that came in: ``kind``, the name of the envelope's field (empty if this version knows none),
    and ``body``. Never written to: in a simulation all who receive the same bytes share it."""

    def __init__(self, envelope: Envelope, data: memoryview | None = None) -> None:
        """``data``: the body's, if it lies beside it."""
        self.kind: str = envelope.WhichOneof("body") or ""
        self.body: Any = bulk.body_of(envelope, self.kind, data) if self.kind else None

    @cached_property
    def status(self) -> PeerStatus:
        """Of a ping or pong: what it says of its sender. Raises ``RemoteProtocolError``."""
        return read_status(self.body.status)


def opened(data: bytes, run: bytes) -> Opened:
    """A message of this version and run. Raises ``RemoteProtocolError``."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("too large", f"{len(data)} bytes")
    try:
        envelope, beside = bulk.parse(data)
    except DecodeError:
        raise RemoteProtocolError("unreadable", "not an Envelope") from None
    if envelope.version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            "unknown version", f"{envelope.version}, this peer speaks {PROTOCOL_VERSION}"
        )
    if envelope.run != run:
        raise RemoteProtocolError("another run", envelope.run.hex()[:16])
    _check_padding(envelope, len(data), 0 if beside is None else len(beside))
    return Opened(envelope, beside)


def _check_padding(envelope: Envelope, size_bytes: int, beside_bytes: int) -> None:
    """A message that is kept (a READY, a piece that came early) keeps all of its envelope: what protobuf
    read, and the bytes behind data beside it. Unknown fields and fields that come twice are in no count of
    it."""
    if size_bytes - beside_bytes <= PADDING_BYTES:
        return
    envelope.DiscardUnknownFields()
    said_bytes = envelope.ByteSize() + beside_bytes
    if size_bytes > 2 * said_bytes + PADDING_BYTES:
        raise RemoteProtocolError("padded", f"{size_bytes} bytes that say no more than {said_bytes} would")


def kind_of(message: Message) -> str:
    """The name of the envelope's field that a message goes into."""
    return _FIELD_OF_TYPE[message.__class__][0]


def enveloped(message: Message, head: bytes) -> bytes:
    """The bytes of an envelope behind its ``head`` (version and run, serialised)."""
    return bytes(unsent(message, head))


def unsent(message: Message, head: bytes) -> Unsent:
    """The same, written by hand: setting a field of a message copies what is set, and bodies are large. Data
    beside its message is not even copied to its place before the bytes are asked for."""
    body = bulk.serialised(message)
    size = sum(map(len, body))
    pieces = head, _FIELD_OF_TYPE[message.__class__][1], bulk.varint(size), *body
    return b"".join(pieces) if len(body) == 1 else Joined(*pieces)


_FIELD_OF_TYPE = {
    type(getattr(Envelope(), field.name)): (field.name, bulk.varint(field.number << 3 | 2))
    for field in Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
}
"""Name and key of the envelope's field; 2 is protobuf's wire type of an embedded message."""
