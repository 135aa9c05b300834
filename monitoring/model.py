"""What a reader of a swarm knows: folds a feed's news into the view, measures rates, makes facts.

``moments`` once a second is all that runs; pages, metrics and the API read ``facts()``, which is made once
per moment however many look. A ``Recorder`` keeps what a model saw in a history. Law: a function of the
feed's news and the clock handed in; no I/O of its own. Bounded: rounds by ``ROUNDS_KEPT``, the rest as in
``telemetry``. Price: about 30 microseconds per event.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from monitoring.facts import ONLINE, SILENT_AFTER_S, SwarmFacts
from monitoring.history import AGREED, MEASURES, SWARM, TIERS, Batch, BoardHistory, Happening
from monitoring.known import Known, is_behind
from monitoring.swarm import swarm_facts
from monitoring.words import describe, plain
from p2p_co2.errors import EnvironmentFault, TransportError
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, Sighting
from p2p_co2.telemetry.view import SwarmView, numbered

ROUNDS_KEPT = 4096
"""And as many news that members may tell again."""
MAX_PEERS = 2048
"""Peers that are listed: an identity costs nothing. Beyond it those go of which least was heard of late."""
REPLAY_STEPS = 600
Moments = Iterator[list[ev.Event]]


class Model:
    """One swarm. ``rounds_kept``: in the view. ``known``: all that is known at the last moment.
    ``wish_token``: what a page gives with a wish about the feed's own peer; "" where none is heard."""

    def __init__(self, feed: Feed, rounds_kept: int = ROUNDS_KEPT) -> None:
        self.feed = feed
        self.view = SwarmView(rounds_kept=rounds_kept)
        self.sightings: dict[str, Sighting] = {}
        self.known = Known(self.view, 0.0, feed.run, feed.state, feed.place, me=feed.me)
        self.wish_token = secrets.token_urlsafe(18) if feed.folder is not None else ""
        self._received_at: dict[str, float] = {}
        """When events of a peer last came, however old: a reader of a past is not told of silence."""
        self._facts: SwarmFacts | None = None

    def moments(self, now: float) -> Moments:
        """Take in what is new by ``now`` (unix seconds). Yields the events of each moment to look at, the
        last being now. A past, of a run or of the reader's own peer, is told in its time."""
        news = self.feed.take()
        is_whole = self.feed.is_whole
        for sighting in news.sightings:
            self.sightings.pop(sighting.peer, None)  # newest last
            self.sightings[sighting.peer] = sighting
        own = [event for event in news.events if is_whole or event.peer == self.feed.me]
        *past, (_, fresh) = _by_moment(own)
        for at, events in past:
            self._moment(at, events)
            yield events
        if not is_whole:
            fresh += [event for event in news.events if event.peer != self.feed.me]
            self._received_at.update(dict.fromkeys((event.peer for event in fresh), now))
        has_ended = self.feed.state.phase == "ended"
        self._moment(now, fresh, has_ended)
        yield fresh

    def facts(self) -> SwarmFacts:
        """The swarm at the last moment."""
        if self._facts is None:
            self._facts = swarm_facts(self.known)
        return self._facts

    def require_reached(self) -> None:
        """Raise ``TransportError`` if nothing was ever heard of the run."""
        facts = self.facts()
        if facts.connection in {"connecting", "lost"} and not facts.peers_known:
            raise TransportError(f"the run was not reached: {plain(facts.connection_words, 300)}")

    def _moment(self, now: float, events: Sequence[ev.Event], is_over: bool = False) -> None:
        for event in events:
            self.view.add(event)
        self._forget()
        feed = self.feed
        at = (self.view.last_at or now) if is_over else now
        self._facts = None
        self.known = Known(
            self.view, at, feed.run, feed.state, feed.place, self.sightings, self._received_at, is_over,
            feed.me,
        )  # fmt: skip

    def _forget(self) -> None:
        """First of whom others speak only, then those that are listed, then by their newest word."""
        peers = self.view.peers
        if self.feed.is_whole or len(peers) + len(self.sightings) <= MAX_PEERS:
            return
        listed = [*(peers.keys() - self.sightings.keys()), *self.sightings]
        listed.sort(key=lambda peer: (peers[peer].last_seen_at if peer in peers else None) or 0.0)
        for peer in listed[: max(0, len(listed) - MAX_PEERS)]:
            for table in (peers, self.sightings, self._received_at):
                table.pop(peer, None)


def follow(feed: Feed, every_s: float, seconds: float) -> Generator[tuple[Model, Moments], None, None]:
    """A model of ``feed`` and its new moments, every so often, until Ctrl-C or ``seconds`` have passed (0: no
    end); closes the feed."""
    model = Model(feed)
    stop = StopSignals(lambda: None)
    ends_at = time.monotonic() + seconds if seconds else math.inf
    with contextlib.closing(feed), stop:
        while True:
            feed.watched(time.monotonic())
            yield model, model.moments(time.time())
            if stop.asked or time.monotonic() >= ends_at:
                return
            time.sleep(every_s)


