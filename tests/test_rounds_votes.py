"""Free identities that only say that they train: they have no vote, keep nobody from a round, and a newcomer
that works gets one."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.ledger import LATEST_BASE, agreed_base
from p2p_co2.protocol.rounds import Committed, Distrusted, PayloadShape, PeerView
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import coordinator_of
from tests.round_network import Network, contributors_of, make_identity


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


# ---- groups


def test_a_group_of_names_that_nobody_knows_is_joined_by_nobody() -> None:
    net = Network(4)
    for round_ in (1, 2):
        net.offer_all(round_=round_)
        net.run(20.0)
    liar, strangers = coordinator_of(net, 3), [make_identity(100 + number).peer_id for number in range(6)]

    def with_strangers(source: PeerId, to: PeerId, message: Message) -> bool:
        if source != liar or not isinstance(message, wire.Begin) or message.live > len(net.names):
            return True
        forged = wire.Begin.FromString(message.SerializeToString())
        forged.members.extend(wire.Member(peer=peer, weight=1.0) for peer in strangers)
        forged.members.sort(key=lambda member: member.peer)
        forged.live = len(forged.members)
        for part, owner in zip(forged.parts, strangers, strict=False):
            part.owner = owner
        seal_begin(forged, liar)
        net.at(net.now + 0.01, lambda: net.deliver(source, to, forged))
        return False

    net.on_send = with_strangers
    honest = [name for name in net.names if name != liar]
    net.offer_all(round_=3)
    net.run(60.0)
    net.check_agreement(3)
    made = net.committed(3)
    assert made.keys() >= set(honest)
    assert not any({*event.group} & {*strangers} for event in made.values())
    gave_up = {source for source, _, one in net.sent if isinstance(one, wire.Result) and one.gave_up}
    assert gave_up >= set(honest)


def test_a_group_that_is_given_no_time_still_exchanges() -> None:
    net = Network(4)
    liar = coordinator_of(net, 1)

    def no_time(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, wire.Begin) and source == liar and message.parts_within_s:
            message.parts_within_s = message.result_within_s = 0.0
            net.at(net.now + 0.01, lambda: net.deliver(source, to, message))
            return False
        return True

    net.on_send = no_time
    net.offer_all()
    net.run(20.0)
    assert net.committed().keys() == {*net.names}
    for event in net.committed().values():
        assert all(len(part) == 4 for part in contributors_of(event))


def test_who_is_there_and_never_ready_stops_the_others_twice_at_most() -> None:
    net = Network(5)
    for round_ in (1, 2):
        net.offer_all(round_=round_)
        net.run(20.0)
    ready = net.names[:3]
    for round_ in range(3, 9):
        for _ in range(3 if round_ == 3 else 1):
            for name in ready if not net.committed(round_) else ():
                net.offer(name, round_)
            net.run(100.0)
        assert len(net.committed(round_)) == 3, round_
        for name in net.names[3:]:
            net.set_state(name, 0, *net.peers[ready[0]].states[0])
        net.tell_everybody()


# ---- time


def test_who_sends_its_slices_at_the_last_moment_is_named_and_waited_for_no_longer() -> None:
    net, took_s = Network(4, shape=PayloadShape(8, (64,))), list[float]()
    late = net.names[2]

    def slowly(source: PeerId, to: PeerId, message: Message) -> bool:
        if source != late or not isinstance(message, wire.Part):
            return True
        net.at(net.now + 1.9, lambda: net.deliver(source, to, message))
        return False

    net.on_send = slowly
    for round_ in range(1, 13):
        net.offer_all(round_=round_)
        net.run(30.0)
        net.check_agreement(round_)
        took_s.append(max(event.duration_s - event.begun_s for event in net.committed(round_).values()))
    assert max(took_s[:2]) > 1.9
    assert max(took_s[2:]) < 1.0
    named = {event.peer for _, event in net.events if isinstance(event, Distrusted)}
    assert named == {late}
    assert "since its slices come too late" in str(net.events)
    net.on_send = lambda source, to, message: True
    for round_ in (13, 14):
        net.offer_all(round_=round_)
        net.run(30.0)
    assert all(late in part for part in contributors_of(net.committed(14)[net.names[0]]))


# ---- what the others claim


def test_one_claim_of_an_old_base_sets_no_gap_penalty_for_all() -> None:
    honest = [(9, 4.0), (9, 4.0), (8, 3.0)]
    assert agreed_base(honest, 10) == 9
    assert agreed_base([*honest, (0, 4.0)], 10) == 9
    assert agreed_base([(9, 1.0), (8, 1.0)], 10) == 8  # the lower one
    assert agreed_base([(0, 1e15), *honest], 10) == 9 - LATEST_BASE  # whatever it claims to weigh
