"""When peers measure the agreed parameters: at the start, then one of them a round, by turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_co2.errors import ConfigError
from p2p_co2.recipes.measured import measured
from p2p_co2.trainer import agreed_loss as measuring
from p2p_co2.trainer.agreed_loss import AT_MOST_EVERY_S, SHARE, AgreedLoss
from p2p_co2.trainer.peer import Peer


@pytest.mark.parametrize(
    ("told", "found"),
    [(2, (2.0, {})), ({"loss": 2.0, "log.odds": -1}, (2.0, {"log.odds": -1.0})), ({"loss": 1.5}, (1.5, {}))],
)
def test_a_measurement_is_a_loss_or_figures_with_one(told: Any, found: object) -> None:
    assert measured(told) == found


@pytest.mark.parametrize(
    "told",
    [{}, {"accuracy": 1.0}, {"loss": 1.0, "two words": 2.0}, {"loss": "low"}, {"loss": 1.0, 3: 2.0},
     {"loss": 1.0} | {f"n{number}": 0.0 for number in range(17)}],
)  # fmt: skip
def test_figures_that_nobody_could_draw_are_the_programs_mistake(told: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(told)
    assert caught.value.key == "evaluate"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Trainer:
    """A peer among ``others``, with the real rule of turns; measuring takes ``cost_s``."""

    def __init__(self, me: str, others: list[str], cost_s: float = 0.0) -> None:
        self.peer_id, self.position, self.cost_s = me, 0.0, cost_s
        self._part = SimpleNamespace(view=SimpleNamespace(live_trainers=lambda: others))
        self.measured: list[float] = []

    def has_turn(self, number: int, is_ready: bool) -> bool:
        peer: Any = self
        return Peer.has_turn(peer, number, is_ready)

    def measure_agreed(self, held_out: Any) -> float:
        self.measured.append(self.position)
        return self.cost_s


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    return clock


def run(clock: Clock, names: list[str], rounds: int, round_s: float, cost_s: float) -> list[Trainer]:
    peers = [Trainer(me, [one for one in names if one != me], cost_s) for me in names]
    losses: list[Any] = [AgreedLoss(lambda model: 0.0) for _ in peers]
    for loss, peer in zip(losses, peers, strict=True):
        loss.begin(peer)
    for step in range(4 * rounds):
        clock.now += round_s / 4
        for loss, peer in zip(losses, peers, strict=True):
            peer.position = (step + 1) / 4
            loss.after_step(peer)
    return peers


def test_all_measure_where_they_begin_and_then_take_turns(clock: Clock) -> None:
    peers = run(clock, ["c", "a", "b"], rounds=9, round_s=20.0, cost_s=0.01)
    assert all(peer.measured[0] == 0.0 for peer in peers)
    later = {peer.peer_id: peer.measured[1:] for peer in peers}
    assert later == {"a": [3.0, 6.0, 9.0], "b": [1.0, 4.0, 7.0], "c": [2.0, 5.0, 8.0]}


def test_measuring_stays_within_its_share_of_the_time(clock: Clock) -> None:
    (alone,) = run(clock, ["a"], rounds=400, round_s=1.0, cost_s=0.2)
    assert len(alone.measured) - 1 == pytest.approx(400 / (0.2 / SHARE), abs=1)
    (quick,) = run(clock, ["a"], rounds=100, round_s=1.0, cost_s=0.0)
    assert len(quick.measured) - 1 == pytest.approx(100 / AT_MOST_EVERY_S, abs=1)
