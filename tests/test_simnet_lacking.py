"""A simulated peer that leaves without what others hold: it says so, and may do so only on lines that are too
slow to bring it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from p2p_co2.cli.simulate import SimulationOptions, figures, lines_of
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.node.progress import LACKS
from p2p_co2.protocol.catchup import CatchUp
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.telemetry.events import Event, Warned

LATE = 2


def swarm_of_three(profile: str) -> Swarm:
    """The third stands still for most of the run. Over two relays of 10 kB/s each what it lacks then, two
    states of 13 MB, takes more than the ten minutes for which the others stay."""
    run = RunConfig(name="lacks", fragments=2, clock=ClockConfig(mode="time", round_s=15.0, rounds=60))
    settings = Settings(
        run=run, peers=3, seed=1, profile=profile, blocks=(16, 16), real_bytes_per_block=12.8e3,
        state_factor=64,
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    swarm.world.call_at(150.0, swarm.stall, LATE, 880.0)
    return swarm


def test_who_cannot_load_in_time_what_others_hold_leaves_and_says_so() -> None:
    swarm, told = swarm_of_three("satellite"), list[Warned]()

    def note(event: Event) -> None:
        if isinstance(event, Warned) and event.text.startswith(LACKS):
            told.append(event)

    swarm.log.readers.append(note)
    result = swarm.run()
    late = swarm.volunteers[LATE]
    assert result.violations == []
    assert result.lacking == [late.name]
    assert [event.peer for event in told] == [late.identity.peer_id]
    mine, its = (swarm.inspector._ends[peer] for peer in (told[0].peer, swarm.peer_ids()[0]))
    lacks = [fragment for fragment in range(2) if mine[fragment].version < its[fragment].version]
    texts = [f"fragment {f}: version {mine[f].version} of {its[f].version}" for f in lacks]
    assert texts
    assert all(text in told[0].text for text in texts)

    # What it ends with is the others' history: a state that theirs did not come of is none.
    other = {fragment: replace(mine[fragment], digest=b"another") for fragment in lacks}
    swarm.inspector._ends[told[0].peer] = [other.get(0, mine[0]), other.get(1, mine[1])]
    swarm.inspector._judge_end()
    assert swarm.books.violations == []  # since views differed, a fork has its time
    swarm.views_differed_at = 0.0
    swarm.inspector.heal_s = 1.0
    swarm.inspector._judge_end()
    broken = [(one.peer, one.law) for one in swarm.books.violations]
    assert broken == [(late.identity.peer_id, "end")] * len(lacks)


def test_where_all_lack_something_each_has_what_the_furthest_came_of() -> None:
    """Two on ways of 10 kB/s each held what the other lacked, of one history (storm 300428 as drawn)."""
    swarm = swarm_of_three("satellite")
    assert swarm.run().violations == []
    late, *others = (swarm.peer_ids()[index] for index in (LATE, 0, 1))
    inspector, books = swarm.inspector, swarm.books
    inspector.lacking = set(swarm.peer_ids())
    older, newer = inspector._ends[late], inspector._ends[others[0]]
    inspector._ends[late], inspector._ends[others[0]] = [older[0], newer[1]], [newer[0], older[1]]
    swarm.views_differed_at, inspector.heal_s = 0.0, 1.0
    inspector._judge_end()
    assert books.violations == []
    inspector._ends[late] = [older[0], replace(older[1], digest=b"another")]
    inspector._judge_end()
    assert [(one.peer, one.law) for one in books.violations] == [(late, "end")]


def test_who_leaves_without_it_where_lines_could_have_brought_it_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CatchUp, "want", lambda machine, goal, now: None)  # a bug: nothing is ever loaded
    result = swarm_of_three("fibre").run()
    assert result.lacking == ["peer-2"]
    assert [one.text for one in result.violations if one.law == "end"] == ["2 different states at the end"]
    summary = {
        "rounds": {"committed": 1, "aborted": 0}, "staleness": {"histogram": {}},
        "bytes": {"up_per_peer": {}, "down_per_peer": {}},
    }  # fmt: skip
    options = SimulationOptions(
        run_file=Path("run.toml"), peers=3, profile="fibre", hours=0.0, churn_per_h=0.0, seed=1, folder=None,
        parameters=0, step_s=0.0, storm=False,
    )  # fmt: skip
    told = figures(result, options, 1.0)
    assert told["lacking"] == ["peer-2"]
    words = lines_of(summary | {"simulation": told | {"planned_s": 1.0}}, result)
    assert "left without what others hold, and said so: peer-2" in words
