"""transport.send_buffer: looks at connections by descriptors that may be other files' by now."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

from p2p_co2.net.transport.send_buffer import SendBuffer, keep_little_unsent

TAKES_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def is_locked(path: Path) -> bool:
    """Whether another process finds it so."""
    command = [sys.executable, "-c", TAKES_LOCK, str(path)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 1


def test_a_file_that_has_a_connections_number_by_now_stays_locked(tmp_path: Path) -> None:
    """To close any descriptor of a file gives up this process's locks on it (fcntl(2)); SQLite uses them."""
    path = tmp_path / "database"
    path.touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        buffer = SendBuffer(*listener.getsockname())
        number = connection.fileno()
        buffer.files = [(str(number), os.fstat(number).st_ino)]  # of a far machine it finds them itself
        assert buffer.look().at_most_bytes_per_s > 0
        opened = path.open("r+")
        os.dup2(opened.fileno(), number)
        fcntl.lockf(opened, fcntl.LOCK_EX)
        assert is_locked(path)
        assert buffer.look().at_most_bytes_per_s == buffer.there_in_s(1) == 0
        assert keep_little_unsent(*listener.getsockname()) == 0
        assert is_locked(path)
        connection.close()
        opened.close()
    assert not is_locked(path)


def test_another_connection_of_the_same_number_is_none_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        buffer = SendBuffer(*listener.getsockname())
        number = connection.fileno()
        buffer.files = [(str(number), os.fstat(number).st_ino)]
        with socket.create_connection(listener.getsockname()) as other:
            os.dup2(other.fileno(), number)
            assert buffer.look().at_most_bytes_per_s == buffer.there_in_s(1) == 0
        connection.close()
