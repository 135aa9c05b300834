"""Simulated swarms whose lines are slow, or cut: what takes long there is no fault, all end in one state, and
a peer that cannot says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from p2p_co2.cli.simulate import figures
from p2p_co2.codec_specs import SPECS
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.node.catchup import CatchupController
from p2p_co2.node.progress import LACKS
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.protocol.catchup.fetcher import Fetcher
from p2p_co2.protocol.rounds.owner import SLOW
from p2p_co2.simnet import EventLog, Settings, VirtualSwarm, process, rendezvous
from p2p_co2.simnet.internet import VirtualLinks
from p2p_co2.telemetry.events import CaughtUp, FragmentSent, RoundAborted, TrainingEnded, Warned
from p2p_co2.trainer import arrival
from p2p_co2.wire.messages_pb2 import PeerRecord
from p2p_co2.wire.schedule import STILL_LOADS

SPACE = PROFILES["satellite"]
LATE = 2
PEERS, STARTS_AT = 5, 110.0
"""A newcomer's others, and when it starts: too late to replay all rounds that were made."""


def swarm_of(
    peers: int, rounds: int, profile: str, *, round_s: float = 4.0, fragments: int = 2, seed: int = 5,
    blocks: int = 8, **more: Any,
) -> VirtualSwarm:  # fmt: skip
    clock = ClockConfig(mode="time", round_s=round_s, rounds=rounds)
    run = RunConfig(name="ends", fragments=fragments, clock=clock)
    return VirtualSwarm(
        Settings(run=run, peers=peers, seed=seed, profile=profile, blocks=(blocks,) * fragments, **more),
        EventLog(digests=False),
    )


def split_in_two(swarm: VirtualSwarm, from_s: float, until: float) -> None:
    sides = {peer: number % 2 for number, peer in enumerate(swarm.peer_ids())}
    swarm.world.call_at(from_s, swarm.internet.split, sides)
    swarm.world.call_at(until, swarm.internet.heal)


def told_by(swarm: VirtualSwarm) -> list[Warned]:
    told = list[Warned]()
    swarm.log.readers_of[Warned].append(told.append)
    return told


# ---- forks


def test_a_fork_is_given_its_time_once_the_cut_is_over() -> None:
    """Two halves make rounds of their own for as long as the net is cut, which no protocol can help."""
    swarm = swarm_of(4, 60, "fibre")
    split_in_two(swarm, 20.0, 150.0)
    result = swarm.run()
    assert result.violations == []
    assert 2 <= result.forks <= 4  # each half's of two fragments; one more each where the halves meet
    assert swarm.inspector.heal_s < 105.0 < result.longest_fork_s < 130.0 + swarm.inspector.heal_s


def test_two_halves_that_never_find_together_again_are_called_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks around: what is still forked when its time is up is said, and how the run ended."""
    swarm, healed_at = swarm_of(4, 25, "fibre"), 40.0
    split_in_two(swarm, 20.0, healed_at)
    monkeypatch.setattr(CatchupController, "look_around", lambda catching, now: None)
    monkeypatch.setattr(CatchupController, "go_to", lambda catching, *where: False)
    found = swarm.run().violations
    forks = [one.at for one in found if one.law == "forks"]
    assert forks == pytest.approx([healed_at + swarm.inspector.heal_s] * 2, abs=1.5)
    assert found[-1].text.endswith("different states at the end")


def test_a_peer_that_stands_still_at_its_end_goes_so_much_later() -> None:
    """And as long as it does, views may come to differ: a fork's time begins when it goes on."""
    swarm, wrong_at, stands_s = swarm_of(3, 5, "fibre"), list[tuple[float, float | None]](), 200.0

    def stop_first(event: TrainingEnded) -> None:
        if event.peer == swarm.peer_ids()[0]:
            swarm.stall(0, swarm.world.now + stands_s)
            swarm.world.call_at(swarm.world.now + stands_s - 1.0, look)

    def look() -> None:
        wrong_at.append((swarm.world.now, swarm.inspector.went_wrong_at()))

    swarm.log.readers_of[TrainingEnded].append(stop_first)
    result = swarm.run()
    assert {one.law for one in result.violations} <= {"end"}  # the others have gone without it
    assert result.virtual_s > swarm.settings.planned_s + stands_s
    ((now, at),) = wrong_at
    assert now == at


