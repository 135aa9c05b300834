"""Stories that honest peers play together once, and each one's part in them, for ``scenes`` to spoil.

Among three peers of one cell: rounds, a missed one, lost members, states that are loaded. Among seven of a
run with three cells: rounds of all cells, with one member, owner, coordinator or council that is lost, and a
whole cell that is left out; so a part is that of a plain member, of an owner who sums for its cell or for
all, of a coordinator who asks the council, or of the council itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from p2p_co2.protocol.catchup import ROUND, STATE
from p2p_co2.protocol.rounds.cells import council_order
from p2p_co2.protocol.rounds.gathering import behind_message
from p2p_co2.protocol.rounds.swarm import coordination_order
from p2p_co2.protocol.wire.messages_pb2 import Envelope, Listen, ModelRow, ModelTable, RoundKey
from tests.fuzz.bench import LATENCY_S, Bench, Together, envelope
from tests.fuzz.world import make_identity

NAMES = ("a", "b", "c")
CELLS = 3
CELL_NAMES = ("a", "i", "b", "e", "f", "c", "d")
"""Two, three and two in a cell."""
CELLS_BEGAN_S = 3.5 * LATENCY_S
"""After the offers: CELL_BEGIN is there, PARTs are on their way."""
SUMS_BEGAN_S = 5.5 * LATENCY_S
"""CELL_PARTs are on their way."""


class Part(NamedTuple):
    """What one peer of a story heard and did: (time, sender, bytes), or (time, None, action)."""

    story: str
    name: str
    names: tuple[str, ...]
    """All who play, this one too."""
    cells: int
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


# ---- over cells


def _cell(together: Together, cell: int) -> list[Bench]:
    return [bench for bench in together.benches if bench.outlook.cell == cell]


def _coordinator(together: Together, cell: int, fragment: int, round_: int = 1) -> Bench:
    found = coordination_order([bench.me for bench in _cell(together, cell)], fragment, round_)[0]
    return next(bench for bench in together.benches if bench.me == found)


def _all_offer(together: Together, fragment: int) -> None:
    for bench in together.benches:
        together.do(bench, lambda one: one.offer(fragment))


def _cells_agree(together: Together) -> None:
    """Twice: the second time they know of each other."""
    for _ in range(2):
        _all_offer(together, 0)
        together.run(8.0)


def _cells_agree_on_much(together: Together) -> None:
    _all_offer(together, 1)
    together.run(12.0)


def _cell_left_out(together: Together) -> None:
    """One cell is cut off for a round; when it offers for it, it is told where the others are."""
    last = council_order(range(CELLS), 0, 1)[-1]
    late = _cell(together, last)
    others = [bench for bench in together.benches if bench not in late]
    together.cut.update(bench.me for bench in late)
    for bench in others:
        together.do(bench, lambda one: one.offer(0))
    together.run(60.0)
    together.cut.clear()
    together.run(4.0)
    for bench in late:
        together.do(bench, lambda one: one.offer(0))
    together.run(12.0)


def _cells_lose(together: Together, lost: Bench, after_s: float) -> None:
    _all_offer(together, 1)
    together.run(after_s)
    together.cut.add(lost.me)
    together.run(30.0)


def _council_lost(together: Together) -> None:
    """Its cells ask witnesses of its cell."""
    first = council_order(range(CELLS), 1, 1)[0]
    _cells_lose(together, _coordinator(together, first, 1), SUMS_BEGAN_S)


def _coordinator_lost(together: Together) -> None:
    last = council_order(range(CELLS), 1, 1)[-1]
    _cells_lose(together, _coordinator(together, last, 1), CELLS_BEGAN_S)


def _owner_lost(together: Together) -> None:
    first = council_order(range(CELLS), 1, 1)[0]
    coordinator = _coordinator(together, first, 1)
    owner = next(bench for bench in _cell(together, first) if bench is not coordinator)
    _cells_lose(together, owner, CELLS_BEGAN_S)


CELL_STORIES: tuple[Callable[[Together], None], ...] = (
    _cells_agree, _cells_agree_on_much, _cell_left_out, _council_lost, _coordinator_lost, _owner_lost,
)  # fmt: skip


# ---- what comes of them


@cache
def parts() -> tuple[Part, ...]:
    """Every peer's part in every story."""
    found: list[Part] = []
    for story in STORIES:
        found += _played(story, NAMES, 1)
    for story in CELL_STORIES:
        found += _played(story, CELL_NAMES, CELLS)
    return tuple(found)


def _played(story: Callable[[Together], None], names: tuple[str, ...], cells: int) -> list[Part]:
    together = Together(*names, cells=cells)
    for bench in together.benches:
        near = [other for other in together.benches if other is not bench and bench.is_near(other.me)]
        together.do(bench, lambda one, near=near: one.meet(*near))  # type: ignore[misc]
    together.run(1.5 if cells == 1 else 6.0)
    story(together)
    return [
        Part(story.__name__.strip("_"), name, names, cells, tuple(together.came[bench.me]))
        for name, bench in zip(names, together.benches, strict=True)
    ]


@cache
def examples(cells: int = 0) -> dict[str, tuple[bytes, ...]]:
    """Right messages by kind, to be made wrong; of the stories in so many cells, or of all."""
    found: dict[str, dict[bytes, None]] = {}
    for part in parts():
        for _, sender, data in part.steps if cells in (0, part.cells) else ():
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
    table = ModelTable(model=1, rows=[ModelRow(name="0.weight", shape=[2], dtype="float32", trained=True)])
    found["model_table"] = {envelope(table): None}  # these peers compare no models
    return {kind: tuple(list(some)[:: max(1, len(some) // 8)]) for kind, some in sorted(found.items())}
