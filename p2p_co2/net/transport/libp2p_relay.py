"""Places at relays: how a peer that nobody can dial is met all the same.

A seed passes on streams to whoever holds a place there (libp2p's specification "Circuit Relay v2"). We ask
for our places ourselves, on a stream of that protocol: the daemon's own search begins with a quarter of a
minute's doubt about its reachability and then waits, with fewer than four relays to choose from, for three
minutes (measured), and two volunteers behind routers who start together would train alone for so long.

A place is good as long as the connection to the relay lives, so it is renewed every ``RENEW_S``. Streams
begin through the relay; where both routers allow it libp2p then punches holes, and later streams go directly.

Price: what passes through a relay costs the seed's line, twice; and ``CircuitLimit`` cuts a circuit off now
and then, which to a link is a loss like any other.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.net.transport.hivemind_quiet import P2P
from p2p_co2.net.transport.libp2p_control import hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p_daemon import multiaddr_of, start_p2p, stop_p2p
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.messages_pb2 import CircuitHop

HOP = "/libp2p/circuit/relay/0.2.0/hop"
RENEW_S = 60.0
PLACE_TIMEOUT_S = 8.0
MAX_PLACES = 3
ENOUGH_BYTES = 1 << 30
"""Relays that cut a circuit off sooner are of no use for payload; libp2p's default is 128 KiB."""
_RESERVE, _STATUS, _OK = 0, 2, 100
_MAX_ANSWER_BYTES = 8 << 10
_STARTS = 6


@dataclass(frozen=True)
class Place:
    """A place at a relay. ``maddr``: how others reach us through it; ``circuit_bytes``: after which the relay
    cuts a circuit off, 0 for never."""

    relay: PeerId
    maddr: str
    circuit_bytes: int


class Places:
    """Our places at the relays among ``seeds`` (multiaddrs that end in /p2p/ID). Call ``renew`` often."""

    def __init__(self, p2p: P2P, me: PeerId, seeds: Sequence[str]) -> None:
        self._p2p, self._me = p2p, me
        self._seeds = [seed for seed in seeds if not seed.endswith(f"/p2p/{me}")]
        self._renew_at = 0.0
        self.held: tuple[Place, ...] = ()
        self.trouble = ""
        """Why there is none, in words; empty while there is one, and before the first ``renew``."""

    async def renew(self) -> None:
        """Ask for places, or ask again, if it is time to; never raises for a relay's sake."""
        if time.monotonic() < self._renew_at or not self._seeds:
            return
        answers = await asyncio.gather(*(self._ask(seed) for seed in self._seeds[:MAX_PLACES]))
        self.held = tuple(answer for answer in answers if isinstance(answer, Place))
        causes = [answer for answer in answers if isinstance(answer, str)]
        self.trouble = "" if self.held else "; ".join(causes)
        # Without a place nobody reaches us: ask again soon.
        self._renew_at = time.monotonic() + (RENEW_S if self.held else RENEW_S / 6)

    def forget(self) -> None:
        """What we held is lost; ask again at the next ``renew``."""
        self.held, self._renew_at = (), 0.0

    async def _ask(self, seed: str) -> Place | str:
        address, _, relay = seed.rpartition("/p2p/")
        try:
            place = await ask_for_place(self._p2p, PeerId(relay), seed, self._me)
        except TransportError as error:
            return f"{address}: {error}"
        if 0 < place.circuit_bytes < ENOUGH_BYTES:
            return f"{address}: passes on only {place.circuit_bytes >> 10} KiB at a time"
        return place


async def ask_for_place(p2p: P2P, relay: PeerId, maddr: str, me: PeerId) -> Place:
    """A place at ``relay``, which ``maddr`` names. Raises ``TransportError``. Safe to cancel."""
    await reach(p2p, relay, [maddr], PLACE_TIMEOUT_S)
    reader, writer = await open_stream(p2p, relay, HOP, PLACE_TIMEOUT_S)
    try:
        async with asyncio.timeout(PLACE_TIMEOUT_S):
            question = CircuitHop(type=_RESERVE).SerializeToString()
            writer.write(bytes((len(question),)) + question)
            await writer.drain()
            answer = CircuitHop.FromString(await _read_answer(reader))
    except TimeoutError:
        raise TransportError(f"it did not answer within {PLACE_TIMEOUT_S:.0f} s") from None
    except (OSError, asyncio.IncompleteReadError):
        raise TransportError("it hung up when asked to relay") from None
    except DecodeError:
        raise TransportError("it answers nonsense when asked to relay") from None
    finally:
        await hang_up(writer)
    if answer.type != _STATUS or answer.status != _OK:
        raise TransportError(f"it does not relay for us (status {answer.status})")
    return Place(relay, f"{maddr}/p2p-circuit/p2p/{me}", answer.limit.data_bytes)


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """One message with its length before it as a varint. Raises ``TransportError`` for one that is too
    large."""
    length = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > _MAX_ANSWER_BYTES or shift > 21:
            raise TransportError("its answer is too large")
        if byte < 0x80:
            return await reader.readexactly(length)


async def start_relay(
    identity_path: Path, host: str, port: int, *, announce_host: str, public: bool, relay: bool = True,
    say: Callable[[str], None] = lambda words: None,
) -> P2P:  # fmt: skip
    """The daemon of a seed: ``start_p2p``, until its relay is the one with our limits; ``relay`` False: none.
    If it never is, the last daemon serves as it is, and ``say`` hears what that means.

    The daemon starts two relays that race for the same protocol, one of them with libp2p's default of 128 KiB
    per circuit. ``start_p2p`` sees to it that ours wins, and this one asks who did, from a daemon of our own
    that lives for the question only. A daemon that does not know that it is public (``public`` False)
    relays with the default until it finds out, and is taken as it is. Raises as ``start_p2p``.
    """
    for left in reversed(range(_STARTS)):
        p2p = await start_p2p(
            identity_path, host, port, announce_host=announce_host, public=public, relay=relay
        )
        try:
            if not (public and relay) or await _circuit_bytes(p2p, host, port) >= ENOUGH_BYTES:
                return p2p
        except BaseException:
            await stop_p2p(p2p)
            raise
        if not left:
            say(
                f"warning: in {_STARTS} starts the relay had libp2p's default of 128 KiB per circuit, "
                "so peers that nobody can dial will lose their links; start the seed again, or add another"
            )
            return p2p
        await stop_p2p(p2p)
    raise AssertionError("the last start returns")


async def _circuit_bytes(p2p: P2P, host: str, port: int) -> int:
    """What the relay of ``p2p`` passes on per circuit, asked by a stranger. Raises ``EnvironmentFault``."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    relay = PeerId(p2p.peer_id.to_base58())
    with tempfile.TemporaryDirectory(prefix="p2p-co2-relay-") as folder:
        identity = Identity.load_or_create(Path(folder) / "identity")
        stranger = await start_p2p(Path(folder) / "identity", "::1" if ":" in near else "127.0.0.1")
        try:
            maddr = f"{multiaddr_of(near, port)}/p2p/{relay}"
            return (await ask_for_place(stranger, relay, maddr, identity.peer_id)).circuit_bytes
        except TransportError as error:
            raise EnvironmentFault(f"the libp2p daemon does not relay: {error}") from None
        finally:
            await stop_p2p(stranger)
