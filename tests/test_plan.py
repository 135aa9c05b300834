"""bootstrap.plan: from a run file to a table, to JSON and to a picture; and what it says to wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bootstrap.options import PlanOptions
from bootstrap.plan.links import read_links
from bootstrap.plan.plan import make_plan, print_plan, run_plan
from p2p_co2.errors import ConfigError
from p2p_co2.planning.exchange import Link
from p2p_co2.recipes import load_recipe

ROOT = Path(__file__).resolve().parent.parent
RUN = """
name = "small"
fragments = 2
[recipe_options]
layers = 1
width = 16
heads = 2
context = 8
[clock]
round_s = 4.0
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def options(path: Path, **changes: object) -> PlanOptions:
    slow = PlanOptions(run_file=path, parameters=10**8, step_s=0.5, up_mbit=20, down_mbit=100, rtt_ms=80)
    return replace(slow, **changes)  # type: ignore[arg-type]


def links_of(**given: Any) -> tuple[tuple[Link, ...], str]:
    return read_links(PlanOptions(run_file=Path(), **given), 0)


def test_the_model_is_counted_and_its_step_measured(run_file: Path) -> None:
    plan = make_plan(PlanOptions(run_file=run_file, threads=1, batch=2))
    recipe = load_recipe("byte-gpt", plan.run.recipe_options, 0)
    assert plan.setting.parameters == sum(p.numel() for p in recipe.model.parameters())
    assert len(plan.setting.fragments) == 2
    assert plan.setting.tokens_per_step == 2 * 8
    assert 0 < plan.setting.step_s < 1
    assert plan.setting.train_bytes > 50e6  # torch alone is more
    assert "median" in plan.sources["step"]


def test_what_is_given_is_not_measured_and_needs_no_torch(run_file: Path) -> None:
    script = (
        "import sys\nfrom p2p_co2.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print(sorted({'torch', 'hivemind', 'grpc', 'matplotlib'} & set(sys.modules)))"
    )
    arguments = ["plan", str(run_file), "--parameters", "100000000", "--step-s", "0.5", "--json"]
    said = subprocess.check_output([sys.executable, "-c", script, *arguments], cwd=ROOT, text=True)
    table, modules = said.rsplit("\n", 2)[:2]
    assert modules == "[]"
    assert json.loads(table)["given"]["setting"]["parameters"] == 10**8


def test_the_table_says_what_binds_and_what_to_write(run_file: Path) -> None:
    text = StringIO()
    print_plan(make_plan(options(run_file)), Console(file=text, width=200))
    shown = " ".join(text.getvalue().split())
    for words in ("does not reach 95%", "What binds: upload", "clock.round_s = ", "sends are left out"):
        assert words in shown


def test_of_more_peers_than_a_run_may_have_the_plan_says_which_it_is_of(run_file: Path) -> None:
    run_file.write_text("group_size = 8" + RUN)
    plan = make_plan(options(run_file, peers=10))
    assert len(plan.setting.links) == 8
    assert "of 10 peers the slowest 8, all that may come" in plan.sources["links"]


@pytest.mark.parametrize("mode", ["time", "steps"])
def test_advice_is_in_the_words_of_the_runs_clock(run_file: Path, mode: str) -> None:
    run_file.write_text(RUN + f'mode = "{mode}"\n')
    text = StringIO()
    print_plan(make_plan(options(run_file)), Console(file=text, width=200))
    assert ("clock.inner_steps_per_round = " in text.getvalue()) == (mode == "steps")


def test_a_picture_is_drawn(run_file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert run_plan(options(run_file, plot=tmp_path / "plan.png", as_json=True), said.append) == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "plan.png").stat().st_size > 20_000


# ---- links


def test_links_by_profile_figures_and_measurement(tmp_path: Path) -> None:
    cable, words = links_of(profile="cable", peers=3)
    assert len(cable) == 3
    assert cable[0].up_bytes_per_s == 5e6
    assert "cable" in words
    (given,), _ = links_of(up_mbit=8, rtt_ms=50, loss=0.01, peers=1)
    assert given == Link(up_bytes_per_s=1e6, down_bytes_per_s=1e7, round_trip_s=0.05, loss=0.01)
    path = tmp_path / "link.json"
    path.write_text(
        json.dumps({"link": {"up_bytes_per_s": 5.0, "down_bytes_per_s": 6.0, "round_trip_s": 0.5}})
    )
    (measured,), words = links_of(link=path, peers=1)
    assert (measured.up_bytes_per_s, measured.down_bytes_per_s, measured.round_trip_s) == (5.0, 6.0, 0.5)
    assert "measured" in words
    assert "assumed" in links_of()[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json", "not JSON"),
        ("[]", "link: missing"),
        ('{"link": {"up_bytes_per_s": null}}', "link.up_bytes_per_s: was not"),
        ('{"link": {"up_bytes_per_s": true}}', "link.up_bytes_per_s: was not"),
        ('{"link": {"up_bytes_per_s": 1e-308}}', "link.up_bytes_per_s: was not"),
        ('{"link": {"up_bytes_per_s": 1, "down_bytes_per_s": -1}}', "link.down_bytes_per_s"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_measurement_that_is_none_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        links_of(link=path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": 0}, "--peers"),
        ({"peers": 10**9}, r"--peers: 1 to 64 \(got 1000000000\)"),
        ({"target": 1.0}, "--target"),
        ({"target": float("nan")}, "--target"),
        ({"step_s": -1.0}, "--step-s"),
        ({"step_s": float("nan")}, "--step-s"),
        ({"parameters": -1}, "--parameters"),
        ({"hours": 0.0}, "--hours"),
        ({"up_mbit": 0, "down_mbit": 0, "rtt_ms": 0, "profile": "pigeon"}, "'pigeon'"),
        ({"up_mbit": -1.0}, "--up-mbit"),
        ({"up_mbit": 0, "down_mbit": 0}, "--up-mbit"),
        ({"loss": 1.5}, "--loss"),
        ({"profile": "dsl"}, "not several"),
        ({"run_file": Path("no.toml")}, "no such file"),
        ({"step_s": 0.0, "device": "abacus"}, "--device"),
    ],
)
def test_impossible_options_are_refused_by_name(
    run_file: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(options(run_file, **changes))
