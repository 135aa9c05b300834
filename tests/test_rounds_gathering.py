"""Who is in a round: peers that are slow, absent, behind, too many, or hostile with well-formed messages."""

from __future__ import annotations

import hashlib

import pytest

from p2p_co2.protocol.rounds import (
    Aborted,
    Began,
    FellBehind,
    OutcomeWithoutBytes,
    PayloadShape,
    PeerView,
    ReduceJob,
    Refused,
)
from p2p_co2.protocol.rounds import bounds as limits
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.protocol.rounds.deadline import GATHER_LEAST_CAP_S
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from tests.round_machine import DIGEST, begun_member, coordinator_of, drain, offer_of, one_machine, refusal
from tests.round_network import Network, contributors_of, make_identity

# ---- slow, absent, too many


def test_a_slow_member_is_left_out_and_the_rest_commits() -> None:
    net = Network(4)
    slow = coordination_order(net.names, 0, 1)[2]
    net.on_send = lambda source, to, message: not (isinstance(message, wire.Part) and source == slow)
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert len(committed) == 4
    parts = contributors_of(committed[slow])
    assert sum(slow in part for part in parts) == 1  # only in the part that it owns
    assert all(len(part) >= 3 for part in parts)


def test_a_minority_does_not_begin_and_the_reason_says_who_was_missing() -> None:
    net = Network(4)
    lonely = coordinator_of(net)
    net.offer(lonely)
    net.run_until_settled()
    ending = net.endings()[lonely]
    assert isinstance(ending, Aborted)
    assert ending.reason.startswith("only 1 of 4 live peers were ready within 30.0 s (missing ")


def test_seventy_live_peers_of_which_one_is_ready() -> None:
    me = make_identity(0).peer_id
    names = sorted(make_identity(i).peer_id for i in range(70))
    round_ = next(n for n in range(1, 1000) if coordination_order(names, 0, n)[0] == me)
    machine = one_machine(*range(1, 70))
    machine.set_state(0, round_ - 1, DIGEST)
    machine.offer(offer_of(round_), 0.0)  # we coordinate, and hear our own outcome
    machine.handle_timer(limits.GATHER_CAP_S + 0.1)
    machine.handle_timer(limits.GATHER_CAP_S + 0.1)
    (event,) = [event for event in drain(machine) if isinstance(event, Aborted)]
    assert event.reason.startswith("only 1 of 70 live peers were ready")
    assert event.reason.endswith(" and 64 more)")


def test_of_an_even_split_only_one_half_begins() -> None:
    net = Network(4)
    order = coordination_order(net.names, 0, 1)
    halves = [set(order[:2]), set(order[2:])]
    net.on_send = lambda source, to, message: any({source, to} <= half for half in halves)
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert set(committed) == halves[0]
    assert net.undecided() == []


def test_half_of_the_swarm_does_not_make_again_a_round_that_the_other_half_has_made() -> None:
    me, other = (make_identity(i).peer_id for i in range(2))
    round_ = next(n for n in range(1, 1000) if coordination_order([me, other], 0, n)[0] == me)
    for theirs, begins in ((round_ - 1, True), (round_, False), (round_ + 5, False)):
        machine = one_machine(1)
        machine.set_state(0, round_ - 1, DIGEST)
        views = {me: PeerView(), other: PeerView(versions=(theirs,))}
        machine.set_peers(views, 0.0)
        machine.offer(offer_of(round_), 0.0)
        machine.handle_timer(limits.GATHER_CAP_S + 0.1)
        assert any(isinstance(event, Began) for event in drain(machine)) == begins, theirs


@pytest.mark.parametrize(
    ("past", "asks_them"), [((True,), True), ((True, True, False), True), ((True, False, False), False)]
)
def test_where_half_of_the_swarm_has_made_a_round_one_of_them_is_asked_for_it(
    past: tuple[bool, ...], asks_them: bool
) -> None:
    """A newcomer that heard one other, or who missed a decision: its own round could not begin, and ended as
    aborted after 0 s."""
    me, *others = (make_identity(i).peer_id for i in range(len(past) + 1))
    round_ = next(n for n in range(1, 1000) if coordination_order([me, *others], 0, n)[0] == me)
    machine = one_machine(*range(1, len(others) + 1))
    machine.set_state(0, round_ - 1, DIGEST)
    versions = [round_ if made else round_ - 1 for made in past]
    views = {peer: PeerView(versions=(version,)) for peer, version in zip(others, versions, strict=True)}
    machine.set_peers({me: PeerView(), **views}, 0.0)
    machine.offer(offer_of(round_), 0.0)
    asked = [to for to, message in machine.messages_to_send() if isinstance(message, wire.Ready)]
    assert [views[to].versions == (round_,) for to in asked] == [True] * asks_them
    assert not any(isinstance(event, Aborted) for event in drain(machine))


