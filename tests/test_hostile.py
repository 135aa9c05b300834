"""Hostile peers in a real swarm: they have identities, records in the DHT and real links; one breaks rules,
and then one floods. Every rule has its test by hand (``scenarios/rounds/forged.txt``).

Two honest processes train; the test is the others. Each offence must be refused and counted against its
sender under its name, the flood's sender must be shut out, and neither costs the honest peers anything:
rounds go on, and each outer step is the same at both, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, CodecConfig, PeerConfig, RunConfig
from p2p_co2.errors import PeerLost
from p2p_co2.net.transport.base import Link
from p2p_co2.node.network import Network
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import FragmentApplied, MessageRefused, PeerJoined, RoundCommitted
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import (
    Contributor,
    Decision,
    Envelope,
    Fetch,
    Mean,
    Member,
    Outcome,
    Part,
    PartOutcome,
    Ping,
    RoundKey,
    Status,
    Vote,
)
from tests.swarms import Swarm, swarm

pytestmark = pytest.mark.swarm
RUN = RunConfig(
    name="hostile",
    salt="known",  # else the seed makes one, and messages for the run without it are another group's
    recipe="own-loop",
    recipe_digest=recipe_digest("own-loop", {}),
    fragments=2,
    clock=ClockConfig(mode="time", round_s=1.0),  # it ends when the test has seen enough
    codec=CodecConfig(name="int4"),
)
HONEST = ("a", "b")
BOUND_S = 200.0


def envelope(**body: object) -> bytes:
    return Envelope(version=PROTOCOL_VERSION, run=RUN.digest(), **body).SerializeToString()  # type: ignore[arg-type]


def offences(me: PeerId, identity: Identity) -> dict[str, bytes]:
    """Reason under which it must be counted -> the bytes of the message."""
    key = RoundKey(fragment=0, round=10**6, attempt=bytes(16))
    old = RoundKey(fragment=0, round=1, attempt=bytes(16))
    outcome = Outcome(
        key=RoundKey(fragment=0, round=5, attempt=bytes(16)), run=RUN.digest(), coordinator=me, live=1,
        state_digest=bytes(32), members=[Member(peer=me, weight=1.0, offer_id=bytes(8))],
        parts=[
            PartOutcome(stop_block=73, digest=bytes(32), contributors=[Contributor(peer=me, weight=1.0)])
        ],
    ).SerializeToString()  # fmt: skip
    forged = Vote(member=0, signature=identity.sign(b"another", outcome))
    return {
        "unreadable": b"\xff" * 40,
        "unknown version": Envelope(version=99, run=RUN.digest(), ping=Ping()).SerializeToString(),
        "unknown message": envelope(),
        "bad status": envelope(ping=Ping(status=Status(position=math.nan))),
        "unknown fragment": envelope(fetch=Fetch(fragment=77)),
        "unknown round": envelope(part=Part(key=key, total=1, data=b"x")),
        "replayed round": envelope(mean=Mean(key=old, total=1, data=b"x")),
        "wrong signature": envelope(decision=Decision(outcome=outcome, votes=[forged])),
    }


@contextlib.asynccontextmanager
async def stranger(ticket: str, folder: Path) -> AsyncIterator[Network]:
    """A peer that answers nothing, on the run's network over gRPC; its identity is in ``folder``."""
    config = PeerConfig(folder=folder, carrier="grpc")
    network = await Network.open(Ticket.parse(ticket), config, lambda peer, error: None)

    async def ignore(sender: PeerId, data: bytes) -> None:
        return None

    try:
        await network.start_carriers(ignore, lambda peer, error: None)
        yield network
    finally:
        await network.close()


async def link_to(network: Network, peer: PeerId) -> Link:
    """A new link to ``peer``, whose record must be in the DHT."""
    record = await network.find_record(peer)
    assert record is not None
    return await network.carriers[0].connect(record)


