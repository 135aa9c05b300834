"""What a round sees of the swarm: who is live, how fast they are, in which order they coordinate.

Law: two peers with the same live set choose the same coordinator and the same successors (``rank``). This
peer is always live in its own eyes, and training unless it is told otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from google.protobuf.message import Message

from p2p_co2.protocol.rounds.assembly import FINEST_PIECES, LAST_PIECE_S, piece_bytes
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST, MAX_NAMED
from p2p_co2.protocol.rounds.deadline import Punctuality
from p2p_co2.protocol.rounds.events import PayloadShape, PeerView, RoundsEvent
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.repute import Lateness, Repute
from p2p_co2.protocol.rounds.voters import Voters
from p2p_co2.wire.identity import PeerId


def named(peers: Sequence[str]) -> str:
    """The ends of the first ``MAX_NAMED`` peer ids, which begin alike, and how many more: a reason must fit
    into an outcome."""
    more = len(peers) - MAX_NAMED
    listed = ", ".join(peer[-6:] for peer in peers[:MAX_NAMED])
    return f"{listed} and {more} more" if more > 0 else listed


class RoundSwarm:
    """The live peers as membership told us last."""

    def __init__(self, me: PeerId, shape: PayloadShape) -> None:
        self.me = me
        self.shape = shape
        self.live: dict[PeerId, PeerView] = {me: PeerView()}
        self.voters = Voters(me)
        self.voters.set_live(self.live)
        self.training = [me]
        self._working: dict[int, list[PeerId]] = {}
        """What ``working_on`` said since ``live`` changed."""
        self._is_ending = False
        """Whether anybody is done with a fragment."""
        self._done: dict[int, frozenset[str]] = {}
        """By fragment: those in its last commits that said that they are done with it; also who left then."""
        self.my_versions: dict[int, int] = {}
        self.readies = Punctuality()
        """Who is in time with READY, also for the round before."""
        self.slices = Punctuality()
        """Who is in time with slices."""
        self.lateness = Lateness()
        """Of owners."""
        self.repute = Repute()
        self._pieces_of: tuple[object, object, float, int] = (None, None, 0.0, 0)
        """What ``piece_bytes`` was asked last (receivers, ``live``, upload), and said."""

    def set_live(self, live: Mapping[PeerId, PeerView]) -> None:
        if self.me not in live:
            live = {self.me: PeerView(), **live}
        names = self.live if live.keys() == self.live.keys() else sorted(live)  # most news is not of these
        self.live = {peer: live[peer] for peer in names}
        self.training = [peer for peer, view in self.live.items() if view.training]
        self.voters.set_live(self.live)
        self._working.clear()
        self._is_ending = any(view.finished for view in live.values())
        if self._is_ending or self._done:
            for fragment in range(len(self.shape.blocks)):
                done = {peer for peer, view in live.items() if fragment in view.finished}
                gone = self._done.get(fragment, frozenset()) - live.keys()
                self._done[fragment] = self.voters.history(fragment).workers & (done | gone)
        for habit in (self.readies, self.slices):
            habit.keep(self.live)
        self.lateness.keep(self.live)

    # ---- whose word counts

    def to_ask(self, fragment: int, round_: int, now: float) -> list[PeerId]:
        """Who may coordinate a round, in the order in which they are asked: by hash, but those whose rounds
        came to nothing last. If they are half of the swarm, it is more likely us."""
        order = coordination_order(self.voters.all(), fragment, round_)
        last = {peer for peer in order if self.repute.is_passed_over(peer, fragment, now)}
        return sorted(order, key=last.__contains__) if 2 * len(last) < len(order) else order

    def failed(self, coordinator: PeerId, fragment: int, why: str, now: float) -> None:
        """A coordinator let an offer come to nothing."""
        if coordinator != self.me:
            self.repute.failed(coordinator, fragment, why, now)

    def believes(self, signers: Collection[PeerId], fragment: int, least: int = 1) -> bool:
        """Whether so many signed a commit that it is the swarm's: half of the voters, those among them that
        are done with the fragment, and ``least`` where there are as many others. Whom a certificate names as
        members says nothing. Signers that are done count with those that worked when they did. Who left
        counts if he is in the commit before: half of these and of the voters. These ways do not add up, else
        names that come one after the other would."""
        signed, history, done = {*signers}, self.voters.history(fragment), self.done_with(fragment)
        voters: set[str] = {*self.voters.all(), *signed & {self.me}}
        known = signed & (voters | done)
        least = min(least, len((voters | done) - {self.me}))
        most = len(history.at_once(voters | done))
        here = voters | (done & self.live.keys())
        beside = history.at_once(known) if history.is_full else known
        for group, all_ in ((voters, here), (beside, here), (history.newest, here | history.newest)):
            count = len(group & signed)
            if 2 * count >= max(len(all_), most) and count >= least:
                return True
        return False

    def known(self, members: Iterable[PeerId]) -> list[PeerId]:
        """Those of a group that are live and have, or had, a vote, and this peer."""
        voters = self.voters
        known = {*voters.all(), *filter(voters.counts, self.live), self.me}
        return [peer for peer in members if peer in known and peer in self.live]

    def refused(self, coordinator: PeerId, fragment: int, why: str, now: float) -> None:
        """A coordinator begins no round; at the end of a run that is nobody's fault."""
        if not self._is_ending:
            self.failed(coordinator, fragment, why, now)

    def farthest_version(self, fragment: int) -> int:
        """The highest version that one peer's word can send us after: a little more than half of the voters
        have reached."""
        versions = sorted((self.version_of(one, fragment) or 0 for one in self.voters.all()), reverse=True)
        return (versions[(len(versions) - 1) // 2] if versions else 0) + AHEAD_AT_MOST

    def done_with(self, fragment: int) -> frozenset[str]:
        """Who has come to the run's end and has nothing more to offer for ``fragment``, and is in its last
        commits; also who left after that. They count in a quorum: else who stays makes the end of a run as he
        likes. Of names that came one after the other, those that worked at once: they may be one
        machine's. To one that does not know these, who is here and says so, if they are more."""
        known = self.voters.history(fragment).at_once(self._done.get(fragment, ()))
        if self._is_ending and not self.voters.history(fragment).is_full:
            here = {peer: view for peer, view in self.live.items() if fragment in view.finished}
            said = frozenset(peer for peer, view in here.items() if view.counted or peer in self.voters)
            known = max(known, said, key=len)
        return known

    def is_over(self, fragment: int, ready: Collection[PeerId] = ()) -> bool:
        """Whether most are done with ``fragment``, so that no round can begin. Who is ``ready`` for one is
        not, nor are those in the last commits that are out of sight."""
        done = {*self.done_with(fragment)} - {*ready}
        away = self.voters.history(fragment).workers - self._done.get(fragment, frozenset())
        return len({*self.working_on(fragment), *away, *ready} - done) < len(done)

    def is_over_for_good(self, fragment: int) -> bool:
        """Whether this peer may end for that: not by names that it knows nothing of, beside others."""
        is_alone = all(fragment in view.finished for peer, view in self.live.items() if peer != self.me)
        return self.is_over(fragment) and (is_alone or self.voters.history(fragment).is_full)

    def is_live(self, peer: PeerId) -> bool:
        return peer in self.live

    def is_missed(self, peer: PeerId) -> bool:
        """Whether its link broke and it was not heard since."""
        return peer in self.live and self.live[peer].is_missed

    def is_training(self, peer: PeerId) -> bool:
        return peer in self.live and self.live[peer].training

    def working_on(self, fragment: int) -> Sequence[PeerId]:
        """Of those that train, who may still offer for ``fragment`` in this run; sorted."""
        known = self._working.get(fragment)
        if known is None:
            live = self.live
            known = [peer for peer in self.training if fragment not in live[peer].finished]
            self._working[fragment] = known
        return known

    def version_of(self, peer: PeerId, fragment: int) -> int | None:
        """The newest version that ``peer`` is known to hold; None if nobody told us."""
        if peer == self.me:
            return self.my_versions.get(fragment)
        view = self.live.get(peer)
        return view.versions[fragment] if view is not None and fragment < len(view.versions) else None

    def digest_of(self, peer: PeerId, fragment: int) -> bytes | None:
        """The digest of its newest version that another peer tells; None if nobody told us."""
        view = self.live.get(peer)
        return view.digests[fragment] if view is not None and fragment < len(view.digests) else None

    def piece_bytes(self, receivers: Collection[PeerId]) -> int:
        """How large the pieces of what goes to all ``receivers`` at once may be."""
        upload = self.my_upload_bytes_per_s() or self.shape.assumed_upload_bytes_per_s
        known = self._pieces_of
        if known[0] is receivers and known[1] is self.live and known[2] == upload:
            return known[3]  # asked for each part of a round
        views = [self.live[peer] for peer in receivers if peer in self.live and peer != self.me]
        rates = [upload / max(1, len(views)), *(view.download_bytes_per_s for view in views)]
        size = piece_bytes(rates, LAST_PIECE_S)
        coarse = piece_bytes(rates)
        payload_bytes = min(self.shape.blocks) * self.shape.block_bytes
        while size < coarse and 2 * size * FINEST_PIECES <= payload_bytes:
            size = min(2 * size, coarse)
        self._pieces_of = receivers, self.live, upload, size
        return size

    def my_step_s(self) -> float:
        """How long this peer's inner steps are; 0 if it takes none."""
        return self.live[self.me].step_s

    def my_upload_bytes_per_s(self) -> float:
        return max(self.live[self.me].upload_bytes_per_s, 0.0)


class Outlet:
    """Where the roles put messages and events. Messages to ourselves go to ``loop`` and take the same road as
    others'."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.messages: list[tuple[PeerId, Message]] = []
        self.loop: deque[Message] = deque()
        self.events: deque[RoundsEvent] = deque()
        self.on_begun: Callable[[], None] = lambda: None
        """Called when a round of ours has begun, before memory is taken for its mean. Its members have the
        round before: what nobody needs of that may be let go."""

    def send(self, peer: PeerId, message: Message) -> None:
        if peer == self.me:
            self.loop.append(message)
        else:
            self.messages.append((peer, message))

    def emit(self, event: RoundsEvent) -> None:
        self.events.append(event)
