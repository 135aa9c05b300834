"""How rounds end: beside peers that are done, and by commits of other attempts than one was in."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.rounds import Began, Doubted, PeerView
from p2p_co2.protocol.rounds.history import History
from p2p_co2.wire import messages_pb2 as wire
from tests.round_machine import DIGEST, begun_member, drain, offer_of, one_machine, remembers
from tests.round_network import Network, make_identity
from tests.test_rounds_certificates import signed

NAMES = [make_identity(index).peer_id for index in range(8)]
ME, OTHER, THIRD = NAMES[:3]
DONE = PeerView(training=False, finished=frozenset({0}))


@pytest.mark.parametrize("is_passed_over", [False, True])
def test_the_word_of_one_that_is_passed_over_keeps_nobody_from_a_last_round(
    is_passed_over: bool,
) -> None:
    machine = one_machine()
    done = PeerView(1e6, training=False, versions=(1,), finished=frozenset({0}))
    machine.set_peers({ME: PeerView(1e6, versions=(0,)), OTHER: done}, 0.0)
    for at in (0.4, 0.5) if is_passed_over else ():
        machine.swarm.repute.failed(OTHER, 0, "it was too late", at)
    machine.offer(offer_of(), 1.0)
    assert [event.group for event in drain(machine) if isinstance(event, Began)] == [(ME,)] * is_passed_over


@pytest.mark.parametrize(
    ("signers", "done", "left", "is_believed"),
    [(3, 0, 0, False), (4, 0, 0, True), (3, 5, 0, False), (4, 4, 0, True), (3, 5, 4, False), (4, 5, 4, True)],
)
def test_half_of_the_voters_make_a_commit_and_those_that_are_done_are_voters(
    signers: int, done: int, left: int, is_believed: bool
) -> None:
    """Of seven others and this peer; also those count that left when they were done."""
    machine, names = one_machine(), NAMES
    at_work = len(names) - done
    views = dict.fromkeys(names[:at_work], PeerView()) | dict.fromkeys(names[at_work:], DONE)
    machine.swarm.voters.histories = [remembers(names)]
    machine.set_peers(views, 0.0)
    machine.set_peers({name: views[name] for name in names[: len(names) - left]}, 1.0)
    assert machine.swarm.believes(names[1 : 1 + signers], 0) == is_believed


def test_no_round_begins_where_most_are_done() -> None:
    """Those out of sight for a moment are not done. One that was done long before is, in no commit of all."""
    machine = one_machine()
    machine.swarm.voters.histories = [remembers(NAMES)]
    for count, left, is_over in ((4, 0, False), (5, 0, True), (5, 5, True), (0, 0, False)):
        at_work = len(NAMES) - count
        views = dict.fromkeys(NAMES[:at_work], PeerView()) | dict.fromkeys(NAMES[at_work:], DONE)
        machine.set_peers(views, 0.0)
        machine.set_peers({name: views[name] for name in NAMES[: len(NAMES) - left]}, 1.0)
        assert machine.swarm.is_over(0) == is_over
    machine.set_peers(dict.fromkeys(NAMES[-3:], DONE), 2.0)
    assert not machine.swarm.is_over(0)
    machine.swarm.voters.histories = [remembers([*NAMES[:3], NAMES[7]], NAMES[:7])]
    machine.set_peers(dict.fromkeys(NAMES[:3], PeerView()) | dict.fromkeys(NAMES[3:], DONE), 3.0)
    assert machine.swarm.is_over(0)


@pytest.mark.parametrize("is_in_sight", [False, True])
def test_names_that_worked_at_different_times_are_not_so_many_votes(is_in_sight: bool) -> None:
    """Three machines of eight take other names in mid-run; the old ones say that they are done, and leave. Or
    they are still seen, as one is whose silence nobody has noticed."""
    honest, old, new, newest = (
        NAMES[:5],
        *([make_identity(index).peer_id for index in range(first, first + 3)] for first in (20, 23, 26)),
    )
    machine = one_machine()
    seen = [*old, *new] if is_in_sight else []
    groups = ([*honest, *group] for group in (old, new, newest))
    machine.swarm.voters.histories = [remembers(*groups, seen=seen)]
    for names in (old, new):
        machine.set_peers(dict.fromkeys(honest, PeerView()) | dict.fromkeys(names, DONE), 0.0)
    machine.set_peers(dict.fromkeys([*honest, *newest], PeerView()) | dict.fromkeys(seen, DONE), 1.0)
    swarm = machine.swarm
    assert swarm.done_with(0) == {*old}
    assert not swarm.is_over(0)
    assert not swarm.believes([*old, *new, *newest], 0)
    machine.set_peers(dict.fromkeys([*honest, *newest], PeerView()), 2.0)  # the silence is noticed
    assert swarm.believes(honest, 0)


def test_those_that_are_done_count_together_though_each_is_missed_in_turn() -> None:
    """No commit holds all five. The three that are left are not the swarm."""
    machine, left, done = one_machine(), NAMES[:3], NAMES[3:]
    groups = ([*left, *done[: one % 5], *done[one % 5 + 1 :]] for one in range(8))
    machine.swarm.voters.histories = [remembers(*groups, beside=done)]
    for here in (NAMES, left):
        views = {name: DONE if name in done else PeerView() for name in NAMES}
        machine.set_peers({name: views[name] for name in here}, 0.0)
        assert machine.swarm.done_with(0) == {*done}
        assert machine.swarm.is_over(0)
        assert not machine.swarm.believes(left, 0)
        assert machine.swarm.believes(done, 0)


def test_a_last_group_of_few_has_no_more_votes_than_all_that_are_here() -> None:
    """Three liars are most of the last commit's five. They rest, and sign alone what follows it."""
    machine = one_machine()
    machine.swarm.voters.histories = [remembers(NAMES, NAMES[3:])]
    machine.set_peers(
        dict.fromkeys(NAMES[:5], PeerView()) | dict.fromkeys(NAMES[5:], PeerView(training=False)), 0.0
    )
    assert not machine.swarm.believes(NAMES[5:], 0)
    assert machine.swarm.believes(NAMES[1:5], 0)


