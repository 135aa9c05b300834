"""The swarm as its events tell it: ``SwarmView.add`` folds one in; a ``PeerRecord`` per peer.

Law: the view is a function of each peer's own sequence of events, however those of different peers were
interleaved. A round is counted once, although every member writes of it. Its key is (fragment, round), where
``round`` is the outer version that it would make. Fragments of stages are told apart by ``numbered``. Price:
some 2 kB per round of four members, for the whole run unless ``rounds_kept`` bounds it.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from p2p_co2.telemetry import events as ev
from p2p_co2.wire.limits import MAX_FRAGMENTS, MAX_STAGES
from p2p_co2.wire.names import is_name, words_of

MAX_DISTINCT = 64
"""Most distinct reasons or names counted one by one; the rest are counted together as ``OTHERS``."""
OTHERS = "(others)"
MAX_LINKS = 4096
"""Most other peers of which a peer's links or word are remembered."""
MAX_VALUES = 1024
"""Most distinct values of a histogram; others are left out of it."""
MAX_NOTABLE = 256
"""Newest notable events kept in the view; a report has no room for more links either."""
_NOTABLE = (
    ev.PeerStarted, ev.PeerJoined, ev.PeerLeft, ev.LinkLost, ev.RoundAborted, ev.SendSkipped,
    ev.ContributionCapped, ev.CaughtUp, ev.MessageRefused, ev.Warned, ev.PeerFinished,
)  # fmt: skip
_NOT_STARTED = ev.PeerStarted(
    at=0.0, peer="", name="", pid=0, software="", device="", parameters=0, fragments=0, run=""
)
_NO_PROGRESS = ev.Progress(
    at=0.0, peer="", phase="", position=0.0, inner_steps=0, tokens=0, tokens_per_s=0.0, loss=math.nan,
    train_s=0.0, exposed_s=0.0, wall_s=0.0, up_bytes=0, down_bytes=0, versions=(),
)  # fmt: skip


@dataclass
class Counters:
    """Sums of one process since it started; units in the names, meanings in ``events.Progress``."""

    inner_steps: int = 0
    tokens: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    train_s: float = 0.0
    exposed_s: float = 0.0
    wall_s: float = 0.0

    def plus(self, other: Counters | ev.Progress) -> Counters:
        return Counters(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTERS})


_COUNTERS = tuple(Counters.__dataclass_fields__)


def numbered(stage: int, fragment: int) -> int:
    """The number of a stage's fragment among those of all stages; its own in stage 0."""
    return stage * MAX_FRAGMENTS + fragment


@dataclass
class Tally:
    """What one peer's events are counted as. ``staleness``: applied outer steps by (fragment, staleness);
    ``in_flight_s``: from send to apply, over all of them; ``rounds_alone``: made with nobody else."""

    staleness: Counter[tuple[int, int]] = field(default_factory=Counter)
    sync_delay_steps: Counter[int] = field(default_factory=Counter)
    skipped_sends: Counter[str] = field(default_factory=Counter)
    caught_up: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """Microbatches given up, by reason."""
    missed: Counter[str] = field(default_factory=Counter)
    """Exchanges with slices of it that were not counted, by reason."""
    sends: int = 0
    rounds_alone: int = 0
    in_flight_s: float = 0.0

    def apply(self, event: ev.FragmentApplied) -> None:
        _count_value(self.staleness, (event.fragment, event.staleness))
        _count_value(self.sync_delay_steps, event.sync_delay_steps)
        self.in_flight_s += _finite_or(event.sync_delay_s, 0.0)

    def recall(self, event: ev.Recalled) -> None:
        """Begin with what an observer could not see for itself."""
        self.sends = event.sends
        self.rounds_alone = event.rounds_alone
        self.in_flight_s = event.in_flight_s
        self.skipped_sends = Counter(event.skipped_sends)
        self.caught_up = Counter(event.caught_up)
        self.refused = Counter(event.refused)
        self.dropped = Counter(event.dropped)
        self.missed = Counter(event.missed)
        for delay, times in event.sync_delay_steps.items():
            if _is_number(delay):
                _count_value(self.sync_delay_steps, int(delay), times)
        for key, times in event.staleness.items():
            fragment, _, stale = key.partition(":")
            if _is_number(fragment) and _is_number(stale):
                _count_value(self.staleness, (int(fragment), int(stale)), times)


