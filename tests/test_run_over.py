"""Joining a run that is over, or that all have left: refused by hand, and by processes on loopback."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.seed import keep_positions, read_positions
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import RUN_OVER, RunOver, TransportError
from p2p_co2.net.discovery.records import run_position
from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S
from p2p_co2.node.reporting import nobody_answers
from p2p_co2.telemetry.events import FragmentApplied, Progress
from p2p_co2.trainer.arrival import Beginning
from p2p_co2.wire.limits import HELLO_WINDOW_S
from p2p_co2.wire.messages_pb2 import RunPosition
from tests.campaign import RECIPE
from tests.swarms import START_BOUND_S, swarm


def said(position: float, at: float = 0.0) -> RunPosition:
    return RunPosition(position=position, written_at=at)


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([], None),
        ([said(12.3)], 12.3),
        ([said(60, 1000), said(5, 100), said(5, 100), said(5, 100)], 60),  # who left early is not asked
        ([said(60, 1000), said(59, 990)], 60),
        ([said(12, 1000), said(12.5, 990), said(60, 1001)], 12.5),  # one liar among three
        ([said(12, 1000), said(60, 1000), said(60, 1000)], 60),
        ([said(60, 0.0), said(2, 3 * MESSAGE_TIMEOUT_S + 1)], 2),  # somebody began anew
    ],
)
def test_the_runs_position_is_what_half_of_those_say_that_were_there_last(
    claims: list[RunPosition], expected: float | None
) -> None:
    for order in (claims, claims[::-1]):
        found = run_position(order, 2000.0)
        assert (found.position if found is not None else None) == expected


def test_a_position_of_the_future_makes_no_other_too_old() -> None:
    """What may stand in the DHT may be dated later than now by more than peers that were there together."""
    now = 1000.0
    honest = [said(5, now - 10 * number) for number in range(9)]
    found = run_position([*honest, said(60, now + HELLO_WINDOW_S - 1)], now)
    assert found is not None
    assert found.position == 5


class Alone:
    """A network thread that hears ``live`` peers, of which none has joined."""

    def __init__(self, last: RunPosition | None, live: int = 0, listed: int = 0) -> None:
        self.last, self.live, self.listed = last, live, listed
        self.told = list[str]()

    def warn(self, text: str) -> None:
        self.told.append(text)

    def run_position(self) -> RunPosition | None:
        return self.last

    def live_peers(self) -> int:
        return self.live

    def is_listed_empty(self) -> bool:
        return not self.listed

    def unheard_peers(self) -> int:
        return self.listed

    network = SimpleNamespace(reach_advice="", holds=SimpleNamespace(stage=None))


def beginning(alone: Alone, rounds: int = 60, saved: float | None = None, over: bool = False) -> Any:
    """A ``Beginning`` whose node hears what ``alone`` does."""
    thread: Any = alone
    made = Beginning(thread, lambda at: rounds, saved, over)
    return SimpleNamespace(
        refuse_if_over=made.refuse_if_over,
        is_allowed=lambda has_waited: made.is_allowed(thread, has_waited),
    )


def test_a_run_that_nobody_has_trained_is_begun() -> None:
    made = beginning(Alone(None))
    made.refuse_if_over()
    assert made.is_allowed(has_waited=False)


@pytest.mark.parametrize("saved", [None, 60.0])
def test_a_run_that_is_over_is_refused_before_anything_large(saved: float | None) -> None:
    with pytest.raises(RunOver, match=r"^this run ended at round 60; ask for a newer ticket$"):
        beginning(Alone(said(60)), saved=saved).refuse_if_over()
    listed = beginning(Alone(said(60), listed=2), saved=saved)  # they may still be there, or just have left
    listed.refuse_if_over()
    with pytest.raises(RunOver):
        listed.is_allowed(has_waited=False)
    beginning(Alone(said(60)), saved=saved, over=True).refuse_if_over()
    beginning(Alone(said(60)), rounds=0, saved=saved).refuse_if_over()


def test_a_run_that_all_have_left_is_refused_to_who_has_no_checkpoint() -> None:
    left = r"the others left at round 12\.3; join with the checkpoint .* begin anew with --start-over"
    for rounds in (0, 60):
        made = beginning(Alone(said(12.3)), rounds)
        made.refuse_if_over()
        with pytest.raises(TransportError, match=left):
            made.is_allowed(has_waited=False)
        assert beginning(Alone(said(12.3)), rounds, saved=11.0).is_allowed(has_waited=False)
        assert beginning(Alone(said(12.3)), rounds, over=True).is_allowed(has_waited=False)
    assert beginning(Alone(said(60)), saved=41.0).is_allowed(has_waited=False)  # from before its end


@pytest.mark.parametrize(
    ("last", "saved", "is_told"),
    [(50.0, 3.0, True), (60.0, 58.0, True), (12.3, 11.4, False), (3.0, 50.0, False), (None, 3.0, False)],
)
def test_who_begins_from_an_older_checkpoint_than_the_others_left_at_is_told_once(
    last: float | None, saved: float, is_told: bool
) -> None:
    alone = Alone(said(last) if last is not None else None)
    made = beginning(alone, saved=saved)
    for _ in range(2):
        assert made.is_allowed(has_waited=False)
    assert len(alone.told) == is_told
    for text in alone.told:
        assert f"at round {last:.1f} when" in text
        assert f"checkpoint is of round {saved:.1f}" in text
    anew = Alone(alone.last)
    assert beginning(anew, saved=None, over=True).is_allowed(has_waited=False)
    assert not anew.told


def test_while_no_seed_answers_only_who_has_a_checkpoint_goes_on() -> None:
    class Deaf(Alone):
        def run_position(self) -> RunPosition | None:
            raise TransportError("no seed says where the run is")

    for saved in (None, 11.0):
        made = beginning(Deaf(None), saved=saved)
        made.refuse_if_over()
        assert not made.is_allowed(has_waited=False)
    assert made.is_allowed(has_waited=True)
    with pytest.raises(TransportError, match="no seed"):
        beginning(Deaf(None)).is_allowed(has_waited=True)


def test_newcomers_that_meet_only_each_other_wait_for_a_while_and_are_refused() -> None:
    alone = Alone(said(12.3), live=1)
    made = beginning(alone)
    assert not made.is_allowed(has_waited=False)
    alone.last = None
    assert not made.is_allowed(has_waited=False)  # asked once
    with pytest.raises(TransportError, match="the others left"):
        made.is_allowed(has_waited=True)


@pytest.mark.parametrize(
    ("last", "rounds", "words"),
    [
        (None, 60, "nobody trains now"),
        (said(60), 60, "the run ended at round 60"),
        (said(12.3), 60, "all left at round 12.3; the run goes on when one with a checkpoint is back"),
        (said(99), 0, "all left at round 99.0; the run goes on when one with a checkpoint is back"),
    ],
)
def test_who_looks_at_a_run_without_peers_is_told_where_it_was(
    last: RunPosition | None, rounds: int, words: str
) -> None:
    state = nobody_answers(0, 0, last, rounds)
    assert (state.words.split("listed: ")[-1], state.phase == "ended") == (words, "ended" in words)
    assert nobody_answers(3, 0, last, rounds).phase == state.phase
    assert nobody_answers(3, 1, last, rounds).phase == "connected"


def test_a_seed_that_is_started_again_knows_where_the_run_was(tmp_path: Path) -> None:
    assert read_positions(tmp_path) == []
    kept = [("12D3KooWa", b"sealed\n\0"), ("12D3KooWb", b"x")]
    keep_positions(tmp_path, kept)
    assert read_positions(tmp_path) == kept
    with (tmp_path / "positions").open("ab") as file:
        file.write(b"12D3KooWc c2Vh*ZWQ=\n\xff\xfe eA==\ntorn")
    assert read_positions(tmp_path) == kept


@pytest.mark.swarm
def test_who_joins_a_run_that_all_have_left_or_that_is_over_is_refused_unless_it_begins_anew(
    tmp_path: Path,
) -> None:
    clock = ClockConfig(mode="time", round_s=1.0, rounds=8)
    with swarm(tmp_path, RunConfig(name="over", recipe=RECIPE, fragments=2, clock=clock)) as running:
        running.start_peer("a")
        running.wait_for("a", FragmentApplied, count=4)
        running.processes["a"].send_signal(signal.SIGINT)
        running.wait("a")
        assert running.start_peer("late", "--impatient").wait(START_BOUND_S) != 0
        assert "TransportError: the others left at round" in running.log("late")
        running.start_peer("anew", "--start-over", "--impatient")
        running.wait("anew")
        join = ["-m", "p2p_co2.cli", "join", running.ticket, "--recipe", RECIPE, "--no-board"]
        later = running.start("later", [sys.executable, *join, "--folder", str(tmp_path / "later")])
        assert later.wait(START_BOUND_S) == RUN_OVER
        assert "error: this run ended at round 8; ask for a newer ticket" in running.log("later")
        steps = [event.inner_steps for event in running.events("later") if isinstance(event, Progress)]
        assert not any(steps)
