"""The chunks of what a download loads: which are here, and which nobody was asked for yet.

Law: memory for two states of a fragment at most, whatever donors promise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from p2p_co2.protocol.catchup.kept import Store
from p2p_co2.protocol.catchup.manifest import Content, chunk_at, chunk_digest
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Manifest


class Chunks:
    """``data``: memory for all of them, those that are right in their places, empty before anything is begun;
    ``pending``: those that nobody was asked for, in the order in which they are to be; ``gave``: how many
    each donor has given; ``kept``: how many an earlier attempt had."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.data = memoryview(bytearray())
        self.pending: deque[int] = deque()
        self.missing: set[int] = set()
        self.gave: dict[PeerId, int] = {}
        self.kept = 0

    def begin(self, manifest: Manifest) -> None:
        """Chunks that a buffer brings along from an earlier attempt are kept if they are right."""
        self.data = self._store.buffer(manifest)
        self.missing = {
            chunk
            for chunk, digest in enumerate(manifest.chunk_digests)
            if chunk_digest(self.data[chunk_at(chunk, manifest.total_bytes, manifest.chunk_bytes)]) != digest
        }
        self.kept = len(manifest.chunk_digests) - len(self.missing)
        self.pending = deque(sorted(self.missing))
        self.gave = {}

    def resume(self, manifest: Manifest) -> None:
        """Go on with what was put aside for something else. What came before that is not kept beyond our own
        end any more."""
        self._store.begin(manifest)
        self.pending = deque(sorted(self.missing))

    def take(self, chunk: Chunk, manifest: Manifest, donor: PeerId) -> None:
        """Put one that is right and missing in its place."""
        self.missing.discard(chunk.chunk)
        place = chunk_at(chunk.chunk, manifest.total_bytes, manifest.chunk_bytes)
        self.data[place] = chunk.data
        self._store.keep(manifest, place.start, chunk.data)
        self.gave[donor] = self.gave.get(donor, 0) + 1

    def was_late(self, chunk: int) -> None:
        """It was taken for lost, and has come: nobody need be asked for it."""
        if chunk in self.pending:
            self.pending.remove(chunk)

    def give_back(self, chunks: Collection[int]) -> None:
        """Who was asked for these does not give them: they are asked for first."""
        self.pending.extendleft(sorted((chunk for chunk in chunks if chunk in self.missing), reverse=True))


class Begun:
    """What a download has begun: what it loads now, and at most one thing that it may go back to. That is
    what was left first, or while that is gone on with, or has been lost, what was loaded last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._content: Content = b""
        self._begun: dict[Content, Chunks] = {}

    def go_on(self, content: Content, left: Content, manifest: Manifest) -> Chunks:
        """Begin what ``manifest`` promises, or go on with it. ``left``: what was left first, if anything
        was."""
        aside = left if left in self._begun and left != content else self._content
        self._begun = {one: chunks for one, chunks in self._begun.items() if one in (aside, content)}
        self._content = content
        if (chunks := self._begun.get(content)) is not None:
            chunks.resume(manifest)
            return chunks
        chunks = self._begun[content] = Chunks(self._store)
        chunks.begin(manifest)
        return chunks

    def __len__(self) -> int:
        """How many states there is memory for."""
        return len(self._begun)
