"""A coordinator before BEGIN: it waits for READYs of one round and closes the group.

Laws: who may begin is the ``Roster``'s question. The group closes when everybody who can come is there, or at
the adaptive deadline. A majority that is missing then is waited for, up to the cap. The answer is always a
BEGIN or a reason in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import seal_begin, write_senders
from p2p_co2.protocol.rounds.bounds import DIGEST_BYTES
from p2p_co2.protocol.rounds.deadline import (
    SAFETY,
    Cadence,
    gather_least_s,
    parts_deadline_s,
)
from p2p_co2.protocol.rounds.parts import Division, LineRates, divide
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm, named
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_MEMBERS
from p2p_co2.wire.messages_pb2 import Begin, Behind, Member, PartSpec, Ready, RoundKey, Waiting


class Roster:
    """The READYs of one round, by peer, and whether they may begin it: questions, without time or messages.

    Those that start from equal states are a camp. Laws: a round begins only with a majority of the live
    training peers that agree on the state they start from. Half of them is enough for the peer that is first
    by rendezvous hash, in its own half. None begins where most are done, or that as many others have made
    already. Of newcomers a group takes so many that its ``voters`` are a quorum without them.
    """

    def __init__(self, fragment: int, round_: int, swarm: RoundSwarm) -> None:
        self.fragment = fragment
        self.round = round_
        self.readies: dict[PeerId, Ready] = {}
        self._swarm = swarm

    # ---- who is there

    @property
    def is_last(self) -> bool:
        """Whether most of those who are ready train no more: one peer's word alone makes nobody wait."""
        return 2 * sum(ready.last for ready in self.readies.values()) > len(self.readies)

    def heard(self) -> list[PeerId]:
        """Those who are ready and not missed since: who may be gone would hold the round up through all its
        deadlines."""
        return [peer for peer in sorted(self.readies) if not self._swarm.is_missed(peer)]

    def live(self) -> list[PeerId]:
        """Whose majority counts."""
        return sorted({*self._voting(self._swarm.working_on(self.fragment)), *self._voting(self.readies)})

    def _voting(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if peer in self._swarm.voters]

    def group(self, camp: list[PeerId]) -> list[PeerId]:
        """Who of ``camp`` is taken in, at most ``MAX_MEMBERS``; sorted."""
        order = coordination_order(camp, self.fragment, self.round)
        live = self.live()
        voting = self._voting(order)
        newcomers = [peer for peer in order if peer not in voting]
        room = 2 * len(voting) - len(live) - (not self._decides(live) or self._swarm.me not in voting)
        return sorted([*voting, *newcomers[: max(0, room)]][:MAX_MEMBERS])

    def live_count(self, group: list[PeerId]) -> int:
        """Of how many peers a quorum of ``group`` must sign. One more where half of them do not decide by
        hash. One more of two where others train beside them, too: nobody believes a commit with one
        signature."""
        live = {*self.live(), *self._here()} if len(group) == 2 else set(self.live())
        count = len({*live, *group})
        are_seen = len(self._voting(group)) == count == 2 < len(self._swarm.working_on(self.fragment))
        if count % 2 == 0 and (are_seen or not self._decides(live)):
            count += 1
        return min(count, 2 * len(group))  # of two that work, among others that are done: both

    def _decides(self, live: Collection[PeerId]) -> bool:
        """Whether this peer is the first of them by hash."""
        return coordination_order(live, self.fragment, self.round)[:1] == [self._swarm.me]

    def _here(self) -> list[PeerId]:
        """Of the voters, who trains, or did so and is done with the fragment."""
        views = self._swarm.live.items()
        return self._voting(peer for peer, view in views if view.training or self.fragment in view.finished)

    def _is_past(self, peer: PeerId) -> bool:
        """Whether ``peer`` says that it has made this round."""
        return (self._swarm.version_of(peer, self.fragment) or 0) >= self.round

    def is_too_late(self) -> bool:
        """Whether too many are done with the fragment for another round of it."""
        return self._swarm.is_over(self.fragment, self.readies.keys())

    # ---- camps

    def agreeing(self) -> tuple[bytes, list[PeerId]]:
        """The state digest that most voters' READYs start from, and its peers, sorted. Of equal camps our own
        comes first, then the heavier one, then that of the larger digest."""
        camps: dict[bytes, list[PeerId]] = {}
        for peer in self.heard() or sorted(self.readies):
            camps.setdefault(self.readies[peer].state_digest, []).append(peer)

        def strength(digest: bytes) -> tuple[int, bool, float, bytes]:
            weight = sum(self.readies[peer].weight for peer in camps[digest])
            return len(self._voting(camps[digest])), self._swarm.me in camps[digest], weight, digest

        best = max(camps, key=strength)
        return best, camps[best]

    def alike(self, digest: bytes) -> list[PeerId]:
        """Who is ready from this state, also those who are missed."""
        return [peer for peer in sorted(self.readies) if self.readies[peer].state_digest == digest]

    # ---- whether a camp may begin

    def _suffices(self, camp: list[PeerId], now: float) -> bool:
        """Whether most of the swarm is in ``camp``. Half of it is enough where we are in it and first by
        hash, and no newcomer is there. Not if the other half has made this round already: then it is we who
        are late. With those who are done it must be half in any case."""
        live = self.live()
        size = min(len(self._voting(camp)), MAX_MEMBERS)
        if not self._swarm.believes(camp, self.fragment):
            return False
        if 2 * size != len(live) or self._swarm.me not in camp:
            return 2 * size > len(live)
        working = self._swarm.working_on(self.fragment)
        is_all = len(self._voting(working)) == len(working)  # others may count newcomers that we do not
        return is_all and self._decides(live) and not self.is_late(camp, now)

    def is_late(self, camp: list[PeerId], now: float) -> bool:
        """Whether somebody of the other half of the swarm says that it has made this round."""
        live = self.live()
        others = [peer for peer in live if peer not in camp] if 2 * len(camp) == len(live) else []
        others = [peer for peer in others if not self._swarm.repute.is_passed_over(peer, self.fragment, now)]
        return any(map(self._is_past, others))

    def _is_made(self, camp: list[PeerId], now: float) -> bool:
        """Whether as many as ``camp`` has say that they made this round, though they are done with the
        fragment. Made once more it would be another state of its version. Where they are more, also those who
        are passed over count."""
        past = [p for p in self._here() if p not in camp and self._is_past(p)]
        believed = [peer for peer in past if not self._swarm.repute.is_passed_over(peer, self.fragment, now)]
        return len(past) > len(camp) or len(believed) >= len(camp)

    def shortage(self, now: float, waited_s: float) -> str:
        """Why the strongest camp may not begin; empty if it may."""
        camp = self.agreeing()[1]
        live = self.live()
        if self.is_too_late():
            return "most peers have nothing more to offer"
        if not self.heard():
            return "the links of all who were ready are broken"
        if self._is_made(camp, now):
            return "as many others have made this round already"
        if self._suffices(camp, now):
            return ""
        waited = f"within {waited_s:.1f} s"
        if len(self.readies) > len(camp):
            return f"only {len(camp)} of {len(live)} live peers were ready with equal states {waited}"
        missing = named([peer for peer in live if peer not in camp])
        return f"only {len(camp)} of {len(live)} live peers were ready {waited} (missing {missing})"


