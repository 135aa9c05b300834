"""The tensor side of one peer: by hand, then the laws of ALGORITHMS.md 2, 3 and 5 over several peers, then
faults."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.config import CodecConfig, OuterConfig, RunConfig
from p2p_co2.errors import LocalProtocolError
from p2p_co2.node.ledger import PartWeights
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import mean_of_parts
from p2p_co2.tensors.checkpoint import state_digest
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.outer import Merge
from p2p_co2.trainer.fragment_ledger import FragmentLedger
from p2p_co2.trainer.ledger import TensorLedger
from p2p_co2.trainer.offered import held_bytes

PLAIN = OuterConfig(rule="keep", lr=1.0, momentum=0.0, nesterov=False, gap_penalty=False, clip="none")
BLOCK = 128


def run_config(outer_config: OuterConfig = PLAIN, codec: str = "fp32", feedback: bool = False) -> RunConfig:
    return RunConfig(
        outer=outer_config,
        codec=CodecConfig.model_validate({"name": codec, "error_feedback": feedback}),
    )


class Simulated:
    """A peer: its ledger and its live parameters, one fragment of ``n`` values."""

    def __init__(self, name: str, run: RunConfig, start: Tensor) -> None:
        self.name, self.codec = name, get_codec(run.codec.name)
        self.ledger = FragmentLedger(run, self.codec, name, outer.init(start))
        self.live = start.clone()
        self.weight = 1.0

    def take(self, merge: Merge | None) -> None:
        if merge is not None:
            self.live = self.live * merge.keep + merge.addend

    def offer(self) -> bytes:
        offer = self.ledger.offer(self.live.clone(), self.weight)
        self.take(offer.merge)
        return offer.payload

    def give_up(self) -> None:
        """The last offer came to nothing."""
        self.take(self.ledger.abort(self.ledger.state.version + 1, self.weight)[1])

    def commit(self, mean: bytes, parts: list[PartWeights], base_version: int | None = None) -> None:
        round_ = self.ledger.state.version + 1
        decoded = self.codec.decode(torch.frombuffer(bytearray(mean), dtype=torch.uint8))
        base = round_ - 1 if base_version is None else base_version
        self.take(self.ledger.commit(round_, base, lambda: decoded, parts, mean).merge)


def everybody(peers: list[Simulated], blocks: int) -> list[PartWeights]:
    return [PartWeights(0, blocks, {peer.name: 1.0 for peer in peers})]


def test_two_peers_meet_in_the_middle_and_keep_what_they_learned_since() -> None:
    start = torch.zeros(BLOCK)
    run = run_config()
    a, b = Simulated("a", run, start), Simulated("b", run, start)
    a.live += 2.0
    b.live += 4.0
    payloads = [("a", 1.0, a.offer()), ("b", 1.0, b.offer())]
    a.live += 10.0  # an inner step while the round travels
    mean = mean_of_parts(a.codec, payloads)
    for peer in (a, b):
        peer.commit(mean, everybody([a, b], 1))
        assert torch.equal(peer.ledger.state.params, torch.full((BLOCK,), 3.0))
    assert torch.equal(a.live, torch.full((BLOCK,), 13.0))
    assert torch.equal(b.live, torch.full((BLOCK,), 3.0))


def test_one_peer_alone_trains_as_if_there_were_no_swarm() -> None:
    """Law 3: keep, outer lr 1, no momentum."""
    torch.manual_seed(0)
    start = torch.randn(BLOCK * 2)
    peer, local = Simulated("a", run_config(), start), start.clone()
    for _ in range(10):
        step = torch.randn(BLOCK * 2) * 0.01
        peer.live, local = peer.live + step, local + step
        peer.commit(mean_of_parts(peer.codec, [("a", 1.0, peer.offer())]), everybody([peer], 2))
    torch.testing.assert_close(peer.live, local, rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rule=st.sampled_from(["keep", "co2"]))
def test_every_committed_drift_counts_exactly_once(data: st.DataObject, rule: str) -> None:
    """Law 2, conservation: whatever is counted, missed in part or aborted, the agreed parameters plus what is
    still in live parameters and in flight equals the start plus all drift, each peer's once."""
    config = PLAIN.model_copy(update={"rule": rule})
    run, blocks = run_config(config), 2
    start = torch.zeros(BLOCK * blocks)
    peers = [Simulated(name, run, start) for name in "abc"]
    total = {peer.name: torch.zeros_like(start) for peer in peers}
    counted = {peer.name: torch.zeros_like(start) for peer in peers}
    offered = {peer.name: torch.zeros_like(start) for peer in peers}
    number = 0
    for _ in range(data.draw(st.integers(1, 8))):
        offers: dict[str, bytes] = {}
        for peer in peers:
            number += 1
            peer.live = peer.live + number
            total[peer.name] += number
            offers[peer.name] = peer.offer()
        for peer in peers:  # an inner step while the round travels
            if data.draw(st.booleans()):
                peer.live = peer.live + 1
                total[peer.name] += 1
        if data.draw(st.booleans()):
            for peer in peers:
                peer.give_up()
            continue
        parts, pieces = [], []
        for block in range(blocks):
            inside = data.draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True))
            size = peers[0].codec.block_bytes
            slices = [(name, 1.0, offers[name][block * size : (block + 1) * size]) for name in inside]
            pieces.append(mean_of_parts(peers[0].codec, slices))
            parts.append(PartWeights(block, block + 1, dict.fromkeys(inside, 1.0)))
            where = slice(block * BLOCK, (block + 1) * BLOCK)
            for name in inside:
                gradient = torch.frombuffer(
                    bytearray(offers[name][block * size : (block + 1) * size]), dtype=torch.float32
                )
                counted[name][where] -= gradient / len(inside)
                offered[name][where] -= gradient
        for peer in peers:
            peer.commit(b"".join(pieces), parts)
    moved = sum(counted.values(), torch.zeros_like(start))
    for peer in peers:
        torch.testing.assert_close(peer.ledger.state.params, start + moved, rtol=1e-5, atol=1e-3)
        if rule == "keep":  # what is not counted yet is still in the live parameters
            rest = total[peer.name] - offered[peer.name]
            torch.testing.assert_close(peer.live, peer.ledger.state.params + rest, rtol=1e-5, atol=1e-3)


