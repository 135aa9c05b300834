"""What a peer concludes from heartbeats: by hand, with a node that only holds what is read."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_co2.membership import Membership
from p2p_co2.node.catching import Catching
from p2p_co2.node.far import Far
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.progress import (
    LACKS,
    LISTENED_S,
    NEWCOMERS_WAIT,
    WAITS_FOR_THEIR_STATE,
    LocalProgress,
    SwarmProgress,
)
from p2p_co2.node.surroundings import Clock
from p2p_co2.outlook import CellWord
from p2p_co2.wire.identity import PeerId, cell_of
from p2p_co2.wire.messages_pb2 import Leave, PeerRecord, Ping, Status

OTHER, NEWCOMER = PeerId("other"), PeerId("newcomer")


class Place:
    """A peer that joins, with two fragments, and what it hears."""

    def __init__(self, *versions: int, rounds: int = 0) -> None:
        self.now = 0.0
        self.node: Any = SimpleNamespace(
            agreed=[AgreedVersion(version, bytes([version]) * 32) for version in versions],
            clock=Clock(lambda: self.now, lambda: self.now),
            now=lambda: self.now,
            membership=Membership(PeerId("me")),
            catching=None,
            me=PeerId("me"),
            far=None,
            catchup=SimpleNamespace(
                ask_swarm=lambda vouch: None, donor=SimpleNamespace(takers=lambda now, within_s: [])
            ),
            refresh=lambda: None,
            pump=lambda: None,
            upload_bytes_per_s=lambda: 0.0,
            download_bytes_per_s=0.0,
            software="",
        )
        self.node.far = Far(cast(Any, self.node), 1, self._find_peers)
        self.progress = self.node.progress = SwarmProgress(cast(Any, self.node), 0.25, rounds)
        self.node.catching = Catching(cast(Any, self.node))

    async def _find_peers(self, cell: int | None) -> list[PeerRecord]:
        raise AssertionError("there is one cell")

    def hear(self, peer: PeerId, phase: Status.Phase, *versions: int, settled: bool = False) -> None:
        digests = [bytes([version]) * 32 for version in versions]
        finished = bytes([(1 << len(versions)) - 1]) if phase == Status.DRAINING else b""
        status = Status(phase=phase, versions=versions, digests=digests, settled=settled, finished=finished)
        self.node.membership.receive(Ping(nonce=1, sent_at=self.now, status=status), peer, self.now)
        self.conclude()

    def lose(self, peer: PeerId) -> None:
        self.node.membership.receive(Leave(reason="the run is over"), peer, self.now)
        self.conclude()

    def move(self, *versions: int) -> None:
        self.node.agreed = [AgreedVersion(version, bytes([version]) * 32) for version in versions]
        self.conclude()

    def conclude(self) -> None:
        self.now += 1.0
        self.progress.conclude(self.now)


def test_a_newcomer_whose_donors_all_go_is_left_behind() -> None:
    """It would begin a history of its own, with half of the swarm's state (seed 4 of the storms)."""
    place = Place(0, 0)
    place.hear(OTHER, Status.TRAINING, 3, 3)
    assert not place.progress.left_behind
    place.move(3, 0)
    place.lose(OTHER)
    assert place.progress.left_behind
    place.hear(NEWCOMER, Status.JOINING, 0, 0)  # one who has no more than we have is no help
    assert place.progress.left_behind
    place.hear(OTHER, Status.TRAINING, 4, 4)  # one who has is
    assert not place.progress.left_behind
    place.move(4, 3)
    place.lose(OTHER)
    assert not place.progress.left_behind
    assert place.progress.abreast


def test_who_joins_when_the_run_is_over_wants_its_last_version() -> None:
    place = Place(3, 3)
    place.hear(OTHER, Status.TRAINING, 4, 3)
    assert place.progress.abreast  # the next rounds bring the rest
    place.hear(OTHER, Status.DRAINING, 4, 3)
    assert not place.progress.abreast
    place.lose(OTHER)
    assert place.progress.left_behind


