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

from p2p_co2.cli import main as cli
from p2p_co2.cli.options import SimulationOptions
from p2p_co2.cli.simulate import read_churn, run_simulation, settings_of
from p2p_co2.errors import ConfigError
from p2p_co2.simnet import Churn
from p2p_co2.telemetry.journal import read_events
from tests.event_samples import fold

RUN = 'name = "simulated"\nfragments = 2\n[clock]\nround_s = 10.0\n'


def options_of(run_file: Path | None, **more: Any) -> SimulationOptions:
    options = SimulationOptions(run_file=run_file, peers=4, profile="dsl", parameters=1000, step_s=0.5)
    return replace(options, **more)


def start(folder: Path, hash_seed: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "p2p_co2.cli", "simulate", *options, "--folder", str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.mark.swarm
def test_two_processes_play_the_same_run_and_write_what_a_real_one_writes(
    tmp_path: Path, run_file: Path
) -> None:
    options = (str(run_file), "--peers", "6", "--hours", "0.015", "--churn", "40/h", "--seed", "7")
    playing = {tmp_path / seed: start(tmp_path / seed, seed, *options) for seed in ("1", "2")}
    digests = set()
    for folder, process in playing.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "law violations: 0" in out
        assert "fragment exchanges: " in out  # a round is all fragments once
        summary = json.loads((folder / "summary.json").read_text())
        digests |= {summary["simulation"]["digest"]}
        digests |= {hashlib.sha256((folder / "events.jsonl").read_bytes()).hexdigest()}
    assert len(digests) == 1
    reader = read_events(tmp_path / "1" / "events.jsonl")
    view = fold(reader)
    assert not reader.skipped
    assert view.committed == summary["rounds"]["committed"] > 0
    assert summary["digests_equal"]


def test_bytes_are_those_of_the_model_and_not_of_the_envelopes(tmp_path: Path, run_file: Path) -> None:
    folder = tmp_path / "out"
    options = options_of(run_file, hours=0.03, profile="fibre", parameters=8_000_000, folder=folder)
    assert run_simulation(options) == 0
    summary = json.loads((folder / "summary.json").read_text())
    payload = 8_000_000 / 2 * 2.0625 / 8  # two bits, and a scale for each block of 512, two fragments
    expected = summary["rounds"]["committed"] * payload * 2 * (1 - 1 / 4)
    sent = list(summary["bytes"]["up_per_peer"].values())
    assert sum(sent) / len(sent) == pytest.approx(expected, rel=0.1)


def test_json_is_the_summary_and_quiet_tells_the_laws_alone(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", str(run_file), "--peers", "3", "--hours", "0.01", "--parameters", "1000"]
    for flag in ("--json", "--quiet"):
        with pytest.raises(SystemExit) as end:
            cli.main([*command, "--folder", str(tmp_path / flag), flag])
        assert not end.value.code
        shown = capsys.readouterr().out
        if flag == "--json":
            assert json.loads(shown) == json.loads((tmp_path / flag / "summary.json").read_text())
        else:
            assert shown == "law violations: 0\n"


def test_where_nobody_came_back_no_times_are_told(
    tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_simulation(options_of(run_file, hours=0.01, folder=tmp_path / "out")) == 0
    assert "start to training again: 0 times, nobody came back\n" in capsys.readouterr().out


@pytest.mark.swarm
def test_one_that_is_ended_early_tells_what_there_is(tmp_path: Path, run_file: Path) -> None:
    numbers = {"int": signal.SIGINT, "term": signal.SIGTERM}
    options = (str(run_file), "--peers", "6", "--hours", "9999")
    playing = {name: start(tmp_path / name, "0", *options) for name in numbers}
    for name, process in playing.items():
        events, ends_at = tmp_path / name / "events.jsonl", time.monotonic() + 120
        while not (events.exists() and events.stat().st_size) and time.monotonic() < ends_at:
            time.sleep(0.05)
        process.send_signal(numbers[name])
    for name, process in playing.items():
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (130, "stopped\n")
        assert out.startswith("ended early, after ")
        told = json.loads((tmp_path / name / "summary.json").read_text())["simulation"]
        assert 0 < told["ended_early"] == told["virtual_s"] < told["planned_s"]
        assert told["digest"] == hashlib.sha256((tmp_path / name / "events.jsonl").read_bytes()).hexdigest()
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
    run_file: Path, field: str, option: str, wrong: tuple[float, ...]
) -> None:
    base = options_of(run_file)
    assert settings_of(base).peers == 4
    for value in wrong:
        with pytest.raises(
            ConfigError, match=rf"^command line: {option}: .*\(got {value:g}\)".replace("+", r"\+")
        ):
            settings_of(replace(base, **{field: value}))


@pytest.mark.parametrize(("hours", "rounds", "calm_at"), [(24.0, 6, 54.0), (0.01, 4, 32.4)])
def test_a_run_that_has_an_end_is_not_played_beyond_it(
    run_file: Path, hours: float, rounds: int, calm_at: float
) -> None:
    """A run of ten rounds of 10 s was played for a day."""
    run_file.write_text(RUN + "rounds = 6\n")
    settings = settings_of(options_of(run_file, hours=hours, churn="0.1/h", step_s=0.0))
    assert settings.run.clock.rounds == rounds
    assert isinstance(settings.faults, Churn)
    assert settings.faults.calm_at == pytest.approx(calm_at)


def test_a_run_with_stages_is_played_by_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tmp_path / "staged.toml"
    run_file.write_text(RUN + "[pipeline]\nstages = 2\nmicrobatches = 8\nsequences = 8\n")
    digests = set()
    for folder in (tmp_path / "first", tmp_path / "again"):
        assert run_simulation(options_of(run_file, hours=0.02, step_s=1.0, churn="30/h", folder=folder)) == 0
        told = json.loads((folder / "summary.json").read_text())["simulation"]
        assert [stage["peers"] for stage in told["stages"]] == [2, 2]
        assert told["violations"] == []
        assert told["tokens_per_s"] > 0
        digests.add(told["digest"])
    assert len(digests) == 1
    assert "law violations: 0" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="2 stages need a peer each"):
        run_simulation(options_of(run_file, peers=1, folder=tmp_path / "third"))


def test_a_storm_over_stages_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulation(options_of(None, storm=True, stages=3, seed=7)) == 0
    assert "law violations: 0" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--stages"):
        run_simulation(options_of(None, storm=True, stages=33))
    with pytest.raises(ConfigError, match=r"--stages: .*pipeline\.stages"):
        run_simulation(options_of(Path("run.toml"), stages=3))
