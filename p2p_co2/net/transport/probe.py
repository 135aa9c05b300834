"""How the way between two machines is, asked and answered on a libp2p stream; and what the clocks there say.

Seeds and peers serve it (``ProbeServer``), ``doctor`` asks (``open_prober``), and who joins compares clocks.
Four questions (``Probe`` in the schema): how do I look from there and what is your clock; connect to my own
address; send me bytes; take bytes. Bulk ends with an empty frame. Rates are measured by the end that
receives, because what the sender's kernel holds has not arrived.

There is no signed hello as on a link: it needs clocks that agree, and a wrong clock is one of the things to
find out. libp2p proves both identities, the run's digest shows a ticket. Laws: a connection back goes to the
address at which the asker is seen and to no other; what anybody gets is bounded (``ProbeLimits``); sizes
before allocation, every wait bounded, and what comes back is checked before it is used. Price: a stream
through the Go daemon measures at most some 100 MB/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import Resolver, address_of, network_of
from p2p_co2.net.transport.libp2p.control import Stream, hang_up, open_stream, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P, StreamInfo
from p2p_co2.net.transport.libp2p.streams import ServedStreams, framed, read_frame
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import DialBackProbe, LookProbe, Probe, ProbeAnswer

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/probe"
GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first (multistream-select): proof that one answers at an address."""
MAX_QUESTION_BYTES, MAX_ANSWER_BYTES = 512, 2048
FRAME_BYTES = 16 << 10
MAX_STREAMS, MAX_STREAMS_PER_PEER = 16, 2
MAX_LOOKUPS = 2
"""Names of askers that are looked up at once."""
BULK_S = DIAL_S = 3.0
"""A measurement ends after this, however little has passed; and a bound on a connection back."""
QUESTION_S = 20.0
"""A stream without a question for this long is hung up on."""
ANSWER_S = 8.0
"""Bound on one answer; a connection back takes the other end up to two of ``DIAL_S``."""
CLOCK_OK_S, CLOCK_CANNOT_S = 5.0, 45.0
"""Records in the DHT live for 60 s of everybody's clock: who is further off finds nobody."""
LEAST_MEASURED_S = 0.005
MAX_BULK_BYTES = 4 << 20
"""Of one measurement in one direction."""
WINDOW_S = 60.0
MOST = {"dials": (8, 60), "bytes": (24 << 20, 96 << 20), "seconds": (20, 60)}
"""What one network, and all together, may use in ``WINDOW_S``: the one place for measurements in seconds."""
MAX_ADDRESSES = 1024
MAX_EXPECT_BYTES, MAX_HOST_CHARACTERS = 32, 253
BUSY = "measuring with somebody else; try again in a moment"


