"""Places at relays: how a peer that nobody can dial is met all the same.

A seed passes on streams to whoever holds a place there (libp2p's "Circuit Relay v2"). We ask for places
ourselves, on a stream of that protocol: the daemon's own search takes up to three minutes. A place lives as
long as the connection to the relay, so it is renewed. Price: what passes through a relay costs the seed's
line, twice. A circuit may be cut off, which to a link is a loss like any other.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import multiaddr_of
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.wire.identity import Identity, PeerId, parsed
from p2p_co2.wire.limits import MAX_RECORD_BYTES
from p2p_co2.wire.messages_pb2 import CircuitHop

HOP = "/libp2p/circuit/relay/0.2.0/hop"
MAX_PLACES = 3
ENOUGH_BYTES = 1 << 30
"""Relays that cut a circuit off sooner are of no use for payload; libp2p's default is 128 KiB."""
STARTS = 4
"""Of a seed's daemon, until its relay is of use: one in 25 was not, on a busy machine."""
_RESERVE = 0
_STATUS = 2
_OK = 100


class Places:
    """Our places at the relays among ``seeds`` (multiaddrs that end in /p2p/ID). Call ``renew`` often."""

    def __init__(self, p2p: P2P, me: PeerId, seeds: Sequence[str]) -> None:
        self._p2p = p2p
        self._me = me
        self._seeds = [seed for seed in seeds if not seed.endswith(f"/p2p/{me}")]
        self._renew_at = 0.0
        self.held: tuple[str, ...] = ()
        """Multiaddrs by which others reach us through them."""
        self.trouble = ""
        """Why there is none, in words; empty while there is one, and before the first ``renew``."""

    async def renew(self) -> None:
        """Ask for places, or ask again, if it is time to; never raises for a relay's sake."""
        if time.monotonic() < self._renew_at or not self._seeds:
            return
        held = list[str]()
        causes = list[str]()

        async def ask(seed: str) -> None:
            try:
                held.append(await ask_for_place(self._p2p, seed, self._me))
            except TransportError as error:
                causes.append(f"{seed.rpartition('/p2p/')[0]}: {error}")

        await asyncio.gather(*map(ask, self._seeds[:MAX_PLACES]))
        self.held = tuple(sorted(held))
        self.trouble = "" if held else "; ".join(causes)
        # Without a place nobody reaches us: ask again soon.
        self._renew_at = time.monotonic() + (MESSAGE_TIMEOUT_S if held else CONNECT_TIMEOUT_S)

    def forget(self) -> None:
        """What we held is lost; ask again at the next ``renew``."""
        self.held = ()
        self._renew_at = 0.0


async def ask_for_place(p2p: P2P, seed: str, me: PeerId) -> str:
    """A place at a relay: the multiaddr by which others reach us there. Raises ``TransportError``. Safe to
    cancel."""
    relay = PeerId(seed.rpartition("/p2p/")[2])
    await reach(p2p, relay, [seed], CONNECT_TIMEOUT_S)
    reader, writer, _ = await open_stream(p2p, relay, HOP, CONNECT_TIMEOUT_S)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            question = CircuitHop(type=_RESERVE).SerializeToString()
            writer.write(bytes((len(question),)) + question)
            await writer.drain()
            answer = await read_hop(reader)
    except TimeoutError:
        raise TransportError(f"it did not answer within {CONNECT_TIMEOUT_S:.0f} s") from None
    except (OSError, asyncio.IncompleteReadError):
        raise TransportError("it hung up when asked to relay") from None
    finally:
        await hang_up(writer)
    if answer.type != _STATUS or answer.status != _OK:
        raise TransportError(f"it does not relay for us (status {answer.status})")
    if 0 < answer.limit.data_bytes < ENOUGH_BYTES:
        raise TransportError(f"passes on only {answer.limit.data_bytes >> 10} KiB at a time")
    return f"{seed}/p2p-circuit/p2p/{me}"


async def start_relay(
    identity_path: Path, host: str, port: int, announce_host: str, upnp: bool = True
) -> P2P:
    """``start_p2p`` of a daemon that passes on payload. Of its two relays (see there) the small one wins now
    and then all the same. So it is asked for a place, but for the last start."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    for left in reversed(range(STARTS)):
        async with AsyncExitStack() as stack:
            p2p = await start_p2p(
                identity_path, host, port, announce_host=announce_host, public=True, upnp=upnp
            )
            stack.push_async_callback(stop_p2p, p2p)
            maddr = f"{multiaddr_of(near, port)}/p2p/{p2p.peer_id.to_base58()}"
            if not left or await _has_place(maddr, near):
                stack.pop_all()
                return p2p
    raise AssertionError("the last start returns")


async def _has_place(relay: str, host: str) -> bool:
    """Whether somebody else has one there: a daemon that lives for this question."""
    with tempfile.TemporaryDirectory(prefix="p2p-co2-relay-") as folder:
        path = Path(folder) / "identity"
        me = Identity.load_or_create(path).peer_id
        p2p = await start_p2p(path, host, upnp=False)
        try:
            await ask_for_place(p2p, relay, me)
        except TransportError:
            return False
        finally:
            await stop_p2p(p2p)
    return True


async def read_hop(reader: asyncio.StreamReader) -> CircuitHop:
    """One message with its length before it as a varint. Raises ``TransportError`` for nonsense."""
    (length,) = await reader.readexactly(1)
    if length >= 0x80:
        length += ((await reader.readexactly(1))[0] - 1) << 7
    if length > MAX_RECORD_BYTES:
        raise TransportError("its answer is too large")
    try:
        return parsed(CircuitHop, await reader.readexactly(length))
    except RemoteProtocolError:
        raise TransportError("it answers nonsense when asked to relay") from None
