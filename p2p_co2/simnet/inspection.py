"""Looks over a simulated swarm now and then: forks, open offers, what machines hold; and keeps its figures.

What happens at a step is checked there (``laws``); what is a state of things is checked here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from p2p_co2.membership import quiet_beat_s
from p2p_co2.rounds import bounds

if TYPE_CHECKING:
    from p2p_co2.simnet.process import Process
    from p2p_co2.simnet.swarm import Result, Swarm

LOOK_EVERY_S, LOOKS_IN_A_QUIET_BEAT = 1.0, 2.0
"""Once a second; in rounds of minutes, where less happens, so often in one of their slow heartbeats."""
OVERDUE_S = 1.5
"""A timer that is later than this is one that nobody heeds (a process looks at its timers at least every
second)."""
HEAL_ROUNDS = 3.0
HEAL_AFTER_S = 40.0
"""A fork is gone this many rounds, and these seconds for views to become one, after the last fault."""


class Inspector:
    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        clock = swarm.run_config.clock
        quiet_s = quiet_beat_s(clock.round_s) if clock.mode == "time" else 0.0
        self._look_every_s = max(LOOK_EVERY_S, quiet_s / LOOKS_IN_A_QUIET_BEAT)
        self._forked_since: dict[tuple[int, int], float] = {}
        self.forks = 0
        self.longest_fork_s = self.longest_offer_s = 0.0
        self.recoveries_s: list[float] = []
        self.first_contributions_s: list[float] = []
        self.held: dict[str, tuple[int, int]] = {}
        """By the name of its bound: the most that a peer held, and the bound then."""
        self.digests: dict[str, str] = {}
        self._recovered: set[int] = set()

    def begin(self) -> None:
        self._swarm.world.call_at(self._look_every_s, self._look)

    def _look(self) -> None:
        swarm = self._swarm
        for process in swarm.processes.values():
            if process.node is not None and process.stalled_until < swarm.world.now - OVERDUE_S:
                self._look_at(process)
        self._look_for_forks()
        swarm.world.call_at(swarm.world.now + self._look_every_s, self._look)

    # ---- one process

    def _look_at(self, process: Process) -> None:
        node = process.node
        assert node is not None
        now, books = node.now(), self._swarm.books
        for open_offer in node.rounds.open_offers():
            waited_s = now - open_offer.offered_at
            self.longest_offer_s = max(self.longest_offer_s, waited_s)
            if waited_s > bounds.READY_CAP_S + self._swarm.shape.round_cap_s:
                books.broken(process.peer, "deadlines", f"an offer is open for {waited_s:.0f} s")
            if now - open_offer.timer_at > OVERDUE_S:
                late_s = now - open_offer.timer_at
                books.broken(process.peer, "deadlines", f"an offer's timer is {late_s:.1f} s overdue")
        for name, at in node.timers().items():
            if at is not None and now - at > OVERDUE_S:
                books.broken(process.peer, "deadlines", f"the timer of {name} is {now - at:.1f} s overdue")
        links = {} if process.links is None else process.links.held()
        machines = (node.rounds, node.membership, node.catchup, node.far.outlook)
        for held in (*(machine.held() for machine in machines), links):
            for name, (count, bound) in held.items():
                if count > bound:
                    books.broken(process.peer, "memory", f"{name}: holds {count}, the bound is {bound}")
                if count >= self.held.get(name, (-1, 0))[0]:
                    self.held[name] = (count, bound)

    # ---- all together

    def _look_for_forks(self) -> None:
        swarm = self._swarm
        states: defaultdict[tuple[int, int], set[bytes]] = defaultdict(set)
        for process in swarm.processes.values():
            if process.node is not None:
                for fragment, agreed in enumerate(process.node.agreed):
                    states[fragment, agreed.version].add(agreed.digest)
        forked = {place for place, digests in states.items() if len(digests) > 1}
        for place in sorted(self._forked_since.keys() - forked):
            del self._forked_since[place]
        for place in sorted(forked):
            if place not in self._forked_since:
                self._forked_since[place] = swarm.world.now
                self.forks += 1
            self._judge_fork(place, swarm.world.now - self._forked_since[place])

    def _judge_fork(self, place: tuple[int, int], age_s: float) -> None:
        swarm = self._swarm
        self.longest_fork_s = max(self.longest_fork_s, age_s)
        text = f"fragment {place[0]} has two states of version {place[1]}"
        if swarm.views_differed_at is None:
            swarm.books.broken("", "forks", f"{text}, and nothing ever went wrong")
            return
        bound_s = HEAL_ROUNDS * swarm.run_config.clock.round_s + HEAL_AFTER_S
        if swarm.world.now - max(swarm.views_differed_at, swarm.world.now - age_s) > bound_s:
            swarm.books.broken("", "forks", f"{text}, {age_s:.0f} s after it came and long after it may")

    def saw_end(self, process: Process) -> None:
        """A process has ended: how it went."""
        if process.volunteer.processes > 1 and process.trained_at is not None:
            self.recoveries_s.append(process.trained_at - process.started_at)
            if process.contributed_at is not None:
                self.first_contributions_s.append(process.contributed_at - process.started_at)
        if process.finished:
            digests = [agreed.digest for agreed in process.ledger.agreed()]
            self.digests[process.peer] = b"".join(digests).hex()

    def result(self) -> Result:
        from p2p_co2.simnet.swarm import Result

        swarm = self._swarm
        books = swarm.books
        if not swarm.ended_early:
            self._judge_end()
        return Result(
            digest=swarm.log.digest(),
            virtual_s=swarm.world.now,
            turns=swarm.world.turns,
            violations=books.violations,
            digests=self.digests,
            written_off=dict(sorted(books.written_off.items())),
            units=sum(volunteer.work.units for volunteer in swarm.volunteers),
            recoveries_s=self.recoveries_s,
            first_contributions_s=self.first_contributions_s,
            forks=self.forks,
            longest_fork_s=self.longest_fork_s,
            longest_offer_s=self.longest_offer_s,
            held=dict(sorted(self.held.items())),
            counts=dict(sorted(swarm.log.counts.items())),
            faults=dict(sorted(swarm.count_faults().items())),
            left_behind=sorted(swarm.left_behind),
            ended_early=swarm.ended_early,
        )

    def _judge_end(self) -> None:
        """Everybody who was there at the end has ended well, and holds the same."""
        swarm = self._swarm
        there = [v for v in swarm.volunteers if v.name not in swarm.left_behind]
        absent = [v.name for v in there if v.identity.peer_id not in self.digests]
        if absent:
            swarm.books.broken("", "end", f"did not finish: {', '.join(absent[:8])} ({len(absent)} in all)")
        held = [self.digests[v.identity.peer_id] for v in there if v.identity.peer_id in self.digests]
        if len(set(held)) > 1:
            swarm.books.broken("", "end", f"{len(set(held))} different states at the end")