def test_one_that_was_far_ahead_of_many_and_went_leaves_nobody_behind() -> None:
    place = Place(0, 0)
    place.hear(NEWCOMER, Status.JOINING, 0, 0)
    place.hear(PeerId("another newcomer"), Status.JOINING, 0, 0)
    place.hear(OTHER, Status.TRAINING, 9, 9)
    place.lose(OTHER)
    assert not place.progress.left_behind
    assert place.progress.abreast


def test_peers_that_come_back_together_leave_nobody_behind() -> None:
    place = Place(5, 5)
    place.hear(OTHER, Status.JOINING, 5, 4)
    place.lose(OTHER)
    assert not place.progress.left_behind


def test_how_long_a_peer_takes_for_a_step_is_known_from_what_its_training_thread_says() -> None:
    place, told = Place(0, 0), list[float]()
    for steps, at, phase in (
        (0, 0.0, Status.TRAINING),
        (1, 5.0, Status.TRAINING),  # the first step may have waited for much else
        (3, 6.0, Status.TRAINING),
        (3, 9.0, Status.PAUSED),
        (3, 16.0, Status.TRAINING),  # a rest is no step
        (4, 17.0, Status.TRAINING),
    ):
        place.progress.show(LocalProgress(phase, 0.1 * steps, at, steps))
        told.append(place.progress.views()[PeerId("me")].step_s)
    assert told == [0.0, 0.0, 0.5, 0.5, 0.5, 1.0]


