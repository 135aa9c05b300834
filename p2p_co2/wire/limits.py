"""Security limits of the wire: what a peer may make us hold or parse. Each bound has its name here."""

from __future__ import annotations

PROTOCOL_VERSION = 9
MAX_MESSAGE_BYTES = 1 << 20
"""A carrier refuses a larger message before it is allocated."""
MAX_PIECE_BYTES = 992 << 10
"""Payload bytes in one Part or Mean message; what is left is for those that they name."""
MAX_DATA_BYTES = 512 << 10
"""Of a state, in one Chunk message."""
MAX_STATUS_BYTES = 32 << 10
"""A Ping, Pong or Leave: what they say of a peer is kept for as long as it lives."""
MAX_MEMBERS = 64
MAX_FRAGMENTS = 256
MAX_STAGES = 32
"""Into which a model may be cut."""
MAX_VERSION = 1 << 48
"""Rounds that one fragment may ever make."""
MAX_PEERS = 4096
"""Peer records read from the DHT."""
MAX_RECORD_BYTES = 8 << 10
"""A DHT value."""
MAX_ADDRESSES = 16
"""Of one kind in a record."""
MAX_DIALLED = 4
"""Of these, those that are dialled."""
MAX_REVOKED = 1024
"""Persons whose tickets were revoked, and have not expired."""
MAX_REVOCATION_BYTES = 40 << 10
MAX_STRING = 512
MAX_PEER_ID = 64
"""Characters of a peer id."""
HELLO_WINDOW_S = 120.0
"""A link hello older or newer than this is refused as a replay."""
