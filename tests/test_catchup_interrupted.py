"""A newcomer that is killed while it loads a state, and comes back: what it had is not loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_co2.node.kept_chunks import KeptChunks
from p2p_co2.protocol.catchup import CatchUp
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from p2p_co2.protocol.wire.messages_pb2 import Chunk
from tests.catchup_world import CHUNKS, D1, IDENTITIES, LARGE, LATE, RUN, SHAPE, World, state_of

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
