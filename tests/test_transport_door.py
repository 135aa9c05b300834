"""The door, without a network: whom it admits, what it remembers, what it survives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.transport.door import MAX_INBOUND_LINKS, MAX_NONCES_PER_PEER, Door
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.limits import HELLO_WINDOW_S
from tests.transport_peers import RUN


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_the_door_admits_once_and_forgets_in_time() -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    door, other = Door(us, RUN, clock), Door(them, RUN, clock)
    hello = other.hello(us.peer_id, b"c")
    assert door.admit(hello, b"c") == them.peer_id
    clock.now += HELLO_WINDOW_S
    with pytest.raises(RemoteProtocolError, match="replayed"):
        door.admit(hello, b"c")
    clock.now += 1
    with pytest.raises(RemoteProtocolError, match="stale"):
        door.admit(hello, b"c")
    clock.now += 2 * HELLO_WINDOW_S
    door.admit(other.hello(us.peer_id, b"c"), b"c")
    assert len(door._nonces) == 1


def test_the_door_bounds_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    door, other = Door(us, RUN, clock), Door(them, RUN, clock)
    for _ in range(MAX_NONCES_PER_PEER):
        door.leave(door.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        door.admit(other.hello(us.peer_id, b""), b"")
    assert not door._inside
    for _ in range(MAX_INBOUND_LINKS):
        door.knock()
    with pytest.raises(RemoteProtocolError, match="too many links"):
        door.knock()


@given(st.binary(max_size=200))
def test_the_door_survives_any_bytes(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Door(Identity.generate(), RUN, Clock()).admit(data, b"")
