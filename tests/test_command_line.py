"""The command line's own face: help, completion, the environment, and every mistake as one line of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from bootstrap.local_swarm import LocalSwarm
from p2p_co2.cli import main as cli
from p2p_co2.config import read_peer_config, read_run_config
from p2p_co2.errors import ConfigError
from p2p_co2.peer_options import peer_config
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import peer_id_of

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2p_co2.cli", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False, env={**os.environ, "COLUMNS": "80", **variables},
    )  # fmt: skip


def test_the_list_of_commands_is_grouped_and_cut_off_nowhere() -> None:
    shown = run("--help").stdout
    assert "..." not in shown.replace("[ARGS]...", "")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    for group, commands in cli.GROUPS.items():
        at = lines.index(f"{group}:")
        for offset, (name, (_, short)) in enumerate(commands.items(), start=1):
            assert lines[at + offset].split(maxsplit=1) == [name, short]
            assert short.endswith(".")


def test_every_command_knows_its_short_flags() -> None:
    script = (
        "import sys\nfrom p2p_co2.cli.main import COMMANDS, main\n"
        "for command in ['', *COMMANDS]:\n    for flag in ('-h', '--help'):\n"
        "        try:\n            main([*command.split(), flag])\n"
        "        except SystemExit as end:\n            assert not end.code\n"
        "        print('\\f')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    pages = result.stdout.split("\f\n")
    assert pages[:-1:2] == pages[1::2]
    assert len(pages[:-1:2]) == len(cli.COMMANDS) + 1
    for name, page in zip(cli.COMMANDS, pages[2:-1:2], strict=True):
        assert "-v, --verbose" in page
        assert "-q, --quiet" in page
        assert ("P2P_CO2_AN_OPTION" in page) == (name in {"join", "seed", "doctor"})


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["join", "--treads", "3"], "--treads: there is no such option; did you mean --threads?"),
        (["join", "--frobnicate"], "--frobnicate: there is no such option; p2p-co2 join -h lists them"),
        (["jion"], "jion: there is no such command; did you mean join?"),
        (["plan"], "RUN.toml: is missing; p2p-co2 plan -h says what it is"),
        (["plan", "run.toml", "--peers", "four"], "--peers: write a whole number"),
        (["sample", "x", "--length", "0"], "--length: at least 1"),
        (["join", "a", "b"], "b: one word too many; p2p-co2 join -h says what it takes"),
        (["join", "--name"], "--name: needs a value; -h says which"),
        (["demo", "--kill-one=3"], "--kill-one: takes no value"),
        (["init", "-v", "-q"], "--quiet: says less, and --verbose more; leave one out"),
    ],
)
def test_each_mistake_is_one_line_that_says_what_would_be_right(
    command: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"error: command line: {line}\n")


def test_options_come_from_the_environment_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2P_CO2_PORT", "-1")
    assert cli.main(["seed"]) == 2
    assert "(got -1)" in capsys.readouterr().err
    assert cli.main(["seed", "--port", "-2"]) == 2
    assert "(got -2)" in capsys.readouterr().err
    monkeypatch.setenv("P2P_CO2_PORT", "some")
    assert cli.main(["seed"]) == 2
    line = "error: environment: P2P_CO2_PORT: write a whole number (got 'some')\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("P2P_CO2_TICKET", "p2pco2-x")
    assert cli.main(["join"]) == 2
    assert "the ticket is damaged" in capsys.readouterr().err


def test_a_variable_of_join_or_seed_means_nothing_to_another_command() -> None:
    variables: dict[str, set[str]] = {}
    for name, command in get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        for option in command.params:
            if isinstance(option.envvar, str):
                variables.setdefault(option.envvar, set()).add(name)
    assert variables.pop("P2P_CO2_OBSERVER_FOLDER") == {"status", "watch", "board", "metrics"}
    assert all(names <= {"join", "seed", "doctor"} for names in variables.values())
    assert variables["P2P_CO2_FOLDER"] == {"join", "seed", "doctor"}
    assert variables["P2P_CO2_HOURS"] == variables["P2P_CO2_BOARD_PORT"] == {"join"}
    assert variables["P2P_CO2_PORT"] == {"seed"}


def test_who_looks_on_leaves_the_folder_alone_that_the_environment_names_for_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = peer_id_of(bytes(32))
    nobody = str(Ticket(bytes(32), seed, (f"/ip4/127.0.0.1/tcp/9/p2p/{seed}",)))
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


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'fragmnets = 3\nseed = 1.5\nname = "my run"\nrecipe_options = {width = []}\nclock = 3\n'
        '[codec]\nname = "int5"\n[outer]\nlr = 0.0\nmomentum = 1.0\nrule = "kept"\nlrr = 1\n'
    )
    told = {
        "fragmnets": "unknown key; did you mean fragments?",
        "seed": "write a whole number (got 1.5)",
        "name": "use letters, digits, dots, - and _ alone (got 'my run')",
        "recipe_options.width": "write text, a number, true or false",
        "clock": "is a table of settings; write it as one (got 3)",
        "codec.name": "no codec is called that",
        "outer.lr": "greater than 0 (got 0.0)",
        "outer.momentum": "less than 1 (got 1.0)",
        "outer.rule": "use 'keep', 'co2', 'blend' or 'eager' (got 'kept')",
        "outer.lrr": "unknown key; did you mean lr?",
    }
    with pytest.raises(ConfigError) as caught:
        read_run_config(run_file)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(told)
    for key, problem in told.items():
        (line,) = [line for line in lines if line.startswith(f"{run_file}: {key}: ")]
        assert problem in line
    assert caught.value.key in told
    assert cli.main(["plan", str(run_file)]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"error: {line}" for line in lines]


def test_all_mistakes_of_a_peers_options_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text('nmae = "x"\n[limits]\nthreads = -1\n')
    with pytest.raises(ConfigError) as caught:
        read_peer_config(path)
    assert str(caught.value).splitlines() == [
        f"{path}: limits.threads: at least 0 (got -1)", f"{path}: nmae: unknown key; did you mean name?",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        peer_config(None, {"carrier": "pigeon", "limits.upload_bytes_per_s": 9.0})
    first, second = str(caught.value).splitlines()
    assert first == "command line: --carrier: use 'auto', 'grpc' or 'libp2p' (got 'pigeon')"
    assert second.startswith("command line: --upload: below 10000 bytes/s")


def test_completion_knows_the_commands_and_imports_nothing_slow() -> None:
    words = {"_P2P_CO2_COMPLETE": "complete_bash", "COMP_WORDS": "p2p-co2 se", "COMP_CWORD": "1"}
    shown = run(**words)
    script = "from p2p_co2.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False, env={**os.environ, **words},
    )  # fmt: skip
    assert result.stdout.split() == shown.stdout.split() == ["seed"]
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "hivemind", "rich", "matplotlib", "grpc", "transformers"}
