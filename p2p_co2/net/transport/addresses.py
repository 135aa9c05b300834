"""Which addresses mean something far away, and which only near this machine.

Sources: RFC 1918 and 4193 (private), 6598 (carrier-grade NAT), 3927 and 4291 (link-local, loopback). The
table is libp2p's, not the registry's: an address that libp2p takes for public is one that it dials and lets
others dial, and that is what the callers want to know.
"""

from __future__ import annotations

import ipaddress
import socket

_NEAR = tuple(
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8",
        "::1/128", "fe80::/10", "fc00::/7",
    )
)  # fmt: skip


def is_near(host: str) -> bool:
    """Whether an IP address leads nowhere but to this machine or its own network; a name may lead
    anywhere."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in _NEAR if network.version == address.version)


def is_public_maddr(maddr: str) -> bool:
    """Whether a multiaddr is a direct one that the world can see."""
    fields = maddr.split("/")
    is_direct = len(fields) > 4 and fields[1] in {"ip4", "ip6"} and "p2p-circuit" not in fields
    return is_direct and not is_near(fields[2])


def is_loopback(host: str) -> bool:
    """Whether an IP address leads to this machine itself."""
    return ipaddress.ip_address(host).is_loopback


def is_loopback_host(host: str) -> bool:
    """The same of a host as people write it: a name may lead anywhere, but for this one."""
    try:
        return is_loopback(host)
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
