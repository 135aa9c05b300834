"""The end of a run for the training thread: the rest is offered, all agree, and each wait has its bound."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2p_co2.config import ClockConfig
from p2p_co2.protocol.rounds import Offer
from p2p_co2.protocol.schedule import FLUSH_FLOOR_S, LOADS_CAP_S, SETTLE_S, STILL_LOADS
from p2p_co2.protocol.wire.messages_pb2 import Status
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.network_thread import NodeView
from tests.trainer_bench import Bench, bench_on_virtual_time


def test_the_final_flush_offers_the_rest_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench_on_virtual_time(monkeypatch)
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
    made.ledger.close()


def test_an_offer_that_ends_while_a_peer_only_waits_for_the_others_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They count on its part in that round as long as they hear that it is open."""
    made = bench_on_virtual_time(monkeypatch)
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
    made.ledger.close()


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
    made.ledger.close()


def test_who_joins_when_the_run_is_over_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop takes its first step before it is told. Of three, one had gone by then, and the two others ended
    in versions that the late one's single step had made."""
    clock = ClockConfig(mode="steps", inner_steps_per_round=4, rounds=1)
    made = bench_on_virtual_time(monkeypatch, clock=clock)
    made.sync.position = 1.0
    made.sync.clock.start(1.0, 0.0)
    made.step(2)  # past the other fragment's point
    assert made.sync.position == 1.5
    made.wire.is_settled = True
    made.sync.flush(finished=True)
    made.ledger.states()
    assert (made.wire.offers, made.sync.inner_steps, made.sync.tokens) == ([], 2, 0)
    assert made.wire.seen(ev.TrainingEnded)[0]["fragments"] == ()
    assert made.wire.shown[-1].finished == {0, 1}
    assert made.sync.figures.exposed_s < 1.0
    made.ledger.close()


def test_peers_that_flush_different_fragments_meet_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench_on_virtual_time(monkeypatch, fragments=4)
    made.step(1)
    made.sync.flush(finished=True)  # nobody answers the first two
    made.ledger.states()
    assert sorted(offer.fragment for offer in made.wire.offers) == [0, 1, 2, 3]
    made.ledger.close()


def test_who_loads_a_state_or_gives_one_stays_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three on slow lines one was two states behind, and had half of one when the others went."""
    made = bench_on_virtual_time(monkeypatch)
    made.step(1)
    bound_s = 2 * FLUSH_FLOOR_S + SETTLE_S
    made.wire.loads_until = bound_s + 200.0
    made.sync.flush(finished=True)
    assert made.sync.figures.exposed_s == pytest.approx(bound_s + 200.0, abs=2.0)
    assert [fields["text"] for fields in made.wire.seen(ev.Warned)] == [STILL_LOADS]
    made.ledger.close()


def test_when_all_agree_only_a_newcomer_that_still_loads_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joined in the last minute, and was told that the others left before it had their state."""
    for newcomers, stays_s in ((True, 200.0), (False, FLUSH_FLOOR_S)):
        made = bench_on_virtual_time(monkeypatch)
        made.step(1)
        made.wire.is_settled, made.wire.newcomers, made.wire.loads_until = True, newcomers, 200.0
        made.sync.flush(finished=True)
        assert made.sync.figures.exposed_s == pytest.approx(stays_s, abs=2.0)
        made.ledger.close()


def test_a_load_without_end_is_left_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench_on_virtual_time(monkeypatch)
    made.step(1)
    made.wire.loads_until = math.inf
    made.sync.flush(finished=True)
    assert made.sync.figures.exposed_s == pytest.approx(2 * FLUSH_FLOOR_S + SETTLE_S + LOADS_CAP_S)
    made.ledger.close()


def test_what_others_hold_and_a_peer_leaves_without_is_told_after_the_last_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, told, said = bench_on_virtual_time(monkeypatch), list[float](), list[object]()
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
    made.ledger.close()

    for words in ("", "what it lacks"):
        node: Any = SimpleNamespace(progress=SimpleNamespace(missing=lambda words=words: words))
        view = NodeView(node, cast(Any, None), lambda kind, fields: said.append((kind, fields)), lambda: None)
        view.tell_what_is_missing()
    assert said == [(ev.Warned, {"text": "what it lacks"})]


def test_who_is_stopped_does_not_stay_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C ends the wait at once, and without one the load would keep it."""
    made, asked = bench_on_virtual_time(monkeypatch), list[float]()
    made.step(1)
    bound_s = 2 * FLUSH_FLOOR_S + SETTLE_S

    def loads(settled: bool) -> bool:
        asked.append(made.wire.now())
        if made.wire.now() >= bound_s + 100.0:
            made.sync.stopped = True
        return True

    monkeypatch.setattr(made.wire, "loads", loads)
    made.sync.flush(finished=True)
    assert made.sync.figures.exposed_s == pytest.approx(bound_s + 100.0, abs=1.0)
    assert min(asked) == pytest.approx(bound_s, abs=1.0)
    made.ledger.close()


def test_who_agrees_with_all_goes_though_a_state_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody joins a load that ends while others go on holds nobody."""
    made = bench_on_virtual_time(monkeypatch)
    made.step(1)
    bound_s = 2 * FLUSH_FLOOR_S + SETTLE_S
    made.wire.loads_until = math.inf
    monkeypatch.setattr(made.wire, "settled", lambda versions: made.wire.now() >= bound_s + 50.0)
    made.sync.flush(finished=True)
    assert made.sync.figures.exposed_s == pytest.approx(bound_s + 50.0, abs=1.0)
    made.ledger.close()
