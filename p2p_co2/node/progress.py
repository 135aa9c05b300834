"""What a peer concludes from heartbeats: where the swarm is, and whether this peer has arrived, or may go.

    joins    the others are heard, and this peer is abreast of them, or they have left it behind
    trains   only the swarm's position is of interest
    is done  all that are heard hold the same and say so (settled), or this peer stays for who differs

At the end each has offered the rest of its work in last rounds, for which all live peers gather longer. Then
a peer lingers as a donor while anybody that it hears has more to offer, holds anything else, or joins.

Law: conclusions rest on heartbeats of live peers alone, and the position on the lower median of those whose
word counts (``rounds.voters``): of three, one liar moves nothing. Nor is it further than the commits of this
peer's state bear out (``BORNE_OUT_ROUNDS``). They are plain values, replaced whole: other threads may read
them at any time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from p2p_co2.node.catchup import Agreement, CatchupController
from p2p_co2.node.state import PeerState
from p2p_co2.node.status import StatusWriter, Times, view_of
from p2p_co2.protocol.catchup import policy
from p2p_co2.protocol.membership import Membership, PeerInfo, positions
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.messages_pb2 import Status

CONCLUDED_EVERY_S, CONCLUDED_PEERS_PER_S = 0.25, 200.0
"""Conclusions that wait for others are drawn so often at most: among many there is always news. Among few
more often, since at the end of a run all stand still until they know of each other that all agree."""
BORNE_OUT_SHARE, BORNE_OUT_ROUNDS = 1.25, 8.0
"""Others are believed to be at so many times this peer's version, and so many rounds, at most, or where it is
itself: rounds also pass without a commit. What is beyond counts as the same moment of an earlier round."""
LISTENED_S = 12.0
"""A peer that came when the run was over, and has not yet heard the DHT or all whom it lists, takes whom it
heard first for all there are only after this: as long as ``trainer.connection`` listens to them."""
LACKS, LACKS_NAMED = "the run is over, and this peer leaves without what others hold", 4
"""What it says then begins so, and names so many fragments."""


@dataclass(frozen=True)
class Conclusions:
    """``settled``: no live peer trains any more, all are at our versions and digests, and say the same of
    those that they hear: somebody whom only they hear is still waited for. ``held``: the (versions, digests)
    of this peer that it was about.

    For one that joins: ``heard``: somebody; ``met``: somebody ever, who has joined; ``full``: as many have
    joined as a run can have; ``abreast``: nobody is ahead by more than a round, or at all of a fragment of
    which we have only the start; ``left_behind``: the others were ahead, and went before this peer had what
    they had: a history of its own is not what it came for."""

    held: object = None
    settled: bool = False
    heard: bool = False
    met: bool = False
    full: bool = False
    abreast: bool = False
    left_behind: bool = False
    goes_on: bool = True
    """Whether anybody trained when somebody who has joined was heard last."""


class SwarmProgress:
    """``conclude`` is asked at ``conclude_at``. ``swarm_position``: median position of the other peers that
    train in rounds, and the node's monotonic time it was true at. ``most_peers``: how many a run can have."""

    def __init__(
        self, state: PeerState, membership: Membership, agreement: Agreement, writer: StatusWriter,
        times: Times, fetches: CatchupController, most_peers: int,
    ) -> None:  # fmt: skip
        self._state = state
        self._membership = membership
        self._agreement = agreement
        self.writer = writer
        self._times = times
        self._fetches = fetches
        self._most_peers = most_peers
        self._began_at = times.now()
        self.conclusions = Conclusions()
        self.swarm_position: tuple[float, float] | None = None
        self._placed_at = self._concluded_at = self._differed_at = -math.inf
        """``_differed_at``: when somebody last was there for whom this peer stays; infinity while one is."""
        self._concluded_of: object = None
        self._furthest = list(state.held[0])
        """Per fragment, where the swarm was when somebody who is in it was heard last."""

    @property
    def settled(self) -> bool:
        """As concluded, of what this peer holds now. Other threads may ask."""
        known = self.conclusions
        return known.settled and known.held == self._state.held

    def is_needed(self, within_s: float, settled: bool = False) -> bool:
        """Whether somebody is heard, or was within so long, that this peer stays for; or a state, or a round
        that somebody missed, is on its way to it or from it. Where all have ``settled``: whether somebody
        still joins. Other threads may ask."""
        if settled:
            return self._differed_at == math.inf
        now = self._times.now()
        return now - self._differed_at <= within_s or self._fetches.moves(now, within_s)

    def missing(self) -> str:
        """In words, what others hold and this peer has not; empty if that is nothing. Other threads may
        ask."""
        late = [f"fragment {f}: version {mine} of {new}" for f, mine, new in self._agreement.lacking()]
        if not late:
            return ""
        named = ", ".join(late[:LACKS_NAMED]) + (", ..." if late[LACKS_NAMED:] else "")
        return f"{LACKS} ({named}), and waits for it no longer; on slow lines see `p2p-co2 plan`"

    def conclude_at(self) -> float:
        """When to ``conclude`` again; never while it would say the same. A peer that trains is in no
        hurry."""
        if self._state.local.phase == Status.TRAINING or self._seen() == self._concluded_of:
            return math.inf
        soon_s = len(self._membership.live) / CONCLUDED_PEERS_PER_S
        return self._concluded_at + (CONCLUDED_EVERY_S if self._concluded_of is None else soon_s)

    def _seen(self) -> tuple[object, ...]:
        """What a conclusion rests on. An offer of ours that ends may be the last thing that happens."""
        state = self._state
        return self._membership.revision, state.held, state.local.finished, self._fetches.busy()

    def conclude(self, now: float) -> bool:
        """Compare this peer with the others; while it trains nobody asks for more than the position. Whether
        what this peer tells has changed by that: others wait to hear it."""
        self._place(now)
        state = self._state
        membership = self._membership
        self._agreement.note_newest()
        if state.local.phase == Status.TRAINING:
            self.conclusions = replace(self.conclusions, settled=False)
            self._concluded_of = None
            self.writer.is_at_rest = False
            return False
        seen = self._seen()
        if seen == self._concluded_of:
            return False
        self._concluded_of = seen
        self._concluded_at = now
        idle = not self._fetches.busy()
        live = membership.live.values()
        was_at_rest = self.writer.is_at_rest
        known = self._look_for_the_swarm(idle) if state.local.phase == Status.JOINING else self.conclusions
        done = [info for info in live if info.status.phase not in (Status.JOINING, Status.PAUSED)]
        if waits := self._may_hear_more(now):
            self._concluded_of = None  # time alone ends that
        # A last offer may commit when all others seem to be done: who left before would miss it.
        is_done = state.local.phase == Status.DRAINING and idle and not state.works
        self.writer.is_at_rest = at_rest = is_done and not waits and all(map(self._is_with_us, done))
        is_settled = at_rest and all(info.status.settled for info in done)
        self._note_who_differs(live, now)
        self.conclusions = replace(known, held=state.held, settled=is_settled)
        return at_rest != was_at_rest

    def _place(self, now: float) -> None:
        """Work out the swarm's position, at most once in a heartbeat; in between the clock carries it on."""
        quiet_s = self._membership.quiet_s if self.writer.rests else 0.0
        if now - self._placed_at < max(HEARTBEAT_S, quiet_s / 2) and self.swarm_position is not None:
            return
        self._placed_at = now
        times = self._times
        at = times.monotonic() - (times.now() - now)
        heard = self._membership.live
        near = positions(
            [heard[peer] for peer in list(heard) if self._state.counts(peer)], now, times.rounds_per_s
        )
        near = sorted(near + times.elsewhere(now))
        self.swarm_position = (self._borne_out(near[(len(near) - 1) // 2]), at) if near else None

    def _borne_out(self, position: float) -> float:
        most = max(self.writer.position(), BORNE_OUT_SHARE * max(self._state.held[0]) + BORNE_OUT_ROUNDS)
        if position <= most:
            return position
        self._placed_at = -math.inf  # it may be soon, by the state that comes
        return max(0.0, math.floor(most) - 1 + position % 1.0)

    def _may_hear_more(self, now: float) -> bool:
        """Whether others may be where we cannot see them: this peer came a moment ago, or most others went
        without a word and may only be suspended."""
        membership = self._membership
        hears_more = membership.awaited > 0 or not membership.candidates.has_looked
        is_new = hears_more and now - self._began_at < LISTENED_S
        return is_new or membership.departed.is_cut_off(len(membership.live), now)

    def _is_with_us(self, info: PeerInfo) -> bool:
        """Whether a peer has trained to the end, has offered all, and holds what this one does."""
        is_done = info.status.phase == Status.DRAINING and not view_of(info).training
        return is_done and (info.versions, info.digests) == self._state.held

    def _note_who_differs(self, live: Collection[PeerInfo], now: float) -> None:
        """Who has not come to the run's end may train on for long, and is not stayed for."""
        ended = (info for info in live if info.status.phase in (Status.JOINING, Status.DRAINING))
        if self._state.works or not all(map(self._is_with_us, ended)):
            self._differed_at = math.inf
        elif self._differed_at == math.inf:
            self._differed_at = now

    def _look_for_the_swarm(self, idle: bool) -> Conclusions:
        known = self.conclusions
        (versions, _) = self._state.held
        live = self._membership.live.values()
        inside = [info.versions for info in live if info.status.phase != Status.JOINING]
        if inside and 2 * len(inside) >= len(live):  # a few alone could hold up all who join
            middle = (len(inside) - 1) // 2
            of_fragments = zip(*(held for held in inside if len(held) == len(versions)), strict=True)
            self._furthest = [sorted(held, reverse=True)[min(middle, len(held) - 1)] for held in of_fragments]
        newest = [policy.reached(*self._agreement.at(fragment)) for fragment in range(len(versions))]
        trains = any(info.status.phase == Status.TRAINING for info in live)
        goes_on = trains if inside else known.goes_on
        is_behind = not _keeps_up(versions, self._furthest, goes_on)
        return Conclusions(
            heard=bool(live),
            met=known.met or bool(inside),
            full=len(inside) >= self._most_peers,
            abreast=idle and not is_behind and _keeps_up(versions, newest, goes_on),
            left_behind=is_behind and not inside,
            goes_on=goes_on,
        )


def _keeps_up(versions: Sequence[int], newest: Sequence[int], goes_on: bool) -> bool:
    """Whether no version is more than a round behind, or at all where there is only the start or no round is
    to come any more."""
    slack = 1 if goes_on else 0
    return all(new - mine <= (slack if mine else 0) for mine, new in zip(versions, newest, strict=False))
