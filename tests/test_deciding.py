"""What the shell makes of decisions and of states from donors; found by simulations."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from p2p_co2.digest import digest
from p2p_co2.node.deciding import Deciding
from p2p_co2.node.ledger import (
    AgreedMean,
    AgreedVersion,
    PartWeights,
    Reduced,
    SliceRefused,
    agreed_mean,
)
from p2p_co2.node.node import Node
from p2p_co2.protocol.catchup import ROUND, Fetched, Goal
from p2p_co2.protocol.rounds import (
    FellBehind,
    Offer,
    PayloadShape,
    PeerView,
    ReduceWanted,
    Refused,
    Rounds,
)
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import (
    Contributor,
    Member,
    Outcome,
    PartOutcome,
    RoundKey,
    Status,
)
from p2p_co2.protocol.wire.status import PeerStatus
from p2p_co2.telemetry.events import ContributionCapped, RoundAborted
from tests.certificates import certify
from tests.round_network import RUN, Network, make_identity

SHAPE = PayloadShape(8, (4,))
START, MEAN = digest(b"start"), bytes(32)
MEMBERS = sorted(make_identity(index).peer_id for index in (1, 2))
COORDINATOR = make_identity(3)


class Untouched:
    """A ledger that nobody may ask."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the tensor side was asked to {name}")


def node_with(live: list[PeerId], group_size: int = 32) -> Any:
    infos = {peer: SimpleNamespace(status=PeerStatus(phase=Status.TRAINING)) for peer in live}
    return SimpleNamespace(
        me=make_identity(0).peer_id,
        run_digest=RUN,
        shape=SHAPE,
        group_size=group_size,
        agreed=[AgreedVersion(4, START)],
        offer_early=lambda fragment: None,
        _early={},
        membership=SimpleNamespace(live=infos, quiet_s=0.0),
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
        catching=SimpleNamespace(
            majority=SimpleNamespace(moved=lambda *of: None),
            overtaken=lambda fragment: None,
        ),
    )


async def test_a_state_that_is_ours_already_is_not_adopted_again() -> None:
    """It would end the open offer on the tensor side alone, and the next offer would crash the node."""
    node = node_with([])
    deciding = Deciding(node, cast(Any, Untouched()))
    await deciding.adopt(0, b"", AgreedVersion(4, START))


@pytest.mark.parametrize(
    ("ends_offer", "going", "fetches", "moves", "opens", "given_up"),
    [
        (True, True, True, False, False, 1),
        (True, True, False, False, False, 0),  # that was told as it was found out
        (True, True, True, True, False, 0),
        (True, True, True, False, True, 0),
        (True, False, False, False, False, 1),
        (False, True, True, False, False, 0),
    ],
)
def test_where_what_was_fetched_is_our_own_state_the_offer_that_ended_for_it_is_given_up(
    ends_offer: bool, going: bool, fetches: bool, moves: bool, opens: bool, given_up: int
) -> None:
    """Else the tensor side took it for in flight to the end of the run: the peer offered nothing more of that
    fragment, and all others waited ten minutes for it (run 800012 of ``benchmarks/ends.py drawn``)."""
    node, told = node_with([]), Mock()
    node.give_up_offer, node.spawn = told, told
    node.rounds = SimpleNamespace(open_offers=lambda: [SimpleNamespace(fragment=0)] if opens else [])
    node.progress, node.refresh = SimpleNamespace(unsettle=Mock(), local=Mock()), Mock()
    node.catching.go_to = lambda fragment, version, digest, donors: going
    node.catching.is_fetching = lambda fragment: fetches
    node.rounds.set_state = node.catchup.moved = Mock()
    ledger = Mock()
    deciding = Deciding(node, ledger)
    deciding.opened(Offer(0, 5, 4, START, bytes(32), 1.0, offer_id=b"mine"))
    deciding.handle(FellBehind(0, 6, b"", (PeerId("donor"),), ends_offer))
    if moves:
        deciding._agree(0, AgreedVersion(5, START), None)
    for _ in range(2):  # it is told once
        deciding.settle_offer(0)
    assert told.call_count == given_up


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_ledger_that_adopts_is_told_who_is_in_the_round_after_its_state(is_ours: bool) -> None:
    told: list[Any] = []

    class Told:
        async def adopt(
            self, fragment: int, data: bytes, agreed: AgreedVersion, parts: Any, *how: bool
        ) -> AgreedVersion:
            told.append(parts)
            return agreed

    node = node_with(MEMBERS)
    identity = make_identity(0)
    node.rounds = Rounds(identity, RUN, SHAPE)
    node.rounds.set_peers({peer: PeerView() for peer in [*MEMBERS, COORDINATOR.peer_id]}, 1.0)
    node.rounds.set_state(0, 4, START if is_ours else digest(b"another history"))
    node.rounds.receive(round_of(MEMBERS).decision, COORDINATOR.peer_id, 2.0)
    node.progress = node.catchup = Mock()
    node.refresh = node.pump = Mock()
    await Deciding(node, cast(Any, Told())).adopt(0, b"", AgreedVersion(9, bytes(32)))
    weights = PartWeights(0, 4, dict.fromkeys(MEMBERS, 1.0))
    assert told == [(weights,) if is_ours else None]


