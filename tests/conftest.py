"""Fixtures that tests of several rooms ask for, how hypothesis searches, and the order of tests on two
workers.

``make test`` runs two workers (pytest-xdist). First both take files of tests of one process; then one of them
takes all files that start swarms of processes, one test after the other: these have the machine to
themselves, whatever its speed, but for two light files that the other worker takes meanwhile. Without ``-n``
everything runs in one process in the usual order.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = "real processes"
ALONE = ("test_doctor_network",)
"""Measures lines, and so belongs to those, though not each of its tests starts processes."""
LIGHT = ("test_examples", "test_leaks")
"""Start few processes, which hardly work, and measure no time."""
LONGEST_FIRST = ("test_campaign", "test_simnet", "test_simulation_watch", "test_fuzz")
"""Files that take long go first, so that both workers are done at the same time."""

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")  # the same examples every time, however long a machine stands still

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: more threads would only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"


@cache
def starts_processes(file: str) -> bool:
    """Whether a file's tests have the machine to themselves: all are marked ``swarm``."""
    if Path(file).stem in ALONE:
        return True
    source = (ROOT / file).read_text(encoding="utf-8")
    return any(line.startswith("pytestmark") for line in source.splitlines()) and "mark.swarm" in source


def place_of(file: str) -> int:
    """Where a file stands in the order of a run on several workers."""
    stem = Path(file).stem
    if starts_processes(file):
        return len(LONGEST_FIRST) + 1 + (stem in LIGHT)
    return next((at for at, start in enumerate(LONGEST_FIRST) if stem.startswith(start)), len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: place_of(item.location[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A file is a unit of work, and so are all files together that start processes."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return PROCESSES if starts_processes(file) and Path(file).stem not in LIGHT else file

    config.option.loadscopereorder = False
    return Lanes(config, log)


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
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "p2p-co2-test", str(disk)]
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
