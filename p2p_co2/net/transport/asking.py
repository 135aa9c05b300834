"""Questions and answers over libp2p streams, beside the carriers: the asker needs no address of its own.

A carrier's link goes one way, so an answer needs a link back, and with it a record in the DHT: right for
members, wrong for somebody who only looks. Here the answer comes on the asker's own stream, which relays and
hole punching carry like any other. Frames: 4 bytes of length (big-endian), then the bytes; a stream serves
any number of questions, one after the other. libp2p proves who asks and who answers.

Laws: sizes are checked before allocation; every wait is bounded; a stream that breaks a rule is hung up on.
Price: all bytes pass the Go daemon, three to five times the CPU of gRPC: for kilobytes, not for payloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.hivemind_quiet import P2P, StreamInfo
from p2p_co2.net.transport.libp2p_control import Stream, hang_up, open_stream, reach
from p2p_co2.net.transport.serving import ServedStreams
from p2p_co2.protocol.wire.identity import PeerId

HEADER_BYTES = 4
IDLE_S = 60.0
"""A stream without a question for this long is hung up on."""
QUESTION_EVERY_S = 0.1
"""A stream's questions are read no faster: even a refusal is signed."""
MAX_STREAMS = 64
MAX_STREAMS_PER_PEER = 2

Answer = Callable[[PeerId, bytes], bytes]
"""(who asks, question) to answer; raises ``RemoteProtocolError`` to hang up."""
OnRude = Callable[[PeerId, RemoteProtocolError], None]


class Answering:
    """Serves ``protocol`` over a started ``P2P``, which stays the caller's."""

    def __init__(
        self, p2p: P2P, protocol: str, answer: Answer, on_rude: OnRude, most_question_bytes: int
    ) -> None:
        self._answer, self._on_rude, self._most_bytes = answer, on_rude, most_question_bytes
        self._streams = ServedStreams(p2p, protocol, self._serve, MAX_STREAMS, MAX_STREAMS_PER_PEER)

    async def start(self) -> None:
        await self._streams.start()

    async def close(self) -> None:
        """Stop serving; no task is left. May be called twice."""
        await self._streams.close()

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        asker = PeerId(info.peer_id.to_base58())
        try:
            await self._converse(asker, reader, writer)
        except RemoteProtocolError as error:
            self._on_rude(asker, error)

    async def _converse(
        self, asker: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                question = await _read(reader, self._most_bytes)
            answer = self._answer(asker, question)
            async with asyncio.timeout(IDLE_S):
                writer.write(len(answer).to_bytes(HEADER_BYTES) + answer)
                await writer.drain()
            await asyncio.sleep(QUESTION_EVERY_S)


class Asking:
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
        reader, writer = stream
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(len(question).to_bytes(HEADER_BYTES) + question)
                await writer.drain()
                answer = await _read(reader, self._most_bytes)
            answered = True
        except TimeoutError:
            raise TransportError(f"did not answer within {timeout_s:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise TransportError("hung up") from None
        finally:
            if answered and peer not in self._streams:
                self._streams[peer] = stream
            else:
                await hang_up(writer)
        return answer

    async def forget(self, peer: PeerId) -> None:
        """Hang up on a peer that will not be asked again soon."""
        kept = self._streams.pop(peer, None)
        if kept is not None:
            await hang_up(kept[1])

    async def close(self) -> None:
        """Hang up on everybody. May be called twice."""
        for peer in list(self._streams):
            await self.forget(peer)


async def _read(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES))
    if not 0 < length <= most_bytes:
        raise RemoteProtocolError("wrong message size", f"{length} bytes; at most {most_bytes}")
    return await reader.readexactly(length)
