"""What follows from the rounds machine's events on the tensor side; many were found by simulations."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from p2p_co2.digest import digest
from p2p_co2.node.commits import CommitHandler
from p2p_co2.node.outer_state import LedgerCalls, Offers
from p2p_co2.node.state import PAST_KEPT, Effects, PeerState
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, PartWeights, Reduced, SliceRefused, agreed_mean
from p2p_co2.protocol.rounds import FellBehind, Offer, PayloadShape, PeerView, ReduceWanted, Refused, Rounds
from p2p_co2.telemetry.events import ContributionCapped, RoundAborted
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import (
    Contributor,
    Decision,
    Member,
    Outcome,
    PartOutcome,
    RoundKey,
)
from tests.certificates import certify
from tests.round_network import RUN, Network, make_identity

SHAPE = PayloadShape(8, (4,))
START, THEIRS, MEAN = digest(b"start"), digest(b"theirs"), bytes(32)
ME = make_identity(0).peer_id
MEMBERS = sorted(make_identity(index).peer_id for index in (1, 2))
COORDINATOR = make_identity(3)
MINE = Offer(0, 5, 4, START, bytes(32), 1.0, offer_id=b"my offer")


class Ledger:
    """A tensor side that does what it is asked, and notes it; ``comes_to``: where a commit or a state
    leads."""

    def __init__(self, comes_to: AgreedVersion | None = None) -> None:
        self.comes_to = comes_to
        self.ended: list[tuple[int, bytes]] = []
        self.adopted: list[Any] = []

    async def commit(self, mean: AgreedMean) -> AgreedVersion:
        assert self.comes_to is not None
        return self.comes_to

    async def adopt(
        self, fragment: int, data: bytes, agreed: AgreedVersion, parts: Any, *how: bool
    ) -> AgreedVersion:
        self.adopted.append(parts)
        return agreed

    async def abort(self, fragment: int, offer_id: bytes) -> None:
        self.ended.append((fragment, offer_id))


class Place:
    """The parts of a node at version 4 of one fragment, beside a rounds machine that hears of ``live``."""

    def __init__(
        self, ledger: Any = None, live: Collection[PeerId] = (), rounds: Any = None, version: int = 4
    ) -> None:
        self.now = 1.0
        self.ledger = ledger or Ledger()
        self.told: list[tuple[Any, dict[str, Any]]] = []
        self.refused: list[tuple[str, str, str]] = []
        self.work: list[Any] = []
        self.rounds = rounds or Rounds(make_identity(0), RUN, SHAPE)
        if rounds is None:
            self.rounds.set_peers({peer: PeerView() for peer in live}, 1.0)
        self.state = PeerState(ME, [AgreedVersion(version, START)])
        do = Effects(
            lambda: self.now, lambda kind, **fields: self.told.append((kind, fields)), self.work.append,
            lambda *of: self.refused.append(of), self.pump,
        )  # fmt: skip
        self.offers = Offers(self.rounds, self.ledger, self.state, do)
        self.outer = LedgerCalls(self.ledger, self.state, self.rounds, cast(Any, Mock()), do)
        self.fetches = SimpleNamespace(go_to=lambda *where: True)
        self.commits = CommitHandler(
            self.rounds, self.ledger, self.outer, self.offers, cast(Any, self.fetches), RUN, SHAPE, Mock(), do
        )

    def pump(self) -> None:
        while isinstance(self.rounds, Rounds) and (event := self.rounds.next_event()) is not None:
            self.commits.handle(event)

    async def do(self) -> None:
        """What was spawned."""
        self.pump()
        for coroutine in self.work:
            await coroutine
        self.work.clear()


# ---- where this peer is


def test_who_must_act_on_a_new_state_is_told_once_and_not_of_what_is_none() -> None:
    state, told = PeerState(ME, [AgreedVersion(4, START)] * 2), list[tuple[int, AgreedVersion]]()
    state.when_moved(lambda *of: told.append(of))
    assert state.move(1, AgreedVersion(5, START), MEMBERS)
    assert not state.move(1, AgreedVersion(5, START), MEMBERS)
    assert told == [(1, AgreedVersion(5, START))]
    assert state.held == ((4, 5), (START, START))


def test_a_peer_remembers_a_bounded_past_and_none_of_a_state_that_it_loaded() -> None:
    state = PeerState(ME, [AgreedVersion(3, START)])
    for version in range(4, PAST_KEPT + 10):
        state.move(0, AgreedVersion(version, START), [ME])
    assert len(state.past(0)) == PAST_KEPT
    state.move(0, AgreedVersion(5, THEIRS), None)
    assert state.past(0) == {5: THEIRS}
    assert state.given_up[0] == PAST_KEPT + 6  # rounds that it had made alone


# ---- offers


async def test_a_state_that_is_ours_already_is_not_adopted_again() -> None:
    place = Place()
    await place.outer.adopt(0, b"", AgreedVersion(4, START))
    assert place.ledger.adopted == []


@pytest.mark.parametrize("going", [True, False])
async def test_an_offer_that_ended_for_what_is_to_be_fetched_is_ended_once_that_is_over(going: bool) -> None:
    place = Place()
    place.fetches.go_to = lambda *where: going
    place.offers.open(MINE)
    place.rounds.withdraw(0, "ended", 1.0)
    while place.rounds.next_event() is not None:
        pass
    place.commits.handle(FellBehind(0, 6, b"", (PeerId("donor"),), True))
    await place.do()
    assert place.ledger.ended == ([] if going else [(0, b"my offer")])
    for _ in range(2):
        place.offers.settle(0)
    await place.do()
    assert place.ledger.ended == [(0, b"my offer")]


async def test_an_open_offer_is_not_ended_by_what_was_fetched() -> None:
    place = Place(live=MEMBERS)
    place.offers.open(MINE)
    place.offers.settle(0)
    await place.do()
    assert place.ledger.ended == []


async def test_an_offer_that_a_state_replaced_does_not_end_the_next_one() -> None:
    place = Place(live=MEMBERS)
    place.offers.open(MINE)
    await place.outer.adopt(0, b"", AgreedVersion(4, THEIRS))
    await place.do()
    assert [kind for kind, _ in place.told] == [RoundAborted]
    assert place.ledger.ended == [(0, b"my offer")]
    place.offers.open(Offer(0, 5, 4, THEIRS, bytes(32), 2.0, offer_id=b"the next"))
    assert [offer.fragment for offer in place.rounds.open_offers()] == [0]


async def test_an_offer_upon_a_state_that_is_yet_to_come_waits_for_it() -> None:
    for digest_, ended in (
        (START, []),
        (THEIRS, [(0, b"my offer")]),
    ):  # or the peer went over to others' state
        place = Place(live=MEMBERS)
        place.offers.open(Offer(0, 6, 5, START, bytes(32), 1.0, offer_id=b"my offer"))
        await place.do()
        assert not place.rounds.open_offers()
        place.state.move(0, AgreedVersion(5, digest_), MEMBERS)
        await place.do()
        assert len(place.rounds.open_offers()) == (not ended)
        assert place.ledger.ended == ended


# ---- means and states


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_ledger_that_adopts_is_told_who_is_in_the_round_after_its_state(is_ours: bool) -> None:
    place = Place(live=[*MEMBERS, COORDINATOR.peer_id])
    if not is_ours:
        place.rounds.set_state(0, 4, THEIRS)
    place.rounds.receive(decision_of(MEMBERS), COORDINATOR.peer_id, 2.0)
    await place.outer.adopt(0, b"", AgreedVersion(9, bytes(32)))
    weights = PartWeights(0, 4, dict.fromkeys(MEMBERS, 1.0), dict.fromkeys(MEMBERS, bytes(8)))
    assert place.ledger.adopted == [(weights,) if is_ours else None]


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_slice_that_is_refused_is_counted_once_and_only_in_a_job_that_is_open(is_open: bool) -> None:
    """A job that was given to another owner may look into memory that is in use again."""
    jobs: list[ReduceWanted] = []

    class Refuses:
        async def reduce(self, fragment: int, slices: Any) -> Reduced:
            raise SliceRefused(liar, "not finite")

    net = Network(3)
    owner, liar = net.names[:2]
    net.on_reduce = lambda peer, job: bool(peer != owner or jobs.append(ReduceWanted(job)))
    net.offer_all()
    net.run(1.0)
    if not is_open:
        net.run_until_settled()  # nobody waits for this owner for ever
    place = Place(Refuses(), rounds=Mock())
    machine = net.peers[owner].machine
    place.rounds.refused_slice = machine.refused_slice
    place.commits.handle(jobs[0])
    place.now = net.now
    await place.do()
    while (event := machine.next_event()) is not None:
        if isinstance(event, Refused):
            place.commits.handle(event)
    assert place.refused == ([(liar, "bad slice", "not finite; fragment 0, round 1")] if is_open else [])


async def test_a_round_upon_a_state_that_was_exchanged_meanwhile_is_told_of() -> None:
    place = Place(Ledger(AgreedVersion(4, THEIRS)), rounds=Mock())
    decision = decision_of(MEMBERS)
    mean = agreed_mean(Outcome.FromString(decision.outcome), bytearray(MEAN))
    assert not await place.outer.take(mean, decision)
    assert "round 5 of fragment 0 is not applied here" in place.told[0][1]["text"]


@pytest.mark.parametrize(("before", "after", "is_known"), [(4, 5, True), (5, 5, False), (4, 6, False)])
async def test_a_round_that_was_replayed_is_known_if_it_made_our_state(
    before: int, after: int, is_known: bool
) -> None:
    place = Place(Ledger(AgreedVersion(after, START)), rounds=Mock(), version=before)
    decision = decision_of(MEMBERS)
    await place.outer.take(agreed_mean(Outcome.FromString(decision.outcome), bytearray(MEAN)), decision)
    assert place.rounds.replayed.called == is_known


# ---- boasters


def test_a_peer_that_counts_for_far_less_than_it_claims_is_told_of_at_most_once_a_minute() -> None:
    outcome = Outcome(
        key=RoundKey(fragment=0, round=5),
        members=[Member(peer="a", weight=8.0), Member(peer="b", weight=6.0), Member(peer="liar", weight=6e6)],
    )
    for start, stop, liars in ((0, 1, 24.0), (1, 4, 12.0)):
        part = outcome.parts.add(start_block=start, stop_block=stop)
        for peer, weight in (("a", 4.0), ("b", 6.0), ("liar", liars)):
            part.contributors.add(peer=peer, weight=weight)
    place = Place(rounds=Mock())
    for at in (0.0, 10.0, 59.0, 61.0, 100.0):
        place.now = at
        place.commits.tell_of_capped(outcome)
    assert [kind for kind, _ in place.told] == [ContributionCapped] * 2
    assert [(fields["other"], fields["rounds"]) for _, fields in place.told] == [("liar", 1), ("liar", 3)]
    first = place.told[0][1]
    assert (first["claimed"], first["counted"], first["median"]) == (6e6, 15.0, 8.0)


def test_beside_a_newcomer_alone_nobody_is_told_of_as_one_that_boasts() -> None:
    """Who joined a run of one peer was told that this one claims 18 times the median work."""
    outcome = Outcome(
        key=RoundKey(fragment=0, round=5),
        members=[Member(peer="first", weight=9216.0), Member(peer="newcomer", weight=512.0)],
    )
    part = outcome.parts.add(start_block=0, stop_block=1)
    for peer, weight in (("first", 358.0), ("newcomer", 512.0)):
        part.contributors.add(peer=peer, weight=weight)
    place = Place(rounds=Mock())
    place.commits.tell_of_capped(outcome)
    assert place.told == []


def test_of_peers_that_come_and_boast_no_more_are_kept_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.commits.MAX_PEERS", 3)
    place = Place(rounds=Mock())
    for name in ("one", "two", "three", "four", "five", "five", "one"):
        outcome = Outcome(
            key=RoundKey(fragment=0, round=5),
            members=[*(Member(peer=peer, weight=8.0) for peer in "ab"), Member(peer=name, weight=6e6)],
        )
        part = outcome.parts.add(start_block=0, stop_block=1)
        for peer in ("a", name):
            part.contributors.add(peer=peer, weight=8.0)
        place.commits.tell_of_capped(outcome)
    told = [fields["other"] for _, fields in place.told]
    assert told == ["one", "two", "three", "four", "five", "one"]  # "one" was forgotten by then


def decision_of(members: list[PeerId]) -> Decision:
    """Of round 5, whose BEGIN was ``COORDINATOR``'s."""
    outcome = Outcome(
        key=RoundKey(fragment=0, round=5, attempt=bytes(16)),
        run=RUN,
        coordinator=COORDINATOR.peer_id,
        live=len(members),
        state_digest=START,
        members=[Member(peer=peer, weight=1.0, base_version=4, offer_id=bytes(8)) for peer in members],
        parts=[
            PartOutcome(
                start_block=0,
                stop_block=4,
                digest=digest(MEAN),
                contributors=[Contributor(peer=peer, weight=1.0) for peer in members],
            )
        ],
    )
    return certify(outcome, *(one for one in map(make_identity, range(9)) if one.peer_id in members))
