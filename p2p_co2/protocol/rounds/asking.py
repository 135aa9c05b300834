"""A peer between its offer and BEGIN: it asks one coordinator at a time to be taken into the round.

Laws: one READY is outstanding at a time, and it is repeated before the next coordinator is asked. Where one
appears that comes first, all go there. Every wait has a timer; after ``READY_CAP_S`` the offer is given up.
If our round is heard to have begun without us, it is given up when that must be decided.
"""

from __future__ import annotations

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.deadline import Durations
from p2p_co2.protocol.rounds.events import Offer
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm, named
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_STRING
from p2p_co2.wire.messages_pb2 import Ready, Waiting

TRIES = 3
"""READYs to one coordinator, each waiting twice as long, before the next is asked."""


class Asking:
    """One offer that waits for BEGIN. ``asked``: the coordinators, the present one last; ``failure``: why the
    offer is given up, empty as long as it is not."""

    def __init__(
        self,
        offer: Offer,
        swarm: RoundSwarm,
        outlet: Outlet,
        receipts: Durations,
        *,
        is_retry: bool,
        now: float,
    ) -> None:
        self.offer = offer
        self.asked: list[PeerId] = []
        self.failure = ""
        self._swarm = swarm
        self._outlet = outlet
        self._receipts = receipts
        self._began_at = self._sent_at = self._timer_at = now
        self._give_up_at = now + bounds.READY_CAP_S
        self._tries = 0
        """How often in a row the present one was asked, and has not answered."""
        self._in_vain: set[PeerId] = set()
        """Those that were asked and begin nothing: they are not asked again."""
        self._known: frozenset[PeerId] = frozenset()
        """Who trained when the present one was asked."""
        # Built once: a coordinator takes a READY that changed for another offer's.
        self._ready = Ready(
            fragment=offer.fragment, round=offer.round, base_version=offer.base_version,
            state_digest=offer.state_digest, weight=offer.weight,
            upload_bytes_per_s=swarm.my_upload_bytes_per_s(),
            download_bytes_per_s=swarm.live[swarm.me].download_bytes_per_s, last=offer.is_last,
            offer_id=offer.offer_id,
        )  # fmt: skip
        self._ask_next(now, is_retry)

    # ---- answers

    def waiting(self, message: Waiting, sender: PeerId, now: float) -> None:
        """A receipt: BEGIN will come within the time it names, or none begins."""
        if sender != self.asked[-1]:
            return  # an earlier coordinator that we gave up on woke up; its BEGIN would still be welcome
        if message.refusal:
            self.failure = message.refusal[:MAX_STRING]
            self._swarm.refused(sender, self.offer.fragment, "it begins no round", now)
            return
        if self._tries == 1:
            self._receipts.add(now - self._sent_at)
        self._tries = 0
        self._timer_at = now + message.begins_within_s + bounds.GRACE_S

    def began_without_us(self, attempt: Attempt, now: float) -> None:
        """The round that one we asked has begun is waited for: what it commits is where we go on."""
        if (attempt.round, attempt.state_digest) == (self.offer.round, self.offer.state_digest):
            decided_at = min(now + attempt.result_within_s, self._began_at + self._swarm.shape.round_cap_s)
            self._give_up_at = max(self._give_up_at, decided_at + bounds.GRACE_S)

    def is_taken_in(self, attempt: Attempt, withdrawn: Offer | None) -> bool:
        """Whether a BEGIN for our round answers this offer's READY. It may answer that of ``withdrawn``,
        which it crossed, or one of our own before. Raises ``RemoteProtocolError`` if it answers none of them.
        """
        is_ours = attempt.coordinator == self._swarm.me
        if attempt.coordinator not in self.asked and not is_ours:
            raise RemoteProtocolError("wrong sender", "BEGIN by a peer that was not asked")
        if attempt.coordinator in self.asked and attempt.repeats(self.offer, self._swarm.me):
            return True
        is_last = withdrawn is not None and attempt.repeats(withdrawn, self._swarm.me)
        if not is_last and not is_ours:
            raise RemoteProtocolError("wrong group", "BEGIN does not repeat our READY")
        return False

    def mistrust(self, sender: PeerId, why: str, now: float) -> None:
        """A coordinator sends us where nobody is: ask the next one."""
        self._swarm.failed(sender, self.offer.fragment, why, now)
        if sender == self.asked[-1]:
            self._in_vain.add(sender)
            self._ask_next(now)

    def poke(self, now: float) -> None:
        """Pieces of a round that we know nothing of came in: our BEGIN may be lost, so ask again soon."""
        self._timer_at = min(self._timer_at, now + self._receipt_s())

    def leave(self) -> None:
        """Tell the one that was asked last to expect us no more: a round that it began with us would wait for
        us."""
        if self.asked and self._swarm.is_live(self.asked[-1]):
            gone = Ready()
            gone.CopyFrom(self._ready)
            gone.withdrawn = True
            self._outlet.send(self.asked[-1], gone)

    # ---- time and the swarm

    def peers_changed(self, now: float) -> None:
        """Another one is asked when this one is lost or has stopped to train. So it is when one appears that
        comes first: the others ask it, too."""
        asked = self.asked[-1]
        order = self._swarm.to_ask(self.offer.fragment, self.offer.round, now)
        may_ask = order and not self._swarm.is_missed(order[0]) and order[0] not in self._in_vain
        if not self._swarm.is_training(asked) or (may_ask and order[0] not in self._known):
            self._ask_next(now)

    def get_timer(self) -> float:
        return min(self._timer_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        if now >= self._give_up_at:
            self.failure = f"no round began within {self._give_up_at - self._began_at:.0f} s"
            self._swarm.failed(self.asked[-1], self.offer.fragment, "it let no round begin", now)
        elif now >= self._timer_at:
            if self._tries < TRIES:
                self._send(now)
            else:
                self.mistrust(self.asked[-1], "it gave no answer when it was to coordinate", now)

    def _ask_next(self, now: float, is_retry: bool = False) -> None:
        order = self._swarm.to_ask(self.offer.fragment, self.offer.round, now)
        ahead = [
            p
            for p in self._ahead(order)
            if not self._swarm.repute.is_passed_over(p, self.offer.fragment, now)
        ]
        if not self.asked and (is_retry or 2 * len(ahead) >= len(order)):
            order = ahead + order
        left = [peer for peer in order if peer not in self._in_vain]
        if not left or len(self._in_vain) >= bounds.MAX_ASKED:
            self.failure = f"no coordinator answered (asked {named(self.asked)})"
            return
        self.leave()
        if left[0] in self.asked:
            self.asked.remove(left[0])
        self.asked.append(left[0])
        self._known = frozenset(self._swarm.training)
        self._tries = 0
        self._send(now)

    def _ahead(self, order: list[PeerId]) -> list[PeerId]:
        """Those who say that they are past this round. One of them is asked first after an abort, or if they
        are half of the swarm: it knows the decision. Else not: a claim alone must not draw everybody's READY.
        """
        fragment = self.offer.fragment
        round_ = self.offer.round
        return [peer for peer in order if (self._swarm.version_of(peer, fragment) or 0) >= round_]

    def _send(self, now: float) -> None:
        self._sent_at = now
        self._timer_at = now + self._receipt_s() * 2**self._tries
        self._tries += 1
        self._outlet.send(self.asked[-1], self._ready)

    def _receipt_s(self) -> float:
        floor_s = bounds.RECEIPT_FLOOR_S
        return 2 * self._receipts.deadline_s(floor_s / 2, floor_s / 2, bounds.RECEIPT_CAP_S / 2)
