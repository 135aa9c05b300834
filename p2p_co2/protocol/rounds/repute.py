"""Whose word on rounds counts less for a while: coordinators whose rounds come to nothing, and signers of
commits that nobody holds.

One signature makes a commit, and who coordinates a round may let it begin or end as it likes. So each peer
remembers what came of it. Who was to coordinate ``SPOILT_IN_A_ROW`` rounds that ended without a commit is
asked last; whose commit turned out to be nobody's is not believed about rounds that this peer is not in. Both
last ``FIRST_S``, then twice as long each time, and a round that it coordinates to a commit clears the first.

Law: a liar costs each peer a few rounds, then one each time that its time is over, which comes ever later:
about ten in the first hour. Price: everybody judges by what it sees itself, since there is no proof to show
around. Who sees something else asks another coordinator meanwhile, and its offer misses that round; an honest
coordinator with a bad line is passed over, too, which costs nobody anything; an identity is free to make, and
each new one that is let in may lie anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from p2p_co2.protocol.rounds.events import Distrusted
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS

SPOILT_IN_A_ROW = 2
NOT_BEGUN = 0.25
"""What a round counts that never began, since too few were ready: that is seldom its coordinator's fault, and
where peers ask different ones it is the rule."""
FIRST_S, LONGEST_S = 60.0, 3600.0
COSTS = 10.0
"""Passed over for at least so many times the seconds that it cost."""
MAX_REMEMBERED = MAX_PEERS


@dataclass
class _Record:
    spoilt: float = 0.0
    passed_over_until: float = -1.0
    is_proved: bool = False
    """It has signed two things about one attempt: its commits make nothing good any more."""
    lies: int = 0
    unbelieved_until: float = -1.0
    excused_until: float = -1.0
    """Until when another thing that an honest peer's bad luck explains is a lie."""


class Repute:
    """What this peer remembers of the others."""

    def __init__(self) -> None:
        self.emit: Callable[[Distrusted], None] = lambda news: None
        """Hears when somebody's word begins to count less, and why."""
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def spoilt(self, coordinator: PeerId, why: str, now: float, *, rounds: float, cost_s: float) -> None:
        """A round that ``coordinator`` was to decide ended without a commit for us, after ``cost_s`` seconds.
        ``rounds``: how many such rounds this one is worth."""
        record = self._known(coordinator)
        if now < record.passed_over_until:
            return
        record.spoilt += rounds
        if record.spoilt >= SPOILT_IN_A_ROW:
            lasts_s = max(_doubled(int(record.spoilt - SPOILT_IN_A_ROW)), min(LONGEST_S, COSTS * cost_s))
            record.passed_over_until = now + lasts_s
            self.emit(Distrusted(coordinator, f"asked last to coordinate, since {why}", lasts_s))

    def committed(self, coordinator: PeerId) -> None:
        """A round that it decided was committed, and we have what it made."""
        record = self._records.get(coordinator)
        if record is not None and not record.is_proved:
            record.spoilt, record.passed_over_until = 0.0, -1.0

    def told_two(self, coordinator: PeerId, why: str, now: float) -> None:
        """``coordinator`` signed two outcomes of one attempt. Its commits may be real all the same."""
        self._known(coordinator).is_proved = True
        self.spoilt(coordinator, why, now, rounds=SPOILT_IN_A_ROW, cost_s=0.0)

    def lied(self, signer: PeerId, why: str, now: float, *, is_proved: bool = True) -> None:
        """What ``signer`` signed about a round was not so. If bad luck of an honest peer explains it as well
        (not ``is_proved``), only the second time in ``LONGEST_S`` counts."""
        record = self._known(signer)
        if not is_proved and now >= record.excused_until:
            record.excused_until = now + LONGEST_S
            return
        if now >= record.unbelieved_until:
            lasts_s = _doubled(record.lies)
            record.lies, record.unbelieved_until = record.lies + 1, now + lasts_s
            self.emit(Distrusted(signer, f"not believed about rounds of others, since {why}", lasts_s))

    def is_passed_over(self, peer: PeerId, now: float) -> bool:
        record = self._records.get(peer)
        return record is not None and now < record.passed_over_until

    def is_believed(self, peer: PeerId, now: float) -> bool:
        record = self._records.get(peer)
        return record is None or now >= record.unbelieved_until

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``."""
        return {"MAX_REMEMBERED": (len(self._records), MAX_REMEMBERED)}

    def _known(self, peer: PeerId) -> _Record:
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)
        return record


def _doubled(times: int) -> float:
    return float(min(LONGEST_S, FIRST_S * 2 ** min(times, 10)))
