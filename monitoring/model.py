"""What a board knows: folds a feed's news into the swarm's view, measures rates, keeps history.

``step`` once a second is all that runs; pages, metrics and the API read ``facts()``, which is made once per
step however many look. Law: a function of the feed's news, the clock handed in and what the history held; no
I/O of its own but the history's. Bounded: rounds by ``ROUNDS_KEPT``, the rest as in ``telemetry``.

Price: about 30 microseconds per event.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable

from monitoring.facts import PeerFacts, SwarmFacts
from monitoring.history import MEASURES, SWARM, TIERS, Batch, Happening, History, RoundRow
from monitoring.peer_state import ONLINE
from monitoring.predicted import EVERY_S, predicted_utilisation
from monitoring.standing import is_behind
from monitoring.swarm_facts import Known, Pace, round_facts, round_s, swarm_facts
from monitoring.words import describe
from p2p_co2.config import RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.events import (
    AgreedMeasured,
    Event,
    PeerStarted,
    Recalled,
    RoundAborted,
    RoundBegan,
    RoundCommitted,
    RoundCounted,
)
from p2p_co2.telemetry.feed import Feed, FeedState, Sighting
from p2p_co2.telemetry.view import RoundView, SwarmView

ROUNDS_KEPT = 4096
SAME_NEWS_S = 30.0
"""Members tell the same news within this."""
MAX_SAID = 4096
MAX_UNHEARD = 1024
"""Peers that are listed and never said anything, newest: an identity costs nothing."""
FORGET_AFTER_S = 86_400.0
"""A peer of which nothing was heard or seen for so long, while others were heard, is listed no more; its
history stays, and so does its part in the swarm's sums."""
REPLAY_FROM_S = 10.0
REPLAY_STEPS = 600


