"""Bytes of a state that a donor sent: a lie is refused, and nothing else comes of it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.tensors import checkpoint as rooms
from tests.test_checkpoint import stepped


def change(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    "lie",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: change(data, 7, b"\x02"),
        lambda data: change(data, 8, struct.pack("<Q", 1 << 60)),
        lambda data: change(data, 16, struct.pack("<Q", 1 << 60)),
        lambda data: change(data, 24, struct.pack("<d", math.nan)),
        lambda data: change(data, 24, struct.pack("<d", -1.0)),
        lambda data: change(data, 24, struct.pack("<d", -0.0)),
        lambda data: change(data, 32, struct.pack("<Q", 5)),
        lambda data: change(data, 32, struct.pack("<Q", 1)),
        lambda data: change(data, 40, struct.pack("<d", math.inf)),
        lambda data: change(data, 72, struct.pack("<f", math.nan)),
        lambda data: change(data, len(data) - 4, struct.pack("<f", -math.inf)),
    ],
)
def test_a_lying_donor_is_refused(lie: Callable[[bytes], bytes]) -> None:
    data = rooms.state_bytes(stepped(3, 4))
    with pytest.raises(RemoteProtocolError, match="bad_state"):
        rooms.state_from_bytes(lie(data), 3)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        rooms.state_from_bytes(data, 4)
