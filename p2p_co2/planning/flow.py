"""What happens when rounds follow one another on links that are shared: delay, staleness, sends left out.

A fragment whose round is still open at its next schedule point is sent again as soon as that round has ended
(the trainer's ``SendSkipped``), and fragments take turns on a full line: one is sent when half of the last
one's transfer is over (``schedule.account``), and of transfers that are open the oldest goes first
(``node.lanes``). So a link that is too slow shows as fewer sends and not as an ever longer queue.

Law: deterministic; with time to spare a fragment's delay is exactly that of its round alone. Price: one
shared link stands for all of them, and every peer sends at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_co2.planning.exchange import RoundTime

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
    """A round under way. ``half_s``: of its transfer, with the link to itself; ``left_s``: what is left of
    that; ``rest_s``: what comes after it, until the merge is ready at ``ready_at``."""

    fragment: int
    sent_at: float
    half_s: float
    left_s: float
    rest_s: float
    ready_at: float = math.inf


class _Links:
    """One shared link, the rounds that are open on it, the oldest first, and the fragments that wait."""

    def __init__(self, times: Sequence[RoundTime]) -> None:
        self.now = self.busy_s = 0.0
        self.open: list[_Open] = []
        self.waiting: list[int] = []
        self.sent_at: list[float] = []
        self._times = times

    def is_open(self, fragment: int) -> bool:
        return any(r.fragment == fragment for r in self.open)

    def send(self) -> None:
        """What waits and has its turn."""
        for fragment in list(self.waiting):
            moving = [r for r in self.open if r.left_s > 0]
            has_room = not moving or (len(moving) == 1 and moving[0].left_s <= moving[0].half_s)
            if has_room and not self.is_open(fragment):
                self.waiting.remove(fragment)
                self._send(fragment, self._times[fragment])

    def _send(self, fragment: int, time: RoundTime) -> None:
        rest_s = time.to_apply_s - time.transfer_s
        begun = _Open(fragment, self.now, time.transfer_s / 2, time.transfer_s, rest_s)
        if not begun.left_s:
            begun.ready_at = self.now + begun.rest_s
        self.open.append(begun)
        self.sent_at.append(self.now)

    def advance(self, until: float) -> list[_Open]:
        """Let the oldest transfer go on until then, or until it has ended or leaves room, or rounds have
        ended, whichever is sooner: the rounds that have ended."""
        first = next((r for r in self.open if r.left_s > 0), None)
        until = min([until, *(r.ready_at for r in self.open)])
        if first is not None:
            is_first_half = first.left_s > first.half_s
            turns_at = self.now + first.left_s - (first.half_s if is_first_half else 0.0)
            worked_s = min(until, turns_at) - self.now
            first.left_s -= worked_s
            if turns_at <= until:
                first.left_s = first.half_s if is_first_half else 0.0
                until = turns_at
            if not first.left_s:
                first.ready_at = until + first.rest_s
            self.busy_s += worked_s
        self.now = until
        ended = [r for r in self.open if r.ready_at <= self.now]
        self.open = [r for r in self.open if r.ready_at > self.now]
        return ended


def flow(times: Sequence[RoundTime], round_s: float) -> Flow:
    """All fragments' rounds (one ``RoundTime`` each), a schedule point per fragment and ``round_s``."""
    count, links = len(times), _Links(times)
    points = count * max(8, min(_MOST_ROUNDS, _SIMULATED_SENDS // count))
    counted_from = _UNCOUNTED * points * round_s / count
    delays: list[float] = []
    left: list[float] = []
    due = 0
    for point in range(points):
        fragment, due_at = point % count, point * round_s / count
        while (ended := links.advance(due_at)) or links.now < due_at:
            delays += [r.ready_at - r.sent_at for r in ended if r.sent_at >= counted_from]
            links.send()
        is_counted = due_at >= counted_from
        due += is_counted
        if fragment == 0 and is_counted:
            left.append(math.fsum(r.left_s for r in links.open))
        if fragment not in links.waiting:
            links.waiting.append(fragment)
        links.send()
    sent = sum(at >= counted_from for at in links.sent_at)
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