def _by_moment(events: Sequence[ev.Event]) -> list[tuple[float, list[ev.Event]]]:
    """A past cut into steps: (when each is over, its events). The last one is not over. A summary of what was
    before comes first, though it was made last: the peer's view begins anew with it."""
    first_at = min((event.at for event in events), default=0.0)
    told = (replace(one, at=first_at) if isinstance(one, ev.Recalled) else one for one in events)
    ordered = sorted(told, key=lambda event: event.at)
    span_s = ordered[-1].at - ordered[0].at if ordered else 0.0
    if span_s <= SILENT_AFTER_S:
        return [(math.inf, list(events))]
    step_s = max(TIERS[0][0], span_s / REPLAY_STEPS)
    steps: list[tuple[float, list[ev.Event]]] = [(ordered[0].at + step_s, [])]
    for event in ordered:
        if event.at >= steps[-1][0]:
            steps.append((max(steps[-1][0] + step_s, event.at), []))
        steps[-1][1].append(event)
    return steps


class Recorder:
    """Keeps what ``model`` sees in ``history``, and lets it go on where the history ends. ``trouble``: why it
    is not kept, in words."""

    def __init__(self, model: Model, history: BoardHistory) -> None:
        self.history = history
        self.trouble = history.trouble
        self._model = model
        self._position = 0.0
        self._said_at: dict[str, float] = {}
        self._batch = Batch(-math.inf)
        self._agreed: ev.AgreedMeasured | None = None
        self._names = set[str]()
        """Of figures that are kept."""
        self._sampled_until = 0.0
        """Samples up to then (unix seconds) are kept already: a feed tells old events again."""
        self.begin()

    def begin(self) -> None:
        """Go on where the history ends; again if that has been given a past."""
        self._sampled_until = self.history.span()[1]
        self._model.view.count_again(self.history.counted(), self.history.counted_rounds())

    def see(self, events: Sequence[ev.Event]) -> None:
        """The events of one of the model's moments."""
        labels = self._model.known.labels
        view = self._model.view
        for event in events:
            if isinstance(event, ev.RoundCounted):
                place = numbered(view.stage_of(event) or 0, event.fragment)
                self._batch.counted_rounds.add((place, event.round))
            elif isinstance(event, ev.AgreedMeasured) and not is_behind(event.position, self._position):
                self._agreed = event
            key, words = describe(event, labels, view.stage_of(event))
            if words and event.at - self._said_at.get(key, -1e9) > 3 * SILENT_AFTER_S:
                self._said_at[key] = event.at
                if len(self._said_at) > ROUNDS_KEPT:
                    self._said_at.pop(next(iter(self._said_at)))
                happening = _happening(event, view.stage_of(event) or 0, key, words)
                self._batch.happenings.append(happening)

    def batch(self) -> Batch | None:
        """What is to be written now, if anything; for ``write``, in any thread, before asking again."""
        now = self._model.known.now
        made = self._batch
        is_last = self._model.known.is_over and bool(made.happenings or made.counted_rounds)  # time stands
        if now - made.at < TIERS[0][0] and not is_last:
            return None
        facts = self._model.facts()
        self._batch = Batch(now)
        self._position = facts.position
        made.at = now or 1.0
        made.counted = dict(self._model.view.counted)
        is_old = now <= self._sampled_until or (self._model.known.is_over and self._sampled_until > 0)
        if not is_old:
            self._sampled_until = now
            made.samples = _samples(facts)
            if self._agreed is not None:
                made.samples[AGREED] = _row(tokens=facts.tokens, loss=self._agreed.loss)
                for name, value in self._agreed.figures.items():
                    if name not in self._names and len(self._names) >= 16:
                        continue  # a peer that tells others each time would fill the disk
                    self._names.add(name)
                    made.samples[f"{AGREED}/{name}"] = _row(tokens=facts.tokens, loss=value)
        self._agreed = None
        return made

    def write(self, batch: Batch) -> None:
        """Write it; what cannot be written is lost, and ``trouble`` says so."""
        try:
            self.history.write(batch)
            self.trouble = self.history.trouble
        except EnvironmentFault as error:
            self.trouble = str(error)

    def follow(self, now: float) -> None:
        """Take in what is new by ``now``, and write it at once: for programs that serve nobody meanwhile."""
        for events in self._model.moments(now):
            self.see(events)
            if batch := self.batch():
                self.write(batch)


def _happening(event: ev.Event, stage: int, key: str, words: str) -> Happening:
    fragment = getattr(event, "fragment", -1)
    number = getattr(event, "round", -1)
    fragment = fragment if fragment < 0 else numbered(stage, fragment)
    is_of_round = isinstance(event, ev.RoundCommitted | ev.RoundAborted)
    once = key if is_of_round else f"{key} {event.at:.1f}"
    return Happening(event.at, event.kind, event.peer, fragment, number, words, once)


def _samples(facts: SwarmFacts) -> dict[str, Sequence[float]]:
    """A row for each peer online and for the swarm; where nothing is heard lines end."""
    online = [peer for peer in facts.peers if peer.state in ONLINE]
    if not online or facts.connection == "lost":
        return {SWARM: _row(tokens=facts.tokens)}
    rows: dict[str, Sequence[float]] = {
        peer.peer: _row(**{name: getattr(peer, name) for name in MEASURES}) for peer in online
    }
    rows[SWARM] = _row(
        tokens=facts.tokens, tokens_per_s=facts.tokens_per_s, loss=facts.loss_training,
        utilisation=facts.utilisation, up_bytes_per_s=facts.up_bytes_per_s,
        down_bytes_per_s=sum(peer.down_bytes_per_s or 0.0 for peer in facts.peers),
    )  # fmt: skip
    return rows


def _row(**measured: float | None) -> tuple[float, ...]:
    """A sample; NaN for what is not measured."""
    known = (measured.get(name) for name in MEASURES)
    return tuple(math.nan if value is None else float(value) for value in known)
