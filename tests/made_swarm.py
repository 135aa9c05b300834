"""A made-up swarm as a feed, of any size and length: for benchmarks and for states that a real one rarely
has.

Deterministic: ``at(t)`` gives the events of second ``t`` since the start. Training falls like a power of the
tokens, a link has a rate and a round trip, one peer is slow, one dies, one comes late.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

from monitoring.model import Model
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, FeedState, News, Sighting
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import PeerId, peer_id_of
from tests.event_samples import aborted, applied, between, committed, progress, started

TOKENS_PER_S = 2400
PAYLOAD_BYTES = 170_000


@cache
def peer_id(number: int) -> PeerId:
    """A well-formed peer id that nobody holds the key of."""
    return peer_id_of(number.to_bytes(32, "big"))


class MadeSwarm:
    """``peers`` of them, ``fragments`` each with a round every ``round_s`` seconds, from ``start_at`` on
    (unix seconds). ``dead``: number of the peer that falls silent half-way, ``late`` of the one that comes
    then; -1 for none. ``length_s``: when that half-way is, times two. ``stages``: which they hold in turn."""

    def __init__(
        self, peers: int, *, fragments: int = 4, round_s: float = 5.0, start_at: float = 0.0,
        length_s: float = 120.0, dead: int = -1, late: int = -1, stages: int = 1,
    ) -> None:  # fmt: skip
        self.peers, self.fragments, self.start_at = peers, fragments, start_at
        self.round_s, self.half_s, self.dead, self.late = round_s, length_s / 2, dead, late
        self.stages = stages
        self.run_config = RunConfig(
            name="made-up", fragments=fragments, clock=ClockConfig(mode="time", round_s=round_s, rounds=400),
            pipeline=PipelineConfig(stages=stages),
        )  # fmt: skip
        self._random = random.Random(1)

    def present(self, number: int, t: float) -> bool:
        if number == self.dead:
            return t < self.half_s
        return number != self.late or t >= self.half_s

    def at(self, t: int) -> list[ev.Event]:
        """All events of second ``t``."""
        now, found = self.start_at + t, list[ev.Event]()
        for number in range(self.peers):
            if not self.present(number, t):
                continue
            if not self.present(number, t - 1) or t == 0:
                found += self._started(number, now)
            found.append(self._progress(number, t, now))
            if self.stages > 1:
                found.append(self._stage_progress(number, t, now))
            if t % 10 == number % 10:
                found += self._links(number, t, now)
        for fragment in range(self.fragments):
            due_s = fragment * self.round_s / self.fragments
            number = int((t - due_s) // self.round_s) + 1
            if number > 0 and int((t - 1 - due_s) // self.round_s) + 1 != number:
                for stage in range(self.stages):
                    found += self._round(fragment, number, t, now, stage)
        if self.dead >= 0 and t == int(self.half_s) + 7:
            found += [
                ev.PeerLeft(at=now, peer=peer_id(other), other=peer_id(self.dead), reason="silent for 6 s")
                for other in self._of_stage(self.dead % self.stages, t)
            ]
        return sorted(found, key=lambda event: event.at)

    def _started(self, number: int, now: float) -> list[ev.Event]:
        made = started(peer_id(number), now, f"peer-{number + 1}", pid=1000 + number)
        return [replace(
            made, software="p2p-co2 0.1.0", device="cuda" if number % 3 == 1 else "cpu", parameters=1_300_000,
            fragments=self.fragments, run=self.run_config.digest().hex(),
            upload_cap_bytes_per_s=60_000.0 if number == 1 else 0.0, stage=number % self.stages,
            stages=self.stages,
        )]  # fmt: skip

    def _of_stage(self, stage: int, t: float) -> list[int]:
        """Peers that hold it and are there."""
        return [one for one in range(self.peers) if one % self.stages == stage and self.present(one, t)]

    def _stage_progress(self, number: int, t: int, now: float) -> ev.Event:
        """A stage beside one that is empty waits."""
        stage = number % self.stages
        before, behind = (len(self._of_stage(stage + side, t)) for side in (-1, 1))
        is_cut_off = stage < self.stages - 1 and not behind
        waited_s = 0.2 * t + (0.8 * max(0.0, t - self.half_s) if is_cut_off else 0.0)
        return replace(
            between(peer_id(number), now, stage), waiting=stage, in_flight=4 * (self.stages - 1 - stage),
            counted=6 * t, dropped=t // 50, waiting_s=waited_s, before=before, behind=behind,
            waits_for=f"stage {stage + 1} has no replica" if is_cut_off else "",
        )  # fmt: skip

    def _progress(self, number: int, t: int, now: float) -> ev.Progress:
        own_s = t - (self.half_s if number == self.late else 0.0)
        tokens = int(TOKENS_PER_S * own_s * (0.6 + 0.1 * (number % 5)))
        exposed_s = own_s * (0.07 if number == 2 else 0.008)
        per_s = 2 * (1 - 1 / self.peers) * PAYLOAD_BYTES * self.fragments / self.round_s
        loss = 1.4 + 4.0 / (1 + t / 20) ** 0.6 + 0.05 * self._random.random()
        return replace(
            progress(peer_id(number), now + 0.001 * number % 0.5, loss=loss, inner_steps=tokens // 512),
            position=t / self.round_s, tokens=tokens, tokens_per_s=TOKENS_PER_S * (0.6 + 0.1 * (number % 5)),
            train_s=own_s - exposed_s, exposed_s=exposed_s, wall_s=max(own_s, 0.001),
            up_bytes=int(per_s * own_s), down_bytes=int(per_s * own_s * 1.02),
            versions=(int(t // self.round_s),) * self.fragments,
        )  # fmt: skip

    def _links(self, number: int, t: int, now: float) -> list[ev.Event]:
        """Links to at most 16 others, so that a large swarm does not drown in them."""
        others = [
            other
            for other in range(self.peers)
            if other != number and self.present(other, t)
            and abs(other % self.stages - number % self.stages) < 2
        ][:16]  # fmt: skip
        return [
            ev.LinkMeasured(
                at=now, peer=peer_id(number), other=peer_id(other),
                carrier="libp2p" if (number + other) % 4 == 0 else "grpc", relayed=(number + other) % 8 == 0,
                round_trip_s=0.004 + 0.013 * ((number * 7 + other * 3) % 9),
                bytes_per_s=4e5 * (1 + (number * 5 + other) % 7), sent_bytes=PAYLOAD_BYTES * (t + 1),
            )
            for other in others
        ]  # fmt: skip

    def _round(self, fragment: int, number: int, t: int, now: float, stage: int) -> list[ev.Event]:
        group = self._of_stage(stage, t)[:32]
        if not group:
            return []
        names = tuple(sorted(peer_id(peer) for peer in group))
        first = names[(fragment * 31 + number) % len(names)]
        key: dict[str, Any] = {"fragment": fragment, "round": number}
        found: list[ev.Event] = [ev.RoundBegan(at=now, peer=first, **key, group=names)]
        is_hit = self.dead >= 0 and self.dead % self.stages == stage
        if is_hit and 0 <= t - self.half_s < 5 and fragment % 2 == 0:
            reason = "the owner of part 2 fell silent"
            return found + [replace(aborted(name, number, reason), at=now + 0.9, **key) for name in names]
        partial = int(number % 7 == 3)
        for place, name in enumerate(names):
            took_s, stale = 0.7 + 0.02 * place % 0.3, int((number + place) % 11 == 5)
            found += [
                replace(
                    committed(name, number, contributors=len(names) - partial, duration_s=took_s), **key,
                    at=now + took_s, coordinator=first, group_size=len(names), partial=partial, begun_s=0.22,
                    parts_s=0.45, means_s=took_s - 0.1,
                ),
                ev.FragmentSent(at=now + 0.001, peer=name, **key, payload_bytes=PAYLOAD_BYTES, weight=2000.0),
                replace(
                    applied(name, stale, 4 + 3 * stale + place % 3, 1.0 + 0.05 * stale + 0.01 * (number % 3)),
                    at=now + took_s + 0.05, fragment=fragment, version=number, sync_delay_s=took_s + 0.05,
                    momentum_norm=0.5 + 1.0 / (1 + number / 10) + 0.05 * fragment,
                ),
            ]  # fmt: skip
        weights = {name: 1800.0 + 100 * place for place, name in enumerate(names)}
        found.append(ev.RoundCounted(at=now + 0.7, peer=first, **key, weights=weights))
        if fragment == 0 and number % 2 == 1 and self.stages == 1:
            found.extend(ev.AgreedMeasured(  # of one moment: nobody's figures are the larger
                at=now + 0.8, peer=peer, loss=1.45 + 4.0 / (1 + t / 20) ** 0.6, position=t / self.round_s,
                tokens=0, duration_s=0.2,
                figures={"accuracy": share - 0.5 / (1 + t / 20) ** 0.6, "log.odds": -1.0 - 10.0 / (1 + t)},
            ) for peer, share in zip(names[:2], (0.6, 0.59), strict=False))  # fmt: skip
        return found


class MadeFeed(Feed):
    """A feed over a made-up swarm; ``advance`` moves its time, or ``clock`` does (unix seconds)."""

    def __init__(self, swarm: MadeSwarm, state: FeedState | None = None) -> None:
        self.swarm = swarm
        self.run = swarm.run_config
        self.place = "a made-up swarm"
        self.is_whole = True
        self.state = state or FeedState("connected", "made up")
        self._next = 0
        self.news = News(sightings=[Sighting(peer_id(n), "answering") for n in range(swarm.peers)])

    def invitation(self) -> str:
        """To a seed of this machine that nobody is, and to a machine that there is not."""
        seeds = f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id(200)}", f"/ip4/203.0.113.5/udp/9/p2p/{peer_id(1)}"
        return str(Ticket(self.swarm.run_config.digest(), peer_id(200), seeds))

    def advance(self, until: int) -> None:
        """Let seconds pass, up to ``until`` since the start."""
        for t in range(self._next, until):
            self.news.events += self.swarm.at(t)
        self._next = max(self._next, until)

    def take(self) -> News:
        news, self.news = self.news, News()
        return news


EVIL = "<img src=x onerror=\"document.title='broken in'\">{a|b} :onclick\x1b[2J"


def add_evil(feed: MadeFeed, at: float) -> None:
    """What one hostile peer, number 99, can say at most: the checks of a report let all of this pass."""
    bad, much = peer_id(99), 2**53
    feed.news.events += [
        ev.PeerStarted(at=at, peer=bad, name=EVIL, pid=0, software=EVIL, device=EVIL, parameters=much,
                       fragments=much, run=EVIL),
        ev.Progress(at=at, peer=bad, phase=EVIL, position=1e15, tokens_per_s=1e15, loss=math.nan,
                    train_s=1e15, exposed_s=1e15, wall_s=0.0, inner_steps=much, tokens=much,
                    up_bytes=much, down_bytes=0,
                    versions=(much,) * 256),
        ev.LinkMeasured(at=at, peer=bad, other=peer_id(0), carrier=EVIL, relayed=True, round_trip_s=1e15,
                        bytes_per_s=1e15, sent_bytes=much),
        ev.FragmentApplied(at=at, peer=bad, fragment=3, version=2**40, contributed=True, staleness=much,
                           sync_delay_steps=much, sync_delay_s=1e15, gap=1e15,
                           momentum_norm=1e15),
        ev.RoundCommitted(at=at, peer=bad, fragment=3, round=2**40, coordinator=EVIL, group_size=much,
                          contributors=0, partial=much, duration_s=1e15),
        ev.RoundAborted(at=at, peer=bad, fragment=2, round=2**40, reason=EVIL),
        ev.Warned(at=at, peer=bad, text=EVIL),
        ev.MessageRefused(at=at, peer=bad, other=EVIL, reason=EVIL),
    ]  # fmt: skip
    nonsense = Counter({EVIL[:40]: 3, "an impossible number": 2})
    feed.news.sightings.append(Sighting(bad, "answering", refused=nonsense))


def step(model: Model, now: float) -> None:
    """Take in all that is new by ``now``, and look at the last moment only."""
    for _ in model.moments(now):
        continue
