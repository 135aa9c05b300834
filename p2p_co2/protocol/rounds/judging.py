"""What became of commits that were told about one fragment, and whose word counts less for it.

Laws: who signed a commit is judged by what this peer finds itself: it holds what the commit made, or nobody
has its bytes, or most others hold something else. Two words about one attempt are judged at once. What a
split or a death explains as well names nobody the first time: who decided for the smaller side of a split did
so in good faith, of two peers nobody can say whose line it was, and one that is gone cannot give what it has.
Price: a liar that looks like bad luck has one more lie in an hour; and where all others who held a commit's
bytes have died, its signer is not believed for a minute, although it is honest. Heartbeats tell what it would
have told, three seconds later.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p_co2.protocol.rounds.ahead import Ahead
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.decision import Verdicts
from p2p_co2.protocol.rounds.repute import NOT_BEGUN
from p2p_co2.protocol.rounds.swarm import Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Outcome


class Judging:
    """Of one fragment."""

    def __init__(self, fragment: int, swarm: Swarm, verdicts: Verdicts, ahead: Ahead) -> None:
        self._fragment, self._swarm, self._verdicts, self._ahead = fragment, swarm, verdicts, ahead

    def moved(self, before: tuple[int | None, bytes], version: int, digest: bytes, now: float) -> None:
        """Our state is another one now. ``before``: (version, digest) that we held."""
        known = self._verdicts.commit(version)
        if before[0] is not None and version < before[0]:
            self._verdicts.forget(0)  # it goes back to most others: what it knows is of another history
        elif known is not None and before[0] == version - 1:
            self._swarm.repute.committed(PeerId(known[1].decided_by))
        elif known is not None and before[0] == version and before[1] != digest:
            why = f"most others hold something else than its round {version} made"
            self._forget(version, why, now, is_proved=False)

    def came_to_nothing(self, round_: int, now: float, *, is_proved: bool) -> None:
        """Nobody holds what we were told of ``round_``, or (not ``is_proved``) nobody has given it: go on as
        if it had not been."""
        why = f"nobody holds what it told of round {round_} of fragment {self._fragment}"
        told, sent = self._ahead.came_to_nothing(round_), self._ahead.sent_to_nothing(round_)
        if sent is not None:  # it would say so for ever, and who coordinates a round is who is asked again
            self._swarm.spoilt(sent, f"nobody holds the version {round_} that it sent us after", now)
        held = self._swarm.my_versions.get(self._fragment, -1)  # who made that has told no lie
        self._forget(max(round_, held + 1), why, now, [] if told is None else [told], is_proved=is_proved)

    def _forget(
        self, round_: int, why: str, now: float, told: Sequence[PeerId] = (), *, is_proved: bool = True
    ) -> None:
        # Once each: who signed several rounds of a split had bad luck once.
        for signer in dict.fromkeys([*told, *self._verdicts.forget(round_)]):
            if signer != self._swarm.me:  # we may have decided for the smaller side of a split
                self._blame(signer, why, now, is_proved=is_proved)

    def _blame(self, signer: PeerId, why: str, now: float, *, is_proved: bool = True) -> None:
        could_tell = self._swarm.is_live(signer) and len(self._swarm.live) > 2
        self._swarm.repute.lied(signer, why, now, is_proved=is_proved and could_tell)

    def rounds_spoilt(self, attempt: Attempt | None, signer: PeerId) -> float:
        """What an abort of ``attempt`` (None: of no round that began) counts against its coordinator. A
        successor seldom can do better."""
        return NOT_BEGUN if attempt is None or signer != attempt.coordinator else 1.0

    def heard(self, outcome: Outcome, now: float) -> None:
        """A decision came: has its signer told something else of the same attempt?"""
        signer, key = PeerId(outcome.decided_by), outcome.key
        if outcome.committed:
            two = self._verdicts.aborted_by(key.attempt) == signer
        else:
            known = self._verdicts.commit(key.round)
            other = known[1] if known is not None else None
            two = other is not None and (other.key.attempt, other.decided_by) == (key.attempt, signer)
        if two:
            why = f"it signed both a commit and an abort of one attempt at round {key.round}"
            self._swarm.repute.told_two(signer, why, now)
