"""One game: honest peers train together, and a tape decides which of their messages come back changed, from
whom, how often.

What must hold, whatever the tape says (``check``): no node ends, nothing reaches the training thread, what is
held stays within its bounds. If the wrong messages come from a stranger alone, the honest peers also keep one
agreed state and go on with their rounds.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.world import RUN, Trainer, World, make_identity, run_virtual

STRANGER = make_identity("mallory").peer_id
LEAST_TRAINING_S, TAPE_TRAINING_S = 9.0, 10.0
MOST_REPEATS = 40
MOST_HELD_BYTES = 64 << 20
"""Far above what this small world holds; a bound that failed would pass it."""


class Game:
    """``insiders``: wrong messages may come in the name of the peer that sent the right one. ``losses``: the
    tape may also lose messages, so that the rarer kinds are sent at all."""

    def __init__(self, data: bytes, *, insiders: bool, losses: bool) -> None:
        self._tape = Tape(data)
        self._insiders, self._losses = insiders, losses
        self._mutator = Mutator(self._tape)
        self._next = self._tape.choose(32)
        self._pings = 0
        self.sent: Counter[str] = Counter()
        """Wrong messages by the kind they were made from."""

    def play(self) -> None:
        run_virtual(self._play())

    async def _play(self) -> None:
        self.world = World("a", "b", "c")
        self._identities = {trainer.me: trainer.identity for trainer in self.world.trainers}
        self._identities[STRANGER] = make_identity("mallory")
        self.world.tap = self._tap
        self.world.start()
        await asyncio.sleep(1.5)  # they find each other
        await self._introduce()
        ends_at = asyncio.get_running_loop().time() + TAPE_TRAINING_S
        while not self._tape.over and asyncio.get_running_loop().time() < ends_at:
            await self.world.train(0.5)
        self._insiders = self._losses = False
        await self.world.train(LEAST_TRAINING_S)
        self.check()
        await self.world.close()

    async def _introduce(self) -> None:
        """Let the stranger be live in the others' eyes, so that its messages are looked at."""
        for trainer in self.world.trainers:
            ping = Envelope(version=PROTOCOL_VERSION, run=RUN.digest())
            ping.ping.status.phase = 0
            ping.ping.sent_at = 1.0
            await self.world.deliver(STRANGER, trainer.me, ping.SerializeToString())

    def _tap(self, sender: PeerId, receiver: PeerId, data: bytes) -> bool:
        kind = self._mutator.saw(data)
        self._pings += kind in ("ping", "pong")
        if self._tape.over or (kind in ("ping", "pong") and self._pings % 16):
            return True
        self._next -= 1
        if self._next > 0:
            return True
        self._next = self._tape.choose(64)
        if self._losses and self._tape.choose(3) == 0:
            return False
        source = sender if self._insiders and self._tape.choose(2) else STRANGER
        wrong = self._mutator.mutate(data, self._identities[source])
        times = MOST_REPEATS if self._tape.choose(16) == 0 else 1
        self.sent[kind] += times
        for _ in range(times):
            self.world.put(source, receiver, wrong)
        return True

    def check(self) -> None:
        """Raise ``AssertionError`` for a law that was broken."""
        for trainer in self.world.trainers:
            check_bounds(trainer)

    def check_agreement(self) -> None:
        """After wrong messages of a stranger alone: one state by version, and rounds that go on."""
        digests = self.world.digests()
        for place in set(digests[0]) & set(digests[1]) & set(digests[2]):
            assert len({held[place] for held in digests}) == 1, place
        assert min(min(versions) for versions in self.world.versions()) >= 1, self.world.versions()


def check_bounds(trainer: Trainer) -> None:
    """The node lives, nothing reached the training thread, and what is held is bounded. Raises
    ``AssertionError``."""
    node = trainer.node
    assert node.life.bug is None, node.life.bug
    assert trainer.ledger.failure is None
    assert not node.life.stopping.is_set()
    for holder in (node.router, node.rounds, node.membership, node.catchup.donor):
        for name, (held, most) in holder.held().items():
            assert held <= most, name
    assert len(node.membership.live) <= 4
    assert size_of(node.rounds) + size_of(node.membership) + size_of(node.catchup) < MOST_HELD_BYTES


def size_of(thing: object) -> int:
    """Bytes that ``thing`` holds, strings and containers below it counted once."""
    seen: set[int] = set()
    total, left = 0, [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += one.ByteSize() if hasattr(one, "ByteSize") else sys.getsizeof(one)
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset) or type(one).__name__ == "deque":
            left += list(one)  # type: ignore[arg-type]
        elif type(one).__module__.startswith("p2p_co2") and not hasattr(one, "ByteSize"):
            left += list(getattr(one, "__dict__", {}).values())
    return total
