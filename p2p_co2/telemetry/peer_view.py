"""What the events of one peer say about it: the per-peer half of ``SwarmView``.

Law: a ``PeerView`` is a function of that peer's own events in the order it wrote them, and of nothing else,
except ``seen_left`` which holds the newest word of each other peer. So a swarm's view does not depend on how
the journals of its peers were interleaved. Everything here is bounded; the bounds have names.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from p2p_co2.telemetry.events import (
    AgreedMeasured,
    CaughtUp,
    CheckpointSaved,
    Event,
    FragmentApplied,
    FragmentSent,
    LinkLost,
    LinkMeasured,
    LinkOpened,
    MessageRefused,
    PeerFinished,
    PeerStarted,
    Progress,
    Recalled,
    RoundCommitted,
    SendSkipped,
)

MAX_HISTORY_POINTS = 1024
MAX_DISTINCT = 64
"""Most distinct reasons or names counted one by one; the rest are counted together as ``OTHERS``."""
OTHERS = "(others)"
MAX_LINKS = 4096
"""Most other peers whose links are remembered."""
MAX_DIGITS = 17
MAX_RECENT_SENDS = 64
MAX_VALUES = 1024
"""Most distinct values of a histogram; others are left out of it."""


def count_value(histogram: Counter[int], value: int, times: int = 1) -> None:
    """Count ``value``, unless the histogram is full of other values."""
    if value in histogram or len(histogram) < MAX_VALUES:
        histogram[value] += times


def count(counter: Counter[str], name: str) -> None:
    """Count ``name``, under ``OTHERS`` once ``MAX_DISTINCT`` names are known."""
    counter[name if name in counter or len(counter) < MAX_DISTINCT else OTHERS] += 1


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

    def plus(self, other: Counters) -> Counters:
        return Counters(
            inner_steps=self.inner_steps + other.inner_steps,
            tokens=self.tokens + other.tokens,
            up_bytes=self.up_bytes + other.up_bytes,
            down_bytes=self.down_bytes + other.down_bytes,
            train_s=self.train_s + other.train_s,
            exposed_s=self.exposed_s + other.exposed_s,
            wall_s=self.wall_s + other.wall_s,
        )


@dataclass
class LossHistory:
    """Training loss over time in at most ``MAX_HISTORY_POINTS`` points.

    ``points``: (at, position, loss), each the mean of ``stride`` reports that had a loss. When the list is
    full, neighbours are averaged and ``stride`` doubles, so a long run gets coarser, never biased.
    """

    points: list[tuple[float, float, float]] = field(default_factory=list)
    stride: int = 1
    _pending: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, at: float, position: float, loss: float) -> None:
        self._pending.append((at, position, loss))
        if len(self._pending) < self.stride:
            return
        self.points.append(_mean_point(self._pending))
        self._pending = []
        if len(self.points) >= MAX_HISTORY_POINTS:
            self.points = [_mean_point(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self.stride *= 2


def _mean_point(points: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    at, position, loss = (sum(values) / len(points) for values in zip(*points, strict=True))
    return at, position, loss


@dataclass
class PeerView:
    """One peer. Before its first event every number is 0 and every text empty; ``loss`` is None until known.

    ``previous`` are the counters of its earlier processes (a peer that resumes counts from 0 again),
    ``totals`` all of them. ``carriers``: last carrier used, by other peer; ``lost_links``: why it is gone, by
    other peer. ``refused``: messages this peer refused, by reason; ``refused_from``: the same, by sender.
    ``seen_left``: (at, reason) by the other peer that said so. ``payload_bytes``: last payload by fragment.
    ``applied``: newest outer step by fragment, ``applied_at`` when it (or a state that was caught up with)
    reached the live parameters; ``links``: newest measurement by other peer; ``agreed``: held-out loss of the
    agreed parameters; ``in_flight_s``: time from send to apply, over all outer steps; ``recent_sends``: (at,
    why it was skipped, "" if it was not); ``rounds_alone``: made with nobody else.
    """

    peer: str
    name: str = ""
    pid: int | None = None
    processes: int = 0
    software: str = ""
    device: str = ""
    run: str = ""
    parameters: int = 0
    fragments: int = 0
    first_seen_at: float | None = None
    last_seen_at: float | None = None
    phase: str = ""
    position: float = 0.0
    versions: tuple[int, ...] = ()
    tokens_per_s: float = 0.0
    loss: float | None = None
    history: LossHistory = field(default_factory=LossHistory)
    current: Counters = field(default_factory=Counters)
    previous: Counters = field(default_factory=Counters)
    staleness: Counter[int] = field(default_factory=Counter)
    sync_delay_steps: Counter[int] = field(default_factory=Counter)
    last_staleness: int | None = None
    last_sync_delay_steps: int | None = None
    sync_delay_max_s: float = 0.0
    gap_max: float = 1.0
    clipped_share_max: float = 0.0
    sends: int = 0
    payload_bytes: dict[int, int] = field(default_factory=dict)
    relative_error_max: float = 0.0
    skipped_sends: Counter[str] = field(default_factory=Counter)
    recent_sends: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_SENDS))
    rounds_alone: int = 0
    caught_up: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    refused_from: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    carriers: dict[str, str] = field(default_factory=dict)
    lost_links: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    upload_cap_bytes_per_s: float = 0.0
    fragment_staleness: dict[int, Counter[int]] = field(default_factory=dict)
    applied: dict[int, FragmentApplied] = field(default_factory=dict)
    applied_at: dict[int, float] = field(default_factory=dict)
    links: dict[str, LinkMeasured] = field(default_factory=dict)
    agreed: LossHistory = field(default_factory=LossHistory)
    in_flight_s: float = 0.0
    finished: bool = False
    finish_reason: str = ""
    digest: str = ""
    seen_left: dict[str, tuple[float, str]] = field(default_factory=dict)

    @property
    def started(self) -> bool:
        """Whether we have an event of its own, not only the word of others."""
        return self.first_seen_at is not None

    @property
    def totals(self) -> Counters:
        return self.previous.plus(self.current)

    @property
    def left_reason(self) -> str:
        """Why it is gone: its own last word, else the newest word of another peer, else ""."""
        if self.finished:
            return self.finish_reason or "finished"
        return max(((at, reason) for at, reason in self.seen_left.values()), default=(0.0, ""))[1]

    @property
    def utilisation(self) -> float | None:
        """Share of the wall time since the first inner step that was spent in inner steps; None before."""
        totals = self.totals
        # Own word: who claims more than all of the time would set the mean of the swarm.
        return min(1.0, totals.train_s / totals.wall_s) if totals.wall_s > 0 else None

    def add(self, event: Event) -> None:
        """Take in the next event that this peer wrote."""
        self.first_seen_at = event.at if self.first_seen_at is None else min(self.first_seen_at, event.at)
        self.last_seen_at = event.at if self.last_seen_at is None else max(self.last_seen_at, event.at)
        match event:
            case PeerStarted():
                self._start(event)
            case Progress():
                self._progress(event)
            case PeerFinished():
                self._finish(event)
            case FragmentSent():
                self.sends += 1
                self.recent_sends.append((event.at, ""))
                self.payload_bytes[event.fragment] = event.payload_bytes
                self.relative_error_max = _larger(self.relative_error_max, event.relative_error)
            case FragmentApplied():
                self._apply(event)
            case SendSkipped():
                count(self.skipped_sends, event.reason)
                self.recent_sends.append((event.at, event.reason or "no reason given"))
            case RoundCommitted():
                self.rounds_alone += event.group_size == 1
            case CaughtUp():
                count(self.caught_up, event.how)
                self.applied_at[event.fragment] = event.at
            case CheckpointSaved():
                self.checkpoints += 1
            case _:
                self._add_rare(event)

    def _add_rare(self, event: Event) -> None:
        match event:
            case LinkOpened():
                keep(self.carriers, event.other, event.carrier)
                self.lost_links.pop(event.other, None)
            case LinkLost():
                keep(self.lost_links, event.other, event.reason)
            case LinkMeasured():
                keep(self.links, event.other, event)
            case AgreedMeasured():
                if math.isfinite(event.loss):
                    self.agreed.add(event.at, _finite_or(event.position, self.position), event.loss)
            case MessageRefused():
                count(self.refused, event.reason)
                count(self.refused_from, event.other)
            case Recalled():
                self._recall(event)

    def _start(self, event: PeerStarted) -> None:
        self.previous, self.current = self.totals, Counters()
        self.name, self.pid, self.run = event.name, event.pid, event.run
        self.software, self.device = event.software, event.device
        self.parameters, self.fragments = event.parameters, event.fragments
        self.upload_cap_bytes_per_s = _finite_or(event.upload_cap_bytes_per_s, 0.0)
        self.processes += 1
        self.phase, self.finished, self.finish_reason, self.digest = "starting", False, "", ""
        self.lost_links = {}

    def _progress(self, event: Progress) -> None:
        self.phase, self.versions = event.phase, event.versions
        self.position = _finite_or(event.position, self.position)
        self.tokens_per_s = _finite_or(event.tokens_per_s, 0.0)
        self.current = Counters(
            inner_steps=event.inner_steps,
            tokens=event.tokens,
            up_bytes=event.up_bytes,
            down_bytes=event.down_bytes,
            train_s=_finite_or(event.train_s, self.current.train_s),
            exposed_s=_finite_or(event.exposed_s, self.current.exposed_s),
            wall_s=_finite_or(event.wall_s, self.current.wall_s),
        )
        if math.isfinite(event.loss):
            self.loss = event.loss
            self.history.add(event.at, self.position, event.loss)

    def _finish(self, event: PeerFinished) -> None:
        self.finished, self.phase = True, "finished"
        self.finish_reason, self.digest, self.versions = event.reason, event.digest, event.versions
        self.tokens_per_s = 0.0
        self.carriers.update(event.carriers)
        self.peak_memory_bytes = max(self.peak_memory_bytes, event.peak_memory_bytes)

    def _apply(self, event: FragmentApplied) -> None:
        self.last_staleness, self.last_sync_delay_steps = event.staleness, event.sync_delay_steps
        self._stale(event.fragment, event.staleness, 1)
        self.applied[event.fragment], self.applied_at[event.fragment] = event, event.at
        self.in_flight_s += _finite_or(event.sync_delay_s, 0.0)
        count_value(self.sync_delay_steps, event.sync_delay_steps)
        self.sync_delay_max_s = _larger(self.sync_delay_max_s, event.sync_delay_s)
        self.gap_max = _larger(self.gap_max, event.gap)
        self.clipped_share_max = _larger(self.clipped_share_max, event.clipped_share)

    def _stale(self, fragment: int, staleness: int, times: int) -> None:
        count_value(self.staleness, staleness, times)
        if staleness in self.staleness:
            self.fragment_staleness.setdefault(fragment, Counter())[staleness] += times

    def _recall(self, event: Recalled) -> None:
        """Take over what an observer could not see for itself; the peer's later events follow."""
        self.first_seen_at = min(event.first_seen_at, self.first_seen_at or event.at)
        for name in (
            "name", "pid", "software", "device", "run", "parameters", "fragments", "phase", "position",
            "versions", "upload_cap_bytes_per_s", "sends", "in_flight_s", "rounds_alone",
        ):  # fmt: skip
            setattr(self, name, getattr(event, name))
        self.loss = event.loss if math.isfinite(event.loss) else None
        self.processes = max(1, self.processes)
        self.current = Counters(**{name: getattr(event, name) for name in Counters.__dataclass_fields__})
        self.carriers = dict(event.carriers)
        self.payload_bytes = _by_number(event.payload_bytes)
        self.applied_at = _by_number(event.applied_at)
        self.sync_delay_steps = Counter()
        for delay, times in _by_number(event.sync_delay_steps).items():
            count_value(self.sync_delay_steps, delay, times)
        self.skipped_sends, self.caught_up = Counter(event.skipped_sends), Counter(event.caught_up)
        self.refused = Counter(event.refused)
        self.staleness, self.fragment_staleness = Counter(), {}
        for key, times in event.staleness.items():
            fragment, _, stale = key.partition(":")
            if _is_number(fragment) and _is_number(stale):
                self._stale(int(fragment), int(stale), times)
        points = zip(event.loss_at, event.loss_position, event.loss_value, strict=False)
        self.history = LossHistory(list(points)[-MAX_HISTORY_POINTS + 1 :])


