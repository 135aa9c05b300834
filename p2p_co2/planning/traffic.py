"""Bytes that a round moves: payloads by the codec's arithmetic, the rest by the sizes of messages.

Counted is what a peer's ``up_bytes`` counts: whole messages, the fixed ones measured on real ones of the
schema. ``LINK_OVERHEAD`` is what the carriers, TLS, TCP and IP add on the wire. No replays, no second
attempts, nothing that a peer fetches because it fell behind."""

from __future__ import annotations

from collections.abc import Sequence

from p2p_co2.wire.heartbeat import heartbeat_among_s, measure_every_s, quiet_beat_s
from p2p_co2.wire.limits import MAX_PIECE_BYTES

LINK_OVERHEAD = 1.04
"""Bytes on the link per byte of messages: 40 of TCP and IP in 1,500, TLS 22 in 16,384, HTTP/2 9 in 16,384."""
FIXED_BYTES = 278
"""Of the messages of a round in all. These sizes were measured on the schema's messages; a test holds them
against real rounds."""
MEMBER_BYTES = 78
"""More for each member."""
PART_BYTES = 62
"""More for each part."""
CONTRIBUTOR_BYTES = 65
"""More for each contributor to a part."""
PIECE_BYTES = 156
"""The heads of a slice and of a mean, for each piece."""
VOTE_BYTES = 161
"""A vote, which all send to all."""
STATUS_BYTES = 122
"""A ping with its status."""
STATUS_FRAGMENT_BYTES = 36
"""More for each fragment."""
PONG_BYTES = 9
"""What a pong has more."""


def shares_of(uploads_bytes_per_s: Sequence[float]) -> list[float]:
    """The share of a fragment that each peer averages, as rounds cut it: what its upload has left after its
    own payload."""
    from p2p_co2.protocol.rounds.parts import split_blocks

    fine = 1 << 20
    return [(stop - start) / fine for start, stop in split_blocks(fine, uploads_bytes_per_s)]


def sent_and_received(payload: float, share: float, peers: int) -> tuple[float, float, float, float]:
    """Payload bytes of one peer that averages ``share``: slices sent, slices received, means sent, means
    received."""
    others = peers - 1
    return payload * (1 - share), payload * share * others, payload * share * others, payload * (1 - share)


def round_control_bytes(peers: int, payload: int) -> float:
    """What one peer sends in a round beside payloads, on average over who coordinates: READY, its receipt,
    BEGIN, a vote to each, and the heads of the pieces."""
    if peers < 2:
        return 0.0
    from p2p_co2.protocol.rounds.parts import parts_each

    each = parts_each(payload, peers)
    pieces = -(-payload // peers // each // MAX_PIECE_BYTES)
    with_coordinator = (FIXED_BYTES + MEMBER_BYTES * peers) * (peers - 1) / peers
    part_bytes = PART_BYTES + CONTRIBUTOR_BYTES * peers + PIECE_BYTES * pieces
    return with_coordinator + (peers - 1) * (VOTE_BYTES + each * part_bytes)


def heartbeat_bytes_per_s(peers: int, fragments: int, round_s: float = 0.0) -> float:
    """What one peer sends to all others while nothing else happens: its status at each heartbeat, in place of
    which now and then a ping asks for a pong. ``round_s``: seconds of a round, where the clock counts time;
    the heart beats more slowly in long ones."""
    status = STATUS_BYTES + STATUS_FRAGMENT_BYTES * fragments
    beat_s = heartbeat_among_s(peers - 1, quiet_beat_s(round_s))
    return (peers - 1) * (status / beat_s + (status + PONG_BYTES) / measure_every_s(beat_s))
