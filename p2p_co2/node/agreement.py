"""What this peer's heartbeats and its own past say of where the swarm is: ``catchup.policy`` for one node.

Views are made anew when the membership has changed; in between the last one stands.
"""

from __future__ import annotations

from collections.abc import Collection

from p2p_co2.node.state import PeerState
from p2p_co2.protocol.catchup import policy
from p2p_co2.protocol.catchup.policy import Held, Mine, Said, View
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Status


class Agreement:
    """``state``: where this peer is; ``membership``: where the others say that they are."""

    def __init__(self, membership: Membership, state: PeerState) -> None:
        self._membership, self._state = membership, state
        self._views: dict[int, tuple[int, View]] = {}
        self._newest = [-1] * len(state.agreed)
        """Versions that anybody held, or had, since this peer is done."""

    # ---- what others say

    @property
    def revision(self) -> int:
        """Grows with what is heard."""
        return self._membership.revision

    def view(self, fragment: int) -> View:
        known, revision = self._views.get(fragment), self._membership.revision
        if known is None or known[0] != revision:
            view = {
                peer: Said(
                    Held(info.versions[fragment], info.digests[fragment]),
                    info.status.phase,
                    info.status.offers_for(fragment),
                )
                for peer, info in self._membership.live.items()
                if len(info.digests) == len(info.versions) == len(self._state.agreed)
            }
            known = self._views[fragment] = revision, view
        return known[1]

    def mine(self, fragment: int) -> Mine:
        agreed, local = self._state.agreed[fragment], self._state.local
        is_done = local.phase == Status.DRAINING or fragment in local.finished
        return Mine(Held(agreed.version, agreed.digest), self._state.past(fragment), local.phase, is_done)

    def at(self, fragment: int) -> tuple[View, Mine]:
        """What ``policy`` decides from."""
        return self.view(fragment), self.mine(fragment)

    def objection(self, fragment: int, held: Held, givers: Collection[PeerId]) -> str:
        """What speaks against a state that was loaded, in words; empty if nothing does."""
        view, mine = self.at(fragment)
        if policy.is_contradicted(view, mine, givers, held):
            return f"the state of version {held.version} is not what most peers report"
        if held.version > policy.limit(view, mine):
            return f"version {held.version} is further than most peers are"
        return ""

    def is_with_all(self) -> bool:
        """Whether every other peer says that it is where this one is: most of the time they all are."""
        here, live = self._state.held, self._membership.live.values()
        return all((info.versions, info.digests) == here for info in live)

    # ---- whose rounds are replayed

    def is_most(self, group: set[PeerId], signers: Collection[PeerId], fragment: int, version: int) -> bool:
        """Whether at least half of the peers that train now and have yet to offer for ``fragment`` are in
        ``group``. Those of it that have finished since count, too. A certificate may name anybody as a
        member: so half of them must be ``signers``, and one alone counts where half have reached the
        ``version``, as they say themselves."""
        live = self._membership.live
        training = {peer for peer, info in live.items() if info.status.offers_for(fragment)}
        made_it = {peer for peer in group if peer in live and live[peer].status.phase in policy.MOVING}
        others = (training | made_it) - {self._state.me}
        is_borne_out = len(signers) >= min(2, len(others)) or policy.reached(*self.at(fragment)) >= version
        return is_borne_out and 2 * len(signers) >= len(group) and 2 * len(made_it) >= len(others)

    # ---- what is lacking at the end

    def note_newest(self) -> None:
        """Remember what others hold, whoever goes; nothing while this peer is not done."""
        if self._state.local.phase != Status.DRAINING:
            self._newest = [-1] * len(self._newest)
            return
        for fragment, known in enumerate(self._newest):
            view, mine = self.at(fragment)
            most = policy.limit(view, mine)
            held = [said.held.version for said in view.values() if said.phase in policy.MOVING]
            self._newest[fragment] = max([known, *(version for version in held if version <= most)])

    def lacking(self) -> list[tuple[int, int, int]]:
        """(fragment, our version, the newest that anybody held) where that is newer. Other threads may
        ask."""
        pairs = zip(self._state.held[0], self._newest, strict=True)
        return [(fragment, mine, new) for fragment, (mine, new) in enumerate(pairs) if mine < new]
