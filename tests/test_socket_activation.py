"""Socket activation: nothing runs until somebody connects, and nothing is left when it closes."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.system.process import processes_below
from p2p_co2.system.socket_activation import Ask, SocketActivation
from p2p_co2.wire.messages_pb2 import Relayed

PROGRAM = """
import sys, socket
from p2p_co2.system.socket_activation import take_over, send_relayed, receive_relayed
from p2p_co2.wire.messages_pb2 import Relayed
listener, relay = take_over(int(sys.argv[-2]), int(sys.argv[-1]))
while True:
    client, _ = listener.accept()
    client.recv(4096)
    send_relayed(relay, Relayed(id=3, peer="who"))
    answer = receive_relayed(relay)
    text = (answer.trouble or answer.answer.decode()).encode()
    client.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(text) + text)
    client.close()
    if sys.argv[1] == "once":
        break
"""


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=120) as answer:
        return answer.read().decode()


def answers(text: bytes) -> Future[Relayed]:
    done: Future[Relayed] = Future()
    done.set_result(Relayed(answer=text))
    return done


def command(tmp_path: Path, how: str = "stay") -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path), how]


@contextmanager
def serving(command: list[str], ask: Ask | None = None) -> Iterator[SocketActivation]:
    activation = SocketActivation("127.0.0.1", 0, command, ask)
    try:
        yield activation
    finally:
        activation.close()


def test_nothing_runs_until_somebody_connects_and_nothing_is_left(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(message: Relayed) -> Future[Relayed]:
        asked.append(message.peer)
        return answers(b"hello")

    before = set(processes_below(os.getpid()))
    with serving(command(tmp_path), ask) as board:
        assert set(processes_below(os.getpid())) == before
        assert get(board.address) == "hello"
        assert get(board.address) == "hello"
        assert len(set(processes_below(os.getpid())) - before) == 1
    assert asked == ["who", "who"]
    assert set(processes_below(os.getpid())) == before
    assert not [thread for thread in threading.enumerate() if "activation" in thread.name]
    with pytest.raises(urllib.error.URLError):
        get(board.address)


@pytest.mark.parametrize(
    ("error", "words"),
    [(TransportError("nobody there"), "nobody there"), (KeyError("a fault"), "KeyError('a fault')")],
)
def test_what_cannot_be_answered_is_told_in_words(tmp_path: Path, error: Exception, words: str) -> None:
    failed: Future[Relayed] = Future()
    failed.set_exception(error)
    with serving(command(tmp_path), lambda message: failed) as board:
        assert get(board.address) == words


HASTY = """
import pathlib, sys
marker = pathlib.Path(sys.argv[1])
if not marker.exists():
    marker.touch()
    from p2p_co2.system.socket_activation import send_relayed, take_over
    from p2p_co2.wire.messages_pb2 import Relayed
    listener, relay = take_over(int(sys.argv[-2]), int(sys.argv[-1]))
    client, _ = listener.accept()
    send_relayed(relay, Relayed(id=3, peer="gone"))
    sys.exit()
"""


def wait_until_it_ran(board: SocketActivation) -> None:
    ends_at = time.monotonic() + 120
    while not board.runs:
        assert time.monotonic() < ends_at
        time.sleep(0.01)


@pytest.mark.swarm
def test_an_answer_to_a_program_that_is_gone_is_not_given_to_the_next(tmp_path: Path) -> None:
    late: Future[Relayed] = Future()
    path = tmp_path / "hasty.py"
    path.write_text(HASTY + PROGRAM)
    hasty = [sys.executable, str(path), str(tmp_path / "marker")]
    with serving(hasty, lambda message: late if message.peer == "gone" else answers(b"mine")) as board:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(board.address)
        wait_until_it_ran(board)
        late.set_result(Relayed(answer=b"another's"))
        assert get(board.address) == "mine"


def test_a_program_that_breaks_the_rules_is_ended(tmp_path: Path) -> None:
    rude = (
        "import sys, socket, time; relay = socket.socket(fileno=int(sys.argv[-1])); "
        "relay.sendall(b'\\xff' * 8); time.sleep(600)"
    )
    with serving([sys.executable, "-c", rude]) as board:
        host, _, port = board.address.removeprefix("http://").rstrip("/").partition(":")
        with socket.create_connection((host, int(port))):
            wait_until_it_ran(board)


def test_a_port_in_use_is_told_with_its_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentFault, match="choose another port"):
            SocketActivation("127.0.0.1", taken.getsockname()[1], ["true"])
