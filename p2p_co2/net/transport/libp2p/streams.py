"""Streams of one protocol over the daemon: served by one coroutine each, or asked questions on.

Frames are 4 bytes of length (big-endian), then the bytes. libp2p proves who is at the other end. A link goes
one way, so an answer needs a link back, and a record in the DHT with it: right for members, wrong for
somebody that only looks. ``AnswerServer`` answers on the asker's own stream.

Laws: sizes are checked before allocation; every wait is bounded; whoever opens too many streams, or breaks a
rule, is hung up on; no task is left after ``close``. Price: three to five times the CPU of gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S, MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import Stream, daemon_errors, hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P, StreamInfo
from p2p_co2.protocol.wire.identity import PeerId

HEADER_BYTES = 4
MAX_STREAMS, MAX_STREAMS_PER_PEER = 64, 2

Serve = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What is done with one stream. ``OSError``, ``TimeoutError`` and ``IncompleteReadError`` end it quietly: the
other end is gone, or has no more questions."""


class Asker(NamedTuple):
    """Who asks, and the multiaddr at which it is seen."""

    peer: PeerId
    maddr: str


Answer = Callable[[Asker, bytes], Awaitable[bytes]]
"""(who asks, question) to answer; raises ``RemoteProtocolError`` to hang up."""
OnRude = Callable[[PeerId, RemoteProtocolError], None]


def framed(data: bytes) -> bytes:
    """One frame, in one piece: a lone header would travel through the daemon as a packet of its own."""
    return len(data).to_bytes(HEADER_BYTES) + data


async def read_frame(reader: asyncio.StreamReader, most_bytes: int, least_bytes: int = 1) -> bytes:
    """One frame. Raises ``RemoteProtocolError`` before it allocates too much."""
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES))
    if not least_bytes <= length <= most_bytes:
        raise RemoteProtocolError("wrong message size", f"{length} bytes; at most {most_bytes}")
    return await reader.readexactly(length)


class ServedStreams:
    """Serves ``protocol`` over a started ``P2P``, which stays the caller's."""

    def __init__(self, p2p: P2P, protocol: str, serve: Serve, most_streams: int, most_per_peer: int) -> None:
        self._p2p, self._protocol, self._serve = p2p, protocol, serve
        self._most_streams, self._most_per_peer = most_streams, most_per_peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._of: Counter[PeerId] = Counter()
        self._listening = False

    def __len__(self) -> int:
        """How many are being served."""
        return len(self._tasks)

    async def start(self) -> None:
        await self._p2p.add_binary_stream_handler(self._protocol, self._take)
        self._listening = True

    async def close(self) -> None:
        """Stop serving; no task is left. May be called twice."""
        listening, self._listening = self._listening, False
        if listening:
            try:
                with daemon_errors("the daemon hangs"):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._p2p.remove_binary_stream_handler(self._protocol)
            except TransportError:
                self._listening = False  # the daemon is gone, and its handlers with it
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer, task = PeerId(info.peer_id.to_base58()), asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= self._most_streams or self._of[peer] >= self._most_per_peer:
            await hang_up(writer)
            return
        self._tasks.add(task)
        self._of[peer] += 1
        try:
            await self._serve(info, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            return  # the other end is gone, or has no more questions
        except asyncio.CancelledError:
            if self._listening:
                raise
            # `close` did it: just end, because asyncio's streams complain about a cancelled handler
        finally:
            self._tasks.discard(task)
            self._of[peer] -= 1
            if not self._of[peer]:
                del self._of[peer]
            await hang_up(writer)


class AnswerServer:
    """Answers questions of one ``protocol``; ``on_rude`` hears of those that break its rules.
    ``most_question_bytes`` is asked before each question, ``pause_s`` passes after each answer."""

    def __init__(
        self,
        p2p: P2P,
        protocol: str,
        answer: Answer,
        on_rude: OnRude,
        most_question_bytes: Callable[[Asker], int],
        pause_s: float = 0.0,
    ) -> None:
        self._answer, self._on_rude = answer, on_rude
        self._most_bytes, self._pause_s = most_question_bytes, pause_s
        self._streams = ServedStreams(p2p, protocol, self._serve, MAX_STREAMS, MAX_STREAMS_PER_PEER)
        self.start, self.close = self._streams.start, self._streams.close

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        asker = Asker(PeerId(info.peer_id.to_base58()), str(info.addr))
        try:
            while True:
                async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                    question = await read_frame(reader, self._most_bytes(asker))
                answer = await self._answer(asker, question)
                async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                    writer.write(framed(answer))
                    await writer.drain()
                await asyncio.sleep(self._pause_s)
        except RemoteProtocolError as error:
            self._on_rude(asker.peer, error)


class QuestionClient:
    """Asks peers over one ``protocol``; keeps a stream to each that answers. End it with ``close``."""

    def __init__(self, p2p: P2P, protocol: str, most_answer_bytes: int) -> None:
        self._p2p, self._protocol, self._most_bytes = p2p, protocol, most_answer_bytes
        self._streams: dict[PeerId, Stream] = {}

    async def ask(self, peer: PeerId, maddrs: Sequence[str], question: bytes, timeout_s: float) -> bytes:
        """The answer of ``peer``; at most one question to it at a time. Raises ``TransportError``,
        ``RemoteProtocolError`` for an answer that is too long. Safe to cancel."""
        kept = self._streams.pop(peer, None)
        if kept is not None:
            try:
                return await self._ask_on(kept, peer, question, timeout_s)
            except TransportError:
                kept = None  # it was restarted, or hung up on us as idle: a new stream may do
        await reach(self._p2p, peer, maddrs, timeout_s)
        stream = await open_stream(self._p2p, peer, self._protocol, timeout_s)
        return await self._ask_on(stream, peer, question, timeout_s)

    async def _ask_on(self, stream: Stream, peer: PeerId, question: bytes, timeout_s: float) -> bytes:
        reader, writer, _ = stream
        is_kept = False
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(framed(question))
                await writer.drain()
                answer = await read_frame(reader, self._most_bytes)
            is_kept = self._streams.setdefault(peer, stream) is stream
        except TimeoutError:
            raise TransportError(f"did not answer within {timeout_s:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise TransportError("hung up") from None
        finally:
            if not is_kept:
                await hang_up(writer)
        return answer

    async def close(self) -> None:
        """Hang up on everybody. May be called twice."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            await hang_up(stream.writer)
