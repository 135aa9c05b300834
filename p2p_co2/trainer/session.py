"""This process in a run: one thread, one asyncio loop, one network, and n groups of the run over it.

    session = Session(ticket, config, on_event)
    session.open()                                       # the DHT, and the run's settings
    part = Participation(session, RunGroup.whole(session.network.run))
    part.start_node(...)                                 # and further ones, in other groups
    part.close()                                         # the first one's ends the session

Law: the training thread reads only what a view publishes whole. It never waits on a call into the loop,
except to open, to start and to close. Closing leaves no thread, process, socket or file.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TransportError
from p2p_co2.node.credit import CreditFile
from p2p_co2.node.environment import Environment, RunGroup
from p2p_co2.node.network import Network
from p2p_co2.node.node import Node
from p2p_co2.node.peer_finder import PositionWriter
from p2p_co2.node.pipeline_node import PipelineNode
from p2p_co2.node.reporting import ReportService
from p2p_co2.node.shell import Shell
from p2p_co2.protocol.credit import Holder
from p2p_co2.protocol.pipeline import Place, Sizes
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.system.extras import missing
from p2p_co2.system.machine import require_supported_platform
from p2p_co2.system.process import LOST, program
from p2p_co2.system.socket_activation import SocketActivation
from p2p_co2.telemetry import events as ev
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.views import NodeView, PipelineView
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Relayed, RunPosition, Status
from p2p_co2.wire.model_table import ModelSummary

CLOSE_BOUND_S = 6.0
"""What leaves ends within this."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Footing:
    """What a session that was opened stands on. ``board``: None if none is served."""

    network: Network
    environment: Environment
    reporting: ReportService
    board: SocketActivation | None


