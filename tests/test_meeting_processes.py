"""Peers that meet, as processes: models that differ are told apart, a newcomer's running statistics are a
donor's, and a swarm whose only seed is gone takes in who has a later ticket."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.telemetry.events import FragmentApplied, RoundCounted, Warned
from p2p_co2.ticket import Ticket
from tests.campaign import Campaign, paced_run
from tests.swarms import ROOT, swarm
from tests.test_swarm import START_S, opened

pytestmark = pytest.mark.swarm

OWN = RunConfig(name="own", recipe="own-loop", fragments=2, clock=ClockConfig(mode="time", round_s=1.0))


def test_a_model_that_is_not_the_runs_is_refused_by_name_and_a_newcomer_takes_running_statistics(
    tmp_path: Path,
) -> None:
    script = str(ROOT / "tests" / "meeting_peer.py")
    with swarm(tmp_path, OWN) as running:
        for name in ("right", "turned", "other-base", "newcomer"):
            kind = "right" if name == "newcomer" else name
            running.start(name, [sys.executable, script, running.ticket, str(tmp_path / name), kind])
            if name == "right":
                running.wait_for(name, FragmentApplied, 8)
        for name, words in {
            "turned": r"1\.weight: shape \(16, 64\) here and \(64, 16\) there",
            "other-base": r"0\.weight: the frozen values differ .* load the same base",
        }.items():
            assert running.processes[name].wait(START_S) == 1
            last = running.log(name).strip().splitlines()[-1]
            assert re.search(rf"ConfigError: the model is not the one .*: {words}", last), last
        running.wait_for("newcomer", FragmentApplied, 2)
        assert any(len(event.weights) > 1 for event in running.wait_for("newcomer", RoundCounted))
        told = [event.text for event in running.events("right") if isinstance(event, Warned)]
        assert sum("trains another model" in text for text in told) == 2
        assert sum("2.running_mean are each peer's own" in text for text in told) == 1
        for name in ("newcomer", "right"):
            running.processes[name].send_signal(signal.SIGINT)
        running.wait("newcomer", "right")
    losses = {name: _said(running.log(name)) for name in ("right", "newcomer")}
    assert losses["newcomer"]["joined"] < losses["newcomer"]["fresh"] / 20, losses
    assert losses["newcomer"]["joined"] < losses["right"]["joined"] / 100, losses


def _said(log: str) -> dict[str, float]:
    return {word: float(loss) for word, loss in re.findall(r"(fresh|joined|left) at ([0-9.e-]+)", log)}


def test_with_the_only_seed_gone_a_later_ticket_leads_back_and_invites(tmp_path: Path) -> None:
    with opened(tmp_path) as peers:
        peers.start_seed(paced_run(1.0))
        seed = peers.children[0]
        for name in ("one", "two", "three"):
            peers.join(name)
        tickets = {name: tmp_path / name / "ticket" for name in ("one", "three")}
        peers.wait_until("all know each other", lambda: all(_seeds(path) == 4 for path in tickets.values()))
        peers.kill(seed)
        peers.kill(peers.children[3])
        peers.ticket = tickets["one"].read_text().strip()
        for name in ("three", "four"):
            _comes_in(peers, name)


def _seeds(ticket: Path) -> int:
    """How many different peers a ticket names."""
    text = ticket.read_text().strip() if ticket.exists() else ""
    return len({seed.rpartition("/")[2] for seed in Ticket.parse(text).seeds}) if text else 0


def _comes_in(peers: Campaign, name: str) -> None:
    """It joins and has a part in a round of several. Who comes in the moment after the seed's death may find
    that nobody has its settings yet, and comes again."""
    known = len(peers.events(name, RoundCounted))

    def is_in() -> bool:
        return any(len(event.weights) > 1 for event in peers.events(name, RoundCounted)[known:])

    for _ in range(3):
        child = peers.join(name)
        child.asked_to_end = True  # its end is looked at here
        peers.wait_until(f"{name} is in a round", lambda: is_in() or not child.running())  # noqa: B023
        if child.running():
            child.asked_to_end = False
            return
        assert "are not in the DHT" in child.last_lines(), child.last_lines()
    raise AssertionError(f"{name} did not come in")
