"""One liar among eight that keep offering: whatever it does with its votes and words, the others lose a few
rounds, say whom they blame, and go on. Each of these stopped the swarm for good once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Aborted, Distrusted, PeerView, Rounds
from p2p_co2.protocol.rounds.decision import sign_outcome
from p2p_co2.protocol.rounds.repute import FIRST_S, LONGEST_S, Repute
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import Identity, PeerId
from tests.round_machine import DIGEST, drain, one_machine
from tests.round_network import RUN, Network, forged_commit, make_identity

CALM = 45
"""Rounds that eight honest peers make in the time that is played here (they make 49)."""


class Liar:
    """Peer 3 of eight. ``lie`` gets each message of its own to another, and says whether it goes out."""

    def __init__(self, net: Network, lie: Callable[[Liar, PeerId, Message], bool]) -> None:
        self.net, self.name = net, net.names[3]
        net.notices = True
        self.identity = net.peers[self.name].identity
        net.on_send = lambda source, to, message: source != self.name or lie(self, to, message)

    def send(self, to: PeerId, decision: wire.Decision) -> None:
        self.net.at(self.net.now + 0.02, lambda: self.net.deliver(self.name, to, decision))

    def abort(self, outcome: wire.Outcome) -> wire.Decision:
        end = wire.Outcome(
            key=outcome.key, run=RUN, reason="a lie", state_digest=outcome.state_digest,
            members=outcome.members,
        )  # fmt: skip
        return sign_outcome(self.identity, end)

    def keep_telling(self, tell: Callable[[Liar, PeerId], wire.Decision]) -> None:
        """Tell everybody something once a second."""
        for name in self.net.names:
            if name != self.name:
                self.send(name, tell(self, name))
        self.net.at(self.net.now + 1.0, lambda: self.keep_telling(tell))


def _own_commit(liar: Liar, message: Message) -> wire.Outcome | None:
    outcome = wire.Outcome.FromString(message.outcome) if isinstance(message, wire.Decision) else None
    return outcome if outcome and outcome.committed and outcome.decided_by == liar.name else None


def _abort_to_half(liar: Liar, to: PeerId, message: Message) -> bool:
    outcome = _own_commit(liar, message)
    if outcome is None or liar.net.names.index(to) % 2:
        return True
    liar.send(to, liar.abort(outcome))
    return False


def _abort_to_all(liar: Liar, to: PeerId, message: Message) -> bool:
    outcome = _own_commit(liar, message)
    if outcome is not None:
        liar.send(to, liar.abort(outcome))
    return outcome is None


def _withhold(liar: Liar, to: PeerId, message: Message) -> bool:
    return _own_commit(liar, message) is None


def _begin_nothing(liar: Liar, to: PeerId, message: Message) -> bool:
    return not isinstance(message, wire.Begin)


def _promise(liar: Liar, to: PeerId, message: Message) -> bool:
    if isinstance(message, wire.Waiting):
        message.begins_within_s = 1800.0
    return not isinstance(message, wire.Begin | wire.Decision)


@pytest.mark.parametrize(
    ("lie", "lost_s"),
    [(_abort_to_half, 30), (_abort_to_all, 60), (_withhold, 60), (_begin_nothing, 100), (_promise, 160)],
)
def test_a_coordinator_that_lets_rounds_fail_is_passed_over(
    lie: Callable[[Liar, PeerId, Message], bool], lost_s: float
) -> None:
    net = Network(8, seed=1)
    liar = Liar(net, lie)
    net.keep_offering(period_s=5.0)
    net.run(150.0 + lost_s)
    _check(net, liar, "asked last to coordinate")
    blamed = [event for _, event in net.events if isinstance(event, Distrusted)]
    assert all(event.lasts_s <= LONGEST_S for event in blamed)


def _vote_early(liar: Liar) -> None:
    """It tells the others of each attempt before their BEGIN comes."""
    net, deliver = liar.net, liar.net.deliver

    def overtake(source: PeerId, to: PeerId, message: Message) -> None:
        if to == liar.name and isinstance(message, wire.Begin):
            vote = wire.Result(key=message.key)
            for name in [one for one in net.names if one not in (liar.name, source)]:
                net.at(net.now + 0.005, lambda name=name: deliver(liar.name, name, vote))  # type: ignore[misc]
        deliver(source, to, message)

    net.deliver = overtake  # type: ignore[method-assign]


def test_votes_that_overtake_begin_keep_nobody_out_of_a_round() -> None:
    """They ended the attempt, and blamed nobody. 9 rounds were made in this time."""
    net = Network(8, seed=1)
    _vote_early(Liar(net, lambda liar, to, message: True))
    net.keep_offering(period_s=5.0)
    net.run(200.0)
    assert min(peer.version for peer in net.peers.values()) >= CALM
    assert not [event for _, event in net.events if isinstance(event, Aborted | Distrusted)]


def _made_while_coordinators_die(seed: int, *, lies: bool) -> int:
    """Rounds of eight peers in 200 s, one of whom dies as it begins a round every 20 s."""
    net = Network(8, seed)
    net.detect_s = 0.5
    liar = Liar(net, lambda liar, to, message: True)
    if lies:
        _vote_early(liar)
    next_at = net.now + 20.0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal next_at
        is_due = isinstance(message, wire.Begin) and source != liar.name and net.now >= next_at
        if is_due and net.peers[source].alive:
            next_at = net.now + 20.0
            net.crash(source)
            net.at(net.now + 5.0, lambda: net.restart(source, 5.0))
        return not is_due

    net.on_send = on_send
    net.keep_offering(period_s=5.0)
    net.run(200.0)
    return min(peer.version for peer in net.peers.values())


@pytest.mark.parametrize("seed", range(2))
def test_votes_that_overtake_begin_cost_nothing_where_coordinators_die(seed: int) -> None:
    """Whom the next one began with was kept out by a single early vote: 50 and 38 rounds were made, and 53
    and 55 without the liar."""
    honest = _made_while_coordinators_die(seed, lies=False)
    assert _made_while_coordinators_die(seed, lies=True) >= honest - 1 > CALM


def _for_everybody(liar: Liar, to: PeerId) -> wire.Decision:
    peer = liar.net.peers[to]
    return forged_commit(liar.identity, peer.version + 1, peer.states[0][1], liar.net.names)


def _for_all_but_who_hears_it(liar: Liar, to: PeerId) -> wire.Decision:
    peer = liar.net.peers[to]
    others = [name for name in liar.net.names if name != to]
    return forged_commit(liar.identity, peer.version + 1, peer.states[0][1], others)


def _far_ahead(liar: Liar, to: PeerId) -> wire.Decision:
    version = liar.net.peers[to].version
    return forged_commit(liar.identity, version + 3, bytes(32), liar.net.names, version.to_bytes(16))


@pytest.mark.parametrize("tell", [_for_everybody, _for_all_but_who_hears_it, _far_ahead])
def test_commits_that_nobody_made_cost_a_few_rounds(tell: Callable[[Liar, PeerId], wire.Decision]) -> None:
    net = Network(8, seed=1)
    liar = Liar(net, lambda liar, to, message: True)
    net.keep_offering(period_s=5.0)
    net.at(net.now + 1.0, lambda: liar.keep_telling(tell))
    net.run(200.0)
    _check(net, liar, "not believed about rounds of others")


def test_a_far_commit_told_to_who_waits_for_the_liars_mean_is_not_kept() -> None:
    """Who kept it took the commits of its own rounds for those of others: all stood still after version 4."""
    waited = 0

    def hold_back(liar: Liar, to: PeerId, message: Message) -> bool:
        others = [name for name in net.names if name != liar.name]
        if not isinstance(message, wire.Mean) or (others.index(to) + 3 * message.key.round) % 7 > 2:
            return True

        def come() -> None:
            nonlocal waited
            waited += net.peers[to].machine.is_completing(0)
            net.deliver(liar.name, to, forged_commit(liar.identity, 10**6, bytes(32), net.names))
            net.deliver(liar.name, to, message)

        net.at(net.now + 0.9, come)
        return False

    net = Network(8, seed=1)
    Liar(net, hold_back)
    net.keep_offering(period_s=5.0)
    net.run(200.0)
    assert min(peer.version for peer in net.peers.values()) >= CALM
    assert waited > 10


def _check(net: Network, liar: Liar, blame: str) -> None:
    """All went on together, each names the liar, and nobody else."""
    honest = [name for name in net.names if name != liar.name]
    versions = [net.peers[name].version for name in honest]
    reasons = [event.reason for _, event in net.events if isinstance(event, Aborted)]
    assert min(versions) >= CALM, (versions, reasons[-5:])
    assert max(versions) - min(versions) <= 2
    told = [(name, event) for name, event in net.events if isinstance(event, Distrusted)]
    assert {event.peer for name, event in told if name in honest} == {liar.name}
    assert any(event.reason.startswith(blame) for _, event in told)


# ---- by hand


def _tell(
    machine: Rounds, signer: Identity, round_: int, members: list[Identity], now: float
) -> list[object]:
    names = [one.peer_id for one in members]
    machine.receive(forged_commit(signer, round_, DIGEST, names), make_identity(1).peer_id, now)
    return drain(machine)


def test_a_key_made_for_one_lie_is_not_believed() -> None:
    machine, fresh = one_machine(1, 2), make_identity(7)
    assert _tell(machine, fresh, 1, [fresh, make_identity(1), make_identity(2)], 1.0) == []
    assert len(_tell(machine, make_identity(2), 1, [make_identity(1), make_identity(2)], 1.0)) == 1


def test_who_sent_us_after_what_nobody_has_is_not_believed_for_a_while() -> None:
    machine, liar = one_machine(1, 2), make_identity(2)
    assert len(_tell(machine, liar, 4, [liar], 1.0)) == 1
    machine.forget_outcome(0, 3)  # nobody gives the state of version 3
    (news,) = drain(machine)
    assert isinstance(news, Distrusted)
    assert (news.peer, news.lasts_s) == (liar.peer_id, FIRST_S)
    assert _tell(machine, liar, 5, [liar], 2.0) == []
    assert len(_tell(machine, make_identity(1), 5, [make_identity(1)], 2.0)) == 1
    assert len(_tell(machine, liar, 3, [liar], 2.0 + FIRST_S)) == 1


def test_who_sent_us_after_what_only_few_have_is_not_believed_from_the_second_time_on() -> None:
    machine, other = one_machine(1, 2), make_identity(2)
    for round_, blamed in ((4, False), (5, True)):
        assert len(_tell(machine, other, round_, [other], float(round_))) == 1
        machine.forget_outcome(0, round_ - 1, is_proved=False)  # who made it alone may not give it at once
        assert [type(event) for event in drain(machine)] == [Distrusted] * blamed


def test_who_decided_for_the_smaller_side_of_a_split_is_blamed_the_second_time_and_never_by_itself() -> None:
    machine, other = one_machine(1, 2), make_identity(1).peer_id
    fragment, key = machine._fragments[0], wire.RoundKey(round=1, attempt=bytes(16))
    for signer, at, blamed in (
        (machine._swarm.me, 1.0, []), (machine._swarm.me, 2.0, []), (other, 3.0, []), (other, 4.0, [other]),
        (other, 5.0 + LONGEST_S, []),
    ):  # fmt: skip
        fragment.verdicts.keep(wire.Decision(), wire.Outcome(key=key, committed=True, decided_by=signer))
        fragment.judging.moved((1, DIGEST), 1, bytes(32), at)  # most others hold something else
        assert fragment.verdicts.commit(1) is None
        assert [event.peer for event in drain(machine) if isinstance(event, Distrusted)] == blamed


def test_who_signed_several_rounds_that_came_to_nothing_at_once_had_bad_luck_once() -> None:
    machine, other = one_machine(1), make_identity(1).peer_id
    verdicts = machine._fragments[0].verdicts
    for round_ in (1, 2, 3):
        key = wire.RoundKey(round=round_, attempt=bytes([round_]) * 16)
        verdicts.keep(wire.Decision(), wire.Outcome(key=key, committed=True, decided_by=other))
    machine.forget_outcome(0, 1)
    assert [verdicts.commit(round_) for round_ in (1, 2, 3)] == [None, None, None]
    assert not [event for event in drain(machine) if isinstance(event, Distrusted)]


def test_who_made_what_we_hold_is_not_blamed_for_where_another_one_sent_us() -> None:
    """One word of another state than our own named all who had signed its rounds as liars."""
    machine, signer, liar = one_machine(1, 2), make_identity(1), make_identity(2)
    assert len(_tell(machine, signer, 1, [signer, make_identity(0)], 1.0)) == 1
    machine.set_state(0, 1, bytes(32))
    machine._fragments[0]._ahead.told(wire.Behind(version=1), liar.peer_id)
    machine.forget_outcome(0, 1)
    assert machine._fragments[0].verdicts.commit(1) is not None
    assert machine._swarm.is_believed(signer.peer_id, 2.0)
    assert [event for event in drain(machine) if isinstance(event, Distrusted)] == []  # the first time


def test_who_is_gone_or_the_only_other_one_is_not_blamed_for_bytes_that_it_alone_had() -> None:
    """The line of one of two peers was cut when it had decided: once that named the other a liar."""
    for others, leaves, blamed in (((1,), False, False), ((1, 2), True, False), ((1, 2), False, True)):
        machine, signer = one_machine(*others), make_identity(1)
        assert len(_tell(machine, signer, 1, [signer, make_identity(0)], 1.0)) == 1
        if leaves:
            live = [machine._swarm.me, *(make_identity(one).peer_id for one in others[1:])]
            machine.set_peers({peer: PeerView() for peer in live}, 1.5)
        machine.forget_outcome(0, 1)
        assert [type(event) for event in drain(machine)] == [Distrusted] * blamed
        machine.set_peers({peer: PeerView() for peer in (signer.peer_id, *map(_id, range(4)))}, 2.0)
        assert bool(_tell(machine, signer, 1, [signer, make_identity(0)], 3.0)) != blamed


def _id(number: int) -> PeerId:
    return make_identity(number).peer_id


def test_each_blame_lasts_twice_as_long_and_a_commit_clears_a_coordinator() -> None:
    repute, news, peer = Repute(), list[Distrusted](), PeerId("x")
    repute.emit = news.append
    now = 0.0
    for _ in range(5):
        while not repute.is_passed_over(peer, now):
            repute.spoilt(peer, "it said so", now, rounds=1, cost_s=1.0)
        now += news[-1].lasts_s
    assert [event.lasts_s for event in news] == [60.0, 120.0, 240.0, 480.0, 960.0]
    repute.spoilt(peer, "it said so", now, rounds=1, cost_s=150.0)
    assert news[-1].lasts_s == 1920.0
    repute.committed(peer)
    repute.spoilt(peer, "it said so", now, rounds=1, cost_s=150.0)
    assert not repute.is_passed_over(peer, now)
    repute.spoilt(peer, "it said so", now, rounds=1, cost_s=150.0)
    assert news[-1].lasts_s == 1500.0  # ten times what it cost
    for seconds in (60.0, 120.0, 240.0):
        repute.lied(peer, "it lied", now)
        repute.lied(peer, "it lied", now)  # of the same time
        assert news[-1].lasts_s == seconds
        assert not repute.is_believed(peer, now + seconds - 1)
        now += seconds
    assert repute.is_believed(peer, now)


def test_who_signs_two_outcomes_clears_nothing_by_a_third() -> None:
    repute, peer = Repute(), PeerId("x")
    repute.told_two(peer, "it signed both", 0.0)
    repute.committed(peer)
    assert repute.is_passed_over(peer, FIRST_S - 1)
    assert repute.is_believed(peer, 1.0)  # its commit is real, and others follow it


def test_half_of_the_swarm_is_never_passed_over() -> None:
    machine = one_machine(1, 2, 3)
    swarm = machine._swarm
    order = swarm.to_ask(0, 1, 1.0)
    others = [peer for peer in order if peer != swarm.me]
    swarm.spoilt(others[0], "it said so", 1.0, rounds=2)
    assert swarm.to_ask(0, 1, 1.0) == [*(peer for peer in order if peer != others[0]), others[0]]
    swarm.spoilt(others[1], "it said so", 1.0, rounds=2)
    assert swarm.to_ask(0, 1, 1.0) == order  # more likely it is our own line
    assert swarm.to_ask(0, 1, 1.0 + FIRST_S) == order
    swarm.spoilt(swarm.me, "our own round failed", 1.0, rounds=9)
    assert not swarm.repute.is_passed_over(swarm.me, 1.0)