_TALLY_OF: dict[type[ev.Event], str] = {
    ev.MessageRefused: "refused", ev.MicrobatchDropped: "dropped", ev.SliceMissed: "missed",
}  # fmt: skip
"""Of events that are counted by reason."""


@dataclass
class LinkView:
    """The link to one other peer; ``lost``: why, "" while it is open."""

    carrier: str = ""
    lost: str = ""
    measured: ev.LinkMeasured | None = None


@dataclass
class PeerRecord:
    """One peer, by its own events. ``start``, ``progress``, ``pipeline``, ``end``: newest of this process; a
    figure that is no number is as before. ``earlier``: counters of its earlier processes that ``progress``
    does not hold. ``loading``: the agreed state on its way, None if there is none. ``paused``: why it
    rests, "" if it does not. ``sent``, ``arrived``: newest by fragment. ``recent_sends``: (at, why skipped,
    "" if not); ``recent_bytes``: (at, up, down). ``agreed``: its newest measurement, ``best``: that of the
    lowest loss. ``seen_left``: (at, reason) by the peer that said so. ``told_name``: what others heard that
    it is called. Nothing else in here is the word of others."""

    peer: str
    first_seen_at: float | None = None
    last_seen_at: float | None = None
    start: ev.PeerStarted = _NOT_STARTED
    progress: ev.Progress = _NO_PROGRESS
    pipeline: ev.StageProgress | None = None
    loading: ev.StateLoading | None = None
    paused: str = ""
    end: ev.PeerFinished | None = None
    earlier: Counters = field(default_factory=Counters)
    tally: Tally = field(default_factory=Tally)
    agreed: ev.AgreedMeasured | None = None
    best: ev.AgreedMeasured | None = None
    recent_sends: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_DISTINCT))
    recent_bytes: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_DISTINCT))
    sent: dict[int, ev.FragmentSent] = field(default_factory=dict)
    arrived: dict[int, ev.FragmentApplied | ev.CaughtUp] = field(default_factory=dict)
    links: dict[str, LinkView] = field(default_factory=dict)
    seen_left: dict[str, tuple[float, str]] = field(default_factory=dict)
    told_name: str = ""

    @property
    def name(self) -> str:
        """By its own word, else by others', else the two words of its key."""
        return next(filter(is_name, (self.start.name, self.told_name, words_of(self.peer))))

    @property
    def started(self) -> bool:
        """Whether we have an event of its own, not only the word of others."""
        return self.first_seen_at is not None

    @property
    def stage(self) -> int:
        """That it holds; 0 in a run of one stage, and as long as it has not said so."""
        return self.start.stage if self.start.stages > 1 else 0

    @property
    def phase(self) -> str:
        if self.end is not None:
            return "finished"
        return self.progress.phase or ("starting" if self.start is not _NOT_STARTED else "")

    @property
    def versions(self) -> tuple[int, ...]:
        """Outer version by fragment."""
        return (self.end or self.progress).versions

    @property
    def loss(self) -> float | None:
        """Newest training loss; None until one is known."""
        return self.progress.loss if math.isfinite(self.progress.loss) else None

    @property
    def totals(self) -> Counters:
        """Of all its processes."""
        return self.earlier.plus(self.progress)

    @property
    def staleness(self) -> Counter[int]:
        """Applied outer steps by staleness."""
        found = Counter[int]()
        for (_, stale), times in self.tally.staleness.items():
            found[stale] += times
        return found

    @property
    def carriers(self) -> dict[str, str]:
        """Last carrier by other peer."""
        return {other: link.carrier for other, link in self.links.items() if link.carrier}

    @property
    def open_links(self) -> dict[str, str]:
        """The same of the links that are not lost."""
        return {other: carrier for other, carrier in self.carriers.items() if not self.links[other].lost}

    @property
    def left_reason(self) -> str:
        """Why it is gone: its own last word, else the newest word of another peer, else ""."""
        if self.end is not None:
            return self.end.reason or "finished"
        return max(self.seen_left.values(), default=(0.0, ""))[1]

    @property
    def waiting_share(self) -> float | None:
        """The part of its time that this process waited for microbatches; None in a run of one stage, and
        before there was any."""
        if self.pipeline is None:
            return None
        waited_s = _finite_or(self.pipeline.waiting_s, 0.0)
        whole_s = waited_s + self.progress.train_s + self.progress.exposed_s
        return waited_s / whole_s if whole_s > 0 else None

    @property
    def utilisation(self) -> float | None:
        """Share of the wall time since the first inner step that was spent in inner steps; None before."""
        totals = self.totals
        # Own word: a peer that claims more than all of the time would set the mean of the swarm.
        return min(1.0, totals.train_s / totals.wall_s) if totals.wall_s > 0 else None

    def add(self, event: ev.Event) -> None:
        """Take in the next event that this peer wrote."""
        seen = [event.at, *(at for at in (self.first_seen_at, self.last_seen_at) if at is not None)]
        self.first_seen_at = min(seen)
        self.last_seen_at = max(seen)
        match event:
            case ev.Progress():
                self._progress(event)
            case ev.StageProgress():
                self.pipeline = event
            case ev.StateLoading():
                self.loading = event
            case ev.FragmentSent():
                self.tally.sends += 1
                self.sent[event.fragment] = event
                self.recent_sends.append((event.at, ""))
            case ev.FragmentApplied():
                self.tally.apply(event)
                self.arrived[event.fragment] = event
            case ev.SendSkipped():
                _count(self.tally.skipped_sends, event.reason)
                self.recent_sends.append((event.at, event.reason or "no reason given"))
            case ev.RoundCommitted():
                self.tally.rounds_alone += event.group_size == 1
            case _:
                self._add_rare(event)

    def _begin(self, event: ev.PeerStarted) -> None:
        self.earlier = self.totals
        self.progress = _NO_PROGRESS
        if event.resumed_from:  # its rounds, steps and tokens go on from there
            steps = event.inner_steps
            tokens = self.earlier.tokens
            self.progress = dataclasses.replace(
                _NO_PROGRESS, position=event.position, inner_steps=steps, tokens=tokens
            )
            self.earlier = dataclasses.replace(self.earlier, inner_steps=0, tokens=0)
        self.start = event
        self.pipeline = None
        self.loading = None
        self.paused = ""
        self.end = None
        self.recent_bytes.clear()
        for link in self.links.values():
            link.lost = ""

    def _add_rare(self, event: ev.Event) -> None:
        match event:
            case ev.LinkOpened():
                link = self._link(event.other)
                link.carrier = event.carrier
                link.lost = ""
            case ev.LinkLost():
                self._link(event.other).lost = event.reason or "lost"
            case ev.LinkMeasured():
                self._link(event.other).measured = event
            case ev.PeerStarted():
                self._begin(event)
            case ev.Paused() | ev.Resumed():
                self.paused = event.reason if isinstance(event, ev.Paused) else ""
            case ev.PeerFinished():
                self.end = event
                for other, carrier in event.carriers.items():
                    self._link(other).carrier = carrier
            case ev.CaughtUp():
                _count(self.tally.caught_up, event.how)
                self.arrived[event.fragment] = event
                if self.loading is not None:
                    left = tuple(one for one in self.loading.fragments if one != event.fragment)
                    self.loading = dataclasses.replace(self.loading, fragments=left) if left else None
            case ev.AgreedMeasured() if math.isfinite(event.loss) and math.isfinite(event.position):
                self.agreed = event
                self.best = min(self.best or event, event, key=lambda one: one.loss)
            case ev.MessageRefused() | ev.MicrobatchDropped() | ev.SliceMissed():
                _count(getattr(self.tally, _TALLY_OF[type(event)]), event.reason)
            case ev.Recalled():
                self.tally.recall(event)

    def _progress(self, event: ev.Progress) -> None:
        unknown = {
            name: getattr(self.progress, name)
            for name in ("position", "tokens_per_s", "loss", "train_s", "exposed_s", "wall_s")
            if not math.isfinite(getattr(event, name))
        }
        self.progress = dataclasses.replace(event, **unknown) if unknown else event
        if not self.recent_bytes or event.at > self.recent_bytes[-1][0]:
            self.recent_bytes.append((event.at, event.up_bytes, event.down_bytes))

    def _link(self, other: str) -> LinkView:
        return _keep(self.links, other, self.links.get(other) or LinkView())


