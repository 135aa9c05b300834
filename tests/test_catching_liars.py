"""node.catching against one liar that has a state of its own to give: nobody takes it by its word alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import Behind, Envelope
from p2p_co2.tensors.checkpoint import state_digest, state_from_bytes, state_view
from tests.fuzz.world import STEP_S, Trainer, World, run_virtual
from tests.round_network import forged_commit


async def go_astray(liar: Trainer, ahead: int) -> AgreedVersion:
    """The liar holds a state of its own making, ``ahead`` versions beyond what all hold."""
    agreed, data = await liar.ledger.export(0)
    state = state_from_bytes(data[0 : len(data)], liar.ledger._fragments[0].state.params.numel())
    wrong = state._replace(version=agreed.version + ahead, params=state.params + 1000.0)
    held = AgreedVersion(wrong.version, state_digest(wrong, LEAST_CHUNK_BYTES))
    await liar.node.deciding.adopt(0, state_view(wrong)[0 : len(data)], held)
    return held


def decision(liar: Trainer, honest: Trainer, lie: AgreedVersion) -> dict[str, Message]:
    agreed = honest.node.agreed[0]
    return {
        "decision": forged_commit(
            liar.identity, agreed.version + 1, agreed.digest, [liar.me],
            run=honest.node.run_digest, blocks=honest.node.shape.blocks[0],
        )
    }  # fmt: skip


def behind(liar: Trainer, honest: Trainer, lie: AgreedVersion) -> dict[str, Message]:
    round_ = honest.node.agreed[0].version + 1
    told = Behind(fragment=0, round=round_, version=lie.version, state_digest=lie.digest, donors=[liar.me])
    return {"behind": told}


@pytest.mark.parametrize("lie", [decision, behind])
def test_a_state_that_only_one_holds_is_nobodys(lie: Callable[..., dict[str, Message]]) -> None:
    """One signature named a round of its signer alone, which nobody took; then all took its state instead.
    And the coordinator of a round that all had to make could tell that it was over, for ever."""

    async def work() -> None:
        world = World("a", "b", "c", "liar")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(4)
        *honest, liar = world.trainers
        before, held = min(world.versions())[0], await go_astray(liar, 1)
        for _ in range(250):
            for trainer in honest:
                envelope = Envelope(version=PROTOCOL_VERSION, run=trainer.node.run_digest)
                envelope.MergeFrom(Envelope(**lie(liar, trainer, held)))
                await world.deliver(liar.me, trainer.me, envelope.SerializeToString())
                trainer.step()
            await asyncio.sleep(STEP_S)
            assert not any(trainer.node.agreed[0] == held for trainer in honest)
        assert min(world.versions())[0] > before + 2
        await world.close()

    run_virtual(work())