def test_who_is_done_waits_for_a_peer_that_only_others_hear() -> None:
    """It left, the other peer had its last work counted, and two states were at the end (seed 18)."""
    place = Place(3, 3)
    place.progress.local = LocalProgress(phase=Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(OTHER, Status.DRAINING, 3, 3)
    assert not place.progress.settled
    assert place.progress.status().settled  # of those that we hear, we say so: nobody waits for us
    place.hear(OTHER, Status.DRAINING, 4, 3)
    assert not place.progress.status().settled
    place.move(4, 3)
    assert place.progress.status().settled
    place.hear(OTHER, Status.DRAINING, 4, 3, settled=True)
    assert place.progress.settled
    place.hear(NEWCOMER, Status.TRAINING, 4, 3)
    assert not place.progress.settled


def test_who_is_done_sees_whether_somebody_still_joins() -> None:
    place = Place(3, 3)
    place.progress.show(LocalProgress(phase=Status.DRAINING, finished=frozenset({0, 1})))
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    assert place.progress.settled
    assert not place.progress.newcomers
    place.hear(NEWCOMER, Status.JOINING, 3, 0)
    assert place.progress.settled  # it has no word in what the others agree on
    assert place.progress.newcomers
    came_at = place.progress.newcomer_at
    assert came_at == place.now
    place.hear(NEWCOMER, Status.JOINING, 3, 0)
    place.hear(PeerId("another"), Status.DRAINING, 3, 3, settled=True)
    assert place.progress.newcomer_at == came_at
    place.lose(NEWCOMER)
    assert not place.progress.newcomers


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize(("settled", "newcomers"), [(False, False), (True, False), (True, True)])
def test_when_the_run_is_over_a_peer_stays_while_it_is_needed(
    moves: bool, counts: bool, is_new: bool, differs: bool, settled: bool, newcomers: bool
) -> None:
    """By what moves, and by the votes of others that it counts: one that left then ended a version behind.
    Where all agree only somebody who still joins may need it; who came just now has asked for nothing yet."""
    place, asked = Place(3, 3), list[tuple[float, float]]()

    def say(answer: bool, now: float, within_s: float) -> bool:
        asked.append((now, within_s))
        return answer

    place.node.catchup.moves = partial(say, moves)
    place.node.rounds = SimpleNamespace(counts_for_others=partial(say, counts))
    place.now = 100.0
    place.progress.newcomers = newcomers
    within_s = 7.0 * (NEWCOMERS_WAIT if settled else 1.0)  # a donor's silence must be found out
    place.progress.newcomer_at = place.now - within_s - (0.0 if is_new else 0.1)
    place.progress._differed_at = place.now - (7.0 if differs else 7.1)
    expected = newcomers and (moves or is_new) if settled else moves or counts or differs
    assert place.progress.is_needed(7.0, settled) == expected
    assert set(asked) <= {(place.now, within_s)}


def test_where_all_agree_a_newcomer_of_another_cell_is_waited_for_while_it_is_given_something() -> None:
    place, asked = Place(3, 3), list[tuple[float, float]]()
    place.node.catchup.moves = lambda now, within_s: True
    place.node.rounds = SimpleNamespace(counts_for_others=lambda now, within_s: False)

    def takers(now: float, within_s: float) -> list[PeerId]:
        asked.append((now, within_s))
        return [OTHER, NEWCOMER]

    place.node.catchup.donor.takers = takers
    assert not place.progress.is_needed(7.0, settled=True)  # both are of our cell, and neither joins
    far, outlook = place.node.far, place.node.far.outlook
    far.cells, far.cell = 1 << 16, cell_of(OTHER, 1 << 16)
    assert place.progress.is_needed(7.0, settled=True)
    assert set(asked) == {(place.now, 7.0 * NEWCOMERS_WAIT)}
    there = cell_of(NEWCOMER, far.cells)  # it has joined by now, and may take something once more
    assert there != far.cell
    held = (3, 3), (b"3" * 32,) * 2
    outlook.words = {there: CellWord(there, False, True, 7.0, *held, frozenset(), (NEWCOMER,), place.now)}
    assert not place.progress.is_needed(7.0, settled=True)


def test_who_went_without_a_word_before_a_newcomer_had_their_state_may_be_back() -> None:
    """It left after half a minute, and they were only out of reach (storms 200046 and 200135 as drawn)."""
    place, told = Place(0, 0), list[str]()
    place.node.report = lambda kind, text: told.append(text)
    place.hear(OTHER, Status.TRAINING, 3, 3)
    place.lose(OTHER)
    assert place.progress.left_behind
    assert not place.progress.may_be_back
    place.hear(OTHER, Status.TRAINING, 3, 3)
    assert not place.progress.left_behind
    place.node.membership.unreachable(OTHER, "no answer to keepalive", place.now)
    assert place.progress.heard  # until it is concluded what that means
    for _ in range(30):  # longer than it is remembered who went
        place.conclude()
        assert place.progress.left_behind
        assert place.progress.may_be_back
        assert not place.progress.heard
    assert told == [WAITS_FOR_THEIR_STATE]
    place.hear(NEWCOMER, Status.JOINING, 0, 0)
    place.lose(NEWCOMER)  # which had nothing to give
    assert place.progress.may_be_back
    place.now += 10.0
    place.hear(OTHER, Status.TRAINING, 4, 4)
    assert not place.progress.may_be_back
    place.node.membership.unreachable(OTHER, "connection reset", place.now)
    place.conclude()
    assert place.progress.may_be_back
    place.lose(OTHER)  # its goodbye came after its link had broken
    assert not place.progress.may_be_back


@pytest.mark.parametrize(("goodbyes", "broken", "phase", "may_be_back"), [
    (0, 1, Status.TRAINING, True), (1, 4, Status.TRAINING, False), (1, 5, Status.TRAINING, True),
    (0, 3, Status.DRAINING, False),
])  # fmt: skip
def test_of_many_that_went_few_need_have_said_goodbye(
    goodbyes: int, broken: int, phase: Status.Phase, may_be_back: bool
) -> None:
    """Where all end at once, links break before the goodbyes come. Who was done has ended; and a newcomer
    that goes says nothing of the others."""
    place = Place(0, 0)
    place.node.report = lambda kind, text: None
    peers = [PeerId(f"peer {number}") for number in range(goodbyes + broken)]
    for peer in peers:
        place.hear(peer, phase, 3, 3)
    place.hear(NEWCOMER, Status.JOINING, 0, 0)
    for peer in peers[:goodbyes]:
        place.lose(peer)
    for peer in [*peers[goodbyes:], NEWCOMER]:
        place.node.membership.unreachable(peer, "connection reset", place.now)
    place.conclude()
    assert place.progress.left_behind
    assert place.progress.may_be_back is may_be_back


@pytest.mark.parametrize("settled", [False, True])
def test_a_newcomer_with_a_cell_to_itself_is_left_behind_when_the_other_cells_go(settled: bool) -> None:
    place = Place(0, 0)
    place.node.report = lambda kind, text: None
    far, outlook = place.node.far, place.node.far.outlook
    far.cells = outlook.cells = 2
    word = CellWord(1, not settled, settled, 7.0, (3, 2), (b"3" * 32, b"2" * 32), frozenset(), (OTHER,), 1.0)
    outlook.words = {1: word}
    far.conclude = lambda now: None
    place.node.rounds = SimpleNamespace(is_over=lambda fragment: False, made_by=lambda fragment: frozenset())
    place.hear(PeerId("liar"), Status.JOINING, 9, 9)  # it says so, and holds nothing
    place.lose(PeerId("liar"))
    place.conclude()
    assert place.progress.met
    assert not place.progress.abreast
    assert not place.progress.left_behind
    place.now += 1000.0  # nothing was heard of them since
    assert place.progress.heard  # until it is concluded what that means: else it would train alone
    place.conclude()
    assert not place.progress.heard
    assert not place.progress.abreast
    assert place.progress.left_behind
    assert place.progress.may_be_back is not settled
    place.move(3, 2)
    assert not place.progress.left_behind
    assert place.progress.abreast


def test_who_is_done_stays_for_a_while_after_all_came_to_hold_the_same() -> None:
    """Looks at another cell may be lost: who left at the first moment was not there when it went on."""
    place = Place(3, 3)
    place.node.catchup.moves = lambda now, within_s: False
    place.node.rounds = SimpleNamespace(counts_for_others=lambda now, within_s: False)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(OTHER, Status.DRAINING, 3, 4)
    place.hear(OTHER, Status.DRAINING, 3, 3)
    place.now += 29.0
    assert place.progress.is_needed(30.0)
    place.now += 2.0
    assert not place.progress.is_needed(30.0)


@pytest.mark.parametrize("phase", [Status.JOINING, Status.PAUSED, Status.DRAINING])
@pytest.mark.parametrize("told", [Status.TRAINING, Status.DRAINING, Status.JOINING])
@pytest.mark.parametrize(
    ("versions", "digests"), [((9, 9, 9), 3), ((9,), 1), ((9, 9), 0), ((), 0), ((9,) * 256, 0)]
)
def test_words_of_more_or_fewer_fragments_than_the_run_has_count_for_nothing(
    phase: Status.Phase, told: Status.Phase, versions: tuple[int, ...], digests: int
) -> None:
    """They ended the node of whoever joined, rested or was done."""
    place = Place(3, 3)
    place.progress.local = LocalProgress(phase, finished=frozenset({0, 1}))
    for peer in (OTHER, NEWCOMER):
        status = Status(phase=told, versions=versions, digests=[bytes([9]) * 32] * digests)
        place.node.membership.receive(Ping(nonce=1, sent_at=place.now, status=status), peer, place.now)
        place.conclude()
        place.node.catching.apart.where_to(0, place.now)
    for peer in (OTHER, NEWCOMER):
        place.lose(peer)
        place.node.catching.apart.where_to(0, place.now)
    assert place.progress.missing() == ""


def test_who_is_done_stays_while_not_all_hold_the_same() -> None:
    """A cell that was behind asked the few donors that it knew, which gave to newcomers of their own: after
    half a minute in which nothing came it left, and half of forty ended without eight rounds. And on ways of
    10 kB/s half a minute passed between two chunks, so that the only donor left."""
    place = Place(3, 3, rounds=8)
    place.progress.rounds_per_s = 0.01
    place.node.catchup.moves = lambda now, within_s: False
    place.node.rounds = SimpleNamespace(
        counts_for_others=lambda now, within_s: False,
        is_over=lambda fragment: False,
        made_by=lambda fragment: frozenset(),
    )
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))

    def is_needed() -> bool:
        place.conclude()
        place.now += 1000.0  # nobody has been in a round of late
        return place.progress.is_needed(30.0)

    for versions, expected in (((3, 3), False), ((3, 4), True), ((2, 3), True)):
        place.hear(OTHER, Status.DRAINING, *versions)
        assert is_needed() is expected
    for phase in (Status.TRAINING, Status.PAUSED, Status.JOINING):  # it has long to go, or begins
        place.hear(OTHER, phase, 2, 3)
        assert not is_needed()
    place.hear(OTHER, Status.DRAINING, 3, 4)
    place.lose(OTHER)
    assert not is_needed()
    assert "fragment 1: version 3 of 4" in place.progress.missing()  # though nobody is left who has it

    far, outlook = place.node.far, place.node.far.outlook
    far.cells = outlook.cells = 2
    far.conclude = lambda now: None
    held, digests = (3, 3), (bytes([3]) * 32,) * 2
    for trains, settled, versions, position, expected in (
        (False, True, held, 7.0, False),
        (False, True, (3, 5), 7.0, True),
        (False, False, held, 7.0, True),  # it is not done with its last rounds
        (True, False, held, 7.0, False),  # it is yet to come to the run's end
        (True, False, held, 8.1, True),
        (True, False, held, 9.1, False),  # as of who trains in our cell: it is in a long step
    ):
        word = CellWord(1, trains, settled, position, versions, digests, frozenset(), (OTHER,), place.now)
        outlook.words = {1: word}
        assert is_needed() is expected
        assert not expected or place.progress.conclude_at() < place.now  # it may go without a word
    assert not is_needed()


