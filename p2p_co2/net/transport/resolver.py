"""Looking up host names that other peers told us.

The system's resolver cannot be stopped: a name whose servers never answer holds a thread for half a minute,
and names are free to announce. So lookups run on threads of their own, not on those that the rest of the
program shares, and at most so many at once; who comes when all are taken is told so. Law: no name of a
stranger delays anything but the attempt to reach that stranger, nor the end of the process.

Price: while strangers hold all places, hosts that are known by a name cannot be dialled directly (addresses
that are numbers need no place, and libp2p finds its own way).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from p2p_co2.errors import TransportError

MAX_LOOKUPS = 8


class Resolver:
    """At most ``most`` names at once. ``resolve`` blocks and gives a name's addresses, or raises
    ``OSError``."""

    def __init__(self, most: int = MAX_LOOKUPS, resolve: Callable[[str], list[str]] | None = None) -> None:
        self._places = threading.BoundedSemaphore(most)
        self._resolve = resolve or _resolve

    async def addresses_of(self, host: str, timeout_s: float) -> list[str]:
        """The addresses of ``host``, itself if it is one already. Safe to cancel.

        Raises ``TransportError``: the name does not exist, nobody answers for it in time, or too many names
        are being looked up.
        """
        with suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        if not self._places.acquire(blocking=False):
            raise TransportError(f"{host[:64]}: too many names are being looked up; addresses need none")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str] | None] = loop.create_future()
        threading.Thread(target=self._look_up, args=(host, loop, answer), daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                found = await answer
        except TimeoutError:
            raise TransportError(f"{host[:64]}: its name servers do not answer") from None
        if not found:
            raise TransportError(f"{host[:64]}: no such name")
        return found

    def _look_up(
        self, host: str, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[list[str] | None]
    ) -> None:
        found: list[str] | None = None
        try:
            with suppress(OSError, UnicodeError):
                found = self._resolve(host)
        finally:
            self._places.release()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(_give, answer, found)


def _give(answer: asyncio.Future[list[str] | None], found: list[str] | None) -> None:
    if not answer.done():
        answer.set_result(found)


def _resolve(host: str) -> list[str]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
