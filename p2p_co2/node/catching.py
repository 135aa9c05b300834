"""When and how this peer catches up: decides between replaying missed rounds and loading a fragment's whole
state.

Law: what is adopted is what the peers that this one hears agree on, by digest, as far as they can be asked; a
state that a majority contradicts is refused and its donor counted, and one that less than half have reached
is not loaded unless two of them hold it: a commit or a BEHIND of one liar, and a state of its own, were
enough. Replay is preferred, since it knows whether this peer's own work is in the missed means.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from p2p_co2.errors import DigestMismatch, RemoteProtocolError
from p2p_co2.node.apart import Apart
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.majority import Majority
from p2p_co2.node.replay import OTHER_HISTORY, checked_mean
from p2p_co2.protocol.catchup import (
    ROUND,
    STATE,
    CatchUpEvent,
    Disputed,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Loading,
)
from p2p_co2.protocol.rounds import Overheard
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Decision, Status
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from p2p_co2.node.node import Node

REPLAY_AT_MOST = 8
"""Missed rounds of one fragment that are replayed, if that costs less than half of its whole state."""
ROUND_AGAIN = 3
"""So often on the way to a version a round is asked for anew that came in part, and then no more for what
others' rounds need on a slow line: a whole state takes many times as long. Price: a donor that gives a round
in part and never all keeps us from the state for so much longer."""
AGAIN_AFTER_S = 5.0
NOTICE_AFTER_S = 3.0
"""A higher version seen in heartbeats is waited for this long: the round's own messages usually bring it."""


