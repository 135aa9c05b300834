"""Forks among simulated peers: seen as they come, judged when their time is up, gone when they are healed.

A fragment is forked while two live peers hold states of which neither came of the other: from the first
version of which there were two until all live peers are in one history again, however many rounds both sides
make meanwhile. (Who only lags is on the way to the others' state, and is no fork.)

Law: a fork comes only after peers' views could differ, and is gone ``bound_s`` after the last fault, or after
it came where that is later. It is looked at whenever a peer's agreed state changes, a peer comes or goes, and
at the very end of its time: a clock is set for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.simnet.laws import Books, History
from p2p_co2.simnet.virtual_time import VirtualTime


class Forks:
    """``went_wrong_at``: when views could last begin to differ; None if they never could. ``seen`` counts
    forks, ``longest_s`` is the longest so far."""

    def __init__(
        self,
        world: VirtualTime,
        books: Books,
        bound_s: float,
        went_wrong_at: Callable[[], float | None],
    ) -> None:
        self._world, self._books, self._bound_s, self._went_wrong_at = world, books, bound_s, went_wrong_at
        count = len(books.histories)
        self._held: list[dict[str, AgreedVersion]] = [{} for _ in range(count)]
        """Per fragment and live peer, its agreed state."""
        self._states: list[Counter[AgreedVersion]] = [Counter() for _ in range(count)]
        """Per fragment, how many hold each of them."""
        self._since: dict[int, float] = {}
        """The fragments that are forked, and since when."""
        self.seen = 0
        self.longest_s = 0.0

    def holds(self, peer: str, agreed: Sequence[AgreedVersion]) -> None:
        """A live peer's agreed states now."""
        for fragment, state in enumerate(agreed):
            self._move(fragment, peer, state)

    def gone(self, peer: str) -> None:
        """A process has ended: what it held is nobody's."""
        for fragment in range(len(self._held)):
            self._move(fragment, peer, None)

    def end(self) -> None:
        """The simulation is over: forks that are still there have lasted until now."""
        for fragment in list(self._since):
            self._close(fragment)

    def _move(self, fragment: int, peer: str, state: AgreedVersion | None) -> None:
        held, states = self._held[fragment], self._states[fragment]
        before = held.get(peer)
        if state == before:
            return
        kinds = len(states)
        if before is not None:
            states[before] -= 1
            if not states[before]:
                del states[before]
        if state is None:
            del held[peer]
        else:
            held[peer] = state
            states[state] += 1
        if kinds > 1 or len(states) > 1:
            self._look(fragment)

    def _look(self, fragment: int) -> None:
        is_forked = not self._are_one_history(fragment)
        if is_forked and fragment not in self._since:
            self.seen += 1
            self._since[fragment] = self._world.now
            self._judge(fragment, self._world.now)
        elif not is_forked and fragment in self._since:
            self._close(fragment)

    def _close(self, fragment: int) -> None:
        self.longest_s = max(self.longest_s, self._world.now - self._since.pop(fragment))

    def _are_one_history(self, fragment: int) -> bool:
        """Whether each of the states that are held came of the next older one."""
        histories = self._books.histories[fragment]
        states = sorted(self._states[fragment], key=lambda state: -state.version)
        return all(comes_of(newer, older, histories) for newer, older in pairwise(states))

    def _judge(self, fragment: int, since: float) -> None:
        """Break the law if a fork's time is up, else come again when it is."""
        if self._since.get(fragment) != since:
            return
        versions = sorted(state.version for state in self._states[fragment])
        text = f"fragment {fragment} has two histories, at versions {versions}"
        wrong_at = self._went_wrong_at()
        if wrong_at is None:
            self._books.broken("", "forks", f"{text}, and nothing ever went wrong")
            return
        ends_at = max(wrong_at, since) + self._bound_s
        if self._world.now < ends_at:
            self._world.call_at(ends_at, self._judge, fragment, since)
            return
        age_s = self._world.now - since
        self._books.broken("", "forks", f"{text}, {age_s:.0f} s after it came and long after it may")


def comes_of(newer: AgreedVersion, older: AgreedVersion, histories: Mapping[bytes, History]) -> bool:
    """Whether one state is the other, or came of it; all came of the common start."""
    if older.version == 0:
        return True
    version, digest = newer.version, newer.digest
    while version > older.version and digest in histories:
        version, digest = version - 1, histories[digest].parent
    return digest == older.digest
