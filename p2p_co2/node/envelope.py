"""Messages as bytes: each in an envelope that names the protocol and the run.

Law: what is sent is what ``Envelope(version, run, body=message)`` would be, byte for byte.
"""

from __future__ import annotations

from google.protobuf.message import Message

from p2p_co2.wire.messages_pb2 import Envelope


def kind_of(message: Message) -> str:
    """The name of the envelope's field that a message goes into."""
    return _FIELD_OF_TYPE[type(message)].name


def enveloped(message: Message, head: bytes) -> bytes:
    """The bytes of an envelope, joined by hand to its ``head`` (version and run, serialised): setting a field
    of a message copies what is set, and bodies are large."""
    body = message.SerializeToString()
    key = _FIELD_OF_TYPE[type(message)].number << 3 | 2  # protobuf's wire type of an embedded message
    return b"".join((head, _varint(key), _varint(len(body)), body))


def _varint(number: int) -> bytes:
    """Protobuf's variable-length integer."""
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


_FIELD_OF_TYPE = {
    type(getattr(Envelope(), field.name)): field
    for field in Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
}
