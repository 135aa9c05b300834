"""What the owner of a machine uses: real processes for load, names and other peers, a played driver and
logind for the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.system.owner import MAKERS, PROGRAMS, SENSES, Moment, Owner, Process, battery, gpu_by, heat
from tests.programs import Strangers
from tests.test_process import BOUND_S

ME = os.getpid()


def until(is_so: Callable[[], object]) -> None:
    ends_at = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


class Seen:
    """A sensor that keeps the moments which it was shown."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def __call__(self, now: Moment) -> bool:
        self.moments.append(now)
        return False

    def next(self) -> Moment:
        count = len(self.moments) + 1  # one may be under way
        until(lambda: len(self.moments) > count)
        return self.moments[-1]


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    """To be closed."""
    made: list[Owner] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    with Strangers() as made:
        yield made


# ---- load, by hand


def moment(at: float, busy: int, ours: dict[int, int], others: dict[int, int] | None = None) -> Moment:
    """``ours``, ``others``: ticks by process."""
    processes = {pid: Process(1, "x", ticks) for pid, ticks in {**ours, **(others or {})}.items()}
    return Moment(at, processes, ours.keys(), busy)


@pytest.mark.parametrize(
    ("busy", "ours", "is_used"),
    [
        ((0, 400, 800), ({7: 0}, {7: 400}, {7: 800}), False),  # all of it is ours
        ((0, 110, 220), ({7: 0}, {7: 0}, {7: 0}), True),
        ((0, 500, 1000), ({7: 0}, {7: 300}, {7: 600}), True),  # beside ours, that rests later
        ((0, 110, 200), ({7: 0}, {7: 0}, {7: 0}), False),  # once is not enough
        ((0, 90, 180), ({7: 0}, {7: 0}, {7: 0}), False),
        ((0, 400, 800), ({7: 0}, {7: 100, 8: 300}, {7: 800}), False),  # a child has ended
    ],
)
def test_load_is_what_others_take_above_one_core(
    busy: tuple[int, ...], ours: tuple[dict[int, int], ...], is_used: bool
) -> None:
    sensor = MAKERS["load"]()
    ticks = os.sysconf("SC_CLK_TCK") // 100
    told = [
        sensor(moment(float(at), total * ticks, {pid: spent * ticks for pid, spent in own.items()}))
        for at, (total, own) in enumerate(zip(busy, ours, strict=True))
    ]
    assert told == [False, False, is_used]


def test_a_peer_that_has_just_been_recognised_is_no_load() -> None:
    sensor = MAKERS["load"]()
    assert not sensor(moment(0.0, 0, {7: 0}, {9: 5000}))
    assert not sensor(moment(1.0, 200, {7: 0, 9: 5200}))
    assert not sensor(moment(2.0, 400, {7: 0, 9: 5400}))


# ---- real processes


def test_load_of_strangers_is_noticed(owners: list[Owner], strangers: Strangers) -> None:
    owner = Owner("load")
    owners.append(owner)
    owner.begin()
    for _ in range(len(os.sched_getaffinity(0)) + 1):
        strangers.start("sh", "-c", "while :; do :; done")
    until(owner.using)
    assert owner.using() == SENSES["load"]


def test_a_named_program_of_a_stranger_counts_until_it_was_gone_for_a_while(
    owners: list[Owner], strangers: Strangers, tmp_path: Path
) -> None:
    game = tmp_path / "a game (of ours) 2"
    game.symlink_to(shutil.which("sleep") or "")
    seen = Seen()
    owner = Owner("load", f"steam, {game.name.upper()}", 4.0, {"load": lambda: seen})
    owners.append(owner)
    with subprocess.Popen([str(game), "600"]) as child:
        owner.begin()
        now = seen.next()
        assert {ME, child.pid} <= now.ours, "what we started is ours"
        assert owner.using() == ""
        pid = strangers.start(str(game), "600")
        until(owner.using)
        assert owner.using() == PROGRAMS
        assert pid not in seen.next().ours
        strangers.end(pid)
        used_at = time.monotonic()
        until(lambda: not owner.using())
        assert time.monotonic() - used_at > 2.5
        child.kill()


def test_other_peers_of_this_machine_are_no_owner(
    owners: list[Owner], strangers: Strangers, tmp_path: Path
) -> None:
    seen = Seen()
    owner = Owner("gpu, load", "", 60.0, {"gpu": lambda: gpu_by(lambda: {peer}), "load": lambda: seen})
    owners.append(owner)
    keeps = "import sys, time; from pathlib import Path; from p2p_co2.system.process import FolderLock\n"
    keeps += "lock = FolderLock(Path(sys.argv[1])); time.sleep(600)"
    peer = strangers.start(sys.executable, "-c", keeps, str(tmp_path / "peer"))
    until(lambda: (tmp_path / "peer" / "lock").is_file() and (tmp_path / "peer" / "lock").read_text())
    owner.begin()
    assert peer in seen.next().ours
    assert owner.using() == ""


# ---- played


def test_who_is_on_the_gpu(owners: list[Owner], strangers: Strangers) -> None:
    users = {ME, 1 << 30}
    seen = Seen()
    owner = Owner("gpu, load", "", 2.5, {"gpu": lambda: gpu_by(lambda: users), "load": lambda: seen})
    owners.append(owner)
    owner.begin()
    seen.next()
    assert owner.using() == "", "neither this process nor one of another container"
    users.add(strangers.start("sleep", "600"))
    until(owner.using)
    assert owner.using() == SENSES["gpu"]
    users.clear()
    until(lambda: not owner.using())


def test_whether_the_owner_is_there(
    owners: list[Owner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    logind = tmp_path / "loginctl"

    def says(line: str) -> None:
        new = tmp_path / "new"
        new.write_text(f"#!/bin/sh\n{line}\n")
        new.chmod(0o755)
        new.replace(logind)

    for fault in ("exit 1", "sleep 600", "echo no bus >&2"):
        says(fault)
        (told,) = Owner("input").missing
        assert told.startswith("no rest while input: logind does not tell")
    says("echo IdleHint=yes")
    owner = Owner("input", idle_for_s=6.0)
    owners.append(owner)
    assert owner.missing == []
    owner.begin()
    assert owner.using() == ""
    says("echo IdleHint=no")
    until(owner.using)
    assert owner.using() == SENSES["input"]
    says("echo IdleHint=yes")
    until(lambda: not owner.using())


def test_a_battery_and_a_hot_part_as_the_kernel_tells_them(tmp_path: Path) -> None:
    now = Moment(0.0, {}, set(), 0)

    def tell(**told: str) -> None:
        for name, text in told.items():
            file = tmp_path / name.replace("__", "/")
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{text}\n")

    tell(AC__type="Mains", mouse__type="Battery", mouse__scope="Device", mouse__status="Discharging")
    tell(hwmon0__temp1_input="99000")
    for sensor in (battery, heat):
        with pytest.raises(EnvironmentFault, match="leave"):
            sensor(tmp_path)
    tell(
        BAT0__type="Battery",
        BAT0__status="Charging",
        hwmon0__temp2_crit="100000",
        hwmon0__temp2_input="89000",
    )
    on_battery, is_hot = battery(tmp_path), heat(tmp_path)
    assert not on_battery(now)
    assert not is_hot(now)
    tell(BAT0__status="Discharging", hwmon0__temp2_input="90000")
    assert on_battery(now)
    assert is_hot(now)


def test_what_nobody_can_rest_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="'keyboard' is nothing to rest for; use gpu, input, load"):
        Owner("load, keyboard")
