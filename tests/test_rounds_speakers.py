"""Who speaks for a cell, since ids are free; and when too few are left for another round."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from google.protobuf.message import Message

from p2p_co2.protocol.rounds import Aborted, Distrusted, OutcomeWithoutBytes, PayloadShape, PeerView
from p2p_co2.protocol.rounds.cells import council_order
from p2p_co2.protocol.rounds.council import FORMING_KEPT
from p2p_co2.protocol.rounds.delegate import AGAIN_CAP_S, Delegate
from p2p_co2.protocol.rounds.speakers import SPEAKERS_KEPT, STALE_S, Speakers
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId, cell_of, peer_id_of
from tests.round_network import Network, forged_commit, make_identity

SHAPE = PayloadShape(8, (24,), 8)
CELLS = 3
CALM, PLAYED_S = 10, 120.0
"""Rounds that 15 honest peers in three cells make at least in the time that is played here."""


def network(seed: int = 1) -> Network:
    net = Network(15, seed, shape=SHAPE, cells=CELLS)
    net.notices = True
    return net


def stranger(cell: int, number: int = 0) -> PeerId:
    """An id of ``cell`` that nobody there knows."""
    ids = (peer_id_of(i.to_bytes(32, "big")) for i in range(1000))
    return [peer for peer in ids if cell_of(peer, CELLS) == cell][number]


def cell_ready(speaker: PeerId, round_: int, digest: bytes, members: int = 64) -> wire.CellReady:
    key = wire.RoundKey(fragment=0, round=round_, attempt=bytes(16))
    return wire.CellReady(
        key=key, cell=cell_of(speaker, CELLS), state_digest=digest, members=members, parts_within_s=1.0,
        owners=24 * [speaker],
    )  # fmt: skip


def keep_telling(net: Network, tell: Callable[[PeerId], list[tuple[PeerId, Message]]]) -> None:
    """Every two seconds everybody is told something."""
    for name in net.names:
        for source, message in tell(name):
            net.deliver(source, name, message)
    net.at(net.now + 2.0, lambda: keep_telling(net, tell))


def check(net: Network) -> None:
    versions = [peer.version for peer in net.peers.values()]
    reasons = [event.reason for _, event in net.events if isinstance(event, Aborted)]
    assert min(versions) >= CALM, (versions, reasons[-5:])
    assert max(versions) - min(versions) <= 1
    check_held(net)


def check_held(net: Network) -> None:
    for peer in net.peers.values():
        assert all(held <= bound for held, bound in peer.machine.held().values())


# ---- by hand


def test_a_known_speaker_counts_before_a_stranger_and_a_blamed_one_after_all() -> None:
    me = make_identity(0).peer_id
    cell = (cell_of(me, CELLS) + 1) % CELLS
    known, other, third = (stranger(cell, number) for number in range(3))
    swarm = Swarm(me, SHAPE, 64, CELLS)
    speakers = Speakers(swarm, "0")

    def speaks(peer: PeerId, members: int, now: float) -> PeerId:
        speakers.take(cell_ready(peer, 1, bytes(32), members), peer, now)
        return speakers.readies[cell][1]

    first = set()
    for lot in range(20):  # among strangers it is not the claim that counts
        speakers = Speakers(swarm, str(lot))
        speaks(known, 5, 0.0)
        first.add(speaks(other, 64, 0.0))
    assert first == {known, other}
    swarm.vouch([known])
    assert speaks(known, 5, 1.0) == known
    assert speaks(other, 64, 1.0) == known
    swarm.spoilt(known, "its cell failed", 1.0, rounds=2)
    assert speaks(other, 64, 2.0) == other
    assert speaks(third, 3, 2.0 + STALE_S + 1) == third  # the others are gone
    for number in range(3, 20):
        speaks(stranger(cell, number), 1, 20.0)
    assert speakers.most() == SPEAKERS_KEPT


def test_a_council_that_was_restarted_blames_nobody_for_its_round() -> None:
    net = network()
    name = net.names[0]
    speaker = next(peer for peer in net.names if cell_of(peer, CELLS) != cell_of(name, CELLS))
    key = wire.RoundKey(fragment=0, round=1, attempt=bytes(16))
    net.deliver(speaker, name, wire.CellResult(key=key, cell=cell_of(speaker, CELLS), failure="so"))
    assert not net.refused
    told = [message for _, to, message in net.sent if to == speaker and isinstance(message, wire.CellWaiting)]
    assert [message.refusal for message in told] == ["its council does not know of it"]
    wrong = wire.CellResult(key=key, cell=cell_of(name, CELLS), failure="so")
    net.deliver(speaker, name, wrong)
    assert [error.reason for _, _, error in net.refused] == ["wrong cell"]


# ---- liars


@pytest.mark.parametrize("camp", [False, True])
def test_a_stranger_that_speaks_for_a_cell_costs_a_few_rounds(camp: bool) -> None:
    """With more members than there are, on the others' state or on one of its own."""
    net = network()
    liar = stranger(2)

    def tell(to: PeerId) -> list[tuple[PeerId, Message]]:
        version, digest = net.peers[to].states[0]
        return [(liar, cell_ready(liar, version + 1, bytes(32) if camp else digest))]

    net.keep_offering(period_s=5.0)
    net.at(net.now + 1.0, lambda: keep_telling(net, tell))
    net.run(PLAYED_S)
    check(net)


