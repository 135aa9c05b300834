"""Catching up beside a donor that does not lie in its bytes but in what it says of itself: it may cost time,
by a bound, and never the state."""

from __future__ import annotations

from p2p_co2.catchup import (
    STATE,
    CatchUp,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    chunk_at,
    chunk_count,
    chunk_digest,
)
from p2p_co2.catchup.goals import CatchUpMessage
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Fetch, Refusal
from tests.test_catchup import D1, DONORS, IDENTITIES, LATE, RUN, SHAPE, World, state_of


def test_a_donor_that_names_ever_another_fragment_does_not_keep_us_from_loading_any() -> None:
    world, asked = World(donors=3), [0]

    def beckon(sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        """The liar answers at once, before the honest donors' manifests can be here."""
        if sender == D1:
            return None
        if isinstance(message, Fetch) and not message.want_chunk:
            asked[0] += 1
            if asked[0] < 2000:
                lie = Refusal(
                    request=message.request, reason="busy", again=True, serving=4 - message.fragment
                )
                world._send(D1, LATE, lie)
        return message

    world.tamper = beckon
    world.want(1)
    world.want(2)
    world.run(60.0, enough=2)
    assert [type(event) for event in world.events if isinstance(event, Fetched | FetchFailed)] == [
        Fetched
    ] * 2
    assert asked[0] < 100


def test_asking_for_one_state_after_the_other_does_not_keep_the_tensor_side_busy() -> None:
    donor = CatchUp(IDENTITIES[1], RUN, SHAPE)
    for fragment in range(3):
        donor.moved(fragment, 7)
    data = state_of(1, 7)
    digests = [chunk_digest(data[chunk_at(i, len(data))]) for i in range(chunk_count(len(data)))]
    busy_s, done_at, exporting = 0.0, 0.0, -1
    for tick in range(2000):  # ten questions a second; an export takes half of one
        now = 10.0 + tick / 10
        donor.receive(Fetch(what=STATE, fragment=1 + tick % 2, version=1, request=tick), LATE, now)
        donor.handle_timer(now)
        donor.messages_to_send()
        if exporting < 0 and isinstance(event := donor.next_event(), ExportWanted):
            exporting, done_at = event.fragment, now + 0.5
        if exporting >= 0 and now >= done_at:
            donor.exported(exporting, 7, data, bytes(32), digests, now)
            busy_s, exporting = busy_s + 0.5, -1
    assert 10.0 < busy_s <= 200.0 / 4 + 1.0


def test_a_version_that_nobody_has_is_given_up_soon() -> None:
    world = World(donors=3)
    goal = Goal(STATE, 1, 10_000, tuple(DONORS[:3]))
    world.machines[LATE].want(goal, world.now)
    began_at = world.now
    world.run(300.0)
    assert isinstance(world.events[-1], FetchFailed)
    assert world.events[-1].newest_version == 7
    assert world.now - began_at < 15.0
