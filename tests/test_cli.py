"""cli: what a user types, and what they get back when it was wrong: one line, a status, no traceback."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bootstrap.demo import run_demo
from bootstrap.options import DemoOptions, RehearsalOptions, SeedOptions
from bootstrap.rehearsal import run_rehearsal
from bootstrap.run_file import DEFAULT_RUN_FILE
from bootstrap.seed import seed_addresses, serve_run
from p2p_co2 import __version__
from p2p_co2.cli import main as cli
from p2p_co2.cli.join import JoinWatch
from p2p_co2.codec_specs import SPECS
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, LocalProtocolError, TransportError
from p2p_co2.system.process import FolderLock
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import Identity, peer_id_of
from peers.daemon import JoinOptions, join_run
from tests.disks import fill

ROOT = Path(__file__).resolve().parent.parent


Refused = Callable[..., None]


@pytest.fixture(name="refused")
def _refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """A command gives one line on stderr, with all of ``words``; status 2."""

    def refused(command: list[str], *words: str) -> None:
        assert cli.main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert all(word in line for word in words), line

    return refused


@pytest.fixture(name="printed")
def _printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints that ends well."""

    def printed(*command: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(command)
        assert not end.value.code
        return capsys.readouterr().out

    return printed


def test_version(printed: Callable[..., str]) -> None:
    assert printed("--version") == printed("version") == f"p2p-co2 {__version__}\n"


def test_help_explains_a_command_as_its_own_option_does(printed: Callable[..., str]) -> None:
    assert printed("help", "pause") == printed("pause", "-h")
    assert printed("help") == printed("-h")


@pytest.mark.parametrize("command", ["status", "board", "watch", "metrics"])
def test_what_holds_no_run_is_refused_with_what_to_do(tmp_path: Path, refused: Refused, command: str) -> None:
    (tmp_path / "empty").mkdir()
    options = ["--tensorboard", str(tmp_path / "there")] if command == "metrics" else []
    words = "holds neither a run's journals nor a ticket; name a peer's, a seed's or a demo's folder"
    refused([command, str(tmp_path / "empty"), *options], words)
    refused([command, str(tmp_path / "gone"), *options], "is neither a ticket, nor a folder, nor what a peer")


def test_the_default_run_file_is_the_defaults(printed: Callable[..., str]) -> None:
    written, default = tomllib.loads(DEFAULT_RUN_FILE), RunConfig(name="my-run")
    assert RunConfig.model_validate(written) == default
    for name, table in default.model_dump(exclude={"recipe_digest", "recipe_options"}).items():
        there = written[name]
        assert not isinstance(table, dict) or there.keys() == table.keys(), "every setting is explained"
    texts = [printed("init") for _ in range(2)]
    salts = [tomllib.loads(text)["salt"] for text in texts]
    assert len(salts[0]) == 16
    assert salts[0] != salts[1], "nobody can guess the digest of a run"
    assert texts[0].replace(f'"{salts[0]}"', '""' + " " * 16) == DEFAULT_RUN_FILE
    assert (ROOT / "examples" / "run.toml").read_text(encoding="utf-8") == DEFAULT_RUN_FILE


def test_a_run_file_for_a_line_has_rounds_as_short_as_it_allows(printed: Callable[..., str]) -> None:
    runs = [
        RunConfig.model_validate(tomllib.loads(printed("init", "--up-mbit", up, "--step-s", "0.05")))
        for up in ("0.5", "50")
    ]
    slow, fast = (run.clock.round_s for run in runs)
    bits = 2 * (1 - 1 / 4) * SPECS[runs[0].codec.name].bits * 1_269_920
    assert (
        bits / 0.5e6 / 0.8 < slow < bits / 0.5e6 / 0.8 * 1.4
    )  # four fifths of the line, control and headers
    assert runs[0].codec.name == "sign"
    assert 'name = "q2"' in printed("init", "--up-mbit", "0.5", "--step-s", "0.05", "--peers", "2")
    assert fast == pytest.approx(8 * 0.05), "no fewer than eight inner steps"


def test_peers_of_a_run_file_are_those_of_a_line(refused: Refused) -> None:
    refused(["init", "--peers", "8"], "--up-mbit")


def test_a_bad_run_file_is_refused_by_file_key_and_what_would_be_right(
    tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[codec]\nname = "int5"')
    refused(["seed", str(path), "--folder", str(tmp_path / "seed")], str(path), "codec.name", "int4")


@pytest.mark.parametrize("ticket", ["p2pco2-AAAA", ""])
def test_a_wrong_ticket_is_refused_before_anything_starts(
    tmp_path: Path, refused: Refused, ticket: str
) -> None:
    refused(["join", ticket, "--folder", str(tmp_path / "peer")])
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--codec", "int5"], ["--codec", "int4"]),
        (["--round-s", "0"], ["--round-s", "greater than 0"]),
        (["--peers", "0"], ["--peers", "at least 1"]),
        (["--peers", "65"], ["--peers", "at most 64"]),
    ],
)
def test_a_demo_that_cannot_be_is_refused_and_leaves_no_folder(
    tmp_path: Path, options: list[str], words: list[str], refused: Refused
) -> None:
    refused(["demo", "--folder", str(tmp_path / "run"), *options], *words)
    assert not (tmp_path / "run").exists()


