"""Records of the other peers: what the last search of the DHT found, and those that are in use.

One search at a time, and it serves all that wait for it, in what it finds and where it fails: of a dozen dead
peers that the DHT lists still, each would ask all of it for a newer record, once for each carrier. At most
``MAX_PEERS`` records are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from p2p_co2.errors import TransportError
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

RECORD_KEPT_S = 300.0
"""A record that was used is kept this long, though the DHT lists it no more."""
JUST_FOUND_S = 1.0
"""A search that began within this time is as good as another."""

Find = Callable[[], Awaitable[list[PeerRecord]]]
"""Records of the other peers; raises ``TransportError``."""


class RecordBook:
    """``find`` asks the DHT."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._records: dict[PeerId, PeerRecord] = {}
        self._used_at: dict[PeerId, float] = {}
        self._began_at = -math.inf
        """When the last search began that has ended."""
        self._searching = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._records)

    async def search(self) -> list[PeerRecord]:
        """The records of other peers, as the DHT has them now. Raises ``TransportError``."""
        async with self._searching:
            return await self._search()

    async def record_of(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        """The record of ``peer``. The DHT is asked for one that is not known yet, and, unless a search began
        within ``JUST_FOUND_S``, for one that has expired or if a ``fresh`` one is wanted. None or the old one
        if the DHT does not answer."""
        now = time.monotonic()
        record = self._use(peer, now)
        if fresh or record is None or record.expires_at < time.time():
            since = now if record is None else now - JUST_FOUND_S
            async with self._searching:
                if self._began_at < since:
                    with contextlib.suppress(TransportError):
                        await self._search()
            record = self._use(peer, time.monotonic())
        return record

    def forget_searches(self) -> None:
        """What failed so far may succeed now."""
        self._began_at = -math.inf

    def known(self, most: int) -> list[PeerRecord]:
        """Records of others, those that were used last first."""
        peers = sorted(self._records, key=lambda peer: (-self._used_at.get(peer, 0.0), peer))
        return [self._records[peer] for peer in peers[:most]]

    def maddrs_of(self, peer: PeerId) -> Sequence[str]:
        """Where its last record says that ``peer`` is; empty if it is not known."""
        record = self._records.get(peer)
        return () if record is None else tuple(record.maddrs)

    async def _search(self) -> list[PeerRecord]:
        began_at = time.monotonic()
        try:
            found = await self._find()
            self._take(found, time.monotonic())
        except TransportError:
            self._began_at = began_at
            raise
        self._began_at = began_at
        return found

    def _take(self, found: Sequence[PeerRecord], now: float) -> None:
        """Take what a search found in the place of the last one's, and what was used. Of two records of a
        peer the one that lasts longer is the newer: a node of the DHT may answer with an old copy."""
        listed = dict[PeerId, PeerRecord]()
        for record in found[:MAX_PEERS]:
            peer = PeerId(record.peer)
            held = listed.get(peer) or self._records.get(peer)
            listed[peer] = record if held is None or record.expires_at >= held.expires_at else held
        self._used_at = {peer: at for peer, at in self._used_at.items() if now - at < RECORD_KEPT_S}
        for peer in sorted(self._used_at, key=lambda peer: self._used_at[peer], reverse=True):
            if len(listed) < MAX_PEERS and peer not in listed:
                listed[peer] = self._records[peer]
        self._records = listed
        self._used_at = {peer: at for peer, at in self._used_at.items() if peer in listed}

    def _use(self, peer: PeerId, now: float) -> PeerRecord | None:
        """The record of ``peer``, kept for longer from now on."""
        if peer in self._records:
            self._used_at[peer] = now
        return self._records.get(peer)
