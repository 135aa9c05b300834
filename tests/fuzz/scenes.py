"""Scenes: one peer's part in a story that was played once, again and again, with wrong messages in between.

A scene costs about a millisecond (``play`` has whole games of real nodes, five hundred times as long), so a
coverage-guided fuzzer gets far. What must hold, whatever the tape says: nothing is raised, no timer fires for
ever, what is held stays within the bounds that the machines name, every offer ends, and refusals name those
who sent what was refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from p2p_co2.catchup import ROUND, STATE
from p2p_co2.membership import SILENCE_FLOOR_S
from p2p_co2.node.receiving import OTHERS
from p2p_co2.rounds.bounds import READY_CAP_S, ROUND_CAP_S
from p2p_co2.rounds.gathering import behind_message
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import Envelope, Listen, RoundKey
from tests.fuzz.bench import Bench, Together, envelope
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.world import make_identity

NAMES = ("a", "b", "c")
STRANGER = make_identity("mallory")
MOST_REPEATS = 20
ENDS_WITHIN_S = 2 * ROUND_CAP_S + READY_CAP_S


class Part(NamedTuple):
    """What one peer of a story heard and did: (time, sender, bytes), or (time, None, action)."""

    name: str
    steps: tuple[tuple[float, Any, Any], ...]


def _round(together: Together, fragment: int) -> None:
    for bench in together.benches:
        together.do(bench, lambda one: one.offer(fragment))
    together.run(6.0)


def _small_round(together: Together) -> None:
    _round(together, 0)


def _large_round(together: Together) -> None:
    _round(together, 1)


def _missed_round(together: Together) -> None:
    """One peer misses a round, offers for it afterwards, is told so, and replays it or loads the state."""
    late = together.benches[2]
    together.cut.add(late.me)
    for _ in range(2):
        for bench in together.benches[:2]:
            together.do(bench, lambda one: one.offer(0))
        together.run(12.0)
    together.cut.clear()
    together.run(2.0)
    together.do(late, lambda one: one.offer(0))
    together.run(4.0)


def _lost_member(together: Together, number: int, after_s: float) -> None:
    """One peer falls silent in the middle of a round: parts are given away, a coordinator succeeded."""
    for bench in together.benches:
        together.do(bench, lambda one: one.offer(1))
    together.run(after_s)
    together.cut.add(together.benches[number].me)
    together.run(25.0)


def _lost_first(together: Together) -> None:
    _lost_member(together, 0, 0.025)


def _lost_second(together: Together) -> None:
    _lost_member(together, 1, 0.025)


def _lost_third(together: Together) -> None:
    _lost_member(together, 2, 0.035)


def _loads(together: Together) -> None:
    _small_round(together)
    late = together.benches[0]
    together.do(late, lambda one: one.fetch(ROUND, 0, 1))
    together.do(late, lambda one: one.fetch(STATE, 1, 0))
    together.run(2.0)
    together.do(late, lambda one: one.fetch(STATE, 0, 9))  # nobody has it
    together.run(2.0)
    together.do(late, Bench.leave)
    together.run(0.1)


STORIES: tuple[Callable[[Together], None], ...] = (
    _small_round, _large_round, _missed_round, _lost_first, _lost_second, _lost_third, _loads,
)  # fmt: skip


@cache
def parts() -> tuple[Part, ...]:
    """Every peer's part in every story."""
    found = []
    for story in STORIES:
        together = Together(*NAMES)
        for bench in together.benches:
            others = [other for other in together.benches if other is not bench]
            together.do(bench, lambda one, others=others: one.meet(*others))  # type: ignore[misc]
        together.run(1.5)
        story(together)
        found += [
            Part(name, tuple(together.came[bench.me]))
            for name, bench in zip(NAMES, together.benches, strict=True)
        ]
    return tuple(found)


@cache
def examples() -> dict[str, tuple[bytes, ...]]:
    """Right messages by kind, to be made wrong."""
    found: dict[str, dict[bytes, None]] = {}
    for part in parts():
        for _, sender, data in part.steps:
            if sender is not None:
                kind = Envelope.FromString(data).WhichOneof("body") or ""
                found.setdefault(kind, {})[data] = None
    behind = behind_message(0, 1, 1, bytes(32), [make_identity(name).peer_id for name in NAMES])
    found["behind"] = {
        envelope(behind): None
    }  # these peers hear of each other's versions too soon to need it
    digest, attempts = bytes(32), (b"", bytes(16))  # nor is any of them a moment late
    found["listen"] = {
        envelope(Listen(key=RoundKey(fragment=0, round=1, attempt=attempt), state_digest=digest)): None
        for attempt in attempts
    }
    return {kind: tuple(list(some)[:: max(1, len(some) // 8)]) for kind, some in sorted(found.items())}


class Scene:
    """One part with wrong messages. The tape says which part, whether members may lie (else a stranger), and
    before each step what comes in; ``kind`` makes the wrong messages from right ones of that kind alone."""

    def __init__(self, data: bytes, kind: str = "") -> None:
        self._tape, self._kind = Tape(data), kind
        self._mutator = Mutator(self._tape)
        chosen = parts()
        self.part = chosen[self._tape.choose(len(chosen))]
        self._insiders = bool(self._tape.choose(2))
        self.bench = Bench(self.part.name, is_heard=False)
        self.wrong = 0

    def play(self) -> None:
        """Raises ``AssertionError`` for a law that was broken, and whatever a machine raises."""
        for at, sender, what in self.part.steps:
            if not self._tape.over:
                self._lie(at, sender, what)
            if sender is None:
                self.bench.tick(at)
                what(self.bench)
            elif self._tape.over or not self._insiders or self._tape.choose(16):
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
        members = [make_identity(name) for name in NAMES if name != self.part.name]
        if not self._insiders or self._tape.choose(4) == 0:
            return STRANGER
        return next((one for one in members if one.peer_id == sender), members[0])

    def check(self) -> None:
        bench = self.bench
        bench.tick(bench.at + SILENCE_FLOOR_S + 1.0)  # the others are gone
        bench.come_to_rest(ENDS_WITHIN_S)
        assert not bench.rounds.open_offers()
        for held in (bench.rounds.held(), bench.membership.held(), bench.catchup.held()):
            for name, (count, bound) in held.items():
                assert count <= bound, f"{name}: {count} of {bound}"
        names = {STRANGER.peer_id, OTHERS, *(make_identity(name).peer_id for name in NAMES)}
        assert {sender for sender, _, _ in bench.receiving.refusals} <= names
