"""Catching up: a late peer fetches rounds that it missed, or a fragment's whole agreed state, from its
donors.

A machine without I/O or clock, both sides in one: the donor answers ``Fetch`` with a ``Manifest`` of chunk
digests and then with chunks; the peer that is behind asks for the manifest, checks that its sizes are the
ones it can compute itself, asks for chunks a few at a time, and checks every chunk's digest before it keeps
it.

Laws: nothing is allocated on a donor's word (sizes must equal what this peer computes from its own model); a
wrong chunk never reaches the caller; every wait has a timer, and a donor that is slow, refuses or lies is
replaced by the next one, chunks already verified against the same manifest being kept. A donor holds at most
``EXPORTS_KEPT`` states and ``HISTORY_BYTES_SHARE`` of the model in past rounds.

Source of the idea: several donors, digests and resume are what users of hivemind ask for (its issues 169 and
415).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal

ROUND, STATE = Fetch.ROUND, Fetch.STATE
WINDOW = 4
"""Chunks asked for and not yet received, per goal."""
EXPORTS_KEPT = 2
EXPORT_KEPT_S = 20.0
HISTORY_ROUNDS_KEPT = 8
"""Rounds per fragment whose mean a donor can replay, if memory allows."""
HISTORY_BYTES_SHARE = 0.25
"""All kept means together, as a share of the model's fp32 size (at least one round per fragment is kept)."""
ANSWER_FLOOR_S, ANSWER_CAP_S = 2.0, 20.0
MAX_WAITING_EXPORTS = 64

CatchUpMessage = Fetch | Manifest | Chunk | Refusal


@dataclass(frozen=True)
class Shape:
    """Sizes that every peer computes for itself: per fragment, bytes of an encoded mean and of a serialised
    state."""

    mean_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Goal:
    """What is wanted: the round that made ``version`` (``what`` ROUND), or the newest state at or after it
    (STATE)."""

    what: Fetch.What
    fragment: int
    version: int
    donors: tuple[PeerId, ...]


@dataclass(frozen=True)
class Fetched:
    """All bytes of a goal, every chunk checked. ``decision`` is the signed outcome of a ROUND, ``digest`` of
    a STATE."""

    goal: Goal
    version: int
    data: bytes
    decision: Decision
    digest: bytes
    donor: PeerId
    duration_s: float


@dataclass(frozen=True)
class FetchFailed:
    """No donor could serve the goal; ``newest_version`` is the highest that a refusing donor named."""

    goal: Goal
    reason: str
    newest_version: int


@dataclass(frozen=True)
class ExportWanted:
    """Somebody asks for a state: the tensor side should serialise it and call ``exported``."""

    fragment: int


@dataclass(frozen=True)
class DonorRefused:
    """A donor broke the rules and was replaced."""

    peer: PeerId
    reason: str
    detail: str


CatchUpEvent = Fetched | FetchFailed | ExportWanted | DonorRefused


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


@dataclass
class _Export:
    version: int
    data: bytes
    digest: bytes
    made_at: float
    manifest: Manifest


