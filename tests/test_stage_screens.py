"""Screens of a run with stages: figures of each stage by hand, a stage without a replica said everywhere, and
nothing of it where there is one stage."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from monitoring import charts
from monitoring.board.pages import fact_rows
from monitoring.facts import SILENT_AFTER_S, Known, StageFacts, SwarmFacts, swarm_facts
from monitoring.history import History
from monitoring.lines import ExchangeLog
from monitoring.metrics import FactsCollector, exposition
from monitoring.model import Model, Recorder
from monitoring.own_peer import OwnPeer
from monitoring.sinks import figures_of
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import frame, line
from monitoring.words import news
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import SwarmView, recalled
from p2p_co2.wire.limits import MAX_FRAGMENTS
from tests.event_samples import aborted, applied, between, committed, fold, progress, started
from tests.made_swarm import MadeFeed, MadeSwarm
from tests.told_run import drawn, printed

CLOCK = ClockConfig(mode="time", round_s=5.0, rounds=400)
RUN = RunConfig(name="cut", fragments=2, clock=CLOCK, pipeline=PipelineConfig(stages=2))
FACTS = RunFacts(config=RUN, loss_start=5.0, loss_end=2.0, expected_peers=4)
HELD = {"a": 0, "b": 1, "c": 0, "d": 1}
"""Stage by peer."""


def measured(
    peer: str, other: str, bytes_per_s: float, round_trip_s: float, sent_bytes: int
) -> ev.LinkMeasured:
    return ev.LinkMeasured(
        at=8.0, peer=peer, other=other, carrier="grpc", relayed=False, round_trip_s=round_trip_s,
        bytes_per_s=bytes_per_s, sent_bytes=sent_bytes,
    )  # fmt: skip


def story(digests: str = "xyxy", finishes: bool = True) -> list[ev.Event]:
    """Two replicas of each of two stages. Both stages make rounds 1 and 2 of fragment 0; of round 3 stage 0
    gives up an attempt that stage 1 never made. Peer d is a round behind b."""
    events: list[ev.Event] = [started(peer, 0.0, peer, stage=stage, stages=2) for peer, stage in HELD.items()]
    for number, (peer, stage) in enumerate(HELD.items()):
        versions = (1 if peer == "d" else 2, 2)
        told = progress(peer, 8.0, loss=2.0 + number, inner_steps=10 + number)
        events.append(replace(told, versions=versions, train_s=7.0, exposed_s=0.5))
        events.append(replace(between(peer, 8.0, stage), waiting=stage * (number + 1), dropped=stage))
        for round_ in (1, 2):
            made = replace(committed(peer, round_, contributors=2), group_size=2, partial=0)
            events += [made, replace(applied(peer, number % 2, 4), version=round_)]
    events += [aborted("a", 3), aborted("c", 3)]
    events.append(ev.MicrobatchDropped(at=8.0, peer="b", reason="late"))
    events += [
        measured("a", "b", 4e6, 0.02, 100), measured("c", "d", 8e6, 0.04, 100),
        measured("a", "c", 9e9, 9.0, 7), measured("b", "a", 2e6, 0.03, 50), measured("d", "c", 0.0, 0.05, 50),
    ]  # fmt: skip
    for peer, digest in zip(HELD, digests, strict=True) if finishes else ():
        end = ev.PeerFinished(at=9.0, peer=peer, reason="the run is over", digest=digest, versions=(2, 2))
        events.append(end)
    return events


def known(events: list[ev.Event], now: float = 8.0) -> Known:
    return Known(fold(events), now, RUN)


def facts_of(events: list[ev.Event], now: float = 8.0) -> SwarmFacts:
    return swarm_facts(known(events, now))


def made(seconds: int, peers: int = 6, **options: Any) -> Model:
    """A model of a made-up swarm; see ``tests.board_server``."""
    feed = MadeFeed(MadeSwarm(peers, start_at=1_800_000_000.0, round_s=5.0, **options))
    feed.advance(seconds)
    model = Model(feed)
    for _ in model.moments(1_800_000_000.0 + seconds):
        continue
    return model


# ---- by hand


def test_each_stage_has_its_own_rounds_tokens_and_queue() -> None:
    facts = facts_of(story(finishes=False))
    first, second = facts.stages
    assert (first.replicas, second.replicas) == (2, 2)
    assert (first.rounds_committed, second.rounds_committed, facts.rounds_committed) == (4, 4, 8)
    assert (first.rounds_aborted, second.rounds_aborted, facts.rounds_aborted) == (1, 0, 1)
    assert (first.tokens, second.tokens) == (2200, 2400)
    assert (facts.tokens, facts.tokens_per_s) == (first.tokens, first.tokens_per_s) == (2200, 100.0)
    assert facts.parameters == 2000
    assert (first.waiting, second.waiting) == (0, 2 + 4)
    assert (first.dropped, second.dropped) == (0, 2)
    assert first.waiting_share == pytest.approx(2.5 / (2.5 + 7.0 + 0.5))
    assert (first.versions_apart, second.versions_apart) == (0, 1)
    assert [one.trouble for one in facts.stages] == ["", ""]


def test_a_hop_is_the_median_link_between_neighbouring_stages() -> None:
    first, second = facts_of(story(finishes=False)).stages
    assert (first.forward_bytes_per_s, first.forward_bytes) == (6e6, 200)
    assert first.forward_round_trip_s == pytest.approx(0.03)
    assert (first.back_bytes_per_s, first.back_bytes) == (None, 0)
    assert (second.back_bytes_per_s, second.back_bytes) == (2e6, 100)  # d sent nothing of late
    assert second.back_round_trip_s == pytest.approx(0.04)
    assert second.forward_round_trip_s is None


def test_the_loss_is_the_last_stages_and_the_owners() -> None:
    run = RUN.model_copy(update={"pipeline": PipelineConfig(stages=3)})
    events: list[ev.Event] = []
    for peer, stage, loss in (("a", 0, 2.0), ("b", 1, 90.0), ("c", 2, 4.0)):
        events += [started(peer, 0.0, peer, stage=stage, stages=3), progress(peer, 8.0, loss=loss)]
    assert swarm_facts(Known(fold(events), 8.0, run)).loss_training == 3.0


def test_the_summary_has_a_table_of_stages() -> None:
    summary = summarise(fold(story()), FACTS)
    json.dumps(summary, allow_nan=False)
    assert [stage["stage"] for stage in summary["stages"]] == [0, 1]
    first, second = summary["stages"]
    assert (first["peers"], first["finished"], first["digests_equal"]) == (2, 2, True)
    assert (first["rounds"]["committed"], first["rounds"]["aborted"]) == (2, 1)
    assert (second["rounds"]["committed"], second["rounds"]["aborted"]) == (2, 0)
    assert second["microbatches"]["drop_reasons"] == {"late": 1}
    assert second["tokens_per_s"] == 240.0  # 2,400 in 10 s
    assert (summary["tokens"], summary["parameters"], summary["digests_equal"]) == (2200, 2000, True)
    assert [peer["stage"] for peer in summary["peer_table"].values()] == [0, 1, 0, 1]
    assert verdict(summary) == []
    text = printed(summary)
    for part in (
        "2 fragment exchanges (0 alone, 1 aborted)",
        "digests equal",
        "2 of 182 microbatches dropped",
    ):
        assert part in text


# ---- the verdict


def test_digests_are_held_against_those_of_the_same_stage() -> None:
    reasons = verdict(summarise(fold(story("xyxz")), FACTS))
    assert reasons == ["stage 1: the peers hold different digests of the agreed state: b y, d z"]
    left = [event for event in story("xyxy") if not (event.kind == "peer_finished" and event.peer in "bd")]
    reasons = verdict(summarise(fold(left), FACTS))
    assert "stage 1: no replica finished" in reasons
    gone = [event for event in story() if HELD[event.peer] == 0]
    assert "stage 1 had no replica" in verdict(summarise(fold(gone), FACTS))


def test_a_stage_in_which_nobody_averaged_is_no_success_unless_it_has_one_replica() -> None:
    alone = [
        replace(event, group_size=1) if isinstance(event, ev.RoundCommitted) and event.peer == "b" else event
        for event in story()
        if not (isinstance(event, ev.RoundCommitted) and event.peer == "d")
    ]
    reasons = verdict(summarise(fold(alone), FACTS))
    assert reasons == ["stage 1: no fragment exchange was committed: 2 were made by one peer alone"]
    single = [event for event in alone if event.peer != "d"]
    assert verdict(summarise(fold(single), replace(FACTS, expected_peers=3))) == []


# ---- stages without a replica


def stage_words(model: Model) -> list[str]:
    return [trouble.words for trouble in model.facts().troubles if trouble.words.startswith("stage ")]


EMPTY = "stage 3 of 4 has no replica: training waits; join with --stage 3"
FEW = "stage 2 of 4 is understaffed: 1 of at least 2 replicas; join with --stage 2"


def test_a_stage_whose_last_replica_died_is_said_first_with_what_to_do() -> None:
    swarm = {"stages": 4, "dead": 3}
    before = made(59, **swarm)
    assert EMPTY not in stage_words(before)
    after = made(80, **swarm)
    assert stage_words(after) == [EMPTY, FEW]
    facts = after.facts()
    assert facts.troubles[0].words == EMPTY
    assert (facts.troubles[0].severity, facts.stages[3].is_empty) == ("bad", True)
    assert [one.replicas for one in facts.stages] == [2, 2, 1, 0]
    assert facts.stages[2].waits_for == "stage 3 has no replica"
    assert EMPTY in line(facts)
    assert EMPTY in drawn(frame(facts, 120, 48))


def test_a_swarm_that_has_just_begun_or_is_over_lacks_no_stage() -> None:
    held = [started("a", 0.0, "a", stage=0, stages=2), progress("a", 1.0)]
    alone = [*held, replace(between("a", 1.0, 0), behind=0)]
    assert facts_of(alone, 3.0).troubles == ()
    later = [*alone, progress("a", SILENT_AFTER_S), replace(between("a", SILENT_AFTER_S, 0), behind=0)]
    words = facts_of(later, SILENT_AFTER_S + 1).troubles[0].words
    assert words == "stage 1 of 2 has no replica: training waits; join with --stage 1"
    draining = [*later[:-2], replace(progress("a", SILENT_AFTER_S), phase="draining")]
    assert [one.trouble for one in facts_of(draining, SILENT_AFTER_S + 1).stages] == ["", ""]
    assert facts_of(story(), 60.0).troubles == ()


def test_a_replica_that_others_hear_is_not_missed() -> None:
    """A reader may know one peer only: its own. What the stages beside it are, that peer says."""
    alone = [started("a", 0.0, "a", stage=1, stages=4), progress("a", 30.0)]
    heard = replace(between("a", 30.0, 1), before=0, behind=3)
    view = Known(fold([*alone, heard]), 31.0)
    stages = swarm_facts(view).stages
    assert [one.replicas for one in stages] == [0, 1, 3, None]
    assert [one.is_empty for one in stages] == [True, False, False, False]
    words = "stage 0 of 4 has no replica: training waits; join with --stage 0"
    own = OwnPeer()
    own.see(alone[0])
    text = drawn(own.frame(view, swarm_facts(view), 120, 40, ()))
    assert words in text
    assert "stage 1 of 4   queue 3   in flight 4   waiting 20.8 %   dropped 10 of 100" in text


def test_one_liar_among_neighbours_neither_hides_a_stage_nor_makes_one_empty() -> None:
    run = RUN.model_copy(update={"pipeline": PipelineConfig(stages=2, min_replicas=1)})

    def said(words: dict[str, int]) -> StageFacts:
        events: list[ev.Event] = []
        for peer, behind in words.items():
            events += [started(peer, 0.0, peer, stage=0, stages=2), progress(peer, 30.0)]
            events.append(replace(between(peer, 30.0, 0), behind=behind))
        return swarm_facts(Known(fold(events), 31.0, run)).stages[1]

    assert said({"a": 0, "b": 0, "c": 2**53}).is_empty
    assert not said({"a": 2, "b": 2, "c": 0}).trouble


# ---- every screen


def test_screens_name_the_stage_of_a_fragment() -> None:
    view = fold(story())
    told = [words for _, words in news(view, 99)]
    assert "exchange 3 of fragment 0 of stage 0 aborted: too few" in told
    assert "a started on cpu with stage 0 of 2" in told
    charted = charts.rounds(charts.LIGHT, facts_of(story()).rounds, 2, 2)
    assert charted["yAxis"]["data"] == [
        f"stage {stage}, fragment {fragment}" for stage in (0, 1) for fragment in (0, 1)
    ]
    assert {tuple(cell["value"][:2]) for cell in charted["series"][0]["data"]} == {
        (0, 0), (1, 0), (2, 0), (0, 2), (1, 2),
    }  # fmt: skip
    bars = charts.staleness_of(charts.LIGHT, view, True)["series"]
    assert [(bar["name"], bar["data"][:2]) for bar in bars] == [("stage 0", [4, 0]), ("stage 1", [0, 4])]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_of_stages_fits_the_terminal(width: int) -> None:
    text = drawn(frame(made(100, stages=4, dead=3).facts(), width, 48), width)
    assert max(map(len, text.splitlines())) <= width
    rows = [row.split() for row in text[text.index("\nstage ") :].splitlines()[3:7]]
    assert [row[:2] for row in rows] == [["0", "2"], ["1", "2"], ["2", "1"], ["3", "0"]]


def test_metrics_and_sinks_have_each_stage() -> None:
    facts = facts_of(story(finishes=False))
    families = {
        family.name: family
        for family in text_string_to_metric_families(exposition(FactsCollector(lambda: facts)).decode())
    }
    queue = families["p2p_co2_stage_waiting_microbatches"].samples
    assert {sample.labels["stage"]: sample.value for sample in queue} == {"0": 0.0, "1": 6.0}
    assert families["p2p_co2_stage_forward_bytes_per_second"].samples[0].value == 6e6
    waiting = families["p2p_co2_peer_waiting_microbatches"].samples
    assert {sample.labels["name"]: sample.value for sample in waiting} == {"a": 0, "b": 2, "c": 0, "d": 4}
    assert figures_of(facts)["stage/1/waiting"] == 6.0
    rows = {row["name"]: row["value"] for row in fact_rows(facts.peers[1])}
    assert (rows["stage"], rows["waiting"], rows["waits for"]) == ("1", "2", "")


def test_a_board_remembers_rounds_of_each_stage() -> None:
    model, history = made(30, 4, stages=2), History(None)
    recorder = Recorder(model, history)
    for peer in list(model.view.peers)[:2]:
        recorder.see([ev.RoundCounted(at=1.0, peer=peer, fragment=1, round=7, weights={})])
    batch = recorder.batch()
    assert batch is not None
    assert {(1, 7), (MAX_FRAGMENTS + 1, 7)} <= batch.counted_rounds


def test_exchanges_of_two_stages_are_two() -> None:
    log = ExchangeLog()
    for peer, stage in (("a", 0), ("b", 1)):
        log.add(started(peer, 0.0, stage=stage, stages=2))
        log.add(ev.FragmentSent(at=1.0, peer=peer, fragment=0, round=1, payload_bytes=10 + stage, weight=1.0))
        log.add(ev.RoundBegan(at=2.0, peer=peer, fragment=0, round=1, group=(peer, "x")))
        log.add(replace(committed(peer, 1), at=4.0 + stage))
    assert [(one.payload_bytes, one.ended_at) for one in log.exchanges()] == [(10, 4.0), (11, 5.0)]


# ---- laws


def test_what_a_late_observer_is_told_has_the_microbatches() -> None:
    early = fold(story())
    late = fold(event for peer in early.peers.values() for event in recalled(peer))
    for peer, view in early.peers.items():
        assert late.peers[peer].pipeline == view.pipeline
        assert late.peers[peer].tally.dropped == view.tally.dropped


def test_a_process_that_begins_anew_has_no_microbatches() -> None:
    view = SwarmView()
    for event in (*story(), started("b", 20.0, "b", stage=0, stages=2)):
        view.add(event)
    assert (view.peers["b"].pipeline, view.peers["b"].stage) == (None, 0)


def test_one_stage_has_none_of_it() -> None:
    model = made(60, 3)
    facts = model.facts()
    assert facts.stages == ()
    assert {peer.pipeline for peer in facts.peers} == {None}
    assert "p2p_co2_stage" not in exposition(FactsCollector(lambda: facts)).decode()
    assert not any(name.startswith("stage") for name in figures_of(facts))
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(frame(facts, 150, 48, news=news(model.view, 6)))
    assert "stage" not in console.export_text().replace("stages", "")
    assert "stage" not in line(facts)
    summary = summarise(model.view, RunFacts(config=RunConfig(fragments=4)))
    assert "stages" not in summary
    assert all("stage" not in peer for peer in summary["peer_table"].values())
