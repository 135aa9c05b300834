"""A few real nodes in one thread on virtual time, for messages that no honest peer sends.

Everything is the product's own but the sockets and the clock: node, machines, tensor ledgers, and the
training thread's synchroniser over a small model. Law: the same calls give the same history.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import selectors
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_co2.config import ClockConfig, CodecConfig, OuterConfig, PeerConfig, RunConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.node.environment import Clock, Environment
from p2p_co2.node.links import LinkTraffic, Piece
from p2p_co2.node.node import Node
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.rounds import Offer, PayloadShape
from p2p_co2.telemetry.events import Event, MessageRefused
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.agreed import state_size_bytes
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.trainer.exchanged_model import ExchangedModel, TrainingSetup
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.synchroniser import Progressed, Synchroniser
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord, Ping, Status
from p2p_co2.wire.schedule import Stage
from tests.envelopes import enveloped

RUN = RunConfig(
    name="fuzz",
    recipe="own-loop",
    fragments=2,
    clock=ClockConfig(mode="steps", inner_steps_per_round=10),
    codec=CodecConfig(name="int4"),
    outer=OuterConfig(blocking_rounds=0),
)
STEP_S, LATENCY_S = 0.1, 0.01
WIDTH = 32
MOST_HELD_BYTES = 64 << 20
"""Far above what a node of this small world holds; a bound that failed would pass it."""


class VirtualSelector(selectors.DefaultSelector):
    """Never waits: time is what the loop wanted to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


class Inline(Executor):
    """The worker thread's work, done at once: the order of everything is then given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@cache
def make_identity(name: str) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


class MemoryLinks:
    """``node.environment.Links``: a message arrives ``LATENCY_S`` later, in order."""

    def __init__(self, world: World, me: PeerId) -> None:
        self._world, self._me = world, me
        self.up_bytes = 0
        self.upload_bytes_per_s = 1e6
        self.is_full = False
        self.traffic: dict[PeerId, LinkTraffic] = {}

    def set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        return None

    def post(
        self, peer: PeerId, data: bytes, bulk: bool, served: bool = False, piece: Piece | None = None
    ) -> bool:
        self.up_bytes += len(data)
        self._world.send(self._me, peer, bytes(data))
        return True

    def forget(self, attempt: bytes, means: bool) -> None:
        """Nothing waits here."""

    def carriers_used(self) -> dict[str, str]:
        return {}

    async def drain(self, timeout_s: float) -> None:
        return None

    async def close(self) -> None:
        return None


class Beside:
    """``node.environment.PeerNetwork`` for one peer: everybody knows everybody."""

    software = "fuzz"
    visits = False
    carriers: Sequence[Carrier] = ()

    def __init__(self, world: World, identity: Identity) -> None:
        self._world, self.identity = world, identity
        self.config, self.run = PeerConfig(), RUN

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        self._world.doors[self.identity.peer_id] = on_message

    async def publish_self(self, somebody_unmet: bool = False) -> None:
        return None

    async def find_peers(self) -> list[PeerRecord]:
        return [PeerRecord(peer=peer) for peer in self._world.doors if peer != self.identity.peer_id]

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        return None

    async def daemon_ended(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def greet_seeds(self) -> None:
        pass

    async def rebootstrap(self) -> None:
        return None


class Trainer:
    """One peer: its model, its ledger, its node, and the wire between them; in ``world``, or where its
    ``environment`` is."""

    def __init__(self, world: World | None, name: str, environment: Environment | None = None) -> None:
        self.identity = make_identity(name)
        self.me = self.identity.peer_id
        self.events: list[Event] = []
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.noise = torch.Generator().manual_seed(len(name) + sum(name.encode()))
        plan, codec = plan_fragments(self.model, RUN.fragments), get_codec(RUN.codec.name)
        live = LiveParameters(self.model, plan)
        states = [outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments]
        if environment is None:
            assert world is not None
            environment = world.environment(self.identity)
        self.terms = environment.members.terms
        known = RUN, codec, self.me
        fragments = [FragmentState(*known, one, at, terms=self.terms) for at, one in enumerate(states)]
        self.ledger = TensorWorker(codec, fragments, thread=cast(Any, Inline()))
        self.group, blocks = environment.group, tuple(codec.blocks(f.numel) for f in plan.fragments)
        self.shape = PayloadShape(codec.block_bytes, blocks, chunk_bytes=self.ledger.chunk_bytes)
        self.node = Node(
            environment,
            self.shape,
            [state_size_bytes(fragment.numel) for fragment in plan.fragments],
            self.ledger,
            self.ledger.agreed(),
            self.events.append,
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        setup = TrainingSetup(RUN, PeerConfig(), plan, self.model, optimizer)
        self.exchanged = ExchangedModel(setup, lambda text: None)
        self.sync = Synchroniser(RUN, self.exchanged, self.ledger, self, Progressed(), terms=self.terms)
        self.sync.report()

    def step(self) -> None:
        """One inner step of the training thread; raises what would end it."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self.noise), alpha=1e-2)
        self.sync.after_step(32, 1.0)

    @property
    def refused(self) -> list[MessageRefused]:
        return [event for event in self.events if isinstance(event, MessageRefused)]

    # ---- synchroniser.Wire

    def offer(self, offer: Offer) -> None:
        asyncio.get_running_loop().call_soon(self.node.offer, offer)

    def show(self, progress: LocalProgress) -> None:
        self.node.show(progress)

    def swarm_position(self) -> None:
        return None

    def settled(self, versions: Sequence[int]) -> bool:
        return self.node.progress.settled

    def over(self) -> frozenset[int]:
        return self.node.state.over

    def stage(self, fragment: int) -> Stage:
        return self.node.rounds.stage(fragment)

    def is_line_full(self) -> bool:
        return False

    def traffic_bytes(self) -> tuple[int, int]:
        return 0, 0

    def failure(self) -> BaseException | None:
        return self.node.life.bug

    def report(self, kind: type[Event], fields: Mapping[str, Any]) -> None:
        self.events.append(kind(at=0.0, peer=self.me, **fields))


