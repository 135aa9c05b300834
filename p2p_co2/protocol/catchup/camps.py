"""Donors that promise the same bytes, and by which of them a download goes.

Laws: what most peers report goes before what most donors promise, and what others contradict is not gone by.
A download leaves what it began with only for a newer state that others vouch for, or, if nobody knows what
was begun, that more donors promise which have given something; and that should be all there much sooner than
its rest. It stays there only while that keeps coming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence

from p2p_co2.protocol.catchup.goals import STATE, Goal
from p2p_co2.protocol.catchup.line import all_there_in_s
from p2p_co2.protocol.catchup.manifest import Content
from p2p_co2.protocol.catchup.source import Source
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Manifest

Camp = list[Source]
Vouched = Callable[[PeerId, Manifest], bool | None]
"""What others say of a donor's promise; None if they say nothing."""
CHOOSE_FLOOR_S, CHOOSE_CAP_S = 0.2, 2.0
"""After the first manifest, the others are waited for: as long again as the first took, within these."""
LEFT_TIMES, LEFT_FLOOR_S = 2.0, 5.0
"""What is begun is left if its rest takes so many times as long as all of what is newer, and so long."""
LOST_MOST = 2
"""What something was left for may be lost less often than this."""
GONE: Content = b"gone"
"""No promise is this."""
KEEP_EVERY_S = 10.0
"""Who promises anything else is asked for it so often: it drops what nobody asks for."""


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


def able(camp: Camp, now: float) -> Camp:
    """Without those that were slow while others gave."""
    return [source for source in camp if source.line.slow_until <= now]


def sooner_elsewhere(
    ours: Camp, camps: Sequence[Camp], chunks: tuple[int, int], goal: Goal, vouched: Vouched, now: float
) -> tuple[Camp, float] | None:
    """The camp for which what was begun with ``ours`` is to be left, and in how long all of its should be
    there; None while any of ours that is asked has given nothing, for it may be quick. ``chunks``: what that
    lacks, and all of it. Of others that have given nothing, those for whom somebody vouches count as no
    quicker than ours, and the rest not at all."""
    missing, all_chunks = chunks
    begun, asked = promise_of(ours), [source.line for source in able(ours, now) or ours]
    if begun.what != STATE or not all(line.gap_s for line in asked):
        return None
    known, trusted, *_ = rank(ours, goal, vouched)
    best, best_s = None, (all_there_in_s(asked, missing, now) - LEFT_FLOOR_S) / LEFT_TIMES
    for camp in camps:
        is_sure = is_vouched(camp, vouched)
        if promise_of(camp).version > begun.version and (
            is_sure or (_gave(able(camp, now)) > len(ours) and not (known or trusted))
        ):
            like_ours_s = max(line.gap_s for line in asked) if is_sure else 0.0
            lines = [source.line for source in able(camp, now)]
            camp_s = all_there_in_s(lines, all_chunks, now, like_ours_s)
            if camp_s < best_s:
                best, best_s = camp, camp_s
    return None if best is None else (best, best_s)


def _gave(camp: Camp) -> int:
    """How many have given anything, of whatever; a silence that was waited out is nothing."""
    return sum(source.line.gap_s > 0 and source.line.gave_at > -math.inf for source in camp)