def test_a_newcomer_that_coordinates_waits_as_long_as_the_run_plans() -> None:
    """It has seen no rounds: it waited 10 s for those who ask another coordinator, in rounds of 4 s."""
    for version, waited_s in ((0, limits.GATHER_DEFAULT_S), (7, 1.0)):
        net = Network(4, shape=PayloadShape(8, (16,), round_s=4.0))
        for name in net.names:
            net.set_state(name, 0, version, DIGEST)
        net.tell_everybody()
        *early, silent = coordination_order(net.names, 0, version + 1)
        for name in early:
            net.offer(name, version + 1)
        offered_at = net.now
        net.run(15.0)
        (began,) = [event for _, event in net.events if isinstance(event, Began)]
        assert silent not in began.group
        assert net.began_at[version + 1] - offered_at == pytest.approx(waited_s, abs=0.1)


# ---- behind


def test_the_digest_minority_is_told_to_catch_up() -> None:
    net = Network(4)
    other = hashlib.sha256(b"another state").digest()
    drifted = coordination_order(net.names, 0, 1)[-1]
    net.set_state(drifted, 0, 0, other)
    for name in net.names:
        net.offer(name)
    net.run(5.0)
    (behind,) = [event for name, event in net.events if isinstance(event, FellBehind)]
    assert behind.version == 0
    assert behind.digest == DIGEST
    assert set(behind.donors) == set(net.names) - {drifted}
    assert behind.ends_offer
    assert len(net.committed()) == 3


def test_behind_that_names_our_own_state_is_refused_and_the_offer_goes_on() -> None:
    machine, begin, first, _ = begun_member()
    donors = [make_identity(1).peer_id]
    behind = wire.Behind(fragment=0, round=1, version=0, state_digest=DIGEST, donors=donors)
    assert refusal(machine, behind, first) == "impossible version"
    assert drain(machine) == []
    machine.receive(begin, first, 1.0)  # the offer is still open
    assert any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())


@pytest.mark.parametrize("version", [limits.AHEAD_AT_MOST + 1, 1000, 2**48])
def test_a_version_beyond_what_most_peers_say_is_refused_and_another_coordinator_asked(version: int) -> None:
    machine, _, first, _ = begun_member()
    donors = [make_identity(1).peer_id]
    behind = wire.Behind(fragment=0, round=1, version=version, state_digest=bytes(32), donors=donors)
    assert refusal(machine, behind, first) == "impossible version"
    assert drain(machine) == []
    machine.handle_timer(1.0)
    asking = machine._fragments[0].asking
    assert asking is not None
    assert len(asking.asked) == 2  # the next one, at once
    behind.version = limits.AHEAD_AT_MOST
    machine.receive(behind, first, 1.0)  # a little ahead of its last heartbeat is nothing unusual
    (event,) = drain(machine)
    assert isinstance(event, FellBehind)
    assert event.version == limits.AHEAD_AT_MOST


def test_a_majority_that_may_still_come_is_waited_for() -> None:
    net = Network(5)
    names = coordination_order(net.names, 0, 1)
    net.set_state(names[1], 0, 0, hashlib.sha256(b"another history").digest())
    for name in names[:3]:
        net.offer(name)
    net.run(limits.GATHER_DEFAULT_S + 5.0)
    assert not any(isinstance(message, wire.Behind) for _, _, message in net.sent)
    net.offer(names[3])
    net.run(5.0)
    (began,) = [event for _, event in net.events if isinstance(event, Began)]
    assert set(began.group) == {names[0], names[2], names[3]}