class Ends:
    """A ledger that takes any state over, and the offers whose end it is told of."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, bytes]] = []

    async def adopt(
        self, fragment: int, data: bytes, agreed: AgreedVersion, parts: Any, *how: bool
    ) -> AgreedVersion:
        return agreed

    async def abort(self, fragment: int, offer_id: bytes) -> None:
        self.ended.append((fragment, offer_id))


async def test_an_offer_that_a_state_replaced_does_not_end_the_next_one() -> None:
    """The tensor side ends it as it adopts, and the training thread offers again at once: an abort that named
    the round alone would end that offer too, and the one after it crash the node (seed 152 of the storms)."""

    node = node_with(MEMBERS)
    node.rounds = Rounds(make_identity(0), RUN, SHAPE)
    node.rounds.set_peers({peer: PeerView() for peer in MEMBERS}, 1.0)
    node.rounds.set_state(0, 4, START)
    node.rounds.offer(Offer(0, 5, 4, START, bytes(32), 1.0, offer_id=b"mine"), 1.0)
    node.progress = node.catchup = Mock()
    node.refresh = Mock()
    said: list[Any] = []
    node.report = lambda kind, **fields: said.append(kind)
    work: list[Any] = []
    node.spawn = work.append
    ledger = Ends()
    deciding = Deciding(node, cast(Any, ledger))

    def pump() -> None:
        while (event := node.rounds.next_event()) is not None:
            deciding.handle(event)

    node.pump = pump
    await deciding.adopt(0, b"", AgreedVersion(4, digest(b"theirs")))
    for coroutine in work:
        await coroutine
    assert said == [RoundAborted]
    assert ledger.ended == [(0, b"mine")]
    node.rounds.offer(Offer(0, 5, 4, digest(b"theirs"), bytes(32), 2.0), 2.0)


async def test_an_offer_that_is_on_its_way_goes_on_where_the_one_before_it_is_given_up() -> None:
    """It is in flight on the tensor side before the rounds machine hears of it: it is none of those that
    came to nothing, and would be opened though nobody held its work."""
    node, ledger, work = node_with([]), Ends(), list[Any]()
    node.spawn = work.append
    deciding = Deciding(node, cast(Any, ledger))
    deciding.end_offer(0)
    deciding.opened(Offer(0, 5, 4, START, bytes(32), 1.0, offer_id=b"mine"))
    deciding.end_offer(0)
    for coroutine in work:
        await coroutine
    assert ledger.ended == [(0, b"mine")]


async def test_an_offer_from_a_state_that_was_given_up_is_ended() -> None:
    """It waited for the news of the round after ours; then the peer went over to others' state."""
    node, ledger, work = node_with([]), Ends(), list[Any]()
    node.now, node.spawn, node._ledger = time.monotonic, work.append, ledger
    node.offer = partial(Node.offer, node)
    node.offer(Offer(0, 6, 5, START, bytes(32), 1.0, offer_id=b"mine"))
    assert work == []  # the news may come yet
    node.agreed[0] = AgreedVersion(5, digest(b"theirs"))
    Node.offer_early(node, 0)
    await asyncio.sleep(0)
    await work.pop()
    assert ledger.ended == [(0, b"mine")]


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_slice_that_is_refused_is_counted_once_and_only_in_a_job_that_is_open(is_open: bool) -> None:
    """A job that was given to another owner may look into memory that is in use again."""
    refused: list[tuple[str, str, str]] = []
    jobs: list[ReduceWanted] = []

    class Refuses:
        async def reduce(self, fragment: int, slices: Any) -> Reduced:
            raise SliceRefused(liar, "not finite")

    net = Network(3)
    owner, liar = net.names[:2]
    net.on_reduce = lambda peer, job: bool(peer != owner or jobs.append(ReduceWanted(job)))
    net.offer_all()
    net.run(1.0)
    node = node_with(net.names)
    node.rounds, node.now = net.peers[owner].machine, lambda: net.now
    node.refuse = lambda *of: refused.append(of)
    deciding = Deciding(node, cast(Any, Refuses()))

    def pump() -> None:
        while (event := node.rounds.next_event()) is not None:
            if isinstance(event, Refused):
                deciding.handle(event)

    node.pump = pump
    if not is_open:
        net.run_until_settled()  # nobody waits for this owner for ever
    await deciding._reduce(jobs[0])
    assert refused == ([(liar, "bad slice", "not finite; fragment 0, round 1")] if is_open else [])