def recalled(view: PeerRecord) -> list[ev.Event]:
    """What ``view`` holds as events for a reader that comes late. They fold to the same record of the peer,
    without its old losses and what others say of it."""
    arrived = list(view.arrived.values())
    sent = list(view.sent.values())
    newer = Tally()
    tally = view.tally
    at = view.last_seen_at or 0.0
    for event in arrived:
        if isinstance(event, ev.FragmentApplied):
            newer.apply(event)
        else:
            newer.caught_up[event.how] += 1
    delays = tally.sync_delay_steps - newer.sync_delay_steps
    staleness = tally.staleness - newer.staleness
    first = ev.Recalled(
        at=at, peer=view.peer, in_flight_s=max(0.0, tally.in_flight_s - newer.in_flight_s),
        sends=tally.sends - len(sent), rounds_alone=tally.rounds_alone,
        staleness={f"{fragment}:{stale}": times for (fragment, stale), times in staleness.items()},
        sync_delay_steps={str(delay): times for delay, times in delays.items()},
        skipped_sends=dict(tally.skipped_sends), caught_up=dict(tally.caught_up - newer.caught_up),
        refused=dict(tally.refused), dropped=dict(tally.dropped), missed=dict(tally.missed),
    )  # fmt: skip
    told = view.start, view.progress, view.pipeline, view.end, view.best, view.agreed
    newest = [event for event in told if event and event.peer]
    opened = [
        ev.LinkOpened(at=at, peer=view.peer, other=other, carrier=carrier)
        for other, carrier in list(view.open_links.items())[:MAX_NOTABLE]
    ]
    return [first, *newest, *sent, *arrived, *opened]


