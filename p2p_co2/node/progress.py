"""How far this peer and its swarm are: what it tells the others, and what it concludes from what they tell.

Conclusions are published as plain values that other threads may read at any time. Law: they rest on
heartbeats of live peers alone, but for what this peer lacks when it leaves, and the position on their lower
median: of three, one liar moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from p2p_co2.protocol.membership import PeerInfo, positions
from p2p_co2.protocol.rounds import PeerView
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import Status
from p2p_co2.protocol.wire.status import finished_bits
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from p2p_co2.node.node import Node

CONCLUDED_EVERY_S, CONCLUDED_PEERS_PER_S = 0.25, 200.0
"""Conclusions that wait for others are drawn so often at most: among many there is always news. Among few
more often, since at the end of a run all stand still until they know of each other that all agree."""
LISTENED_S = 12.0
"""A peer that came when the run was over, and has not yet heard the DHT or all whom it lists, takes whom it
heard first for all there are only after this: as long as ``trainer.connection`` listens to them."""
ENDS_ROUNDS = 0.2
"""A run comes to its end so many rounds before it: from then on nobody rests."""
WAITS_FOR_LOST = (
    "this peer is done, but most others went without a word and may only be suspended: waiting for them "
    "while the DHT lists them, no longer than an end may take"
)
WAITS_FOR_THEIR_STATE = (
    "the others went without a word before this peer had their state: it waits for one of them to come back, "
    "as long as it may take to join; if they do not, see whether this machine is still online"
)
LACKS, LACKS_NAMED = "the run is over, and this peer leaves without what others hold", 4
"""What it says then begins so, and names so many fragments."""
NEWCOMERS_WAIT = 3.0
"""So many times as long must nothing move before a newcomer is left: after 60 s in which its donor says
nothing it asks another."""
PLACED_EVERY_S = 1.0
"""The swarm's position is worked out at most this often; in between the clock carries it on."""


@dataclass(frozen=True)
class LocalProgress:
    """What the training thread says of itself; replaced whole, so that the network thread may read it at any
    time."""

    phase: Status.Phase = Status.JOINING
    position: float = 0.0
    position_at: float = 0.0
    """In rounds, and at what time of the node's monotonic clock."""
    inner_steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    finished: frozenset[int] = frozenset()
    """Fragments for which this peer has nothing more to offer in this run."""
    is_over: bool = False
    """Whether it takes no more steps: its position stands still."""


