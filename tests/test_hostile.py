"""A hostile peer in a real swarm: it has an identity, a record in the DHT and real links, and breaks every
rule.

Two honest processes train; the test is the third peer. Each offence must be refused, counted against its
sender under its name, and cost the honest peers nothing: they finish the run with one digest.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, CodecConfig, PeerConfig, RunConfig
from p2p_co2.node.network import Network
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import FragmentApplied, MessageRefused, PeerJoined
from p2p_co2.ticket import Ticket
from p2p_co2.transport.base import Link
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import (
    Begin,
    Contributor,
    Decision,
    Envelope,
    Fetch,
    Mean,
    Member,
    Outcome,
    Part,
    PartOutcome,
    PartSpec,
    Ping,
    Ready,
    RoundKey,
    Status,
)
from tests.swarms import swarm

pytestmark = pytest.mark.swarm
RUN = RunConfig(
    name="hostile",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=2,
    clock=ClockConfig(mode="time", round_s=2.0, rounds=10),
    codec=CodecConfig(name="int4"),
)
HONEST = ("a", "b")


def offences(me: PeerId, identity: Identity) -> dict[str, Callable[[], bytes]]:
    """Reason under which it must be counted -> the bytes of the message."""

    def envelope(**body: object) -> bytes:
        message = Envelope(version=PROTOCOL_VERSION, run=RUN.digest(), **body)  # type: ignore[arg-type]
        return message.SerializeToString()

    key = RoundKey(fragment=0, round=10**6, attempt=bytes(16))
    old = RoundKey(fragment=0, round=1, attempt=bytes(16))
    ready = Ready(fragment=0, round=1, state_digest=bytes(32), weight=1.0)

    def forged() -> bytes:
        outcome = Outcome(
            key=RoundKey(fragment=0, round=5, attempt=bytes(16)),
            run=RUN.digest(),
            committed=True,
            decided_by=me,
            state_digest=bytes(32),
            members=[Member(peer=me, weight=1.0)],
            parts=[
                PartOutcome(stop_block=73, digest=bytes(32), contributors=[Contributor(peer=me, weight=1.0)])
            ],
        ).SerializeToString()
        return envelope(decision=Decision(outcome=outcome, signature=identity.sign(b"another", outcome)))

    def weight(value: float) -> bytes:
        changed = Ready()
        changed.CopyFrom(ready)
        changed.weight = value
        return envelope(ready=changed)

    return {
        "unreadable": lambda: b"\xff" * 40,
        "unknown version": lambda: Envelope(version=99, run=RUN.digest(), ping=Ping()).SerializeToString(),
        "another run": lambda: Envelope(
            version=PROTOCOL_VERSION, run=bytes(32), ping=Ping()
        ).SerializeToString(),
        "unknown message": envelope,
        "bad status": lambda: envelope(ping=Ping(status=Status(position=math.nan))),
        "unknown fragment": lambda: envelope(fetch=Fetch(fragment=77)),
        "unknown round": lambda: envelope(part=Part(key=key, total=1, data=b"x")),
        "replayed round": lambda: envelope(mean=Mean(key=old, total=1, data=b"x")),
        "wrong signature": forged,
        "weight: not a number": lambda: weight(math.nan),
        "weight: endless": lambda: weight(math.inf),
        "weight: negative": lambda: weight(-1.0),
        "begin: nobody asked": lambda: envelope(
            begin=Begin(
                key=key,
                members=[Member(peer=me, weight=1.0, base_version=1)],
                parts=[PartSpec(owner=me, stop_block=73)],
                state_digest=bytes(32),
                parts_within_s=1.0,
                result_within_s=1.0,
            )
        ),
        "begin: parts that do not cover": lambda: envelope(
            begin=Begin(key=key, members=[Member(peer=me, weight=1.0)], parts=[], state_digest=bytes(32))
        ),
        "part: larger than allowed": lambda: envelope(
            part=Part(key=key, total=1 << 60, data=bytes(MAX_DATA_BYTES + 1))
        ),
    }


async def attack(
    ticket: str, folder: Path, victim: PeerId, counted: Callable[[], list[str]]
) -> dict[str, Callable[[], bytes]]:
    """Send every offence to ``victim`` over gRPC and wait until it has counted them; see ``offences``."""
    config = PeerConfig(folder=folder, carrier="grpc")
    network = await Network.open(Ticket.parse(ticket), config, lambda peer, error: None)

    async def ignore(sender: PeerId, data: bytes) -> None:
        return None

    try:
        await network.start_carriers(ignore, lambda peer, error: None)
        await network.publish_self()
        record = await network.find_record(victim)
        assert record is not None
        me = network.identity.peer_id
        sent = offences(me, network.identity)
        link: Link = await network.carriers[0].connect(record)
        for _ in range(3):  # once would be enough; a replay of it is refused alike
            for message in sent.values():
                await link.send(message())
        async with asyncio.timeout(60):
            while not (len(counted()) >= len(sent) and named(sent) <= set(counted())):  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # its journal sets no event
        await link.close()
        return sent
    finally:
        await network.close()


def named(sent: dict[str, Callable[[], bytes]]) -> set[str]:
    """The reasons that no other offence shares."""
    return {reason for reason in sent if ":" not in reason}


def test_every_broken_rule_is_refused_and_counted_and_costs_the_swarm_nothing(tmp_path: Path) -> None:
    with swarm(tmp_path, RUN) as running:
        for seed, name in enumerate(HONEST):
            running.start_peer(name, "--seed", str(seed), "--min-peers", "2")
        running.wait_for("a", FragmentApplied, count=3)
        joined = running.wait_for("b", PeerJoined)[0]
        assert isinstance(joined, PeerJoined)
        victim = PeerId(joined.other)

        def counted() -> list[str]:
            return [event.reason for event in running.events("a") if isinstance(event, MessageRefused)]

        sent = asyncio.run(attack(running.ticket, tmp_path / "mallory", victim, counted))
        running.wait(*HONEST)

        mallory = Identity.load_or_create(tmp_path / "mallory" / "identity").peer_id
        refused = [event for event in running.events("a") if isinstance(event, MessageRefused)]
        assert {event.other for event in refused} == {mallory}
        assert named(sent) <= {event.reason for event in refused}
        assert len(refused) >= len(sent)  # those that share a reason are counted too
        finished = [running.finished(name) for name in HONEST]
        assert len({event.digest for event in finished}) == 1
        assert {event.reason for event in finished} == {"the run is over"}