class ProbeLimits:
    """What one may ask of a prober, so that probes can neither load it nor be turned against somebody else.

    A refusal is a ``RemoteProtocolError`` with its reason in words. At most ``MAX_ADDRESSES`` networks are
    remembered. Price: behind one shared router many askers share its allowance.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[str, dict[str, deque[tuple[float, float]]]] = OrderedDict()
        """By network, "" for all of them: what was used, and when."""
        self.bulk_running = False
        self._measuring = "", 0.0
        """Whose measurement runs (or ran last), and since when."""

    def dial(self, address: str, now: float) -> None:
        """Count a connection back to ``address``."""
        self._take(network_of(address), {"dials": 1}, now, "asked to connect back too often")

    def bulk(self, address: str, size_bytes: int, now: float) -> None:
        """Count a measurement of ``size_bytes`` and take the one place for it until ``end_bulk``."""
        if not 0 < size_bytes <= MAX_BULK_BYTES:
            raise RemoteProtocolError("too large", f"{size_bytes} bytes; at most {MAX_BULK_BYTES}")
        if self.bulk_running:
            raise RemoteProtocolError("busy", BUSY)
        who = network_of(address)
        self._take(who, {"bytes": size_bytes, "seconds": 0.0}, now, "asked to measure too often")
        self.bulk_running, self._measuring = True, (who, now)

    def end_bulk(self, now: float) -> None:
        """The measurement is over, however it ended."""
        who, began_at = self._measuring
        for one in (who, ""):
            self._of(one, "seconds", now).append((now, now - began_at))
        self.bulk_running = False

    def _take(self, who: str, wanted: Mapping[str, float], now: float, trouble: str) -> None:
        for kind, amount in wanted.items():
            for one, most in zip((who, ""), MOST[kind], strict=True):
                used = sum(spent for _, spent in self._of(one, kind, now))
                if used + amount > most or used >= most:
                    raise RemoteProtocolError("busy", f"{trouble}; try again in a minute")
        for kind, amount in wanted.items():
            for one in (who, ""):
                self._of(one, kind, now).append((now, amount))

    def _of(self, who: str, kind: str, now: float) -> deque[tuple[float, float]]:
        """What ``who`` used of late."""
        kinds = self._used.setdefault(who, {name: deque() for name in MOST})
        self._used.move_to_end(who)
        while len(self._used) > MAX_ADDRESSES:
            self._used.popitem(last=False)
        while kinds[kind] and kinds[kind][0][0] <= now - WINDOW_S:
            kinds[kind].popleft()
        return kinds[kind]


def check_dial_back(port: int, expect: bytes, host: str, observed: str) -> str:
    """The address that a connection back may go to. Raises ``RemoteProtocolError``."""
    place = address_of(observed)
    if place is None:
        trouble = "seen through a relay only, so there is no address to connect to"
        raise RemoteProtocolError("relayed", trouble)
    if not 0 < port < 65536 or not 0 < len(expect) <= MAX_EXPECT_BYTES or len(host) > MAX_HOST_CHARACTERS:
        raise RemoteProtocolError("wrong question", "port, host or expected bytes out of bounds")
    return place[0]


class ProbeServer:
    """Answers probes over a started ``P2P``, which stays the caller's. ``run``: its digest (32 bytes).
    ``upload_bytes_per_s``: cap on what is sent in a measurement, 0 for none. ``clock``: unix seconds."""

    def __init__(
        self, p2p: P2P, run: bytes, upload_bytes_per_s: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._run, self._cap, self._clock = run, upload_bytes_per_s, clock
        self._limits, self._resolver = ProbeLimits(), Resolver(MAX_LOOKUPS)
        streams = ServedStreams(p2p, PROTOCOL, self._serve, MAX_STREAMS, MAX_STREAMS_PER_PEER)
        self.start, self.close = streams.start, streams.close

    async def _serve(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(RemoteProtocolError):  # it broke a rule: that ends the stream
            while True:
                async with asyncio.timeout(QUESTION_S):
                    question = await read_frame(reader, MAX_QUESTION_BYTES)
                await self._answer(_parsed(question), str(info.addr), reader, writer)

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
            await _write(writer, answer.SerializeToString())
            if is_measuring and what == "send_bytes":
                await _send_bulk(writer, size, self._cap)
            elif is_measuring:
                answer.bytes, answer.duration_s, ended = await _take_bulk(reader, size)
                await _write(writer, answer.SerializeToString())
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
            trouble = f"{probe.host!r} is not {address}, where it is seen from here"
            raise RemoteProtocolError("other host", trouble)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(DIAL_S):
                reader, writer = await asyncio.open_connection(address, probe.port, limit=1 << 10)
                return await reader.readexactly(len(probe.expect)) == probe.expect
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False  # nobody, or somebody else, answers there
        finally:
            if writer is not None:
                await hang_up(writer)

    async def _addresses_of(self, host: str) -> list[str]:
        """The addresses of a name; empty if it has none."""
        try:
            return await self._resolver.addresses_of(host, DIAL_S)
        except TransportError:
            return []


# ---- bulk


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one frame and wait until there is room for the next."""
    writer.write(framed(data))
    async with asyncio.timeout(QUESTION_S):
        await writer.drain()


async def _send_bulk(writer: asyncio.StreamWriter, size_bytes: int, cap_bytes_per_s: float = 0.0) -> None:
    """Send up to ``size_bytes`` in frames for about ``BULK_S``, then an empty frame. Raises ``TimeoutError``
    if the other end does not take them."""
    block = os.urandom(FRAME_BYTES)
    began_at, sent = time.monotonic(), 0
    async with asyncio.timeout(2 * BULK_S):
        while sent < size_bytes and time.monotonic() - began_at < BULK_S:
            await _write(writer, block[: size_bytes - sent])
            sent += min(FRAME_BYTES, size_bytes - sent)
            if cap_bytes_per_s:
                await asyncio.sleep(max(0.0, began_at + sent / cap_bytes_per_s - time.monotonic()))
        await _write(writer, b"")


async def _take_bulk(reader: asyncio.StreamReader, most_bytes: int) -> tuple[int, float, bool]:
    """(bytes after the first frame, seconds from the first frame to the last, whether the end came) of what
    ``_send_bulk`` sent. After ``BULK_S`` enough has been seen, and what is under way is left unread.

    Raises ``RemoteProtocolError`` for more than was announced, ``TimeoutError`` if nothing comes.
    """
    async with asyncio.timeout(DIAL_S + BULK_S):
        first_bytes = taken = len(await read_frame(reader, FRAME_BYTES, 0))
    first_at = last_at = time.monotonic()
    if not taken:
        return 0, 0.0, True
    try:
        async with asyncio.timeout(BULK_S):
            while frame := await read_frame(reader, FRAME_BYTES, 0):
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


