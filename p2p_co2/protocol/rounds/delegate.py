"""A cell's coordinator towards the council: it says that its cell is ready, and later how the cell voted.

The council of a round is the coordinator of the cell that comes first by rendezvous hash. Whom to ask there
is known from the last decision, or looked up (``CellWanted``); any peer of that cell says who coordinates.

Laws: one peer is asked at a time and every wait has a timer; who answers is asked again, with what the cell
is ready with by then, until CELL_BEGIN comes: that message may be lost, the round that it waits for may have
failed sooner than promised, and members come and go meanwhile; a cell takes part in one council only, the
first that begins; how it voted is repeated until the decision comes or the time is up, and then nothing
changes. That the others are past the round, or have another state, is not believed of one peer alone that our
watchers do not bear out: a second one is asked, and who is contradicted, or says so again and again, is asked
last for a while.

Price: a CELL_READY of some kilobytes from each cell every few seconds for as long as the council gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.ahead import farthest_version
from p2p_co2.protocol.rounds.attempt import check_behind
from p2p_co2.protocol.rounds.cells import council_order
from p2p_co2.protocol.rounds.events import CellWanted
from p2p_co2.protocol.rounds.repute import SPOILT_IN_A_ROW
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm, coordination_order
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import AskOutcome, CellReady, CellResult, CellWaiting, Council

TRIES = 2
"""CELL_READYs to one peer that go unanswered before another is asked."""
ANSWER_S = 1.0
AGAIN_S, AGAIN_CAP_S = 1.0, 8.0
"""Who said that the council gathers is asked again after this, then after twice as long and so on."""
DOUBLED_AT_MOST = 10
"""It may say so a thousand times at once, and no double is two to that power."""
CHANGED_S = 0.3
"""Who comes or goes within this time after another is told of together with it."""
PEERS_ASKED = 4
"""Of one cell, before the next cell is asked."""
MAX_SENT_ON = 8
"""Times that one is sent on from peer to peer of a cell without anybody who gathers."""
LOOK_UP_S = 4.0
WHOLE_ROUND = 6
"""A round over all cells may take so many times what a cell says that slices take, and some seconds
(``council.result_within_s``)."""
SEEN_WITHIN_S = 8.0
"""A cell that is told that the others are past its round sees so itself, and is there, within this: its
watchers look every few seconds, most cells must have been seen, and a state takes some more."""
REPEAT_S = 1.0
ASK_BESIDE_S = 1.5
"""When the council has not answered for so long, others of its cell are asked (``witness``)."""
DOUBTED = 1 / 2
"""Who is said to be lost is waited for only this share of the time. It is heard every second."""
SILENT_S = 5.0
"""Between a cell and its council: who does not answer for so long is lost, or for longer where rounds are."""


def patience_s(council: Council) -> float:
    """How long a cell and the council of its round wait for a word of each other."""
    return max(SILENT_S, council.sums_within_s / 2)


class Delegate:
    """One round of one cell, from CELL_READY to CELL_BEGIN. ``ready(now)`` says what the cell is ready with
    now; None if it is not ready any more, and then nothing is sent. ``gather_s``: what a council waits for
    cells at most, and does if there are too few. ``failure``: why the cell gives up;
    ``elsewhere``: where the other cells are, if they are past the round or have another state."""

    def __init__(
        self, place: tuple[int, int], ready: Callable[[float], CellReady | None], swarm: Swarm,
        outlet: Outlet, now: float, gather_s: float = bounds.GATHER_CAP_S,
    ) -> None:  # fmt: skip
        self._gather_s = gather_s
        self.failure = ""
        self.elsewhere: CellWaiting | None = None
        self._place, self._ready, self._swarm, self._outlet = place, ready, swarm, outlet
        self._order = council_order(range(swarm.cells), *place)
        self._give_up_at = now + bounds.COUNCIL_CAP_S
        self._asked: PeerId | None = None
        self._tried: list[PeerId] = []
        """Of the cell that is asked: who did not answer, or sent us on."""
        self._claim: tuple[CellWaiting, PeerId] | None = None
        """Where the others are, by the word of one, and by whose; another is asked."""
        self._tries = self._sent_on = self._repeats = 0
        self._looked_up = False
        self._gathers_since: float | None = None
        """When who is asked said first that it gathers."""
        self._stalled: dict[PeerId, float] = {}
        """Who said so and did not begin, and how long it was believed."""
        self._parts_s = 0.0
        self._timer_at = now
        self._next(now)

    def get_timer(self) -> float:
        return min(self._timer_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        if now >= self._give_up_at:
            self.failure = f"the other cells did not begin within {bounds.COUNCIL_CAP_S:.0f} s"
        elif now >= self._timer_at:
            if self._asked is not None and self._tries < TRIES:
                self._send(now)
            elif self._asked is not None and self._claim is not None:
                self._believe(*self._claim, now)
            else:
                self._next(now)

    def cell_found(self, cell: int, now: float) -> None:
        """Peers of a cell were looked for; whoever asked for them."""
        if self._asked is None and self._looked_up and self._order[:1] == [cell]:
            self._next(now)

    def cell_changed(self, now: float) -> None:
        """Members of our cell came or went: say so soon."""
        if self._asked is not None and self._tries == 0:
            self._timer_at = min(self._timer_at, now + CHANGED_S)

    def waiting(self, message: CellWaiting, sender: PeerId, now: float) -> None:
        """The answer of the peer that is asked. Raises ``RemoteProtocolError``."""
        if sender != self._asked:
            return
        if not 0 <= message.begins_within_s <= self._swarm.shape.round_cap_s:
            raise RemoteProtocolError("impossible duration", f"{message.begins_within_s} s")
        if message.version and sender == self._swarm.me and self._is_beyond_us(message):
            self.failure = "its coordinator has gone further than most of its cell"
        elif message.version:
            self._check_elsewhere(message, now)
            self._claimed(message, sender, now)
        elif message.refusal:
            self.failure = message.refusal[: bounds.MAX_REASON]
        elif message.ask:
            self._follow(PeerId(message.ask), now)
        else:
            self._contradict(now)
            self._gathers(message.begins_within_s, now)

    def _gathers(self, within_s: float, now: float) -> None:
        """Who is asked says so. It may make a round meanwhile that we came too late for, and that takes its
        time; one that begins none for longer keeps all cells waiting, and the next cell is asked."""
        assert self._asked is not None
        since = self._gathers_since = self._gathers_since if self._gathers_since is not None else now
        if now >= since + self._borne_s():
            self._stalled[self._asked] = now - since
            self._go_on()
            self._next(now)
            return
        doubled = 2 ** min(self._repeats, DOUBLED_AT_MOST)
        again_s = min(AGAIN_CAP_S, AGAIN_S * doubled, since + self._borne_s() - now)
        self._repeats += 1
        self._tries = self._sent_on = 0
        self._timer_at = now + min(again_s, within_s + bounds.GRACE_S)

    def _borne_s(self) -> float:
        return max(self._gather_s, WHOLE_ROUND * self._parts_s + 3 * bounds.GRACE_S)

    def begun(self, council: PeerId, now: float) -> None:
        """A round began: who let none begin, though all that it takes were there, is asked last for a
        while."""
        for peer, cost_s in self._stalled.items():
            if peer != council:
                why = "it kept all cells waiting for a round that another one began"
                self._swarm.spoilt(peer, why, now, rounds=SPOILT_IN_A_ROW, cost_s=cost_s)

    def _check_elsewhere(self, message: CellWaiting, now: float) -> None:
        """Our own peer is told, too, and takes what it would refuse from itself for a bug."""
        check_behind(message)
        ready, version = self._ready(now), message.version
        if ready and (version, message.state_digest) == (self._place[1] - 1, ready.state_digest):
            raise RemoteProtocolError("impossible version", f"{version}, where our cell is")
        if self._is_beyond_us(message):
            raise RemoteProtocolError("impossible version", f"{version}; our cell is not so far")

    def _is_beyond_us(self, message: CellWaiting) -> bool:
        """Whether it names peers of our cell for a version that nobody there is known to be near."""
        is_far = bool(message.donors) and not any(map(self._swarm.is_near, map(PeerId, message.donors)))
        return not is_far and message.version > farthest_version(self._swarm, self._place[0])

    def _claimed(self, message: CellWaiting, sender: PeerId, now: float) -> None:
        """``sender`` says that the others are elsewhere. Of two the word of the less far one counts."""
        if self._swarm.repute.is_passed_over(sender, now):
            self._next(now)
        elif self._is_seen(message):
            self.elsewhere = message
        elif self._claim is not None and sender != self._claim[1]:
            self._believe(*self._claim, now)
            self._believe(min(self._claim[0], message, key=lambda claim: claim.version), sender, now)
        else:
            self._claim = message, sender
            self._next(now)

    def _weigh(self, claim: CellWaiting, teller: PeerId, now: float) -> None:
        """Others of its cell say that ``teller`` coordinates there. So it knows what state a round began from
        without us; but of a round that is over they would know: that is asked of the next cell."""
        if claim.version < self._place[1] or len(self._order) == 1:
            self._believe(claim, teller, now)
        else:
            self._go_on()
            self._next(now)

    def _believe(self, claim: CellWaiting, teller: PeerId, now: float) -> None:
        """For want of a better word. If our cell asks for this very round again when it should long have seen
        what it was told of, it did not bear out."""
        self.elsewhere = claim
        ready = self._ready(now)
        if ready is not None:
            fragment, asks = self._place[0], (self._place[1], ready.state_digest)
            asked, from_ = self._swarm.sent_elsewhere.get((teller, fragment), (None, 0.0))
            if asked != asks:
                is_far = claim.version >= self._place[1] and not any(map(self._swarm.is_near, claim.donors))
                from_ = now + (SEEN_WITHIN_S if is_far else 0.0)
            self._swarm.sent_elsewhere[teller, fragment] = asks, from_

    def _judge(self, ready: CellReady, now: float) -> None:
        """Who sent our cell elsewhere for nothing is asked last for a while: every cell asks the same peer
        first, and it could hold the round up for good. Peers whose point comes before they see what they were
        told of ask again in good faith, and of who told the truth."""
        told, asks = self._swarm.sent_elsewhere, (self._place[1], ready.state_digest)
        for (teller, fragment), (asked, from_) in list(told.items()):
            if fragment != self._place[0] or (asked == asks and now < from_):
                continue
            del told[teller, fragment]
            if asked == asks:
                why = "the other cells were not where it said that they are"
                self._swarm.spoilt(teller, why, now, rounds=SPOILT_IN_A_ROW)

    def _is_seen(self, message: CellWaiting) -> bool:
        """Whether those of our own cell that it names say so, too, or our watchers saw it in most cells."""
        fragment, _ = self._place
        told = [self._swarm.version_of(PeerId(donor), fragment) or 0 for donor in message.donors]
        if any(version >= message.version >= self._place[1] for version in told):
            return True
        held = [versions[fragment] for versions in self._swarm.awake.values() if fragment < len(versions)]
        there = sum(version >= message.version for version in held)
        return message.version >= self._place[1] and 2 * there > len(held)

    def _contradict(self, now: float) -> None:
        """The council gathers for the round that somebody said was over."""
        if self._claim is not None and self._claim[1] != self._asked:
            why = "it told that the other cells were past a round that they had not begun"
            self._swarm.spoilt(self._claim[1], why, now)
        self._claim = None

    def _follow(self, peer: PeerId, now: float) -> None:
        """Ask the peer that we were sent to, even again: it may have come to coordinate meanwhile."""
        if len(peer) > bounds.MAX_PEER_ID or self._swarm.cell_of(peer) != self._order[0]:
            raise RemoteProtocolError("wrong cell", "told to ask another cell's peer")
        if self._claim is not None and peer == self._claim[1]:
            self._weigh(*self._claim, now)
            return
        if self._swarm.repute.is_passed_over(peer, now):
            self._next(now)
            return
        if peer != self._asked and self._sent_on < MAX_SENT_ON:
            self._sent_on += 1
            self._ask(peer, now)

    def _next(self, now: float) -> None:
        """Ask the next peer of the council's cell, or go to the next cell."""
        self._asked = None
        while self._order:
            cell = self._order[0]
            known = [self._swarm.me] if cell == self._swarm.cell else self._swarm.others.get(cell, [])
            order = coordination_order(known, *self._place)
            left = [peer for peer in order if peer not in self._tried]
            left.sort(key=lambda peer: self._swarm.repute.is_passed_over(peer, now))
            if left and len(self._tried) < PEERS_ASKED:
                self._ask(left[0], now)
                return
            if self._claim is not None and self._looked_up:
                self._believe(*self._claim, now)  # nobody else is there to be asked
                return
            if not self._looked_up and cell != self._swarm.cell:
                self._looked_up = True
                self._timer_at = now + LOOK_UP_S
                self._outlet.emit(CellWanted(cell))
                return
            self._go_on()
        self.failure = "no other cell's coordinator answered"

    def _go_on(self) -> None:
        """To the next cell."""
        self._order.pop(0)
        self._tried.clear()
        self._sent_on, self._looked_up = 0, False

    def _ask(self, peer: PeerId, now: float) -> None:
        if peer not in self._tried:
            self._tried.append(peer)
        self._asked = peer
        self._tries = self._repeats = 0
        self._gathers_since = None
        self._send(now)

    def _send(self, now: float) -> None:
        assert self._asked is not None
        self._tries += 1
        self._timer_at = now + ANSWER_S * self._tries
        ready = self._ready(now)
        if ready is not None:
            self._parts_s = ready.parts_within_s
            self._judge(ready, now)
            self._outlet.send(self._asked, ready)


