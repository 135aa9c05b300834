"""process: real processes that are asked to stop, killed, or orphaned, and what the kernel says is left of
them."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.clock import STOOD_S, ProcessClock, within
from p2p_co2.system.governor import BY_HAND, Governor, Wish, WishFile
from p2p_co2.system.process import (
    FolderLock,
    is_kept,
    processes_below,
    program,
)
from tests.test_architecture import ROOT

BOUND_S = 120.0
"""On what takes less than a second on a machine that is at rest."""
SLEEP = "import time; time.sleep(600)"
STOPPABLE = f"""
import subprocess, sys, time
from p2p_co2.system.process import StopSignals
with StopSignals(lambda: print("asked", flush=True)):
    below = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
    print(below.pid, flush=True)
    while True:
        time.sleep(600)
"""
IMPORTING = """
import sys
from p2p_co2.system.process import StopSignals
sys.path.insert(0, sys.argv[1])
try:
    with StopSignals():
        import takes_long
except KeyboardInterrupt:
    print("asked")
"""
FOLLOWING = """
import os, signal, sys, time
from p2p_co2.system.process import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked to leave", file=open(sys.argv[1], "w"))))
end_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
LEADING = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {FOLLOWING!r}, sys.argv[1]]).wait()
"""


@contextmanager
def started(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs ``code``; it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until(condition: Callable[[], bool], within_s: float = BOUND_S) -> bool:
    ends_at = time.monotonic() + within_s
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.02)  # other processes set no event here
    return condition()


def has_ended(pid: int) -> bool:
    """A killed orphan is reaped by init in its own time: a zombie counts as ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


# ---- the machine


def test_who_is_asked_amid_an_import_stops_when_it_is_over(tmp_path: Path) -> None:
    """Where what is imported swallows whatever happens meanwhile."""
    code = "try:\n    print('amid', flush=True)\n    import time; time.sleep(2)\nexcept BaseException: pass\n"
    (tmp_path / "takes_long.py").write_text(code + "print('over', flush=True)\n")
    with started(IMPORTING, str(tmp_path)) as process:
        assert line_of(process) == "amid"
        process.send_signal(signal.SIGTERM)
        assert [line_of(process), line_of(process)] == ["over", "asked"]
        assert process.wait(BOUND_S) == 0


