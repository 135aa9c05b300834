"""The peer that is behind: asks a donor for a manifest and its chunks, checks each, and replaces donors that
fail.

Law: sizes are computed from this peer's own model before anything is allocated, and every chunk has its
manifest's digest.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from p2p_co2.catchup.goals import ROUND, DonorRefused, Fetched, FetchFailed, Goal, Outbox, Shape
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal

WINDOW = 4
"""Chunks asked for and not yet received, per goal."""
ANSWER_FLOOR_S, ANSWER_CAP_S = 2.0, 20.0


@dataclass
class _Fetching:
    goal: Goal
    started_at: float
    request: int
    donors: deque[PeerId]
    donor: PeerId
    deadline_at: float
    manifest: Manifest | None = None
    data: bytearray = field(default_factory=bytearray)
    missing: list[int] = field(default_factory=list)
    """Chunks not yet asked for, last first."""
    asked: set[int] = field(default_factory=set)
    newest_version: int = 0
    last_reason: str = "no donor"
    slowest_s: float = 0.0
    last_answer_at: float = 0.0


class Fetcher:
    """One goal per fragment at a time; a new goal for it replaces the old one."""

    def __init__(self, shape: Shape, out: Outbox) -> None:
        self._shape, self._out = shape, out
        self._fetching: dict[int, _Fetching] = {}
        self._requests = 0

    def want(self, goal: Goal, now: float) -> None:
        """Start fetching; ends in ``Fetched`` or ``FetchFailed``."""
        running = self._fetching.get(goal.fragment)
        if running is not None and (running.goal.what, running.goal.version) == (goal.what, goal.version):
            return
        donors = deque(goal.donors)
        if not donors:
            self._out.events.append(FetchFailed(goal, "no donor is known", 0))
            return
        fetching = _Fetching(
            goal=goal, started_at=now, request=0, donors=donors, donor=donors[0], deadline_at=now
        )
        self._fetching[goal.fragment] = fetching
        self._next_donor(fetching, now, "")

    def fetching(self, fragment: int) -> bool:
        return fragment in self._fetching

    def forget_donor(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone: goals that wait for it go on with another donor."""
        for fetching in list(self._fetching.values()):
            if fetching.donor == peer:
                self._next_donor(fetching, now, "the donor left")

    def receive(self, message: Manifest | Chunk | Refusal, sender: PeerId, now: float) -> None:
        """A donor's answer; one that was not asked for is ignored."""
        fetching = self._expected(message.request, sender)
        if fetching is None:
            return
        if isinstance(message, Manifest):
            self._take_manifest(fetching, message, now)
        elif isinstance(message, Chunk):
            self._take_chunk(fetching, message, now)
        else:
            fetching.newest_version = max(fetching.newest_version, message.newest_version)
            self._next_donor(fetching, now, message.reason[:200] or "refused without a reason")

    def handle_timer(self, now: float) -> None:
        for fetching in list(self._fetching.values()):
            if now >= fetching.deadline_at:
                self._next_donor(fetching, now, f"donor silent for {now - fetching.last_answer_at:.0f} s")

    def get_timer(self) -> float | None:
        return min((fetching.deadline_at for fetching in self._fetching.values()), default=None)

    def _expected(self, request: int, sender: PeerId) -> _Fetching | None:
        for fetching in self._fetching.values():
            if fetching.request == request and fetching.donor == sender:
                return fetching
        return None

    def _next_donor(self, fetching: _Fetching, now: float, reason: str) -> None:
        if reason:
            fetching.last_reason = f"{fetching.donor[-6:]}: {reason}"
        goal = fetching.goal
        if not fetching.donors:
            del self._fetching[goal.fragment]
            self._out.events.append(FetchFailed(goal, fetching.last_reason, fetching.newest_version))
            return
        fetching.donor = fetching.donors.popleft()
        self._requests += 1
        fetching.request = self._requests
        fetching.missing = sorted({*fetching.missing, *fetching.asked}, reverse=True)
        fetching.asked.clear()
        self._answered(fetching, now)
        self._out.messages.append(
            (
                fetching.donor,
                Fetch(what=goal.what, fragment=goal.fragment, version=goal.version, request=fetching.request),
            )
        )

    def _answered(self, fetching: _Fetching, now: float) -> None:
        if fetching.last_answer_at:
            fetching.slowest_s = max(fetching.slowest_s, now - fetching.last_answer_at)
        fetching.last_answer_at = now
        fetching.deadline_at = now + min(ANSWER_CAP_S, max(ANSWER_FLOOR_S, 4 * fetching.slowest_s))

    def _take_manifest(self, fetching: _Fetching, manifest: Manifest, now: float) -> None:
        goal = fetching.goal
        sizes = self._shape.mean_bytes if goal.what == ROUND else self._shape.state_bytes
        expected = sizes[goal.fragment]
        chunks = -(-expected // MAX_DATA_BYTES)
        problem = ""
        if (manifest.what, manifest.fragment) != (goal.what, goal.fragment):
            problem = "another fragment than asked"
        elif manifest.total_bytes != expected or manifest.chunk_bytes != MAX_DATA_BYTES:
            problem = f"{manifest.total_bytes} bytes where this model has {expected}"
        elif len(manifest.chunk_digests) != chunks or any(len(d) != 32 for d in manifest.chunk_digests):
            problem = "wrong number or size of chunk digests"
        elif manifest.version < goal.version or (goal.what == ROUND and manifest.version != goal.version):
            problem = f"version {manifest.version} where {goal.version} was asked"
        if problem:
            self._out.events.append(DonorRefused(fetching.donor, "bad manifest", problem))
            self._next_donor(fetching, now, problem)
            return
        known = fetching.manifest
        if known is None or list(known.chunk_digests) != list(manifest.chunk_digests):
            fetching.data = bytearray(expected)
            fetching.missing = list(range(chunks - 1, -1, -1))
        fetching.manifest = manifest
        self._answered(fetching, now)
        self._ask_chunks(fetching)
        self._finish_if_whole(fetching, now)

    def _ask_chunks(self, fetching: _Fetching) -> None:
        assert fetching.manifest is not None
        while fetching.missing and len(fetching.asked) < WINDOW:
            chunk = fetching.missing.pop()
            fetching.asked.add(chunk)
            fetch = Fetch(
                what=fetching.goal.what,
                fragment=fetching.goal.fragment,
                version=fetching.manifest.version,
                want_chunk=True,
                chunk=chunk,
                request=fetching.request,
            )
            self._out.messages.append((fetching.donor, fetch))

    def _take_chunk(self, fetching: _Fetching, chunk: Chunk, now: float) -> None:
        if fetching.manifest is None or chunk.chunk not in fetching.asked:
            raise RemoteProtocolError("unasked chunk", f"fragment {chunk.fragment} chunk {chunk.chunk}")
        if hashlib.sha256(chunk.data).digest() != fetching.manifest.chunk_digests[chunk.chunk]:
            problem = f"chunk {chunk.chunk} of fragment {chunk.fragment} has the wrong digest"
            self._out.events.append(DonorRefused(fetching.donor, "wrong digest", problem))
            self._next_donor(fetching, now, problem)
            return
        start = chunk.chunk * MAX_DATA_BYTES
        if len(chunk.data) != min(MAX_DATA_BYTES, len(fetching.data) - start):
            problem = f"chunk {chunk.chunk} has {len(chunk.data)} bytes"
            self._out.events.append(DonorRefused(fetching.donor, "wrong size", problem))
            self._next_donor(fetching, now, problem)
            return
        fetching.data[start : start + len(chunk.data)] = chunk.data
        fetching.asked.discard(chunk.chunk)
        self._answered(fetching, now)
        self._ask_chunks(fetching)
        self._finish_if_whole(fetching, now)

    def _finish_if_whole(self, fetching: _Fetching, now: float) -> None:
        if fetching.missing or fetching.asked or fetching.manifest is None:
            return
        manifest = fetching.manifest
        del self._fetching[fetching.goal.fragment]
        self._out.events.append(
            Fetched(
                goal=fetching.goal,
                version=manifest.version,
                data=bytes(fetching.data),
                decision=manifest.decision,
                digest=manifest.digest,
                donor=fetching.donor,
                duration_s=now - fetching.started_at,
            )
        )