@pytest.mark.parametrize("phase", [Status.DRAINING, Status.TRAINING])
def test_when_the_run_is_over_a_peer_stays_while_another_is_in_a_last_round(phase: Status.Phase) -> None:
    """Of three on slow lines one had nothing more to offer, and left as the two others' round had all but
    committed. One that is yet to come to the run's end may be slow, and holds nobody."""
    place, other = Place(3, 3, rounds=8), PeerId("other")
    place.node.catchup.moves = lambda now, within_s: False
    place.node.rounds = SimpleNamespace(counts_for_others=lambda now, within_s: False)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))

    def hear(position: float, finished: bytes, phase: Status.Phase = phase) -> None:
        digests = [bytes([3]) * 32] * 2
        status = Status(
            phase=phase, versions=(3, 3), digests=digests, finished=finished, position=position
        )  # fmt: skip
        place.node.membership.receive(Ping(nonce=1, sent_at=place.now, status=status), other, place.now)
        place.conclude()

    hear(7.0, b"", Status.TRAINING)
    assert not place.progress.is_needed(30.0)
    place.now += 1.0
    place.conclude()  # without a word: by the clock it is at 7.75, then at 8.0
    assert not place.progress.is_needed(30.0)
    place.conclude()
    assert place.progress.is_needed(30.0)
    place.now += 4.0
    place.conclude()  # at 9.25, with nothing finished: it is in a long step
    place.now += 31.0
    assert not place.progress.is_needed(30.0)
    hear(8.0, b"")
    assert place.progress.is_needed(30.0)
    hear(8.0, b"\x01")
    place.now += 500.0
    place.conclude()
    assert place.progress.is_needed(30.0)
    assert not place.progress.is_needed(30.0, settled=True)
    hear(8.0, b"\x03", Status.DRAINING)
    place.now += 30.0
    assert place.progress.is_needed(30.0)  # it may have to load what came of that
    place.now += 1.0
    assert not place.progress.is_needed(30.0)


