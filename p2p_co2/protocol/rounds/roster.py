"""Who is ready for one round, and whether they may begin it: questions, without time or messages.

Those that start from equal states are a camp. Laws: a round begins only with a majority of the live training
peers that agree on the state they start from, so two halves of a split swarm cannot both go on; half of it is
enough only for the peer that is first by rendezvous hash, in its own half. None begins that as many others
have made already, though they are done.
"""

from __future__ import annotations

from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.swarm import Swarm, named
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import Ready


class Roster:
    """The READYs of one round, by peer."""

    def __init__(self, fragment: int, round_: int, swarm: Swarm) -> None:
        self.fragment, self.round = fragment, round_
        self.readies: dict[PeerId, Ready] = {}
        self._swarm = swarm

    # ---- who is there

    @property
    def is_last(self) -> bool:
        """Whether most of those who are ready train no more: one peer's word alone makes nobody wait."""
        return 2 * sum(ready.last for ready in self.readies.values()) > len(self.readies)

    def heard(self) -> list[PeerId]:
        """Those who are ready and not missed since: who may be gone would keep a round from its end for as
        long as all its deadlines together."""
        return [peer for peer in sorted(self.readies) if not self._swarm.is_missed(peer)]

    def live(self) -> list[PeerId]:
        """Whose majority counts; with those who are done where the last one may make no round alone."""
        done = self._swarm.done_with(self.fragment)
        return sorted({*self._swarm.working_on(self.fragment), *self.readies, *done})

    def live_count(self, size: int) -> int:
        """Of how many peers a quorum of a group of ``size`` must sign. One more where half of them do not
        decide by hash."""
        live = {*self.live(), *self._here()} if size == 2 else set(self.live())
        count = max(size, len(live))
        if count % 2 == 0 and coordination_order(live, self.fragment, self.round)[0] != self._swarm.me:
            count += 1
        return min(count, 2 * size)  # of two that work, among others that are done: both

    def _here(self) -> list[PeerId]:
        """Who trains, or did so and is done with the fragment."""
        views = self._swarm.live.items()
        return [peer for peer, view in views if view.training or self.fragment in view.finished]

    def _is_past(self, peer: PeerId) -> bool:
        """Whether ``peer`` says that it has made this round."""
        return (self._swarm.version_of(peer, self.fragment) or 0) >= self.round

    def is_too_late(self) -> bool:
        """Whether too many are done with the fragment for another round of it."""
        done = set(self._swarm.done_with(self.fragment)) - self.readies.keys()
        return bool(done) and len({*self._swarm.working_on(self.fragment), *self.readies}) <= len(done)

    # ---- camps

    def _camps(self) -> dict[bytes, list[PeerId]]:
        camps: dict[bytes, list[PeerId]] = {}
        for peer in self.heard() or sorted(self.readies):
            camps.setdefault(self.readies[peer].state_digest, []).append(peer)
        return camps

    def agreeing(self) -> tuple[bytes, list[PeerId]]:
        """The state digest that most READYs start from, and its peers, sorted. Of equal camps the one that
        may begin with half of the swarm comes first (``shortage``), then the heavier one, then the larger
        digest."""
        camps = self._camps()

        def strength(digest: bytes) -> tuple[int, bool, float, bytes]:
            weight = sum(self.readies[peer].weight for peer in camps[digest])
            return len(camps[digest]), self._swarm.me in camps[digest], weight, digest

        best = max(camps, key=strength)
        return best, camps[best]

    def alike(self, digest: bytes) -> list[PeerId]:
        """Who is ready from this state, also those who are missed."""
        return [peer for peer in sorted(self.readies) if self.readies[peer].state_digest == digest]

    # ---- whether a camp may begin

    def _suffices(self, camp: list[PeerId], live: list[PeerId], now: float) -> bool:
        size = min(len(camp), MAX_MEMBERS)
        return 2 * size > len(live) or (2 * size == len(live) and self._breaks_ties(camp, live, now))

    def _breaks_ties(self, camp: list[PeerId], live: list[PeerId], now: float) -> bool:
        """Half of the swarm is enough where we are in that half and first by hash: no other half can say
        so. Not if the other half has made this round already: then it is we who are late."""
        me = self._swarm.me
        first = me in camp and coordination_order(live, self.fragment, self.round)[0] == me
        return first and not self.is_late(camp, now, live)

    def is_late(self, camp: list[PeerId], now: float, live: list[PeerId] | None = None) -> bool:
        """Whether somebody of the other half of the swarm says that it has made this round."""
        live = self.live() if live is None else live
        others = [peer for peer in live if peer not in camp] if 2 * len(camp) == len(live) else []
        others = [peer for peer in others if not self._swarm.repute.is_passed_over(peer, self.fragment, now)]
        return any(map(self._is_past, others))

    def _is_made(self, camp: list[PeerId], now: float) -> bool:
        """Whether as many as ``camp`` has say that they made this round, though they are done with the
        fragment: who makes a run's last round once more makes another state of its version. Where they are
        more, even those who are passed over: who could not give their bytes in time are."""
        past = [p for p in self._here() if p not in camp and self._is_past(p)]
        believed = [peer for peer in past if not self._swarm.repute.is_passed_over(peer, self.fragment, now)]
        return len(past) > len(camp) or len(believed) >= len(camp)

    def shortage(self, now: float, waited_s: float) -> str:
        """Why the strongest camp may not begin; empty if it may."""
        camp, live = self.agreeing()[1], self.live()
        if self.is_too_late():
            return "most peers have nothing more to offer"
        if not self.heard():
            return "the links of all who were ready are broken"
        if self._is_made(camp, now):
            return "as many others have made this round already"
        if self._suffices(camp, live, now):
            return ""
        waited = f"within {waited_s:.1f} s"
        if len(self.readies) > len(camp):
            return f"only {len(camp)} of {len(live)} live peers were ready with equal states {waited}"
        missing = named([peer for peer in live if peer not in camp])
        return f"only {len(camp)} of {len(live)} live peers were ready {waited} (missing {missing})"
