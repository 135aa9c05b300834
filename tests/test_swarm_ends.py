"""Until when a peer stays that is done, by the heartbeats that it hears: by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from hearing_peer import NEWCOMER, OTHER, Place

from p2p_co2.node.progress import (
    LACKS,
    LISTENED_S,
    NEWCOMERS_WAIT,
    LocalProgress,
)
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Ping, Status


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


def test_what_one_that_joins_sees_says_nothing_of_when_it_is_done() -> None:
    """It heard one other newcomer, joined as the run was over, and left at once with the start state, by what
    it had concluded as it joined (storm 9 with three rounds)."""
    place = Place(0, 0)
    place.hear(OTHER, Status.DRAINING, 0, 0, settled=True)
    assert place.progress.abreast
    assert not place.progress.settled
    place.progress.show(LocalProgress(phase=Status.TRAINING))
    place.progress.show(LocalProgress(phase=Status.DRAINING, finished=frozenset({0, 1})))
    assert not place.progress.settled
    place.conclude()
    assert place.progress.settled


def test_who_is_done_before_it_has_looked_for_others_waits_until_it_has() -> None:
    place = Place(3, 3)
    place.node.membership.candidates.has_looked = False
    place.progress.show(LocalProgress(phase=Status.DRAINING, finished=frozenset({0, 1})))
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    assert not place.progress.settled
    place.node.membership.found([OTHER], place.now)
    place.conclude()
    assert place.progress.settled


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
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize(("settled", "newcomers"), [(False, False), (True, False), (True, True)])
def test_when_the_run_is_over_a_peer_stays_while_it_is_needed(
    moves: bool, is_new: bool, differs: bool, settled: bool, newcomers: bool
) -> None:
    """By what moves. Where all agree only a peer that still joins may need it."""
    place, asked = Place(3, 3), list[tuple[float, float]]()

    def say(answer: bool, now: float, within_s: float) -> bool:
        asked.append((now, within_s))
        return answer

    place.node.catchup.moves = partial(say, moves)
    place.now = 100.0
    place.progress.newcomers = newcomers
    within_s = 7.0 * (NEWCOMERS_WAIT if settled else 1.0)  # a donor's silence must be found out
    place.progress.newcomer_at = place.now - within_s - (0.0 if is_new else 0.1)
    place.progress._differed_at = place.now - (7.0 if differs else 7.1)
    expected = newcomers and (moves or is_new) if settled else moves or differs
    assert place.progress.is_needed(7.0, settled) == expected
    assert set(asked) <= {(place.now, within_s)}


def test_who_is_done_stays_for_a_while_after_all_came_to_hold_the_same() -> None:
    """News may be lost: a peer that left at the first moment is not there when the others go on."""
    place = Place(3, 3)
    place.node.catchup.moves = lambda now, within_s: False
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(OTHER, Status.DRAINING, 3, 4)
    place.hear(OTHER, Status.DRAINING, 3, 3)
    place.now += 29.0
    assert place.progress.is_needed(30.0)
    place.now += 2.0
    assert not place.progress.is_needed(30.0)


def test_who_is_done_stays_while_not_all_hold_the_same() -> None:
    """On ways of 10 kB/s half a minute passes between two chunks: the only donor must not leave."""
    place = Place(3, 3, rounds=8)
    place.progress.rounds_per_s = 0.01
    place.node.catchup.moves = lambda now, within_s: False
    place.node.rounds = SimpleNamespace(is_over=lambda fragment: False)
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


@pytest.mark.parametrize("phase", [Status.DRAINING, Status.TRAINING])
def test_when_the_run_is_over_a_peer_stays_while_another_is_in_a_last_round(phase: Status.Phase) -> None:
    """Of three on slow lines one had nothing more to offer, and left as the two others' round had all but
    committed. One that is yet to come to the run's end may be slow, and holds nobody."""
    place, other = Place(3, 3, rounds=8), PeerId("other")
    place.node.catchup.moves = lambda now, within_s: False
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
    for finished in (frozenset({0}), frozenset({0, 1})):
        place.progress.local = LocalProgress(Status.DRAINING, finished=finished)
        place.conclude()
        place.now += 20.0
        assert place.progress.is_needed(15.0) == (finished == {0})


def test_who_leaves_while_others_make_a_round_beyond_its_own_says_that_it_lacks_that() -> None:
    """Of 32 on satellites, whose last round took longer than ten minutes, one had been left out of it (run
    2134 of ``benchmarks/ends.py wide``). What somebody who lags makes anew is nothing."""
    place = Place(3, 3)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))

    def hear(peer: PeerId, versions: tuple[int, int], finished: int) -> bool:
        digests = [bytes([version]) * 32 for version in versions]
        status = Status(
            phase=Status.DRAINING, versions=versions, digests=digests, finished=bytes([finished])
        )  # fmt: skip
        place.node.membership.receive(Ping(nonce=1, sent_at=place.now, status=status), peer, place.now)
        place.conclude()
        return "a last round that may still be made" in place.progress.missing()

    assert not hear(NEWCOMER, (3, 3), 1)  # one alone makes none that counts
    for versions, finished, lacks in (
        ((3, 3), 1, True), ((3, 3), 2, False), ((3, 2), 1, False), ((2, 4), 1, True), ((3, 99), 1, False),
        ((3, 3), 3, False),
    ):  # fmt: skip
        assert hear(OTHER, versions, finished) is lacks
    place.hear(OTHER, Status.DRAINING, 3, 3)
    assert place.progress.missing() == ""


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


def place_of_two_listed() -> Place:
    """Who comes when the run is over, and hears one of the two that the DHT lists."""
    place = Place(0, 0)
    place.node.membership.found([OTHER, NEWCOMER], place.now)
    place.progress.local = LocalProgress(Status.DRAINING, finished=frozenset({0, 1}))
    place.hear(NEWCOMER, Status.DRAINING, 0, 0, settled=True)
    assert not place.progress.settled
    return place


def test_who_comes_when_the_run_is_over_is_not_done_before_it_has_heard_all_who_are_listed() -> None:
    """Two that were restarted then took each other for the whole swarm ."""
    place = place_of_two_listed()
    place.hear(OTHER, Status.TRAINING, 0, 0)
    assert not place.progress.settled
    place.hear(OTHER, Status.DRAINING, 0, 0, settled=True)
    assert place.progress.settled


def test_one_that_is_listed_and_never_heard_holds_nobody_up_for_long() -> None:
    place = place_of_two_listed()
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
