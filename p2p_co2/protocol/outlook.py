"""What a peer knows of the other cells of its swarm: where they are and whether they are done. A machine
without I/O or clock.

Heartbeats stay inside a cell (``rounds.cells``). So that all cells share one swarm clock and one end, each
other cell is watched by a few peers of this one, the first by rendezvous hash: each asks one peer over there
every few seconds how its cell stands, and passes the answer on in its own heartbeats. A cell thus sees each
other one through several pairs of eyes, and no peer asks more of them than its share.

    CELL_LOOK -> a peer of the other cell -> CELL_SIGHT -> Status.sights -> ``words`` of all in our cell

Laws: a sight counts only from a peer that is among the first to watch that cell; position and versions are
the lower medians of what the watchers saw, digests what most of them did, so of three, one liar moves
nothing; which cells hold what is decided by the majority of cells, as ``node.catching`` does with peers. A
cell that has never been seen, or not for ``SILENT_S`` without being done, holds nobody up.

In the quiet of a long round, where heartbeats are rare, looks are as well (``quiet_s``, of
``heartbeat.quiet_beat_s``), and what they bring stays true for longer.

Price: with G cells of M peers, each peer asks about ``WATCHERS`` (G - 1) / M others, and as many sights (some
60 bytes and 34 for each fragment) go with its heartbeats. In a swarm of two or three peers a cell, one
watcher is the only witness.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.wire.identity import PeerId, cell_of
from p2p_co2.protocol.wire.limits import MAX_FRAGMENTS, MAX_PEER_ID, MAX_VERSION
from p2p_co2.protocol.wire.messages_pb2 import CellLook, CellSight
from p2p_co2.protocol.wire.status import PeerStatus, Sight, read_sight

WATCHERS = 3
"""Peers of one cell that watch another."""
MAX_WATCHED = 8
"""Cells that one peer watches: many cells of few peers go unseen in turn rather than cost their peers
more."""
KNOWN_KEPT = 64
"""Peers of a watched cell that are remembered."""
LOOK_EVERY_S, LOOK_QUICKLY_EVERY_S = 5.0, 2.0
"""While this peer trains; before and after, when it waits for what the others say."""
TRIES = 2
"""Looks at one peer that go unanswered before another is asked."""
LOOK_UP_EVERY_S, QUICK_LOOK_UPS = 20.0, 8  # the first few as looks come: who begins beside us is not listed
FRESH_S = 10.0
"""Sights so much older than the newest one of their cell are not counted."""
PLACED_S = 60.0
"""A position is carried on by the clock for so long."""
SILENT_S = 30.0
"""A cell that was seen last so long ago is not waited for. Beyond a watcher's next peer and a heartbeat."""
QUIET_LOOK, QUIET_FRESH, QUIET_SILENT = 0.5, 1.5, 3.0
"""The same in the quiet of a long round, in heartbeats: a sight is as old as a look and a heartbeat together
when it is heard."""
MAX_AGE_S = 1e6


_Number = TypeVar("_Number", int, float)


class Near(Protocol):
    """What membership knows of a live peer of our cell."""

    @property
    def status(self) -> PeerStatus: ...
    @property
    def status_at(self) -> float: ...


@dataclass(frozen=True)
class CellWord:
    """What our cell knows of another one. ``trains``: somebody there does; ``settled``: all there are done
    and hold the same; ``versions`` and ``digests`` per fragment, empty as long as nobody has joined there;
    ``finished``: fragments for which nobody there has more to offer; ``position``: in rounds, at
    ``seen_at``; ``peers``: those who said so."""

    cell: int
    trains: bool
    settled: bool
    position: float
    versions: tuple[int, ...]
    digests: tuple[bytes, ...]
    finished: frozenset[int]
    peers: tuple[PeerId, ...]
    seen_at: float


@dataclass
class _Watch:
    """One cell that this peer watches."""

    known: list[PeerId]
    asked: PeerId | None = None
    unanswered: int = 0
    looked_up_at: float = -math.inf
    look_ups: int = 0
    is_found: bool = False
    """Whether the DHT has answered."""
    sight: CellSight | None = None
    read: Sight | None = None  # the same
    seen_at: float = 0.0


