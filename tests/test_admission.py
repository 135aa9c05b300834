"""Admission of links, without a network: whom it admits, what it remembers, what it survives."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport import admission as rules
from p2p_co2.net.transport.admission import (
    KEPT_LINKS,
    MAX_INBOUND_LINKS,
    MAX_LINKS_PER_NETWORK,
    MAX_NONCES_PER_PEER,
    MAX_STRANGERS,
    MAX_STRANGERS_PER_NETWORK,
    SPREAD_LINKS,
    SPREAD_STRANGERS,
    Admission,
)
from p2p_co2.protocol.wire.identity import Identity
from p2p_co2.protocol.wire.limits import HELLO_WINDOW_S
from tests.transport_peers import RUN


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_the_door_admits_once_and_forgets_in_time() -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    admission, other = Admission(us, RUN, clock), Admission(them, RUN, clock)
    hello = other.hello(us.peer_id, b"c")
    assert admission.admit(hello, b"c") == them.peer_id
    clock.now += HELLO_WINDOW_S
    with pytest.raises(RemoteProtocolError, match="replayed"):
        admission.admit(hello, b"c")
    clock.now += 1
    with pytest.raises(RemoteProtocolError, match="stale"):
        admission.admit(hello, b"c")
    clock.now += 2 * HELLO_WINDOW_S
    admission.admit(other.hello(us.peer_id, b"c"), b"c")


def test_the_door_bounds_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, us, them = Clock(), Identity.generate(), Identity.generate()
    admission, other = Admission(us, RUN, clock), Admission(them, RUN, clock)
    for _ in range(MAX_NONCES_PER_PEER):
        admission.leave(admission.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        admission.admit(other.hello(us.peer_id, b""), b"")
    for _ in range(MAX_STRANGERS):
        admission.knock()
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.knock()
    for _ in range(MAX_STRANGERS):
        admission.forget()
    admission.knock()


def crowd(us: Identity, clock: Clock, count: int) -> list[bytes]:
    """Hellos of as many new identities."""
    return [Admission(Identity.generate(), RUN, clock).hello(us.peer_id, b"") for _ in range(count)]


def test_one_network_cannot_take_all_places_and_those_who_work_get_in_though_many_have() -> None:
    clock, us, friend = Clock(), Identity.generate(), Identity.generate()
    admission = Admission(us, RUN, clock)
    for _ in range(MAX_STRANGERS_PER_NETWORK):
        admission.knock("192.0.2.1")
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.knock("192.0.2.1")
    admission.knock("198.51.100.1")
    hellos = crowd(us, clock, MAX_INBOUND_LINKS - KEPT_LINKS + 2)
    inside = []
    for hello in hellos[:MAX_LINKS_PER_NETWORK]:
        inside.append((admission.admit(hello, b"", "192.0.2.1"), "192.0.2.1"))
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.admit(hellos[-1], b"", "192.0.2.1")
    for number, hello in enumerate(hellos[MAX_LINKS_PER_NETWORK:-2]):  # a crowd with many addresses
        inside.append((admission.admit(hello, b"", f"198.51.{number}.1"), f"198.51.{number}.1"))
    with pytest.raises(RemoteProtocolError, match="too many links"):
        admission.admit(hellos[-1], b"", "203.0.113.1")
    admission.is_known = {friend.peer_id}.__contains__
    other = Admission(friend, RUN, clock)
    assert admission.admit(other.hello(us.peer_id, b""), b"", "192.0.2.1") == friend.peer_id
    admission.leave(friend.peer_id, "192.0.2.1")
    for peer, network in inside:
        admission.leave(peer, network)
    for number, hello in enumerate(crowd(us, clock, MAX_INBOUND_LINKS - KEPT_LINKS)):  # all places are free
        admission.admit(hello, b"", f"198.51.{number}.1")


@pytest.mark.parametrize("address", ["198.51.{}.{}", "2001:db8:{}:{}::/64"])
def test_an_attacker_in_a_few_neighbourhoods_leaves_places_for_others(address: str) -> None:
    """Three with 96 addresses each took all places for newcomers, and all for those who have said nothing."""
    clock, us = Clock(), Identity.generate()
    admission = Admission(us, RUN, clock)
    held = strangers = 0
    for number, hello in enumerate(crowd(us, clock, 3 * 96)):
        network = address.format(number % 3, number // 3)
        with contextlib.suppress(RemoteProtocolError):
            admission.knock(network)
            strangers += 1
        with contextlib.suppress(RemoteProtocolError):
            admission.admit(hello, b"", network)
            held += 1
    assert held == MAX_INBOUND_LINKS - KEPT_LINKS - SPREAD_LINKS
    assert strangers == MAX_STRANGERS - SPREAD_STRANGERS
    for number, hello in enumerate(crowd(us, clock, SPREAD_STRANGERS)):
        network = address.format(100 + number, 1)
        admission.knock(network)
        admission.admit(hello, b"", network)
    admission.admit(*crowd(us, clock, 1), b"")  # this machine itself


def test_dials_of_a_crowd_do_not_keep_out_those_who_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_NONCES", 8)
    clock, us, friend = Clock(), Identity.generate(), Identity.generate()
    admission = Admission(us, RUN, clock)
    for hello in crowd(us, clock, 8):
        admission.leave(admission.admit(hello, b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        admission.admit(*crowd(us, clock, 1), b"")
    admission.is_known = {friend.peer_id}.__contains__
    other = Admission(friend, RUN, clock)
    for _ in range(8):
        admission.leave(admission.admit(other.hello(us.peer_id, b""), b""))
    with pytest.raises(RemoteProtocolError, match="too often"):
        admission.admit(other.hello(us.peer_id, b""), b"")


@given(st.binary(max_size=200))
def test_the_door_survives_any_bytes(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Admission(Identity.generate(), RUN, Clock()).admit(data, b"")
