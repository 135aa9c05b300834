"""What the training thread and the tensor worker do, the test being their network: schedule, delays, bounds,
flush; means, states and lies."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2p_co2.config import ClockConfig
from p2p_co2.digest import digest_of_chunks
from p2p_co2.errors import ConfigError, DigestMismatch, RemoteProtocolError
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, PartWeights, SliceRefused
from p2p_co2.protocol.rounds import Offer
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.agreed import state_bytes, state_digest, state_view
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.synchroniser import SYSTEM
from p2p_co2.trainer.views import NodeView
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.schedule import (
    FIRST_ROUND_BOUND_S,
    FLUSH_FLOOR_S,
    SETTLE_S,
    STILL_LOADS,
    OfferState,
)
from tests.test_fragment_state import BLOCK, run_config
from tests.trainer_bench import LEDGERS, Bench, bench_on_virtual_time


@pytest.fixture(autouse=True)
def all_are_closed() -> Iterator[None]:
    yield
    while LEDGERS:
        LEDGERS.pop().close()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_fragments_are_sent_at_their_schedule_points(bench: Bench) -> None:
    bench.step(4)
    assert [offer.fragment for offer in bench.wire.offers] == [1, 0]  # at half a round, and at a whole one
    assert [offer.weight for offer in bench.wire.offers] == [20, 40]
    assert bench.sync.position == pytest.approx(1.0)


def test_a_snapshot_that_would_wait_behind_another_is_taken_later_and_training_does_not_wait(
    bench: Bench,
) -> None:
    release = threading.Event()
    bench.ledger.thread.submit(release.wait)

    def train(steps: int) -> None:
        for _ in range(steps):
            bench.sync.after_step(tokens=10, loss=1.0)

    train(5)  # fragment 1 is due at step 2, fragment 0 at step 4
    in_flight = list(bench.sync.account.in_flight)
    release.set()  # before anything may fail: a worker that waits would keep the process
    bench.ledger.states()
    assert in_flight == [1]
    train(1)  # fragment 1 is due again, and in flight
    bench.ledger.states()
    assert [(offer.fragment, int(offer.weight)) for offer in bench.wire.offers] == [(1, 20), (0, 60)]
    assert [fields["fragment"] for fields in bench.wire.seen(ev.SendSkipped)] == [1]
    train(2)  # it is not sent twice
    assert len(bench.wire.offers) == 2


def test_no_fragment_loses_its_rounds_where_more_are_due_than_steps_are_made() -> None:
    """Each went every second round: of two that were due in a step the second waited for its next point."""
    bench = Bench(8, ClockConfig(mode="time"))
    bench.sync.clock.position = lambda now, inner_steps: inner_steps / 4  # type: ignore[method-assign]
    for _ in range(40):
        bench.sync.after_step(tokens=10, loss=1.0)
        bench.ledger.agreed()
        for fragment in list(bench.sync.account.in_flight):
            bench.commit(fragment)
    sent = Counter(offer.fragment for offer in bench.wire.offers)
    assert set(sent) == set(range(8))
    assert min(sent.values()) >= 9


def test_a_point_that_passes_while_a_round_is_in_flight_is_skipped_and_the_work_carries_over(
    bench: Bench,
) -> None:
    bench.step(8)
    assert len(bench.wire.offers) == 2
    assert [fields["fragment"] for fields in bench.wire.seen(ev.SendSkipped)] == [1, 0]
    for fragment in (0, 1):
        bench.abort(fragment)
    bench.step(4)
    assert len(bench.wire.offers) == 4
    assert [offer.weight for offer in bench.wire.offers[2:]] == [100, 120]
    assert bench.wire.seen(ev.FragmentApplied) == []


def test_what_an_accelerator_had_to_compute_before_a_copy_is_trainings_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    bench = Bench(source=SYSTEM._replace(now=lambda: now_s[0]))
    snapshot = bench.exchanged.live.snapshot

    def queued_for_two_seconds(index: int) -> torch.Tensor:
        now_s[0] += 2.0
        bench.exchanged.live.computing_s += 1.5  # the rest is the copy
        return snapshot(index)

    monkeypatch.setattr(bench.exchanged.live, "snapshot", queued_for_two_seconds)
    bench.step(2)
    assert len(bench.wire.offers) == 1
    assert (bench.sync.figures.exposed_s, bench.sync.figures.train_s) == (0.5, 1.5)
    bench.exchanged.live.computing_s += 1.0  # before a checkpoint, whose time is neither's
    now_s[0] += 3.0
    bench.sync.pause(3.0)
    bench.step(1)
    assert (bench.sync.figures.exposed_s, bench.sync.figures.train_s) == (0.5, 1.5)


def test_on_a_full_line_the_next_fragment_is_sent_when_the_slices_of_the_last_have_left() -> None:
    """Its snapshot is taken then: of fresh work."""
    bench = bench_on_virtual_time(clock=ClockConfig(mode="time", round_s=4.0))

    def step(times: int) -> list[int]:
        for _ in range(times):
            bench.ledger.outcomes.now_s[0] += 1.0  # type: ignore[attr-defined]
            bench.step()
        return [offer.fragment for offer in bench.wire.offers]

    bench.wire.is_full = True
    assert step(3) == [1]
    bench.wire.stages[1] = "slices"
    assert step(2) == [1]  # fragment 0 is due at 4 s
    bench.wire.stages[1] = "means"
    assert step(1) == [1, 0]
    assert len(bench.wire.seen(ev.SendSkipped)) == 1  # at 6 s: fragment 1's is open


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_an_offer_that_crosses_a_replayed_round_is_not_made_and_the_work_stays(rule: str) -> None:
    """A peer that missed a round replays it; its commit may come between the snapshot and the encoding."""
    bench = Bench(rule=rule, lr=1.0, momentum=0.0, gap_penalty=False)
    submit = bench.ledger.submit_offer
    size = bench.ledger.states()[1].params.numel()

    def replay_first(*arguments: Any) -> Any:
        bench.ledger.submit_offer = submit  # type: ignore[method-assign]
        mean = torch.full((size,), -100.0).numpy().tobytes()  # the others moved by +100
        parts = (PartWeights(0, len(mean) // 512, {"other": 1.0}),)
        start = bench.ledger.agreed()[1].digest
        asyncio.run(bench.ledger.commit(AgreedMean(1, 1, 0, start, mean, parts)))
        return submit(*arguments)

    bench.ledger.submit_offer = replay_first  # type: ignore[method-assign]
    bench.step(2)  # fragment 1 is due
    assert bench.wire.offers == []
    bench.step(4)  # and due again, after fragment 0
    offers = [offer for offer in bench.wire.offers if offer.fragment == 1]
    assert [(offer.round, offer.weight) for offer in offers] == [(2, 60)]
    if rule == "keep":
        gradient = torch.frombuffer(bytearray(offers[0].payload), dtype=torch.float32)[:size]
        assert torch.allclose(gradient, torch.tensor(-6.0))  # its own six steps, and nothing of theirs
    bench.step(6)
    assert [fields["fragment"] for fields in bench.wire.seen(ev.SendSkipped)] == [0, 1, 0]  # still in flight


def test_sync_delay_steps_holds_a_mean_back() -> None:
    made = Bench(sync_delay_steps=3)
    made.step(2)
    made.commit(1)
    before = made.value()
    made.step(2)
    held = made.value() - before
    made.step()
    applied = made.wire.seen(ev.FragmentApplied)
    assert held == pytest.approx(2.0, abs=1e-3)
    assert applied[0]["sync_delay_steps"] == 3


def test_training_does_not_wait_but_for_the_first_rounds_and_those_are_bounded() -> None:
    made = bench_on_virtual_time(blocking_rounds=1)
    made.step(4)  # nobody answers: both first rounds run into their bound
    assert made.sync.figures.exposed_s == pytest.approx(2 * FIRST_ROUND_BOUND_S)
    for fragment in (0, 1):
        made.commit(fragment)
    made.sync.take_outcomes()
    exposed_s = made.sync.figures.exposed_s
    made.step(4)
    assert made.sync.figures.exposed_s == exposed_s
    stopped = bench_on_virtual_time(blocking_rounds=1)
    stopped.sync.stopped = True  # by a Ctrl-C, which may come at any moment
    stopped.step(2)
    assert len(stopped.wire.offers) == 1
    assert stopped.sync.figures.exposed_s == 0.0


def test_a_fault_of_the_network_thread_comes_up_in_the_next_step(bench: Bench) -> None:
    bench.wire.broken = OSError("the network thread died")
    with pytest.raises(OSError, match="network thread"):
        bench.step()


async def test_an_outcome_ends_no_offer_that_is_still_to_be_measured() -> None:
    """Else another one is made beside it, and the two end each other (seed 18 of the storms)."""
    ledger, ones = make_ledger(), torch.ones(BLOCK)
    start, parts = ledger.agreed()[0].digest, (PartWeights(0, 1, {"b": 1.0}),)
    mean = AgreedMean(0, 1, 0, start, ones.numpy().tobytes(), parts)
    version = await ledger.commit(mean)
    offer = OfferState(b"ours", met=1)
    ledger.submit_offer(0, ones, offer, lambda made: None).result()
    await ledger.commit(replace(mean, round=2, base_version=1, state_digest=version.digest))
    told = [ledger.outcomes.get_nowait() for _ in range(ledger.outcomes.qsize())]
    assert [(outcome.number, outcome.ended) for outcome in told] == [(1, None), (2, offer)]


@pytest.mark.parametrize("starts_again", [True, False])
def test_what_is_held_back_is_met_before_a_state_that_is_loaded(starts_again: bool) -> None:
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
    made.step()
    own_steps = 0.0 if starts_again else 2.0  # since the offer, all of which is in the mean
    assert made.sync.versions == [0, 2]
    made.step(3)
    assert made.sync.versions == [0, 2]
    assert torch.allclose(made.exchanged.live.snapshot(1), newer.params + own_steps + 3.0, atol=1e-2)


# ---- the end of a run


def test_the_final_flush_offers_the_rest_and_is_bounded() -> None:
    made = bench_on_virtual_time()
    made.step(1)
    made.sync.flush(finished=True)  # nobody answers
    assert made.sync.figures.exposed_s == pytest.approx(2 * FLUSH_FLOOR_S + SETTLE_S)
    (ended,) = made.wire.seen(ev.TrainingEnded)
    assert ended == {
        "fragments": (0, 1), "offers_within_s": FLUSH_FLOOR_S, "settles_within_s": FLUSH_FLOOR_S + SETTLE_S,
    }  # fmt: skip
    told = [(said["phase"], said["exposed_s"]) for said in made.wire.seen(ev.Progress)]
    assert {phase for phase, _ in told} == {"draining"}
    assert [exposed_s for _, exposed_s in told] == sorted(exposed_s for _, exposed_s in told)
    assert len(told) > FLUSH_FLOOR_S  # once a second, though nothing happens
    assert made.wire.seen(ev.Warned) == []  # nothing is on its way
    made.ledger.states()
    assert sorted(offer.fragment for offer in made.wire.offers) == [0, 1]
    assert made.wire.shown[-1].phase == Status.DRAINING
    assert made.wire.seen(ev.Progress)[-1]["phase"] == "draining"


def test_an_offer_that_ends_while_a_peer_only_waits_for_the_others_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They count on its part in that round as long as they hear that it is open."""
    made = bench_on_virtual_time()
    made.step(1)
    told: list[frozenset[int]] = []

    def settled(versions: Sequence[int]) -> bool:
        told.append(made.wire.shown[-1].finished)
        if len(told) == 1:
            made.abort(0)
            made.abort(1)
        return len(told) > 4

    monkeypatch.setattr(made.wire, "settled", settled)
    made.sync.flush(finished=True)
    assert told[0] == frozenset()
    assert told[-1] == {0, 1}


