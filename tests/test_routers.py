"""Peers behind routers that nobody can dial: they meet through the seed, and are seen.

All traffic stays in network namespaces; skipped where they are not allowed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootstrap.local_swarm import LocalSwarm
from p2p_co2.recipes import recipe_digest
from p2p_co2.system.process import program
from p2p_co2.telemetry.events import LinkOpened, RoundCommitted
from p2p_co2.telemetry.journal import read_events
from tests.routers import Machine, Routers

pytestmark = pytest.mark.swarm
BOUND_S = 240.0
"""On what takes seconds on a machine that is at rest."""
RECIPE = f"{Path(__file__).resolve().parent.parent}/examples/own_recipe.py:make"
RUN = f"""
recipe = "{RECIPE}"
recipe_digest = "{recipe_digest(RECIPE, {})}"
fragments = 2
[clock]
round_s = 2.0
"""


def start_seed(swarm: LocalSwarm, place: Machine, folder: Path) -> str:
    """Start a seed on a public machine; returns its ticket."""
    (folder / "run.toml").write_text(RUN)
    arguments = ["seed", str(folder / "run.toml"), "--folder", str(folder / "seed"), "--port", "31337"]
    arguments += ["--host", place.address, "--announce-host", place.address]
    seed = swarm.start("seed", place.command(program("bootstrap", *arguments)))
    return swarm.wait_for_line(seed, "ticket:", BOUND_S)


def joining(ticket: str, folder: Path, *options: str) -> list[str]:
    return program("peers", ticket, "--folder", str(folder), "--recipe", RECIPE, "--threads", "1", *options)


def wait_until(is_so: Callable[[], bool], told: Callable[[], str]) -> None:
    ends_at = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < ends_at, told()
        time.sleep(0.3)


def test_peers_behind_routers_meet_through_the_seed_and_a_board_behind_another_shows_them(
    tmp_path: Path,
) -> None:
    with Routers() as routers, LocalSwarm(tmp_path, grace_s=3) as swarm:
        ticket = start_seed(swarm, routers.add("seed"), tmp_path)
        for name in ("one", "two"):
            machine = routers.add(name, "symmetric")
            swarm.start(name, machine.command(joining(ticket, tmp_path / name, "--min-peers", "2")))
        looks = routers.add("board", "symmetric")
        command = program("p2p_co2.cli", "board", ticket, "--folder", str(tmp_path / "b"), "--port", "8800")
        swarm.start("board", looks.command(command))
        script = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8800/api/swarm').read().decode())"
        )

        def shown() -> int:
            """Peers of which the board knows what only they themselves tell."""
            asked = looks.command([sys.executable, "-c", script])
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
            peers = json.loads(answer.stdout)["peers"] if answer.returncode == 0 else []
            return sum(peer["device"] == "cpu" for peer in peers)

        wait_until(lambda: shown() == 2, lambda: "\n".join(child.last_lines(40) for child in swarm.children))
        events = [event for name in ("one", "two") for event in read_events(tmp_path / name / "events.jsonl")]
        opened = [event for event in events if isinstance(event, LinkOpened)]
        assert opened
        assert all(event.carrier == "libp2p" for event in opened)
        assert all("relayed by 192.0.0." in event.reason for event in opened)
        wait_until(
            lambda: any(
                isinstance(event, RoundCommitted) and event.contributors == 2
                for event in read_events(tmp_path / "one" / "events.jsonl")
            ),
            lambda: "no round of both",
        )
