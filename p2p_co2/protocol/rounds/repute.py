"""What a peer remembers of the others: coordinators whose rounds came to nothing, owners that were late or
lied, and whose work goes against its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from math import inf
from statistics import median_low

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.events import Distrusted, Likeness
from p2p_co2.scores import KNOWN_AFTER, Scores
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS

FIRST_S = 60.0
"""How long a coordinator is passed over at first."""
LONGEST_S = 3600.0
"""The same at the most."""
LATE_TIMES = 2.0
"""Times as long as the middle one of the owners: links differ, and slices reach one owner sooner."""
AVERAGING = -1
"""In place of a fragment: that it averages."""
HARDEST = 1 / 4
"""What one round may leave of an owner's claim."""
LEAST = 1 / 64
"""What all rounds may leave of it."""
LOW, LOW_BY_MEANS = 1 / 4, 1 / 2
"""Of a standing. Means are of the same slices nearly, so they differ by less than slices do."""
WORK, MEANS = "its work went against ours", "there was little of our work in its means"
FORGIVING = 1.1
"""For each round without being late."""


def truth_of(likeness: Likeness) -> float:
    """How much of a mean seems to be of the slices: its cosine where it is as long as that; the less, the
    longer or shorter it is; below 0 if it points away."""
    cosine, length = likeness.cosine, likeness.length
    return min(length, cosine**2 / length) if min(cosine, length) > 0 else cosine


class Repute:
    """Coordinators whose rounds came to nothing: they are asked last for a while.

    A coordinator can only fail to form a group; what is committed is proved by its members. So one number for
    each peer is enough. After the second time in a row it is passed over for ``FIRST_S``. That doubles each
    time, until a round of its own is committed. Each fragment counts for itself: a liar about one may
    serve the others well. Price: an honest coordinator with a bad line is passed over, too.
    """

    def __init__(self) -> None:
        self.emit: Callable[[Distrusted], None] = lambda news: None
        """Hears when somebody is asked last from now on, and why."""
        self._failed: OrderedDict[tuple[PeerId, int], tuple[int, float]] = OrderedDict()
        """By (peer, fragment): times, until when."""
        self._means = Scores()
        """Of owners, by their means."""
        self._low: dict[tuple[PeerId, str], int] = {}
        """Who stands low, and by what: how many times in a row."""

    def failed(self, peer: PeerId, fragment: int, why: str, now: float) -> None:
        times, until = self._failed.pop((peer, fragment), (0, now))
        if now < until:
            self._failed[peer, fragment] = times, until
            return
        lasts_s = min(LONGEST_S, FIRST_S * 2 ** min(times - 1, 10)) if times else 0.0
        self._keep((peer, fragment), times + 1, now + lasts_s)
        if lasts_s:
            self.emit(Distrusted(peer, f"asked last to coordinate, since {why}", lasts_s))

    def _keep(self, key: tuple[PeerId, int], times: int, until: float) -> None:
        self._failed[key] = times, until
        if len(self._failed) > MAX_PEERS:
            self._failed.popitem(last=False)

    def committed(self, peer: PeerId, fragment: int) -> None:
        """A round that it coordinated was committed."""
        self._failed.pop((peer, fragment), None)

    def lied(self, owner: PeerId, how: str = "") -> bool:
        """Its means are not what was sent: in this run it averages no more where this peer divides, and is
        asked last to coordinate. Whether that is new; ``how`` is told then."""
        is_new = not self.has_lied(owner)
        self._keep((owner, AVERAGING), 1, inf)
        if is_new and how:
            self.emit(Distrusted(owner, f"asked last, and averages no more in this run, since {how}", 0.0))
        return is_new

    def has_lied(self, owner: PeerId) -> bool:
        return (owner, AVERAGING) in self._failed

    def scored(self, standing: Mapping[PeerId, float]) -> None:
        """The standing of peers by their slices, which this peer has just averaged (``scores``)."""
        for peer, one in standing.items():
            self._stands(peer, WORK, is_low=one < LOW)

    def looked_at(self, owner: PeerId, likeness: Likeness) -> None:
        """What a mean of ``owner`` was like beside our slice.

        Law: a mean m of equal slices s has <s, m> = <m, m> on average, so it is as long as its cosine says. A
        longer one holds what nobody sent, and a shorter one lacks some of what all did.
        """
        self._means.tell(owner, truth_of(likeness))
        self._stands(owner, MEANS, is_low=self._means.standing()[owner] < LOW_BY_MEANS)

    def _stands(self, peer: PeerId, by: str, *, is_low: bool) -> None:
        times = self._low.pop((peer, by), 0) + 1
        if is_low:
            self._low[peer, by] = times
            if times == KNOWN_AFTER:
                why = f"asked last, and averages nothing here, since {by} {times} times"
                self.emit(Distrusted(peer, why, 0.0))
            if len(self._low) > MAX_PEERS:
                del self._low[next(iter(self._low))]

    def is_doubted(self, peer: PeerId) -> bool:
        """Whether it shall not average: it has lied, or stands low. The latter changes as more is seen."""
        return (peer, WORK) in self._low or (peer, MEANS) in self._low or self.has_lied(peer)

    def is_passed_over(self, peer: PeerId, fragment: int, now: float) -> bool:
        return self.is_doubted(peer) or now < self._failed.get((peer, fragment), (0, now))[1]

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {"MAX_REMEMBERED": (len(self._failed), MAX_PEERS)}


class Lateness:
    """What is believed of each peer's claim to be a fast owner, from 1 (all of it) down to ``LEAST``.

    A round is divided so that all owners are done at about the same time (``parts``). Every member measures
    each owner from BEGIN to its last mean, and when it coordinates it gives a late one a smaller share. Laws:
    only shares of the averaging follow from this, never whose slices count. Time is compared with the other
    owners' of the same round, so a slow swarm blames nobody. Where there is no other owner, the deadline for
    slices is the measure. Price: a late owner is tried again in the end, and costs a late round then, one in
    about fifteen.
    """

    def __init__(self) -> None:
        self._believed: dict[PeerId, float] = {}
        """Of those that were late."""

    def of_claim(self, peer: PeerId) -> float:
        return self._believed.get(peer, 1.0)

    def owners_took(self, took_s: Mapping[PeerId, float], parts_within_s: float) -> None:
        """A round is over. ``took_s``: by owner, this peer too if it was one, seconds from BEGIN to its last
        mean; what has not come counts up to now. ``parts_within_s``: as in BEGIN."""
        self._forgive()
        fair_s = median_low(took_s.values()) if len(took_s) > 1 else parts_within_s
        late_s = LATE_TIMES * fair_s if len(took_s) > 1 else fair_s
        for peer, owner_s in took_s.items():
            if owner_s > late_s and owner_s - fair_s > bounds.CHEAP_S:
                share = max(HARDEST, fair_s / owner_s)
                self._believed[peer] = max(LEAST, self.of_claim(peer) * share)

    def keep(self, live: Collection[PeerId]) -> None:
        """Forget peers that are gone."""
        if self._believed:
            self._believed = {peer: share for peer, share in self._believed.items() if peer in live}

    def _forgive(self) -> None:
        believed = {peer: share * FORGIVING for peer, share in self._believed.items()}
        self._believed = {peer: share for peer, share in believed.items() if share < 1}
