"""Means that do not hold what was sent: who signs them, what becomes of the round, and of their owner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2p_co2.protocol.rounds import Aborted, CheckWanted, PayloadShape, Refused
from p2p_co2.protocol.rounds.attempt import Attempt, Share
from p2p_co2.protocol.rounds.ballot import Ballot
from p2p_co2.protocol.rounds.parts import BlockRange, Rates, divide
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from tests.round_network import Network

SHAPE = PayloadShape(8, (16,), weight_cap=4.0)


def owner_of(net: Network, job: CheckWanted) -> PeerId:
    """Who averaged a part, as its BEGIN says."""
    begins = (message for _, _, message in net.sent if isinstance(message, wire.Begin))
    begin = next(begin for begin in begins if begin.key.attempt == job.key)
    return PeerId(begin.parts[job.part].owner)


def accused(net: Network) -> dict[PeerId, list[PeerId]]:
    """By peer, whose means it takes no more."""
    found: dict[PeerId, list[PeerId]] = {}
    for name, event in net.events:
        if isinstance(event, Refused):
            assert event.reason == "bad mean"
            found.setdefault(name, []).append(event.peer)
    return found


def test_an_owner_whose_means_are_not_what_was_sent_costs_a_round_and_averages_no_more() -> None:
    net = Network(4, shape=SHAPE)
    liar = net.names[1]
    net.finds_itself = lambda peer, job: owner_of(net, job) != liar
    net.offer_all()
    net.run_until_settled()
    honest = [name for name in net.names if name != liar]
    for name in honest:
        ending = net.endings()[name]
        assert isinstance(ending, Aborted)
        assert f"find their work in the mean of {liar[-6:]}" in ending.reason
        assert accused(net)[name] == [liar]  # told once
    begins = [message for _, _, message in net.sent if isinstance(message, wire.Begin)]
    assert liar in {part.owner for part in begins[-1].parts}
    net.sent.clear()
    net.offer_all()
    net.run(20.0)  # its READY is waited for in vain: it asks itself to coordinate
    assert net.committed().keys() >= set(honest)
    begins = [message for _, _, message in net.sent if isinstance(message, wire.Begin)]
    assert {part.owner for part in begins[-1].parts} <= set(honest)


@pytest.mark.parametrize("count", [4, 8])
def test_one_that_refuses_what_the_others_find_is_outvoted_and_takes_their_mean(count: int) -> None:
    net = Network(count, shape=SHAPE)
    doubter = net.names[0]
    net.finds_itself = lambda peer, job: peer != doubter
    net.offer_all()
    net.run(3.0)
    committed = net.committed()
    assert committed.keys() == set(net.names)
    assert len({bytes(event.mean) for event in committed.values()}) == 1
    for event in committed.values():
        votes = wire.Decision.FromString(event.decision).votes
        assert 0 not in {vote.member for vote in votes}
    assert accused(net) == {}


def test_who_was_not_counted_has_no_say_and_without_a_defence_nobody_looks() -> None:
    for shape, looks in ((SHAPE, True), (PayloadShape(8, (16,)), False)):
        net = Network(4, shape=shape)
        net.offer_all()
        net.run_until_settled()
        checks = [(name, event) for name, event in net.events if isinstance(event, CheckWanted)]
        assert bool(checks) is looks
        for name, job in checks:
            assert owner_of(net, job) != name
            assert job.share == pytest.approx(net.weight(name) / sum(map(net.weight, net.names)))
            assert len(job.mine) == len(job.mean)


def refusals(members: int, by: Sequence[int]) -> Ballot:
    """Of so many members, ``by`` refuse the mean of the first one."""
    peers = [PeerId(f"p{index:02}") for index in range(members)]
    attempt = Attempt(
        0, 1, bytes(16), {peer: Share(1.0, 0) for peer in peers}, (BlockRange(0, 4),), (peers[0],),
        (frozenset(peers),), bytes(32), peers[0], 1.0, 1.0, members, 4.0,
    )  # fmt: skip
    ballot = Ballot(attempt, lambda peer, why: None)
    for index in by:
        message = wire.Result(key=attempt.key(), refused=[wire.LostPart(part=0, generation=0)])
        ballot.hear(message, peers[index])
    return ballot


@pytest.mark.parametrize(
    ("members", "by", "is_caught"),
    [
        (2, [1], True),  # nobody else could tell
        (3, [1], False),
        (3, [1, 2], True),
        (4, [1], False),
        (8, [1, 2], False),  # as many liars as may be take nobody's role
        (8, [1, 2, 3], True),
        (8, [0, 1, 2], False),  # nobody bears witness against itself
    ],
)
def test_more_than_a_third_of_the_members_take_an_owners_role(
    members: int, by: list[int], is_caught: bool
) -> None:
    assert (refusals(members, by).caught().keys() == {"p00"}) is is_caught


def test_those_that_refuse_are_not_waited_for() -> None:
    others = [PeerId(f"p{index:02}") for index in range(4)]
    assert refusals(4, [1]).may_commit(others)
    assert not refusals(4, [1, 2]).may_commit(others[1:])


@pytest.mark.parametrize("members", [3, 4, 7, 8])
def test_who_lied_about_a_mean_is_given_no_part_as_long_as_the_others_can_own_it_all(members: int) -> None:
    peers = [PeerId(f"p{index:02}") for index in range(members)]
    for liars in range(members + 1):
        rates = {peer: Rates(1e6, 0.0, float(index >= liars)) for index, peer in enumerate(peers)}
        owners = set(divide(1000, 68, rates, (0, 1), 0.0).owners)
        assert owners == (set(peers[liars:]) if 2 * liars <= members else set(peers))
