"""What ``sync_delay_steps`` holds back from the live parameters, the test being the network."""

from __future__ import annotations

import asyncio

import pytest
import torch

from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.tensors.checkpoint import state_digest, state_view
from tests.test_trainer import Bench


@pytest.mark.parametrize("while_waiting", [True, False])
@pytest.mark.parametrize("starts_again", [True, False])
def test_what_is_held_back_is_met_before_a_state_that_is_loaded(
    starts_again: bool, while_waiting: bool
) -> None:
    """It was met after it: a second time, and the parameters counted as those of an older version."""
    made = Bench(sync_delay_steps=3)
    made.step(2)  # fragment 1 is sent
    made.commit(1)
    made.step()
    assert made.sync.versions == [0, 0]
    if starts_again:
        asyncio.run(made.ledger.doubt(1))
    state = made.ledger.states()[1]
    newer = state._replace(version=state.version + 1, params=state.params + 100.0)
    agreed = AgreedVersion(newer.version, state_digest(newer, LEAST_CHUNK_BYTES))
    asyncio.run(made.ledger.adopt(1, bytes(state_view(newer)), agreed))
    if while_waiting:  # for another fragment's first round
        made.sync._wait(made.ledger.outcomes.empty, 5.0)
    made.step()
    own_steps = float(while_waiting) if starts_again else 2.0  # since the offer, all of which is in the mean
    assert made.sync.versions == [0, 2]
    made.step(3)
    assert made.sync.versions == [0, 2]
    assert torch.allclose(made.exchanged.live.snapshot(1), newer.params + own_steps + 3.0, atol=1e-2)
    made.ledger.close()