async def attack(
    ticket: str, folder: Path, victim: PeerId, counted: Callable[[], list[str]]
) -> dict[str, bytes]:
    """Send every offence to ``victim`` and wait until it has counted them; see ``offences``."""
    async with stranger(ticket, folder) as network:
        await network.publish_self()
        sent = offences(network.identity.peer_id, network.identity)
        link = await link_to(network, victim)
        for _ in range(3):  # once would be enough; a replay of it is refused alike
            for message in sent.values():
                await link.send(message)
        ends_at = asyncio.get_running_loop().time() + BOUND_S
        while missing := sent.keys() - set(counted()):
            assert asyncio.get_running_loop().time() < ends_at, missing
            await asyncio.sleep(0.1)  # its journal sets no event
        await link.close()
        return sent


async def flood(ticket: str, folder: Path, victim: PeerId) -> tuple[str, str]:
    """Small, well formed PARTs of a round that does not exist, as fast as ``victim`` takes them, until it
    takes no more: (why the link ended, why the next one did)."""
    async with stranger(ticket, folder) as network:
        link = await link_to(network, victim)
        part = envelope(part=Part(key=RoundKey(round=10**6, attempt=bytes(16)), total=1, data=b"x"))
        async with asyncio.timeout(BOUND_S):
            try:
                while True:
                    await link.send(part)
            except PeerLost as error:
                first = str(error)
            again = await link_to(network, victim)
            with contextlib.suppress(PeerLost):  # it may be shut out before the call returns
                await again.send(envelope(ping=Ping(nonce=1, sent_at=1.0)))
            return first, await again.wait_closed()


def refusals(running: Swarm) -> dict[str, list[str]]:
    """What peer "a" refused, by sender."""
    found: dict[str, list[str]] = {}
    for event in running.events("a"):
        if isinstance(event, MessageRefused):
            found.setdefault(event.other, []).append(event.reason)
    return found


def assert_same_steps(running: Swarm) -> None:
    """Each outer step that both took did the same to its fragment, bit for bit."""
    did: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for name in HONEST:
        for step in running.events(name):
            if isinstance(step, FragmentApplied):
                norms = (step.gap, step.momentum_norm)
                did.setdefault((step.fragment, step.version), []).append(norms)
    shared = [norms for norms in did.values() if len(norms) == len(HONEST)]
    assert len(shared) >= 6
    assert all(len(set(norms)) == 1 for norms in shared), did


def test_broken_rules_and_a_flood_are_refused_and_counted_and_cost_the_swarm_nothing(tmp_path: Path) -> None:
    with swarm(tmp_path, RUN) as running:
        for seed, name in enumerate(HONEST):
            running.start_peer(name, "--seed", str(seed), "--min-peers", "2")
        running.wait_for("a", FragmentApplied, count=3)
        joined = running.wait_for("b", PeerJoined)[0]
        assert isinstance(joined, PeerJoined)
        victim = PeerId(joined.other)

        def counted() -> list[str]:
            return [reason for reasons in refusals(running).values() for reason in reasons]

        sent = asyncio.run(attack(running.ticket, tmp_path / "mallory", victim, counted))
        first, second = asyncio.run(flood(running.ticket, tmp_path / "flooder", victim))
        assert "too many messages" in first
        assert "shut out" in second
        for name in HONEST:
            made = sum(isinstance(event, RoundCommitted) for event in running.events(name))
            running.wait_for(name, RoundCommitted, count=made + 3)
        for name in HONEST:
            running.processes[name].send_signal(signal.SIGINT)
        running.wait(*HONEST)

        mallory, flooder = (
            Identity.load_or_create(tmp_path / name / "identity").peer_id for name in ("mallory", "flooder")
        )
        refused = refusals(running)
        assert refused.keys() == {mallory, flooder}
        assert sent.keys() <= set(refused[mallory])
        assert {"unknown round", "too many messages", "shut out"} <= set(refused[flooder])
        assert_same_steps(running)
        ends = [running.finished(name) for name in HONEST]
        assert len({(end.digest, end.versions) for end in ends}) == len({end.versions for end in ends})
