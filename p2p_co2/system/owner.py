"""Whether the owner of this machine uses it, or it had better rest: so that a peer rests meanwhile.

    owner = Owner("gpu, load", "blender", idle_for_s=300.0)
    owner.missing      # what this machine cannot tell, in words
    owner.begin()
    owner.using()      # "its owner is using the GPU"; "" after 300 s without
    owner.close()

A thread looks every second or two; who asks reads what it found. What this peer and other peers of this
machine do does not count, so rest does not end rest. A reason travels to the others with the event, so it
names no program. Price: a read of each process's line in /proc; of 140, 0.6 % of a weak core.

Sources: proc(5), NVML's reference, logind's IdleHint: org.freedesktop.login1(5)."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.system.accelerators import text_of
from p2p_co2.system.process import holder_of

PROGRAMS = "its owner is using a program of --rest-for"
SENSES = {
    "gpu": "its owner is using the GPU", "input": "its owner is using the keyboard or mouse",
    "load": "its owner is using the processor", "battery": "its machine runs on its battery",
    "heat": "its machine is hot",
}  # fmt: skip
"""What a peer may rest for, and the reason that it then gives."""


def read_words(text: str, known: Collection[str] = ()) -> list[str]:
    """ "gpu, load" as its words. Raises ``ConfigError`` for one that is not ``known``, if any are."""
    words = list(filter(None, (part.strip() for part in text.split(","))))
    for word in words:
        if known and word not in known:
            raise ConfigError("rest_while", "", f"{word!r} is nothing to rest for; use {', '.join(known)}")
    return words


class Process(NamedTuple):
    """``ticks``: of processor time, with those of its children that have ended."""

    parent: int
    name: str
    ticks: int


class Moment(NamedTuple):
    """This machine at ``at`` (monotonic seconds): its processes by id, those that are ``ours`` (this peer's
    and other peers', with all below them), and the ticks that its processors were busy."""

    at: float
    processes: Mapping[int, Process]
    ours: Set[int]
    busy_ticks: int

    def ticks(self, of: Iterable[int]) -> int:
        return sum(self.processes[pid].ticks for pid in of if pid in self.processes)


Sensor = Callable[[Moment], bool]
"""Whether it is so now."""


class Owner:
    """``rest_while``: of ``SENSES``; ``rest_for``: names of programs; both with commas. ``idle_for_s``: how
    long nothing must be in use until ``using`` says so. ``makers``: of sensors, by their words; each raises
    ``EnvironmentFault`` where the machine has none. Raises ``ConfigError``."""

    def __init__(
        self, rest_while: str = "", rest_for: str = "", idle_for_s: float = 300.0,
        makers: Mapping[str, Callable[[], Sensor]] | None = None,
    ) -> None:  # fmt: skip
        self.missing: list[str] = []
        self._idle_for_s = idle_for_s
        self._sensors: dict[str, Sensor] = {}
        for word in read_words(rest_while, SENSES):
            try:
                self._sensors[SENSES[word]] = (makers or MAKERS)[word]()
            except EnvironmentFault as fault:
                self.missing.append(f"no rest while {word}: {fault}")
        if names := {name[:15].lower() for name in read_words(rest_for)}:  # all that the kernel keeps of one
            self._sensors[PROGRAMS] = lambda now: any(
                one.name.lower() in names for pid, one in now.processes.items() if pid not in now.ours
            )
        if self._sensors and not Path("/proc/stat").exists():
            self.missing.append("no rest while its owner works: this machine shows no processes; mount /proc")
            self._sensors.clear()
        self._used_at = dict.fromkeys(self._sensors, -math.inf)
        self._locks: dict[tuple[str, str], float] = {}
        """The kernel's list, by process and file: since when each is known."""
        self._peers = set[tuple[str, str]]()
        """Those of peers that have their folder."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2p-co2 owner", daemon=True)

    def begin(self) -> None:
        if self._sensors:
            self._thread.start()

    def close(self) -> None:
        """End the thread, within a second or so. May be called twice, and without ``begin``."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(3.0)

    def using(self) -> str:
        """Why to rest; "" if nothing was in use for ``idle_for_s`` seconds. Any thread."""
        since = time.monotonic() - self._idle_for_s
        return next((reason for reason, at in self._used_at.items() if at >= since), "")

    def _run(self) -> None:
        while not self._closing.wait(1.6):
            now = self._moment()
            for reason, is_used in self._sensors.items():
                if is_used(now):
                    self._used_at[reason] = time.monotonic()

    def _moment(self) -> Moment:
        at = time.monotonic()
        busy_ticks = _busy_ticks()
        processes = dict(_processes())
        # The ranks of a group that is one peer are children of what started them.
        own = os.getppid() if "LOCAL_WORLD_SIZE" in os.environ else os.getpid()
        listed = {(row[4], row[5]) for row in _rows("/proc/locks") if row[1] == "FLOCK"}
        self._locks = {one: self._locks.get(one, at) for one in listed}
        young = {one for one, since_at in self._locks.items() if at - since_at < 10.0}  # it names its holder
        self._peers |= {one for one in young if _has_folder(one[0])}
        # Number 2's are the kernel's own threads: they work for everybody, for a checkpoint's disk too.
        ours = {own, 2, *(int(pid) for pid, _ in self._peers & listed)}
        while more := {pid for pid, one in processes.items() if one.parent in ours} - ours:
            ours |= more
        return Moment(at, processes, ours, busy_ticks)


def _has_folder(pid: str) -> bool:
    """Whether a process has taken a ``FolderLock``."""
    with suppress(OSError):  # it has ended, or is another user's
        held = (Path(os.readlink(one)) for one in Path(f"/proc/{pid}/fd").iterdir())
        return any(one.name == "lock" and holder_of(one.parent) == pid for one in held)
    return False


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in text_of(Path(table)).splitlines()]