@dataclass(slots=True)
class RoundView:
    """One round of a fragment of ``stage`` as all its members tell it. ``begun``: (at, coordinator, group) of
    the newest BEGIN. ``commits``: by the member that learned of one; ``aborted``: attempts by reason, by
    member. ``staleness``: of the most stale outer step that came of it; -1 if none is known. ``weights``:
    whose work is in the mean, as a certificate says; empty if none was seen."""

    fragment: int
    round: int
    stage: int = 0
    begun: tuple[float, str, tuple[str, ...]] | None = None
    commits: dict[str, ev.RoundCommitted] = field(default_factory=dict)
    aborted: dict[str, Counter[str]] = field(default_factory=dict)
    staleness: int = -1
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ "committed", "alone" (by one peer, with nobody else), "aborted" (every attempt) or "open"."""
        if self.commits:
            return "alone" if self._most("group_size") == 1 else "committed"
        return "aborted" if self.aborted else "open"

    @property
    def aborts(self) -> Counter[str]:
        """Aborted attempts by reason, each once: the member that saw most is believed. Of a committed round
        it is one that knows of the commit; the others may have lost just the answer (``missed_by``)."""
        asked = self.aborted.keys() - self.missed_by
        best = min(asked, key=lambda peer: (-self.aborted[peer].total(), peer), default="")
        return Counter(self.aborted.get(best, ()))

    @property
    def missed_by(self) -> tuple[str, ...]:
        """Peers that gave this round up although others committed it."""
        return tuple(sorted(self.aborted.keys() - self.commits.keys())) if self.commits else ()

    def _most(self, name: str) -> int:
        return max((getattr(commit, name) for commit in self.commits.values()), default=0)

    @property
    def contributors(self) -> int:
        return self._most("contributors")

    @property
    def partial(self) -> int:
        return self._most("partial")

    @property
    def group_size(self) -> int:
        return self._most("group_size") or (len(self.begun[2]) if self.begun else 0)

    @property
    def duration_s(self) -> float:
        """Longest time from a member's offer to its knowing of the commit, seconds; 0 if none offered."""
        return max((_finite_or(commit.duration_s, 0.0) for commit in self.commits.values()), default=0.0)


@dataclass
class Outcomes:
    """What became of a stage's rounds, each counted once. ``alone``: made by one peer with nobody else;
    ``aborts``: attempts by reason."""

    committed: int = 0
    alone: int = 0
    aborts: Counter[str] = field(default_factory=Counter)

    def count(self, round_: RoundView) -> None:
        outcome = round_.outcome
        self.committed += outcome == "committed"
        self.alone += outcome == "alone"
        self.aborts.update(round_.aborts)


