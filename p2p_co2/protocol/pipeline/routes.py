"""Who sends whom how much across one boundary: drawn anew each round, alike by all who see the same peers.

Senders and receivers are each laid on [0, 1) in an order drawn from a seed, with lengths by tokens a second.
Where they overlap, that sender gives that receiver so much. Equal peers get a permutation: each sender has
one receiver.

Law: whatever the views of who is there, a sender's shares add up to 1. Views that differ cost balance, never
safety.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import accumulate

from p2p_co2.wire.identity import PeerId

SNAP = 0.1
"""Of a mean length: a receiver's edge so near to a sender's is laid on it, which saves a thin overlap."""

Rates = Mapping[PeerId, float]
"""Tokens a second by peer; 0 for not known yet, which counts as the mean of the others."""


def shares(me: PeerId, senders: Rates, receivers: Rates, seed: bytes) -> dict[PeerId, float]:
    """What part of ``me``'s microbatches goes to whom; adds up to 1, empty without receivers. ``senders``
    has ``me`` in it."""
    if not receivers:
        return {}
    ours = _edges(senders, seed + b"senders")
    theirs = _edges(receivers, seed + b"receivers")
    mean = 1.0 / len(receivers)
    places = sorted({edge for pair in ours.values() for edge in pair})
    snapped = {
        peer: (_snap(start, places, mean), _snap(stop, places, mean))
        for peer, (start, stop) in theirs.items()
    }
    start, stop = ours[me]
    overlap = {peer: min(stop, end) - max(start, begin) for peer, (begin, end) in snapped.items()}
    found = {peer: length for peer, length in overlap.items() if length > 0}
    if not found:  # beside what the others claim, this peer's part is nothing
        found = {min(snapped, key=lambda peer: (abs(snapped[peer][0] - start), peer)): 1.0}
    total = sum(found.values())
    return {peer: length / total for peer, length in found.items()}


def _edges(rates: Rates, seed: bytes) -> dict[PeerId, tuple[float, float]]:
    """Where each peer lies on [0, 1)."""
    most = max(rates.values())
    rates = {peer: rate / most if most else 0.0 for peer, rate in rates.items()}  # sums stay finite
    known = [rate for rate in rates.values() if rate > 0]
    mean = sum(known) / len(known) if known else 1.0
    order = sorted(rates, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    lengths = [rates[peer] if rates[peer] > 0 else mean for peer in order]
    total = sum(lengths)
    stops = [stop / total for stop in accumulate(lengths)]
    stops[-1] = 1.0
    return dict(zip(order, zip([0.0, *stops[:-1]], stops, strict=True), strict=True))


def _snap(edge: float, places: list[float], mean: float) -> float:
    nearest = min(places, key=lambda place: abs(place - edge))
    return nearest if abs(nearest - edge) <= SNAP * mean else edge
