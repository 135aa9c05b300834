"""How a run is in a word, how far it is, and what the reader's own peer is told of itself."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from monitoring.facts import OVERDUE_ROUNDS, RECENT_S, SILENT_AFTER_S, RunState, SwarmFacts, swarm_facts
from monitoring.feeds import JournalFeed
from monitoring.model import Model
from monitoring.status import lines_of
from monitoring.terminal import frame, line
from p2p_co2.config import ClockConfig
from p2p_co2.node.reporting import nobody_answers
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.journal import Journal
from p2p_co2.wire.messages_pb2 import RunPosition
from tests.event_samples import progress, started
from tests.made_swarm import MadeFeed, MadeSwarm, step
from tests.told_feed import RUN, START, Told


def told_of(*peers: str, me: str = "") -> Told:
    """A run of rounds of 5 s in which they start at 0 and train."""
    told = Told(me)
    for peer in peers:
        told.start(peer, 0)
    train(told, 1, *peers)
    return told


def train(told: Told, at: float, *peers: str, commits: bool = True) -> None:
    """Each says at ``at`` that it trains and, unless not ``commits``, that a fragment exchange committed."""
    for peer in peers:
        told.progress(peer, at, loss=2.0)
        if commits:
            told.commit(peer, at, 1 + int(at), size=len(peers))


def test_a_run_that_nobody_was_heard_of_has_no_state() -> None:
    facts = Told().at(1)
    assert (facts.state, facts.state_words, facts.time_left_s) == ("", "", None)


def test_two_peers_that_exchange_are_healthy() -> None:
    facts = told_of("ada", "bob").at(2)
    assert facts.state == RunState.HEALTHY
    assert "2 peers are at work" in facts.state_words


def test_one_peer_is_alone_and_told_how_to_invite() -> None:
    facts = told_of("ada").at(2)
    assert facts.state == RunState.ALONE
    assert "only ada is at work" in facts.state_words
    assert "p2p-co2 join TICKET" in facts.state_words


def test_who_rests_does_not_keep_another_company() -> None:
    told = told_of("ada", "bob")
    told.progress("bob", 2, loss=2.0, phase="paused")
    assert told.at(3).state == RunState.ALONE
    told.progress("ada", 3, loss=2.0, phase="paused")
    assert "all peers online are paused" in told.at(4).state_words
    told.progress("ada", 4, loss=2.0)
    told.progress("bob", 4, loss=2.0)
    assert told.at(5).state == RunState.HEALTHY


def test_a_run_with_a_peer_that_rests_is_healthy_and_the_peer_makes_no_tokens() -> None:
    """Its attempt at an exchange ended as it went to rest, and the others made that exchange."""
    told = told_of("ada", "bob", "eve")
    told.progress("eve", 2, loss=2.0, phase="paused")
    gave_up = ev.RoundAborted(at=START + 2, peer="eve", fragment=0, round=3, reason="version 3 is agreed")
    told.events.append(gave_up)
    for peer in ("ada", "bob"):
        told.commit(peer, 2, 3, size=2)
    facts = told.at(3)
    assert (facts.state, facts.troubles, facts.rounds_aborted) == (RunState.HEALTHY, (), 0)
    assert [peer.tokens_per_s > 0 for peer in facts.peers] == [True, True, False]
    told.events.append(dataclasses.replace(gave_up, round=9))
    assert told.at(3.5).state == RunState.DEGRADED  # nobody made that one


def test_whom_the_readers_own_peer_reaches_is_company_before_it_is_heard() -> None:
    """A peer's own board asks the others only while somebody looks."""
    told = told_of("ada", me="ada")
    assert told.at(2).state == RunState.ALONE
    told.events.append(ev.LinkOpened(at=START + 2, peer="ada", other="bob", carrier="grpc"))
    told.progress("ada", 3, loss=2.0)
    facts = told.at(3)
    assert (facts.state, facts.peers_online) == (RunState.HEALTHY, 1)
    told.events.append(ev.PeerLeft(at=START + 4, peer="ada", other="bob", reason="left: the user asked"))
    told.progress("ada", 5, loss=2.0)
    assert told.at(5).state == RunState.ALONE


def test_a_peer_that_goes_degrades_a_run_for_a_while() -> None:
    told = told_of("ada", "bob", "eve")
    assert told.at(2).state == RunState.HEALTHY
    told.events.append(ev.PeerLeft(at=START + 8, peer="ada", other="eve", reason="silent for 6 s"))
    train(told, 9, "ada", "bob")
    facts = told.at(9)
    assert facts.state == RunState.DEGRADED
    assert "eve is gone" in facts.state_words
    for at in (RECENT_S - 2, RECENT_S + 2):
        train(told, at, "ada", "bob")
        state = told.at(at).state
        assert state == (RunState.DEGRADED if at < RECENT_S else RunState.HEALTHY)
    assert told.at(RECENT_S + 2).troubles  # it is still told, as what it is


