"""What a peer concludes from heartbeats while it joins, and when its run is over: by hand."""

from __future__ import annotations

import pytest
from hearing_peer import ALL_FINISHED, DONE, ME, NEWCOMER, OTHER, Place

from p2p_co2.node.progress import LACKS, LISTENED_S, Where
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.catchup import policy
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_MEMBERS
from p2p_co2.wire.messages_pb2 import Status

# ---- joins


def test_a_newcomer_whose_donors_all_go_is_left_behind() -> None:
    place = Place(0, 0)
    place.hear(OTHER, Status.TRAINING, 3, 3)
    assert place.where is not Where.LEFT_BEHIND
    place.move(3, 0)
    place.lose(OTHER)
    assert place.where is Where.LEFT_BEHIND
    place.hear(NEWCOMER, Status.JOINING, 0, 0)  # one who has no more than we have is no help
    assert place.where is Where.LEFT_BEHIND
    place.hear(OTHER, Status.TRAINING, 4, 4)  # one who has is
    assert place.where is not Where.LEFT_BEHIND
    place.move(4, 3)
    place.lose(OTHER)
    assert place.where is Where.ABREAST


def test_who_joins_when_the_run_is_over_wants_its_last_version() -> None:
    place = Place(3, 3)
    place.hear(OTHER, Status.TRAINING, 4, 3)
    assert place.where is Where.ABREAST  # the next rounds bring the rest
    place.hear(OTHER, Status.DRAINING, 4, 3)
    assert place.where is not Where.ABREAST
    place.lose(OTHER)
    assert place.where is Where.LEFT_BEHIND


def test_one_that_was_far_ahead_of_many_and_went_leaves_nobody_behind() -> None:
    place = Place(0, 0)
    place.hear(NEWCOMER, Status.JOINING, 0, 0)
    place.hear(PeerId("another newcomer"), Status.JOINING, 0, 0)
    place.hear(OTHER, Status.TRAINING, 9, 9)
    place.lose(OTHER)
    assert place.where is not Where.LEFT_BEHIND
    assert place.where is Where.ABREAST


def test_a_newcomer_sees_that_a_run_has_as_many_peers_as_it_can_have() -> None:
    place = Place(0, 0)
    for number in range(MAX_MEMBERS):
        assert place.where is not Where.NO_ROOM
        place.hear(PeerId(f"peer {number}"), Status.TRAINING, 0, 0)
    assert place.where is Where.NO_ROOM
    place.lose(PeerId("peer 0"))
    assert place.where is not Where.NO_ROOM


@pytest.mark.parametrize("phase", [Status.JOINING, Status.PAUSED, Status.DRAINING])
@pytest.mark.parametrize("told", [Status.TRAINING, Status.DRAINING, Status.JOINING])
@pytest.mark.parametrize(
    ("versions", "digests"), [((9, 9, 9), 3), ((9,), 1), ((9, 9), 0), ((), 0), ((9,) * 256, 0)]
)
def test_words_of_more_or_fewer_fragments_than_the_run_has_count_for_nothing(
    phase: Status.Phase, told: Status.Phase, versions: tuple[int, ...], digests: int
) -> None:
    place = Place(3, 3)
    place.state.show(LocalProgress(phase, finished=frozenset({0, 1})))
    for peer in (OTHER, NEWCOMER):
        place.say(peer, Status(phase=told, versions=versions, digests=[bytes([9]) * 32] * digests))
        policy.decide(*place.agreement.at(0), replayable=True)
    for peer in (OTHER, NEWCOMER):
        place.lose(peer)
        policy.decide(*place.agreement.at(0), replayable=True)
    assert place.progress.missing() == ""


# ---- tells


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
        place.state.show(LocalProgress(phase, 0.1 * steps, at, steps))
        told.append(place.writer.views()[ME].step_s)
    assert told == [0.0, 0.0, 0.5, 0.5, 0.5, 1.0]


def test_who_trains_no_more_stands_still_on_the_clock() -> None:
    place = Place(0, 0, rounds=5)
    for last, is_over, position in ((3.0, False, 3.5), (3.0, True, 3.0), (5.2, True, 5.0)):
        place.state.show(LocalProgress(Status.TRAINING, last, place.now, is_over=is_over))
        place.now += 2.0
        assert place.writer.position() == position


# ---- is done


def test_who_is_done_waits_for_a_peer_that_only_others_hear() -> None:
    place = Place(3, 3)
    place.state.show(DONE)
    place.hear(OTHER, Status.DRAINING, 3, 3)
    assert not place.progress.settled
    assert place.writer.status().settled  # of those that we hear, we say so: nobody waits for us
    place.hear(NEWCOMER, Status.TRAINING, 3, 3)
    assert not place.writer.status().settled
    place.hear(NEWCOMER, Status.DRAINING, 3, 3, settled=True)
    assert place.writer.status().settled
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    assert place.progress.settled
    place.state.move(0, place.state.agreed[1], None)  # nothing new
    assert place.progress.settled
    place.state.move(0, Place(4).state.agreed[0], None)  # nothing is concluded of it yet
    assert not place.progress.settled
    place.conclude()
    assert not place.progress.settled


@pytest.mark.parametrize(
    ("phase", "versions", "finished"),
    [
        (Status.DRAINING, (3, 3), b"\1"),
        (Status.TRAINING, (3, 3), b""),
        (Status.DRAINING, (3, 4), ALL_FINISHED),
    ],
)
def test_who_is_done_waits_for_who_trains_or_has_more_to_offer_or_holds_another_state(
    phase: Status.Phase, versions: tuple[int, int], finished: bytes
) -> None:
    place = Place(3, 3)
    place.state.show(DONE)
    place.hear(OTHER, phase, *versions, settled=True, finished=finished)
    assert not place.progress.settled
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    assert place.progress.settled


