"""What the tensor side of one peer does on its worker thread, for the network thread and for training."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from p2p_co2.errors import DigestMismatch, RemoteProtocolError
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, PartWeights, SliceRefused
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.agreed import state_bytes
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.fragment_state import FragmentState
from p2p_co2.trainer.worker import TensorWorker
from tests.test_fragment_state import BLOCK, run_config


def make_ledger(peer: str = "a") -> TensorWorker:
    run = run_config()
    codec = get_codec("fp32")
    return TensorWorker(codec, [FragmentState(run, codec, peer, outer.init(torch.zeros(BLOCK)))])


def filled(value: float) -> bytes:
    return torch.full((BLOCK,), value).numpy().tobytes()


async def test_what_is_agreed_is_not_flushed_to_zero_where_the_program_asks_for_that() -> None:
    tiny = filled(2.0**-140)
    torch.set_flush_denormal(True)
    try:
        ledger = make_ledger()
        mean = (await ledger.reduce(0, [("a", 1.0, tiny), ("b", 1.0, tiny)])).mean
    finally:
        torch.set_flush_denormal(False)
    assert bytes(mean) == tiny
    ledger.close()


async def test_a_hostile_slice_is_refused_and_named() -> None:
    ledger = make_ledger()
    good = torch.ones(BLOCK).numpy().tobytes()
    bad = torch.full((BLOCK,), math.nan).numpy().tobytes()
    with pytest.raises(SliceRefused) as refused:
        await ledger.reduce(0, [("a", 1.0, good), ("mallory", 1.0, bad)])
    assert refused.value.peer == "mallory"
    assert (await ledger.reduce(0, [("a", 1.0, good)])).mean == good
    ledger.close()


async def test_commits_out_of_turn_change_nothing() -> None:
    ledger = make_ledger()
    before = ledger.agreed()[0]
    parts = (PartWeights(0, 1, {"b": 1.0}),)
    mean = AgreedMean(0, 5, 4, before.digest, torch.ones(BLOCK).numpy().tobytes(), parts)
    assert await ledger.commit(mean) == before
    upon_another = replace(mean, round=1, base_version=0, state_digest=bytes(32))
    assert await ledger.commit(upon_another) == before, "a state was taken over while it was on its way"
    assert ledger.outcomes.empty()
    assert (await ledger.commit(replace(upon_another, state_digest=before.digest))).version == 1
    ledger.close()


async def test_export_and_adopt_are_the_same_state_and_lies_are_refused() -> None:
    donor, late = make_ledger(), make_ledger()
    start, parts = donor.agreed()[0].digest, (PartWeights(0, 1, {"b": 1.0}),)
    mean = AgreedMean(0, 1, 0, start, torch.ones(BLOCK).numpy().tobytes(), parts)
    await donor.commit(mean)
    version, exported = await donor.export(0)
    data = exported[:]
    assert [exported[70:80], exported[582:586], len(exported)] == [data[70:80], data[582:586], len(data)]
    with pytest.raises(DigestMismatch):
        await late.adopt(0, data, AgreedVersion(1, bytes(32)))
    with pytest.raises(RemoteProtocolError):
        await late.adopt(0, data[:-1], version)
    assert late.agreed()[0].version == 0
    assert await late.adopt(0, data, version) == version
    await donor.commit(replace(mean, round=2, base_version=1, state_digest=version.digest))
    assert exported[:] == data == state_bytes(late.states()[0])  # the export stays as it was
    with pytest.raises(RemoteProtocolError):
        await donor.adopt(0, data, version)  # an older one: only for who goes back to most others
    assert await donor.adopt(0, data, version, goes_back=True) == version == donor.agreed()[0]
    donor.close()
    late.close()


async def test_a_state_that_a_round_made_meanwhile_is_not_taken_over_and_offers_go_on() -> None:
    """It was fetched before the network thread heard of the round, and the next offer is made already."""
    ledger = make_ledger()
    snapshot = torch.ones(BLOCK)
    start, parts = ledger.agreed()[0].digest, (PartWeights(0, 1, {"b": 1.0}),)
    offer = AgreedMean(0, 1, 0, start, snapshot.numpy().tobytes(), parts)
    version = await ledger.commit(offer)
    _, state = await ledger.export(0)
    ledger.submit_offer(0, snapshot, 1.0, 1, lambda *encoded: None).result()
    told = ledger.outcomes.qsize()
    assert await ledger.adopt(0, state[:], version) == version
    assert ledger.outcomes.qsize() == told
    await ledger.abort(0, b"")
    assert ledger.outcomes.qsize() == told + 1  # it was in flight still
    ledger.close()


@pytest.mark.parametrize("is_kept", [True, False])
async def test_work_in_a_round_upon_a_state_that_was_exchanged_is_offered_once(is_kept: bool) -> None:
    """The round commits with this peer in it while it goes over to the other half of a split; then it comes
    back. If it had not kept that work, which an earlier attempt may have counted, what it did since stays."""
    mine, here, there = make_ledger(), make_ledger("here"), make_ledger("there")
    start, live, payloads = mine.agreed()[0].digest, torch.zeros(BLOCK), list[bytes]()

    def take() -> None:
        while mine.outcomes.qsize():
            if (merge := mine.outcomes.get_nowait().merge) is not None:
                live.mul_(merge.keep).add_(merge.addend)

    first = AgreedMean(0, 1, 0, start, filled(0.0), (PartWeights(0, 1, {"b": 1.0}),))
    version = await mine.commit(first)
    await here.commit(first)
    await there.commit(replace(first, mean=filled(-10.0)))
    take()
    live += 1.0
    told = live.clone()
    mine.submit_offer(
        0, told, 7.0, 1, lambda _, offer, agreed: payloads.append(bytes(offer.payload))
    ).result()
    take()
    if not is_kept:
        await mine.doubt(0)
    other, data = await there.export(0)
    await mine.adopt(0, data[:], other)
    take()
    second = AgreedMean(0, 2, 1, version.digest, payloads[0], (PartWeights(0, 1, {"a": 7.0}),))
    assert await mine.commit(second) == other
    live += 0.5
    newest = await here.commit(second)
    await mine.adopt(0, (await here.export(0))[1][:], newest)
    take()
    to_offer = live - mine.states()[0].params
    assert torch.allclose(to_offer, torch.full((BLOCK,), 0.0 if is_kept else 0.5))
    for ledger in (mine, here, there):
        ledger.close()


def test_parameters_that_are_not_finite_are_reset_to_the_agreed_ones() -> None:
    ledger = make_ledger()
    called = []
    snapshot = torch.full((BLOCK,), math.nan)
    future = ledger.submit_offer(0, snapshot, 1.0, 0, lambda *offer: called.append(offer))
    future.result()
    outcome = ledger.outcomes.get_nowait()
    assert not called
    assert outcome.merge is not None
    assert outcome.merge.keep == 0.0
    assert "not finite" in outcome.trouble
    ledger.close()


def test_the_worker_is_one_thread_and_close_ends_it() -> None:
    ledger = make_ledger()
    asyncio.run(ledger.export(0))
    worker = ledger.thread
    ledger.close()
    assert not any(thread.is_alive() for thread in worker._threads)