class Catching:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.majority = Majority(node)
        self.apart = Apart(node, self.majority)
        self._targets: dict[int, tuple[int, bytes, tuple[PeerId, ...]]] = {}
        self._noticed_at: dict[int, float] = {}
        self._looked_at: object = None
        self._looks_again = False
        """A fetch ended after the others were looked at: they may be further by now, and silent."""
        self._started_from: dict[int, int] = {}
        self._again_at: dict[int, float] = {}
        """When a fragment that could not be brought up is tried again."""
        self._told_of: dict[int, object] = {}
        """For which state of a fragment, and on the way to which version, it was told that it could not."""
        self._silent: dict[int, int] = {}
        """How often a missed round did not come, on the way to the target."""
        self._back: set[int] = set()
        """Fragments that go back to where most others are (``apart``)."""
        self._last: set[int] = set()
        """Fragments being brought to a last round that only few have (``Majority.last_version``)."""
        node.catchup.ask_swarm(self._vouch)

    @property
    def is_watching(self) -> bool:
        """Whether something was noticed that ``look_around`` has to look at again, news or not."""
        return bool(self._noticed_at or self.apart.since) or self._looks_again

    def look_again(self) -> None:
        """Something has changed of which membership does not tell."""
        self._looks_again = True

    def busy(self) -> bool:
        return bool(self._targets)

    def is_fetching(self, fragment: int) -> bool:
        return fragment in self._targets

    def go_to(self, fragment: int, version: int, digest: bytes, donors: tuple[PeerId, ...]) -> bool:
        """Bring ``fragment`` to at least ``version``; ``digest`` is that version's, or empty if not known.
        False if there is nowhere to go."""
        agreed = self._node.agreed[fragment]
        diverged = agreed.version == version and digest not in (b"", agreed.digest)
        if (agreed.version >= version and not diverged) or self._rests():
            return False
        known = self._targets.get(fragment)
        if known is None or known[0] < version:
            self._targets[fragment] = (version, digest, donors)
            self._last.discard(fragment)  # more than what few have is wanted now
        if known is None:
            self._started_from[fragment] = agreed.version
            self._fetch_next(fragment, whole=diverged)
        return True

    def overheard(self, event: Overheard) -> None:
        """A round that this peer listened to was committed: replay it. Its means were held against the
        commit, so no owner is to blame if it does not follow our history."""
        fragment = event.fragment
        if fragment not in self._targets:
            self._targets[fragment] = event.round, b"", event.owners
            self._started_from[fragment] = self._node.agreed[fragment].version
        decision = Decision.FromString(event.decision)
        goal = Goal(ROUND, fragment, event.round, event.owners)
        fetched = Fetched(goal, event.round, event.mean, decision, b"", event.owners, event.duration_s, 0)
        self._node.spawn(self._take(fetched))

    def overtaken(self, fragment: int) -> None:
        """A round of ours has brought ``fragment`` on. If that is as far as it was to be brought, what is
        still on its way is of no use, and would only be refused as too old: over a slow line minutes of
        it."""
        target, agreed = self._targets.get(fragment), self._node.agreed[fragment]
        if target is None or fragment in self._back or agreed.version < target[0]:
            return
        is_another = agreed.version == target[0] and target[1] not in (b"", agreed.digest)
        if self._node.catchup.fetching(fragment) and not is_another:
            self._node.catchup.forget(fragment, self._node.now())
            self._drop_target(fragment)

    def look_around(self, now: float) -> None:
        """Compare this peer's versions and digests with the heartbeats of the others."""
        looks_again, self._looks_again = self._looks_again, False
        if self._rests():
            return
        joining = self.majority.is_joining()
        seen = (self._node.membership.revision, tuple(self._node.agreed), joining)
        if seen == self._looked_at and not (self._noticed_at or self.apart.since or looks_again):
            return
        self._looked_at = seen
        if self._is_with_all():
            self._noticed_at.clear()
            self.apart.since.clear()
            return
        for fragment, agreed in enumerate(self._node.agreed):
            if not self._turns_back(fragment, now):
                self._look_at(fragment, agreed, joining, now)

    def _look_at(self, fragment: int, agreed: AgreedVersion, joining: bool, now: float) -> None:
        ours = self.majority.digest(fragment, agreed.version)
        contradicted = ours not in (None, agreed.digest)
        newest, is_last = self._newest(fragment, contradicted)
        if newest <= agreed.version and not contradicted:
            self._noticed_at.pop(fragment, None)
            return
        since = self._noticed_at.setdefault(fragment, now)
        if self._node.rounds.is_completing(fragment):
            return  # its bytes are on their way
        if fragment in self._targets:
            donors = self.majority.donors(fragment, *self._targets[fragment][:2])
            self._node.catchup.add_donors(fragment, donors, now)
            return
        if now < self._again_at.get(fragment, 0.0):
            return
        if now - since < NOTICE_AFTER_S and not joining:
            return
        version = max(newest, agreed.version)
        digest = self.majority.digest(fragment, version) or b""
        if newest <= agreed.version:
            text = f"fragment {fragment} differs from the majority at version {version}: taking theirs"
            self._node.report(ev.Warned, text=text)
        donors = self.majority.donors(fragment, version, digest)
        if self.go_to(fragment, version, digest, donors) and is_last:
            self._last.add(fragment)

    def _turns_back(self, fragment: int, now: float) -> bool:
        """Whether this peer goes over to where most others are, who follow another history than ours."""
        camp = self.apart.where_to(fragment, now)
        is_busy = fragment in self._targets or self._node.rounds.is_completing(fragment)
        if camp is None or is_busy or now < self._again_at.get(fragment, 0.0):
            return False
        version = self._node.agreed[fragment].version
        self._node.report(
            ev.Warned,
            text=f"fragment {fragment}: our version {version} is of another history than {camp.version} of "
            f"most others, or of the strongest: going over to theirs; {self.apart.loss(fragment, camp)}",
        )
        self._targets[fragment] = camp.version, camp.digest, camp.holders
        self._started_from[fragment] = version
        self._back.add(fragment)
        self._fetch_next(fragment, whole=True)
        return True

    def _newest(self, fragment: int, contradicted: bool) -> tuple[int, bool]:
        """The version to go to, and whether it is a last round that only few have."""
        newest = self.majority.swarm_version(fragment)
        if contradicted or newest > self._node.agreed[fragment].version or not self._replayable(fragment):
            return newest, False
        last = self.majority.last_version(fragment)
        return max(newest, last), last > newest

    def _is_with_all(self) -> bool:
        """Whether every other peer says that it is where this one is: most of the time they all are."""
        agreed = self._node.agreed
        versions, digests = tuple(mine.version for mine in agreed), tuple(mine.digest for mine in agreed)
        live = self._node.membership.live.values()
        return all(info.versions == versions and info.digests == digests for info in live)

    def wake(self, now: float) -> None:
        """This peer goes on after a rest: what it missed is fetched at once."""
        self._noticed_at = {fragment: now - NOTICE_AFTER_S for fragment in range(len(self._node.agreed))}
        self.look_around(now)

    def _rests(self) -> bool:
        return self._node.progress.local.phase == Status.PAUSED

    def handle(self, event: CatchUpEvent) -> None:
        if isinstance(event, ExportWanted):
            self._node.spawn(self._node.deciding.export(event.fragment))
        elif isinstance(event, DonorRefused):
            self._node.refuse(event.peer, event.reason, event.detail)
        elif isinstance(event, Disputed):
            self._node.report(ev.Warned, text=str(event))
        elif isinstance(event, Loading):
            self._node.report(ev.StateLoading, **asdict(event))
        elif isinstance(event, FetchFailed):
            self._failed(event)
        elif isinstance(event, Fetched):
            self._node.spawn(self._take(event))

    # ---- fetching

    def _fetch_next(self, fragment: int, whole: bool = False) -> None:
        if fragment not in self._targets:
            return
        version, digest, donors = self._targets[fragment]
        near_digest = self.majority.digest(fragment, version) or digest
        current = self._node.agreed[fragment].version
        alive = tuple(peer for peer in donors if peer in self._node.membership.live)
        alive += tuple(p for p in self.majority.donors(fragment, version, near_digest) if p not in alive)
        rounds = self._replayable(fragment)
        if not whole and 0 < version - current <= rounds:
            goal = Goal(ROUND, fragment, current + 1, alive)
        elif self.majority.is_one_word(fragment, version):
            self._give_up(fragment, f"only few have a state of version {version}", is_proved=False)
            return
        else:
            # A state a little older will do, where donors are giving that one: the rounds since are replayed.
            oldest = version if whole else max(current + 1, version - rounds // 2)
            goal = Goal(STATE, fragment, version, alive, near_digest, oldest)
        self._node.catchup.want(goal, self._node.now())

    def _fetch_whole(self, fragment: int) -> None:
        """A round does not follow our state: the state after it instead, unless only few have that."""
        if fragment not in self._last:
            self._fetch_next(fragment, whole=True)
            return
        self._drop_target(fragment)
        self._again_at[fragment] = self._node.now() + AGAIN_AFTER_S

    def _replayable(self, fragment: int) -> int:
        return min(REPLAY_AT_MOST, self._node.catchup.shape.replayable(fragment))

    def _failed(self, event: FetchFailed) -> None:
        fragment = event.goal.fragment
        if event.goal.what == ROUND and event.goal.donors and fragment in self._targets.keys() - self._last:
            times = self._silent[fragment] = self._silent.get(fragment, 0) + 1
            still_had = event.chunks_given > 0 and not event.newest_version
            self._fetch_next(fragment, whole=not still_had or times > ROUND_AGAIN)
            return
        self._give_up(fragment, event.reason)

    def _give_up(self, fragment: int, reason: str, *, is_proved: bool = True) -> None:
        """What is wanted is nowhere to be had, or only of few (not ``is_proved``: one that made a last round
        alone cannot give it in its first moment): heartbeats will tell where most are."""
        target, by_few = self._targets.get(fragment), fragment in self._last
        self._drop_target(fragment)
        if target is not None:
            # Nobody has its bytes: do not wait for them.
            self._node.rounds.forget_outcome(fragment, target[0])
        self._again_at[fragment] = self._node.now() + AGAIN_AFTER_S
        if not by_few:  # else one peer's word would end an offer that the others are making a round of
            self._node.give_up_offer(fragment)
        news = self._node.agreed[fragment], target and target[0]
        if self._told_of.get(fragment) != news:  # it is tried every few seconds, to the end of a run
            self._told_of[fragment] = news
            self._node.report(ev.Warned, text=f"fragment {fragment} could not catch up yet: {reason}")

    async def _take(self, event: Fetched) -> None:
        await (self._take_round(event) if event.goal.what == ROUND else self._take_state(event))
        self._node.pump()  # what is wanted next is asked for at once

    async def _take_round(self, event: Fetched) -> None:
        fragment = event.goal.fragment
        try:
            mean = checked_mean(self._node, event)
        except RemoteProtocolError as error:
            if error.reason != OTHER_HISTORY:  # else it may be we who went astray
                self._blame(event, error.reason, error.detail)
            self._fetch_whole(fragment)
            return
        if mean is not None:
            await self._node.deciding.take(mean, event.decision)
        self._went_on(event, "replay")

    async def _take_state(self, event: Fetched) -> None:
        fragment = event.goal.fragment
        if fragment in self._back and self.apart.camp(fragment) is None:
            self._drop_target(fragment)  # the others have come to us meanwhile
            return
        try:  # as when it was promised (``_vouch``), but for what was heard since
            if self.majority.is_contradicted(fragment, event.version, event.digest, event.donors):
                raise DigestMismatch(f"the state of version {event.version} is not what most peers report")
            if event.version > AHEAD_AT_MOST and self.majority.is_too_far(fragment, event.version):
                raise DigestMismatch(f"version {event.version} is further than most peers are")
            agreed = AgreedVersion(event.version, event.digest)
            await self._node.deciding.adopt(fragment, event.data, agreed, goes_back=fragment in self._back)
        except (DigestMismatch, RemoteProtocolError) as error:
            is_overtaken = event.version < self._node.agreed[fragment].version and fragment not in self._back
            self._drop_target(fragment)
            if is_overtaken:  # a round was quicker just now: nobody is to blame
                return
            self._blame(event, "bad state", str(error))
            self._again_at[fragment] = self._node.now() + AGAIN_AFTER_S
            self._node.give_up_offer(fragment)
            return
        self._went_on(event, "state")

    def _went_on(self, event: Fetched, how: str) -> None:
        fragment = event.goal.fragment
        agreed = self._node.agreed[fragment]
        target = self._targets.get(fragment)
        if target is not None and agreed.version < target[0] and (how == "replay" or event.version > 0):
            if how == "replay" and agreed.version < event.version:
                self._fetch_whole(fragment)  # the round did not follow our state
            else:
                self._fetch_next(fragment)
            return
        self._drop_target(fragment)
        self._node.report(
            ev.CaughtUp,
            fragment=fragment, from_version=self._started_from.pop(fragment, agreed.version),
            to_version=agreed.version, how=how, donor=event.donor, donors=len(event.donors),
            bytes=len(event.data), duration_s=event.duration_s,
            rounds_given_up=self.apart.given_up.pop(fragment, 0),
        )  # fmt: skip

    def _drop_target(self, fragment: int) -> None:
        """Its fetch has ended, one way or the other."""
        self._targets.pop(fragment, None)
        self._silent.pop(fragment, None)
        self._last.discard(fragment)
        self._back.discard(fragment)
        self._noticed_at.pop(fragment, None)
        self._looks_again = True
        self._node.deciding.settle_offer(fragment)

    def _blame(self, event: Fetched, reason: str, detail: str) -> None:
        """All its donors signed for these very bytes."""
        for donor in event.donors:
            self._node.refuse(donor, reason, detail)
            self._node.catchup.quarantine(donor, reason, self._node.now())

    def _vouch(self, donor: PeerId, fragment: int, version: int, digest: bytes) -> bool | None:
        """See ``catchup.goals.Vouch``. One word against another contradicts nothing."""
        return self.majority.bears_out(donor, fragment, version, digest)
