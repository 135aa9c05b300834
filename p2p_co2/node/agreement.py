"""What this peer's heartbeats and its own past say of where the swarm is: ``catchup.policy`` for one node.

Views are made anew when the membership has changed; in between the last one stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.protocol.catchup import policy
from p2p_co2.protocol.catchup.policy import Held, Mine, Move, Said, View
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import Status

PAST_KEPT = 256
"""Own versions of each fragment whose digests are remembered."""


class Agreement:
    """``agreed``: the node's own list, by fragment; ``local``: (phase, finished fragments) of this peer;
    ``given_up``: by fragment, rounds made alone that the last state taken over lacks."""

    def __init__(
        self,
        me: PeerId,
        membership: Membership,
        agreed: Sequence[AgreedVersion],
        local: Callable[[], tuple[Status.Phase, Collection[int]]],
    ) -> None:
        self._me, self._membership, self._agreed, self._local = me, membership, agreed, local
        self._views: dict[int, tuple[int, View]] = {}
        self._past: dict[int, dict[int, bytes]] = {}
        self._alone: dict[int, int] = {}
        """By fragment, how many rounds this peer made alone, of the newest in a row."""
        self.given_up: dict[int, int] = {}
        self._words: dict[PeerId, tuple[int, ...]] = {}
        """What each held that was heard since this peer is done, those that have gone among them."""

    # ---- what others say

    @property
    def phase(self) -> Status.Phase:
        """This peer's."""
        return self._local()[0]

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
                if len(info.digests) == len(info.versions) == len(self._agreed)
            }
            known = self._views[fragment] = revision, view
        return known[1]

    def mine(self, fragment: int) -> Mine:
        agreed, (phase, finished) = self._agreed[fragment], self._local()
        past = self._past.setdefault(fragment, {agreed.version: agreed.digest})
        is_done = phase == Status.DRAINING or fragment in finished
        return Mine(Held(agreed.version, agreed.digest), past, phase, is_done)

    def decide(self, fragment: int, replayable: bool) -> Move | None:
        return policy.decide(self.view(fragment), self.mine(fragment), replayable)

    def reached(self, fragment: int) -> int:
        """The highest version that at least half of the peers have reached."""
        return policy.reached(self.view(fragment), self.mine(fragment))

    def limit(self, fragment: int) -> int:
        """The newest version at which anybody honest can be."""
        return policy.limit(self.view(fragment), self.mine(fragment))

    def digest(self, fragment: int, version: int) -> bytes | None:
        """The digest that most peers at ``version`` report."""
        return policy.digest_at(self.view(fragment), self.mine(fragment), version)

    def vouch(self, donor: PeerId, fragment: int, version: int, digest: bytes) -> bool | None:
        """See ``catchup.goals.Vouch``."""
        return policy.bears_out(self.view(fragment), self.mine(fragment), donor, Held(version, digest))

    def donors(self, fragment: int, version: int, digest: bytes) -> tuple[PeerId, ...]:
        return policy.donors(self.view(fragment), fragment, version, digest)

    def objection(self, fragment: int, held: Held, givers: Collection[PeerId]) -> str:
        """What speaks against a state that was loaded, in words; empty if nothing does."""
        view, mine = self.view(fragment), self.mine(fragment)
        if policy.is_contradicted(view, mine, givers, held):
            return f"the state of version {held.version} is not what most peers report"
        if held.version > policy.limit(view, mine):
            return f"version {held.version} is further than most peers are"
        return ""

    def is_one_word(self, fragment: int, version: int) -> bool:
        return policy.is_one_word(self.view(fragment), self.mine(fragment), version)

    def is_with_all(self) -> bool:
        """Whether every other peer says that it is where this one is: most of the time they all are."""
        versions = tuple(mine.version for mine in self._agreed)
        digests = tuple(mine.digest for mine in self._agreed)
        live = self._membership.live.values()
        return all(info.versions == versions and info.digests == digests for info in live)

    # ---- whose rounds are replayed

    def is_most(self, group: set[PeerId], fragment: int) -> bool:
        """Whether at least half of the peers that train now and have yet to offer for ``fragment`` are in
        ``group``. Those of it that have finished since count, too."""
        live = self._membership.live
        training = {peer for peer, info in live.items() if info.status.offers_for(fragment)}
        made_it = {peer for peer in group if peer in live and live[peer].status.phase in policy.MOVING}
        return 2 * len(made_it) >= len((training | made_it) - {self._me})

    # ---- this peer's own past

    def moved(self, fragment: int, agreed: AgreedVersion, group: Collection[PeerId] | None) -> None:
        """Our state is about to be ``agreed``: by a round of ``group``, or (None) somebody else's whole
        state, of whose past we know nothing."""
        before = self._agreed[fragment]
        past = self._past.setdefault(fragment, {before.version: before.digest})
        if group is None:
            is_newer = agreed.version > before.version
            self.given_up[fragment] = 0 if is_newer else self._alone.get(fragment, 0)
            past.clear()
        is_alone = group is not None and set(group) == {self._me}
        self._alone[fragment] = self._alone.get(fragment, 0) + 1 if is_alone else 0
        past[agreed.version] = agreed.digest
        while len(past) > PAST_KEPT:
            del past[next(iter(past))]

    def alone(self, fragment: int) -> int:
        """How many of the newest rounds in a row this peer made alone."""
        return self._alone.get(fragment, 0)

    # ---- what is lacking at the end

    def note_newest(self, is_done: bool) -> None:
        """Remember what others hold, whoever goes; nothing while this peer trains."""
        if not is_done:
            self._words.clear()
            return
        limits = [self.limit(fragment) for fragment in range(len(self._agreed))]
        for peer, info in self._membership.live.items():
            self._words.pop(peer, None)
            if info.status.phase in policy.MOVING and len(info.versions) == len(limits):
                pairs = zip(info.versions, limits, strict=True)
                self._words[peer] = tuple(version if version <= most else -1 for version, most in pairs)
        while len(self._words) > MAX_PEERS:
            del self._words[next(iter(self._words))]

    def newest(self, fragment: int) -> int:
        """The newest version that anybody held; -1 if none is known. Other threads may ask."""
        return max((versions[fragment] for versions in list(self._words.values())), default=-1)
