"""A peer's reports on the network: the answers to observers, questions for its own board, and the observer.

Laws: a report reads what has happened and changes nothing; an observer is no member, so it is neither listed,
counted nor dialled. Price: see ``reports``; without observers a deque and one event per link every ten
seconds; an observer is a libp2p daemon (30 MB).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from p2p_co2.config import PeerConfig
from p2p_co2.errors import P2PCo2Error, RemoteProtocolError, TransportError
from p2p_co2.net.transport.addresses import is_relayed
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import ways_to_peers
from p2p_co2.net.transport.libp2p.streams import AnswerServer, QuestionClient
from p2p_co2.node.links import LinkTraffic
from p2p_co2.node.network import Network
from p2p_co2.node.node import Node
from p2p_co2.node.shell import Shell
from p2p_co2.protocol.reports import MAX_REPORT_BYTES, MAX_REQUEST_BYTES, Poller, Responder
from p2p_co2.telemetry.events import Event, LinkMeasured
from p2p_co2.telemetry.feed import Feed, FeedState, News
from p2p_co2.ticket import Ticket
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId, parsed
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import ReportRequest, RunPosition

PROTOCOL = f"/p2p-co2/{PROTOCOL_VERSION}/report"
FIND_S = 5.0
"""Between two looks for peers, and before a lost network is opened again."""
MAX_AT_ONCE = 32
"""Questions in flight."""


class ReportService:
    """All calls on the network's loop, but for ``see``, which may come from any thread."""

    def __init__(
        self, network: Network, loop: asyncio.AbstractEventLoop, refuse: Callable[[str, str, str], None]
    ) -> None:
        self._network = network
        self._loop = loop
        process = int.from_bytes(os.urandom(8)) >> 1
        self._responder = Responder(network.identity, network.run.digest(), process)
        pause_s = CONNECT_TIMEOUT_S / 100  # after each answer on a stream: even a refusal is signed
        self._answering = AnswerServer(
            network.p2p, PROTOCOL, lambda asker, question: self._answer(asker.peer, question),
            lambda asker, error: refuse(asker, error.reason, error.detail),
            lambda _: MAX_REQUEST_BYTES, pause_s,
        )  # fmt: skip
        self._asking = QuestionClient(network.p2p, PROTOCOL, MAX_REPORT_BYTES)
        self._measuring: list[asyncio.Task[None]] = []

    def see(self, event: Event) -> None:
        """An event of this peer."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._responder.see, event)

    async def start(self, node: Node) -> None:
        """Answer from now on, and measure the links of ``node``."""
        node.commits.on_decision = self._responder.remember
        await self._answering.start()
        self.measure(node)

    def measure(self, shell: Shell) -> None:
        """Measure the links of ``shell`` from now on."""
        self._measuring.append(asyncio.create_task(self._measure(shell), name="measure links"))

    async def say_last_words(self) -> None:
        """Let observers that are here fetch the newest events, for three heartbeats at most."""
        ends_at = time.monotonic() + 3 * HEARTBEAT_S
        while self._measuring and time.monotonic() < ends_at:
            if self._responder.told_everybody(time.monotonic()):
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Neither answer nor ask any more. May be called twice."""
        for measuring in self._measuring:
            measuring.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)
        self._measuring.clear()
        await self._answering.close()
        await self._asking.close()

    async def _measure(self, shell: Shell) -> None:
        """Every link every ten heartbeats; with more links than that a heartbeat for each."""
        seen = dict[str, LinkTraffic]()
        nothing = LinkTraffic()
        while True:
            await asyncio.sleep(HEARTBEAT_S * max(10, len(shell.membership.live)))
            live = shell.membership.live
            if not live:
                continue
            links = shell.links
            ways: dict[str, list[str]] = {}
            with contextlib.suppress(TransportError):  # without a daemon nothing is relayed
                ways = await ways_to_peers(self._network.p2p, CONNECT_TIMEOUT_S)
            for peer, carrier in links.carriers_used().items():
                if (info := live.get(PeerId(peer))) is None:
                    continue
                now = replace(links.traffic.get(PeerId(peer), nothing))
                before = seen.get(peer, nothing)
                busy_s = now.bulk_s - before.bulk_s
                seen[peer] = now
                shell.report(
                    LinkMeasured, other=peer, carrier=carrier, sent_bytes=now.bulk_bytes,
                    relayed=carrier == "libp2p" and peer in ways and all(map(is_relayed, ways[peer])),
                    round_trip_s=info.round_trip_s if info.round_trips_s else 0.0,
                    bytes_per_s=(now.bulk_bytes - before.bulk_bytes) / busy_s if busy_s > 0 else 0.0,
                )  # fmt: skip

    async def ask(self, peer: PeerId, question: bytes) -> bytes:
        """A peer's sealed report, this one's own included. Raises ``TransportError``,
        ``RemoteProtocolError``."""
        if peer == self._network.identity.peer_id:
            return self._responder.answer(question, peer, time.monotonic(), time.time())
        return await _ask(self._network, self._asking, peer, question)

    async def _answer(self, asker: PeerId, question: bytes) -> bytes:
        self._network.door.members.check(asker, parsed(ReportRequest, question).badge, looks=True)
        return self._responder.answer(question, asker, time.monotonic(), time.time())


