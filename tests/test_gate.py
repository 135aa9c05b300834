"""gate: nothing runs until somebody knocks, and nothing is left when it closes."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path

import pytest

from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.protocol.wire.messages_pb2 import Relayed
from p2p_co2.system.process import processes_below
from p2p_co2.system.socket_activation import Gate

PROGRAM = """
import sys, socket
from p2p_co2.system.socket_activation import take_over, send_relayed, receive_relayed
from p2p_co2.protocol.wire.messages_pb2 import Relayed
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


def test_nothing_runs_until_somebody_knocks(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(message: Relayed) -> Future[Relayed]:
        asked.append(message.peer)
        return answers(b"hello")

    before = set(processes_below(os.getpid()))
    gate = Gate("127.0.0.1", 0, command(tmp_path), ask)
    try:
        assert set(processes_below(os.getpid())) == before
        assert get(gate.address) == "hello"
        assert get(gate.address) == "hello"
        assert len(set(processes_below(os.getpid())) - before) == 1
    finally:
        gate.close()
    assert asked == ["who", "who"]
    assert set(processes_below(os.getpid())) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "p2p-co2 gate"]
    with pytest.raises(urllib.error.URLError):
        get(gate.address)


def test_what_cannot_be_answered_is_told_in_words(tmp_path: Path) -> None:
    def ask(message: Relayed) -> Future[Relayed]:
        failed: Future[Relayed] = Future()
        failed.set_exception(TransportError("nobody there"))
        return failed

    gate = Gate("127.0.0.1", 0, command(tmp_path), ask)
    try:
        assert get(gate.address) == "nobody there"
    finally:
        gate.close()


HASTY = """
import pathlib, sys
marker = pathlib.Path(sys.argv[1])
if not marker.exists():
    marker.touch()
    from p2p_co2.system.socket_activation import send_relayed, take_over
    from p2p_co2.protocol.wire.messages_pb2 import Relayed
    listener, relay = take_over(int(sys.argv[-2]), int(sys.argv[-1]))
    client, _ = listener.accept()
    send_relayed(relay, Relayed(id=3, peer="gone"))
    sys.exit()
"""


def test_an_answer_to_a_program_that_is_gone_is_not_given_to_the_next(tmp_path: Path) -> None:
    late: Future[Relayed] = Future()
    path = tmp_path / "hasty.py"
    path.write_text(HASTY + PROGRAM)
    gate = Gate(
        "127.0.0.1",
        0,
        [sys.executable, str(path), str(tmp_path / "marker")],
        lambda message: late if message.peer == "gone" else answers(b"mine"),
    )
    try:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(gate.address)
        ends_at = time.monotonic() + 120
        while gate._program is not None and time.monotonic() < ends_at:
            time.sleep(0.01)  # until the gate knows that the program is gone
        late.set_result(Relayed(answer=b"another's"))
        assert get(gate.address) == "mine"
    finally:
        gate.close()


def test_a_program_that_breaks_the_rules_is_ended_and_the_port_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "rude.py"
    path.write_text(
        "import sys, socket, time\n"
        "relay = socket.socket(fileno=int(sys.argv[-1]))\n"
        "relay.sendall(b'\\xff' * 8)\n"
        "time.sleep(60)\n"
    )
    gate = Gate("127.0.0.1", 0, [sys.executable, str(path)])
    try:
        host, _, port = gate.address.removeprefix("http://").rstrip("/").partition(":")
        with socket.create_connection((host, int(port))):
            ends_at = time.monotonic() + 120
            started = False
            while time.monotonic() < ends_at:
                running = gate._program is not None
                started |= running
                if started and not running:
                    break
                time.sleep(0.01)
            assert started
            assert not running
    finally:
        gate.close()


def test_a_port_in_use_is_told_with_its_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentFault, match="choose another port"):
            Gate("127.0.0.1", taken.getsockname()[1], ["true"])
