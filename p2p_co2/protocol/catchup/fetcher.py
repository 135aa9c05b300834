"""The peer that is behind: which goals are loaded, and one queue of chunks dealt to whichever donor has room.

    ask donors for manifests -> fix one content -> deal its chunks -> all right: ``Fetched``
              ^                        |
              +---- nobody has it -----+     at most ``ATTEMPTS`` times

A donor owes at most ``OUTSTANDING`` chunks, in all loads together. Donors answer in order: what was asked for
before a chunk that came is lost. When no chunk is left to deal, an idle donor repeats what another owes for
long. A donor that is silent or wrong loses its place, and its chunks go back into the queue.

Laws: nothing is allocated before a signed manifest of the size that this peer computed. What others
contradict is refused before a byte of it is asked for. Every chunk kept has the digest that was promised. One
goal and one content at a time for each fragment. Price: what all donors of a content let go of is lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import (
    PATIENCE_S,
    STATE,
    CatchUpEvent,
    DonorRefused,
    Goal,
    Loading,
    Outbox,
    TransferSizes,
    Vouch,
)
from p2p_co2.protocol.catchup.load import ATTEMPTS, MOST_AT_ONCE, Load, Terms
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES, MAX_PEERS
from p2p_co2.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal

OUTSTANDING = 2
"""One is on its way while the next is asked for, and a liar costs two."""
SILENT_TIMES = 8.0
"""A donor that gives nothing for so many times what a chunk usually takes is silent."""
SILENT_FLOOR_S = 10.0
"""Not before that; and in any case after ``PATIENCE_S``."""
REPEAT_TIMES = 3.0
"""An idle donor repeats a chunk that another owes for so many times what it needs itself. Where that is not
known, for what the slowest lines take: ``PATIENCE_S`` for the largest chunk."""
REPEAT_FLOOR_S = 0.5
"""Not before that."""
TELL_EVERY_S = 2.0
"""So often it is told how far the loading of states is."""

Owed = tuple[int, int]
"""A chunk that a donor was asked for: the load's request, and its number."""


@dataclass(eq=False)
class DonorLine:
    """One donor. ``owed``: what it was asked for, oldest first, and when; ``took_s``: its last chunk, after
    the one before it; 0 if not known."""

    heard_at: float
    owed: dict[Owed, float] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def silent_at(self) -> float:
        usual_s = max(SILENT_FLOOR_S, SILENT_TIMES * self.took_s) if self.took_s else PATIENCE_S
        return self.heard_at + min(PATIENCE_S, usual_s) if self.owed else math.inf


