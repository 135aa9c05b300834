"""Large data beside its message: by hand, against protobuf itself, with bytes changed at will."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds.assembly import ReorderBuffer
from p2p_co2.wire import envelope as bulk
from p2p_co2.wire.envelope import opened
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import kind_of
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import (
    Backward,
    Chunk,
    Contributor,
    Envelope,
    Forward,
    Mean,
    MicrobatchKey,
    Part,
    Ping,
    RoundKey,
)
from tests.envelopes import enveloped

RUN = bytes(range(32))
HEAD = Envelope(version=PROTOCOL_VERSION, run=RUN).SerializeToString()
DATA = bytes(range(256)) * (bulk.LEAST_BYTES // 256 + 1)
KEY = RoundKey(fragment=1, round=2, attempt=bytes(16))
MEAN = Mean(
    key=KEY, part=3, offset=0, total=1 << 30,
    contributors=[Contributor(peer=f"peer {index:02}", weight=1.5) for index in range(64)],
)  # fmt: skip
Body = Part | Mean | Forward | Backward
BODIES: list[Body] = [
    Part(key=KEY, part=3, generation=1, offset=1 << 20, total=1 << 30),
    Forward(key=MicrobatchKey(owner=1 << 63, number=7), offset=1 << 20, total=1 << 28),
    Backward(key=MicrobatchKey(owner=1 << 63, number=7), tokens=64, loss=1.5, offset=1 << 20, total=1 << 28),
    MEAN,
]


def whole(body: Body) -> Body:
    """The same message, with its data inside."""
    copy = type(body).FromString(body.SerializeToString())
    copy.data = DATA
    return copy


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_protobuf_alone_reads_what_is_sent_and_we_read_it_without_a_copy(
    body: Body,
) -> None:
    sent = enveloped(bulk.with_data(body, memoryview(DATA)), HEAD)
    kind = kind_of(body).name
    expected = Envelope(version=PROTOCOL_VERSION, run=RUN, **{kind: whole(body)})
    assert Envelope.FromString(sent) == expected
    taken = opened(sent, RUN)
    assert taken.kind.name == kind
    assert isinstance(taken.body, type(body))
    assert isinstance(taken.body.data, memoryview)
    assert taken.body.data.obj is sent
    assert type(body).FromString(taken.body.SerializeToString()) == whole(body)
    assert taken.body.ByteSize() == whole(body).ByteSize()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_what_protobuf_itself_wrote_is_read_alike(body: Body) -> None:
    taken = opened(enveloped(whole(body), HEAD), RUN)
    assert type(body).FromString(taken.body.SerializeToString()) == whole(body)


def test_a_stand_in_has_no_part_of_a_message_that_would_leave_its_data_out() -> None:
    body = bulk.with_data(BODIES[0], DATA)
    for name in ("CopyFrom", "ListFields", "MergeFrom", "HasField", "nonsense"):
        with pytest.raises(AttributeError, match=name):
            getattr(body, name)


def test_messages_without_large_data_stay_as_they_are() -> None:
    for message in (Ping(nonce=1), Chunk(request=1, data=DATA), Part(key=KEY, data=b"short")):
        body = opened(enveloped(message, HEAD), RUN).body
        assert type(body) is type(message)
        assert body == message


def test_the_last_data_counts_and_a_body_that_came_before_is_merged() -> None:
    """As protobuf has it."""
    first = enveloped(Part(part=7, generation=9, data=b"a" * bulk.LEAST_BYTES), HEAD)
    twice = first + enveloped(bulk.with_data(Part(part=8), DATA), b"")
    body = opened(twice, RUN).body
    assert (body.part, body.generation, bytes(body.data)) == (8, 9, DATA)


def test_no_time_is_spent_on_fields_without_end() -> None:
    """Two bytes a field: half a million of them before the data."""
    many = HEAD + b"\x78\x01" * 500_000
    sent = enveloped(bulk.with_data(BODIES[0], DATA), many)
    looked_at = 0

    class Counted(bytes):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(at)

    assert bulk._find(Counted(sent)) is None
    assert looked_at < 8 * bulk.MOST_FIELDS


def test_a_held_piece_counts_with_its_data() -> None:
    buffer = ReorderBuffer(0)
    buffer.hold(bulk.with_data(Part(key=KEY), DATA), PeerId("a"))
    assert buffer.held()["EARLY_BYTES"][0] > len(DATA)


PADDING = bulk.varint(99 << 3 | 2) + bulk.varint(900_000) + bytes(900_000)
TWICE = (
    bulk.varint(2 << 3 | 2) + bulk.varint(900_000) + bytes(900_000)
)  # ``Envelope.run``, before the true one


@pytest.mark.parametrize("padding", [PADDING, TWICE], ids=["unknown field", "field twice"])
@pytest.mark.parametrize("size", [0, 100, bulk.LEAST_BYTES, 1 << 16])
def test_a_message_that_holds_more_than_it_says_is_refused(padding: bytes, size: int) -> None:
    """A piece that came early is counted by what it says, and keeps all of its envelope in memory."""
    part = bulk.with_data(Part(key=KEY), bytes(size))
    inside = enveloped(Part(key=KEY, data=bytes(size)), HEAD)
    for data in (enveloped(part, padding + HEAD), padding + inside, enveloped(part, b"") + padding + HEAD):
        with pytest.raises(RemoteProtocolError, match="padded"):
            opened(data, RUN)


def test_some_fields_of_a_later_version_are_left_out() -> None:
    later = bulk.varint(99 << 3 | 2) + bulk.varint(3000) + bytes(3000)
    for body in (Ping(nonce=1), bulk.with_data(Part(key=KEY), DATA)):
        assert opened(enveloped(body, HEAD + later), RUN).kind.name in {"ping", "part"}


def read(data: bytes) -> Envelope | None:
    try:
        return Envelope.FromString(data)
    except DecodeError:
        return None


def read_by_us(data: bytes) -> Envelope | None:
    """The same by ``parse``, with the data put back inside."""
    try:
        envelope, beside = bulk.parse(data)
    except DecodeError:
        return None
    if beside is not None:
        getattr(envelope, envelope.WhichOneof("body") or "").data = bytes(beside)
    return envelope


FIELDS = st.builds(
    lambda number, wire_type, content: bulk.varint(number << 3 | wire_type) + content,
    st.integers(1, 50), st.integers(0, 7), st.binary(max_size=24),
)  # fmt: skip


@given(
    body=st.sampled_from(BODIES),
    edits=st.lists(
        st.tuples(st.integers(0, 160), st.integers(0, 2), st.binary(max_size=12) | FIELDS), max_size=4
    ),
    tail=st.binary(max_size=3),
)
def test_hostile_bytes_are_what_protobuf_says_they_are(
    body: Body, edits: list[tuple[int, int, bytes]], tail: bytes
) -> None:
    """Law: whatever is put into, over or instead of the fields around the data, nothing is read otherwise."""
    data = enveloped(bulk.with_data(body, DATA), HEAD)
    for at, cut, put in edits:
        data = data[:at] + put + data[at + cut * len(put) :]
    data += tail
    assert read_by_us(data) == read(data)
