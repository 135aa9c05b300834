"""node.catching: by whose word a peer knows where the swarm is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.catching import NOTICE_AFTER_S, ROUND_AGAIN, Catching
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.progress import LocalProgress
from p2p_co2.protocol.catchup import ROUND, STATE, Disputed, Fetched, FetchFailed, Goal
from p2p_co2.protocol.membership import PeerInfo
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import Decision, Envelope, Status
from p2p_co2.protocol.wire.status import PeerStatus, finished_bits
from p2p_co2.telemetry.events import Warned
from tests.fuzz.world import World, run_virtual
from tests.round_network import forged_commit


def test_many_that_join_at_once_do_not_take_each_other_for_the_swarm() -> None:
    """Two train and six come, all at version 0: each of them ends where the two are."""

    async def work() -> None:
        world = World("a", "b")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(6)
        for number in range(6):
            world.add(f"newcomer-{number}")
            world.trainers[-1].sync.phase = Status.JOINING
            world.trainers[-1].sync.report()
        world.start()
        await asyncio.sleep(4)
        assert min(world.versions()[0]) >= 4
        assert len(set(world.versions())) == 1
        for newcomer in world.trainers[2:]:
            assert newcomer.node.progress.abreast
            assert not newcomer.refused
        await world.close()

    run_virtual(work())


GOOD, BAD, NONE = b"g" * 32, b"b" * 32, b"n" * 32


def heard(phase: Status.Phase, versions: tuple[int, ...] = (), digests: tuple[bytes, ...] = ()) -> PeerInfo:
    """A live peer's last heartbeat."""
    return PeerInfo(
        status=PeerStatus(phase=phase), heard_at=0.0, status_at=0.0, versions=versions, digests=digests
    )


@pytest.mark.parametrize(
    ("said", "version", "digest", "vouched"),
    [
        ({"a": (9, GOOD), "b": (9, GOOD), "c": (9, GOOD)}, 9, GOOD, True),
        ({"a": (9, GOOD), "b": (9, GOOD), "c": (9, GOOD)}, 9, BAD, False),
        ({"a": (9, BAD), "b": (9, GOOD), "c": (8, GOOD)}, 9, BAD, None),  # one word against another
        ({"a": (9, GOOD), "b": (9, BAD), "c": (8, GOOD)}, 9, GOOD, None),
        ({"a": (9, GOOD), "b": (9, GOOD), "c": (9, BAD)}, 9, GOOD, True),
        ({"a": (12, BAD), "b": (9, GOOD), "c": (9, GOOD)}, 12, BAD, None),  # its own word only
        (
            {"a": (9 + AHEAD_AT_MOST + 1, BAD), "b": (9, GOOD), "c": (9, GOOD)},
            9 + AHEAD_AT_MOST + 1,
            BAD,
            False,
        ),
        ({"a": (9, GOOD)}, 9, GOOD, None),
    ],
)
def test_who_vouches_for_the_state_of_a(
    said: dict[str, tuple[int, bytes]], version: int, digest: bytes, vouched: bool | None
) -> None:
    live = {
        PeerId(peer): heard(Status.TRAINING, versions=(held,), digests=(of,))
        for peer, (held, of) in said.items()
    }
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=0),
        agreed=[AgreedVersion(0, NONE)],
        progress=SimpleNamespace(local=LocalProgress(phase=Status.JOINING)),
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
    )
    assert Catching(node)._vouch(PeerId("a"), 0, version, digest) is vouched  # type: ignore[arg-type]


TRAINS, FINISHES = Status.TRAINING, Status.DRAINING


@pytest.mark.parametrize(
    ("phases", "is_most"),
    [
        ({"a": TRAINS, "b": TRAINS, "c": TRAINS, "d": TRAINS}, True),
        ({"a": FINISHES, "b": FINISHES, "c": TRAINS, "d": TRAINS}, True),  # as in the last rounds of a run
        ({"a": FINISHES, "c": TRAINS, "d": TRAINS}, False),  # one word against two
        ({"a": TRAINS, "c": TRAINS, "d": TRAINS}, False),
        ({"a": FINISHES, "c": FINISHES, "d": FINISHES}, True),
    ],
)
def test_a_mean_of_a_and_b_is_taken_where_they_are_most_of_those_who_train_or_did(
    phases: dict[str, Status.Phase], is_most: bool
) -> None:
    live = {PeerId(peer): heard(phase) for peer, phase in phases.items()}
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=0),
        me=PeerId("me"),
        group_size=32,
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
    )
    catching = Catching(node)  # type: ignore[arg-type]
    assert catching.majority.is_most({PeerId("a"), PeerId("b")}, 0) is is_most


