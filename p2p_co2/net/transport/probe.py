"""How the way between two machines is, asked and answered on a libp2p stream; and what the clocks there say.

Seeds and peers serve it (``ProbeServer``), ``doctor`` asks (``open_prober``), and who joins compares clocks.
Four questions (``Probe`` in the schema): how do I look from there, and what is your clock? Connect to my own
address. Send me bytes. Take these. A rate is a lower bound: what many bytes took longer than few.

There is no signed hello, which needs clocks that agree. libp2p proves both identities, the run's digest shows
a ticket. Laws: a connection back goes to the address at which the asker is seen and to no other; what anybody
gets is bounded (``Allowances``). Price: a stream through the Go daemon measures at most some 100 MB/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from p2p_co2.errors import Offence, RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import address_of, network_of
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import hang_up, reach
from p2p_co2.net.transport.libp2p.hivemind import P2P
from p2p_co2.net.transport.libp2p.streams import AnswerServer, Asker, QuestionClient
from p2p_co2.wire.identity import PeerId, parsed
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import DialBackProbe, LookProbe, Probe, ProbeAnswer

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/probe"
GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first (multistream-select): proof that one answers at an address."""
MAX_BULK_BYTES = 1 << 20
"""Of a question or an answer."""
MAX_FRAME_BYTES = 2048
"""What is beside its bulk."""
MOST_BYTES = 24 << 20
"""What one network may use in ``MESSAGE_TIMEOUT_S``."""
MOST_BYTES_IN_ALL = 96 << 20
"""What all networks together may use in that time."""
DIAL_BYTES = 3 << 20
"""What a connection back counts."""
CLOCK_OK_S = 5.0
CLOCK_CANNOT_S = 45.0
"""Records in the DHT live for 60 s of everybody's clock: a peer that is further off finds nobody."""


class Allowances:
    """What networks may ask of a prober, so that probes can neither load it nor be turned against somebody
    else: so many bytes a minute. Price: behind one shared router many share one."""

    def __init__(self) -> None:
        self._used = Counter[str]()
        self._ends_at = 0.0

    def left_bytes(self, network: str, now: float) -> float:
        """What ``network`` may use now."""
        if now >= self._ends_at:
            self._used.clear()
            self._ends_at = now + MESSAGE_TIMEOUT_S
        return min(MOST_BYTES - self._used[network], MOST_BYTES_IN_ALL - self._used.total())

    def take(self, network: str, size_bytes: int, now: float) -> None:
        """Count it, and a frame for the question. Raises ``RemoteProtocolError`` where too little is left."""
        if size_bytes > self.left_bytes(network, now):
            raise RemoteProtocolError("busy", "asked too often; try again in a minute")
        self._used[network] += size_bytes + MAX_FRAME_BYTES


def check_dial_back(port: int, expect: bytes, observed: str) -> str:
    """The address that a connection back may go to. Raises ``RemoteProtocolError``."""
    place = address_of(observed)
    if place is None:
        detail = "seen through a relay only, so there is no address to connect to"
        raise RemoteProtocolError("relayed", detail)
    if not 0 < port < 65536 or not 0 < len(expect) <= 32:
        raise RemoteProtocolError("wrong question", "port or expected bytes out of bounds")
    return place[0]


