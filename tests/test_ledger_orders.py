"""Law 2, conservation, where peers miss rounds and replay them: in whatever order commits, aborts, misses and
replays come, every drift is in the agreed parameters once, or still in its peer's live ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.node.ledger import PartWeights
from p2p_co2.tensors.aggregation import mean_of_parts
from tests.test_trainer_ledger import BLOCK, PLAIN, Simulated, run_config

BLOCKS, NAMES = 2, "abc"


def average(
    data: st.DataObject, peer: Simulated, offers: dict[str, bytes], counted: dict[str, Tensor], moved: Tensor
) -> tuple[bytes, list[PartWeights]]:
    """The mean of some of the offers in each block, and who is in it."""
    pieces, parts, code = [], [], peer.codec
    for block in range(BLOCKS):
        inside = data.draw(st.lists(st.sampled_from(sorted(offers)), min_size=1, unique=True))
        where = slice(block * BLOCK, (block + 1) * BLOCK)
        cut = slice(block * code.block_bytes, (block + 1) * code.block_bytes)
        slices = {name: offers[name][cut] for name in sorted(inside)}
        mean = bytes(mean_of_parts(code, [(name, 1.0, piece) for name, piece in slices.items()]))
        for name, piece in slices.items():
            counted[name][where] -= code.decode(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        moved[where] -= code.decode(torch.frombuffer(bytearray(mean), dtype=torch.uint8))
        pieces.append(mean)
        parts.append(PartWeights(block, block + 1, dict.fromkeys(slices, 1.0)))
    return b"".join(pieces), parts


@pytest.mark.parametrize(
    ("rule", "codec"), [("keep", "fp32"), ("keep", "int4"), ("co2", "fp32"), ("eager", "fp32")]
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_order_of_commits_misses_and_replays_loses_or_doubles_work(
    data: st.DataObject, rule: str, codec: str
) -> None:
    """A peer that missed a commit trains on, with its offer in flight that was counted there or not."""
    run = run_config(PLAIN.model_copy(update={"rule": rule}), codec, feedback=codec == "int4")
    peers = {name: Simulated(name, run, torch.zeros(BLOCK * BLOCKS)) for name in NAMES}
    drift = {name: torch.zeros(BLOCK * BLOCKS) for name in NAMES}
    counted = {name: torch.zeros(BLOCK * BLOCKS) for name in NAMES}
    moved = torch.zeros(BLOCK * BLOCKS)
    made: list[tuple[bytes, list[PartWeights]]] = []

    def train(name: str) -> None:
        step = torch.arange(BLOCK * BLOCKS) % 7 - float(data.draw(st.integers(-4, 4)))
        peers[name].live = peers[name].live + step
        drift[name] += step

    def catch_up(name: str) -> None:
        while (version := peers[name].ledger.state.version) < len(made):
            peers[name].commit(*made[version])

    for _ in range(data.draw(st.integers(1, 6))):
        offers: dict[str, bytes] = {}
        for name, peer in peers.items():
            train(name)
            if peer.ledger.state.version == len(made) and not peer.ledger.has_offered:
                offers[name] = peer.offer()
            if data.draw(st.booleans()):
                train(name)
        if not offers or data.draw(st.integers(0, 3)) == 0:
            for name in offers:
                peers[name].give_up()
            continue
        made.append(average(data, peers["a"], offers, counted, moved))
        for name in NAMES:
            if data.draw(st.booleans()):
                catch_up(name)
    for name, peer in peers.items():
        catch_up(name)
        torch.testing.assert_close(peer.ledger.state.params, moved, rtol=1e-5, atol=1e-3)
        assert torch.equal(peer.ledger.state.params, peers["a"].ledger.state.params)
        sent = peer.codec.decode(torch.frombuffer(bytearray(peer.offer()), dtype=torch.uint8))
        left = peer.ledger.residual[:] if peer.ledger.residual is not None else 0.0
        # What is offered next is all that is not counted; of int4 what its residual keeps.
        near = 1e-3 if codec == "fp32" else 0.1 * float(drift[name].abs().max() + 1)
        torch.testing.assert_close(-(sent + left), drift[name] - counted[name], rtol=1e-5, atol=near)