def test_a_last_round_of_few_is_taken_while_others_are_still_about_another_fragment() -> None:
    """At the end of every third storm all waited five to seven seconds for each other."""
    works = heard(TRAINS, versions=(3, 1), digests=(GOOD, GOOD))
    through = replace(works, status=works.status._replace(finished=finished_bits([0], 2)))
    lonely = PeerId("lonely")
    live = {PeerId(str(number)): through for number in range(5)} | {lonely: replace(works, versions=(4, 1))}
    node: Any = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=0),
        agreed=[AgreedVersion(3, GOOD), AgreedVersion(1, GOOD)],
        me=PeerId("me"),
        group_size=32,
        progress=SimpleNamespace(local=LocalProgress(phase=TRAINS, finished=frozenset({0}))),
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
    )
    majority = Catching(node).majority
    assert majority.is_most({lonely}, 0)  # a round that nobody else has anything to offer for
    assert not majority.is_most({lonely}, 1)
    assert majority.last_version(0) == 0  # its bare word of one moves nobody while it makes more ...
    live[lonely] = replace(through, versions=(4, 1))
    assert majority.last_version(0) == 4  # ... and does when it is through
    assert majority.last_version(1) == 0


def test_who_went_on_while_a_fetch_ended_is_looked_for_though_all_are_silent() -> None:
    """At the end of a run nobody has news. One that fetched a round, while the others made the next, must see
    by itself that it is behind."""
    wanted: list[Goal] = []
    ahead = heard(Status.DRAINING, versions=(4,), digests=(GOOD,))
    node = SimpleNamespace(
        membership=SimpleNamespace(live={PeerId("a"): ahead}, revision=7),
        agreed=[AgreedVersion(2, NONE)],
        progress=SimpleNamespace(local=LocalProgress(phase=Status.DRAINING)),
        deciding=nothing_owed(),
        rounds=SimpleNamespace(is_completing=lambda fragment: False),
        catchup=SimpleNamespace(
            ask_swarm=lambda vouch: None,
            add_donors=lambda *of: None,
            want=lambda goal, now: wanted.append(goal),
            shape=SimpleNamespace(replayable=lambda fragment: 8),
        ),
        now=lambda: 10.0,
        report=lambda kind, **fields: None,
    )
    catching = Catching(node)  # type: ignore[arg-type]
    assert catching.go_to(0, 3, GOOD, (PeerId("a"),))
    node.agreed[0] = AgreedVersion(3, GOOD)  # the round is taken ...
    catching.look_around(10.0)  # ... what the others say is looked at, while the fetch is still open ...
    catching._went_on(Fetched(wanted[0], 3, b"", Decision(), GOOD, (PeerId("a"),), 0.1, 0), "replay")
    assert not catching.busy()
    for now in (10.1, 10.1 + NOTICE_AFTER_S):  # ... and nothing more is heard
        assert catching.is_watching
        catching.look_around(now)
    assert [goal.version for goal in wanted] == [3, 4]


@pytest.mark.parametrize(
    ("phases", "versions", "last"),
    [
        ("dd", (4, 3), 4),  # one has a last round that the others did not hear of
        ("dd", (5, 3), 4),  # one round at a time
        ("dd", (3, 3), 0),
        ("dt", (4, 3), 0),  # while somebody trains, one alone moves nobody
        ("ddj", (4, 3, 3), 4),  # nor who joins, or rests
        ("ddp", (4, 3, 3), 4),
        ("djj", (3, 4, 4), 0),
    ],
)
def test_a_last_round_that_few_have_is_taken_when_nobody_trains(
    phases: str, versions: tuple[int, ...], last: int
) -> None:
    named = {"d": Status.DRAINING, "t": Status.TRAINING, "j": Status.JOINING, "p": Status.PAUSED}
    live = {
        PeerId(str(number)): heard(named[phase], versions=(version,), digests=(GOOD,))
        for number, (phase, version) in enumerate(zip(phases, versions, strict=True))
    }
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=0),
        agreed=[AgreedVersion(3, GOOD)],
        progress=SimpleNamespace(local=LocalProgress(phase=Status.DRAINING)),
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
    )
    majority = Catching(node).majority  # type: ignore[arg-type]
    assert majority.swarm_version(0) == 3
    assert majority.last_version(0) == last


