"""The chunks of a download, and what it has begun beside: by hand."""

from __future__ import annotations

from pathlib import Path

from p2p_co2.digest import chunk_digests, digest, digest_of_chunks
from p2p_co2.node.kept_chunks import KeptChunks
from p2p_co2.protocol.catchup import STATE
from p2p_co2.protocol.catchup.camps import GONE
from p2p_co2.protocol.catchup.chunks import Begun, Chunks
from p2p_co2.protocol.catchup.kept import NothingKept
from p2p_co2.protocol.catchup.manifest import content_of, make_manifest
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest
from p2p_co2.system.memory import Joined
from tests.catchup_world import D1, D2, IDENTITIES, RUN, named


def test_what_is_missing_is_asked_for_in_order_and_what_is_given_back_first() -> None:
    data = b"aabbc"
    manifest = Manifest(total_bytes=5, chunk_bytes=2, chunk_digests=list(chunk_digests(data, 2)))
    chunks = Chunks(NothingKept())
    assert len(chunks.data) == 0
    chunks.begin(manifest)
    assert [chunks.pending.popleft() for _ in range(3)] == [0, 1, 2]
    chunks.take(Chunk(chunk=2, data=b"c"), manifest, D1)
    chunks.give_back([2, 1, 0])  # the last is here already
    assert list(chunks.pending) == [0, 1]
    chunks.was_late(1)
    chunks.was_late(1)
    assert list(chunks.pending) == [0]
    chunks.take(Chunk(chunk=1, data=b"bb"), manifest, D1)
    chunks.take(Chunk(chunk=0, data=b"aa"), manifest, D2)
    assert (bytes(chunks.data), chunks.missing, chunks.gave, chunks.kept) == (data, set(), {D1: 2, D2: 1}, 0)


def test_a_state_is_named_by_its_chunks_whatever_pieces_it_lies_in() -> None:
    by_hand = digest(digest(b"ab") + digest(b"cd") + digest(b"e"))
    assert digest_of_chunks(chunk_digests(b"abcde", 2)) == by_hand
    assert digest_of_chunks(chunk_digests(Joined(b"a", b"bcd", b"", b"e"), 2)) == by_hand
    assert by_hand != digest(b"abcde")


def test_what_was_put_aside_is_gone_on_with_in_memory(tmp_path: Path) -> None:
    """On disk there is one file per fragment, which begins anew each time. No third state is held, whatever
    is promised."""
    size, begun = 3 * MAX_DATA_BYTES, Begun(KeptChunks(tmp_path))
    states = {version: bytes([version]) * size for version in (7, 8, 9)}
    manifests = {
        version: make_manifest(
            IDENTITIES[1], RUN, Fetch(what=STATE, fragment=1, version=version), size,
            list(chunk_digests(data, MAX_DATA_BYTES)), digest=named(data),
        )
        for version, data in states.items()
    }  # fmt: skip

    def go_on(version: int) -> Chunks:
        return begun.go_on(content_of(manifests[version]), content_of(manifests[7]), manifests[version])

    first = go_on(7)
    assert first.pending.popleft() == 0  # somebody was asked for it
    first.take(Chunk(chunk=1, data=states[7][:MAX_DATA_BYTES]), manifests[7], D1)
    second = go_on(8)
    second.take(Chunk(chunk=2, data=states[8][:MAX_DATA_BYTES]), manifests[8], D1)
    assert go_on(7) is first
    assert list(first.pending) == [0, 2]
    first.take(Chunk(chunk=0, data=states[7][:MAX_DATA_BYTES]), manifests[7], D1)
    on_disk = KeptChunks(tmp_path)
    assert on_disk.held_version(1, size) == 7
    assert bytes(on_disk.buffer(manifests[7])).count(7) == MAX_DATA_BYTES  # what came since
    assert bytes(first.data).count(7) == 2 * MAX_DATA_BYTES
    assert go_on(8) is second
    assert len(begun) == 2
    assert go_on(9).missing == {0, 1, 2}
    assert go_on(7) is first
    assert go_on(8).missing == {0, 1, 2}  # made room for 9
    assert KeptChunks(tmp_path).held_version(1, size) == 8


def test_what_was_gone_back_to_and_is_lost_is_put_aside_for_what_is_chosen_then() -> None:
    """It was thrown away, for what may give nothing."""
    size, begun = 2 * MAX_DATA_BYTES, Begun(NothingKept())
    manifest = Manifest(total_bytes=size, chunk_bytes=MAX_DATA_BYTES, chunk_digests=[bytes(32)] * 2)
    seven = begun.go_on(b"7", b"", manifest)
    eight = begun.go_on(b"8", b"7", manifest)
    assert begun.go_on(b"7", b"7", manifest) is seven
    nine = begun.go_on(b"9", GONE, manifest)
    assert begun.go_on(b"7", GONE, manifest) is seven
    assert begun.go_on(b"9", GONE, manifest) is nine
    assert begun.go_on(b"8", GONE, manifest) is not eight
    assert len(begun) == 2
