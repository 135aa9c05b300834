"""Peers that rest, through the console script: outside their hours, and as they are told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bootstrap.local_swarm import environment
from p2p_co2.system.owner import PROGRAMS
from p2p_co2.telemetry.events import (
    CheckpointSaved,
    Paused,
    PeerFinished,
    Progress,
    Resumed,
    RoundCommitted,
    Warned,
)
from tests.campaign import RECIPE, Campaign, console, paced_run
from tests.programs import Strangers

pytestmark = pytest.mark.swarm
SEVEN_S, DAY_S = 7 * 3600, 24 * 3600


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


def start_up_s() -> float:
    """How long this machine takes now for most of what a peer does before it looks for the swarm."""
    began_at = time.monotonic()
    command = [sys.executable, "-c", "import p2p_co2.trainer"]
    subprocess.run(command, check=True, env=os.environ | environment())
    return time.monotonic() - began_at


def zone_where_it_is_seven_at(at: float) -> str:
    """A time zone as POSIX writes it: what is to be added to local time to have UTC."""
    west_s = (int(at) - SEVEN_S) % DAY_S
    sign, west_s = ("+", west_s) if west_s <= DAY_S // 2 else ("-", DAY_S - west_s)
    return f"SIM{sign}{west_s // 3600}:{west_s // 60 % 60:02}:{west_s % 60:02}"


def test_peers_rest_as_their_hours_turn_and_as_they_are_told(swarm: Campaign) -> None:
    swarm.start_seed(paced_run(1.0, step_s=0.05))
    turns_at = int(time.time() + 12.0 + 8.0 * start_up_s())
    here = {"TZ": zone_where_it_is_seven_at(turns_at)}
    game = swarm.folder / "a-game"
    game.symlink_to(shutil.which("sleep") or "")
    deaf = swarm.folder / "loginctl"
    deaf.symlink_to(shutil.which("false") or "")
    guest = ["--rest-for", f"steam, {game.name}", "--idle-for", "5s", "--rest-while", "input"]
    swarm.join("always", *guest, variables={"PATH": f"{swarm.folder}:{os.environ['PATH']}"})
    swarm.join("by day", "--hours", "07:00-20:00", variables=here)
    swarm.join("by night", "--hours", "20:00-07:00", variables=here)
    rests = swarm.wait_for("by day", Paused)
    assert rests.reason == "outside its hours (07:00-20:00)"
    assert rests.at < turns_at
    swarm.wait_for_commits("always", "by night", count=2, group=2)
    assert not swarm.events("by night", Paused)

    turned = swarm.wait_for("by day", Resumed), swarm.wait_for("by night", Paused)
    assert all(turns_at <= event.at < turns_at + 10.0 for event in turned), (turns_at, turned)
    assert turned[1].reason == "outside its hours (20:00-07:00)"
    swarm.wait_for_commits("always", "by day", count=2, since=max(event.at for event in turned), group=2)
    assert swarm.events("by day", Progress)[0].inner_steps == 0
    rested_at = turned[1].at + 1.0
    steps = {event.inner_steps for event in swarm.events("by night", Progress, rested_at)}
    assert len(steps) <= 1, steps
    assert not any(e.contributors > 2 for e in swarm.events("always", RoundCommitted, rested_at + 5.0))
    rest_for_the_owner(swarm, "always", game)
    pause_and_resume(swarm, swarm.folder / "always")
    children = [child for child in swarm.running() if child.name != "seed"]
    assert {end.reason for end in swarm.leave_together(*children)} == {"stopped"}
    assert len(swarm.events("by night", PeerFinished)) == 1


def rest_for_the_owner(swarm: Campaign, name: str, game: Path) -> None:
    """While a program that was named runs, and a little longer."""
    began_at = time.time()
    with Strangers() as strangers:
        strangers.start(str(game), "600")
        assert swarm.wait_for(name, Paused, since=began_at).reason == PROGRAMS
    goes_on = swarm.wait_for(name, Resumed, since=began_at)
    assert goes_on.paused_s > 2.0
    (warned,) = [one.text for one in swarm.events(name, Warned) if "input" in one.text]
    assert warned.startswith("no rest while input: logind does not tell")


def pause_and_resume(swarm: Campaign, folder: Path) -> None:
    """Told twice it rests once; a pause outlives the process, and says so."""
    name = folder.name
    began_at = time.time()
    here = {"P2P_CO2_FOLDER": str(folder)}
    told = partial(
        subprocess.run, check=True, capture_output=True, text=True, env=os.environ | environment() | here
    )
    for _ in range(2):
        assert "rests from its next inner step on (process " in told(console("pause", name)).stdout
    rests = swarm.wait_for(name, Paused, since=began_at)
    assert rests.reason == "paused by hand"
    assert swarm.events(name, CheckpointSaved), "it may be switched off now"
    steps = swarm.events(name, Progress)[-1].inner_steps
    told(console("resume", name))
    assert f"{name}, {folder}: " in told(console("status")).stdout
    goes_on = swarm.wait_for(name, Resumed, since=rests.at)
    assert [one.inner_steps for one in swarm.events(name, Progress) if one.at < goes_on.at][-1] == steps
    assert len(swarm.events(name, Paused, began_at)) == 1
    swarm.wait_until("trains on", lambda: swarm.events(name, Progress)[-1].inner_steps > steps)
    told(console("pause", str(folder)))
    swarm.wait_for(name, Paused, since=goes_on.at)
    (peer,) = [child for child in swarm.running() if child.name == name]
    peer.asked_to_end = True
    assert f"{name}, the peer in {folder}, leaves (process " in told(console("leave", name)).stdout
    assert swarm.wait([peer], 60.0)
    assert swarm.events(name, PeerFinished)[-1].reason == "stopped"
    again = swarm.start("again", console("join", swarm.ticket, "--folder", str(folder), "--recipe", RECIPE))
    again.asked_to_end = True
    swarm.wait_until("is told", lambda: "was paused before" in again.log.read_text())
    swarm.kill(again)
