"""The way to the swarm, stage by stage: route, names, daemon, seeds, run, clock, and how others see us.

A daemon and an identity of its own, for a moment: a peer that runs beside it is not disturbed, and nothing is
published. Laws: all of it is bounded in time and bytes; a stage that fails leaves the later ones "unknown";
what seeds and peers say is one voice each, and a median where they disagree.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, P2PCo2Error, RemoteProtocolError, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.probe import judge_clock
from p2p_co2.peer_options import listening
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.ticket import Ticket, by_peer
from peers.doctor.findings import Finding, MeasuredLink, State
from peers.doctor.names import check_names, check_route
from peers.doctor.seen import (
    OPEN_S,
    Swarm,
    Target,
    look_at_nat,
    look_at_rates,
    look_at_reachability,
)

NETWORK_S = 22.0
"""Bound on everything here."""
STARTUP_S = 6.0
MAX_PEERS_ASKED = 4
LOOKS = 3
SLOW_ROUND_TRIP_S = 0.5
AFTER_SEEDS = ("clock", "nat", "reachability", "upload", "download", "round trips")
"""Findings that need somebody to ask."""


@dataclass
class Outcome:
    """What the stages found beside their findings."""

    run: RunConfig | None = None
    peers: int = 0
    is_reachable: bool | None = None
    link: MeasuredLink = field(default_factory=MeasuredLink)


async def look_without_ticket(config: PeerConfig, tell: Callable[[Finding], None]) -> None:
    """What can be said of the network with nobody to ask."""
    tell(check_route())
    async with AsyncExitStack() as stack, asyncio.timeout(NETWORK_S):
        await _daemon(config, tell, stack)
    for name in ("names (dns)", "seeds", *AFTER_SEEDS):
        tell(Finding(name, State.UNKNOWN, "no ticket, nobody to ask"))


async def look_at_network(ticket: Ticket, config: PeerConfig, tell: Callable[[Finding], None]) -> Outcome:
    """All stages; findings go to ``tell`` as they come. Never raises for what the network does."""
    outcome = Outcome()
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(NETWORK_S):
            await _stages(ticket, config, tell, outcome, stack)
    except TimeoutError:
        advice = "try again; if it stays so, this machine or its network is overloaded"
        tell(Finding("network", State.UNKNOWN, f"not all done within {NETWORK_S:.0f} s", advice))
    return outcome


async def _stages(
    ticket: Ticket,
    config: PeerConfig,
    tell: Callable[[Finding], None],
    outcome: Outcome,
    stack: AsyncExitStack,
) -> None:
    config = listening(config, ticket)
    tell(check_route())
    tell(await check_names(ticket.seeds, config.announce_host))
    started = await _daemon(config, tell, stack)
    if started is None:
        return
    p2p, identity = started
    targets = seeds_of(ticket)
    await asyncio.gather(*(_look(ticket, p2p, target) for target in targets))
    discovery = Discovery(p2p, identity, ticket.run, _ignore)
    stack.push_async_callback(discovery.close)
    tell(await _meet(ticket, discovery, targets, outcome))
    await asyncio.gather(*(_look(ticket, p2p, target) for target in targets if not target.is_seed))
    swarm = Swarm(p2p, ticket.run, tuple(target for target in targets if target.looks))
    if not swarm.answering:
        for name in AFTER_SEEDS:
            tell(Finding(name, State.UNKNOWN, "nobody answered who could be asked", "see seeds"))
        return
    tell(clock_finding([target.offset_s for target in swarm.answering]))
    tell(await look_at_nat(swarm, config))
    finding, outcome.is_reachable = await look_at_reachability(swarm, config)
    tell(finding)
    findings, outcome.link = await look_at_rates(swarm)
    for rate in findings:
        tell(rate)
    tell(round_trips_finding({target.name: target.round_trip_s for target in swarm.answering}, outcome.peers))


async def _daemon(
    config: PeerConfig, tell: Callable[[Finding], None], stack: AsyncExitStack
) -> tuple[P2P, Identity] | None:
    """Start the daemon with an identity that lives as long as ``stack``; None if it does not start."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2p-co2-doctor-")))
    began_at = time.monotonic()
    try:
        identity = Identity.load_or_create(folder / "identity")
        p2p = await _start(folder / "identity", config)
    except (EnvironmentFault, ConfigError) as error:
        tell(Finding("libp2p daemon", State.CANNOT, "does not start", str(error)))
        return None
    stack.push_async_callback(stop_p2p, p2p)
    tell(Finding("libp2p daemon", State.OK, f"starts in {time.monotonic() - began_at:.1f} s"))
    return p2p, identity


