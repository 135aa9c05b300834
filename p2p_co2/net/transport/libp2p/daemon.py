"""The libp2p daemon of this process: started, started again when it dies, stopped without a trace.

hivemind's own start hides why the daemon died. So we start its binary, read what it prints, and hand hivemind
(1.1.12) the running daemon. One that ends is started again under the ``P2P`` that used it: same identity,
port and handlers. Its links and places are lost.

Laws: one daemon per process, with our identity. It ends when its control connection does, even after a
SIGKILL (within 2 s). Its control socket lies in a folder of mode 700. Price: a Go program in the hivemind
wheel, about 30 MB of memory.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.resources
import ipaddress
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from p2p_co2.errors import ConfigError, EnvironmentFault, TransportError
from p2p_co2.net.transport.addresses import address_of, is_loopback, is_own, multiaddr_of
from p2p_co2.net.transport.base import CLOSE_TIMEOUT_S, MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import DAEMON_GONE
from p2p_co2.net.transport.libp2p.hivemind import P2P, Multiaddr, P2PDaemonError, quiet_stream_ends
from p2p_co2.system.process import shut_in_forks_at

logger = logging.getLogger(__name__)

TRIES = 8
"""Starts in a row; the wait before each is twice that before the last, from half a second on."""
_PUBLIC = "-forceReachabilityPublic"
_LISTEN = "-hostAddrs="
_PREFIX = "p2p-co2-"
_FAULTS = {
    "address already in use": "the port is in use; choose another one (libp2p_port, 0 for any free one)",
    "cannot assign requested": "the address is not this machine's; choose another one to listen on (host)",
    "bind: permission denied": "this port needs more rights; choose one above 1023 (libp2p_port)",
    "cannot parse invalid wire-format": "the identity file is damaged; remove it for a new identity",
    "too many open files": "too many files are open; raise the limit: ulimit -n 65536",
    "no space left": "the disk is full; free some space",
}
"""What the daemon prints before it ends, and what helps."""
_EXEC_FAULTS = {
    errno.ENOENT: "is missing; reinstall it: pip install --force-reinstall hivemind",
    errno.ENOEXEC: "does not run here: it is built for another processor; install hivemind again here",
    errno.EACCES: "may not be executed; allow it: chmod +x",
}


class DaemonP2P(P2P):  # type: ignore[misc]  # hivemind has no annotations
    """hivemind's ``P2P`` with the daemon that belongs to it, and what it was started with."""

    daemon: Daemon | None = None
    arguments: tuple[str, ...] = ()

    def point_to(self, daemon: Daemon) -> None:
        """Have all further requests go to this daemon."""
        self._daemon_listen_maddr = Multiaddr(f"/unix{daemon.socket}")
        control = self._client.control
        control.daemon_connector = type(control.daemon_connector)(self._daemon_listen_maddr)