def test_an_aborted_round_changes_nothing_and_the_work_is_offered_again() -> None:
    """Law 5, for both families of rules."""
    for rule in ("keep", "co2"):
        start = torch.zeros(BLOCK)
        peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), start)
        peer.live += 5.0
        first = peer.offer()
        peer.give_up()
        assert peer.ledger.state.version == 0
        assert torch.equal(peer.live, torch.full((BLOCK,), 5.0)), rule
        assert peer.offer() == first, rule


def test_co2_is_one_step_stale_and_pays_the_gap_penalty() -> None:
    config = PLAIN.model_copy(update={"rule": "co2", "gap_penalty": True})
    peer = Simulated("a", run_config(config), torch.zeros(BLOCK))
    peer.live += 1.0
    mean = peer.offer()
    peer.live += 1.0  # trained while the first round travels
    peer.commit(mean, everybody([peer], 1))
    assert torch.equal(peer.ledger.state.params, torch.ones(BLOCK))
    offer = peer.ledger.offer(
        peer.live.clone(), 1.0
    )  # the boundary: measured from version 0, met by version 1
    assert (offer.round, offer.base_version) == (2, 0)
    peer.take(offer.merge)
    assert torch.equal(peer.live, torch.ones(BLOCK))
    decoded = peer.codec.decode(torch.frombuffer(bytearray(offer.payload), dtype=torch.uint8))
    applied = peer.ledger.commit(2, 0, lambda: decoded, everybody([peer], 1), offer.payload)
    assert applied.report.gap == pytest.approx(2.0)  # moved as far as the gradient is long


def test_residuals_advance_only_where_the_offer_was_counted() -> None:
    run = run_config(codec="int4", feedback=True)
    torch.manual_seed(1)
    peer = Simulated("a", run, torch.zeros(BLOCK * 2))
    peer.live += torch.randn(BLOCK * 2)
    payload = peer.offer()
    parts = [PartWeights(0, 1, {"a": 1.0}), PartWeights(1, 2, {"b": 1.0})]
    peer.commit(payload, parts)
    residual = peer.ledger.residual
    assert residual is not None
    assert residual[:BLOCK].abs().sum() > 0
    assert residual[BLOCK:].abs().sum() == 0
    before = residual[:]
    peer.offer()
    peer.ledger.abort(2, peer.weight)
    assert peer.ledger.residual is residual
    assert torch.equal(residual[:], before)


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_at_a_boundary_what_was_sent_and_the_residual_are_all_of_the_work(rule: str) -> None:
    """Nothing else is kept of an offer in flight. Where it comes to nothing, what was sent comes back."""
    torch.manual_seed(2)
    run = run_config(PLAIN.model_copy(update={"rule": rule}), codec="int4", feedback=True)
    peer, worked = Simulated("a", run, torch.zeros(BLOCK * 2)), torch.zeros(BLOCK * 2)
    for _ in range(3):
        drift = torch.randn(BLOCK * 2)
        peer.live, worked = peer.live + drift, worked + drift
        peer.offer()
        assert peer.ledger._in_flight is not None
        assert held_bytes(peer.ledger._in_flight.gradient) == 0
        peer.give_up()
    assert peer.ledger.residual is not None
    all_of_it = peer.live - peer.ledger.residual[:]
    # A residual is kept to an eighth of its block's largest value.
    assert (worked - all_of_it).norm() < 0.05 * worked.norm()
    assert (worked - all_of_it).norm() < 0.5 * (worked - peer.live).norm()


