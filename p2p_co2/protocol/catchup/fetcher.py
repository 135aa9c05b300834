"""The peer that is behind: which downloads run, which wait, and whom to ask no more.

Laws: one goal per fragment at a time; a download is put aside for another at most once, so a donor that
names ever another fragment cannot keep us from loading any. Large states are loaded one after the other,
in the order of their fragments or as the donors have them ready, because a donor holds one; what is small,
side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.catchup.download import DONORS_AT_ONCE, Download
from p2p_co2.protocol.catchup.goals import (
    STATE,
    DonorRefused,
    FetchFailed,
    Goal,
    Loading,
    Outbox,
    Shape,
    Vouch,
)
from p2p_co2.protocol.catchup.kept import NothingKept, Store
from p2p_co2.protocol.catchup.line import MAX_LINES, Lines
from p2p_co2.protocol.catchup.source import Context, Source
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Manifest, Refusal

QUARANTINE_S = 120.0
"""A donor that broke the rules is not asked again for so long."""
MAX_QUARANTINED = 256
AHEAD_S = 8.0
"""No further state is asked for while the donors have chunks to give for so long: they drop what nobody
begins to load."""
SAID_AT_MOST = 8
"""States loaded side by side of which donors are told that we still do: with more, each has few chunks."""
TELL_EVERY_S = 10.0
"""So often it is told how far the loading of states is: over a slow line it takes minutes."""


class Fetcher:
    """One goal per fragment at a time; a new goal for it replaces the old one."""

    def __init__(self, run: bytes, shape: Shape, out: Outbox) -> None:
        self._shape, self._out = shape, out
        self.store: Store = NothingKept()
        self.vouch: Vouch = lambda donor, fragment, version, digest: None
        """What the swarm says of a promised state."""
        self._downloads: dict[int, Download] = {}
        self._waiting: dict[int, Goal] = {}
        self._quarantined: dict[PeerId, float] = {}
        self._put_aside: set[int] = set()
        """Fragments whose download has waited for another one already."""
        self._requests = 0
        self._lines = Lines(shape.chunk_bytes * shape.scale)
        self.got_at = -math.inf
        """When a right chunk came that had not come before."""
        self._tell_at = math.inf
        self._context = Context(
            run, out, self._next_request, self._vouch, shape.chunk_bytes, self._lines, self._pending,
            shape.scale,
        )  # fmt: skip

    def want(self, goal: Goal, now: float) -> None:
        """Start fetching; ends in ``Fetched`` or ``FetchFailed``."""
        running = self._downloads.get(goal.fragment)
        known = running.goal if running is not None else self._waiting.get(goal.fragment)
        if known is not None and (known.what, known.version) == (goal.what, goal.version):
            return
        if self.is_idle:
            self._tell_at = now + TELL_EVERY_S
        if running is not None:
            self._downloads.pop(goal.fragment).close(now)
        self._waiting[goal.fragment] = goal
        self._settle(now)

    def is_busy(self, donor: PeerId, now: float) -> None:
        """``donor`` sends us a round's bytes: its chunks come after them."""
        self._lines.is_busy(donor, now)

    @property
    def is_idle(self) -> bool:
        """Nothing is fetched, and nothing waits for it."""
        return not self._downloads and not self._waiting

    def fetching(self, fragment: int) -> bool:
        return fragment in self._downloads or fragment in self._waiting

    def forget(self, fragment: int, now: float) -> None:
        """End it without a word; what waits for its room may start."""
        if (download := self._downloads.pop(fragment, None)) is not None:
            download.close(now)
        self._waiting.pop(fragment, None)
        self._put_aside.discard(fragment)
        self._settle(now)

    def add_donors(self, fragment: int, peers: Sequence[PeerId], now: float) -> None:
        """These can serve what is being fetched of ``fragment``, too."""
        trusted = [peer for peer in peers if self._quarantined.get(peer, now) <= now]
        if fragment in self._downloads:
            self._downloads[fragment].add_donors(trusted, now)
        elif (goal := self._waiting.get(fragment)) is not None:
            more = (peer for peer in trusted if peer not in goal.donors)
            self._waiting[fragment] = replace(goal, donors=(*goal.donors, *more))

    def forget_donor(self, peer: PeerId, now: float) -> None:
        """``peer`` is gone: goals that wait for it go on with other donors."""
        for download in list(self._downloads.values()):
            download.drop(peer, "the donor left", now)
        self._settle(now)

    def quarantine(self, peer: PeerId, now: float, reason: str) -> None:
        """``peer`` gave what it must not: do not ask it for a while."""
        if len(self._quarantined) < MAX_QUARANTINED:
            self._quarantined[peer] = now + QUARANTINE_S
        for download in list(self._downloads.values()):
            download.drop(peer, reason, now)
        self._settle(now)

    def receive(self, message: Manifest | Chunk | Refusal, sender: PeerId, now: float) -> None:
        """A donor's answer; one that was not asked for is ignored."""
        found = self._expected(message.request, sender)
        if found is None:
            return
        download, source = found
        try:
            if isinstance(message, Manifest):
                download.take_manifest(source, message, now)
            elif isinstance(message, Chunk):
                is_double = message.chunk in source.answered
                download.take_chunk(source, message, now)
                self.got_at = self.got_at if is_double else now
            else:
                self._go_with(message, download, now)
                if self._downloads.get(download.goal.fragment) is download:
                    download.take_refusal(source, message, now)
        except RemoteProtocolError as error:
            self._out.emit(DonorRefused(sender, error.reason, error.detail))
            self.quarantine(sender, now, str(error))
        self._settle(now)

    def handle_timer(self, now: float) -> None:
        for download in list(self._downloads.values()):
            if now >= (download.get_timer() or now):
                download.handle_timer(now)
        self._settle(now)
        if now >= self._tell_at:
            self._tell_at = now + TELL_EVERY_S
            self._tell()

    def held(self) -> dict[str, tuple[int, int]]:
        """As ``CatchUp.held``."""
        return {
            "MAX_QUARANTINED": (len(self._quarantined), MAX_QUARANTINED),
            "MAX_LINES": (len(self._lines), MAX_LINES),
        }

    def get_timer(self) -> float | None:
        if not self._downloads:
            return None
        times = [download.get_timer() for download in self._downloads.values()]
        return min((at for at in (*times, self._tell_at) if at is not None), default=None)

    # ---- which downloads run

    def _settle(self, now: float) -> None:
        """Tell of downloads that ended, and start what may start. A donor's room goes to the download that
        has asked for nothing the longest: else who loads a whole state keeps it to itself."""
        by_turn = sorted(self._downloads.items(), key=lambda running: running[1].asked_at)
        for fragment, download in by_turn:
            download.advance(now)
            if download.ended is not None:
                self._downloads.pop(fragment).close(now)
                self._put_aside.discard(fragment)
                self._out.emit(download.ended)
        for fragment in sorted(self._waiting):
            if self._may_start(self._waiting[fragment]):
                self._start(self._waiting.pop(fragment), now)

    def _start(self, goal: Goal, now: float) -> None:
        self._quarantined = {peer: until for peer, until in self._quarantined.items() if until > now}
        trusted = tuple(peer for peer in goal.donors if peer not in self._quarantined)
        goal = replace(goal, donors=trusted)
        if not trusted:
            self._out.emit(FetchFailed(goal, "no donor is known", 0))
            return
        total_bytes = self._shape.bytes_of(goal.what, goal.fragment)
        if goal.what == STATE:
            self._say_what_is_loading()
        self._downloads[goal.fragment] = Download(
            goal, total_bytes, self._context, self._store_for(goal), now
        )

    def _say_what_is_loading(self) -> None:
        """Before we ask for another state: a donor without room for that drops what we asked it for longest
        ago, which may well be a state whose last chunks another donor is long about."""
        loading = [download for download in self._downloads.values() if download.goal.what == STATE]
        for download in loading if len(loading) <= SAID_AT_MOST else ():
            download.still_loads()

    def _tell(self) -> None:
        """How far the states are that are being loaded, or wait for it."""
        received_bytes, donors = 0, set[PeerId]()
        for download in self._downloads.values():
            if download.goal.what == STATE:
                bytes_, gave = download.received()
                received_bytes, donors = received_bytes + bytes_, donors | gave
        goals = [download.goal for download in self._downloads.values()] + list(self._waiting.values())
        fragments = tuple(sorted(goal.fragment for goal in goals if goal.what == STATE))
        total_bytes, scale = sum(self._shape.state_bytes[one] for one in fragments), self._shape.scale
        if fragments:
            received, total = round(scale * received_bytes), round(scale * total_bytes)
            self._out.emit(Loading(fragments, received, total, len(donors)))

    def _store_for(self, goal: Goal) -> Store:
        """Rounds are small and are asked for anew."""
        return self.store if goal.what == STATE else NothingKept()

    def _may_start(self, goal: Goal) -> bool:
        if goal.what != STATE:
            return True
        loading = sum(d.held_bytes for d in self._downloads.values() if d.goal.what == STATE)
        has_room = self._shape.is_free(loading + self._shape.state_bytes[goal.fragment])
        ahead = sum(download.ahead for download in self._downloads.values())
        return not loading or (has_room and ahead < max(DONORS_AT_ONCE, self._lines.chunks_in(AHEAD_S)))

    def _go_with(self, refusal: Refusal, download: Download, now: float) -> None:
        """Donors give another fragment's state just now, and we want that too: load it first."""
        fragment = refusal.serving - 1
        goal = self._waiting.get(fragment)
        idle = not any(source.manifest for source in download.sources.values())
        mine = download.goal.fragment
        if not refusal.again or goal is None or goal.what != STATE or not idle or mine in self._put_aside:
            return
        if download.goal.what == STATE and self._downloads.get(mine) is download:
            self._put_aside.add(mine)
            self._downloads.pop(mine).close(now)
            self._waiting[mine] = download.goal
            self._start(self._waiting.pop(fragment), now)

    # ---- what downloads share

    def _next_request(self) -> int:
        self._requests += 1
        return self._requests

    def _pending(self) -> int:
        return sum(download.pending for download in self._downloads.values())

    def _vouch(self, donor: PeerId, fragment: int, version: int, digest: bytes) -> bool | None:
        return self.vouch(donor, fragment, version, digest)

    def _expected(self, request: int, sender: PeerId) -> tuple[Download, Source] | None:
        for download in self._downloads.values():
            source = download.sources.get(sender)
            if source is not None and source.request == request:
                return download, source
        return None