class SwarmProgress:
    """``settled``: no live peer trains any more, all are at our versions and digests, and all of them say the
    same of those that they hear: somebody whom only they hear is still waited for. For one that joins,
    ``full``: as many have joined as a run can have; ``abreast``: nobody is ahead by more than a round, or at
    all of a fragment of which we have only the start; ``heard``: somebody was
    heard as all this was concluded; ``met``: somebody ever, who has joined;
    ``left_behind``: the others were ahead, and went before this peer had what they had: a history of its own
    is not what it came for; ``may_be_back``: and they trained and said no goodbye, so that it may be the way
    to them that is broken. ``swarm_position``: median position of the other peers that train in rounds, and
    the node's monotonic time it was true at.
    ``newcomers``: somebody live still joins; the last of them came at ``newcomer_at``, or was
    there when this peer had done training. ``rounds_per_s``: how fast positions move by themselves; 0 if
    they count inner steps. ``over``: fragments of which no more rounds are made in this run."""

    def __init__(self, node: Node, rounds_per_s: float, rounds: int = 0) -> None:
        self._node, self.rounds_per_s, self._rounds = node, rounds_per_s, rounds
        self.local = LocalProgress()
        self._step_s = 0.0
        """What this peer's last inner steps took, each."""
        self.settled = self.abreast = self.left_behind = self.may_be_back = False
        self.heard = self.met = self.newcomers = self.full = False
        self.newcomer_at, self._joining = -math.inf, frozenset[PeerId]()
        self.over: frozenset[int] = frozenset()
        self._furthest = [version.version for version in node.agreed]
        """Per fragment, where the swarm was when somebody who is in it was heard last."""
        self._goes_on = True
        """Whether anybody trained then."""
        self.swarm_position: tuple[float, float] | None = None
        self._status = Status()
        self._status_of: object = None
        self._placed_at, self._began_at = -math.inf, node.now()
        self._is_at_rest = False
        """Whether all that we hear are done where we are: ``settled``, but for what they say of theirs."""
        self._concluded_of: object = None
        self._concluded_at = -math.inf
        self._has_told_of_lost = self._has_told_of_gone = False
        self._inside, self._went_silently = set[PeerId](), True
        """Who was heard while this peer joined, and had joined; whether they went without a word."""
        self._waits_for_time = False
        """Whether the next conclusion may differ without any news."""
        self._differed_at = -math.inf
        """When somebody who was here, and done, held anything else than this peer last; infinity while it
        is so."""
        self._are_ahead_at_work = False
        """Whether two make a last round beyond what this peer holds. (One may try for long.)"""
        self._worked_at = -math.inf
        """When a peer that has trained to the end was in a round last, as it was told; infinity while one
        is."""

    def show(self, local: LocalProgress) -> None:
        """What the training thread says now."""
        known, self.local = self.local, local
        steps = local.inner_steps - known.inner_steps
        if steps > 0 and known.inner_steps:  # time before the first was no step
            self._step_s = (local.position_at - known.position_at) / steps

    def status(self) -> Status:
        """What the next heartbeats say of this peer."""
        local, agreed, upload = self.local, self._node.agreed, self._node.upload_bytes_per_s()
        membership = self._node.membership
        heartbeat_s = membership.heartbeat_s if membership.quiet_s and self.rests else 0.0
        content = (local, tuple(agreed), upload, self._is_at_rest, heartbeat_s)
        if content != self._status_of:
            self._status_of = content
            self._status = Status(
                phase=local.phase,
                inner_steps=local.inner_steps,
                tokens=local.tokens,
                loss=local.loss,
                versions=[version.version for version in agreed],
                digests=[version.digest for version in agreed],
                upload_bytes_per_s=upload,
                download_bytes_per_s=self._node.download_bytes_per_s,
                software=self._node.software,
                finished=finished_bits(local.finished, len(agreed)),
                process=self._node.process,
                settled=self._is_at_rest,
                heartbeat_s=heartbeat_s,
                model=model.digest if (model := membership.strangers.model) is not None else 0,
            )
        self._status.position = self.position()
        return self._status  # the messages that carry it hold copies

    @property
    def rests(self) -> bool:
        """Whether this peer only trains, or pauses, and the run's end is not near: in the quiet of a round of
        minutes it has little to tell."""
        local, rounds = self.local, self._rounds
        if local.phase not in (Status.TRAINING, Status.PAUSED) or local.finished:
            return False
        return not rounds or self.position() < rounds - ENDS_ROUNDS

    def _view(self, info: PeerInfo) -> PeerView:
        """Made once for each news of a peer: there are many peers and few news."""
        if info.view is None:
            said = info.status
            info.view = _view_of(
                said.phase, info.versions, said.upload_bytes_per_s, said.download_bytes_per_s, said.finished,
                info.digests, info.is_missed,
            )  # fmt: skip
        assert isinstance(info.view, PeerView)
        return info.view

    def position(self) -> float:
        """This peer's position now: what the training thread last said, carried on by the clock. Who takes no
        more steps stands at the run's end, though a last step or a pause may have brought it further."""
        local = self.local
        if local.is_over and self._rounds:
            return min(local.position, self._rounds)
        moving = local.phase == Status.TRAINING and not local.is_over
        elapsed_s = self._node.clock.monotonic() - local.position_at if moving else 0.0
        return max(0.0, local.position + elapsed_s * self.rounds_per_s)

    def views(self) -> dict[PeerId, PeerView]:
        """The live peers, this one among them, as the rounds machine wants to know them."""
        views = {peer: info.view or self._view(info) for peer, info in self._node.membership.live.items()}
        versions = tuple(version.version for version in self._node.agreed)
        # One that only finishes must not wait for itself where it coordinates the last rounds of others.
        is_training = _works(self.local.phase, len(self.local.finished) == len(versions))
        views[self._node.me] = PeerView(
            self._node.upload_bytes_per_s(), is_training, versions, self._node.download_bytes_per_s,
            self.local.finished, step_s=self._step_s,
        )  # fmt: skip
        return views

    def paces(self) -> dict[PeerId, float]:
        """How fast this peer may send bulk to those with a download cap: their rate, shared by all who may be
        sending to them at once."""
        live = self._node.membership.live
        caps = {p: cap for p, info in live.items() if (cap := info.status.download_bytes_per_s) > 0}
        if not caps:
            return {}
        senders = max(1, sum(info.status.phase == Status.TRAINING for info in live.values()))
        return {peer: cap / senders for peer, cap in caps.items()}

    def is_needed(self, within_s: float, settled: bool = False) -> bool:
        """Whether a state, or a round that somebody missed, is on its way to this peer or from it, or a last
        round is made, which it would miss; or others that are done hold more or less (who has it may just now
        be busy giving it to somebody else); or was, or did, of late. Where all have ``settled``, only a
        newcomer may still need it. Other threads may ask."""
        now = self._node.now()
        if settled:  # one that came just now has yet to find its donors, and they to write their states out
            within_s = NEWCOMERS_WAIT * within_s
            came = now - self.newcomer_at <= within_s
            return self.newcomers and (came or self._node.catchup.moves(now, within_s))
        moves = self._node.catchup.moves(now, within_s)
        works = now - self._worked_at <= within_s
        differs = now - self._differed_at <= within_s
        return moves or works or differs

    def missing(self) -> str:
        """In words, what others hold and this peer has not, or will hold; empty if that is nothing. Other
        threads may ask."""
        majority = self._node.catching.majority
        pairs = ((agreed.version, majority.newest(f)) for f, agreed in enumerate(self._node.agreed))
        late = [f"fragment {f}: version {mine} of {new}" for f, (mine, new) in enumerate(pairs) if mine < new]
        if self._are_ahead_at_work:
            late.append("a last round that may still be made")
        if not late:
            return ""
        named = ", ".join(late[:LACKS_NAMED]) + (", ..." if late[LACKS_NAMED:] else "")
        return f"{LACKS} ({named}), and waits for it no longer; on slow lines see `p2p-co2 plan`"

    def unsettle(self) -> None:
        """Our state may have changed: another thread reads what was concluded, and it must not outlive what
        it was about."""
        self.settled, self._is_at_rest, self._concluded_of = False, False, None

    def note_over(self) -> None:
        """Look which fragments are ``over``; before the training thread hears of an offer that failed."""
        rounds = self._node.rounds
        self.over = frozenset(f for f in range(len(self._node.agreed)) if rounds.is_over(f))

    def conclude_at(self) -> float:
        """When to ``conclude`` again; never while it would say the same. A peer that trains is in no
        hurry."""
        if self.local.phase == Status.TRAINING or self._seen() == self._concluded_of:
            return math.inf
        soon_s = len(self._node.membership.live) / CONCLUDED_PEERS_PER_S
        return self._concluded_at + (
            CONCLUDED_EVERY_S if self._waits_for_time else min(CONCLUDED_EVERY_S, soon_s)
        )

    def _seen(self) -> tuple[object, ...]:
        """What a conclusion rests on. An offer of ours that ends may be the last thing that happens."""
        busy, finished = self._node.catching.busy(), self.local.finished
        return self._node.membership.revision, tuple(self._node.agreed), busy, finished

    def conclude(self, now: float) -> None:
        """Compare this peer with the others; while it trains nobody asks for more than the position."""
        self.note_over()
        quiet_s = self._node.membership.quiet_s
        every_s = max(PLACED_EVERY_S, quiet_s / 2) if quiet_s and self.rests else PLACED_EVERY_S
        if now - self._placed_at >= every_s or self.swarm_position is None:
            self._placed_at = now
            at = self._node.clock.monotonic() - (self._node.now() - now)
            near = sorted(positions(self._node.membership.live.values(), now, self.rounds_per_s))
            self.swarm_position = (near[(len(near) - 1) // 2], at) if near else None
        if self.local.phase == Status.TRAINING:
            self.unsettle()
            self._node.catching.majority.note_newest(is_done=False)
            return
        self._look_for_last_rounds(now)  # others' positions move without any news
        seen = self._seen()
        if seen == self._concluded_of:
            return
        self._concluded_of, self._concluded_at = seen, now
        agreed, live = self._node.agreed, self._node.membership.live.values()
        idle = not self._node.catching.busy()
        self._look_for_newcomers(now)
        if self.local.phase == Status.JOINING:
            self._look_for_the_swarm(tuple(version.version for version in agreed), idle, now)
        here = tuple(version.version for version in agreed), tuple(version.digest for version in agreed)
        done = [info for info in live if info.status.phase not in (Status.JOINING, Status.PAUSED)]
        membership = self._node.membership
        hears_more = membership.awaited > 0 or not membership.candidates.has_looked
        is_new = hears_more and now - self._began_at < LISTENED_S
        is_cut_off = self._waits_for_time = is_new or self._is_cut_off(now)
        if is_cut_off:
            self._concluded_of = None  # time alone ends that; others are where we cannot see them
        alike = idle and all(
            info.status.phase == Status.DRAINING and (info.versions, info.digests) == here for info in done
        )
        # A last offer may commit when all others seem to be done: who left before would miss it.
        alike = alike and not any(view.training for view in self.views().values())
        self._node.catching.majority.note_newest(self.local.phase == Status.DRAINING)
        self._note_others(done, here, now)
        at_rest = alike and not is_cut_off
        is_done = self.local.phase == Status.DRAINING
        if is_done and alike and self._is_cut_off(now) and not self._has_told_of_lost:
            self._has_told_of_lost = True
            self._node.report(ev.Warned, text=WAITS_FOR_LOST)
        self.settled = is_done and at_rest and all(info.status.settled for info in done)
        if is_done and at_rest != self._is_at_rest:
            self._is_at_rest = at_rest
            self._node.refresh()
            self._node.membership.announce(now)
            self._node.pump()

    def _is_cut_off(self, now: float) -> bool:
        membership = self._node.membership
        return membership.departed.is_cut_off(len(membership.live), now)

    def _look_for_last_rounds(self, now: float) -> None:
        """Who has not come to the run's end may train on for long, and is not meant. Nor is who is past it by
        more than a round: its step may take hours, or hang, and whoever offers the last of its work stands
        still."""

        def is_at_end(info: PeerInfo) -> bool:
            return self._is_end(info.status.position, now - info.status_at) or any(info.status.finished)

        live = self._node.membership.live.values()
        ending = (info for info in live if info.status.phase == Status.DRAINING or is_at_end(info))
        views = [view for view in map(self._view, ending) if view.training]
        mine = [agreed.version for agreed in self._node.agreed]
        limits = [self._node.catching.majority.limit(f) for f in range(len(mine) if views else 0)]
        at_work = [
            f
            for view in views
            if len(view.versions) == len(mine)
            for f, version in enumerate(view.versions)
            if f not in view.finished and mine[f] <= version <= limits[f]
        ]
        self._are_ahead_at_work = len(at_work) > len(set(at_work))
        if views or _works(self.local.phase, len(self.local.finished) == len(mine)):
            self._worked_at = math.inf
        elif self._worked_at == math.inf:
            self._worked_at = now

    def _is_end(self, position: float, age_s: float) -> bool:
        """Whether one that trains, and said so long ago where it was, is at the run's end now."""
        ends_at = self._rounds - (ENDS_ROUNDS if self.rounds_per_s else 0.0) if self._rounds else math.inf
        return ends_at <= position + age_s * self.rounds_per_s < self._rounds + 1

    def _note_others(self, others: Sequence[PeerInfo], here: tuple[object, object], now: float) -> None:
        """Whether any of ``others`` that are done holds anything else."""
        ended = ((one.versions, one.digests) for one in others if one.status.phase == Status.DRAINING)
        differs = any(held != here for held in ended)
        if differs:
            self._differed_at = math.inf
        elif self._differed_at == math.inf:
            self._differed_at = now

    def _look_for_newcomers(self, now: float) -> None:
        live = self._node.membership.live.items()
        joining = frozenset(peer for peer, info in live if info.status.phase == Status.JOINING)
        if not joining <= self._joining:
            self.newcomer_at = now
        self._joining, self.newcomers = joining, bool(joining)

    def _look_for_the_swarm(self, versions: tuple[int, ...], idle: bool, now: float) -> None:
        near = self._node.membership.live
        live = near.values()
        inside = [info.versions for info in live if info.status.phase != Status.JOINING]
        is_there, self.full = bool(inside), len(inside) >= self._node.most_peers
        self.met = self.met or is_there
        if inside and 2 * len(inside) >= len(live):  # a few alone could hold up all who join
            middle = (len(inside) - 1) // 2
            of_fragments = zip(*(held for held in inside if len(held) == len(versions)), strict=True)
            self._furthest = [sorted(held, reverse=True)[min(middle, len(held) - 1)] for held in of_fragments]
        majority = self._node.catching.majority
        newest = [majority.reached(fragment) for fragment in range(len(versions))]
        if is_there:
            self._goes_on = any(info.status.phase == Status.TRAINING for info in live)
        is_behind = not _keeps_up(versions, self._furthest, self._goes_on)
        self.abreast = idle and not is_behind and _keeps_up(versions, newest, self._goes_on)
        self.left_behind = is_behind and not is_there
        for peer, info in near.items():
            (self._inside.discard if info.status.phase == Status.JOINING else self._inside.add)(peer)
        if len(self._inside) > MAX_PEERS:
            self._inside &= near.keys()
        went_silently = self._node.membership.departed.went_silently(self._inside)
        if is_there or went_silently is not None:  # else it was seen when they went
            self._went_silently = went_silently is not False
        self.may_be_back = self.left_behind and self._goes_on and self._went_silently
        if self.may_be_back and not self._has_told_of_gone:
            self._has_told_of_gone = True
            self._node.report(ev.Warned, text=WAITS_FOR_THEIR_STATE)
        self.heard = bool(near)  # last: other threads read it first


@lru_cache(MAX_PEERS)
def _view_of(
    phase: Status.Phase, versions: tuple[int, ...], upload_rate: float, download_rate: float,
    finished_bits: bytes, digests: tuple[bytes, ...], is_missed: bool,
) -> PeerView:  # fmt: skip
    bits = int.from_bytes(finished_bits, "little")
    finished = frozenset(f for f in range(len(versions)) if bits >> f & 1)
    is_training = _works(phase, len(finished) == len(versions))
    return PeerView(upload_rate, is_training, versions, download_rate, finished, digests, 0.0, is_missed)


def _works(phase: Status.Phase, has_finished: bool) -> bool:
    """Whether a peer has a part in rounds. One that drains has as long as an offer of it is in flight: who
    made the same round without it, because nobody else trains any more, would contradict those it is with."""
    return phase == Status.TRAINING or (phase == Status.DRAINING and not has_finished)


def _keeps_up(versions: Sequence[int], newest: Sequence[int], goes_on: bool) -> bool:
    """Whether no version is more than a round behind, or at all where there is only the start or no round is
    to come any more."""
    slack = 1 if goes_on else 0
    return all(new - mine <= (slack if mine else 0) for mine, new in zip(versions, newest, strict=False))
