"""A newcomer that is killed while it loads a state, and comes back: what it had is not loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_co2.catchup import STATE, CatchUp
from p2p_co2.catchup.camps import GONE
from p2p_co2.catchup.chunks import Begun, Chunks
from p2p_co2.catchup.kept import NothingKept
from p2p_co2.catchup.manifest import content_of, make_manifest
from p2p_co2.digest import chunk_digests
from p2p_co2.node.kept_chunks import KeptChunks
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest
from tests.catchup_world import CHUNKS, D1, IDENTITIES, LARGE, LATE, RUN, SHAPE, World, named, state_of

RATE_BYTES_PER_S = 10 * MAX_DATA_BYTES
HALF_S = 1.0


def chunks_given(world: World) -> int:
    return sum(isinstance(message, Chunk) for _, message in world.sent)


def newcomer(world: World, folder: Path) -> KeptChunks:
    """A new process of the late peer, with the disk of the last one."""
    kept = KeptChunks(folder)
    world.machines[LATE] = CatchUp(IDENTITIES[0], RUN, SHAPE)
    world.machines[LATE].keep_in(kept)
    world.events.clear()
    world.sent.clear()
    world._under_way.clear()
    return kept


def interrupted(folder: Path) -> World:
    """Killed in the middle: some chunks of fragment 1 at version 7 are on disk."""
    world = World(donors=2, rate=RATE_BYTES_PER_S)
    newcomer(world, folder)
    world.want()
    world.run(HALF_S)
    assert not world.events
    assert CHUNKS / 4 < chunks_given(world) < CHUNKS
    return world


def test_only_what_is_missing_is_loaded_after_a_kill(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    kept = newcomer(world, tmp_path)
    assert kept.held_version(1, LARGE) == 7
    world.want()
    world.run()
    fetched = world.fetched()
    assert fetched.data == state_of(1, 7)
    assert fetched.chunks_kept > CHUNKS / 4
    assert chunks_given(world) == CHUNKS - fetched.chunks_kept + fetched.chunks_wasted


def test_donors_that_went_on_still_give_the_rest_of_what_was_begun(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    for peer in world.machines:
        world.move(peer, 8)
    newcomer(world, tmp_path)
    world.want(version=8, oldest=7)
    world.run()
    fetched = world.fetched()
    assert (fetched.version, fetched.data) == (7, state_of(1, 7))
    assert fetched.chunks_kept > CHUNKS / 4


def test_one_donor_that_lost_its_export_does_not_lose_the_rest(tmp_path: Path) -> None:
    world = interrupted(tmp_path)
    world.machines[D1] = CatchUp(IDENTITIES[1], RUN, SHAPE)
    for peer in world.machines:
        world.move(peer, 8)
    newcomer(world, tmp_path)
    world.want(version=8, oldest=7)
    world.run()
    assert world.fetched().data in (state_of(1, 7), state_of(1, 8))


@pytest.mark.parametrize("oldest", [7, 8])
def test_a_version_that_nobody_keeps_is_loaded_anew(tmp_path: Path, oldest: int) -> None:
    world = interrupted(tmp_path)
    world.now += 100.0
    for peer, machine in world.machines.items():
        machine.handle_timer(world.now)  # the donors drop their exports
        world.move(peer, 8)
    kept = newcomer(world, tmp_path)
    world.want(version=8, oldest=oldest)
    world.run()
    fetched = world.fetched()
    assert (fetched.version, fetched.data, fetched.chunks_kept) == (8, state_of(1, 8), 0)
    assert kept.held_version(1, LARGE) == 8
    assert len(list(tmp_path.iterdir())) == 1  # bounded: one file for a fragment


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 40] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [flip, cut, zeros, Path.unlink, turn_into_a_folder])
def test_what_the_disk_gives_back_is_checked(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    world = interrupted(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "fragment-1-version-7.part"
    harm(path)
    newcomer(world, tmp_path)
    world.want()
    world.run()
    assert world.fetched().data == state_of(1, 7)


def test_a_disk_that_refuses_ends_the_keeping_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    world = World(donors=2, rate=RATE_BYTES_PER_S)
    kept = newcomer(world, tmp_path / "file" / "below")
    world.want()
    world.run()
    assert world.fetched().data == state_of(1, 7)
    assert kept.held_version(1, LARGE) == 0


def test_a_disk_that_fills_ends_the_keeping_and_makes_room(small_disk: Path) -> None:
    world = World(donors=2, rate=RATE_BYTES_PER_S)
    kept = newcomer(world, small_disk / "catching-up")
    world.want()
    world.run()
    assert world.fetched().data == state_of(1, 7)
    assert kept.held_version(1, LARGE) == 0
    assert list(small_disk.iterdir()) == []


def test_nothing_is_left_when_the_peer_has_caught_up(tmp_path: Path) -> None:
    world = interrupted(tmp_path / "catching-up")
    kept = newcomer(world, tmp_path / "catching-up")
    world.want()
    world.run()
    kept.end()
    kept.end()
    assert list(tmp_path.iterdir()) == []
    newest = newcomer(world, tmp_path / "catching-up")
    newest.end()
    world.want()
    world.run()
    assert world.fetched().chunks_kept == 0
    assert list(tmp_path.iterdir()) == []


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
