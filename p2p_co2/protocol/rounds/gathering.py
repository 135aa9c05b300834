"""A coordinator before BEGIN: it collects READYs for one round and closes the group.

Laws: a round begins only with a majority of the live training peers that agree on the state they start from,
so two halves of a split swarm cannot both go on; half of it is enough only for the peer that is first by
rendezvous hash, in its own half. None begins that as many others have made already, though they are done.
The group closes when everybody who can come is there, or at the adaptive deadline; a majority that is missing
then is waited for, up to the cap, and peers one round behind for longer than the deadline, if they are not
few of many. The answer is always a BEGIN or a reason in words. "Live" is what membership says: where views
differ widely two groups can still begin, and the digests of the next READYs show and heal it.
"""

from __future__ import annotations

import hashlib

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import seal_begin, write_senders
from p2p_co2.protocol.rounds.bounds import DIGEST_BYTES
from p2p_co2.protocol.rounds.deadline import (
    BEHIND_LEAST,
    SAFETY,
    Cadence,
    Durations,
    Punctuality,
    ReadyHistory,
    gather_least_s,
    parts_deadline_s,
)
from p2p_co2.protocol.rounds.parts import Rates, divide
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, named
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import Begin, Behind, Member, PartSpec, Ready, RoundKey, Waiting

SENT_ON_AFTER_S = 2.0
"""Who does not come first, by what it hears, and does not have most after so long sends on those who are
ready: two with half of them each would wait for as long as they promised."""


