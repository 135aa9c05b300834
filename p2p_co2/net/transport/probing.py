"""Asking a prober: the client's half of ``probe``.

Law: what comes back is checked before it is used (sizes, finite numbers, an address that is one); a prober
that lies about the address or the clock is one voice among several for whoever asks several.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.hivemind_quiet import P2P
from p2p_co2.net.transport.libp2p_control import Stream, hang_up, open_stream, reach
from p2p_co2.net.transport.probe import (
    BULK_S,
    FRAME_BYTES,
    MAX_ANSWER_BYTES,
    PROTOCOL,
    read_frame,
    send_bulk,
    take_bulk,
    write_frame,
)
from p2p_co2.net.transport.probe_limits import BUSY, address_of
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import DialBackProbe, LookProbe, Probe, ProbeAnswer

ANSWER_S = 8.0
"""Bound on one answer; a connection back takes the other end up to three bounds of its own."""
LEAST_MEASURED_S = 0.005


class ProberBusy(TransportError):
    """It measures with somebody else just now: asking again in a moment may do."""


@dataclass(frozen=True)
class Look:
    """``observed``: (address, port) at which the other end sees us, None if through a relay. ``offset_s``:
    its clock minus ours. ``round_trip_s``: of this very question."""

    observed: tuple[str, int] | None
    offset_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Passed:
    """What came through in one measurement, counted by the end that received it, without the first frame.
    ``ended_at``: by our monotonic clock."""

    size_bytes: int
    duration_s: float
    ended_at: float

    @property
    def began_at(self) -> float:
        return self.ended_at - self.duration_s

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.duration_s


class Prober:
    """An open stream to one prober; see ``open_prober``. Methods raise ``TransportError`` when it is gone or
    refuses (the reason in words), and are safe to cancel, after which the stream is of no use."""

    def __init__(self, peer: PeerId, run: bytes, stream: Stream) -> None:
        self.peer, self._run = peer, run
        self._reader, self._writer = stream

    async def look(self) -> Look:
        """How we look from there, what the clock there is, and how long it took to ask."""
        asked_at, asked_unix = time.monotonic(), time.time()
        answer = await self._ask(Probe(look=LookProbe()))
        round_trip_s = time.monotonic() - asked_at
        if not math.isfinite(answer.clock):
            raise TransportError("answers nonsense: its clock is no number")
        return Look(address_of(answer.observed), answer.clock - (asked_unix + round_trip_s / 2), round_trip_s)

    async def dial_back(self, port: int, expect: bytes, host: str = "") -> bool:
        """Whether it could connect to our own address, as it sees it, at ``port`` and read ``expect``
        there."""
        answer = await self._ask(Probe(dial_back=DialBackProbe(port=port, host=host, expect=expect)))
        return answer.reached

    async def download(self, size_bytes: int) -> Passed:
        """From there to here, up to ``size_bytes``; the last question of a stream. No faster than it went by
        our own clock from the question on: if we are busy, we read at once what came over a while."""
        asked_at, round_trip_s = await self._ask_for_bulk(Probe(send_bytes=size_bytes))
        with _gone(self.peer):
            taken, duration_s, _ = await take_bulk(self._reader, size_bytes)
        ended_at = time.monotonic()
        here_s = ended_at - asked_at - round_trip_s
        return _at_our_pace(_passed(taken, duration_s, ended_at), here_s, size_bytes)

    async def upload(self, size_bytes: int) -> Passed:
        """From here to there, up to ``size_bytes``; the last question of a stream. No faster than it went by
        our own clock: a prober that is busy reads at once what came over a while."""
        _, round_trip_s = await self._ask_for_bulk(Probe(take_bytes=size_bytes))
        began_at = time.monotonic()
        with _gone(self.peer):
            answering = asyncio.create_task(self._last_answer(), name="answer to an upload")
            try:
                with contextlib.suppress(OSError):  # also a timeout: it has seen enough
                    await send_bulk(self._writer, size_bytes)
                answer, answered_at = await answering
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
        here_s = answered_at - began_at - round_trip_s
        return _at_our_pace(_passed(answer.bytes, answer.duration_s, answered_at), here_s, size_bytes)

    async def _ask_for_bulk(self, probe: Probe) -> tuple[float, float]:
        """(when it was asked, round trip) by our monotonic clock. Of two round trips the shorter one: one end
        may be busy in either."""
        round_trip_s = (await self.look()).round_trip_s
        asked_at = time.monotonic()
        await self._ask(probe)
        return asked_at, min(round_trip_s, time.monotonic() - asked_at)

    async def _last_answer(self) -> tuple[ProbeAnswer, float]:
        answer = await self._read(2 * BULK_S + ANSWER_S)
        return answer, time.monotonic()

    async def close(self) -> None:
        await hang_up(self._writer)

    async def _ask(self, probe: Probe) -> ProbeAnswer:
        with _gone(self.peer):
            await write_frame(self._writer, self._question(probe))
            return await self._read()

    def _question(self, probe: Probe) -> bytes:
        probe.run = self._run
        return probe.SerializeToString()

    async def _read(self, bound_s: float = ANSWER_S) -> ProbeAnswer:
        answer = ProbeAnswer()
        async with asyncio.timeout(bound_s):
            data = await read_frame(self._reader, MAX_ANSWER_BYTES)
        try:
            answer.ParseFromString(data)
        except DecodeError:
            raise TransportError("answers nonsense: not a ProbeAnswer") from None
        if answer.refusal == BUSY:
            raise ProberBusy(f"refused: {BUSY}")
        if answer.refusal:
            raise TransportError(
                "refused: " + "".join(c if c.isprintable() else "?" for c in answer.refusal[:200])
            )
        return answer


@contextlib.asynccontextmanager
async def open_prober(
    p2p: P2P, peer: PeerId, maddrs: Sequence[str], run: bytes, timeout_s: float
) -> AsyncIterator[Prober]:
    """A stream to the prober of ``peer``. Raises ``TransportError``: unreachable, or it serves no probes."""
    await reach(p2p, peer, maddrs, timeout_s)
    prober = Prober(peer, run, await open_stream(p2p, peer, PROTOCOL, timeout_s))
    try:
        yield prober
    finally:
        await prober.close()


@contextlib.contextmanager
def _gone(peer: PeerId) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise TransportError(f"{peer} did not answer in time") from None
    except (OSError, asyncio.IncompleteReadError):
        raise TransportError(f"{peer} hung up") from None
    except RemoteProtocolError as error:
        raise TransportError(f"{peer} answers nonsense: {error}") from None


def _at_our_pace(passed: Passed, here_s: float, asked_bytes: int) -> Passed:
    """``passed``, but no faster than all of it, the first frame too, in ``here_s`` by our clock."""
    without_first = passed.size_bytes / (passed.size_bytes + min(FRAME_BYTES, asked_bytes))
    return Passed(passed.size_bytes, max(passed.duration_s, here_s * without_first), passed.ended_at)


def _passed(size_bytes: int, duration_s: float, ended_at: float) -> Passed:
    """Raises ``TransportError`` where too little came to tell a rate."""
    if not size_bytes or not math.isfinite(duration_s) or duration_s < 0:
        raise TransportError("too little came through to measure a rate")
    return Passed(size_bytes, max(duration_s, LEAST_MEASURED_S), ended_at)
