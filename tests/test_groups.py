"""One process in several groups over one set of carriers, over real sockets of this machine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from p2p_co2.config import PeerConfig
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.node.environment import Environment, RunGroup
from p2p_co2.node.shell import Shell
from p2p_co2.protocol.membership import Membership
from p2p_co2.telemetry.events import Event, MessageRefused
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import AskOutcome, PeerRecord, Ping, RoundKey, Status
from tests.envelopes import enveloped
from tests.fuzz.world import RUN, Trainer, make_identity

OTHER_GROUP = RunGroup(hashlib.sha256(b"another group of the run").digest(), name="another")
STEP_S, WITHIN_S = 0.02, 60.0


class Loopback:
    """``PeerNetwork`` over gRPC on this machine; ``listed`` is what all of them find."""

    software = "test"
    visits = False

    def __init__(self, name: str, listed: dict[str, PeerRecord]) -> None:
        self.identity, self.config, self.run = make_identity(name), PeerConfig(), RUN
        self.carrier = GrpcCarrier(self.identity, RUN.digest(), "127.0.0.1", 0)
        self.carriers: Sequence[Carrier] = (self.carrier,)
        self.starts, self._listed = 0, listed

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        self.starts += 1
        self.hear = on_message
        await self.carrier.start(on_message, on_refused)
        me = self.identity.peer_id
        self._listed[me] = PeerRecord(
            peer=me, grpc_addresses=[f"127.0.0.1:{self.carrier.port}"],
            certificate_digest=self.carrier.certificate_digest,
        )  # fmt: skip

    async def publish_self(self, somebody_unmet: bool = False) -> None:
        return None

    async def find_peers(self) -> list[PeerRecord]:
        return [record for peer, record in self._listed.items() if peer != self.identity.peer_id]

    async def find_record(self, peer: PeerId, fresh: bool = False) -> PeerRecord | None:
        return self._listed.get(peer)

    async def daemon_ended(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def greet_seeds(self) -> None:
        return None

    async def rebootstrap(self) -> None:
        return None


class Meeting(Shell):
    """A group that has no rounds: its peers only know of each other."""

    def __init__(self, environment: Environment, peers: Callable[[], list[PeerId]]) -> None:
        self.events = list[Event]()
        super().__init__(environment, self.events.append)
        self._peers = peers
        membership = Membership(environment.network.identity.peer_id)
        self.serve(membership, [membership], Status)

    def has_worked(self, peer: PeerId) -> bool:
        return peer in self.membership.live

    def _look(self, now: float) -> None:
        self.membership.found(self._peers(), now)
        self.membership.handle_timer(now)
        self.pump()

    def _handle_events(self) -> bool:
        return self.membership.next_event() is not None


class Net:
    """Processes that find each other, by name."""

    def __init__(self, *names: str) -> None:
        self._listed = dict[str, PeerRecord]()
        self.of = {name: Loopback(name, self._listed) for name in names}

    def peers(self) -> list[PeerId]:
        return list(map(PeerId, self._listed))

    @asynccontextmanager
    async def running(self, *shells: Shell) -> Any:
        """In the order in which a process is in its groups; raises what ended one."""
        tasks = [asyncio.create_task(shell.run()) for shell in shells]
        try:
            async with asyncio.timeout(WITHIN_S):
                yield
        finally:
            for shell in shells:
                shell.stop()
            await asyncio.gather(*tasks)
            for net in self.of.values():
                await net.carrier.close()


async def until(is_so: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
    while not is_so():
        meanwhile()
        await asyncio.sleep(STEP_S)


def meets(*shells: Shell) -> bool:
    ids = {shell.environment.network.identity.peer_id for shell in shells}
    return all(
        {*shell.membership.live, shell.environment.network.identity.peer_id} == ids for shell in shells
    )


async def test_a_process_in_two_groups_makes_rounds_in_both_and_none_hears_the_other() -> None:
    net = Net("a", "both", "b")
    here = Environment(net.of["both"])
    trainers = {
        "a": Trainer(None, "a", Environment(net.of["a"])),
        "both, in a's": Trainer(None, "both", here),
        "both, in b's": Trainer(None, "both", here.beside(OTHER_GROUP)),
        "b": Trainer(None, "b", Environment(net.of["b"]).beside(OTHER_GROUP)),
    }
    first = [trainers[name].node for name in ("a", "both, in a's")]
    second = [trainers[name].node for name in ("b", "both, in b's")]

    def has_exchanged() -> bool:
        pairs = [[node.agreed for node in pair] for pair in (first, second)]
        return all(one == other and min(version.version for version in one) > 1 for one, other in pairs)

    def step() -> None:
        for trainer in trainers.values():
            trainer.step()

    async with net.running(*(trainer.node for trainer in trainers.values())):
        await until(lambda: meets(*first) and meets(*second))
        await until(has_exchanged, step)
        assert first[0].agreed[0].digest != second[0].agreed[0].digest, "two groups have two histories"
        assert not any(trainer.refused for trainer in trainers.values()), "nobody is blamed for the other"
        assert [one.starts for one in net.of.values()] == [1, 1, 1]


async def test_a_group_of_any_kind_stands_beside_one_that_averages() -> None:
    """What its machines do not know is refused in it; what is for no group here counts by its bytes. One
    group ends, and the other goes on."""
    net = Net("one", "two", "mallory")
    places = {name: Environment(net.of[name]) for name in ("one", "two")}
    averaging = [Trainer(None, name, environment) for name, environment in places.items()]
    meeting = [Meeting(environment.beside(OTHER_GROUP), net.peers) for environment in places.values()]
    nodes = [trainer.node for trainer in averaging]
    me = net.of["mallory"].identity.peer_id

    async def post(data: bytes) -> None:
        await net.of["one"].hear(me, data)

    def step() -> None:
        for trainer in averaging:
            trainer.step()

    async with net.running(*nodes, *meeting):
        await until(lambda: meets(*nodes) and meets(*meeting))
        assert [one.environment.is_first for one in (*nodes, *meeting)] == [True, True, False, False]
        asked = AskOutcome(key=RoundKey(fragment=0, round=1, attempt=bytes(16)))
        before = [one.router.down_bytes for one in (nodes[0], meeting[0])]
        await post(enveloped(asked, head_of(OTHER_GROUP.digest)))
        await post(stray := enveloped(Ping(nonce=1), head_of(bytes(32))))
        refused = [one for one in meeting[0].events if isinstance(one, MessageRefused)]
        assert [(one.other, one.reason) for one in refused] == [(me, "wrong group")]
        assert not averaging[0].refused
        assert nodes[0].router.down_bytes - before[0] >= len(stray)
        assert me not in {*nodes[0].membership.live, *meeting[0].membership.live}
        meeting[0].stop()
        await until(lambda: not meeting[1].membership.live)
        version = nodes[0].agreed[0].version
        await until(lambda: nodes[0].agreed[0].version > version, step)
