"""When fragments are sent and what of their work counts: schedule points, the clock of the swarm's position,
the account of offers, the end of a run. ``trainer`` and ``simnet`` keep the same.

Fragment f of P has a point at every ``r + f / P`` above 0, r a whole number (Streaming DiLoCo, arXiv
2501.18512). So sends are spread evenly over a round. Points are numbered as ticks, ``t = r * P + f``, t >= 1.

Laws: nothing here reads a clock, a socket or a tensor. Positions never fall; a fragment's points are passed
in order, each counted once. A fragment has one offer in flight at most. Work that no mean has counted is in
the next offer, and is offered again at the end. On a full line a point that passes while the fragment is in
flight is made up as soon as its round has ended. There fragments take turns, in one order for all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.terms import RunTerms

_TOLERANCE = 1e-6
"""Ticks by which a point may come early: the position is steps / H in floating point, and 3 * (1 / 3) must
count as 1."""
SLEW = 0.1
"""The largest correction of the clock's rate."""
ENDS_ROUNDS = 0.2
"""A run comes to its end so many rounds before it: from then on nobody rests."""


class SwarmClock:
    """This peer's estimate of the swarm's position, in rounds.

    Mode "steps": inner steps / ``inner_steps_per_round``, counted from ``start``; other peers do not matter.

    Mode "time": one round per ``round_s``, drawn gently towards the median of the other peers. Only positions
    and durations travel between peers, never dates. One lying peer cannot move a median. ``now`` is any local
    clock in seconds that does not go back.
    """

    def __init__(self, config: ClockConfig) -> None:
        self._config = config
        self.start(0.0, 0.0)

    def start(self, position: float, now: float, inner_steps: int = 0) -> None:
        """Begin at ``position`` (0 in a new run, the swarm's for a late joiner, the checkpoint's on resume).

        ``inner_steps`` is this peer's own count at that moment.
        """
        self._position = position
        self._at = now
        self._inner_steps = inner_steps
        self._correction = 0.0

    def position(self, now: float, inner_steps: int) -> float:
        """The position at ``now``, after ``inner_steps`` inner steps of this peer. Never falls."""
        if self._config.mode == "steps":
            steps = max(0, inner_steps - self._inner_steps)
            return self._position + steps / self._config.inner_steps_per_round
        self._advance(now)
        return self._position

    def observe(self, others: float, now: float) -> None:
        """Take in ``others``, the median of the other peers' positions, estimated for ``now`` (their last
        word plus its age in rounds).

        The clock then runs up to 10 % faster or slower until the difference is gone. More than a round
        behind (a laptop that slept), it jumps forward; it never goes back. Does nothing in mode "steps" or
        if ``others`` is not finite.
        """
        if self._config.mode == "steps" or not math.isfinite(others):
            return
        self._advance(now)
        difference = others - self._position
        if difference > 1.0:
            self._position = others
            difference = 0.0
        self._correction = difference

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._at) / self._config.round_s
        reach = SLEW * elapsed
        slewed = max(-reach, min(reach, self._correction))
        self._correction -= slewed
        self._position += elapsed + slewed
        self._at = max(self._at, now)


def points_passed(fragment: int, count: int, position: float) -> int:
    """How many schedule points of ``fragment`` (of ``count``) lie at or before ``position``, in rounds."""
    ticks = last_tick(count, position)
    return ticks // count if fragment == 0 else (ticks - fragment + count) // count


def due(count: int, last_position: float, position: float) -> tuple[int, ...]:
    """Fragments (of ``count``) that passed a point after ``last_position``, up to ``position``, in the
    order of their points.

    Each at most once: a peer that slept through several rounds sends each fragment once.
    """
    first = last_tick(count, last_position) + 1
    last = last_tick(count, position)
    return tuple(tick % count for tick in range(first, min(last, first + count - 1) + 1))


def last_tick(count: int, position: float) -> int:
    """The number of the last point at or before ``position``, of all ``count`` fragments; 0 before the
    first."""
    return max(0, math.floor(position * count + _TOLERANCE))


# ---- the account of offers

