"""A member between its offer and BEGIN: it asks one coordinator at a time to be taken into the round.

Laws: one READY is outstanding at a time; it is repeated to the same coordinator before the next one is asked,
because a lost message is likelier than a lost peer and two coordinators for one round cost a round; where
one does not begin within the time that it promised and another comes first by now, all go there, or each may
wait for a majority that half of them keep from the other; every wait has a timer; after ``READY_CAP_S`` the
offer is given up, whatever coordinators promise; if our round is heard to have begun without us, when that
must be decided.
"""

from __future__ import annotations

import math

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.heartbeat import SLOWEST_HEARTBEAT_S
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import Offer
from p2p_co2.protocol.rounds.repute import NOT_BEGUN, SPOILT_IN_A_ROW
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, named
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Behind, Ready, Waiting

TRIES = 3
"""READYs to one coordinator, each waiting twice as long, before the next is asked."""
BEGIN_LATE_S = 0.5
"""BEGIN may come here so much later than to others."""
LONGEST_S = bounds.GATHER_CAP_S + bounds.GRACE_S
"""An honest coordinator may hold an offer so long before it begins or gives up."""


class Asking:
    """One offer that waits for BEGIN."""

    def __init__(
        self, offer: Offer, swarm: Swarm, outlet: Outlet, receipts: Durations, *, is_retry: bool, now: float
    ) -> None:
        self.offer = offer
        self.asked: list[PeerId] = []
        self.failure = ""
        """Why the offer is given up; empty as long as it is not."""
        self._swarm, self._outlet, self._receipts, self._is_retry = swarm, outlet, receipts, is_retry
        self._began_at = self._sent_at = self._asked_at = self._awake_at = now
        self._give_up_at = now + bounds.READY_CAP_S
        self._hears = self._has_woken = False
        self._hears_until = -math.inf
        """When the last of the rounds that we hear must be decided."""
        self._held_s: dict[PeerId, float] = {}
        """How long each has had the offer, seconds."""
        self._tries = 0
        self._votes: dict[PeerId, tuple[bytes, float]] = {}
        """Per live peer that votes to us, the attempt that it does so in, and since when."""
        self._blameless: set[PeerId] = set()
        """Who was asked and went, or trained no more, or let another come first: may be asked again."""
        self._asked_twice: set[PeerId] = set()
        """Who gave us no answer, or sent us on, and was asked again all the same."""
        self._charged: set[PeerId] = set()
        """Whose silence is put down to it already."""
        self._woke_at, self._slept_in_all_s = -math.inf, 0.0
        self._overslept = 0
        """How often we slept through its last chance to answer."""
        self._sent_on = 0
        """How often in a row the one that is asked has promised nothing."""
        self._taken_at: float | None = None
        """Since when the one that is asked has the offer, by its receipts; later by what we slept."""
        self._promised_until = now
        self._kept_s = 0.0
        """How long it had it, of what it promised, when it promised nothing, the first of these times."""
        self._trained: set[PeerId] = set()
        """Who trained when the last one was asked."""
        self._timer_at = now
        # Built once: a coordinator takes a READY that changed for another process's.
        self._ready = Ready(
            fragment=offer.fragment, round=offer.round, base_version=offer.base_version,
            state_digest=offer.state_digest, weight=offer.weight,
            upload_bytes_per_s=swarm.my_upload_bytes_per_s(),
            download_bytes_per_s=swarm.my_download_bytes_per_s(), last=offer.is_last,
        )  # fmt: skip
        self._ask_next(now)

    def waiting(self, message: Waiting, sender: PeerId, now: float) -> None:
        """A receipt: BEGIN or a decision will come within the time it names."""
        if sender != self.asked[-1]:
            return  # an earlier coordinator that we gave up on woke up; its BEGIN would still be welcome
        self._note_sleep(now)
        if self._tries == 1 and self._woke_at < self._sent_at:
            self._receipts.add(now - self._sent_at)
        self._tries = self._overslept = 0
        self._timer_at = now + message.begins_within_s + bounds.GRACE_S
        self._taken_at = now if self._taken_at is None else self._taken_at
        if message.begins_within_s:
            self._promised_until = now + message.begins_within_s
        elif not self._sent_on:
            until = min(now, self._promised_until)  # of the rest, our own asking may be a part
            self._kept_s = until - max(self._taken_at, self._hears_until)
        self._sent_on = 0 if message.begins_within_s else self._sent_on + 1
        if self._sent_on >= TRIES:  # it trains no more, says it, and we have not heard so
            if self._kept_s > LONGEST_S:
                why = f"it sent us on after {self._kept_s:.0f} s"
                self._swarm.spoilt(sender, why, now, rounds=NOT_BEGUN, cost_s=self._kept_s)
            self._ask_next(now)

    def round_began(self, attempt: Attempt, now: float) -> None:
        """We hear ``attempt``. If it is at our round, it is waited for: given up before it is decided, all
        that was heard of it would be fetched. Once, whatever else begins."""
        self._note_sleep(now)
        if attempt.round != self.offer.round:
            return
        decided_at = now + attempt.result_within_s + bounds.GRACE_S
        self._hears_until = max(self._hears_until, decided_at)
        if not self._hears:
            self._hears, self._give_up_at = True, max(self._give_up_at, decided_at)

    def held_s(self, peer: PeerId, now: float) -> float:
        """How long ``peer`` has had the offer, but for time that we slept beyond what it promised."""
        held_s = now - self._asked_at - self._slept_s(now) if peer in self.asked[-1:] else 0.0
        return self._held_s.get(peer, 0.0) + max(0.0, held_s)

    def was_never_told(self, attempt: bytes, voter: PeerId, now: float) -> bool:
        """Whether others are in an attempt whose BEGIN will not come here: ``voter``, who is live, votes to
        us in it. Somebody who was asked must be gone, and two must vote, or one again some time later: else
        BEGIN may be on its way, whatever one member says that has heard it first."""
        if self._votes.get(voter, (b"", now))[0] != attempt:
            self._votes[voter] = attempt, now
        since = [at for voted_in, at in self._votes.values() if voted_in == attempt]
        has_lost_one = any(not self._swarm.is_live(peer) for peer in self.asked)
        return has_lost_one and (len(since) > 1 or now >= since[0] + BEGIN_LATE_S)

    def leave(self) -> None:
        """Tell who was asked last to expect us no more: a round that it began with us would wait for us."""
        if self.asked and self._swarm.is_live(self.asked[-1]):
            gone = Ready()
            gone.CopyFrom(self._ready)
            gone.withdrawn = True
            self._outlet.send(self.asked[-1], gone)

    def _mistrust(self, now: float) -> None:
        """Who was asked sends us where nobody is: ask the next one. Not its fault as long as we have not
        heard from most of the others since we slept: they may have gone there."""
        self._note_sleep(now)
        if now > self._swarm.slept_until + SLOWEST_HEARTBEAT_S + bounds.GRACE_S:
            self._charged.add(self.asked[-1])
            self._swarm.spoilt(self.asked[-1], "it sent us where nobody is", now)
        self._ask_next(now)

    def is_taken_in(self, attempt: Attempt, withdrawn: Offer | None) -> bool:
        """Whether a BEGIN for our round is the answer to this offer's READY, or to one before: to that of
        ``withdrawn``, which it crossed, or to one that we had asked ourselves for. Raises
        ``RemoteProtocolError`` if it is neither."""
        is_ours = attempt.coordinator == self._swarm.me
        if attempt.coordinator not in self.asked and not is_ours:
            raise RemoteProtocolError("wrong sender", "BEGIN by a peer that was not asked")
        if attempt.coordinator in self.asked and attempt.repeats(self.offer, self._swarm.me):
            return True
        is_last = withdrawn is not None and attempt.repeats(withdrawn, self._swarm.me)
        if not is_last and not is_ours:
            raise RemoteProtocolError("wrong group", "BEGIN does not repeat our READY")
        return False

    def check_behind(self, message: Behind, most: int, sender: PeerId, now: float) -> None:
        """Mistrust ``sender``, and raise ``RemoteProtocolError``, if it sends us beyond ``most``."""
        if message.version > most and sender != self._swarm.me:
            if sender == self.asked[-1]:
                self._mistrust(now)
            farthest = f"{message.version}; as far as we hear most peers are not beyond {most}"
            raise RemoteProtocolError("impossible version", farthest)

    def poke(self, now: float) -> None:
        """Pieces of a round that we know nothing of came in: our BEGIN may be lost, so ask again soon."""
        self._timer_at = min(self._timer_at, now + self._receipt_s())

    def peers_changed(self, now: float) -> None:
        """Another one is asked when this one is lost, or has stopped to train: the others, who offer for the
        same round, ask among those that still do."""
        self._note_sleep(now)
        asked = self.asked[-1]
        if not self._swarm.is_live(asked) or (asked in self._trained and not self._swarm.is_training(asked)):
            self._blameless.add(asked)
            self._ask_next(now)

    def get_timer(self) -> float:
        return min(self._timer_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        self._note_sleep(now)
        awake_s = now - self._woke_at
        if now >= self._give_up_at and awake_s < 2 * bounds.GRACE_S and not self._has_woken:
            self._has_woken, self._give_up_at = True, now + 2 * bounds.GRACE_S
            self._send(now)  # what came of it may lie there, or is told again
        elif now >= self._give_up_at:
            self.failure = f"no round began within {self._give_up_at - self._began_at:.0f} s"
            self._blame_longest(now)
        elif now >= self._timer_at:
            if not self._tries and (first := self._comes_first_now(now)) != self.asked[-1]:
                if not self._may_ask(first):
                    self._asked_twice.add(first)
                self._blameless |= {self.asked[-1], first}
                self._ask_next(now)
            elif self._tries < TRIES:
                self._send(now)
            else:
                if self.asked[-1] not in self._charged and self._overslept < 2:
                    self._charged.add(self.asked[-1])
                    self._swarm.spoilt(self.asked[-1], "it gave no answer when it was to coordinate", now)
                self._ask_next(now)

    def _note_sleep(self, now: float) -> None:
        """Awake, this peer comes back by its timer: time beyond that is nobody's fault. Whoever is asked gets
        its last chance to answer twice, if we slept through the first: the answer may lie in our socket."""
        slept_s = self._slept_s(now)
        self._awake_at = now
        if slept_s:
            self._woke_at = now
            self._slept_in_all_s += slept_s
            self._hears_until += slept_s
            if slept_s > SLOWEST_HEARTBEAT_S:
                self._swarm.slept_until = now
            self._asked_at += slept_s
            self._taken_at = None if self._taken_at is None else self._taken_at + slept_s
            if self._tries >= TRIES:
                self._overslept += 1
                self._tries = TRIES - 1 if self._overslept == 1 else TRIES

    def _slept_s(self, now: float) -> float:
        return max(0.0, now - max(self.get_timer(), self._awake_at) - bounds.GRACE_S)

    def _blame_longest(self, now: float) -> None:
        """At the cap: whoever had the offer longest, if it is still here and we were awake. Who began a
        round may only be late."""
        held_s, peer = max((self.held_s(peer, now), peer) for peer in {*self._held_s, *self.asked[-1:]})
        has_slept = held_s <= self._honest_s() and self._slept_in_all_s > bounds.READY_CAP_S / 10
        if self._has_woken or has_slept or not self._swarm.is_live(peer):
            return
        rounds = SPOILT_IN_A_ROW if not self._hears else 1.0
        rounds = rounds if held_s > self._honest_s() else NOT_BEGUN
        self._swarm.spoilt(
            peer, f"it let no round begin for {held_s:.0f} s", now, rounds=rounds, cost_s=held_s
        )

    def _honest_s(self) -> float:
        """How long an offer that nothing comes of may be held at no more than a small cost: what one of two
        that held it may have."""
        return bounds.READY_CAP_S / 2

    def _comes_first_now(self, now: float) -> PeerId:
        """Who is asked by those who offer now, ``asked[-1]`` if nobody is; not who gave us no answer, unless
        we are sent on: it may answer by now, once."""
        order = self._swarm.to_ask(self.offer.fragment, self.offer.round, now)
        first = order[0] if order and not self._swarm.is_missed(order[0]) else self.asked[-1]
        has_room = len(self.asked) < bounds.MAX_ASKED or first in self.asked
        is_sent_on = self._sent_on > 0 and first not in self._asked_twice
        return first if has_room and (is_sent_on or self._may_ask(first)) else self.asked[-1]

    def _may_ask(self, peer: PeerId) -> bool:
        return peer not in self.asked or peer in self._blameless

    def _ask_next(self, now: float) -> None:
        order = self._swarm.to_ask(self.offer.fragment, self.offer.round, now)
        ahead = [p for p in self._ahead(order) if not self._swarm.repute.is_passed_over(p, now)]
        if not self.asked and (self._is_retry or 2 * len(ahead) >= len(order)):
            order = ahead + order
        left = [peer for peer in order if self._may_ask(peer)]
        again = bool(left) and left[0] in self.asked
        if not left or (len(self.asked) >= bounds.MAX_ASKED and not again):
            self.failure = f"no coordinator answered (asked {named(self.asked)})"
            return
        self.leave()
        if self.asked:
            self._held_s[self.asked[-1]] = self.held_s(self.asked[-1], now)
        if again:
            self.asked.remove(left[0])
        self._blameless.discard(left[0])
        self.asked.append(left[0])
        self._trained = set(self._swarm.training())
        self._tries = self._sent_on = self._overslept = 0
        self._taken_at = None
        self._asked_at = self._promised_until = now
        self._send(now)

    def _ahead(self, order: list[PeerId]) -> list[PeerId]:
        """Those who say that they are past this round. After an abort, or if they are half of the swarm,
        without which no round can begin, one of them is asked first: it knows the decision, or says where it
        is. Else not: a claim alone must not draw everybody's READY."""
        fragment, round_ = self.offer.fragment, self.offer.round
        return [peer for peer in order if (self._swarm.version_of(peer, fragment) or 0) >= round_]

    def _send(self, now: float) -> None:
        self._sent_at = now
        self._timer_at = now + self._receipt_s() * 2**self._tries
        self._tries += 1
        self._outlet.send(self.asked[-1], self._ready)

    def _receipt_s(self) -> float:
        floor_s = bounds.RECEIPT_FLOOR_S
        return 2 * self._receipts.deadline_s(floor_s / 2, floor_s / 2, bounds.RECEIPT_CAP_S / 2)
