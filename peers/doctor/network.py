"""The way to the swarm, stage by stage: daemon, seeds, run, clock. Then how others see this machine: NAT,
whether it can be dialled, how fast bytes go either way.

A daemon and an identity of its own, for a moment: a peer that runs beside it is not disturbed, and nothing
is published. All is bounded in time and bytes; a stage that fails leaves the later ones "unknown". What
seeds and peers say is one voice each, and a median where they disagree. Rates are lower bounds, since the
other end may be the slower one, so several are asked at once. A port counts as reached only if who answered
there proved to be us."""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, P2PCo2Error, TicketError, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.addresses import address_of
from p2p_co2.net.transport.libp2p.control import own_maddrs
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.probe import GREETING, Look, Passed, Prober, judge_clock, open_prober
from p2p_co2.node.doorkeeper import Doorkeeper
from p2p_co2.peer_options import listening
from p2p_co2.ticket import Ticket, by_peer
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord
from p2p_co2.wire.names import words_of
from peers.doctor.findings import Finding, Grade, MeasuredLink, NetworkLook
from peers.doctor.machine import cannot_listen

NETWORK_S = 22.0
"""Bound on everything here."""
STARTUP_S = 6.0
OPEN_S = 5.0
MAX_PEERS_ASKED = 4
MAX_MEASURED = 3
LOOKS = 3
FIRST_BYTES, SECOND_BYTES, QUICK_S = 128 << 10, 1 << 20, 0.5
"""A rate is measured on the first; on the second where that took less than ``QUICK_S``."""
AFTER_SEEDS = ("clock", "nat", "reachability", "upload", "download")
"""Findings that need somebody to ask."""

Tell = Callable[[Finding], None]
Place = tuple[str, int]
"""(IP address, port)"""


@dataclass
class Target:
    """Somebody to ask. ``looks``: what it answered; ``trouble``: why it did not."""

    name: str
    is_seed: bool
    prober: Callable[[], AbstractAsyncContextManager[Prober]]
    looks: list[Look] = field(default_factory=list)
    trouble: str = ""

    @property
    def best(self) -> Look:
        """The quickest answer, whose clock is the surest."""
        return min(self.looks, key=lambda look: look.round_trip_s)

    async def look(self) -> None:
        try:
            async with asyncio.timeout(OPEN_S), self.prober() as prober:
                for _ in range(LOOKS):
                    self.looks.append(await prober.look())
        except (TransportError, TimeoutError) as error:
            self.trouble = str(error) or "did not answer in time"


async def look_at_network(ticket: Ticket | None, config: PeerConfig, tell: Tell) -> NetworkLook:
    """All stages; findings go to ``tell`` as they come. Without a ticket there is nobody to ask. Never raises
    for what the network does."""
    outcome = NetworkLook()
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(NETWORK_S):
            await _stages(ticket, listening(config, ticket), tell, outcome, stack)
    except TimeoutError:
        advice = "try again; if it stays so, this machine or its network is overloaded"
        tell(Finding("network", Grade.UNKNOWN, f"not all done within {NETWORK_S:.0f} s", advice))
    return outcome


async def _stages(
    ticket: Ticket | None, config: PeerConfig, tell: Tell, outcome: NetworkLook, stack: AsyncExitStack
) -> None:
    started = await _daemon(config, tell, stack)
    if ticket is None:
        for name in ("seeds", *AFTER_SEEDS):
            tell(Finding(name, Grade.UNKNOWN, "no ticket, nobody to ask"))
    if started is None or ticket is None:
        return
    p2p, identity = started

    def target(name: str, peer: str, maddrs: Sequence[str], is_seed: bool) -> Target:
        return Target(name, is_seed, partial(open_prober, p2p, PeerId(peer), maddrs, ticket.run, OPEN_S))

    known = by_peer(ticket.seeds).items()
    seeds = [target(f"seed {words_of(peer)}", peer, maddrs, is_seed=True) for peer, maddrs in known]
    await asyncio.gather(*(seed.look() for seed in seeds))
    # A forged record in the DHT is refused there, and no business of somebody who only looks.
    discovery = Discovery(p2p, identity, ticket.run, lambda peer, error: None)
    stack.push_async_callback(discovery.close)
    finding, records = await _meet(ticket, discovery, seeds, outcome)
    tell(finding)
    if outcome.run is not None:
        door = Doorkeeper(identity.peer_id, ticket, config.folder, outcome.run)
        try:
            door.enter()
        except TicketError as error:
            what, _, cure = str(error).partition(": ")
            tell(Finding("ticket", Grade.CANNOT, what, cure))
        records = list(filter(door.members.admits, records))  # others may name any address
        outcome.peers = len(records)
    asked = random.Random().sample(records, min(MAX_PEERS_ASKED, len(records)))
    peers = [target(f"peer {words_of(one.peer)}", one.peer, list(one.maddrs), is_seed=False) for one in asked]
    await asyncio.gather(*(peer.look() for peer in peers))
    answering = [target for target in (*seeds, *peers) if target.looks]
    if not answering:
        for name in AFTER_SEEDS:
            tell(Finding(name, Grade.UNKNOWN, "nobody answered who could be asked", "see seeds"))
        return
    clock = judge_clock([target.best.offset_s for target in answering])
    tell(Finding("clock", Grade[clock.state.upper()], clock.measured, clock.advice))
    tell(nat_finding([target.best.observed for target in answering if target.best.observed], config))
    finding, outcome.is_reachable = await look_at_reachability(p2p, answering, config)
    tell(finding)
    outcome.link = await look_at_rates(answering, tell)