class Gathering:
    """The READYs of one round, from the first to BEGIN or abort. ``moved``: peers known to have reached
    ``round - 1``."""

    def __init__(
        self, fragment: int, round_: int, swarm: Swarm, outlet: Outlet, *,
        history: ReadyHistory, cadence: Cadence, now: float,
    ) -> None:  # fmt: skip
        self.fragment, self.round = fragment, round_
        self.readies: dict[PeerId, Ready] = {}
        self.first_at = now
        cap_s = cadence.gather_cap_s(round_)
        step_s = swarm.my_step_s()
        self._adaptive_s = history.deadline_s(round_, cap_s, step_s)
        self.in_time_until = now + cap_s
        """Who comes by then is worth waiting for."""
        self._cheap_s, self._last_gather_s = cadence.cheap_s, cadence.last_gather_s
        self._behind_s = cadence.behind_s
        self._behind: set[PeerId] = set()
        """Peers one round behind that are worth waiting for."""
        self.give_up_at = now + max(self._adaptive_s, bounds.GATHER_CAP_S)
        self._heals_until = now + min(bounds.GATHER_CAP_S, cadence.period_s or bounds.GATHER_CAP_S)
        self._is_overdue = self._awaits_most = False
        self._looks_at, self._has_looked = now + SENT_ON_AFTER_S, False
        self._sent_on: set[PeerId] = set()
        self._had_most = False
        """Since somebody was sent on."""
        self._least_s = gather_least_s(cap_s, step_s)
        self._enough_at: float | None = None
        """Since when those who are ready may begin."""
        self._swarm, self._outlet, self._history = swarm, outlet, history

    def ready(self, message: Ready, sender: PeerId, now: float) -> None:
        """Take or repeat a READY, and send the receipt."""
        if sender not in self.readies:
            self._history.arrived(self.round, now)
        self.readies[sender] = message
        if self._enough_at is None and not self.shortage(self.agreeing()[1], now):
            self._enough_at = now
        if now >= self._looks_at and sender not in self._sent_on and self._is_second(now):
            self._send_on(sender)
        else:
            self._promise(sender, now)
        self._keep_most(now)

    def _keep_most(self, now: float) -> None:
        """Where most are here by now, those who were sent on stay: they would go in a moment."""
        if self._sent_on and not self._had_most and self._has_most():
            self._had_most = True
            for peer in sorted(self._sent_on & self.readies.keys()):
                self._promise(peer, now)

    def _has_most(self) -> bool:
        return 2 * len(self._heard()) > len(self._live())

    def _is_second(self, now: float) -> bool:
        """Whether most are missing and another one comes first, who is heard."""
        order = self._swarm.to_ask(self.fragment, self.round, now)
        is_other = bool(order) and order[0] != self._swarm.me and not self._swarm.is_missed(order[0])
        return is_other and not self._has_most()

    def _promise(self, peer: PeerId, now: float) -> None:
        self._tell_waiting(peer, max(bounds.SOON_S, self._next_at() - now))

    def _send_on(self, peer: PeerId) -> None:
        """Have ``peer`` look who comes first; once: it may not hear what we hear."""
        self._had_most = False
        self._sent_on.add(peer)
        self._tell_waiting(peer, 0.0)

    def _tell_waiting(self, peer: PeerId, within_s: float) -> None:
        self._outlet.send(peer, Waiting(fragment=self.fragment, round=self.round, begins_within_s=within_s))

    @property
    def is_last(self) -> bool:
        """Whether most of those who are ready train no more: one peer's word alone makes nobody wait."""
        return 2 * sum(ready.last for ready in self.readies.values()) > len(self.readies)

    @property
    def deadline_s(self) -> float:
        """From the first READY: how long the others are waited for."""
        least_s = self._behind_s if self._behind else 0.0
        return max(self._adaptive_s, least_s, self._last_gather_s if self.is_last else 0.0)

    @property
    def close_at(self) -> float:
        return self.first_at + self.deadline_s

    def get_timer(self) -> float:
        next_at = self._next_at()
        return next_at if self._has_looked else min(next_at, self._looks_at)

    def _next_at(self) -> float:
        """The deadline; once that has passed without a majority, the end of all patience."""
        if not self._is_overdue:
            return self.close_at
        if self._awaits_most:
            return min(self._heals_until, self.give_up_at)
        return self.give_up_at if self._enough_at is None else min(self._grace_until, self.give_up_at)

    @property
    def _grace_until(self) -> float:
        """Where one READY came long before the others, the deadline is over when the second makes a majority,
        and the third, of the same moment, is still under way: without grace it was left out of that round,
        had to replay it while the next began, and so of every round after."""
        return 0.0 if self._enough_at is None else self._enough_at + self._least_s

    def may_close(self, moved: frozenset[PeerId], now: float) -> bool:
        """Whether to begin, or to give up; if neither, who is ready may be sent on."""
        if self._is_over(moved, now):
            return True
        if now >= self._looks_at:
            self._has_looked = True
            left = self.readies.keys() - self._sent_on
            for peer in sorted(left) if left and self._is_second(now) else ():
                self._send_on(peer)
        self._keep_most(now)
        return False

    def _is_over(self, moved: frozenset[PeerId], now: float) -> bool:
        """As ``may_close``. A majority that is missing is waited for up to the cap: an abort
        would cost the early ones a whole round, and waiting costs nobody a training step."""
        if self._is_too_late():
            return True
        self._look_behind(moved)
        self._is_overdue = now >= self.close_at
        is_complete = self._is_complete(moved)
        if self._is_overdue or is_complete:
            camp = self.agreeing()[1]
            late = self._is_late(camp, self._live(), now)  # after the abort we ask them: waiting is no help
            if late or now >= self.give_up_at or self._is_hopeless(now):
                return True
            if not self.shortage(camp, now):
                return is_complete or now >= self._grace_until
            self._enough_at = None
        return False

    def _is_hopeless(self, now: float) -> bool:
        """Whether no camp can begin whoever still comes: the states differ, and only ``heal`` helps. That
        takes most of the swarm, which is waited for as long as between two rounds: their READYs may always be
        further apart than the deadline."""
        live, heard = self._live(), set(self._heard() or self.readies)
        missing = [peer for peer in live if peer not in heard and not self._is_past(peer)]
        told = {peer: self._told_state(peer) for peer in missing}
        camps = self._camps()
        for digest in told.values():
            if digest is not None:
                camps.setdefault(digest, [])
        may_begin = any(
            self._suffices([*camp, *(p for p in missing if told[p] in (None, digest))], live, now)
            for digest, camp in camps.items()
        )
        here, others = len(self.readies), sum(peer not in self.readies for peer in missing)
        may_heal = 2 * here <= len(live) < 2 * (here + others)
        self._awaits_most = not may_begin and may_heal and now < self._heals_until
        return not may_begin and not self._awaits_most

    def _told_state(self, peer: PeerId) -> bytes | None:
        """The state that ``peer`` says it would start this round from; None if it may start from any."""
        if (ready := self.readies.get(peer)) is not None:
            return ready.state_digest
        is_there = self._swarm.version_of(peer, self.fragment) == self.round - 1
        return self._swarm.digest_of(peer, self.fragment) if is_there else None

    def _look_behind(self, moved: frozenset[PeerId]) -> None:
        """Who replays the round before, or did so as the first was ready: it will be ready soon."""
        if not self._behind_s:
            return
        working, before, was_behind = self._swarm.working_on(self.fragment), self.round - 2, self._behind
        missing = [peer for peer in working if peer not in self.readies and peer not in moved]
        versions = ((peer, self._swarm.version_of(peer, self.fragment)) for peer in missing)
        late = [p for p, at in versions if at == before or (at == before + 1 and p in was_behind)]
        behind = set(filter(self._swarm.replays.is_awaited, late))
        self._behind = behind if len(behind) >= BEHIND_LEAST * len(working) else set()

    def _live(self) -> list[PeerId]:
        """Whose majority counts; with those who are done where the last one may make no round alone."""
        done = self._swarm.done_with(self.fragment)
        return sorted({*self._swarm.working_on(self.fragment), *self.readies, *done})

    def _is_too_late(self) -> bool:
        """Whether too many are done with the fragment for another round of it."""
        done = set(self._swarm.done_with(self.fragment)) - self.readies.keys()
        return bool(done) and len({*self._swarm.working_on(self.fragment), *self.readies}) <= len(done)

    def _is_complete(self, moved: frozenset[PeerId]) -> bool:
        """Whether nobody is left to wait for. A peer known to be elsewhere, or to be always late, is not
        waited for; one in ``moved`` has reached ``round - 1`` whatever its last status said."""
        habit = self._habit()
        heard = set(self._heard())
        return self._behind <= heard and all(
            peer in heard or not habit.is_awaited(peer) or not self._may_come(peer, moved)
            for peer in self._swarm.working_on(self.fragment)
        )

    def _habit(self) -> Punctuality:
        return self._swarm.last_readies if self.is_last else self._swarm.readies

    def note_punctuality(self, moved: frozenset[PeerId]) -> None:
        """At BEGIN: who came, and who was waited for in vain."""
        habit = self._habit()
        for peer in self._swarm.working_on(self.fragment):
            if peer in self.readies:
                habit.came(peer)
                self._swarm.replays.came(peer)
            elif self._is_overdue and peer in self._behind:
                self._swarm.replays.missed(peer, (self.fragment, self.round))
            elif self._is_overdue and self._may_come(peer, moved):
                habit.missed(peer, (self.fragment, self.round))

    def _may_come(self, peer: PeerId, moved: frozenset[PeerId]) -> bool:
        version = self._swarm.version_of(peer, self.fragment)
        if version is None or version == self.round - 1:
            return True
        # In the last rounds who is behind comes, too: else it makes one more alone, which all have to fetch.
        return version < self.round and (self.is_last or peer in moved)

    def agreeing(self) -> tuple[bytes, list[PeerId]]:
        """The state digest that most READYs start from, and its peers, sorted. Of equal camps the one that
        may begin with half of the swarm comes first (``shortage``), then the heavier one, then the larger
        digest."""
        camps = self._camps()

        def strength(digest: bytes) -> tuple[int, bool, float, bytes]:
            weight = sum(self.readies[peer].weight for peer in camps[digest])
            return len(camps[digest]), self._swarm.me in camps[digest], weight, digest

        best = max(camps, key=strength)
        return best, camps[best]

    def _heard(self) -> list[PeerId]:
        """Those who are ready and not missed since: who may be gone would keep a round from its end for as
        long as all its deadlines together."""
        return [peer for peer in sorted(self.readies) if not self._swarm.is_missed(peer)]

    def _camps(self) -> dict[bytes, list[PeerId]]:
        camps: dict[bytes, list[PeerId]] = {}
        for peer in self._heard() or sorted(self.readies):
            camps.setdefault(self.readies[peer].state_digest, []).append(peer)
        return camps

    def _suffices(self, camp: list[PeerId], live: list[PeerId], now: float) -> bool:
        size = min(len(camp), MAX_MEMBERS)
        return 2 * size > len(live) or (2 * size == len(live) and self._breaks_ties(camp, live, now))

    def _breaks_ties(self, camp: list[PeerId], live: list[PeerId], now: float) -> bool:
        """Half of the swarm is enough where we are in that half and first by hash: no other half can say
        so. Not if the other half has made this round already: then it is we who are late."""
        me = self._swarm.me
        first = me in camp and coordination_order(live, self.fragment, self.round)[0] == me
        return first and not self._is_late(camp, live, now)

    def _is_late(self, camp: list[PeerId], live: list[PeerId], now: float) -> bool:
        """Whether somebody of the other half of the swarm says that it has made this round."""
        others = [peer for peer in live if peer not in camp] if 2 * len(camp) == len(live) else []
        others = [peer for peer in others if not self._swarm.repute.is_passed_over(peer, now)]
        return any(map(self._is_past, others))

    def _is_made(self, camp: list[PeerId], now: float) -> bool:
        """Whether as many as ``camp`` has say that they made this round, though they are done with the
        fragment: who makes a run's last round once more makes another state of its version. Where they are
        more, even those who are passed over: who could not give their bytes in time are."""
        past = [p for p in self._here() if p not in camp and self._is_past(p)]
        believed = [peer for peer in past if not self._swarm.repute.is_passed_over(peer, now)]
        return len(past) > len(camp) or len(believed) >= len(camp)

    def _here(self) -> list[PeerId]:
        """Who trains, or did so and is done with the fragment."""
        views = self._swarm.live.items()
        return [peer for peer, view in views if view.training or self.fragment in view.finished]

    def _is_past(self, peer: PeerId) -> bool:
        """Whether ``peer`` says that it has made this round."""
        return (self._swarm.version_of(peer, self.fragment) or 0) >= self.round

    def shortage(self, camp: list[PeerId], now: float) -> str:
        """Why ``camp`` may not begin; empty if it may."""
        live = self._live()
        if self._is_too_late():
            return "most peers have nothing more to offer"
        if not self._heard():
            return "the links of all who were ready are broken"
        if self._is_made(camp, now):
            return "as many others have made this round already"
        if self._suffices(camp, live, now):
            return ""
        waited = f"within {now - self.first_at:.1f} s"
        if len(self.readies) > len(camp):
            return f"only {len(camp)} of {len(live)} live peers were ready with equal states {waited}"
        missing = named([peer for peer in live if peer not in camp])
        return f"only {len(camp)} of {len(live)} live peers were ready {waited} (missing {missing})"

    def begin(self, nonce: bytes, observed: Durations) -> Begin:
        """BEGIN for the agreeing camp, at most ``MAX_MEMBERS`` of it; the minority is told to catch up.
        ``nonce``: 16 bytes that tell this attempt from others with the same members."""
        digest, camp = self.agreeing()
        group = sorted(coordination_order(camp, self.fragment, self.round)[:MAX_MEMBERS])
        self._tell_behind(digest, camp)
        shape, place = self._swarm.shape, (self.fragment, self.round)
        rates = {peer: self._rates(peer) for peer in group}
        own_upload, assumed = self._swarm.my_upload_bytes_per_s(), shape.assumed_upload_bytes_per_s
        division = divide(
            shape.blocks[self.fragment], shape.block_bytes, rates, place, self._cheap_s, own_upload, assumed
        )
        parts_s = parts_deadline_s(division.transfer_s, observed, shape.parts_cap_s)
        live = self._live_count(len(group))
        if 2 * len(group) <= live + 1:  # no round comes of it if the means are late anywhere
            parts_s = min(SAFETY * parts_s, shape.parts_cap_s)
        begin = Begin(
            key=RoundKey(fragment=self.fragment, round=self.round),
            members=[self._member(peer) for peer in group],
            parts=[
                PartSpec(
                    owner=owner, start_block=start, stop_block=stop, senders=write_senders(sending, group)
                )
                for owner, (start, stop), sending in zip(
                    division.owners, division.ranges, division.senders, strict=True
                )
            ],
            state_digest=digest,
            parts_within_s=parts_s,
            result_within_s=2 * parts_s + bounds.GRACE_S,
            nonce=nonce,
            live=live,
        )
        seal_begin(begin, self._swarm.me)
        return begin

    def _live_count(self, size: int) -> int:
        """Of how many peers a quorum must sign. One more where half of them do not decide by hash."""
        live = {*self._live(), *self._here()} if size == 2 else set(self._live())
        count = max(size, len(live))
        if count % 2 == 0 and coordination_order(live, self.fragment, self.round)[0] != self._swarm.me:
            count += 1
        return min(count, 2 * size)  # of two that work, among others that are done: both

    def _rates(self, peer: PeerId) -> Rates:
        ready, believed = self.readies[peer], self._swarm.lateness.of_claim(peer)
        return Rates(ready.upload_bytes_per_s, ready.download_bytes_per_s, believed)

    def refuse(self, reason: str) -> None:
        """No round begins."""
        for peer in self._heal():
            self._outlet.send(peer, Waiting(fragment=self.fragment, round=self.round, refusal=reason))

    def _heal(self) -> list[PeerId]:
        """No camp may begin. If most of the swarm is here, it holds several histories and none has a
        majority: the others are told to adopt the state of the strongest camp, or nobody would ever begin
        again. Returns whom to tell of the abort: that camp, or everybody."""
        digest, camp = self.agreeing()
        most = max(len(self.alike(ready.state_digest)) for ready in self.readies.values())
        if 2 * len(self.readies) <= len(self._live()) or len(self.alike(digest)) < most:
            return sorted(self.readies)  # too few, or who is missed just now outnumbers the others
        self._tell_behind(digest, camp)
        return self.alike(digest)

    def _tell_behind(self, digest: bytes, camp: list[PeerId]) -> None:
        for peer in sorted(self.readies.keys() - set(self.alike(digest))):
            self._outlet.send(peer, behind_message(self.fragment, self.round, self.round - 1, digest, camp))

    def alike(self, digest: bytes) -> list[PeerId]:
        """Who is ready from this state, also those who are missed."""
        return [peer for peer in sorted(self.readies) if self.readies[peer].state_digest == digest]

    def _member(self, peer: PeerId) -> Member:
        ready = self.readies[peer]
        return Member(
            peer=peer, weight=ready.weight, base_version=ready.base_version, offer_id=ready.offer_id
        )


def attempt_nonce(me: PeerId, fragment: int, round_: int, counter: int, now: float) -> bytes:
    """16 bytes that no other attempt has: ``now`` is in it so that a restarted peer does not repeat
    itself."""
    text = f"{me}/{fragment}/{round_}/{counter}/{now!r}"
    return hashlib.sha256(text.encode()).digest()[: bounds.ATTEMPT_BYTES]


def behind_message(fragment: int, round_: int, version: int, digest: bytes, donors: list[PeerId]) -> Behind:
    """BEHIND for a peer that wanted ``round_`` while the majority is at ``version``."""
    assert len(digest) == DIGEST_BYTES
    return Behind(
        fragment=fragment, round=round_, version=version, state_digest=digest, donors=donors[:MAX_MEMBERS]
    )
