"""What a peer tells: its status for heartbeats, and how and when its rounds machine sees it and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from p2p_co2.node.state import PeerState, works
from p2p_co2.protocol.membership import NEWS_GATHERED_S, Membership, PeerInfo
from p2p_co2.protocol.rounds import PeerView, Rounds
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.schedule import ENDS_ROUNDS
from p2p_co2.wire.status import finished_bits

REFRESH_S = 0.25
"""The machines hear of statuses at most this often, but for changes of their own making."""
REFRESHED_PEERS_PER_S = 64.0
"""So many peers' statuses are told a second: among many the machines hear more rarely, down to once in a
heartbeat."""


@dataclass(frozen=True)
class Times:
    """``now``: the machines' clock; ``monotonic``: the one that positions are given in. ``rounds_per_s``: how
    fast positions move by themselves; 0 if they count inner steps. ``rounds``: when the run ends, as it is at
    a position; 0 for never. ``elsewhere``: positions of peers of other groups that share the run's clock."""

    now: Callable[[], float]
    monotonic: Callable[[], float]
    rounds_per_s: float = 0.0
    rounds: Callable[[float], int] = lambda position: 0
    elsewhere: Callable[[float], list[float]] = lambda now: []


class StatusWriter:
    """``host``: what each status says of the process and its cap; ``upload_bytes_per_s``: as measured
    by now, 0 if not known. ``is_at_rest``: whether all that this peer hears are done where it is; set by what
    concludes that."""

    def __init__(
        self, state: PeerState, membership: Membership, times: Times, host: Status,
        upload_bytes_per_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self._state = state
        self._membership = membership
        self._times = times
        self._host = host
        self._upload_bytes_per_s = upload_bytes_per_s
        self.is_at_rest = False
        self._status = Status()
        self._status_of: object = None

    def status(self) -> Status:
        """What the next heartbeats say of this peer; messages that carry it hold copies."""
        local = self._state.local
        (versions, digests) = self._state.held
        membership = self._membership
        upload = self._upload_bytes_per_s()
        heartbeat_s = membership.heartbeat_s if membership.quiet_s and self.rests else 0.0
        counted = self._state.has_worked(self._state.me)
        content = (local, versions, digests, upload, self.is_at_rest, heartbeat_s, counted)
        if content != self._status_of:
            self._status_of = content
            self._status = Status(
                phase=local.phase, versions=versions, digests=digests, upload_bytes_per_s=upload,
                settled=self.is_at_rest, finished=finished_bits(local.finished, len(versions)),
                heartbeat_s=heartbeat_s, counted=counted,
                model=model.digest if (model := membership.strangers.model) is not None else 0,
            )  # fmt: skip
            self._status.MergeFrom(self._host)
        self._status.position = self.position()
        return self._status

    @property
    def rests(self) -> bool:
        """Whether this peer only trains, or pauses, and the run's end is not near: it has little to tell."""
        local = self._state.local
        if local.phase not in (Status.TRAINING, Status.PAUSED) or local.finished:
            return False
        position = self.position()
        rounds = self._times.rounds(position)
        return not rounds or position < rounds - ENDS_ROUNDS

    def position(self) -> float:
        """This peer's position now: what the training thread last said, carried on by the clock. Who takes no
        more steps stands at the run's end, though a last step or a pause may have brought it further."""
        local = self._state.local
        times = self._times
        if local.is_over and (rounds := times.rounds(local.position)):
            return min(local.position, rounds)
        moving = local.phase == Status.TRAINING and not local.is_over
        elapsed_s = times.monotonic() - local.position_at if moving else 0.0
        return max(0.0, local.position + elapsed_s * times.rounds_per_s)

    def views(self) -> dict[PeerId, PeerView]:
        """The live peers, this one among them, as the rounds machine wants to know them."""
        views = {peer: view_of(info) for peer, info in self._membership.live.items()}
        state = self._state
        cap = self._host.download_bytes_per_s
        views[state.me] = PeerView(
            self._upload_bytes_per_s(), state.works, state.held[0], cap, state.local.finished,
            step_s=state.step_s,
        )  # fmt: skip
        return views

    def paces(self) -> dict[PeerId, float]:
        """How fast this peer may send bulk to those with a download cap: their rate, shared by all that may
        send to them at once."""
        live = self._membership.live
        caps = {p: cap for p, info in live.items() if (cap := info.status.download_bytes_per_s) > 0}
        if not caps:
            return {}
        senders = max(1, sum(info.status.phase == Status.TRAINING for info in live.values()))
        return {peer: cap / senders for peer, cap in caps.items()}


def view_of(info: PeerInfo) -> PeerView:
    """A live peer for the rounds machine: made once for each news of it, since there are many peers."""
    if info.view is None:
        said = info.status
        info.view = _view_of(
            said.phase, info.versions, said.upload_bytes_per_s, said.download_bytes_per_s, said.finished,
            info.digests, info.is_missed, said.counted,
        )  # fmt: skip
    assert isinstance(info.view, PeerView)
    return info.view


@lru_cache(MAX_PEERS)
def _view_of(
    phase: Status.Phase, versions: tuple[int, ...], upload_rate: float, download_rate: float,
    finished_bits: bytes, digests: tuple[bytes, ...], is_missed: bool, counted: bool,
) -> PeerView:  # fmt: skip
    bits = int.from_bytes(finished_bits, "little")
    finished = frozenset(f for f in range(len(versions)) if bits >> f & 1)
    is_training = works(phase, len(finished) == len(versions))
    return PeerView(
        upload_rate, is_training, versions, download_rate, finished, digests, 0.0, is_missed, counted
    )


class SwarmNews:
    """When the machines hear of where this peer and the others are: news of many peers gathers for a moment.

    Each telling costs in proportion to the peers, so among many it is rare. Before the rounds machine hears
    more of a peer that came, went, or began anew, it is told of all at once (``tell_of_strangers``).
    ``now``: the machines' clock. ``watches``: whether what was heard has to be looked at again, news or
    not. ``set_paces``: hears how fast this peer may send to those with a download cap."""

    def __init__(
        self, state: PeerState, membership: Membership, rounds: Rounds, writer: StatusWriter,
        now: Callable[[], float], watches: Callable[[], bool],
        set_paces: Callable[[Mapping[PeerId, float]], None],
    ) -> None:  # fmt: skip
        self._state = state
        self._membership = membership
        self._rounds = rounds
        self._writer = writer
        self._now = now
        self._watches = watches
        self._set_paces = set_paces
        self._told: object = None
        """What the rounds machine was last told of this peer and the others."""
        self._looked_revision = -1
        self._at = 0.0
        self._has_strangers = False

    def due_at(self) -> float:
        """When what the others said is to be looked at; infinity while it is nothing new."""
        has_news = self._membership.revision != self._looked_revision or self._watches()
        return self._at if has_news else math.inf

    def look(self) -> None:
        """Tell the machines, and take what was heard for looked at."""
        self._looked_revision = self._membership.revision
        self.tell()

    def somebody_came_or_went(self) -> None:
        """Tell of it soon: they come and go in crowds, among many within half of ``_every_s``."""
        self._has_strangers = True
        self._at = min(self._at, self._now() + max(NEWS_GATHERED_S, self._every_s() / 2))

    def tell_of_strangers(self) -> None:
        """Let the rounds machine hear of all who came and went before it hears more of them."""
        if self._has_strangers or self._membership.restarted:
            self.tell()

    def tell(self) -> None:
        """Tell the machines where this peer and the others stand."""
        now = self._now()
        state = self._state
        membership = self._membership
        writer = self._writer
        self._at = now + max(REFRESH_S, self._every_s())
        membership.set_rests(writer.rests, now)
        membership.status = status = writer.status()
        self._has_strangers = False
        rate = status.upload_bytes_per_s
        finished = state.local.finished
        known = self._told
        self._told = (membership.revision, state.held, rate, status.phase, finished)
        if known == self._told:
            return
        views = writer.views()
        if restarted := membership.take_restarted():
            still = {peer: view for peer, view in views.items() if peer not in restarted}
            self._rounds.set_peers(still, now)
        self._rounds.set_peers(views, now)
        self._set_paces(writer.paces())
        state.over = frozenset(f for f in range(len(state.agreed)) if self._rounds.swarm.is_over_for_good(f))

    def _every_s(self) -> float:
        return min(HEARTBEAT_S, len(self._membership.live) / REFRESHED_PEERS_PER_S)
