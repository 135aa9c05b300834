"""Where a peer can be reached: its own record, and whether addresses lead from here to there."""

from __future__ import annotations

from collections.abc import Sequence

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError
from p2p_co2.net.transport.addresses import address_of, is_loopback, is_near, is_own, is_relayed
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.net.transport.libp2p.control import own_maddrs
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.libp2p.relay import Places
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_ADDRESSES, MAX_RECORD_BYTES, MAX_STRING
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.ticket import Ticket

MAX_GRPC_ADDRESSES = 4


class Reach:
    """This peer's addresses: those that libp2p has found, its places at relays, and its gRPC port."""

    def __init__(self, p2p: P2P, me: PeerId, config: PeerConfig, ticket: Ticket) -> None:
        self._p2p, self._me, self._config, self._ticket = p2p, me, config, ticket
        # Who can be dialled, or runs on the seeds' own machine, needs no places.
        needs_none = config.announce_host or ticket.is_local
        self._places = None if needs_none else Places(p2p, me, ticket.seeds)
        self.grpc: GrpcCarrier | None = None
        self.own_maddrs: tuple[str, ...] = ()
        """As libp2p named them last."""
        self.advice = ""
        """What keeps others from reaching this peer and what helps; empty if nothing is known to."""

    async def record(self) -> PeerRecord:
        """This peer's record, without what discovery adds. Raises ``TransportError``."""
        maddrs = await own_maddrs(self._p2p, CONNECT_TIMEOUT_S)
        self.own_maddrs = tuple(maddrs)
        if self._places is not None:
            await self._places.renew()
            maddrs = [*self._places.held, *maddrs]
            cause = "" if lead_nowhere_else(self._ticket.seeds) else self._places.trouble
            self.advice = unreachable_advice(cause) if cause else ""
        record = PeerRecord(peer=self._me, run=self._ticket.run, maddrs=publishable(maddrs))
        if self.grpc is not None and (addresses := self._grpc_addresses(maddrs, self.grpc.port)):
            record.grpc_addresses.extend(addresses)
            record.certificate_digest = self.grpc.certificate_digest
        return record

    def forget_places(self) -> None:
        """The daemon is a new one: what it held is lost."""
        if self._places is not None:
            self._places.forget()

    def _grpc_addresses(self, maddrs: Sequence[str], port: int) -> list[str]:
        """Where others may dial our gRPC; a peer that listens everywhere names this machine's own
        addresses."""
        hosts = [self._config.announce_host or self._config.host]
        if hosts[0] in ("0.0.0.0", "::"):
            places = [place[0] for maddr in maddrs if (place := address_of(maddr)) is not None]
            hosts = [host for host in dict.fromkeys(places) if is_own(host) and not is_loopback(host)]
        hosts = hosts[:MAX_GRPC_ADDRESSES]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def publishable(maddrs: Sequence[str]) -> list[str]:
    """The addresses that others take and that fit into a record, in the order in which libp2p names them."""
    room = MAX_RECORD_BYTES // 2
    taken: list[str] = []
    for maddr in maddrs:
        if len(maddr) <= min(MAX_STRING, room) and len(taken) < MAX_ADDRESSES:
            taken.append(maddr)
            room -= len(maddr)
    return taken


def leads_as_far(maddr: str, seeds: Sequence[str]) -> bool:
    """Whether who can dial the seeds of a ticket may be able to dial ``maddr``."""
    if all(is_loopback(_host_of(seed)) for seed in seeds):
        return is_loopback(_host_of(maddr))
    return not (is_loopback if lead_nowhere_else(seeds) else is_near)(_host_of(maddr))


def _host_of(maddr: str) -> str:
    return maddr.split("/")[2]


def require_others_can_dial(config: PeerConfig, ticket: Ticket) -> None:
    """Raise ``ConfigError`` if a peer would tell others on other machines to dial their own: it would hear
    nobody, or live on relays."""
    host = config.announce_host or config.host
    if is_loopback(host) and not is_on_this_machine(ticket):
        raise ConfigError(
            "this peer's settings",
            "announce_host" if config.announce_host else "host",
            f"{host} leads nowhere from another machine, and the seeds are on others; listen on all "
            'addresses (host "0.0.0.0") and leave announce_host out, or name there what others can dial',
        )


def is_on_this_machine(ticket: Ticket) -> bool:
    """Whether all seeds are, as far as their addresses tell."""
    places = [seed.split("/")[1:3] for seed in ticket.seeds]
    return all(kind in {"ip4", "ip6"} and (is_loopback(host) or is_own(host)) for kind, host in places)


def leads_elsewhere(record: PeerRecord) -> bool:
    """Whether a record has an address that leads to another machine than the one that dials it, or none."""
    hosts = [address.rpartition(":")[0].strip("[]") for address in record.grpc_addresses]
    maddrs = [maddr for maddr in record.maddrs if maddr.count("/") > 2]
    hosts += ["a relay" if is_relayed(maddr) else _host_of(maddr) for maddr in maddrs]
    return not hosts or not all(map(is_loopback, hosts))


def lead_nowhere_else(seeds: Sequence[str]) -> bool:
    """Whether all these multiaddrs are of private networks: whoever gets to such a seed gets to its
    neighbours too, so nobody needs a relay."""
    return all(is_near(_host_of(seed)) for seed in seeds)


def unreachable_advice(cause: str) -> str:
    """What to tell somebody whose peer has no place at a relay. ``cause``: why there is none."""
    return (
        "forward two TCP ports of the router to this machine and join with --announce-host NAME "
        "--host 0.0.0.0 --libp2p-port PORT --grpc-port PORT, or ask the organiser for a seed that relays "
        f"(--announce-host): peers are out of reach, and no seed passes on traffic for this peer ({cause})"
    )
