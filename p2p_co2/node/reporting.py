"""A peer's reports on the network: answers observers, and asks other peers for its own board.

Law: it reads what has happened and changes nothing; an observer is no member, so it is neither counted nor
dialled. Price: see ``reports``; without observers it costs a deque and one event per link every ten seconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from p2p_co2.errors import RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import is_relayed
from p2p_co2.net.transport.libp2p.control import ways_to_peers
from p2p_co2.net.transport.libp2p.streams import AnswerServer, Asker, QuestionClient
from p2p_co2.node.links import LinkTraffic
from p2p_co2.node.network import Network
from p2p_co2.node.node import Node
from p2p_co2.protocol.reports import Responder
from p2p_co2.protocol.reports.reader import MAX_REPORT_BYTES
from p2p_co2.protocol.reports.responder import MAX_REQUEST_BYTES
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.telemetry.events import Event, LinkMeasured

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/report"
ASK_TIMEOUT_S = 10.0
ANSWER_PAUSE_S = ASK_TIMEOUT_S / 100
"""After each answer on a stream: even a refusal is signed."""
MEASURE_EVERY_S = 10.0
"""Between two measurements of each link; with more links than seconds, a second per link."""
LAST_WORDS_S = 3.0
"""A peer that leaves waits at most this long for observers to fetch its last events."""


class ReportService:
    """All calls on the network's loop, but for ``see``, which may come from any thread."""

    def __init__(
        self, network: Network, loop: asyncio.AbstractEventLoop, refuse: Callable[[str, str, str], None]
    ) -> None:
        self._network, self._loop, self._refuse = network, loop, refuse
        self._me = network.identity.peer_id
        process = int.from_bytes(os.urandom(8)) >> 1
        self._responder = Responder(network.identity, network.run.digest(), process)
        self._answering = AnswerServer(
            network.p2p,
            PROTOCOL,
            self._answer_asker,
            self._on_rude,
            lambda _: MAX_REQUEST_BYTES,
            ANSWER_PAUSE_S,
        )
        self._asking = QuestionClient(network.p2p, PROTOCOL, MAX_REPORT_BYTES)
        self._measuring: asyncio.Task[None] | None = None

    def see(self, event: Event) -> None:
        """An event of this peer."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._responder.see, event)

    async def start(self, node: Node) -> None:
        """Answer from now on, and measure the links of ``node``."""
        node.commits.on_decision = self._responder.remember
        await self._answering.start()
        self._measuring = asyncio.create_task(self._measure(node), name="measure links")

    async def say_last_words(self) -> None:
        """Let observers that are here fetch the newest events, at most ``LAST_WORDS_S``."""
        ends_at = time.monotonic() + LAST_WORDS_S
        while self._measuring is not None and time.monotonic() < ends_at:
            if self._responder.told_everybody(time.monotonic()):
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Neither answer nor ask any more. May be called twice."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)
            self._measuring = None
        await self._answering.close()
        await self._asking.close()

    async def _measure(self, node: Node) -> None:
        seen: dict[PeerId, LinkTraffic] = {}
        while True:
            await asyncio.sleep(max(MEASURE_EVERY_S, float(node.live_peers())))
            if not node.live_peers():
                continue
            relayed = await self._relayed()
            for peer, carrier in node.links.carriers_used().items():
                info = node.membership.live.get(PeerId(peer))
                if info is None:
                    continue
                now = node.links.traffic.get(PeerId(peer), LinkTraffic())
                before = seen.get(PeerId(peer), LinkTraffic())
                busy_s = now.bulk_s - before.bulk_s
                seen[PeerId(peer)] = LinkTraffic(now.bulk_bytes, now.bulk_s)
                node.report(
                    LinkMeasured, other=peer, carrier=carrier, sent_bytes=now.bulk_bytes,
                    relayed=carrier == "libp2p" and peer in relayed,
                    round_trip_s=info.round_trip_s if info.round_trips_s else 0.0,
                    bytes_per_s=(now.bulk_bytes - before.bulk_bytes) / busy_s if busy_s > 0 else 0.0,
                )  # fmt: skip

    async def _relayed(self) -> set[str]:
        """Peers that the daemon reaches only through a third machine."""
        try:
            ways = await ways_to_peers(self._network.p2p, ASK_TIMEOUT_S)
        except TransportError:
            return set()  # without a daemon nothing is relayed
        return {peer for peer, known in ways.items() if all(map(is_relayed, known))}

    async def ask(self, peer: PeerId, question: bytes) -> bytes:
        """A peer's sealed report, this one's own included. Raises ``TransportError``,
        ``RemoteProtocolError``."""
        if peer == self._me:
            return self._answer(peer, question)
        record = await self._network.find_record(peer)
        maddrs = list(record.maddrs) if record is not None else []
        return await self._asking.ask(peer, maddrs, question, ASK_TIMEOUT_S)

    async def _answer_asker(self, asker: Asker, question: bytes) -> bytes:
        return self._answer(asker.peer, question)

    def _answer(self, asker: PeerId, question: bytes) -> bytes:
        return self._responder.answer(question, asker, time.monotonic(), time.time())

    def _on_rude(self, asker: PeerId, error: RemoteProtocolError) -> None:
        self._refuse(asker, error.reason, error.detail)
