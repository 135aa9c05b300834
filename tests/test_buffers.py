"""A newcomer takes a donor's buffers: as bytes of a model, and chunk by chunk from peers that may lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.buffers import MAX_ASKING, Buffers
from p2p_co2.protocol.catchup.donor import LOADS_S
from p2p_co2.protocol.catchup.goals import BUFFERS, LEAST_CHUNK_BYTES, Outbox
from p2p_co2.trainer.model_summary import MOST_BYTES, ModelBuffers
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Fetch

A, B, C = (PeerId(name) for name in "ABC")


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

SIZE = 2 * LEAST_CHUNK_BYTES + 5
VALUES = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)
Side = tuple[Buffers, Outbox]


def side(size_bytes: int = SIZE, layout: int = 3) -> Side:
    out = Outbox()
    machine = Buffers(LEAST_CHUNK_BYTES, out)
    machine.layout, machine.size_bytes = layout, size_bytes
    return machine, out


def exchange(newcomer: Side, donor: Side, now: float) -> None:
    """All messages between ``newcomer`` (A) and ``donor`` (B)."""
    while newcomer[1].messages or donor[1].messages:
        for machine, out, sender in ((donor[0], newcomer[1], A), (newcomer[0], donor[1], B)):
            messages, out.messages = out.messages, []
            for _, message in messages:
                assert isinstance(message, Fetch | Chunk)
                machine.receive(message, sender, now)


def test_a_newcomer_takes_all_chunks_once_the_training_thread_has_given_values() -> None:
    newcomer, donor = side(), side()
    newcomer[0].ask(B)
    exchange(newcomer, donor, 100.0)
    assert donor[0].is_wanted
    assert newcomer[0].is_asking
    donor[0].publish(VALUES, 100.0)
    exchange(newcomer, donor, 101.0)
    assert not donor[0].is_wanted
    assert not newcomer[0].is_asking
    assert newcomer[0].take() == VALUES
    newcomer[0].ask(B)
    exchange(newcomer, donor, 101.0 + LOADS_S)  # old values are not given
    assert donor[0].is_wanted
    donor[0].publish(b"", 102.0 + LOADS_S)  # there are none any more
    exchange(newcomer, donor, 102.0 + LOADS_S)
    assert not newcomer[0].is_asking
    assert newcomer[0].take() == b""


@pytest.mark.parametrize("donor", [side(layout=4), side(0)], ids=["another layout", "no buffers"])
def test_a_donor_with_other_buffers_gives_none(donor: Side) -> None:
    newcomer = side()
    newcomer[0].ask(B)
    exchange(newcomer, donor, 100.0)
    assert not donor[0].is_wanted
    assert not newcomer[0].is_asking
    assert newcomer[0].take() == b""


def test_chunks_of_wrong_sizes_or_from_others_are_not_taken() -> None:
    machine, _ = side()
    whole = VALUES[:LEAST_CHUNK_BYTES]
    for number, data in ((0, whole[:-1]), (0, whole + b"\0"), (1, whole), (2, VALUES[-5:]), (1 << 31, whole)):
        machine.ask(B)
        machine.receive(Chunk(what=BUFFERS, version=3, data=whole), C, 100.0)  # was not asked
        with pytest.raises(RemoteProtocolError, match="wrong size"):
            machine.receive(Chunk(what=BUFFERS, version=3, chunk=number, data=data), B, 100.0)
        assert not machine.is_asking
        assert machine.take() == b""
    machine.ask(B)
    machine.receive(Chunk(what=BUFFERS, version=3, data=whole), B, 100.0)
    assert machine.take() == b""  # half of it is nothing


def test_questions_for_chunks_that_do_not_exist_are_refused_and_those_that_wait_are_bounded() -> None:
    machine, out = side()
    for chunk in (3, (1 << 32) - 1):
        with pytest.raises(RemoteProtocolError, match="unknown chunk"):
            machine.receive(Fetch(what=BUFFERS, version=3, chunk=chunk, want_chunk=True), A, 100.0)
    for number in range(MAX_ASKING + 3):
        machine.receive(Fetch(what=BUFFERS, version=3, want_chunk=True), PeerId(f"peer {number}"), 100.0)
    assert len(out.messages) == 3
    machine.publish(VALUES, 100.0)
    assert len(out.messages) == 3 + MAX_ASKING
