"""What a peer concludes from heartbeats while it joins and trains: by hand."""

from __future__ import annotations

import pytest
from hearing_peer import NEWCOMER, OTHER, Place

from p2p_co2.node.progress import (
    WAITS_FOR_THEIR_STATE,
    LocalProgress,
)
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import Ping, Status


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
        place.node.catching.majority.decide(0, replayable=True)
    for peer in (OTHER, NEWCOMER):
        place.lose(peer)
        place.node.catching.majority.decide(0, replayable=True)
    assert place.progress.missing() == ""


def test_a_newcomer_sees_that_a_run_has_as_many_peers_as_it_can_have() -> None:
    place = Place(0, 0)
    for number in range(MAX_MEMBERS):
        assert not place.progress.full
        place.hear(PeerId(f"peer {number}"), Status.TRAINING, 0, 0)
    assert place.progress.full
    place.lose(PeerId("peer 0"))
    assert not place.progress.full
