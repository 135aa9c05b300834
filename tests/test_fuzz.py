"""Every message of the schema, wrong in each of its fields and in chance's ways, into what reads it.

Those inside an ``Envelope`` go into real nodes that train (``fuzz.play``): nothing ends, nothing is kept
beyond its bound, and each refusal is counted by kind and sender. Every other one goes into its own reader,
inside a good seal where it has one. A message of ``messages.proto`` that nobody tries fails a test.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.config import RunConfig
from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.discovery.records import MANIFEST_CONTEXT, PEER_CONTEXT, POSITION_CONTEXT, Records
from p2p_co2.net.transport.admission import HELLO_CONTEXT, Admission
from p2p_co2.net.transport.libp2p.relay import read_hop
from p2p_co2.net.transport.probe import read_answer
from p2p_co2.node import router
from p2p_co2.protocol.reports import REPORT_CONTEXT, Responder, open_report
from p2p_co2.system.socket_activation import receive_relayed
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import parsed, unseal
from p2p_co2.wire.kinds import KINDS
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES
from p2p_co2.wire.members import (
    MEMBER_CONTEXT,
    REVOKED_CONTEXT,
    Members,
    Pass,
    read_certificate,
)
from tests.fuzz.play import LIAR, Game, rounds_world, stages_world, world_for
from tests.fuzz.world import RUN, World, check_bounds, make_identity, run_virtual
from tests.fuzz.wrong import Wrong, each

GAMES = 6
"""Examples of what takes half a second."""


def examples_of(count: int) -> settings:
    """So many, and as many times more as the profile has more than hypothesis' own 100."""
    return settings(max_examples=count * settings().max_examples // 100)


chances = st.builds(random.Random, st.integers(0, 2**32))
STRANGER = LIAR.peer_id
HARMLESS = {"leave", "refusal", "model_table", "declined", "dropped"}
"""Kinds that hold nothing wrong, or are only not about what the receiver knows."""


# ---- messages in envelopes


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_wrong_field_of_each_kind_is_tried_among_peers_that_train(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ALLOWANCE", "REFILL_PER_S"):
        monkeypatch.setattr(router, name, 1e9)  # so that all of them are read
    game = Game(world_for(kind), random.Random(kind), most=1, members_lie=True, losses=0.1, each_of=kind)
    game.play()
    fields = {field.full_name for field in KINDS[kind].type.DESCRIPTOR.fields}
    assert fields <= game.tried
    assert kind in HARMLESS or kind in {name for _, name, _ in game.refused}


@pytest.mark.parametrize("make_world", [rounds_world, stages_world])
@pytest.mark.parametrize("members_lie", [False, True])
@given(chance=chances, most=st.integers(1, 60))
@examples_of(GAMES)
def test_several_wrong_fields_at_once_end_nobody(
    make_world: Callable[[], World], members_lie: bool, chance: random.Random, most: int
) -> None:
    losses = 0.2 if members_lie else 0.0
    Game(make_world, chance, most=most, members_lie=members_lie, losses=losses).play()


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=30), st.booleans())
@examples_of(50)
def test_any_bytes_are_refused_and_counted(messages: list[bytes], headed: bool) -> None:
    head = head_of(RUN.digest()) if headed else b""
    counted = refused_by_one_node(*(head + message for message in messages))
    assert {sender for sender, _, _ in counted} <= {STRANGER}
    assert headed or counted.total() == len(messages)


def refused_by_one_node(*messages: bytes) -> Counter[tuple[str, str, str]]:
    refused: Counter[tuple[str, str, str]] = Counter()

    async def work() -> None:
        world = World("a")
        (trainer,) = world.trainers
        world.start()
        await asyncio.sleep(0)
        for message in messages:
            await world.deliver(STRANGER, trainer.me, message)
        check_bounds(trainer)
        refused.update(trainer.node.router.refusals)
        await world.close()

    run_virtual(work())
    return refused


def test_refusals_are_counted_by_sender_kind_and_reason() -> None:
    head = head_of(RUN.digest())
    fetch = head + wire.Envelope(fetch=wire.Fetch(fragment=77)).SerializeToString()
    ping = (
        head + wire.Envelope(ping=wire.Ping(status=wire.Status(finished=bytes(40_000)))).SerializeToString()
    )
    assert refused_by_one_node(fetch, fetch, ping, b"\xff", bytes(MAX_MESSAGE_BYTES + 1)) == {
        (STRANGER, "fetch", "unknown fragment"): 2,
        (STRANGER, "", "unreadable"): 1,
        (STRANGER, "", "too large"): 2,
    }


# ---- messages that travel without an envelope

US, THEM = make_identity("us"), make_identity("them")
CONFIG = RunConfig(name="fuzz").canonical_bytes()
DIGEST = RunConfig(name="fuzz").digest()
NOW = 1.7e9
EXPECTED = (RemoteProtocolError, TransportError)
AMENDMENT = wire.Amendment(round=9, setting="outer.lr", value="0.25")
ANNA = Pass.issue(US, DIGEST, "anna", NOW + 60)
BADGE = ANNA.badge(DIGEST, THEM.peer_id)


def members() -> Members:
    return Members(DIGEST, US.peer_id, True, lambda: NOW)


def amends(said: wire.Revocation) -> None:
    """All of it, or nothing."""
    asked = members()
    try:
        asked.take(US.seal(REVOKED_CONTEXT, said.SerializeToString()))
    finally:
        assert bool(asked.sealed) or asked.terms.at(1e9) == RunConfig()


def hello(data: bytes) -> None:
    admission = Admission(US, DIGEST, lambda: NOW)
    admission.members = members()
    admission.admit(THEM.seal(HELLO_CONTEXT, data), bytes(32))