@pytest.mark.parametrize(
    ("rounds", "phase"), [(8, Status.DRAINING), (8, Status.TRAINING), (0, Status.TRAINING)]
)
def test_who_is_far_past_the_end_and_has_finished_nothing_is_awaited_only_if_it_trains_no_more(
    rounds: int, phase: Status.Phase
) -> None:
    """One that hung in a step held all others for ten minutes. Nor does a run without an end have any."""
    place = Place(3, 3, rounds=rounds)
    place.node.catchup.moves = lambda now, within_s: False
    place.node.rounds = SimpleNamespace(counts_for_others=lambda now, within_s: False)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    status = Status(phase=phase, versions=(3, 3), digests=[bytes([3]) * 32] * 2, position=9.5)
    place.node.membership.receive(Ping(nonce=1, sent_at=place.now, status=status), OTHER, place.now)
    place.conclude()
    assert place.progress.is_needed(30.0) == (phase == Status.DRAINING)


def test_who_trains_no_more_stands_still_on_the_clock() -> None:
    """Else whoever offers the last of its work over a slow line looked like one that hangs in a step."""
    place = Place(3, 3, rounds=8)
    for is_over, last, position in ((False, 8.0, 8.5), (True, 8.0, 8.0), (True, 9.5, 8.0), (True, 7.5, 7.5)):
        place.progress.show(LocalProgress(Status.TRAINING, last, place.now, is_over=is_over))
        place.now += 2.0
        assert place.progress.position() == position


