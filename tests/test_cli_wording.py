"""cli and what it starts, in their words: units, dashes for what is not known, options by their own name, and
nothing left behind by what did not begin."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.demo import DemoOptions, run_demo
from bootstrap.rehearsal import RehearsalOptions, run_rehearsal
from bootstrap.seed import SeedOptions, seed_addresses, serve_run
from monitoring.words import loss_unit
from p2p_co2.cli.main import main
from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.peer_options import peer_config
from p2p_co2.protocol.wire.identity import Identity, peer_id_of
from p2p_co2.recipes import check_data
from p2p_co2.system.process import FolderLock
from p2p_co2.telemetry.events import PeerLeft, Progress, RoundBegan, TrainingEnded
from p2p_co2.tensors.checkpoint import load, load_agreed
from p2p_co2.ticket import Ticket
from peers import daemon
from peers.daemon import JoinOptions, join_run
from peers.doctor.machine import check_disk
from peers.doctor.network import round_trips_finding
from peers.status import StatusLines
from tests.disks import fill

ROOT = Path(__file__).resolve().parent.parent


def progress(loss: float) -> Progress:
    return Progress(
        at=1.0, peer="12D3", phase="training", position=0.5, inner_steps=3, tokens=9, tokens_per_s=4.0,
        loss=loss, train_s=1.0, exposed_s=0.0, wall_s=1.0, up_bytes=0, down_bytes=0, versions=(0,),
    )  # fmt: skip


def test_a_loss_that_is_not_known_yet_is_a_dash() -> None:
    said: list[str] = []
    lines = StatusLines(said.append, every_s=0.0)
    lines.see(progress(float("nan")))
    lines.see(progress(2.5))
    assert "loss - |" in said[0]
    assert "loss 2.500 |" in said[1]


def test_the_status_line_shows_the_deadlines_of_the_newest_rounds() -> None:
    said: list[str] = []
    lines = StatusLines(said.append, every_s=0.0)
    lines.see(progress(2.5))
    assert "waits at most -" in said[-1]
    for fragment, ready_s, parts_s in ((0, 9.0, 9.0), (0, 1.25, 3.0), (1, 2.0, 3.0)):
        began = RoundBegan(
            at=1.0, peer="12D3", fragment=fragment, round=1, group=("12D3",), waited_s=0.0,
            deadline_s=ready_s, parts_deadline_s=parts_s,
        )  # fmt: skip
        lines.see(began)
    lines.see(progress(2.5))
    assert "waits at most 1.2 to 2.0 s for peers, 3.0 s for parts" in said[-1]


def test_the_wait_at_the_end_of_a_run_is_explained_with_its_bounds() -> None:
    said: list[str] = []
    ended = TrainingEnded(
        at=1.0, peer="12D3", fragments=(0, 2), offers_within_s=30.0, settles_within_s=55.0
    )  # fmt: skip
    StatusLines(said.append).see(ended)
    assert "the run is over: waiting for the last rounds" in said[0]
    assert "2 fragments with work of this peer in at most 30 s, then until all peers agree" in said[0]
    assert "in at most 55 s more" in said[0]


def test_a_log_on_a_full_disk_does_not_end_the_peer() -> None:
    tried: list[str] = []

    def refuse(text: str) -> None:
        tried.append(text)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines = StatusLines(refuse, every_s=0.0)
    lines.say("looking for the swarm ...")
    lines.see(progress(2.5))
    assert len(tried) == 2


def test_only_the_built_in_recipe_counts_in_nats() -> None:
    assert loss_unit("byte-gpt") == "nats per token"
    assert loss_unit("mine.py:make") == ""


def test_only_who_resumes_is_told_to_start_without_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="or begin anew"):
        load(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_agreed(tmp_path)
    assert "--start-over" not in str(caught.value)
    assert "such as runs/peer/checkpoint" in str(caught.value)


def test_what_a_folder_lacks_is_said_before_the_swarm_is_looked_for(tmp_path: Path) -> None:
    said: list[str] = []
    lines = StatusLines(said.append)
    seed = peer_id_of(bytes(32))
    ticket = Ticket(run=bytes(32), run_key=seed, seeds=(f"/ip4/127.0.0.1/tcp/9/p2p/{seed}",))
    options = JoinOptions(ticket=str(ticket), config=PeerConfig(folder=tmp_path / "peer"), resume=True)
    with pytest.raises(ConfigError, match=r"--resume: .* has no checkpoint; leave it out"):
        join_run(options, lines)
    with pytest.raises(ConfigError, match=r"--start-over: begins anew, and --resume does not; leave one out"):
        join_run(replace(options, start_over=True), lines)
    lock = FolderLock(tmp_path / "peer")
    with pytest.raises(EnvironmentFault, match=f"in use by process {os.getpid()}"):
        join_run(replace(options, resume=False), lines)
    lock.release()
    assert not any("looking for the swarm" in text for text in said)
    assert not (tmp_path / "peer" / "events.jsonl").exists()


def test_an_option_that_cannot_be_is_refused_in_our_own_words() -> None:
    with pytest.raises(ConfigError, match="--checkpoint-every: Input should be greater than or equal to 0"):
        peer_config(None, {"checkpoint_every_s": -1.0}, "")
    with pytest.raises(ConfigError, match="--hours: '25-26' is no span of the day"):
        peer_config(None, {"limits.hours": "25-26"}, "")


def test_a_folder_that_is_a_file_is_not_told_to_free_space(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    advice = check_disk(tmp_path / "file", 1.0).advice
    assert "--folder" in advice
    assert "space" not in advice


def test_one_is_no_plural() -> None:
    assert round_trips_finding({"seed 1": 0.05}, 1).measured.endswith("; 1 peer in the run")
    assert round_trips_finding({"seed 1": 0.05}, 2).measured.endswith("; 2 peers in the run")


def test_a_seed_names_its_own_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--port: from 1 to 65535"):
        serve_run(SeedOptions(port=99999, folder=tmp_path / "seed"))
    assert not (tmp_path / "seed").exists()


def test_a_seed_without_any_address_says_so() -> None:
    with pytest.raises(EnvironmentFault, match="no address that a ticket could name; bring its network up"):
        seed_addresses([])
    here, there = "/ip4/127.0.0.1/tcp/1", "/ip4/192.0.2.1/tcp/1"
    assert seed_addresses([here, there]) == (there,)
    assert seed_addresses([here]) == (here,)


def test_text_that_cannot_be_trained_on_is_refused_and_one_that_is_elsewhere_is_noted(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("é" * 5000)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 50)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "none").mkdir()
    assert check_data("", "") == ""
    assert check_data(str(tmp_path / "text.txt"), "") == ""
    assert check_data("", str(tmp_path / "text.txt")) == ""
    assert "joins with --text" in check_data(str(tmp_path / "absent.txt"), "")
    assert "mend the run file" in check_data("", str(tmp_path / "absent.bin"))
    for text, tokens, words in (
        ("binary.txt", "", "not UTF-8"),
        ("none", "", "holds no .txt"),
        ("", "empty.bin", "is empty"),
        ("", "none", "cannot read"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_data(str(tmp_path / text) if text else "", str(tmp_path / tokens) if tokens else "")


def test_a_seed_refuses_a_text_that_nobody_could_read(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 50)
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[recipe_options]\ntext = "{tmp_path / "binary.txt"}"\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        serve_run(SeedOptions(run_file=run_file, folder=tmp_path / "seed"))


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (
            "[recipe_options]\nlearning_rate = -1.0",
            "recipe_options.learning_rate",
            "positive number, got -1.0",
        ),
        ("[recipe_options]\nwidht = 3", "recipe_options.widht", "unknown option; byte-gpt knows .*width"),
        ("[recipe_options]\ntokens = '.'", "recipe_options.tokens", "cannot read"),
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
            run_rehearsal(replace(options, recipe=recipe), lambda config, folder: pytest.fail("no lines"))
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


def test_who_left_is_said_to_have_left_once() -> None:
    said: list[str] = []
    StatusLines(said.append).see(PeerLeft(at=0.0, peer="a", other="b", reason="left: stopped"))
    assert len(said) == 1
    assert said[0].endswith("peer b left: stopped")


def test_a_demo_that_did_not_begin_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(
        folder=tmp_path / "runs" / "demo", text=tmp_path / "absent.txt", seconds=12.0, round_s=5.0
    )
    with pytest.raises(ConfigError, match=r"absent\.txt"):
        run_demo(options, lambda config, folder: pytest.fail("nothing to watch"))
    assert not (tmp_path / "runs").exists()
    assert "2 rounds of 5 s, 10 s" in capsys.readouterr().out


def test_a_ctrl_c_while_the_program_starts_gives_no_traceback() -> None:
    script = "import p2p_co2.cli.ctrl_c, os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "stopped\n")


def test_the_program_takes_that_over_before_it_imports_anything_slow() -> None:
    script = (
        "import sys, signal\nbefore = {*sys.modules}\nimport p2p_co2.cli.ctrl_c\n"
        "print(sorted({*sys.modules} - before))\nimport p2p_co2.cli.main\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    text = (ROOT / "p2p_co2" / "cli" / "main.py").read_text()
    ours, others = text.index("from p2p_co2.cli.ctrl_c"), text.index("import typer")
    assert ours < others < text.index("from p2p_co2.cli import")
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout == "['p2p_co2', 'p2p_co2.cli', 'p2p_co2.cli.ctrl_c']\nTrue\n"


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


@pytest.mark.parametrize("number", [1, 2, 20, 100])
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


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("p2p_co2.trainer", ["join"]),
        ("p2p_co2.node.observer", ["watch"]),
        ("monitoring.board.run", ["board"]),
        ("p2p_co2.trained", ["eval"]),
        ("p2p_co2.cli.simulate", ["simulate"]),
    ],
)
def test_a_ctrl_c_while_a_command_imports_ends_it(module: str, command: list[str]) -> None:
    identity = Identity.generate()
    seed = f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"
    ticket = str(Ticket(bytes(32), identity.peer_id, (seed,)))
    assert _interrupted_at(module, [*command, ticket]) == (-signal.SIGINT, "stopped\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["seed", "--folder"], "stopped"),
        (["demo", "--no-board", "--folder"], "stopped; no process is left"),
        (["rehearse", "--folder"], "stopped; no process and no namespace is left"),
        (["plan", "examples/run.toml", "--plot"], "stopped"),
    ],
)
def test_a_ctrl_c_that_an_import_swallows_is_not_lost(tmp_path: Path, command: list[str], words: str) -> None:
    """The seed went on as if nothing had been pressed, in 2 of 24 tries."""
    assert _interrupted_at("torch", [*command, str(tmp_path / "it")]) == (130, f"{words}\n")
    assert not (tmp_path / "it").exists()


def test_a_ctrl_c_that_no_command_takes_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    identity = Identity.generate()
    seed = f"/ip4/127.0.0.1/tcp/9/p2p/{identity.peer_id}"
    ticket = str(Ticket(bytes(32), identity.peer_id, (seed,)))

    monkeypatch.setattr(daemon, "import_slow", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            main(["join", ticket])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.value.code, capsys.readouterr().err) == (130, "stopped\n")


@pytest.mark.parametrize("command", [["seed", "--host", "127.0.0.1", "--folder"], ["demo", "--folder"]])
def test_a_ctrl_c_has_one_status_per_kind_of_command(tmp_path: Path, command: list[str]) -> None:
    """What runs until it is stopped has done its work (0); what would have ended by itself has not (130)."""
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
    assert process.returncode == (0 if command[0] == "seed" else 130), rest
    assert "Traceback" not in rest
