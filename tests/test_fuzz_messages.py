"""Every message of the schema, wrong in every way that a tape can say, into what reads it.

Those inside an ``Envelope`` go into simulated peers, kind by kind (``fuzz.scenes``; ``fuzz.stages`` for those
between stages); every other one into its own reader, inside a good seal where it has one, so that what is
wrong gets past the signature. Both lists are held against ``messages.proto``: a message that nobody tries
fails a test.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p_co2.config import RunConfig
from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.discovery.records import MANIFEST_CONTEXT, PEER_CONTEXT, POSITION_CONTEXT, Records
from p2p_co2.net.transport.admission import HELLO_CONTEXT, Admission
from p2p_co2.net.transport.libp2p.relay import read_hop
from p2p_co2.net.transport.probe import read_answer, read_question
from p2p_co2.protocol.reports import REPORT_CONTEXT, Responder, open_report
from p2p_co2.system.socket_activation import receive_relayed
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import unseal
from p2p_co2.wire.kinds import KINDS
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.scenes import Scene, examples
from tests.fuzz.stages import KINDS_BETWEEN, StageGame, examples_between
from tests.fuzz.world import make_identity, run_virtual

US, THEM = make_identity("us"), make_identity("them")
CONFIG = RunConfig(name="fuzz").canonical_bytes()
RUN = RunConfig(name="fuzz").digest()
NOW = 1.7e9
PATIENT = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def records() -> Records:
    return Records(RUN, lambda peer, error: None, lambda: NOW)


def relayed(content: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(len(content).to_bytes(4) + content)
        receive_relayed(ours)


def from_stream(data: bytes, read: Callable[[asyncio.StreamReader], object]) -> None:
    """``read`` from a stream with ``data`` and nothing after it."""

    async def work() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await read(reader)  # type: ignore[misc]

    run_virtual(work())


def circuit_hop(content: bytes) -> None:
    length = len(content)
    from_stream(bytes((length & 0x7F | 0x80, length >> 7 & 0x7F)) + content[:16383], read_hop)


READERS: dict[type[Message], tuple[Message, Callable[[bytes], object]]] = {
    wire.PeerRecord: (
        wire.PeerRecord(
            peer=THEM.peer_id, run=RUN, maddrs=["/ip4/127.0.0.1/tcp/1"], grpc_addresses=["127.0.0.1:1"],
            certificate_digest=bytes(32), software="p2p-co2", expires_at=NOW + 60, stage=1, tokens_per_s=9.5,
            visits=True,
        ),
        lambda data: records().peer_record(THEM.peer_id, THEM.seal(PEER_CONTEXT, data)),
    ),
    wire.RunManifest: (
        wire.RunManifest(run=RUN, config=CONFIG, recipe_digest=bytes(32)),
        lambda data: records().manifest(THEM.peer_id, THEM.seal(MANIFEST_CONTEXT, data)),
    ),
    wire.RunPosition: (
        wire.RunPosition(peer=THEM.peer_id, run=RUN, position=2.5, versions=[2], written_at=NOW),
        lambda data: records().position(THEM.peer_id, THEM.seal(POSITION_CONTEXT, data)),
    ),
    wire.Signed: (
        wire.Signed.FromString(THEM.seal(b"something", b"content")),
        lambda data: unseal(b"something", data),
    ),
    wire.LinkHello: (
        wire.LinkHello(
            from_peer=THEM.peer_id, to_peer=US.peer_id, run=RUN, certificate_digest=bytes(32), sent_at=NOW,
            nonce=bytes(16),
        ),
        lambda data: Admission(US, RUN, lambda: NOW).admit(THEM.seal(HELLO_CONTEXT, data), bytes(32)),
    ),
    wire.ReportRequest: (
        wire.ReportRequest(run=RUN, process=1, after=3),
        lambda data: Responder(US, RUN, 1).answer(data, THEM.peer_id, 10.0, NOW),
    ),
    wire.Report: (
        wire.Report(run=RUN, peer=THEM.peer_id, process=1, first=1, sent_at=NOW, decisions=[wire.Decision()]),
        lambda data: open_report(THEM.seal(REPORT_CONTEXT, data), THEM.peer_id, RUN),
    ),
    wire.Relayed: (wire.Relayed(id=1, peer=THEM.peer_id, request=b"request", peers=["a"]), relayed),
    wire.Probe: (
        wire.Probe(run=RUN, dial_back=wire.DialBackProbe(port=1, expect=b"y")), read_question,
    ),
    wire.ProbeAnswer: (
        wire.ProbeAnswer(observed="/ip4/127.0.0.1/tcp/1", clock=NOW, bulk=b"x"), read_answer,
    ),
    wire.CircuitHop: (
        wire.CircuitHop(
            type=2, status=100, place=wire.CircuitPlace(expires_at=1), limit=wire.CircuitLimit(data_bytes=1)
        ),
        circuit_hop,
    ),
}  # fmt: skip
"""By type: a right one, and what reads it."""
EXPECTED = (RemoteProtocolError, TransportError)


def inside(descriptor: Descriptor) -> set[str]:
    """A message and all that can be in it."""
    names = {descriptor.name}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.name not in names:
            names |= inside(field.message_type)
    return names


def test_no_message_of_the_schema_is_left_out() -> None:
    assert {*examples(), *examples_between()} == set(KINDS)
    tried = inside(wire.Envelope.DESCRIPTOR) | inside(wire.Outcome.DESCRIPTOR)  # signed inside a Decision
    for kind in READERS:
        tried |= inside(kind.DESCRIPTOR)
    assert tried == set(wire.DESCRIPTOR.message_types_by_name)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(KINDS_BETWEEN)))
@given(data=st.binary(min_size=8, max_size=120))
@settings(PATIENT, max_examples=6)
def test_wrong_messages_of_each_kind_break_no_peer(kind: str, data: bytes) -> None:
    scene = Scene(data, kind)
    scene.play()


@pytest.mark.parametrize("kind", KINDS_BETWEEN)
@given(data=st.binary(min_size=8, max_size=120))
@settings(PATIENT, max_examples=5)
def test_wrong_messages_between_stages_break_no_peer(kind: str, data: bytes) -> None:
    """From members of the stages beside and from strangers, while messages are lost."""
    StageGame(data[1:], insiders=bool(data[0] & 1), losses=bool(data[0] & 2), kind=kind).play()


def test_scenes_do_try_wrong_messages_and_refuse_them() -> None:
    scene = Scene(bytes(range(1, 120)))
    scene.play()
    assert scene.wrong > 3
    assert scene.refused.total() > 3


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_a_right_message_is_read(kind: type[Message]) -> None:
    right, read = READERS[kind]
    read(right.SerializeToString())


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
@given(data=st.binary(min_size=2, max_size=60))
@PATIENT
def test_a_wrong_message_outside_of_envelopes_is_refused_in_words(kind: type[Message], data: bytes) -> None:
    right, read = READERS[kind]
    wrong = Mutator(Tape(data)).mutate_one(right)
    with suppress(*EXPECTED):
        read(wrong)
