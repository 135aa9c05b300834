"""The network thread: one asyncio loop that owns the network and the node, and what crosses to it.

Law: the training thread reads only what ``NodeView`` publishes whole and never waits on a call into the loop,
except to open, to start and to close. Closing leaves no thread, process, socket or file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar, cast

import uvloop

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError, RemoteProtocolError, TransportError
from p2p_co2.node.catchup import fetch_buffers
from p2p_co2.node.environment import Environment
from p2p_co2.node.network import Held, Network
from p2p_co2.node.node import Node
from p2p_co2.node.peer_finder import PositionWriter
from p2p_co2.node.pipeline_node import PipelineNode, Result
from p2p_co2.node.reporting import ReportService
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.catchup.donor import EXPORT_SLOWEST_BYTES_PER_S, LOADS_S
from p2p_co2.protocol.catchup.goals import BUFFERS, Goal
from p2p_co2.protocol.pipeline import Key, Place, Sizes, Work
from p2p_co2.protocol.rounds import Offer, PayloadShape
from p2p_co2.system.extras import missing
from p2p_co2.system.process import LOST, program
from p2p_co2.system.socket_activation import SocketActivation
from p2p_co2.telemetry import events as ev
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.model_summary import ModelBuffers
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Relayed, RunPosition, Status
from p2p_co2.wire.model_table import ModelSummary
from p2p_co2.wire.schedule import LOADS_QUIET_S, Stage

CLOSE_BOUND_S = 6.0
MAX_BUFFER_DONORS = 3
"""A newcomer asks so many for their buffers."""
_T = TypeVar("_T")


def cause_of_end(task: asyncio.Task[None]) -> BaseException | None:
    """What ended a node's task; None if it came to its end, or was cancelled."""
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class NodeView:
    """What the training thread reads of a running node and asks of it. Calls into the loop do not wait."""

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[type[ev.Event], Mapping[str, Any]], None],
        failure: Callable[[], BaseException | None],
    ) -> None:
        self.node = node
        self._loop = loop
        self.report = report
        self.failure = failure
        self.beside = list[Callable[[], tuple[int, int]]]()
        """The traffic of this process's other groups."""
        self.rest_with = list[NodeView]()
        """Of groups that rest with this one."""
        self._buffers: ModelBuffers | None = None

    def offer(self, offer: Offer) -> None:
        self._loop.call_soon_threadsafe(self.node.offer, offer)

    def show(self, progress: LocalProgress) -> None:
        self._loop.call_soon_threadsafe(self.node.show, progress)
        if progress.phase == Status.PAUSED:
            for other in self.rest_with:
                self._loop.call_soon_threadsafe(other.rest)

    def rest(self) -> None:
        """Say that this peer rests, until ``show`` says what it does. On the loop."""
        self.node.show(replace(self.node.state.local, phase=Status.PAUSED))

    def swarm_position(self) -> tuple[float, float] | None:
        return self.node.progress.swarm_position

    def settled(self, versions: Sequence[int]) -> bool:
        """Whether all live peers are done at ``versions``, and this thread knows that we are there too."""
        known = [agreed.version for agreed in self.node.agreed]
        return known == list(versions) and self.node.progress.settled

    def loads(self, settled: bool) -> bool:
        """Whether others need this peer though its time is up, or it them; where all have ``settled``, one
        that still joins."""
        return self.node.progress.is_needed(LOADS_QUIET_S, settled)

    def tell_what_is_missing(self) -> None:
        """Warn if the run is over for this peer before it has what others hold."""
        if text := self.node.progress.missing():
            self.report(ev.Warned, {"text": text})

    def over(self) -> frozenset[int]:
        """Fragments of which no more rounds are made in this run."""
        return self.node.state.over

    def stage(self, fragment: int) -> Stage:
        """How far the round of the fragment's offer is."""
        return self.node.rounds.stage(fragment)

    def is_line_full(self) -> bool:
        """Whether bulk waits for our line."""
        return self.node.links.is_full

    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of messages (up, down) since the start, those of this process's other groups too."""
        own = self.node.links.up_bytes, self.node.router.down_bytes
        up, down = map(sum, zip(own, *(traffic() for traffic in self.beside), strict=True))
        return up, down

    def live_trainers(self) -> list[str]:
        """The other peers that train, as they said last."""
        live = list(self.node.membership.live.items())  # one step: the loop's thread may not come between
        return [peer for peer, info in live if info.status.phase == Status.TRAINING]

    def give_buffers(self) -> None:
        """Hand this peer's buffers to newcomers, if any wait for them."""
        if self._buffers is None or not self.node.catchup.donor.buffers.are_wanted:
            return
        if not (data := self._buffers.to_bytes()):
            text = "newcomers are not given this peer's buffers: they are other ones than in join"
            self.report(ev.Warned, {"text": text})
        self._loop.call_soon_threadsafe(lambda: self.node.catchup.donor.give_buffers(data, self.node.now()))

    async def take_buffers(self, buffers: ModelBuffers, is_newcomer: bool) -> bytearray:
        """Give ``buffers`` from now on. Those of a peer that trains, if this one ``is_newcomer``; empty if
        nobody gave them in time. On the loop."""
        self._buffers = buffers
        given = self.node.catchup.donor.buffers
        given.layout = buffers.layout
        given.size_bytes = buffers.size_bytes
        donors = self.live_trainers() if is_newcomer and buffers.size_bytes else []
        asked = random.Random().sample(donors, min(len(donors), MAX_BUFFER_DONORS))
        if not asked:
            return bytearray()
        within_s = len(asked) * (LOADS_S + buffers.size_bytes / EXPORT_SLOWEST_BYTES_PER_S)
        peers = tuple(map(PeerId, asked))
        goal = Goal(BUFFERS, len(self.node.agreed), buffers.layout, peers, size_bytes=buffers.size_bytes)
        node = self.node
        return bytearray(await fetch_buffers(node.catchup, goal, within_s, node.now, node.pump))


