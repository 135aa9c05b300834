"""Socket activation (systemd.socket(5), inetd): a listening socket, and a program that is started at the
first connection and given the socket.

So every peer serves its board on its own loopback port and still trains undisturbed: until a browser connects
one thread sleeps in select(2). Then the program runs as a process of its own with low priority and takes the
waiting connection from the inherited socket. It goes when nobody has looked for a while.

It may ask this process over a socket pair: frames of 4 bytes of length and a ``Relayed`` message, bounded in
size and number. A program that does not read is ended; ``close`` leaves no thread, process or socket."""

from __future__ import annotations

import queue
import selectors
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from google.protobuf.message import DecodeError

from p2p_co2.errors import EnvironmentFault, P2PCo2Error
from p2p_co2.system.process import shut_in_forks
from p2p_co2.wire.messages_pb2 import Relayed

MAX_FRAME_BYTES = 1 << 20
MAX_ASKED = 64
PATIENCE_S = 2.0
"""For a program that does not read, or does not end when asked to, and before one that has ended is started
again. Its history survives both."""

Ask = Callable[[Relayed], "Future[Relayed]"]


class SocketActivation:
    """Listens on ``host``:``port`` (0: any free one) at once. ``command`` is run with the file descriptors of
    the listening socket and of its end of the pair as its last arguments. ``ask`` answers the program in a
    thread of this object and must not block. Raises ``EnvironmentFault`` if the port is taken."""

    def __init__(self, host: str, port: int, command: Sequence[str], ask: Ask | None = None) -> None:
        self._command = list(command)
        self._ask = ask
        self._listener = _listening(host, port)
        shut_in_forks(self._listener)
        port = self._listener.getsockname()[1]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        """What to open in a browser."""
        self.runs = 0
        """How often the program has been started and has ended."""
        self._waker, self._woken = socket.socketpair()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2p-co2 socket activation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the program and the thread. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.send(b"\0")
        self._thread.join()
        for end in (self._listener, self._waker, self._woken):
            end.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._wait_for(self._listener):
                self._serve_once()
                self.runs += 1
                self._closing.wait(PATIENCE_S)

    def _wait_for(self, end: socket.socket) -> bool:
        """Sleep until ``end`` can be read (True) or somebody wakes us."""
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select()}
        if self._woken in ready:
            self._woken.recv(4096)
        return end in ready

    def _serve_once(self) -> None:
        """Run the program until it ends; answer what it asks meanwhile."""
        ours, theirs = socket.socketpair()
        shut_in_forks(ours)
        theirs.setblocking(True)  # whatever the default timeout of sockets here: the program reads it
        with ours, theirs:
            handed = (self._listener.fileno(), theirs.fileno())
            try:
                program = subprocess.Popen(
                    [*self._command, *map(str, handed)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=handed,
                    start_new_session=True,  # a Ctrl-C in our terminal is ours to act on
                )
            except OSError:
                return  # too many processes, say: the next connection tries again
            theirs.close()
            ours.settimeout(PATIENCE_S)
            try:
                with suppress(OSError):  # it died, or does not read
                    self._answer_until_gone(ours)
            finally:
                _end(program)

    def _answer_until_gone(self, ours: socket.socket) -> None:
        asked = 0
        answers = queue.SimpleQueue[Relayed]()
        while not self._closing.is_set():
            readable = self._wait_for(ours)
            while not answers.empty():
                asked -= 1
                send_relayed(ours, answers.get())
            if readable:
                message = receive_relayed(ours)
                if message is None or self._ask is None or asked >= MAX_ASKED:
                    return
                asked += 1
                self._ask(message).add_done_callback(partial(self._answered, answers, message.id))

    def _answered(self, answers: queue.SimpleQueue[Relayed], number: int, done: Future[Relayed]) -> None:
        """Any thread: put the answer where our thread finds it, if the program that asked still runs."""
        if done.cancelled():
            answer = Relayed(trouble="this process is leaving")
        elif (error := done.exception()) is not None:
            answer = Relayed(trouble=(str(error) if isinstance(error, P2PCo2Error) else repr(error))[:400])
        else:
            answer = done.result()
        answer.id = number
        answers.put(answer)
        with suppress(OSError):  # closed meanwhile
            self._waker.send(b"\0")


def take_over(listener_fd: int, relay_fd: int) -> tuple[socket.socket, socket.socket]:
    """The program's side: its listening socket and its end of the pair."""
    return socket.socket(fileno=listener_fd), socket.socket(fileno=relay_fd)


def send_relayed(end: socket.socket, message: Relayed) -> None:
    """Send one message over the pair. Raises ``OSError``."""
    data = message.SerializeToString()
    end.sendall(len(data).to_bytes(4) + data)


def receive_relayed(end: socket.socket) -> Relayed | None:
    """The next message over the pair; None for one that breaks the rules. Raises ``OSError`` at the end."""
    length = int.from_bytes(_exactly(end, 4))
    if length > MAX_FRAME_BYTES:
        return None
    try:
        return Relayed.FromString(_exactly(end, length))
    except DecodeError:
        return None


def _exactly(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := end.recv(count - len(data))):
            raise ConnectionResetError("the other end is gone")
        data += piece
    return data


def _end(program: subprocess.Popen[bytes]) -> None:
    program.terminate()  # nothing where it has ended
    try:
        program.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _listening(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(64)
        listener.setblocking(True)  # whatever the default timeout of sockets here: the program inherits it
    except OSError as error:
        listener.close()
        raise EnvironmentFault(
            f"cannot serve the board on {host}:{port}: {error.strerror}; choose another port"
        ) from None
    return listener
