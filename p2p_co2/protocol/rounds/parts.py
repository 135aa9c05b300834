"""How a round's work is divided: which member averages which blocks, and who sends its slices for them.

The shortest round fills the members' lines like vessels; slower ones average nothing. A member whose own
payload would take too long is asked for a part of it, another part each round. An owner's share is cut into
several parts, each averaged and sent back as soon as its slices are there.
``docs/design/offers-and-certificates.md`` has the formula.

Laws: the parts are the whole, every block is in exactly one part, in order. Every owner sends all its slices.
Nobody owns more than ``MOST_OWNED`` equal shares, to a block, whatever line it claims (``check_owned``). Over
the rounds a slow member's parts go through the whole fragment, evenly but at random. Unknown rates count as
the mean of the known ones, a boast as ``FASTEST_SHARE`` times the median, at most as ``FASTEST_BYTES_PER_S``.
One member's word of its link makes the others wait for such a link at most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds.bounds import ASSUMED_UPLOAD_BYTES_PER_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_MEMBERS, MAX_PIECE_BYTES

MOST_OWNED = 2.0
"""What one member averages of a fragment, in shares of equal size: one that lies about a mean spoils no more.
So no owner holds more than twice a payload of slices, either."""
FASTEST_SHARE = 16.0
FASTEST_BYTES_PER_S = 25e6
"""Faster lines count as this. Beyond it a measurement says how busy the processors were: of four equal peers
on one machine 30 MB/s and 3 GB/s were measured."""
ALIKE = 1.25
"""Rates that differ from the median by less than this count as it: so far apart are measurements of equal
links."""
PATIENCE = 1.5
"""A round may take this many times as long as the fast members alone would need."""
PIPELINED_PARTS = 32
"""Parts of a round, all owners' together: a group of 32 or more has one for each owner."""
PIPELINED_BYTES = 64 << 10
"""A share is not cut for the pipeline into parts smaller than this."""
PIPELINED_S = 0.008
"""Nor into parts that most lines carry in less time, up to the largest message: a message costs as much."""
FINEST_BYTES = 16 << 10
"""A share is not cut for a slow member into parts smaller than this."""
_NEARLY = 0.1
"""Shares are whole blocks: one that is this much of a part short of another part gets it."""


class BlockRange(NamedTuple):
    """Blocks ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int


class LineRates(NamedTuple):
    """What a member says of its link, bytes per second; 0: an upload not measured yet, a download without
    cap."""

    upload: float
    download: float = 0.0
    owning: float = 1.0
    """Of the upload, what is believed where it averages for others (``repute``)."""


@dataclass(frozen=True)
class Division:
    """Part ``i`` is ``ranges[i]``, averaged by ``owners[i]``, from the slices of ``senders[i]`` (the owner is
    among them). ``transfer_s``: how long the slowest link needs for what others wait for: slices and
    averaging."""

    ranges: tuple[BlockRange, ...]
    owners: tuple[PeerId, ...]
    senders: tuple[frozenset[PeerId], ...]
    transfer_s: float


def divide(
    blocks: int, block_bytes: int, rates: dict[PeerId, LineRates], place: tuple[int, int], cheap_s: float,
    own_upload: float = 0.0, assumed: float = ASSUMED_UPLOAD_BYTES_PER_S,
) -> Division:  # fmt: skip
    """Divide a round at ``place`` (fragment, round) among the members of ``rates``. ``cheap_s``: a round of
    this length costs nobody anything. ``own_upload``: what who divides has measured of itself, 0 if
    nothing; ``assumed``: what an unknown line carries where nobody's is known; bytes per second."""
    members = sorted(rates)
    payload_bytes = blocks * block_bytes
    credible = _credible([rates[peer].upload for peer in members], own_upload, assumed)
    uploads = [rate / payload_bytes for rate in credible]
    links = [_link(rates[peer], upload, payload_bytes) for peer, upload in zip(members, uploads, strict=True)]
    if MOST_OWNED * sum(link > 0 for link in links) < len(links):
        links = (
            uploads  # too few may own: a round with owners that are not believed is checked by its members
        )
    time_s = max(PATIENCE * _shortest_s(links), cheap_s)
    shares = _shares(links, time_s)
    budgets = {
        peer: upload * time_s for peer, upload in zip(members, uploads, strict=True) if upload * time_s < 1
    }
    shares = _capped(shares, MOST_OWNED / len(members))
    finest = blocks * min(budgets.values(), default=2.0) / 2
    pipelined = _pipelined_bytes(payload_bytes, len(members), [rate.upload for rate in rates.values()])
    ranges, owners = _cut(blocks, members, shares, finest, block_bytes, pipelined)
    asked = {peer: _asked(peer, ranges, budget * blocks, place) for peer, budget in budgets.items()}
    senders = tuple(
        frozenset(peer for peer in members if peer not in asked or part in asked[peer])
        for part in range(len(ranges))
    )
    others = len(members) - 2
    # Who only receives the means may take its time over them: nobody waits, so a cap says nothing here.
    needed = [
        (1 + others * share) / link if share else 1 / upload
        for share, link, upload in zip(shares, links, uploads, strict=True)
        if upload * time_s >= 1
    ]
    return Division(ranges, owners, senders, max([*needed, time_s if budgets else 0.0]))


