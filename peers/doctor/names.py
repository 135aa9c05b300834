"""Route and names: what has to be there before anybody can be asked.

Law: each look-up is bounded in time. Price: that a default route exists does not say that it leads anywhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from peers.doctor.findings import Finding, State

NAMES_S = 4.0


def check_route(tables: Sequence[Path] = (Path("/proc/net/route"), Path("/proc/net/ipv6_route"))) -> Finding:
    """Whether there is a default route."""
    devices = []
    for table in tables:
        try:
            rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
        except OSError:
            continue  # no IPv6 here
        devices += [row[0] for row in rows if len(row) == 11 and row[1] == row[7] == "00000000"]
        devices += [
            row[-1]
            for row in rows
            if len(row) == 10 and row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo"
        ]
    if devices:
        return Finding("route", State.OK, f"default route by {', '.join(sorted(set(devices)))}")
    advice = "connect this machine to a network; without that only peers on this machine are reached"
    return Finding("route", State.LIMITED, "no default route", advice)


async def check_names(
    seeds: Sequence[str],
    announce_host: str,
    resolve: Callable[[str], Awaitable[object]] | None = None,
) -> Finding:
    """Whether the names of seeds, and our own, can be looked up."""
    names = {maddr.split("/")[2] for maddr in seeds if maddr.split("/")[1].startswith("dns")}
    if announce_host and not _is_address(announce_host):
        names.add(announce_host)
    if not names:
        return Finding("names (dns)", State.OK, "none to look up: the ticket's seeds are numbers")
    lost = []
    for name in sorted(names):
        try:
            async with asyncio.timeout(NAMES_S):
                await (resolve or _resolve)(name)
        except (OSError, TimeoutError, UnicodeError):
            lost.append(name)
    if not lost:
        return Finding("names (dns)", State.OK, f"{', '.join(sorted(names))} found")
    words = f"{', '.join(lost)} not found"
    if announce_host in lost:
        return Finding(
            "names (dns)",
            State.CANNOT,
            words,
            "others cannot dial a name that does not exist: correct --announce-host",
        )
    advice = "check the name server (/etc/resolv.conf), or ask the organiser for a ticket with addresses"
    return Finding("names (dns)", State.CANNOT if len(lost) == len(seeds) else State.LIMITED, words, advice)


async def _resolve(name: str) -> object:
    return await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False