FIRST_ROUND_BOUND_S = 15.0
"""Training waits at most this long for the first rounds of what was sent in one step, if it waits at all. And
in rounds that are longer nothing is offered before its point: a coordinator waits 30 s for the others."""
OVERDUE_POINTS = 2
"""Where no line is full, one of several fragments that missed so many points is sent as soon as its round has
ended. A single one is sent after the first: the next point may lie between the steps in which members meet
the mean."""
FULL_LATELY = 2.0
"""Whether the line is full is judged by the last half of the time between two points: a burst waits for a
moment on any line."""
LONGEST_TURN_ROUNDS = 2.0
"""A fragment whose slices have not left after so many rounds keeps none of the others waiting."""

Stage = Literal["", "asking", "slices", "means"]
"""How far the round of an offer is: not known yet, or over. Its READY waits for BEGIN. It has begun, and our
slices wait for the line. They have left."""


@dataclass(frozen=True)
class OfferState:
    """An offer of this peer's, from its snapshot to the end of its round. It goes to the worker with the
    snapshot, and comes back in the outcome that ends it; others know it by its id.

    ``weight``: tokens that it counts as; ``tokens``: trained at the snapshot. ``met``: number of the
    fragment's last outcome that the snapshot has met. ``inner_steps``, ``points``, ``at``: when it was taken,
    in steps, in schedule points of its fragment, and in seconds.
    """

    offer_id: bytes
    weight: int = 1
    tokens: int = 0
    met: int = 0
    inner_steps: int = 0
    points: int = 0
    at: float = 0.0


@dataclass(frozen=True)
class Lag:
    """How late an answer is: in schedule points of its fragment, in inner steps, in seconds. 0 for one that
    this peer made no offer for."""

    staleness: int
    sync_delay_steps: int
    sync_delay_s: float


class FullLine:
    """Whether bulk waits for the line most of the time; only in runs by the clock."""

    def __init__(self, count: int, by_time: bool) -> None:
        self._count = count
        self._by_time = by_time
        self.share = 0.0
        """Of the time of late, in which bulk waited."""
        self._until_tick = 0

    def see(self, is_full: bool, rounds: float) -> None:
        """So it was for so many ``rounds``."""
        self.share += min(1.0, FULL_LATELY * self._count * rounds) * (is_full - self.share)

    def note(self, tick: int) -> None:
        """Rounds wait for something: if bulk does, the line counts as full for a round from now on."""
        if self._by_time and self.share > 0.5:
            self._until_tick = tick + self._count

    def is_full(self, tick: int) -> bool:
        return tick < self._until_tick


