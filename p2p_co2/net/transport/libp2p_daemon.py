"""The libp2p daemon of this process: started with the cause and the fix in every failure, stopped without a
trace.

hivemind's own start hides why the daemon died behind "Daemon failed to start in 15.0 seconds" and ends it
when the seeds cannot be reached. So we start its binary ourselves, read what it prints, and hand hivemind the
running daemon (``P2P.replicate``, its public way to share one). Seeds are not the daemon's business:
``discovery`` connects to them.

Laws. One daemon per process, listening where it was told, with our identity. It never outlives us: it ends
when its control connection does, even after a SIGKILL (measured: within 2 s). Its control socket lies in a
folder of its own, mode 700. Price: the daemon is a Go program in the hivemind wheel, Linux x86-64 only, and
costs about 30 MB of memory.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.resources
import ipaddress
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from p2p_co2.errors import ConfigError, EnvironmentFault, TransportError
from p2p_co2.net.transport.addresses import is_own
from p2p_co2.net.transport.hivemind_quiet import P2P, Multiaddr, P2PDaemonError, quiet_stream_ends
from p2p_co2.net.transport.probe_limits import address_of
from p2p_co2.system.process import shut_in_forks_at

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
DAEMON_GONE = "the libp2p daemon of this process is gone"
_PUBLIC, _LISTEN = "-forceReachabilityPublic", "-hostAddrs="
_IDLE_TIMEOUT_S = 30
"""The daemon ends itself if we do not connect within this after its start."""
_OUTPUT_LINES = 30
_CLIENT_SOCKETS = "hivemind-p2pclient-*.sock"
"""Where hivemind listens for the daemon, in /tmp."""
_PREFIX = "p2p-co2-"
_FOLDERS = f"{_PREFIX}{8 * '?'}"
_SOCKET_PATH_BYTES = 100
"""Unix sockets take a path of 107 bytes at most."""
_LITTER_AFTER_S = 600.0
"""A socket that nobody serves is litter of a killed process once it is this old."""


class DaemonP2P(P2P):  # type: ignore[misc]  # hivemind has no annotations
    """hivemind's ``P2P`` with the daemon that belongs to it, and what it was started with."""

    daemon: Daemon | None = None
    arguments: tuple[str, ...] = ()

    def point_to(self, daemon: Daemon) -> None:
        """Have all further requests go to this daemon."""
        self._daemon_listen_maddr = Multiaddr(f"/unix{_control_socket(daemon.folder)}")
        control = self._client.control
        control.daemon_connector = type(control.daemon_connector)(self._daemon_listen_maddr)


