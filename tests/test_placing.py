"""What a peer says of itself beside its rounds: where the run is, and that it trains alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.node.placing import ALONE_S, LAST_WORD_S, Placing
from p2p_co2.protocol.wire.messages_pb2 import Status
from p2p_co2.telemetry.events import Warned


@pytest.mark.parametrize(
    ("phase", "versions", "is_said"),
    [(Status.TRAINING, (0, 1), True), (Status.TRAINING, (0, 0), False), (Status.JOINING, (4, 4), False)],
)
def test_a_peer_that_leaves_says_where_the_run_is_if_it_has_been_in_it(
    phase: Status.Phase, versions: tuple[int, ...], is_said: bool
) -> None:
    said: list[Any] = []

    class Net:
        async def publish_position(self, *what: Any) -> None:
            said.append(what)
            raise TransportError("a seed that is gone is no reason to stay")

    node: Any = SimpleNamespace(
        agreed=[SimpleNamespace(version=version) for version in versions],
        progress=SimpleNamespace(local=SimpleNamespace(phase=phase), position=lambda: 2.5),
    )
    asyncio.run(Placing(cast(Any, Net()), node).say_last())
    assert said == is_said * [(2.5, list(versions), True)]


async def test_a_last_word_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_co2.node.placing.LAST_WORD_S", 0.01)
    assert LAST_WORD_S <= 2.0

    class Deaf:
        async def publish_position(self, *what: Any) -> None:
            await asyncio.Event().wait()

    node: Any = SimpleNamespace(
        agreed=[SimpleNamespace(version=1)],
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.DRAINING), position=lambda: 2.5),
    )
    await Placing(cast(Any, Deaf()), node).say_last()


def test_who_trains_alone_is_told_so_once() -> None:
    """All looks well from inside: rounds commit, the loss falls."""
    told: list[str] = []
    node: Any = SimpleNamespace(
        now=lambda: clock[0], live_peers=lambda: live[0],
        progress=SimpleNamespace(local=SimpleNamespace(phase=Status.TRAINING)),
        report=lambda kind, text: told.append(text) if kind is Warned else None,
    )  # fmt: skip
    clock, live = [0.0], [0]
    placing = Placing(cast(Any, None), node)

    def look(at: float, others: int = 0, phase: Status.Phase = Status.TRAINING) -> int:
        clock[0], live[0], node.progress.local.phase = at, others, phase
        placing.look_whether_alone()
        return len(told)

    assert look(0.0, phase=Status.JOINING) == 0
    assert look(100.0) == look(100.0 + ALONE_S - 1) == 0
    assert look(140.0, others=1) == look(141.0) == look(141.0 + ALONE_S - 1) == 0
    assert look(200.0, phase=Status.PAUSED) == look(201.0) == 0
    assert look(201.0 + ALONE_S) == 1
    assert "p2p-co2 join TICKET" in told[0]
    assert look(999.0) == look(1000.0, others=1) == look(1001.0) == look(2000.0) == 1