def test_a_peer_known_to_be_behind_is_not_waited_for_but_counts() -> None:
    net = Network(3)
    net.offer_all()
    net.run_until_settled()
    net.run(1.0)
    stale = coordination_order(net.names, 0, 2)[-1]
    live = {name: PeerView(1e6, True, (1 if name != stale else 0,)) for name in net.names}
    newcomer = make_identity(9).peer_id
    live[newcomer] = PeerView(1e6, True, (0,))
    for name in net.names:
        net.peers[name].machine.set_peers(live, net.now)
    offered_at = net.now
    for name in net.names:
        net.offer(name, 2)
    net.run_until_settled()
    net.run(2.0)
    began = [event for _, event in net.events if isinstance(event, Began) and event.round == 2]
    assert net.began_at[2] - offered_at < 0.5  # the newcomer was not waited for
    assert set(began[0].group) == set(net.names)  # the one whose status is merely old was
    assert len(net.committed(2)) == 3


def test_where_one_was_ready_long_before_the_others_the_last_of_these_is_waited_for() -> None:
    net = Network(4)
    early, *others = sorted(net.names, key=lambda name: name == coordinator_of(net), reverse=True)
    net.offer(early)
    net.run(limits.GATHER_DEFAULT_S + 1.0)  # the deadline is over, nobody else was ready
    for name in others:
        net.offer(name)
        net.run(0.1)
    net.run_until_settled()
    assert len(net.committed()) == 4
    assert [len(part) for part in contributors_of(net.committed()[early])] == [4] * 4


def test_of_a_majority_that_came_late_nobody_waits_longer_than_the_grace() -> None:
    net = Network(4)
    early, *others, silent = sorted(net.names, key=lambda name: name == coordinator_of(net), reverse=True)
    net.offer(early)
    net.run(limits.GATHER_DEFAULT_S + 1.0)
    for name in others:
        net.offer(name)
    net.run(GATHER_LEAST_CAP_S + 1.0)
    (began,) = [event for _, event in net.events if isinstance(event, Began)]
    assert silent not in began.group
    assert len(began.group) == 3


def test_a_late_ready_is_answered_with_the_decision() -> None:
    net = Network(4)
    late = coordination_order(net.names, 0, 1)[-1]
    for name in net.names:
        if name != late:
            net.offer(name)
    net.on_send = lambda source, to, message: to != late or not isinstance(message, wire.Decision)
    net.run(30.0)
    net.on_send = lambda source, to, message: True
    net.offer(late)
    net.run_until_settled()
    ending = [event for name, event in net.events if name == late][-1]
    assert isinstance(ending, OutcomeWithoutBytes | FellBehind)


# ---- hostile


def test_a_hostile_slice_is_dropped_and_the_job_comes_again() -> None:
    net = Network(3)
    liar = coordination_order(net.names, 0, 1)[-1]

    def on_reduce(peer: PeerId, job: ReduceJob) -> bool:
        if all(piece.peer != liar for piece in job.slices):
            return True
        net.peers[peer].machine.refused_slice(job, liar, "not finite", net.now)
        net.at(net.now, lambda: net.pump(peer))
        return False

    net.on_reduce = on_reduce
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert len(committed) == 3
    assert not any(liar in part for part in contributors_of(committed[liar]))
    refused = [event for _, event in net.events if isinstance(event, Refused)]
    assert {event.peer for event in refused} == {liar}


def test_a_round_that_we_begin_with_our_offer_before_does_not_end_the_peer() -> None:
    """Our offer may have ended by the time that our group is closed, and the next one may be with another
    coordinator."""
    machine, begin, asked, _ = begun_member()
    me = make_identity(0).peer_id
    assert asked != me
    of_the_asked, mine = wire.Begin(), begin
    of_the_asked.CopyFrom(begin)
    seal_begin(mine, me)
    machine.receive(mine, me, 1.0)
    assert drain(machine) == []
    machine.receive(of_the_asked, asked, 1.1)
    assert any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())  # it began


def test_nor_does_one_with_an_offer_that_ended_long_before_though_we_ask_ourselves() -> None:
    """Two offers may end while a group gathers, or one by a certificate of another coordinator's group."""
    machine, begin, *_ = begun_member()
    me, now = make_identity(0).peer_id, 0.0
    mine = machine._fragments[0]
    while mine.asking is not None and me not in mine.asking.asked:  # nobody else answers
        now = machine.get_timer() or 0.0
        machine.handle_timer(now)
    for member in begin.members:
        if member.peer == me:
            member.weight = 3.0
    seal_begin(begin, me)
    machine.receive(begin, me, now)
    assert mine.member is None
    assert mine.asking is not None
