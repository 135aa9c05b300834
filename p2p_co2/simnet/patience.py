"""How long an honest peer's offer may be open: the sum of its machines' own longest waits in this very run.

An offer asks for its round until ``READY_CAP_S`` at most. Then it is in an attempt under up to ``MAX_TERMS``
coordinators, each of whom may wait once for everybody and once more for a part that was given away. Then its
means may still be coming (``Completing``). All but the first follow from how long owners wait for slices, and
that from payload and lines, as in ``rounds.deadline``; the longest that past rounds could make of it counts.

Law: faults of others (who stall, go, or are cut off) are what these waits end; only the time for which the
peer itself stood still comes on top. Price: a bound is no forecast, most offers wait for a tenth of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2p_co2.profiles import LinkProfile
from p2p_co2.rounds import PayloadShape, bounds
from p2p_co2.rounds.deadline import SAFETY
from p2p_co2.rounds.member import COUNCIL_GRACE_S

TIMES_SENT = 2.0
"""A member sends its slices and the means of its own part: with equal parts, two payloads."""
WAITS_OF_A_TERM = 2.0
"""For all parts, and again for one that was given away."""


def offer_bound_s(shape: PayloadShape, scale: float, lines: Iterable[LinkProfile]) -> float:
    """Seconds. ``scale``: real bytes of bulk for each simulated one."""
    slowest = _slowest(lines)
    blocks = max(shape.blocks)
    parts_s = _patience_s(blocks * shape.block_bytes * scale / slowest, shape.parts_cap_s)
    sums_s = grace_s = 0.0
    if shape.sum_block_bytes:
        sums_s = _patience_s(blocks * shape.sum_block_bytes * scale / slowest, shape.parts_cap_s)
        grace_s = COUNCIL_GRACE_S
    term_s = 2 * (parts_s + sums_s) + 2 * bounds.GRACE_S + grace_s
    attempt_s = min(shape.round_cap_s, bounds.MAX_TERMS * WAITS_OF_A_TERM * term_s)
    complete_s = min(shape.round_cap_s, max(bounds.COMPLETE_FLOOR_S, bounds.COMPLETE_DEADLINES * parts_s))
    return bounds.READY_CAP_S + attempt_s + complete_s


def loading_s(state_bytes: Iterable[int], scale: float, lines: Iterable[LinkProfile]) -> float:
    """Seconds that all fragments' states take over the slowest line: who is to go over to them loads them."""
    return sum(state_bytes) * scale / _slowest(lines)


def _slowest(lines: Iterable[LinkProfile]) -> float:
    """Bytes per second."""
    return min(min(line.up_bits_per_s, line.down_bits_per_s) / 8 for line in lines)


def _patience_s(payload_s: float, cap_s: float) -> float:
    """The most that ``parts_deadline_s`` makes of a payload that takes ``payload_s`` once."""
    return min(cap_s, SAFETY * max(bounds.PARTS_FLOOR_S, SAFETY * TIMES_SENT * payload_s))