class OwedChunks:
    """What all donors owe. ``came_at``: when the last right chunk came from anybody."""

    def __init__(self, shape: TransferSizes) -> None:
        self._unknown_s = PATIENCE_S * shape.chunk_bytes * shape.scale / MAX_DATA_BYTES
        self._lines: dict[PeerId, DonorLine] = {}
        self.came_at = -math.inf

    def clear(self) -> None:
        """Nothing is loaded: what is known of donors grows old."""
        self._lines.clear()

    def ask(self, peer: PeerId, owed: Owed, now: float) -> None:
        line = self._lines.setdefault(peer, DonorLine(now))
        line.heard_at = line.heard_at if line.owed else now
        line.owed[owed] = now

    def gave(self, peer: PeerId, owed: Owed, now: float) -> list[Owed]:
        """A right chunk came: those that were asked for before it, and are lost."""
        line = self._lines.setdefault(peer, DonorLine(now))
        self.came_at = now
        lost = list[Owed]()
        if owed in line.owed:
            order = list(line.owed)
            lost = order[: order.index(owed)]
            line.took_s = now - line.heard_at
            line.owed = {one: line.owed[one] for one in order[len(lost) + 1 :]}
        line.heard_at = now
        return lost

    def is_busy(self, peer: PeerId, now: float) -> None:
        """A round's bytes came from ``peer``: its chunks come after them."""
        if (line := self._lines.get(peer)) is not None:
            line.heard_at = now
            line.owed = dict.fromkeys(line.owed, now)

    def forget(self, request: int, peer: PeerId | None = None) -> set[int]:
        """Wait no more for what ``peer`` (None: anybody) owes to one load; those chunks that nobody else
        owes."""
        chunks = set[int]()
        still = set[int]()
        for one, line in self._lines.items():
            owed = {chunk for known, chunk in line.owed if known == request}
            if peer in (None, one):
                chunks |= owed
                line.owed = {owed: at for owed, at in line.owed.items() if owed[0] != request}
            else:
                still |= owed
        return chunks - still

    def drop(self, peer: PeerId) -> None:
        self._lines.pop(peer, None)

    def least_owing(self, peers: Collection[PeerId]) -> PeerId | None:
        """Who of these has room and owes least."""
        owing = {peer: len(self._lines[peer].owed) if peer in self._lines else 0 for peer in peers}
        peer = min(owing, key=owing.__getitem__, default=None)
        return peer if peer is not None and owing[peer] < OUTSTANDING else None

    def is_idle(self, peer: PeerId) -> bool:
        return peer not in self._lines or not self._lines[peer].owed

    def overdue(self, request: int, missing: Collection[int], idle: PeerId) -> tuple[float, int]:
        """When ``idle`` is to repeat a chunk of a load that another owes, and which: the one that is owed
        longest, none more than twice."""
        took_s = self._lines[idle].took_s if idle in self._lines else 0.0
        limit_s = max(REPEAT_FLOOR_S, REPEAT_TIMES * took_s) if took_s else self._unknown_s
        owed = [
            (at, chunk)
            for line in self._lines.values()
            for (known, chunk), at in line.owed.items()
            if known == request and chunk in missing
        ]
        times = Counter(chunk for _, chunk in owed)
        since, chunk = min((one for one in owed if times[one[1]] == 1), default=(math.inf, 0))
        return since + limit_s, chunk

    def silent_at(self) -> float:
        """When the first donor counts as silent."""
        return min((line.silent_at for line in self._lines.values()), default=math.inf)

    def silent(self, now: float) -> list[PeerId]:
        """Donors that owe and give nothing."""
        return [peer for peer, line in self._lines.items() if now >= line.silent_at]


