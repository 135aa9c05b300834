"""The swarm as its events tell it: ``fold(events) -> SwarmView``.

Law: the view is a function of each peer's own sequence of events; how the sequences of different peers were
interleaved does not matter, so a view folded from many journals one after the other equals the one that a
live reader built event by event. A round of the swarm is counted once, although every member writes of it.

Rounds are keyed by (fragment, round), where ``round`` is the outer version it would make: an aborted round is
tried again under the same key, so one key may hold several aborts and at most one commit.

Price: about 2 kB per round of four members, kept for the whole run unless ``rounds_kept`` bounds it;
everything else is bounded.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p_co2.telemetry.events import (
    CaughtUp,
    ContributionCapped,
    Event,
    FragmentApplied,
    LinkLost,
    MessageRefused,
    PeerFinished,
    PeerJoined,
    PeerLeft,
    PeerStarted,
    RoundAborted,
    RoundBegan,
    RoundCommitted,
    RoundCounted,
    SendSkipped,
    Warned,
)
from p2p_co2.telemetry.peer_view import Counters, PeerView, count, keep

MAX_NOTABLE = 256
"""Newest notable events kept in the view."""
MAX_MENTIONED = 1024
"""Peers that only others spoke of, newest: a name costs nothing, and one report has room for thousands."""
MAX_FORGOTTEN = 1024
"""Forgotten peers whose sums are kept one by one, newest, should they come back."""
_NOTABLE = (
    PeerStarted,
    PeerJoined,
    PeerLeft,
    LinkLost,
    RoundAborted,
    SendSkipped,
    ContributionCapped,
    CaughtUp,
    MessageRefused,
    Warned,
    PeerFinished,
)


@dataclass(slots=True)
class RoundReport:
    """What one peer wrote of a round: the figures of the commit if it learned of one, its aborts by reason
    (None for none: most rounds have none, and there are many rounds)."""

    committed: bool = False
    group_size: int = 0
    contributors: int = 0
    partial: int = 0
    duration_s: float = 0.0
    aborts: Counter[str] | None = None
    committed_at: float = 0.0
    begun_s: float = 0.0
    parts_s: float = 0.0
    means_s: float = 0.0
    staleness: int = -1
    """Of this peer's outer step that the round made; -1 as long as it has taken none."""

    def commit(self, event: RoundCommitted) -> None:
        self.committed_at, self.begun_s = event.at, event.begun_s
        self.parts_s, self.means_s = event.parts_s, event.means_s
        self.committed, self.group_size = True, event.group_size
        self.contributors, self.partial = event.contributors, event.partial
        self.duration_s = event.duration_s if math.isfinite(event.duration_s) else 0.0

    def abort(self, reason: str) -> None:
        self.aborts = Counter() if self.aborts is None else self.aborts
        count(self.aborts, reason)

    @property
    def attempts_aborted(self) -> int:
        return self.aborts.total() if self.aborts else 0


@dataclass(slots=True)
class RoundView:
    """One (fragment, round) as all its members tell it. ``begun``: (at, coordinator, group) of the newest
    BEGIN."""

    fragment: int
    round: int
    begun: tuple[float, str, tuple[str, ...]] | None = None
    begins: int = 0
    reports: dict[str, RoundReport] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """Whose work is in the mean, as a signed decision says; empty if none was seen."""

    @property
    def outcome(self) -> str:
        """ "committed", "alone" (by one peer, with nobody else), "aborted" (every attempt) or "open"."""
        sizes = [report.group_size for report in self.reports.values() if report.committed]
        if sizes:
            return "alone" if max(sizes) == 1 else "committed"
        return "aborted" if any(report.aborts for report in self.reports.values()) else "open"

    @property
    def is_committed(self) -> bool:
        """By several or by one."""
        return any(report.committed for report in self.reports.values())

    @property
    def aborts(self) -> Counter[str]:
        """Aborted attempts by reason, each once.

        Members see the same attempts, so the member that saw most is believed; of a committed round only
        those who know of the commit are asked, since the others may have lost just the answer
        (``missed_by``).
        """
        if not any(report.aborts for report in self.reports.values()):
            return Counter()
        committed = self.is_committed
        asked = {peer: report for peer, report in self.reports.items() if report.committed or not committed}
        best = min(asked, key=lambda peer: (-asked[peer].attempts_aborted, peer), default=None)
        return Counter(asked[best].aborts) if best is not None else Counter()

    @property
    def missed_by(self) -> tuple[str, ...]:
        """Peers that gave this round up although others committed it."""
        if not self.is_committed:
            return ()
        return tuple(
            sorted(peer for peer, report in self.reports.items() if report.aborts and not report.committed)
        )

    @property
    def group(self) -> tuple[str, ...]:
        """Peer ids of the newest attempt's group; empty if its coordinator's journal is not here."""
        return self.begun[2] if self.begun else ()

    @property
    def contributors(self) -> int:
        return max((commit.contributors for commit in self._commits()), default=0)

    @property
    def partial(self) -> int:
        return max((commit.partial for commit in self._commits()), default=0)

    @property
    def staleness(self) -> int:
        """The most stale outer step that came of this round; -1 if none is known."""
        return max((report.staleness for report in self.reports.values()), default=-1)

    @property
    def group_size(self) -> int:
        return max((commit.group_size for commit in self._commits()), default=len(self.group))

    @property
    def duration_s(self) -> float:
        """Longest time from a member's offer to its knowing of the commit, seconds; 0 if none offered."""
        return max((commit.duration_s for commit in self._commits() if commit.duration_s > 0), default=0.0)

    def _commits(self) -> list[RoundReport]:
        return [report for report in self.reports.values() if report.committed]

    def report_of(self, peer: str) -> RoundReport:
        return self.reports.setdefault(peer, RoundReport())


