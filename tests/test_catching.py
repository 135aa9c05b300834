"""node.catching: by whose word a peer knows where the swarm is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2p_co2.catchup import ROUND, STATE, Disputed, Fetched, FetchFailed, Goal
from p2p_co2.membership import PeerInfo
from p2p_co2.node.catching import NOTICE_AFTER_S, ROUND_AGAIN, Catching
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.telemetry.events import Warned
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Decision, Envelope, Status
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
        status=Status(phase=phase), heard_at=0.0, status_at=0.0, versions=versions, digests=digests
    )


def all_near() -> SimpleNamespace:
    """A node's ``far`` in a swarm of one cell."""
    return SimpleNamespace(
        cells=1,
        is_near=lambda peer: True,
        outlook=SimpleNamespace(revision=0, words={}, other_digest=lambda *of, is_ours: None),
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
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.JOINING)),
        far=SimpleNamespace(cells=1, is_near=lambda peer: True),
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
    assert catching.majority.is_most({PeerId("a"), PeerId("b")}) is is_most


def test_who_went_on_while_a_fetch_ended_is_looked_for_though_all_are_silent() -> None:
    """At the end of a run nobody has news. One that fetched a round, while the others made the next, must see
    by itself that it is behind."""
    wanted: list[Goal] = []
    ahead = heard(Status.DRAINING, versions=(4,), digests=(GOOD,))
    node = SimpleNamespace(
        membership=SimpleNamespace(live={PeerId("a"): ahead}, revision=7),
        agreed=[AgreedVersion(2, NONE)],
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.DRAINING)),
        far=all_near(),
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
    ("phases", "versions", "cells", "last"),
    [
        ("dd", (4, 3), 1, 4),  # one has a last round that the others did not hear of
        ("dd", (5, 3), 1, 4),  # one round at a time
        ("dd", (3, 3), 1, 0),
        ("dt", (4, 3), 1, 0),  # while somebody trains, one alone moves nobody
        ("ddj", (4, 3, 3), 1, 0),
        ("dd", (4, 3), 2, 0),  # over cells the council says what is over
    ],
)
def test_a_last_round_that_few_have_is_taken_when_nobody_trains(
    phases: str, versions: tuple[int, ...], cells: int, last: int
) -> None:
    named = {"d": Status.DRAINING, "t": Status.TRAINING, "j": Status.JOINING}
    live = {
        PeerId(str(number)): heard(named[phase], versions=(version,), digests=(GOOD,))
        for number, (phase, version) in enumerate(zip(phases, versions, strict=True))
    }
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=0),
        agreed=[AgreedVersion(3, GOOD)],
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.DRAINING)),
        far=SimpleNamespace(cells=cells),
        catchup=SimpleNamespace(ask_swarm=lambda vouch: None),
    )
    majority = Catching(node).majority  # type: ignore[arg-type]
    assert majority.near_version(0) == 3
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
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.DRAINING)),
        far=all_near(),
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


def test_that_a_fragment_could_not_be_brought_up_is_told_once_for_each_state() -> None:
    """At the end of a run in several states it was told every five seconds."""
    told: list[str] = []
    live = {PeerId(name): heard(Status.TRAINING, versions=(5,), digests=(GOOD,)) for name in "ab"}
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=1),
        agreed=[AgreedVersion(3, GOOD)],
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.DRAINING)),
        far=all_near(),
        rounds=SimpleNamespace(forget_outcome=lambda fragment, round_, is_proved: None),
        catchup=SimpleNamespace(
            ask_swarm=lambda vouch: None,
            want=lambda goal, now: None,
            shape=SimpleNamespace(replayable=lambda fragment: 8),
        ),
        now=lambda: 20.0,
        report=lambda kind, text: told.append(text),
        give_up_offer=lambda fragment: None,
    )
    catching = Catching(node)  # type: ignore[arg-type]
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
    live = {PeerId(name): heard(Status.TRAINING, versions=(4,), digests=(GOOD,)) for name in "ab"}
    node = SimpleNamespace(
        membership=SimpleNamespace(live=live, revision=1),
        agreed=[AgreedVersion(3, GOOD)],
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.TRAINING)),
        far=all_near(),
        catchup=SimpleNamespace(
            ask_swarm=lambda vouch: None,
            want=lambda goal, now: wanted.append(goal),
            shape=SimpleNamespace(replayable=lambda fragment: 7),
        ),
        now=lambda: 20.0,
    )
    catching = Catching(node)  # type: ignore[arg-type]
    assert catching.go_to(0, 4, b"", tuple(live))
    while wanted[-1].what == ROUND:
        catching.handle(FetchFailed(wanted[-1], "silent for 60.0 s", newest_version, chunks_given))
    assert [goal.what for goal in wanted] == [ROUND] * rounds + [STATE]
    assert {goal.version for goal in wanted} == {4}


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