@dataclass
class SwarmView:
    """All peers and rounds. ``notable``: the newest ``MAX_NOTABLE`` events worth a line, oldest first.
    ``counted``: work by peer (tokens, summed over fragments) as certificates say, of ``counted_rounds``
    rounds; those ``counted_before`` are in it already. ``rounds_kept``: older rounds than these are only
    counted; 0 keeps all, and only then does the order of peers not matter."""

    peers: dict[str, PeerRecord] = field(default_factory=dict)
    rounds: dict[tuple[int, int], RoundView] = field(default_factory=dict)
    notable: list[ev.Event] = field(default_factory=list)
    warnings: int = 0
    counted: dict[str, float] = field(default_factory=dict)
    counted_rounds: int = 0
    counted_before: set[tuple[int, int]] = field(default_factory=set)
    rounds_kept: int = 0
    _old: dict[int, Outcomes] = field(default_factory=dict)

    def add(self, event: ev.Event) -> None:
        """Take in one event; events of one peer must come in the order it wrote them."""
        if isinstance(event, ev.Recalled) and event.peer in self.peers:
            self.peers[event.peer] = PeerRecord(event.peer, seen_left=self.peers[event.peer].seen_left)
        teller = self._peer(event.peer)
        teller.add(event)
        match event:
            case ev.PeerJoined():
                other = self._peer(event.other)
                other.seen_left.pop(event.peer, None)
                other.told_name = event.name
            case ev.PeerLeft():
                _keep(self._peer(event.other).seen_left, event.peer, (event.at, event.reason))
            case ev.RoundBegan():
                round_ = self._round(teller, event)
                begun = (event.at, event.peer, event.group)
                round_.begun = begun if round_.begun is None else max(round_.begun, begun)
            case ev.RoundCommitted():
                self._round(teller, event).commits[event.peer] = event
            case ev.RoundAborted():
                round_ = self._round(teller, event)
                _count(round_.aborted.setdefault(event.peer, Counter()), event.reason)
            case ev.RoundCounted():
                self._count(teller, event)
            case ev.FragmentApplied():
                known = self.rounds.get((numbered(teller.stage, event.fragment), event.version))
                # If this peer itself told of the commit: then nobody else's events matter.
                if known is not None and event.peer in known.commits:
                    known.staleness = max(known.staleness, event.staleness)
            case ev.Warned():
                self.warnings += 1
        if isinstance(event, _NOTABLE):
            # Ties are of one peer, whose events come in its order.
            bisect.insort(self.notable, event, key=lambda one: (one.at, one.peer))
            del self.notable[:-MAX_NOTABLE]

    def _peer(self, peer: str) -> PeerRecord:
        if peer not in self.peers:
            self.peers[peer] = PeerRecord(peer)
        return self.peers[peer]

    def _round(self, teller: PeerRecord, event: _OfRound) -> RoundView:
        key = numbered(teller.stage, event.fragment), event.round
        known = self.rounds.get(key)
        if known is None:
            if self.rounds_kept and len(self.rounds) >= self.rounds_kept:
                old = self.rounds.pop(next(iter(self.rounds)))
                self._old.setdefault(old.stage, Outcomes()).count(old)
            known = self.rounds[key] = RoundView(event.fragment, event.round, teller.stage)
        return known

    def _count(self, teller: PeerRecord, event: ev.RoundCounted) -> None:
        """Every member reads the same decision, so the first that tells of it is enough."""
        known = self._round(teller, event)
        if known.weights:
            return
        known.weights = event.weights
        if (numbered(teller.stage, event.fragment), event.round) in self.counted_before:
            return
        self.counted_rounds += 1
        self._add_work(event.weights)

    def count_again(self, before: Mapping[str, float], rounds: set[tuple[int, int]]) -> None:
        """Work was counted before this view began: in these ``rounds``, so much by peer."""
        self.counted = dict(before)
        self.counted_before = rounds
        seen = [one.weights for place, one in self.rounds.items() if one.weights and place not in rounds]
        self.counted_rounds = len(rounds) + len(seen)
        for weights in seen:
            self._add_work(weights)

    def _add_work(self, weights: Mapping[str, float]) -> None:
        for peer, weight in weights.items():
            if math.isfinite(weight) and weight > 0:
                _keep(self.counted, peer, self.counted.get(peer, 0.0) + weight)

    def labels(self) -> dict[str, str]:
        """A short and unique label for every peer id: its name, with the end of its id where names are
        equal."""
        name_of = {peer: self.peers[peer].name for peer in sorted(self.peers)}
        names = Counter(name_of.values())
        labels: dict[str, str] = {}
        taken: set[str] = set()
        for peer, name in name_of.items():
            label = name if names[name] == 1 else f"{name}~{peer[-6:]}"
            labels[peer] = label if label not in taken else f"{name}~{peer}"
            taken.add(labels[peer])
        return labels

    @property
    def started_at(self) -> float | None:
        return min((at for one in self.peers.values() if (at := one.first_seen_at) is not None), default=None)

    @property
    def last_at(self) -> float | None:
        return max((at for one in self.peers.values() if (at := one.last_seen_at) is not None), default=None)

    @property
    def stages(self) -> int:
        """Of the run, as most of its peers say; 1 until one has said so."""
        told = Counter(peer.start.stages for peer in self.peers.values() if peer.start is not _NOT_STARTED)
        possible = [number for number, _ in told.most_common() if 0 < number <= MAX_STAGES]
        return possible[0] if possible else 1

    def stage_of(self, event: ev.Event) -> int | None:
        """That the writer of ``event`` holds; None in a run of one stage."""
        teller = self.peers.get(event.peer)
        return teller.stage if teller is not None and teller.start.stages > 1 else None

    @property
    def outcomes(self) -> dict[int, Outcomes]:
        """Of all rounds, by stage."""
        found = defaultdict(Outcomes, copy.deepcopy(self._old))
        for view in self.rounds.values():
            found[view.stage].count(view)
        for peer in self.peers.values():
            found[peer.stage].alone = max(found[peer.stage].alone, peer.tally.rounds_alone)
        return found

    @property
    def committed(self) -> int:
        """Rounds of the swarm that several peers committed."""
        return sum(of_stage.committed for of_stage in self.outcomes.values())

    @property
    def alone(self) -> int:
        """Rounds that one peer made with nobody else: nothing was exchanged."""
        return sum(of_stage.alone for of_stage in self.outcomes.values())

    @property
    def abort_reasons(self) -> Counter[str]:
        """Aborted rounds of the swarm by reason."""
        return sum((of_stage.aborts for of_stage in self.outcomes.values()), Counter())

    def staleness_by(self, *, stage: bool = False) -> dict[int, Counter[int]]:
        """Applied outer steps of all peers by staleness, by fragment (``numbered``), or by ``stage``."""
        found = defaultdict[int, Counter[int]](Counter)
        for peer in self.peers.values():
            for (fragment, stale), times in peer.tally.staleness.items():
                found[peer.stage if stage else numbered(peer.stage, fragment)][stale] += times
        return dict(found)

    @property
    def staleness(self) -> Counter[int]:
        """The same over all fragments."""
        return sum(self.staleness_by(stage=True).values(), Counter())

    @property
    def sync_delay_steps(self) -> Counter[int]:
        """Applied outer steps by inner steps between send and apply, over all peers."""
        return sum((peer.tally.sync_delay_steps for peer in self.peers.values()), Counter[int]())

    @property
    def totals(self) -> Counters:
        """What all peers did, in whatever stage."""
        return functools.reduce(Counters.plus, (peer.totals for peer in self.peers.values()), Counters())