@dataclass
class Settled:
    """What rounds and peers that are kept no more come to."""

    committed: int = 0
    alone: int = 0
    missed: int = 0
    aborts: Counter[str] = field(default_factory=Counter)
    totals: Counters = field(default_factory=Counters)
    staleness: Counter[int] = field(default_factory=Counter)
    sync_delay_steps: Counter[int] = field(default_factory=Counter)

    def add_peer(self, view: PeerView) -> None:
        self.totals = self.totals.plus(view.totals)
        self.staleness.update(view.staleness)
        self.sync_delay_steps.update(view.sync_delay_steps)

    def add(self, view: RoundView) -> None:
        self.committed += view.outcome == "committed"
        self.alone += view.outcome == "alone"
        self.missed += bool(view.missed_by)
        self.aborts += view.aborts


@dataclass
class SwarmView:
    """All peers and rounds. ``notable``: (at, peer, its event's number, event), oldest first, the newest
    ``MAX_NOTABLE``; ``warnings`` counts all ``Warned`` events. ``counted``: work by peer (tokens, summed over
    fragments) as signed decisions say, of ``counted_rounds`` rounds. ``rounds_kept``: older rounds than these
    are only counted, in ``settled``; 0 keeps all, and only then does the order of peers not matter.
    ``forgotten``: peers that are listed no more (``forget``), with nothing but their sums."""

    peers: dict[str, PeerView] = field(default_factory=dict)
    rounds: dict[tuple[int, int], RoundView] = field(default_factory=dict)
    notable: list[tuple[float, str, int, Event]] = field(default_factory=list)
    warnings: int = 0
    counted: dict[str, float] = field(default_factory=dict)
    counted_rounds: int = 0
    rounds_kept: int = 0
    settled: Settled = field(default_factory=Settled)
    forgotten: dict[str, PeerView] = field(default_factory=dict)
    _mentioned: dict[str, None] = field(default_factory=dict)
    _written: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        """Take in one event; events of one peer must come in the order it wrote them."""
        self._peer(event.peer).add(event)
        self._mentioned.pop(event.peer, None)
        self._written[event.peer] += 1
        match event:
            case PeerJoined():
                self._other(event.other).seen_left.pop(event.peer, None)
            case PeerLeft():
                keep(self._other(event.other).seen_left, event.peer, (event.at, event.reason))
            case RoundBegan():
                began = self._round(event.fragment, event.round)
                begun = (event.at, event.peer, event.group)
                began.begun = begun if began.begun is None else max(began.begun, begun)
                began.begins += 1
            case RoundCommitted():
                self._round(event.fragment, event.round).report_of(event.peer).commit(event)
            case RoundAborted():
                self._round(event.fragment, event.round).report_of(event.peer).abort(event.reason)
            case RoundCounted():
                self._count(event)
            case FragmentApplied():
                self._stale(event)
            case Warned():
                self.warnings += 1
        if isinstance(event, _NOTABLE):
            self._note(event)

    def _peer(self, peer: str) -> PeerView:
        known = self.peers.get(peer)
        if known is None:
            known = self.forgotten.pop(peer) if peer in self.forgotten else PeerView(peer)
            self.peers[peer] = known
        return known

    def _other(self, peer: str) -> PeerView:
        """A peer that another one speaks of."""
        if peer not in self.peers:
            self._mentioned[peer] = None
            if len(self._mentioned) > MAX_MENTIONED:
                self.forget(next(iter(self._mentioned)))
        return self._peer(peer)

    def forget(self, peer: str) -> None:
        """List ``peer`` no more. What it did stays in the sums of the swarm, and is its own again if it comes
        back."""
        self._mentioned.pop(peer, None)
        self._written.pop(peer, None)
        known = self.peers.pop(peer, None)
        if known is None or not known.started:
            return
        self.forgotten[peer] = PeerView(
            peer, previous=known.previous, current=known.current, staleness=known.staleness,
            fragment_staleness=known.fragment_staleness, sync_delay_steps=known.sync_delay_steps,
            rounds_alone=known.rounds_alone,
        )  # fmt: skip
        if len(self.forgotten) > MAX_FORGOTTEN:
            self.settled.add_peer(self.forgotten.pop(next(iter(self.forgotten))))

    def _round(self, fragment: int, number: int) -> RoundView:
        known = self.rounds.get((fragment, number))
        if known is None:
            if self.rounds_kept and len(self.rounds) >= self.rounds_kept:
                self.settled.add(self.rounds.pop(next(iter(self.rounds))))
            known = self.rounds[fragment, number] = RoundView(fragment, number)
        return known

    def _stale(self, event: FragmentApplied) -> None:
        """Note it at the round, if this peer itself told of its commit: nobody else's events matter then."""
        known = self.rounds.get((event.fragment, event.version))
        report = known.reports.get(event.peer) if known is not None else None
        if report is not None and report.committed:
            report.staleness = event.staleness

    def _count(self, event: RoundCounted) -> None:
        """Every member reads the same decision, so the first that tells of it is enough."""
        known = self._round(event.fragment, event.round)
        if known.weights:
            return
        known.weights = event.weights
        self.counted_rounds += 1
        for peer, weight in event.weights.items():
            if math.isfinite(weight) and weight > 0:
                keep(self.counted, peer, self.counted.get(peer, 0.0) + weight)

    def _note(self, event: Event) -> None:
        bisect.insort(
            self.notable, (event.at, event.peer, self._written[event.peer], event), key=lambda note: note[:3]
        )
        if len(self.notable) > MAX_NOTABLE:
            del self.notable[0]

    @property
    def started_peers(self) -> list[PeerView]:
        """Peers that wrote events of their own, sorted by label: the ones the figures are about."""
        labels = self.labels()
        return sorted(
            (peer for peer in self.peers.values() if peer.started), key=lambda peer: labels[peer.peer]
        )

    def labels(self) -> dict[str, str]:
        """A short and unique label for every peer id: its name, with the end of its id where names are equal
        or empty."""
        names = Counter(peer.name for peer in self.peers.values())
        labels: dict[str, str] = {}
        taken: set[str] = set()
        for peer in sorted(self.peers):
            name = self.peers[peer].name
            label = name if name and names[name] == 1 else f"{name}~{peer[-6:]}" if name else f"~{peer[-6:]}"
            labels[peer] = label if label not in taken else f"{name}~{peer}"
            taken.add(labels[peer])
        return labels

    @property
    def started_at(self) -> float | None:
        return min(
            (peer.first_seen_at for peer in self.peers.values() if peer.first_seen_at is not None),
            default=None,
        )

    @property
    def last_at(self) -> float | None:
        return max(
            (peer.last_seen_at for peer in self.peers.values() if peer.last_seen_at is not None), default=None
        )

    @property
    def committed(self) -> int:
        """Rounds of the swarm that several peers committed, each counted once."""
        return self.settled.committed + sum(view.outcome == "committed" for view in self.rounds.values())

    @property
    def alone(self) -> int:
        """Rounds that one peer made with nobody else: nothing was exchanged."""
        seen = self.settled.alone + sum(view.outcome == "alone" for view in self.rounds.values())
        return max(seen, max((peer.rounds_alone for peer in self._all()), default=0))

    @property
    def abort_reasons(self) -> Counter[str]:
        """Aborted rounds of the swarm by reason, each counted once."""
        total = Counter(self.settled.aborts)
        for view in self.rounds.values():
            if aborts := view.aborts:
                total += aborts
        return total

    @property
    def staleness(self) -> Counter[int]:
        """Applied outer steps by staleness, over all peers."""
        return _sum([self.settled.staleness, *(peer.staleness for peer in self._all())])

    @property
    def sync_delay_steps(self) -> Counter[int]:
        """Applied outer steps by inner steps between send and apply, over all peers."""
        return _sum([self.settled.sync_delay_steps, *(peer.sync_delay_steps for peer in self._all())])

    @property
    def totals(self) -> Counters:
        """What all peers did, those that are forgotten too."""
        total = self.settled.totals
        for peer in self._all():
            total = total.plus(peer.totals)
        return total

    def _all(self) -> Iterable[PeerView]:
        return itertools.chain(self.peers.values(), self.forgotten.values())

    @property
    def gap_max(self) -> float:
        return max((peer.gap_max for peer in self.peers.values()), default=1.0)


def fold(events: Iterable[Event]) -> SwarmView:
    """The view after all ``events``; any order that keeps each peer's own order gives the same view."""
    view = SwarmView()
    for event in events:
        view.add(event)
    return view


def mean_of(histogram: Counter[int]) -> float | None:
    """Mean of a histogram of whole numbers; None if it is empty."""
    total = histogram.total()
    return sum(value * times for value, times in histogram.items()) / total if total else None


def _sum(histograms: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return total
