"""A feed of what a test tells, second by second, and the run that it is of."""

from __future__ import annotations

import dataclasses
from typing import Any

from monitoring.facts import SwarmFacts
from monitoring.model import Model
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, FeedState, News
from tests.event_samples import committed, progress, started
from tests.made_swarm import step

RUN = RunConfig(name="told", fragments=2, clock=ClockConfig(mode="time", round_s=5.0, rounds=60))
REASON = "the round before is still in flight"
START = 1_800_000_000.0


class Told(Feed):
    """A feed of what a test tells. Rounds last 5 s; peers call themselves as they are called here."""

    place, state = "a test", FeedState("connected")

    def __init__(self, me: str = "") -> None:
        self.run, self.me = RUN, me
        self.events: list[ev.Event] = []
        self.model = Model(self)

    def take(self) -> News:
        events, self.events = self.events, []
        return News(events)

    def at(self, at: float) -> SwarmFacts:
        step(self.model, START + at)
        return self.model.facts()

    def wrong(self, at: float) -> list[str]:
        return [trouble.words for trouble in self.at(at).troubles]

    def start(self, peer: str, at: float) -> None:
        self.events.append(started(peer, START + at, peer))

    def progress(self, peer: str, at: float, loss: float, position: float | None = None, **more: Any) -> None:
        figures: dict[str, Any] = {
            "position": at / 5 if position is None else position, "tokens": int(10 * at), "exposed_s": 0.0,
            "up_bytes": 0, "down_bytes": 0, "versions": (1, 1), **more,
        }  # fmt: skip
        self.events.append(dataclasses.replace(progress(peer, START + at, loss=loss), **figures))

    def finish(self, peer: str, at: float, reason: str = "the run is over") -> None:
        end = ev.PeerFinished(at=START + at, peer=peer, reason=reason, digest="d", versions=(1, 1))
        self.events.append(end)

    def commit(self, peer: str, at: float, number: int, size: int) -> None:
        told = committed(peer, number, contributors=size, duration_s=0.5)
        told = dataclasses.replace(told, at=START + at, coordinator=peer, group_size=size, partial=0)
        self.events.append(told)

    def sends(self, peer: str, at: float, made: int, skipped: int) -> None:
        for _ in range(made):
            self.events.append(ev.FragmentSent(
                at=START + at, peer=peer, fragment=0, round=1, payload_bytes=1, weight=1.0,
            ))  # fmt: skip
        for _ in range(skipped):
            self.events.append(ev.SendSkipped(at=START + at, peer=peer, fragment=0, reason=REASON))