class Daemon:
    """The daemon's process, its folder, and the last lines that it printed. Made in the loop that waits for
    it.

    A thread waits for its end, and no signal handler does: SIGCHLD is the whole process's, and a DataLoader
    or the user may take it. Whoever else collects the child's exit status takes that and no more.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._loop = asyncio.get_running_loop()
        self._ready, self._ended = asyncio.Event(), asyncio.Event()
        self._rest = b""
        assert process.stdout is not None
        self._printed = process.stdout
        os.set_blocking(self._printed.fileno(), False)
        self._loop.add_reader(self._printed.fileno(), self._read)
        self._waiting = threading.Thread(target=self._wait, name="p2p-co2 libp2p daemon", daemon=True)
        self._waiting.start()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait_ready(self) -> None:
        """Return when it listens; raises ``EnvironmentFault`` when it ended instead."""
        await self._ready.wait()
        if self.has_ended:
            raise _explain(" / ".join(self.output))

    async def wait_exit(self) -> str:
        """Wait until the daemon has ended; returns its last words. Safe to cancel."""
        await self._ended.wait()
        return self.output[-1] if self.output else f"exit status {self.process.returncode}"

    def kill(self) -> None:
        """End the process at once; ``wait_exit`` then returns, and ``stop`` is still to be called."""
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """End the process and remove its folder. Cancelled meanwhile, it does both at once: who leaves amid
        a start cancels that a second time."""
        try:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._ended.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._ended.wait()
            self._waiting.join()  # it has said its last word
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            self.process.send_signal(number)  # does nothing to one that is gone

    def _wait(self) -> None:
        self.process.wait()
        with suppress(RuntimeError):  # the loop was closed before
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._read()  # all that it printed: who else has the pipe, as a forked child may, prints nothing
        self._loop.remove_reader(self._printed.fileno())
        self._printed.close()
        self._ended.set()
        self._ready.set()

    def _read(self) -> None:
        try:
            while data := self._printed.read():
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._heard(line.decode(errors="replace").rstrip())
        except OSError as error:
            logger.debug("the libp2p daemon's output cannot be read: %s", error)
            data = b""
        if data is not None:
            self._loop.remove_reader(self._printed.fileno())  # it is at its end: ready for ever

    def _heard(self, line: str) -> None:
        self.output.append(line)
        logger.debug("libp2p daemon: %s", line)
        if line.startswith("Peer ID:"):
            self._ready.set()


async def start_p2p(
    identity_path: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    announce_host: str = "",
    public: bool = False,
    relay: bool = True,
    startup_timeout_s: float = STARTUP_TIMEOUT_S,
) -> P2P:
    """Start the daemon and hivemind's client to it; end it with ``stop_p2p``.

    identity_path: file written by ``Identity.load_or_create``. host, port: address to listen on, port 0 any
    free one. announce_host: the address or name that others dial, "" for what libp2p finds out; needs a fixed
    ``port``. public: we know that we can be dialled (a seed), so we pass on traffic at once instead of
    finding out first; relay False: never. A slow machine gets a second try with four times the time. Raises
    ``EnvironmentFault`` with cause and fix, ``ConfigError`` for impossible addresses.
    """
    sweep()
    arguments = _arguments(identity_path, host, port, announce_host, public, relay)
    _require_free(host, port)
    asyncio.get_running_loop().set_exception_handler(quiet_stream_ends)
    try:
        return await _start(arguments, startup_timeout_s)
    except TimeoutError:
        logger.warning(
            "the libp2p daemon was not up after %.0f s; trying once more, for longer", startup_timeout_s
        )
    try:
        return await _start(arguments, 4 * startup_timeout_s)
    except TimeoutError:
        raise EnvironmentFault(
            f"the libp2p daemon was not up after {4 * startup_timeout_s:.0f} s: this machine is very busy, "
            "or a security program holds the daemon back; stop other work or allow the program p2pd"
        ) from None


async def stop_p2p(p2p: P2P) -> None:
    """End the client and its daemon; no process, task, socket or file is left. May be called twice."""
    control = p2p._client.control if p2p._client is not None else None
    tasks = [p2p._listen_task, control and control._read_task, control and control._write_task]
    try:
        await p2p.shutdown()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
    finally:  # also when cancelled
        if isinstance(p2p, DaemonP2P) and p2p.daemon is not None:
            daemon, p2p.daemon = p2p.daemon, None
            await daemon.stop()


def require_daemon(p2p: P2P) -> None:
    """Raise ``TransportError`` if the daemon of ``p2p`` has ended: hivemind takes that for silent peers."""
    daemon = p2p.daemon if isinstance(p2p, DaemonP2P) else None
    if daemon is not None and daemon.has_ended:
        raise TransportError(DAEMON_GONE)


async def wait_p2p_exit(p2p: P2P) -> str:
    """Wait until the daemon of ``p2p`` has ended by itself; returns its last words. Safe to cancel."""
    if not isinstance(p2p, DaemonP2P) or p2p.daemon is None:
        return "it was stopped"
    return await p2p.daemon.wait_exit()


def sweep(older_than_s: float = _LITTER_AFTER_S) -> None:
    """Remove what killed processes of this user left behind: only sockets that refuse a connection, and the
    empty folder of a daemon that ended after its peer was killed."""
    parents = {Path(tempfile.gettempdir()), Path("/tmp")}
    patterns = ("p2p-co2-*/p2pd.sock", _CLIENT_SOCKETS)
    found = [path for parent in parents for pattern in patterns for path in parent.glob(pattern)]
    for path in found:
        try:
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < older_than_s:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            if path.parent not in parents:
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError as error:
            logger.debug("leaving %s alone: %s", path, error)
    for folder in [folder for parent in parents for folder in parent.glob(_FOLDERS)]:
        try:
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime >= older_than_s:
                folder.rmdir()
        except OSError as error:  # it is not empty, or not a folder
            logger.debug("leaving %s alone: %s", folder, error)


def multiaddr_of(host: str, port: int) -> str:
    """The libp2p address of an IP address or DNS name and a TCP port."""
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


async def _start(arguments: list[str], timeout_s: float) -> P2P:
    daemon = _launch(arguments)
    try:
        async with asyncio.timeout(timeout_s):
            await daemon.wait_ready()
            p2p = await DaemonP2P.replicate(Multiaddr(f"/unix{_control_socket(daemon.folder)}"))
    except TimeoutError:  # an OSError of its own kind: the caller may try again
        await daemon.stop()
        raise
    except (OSError, asyncio.IncompleteReadError, P2PDaemonError):
        await daemon.stop()
        raise _explain(" / ".join(daemon.output)) from None
    except BaseException:
        await daemon.stop()
        raise
    p2p.daemon, p2p.arguments = daemon, tuple(arguments)
    shut_in_forks_at(str(p2p._client_listen_maddr).removeprefix("/unix"))
    return p2p


def launch_for(p2p: DaemonP2P, any_port: bool) -> Daemon:
    """A new daemon as that of ``p2p`` was started, on the port that it had: others know it. ``any_port``: on
    any, if none was asked for. Raises ``EnvironmentFault``."""
    arguments = list(p2p.arguments)
    for index, argument in enumerate(arguments):
        if argument.startswith(_LISTEN) and argument.endswith("/tcp/0") and not any_port:
            places = (address_of(str(maddr)) for maddr in p2p._visible_maddrs)
            port = next((place[1] for place in places if place is not None and is_own(place[0])), 0)
            arguments[index] = f"{argument.removesuffix('0')}{port}"
    return _launch(arguments)


def _launch(arguments: list[str]) -> Daemon:
    binary = Path(str(importlib.resources.files("hivemind.hivemind_cli") / "p2pd"))
    folder = _make_folder()
    shut_in_forks_at(str(_control_socket(folder)))  # else the daemon would live as long as a forked child
    try:
        process = subprocess.Popen(
            [str(binary), f"-listen=/unix{_control_socket(folder)}", *arguments],
            start_new_session=True,  # a Ctrl-C in our terminal is for us: leaving cleanly needs the daemon
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=_environment(arguments),
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _explain_exec(error, binary) from None
    return Daemon(process, folder)


def _make_folder() -> Path:
    """A private folder with a path short enough for a unix socket."""
    causes = []
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent.encode()) > _SOCKET_PATH_BYTES - len("/p2p-co2-12345678/p2pd.sock"):
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            causes.append(f"{parent}: {error.strerror}")
    raise EnvironmentFault(
        f"cannot make a folder for the libp2p daemon's socket ({'; '.join(causes)}); free some "
        "space there, or set TMPDIR to a folder that may be written"
    )


def _control_socket(folder: Path) -> Path:
    return folder / "p2pd.sock"


def _arguments(
    identity_path: Path, host: str, port: int, announce_host: str, public: bool, relay: bool
) -> list[str]:
    if not 0 <= port < 65536:
        raise ConfigError("libp2p_port", "", f"{port} is no TCP port; use 0 to 65535 (0: any free one)")
    if announce_host and not port:
        raise ConfigError(
            "announce_host", "", "needs a fixed libp2p_port, else nobody knows which port to dial"
        )
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            "host", "", f"{host!r} is no IP address to listen on; 0.0.0.0 means all of this machine"
        ) from None
    arguments = [
        f"-id={identity_path}",
        f"{_LISTEN}{multiaddr_of(host, port)}",
        f"-idleTimeout={_IDLE_TIMEOUT_S}s",
        "-dhtServer",
        "-autonat",
        "-connManager",
    ]
    if not ipaddress.ip_address(host).is_loopback:
        arguments.append("-natPortMap")  # asks the router (UPnP, NAT-PMP) to let others in
    if public:
        arguments.append(_PUBLIC)
    if not relay:
        arguments.append("-relayService=false")  # leaves libp2p's default, of 128 KiB at a time
    if announce_host:
        arguments.append(f"-announceAddrs={multiaddr_of(announce_host, port)}")
    return arguments


def _environment(arguments: Sequence[str]) -> dict[str, str]:
    """The daemon's. One that serves as a relay from its start makes two of them, which race for one protocol,
    and libp2p's own with 128 KiB per circuit wins wherever Go has a second thread (8 of 8 starts with two
    processors, 0 of 8 with one)."""
    environment = {**os.environ, "GOLOG_LOG_LEVEL": os.environ.get("GOLOG_LOG_LEVEL", "error")}
    if _PUBLIC in arguments:
        environment["GOMAXPROCS"] = "1"
    return environment


def _require_free(host: str, port: int) -> None:
    """Raise ``EnvironmentFault`` if somebody listens on the port: the daemon would share it without a word,
    and half of those that dial would reach the other."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EnvironmentFault(
                    f"port {port} is in use; choose another (--port of a seed, --libp2p-port of a peer; 0: "
                    "any free one)"
                ) from None


