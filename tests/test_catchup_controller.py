"""node.catchup: what the controller does with what heartbeats say, what donors give and what liars tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.catchup import Agreement, CatchupController
from p2p_co2.node.progress import Where
from p2p_co2.node.state import Effects, LocalProgress, PeerState
from p2p_co2.node.status import view_of
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES, ROUND, STATE, Fetched, FetchFailed, Goal
from p2p_co2.protocol.catchup.policy import NOTICE_AFTER_S
from p2p_co2.protocol.ledger import AgreedVersion
from p2p_co2.protocol.membership import PeerInfo
from p2p_co2.protocol.rounds import PayloadShape, PeerView
from p2p_co2.protocol.rounds.swarm import RoundSwarm
from p2p_co2.telemetry.events import CaughtUp, Warned
from p2p_co2.tensors.checkpoint.agreed import state_digest, state_from_bytes, state_view
from p2p_co2.wire.envelope import opened
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Behind, Decision, Envelope, Ready, Status, Waiting
from p2p_co2.wire.status import PeerStatus, finished_bits
from tests.fuzz.world import STEP_S, Trainer, World, run_virtual
from tests.round_machine import remembers
from tests.round_network import RUN, forged_commit, make_identity
from tests.test_commits import MEAN, MEMBERS, START, decision_of

GOOD, BAD, NONE = b"g" * 32, b"b" * 32, b"n" * 32
ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "c"))
SHAPE = PayloadShape(8, (4,))
OTHERS = [make_identity(index).peer_id for index in range(4, 12)]
TRAINS, FINISHES = Status.TRAINING, Status.DRAINING


class Place:
    """A controller at version 3 of one fragment, and all that it does."""

    def __init__(self, phase: Status.Phase = TRAINS) -> None:
        self.now = 10.0
        self.state = PeerState(ME, [AgreedVersion(3, GOOD)])
        self.state.local = LocalProgress(phase)
        self.wanted: list[Goal] = []
        self.done: list[tuple[Any, ...]] = []
        self.work: list[Any] = []
        self.fault: Exception | None = None
        self._works: list[Coroutine[Any, Any, None]] = []
        self.membership = SimpleNamespace(live={}, revision=0)
        machine = SimpleNamespace(
            ask_swarm=lambda vouch: None, add_donors=lambda *of: None, fetching=lambda fragment: True,
            want=lambda goal, now: self.wanted.append(goal), shape=SimpleNamespace(replayable=lambda _: 8),
            forget=lambda *of: self._note("forget", *of), quarantine=lambda peer, *of: None,
        )  # fmt: skip
        self.swarm = RoundSwarm(ME, SHAPE)
        rounds = SimpleNamespace(
            swarm=self.swarm,
            is_completing=lambda fragment: False,
            forget_outcome=lambda fragment, round_: self._note("forget", round_),
        )
        effects = Effects(
            now=lambda: self.now, report=lambda kind, **fields: self._note(kind, fields),
            spawn=self._works.append, refuse=lambda peer, *why: self._note("refuse", peer),
            pump=lambda: None,
        )  # fmt: skip
        offers: Any = SimpleNamespace(
            give_up=lambda fragment: self._note("give up", fragment), settle=lambda fragment: None
        )
        outer: Any = SimpleNamespace(take=self._take, adopt=self._adopt)
        membership: Any = self.membership
        self.agreement = Agreement(membership, self.state)
        parts: Any = SimpleNamespace(fetcher=machine), rounds
        self.controller = CatchupController(
            *parts, self.agreement, self.state, outer, offers, RUN, SHAPE, effects
        )

    async def handle(self, event: Fetched) -> None:
        self.controller.handle(event)
        while self._works:
            await self._works.pop(0)

    def move(self, version: int, group: list[PeerId] | None = None) -> None:
        self.state.move(0, AgreedVersion(version, GOOD), group)

    def hear(self, phase: Status.Phase = TRAINS, **held: tuple[int, bytes]) -> None:
        for name, (version, held_digest) in held.items():
            bits = finished_bits([0], 1) if phase == FINISHES else b""
            status = PeerStatus(phase=phase)._replace(finished=bits)
            info = PeerInfo(status, 0.0, 0.0, versions=(version,), digests=(held_digest,))
            self.membership.live[PeerId(name)] = info
        self._heard()

    def leave(self, *names: PeerId) -> None:
        for name in names:
            del self.membership.live[name]
        self._heard()

    def _heard(self) -> None:
        self.membership.revision += 1
        mine = self.state.local
        views = {peer: view_of(info) for peer, info in self.membership.live.items()}
        self.swarm.set_live({ME: PeerView(training=self.state.works, finished=mine.finished), **views})

    def look(self, *after_s: float) -> None:
        for seconds in after_s:
            self.now += seconds
            self.controller.look_around(self.now)

    def of(self, kind: object) -> list[Any]:
        return [rest[0] for what, *rest in self.done if what == kind]

    async def take(self, event: Fetched) -> None:
        self.controller.handle(event)
        await self.work.pop()

    def _note(self, *what: Any) -> None:
        self.done.append(what)

    async def _take(self, mean: Any, decision: Decision) -> bool:
        self._note("take", mean.round)
        return True

    async def _adopt(self, fragment: int, data: Any, agreed: AgreedVersion, goes_back: bool) -> None:
        if self.fault is not None:
            raise self.fault
        self._note("adopt", goes_back)
        self.state.move(fragment, agreed, None)


def fetched(goal: Goal, version: int, digest: bytes = GOOD) -> Fetched:
    return Fetched(goal, version, bytearray(), Decision(), digest, goal.donors, 1.0)


def test_what_others_have_is_gone_after_once_it_has_lasted() -> None:
    place = Place()
    place.hear(a=(4, GOOD), b=(4, GOOD))
    place.look(0.0, NOTICE_AFTER_S - 0.1)
    assert not place.controller.busy()
    place.look(0.2)
    assert place.wanted == [Goal(ROUND, 0, 4, (A, B))]
    place.hear(a=(20, GOOD), b=(20, GOOD))
    place.controller.handle(FetchFailed(place.wanted[0], "round not kept"))
    assert [(goal.what, goal.version) for goal in place.wanted] == [(ROUND, 4), (STATE, 4)]


def test_who_rests_goes_nowhere_and_at_once_when_it_wakes() -> None:
    place = Place(Status.PAUSED)
    place.hear(a=(4, GOOD), b=(4, GOOD))
    place.look(0.0, 10.0)
    assert not place.wanted
    place.state.local = LocalProgress(TRAINS)
    place.controller.wake(place.now)
    assert len(place.wanted) == 1


def test_who_went_on_while_a_fetch_ended_is_looked_for_though_all_are_silent() -> None:
    """At the end of a run nobody has news."""
    place = Place(FINISHES)
    place.hear(FINISHES, a=(4, GOOD))
    assert place.controller.go_to(0, 4, GOOD, (A,))
    place.hear(FINISHES, a=(5, GOOD))
    place.look(0.0)
    place.move(4)
    assert not place.controller.busy()
    place.look(0.1, NOTICE_AFTER_S)
    assert [goal.version for goal in place.wanted] == [4, 5]


@pytest.mark.parametrize("says_last", [True, False])
def test_a_last_round_that_nobody_gives_costs_nobody_an_offer(says_last: bool) -> None:
    """One that drains may say that it made a round more; only what most say ends an offer of ours."""
    place = Place(FINISHES)
    place.hear(FINISHES, a=(4 if says_last else 3, GOOD), b=(3, GOOD), c=(3, GOOD))
    if says_last:
        place.look(0.0, NOTICE_AFTER_S)
    else:  # what the rounds machine was told by a decision
        place.controller.go_to(0, 4, b"", (A,))
    assert place.controller.busy()
    place.controller.handle(FetchFailed(Goal(ROUND, 0, 4, (A,)), "nobody gives it"))
    assert not place.controller.busy()
    assert place.of("give up") == ([] if says_last else [0])
    assert place.of("forget") == [4]


def test_that_a_fragment_could_not_be_brought_up_is_told_once_for_each_state() -> None:
    place, counts = Place(), []
    place.hear(a=(5, GOOD), b=(5, GOOD))
    for version, here in ((4, 3), (4, 3), (5, 3), (5, 3), (5, 4), (5, 4)):
        place.move(here)
        assert place.controller.go_to(0, version, b"", ())
        place.controller.handle(FetchFailed(Goal(ROUND, 0, version, ()), "a: round not kept"))
        counts.append(len(place.of(Warned)))
    assert counts == [1, 1, 2, 2, 3, 3]
    assert place.of(Warned)[0]["text"] == "fragment 0 could not catch up yet: a: round not kept"


def test_a_round_that_nobody_gives_whole_becomes_a_state() -> None:
    place = Place()
    place.hear(a=(4, GOOD), b=(4, GOOD))
    assert place.controller.go_to(0, 4, b"", (A, B))
    place.controller.handle(FetchFailed(place.wanted[-1], "silent"))
    assert [goal.what for goal in place.wanted] == [ROUND, STATE]


def test_what_a_round_of_ours_has_overtaken_is_fetched_no_more() -> None:
    place = Place()
    place.hear(a=(7, GOOD), b=(7, GOOD))
    assert place.controller.go_to(0, 7, b"", (A, B))
    for version, is_busy in ((6, True), (7, False)):
        place.move(version)
        assert place.controller.busy() is is_busy
    assert place.of("forget") == [0]


async def test_the_loser_of_two_histories_loads_the_others_and_says_what_is_lost() -> None:
    place = Place()
    for version in (4, 5):
        place.move(version, [ME])
    place.hear(a=(4, BAD), b=(4, BAD))
    place.look(0.0, 2 * NOTICE_AFTER_S)
    (goal,) = place.wanted
    assert (goal.what, goal.version, goal.digest, goal.donors) == (STATE, 4, BAD, (A, B))
    assert "2 rounds of this peer alone among it" in place.of(Warned)[0]["text"]
    await place.handle(fetched(goal, 4, BAD))
    assert place.of("adopt") == [True]
    assert place.of(CaughtUp)[0]["rounds_given_up"] == 2


async def test_nobody_goes_back_to_those_that_came_to_us_meanwhile() -> None:
    place = Place()
    place.hear(a=(3, BAD), b=(3, BAD))
    place.look(0.0, NOTICE_AFTER_S)
    place.hear(a=(3, GOOD), b=(3, GOOD))
    await place.handle(fetched(place.wanted[0], 3, BAD))
    assert not place.of("adopt")
    assert not place.controller.busy()


@pytest.mark.parametrize(("version", "is_blamed"), [(5, False), (6, True)])
async def test_who_gave_a_state_that_rounds_overtook_is_not_blamed(version: int, is_blamed: bool) -> None:
    place = Place()
    place.fault = RemoteProtocolError("bad state", "older than ours")
    place.hear(a=(6, GOOD), b=(6, GOOD))
    assert place.controller.go_to(0, 6, GOOD, (A,))
    place.state.agreed[0] = AgreedVersion(6, GOOD)
    await place.handle(fetched(Goal(STATE, 0, 6, (A,), GOOD, 5), version))
    assert place.of("refuse") == ([A] if is_blamed else [])
    assert not place.controller.busy()


async def test_a_state_that_most_contradict_by_now_is_not_adopted() -> None:
    place = Place()
    place.hear(a=(20, BAD), b=(20, BAD))
    assert place.controller.go_to(0, 20, BAD, (A,))
    place.hear(a=(20, BAD), b=(20, GOOD), c=(20, GOOD))
    await place.handle(fetched(Goal(STATE, 0, 20, (A,), BAD), 20, BAD))
    assert place.of("refuse") == [A]
    assert not place.of("adopt")


# ---- rounds that are replayed


def round_of(members: list[PeerId]) -> Fetched:
    """Round 5 as a donor gives it."""
    decision, goal = decision_of(members), Goal(ROUND, 0, 5, (members[0],))
    return Fetched(goal, 5, bytearray(MEAN), decision, b"", tuple(members[:1]), 0.1)


@pytest.mark.parametrize(
    ("live", "is_taken"),
    [
        (MEMBERS, True),
        ([*MEMBERS, *OTHERS], False),
    ],
)
async def test_a_round_is_replayed_that_those_made_that_this_peer_is_with(
    live: list[PeerId], is_taken: bool
) -> None:
    place = Place()
    place.state.agreed[0] = AgreedVersion(4, START)
    place.hear(**dict.fromkeys(live, (5, GOOD)))
    await place.handle(round_of(MEMBERS))
    assert place.of("take") == [5] * is_taken
    assert not place.of("refuse")


async def test_at_the_end_of_a_run_most_are_those_that_came_to_it() -> None:
    """Three that go on are most of those who are there once the others have left. Nobody takes their round,
    nor the state after it."""
    place = Place(FINISHES)
    place.state.agreed[0] = AgreedVersion(4, START)
    place.state.local = LocalProgress(FINISHES, finished=frozenset({0}))
    names = [make_identity(index).peer_id for index in range(20, 24)]
    place.swarm.voters.histories = [remembers([ME, *names, *MEMBERS])]
    place.hear(FINISHES, **dict.fromkeys(names, (4, START)))
    place.hear(FINISHES, **dict.fromkeys(MEMBERS, (4, START)))
    place.agreement.view(0)
    place.leave(*names)
    place.hear(FINISHES, **dict.fromkeys(MEMBERS, (5, BAD)))
    place.look(0, NOTICE_AFTER_S, 60)
    await place.handle(round_of(MEMBERS))
    place.look(0, NOTICE_AFTER_S, 60)
    assert not place.of("take")
    assert {goal.what for goal in place.wanted} == {ROUND}


# ---- whole nodes


def test_many_that_join_at_once_do_not_take_each_other_for_the_swarm() -> None:
    """Two train and six come, all at version 0: each of them ends where the two are."""

    async def work() -> None:
        world = World("a", "b")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(6)
        for number in range(6):
            world.add(f"newcomer-{number}")
            world.trainers[-1].node.show(LocalProgress(phase=Status.JOINING))
        world.start()
        await asyncio.sleep(4)
        assert min(world.versions()[0]) >= 4
        assert len(set(world.versions())) == 1
        for newcomer in world.trainers[2:]:
            assert newcomer.node.progress.joining.where is Where.ABREAST
            assert not newcomer.refused
        await world.close()

    run_virtual(work())


@pytest.mark.parametrize(("peers", "liars", "named"), [(4, 1, 4), (4, 1, 2), (8, 3, 6)])
def test_a_commit_that_less_than_half_have_signed_stops_nobody(peers: int, liars: int, named: int) -> None:
    """Told to all, again and again. Of four members one signature is no certificate. Of two that of the
    coordinator is one, as are three of six, and liars may name anybody as the others."""

    async def work() -> None:
        world = World(*map(str, range(peers)))
        world.start()
        await asyncio.sleep(1.5)
        await world.train(4)
        honest, (liar, *others) = world.trainers[:-liars], world.trainers[-liars:]
        names = [trainer.me for trainer in world.trainers]

        async def lie() -> None:
            while True:
                for trainer in honest:
                    agreed = trainer.node.agreed[0]
                    decision = forged_commit(
                        liar.identity, agreed.version + 1, agreed.digest, names[-named:],
                        run=trainer.group, blocks=trainer.shape.blocks[0],
                        others=[other.identity for other in others],
                    )  # fmt: skip
                    envelope = Envelope(version=PROTOCOL_VERSION, run=trainer.group)
                    envelope.decision.CopyFrom(decision)
                    await world.deliver(liar.me, trainer.me, envelope.SerializeToString())
                await asyncio.sleep(1)

        lying = asyncio.create_task(lie())
        before = min(world.versions())[0]
        await world.train(24)
        assert min(world.versions())[0] >= before + 8
        assert len({tuple(trainer.node.agreed) for trainer in world.trainers}) == 1
        for trainer in honest:
            count = trainer.node.router.refusals.get((liar.me, "decision", "no quorum"), 0)
            assert (count >= 8) == (2 * liars < named)
        lying.cancel()
        await world.close()

    run_virtual(work())


def test_a_coordinator_that_begins_no_round_is_asked_last() -> None:
    async def work() -> None:
        world = World("a", "b", "c", "d", "liar")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(4)
        liar, before = world.trainers[-1], min(world.versions())

        def refuse(sender: PeerId, receiver: PeerId, data: bytes) -> bool:
            message = opened(data, liar.group) if receiver == liar.me else None
            if message is None or not isinstance(message.body, Ready) or message.body.withdrawn:
                return True
            ready = message.body
            envelope = Envelope(version=PROTOCOL_VERSION, run=liar.group)
            envelope.waiting.CopyFrom(Waiting(fragment=ready.fragment, round=ready.round, refusal="no"))
            world.put(liar.me, sender, envelope.SerializeToString())
            return False

        world.tap = refuse
        await world.train(120)
        assert min(min(world.versions())) >= min(before) + 30
        await world.close()

    run_virtual(work())


async def go_astray(liar: Trainer, ahead: int) -> AgreedVersion:
    """The liar holds a state of its own making, ``ahead`` versions beyond what all hold."""
    agreed, data, _ = await liar.ledger.export(0)
    state = state_from_bytes(data[0 : len(data)], liar.ledger.fragments[0].state.params.numel())
    wrong = state._replace(version=agreed.version + ahead, params=state.params + 1000.0)
    held = AgreedVersion(wrong.version, state_digest(wrong, LEAST_CHUNK_BYTES))
    await liar.node.outer.adopt(0, state_view(wrong)[0 : len(data)], held)
    return held


def decision(liar: Trainer, honest: Trainer, lie: AgreedVersion) -> dict[str, Message]:
    agreed = honest.node.agreed[0]
    return {
        "decision": forged_commit(
            liar.identity, agreed.version + 1, agreed.digest, [liar.me],
            run=honest.group, blocks=honest.shape.blocks[0],
        )
    }  # fmt: skip


def behind(liar: Trainer, honest: Trainer, lie: AgreedVersion) -> dict[str, Message]:
    round_ = honest.node.agreed[0].version + 1
    told = Behind(fragment=0, round=round_, version=lie.version, state_digest=lie.digest, donors=[liar.me])
    return {"behind": told}


@pytest.mark.parametrize("lie", [decision, behind])
def test_a_state_that_only_one_holds_is_nobodys(lie: Callable[..., dict[str, Message]]) -> None:
    async def work() -> None:
        world = World("a", "b", "c", "liar")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(4)
        *honest, liar = world.trainers
        before, held = min(world.versions())[0], await go_astray(liar, 1)
        for _ in range(250):
            for trainer in honest:
                envelope = Envelope(version=PROTOCOL_VERSION, run=trainer.group)
                envelope.MergeFrom(Envelope(**lie(liar, trainer, held)))
                await world.deliver(liar.me, trainer.me, envelope.SerializeToString())
                trainer.step()
            await asyncio.sleep(STEP_S)
            assert not any(trainer.node.agreed[0] == held for trainer in honest)
        assert min(world.versions())[0] > before + 2
        await world.close()

    run_virtual(work())
