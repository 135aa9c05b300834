"""One process in two groups over one set of carriers, over real sockets of this machine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from p2p_co2.config import PeerConfig
from p2p_co2.net.transport.base import Carrier, OnMessage, OnRefused
from p2p_co2.net.transport.grpc_carrier import GrpcCarrier
from p2p_co2.node.environment import Environment
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord
from tests.fuzz.world import RUN, Trainer, make_identity

OTHER_GROUP = hashlib.sha256(b"another group of the run").digest()
STEP_S, WITHIN_S = 0.02, 60.0


class Loopback:
    """``PeerNetwork`` over gRPC on this machine; ``listed`` is what all of them find."""

    software = "test"

    def __init__(self, name: str, listed: dict[str, PeerRecord]) -> None:
        self.identity, self.config, self.run = make_identity(name), PeerConfig(), RUN
        self.carrier = GrpcCarrier(self.identity, RUN.digest(), "127.0.0.1", 0)
        self.carriers: Sequence[Carrier] = (self.carrier,)
        self.starts, self._listed = 0, listed

    async def start_carriers(self, on_message: OnMessage, on_refused: OnRefused) -> None:
        self.starts += 1
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


async def test_a_process_in_two_groups_makes_rounds_in_both_and_none_hears_the_other() -> None:
    listed: dict[str, PeerRecord] = {}
    nets = {name: Loopback(name, listed) for name in ("a", "both", "b")}
    here = Environment(nets["both"])
    trainers = {
        "a": Trainer(None, "a", Environment(nets["a"])),
        "both, in a's": Trainer(None, "both", here),
        "both, in b's": Trainer(None, "both", here.beside(OTHER_GROUP)),
        "b": Trainer(None, "b", Environment(nets["b"]).beside(OTHER_GROUP)),
    }
    pairs = [("a", "both, in a's"), ("b", "both, in b's")]
    nodes = [asyncio.create_task(trainer.node.run()) for trainer in trainers.values()]

    def has_met() -> bool:
        return all(trainers[name].node.membership.live for pair in pairs for name in pair)

    def has_exchanged() -> bool:
        states = [[trainers[name].node.agreed for name in pair] for pair in pairs]
        return all(one == other and min(version.version for version in one) > 1 for one, other in states)

    try:
        async with asyncio.timeout(WITHIN_S):
            while not has_met():  # noqa: ASYNC110 (sockets set no event)
                await asyncio.sleep(STEP_S)
            while not has_exchanged():
                for trainer in trainers.values():
                    trainer.step()
                await asyncio.sleep(STEP_S)
        for pair in pairs:
            mine, theirs = (trainers[name] for name in pair)
            assert set(mine.node.membership.live) == {theirs.me}
            assert set(theirs.node.membership.live) == {mine.me}
        digests = [trainers[name].node.agreed[0].digest for name in ("a", "b")]
        assert digests[0] != digests[1], "two groups have two histories"
        assert not any(trainer.refused for trainer in trainers.values()), (
            "nobody is blamed for the other group"
        )
        assert [net.starts for net in nets.values()] == [1, 1, 1]
    finally:
        for trainer in trainers.values():
            trainer.node.stop()
        await asyncio.gather(*nodes)
        for net in nets.values():
            await net.carrier.close()
