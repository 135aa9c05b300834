"""Scenes: one peer's part in a story that was played once, again and again, with wrong messages in between.

A scene costs about a millisecond (``play`` has whole games of real nodes, five hundred times as long), so a
coverage-guided fuzzer gets far. What must hold, whatever the tape says: nothing is raised, no timer fires for
ever, what is held stays within the bounds that the machines name, every offer ends, and refusals name those
who sent what was refused.
"""

from __future__ import annotations

from typing import Any

from p2p_co2.node.router import OTHERS
from p2p_co2.protocol.heartbeat import SILENCE_FLOOR_S
from p2p_co2.protocol.rounds.bounds import READY_CAP_S, ROUND_CAP_S
from p2p_co2.protocol.wire.identity import Identity, PeerId
from tests.fuzz.bench import Bench
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.stories import examples, parts
from tests.fuzz.world import make_identity

STRANGERS = tuple(make_identity(f"mallory {number}") for number in range(12))
MOST_REPEATS = 20
ENDS_WITHIN_S = 2 * ROUND_CAP_S + READY_CAP_S


class Scene:
    """One part with wrong messages. The tape says which part, whether members may lie (else strangers), from
    which step on, and before each step from then what comes in; ``kind`` makes the wrong messages from right
    ones of that kind alone."""

    def __init__(self, data: bytes, kind: str = "") -> None:
        self._tape, self._kind = Tape(data), kind
        self._mutator = Mutator(self._tape)
        chosen = parts()
        self.part = chosen[self._tape.choose(len(chosen))]
        self._insiders = bool(self._tape.choose(2))
        self._first = self._tape.choose(len(self.part.steps))
        self._identities = [make_identity(name) for name in self.part.names]
        self.bench = Bench(self.part.name, is_heard=False)
        self.wrong = 0

    def play(self) -> None:
        """Raises ``AssertionError`` for a law that was broken, and whatever a machine raises."""
        for number, (at, sender, what) in enumerate(self.part.steps):
            is_spoiled = number >= self._first
            if is_spoiled and not self._tape.over:
                self._lie(at, sender, what)
            if sender is None:
                self.bench.tick(at)
                what(self.bench)
            elif not is_spoiled or self._tape.over or not self._insiders or self._tape.choose(16):
                self.bench.take(sender, what, at)
        while not self._tape.over:
            self._lie(self.bench.at + 0.05, None, None)
        self.check()

    def _lie(self, at: float, sender: PeerId | None, what: Any) -> None:
        for _ in range(self._tape.choose(4)):
            source = self._source(sender)
            if self._kind or sender is None or self._tape.choose(3) == 0:
                kinds = examples()
                some = kinds[self._kind or list(kinds)[self._tape.choose(len(kinds))]]
                data = some[self._tape.choose(len(some))]
            else:
                data = what
            data = self._mutator.mutate(data, source)
            self.wrong += 1
            for _ in range(MOST_REPEATS if self._tape.choose(32) == 0 else 1):
                self.bench.take(source.peer_id, data, at)

    def _source(self, sender: PeerId | None) -> Identity:
        members = [one for one in self._identities if one.peer_id != self.bench.me]
        if not self._insiders or self._tape.choose(4) == 0:
            return STRANGERS[self._tape.choose(len(STRANGERS))]
        told = next((one for one in members if one.peer_id == sender), members[0])
        return told if self._tape.choose(4) else members[self._tape.choose(len(members))]

    def check(self) -> None:
        bench = self.bench
        bench.tick(bench.at + SILENCE_FLOOR_S + 1.0)  # the others are gone
        bench.come_to_rest(ENDS_WITHIN_S)
        assert not bench.rounds.open_offers()
        for machine in (bench.rounds, bench.membership, bench.catchup.donor):
            for name, (count, bound) in machine.held().items():
                assert count <= bound, f"{name}: {count} of {bound}"
        names = {OTHERS, *(one.peer_id for one in (*STRANGERS, *self._identities))}
        assert {sender for sender, _, _ in bench.router.refusals} <= names
