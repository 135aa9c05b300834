"""Every type of message, wrong in every way that a tape can say, into real nodes that train: nothing ends,
nothing is kept beyond its bound, and each refusal is counted by kind and sender.

``tests/fuzz`` has the world and the mutations; the same games are played for longer under a coverage-guided
fuzzer (``tests/fuzz/target.py``).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p_co2.protocol.rounds.gathering import behind_message
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import KINDS as KINDS_OF_ALL
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import AskOutcome, Envelope, RoundKey
from tests.envelopes import enveloped
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.play import STRANGER, Game, check_bounds
from tests.fuzz.stages import KINDS_BETWEEN, StageGame
from tests.fuzz.world import RUN, World, make_identity, run_virtual

KINDS = set(KINDS_OF_ALL) - {"model_table"} - set(KINDS_BETWEEN)  # a bench has no model to compare
PATIENT = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MUTANTS_PER_MESSAGE, MESSAGES_PER_KIND = 6, 8
SELDOM_WRONG = frozenset({"manifest", "chunk"})
"""Of most of their mutants nobody can say that they are wrong: they are only not what was asked for."""


@given(st.binary(max_size=300))
@PATIENT
def test_a_strangers_wrong_messages_change_nothing(data: bytes) -> None:
    game = Game(data, insiders=False, losses=False)
    game.play()
    game.check_agreement()


@given(st.binary(max_size=300))
@PATIENT
def test_a_members_wrong_messages_end_nobody(data: bytes) -> None:
    Game(data, insiders=True, losses=True).play()


def test_every_kind_of_message_is_tried() -> None:
    """In one world where messages get lost and a peer falls behind, so that all kinds are sent for real."""
    tried: Counter[str] = Counter()
    refusals: Counter[tuple[str, str, str]] = Counter()

    async def work() -> None:
        world = World("a", "b", "c")
        shuffle = random.Random(4)
        identities = {trainer.me: trainer.identity for trainer in world.trainers}
        identities[STRANGER] = make_identity("mallory")
        mutator = Mutator(Tape(b""))
        cut_off: set[PeerId] = set()

        def tap(sender: PeerId, receiver: PeerId, data: bytes) -> bool:
            kind = mutator.saw(data)
            mutants = MUTANTS_PER_MESSAGE * (5 if kind in SELDOM_WRONG else 1)
            if tried[kind] < MESSAGES_PER_KIND * mutants:
                for number in range(mutants):
                    mutator.tape = Tape(shuffle.randbytes(64))
                    source = (STRANGER, sender)[number % 2]
                    world.put(source, receiver, mutator.mutate(data, identities[source]))
                tried[kind] += mutants
            if kind in ("ping", "pong"):
                return True
            return not {sender, receiver} & cut_off and shuffle.random() > 0.2

        world.tap = tap
        world.start()
        await asyncio.sleep(1.5)
        await world.train(12)
        for _ in range(10):  # which kinds a peer that is cut off needs afterwards is chance
            cut_off.add(world.trainers[2].me)
            await world.train(2.5)
            cut_off.clear()
            await world.train(8)
            if set(tried) >= KINDS - {"behind", "leave"}:
                break
        first, second = world.trainers[:2]
        for _ in range(MESSAGES_PER_KIND):  # these nodes hear of each other too soon to need them
            await world.train(0.7)
            version = second.node.agreed[0].version
            behind = behind_message(0, version + 1, version + 1, bytes(32), [first.me])
            asked = AskOutcome(key=RoundKey(fragment=0, round=version, attempt=bytes(16)))
            for message in (behind, asked):
                world.send(first.me, second.me, enveloped(message, head_of(first.group)))
        for trainer in world.trainers[1:]:
            trainer.node.say_goodbye("done")
        await asyncio.sleep(0.1)
        for trainer in world.trainers:
            check_bounds(trainer)
            refusals.update(trainer.node.router.refusals)
        await world.close()

    torch.set_num_threads(1)
    run_virtual(work())
    assert set(tried) == KINDS
    refused = {(sender, kind) for sender, kind, _ in refusals}
    assert {kind for _, kind in refused} >= KINDS - {"leave", "refusal"}  # these hold nothing wrong
    assert STRANGER in {sender for sender, _ in refused}


@given(st.binary(max_size=200))
@PATIENT
def test_a_strangers_wrong_messages_change_nothing_between_stages(data: bytes) -> None:
    StageGame(data, insiders=False).play()


@given(st.binary(max_size=200))
@PATIENT
def test_a_members_wrong_messages_end_nobody_between_stages(data: bytes) -> None:
    StageGame(data, insiders=True, losses=True).play()


def test_every_kind_of_message_is_tried_between_stages() -> None:
    tried: Counter[str] = Counter()
    refused: Counter[tuple[str, str, str]] = Counter()
    for seed in range(9):
        game = StageGame(random.Random(seed).randbytes(400), insiders=True)
        game.play()
        tried += game.tried
        refused += game.refused
    assert set(tried) >= {*KINDS_BETWEEN, "ping", "pong"}
    assert {kind for _, kind, _ in refused} >= {"neighbour", "forward", "backward"}


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=30), st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_refused_and_counted(messages: list[bytes], headed: int) -> None:
    head = Envelope(version=PROTOCOL_VERSION, run=RUN.digest()).SerializeToString() if headed else b""

    async def work() -> None:
        world = World("a")
        world.start()
        await asyncio.sleep(0)
        (trainer,) = world.trainers
        for message in messages:
            await world.deliver(STRANGER, trainer.me, head + message)
        check_bounds(trainer)
        counted = {sender for sender, _, _ in trainer.node.router.refusals}
        assert counted <= {STRANGER}
        if not headed:
            assert trainer.node.router.refusals.total() == len(messages)
        await world.close()

    run_virtual(work())


def refused_by_one_node(*messages: Callable[[], bytes]) -> Counter[tuple[str, str, str]]:
    result: Counter[tuple[str, str, str]] = Counter()

    async def work() -> None:
        world = World("a")
        world.start()
        await asyncio.sleep(0)
        for message in messages:
            await world.deliver(STRANGER, world.trainers[0].me, message())
        result.update(world.trainers[0].node.router.refusals)
        await world.close()

    run_virtual(work())
    return result


def test_refusals_are_counted_by_sender_kind_and_reason() -> None:
    good = Envelope(version=PROTOCOL_VERSION, run=RUN.digest())
    good.fetch.fragment = 77
    padded = Envelope(version=PROTOCOL_VERSION, run=RUN.digest())
    padded.ping.status.finished = bytes(40_000)
    counted = refused_by_one_node(
        good.SerializeToString, good.SerializeToString, padded.SerializeToString, lambda: b"\xff",
        lambda: bytes(MAX_MESSAGE_BYTES + 1),
    )  # fmt: skip
    assert counted == {
        (STRANGER, "fetch", "unknown fragment"): 2,
        (STRANGER, "", "unreadable"): 1,
        (STRANGER, "", "too large"): 2,
    }
