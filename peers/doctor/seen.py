"""How others see this machine: NAT, whether it can be dialled, and how fast bytes go either way.

Each question goes to seeds and peers over ``transport.probe``. Laws: what is measured is bounded in bytes
and time; a port counts as reached only if whoever answered there proved to be us. Price: rates are lower
bounds, since the other end may be the slower one; so several are asked at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from p2p_co2.config import PeerConfig
from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.net.transport.addresses import address_of
from p2p_co2.net.transport.libp2p.control import daemon_errors, own_maddrs
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.probe import GREETING, Look, Passed, Prober, ProberBusy, open_prober
from p2p_co2.protocol.wire.identity import PeerId
from peers.doctor.findings import Finding, MeasuredLink, State
from peers.doctor.nat import Place, Sight, connections, nat_finding, nat_kind

OPEN_S = 5.0
MAX_MEASURED = 3
FIRST_BYTES, SECOND_BYTES = 128 << 10, 2 << 20
"""A rate is measured on the first; on the second where that took less than ``QUICK_S``."""
QUICK_S = 0.5
BUSY_TRIES, BUSY_S = 4, 0.4
SLOW_BYTES_PER_S = 125_000.0


@dataclass
class Target:
    """Somebody to ask. ``looks``: what it answered."""

    name: str
    peer: PeerId
    maddrs: list[str]
    is_seed: bool
    looks: list[Look] = field(default_factory=list)
    trouble: str = ""

    @property
    def round_trip_s(self) -> float:
        return min(look.round_trip_s for look in self.looks)

    @property
    def offset_s(self) -> float:
        """Of the quickest answer, which is the surest."""
        return min(self.looks, key=lambda look: look.round_trip_s).offset_s

    @property
    def observed(self) -> Place | None:
        return self.looks[0].observed


@dataclass(frozen=True)
class Swarm:
    """What the questions below need: our daemon, the run's digest, and who answered."""

    p2p: P2P
    run: bytes
    answering: tuple[Target, ...]

    def prober(self, target: Target) -> AbstractAsyncContextManager[Prober]:
        return open_prober(self.p2p, target.peer, target.maddrs, self.run, OPEN_S)


async def look_at_nat(swarm: Swarm, config: PeerConfig) -> Finding:
    """Compare the addresses at which all who answered see us with our own ends of those connections."""
    try:
        with daemon_errors("the libp2p daemon did not list its connections"):
            async with asyncio.timeout(OPEN_S):
                listed = await swarm.p2p.list_peers()
    except TransportError as error:
        return Finding("nat", State.UNKNOWN, str(error), "try again")
    far = {info.peer_id.to_base58(): [address_of(str(addr)) for addr in info.addrs] for info in listed}
    ends = connections()
    sights = []
    for target in swarm.answering:
        own = [ends[place] for place in far.get(target.peer, []) if place in ends]
        sights.append(Sight(own[0] if own else None, target.observed))
    observed = next((sight.observed for sight in sights if sight.observed), None)
    return nat_finding(nat_kind(sights), observed, ports_in_words(config))


def ports_in_words(config: PeerConfig) -> str:
    """What to forward, as options of ``join``."""
    ports = [f"--libp2p-port {config.libp2p_port or 31338}"]
    if config.carrier != "libp2p":
        ports.append(f"--grpc-port {config.grpc_port or 31339}")
    fixed = config.libp2p_port and (config.grpc_port or config.carrier == "libp2p")
    return f"TCP ports {'' if fixed else 'of your choice '}({' '.join(ports)})"


async def look_at_reachability(swarm: Swarm, config: PeerConfig) -> tuple[Finding, bool | None]:
    """Ask a seed to connect to us: to the daemon, and to a listener where gRPC will listen. The second value
    says whether one of them was reached; None if that could not be found out."""
    seed = next((target for target in swarm.answering if target.observed), None)
    if seed is None:
        return Finding("reachability", State.LIMITED, "met through a relay only", "see nat"), False
    reached: dict[str, bool] = {}
    try:
        async with swarm.prober(seed) as prober:
            for port in await _daemon_ports(swarm.p2p, seed.observed):
                reached[f"libp2p port {port}"] = await prober.dial_back(port, GREETING, config.announce_host)
            if config.carrier != "libp2p":
                port, answer = await _dial_back_to_listener(prober, config)
                reached[f"grpc port {port}"] = answer
    except (TransportError, EnvironmentFault) as error:
        advice = "correct --announce-host" if "seen from here" in str(error) else "try again in a minute"
        return Finding("reachability", State.UNKNOWN, f"{seed.name}: {error}", advice), any(
            reached.values()
        ) or None
    words = ", ".join(f"{name} {'reached' if did else 'not reached'}" for name, did in reached.items())
    words = f"by {seed.name}: {words or 'no port to try'}"
    if reached and all(reached.values()):
        return Finding("reachability", State.OK, words), True
    return Finding("reachability", State.LIMITED, words, _reach_advice(config)), any(reached.values())