def mean_of(histogram: Mapping[int, int]) -> float | None:
    """Mean of a histogram of whole numbers; None if it is empty."""
    total = sum(histogram.values())
    return sum(value * times for value, times in histogram.items()) / total if total else None


_K = TypeVar("_K")
_V = TypeVar("_V")


def _keep(table: dict[str, _V], name: str, value: _V) -> _V:
    """``table[name] = value``, unless the table is full of other names; the value."""
    if name in table or len(table) < MAX_LINKS:
        table[name] = value
    return value


def _count_value(histogram: Counter[_K], value: _K, times: int = 1) -> None:
    """Count ``value``, unless the histogram is full of other values."""
    if value in histogram or len(histogram) < MAX_VALUES:
        histogram[value] += times


def _count(counter: Counter[str], name: str) -> None:
    """Count ``name``, under ``OTHERS`` once ``MAX_DISTINCT`` names are known."""
    counter[name if name in counter or len(counter) < MAX_DISTINCT else OTHERS] += 1


_OfRound = ev.RoundBegan | ev.RoundCommitted | ev.RoundCounted | ev.RoundAborted


def _is_number(text: str) -> bool:
    """Whether it is a count. One of hundreds of digits is none, and no float can hold it."""
    return len(text) < 17 and text.isascii() and text.isdecimal()


def _finite_or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise
