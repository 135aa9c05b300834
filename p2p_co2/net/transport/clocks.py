"""Whether this machine's clock is near enough to the others': ``doctor`` tells it, and who joins is refused.

Records in the DHT live for 60 s of everybody's clock, and hellos are taken within 120 s. A machine whose
clock is further off finds nobody and is found by nobody: both sides would train alone to the end.

Law: the median of several answers counts, so of three seeds one liar moves nothing; where they disagree
nobody knows who is right, and nobody is refused.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.hivemind_quiet import P2P
from p2p_co2.net.transport.probing import open_prober
from p2p_co2.protocol.wire.identity import PeerId

CLOCK_OK_S, CLOCK_CANNOT_S = 5.0, 45.0
ASKED_WITHIN_S = 5.0
"""Bound on all questions: they are asked side by side."""


class ClockJudged(NamedTuple):
    """``measured`` and ``advice`` in words; the second is empty if all is well."""

    state: Literal["ok", "limited", "cannot", "unknown"]
    measured: str
    advice: str = ""


def judge_clock(offsets_s: Sequence[float]) -> ClockJudged:
    """``offsets_s``: the others' clocks minus ours. One liar among three moves no median; of two that
    disagree nobody knows who is right, and neither does a peer that nobody answers."""
    if not offsets_s:
        advice = f"from {CLOCK_CANNOT_S:.0f} s off on the others do not hear this peer; look at it: date -u"
        return ClockJudged("unknown", "nobody answered what time it is", advice)
    middle = statistics.median(offsets_s)
    others = f"{len(offsets_s)} other{'s' * (len(offsets_s) > 1)}"
    words = f"{-middle:+.2f} s against {others}"
    near = sum(abs(offset - middle) <= CLOCK_OK_S for offset in offsets_s)
    if 2 * near <= len(offsets_s):
        spread = max(offsets_s) - min(offsets_s)
        advice = "somebody's clock is wrong; look at this machine's: date -u"
        return ClockJudged("unknown", f"{others} differ by {spread:.0f} s", advice)
    fix = "set it by the network: timedatectl set-ntp true"
    if abs(middle) > CLOCK_CANNOT_S:
        return ClockJudged("cannot", words, f"the others do not list or hear this peer; {fix}")
    if abs(middle) > CLOCK_OK_S:
        advice = f"from {CLOCK_CANNOT_S:.0f} s on the others do not hear this peer; {fix}"
        return ClockJudged("limited", words, advice)
    return ClockJudged("ok", words)


async def clock_offsets_s(p2p: P2P, run: bytes, contacts: Mapping[PeerId, Sequence[str]]) -> list[float]:
    """The clocks of those ``contacts`` (addresses by peer) that answer, minus ours. ``run``: its digest."""

    async def ask(peer: PeerId, maddrs: Sequence[str]) -> float | None:
        try:
            async with (
                asyncio.timeout(ASKED_WITHIN_S),
                open_prober(p2p, peer, maddrs, run, ASKED_WITHIN_S) as prober,
            ):
                return (await prober.look()).offset_s
        except (TransportError, TimeoutError):
            return None  # it is away, or serves no probes

    answers = await asyncio.gather(*(ask(peer, maddrs) for peer, maddrs in contacts.items()))
    return [answer for answer in answers if answer is not None]
