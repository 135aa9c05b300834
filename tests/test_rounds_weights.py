"""What a member's weight counts as: by hand, checked by everybody, and through whole rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.ledger import LATEST_BASE, agreed_base, weights_of
from p2p_co2.protocol.rounds import PayloadShape, claimed_weights, counted_weights, open_decision
from p2p_co2.protocol.rounds.attempt import Share, capped, read_contributors
from p2p_co2.protocol.rounds.events import ReduceJob
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Contributor, Decision
from tests.round_network import RUN, Network, Peer

CAP = 4.0
SHAPE = PayloadShape(8, (16,), weight_cap=CAP)


def shares(*weights: float) -> dict[PeerId, Share]:
    return {PeerId(f"p{index}"): Share(weight, 0) for index, weight in enumerate(weights)}


@pytest.mark.parametrize(
    ("claimed", "counted"),
    [
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),  # honest peers differ in speed
        ((1.0, 1.0, 1.0, 1e6), (1.0, 1.0, 1.0, 1.5)),  # a third of four
        ((1.0,) * 8 + (1e6,), (1.0,) * 8 + (4.0,)),
        ((1.0, 1.0, 1e6, 1e6), (1.0, 1.0, 2.0, 2.0)),  # half of them may lie
        ((1.0, 1e6), (1.0, 4.0)),
        ((7.0,), (7.0,)),
        ((1.0, 1.0, 10.0, 10.0), (1.0, 1.0, 2.0, 2.0)),  # ten times as fast, and honest: the price
        ((3.0, 1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0, 1.0)),
        ((5e-324, 5e-324, 1e15), (5e-324, 5e-324, 2e-323)),
    ],
)
def test_a_weight_counts_at_most_a_few_times_the_median(
    claimed: tuple[float, ...], counted: tuple[float, ...]
) -> None:
    assert tuple(capped(shares(*claimed), CAP).values()) == counted
    assert tuple(capped(shares(*claimed), 0.0).values()) == claimed  # no defence


def test_contributors_count_with_what_is_left_of_their_weights_at_most() -> None:
    weights = capped(shares(1.0, 1.0, 1e6), CAP)

    def read(*pairs: tuple[str, float], is_exact: bool = False) -> tuple[tuple[PeerId, float], ...]:
        return read_contributors([Contributor(peer=p, weight=w) for p, w in pairs], weights, is_exact)

    assert read(("p0", 1.0), ("p2", 4.0)) == (("p0", 1.0), ("p2", 4.0))
    assert read(("p0", 0.5), ("p2", 1e-9)) == (("p0", 0.5), ("p2", 1e-9))  # long slices count for less
    for weight in (1e6, 4.1, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RemoteProtocolError, match="wrong contributors"):
            read(("p0", 1.0), ("p2", weight))
    with pytest.raises(RemoteProtocolError, match="wrong contributors"):
        read(("p0", 0.5), is_exact=True)
    for pairs in ([("p1", 1.0), ("p0", 1.0)], [("p0", 1.0), ("p0", 1.0)], [("x", 1.0)], []):
        with pytest.raises(RemoteProtocolError, match="wrong contributors"):
            read(*pairs)


class Boasting(Network):
    """Its last peer claims a million times its work; every owner counts the slices of the first one half."""

    def weight(self, name: PeerId) -> float:
        return 1e6 if name == self.names[-1] else 10.0 + self.names.index(name)

    def _reduce(self, peer: Peer, job: ReduceJob) -> None:
        halves = {self.names[0]: 0.5}
        slices = tuple(one._replace(weight=one.weight * halves.get(one.peer, 1.0)) for one in job.slices)
        super()._reduce(peer, replace(job, slices=slices))


def test_all_peers_hold_the_mean_and_the_weights_that_it_was_made_with() -> None:
    net = Boasting(4, shape=SHAPE)
    net.offer_all()
    net.run(10.0)
    committed = net.committed()
    assert committed.keys() == set(net.names)
    assert net.refused == []
    assert len({bytes(event.mean) for event in committed.values()}) == 1
    first, liar = net.names[0], net.names[-1]
    wanted = {name: net.weight(name) for name in net.names} | {first: 5.0, liar: (10 + 11 + 12) / 2}
    for event in committed.values():
        decision = Decision.FromString(event.decision)
        outcome = open_decision(decision, RUN, SHAPE)
        assert counted_weights(outcome) == pytest.approx(wanted)
        assert claimed_weights(outcome) == pytest.approx({name: net.weight(name) for name in net.names})
        for part in weights_of(outcome):
            assert dict(part.weights) == wanted
            for member in outcome.members:  # which offer it was, nobody forgets
                assert part.offer_of(member.peer) == member.offer_id != b""
            assert part.offer_of(PeerId("nobody")) is None
    # Where the rule cuts nothing, nobody may count for less; without a defence nobody reads it at all.
    for shape in (replace(SHAPE, cuts=False), PayloadShape(8, (16,))):
        with pytest.raises(RemoteProtocolError, match="wrong contributors"):
            open_decision(decision, RUN, shape)


def test_a_mean_that_counts_a_slice_for_less_is_refused_where_the_rule_cuts_nothing() -> None:
    net = Boasting(4, shape=replace(SHAPE, cuts=False))
    net.offer_all()
    net.run(10.0)
    assert net.refused
    assert not net.committed()


def test_one_claim_of_an_old_base_sets_no_gap_penalty_for_all() -> None:
    honest = [(9, 4.0), (9, 4.0), (8, 3.0)]
    assert agreed_base(honest, 10) == 9
    assert agreed_base([*honest, (0, 4.0)], 10) == 9
    assert agreed_base([(9, 1.0), (8, 1.0)], 10) == 8  # the lower one
    assert agreed_base([(0, 1e15), *honest], 10) == 9 - LATEST_BASE  # whatever it claims to weigh