def test_without_a_committed_exchange_for_three_rounds_a_run_is_degraded() -> None:
    told = told_of("ada", "bob")
    last = 1 + OVERDUE_ROUNDS * 5.0
    for at in (last - 1, last + 1):
        train(told, at, "ada", "bob", commits=False)
        state = told.at(at).state
        assert state == (RunState.HEALTHY if at < last else RunState.DEGRADED)
    assert "no fragment exchange has committed for 0:16" in told.at(last + 1).state_words
    train(told, last + 2, "ada", "bob")
    assert told.at(last + 2).state == RunState.HEALTHY


def test_exchanges_that_are_heard_of_late_are_no_pause() -> None:
    """A reader that comes later hears of old rounds after the new ones."""
    told = told_of("ada", "bob")
    train(told, 39, "ada", "bob")
    told.at(39)
    for peer in ("ada", "bob"):
        told.commit(peer, 20, 21, size=2)
    facts = told.at(40)
    assert (facts.state, facts.troubles) == (RunState.HEALTHY, ())


def test_a_stage_without_replica_degrades_a_run_for_as_long_as_it_lasts() -> None:
    feed = MadeFeed(MadeSwarm(6, start_at=START, stages=4, dead=3, length_s=100.0))
    feed.is_whole = False
    model = Model(feed)
    for until in (60, 300):
        feed.advance(until)
        step(model, START + until)
    facts = model.facts()
    assert facts.state == RunState.DEGRADED
    assert "stage 3 of 4 has no replica" in facts.state_words


def test_a_run_out_of_reach_or_with_nobody_online_is_lost() -> None:
    told = told_of("ada", "bob")
    told.at(2)
    assert told.at(3 + 2 * SILENT_AFTER_S).state == RunState.LOST
    train(told, 40, "ada", "bob")
    assert told.at(40).state == RunState.HEALTHY
    told.state = FeedState("lost", "no seed can be reached")
    facts = told.at(41)
    assert (facts.state, facts.time_left_s) == (RunState.LOST, None)
    assert "no seed can be reached" in facts.state_words


def test_a_run_whose_rounds_are_made_or_whose_peers_all_left_is_over() -> None:
    told = told_of("ada", "bob")
    train(told, 290, "ada", "bob")
    assert told.at(290).state == RunState.HEALTHY
    for peer in ("ada", "bob"):
        told.progress(peer, 300, loss=2.0, position=60.0, phase="draining")
    facts = told.at(301)
    assert (facts.state, facts.progress, facts.time_left_s) == (RunState.OVER, 1.0, None)
    left = told_of("ada", "bob")
    left.finish("ada", 3)
    assert left.at(4).state == RunState.ALONE
    left.finish("bob", 5)
    assert left.at(6).state == RunState.OVER


def test_a_run_that_ended_before_the_reader_came_is_over_where_the_seed_says_it_was() -> None:
    """Those that left are listed for a while and answer nobody; later nobody is listed."""
    for listed in (0, 2):
        told = Told()
        told.state = nobody_answers(listed, 0, RunPosition(position=60.0), RUN.clock.rounds)
        for peer in ("ada", "bob")[:listed]:
            told.model.sightings[peer] = Sighting(peer, "unreachable", "does not answer")
        facts = told.at(1)
        assert (facts.state, facts.position, facts.progress, facts.troubles) == (RunState.OVER, 60.0, 1.0, ())
        assert "ended at round 60 of 60; " in facts.state_words
        assert "p2p-co2 model FOLDER --out DIR" in facts.state_words
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(frame(facts, 100, 30))
        for shown in (line(facts), console.export_text()):
            assert "ended at round 60 of 60; " in shown
            assert "tokens" not in shown
        assert lines_of(facts)[1:] == []  # figures of peers that were never heard say nothing of the run
    told = Told()
    told.state = nobody_answers(0, 0, RunPosition(position=12.3), RUN.clock.rounds)
    facts = told.at(1)
    assert (facts.state, facts.position) == ("", 12.3)


def test_a_journal_that_ended_is_of_a_run_that_is_over() -> None:
    told = told_of("ada", "bob")
    told.at(2)
    facts = swarm_facts(dataclasses.replace(told.model.known, is_over=True))
    assert facts.state == RunState.OVER


