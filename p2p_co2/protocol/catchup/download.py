"""One goal being loaded from several donors at once.

    ask for manifests -> choose what most donors promise -> chunks, from whoever is free -> all right: done

Donors that promise other bytes (another version, or a lie) are put aside: what others than the donors vouch
for goes before what they alone say, and what others contradict is refused before a byte of it is loaded. A
chunk goes to whichever donor has room, so each donor gives as much as it can carry; near the end a free donor
repeats what another is late with. A donor that is silent, slow, or wrong loses its place and its chunks go to
the others; chunks that were right stay, whoever gave them.

Laws: nothing is allocated before a manifest of the size that this peer computed; every chunk kept has the
digest of the chosen manifest; every wait has a timer; the order of all that is asked follows from the
messages and times alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup import camps
from p2p_co2.protocol.catchup.chunks import Begun, Chunks
from p2p_co2.protocol.catchup.goals import ROUND, STATE, Disputed, Fetched, FetchFailed, Goal
from p2p_co2.protocol.catchup.kept import Store
from p2p_co2.protocol.catchup.line import OUTRUN_S, all_there_in_s
from p2p_co2.protocol.catchup.manifest import check_chunk, check_manifest, chunk_count, content_of
from p2p_co2.protocol.catchup.source import MOVES_MOST, REPEATS_MOST, Context, Source, others_gap_s, overdue
from p2p_co2.protocol.catchup.waiting import Waiting
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Fetch, Manifest, Refusal

DONORS_AT_ONCE = 8
WIDEN_S = 1.0
"""When nothing came for so long, one more donor is asked."""
OUTRUN_TIMES = 8.0
"""So many times what the others need for a chunk."""
LOOK_EVERY_S = 0.25
EARLY_AGAINS = 5
"""What a donor says it has not reached yet is asked for so often: it may be about to, or nobody will ever."""


class Download:
    """``ended`` is set when it is over: the machine takes it as its event."""

    def __init__(self, goal: Goal, total_bytes: int, context: Context, store: Store, now: float) -> None:
        self.goal, self.total_bytes = goal, total_bytes
        held = store.held_version(goal.fragment, total_bytes)
        self._held = held if (goal.oldest or goal.version) <= held <= goal.version else 0
        """The version that an interrupted process had begun to load: asked for first."""
        self.ended: Fetched | FetchFailed | None = None
        self.sources: dict[PeerId, Source] = {}
        self._context = context
        self._reserve = deque(goal.donors)
        self._known = dict.fromkeys(goal.donors, math.inf)
        """Who was asked, or is to be, and until when not again."""
        self._all_chunks = chunk_count(total_bytes, context.chunk_bytes)
        self._width = min(DONORS_AT_ONCE, self._all_chunks)
        self._keep_at = math.inf
        self._course = camps.Course(goal, self._all_chunks, self._vouched)
        self._started_at = self._looked_at = now
        self._waiting = Waiting(now)
        self.asked_at = -math.inf
        self._chosen: Manifest | None = None
        self._store, self._begun, self._chunks = store, Begun(store), Chunks(store)
        self._wasted = self._newest = 0
        self._reason = "no donor is known"
        self._fill(now)

    # ---- what donors say

    def take_manifest(self, source: Source, manifest: Manifest, now: float) -> None:
        """Raises ``RemoteProtocolError`` for one that breaks the rules."""
        if source.manifest is not None:
            return  # doubled under way
        oldest, context = self.goal.oldest or self.goal.version, self._context
        check_manifest(
            manifest, self.goal, self.total_bytes, oldest, source.peer, context.run, context.chunk_bytes
        )
        if self._vouched(source.peer, manifest) is False:
            raise RemoteProtocolError("bad state", f"the others know none like that of {manifest.version}")
        source.manifest, source.content, source.again_at = manifest, content_of(manifest), None
        source.moved_on = False
        self._waiting.moved(now)
        self._course.heard(source.asked_at, now)
        self.advance(now)

    def take_chunk(self, source: Source, chunk: Chunk, now: float) -> None:
        """Raises ``RemoteProtocolError`` for a chunk that was not asked for, or is wrong. What is asked next,
        and by which download, is the fetcher's to say."""
        if chunk.chunk in source.answered:
            return  # doubled under way
        if self._chosen is None or not (chunk.chunk in source.asked or chunk.chunk in source.lost):
            raise RemoteProtocolError("unasked chunk", f"fragment {chunk.fragment} chunk {chunk.chunk}")
        try:
            check_chunk(chunk, self._chosen)
        except RemoteProtocolError:
            self._wasted += 1
            raise
        source.gave(chunk.chunk, now, self._context.lines)
        self._waiting.moved(now)
        if chunk.chunk in self._chunks.missing:
            self._waiting.came(now)
            self._chunks.take(chunk, self._chosen, source.peer)
            if source.lost[chunk.chunk]:
                self._chunks.was_late(chunk.chunk)
            source.repeats = 0
        else:
            self._wasted += 1

    def take_refusal(self, source: Source, refusal: Refusal, now: float) -> None:
        """The donor cannot help, or not now."""
        if source.held and source.manifest is None and not refusal.again:
            self._held = 0  # that version is gone: whatever there is, then, from everybody
            self._ask_manifest(source, now)
            return
        if refusal.again and source.manifest is not None and source.content != self._course.content:
            return  # its promise may stand, and nothing is asked of it by now
        self._newest = max(self._newest, refusal.newest_version)
        reason = refusal.reason[:200] or "refused without a reason"
        is_early = self.goal.what == ROUND or refusal.newest_version > 0
        patient = source.agains < EARLY_AGAINS or not is_early
        if refusal.again and not source.asked and patient:
            self._reason = f"{source.peer[-6:]}: {reason}"
            source.ask_again_later(self._context.next_request(), now)
            self._fill(now, more=1)
            self.advance(now)
        else:
            had_it = source.manifest is not None or self._is_further(source, refusal, now)
            self._lose(source, reason, now, moved_on=had_it and self.goal.what == STATE)

    def _is_further(self, source: Source, refusal: Refusal, now: float) -> bool:
        """Whether who refuses has passed what was begun, whose rest takes long: it is asked for its own."""
        if self._chosen is None or source.moved_on or refusal.newest_version <= self._chosen.version:
            return False
        lines, missing = [source.line for source in self._useful()], len(self._chunks.missing)
        return all_there_in_s(lines, missing, now) > camps.LEFT_FLOOR_S

    def drop(self, peer: PeerId, reason: str, now: float) -> None:
        """Go on without ``peer``."""
        if peer in self._reserve:
            self._reserve.remove(peer)
        if peer not in self.sources:
            return
        self._waiting.looks(self._turns())
        source = self.sources.pop(peer)
        self._give_back(source, source.asked)
        if self.ended is not None:
            return
        self._reason = f"{peer[-6:]}: {reason}"
        self._fill(now)
        self.advance(now)

    def add_donors(self, peers: Iterable[PeerId], now: float) -> None:
        """More donors are known by now, or failed us long ago; others that were asked before are not asked
        again."""
        new = [peer for peer in peers if self._known.get(peer, now) <= now]
        if new and self.ended is None:
            self._known.update(dict.fromkeys(new, math.inf))
            self._reserve.extend(new)
            self._fill(now)

    def close(self, now: float) -> None:
        """It waits for nobody any more. Who has not given its first chunk by now was outrun."""
        for source in self.sources.values():
            waited_s, usual_s = now - source.line.heard_at, self._others_gap_s(source)
            if source.asked and not source.line.gap_s and waited_s > OUTRUN_TIMES * usual_s > 0:
                self._context.lines.outran(source.line, now)
            source.give_up(source.asked)

    def still_loads(self) -> None:
        """Tell the donors, by asking once more for what they promised."""
        for source in self._useful() if self._chosen is not None else ():
            self._context.out.send(source.peer, self._wanted_of(source))

    @property
    def pending(self) -> int:
        """Chunks that nobody was asked for yet, and somebody might be."""
        return len(self._chunks.pending) if self._chosen is not None else 0

    @property
    def ahead(self) -> int:
        """Chunks that nobody was asked for yet: all, until it is chosen what is loaded."""
        return self.pending if self._chosen is not None else self._all_chunks

    @property
    def held_bytes(self) -> int:
        """What it has memory for, or will have."""
        return self.total_bytes * max(1, len(self._begun))

    def received(self) -> tuple[int, set[PeerId]]:
        """Bytes that are right, in whole chunks, and who gave any of them."""
        missing_bytes = len(self._chunks.missing) * self._context.chunk_bytes
        return max(0, len(self._chunks.data) - missing_bytes), set(self._chunks.gave)

    # ---- time

    def get_timer(self) -> float | None:
        times = [at for source in self.sources.values() if (at := self._patience_ends_at(source)) is not None]
        times += [source.again_at for source in self.sources.values() if source.again_at is not None]
        times.append(self._waiting.ends_at(self._turns()))
        if self._chosen is None and (at := self._course.decides_at(self.sources.values())) is not None:
            times.append(at)
        if self._chosen is not None and (at := self._course.looks_at()) is not None:
            times += [at, self._keep_at]
        if self._reserve:
            times.append(self._widen_at())
        if (look_at := self._look_at()) is not None:
            times.append(look_at)
        return min(times)

    def handle_timer(self, now: float) -> None:
        self._waiting.looks(self._turns())
        for source in list(self.sources.values()):
            ends_at = self._patience_ends_at(source)
            if ends_at is not None and now >= ends_at:
                if lost := source.note_lost(now):
                    self._give_back(source, lost)
                    if held := source.keeps_back():
                        self._lose(source, f"does not give chunk {held[0]}, but later ones", now)
                    continue
                since = source.asked_at
                if source.asked:
                    since = source.line.heard_at
                    self._context.lines.outran(source.line, now)
                    source.line.was_silent(now)
                self._lose(source, f"silent for {now - since:.1f} s", now)
            elif source.again_at is not None and now >= source.again_at:
                self._ask_manifest(source, now)
        if now >= self._keep_at:
            self._keep_at = now + camps.KEEP_EVERY_S
            for source in self._others():
                self._context.out.send(source.peer, self._wanted_of(source))
        if self.ended is None and now >= self._waiting.ends_at(self._turns()):
            self._give_up(now)
        if self._reserve and now >= self._widen_at():
            self._fill(now, more=1)
        self.advance(now)

    def _give_up(self, now: float) -> None:
        """Nothing came for too long: without those that were to give it, where others promise anything."""
        useful = self._useful() if self._chosen is not None else []
        nothing_s = self._waiting.nothing_s(now)
        if self._others() and self._waiting.goes_on(now, bool(useful)):
            for source in useful or [s for s in self.sources.values() if s.manifest is None]:
                self._lose(source, f"gave nothing for {nothing_s:.0f} s", now)
        else:
            self._fail(f"{self._reason} (for {nothing_s:.0f} s)")

    def _turns(self) -> list[float]:
        """While those that promise it give to our other downloads, this one waits for its turn; what it has
        asked for comes after what was asked before it."""
        return [s.waits_since() for s in self._useful() if self._chunks.pending or s.asked]

    def _patience_ends_at(self, source: Source) -> float | None:
        context, real_bytes = self._context, self.total_bytes * self._context.scale
        return source.patience_ends_at(real_bytes, context.lines, self._others_gap_s(source))

    def _others_gap_s(self, source: Source) -> float:
        useful = self._useful() if self._chosen is not None else None
        return others_gap_s(source, self.sources.values(), useful)

    def _widen_at(self) -> float:
        newest_asked_at = max((source.asked_at for source in self.sources.values()), default=-math.inf)
        return max(self._waiting.moved_at, newest_asked_at) + WIDEN_S

    # ---- donors

    def _fill(self, now: float, more: int = 0) -> None:
        """Ask donors from the reserve until as many as are wanted are at it."""
        at_it = sum(s.again_at is None and not self._course.is_standing_by(s) for s in self.sources.values())
        wanted = max(self._width, at_it + more) - at_it
        while wanted > 0 and self._reserve:
            peer = self._reserve.popleft()
            self.sources[peer] = source = Source(peer, 0, now, self._context.lines.of(peer, now))
            self._ask_manifest(source, now)
            wanted -= 1

    def _ask_manifest(self, source: Source, now: float) -> None:
        source.held = bool(self._held) and self._chosen is None
        source.request = self._context.next_request()
        source.asked_at, source.again_at = now, None
        self._context.out.send(source.peer, self._manifest_wanted(source))

    def _manifest_wanted(self, source: Source) -> Fetch:
        only = self._chosen.version if self._chosen is not None else self._held
        return self.goal.wanted(source.request, 0 if source.moved_on else only)

    def _wanted_of(self, source: Source) -> Fetch:
        """What it promised, once more: else it drops what nobody asks for."""
        assert source.manifest is not None
        return self.goal.wanted(source.request, source.manifest.version)

    def _useful(self) -> list[Source]:
        """The donors that promise what was chosen."""
        return [
            s for s in self.sources.values() if s.manifest is not None and s.content == self._course.content
        ]

    def _others(self) -> list[Source]:
        """The donors that promise anything else."""
        return [
            s for s in self.sources.values() if s.manifest is not None and s.content != self._course.content
        ]

    def _givers(self, now: float) -> list[Source]:
        """Those of them that are asked for chunks."""
        useful = self._useful()
        return [source for source in useful if source.line.slow_until <= now] or useful

    def _lose(self, source: Source, reason: str, now: float, *, moved_on: bool = False) -> None:
        """An honest donor did not deliver. The last one is asked anew, for a message may be lost, and one
        that ``moved_on`` from what it promised, for whatever it has now."""
        is_last = len(self.sources) == 1 and not self._reserve
        source.moves += moved_on
        is_tried = source.repeats >= REPEATS_MOST or source.moves > MOVES_MOST
        if is_tried or not (is_last or moved_on):
            self._known[source.peer] = now + OUTRUN_S
            self.drop(source.peer, reason, now)
            return
        self._give_back(source, source.asked)
        source.repeats += 1
        source.moved_on, source.manifest = moved_on, None
        if is_last and self._chosen is not None:
            self._lose_chosen(now)
        if moved_on:
            self._waiting.moved(now)
        else:
            source.line.window = 1
        source.answered.clear()
        source.lost.clear()
        self._ask_manifest(source, now)
        self.advance(now)

    def _give_back(self, source: Source, chunks: Collection[int]) -> None:
        """What was asked of a donor goes to the others first."""
        owed = {chunk for other in self.sources.values() if other is not source for chunk in other.asked}
        self._chunks.give_back([chunk for chunk in chunks if chunk not in owed])
        source.give_up(chunks)

    # ---- what to load

    def advance(self, now: float) -> None:
        """Choose, ask, finish or fail: whatever can be done now."""
        if self.ended is not None:
            return
        if self._chosen is not None and not self._useful():
            self._lose_chosen(now)
        sources, missing, camp = self.sources.values(), len(self._chunks.missing), None
        if self._chosen is None:
            camp = self._course.choice(sources, self._chunks.gave, now)
        elif missing:
            camp = self._course.elsewhere(sources, missing, now)
        if camp is not None:
            self._take_up(camp, now)
        if self._chosen is not None:
            if not self._chunks.missing:
                self._finish(now)
                return
            self._ask_chunks(now)
        if not self.sources and not self._reserve:
            self._fail(self._reason)

    def _lose_chosen(self, now: float) -> None:
        self._chosen = None
        self._waiting.moved(now)
        self._course.lost(self.sources.values(), now)

    def _take_up(self, camp: camps.Camp, now: float) -> None:
        """Load what these promise. Who promises what was loaded until now stands by."""
        content = camp[0].content
        is_another = content != self._course.content
        for source in self._useful() if is_another else ():
            source.stand_by(self._context.next_request())
            self._keep_at = now + camps.KEEP_EVERY_S
        self._chosen, self._course.content = camps.promise_of(camp), content
        if not is_another:
            return
        self._waiting.moved(now)
        self._chunks = Chunks(self._store)  # lets go of what is not put aside
        self._chunks = self._begun.go_on(content, self._course.left, self._chosen)
        self._course.begun(len(self._chunks.missing))
        all_camps = camps.camps_of(self.sources.values())
        if rivals := camps.rivals_of(camp, all_camps, self.goal, self._vouched):
            taken = tuple(source.peer for source in camp)
            self._context.out.emit(Disputed(self.goal.fragment, self._chosen.version, taken, tuple(rivals)))
        self._fill(now)

    def _vouched(self, donor: PeerId, manifest: Manifest) -> bool | None:
        """What others say of it: a round carries its decision, so only of a state there is something to
        say."""
        if manifest.what != STATE:
            return None
        return self._context.vouch(donor, manifest.fragment, manifest.version, manifest.digest)

    def _ask_chunks(self, now: float) -> None:
        assert self._chosen is not None
        sources = self._givers(now)
        if self._chunks.pending:
            end_s = all_there_in_s([source.line for source in sources], self._context.pending(), now)
            widest = max(source.line.window for source in sources)
            for depth in range(widest):  # one each, then a second each: nobody takes all of a small goal
                for source in sources:
                    has_room = len(source.asked) == depth and source.line.has_room
                    if has_room and self._chunks.pending and source.line.next_in_s(now) <= end_s:
                        self._ask_chunk(source, self._chunks.pending.popleft(), now)
        self._looked_at = now
        for source in sources if not self._context.pending() else ():
            if not (source.line.asked or self._chunks.pending):
                chunk = overdue(self._useful(), self._chunks.missing, source.line, now)
                if chunk is not None:
                    self._ask_chunk(source, chunk, now)

    def _ask_chunk(self, source: Source, chunk: int, now: float) -> None:
        assert self._chosen is not None
        source.ask(chunk, now, self._context.lines)
        self.asked_at = now
        fetch = Fetch(
            what=self.goal.what, fragment=self.goal.fragment, version=self._chosen.version,
            want_chunk=True, chunk=chunk, request=source.request,
        )  # fmt: skip
        self._context.out.send(source.peer, fetch)

    def _look_at(self) -> float | None:
        """When to see again whether a free donor should repeat what others owe, or give what one quicker was
        to give."""
        if self._chosen is None or not self._chunks.missing:
            return None
        free = any(source.line.has_room and not source.asked for source in self._givers(self._looked_at))
        return self._looked_at + LOOK_EVERY_S if free else None

    # ---- the end

    def _finish(self, now: float) -> None:
        assert self._chosen is not None
        given = {source.peer: 0 for source in self._useful()} | self._chunks.gave
        donors, chosen = tuple(sorted(given, key=lambda peer: (-given[peer], peer))), self._chosen
        self.ended = Fetched(
            self.goal, chosen.version, self._chunks.data, chosen.decision, chosen.digest, donors,
            duration_s=now - self._started_at, chunks_wasted=self._wasted, chunks_kept=self._chunks.kept,
        )  # fmt: skip

    def _fail(self, reason: str) -> None:
        self.ended = FetchFailed(self.goal, reason, self._newest, sum(self._chunks.gave.values()))
