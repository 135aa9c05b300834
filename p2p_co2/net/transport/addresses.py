"""Addresses: which lead far away, which only near this machine, and the numbers behind a host name.

``is_near`` follows RFC 1918 and 4193 (private), 6598 (carrier-grade NAT), 3927 and 4291 (link-local,
loopback), as libp2p's own table does. An address that libp2p takes for public is one that others dial.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from p2p_co2.errors import TransportError
from p2p_co2.ticket import is_seed_address

MAX_LOOKUPS = 8
_NEAR = tuple(
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8",
        "0.0.0.0/8", "::/127", "fe80::/10", "fc00::/7",
    )
)  # fmt: skip


def is_near(host: str) -> bool:
    """Whether an IP address leads only to this machine or its own network; a name may lead anywhere."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in _NEAR if network.version == address.version)


def is_loopback(host: str) -> bool:
    """Whether a host leads to this machine itself; of names only "localhost" does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_own(address: str) -> bool:
    """Whether an IP address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def seed_addresses_of(peer: str, maddrs: Iterable[str]) -> list[str]:
    """Those of a peer's addresses that a ticket can name: its own ones, and direct."""
    own = [maddr for maddr in maddrs if maddr.endswith(f"/p2p/{peer}") and not is_relayed(maddr)]
    return list(filter(is_seed_address, own))


def is_relayed(maddr: str) -> bool:
    """Whether a third machine passes on what goes to this multiaddr."""
    return "/p2p-circuit" in maddr


def multiaddr_of(host: str, port: int) -> str:
    """The libp2p address of an IP address or DNS name and a TCP port."""
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


def address_of(maddr: str) -> tuple[str, int] | None:
    """("203.0.113.5", 31000) of the multiaddr of a direct TCP connection; None for any other."""
    fields = maddr.split("/")
    if is_relayed(maddr) or len(fields) < 5 or fields[1] not in {"ip4", "ip6"} or fields[3] != "tcp":
        return None
    try:
        address = ipaddress.ip_address(fields[2])
        port = int(fields[4])
    except ValueError:
        return None
    return (str(address), port) if 0 < port < 65536 else None


def is_public_maddr(maddr: str) -> bool:
    """Whether it is of a direct TCP connection from anywhere in the world."""
    place = address_of(maddr)
    return place is not None and not is_near(place[0])


def network_of(address: str) -> str:
    """What counts as one customer: an IPv4 address, or the 64-bit network of an IPv6 address."""
    parsed = ipaddress.ip_address(address)
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


class Resolver:
    """Looks up host names that strangers announced, at most ``most`` at once.

    The system's resolver cannot be stopped: a name whose servers never answer holds a thread for half a
    minute. So each lookup has a daemon thread of its own. Law: no stranger's name delays anything but the
    attempt to reach that stranger. ``resolve`` blocks and gives a name's addresses, or raises ``OSError``.
    """

    def __init__(self, most: int = MAX_LOOKUPS, resolve: Callable[[str], list[str]] | None = None) -> None:
        self._places = threading.BoundedSemaphore(most)
        self._resolve = resolve or _resolve

    async def addresses_of(self, host: str, timeout_s: float) -> list[str]:
        """The addresses of ``host``, itself if it is one. Safe to cancel.

        Raises ``TransportError``: no such name, no answer in time, or too many lookups under way.
        """
        with suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        if not self._places.acquire(blocking=False):
            raise TransportError(f"{host[:64]}: too many names are being looked up; addresses need none")
        loop = asyncio.get_running_loop()
        found = list[str]()
        ready = asyncio.Event()

        def look_up() -> None:
            try:
                with suppress(OSError, UnicodeError):
                    found.extend(self._resolve(host))
            finally:
                self._places.release()
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(ready.set)

        threading.Thread(target=look_up, daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await ready.wait()
        except TimeoutError:
            raise TransportError(f"{host[:64]}: its name servers do not answer") from None
        if not found:
            raise TransportError(f"{host[:64]}: no such name")
        return found


def _resolve(host: str) -> list[str]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
