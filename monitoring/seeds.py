"""Whether the machines that an invitation names can be dialled: a TCP connection to each, and nothing sent.

Only while somebody looks at the board's page of the run. ``None``: it was not tried, because the address is
of another kind (a relay, QUIC). Law: at most as many connections as a ticket has addresses, and no answer is
read, so nothing that a machine says is believed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from monitoring.facts import SILENT_AFTER_S
from p2p_co2.ticket import Ticket


@dataclass(frozen=True)
class SeedFacts:
    """``peer``: its id; ``place``: host and port in words; ``answers``: whether it takes a connection."""

    peer: str
    place: str
    answers: bool | None


async def ask_seeds(ticket: Ticket, within_s: float = SILENT_AFTER_S) -> list[SeedFacts]:
    """The machines that ``ticket`` names, in its order, each asked at the same time."""
    return list(await asyncio.gather(*(_ask(seed, within_s) for seed in ticket.seeds)))


async def _ask(seed: str, within_s: float) -> SeedFacts:
    address, _, peer = seed.rpartition("/p2p/")
    kind, host, *rest = address.strip("/").split("/")
    if kind not in {"ip4", "ip6", "dns", "dns4", "dns6"} or len(rest) != 2 or rest[0] != "tcp":
        return SeedFacts(peer, address, None)
    place = f"{host}, port {rest[1]}"
    answers = False
    with suppress(OSError, TimeoutError, ValueError, OverflowError):  # not there, or no port
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, int(rest[1]))
        answers = True
        writer.close()
        with suppress(OSError):  # the other end was faster
            await writer.wait_closed()
    return SeedFacts(peer, place, answers)