def _link(rates: LineRates, upload: float, payload_bytes: int) -> float:
    """Payloads per second that an owner takes in and gives out."""
    believed = upload * rates.owning
    return min(believed, max(1.0, rates.download) / payload_bytes) if rates.download > 0 else believed


def split_blocks(blocks: int, uploads_bytes_per_s: Sequence[float]) -> tuple[BlockRange, ...]:
    """One range per member, in the members' order, by upload rates alone; empty where a member is too slow or
    there are too few blocks."""
    rates = _credible(uploads_bytes_per_s)
    return _edges(blocks, _capped(_shares(rates, PATIENCE * _shortest_s(rates)), MOST_OWNED / len(rates)))


def parts_each(payload_bytes: float, members: int, uploads_bytes_per_s: Sequence[float] = ()) -> int:
    """In how many parts each of ``members`` equal ones averages its share."""
    size_bytes = _pipelined_bytes(payload_bytes, members, uploads_bytes_per_s)
    return max(1, int(payload_bytes / members / size_bytes + _NEARLY))


def _pipelined_bytes(payload_bytes: float, members: int, uploads_bytes_per_s: Sequence[float]) -> float:
    """How large the parts are that a pipeline wants. Unknown rates (0) are counted: few boasts make no parts
    coarser."""
    most = min(PIPELINED_PARTS, max(1, MAX_MEMBERS - members))
    typical = median_low(uploads_bytes_per_s or [0.0])
    return max(PIPELINED_BYTES, payload_bytes / most, min(MAX_PIECE_BYTES, PIPELINED_S * typical))


def covers(ranges: Sequence[BlockRange], blocks: int) -> bool:
    """Whether non-empty ranges cover ``blocks`` blocks, in order, each exactly once."""
    reached = 0
    for start, stop in ranges:
        if start != reached or stop <= start:
            return False
        reached = stop
    return reached == blocks


def check_owned(ranges: Sequence[BlockRange], owners: Sequence[PeerId], members: int) -> None:
    """Raise ``RemoteProtocolError`` if a BEGIN gives one of so many ``members`` more than it may own."""
    owned: dict[PeerId, int] = {}
    for owner, (start, stop) in zip(owners, ranges, strict=True):
        owned[owner] = owned.get(owner, 0) + stop - start
    if max(owned.values()) > MOST_OWNED * ranges[-1].stop / members + 1:
        raise RemoteProtocolError(
            Offence.WRONG_OWNER, f"one owns {max(owned.values())} of {ranges[-1].stop} blocks"
        )


def _credible(
    uploads_bytes_per_s: Sequence[float], own: float = 0.0, assumed: float = ASSUMED_UPLOAD_BYTES_PER_S
) -> list[float]:
    """Rates above 0: boasts cut down, unknown ones like the mean of the others, those near the median as it.
    The median that a boast is measured by counts unknown rates as home links: one peer's word alone sets
    none. Of two nobody boasts with what who divides has measured of its ``own`` line."""
    rates = [min(max(rate, 1.0), FASTEST_BYTES_PER_S) if rate > 0 else 0.0 for rate in uploads_bytes_per_s]
    middle = median_low([rate or assumed for rate in rates])
    ceiling = max(FASTEST_SHARE * middle, own if len(rates) == 2 else 0.0)
    known = [min(rate, ceiling) for rate in rates if rate > 0]
    typical = sum(known) / len(known) if known else assumed
    credible = [min(rate, ceiling) or typical for rate in rates]
    middle = median(credible)
    return [middle if middle / ALIKE <= rate <= middle * ALIKE else rate for rate in credible]