def certificate(data: bytes) -> None:
    """Also one that is signed as it should be."""
    for by_run in (US.sign(MEMBER_CONTEXT, DIGEST + data), ANNA.by_run):
        read_certificate(DIGEST, US.peer_id, data, by_run)


def records() -> Records:
    return Records(DIGEST, lambda peer, error: None, lambda: NOW)


def relayed(content: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(1.0)
        with suppress(TimeoutError):  # more than a socket holds at once, which is too much for a message
            theirs.sendall(len(content).to_bytes(4) + content)
        receive_relayed(ours)


def circuit_hop(content: bytes) -> None:
    length = len(content)

    async def work() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(bytes((length & 0x7F | 0x80, length >> 7 & 0x7F)) + content[:16383])
        reader.feed_eof()
        await read_hop(reader)

    run_virtual(work())


READERS: dict[type[Message], tuple[Message, Callable[[bytes], object]]] = {
    wire.PeerRecord: (
        wire.PeerRecord(
            peer=THEM.peer_id, run=DIGEST, maddrs=["/ip4/127.0.0.1/tcp/1"], grpc_addresses=["127.0.0.1:1"],
            certificate_digest=bytes(32), software="p2p-co2", expires_at=NOW + 60, stage=1, tokens_per_s=9.5,
            visits=True, badge=BADGE,
        ),
        lambda data: records().peer_record(THEM.peer_id, THEM.seal(PEER_CONTEXT, data)),
    ),
    wire.RunManifest: (
        wire.RunManifest(run=DIGEST, config=CONFIG, recipe_digest=bytes(32)),
        lambda data: records().manifest(THEM.peer_id, THEM.seal(MANIFEST_CONTEXT, data)),
    ),
    wire.RunPosition: (
        wire.RunPosition(
            peer=THEM.peer_id, run=DIGEST, position=2.5, versions=[2], written_at=NOW, badge=BADGE
        ),
        lambda data: records().position(THEM.peer_id, THEM.seal(POSITION_CONTEXT, data)),
    ),
    wire.Signed: (
        wire.Signed.FromString(THEM.seal(b"something", b"content")),
        lambda data: unseal(b"something", data),
    ),
    wire.LinkHello: (
        wire.LinkHello(
            from_peer=THEM.peer_id, to_peer=US.peer_id, run=DIGEST, certificate_digest=bytes(32), sent_at=NOW,
            nonce=bytes(16), badge=BADGE,
        ),
        hello,
    ),
    wire.Badge: (BADGE, lambda data: members().check(THEM.peer_id, parsed(wire.Badge, data))),
    wire.Certificate: (wire.Certificate.FromString(ANNA.certificate), certificate),
    wire.Revoked: (
        wire.Revoked(sealed=US.seal(REVOKED_CONTEXT, wire.Revocation(run=DIGEST).SerializeToString())),
        lambda data: members().take(parsed(wire.Revoked, data).sealed),
    ),
    wire.Revocation: (
        wire.Revocation(run=DIGEST, number=1, persons=[bytes(32)], amendments=[AMENDMENT]),
        lambda data: amends(parsed(wire.Revocation, data)),
    ),
    wire.Amendment: (
        AMENDMENT,
        lambda data: amends(wire.Revocation(run=DIGEST, number=1, amendments=[parsed(wire.Amendment, data)])),
    ),
    wire.ReportRequest: (
        wire.ReportRequest(run=DIGEST, process=1, after=3, badge=BADGE),
        lambda data: Responder(US, DIGEST, 1).answer(data, THEM.peer_id, 10.0, NOW),
    ),
    wire.Report: (
        wire.Report(run=DIGEST, peer=THEM.peer_id, process=1, first=1, decisions=[wire.Decision()]),
        lambda data: open_report(THEM.seal(REPORT_CONTEXT, data), THEM.peer_id, DIGEST),
    ),
    wire.Relayed: (wire.Relayed(id=1, peer=THEM.peer_id, request=b"request", peers=["a"]), relayed),
    wire.Probe: (
        wire.Probe(run=DIGEST, dial_back=wire.DialBackProbe(port=1, expect=b"y")),
        lambda data: parsed(wire.Probe, data),
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
each_reader = pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)


def inside(descriptor: Descriptor) -> set[str]:
    """A message and all that can be in it."""
    names = {descriptor.name}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.name not in names:
            names |= inside(field.message_type)
    return names


def test_no_message_of_the_schema_is_left_out() -> None:
    tried = inside(wire.Envelope.DESCRIPTOR) | inside(wire.Outcome.DESCRIPTOR)  # signed inside a Decision
    for kind in READERS:
        tried |= inside(kind.DESCRIPTOR)
    assert tried == set(wire.DESCRIPTOR.message_types_by_name)


@each_reader
def test_a_right_message_is_read_and_each_wrong_field_refused_in_words(kind: type[Message]) -> None:
    right, read = READERS[kind]
    read(right.SerializeToString())
    tried = Counter[str]()
    for name, make in each(right):
        tried[name] += 1
        with suppress(*EXPECTED):
            read(make().SerializeToString())
    assert {field.full_name for field in right.DESCRIPTOR.fields} <= set(tried)


@each_reader
@given(chance=chances)
@examples_of(12)
def test_several_wrong_fields_or_any_bytes_are_refused_in_words(
    kind: type[Message], chance: random.Random
) -> None:
    right, read = READERS[kind]
    wrong = Wrong(chance)
    for data in (wrong.message(right).SerializeToString(), wrong.bytes(right.SerializeToString())):
        with suppress(*EXPECTED):
            read(data)
