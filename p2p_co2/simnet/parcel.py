"""A message on its way, read once for all to whom the same bytes go.

A heartbeat goes to fifty peers, a mean to a whole group. What was read of it lies with the bytes and goes
when the last copy of them has arrived: no cache has to be searched or bounded. Law: what was read is never
written to (``wire.envelope.Opened``).
"""

from __future__ import annotations

from p2p_co2.protocol.wire.envelope import Opened, opened


class Parcel(bytes):
    """The bytes of one message. ``opened``: what the first receiver read."""

    opened: Opened | None = None


def open_parcel(data: bytes, group: bytes) -> Opened:
    """As ``wire.envelope.opened``; all peers of a simulation are in one ``group``."""
    if not isinstance(data, Parcel):
        return opened(data, group)
    if data.opened is None:
        data.opened = opened(bytes(data), group)  # of a copy: what was read may hold on to its bytes
    return data.opened
