"""What stands between this machine and the others: from the addresses at which several of them see us.

After STUN's behaviour discovery (RFC 5780), over the libp2p connections that are there anyway: one local port
seen alike by two observers is a mapping that hole punching can use, seen differently it is not. Pure but for
reading proc(5)'s table of connections. Price: one observer alone often cannot tell.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from peers.doctor.findings import Finding, State

Place = tuple[str, int]
"""(IP address, port)"""
_ESTABLISHED = "01"


class NatKind(StrEnum):
    NONE = "none"
    CONE = "one mapping for all (cone)"
    SYMMETRIC = "a mapping of its own for each destination (symmetric)"
    SOME = "some, of unknown kind"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Sight:
    """One observer's view. ``local``: our end of the connection to it, None if not known. ``observed``: where
    it sees us, None if through a relay."""

    local: Place | None
    observed: Place | None


def nat_kind(sights: Sequence[Sight]) -> NatKind:
    """The kind that all ``sights`` together show."""
    seen = [sight for sight in sights if sight.observed is not None]
    own = {sight.local[0] for sight in seen if sight.local}
    if not seen:
        return NatKind.UNKNOWN
    if any(sight.observed[0] in own or _is_loopback(sight.observed[0]) for sight in seen if sight.observed):
        return NatKind.NONE
    mappings: dict[Place, set[Place]] = {}
    counts: dict[Place, int] = {}
    for sight in seen:
        if sight.local and sight.observed:
            mappings.setdefault(sight.local, set()).add(sight.observed)
            counts[sight.local] = counts.get(sight.local, 0) + 1
    if any(len(observed) > 1 for observed in mappings.values()):
        return NatKind.SYMMETRIC
    if any(count > 1 for count in counts.values()):
        return NatKind.CONE
    if any(sight.local and sight.observed and sight.local[1] == sight.observed[1] for sight in seen):
        return NatKind.CONE  # a router that keeps the port keeps it for everybody
    return NatKind.SOME


def nat_finding(kind: NatKind, observed: Place | None, ports: str) -> Finding:
    """``ports``: what to forward, in words."""
    words = f"{kind}, seen at {observed[0]}" if observed else str(kind)
    forward = f"to be dialled, let the router forward {ports} to this machine"
    match kind:
        case NatKind.NONE:
            return Finding("nat", State.OK, words)
        case NatKind.CONE:
            return Finding("nat", State.LIMITED, words, f"hole punching works through it; {forward}")
        case NatKind.SYMMETRIC:
            advice = f"hole punching does not work through it, others meet this peer by relays; {forward}"
            return Finding("nat", State.LIMITED, words, advice)
        case NatKind.SOME:
            return Finding("nat", State.LIMITED, words, f"a second seed could tell which; {forward}")
    return Finding("nat", State.UNKNOWN, words, "nobody saw this machine directly: see reachability")


def connections(
    tables: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6")),
) -> dict[Place, Place]:
    """This network namespace's established TCP connections: their far end to our end."""
    found: dict[Place, Place] = {}
    for table in tables:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # no IPv6 here
        for line in lines:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                found[_place(fields[2])] = _place(fields[1])
    return found


def _place(text: str) -> Place:
    """The kernel's "0100007F:1F90" (words in the machine's order) as (address, port)."""
    address, _, port = text.partition(":")
    words = struct.iter_unpack(">I", bytes.fromhex(address))
    raw = b"".join(struct.pack("=I", word) for (word,) in words)
    parsed = ipaddress.ip_address(raw)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return str(parsed), int(port, 16)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
