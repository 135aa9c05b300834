"""How long a download waits for anything at all, by hand; and a peer that stood still while it loaded."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.node.router import Inbox
from p2p_co2.protocol.catchup import Fetched, FetchFailed
from p2p_co2.protocol.catchup.line import OUTRUN_S
from p2p_co2.protocol.catchup.waiting import COMES_WITHIN_S, MOVES_WITHIN_S, Waiting
from p2p_co2.protocol.membership import HEARTBEAT_S
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.simnet.oversight import Oversight
from tests.catchup_world import D2, LATE, World, vouched_and_never_given


def test_who_waited_for_its_turn_goes_on_waiting() -> None:
    waiting = Waiting(0.0)
    assert waiting.ends_at([1995.0]) == 1995.0 + MOVES_WITHIN_S  # a donor gives to another download
    waiting.looks([1995.0])
    waiting.moved(2000.0)  # and is gone
    assert waiting.ends_at([]) == 2000.0 + MOVES_WITHIN_S


def test_who_is_busy_with_promises_does_not_stand_still() -> None:
    """No timer was due for two minutes, since somebody promised something ever again: as if it had stood, the
    time began anew, for ever."""
    waiting = Waiting(0.0)
    for at in range(10, 300, 10):
        waiting.moved(float(at))
    waiting.looks([])
    assert waiting.ends_at([]) == COMES_WITHIN_S


def test_it_goes_on_with_others_only_once_where_nothing_comes_with_anybody() -> None:
    waiting, now = Waiting(0.0), 0.0
    for others_are_tried in (True, False):
        while now < waiting.ends_at([]):
            now += 50.0
            waiting.moved(now)
        assert waiting.nothing_s(now) == COMES_WITHIN_S
        assert waiting.goes_on(now, loses=True) == others_are_tried
    assert now == 2 * COMES_WITHIN_S


def test_it_may_go_on_once_more_when_something_came_between() -> None:
    waiting = Waiting(0.0)
    assert waiting.goes_on(COMES_WITHIN_S, loses=False)  # though nothing is chosen just then
    assert not waiting.goes_on(2 * COMES_WITHIN_S, loses=True)
    waiting.came(2 * COMES_WITHIN_S)
    assert waiting.goes_on(3 * COMES_WITHIN_S, loses=True)


def test_where_nobody_is_to_be_left_it_does_not_go_on_after_a_minute() -> None:
    waiting = Waiting(0.0)
    assert waiting.goes_on(MOVES_WITHIN_S, loses=True)
    assert not waiting.goes_on(MOVES_WITHIN_S, loses=False)


@pytest.mark.parametrize("is_timer_first", [True, False])
def test_no_donor_was_silent_while_this_process_stood_still(is_timer_first: bool) -> None:
    """The first timer after a minute's sleep found all of them silent, and dropped all but the last for a
    minute, with their answers in the buffers; or the first of these counted as a minute late, and its donor
    as so slow from then on."""
    world = World(donors=4, rate=500e3)
    world.want()
    world.run(3.0)
    late, stood_s = world.machines[LATE], 50.0
    late.awake.is_due(world.now + 0.1)  # it ran in this moment, and stands from now on
    world.now += stood_s
    assert late.moves(world.now, 10.0)
    if is_timer_first:
        late.handle_timer(world.now)
        assert (late.get_timer() or 0.0) > world.now
    began_at = world.now
    world.run(5.0)
    assert late.awake.stood_s == pytest.approx(stood_s, abs=1.0)
    sources = late._fetcher._downloads[1].sources.values()
    assert max(gap_s for source in sources for gap_s in source.line._gaps_s) < stood_s / 4
    world.run(60.0)
    assert len(world.fetched().donors) == 4
    assert max(world.chunks_sent().values()) == 1
    assert world.now - began_at < OUTRUN_S / 4


def test_a_process_that_stood_still_knows_for_how_long_before_it_hears_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunConfig(name="suspended", clock=ClockConfig(mode="time", round_s=10.0, rounds=6))
    swarm = Swarm(Settings(run=run, peers=5, seed=2, profile="dsl"), EventLog(digests=False))
    heard, stood, stands_s, ends_at = list[float](), dict[str, float](), 18.0, 48.0
    take, end = Inbox.take, Oversight.end

    def hear(inbox: Inbox, *message: Any) -> bool:
        useful = take(inbox, *message)
        if inbox.membership.me == swarm.peer_ids()[0] and swarm.world.now >= ends_at:
            heard.append(inbox.catchup.awake.stood_s)
        return useful

    def note(oversight: Oversight) -> None:
        stood[oversight._node.me] = oversight._node.catchup.awake.stood_s
        end(oversight)

    monkeypatch.setattr(Inbox, "take", hear)
    monkeypatch.setattr(Oversight, "end", note)
    swarm.world.call_at(ends_at - stands_s, swarm.stall, 0, ends_at)
    assert swarm.run().violations == []
    assert heard[0] == heard[-1] == pytest.approx(stands_s, abs=HEARTBEAT_S)
    assert sorted(stood.values())[:-1] == [0.0] * 4  # a busy one did not stand
    assert stood[swarm.peer_ids()[0]] == heard[0]


def test_the_one_chance_goes_to_others_though_what_gave_nothing_was_just_asked_anew() -> None:
    """Nothing was chosen in that moment, so nobody was left: it promised once more, and was chosen again."""
    world = vouched_and_never_given()
    late = world.machines[LATE]
    load = late._fetcher._downloads[1]
    load._lose(load.sources[D2], "silent", world.now, moved_on=True)
    assert load._chosen is None
    assert load._others()
    load._waiting._came_at -= COMES_WITHIN_S
    late.handle_timer(world.now)
    world.run(15.0)
    (event,) = (event for event in world.events if isinstance(event, Fetched | FetchFailed))
    assert isinstance(event, Fetched)
    assert event.version == 7


def test_a_donor_whose_turn_was_waited_for_leaves_the_time_until_then_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five minutes of waiting for its turn counted as five without anything, once it was gone."""
    world = World(donors=2, rate=100e3)
    world.want()
    world.run(1.0)
    load = world.machines[LATE]._fetcher._downloads[1]
    load._waiting._came_at -= COMES_WITHIN_S
    monkeypatch.setattr(load, "_turns", lambda: [world.now] if D2 in load.sources else [])
    load.drop(D2, "left", world.now)
    assert D2 not in load.sources
    assert load._waiting.ends_at([]) > world.now
