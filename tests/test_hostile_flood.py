"""A flood against a process that trains, over a real link: its sender is named in the journal and shut out,
and the swarm goes on making rounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, CodecConfig, PeerConfig, RunConfig
from p2p_co2.errors import PeerLost
from p2p_co2.node.network import Network
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import MessageRefused, PeerJoined, RoundCommitted
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope, Part, Ping, RoundKey
from tests.swarms import swarm

pytestmark = pytest.mark.swarm
RUN = RunConfig(
    name="flooded",
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=2,
    clock=ClockConfig(mode="time", round_s=1.0, rounds=10_000),
    codec=CodecConfig(name="int4"),
)
BOUND_S = 200.0


def envelope(**body: object) -> bytes:
    return Envelope(version=PROTOCOL_VERSION, run=RUN.digest(), **body).SerializeToString()  # type: ignore[arg-type]


async def flood(ticket: str, folder: Path, victim: PeerId) -> tuple[PeerId, str, str]:
    """Small, well formed PARTs of a round that does not exist, as fast as ``victim`` takes them, until it
    takes no more: (who we were, why the link ended, why the next one did)."""
    config = PeerConfig(folder=folder, carrier="grpc")
    network = await Network.open(Ticket.parse(ticket), config, lambda peer, error: None)

    async def ignore(sender: PeerId, data: bytes) -> None:
        return None

    try:
        await network.start_carriers(ignore, lambda peer, error: None)
        record = await network.find_record(victim)
        assert record is not None
        link = await network.carriers[0].connect(record)
        part = envelope(part=Part(key=RoundKey(round=10**6, attempt=bytes(16)), total=1, data=b"x"))
        async with asyncio.timeout(BOUND_S):
            try:
                while True:
                    await link.send(part)
            except PeerLost as error:
                first = str(error)
            again = await network.carriers[0].connect(record)
            try:
                while True:
                    await again.send(envelope(ping=Ping(nonce=1, sent_at=1.0)))
                    await asyncio.sleep(0.1)
            except PeerLost as error:
                return network.identity.peer_id, first, str(error)
    finally:
        await network.close()


def test_a_flood_of_parts_is_named_and_shut_out_while_rounds_go_on(tmp_path: Path) -> None:
    with swarm(tmp_path, RUN) as running:
        for seed, name in enumerate("ab"):
            running.start_peer(name, "--seed", str(seed), "--min-peers", "2")
        joined = running.wait_for("b", PeerJoined)[0]
        assert isinstance(joined, PeerJoined)
        running.wait_for("a", RoundCommitted)
        mallory, first, second = asyncio.run(
            flood(running.ticket, tmp_path / "mallory", PeerId(joined.other))
        )
        assert "too many messages" in first
        assert "shut out" in second
        for name in "ab":
            made = sum(isinstance(event, RoundCommitted) for event in running.events(name))
            running.wait_for(name, RoundCommitted, count=made + 3)
        refused = [event for event in running.events("a") if isinstance(event, MessageRefused)]
        reasons = {event.reason for event in refused if event.other == mallory}
        assert {"unknown round", "too many messages", "shut out"} <= reasons
