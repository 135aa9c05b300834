"""Messages as bytes: each in an envelope that names the protocol and the group, large data beside it.

A protobuf message owns its bytes, so large data would be copied five times on its way. On the way out it lies
beside its message until the bytes that go out are joined. On the way in it is a view of the bytes that came.

Laws: what is sent is what ``Envelope(version, run, body=message)`` would be, but that ``data`` is the last
field of its body. What was written in another way is read by protobuf alone, to the same values. Nothing is
taken out of what comes in before its size, version and group are checked. Whoever keeps a message keeps
little more in memory than what it says. Price: ``with_data`` returns a stand-in that has the message's
fields, to read, and what is defined here, and nothing else of a message.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.system.memory import Buffer, JoinedBuffers
from p2p_co2.wire.kinds import KINDS
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope

Unsent = bytes | JoinedBuffers
"""A message that may wait before it is sent: ``bytes(message)`` are its bytes, and nobody may change the data
that it was given until then."""
PADDING_BYTES = 4 << 10
"""A message may be so much longer than twice what this version understands of it."""


class Opened:
    """A message that came in: its ``kind`` and ``body``. Never written to: in a simulation all that receive
    the same bytes share it."""

    def __init__(self, envelope: Envelope, data: memoryview | None = None) -> None:
        """``data``: the body's, if it lies beside it. Raises ``RemoteProtocolError`` for no known kind."""
        kind = KINDS.get(envelope.WhichOneof("body") or "")
        if kind is None:
            raise RemoteProtocolError(Offence.UNKNOWN_MESSAGE, "no body that this version knows")
        self.kind = kind
        body = getattr(envelope, kind.name)
        self.body: Any = body if data is None else _WithData(body, data)

    @cached_property
    def said(self) -> Any:
        """What the check of its kind has read. Raises ``RemoteProtocolError``."""
        return self.kind.check(self.body)


def opened(data: bytes, group: bytes) -> Opened:
    """A message of this version and group (its digest). Raises ``RemoteProtocolError``."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(Offence.TOO_LARGE, f"{len(data)} bytes")
    try:
        envelope, beside = parse(data)
    except DecodeError:
        raise RemoteProtocolError(Offence.UNREADABLE, "not an Envelope") from None
    if envelope.version != PROTOCOL_VERSION:
        spoken = f"{envelope.version}, this peer speaks {PROTOCOL_VERSION}"
        raise RemoteProtocolError("unknown version", spoken)
    if envelope.run != group:
        raise RemoteProtocolError(Offence.OTHER_GROUP, envelope.run.hex()[:16])
    message = Opened(envelope, beside)
    if len(data) > message.kind.most_bytes:
        raise RemoteProtocolError(Offence.TOO_LARGE, f"a {message.kind.name} of {len(data)} bytes")
    _check_padding(envelope, len(data), 0 if beside is None else len(beside))
    return message


def group_of(data: bytes) -> bytes:
    """The digest of the group that a message is for, as it says; empty for one that cannot be read."""
    try:
        return parse(data)[0].run
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
        raise RemoteProtocolError(Offence.PADDED, f"{size_bytes} bytes that say what {said_bytes} would")


def head_of(group: bytes) -> bytes:
    """What all envelopes of a group begin with."""
    return Envelope(version=PROTOCOL_VERSION, run=group).SerializeToString()


def unsent(message: Message, head: bytes) -> Unsent:
    """An envelope behind its ``head``, written by hand: setting a field of a message copies what is set, and
    bodies are large. Data beside its message is not even copied to its place before the bytes are asked
    for."""
    body = serialised(message)
    pieces = head, _KEYS[message.__class__], varint(sum(map(len, body))), *body
    return b"".join(pieces) if len(body) == 1 else JoinedBuffers(*pieces)


# ---- data beside its message

M = TypeVar("M", bound=Message)
LEAST_BYTES = 4 << 10
"""Smaller data is parsed as quickly as it is found."""
MOST_FIELDS = 256
"""Fields in front of the data that are looked through: a Mean names ``MAX_MEMBERS`` contributors."""
_VARINT = 0
_BYTES = 2
"""Wire types of protobuf."""
_FIXED_BYTES = {1: 8, 5: 4}
"""How long a field of fixed length is, by wire type."""
_MOST_SHIFT = 63


class _WithData:
    """A message of the schema and its data, which the message itself does not hold."""

    __slots__ = ("data", "message")

    def __init__(self, message: Message, data: Buffer) -> None:
        self.message = message
        self.data = data

    @property  # type: ignore[misc]
    def __class__(self) -> type[Message]:  # type: ignore[override]
        return type(self.message)

    def __getattr__(self, name: str) -> Any:
        if name not in self.message.DESCRIPTOR.fields_by_name:
            raise AttributeError(f"a message with its data beside it has no {name}")
        return getattr(self.message, name)

    def __repr__(self) -> str:
        return f"{self.message!r}data: {len(self.data)} bytes"

    def SerializeToString(self) -> bytes:
        return b"".join(serialised(cast(Message, self)))

    def ByteSize(self) -> int:
        return sum(map(len, serialised(cast(Message, self))))


class _Place(NamedTuple):
    """Where a body's data begins in its envelope. ``head`` and ``fields``: what is in front of it, of the
    envelope and of the body, which is the envelope's field ``body_number``."""

    at: int
    head: bytes
    body_number: int
    fields: bytes