def test_the_final_flush_offers_half_of_the_fragments_at_a_time_and_holds_one_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Bench(fragments=4)
    in_flight: list[int] = []
    waiting: list[int] = []
    snapshot = made.exchanged.live.snapshot

    def take(fragment: int) -> torch.Tensor:
        waiting.append(len(waiting) - len(made.wire.offers))
        return snapshot(fragment)

    def answer(offer: Offer) -> None:
        in_flight.append(len(made.sync.account.in_flight))
        made.wire.offers.append(offer)
        if len(made.wire.offers) % 2 == 0:
            for one in made.wire.offers[-2:]:
                threading.Thread(target=made.commit, args=(one.fragment,)).start()

    monkeypatch.setattr(made.exchanged.live, "snapshot", take)
    monkeypatch.setattr(made.wire, "offer", answer)
    made.wire.is_settled = True
    made.step(1)
    made.sync.flush(finished=True)
    assert sorted(offer.fragment for offer in made.wire.offers) == [0, 1, 2, 3]
    assert max(in_flight) == 2
    assert waiting == [0] * 4  # each is taken when the one before has been encoded
    assert made.sync.versions == [1, 1, 1, 1]


def test_who_joins_when_the_run_is_over_offers_nothing() -> None:
    """A loop takes its first step before it is told. Of three, one had gone by then, and the two others ended
    in versions that the late one's single step had made."""
    clock = ClockConfig(mode="steps", inner_steps_per_round=4, rounds=1)
    made = bench_on_virtual_time(clock=clock)
    made.sync.position = 1.0
    made.sync.clock.start(1.0, 0.0)
    made.step(2)  # past the other fragment's point
    assert made.sync.position == 1.5
    made.wire.is_settled = True
    made.sync.flush(finished=True)
    made.ledger.states()
    assert (made.wire.offers, made.sync.inner_steps, made.sync.figures.tokens) == ([], 2, 0)
    assert made.wire.seen(ev.TrainingEnded)[0]["fragments"] == ()
    assert made.wire.shown[-1].finished == {0, 1}
    assert made.sync.figures.exposed_s < 1.0