# ---- peers that come late


def test_who_comes_back_in_the_last_round_ends_with_the_state_of_the_others() -> None:
    """They left while it loaded their states, or where these are large replayed their rounds: all agreed, and
    a newcomer has no word in that."""
    swarm = swarm_of(3, 6, "dsl", round_s=10.0, seed=1, blocks=16, real_bytes_per_block=2e5, state_factor=64)
    swarm.world.call_at(15.0, swarm.kill, 2, True)
    swarm.world.call_at(52.0, swarm.start, 2, False)
    ended_at: list[float] = []
    swarm.log.readers_of[TrainingEnded].append(lambda event: ended_at.append(swarm.world.now))
    result = swarm.run()
    assert result.violations == []
    assert len(result.digests) == 3
    assert len(set(result.digests.values())) == 1
    others_at, _, its_own_at = sorted(ended_at)
    assert its_own_at > others_at + 40.0


def test_a_newcomer_that_loses_all_while_it_loads_waits_for_them() -> None:
    """It left after half a minute, though the others were only out of reach."""
    cut_s = 45.0
    swarm = swarm_of(
        PEERS, 18, "transatlantic", round_s=10.0, seed=3, blocks=16, real_bytes_per_block=1e4, state_factor=64
    )
    swarm.world.call_at(10.0, swarm.kill, 0, True)
    swarm.world.call_at(STARTS_AT, swarm.start, 0, False)
    sides = {peer: int(index > 0) for index, peer in enumerate(swarm.peer_ids())}
    swarm.world.call_at(STARTS_AT + 3.0, swarm.internet.split, sides)  # it loads by then
    swarm.world.call_at(STARTS_AT + 3.0 + cut_s, swarm.internet.split, {})
    result = swarm.run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    assert len(result.digests) == PEERS


def test_a_newcomer_waits_until_it_is_concluded_what_the_first_that_it_hears_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had found itself alone while the DHT was looked up; in the moment between the first answer and what
    follows from it that was taken for where the swarm is, and it offered work on the start state."""
    look_up = rendezvous.Doorway.find_peers

    async def find_slowly(self: rendezvous.Doorway) -> list[PeerRecord]:
        await asyncio.sleep(1.0)
        return await look_up(self)

    monkeypatch.setattr(rendezvous.Doorway, "find_peers", find_slowly)
    monkeypatch.setattr(process, "LOOK_EVERY_S", 1e-3)
    for seed in range(3):
        swarm = swarm_of(2, 20, "home-mix", seed=seed, start_spread_s=60.0)
        begun: dict[str, tuple[float, int]] = {}

        def note(event: FragmentSent, swarm: VirtualSwarm = swarm, begun: dict[str, Any] = begun) -> None:
            begun.setdefault(event.peer, (swarm.world.now, event.round))

        swarm.log.readers_of[FragmentSent].append(note)
        swarm.run()
        (first_at, _), (came_at, round_) = sorted(begun.values())
        assert round_ > 1 or came_at - first_at < 8.0


def test_a_newcomer_goes_on_loading_while_one_fragment_after_the_other_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fragment has its own bound: one alone, from one donor over a relay of 89 kB/s, takes 120 s."""
    bound_s = 150.0
    monkeypatch.setattr(arrival, "CATCH_UP_BOUND_S", bound_s)
    swarm = swarm_of(
        3, 40, "4g", round_s=10.0, fragments=4, seed=1, blocks=16, real_bytes_per_block=1e4,
        state_factor=64,
    )  # fmt: skip
    swarm.world.call_at(5.0, swarm.kill, 2, True)
    swarm.world.call_at(160.0, swarm.start, 2, False)
    result = swarm.run()
    assert result.violations == []
    assert result.lacking == []
    (joined_s,) = result.recoveries_s
    assert 2 * bound_s < joined_s < 3 * bound_s


# ---- lines too slow for their runs


def far_too_slow(seed: int) -> VirtualSwarm:
    """Three behind relays of 89 kB/s, 10 million parameters in two fragments, rounds of 30 s."""
    encoded = SPECS["int4"].payload_bytes(10_000_000)
    return swarm_of(3, 4, "4g", round_s=30.0, seed=seed, blocks=16, real_bytes_per_block=encoded / 16)