class Observer(Feed):
    """A ``Feed`` over the network of the run that ``ticket`` invites to. ``folder`` keeps the observer's
    identity. Starts at once and connects by itself, again and again; raises ``TicketError`` only."""

    def __init__(self, ticket: str, folder: Path) -> None:
        self._ticket = Ticket.parse(ticket)
        self._config = PeerConfig(folder=folder, upnp=False, relay=False)
        self._lock = threading.Lock()
        self._poller = Poller(self._ticket.run)
        self.place = f"run {self._ticket.run.hex()[:12]}, seen from outside"
        self.state = FeedState("connecting", "looking for a seed of the run")
        import uvloop  # which Windows has not

        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="p2p-co2 observer", daemon=True)
        self._working = self._loop.create_task(self._keep_observing(), name="observe")
        self._thread.start()

    def take(self) -> News:
        with self._lock:
            return self._poller.take()

    def invitation(self) -> str:
        return str(self._ticket.open_part)

    def close(self) -> None:
        """Leave the DHT; no thread, process or socket is left. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._working.cancel)
            self._thread.join(CONNECT_TIMEOUT_S)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(asyncio.wait({self._working}))
            if not self._working.cancelled() and (error := self._working.exception()) is not None:
                self.state = FeedState("lost", f"the observer has stopped by a fault of its own: {error!r}")
                raise error
        finally:
            for task in (rest := asyncio.all_tasks(self._loop)):  # hivemind's, of calls that were broken off
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _keep_observing(self) -> None:
        while True:
            try:
                # A forged record in the DHT is refused there, and no business of an observer.
                network = await Network.open(self._ticket, self._config, lambda *_: None)
                try:
                    self.run = network.run
                    await self._observe(network)
                finally:
                    await network.close()
            except P2PCo2Error as error:
                self.state = FeedState("lost", str(error))
            await asyncio.sleep(FIND_S)

    async def _observe(self, network: Network) -> None:
        """Find peers and ask them until the daemon is gone; ``TransportError`` then."""
        self.state = FeedState("connected", "no peer is listed yet")
        asking = QuestionClient(network.p2p, PROTOCOL, MAX_REPORT_BYTES)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._find(network), name="find peers")
                tasks.create_task(self._ask_all(network, asking, tasks), name="ask peers")
                tasks.create_task(_until_daemon_ends(network), name="watch the daemon")
        except BaseExceptionGroup as group:
            if group.split(TransportError)[1] is not None:
                raise
            raise group.exceptions[0] from None
        finally:
            await asking.close()

    async def _find(self, network: Network) -> None:
        failed_since: float | None = None
        last: RunPosition | None = None  # where the run was when its peers last said so
        while True:
            try:
                records = await network.find_peers()
                with self._lock:
                    peers = [PeerId(record.peer) for record in records if not record.visits]
                    self._poller.listed(peers, time.monotonic())
                if not self._poller.counted("answering"):
                    await network.rebootstrap()  # nobody trains, or nobody is there: only a seed can tell
                    last = await network.run_position()
                failed_since = None
                self.state = self._found(len(peers), last)
            except TransportError as error:
                failed_since = failed_since or time.monotonic()
                self.state = FeedState("lost", str(error))
                if time.monotonic() - failed_since > 6 * FIND_S:
                    await network.rebootstrap()
            await asyncio.sleep(FIND_S if len(self._poller) else 1.0)

    def _found(self, listed: int, last: RunPosition | None) -> FeedState:
        with self._lock:
            answering = self._poller.counted("answering")
            new = self._poller.counted("new")
        if answering:
            return FeedState("connected", f"{answering} of {max(listed, answering)} peers answer")
        return nobody_answers(listed, new, last, self.run.clock.rounds if self.run is not None else 0)

    async def _ask_all(self, network: Network, asking: QuestionClient, tasks: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(MAX_AT_ONCE)
        while True:
            with self._lock:
                due = self._poller.due(time.monotonic())
            for peer, question in due:
                tasks.create_task(self._ask(network, asking, room, peer, question), name=f"ask {peer[-6:]}")
            await asyncio.sleep(0.1)

    async def _ask(
        self, network: Network, asking: QuestionClient, room: asyncio.Semaphore, peer: PeerId, question: bytes
    ) -> None:
        answer = b""
        reason = "not asked: the observer stopped"
        try:
            async with room:
                answer = await _ask(network, asking, peer, question)
                reason = ""
        except (TransportError, RemoteProtocolError) as error:
            reason = str(error)
        finally:
            with self._lock:
                if reason:
                    self._poller.failed(peer, reason, time.monotonic())
                else:
                    self._poller.answered(peer, answer, time.monotonic(), time.time())


async def _ask(network: Network, asking: QuestionClient, peer: PeerId, question: bytes) -> bytes:
    """Raises ``TransportError``, ``RemoteProtocolError``."""
    await network.find_record(peer)
    question += ReportRequest(badge=network.door.members.badge).SerializeToString()  # protobuf merges them
    return await asking.ask(peer, network.records.maddrs_of(peer), question, CONNECT_TIMEOUT_S)


def nobody_answers(listed: int, new: int, last: RunPosition | None, rounds: int) -> FeedState:
    """Of a run whose ``listed`` peers do not answer, ``new`` of them not yet: ``last`` is where it was when
    they last said so, ``rounds`` its end, unless that was amended. Those that left are listed for a while."""
    rounds = (last.rounds if last is not None else 0) or rounds
    if last is not None and last.position >= rounds > 0:
        return FeedState("connected" if new else "ended", f"the run ended at round {rounds}", rounds, rounds)
    words = "nobody trains now"
    if last is not None:
        words = f"all left at round {last.position:.1f}; the run goes on when one with a checkpoint is back"
    seen = f"0 of {listed} peers answer" if listed else f"the seed answers, but no peer is listed: {words}"
    return FeedState("connected", seen, last.position if last is not None else 0.0, rounds)


async def _until_daemon_ends(network: Network) -> None:
    words = await network.daemon_ended()
    raise TransportError(f"the libp2p daemon of the observer has ended ({words}); starting another")