class PipelineView:
    """What the training thread reads of a running pipeline node and asks of it. Only ``wait`` waits."""

    def __init__(self, node: PipelineNode, loop: asyncio.AbstractEventLoop, holds: Held) -> None:
        self.node = node
        self._loop = loop
        self._holds = holds

    def exchange(self, result: Result | None) -> None:
        """Tell what has come of the last work, and ask for the next."""
        self._loop.call_soon_threadsafe(self.node.exchange, result)

    def wait(self, timeout_s: float) -> Work | None:
        """The work that was asked for; None if there is none within ``timeout_s``."""
        with contextlib.suppress(queue.Empty):
            return self.node.handed.work.get(timeout=timeout_s)
        return None

    def dropped(self) -> Iterator[Key]:
        """Microbatches that were dropped since this was asked last."""
        while not self.node.handed.dropped.empty():
            yield self.node.handed.dropped.get_nowait()

    def draw(self, round_: int, tokens_per_s: float) -> None:
        """As ``PipelineNode.draw``; this peer's record says the rate, too."""
        self._holds.tokens_per_s = tokens_per_s
        self._loop.call_soon_threadsafe(self.node.draw, round_, tokens_per_s)

    def finish(self, at_once: bool) -> None:
        """As ``PipelineNode.finish``."""
        self._loop.call_soon_threadsafe(self.node.finish, at_once)


