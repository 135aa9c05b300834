"""What happens when rounds follow one another on links that are shared: delay, staleness, sends left out.

A fragment whose round is still open at its next schedule point is not sent again (the trainer's
``SendSkipped``), so a link that is too slow shows as staleness and not as an ever longer queue. Simulated:
rounds that are open at the same time share the links equally (processor sharing).

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
    """A round under way. ``left_s``: of its transfer, with the links to itself."""

    fragment: int
    sent_at: float
    left_s: float
    ready_at: float = math.inf


def flow(times: Sequence[RoundTime], round_s: float) -> Flow:
    """All fragments' rounds (one ``RoundTime`` each), a schedule point per fragment and ``round_s``."""
    count = len(times)
    rounds = max(8, min(_MOST_ROUNDS, _SIMULATED_SENDS // count))
    counted_from = _UNCOUNTED * rounds * round_s
    rest_s = [time.to_apply_s - time.transfer_s for time in times]
    open_: list[_Open] = []
    delays: list[float] = []
    left: list[float] = []
    sent = skipped = 0
    now = busy_s = 0.0
    for point in range(rounds * count):
        fragment, due_at = point % count, point * round_s / count
        busy_s += _work(open_, rest_s, now, due_at)
        now = due_at
        delays += [r.ready_at - r.sent_at for r in open_ if r.ready_at <= now and r.sent_at >= counted_from]
        open_ = [r for r in open_ if r.ready_at > now]
        if fragment == 0 and now >= counted_from:
            left.append(math.fsum(r.left_s for r in open_))
        is_busy = any(r.fragment == fragment for r in open_)
        sent += now >= counted_from and not is_busy
        skipped += now >= counted_from and is_busy
        if not is_busy:
            transfer_s = times[fragment].transfer_s
            ready_at = math.inf if transfer_s > 0 else now + rest_s[fragment]
            open_.append(_Open(fragment, now, transfer_s, ready_at))
    if not delays:  # not one round was over by then: all of them, one beside the other
        delays = [sum(time.transfer_s for time in times) + max(rest_s)]
    return Flow(
        to_apply_s=math.fsum(delays) / len(delays),
        slowest_s=max(delays),
        staleness=sum(math.floor(delay / round_s) for delay in delays) / len(delays),
        sent_share=sent / (sent + skipped),
        busy_share=busy_s / now if now else 0.0,
        left_s=math.fsum(left) / len(left),
    )


def _work(open_: Sequence[_Open], rest_s: Sequence[float], now: float, until: float) -> float:
    """Let the links work from ``now``, equal shares to all transfers; seconds they were busy."""
    began = now
    while now < until and (moving := [r for r in open_ if r.left_s > 0]):
        least_s = min(r.left_s for r in moving)
        ends = now + least_s * len(moving)
        step_s = least_s if ends <= until else (until - now) / len(moving)
        now = min(ends, until)
        for r in moving:
            r.left_s = 0.0 if ends <= until and r.left_s == least_s else r.left_s - step_s
            if r.left_s <= 0:
                r.ready_at = now + rest_s[r.fragment]
    return now - began if now < until else until - began