class Daemon:
    """The daemon's process, its folder, and the last lines that it printed; made in the loop that uses it.

    Threads read what it prints and wait for its end. A signal handler could not: SIGCHLD is the whole
    process's, and a DataLoader or the user may take it.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.socket = folder / "p2pd.sock"
        self.output: deque[str] = deque(maxlen=30)
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._reading, self._waiting = (
            threading.Thread(target=run, name="p2p-co2 libp2p daemon", daemon=True)
            for run in (self._read, self._wait)
        )
        self._reading.start()
        self._waiting.start()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait_ready(self) -> None:
        """Return when it listens; raises ``EnvironmentFault`` when it ended instead."""
        await self._ready.wait()
        if self.has_ended:
            raise self.fault()

    async def wait_exit(self) -> str:
        """Wait until the daemon has ended; returns its last words. Safe to cancel."""
        await self._ended.wait()
        return self.output[-1] if self.output else f"exit status {self.process.returncode}"

    async def stop(self) -> None:
        """End the process and remove its folder; at once if cancelled meanwhile."""
        try:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
                    await self._ended.wait()
            self._signal(signal.SIGKILL)
            await self._ended.wait()
            self._waiting.join()  # it has said its last word
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def fault(self) -> EnvironmentFault:
        """What is behind the words that it printed before it ended."""
        output = " / ".join(self.output)
        for sign, fix in _FAULTS.items():
            if sign in output.lower():
                return EnvironmentFault(f"the libp2p daemon did not start: {fix} ({output[-200:]})")
        return EnvironmentFault(f"the libp2p daemon did not start; it said: {output[-400:] or 'nothing'}")

    def _signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            self.process.send_signal(number)  # does nothing to one that is gone

    def _wait(self) -> None:
        self.process.wait()
        self._reading.join(CLOSE_TIMEOUT_S)  # who else has the pipe, as a forked child may, prints nothing
        self._tell(self._ended, self._ready)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as printed:
            for line in printed:
                self.output.append(line.decode(errors="replace").rstrip())
                logger.debug("libp2p daemon: %s", self.output[-1])
                if line.startswith(b"Peer ID:"):
                    self._tell(self._ready)

    def _tell(self, *events: asyncio.Event) -> None:
        for event in events:
            with suppress(RuntimeError):  # the loop was closed before
                self._loop.call_soon_threadsafe(event.set)


async def start_p2p(
    identity_path: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    announce_host: str = "",
    public: bool = False,
    relay: bool = True,
    upnp: bool = True,
    startup_timeout_s: float = MESSAGE_TIMEOUT_S,
) -> P2P:
    """Start the daemon and hivemind's client to it; end it with ``stop_p2p``.

    identity_path: file written by ``Identity.load_or_create``. host, port: address to listen on, port 0 any
    free one. announce_host: the address or name that others dial, "" for what libp2p finds out; needs a fixed
    ``port``. public: we know that we can be dialled (a seed), so we pass on traffic at once instead of
    finding out first; relay False: never. upnp: ask the router to let others in, unless ``host`` is loopback.
    Raises ``EnvironmentFault`` with cause and fix, ``ConfigError`` for
    impossible addresses.
    """
    arguments = _arguments(identity_path, host, port, announce_host, public, relay, upnp)
    _require_free(host, port)
    asyncio.get_running_loop().set_exception_handler(quiet_stream_ends)
    async with _launched(arguments, startup_timeout_s) as daemon:
        p2p = await DaemonP2P.replicate(Multiaddr(f"/unix{daemon.socket}"))
    p2p.daemon = daemon
    p2p.arguments = tuple(arguments)
    shut_in_forks_at(str(p2p._client_listen_maddr).removeprefix("/unix"))
    return p2p


async def stop_p2p(p2p: P2P) -> None:
    """End the client and its daemon; no process, task, socket or file is left. May be called twice."""
    control = p2p._client.control if p2p._client is not None else None
    tasks = [p2p._listen_task, control and control._read_task, control and control._write_task]
    try:
        await p2p.shutdown()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
    finally:  # also when cancelled
        daemon = p2p.daemon
        p2p.daemon = None
        if daemon is not None:
            await daemon.stop()


def require_daemon(p2p: P2P) -> None:
    """Raise ``TransportError`` if the daemon of ``p2p`` has ended: hivemind takes that for silent peers."""
    if p2p.daemon is not None and p2p.daemon.has_ended:
        raise TransportError(DAEMON_GONE)


async def keep_alive(p2p: P2P, revived: Callable[[str], Awaitable[None]]) -> str:
    """Start the daemon of ``p2p`` again whenever it ends; ``revived`` hears the old one's last words.
    Returns why it is given up, in words. Safe to cancel."""
    failures = 0
    began_at = time.monotonic()
    while p2p.daemon is not None:
        words: str = await p2p.daemon.wait_exit()
        if p2p.daemon is None:
            return words  # it was stopped by us
        if time.monotonic() - began_at > MESSAGE_TIMEOUT_S:  # sooner it is still the same trouble
            failures = 0
        while p2p.daemon.has_ended:
            if failures == TRIES:
                return f"{words}; {TRIES} starts in a row came to nothing"
            if failures:
                await asyncio.sleep(2.0 ** (failures - 2))
            failures += 1
            try:
                await _revive(p2p)
            except EnvironmentFault as error:
                logger.warning("the libp2p daemon did not come back: %s", error)
                words = str(error)
        began_at = time.monotonic()
        await revived(words)
    return "it was stopped"


async def _revive(p2p: DaemonP2P) -> None:
    """A new daemon in the place of one that has ended. Raises ``EnvironmentFault``; then ``p2p`` is as it
    was, and may be revived later. Safe to cancel."""
    control = p2p._client.control
    await _part(p2p)
    unary = dict(control.unary_handlers)
    try:
        async with _launched(_same_port(p2p), MESSAGE_TIMEOUT_S) as daemon:
            p2p.point_to(daemon)
            await control._ensure_persistent_conn()
            for protocol, handler in list(control.handlers.items()):
                await control.stream_handler(protocol, handler)
            control.unary_handlers.clear()
            for protocol, answer in unary.items():
                await control.add_unary_handler(protocol, answer)
            await p2p._ping_daemon()
    finally:
        control.unary_handlers.update(unary)
    p2p.daemon = daemon


async def _part(p2p: DaemonP2P) -> None:
    """End what is left of the old daemon: its folder, and in hivemind's client its connection and those who
    wait for it."""
    control = p2p._client.control
    if p2p.daemon is not None:
        await p2p.daemon.stop()
    tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    control._handler_tasks.clear()
    while not control._pending_messages.empty():
        control._pending_messages.get_nowait()
    for call in control._pending_calls.values():
        if not call.done():
            call.set_exception(ConnectionResetError("the libp2p daemon has ended"))


def _same_port(p2p: DaemonP2P) -> list[str]:
    """The arguments of the daemon of ``p2p``, with the port that it had: others know it."""
    places = [address_of(str(maddr)) for maddr in p2p._visible_maddrs]
    port = next((place[1] for place in places if place is not None and is_own(place[0])), 0)
    return [
        f"{one.removesuffix('0')}{port}" if one.startswith(_LISTEN) and one.endswith("/tcp/0") else one
        for one in p2p.arguments
    ]


@asynccontextmanager
async def _launched(arguments: Sequence[str], timeout_s: float) -> AsyncIterator[Daemon]:
    """A daemon that listens; it ends if what is done with it fails, or is not done in time. Raises
    ``EnvironmentFault``."""
    daemon = _launch(arguments)
    try:
        async with asyncio.timeout(timeout_s):
            await daemon.wait_ready()
            yield daemon
    except BaseException as error:
        await daemon.stop()
        if isinstance(error, TimeoutError):
            raise EnvironmentFault(
                f"the libp2p daemon was not up after {timeout_s:.0f} s: this machine is very busy, or a "
                "security program holds the daemon back; stop other work or allow the program p2pd"
            ) from None
        if isinstance(error, OSError | asyncio.IncompleteReadError | P2PDaemonError):
            raise daemon.fault() from None
        raise


def _launch(arguments: Sequence[str]) -> Daemon:
    binary = Path(str(importlib.resources.files("hivemind.hivemind_cli") / "p2pd"))
    folder = _make_folder()
    control = folder / "p2pd.sock"
    shut_in_forks_at(str(control))  # else the daemon would live as long as a forked child
    environment = {**os.environ, "GOLOG_LOG_LEVEL": os.environ.get("GOLOG_LOG_LEVEL", "error")}
    if _PUBLIC in arguments:
        # A public daemon makes two relays, which race for one protocol. libp2p's own, with 128 KiB per
        # circuit, wins wherever Go has a second thread (8 of 8 starts with two processors, 0 of 8 with one).
        environment["GOMAXPROCS"] = "1"
    try:
        process = subprocess.Popen(
            [str(binary), f"-listen=/unix{control}", *arguments],
            start_new_session=True,  # a Ctrl-C in our terminal is for us: leaving cleanly needs the daemon
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        fix = _EXEC_FAULTS.get(
            error.errno or 0, f"cannot be started ({error.strerror}); close other programs"
        )
        raise EnvironmentFault(f"the libp2p daemon {fix} ({binary})") from None
    return Daemon(process, folder)


def _make_folder() -> Path:
    """A private folder with a path short enough for a unix socket, which takes 107 bytes at most."""
    try:
        parent = tempfile.gettempdir()
        is_short = len(f"{parent}/{_PREFIX}12345678/p2pd.sock".encode()) <= 100
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent if is_short else "/tmp"))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make a folder for the libp2p daemon's socket ({error.strerror}); free some space for "
            "temporary files, or set TMPDIR to a folder that may be written"
        ) from None


def _arguments(
    identity_path: Path, host: str, port: int, announce_host: str, public: bool, relay: bool, upnp: bool
) -> list[str]:
    if not 0 <= port < 65536:
        raise ConfigError("libp2p_port", "", f"{port} is no TCP port; use 0 to 65535 (0: any free one)")
    if announce_host and not port:
        cure = "give --port to a seed, --libp2p-port to a peer"
        fix = f"needs a fixed port, else nobody knows which to dial: {cure}"
        raise ConfigError("announce_host", "", fix)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        fix = f"{host!r} is no IP address to listen on; 0.0.0.0 means all of this machine"
        raise ConfigError("host", "", fix) from None
    arguments = [f"-id={identity_path}", f"{_LISTEN}{multiaddr_of(host, port)}", "-dhtServer", "-autonat"]
    arguments += ["-connManager", "-idleTimeout=30s"]  # it ends itself if we do not connect within this
    if upnp and not is_loopback(host):
        arguments.append("-natPortMap")  # asks the router (UPnP, NAT-PMP) to let others in
    if public:
        arguments.append(_PUBLIC)
    if not relay:
        arguments.append("-relayService=false")  # leaves libp2p's default, of 128 KiB at a time
    if announce_host:
        arguments.append(f"-announceAddrs={multiaddr_of(announce_host, port)}")
    return arguments


def _require_free(host: str, port: int) -> None:
    """Raise ``EnvironmentFault`` if somebody listens on the port, which the daemon would share without a
    word."""
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
