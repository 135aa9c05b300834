"""Free identities that only say that they train: they have no vote, keep nobody from a round, and a newcomer
that works gets one."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Committed, PeerView
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from tests.round_network import Network


class Haunted(Network):
    """The last ``ghosts`` of ``count`` peers answer nothing; ``are_there``: whether they say that they
    train."""

    def __init__(self, count: int, ghosts: int) -> None:
        super().__init__(count)
        self.honest, self.ghosts = self.names[:-ghosts], self.names[-ghosts:]
        self.are_there = False
        for name in self.ghosts:
            self.peers[name].alive = False
        self.tell_everybody()

    def tell_everybody(self) -> None:
        there = {name: PeerView(1e6, True, (10**6,)) for name in getattr(self, "ghosts", ())}
        live = {name: self._view(name) for name in self.names if self.peers[name].alive}
        for name in live:
            said = {**live, **there} if getattr(self, "are_there", False) else live
            self.peers[name].machine.set_peers(said, self.now)
            self.pump(name)

    def haunt(self) -> None:
        self.are_there = True
        self.tell_everybody()

    def play(self, round_: int, within_s: float = 20.0) -> list[Committed]:
        """A round that all honest peers offer for: who commits it within so many seconds."""
        self.offer_all(round_=round_)
        self.run(within_s)
        self.check_agreement(round_)
        return list(self.committed(round_).values())


@pytest.mark.parametrize("ghosts", [3, 12])
def test_ghosts_that_come_to_a_run_keep_nobody_from_a_round(ghosts: int) -> None:
    net = Haunted(3 + ghosts, ghosts)
    assert len(net.play(1)) == 3
    net.haunt()
    for round_ in range(2, 12):
        assert len(net.play(round_)) == 3, round_


def test_a_newcomer_that_works_is_taken_in_and_has_a_vote_then() -> None:
    net = Haunted(4, 1)
    for round_ in (1, 2):
        net.play(round_)
    (newcomer,) = net.ghosts
    net.peers[newcomer].alive = True
    net.set_state(newcomer, 0, *net.peers[net.honest[0]].states[0])
    net.tell_everybody()
    for round_ in range(3, 7):
        net.play(round_)
    assert len(net.committed(6)) == 4
    assert all(peer.machine._swarm.voters.all() == set(net.names) for peer in net.peers.values())


def test_newcomers_that_are_ready_and_send_nothing_are_no_quorum() -> None:
    """They send READY, get a place, and then no slice and no vote."""
    net = Haunted(9, 6)
    net.play(1)
    silent: set[PeerId] = set(net.ghosts)
    for name in silent:
        net.peers[name].alive = True
        net.set_state(name, 0, *net.peers[net.honest[0]].states[0])

    def only_readies(source: PeerId, to: PeerId, message: Message) -> bool:
        return source not in silent or isinstance(message, wire.Ready)

    net.on_send = only_readies
    net.tell_everybody()
    for round_ in range(2, 8):
        made = net.play(round_, within_s=40.0)
        assert set(net.committed(round_)) >= set(net.honest), round_
        assert any(set(event.group) & silent for event in made) or round_ > 2
        for name in silent:
            net.set_state(name, 0, *net.peers[net.honest[0]].states[0])