@pytest.mark.parametrize(
    ("says_last", "asked", "is_proved"), [(True, "a", True), (False, "", True), (False, "a", False)]
)
def test_a_last_round_that_nobody_has_costs_nobody_an_offer(
    says_last: bool, asked: str, is_proved: bool
) -> None:
    """One that drains may say that it made a round more; only what most say ends an offer of ours. Who made
    a last round alone and could not give it in its first moment, had its honest coordinator distrusted."""
    given_up: list[int] = []
    proved: list[bool] = []
    few, most = (4, 3) if says_last else (3, 3)
    live = {
        PeerId(name): heard(Status.DRAINING, versions=(version,), digests=(GOOD,))
        for name, version in (("a", few), ("b", most), ("c", most))
    }
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=1),
        agreed=[AgreedVersion(3, GOOD)],
        progress=SimpleNamespace(local=LocalProgress(phase=Status.DRAINING)),
        deciding=nothing_owed(),
        rounds=SimpleNamespace(
            is_completing=lambda fragment: False,
            forget_outcome=lambda fragment, round_, is_proved: proved.append(is_proved),
        ),
        catchup=SimpleNamespace(
            ask_swarm=lambda vouch: None,
            want=lambda goal, now: None,
            shape=SimpleNamespace(replayable=lambda fragment: 8),
        ),
        now=lambda: 20.0,
        report=lambda kind, **fields: None,
        give_up_offer=given_up.append,
    )
    catching = Catching(node)  # type: ignore[arg-type]
    if says_last:
        for now in (10.0, 10.0 + NOTICE_AFTER_S):
            catching.look_around(now)
    else:  # what the rounds machine was told by a decision
        catching.go_to(0, 4, b"", (PeerId("a"),))
    assert catching.busy()
    donors = tuple(PeerId(name) for name in asked)
    catching.handle(FetchFailed(Goal(ROUND, 0, 4, donors), "nobody gives it", 0))
    assert not catching.busy()
    assert proved == [is_proved]
    assert given_up == ([] if says_last else [0])


def nothing_owed(**more: Any) -> SimpleNamespace:
    """A node's ``deciding`` without an offer whose end nobody has told."""
    return SimpleNamespace(settle_offer=lambda fragment: None, **more)


def follower(of: int, phase: Status.Phase, catchup: Any, **more: Any) -> Any:
    """A peer at version 3 of its fragment, with two others that are at version ``of``."""
    live = {PeerId(name): heard(Status.TRAINING, versions=(of,), digests=(GOOD,)) for name in "ab"}
    return SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=1),
        agreed=[AgreedVersion(3, GOOD)],
        progress=SimpleNamespace(local=LocalProgress(phase=phase)),
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None, **catchup),
        now=lambda: 20.0,
        **{"deciding": nothing_owed()} | more,
    )


def test_that_a_fragment_could_not_be_brought_up_is_told_once_for_each_state() -> None:
    """At the end of a run in several states it was told every five seconds."""
    told: list[str] = []
    node = follower(
        5, Status.DRAINING,
        {"want": lambda goal, now: None, "shape": SimpleNamespace(replayable=lambda fragment: 8)},
        rounds=SimpleNamespace(forget_outcome=lambda fragment, round_, is_proved: None),
        report=lambda kind, text: told.append(text),
        give_up_offer=lambda fragment: None,
    )  # fmt: skip
    catching = Catching(node)
    counts = []
    for version, here in ((4, 3), (4, 3), (5, 3), (5, 3), (5, 4), (5, 4)):
        node.agreed[0] = AgreedVersion(here, GOOD)
        assert catching.go_to(0, version, b"", ())
        catching.handle(FetchFailed(Goal(ROUND, 0, version, ()), "a: round not kept", 0))
        counts.append(len(told))
    assert counts == [1, 1, 2, 2, 3, 3]
    assert told[0] == "fragment 0 could not catch up yet: a: round not kept"


@pytest.mark.parametrize(
    ("chunks_given", "newest_version", "rounds"), [(0, 0, 1), (5, 4, 1), (5, 0, 1 + ROUND_AGAIN)]
)
def test_a_round_that_came_in_part_is_asked_for_again(
    chunks_given: int, newest_version: int, rounds: int
) -> None:
    """Its donors' lines carried the others' rounds for a minute: the whole state, fifteen times as large, was
    asked for on them instead. Who gave no part, or says that it is gone, gives none later; and of who never
    gives all the state is asked, a few tries later."""
    wanted: list[Goal] = []
    node = follower(
        4, Status.TRAINING,
        {
            "want": lambda goal, now: wanted.append(goal),
            "shape": SimpleNamespace(replayable=lambda fragment: 7),
        },
    )  # fmt: skip
    catching = Catching(node)
    assert catching.go_to(0, 4, b"", tuple(node.membership.live))
    while wanted[-1].what == ROUND:
        catching.handle(FetchFailed(wanted[-1], "silent for 60.0 s", newest_version, chunks_given))
    assert [goal.what for goal in wanted] == [ROUND] * rounds + [STATE]
    assert {goal.version for goal in wanted} == {4}


