"""Streams of one protocol over the daemon: served by one coroutine each, or asked questions on.

Frames are 4 bytes of length (big-endian), then the bytes. libp2p proves who is at the other end. A peer that
only asks has no link, nor a record in the DHT: ``AnswerServer`` answers on the asker's own stream.

Laws: sizes are checked before allocation, and every wait is bounded. A peer that opens too many streams, or
breaks a rule, is hung up on. No task is left after ``close``. Price: three to five times the CPU of gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from p2p_co2.errors import Offence, RemoteProtocolError, TransportError
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S, MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import Stream, daemon_call, hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P, StreamInfo
from p2p_co2.wire.identity import PeerId

HEADER_BYTES = 4
MAX_STREAMS = 64
MAX_STREAMS_PER_PEER = 2


class Asker(NamedTuple):
    """Who opened a stream, and the multiaddr at which it is seen."""

    peer: PeerId
    maddr: str


Serve = Callable[[Asker, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What is done with one stream. ``OSError``, ``TimeoutError`` and ``IncompleteReadError`` end it quietly: the
other end is gone, or has no more questions."""
Answer = Callable[[Asker, bytes], Awaitable[bytes]]
"""(who asks, question) to answer; raises ``RemoteProtocolError`` to hang up."""
OnRude = Callable[[PeerId, RemoteProtocolError], None]


def framed(data: bytes) -> bytes:
    """One frame, in one piece: a lone header would travel through the daemon as a packet of its own."""
    return len(data).to_bytes(HEADER_BYTES) + data


async def read_frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """One frame. Raises ``RemoteProtocolError`` before it allocates too much."""
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES))
    if not 0 < length <= most_bytes:
        raise RemoteProtocolError(Offence.WRONG_MESSAGE_SIZE, f"{length} bytes; at most {most_bytes}")
    return await reader.readexactly(length)


class ServedStreams:
    """Serves ``protocol`` over a started ``P2P``, which stays the caller's."""

    def __init__(self, p2p: P2P, protocol: str, serve: Serve, most_streams: int, most_per_peer: int) -> None:
        self._p2p = p2p
        self._protocol = protocol
        self._serve = serve
        self._most_streams = most_streams
        self._most_per_peer = most_per_peer
        self._tasks: dict[asyncio.Task[None], PeerId] = {}
        self._listening = False

    def __len__(self) -> int:
        """How many are being served."""
        return len(self._tasks)

    async def start(self) -> None:
        await self._p2p.add_binary_stream_handler(self._protocol, self._take)
        self._listening = True

    async def close(self) -> None:
        """Stop serving; no task is left. May be called twice."""
        listening = self._listening
        self._listening = False
        if listening:
            with suppress(TransportError):  # the daemon is gone, and its handlers with it
                async with daemon_call(CLOSE_TIMEOUT_S):
                    await self._p2p.remove_binary_stream_handler(self._protocol)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        asker = Asker(PeerId(info.peer_id.to_base58()), str(info.addr))
        task = asyncio.current_task()
        assert task is not None
        held = Counter(self._tasks.values())
        if held.total() >= self._most_streams or held[asker.peer] >= self._most_per_peer:
            await hang_up(writer)
            return
        self._tasks[task] = asker.peer
        try:
            await self._serve(asker, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            return  # the other end is gone, or has no more questions
        except asyncio.CancelledError:
            if self._listening:
                raise
            # `close` did it: just end, because asyncio's streams complain about a cancelled handler
        finally:
            del self._tasks[task]
            await hang_up(writer)


class AnswerServer(ServedStreams):
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
        super().__init__(p2p, protocol, self._answer_all, MAX_STREAMS, MAX_STREAMS_PER_PEER)
        self._answer = answer
        self._on_rude = on_rude
        self._most_bytes = most_question_bytes
        self._pause_s = pause_s

    async def _answer_all(
        self, asker: Asker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
        self._p2p = p2p
        self._protocol = protocol
        self._most_bytes = most_answer_bytes
        self._streams: dict[PeerId, Stream] = {}

    async def ask(self, peer: PeerId, maddrs: Sequence[str], question: bytes, timeout_s: float) -> bytes:
        """The answer of ``peer``; at most one question to it at a time. Raises ``TransportError``,
        ``RemoteProtocolError`` for an answer that is too long. Safe to cancel."""
        kept = self._streams.pop(peer, None)
        if kept is not None:
            with suppress(TransportError):  # restarted, or it hung up on us as idle: a new stream may do
                return await self._ask_on(kept, peer, question, timeout_s)
        await reach(self._p2p, peer, maddrs, timeout_s)
        stream = await open_stream(self._p2p, peer, self._protocol, timeout_s)
        return await self._ask_on(stream, peer, question, timeout_s)

    async def _ask_on(self, stream: Stream, peer: PeerId, question: bytes, timeout_s: float) -> bytes:
        is_kept = False
        try:
            async with asyncio.timeout(timeout_s):
                stream.writer.write(framed(question))
                await stream.writer.drain()
                answer = await read_frame(stream.reader, self._most_bytes)
            is_kept = self._streams.setdefault(peer, stream) is stream
        except TimeoutError:
            raise TransportError(f"did not answer within {timeout_s:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise TransportError("hung up") from None
        finally:
            if not is_kept:
                await hang_up(stream.writer)
        return answer

    async def close(self) -> None:
        """Hang up on everybody. May be called twice."""
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            await hang_up(stream.writer)