class Gathering:
    """The READYs of one round, from the first to BEGIN or abort. ``adaptive_s``: how long the others are
    waited for, as past rounds suggest; ``in_time_until``: who comes by then is worth waiting for."""

    def __init__(
        self,
        roster: Roster,
        swarm: RoundSwarm,
        outlet: Outlet,
        *,
        cadence: Cadence,
        adaptive_s: float,
        now: float,
    ) -> None:
        self.roster = roster
        self._swarm = swarm
        self._outlet = outlet
        self._cadence = cadence
        self.first_at = now
        self._adaptive_s = adaptive_s
        cap_s = cadence.gather_cap_s(roster.round)
        self.in_time_until = now + cap_s
        self._behind: set[PeerId] = set()
        """Peers one round behind that are worth waiting for."""
        self.give_up_at = now + max(adaptive_s, bounds.GATHER_CAP_S)
        self._is_overdue = False
        self._least_s = gather_least_s(cap_s, swarm.my_step_s())
        self._enough_at: float | None = None
        """Since when those who are ready may begin."""

    def ready(self, message: Ready, sender: PeerId, now: float) -> None:
        """Take or repeat a READY, and send the receipt."""
        self.roster.readies[sender] = message
        if self._enough_at is None and not self.shortage(now):
            self._enough_at = now
        fragment = self.roster.fragment
        round_ = self.roster.round
        within_s = self.get_timer() - now
        receipt = Waiting(fragment=fragment, round=round_, begins_within_s=max(0.0, within_s))
        self._outlet.send(sender, receipt)

    def shortage(self, now: float) -> str:
        """Why no round may begin; empty if one may."""
        return self.roster.shortage(now, now - self.first_at)

    # ---- time

    @property
    def close_at(self) -> float:
        """Until when the others are waited for."""
        least_s = self._cadence.behind_s if self._behind else 0.0
        last_s = self._cadence.last_gather_s if self.roster.is_last else 0.0
        return self.first_at + max(self._adaptive_s, least_s, last_s)

    def get_timer(self) -> float:
        """The deadline; once that has passed without a majority, the end of all patience."""
        if not self._is_overdue:
            return self.close_at
        return self.give_up_at if self._enough_at is None else min(self._grace_until, self.give_up_at)

    @property
    def _grace_until(self) -> float:
        """Where one READY came long before the others, the second makes a majority after the deadline. The
        third, of the same moment, is given this grace: else it was left out, and of every round after."""
        return 0.0 if self._enough_at is None else self._enough_at + self._least_s

    def may_close(self, moved: frozenset[PeerId], now: float) -> bool:
        """Whether to begin, or to give up. ``moved``: peers known to have reached ``round - 1``. A majority
        that is missing is waited for up to the cap: an abort would cost the early ones a whole round."""
        if self.roster.is_too_late():
            return True
        self._look_behind(moved)
        self._is_overdue = now >= self.close_at
        is_complete = self._is_complete(moved)
        if not self._is_overdue and not is_complete:
            return False
        if now >= self.give_up_at or (is_complete and self.roster.is_late(self.roster.agreeing()[1], now)):
            return True  # to ask those that have made it
        if not self.shortage(now):
            return is_complete or now >= self._grace_until
        self._enough_at = None
        return False

    # ---- who else comes

    def _look_behind(self, moved: frozenset[PeerId]) -> None:
        """Who replays the round before, or did so as the first was ready: it will be ready soon."""
        if not self._cadence.behind_s:
            return
        fragment = self.roster.fragment
        before = self.roster.round - 2
        was_behind = self._behind
        working = self._swarm.working_on(fragment)
        missing = [peer for peer in working if peer not in self.roster.readies and peer not in moved]
        versions = ((peer, self._swarm.version_of(peer, fragment)) for peer in missing)
        late = [p for p, at in versions if at == before or (at == before + 1 and p in was_behind)]
        self._behind = set(filter(self._swarm.readies.is_awaited, late))

    def _is_complete(self, moved: frozenset[PeerId]) -> bool:
        """Whether nobody is left to wait for: not a peer that is known to be elsewhere, or always late. One
        in ``moved`` has reached ``round - 1`` whatever its last status said."""
        habit = self._swarm.readies
        heard = set(self.roster.heard())
        return self._behind <= heard and all(
            peer in heard or not habit.is_awaited(peer) or not self._may_come(peer, moved)
            for peer in self._swarm.working_on(self.roster.fragment)
        )

    def note_punctuality(self, moved: frozenset[PeerId]) -> None:
        """At BEGIN: who came, and who was waited for in vain."""
        habit = self._swarm.readies
        place = (self.roster.fragment, self.roster.round)
        for peer in self._swarm.working_on(self.roster.fragment):
            if peer in self.roster.readies:
                habit.came(peer)
            elif self._is_overdue and (peer in self._behind or self._may_come(peer, moved)):
                habit.missed(peer, place)

    def _may_come(self, peer: PeerId, moved: frozenset[PeerId]) -> bool:
        round_ = self.roster.round
        version = self._swarm.version_of(peer, self.roster.fragment)
        if version is None or version == round_ - 1:
            return True
        # In the last rounds who is behind comes, too: else it makes one more alone, which all have to fetch.
        return version < round_ and (self.roster.is_last or peer in moved)

    # ---- the end

    def begin(self, nonce: bytes) -> Begin:
        """BEGIN for the agreeing camp, at most ``MAX_MEMBERS`` of it; the minority is told to catch up.
        ``nonce``: 16 bytes that tell this attempt from others with the same members."""
        digest, camp = self.roster.agreeing()
        fragment = self.roster.fragment
        round_ = self.roster.round
        group = self.roster.group(camp)
        self._tell_behind(digest, camp)
        rates = {peer: self._rates(peer) for peer in group}
        division = divided(self._swarm, self._cadence, (fragment, round_), rates)
        parts_cap_s = self._swarm.shape.parts_cap_s
        parts_s = parts_deadline_s(division.transfer_s, self._cadence.slices, parts_cap_s)
        live = self.roster.live_count(group)
        if 2 * len(group) <= live + 1:  # no round comes of it if the means are late anywhere
            parts_s = min(SAFETY * parts_s, parts_cap_s)
        parts = zip(division.owners, division.ranges, division.senders, strict=True)
        begin = Begin(
            key=RoundKey(fragment=fragment, round=round_),
            members=[self._member(peer) for peer in group],
            parts=[
                PartSpec(owner=owner, start_block=first, stop_block=stop, senders=write_senders(who, group))
                for owner, (first, stop), who in parts
            ],
            state_digest=digest, parts_within_s=parts_s, result_within_s=2 * parts_s + bounds.GRACE_S,
            nonce=nonce, live=live,
        )  # fmt: skip
        seal_begin(begin, self._swarm.me)
        return begin

    def _rates(self, peer: PeerId) -> LineRates:
        ready = self.roster.readies[peer]
        may_own = peer in self._swarm.voters and not self._swarm.repute.is_doubted(peer)
        believed = self._swarm.lateness.of_claim(peer) if may_own else 0.0
        return LineRates(ready.upload_bytes_per_s, ready.download_bytes_per_s, believed)

    def _member(self, peer: PeerId) -> Member:
        ready = self.roster.readies[peer]
        return Member(
            peer=peer, weight=ready.weight, base_version=ready.base_version, offer_id=ready.offer_id
        )

    def refuse(self, reason: str) -> None:
        """No round begins."""
        for peer in sorted(self.roster.readies):
            fragment = self.roster.fragment
            round_ = self.roster.round
            self._outlet.send(peer, Waiting(fragment=fragment, round=round_, refusal=reason))

    def _tell_behind(self, digest: bytes, camp: list[PeerId]) -> None:
        fragment = self.roster.fragment
        round_ = self.roster.round
        for peer in sorted(self.roster.readies.keys() - set(self.roster.alike(digest))):
            self._outlet.send(peer, behind_message(fragment, round_, round_ - 1, digest, camp))


def divided(
    swarm: RoundSwarm, cadence: Cadence, place: tuple[int, int], rates: dict[PeerId, LineRates]
) -> Division:
    """How the round at ``place`` (fragment, round) is divided among the members of ``rates``."""
    shape = swarm.shape
    upload = swarm.my_upload_bytes_per_s()
    return divide(
        shape.blocks[place[0]], shape.block_bytes, rates, place, cadence.cheap_s, upload,
        shape.assumed_upload_bytes_per_s,
    )  # fmt: skip


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
