"""The command line's own face: help, completion, the environment, and what an option is declared once for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from bootstrap.local_swarm import LocalSwarm
from p2p_co2.cli import command, volunteer
from p2p_co2.cli import main as cli
from p2p_co2.config import GUEST, Option, PeerConfig, read_peer_config, read_run_config
from p2p_co2.errors import ConfigError
from p2p_co2.peer_options import peer_config
from p2p_co2.swarm.joining import check_names, taken_by_name
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import peer_id_of
from tools import reference_pages
from tools.reference_pages import commands

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"torch", "hivemind", "grpc", "matplotlib", "transformers"}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "p2p_co2.cli", *arguments], cwd=ROOT, capture_output=True,
        text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "80", **variables},
    )  # fmt: skip


def imported(result: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}


def help_of(app: typer.Typer, *words: str) -> str:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    return shown.output


# ---- help


def test_help_lists_every_command_by_group_and_imports_nothing_slow() -> None:
    result = run("--help")
    assert not imported(result) & SLOW
    for group, some in cli.GROUPS.items():
        after = result.stdout.partition(f" {group} ─")[2].partition("╰")[0]
        for name, (_, short) in some.items():
            assert re.search(rf"│ {name} +{re.escape(short)} +│", after)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_of_a_command_is_in_its_help(name: str) -> None:
    shown = help_of(cli.app, name)
    for option in commands()[name].params:
        flags = [flag for flag in option.opts if flag.startswith("-")]
        assert getattr(option, "hidden", False) or all(re.search(rf"{flag}\b", shown) for flag in flags)
    assert "--quiet" in shown
    assert ("P2P_CO2_AN_OPTION" in shown) == (name in {"join", "seed", "doctor"})
    assert shown == CliRunner().invoke(cli.app, [name, "-h"], env={"COLUMNS": "80", "TERM": "dumb"}).output


def test_completion_knows_the_commands_and_imports_nothing_slow() -> None:
    words = {"_P2P_CO2_COMPLETE": "complete_bash", "COMP_WORDS": "p2p-co2 se", "COMP_CWORD": "1"}
    script = "from p2p_co2.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False, env={**os.environ, **words},
    )  # fmt: skip
    assert result.stdout.split() == ["seed"]
    assert not imported(result) & (SLOW | {"rich"})


# ---- one declaration


class Napping(PeerConfig):
    nap: Annotated[float, Option(name="nap_every", unit="SECONDS", panel=GUEST, help="Rest so often.")] = (
        Field(default=0.0, ge=0)
    )


def test_a_new_option_is_one_edit(tmp_path: Path) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.add(app, "Volunteer", "join", "Join.", volunteer.join, kind=Napping)
    assert re.search(r"--nap-every +SECONDS +Rest so often\.", help_of(app, "join"))
    assert "nap_every" in taken_by_name(Napping)
    check_names({"nap_every": 3.0}, Napping)
    with pytest.raises(TypeError, match="did you mean nap_every"):
        check_names({"nap_evry": 3.0}, Napping)
    assert peer_config(None, {"nap_every": 3.0}, kind=Napping).nap == 3.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as caught:
        peer_config(None, {"nap_every": -1.0}, kind=Napping)
    assert (caught.value.where, caught.value.key) == ("command line", "--nap-every")
    assert (
        "| `nap` | `0.0` | number, at least 0 | `--nap-every` | Rest so often. |"
        in reference_pages.peer_file(Napping)
    )
    assert "| `nap_every` | `float \\| None` | Rest so often. |" in reference_pages.join_options(Napping)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text('name = "from-file"\nbatch = 3\n[limits]\nthreads = 5')
    config = peer_config(path, {"batch": 7, "name": None, "upload": "720kbit"})
    assert (config.name, config.batch, config.carrier) == ("from-file", 7, "auto")
    assert (config.limits.threads, config.limits.upload_bytes_per_s) == (5, 9e4)


@pytest.mark.parametrize(
    ("text", "rate"), [("2500000", 2.5e6), ("500k", 5e5), ("2.5M", 2.5e6), ("20Mbit", 2.5e6), (9e4, 9e4)]
)
def test_rates_as_people_write_them(text: Any, rate: float) -> None:
    assert peer_config(None, {"upload": text}).limits.upload_bytes_per_s == rate


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["join", "--treads", "3"], "--threads"),
        (["jion"], "join"),
        (["plan"], "RUN.toml"),
        (["plan", "run.toml", "--peers", "four"], "--peers"),
        (["sample", "x", "--length", "0"], "--length"),
        (["join", "a", "b"], "unexpected extra argument"),
        (["join", "--name"], "--name"),
        (["demo", "--kill-one=3"], "--kill-one"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_by_its_name_with_status_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["init", "-v", "-q"], "--quiet"),
        (["join", "p2pco2-x", "--carrier", "pigeon"], "--carrier"),
        (["join", "p2pco2-x", "--grpc-port", "70000"], "--grpc-port"),
        (["join", "p2pco2-x", "--upload", "9"], "--upload"),
        (["join", "p2pco2-x", "--download", "fast"], "--download"),
        (["join", "p2pco2-x", "--hours", "22-7"], "--hours"),
        (["join", "p2pco2-x", "--restart-stage"], "--restart-stage"),
    ],
)
def test_a_value_that_cannot_be_is_one_line_by_the_options_name(
    words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"error: command line: {key}: .+\n", shown.err)


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'fragmnets = 3\nseed = 1.5\nname = "my run"\nrecipe_options = {width = []}\nclock = 3\n'
        '[codec]\nname = "int5"\n[outer]\nlr = 0.0\nmomentum = 1.0\nrule = "kept"\nlrr = 1\n'
    )
    keys = [
        "fragmnets", "seed", "name", "recipe_options.width", "clock", "", "codec.name", "", "outer.lr",
        "outer.momentum", "outer.rule", "outer.lrr",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read_run_config(run_file)
    lines = str(caught.value).splitlines()
    told = {tuple(line.removeprefix(f"{run_file}, ").split(": ")[:2]) for line in lines}
    assert told == {(f"line {number}", key) for number, key in enumerate(keys, 1) if key}
    assert cli.main(["plan", str(run_file)]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in lines]
    peer_file = tmp_path / "peer.toml"
    peer_file.write_text('nmae = "x"\n[limits]\nthreads = -1\n')
    with pytest.raises(ConfigError, match=r"limits\.threads(.|\n)*nmae: .*did you mean name"):
        read_peer_config(peer_file)
    with pytest.raises(ConfigError, match=r"--carrier(.|\n)*--upload"):
        peer_config(None, {"carrier": "pigeon", "upload": 9.0})


# ---- the environment


def test_options_come_from_the_environment_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2P_CO2_PORT", "-1")
    assert cli.main(["seed"]) == 2
    assert "(got -1)" in capsys.readouterr().err
    assert cli.main(["seed", "--port", "-2"]) == 2
    assert "(got -2)" in capsys.readouterr().err
    monkeypatch.setenv("P2P_CO2_PORT", "some")
    with pytest.raises(SystemExit) as end:
        cli.main(["seed"])
    assert end.value.code == 2
    assert "P2P_CO2_PORT" in capsys.readouterr().err
    monkeypatch.setenv("P2P_CO2_HELP", "1")  # a flag of the line alone
    monkeypatch.setenv("P2P_CO2_TICKET", "p2pco2-x")
    assert cli.main(["join"]) == 2
    assert "the ticket is damaged" in capsys.readouterr().err
    for command_, variable in (("join", "HOURS"), ("doctor", "UPLOAD")):
        monkeypatch.setenv(f"P2P_CO2_{variable}", "never")
        assert cli.main([command_, "p2pco2-x"]) == 2
        assert f"--{variable.lower()}" in capsys.readouterr().err
        monkeypatch.delenv(f"P2P_CO2_{variable}")


def test_a_variable_of_a_service_means_nothing_to_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2P_CO2_PEERS", "four")
    monkeypatch.setenv("P2P_CO2_SEED", "four")
    assert cli.main(["plan", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml" in capsys.readouterr().err
    seed = peer_id_of(bytes(32))
    nobody = str(Ticket(bytes(32), seed, tuple(f"/ip4/127.0.0.1/tcp/{n}/p2p/{seed}" for n in range(1, 9))))
    assert len(nobody) > 255, "and a ticket may be longer than a file's name"
    for variable, name in (("P2P_CO2_FOLDER", "peer"), ("P2P_CO2_OBSERVER_FOLDER", "observer")):
        (tmp_path / name).write_text("no folder")
        monkeypatch.setenv(variable, str(tmp_path / name))
    assert cli.main(["status", nobody]) == 1
    assert f"cannot use the folder {tmp_path / 'observer'}" in capsys.readouterr().err


def test_what_a_demo_starts_does_not_read_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2P_CO2_HOURS", "03:00-03:01")
    show = "import os; print('hours:', os.environ.get('P2P_CO2_HOURS'), flush=True); input()"
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start("child", [sys.executable, "-c", show])
        assert swarm.wait_for_line(child, "hours:", 30.0) == "None"
