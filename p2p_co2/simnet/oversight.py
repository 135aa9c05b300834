"""Looks at the laws of a simulated swarm wherever they may be broken, and keeps its figures.

What a process holds is looked at as each of its turns ends. What lasts too long is looked for every
``LOOK_EVERY_S``, since a process that stands still takes no turn.

Laws: no timer is due at two looks in a row while its process could run; an open offer has a timer and ends
within the bound of the run; whoever has trained to the end goes within the time that it told; what is held
stays within the bound that it names; who was there at the end finished, with one state. Nothing here changes
what a process does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_co2.node.node import Node
from p2p_co2.node.progress import LACKS, Where
from p2p_co2.protocol.ledger import AgreedVersion
from p2p_co2.protocol.rounds.bounds import READY_CAP_S
from p2p_co2.simnet.laws import Books, Forks, Violation, comes_of
from p2p_co2.simnet.process import Process, Volunteer
from p2p_co2.simnet.scene import Scene
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.schedule import LOADS_CAP_S, LOADS_QUIET_S

LOOK_EVERY_S, LOOKS_IN_A_ROUND = 1.5, 20.0
"""A process looks at its timers at least every second. In rounds of minutes looks are rarer."""
HANG_UP_S = 2 * LOADS_QUIET_S
"""So much later than a peer told that it would be gone it may still be there, to say goodbye; and so much
later than others count it as needed: it got, or gave, a chunk of a state, or a last round was made."""
ROUNDS_OF_AN_OFFER = 3.0
"""An offer may be late for a round, be in one, and wait for its means: each as long as one may last."""
HEAL_ROUNDS, HEAL_AFTER_S = 3.0, 40.0
"""A fork is gone this many rounds, these seconds for views to become one, and the time in which the states
are loaded, after the last fault is over."""


@dataclass
class Result:
    """What came of a simulation. ``digest``: sha256 of all events. ``virtual_s``: how long it was;
    ``turns``: callbacks it took; ``counts`` of events and ``faults`` that came to pass, by kind; ``held``, by
    the name of its bound: the most that a peer held, and the bound then. ``digests``: the agreed states of
    the peers that finished, hex, by peer. ``left_behind``: peers that came when the others had finished, or
    were still joining when the last of them went; ``lacking``: peers that said that they leave without what
    others hold, or that nobody could give it to them. ``ended_early``: somebody stopped it, and how it would
    have ended was not judged."""

    digest: str = ""
    virtual_s: float = 0.0
    turns: int = 0
    violations: list[Violation] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    written_off: dict[str, int] = field(default_factory=dict)
    units: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    first_contributions_s: list[float] = field(default_factory=list)
    forks: int = 0
    longest_fork_s: float = 0.0
    longest_offer_s: float = 0.0
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    ended_early: bool = False


class Oversight:
    """Of a ``process`` that has its ``node``. ``offer_bound_s``: how long an offer may be open."""

    def __init__(
        self, process: Process, node: Node, books: Books, result: Result, offer_bound_s: float
    ) -> None:
        self._process = process
        self.node = node
        self._books = books
        self._result = result
        self._offer_bound_s = offer_bound_s
        self._machines: tuple[Any, ...] = node.rounds, node.membership
        self._counted = [-1] * len(self._machines)
        """What the machines had counted when they were looked at last."""
        self._due: dict[str, float] = {}
        """The timers that were due at the last look."""
        self._goes_by: tuple[float, float, float] | None = None
        """Since when it has trained to the end, within what time it goes, and when to look at that."""
        self._told: set[object] = set()
        process.loop.after_turn = self.turned

    def turned(self) -> None:
        """A turn has ended: see what is held by machines that counted something in it."""
        for place, machine in enumerate(self._machines):
            if machine.revision != self._counted[place]:
                self._counted[place] = machine.revision
                self._weigh(machine.held())

    def _weigh(self, held: Mapping[str, tuple[int, int]]) -> None:
        most = self._result.held
        for name, now in held.items():
            if name not in most or now[0] > most[name][0]:
                most[name] = now
            if now[0] > now[1]:
                self._broken_once((name, now[0]), f"{name}: holds {now[0]}, the bound is {now[1]}", "memory")

    # ---- every so often

    def look(self) -> None:
        """See what waits for too long, and what grew without being counted."""
        node = self.node
        now = self.node.now()
        self._weigh(node.membership.held() | node.catchup.donor.held())
        is_awake = self._books.now() > self._process.stalled_until + LOOK_EVERY_S
        due = {name: at for name, at in node.timers().items() if at is not None and at <= now}
        for name, at in due.items():
            if is_awake and self._due.get(name) == at:
                self._broken_once((name, at), f"the timer of {name} is {now - at:.1f} s overdue")
        self._due = due
        for offer in node.rounds.open_offers():
            age_s = now - offer.offered_at
            place = (offer.fragment, offer.offered_at)
            self._result.longest_offer_s = max(self._result.longest_offer_s, age_s)
            if offer.timer_at == math.inf:
                self._broken_once(place, "an open offer has no timer")
            elif age_s > self._offer_bound_s + self._slept_s(self._books.now() - age_s):
                self._broken_once(place, f"an offer is open for {age_s:.0f} s")
        if self._goes_by is not None:
            self._look_at_end(*self._goes_by)

    def goes_within(self, told_s: float) -> None:
        """Training has ended, and the process said how long it may take to go."""
        self._goes_by = self._books.now(), told_s, 0.0

    def _look_at_end(self, since: float, told_s: float, looks_at: float) -> None:
        now = self._books.now()
        progress = self.node.progress
        rate = 1.0 + self._process.volunteer.drift
        due_at = since + told_s / rate + self._slept_s(since) + HANG_UP_S
        if now < max(due_at, looks_at):
            return
        left_off_s = LOADS_QUIET_S + HANG_UP_S
        is_needed = progress.is_needed(left_off_s) or progress.is_needed(LOADS_QUIET_S, settled=True)
        if now < due_at + LOADS_CAP_S and is_needed:
            self._goes_by = since, told_s, now + left_off_s
            return
        text = f"is there {now - since:.0f} s after its training, for {told_s:.0f} s told"
        self._broken_once("end", text)

    def _slept_s(self, since: float) -> float:
        """How long the process stood still after ``since``."""
        return sum(max(0.0, until - max(since, at)) for at, until in self._process.stalls)

    def _broken_once(self, place: object, text: str, law: str = "deadlines") -> None:
        if place not in self._told:
            self._told.add(place)
            self._books.broken(self._process.peer, law, text)


class Inspector:
    """Of a whole swarm; a ``ProcessWatch``. ``processes``: those that run, by their volunteers'
    index. ``offer_bound_s``: how long an offer may be open; ``heal_s``: how long a fork may be; ``ends``:
    with what each peer ended as the run was over.

    A peer need not end as the others do if its last process was ``left_behind`` (it came when the others had
    finished, or met none of them); if it was ``lacking`` (it said as it left that it goes without what others
    hold), or was ``not_given`` the agreed state by anybody, and its line is too slow to bring a state in
    time."""

    def __init__(
        self, scene: Scene, volunteers: Sequence[Volunteer], processes: Mapping[int, Process],
        on_end: Callable[[Process, BaseException | None], None],
    ) -> None:  # fmt: skip
        self._scene = scene
        self._volunteers = volunteers
        self._processes = processes
        self._on_end = on_end
        rounds_s = ROUNDS_OF_AN_OFFER * scene.shape.round_cap_s
        self.offer_bound_s = scene.settings.offers_within_s or READY_CAP_S + rounds_s
        lines = {volunteer.profile for volunteer in volunteers}
        loads_s = {line: scene.loading_s(line, lines) for line in lines if len(volunteers) > 1}
        self._slow = {v.identity.peer_id for v in volunteers if loads_s.get(v.profile, 0.0) > LOADS_CAP_S}
        """Peers over whose lines a state takes longer than others stay for it at the end."""
        heal_s = HEAL_ROUNDS * scene.settings.run.clock.round_s + HEAL_AFTER_S
        self.heal_s = heal_s + max(loads_s.values(), default=0.0)
        self._forks = Forks(scene.books, self.heal_s)
        self._result = Result()
        self.left_behind = set[PeerId]()
        self.lacking = set[PeerId]()
        self.not_given = set[PeerId]()
        self.ends: dict[PeerId, Sequence[AgreedVersion]] = {}
        self._first_end_at = math.inf
        """When somebody first ended as the run was over."""
        self._oversights: dict[Process, Oversight] = {}
        self._look()

    def _look(self) -> None:
        for oversight in self._oversights.values():
            oversight.look()
        held = [oversight.node.agreed for oversight in self._oversights.values()]
        self._forks.look(held, self.went_wrong_at())
        every_s = max(LOOK_EVERY_S, self._scene.settings.run.clock.round_s / LOOKS_IN_A_ROUND)
        self._scene.world.call_at(self._scene.world.now + every_s, self._look)

    def went_wrong_at(self) -> float | None:
        """When peers could last come to see different swarms: now, while anything is wrong; None if never."""
        internet = self._scene.internet
        now = self._scene.world.now
        stalled = (process.stalled_until > now for process in self._processes.values())
        is_wrong = not internet.is_whole or internet.is_noisy or any(stalled)
        return now if is_wrong else self._scene.books.views_differed_at

    # ---- a process

    def starts(self, peer: PeerId) -> None:
        """A process begins: what its last one said is over."""
        for peers in (self.left_behind, self.lacking, self.not_given):
            peers.discard(peer)

    def saw_node(self, process: Process, node: Node) -> None:
        books = self._scene.books
        self._oversights[process] = Oversight(process, node, books, self._result, self.offer_bound_s)

    def saw_arrival(self, process: Process, is_there: bool) -> None:
        if self._came_after_the_end(process):
            self.left_behind.add(process.peer)
        elif not is_there and process.node is not None and process.node.progress.joining.has_met:
            self.not_given.add(process.peer)

    def _came_after_the_end(self, process: Process) -> bool:
        """Whether a peer that joins (or gave it up) could not have met the run any more: it began when some
        had finished, all who are there came after that, and it is with them or has heard nobody."""
        if process.started_at < self._first_end_at:
            return False
        others = [other for other in self._processes.values() if other is not process]
        inside = {other.peer for other in others if other.trained_at is not None}
        joining = process.node.progress.joining if process.node is not None else None
        is_alone = joining is None or joining.where is Where.LEFT_BEHIND or not joining.has_met
        return inside <= self.left_behind and (bool(inside) or is_alone)

    def hear(self, process: Process, event: ev.Event) -> None:
        match event:
            case ev.FragmentApplied(contributed=True) if process.contributed_at is None:
                process.contributed_at = self._scene.world.now
            case ev.RoundBegan() if len(event.group) == 1:  # others may make that round, too
                self._scene.books.views_differ()
            case ev.Warned() if event.text.startswith(LACKS):
                self.lacking.add(process.peer)
            case ev.TrainingEnded() if process in self._oversights:
                self._oversights[process].goes_within(event.offers_within_s + event.settles_within_s)
            case ev.PeerFinished(reason=reason) if reason == ev.THE_RUN_IS_OVER:
                self._first_end_at = min(self._first_end_at, self._scene.world.now)
                self.ends[process.peer] = process.ledger.agreed()
        self._scene.log.write(event)

    def ended(self, process: Process, error: BaseException | None) -> None:
        result = self._result
        if self._oversights.pop(process, None) is not None:
            process.loop.after_turn = None
        if process.volunteer.processes > 1 and process.trained_at is not None:
            result.recoveries_s.append(process.trained_at - process.started_at)
            if process.contributed_at is not None:
                result.first_contributions_s.append(process.contributed_at - process.started_at)
        self._on_end(process, error)

    # ---- the end

    def result(self, ended_early: bool) -> Result:
        """What came of it, once nobody runs any more."""
        result = self._result
        scene = self._scene
        volunteers = self._volunteers
        self._forks.look((), None)
        if not ended_early:
            self.judge_end()
        result.digest = scene.log.digest()
        result.counts = dict(sorted(scene.log.counts.items()))
        result.virtual_s = scene.world.now
        result.turns = scene.world.turns
        result.ended_early = ended_early
        result.violations = scene.books.violations
        result.written_off = dict(sorted(scene.books.written_off.items()))
        result.digests = {str(peer): _digest(agreed) for peer, agreed in self.ends.items()}
        result.units = sum(volunteer.work.units for volunteer in volunteers)
        result.forks = self._forks.seen
        result.longest_fork_s = self._forks.longest_s
        by_nature = {
            "behind NAT": sum(v.profile.nat != "open" for v in volunteers),
            "skewed clock": sum(v.skew_s != 0.0 and v.drift != 0.0 for v in volunteers),
        }
        result.held = dict(sorted(result.held.items()))
        result.faults = dict(sorted((scene.internet.faults + Counter(by_nature)).items()))
        result.left_behind = self._names_of(self.left_behind)
        result.lacking = self._names_of(self.lacking | self.not_given)
        return result

    def _names_of(self, peers: set[PeerId]) -> list[str]:
        return [v.name for v in self._volunteers if v.identity.peer_id in peers]

    def judge_end(self) -> None:
        """Everybody who was there at the end has ended well, and holds the same; but for those who are
        excused, and what these lack can only be later rounds of a state that they do hold."""
        books = self._scene.books
        ends = self.ends
        there = {v.identity.peer_id for v in self._volunteers} - self.left_behind
        if absent := self._names_of(there - ends.keys() - (self.not_given & self._slow)):
            books.broken("", "end", f"did not finish: {', '.join(absent[:8])} ({len(absent)} in all)")
        ended = {peer: ends[peer] for peer in sorted(there & ends.keys())}
        late = {peer: ended.pop(peer) for peer in sorted(self.lacking & self._slow & ended.keys())}
        if (states := len(set(map(_digest, ended.values())))) > 1:
            books.broken("", "end", f"{states} different states at the end")
        wrong_at = self.went_wrong_at()
        if wrong_at is not None and self._scene.world.now <= wrong_at + self.heal_s:
            return  # forks have their time
        # Where all say that they lack something, what any of them has is what the others may lack.
        of_all = zip(*(ended or late).values(), strict=True)
        furthest = [max(of_one, key=lambda agreed: agreed.version) for of_one in of_all]
        for peer, holds in late.items():
            for fragment, (mine, its) in enumerate(zip(holds, furthest, strict=True)):
                if not comes_of(its, mine, books.histories[fragment]):
                    text = f"left with another state of fragment {fragment}, and says that it lacks one"
                    books.broken(peer, "end", text)


def _digest(agreed: Sequence[AgreedVersion]) -> str:
    return b"".join(one.digest for one in agreed).hex()
