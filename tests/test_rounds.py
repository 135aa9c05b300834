"""Whole rounds: by hand, as laws under lost and doubled messages, and offers that end or are withdrawn."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.rounds import (
    Aborted,
    Began,
    Committed,
    PayloadShape,
    ReduceWanted,
    Stale,
    own_offer,
    parts,
)
from p2p_co2.protocol.rounds.history import History
from p2p_co2.protocol.rounds.member import NEXT
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PIECE_BYTES
from tests.round_machine import begun_member, drain, offer_of, one_machine
from tests.round_network import Faults, Network, contributors_of, make_identity
from tests.swarms import ROOT

# ---- by hand


def test_one_peer_alone_commits_at_once() -> None:
    machine = one_machine()
    machine.offer(offer_of(), 10.0)
    began, wanted = drain(machine)
    assert isinstance(began, Began)
    assert isinstance(wanted, ReduceWanted)
    me = make_identity(0).peer_id
    assert [tuple(piece) for piece in wanted.job.slices] == [(me, 2.0, bytes(range(128)))]
    machine.reduced(wanted.job, bytes(128), 10.5)
    (committed,) = drain(machine)
    assert isinstance(committed, Committed)
    assert committed.mean == bytes(128)
    assert committed.duration_s == 0.5
    assert contributors_of(committed) == [{me: 2.0}]
    assert machine.messages_to_send() == []
    assert machine.get_timer() is None


def test_it_is_told_what_nobody_needs_any_more() -> None:
    net = Network(3)
    net.offer_all()
    net.run_until_settled()
    for event in net.committed().values():
        decision = wire.Decision.FromString(event.decision)
        outcome = wire.Outcome.FromString(decision.outcome)
        attempt = outcome.key.attempt
        assert [event for _, event in net.events if isinstance(event, Stale)] == 3 * [Stale(attempt, False)]
        verdicts, told = History(), list[Stale]()
        verdicts.keep(decision, outcome)
        verdicts.leave(1, attempt, told.append, is_over=True)
        verdicts.leave(2, b"the others go on with it", told.append, is_over=False)
        assert told == [Stale(attempt, means=False)]  # who is slower may complete it with our means
        following = wire.Outcome()
        following.CopyFrom(outcome)
        following.key.round, following.key.attempt = 2, b"the next"
        verdicts.keep(decision, following)
        verdicts.leave(2, b"the next", told.append, is_over=True)
        undecided = Stale(b"the others go on with it", means=True)
        assert told[1:] == [Stale(attempt, means=True), undecided, Stale(b"the next", means=False)]


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize(("version", "is_told"), [(1, False), (2, True)])
def test_who_slept_in_an_attempt_and_takes_a_later_state_sends_nothing_of_it(
    version: int, is_told: bool, pauses: bool
) -> None:
    """It hears of no outcome. At version 1 slower members may wait for its means."""
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 1.0)
    assert any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())
    if pauses:
        machine.withdraw(0, "its owner wants the line", 2.0)
    while machine.next_event() is not None:
        pass
    machine.set_state(0, version, bytes(32))
    told = list(iter(machine.next_event, None))
    assert [event for event in told if isinstance(event, Stale)] == is_told * [Stale(begin.key.attempt, True)]


def test_large_payloads_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIPELINED_PARTS", 1)
    shape = PayloadShape(1000, (3000,))  # 3 MB: each of two parts is two pieces
    net = Network(2, shape=shape)
    net.uploads = dict.fromkeys(net.names, 1e9)
    net.tell_everybody()
    net.offer_all()
    net.run_until_settled()
    assert len(net.committed()) == 2
    pieces_sent = [m for _, _, m in net.sent if isinstance(m, wire.Part)]
    assert len(pieces_sent) == 4
    assert max(len(m.data) for m in pieces_sent) == MAX_PIECE_BYTES
    assert len({bytes(event.mean) for event in net.committed().values()}) == 1


# ---- laws


@pytest.mark.parametrize("others", range(5))
def test_an_offer_ends_though_nobody_ever_answers(others: int) -> None:
    machine = one_machine(*range(1, others + 1))
    machine.offer(offer_of(), 0.0)
    endings, now, firings = [], 0.0, 0
    while not endings:
        for event in drain(machine):
            if isinstance(event, ReduceWanted):
                machine.reduced(event.job, bytes(128), now)
            elif isinstance(event, Committed | Aborted):
                endings.append(event)
        machine.messages_to_send()
        timer_at = machine.get_timer()
        if timer_at is not None:
            now = timer_at
            machine.handle_timer(now)
            firings += 1
    assert firings < 100
    assert now < 200
    assert machine.get_timer() is None


@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_stuck_when_all_links_are_cut_at_any_moment(seed: int) -> None:
    net = Network(4, seed, Faults(latency_s=(0.01, 0.3)))
    net.offer_all()
    cut_at = net.now + net.random.uniform(0, 2.0)
    net.on_send = lambda source, to, message: net.now < cut_at
    net.run_until_settled()
    assert net.undecided() == []
    net.check_agreement()


@pytest.mark.parametrize("loss", [0.0, 0.03, 0.15, 0.35])
def test_agreement_under_loss_duplication_and_reordering(loss: float) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(50):
        net = Network(5, seed, Faults(loss, 0.2, (0.01, 0.4)))
        net.offer_all()
        net.run_until_settled()
        assert net.undecided() == [], seed
        net.check_agreement()
        outcomes.update(type(event).__name__ for event in net.endings().values())
        if loss == 0:
            assert net.refused == []
    if loss == 0:
        assert outcomes == {"Committed": 250}
    if loss == 0.03:
        assert outcomes["Aborted"] <= 10


# ---- our own mistakes are loud


def test_offers_that_do_not_fit_are_local_errors() -> None:
    machine = one_machine(1)
    with pytest.raises(LocalProtocolError, match="bytes"):
        machine.offer(offer_of(payload=b"short"), 0.0)
    with pytest.raises(LocalProtocolError, match="at version 0"):
        machine.offer(offer_of(round_=3), 0.0)
    with pytest.raises(LocalProtocolError, match="weight"):
        offer_of(weight=0.0)
    machine.offer(offer_of(), 0.0)
    with pytest.raises(LocalProtocolError, match="open offer"):
        machine.offer(offer_of(), 0.0)
    with pytest.raises(LocalProtocolError, match="not for the rounds machine"):
        machine.receive(wire.Ping(), make_identity(1).peer_id, 0.0)


# ---- offers that are withdrawn


@pytest.mark.parametrize("role", [0, -1])
@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.4, 0.5])
def test_everybody_has_an_ending_though_one_withdraws_and_offers_again(role: int, after_s: float) -> None:
    for seed in range(10):
        net = Network(4, seed, Faults(latency_s=(0.01, 0.2)))
        fickle = coordination_order(net.names, 0, 1)[role]
        net.offer_all()

        def withdraw(net: Network = net, fickle: PeerId = fickle) -> None:
            if net.peers[fickle].machine.withdraw(0, "changed our mind", net.now):
                net.pump(fickle)
                net.at(net.now + 0.1, lambda: net.offer(fickle) if not net.peers[fickle].version else None)

        net.at(net.now + after_s, withdraw)
        net.run_until_settled()
        net.run(300.0)
        assert net.undecided() == []
        net.check_agreement()
        assert net.refused == []
        assert net.peers[fickle].machine.get_timer() is None
        assert len({peer.states[0] for peer in net.peers.values() if peer.name != fickle}) == 1


# ---- states


def test_the_states_and_what_may_follow_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    drawn = {
        state: re.findall("`([A-Z][a-z]+)`", following)
        for state, following in re.findall(r"^\| `([A-Z][a-z]+)` \|.*\|([^|]*)\|$", page, re.MULTILINE)
    }
    offers = {state: following and (following,) for state, following in own_offer.NEXT.items()}
    coded = {state.__name__: [one.__name__ for one in of or ()] for state, of in {**offers, **NEXT}.items()}
    assert drawn == coded


def test_a_state_that_does_not_follow_is_a_bug() -> None:
    state = own_offer.OwnOffer(offer_of(), 0.0)
    with pytest.raises(LocalProtocolError):
        state.become(own_offer.Waiting())
