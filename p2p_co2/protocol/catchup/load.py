"""One goal being loaded: who promises what, which content is loaded, and what of it is missing.

A donor of a load owes its manifest (``Awaited``), or is asked once more (``Later``), or has given a
``Promise`` of a content. One content is fixed: the one that most peers report, that others vouch for, or that
most donors promise. It stays fixed until nobody promises it any more.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import (
    PATIENCE_S,
    ROUND,
    STATE,
    Fetched,
    FetchFailed,
    Goal,
    TransferSizes,
    Vouch,
)
from p2p_co2.protocol.catchup.manifest import Content, check_chunk, check_manifest, chunk_at, content_of
from p2p_co2.system.memory import large_buffer
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal

MOST_AT_ONCE = 8
"""Donors asked for one goal, and small states that are loaded."""
ATTEMPTS = 8
"""So often a load is begun anew, and a donor asked for what it says it has not reached yet: nobody may ever
reach it."""
PROMISE_FLOOR_S = 3.0
"""A manifest is waited for so long, and for the time in which a donor writes its state out."""
EXPORT_BYTES_PER_S = 100e6
"""How fast a donor surely does that."""


class Unasked(Enum):
    """Of a donor: to be asked when another fails, or failed in this attempt."""

    LISTED = 0
    GONE = 1


class Awaited(NamedTuple):
    """For its manifest. ``times``: how often it has said "again"."""

    at: float
    times: int


class Later(NamedTuple):
    """It is to be asked at that time."""

    at: float
    times: int


class Promise(NamedTuple):
    content: Content
    manifest: Manifest


Standing = Unasked | Awaited | Later | Promise


@dataclass
class Terms:
    """What all loads share. ``run``: its digest; ``vouch``: what the swarm says of a promised state."""

    run: bytes
    shape: TransferSizes
    vouch: Vouch = lambda donor, fragment, version, digest: None

    def vouched(self, donor: PeerId, promise: Manifest) -> bool | None:
        """A round proves itself by its decision: only of a state there is something to say."""
        if promise.what != STATE:
            return None
        return self.vouch(donor, promise.fragment, promise.version, promise.digest)


class Chunks:
    """One content: memory for all of it, and what of it is missing. ``pending``: the queue of chunks that
    nobody was asked for; ``gave``: how many each donor gave."""

    def __init__(self, promise: Promise) -> None:
        self.content, self.manifest = promise
        self.data = large_buffer(self.manifest.total_bytes, once=True)
        self.missing = set(range(len(self.manifest.chunk_digests)))
        self.pending = deque(sorted(self.missing))
        self.gave: Counter[PeerId] = Counter()

    def take(self, chunk: Chunk, donor: PeerId) -> bool:
        """Put one in its place; False if it was there. Raises ``RemoteProtocolError`` for a wrong one."""
        check_chunk(chunk, self.manifest)
        if chunk.chunk not in self.missing:
            return False
        self.missing.discard(chunk.chunk)
        self.data[chunk_at(chunk.chunk, self.manifest.total_bytes, self.manifest.chunk_bytes)] = chunk.data
        self.gave[donor] += 1
        if chunk.chunk in self.pending:
            self.pending.remove(chunk.chunk)
        return True

    def give_back(self, chunks: Iterable[int]) -> None:
        """Who was asked for these does not give them: they are dealt first."""
        again = [chunk for chunk in chunks if chunk in self.missing and chunk not in self.pending]
        self.pending.extendleft(sorted(again, reverse=True))


class Load:
    """``request`` tells answers to it from others. ``donors``: how each stands; ``moved_at``: when anything
    was promised or given; ``dealt_at``: when a chunk was asked for last. ``chunks``: None until something was
    chosen, and kept while nothing ``is_chosen`` any more."""

    def __init__(self, goal: Goal, request: int, terms: Terms, now: float) -> None:
        self.goal = goal
        self.request = request
        self._terms = terms
        self._started_at = self.moved_at = now
        self.dealt_at = -math.inf
        self._choose_at = math.inf
        self.attempts = 0
        self.donors: dict[PeerId, Standing] = dict.fromkeys(goal.donors, Unasked.LISTED)
        self.chunks: Chunks | None = None
        self.is_chosen = False
        self.reason = "no donor is known"

    @property
    def _total_bytes(self) -> int:
        goal = self.goal
        return goal.size_bytes or self._terms.shape.bytes_of(goal.what, goal.fragment)

    @property
    def _oldest(self) -> int:
        return self.goal.oldest or self.goal.version

    @property
    def givers(self) -> list[PeerId]:
        """Those that promise what was chosen."""
        if self.chunks is None or not self.is_chosen:
            return []
        content = self.chunks.content
        return [p for p, its in self.donors.items() if isinstance(its, Promise) and its.content == content]

    @property
    def is_out_of_donors(self) -> bool:
        return not (
            self.givers if self.is_chosen else any(its is not Unasked.GONE for its in self.donors.values())
        )

    def stalled_at(self, came_at: float) -> float:
        """When it is given up. Where its donors gave to our other loads (``came_at``), it waits its turn."""
        return max(self.moved_at, came_at if self.givers else -math.inf) + 2 * PATIENCE_S

    # ---- donors

    def begin(self, distrusted: Collection[PeerId], now: float) -> None:
        """Ask everybody, the first time or anew."""
        self.attempts = self.attempts + 1
        self.moved_at = now
        self.donors = {peer: Unasked.GONE if peer in distrusted else Unasked.LISTED for peer in self.donors}
        self.is_chosen = False
        self._choose_at = math.inf

    def add_donors(self, peers: Iterable[PeerId]) -> None:
        self.donors = dict.fromkeys(peers, Unasked.LISTED) | self.donors

    def forget(self, peer: PeerId, reason: str) -> None:
        """``peer`` serves this load no more."""
        if peer in self.donors:
            self.donors[peer] = Unasked.GONE
            self.reason = f"{peer[-6:]}: {reason}"

    def questions(self, now: float) -> list[tuple[PeerId, Fetch]]:
        """Ask whom it is time to ask again, and others until as many as are wanted are at it."""
        due = [peer for peer, its in self.donors.items() if isinstance(its, Later) and now >= its.at]
        promised = [peer for peer, its in self.donors.items() if isinstance(its, Promise)]
        at_it = len(self.givers if self.is_chosen else promised)
        at_it += sum(isinstance(its, Awaited) for its in self.donors.values())
        listed = [peer for peer, its in self.donors.items() if its is Unasked.LISTED]
        due += listed[: max(0, MOST_AT_ONCE - at_it - len(due))]
        return [(peer, self._ask(peer, now)) for peer in due]

    def _ask(self, peer: PeerId, now: float) -> Fetch:
        known = self.donors.get(peer)
        goal = self.goal
        only = 0
        self.donors[peer] = Awaited(now, known.times if isinstance(known, Awaited | Later) else 0)
        if self.is_chosen and self.chunks is not None:
            only = self.chunks.manifest.version
        fetch = Fetch(what=goal.what, fragment=goal.fragment, version=goal.version, request=self.request)
        if goal.what == STATE:
            fetch.version = only or self._oldest
            fetch.newest = only
        return fetch

    def take_manifest(self, manifest: Manifest, sender: PeerId, now: float) -> None:
        """Raises ``RemoteProtocolError`` for one that breaks the rules, or that the others contradict."""
        terms = self._terms
        if not isinstance(self.donors.get(sender), Awaited):
            return  # doubled under way
        check_manifest(
            manifest, self.goal, self._total_bytes, self._oldest, sender, terms.run, terms.shape.chunk_bytes
        )
        if terms.vouched(sender, manifest) is False:
            raise RemoteProtocolError("bad state", f"the others know none like that of {manifest.version}")
        self.donors[sender] = Promise(content_of(manifest), manifest)
        self.moved_at = now
        self._choose_at = min(self._choose_at, now + HEARTBEAT_S)

    def take_refusal(self, refusal: Refusal, sender: PeerId, now: float) -> bool:
        """The donor cannot help, or not now, or no longer. Whether it may be asked once more."""
        known = self.donors[sender]
        self.reason = f"{sender[-6:]}: {refusal.reason[:200] or 'refused without a reason'}"
        if not isinstance(known, Awaited) or not refusal.again:
            return False
        self.donors[sender] = Later(now + HEARTBEAT_S / 2, known.times + 1)
        is_early = self.goal.what == ROUND or refusal.newest_version > 0
        return known.times < ATTEMPTS or not is_early

    # ---- what is loaded

    def choose(self, now: float) -> None:
        """Fix what is loaded, once it is sure or the others were waited for."""
        candidates: dict[Content, list[PeerId]] = {}
        for peer, its in list(self.donors.items()) if not self.is_chosen else ():
            if isinstance(its, Promise) and self._terms.vouched(peer, its.manifest) is False:
                self.forget(peer, "the others know no such state")  # they say more by now
            elif isinstance(its, Promise):
                candidates.setdefault(its.content, []).append(peer)
        if not candidates:
            self._choose_at = math.inf  # who promised has gone: the next promise sets it
            return
        best = max(candidates.values(), key=self._rank)
        promise = self.donors[best[0]]
        waits = any(isinstance(its, Awaited) for its in self.donors.values())
        assert isinstance(promise, Promise)
        if waits and now < self._choose_at and not self._rank(best)[0]:
            return
        self.is_chosen = True
        self.moved_at = now
        if self.chunks is None or self.chunks.content != promise.content:
            self.chunks = None  # lets go of the memory first
            self.chunks = Chunks(promise)
        self.chunks.pending = deque(sorted(self.chunks.missing))

    def _rank(self, peers: list[PeerId]) -> tuple[bool, bool, int, int]:
        """The highest is loaded: what most peers report, what others vouch for, what most donors promise.
        Then the newest; but of what nobody else knows the oldest: it is easy to promise a version that
        nobody has reached."""
        promised = self.donors[peers[0]]
        goal = self.goal
        assert isinstance(promised, Promise)
        promise = promised.manifest
        known = bool(goal.digest) and (promise.version, promise.digest) == (goal.version, goal.digest)
        trusted = any(self._terms.vouched(peer, promise) for peer in peers)
        return known, trusted, len(peers), promise.version if known or trusted else -promise.version

    def get_timer(self) -> float:
        """When somebody is to be asked again, counts as silent, or the choice is to be made."""
        times = [self._until(its) for its in self.donors.values() if isinstance(its, Awaited | Later)]
        return min(times, default=math.inf) if self.is_chosen else min([self._choose_at, *times])

    def silent(self, now: float) -> list[PeerId]:
        """Who owes its manifest for too long."""
        return [p for p, its in self.donors.items() if isinstance(its, Awaited) and now >= self._until(its)]

    def _until(self, its: Awaited | Later) -> float:
        real_bytes = self._total_bytes * self._terms.shape.scale
        return its.at + (PROMISE_FLOOR_S + real_bytes / EXPORT_BYTES_PER_S) * isinstance(its, Awaited)

    def finished(self, now: float) -> Fetched:
        assert self.chunks is not None
        given = dict.fromkeys(self.givers, 0) | self.chunks.gave
        promise = self.chunks.manifest
        donors = tuple(sorted(given, key=lambda peer: (-given[peer], peer)))
        return Fetched(
            self.goal, promise.version, self.chunks.data, promise.decision, promise.digest, donors,
            now - self._started_at,
        )  # fmt: skip

    def failed(self) -> FetchFailed:
        return FetchFailed(self.goal, self.reason)