def with_data(message: M, data: Buffer) -> M:
    """``message``, which is written to no more, with ``data`` beside it. Nothing is copied, so nobody may
    change the data either until the message has gone out."""
    return cast(M, _WithData(message, data))


def serialised(message: Message) -> tuple[Buffer, ...]:
    """The serialised message, in buffers to be joined."""
    if not isinstance(message, _WithData):
        return (message.SerializeToString(),)
    begun = _begun(_DATA_FIELDS[type(message.message)], len(message.data))
    return message.message.SerializeToString(), begun, message.data


def parse(data: bytes) -> tuple[Envelope, memoryview | None]:
    """The envelope, and what lies beside its body: the body's data, a view of ``data``, if it is large and
    comes last; else None. Raises protobuf's ``DecodeError``."""
    envelope = Envelope()
    place = _find(data)
    if place is None:
        envelope.ParseFromString(data)
        return envelope, None
    begun = _begun(place.body_number, len(place.fields))
    envelope.ParseFromString(b"".join((place.head, begun, place.fields)))
    return envelope, memoryview(data)[place.at :]


def varint(number: int) -> bytes:
    """Protobuf's variable-length integer."""
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def _find(data: bytes) -> _Place | None:
    """The data of a message that ends with it."""
    if len(data) < LEAST_BYTES:
        return None
    body: tuple[int, int, int] | None = None
    at = 0
    for _ in range(MOST_FIELDS):
        field_at = at
        key, at = _varint(data, at)
        number = key >> 3
        wire_type = key & 7
        if wire_type == _VARINT:
            at = _varint(data, at)[1]
        elif wire_type != _BYTES:
            at = at + _FIXED_BYTES[wire_type] if wire_type in _FIXED_BYTES else 0  # 0: it cannot be said
        else:
            size, at = _varint(data, at)
            if at + size == len(data) and data[field_at:at] == _begun(number, size):
                if body is None and number in _BODY_FIELDS:
                    body = number, field_at, at
                    continue
                if body is not None and number == _BODY_FIELDS[body[0]] and size >= LEAST_BYTES:
                    body_number, head_stop, body_at = body
                    return _Place(at, data[:head_stop], body_number, data[body_at:field_at])
            at += size
        if not field_at < at < len(data):
            return None
    return None


def _begun(number: int, size: int) -> bytes:
    """A field's key and size, written as shortly as they can be."""
    return varint(number << 3 | _BYTES) + varint(size)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends); it ends past the data where it is none."""
    value = shift = 0
    while at < len(data) and shift <= _MOST_SHIFT:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, len(data)


_PIECES = [kind for kind in KINDS.values() if kind.role is not None]
_DATA_FIELDS = {kind.type: kind.type.DESCRIPTOR.fields_by_name["data"].number for kind in _PIECES}
_BODY_FIELDS = {kind.number: _DATA_FIELDS[kind.type] for kind in _PIECES}
"""The number of ``data`` by that of the envelope's field whose message has one."""
_KEYS = {kind.type: varint(kind.number << 3 | 2) for kind in KINDS.values()}
"""Key of the envelope's field; 2 is protobuf's wire type of an embedded message."""