def _reach_advice(config: PeerConfig) -> str:
    if config.host.startswith("127.") or config.host == "::1":
        return "this peer listens on this machine alone: give --host 0.0.0.0"
    ports = ports_in_words(config)
    return f"let the router forward, and the firewall pass, {ports}; it works without, more slowly"


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
        return port, await prober.dial_back(port, token, config.announce_host)


# ---- rates


async def look_at_rates(swarm: Swarm) -> tuple[list[Finding], MeasuredLink]:
    """Up, then down: with a few at once, peers first, since one of them may be the slower end."""
    chosen = sorted(swarm.answering, key=lambda target: target.is_seed)[:MAX_MEASURED]
    up, up_finding = await _rate("upload", swarm, chosen, Prober.upload)
    down, down_finding = await _rate("download", swarm, chosen, Prober.download)
    link = MeasuredLink(
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        round_trip_s=statistics.median(target.round_trip_s for target in swarm.answering),
    )
    return [up_finding, down_finding], link


async def _rate(
    name: str, swarm: Swarm, chosen: Sequence[Target], measure: Callable[[Prober, int], Awaitable[Passed]]
) -> tuple[float | None, Finding]:
    """Bytes per second of all at once: on a few bytes, and on more where those were quick."""
    known: dict[str, Passed] = {}
    troubles: list[str] = []
    for size in (FIRST_BYTES, SECOND_BYTES):
        found = await asyncio.gather(*(_passed(swarm, target, measure, size) for target in chosen))
        troubles = [result for result in found if isinstance(result, str)]
        now = {t.name: result for t, result in zip(chosen, found, strict=True) if isinstance(result, Passed)}
        known = now or known
        if not now or max(passed.duration_s for passed in now.values()) > QUICK_S:
            break
    return together(known.values()), rate_finding(name, known, troubles)


async def _passed(
    swarm: Swarm, target: Target, measure: Callable[[Prober, int], Awaitable[Passed]], size: int
) -> Passed | str:
    """What came through, or why there is no figure."""
    trouble = ""
    for _ in range(BUSY_TRIES):
        try:
            async with swarm.prober(target) as prober:
                return await measure(prober, size)
        except ProberBusy as error:
            trouble = str(error)
            await asyncio.sleep(
                BUSY_S * random.Random().uniform(0.5, 1.5)
            )  # two that ask at once must not stay in step
        except TransportError as error:
            return f"{target.name}: {error}"
    return f"{target.name}: {trouble}"


def together(passed: Iterable[Passed]) -> float | None:
    """Bytes per second while any of them ran: meant to run at once, but who was busy with somebody else comes
    after the others, and each alone then had the whole line."""
    known = sorted(passed, key=lambda one: one.began_at)
    running_s, until = 0.0, -math.inf
    for one in known:
        running_s += max(0.0, one.ended_at - max(one.began_at, until))
        until = max(until, one.ended_at)
    return sum(one.size_bytes for one in known) / running_s if known else None


def rate_finding(name: str, known: Mapping[str, Passed], troubles: Sequence[str]) -> Finding:
    """``known``: what came through, by whom it was measured with."""
    total = together(known.values())
    if total is None:
        words = "; ".join(troubles)[:200] or "nobody to measure with"
        return Finding(name, State.UNKNOWN, words, "try again in a minute")
    words = f"{8e-6 * total:.3g} Mbit/s"
    if len(known) > 1:
        each = (f"{8e-6 * passed.bytes_per_s:.3g} with {who}" for who, passed in known.items())
        words += f" ({', '.join(each)})"
    if total < SLOW_BYTES_PER_S:
        advice = "answers will be stale: spare this link, use a cable and not Wi-Fi"
        return Finding(name, State.LIMITED, words, advice)
    return Finding(name, State.OK, words)