def test_nobody_leaves_while_the_others_make_a_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """On lines that show ten times what their ways carry a round takes more than a minute. All stay for those
    that make one, or fetch what they missed."""

    swarm, aborted = far_too_slow(13), list[RoundAborted]()
    shown_bytes_per_s = PROFILES["4g"].up_bits_per_s / 8 / swarm.internet.scale
    monkeypatch.setattr(VirtualLinks, "upload_bytes_per_s", shown_bytes_per_s)
    told = told_by(swarm)
    swarm.log.readers_of[RoundAborted].append(aborted.append)
    result = swarm.run()
    assert result.violations == []
    assert aborted == []
    assert len(set(result.digests.values())) == 1
    assert {one.text for one in told if not one.text.endswith(SLOW)} <= {STILL_LOADS}
    assert result.virtual_s < swarm.settings.planned_s + 600.0


def test_who_missed_a_round_loads_it_while_others_make_the_next_one() -> None:
    """A simulated chunk was two and a half times as large as a real one: its donors counted as silent, all of
    the state was asked for instead, and ten minutes later the others left."""
    swarm, how = far_too_slow(1), list[str]()
    assert 500e3 < swarm.scene.shape.chunk_bytes * swarm.internet.scale < 550e3
    swarm.log.readers_of[CaughtUp].append(lambda event: how.append(event.how))
    aborted = list[RoundAborted]()
    swarm.log.readers_of[RoundAborted].append(aborted.append)
    result = swarm.run()
    assert result.violations == []
    assert aborted == []
    assert set(how) <= {"replay"}


# ---- who leaves without what others hold


def one_late(profile: str) -> VirtualSwarm:
    """The third of three stands still for most of the run. Over two relays of 10 kB/s each what it lacks
    then, two states of 13 MB, takes more than the ten minutes for which the others stay."""
    swarm = swarm_of(
        3, 60, profile, round_s=15.0, seed=1, blocks=16, real_bytes_per_block=12.8e3, state_factor=64
    )
    swarm.world.call_at(150.0, swarm.stall, LATE, 880.0)
    return swarm


@pytest.fixture(scope="module")
def lacking() -> tuple[VirtualSwarm, list[Warned]]:
    swarm = one_late("satellite")
    told = told_by(swarm)
    result = swarm.run()
    assert result.violations == []
    assert result.lacking == [swarm.volunteers[LATE].name]
    return swarm, [event for event in told if event.text.startswith(LACKS)]


def test_who_cannot_load_in_time_what_others_hold_leaves_and_says_so(
    lacking: tuple[VirtualSwarm, list[Warned]], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, (told,) = lacking
    inspector, books, late = swarm.inspector, swarm.books, swarm.peer_ids()[LATE]
    assert told.peer == late
    mine, its = inspector.ends[late], inspector.ends[swarm.peer_ids()[0]]
    lacks = [fragment for fragment in range(2) if mine[fragment].version < its[fragment].version]
    assert lacks
    for f in lacks:
        assert f"fragment {f}: version {mine[f].version} of {its[f].version}" in told.text

    # What it ends with is the others' history: a state that theirs did not come of is none.
    monkeypatch.setattr(books, "violations", [])
    other = {fragment: replace(mine[fragment], digest=b"another") for fragment in lacks}
    monkeypatch.setitem(inspector.ends, late, [other.get(0, mine[0]), other.get(1, mine[1])])
    inspector.judge_end()
    assert books.violations == []  # since views differed, a fork has its time
    monkeypatch.setattr(books, "views_differed_at", 0.0)
    monkeypatch.setattr(inspector, "heal_s", 1.0)
    inspector.judge_end()
    assert [(one.peer, one.law) for one in books.violations] == [(late, "end")] * len(lacks)


def test_who_leaves_without_it_where_lines_could_have_brought_it_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fetcher, "want", lambda machine, goal, now: None)  # a bug: nothing is ever loaded
    result = one_late("fibre").run()
    assert result.lacking == ["peer-2"]
    assert [one.text for one in result.violations if one.law == "end"] == ["2 different states at the end"]
    assert figures(result, 1.0)["lacking"] == ["peer-2"]
