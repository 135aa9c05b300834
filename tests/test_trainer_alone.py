"""What a peer did alone, when it goes over to the others' state: its work is offered again, once; and nothing
of it that somebody else may have."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.node.ledger import PartWeights, agreed_mean
from p2p_co2.protocol.wire.messages_pb2 import Outcome
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import mean_of_parts
from p2p_co2.trainer.offered import FromMean
from tests.test_trainer_ledger import BLOCK, PLAIN, Simulated, run_config

SIZE = 2 * BLOCK
MINE, OURS = [PartWeights(0, 2, {"a": 1.0})], [PartWeights(0, 2, {"a": 1.0, "b": 1.0})]
THEIRS = outer.init(torch.full((SIZE,), 100.0))


def learn(
    peer: Simulated, parts: list[PartWeights] = MINE, by: Tensor | float = 0.0, is_alone: bool = True
) -> Tensor:
    """An inner step and a round; the mean that it applied."""
    peer.live = peer.live + by
    mean = bytes(mean_of_parts(peer.codec, [("a", 1.0, peer.offer())]))
    peer.commit(mean, parts, is_alone=is_alone)
    return peer.codec.decode(torch.frombuffer(bytearray(mean), dtype=torch.uint8))


def go_over(peer: Simulated, is_unshared: bool = True) -> Tensor:
    """To another state of this version; how much further the live parameters are for that nobody has it."""
    theirs = THEIRS._replace(version=peer.ledger.state.version)
    known = deepcopy(peer)
    known.take(known.ledger.adopt(theirs))
    peer.take(peer.ledger.adopt(theirs, None, is_unshared))
    return peer.live - known.live


@pytest.mark.parametrize(("codec", "feedback"), [("fp32", False), ("int4", False), ("int4", True)])
@pytest.mark.parametrize("rule", ["keep", "blend", "co2", "eager"])
def test_what_lonely_rounds_applied_goes_back_into_the_live_parameters(
    rule: str, codec: str, feedback: bool
) -> None:
    config = OuterConfig(rule=rule, lr=0.7, momentum=0.5)  # type: ignore[arg-type]
    twins = []
    for is_unshared in (True, False):
        torch.manual_seed(4)
        peer = Simulated("a", run_config(config, codec, feedback), torch.randn(SIZE))
        learn(peer, OURS, by=torch.randn(SIZE))
        applied = sum((learn(peer, by=torch.randn(SIZE)) for _ in range(4)), torch.zeros(SIZE))
        peer.take(peer.ledger.adopt(THEIRS._replace(version=5), None, is_unshared))
        twins.append(peer.live)
    torch.testing.assert_close(twins[0] - twins[1], -applied, rtol=0, atol=0.02)
    assert torch.equal(go_over(peer), torch.zeros(SIZE))  # once


def test_the_next_offer_is_all_that_was_learned_alone() -> None:
    """Law 2, at outer lr 1 and no momentum: each drift once, and that of rounds with others not again."""
    peer = Simulated("a", run_config(PLAIN), torch.zeros(SIZE))
    learn(peer, OURS, by=1.0)
    for by in (2.0, 4.0, 8.0):
        learn(peer, by=by)
    peer.live = peer.live + 16.0
    go_over(peer)
    assert torch.equal(peer.live - peer.ledger.state.params, torch.full((SIZE,), 30.0))


@pytest.mark.parametrize(("codec", "first"), [("int4", 0), ("int8", 0), ("fp16", 0), ("fp32", 2)])
def test_the_first_lonely_round_is_kept_as_the_mean_that_a_donor_holds_and_several_as_half_a_copy(
    codec: str, first: int
) -> None:
    """In bytes for each value, beside the mean itself."""
    peer = Simulated("a", run_config(PLAIN, codec), torch.zeros(SIZE))
    alone = peer.ledger._alone
    learn(peer, by=1.0)
    mean_bytes = peer.codec.payload_bytes(SIZE)
    assert alone.held_bytes == (first * SIZE if first else mean_bytes)
    assert isinstance(alone._sum, FromMean) is not bool(first)
    learn(peer, by=2.0)
    assert alone.held_bytes == 2 * SIZE
    learn(peer, OURS)
    assert alone.held_bytes == 0


def with_others(peer: Simulated) -> None:
    learn(peer, OURS, by=1.0)


def in_a_group(peer: Simulated) -> None:
    """The others' slices came too late, the mean is theirs as well."""
    learn(peer, by=1.0, is_alone=False)


def given_up_before(peer: Simulated) -> None:
    """Another attempt at the round may hold the work."""
    peer.live = peer.live + 1.0
    peer.offer()
    peer.give_up()
    peer.weight = 2.0
    learn(peer, [PartWeights(0, 2, {"a": 2.0})])


def in_doubt(peer: Simulated) -> None:
    peer.ledger.in_doubt = True
    learn(peer, by=1.0)


def resumed(peer: Simulated) -> None:
    peer.ledger.is_resumed = True
    learn(peer, by=1.0)


@pytest.mark.parametrize("then", [with_others, in_a_group, given_up_before, in_doubt, resumed])
def test_what_others_may_have_stays_where_it_is(then: Callable[[Simulated], None]) -> None:
    peer = Simulated("a", run_config(PLAIN), torch.zeros(SIZE))
    learn(peer, by=2.0)
    then(peer)
    peer.weight = 1.0
    learn(peer, by=4.0)
    assert torch.equal(go_over(peer), torch.full((SIZE,), 4.0))


def test_rounds_that_were_given_to_others_stay_where_they_are() -> None:
    peer = Simulated("a", run_config(PLAIN), torch.zeros(SIZE))
    learn(peer, by=2.0)
    assert torch.equal(go_over(peer, is_unshared=False), torch.zeros(SIZE))
    assert torch.equal(go_over(peer), torch.zeros(SIZE))


@pytest.mark.parametrize(("members", "is_alone"), [("a", True), ("ab", False)])
def test_a_round_is_made_alone_where_nobody_else_is_in_its_group(members: str, is_alone: bool) -> None:
    outcome = Outcome()
    for name in members:
        outcome.members.add(peer=name)
    outcome.parts.add(stop_block=2).contributors.add(peer="a", weight=1.0)
    assert agreed_mean(outcome, b"").is_alone is is_alone