def _shortest_s(rates: Sequence[float]) -> float:
    """The shortest round in which the fastest members average everything, each after its own payload."""
    fastest = sorted(rates, reverse=True)
    others = len(rates) - 2
    if others <= 0:
        return 1 / fastest[0]
    most = MOST_OWNED / len(rates)
    for full in range(len(rates)):  # so many own the most that they may
        left = 1 - most * full
        total = 0.0
        time_s = 0.0
        if left <= 0:
            return (1 + others * most) / fastest[full - 1]
        for count, rate in enumerate(fastest[full:], 1):
            if count > 1 and rate * time_s <= 1:
                break
            total += rate
            time_s = (others * left + count) / total
        if fastest[full] * time_s - 1 <= others * most:
            return time_s
    raise AssertionError("equal shares are less than the most")


def _shares(rates: Sequence[float], time_s: float) -> list[float]:
    """Of the averaging, in proportion to what each link has left after its own payload."""
    left = [max(0.0, rate * time_s - 1) for rate in rates]
    total = sum(left)
    return [one / total for one in left]


def _capped(shares: Sequence[float], most: float) -> list[float]:
    """The same with none above ``most``, the rest in proportion to the others, as far as there are others."""
    capped = list(shares)
    while True:
        over = [index for index, share in enumerate(capped) if share > most]
        takers = [index for index, share in enumerate(capped) if 0 < share < most]
        if not over or not takers:
            return capped
        excess = sum(capped[index] for index in over) - most * len(over)
        for index in over:
            capped[index] = most
        total = sum(capped[index] for index in takers)
        for index in takers:
            capped[index] *= 1 + excess / total


def _edges(blocks: int, shares: Sequence[float]) -> tuple[BlockRange, ...]:
    edges = [0]
    reached = 0.0
    for share in shares:
        reached += share
        edges.append(min(blocks, round(blocks * reached)))
    last = max(index for index, share in enumerate(shares) if share > 0)
    edges[last + 1 :] = [blocks] * (len(shares) - last)
    return tuple(BlockRange(start, stop) for start, stop in pairwise(edges))


def _cut(
    blocks: int,
    members: Sequence[PeerId],
    shares: Sequence[float],
    finest: float,
    block_bytes: int,
    pipelined_bytes: float,
) -> tuple[tuple[BlockRange, ...], tuple[PeerId, ...]]:
    """Ranges and their owners, in blocks. No part is larger than ``finest`` where ``MAX_MEMBERS`` and
    ``FINEST_BYTES`` allow it; a share has as many parts of ``pipelined_bytes`` as there are."""
    whole = [
        (owner, part)
        for owner, part in zip(members, _edges(blocks, shares), strict=True)
        if part.stop > part.start
    ]
    most = max(1, MAX_MEMBERS - len(whole))
    size = max(1.0, finest, blocks / most)
    pipelined = max(1.0, pipelined_bytes / block_bytes)
    ranges: list[BlockRange] = []
    owners: list[PeerId] = []
    for owner, (start, stop) in whole:
        needed = math.ceil((stop - start) / size) if finest < blocks else 1
        needed = min(needed, max(1, (stop - start) * block_bytes // FINEST_BYTES))
        count = max(needed, int((stop - start) / pipelined + _NEARLY))
        for number in range(count):
            first, last = (start + (stop - start) * (number + turn) // count for turn in (0, 1))
            ranges.append(BlockRange(first, last))
            owners.append(owner)
    return tuple(ranges), tuple(owners)


def _asked(
    peer: PeerId, ranges: Sequence[BlockRange], budget_blocks: float, place: tuple[int, int]
) -> set[int]:
    """The parts that a slow member sends its slices for: as many as fit, from another place each round. If
    not even one fits, one now and then."""
    fragment, round_ = place
    digest = hashlib.sha256(f"{peer}/{fragment}/{round_}".encode()).digest()
    first = int.from_bytes(digest[:8]) % len(ranges)
    dice = int.from_bytes(digest[8:16]) / 2**64
    asked: set[int] = set()
    left = budget_blocks
    for index in [*range(first, len(ranges)), *range(first)]:
        size = ranges[index].stop - ranges[index].start
        if size > left:
            break
        asked.add(index)
        left -= size
    if not asked and dice < budget_blocks / (ranges[first].stop - ranges[first].start):
        asked.add(first)
    return asked