def test_what_a_round_of_ours_has_overtaken_is_fetched_no_more() -> None:
    """A state that came when rounds had gone past it was refused as a lie, its donor was asked for nothing
    more, and there was no other: two states at the end of a slow run (seed 300038 of those drawn)."""
    forgotten: list[int] = []
    node = follower(
        7, Status.TRAINING,
        {
            "want": lambda goal, now: None, "shape": SimpleNamespace(replayable=lambda fragment: 1),
            "fetching": lambda fragment: True, "forget": lambda fragment, now: forgotten.append(fragment),
        },
    )  # fmt: skip
    catching = Catching(node)
    catching.overtaken(0)  # nothing is fetched
    assert catching.go_to(0, 7, b"", tuple(node.membership.live))
    node.agreed[0] = AgreedVersion(6, GOOD)
    catching.overtaken(0)
    assert catching.busy()
    assert forgotten == []
    node.agreed[0] = AgreedVersion(7, GOOD)
    catching.overtaken(0)
    assert not catching.busy()
    assert forgotten == [0]
    catching._targets[0] = 7, BAD, ()  # most hold another state of that version
    catching.overtaken(0)
    assert catching.busy()
    catching._targets[0], catching._back = (7, GOOD, ()), {0}  # it goes back from there, on purpose
    catching.overtaken(0)
    assert catching.busy()
    assert forgotten == [0]


@pytest.mark.parametrize(
    ("version", "goes_back", "is_blamed"), [(5, False, False), (6, False, True), (5, True, True)]
)
async def test_who_gave_a_state_that_rounds_overtook_is_not_blamed(
    version: int, goes_back: bool, is_blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[PeerId] = []

    async def adopt(fragment: int, data: bytes, agreed: AgreedVersion, goes_back: bool) -> None:
        raise RemoteProtocolError("bad state", "older than ours")

    node = follower(
        6, Status.TRAINING,
        {
            "want": lambda goal, now: None, "shape": SimpleNamespace(replayable=lambda fragment: 1),
            "quarantine": lambda peer, reason, now: None,
        },
        rounds=SimpleNamespace(given_by=lambda fragment, donors: None),
        deciding=nothing_owed(adopt=adopt),
        refuse=lambda peer, reason, detail: refused.append(peer),
        give_up_offer=lambda fragment: None, pump=lambda: None,
    )  # fmt: skip
    catching = Catching(node)
    monkeypatch.setattr(catching.apart, "camp", lambda fragment: "elsewhere")
    donor = PeerId("a")
    assert catching.go_to(0, 6, GOOD, (donor,))
    catching._back = {0} if goes_back else set()
    node.agreed[0] = AgreedVersion(6, GOOD)
    goal = Goal(STATE, 0, 6, (donor,), GOOD, 5)
    await catching._take(Fetched(goal, version, bytearray(), None, GOOD, (donor,), 60.0, 0))
    assert refused == ([donor] if is_blamed else [])
    assert not catching.busy()


def test_a_dispute_between_donors_is_told_with_their_names() -> None:
    told: list[str] = []
    node = SimpleNamespace(
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
        report=lambda kind, text: told.append(text),
    )
    event = Disputed(2, 9, (PeerId("a"),), tuple(PeerId(name) for name in "bcde"))
    Catching(node).handle(event)  # type: ignore[arg-type]
    (text,) = told
    assert "fragment 2" in text
    assert "version 9" in text
    assert "taking that of a; b, c, d would give another" in text


def test_a_commit_that_nobody_made_stops_nobody_for_long_and_names_its_signer() -> None:
    """Told to all by one of four, again and again, whole nodes go on after some seconds."""

    async def work() -> None:
        world = World("a", "b", "c", "liar")
        world.start()
        await asyncio.sleep(1.5)
        await world.train(4)
        *honest, liar = world.trainers
        names = [trainer.me for trainer in world.trainers]

        async def lie() -> None:
            while True:
                for trainer in honest:
                    agreed = trainer.node.agreed[0]
                    decision = forged_commit(
                        liar.identity, agreed.version + 1, agreed.digest, names,
                        run=trainer.node.run_digest, blocks=trainer.node.shape.blocks[0],
                    )  # fmt: skip
                    envelope = Envelope(version=PROTOCOL_VERSION, run=trainer.node.run_digest)
                    envelope.decision.CopyFrom(decision)
                    await world.deliver(liar.me, trainer.me, envelope.SerializeToString())
                await asyncio.sleep(1)

        lying = asyncio.create_task(lie())
        before = min(world.versions())[0]
        await world.train(24)
        assert min(world.versions())[0] >= before + 8
        for trainer in honest:
            texts = [event.text for event in trainer.events if isinstance(event, Warned)]
            assert any(liar.me in text and "not believed about rounds of others" in text for text in texts)
        lying.cancel()
        await world.close()

    run_virtual(work())
