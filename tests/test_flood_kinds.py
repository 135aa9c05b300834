"""A flood of any kind of message, well formed and for rounds that do not exist: its sender is counted by
name, read ever more slowly and shut out, and nobody else waits for that."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.router import ALLOWANCE, LINK_UNITS, PATIENCE_S, REFILL_PER_S, SHUT_OUT_S
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from tests.fuzz.bench import RUN, Bench, envelope
from tests.fuzz.stories import NAMES, examples
from tests.fuzz.world import make_identity

KINDS = sorted(field.name for field in wire.Envelope.DESCRIPTOR.oneofs_by_name["body"].fields)
MALLORY, FRIEND = make_identity("mallory").peer_id, make_identity(NAMES[1]).peer_id
PING = envelope(wire.Ping(nonce=1, sent_at=1.0))
FAR = 10**6
"""A round that nobody is near."""


def far_away(kind: str) -> bytes:
    """A right message of this kind, as small as they come, of a round that does not exist."""
    message = wire.Envelope(version=PROTOCOL_VERSION, run=RUN)
    if kind in examples():
        message.ParseFromString(min(examples()[kind], key=len))
    body: Message = getattr(message, kind)
    body.SetInParent()  # type: ignore[attr-defined]
    for holder in (body, getattr(body, "key", body)):
        if "round" in holder.DESCRIPTOR.fields_by_name:
            holder.round = FAR  # type: ignore[attr-defined]
    if kind in ("part", "mean"):
        body.data, body.total, body.offset = b"x", 1, 0  # type: ignore[attr-defined]
    assert message.version == PROTOCOL_VERSION
    assert message.run == RUN
    return message.SerializeToString()


def victim() -> Bench:
    """A peer that knows both, and has nothing else to do."""
    bench = Bench(NAMES[0])
    for peer in (MALLORY, FRIEND):
        bench.take(peer, PING, bench.at)
    return bench


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_is_counted_named_and_shut_out_and_nobody_else_waits(kind: str) -> None:
    bench, flood = victim(), far_away(kind)
    began_at, read, beat_at = bench.at, 0, bench.at
    while True:
        try:
            wait_s = bench.router.take(MALLORY, flood)
        except RemoteProtocolError as error:
            bench.router.on_link_refused(MALLORY, error)
            break
        read += 1
        bench.sent.clear()
        if bench.at >= beat_at:
            assert bench.router.take(FRIEND, PING) == 0.0
            beat_at += 1.0
        bench.at += wait_s + 1e-4  # what reading one takes
    bench.pump()
    assert read <= 20_000
    assert bench.at - began_at <= 3 * PATIENCE_S + 2 * ALLOWANCE / REFILL_PER_S
    assert bench.router.refusals[MALLORY, "", "too many messages"] == 1
    assert {sender for sender, _, _ in bench.router.refusals} == {MALLORY}
    assert bench.reported["MessageRefused"] >= 1
    assert MALLORY not in bench.membership.live
    assert FRIEND in bench.membership.live
    with pytest.raises(RemoteProtocolError, match="shut out"):
        bench.router.take(MALLORY, PING)
    assert bench.router.take(FRIEND, PING) == 0.0


def test_who_opens_links_without_end_is_shut_out_and_who_is_turned_away_now_and_then_is_not() -> None:
    bench, turned_away = victim(), RemoteProtocolError("too many links", "all are taken")
    for _ in range(600):  # ten minutes of trying again where others hold all places
        bench.at += 1.0
        bench.router.on_link_refused(FRIEND, turned_away)
    assert bench.router.take(FRIEND, PING) == 0.0
    dials = 0
    while not bench.router.refusals[MALLORY, "", "shut out"]:
        bench.at += 0.01
        dials += 1
        bench.router.on_link_refused(MALLORY, turned_away)
    assert dials <= 2 * (ALLOWANCE + PATIENCE_S * REFILL_PER_S) / LINK_UNITS
    assert MALLORY not in bench.membership.live
    with pytest.raises(RemoteProtocolError, match="shut out"):
        bench.router.take(MALLORY, PING)


def test_who_trickles_is_shut_out_and_who_fell_silent_is_not() -> None:
    bench = victim()
    bench.router.on_link_refused(FRIEND, RemoteProtocolError("silent", "not a byte in 60 s"))
    assert bench.router.take(FRIEND, PING) == 0.0
    bench.router.on_link_refused(MALLORY, RemoteProtocolError("too slow", "no whole message in 60 s"))
    assert bench.router.refusals[MALLORY, "", "too slow"] == 1
    assert bench.router.refusals[MALLORY, "", "shut out"] == 1
    with pytest.raises(RemoteProtocolError, match="shut out"):
        bench.router.take(MALLORY, PING)
    bench.at += SHUT_OUT_S + 1
    bench.router.take(MALLORY, PING)
    bench.router.on_link_refused(MALLORY, RemoteProtocolError("too slow", "no whole message in 60 s"))
    bench.at += SHUT_OUT_S + 1
    with pytest.raises(RemoteProtocolError, match="shut out"):  # for longer each time
        bench.router.take(MALLORY, PING)