class Course:
    """By which promise a download goes, and when it goes by another.

    What was begun is left once, and who gave it stands by. What it is left for must keep coming: after
    ``LEFT_FLOOR_S`` and ``LEFT_TIMES`` the time in which all of it should be there, and again after as long,
    half of what was missing is there, or its rest takes at this pace half as long as all of what was left.
    And where it is lost it must be promised anew within ``CHOOSE_CAP_S``, or something as good, and that less
    than ``LOST_MOST`` times. If not, the download goes back, once, and stays as long as anybody promises
    that: what was left is put aside, not thrown away (``Begun``). Where nobody stands by any more it goes on,
    in the same way, to what others promise and bring sooner, and gives each twice as long as the one before;
    from what is surer only where nothing of that came.
    """

    def __init__(self, goal: Goal, all_chunks: int, vouched: Vouched) -> None:
        self.content: Content = b""
        self._goal, self._all_chunks, self._vouched = goal, all_chunks, vouched
        self.left: Content = b""
        """What was begun first and left for something else: empty if nothing was, ``GONE`` if it was lost."""
        self._is_back = False
        self._losses = 0
        self._decides_at: float | None = None
        self._looks_at, self._look_s = math.inf, 0.0
        self._missing = all_chunks
        """When it was looked last whether it keeps coming."""

    def heard(self, asked_at: float, now: float) -> None:
        """The first promise has come: the others are waited for."""
        if self._decides_at is None:
            self._decides_at = now + min(CHOOSE_CAP_S, max(CHOOSE_FLOOR_S, now - asked_at))

    def lost(self, sources: Collection[Source], now: float) -> None:
        """Nobody promises any more what was gone by."""
        self._losses += 1
        self._decides_at = now + CHOOSE_CAP_S if self._believed(sources) else None

    def decides_at(self, sources: Collection[Source]) -> float | None:
        """When ``choice`` waits for nobody any more; None while it has nothing to choose from."""
        return self._decides_at if self._believed(sources) else None

    def choice(self, sources: Collection[Source], gave: Container[PeerId], now: float) -> Camp | None:
        """What is to be loaded where nothing is; None while others are waited for. ``gave``: who has given
        something of what was."""
        camps = camps_of(self._believed(sources))
        yet_to_answer = (s for s in sources if s.manifest is None and (s.again_at is None or s.peer in gave))
        waits = self._decides_at is not None and now < self._decides_at and any(yet_to_answer)
        back = self._standing_by(camps)
        has_credit = back is not None and self._losses < LOST_MOST
        if (has_credit or self._is_back) and (same := [c for c in camps if c[0].content == self.content]):
            return same[0]
        if not camps or (waits and (has_credit or back is None)):
            return None
        if back is None:
            best = self._best(camps)
            if best[0].content != self.content:
                if self._is_back:  # what was gone back to is lost: as if it had never been begun
                    self._is_back, self.left, self._look_s = False, GONE, 2 * self._look_s
                self._looks_at = now + self._look_s
            return best
        chunks = self._all_chunks, self._all_chunks
        if has_credit and (found := sooner_elsewhere(back, camps, chunks, self._goal, self._vouched, now)):
            return self._goes(*found, now)
        self._is_back = True
        return back

    def elsewhere(self, sources: Collection[Source], missing: int, now: float) -> Camp | None:
        """What is to be loaded instead of what is, of which ``missing`` chunks are."""
        if self.left:
            return self._looks_back(sources, missing, now)
        promises = [source for source in sources if source.manifest is not None]
        ours = [source for source in promises if source.content == self.content]
        if len(ours) == len(promises):
            return None
        camps, chunks = camps_of(self._believed(promises)), (missing, self._all_chunks)
        found = sooner_elsewhere(ours, camps, chunks, self._goal, self._vouched, now)
        if found is None:
            return None
        self.left, self._losses = self.content, 0
        return self._goes(*found, now)

    def begun(self, missing: int) -> None:
        """What was chosen or gone to is begun: of it so many chunks are missing."""
        self._missing = missing

    def looks_at(self) -> float | None:
        """When it is seen whether what something was left for keeps coming."""
        return self._looks_at if self.left and not self._is_back else None

    def _goes(self, camp: Camp, all_s: float, now: float) -> Camp:
        self._look_s = LEFT_FLOOR_S + LEFT_TIMES * all_s
        self._looks_at = now + self._look_s
        return camp

    def _looks_back(self, sources: Collection[Source], missing: int, now: float) -> Camp | None:
        if self._is_back or now < self._looks_at:
            return None
        camps = camps_of(self._believed(sources))
        ours = [camp for camp in camps if camp[0].content == self.content]
        others = [camp for camp in camps if camp[0].content != self.content]
        came, half = self._missing - missing if ours else 0, self._missing / 2
        self._looks_at, self._missing = now + self._look_s, missing
        back = self._standing_by(others)
        if not others:
            return None
        best = back or max(others, key=lambda camp: (self._sureness(camp), -self._enough_s(camp, None, now)))
        if came and (missing <= half or missing * self._look_s / came <= self._enough_s(best, back, now)):
            return None
        if back is not None:
            self._is_back = True
        elif came and self._sureness(ours[0]) > self._sureness(best):
            return None
        else:
            self._look_s *= 2
            self._looks_at = now + self._look_s
        return best

    def _enough_s(self, best: Camp, back: Camp | None, now: float) -> float:
        """For ``best`` what is gone by is not left while its rest takes no longer than this, at the pace of
        late: for who stands by, as much sooner as it was left for; for others no later, and for those that
        have given nothing yet twice as long as it is looked for."""
        all_s = all_there_in_s([s.line for s in able(best, now) or best], self._all_chunks, now)
        if back is None:
            return all_s if all_s < math.inf else LEFT_TIMES * self._look_s
        return all_s / LEFT_TIMES if all_s < math.inf else 0.0

    def _sureness(self, camp: Camp) -> tuple[bool, bool]:
        """Whether others know what it promises, and whether they vouch for it."""
        return rank(camp, self._goal, self._vouched)[:2]

    def _best(self, camps: Iterable[Camp]) -> Camp:
        return max(camps, key=lambda camp: rank(camp, self._goal, self._vouched))

    def is_standing_by(self, source: Source) -> bool:
        """Whether it promises what was left, and is asked for none of it."""
        is_left = bool(self.left) and not self._is_back
        return is_left and source.manifest is not None and source.content == self.left

    def _standing_by(self, camps: Iterable[Camp]) -> Camp | None:
        """Who gave what was left, and promises it still."""
        return next((camp for camp in camps if self.is_standing_by(camp[0])), None)

    def _believed(self, sources: Collection[Source]) -> list[Source]:
        """Who promises what others have not contradicted since."""
        return [
            s for s in sources if s.manifest is not None and self._vouched(s.peer, s.manifest) is not False
        ]
