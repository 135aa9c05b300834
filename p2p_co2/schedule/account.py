"""What one peer has sent and what of its work is in a mean: a training thread's decisions, without tensors,
network or clock. ``trainer`` and ``simnet`` keep the same account.

Laws: a fragment has one offer in flight at most; work that no mean has counted is in the weight of the next
offer, and is offered again at the end; deterministic, ``now`` is an argument. Price: a point that passes
while the last round of a fragment is in flight is left out, and shows as staleness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from p2p_co2.config import RunConfig
from p2p_co2.schedule.ending import flush_bound_s
from p2p_co2.schedule.points import due, points_passed

FIRST_ROUND_BOUND_S = 15.0
"""Training waits at most this long for the first rounds of what was sent in one step, if it waits at all."""
ALONE_S = 15.0
"""In longer rounds nothing is offered before its point: a coordinator waits 30 s for the others at most."""
DISTINCT = 2.0**-10
"""Tokens at most that a weight is off. A commit names offers by peer and weight: a peer that was restarted
must not take the offer of its last process for its own."""


def overdue_points(count: int) -> int:
    """A fragment of ``count`` that missed so many schedule points is sent as soon as its round has ended.

    Members meet the same mean up to an inner step apart, and the next point may lie between them: of a single
    fragment, who missed it must not be a round behind those who did not. Several fragments take turns on the
    line: sent after one missed point, they would come to it together, and each take longer.
    """
    return 1 if count == 1 else 2


@dataclass(frozen=True)
class Sent:
    """A fragment that is in flight."""

    inner_steps: int
    at: float
    points: int
    tokens: int


@dataclass(frozen=True)
class Lag:
    """How late an answer is: in schedule points of its fragment, in inner steps and in seconds since the
    send; 0 for one that this peer made no offer for."""

    staleness: int
    sync_delay_steps: int
    sync_delay_s: float


class WorkAccount:
    """One per peer. ``tokens``, ``versions`` (by fragment): where the peer goes on."""

    def __init__(self, run: RunConfig, tokens: int, versions: Sequence[int]) -> None:
        self._count, self._by_time = len(versions), run.clock.mode == "time"
        self._overdue = overdue_points(self._count)
        self._are_rounds_short = run.clock.round_s <= ALONE_S
        self._awaited_rounds, self._rounds = run.outer.blocking_rounds, run.clock.rounds
        self.versions = list(versions)
        """Of the agreed states that the live parameters have met."""
        self.in_flight: dict[int, Sent] = {}
        self.taken = [0] * self._count
        """Outcomes of each fragment that the live parameters have met."""
        self._contributed_tokens = [float(tokens)] * self._count
        """Tokens whose work has been counted. Of an offer that was counted in part, that share: what is
        contributed each time is a part at random, so the parts' mean age is their weight."""
        self._missed = [0] * self._count
        """Schedule points in a row that passed while the fragment's last round was in flight."""
        self._has_offered = [False] * self._count
        self._delays_s: deque[float] = deque(maxlen=2 * self._count)
        """From the offer to the mean, of the last rounds."""

    def due(self, last_position: float, position: float) -> list[int]:
        """Fragments that passed a point on the way to ``position``; then those to be sent before their next
        point, since the line brings less than a round in a round: their rounds ended at one moment for all
        members, whose next points may be a whole round apart."""
        points = due(self._count, last_position, position)
        if not self._by_time:
            return list(points)
        late = [fragment for fragment, missed in enumerate(self._missed) if missed >= self._overdue]
        return [*points, *(f for f in late if f not in self.in_flight and f not in points)]

    def may_send(self, fragment: int, awaits_begin: bool) -> bool:
        """Whether a fragment that is due can be sent; if not, its point is counted as missed. One that
        ``awaits_begin`` was sent before the others' were: it waits for what they send at this point."""
        is_free = fragment not in self.in_flight
        if is_free:
            self._missed[fragment] = 0
        elif not awaits_begin:
            self._missed[fragment] += 1
        return is_free

    def forget_missed(self) -> None:
        """After a rest: its points are not made up."""
        self._missed = [0] * self._count

    def send(
        self, fragment: int, *, position: float, inner_steps: int, tokens: int, now: float, chance: float
    ) -> float:
        """An offer sets out: its weight. ``chance``: 0 to 1, at random."""
        points = points_passed(fragment, self._count, position)
        self.in_flight[fragment] = Sent(inner_steps, now, points, tokens)
        self._has_offered[fragment] = True
        return max(1, tokens - self._contributed_tokens[fragment]) + DISTINCT * chance

    def awaited(self, sent: Sequence[int]) -> set[int]:
        """Of what was just sent, the rounds that the run file wants awaited. They are awaited together: one
        after the other, peers that were held up differently would each wait for a fragment that the others
        are yet to send."""
        return {fragment for fragment in sent if self.versions[fragment] < self._awaited_rounds}

    def meet(self, fragment: int, version: int, ends_offer: bool) -> Sent | None:
        """Live parameters met an outcome: the offer that is or was in flight for it."""
        self.taken[fragment] += 1
        self.versions[fragment] = version  # outcomes come in their order; a peer may turn back to others
        return self.in_flight.pop(fragment, None) if ends_offer else self.in_flight.get(fragment)

    def left_out(self, fragment: int) -> None:
        """The others have made a round without us, and its state is ours now: in short rounds we are due at
        once, since they may be ready for the next. Who waited for its own point would come late to that one
        too, and to all that follow: of 256 peers in eight cells, with rounds of 10 s, more and more."""
        if self._are_rounds_short and self._has_offered[fragment]:
            self._missed[fragment] = self._overdue

    def step(
        self, fragment: int, sent: Sent | None, share: float, *, position: float, inner_steps: int, now: float
    ) -> Lag:
        """An outer step was taken. ``sent``: as ``meet`` gave it; ``share`` of it is in the mean, 0 to 1. Who
        has none in it was ``left_out``."""
        if sent is None:
            return Lag(0, 0, 0.0)
        if not share:
            self.left_out(fragment)
        known = self._contributed_tokens[fragment]
        self._contributed_tokens[fragment] = known + share * (sent.tokens - known)
        self._delays_s.append(now - sent.at)
        passed = points_passed(fragment, self._count, position)
        return Lag(max(0, passed - sent.points), inner_steps - sent.inner_steps, now - sent.at)

    # ---- the end

    def is_over(self, position: float) -> bool:
        """Whether the run has reached its last round. What is offered from then on, at a schedule point or
        after it, is a peer's last of that fragment, and the others wait for it longer."""
        return 0 < self._rounds <= position

    @property
    def flush_bound_s(self) -> float:
        """How long this peer tries to have the rest of its work counted."""
        return flush_bound_s(self._count, self._delays_s)

    def uncounted(self, tokens: int) -> list[int]:
        """Fragments with work of this peer, which trained ``tokens``, that is in no mean yet."""
        return [fragment for fragment, counted in enumerate(self._contributed_tokens) if counted < tokens]

    def finished(self, still_to_offer: Collection[int]) -> frozenset[int]:
        """Fragments of which nothing is in flight nor ``still_to_offer``."""
        return frozenset(range(self._count)) - self.in_flight.keys() - frozenset(still_to_offer)
