"""One more group in a process: what a ``Peer`` needs of a network thread, over that of the process's own.

    thread = SideThread(main, 3, {0, 2}, "the tied table")     # the group ``run.stage_digest(3)``

Its node runs on the main thread's loop, over its carriers, line, clock and records; the main node lists this
peer in the DHT and keeps the daemon. Peers that hold one of ``stages`` are those of the group. Only warnings,
under the group's name, and broken rules are told: other events speak of fragments and members, and would be
taken for the main group's.

Price: two groups that share a peer may have a link to it each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from p2p_co2.net.discovery.records import run_position
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.node.network import Held, Network
from p2p_co2.node.node import Node
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.telemetry import events as ev
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.network_thread import CLOSE_BOUND_S, NetworkThread, NodeView, cause_of_end
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord, RunPosition
from p2p_co2.wire.model_table import ModelSummary

_T = TypeVar("_T")


class SideNetwork:
    """``network`` as a group sees it that publishes nothing: its peers are those that hold one of
    ``stages``."""

    def __init__(self, network: Network, group: int, stages: Collection[int]) -> None:
        self._network = network
        self._stages = stages
        self.identity = network.identity
        self.config = network.config
        self.run = network.run
        self.software = network.software
        self.holds = Held(stage=group)

    @property
    def carriers(self) -> Sequence[Carrier]:
        return self._network.carriers

    @property
    def invitation(self) -> Ticket:
        return self._network.invitation

    @property
    def reach_advice(self) -> str:
        return self._network.reach_advice

    async def find_peers(self) -> list[PeerRecord]:
        """Raises ``TransportError``."""
        return [record for record in await self._network.records.search() if record.stage in self._stages]

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        return await self._network.find_record(peer, fresh)

    async def run_position(self) -> RunPosition | None:
        """Where those were that hold ``stages``: all groups have one clock. Raises ``TransportError``."""
        said = await self._network.discovery.find_positions()
        return run_position([one for one in said if one.stage in self._stages], time.time())

    # The main node does these.

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        return

    async def publish_self(self, somebody_unmet: bool = False) -> None:
        return

    async def rebootstrap(self) -> None:
        return

    async def greet_seeds(self) -> None:
        return

    async def daemon_ended(self) -> str:
        """Never: who hears it tells it."""
        await asyncio.Event().wait()
        return ""


class SideThread:
    """Start it once ``main`` has a node; ``close`` ends its own node alone. Methods as ``NetworkThread``
    says."""

    board = ""

    def __init__(self, main: NetworkThread, group: int, stages: Collection[int], name: str) -> None:
        self._main = main
        self._name = name
        self.network = SideNetwork(main.network, group, stages)
        self._digest = main.network.run.stage_digest(group)
        self.view: NodeView = cast(Any, None)
        """Once the node has started."""
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def start_node(
        self, shape: PayloadShape, state_bytes: Sequence[int], ledger: TensorWorker, model: ModelSummary
    ) -> Node:
        async def start() -> Node:
            environment = self._main.view.node.environment.beside(self._digest)
            environment.network = self.network
            agreed = ledger.agreed()
            past = ledger.past
            node = Node(environment, shape, state_bytes, ledger, agreed, self.on_event, model, past)
            self._task = asyncio.create_task(node.run(), name=self._name)
            self._task.add_done_callback(self._ended)
            self.view = NodeView(node, asyncio.get_running_loop(), self.report, lambda: self._failure)
            return node

        node = self.ask(start())
        self._main.view.beside.append(self.view.traffic_bytes)
        self._main.view.rest_with.append(self.view)
        return node

    def on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.MessageRefused):
            self._main.on_event(event)
        elif isinstance(event, ev.Warned):
            self._main.on_event(replace(event, text=f"{self._name}: {event.text}"))

    def report(self, kind: type[ev.Event], fields: Mapping[str, Any]) -> None:
        self.on_event(kind(at=time.time(), peer=self.network.identity.peer_id, **fields))

    def warn(self, text: str) -> None:
        self.report(ev.Warned, {"text": text})

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._main.check()

    def ask(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        return self._main.ask(work, timeout_s)

    def run_position(self) -> RunPosition | None:
        return self.ask(self.network.run_position())

    def is_listed_empty(self) -> bool:
        return not self.ask(self.network.find_peers())

    def goodbye(self, reason: str, last: Mapping[str, Any]) -> dict[str, str]:
        async def say() -> dict[str, str]:
            self.view.node.say_goodbye(reason)
            return self.view.node.links.carriers_used()

        return self.ask(say(), CLOSE_BOUND_S)

    def close(self) -> None:
        """Before ``main`` is closed, which ends it too. May be called twice."""

        async def end(task: asyncio.Task[None]) -> None:
            self.view.node.stop()
            await asyncio.wait({task}, timeout=CLOSE_BOUND_S / 3)
            task.cancel()

        task = self._task
        self._task = None
        if task is not None:
            self.ask(end(task), CLOSE_BOUND_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._failure = self._failure or cause_of_end(task)


PeerThread = NetworkThread | SideThread