class NetworkThread:
    """``open`` starts the thread, ``start_node`` its node, ``close`` ends it."""

    def __init__(self, ticket: Ticket, config: PeerConfig, on_event: Callable[[ev.Event], None]) -> None:
        self._ticket = ticket
        self._config = config
        self._tell = on_event
        self.network: Network = cast(Any, None)
        """Once it is open."""
        self.view: NodeView = cast(Any, None)
        """Once the node has started."""
        self._reporting: ReportService | None = None
        self._board: SocketActivation | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="p2p-co2 network", daemon=True)
        self._node_task: asyncio.Task[None] | None = None
        self._positions: tuple[PositionWriter, asyncio.Task[None]] | None = None
        self._pipeline: PipelineNode | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._process = os.getpid()

    @property
    def board(self) -> str:
        """Where this peer's own page is served; "" if it was not asked for, or its extra is missing."""
        return self._board.address if self._board is not None else ""

    def open(self) -> None:
        """Join the DHT and read the manifest; errors as ``Network.open``, and ``EnvironmentFault`` if the
        board's port is taken."""

        def refused(peer: str | None, error: RemoteProtocolError) -> None:
            self._count_refusal(peer or "unknown", error.reason, error.detail)

        self._thread.start()
        self.network = self.ask(Network.open(self._ticket, self._config, refused))
        self._reporting = ReportService(self.network, self._loop, self._count_refusal)
        if self._config.board and not missing("board"):
            folder = self._config.folder.resolve()
            history = folder / "board.sqlite"
            journal = folder / "events.jsonl"
            command = program("monitoring", "peer", "--history", str(history), "--journal", str(journal))
            self._board = SocketActivation("127.0.0.1", self._config.board_port, command, self._ask_report)

    def start_node(
        self, shape: PayloadShape, state_bytes: Sequence[int], ledger: TensorWorker, model: ModelSummary
    ) -> Node:
        """Start the machines; errors of a carrier that cannot listen come up in ``check``."""

        async def start() -> Node:
            stage = self.network.holds.stage
            group = self.network.run.stage_digest(stage) if stage is not None else b""
            environment = Environment(self.network, group=group)
            agreed = ledger.agreed()
            past = ledger.past
            node = Node(environment, shape, state_bytes, ledger, agreed, self.on_event, model, past)
            self._node_task = asyncio.create_task(node.run(), name="node")
            self._node_task.add_done_callback(self._node_ended)

            def where() -> tuple[Status.Phase, float, list[int]]:
                versions = [agreed.version for agreed in node.agreed]
                return node.state.local.phase, node.progress.writer.position(), versions

            positions = PositionWriter(
                self.network.publish_position, where, self._live_peers, node.now, self.warn
            )
            self._positions = positions, asyncio.create_task(positions.run(), name="leave word of the run")
            if self._reporting is not None:
                await self._reporting.start(node)
            return node

        node = self.ask(start())
        self.view = NodeView(node, self._loop, self.report, lambda: self._failure)
        return node

    def choose_stage(self, wanted: int, fits: Callable[[], Collection[int]]) -> int:
        """Hold stage ``wanted``, or (-1) of those that ``fits`` gives the one that is needed most; this
        peer's record says so from now on. Raises ``ConfigError`` for a stage that the run has not, and where
        none fits; ``TransportError``."""
        network = self.network
        pipeline = self.network.run.pipeline
        if wanted >= pipeline.stages:
            problem = f"this run has stages 0 to {pipeline.stages - 1} (got {wanted})"
            raise ConfigError.of_option("--stage", problem)
        stage = network.holds.stage = wanted if wanted >= 0 else self.ask(network.needed_stage(fits()))
        return stage

    def start_pipeline(self, place: Place, sizes: Sizes) -> PipelineView:
        """Meet the neighbouring stages, once the stage's own node runs."""

        async def start() -> PipelineNode:
            node = self.view.node
            run = self.network.run
            environment = node.environment.beside(run.digest())
            listed = self.network.listed
            status = node.progress.writer.status
            pipeline = PipelineNode(environment, place, sizes, listed, status, self.on_event)
            for view in (self.view, *self.view.rest_with):  # all groups of a process have one clock
                view.node.environment.elsewhere = pipeline.positions
            asyncio.create_task(pipeline.run(), name="pipeline").add_done_callback(self._node_ended)
            if self._reporting is not None:
                self._reporting.measure(pipeline)
            return pipeline

        self._pipeline = pipeline = self.ask(start())
        self.view.beside.append(pipeline.traffic_bytes)
        return PipelineView(pipeline, self._loop, self.network.holds)

    def _live_peers(self) -> int:
        """Others that are heard, those of the neighbouring stages too."""
        own = self.view.node.live_peers() if self.view is not None else 0
        return own + (len(self._pipeline.membership.live) if self._pipeline is not None else 0)

    # ---- events

    def on_event(self, event: ev.Event) -> None:
        """What happened, for the caller and for observers; from any thread. The caller may write it to a
        disk, which takes its time: so other threads than the network's leave it to that one, by one call."""
        if self._closed or threading.current_thread() is self._thread or not self._thread.is_alive():
            self._see(event)
            return
        try:
            self._loop.call_soon_threadsafe(self._see, event)
        except RuntimeError:  # closed a moment ago
            self._see(event)

    def _see(self, event: ev.Event) -> None:
        if self._reporting is not None:
            self._reporting.see(event)
        try:
            self._tell(event)
        except OSError as error:
            if error.errno not in LOST:  # whoever read it is gone, as a terminal that was closed
                self._failure = self._failure or error
                raise
        except BaseException as error:
            self._failure = self._failure or error  # on the loop nobody hears it: the training thread does
            raise

    def report(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None:
        self.on_event(kind(at=time.time(), peer=self.network.identity.peer_id, **fields))

    def warn(self, text: str) -> None:
        """Tell a person."""
        self.report(ev.Warned, {"text": text})

    def check(self) -> None:
        """Raise what ended the node, if something did."""
        if self._failure is not None:
            raise self._failure

    # ---- questions before and after training; they block, bounded

    def ask(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run ``work`` on the loop and wait; a Ctrl-C here cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def run_position(self) -> RunPosition | None:
        """Where the run was when its peers last said so; None if nobody ever did. Raises
        ``TransportError``."""
        return self.ask(self.network.run_position())

    def is_listed_empty(self) -> bool:
        """Whether the DHT lists no other peer. Raises ``TransportError``."""
        return not self.ask(self.network.find_peers())

    def _ask_report(self, relayed: Relayed) -> Future[Relayed]:
        """What this peer's own board asks: a peer's sealed report, or without a peer who there is (this one
        first) and the run's canonical settings. Any thread; the future is done in bounded time."""

        async def answer() -> Relayed:
            if self._reporting is None:
                raise TransportError("this peer is still joining")
            if relayed.peer:
                return Relayed(answer=await self._reporting.ask(PeerId(relayed.peer), relayed.request))
            peers = [self.network.identity.peer_id, *sorted(self._heard())]
            return Relayed(peers=peers, answer=self.network.run.canonical_bytes())

        return asyncio.run_coroutine_threadsafe(answer(), self._loop)

    def _heard(self) -> set[PeerId]:
        """The other peers that are live, and of the stages that this one never meets those that are
        listed."""
        heard = set(self.view.node.membership.live) if self.view is not None else set()
        if self._pipeline is not None:
            network = self.network
            mine = self.network.holds.stage or 0
            far = (stage for stage in range(network.run.pipeline.stages) if abs(stage - mine) > 1)
            heard |= self._pipeline.membership.live.keys()
            heard |= {PeerId(one.peer) for stage in far for one in network.listed(stage)}
        return heard

    # ---- the end

    def goodbye(self, reason: str, last: Mapping[str, Any]) -> dict[str, str]:
        """Tell the others, and observers with ``last`` (fields of ``PeerFinished``), that this peer leaves.
        Returns the carrier of each link."""

        async def say() -> dict[str, str]:
            carriers = self.view.node.links.carriers_used()
            if self._pipeline is not None and self._pipeline.links is not None:
                carriers |= self._pipeline.links.carriers_used()
            if self._reporting is not None:
                me = self.network.identity.peer_id
                fields = {**last, "carriers": carriers}
                self._reporting.see(ev.PeerFinished(at=time.time(), peer=me, reason=reason, **fields))
            self.view.node.say_goodbye(reason)
            if self._pipeline is not None:
                self._pipeline.say_goodbye(reason)
            return carriers

        return self.ask(say(), CLOSE_BOUND_S)

    def close(self) -> None:
        """End node, network and loop. May be called twice; in a forked child, which has no part in them, it
        does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self._thread.is_alive():
            with ExitStack() as ending:  # from the last to the first
                ending.callback(self._thread.join)
                ending.callback(self._loop.call_soon_threadsafe, self._loop.stop)
                ending.callback(lambda: self.ask(self._shut_down(), 2 * CLOSE_BOUND_S))
                if self._board is not None:  # it asks the loop
                    ending.callback(self._board.close)
                if self._reporting is not None:  # observers fetch the last events
                    self.ask(self._reporting.say_last_words())
        if not self._loop.is_closed():
            self._loop.close()

    async def _shut_down(self) -> None:
        if self._positions is not None:
            positions, task = self._positions
            task.cancel()
            await positions.say_last()
        if self._reporting is not None:
            await self._reporting.close()
        if self._pipeline is not None:
            self._pipeline.stop()
        if self.view is not None and self._node_task is not None:
            self.view.node.stop()
            await asyncio.wait({self._node_task}, timeout=CLOSE_BOUND_S / 3)
            self._node_task.cancel()
        if self.network is not None:
            await self.network.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    # ---- the thread

    def _run(self) -> None:
        """A method of this object: in a program that ends without ``close`` nothing of it is finalised."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _node_ended(self, task: asyncio.Task[None]) -> None:
        self._failure = cause_of_end(task) or self._failure

    def _count_refusal(self, peer: str, reason: str, detail: str) -> None:
        if self.view is not None:
            self.view.node.refuse(peer, reason, detail)
