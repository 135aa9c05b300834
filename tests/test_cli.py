"""cli: what a user types, and what they get back when it was wrong: one line, a status, no traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bootstrap.run_file import DEFAULT_RUN_FILE
from p2p_co2 import __version__
from p2p_co2.cli import main as cli
from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault, LocalProtocolError, TransportError

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, module: str = "p2p_co2.cli") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr, with all of ``words``; status 2."""
    assert result.returncode == 2, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"p2p-co2 {__version__}\n")


@pytest.mark.parametrize("command", ["seed", "join", "demo", "plan", "sample", "eval", "init"])
def test_every_command_explains_itself_without_torch_or_hivemind(command: str) -> None:
    script = (
        "import sys\nfrom p2p_co2.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print(sorted({'torch', 'hivemind', 'grpc', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert command in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("module", "arguments"), [("peers", ["--help"]), ("bootstrap", ["seed", "--help"])])
def test_python_m_is_the_same_program(module: str, arguments: list[str]) -> None:
    own = run(*(["join", "--help"] if module == "peers" else arguments)).stdout
    other = run(*arguments, module=module).stdout
    assert f"Usage: python -m {module}" in other
    assert own.splitlines()[1:] == other.splitlines()[1:]


def test_the_default_run_file_is_the_defaults() -> None:
    assert RunConfig.model_validate(tomllib.loads(DEFAULT_RUN_FILE)) == RunConfig(name="my-run")
    assert run("init").stdout == DEFAULT_RUN_FILE
    assert (ROOT / "examples" / "run.toml").read_text(encoding="utf-8") == DEFAULT_RUN_FILE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("fragments = = 4", ["not valid TOML", "line 1"]),
        ("fragmnets = 4", ["fragmnets", "unknown key"]),
        (
            'fragments = 9\n[clock]\nmode = "steps"\ninner_steps_per_round = 8',
            ["inner_steps_per_round is 8", "at least 9"],
        ),
        ("[outer]\nlr = -0.1", ["outer.lr", "greater than 0"]),
        ('[codec]\nname = "int5"', ["codec.name", "int4"]),
    ],
)  # fmt: skip
def test_a_bad_run_file_is_refused_by_file_key_and_what_would_be_right(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(content)
    refused(run("seed", str(path), "--folder", str(tmp_path / "seed")), str(path), *words)


def test_a_missing_run_file_is_named(tmp_path: Path) -> None:
    refused(run("seed", str(tmp_path / "no.toml")), "no.toml", "no such file")


def test_a_folder_in_the_place_of_a_run_file_is_named(tmp_path: Path) -> None:
    refused(run("seed", str(tmp_path)), str(tmp_path), "is a folder")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    refused(run("seed", str(tmp_path / "run.toml")), "run.toml", "not UTF-8")


def test_a_bad_peer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text("[limits]\nuplaod = 3")
    refused(run("join", "p2pco2-x", "--config", str(tmp_path / "peer.toml")), "peer.toml", "limits.uplaod")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--carrier", "pigeon", ["'grpc'", "'libp2p'", "pigeon"]),
        ("--grpc-port", "70000", ["65535"]),
        ("--batch", "-1", ["greater than or equal to 0"]),
        ("--upload", "-1", ["greater than or equal to 0"]),
        ("--upload", "9", ["below 10000 bytes/s", "0 for no cap"]),
        ("--download", "fast", ["--download", "'fast' is no rate", "20Mbit"]),
        ("--hours", "22-7", ["--hours", "'22-7' is no span of the day", "22:00-07:00"]),
    ],
)
def test_a_bad_option_is_refused_by_its_name(option: str, value: str, words: list[str]) -> None:
    refused(run("join", "p2pco2-x", option, value), option, *words)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        (None, None),
        ("0", 0),
        ("2500000", 2.5e6),
        ("500k", 5e5),
        ("2.5M", 2.5e6),
        ("20Mbit", 2.5e6),
        ("1G", 1e9),
    ],
)
def test_a_rate_is_read_in_the_users_units(text: str | None, bytes_per_s: float | None) -> None:
    assert cli._rate("--upload", text) == bytes_per_s


@pytest.mark.parametrize("ticket", ["nonsense", "p2pco2-", "p2pco2-AAAA", "p2pco2-" + "Z" * 5000])
def test_a_wrong_ticket_is_refused_before_anything_starts(tmp_path: Path, ticket: str) -> None:
    refused(run("join", ticket, "--folder", str(tmp_path / "peer")))
    assert not (tmp_path / "peer").exists()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text('name = "from-file"\nbatch = 3\n[limits]\nthreads = 5')
    config = cli.peer_config(path, {"batch": 7, "name": None, "limits.upload_bytes_per_s": 9e4})
    assert (config.name, config.batch, config.carrier) == ("from-file", 7, "auto")
    assert (config.limits.threads, config.limits.upload_bytes_per_s) == (5, 9e4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rule", "hope"], ["--rule", "'keep'"]),
        (["--codec", "int5"], ["--codec", "'int4'"]),
        (["--round-s", "0"], ["--round-s", "greater than 0"]),
        (["--peers", "0"], ["--peers", "at least 1"]),
    ],
)
def test_a_demo_that_cannot_be_is_refused_and_leaves_no_folder(
    tmp_path: Path, options: list[str], words: list[str]
) -> None:
    refused(run("demo", "--folder", str(tmp_path / "run"), *options), *words)
    assert not (tmp_path / "run").exists()


def test_a_demo_does_not_overwrite_a_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    refused(run("demo", "--folder", str(tmp_path)), "holds a run already")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (EnvironmentFault("port 5 is in use"), 1, "error: port 5 is in use"),
        (TransportError("nobody there"), 1, "error: nobody there"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x.bin"),
            1,
            "error: No space left on device: x.bin; free some space, or write to another disk",
        ),
        (  # as a write to a file that is open already ends
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "error: No space left on device; free some space, or write to another disk",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs"),
            1,
            "error: Permission denied: runs; use a file or folder that is yours",
        ),
        (OSError(errno.EIO, "Input/output error", "x"), 1, "error: Input/output error: x"),
    ],
)
def test_faults_outside_the_program_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    line: str,
) -> None:
    def failing(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    assert cli.main([]) == status
    assert capsys.readouterr().err == line + "\n"


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(**_: object) -> None:
        raise LocalProtocolError("round began twice")

    monkeypatch.setattr(cli, "app", failing)
    with pytest.raises(LocalProtocolError):
        cli.main([])


@pytest.mark.parametrize("target", ["help", "install", "demo", "test", "check", "proto"])
def test_the_makefile_has_its_targets(target: str) -> None:
    result = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_constraints_are_exact_and_name_no_place() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines), lines
    assert not [line for line in lines if "/" in line or "@" in line or "+" in line]
    assert {"torch", "hivemind", "typer", "rich", "pytest"} <= {line.split("==")[0] for line in lines}