def test_who_is_done_waits_for_what_it_fetches_and_offers_itself() -> None:
    place = Place(3, 3)
    place.state.show(LocalProgress(Status.DRAINING, finished=frozenset({0})))
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    assert not place.progress.settled
    place.busy = True
    place.state.show(DONE)
    place.conclude()
    assert not place.progress.settled
    place.busy = False
    assert place.progress.conclude_at() < float("inf")
    place.conclude()
    assert place.progress.settled


def test_who_comes_when_the_run_is_over_is_not_done_before_it_has_heard_all_who_are_listed() -> None:
    for is_heard in (True, False):
        place = Place(3, 3, listed=(OTHER, NEWCOMER))
        place.state.show(DONE)
        place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
        assert not place.progress.settled
        if is_heard:
            place.hear(NEWCOMER, Status.DRAINING, 3, 3, settled=True)
        else:  # one that is never heard holds nobody up for long
            place.now += LISTENED_S
            place.conclude()
        assert place.progress.settled


def test_when_the_run_is_over_a_peer_stays_while_anybody_differs() -> None:
    place = Place(3, 3)
    place.state.show(DONE)
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    place.now += 100.0
    assert not place.progress.is_needed(30.0)
    for phase, versions, finished in (
        (Status.JOINING, (0, 0), b""),
        (Status.DRAINING, (3, 4), ALL_FINISHED),
        (Status.DRAINING, (3, 3), b"\2"),
    ):
        place.hear(NEWCOMER, phase, *versions, finished=finished)
        place.now += 100.0
        assert place.progress.is_needed(30.0), phase
        place.lose(NEWCOMER)
        assert place.progress.is_needed(30.0)  # a moment ago
        place.now += 31.0
        assert not place.progress.is_needed(30.0)
    place.hear(NEWCOMER, Status.TRAINING, 1, 1)  # it may train on for long
    place.now += 31.0
    assert not place.progress.is_needed(30.0)
    place.moves = True
    assert place.progress.is_needed(30.0)


def test_where_all_have_settled_a_peer_stays_for_who_joins_and_goes_at_once_when_that_is_over() -> None:
    place = Place(3, 3)
    place.state.show(DONE)
    place.hear(OTHER, Status.DRAINING, 3, 3, settled=True)
    place.hear(NEWCOMER, Status.JOINING, 0, 0)
    assert place.progress.settled  # it has no word in what the others agree on
    assert place.progress.is_needed(30.0, settled=True)
    place.lose(NEWCOMER)
    place.moves = True
    assert not place.progress.is_needed(30.0, settled=True)


def test_who_leaves_without_what_others_held_can_say_what_it_lacks() -> None:
    place = Place(3, 3)
    place.state.show(DONE)
    place.hear(OTHER, Status.DRAINING, 3, 3)
    assert place.progress.missing() == ""
    place.hear(OTHER, Status.DRAINING, 3, 5)
    place.lose(OTHER)
    assert LACKS in place.progress.missing()
    assert "(fragment 1: version 3 of 5)" in place.progress.missing()
    place.hear(OTHER, Status.DRAINING, 3, 5)
    place.hear(NEWCOMER, Status.DRAINING, 200, 3)  # nobody can be there
    assert "fragment 0" not in place.progress.missing()
    place.move(3, 5)
    assert place.progress.missing() == ""


def test_conclusions_are_drawn_sooner_among_few_and_seldom_for_who_waits_for_time() -> None:
    waits_s = []
    for count in (2, 20):
        place = Place(3, 3)
        place.state.show(DONE)
        for number in range(count):
            place.hear(PeerId(f"peer {number:03}"), Status.DRAINING, 3, 3)
        assert place.progress.conclude_at() == float("inf")  # it would say the same
        place.membership.unreachable(PeerId("peer 000"), "gone", place.now)
        waits_s.append(place.progress.conclude_at() - place.now)
    assert waits_s == pytest.approx([1 / 200, 19 / 200])
    place = Place(3, 3, listed=(OTHER,))
    place.state.show(DONE)
    place.conclude()
    assert place.progress.conclude_at() - place.now == 0.25


def test_a_told_position_that_no_commit_bears_out_moves_the_clock_little() -> None:
    """Two of four that say "round 10^9" ended a run of 100 rounds at its sixth."""
    place = Place(6, 6, rounds=100)
    place.state.show(LocalProgress(Status.TRAINING, 6.2, place.now))
    for peer, position in ((OTHER, 6.5), (NEWCOMER, 1e9), (PeerId("another"), 1e9)):
        place.say(peer, Status(phase=Status.TRAINING, versions=(6, 6), position=position))
    assert place.progress.swarm_position is not None
    assert place.progress.swarm_position[0] < 16
    place.state.counts = lambda peer: peer == OTHER  # whose work was in a mean
    for _ in range(3):
        place.conclude()
    assert place.progress.swarm_position[0] == pytest.approx(6.5 + 0.25 * 5, abs=1.0)


def test_what_is_borne_out_is_the_same_moment_of_a_round_and_an_end_is_believed() -> None:
    place = Place(80, 79, rounds=100)
    place.say(OTHER, Status(phase=Status.DRAINING, versions=(80, 79), position=100.0))
    assert place.progress.swarm_position is not None
    assert place.progress.swarm_position[0] == 100.0
    place = Place(8, 8, rounds=100)
    place.say(OTHER, Status(phase=Status.DRAINING, versions=(8, 8), position=60.75))
    assert place.progress.swarm_position is not None
    assert place.progress.swarm_position[0] == 17.75
