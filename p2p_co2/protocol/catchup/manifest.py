"""What a donor promises: a signed list of chunk digests, and what a chunk must be to be one of them.

Laws: a manifest is checked against sizes that this peer computed itself before anything is allocated. Two
promise the same bytes exactly if their ``content_of`` are equal. One that names a state has the chunk digests
of that state and no others. A donor cannot deny its promise, since it signed it.
"""

from __future__ import annotations

import struct

from p2p_co2.digest import DIGEST_BYTES, digest_of_chunks
from p2p_co2.digest import digest as digest_of
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.catchup.goals import ROUND, STATE, Goal
from p2p_co2.wire.identity import Identity, PeerId, verify
from p2p_co2.wire.limits import MAX_DATA_BYTES, MAX_VERSION
from p2p_co2.wire.messages_pb2 import Chunk, Decision, Fetch, Manifest

MANIFEST_CONTEXT = b"p2p-co2 chunk manifest"
_PLACE = struct.Struct("<BIQQI")
Content = bytes
"""What a manifest promises, as bytes: equal for equal promises."""


def chunk_count(total_bytes: int, chunk_bytes: int = MAX_DATA_BYTES) -> int:
    return -(-total_bytes // chunk_bytes)


def chunk_at(chunk: int, total_bytes: int, chunk_bytes: int = MAX_DATA_BYTES) -> slice:
    """Where a chunk lies; empty for one that does not exist."""
    start = min(total_bytes, chunk * chunk_bytes)
    return slice(start, min(total_bytes, start + chunk_bytes))


def make_manifest(
    identity: Identity,
    run: bytes,
    fetch: Fetch,
    total_bytes: int,
    chunk_digests: list[bytes],
    *,
    digest: bytes = b"",
    decision: Decision | None = None,
    chunk_bytes: int = MAX_DATA_BYTES,
) -> Manifest:
    """A signed manifest of what ``fetch`` names (its version is the manifest's); ``run`` is the run's
    digest."""
    manifest = Manifest(
        what=fetch.what, fragment=fetch.fragment, version=fetch.version, total_bytes=total_bytes,
        chunk_bytes=chunk_bytes, chunk_digests=chunk_digests, digest=digest, decision=decision,
    )  # fmt: skip
    manifest.signature = identity.sign(MANIFEST_CONTEXT, run + content_of(manifest))
    return manifest


def content_of(manifest: Manifest) -> Content:
    """All that a donor signs, but for the run."""
    place = _PLACE.pack(
        manifest.what, manifest.fragment, manifest.version, manifest.total_bytes, manifest.chunk_bytes
    )
    decision = manifest.decision.outcome
    lengths = struct.pack("<III", len(manifest.digest), len(manifest.chunk_digests), len(decision))
    return b"".join((place, lengths, manifest.digest, *manifest.chunk_digests, decision))


def check_manifest(
    manifest: Manifest, goal: Goal, expected_bytes: int, oldest: int, sender: PeerId, run: bytes,
    chunk_bytes: int = MAX_DATA_BYTES,
) -> None:  # fmt: skip
    """Raise ``RemoteProtocolError`` unless ``sender`` signed a manifest that can serve ``goal``."""
    problem = ""
    if (manifest.what, manifest.fragment) != (goal.what, goal.fragment):
        problem = "another fragment than asked"
    elif manifest.total_bytes != expected_bytes or manifest.chunk_bytes != chunk_bytes:
        problem = f"{manifest.total_bytes} bytes where this model has {expected_bytes}"
    elif len(manifest.chunk_digests) != chunk_count(expected_bytes, chunk_bytes) or any(
        len(digest) != DIGEST_BYTES for digest in manifest.chunk_digests
    ):
        problem = "wrong number or size of chunk digests"
    elif manifest.digest != (b"" if goal.what == ROUND else digest_of_chunks(manifest.chunk_digests)):
        problem = "the chunk digests are not those of the state that it names"
    elif not oldest <= manifest.version <= MAX_VERSION or (
        goal.what != STATE and manifest.version != goal.version
    ):
        problem = f"version {manifest.version} where {goal.version} was asked"
    if problem:
        raise RemoteProtocolError("bad manifest", problem)
    verify(sender, MANIFEST_CONTEXT, run + content_of(manifest), manifest.signature)


def check_chunk(chunk: Chunk, manifest: Manifest) -> None:
    """Raise ``RemoteProtocolError`` unless ``chunk`` is what ``manifest`` promises."""
    place = chunk_at(chunk.chunk, manifest.total_bytes, manifest.chunk_bytes)
    what = f"chunk {chunk.chunk} of fragment {manifest.fragment}"
    if chunk.chunk >= len(manifest.chunk_digests):
        raise RemoteProtocolError("unasked chunk", what)
    if len(chunk.data) != place.stop - place.start:
        raise RemoteProtocolError(Offence.WRONG_SIZE, f"{what} has {len(chunk.data)} bytes")
    if digest_of(chunk.data) != manifest.chunk_digests[chunk.chunk]:
        raise RemoteProtocolError("wrong digest", f"of {what}")
