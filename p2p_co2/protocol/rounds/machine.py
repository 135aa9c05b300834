"""The rounds of one peer: every role of every fragment behind five verbs.

A round averages one fragment in one group and ends in a commit or in an abort with a reason. This machine has
no I/O, no clock, no randomness and no tensors: a function of (state, message, ``now``). So the same code runs
over real carriers and in virtual time (the sans-I/O style of aioquic). ``now`` is any monotonic clock in
seconds.

    offer -> Asking ---BEGIN---> Member ---a quorum's votes---> Committed | OutcomeWithoutBytes | Aborted
                | READY             ^                           (or FellBehind)
                v                   | RESULT, from all to all
            Gathering            the other members

Laws: an offer always ends, by a certificate or by a timer. Two honest members that commit a round commit the
same bytes and contributors (``member`` says why). Everything held is bounded (``bounds``). A message that
breaks the rules raises ``RemoteProtocolError``; a late or doubled one is no offence. The price: a doubt costs
a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf

from google.protobuf.message import Message

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.rounds.attempt import check_place, read_key
from p2p_co2.protocol.rounds.certificate import Signer, open_decision
from p2p_co2.protocol.rounds.coordination import Coordination
from p2p_co2.protocol.rounds.events import (
    CheckWanted,
    Likeness,
    Offer,
    OpenOffer,
    PayloadShape,
    PeerView,
    ReduceJob,
    Refused,
    RoundsEvent,
)
from p2p_co2.protocol.rounds.fragment import FragmentRounds
from p2p_co2.protocol.rounds.history import History
from p2p_co2.protocol.rounds.member import Member
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm
from p2p_co2.system.memory import Buffer
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.schedule import Stage

_Keyed = wire.Begin | wire.Part | wire.Mean | wire.Result | wire.AskOutcome


class Rounds:
    """This peer's part in all rounds of a run.

    ``run`` is the digest of the ``RunConfig`` (32 bytes); ``shape`` the encoded size of every fragment.
    Single-threaded.
    After every call the caller drains ``messages_to_send`` and ``next_event`` and sets its timer to
    ``get_timer``.
    """

    def __init__(self, identity: Identity, run: bytes, shape: PayloadShape) -> None:
        self._me = identity.peer_id
        self._run = run
        self._shape = shape
        self.swarm = RoundSwarm(self._me, shape)
        self.outlet = Outlet(self._me)
        self.swarm.repute.emit = self.outlet.emit
        histories = self.swarm.voters.histories = [
            History(self.swarm.is_live, self.swarm.voters.met, partial(self.swarm.working_on, fragment))
            for fragment in range(len(shape.blocks))
        ]
        self._coordination = Coordination(
            self.swarm, self.outlet, histories,
            joined_until=lambda place: self._fragments[place[0]].joined_until(place[1]),
        )  # fmt: skip
        signer = Signer(identity, run)
        self._fragments = [
            FragmentRounds(fragment, signer, self.swarm, self.outlet, history, self._coordination)
            for fragment, history in enumerate(histories)
        ]
        self._now = 0.0
        self.revision = 0
        """Grows with every call that may have changed what is held or waited for."""
        self._timed = -1
        """The revision of ``_timer_at``."""
        self._timer_at: float | None = None

    # ---- what the node tells us

    def set_peers(self, live: Mapping[PeerId, PeerView], now: float) -> None:
        """The live peers. This one may be among them, for what it says of itself; it is live anyway."""
        self.swarm.set_live(live)
        for fragment in self._fragments:
            for role in fragment.roles():
                role.peers_changed(now)
        self._coordination.peers_changed()
        self._settle(now)

    def set_state(self, fragment: int, version: int, digest: bytes) -> None:
        """The agreed state that we hold now. An open offer from another one ends in ``Aborted``."""
        self.swarm.my_versions[fragment] = version
        self.revision += 1
        self._fragments[fragment].set_state(version, digest, self._now)

    def offer(self, offer: Offer, now: float) -> None:
        """Take part in the round after our state. Raises ``LocalProtocolError`` while the fragment has an
        open offer, or if the offer fits neither our state nor the shape."""
        self._fragments[offer.fragment].start(offer, now)
        self._settle(now)

    def withdraw(self, fragment: int, reason: str, now: float) -> bool:
        """End our open offer of a fragment with ``Aborted(reason)``; False if there is none.

        Who leads a round that has begun is not told: it ends without us, and a new offer for it may follow.
        """
        withdrawn = self._fragments[fragment].withdraw(reason, now)
        self._settle(now)
        return withdrawn

    def forget_outcome(self, fragment: int, round_: int) -> None:
        """No donor holds the bytes of a commit that we learned of: go on as if it had not been."""
        self.revision += 1
        self._fragments[fragment].forget(round_, self._now)

    def replayed(self, decision: wire.Decision) -> None:
        """The commit that made the state after ours, with a mean that a donor gave us."""
        outcome = open_decision(decision, self._run, self._shape)
        history = self._fragments[outcome.key.fragment].history
        if not history.is_settled_by(outcome, self._me):
            history.doubt(outcome, self.outlet.emit)

    def next_commit(self, fragment: int) -> wire.Outcome | None:
        """The commit that follows the state that we hold, if anybody told us of it."""
        known = self._fragments[fragment].history.next_commit()
        return None if known is None else known[1]

    def stage(self, fragment: int) -> Stage:
        """How far the round of our offer is; other threads may ask."""
        mine = self._fragments[fragment].mine
        if (member := mine.member) is not None:
            return "means" if member.exchange.brings_means else "slices"
        return "" if mine.asking is None else "asking"

    def is_everywhere(self, fragment: int, version: int) -> bool:
        """Whether all live peers are known to hold ``version``: they say so, or they are in the round after
        it. Never for a peer that is alone."""
        member = self._fragments[fragment].mine.member
        there = member.attempt.shares if member is not None and member.attempt.round > version else {}
        others = [peer for peer in self.swarm.live if peer not in there]
        known = [self.swarm.version_of(peer, fragment) for peer in others]
        return len(self.swarm.live) > 1 and all(one is not None and one >= version for one in known)

    def is_completing(self, fragment: int) -> bool:
        """Whether the bytes of a fragment's newest commit are on their way: asking donors would bring them
        twice."""
        return self._fragments[fragment].mine.completion is not None

    def scored(self, standing: Mapping[PeerId, float]) -> None:
        """As ``Repute.scored`` has it."""
        self.swarm.repute.scored(standing)

    def reduced(self, job: ReduceJob, mean: Buffer, now: float) -> None:
        """The encoded mean of a ``ReduceWanted``; ignored if the job is not open any more."""
        member = self._member_of(job)
        if member is not None:
            member.exchange.reduced(job, mean, now)
            member.check(now)
        self._settle(now)

    def checked(self, job: CheckWanted, likeness: Likeness, now: float) -> None:
        """What the mean of a ``CheckWanted`` is like; ignored if the attempt is over."""
        member = self._member_of(job)
        if member is not None:
            member.exchange.checked(job, likeness)
            member.check(now)
        self._settle(now)

    def refused_slice(self, job: ReduceJob, peer: PeerId, reason: str, now: float) -> None:
        """The tensor side found ``peer``'s slice hostile: it is left out and the job comes again without it.
        Nobody is blamed for what a job that is over held: its memory may be in use again."""
        member = self._member_of(job)
        if member is not None and member.exchange.refused_slice(job, peer):
            where = f"fragment {job.fragment}, round {job.round}"
            self.outlet.emit(Refused(peer, "bad slice", f"{reason}; {where}"))
        self._settle(now)

    def _member_of(self, job: ReduceJob | CheckWanted) -> Member | None:
        member = self._fragments[job.fragment].mine.member
        return member if member is not None and member.attempt.id == job.key else None

    # ---- the pump

    def receive(self, message: Message, sender: PeerId, now: float) -> bool:
        """One body message of a peer; False for a piece that came for nothing (late, doubled). Raises
        ``RemoteProtocolError`` if it breaks the rules; count it and go on."""
        has_moved = True
        try:
            if isinstance(message, wire.Result):  # all to all: of most nothing follows
                has_moved = self._fragment_of(message).on_result(message, sender, now)
                return True
            return self._dispatch(message, sender, now)
        finally:
            if has_moved:
                self._settle(now)

    def get_timer(self) -> float | None:
        """When ``handle_timer`` wants to be called next."""
        if self._timed != self.revision:
            self._timed = self.revision
            times = [role.get_timer() for fragment in self._fragments for role in fragment.roles()]
            gathered_at = self._coordination.get_timer()
            self._timer_at = min(times if gathered_at is None else [*times, gathered_at], default=None)
        return self._timer_at

    def handle_timer(self, now: float) -> None:
        """Do what is due."""
        self._settle(now)
        for fragment in self._fragments:
            for role in fragment.roles():
                if now >= role.get_timer():
                    role.handle_timer(now)
        self._settle(now)

    def messages_to_send(self) -> list[tuple[PeerId, Message]]:
        """All that is to be sent, and forget it. Payloads are in here as pieces: about one payload of
        memory."""
        messages = self.outlet.messages
        self.outlet.messages = []
        return messages

    def next_event(self) -> RoundsEvent | None:
        return self.outlet.events.popleft() if self.outlet.events else None

    # ---- what there is to see

    def open_offers(self) -> list[OpenOffer]:
        """Our offers that wait for their end."""
        offers = []
        for index, fragment in enumerate(self._fragments):
            if fragment.mine.offer is not None:
                at = min([role.get_timer() for role in fragment.roles()], default=inf)
                offers.append(OpenOffer(index, fragment.mine.offered_at, at))
        return offers

    def held(self) -> dict[str, tuple[int, int]]:
        """What is held of the kinds that strangers can make grow: (now, at most) by the name of the bound. Of
        the fragment that has least room left."""
        most = self._coordination.held() | self.swarm.repute.held()
        for fragment in self._fragments:
            for name, now in (fragment.history.held() | fragment.early.held()).items():
                if name not in most or now[0] - now[1] > most[name][0] - most[name][1]:
                    most[name] = now
        return most

    def _settle(self, now: float) -> None:
        """Deliver what we sent to ourselves and end what has failed, until nothing moves."""
        self._now = now
        self.revision += 1
        while True:
            if self.outlet.loop:
                message = self.outlet.loop.popleft()
                try:
                    self._dispatch(message, self._me, now)
                except RemoteProtocolError as error:
                    raise LocalProtocolError(
                        f"we refuse our own {message.__class__.__name__}: {error}"
                    ) from error
                continue
            has_moved = any(fragment.settle(now) for fragment in self._fragments)
            has_moved = has_moved or self._coordination.close_complete(now)
            if not has_moved and not self.outlet.loop:
                break

    # ---- messages

    def _dispatch(self, message: Message, sender: PeerId, now: float) -> bool:
        match message:
            case wire.Ready():
                self._coordination.on_ready(message, sender, now)
            case wire.Waiting():
                self._fragment_of(message).on_waiting(message, sender, now)
            case wire.Behind():
                self._fragment_of(message).on_behind(message, sender, now)
            case wire.Begin():
                self._fragment_of(message).on_begin(message, sender, now)
            case wire.Part() | wire.Mean():
                return self._fragment_of(message).on_piece(message, sender, now)
            case wire.Result():
                self._fragment_of(message).on_result(message, sender, now)
            case wire.AskOutcome():
                self._fragment_of(message).on_ask(message, sender)
            case wire.Decision():
                outcome = open_decision(message, self._run, self._shape)
                self._fragments[outcome.key.fragment].on_decision(message, outcome, sender, now)
            case _:
                raise LocalProtocolError(f"{message.__class__.__name__} is not for the rounds machine")
        return True

    def _fragment_of(self, message: wire.Waiting | wire.Behind | _Keyed) -> FragmentRounds:
        if isinstance(message, wire.Waiting | wire.Behind):
            check_place(message.fragment, message.round, self._shape)
            return self._fragments[message.fragment]
        return self._fragments[read_key(message.key, self._shape)[0]]
