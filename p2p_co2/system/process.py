"""This process among others: is the machine one we run on, who may stop us, and what do we leave behind.

The first SIGINT or SIGTERM asks, the second ends at once. Even then no process below this one survives: the
libp2p daemon would keep its port. A child that is forked from it, as a DataLoader's workers are, holds
nothing of ours open. So a folder and ports are free when their process ends. Sources: signal(7),
prctl(2) PR_SET_PDEATHSIG, proc(5), fork(2), dup(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import runpy
import select
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.ctrl_c import is_importing
from p2p_co2.system.machine import IS_LINUX

with suppress(ImportError):  # of Windows, which has no such locks
    import fcntl

VARIABLES = "P2P_CO2_"
"""Begins the names of the environment variables that options are read from."""
GIVE_BACK = b"\x1b[?1047l\x1b[?25h\r\n"
"""Leaves a terminal's second screen and shows its cursor: a live view may have hidden both."""
LOST = {errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EBADF}
"""What a write raises whose reader is gone, or that finds the disk full: no reason to end training."""
_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = (
    "import sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path.insert(0, root); "
    "from p2p_co2.system.process import run_program; sys.path.remove(root); run_program(module)"
)


def end_with_parent(parent: int) -> None:
    """Have this process asked to leave (SIGTERM) when process ``parent`` ends, even if that was killed; 0
    does nothing."""
    if parent == 0:
        return
    if IS_LINUX:
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGTERM)


def processes_below(pid: int) -> list[int]:
    """Ids of the children of ``pid`` and theirs, as far as the kernel tells."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue  # that thread has just ended
        for child in children:
            found += [child, *processes_below(child)]
    return found


def program(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our programs with this interpreter, wherever it is started. A user's
    own ``peers.py`` in the current folder is neither run nor imported instead."""
    return [sys.executable, "-P", "-c", _PROGRAM, str(_ROOT), module, *arguments]


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without the variables that options are read from: a demo's are not its peers'."""
    return {name: value for name, value in environment.items() if not name.startswith(VARIABLES)}


def run_program(module: str) -> None:
    """What ``program`` starts."""
    own_packages_first()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


OUR_PACKAGES = ("p2p_co2", "peers", "bootstrap", "monitoring")


def own_packages_first() -> None:
    """Have our packages found before others of their names, which ``PYTHONPATH`` may hold."""
    if _OwnPackages not in sys.meta_path:
        sys.meta_path.insert(0, _OwnPackages)


class _OwnPackages:
    """A finder for ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in OUR_PACKAGES else None


class HasDescriptor(Protocol):
    """A socket or file; -1 once it is closed."""

    def fileno(self) -> int: ...


_ends: weakref.WeakSet[HasDescriptor] = weakref.WeakSet()
_places: set[str | int] = set()


def shut_in_forks(end: HasDescriptor) -> None:
    """Have it closed in every child that is forked from this process."""
    _ends.add(end)


def shut_in_forks_at(place: str | int) -> None:
    """Likewise all sockets of a library at ``place``: a unix socket's path, a TCP port of ours."""
    _places.add(place)


def left_to_others(place: str | int) -> None:
    """``place`` is not ours any more."""
    _places.discard(place)


