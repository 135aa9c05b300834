"""Who comes first in a round: rendezvous hashing (Thaler and Ravishankar 1998).

Law: two peers with the same peers in view choose the same order, with no server and no election. The load
spreads because fragment and round are in the hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS


def coordination_order(peers: Iterable[PeerId], fragment: int, round_: int) -> list[PeerId]:
    """The peers by rendezvous hash of (peer, fragment, round): the first coordinates, the others succeed
    it."""
    return sorted(peers, key=lambda peer: _drawn(peer, fragment, round_))


@lru_cache(2 * MAX_PEERS)
def _drawn(peer: PeerId, fragment: int, round_: int) -> bytes:
    """A peer's place in the order; asked for again and again while a round is made."""
    return hashlib.sha256(f"{peer}/{fragment}/{round_}".encode()).digest()
