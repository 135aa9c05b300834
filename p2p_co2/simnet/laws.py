"""The laws of a run (ALGORITHMS.md, section 6), checked at every step of every simulated peer.

The audit knows what no peer can know: every unit of work that was ever done, every offer that was ever made
and every outcome that was ever signed. From that it computes what a commit must have made of a state, and
compares. It follows each history by its digests: a split view can make two states of one version, and what is
counted in one of them is not counted in the other.

conservation   a commit adds exactly the offers of the contributors that it names; no unit of work is in a
               history twice; a unit that is neither counted nor with its peer has a written-off reason
agreed state   whoever is at a version got there by commits or a donor's state, from the common start
failed round   an abort changes nothing that is agreed or counted
signed         nobody applies a mean that no signed outcome names piece by piece
forks          two histories exist only after peers' views could differ, and not for long
deadlines      no machine's timer is overdue; an open offer has one, and ends within a bound (``patience``)
memory         what a machine or a link's queue holds stays within the bound that it names

The last two are looked at as each turn of a process ends, and when a timer or an offer has waited too long
though its process takes no turn (``oversight``); how long a fork lasts, when its time is up (``forks``).

Price: one record per state, and all offers of the last ``OFFERS_KEPT`` rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from p2p_co2.digest import digest
from p2p_co2.node.ledger import AgreedMean, PartWeights, weights_of
from p2p_co2.protocol.rounds import DECISION_CONTEXT
from p2p_co2.protocol.wire.messages_pb2 import Outcome
from p2p_co2.simnet.ledger import Offered, Saved, State
from p2p_co2.simnet.work import BLOCK_BYTES, Work, add, mean_of, pack, unpack

OFFERS_KEPT = 64
"""Rounds of a fragment whose offers are kept: far more than anybody replays."""
WHOLE_KEPT, NAMED_KEPT = 2, 128
"""Outcomes of whole swarms, and lists of contributors, that are remembered: large, and asked for by all."""
MAX_GUESSES = 64
"""Combinations of offers with equal names that are tried to explain one part."""


@dataclass(frozen=True)
class Violation:
    """A law that was broken: when (virtual seconds), by whom, how."""

    at: float
    peer: str
    law: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:.3f} s, peer {self.peer[-6:] or '-'}: {self.law}: {self.text}"


@dataclass
class History:
    """One state that somebody reached. ``counted``: per peer, the last unit that is in it, block by
    block."""

    state: State
    parent: bytes
    counted: Mapping[str, tuple[int, ...]]


class Books:
    """What the audits of all peers share. ``starts``: the states from which all begin, by fragment; ``now``
    gives virtual seconds; ``weight_cap``: the run's."""

    def __init__(self, starts: Sequence[State], now: Callable[[], float], weight_cap: float = 0.0) -> None:
        self.now, self._weight_cap = now, weight_cap
        self.works: dict[str, Work] = {}
        self.violations: list[Violation] = []
        self.views_differed = False
        """Whether peers ever saw different swarms."""
        self.unmet: set[tuple[str, int, int]] = set()
        """Rounds that a peer made alone before it had met all: peer, fragment, round."""
        self._unmet_states: set[bytes] = set()
        self.written_off: Counter[str] = Counter()
        """Units of work that came to nothing, summed over blocks, by cause."""
        self.histories: list[dict[bytes, History]] = []
        self.offers: list[dict[int, dict[tuple[str, bytes | float], list[Offered]]]] = [{} for _ in starts]
        self.excused: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        self.checked: set[tuple[bytes, bytes]] = set()
        self._signed: dict[tuple[int, int], list[Outcome]] = {}
        self._named: dict[int, tuple[tuple[PartWeights, ...], bytes]] = {}
        """The digest of who is in a mean, by the identity of what names them: all members share that."""
        for start in starts:
            self.histories.append({start.digest: History(start, b"", {})})

    def broken(self, peer: str, law: str, text: str) -> None:
        self.violations.append(Violation(self.now(), peer, law, text))

    def reached(self, peer: str, fragment: int, history: History) -> None:
        """Somebody made a state by a commit."""
        known, state = self.histories[fragment], history.state
        if state.digest not in known:
            others = any(
                other.state.version == state.version and digest not in self._unmet_states
                for digest, other in known.items()
            )
            if is_unmet := (peer, fragment, state.version) in self.unmet:
                self._unmet_states.add(state.digest)
            if others and not (self.views_differed or is_unmet):
                text = f"fragment {fragment}: another state of version {state.version}"
                self.broken(peer, "forks", f"{text}, and nothing ever went wrong")
            known[state.digest] = history

    def sign(self, context: bytes, content: bytes) -> None:
        """Somebody signed something: kept if it is a committed outcome."""
        if context == DECISION_CONTEXT:
            outcome = Outcome.FromString(content)
            self._signed.setdefault((outcome.key.fragment, outcome.key.round), []).append(outcome)

    def is_signed(self, mean: AgreedMean, before: State) -> bool:
        outcomes = self._signed.get((mean.fragment, mean.round), [])
        return any(outcome.state_digest == before.digest and _names(outcome, mean) for outcome in outcomes)

    def promised(self, fragment: int, before: State) -> Iterator[PartWeights]:
        """Who is in the next round by any outcome that was signed upon this state: a split may sign two."""
        for outcome in self._signed.get((fragment, before.version + 1), []):
            if outcome.state_digest == before.digest:
                yield from weights_of(outcome)

    def content_of(self, mean: AgreedMean) -> bytes:
        """A digest of a mean and of who is in it."""
        parts = mean.parts
        known = self._named.get(id(parts))
        if known is None:
            known = self._named[id(parts)] = parts, digest(repr(parts).encode())
            while len(self._named) > NAMED_KEPT:
                del self._named[next(iter(self._named))]
        return digest(mean.mean, known[1], bytes((mean.fragment,)))


