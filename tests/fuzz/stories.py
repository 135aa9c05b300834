"""Stories that three honest peers play together once, and each one's part in them, for ``scenes`` to spoil:
rounds, a missed one, lost members, states that are loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from p2p_co2.protocol.catchup.goals import ROUND, STATE
from p2p_co2.protocol.rounds.gathering import behind_message
from p2p_co2.protocol.wire.messages_pb2 import AskOutcome, Envelope, ModelRow, ModelTable, RoundKey
from tests.fuzz.bench import Bench, Together, envelope
from tests.fuzz.world import make_identity

NAMES = ("a", "b", "c")


class Part(NamedTuple):
    """What one peer of a story heard and did: (time, sender, bytes), or (time, None, action)."""

    story: str
    name: str
    names: tuple[str, ...]
    """All who play, this one too."""
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
    """One peer falls silent in the middle of a round: its parts are given away."""
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


def _deaf_for_a_moment(together: Together) -> None:
    """One peer hears neither means nor votes, and asks how the round ended."""
    for bench in together.benches:
        together.do(bench, lambda one: one.offer(1))
    together.run(0.035)
    together.cut.add(together.benches[2].me)
    together.run(1.0)
    together.cut.clear()
    together.run(12.0)


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
    _small_round, _large_round, _missed_round, _lost_first, _lost_second, _lost_third,
    _deaf_for_a_moment, _loads,
)  # fmt: skip


# ---- what comes of them


@cache
def parts() -> tuple[Part, ...]:
    """Every peer's part in every story."""
    return tuple(part for story in STORIES for part in _played(story))


def _played(story: Callable[[Together], None]) -> list[Part]:
    together = Together(*NAMES)
    for bench in together.benches:
        near = [other for other in together.benches if other is not bench]
        together.do(bench, lambda one, near=near: one.meet(*near))  # type: ignore[misc]
    together.run(1.5)
    story(together)
    return [
        Part(story.__name__.strip("_"), name, NAMES, tuple(together.came[bench.me]))
        for name, bench in zip(NAMES, together.benches, strict=True)
    ]


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
    asked = AskOutcome(key=RoundKey(fragment=0, round=1, attempt=bytes(16)))
    found["ask_outcome"] = {envelope(asked): None}  # they all hear how a round ends
    table = ModelTable(model=1, rows=[ModelRow(name="0.weight", shape=[2], dtype="float32", trained=True)])
    found["model_table"] = {envelope(table): None}  # these peers compare no models
    return {kind: tuple(list(some)[:: max(1, len(some) // 8)]) for kind, some in sorted(found.items())}
