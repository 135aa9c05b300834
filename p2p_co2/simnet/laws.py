"""The laws of a run, checked at every step of every simulated peer.

The audit knows every unit of work that was ever done, every offer and every signed outcome. From these it
computes what a commit must have made of a state, and compares. It follows each history by its digests: a
split view can make two states of one version, and what is counted in one is not counted in the other.

conservation   a commit adds exactly the offers of the contributors that it names; no unit of work is in a
               history twice; a unit that is neither counted nor with its peer has a written-off reason
agreed state   whoever is at a version got there by commits or a donor's state, from the common start
failed round   an abort changes nothing that is agreed or counted
signed         nobody applies a mean that no signed outcome names piece by piece
forks          two histories exist only after peers' views could differ, and not for long (``Forks``)
deadlines      no machine's timer is overdue; an open offer has one, and ends within a bound (``oversight``)
memory         what a machine holds stays within the bound that it names (``oversight``)
end            who was there at the end finished, with one state (``oversight``)

Price: one record per state, and all offers of the last ``OFFERS_KEPT`` rounds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from p2p_co2.digest import digest
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, PartWeights, weights_of
from p2p_co2.protocol.rounds import DECISION_CONTEXT
from p2p_co2.simnet.work import BLOCK_BYTES, CountedState, Offered, Saved, WorkUnits, add, mean_of, unpack
from p2p_co2.wire.messages_pb2 import Outcome

OFFERS_KEPT = 64
"""Rounds of a fragment whose offers are kept: far more than anybody replays."""
Counted = dict[str, tuple[int, ...]]
"""By peer, the last unit of it that is in a state, block by block."""


@dataclass(frozen=True)
class Violation:
    """A law that was broken: when (virtual seconds), by whom, how."""

    at: float
    peer: str
    law: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s, peer {self.peer[-6:] or '-'}: {self.law}: {self.text}"


class StateRecord(NamedTuple):
    """One state that somebody reached, the digest of the one before, and who is counted in it."""

    state: CountedState
    parent: bytes
    counted: Counted

    def of(self, peer: str) -> tuple[int, ...]:
        """What of ``peer`` is counted, block by block."""
        return self.counted.get(peer, (0,) * (len(self.state.sums) // 2))


def comes_of(
    newer: AgreedVersion | CountedState,
    older: AgreedVersion | CountedState,
    histories: Mapping[bytes, StateRecord],
) -> bool:
    """Whether one state is the other, or came of it by commits; all came of the common start."""
    if older.version == 0:
        return True
    version = newer.version
    at = newer.digest
    while version > older.version and at in histories:
        version = version - 1
        at = histories[at].parent
    return at == older.digest


class Books:
    """What the audits of all peers share. ``starts``: the states from which all begin, by fragment; ``now``
    gives virtual seconds. ``views_differed_at``: when peers could last come to see different swarms, None if
    they never could. ``written_off``: units of work that came to nothing, summed over blocks, by cause."""

    def __init__(self, starts: Sequence[CountedState], now: Callable[[], float]) -> None:
        self.now = now
        self.works: dict[str, WorkUnits] = {}
        self.violations: list[Violation] = []
        self.views_differed_at: float | None = None
        self.written_off: Counter[str] = Counter()
        self.histories = [{start.digest: StateRecord(start, b"", {})} for start in starts]
        self.offers: list[dict[int, dict[tuple[str, bytes | float], Offered]]] = [{} for _ in starts]
        self.excused: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
        """Units that were written off, by peer, fragment and block."""
        self.checked: dict[tuple[bytes, bytes], list[tuple[PartWeights, ...]]] = {}
        """By the digests before and after a commit: who is in the means that made it."""
        self._signed: dict[tuple[int, int], list[Outcome]] = {}

    def broken(self, peer: str, law: str, text: str) -> None:
        self.violations.append(Violation(self.now(), peer, law, text))

    def views_differ(self) -> None:
        """From now on, and for a while, peers may see different swarms."""
        self.views_differed_at = self.now()

    def reached(self, peer: str, fragment: int, history: StateRecord) -> None:
        """Somebody made a state by a commit."""
        known = self.histories[fragment]
        state = history.state
        others = (other.state.version for other in known.values())
        if self.views_differed_at is None and state.digest not in known and state.version in others:
            text = f"fragment {fragment}: another state of version {state.version}"
            self.broken(peer, "forks", f"{text}, and nothing ever went wrong")
        known.setdefault(state.digest, history)

    def sign(self, context: bytes, content: bytes) -> None:
        """Somebody signed something: kept if it is a committed outcome."""
        if context == DECISION_CONTEXT:
            outcome = Outcome.FromString(content)
            self._signed.setdefault((outcome.key.fragment, outcome.key.round), []).append(outcome)

    def signed_upon(self, fragment: int, before: CountedState) -> Iterator[Outcome]:
        """The outcomes of the next round that were signed upon this state: a split may sign two."""
        outcomes = self._signed.get((fragment, before.version + 1), [])
        return (outcome for outcome in outcomes if outcome.state_digest == before.digest)


class Auditor:
    """The audit of one peer: its ledger tells each step, and nothing here changes one."""

    def __init__(self, books: Books, peer: str) -> None:
        self._books = books
        self._peer = peer
        self._work = books.works[peer]

    def offered(self, fragment: int, base: CountedState, met_version: int, offer: Offered) -> None:
        if met_version != base.version:
            text = f"live parameters of version {met_version} were measured against version {base.version}"
            self._broken("conservation", f"fragment {fragment}: {text}")
        if offer.payload != self._work.offer(fragment, offer.counted, offer.units):
            self._broken("conservation", f"fragment {fragment}: an offer is not the work that it claims")
        self.counted(fragment, base, offer.counted, "an offer")
        rounds = self._books.offers[fragment]
        rounds.setdefault(offer.round, {})[self._peer, offer.offer_id] = offer
        while len(rounds) > OFFERS_KEPT:
            del rounds[min(rounds)]

    def committed(self, mean: AgreedMean, before: CountedState, after: CountedState) -> None:
        books = self._books
        checked = books.checked.setdefault((before.digest, after.digest), [])
        if mean.parts in checked:
            return  # the same mean upon the same state was checked before
        place = f"fragment {mean.fragment} round {mean.round}"
        if not any(_names(outcome, mean) for outcome in books.signed_upon(mean.fragment, before)):
            self._broken("signed", f"{place}: applied a mean that nobody has committed")
        history = books.histories[mean.fragment].get(before.digest)
        if history is None:
            self._broken("agreed state", f"{place}: a commit upon a state that nobody agreed on")
            return
        if tuple(add(before.sums, unpack(mean.mean))) != after.sums:
            self._broken("conservation", f"{place}: the new state is not the old one and the mean")
        counted = dict(history.counted)
        for part in mean.parts:
            self._count_part(mean, part, counted, place)
        books.reached(self._peer, mean.fragment, StateRecord(after, before.digest, counted))
        checked.append(mean.parts)

    def _count_part(self, mean: AgreedMean, part: PartWeights, counted: Counted, place: str) -> None:
        """The part must be the sum of the offers that it names; ``counted`` is told of them."""
        offers = self._books.offers[mean.fragment].get(mean.round, {})
        named = {peer: offers.get((peer, part.offer_of(peer) or b"")) for peer in sorted(part.weights)}
        known = {peer: offer for peer, offer in named.items() if offer is not None}
        at = slice(part.start_block * BLOCK_BYTES, part.stop_block * BLOCK_BYTES)
        if absent := [peer[-6:] for peer in named if peer not in known]:
            self._broken("conservation", f"{place}: counted, but never offered so: {', '.join(absent)}")
            return
        if mean_of([(part.weights[peer], one.payload[at]) for peer, one in known.items()]) != mean.mean[at]:
            self._broken("conservation", f"{place}: the mean is not the sum of its contributors' offers")
            return
        for peer, offer in known.items():
            reached = list(counted.get(peer, (0,) * len(offer.counted)))
            for block in range(part.start_block, part.stop_block):
                if twice := len(self._books.works[peer].kept(offer.counted[block], reached[block])):
                    self._broken("conservation", f"{place}: {twice} units of {peer[-6:]} are counted twice")
                reached[block] = max(reached[block], offer.units)
            counted[peer] = tuple(reached)

    def aborted(self, fragment: int, before: Saved, after: Saved) -> None:
        if before != after:
            self._broken("failed round", f"fragment {fragment}: an abort changed what is agreed or counted")

    def adopted(
        self, fragment: int, before: CountedState, after: CountedState, counted: Sequence[int]
    ) -> None:
        histories = self._books.histories[fragment]
        old = histories.get(before.digest)
        new = histories.get(after.digest)
        if new is not None:
            theirs = new.of(self._peer)
            if old is not None and not comes_of(after, before, histories):
                for block, mine in enumerate(old.of(self._peer)):
                    if mine > theirs[block]:
                        why = "counted in a history that was given up"
                        self.written_off(fragment, block, theirs[block], mine, why)
            self._give_up_promised(fragment, before, theirs, counted)
        self.counted(fragment, after, counted, "a state that was adopted")

    def _give_up_promised(
        self, fragment: int, before: CountedState, theirs: Sequence[int], counted: Sequence[int]
    ) -> None:
        """A peer that was told an outcome goes by it, and the state that it takes may come of another: what
        it offered is then in a history that it never reached. Nothing but such offers is written off."""
        offers = self._books.offers[fragment].get(before.version + 1, {})
        for part in (p for outcome in self._books.signed_upon(fragment, before) for p in weights_of(outcome)):
            mine = offers.get((self._peer, part.offer_of(self._peer) or b""))
            for block in range(part.start_block, part.stop_block if mine is not None else 0):
                start = theirs[block]
                stop = min(counted[block], mine.units if mine is not None else 0)
                if self._unexcused(fragment, block, start, stop) > 0:
                    self.written_off(fragment, block, start, stop, "counted in a history that was not taken")

    def written_off(self, fragment: int, block: int, start: int, stop: int, why: str) -> None:
        """Work that comes to nothing, with a reason."""
        self._books.written_off[why] += len(self._work.kept(start, stop))
        self._books.excused[self._peer, fragment, block].update(range(start + 1, stop + 1))

    def counted(
        self, fragment: int, state: CountedState, counted: Sequence[int], after: str = "a commit"
    ) -> None:
        """What a peer takes for counted must be what is counted in its history, or be written off."""
        history = self._books.histories[fragment].get(state.digest)
        if history is None:
            self._broken("agreed state", f"fragment {fragment}: {after} of a state that nobody agreed on")
            return
        for block, (mine, theirs) in enumerate(zip(counted, history.of(self._peer), strict=True)):
            if lost := self._unexcused(fragment, block, theirs, mine):
                self._broken("conservation", f"fragment {fragment}: {lost} units lost before {after}")
                return
            if twice := len(self._work.kept(mine, theirs)):
                text = f"fragment {fragment}: {twice} counted units kept for more after {after}"
                self._broken("conservation", text)
                return

    def _broken(self, law: str, text: str) -> None:
        self._books.broken(self._peer, law, text)

    def _unexcused(self, fragment: int, block: int, start: int, stop: int) -> int:
        """Units of (start, stop] that were not written off."""
        if start >= stop:
            return 0
        excused = self._books.excused[self._peer, fragment, block]
        return sum(unit not in excused for unit in self._work.kept(start, stop))


def _names(outcome: Outcome, mean: AgreedMean) -> bool:
    """Whether an outcome is about exactly this mean, piece by piece, with these contributors."""
    return len(outcome.parts) == len(mean.parts) and all(
        digest(mean.mean[part.start_block * BLOCK_BYTES : part.stop_block * BLOCK_BYTES]) == told.digest
        and {c.peer: c.weight for c in told.contributors} == dict(part.weights)
        for told, part in zip(outcome.parts, mean.parts, strict=True)
    )


class Forks:
    """Forks among simulated peers: two histories of one fragment, as they are seen from time to time.

    A fragment is forked while two live peers hold states of which neither came of the other, however many
    rounds both sides make meanwhile. A peer that only lags is on the way to the others' state: no fork.

    Law: a fork is gone ``bound_s`` after the last fault, or after it came where that is later; that it comes
    only where views differed, ``Books.reached`` sees. ``seen`` counts forks, ``longest_s`` is the longest.
    """

    def __init__(self, books: Books, bound_s: float) -> None:
        self._books = books
        self._bound_s = bound_s
        self._since: dict[int, float] = {}
        """The fragments that are forked, and since when."""
        self._told: set[int] = set()
        self.seen = 0
        self.longest_s = 0.0

    def look(self, held: Collection[Sequence[AgreedVersion]], wrong_at: float | None) -> None:
        """``held``: the agreed states of each live peer; ``wrong_at``: when views could last begin to differ,
        None if they never could."""
        now = self._books.now()
        for fragment, histories in enumerate(self._books.histories):
            states = sorted({agreed[fragment] for agreed in held}, key=lambda state: -state.version)
            # One history: each of the states that are held came of the next older one.
            if all(comes_of(newer, older, histories) for newer, older in pairwise(states)):
                self.longest_s = max(self.longest_s, now - self._since.pop(fragment, now))
                self._told.discard(fragment)
                continue
            self.seen += fragment not in self._since
            age_s = now - self._since.setdefault(fragment, now)
            if fragment not in self._told and min(age_s, now - (wrong_at or 0.0)) >= self._bound_s:
                self._told.add(fragment)
                versions = [state.version for state in reversed(states)]
                text = f"fragment {fragment} has two histories, at versions {versions}"
                self._books.broken("", "forks", f"{text}, {age_s:.0f} s after it came and long after it may")
