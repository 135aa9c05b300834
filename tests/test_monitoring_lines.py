"""Exchanges held against their lines, and what a long run looks like: by hand."""

from __future__ import annotations

import pytest

from monitoring.exchanges import ExchangeLog, exchange_figures
from monitoring.steady_state import SteadyState
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.telemetry import events as ev

LINES = {"ada": PROFILES["dsl"], "bob": PROFILES["dsl"]}
"""20 Mbit/s up."""


def told_exchange() -> ExchangeLog:
    """One round of two peers: 5 MB encoded, so that each sends 5 MB; 2.5 s until the slower one holds all
    means, 4 s until the last one knows of the commit."""
    log = ExchangeLog()
    for peer in ("a", "b"):
        log.add(ev.PeerStarted(
            at=0.0, peer=peer, name={"a": "ada", "b": "bob"}[peer], pid=1, software="", device="cpu",
            parameters=1, fragments=1, run="",
        ))  # fmt: skip
    log.add(
        ev.FragmentSent(
            at=9.0, peer="a", fragment=0, round=1, payload_bytes=5_000_000, weight=1.0, relative_error=0.0
        )
    )
    log.add(ev.RoundBegan(at=10.0, peer="a", fragment=0, round=1, group=("a", "b"), waited_s=1, deadline_s=1))
    for peer, at, begun_s, means_s in (("a", 13.0, 0.0, 2.0), ("b", 14.0, 1.0, 3.5)):
        log.add(ev.RoundCommitted(
            at=at, peer=peer, fragment=0, round=1, coordinator="a", group_size=2, contributors=2, partial=0,
            duration_s=at - 9.0, begun_s=begun_s, parts_s=1.5, means_s=means_s,
        ))  # fmt: skip
    return log


def test_an_exchange_is_held_against_its_line() -> None:
    traffic = [(at, {name: (int(1.25e6 * (at - 10)), 0) for name in LINES}) for at in (10.0, 12.0, 14.0)]
    figures = exchange_figures(told_exchange(), traffic, LINES)
    assert figures["count"] == 1
    assert figures["duration_s"]["median"] == 4.0
    assert figures["line_share"]["median"] == 0.5  # 10 of 20 Mbit/s
    assert figures["goodput_share"]["median"] == pytest.approx(40 / 4.0 / 20)
    assert figures["transfer_share"]["median"] == pytest.approx(40 / 2.5 / 20)


def test_exchanges_that_overlap_share_the_line() -> None:
    log = told_exchange()
    log.add(ev.RoundBegan(at=11.5, peer="b", fragment=0, round=2, group=("a", "b"), waited_s=1, deadline_s=1))
    log.add(ev.RoundCommitted(
        at=15.0, peer="b", fragment=0, round=2, coordinator="b", group_size=2, contributors=2, partial=0,
        duration_s=3.5, begun_s=0.5, parts_s=1.5, means_s=3.5,
    ))  # fmt: skip
    traffic = [(at, {name: (int(1.25e6 * (at - 10)), 0) for name in LINES}) for at in (10.0, 12.5, 15.0)]
    figures = exchange_figures(log, traffic, LINES)
    assert figures["count"] == 2
    assert figures["line_share"]["lowest"] == figures["line_share"]["highest"] == 0.5
    assert figures["goodput_share"]["lowest"] == pytest.approx(2 * 40 / 5.0 / 20)  # 10 to 15
    assert figures["transfer_share"]["lowest"] == pytest.approx(2 * 40 / 4.5 / 20, abs=1e-4)  # 10 to 14.5


def test_of_a_round_that_nobody_timed_only_the_whole_is_told() -> None:
    log = told_exchange()
    log.add(ev.RoundBegan(at=20.0, peer="a", fragment=0, round=2, group=("a", "b"), waited_s=1, deadline_s=1))
    log.add(ev.RoundCommitted(
        at=24.0, peer="b", fragment=0, round=2, coordinator="a", group_size=2, contributors=2, partial=0,
        duration_s=0.0,
    ))  # fmt: skip
    figures = exchange_figures(log, [], LINES)
    assert figures["count"] == 2
    assert figures["goodput_share"]["lowest"] == figures["goodput_share"]["highest"]
    assert figures["transfer_share"]["highest"] == pytest.approx(40 / 2.5 / 20)


def progress(at: float, train_s: float, versions: tuple[int, ...]) -> ev.Progress:
    return ev.Progress(
        at=at, peer="a", phase="training", position=0.0, inner_steps=1, tokens=int(10 * train_s),
        tokens_per_s=0.0, loss=1.0, train_s=train_s, exposed_s=0.0, wall_s=at, up_bytes=0, down_bytes=0,
        versions=versions,
    )  # fmt: skip


def test_checkpoints_are_told_beside_what_the_network_costs() -> None:
    log = SteadyState(1)
    saved = [
        ev.CheckpointSaved(at=at, peer="a", path="", versions=(1,), duration_s=2.0) for at in (9.0, 20.0)
    ]
    for event in (progress(5.0, 1.0, (0,)), saved[0], progress(10.0, 2.0, (1,)), saved[1],
                  progress(30.0, 20.0, (2,))):  # fmt: skip
        log.add(event)
    assert log.utilisation() == {"a": 0.9}
    assert log.measuring_share() == {"a": 0.0}
    log.add(ev.AgreedMeasured(at=21.0, peer="a", loss=1.0, position=1.0, tokens=1, duration_s=1.0))
    assert log.measuring_share() == {"a": 0.05}
    assert log.saving_share() == {"a": 0.1}  # the one before the first rounds were over does not count
    assert log.tokens_per_s() == 9.0