def test_a_demo_does_not_overwrite_a_run(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "logs").mkdir()
    refused(["demo", "--folder", str(tmp_path)], "holds a run already")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (TransportError("nobody there"), 1, "error: nobody there"),
        (
            OSError(errno.ENOSPC, "No space left on device", "x.bin"),
            1,
            "error: No space left on device: x.bin; free some space, or write to another disk",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs"),
            1,
            "error: Permission denied: runs; use a file or folder that is yours",
        ),
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


def test_what_a_folder_lacks_is_said_before_the_swarm_is_looked_for(tmp_path: Path) -> None:
    said = io.StringIO()
    watch = JoinWatch(Console(file=said))
    seed = peer_id_of(bytes(32))
    ticket = Ticket(run=bytes(32), run_key=seed, seeds=(f"/ip4/127.0.0.1/tcp/9/p2p/{seed}",))
    options = JoinOptions(ticket=str(ticket), config=PeerConfig(folder=tmp_path / "peer"), resume=True)
    with pytest.raises(ConfigError, match=r"--resume: .* has no checkpoint; leave it out"):
        join_run(options, watch)
    with pytest.raises(ConfigError, match=r"--start-over: begins anew, and --resume does not; leave one out"):
        join_run(replace(options, start_over=True), watch)
    lock = FolderLock(tmp_path / "peer")
    with pytest.raises(EnvironmentFault, match=f"in use by process {os.getpid()}"):
        join_run(replace(options, resume=False), watch)
    lock.release()
    assert "looking for the swarm" not in said.getvalue()
    assert not (tmp_path / "peer" / "events.jsonl").exists()


