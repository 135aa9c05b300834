"""A peer that a round began without: it listens, and has the means together with the members.

It was late, or was replaying the round before. Without this it fetches the round after its commit, which may
take longer than the pause before the next round: that begins without it, too, and so on.

Laws: nobody waits for a listener, it sends no slice, votes for nothing and is not in the divisor, so a lying
one can do nothing but take bytes that it may fetch as well; an owner sends to listeners only when the members
have been sent all its means, and to few of them. What was heard counts only with the signed commit of its
attempt, digest by digest, as a round that is fetched; what has not begun to come by then is fetched. A
listener's own work is in its next offer. What is held is one mean per fragment.

Price: an owner's upload grows by its part for each listener: as much as the fetch would cost its donors.
"""

from __future__ import annotations

from collections.abc import Collection

from p2p_co2.digest import digest
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.assembly import Assembly
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.events import Overheard
from p2p_co2.protocol.rounds.history import History
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Listen, Mean, Outcome, RoundKey
from p2p_co2.system.memory import large_buffer


class Listening:
    """One peer that is not in ``attempt`` and hears its means."""

    def __init__(self, attempt: Attempt, swarm: Swarm, outlet: Outlet, now: float) -> None:
        self.attempt, self._swarm, self._began_at = attempt, swarm, now
        width = swarm.shape.block_bytes
        self._mean = large_buffer(swarm.shape.payload_bytes(attempt.fragment))
        self._transfers = [
            Assembly((stop - start) * width, self._mean[start * width : stop * width])
            for start, stop in attempt.ranges
        ]
        self._digests = [b""] * len(attempt.ranges)
        self._promised: set[PeerId] = set()
        """Owners that will send, or did."""
        for owner in sorted(set(attempt.owners)):
            outlet.send(owner, Listen(key=attempt.key(), state_digest=attempt.state_digest))

    def promised(self, owner: PeerId) -> None:
        """Its means will come."""
        if owner in self.attempt.owners:
            self._promised.add(owner)

    def mean(self, message: Mean, sender: PeerId) -> bool:
        """A piece of a part's mean; False if it came for nothing. Raises ``RemoteProtocolError``."""
        part = message.part
        if part >= len(self._transfers):
            raise RemoteProtocolError("wrong parts", f"part {part} of {len(self._transfers)}")
        if message.generation or sender != self.attempt.owners[part]:
            return False  # the part got another owner: it is fetched
        transfer = self._transfers[part]
        is_new = transfer.add(message.offset, message.total, message.data)
        self._promised.add(sender)
        if is_new and transfer.whole is not None:
            self._digests[part] = digest(transfer.whole)
        return is_new

    def owners_of_missing(self) -> set[PeerId]:
        """The owners of the parts whose means have not come."""
        return {owner for owner, have in zip(self.attempt.owners, self._digests, strict=True) if not have}

    def may_complete(self, outcome: Outcome) -> bool:
        """Whether all that was committed is here or on its way."""
        ranges = [(part.start_block, part.stop_block) for part in outcome.parts]
        missing = self.owners_of_missing()
        if ranges != list(self.attempt.ranges) or not missing <= self._promised:
            return False
        held = zip(self._digests, outcome.parts, strict=True)
        fits = all(not have or have == p.digest for have, p in held)
        return fits and all(map(self._swarm.is_live, missing))

    def patience_s(self, now: float) -> float:
        """How long means may go on coming after the decision: as long again as it was waited for. Donors have
        them as well, and an owner that promised and sends a drop at a time keeps nobody from those."""
        return max(bounds.GRACE_S, now - self._began_at)

    def overheard(
        self, decision: Decision, outcome: Outcome, ends_offer: bool, now: float
    ) -> Overheard | None:
        """The round, once all means are here and are what was committed."""
        if self._digests != [part.digest for part in outcome.parts]:
            return None
        return Overheard(
            self.attempt.fragment, self.attempt.round, decision.SerializeToString(), self._mean,
            tuple(sorted(set(self.attempt.owners))), now - self._began_at, ends_offer,
        )  # fmt: skip


class Ear:
    """What one fragment of a peer hears of rounds that it is not in. ``is_behind``: a commit came that it had
    no bytes of, and it was in none since."""

    def __init__(self, fragment: int, swarm: Swarm, outlet: Outlet, history: History) -> None:
        self._fragment, self._swarm, self._outlet, self._history = fragment, swarm, outlet, history
        self.listening: Listening | None = None
        self.is_behind = False
        self._asked: PeerId | None = None
        self._heard = 0
        """Attempts, since we are where we are."""

    def moved(self, version: int, digest: bytes) -> None:
        """Our state is another one now."""
        self._heard = 0
        if self.listening is not None and not _follows(self.listening.attempt, version, digest):
            self.stop()

    def stop(self) -> None:
        """Listen no more: what still comes of it is nobody's fault."""
        if self.listening is not None:
            self._history.end(self.listening.attempt.id)
            self.listening = None

    def ask(self, version: int, digest: bytes, now: float) -> None:
        """If we were behind: the others may be in the next round already."""
        order = self._swarm.to_ask(self._fragment, version + 1, now) if self.is_behind else ()
        if order:
            self._asked = order[0]
            key = RoundKey(fragment=self._fragment, round=version + 1)
            self._outlet.send(self._asked, Listen(key=key, state_digest=digest))

    def begins(
        self, attempt: Attempt, asked: Collection[PeerId], version: int | None, digest: bytes, now: float
    ) -> bool:
        """Listen to an attempt that we are not in, if it begins where we are, and its coordinator is one of
        ``asked`` to take us in, or was asked whether it has begun. Whether we do."""
        is_asked = attempt.coordinator in (*asked, self._asked)
        is_new = self._heard < bounds.MAX_HEARD and not self.hears(attempt.id)
        if is_asked and _follows(attempt, version, digest) and is_new:
            self.stop()
            self._heard += 1
            self.listening = Listening(attempt, self._swarm, self._outlet, now)
        return self.hears(attempt.id)

    def hears(self, attempt: bytes) -> bool:
        return self.listening is not None and self.listening.attempt.id == attempt

    def promised(self, attempt: bytes, owner: PeerId) -> None:
        """LISTEN of an owner in an attempt that we may hear: it says the same."""
        if self.listening is not None and self.hears(attempt):
            self.listening.promised(owner)

    def mean(self, message: Mean, sender: PeerId) -> bool:
        """As ``Listening.mean``, of what we hear."""
        assert self.listening is not None
        return self.listening.mean(message, sender)


def _follows(attempt: Attempt, version: int | None, digest: bytes) -> bool:
    return (attempt.round - 1, attempt.state_digest) == (version, digest)