class CatchUp:
    """Both sides of catching up. One goal per fragment at a time; a new goal for it replaces the old one."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._fetching: dict[int, _Fetching] = {}
        self._exports: OrderedDict[int, _Export] = OrderedDict()
        self._waiting: dict[int, list[tuple[PeerId, Fetch]]] = {}
        self._history: OrderedDict[tuple[int, int], tuple[Decision, bytes]] = OrderedDict()
        self._history_bytes = 0
        self._requests = 0
        self._outgoing: list[tuple[PeerId, CatchUpMessage]] = []
        self._events: deque[CatchUpEvent] = deque()

    # ---- this peer is behind

    def want(self, goal: Goal, now: float) -> None:
        """Start fetching; ends in ``Fetched`` or ``FetchFailed``."""
        running = self._fetching.get(goal.fragment)
        if running is not None and (running.goal.what, running.goal.version) == (goal.what, goal.version):
            return
        donors = deque(goal.donors)
        if not donors:
            self._events.append(FetchFailed(goal, "no donor is known", 0))
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

    # ---- this peer is a donor

    def remember(self, fragment: int, version: int, decision: Decision, mean: bytes) -> None:
        """Keep a committed round for replay, within the memory bound."""
        key = (fragment, version)
        if key in self._history:
            return
        self._history[key] = (decision, mean)
        self._history_bytes += len(mean)
        mine = [known for known in self._history if known[0] == fragment]
        if len(mine) > HISTORY_ROUNDS_KEPT:
            self._forget_round(mine[0])
        bound = HISTORY_BYTES_SHARE * sum(self._shape.state_bytes) / 2  # a state is params and momentum
        while self._history_bytes > bound and len(self._history) > len(self._shape.mean_bytes):
            self._forget_round(next(iter(self._history)))

    def exported(self, fragment: int, version: int, data: bytes, digest: bytes, now: float) -> None:
        """The answer to ``ExportWanted``."""
        chunks = [data[at : at + MAX_DATA_BYTES] for at in range(0, len(data), MAX_DATA_BYTES)]
        manifest = Manifest(
            what=STATE,
            fragment=fragment,
            version=version,
            total_bytes=len(data),
            chunk_bytes=MAX_DATA_BYTES,
            chunk_digests=[hashlib.sha256(chunk).digest() for chunk in chunks],
            digest=digest,
        )
        self._exports[fragment] = _Export(version, data, digest, now, manifest)
        self._exports.move_to_end(fragment)
        while len(self._exports) > EXPORTS_KEPT:
            self._exports.popitem(last=False)
        for peer, fetch in self._waiting.pop(fragment, []):
            self._serve_state(fetch, peer, now)

    # ---- the machine's verbs

    def receive(self, message: CatchUpMessage, sender: PeerId, now: float) -> None:
        """Handle one message; raises ``RemoteProtocolError`` for what breaks the rules."""
        if not isinstance(message, Refusal) and message.fragment >= len(self._shape.mean_bytes):
            raise RemoteProtocolError("unknown fragment", str(message.fragment))
        if isinstance(message, Fetch):
            if message.what == ROUND:
                self._serve_round(message, sender)
            else:
                self._serve_state(message, sender, now)
            return
        fetching = self._expected(message.request, sender)
        if fetching is None:
            return  # an answer to a question that we no longer ask
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
        for fragment, export in list(self._exports.items()):
            if now - export.made_at > EXPORT_KEPT_S:
                del self._exports[fragment]

    def get_timer(self) -> float | None:
        times = [fetching.deadline_at for fetching in self._fetching.values()]
        times += [export.made_at + EXPORT_KEPT_S for export in self._exports.values()]
        return min(times, default=None)

    def messages_to_send(self) -> list[tuple[PeerId, CatchUpMessage]]:
        messages, self._outgoing = self._outgoing, []
        return messages

    def next_event(self) -> CatchUpEvent | None:
        return self._events.popleft() if self._events else None

    # ---- fetching

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
            self._events.append(FetchFailed(goal, fetching.last_reason, fetching.newest_version))
            return
        fetching.donor = fetching.donors.popleft()
        self._requests += 1
        fetching.request = self._requests
        fetching.missing = sorted({*fetching.missing, *fetching.asked}, reverse=True)
        fetching.asked.clear()
        self._answered(fetching, now)
        self._outgoing.append(
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
            self._events.append(DonorRefused(fetching.donor, "bad manifest", problem))
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
            self._outgoing.append((fetching.donor, fetch))

    def _take_chunk(self, fetching: _Fetching, chunk: Chunk, now: float) -> None:
        if fetching.manifest is None or chunk.chunk not in fetching.asked:
            raise RemoteProtocolError("unasked chunk", f"fragment {chunk.fragment} chunk {chunk.chunk}")
        if hashlib.sha256(chunk.data).digest() != fetching.manifest.chunk_digests[chunk.chunk]:
            problem = f"chunk {chunk.chunk} of fragment {chunk.fragment} has the wrong digest"
            self._events.append(DonorRefused(fetching.donor, "wrong digest", problem))
            self._next_donor(fetching, now, problem)
            return
        start = chunk.chunk * MAX_DATA_BYTES
        if len(chunk.data) != min(MAX_DATA_BYTES, len(fetching.data) - start):
            problem = f"chunk {chunk.chunk} has {len(chunk.data)} bytes"
            self._events.append(DonorRefused(fetching.donor, "wrong size", problem))
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
        self._events.append(
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

    # ---- serving

    def _serve_round(self, fetch: Fetch, peer: PeerId) -> None:
        known = self._history.get((fetch.fragment, fetch.version))
        if known is None:
            newest = max(
                (version for fragment, version in self._history if fragment == fetch.fragment), default=0
            )
            self._outgoing.append(
                (peer, Refusal(request=fetch.request, reason="round not kept", newest_version=newest))
            )
            return
        decision, mean = known
        if fetch.want_chunk:
            self._send_chunk(fetch, peer, fetch.version, mean)
            return
        digests = [
            hashlib.sha256(mean[at : at + MAX_DATA_BYTES]).digest()
            for at in range(0, len(mean), MAX_DATA_BYTES)
        ]
        manifest = Manifest(
            request=fetch.request,
            what=ROUND,
            fragment=fetch.fragment,
            version=fetch.version,
            total_bytes=len(mean),
            chunk_bytes=MAX_DATA_BYTES,
            chunk_digests=digests,
            decision=decision,
        )
        self._outgoing.append((peer, manifest))

    def _serve_state(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        export = self._exports.get(fetch.fragment)
        if fetch.want_chunk:
            if export is None or export.version != fetch.version:
                self._outgoing.append(
                    (peer, Refusal(request=fetch.request, reason="that state is no longer kept"))
                )
            else:
                export.made_at = now
                self._send_chunk(fetch, peer, export.version, export.data)
            return
        if export is not None and export.version >= fetch.version and now - export.made_at < EXPORT_KEPT_S:
            export.made_at = now
            manifest = Manifest()
            manifest.CopyFrom(export.manifest)
            manifest.request = fetch.request
            self._outgoing.append((peer, manifest))
            return
        waiting = self._waiting.setdefault(fetch.fragment, [])
        if len(waiting) >= MAX_WAITING_EXPORTS:
            self._outgoing.append(
                (peer, Refusal(request=fetch.request, reason="too many newcomers, try another donor"))
            )
            return
        waiting.append((peer, fetch))
        if len(waiting) == 1:
            self._events.append(ExportWanted(fetch.fragment))

    def _send_chunk(self, fetch: Fetch, peer: PeerId, version: int, data: bytes) -> None:
        start = fetch.chunk * MAX_DATA_BYTES
        if start >= len(data):
            raise RemoteProtocolError("unknown chunk", f"{fetch.chunk} of {len(data)} bytes")
        piece = data[start : start + MAX_DATA_BYTES]
        self._outgoing.append(
            (
                peer,
                Chunk(
                    request=fetch.request,
                    what=fetch.what,
                    fragment=fetch.fragment,
                    version=version,
                    chunk=fetch.chunk,
                    data=piece,
                ),
            )
        )

    def _forget_round(self, key: tuple[int, int]) -> None:
        self._history_bytes -= len(self._history.pop(key)[1])


def split_donors(peers: Sequence[PeerId], fragment: int) -> tuple[PeerId, ...]:
    """Donors for a fragment, each fragment starting with another one, so that a newcomer loads them
    evenly."""
    if not peers:
        return ()
    start = fragment % len(peers)
    return (*peers[start:], *peers[:start])
