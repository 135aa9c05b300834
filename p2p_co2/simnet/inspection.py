"""Has the laws of a simulated swarm looked at wherever they may be broken, and keeps its figures.

What peers do to what is agreed is checked by the ledgers' audits (``laws``), what a process holds and waits
for at each of its turns (``oversight``), forks whenever somebody's state changes (``forks``), and here how
the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2p_co2.protocol.schedule import LOADS_CAP_S
from p2p_co2.simnet.forks import Forks, comes_of
from p2p_co2.simnet.oversight import Oversight
from p2p_co2.simnet.patience import loading_by_s, loading_s, offer_bound_s

if TYPE_CHECKING:
    from p2p_co2.node.ledger import AgreedVersion
    from p2p_co2.node.node import Node
    from p2p_co2.protocol.wire.identity import PeerId
    from p2p_co2.simnet.process import Process
    from p2p_co2.simnet.swarm import Result, Swarm

HEAL_ROUNDS = 3.0
HEAL_AFTER_S = 40.0
"""A fork is gone this many rounds, these seconds for views to become one, and the time in which the states
are loaded, after the last fault is over."""


class Inspector:
    """``offer_bound_s``: how long an offer may be open; ``heal_s``: how long a fork may be."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        lines = [volunteer.profile for volunteer in swarm.volunteers]
        derived_s = offer_bound_s(swarm.shape, swarm.internet.scale, lines)
        self.offer_bound_s = swarm.settings.offers_within_s or derived_s
        loads_s = loading_s(swarm.state_bytes, swarm.internet.scale, lines)
        size_bytes = sum(swarm.state_bytes) * swarm.internet.scale
        self._slow = {line for line in set(lines) if loading_by_s(size_bytes, line, lines) > LOADS_CAP_S}
        """Lines over which a state takes longer than others stay for it at the end."""
        heal_s = HEAL_ROUNDS * swarm.run_config.clock.round_s + HEAL_AFTER_S
        self.heal_s = heal_s + loads_s
        self.forks = Forks(swarm.world, swarm.books, self.heal_s, swarm.went_wrong_at)
        self.longest_offer_s = 0.0
        self.recoveries_s: list[float] = []
        self.first_contributions_s: list[float] = []
        self.held: dict[str, tuple[int, int]] = {}
        """By the name of its bound: the most that a peer held, and the bound then."""
        self.digests: dict[str, str] = {}
        self.lacking: set[PeerId] = set()
        """Peers that said, as they left, that they go without what others hold."""
        self.not_given: set[PeerId] = set()
        """Peers that joined, and left since nobody could give them the agreed state."""
        self.first_end_at = math.inf
        """When somebody first ended as the run was over."""
        self._ends: dict[str, Sequence[AgreedVersion]] = {}
        self._oversights: dict[Process, Oversight] = {}

    def starts(self, peer: PeerId) -> None:
        """A process begins: what its last one said is over."""
        self.lacking.discard(peer)
        self.not_given.discard(peer)

    def saw_node(self, process: Process, node: Node) -> None:
        """A process has its node now."""
        self._oversights[process] = Oversight(process, node, self, self.offer_bound_s)

    def saw_training_end(self, process: Process, told_s: float) -> None:
        """A process has trained to the end of the run, and told within what time it goes."""
        if (oversight := self._oversights.get(process)) is not None:
            oversight.goes_within(told_s, self._swarm.world.now)

    def offer_ended(self, after_s: float) -> None:
        self.longest_offer_s = max(self.longest_offer_s, after_s)

    def saw_end(self, process: Process) -> None:
        """A process has ended: how it went."""
        if (oversight := self._oversights.pop(process, None)) is not None:
            oversight.end()
            self.forks.gone(process.peer)
        if process.volunteer.processes > 1 and process.trained_at is not None:
            self.recoveries_s.append(process.trained_at - process.started_at)
            if process.contributed_at is not None:
                self.first_contributions_s.append(process.contributed_at - process.started_at)
        if process.finished:
            self.first_end_at = min(self.first_end_at, self._swarm.world.now)
            self._ends[process.peer] = agreed = process.ledger.agreed()
            self.digests[process.peer] = b"".join(version.digest for version in agreed).hex()

    def result(self) -> Result:
        from p2p_co2.simnet.swarm import Result

        swarm = self._swarm
        books = swarm.books
        self.forks.end()
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
            forks=self.forks.seen,
            longest_fork_s=self.forks.longest_s,
            longest_offer_s=self.longest_offer_s,
            held=dict(sorted(self.held.items())),
            counts=dict(sorted(swarm.log.counts.items())),
            faults=dict(sorted(swarm.count_faults().items())),
            left_behind=sorted(swarm.left_behind),
            lacking=[v.name for v in swarm.volunteers if v.identity.peer_id in self.lacking | self.not_given],
            ended_early=swarm.ended_early,
        )

    def _judge_end(self) -> None:
        """Everybody who was there at the end has ended well, and holds the same; but for those whose line is
        too slow to bring a state in time, and who say that they lack one or were given none."""
        swarm = self._swarm
        slow = {v.identity.peer_id for v in swarm.volunteers if v.profile in self._slow}
        excused = self.lacking & slow
        there = [v for v in swarm.volunteers if v.name not in swarm.left_behind]
        ended_well = {*self.digests, *(self.not_given & slow)}
        absent = [v.name for v in there if v.identity.peer_id not in ended_well]
        if absent:
            swarm.books.broken("", "end", f"did not finish: {', '.join(absent[:8])} ({len(absent)} in all)")
        ended = [v.identity.peer_id for v in there if v.identity.peer_id in self.digests]
        whole = [peer for peer in ended if peer not in excused]
        if (states := len({self.digests[peer] for peer in whole})) > 1:
            swarm.books.broken("", "end", f"{states} different states at the end")
        furthest = [  # where all say that they lack something: what any of them has
            max(of_one, key=lambda agreed: agreed.version)
            for of_one in zip(*(self._ends[peer] for peer in whole or ended), strict=True)
        ]
        wrong_at = swarm.went_wrong_at()
        if wrong_at is None or swarm.world.now > wrong_at + self.heal_s:  # else forks have their time
            for peer in sorted(excused.intersection(ended)):
                self._judge_lack(peer, furthest)

    def _judge_lack(self, peer: PeerId, furthest: Sequence[AgreedVersion]) -> None:
        """What ``peer`` left without can only be later rounds of the history that the others ended with."""
        for fragment, (mine, its) in enumerate(zip(self._ends[peer], furthest, strict=True)):
            if not comes_of(its, mine, self._swarm.books.histories[fragment]):
                text = f"left with another state of fragment {fragment}, and says that it lacks one"
                self._swarm.books.broken(peer, "end", text)