def test_a_known_peer_that_speaks_for_its_cell_all_the_time_stops_nobody_for_good() -> None:
    """With attempts that its cell knows nothing of. It held a swarm at version 18: whenever a round began, it
    was the only one of its cell that had spoken, and members blamed those who passed on what came of it."""
    net = network()
    liar, spoken = net.names[3], count(1)

    def speak() -> None:
        for to in net.names:
            version, digest = net.peers[to].states[0]
            ready = cell_ready(liar, version + 1, digest)
            ready.key.attempt = next(spoken).to_bytes(16)
            if to != liar:
                net.deliver(liar, to, ready)
        net.at(net.now + 0.5, speak)

    net.keep_offering(period_s=2.0)
    net.at(net.now + 20.0, speak)
    net.run(PLAYED_S)
    versions = [peer.version for peer in net.peers.values()]
    assert min(versions) >= 36  # 60 in calm
    assert max(versions) - min(versions) <= 3  # its own cell is left out of some


def test_nobody_but_who_spoke_for_a_cell_or_owns_there_votes_for_it() -> None:
    net = network()
    strangers = {cell: [stranger(cell, number) for number in range(8)] for cell in range(CELLS)}

    def lie(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, wire.CellBegin):  # nobody else is told of the attempt: this liar has heard it
            key, digests = message.council.key, 24 * [bytes(32)]
            for liar in strangers[cell_of(to, CELLS)]:
                failed = wire.CellResult(key=key, cell=cell_of(to, CELLS), failure="a lie")
                other = wire.CellResult(
                    key=key, cell=cell_of(to, CELLS), roster_digest=bytes(32), digests=digests
                )
                for lies in (failed, other):
                    net.at(net.now + 0.2, lambda liar=liar, lies=lies: net.deliver(liar, source, lies))  # type: ignore[misc]
        return True

    net.on_send = lie
    net.offer_all()
    net.run_until_settled()
    assert len(net.committed()) == 15
    assert not any(
        message
        for _, to, message in net.sent
        if isinstance(message, wire.CellDecision) and to not in net.peers
    )


