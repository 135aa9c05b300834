"""The peer that is behind: which goals are loaded, and one queue of chunks dealt to whichever donor has room.

    ask donors for manifests -> fix one content -> deal its chunks -> all right: ``Fetched``
              ^                        |
              +---- nobody has it -----+     at most ``BEGUN_ANEW_MOST`` times

When no chunk is left to deal, an idle donor repeats what another owes for long (work stealing). A donor that
is silent or wrong loses its place, and its chunks go back into the queue.

Laws: nothing is allocated before a signed manifest of the size that this peer computed; what others
contradict is refused before a byte of it is asked for; every chunk kept has the digest that was promised;
every wait has a timer; one goal and one content at a time for each fragment. Price: what was loaded of a
content that all donors let go of is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.goals import (
    STATE,
    CatchUpEvent,
    DonorRefused,
    Goal,
    Loading,
    Outbox,
    Shape,
)
from p2p_co2.protocol.catchup.load import STALLED_S, Load, Terms
from p2p_co2.protocol.catchup.owed import Owed, OwedChunks
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal

LOADED_AT_ONCE = 8
"""States, where they are small."""
BEGUN_ANEW_MOST = 6
LOOK_EVERY_S = 0.25
"""So often it is looked whether an idle donor should repeat what others owe."""
TELL_EVERY_S = 10.0
"""So often it is told how far the loading of states is."""
QUARANTINE_S = 120.0
"""A donor that broke the rules is not asked again for so long."""
MAX_QUARANTINED = 256


class Fetcher:
    """One goal per fragment at a time; a new goal for it replaces the old one. ``got_at``: when a right chunk
    came that had not come before."""

    def __init__(self, run: bytes, shape: Shape, out: Outbox) -> None:
        self._shape, self._out = shape, out
        self.terms = Terms(run, shape)
        self.owed = OwedChunks()
        self._loads: dict[int, Load] = {}
        self._waiting: dict[int, Goal] = {}
        self._quarantined: dict[PeerId, float] = {}
        self._requests = 0
        self.got_at, self._looked_at, self._tell_at = -math.inf, -math.inf, math.inf

    # ---- what is wanted

    @property
    def is_idle(self) -> bool:
        """Nothing is fetched, and nothing waits for it."""
        return not self._loads and not self._waiting

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
        """End it without a word; what waits for its room may start."""
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
        if len(self._quarantined) < MAX_QUARANTINED:
            self._quarantined[peer] = now + QUARANTINE_S
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
            load.wasted += isinstance(message, Chunk)
            self._out.emit(DonorRefused(sender, error.reason, error.detail))
            self.quarantine(sender, str(error), now)
        self._settle(now)

    def _take_chunk(self, load: Load, chunk: Chunk, sender: PeerId, now: float) -> None:
        if load.chunks is None or sender not in load.givers or chunk.version != load.chunks.manifest.version:
            return  # of what is loaded no more
        if chunk.chunk >= len(load.chunks.manifest.chunk_digests):
            raise RemoteProtocolError("unasked chunk", f"fragment {chunk.fragment} chunk {chunk.chunk}")
        is_new = load.chunks.take(chunk, sender)
        load.wasted += not is_new
        self._give_back(self.owed.gave(sender, (load.request, chunk.chunk), now))
        if is_new:
            load.moved_at = self.got_at = now

    def _give_back(self, lost: Iterable[Owed]) -> None:
        """These were asked for, and do not come."""
        for request, chunk in lost:
            for load in self._loads.values():
                if load.request == request and load.chunks is not None:
                    load.chunks.give_back([chunk])

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
        loads = self._loads.values()
        times = [at for load in loads for at in (load.get_timer(), load.stalled_at(self.owed.came_at))]
        look_at = self._looked_at + LOOK_EVERY_S if any(map(self._idle, loads)) else math.inf
        return min([*times, self.owed.silent_at(), self._tell_at, look_at])

    def _tell(self) -> None:
        """How far the states are that are being loaded, or wait for it."""
        loads = [load for load in self._loads.values() if load.goal.what == STATE]
        waiting = [goal.fragment for goal in self._waiting.values() if goal.what == STATE]
        fragments = tuple(sorted([*waiting, *(load.goal.fragment for load in loads)]))
        chunks, scale = [load.chunks for load in loads if load.chunks is not None], self._shape.scale
        missing = sum(len(one.missing) for one in chunks) * self._shape.chunk_bytes
        received = max(0, sum(len(one.data) for one in chunks) - missing)
        total = sum(self._shape.state_bytes[fragment] for fragment in fragments)
        donors = {peer for one in chunks for peer in one.gave}
        if fragments:
            self._out.emit(Loading(fragments, round(scale * received), round(scale * total), len(donors)))

    # ---- which loads run

    def _settle(self, now: float) -> None:
        """Whatever can be done now: choose, end, start, ask, deal."""
        for fragment, load in list(self._loads.items()):
            load.choose(now)
            if load.is_chosen and load.is_out_of_donors and load.attempts < BEGUN_ANEW_MOST:
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
            load.reason = f"{load.reason} (nothing came for {STALLED_S:.0f} s)"
            return load.failed()
        return load.failed() if load.is_out_of_donors else None

    def _end(self, fragment: int) -> None:
        """Wait for nobody any more."""
        if (load := self._loads.pop(fragment, None)) is not None:
            self.owed.forget(load.request)
        if not self._loads:
            self.owed.clear()

    def _may_start(self, goal: Goal) -> bool:
        states = [load.goal.fragment for load in self._loads.values() if load.goal.what == STATE]
        size = sum(self._shape.state_bytes[fragment] for fragment in (*states, goal.fragment))
        is_small = len(states) < LOADED_AT_ONCE and self._shape.is_free(size)
        return goal.what != STATE or not states or is_small

    def _start(self, goal: Goal, now: float) -> None:
        self._requests += 1
        self._loads[goal.fragment] = load = Load(goal, self._requests, self.terms, now)
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
        self._looked_at = now
        for load in loads:
            for peer in self._idle(load):
                assert load.chunks is not None
                chunk = self.owed.overdue(load.request, load.chunks.missing, peer, now)
                if chunk is not None:
                    self._ask_chunk(load, peer, chunk, now)

    def _idle(self, load: Load) -> list[PeerId]:
        """Donors that owe nobody anything, of a load that has nothing left to deal."""
        if load.chunks is None or load.chunks.pending:
            return []
        return [peer for peer in load.givers if self.owed.is_idle(peer)]

    def _ask_chunk(self, load: Load, peer: PeerId, chunk: int, now: float) -> None:
        assert load.chunks is not None
        load.dealt_at, goal = now, load.goal
        self.owed.ask(peer, (load.request, chunk), now)
        fetch = Fetch(what=goal.what, fragment=goal.fragment, want_chunk=True, chunk=chunk)
        fetch.version, fetch.request = load.chunks.manifest.version, load.request
        self._out.send(peer, fetch)

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``CatchUp.held``."""
        return {"MAX_QUARANTINED": (len(self._quarantined), MAX_QUARANTINED)}