def recalled(view: PeerView, at: float) -> Recalled:
    """What ``view`` holds as one event at ``at`` (unix seconds), for an observer who comes late."""
    points = view.history.points[-MAX_HISTORY_POINTS // 4 :]
    totals = view.totals
    return Recalled(
        at=at,
        peer=view.peer,
        first_seen_at=at if view.first_seen_at is None else view.first_seen_at,
        name=view.name,
        pid=view.pid or 0,
        software=view.software,
        device=view.device,
        parameters=view.parameters,
        fragments=view.fragments,
        run=view.run,
        upload_cap_bytes_per_s=view.upload_cap_bytes_per_s,
        phase=view.phase,
        position=view.position,
        loss=math.nan if view.loss is None else view.loss,
        versions=view.versions,
        **{name: getattr(totals, name) for name in Counters.__dataclass_fields__},
        in_flight_s=view.in_flight_s,
        sends=view.sends,
        payload_bytes=_by_text(view.payload_bytes),
        staleness={
            f"{fragment}:{stale}": times
            for fragment, histogram in view.fragment_staleness.items()
            for stale, times in histogram.items()
        },
        sync_delay_steps=_by_text(view.sync_delay_steps),
        applied_at=_by_text(view.applied_at),
        carriers=dict(view.carriers),
        skipped_sends=dict(view.skipped_sends),
        caught_up=dict(view.caught_up),
        refused=dict(view.refused),
        rounds_alone=view.rounds_alone,
        loss_at=tuple(at for at, _, _ in points),
        loss_position=tuple(position for _, position, _ in points),
        loss_value=tuple(loss for _, _, loss in points),
    )


_V = TypeVar("_V")


def keep(table: dict[str, _V], name: str, value: _V) -> None:
    """``table[name] = value``, unless the table is full of other names."""
    if name in table or len(table) < MAX_LINKS:
        table[name] = value


def _by_text(table: Mapping[int, _V]) -> dict[str, _V]:
    return {str(key): value for key, value in table.items()}


def _by_number(table: Mapping[str, _V]) -> dict[int, _V]:
    return {int(key): value for key, value in table.items() if _is_number(key)}


def _is_number(text: str) -> bool:
    """Whether it is a count. One of hundreds of digits is none, and no float can hold it."""
    return len(text) < MAX_DIGITS and text.isascii() and text.isdecimal()


def _finite_or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


def _larger(known: float, value: float) -> float:
    return max(known, value) if math.isfinite(value) else known
