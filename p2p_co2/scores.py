"""How well what each peer sends agrees with what this peer learned itself.

    scores = Scores()
    scores.tell("b", cosine)              # of its slice, or its mean, and ours
    scores.standing(["b", "c", "d"])      # {"b": 1.1, "c": 1.0, "d": 0.0}

A cosine of two changes that were learned from different data tells how far one of them lowers the other's
loss, to first order. This peer's own change is the anchor, as in FLTrust (Cao et al. 2021, "Byzantine-robust
Federated Learning via Trust Bootstrapping"). Nobody else has it: the slice of a part that one averages is
sent to nobody. So it takes no held-out text, no message and no majority. Price: it is this peer's view alone,
and one whose data are unlike all others' believes nobody less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from statistics import median_high

from p2p_co2.wire.limits import MAX_PEERS

FADES = 15 / 16
"""What is left of a cosine with each that follows."""
KNOWN_AFTER = 16
"""Cosines: from so many on a peer is no newcomer."""


class Scores:
    """Of each peer a mean of cosines, of which older ones fade. Those told of longest ago are forgotten."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, tuple[float, float, int]] = OrderedDict()
        """By peer: sum and weight of its cosines, and how many."""

    def tell(self, peer: str, cosine: float) -> None:
        total, weight, count = self._told.pop(peer, (0.0, 0.0, 0))
        self._told[peer] = total * FADES + cosine, weight * FADES + 1, count + 1
        if len(self._told) > MAX_PEERS:
            self._told.popitem(last=False)

    def standing(self, peers: Collection[str] = ()) -> dict[str, float]:
        """By peer, its score over the median one of ``peers``, or of all; 0 for a score below 0. 1 for who
        was never told of. All 1 where that median is not above 0: then most differ from this peer.

        Law: where more than half are honest, the median lies among the scores of the honest."""
        peers = peers or self._told.keys()
        told = {peer: self._told[peer] for peer in peers if peer in self._told}
        scores = {peer: total / weight for peer, (total, weight, _) in told.items()}
        usual = median_high(scores.values()) if scores else 0.0
        if usual <= 0:
            return dict.fromkeys(peers, 1.0)
        return {peer: max(0.0, scores.get(peer, usual) / usual) for peer in peers}

    def newcomers(self, peers: Collection[str]) -> set[str]:
        """Those told of less than half as often as who was told of most, and less than ``KNOWN_AFTER``
        times: as a run begins, and to who has just come, nobody is new."""
        counts = {peer: self._told.get(peer, (0.0, 0.0, 0))[2] for peer in peers}
        most = max(counts.values(), default=0)
        return {peer for peer, count in counts.items() if count < KNOWN_AFTER and 2 * count < most}
