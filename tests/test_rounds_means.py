"""Means that do not hold what was sent: who signs them, what becomes of the round, and of their owner."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import (
    CheckWanted,
    Committed,
    Likeness,
    Offer,
    PayloadShape,
    Rounds,
)
from p2p_co2.protocol.rounds.attempt import Attempt, Share
from p2p_co2.protocol.rounds.ballot import Ballot
from p2p_co2.protocol.rounds.bounds import KEEP_DECISIONS
from p2p_co2.protocol.rounds.certificate import Seals, Signer
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import Distrusted, ReduceJob
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.protocol.rounds.history import History
from p2p_co2.protocol.rounds.parts import BlockRange, LineRates, divide
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.certificates import signed_mean
from tests.round_network import RUN, Network, make_identity

SHAPE = PayloadShape(8, (16,), weight_cap=4.0)
IDENTITIES = sorted(map(make_identity, range(4)), key=lambda identity: identity.peer_id)


def equals(count: int) -> Network:
    """Peers that all make as much work, so all have a say."""
    net = Network(count, shape=SHAPE)
    net.weight = lambda name: 1.0  # type: ignore[method-assign]
    return net


def owner_of(net: Network, job: CheckWanted) -> PeerId:
    """Who averaged a part, as its BEGIN says."""
    begins = (message for _, _, message in net.sent if isinstance(message, wire.Begin))
    begin = next(begin for begin in begins if begin.key.attempt == job.key)
    return PeerId(begin.parts[job.part].owner)


def test_who_was_not_counted_has_no_say_and_without_a_defence_nobody_looks() -> None:
    for shape, looks in ((SHAPE, True), (PayloadShape(8, (16,)), False)):
        net = Network(4, shape=shape)
        net.offer_all()
        net.run_until_settled()
        checks = [(name, event) for name, event in net.events if isinstance(event, CheckWanted)]
        assert bool(checks) is looks
        for name, job in checks:
            assert owner_of(net, job) != name
            assert len(job.mine) == len(job.mean)


@pytest.mark.parametrize(
    ("weights", "counted", "likeness", "is_refused"),
    [
        ((1, 1, 1, 1), {}, (0.5, 0.7), False),
        ((1, 1, 1, 1), {}, (-0.1, 0.7), False),  # slices may point anywhere
        ((1, 1, 1, 1), {}, (-0.5, 0.7), True),  # flipped
        ((1, 1, 1, 1), {}, (0.5, 7.0), True),  # ten times as long
        ((1, 1, 1, 1), {}, (0.0, 7.0), True),  # noise points nowhere, and is long
        ((1, 1, 1, 1), {}, (0.0, 700.0, 0.001, 0.1), False),  # ours was nothing there: others' need not be,
        ((1, 1, 1, 1), {}, (0.0, 7000.0, 0.001, 0.1), True),  # but not everything,
        ((1, 1, 1, 1), {}, (-0.5, 700.0, 0.001, 0.1), True),  # nor point away
        ((1, 1, 1, 1), {}, (0.0, 7.0, 0.001, 0.9), True),  # a short slice of values that are used is judged
        ((1, 4, 4, 4), {}, (0.5, 7.0), False),  # a slow peer's slice is short,
        ((1, 2, 2, 2), {}, (-0.5, 0.7), False),  # and an honest mean may point away from it
        ((1, 1.3, 1.3, 1.3), {}, (-0.5, 0.7), True),
        ((1, 1, 1, 1e6), {}, (0.5, 7.0), True),  # a boast makes nobody slow
        ((1, 1, 1, 1), {0: 0.2}, (-0.5, 0.7), False),  # ours was long, and is not counted as it was
        ((1, 1, 1, 1), {0: 0.2, 1: 0.2}, (-0.5, 0.7), False),
        ((1, 1, 1, 1), {0: 0.2, 1: 0.2, 2: 0.2}, None, True),  # most are cut: no rule does that
        ((1, 1, 1, 1), {}, (0.0, 0.0, 0.0), False),  # ours is zeros there: that says nothing
        ((1, 1, 1, 1), {0: 0.0}, (0.1, 0.7), False),  # it was late, or forgotten,
        ((1, 1, 1, 1), {0: 0.0, 1: 0.0, 2: 0.0}, (-0.5, 0.7), True),  # but not by one that lies
    ],
)
def test_which_mean_is_refused(
    weights: Sequence[float], counted: dict[int, float], likeness: tuple[float, ...] | None,
    is_refused: bool,
) -> None:  # fmt: skip
    peers = [identity.peer_id for identity in IDENTITIES]
    shares = {peer: Share(float(weight), 0) for peer, weight in zip(peers, weights, strict=True)}
    ranges = tuple(BlockRange(4 * part, 4 * part + 4) for part in range(4))
    attempt = Attempt(
        0, 1, bytes(16), shares, ranges, tuple(peers), (frozenset(peers),) * 4, bytes(32), peers[1], 1.0, 1.0,
        4, 4.0, counts_whole=False,
    )  # fmt: skip
    swarm, outlet = RoundSwarm(peers[0], SHAPE), Outlet(peers[0])
    offer = Offer(0, 1, 0, bytes(32), bytes(128), 1.0, offer_id=bytes(8))
    seals = Seals(Signer(IDENTITIES[0], RUN), attempt)
    exchange = Exchange(offer, attempt, swarm, outlet, seals=seals, observed=Durations(), now=0.0)
    for part, owner in enumerate(peers[1:], 1):
        listed = [
            (peer, counted.get(index, 1.0) * attempt.weights[peer] if part == 3 else attempt.weights[peer])
            for index, peer in enumerate(peers)
        ]
        contributors = [wire.Contributor(peer=peer, weight=weight) for peer, weight in listed if weight]
        mean = wire.Mean(
            key=attempt.key(), part=part, total=32, data=bytes(32), contributors=contributors,
            missed=[wire.LATE] * (4 - len(contributors)),
        )  # fmt: skip
        mean.signature = signed_mean(mean, ranges[part], IDENTITIES[part], RUN).signature
        assert exchange.mean_came(mean, owner, 1.0)
    jobs = [event for event in outlet.events if isinstance(event, CheckWanted)]
    assert exchange.findings.is_done is not bool(jobs)
    for job in jobs:
        told = likeness if job.part == 3 and likeness else (0.5, 0.7)
        exchange.checked(job, Likeness(*told, *[1.0] * (4 - len(told))))
    assert exchange.findings.is_done
    assert exchange.findings.refused == ({(3, 0)} if is_refused else set())
    assert not (likeness == (0.0, 0.0, 0.0) and swarm.repute.is_doubted(peers[3]))


def test_newcomers_whose_slices_count_little_make_no_owner_a_liar() -> None:
    """Who has been in all the last means is new to no honest owner; before, a tenth is all that many get."""
    old, new = {PeerId("a"), PeerId("b"), PeerId("c")}, {PeerId("x"), PeerId("y"), PeerId("z")}
    voters = RoundSwarm(PeerId("a"), SHAPE).voters
    history = History()
    voters.histories = [history]
    assert voters.steady(0, old) == old  # as a run begins
    history.version = 20
    assert not voters.steady(0, old | new)  # it has just come
    for round_ in range(21 - KEEP_DECISIONS, 21):
        counted = [wire.Contributor(peer=one) for one in (old | new if round_ > 15 else old)]
        part = wire.PartOutcome(contributors=counted)
        outcome = wire.Outcome(key=wire.RoundKey(round=round_), parts=[part])
        history.keep(wire.Decision(), outcome)
    assert voters.steady(0, old | new) == old - {PeerId("a")}


def refusals(members: int, by: Sequence[int]) -> Ballot:
    """Of so many members, ``by`` refuse the mean of the first one."""
    peers = [PeerId(f"p{index:02}") for index in range(members)]
    attempt = Attempt(
        0, 1, bytes(16), {peer: Share(1.0, 0) for peer in peers}, (BlockRange(0, 4),), (peers[0],),
        (frozenset(peers),), bytes(32), peers[0], 1.0, 1.0, members, 4.0,
    )  # fmt: skip
    ballot = Ballot(
        attempt, Seals(Signer(IDENTITIES[0], RUN), attempt), lambda peer, why: None, lambda signers: True
    )
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
        (4, [1, 2], True),
        (8, [1, 2, 3], False),  # fewer liars than half of the others take nobody's role
        (8, [1, 2, 3, 4], True),
        (8, [0, 1, 2, 3], False),  # nobody bears witness against itself
        (8, [1, 2, 3, 8, 9, 10, 11], False),  # newcomers have no vote
    ],
)
def test_more_than_half_of_the_other_voters_take_an_owners_role(
    members: int, by: list[int], is_caught: bool
) -> None:
    voters = [PeerId(f"p{index:02}") for index in range(members)]
    ballot = refusals(max(members, max(by) + 1), by)
    assert (ballot.caught(voters).keys() == {"p00"}) is is_caught


def test_those_that_refuse_are_not_waited_for() -> None:
    others = [PeerId(f"p{index:02}") for index in range(4)]
    assert refusals(4, [1]).may_commit(others)
    assert not refusals(4, [1, 2]).may_commit(others[1:])


@pytest.mark.parametrize("members", [3, 4, 7, 8])
def test_who_lied_about_a_mean_is_given_no_part_as_long_as_the_others_can_own_it_all(members: int) -> None:
    peers = [PeerId(f"p{index:02}") for index in range(members)]
    for liars in range(members + 1):
        rates = {peer: LineRates(1e6, 0.0, float(index >= liars)) for index, peer in enumerate(peers)}
        owners = set(divide(1000, 68, rates, (0, 1), 0.0).owners)
        assert owners == (set(peers[liars:]) if 2 * liars <= members else set(peers))


# ---- different means for different members


def changed_means(net: Network, owner: PeerId, change: Callable[[wire.Mean, PeerId], bool]) -> None:
    """Have ``owner`` send its means as ``change(mean, receiver)`` leaves them; if it says so, signed anew."""

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if source != owner or not isinstance(message, wire.Mean):
            return True
        mean = wire.Mean.FromString(message.SerializeToString())
        if change(mean, to):
            begins = (begin for _, _, begin in net.sent if isinstance(begin, wire.Begin))
            (*_, spec) = (begin.parts[mean.part] for begin in begins if begin.key == mean.key)
            blocks = spec.start_block, spec.stop_block
            mean.signature = signed_mean(mean, blocks, net.peers[owner].identity, RUN).signature
        net.at(net.now + 0.01, lambda: net.deliver(source, to, mean))
        return False

    net.on_send = on_send


def lie_to_each(net: Network, owner: PeerId) -> None:
    def change(mean: wire.Mean, to: PeerId) -> bool:
        mean.data = bytes([net.names.index(to)]) * len(mean.data)
        return True

    changed_means(net, owner, change)


def distrusted(net: Network, by: PeerId) -> list[PeerId]:
    return [event.peer for name, event in net.events if name == by and isinstance(event, Distrusted)]


def test_who_takes_a_known_liar_in_again_has_no_excuse() -> None:
    net = equals(4)
    first, liar, *others = coordination_order(net.names, 0, 1)
    lie_to_each(net, liar)
    for turn in range(3):
        assert all(distrusted(net, name) == [liar] * bool(turn) for name in others)
        for name in (first, liar):  # they act as if they knew of nothing
            net.peers[name].machine = Rounds(net.peers[name].identity, RUN, SHAPE)
            net.set_state(name, 0, *net.peers[name].states[0])
        net.tell_everybody()
        net.offer_all()
        net.run(5.0)
        assert net.committed() == {}
    assert all(distrusted(net, name) == [liar, first] for name in others)


def test_nothing_more_is_said_where_all_votes_agree() -> None:
    net = equals(4)
    net.offer_all()
    net.run_until_settled()
    assert net.committed().keys() == set(net.names)
    assert not any(message.means for _, _, message in net.sent if isinstance(message, wire.Result))


def told(*means: wire.SignedMean) -> wire.Result:
    return wire.Result(gave_up=True, means=means)


def test_only_two_means_that_one_owner_signed_for_one_part_of_one_attempt_prove_a_lie() -> None:
    peers = [identity.peer_id for identity in IDENTITIES]
    ranges = (BlockRange(0, 8), BlockRange(8, 16))
    attempt = Attempt(
        0, 1, bytes(16), {peer: Share(1.0, 0) for peer in peers}, ranges, (peers[1], peers[2]),
        (frozenset(peers),) * 2, bytes(32), peers[0], 1.0, 1.0, 4, 4.0,
    )  # fmt: skip
    ballot = Ballot(
        attempt, Seals(Signer(IDENTITIES[0], RUN), attempt), lambda peer, why: None, lambda signers: True
    )

    def signed(
        data: bytes,
        by: int = 1,
        part: int = 0,
        generation: int = 0,
        key: bytes = attempt.id,
        run: bytes = RUN,
    ) -> wire.SignedMean:
        mean = wire.Mean(key=wire.RoundKey(attempt=key), part=part, generation=generation, data=data)
        return signed_mean(mean, ranges[part], IDENTITIES[by], run)

    ballot.hear(told(signed(b"one"), signed(b"other", by=2, part=1)), peers[3])
    ballot.hear(told(signed(b"one")), peers[2])  # the same
    heir = peers.index(attempt.heir(0, 1))
    ballot.hear(told(signed(b"an heir's", by=heir, generation=1)), peers[2])
    short = signed(b"two")
    short.digest = short.digest[:31]
    moved = signed(b"two")
    moved.part = 1
    for mean, reason in (
        (signed(b"two", by=3), "wrong signature"),  # by the teller itself
        (signed(b"two", key=b"another attempt!"), "wrong signature"),
        (signed(b"two", run=bytes(32)), "wrong signature"),
        (moved, "wrong signature"),
        (signed(b"two", generation=1), "wrong signature"),  # that is its heir's
        (short, "wrong digest length"),
        (wire.SignedMean(part=2), "wrong parts"),
        (wire.SignedMean(generation=4), "wrong parts"),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            ballot.hear(told(mean), peers[3])
        assert caught.value.reason == reason
    with pytest.raises(RemoteProtocolError, match="wrong parts"):
        ballot.hear(told(*[signed(b"one")] * 9), peers[3])
    assert ballot.two_faced == set()
    assert peers[3] in ballot.gave_up
    ballot.hear(told(signed(b"two")), peers[3])
    assert ballot.two_faced == {peers[1]}


@pytest.mark.parametrize("by", ["slices", "means"])
def test_who_stands_low_with_a_coordinator_averages_no_part_of_its_rounds(by: str) -> None:
    net = Network(5, shape=dataclasses.replace(SHAPE, blocks=(16,) * 6))
    net.weight = lambda name: 1.0  # type: ignore[method-assign]
    low = net.names[2]
    for name, peer in net.peers.items():
        if by == "slices":
            peer.machine.scored({other: 0.1 if other == low else 1.0 for other in net.names if name != low})
        for other in net.names if by == "means" and name != low else ():
            peer.machine.swarm.repute.looked_at(other, Likeness(0.0 if other == low else 0.5, 0.5, 1.0))
    net.finds_itself = lambda name, job: by == "slices" or owner_of(net, job) != low  # type: ignore
    for fragment in range(6):
        net.offer_all(fragment=fragment)
        net.run(30.0)
    commits = Counter(name for name, event in net.events if isinstance(event, Committed))
    assert all(commits[name] == 6 for name in net.names if name != low)
    assert commits[low] > 3  # its work counts, though it may wait for itself to coordinate
    begins = [(source, message) for source, _, message in net.sent if isinstance(message, wire.Begin)]
    assert low not in {source for source, _ in begins}
    assert low not in {part.owner for _, begin in begins for part in begin.parts}


def test_who_is_left_out_of_a_mean_refuses_nothing_and_remembers_its_owner() -> None:
    net = Network(4, shape=dataclasses.replace(SHAPE, cuts=True))
    net.weight = lambda name: 1.0  # type: ignore[method-assign]
    left_out, liar = net.names[0], net.names[1]
    made = net._reduce

    def reduce(peer: Any, job: ReduceJob) -> None:
        counts = {left_out: 0.1} if peer.name == liar else {}
        slices = [one._replace(weight=counts.get(one.peer, one.weight)) for one in job.slices]
        made(peer, dataclasses.replace(job, slices=tuple(slices)))

    net._reduce = reduce  # type: ignore[method-assign]
    net.finds_itself = lambda name, job: (name, owner_of(net, job)) != (left_out, liar)  # type: ignore
    net.offer_all()
    net.run_until_settled()
    assert len(net.committed()) == 4
    doubts = {name: peer.machine.swarm.repute.is_doubted(liar) for name, peer in net.peers.items()}
    assert doubts == {name: name == left_out for name in net.names}