class WorkAccount:
    """One per peer. ``tokens``, ``versions`` (by fragment): where the peer goes on. ``terms``: the run's, if
    they may be amended."""

    def __init__(
        self, run: RunConfig, tokens: int, versions: Sequence[int], terms: RunTerms | None = None
    ) -> None:
        self._run = run
        self.terms = terms or RunTerms(run)
        self._count = len(versions)
        self.versions = list(versions)
        """Of the agreed states that the live parameters have met."""
        self.in_flight: dict[int, OfferState] = {}
        """By fragment, until live parameters meet the outcome that ends it."""
        self._met = [0] * self._count
        """Number of each fragment's last outcome that the live parameters have met."""
        self._contributed_tokens = [tokens] * self._count
        """Tokens whose work has been counted; of an offer that was counted in part, that share."""
        self._waiting: dict[int, int] = {}
        """Fragments whose point has passed and that are not sent yet, with the number of their first one."""
        self._missed = [0] * self._count
        """Schedule points in a row that passed while the fragment's last round was in flight."""
        self._line = FullLine(self._count, run.clock.mode == "time")
        self._tick = 0
        """The last point that has passed."""
        self._has_offered = [False] * self._count
        self._delays_s: deque[float] = deque(maxlen=2 * self._count)
        """From the offer to the mean, of the last rounds."""
        self._peers = [0.0] * self._count
        self.done_elsewhere: Callable[[], frozenset[int]] = frozenset
        """Fragments with which most of the swarm are done."""

    @property
    def peers(self) -> float:
        """In the fragments' last means, by their weights; 0 before the first."""
        known = [one for one in self._peers if one]
        return math.fsum(known) / len(known) if known else 0.0

    def due(self, last_position: float, position: float, is_line_full: bool = False) -> list[int]:
        """Fragments that wait to be sent, or passed a point on the way to ``position``, in the order of their
        points. On a full line those with the fewest outer steps come first, which all peers count alike.
        ``is_line_full``: bulk waits for it."""
        self._line.see(is_line_full, position - last_position)
        points = due(self._count, last_position, position)
        self._tick = last_tick(self._count, position)
        for fragment in points:
            self._waiting.setdefault(fragment, self._last_point_of(fragment))
        order = self.versions if self._line.is_full(self._tick) else self._waiting
        waiting = sorted(self._waiting, key=lambda fragment: (order[fragment], fragment))
        return [fragment for fragment in waiting if fragment not in self.in_flight or fragment in points]

    def _last_point_of(self, fragment: int) -> int:
        return self._tick - (self._tick - fragment) % self._count

    @property
    def _by_time(self) -> bool:
        return self._run.clock.mode == "time"

    def may_send(self, fragment: int, awaits_begin: bool) -> bool:
        """Whether a fragment that is due can be sent. If not, its point is made up once its round has ended:
        by the clock, and if the line is full or it is overdue. One that ``awaits_begin`` waits for what
        others send at this point."""
        if fragment not in self.in_flight:
            return True
        if not awaits_begin:
            self._line.note(self._tick)
            self._missed[fragment] += 1
        is_soon = self._line.is_full(self._tick) or self._count == 1
        overdue_points = 1 if is_soon else OVERDUE_POINTS
        if awaits_begin or not self._by_time or self._missed[fragment] < overdue_points:
            self._waiting.pop(fragment, None)
        return False

    def is_held(self, stage: Callable[[int], Stage], step_s: float, now: float) -> bool:
        """Whether the next fragment waits for its turn on a full line: what is sent into a queue is stale
        when it gets there. One has the line until its slices have left. While it awaits its BEGIN it has it
        for a round at most, or, on an idle line, until the next point. A longer step sends several."""
        round_s = self._run.clock.round_s
        begun = 0
        early = 0
        tick_s = round_s / self._count
        early_s = round_s if self._line.share > 0.5 else tick_s
        for fragment, offer in self.in_flight.items():
            at = stage(fragment)
            age_s = now - offer.at
            begun += at == "slices" and age_s < LONGEST_TURN_ROUNDS * round_s
            early += at in ("", "asking") and age_s < early_s
        if begun:
            self._line.note(self._tick)
        return self._line.is_full(self._tick) and begun + early > step_s / tick_s

    def forget_missed(self) -> None:
        """After a rest: its points are not made up."""
        self._waiting.clear()
        self._missed = [0] * self._count

    def send(
        self, fragment: int, *, position: float, inner_steps: int, tokens: int, now: float, offer_id: bytes
    ) -> OfferState:
        """An offer sets out."""
        points = points_passed(fragment, self._count, position)
        weight = max(1, tokens - self._contributed_tokens[fragment])
        offer = OfferState(offer_id, weight, tokens, self._met[fragment], inner_steps, points, now)
        self.in_flight[fragment] = offer
        self._waiting.pop(fragment, None)
        self._missed[fragment] = 0
        self._has_offered[fragment] = True
        return offer

    def awaited(self, sent: Sequence[int]) -> set[int]:
        """Of what was just sent, the rounds that the run file wants awaited. All together: else each peer
        would wait for a fragment that the others are yet to send."""
        return {one for one in sent if self.versions[one] < self._run.outer.blocking_rounds}

    def meet(self, fragment: int, version: int, number: int, ended: OfferState | None) -> OfferState | None:
        """Live parameters met outcome ``number``, which ``ended`` this offer: the one that is or was in
        flight."""
        self._met[fragment] = number
        self.versions[fragment] = version  # outcomes come in their order; a peer may turn back to others
        offer = self.in_flight.get(fragment)
        if offer is not None and offer == ended:
            del self.in_flight[fragment]
        return offer

    def left_out(self, fragment: int) -> None:
        """The others have made a round without us, and its state is ours now. In short rounds, and where the
        line is full, we are due at once: they may be ready for the next."""
        is_soon = self._run.clock.round_s <= FIRST_ROUND_BOUND_S or self._line.is_full(self._tick)
        if is_soon and self._by_time and self._has_offered[fragment]:
            self._waiting.setdefault(fragment, self._last_point_of(fragment))

    def step(
        self, fragment: int, offer: OfferState | None, share: float, peers: float,
        *, position: float, inner_steps: int, now: float,
    ) -> Lag:  # fmt: skip
        """An outer step was taken. ``offer``: as ``meet`` gave it; ``share`` of it is in the mean, 0 to 1. A
        peer that has none in it was ``left_out``. ``peers``: in it, by their weights."""
        self._peers[fragment] = peers
        if offer is None:
            return Lag(0, 0, 0.0)
        if not share:
            self.left_out(fragment)
        known = self._contributed_tokens[fragment]
        self._contributed_tokens[fragment] = known + int(share * (offer.tokens - known))
        self._delays_s.append(now - offer.at)
        passed = points_passed(fragment, self._count, position)
        return Lag(max(0, passed - offer.points), inner_steps - offer.inner_steps, now - offer.at)

    # ---- the end

    def is_over(self, position: float) -> bool:
        """Whether the run has reached its last round, or most have come to its end: a few who count their own
        steps and are slower make no more rounds. What is offered from then on is a peer's last of that
        fragment, and the others wait for it longer."""
        return 0 < self.terms.rounds(position) <= position or len(self.done_elsewhere()) == self._count

    def is_near_end(self, position: float) -> bool:
        """Whether nobody rests any more, since all are to end with one state."""
        return self.is_over(position + max(ENDS_ROUNDS, 1.0 / self._run.clock.round_s))

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


