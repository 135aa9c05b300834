"""The donor: serves past rounds, exported states and buffers in chunks, within memory bounds.

A state is exported when somebody asks, and kept while it is loaded. So the chunks of one version stay the
same although the swarm commits meanwhile. The rounds since are held as well, and for a while after it.

Laws: one large export at a time (``EXPORTS_FREE_BYTES``), within its idle and its whole time. One that nobody
takes chunks of makes room at once. The tensor side is busy with large exports for at most one part in 1 +
``EXPORT_REST`` of its time. Price: room goes to whoever asks first, and identities are free to make.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from p2p_co2.digest import chunk_digests, digest_of_chunks
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import (
    BUFFERS,
    PATIENCE_S,
    ROUND,
    STATE,
    ExportWanted,
    Outbox,
    TransferSizes,
)
from p2p_co2.protocol.catchup.history import HISTORY_ROUNDS_KEPT, RoundHistory
from p2p_co2.protocol.catchup.manifest import chunk_at, make_manifest
from p2p_co2.system.memory import Buffer, JoinedBuffers
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal

EXPORT_SLOWEST_BYTES_PER_S = 250e3
"""An export is dropped after the time that its bytes take at this and ten times ``PATIENCE_S``, or once that
if nobody asks for it. So long after one that somebody loaded has gone, the rounds since are kept."""
LOADS_S = PATIENCE_S / 4
"""A newcomer asks for the next chunk within so long, or others may have its room."""
CHOOSING_BEATS = 4
"""Heartbeats within which it asks for the first one: it compares what several donors promise."""
EXPORT_REST = 3.0
"""How many times as long as an export took no other is begun, if all states together are large."""
MAX_WAITING = 64
"""Peers that wait for one export."""


@dataclass
class Export:
    """A state that is being given, until ``ends_at`` in any case. ``users``: until when each peer that asked
    counts as loading it; ``is_taken``: whether anybody was sent a chunk."""

    data: bytes | JoinedBuffers
    asked_at: float
    ends_at: float
    manifest: Manifest
    users: OrderedDict[PeerId, float] = field(default_factory=OrderedDict)
    is_taken: bool = False

    def is_asked_for(self, peer: PeerId, now: float, loads_until: float) -> None:
        """``peer`` asked for the manifest, or a chunk, and may be back until then."""
        self.asked_at = now
        self.users[peer] = max(loads_until, self.users.get(peer, now))
        if len(self.users) > MAX_WAITING:
            self.users.popitem(last=False)

    def dropped_at(self) -> float:
        return min(self.asked_at + PATIENCE_S, self.ends_at)

    def is_in_use(self, now: float, but_for: PeerId) -> bool:
        """By anybody else."""
        return any(now < until for peer, until in self.users.items() if peer != but_for)


@dataclass
class BufferStore:
    """What a newcomer is given of buffers: ``layout`` names their order, shapes and dtypes, ``size_bytes`` is
    of all, 0 if there are none. ``are_wanted``: the training thread should ``give_buffers``; it asks."""

    layout: int = 0
    size_bytes: int = 0
    are_wanted: bool = False
    export: Export | None = None


class Donor:
    """Holds the last rounds' means and the states that somebody is loading now. ``gave_at``: when anybody was
    sent a chunk last; other threads look at it."""

    def __init__(
        self, identity: Identity, run: bytes, shape: TransferSizes, out: Outbox,
        is_everywhere: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        self._identity = identity
        self._run = run
        self.shape = shape
        self._out = out
        self._versions = [0] * len(shape.state_bytes)
        self.history = RoundHistory(shape, is_everywhere)
        self.exports: OrderedDict[tuple[int, int], Export] = OrderedDict()
        self._replayed: tuple[int, int, float] | None = None
        """Fragment, version and end of the last loaded export that has gone: the rounds since are kept."""
        self._waiting: dict[int, list[tuple[PeerId, Fetch]]] = {}
        self._began_at: dict[int, float] = {}
        self._rests_until = -math.inf
        self.gave_at = -math.inf
        self.buffers = BufferStore()

    def held(self) -> dict[str, tuple[int, int]]:
        """What is held for others: (now, at most) by the name of the bound."""
        kept = HISTORY_ROUNDS_KEPT * len(self._versions)
        users = [len(export.users) for export in self.exports.values()]
        return {
            "HISTORY_ROUNDS_KEPT": (len(self.history), kept),
            "MAX_WAITING": (max([0, *users, *map(len, self._waiting.values())]), MAX_WAITING),
        }

    def exported_bytes(self) -> int:
        """What is held for others to load."""
        return sum(len(export.data) for export in list(self.exports.values()))

    def exported(
        self, fragment: int, version: int, data: bytes | JoinedBuffers, digest: bytes,
        chunk_digests: list[bytes], now: float,
    ) -> None:  # fmt: skip
        """The answer to ``ExportWanted``; ``chunk_digests`` of ``data``'s chunks, in order."""
        shape = self.shape
        size = len(data)
        place = Fetch(what=STATE, fragment=fragment, version=version)
        manifest = self._sign(place, size, chunk_digests, digest=digest)
        longest_s = 10 * PATIENCE_S + size * shape.scale / EXPORT_SLOWEST_BYTES_PER_S
        export = Export(data, now, now + longest_s, manifest)
        self.exports[fragment, version] = export
        self._exports_changed()
        if not shape.is_free(sum(shape.state_bytes)):
            self._rests_until = now + EXPORT_REST * (now - self._began_at.pop(fragment, now))
        for peer, fetch in self._waiting.pop(fragment, []):
            if _suits(fetch, version):
                export.is_asked_for(peer, now, now + CHOOSING_BEATS * HEARTBEAT_S)
                self._answer(fetch, peer, manifest)
            else:
                self._refuse_version(fetch, peer, version)

    def moved(self, fragment: int, version: int) -> None:
        """This peer's state of a fragment is at ``version`` now."""
        self._versions[fragment] = version

    def turned_back(self, fragment: int) -> None:
        """This peer goes on from a state of another history: what it holds of its own is given no more."""
        self.history.drop(fragment)
        if self._replayed is not None and self._replayed[0] == fragment:
            self._replayed = None
        for key in [key for key in self.exports if key[0] == fragment]:
            del self.exports[key]
        self._exports_changed()

    def receive(self, fetch: Fetch, sender: PeerId, now: float) -> None:
        """Answer a peer that is behind; raises ``RemoteProtocolError`` for a chunk that cannot be."""
        is_buffers = fetch.what == BUFFERS
        size = self.buffers.size_bytes if is_buffers else self.shape.bytes_of(fetch.what, fetch.fragment)
        starts_at = chunk_at(fetch.chunk, size, self.shape.chunk_bytes).start
        if fetch.want_chunk and starts_at >= size and (size or not is_buffers):
            raise RemoteProtocolError("unknown chunk", f"{fetch.chunk} of {size} bytes")
        if is_buffers:
            self._serve_buffers(fetch, sender, now)
        elif fetch.what == ROUND:
            self._serve_round(fetch, sender, now)
        elif fetch.want_chunk:
            self._serve_chunk(fetch, sender, now)
        else:
            self._serve_manifest(fetch, sender, now)

    def handle_timer(self, now: float) -> None:
        is_replayed = self._replayed is not None and now >= self._replayed[2]
        if is_replayed:
            self._replayed = None
        over = [key for key, export in self.exports.items() if now >= export.dropped_at()]
        for key in over:
            self._drop(key, now)
        if is_replayed or over:
            self._exports_changed()

    def get_timer(self) -> float | None:
        if not self.exports and self._replayed is None:
            return None  # nearly always
        ends = [export.dropped_at() for export in self.exports.values()]
        if self._replayed is not None:
            ends.append(self._replayed[2])
        return min(ends)

    # ---- rounds

    def _serve_round(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        kept = self.history.find(fetch.fragment, fetch.version)
        if kept is None:
            early = self._versions[fetch.fragment] < fetch.version
            reason = "round not applied yet" if early else "round not kept"
            self._refuse(fetch, peer, reason, again=early)
        elif fetch.want_chunk:
            self._send_chunk(fetch, peer, kept.mean)
            self.gave_at = now
        else:
            if kept.manifest is None:
                digests = kept.chunk_digests(self.shape.chunk_bytes)
                kept.manifest = self._sign(fetch, len(kept.mean), digests, decision=kept.decision)
            self._answer(fetch, peer, kept.manifest)

    # ---- states

    def _serve_chunk(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        export = self.exports.get((fetch.fragment, fetch.version))
        if export is None:
            self._refuse(fetch, peer, "that state is no longer kept", newest=self._versions[fetch.fragment])
            return
        self._send_chunk(fetch, peer, export.data)
        export.is_asked_for(peer, now, now + LOADS_S)
        export.is_taken = True
        self.gave_at = now

    def _serve_manifest(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        """The newest state, if there is room for it; else one that is there already; else come again."""
        fragment = fetch.fragment
        current = self._versions[fetch.fragment]
        export = self.exports.get((fragment, current))
        if export is None or not _suits(fetch, current):
            if _suits(fetch, current) and (fragment in self._waiting or self._has_room(fragment, peer, now)):
                self._wait(fetch, peer, now)
                return
            older = [its for key, its in self.exports.items() if key[0] == fragment and _suits(fetch, key[1])]
            export = max(older, key=lambda known: known.manifest.version, default=None)
        if export is not None:
            export.is_asked_for(peer, now, now + CHOOSING_BEATS * HEARTBEAT_S)
            self._answer(fetch, peer, export.manifest)
        elif _suits(fetch, current):
            self._refuse(fetch, peer, "busy with another newcomer", again=True)
        else:
            self._refuse_version(fetch, peer, current)

    def _has_room(self, fragment: int, peer: PeerId, now: float) -> bool:
        """Drop exports that nobody else uses, as far as it takes; False if those in use leave no room."""
        if now < self._rests_until:
            return False
        wanted = self.shape.state_bytes[fragment]
        pending = sum(self.shape.state_bytes[waited] for waited in self._waiting)
        idle = [key for key, export in self.exports.items() if not export.is_in_use(now, peer)]
        idle.sort(key=lambda key: self.exports[key].asked_at)
        for key in (*idle, None):
            held = self.exported_bytes() + pending
            if not held or self.shape.is_free(held + wanted):
                return True
            if key is not None:
                self._drop(key, now)
                self._exports_changed()
        return False

    def _drop(self, key: tuple[int, int], now: float) -> None:
        """An export has gone; the rounds after one that was loaded are kept for a while."""
        if self.exports.pop(key).is_taken:
            self._replayed = *key, now + PATIENCE_S

    def _wait(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        waiting = self._waiting.setdefault(fetch.fragment, [])
        if len(waiting) >= MAX_WAITING:
            self._refuse(fetch, peer, "too many newcomers, try another donor", again=True)
            return
        waiting.append((peer, fetch))
        if len(waiting) == 1:
            self._began_at[fetch.fragment] = now
            self._out.emit(ExportWanted(fetch.fragment))

    def _exports_changed(self) -> None:
        """Hold the rounds after what is being given, or was."""
        held = {} if self._replayed is None else {self._replayed[0]: self._replayed[1]}
        for fragment, version in self.exports:
            held[fragment] = min(version, held.get(fragment, version))
        self.history.hold(held)

    # ---- buffers

    def give_buffers(self, data: bytes, now: float) -> None:
        """The answer to ``buffers.are_wanted``; empty if there are none from now on."""
        store = self.buffers
        if not store.are_wanted:
            return  # they are there: what is loaded must stay the same
        store.are_wanted = False
        if not data:
            store.size_bytes = 0
            return
        digests = list(chunk_digests(data, self.shape.chunk_bytes))
        place = Fetch(what=BUFFERS, fragment=len(self._versions), version=store.layout)
        manifest = self._sign(place, len(data), digests, digest=digest_of_chunks(digests))
        store.export = Export(data, now, now + 10 * PATIENCE_S, manifest)

    def _serve_buffers(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        """As they were when somebody asked first; chunk by chunk, as long as somebody does."""
        store = self.buffers
        if store.export is not None and now >= store.export.dropped_at():
            store.export = None
        if not store.size_bytes or fetch.version != store.layout:
            self._refuse(fetch, peer, "other buffers, or none")
        elif store.export is not None:
            store.export.asked_at = now
            if fetch.want_chunk:
                self._send_chunk(fetch, peer, store.export.data)
            else:
                self._answer(fetch, peer, store.export.manifest)
        else:
            store.are_wanted |= not fetch.want_chunk
            self._refuse(fetch, peer, "not copied yet", again=True)

    # ---- answers

    def _sign(self, place: Fetch, size: int, digests: list[bytes], **more: Any) -> Manifest:
        chunk_bytes = self.shape.chunk_bytes
        return make_manifest(self._identity, self._run, place, size, digests, chunk_bytes=chunk_bytes, **more)

    def _answer(self, fetch: Fetch, peer: PeerId, signed: Manifest) -> None:
        manifest = Manifest()
        manifest.CopyFrom(signed)
        manifest.request = fetch.request
        self._out.send(peer, manifest)

    def _send_chunk(self, fetch: Fetch, peer: PeerId, data: Buffer | JoinedBuffers) -> None:
        chunk = Chunk(
            request=fetch.request, what=fetch.what, fragment=fetch.fragment, version=fetch.version,
            chunk=fetch.chunk, data=bytes(data[chunk_at(fetch.chunk, len(data), self.shape.chunk_bytes)]),
        )  # fmt: skip
        self._out.send(peer, chunk)

    def _refuse_version(self, fetch: Fetch, peer: PeerId, version: int) -> None:
        early = version < fetch.version
        reason = f"at version {version}, {'not there yet' if early else 'past it'}"
        self._refuse(fetch, peer, reason, newest=version, again=early)

    def _refuse(self, fetch: Fetch, peer: PeerId, reason: str, newest: int = 0, again: bool = False) -> None:
        refusal = Refusal(request=fetch.request, reason=reason, newest_version=newest, again=again)
        self._out.send(peer, refusal)


def _suits(fetch: Fetch, version: int) -> bool:
    """Whether a state of ``version`` is of use to who asks."""
    return fetch.version <= version and (not fetch.newest or version <= fetch.newest)
