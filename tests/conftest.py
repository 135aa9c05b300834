"""Fixtures that tests of several rooms ask for, how hypothesis searches, and the order of tests on two
workers.

``make test`` runs two workers (pytest-xdist). First both take files of tests of one process that work all the
time; then one of them takes all files that measure lines or count what a fault costs, one test after the
other, so that never two of these are at it, and the other takes the swarms that only have to come to
conditions, however long these take, and last what waits on sockets. Without ``-n`` everything runs in
one process in the usual order.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
APART = "never two of these at a time"
MEASURING = ("test_kill", "test_faults", "test_doctor_network")
"""In the order in which they run; beside the first, the other worker may still be at work of one process."""
SWARMS = ("test_swarm", "test_hostile", "test_leaks", "test_examples")
"""Start processes and wait for conditions; the longest first. Other files marked ``swarm`` follow them."""
WAITING = (
    "test_flood", "test_transport", "test_libp2p", "test_discovery", "test_board_history",
    "test_network", "test_socket_activation",
)  # fmt: skip
"""Wait more than they work; short ones, which even out the end."""
SPLIT = ("test_campaign",)
"""Work long enough for a worker of their own."""
LONGEST_FIRST = ("test_campaign", "test_simnet", "test_simulation_watch", "test_fuzz")
"""Beginnings of the names of files that work longest and go first, so that both workers have done with work
at the same time."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores it, and so would each process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", settings.get_profile("suite"), derandomize=False, print_blob=True, max_examples=2000
)  # --hypothesis-profile=long, before a release: 20 times the examples, others every time
settings.load_profile("suite")  # the same examples every time, however long a machine stands still

for _variable in [name for name in os.environ if name.startswith("P2P_CO2_")]:
    del os.environ[_variable]  # the user's own, which commands would take
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="data-")  # where commands keep what no test names
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

os.environ["OMP_NUM_THREADS"] = "1"  # models are small: more threads would only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--storms", type=int, default=200, help="how many storms the campaign plays")
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write what tests/scenarios say now into their files"
    )


@cache
def starts_processes(file: str) -> bool:
    """Whether all of a file's tests are marked ``swarm``."""
    source = (ROOT / file).read_text(encoding="utf-8")
    return any(line.startswith("pytestmark") for line in source.splitlines()) and "mark.swarm" in source


def place_of(file: str) -> tuple[int, int]:
    """Where a file stands in the order of a run on several workers: its phase, and its place in that."""
    stem = Path(file).stem
    for phase, names in enumerate((MEASURING, SWARMS), start=1):
        if stem in names:
            return phase, names.index(stem)
    if starts_processes(file):
        return 2, len(SWARMS)
    if stem in WAITING:
        return 3, WAITING.index(stem)
    first = (at for at, start in enumerate(LONGEST_FIRST) if stem.startswith(start))
    return 0, next(first, len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: place_of(item.location[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A file is a unit of work, and so are all files together that measure; of ``SPLIT`` each test is one."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            name = Path(file).stem
            return APART if name in MEASURING else nodeid if name in SPLIT else file

    config.option.loadscopereorder = False
    return Lanes(config, log)


_started: list[str] = []
"""The programs that the test now running has started."""
OURS = re.compile(r"python[\d.]*|p2p-co2")
"""They take seconds to start."""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        names = [os.path.basename(str(word)) for word in (arguments[0], *arguments[1])]
        _started.append(next(filter(OURS.fullmatch, names), names[0]))  # it may be another's argument
    elif event == "os.fork":
        _started.append("fork")


sys.addaudithook(_hear)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What a test and its fixtures started stands in the file of durations. One that starts several programs
    of ours is marked: ``make test-quick`` leaves it out."""
    result = yield
    item.user_properties.append(("started", " ".join(_started)))
    ours = [name for name in _started if OURS.fullmatch(name)]
    if len(ours) > 1 and item.get_closest_marker("swarm") is None:
        pytest.fail(f"mark it `swarm`: it starts {' '.join(ours)}", pytrace=False)
    return result


_durations: dict[str, list[Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Runs where the session is led: with several workers, once for all of them."""
    row = _durations.setdefault(report.nodeid, [0.0, ""])
    row[0] += report.duration
    row[1] = dict(report.user_properties).get("started", row[1])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """``runs/durations.tsv``: seconds, test, and the programs that it started, the longest first."""
    if "PYTEST_XDIST_WORKER" in os.environ or not _durations:
        return
    rows = sorted(_durations.items(), key=lambda item: -item[1][0])
    file = ROOT / "runs" / "durations.tsv"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{seconds:.2f}\t{test}\t{started}\n" for test, (seconds, started) in rows))


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary folder (unix sockets allow no long paths) that must be empty in the end."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    folder.rmdir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 256 KiB, that a test may fill."""
    with mounted_disk(tmp_path / "disk", "256k") as disk:
        yield disk


@contextlib.contextmanager
def mounted_disk(disk: Path, size: str) -> Iterator[Path]:
    """Skips the test where none can be mounted."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "p2p-co2-test", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"a disk to fill has to be mounted: {error}")
    if mounted.returncode != 0:
        pytest.skip(f"a disk to fill has to be mounted, as root: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
