"""What strangers can make this machine hold, and how long anything may last. Each bound has its name here.

Law: no list, buffer or wait in ``rounds`` grows with what a peer sends beyond one of these.
"""

from __future__ import annotations

DIGEST_BYTES = 32
ATTEMPT_BYTES = 16

EARLY_FLOOR_BYTES = 8 << 20
"""Pieces that overtook what explains them are held up to this, or one payload if that
is more."""
EARLY_MESSAGES = 4096
KEEP_DECISIONS = 8
"""Commits kept per fragment, to answer ASK_OUTCOME and a late READY or RESULT."""
KEEP_ATTEMPTS = 64
"""Attempts that ended, remembered so that their stragglers are ignored and not counted against anybody."""
MAX_OWNED_PAYLOADS = 16.0
"""Slices that one owner holds at most, also of parts whose owners were lost, in payloads."""
MAX_GENERATION = 3
"""Heirs of one part, one after the other."""
OFFER_ID_BYTES = 8
MAX_ASKED = 4
"""Coordinators asked for one round before the offer is given up."""
AHEAD_AT_MOST = 4
"""Versions that one peer may be ahead of what the last heartbeats of most peers said."""
MAX_WEIGHT = 1e15
MAX_NAMED = 5
"""Peers that a reason names; the rest is counted."""

GATHER_DEFAULT_S = 10.0
"""From the first READY to BEGIN, before anything was measured."""
GATHER_FLOOR_S = 0.3
"""The same at the least."""
GATHER_CAP_S = 30.0
"""The same at the most. Nothing else is waited for by default for longer than that, either."""
RECEIPT_FLOOR_S = 1.0
"""From READY to its receipt, at the least."""
RECEIPT_CAP_S = 10.0
"""The same at the most."""
PARTS_FLOOR_S = 2.0
"""From BEGIN to the end of an owner's wait for slices, at the least."""
PARTS_CAP_S = 300.0
"""The same at the most, or ``parts_cap_s`` where rounds are longer."""
CHEAP_S = 0.25
"""A round that takes no longer than this is short enough for everybody."""
CHEAP_SHARE = 1 / 8
"""So is one that takes no more than this share of the time between two rounds of a fragment."""
GATHER_SHARE = 1 / 4
"""Of the time between two rounds of a fragment, what READYs are waited for at most."""
GATHER_SHARE_BY_STEPS = 3 / 4
"""The same where rounds count inner steps: peers have no common clock there, and their points lie further
apart."""
ASSUMED_UPLOAD_BYTES_PER_S = 1e6
"""A home link, where nobody has measured one yet."""
GRACE_S = 2.0
"""What the network may add to a time that another peer promised."""
READY_CAP_S = 150.0
"""An offer that has not begun by then is given up, whatever the coordinators promise. One that hears a round
that it is late for waits until that must be decided."""
ROUND_CAP_S = 1800.0
"""An attempt that is not decided by then is given up, or by ``round_cap_s`` where rounds are longer."""


def parts_cap_s(round_s: float) -> float:
    """How long owners may wait for slices at most in a run with rounds of ``round_s`` (0: unknown). As long
    as a round, where that is more than ``PARTS_CAP_S``: an exchange that takes two rounds' time makes answers
    staler, and still commits."""
    return max(PARTS_CAP_S, round_s)


def round_cap_s(round_s: float) -> float:
    """The same for a whole attempt, in the same proportion."""
    return ROUND_CAP_S / PARTS_CAP_S * parts_cap_s(round_s)
