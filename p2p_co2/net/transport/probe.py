"""How the way between two machines is, asked and answered on a libp2p stream: seeds and peers serve it,
``doctor`` asks.

Four questions (``Probe`` in the schema): how do I look from there and what is your clock; connect to my own
address; send me bytes; take bytes. Frames: 4 bytes of length (big-endian), then the bytes; bulk ends with an
empty frame. Rates are measured by the end that receives, because what the sender's kernel holds has not
arrived.

There is no signed hello as on a link: it needs clocks that agree, and a wrong clock is one of the things to
find out. libp2p proves both identities, the run's digest shows a ticket, and ``probe_limits`` bounds what
anybody gets. Laws: sizes before allocation, every wait bounded, nothing of the run is told. Price: a stream
through the Go daemon measures at most some 100 MB/s.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.hivemind_quiet import P2P, StreamInfo
from p2p_co2.net.transport.libp2p_control import hang_up
from p2p_co2.net.transport.probe_limits import ProbeLimits, address_of, check_dial_back
from p2p_co2.net.transport.resolver import Resolver
from p2p_co2.net.transport.serving import ServedStreams
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import DialBackProbe, Probe, ProbeAnswer

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/probe"
GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first (multistream-select): proof that one answers at an address."""
HEADER_BYTES = 4
MAX_QUESTION_BYTES, MAX_ANSWER_BYTES = 512, 2048
FRAME_BYTES = 16 << 10
MAX_STREAMS, MAX_STREAMS_PER_PEER = 16, 2
QUESTION_S = 20.0
"""A stream without a question for this long is hung up on."""
MAX_LOOKUPS = 2
"""Names of askers that are looked up at once."""
DIAL_S = 3.0
"""Bound on looking a name up, and on a connection back."""
BULK_S = 3.0
"""A measurement ends after this, however little has passed."""