def test_a_member_that_votes_in_place_of_its_coordinator_delays_nothing_for_long() -> None:
    """It owns a slot, so it may be a successor: it says that its cell failed, or holds another mean."""
    net = network()
    voted = 0

    def lie(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal voted
        if isinstance(message, wire.CellBegin):
            cell, key = cell_of(to, CELLS), message.council.key
            liar = next(name for name in net.names if cell_of(name, CELLS) == cell and name != to)
            failed = wire.CellResult(key=key, cell=cell, failure="a lie")
            other = wire.CellResult(key=key, cell=cell, roster_digest=bytes(32), digests=24 * [bytes(32)])
            net.at(net.now + 0.1, lambda: net.deliver(liar, source, failed if voted % 2 else other))
            voted += 1
        return True

    net.on_send = lie
    net.keep_offering(period_s=5.0)
    net.run(PLAYED_S)
    assert voted > CALM
    check(net)


def test_rounds_that_nobody_makes_do_not_keep_a_council_from_its_own() -> None:
    net = network()
    liar, counter = stranger(2), iter(range(10**6))

    def tell(to: PeerId) -> list[tuple[PeerId, Message]]:
        version, digest = net.peers[to].states[0]
        rounds = [version + 2 + next(counter) % 50 for _ in range(4)]
        return [(liar, cell_ready(liar, round_, digest)) for round_ in rounds]

    net.keep_offering(period_s=5.0)
    net.at(net.now + 1.0, lambda: keep_telling(net, tell))
    net.run(PLAYED_S / 2)
    check(net)
    assert max(peer.machine.held()["FORMING_KEPT"][0] for peer in net.peers.values()) <= FORMING_KEPT


# ---- the end of a run


def test_a_cell_closes_when_half_of_it_is_done_and_a_run_when_half_of_the_cells_have() -> None:
    ids = [peer for i in range(60) if cell_of(peer := make_identity(i).peer_id, CELLS) == 0][:6]
    works, done = PeerView(), PeerView(training=False, finished=frozenset({0}))
    swarm = Swarm(ids[0], SHAPE, 64, CELLS)
    for finished in range(7):
        swarm.set_live({peer: done if i >= 6 - finished else works for i, peer in enumerate(ids)})
        assert swarm.has_closed(0) == swarm.is_over(0) == (finished >= 3)
    swarm.set_live(dict.fromkeys(ids, works))
    for far, over in (((), False), ((1,), False), ((1, 2), True)):
        swarm.finished_in = {cell: frozenset({0} if cell in far else ()) for cell in (1, 2)}
        assert swarm.is_over(0) == over


@pytest.mark.parametrize(
    ("peers", "working", "is_over"), [(2, 1, False), (3, 1, True), (6, 1, True), (6, 2, False), (6, 0, False)]
)
def test_in_one_cell_a_run_is_over_for_the_last_of_three_or_more(
    peers: int, working: int, is_over: bool
) -> None:
    """Who has another clock, or is alone at rest, goes on."""
    ids = [make_identity(number).peer_id for number in range(peers)]
    swarm = Swarm(ids[0], SHAPE, 64, 1)
    done = PeerView(training=False, finished=frozenset({0}))
    swarm.set_live({peer: PeerView() if number < working else done for number, peer in enumerate(ids)})
    assert swarm.is_over(0) == is_over


def test_one_cell_makes_no_last_round_that_the_others_would_have_to_load() -> None:
    net = network()
    for name in net.names:
        others = {cell: frozenset({0}) for cell in range(CELLS) if cell != cell_of(name, CELLS)}
        net.peers[name].machine.set_other_cells({}, others)
    late = [name for name in net.names if cell_of(name, CELLS) == 1]
    for name in late:
        net.offer(name)
    net.run_until_settled()
    reasons = {event.reason for _, event in net.events if isinstance(event, Aborted)}
    assert reasons == {"only 1 of 3 cells were ready with equal states, 2 have nothing more to offer"}
    assert net.now < 1000.0 + 25.0  # told at once, once its own are there
    assert not net.committed()


def test_few_of_a_cell_make_no_last_round() -> None:
    net = network()
    mine = [name for name in net.names if cell_of(name, CELLS) == 0]
    done = PeerView(training=False, versions=(0,), finished=frozenset({0}))
    first = coordination_order(mine, 0, 1)[0]
    views = {name: net._view(name) if name == first else done for name in mine}
    assert len(views) == 4
    for name in mine:
        net.peers[name].machine.set_peers(views, net.now)
    net.offer(first)
    net.run(1.0)
    reasons = [event.reason for _, event in net.events if isinstance(event, Aborted)]
    assert reasons == ["most peers of this cell have nothing more to offer"]


@pytest.mark.parametrize("ahead", [0, 1000])
def test_a_cell_that_is_told_that_the_others_are_where_nobody_is_goes_on(ahead: int) -> None:
    """Or where it is itself. One such word ended its coordinator's process, which told itself to catch up."""
    net = network()
    lies: list[PeerId] = []

    def lie(source: PeerId, to: PeerId, message: Message) -> bool:
        if not isinstance(message, wire.CellReady) or message.key.round < 3 or len(lies) == 3:
            return True
        lies.append(source)
        told = wire.CellWaiting(
            fragment=0, round=message.key.round, version=message.key.round - 1 + ahead,
            state_digest=message.state_digest,
        )  # fmt: skip
        net.at(net.now + 0.02, lambda: net.deliver(to, source, told))
        return False

    net.on_send = lie
    net.keep_offering(period_s=5.0)
    net.run(PLAYED_S / 2)
    assert min(peer.version for peer in net.peers.values()) >= CALM
    assert {error.reason for _, _, error in net.refused} == {"impossible version"}


def liars(net: Network, count: int) -> list[PeerId]:
    """Of different cells."""
    by_cell = {cell_of(name, CELLS): name for name in reversed(net.names)}
    first = cell_of(net.names[0], CELLS)
    return [by_cell[(first + one) % CELLS] for one in range(count)]


def lied_to(seed: int, seconds: float, who: int, answer: Callable[[Network, PeerId, int], Message]) -> int:
    """Rounds that all have made where ``who`` liars ``answer`` other cells that ask them (who, for which
    round)."""
    net = network(seed)
    lying = liars(net, who)

    def lie(source: PeerId, to: PeerId, message: Message) -> bool:
        if (
            not isinstance(message, wire.CellReady)
            or to not in lying
            or cell_of(source, CELLS) == cell_of(to, CELLS)
        ):
            return True
        told = answer(net, source, message.key.round)
        net.at(net.now + 0.02, lambda: net.deliver(to, source, told))
        return False

    net.on_send = lie
    net.keep_offering(period_s=5.0)
    net.run(seconds)
    check_held(net)
    blamed = {event.peer for name, event in net.events if isinstance(event, Distrusted) if name not in lying}
    assert blamed <= set(lying)
    return min(peer.version for peer in net.peers.values())


@pytest.mark.parametrize(("who", "seconds"), [(1, PLAYED_S / 2), (2, PLAYED_S)])
@pytest.mark.parametrize("where", ["beyond", "beyond with us", "another state"])
def test_who_says_that_all_others_are_elsewhere_stops_no_round_for_long(
    where: str, who: int, seconds: float
) -> None:
    """Of a round that it coordinates for all cells. Whoever had passed the word on was blamed by its own
    cell, and so were those who had signed what that holds: of 13 rounds 6 were made, and of two liars none at
    all, since each named a peer of the cell that it lied to."""

    def answer(net: Network, asks: PeerId, round_: int) -> Message:
        beside = next(n for n in net.names if cell_of(n, CELLS) == cell_of(asks, CELLS) and n != asks)
        donors = [beside] if where == "beyond with us" else liars(net, who)
        version = max(1, round_ - 1) if where == "another state" else round_ + 2
        return wire.CellWaiting(
            fragment=0, round=round_, version=version, state_digest=bytes(32), donors=donors
        )

    made = [lied_to(seed, seconds, who, answer) for seed in (5, 6)]
    assert min(made) >= CALM - 1, made


def test_one_peer_that_lets_all_cells_wait_for_the_rounds_that_it_coordinates_stops_none_for_long() -> None:
    """It was asked again for 90 s, as often as it came to coordinate, and nobody blamed it: six rounds were
    made in 300 s."""

    def answer(net: Network, asks: PeerId, round_: int) -> Message:
        return wire.CellWaiting(fragment=0, round=round_, begins_within_s=30.0)

    made = [lied_to(seed, PLAYED_S, 1, answer) for seed in (5, 6)]
    assert min(made) >= CALM, made


def test_only_ones_own_cell_decides_for_it_and_has_the_bytes() -> None:
    """Peers of another cell could sign a commit of their own and give what they liked as its state."""
    net = network()
    me, start = net.names[0], net.peers[net.names[0]].states[0][1]
    near, far = ([peer for peer in net.names[1:] if (cell_of(peer, CELLS) == cell_of(me, CELLS)) is same]
                 for same in (True, False))  # fmt: skip
    for signer, donors in ((far[0], far[:2]), (near[0], [near[0], *far[:2]])):
        forged = forged_commit(net.peers[signer].identity, 1, start, donors, blocks=24)
        net.deliver(signer, me, forged)
    assert [error.detail for _, _, error in net.refused] == ["a decision with another cell's roster"]
    assert [event.donors for _, event in net.events if isinstance(event, OutcomeWithoutBytes)] == [(near[0],)]


def test_a_coordinator_that_caught_up_before_its_cell_does_not_take_its_own_word_for_a_lie() -> None:
    """Its cell was cut off for some rounds and had asked it for the next one: what it told itself, as the
    council of that round, ended its process."""
    me = make_identity(0).peer_id
    swarm, outlet = Swarm(me, SHAPE, 64, CELLS), Outlet(me)
    round_ = next(r for r in count(1) if council_order(range(CELLS), 0, r)[0] == cell_of(me, CELLS))
    near = stranger(cell_of(me, CELLS))
    swarm.set_live({me: PeerView(versions=(0,)), near: PeerView(versions=(0,)), near + "2": PeerView()})  # type: ignore[dict-item]
    delegate = Delegate((0, round_), lambda now: cell_ready(me, round_, bytes(32)), swarm, outlet, 0.0)
    swarm.my_versions[0] = version = round_ + 20
    told = wire.CellWaiting(fragment=0, round=round_, version=version, state_digest=bytes(32), donors=[me])
    delegate.waiting(told, me, 0.1)
    assert delegate.failure
    assert delegate.elsewhere is None


def test_a_council_that_says_a_thousand_times_that_it_gathers_ends_nobody() -> None:
    """Each time the next question was put off for twice as long, until that was more than a double holds: an
    exception that ended the process of each cell's coordinator."""
    me = make_identity(0).peer_id
    swarm, outlet = Swarm(me, SHAPE, 64, CELLS), Outlet(me)
    cell = (cell_of(me, CELLS) + 1) % CELLS
    round_ = next(r for r in count(1) if council_order(range(CELLS), 0, r)[0] == cell)
    council = stranger(cell)
    swarm.others[cell] = [council]
    delegate = Delegate((0, round_), lambda now: cell_ready(me, round_, bytes(32)), swarm, outlet, 0.0)
    for _ in range(1100):
        delegate.waiting(wire.CellWaiting(fragment=0, round=round_, begins_within_s=30.0), council, 0.1)
    assert not delegate.failure
    assert delegate.get_timer() == pytest.approx(0.1 + AGAIN_CAP_S)


def test_members_blame_no_honest_coordinator_for_what_another_cell_did() -> None:
    """Whenever the liar speaks for its cell it says that the cell failed. Its own cell blames it, and so does
    the council; the coordinators of the other cells only pass it on."""
    net = network()
    liar = net.names[0]

    def fail(source: PeerId, to: PeerId, message: Message) -> bool:
        if source == liar and isinstance(message, wire.CellResult):
            message.failure = "so it says"
        return True

    net.on_send = fail
    net.keep_offering(period_s=5.0)
    net.run(PLAYED_S / 2)
    check(net)
    assert {event.peer for _, event in net.events if isinstance(event, Distrusted)} == {liar}