BOUND_S = 2 * FLUSH_FLOOR_S + SETTLE_S
"""Of a peer that nobody answers."""


@pytest.mark.parametrize(
    ("all_agree", "newcomers", "loads_until", "stopped_at", "stays_s"),
    [
        (False, False, BOUND_S + 200.0, math.inf, BOUND_S + 200.0),  # a state is on its way
        (True, True, 200.0, math.inf, 200.0),  # to one that joined in the last minute
        (True, False, 200.0, math.inf, FLUSH_FLOOR_S),  # and nobody needs it any more
        (False, False, 1e9, BOUND_S + 100.0, BOUND_S + 100.0),  # a Ctrl-C ends the wait at once
    ],
)
def test_a_peer_stays_while_a_state_is_on_its_way_to_it_or_to_a_newcomer(
    all_agree: bool, newcomers: bool, loads_until: float, stopped_at: float, stays_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of three on slow lines one was two states behind, and had half of one when the others went."""
    made = bench_on_virtual_time()
    loads = made.wire.loads

    def asked(settled: bool) -> bool:
        made.sync.stopped |= made.wire.now() >= stopped_at
        return loads(settled)

    made.step(1)
    made.wire.is_settled, made.wire.newcomers, made.wire.loads_until = all_agree, newcomers, loads_until
    monkeypatch.setattr(made.wire, "loads", asked)
    made.sync.flush(finished=True)
    assert made.sync.figures.exposed_s == pytest.approx(stays_s, abs=2.0)
    is_told = stays_s not in (FLUSH_FLOOR_S,)
    assert [fields["text"] for fields in made.wire.seen(ev.Warned)] == [STILL_LOADS] * is_told


def test_what_others_hold_and_a_peer_leaves_without_is_told_after_the_last_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, told, said = bench_on_virtual_time(), list[float](), list[object]()
    made.step(1)
    monkeypatch.setattr(made.wire, "loads", lambda settled: True)
    monkeypatch.setattr(made.wire, "tell_what_is_missing", lambda: told.append(made.wire.now()))
    made.sync.flush(finished=False)
    assert told == []
    made.sync.flush(finished=True)
    assert told == [pytest.approx(made.wire.now(), abs=0.1)]
    made.sync.stopped = True
    made.sync.flush(finished=True)  # a Ctrl-C: that it did not come in time would not be true
    assert len(told) == 1

    for words in ("", "what it lacks"):
        node: Any = SimpleNamespace(progress=SimpleNamespace(missing=lambda words=words: words))
        view = NodeView(node, cast(Any, None), lambda kind, fields: said.append((kind, fields)), lambda: None)
        view.tell_what_is_missing()
    assert said == [(ev.Warned, {"text": "what it lacks"})]


# ---- the worker thread, for the network thread and for training


def make_ledger(peer: str = "a") -> TensorWorker:
    run = run_config()
    codec = get_codec("fp32")
    LEDGERS.append(TensorWorker(codec, [FragmentState(run, codec, peer, outer.init(torch.zeros(BLOCK)))]))
    return LEDGERS[-1]


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


async def test_a_hostile_slice_is_refused_and_named() -> None:
    ledger = make_ledger()
    good = torch.ones(BLOCK).numpy().tobytes()
    bad = torch.full((BLOCK,), math.nan).numpy().tobytes()
    with pytest.raises(SliceRefused) as refused:
        await ledger.reduce(0, [("a", 1.0, good), ("mallory", 1.0, bad)])
    assert refused.value.peer == "mallory"
    assert (await ledger.reduce(0, [("a", 1.0, good)])).mean == good


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


async def test_export_and_adopt_are_the_same_state_and_lies_are_refused() -> None:
    donor, late = make_ledger(), make_ledger()
    start, parts = donor.agreed()[0].digest, (PartWeights(0, 1, {"b": 1.0}),)
    mean = AgreedMean(0, 1, 0, start, torch.ones(BLOCK).numpy().tobytes(), parts)
    await donor.commit(mean)
    version, exported, digests = await donor.export(0)
    assert digest_of_chunks(digests) == version.digest
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


async def test_a_state_that_a_round_made_meanwhile_is_not_taken_over_and_offers_go_on() -> None:
    """It was fetched before the network thread heard of the round, and the next offer is made already."""
    ledger = make_ledger()
    snapshot = torch.ones(BLOCK)
    start, parts = ledger.agreed()[0].digest, (PartWeights(0, 1, {"b": 1.0}),)
    offer = AgreedMean(0, 1, 0, start, snapshot.numpy().tobytes(), parts)
    version = await ledger.commit(offer)
    _, state, _ = await ledger.export(0)
    ledger.submit_offer(0, snapshot, OfferState(b"ours", met=1), lambda made: None).result()
    told = ledger.outcomes.qsize()
    assert await ledger.adopt(0, state[:], version) == version
    assert ledger.outcomes.qsize() == told
    await ledger.abort(0, b"ours")
    assert ledger.outcomes.qsize() == told + 1  # it was in flight still


def told(bench: Bench) -> list[str]:
    """What a person is told, from now on."""
    heard = list[str]()
    bench.exchanged._warn = heard.append
    return heard


@pytest.mark.parametrize("rule", ["keep", "blend", "co2", "eager"])
def test_one_nan_resets_all_fragments_at_one_moment_and_is_told_once(rule: str) -> None:
    bench = Bench(rule=rule)
    heard, agreed = told(bench), [state.params.clone() for state in bench.ledger.states()]
    bench.model.register_buffer("scales", torch.zeros(2).to(torch.float8_e4m3fn))  # not to be looked at
    bench.step(2)
    assert [offer.fragment for offer in bench.wire.offers] == [1]  # it is in flight, and stays so
    for _ in range(2):
        bench.optimizer.state[bench.model.weight] = {"exp_avg": bench.model.weight.detach()}
        with torch.no_grad():
            bench.model.weight[0, 0] = math.nan
            bench.model.bias.fill_(math.nan)
        for _ in range(4):
            bench.sync.after_step(10, 1.0)
            bench.ledger.agreed()
        assert all(torch.equal(bench.exchanged.live.snapshot(at), agreed[at]) for at in range(2))
        assert not bench.optimizer.state
    assert len([text for text in heard if "not finite" in text]) == 1
    bench.commit(1)
    bench.sync.after_step(10, 1.0)
    new = bench.ledger.states()[1]
    assert bench.sync.versions == [0, 1]
    if rule == "keep":
        assert torch.allclose(bench.exchanged.live.snapshot(1), new.params)


def test_a_copy_in_the_optimizers_state_moves_with_its_parameter() -> None:
    bench = Bench()
    weight, state = bench.model.weight, bench.optimizer.state
    bench.step(2)
    for one in bench.model.parameters():
        master = one.detach().double() + 1e-9  # a copy of another precision
        state[one] = {"master": master, "moment": torch.full_like(one, 0.01), "step": torch.tensor(3.0)}
        state[one]["momentum_buffer"] = one.detach().clone()  # as with much weight decay
    before = weight.detach().clone()
    bench.commit(1)
    bench.sync.after_step(10, 1.0)
    assert not torch.equal(weight, before)
    for one in bench.model.parameters():
        assert torch.allclose(state[one]["master"], one.double(), atol=1e-6)
        assert torch.equal(state[one]["moment"], torch.full_like(one, 0.01))
        assert state[one]["step"] == 3.0
    assert torch.equal(state[weight]["momentum_buffer"], before)
    with bench.exchanged.live.set_aside():
        bench.exchanged.live.load_(0, torch.zeros_like(bench.exchanged.live.snapshot(0)))
    assert torch.allclose(state[weight]["master"], weight.double(), atol=1e-6)


@pytest.mark.parametrize("is_undone", [True, False])
def test_merges_that_do_not_last_a_step_are_told_by_name(is_undone: bool) -> None:
    bench = Bench()
    heard = told(bench)
    for _ in range(12):
        bench.step()
        hidden = [one.detach().clone() for one in bench.model.parameters()]
        if bench.wire.offers:
            bench.commit(bench.wire.offers[-1].fragment)
            bench.wire.offers.clear()
        bench.sync.after_step(10, 1.0)
        for one, copy in zip(bench.model.parameters(), hidden, strict=True):
            if is_undone:
                one.data.copy_(copy)
        bench.sync.after_step(10, 1.0)
    assert [text for text in heard if "weight" in text and "AdamW" in text] == heard
    assert len(heard) == is_undone


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_frozen_parameter_is_told_only_when_nothing_trains_the_frozen_ones_for_a_round(
    bench: Bench, all_of_it: bool
) -> None:
    """One of several may have no gradient: a critic's last bias has none in a Wasserstein loss."""
    weight, look = bench.model.weight, bench.exchanged.look
    (bench.model if all_of_it else weight).requires_grad_(False)
    for position in (0.0, 0.9, 1.8, 2.7):
        look(position)
        with torch.no_grad():
            weight.add_(1e-3)
    look(3.6)
    look(4.5)
    bench.model.requires_grad_(True)
    look(4.9)
    weight.requires_grad_(False)
    look(5.0)
    look(5.9)
    with pytest.raises(ConfigError, match="weight: was frozen"):
        look(6.0)


def test_steps_of_no_tokens_are_told_when_there_were_ten(bench: Bench) -> None:
    heard = told(bench)
    for tokens in (0, 5, *[0] * 9):
        bench.sync.after_step(tokens, math.nan)
    assert not heard
    for _ in range(20):
        bench.sync.after_step(0, math.nan)
    assert len(heard) == 1