def test_a_seed_without_any_address_says_so() -> None:
    with pytest.raises(EnvironmentFault, match="no address that a ticket could name; bring its network up"):
        seed_addresses([])
    here, there = "/ip4/127.0.0.1/tcp/1", "/ip4/192.0.2.1/tcp/1"
    assert seed_addresses([here, there]) == (there,)
    assert seed_addresses([here]) == (here,)


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (
            "[recipe_options]\nlearning_rate = -1.0",
            "recipe_options.learning_rate",
            "positive number, got -1.0",
        ),
        ("[recipe_options]\nwidht = 3", "recipe_options.widht", "unknown option; byte-gpt knows .*width"),
        ("[recipe_options]\ntokens = '.'", "recipe_options.tokens", "joins with --tokens PATH"),
        ("recipe = 'nope'", "recipe", "nope: no such recipe; write"),
        ("recipe = 'gone.py:make'", "recipe", "gone.py: no such file"),
    ],
)
def test_a_recipes_fault_names_the_run_file_and_its_key(
    tmp_path: Path, settings: str, key: str, words: str
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(settings + "\n")
    with pytest.raises(ConfigError, match=rf"^{run_file}: {key}: .*{words}"):
        serve_run(SeedOptions(run_file=run_file, folder=tmp_path / "seed"))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_length_that_is_none_is_refused_before_anything_begins(tmp_path: Path, seconds: float) -> None:
    folder = tmp_path / "run"
    for begin in (
        lambda: run_demo(DemoOptions(folder=folder, seconds=seconds), lambda *_: pytest.fail("it began")),
        lambda: run_rehearsal(
            RehearsalOptions(folder=folder, seconds=seconds), lambda *_: pytest.fail("it began")
        ),
    ):
        with pytest.raises(ConfigError, match=rf"--seconds: .*got {seconds:g}\)"):
            begin()
    assert not folder.exists()


def test_a_rehearsal_names_who_named_the_recipe(tmp_path: Path) -> None:
    run_file, folder = tmp_path / "run.toml", tmp_path / "rehearsal"
    run_file.write_text("[recipe_options]\nlearning_rate = -1.0\n")
    options = RehearsalOptions(run_file=run_file, folder=folder)
    for recipe, words in (
        ("", rf"^{run_file}: recipe_options.learning_rate: .*positive number, got -1.0"),
        ("gone.py:make", r"^command line: --recipe: .*gone\.py: no such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_rehearsal(replace(options, recipe=recipe), lambda *_: pytest.fail("no lines"))
        assert not folder.exists()


@pytest.mark.parametrize("command", ["seed", "demo", "rehearse"])
def test_a_full_disk_is_told_of_with_its_folder(small_disk: Path, command: str) -> None:
    folder = small_disk / command
    if command == "seed":
        Identity.load_or_create(folder / "identity")
        (folder / "lock").touch()
    fill(small_disk)
    start = {
        "seed": lambda: serve_run(SeedOptions(host="127.0.0.1", folder=folder)),
        "demo": lambda: run_demo(DemoOptions(folder=folder), lambda *_: pytest.fail("it began")),
        "rehearse": lambda: run_rehearsal(
            RehearsalOptions(folder=folder), lambda *_: pytest.fail("it began")
        ),
    }
    with pytest.raises(OSError, match="No space left") as caught:
        start[command]()
    assert str(caught.value.filename).startswith(str(folder))


def test_a_demo_that_did_not_begin_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(
        folder=tmp_path / "runs" / "demo", text=tmp_path / "absent.txt", seconds=12.0, round_s=5.0
    )
    with pytest.raises(ConfigError, match=r"absent\.txt"):
        run_demo(options, lambda *_: pytest.fail("nothing to watch"))
    assert not (tmp_path / "runs").exists()
    assert "2 rounds of 5 s, 10 s" in capsys.readouterr().out


INTERRUPTED = """
import _signal, os, sys
class AtImport:
    left = int(sys.argv.pop(1))
    def find_spec(self, name, path=None, target=None):
        self.left -= _signal.getsignal(2) is not _signal.default_int_handler
        if self.left == 0:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, AtImport())
from p2p_co2.cli.main import main
print("imported")
"""


@pytest.mark.parametrize("number", [1, 20])
def test_a_ctrl_c_at_any_import_ends_the_program_without_a_traceback(number: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(number)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "stopped\n")


AT_MODULE = """
import os, sys, time
class AtModule:
    module = sys.argv[1]
    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            try:
                os.kill(os.getpid(), 2)
                time.sleep(5)  # cut short by the handler
            except KeyboardInterrupt:
                pass
            raise ImportError("what some make of a KeyboardInterrupt")
sys.meta_path.insert(0, AtModule())
from p2p_co2.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def _interrupted_at(module: str, command: list[str]) -> tuple[int, str]:
    """Status and stderr of a command that gets a Ctrl-C while it imports a module that swallows it."""
    result = subprocess.run(
        [sys.executable, "-c", AT_MODULE, module, *command],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return result.returncode, result.stderr


def test_a_ctrl_c_while_join_imports_ends_it() -> None:
    identity = Identity.generate()
    seed = f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"
    ticket = str(Ticket(bytes(32), identity.peer_id, (seed,)))
    assert _interrupted_at("p2p_co2.trainer", ["join", ticket]) == (-signal.SIGINT, "stopped\n")


@pytest.mark.parametrize("command", [["seed", "--folder"], ["plan", "examples/run.toml", "--plot"]])
def test_a_ctrl_c_that_an_import_swallows_is_not_lost(tmp_path: Path, command: list[str]) -> None:
    assert _interrupted_at("torch", [*command, str(tmp_path / "it")]) == (-signal.SIGINT, "stopped\n")
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize("command", [["seed", "--host", "127.0.0.1", "--folder"], ["demo", "--folder"]])
def test_a_ctrl_c_has_one_status_per_kind_of_command(tmp_path: Path, command: list[str]) -> None:
    """What runs until it is stopped has done its work (0); what would have ended by itself has not: 130, or,
    while it imports torch, the signal, which a shell shows as 130."""
    process = subprocess.Popen(
        [sys.executable, "-m", "p2p_co2.cli", *command, str(tmp_path / "it")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    awaited = "ticket:" if command[0] == "seed" else "preparing"
    for line in process.stdout:
        if awaited in line:
            break
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode in ((0,) if command[0] == "seed" else (130, -signal.SIGINT)), rest
    assert "Traceback" not in rest
