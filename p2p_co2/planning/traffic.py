"""Bytes that a round moves: payloads by the codec's arithmetic, the rest by building the messages.

Laws: what is counted is what a peer's ``up_bytes`` counts (whole messages, ALGORITHMS.md section 5), and the
fixed messages are measured on real ones of the schema, so the two cannot drift apart. ``LINK_OVERHEAD`` is
what the carriers, TLS, TCP and IP add on the wire. Imports no torch: the codec's block sizes are written here
and held against the codecs by a test.

Price: no replays, no second attempts, nothing that a peer fetches because it fell behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2p_co2.config import CodecName
from p2p_co2.protocol.heartbeat import heartbeat_among_s, measure_every_s, quiet_beat_s
from p2p_co2.protocol.rounds.bounds import ATTEMPT_BYTES, DIGEST_BYTES
from p2p_co2.protocol.wire.limits import MAX_PIECE_BYTES, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import (
    Begin,
    Contributor,
    Envelope,
    Mean,
    Member,
    Part,
    PartSpec,
    Ping,
    Pong,
    Ready,
    Result,
    RoundKey,
    Status,
    Waiting,
)

BLOCK_VALUES = 128
BLOCK_BYTES: Mapping[CodecName, int] = {
    "fp32": 512, "fp16": 256, "bf16": 256, "int8": 132, "fp4": 68, "nf4": 68, "int4": 68, "e3m0": 68,
}  # fmt: skip
LINK_OVERHEAD = 1.04
"""Bytes on the link per byte of messages: 40 of TCP and IP in 1,500, TLS 22 in 16,384, HTTP/2 9 in 16,384."""
_PEER_ID, _SIGNATURE, _SOFTWARE = "1" * 52, bytes(64), "p2p-co2 0.1.0"
_ROUND, _BIG, _NUMBER = 1000, 1 << 30, 1.5


def bits_per_value(codec: CodecName) -> float:
    """On the wire, scales included."""
    return 8 * BLOCK_BYTES[codec] / BLOCK_VALUES


def payload_bytes(codec: CodecName, values: int) -> int:
    """Bytes of one encoded outer gradient of so many values."""
    return -(-values // BLOCK_VALUES) * BLOCK_BYTES[codec]


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
    BEGIN, RESULT, the decision, and the heads of the pieces."""
    if peers < 2:
        return 0.0
    from p2p_co2.protocol.rounds.parts import parts_each

    each = parts_each(payload, peers)
    key = RoundKey(fragment=3, round=_ROUND, attempt=bytes(ATTEMPT_BYTES))
    digest = bytes(DIGEST_BYTES)
    members = [Member(peer=_PEER_ID, weight=_NUMBER, base_version=_ROUND) for _ in range(peers)]
    contributors = [Contributor(peer=_PEER_ID, weight=_NUMBER) for _ in range(peers)]
    begin = Begin(
        key=key, members=members, state_digest=digest, parts_within_s=_NUMBER, result_within_s=_NUMBER,
        nonce=bytes(ATTEMPT_BYTES),
        parts=[PartSpec(owner=_PEER_ID, start_block=_ROUND, stop_block=_ROUND)] * (peers * each),
    )  # fmt: skip
    ready = Ready(
        fragment=3, round=_ROUND, base_version=_ROUND, state_digest=digest, weight=_NUMBER,
        upload_bytes_per_s=_NUMBER,
    )  # fmt: skip
    to_coordinator = _size(Envelope(ready=ready))
    waiting = Waiting(fragment=3, round=_ROUND, begins_within_s=_NUMBER)
    from_coordinator = _size(Envelope(waiting=waiting)) + _size(Envelope(begin=begin))
    vote = _size(Envelope(result=Result(key=key, digest=digest, signature=_SIGNATURE)))
    pieces = -(-payload // peers // each // MAX_PIECE_BYTES)
    part = _size(Envelope(part=Part(key=key, part=1, offset=_BIG, total=_BIG)))
    mean = _size(Envelope(mean=Mean(key=key, part=1, offset=_BIG, total=_BIG)))
    first = sum(contributor.ByteSize() + 2 for contributor in contributors)
    heads = (peers - 1) * each * (pieces * (part + mean) + first)
    return (peers - 1) / peers * (to_coordinator + from_coordinator) + (peers - 1) * vote + heads


def heartbeat_bytes_per_s(peers: int, fragments: int, round_s: float = 0.0) -> float:
    """What one peer sends to all others while nothing else happens: its status at each heartbeat, in place of
    which now and then a ping asks for a pong. ``round_s``: seconds of a round, where the clock counts time;
    the heart beats more slowly in long ones."""
    status = Status(
        phase=Status.TRAINING, position=_NUMBER, inner_steps=_BIG, tokens=_BIG, loss=_NUMBER,
        versions=[_ROUND] * fragments, digests=[bytes(DIGEST_BYTES)] * fragments,
        upload_bytes_per_s=_NUMBER, software=_SOFTWARE, heartbeat_s=(quiet_s := quiet_beat_s(round_s)),
    )  # fmt: skip
    ping = _size(Envelope(ping=Ping(nonce=_BIG, sent_at=_NUMBER, status=status)))
    pong = _size(Envelope(pong=Pong(nonce=_BIG, ping_sent_at=_NUMBER, answered_at=_NUMBER, status=status)))
    beat_s = heartbeat_among_s(peers - 1, quiet_s)
    return (peers - 1) * (ping / beat_s + pong / measure_every_s(beat_s))


def _size(envelope: Envelope) -> int:
    envelope.version, envelope.run = PROTOCOL_VERSION, bytes(DIGEST_BYTES)
    return envelope.ByteSize()
