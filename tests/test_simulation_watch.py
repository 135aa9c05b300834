"""``p2p-co2 simulate``: what it prints and writes, its exit status; another process plays the same."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.cli.options import SimulationOptions
from p2p_co2.cli.simulate import read_churn, run_simulation, settings_of
from p2p_co2.errors import ConfigError
from p2p_co2.simnet import Churn
from p2p_co2.system.process import program
from p2p_co2.telemetry.journal import read_events
from tests.event_samples import fold

RUN = 'name = "simulated"\nfragments = 2\n[clock]\nround_s = 10.0\n'


def options_of(run_file: Path | None, **more: Any) -> SimulationOptions:
    options = SimulationOptions(run_file=run_file, peers=4, profile="dsl", parameters=1000, step_s=0.5)
    return replace(options, **more)


def simulate(folder: Path, hash_seed: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p2p_co2.cli", "simulate", *options, "--folder", str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_two_processes_play_the_same_run_and_write_what_a_real_one_writes(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    options = (str(run_file), "--peers", "6", "--hours", "0.03", "--churn", "20/h", "--seed", "7")
    digests = []
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        done = simulate(folder, hash_seed, *options)
        assert done.returncode == 0, done.stderr
        assert "law violations: 0" in done.stdout
        digests.append(hashlib.sha256((folder / "events.jsonl").read_bytes()).hexdigest())
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["simulation"]["digest"] == digests[-1]
    assert digests[0] == digests[1]
    reader = read_events(tmp_path / "1" / "events.jsonl")
    view = fold(reader)
    assert not reader.skipped
    assert view.committed == summary["rounds"]["committed"] > 0
    assert summary["digests_equal"]


def test_bytes_are_those_of_the_model_and_not_of_the_envelopes(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    options = options_of(run_file, hours=0.03, profile="fibre", parameters=8_000_000)
    assert run_simulation(replace(options, folder=tmp_path / "out")) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    payload = 8_000_000 / 2 * 4.25 / 8  # int4 and a scale for each block of 128, two fragments
    expected = summary["rounds"]["committed"] * payload * 2 * (1 - 1 / 4)
    sent = list(summary["bytes"]["up_per_peer"].values())
    assert sum(sent) / len(sent) == pytest.approx(expected, rel=0.1)


def test_one_that_is_ended_early_tells_what_there_is(tmp_path: Path) -> None:
    run_file, folder = tmp_path / "run.toml", tmp_path / "out"
    run_file.write_text(RUN)
    command = program("p2p_co2.cli", "simulate", str(run_file), "--peers", "6", "--hours", "9999")
    started = subprocess.Popen(
        [*command, "--folder", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    events, ends_at = folder / "events.jsonl", time.monotonic() + 120
    while not (events.exists() and events.stat().st_size) and time.monotonic() < ends_at:
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=120)
    assert (started.returncode, err) == (130, "stopped\n")
    assert out.startswith("ended early, after ")
    told = json.loads((folder / "summary.json").read_text())["simulation"]
    assert 0 < told["ended_early"] == told["virtual_s"] < told["planned_s"]
    assert told["digest"] == hashlib.sha256(events.read_bytes()).hexdigest()
    assert told["violations"] == []  # that nobody finished is no fault of the swarm


def test_a_mistake_is_named_with_its_option() -> None:
    base = options_of(None)
    with pytest.raises(ConfigError, match="--storm"):
        settings_of(base)
    with pytest.raises(ConfigError, match=r"0\.1/h"):
        read_churn("often")
    assert read_churn("0.1/h") == 0.1
    with pytest.raises(ConfigError, match=r"--storm: .*leave run\.toml or --storm out"):
        settings_of(replace(base, storm=True, run_file=Path("run.toml")))


@pytest.mark.parametrize(
    ("field", "option", "wrong"),
    [
        ("hours", "--hours", (0.0, -1.0, 1e6, math.nan, math.inf)),
        ("step_s", "--step-s", (-1.0, 1e-7, 1e9, math.nan, math.inf)),
        ("parameters", "--parameters", (0, -1)),
    ],
)
def test_a_figure_that_no_simulation_ends_with_is_refused_with_its_value(
    tmp_path: Path, field: str, option: str, wrong: tuple[float, ...]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    base = options_of(run_file)
    assert settings_of(base).peers == 4
    for value in wrong:
        with pytest.raises(
            ConfigError, match=rf"^command line: {option}: .*\(got {value:g}\)".replace("+", r"\+")
        ):
            settings_of(replace(base, **{field: value}))


@pytest.mark.parametrize(("hours", "rounds", "calm_at"), [(24.0, 6, 54.0), (0.01, 4, 32.4)])
def test_a_run_that_has_an_end_is_not_played_beyond_it(
    tmp_path: Path, hours: float, rounds: int, calm_at: float
) -> None:
    """A run of ten rounds of 10 s was played for a day."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN + "rounds = 6\n")
    settings = settings_of(options_of(run_file, hours=hours, churn="0.1/h", step_s=0.0))
    assert settings.run.clock.rounds == rounds
    assert isinstance(settings.faults, Churn)
    assert settings.faults.calm_at == pytest.approx(calm_at)