# ---- the end of a run

FLUSH_FLOOR_S = 30.0
"""The final flush may take so long, or as long as one round of every fragment, one after the other."""
FLUSH_CAP_S = 600.0
"""And never longer."""
SETTLE_S = 25.0
"""Until all live peers agree: longer than a flush by so much, since theirs may begin with our end."""

LOADS_QUIET_S = 30.0
"""Then a peer goes, unless a state is on its way to it or from it: a chunk came or went within so long."""
LOADS_CAP_S = FLUSH_CAP_S
"""The longest that it stays for that. A liar that says to the end that it holds something else has the
same."""

STILL_LOADS = (
    "the run is over, but a last round is still being made, or not all hold the same yet, or a state or a "
    "missed round is on its way to this peer or from it: it stays for as long as that goes on, at most "
    f"{LOADS_CAP_S:.0f} s more"
)


def flush_bound_s(count: int, delays_s: Collection[float]) -> float:
    """How long a peer tries to have the rest of its work counted, in ``count`` fragments. ``delays_s``: what
    its last rounds took, from the offer to the mean."""
    sweep_s = count * median(delays_s) if delays_s else 0.0
    return min(FLUSH_CAP_S, max(FLUSH_FLOOR_S, sweep_s))


def few_at_once(count: int) -> int:
    """Of ``count`` fragments, how many a peer offers at once when a run is over."""
    return max(2, -(-count // 2))


class Ending:
    """In which order a peer offers the rest of its work, the same on all peers, so that they meet in the same
    rounds. It lasts ``bound_s`` from ``began_at`` on, by the caller's clock.

    Few at once; in the second half all, for peers that wait for each other with different ones. Law: every
    fragment's turn comes. One that failed is tried again after the others, and after a heartbeat.
    """

    def __init__(self, count: int, began_at: float, bound_s: float) -> None:
        self._ends_at = began_at + bound_s
        self._bound_s = bound_s
        self._again_at = [began_at] * count
        self._tries = [0] * count

    def next(
        self, uncounted: Collection[int], in_flight: Collection[int], now: float
    ) -> tuple[list[int], float] | None:
        """Fragments to offer now, of those with work that is not counted, and how long to wait then until
        fewer are in flight. None when nothing is left to do."""
        left_s = self._ends_at - now
        half_s = self._bound_s / 2
        count = len(self._tries)
        if not uncounted or left_s <= 0:
            return None
        in_a_hurry = left_s <= half_s
        waiting = [fragment for fragment in uncounted if fragment not in in_flight]
        early = [fragment for fragment in waiting if now < self._again_at[fragment]]
        ready = sorted(set(waiting) - set(early), key=lambda fragment: (self._tries[fragment], fragment))
        offers = ready[: count if in_a_hurry else max(0, few_at_once(count) - len(in_flight))]
        for fragment in offers:
            self._tries[fragment] += 1
            self._again_at[fragment] = now + HEARTBEAT_S
        soon_s = min((self._again_at[fragment] - now for fragment in early), default=left_s)
        return offers, min(soon_s, left_s if in_a_hurry else left_s - half_s)