THERE = outer.init(torch.full((2 * BLOCK,), 100.0))._replace(version=7)
NOBODY, HALF = PartWeights(0, 2, {"b": 1.0}), (PartWeights(0, 1, {"a": 1.0}), PartWeights(1, 2, {"b": 1.0}))


@pytest.mark.parametrize("rule", ["keep", "co2"])
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize(
    ("parts", "first", "second"),
    [
        ((NOBODY,), 106.0, 106.0),  # the outcome says that the offer came to nothing: all is kept
        ((PartWeights(0, 2, {"a": 1.0}),), 101.0, 101.0),  # counted: only what came after it is kept
        (HALF, 101.0, 106.0),
        (None, 101.0, 101.0),  # nobody knows: it must not count twice
        ((PartWeights(0, 2, {"a": 9.0}),), 100.0, 100.0),  # one that we do not know was counted
        ((PartWeights(0, 2, {"a": 0.2}, {"a": 1.0}),), 101.0, 101.0),  # ours, for less than it asked
    ],
)
def test_adopting_a_newer_state_counts_the_last_offer_at_most_once(
    rule: str, given_up: bool, parts: tuple[PartWeights, ...] | None, first: float, second: float
) -> None:
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(2 * BLOCK))
    peer.live += 5.0
    peer.offer()
    if given_up:
        peer.give_up()
    peer.live += 1.0
    peer.take(peer.ledger.adopt(THERE, parts))
    assert torch.equal(peer.live, torch.cat([torch.full((BLOCK,), first), torch.full((BLOCK,), second)]))
    assert peer.ledger.state.version == 7
    peer.offer()  # nothing is in flight any more


@pytest.mark.parametrize("rule", ["keep", "co2"])
@pytest.mark.parametrize("version", [1, 7])
def test_a_state_in_which_a_rival_attempt_counted_our_offer_does_not_count_it_twice(
    rule: str, version: int
) -> None:
    """Ours was in one attempt at round 1, another one committed; then we go over to the first one's
    history."""
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(2 * BLOCK))
    peer.live += 5.0
    peer.offer()
    peer.give_up()
    peer.ledger.in_doubt = True
    peer.take(peer.ledger.commit(1, 0, lambda: torch.full((2 * BLOCK,), -1.0), (NOBODY,), b"").merge)
    assert rule != "keep" or torch.equal(peer.live, torch.full((2 * BLOCK,), 6.0))  # not counted in this one
    theirs = outer.init(torch.full((2 * BLOCK,), 5.0))._replace(version=version)
    peer.take(peer.ledger.adopt(theirs, (NOBODY,)))
    assert torch.equal(peer.live, theirs.params)
    assert not peer.ledger.in_doubt


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_a_doubt_ends_when_a_later_offer_is_counted_whole(rule: str) -> None:
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(2 * BLOCK))
    peer.ledger.in_doubt = True
    peer.live += 5.0
    peer.offer()
    mean = torch.full((2 * BLOCK,), -5.0)
    parts = (PartWeights(0, 2, {"a": peer.weight}),)
    peer.take(peer.ledger.commit(1, 0, mean.clone, parts, mean.numpy().tobytes()).merge)
    assert not peer.ledger.in_doubt


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_a_doubt_does_not_end_when_only_an_earlier_offer_for_that_round_is_counted(rule: str) -> None:
    """The next one held more, and may be counted where the others are."""
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(2 * BLOCK))
    peer.live += 5.0
    peer.offer()
    parts = (PartWeights(0, 2, {"a": peer.weight}),)
    peer.give_up()
    peer.weight = 2 * peer.weight
    peer.live += 1.0
    peer.offer()
    peer.ledger.in_doubt = True
    mean = torch.full((2 * BLOCK,), -5.0)
    peer.take(peer.ledger.commit(1, 0, mean.clone, parts, mean.numpy().tobytes()).merge)
    assert peer.ledger.in_doubt


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_a_counted_offer_that_was_given_up_leaves_the_work_of_the_next_one(rule: str) -> None:
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(2 * BLOCK))
    peer.live += 5.0
    peer.offer()
    peer.give_up()
    peer.live += 1.0
    peer.weight = 2.0
    peer.offer()  # holds the first one's work too
    peer.take(peer.ledger.adopt(THERE, (PartWeights(0, 2, {"a": 1.0}),)))
    assert torch.equal(peer.live, torch.full((2 * BLOCK,), 101.0))


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_another_state_of_the_same_version_holds_no_open_offer(rule: str) -> None:
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(2 * BLOCK))
    peer.live += 5.0
    peer.offer()
    peer.take(peer.ledger.adopt(THERE._replace(version=0)))
    assert torch.equal(peer.live, torch.full((2 * BLOCK,), 105.0))


