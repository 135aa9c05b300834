"""How long things may take in this very run: an offer, the end of a run, to go over to another history.

An offer waits for the attempt before it to be given up, then asks for its round until ``READY_CAP_S`` at
most, or as long as a round lasts that it is late for. Then it is in an attempt: one wait for each owner that
a part may have, and one for all to give up. Then its means may still be coming (``Completing``). All but the
asking follow from how long owners wait for slices, and that from payload and lines, as in
``rounds.deadline``; the longest that past rounds could make of it counts.

A run ends once the last peer that starts has joined, trained for all rounds (as a peer does that is alone and
has lost its disk, by the slowest clock) and flushed: all of that is bounded by the peer itself, on any line.

Law: faults of others (who stall, go, or are cut off) are what these waits end; only the time for which the
peer itself stood still comes on top. Price: a bound is no forecast, most offers wait for a tenth of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import product

from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.rounds import PayloadShape, bounds
from p2p_co2.protocol.rounds.deadline import SAFETY
from p2p_co2.protocol.schedule import FLUSH_CAP_S, LOADS_CAP_S, SLEW, settle_bound_s
from p2p_co2.simnet.internet import way_between
from p2p_co2.simnet.training import CATCH_UP_BOUND_S, GATHER_BOUND_S

TIMES_SENT = 2.0
"""A member sends its slices and the means of its own part: with equal parts, two payloads."""
SPARE_S = 60.0
"""To reach a seed, for the step that is under way when the last round is over, and to hang up."""


def offer_bound_s(shape: PayloadShape, scale: float, lines: Iterable[LinkProfile]) -> float:
    """Seconds. ``scale``: real bytes of bulk for each simulated one."""
    slowest = _slowest(set(lines))
    blocks = max(shape.blocks)
    parts_s = _patience_s(blocks * shape.block_bytes * scale / slowest, shape.parts_cap_s)
    wait_s = 2 * parts_s + 2 * bounds.GRACE_S
    attempt_s = min(shape.round_cap_s, (2 + bounds.MAX_GENERATION) * wait_s)
    complete_s = min(shape.round_cap_s, max(bounds.COMPLETE_FLOOR_S, bounds.COMPLETE_DEADLINES * parts_s))
    late_s = left_s = min(shape.round_cap_s, wait_s)
    return left_s + bounds.READY_CAP_S + late_s + attempt_s + complete_s


def run_bound_s(last_start_at: float, planned_s: float, step_s: float, fragments: int) -> float:
    """When a run of ``planned_s`` is over for everybody, the last of whom starts at ``last_start_at`` and has
    ``fragments`` states to load. ``step_s``: of the slowest peer."""
    joined_s = last_start_at + GATHER_BOUND_S + CATCH_UP_BOUND_S * (1 + fragments)
    ended_s = FLUSH_CAP_S + settle_bound_s(FLUSH_CAP_S) + LOADS_CAP_S
    return joined_s + planned_s / (1 - SLEW) + step_s + ended_s + SPARE_S


def loading_s(state_bytes: Iterable[int], scale: float, lines: Sequence[LinkProfile]) -> float:
    """Seconds that all fragments' states take to who has the worst ways: going over to them is loading them.
    Most others hold them, so one of those that do is on its median way or a better one."""
    size_bytes = sum(state_bytes) * scale
    return max((loading_by_s(size_bytes, to, lines) for to in set(lines)), default=0.0)


def loading_by_s(size_bytes: float, to: LinkProfile, lines: Sequence[LinkProfile]) -> float:
    """The same for one whose own line is ``to``."""
    return size_bytes / _median_bytes_per_s(to, Counter(lines) - Counter([to])) if len(lines) > 1 else 0.0


def _median_bytes_per_s(receiver: LinkProfile, senders: Counter[LinkProfile]) -> float:
    """What the median of the ways from ``senders`` carries; where luck decides on a relay, there is one."""
    rates = sorted(
        way_between(sender, receiver, "open" not in (sender.nat, receiver.nat)).bytes_per_s
        for sender in senders.elements()
    )
    return rates[(len(rates) - 1) // 2] if rates else 0.0


def _slowest(lines: Collection[LinkProfile]) -> float:
    """Bytes per second: of one way alone, which is all that an upload may have shown that it can do."""
    pairs = product(lines, lines)
    return min(way_between(*pair, "open" not in (pair[0].nat, pair[1].nat)).bytes_per_s for pair in pairs)


def _patience_s(payload_s: float, cap_s: float) -> float:
    """The most that ``parts_deadline_s`` makes of a payload that takes ``payload_s`` once."""
    return min(cap_s, SAFETY * max(bounds.PARTS_FLOOR_S, SAFETY * TIMES_SENT * payload_s))