# ---- how far


def at_round(told: Told, position: float) -> SwarmFacts:
    for peer in ("ada", "bob"):
        told.progress(peer, 2, loss=2.0, position=position, inner_steps=100, wall_s=50.0)
    return told.at(2)


def test_time_left_is_the_clocks_or_that_of_the_peers_steps() -> None:
    told = told_of("ada", "bob")
    facts = at_round(told, 15.0)
    assert facts.progress == pytest.approx(0.25)
    assert facts.time_left_s == pytest.approx(45 * 5.0)
    told.run = RUN.model_copy(
        update={"clock": ClockConfig(mode="steps", inner_steps_per_round=30, rounds=20)}
    )
    assert at_round(told, 15.0).time_left_s == pytest.approx(5 * 30 * 0.5)  # half a second for each step
    told.run = RUN.model_copy(update={"clock": ClockConfig(mode="time", round_s=5.0)})
    facts = at_round(told, 15.0)
    assert (facts.progress, facts.time_left_s) == (None, None)


def test_what_a_checkpoint_holds_makes_nobody_faster_for_who_looks_on_since_then() -> None:
    told = Told()
    told.run = RUN.model_copy(
        update={"clock": ClockConfig(mode="steps", inner_steps_per_round=30, rounds=20)}
    )
    told.events.append(
        dataclasses.replace(started("ada", START, "ada"), resumed_from="checkpoint", inner_steps=9000)
    )
    told.progress("ada", 2, loss=2.0, position=15.0, inner_steps=9100, wall_s=50.0)
    assert told.at(2).time_left_s == pytest.approx(5 * 30 * 0.5)


def test_a_run_of_which_everybody_rests_has_no_time_left() -> None:
    told = told_of("ada", "bob")
    told.progress("ada", 2, loss=2.0, phase="paused")
    assert told.at(2).time_left_s is not None
    told.progress("bob", 3, loss=2.0, phase="paused")
    assert told.at(3).time_left_s is None


def test_who_rests_does_not_hold_up_where_the_run_is() -> None:
    told = told_of("ada", "bob")
    told.progress("bob", 6, loss=2.0, phase="paused")
    for at in range(7, 100):
        told.progress("ada", at, loss=2.0)
        told.progress("bob", at, loss=2.0, phase="paused", position=1.2)
    facts = told.at(100)
    assert (facts.position, facts.time_left_s) == (99 / 5, pytest.approx(5 * (60 - 99 / 5)))
    assert {peer.label: peer.state for peer in facts.peers} == {"ada": "training", "bob": "paused"}


def test_who_came_for_the_model_alone_and_was_never_heard_is_no_trouble() -> None:
    told = told_of("ada", "bob")
    told.events.append(
        ev.PeerLeft(at=START + 3, peer="ada", other="eve", reason="left: has what it came for")
    )
    facts = told.at(4)
    assert {peer.peer: peer.state for peer in facts.peers}["eve"] == "left"
    assert facts.state == RunState.HEALTHY


# ---- the reader's own peer


def test_a_readers_own_peer_is_named_with_its_newest_exchange() -> None:
    told = told_of("ada", "bob", me="bob")
    told.commit("ada", 3, 7, size=1)
    told.commit("bob", 4, 9, size=2)
    facts = told.at(5)
    assert facts.me == "bob"
    assert facts.my_exchange is not None
    assert (facts.my_exchange.round, facts.my_exchange.outcome) == (9, "committed")


def test_an_observer_has_no_peer_of_its_own() -> None:
    facts = told_of("ada", "bob").at(2)
    assert (facts.me, facts.my_exchange) == ("", None)


def test_a_peers_own_folder_is_seen_as_its_own_and_is_over_when_it_has_ended(tmp_path: Path) -> None:
    """The others wrote no line in it, and its links are company enough."""
    (tmp_path / "lock").touch()
    with Journal(tmp_path / "events.jsonl") as journal:
        journal.write(started("ada", START, "ada"))
        journal.write(ev.LinkOpened(at=START + 1, peer="ada", other="bob", carrier="grpc"))
        journal.write(dataclasses.replace(progress("ada", START + 2, loss=2.0), phase="training"))
        model = Model(JournalFeed(tmp_path))
        step(model, START + 3)
        assert (model.facts().state, model.facts().me) == (RunState.HEALTHY, "ada")
        end = ev.PeerFinished(at=START + 4, peer="ada", reason="the run is over", digest="d", versions=(1,))
        journal.write(end)
    step(model, START + 5)
    assert model.facts().state == RunState.OVER