def test_when_the_run_is_over_a_peer_stays_while_it_is_in_a_last_round_itself() -> None:
    place = Place(3, 3)
    place.node.catchup.moves = lambda now, within_s: False
    place.node.rounds = SimpleNamespace(counts_for_others=lambda now, within_s: False)
    for finished in (frozenset({0}), frozenset({0, 1})):
        place.progress.local = LocalProgress(Status.DRAINING, finished=finished)
        place.conclude()
        place.now += 20.0
        assert place.progress.is_needed(15.0) == (finished == {0})


def test_who_leaves_without_what_others_held_can_say_what_it_lacks() -> None:
    """Also when they are gone by then, and those who are left agree; not what nobody can have held, nor what
    a newcomer says, or who came back to us."""
    place, rest = Place(3, 3), (PeerId("another"), PeerId("third"))
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    assert place.progress.missing() == ""
    place.hear(NEWCOMER, Status.JOINING, 9, 9)
    place.hear(OTHER, Status.DRAINING, 3, 5)
    assert LACKS in place.progress.missing()
    assert "(fragment 1: version 3 of 5)" in place.progress.missing()
    for peer in (NEWCOMER, OTHER):
        place.lose(peer)
    assert "(fragment 1: version 3 of 5)" in place.progress.missing()
    for peer in rest:
        place.hear(peer, Status.DRAINING, 3, 3)
    assert "(fragment 1: version 3 of 5)" in place.progress.missing()
    place.hear(OTHER, Status.JOINING, 3, 5)
    assert place.progress.missing() == ""
    place.hear(OTHER, Status.DRAINING, 4, 250)
    assert "(fragment 0: version 3 of 4)" in place.progress.missing()  # nobody can be there
    place.hear(OTHER, Status.DRAINING, 4, 5)
    assert "(fragment 0: version 3 of 4, fragment 1: version 3 of 5)" in place.progress.missing()
    place.move(4, 5)
    assert place.progress.missing() == ""


def test_who_comes_when_the_run_is_over_is_not_done_before_it_has_heard_all_who_are_listed() -> None:
    """Two that were restarted then took each other for the whole swarm (seed 13 of the storms over cells)."""
    place = Place(0, 0)
    place.node.membership.found([OTHER, NEWCOMER], place.now)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(NEWCOMER, Status.DRAINING, 0, 0, settled=True)
    assert not place.progress.settled
    place.hear(OTHER, Status.TRAINING, 0, 0)
    assert not place.progress.settled
    place.hear(OTHER, Status.DRAINING, 0, 0, settled=True)
    assert place.progress.settled