def _explain_exec(error: OSError, binary: Path) -> EnvironmentFault:
    machine = f"{platform.system()} {platform.machine()}"
    if error.errno == errno.ENOENT:
        return EnvironmentFault(
            f"the libp2p daemon is missing ({binary}); reinstall it: pip install --force-reinstall hivemind"
        )
    if error.errno == errno.ENOEXEC:
        return EnvironmentFault(
            f"the libp2p daemon ({binary}) does not run on this machine ({machine}): it is for Linux x86-64; "
            "use such a machine, WSL on Windows, or a container"
        )
    if error.errno == errno.EACCES:
        return EnvironmentFault(f"the libp2p daemon may not be executed; allow it: chmod +x {binary}")
    return EnvironmentFault(
        f"cannot start the libp2p daemon: {error.strerror}; close other programs and try again"
    )


def _explain(output: str) -> EnvironmentFault:
    """The fault behind what the daemon printed before it ended."""
    known = (
        (
            "address already in use",
            "the port is in use; choose another one (libp2p_port, 0 for any free one)",
        ),
        (
            "cannot assign requested address",
            "the address is not this machine's; choose another one to listen on (host)",
        ),
        ("bind: permission denied", "this port needs more rights; choose one above 1023 (libp2p_port)"),
        (
            "cannot parse invalid wire-format",
            "the identity file is damaged; remove it and a new identity is made",
        ),
        ("too many open files", "too many files are open; raise the limit: ulimit -n 65536"),
        ("no space left", "the disk is full; free some space"),
    )
    for sign, fix in known:
        if sign in output.lower():
            return EnvironmentFault(f"the libp2p daemon did not start: {fix} ({output[-200:]})")
    return EnvironmentFault(f"the libp2p daemon did not start; it said: {output[-400:] or 'nothing'}")
