"""Compute utilisation between a peer's first rounds and its last: what a long run looks like.

Until every fragment has had its first round nothing comes back, and a run may ask for training to wait for
those; at the end it waits for the last answers: seconds once in a run, but much of a rehearsal. The summary
has both figures: ``utilisation`` with all of it, ``steady`` without. Saving checkpoints and measuring the
held-out loss stop training too and have nothing to do with the network; their shares are told beside it.

Law: the figure is a difference of two of the peer's own ``Progress`` reports, so nothing is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_co2.telemetry.events import AgreedMeasured, CheckpointSaved, Event, PeerStarted, Progress


@dataclass
class SteadyState:
    """``first_rounds``: rounds of each fragment that are not counted: 1, or as many as training waits for
    (``outer.blocking_rounds``)."""

    first_rounds: int
    _first: dict[str, Progress] = field(default_factory=dict)
    _last: dict[str, Progress] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _saved: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By peer: when a checkpoint was written, and how long training stood still for it."""
    _measured: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """The same for the held-out loss."""

    def add(self, event: Event) -> None:
        if isinstance(event, PeerStarted):
            self._names[event.peer] = event.name
            self._first.pop(event.peer, None)
        elif isinstance(event, Progress) and event.phase == "training" and event.inner_steps:
            if event.peer not in self._first and min(event.versions, default=0) >= self.first_rounds:
                self._first[event.peer] = event
            self._last[event.peer] = event
        elif isinstance(event, CheckpointSaved):
            self._saved.setdefault(event.peer, []).append((event.at, event.duration_s))
        elif isinstance(event, AgreedMeasured):
            self._measured.setdefault(event.peer, []).append((event.at, event.duration_s))

    def since(self) -> float | None:
        """When the last peer had its first rounds behind it (unix); None if one has not."""
        if not self._names or set(self._names) - set(self._first):
            return None
        return max(report.at for report in self._first.values())

    def utilisation(self) -> dict[str, float]:
        """By peer's name: seconds in inner steps over seconds."""
        return {name: round(train / wall, 4) for name, train, wall in self._spans()}

    def saving_share(self) -> dict[str, float]:
        """By peer's name: of the same time, what went into checkpoints."""
        return self._share(self._saved)

    def measuring_share(self) -> dict[str, float]:
        """By peer's name: of the same time, what went into measuring the agreed parameters."""
        return self._share(self._measured)

    def _share(self, stood_still: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
        shares = {}
        for peer, first in self._first.items():
            last = self._last[peer]
            stood_s = sum(took_s for at, took_s in stood_still.get(peer, ()) if first.at < at <= last.at)
            if last.wall_s > first.wall_s:
                shares[self._names.get(peer, peer)] = round(stood_s / (last.wall_s - first.wall_s), 4)
        return dict(sorted(shares.items()))

    def tokens_per_s(self) -> float:
        """Of all peers together."""
        spans = [(self._first[peer], self._last[peer]) for peer in self._first]
        rates = [(b.tokens - a.tokens) / (b.wall_s - a.wall_s) for a, b in spans if b.wall_s > a.wall_s]
        return round(sum(rates), 1)

    def _spans(self) -> list[tuple[str, float, float]]:
        spans = []
        for peer, first in self._first.items():
            last = self._last[peer]
            if last.wall_s > first.wall_s:
                spans.append(
                    (self._names.get(peer, peer), last.train_s - first.train_s, last.wall_s - first.wall_s)
                )
        return sorted(spans)
