"""The donor: serves past rounds and exported states in chunks, within memory bounds."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from p2p_co2.catchup.goals import ROUND, STATE, ExportWanted, Outbox, Shape
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest, Refusal

EXPORTS_KEPT = 2
EXPORT_KEPT_S = 20.0
HISTORY_ROUNDS_KEPT = 8
"""Rounds per fragment whose mean a donor can replay, if memory allows."""
HISTORY_BYTES_SHARE = 0.25
"""All kept means together, as a share of the model's fp32 size (at least one round per fragment is kept)."""
MAX_WAITING_EXPORTS = 64


@dataclass
class _Export:
    version: int
    data: bytes
    digest: bytes
    made_at: float
    manifest: Manifest


class Donor:
    """Holds the last rounds' means and the states that somebody is loading now."""

    def __init__(self, shape: Shape, out: Outbox) -> None:
        self._shape, self._out = shape, out
        self._exports: OrderedDict[int, _Export] = OrderedDict()
        self._waiting: dict[int, list[tuple[PeerId, Fetch]]] = {}
        self._history: OrderedDict[tuple[int, int], tuple[Decision, bytes]] = OrderedDict()
        self.history_bytes = 0

    def remember(self, fragment: int, version: int, decision: Decision, mean: bytes) -> None:
        """Keep a committed round for replay, within the memory bound."""
        key = (fragment, version)
        if key in self._history:
            return
        self._history[key] = (decision, mean)
        self.history_bytes += len(mean)
        mine = [known for known in self._history if known[0] == fragment]
        if len(mine) > HISTORY_ROUNDS_KEPT:
            self._forget_round(mine[0])
        bound = HISTORY_BYTES_SHARE * sum(self._shape.state_bytes) / 2  # a state is params and momentum
        while self.history_bytes > bound and len(self._history) > len(self._shape.mean_bytes):
            self._forget_round(next(iter(self._history)))

    def exported(self, fragment: int, version: int, data: bytes, digest: bytes, now: float) -> None:
        """The answer to ``ExportWanted``."""
        manifest = Manifest(
            what=STATE,
            fragment=fragment,
            version=version,
            total_bytes=len(data),
            chunk_bytes=MAX_DATA_BYTES,
            chunk_digests=_digests(data),
            digest=digest,
        )
        self._exports[fragment] = _Export(version, data, digest, now, manifest)
        self._exports.move_to_end(fragment)
        while len(self._exports) > EXPORTS_KEPT:
            self._exports.popitem(last=False)
        for peer, fetch in self._waiting.pop(fragment, []):
            self._serve_state(fetch, peer, now)

    def receive(self, fetch: Fetch, sender: PeerId, now: float) -> None:
        """Answer a peer that is behind; raises ``RemoteProtocolError`` for a chunk that cannot be."""
        if fetch.what == ROUND:
            self._serve_round(fetch, sender)
        else:
            self._serve_state(fetch, sender, now)

    def handle_timer(self, now: float) -> None:
        for fragment, export in list(self._exports.items()):
            if now - export.made_at > EXPORT_KEPT_S:
                del self._exports[fragment]

    def get_timer(self) -> float | None:
        return min((export.made_at + EXPORT_KEPT_S for export in self._exports.values()), default=None)

    def _serve_round(self, fetch: Fetch, peer: PeerId) -> None:
        known = self._history.get((fetch.fragment, fetch.version))
        if known is None:
            newest = max(
                (version for fragment, version in self._history if fragment == fetch.fragment), default=0
            )
            self._out.messages.append(
                (peer, Refusal(request=fetch.request, reason="round not kept", newest_version=newest))
            )
            return
        decision, mean = known
        if fetch.want_chunk:
            self._send_chunk(fetch, peer, fetch.version, mean)
            return
        manifest = Manifest(
            request=fetch.request,
            what=ROUND,
            fragment=fetch.fragment,
            version=fetch.version,
            total_bytes=len(mean),
            chunk_bytes=MAX_DATA_BYTES,
            chunk_digests=_digests(mean),
            decision=decision,
        )
        self._out.messages.append((peer, manifest))

    def _serve_state(self, fetch: Fetch, peer: PeerId, now: float) -> None:
        export = self._exports.get(fetch.fragment)
        if fetch.want_chunk:
            if export is None or export.version != fetch.version:
                self._out.messages.append(
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
            self._out.messages.append((peer, manifest))
            return
        waiting = self._waiting.setdefault(fetch.fragment, [])
        if len(waiting) >= MAX_WAITING_EXPORTS:
            self._out.messages.append(
                (peer, Refusal(request=fetch.request, reason="too many newcomers, try another donor"))
            )
            return
        waiting.append((peer, fetch))
        if len(waiting) == 1:
            self._out.events.append(ExportWanted(fetch.fragment))

    def _send_chunk(self, fetch: Fetch, peer: PeerId, version: int, data: bytes) -> None:
        start = fetch.chunk * MAX_DATA_BYTES
        if start >= len(data):
            raise RemoteProtocolError("unknown chunk", f"{fetch.chunk} of {len(data)} bytes")
        piece = data[start : start + MAX_DATA_BYTES]
        self._out.messages.append(
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
        self.history_bytes -= len(self._history.pop(key)[1])


def _digests(data: bytes) -> list[bytes]:
    """sha256 of every chunk."""
    view = memoryview(data)
    return [
        hashlib.sha256(view[at : at + MAX_DATA_BYTES]).digest() for at in range(0, len(data), MAX_DATA_BYTES)
    ]
