"""Messages as the bytes of an envelope, for tests that look at bytes or change them."""

from __future__ import annotations

from google.protobuf.message import Message

from p2p_co2.wire.envelope import unsent


def enveloped(message: Message, head: bytes) -> bytes:
    """The bytes of an envelope behind its ``head``."""
    return bytes(unsent(message, head))