class ProbeServer:
    """Answers probes over a started ``P2P``, which stays the caller's. ``run``: its digest (32 bytes).
    ``upload_bytes_per_s``: cap on what is sent in a measurement, 0 for none. ``clock``: unix seconds."""

    def __init__(
        self, p2p: P2P, run: bytes, upload_bytes_per_s: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._run, self._cap, self._clock = run, upload_bytes_per_s, clock
        self._limits, self._resolver = ProbeLimits(), Resolver(MAX_LOOKUPS)
        self._streams = ServedStreams(p2p, PROTOCOL, self._serve, MAX_STREAMS, MAX_STREAMS_PER_PEER)

    async def start(self) -> None:
        await self._streams.start()

    async def close(self) -> None:
        """Stop serving; no task is left. May be called twice."""
        await self._streams.close()

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                async with asyncio.timeout(QUESTION_S):
                    question = await read_frame(reader, MAX_QUESTION_BYTES)
                await self._answer(_parsed(question), str(info.addr), reader, writer)
        except RemoteProtocolError:
            pass  # it broke a rule: that ends the stream

    async def _answer(
        self, probe: Probe, observed: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answer = ProbeAnswer(observed=observed[:256], clock=self._clock())
        what = probe.WhichOneof("what")
        size = probe.send_bytes if what == "send_bytes" else probe.take_bytes
        place = address_of(observed)
        address = place[0] if place is not None else "0.0.0.0"  # all that come by relays share one allowance
        is_measuring = False
        try:
            if probe.run != self._run:
                raise RemoteProtocolError("other run", "this is another run")
            if what == "dial_back":
                answer.reached = await self._dial_back(probe.dial_back, observed)
            elif what in {"send_bytes", "take_bytes"}:
                self._limits.bulk(address, size, time.monotonic())
                is_measuring = True
            elif what is None:
                raise RemoteProtocolError("unknown question", "this version does not know the question")
        except RemoteProtocolError as error:
            answer.refusal = error.detail
        try:
            await write_frame(writer, answer.SerializeToString())
            if is_measuring and what == "send_bytes":
                await send_bulk(writer, size, self._cap)
            elif is_measuring:
                answer.bytes, answer.duration_s, ended = await take_bulk(reader, size)
                await write_frame(writer, answer.SerializeToString())
                if not ended:
                    raise RemoteProtocolError("too slow")  # what is still on its way is not read
        finally:
            if is_measuring:
                self._limits.end_bulk(time.monotonic())

    async def _dial_back(self, probe: DialBackProbe, observed: str) -> bool:
        """Connect to the address at which the asker is seen, read as many bytes as it foretold, compare."""
        address = check_dial_back(probe.port, probe.expect, probe.host, observed)
        self._limits.dial(address, time.monotonic())
        if probe.host and address not in await self._addresses_of(probe.host):
            raise RemoteProtocolError(
                "other host", f"{probe.host!r} is not {address}, where it is seen from here"
            )
        try:
            async with asyncio.timeout(DIAL_S):
                reader, writer = await asyncio.open_connection(address, probe.port, limit=1 << 10)
        except (OSError, TimeoutError):
            return False
        try:
            async with asyncio.timeout(DIAL_S):
                return await reader.readexactly(len(probe.expect)) == probe.expect
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False  # somebody else answers there
        finally:
            await hang_up(writer)

    async def _addresses_of(self, host: str) -> list[str]:
        """The addresses of a name; empty if it has none."""
        try:
            return await self._resolver.addresses_of(host, DIAL_S)
        except TransportError:
            return []


async def read_frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """One frame, empty at the end of bulk. Raises ``RemoteProtocolError`` before it allocates too much."""
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES))
    if length > most_bytes:
        raise RemoteProtocolError("wrong message size", f"{length} bytes; at most {most_bytes}")
    return await reader.readexactly(length)


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one frame and wait until there is room for the next."""
    writer.write(len(data).to_bytes(HEADER_BYTES) + data)
    async with asyncio.timeout(QUESTION_S):
        await writer.drain()


async def send_bulk(writer: asyncio.StreamWriter, size_bytes: int, cap_bytes_per_s: float = 0.0) -> None:
    """Send up to ``size_bytes`` in frames for about ``BULK_S``, then an empty frame. Raises ``TimeoutError``
    if the other end does not take them."""
    block = os.urandom(FRAME_BYTES)
    began_at, sent = time.monotonic(), 0
    async with asyncio.timeout(2 * BULK_S):
        while sent < size_bytes and time.monotonic() - began_at < BULK_S:
            await write_frame(writer, block[: size_bytes - sent])
            sent += min(FRAME_BYTES, size_bytes - sent)
            if cap_bytes_per_s:
                await asyncio.sleep(max(0.0, began_at + sent / cap_bytes_per_s - time.monotonic()))
        await write_frame(writer, b"")


async def take_bulk(reader: asyncio.StreamReader, most_bytes: int) -> tuple[int, float, bool]:
    """(bytes after the first frame, seconds from the first frame to the last, whether the end came) of what
    ``send_bulk`` sent. After ``BULK_S`` enough has been seen, and what is still under way is left unread.

    Raises ``RemoteProtocolError`` for more than was announced, ``TimeoutError`` if nothing comes.
    """
    async with asyncio.timeout(DIAL_S + BULK_S):
        first_bytes = taken = len(await read_frame(reader, FRAME_BYTES))
    first_at = last_at = time.monotonic()
    if not taken:
        return 0, 0.0, True
    try:
        async with asyncio.timeout(BULK_S):
            while frame := await read_frame(reader, FRAME_BYTES):
                last_at = time.monotonic()
                taken += len(frame)
                if taken > most_bytes:
                    raise RemoteProtocolError("too large", f"more than the {most_bytes} bytes announced")
    except TimeoutError:
        return taken - first_bytes, BULK_S, False
    return taken - first_bytes, last_at - first_at, True


def _parsed(question: bytes) -> Probe:
    probe = Probe()
    try:
        probe.ParseFromString(question)
    except DecodeError:
        raise RemoteProtocolError("unreadable", "not a Probe") from None
    return probe