class Outlook:
    """``mine``: how our own cell stands, kept by the shell; ``hurry``: whether this peer waits for the
    others' word; ``revision`` grows with what is news of other cells, but not with positions; ``seen`` with
    each sight of this peer's own, ``has_seen_news`` says whether one differed from the last; ``listed`` with
    what ``held`` counts. ``rests``: whether this peer only trains, as in ``membership``; ``ends``: is done.
    ``secret``: what nobody else knows: ids are free, and who knew in which order each watcher asks could make
    one that all of them ask first."""

    def __init__(self, me: PeerId, cells: int, quiet_s: float = 0.0, secret: str = "") -> None:
        self.me, self.cells, self.cell = me, cells, cell_of(me, cells)
        self.quiet_s, self._secret = quiet_s, secret
        self.rests = self.ends = False
        self.mine = CellSight(cell=self.cell)
        self.hurry = True
        self.revision = self.seen = self.listed = 0
        self.has_seen_news = False
        self.words: dict[int, CellWord] = {}
        self.wanted: list[int] = []
        """Cells whose peers the DHT should be asked for; the answer is ``found``."""
        self._watched: dict[int, _Watch] = {}
        self._near: frozenset[PeerId] | None = None
        self._first_of: dict[int, list[PeerId]] = {}
        self._next_at: float | None = None if cells == 1 else 0.0
        self._looked_at = -math.inf
        self._outgoing: list[tuple[PeerId, CellLook | CellSight]] = []

    # ---- the five verbs

    def receive(self, message: CellLook | CellSight, sender: PeerId, now: float) -> None:
        """A question or an answer. Raises ``RemoteProtocolError`` for one that no honest peer sends."""
        there = cell_of(sender, self.cells)
        if there == self.cell:
            raise RemoteProtocolError("wrong cell", "a look at one's own")
        if isinstance(message, CellLook):
            self._outgoing.append((sender, self.mine))
            return
        check_sight(message, self.cells)
        if message.cell != there:
            raise RemoteProtocolError("wrong cell", f"a sight of cell {message.cell}")
        watch = self._watched.get(there)
        if watch is None or watch.asked != sender:
            return
        watch.unanswered = 0
        if message.versions or watch.sight is None:
            self.has_seen_news |= watch.sight is None or _told(watch.sight) != _told(message)
            watch.sight, watch.read, watch.seen_at = message, read_sight(message), now
            self.seen += 1
        if not message.versions:
            self._ask_another(watch)  # it has not joined yet, and knows nothing

    def handle_timer(self, now: float) -> None:
        if self._next_at is None or now < self._next_at:
            return
        self._looked_at, self._next_at = now, now + self._look_every_s()
        for cell, watch in self._watched.items():
            self._look(cell, watch, now)

    def get_timer(self) -> float | None:
        return self._next_at

    def messages_to_send(self) -> list[tuple[PeerId, CellLook | CellSight]]:
        messages, self._outgoing = self._outgoing, []
        return messages

    # ---- watching

    def _look_every_s(self) -> float:
        if self.hurry:
            return LOOK_QUICKLY_EVERY_S
        return max(LOOK_EVERY_S, QUIET_LOOK * self.quiet_s) if self.rests else LOOK_EVERY_S

    def _silent_s(self) -> float:
        return SILENT_S if self.ends else max(SILENT_S, QUIET_SILENT * self.quiet_s)

    def _look(self, cell: int, watch: _Watch, now: float) -> None:
        if watch.asked is not None and watch.unanswered >= TRIES:
            self._ask_another(watch)
        if watch.asked is None and watch.known:
            watch.asked = watch.known[0]
        if watch.asked is not None:
            watch.unanswered += 1
            self._outgoing.append((watch.asked, CellLook()))
        elif watch.look_ups < QUICK_LOOK_UPS or now - watch.looked_up_at >= LOOK_UP_EVERY_S:
            watch.looked_up_at, watch.look_ups = now, watch.look_ups + 1
            self.wanted.append(cell)

    def _ask_another(self, watch: _Watch) -> None:
        """The next peer that is known; none if there is none left, and then the DHT is asked again."""
        watch.known = [peer for peer in watch.known if peer != watch.asked]
        watch.asked, watch.unanswered = None, 0

    def look_soon(self, now: float) -> None:
        """Look at all watched cells now, or ``LOOK_QUICKLY_EVERY_S`` after the last time."""
        if self._next_at is not None:
            self._next_at = min(self._next_at, max(now, self._looked_at + LOOK_QUICKLY_EVERY_S))

    def found(self, cell: int, peers: Iterable[PeerId], now: float) -> None:
        """The DHT lists these peers of another cell. Each watcher asks in an order that only it knows."""
        watch = self._watched.get(cell)
        if watch is not None:
            watch.is_found = True
            listed = [peer for peer in peers if cell_of(peer, self.cells) == cell]
            known = sorted(listed, key=lambda peer: _rank(self._secret + self.me + peer, cell))
            watch.known = known[:KNOWN_KEPT] or watch.known  # a late answer may know less
            self.listed += 1
            if watch.asked is None and watch.known:
                self._look(cell, watch, now)

    def unreachable(self, peer: PeerId) -> None:
        """No carrier gets through to a peer of another cell."""
        for watch in self._watched.values():
            if watch.asked == peer:
                self._ask_another(watch)

    def _set_watched(self, near: frozenset[PeerId], now: float) -> None:
        self._near, self._first_of = near, {}
        others = (cell for cell in range(self.cells) if cell != self.cell)
        mine = [cell for cell in others if self.me in self._first(cell)[:WATCHERS]]
        mine = sorted(mine, key=lambda cell: _rank(self.me, cell))[:MAX_WATCHED]
        if mine != list(self._watched):
            self._watched = {cell: self._watched.get(cell) or _Watch([]) for cell in mine}
            self._next_at, self.listed = now, self.listed + 1

    def _first(self, cell: int) -> list[PeerId]:
        """The first peers of our cell to watch ``cell``: as many again as do, who may see another swarm."""
        known = self._first_of.get(cell)
        if known is None:
            ranked = sorted({*(self._near or ()), self.me}, key=lambda peer: _rank(peer, cell))
            known = self._first_of[cell] = ranked[: 2 * WATCHERS]
        return known

    def sights(self, now: float) -> list[CellSight]:
        """What this peer saw itself, for its heartbeats."""
        seen = []
        for watch in self._watched.values():
            if watch.sight is not None:
                watch.sight.age_s = min(MAX_AGE_S, max(0.0, now - watch.seen_at))
                seen.append(watch.sight)
        return seen

    # ---- what our cell knows

    def conclude(self, near: Mapping[PeerId, Near], now: float, rounds_per_s: float) -> bool:
        """Make ``words`` of what this peer and the live peers of its cell saw; True if there is news.
        ``rounds_per_s``: how fast positions move by themselves."""
        if self.cells == 1:
            return False
        if self._near is None or near.keys() != self._near:
            self._set_watched(frozenset(near), now)
        seen: dict[int, list[tuple[float, PeerId, Sight]]] = {}
        for cell, watch in self._watched.items():
            if watch.read is not None:
                seen.setdefault(cell, []).append((watch.seen_at, self.me, watch.read))
        for peer, info in near.items():
            for sight in info.status.sights:
                seen.setdefault(sight.cell, []).append((info.status_at - sight.age_s, peer, sight))
        has_news, words = False, dict(self.words)  # other threads look at those that are there
        fresh_s = max(FRESH_S, QUIET_FRESH * self.quiet_s)
        for cell, told in seen.items():
            entitled = self._first(cell)
            sights = [one for one in told if one[1] in entitled and one[2].versions]
            if sights and cell != self.cell:
                word = _combined(cell, sights, rounds_per_s, fresh_s)
                known = words.get(cell)
                if known is None or word.seen_at >= known.seen_at:
                    words[cell] = word
                    has_news = has_news or known is None or _news(known) != _news(word)
        self.words = words
        self.revision += has_news
        return has_news

    def positions(self, now: float, rounds_per_s: float) -> list[float]:
        """Where the cells that train are now."""
        placed_s = max(PLACED_S, self._silent_s())
        fresh = [word for word in self.words.values() if now - word.seen_at < placed_s]
        moving = [word.position + (now - word.seen_at) * rounds_per_s for word in fresh if word.trains]
        return moving or [word.position for word in fresh]

    def is_done(self, versions: tuple[int, ...], digests: tuple[bytes, ...], now: float) -> bool:
        """Whether every cell that need be waited for is done with this very state."""
        return all(
            (word.settled and (word.versions, word.digests) == (versions, digests))
            or now - word.seen_at > self._silent_s()
            for word in self.words.values()
        )

    def is_alone(self, now: float) -> bool:
        """Whether no other cell was heard of late."""
        return not self.recent(now)

    def trains(self, now: float) -> bool:
        """Whether anybody trains in another cell, as far as it was heard of late."""
        return any(word.trains for word in self.recent(now))

    def unanswered(self) -> int:
        """Watched cells of which somebody may be about to answer for the first time."""
        return sum(
            watch.sight is None and (watch.asked is not None or not watch.is_found)
            for watch in self._watched.values()
        )

    def recent(self, now: float) -> list[CellWord]:
        """The cells that were seen of late."""
        silent_s = self._silent_s()
        return [word for word in self.words.values() if now - word.seen_at <= silent_s]

    def version(self, fragment: int, mine: int | None, over: bool) -> int:
        """The highest version that at least half of the cells have reached, ours (``mine``) among them if it
        has one; once the run is ``over`` everywhere, that any has: no more rounds will settle it. 0 where no
        other cell was seen."""
        held = [word.versions[fragment] for word in self.words.values() if fragment < len(word.versions)]
        if over or not held:
            return max(held, default=0)
        held = sorted([*held, *([] if mine is None else [mine])], reverse=True)
        return held[(len(held) - 1) // 2]

    def other_digest(self, fragment: int, version: int, mine: bytes, *, is_ours: bool) -> bytes | None:
        """The digest of ``version`` in most cells if it is not ``mine``; ``is_ours``: whether that is our
        cell's, which has no say if it is of two minds."""
        best = self.digest(fragment, version, mine if is_ours else b"")
        return best if best != mine else None

    def digest(self, fragment: int, version: int, ours: bytes = b"") -> bytes | None:
        """The digest of ``version`` in most cells, of which ``ours`` says this, if anything. Of equal camps
        the one of the lowest cell counts. None if no cell was seen there. Empty digests are unknown."""
        held = {
            word.cell: word.digests[fragment]
            for word in self.words.values()
            if fragment < len(word.versions) and word.versions[fragment] == version and word.digests[fragment]
        }
        if ours:
            held[self.cell] = ours
        camps = Counter(held.values())
        first = {digest: min(c for c in held if held[c] == digest) for digest in camps}
        return max(camps, key=lambda digest: (camps[digest], -first[digest]), default=None)

    def donors(self, fragment: int, version: int, digest: bytes = b"") -> tuple[PeerId, ...]:
        """Peers of other cells that hold ``version`` or, if ``digest`` is given, just that state."""
        return tuple(
            peer
            for word in self.words.values()
            if fragment < len(word.versions) and word.versions[fragment] >= version
            and digest in (b"", word.digests[fragment])
            for peer in word.peers
        )  # fmt: skip

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        most = max((len(watch.known) for watch in self._watched.values()), default=0)
        return {"KNOWN_KEPT": (most, KNOWN_KEPT), "MAX_WATCHED": (len(self._watched), MAX_WATCHED)}


@lru_cache(maxsize=1 << 16)
def _rank(name: str, cell: int) -> bytes:
    return hashlib.sha256(f"watch/{name}/{cell}".encode()).digest()[:8]


def _combined(
    cell: int, sights: Sequence[tuple[float, PeerId, Sight]], rounds_per_s: float, fresh_s: float
) -> CellWord:
    latest_at = max(seen_at for seen_at, _, _ in sights)
    fresh = [one for one in sights if latest_at - one[0] <= fresh_s]
    count = Counter(len(sight.versions) for _, _, sight in fresh).most_common(1)[0][0]
    fresh = [one for one in fresh if len(one[2].versions) == count]  # one alone has miscounted fragments
    newest_at, _, newest = max(fresh, key=lambda one: one[:2])
    alike = [sight for _, _, sight in fresh]
    said = _said(newest)
    if all(sight is newest or _said(sight) == said for sight in alike):  # mostly
        alike, (versions, digests, _) = [newest], said
    else:
        of_fragments = zip(*(sight.versions for sight in alike), strict=True)
        versions = tuple(_lower_median(held) for held in of_fragments)
        first = [newest, *(sight for sight in alike if sight is not newest)]  # who is, of as many
        at = [[s.digests[f] for s in first if s.versions[f] == held] for f, held in enumerate(versions)]
        digests = tuple(Counter(told).most_common(1)[0][0] if told else b"" for told in at)
    over = [_bits(sight.finished, len(versions)) for sight in alike if sight.finished]
    finished = (
        {f for f in range(len(versions)) if 2 * sum(f in one for one in over) > len(alike)} if over else ()
    )
    positions = [
        sight.position + (newest_at - seen_at) * (rounds_per_s if sight.trains else 0.0)
        for seen_at, _, sight in fresh
    ]
    return CellWord(
        cell=cell,
        trains=newest.trains,
        settled=newest.settled,
        position=_lower_median(positions),
        versions=versions,
        digests=digests,
        finished=frozenset(finished),
        peers=tuple(dict.fromkeys(PeerId(sight.peer) for _, _, sight in fresh)),
        seen_at=newest_at,
    )


def _lower_median(values: Iterable[_Number]) -> _Number:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _told(sight: CellSight) -> tuple[object, ...]:
    return sight.trains, sight.settled, tuple(sight.versions), tuple(sight.digests), sight.finished


def _said(sight: Sight) -> tuple[tuple[int, ...], tuple[bytes, ...], bytes]:
    return sight.versions, sight.digests, sight.finished


def _news(word: CellWord) -> tuple[object, ...]:
    return word.trains, word.settled, word.versions, word.digests, word.finished


def _bits(data: bytes, count: int) -> frozenset[int]:
    number = int.from_bytes(data, "little")
    return frozenset(index for index in range(count) if number >> index & 1)


def check_sight(sight: CellSight | Sight, cells: int) -> None:
    """Raise ``RemoteProtocolError`` for a sight that cannot be true."""
    wrong = len(sight.peer) > MAX_PEER_ID or (sight.peer and cell_of(sight.peer, cells) != sight.cell)
    if sight.cell >= cells or wrong:
        raise RemoteProtocolError("wrong cell", f"a sight of cell {sight.cell}")
    if not (0 <= sight.position < 1e18 and 0 <= sight.age_s <= MAX_AGE_S):  # NaN fails every comparison
        raise RemoteProtocolError("bad sight", f"position {sight.position}, age {sight.age_s} s")
    if len(sight.versions) > MAX_FRAGMENTS or len(sight.digests) != len(sight.versions):
        raise RemoteProtocolError("bad sight", "versions and digests do not belong together")
    if 8 * len(sight.finished) > MAX_FRAGMENTS + 7:
        raise RemoteProtocolError("bad sight", f"{8 * len(sight.finished)} finished fragments")
    if max(sight.versions, default=0) > MAX_VERSION or not {0, 32}.issuperset(map(len, sight.digests)):
        raise RemoteProtocolError("bad sight", "a version or a digest that cannot be")


def check_sights(sights: Sequence[CellSight | Sight], cells: int) -> None:
    """The same for all that a heartbeat passes on."""
    if len(sights) > MAX_WATCHED:
        raise RemoteProtocolError("bad status", f"{len(sights)} sights of other cells")
    if len({sight.cell for sight in sights}) < len(sights):  # each would count as a watcher's
        raise RemoteProtocolError("bad status", "several sights of one cell")
    for sight in sights:
        check_sight(sight, cells)
