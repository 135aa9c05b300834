"""Messages that carry large data without its being copied into them and out of them again.

A protobuf message owns its bytes: 512 KiB would be copied when they are set, serialised, put into an
envelope, parsed and read, at 0.1 to 0.2 ms each. So on the way out the data lies beside its message until the
bytes that go out are joined; on the way in it is a view of the bytes that came.

Law: the bytes are plain protobuf of the one schema, with ``data`` as the last field of the body; what was
written in another way is read by protobuf alone, to the same values. Price: ``with_data`` returns a stand-in
that has the message's fields, to read, and what is defined here, and nothing else of a message.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.message import Message

from p2p_co2.protocol.wire.kinds import KINDS
from p2p_co2.protocol.wire.messages_pb2 import Envelope
from p2p_co2.system.memory import Buffer

M = TypeVar("M", bound=Message)
LEAST_BYTES = 4 << 10
"""Smaller data is parsed as quickly as it is found."""
MOST_FIELDS = 256
"""Fields in front of the data that are looked through: a Mean names ``MAX_MEMBERS`` contributors."""
_VARINT, _BYTES, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}
"""Wire types of protobuf, and how long a field of fixed length is."""
_MOST_SHIFT = 63


class _WithData:
    """A message of the schema and its data, which the message itself does not hold."""

    __slots__ = ("data", "message")

    def __init__(self, message: Message, data: Buffer) -> None:
        self.message, self.data = message, data

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
    """Where a body's data begins in its envelope, and the fields in front of it: the envelope's, and those of
    the body, which is the envelope's field ``body_number``."""

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
    envelope, place = Envelope(), _find(data)
    if place is None:
        envelope.ParseFromString(data)
        return envelope, None
    begun = _begun(place.body_number, len(place.fields))
    envelope.ParseFromString(b"".join((place.head, begun, place.fields)))
    return envelope, memoryview(data)[place.at :]


def body_of(envelope: Envelope, kind: str, data: memoryview | None) -> Any:
    """The envelope's body, with what lies beside it."""
    body = getattr(envelope, kind)
    return body if data is None else _WithData(body, data)


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
        number, wire_type, at = _key(data, at)
        if wire_type != _BYTES:
            at = _skipped(data, at, wire_type)
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


def _key(data: bytes, at: int) -> tuple[int, int, int]:
    """(number, wire type, where the field's content begins)."""
    key, at = _varint(data, at)
    return key >> 3, key & 7, at


def _skipped(data: bytes, at: int, wire_type: int) -> int:
    """Where the next field begins; 0 if that cannot be said."""
    if wire_type == _VARINT:
        return _varint(data, at)[1]
    return at + _FIXED_BYTES[wire_type] if wire_type in _FIXED_BYTES else 0


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