def test_liars_that_take_turns_do_not_make_the_end_alone() -> None:
    """Three honest ones are done and have left. No commit holds them with more than one liar."""
    machine, honest, liars = one_machine(), NAMES[:5], NAMES[5:]
    machine.swarm.voters.histories = [remembers(*([*honest, liar] for liar in liars), beside=liars)]
    at_work = dict.fromkeys([*honest[:2], *liars], PeerView())
    machine.set_peers(at_work | dict.fromkeys(honest[2:], DONE), 0.0)
    machine.set_peers(at_work, 1.0)
    assert not machine.swarm.believes(liars, 0)
    assert machine.swarm.believes([*honest[:2], *liars[:2]], 0)


def test_only_those_that_were_here_have_worked() -> None:
    history = History(NAMES[:4].__contains__)
    known = remembers(NAMES).newest_commit()
    assert known is not None
    history.keep(*known)
    assert history.newest == history.workers == history.steady == {*NAMES[:4]}


def test_names_that_never_worked_end_no_run() -> None:
    """However many say that they are done, and though one that has just started must believe them until they
    go, or it knows the last commits."""
    machine, done = one_machine(), PeerView(training=False, finished=frozenset({0}), counted=True)
    names = [make_identity(index).peer_id for index in range(100, 120)]
    swarm = machine.swarm
    machine.set_peers(dict.fromkeys(names, done), 0.0)
    assert swarm.is_over_for_good(0)  # where nobody else is at work, this is all that can be known
    for other in (PeerView(), PeerView(training=False)):  # or it rests
        machine.set_peers(dict.fromkeys(names, done) | {NAMES[1]: other}, 0.0)
        assert swarm.is_over(0)
        assert not swarm.is_over_for_good(0)
    machine.set_peers({NAMES[1]: PeerView()}, 0.0)
    assert not swarm.is_over(0)
    swarm.voters.histories = [remembers(NAMES)]
    machine.set_peers(dict.fromkeys(names, done) | {NAMES[1]: PeerView()}, 0.0)
    assert not swarm.is_over(0)
    assert not any(swarm._done.values())


