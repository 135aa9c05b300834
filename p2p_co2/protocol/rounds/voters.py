"""Whose word of the swarm counts: identities are free, so a heartbeat alone is no vote.

Law: voters are the live training peers whose slices are in the last commits that this peer knows of. Before
it knows all of these, those count too that say so of themselves. Without any, as a run begins, all that train
do. A newcomer is waited for, and may be taken into a group once it is ready (``gathering``). Price: one that
was away for eight commits of each fragment begins anew, and so do all that were started anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from p2p_co2.protocol.rounds.events import PeerView
from p2p_co2.protocol.rounds.history import History
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS


class Voters:
    """``histories``: by fragment, who has worked of late. ``met``: who has had a vote since this peer was
    started, the last ``MAX_PEERS``: what they hold counts though they were cut off for long."""

    def __init__(self, me: PeerId) -> None:
        self.histories: Sequence[History] = ()
        self.met: dict[PeerId, None] = {}
        self._me = me
        self._live = dict[PeerId, PeerView]()
        self._has_met_others = False
        """Whether any other live peer has had a vote."""
        self._known: tuple[object, Collection[PeerId]] = None, ()
        """What ``all`` was asked of last, and said."""

    def set_live(self, live: dict[PeerId, PeerView]) -> None:
        self._live = live
        self._known = (None, ())
        self._look_for_others()

    def all(self) -> Collection[PeerId]:
        """Of the live peers that train."""
        of = [history.workers for history in self.histories]
        if self._known[0] != of:
            is_full = any(history.is_full for history in self.histories)
            self._known = of, self._find(frozenset[str]().union(*of), is_full)
        return self._known[1]

    def _find(self, workers: frozenset[str], is_full: bool) -> Collection[PeerId]:
        training = {peer: view for peer, view in self._live.items() if view.training}
        found = [peer for peer in training if peer in workers]
        if not is_full or not set(found) - {self._me}:
            found += [peer for peer, view in training.items() if view.counted and peer not in found]
        if workers or not found:
            self.met |= dict.fromkeys(found or self._live)
            for oldest in list(self.met)[:-MAX_PEERS]:
                del self.met[oldest]
            self._look_for_others()
        return frozenset(found or training)

    def steady(self, fragment: int, counted: Collection[PeerId]) -> set[PeerId]:
        """Of those that count in a mean, the others that are new to nobody: they are in all the last commits.
        As a run begins, all that vote, or all; nobody, where this peer does not know these commits."""
        history = self.history(fragment)
        if not history.version:
            return ({*self.all()} - {self._me}) & {*counted} or {*counted}
        return {*counted} & history.steady - {self._me} if history.is_full else set()

    def history(self, fragment: int) -> History:
        """What this peer knows of the last commits of ``fragment``."""
        return self.histories[fragment] if self.histories else History()

    def _look_for_others(self) -> None:
        self._has_met_others = any(peer in self.met for peer in self._live if peer != self._me)

    def __contains__(self, peer: PeerId) -> bool:
        """Whether it has a vote; of one that trains no more, whether it had."""
        view = self._live.get(peer)
        voting = self.all()
        return peer in voting if view is not None and view.training else self.counts(peer)

    def has_worked(self, peer: PeerId) -> bool:
        """Whether a slice of ``peer`` is in one of the last means that we know of."""
        return any(peer in history.workers for history in self.histories)

    def counts(self, peer: PeerId) -> bool:
        """Whether what ``peer`` says of where it is counts: it had a vote, or no other live peer had one."""
        return peer in self.met or not self._has_met_others
