"""What happens when rounds follow one another on links that are shared: delay, staleness, sends left out.

A fragment whose round is still open at its next schedule point is not sent again (the trainer's
``SendSkipped``), and after two such points as soon as that round has ended, so a link that is too slow shows
as staleness and not as an ever longer queue. Simulated: rounds that are open at the same time share the links
equally (processor sharing).

Law: deterministic; with time to spare a fragment's delay is exactly that of its round alone. Price: one
shared link stands for all of them, and every peer sends at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_co2.planning.exchange import RoundTime
from p2p_co2.schedule import overdue_points

_SIMULATED_SENDS = 4096
_MOST_ROUNDS = 48
_UNCOUNTED = 0.25
"""The first part of the simulated time, in which the links fill."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """``to_apply_s``: mean from send until the merge is ready; ``slowest_s``: the longest. ``staleness``:
    mean number of the fragment's schedule points in between. ``sent_share``: sends made of those due.
    ``busy_share``: of the time, the links move payloads. ``left_s``: seconds of transfers that are still open
    when a round is full and the run may end, on average."""

    to_apply_s: float
    slowest_s: float
    staleness: float
    sent_share: float
    busy_share: float
    left_s: float


@dataclass
class _Open:
    """A round under way. ``left_s``: of its transfer, with the links to itself; ``rest_s``: what comes after
    it, until the merge is ready at ``ready_at``."""

    fragment: int
    sent_at: float
    left_s: float
    rest_s: float
    ready_at: float = math.inf


class _Links:
    """One shared link and the rounds that are open on it, simulated."""

    def __init__(self) -> None:
        self.now = self.busy_s = 0.0
        self.open: list[_Open] = []

    def send(self, fragment: int, time: RoundTime) -> None:
        begun = _Open(fragment, self.now, time.transfer_s, time.to_apply_s - time.transfer_s)
        if not begun.left_s:
            begun.ready_at = self.now + begun.rest_s
        self.open.append(begun)

    def advance(self, until: float) -> list[_Open]:
        """Work, equal shares to all transfers, until then or until rounds have ended, whichever is sooner:
        those that have."""
        while True:
            ended = [r for r in self.open if r.ready_at <= self.now]
            self.open = [r for r in self.open if r.ready_at > self.now]
            if ended or self.now >= until:
                return ended
            self._work(min(until, min((r.ready_at for r in self.open), default=until)))

    def _work(self, until: float) -> None:
        moving = [r for r in self.open if r.left_s > 0]
        if not moving:
            self.now = until
            return
        least_s = min(r.left_s for r in moving)
        ends_at = self.now + least_s * len(moving)
        until = min(until, ends_at)
        step_s = (until - self.now) / len(moving)
        for r in moving:
            r.left_s = 0.0 if ends_at <= until and r.left_s == least_s else max(0.0, r.left_s - step_s)
            if not r.left_s:
                r.ready_at = until + r.rest_s
        self.busy_s += until - self.now
        self.now = until


def flow(times: Sequence[RoundTime], round_s: float) -> Flow:
    """All fragments' rounds (one ``RoundTime`` each), a schedule point per fragment and ``round_s``."""
    count, links = len(times), _Links()
    points = count * max(8, min(_MOST_ROUNDS, _SIMULATED_SENDS // count))
    counted_from = _UNCOUNTED * points * round_s / count
    missed = [0] * count
    delays: list[float] = []
    left: list[float] = []
    sent = due = 0
    for point in range(points):
        fragment, due_at = point % count, point * round_s / count
        while (ended := links.advance(due_at)) or links.now < due_at:
            delays += [r.ready_at - r.sent_at for r in ended if r.sent_at >= counted_from]
            for r in ended:
                if missed[r.fragment] >= overdue_points(count):
                    missed[r.fragment] = 0
                    sent += links.now >= counted_from
                    links.send(r.fragment, times[r.fragment])
        is_counted = due_at >= counted_from
        due += is_counted
        if fragment == 0 and is_counted:
            left.append(math.fsum(r.left_s for r in links.open))
        if any(r.fragment == fragment for r in links.open):
            missed[fragment] += 1
        else:
            missed[fragment] = 0
            sent += is_counted
            links.send(fragment, times[fragment])
    if not delays:  # not one round was over by then: all of them, one beside the other
        rest_s = max(time.to_apply_s - time.transfer_s for time in times)
        delays = [sum(time.transfer_s for time in times) + rest_s]
    return Flow(
        to_apply_s=math.fsum(delays) / len(delays),
        slowest_s=max(delays),
        staleness=sum(math.floor(delay / round_s) for delay in delays) / len(delays),
        sent_share=sent / due,
        busy_share=links.busy_s / links.now if links.now else 0.0,
        left_s=math.fsum(left) / len(left),
    )