@pytest.mark.parametrize(("peers", "liars", "crash"), [(8, 3, 2), (8, 3, 3), (5, 2, 2), (4, 1, 1)])
def test_who_says_that_it_is_done_holds_nobody_up(peers: int, liars: int, crash: int) -> None:
    """Eight rounds without them, and they count no more, though most of the others crash."""
    net = Network(peers)
    net.notices = True
    net.keep_offering(5.0)
    net.run(60.0)
    net.done |= {*net.names[:liars]}
    net.run(100.0)
    for victim in net.names[-crash:]:
        net.crash(victim)
    before = net.peers[net.names[liars]].version
    net.run(100.0)
    assert net.peers[net.names[liars]].version >= before + 10


def test_no_coordinator_makes_the_swarm_smaller_than_a_member_sees_it() -> None:
    """It tells three live peers where there are eight: a group that is no half of them is not joined."""
    for names, is_joined in ((range(1, 3), True), (range(1, 8), False)):
        machine, begin, first, _ = begun_member()
        machine.set_peers({make_identity(index).peer_id: PeerView(1e6) for index in names}, 0.1)
        machine.receive(begin, first, 0.5)
        told = [m for _, m in machine.messages_to_send() if isinstance(m, wire.Result) and m.gave_up]
        assert bool(told) != is_joined


# ---- two attempts of one round


def test_a_commit_of_another_attempt_than_the_one_we_were_in_leaves_a_doubt() -> None:
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.5)
    machine.withdraw(0, "no time left", 1.0)
    machine.receive(signed(1), make_identity(2).peer_id, 1.5)
    assert Doubted(0) in drain(machine)
    alone = one_machine(1, 2)
    alone.receive(signed(1), make_identity(2).peer_id, 1.5)  # it was in none
    assert Doubted(0) not in drain(alone)


def test_so_does_one_that_is_only_known_from_the_donor_that_gave_its_mean() -> None:
    """The attempt that it was in may have counted its slices, and the state that most hold may come of it."""
    machine, begin, first, _ = begun_member()
    machine.receive(begin, first, 0.5)
    drain(machine)
    parts, everybody = [], sorted((ME, OTHER, THIRD))
    for start, workers in ((0, (ME, OTHER, THIRD)), (8, (OTHER, THIRD))):
        counted = [wire.Contributor(peer=name, weight=2.0) for name in sorted(workers)]
        part = wire.PartOutcome(
            start_block=start, stop_block=start + 8, digest=bytes(32), contributors=counted,
            missed=[wire.LATE] * (3 - len(counted)),
        )  # fmt: skip
        parts.append(part)
    machine.replayed(signed(1))  # all of its work is in this one
    assert not drain(machine)
    machine.replayed(signed(1, parts=parts))
    assert drain(machine) == [Doubted(0)]
    for part in parts:
        del part.contributors[:], part.missed[:]
        part.contributors.extend(wire.Contributor(peer=name, weight=1.5) for name in everybody)
    members = [wire.Member(peer=name, weight=1.5, offer_id=b"another ") for name in everybody]
    machine.replayed(signed(1, members=members, parts=parts))  # what it had offered before, and less
    assert drain(machine) == [Doubted(0)]
    alone = one_machine(1, 2)
    alone.replayed(signed(1, members=members, parts=parts))
    assert Doubted(0) not in drain(alone)


def test_what_a_peer_was_in_alone_nobody_else_has_counted() -> None:
    """Who went over to the others' rounds after it had made the same ones alone keeps the work of these."""
    net = Network(1)
    net.offer_all()
    net.run_until_settled()
    machine = net.peers[net.names[0]].machine
    assert net.committed()
    machine.set_state(0, 0, DIGEST)
    drain(machine)
    counted = [wire.Contributor(peer=name, weight=2.0) for name in sorted((OTHER, THIRD))]
    blocks = machine._shape.blocks[0]
    part = wire.PartOutcome(
        start_block=0, stop_block=blocks, digest=bytes(32), contributors=counted, missed=[wire.LATE]
    )
    machine.replayed(signed(1, parts=[part]))
    assert not drain(machine)