def test_one_that_is_listed_and_never_heard_holds_nobody_up_for_long() -> None:
    place = Place(0, 0)
    place.node.membership.found([OTHER, NEWCOMER], place.now)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(NEWCOMER, Status.DRAINING, 0, 0, settled=True)
    assert not place.progress.settled
    place.now += LISTENED_S
    place.conclude()
    assert place.progress.settled


def test_conclusions_are_drawn_sooner_among_few() -> None:
    """A run of four ended 0.4 s after its last round, with everybody standing still."""
    waits_s = []
    for others in (1, 100):
        place = Place(3)
        place.progress.local = LocalProgress(phase=Status.DRAINING, finished=frozenset({0, 1}))
        for index in range(others):
            place.hear(PeerId(f"peer {index:03}"), Status.DRAINING, 3)
        assert place.progress.conclude_at() == float("inf")  # it would say the same
        status = Status(phase=Status.DRAINING, versions=[4], digests=[bytes([4]) * 32])
        ping = Ping(nonce=1, sent_at=place.now, status=status)
        place.node.membership.receive(ping, PeerId("peer 000"), place.now)
        waits_s.append(place.progress.conclude_at() - place.now)
    assert waits_s == [pytest.approx(0.005), 0.25]


def test_who_only_waits_for_time_to_pass_looks_seldom() -> None:
    """Alone beside a peer that the DHT lists, it looked a thousand times a second."""
    place = Place(3)
    place.progress.local = LocalProgress(phase=Status.DRAINING, finished=frozenset({0, 1}))
    place.node.membership.found([OTHER], place.now)
    for _ in range(3):
        place.conclude()
        assert place.progress.conclude_at() - place.now == 0.25
    place.now += LISTENED_S
    place.conclude()
    assert place.progress.conclude_at() == float("inf")


def test_who_is_done_waits_for_the_last_offer_of_another() -> None:
    """It may commit when all others seem to be done: who left before missed it (storm 45)."""
    place = Place(3, 3)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(PeerId("a"), Status.DRAINING, 3, 3, settled=True)
    assert place.progress.settled
    status = Status(phase=Status.DRAINING, versions=(3, 3), digests=[bytes([3]) * 32] * 2, finished=b"\x01")
    place.node.membership.receive(Ping(nonce=1, sent_at=place.now, status=status), PeerId("a"), place.now)
    place.conclude()
    assert not place.progress.settled


def test_one_whose_own_last_offer_ends_when_it_is_alone_need_not_be_told_anything() -> None:
    """Nobody else has news then: it stood still until its time was over."""
    place = Place(3, 3)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0}))
    place.conclude()
    assert not place.progress.settled  # it would miss what its own offer comes to
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    assert place.progress.conclude_at() < float("inf")
    place.conclude()
    assert place.progress.settled


@pytest.mark.parametrize(
    ("round_s", "is_hurried"), [(10.0, True), (15.0, True), (60.0, False), (math.inf, False)]
)
def test_other_cells_are_looked_at_quickly_while_rounds_are_short(round_s: float, is_hurried: bool) -> None:
    """A cell that was late for a round saw what the others had made five seconds later, and came too late
    to the next one, too: of eight cells two stayed out of one fragment's rounds of 10 s to the end."""
    node: Any = SimpleNamespace(
        me=PeerId("me"),
        identity=SimpleNamespace(sign=lambda context, data: b"secret"),
        membership=SimpleNamespace(quiet_s=0.0, live={}),
        progress=SimpleNamespace(local=LocalProgress(Status.TRAINING), rests=False, rounds_per_s=1 / round_s),
        catching=SimpleNamespace(has_heard=False),
        rounds=SimpleNamespace(set_other_cells=lambda versions, finished: None),
    )
    far = Far(node, 2, cast(Any, None))
    far.conclude(0.0)
    assert far.outlook.hurry == is_hurried
