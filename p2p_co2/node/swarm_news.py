"""When the machines hear of where this peer and the others are: news of many peers gathers for a moment.

Each telling costs in proportion to the peers, so among many it is rare; but before the rounds machine hears
more of somebody who came, went, or began anew, it is told of all at once (``tell_of_strangers``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from p2p_co2.node.state import PeerState
from p2p_co2.node.status import StatusWriter
from p2p_co2.protocol.membership import NEWS_GATHERED_S, Membership
from p2p_co2.protocol.rounds import Rounds
from p2p_co2.protocol.wire.identity import PeerId

REFRESH_S, SLOWEST_REFRESH_S, REFRESHED_PEERS_PER_S = 0.25, 1.0, 64.0
"""The machines hear of statuses at most this often, but for changes of their own making; more rarely among
many."""


class SwarmNews:
    """``now``: the machines' clock; ``watches``: whether what was heard has to be looked at again, news or
    not; ``set_paces``: hears how fast this peer may send to those with a download cap."""

    def __init__(
        self, state: PeerState, membership: Membership, rounds: Rounds, writer: StatusWriter,
        now: Callable[[], float], watches: Callable[[], bool],
        set_paces: Callable[[Mapping[PeerId, float]], None],
    ) -> None:  # fmt: skip
        self._state, self._membership, self._rounds = state, membership, rounds
        self._writer, self._now, self._watches, self._set_paces = writer, now, watches, set_paces
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
        now, state, membership, writer = self._now(), self._state, self._membership, self._writer
        self._at = now + max(REFRESH_S, self._every_s())
        membership.set_rests(writer.rests, now)
        membership.status = status = writer.status()
        self._has_strangers = False
        news = (
            membership.revision,
            state.held,
            status.upload_bytes_per_s,
            status.phase,
            state.local.finished,
        )
        if news == self._told:
            return
        self._told = news
        views = writer.views()
        if restarted := membership.take_restarted():
            still = {peer: view for peer, view in views.items() if peer not in restarted}
            self._rounds.set_peers(still, now)
        self._rounds.set_peers(views, now)
        self._set_paces(writer.paces())
        state.over = frozenset(f for f in range(len(state.agreed)) if self._rounds.is_over(f))

    def _every_s(self) -> float:
        return min(SLOWEST_REFRESH_S, len(self._membership.live) / REFRESHED_PEERS_PER_S)
