"""rounds.makers: who made a state that was loaded, asked of those who know; rounds that depend on it."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import PayloadShape, PeerView
from p2p_co2.protocol.rounds.decision import Verdicts, sign_outcome
from p2p_co2.protocol.rounds.makers import ANSWER_S, ASKED_AT_ONCE, NO_ATTEMPT, TIMES, WORD_BYTES, Makers
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId, cell_of
from tests.round_network import RUN, Network, make_identity

CELLS = 5
SHAPE = PayloadShape(8, (24,), 8)
MADE_IT, LOADED = (0, 1, 2), (2, 3, 4)
"""Cell 2 made version 1, too, and was restarted since."""


def members(net: Network, cells: Collection[int]) -> list[PeerId]:
    return [name for name in net.names if cell_of(name, CELLS) in cells]


def after_one_round() -> Network:
    """Three of five cells made version 1; one of them has forgotten it since, and two have loaded it."""
    net = Network(25, shape=SHAPE, cells=CELLS)
    for name in members(net, MADE_IT):
        net.offer(name)
    net.run(100.0)
    assert set(net.committed()) == set(members(net, MADE_IT))
    agreed = net.peers[members(net, MADE_IT)[0]].states[0]
    for name in members(net, {2}):
        net.crash(name)
    net.run(net.detect_s)
    for name in members(net, {2}):
        net.restart(name, 1e9)
        net.peers[name].machine.withdraw(0, "not yet", net.now)
    for name in members(net, LOADED):
        machine = net.peers[name].machine
        machine.set_cell(0, members(net, {0}), net.now)
        machine.given_by(0, members(net, {1}))
        net.set_state(name, 0, *agreed)
        net.pump(name)
    net.tell_everybody()
    net.run(4 * ANSWER_S)
    return net


def part_ways(net: Network, *, is_seen: bool) -> None:
    """The cells 0 and 1 here, all others there; ``is_seen``: whether these still see them."""

    def is_on_one_side(source: PeerId, to: PeerId, message: object) -> bool:
        return (cell_of(source, CELLS) in (0, 1)) == (cell_of(to, CELLS) in (0, 1))

    net.on_send = is_on_one_side
    for name in net.names:
        awake = {cell: (1,) for cell in range(CELLS) if is_seen or cell in LOADED}
        net.peers[name].machine.set_other_cells(awake, {})
    for name in net.names:
        if net.peers[name].machine.open_offers() == []:
            net.offer(name, 2)


def test_cells_that_loaded_a_state_make_no_other_version_than_those_that_made_it() -> None:
    """Three of five let each other go on, and so did two of the three that had made the state."""
    net = after_one_round()
    for name in members(net, LOADED):
        assert net.peers[name].machine.made_by(0) == set(MADE_IT)
    part_ways(net, is_seen=True)
    net.run(100.0)
    assert set(net.committed(2)) == set(members(net, (0, 1)))


def test_cells_that_loaded_a_state_go_on_once_those_that_made_it_are_seen_no_more() -> None:
    net = after_one_round()
    part_ways(net, is_seen=False)
    for name in members(net, (0, 1)):
        net.peers[name].alive = False
    net.run(100.0)
    assert set(net.committed(2)) == set(members(net, LOADED))


def test_a_round_that_was_replayed_is_known_with_the_cells_that_made_it() -> None:
    net = after_one_round()
    knows, asks = (net.peers[members(net, {cell})[0]].machine for cell in (0, 1))
    known = knows._fragments[0].verdicts.commit(1)
    assert known is not None
    asks._fragments[0].verdicts.forget(0)
    assert asks.made_by(0) == set()
    asks.replayed(known[0])
    assert asks.made_by(0) == set(MADE_IT)


def test_one_word_of_who_made_a_state_sends_nobody_after_them() -> None:
    """Whoever is asked may name the one cell that it has filled with its own ids."""
    net = after_one_round()
    machine = net.peers[members(net, LOADED)[0]].machine
    verdicts = machine._fragments[0].verdicts
    teller, told = next(iter(verdicts._hearsay.items()))
    assert machine.made_by(0) == set(MADE_IT)
    verdicts.drop_hearsay()
    verdicts.hear(teller, *told)
    assert verdicts.cells_told(1) == set(MADE_IT)
    assert machine.made_by(0) == set()


@pytest.mark.parametrize(
    ("words", "agreed"),
    [
        (((1, 2), (0, 2)), ()),  # a liar names its own cell beside one that an honest peer names
        (((1, 2, 3), (1,)), ()),  # or fewer, of which its own are more than half
        (((1, 2), (0, 2), (1, 2)), (1, 2)),
        (((1, 2), (0,), (0,), (1, 2)), ()),  # two liars
    ],
)
def test_only_who_is_told_of_the_same_cells_by_two_goes_after_them(
    words: tuple[tuple[int, ...], ...], agreed: tuple[int, ...]
) -> None:
    net = after_one_round()
    machine = net.peers[members(net, {3})[0]].machine
    verdicts = machine._fragments[0].verdicts
    _, (decision, outcome) = verdicts._hearsay.popitem()
    verdicts.drop_hearsay()
    for teller, cells in zip(net.names[: len(words)], words, strict=True):
        said = wire.Outcome()
        said.CopyFrom(outcome)
        del said.cells[:]
        said.cells.extend(wire.CellShare(cell=cell) for cell in cells)
        verdicts.hear(teller, decision, said)
    assert machine.made_by(0) == set(agreed)
    assert verdicts.cells_told(1) == {cell for word in words for cell in word}  # what it would begin


def test_in_a_swarm_of_one_cell_a_replayed_round_is_not_kept() -> None:
    """Who answers a READY with it would have to give its bytes."""
    net = Network(3)
    net.offer_all()
    net.run_until_settled()
    known = net.peers[net.names[0]].machine._fragments[0].verdicts.commit(1)
    assert known is not None
    other = Network(3).peers[net.names[0]].machine
    other.replayed(known[0])
    assert other._fragments[0].verdicts.commit(1) is None


def test_a_word_of_a_fragment_that_does_not_exist_is_refused() -> None:
    net = Network(2, shape=SHAPE, cells=CELLS)
    name, other = net.names
    key = wire.RoundKey(fragment=7, round=1, attempt=bytes(range(16)))
    outcome = wire.Outcome(key=key, run=RUN, state_digest=b"b" * 32, committed=True)
    outcome.cells.add(cell=1, roster_digest=b"r" * 32)
    word = wire.CellDecision(decision=sign_outcome(net.peers[other].identity, outcome), attempt=NO_ATTEMPT)
    with pytest.raises(RemoteProtocolError, match="unknown fragment"):
        net.peers[name].machine.receive(word, other, net.now)


# ---- asking


NEAR = [make_identity(i) for i in range(200) if cell_of(make_identity(i).peer_id, CELLS) == 0][:10]
FAR = [make_identity(i) for i in range(200) if cell_of(make_identity(i).peer_id, CELLS) == 1][:10]
STATE = b"s" * 32


class Asker:
    """A peer of cell 0 that holds version 7, which others gave it."""

    def __init__(self, near: int = 0, far: int = 0) -> None:
        me, *others = [one.peer_id for one in NEAR]
        self.swarm, self.outlet, self.verdicts = Swarm(me, SHAPE, 32, CELLS), Outlet(me), Verdicts()
        self.makers = Makers(0, self.swarm, self.outlet, self.verdicts)
        self.donors = [*others[:near], *(one.peer_id for one in FAR[:far])]
        self.hears_of(others[:near])
        self.makers.donors = self.donors
        self.makers.moved(7, STATE, 0.0)

    def hears_of(self, peers: list[PeerId]) -> None:
        self.swarm.set_live({peer: PeerView(1e6, True, (7,), digests=(STATE,)) for peer in peers})

    def asked(self) -> list[PeerId]:
        messages, self.outlet.messages = self.outlet.messages, []
        for _, message in messages:
            assert isinstance(message, wire.AskOutcome)
            assert (message.key.round, message.key.attempt) == (7, NO_ATTEMPT)
        return [peer for peer, _ in messages]

    def tell(self, sender: PeerId, cells: Collection[int], round_: int = 7, **changed: object) -> None:
        outcome = wire.Outcome(
            key=wire.RoundKey(round=round_, attempt=bytes(range(16))), run=RUN, state_digest=b"b" * 32,
            committed=True,
        )  # fmt: skip
        for cell in cells:
            outcome.cells.add(cell=cell, roster_digest=b"r" * 32)
        for name, value in changed.items():
            setattr(outcome, name, value)
        self.makers.told(sign_outcome(FAR[9], outcome), outcome, sender)

    @property
    def cells(self) -> set[int]:
        return set(self.verdicts.cells_told(7))


def test_a_few_are_asked_a_few_times_and_nobody_waits_for_ever() -> None:
    asker, asked = Asker(near=9, far=9), list[PeerId]()
    for turn in range(TIMES):
        now = turn * ANSWER_S
        few = asker.asked()
        assert len(few) == 2 * ASKED_AT_ONCE
        asked += few
        assert asker.makers.get_timer() == now + ANSWER_S
        asker.makers.handle_timer(now + ANSWER_S)
    assert asker.asked() == []
    assert asker.makers.get_timer() is None
    assert len(set(asked)) == len(asked)


def test_who_starts_from_its_disk_asks_once_it_hears_of_others() -> None:
    asker = Asker()
    assert asker.asked() == []
    assert asker.makers.get_timer() is None
    near = [one.peer_id for one in NEAR[1:3]]
    asker.hears_of(near)
    asker.makers.peers_changed(1.0)
    assert sorted(asker.asked()) == sorted(near)


def test_who_has_it_first_is_asked_first_and_nobody_who_cannot_know() -> None:
    me, *near = [one.peer_id for one in NEAR]
    far = [one.peer_id for one in FAR]
    behind, ahead, same, also_same, donor = near[:5]

    def view(version: int, digest: bytes) -> PeerView:
        return PeerView(1e6, True, (version,), digests=(digest,))

    asker = Asker()
    asker.swarm.set_live({
        me: view(7, STATE), behind: view(6, STATE), ahead: view(8, STATE), same: view(7, STATE),
        also_same: view(7, STATE), donor: view(8, STATE),
    })  # fmt: skip
    asker.swarm.others = {1: far[:5], 2: [], 3: far[5:6]}
    asker.makers.donors = [far[4], donor]
    asker.makers.moved(7, b"t" * 32, 1.0)
    assert asker.asked()[:1] == [donor]
    asker.makers.donors = []
    asker.makers.moved(7, STATE, 1.0)
    assert asker.asked() == [*sorted((same, also_same), key=lambda peer: (peer < me, peer)), far[0], far[5]]
    asker.makers.handle_timer(1.0 + ANSWER_S)
    assert asker.asked() == [*sorted((ahead, donor), key=lambda peer: (peer < me, peer)), far[1], far[2]]
    asker.makers.donors = [far[4]]
    asker.makers.moved(7, b"u" * 32, 2.0)
    assert asker.asked()[2:] == [far[4], far[0]]
    asker.makers.moved(0, STATE, 3.0)
    assert asker.makers.get_timer() is None  # nobody made the start


def test_those_who_are_heard_of_later_are_asked() -> None:
    """Of our cell, and of another one."""
    net = Network(25, shape=SHAPE, cells=CELLS)
    name, near, *_ = members(net, {0})
    far = members(net, {1})[0]
    machine = net.peers[name].machine
    machine.set_peers({}, net.now)
    net.set_state(name, 0, 7, STATE)
    machine.messages_to_send()

    def asked() -> list[PeerId]:
        sent = machine.messages_to_send()
        return [to for to, message in sent if isinstance(message, wire.AskOutcome)]

    machine.set_cell(1, [far], net.now)
    assert asked() == [far]
    machine.handle_timer(net.now + ANSWER_S)
    machine.set_peers({near: PeerView(1e6, True, (7,))}, net.now + ANSWER_S)
    assert asked() == [near]


def test_who_knows_the_round_asks_nobody() -> None:
    asker = Asker(near=2)
    asker.asked()
    key = wire.RoundKey(round=8, attempt=bytes(16))
    asker.verdicts.keep(wire.Decision(), wire.Outcome(key=key, committed=True))
    asker.makers.moved(8, STATE, 1.0)
    assert asker.asked() == []


def test_of_all_words_all_cells_count_and_nobody_else_is_asked_once_two_say_the_same() -> None:
    """One of them lies, so that a round begins sooner."""
    asker = Asker(near=2, far=2)
    asked = asker.asked()
    asker.tell(asked[0], [1])
    assert asker.cells == {1}
    asker.tell(asked[0], [0, 3, 4])  # what it said stands
    assert asker.cells == {1}
    assert asker.makers.get_timer() is not None
    asker.tell(asked[1], [0, 3, 4])
    assert asker.cells == {0, 1, 3, 4}
    assert asker.makers.get_timer() is not None
    asker.tell(asked[2], [0, 3, 4])
    assert asker.cells == {0, 1, 3, 4}
    assert asker.makers.get_timer() is None


def test_what_was_told_of_one_state_is_forgotten_with_it() -> None:
    asker = Asker(near=2)
    asker.tell(asker.asked()[0], [1, 2])
    asker.makers.moved(7, b"t" * 32, 1.0)
    assert asker.cells == set()
    assert asker.asked()


def test_nobody_counts_who_was_not_asked_or_tells_of_another_round() -> None:
    asker = Asker(near=2)
    asked = asker.asked()
    asker.tell(FAR[5].peer_id, [1, 2])
    asker.tell(asked[0], [1, 2], round_=6)
    assert asker.cells == set()


@pytest.mark.parametrize(
    ("cells", "changed"),
    [
        ([], {}),
        ([2, 1], {}),
        ([1, 1], {}),
        ([1, CELLS], {}),
        ([1, 2], {"committed": False}),
        ([1, 2], {"reason": "x" * (WORD_BYTES + 256 * CELLS)}),
    ],
)
def test_what_no_council_signs_is_refused(cells: list[int], changed: dict[str, object]) -> None:
    asker = Asker(near=2)
    with pytest.raises(RemoteProtocolError):
        asker.tell(asker.asked()[0], cells, **changed)
    assert asker.cells == set()


def test_what_two_told_alike_is_passed_on_without_the_roster() -> None:
    """One word alone is not: a liar's would come to the next that asks from two."""
    asker = Asker(near=4)
    asker.makers.answer(7, FAR[0].peer_id)
    asked = asker.asked()
    asker.tell(asked[0], [1, 2])
    asker.makers.answer(7, FAR[0].peer_id)
    asker.tell(asked[1], [3])
    asker.makers.answer(7, FAR[0].peer_id)
    assert asker.outlet.messages == []
    asker.makers.handle_timer(ANSWER_S)
    asker.tell(asker.asked()[0], [1, 2])
    asker.makers.answer(6, FAR[0].peer_id)
    asker.makers.answer(7, FAR[0].peer_id)
    [(to, message)] = asker.outlet.messages
    assert to == FAR[0].peer_id
    assert isinstance(message, wire.CellDecision)
    assert message.attempt == NO_ATTEMPT
    assert not message.decision.roster
    assert [share.cell for share in wire.Outcome.FromString(message.decision.outcome).cells] == [1, 2]