def _shut() -> None:
    """In a child: what is ours leads nowhere from now on. The numbers stay taken: whoever holds one and
    closes it later must not hit a file of the child's."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # it would make the parent's sockets, too, non-blocking that we look at
    ours = [end.fileno() for end in list(_ends)]
    for name in os.listdir("/proc/self/fd" if IS_LINUX else "/dev/fd") if _places else ():
        with suppress(OSError):  # the folder's own is gone
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and _places_of(int(name)) & _places:
                ours.append(int(name))
    socket.setdefaulttimeout(timeout_s)
    with suppress(OSError):  # of no memory or descriptors: nothing that a child could do
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in ours:
            if descriptor >= 0:
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _ends.clear()
    _places.clear()


def _places_of(descriptor: int) -> set[str | int]:
    """Where a socket is, and, of a unix socket, where it leads to."""
    places = set[str | int]()
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        is_unix = end.family == socket.AF_UNIX
        name = end.getsockname()
        places.add(name if is_unix else name[1])
        if is_unix:
            places.add(end.getpeername())
    return places


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_shut)


class StopSignals:
    """While entered, SIGINT and SIGTERM call ``ask`` once; the next one ends the process with status 130. In
    a child that was forked meanwhile they end it.

    ``ask`` runs in the main thread between two bytecodes: it may set a flag, or return True for a
    ``KeyboardInterrupt``, which is the rule. An import may swallow one: it comes once that is over."""

    def __init__(self, ask: Callable[[], object] = lambda: True, *numbers: signal.Signals) -> None:
        self.ask = ask
        self._numbers = numbers or (signal.SIGINT, signal.SIGTERM)
        self._process = os.getpid()
        self.asked = False
        self._is_put_off = self._is_due = False
        """An interrupt waits for the end of an import; and the signal that comes now stands for it."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        if self._is_put_off:
            self._is_put_off = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # such as a DataLoader's worker
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.asked or self._is_due:
            is_first = not self.asked
            self.asked = True
            self._is_due = False
            if is_first and self.ask() is not True:
                return
            self._is_put_off = is_importing(frame)
            if self._is_put_off:
                threading.Thread(target=self._send_again, args=(number,), daemon=True).start()
                return
            raise KeyboardInterrupt
        for pid in processes_below(os.getpid()):
            with suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        if os.isatty(1) and select.select([], [1], [], 0)[1]:  # not one that is stopped
            os.write(1, GIVE_BACK)
        os._exit(128 + signal.SIGINT)

    def _send_again(self, number: int) -> None:
        main = threading.main_thread().ident or 0
        while self._is_put_off and is_importing(sys._current_frames().get(main)):
            time.sleep(0.02)
        if self._is_put_off:
            self._is_due = True
            os.kill(self._process, number)


def say(text: str) -> None:
    """A line on stderr; dropped if nobody can read it any more: a terminal that was closed, a full disk."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """While entered, a write that finds the disk full says so with ``folder``. The kernel names the file only
    to what opens it, not to what writes."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT} and error.filename is None:
            error.filename = str(folder)
        raise


def is_kept(folder: Path) -> bool | None:
    """Whether a process of this machine has ``folder`` (``FolderLock``); None where nobody ever had, or we
    may not look. Of a copy it says no, whatever becomes of the folder that was copied."""
    try:
        file = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(file)


def holder_of(folder: Path) -> str:
    """The id of the process that has ``folder``, as it wrote it into the lock; "unknown" if it did not."""
    try:
        word = (folder / "lock").read_text(errors="replace")[:32].partition("\n")[0].strip()
    except OSError:
        word = ""
    return word or "unknown"


class FolderLock:
    """Keeps a folder for this process: two peers with one identity would split a swarm and mix checkpoints.

    The lock is the kernel's (flock(2)): it ends with the process however that ends, and forked children do
    not keep it. A lock that ``claim`` took is handed over. Raises ``EnvironmentFault`` if another process
    holds it, or the folder cannot be made.
    """

    _file: int | None

    def __init__(self, folder: Path) -> None:
        if claimed := _claims.pop(folder.absolute(), None):
            self._file = claimed._file
            claimed._file = None
            shut_in_forks(self)
            return
        path = folder / "lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot use the folder {folder}: {error.strerror}; choose another one with --folder"
            ) from None
        shut_in_forks(self)
        try:
            try:
                is_taken = self._taken()
            except OSError as error:
                problem = f"the file system of {folder} has no locks ({error.strerror})"
                raise EnvironmentFault(f"{problem}; choose a folder on another one with --folder") from None
            if not is_taken:
                raise EnvironmentFault(
                    f"{folder} is in use by process {holder_of(folder)}; give this one another --folder"
                )
            os.ftruncate(self._file, 0)
            with full_disk_named(path):
                os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def _taken(self) -> bool:
        """Take it; twice, since ``is_kept`` may be looking."""
        for wait_s in (0.05, 0.0):
            with suppress(BlockingIOError):
                fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(wait_s)
        return False

    def fileno(self) -> int:
        return -1 if self._file is None else self._file

    def release(self) -> None:
        """Let others have the folder; may be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_claims: dict[Path, FolderLock] = {}


def claim(folder: Path) -> None:
    """Take the lock of ``folder`` ahead, for the next ``FolderLock`` of it that this process makes: no other
    process gets it in between. Taken already, it stays. Raises as ``FolderLock``."""
    place = folder.absolute()
    if place not in _claims:
        _claims[place] = FolderLock(folder)