class LoopThread:
    """An asyncio loop on a thread of its own. ``start`` it, ``end`` it."""

    def __init__(self) -> None:
        require_supported_platform()
        import uvloop  # which Windows has not

        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="p2p-co2 network", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs, and not here."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def ask(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run ``work`` on the loop and wait; a Ctrl-C here cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """After ``last``, whose error is raised when all has ended. Bounded. Once."""
        if self._thread.is_alive():
            with ExitStack() as ending:  # from the last to the first
                ending.callback(self._thread.join)
                ending.callback(self.loop.call_soon_threadsafe, self.loop.stop)
                ending.callback(lambda: self.ask(self._end_rest(), CLOSE_BOUND_S))
                self.ask(last, 2 * CLOSE_BOUND_S)
        else:
            last.close()
        if not self.loop.is_closed():
            self.loop.close()

    async def _end_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()

    def _run(self) -> None:
        """A method of this object: in a program that ends without ``end`` nothing of it is finalised."""
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class Session:
    """``open`` starts it, ``close`` ends it with all of its groups.

    ``shells``: of the groups, the first one first, with the tasks that run them."""

    def __init__(self, ticket: Ticket, config: PeerConfig, on_event: Callable[[ev.Event], None]) -> None:
        self._ticket = ticket
        self._config = config
        self._tell = on_event
        self._thread = LoopThread()
        self._footing: _Footing | None = None
        self._ending = AsyncExitStack()
        """What gives everything back, the last first."""
        self.shells: dict[Shell, asyncio.Task[None]] = {}
        self.failure: BaseException | None = None
        """What ended a group, or came of telling an event."""
        self._closed = False
        self._process = os.getpid()

    # ---- what it stands on

    def open(self) -> None:
        """Join the DHT and read the manifest; errors as ``Network.open``, and ``EnvironmentFault`` if the
        board's port is taken."""
        self._thread.start()
        self.ask(self._open())

    async def _open(self) -> None:
        def refused(peer: str | None, error: RemoteProtocolError) -> None:
            self._count_refusal(peer or "unknown", error.reason, error.detail)

        network = await Network.open(self._ticket, self._config, refused)
        self._ending.push_async_callback(network.close)
        self._ending.push_async_callback(self._end_all)
        reporting = ReportService(network, self._thread.loop, self._count_refusal)
        self._ending.push_async_callback(reporting.close)
        board: SocketActivation | None = None
        if self._config.board and not missing("board"):
            folder = self._config.folder.resolve()
            history = folder / "board.sqlite"
            journal = folder / "events.jsonl"
            command = program("monitoring", "peer", "--history", str(history), "--journal", str(journal))
            board = SocketActivation("127.0.0.1", self._config.board_port, command, self._ask_report)
        self._footing = _Footing(
            network, Environment(network, members=network.door.members), reporting, board
        )

    @property
    def _stands_on(self) -> _Footing:
        if self._footing is None:
            raise LocalProtocolError("the session is not open")
        return self._footing

    @property
    def network(self) -> Network:
        return self._stands_on.network

    @property
    def board(self) -> str:
        """Where this peer's own page is served; "" if it was not asked for, or its extra is missing."""
        board = self._stands_on.board
        return board.address if board is not None else ""

    def environment(self, group: RunGroup) -> Environment:
        """What the shell of ``group`` stands on."""
        return self._stands_on.environment.beside(group)

    # ---- groups; on the loop

    async def start(self, shell: Shell) -> None:
        """Be in a further group. What ends it comes up in ``check``. The first one measures links, answers
        observers, and leaves word of where the run is."""
        reporting = self._stands_on.reporting
        task = asyncio.create_task(shell.run(), name="group")
        task.add_done_callback(self._shell_ended)
        is_first = not self.shells
        self.shells[shell] = task
        if is_first and isinstance(shell, Node):
            await self._leave_word(shell)
            await reporting.start(shell)
        elif isinstance(shell, PipelineNode):
            self._stands_on.environment.switch.elsewhere = shell.positions  # all groups have one clock
            reporting.measure(shell)

    async def _leave_word(self, node: Node) -> None:
        def where() -> tuple[Status.Phase, float, list[int]]:
            versions = [agreed.version for agreed in node.agreed]
            return node.state.local.phase, node.progress.writer.position(), versions

        def live_peers() -> int:
            return len(set().union(*(shell.membership.live for shell in self.shells)))

        positions = PositionWriter(self.network.publish_position, where, live_peers, node.now, self.warn)
        writing = asyncio.create_task(positions.run(), name="leave word of the run")
        self._ending.push_async_callback(positions.say_last)
        self._ending.callback(writing.cancel)

    async def end(self, shells: Collection[Shell]) -> None:
        """Be in these groups no more. Bounded."""
        tasks = {self.shells[shell] for shell in shells}
        for shell in shells:
            shell.stop()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_BOUND_S / 3)
        for task in tasks:
            task.cancel()

    async def _end_all(self) -> None:
        await self.end(self.shells)

    def _shell_ended(self, task: asyncio.Task[None]) -> None:
        self.failure = cause_of_end(task) or self.failure

    def leads(self, shell: Shell) -> bool:
        """Whether ``shell`` is of this process's first group."""
        return next(iter(self.shells), shell) is shell

    def choose_stage(self, wanted: int, fits: Callable[[], Collection[int]]) -> int:
        """Hold stage ``wanted``, or (-1) of those that ``fits`` gives the one that is needed most; this
        peer's record says so from now on. Raises ``ConfigError`` for a stage that the run has not, and where
        none fits; ``TransportError``."""
        network = self.network
        pipeline = network.run.pipeline
        if wanted >= pipeline.stages:
            problem = f"this run has stages 0 to {pipeline.stages - 1} (got {wanted})"
            raise ConfigError.of_option("--stage", problem)
        stage = network.holds.stage = wanted if wanted >= 0 else self.ask(network.needed_stage(fits()))
        return stage

    def start_pipeline(self, place: Place, sizes: Sizes) -> PipelineView:
        """Meet the neighbouring stages, once the stage's own group runs."""
        network = self.network
        stage_node = next(shell for shell in self.shells if isinstance(shell, Node))

        async def start() -> PipelineNode:
            environment = self.environment(RunGroup.whole(network.run))
            status = stage_node.progress.writer.status
            pipeline = PipelineNode(environment, place, sizes, network.listed, status, self.on_event)
            await self.start(pipeline)
            return pipeline

        return PipelineView(self.ask(start()), self._thread.loop, network.holds)

    # ---- events

    def on_event(self, event: ev.Event) -> None:
        """What happened, for the caller and for observers; from any thread. The caller may write it to a
        disk, which takes its time: so other threads leave it to the network's, by one call."""
        if self._closed or not self._thread.is_elsewhere:
            self._see(event)
            return
        try:
            self._thread.loop.call_soon_threadsafe(self._see, event)
        except RuntimeError:  # closed a moment ago
            self._see(event)

    def _see(self, event: ev.Event) -> None:
        if self._footing is not None:
            self._footing.reporting.see(event)
        try:
            self._tell(event)
        except OSError as error:
            if error.errno not in LOST:  # whoever read it is gone, as a terminal that was closed
                self.failure = self.failure or error
                raise
        except BaseException as error:
            self.failure = self.failure or error  # on the loop nobody hears it: the training thread does
            raise

    def warn(self, text: str) -> None:
        """Tell a person."""
        self.on_event(ev.Warned(at=time.time(), peer=self.network.identity.peer_id, text=text))

    # ---- questions before and after training; they block, bounded

    def ask(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """As ``LoopThread.ask``."""
        return self._thread.ask(work, timeout_s)

    def _ask_report(self, relayed: Relayed) -> Future[Relayed]:
        """What this peer's own board asks: a peer's sealed report, or without a peer who there is (this one
        first) and the run's canonical settings. Any thread; the future is done in bounded time."""

        async def answer() -> Relayed:
            if self._footing is None:
                raise TransportError("this peer is still joining")
            if relayed.peer:
                return Relayed(
                    answer=await self._footing.reporting.ask(PeerId(relayed.peer), relayed.request)
                )
            peers = [self.network.identity.peer_id, *sorted(self._heard())]
            return Relayed(peers=peers, answer=self.network.run.canonical_bytes())

        return asyncio.run_coroutine_threadsafe(answer(), self._thread.loop)

    def _heard(self) -> set[PeerId]:
        """The other peers that are live, and of the stages that this one never meets those that are
        listed."""
        network = self.network
        mine = network.holds.stage
        everybody = [one for shell in self.shells for one in list(shell.membership.live.items())]
        heard = {peer for peer, info in everybody if not info.status.visits}
        if mine is None:
            return heard
        far = (stage for stage in range(network.run.pipeline.stages) if abs(stage - mine) > 1)
        return heard | {PeerId(one.peer) for stage in far for one in network.listed(stage)}

    # ---- the end

    def see_last(self, event: ev.PeerFinished) -> None:
        """What observers alone hear: the caller is told when all has ended."""
        self._stands_on.reporting.see(event)

    def close(self) -> None:
        """End groups, network and loop. May be called twice; in a forked child, which has no part in them,
        it does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with ExitStack() as ending:  # from the last to the first
            ending.callback(self._thread.end, self._ending.aclose())
            if (footing := self._footing) is not None:
                if footing.board is not None:  # it asks the loop
                    ending.callback(footing.board.close)
                self.ask(footing.reporting.say_last_words())  # observers fetch the last events

    def _count_refusal(self, peer: str, reason: str, detail: str) -> None:
        for shell in list(self.shells)[:1]:
            shell.router.refuse(peer, reason, detail)


class Participation:
    """This process in one group of its run: what a ``Peer`` has of the network. The first one's ``close``
    ends the session, that of a further one its own group alone.

    Of a further group only warnings, under its name, and broken rules are told. Other events speak of
    fragments and members, and would be taken for the first group's. Price: two groups that share a peer may
    have a link to it each."""

    def __init__(self, session: Session, group: RunGroup) -> None:
        self.session = session
        self.group = group
        self.view: NodeView = cast(Any, None)
        """Once the node has started."""

    @property
    def network(self) -> Network:
        return self.session.network

    @property
    def board(self) -> str:
        """As ``Session.board``."""
        return self.session.board

    def start_node(
        self, shape: PayloadShape, state_bytes: Sequence[int], ledger: TensorWorker, model: ModelSummary
    ) -> Node:
        """Start the machines; errors of a carrier that cannot listen come up in ``check``."""
        session = self.session

        async def start() -> Node:
            environment = session.environment(self.group)
            agreed = ledger.agreed()
            node = Node(environment, shape, state_bytes, ledger, agreed, self.on_event, model, ledger.past)
            loop = asyncio.get_running_loop()
            if session.leads(node):
                take = self._credit(shape).take
                node.outer.on_taken = lambda decision: loop.run_in_executor(None, take, decision)
            await session.start(node)
            self.view = NodeView(node, loop, self.report, lambda: session.failure, session.shells)
            return node

        return self.ask(start())

    def _credit(self, shape: PayloadShape) -> CreditFile:
        """What the peer keeps of the rounds in which its first group counted it."""
        network = self.network
        run = network.run
        holder = Holder(
            peer=network.identity.peer_id, run=run.digest().hex(), name=run.name,
            stage=self.group.number or 0, stages=run.pipeline.stages, blocks=shape.blocks,
        )  # fmt: skip
        return CreditFile(network.config.folder, holder, self.warn)

    def on_event(self, event: ev.Event) -> None:
        """As ``Session.on_event``."""
        if not self.group.name or isinstance(event, ev.MessageRefused):
            self.session.on_event(event)
        elif isinstance(event, ev.Warned):
            self.session.on_event(replace(event, text=f"{self.group.name}: {event.text}"))

    def report(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None:
        self.on_event(kind(at=time.time(), peer=self.network.identity.peer_id, **fields))

    def warn(self, text: str) -> None:
        """Tell a person."""
        self.report(ev.Warned, {"text": text})

    def check(self) -> None:
        """Raise what ended a group of this process, if something did."""
        if self.session.failure is not None:
            raise self.session.failure

    def ask(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """As ``Session.ask``."""
        return self.session.ask(work, timeout_s)

    def run_position(self) -> RunPosition | None:
        """Where the run was when peers of the group last said so; None if nobody ever did. Raises
        ``TransportError``."""
        return self.ask(self.network.run_position(self.group))

    def is_listed_empty(self) -> bool:
        """Whether the DHT lists no other peer of the group. Raises ``TransportError``."""
        return not self.ask(self.session.environment(self.group).find_peers())

    @property
    def _is_first(self) -> bool:
        return self.view is None or self.session.leads(self.view.node)

    def goodbye(self, reason: str, last: Mapping[str, Any]) -> dict[str, str]:
        """Tell the others that this peer leaves; observers with ``last`` (fields of ``PeerFinished``), in the
        first group. Returns the carrier of each link."""

        async def say() -> dict[str, str]:
            shells = list(self.session.shells) if self._is_first else [self.view.node]
            running = [shell for shell in shells if not shell.life.stopping.is_set()]
            carriers = {peer: way for one in running for peer, way in one.links.carriers_used().items()}
            if self._is_first:
                me = self.network.identity.peer_id
                fields = {**last, "carriers": carriers}
                self.session.see_last(ev.PeerFinished(at=time.time(), peer=me, reason=reason, **fields))
            for shell in running:
                shell.say_goodbye(reason)
            return carriers

        return self.ask(say(), CLOSE_BOUND_S)

    def close(self) -> None:
        """May be called twice."""
        if self._is_first:
            self.session.close()
        elif not self.view.node.life.stopping.is_set():
            self.ask(self.session.end([self.view.node]), CLOSE_BOUND_S)


def cause_of_end(task: asyncio.Task[None]) -> BaseException | None:
    """What ended a group's task; None if it came to its end, or was cancelled."""
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
