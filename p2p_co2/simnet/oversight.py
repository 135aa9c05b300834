"""Looks at one simulated process as each of its turns ends: what it holds, its open offers, its timers.

Whatever a process does happens in a turn: a message, a timer, an answer, a step of its training. So a bound
that is broken for a moment is seen, though it is kept again before the process's next turn. (What grows and
falls within one turn is not.) A process that takes no turns any more is found by an alarm, set for the moment
at which a timer or an offer will have waited too long, and set anew when that moment comes for nothing.

Laws: no timer is due for longer than ``OVERDUE_S`` while its process could run; an open offer has a timer
and ends within the bound of the run; whoever has trained to the end goes within the time that it told; what
is held stays within the bound that it names. Nothing here changes what the process does.

Price: a few percent of a simulation. What a machine of the rounds or a link's queue holds is
looked at only after turns in which it counted something, and what grows without being counted as the alarm
comes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from p2p_co2.node.node import Node
from p2p_co2.protocol.schedule import LOADS_CAP_S, LOADS_QUIET_S

if TYPE_CHECKING:
    from p2p_co2.simnet.inspection import Inspector
    from p2p_co2.simnet.process import Process

OVERDUE_S = 1.5
"""A timer that is later than this is one that nobody heeds (a process looks at its timers at least every
second)."""
HANG_UP_S = 60.0
"""So much later than a peer told that it would be gone it may still be there: to say goodbye."""
LEFT_OFF_S = LOADS_QUIET_S + HANG_UP_S
"""And so long after it was needed last: it got, or gave, a chunk of a state, or a last round was made."""
JUST_S = 1e-6
"""What floats of seconds since 1970 cannot tell."""


class Oversight:
    """Of a process that has its node. ``offer_bound_s``: how long an offer may be open."""

    def __init__(self, process: Process, node: Node, inspector: Inspector, offer_bound_s: float) -> None:
        self._process, self._node, self._inspector = process, node, inspector
        self._offer_bound_s = offer_bound_s
        self._world = process.swarm.world
        self._rounds, self._membership, self._catchup = node.rounds, node.membership, node.catchup
        self._is_over = False
        self._revision = self._fetched = self._waited = -1
        """What the rounds machine, catching up and the links had counted when they were looked at last."""
        self._agreed: list[object] = []
        self._offered_at: list[float | None] = []
        self._offers: dict[tuple[int, float], float] = {}
        """Open offers, by fragment and their own time: since when, in virtual seconds."""
        self._offers_due_at = math.inf
        self._called_offers_late: set[tuple[int, float]] = set()
        self._held: list[dict[str, tuple[int, int]]] = [{}, {}, {}, {}, {}]
        """As it was weighed last: of the rounds, of catching up, the links, the membership, what others said
        last."""
        self._over: dict[str, int] = {}
        """By the name of its bound, what was held beyond it."""
        self._timers_at = [math.inf, math.inf]
        """Of the rounds and of catching up, as they were looked at last."""
        self._others_at = math.inf
        self._heard = -1
        self._next_at, self._since = math.inf, 0.0
        """The nearest timer, by the node's clock, and since when it is that."""
        self._alarm_at = self._covered_until = math.inf
        """When the alarm comes (virtual seconds), and the timers for which that is early enough."""
        process.loop.after_turn = self.turned

    def end(self) -> None:
        """The process is over."""
        self._is_over = True
        self._process.loop.after_turn = None
        for since in self._offers.values():
            self._inspector.offer_ended(self._world.now - since)

    # ---- after each turn

    def turned(self) -> None:
        """A turn has ended."""
        membership, links = self._membership, self._process.links
        if self._rounds.revision != self._revision:
            self._revision = self._rounds.revision
            self._look_at_rounds()
        if self._catchup.revision != self._fetched:
            self._fetched = self._catchup.revision
            self._weigh(1, self._catchup.held())
            self._note_timer(1, self._catchup.get_timer())
        if links is not None and links.waited != self._waited:
            self._waited = links.waited
            self._weigh(2, links.held())
        if membership.revision != self._heard:
            self._heard = membership.revision
            self._weigh(3, membership.held())
        beat_at = membership.get_timer()
        at = self._others_at if beat_at is None or beat_at > self._others_at else beat_at
        if at != self._next_at:
            self._next_at, self._since = at, self._world.now
            if at < self._covered_until:
                self._set_alarm()

    def _look_at_rounds(self) -> None:
        offered_at = self._rounds.offered_at()
        if offered_at != self._offered_at:
            self._offered_at = offered_at
            self._look_at_offers()
        self._weigh(0, self._rounds.held())
        self._note_timer(0, self._rounds.get_timer())
        if self._node.agreed != self._agreed:
            self._agreed = list(self._node.agreed)
            self._inspector.forks.holds(self._process.peer, self._node.agreed)

    def _weigh_all(self) -> None:
        links = self._process.links
        self._weigh(0, self._rounds.held())
        self._weigh(1, self._catchup.held())
        if links is not None:
            self._weigh(2, links.held())
        self._weigh(3, self._membership.held())

    def _weigh(self, place: int, held: dict[str, tuple[int, int]]) -> None:
        if held == self._held[place]:
            return
        self._held[place], most = held, self._inspector.held
        for name, now in held.items():
            if name not in most or now[0] > most[name][0]:
                most[name] = now
            if now[0] > now[1] and now[0] > self._over.get(name, 0):
                self._over[name] = now[0]
                self._broken("memory", f"{name}: holds {now[0]}, the bound is {now[1]}")

    def _look_at_offers(self) -> None:
        now, before = self._world.now, self._offers
        self._offers = {}
        for offer in self._rounds.open_offers():
            place = offer.fragment, offer.offered_at
            self._offers[place] = before.pop(place, now)
            if offer.timer_at == math.inf:
                self._call_late(place, "an open offer has no timer")
        for since in before.values():
            self._inspector.offer_ended(now - since)
        due_at = min(self._offers.values(), default=math.inf) + self._offer_bound_s
        if due_at != self._offers_due_at:
            self._offers_due_at = due_at
            self._set_alarm()

    def _nearest_timer(self) -> float:
        self._note_timer(0, self._rounds.get_timer())
        self._note_timer(1, self._catchup.get_timer())
        beat_at = self._membership.get_timer()
        return self._others_at if beat_at is None else min(beat_at, self._others_at)

    def _note_timer(self, place: int, at: float | None) -> None:
        self._timers_at[place] = math.inf if at is None else at
        self._others_at = min(self._timers_at)

    # ---- the alarm

    def _set_alarm(self) -> None:
        """Have it come when the first of what is waited for will have waited too long."""
        at = max(self._world.now, min(self._timers_due_at(), self._offers_due_at + self._slept_s()))
        if at < self._alarm_at:
            self._alarm_at = at
            self._covered_until = self._by_node_clock(at - OVERDUE_S)
            if at < math.inf:
                self._world.call_at(at, self._alarm, at)

    def _alarm(self, at: float) -> None:
        if self._is_over or at != self._alarm_at:
            return
        now, self._alarm_at, self._covered_until = self._world.now, math.inf, math.inf
        nearest = self._nearest_timer()
        if nearest != self._next_at:
            self._next_at, self._since = nearest, now
        self._weigh_all()
        if now > self._timers_due_at() - JUST_S:
            self._tell_of_timers()
            self._since = now
        for place, since in self._offers.items():
            if now > since + self._offer_bound_s + self._slept_s(since) - JUST_S:
                self._call_late(place, f"an offer is open for {now - since:.0f} s")
        late = [since for place, since in self._offers.items() if place not in self._called_offers_late]
        self._offers_due_at = min(late, default=math.inf) + self._offer_bound_s
        self._set_alarm()

    def _tell_of_timers(self) -> None:
        now = self._node.now()
        for name, at in self._node.timers().items():
            if at is not None and at <= self._next_at + JUST_S:
                self._broken("deadlines", f"the timer of {name} is {now - at:.1f} s overdue")

    def _timers_due_at(self) -> float:
        """When the nearest timer will have been due for too long; one that is set in the past is due from
        the turn that set it, and nobody's timers are due while it stands still."""
        if self._next_at == math.inf:
            return math.inf
        due_at = self._world.now + (self._next_at - self._node.now()) / self._rate
        return max(due_at, self._since, self._process.stalled_until) + OVERDUE_S

    @property
    def _rate(self) -> float:
        return 1.0 + self._process.volunteer.drift

    def _by_node_clock(self, at: float) -> float:
        return self._node.now() + (at - self._world.now) * self._rate

    def _slept_s(self, since: float | None = None) -> float:
        """How long the process stood still after ``since``, or since its oldest offer came."""
        since = min(self._offers.values(), default=0.0) if since is None else since
        return sum(max(0.0, until - max(since, at)) for at, until in self._process.stalls)

    # ---- the end

    def goes_within(self, told_s: float, since: float) -> None:
        """Training ended at ``since``, and the process said how long it may take to go."""
        if self._is_over:
            return
        due_at = since + told_s / self._rate + self._slept_s(since) + HANG_UP_S
        if self._world.now < due_at:
            self._world.call_at(due_at, self.goes_within, told_s, since)
            return
        progress = self._node.progress
        is_needed = progress.is_needed(LEFT_OFF_S) or progress.is_needed(LOADS_QUIET_S, settled=True)
        if self._world.now < due_at + LOADS_CAP_S and is_needed:
            self._world.call_at(self._world.now + LEFT_OFF_S, self.goes_within, told_s, since)
            return
        age_s = self._world.now - since
        self._broken("deadlines", f"is there {age_s:.0f} s after its training, for {told_s:.0f} s told")

    # ---- what is wrong

    def _call_late(self, place: tuple[int, float], text: str) -> None:
        """Once for each offer."""
        if place not in self._called_offers_late:
            self._called_offers_late.add(place)
            self._broken("deadlines", text)

    def _broken(self, law: str, text: str) -> None:
        self._process.swarm.books.broken(self._process.peer, law, text)