# ---- asking


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
            taken, duration_s, _ = await _take_bulk(self._reader, size_bytes)
        ended_at = time.monotonic()
        return _passed(taken, duration_s, ended_at, ended_at - asked_at - round_trip_s, size_bytes)

    async def upload(self, size_bytes: int) -> Passed:
        """From here to there, up to ``size_bytes``; the last question of a stream. No faster than it went by
        our own clock: a prober that is busy reads at once what came over a while."""
        _, round_trip_s = await self._ask_for_bulk(Probe(take_bytes=size_bytes))
        began_at = time.monotonic()
        with _gone(self.peer):
            answering = asyncio.create_task(self._last_answer(), name="answer to an upload")
            try:
                with contextlib.suppress(OSError):  # also a timeout: it has seen enough
                    await _send_bulk(self._writer, size_bytes)
                answer, answered_at = await answering
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
        here_s = answered_at - began_at - round_trip_s
        return _passed(answer.bytes, answer.duration_s, answered_at, here_s, size_bytes)

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
        probe.run = self._run
        with _gone(self.peer):
            await _write(self._writer, probe.SerializeToString())
            return await self._read()

    async def _read(self, bound_s: float = ANSWER_S) -> ProbeAnswer:
        answer = ProbeAnswer()
        async with asyncio.timeout(bound_s):
            data = await read_frame(self._reader, MAX_ANSWER_BYTES, 0)
        try:
            answer.ParseFromString(data)
        except DecodeError:
            raise TransportError("answers nonsense: not a ProbeAnswer") from None
        if answer.refusal:
            words = "".join(c if c.isprintable() else "?" for c in answer.refusal[:200])
            raise (ProberBusy if answer.refusal == BUSY else TransportError)(f"refused: {words}")
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


def _passed(taken: int, duration_s: float, ended_at: float, here_s: float, asked_bytes: int) -> Passed:
    """What the receiving end counted, but no faster than all of it, the first frame too, went in ``here_s``
    by our clock. Raises ``TransportError`` where too little came to tell a rate."""
    if not taken or not math.isfinite(duration_s) or duration_s < 0:
        raise TransportError("too little came through to measure a rate")
    without_first = taken / (taken + min(FRAME_BYTES, asked_bytes))
    return Passed(taken, max(duration_s, LEAST_MEASURED_S, here_s * without_first), ended_at)


# ---- clocks


class ClockJudged(NamedTuple):
    """``measured`` and ``advice`` in words; the second is empty if all is well."""

    state: Literal["ok", "limited", "cannot", "unknown"]
    measured: str
    advice: str = ""


def judge_clock(offsets_s: Sequence[float]) -> ClockJudged:
    """Whether this machine's clock is near enough to the others': ``offsets_s`` are theirs minus ours.

    The median counts, so one liar among three moves nothing. Where they disagree nobody knows who is right,
    and nobody is refused.
    """
    if not offsets_s:
        advice = f"from {CLOCK_CANNOT_S:.0f} s off on the others do not hear this peer; look at it: date -u"
        return ClockJudged("unknown", "nobody answered what time it is", advice)
    middle = statistics.median(offsets_s)
    others = f"{len(offsets_s)} other{'s' * (len(offsets_s) > 1)}"
    words = f"{-middle:+.2f} s against {others}"
    near = sum(abs(offset - middle) <= CLOCK_OK_S for offset in offsets_s)
    if 2 * near <= len(offsets_s):
        spread = max(offsets_s) - min(offsets_s)
        advice = "somebody's clock is wrong; look at this machine's: date -u"
        return ClockJudged("unknown", f"{others} differ by {spread:.0f} s", advice)
    fix = "set it by the network: timedatectl set-ntp true"
    if abs(middle) > CLOCK_CANNOT_S:
        return ClockJudged("cannot", words, f"the others do not list or hear this peer; {fix}")
    if abs(middle) > CLOCK_OK_S:
        advice = f"from {CLOCK_CANNOT_S:.0f} s on the others do not hear this peer; {fix}"
        return ClockJudged("limited", words, advice)
    return ClockJudged("ok", words)


async def clock_offsets_s(p2p: P2P, run: bytes, contacts: Mapping[PeerId, Sequence[str]]) -> list[float]:
    """The clocks of those ``contacts`` (addresses by peer) that answer, minus ours; asked side by side."""

    async def ask(peer: PeerId, maddrs: Sequence[str]) -> float | None:
        try:
            async with asyncio.timeout(ANSWER_S), open_prober(p2p, peer, maddrs, run, ANSWER_S) as prober:
                return (await prober.look()).offset_s
        except (TransportError, TimeoutError):
            return None  # it is away, or serves no probes

    answers = await asyncio.gather(*(ask(peer, maddrs) for peer, maddrs in contacts.items()))
    return [answer for answer in answers if answer is not None]