class World:
    """Make it and call ``start`` inside a ``VirtualLoop``. ``tap`` sees every message that one of the peers
    sends, (sender, receiver, bytes), and loses those for which it says False."""

    def __init__(self, *names: str) -> None:
        self.doors: dict[PeerId, OnMessage] = {}
        self.tap: Callable[[PeerId, PeerId, bytes], bool] = lambda sender, receiver, data: True
        self.dropped: list[tuple[PeerId, RemoteProtocolError]] = []
        """(sender whose link would have been dropped, why)"""
        self.trainers = [Trainer(self, name) for name in names]
        self._queues: dict[tuple[PeerId, PeerId], asyncio.Queue[bytes]] = {}
        self._nodes: list[asyncio.Task[None]] = []
        self._carrying: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Bring up the nodes that are not up yet."""
        for trainer in self.trainers[len(self._nodes) :]:
            self._nodes.append(asyncio.create_task(trainer.node.run()))

    def environment(self, identity: Identity) -> Environment:
        """What a peer of this world stands on."""
        loop = asyncio.get_running_loop()
        clock = Clock(loop.time, lambda: 1.7e9 + loop.time())
        return Environment(Beside(self, identity), clock, lambda *_: MemoryLinks(self, identity.peer_id))

    def add(self, name: str) -> None:
        """One more peer, at version 0; ``start`` brings it up."""
        self.trainers.append(Trainer(self, name))

    async def close(self) -> None:
        """End all nodes; raises what ended one of them before."""
        for trainer in self.trainers:
            trainer.node.stop()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await asyncio.gather(*self._nodes)

    def send(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        """A peer's own message."""
        if self.tap(sender, receiver, data):
            self.put(sender, receiver, data)

    def put(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        """Put a message on its way; what a link carries is read in order, as fast as the receiver reads."""
        queue = self._queues.get((sender, receiver))
        if queue is None:
            queue = self._queues[sender, receiver] = asyncio.Queue()
            self._carrying.append(asyncio.create_task(self._carry(sender, receiver, queue)))
        queue.put_nowait(data)

    async def _carry(self, sender: PeerId, receiver: PeerId, queue: asyncio.Queue[bytes]) -> None:
        while True:
            data = await queue.get()
            await asyncio.sleep(LATENCY_S)
            await self.deliver(sender, receiver, data)

    async def deliver(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        """As a carrier would: a refusal from above drops the link, anything else is a bug."""
        door: Callable[[PeerId, bytes], Awaitable[None]] | None = self.doors.get(receiver)
        if door is None:
            return
        try:
            await door(sender, data)
        except RemoteProtocolError as error:
            self.dropped.append((sender, error))

    # ---- what a game asks of a world

    @property
    def members(self) -> Sequence[Any]:
        """The honest peers: ``me``, ``identity``, ``node``, ``refused``."""
        return self.trainers

    async def pass_time(self, seconds: float) -> None:
        """Everybody trains for so long."""
        await self.train(seconds)

    async def greet(self, stranger: PeerId) -> None:
        """Let a stranger be live in the others' eyes."""
        status = Status(phase=Status.TRAINING, process=1)
        ping = enveloped(Ping(nonce=1, sent_at=1.0, status=status), head_of(RUN.digest()))
        for one in self.members:
            await self.deliver(stranger, one.me, ping)

    def done(self) -> list[int]:
        """How far each member has come; it is to come further."""
        return [sum(versions) for versions in self.versions()]

    def check(self) -> None:
        """The nodes live, nothing reached the training threads, and what is held is bounded. Raises
        ``AssertionError``."""
        for trainer in self.trainers:
            check_bounds(trainer)
            timers = trainer.node.timers()
            assert not [
                name for name, at in timers.items() if at is not None and at < trainer.node.now() - 1.0
            ]

    def check_agreed(self) -> None:
        """One state by version. Raises ``AssertionError``."""
        digests = self.digests()
        for place in set(digests[0]).intersection(*digests[1:]):
            assert len({held[place] for held in digests}) == 1, place

    async def train(self, seconds: float, jitter: random.Random | None = None) -> None:
        """Everybody trains for so long."""
        ends_at = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends_at:
            for trainer in self.trainers:
                trainer.step()
            await asyncio.sleep(STEP_S * (jitter.uniform(0.5, 1.5) if jitter else 1.0))

    def versions(self) -> list[tuple[int, ...]]:
        return [tuple(agreed.version for agreed in trainer.node.agreed) for trainer in self.trainers]

    def digests(self) -> list[dict[tuple[int, int], bytes]]:
        """Per peer, the digest of what it holds by (fragment, version)."""
        return [
            {(f, agreed.version): agreed.digest for f, agreed in enumerate(trainer.node.agreed)}
            for trainer in self.trainers
        ]


def check_bounds(trainer: Trainer) -> None:
    """See ``World.check``."""
    node = trainer.node
    assert node.life.bug is None, node.life.bug
    assert trainer.ledger.failure is None
    assert not node.life.stopping.is_set()
    for holder in (node.router, node.rounds, node.membership, node.catchup.donor):
        for name, (held, most) in holder.held().items():
            assert held <= most, name
    assert len(node.membership.live) <= 4
    assert size_of(node.rounds) + size_of(node.membership) + size_of(node.catchup) < MOST_HELD_BYTES


def size_of(thing: object) -> int:
    """Bytes that ``thing`` holds, strings and containers below it counted once."""
    seen: set[int] = set()
    total, left = 0, [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += one.ByteSize() if hasattr(one, "ByteSize") else sys.getsizeof(one)
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            left += list(one)
        elif type(one).__module__.startswith("p2p_co2") and not hasattr(one, "ByteSize"):
            left += list(getattr(one, "__dict__", {}).values())
    return total


def run_virtual(work: Awaitable[None]) -> None:
    """Run a coroutine to its end on virtual time; when it fails, what it had begun ends, too."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))  # else a later test that collects them fails
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