class Model:
    """One swarm. ``history`` may be in memory; ``now`` is unix seconds. ``rounds_kept``: in the view; all go
    into the history."""

    def __init__(self, feed: Feed, history: History, rounds_kept: int = ROUNDS_KEPT) -> None:
        self.feed, self.history = feed, history
        self.view = SwarmView(rounds_kept=rounds_kept)
        self.sightings: dict[str, Sighting] = {}
        self.now = 0.0
        self.trouble_with_history = history.trouble
        self._sighted_at: dict[str, float] = {}
        self._received_at: dict[str, float] = {}
        """When events of a peer last came, however old: who still reads a past is not told of silence."""
        self._paces: dict[str, Pace] = {}
        self._labels: dict[str, str] = {}
        self._replaying = False
        self._position = 0.0
        """Of the run, when facts were made last."""
        self._tokens: int | None = None
        """Of the whole swarm since the last ``_settle``; None until they are asked for."""
        self._said_at: dict[str, float] = {}
        self._predicted: float | None = None
        self._predicted_at = -1e9
        self._facts: SwarmFacts | None = None
        self.retold: Callable[[], None] = lambda: None
        """Called after each step of a past that is told again in its own time."""
        self._happenings: list[Happening] = []
        self._agreed: list[tuple[float, float, float]] = []
        self._changed_rounds: set[tuple[int, int]] = set()
        self._written_at = 0.0
        self._known_until = history.newest_happening_at()
        """Happenings up to then (unix seconds) are kept already: a feed tells old ones again after a
        restart."""
        self._sampled_until = history.span()[1]
        """The same of samples."""
        self._kept_rounds = {(line.kind, line.fragment, line.round) for line in history.happenings(500)}
        self._counted_before = set(history.counted_rounds())
        self.view.counted.update(history.counted())
        self.view.counted_rounds = len(self._counted_before)

    @property
    def run(self) -> RunConfig | None:
        return self.feed.run

    @property
    def state(self) -> FeedState:
        return self.feed.state

    def _known(self) -> Known:
        return Known(
            self.view, self.sightings, self._paces, self._labels, self.run, self.state, self.feed.place,
            self.now, self._received_at, self.state.phase == "ended" and not self._replaying, self._predicted,
        )  # fmt: skip

    def step(self, now: float) -> None:
        """Take in what is new."""
        news = self.feed.take()
        self.now = max(now, self.now) if not self.feed.is_whole else self.now
        for sighting in news.sightings:
            self.sightings.pop(sighting.peer, None)  # newest last
            self.sightings[sighting.peer] = sighting
            self._sighted_at[sighting.peer] = now
        self._labels = self.view.labels()
        past = [event for event in news.events if self.feed.is_whole or event.peer == self.feed.me]
        if _span_s(past) > REPLAY_FROM_S:
            self._replaying = True
            self._replay(past)
            self._replaying = False
            others = [] if self.feed.is_whole else news.events
            news.events = [event for event in others if event.peer != self.feed.me]
        for event in news.events:
            self._add(event)
        if not self.feed.is_whole:
            self._received_at.update(dict.fromkeys((event.peer for event in news.events), now))
        self._forget()
        self.now = max(now, self.now) if self.state.phase != "ended" else (self.view.last_at or now)
        self._settle()

    def _forget(self) -> None:
        """List no more who is gone for long, nor a crowd that never said anything."""
        unheard = [peer for peer in self.sightings if peer not in self.view.peers]
        gone = unheard[: max(0, len(unheard) - MAX_UNHEARD)]
        if not self.feed.is_whole:
            since = (self.view.last_at or 0.0) - FORGET_AFTER_S
            listed = itertools.chain(self.view.peers, unheard[len(gone) :])
            gone += [peer for peer in listed if self._heard_at(peer) < since]
        for peer in gone:
            self.view.forget(peer)
            for table in (self.sightings, self._sighted_at, self._received_at, self._paces):
                table.pop(peer, None)

    def _heard_at(self, peer: str) -> float:
        """When anything was last known of it, unix seconds."""
        known = self.view.peers.get(peer)
        own_at = known.last_seen_at if known is not None and known.last_seen_at is not None else 0.0
        left_at = max((at for at, _ in known.seen_left.values()), default=0.0) if known is not None else 0.0
        return max(own_at, left_at, self._sighted_at.get(peer, 0.0))

    def _replay(self, events: list[Event]) -> None:
        """Take in a past in its own time, so that there are samples of it: a run's, or that of the peer that
        the board belongs to, which may begin with what its older events come to."""
        for event in events:
            if isinstance(event, Recalled):
                self._add(event)
                self._recollect(event.peer)
        ordered = sorted((one for one in events if not isinstance(one, Recalled)), key=lambda event: event.at)
        step_s = max(TIERS[0][0], _span_s(ordered) / REPLAY_STEPS)
        until = ordered[0].at + step_s if ordered else math.inf
        for event in ordered:
            if event.at >= until:
                self.now = until
                self._settle()
                if until > self._sampled_until:
                    self._keep(self._made_batch(over=False))
                self.retold()
                until = max(until + step_s, event.at)
            self._add(event)

    def _recollect(self, peer: str) -> None:
        """Keep what this board's own peer remembers of its loss before its oldest event: nothing else of that
        time is known."""
        known = self.view.peers.get(peer)
        if peer != self.feed.me or known is None:
            return
        for at, _, loss in known.history.points:
            if self._sampled_until < at < self.now:
                row = tuple(loss if name == "loss" else math.nan for name in MEASURES)
                self._keep(Batch(at=at, samples={peer: row, SWARM: row}, fragments={}))

    def _settle(self) -> None:
        """What follows from the events taken in, at ``now``."""
        self._labels = self.view.labels()
        self._tokens = None
        for peer in self.view.peers.values():
            if peer.last_seen_at is not None:
                pace = self._paces.setdefault(peer.peer, Pace())
                pace.add(peer.last_seen_at, peer.totals.up_bytes, peer.totals.down_bytes)
        self._facts = None

    def facts(self) -> SwarmFacts:
        """The swarm at the last step."""
        if self._facts is None:
            self._facts = facts = swarm_facts(self._known())
            self._position = facts.position
            if abs(self.now - self._predicted_at) >= EVERY_S:
                self._predicted_at = self.now
                of = (facts.parameters, facts.fragments, facts.peers)
                self._predicted = predicted_utilisation(self.run, *of)
        return self._facts

    # ---- what comes in

    def _add(self, event: Event) -> None:
        if isinstance(event, RoundCounted) and (event.fragment, event.round) in self._counted_before:
            return  # counted before this board was started again
        self.view.add(event)
        if isinstance(event, PeerStarted | Recalled):
            self._label(event.peer, event.name)
        if isinstance(event, RoundBegan | RoundCommitted | RoundAborted | RoundCounted):
            self._changed_rounds.add((event.fragment, event.round))
        is_old = isinstance(event, AgreedMeasured) and is_behind(event.position, self._position)
        if isinstance(event, AgreedMeasured) and math.isfinite(event.loss) and not is_old:
            if self._tokens is None:
                self._tokens = self.view.totals.tokens
            self._agreed.append((event.at, float(self._tokens), event.loss))
        self._happened(event)

    def _label(self, peer: str, name: str) -> None:
        """Call it by its name from now on; ``_settle`` weighs all names, which takes longer."""
        if self._labels.get(peer, "") != name:
            is_free = name and name not in self._labels.values()
            self._labels[peer] = name if is_free else f"{name}~{peer[-6:]}"

    def _happened(self, event: Event) -> None:
        """Note what is worth a line; what several members tell is noted once."""
        key, words = describe(event, self._labels)
        if not words or event.at <= self._known_until:
            return
        fragment, round_ = getattr(event, "fragment", -1), getattr(event, "round", -1)
        if round_ >= 0 and (event.kind, fragment, round_) in self._kept_rounds:
            return
        if event.at - self._said_at.get(key, -1e9) > SAME_NEWS_S:
            self._said_at[key] = event.at
            if len(self._said_at) > MAX_SAID:
                self._said_at.pop(next(iter(self._said_at)))
            self._happenings.append(Happening(event.at, event.kind, event.peer, fragment, round_, words))

    # ---- what is kept

    def batch(self, now: float) -> Batch | None:
        """What is to be written to the history now, or None; hand it to ``History.write`` in any thread, and
        tell ``wrote`` how that went before asking again."""
        if now - self._written_at < TIERS[0][0]:
            return None
        self._written_at = now
        over = self.state.phase == "ended" and self.history.span()[1] > 0
        return self._made_batch(over=over)

    def _made_batch(self, *, over: bool) -> Batch:
        """All that is new; without samples if the run is ``over``."""
        facts = self.facts()
        rounds = [self.view.rounds[key] for key in self._changed_rounds if key in self.view.rounds]
        made = Batch(
            at=self.now or 1.0,
            samples={} if over else self._samples(facts),
            fragments={} if over else self._fragment_samples(),
            rounds=[self._row(view) for view in rounds],
            time_lines={
                (view.fragment, view.round): json.dumps(time_line(view), separators=(",", ":"))
                for view in rounds
            },
            happenings=self._happenings,
            counted=dict(self.view.counted),
            agreed=self._agreed,
        )
        self._happenings, self._agreed = [], []
        self._changed_rounds.clear()
        return made

    def wrote(self, batch: Batch, trouble: str) -> None:
        """A batch is in the history, or could not be written: then its lines are kept for the next one."""
        self.trouble_with_history = trouble or self.history.trouble
        if trouble:
            self._happenings = [*batch.happenings, *self._happenings][-MAX_SAID:]
            self._agreed = [*batch.agreed, *self._agreed][-MAX_SAID:]
            self._changed_rounds |= {(row.fragment, row.round) for row in batch.rounds}

    def keep(self, now: float) -> None:
        """``batch`` and ``History.write`` in one, for programs that serve nobody meanwhile."""
        batch = self.batch(now)
        if batch is not None:
            self._keep(batch)

    def _keep(self, batch: Batch) -> None:
        try:
            self.history.write(batch)
        except EnvironmentFault as error:
            self.wrote(batch, str(error))
        else:
            self.wrote(batch, "")

    def _samples(self, facts: SwarmFacts) -> dict[str, tuple[float, ...]]:
        rows = {peer.peer: _sample(peer) for peer in facts.peers if peer.state in ONLINE}
        online = [peer for peer in facts.peers if peer.state in ONLINE]
        if not online or (self.state.phase == "lost" and not self._replaying):
            # Nothing is heard: lines end here, and a later one begins anew.
            unknown = tuple(float(facts.tokens) if name == "tokens" else math.nan for name in MEASURES)
            return {SWARM: unknown}
        rows[SWARM] = (
            float(facts.tokens), facts.tokens_per_s, _nan(facts.loss_training), _nan(facts.utilisation),
            facts.up_bytes_per_s, sum(peer.down_bytes_per_s or 0.0 for peer in facts.peers),
            sum(peer.exposed_s for peer in online), sum(peer.hidden_s for peer in online),
            float(facts.peers_online),
        )  # fmt: skip
        return rows

    def _fragment_samples(self) -> dict[int, tuple[float, ...]]:
        newest: dict[int, list[tuple[float, float, float]]] = {}
        for peer in self.view.peers.values():
            for fragment, applied in peer.applied.items():
                if self.now - applied.at < 3 * (round_s(self._known()) or 60.0):
                    values = (applied.gap, applied.momentum_norm, float(applied.staleness))
                    newest.setdefault(fragment, []).append(values)
        return {
            fragment: (
                max(gap for gap, _, _ in values),
                sum(norm for _, norm, _ in values) / len(values),
                max(stale for _, _, stale in values),
            )
            for fragment, values in newest.items()
        }

    def _row(self, view: RoundView) -> RoundRow:
        facts = round_facts(self._known(), view)
        counted = facts.counted or (facts.fragment, facts.round) in self._counted_before
        return RoundRow(
            facts.fragment, facts.round, facts.at, facts.outcome, facts.group_size, facts.contributors,
            facts.staleness, facts.duration_s, int(counted), facts.reason,
        )  # fmt: skip


def _span_s(events: list[Event]) -> float:
    """From the first to the last, seconds."""
    return max((event.at for event in events), default=0.0) - min((event.at for event in events), default=0.0)


def time_line(view: RoundView) -> dict[str, dict[str, float]]:
    """By member: seconds from its READY to BEGIN, PARTS, MEAN and COMMIT, and READY in unix seconds."""
    return {
        peer: {
            "ready_at": round(report.committed_at - report.duration_s, 3),
            "begin_s": round(report.begun_s, 4),
            "parts_s": round(report.parts_s, 4),
            "mean_s": round(report.means_s, 4),
            "commit_s": round(report.duration_s, 4),
        }
        for peer, report in view.reports.items()
        if report.committed and report.duration_s > 0
    }


def _sample(peer: PeerFacts) -> tuple[float, ...]:
    return (
        float(peer.tokens), peer.tokens_per_s, _nan(peer.loss), _nan(peer.utilisation),
        _nan(peer.up_bytes_per_s), _nan(peer.down_bytes_per_s), peer.exposed_s, peer.hidden_s, 1.0,
    )  # fmt: skip


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
