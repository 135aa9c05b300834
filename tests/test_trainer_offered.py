"""What is read from the payload or the last step in place of being kept: against what it stands for."""

from __future__ import annotations

import gc
import weakref

import numpy
import pytest
import torch

from p2p_co2.config import CodecName, OuterConfig
from p2p_co2.node.ledger import PartWeights
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint import state_bytes
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.offered import FromPayload, FromStep, Sum, held_bytes
from p2p_co2.trainer.scaled_int4 import ScaledInt4
from tests.test_trainer_ledger import BLOCK, Simulated, run_config

SIZE = 5 * BLOCK - 3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("clip", ["none", "elementwise"])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_the_last_change_is_the_one_that_the_step_took(
    nesterov: bool, clip: str, codec: CodecName, kind: type[bytes] | type[bytearray]
) -> None:
    """The same bits: taken from the old parameters again, it gives the new ones."""
    torch.manual_seed(2)
    config = OuterConfig.model_validate(
        {"rule": "co2", "nesterov": nesterov, "clip": clip, "clip_phi": 0.5, "momentum": 0.7}
    )
    coder, state = get_codec(codec), outer.init(torch.randn(SIZE))
    for version in range(3):
        encoded = kind(coder.encode(torch.randn(SIZE)).numpy().tobytes())
        mean = coder.decode(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))[:SIZE]
        old = state
        state, report = outer.step(config, old, mean.clone(), max(0, version - 1))
        moved = FromStep(config, coder, encoded, state.momentum, report.gap)
        assert torch.equal(old.params - moved[:], state.params)
        assert (report.gap > 1.0) is (version > 0)
    for start, stop in ((0, 0), (3, 130), (127, 129), (SIZE - 1, SIZE), (SIZE - 1, SIZE + 9)):
        assert torch.equal(moved[start:stop], moved[:][start:stop])
    assert torch.equal(Sum(moved, torch.ones(SIZE))[3:200], moved[3:200] + 1.0)
    held = len(encoded) if nesterov else 0
    assert (held_bytes(moved), held_bytes(Sum(moved, torch.ones(SIZE)))) == (held, held + 4 * SIZE)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_after_the_round_what_was_counted_is_kept_in_four_bits_or_as_it_is(codec: CodecName) -> None:
    torch.manual_seed(3)
    coder, lost = get_codec(codec), ScaledInt4(SIZE)
    lost.set(slice(0, SIZE), torch.randn(SIZE))
    payload = coder.encode(torch.randn(SIZE))
    kept = FromPayload(coder, payload, SIZE, lost, lost, 0.9).as_counted()
    in_mean = coder.decode(payload)[:SIZE]
    if codec in {"fp32", "int4"}:
        assert torch.equal(kept[:], in_mean)
        assert held_bytes(kept) == 0
    else:
        assert bool(((kept[:] - in_mean).abs() <= in_mean.abs().max() * 2**-3).all())
        assert held_bytes(kept) == 5 * BLOCK // 2 + 5


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_eager_offers_nothing_of_its_correction_again(codec: CodecName) -> None:
    """What was added to the live parameters is what is taken off again, to the last bit that counts: a peer
    that learns nothing more offers nothing more."""
    torch.manual_seed(7)
    config = OuterConfig.model_validate({"rule": "eager", "gap_penalty": False})
    peer = Simulated("a", run_config(config, codec), torch.zeros(5 * BLOCK))
    others = [PartWeights(0, 5, {"a": 1.0, "b": 1.0})]
    for _ in range(2):
        peer.live = peer.live + torch.randn(5 * BLOCK)
        peer.commit(peer.offer(), others)
    peer.live = peer.live + torch.randn(5 * BLOCK)
    peer.commit(peer.offer(), others)  # live parameters hold a correction now
    assert peer.ledger._offset is not None
    assert float((peer.live - peer.ledger.state.params).abs().max()) > 0.1
    payload = peer.codec.decode(torch.frombuffer(bytearray(peer.offer()), dtype=torch.uint8))
    torch.testing.assert_close(payload, torch.zeros(5 * BLOCK), rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
def test_what_a_fine_codec_lost_stays_in_the_live_parameters_under_keep(codec: CodecName) -> None:
    """Laws 2 and 3 with any such codec: one peer alone trains as if there were no swarm, whatever its
    payloads say."""
    torch.manual_seed(4)
    config = OuterConfig(rule="keep", lr=1.0, momentum=0.0, nesterov=False, gap_penalty=False, clip="none")
    peer, local = Simulated("a", run_config(config, codec), torch.randn(BLOCK)), torch.zeros(BLOCK)
    local = peer.live.clone()
    for _ in range(20):
        step = torch.randn(BLOCK) * 0.1
        peer.live, local = peer.live + step, local + step
        peer.commit(peer.offer(), [PartWeights(0, 1, {"a": 1.0})])
        torch.testing.assert_close(peer.live, local, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["co2", "eager"])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_between_two_boundaries_only_the_mean_tells_how_far_the_agreed_parameters_moved(
    rule: str, codec: CodecName
) -> None:
    torch.manual_seed(5)
    size = 5 * BLOCK
    peer = Simulated("a", run_config(OuterConfig.model_validate({"rule": rule}), codec), torch.zeros(size))
    for _ in range(3):
        peer.live = peer.live + torch.randn(size)
        before, payload = peer.ledger.state.params.clone(), peer.offer()
        peer.commit(payload, [PartWeights(0, 5, {"a": 1.0})])
    offset = peer.ledger._offset
    assert offset is not None
    correction = 0 if rule == "co2" else 4 * size if codec == "fp32" else size // 2 + 5
    assert held_bytes(offset) == correction + len(payload)  # the mean: the donor's, as long as it keeps it
    if rule == "co2":  # where the live parameters set out is where the agreed ones were
        torch.testing.assert_close(peer.ledger.state.params + offset[:], before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_of_several_steps_between_two_boundaries_half_a_copy_is_kept_and_no_mean(rule: str) -> None:
    """A peer that catches up takes several: their means were half a copy more of fp16."""
    torch.manual_seed(5)
    size = 5 * BLOCK
    peer = Simulated("a", run_config(OuterConfig.model_validate({"rule": rule}), "fp16"), torch.zeros(size))
    peer.live = peer.live + torch.randn(size)
    peer.commit(peer.offer(), [PartWeights(0, 5, {"a": 1.0})])
    peer.live = peer.live + torch.randn(size)
    before = peer.ledger.state.params.clone()
    kept = []
    payloads = [peer.offer(), *(bytes(peer.codec.encode(torch.randn(size)).numpy()) for _ in range(2))]
    offset = peer.ledger._offset
    correction = torch.zeros(size) if offset is None else offset[:]
    for payload in payloads:
        mean = numpy.frombuffer(bytearray(payload), dtype=numpy.uint8)
        kept.append(weakref.ref(mean))
        peer.commit(mean.data, [PartWeights(0, 5, {"a" if len(kept) == 1 else "b": 1.0})])
        del mean
    gc.collect()
    assert [one() is None for one in kept] == [True] * 3
    offset = peer.ledger._offset
    assert offset is not None
    assert held_bytes(offset) == 2 * size
    was = peer.ledger.state.params + offset[:] - correction
    largest = float(offset[:].abs().max())  # fp16 rounds by 2^-12 of a value, three times
    torch.testing.assert_close(was, before, rtol=0, atol=3 * 2.0**-11 * largest)


@pytest.mark.parametrize("rule", ["co2", "eager"])
@pytest.mark.parametrize("is_lent", [False, True])
def test_a_commit_between_two_boundaries_makes_nothing_of_the_fragments_size(
    rule: str, is_lent: bool
) -> None:
    """Unless somebody holds the state; the same bits either way."""
    torch.manual_seed(6)
    config, size = OuterConfig.model_validate({"rule": rule}), 5 * BLOCK
    peer = Simulated("a", run_config(config, "fp16"), torch.zeros(size))
    other = outer.init(torch.zeros(size))
    for _ in range(3):
        peer.live = peer.live + torch.randn(size)
        payload = peer.offer()
        before = peer.ledger.lend() if is_lent else peer.ledger.state
        peer.commit(payload, [PartWeights(0, 5, {"a": 1.0})])
        mean = peer.codec.decode(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        other, _ = outer.step(config, other, mean, other.version)
        after = peer.ledger.state
        assert (after.params is before.params, after.momentum is before.momentum) == (not is_lent,) * 2
        assert state_bytes(after) == state_bytes(other)
