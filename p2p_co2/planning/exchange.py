"""How long one round of a fragment takes on given links, and what happens when rounds follow one another.

A round is six messages one way and two transfers of the fragment's payload; before them comes the wait for
the peer whose inner step ends last. Where shares are cut into several parts the first means travel beside
the last slices: one way is hidden then, and connections need not start slowly a second time.

A fragment whose round is still open at its next schedule point is sent again as soon as that round has
ended, and fragments take turns on a full line: one is sent when half of the last one's transfer is over, and
of open transfers the oldest goes first. So a link that is too slow shows as fewer sends, not as an ever
longer queue.

Pure; mean values only: jitter, and processors that are busy with something else, come on top. Sources: TCP's
slow start (RFC 6928: ten segments) and its throughput under loss (Mathis et al. 1997)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.planning.traffic import LINK_OVERHEAD, round_control_bytes, sent_and_received, shares_of

SEGMENT_BYTES = 1448
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
_MATHIS = 1.22
LINK_EFFICIENCY = 0.85
"""Share of a link's rate that bulk transfers of several connections reach over a whole exchange
(measured)."""
ONE_WAY_MESSAGES = 6
"""READY, BEGIN, slice, mean, RESULT, COMMIT."""
TENSOR_BYTES_PER_S = 270e6
"""fp32 bytes of a fragment per second of one core, for all that its round computes (0.12 s for 32 MB)."""
_BEFORE_COMMIT = 0.4
"""The share of that work which a round's outcome waits for; the rest comes after it."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One peer's way to the others. ``loss``: share of packets."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float = 0.0
    loss: float = 0.0


def link_of(profile: LinkProfile) -> Link:
    """The link of a named profile, between two peers of it."""
    return Link(
        up_bytes_per_s=profile.up_bits_per_s / 8,
        down_bytes_per_s=profile.down_bits_per_s / 8,
        round_trip_s=2 * profile.latency_ms / 1e3,
        loss=profile.loss,
    )


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """One fragment's round, seconds. ``floor_s``: payload over the slowest link's rate, nothing else.
    ``transfer_s``: what the links are busy. ``latency_s``: messages under way and slow start. ``gather_s``:
    waiting for the last peer's step to end, for the average member; ``spread_s``: for the first.
    ``compute_s``: tensor work, ``before_commit_s`` of it inside the round. ``limited_by``: what the transfer
    waits for: "upload", "download" or "loss"."""

    floor_s: float
    transfer_s: float
    latency_s: float
    gather_s: float
    spread_s: float
    compute_s: float
    limited_by: str

    @property
    def before_commit_s(self) -> float:
        return _BEFORE_COMMIT * self.compute_s

    @property
    def slowest_member_s(self) -> float:
        """From the first offer to the commit: ``duration_s`` of a run's summary."""
        return self.spread_s + self.latency_s + self.transfer_s + self.before_commit_s

    @property
    def to_apply_s(self) -> float:
        """From the average member's send until the merge is ready."""
        return self.gather_s + self.latency_s + self.transfer_s + self.compute_s


def floor_s(payload_bytes: float, links: Sequence[Link]) -> float:
    """The least time for one exchange: of the direction of a link that takes longest for what it has to
    carry. With equal links that is ``2 (1 - 1/M) payload / bandwidth``; 0 for one peer."""
    if len(links) < 2:
        return 0.0
    found = []
    for share, link in zip(shares_of([link.up_bytes_per_s for link in links]), links, strict=True):
        slices_out, slices_in, means_out, means_in = sent_and_received(payload_bytes, share, len(links))
        found.append((slices_out + means_out) / link.up_bytes_per_s)
        found.append((slices_in + means_in) / link.down_bytes_per_s)
    return max(found)


def round_time(payload_bytes: int, values: int, step_s: float, links: Sequence[Link]) -> RoundTime:
    """The round of a fragment of ``values`` values and ``payload_bytes`` encoded, among peers with these
    links (one each) and inner steps of ``step_s``."""
    from p2p_co2.protocol.rounds.parts import parts_each

    peers = len(links)
    if peers < 2:
        return RoundTime(
            floor_s=0, transfer_s=0, latency_s=0, gather_s=0, spread_s=0,
            compute_s=4 * values / TENSOR_BYTES_PER_S, limited_by="upload",
        )  # fmt: skip
    shares = shares_of([link.up_bytes_per_s for link in links])
    trips = sorted((link.round_trip_s for link in links), reverse=True)
    round_trip_s = (trips[0] + trips[1]) / 2
    control = round_control_bytes(peers, payload_bytes) / 2
    slices, means = (
        max(
            _phase(payload_bytes, share, link, peers, control, which)
            for share, link in zip(shares, links, strict=True)
        )
        for which in (0, 1)
    )
    is_pipelined = parts_each(payload_bytes, peers, [link.up_bytes_per_s for link in links]) > 1
    ramp_s = sum(
        _slow_start_s(payload_bytes / peers, rate / (peers - 1), round_trip_s)
        for _, rate, _ in ((slices,) if is_pipelined else (slices, means))
    )
    return RoundTime(
        floor_s=floor_s(payload_bytes, links),
        transfer_s=slices[0] + means[0],
        latency_s=(ONE_WAY_MESSAGES - is_pipelined) * round_trip_s / 2 + ramp_s,
        gather_s=step_s * (peers / (peers + 1) - 0.5),
        spread_s=step_s * (peers - 1) / (peers + 1),
        compute_s=4 * values / TENSOR_BYTES_PER_S,
        limited_by=max(slices, means)[2],
    )


def _phase(
    payload: float, share: float, link: Link, peers: int, control: float, which: int
) -> tuple[float, float, str]:
    """(seconds, bytes per second, what limits) of one peer in the slices' phase (0) or the means' (1)."""
    slices_out, slices_in, means_out, means_in = sent_and_received(payload, share, peers)
    out, into = ((slices_out, slices_in), (means_out, means_in))[which]
    most = math.inf
    if link.loss > 0 and link.round_trip_s > 0:  # per connection, and there is one to each other peer
        most = (peers - 1) * SEGMENT_BYTES * _MATHIS / (link.round_trip_s * math.sqrt(link.loss))
    found = []
    for name, size, rate in (("upload", out, link.up_bytes_per_s), ("download", into, link.down_bytes_per_s)):
        usable = LINK_EFFICIENCY * rate
        limit = "loss" if most < usable else name
        usable = min(usable, most)
        found.append((LINK_OVERHEAD * (size + control) / usable, usable, limit))
    return max(found)


def _slow_start_s(size_bytes: float, bytes_per_s: float, round_trip_s: float) -> float:
    """What a connection that was idle loses until its window fills the link."""
    window, sent, lost_s = float(FIRST_WINDOW_BYTES), 0.0, 0.0
    while window < bytes_per_s * round_trip_s and sent + window < size_bytes:
        lost_s += round_trip_s - window / bytes_per_s
        sent += window
        window *= 2
    return lost_s


# ---- rounds after rounds

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

    def send(self) -> None:
        """What waits and has its turn."""
        for fragment in list(self.waiting):
            moving = [r for r in self.open if r.left_s > 0]
            has_room = not moving or (len(moving) == 1 and moving[0].left_s <= moving[0].half_s)
            if has_room and all(r.fragment != fragment for r in self.open):
                self.waiting.remove(fragment)
                time = self._times[fragment]
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