def test_a_resumed_peer_does_not_offer_again_what_its_last_process_may_have_offered() -> None:
    codec = get_codec("fp32")
    ledger = FragmentLedger(run_config(), codec, "a", outer.init(torch.zeros(2 * BLOCK)))
    other = TensorLedger(codec, [ledger])
    other.set_residuals({})
    other.close()
    assert ledger.adopt(THERE, (NOBODY,)).keep == 0.0  # and in the rounds after that one, nobody knows
    assert ledger.adopt(THERE._replace(version=8), (NOBODY,)).keep == 1.0


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_the_end_of_one_offer_does_not_end_the_next_one_for_the_same_round(rule: str) -> None:
    """News of the end may be on its way while the next offer is encoded."""
    peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(BLOCK))
    peer.live += 5.0
    peer.offer()
    peer.give_up()
    peer.weight = 2.0
    payload = peer.offer()
    for round_, weight in ((1, 1.0), (2, 2.0)):
        assert peer.ledger.abort(round_, weight) == (False, None)
    peer.commit(payload, [PartWeights(0, 1, {"a": 2.0})])
    assert torch.equal(peer.ledger.state.params, torch.full((BLOCK,), 5.0))


def test_an_offer_that_was_given_up_and_counted_after_all_counts_once() -> None:
    """A coordinator was lost and nobody decided; later its commit turns up."""
    for rule in ("keep", "co2"):
        peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(BLOCK))
        peer.live += 1.0
        payload = peer.offer()
        peer.give_up()
        peer.live += 2.0
        peer.weight = 2.0
        peer.offer()  # a later attempt at the same round holds the first one's work too
        peer.commit(payload, [PartWeights(0, 1, {"a": 1.0})])
        peer.offer() if rule == "co2" else None
        peer.give_up()
        assert torch.equal(peer.ledger.state.params, torch.ones(BLOCK)), rule
        assert torch.equal(peer.live, torch.full((BLOCK,), 3.0)), rule


def test_an_offer_from_before_a_restart_is_not_counted_twice() -> None:
    for rule in ("keep", "co2"):
        run = run_config(PLAIN.model_copy(update={"rule": rule}))
        before = Simulated("a", run, torch.zeros(BLOCK))
        before.live += 1.0
        payload = before.offer()
        again = Simulated("a", run, torch.zeros(BLOCK))
        again.live += 1.0  # as a checkpoint had it, before the commit
        again.commit(payload, [PartWeights(0, 1, {"a": 1.0})])
        assert torch.equal(again.live, torch.ones(BLOCK)), rule
        again.offer()
        assert torch.equal(again.live, torch.ones(BLOCK)), rule


def test_a_reset_peer_offers_nothing_under_any_rule() -> None:
    for rule in ("keep", "co2", "eager"):
        peer = Simulated("a", run_config(PLAIN.model_copy(update={"rule": rule})), torch.zeros(BLOCK))
        peer.live += 1.0
        peer.commit(peer.offer(), everybody([peer], 1))
        peer.live = torch.full((BLOCK,), math.nan)
        with pytest.raises(ValueError, match="finite"):
            peer.ledger.offer(peer.live.clone(), 1.0)
        peer.live = peer.ledger.reset().addend.clone()
        payload = peer.codec.decode(torch.frombuffer(bytearray(peer.offer()), dtype=torch.uint8))
        assert torch.equal(payload, torch.zeros(BLOCK)), rule


def test_a_mean_that_is_not_finite_is_skipped_by_everybody_alike() -> None:
    states = []
    for name in "ab":
        peer = Simulated(name, run_config(), torch.zeros(BLOCK))
        peer.live += 1.0
        peer.offer()
        bad = torch.full((BLOCK,), math.inf)
        applied = peer.ledger.commit(1, 0, bad.clone, everybody([peer], 1), b"")
        assert applied.refused
        peer.take(applied.merge)
        assert torch.equal(peer.live, torch.ones(BLOCK))
        states.append(state_digest(peer.ledger.state, LEAST_CHUNK_BYTES))
    assert states[0] == states[1]


def test_a_second_offer_while_one_is_in_flight_is_a_bug() -> None:
    peer = Simulated("a", run_config(), torch.zeros(BLOCK))
    peer.offer()
    with pytest.raises(LocalProtocolError, match="in flight"):
        peer.offer()
