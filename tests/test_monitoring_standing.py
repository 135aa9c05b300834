"""What readers make of a run with somebody behind it, with one peer alone, with many skipped sends, that is
over, and of which a past is known: by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monitoring import charts
from monitoring.facts import SwarmFacts
from monitoring.history import SWARM, History
from monitoring.metrics import FactsCollector, exposition
from monitoring.model import Model
from monitoring.past import MAX_PAST_BYTES, recall_journal
from monitoring.sinks import figures_of
from monitoring.standing import in_the_run, run_position
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import plain_line
from monitoring.troubles import ALONE_S, RECENT_S
from monitoring.watch import line
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import FeedState, News
from p2p_co2.telemetry.journal import MAX_LINE_BYTES, Journal, event_line
from p2p_co2.telemetry.peer_view import recalled
from p2p_co2.telemetry.view import SwarmView, fold

START = 1_800_000_000.0
RUN = RunConfig(name="told", fragments=2, clock=ClockConfig(mode="time", round_s=5.0, rounds=60))
REASON = "the round before is still in flight"


class Told:
    """A feed of what a test tells. Rounds last 5 s; peers call themselves as they are called here."""

    def __init__(self, me: str = "", run: RunConfig | None = RUN) -> None:
        self.run, self.me, self.place, self.is_whole = run, me, "a test", False
        self.state = FeedState("connected")
        self.events: list[ev.Event] = []

    def take(self) -> News:
        events, self.events = self.events, []
        return News(events)

    def watched(self, now: float) -> None:
        return

    def close(self) -> None:
        return

    def start(self, peer: str, at: float) -> None:
        self.events.append(ev.PeerStarted(
            at=START + at, peer=peer, name=peer, pid=1, software="", device="cpu", parameters=100,
            fragments=2, run="",
        ))  # fmt: skip

    def progress(self, peer: str, at: float, loss: float, position: float | None = None, **more: Any) -> None:
        figures: dict[str, Any] = {
            "phase": "training", "position": at / 5 if position is None else position, "inner_steps": 9,
            "tokens": int(10 * at), "tokens_per_s": 10.0, "train_s": 9.0, "exposed_s": 0.0, "wall_s": 10.0,
            "up_bytes": 0, "down_bytes": 0, "versions": (1, 1), "loss": loss, **more,
        }  # fmt: skip
        self.events.append(ev.Progress(at=START + at, peer=peer, **figures))

    def finish(self, peer: str, at: float, reason: str = "the run is over") -> None:
        self.events.append(
            ev.PeerFinished(at=START + at, peer=peer, reason=reason, digest="d", versions=(1, 1))
        )

    def commit(self, peer: str, at: float, round_: int, size: int) -> None:
        self.events.append(ev.RoundCommitted(
            at=START + at, peer=peer, fragment=0, round=round_, coordinator=peer, group_size=size,
            contributors=size, partial=0, duration_s=0.5,
        ))  # fmt: skip

    def sends(self, peer: str, at: float, made: int, skipped: int) -> None:
        for _ in range(made):
            self.events.append(ev.FragmentSent(
                at=START + at, peer=peer, fragment=0, round=1, payload_bytes=1, weight=1.0,
                relative_error=0.0,
            ))  # fmt: skip
        for _ in range(skipped):
            self.events.append(ev.SendSkipped(at=START + at, peer=peer, fragment=0, reason=REASON))


@contextmanager
def watching(told: Told, history: History | None = None) -> Iterator[Model]:
    model = Model(told, history or History(None))
    try:
        yield model
    finally:
        model.history.close()


def facts_at(model: Model, at: float) -> SwarmFacts:
    model.step(START + at)
    return model.facts()


def words_of(facts: SwarmFacts) -> list[str]:
    return [trouble.words for trouble in facts.troubles]


# ---- where the run is


@pytest.mark.parametrize(
    ("trains", "ended", "expected"),
    [
        ([], [], 0.0),
        ([3.0], [], 3.0),
        ([50.0, 50.0, 1e15], [], 50.0),
        ([50.0, 1e15], [], 50.0),
        ([0.3], [(900, 60.0), (900, 60.0)], 60.0),  # a newcomer after the end
        ([50.0, 50.1, 50.0], [(900, 1e15)], 50.0),  # a liar that came and went
        ([50.0], [(100, 5.0), (110, 5.0)], 50.0),  # who left early was not further
        ([], [(100, 5.0), (100, 5.0), (100, 5.0), (900, 60.0)], 60.0),
    ],
)
def test_a_run_is_where_its_peers_are_or_where_they_ended_it(
    trains: list[float], ended: list[tuple[float, float]], expected: float
) -> None:
    assert run_position(trains, ended) == expected


def ended_run(told: Told) -> None:
    for peer in ("ada", "bob"):
        told.start(peer, 0)
        told.progress(peer, 299, loss=1.5, position=59.9)
        told.finish(peer, 300)


def test_who_begins_an_ended_run_anew_is_shown_and_is_not_the_run() -> None:
    told = Told()
    ended_run(told)
    with watching(told) as model:
        before = facts_at(model, 301)
        assert (before.loss, before.position, before.troubles) == (1.5, 59.9, ())
        told.start("newcomer", 1000)
        told.progress("newcomer", 1001, loss=5.5, position=0.3)
        told.events.append(
            ev.AgreedMeasured(
                at=START + 1001, peer="newcomer", loss=5.6, position=0.1, tokens=1, duration_s=0.1
            )
        )
        facts = facts_at(model, 1002)
        states = {peer.label: peer.state for peer in facts.peers}
        assert states == {"ada": "finished", "bob": "finished", "newcomer": "behind"}
        assert (facts.loss, facts.loss_agreed, facts.position) == (1.5, None, 59.9)
        assert "loss 1.500" in line(facts)
        assert any(
            "newcomer is left out: at round 0.3, the run is at 59.9" in text for text in words_of(facts)
        )
        model.keep(START + 1002)
        assert not model.history.agreed()
        shown = in_the_run(model.view.started_peers)
        assert [peer.name for peer in shown] == ["ada", "bob"]
        assert "loss 1.500" in plain_line(model.view, 1.0, 1.0, None)


def test_who_has_not_caught_up_says_nothing_of_the_run() -> None:
    told = Told()
    with watching(told) as model:
        for peer in ("ada", "bob"):
            told.start(peer, 0)
            told.progress(peer, 100, loss=2.0)
        told.start("late", 99)
        told.progress("late", 100, loss=9.0, position=0.0, phase="joining")
        facts = facts_at(model, 100)
        assert (facts.loss_training, facts.position) == (2.0, 20.0)
        told.progress("late", 101, loss=9.0, position=15.0)
        facts = facts_at(model, 101)
        assert {peer.label: peer.state for peer in facts.peers}["late"] == "behind"
        assert facts.loss_training == 2.0
        told.progress("late", 102, loss=3.0, position=20.0)
        facts = facts_at(model, 102)
        assert facts.loss_training == pytest.approx(7 / 3)
        assert not facts.troubles


def test_a_summary_leaves_out_who_began_anew_and_keeps_who_left_early() -> None:
    told = Told()
    told.start("early", 0)
    told.progress("early", 20, loss=3.0, wall_s=10.0, train_s=5.0)
    told.finish("early", 21, "stopped")
    ended_run(told)
    told.start("newcomer", 1000)
    told.progress("newcomer", 1001, loss=5.5, position=0.3, wall_s=10.0, train_s=0.0)
    told.finish("newcomer", 1010, "stopped")
    summary = summarise(fold(told.events), RunFacts(config=RUN))
    assert summary["utilisation"]["mean"] == pytest.approx((0.5 + 0.9 + 0.9) / 3, abs=1e-3)
    assert summary["utilisation"]["per_peer"]["newcomer"] == 0.0


# ---- a round of one


def test_rounds_of_one_are_alone_everywhere() -> None:
    told = Told()
    told.start("ada", 0)
    for number in range(1, 4):
        told.commit("ada", number, number, size=1)
    told.progress("ada", 5, loss=2.0, versions=(3, 0))
    events = list(told.events)
    with watching(told) as model:
        facts = facts_at(model, 5)
        assert (facts.rounds_committed, facts.rounds_alone) == (0, 3)
        assert {found.outcome for found in facts.rounds} == {"alone"}
        assert "rounds 0 committed 3 alone 0 aborted" in line(facts)
        assert "rounds 0 committed 3 alone 0 aborted" in plain_line(model.view, 1.0, 1.0, None)
        assert b"p2p_co2_swarm_rounds_alone_total 3.0" in exposition(FactsCollector(lambda: facts))
        charts.rounds(charts.LIGHT, facts.rounds, facts.fragments)
    view = fold(events)
    assert (view.committed, view.alone) == (0, 3)
    summary = summarise(view, RunFacts(config=RUN, expected_peers=2))
    assert (summary["rounds"]["committed"], summary["rounds"]["alone"]) == (0, 3)
    assert "no round was committed: 3 were made by one peer alone" in verdict(summary)
    late = SwarmView()
    late.add(recalled(view.peers["ada"], START + 6))
    assert (late.committed, late.alone) == (0, 3)


def test_a_round_of_several_is_none_of_one_whoever_tells_of_it() -> None:
    told = Told()
    told.commit("ada", 1, 1, size=1)
    told.commit("bob", 1, 1, size=2)
    view = fold(told.events)
    assert (view.committed, view.alone) == (1, 1)  # ada was alone once, by its own word
    assert view.rounds[0, 1].outcome == "committed"


def test_who_trains_alone_for_long_is_told_to_invite_others() -> None:
    told = Told()
    with watching(told) as model:
        told.start("ada", 0)
        told.progress("ada", ALONE_S - 1, loss=2.0)
        assert not facts_at(model, ALONE_S - 1).troubles
        told.progress("ada", ALONE_S + 1, loss=2.0)
        (words,) = words_of(facts_at(model, ALONE_S + 1))
        assert words.startswith("ada has trained alone for 0:31")
        assert "p2p-co2 join TICKET" in words
        told.start("bob", 40)
        told.progress("bob", 40, loss=2.0)
        told.progress("ada", 40, loss=2.0)
        assert not facts_at(model, 40).troubles
        told.commit("ada", 50, 9, size=2)
        told.finish("bob", 50, "stopped")
        told.progress("ada", 60, loss=2.0)
        assert not facts_at(model, 60).troubles
        told.progress("ada", 90, loss=2.0)
        assert any("ada has trained alone for 0:40" in text for text in words_of(facts_at(model, 90)))


# ---- the headline


def test_a_held_out_loss_that_is_two_rounds_old_gives_way_to_the_training_loss() -> None:
    told = Told()
    with watching(told) as model:
        told.start("ada", 0)
        told.events.append(
            ev.AgreedMeasured(at=START + 50, peer="ada", loss=1.25, position=10.0, tokens=1, duration_s=0.1)
        )
        told.progress("ada", 60, loss=2.0)
        facts = facts_at(model, 60)
        assert (facts.loss, facts.loss_kind) == (1.25, "held-out")
        told.progress("ada", 61, loss=2.0)
        facts = facts_at(model, 61)
        assert (facts.loss, facts.loss_kind, facts.loss_agreed) == (2.0, "training", 1.25)
        assert "loss 2.000 (training)" in line(facts)


# ---- what is wrong


def test_a_few_skipped_sends_are_nothing_and_many_are_one_line() -> None:
    told = Told()
    with watching(told) as model:
        for peer in ("ada", "bob"):
            told.start(peer, 0)
            told.progress(peer, 10, loss=2.0)
        told.sends("ada", 10, made=7, skipped=1)
        told.sends("bob", 10, made=9, skipped=3)
        assert not facts_at(model, 10).troubles
        told.sends("bob", 11, made=0, skipped=2)
        (words,) = words_of(facts_at(model, 11))
        assert words.startswith(f"27.3 % of the sends of late were skipped (bob, ada): {REASON}; ")
        assert words.endswith("p2p-co2 plan says which they bear")
        for peer in ("ada", "bob"):
            told.progress(peer, 12 + RECENT_S, loss=2.0)
        assert not facts_at(model, 12 + RECENT_S).troubles


def test_rounds_aborted_for_one_reason_are_one_line() -> None:
    told = Told()
    with watching(told) as model:
        for peer in ("ada", "bob"):
            told.start(peer, 0)
            told.progress(peer, 10, loss=2.0)
            for round_ in (1, 2, 3):
                told.events.append(
                    ev.RoundAborted(at=START + 9, peer=peer, fragment=0, round=round_, reason="no mean")
                )
            told.events.append(ev.Warned(at=START + 9, peer=peer, text="something"))
        aborted, warned = words_of(facts_at(model, 10))
        assert aborted.startswith("Round 3 of fragment 0 was aborted: no mean (2 more of late); ")
        assert warned.startswith("2 peers (ada, bob) warn: something; ")


def test_nothing_is_wrong_with_a_run_that_is_over() -> None:
    told = Told()
    with watching(told) as model:
        for peer in ("ada", "bob", "dead"):
            told.start(peer, 0)
            told.progress(peer, 280, loss=2.0)
        told.events.append(ev.PeerLeft(at=START + 290, peer="ada", other="dead", reason="silent for 6 s"))
        told.sends("ada", 290, made=1, skipped=9)
        told.progress("ada", 299, loss=2.0)
        told.progress("bob", 299, loss=2.0)
        assert len(facts_at(model, 299).troubles) == 2
        for peer in ("ada", "bob"):
            told.progress(peer, 300, loss=2.0, position=60.0, phase="draining")
            told.finish(peer, 302)
        assert facts_at(model, 303).troubles == ()


def test_every_kind_of_trouble_ends_in_what_to_do() -> None:
    told = Told()
    with watching(told) as model:
        for peer in ("ada", "bob", "gone", "capped"):
            told.start(peer, 0)
            told.progress(peer, 10, loss=2.0)
        told.events.append(ev.PeerLeft(at=START + 12, peer="ada", other="gone", reason="silent"))
        told.events.append(ev.MessageRefused(at=START + 12, peer="ada", other="bob", reason="bad"))
        told.events.append(ev.Warned(at=START + 12, peer="bob", text="odd"))
        told.events.append(
            ev.RoundAborted(at=START + 12, peer="bob", fragment=1, round=2, reason="the owner was lost")
        )
        told.sends("ada", 12, made=1, skipped=5)
        told.progress("ada", 20, loss=2.0, exposed_s=9.0, train_s=1.0, versions=(9, 9))
        told.progress("bob", 20, loss=2.0)
        told.progress("capped", 20, loss=2.0, position=-9.0)
        found = words_of(facts_at(model, 20))
        assert len(found) >= 7
        for words in found:
            what, _, advice = words.rpartition("; ")
            assert what, words
            assert len(advice) > 15, words


# ---- lines end, and begin


def rows(history: History, peer: str = SWARM) -> list[tuple[float, float]]:
    """(seconds since the start, loss) of all samples of the finest tier."""
    place = charts.column("loss")
    found = (
        history.series(peer, *history.span()) if peer == SWARM else history.series(peer, START, START + 900)
    )
    return [(row[0] - START, row[place]) for row in found]


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_lines_end_at_the_last_report(how: str) -> None:
    told = Told()
    with watching(told) as model:
        told.start("ada", 0)
        told.start("bob", 0)
        for at in range(0, 60, 2):
            if at < 20:
                told.progress("ada", at, loss=2.0)
                told.progress("bob", at, loss=2.0)
            elif how == "lost":
                told.state = FeedState("lost", "no seed can be reached")
            facts = facts_at(model, at)
            model.keep(START + at)
        ends_at = 20 if how == "lost" else 30  # of silence it is sure only after a while
        known = [at for at, loss in rows(model.history) if math.isfinite(loss)]
        assert (known[0], known[-1]) == (0, ends_at - 2)
        assert max(at for at, _ in rows(model.history)) == 58
        option = charts.loss(
            charts.LIGHT, model.history.series(SWARM, *model.history.span()), [], over_tokens=False
        )
        drawn = option["series"][1]
        assert drawn["connectNulls"] is False
        assert [value for _, value in drawn["data"]][-10:] == [None] * 10
        if how == "silent":
            assert facts.peers_online == 0
            assert b"\np2p_co2_swarm_training_loss " not in exposition(FactsCollector(lambda: facts))
            assert "swarm/loss_training" not in figures_of(facts)


def test_a_line_is_broken_where_no_board_looked() -> None:
    times = [*range(0, 60, 2), *range(1000, 1060, 2)]
    series = [(float(at), *[1.0] * 9) for at in times]
    made = charts.over_time(charts.LIGHT, series, {"x": ("tokens_per_s", charts.GREEN, 1.0)})
    data = made["series"][0]["data"]
    assert [at for at, value in data if value is None] == [58001.0]
    assert len(data) == len(series) + 1


def journal_of(path: Path, until: int) -> None:
    told = Told()
    told.start("me", 0)
    for at in range(1, until):
        told.progress("me", at, loss=5.0 - at / 100)
        if at == 50:
            told.commit("me", at, 3, size=2)
    with Journal(path) as journal:
        for event in told.events:
            journal.write(event)


def test_history_begins_with_the_peers_own_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: START + 320)
    path = tmp_path / "events.jsonl"
    journal_of(path, 300)
    hostile = ev.Warned(at=START + 1, peer="another", text="not of this peer")
    with path.open("ab") as file:
        file.write(b"\x00\xff{}\n" + b"x" * (MAX_LINE_BYTES + 9) + b"\n[1]\n" + event_line(hostile))
        for at in (math.inf, 1e300, -1e300, START + 1e6):  # a future that this board will not tell
            file.write(b'{"kind":"warned","peer":"me","text":"x","at":%s}\n' % str(at).encode())
        file.write(b'{"kind":"warned","peer":"me","at":')
    history = History(tmp_path / "board.sqlite")
    recall_journal(path, "me", RUN, history)
    told = rows(history)
    assert told[0][0] <= 4
    assert told[-1][0] >= 290
    assert told[0][1] > 4.9
    assert told[-1][1] < 2.2
    assert [(row.fragment, row.round, row.outcome) for row in history.rounds(9)] == [(0, 3, "committed")]
    lines = history.happenings(99)
    assert {line.peer for line in lines} == {"me"}
    before = len(told), len(lines)
    recall_journal(path, "me", RUN, history)  # a board that is opened again tells nothing twice
    assert (len(rows(history)), len(history.happenings(99))) == before
    recall_journal(tmp_path / "none", "me", RUN, history)
    history.close()


def test_of_a_long_journal_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: START + 320)
    monkeypatch.setattr("monitoring.past.MAX_PAST_BYTES", 20_000)
    journal_of(tmp_path / "events.jsonl", 300)
    assert MAX_PAST_BYTES > 20_000
    history = History(None)
    recall_journal(tmp_path / "events.jsonl", "me", RUN, history)
    told = rows(history)
    assert 200 < told[0][0] < told[-1][0]
    history.close()


def test_without_a_journal_history_begins_with_what_the_peer_remembers() -> None:
    """Of an own loop: its oldest events are one that says what they came to."""
    told = Told(me="me")
    told.start("me", 0)
    for at in range(1, 200):
        told.progress("me", at, loss=5.0 - at / 100)
    older = fold(told.events).peers["me"]
    told.events = [recalled(older, START + 300)]
    for at in range(200, 300):
        told.progress("me", at, loss=5.0 - at / 100)
    with watching(told) as model:
        assert facts_at(model, 300).loss_training == pytest.approx(2.01)
        model.keep(START + 300)
        at = [at for at, loss in rows(model.history) if math.isfinite(loss)]
        assert at[0] <= 4
        assert at == sorted(at)
        assert max(after - before for before, after in itertools.pairwise(at)) <= 4
        assert model.view.peers["me"].totals.tokens == 2990
