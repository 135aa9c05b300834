"""The groups that this peer forms: from the first READY to BEGIN.

A coordinator only forms the group: what becomes of a round is its members' business (``member``). Laws: a
peer coordinates for whoever asks it, whatever its own state. It begins no second attempt of a round while it
is itself in one that is not decided. One sender occupies one gathering for each fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.attempt import Attempt, check_ready
from p2p_co2.protocol.rounds.deadline import SAFETY, Cadence, parts_deadline_s
from p2p_co2.protocol.rounds.events import Began, PeerView
from p2p_co2.protocol.rounds.gathering import Gathering, Roster, attempt_nonce, behind_message, divided
from p2p_co2.protocol.rounds.history import History
from p2p_co2.protocol.rounds.parts import LineRates
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_STRING
from p2p_co2.wire.messages_pb2 import Begin, Ready, Waiting

Place = tuple[int, int]
"""(fragment, round)"""
BEGUN_KEPT = 2
"""Of one fragment: BEGIN is repeated to those that missed it."""


@dataclass
class _Begun:
    """A round that we began. ``in_time_until``: whoever comes by then is worth waiting for next time."""

    begin: Begin
    readies: dict[PeerId, Ready]
    began_at: float
    in_time_until: float
    late: set[PeerId] = field(default_factory=set)

    def left(self, now: float) -> Begin:
        """BEGIN with the time that is left of it."""
        begin = Begin()
        passed_s = now - self.began_at
        begin.CopyFrom(self.begin)
        begin.parts_within_s = max(0.0, begin.parts_within_s - passed_s)
        begin.result_within_s = max(0.0, begin.result_within_s - passed_s)
        return begin


class Coordination:
    """The coordinator's side of all fragments. ``histories``: by fragment; ``joined_until(place)``: when to
    look again at an attempt of a round that we are in, None if in none."""

    def __init__(
        self, swarm: RoundSwarm, outlet: Outlet, histories: Sequence[History],
        joined_until: Callable[[Place], float | None],
    ) -> None:  # fmt: skip
        self._swarm = swarm
        self._outlet = outlet
        self._gatherings: dict[Place, Gathering] = {}
        self._begun: dict[Place, _Begun] = {}
        self._histories = histories
        share = bounds.GATHER_SHARE_BY_STEPS if swarm.shape.counts_steps else bounds.GATHER_SHARE
        self.cadences = [Cadence(swarm.shape.round_s, share) for _ in histories]
        self._counter = 0
        self._joined_until = joined_until

    # ---- READYs

    def on_ready(self, message: Ready, sender: PeerId, now: float) -> None:
        """A peer wants to be in a round. Raises ``RemoteProtocolError``."""
        check_ready(message, self._swarm.shape)
        if not self._swarm.is_live(sender):
            raise RemoteProtocolError(Offence.UNKNOWN_PEER, "READY")
        place = (message.fragment, message.round)
        if message.withdrawn:
            self.withdraw(place, sender)
            return
        if self._answer_decided(message, sender):
            return
        if self._answer_begun(place, message, sender, now) or self._is_elsewhere(place, [sender], now):
            return
        for other in [key for key in self._gatherings if key[0] == message.fragment and key != place]:
            self.withdraw(other, sender)
        gathering = self._gathering(place, now)
        if sender not in gathering.roster.readies:
            self.cadences[place[0]].ready_came(place[1], now)
        gathering.ready(message, sender, now)

    def _gathering(self, place: Place, now: float) -> Gathering:
        known = self._gatherings.get(place)
        if known is None:
            cadence = self.cadences[place[0]]
            adaptive_s = cadence.gather_s(place[1], self._swarm.my_step_s())
            roster = Roster(*place, self._swarm)
            known = Gathering(
                roster, self._swarm, self._outlet, cadence=cadence, adaptive_s=adaptive_s, now=now
            )
            self._gatherings[place] = known
        return known

    def _answer_decided(self, message: Ready, sender: PeerId) -> bool:
        history = self._histories[message.fragment]
        known = history.commit(message.round)
        newest = history.newest_commit()
        fragment = message.fragment
        round_ = message.round
        donors = [PeerId(member.peer) for member in newest[1].members] if newest else []
        if known is not None and known[1].state_digest == message.state_digest:
            self._outlet.send(sender, known[0])
        elif history.version is not None and history.version >= round_:
            donors = sorted({*donors, self._swarm.me} - {sender})
            behind = behind_message(fragment, round_, history.version, history.digest, donors)
            self._outlet.send(sender, behind)
        elif (
            newest is not None and round_ <= newest[1].key.round <= self._swarm.farthest_version(fragment) + 1
        ):
            base = newest[1].key.round - 1
            self._outlet.send(sender, behind_message(fragment, round_, base, newest[1].state_digest, donors))
        else:
            return False
        return True

    def _answer_begun(self, place: Place, message: Ready, sender: PeerId, now: float) -> bool:
        """A READY for a round that we began. A member that missed BEGIN gets it again, and so does one that
        is too late and waits for the end. A member that is ready anew says that the attempt is over."""
        begun = self._begun.get(place)
        if begun is None:
            return False
        if sender in {member.peer for member in begun.begin.members}:
            if begun.readies.get(sender) == message:
                self._outlet.send(sender, begun.left(now))
                return True
            if self._joined_until(place) is None:
                del self._begun[place]
            return False
        if sender not in begun.late and now <= begun.in_time_until:
            self.cadences[place[0]].ready_came(place[1], now)
            self._swarm.readies.came(sender)
        begun.late.add(sender)
        left = begun.left(now)
        if message.state_digest == left.state_digest:
            self._outlet.send(sender, left)
        within_s = left.result_within_s
        if within_s <= 0 and self._joined_until(place) is None:
            del self._begun[place]
            return False
        waiting = Waiting(fragment=place[0], round=place[1], begins_within_s=max(0.0, within_s))
        self._outlet.send(sender, waiting)
        return True

    def _is_elsewhere(self, place: Place, peers: Iterable[PeerId], now: float) -> bool:
        """Whether an attempt of the round has committed or we are in one; ``peers``, who asked, are told."""
        known = self._histories[place[0]].commit(place[1])
        until = self._joined_until(place)
        if known is None and until is None:
            return False
        within_s = max(0.0, (until or now) - now)
        for peer in peers:
            waiting = Waiting(fragment=place[0], round=place[1], begins_within_s=within_s)
            self._outlet.send(peer, waiting if known is None else known[0])
        return True

    def withdraw(self, place: Place, peer: PeerId) -> None:
        """Forget a READY: its peer left, wants another round or coordinator, or has ended the offer."""
        gathering = self._gatherings.get(place)
        if gathering is not None:
            gathering.roster.readies.pop(peer, None)
            if not gathering.roster.readies:
                del self._gatherings[place]

    # ---- BEGIN

    def close_complete(self, now: float) -> bool:
        """Close the gatherings that need not or may not wait longer; True if there was one."""
        for place, gathering in list(self._gatherings.items()):
            if gathering.may_close(self._moved_to(place), now):
                del self._gatherings[place]
                if not self._is_elsewhere(place, gathering.roster.readies, now):
                    self._close(place, gathering, now)
                return True
        return False

    def _moved_to(self, place: Place) -> frozenset[PeerId]:
        """Peers known to have made the round before."""
        before = self._histories[place[0]].commit(place[1] - 1)
        return frozenset(PeerId(member.peer) for member in before[1].members) if before else frozenset()

    def _close(self, place: Place, gathering: Gathering, now: float) -> None:
        shortage = gathering.shortage(now)
        if shortage:
            gathering.refuse(shortage[:MAX_STRING])
            return
        gathering.note_punctuality(self._moved_to(place))
        self._counter += 1
        nonce = attempt_nonce(self._swarm.me, *place, self._counter, now)
        begin = gathering.begin(nonce)
        begun = _Begun(begin, gathering.roster.readies, now, gathering.in_time_until)
        group = tuple(PeerId(member.peer) for member in begin.members)
        begun.late.update(peer for peer in gathering.roster.alike(begin.state_digest) if peer not in group)
        self._begun.pop(place, None)
        self._begun[place] = begun
        for old in [key for key in self._begun if key[0] == place[0]][:-BEGUN_KEPT]:
            del self._begun[old]
        self._outlet.emit(Began(*place, group))
        for peer in group:
            self._outlet.send(peer, begin)

    def clamped(self, attempt: Attempt) -> Attempt:
        """``attempt`` with a quarter to sixteen times of the time that we would have given it, whatever a
        coordinator says."""
        place = attempt.fragment, attempt.round
        views = {peer: self._swarm.live.get(peer, PeerView()) for peer in attempt.shares}
        rates = {
            peer: LineRates(view.upload_bytes_per_s, view.download_bytes_per_s)
            for peer, view in views.items()
        }
        cadence = self.cadences[place[0]]
        transfer_s = divided(self._swarm, cadence, place, rates).transfer_s
        mine_s = parts_deadline_s(transfer_s, cadence.slices, self._swarm.shape.parts_cap_s)
        least_s = mine_s / SAFETY
        most_s = SAFETY * SAFETY * mine_s
        parts_s = min(max(attempt.parts_within_s, least_s), most_s)
        result_s = min(
            max(attempt.result_within_s, 2 * least_s + bounds.GRACE_S), 2 * most_s + bounds.GRACE_S
        )
        return replace(attempt, parts_within_s=parts_s, result_within_s=result_s)

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``Rounds.held``. One sender occupies one gathering per fragment."""
        fragments = len(self._histories)
        return {
            "GATHERINGS": (len(self._gatherings), fragments * len(self._swarm.live)),
            "BEGUN": (len(self._begun), BEGUN_KEPT * fragments),
        }

    # ---- time and the swarm

    def peers_changed(self) -> None:
        for place, gathering in list(self._gatherings.items()):
            for peer in [peer for peer in gathering.roster.readies if not self._swarm.is_live(peer)]:
                self.withdraw(place, peer)

    def get_timer(self) -> float | None:
        return min((gathering.get_timer() for gathering in self._gatherings.values()), default=None)
