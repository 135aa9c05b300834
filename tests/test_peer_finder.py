"""What a node asks the DHT: whatever that refuses keeps a peer from nothing else, and holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.node import peer_finder as room
from p2p_co2.node.peer_finder import (
    FIND_PEERS_S,
    PeerFinder,
    PositionWriter,
    Unreachable,
    find_every_s,
)
from p2p_co2.protocol.membership import Membership
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord, Ping, Status


class Net:
    """A DHT in which others are listed, and that fails as it is told."""

    def __init__(self, *fails: str) -> None:
        self.fails, self.searches = fails, 0
        self.said: list[tuple[float, list[int], bool]] = []

    async def publish_self(self, somebody_unmet: bool) -> str:
        return self._answer("publish", "")

    async def find_peers(self) -> list[PeerRecord]:
        self.searches += 1
        return self._answer("find", [PeerRecord(peer="other", expires_at=9.0)])

    async def greet_seeds(self) -> None:
        return None

    async def publish_position(self, position: float, versions: Sequence[int], is_last: bool) -> None:
        self.said.append((position, list(versions), is_last))
        self._answer("position", None)

    def _answer(self, what: str, value: Any) -> Any:
        if what in self.fails:
            raise TransportError("the DHT is out of reach")
        return value


class World:
    """A peer that looks for others on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fails: str) -> None:
        self.now, self.net, self.warned = 100.0, Net(*fails), list[str]()
        self.membership = Membership(PeerId("me"))
        effects: Any = SimpleNamespace(
            now=lambda: self.now, pump=lambda: None, report=lambda kind, text: self.warned.append(text)
        )
        writer: Any = SimpleNamespace(status=Status, rests=False)
        self.environment = SimpleNamespace(network=self.net, find_peers=self.net.find_peers, is_first=True)
        self.finder = PeerFinder(cast(Any, self.environment), self.membership, writer, effects)
        self._monkeypatch = monkeypatch

    async def look_once(self) -> bool:
        """Whether it searched."""
        before = self.net.searches
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.finder.run(), 0.02)
        return self.net.searches > before

    def hear(self, *peers: str) -> None:
        for peer in peers:
            self.membership.receive(Ping(status=Status()), PeerId(peer), self.now)


@pytest.mark.parametrize("fails", [(), ("publish",), ("find",), ("publish", "find")])
async def test_a_peer_that_cannot_be_listed_still_looks_for_others(
    fails: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, *fails)
    await world.look_once()
    assert world.membership.candidates.has_looked is ("find" not in fails)
    assert len(world.membership.candidates.next_at) == ("find" not in fails)
    assert world.warned == bool(fails) * ["peer discovery: the DHT is out of reach"]


@pytest.mark.parametrize(("live", "every_s"), [(1, 10.0), (4, 10.0), (8, 20.0), (23, 57.5), (40, 60.0)])
def test_among_many_that_are_all_heard_a_search_is_rare(live: int, every_s: float) -> None:
    assert find_every_s(live) == every_s


async def test_who_comes_or_goes_makes_a_peer_look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.hear("other", *map(str, range(7)))
    assert await world.look_once()
    for later_s, looks in ((10.0, False), (10.0, True)):
        world.now += later_s
        assert await world.look_once() == looks
    world.hear("8")
    assert await world.look_once()
    assert not await world.look_once()


# ---- where the run is


def writer(net: Net, phase: Status.Phase, versions: Sequence[int]) -> PositionWriter:
    return PositionWriter(
        net.publish_position, lambda: (phase, 2.5, versions), lambda: 0, lambda: 0.0, lambda text: None
    )


@pytest.mark.parametrize(
    ("phase", "versions", "is_said"),
    [(Status.TRAINING, [0, 1], True), (Status.TRAINING, [0, 0], False), (Status.JOINING, [4, 4], False)],
)
async def test_a_peer_that_leaves_says_where_the_run_is_if_it_has_been_in_it(
    phase: Status.Phase, versions: list[int], is_said: bool
) -> None:
    net = Net("position")  # a seed that is gone is no reason to stay
    await writer(net, phase, versions).say_last()
    assert net.said == is_said * [(2.5, versions, True)]


async def test_a_last_word_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CLOSE_TIMEOUT_S", 0.01)

    class Deaf(Net):
        async def publish_position(self, *what: Any) -> None:
            await asyncio.Event().wait()

    await writer(Deaf(), Status.DRAINING, [1]).say_last()


def test_who_trains_alone_is_told_so_once() -> None:
    """All looks well from inside: rounds commit, the loss falls."""
    told = list[str]()
    now, live, phase = 0.0, 0, Status.TRAINING
    positions = PositionWriter(
        Net().publish_position, lambda: (phase, 0.0, []), lambda: live, lambda: now, told.append
    )

    def look(at: float, others: int = 0, doing: Status.Phase = Status.TRAINING) -> int:
        nonlocal now, live, phase
        now, live, phase = at, others, doing
        positions.look_whether_alone()
        return len(told)

    assert look(0.0, doing=Status.JOINING) == 0
    assert look(100.0) == look(100.0 + 3 * FIND_PEERS_S - 1) == 0
    assert look(140.0, others=1) == look(141.0) == look(141.0 + 3 * FIND_PEERS_S - 1) == 0
    assert look(200.0, doing=Status.PAUSED) == look(201.0) == 0
    assert look(201.0 + 3 * FIND_PEERS_S) == 1
    assert "p2p-co2 join TICKET" in told[0]
    assert look(999.0) == look(1000.0, others=1) == look(1001.0) == look(2000.0) == 1


# ---- who cannot be reached


B = PeerId("b")


def expiring(expires_at: float, peer: str = "b") -> PeerRecord:
    return PeerRecord(peer=peer, expires_at=expires_at)


def test_only_a_peer_that_renews_its_record_is_told_of_and_once() -> None:
    known = Unreachable()
    assert known.listed([expiring(60.0)]) == []
    known.failed(B, "grpc: refused")
    assert known.listed([expiring(60.0)]) == []
    assert known.listed([expiring(60.0)]) == []
    assert known.listed([expiring(80.0)]) == [(B, "grpc: refused")]
    known.failed(B, "grpc: refused again")
    assert known.listed([expiring(100.0)]) == []


def test_a_peer_that_was_met_is_told_of_again() -> None:
    known = Unreachable()
    for expires_at in (60.0, 200.0):
        known.failed(B, "no answer")
        assert known.listed([expiring(expires_at)]) == []
        assert known.listed([expiring(expires_at + 20)]) == [(B, "no answer")]
        known.met(B)
    assert known.listed([expiring(400.0)]) == []


def test_somebody_is_unmet_who_renews_a_record_and_is_not_heard() -> None:
    known = Unreachable()
    for expires_at, live, unmet in (
        (60.0, (), False),  # it may be about to answer, or dead
        (60.0, (), False),
        (80.0, (B,), False),
        (100.0, (B,), False),
        (120.0, (), False),  # it was heard until now
        (140.0, (), True),
        (160.0, (), True),
        (160.0, (B,), False),
    ):
        known.listed([expiring(expires_at)], live)
        assert known.is_somebody_unmet == unmet, expires_at
    known.listed([], ())
    assert not known.is_somebody_unmet


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PEERS", 2)
    known = Unreachable()
    for name in "abcd":
        known.failed(PeerId(name), "no answer")
    known.listed([expiring(60.0, name) for name in "abcd"])
    assert [peer for peer, _ in known.listed([expiring(80.0, name) for name in "abcd"])] == ["a", "b"]
