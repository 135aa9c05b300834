"""When and how this peer catches up: carries out ``catchup.policy`` with the machine and the tensor side.

Laws: what is adopted is what the peers that this one hears agree on, by digest. A state that a majority
contradicts is refused and its donors counted. One that less than half have reached is not loaded unless two
of them hold it. A round is replayed only upon the state that it was made upon, if half of the voters signed
it. Replay is preferred: it knows whether this peer's own work is in the missed means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from p2p_co2.digest import digest as digest_of
from p2p_co2.errors import DigestMismatch, Offence, RemoteProtocolError
from p2p_co2.node.outer_state import LedgerCalls, Offers
from p2p_co2.node.state import Effects, PeerState
from p2p_co2.protocol.catchup import goals, policy
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.catchup.policy import NOTICE_AFTER_S, HeldState, Mine, Move, PeerReport, View, Why
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, agreed_mean
from p2p_co2.protocol.membership import Membership, PeerInfo
from p2p_co2.protocol.rounds import PayloadShape, Rounds, open_decision, signers_of
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.heartbeat import SLOWEST_HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Status

REPLAY_AT_MOST = 8
"""Missed rounds of one fragment that are replayed, if that costs less than half of its whole state."""


class Agreement:
    """What heartbeats and this peer's own past say of where the swarm is. ``state``: where this peer is;
    ``membership``: where the others say that they are. Views are remade when the membership changed.

    Law: to a peer that has come to the run's end, the word of those counts on that have left it since. Else
    who stays there is most of the swarm, however few they are."""

    def __init__(self, membership: Membership, state: PeerState) -> None:
        self._membership = membership
        self._state = state
        self._views: dict[int, tuple[int, View]] = {}
        self._newest = [-1] * len(state.agreed)
        """Versions that anybody held, or had, since this peer is done."""
        self._ended: dict[PeerId, PeerInfo] = {}
        """Who was done, too, since then."""

    # ---- what others say

    def _heard(self) -> dict[PeerId, PeerInfo]:
        """The peers whose word counts."""
        live = {p: info for p, info in self._membership.live.items() if self._state.counts(p)}
        if self._state.local.phase != Status.DRAINING:
            self._ended = {}
            return live
        self._ended |= {p: info for p, info in live.items() if info.status.phase == Status.DRAINING}
        return self._ended | live

    @property
    def revision(self) -> int:
        """Grows with what is heard."""
        return self._membership.revision

    def view(self, fragment: int) -> View:
        known = self._views.get(fragment)
        revision = self._membership.revision
        if known is None or known[0] != revision:
            view = {
                peer: PeerReport(
                    HeldState(info.versions[fragment], info.digests[fragment]),
                    info.status.phase,
                    info.status.offers_for(fragment),
                )
                for peer, info in self._heard().items()
                if len(info.digests) == len(info.versions) == len(self._state.agreed)
            }
            known = self._views[fragment] = revision, view
        return known[1]

    def mine(self, fragment: int) -> Mine:
        agreed = self._state.agreed[fragment]
        local = self._state.local
        is_done = local.phase == Status.DRAINING or fragment in local.finished
        return Mine(
            HeldState(agreed.version, agreed.digest), self._state.past(fragment), local.phase, is_done
        )

    def donors(
        self, fragment: int, version: int, digest: bytes, first: Collection[PeerId] = ()
    ) -> tuple[PeerId, ...]:
        """As ``policy.donors``, after those asked ``first``: who is live."""
        live = {peer: said for peer, said in self.view(fragment).items() if peer in self._membership.live}
        asked = [peer for peer in first if peer in live]
        return (*asked, *(p for p in policy.donors(live, fragment, version, digest) if p not in asked))

    def at(self, fragment: int) -> tuple[View, Mine]:
        """What ``policy`` decides from."""
        return self.view(fragment), self.mine(fragment)

    def objection(self, fragment: int, held: HeldState, givers: Collection[PeerId]) -> str:
        """What speaks against a state that was loaded, in words; empty if nothing does."""
        view, mine = self.at(fragment)
        if policy.is_contradicted(view, mine, givers, held):
            return f"the state of version {held.version} is not what most peers report"
        if held.version > policy.limit(view, mine):
            return f"version {held.version} is further than most peers are"
        return ""

    def is_with_all(self) -> bool:
        """Whether every other peer says that it is where this one is: most of the time they all are."""
        here = self._state.held
        live = self._membership.live.values()
        return all((info.versions, info.digests) == here for info in live)

    # ---- what is lacking at the end

    def note_newest(self) -> None:
        """Remember what others hold, whoever goes; nothing while this peer is not done."""
        for fragment, known in enumerate(self._newest):
            if self._state.local.phase != Status.DRAINING:
                self._newest[fragment] = -1
                continue
            view = self.view(fragment)
            most = policy.limit(*self.at(fragment))
            held = [said.held.version for said in view.values() if said.phase in policy.MOVING]
            self._newest[fragment] = max([known, *(version for version in held if version <= most)])

    def lacking(self) -> list[tuple[int, int, int]]:
        """(fragment, our version, the newest that anybody held) where that is newer. Other threads may
        ask."""
        pairs = zip(self._state.held[0], self._newest, strict=True)
        return [(fragment, mine, new) for fragment, (mine, new) in enumerate(pairs) if mine < new]


@dataclass
class Destination:
    """Where a fragment is being brought, and why."""

    version: int
    digest: bytes
    donors: tuple[PeerId, ...]
    why: Why
    from_version: int


async def fetch_buffers(
    machine: CatchUp, goal: goals.Goal, within_s: float, now: Callable[[], float], pump: Callable[[], None]
) -> Buffer:
    """All bytes of a ``goal`` of buffers; empty if nobody gave them in time."""
    taken = asyncio.get_running_loop().create_future()
    machine.take_buffers = lambda data: None if taken.done() else taken.set_result(data)
    machine.fetcher.want(goal, now())
    pump()
    try:
        data: Buffer = await asyncio.wait_for(taken, within_s)
    except TimeoutError:
        machine.fetcher.forget(goal.fragment, now())
        return b""
    return data


class CatchupController:
    """``run`` and ``shape`` are what decisions are checked against; ``outer`` takes what was fetched."""

    def __init__(
        self, machine: CatchUp, rounds: Rounds, agreement: Agreement, state: PeerState,
        outer: LedgerCalls, offers: Offers, run: bytes, shape: PayloadShape, effects: Effects,
    ) -> None:  # fmt: skip
        self._machine = machine
        self._rounds = rounds
        self._agreement = agreement
        self._state = state
        self._outer = outer
        self._offers = offers
        self._run = run
        self._shape = shape
        self._do = effects
        self._targets: dict[int, Destination] = {}
        self._noticed_at: dict[int, tuple[Why, float]] = {}
        self._again_at: dict[int, float] = {}
        """When one that could not be brought up is tried again: all have said by then where they are."""
        self._told_of: dict[int, object] = {}
        """For which state of a fragment, and on the way to which version, it was told that it could not."""
        self._looked_at: object = None
        """What was known when the others were looked at last; None to look again, news or not."""
        machine.fetcher.ask_swarm(
            lambda donor, fragment, version, digest: policy.bears_out(
                *agreement.at(fragment), donor, HeldState(version, digest)
            )
        )
        state.when_moved(self._moved)

    def is_watching(self) -> bool:
        """Whether something was noticed that ``look_around`` has to look at again, news or not."""
        return bool(self._noticed_at) or self._looked_at is None

    def busy(self) -> bool:
        return bool(self._targets)

    def moves(self, now: float, within_s: float) -> bool:
        """As ``CatchUp.moves``."""
        return self._machine.moves(now, within_s)

    # ---- where to go

    def go_to(self, fragment: int, version: int, digest: bytes, donors: tuple[PeerId, ...]) -> bool:
        """Bring ``fragment`` to at least ``version``; ``digest`` is that version's, or empty if not known.
        False if there is nowhere to go."""
        agreed = self._state.agreed[fragment]
        known = self._targets.get(fragment)
        diverged = agreed.version == version and digest not in (b"", agreed.digest)
        if (agreed.version >= version and not diverged) or self._state.local.phase == Status.PAUSED:
            return False
        if known is None:
            self._targets[fragment] = Destination(version, digest, donors, Why.AHEAD, agreed.version)
            self._fetch_next(fragment, whole=diverged)
        elif known.version < version:
            known.version = version
            known.digest = digest
            known.donors = donors
            known.why = Why.AHEAD
        return True

    def _moved(self, fragment: int, agreed: AgreedVersion) -> None:
        """A fragment has moved. Once it is as far as it was to be brought, nothing more is fetched."""
        target = self._targets.get(fragment)
        if target is None or target.why is Why.OTHER or agreed.version < target.version:
            return
        is_another = agreed.version == target.version and target.digest not in (b"", agreed.digest)
        if self._machine.fetcher.fetching(fragment) and not is_another:
            self._machine.fetcher.forget(fragment, self._do.now())
            self._drop_target(fragment)

    def wake(self, now: float) -> None:
        """This peer goes on after a rest: what it missed is fetched at once."""
        fragments = range(len(self._state.agreed))
        self._noticed_at = {fragment: (Why.AHEAD, now - NOTICE_AFTER_S) for fragment in fragments}
        self.look_around(now)

    def look_around(self, now: float) -> None:
        """Compare this peer's versions and digests with the heartbeats of the others."""
        phase = self._state.local.phase
        known = self._looked_at
        self._looked_at = (self._agreement.revision, tuple(self._state.agreed), phase)
        if phase == Status.PAUSED or (known == self._looked_at and not self._noticed_at):
            return
        if self._agreement.is_with_all():
            self._noticed_at.clear()
            return
        for fragment in range(len(self._state.agreed)):
            self._look_at(fragment, phase == Status.JOINING, now)

    def _look_at(self, fragment: int, joining: bool, now: float) -> None:
        why, since = self._noticed_at.pop(fragment, (None, now))
        move = policy.decide(*self._agreement.at(fragment), self._replayable(fragment) > 0)
        if move is None:
            return
        since = since if why is move.why else now
        self._noticed_at[fragment] = move.why, since
        if self._rounds.is_completing(fragment):
            return  # its bytes are on their way
        if (target := self._targets.get(fragment)) is not None:
            self._machine.fetcher.add_donors(
                fragment, self._agreement.donors(fragment, target.version, target.digest), now
            )
            return
        early = now - since < move.wait_s and not joining
        if not early and now >= self._again_at.get(fragment, 0.0):
            self._go(fragment, move)

    def _go(self, fragment: int, move: Move) -> None:
        here = self._state.agreed[fragment].version
        if move.why is Why.OTHER:
            alone = self._state.alone[fragment]
            what = f", {alone} rounds of this peer alone among it" if alone else ""
            text = (
                f"fragment {fragment}: our version {here} is of another history than {move.version} of most "
                f"others, or of the strongest: going over to theirs; what only ours holds is lost{what}"
            )
            self._do.report(ev.Warned, text=text)
        donors = self._agreement.donors(fragment, move.version, move.digest)
        self._targets[fragment] = Destination(move.version, move.digest, donors, move.why, here)
        self._fetch_next(fragment, whole=move.why is Why.OTHER)

    # ---- fetching

    def handle(self, event: goals.CatchUpEvent) -> None:
        match event:
            case goals.ExportWanted():
                self._do.spawn(self._outer.export(event.fragment))
            case goals.DonorRefused():
                self._do.refuse(event.peer, event.reason, event.detail)
            case goals.Loading():
                self._do.report(ev.StateLoading, **asdict(event))
            case goals.Fetched(goal=goals.Goal(what=goals.BUFFERS)):
                self._machine.take_buffers(event.data)
            case goals.FetchFailed(goal=goals.Goal(what=goals.BUFFERS)):
                self._machine.take_buffers(b"")
            case goals.Fetched():
                self._do.spawn(self._take(event))
            case goals.FetchFailed(goal=goal):
                target = self._targets.get(goal.fragment)
                is_round = goal.what == goals.ROUND and bool(goal.donors)
                if is_round and target is not None and target.why is not Why.LAST:
                    is_here = goal.version <= self._state.agreed[goal.fragment].version  # our own bytes came
                    self._fetch_next(goal.fragment, whole=not is_here)
                else:
                    self._give_up(goal.fragment, event.reason)

    def _fetch_next(self, fragment: int, whole: bool = False) -> None:
        if (target := self._targets.get(fragment)) is None:
            return
        version = target.version
        current = self._state.agreed[fragment].version
        digest = target.digest
        if target.why is not Why.OTHER:
            digest = policy.digest_at(*self._agreement.at(fragment), version) or digest
        alive = self._agreement.donors(fragment, version, digest, target.donors)
        rounds = self._replayable(fragment)
        if not whole and 0 < version - current <= rounds:
            goal = goals.Goal(goals.ROUND, fragment, current + 1, alive)
        elif target.why is not Why.OTHER and policy.is_one_word(*self._agreement.at(fragment), version):
            self._give_up(fragment, f"only few have a state of version {version}")
            return
        else:
            # A state a little older will do, where donors are giving that one: the rounds since are replayed.
            oldest = version if whole else max(current + 1, version - rounds // 2)
            goal = goals.Goal(goals.STATE, fragment, version, alive, digest, oldest)
        self._machine.fetcher.want(goal, self._do.now())

    def _fetch_whole(self, fragment: int) -> None:
        """A round does not follow our state: the state after it instead, unless only few have that."""
        if (target := self._targets.get(fragment)) is None or target.why is not Why.LAST:
            self._fetch_next(fragment, whole=True)
            return
        self._drop_target(fragment)
        if (move := self._other_history(fragment)) is not None:
            self._go(fragment, move)
        else:
            self._again_at[fragment] = self._do.now() + SLOWEST_HEARTBEAT_S

    def _replayable(self, fragment: int) -> int:
        return min(REPLAY_AT_MOST, self._machine.fetcher.shape.replayable(fragment))

    def _give_up(self, fragment: int, reason: str) -> None:
        """What is wanted is nowhere to be had, or only of few: heartbeats will tell where most are."""
        target = self._targets.get(fragment)
        self._drop_target(fragment)
        if target is not None:  # nobody has its bytes: do not wait for them
            self._rounds.forget_outcome(fragment, target.version)
        self._again_at[fragment] = self._do.now() + SLOWEST_HEARTBEAT_S
        if target is None or target.why is not Why.LAST:  # one peer's word ends no offer of ours
            self._offers.give_up(fragment)
        news = self._state.agreed[fragment], target and target.version
        if self._told_of.get(fragment) != news:  # it is tried every few seconds, to the end of a run
            self._told_of[fragment] = news
            self._do.report(ev.Warned, text=f"fragment {fragment} could not catch up yet: {reason}")

    async def _take(self, event: goals.Fetched) -> None:
        await (self._take_round(event) if event.goal.what == goals.ROUND else self._take_state(event))
        self._do.pump()  # what is wanted next is asked for at once

    async def _take_round(self, event: goals.Fetched) -> None:
        try:
            mean = self._checked_mean(event)
        except RemoteProtocolError as error:
            if error.reason != Offence.OTHER_HISTORY:  # else it may be we that went astray
                self._blame(event, error.reason, error.detail)
            self._fetch_whole(event.goal.fragment)
            return
        if mean is not None:
            await self._outer.take(mean, event.decision)
        self._went_on(event, "replay")

    def _checked_mean(self, event: goals.Fetched) -> AgreedMean | None:
        """The mean of a replayed round, held against its certificate; None if this peer is past it
        already. Raises ``RemoteProtocolError``."""
        fragment = event.goal.fragment
        outcome = open_decision(event.decision, self._run, self._shape)
        agreed = self._state.agreed[fragment]
        if (outcome.key.fragment, outcome.key.round) != (fragment, event.version):
            raise RemoteProtocolError("bad decision", "of another round")
        if not self._rounds.swarm.believes(signers_of(event.decision, outcome), fragment):
            raise RemoteProtocolError(Offence.OTHER_HISTORY, "few of those that train here signed it")
        if agreed.version != event.version - 1:
            return None
        if outcome.state_digest != agreed.digest:
            raise RemoteProtocolError(Offence.OTHER_HISTORY, "the round follows another state than ours")
        block_bytes = self._shape.block_bytes
        for part in outcome.parts:
            piece = event.data[part.start_block * block_bytes : part.stop_block * block_bytes]
            if digest_of(piece) != part.digest:
                raise RemoteProtocolError("wrong digest", f"of the mean of round {event.version}")
        return agreed_mean(outcome, event.data)

    async def _take_state(self, event: goals.Fetched) -> None:
        fragment = event.goal.fragment
        target = self._targets.get(event.goal.fragment)
        goes_back = target is not None and target.why is Why.OTHER
        if goes_back and not self._other_history(fragment):
            self._drop_target(fragment)  # the others have come to us meanwhile
            return
        held = HeldState(event.version, event.digest)
        try:  # as when it was promised, but for what was heard since
            if words := self._agreement.objection(fragment, held, event.donors):
                raise DigestMismatch(words)
            await self._outer.adopt(fragment, event.data, AgreedVersion(*held), goes_back)
        except (DigestMismatch, RemoteProtocolError) as error:
            is_overtaken = event.version < self._state.agreed[fragment].version and not goes_back
            self._drop_target(fragment)
            if not is_overtaken:  # else a round was quicker just now: nobody is to blame
                self._blame(event, "bad state", str(error))
                self._again_at[fragment] = self._do.now() + SLOWEST_HEARTBEAT_S
                self._offers.give_up(fragment)
            return
        self._went_on(event, "state")

    def _other_history(self, fragment: int) -> Move | None:
        """Where to go over to, if most others hold another history than ours."""
        move = policy.decide(*self._agreement.at(fragment), replayable=False)
        return move if move is not None and move.why is Why.OTHER else None

    def _went_on(self, event: goals.Fetched, how: str) -> None:
        fragment = event.goal.fragment
        agreed = self._state.agreed[fragment]
        target = self._targets.get(fragment)
        if target is not None and agreed.version < target.version and (how == "replay" or event.version > 0):
            if how == "replay" and agreed.version < event.version:
                self._fetch_whole(fragment)  # the round did not follow our state
            else:
                self._fetch_next(fragment)
            return
        from_version = agreed.version if target is None else target.from_version
        self._drop_target(fragment)
        self._do.report(
            ev.CaughtUp, fragment=fragment, from_version=from_version, to_version=agreed.version, how=how,
            donor=event.donors[0], donors=len(event.donors), bytes=len(event.data),
            duration_s=event.duration_s, rounds_given_up=self._state.given_up.pop(fragment, 0),
        )  # fmt: skip

    def _drop_target(self, fragment: int) -> None:
        """Its fetch has ended, one way or the other."""
        self._targets.pop(fragment, None)
        self._noticed_at.pop(fragment, None)
        self._looked_at = None
        self._offers.settle(fragment)

    def _blame(self, event: goals.Fetched, reason: str, detail: str) -> None:
        """All its donors signed for these very bytes."""
        for donor in event.donors:
            self._do.refuse(donor, reason, detail)
            self._machine.fetcher.quarantine(donor, reason, self._do.now())
