"""Donors that promise the same bytes, and by which of them a download goes.

Laws: what most peers report goes before what most donors promise. A download leaves what it has begun only
for a newer state that others vouch for, or, if nobody knows what was begun, that more donors promise which
have given something; and that is all there much sooner than its rest would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from p2p_co2.catchup.goals import STATE, Goal
from p2p_co2.catchup.line import all_there_in_s
from p2p_co2.catchup.source import Source
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Manifest

Camp = list[Source]
Vouched = Callable[[PeerId, Manifest], bool | None]
"""What others say of a donor's promise; None if they say nothing."""
LEFT_TIMES, LEFT_FLOOR_S = 2.0, 5.0
"""What is begun is left if its rest takes so many times as long as all of what is newer, and so long."""


def camps_of(sources: Iterable[Source]) -> list[Camp]:
    """Those that have promised anything, by what it is; in the order in which they did."""
    camps: dict[bytes, Camp] = {}
    for source in sources:
        if source.manifest is not None:
            camps.setdefault(source.content, []).append(source)
    return list(camps.values())


def promise_of(camp: Camp) -> Manifest:
    """Of any of them: all but who signed it is the same."""
    manifest = camp[0].manifest
    assert manifest is not None
    return manifest


def rank(camp: Camp, goal: Goal, vouched: Vouched) -> tuple[bool, bool, int, int]:
    """The highest is to be loaded: the newest of what others know, but of what nobody else knows the oldest:
    it is easy to promise a version that nobody has reached."""
    promise = promise_of(camp)
    known = (promise.version, promise.digest) == (goal.version, goal.digest)
    trusted = is_vouched(camp, vouched)
    return known, trusted, len(camp), promise.version if known or trusted else -promise.version


def is_vouched(camp: Camp, vouched: Vouched) -> bool:
    """Whether others say of a promise of theirs that it is right."""
    return any(source.manifest is not None and vouched(source.peer, source.manifest) for source in camp)


def rivals_of(camp: Camp, camps: Iterable[Camp], goal: Goal, vouched: Vouched) -> list[PeerId]:
    """Who promises another state of the same version, where it is one word against another."""
    promise, (known, trusted, count, _) = promise_of(camp), rank(camp, goal, vouched)
    others = (other for other in camps if other[0].content != camp[0].content)
    rivals = [s.peer for other in others if promise_of(other).version == promise.version for s in other]
    is_dispute = promise.what == STATE and not (known or trusted) and count <= len(rivals)
    return rivals if is_dispute else []


def sooner_elsewhere(
    ours: Camp, camps: Sequence[Camp], chunks: tuple[int, int], goal: Goal, vouched: Vouched, now: float
) -> Camp | None:
    """The camp for which what was begun with ``ours`` is to be left; None while any of ours has given
    nothing, for it may be quick. ``chunks``: what that lacks, and all of it. Of others that have given
    nothing, those for whom somebody vouches count as no quicker than ours, and the rest not at all."""
    missing, all_chunks = chunks
    begun, lines, like_ours_s = promise_of(ours), [source.line for source in ours], 0.0
    if begun.what == STATE and all(line.gap_s for line in lines):
        like_ours_s = max(line.gap_s for line in lines)
    if not like_ours_s:
        return None
    known, trusted, *_ = rank(ours, goal, vouched)
    best, best_s = None, (all_there_in_s(lines, missing, now) - LEFT_FLOOR_S) / LEFT_TIMES
    for camp in camps:
        is_sure = is_vouched(camp, vouched)
        if promise_of(camp).version > begun.version and (
            is_sure or (sum(s.line.gap_s > 0 for s in camp) > len(ours) and not (known or trusted))
        ):
            default_s = like_ours_s if is_sure else 0.0
            camp_s = all_there_in_s([source.line for source in camp], all_chunks, now, default_s)
            if camp_s < best_s:
                best, best_s = camp, camp_s
    return best
