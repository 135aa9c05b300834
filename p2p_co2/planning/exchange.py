"""How long one round of a fragment takes on given links, and what happens when rounds follow one another.

A round is five messages one way (READY, BEGIN, PART, MEAN, RESULT) and two transfers of the fragment's
payload; before them comes the wait for the peer whose inner step ends last. Where shares are cut into several
parts the first means travel beside the last slices: one way is hidden then, and connections need not start
slowly a second time.

A fragment whose round is still open at its next schedule point is sent again as soon as that round has
ended. On a full line fragments take turns: one is sent when half of the last one's transfer is over.

Mean values only: jitter and busy processors come on top. Sources: TCP's slow start (RFC 6928: ten segments)
and its throughput under loss (Mathis et al. 1997)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.planning.traffic import LINK_OVERHEAD, round_control_bytes, sent_and_received, shares_of

SEGMENT_BYTES = 1448
LINK_EFFICIENCY = 0.85
"""Share of a link's rate that bulk transfers of several connections reach over a whole exchange
(measured)."""
ONE_WAY_MESSAGES = 5
TENSOR_BYTES_PER_S = 270e6
"""fp32 bytes of a fragment per second of one core, for all that its round computes (0.12 s for 32 MB)."""


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """One peer's way to the others. ``loss``: share of packets."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float = 0.0
    loss: float = 0.0


def link_of(profile: LinkProfile) -> LinkFigures:
    """The link of a named profile, between two peers of it."""
    return LinkFigures(
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
    ``compute_s``: tensor work, 0.4 of it (measured) inside the round. ``limited_by``: what the transfer
    waits for: "upload", "download" or "loss"."""

    floor_s: float = 0.0
    transfer_s: float = 0.0
    latency_s: float = 0.0
    gather_s: float = 0.0
    spread_s: float = 0.0
    compute_s: float = 0.0
    limited_by: str = "upload"

    @property
    def slowest_member_s(self) -> float:
        """From the first offer to the commit: ``duration_s`` of a run's summary."""
        return self.spread_s + self.latency_s + self.transfer_s + 0.4 * self.compute_s

    @property
    def to_apply_s(self) -> float:
        """From the average member's send until the merge is ready."""
        return self.gather_s + self.latency_s + self.transfer_s + self.compute_s


def floor_s(payload_bytes: float, links: Sequence[LinkFigures]) -> float:
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


def round_time(payload_bytes: int, values: int, step_s: float, links: Sequence[LinkFigures]) -> RoundTime:
    """The round of a fragment of ``values`` values and ``payload_bytes`` encoded, among peers with these
    links (one each) and inner steps of ``step_s``."""
    from p2p_co2.protocol.rounds.parts import parts_each

    peers = len(links)
    compute_s = 4 * values / TENSOR_BYTES_PER_S
    if peers < 2:
        return RoundTime(compute_s=compute_s)
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
        compute_s=compute_s,
        floor_s=floor_s(payload_bytes, links),
        transfer_s=slices[0] + means[0],
        latency_s=(ONE_WAY_MESSAGES - is_pipelined) * round_trip_s / 2 + ramp_s,
        gather_s=step_s * (peers / (peers + 1) - 0.5),
        spread_s=step_s * (peers - 1) / (peers + 1),
        limited_by=max(slices, means)[2],
    )


def _phase(
    payload: float, share: float, link: LinkFigures, peers: int, control: float, which: int
) -> tuple[float, float, str]:
    """(seconds, bytes per second, what limits) of one peer in the slices' phase (0) or the means' (1)."""
    slices_out, slices_in, means_out, means_in = sent_and_received(payload, share, peers)
    out, into = ((slices_out, slices_in), (means_out, means_in))[which]
    most = math.inf
    if link.loss > 0 and link.round_trip_s > 0:  # per connection, and there is one to each other peer
        most = (peers - 1) * SEGMENT_BYTES * 1.22 / (link.round_trip_s * math.sqrt(link.loss))
    found = []
    for name, size, rate in (("upload", out, link.up_bytes_per_s), ("download", into, link.down_bytes_per_s)):
        usable = LINK_EFFICIENCY * rate
        limit = "loss" if most < usable else name
        usable = min(usable, most)
        found.append((LINK_OVERHEAD * (size + control) / usable, usable, limit))
    return max(found)


def _slow_start_s(size_bytes: float, bytes_per_s: float, round_trip_s: float) -> float:
    """What a connection that was idle loses until its window fills the link."""
    window = 10.0 * SEGMENT_BYTES
    sent = 0.0
    lost_s = 0.0
    while window < bytes_per_s * round_trip_s and sent + window < size_bytes:
        lost_s += round_trip_s - window / bytes_per_s
        sent += window
        window *= 2
    return lost_s


# ---- rounds after rounds


@dataclass(frozen=True, kw_only=True)
class Flow:
    """``to_apply_s``: mean from send until the merge is ready; ``slowest_s``: the longest. ``staleness``:
    mean number of the fragment's schedule points in between. ``sent_share``: sends made of those due.
    ``left_s``: seconds of transfers that are still open when a round is full and the run may end, on
    average."""

    to_apply_s: float
    slowest_s: float
    staleness: float
    sent_share: float
    left_s: float


def flow(times: Sequence[RoundTime], round_s: float) -> Flow:
    """All fragments' rounds (one ``RoundTime`` each), a schedule point per fragment and ``round_s``. A first
    quarter of the simulated time, in which the links fill, is not counted."""
    count = len(times)
    points = count * max(8, min(48, 4096 // count))
    counted_from = points / 4 * round_s / count
    last_at = (points - 1) * round_s / count
    half_at = free_at = 0.0  # half of the last transfer is over, and all of it
    sent_at = [0.0] * count
    ready_at = [0.0] * count
    moved: list[tuple[float, float]] = []
    delays: list[float] = []
    left: list[float] = []
    due = sent = 0
    for point in range(points):
        fragment = point % count
        due_at = point * round_s / count
        is_counted = due_at >= counted_from
        due += is_counted
        if fragment == 0 and is_counted:
            open_until = next((end_at for begun_at, end_at in reversed(moved) if begun_at <= due_at), 0.0)
            left.append(max(0.0, open_until - due_at))
        if sent_at[fragment] > due_at:
            continue  # it waits for its turn since its last point
        time = times[fragment]
        begun_at = sent_at[fragment] = max(due_at, half_at, ready_at[fragment])
        half_at = max(begun_at, free_at) + time.transfer_s / 2
        free_at = half_at + time.transfer_s / 2
        ready_at[fragment] = free_at + time.to_apply_s - time.transfer_s
        moved.append((begun_at, free_at))
        if counted_from <= begun_at <= last_at:
            sent += 1
            delays.append(ready_at[fragment] - begun_at)
    if not delays:  # not one round was over by then: all of them, one beside the other
        rest_s = max(time.to_apply_s - time.transfer_s for time in times)
        delays = [sum(time.transfer_s for time in times) + rest_s]
    return Flow(
        to_apply_s=math.fsum(delays) / len(delays),
        slowest_s=max(delays),
        staleness=sum(math.floor(delay / round_s) for delay in delays) / len(delays),
        sent_share=sent / due,
        left_s=math.fsum(left) / len(left),
    )