class Fetcher:
    """One goal per fragment at a time; a new goal for it replaces the old one. ``got_at``: when a right chunk
    came that had not come before."""

    def __init__(self, run: bytes, shape: TransferSizes, out: Outbox) -> None:
        self.shape = shape
        self._out = out
        self._terms = Terms(run, shape)
        self.owed = OwedChunks(shape)
        self._loads: dict[int, Load] = {}
        self._waiting: dict[int, Goal] = {}
        self._quarantined: dict[PeerId, float] = {}
        self._requests = 0
        self.got_at = -math.inf
        self._tell_at = math.inf

    # ---- what is wanted

    @property
    def is_idle(self) -> bool:
        """Nothing is fetched, and nothing waits for it."""
        return not self._loads and not self._waiting

    def ask_swarm(self, vouch: Vouch) -> None:
        """From now on a state is loaded only if ``vouch`` does not contradict its donor."""
        self._terms.vouch = vouch

    def want(self, goal: Goal, now: float) -> None:
        """Start fetching; ends in ``Fetched`` or ``FetchFailed``."""
        load = self._loads.get(goal.fragment)
        known = load.goal if load is not None else self._waiting.get(goal.fragment)
        if known is not None and (known.what, known.version) == (goal.what, goal.version):
            return
        if self.is_idle:
            self._tell_at = now + TELL_EVERY_S
        self._end(goal.fragment)
        self._waiting[goal.fragment] = goal
        self._settle(now)

    def fetching(self, fragment: int) -> bool:
        return fragment in self._loads or fragment in self._waiting

    def forget(self, fragment: int, now: float) -> None:
        """What is being fetched of ``fragment`` is wanted no more: nothing tells of its end."""
        self._end(fragment)
        self._waiting.pop(fragment, None)
        self._settle(now)

    def add_donors(self, fragment: int, peers: Iterable[PeerId], now: float) -> None:
        """These can serve what is being fetched of ``fragment``, too."""
        trusted = [peer for peer in peers if self._quarantined.get(peer, now) <= now]
        if (load := self._loads.get(fragment)) is not None:
            load.add_donors(trusted)
            self._settle(now)
        elif (goal := self._waiting.get(fragment)) is not None:
            more = (peer for peer in trusted if peer not in goal.donors)
            self._waiting[fragment] = replace(goal, donors=(*goal.donors, *more))

    def forget_donor(self, peer: PeerId, reason: str, now: float) -> None:
        """``peer`` gives nothing any more: its chunks go back to be dealt."""
        for load in self._loads.values():
            self._lose(load, peer, reason)
        self.owed.drop(peer)
        self._settle(now)

    def quarantine(self, peer: PeerId, reason: str, now: float) -> None:
        """``peer`` gave what it must not: do not ask it for a while."""
        if len(self._quarantined) < MAX_PEERS:
            self._quarantined[peer] = now + 2 * PATIENCE_S
        self.forget_donor(peer, reason, now)

    # ---- what donors say

    def receive(self, message: Manifest | Chunk | Refusal, sender: PeerId, now: float) -> None:
        """A donor's answer; one that was not asked for is ignored."""
        load = next((one for one in self._loads.values() if one.request == message.request), None)
        if load is None or sender not in load.donors:
            return
        try:
            if isinstance(message, Manifest):
                load.take_manifest(message, sender, now)
            elif isinstance(message, Chunk):
                self._take_chunk(load, message, sender, now)
            elif not load.take_refusal(message, sender, now):
                self._lose(load, sender, message.reason[:200])
        except RemoteProtocolError as error:
            self._out.emit(DonorRefused(sender, error.reason, error.detail))
            self.quarantine(sender, str(error), now)
        self._settle(now)

    def _take_chunk(self, load: Load, chunk: Chunk, sender: PeerId, now: float) -> None:
        if load.chunks is None or sender not in load.givers or chunk.version != load.chunks.manifest.version:
            return  # of what is loaded no more
        if load.chunks.take(chunk, sender):
            load.moved_at = self.got_at = now
        for request, lost in self.owed.gave(sender, (load.request, chunk.chunk), now):
            for one in self._loads.values():
                if one.request == request and one.chunks is not None:
                    one.chunks.give_back([lost])

    # ---- time

    def handle_timer(self, now: float) -> None:
        for load in self._loads.values():
            for peer in load.silent(now):
                self._lose(load, peer, "its manifest did not come")
        for peer in self.owed.silent(now):
            self.forget_donor(peer, "silent", now)
        if now >= self._tell_at:
            self._tell_at = now + TELL_EVERY_S
            self._tell()
        self._settle(now)

    def get_timer(self) -> float | None:
        if not self._loads:
            return None
        times = [self.owed.silent_at(), self._tell_at]
        for load in self._loads.values():
            times += load.get_timer(), load.stalled_at(self.owed.came_at)
            times += [at for _, at, _ in self._repeats(load)]
        return min(times)

    def _tell(self) -> None:
        """How far the states are that are being loaded, or wait for it."""
        loads = [load for load in self._loads.values() if load.goal.what == STATE]
        waiting = [goal.fragment for goal in self._waiting.values() if goal.what == STATE]
        fragments = tuple(sorted([*waiting, *(load.goal.fragment for load in loads)]))
        chunks = [load.chunks for load in loads if load.chunks is not None]
        scale = self.shape.scale
        missing = sum(len(one.missing) for one in chunks) * self.shape.chunk_bytes
        received = max(0, sum(len(one.data) for one in chunks) - missing)
        total = sum(self.shape.state_bytes[fragment] for fragment in fragments)
        donors = {peer for one in chunks for peer in one.gave}
        if fragments:
            self._out.emit(Loading(fragments, round(scale * received), round(scale * total), len(donors)))

    # ---- which loads run

    def _settle(self, now: float) -> None:
        """Whatever can be done now: choose, end, start, ask, deal."""
        for fragment, load in list(self._loads.items()):
            load.choose(now)
            if load.is_chosen and load.is_out_of_donors and load.attempts < ATTEMPTS:
                self._begin(load, now)
            if (ended := self._ended(load, now)) is not None:
                self._end(fragment)
                self._out.emit(ended)
        for fragment in sorted(self._waiting):
            if self._may_start(self._waiting[fragment]):
                self._start(self._waiting.pop(fragment), now)
        for load in self._loads.values():
            for peer, question in load.questions(now):
                self._out.send(peer, question)
        self._deal(now)

    def _ended(self, load: Load, now: float) -> CatchUpEvent | None:
        if load.is_chosen and load.chunks is not None and not load.chunks.missing:
            return load.finished(now)
        if now >= load.stalled_at(self.owed.came_at):
            load.reason = f"{load.reason} (nothing came for {2 * PATIENCE_S:.0f} s)"
            return load.failed()
        return load.failed() if load.is_out_of_donors else None

    def _end(self, fragment: int) -> None:
        """Wait for nobody any more."""
        if (load := self._loads.pop(fragment, None)) is not None:
            self.owed.forget(load.request)
        if not self._loads:
            self.owed.clear()

    def _may_start(self, goal: Goal) -> bool:
        if goal.what != STATE:
            return True
        states = [load.goal.fragment for load in self._loads.values() if load.goal.what == STATE]
        size = sum(self.shape.state_bytes[fragment] for fragment in (*states, goal.fragment))
        is_small = len(states) < MOST_AT_ONCE and self.shape.is_free(size)
        return not states or is_small

    def _start(self, goal: Goal, now: float) -> None:
        self._requests += 1
        self._loads[goal.fragment] = load = Load(goal, self._requests, self._terms, now)
        self._begin(load, now)
        if load.is_out_of_donors:
            self._end(goal.fragment)
            self._out.emit(load.failed())

    def _begin(self, load: Load, now: float) -> None:
        """Ask for manifests, the first time or anew."""
        self.owed.forget(load.request)
        self._quarantined = {peer: until for peer, until in self._quarantined.items() if until > now}
        load.begin(self._quarantined, now)

    # ---- chunks

    def _lose(self, load: Load, peer: PeerId, reason: str) -> None:
        """Go on without ``peer``."""
        load.forget(peer, reason)
        chunks = self.owed.forget(load.request, peer)
        if load.chunks is not None:
            load.chunks.give_back(chunks)

    def _deal(self, now: float) -> None:
        """One chunk of each load in turn, of whoever owes least; then what others owe for long."""
        loads = sorted(self._loads.values(), key=lambda load: load.dealt_at)
        dealt = True
        while dealt:
            dealt = False
            for load in loads:
                if load.chunks is not None and load.chunks.pending:
                    peer = self.owed.least_owing(load.givers)
                    if peer is not None:
                        self._ask_chunk(load, peer, load.chunks.pending.popleft(), now)
                        dealt = True
        for load in loads:
            for peer, at, chunk in self._repeats(load):
                if now >= at:
                    self._ask_chunk(load, peer, chunk, now)

    def _repeats(self, load: Load) -> Iterable[tuple[PeerId, float, int]]:
        """Donors that owe nobody anything, where nothing is left to deal: when each repeats which chunk."""
        if load.chunks is not None and not load.chunks.pending:
            for peer in load.givers:
                if self.owed.is_idle(peer):
                    yield peer, *self.owed.overdue(load.request, load.chunks.missing, peer)

    def _ask_chunk(self, load: Load, peer: PeerId, chunk: int, now: float) -> None:
        assert load.chunks is not None
        load.dealt_at = now
        goal = load.goal
        self.owed.ask(peer, (load.request, chunk), now)
        fetch = Fetch(what=goal.what, fragment=goal.fragment, want_chunk=True, chunk=chunk)
        fetch.version = load.chunks.manifest.version
        fetch.request = load.request
        self._out.send(peer, fetch)
