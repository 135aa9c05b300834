"""A round that this peer coordinates, from BEGIN to its decision, and which of them are over before that.

Law: whoever is in a round that begins is in no earlier one of its fragment any more, so at most one of them
is kept for each live peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2p_co2.protocol.rounds.gathering import Gathering
from p2p_co2.protocol.rounds.tally import Tally
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Begin, Ready

PASSED = "all who were in it have begun a later round"


class Begun:
    """A round that we began: BEGIN is kept to be repeated to a member that missed it."""

    def __init__(self, begin: Begin, tally: Tally, gathering: Gathering, now: float) -> None:
        self.begin, self.tally, self.began_at = begin, tally, now
        self.readies, self.in_time_until = gathering.readies, gathering.in_time_until
        self.late: set[PeerId] = set()

    def missed_begin(self, message: Ready, sender: PeerId) -> bool:
        """Whether a member repeats its READY because BEGIN was lost. One that has voted, or that is ready
        with something else, was restarted: it has forgotten its votes and its slices, and must not take part
        a second time."""
        member = sender in self.tally.attempt.shares and not self.tally.has_heard(sender)
        return member and self.readies.get(sender) == message

    def left(self, now: float) -> Begin:
        """BEGIN with the time that is left of it."""
        begin = Begin()
        begin.CopyFrom(self.begin)
        passed_s = now - self.began_at
        begin.parts_within_s = max(0.0, begin.parts_within_s - passed_s)
        begin.result_within_s = max(0.0, begin.result_within_s - passed_s)
        return begin


def passed(rounds: Sequence[Begun], is_live: Callable[[PeerId], bool]) -> list[Begun]:
    """Those of ``rounds`` (of one fragment, in the order in which they began) whose members have all begun a
    later one or are gone: nobody is left in them who could vote."""
    over: list[Begun] = []
    later: set[PeerId] = set()
    for begun in reversed(rounds):
        group = set(filter(is_live, begun.tally.attempt.shares))
        if begun is not rounds[-1] and group <= later:
            over.append(begun)
        later |= group
    return over