async def _start(identity_path: Path, config: PeerConfig) -> P2P:
    """The daemon, on the peer's own port if that is free: that one is to be dialled."""
    try:
        return await start_p2p(identity_path, config.host, config.libp2p_port, startup_timeout_s=STARTUP_S)
    except EnvironmentFault:
        if not config.libp2p_port:
            raise
    return await start_p2p(identity_path, config.host, startup_timeout_s=STARTUP_S)


def seeds_of(ticket: Ticket) -> list[Target]:
    """The seeds of a ticket; one that has several addresses is one seed."""
    return [
        Target(f"seed {number}", peer, known, is_seed=True)
        for number, (peer, known) in enumerate(by_peer(ticket.seeds).items(), 1)
    ]


async def _meet(ticket: Ticket, discovery: Discovery, targets: list[Target], outcome: Outcome) -> Finding:
    """Join the DHT, read the settings, find peers: some of them join ``targets``."""
    try:
        await discovery.start(ticket.seeds)
        manifest = await discovery.fetch_manifest(ticket.run_key)
        outcome.run = RunConfig.from_canonical_bytes(manifest.config)
        records = await discovery.find_peers()
    except P2PCo2Error as error:
        advice = "ask the organiser whether a seed of this run is up, and check this machine's network"
        return Finding("seeds", State.CANNOT, str(error)[:300], advice)
    lost = [f"{target.name}: {target.trouble}" for target in targets if not target.looks]
    outcome.peers = len(records)
    for record in random.Random().sample(records, min(MAX_PEERS_ASKED, len(records))):
        name = f"peer {record.peer[-6:]}"
        targets.append(Target(name, PeerId(record.peer), list(record.maddrs), is_seed=False))
    seeds = sum(target.is_seed for target in targets)
    words = f'{seeds - len(lost)} of {seeds} answer; run "{outcome.run.name}", recipe {outcome.run.recipe}'
    if not lost:
        return Finding("seeds", State.OK, words)
    advice = "tell the organiser; those that answer are enough"
    return Finding("seeds", State.LIMITED, f"{words} ({'; '.join(lost)[:200]})", advice)


async def _look(ticket: Ticket, p2p: P2P, target: Target) -> None:
    swarm = Swarm(p2p, ticket.run, ())
    try:
        async with asyncio.timeout(OPEN_S), swarm.prober(target) as prober:
            for _ in range(LOOKS):
                target.looks.append(await prober.look())
    except (TransportError, TimeoutError) as error:
        target.trouble = str(error) or "did not answer in time"


def clock_finding(offsets_s: Sequence[float]) -> Finding:
    """``offsets_s``: the others' clocks minus ours."""
    judged = judge_clock(offsets_s)
    return Finding("clock", State[judged.state.upper()], judged.measured, judged.advice)


def round_trips_finding(known_s: dict[str, float], peers: int) -> Finding:
    """``known_s``: seconds, by who answered. ``peers``: in the run."""
    words = ", ".join(f"{1e3 * trip_s:.3g} ms to {name}" for name, trip_s in known_s.items())
    words = f"{words}; {peers} {'peer' if peers == 1 else 'peers'} in the run"
    if max(known_s.values()) > SLOW_ROUND_TRIP_S:
        advice = "latency hides behind training, but rounds take longer: use a cable, not Wi-Fi"
        return Finding("round trips", State.LIMITED, words, advice)
    return Finding("round trips", State.OK, words)


def _ignore(peer: object, error: RemoteProtocolError) -> None:
    """A forged record in the DHT: refused there, and no business of somebody who only looks."""
