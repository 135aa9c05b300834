"""Packets as a TUN device hands them over with segmentation offload: many TCP segments in one piece.

With offload a forwarder in Python handles a tenth of the packets, but a loss must still hit single segments.
So a large packet is cut here around the lost ones, as the network card that it waits for would have cut it.
Sources: virtio 1.2 section 5.1.6 (the header that TUN puts before each packet), RFC 791, RFC 9293 (TCP).
IPv4 and TCP alone are offloaded; everything else is one segment. All functions are pure.
"""

from __future__ import annotations

import struct
from collections.abc import Set as AbstractSet

HEADER_BYTES = 10
"""Of the virtio-net header before each packet."""
_VIRTIO = struct.Struct("<BBHHHH")
"""flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
_GSO_TCP_IPV4, _GSO_ECN = 1, 0x80
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80
_SEQUENCE_BITS = (1 << 32) - 1


def segment_count(packet: bytes) -> int:
    """How many segments the packet stands for."""
    kind, size = packet[1], packet[4] | packet[5] << 8
    if not kind or not size:
        return 1
    payload_bytes = len(packet) - HEADER_BYTES - _headers_bytes(packet)
    return max(1, -(-payload_bytes // size))


def without_segments(packet: bytes, lost: AbstractSet[int]) -> list[bytes]:
    """The packet without its ``lost`` segments (by number): one packet for each run of survivors."""
    count = segment_count(packet)
    if not lost:
        return [packet]
    runs: list[bytes] = []
    first = 0
    for index in range(count + 1):
        if index < count and index not in lost:
            continue
        if index > first:
            runs.append(packet if count == 1 else _run(packet, first, index, count))
        first = index + 1
    return runs


def _headers_bytes(packet: bytes) -> int:
    """Of IPv4 and TCP together."""
    ip_bytes = (packet[HEADER_BYTES] & 0x0F) * 4
    return ip_bytes + (packet[HEADER_BYTES + ip_bytes + 12] >> 4) * 4


def _run(packet: bytes, first: int, stop: int, count: int) -> bytes:
    """Segments ``first`` to ``stop`` (exclusive) of ``count`` as one packet."""
    flags, kind, header_bytes, size, checksum_start, checksum_offset = _VIRTIO.unpack_from(packet)
    ip_bytes = (packet[HEADER_BYTES] & 0x0F) * 4
    headers_bytes = _headers_bytes(packet)
    payload = memoryview(packet)[HEADER_BYTES + headers_bytes :]
    payload = payload[first * size : stop * size]
    headers = bytearray(packet[HEADER_BYTES : HEADER_BYTES + headers_bytes])
    struct.pack_into("!H", headers, 2, headers_bytes + len(payload))
    identification = (struct.unpack_from("!H", headers, 4)[0] + first) & 0xFFFF
    struct.pack_into("!H", headers, 4, identification)
    struct.pack_into("!H", headers, 10, 0)
    struct.pack_into("!H", headers, 10, ~_sum16(headers[:ip_bytes]) & 0xFFFF)
    sequence = struct.unpack_from("!I", headers, ip_bytes + 4)[0]
    struct.pack_into("!I", headers, ip_bytes + 4, (sequence + first * size) & _SEQUENCE_BITS)
    if stop < count:
        headers[ip_bytes + 13] &= ~(_FIN | _PSH) & 0xFF
    if first > 0:
        headers[ip_bytes + 13] &= ~_CWR & 0xFF
    tcp_bytes = headers_bytes - ip_bytes + len(payload)
    # The kernel completes the checksum; it wants the pseudo header's part of it there.
    pseudo = bytes(headers[12:20]) + struct.pack("!HH", 6, tcp_bytes)
    struct.pack_into("!H", headers, ip_bytes + 16, _sum16(pseudo))
    if stop - first == 1:
        kind = size = 0
    virtio = _VIRTIO.pack(flags, kind, header_bytes, size, checksum_start, checksum_offset)
    return b"".join((virtio, headers, payload))


def _sum16(data: bytes | bytearray) -> int:
    """One's complement sum of 16-bit words (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
