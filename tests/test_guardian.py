"""Who keeps a stage's state for others, and when; and that a stage that has died comes back from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_co2.node.network import RECORD_LIFETIME_S
from p2p_co2.system.process import is_kept
from p2p_co2.telemetry.events import CaughtUp, PeerStarted, RoundCommitted, Warned
from p2p_co2.tensors.checkpoint.folder import has_checkpoint, load_agreed
from peers.guardian import Duty, duty, guardians, tens_of
from tests.campaign import Campaign
from tests.test_pipeline_swarm import run_of
from tests.test_swarm import START_S, opened


def test_two_guard_a_stage_and_all_agree_on_who() -> None:
    peers = [f"peer-{number}" for number in range(40)]
    chosen = {stage: guardians(stage, peers) for stage in range(16)}
    assert all(len(set(two)) == 2 for two in chosen.values())
    assert all(guardians(stage, peers[::-1]) == two for stage, two in chosen.items())
    assert len({peer for two in chosen.values() for peer in two}) > 12  # other stages, other guardians
    for stage, (first, second) in chosen.items():
        rest = [peer for peer in peers if peer != first]
        assert guardians(stage, rest)[0] == second  # one goes: the other stays
    assert guardians(1, ["alone"]) == ["alone"]


@pytest.mark.parametrize(
    ("replicas", "unheard_s", "is_guardian", "is_due", "has_state", "right"),
    [
        (1, 0.0, True, True, False, Duty.KEEP),
        (1, 0.0, True, True, True, Duty.KEEP),
        (1, 0.0, True, False, True, Duty.NOTHING),
        (1, 0.0, False, True, True, Duty.NOTHING),
        (2, 0.0, True, True, False, Duty.NOTHING),
        (0, RECORD_LIFETIME_S, True, True, False, Duty.NOTHING),
        (0, RECORD_LIFETIME_S - 1.0, True, True, True, Duty.NOTHING),
        (0, RECORD_LIFETIME_S, False, False, True, Duty.GIVE),
    ],
)
def test_what_is_owed_to_a_stage(
    replicas: int, unheard_s: float, is_guardian: bool, is_due: bool, has_state: bool, right: Duty
) -> None:
    assert duty(replicas, 2, unheard_s, is_guardian, is_due, has_state) is right


def test_a_stage_is_kept_every_tenth_round_but_the_last_ten() -> None:
    assert [tens_of(at, 0) for at in (0.0, 9.9, 10.0, 19.9, 1000.5)] == [0, 0, 1, 1, 100]
    assert [tens_of(at, 25) for at in (9.9, 10.0, 20.0, 25.0)] == [0, 1, 1, 1]
    assert [tens_of(at, 8) for at in (0.0, 8.0)] == [0, 0]


@pytest.mark.swarm
def test_a_stage_whose_only_peer_was_killed_comes_back_from_what_was_kept(tmp_path: Path) -> None:
    """A newcomer with an empty folder goes on from there, not from round 0, and both stages train on."""
    with opened(tmp_path) as swarm:
        swarm.start_seed(run_of(2, round_s=1.0, min_replicas=2))
        swarm.join("first", "--stage", "0", recipe="")
        last = swarm.join("last", "--stage", "1", recipe="")
        kept = tmp_path / "first" / "guarded" / "stage-1" / "checkpoint"
        swarm.wait_until("it is kept", lambda: has_checkpoint(kept))
        rounds = [state.version for state in load_agreed(kept).states]
        assert min(rounds) > 0
        swarm.wait_until("it is told", lambda: bool(swarm.events("first", Warned)))
        assert any("keeps stage 1's state" in one.text for one in swarm.events("first", Warned))
        swarm.kill(last)

        swarm.wait_until("it is given", lambda: is_kept(kept.parent) is True, 2 * START_S)
        assert any("is given to who joins" in one.text for one in swarm.events("first", Warned))
        new = newcomer(swarm)
        assert not swarm.events(new, PeerStarted)[0].resumed_from
        assert swarm.events(new, CaughtUp)
        committed = swarm.events(new, RoundCommitted)
        assert min(one.round for one in committed) >= min(rounds)
        swarm.wait_until("it is given no more", lambda: is_kept(kept.parent) is False)
        seen = swarm.commits("first")
        swarm.wait_until("both train on", lambda: swarm.commits("first") >= seen + 4)


def newcomer(swarm: Campaign) -> str:
    """One that has trained. Who comes while the giver itself is still joining is told to come again."""
    for name in ("new", "again", "once-more"):
        child = swarm.join(name, "--stage", "1", recipe="")
        child.asked_to_end = True  # it may be refused
        swarm.wait_until("it trains or ends", lambda: swarm.commits(name) >= 4 or not child.running())  # noqa: B023
        if child.running():
            return name
        assert "the others left" in child.last_lines(), child.last_lines()
    raise AssertionError(swarm.tails())
