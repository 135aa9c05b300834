"""Coordinators of cells and of councils that die amid BEGIN, and owners that lie about it: what it costs all
cells."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Aborted, Began, Distrusted, PayloadShape
from p2p_co2.protocol.rounds.bounds import GRACE_S
from p2p_co2.protocol.rounds.cells import council_order
from p2p_co2.protocol.rounds.coordination import PASSED
from p2p_co2.protocol.rounds.delegate import DOUBTED, SILENT_S, Voice
from p2p_co2.protocol.rounds.swarm import Outlet
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId, cell_of
from tests.round_network import Faults, Network, Peer, make_identity

CELLS, ROUND_S = 3, 4.0
SHAPE = PayloadShape(8, (24,), 8, round_s=ROUND_S)


def _longest_without_a_commit(net: Network, seconds: float) -> float:
    """Everybody offers in time, every ``ROUND_S``."""
    began_at = net.now

    def offer_in_time(name: PeerId, period_s: float) -> None:
        peer = net.peers[name]
        if name not in net.busy and peer.alive and net.now >= began_at + ROUND_S * peer.version:
            net.busy.add(name)
            net.offer(name, peer.version + 1)
        net.at(net.now + period_s, lambda: offer_in_time(name, period_s))

    net._offer_again = offer_in_time  # type: ignore[method-assign]
    net.keep_offering(period_s=0.1)
    made_at = [net.now]
    while net.now < began_at + seconds:
        net.run(0.1)
        if max(peer.version for peer in net.peers.values()) >= len(made_at):
            made_at.append(net.now)
    return max(later - at for at, later in pairwise([*made_at, net.now]))


@pytest.mark.parametrize(
    ("kind", "of_council"), [(wire.Begin, True), (wire.Begin, False), (wire.CellBegin, True)]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_coordinator_that_dies_amid_begin_costs_no_cell_more_than_a_round(
    seed: int, kind: type[Message], of_council: bool
) -> None:
    """The others waited for its cell's sums, and gave each part away again and again: 28 to 46 s without a
    commit in rounds of 4 s; then for five seconds of silence, 9 to 10.5 s."""
    net = Network(27, seed, Faults(latency_s=(0.01, 0.1)), shape=SHAPE, cells=CELLS)
    net.detect_s = 0.7
    left, died_at = 1 + (1 if kind is wire.CellBegin else 4) * seed, 0.0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal left, died_at
        key = message.council.key if isinstance(message, wire.CellBegin) else getattr(message, "key", None)
        if isinstance(message, kind) and key.round == 3 and not died_at:
            is_of_council = cell_of(source, CELLS) == council_order(range(CELLS), 0, 3)[0]
            left -= is_of_council == of_council
            if left == 0:
                net.crash(source)
                died_at = net.now
                return False
        return True

    net.on_send = on_send
    longest_s = _longest_without_a_commit(net, 32.0)
    assert died_at
    assert longest_s < 2 * ROUND_S + 0.3
    alive = [peer.states[0] for peer in net.peers.values() if peer.alive]
    assert min(version for version, _ in alive) >= 6
    assert len(set(alive)) == len({version for version, _ in alive})


def test_the_council_and_its_cells_wait_for_one_another_as_long_as_they_are_there() -> None:
    """One owner says that its cell failed, while its coordinator speaks for it: all cells gave up 5 s later.
    Nor is a cell, or a council, lost that says nothing new for so long."""
    net = Network(15, shape=SHAPE, cells=CELLS)
    net.reduce_s = 0.7 * SILENT_S  # twice in a round
    deliver, told = net.deliver, False

    def lie(source: PeerId, to: PeerId, message: Message) -> None:
        nonlocal told
        if isinstance(message, wire.Begin) and cell_of(to, CELLS) != cell_of(
            PeerId(message.council.coordinator), CELLS
        ):
            key, cell = message.council.key, cell_of(to, CELLS)
            said = wire.CellResult(key=key, cell=cell, failure="a lie")
            if not told and to != source and to in {part.owner for part in message.parts}:
                told = True
                council = PeerId(message.council.coordinator)
                net.at(net.now + 0.1, lambda: deliver(to, council, said))
        deliver(source, to, message)

    net.deliver = lie  # type: ignore[method-assign]
    net.offer_all()
    net.run_until_settled()
    assert told
    assert not [event.reason for _, event in net.events if isinstance(event, Aborted)]
    assert len(net.committed()) == 15


def put_to_sleep(
    net: Network, falls: Callable[[PeerId, PeerId, Message], PeerId | None], *, timers_first: bool,
    for_s: float = SILENT_S + 3.0,
) -> list[PeerId]:  # fmt: skip
    """The first peer that ``falls`` names for a message that is sent, once there is one: it sleeps for longer
    than silence is borne. What came meanwhile is there a moment after its timers, or before."""
    deliver, timer, slept = net.deliver, net._timer, []
    until = 0.0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal until
        if not slept and (name := falls(source, to, message)):
            slept.append(name)
            until = net.now + for_s
        return True

    def deliver_later(source: PeerId, to: PeerId, message: Message) -> None:
        if to in slept and net.now < until:
            net.at(until + 0.1, lambda: deliver(source, to, message))
        else:
            deliver(source, to, message)

    def fire_later(peer: Peer) -> None:
        if peer.name in slept and net.now < until:
            net.at(until + (0.0 if timers_first else 0.5), lambda: timer(peer))
        else:
            timer(peer)

    net.on_send, net.deliver, net._timer = on_send, deliver_later, fire_later  # type: ignore[method-assign]
    return slept


def test_a_council_that_slept_commits_nothing_that_its_cells_have_given_up() -> None:
    """What they had voted lay there when it woke up, and they were making the round anew."""
    net = Network(15, shape=SHAPE, cells=CELLS)

    def council(source: PeerId, to: PeerId, message: Message) -> PeerId | None:
        if not isinstance(message, wire.Result):
            return None
        begin = next(sent for _, _, sent in net.sent if isinstance(sent, wire.CellBegin))
        # Its cell holds what it made: all the others will vote, too.
        return to if to == begin.council.coordinator else None

    slept = put_to_sleep(net, council, timers_first=False)
    net.offer_all()
    net.run(30.0)
    assert slept
    assert not [one for one in _outcomes(net, slept[0]) if one.key.round == 1 and one.committed]


@pytest.mark.parametrize("timers_first", [True, False])
@pytest.mark.parametrize("for_s", [SILENT_S + 3.0, DOUBTED * SILENT_S + 0.1])
def test_a_council_that_slept_over_all_votes_commits_nothing_that_its_cells_have_given_up(
    timers_first: bool, for_s: float
) -> None:
    """It had them all, one of them by a successor, whom the lost speaker may contradict for some seconds: as
    it woke up these were over, and it committed what it held. Its own cell went on from that, alone. The
    cells give up sooner where others of its cell say that it is lost."""
    net = Network(15, shape=SHAPE, cells=CELLS)
    net.detect_s = 0.7
    lost: list[PeerId] = []
    succeeded: list[tuple[PeerId, float]] = []

    def council(source: PeerId, to: PeerId, message: Message) -> PeerId | None:
        if isinstance(message, wire.Result) and not lost and source != to:
            begins = [(told, sent) for _, told, sent in net.sent if isinstance(sent, wire.CellBegin)]
            if to in {told for told, sent in begins if told != sent.council.coordinator}:
                lost.append(to)
                net.crash(to)
        elif isinstance(message, wire.CellResult) and message.roster_digest and lost and not succeeded:
            if cell_of(source, CELLS) == cell_of(lost[0], CELLS):
                succeeded.append((source, net.now))
        elif isinstance(message, wire.CellWaiting) and succeeded and to == succeeded[0][0]:
            return source if net.now > succeeded[0][1] + 0.5 else None  # by then it has that vote
        return None

    slept = put_to_sleep(net, council, timers_first=timers_first, for_s=for_s)
    net.offer_all()
    net.run(for_s + 4.0)
    assert slept
    last = _outcomes(net, slept[0])[-1]
    assert (last.committed, last.reason) == (False, "the council's coordinator stood still")
    assert not net.committed()


def _outcomes(net: Network, council: PeerId) -> list[wire.Outcome]:
    decided = [m for source, _, m in net.sent if source == council and isinstance(m, wire.CellDecision)]
    return [wire.Outcome.FromString(sent.decision.outcome) for sent in decided]


def test_a_cells_coordinator_that_slept_asks_once_more_before_it_gives_up_what_the_council_committed() -> (
    None
):
    """It woke up, found that nobody had answered it, and ended for its cell a round that all others hold."""
    net = Network(15, shape=SHAPE, cells=CELLS)

    def speaker(source: PeerId, to: PeerId, message: Message) -> PeerId | None:
        has_voted = isinstance(message, wire.CellResult) and not message.failure
        return source if has_voted and to != source else None

    slept = put_to_sleep(net, speaker, timers_first=True)
    net.offer_all()
    net.run_until_settled()
    assert slept
    assert len(net.committed()) == 15
    assert not [event for _, event in net.events if isinstance(event, Distrusted)]


def test_a_silent_council_is_given_up_sooner_by_the_word_of_all_who_are_asked_and_never_if_it_answers() -> (
    None
):
    ids = [make_identity(number).peer_id for number in range(4)]
    council = wire.Council(key=wire.RoundKey(round=1), coordinator=ids[1])
    soon, late = DOUBTED * SILENT_S, SILENT_S
    for told, answers, until in (
        ((), False, late), (ids[2:3], False, late), ((ids[2], ids[2]), False, late), (ids[:2], False, late),
        (ids[2:], False, soon), (ids[2:], True, 20.0), (3 * ids[2:], False, soon), (3 * ids[2:], True, 20.0),
    ):  # fmt: skip
        outlet = Outlet(ids[0])
        voice, now = Voice(council, outlet, 0.0, 100.0, ids[2:]), 0.0
        while not voice.failure and now < 20.0:
            now = round(now + 0.1, 1)
            if answers and now == int(now):
                voice.answered(now)
            for sender in told if now == 2.2 else ():
                voice.told_lost(sender)
            voice.handle_timer(now)
        assert {to for to, _ in outlet.messages} == {ids[1], *(() if answers else ids[2:])}
        assert voice.is_lost != answers
        assert until <= now <= until + 0.2


@pytest.mark.parametrize("timers_first", [True, False])
@pytest.mark.parametrize("for_s", [1.2, 2.1])
def test_a_council_that_slept_just_after_it_heard_itself_commits_nothing_that_most_have_given_up(
    timers_first: bool, for_s: float
) -> None:
    """They had asked it most of a second before it asked itself, and by its own word it had not stood still
    for long enough: it committed what both others had given up, and two histories went on."""
    net = Network(15, shape=SHAPE, cells=CELLS)
    began: list[tuple[PeerId, float]] = []

    def council(source: PeerId, to: PeerId, message: Message) -> PeerId | None:
        if isinstance(message, wire.CellBegin) and not began:
            began.append((source, net.now))
        is_second = isinstance(message, wire.AskOutcome) and began and net.now > began[0][1] + 1.0
        return to if is_second and to == began[0][0] else None  # its own second one was a moment ago

    slept = put_to_sleep(net, council, timers_first=timers_first, for_s=for_s)
    falls = net.on_send

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        falls(source, to, message)
        is_vote = isinstance(message, wire.Result) and began and source != to
        if is_vote and cell_of(source, CELLS) == cell_of(began[0][0], CELLS) and not slept:
            net.at(began[0][1] + 1.5, lambda: net.deliver(source, to, message))
            return False  # its own cell is slow to vote
        return True

    net.on_send = on_send
    net.offer_all()
    net.run(2.0)
    assert slept
    its_cell = [name for name in net.names if cell_of(name, CELLS) == cell_of(slept[0], CELLS)]
    for name in its_cell:
        if name != slept[0]:  # its links have closed
            net.peers[name].machine.set_peers(
                {other: net._view(other) for other in its_cell if other != slept[0]}, net.now
            )
            net.pump(name)
    net.run(for_s + 2.0)
    gave_up = [event for _, event in net.events if isinstance(event, Aborted)]
    assert not (gave_up and net.committed())
    assert bool(gave_up) == (for_s > 2.0)


def test_a_council_that_only_other_cells_ask_is_not_asleep_where_one_of_them_is_late() -> None:
    """Its own cell had nothing to offer. One of two cells had lost its coordinator, and the other's question
    was late by a moment: the council took that for sleep of its own and ended the round, which a successor
    was about to save."""
    net = Network(15, shape=SHAPE, cells=CELLS)
    its_cell = council_order(range(CELLS), 0, 1)[0]
    net.reduce_s, net.detect_s = 2.0, 3.5
    began: set[PeerId] = set()
    lost_at: list[float] = []
    late: list[Message] = []

    def is_late() -> bool:
        return bool(lost_at) and 0 < net.now - lost_at[0] - DOUBTED * SILENT_S < 1.0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, wire.CellBegin):
            began.add(to)
        elif isinstance(message, wire.Result) and to in began and not lost_at:
            lost_at.append(net.now)
            net.crash(to)
        elif source in began and cell_of(to, CELLS) == its_cell and is_late():
            late.append(message)
            net.at(net.now + 0.4, lambda: net.deliver(source, to, message))
            return False
        return True

    net.on_send = on_send
    for name in net.names:
        if cell_of(name, CELLS) != its_cell:
            net.planned.add(name)
            net.offer(name)
    net.run_until_settled()
    assert late
    assert not [event.reason for _, event in net.events if isinstance(event, Aborted)]
    assert len(net.committed()) == len(net.planned) - 1


@pytest.mark.parametrize("gone_s", [1.0, 4.0])
def test_one_who_sums_for_all_cells_and_was_gone_for_a_moment_holds_nobody_up(gone_s: float) -> None:
    """What was on its way to it and from it is lost: who waited for its sums went without a commit for 16 s
    in rounds of 4 s."""
    net = Network(15, shape=SHAPE, cells=CELLS)
    begun: dict[int, PeerId] = {}
    lost: dict[PeerId, float] = {}

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        cell = cell_of(to, CELLS)
        if isinstance(message, wire.CellBegin):
            begun[cell] = to
        elif isinstance(message, wire.CellPart) and not lost and to not in (begun[cell], source):
            lost[to] = net.now
            near = [name for name in net.names if cell_of(name, CELLS) == cell]
            for name in near:
                if name != to:
                    views = {other: net._view(other) for other in near if other != to}
                    net.peers[name].machine.set_peers(views, net.now)
                    net.pump(name)
            net.at(net.now + gone_s, net.tell_everybody)
        return not any(name in lost and net.now < lost[name] + gone_s for name in (source, to))

    net.on_send = on_send
    net.offer_all()
    net.run(GRACE_S + 1.0)
    reasons = {name: event.reason for name, event in net.events if isinstance(event, Aborted)}
    who = "one for a moment" if gone_s < GRACE_S else next(iter(lost))[-6:]
    assert f"lost {who}, who sums for all cells" in reasons.values()
    assert reasons.keys() | lost.keys() == set(net.names)


def test_a_cells_coordinator_that_left_before_the_council_had_decided_gathers_for_that_round_again() -> None:
    """It held the round for begun for good: whoever asked for it once more was told to wait, and one more was
    held with each such round (run 800193 of ``benchmarks/ends.py drawn``)."""
    net, left = Network(15, shape=SHAPE, cells=CELLS), list[PeerId]()

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, wire.CellResult) and not message.failure and to != source and not left:
            left.append(source)
            assert net.peers[source].machine.held()["BEGUN"][0] == 1
            net.at(net.now, lambda: net.peers[source].machine.withdraw(0, "caught up", net.now) and None)
        return True

    net.on_send = on_send
    net.offer_all()
    net.run(3.0)
    assert left
    assert net.peers[left[0]].machine.held()["BEGUN"][0] == 0


def test_a_round_that_all_of_a_cell_have_gone_beyond_is_over_when_they_begin_the_next() -> None:
    """Its council may take minutes: one that was alone in its cell held four of them in a storm, where one is
    bounded for each live peer and fragment (run 2389 of ``benchmarks/ends.py wide``)."""
    net = Network(5, shape=PayloadShape(8, (24,), 8, round_s=120.0), cells=CELLS)
    cells = [cell_of(name, CELLS) for name in net.names]
    alone = next(name for name, cell in zip(net.names, cells, strict=True) if cells.count(cell) == 1)
    net.on_send = lambda source, to, message: not isinstance(message, wire.CellPart)
    for round_ in range(1, 5):
        net.offer_all(round_=round_)
        net.run(5.0)
        began = [event for name, event in net.events if isinstance(event, Began) and name == alone]
        assert len(began) == round_
        assert net.peers[alone].machine.held()["BEGUN"] == (1, 1)
        for name, peer in net.peers.items():  # all of them catch up with others
            peer.machine.withdraw(0, "caught up", net.now)
            net.set_state(name, 0, round_, hashlib.sha256(bytes([round_])).digest())
            net.pump(name)
    failures = [m.failure for source, _, m in net.sent if isinstance(m, wire.CellResult) and source == alone]
    assert failures
    assert set(failures) == {PASSED}, "the council hears of it, and need not wait"