class Voice:
    """A cell's word to the council from its BEGIN to the decision: that somebody is there and waits for it,
    and how the cell voted. ``beside``: who would know that the council is lost. ``failure``: nobody answered,
    or not in time; ``is_lost``: the former."""

    def __init__(
        self, council: Council, outlet: Outlet, now: float, until: float, beside: Sequence[PeerId] = ()
    ) -> None:
        self.council = council
        self._beside = beside
        self._told_lost: set[PeerId] = set()
        self.failure = ""
        self.is_lost = False
        self.result: CellResult | None = None
        self._outlet, self._give_up_at = outlet, until
        self._heard_at = now
        self._send(now)

    def vote(self, result: CellResult, now: float) -> None:
        self.result = result
        self._send(now)

    def answered(self, now: float) -> None:
        """The council lives, and has not decided."""
        self._told_lost.clear()
        self._heard_at = now

    def told_lost(self, sender: PeerId) -> None:
        """One of the council's cell says that its coordinator is gone. If all who were asked do, it is waited
        for no longer than who is doubted, however often they say so."""
        if sender in self._beside:
            self._told_lost.add(sender)

    @property
    def _lost_at(self) -> float:
        is_doubted = self._told_lost and len(self._told_lost) == len(self._beside)
        return self._heard_at + patience_s(self.council) * (DOUBTED if is_doubted else 1.0)

    def get_timer(self) -> float:
        return min(self._again_at, self._lost_at, self._give_up_at)

    def handle_timer(self, now: float) -> None:
        if now >= self._give_up_at:
            self.failure = "the cells' council did not decide in time"
        elif now >= self._lost_at and now < self._again_at + REPEAT_S:
            self.failure, self.is_lost = "the coordinator of the cells' council was lost", True
        elif now >= self._lost_at:  # it is we who slept: what it said lies there, or it says so again
            self.answered(now)
            self._send(now)
        elif now >= self._again_at:
            self._send(now)

    def _send(self, now: float) -> None:
        self._again_at = now + REPEAT_S
        coordinator = PeerId(self.council.coordinator)
        if self.result is not None:
            self._outlet.send(coordinator, self.result)
        asked = [coordinator]
        if now >= self._heard_at + ASK_BESIDE_S:
            asked += self._beside
        for peer in asked:
            self._outlet.send(peer, AskOutcome(key=self.council.key))