def _processes() -> Iterator[tuple[int, Process]]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        # It may have ended.
        with suppress(OSError, LookupError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            before, _, after = file.read(1024).decode(errors="replace").rpartition(")")
            words = after.split(maxsplit=15)
            name = "" if words[0] == "Z" else before.partition("(")[2]  # of a zombie only the ticks count
            yield int(pid), Process(int(words[1]), name, sum(map(int, words[11:15])))


def _busy_ticks() -> int:
    """Without what is idle, waits for disks, or was taken by other machines; 0 if not told."""
    return next((sum(map(int, [*row[1:4], *row[6:8]])) for row in _rows("/proc/stat")), 0)


class _Load:
    """Above one core twice in a row: where a process ends it may seem so once."""

    def __init__(self) -> None:
        if not _busy_ticks():
            raise EnvironmentFault("this kernel does not tell how busy its processors are; leave load out")
        self._before: Moment | None = None
        self._was_above = False

    def __call__(self, now: Moment) -> bool:
        before = self._before or now
        both = before.ours | now.ours
        others = now.busy_ticks - before.busy_ticks - now.ticks(both) + before.ticks(both)
        was_above = self._was_above
        self._was_above = others > (now.at - before.at) * os.sysconf("SC_CLK_TCK") > 0
        self._before = now
        return was_above and self._was_above


class Nvml:
    """Asks NVIDIA's driver who is on its cards. Raises ``EnvironmentFault`` where there is none. A program
    that computes counts as soon as it opens the card; one that draws, as each desktop does, while it has a
    tenth of it."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
            kinds = ("Compute", "Graphics")
            self._lists = [getattr(self._library, f"nvmlDeviceGet{one}RunningProcesses_v3") for one in kinds]
            count = ctypes.c_uint()
            if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                raise OSError("its driver does not answer")
        except (OSError, AttributeError) as error:
            words = f"NVIDIA's libnvidia-ml.so.1 cannot be asked ({error})"
            raise EnvironmentFault(f"{words}; leave gpu out, or mend the driver: nvidia-smi") from None
        self._cards = [ctypes.c_void_p() for _ in range(count.value)]
        for number, card in enumerate(self._cards):
            self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(card))

    def users(self) -> set[int]:
        """Ids of the processes, as the driver tells them."""
        found = set[int]()
        load = self._library.nvmlDeviceGetProcessUtilization
        since_us = ctypes.c_ulonglong(int((time.time() - 2.0) * 1e6))
        for card in self._cards:
            computes, draws = ({pid for pid, *_ in _told(ask, card, "I4xQ2I")} for ask in self._lists)
            samples = _told(lambda card, count, told: load(card, told, count, since_us), card, "I4xQ4I")
            found |= computes - draws
            found |= {pid for pid, _, *percent in samples if max(percent) >= 10}
        return found


def _told(ask: Any, card: ctypes.c_void_p, form: str) -> Iterator[tuple[int, ...]]:
    """The processes of a card as NVML's structures, as far as the driver tells them."""
    count = ctypes.c_uint(1024)
    size = struct.calcsize(form)
    told = ctypes.create_string_buffer(count.value * size)
    if not ask(card, ctypes.byref(count), told):
        yield from struct.iter_unpack(form, told.raw[: count.value * size])


def gpu_by(users: Callable[[], Set[int]]) -> Sensor:
    """Whether a process of this machine that is not ours is among ``users``. In a container the driver may
    tell ids that mean nothing there."""
    return lambda now: bool((users() & now.processes.keys()) - now.ours)


def _input() -> Sensor:
    if not _idle_hint():
        raise EnvironmentFault("logind does not tell whether its owner is here (loginctl); leave input out")
    asks = itertools.cycle((True, False))  # it takes a process of its own
    return lambda now: next(asks) and _idle_hint() == b"IdleHint=no"


def _idle_hint() -> bytes:
    """Of all sessions of this machine; b"" if nobody tells."""
    asked = ["loginctl", "show-session", "--property=IdleHint"]
    with suppress(OSError, subprocess.SubprocessError):
        null = subprocess.DEVNULL
        return subprocess.run(asked, stdin=null, capture_output=True, timeout=1.0, check=True).stdout.strip()
    return b""


def battery(root: Path = Path("/sys/class/power_supply")) -> Sensor:
    """Whether a battery of the machine gives the power; a mouse's does not count."""
    told = [
        one for one in root.glob("*") if text_of(one / "type") == "Battery" and not (one / "scope").exists()
    ]
    if not told:
        raise EnvironmentFault(f"this kernel tells of no battery ({root}); leave battery out")
    return lambda now: any(text_of(one / "status") == "Discharging" for one in told)


def heat(root: Path = Path("/sys/class/hwmon")) -> Sensor:
    """Whether a part is within ten degrees of what the kernel calls critical for it."""
    limits = {
        one.with_name(one.name.replace("crit", "input")): int(text) - 10_000  # thousandths of a degree
        for one in root.glob("*/temp*_crit") if (text := text_of(one)).isdecimal()
    }  # fmt: skip
    if not limits:
        raise EnvironmentFault(f"this kernel tells no critical temperature ({root}); leave heat out")
    return lambda now: any(
        (text := text_of(one)).isdecimal() and int(text) >= limit for one, limit in limits.items()
    )


MAKERS: Mapping[str, Callable[[], Sensor]] = {
    "gpu": lambda: gpu_by(Nvml().users), "input": _input, "load": _Load, "battery": battery, "heat": heat,
}  # fmt: skip
"""Of the sensors, by the words of ``SENSES``."""