ELSEWHERE = """
import contextlib, ctypes, importlib, os, socket, sys
from tools import house
names = [house.module_of(path) for path in house.sources() if path.stem != "__main__"]
[*map(importlib.import_module, names)]  # and what they need of others
[sys.modules.pop(one) for one in [*sys.modules] if one.split(".")[0] in house.PRODUCT]
sys.platform = sys.argv[1]
del os.sched_getaffinity, socket.TCP_INFO
if sys.platform == "win32":
    sys.modules |= dict.fromkeys(["fcntl", "resource", "uvloop", "hivemind"])
    del os.register_at_fork
    ctypes.CDLL = lambda name, made=ctypes.CDLL: made("" + name)
[*map(importlib.import_module, names if sys.platform == "darwin" else ["p2p_co2.cli.main"])]
for line in sys.argv[2:]:
    with contextlib.suppress(SystemExit):
        sys.modules["p2p_co2.cli.main"].main(line.split())
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_what_needs_no_peer_runs_on_other_systems(system: str, tmp_path: Path) -> None:
    lines = (
        "plan examples/own_loop.toml --parameters 1000 --step-s 1 --profile dsl --memory-gb 8",
        f"simulate --storm --peers 4 --folder {tmp_path / 'storm'}",
        "sample nowhere", "model nowhere --out /nowhere", "join p2pco2-x",
    )  # fmt: skip
    command = [sys.executable, "-c", ELSEWHERE, system, *lines]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert re.search("inner step 1 s.*law violations: 0", ran.stdout, re.DOTALL), ran.stdout
    of_join = "install WSL 2" if system == "win32" else "the ticket is damaged"
    assert re.search(f"no checkpoint.*\n.*no checkpoint.*\n.*{of_join}", ran.stderr), ran.stderr


# ---- stop signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_leaves_nothing(number: signal.Signals) -> None:
    with started(STOPPABLE) as process:
        below = int(line_of(process))
        process.send_signal(number)
        assert line_of(process) == "asked"
        assert process.poll() is None
        assert not has_ended(below)
        process.send_signal(number)
        assert process.wait(BOUND_S) == 130
        assert until(lambda: has_ended(below))


def test_a_second_ctrl_c_gives_the_terminal_back() -> None:
    """The shell went on without a cursor, or on the screen of ``watch``."""
    end, inside = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", STOPPABLE], stdout=inside, stdin=inside)
    try:
        os.close(inside)
        shown = b""
        for awaited in (b"\n", b"asked"):
            while awaited not in shown:
                shown += os.read(end, 4096)
            process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 130
        assert b"\x1b[?25h" in os.read(end, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(end)


# ---- parents and children


def test_a_child_is_asked_to_leave_when_its_parent_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with started(LEADING, str(said)) as parent:
        child = int(line_of(parent))
        assert processes_below(parent.pid) == [child]
        parent.kill()
        assert until(lambda: has_ended(child))
    assert said.read_text() == "asked to leave\n"


# ---- folders


def test_a_folder_serves_one_process(tmp_path: Path) -> None:
    held = FolderLock(tmp_path / "peer")
    with pytest.raises(EnvironmentFault, match=rf"in use by process {os.getpid()}; give this one another"):
        FolderLock(tmp_path / "peer")
    held.release()
    held.release()
    FolderLock(tmp_path / "peer").release()


def test_who_looks_whether_a_folder_is_kept_does_not_take_it(tmp_path: Path) -> None:
    assert is_kept(tmp_path) is None
    lock = FolderLock(tmp_path)
    assert is_kept(tmp_path) is True
    lock.release()
    assert is_kept(tmp_path) is False
    FolderLock(tmp_path).release()


def test_a_killed_process_lets_its_folder_go(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from p2p_co2.system.process import FolderLock\n"
        f"lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); {SLEEP}"
    )
    with started(code, str(tmp_path)) as process:
        assert line_of(process) == "held"
        with pytest.raises(EnvironmentFault, match=f"in use by process {process.pid}"):
            FolderLock(tmp_path)
        process.kill()
        process.wait(BOUND_S)
        FolderLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"cannot use the folder .*file/peer.*--folder"):
        FolderLock(tmp_path / "file" / "peer")


NAMES = ("peers", "bootstrap", "monitoring", "tests", "program", "process")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder whose modules must not be imported by us."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s own')\n")
    return tmp_path


def said(command: list[str], home: Path) -> tuple[int, str]:
    """Of a process that starts in ``home``, which is also on the module path before our packages."""
    path = os.pathsep.join([str(home), str(ROOT)])
    ended = subprocess.run(
        command, cwd=home, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("module", ["peers", "bootstrap", "monitoring"])
def test_our_programs_run_our_packages(module: str, home: Path) -> None:
    status, words = said(program(module, "--help"), home)
    assert status == 0, words
    assert "usage" in words.lower()


def test_the_command_line_imports_our_packages(home: Path) -> None:
    console_script = str(Path(sys.executable).parent / "p2p-co2")
    status, words = said([console_script, "join", "p2pco2-nonsense", "--folder", "here"], home)
    assert (status, "the user's own" in words) == (2, False), words
    assert "ticket" in words


def test_a_process_whose_stderr_is_closed_works_and_says_nothing() -> None:
    code = "import p2p_co2.trainer.ranks.collectives as ranks; ranks.say('to nobody'); print('to stdout')"
    status, words = said(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], ROOT)
    assert (status, words) == (0, "to stdout\n")


NOON, EVENING, NIGHT, MORNING = 12 * 60, 21 * 60, 23 * 60, 8 * 60


def test_without_hours_it_works_until_it_is_told_otherwise() -> None:
    governor = Governor()
    assert governor.resting(NOON) == ""
    governor.pause()
    assert governor.resting(NOON) == BY_HAND
    assert governor.resting(NIGHT) == BY_HAND
    governor.go_on()
    assert governor.resting(NIGHT) == ""


def test_outside_its_hours_it_rests_and_says_why() -> None:
    governor = Governor("22:00-07:00")
    assert governor.resting(NOON) == "outside its hours (22:00-07:00)"
    assert governor.resting(22 * 60) == ""
    assert governor.resting(7 * 60 - 1) == ""
    assert governor.resting(7 * 60) != ""


def test_a_wish_holds_until_the_hours_turn() -> None:
    governor = Governor("22:00-07:00")
    assert governor.resting(NOON)
    governor.go_on()  # work now, though it is day
    assert governor.resting(EVENING) == ""
    assert governor.resting(NIGHT) == ""
    assert governor.resting(MORNING)  # the night is over, and with it the wish
    governor.pause()
    assert governor.resting(MORNING) == BY_HAND
    assert governor.resting(NIGHT) == ""  # so does this one end


def test_while_its_owner_uses_the_machine_it_rests_and_a_wish_comes_first() -> None:
    using = ""
    governor = Governor("22:00-07:00", using=lambda: using)
    assert governor.resting(NIGHT) == ""
    governor.go_on()  # of no use beforehand
    assert governor.resting(NIGHT) == ""
    using = "its owner is using the GPU"
    assert governor.resting(NIGHT) == using
    governor.go_on()
    assert governor.resting(NIGHT) == ""
    using = ""
    assert governor.resting(NIGHT) == ""
    using = "its owner is using the processor"  # a new use
    assert governor.resting(NIGHT) == using
    governor.pause()
    using = ""
    assert governor.resting(NIGHT) == BY_HAND, "only a person or the hours end it"
    assert governor.resting(NOON) == "outside its hours (22:00-07:00)"
    using = "its owner is using the GPU"
    governor.go_on()
    assert governor.resting(NOON) == "", "in spite of both"
    using = ""
    assert governor.resting(NOON) == ""


def test_a_wish_from_another_process_is_news_once_however_often_it_is_written(tmp_path: Path) -> None:
    ours, theirs = WishFile(tmp_path), WishFile(tmp_path)
    governor = Governor("22:00-07:00", ours.news)
    assert governor.resting(NIGHT) == ""
    for _ in range(2):
        theirs.write(Wish.PAUSE)
        assert governor.resting(NIGHT) == BY_HAND
    governor.go_on()
    assert governor.resting(NIGHT) == ""
    theirs.write(Wish.PAUSE)  # after a wish that came another way
    assert governor.resting(NIGHT) == BY_HAND
    for _ in range(2):
        theirs.write(Wish.GO_ON)
        assert governor.resting(NIGHT) == ""
    assert governor.resting(NOON) == "outside its hours (22:00-07:00)"  # the hours have turned


def test_a_pause_outlives_the_process_and_a_resume_does_not(tmp_path: Path) -> None:
    for written, resting in ((Wish.PAUSE, BY_HAND), (Wish.GO_ON, "outside its hours (22:00-07:00)")):
        WishFile(tmp_path).write(written)
        assert Governor("22:00-07:00", WishFile(tmp_path).news).resting(NOON) == resting
    (tmp_path / "wish").write_text("nonsense")
    assert Governor("", WishFile(tmp_path).news).resting(NOON) == ""


def test_what_a_process_slept_through_did_not_pass_for_it() -> None:
    real = 50.0
    clock = ProcessClock(lambda: real, 1000.0)
    assert clock.now() == 1000.0
    clock.wakes_by(1002.0)
    real += 2.5  # a little late
    assert clock.now() == 1002.5
    assert not clock.woke()
    assert clock.now() == 1002.5
    clock.wakes_by(1003.0)
    real += 3600.0
    assert clock.now() == 1003.0 + STOOD_S  # also for whoever asks before it has looked at its timers
    clock.wakes_by(clock.now() + 0.1)  # a message is handled first, and sets another timer
    assert clock.now() == 1003.0 + STOOD_S
    assert clock.woke()
    assert clock.now() == 1003.0 + STOOD_S
    real += 1.0
    assert clock.now() == 1004.0 + STOOD_S


async def test_a_limit_that_is_looked_at_far_too_late_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ended, ahead_s = asyncio.get_running_loop(), list[str](), 0.0
    began_at = loop.time()
    monkeypatch.setattr(loop, "time", lambda: began_at + ahead_s)

    async def wait() -> None:
        try:
            async with within(10.0):
                await asyncio.Event().wait()
        except TimeoutError:
            ended.append("too slow")

    waiting = asyncio.create_task(wait())
    for ahead_s, is_over in ((0.0, False), (70.0, False), (79.0, False), (80.5, True)):
        for _ in range(5):
            await asyncio.sleep(0)
        assert bool(ended) is is_over, ahead_s
    await waiting


def test_a_library_leaves_a_ctrl_c_to_its_program() -> None:
    code = "import p2p_co2.swarm, p2p_co2.trainer, signal; print(signal.getsignal(signal.SIGINT).__name__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout == "default_int_handler\n"
