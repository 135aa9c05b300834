"""The door, without a network: whom it admits, what it remembers, what it survives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.transport import door as rules
from p2p_co2.transport.door import (
    KEPT_LINKS,
    MAX_INBOUND_LINKS,
    MAX_LINKS_PER_NETWORK,
    MAX_NONCES_PER_PEER,
    MAX_STRANGERS,
    MAX_STRANGERS_PER_NETWORK,
    Door,
    network_at,
)
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
    for _ in range(MAX_STRANGERS):
        door.knock()
    with pytest.raises(RemoteProtocolError, match="too many links"):
        door.knock()
    for _ in range(MAX_STRANGERS):
        door.forget()
    assert not door._strangers


def crowd(us: Identity, clock: Clock, count: int) -> list[bytes]:
    """Hellos of as many new identities."""
    return [Door(Identity.generate(), RUN, clock).hello(us.peer_id, b"") for _ in range(count)]


def test_one_network_cannot_take_all_places_and_those_who_work_get_in_though_many_have() -> None:
    clock, us, friend = Clock(), Identity.generate(), Identity.generate()
    door = Door(us, RUN, clock)
    for _ in range(MAX_STRANGERS_PER_NETWORK):
        door.knock("192.0.2.1")
    with pytest.raises(RemoteProtocolError, match="too many links"):
        door.knock("192.0.2.1")
    door.knock("198.51.100.1")
    hellos = crowd(us, clock, MAX_INBOUND_LINKS - KEPT_LINKS + 2)
    inside = []
    for hello in hellos[:MAX_LINKS_PER_NETWORK]:
        inside.append((door.admit(hello, b"", "192.0.2.1"), "192.0.2.1"))
    with pytest.raises(RemoteProtocolError, match="too many links"):
        door.admit(hellos[-1], b"", "192.0.2.1")
    for number, hello in enumerate(hellos[MAX_LINKS_PER_NETWORK:-2]):  # a crowd with many addresses
        inside.append((door.admit(hello, b"", f"198.51.100.{number}"), f"198.51.100.{number}"))
    with pytest.raises(RemoteProtocolError, match="too many links"):
        door.admit(hellos[-1], b"", "203.0.113.1")
    door.is_known = {friend.peer_id}.__contains__
    other = Door(friend, RUN, clock)
    assert door.admit(other.hello(us.peer_id, b""), b"", "192.0.2.1") == friend.peer_id
    door.leave(friend.peer_id, "192.0.2.1")
    for peer, network in inside:
        door.leave(peer, network)
    assert not door._inside
    assert not door._networks


def test_dials_of_a_crowd_do_not_keep_out_those_who_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_NONCES", 8)
    clock, us, friend = Clock(), Identity.generate(), Identity.generate()
    door = Door(us, RUN, clock)
    for hello in crowd(us, clock, 8):
        door.leave(door.admit(hello, b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        door.admit(*crowd(us, clock, 1), b"")
    door.is_known = {friend.peer_id}.__contains__
    other = Door(friend, RUN, clock)
    for _ in range(8):
        door.leave(door.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        door.admit(other.hello(us.peer_id, b""), b"")


def test_this_machine_is_no_network() -> None:
    assert network_at("127.0.0.1") == network_at("::1") == ""
    assert network_at("192.0.2.7") == "192.0.2.7"
    assert network_at("2001:db8::1") == network_at("2001:db8::2") != network_at("2001:db8:1::1")


@given(st.binary(max_size=200))
def test_the_door_survives_any_bytes(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Door(Identity.generate(), RUN, Clock()).admit(data, b"")
