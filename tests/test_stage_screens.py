"""Screens of a run with stages: charts, tables and what is remembered. The figures are in
``testdata/board/stages.txt``."""

from __future__ import annotations

from typing import Any

import pytest

from monitoring import charts
from monitoring.board.pages import fact_rows
from monitoring.facts import OF_STAGES
from monitoring.history import BoardHistory
from monitoring.known import Known
from monitoring.lines import timed_exchanges
from monitoring.model import Model, Recorder
from monitoring.swarm import swarm_facts
from monitoring.terminal import frame
from monitoring.words import end_told
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import recalled
from p2p_co2.wire.limits import MAX_FRAGMENTS
from tests.event_samples import between, fold, sample, started
from tests.made_swarm import MadeFeed, MadeSwarm, step
from tests.stories import drawn

START = 1_800_000_000.0


def made(seconds: int, peers: int = 6, **options: Any) -> Model:
    feed = MadeFeed(MadeSwarm(peers, start_at=START, round_s=5.0, **options))
    feed.advance(seconds)
    model = Model(feed)
    step(model, START + seconds)
    return model


def story() -> list[ev.Event]:
    """A peer in each of two stages. Both make rounds 1 and 2 of fragment 0; a gives up round 3."""
    events: list[ev.Event] = []
    for stage, peer in enumerate("ab"):
        events += [started(peer, 0.0, peer, stage=stage, stages=2), between(peer, 8.0, stage)]
        for number in (1, 2):
            events.append(sample("round_committed", peer, float(number), round=number))
            events.append(sample("fragment_applied", peer, 3.0, version=number, staleness=stage))
    events.append(sample("microbatch_dropped", "b", reason="x"))
    return [*events, sample("round_aborted", "a", 3.0, round=3)]


def test_charts_have_a_row_or_a_bar_for_each_stage() -> None:
    view = fold(story())
    charted = charts.rounds(charts.LIGHT, swarm_facts(Known(view, 8.0)).rounds, 2, 2)
    assert charted["yAxis"]["data"] == [
        f"stage {stage}, fragment {fragment}" for stage in (0, 1) for fragment in (0, 1)
    ]
    assert {tuple(cell["value"][:2]) for cell in charted["series"][0]["data"]} == {
        (0, 0), (1, 0), (2, 0), (0, 2), (1, 2),
    }  # fmt: skip
    bars = charts.staleness_of(charts.LIGHT, view, True)["series"]
    assert [(bar["name"], bar["data"][:2]) for bar in bars] == [("stage 0", [2, 0]), ("stage 1", [0, 2])]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_of_stages_fits_the_terminal(width: int) -> None:
    text = drawn(frame(made(100, stages=4, dead=3).facts(), width, 48), width)
    assert max(map(len, text.splitlines())) <= width
    rows = [row.split() for row in text[text.index("\nstage ") :].splitlines()[3:7]]
    assert [row[:2] for row in rows] == [["0", "2"], ["1", "2"], ["2", "1"], ["3", "0"]]


def test_a_peers_page_has_its_microbatches() -> None:
    (peer, *_) = made(30, 4, stages=2).facts().peers
    assert set(OF_STAGES) <= {name.replace(" ", "_") for name, _, _ in fact_rows(peer)}


def test_a_board_remembers_rounds_of_each_stage() -> None:
    model, history = made(30, 4, stages=2), BoardHistory(None)
    recorder = Recorder(model, history)
    for peer in list(model.view.peers)[:2]:
        recorder.see([sample("round_counted", peer, 1.0, fragment=1, round=7)])
    batch = recorder.batch()
    assert batch is not None
    assert {(1, 7), (MAX_FRAGMENTS + 1, 7)} <= batch.counted_rounds


def test_exchanges_of_two_stages_are_two() -> None:
    events: list[ev.Event] = []
    for stage, peer in enumerate("ab"):
        events += [
            started(peer, 0.0, stage=stage, stages=2),
            sample("fragment_sent", peer, 1.0, payload_bytes=10 + stage),
            sample("round_began", peer, 2.0, group=(peer, "x")),
            sample("round_committed", peer, 4.0 + stage),
        ]
    found = timed_exchanges(fold(events))
    assert [(one.payload_bytes, one.ended_at) for one in found] == [(10, 4.0), (11, 5.0)]


def test_a_peer_that_hears_nobody_of_its_stage_knows_their_shares_by_certificates() -> None:
    events = [started("b", 0.0, "b", stage=1, stages=2), ev.PeerJoined(at=1.0, peer="b", other="c", name="c")]
    events += [sample("round_counted", "b", 2.0, weights={"b": 100.0, "c": 300.0})]
    told = end_told(swarm_facts(Known(fold(events), 3.0, me="b")))
    assert told["end-gave"][1:] == ("2", "peers", "c 75.0 % of stage 1, b 25.0 % of stage 1")


def test_what_a_late_observer_is_told_has_the_microbatches_and_a_new_process_has_none() -> None:
    early = fold(story())
    late = fold(event for peer in early.peers.values() for event in recalled(peer))
    for peer, view in early.peers.items():
        assert view.pipeline is not None
        assert late.peers[peer].pipeline == view.pipeline
        assert late.peers[peer].tally.dropped == view.tally.dropped
    early.add(started("b", 20.0, "b", stage=0, stages=2))
    assert (early.peers["b"].pipeline, early.peers["b"].stage) == (None, 0)
