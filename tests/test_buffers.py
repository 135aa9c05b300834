"""A newcomer takes a donor's buffers: as bytes of a model, and chunk by chunk from peers that may lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.donor import BufferStore
from p2p_co2.protocol.catchup.goals import BUFFERS, PATIENCE_S, DonorRefused, Fetched, FetchFailed, Goal
from p2p_co2.trainer.model_summary import MOST_BYTES, ModelBuffers
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Fetch
from tests.catchup_world import D1, D2, LATE, SHAPE, World, lying, zero


def model(**buffers: Tensor) -> nn.Module:
    """A normalised model, and buffers of a module of its own."""
    part = nn.Module()
    for name, values in buffers.items():
        part.register_buffer(name, values)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), part)


def moved(**buffers: Tensor) -> nn.Module:
    """The same, with running statistics of something."""
    made = model(**buffers)
    made[1](5.0 + torch.randn(32, 4))  # type: ignore[index]
    return made


# ---- a model's buffers


def test_running_statistics_go_first_and_large_buffers_not_at_all() -> None:
    table, packed = torch.zeros(MOST_BYTES - 8, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)
    donor, newcomer = moved(table=table, packed=packed), model(table=table.clone(), packed=packed * 0)
    given, taken = ModelBuffers(donor), ModelBuffers(newcomer)
    assert given.running == ["1.running_mean", "1.running_var"]
    assert given.layout == taken.layout
    assert given.size_bytes == len(given.to_bytes()) == 2 * 16 + 8 + 9
    assert taken.load_(bytearray(given.to_bytes())) == []
    assert taken.to_bytes() == given.to_bytes()
    donor[2].packed = torch.zeros(3)  # type: ignore[index]
    assert given.to_bytes() == b""


def test_what_is_not_finite_or_cannot_be_written_stays_and_the_others_are_taken() -> None:
    donor = moved(ema=torch.tensor([1.0, torch.nan]), wide=torch.ones(5))
    newcomer = model(ema=torch.ones(2), wide=torch.zeros(1).expand(5))
    troubles = ModelBuffers(newcomer).load_(bytearray(ModelBuffers(donor).to_bytes()))
    assert [text.partition(" ")[0] for text in troubles] == ["2.ema", "2.wide"]
    assert newcomer[2].ema.tolist() == [1.0, 1.0]  # type: ignore[index]
    assert torch.equal(newcomer[1].running_mean, donor[1].running_mean)  # type: ignore[index]


@pytest.mark.parametrize(
    "values",
    [
        torch.full((3, 3), -torch.inf).triu(1),
        torch.tensor([1e300, torch.nan], dtype=torch.float64),
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1.0, -torch.inf]).bfloat16(),
        torch.tensor([1 + 2j]),
        torch.tensor([True]),
        torch.tensor([70_000], dtype=torch.uint32),
        torch.zeros(0, 4),
        torch.eye(3).to_sparse(),
    ],
    ids=["mask", "wide", "narrow", "bfloat16", "complex", "bool", "unsigned", "empty", "sparse"],
)
def test_a_buffer_of_any_kind_is_taken_or_left_out(values: Tensor) -> None:
    donor, newcomer = moved(kept=values.clone()), model(kept=values.clone())
    assert ModelBuffers(newcomer).load_(bytearray(ModelBuffers(donor).to_bytes())) == []
    assert torch.equal(newcomer[1].running_mean, donor[1].running_mean)  # type: ignore[index]
    assert repr(newcomer[2].kept) == repr(values)  # type: ignore[index]


# ---- from peer to peer

SIZE = 2 * MAX_DATA_BYTES + 5
LAYOUT = 3
GOAL = Goal(BUFFERS, len(SHAPE.state_bytes), LAYOUT, (D1, D2), size_bytes=SIZE)


def asked(layout: int = LAYOUT, size_bytes: int = SIZE) -> World:
    """A newcomer asks two donors that have buffers, but have copied none yet."""
    world = World(donors=2)
    for donor in (D1, D2):
        world.machines[donor].donor.buffers = BufferStore(layout, size_bytes)
    world.machines[LATE].fetcher.want(GOAL, world.now)
    world.run(1.0)
    return world


def give(world: World, donor: PeerId, first: int) -> bytes:
    """Its training thread gives values."""
    values = bytes([first]) * SIZE
    world.machines[donor].donor.give_buffers(values, world.now)
    return values


def test_a_newcomer_takes_them_once_a_training_thread_has_given_values() -> None:
    world = asked()
    assert world.machines[D1].donor.buffers.are_wanted
    assert not world.events
    values = give(world, D1, 1)
    give(world, D1, 2)  # nobody wants them: those that are loaded stay the same
    world.run()
    (event,) = world.events
    assert isinstance(event, Fetched)
    assert (bytes(event.data), event.donors) == (values, (D1,))
    world.now += PATIENCE_S
    world.machines[LATE].fetcher.want(GOAL, world.now)
    world.run(1.0, enough=2)
    assert world.machines[D1].donor.buffers.are_wanted  # old values are not given


@pytest.mark.parametrize(("layout", "size_bytes"), [(LAYOUT + 1, SIZE), (LAYOUT - 1, SIZE), (LAYOUT, 0)])
def test_a_donor_with_other_buffers_gives_none_and_is_no_liar(layout: int, size_bytes: int) -> None:
    world = asked(layout, size_bytes)
    assert [type(event) for event in world.events] == [FetchFailed]
    assert not world.machines[D1].donor.buffers.are_wanted


def test_who_asks_for_chunks_takes_no_wish_of_others_away() -> None:
    world = asked()
    chunk = Fetch(what=BUFFERS, fragment=GOAL.fragment, version=LAYOUT, want_chunk=True)
    world.machines[D1].receive(chunk, D2, world.now)
    assert world.machines[D1].donor.buffers.are_wanted


def test_a_donor_that_has_none_any_more_is_left() -> None:
    world = asked()
    world.machines[D1].donor.give_buffers(b"", world.now)
    chunk = Fetch(what=BUFFERS, fragment=GOAL.fragment, version=LAYOUT, want_chunk=True)
    world.machines[D1].receive(chunk, LATE, world.now)  # which it was promised a moment ago: no offence
    world.machines[D2].donor.give_buffers(b"", world.now)
    world.run()
    assert [type(event) for event in world.events] == [FetchFailed]


@pytest.mark.parametrize("lie", [b"", bytes(SIZE - 1), bytes(SIZE + 1)], ids=["chunks", "short", "long"])
def test_of_a_donor_that_lies_nothing_is_taken(lie: bytes) -> None:
    """About a chunk, or about the size, of which nothing is allocated."""
    world = asked()
    if lie:
        world.machines[D1].donor.give_buffers(lie, world.now)
    else:
        give(world, D1, 1)
        world.tamper = lying(D1, zero)
    values = give(world, D2, 2)
    world.run()
    refused = [event.peer for event in world.events if isinstance(event, DonorRefused)]
    (event,) = (event for event in world.events if isinstance(event, Fetched))
    assert bytes(event.data) == values
    assert refused in ([D1], []) if not lie else refused == [D1]


@pytest.mark.parametrize("chunk", [3, (1 << 32) - 1])
def test_a_chunk_that_does_not_exist_is_refused(chunk: int) -> None:
    world = asked()
    fetch = Fetch(what=BUFFERS, fragment=GOAL.fragment, version=LAYOUT, chunk=chunk, want_chunk=True)
    with pytest.raises(RemoteProtocolError, match="unknown chunk"):
        world.machines[D1].receive(fetch, LATE, world.now)