async def test_a_round_upon_a_state_that_was_exchanged_meanwhile_is_told_of() -> None:
    told = list[str]()

    class Exchanged:
        async def commit(self, mean: AgreedMean) -> AgreedVersion:
            return AgreedVersion(4, digest(b"another"))

    node = node_with(MEMBERS)
    node.rounds = node.progress = node.catchup = node.refresh = node.pump = Mock()
    node.report = lambda kind, text: told.append(text)
    fetched = round_of(MEMBERS)
    mean = agreed_mean(Outcome.FromString(fetched.decision.outcome), fetched.data)
    assert not await Deciding(node, cast(Any, Exchanged())).take(mean, fetched.decision)
    assert "round 5 of fragment 0 is not applied here" in told[0]


@pytest.mark.parametrize(("before", "after", "is_known"), [(4, 5, True), (5, 5, False), (4, 6, False)])
async def test_a_round_that_was_replayed_is_known_if_it_made_our_state(
    before: int, after: int, is_known: bool
) -> None:
    class Takes:
        async def commit(self, mean: AgreedMean) -> AgreedVersion:
            return AgreedVersion(after, START)

    node = node_with(MEMBERS)
    node.agreed = [AgreedVersion(before, START)]
    node.rounds = Mock()
    node.progress = node.catchup = node.refresh = node.pump = Mock()
    fetched = round_of(MEMBERS)
    mean = agreed_mean(Outcome.FromString(fetched.decision.outcome), fetched.data)
    assert mean.round == 5
    await Deciding(node, cast(Any, Takes())).take(mean, fetched.decision)
    assert node.rounds.replayed.called == is_known


def test_a_peer_that_counts_for_far_less_than_it_claims_is_told_of_at_most_once_a_minute() -> None:
    outcome = Outcome(
        key=RoundKey(fragment=0, round=5),
        members=[Member(peer="a", weight=8.0), Member(peer="b", weight=6.0), Member(peer="liar", weight=6e6)],
    )
    for start, stop, liars in ((0, 1, 24.0), (1, 4, 12.0)):
        part = outcome.parts.add(start_block=start, stop_block=stop)
        for peer, weight in (("a", 4.0), ("b", 6.0), ("liar", liars)):
            part.contributors.add(peer=peer, weight=weight)
    node, told = node_with([]), list[ContributionCapped]()
    now = [0.0]
    node.now = lambda: now[0]
    node.report = lambda kind, **fields: told.append(kind(at=now[0], peer="me", **fields))
    deciding = Deciding(node, cast(Any, None))
    for at in (0.0, 10.0, 59.0, 61.0, 100.0):
        now[0] = at
        deciding._tell_of_capped(outcome)
    assert [(one.at, one.other, one.rounds) for one in told] == [(0.0, "liar", 1), (61.0, "liar", 3)]
    assert (told[0].claimed, told[0].counted, told[0].median) == (6e6, 15.0, 8.0)


def test_of_peers_that_come_and_boast_no_more_are_kept_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.deciding.MAX_PEERS", 3)
    node, told = node_with([]), list[str]()
    node.now = lambda: 0.0
    node.report = lambda kind, **fields: told.append(fields["other"])
    deciding = Deciding(node, cast(Any, None))
    for name in ("one", "two", "three", "four", "five", "five"):
        outcome = Outcome(
            key=RoundKey(fragment=0, round=5),
            members=[Member(peer="a", weight=8.0), Member(peer=name, weight=6e6)],
        )
        part = outcome.parts.add(start_block=0, stop_block=1)
        for peer in ("a", name):
            part.contributors.add(peer=peer, weight=8.0)
        deciding._tell_of_capped(outcome)
        assert len(deciding._capped) <= 3
    assert told == ["one", "two", "three", "four", "five"]
    assert list(deciding._capped) == ["three", "four", "five"]


def round_of(members: list[PeerId]) -> Fetched:
    """Round 5 as a donor gives it, decided by ``COORDINATOR``."""
    outcome = Outcome(
        key=RoundKey(fragment=0, round=5, attempt=bytes(16)),
        run=RUN,
        coordinator=COORDINATOR.peer_id,
        live=len(members),
        state_digest=START,
        members=[Member(peer=peer, weight=1.0, base_version=4) for peer in members],
        parts=[
            PartOutcome(
                start_block=0,
                stop_block=4,
                digest=digest(MEAN),
                contributors=[Contributor(peer=peer, weight=1.0) for peer in members],
            )
        ],
    )
    signers = [one for one in map(make_identity, range(9)) if one.peer_id in members]
    decision = certify(outcome, *signers)
    goal = Goal(ROUND, 0, 5, (members[0],))
    return Fetched(goal, 5, bytearray(MEAN), decision, b"", tuple(members[:1]), 0.1, 0)