async def _daemon(config: PeerConfig, tell: Tell, stack: AsyncExitStack) -> tuple[P2P, Identity] | None:
    """Start the daemon with an identity that lives as long as ``stack``; None if it does not start."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2p-co2-doctor-")))
    began_at = time.monotonic()
    try:
        identity = Identity.load_or_create(folder / "identity")
        # On the peer's own port if that is free (``check_ports`` tells): that one is to be dialled.
        port = 0 if cannot_listen(config.host, config.libp2p_port) else config.libp2p_port
        p2p = await start_p2p(
            folder / "identity", config.host, port, relay=False, upnp=config.upnp, startup_timeout_s=STARTUP_S
        )
    except (EnvironmentFault, ConfigError) as error:
        tell(Finding("libp2p daemon", Grade.CANNOT, "does not start", str(error)))
        return None
    stack.push_async_callback(stop_p2p, p2p)
    tell(Finding("libp2p daemon", Grade.OK, f"starts in {time.monotonic() - began_at:.1f} s"))
    return p2p, identity


async def _meet(
    ticket: Ticket, discovery: Discovery, seeds: Sequence[Target], outcome: NetworkLook
) -> tuple[Finding, list[PeerRecord]]:
    """Join the DHT, read the settings, find peers."""
    try:
        await discovery.start(ticket.seeds)
        manifest = await discovery.fetch_manifest(ticket.run_key)
        outcome.run = RunConfig.from_canonical_bytes(manifest.config)
        records = await discovery.find_peers()
    except P2PCo2Error as error:
        advice = "ask the organiser whether a seed of this run is up, and check this machine's network"
        return Finding("seeds", Grade.CANNOT, str(error)[:300], advice), []
    lost = [f"{seed.name}: {seed.trouble}" for seed in seeds if not seed.looks]
    words = f"{len(seeds) - len(lost)} of {len(seeds)} answer; "
    words += f'run "{outcome.run.name}", recipe {outcome.run.recipe}'
    if not lost:
        return Finding("seeds", Grade.OK, words), records
    advice = "tell the organiser; those that answer are enough"
    return Finding("seeds", Grade.LIMITED, f"{words} ({'; '.join(lost)[:200]})", advice), records


# ---- what stands between: after STUN's behaviour discovery (RFC 5780), over the connections there are anyway


def nat_finding(seen: Sequence[Place], config: PeerConfig) -> Finding:
    """By the places at which observers see our daemon, which dials all of them from its own port. Seen alike
    by two is a mapping that hole punching can use, seen differently it is not; one alone cannot tell."""
    if not seen:
        return Finding("nat", Grade.UNKNOWN, "unknown", "nobody saw this machine directly: see reachability")
    where = f"seen at {seen[0][0]}"
    if any(not cannot_listen(address, 0) for address, _ in seen):  # it is this machine's
        return Finding("nat", Grade.OK, f"none, {where}")
    if len(seen) == 1:
        kind = "some, of unknown kind"
        how = "a second seed could tell which"
    elif len(set(seen)) == 1:
        kind = "one mapping for all (cone)"
        how = "hole punching works through it"
    else:
        kind = "a mapping of its own for each destination (symmetric)"
        how = "hole punching does not work through it, others meet this peer by relays"
    forward = f"to be dialled, let the router forward {ports_in_words(config)} to this machine"
    return Finding("nat", Grade.LIMITED, f"{kind}, {where}", f"{how}; {forward}")


def ports_in_words(config: PeerConfig) -> str:
    """What to forward, in words and as options of ``join``."""
    ports = [f"--libp2p-port {config.libp2p_port or 31338}"]
    if config.carrier != "libp2p":
        ports.append(f"--grpc-port {config.grpc_port or 31339}")
    fixed = config.libp2p_port and (config.grpc_port or config.carrier == "libp2p")
    return f"TCP ports {'' if fixed else 'of your choice '}({' '.join(ports)})"


# ---- whether we can be dialled


async def look_at_reachability(
    p2p: P2P, answering: Sequence[Target], config: PeerConfig
) -> tuple[Finding, bool | None]:
    """Ask a seed to connect to us: to the daemon, and to a listener where gRPC will listen. The second value
    says whether one of them was reached; None if that could not be found out."""
    seed = next((target for target in answering if target.best.observed), None)
    if seed is None:
        return Finding("reachability", Grade.LIMITED, "met through a relay only", "see nat"), False
    reached: dict[str, bool] = {}
    try:
        async with seed.prober() as prober:
            for port in await _daemon_ports(p2p, seed.best.observed):
                reached[f"libp2p port {port}"] = await prober.dial_back(port, GREETING)
            if config.carrier != "libp2p":
                port, answer = await _dial_back_to_listener(prober, config)
                reached[f"grpc port {port}"] = answer
    except (TransportError, EnvironmentFault) as error:
        finding = Finding("reachability", Grade.UNKNOWN, f"{seed.name}: {error}", "try again in a minute")
        return finding, any(reached.values()) or None
    words = ", ".join(f"{name} {'reached' if did else 'not reached'}" for name, did in reached.items())
    words = f"by {seed.name}: {words or 'no port to try'}"
    if reached and all(reached.values()):
        return Finding("reachability", Grade.OK, words), True
    if config.host.startswith("127.") or config.host == "::1":
        advice = "this peer listens on this machine alone: give --host 0.0.0.0"
    else:
        ports = ports_in_words(config)
        advice = f"let the router forward, and the firewall pass, {ports}; it works without, more slowly"
    return Finding("reachability", Grade.LIMITED, words, advice), any(reached.values())


async def _daemon_ports(p2p: P2P, observed: Place | None) -> list[int]:
    """Ports at which the daemon may be dialled at our observed address: one that the router has opened for
    it, and its own."""
    places = [place for maddr in await own_maddrs(p2p, OPEN_S) if (place := address_of(maddr))]
    outside = [port for address, port in places if observed and address == observed[0]]
    return list(dict.fromkeys([*outside, *(port for _, port in places)]))[:2]


async def _dial_back_to_listener(prober: Prober, config: PeerConfig) -> tuple[int, bool]:
    """(the port, whether it was reached) of a listener that only we can be."""
    token = os.urandom(16)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(token)
        writer.close()

    try:
        listener = await asyncio.start_server(greet, config.host, config.grpc_port)
    except OSError as error:
        raise EnvironmentFault(f"cannot listen on port {config.grpc_port}: {error.strerror}") from None
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        return port, await prober.dial_back(port, token)


# ---- rates


async def look_at_rates(answering: Sequence[Target], tell: Tell) -> MeasuredLink:
    """Up, then down: with a few at once, peers first, since one of them may be the slower end."""
    chosen = sorted(answering, key=lambda target: target.is_seed)[:MAX_MEASURED]
    up = await _rate("upload", chosen, Prober.upload)
    down = await _rate("download", chosen, Prober.download)
    for _, finding in (up, down):
        tell(finding)
    round_trip_s = statistics.median(target.best.round_trip_s for target in answering)
    return MeasuredLink(up_bytes_per_s=up[0], down_bytes_per_s=down[0], round_trip_s=round_trip_s)


async def _rate(
    name: str, chosen: Sequence[Target], measure: Callable[[Prober, int], Awaitable[Passed]]
) -> tuple[float | None, Finding]:
    """Bytes per second of all at once: on a few bytes, and on more where those were quick."""
    known: dict[str, Passed] = {}
    troubles: list[str] = []

    async def pass_bytes(target: Target, size: int, passed: dict[str, Passed]) -> None:
        try:
            async with target.prober() as prober:
                passed[target.name] = await measure(prober, size)
        except TransportError as error:
            troubles.append(f"{target.name}: {error}")

    for size in (FIRST_BYTES, SECOND_BYTES):
        now: dict[str, Passed] = {}
        await asyncio.gather(*(pass_bytes(target, size, now) for target in chosen))
        known = now or known
        if not now or max(passed.duration_s for passed in now.values()) > QUICK_S:
            break
    return together(known.values()), rate_finding(name, known, troubles)


def together(passed: Iterable[Passed]) -> float | None:
    """Bytes per second while any of them ran: one that came after the others had the whole line."""
    known = sorted(passed, key=lambda one: one.began_at)
    running_s = 0.0
    until = -math.inf
    for one in known:
        running_s += max(0.0, one.ended_at - max(one.began_at, until))
        until = max(until, one.ended_at)
    return sum(one.size_bytes for one in known) / running_s if known else None


def _mbit(bytes_per_s: float) -> str:
    """In Mbit/s, three digits or all before the point."""
    rate = 8e-6 * bytes_per_s
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def rate_finding(name: str, known: Mapping[str, Passed], troubles: Sequence[str]) -> Finding:
    """``known``: what came through, by whom it was measured with."""
    total = together(known.values())
    if total is None:
        words = "; ".join(troubles)[:200] or "nobody to measure with"
        return Finding(name, Grade.UNKNOWN, words, "try again in a minute")
    words = f"{_mbit(total)} Mbit/s"
    if len(known) > 1:
        each = (f"{_mbit(passed.bytes_per_s)} with {who}" for who, passed in known.items())
        words += f" ({', '.join(each)})"
    if total < 125_000:
        advice = "answers will be stale: spare this link, use a cable and not Wi-Fi"
        return Finding(name, Grade.LIMITED, words, advice)
    return Finding(name, Grade.OK, words)
