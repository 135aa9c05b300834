"""Owners that are slower than they say: found out by those who wait for them, and given less to average."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Committed, PayloadShape
from p2p_co2.protocol.rounds.deadline import SAFETY
from p2p_co2.protocol.rounds.parts import LineRates, divide
from p2p_co2.protocol.rounds.repute import FORGIVING, HARDEST, LATE_TIMES, LEAST, Lateness
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Begin, Mean
from tests.round_network import Network, contributors_of

A, B, C, D = (PeerId(name) for name in "abcd")


def test_by_hand() -> None:
    lateness = Lateness()
    lateness.owners_took({A: 1.0, B: 1.2, C: LATE_TIMES, D: 0.5}, 60.0)
    assert [lateness.of_claim(peer) for peer in (A, B, C, D)] == [1.0] * 4  # as links differ
    lateness.owners_took({A: 1.0, B: 1.2, C: 3.5, D: 0.5}, 60.0)
    assert lateness.of_claim(C) == pytest.approx(1.0 / 3.5)
    lateness.owners_took({A: 1.0, B: 1.2, D: 40.0}, 60.0)
    assert lateness.of_claim(D) == HARDEST
    assert lateness.of_claim(C) == pytest.approx(FORGIVING / 3.5)
    for _ in range(20):
        lateness.owners_took({A: 1.0, B: 1.0, D: 40.0}, 60.0)
    assert (lateness.of_claim(C), lateness.of_claim(D)) == (1.0, LEAST)
    lateness.keep({A, B})
    assert lateness.of_claim(D) == 1.0


def test_nobody_is_blamed_for_what_costs_nothing_or_where_there_is_no_other() -> None:
    lateness = Lateness()
    lateness.owners_took({A: 0.01, B: 0.02, C: 0.2}, 60.0)
    lateness.owners_took({A: 59.0}, 60.0)
    lateness.owners_took({}, 60.0)
    lateness.owners_took({A: 100.0, B: 120.0, C: 110.0}, 60.0)
    assert [lateness.of_claim(peer) for peer in (A, B, C)] == [1.0] * 3
    lateness.owners_took({A: 120.0}, 60.0)  # twice what slices were given
    assert lateness.of_claim(A) == 0.5


@pytest.mark.parametrize("members", [4, 16])
@pytest.mark.parametrize("boast", [2.0, 4.0, 16.0])
def test_a_boast_costs_the_others_few_rounds(boast: float, members: int) -> None:
    """Equal links, one of which says that it is so many times as fast: what a round takes on the average,
    over what it would take if it said the truth. Without a memory among 16: 1.6, 2.7 and 4.3 times."""
    blocks, rate, lateness, took_s = 10_000, 1e6, Lateness(), []
    claims = {PeerId(f"p{number:02}"): rate for number in range(members)} | {PeerId("p00"): boast * rate}
    for round_ in range(100):
        rates = {peer: LineRates(claim, 0.0, lateness.of_claim(peer)) for peer, claim in claims.items()}
        division = divide(blocks, 100, rates, (0, round_), 0.0)
        owned = dict.fromkeys(division.owners, 0)
        for (start, stop), owner in zip(division.ranges, division.owners, strict=True):
            owned[owner] += stop - start
        owners_s = {p: 1 + (members - 2) * mine / blocks for p, mine in owned.items()}  # a payload a second
        lateness.owners_took(owners_s, SAFETY * division.transfer_s)
        took_s.append(max(owners_s.values()))
    honest_s = 1 + (members - 2) / members
    assert sum(took_s) / len(took_s) < 2.1 * honest_s


def test_whoever_sends_its_means_slowly_is_given_less_and_counts_all_the_same() -> None:
    network = Network(4, shape=PayloadShape(8, (64,)))
    liar = network.names[2]
    owned: list[int] = []

    def slowly(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, Begin) and to == network.names[0] and source != liar:
            owned.append(sum(p.stop_block - p.start_block for p in message.parts if p.owner == liar))
        if source != liar or not isinstance(message, Mean):
            return True
        network.at(network.now + 3.0 * message.total / (16 * 8), lambda: network.deliver(source, to, message))
        return False

    network.on_send = slowly
    for round_ in range(1, 13):
        network.offer_all(round_=round_)
        network.run(60.0)
        network.check_agreement(round_)
    rounds = [
        event for name, event in network.events if isinstance(event, Committed) and name == network.names[0]
    ]
    assert len(rounds) == 12
    assert owned[0] == 16  # a quarter, as its link says
    assert max(owned[2:]) <= 8
    for event in rounds:
        assert all(liar in part for part in contributors_of(event))