class ProbeServer:
    """Answers probes over a started ``P2P``, which stays the caller's. ``run``: its digest (32 bytes).
    ``upload_bytes_per_s``: cap on what is sent in all measurements together, 0 for none. ``clock``: unix
    seconds."""

    def __init__(
        self, p2p: P2P, run: bytes, upload_bytes_per_s: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._run = run
        self._cap = upload_bytes_per_s
        self._clock = clock
        self._allowances = Allowances()
        self._free_at = 0.0
        server = AnswerServer(p2p, PROTOCOL, self._answer, lambda peer, error: None, self._most_bytes)
        self.start = server.start
        self.close = server.close

    def _most_bytes(self, asker: Asker) -> int:
        left_bytes = self._allowances.left_bytes(_network(asker), time.monotonic())
        return MAX_FRAME_BYTES + max(0, min(MAX_BULK_BYTES, int(left_bytes)))

    async def _answer(self, asker: Asker, question: bytes) -> bytes:
        probe = parsed(Probe, question)
        answer = ProbeAnswer(observed=asker.maddr[:256], clock=self._clock())
        try:
            await self._fill_in(answer, probe, asker)
        except RemoteProtocolError as error:
            answer.refusal = error.detail
        return answer.SerializeToString()

    async def _fill_in(self, answer: ProbeAnswer, probe: Probe, asker: Asker) -> None:
        """Do what is asked. Raises ``RemoteProtocolError`` with the reason in words."""
        is_dial = probe.HasField("dial_back")
        if probe.run != self._run:
            raise RemoteProtocolError("other run", "this is another run")
        if probe.WhichOneof("what") is None:
            raise RemoteProtocolError("unknown question", "this version does not know the question")
        if probe.send_bytes > MAX_BULK_BYTES:
            raise RemoteProtocolError(
                Offence.TOO_LARGE, f"{probe.send_bytes} bytes; at most {MAX_BULK_BYTES}"
            )
        used_bytes = len(probe.bulk) + probe.send_bytes + DIAL_BYTES * is_dial
        self._allowances.take(_network(asker), used_bytes, time.monotonic())
        if is_dial:
            answer.reached = await self._dial_back(probe.dial_back, asker.maddr)
        elif probe.send_bytes:
            await self._pass_cap(probe.send_bytes)
            answer.bulk = os.urandom(probe.send_bytes)

    async def _pass_cap(self, size_bytes: int) -> None:
        """Return when so much may be sent, one answer after the other. Raises ``RemoteProtocolError`` if the
        asker would be gone by then."""
        now = time.monotonic()
        free_at = max(now, self._free_at) + (size_bytes / self._cap if self._cap else 0.0)
        if free_at - now > CONNECT_TIMEOUT_S:
            raise RemoteProtocolError("busy", "its upload is taken, or too little for so much")
        self._free_at = free_at
        await asyncio.sleep(free_at - now)

    async def _dial_back(self, probe: DialBackProbe, observed: str) -> bool:
        """Connect to the address at which the asker is seen, read as many bytes as it foretold, compare."""
        address = check_dial_back(probe.port, probe.expect, observed)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S / 2):  # the asker waits for longer
                reader, writer = await asyncio.open_connection(address, probe.port, limit=1 << 10)
                return await reader.readexactly(len(probe.expect)) == probe.expect
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False  # nobody, or somebody else, answers there
        finally:
            if writer is not None:
                await hang_up(writer)


def read_answer(data: bytes) -> ProbeAnswer:
    """Raises ``TransportError``, for a refusal too."""
    try:
        answer = parsed(ProbeAnswer, data)
    except RemoteProtocolError as error:
        raise TransportError(f"answers nonsense: {error}") from None
    if answer.refusal:
        words = "".join(c if c.isprintable() else "?" for c in answer.refusal[:200])
        raise TransportError(f"refused: {words}")
    return answer


def _network(asker: Asker) -> str:
    """All that come by relays share one allowance."""
    place = address_of(asker.maddr)
    return network_of(place[0] if place is not None else "0.0.0.0")


# ---- asking


class Look(NamedTuple):
    """``observed``: (address, port) at which the other end sees us, None if through a relay. ``offset_s``:
    its clock minus ours. ``round_trip_s``: of this very question."""

    observed: tuple[str, int] | None
    offset_s: float
    round_trip_s: float