class Auditor:
    """The audit of one peer; implements ``ledger.Audit``."""

    def __init__(self, books: Books, peer: str) -> None:
        self._books, self._peer = books, peer
        self._work = books.works[peer]

    # ---- ledger.Audit

    def offered(self, fragment: int, base: State, merged_version: int, offer: Offered) -> None:
        books = self._books
        if merged_version != base.version:
            self._broken(
                "conservation",
                f"fragment {fragment}: live parameters that had met version {merged_version} were measured "
                f"against version {base.version}",
            )
        lanes: list[int] = []
        for block, start in enumerate(offer.counted):
            lanes += self._work.stretch(fragment, block, start, max(start, offer.units))
        if offer.payload != pack(lanes):
            self._broken("conservation", f"fragment {fragment}: an offer is not the work that it claims")
        self._compare(fragment, base, offer.counted, "an offer")
        rounds = books.offers[fragment]
        rounds.setdefault(offer.round, {}).setdefault((self._peer, offer.offer_id), []).append(offer)
        while len(rounds) > OFFERS_KEPT:
            del rounds[min(rounds)]

    def committed(self, mean: AgreedMean, before: State, after: State) -> None:
        books = self._books
        content = books.content_of(mean)
        if (before.digest, content) in books.checked:
            return  # the same mean upon the same state was checked before
        place = f"fragment {mean.fragment} round {mean.round}"
        if not books.is_signed(mean, before):
            self._broken("signed", f"{place}: applied a mean that nobody has committed")
        history = books.histories[mean.fragment].get(before.digest)
        if history is None:
            self._broken("agreed state", f"{place}: a commit upon a state that nobody agreed on")
            return
        if tuple(add(before.sums, unpack(mean.mean))) != after.sums:
            self._broken("conservation", f"{place}: the new state is not the old one and the mean")
        counted = dict(history.counted)
        for part in mean.parts:
            self._check_part(mean, part, counted, place)
        books.reached(self._peer, mean.fragment, History(after, before.digest, counted))
        books.checked.add((before.digest, content))

    def counted(self, fragment: int, after: State, counted: Sequence[int]) -> None:
        self._compare(fragment, after, counted, "a commit")

    def aborted(self, fragment: int, before: Saved, after: Saved) -> None:
        if before != after:
            self._broken("failed round", f"fragment {fragment}: an abort changed what is agreed or counted")

    def adopted(self, fragment: int, before: State, after: State, counted: Sequence[int]) -> None:
        histories = self._books.histories[fragment]
        old, new = histories.get(before.digest), histories.get(after.digest)
        if old is not None and new is not None and not self._follows(fragment, new, old):
            both = zip(self._counted_in(old), self._counted_in(new), strict=True)
            for block, (mine, theirs) in enumerate(both):
                if mine > theirs:
                    self.written_off(fragment, block, theirs, mine, "counted in a history that was given up")
        if new is not None:
            self._give_up_promised(fragment, before, new, counted)
        self._compare(fragment, after, counted, "a state that was adopted")

    def _give_up_promised(self, fragment: int, before: State, taken: History, counted: Sequence[int]) -> None:
        """A peer that was told an outcome goes by it, and the state that it takes may come of another: what
        it offered is then in a history that it never reached. Nothing but such offers is written off."""
        offers = self._books.offers[fragment].get(before.version + 1, {})
        for part in self._books.promised(fragment, before):
            mine = offers.get((self._peer, part.offer_of(self._peer) or b""), [])
            units = max((offer.units for offer in mine), default=0)
            for block in range(part.start_block, part.stop_block):
                start, stop = self._counted_in(taken)[block], min(counted[block], units)
                if start < stop and self._work.count(start, stop) > self._excused(
                    fragment, block, start, stop
                ):
                    self.written_off(fragment, block, start, stop, "counted in a history that was not taken")

    def written_off(self, fragment: int, block: int, start: int, stop: int, why: str) -> None:
        """Work that comes to nothing, with a reason."""
        self._books.written_off[why] += self._work.count(start, stop)
        self._books.excused.setdefault((self._peer, fragment, block), []).append((start, stop))

    # ---- what should be

    def _broken(self, law: str, text: str) -> None:
        self._books.broken(self._peer, law, text)

    def _follows(self, fragment: int, later: History, earlier: History) -> bool:
        """Whether one state came of the other by commits."""
        histories = self._books.histories[fragment]
        while later.state.version > earlier.state.version:
            later = histories[later.parent]
        return later is earlier

    def _counted_in(self, history: History) -> tuple[int, ...]:
        none = (0,) * (len(history.state.sums) // 2)
        return history.counted.get(self._peer, none)

    def _compare(self, fragment: int, state: State, counted: Sequence[int], after: str) -> None:
        """What a peer takes for counted must be what is counted in its history, or be written off."""
        history = self._books.histories[fragment].get(state.digest)
        if history is None:
            self._broken("agreed state", f"fragment {fragment}: {after} of a state that nobody agreed on")
            return
        for block, (mine, theirs) in enumerate(zip(counted, self._counted_in(history), strict=True)):
            if mine > theirs:
                missing = self._work.count(theirs, mine) - self._excused(fragment, block, theirs, mine)
                if missing > 0:
                    self._broken("conservation", f"fragment {fragment}: {missing} units lost before {after}")
                    return
            elif mine < theirs and self._work.count(mine, theirs) > 0:
                twice = self._work.count(mine, theirs)
                self._broken(
                    "conservation", f"fragment {fragment}: {twice} counted units kept for more after {after}"
                )
                return

    def _excused(self, fragment: int, block: int, start: int, stop: int) -> int:
        """Units of (start, stop] that were written off."""
        total, reached = 0, start
        for first, last in sorted(self._books.excused.get((self._peer, fragment, block), [])):
            begin, end = max(first, reached), min(last, stop)
            if begin < end:
                total += self._work.count(begin, end)
                reached = end
        return total

    def _check_part(
        self, mean: AgreedMean, part: PartWeights, counted: dict[str, tuple[int, ...]], place: str
    ) -> None:
        offers = self._books.offers[mean.fragment].get(mean.round, {})
        names = [(peer, part.offer_of(peer) or b"") for peer in sorted(part.weights)]
        at = slice(part.start_block * BLOCK_BYTES, part.stop_block * BLOCK_BYTES)
        choices = [offers.get(name, []) for name in names]
        if not all(choices):
            absent = [name[-6:] for (name, _), known in zip(names, choices, strict=True) if not known]
            self._broken("conservation", f"{place}: counted, but never offered so: {', '.join(absent)}")
            return
        for guess in islice(product(*(reversed(known) for known in choices)), MAX_GUESSES):
            named = zip(names, guess, strict=True)
            slices = [(part.weights[peer], offer.payload[at]) for (peer, _), offer in named]
            if mean_of(slices) == mean.mean[at]:
                self._count(mean.fragment, part, counted, zip(names, guess, strict=True), place)
                return
        self._broken("conservation", f"{place}: the mean is not the sum of its contributors' offers")

    def _count(
        self,
        fragment: int,
        part: PartWeights,
        counted: dict[str, tuple[int, ...]],
        offers: Iterable[tuple[tuple[str, bytes | float], Offered]],
        place: str,
    ) -> None:
        for (peer, _), offer in offers:
            known = list(counted.get(peer, (0,) * len(offer.counted)))
            for block in range(part.start_block, part.stop_block):
                start, reached = offer.counted[block], known[block]
                if start < reached and (twice := self._books.works[peer].count(start, reached)) > 0:
                    self._broken("conservation", f"{place}: {twice} units of {peer[-6:]} are counted twice")
                known[block] = max(reached, offer.units)
            counted[peer] = tuple(known)


def _names(outcome: Outcome, mean: AgreedMean) -> bool:
    """Whether an outcome is about exactly this mean, piece by piece, with these contributors."""
    if len(outcome.parts) != len(mean.parts):
        return False
    for told, part in zip(outcome.parts, mean.parts, strict=True):
        piece = mean.mean[part.start_block * BLOCK_BYTES : part.stop_block * BLOCK_BYTES]
        if digest(piece) != told.digest:
            return False
        if {c.peer: c.weight for c in told.contributors} != dict(part.weights):
            return False
    return True
