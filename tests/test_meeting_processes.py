"""Peers that meet, as processes: models that differ are told apart, and a newcomer's running statistics
are a donor's."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.telemetry.events import FragmentApplied, RoundCounted, Warned
from tests.swarms import ROOT, swarm
from tests.test_swarm import START_S

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
                running.wait_for(name, FragmentApplied, 24)
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