class Passed(NamedTuple):
    """What came through in one measurement. ``ended_at``: by our monotonic clock."""

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
    """Asks one prober; see ``open_prober``. Methods raise ``TransportError`` when it is gone or refuses (the
    reason in words), and are safe to cancel. The first question opens the stream, which takes longer."""

    def __init__(self, client: QuestionClient, peer: PeerId, maddrs: Sequence[str], run: bytes) -> None:
        self._client = client
        self._peer = peer
        self._maddrs = maddrs
        self._run = run

    async def look(self) -> Look:
        """How we look from there, what the clock there is, and how long it took to ask."""
        asked_at = time.monotonic()
        asked_unix = time.time()
        answer = await self.ask(Probe(look=LookProbe()))
        round_trip_s = time.monotonic() - asked_at
        if not math.isfinite(answer.clock):
            raise TransportError("answers nonsense: its clock is no number")
        return Look(address_of(answer.observed), answer.clock - (asked_unix + round_trip_s / 2), round_trip_s)

    async def dial_back(self, port: int, expect: bytes) -> bool:
        """Whether it could connect to our own address, as it sees it, at ``port`` and read ``expect``
        there."""
        answer = await self.ask(Probe(dial_back=DialBackProbe(port=port, expect=expect)))
        return answer.reached

    async def download(self, size_bytes: int) -> Passed:
        """From there to here, up to ``MAX_BULK_BYTES``."""
        return await self._measured(Probe(send_bytes=size_bytes), size_bytes)

    async def upload(self, size_bytes: int) -> Passed:
        """From here to there, up to ``MAX_BULK_BYTES``."""
        return await self._measured(Probe(bulk=os.urandom(size_bytes)), size_bytes)

    async def _measured(self, probe: Probe, size_bytes: int) -> Passed:
        """How much longer than a short question it took; no less than half of it all."""
        round_trip_s = (await self.look()).round_trip_s
        asked_at = time.monotonic()
        answer = await self.ask(probe)
        ended_at = time.monotonic()
        if len(answer.bulk) != probe.send_bytes:
            raise TransportError(f"answers nonsense: {len(answer.bulk)} bytes of {probe.send_bytes}")
        took_s = ended_at - asked_at
        return Passed(size_bytes, max(took_s - round_trip_s, took_s / 2), ended_at)

    async def ask(self, probe: Probe) -> ProbeAnswer:
        """The answer to any question."""
        probe.run = self._run
        question = probe.SerializeToString()
        try:
            data = await self._client.ask(self._peer, self._maddrs, question, CONNECT_TIMEOUT_S)
        except RemoteProtocolError as error:
            raise TransportError(f"answers nonsense: {error}") from None
        return read_answer(data)


@contextlib.asynccontextmanager
async def open_prober(
    p2p: P2P, peer: PeerId, maddrs: Sequence[str], run: bytes, timeout_s: float
) -> AsyncIterator[Prober]:
    """A prober of ``peer``, reached. Raises ``TransportError`` if it cannot be."""
    await reach(p2p, peer, maddrs, timeout_s)
    client = QuestionClient(p2p, PROTOCOL, MAX_FRAME_BYTES + MAX_BULK_BYTES)
    try:
        yield Prober(client, peer, maddrs, run)
    finally:
        await client.close()


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
    from_there = f"from {CLOCK_CANNOT_S:.0f} s"
    if not offsets_s:
        advice = f"{from_there} off on the others do not hear this peer; look at it: date -u"
        return ClockJudged("unknown", "nobody answered what time it is", advice)
    middle = statistics.median(offsets_s)
    others = f"{len(offsets_s)} other{'s' * (len(offsets_s) > 1)}"
    if 2 * sum(abs(offset - middle) <= CLOCK_OK_S for offset in offsets_s) <= len(offsets_s):
        measured = f"{others} differ by {max(offsets_s) - min(offsets_s):.0f} s"
        return ClockJudged("unknown", measured, "somebody's clock is wrong; look at this machine's: date -u")
    measured = f"{-middle:+.2f} s against {others}"
    fix = "set it by the network: timedatectl set-ntp true"
    if abs(middle) > CLOCK_CANNOT_S:
        return ClockJudged("cannot", measured, f"the others do not list or hear this peer; {fix}")
    if abs(middle) > CLOCK_OK_S:
        advice = f"{from_there} on the others do not hear this peer; {fix}"
        return ClockJudged("limited", measured, advice)
    return ClockJudged("ok", measured)


async def clock_offsets_s(p2p: P2P, run: bytes, contacts: Mapping[PeerId, Sequence[str]]) -> list[float]:
    """The clocks of those ``contacts`` (addresses by peer) that answer soon, minus ours. All are asked at
    once."""
    offsets_s = list[float]()

    async def ask(peer: PeerId, maddrs: Sequence[str]) -> None:
        with contextlib.suppress(TransportError, TimeoutError):  # it is away, or serves no probes
            async with asyncio.timeout(CONNECT_TIMEOUT_S / 2):
                async with open_prober(p2p, peer, maddrs, run, CONNECT_TIMEOUT_S / 2) as prober:
                    offsets_s.append((await prober.look()).offset_s)

    await asyncio.gather(*(ask(peer, maddrs) for peer, maddrs in contacts.items()))
    return offsets_s
