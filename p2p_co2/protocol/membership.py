"""Who is alive, how far away, and where they are in the run: a machine without I/O or clock.

Each peer tells each other its ``Status`` every ``heartbeat_s``, in a ping that asks for no answer (``nonce``
0: one message, serialised once for all); pings that want one, and pongs, carry it too. A peer is live from
its first message until it says goodbye, its link breaks and cannot be opened again, or it is silent for
longer than its own habit explains. There is no fixed timeout to guess: the silence that we accept grows with
the gaps that were seen.

Law: ``live`` holds only peers that were heard directly; a peer that only the DHT knows is not live. Time is
compared with this machine's clock alone; other clocks are only measured (``clock_offset_s``), never trusted.

Nobody is told twice: who heard our status within most of the last heartbeat, by a pong or because something
changed, is left out. A round trip is measured every ``MEASURE_EVERY_S``. Among many the heart beats more
slowly, so that a peer tells at most ``TOLD_PER_S`` others a second, down to one beat in
``SLOWEST_HEARTBEAT_S``; the silence that is accepted grows with the beat.

A round of minutes has long quiet times, in which nothing is told but that nothing has changed. A peer that
only trains then (``rests``) tells so every ``quiet_beat_s``, says so beforehand, and is missed only after
``QUIET_BEATS_MISSED`` of those; what changes is told at once all the same. That its process died, or its
line, is noticed sooner: its links break.

A peer that says that its model is another one than ours (``model_table``) is a stranger: never live, and
told once by how ours differs, as it tells us. One that says another thing each time is sent our table, and
told of, once in ``STRANGER_TOLD_S``. Law: whoever is live has our model, or does not say. Price: a liar can
pass for either, and be in a round whose sizes it knows, or alone.

Price: each peer still hears from each other one, so this serves groups of up to a few hundred, not thousands.
In the quiet of a round a peer whose links are answered but that says nothing (a program that hangs) is taken
for live for up to ``QUIET_BEATS_MISSED`` beats and one more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.heartbeat import HEARTBEAT_S, LONGEST_HEARTBEAT_S, heartbeat_among_s, measure_every_s
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS, MAX_STRING
from p2p_co2.protocol.wire.messages_pb2 import Leave, ModelTable, Ping, Pong, Status
from p2p_co2.protocol.wire.model_table import Difference, ModelSummary
from p2p_co2.protocol.wire.status import PeerStatus, read_status

QUIET_BEATS_MISSED = 2.5
TOLD_LATELY = 0.75
"""Of a heartbeat: who was told more lately, because something changed, waits for the next one."""
NEWS_GATHERED_S = 0.05
"""News of a peer comes in bursts: its last offer ends, so it is done with a fragment, and with all."""
ANNOUNCED_AGAIN = 0.125
"""Of a heartbeat, between two announcements: at the end of a run there is much to announce."""
SILENCE_FLOOR_S = 6.0
"""A peer is never declared silent sooner: a busy laptop may starve a thread for seconds."""
SILENCE_CAP_S = 30.0
STOOD_STILL_S = 3.0
"""When this process itself stood still for longer (a suspended laptop), the others' silence until then says
nothing: what they sent has yet to be read, or went to a link that they gave up. Believing to be alone, it
would begin a history of its own. So all are asked at once, and their silence counts from then on; or, where
nobody can have given us up for it yet, as if we had not stood: who stands often misses its dead, too."""
GAPS_KEPT = 16
OFFSETS_KEPT = 9
ONE_WAY_S = 2.0
"""A peer that we hear but cannot reach is no peer for this long; without it, it would join and leave all the
time."""
CUT_OFF_S = 16.0
"""Who lost most others within this time is rather cut off than alone: long enough to try them again
(``REVISIT_S``) and for a carrier to give up."""
BROKEN_PER_GOODBYE = 4
"""Where peers end their run, so many links may break before goodbyes have come, for each that says it."""
REVISIT_S = 5.0
"""A peer that the DHT still lists is tried again this long after it left."""
TABLE_WITHIN_S = 2.0
"""A stranger's table is waited for this long before it is told that its model is another one."""
STRANGER_TOLD_S = 15.0
"""A table is large, and a warning is read by people: between two to or of the same stranger."""


@dataclass(frozen=True)
class Joined:
    peer: PeerId


@dataclass(frozen=True)
class Left:
    """``reason`` in words: what we saw, not what we guess."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class OtherModel:
    """A peer that trains another model; ``difference``: from its table, None if it sent none."""

    peer: PeerId
    difference: Difference | None


MembershipEvent = Joined | Left | OtherModel


@dataclass
class Stranger:
    """A peer with another model. ``difference``: None until its table came; ``is_told``: whether ours was
    sent."""

    status: PeerStatus
    since: float
    heard_at: float
    difference: Difference | None = None
    is_told: bool = False


@dataclass
class PeerInfo:
    """What is known of one live peer. ``round_trip_s`` is the smallest of late; ``clock_offset_s`` theirs
    minus ours."""

    status: PeerStatus
    heard_at: float
    status_at: float
    versions: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    view: Any = None
    """What the shell made of the newest status; forgotten when there is news."""
    told_at: float = -math.inf
    """When our status last went to it."""
    is_missed: bool = False
    """Whether its link broke and nothing was heard of it since: it is gone, was started anew, or is back in a
    moment."""
    answered_us_at: float = -math.inf
    gaps_s: list[float] = field(default_factory=list)
    """The last ``GAPS_KEPT``; lists, since a deque costs four times as much and there are many peers."""
    round_trips_s: list[float] = field(default_factory=list)
    offsets_s: list[float] = field(default_factory=list)
    """The last ``OFFSETS_KEPT`` of both."""
    round_trip_s: float = 0.2

    def measured(self, round_trip_s: float, offset_s: float) -> None:
        _keep(self.round_trips_s, round_trip_s, OFFSETS_KEPT)
        _keep(self.offsets_s, offset_s, OFFSETS_KEPT)
        self.round_trip_s = min(self.round_trips_s)

    @property
    def clock_offset_s(self) -> float:
        return median(self.offsets_s) if self.offsets_s else 0.0

    @property
    def silence_limit_s(self) -> float:
        """Seconds without a word after which the peer counts as gone."""
        habit = 4.0 * max(self.gaps_s, default=HEARTBEAT_S)
        announced = QUIET_BEATS_MISSED * min(self.status.heartbeat_s, LONGEST_HEARTBEAT_S)
        return max(announced, min(SILENCE_CAP_S, max(SILENCE_FLOOR_S, habit)))


class Membership:
    """The five verbs of a machine, plus ``found`` (the DHT lists these) and ``unreachable`` (no carrier gets
    through). ``quiet_s``: what ``quiet_beat_s`` says of this run's rounds. ``model``: of this peer; None
    compares none."""

    def __init__(self, me: PeerId, quiet_s: float = 0.0, model: ModelSummary | None = None) -> None:
        self.me, self.quiet_s, self.model = me, quiet_s, model
        self._rests = False
        self.status = Status()
        self._live: dict[PeerId, PeerInfo] = {}
        self.strangers: dict[PeerId, Stranger] = {}
        self._untold: set[PeerId] = set()
        """Strangers of which no ``OtherModel`` has told yet."""
        self._strangers_told_at: dict[PeerId, float] = {}
        """When our table went to a stranger last; outlives what else is known of it. The oldest first."""
        self._candidates: dict[PeerId, float] = {}
        """Peers the DHT lists that are not live, and when to try them next."""
        self._one_way_until: dict[PeerId, float] = {}
        self._gone: dict[PeerId, tuple[float, bool]] = {}
        """Peers that were live: when they went, and whether with a word; the last ones at the end."""
        self._fell_silent: set[PeerId] = set()
        """Those of them whose links did not break: they may be suspended."""
        self._next_heartbeat_at: float | None = None
        self._announced_at = -math.inf
        self._announce_at = self._greet_at = math.inf
        self._nonce = 0
        self.revision = 0
        """Grows with everything that is news of the others, but not with their positions and counters."""
        self.has_looked = False  # whether the DHT has said whom it lists
        self.restarted: set[PeerId] = set()  # of whom ``take_restarted`` has yet to tell
        self._outgoing: list[tuple[PeerId, Ping | Pong | Leave | ModelTable]] = []
        self._events: deque[MembershipEvent] = deque()

    @property
    def live(self) -> Mapping[PeerId, PeerInfo]:
        """Live peers other than this one."""
        return self._live

    @property
    def heartbeat_s(self) -> float:
        """Seconds between this peer's heartbeats."""
        return heartbeat_among_s(len(self._live), self.quiet_s if self._rests else 0.0)

    def set_rests(self, rests: bool, now: float) -> None:
        """Whether this peer only trains and nothing is about to happen. Whoever hears it was told its status,
        or is told soon."""
        self._rests = rests
        if self._next_heartbeat_at is not None and not rests:
            self._next_heartbeat_at = min(self._next_heartbeat_at, now + self.heartbeat_s)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send and no event."""
        return not (self._outgoing or self._events)

    @property
    def unheard(self) -> int:
        """Peers that the DHT lists and that are not live."""
        return len(self._candidates)

    @property
    def awaited(self) -> int:
        """Those of them that may yet be heard: who said goodbye of late is listed for a while, and is
        gone. Other threads may ask."""
        return sum(not self._gone.get(peer, (0.0, False))[1] for peer in list(self._candidates))

    def is_cut_off(self, now: float) -> bool:
        """Whether more peers went without a word of late than are live, or went with those that said
        goodbye. Those that fell silent and that the DHT still lists may only be suspended: they went of late
        however long ago that is."""
        for peer, (at, _) in list(self._gone.items()):
            if now - at > CUT_OFF_S and peer not in self._fell_silent:
                del self._gone[peer]
        goodbyes = sum(with_word for _, with_word in self._gone.values())
        return len(self._gone) - goodbyes > len(self._live) + BROKEN_PER_GOODBYE * goodbyes

    def went_silently(self, peers: Collection[PeerId]) -> bool | None:
        """Whether those of ``peers`` that went of late did so without a word, but for links that break where
        peers end their run; None if none of them went of late."""
        words = [with_word for peer, (_, with_word) in self._gone.items() if peer in peers]
        goodbyes = sum(words)
        return len(words) - goodbyes > BROKEN_PER_GOODBYE * goodbyes if words else None

    def found(self, peers: Iterable[PeerId], now: float) -> None:
        """The DHT lists these peers; those not yet live are pinged."""
        self.has_looked = True
        listed = list(peers)
        for peer in self.strangers.keys() - set(listed):
            if now - self.strangers[peer].heard_at > SILENCE_CAP_S:
                del self.strangers[peer]
        for peer in listed:
            if peer == self.me or peer in self._live or peer in self.strangers:
                continue
            if len(self._candidates) >= MAX_PEERS:
                break
            self._candidates.setdefault(peer, now)
        self._greet(now)
        if self._next_heartbeat_at is None:
            self._next_heartbeat_at = now + HEARTBEAT_S

    def forget(self, listed: Iterable[PeerId]) -> None:
        """Keep as candidates only the peers that the DHT still lists."""
        keep = set(listed)
        self._candidates = {peer: at for peer, at in self._candidates.items() if peer in keep}
        self._fell_silent &= keep

    def receive(
        self,
        message: Ping | Pong | Leave | ModelTable,
        sender: PeerId,
        now: float,
        status: PeerStatus | None = None,
    ) -> None:
        """Handle one message of the membership part; raises ``RemoteProtocolError`` for nonsense in it.
        ``status``: what it says of its sender, if that was read already."""
        if isinstance(message, ModelTable):
            self._hear_of_model(message, sender)
        elif isinstance(message, Leave):
            self.strangers.pop(sender, None)
            self._fell_silent.discard(sender)
            if sender in self._gone:  # its link broke before its goodbye came
                self._gone[sender], self.revision = (self._gone[sender][0], True), self.revision + 1
            reason = message.reason[:MAX_STRING] or "no reason given"
            self._drop(sender, f"left: {reason}", now, with_word=True)
        else:
            self._take_status(message, sender, status or read_status(message.status), now)

    def _take_status(self, message: Ping | Pong, sender: PeerId, status: PeerStatus, now: float) -> None:
        if self._one_way_until and self._one_way_until.get(sender, 0.0) > now:
            return
        is_strange = self.model is not None and status.model not in (0, self.model.digest)
        if is_strange:
            self._heard_stranger(sender, status, now)
        info = None if is_strange else self._heard(sender, status, now)
        if isinstance(message, Ping):
            if not message.nonce:
                return
            nonce, sent_at = message.nonce, message.sent_at
            pong = Pong(nonce=nonce, ping_sent_at=sent_at, answered_at=now, status=self.status)
            self._outgoing.append((sender, pong))
            if info is not None:
                info.told_at = now
            return
        round_trip_s = now - message.ping_sent_at
        if not (0 <= round_trip_s < SILENCE_CAP_S and math.isfinite(message.answered_at)):
            return
        if info is None:
            return  # a stranger, or as many peers as we take are live already
        info.answered_us_at = now
        info.measured(round_trip_s, message.answered_at - (message.ping_sent_at + round_trip_s / 2))

    def unreachable(self, peer: PeerId, reason: str, now: float) -> None:
        """No carrier can open a link to ``peer``: it is gone until the DHT lists it again."""
        self._lose(peer, reason, now)
        while self._one_way_until:
            oldest, until = next(iter(self._one_way_until.items()))
            if until > now and len(self._one_way_until) < MAX_PEERS:
                break
            del self._one_way_until[oldest]
        self._one_way_until.pop(peer, None)
        self._one_way_until[peer] = now + ONE_WAY_S

    def link_broke(self, peer: PeerId) -> None:
        """Until it is heard again nobody should wait for its part in anything."""
        info = self._live.get(peer)
        if info is not None and not info.is_missed:
            info.is_missed, info.view = True, None
            self.revision += 1

    def link_opened(self, peer: PeerId, now: float) -> None:
        """Ask one that was missed how it is: it may be another process by now."""
        info = self._live.get(peer)
        if info is not None and info.is_missed:
            self._ping([peer], now)

    def take_restarted(self) -> set[PeerId]:
        """Live peers that began anew, without a word and before they were missed, since this was asked last:
        what their last processes had in hand is gone."""
        restarted, self.restarted = self.restarted & self._live.keys(), set()
        return restarted

    def announce(self, now: float) -> None:
        """Tell every live peer this peer's status soon, instead of at the next heartbeat: what changes within
        a moment is told at once, and in a while, if they were told a moment ago."""
        again_at = self._announced_at + ANNOUNCED_AGAIN * self.heartbeat_s
        self._announce_at = min(self._announce_at, max(now + NEWS_GATHERED_S, again_at))

    def say_goodbye(self, reason: str) -> None:
        """Tell every live peer that this one leaves."""
        leave = Leave(reason=reason)  # the same to all of them: it is serialised once
        self._outgoing.extend((peer, leave) for peer in self._live)

    def handle_timer(self, now: float) -> None:
        if now >= self._announce_at:
            self._announce(now)
        if now >= self._greet_at:
            self._greet(now)
        for peer in [peer for peer in self._untold if self._is_overdue(peer, now)]:
            self._tell_of_stranger(peer)
        if self._next_heartbeat_at is None or now < self._next_heartbeat_at:
            return
        beat_s, quick_s = self.heartbeat_s, heartbeat_among_s(len(self._live))
        late_s = now - self._next_heartbeat_at
        has_stood_still = late_s > STOOD_STILL_S
        if has_stood_still:
            for info in self._live.values():
                info.heard_at = now if late_s > SILENCE_FLOOR_S else min(now, info.heard_at + late_s)
        self._next_heartbeat_at = now + beat_s
        asked, told = list[PeerId](), list[PeerId]()
        for peer, info in list(self._live.items()):
            silent_s = now - info.heard_at
            if silent_s > SILENCE_FLOOR_S and silent_s > max(info.silence_limit_s, 4.0 * quick_s):
                self._lose(peer, f"silent for {silent_s:.0f} s", now)
                self._fell_silent.add(peer)
            elif has_stood_still or now - info.answered_us_at > measure_every_s(beat_s):
                asked.append(peer)
            elif now - info.told_at > TOLD_LATELY * beat_s:
                told.append(peer)
        self._ping(asked, now)
        self._tell(told, now)

    def get_timer(self) -> float | None:
        if self._next_heartbeat_at is None:
            return None
        return min(self._announce_at, self._next_heartbeat_at, self._greet_at)

    def messages_to_send(self) -> list[tuple[PeerId, Ping | Pong | Leave | ModelTable]]:
        messages, self._outgoing = self._outgoing, []
        return messages

    def next_event(self) -> MembershipEvent | None:
        return self._events.popleft() if self._events else None

    @property
    def longest(self) -> int:
        """Entries of the longest of the lists in ``held``: all have the same bound."""
        held = len(self._live), len(self._candidates), len(self._one_way_until), len(self.strangers)
        return max(*held, len(self._strangers_told_at))

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        return {
            "MAX_PEERS live": (len(self._live), MAX_PEERS),
            "MAX_PEERS candidates": (len(self._candidates), MAX_PEERS),
            "MAX_PEERS one way": (len(self._one_way_until), MAX_PEERS),
            "MAX_PEERS strangers": (len(self.strangers), MAX_PEERS),
            "MAX_PEERS strangers told": (len(self._strangers_told_at), MAX_PEERS),
        }

    def outnumbered_by(self) -> Stranger | None:
        """One of those with another model, if there are more of them than others with ours: of who trains,
        if anybody does, else of who joins. So a lone liar keeps nobody out of a run with two honest peers.
        Other threads may ask."""
        strange, alike = list(self.strangers.values()), [info.status for info in list(self._live.values())]
        statuses = [*alike, *(stranger.status for stranger in strange)]
        if any(status.phase != Status.JOINING for status in statuses):
            strange = [one for one in strange if one.status.phase != Status.JOINING]
            alike = [status for status in alike if status.phase != Status.JOINING]
        if len(strange) <= len(alike):
            return None
        return min(strange, key=lambda one: (one.difference is None, one.since))

    def positions(self, now: float, rounds_per_s: float) -> list[float]:
        """Where the training peers are now on the swarm clock, in rounds, from their last status; if none
        trains any more, where those that finish have stopped: who joins then must not begin at the start."""
        moving = [
            info.status.position + (now - info.status_at + info.round_trip_s / 2) * rounds_per_s
            for info in self._live.values()
            if info.status.phase == Status.TRAINING
        ]
        return moving or [
            info.status.position for info in self._live.values() if info.status.phase == Status.DRAINING
        ]

    def clock_offset_s(self) -> float:
        """Median of the others' clocks minus ours, seconds; 0 when alone."""
        offsets = [info.clock_offset_s for info in self._live.values() if info.offsets_s]
        return median(offsets) if offsets else 0.0

    def _heard(self, peer: PeerId, status: PeerStatus, now: float) -> PeerInfo | None:
        """Note what a peer says of itself; None if as many peers as we take are live already."""
        info = self._live.get(peer)
        self.strangers.pop(peer, None)
        if info is None:
            if len(self._live) >= MAX_PEERS:
                return None
            info = self._live[peer] = PeerInfo(status=status, heard_at=now, status_at=now)
            info.versions, info.digests = status.versions, status.digests
            self.revision += 1
            self._candidates.pop(peer, None)
            self._gone.pop(peer, None)
            self._fell_silent.discard(peer)
            self._events.append(Joined(peer))
            if self._next_heartbeat_at is None:
                self._next_heartbeat_at = now
            return info
        if status.process != info.status.process:
            self.restarted.add(peer)
            self.revision += 1
        _keep(info.gaps_s, now - info.heard_at, GAPS_KEPT)
        info.heard_at = info.status_at = now
        known, info.status = info.status, status
        if status.is_news_after(known) or info.is_missed:
            info.is_missed = False
            info.versions, info.digests, info.view = status.versions, status.digests, None
            self.revision += 1
        return info

    def _heard_stranger(self, peer: PeerId, status: PeerStatus, now: float) -> None:
        """Note what a peer with another model says of itself, and tell it once by how ours differs."""
        known = self.strangers.get(peer)
        if known is None or (known.status.model, known.status.process) != (status.model, status.process):
            if known is None and len(self.strangers) >= MAX_PEERS:
                return
            self._drop(peer, "its model is another one", now, with_word=True)
            self._candidates.pop(peer, None)
            self._fell_silent.discard(peer)
            known = self.strangers[peer] = Stranger(status, now, now)
            self.revision += 1
        known.status, known.heard_at = status, now
        if self.model is not None and not known.is_told and self._may_tell_stranger(peer, now):
            known.is_told, known.since = True, now
            self._untold.add(peer)
            self._tell([peer], now)  # first, since a table is taken from strangers only
            self._outgoing.append((peer, self.model.message))

    def _may_tell_stranger(self, peer: PeerId, now: float) -> bool:
        """Whether it was told long ago, or never and there is room; if so it is told now."""
        told_at = self._strangers_told_at
        while told_at and now - next(iter(told_at.values())) >= STRANGER_TOLD_S:
            del told_at[next(iter(told_at))]
        if peer in told_at or len(told_at) >= MAX_PEERS:
            return False
        told_at[peer] = now
        return True

    def _hear_of_model(self, table: ModelTable, peer: PeerId) -> None:
        stranger = self.strangers.get(peer)
        if self.model is None or stranger is None or stranger.difference is not None:
            raise RemoteProtocolError("unasked model table", "it said nothing of another, or sent it")
        stranger.difference = self.model.difference(table)
        self.revision += 1
        self._tell_of_stranger(peer)

    def _is_overdue(self, peer: PeerId, now: float) -> bool:
        stranger = self.strangers.get(peer)
        return stranger is None or now - stranger.since > TABLE_WITHIN_S

    def _tell_of_stranger(self, peer: PeerId) -> None:
        if peer in self._untold:
            self._untold.discard(peer)
            if (stranger := self.strangers.get(peer)) is not None:
                self._events.append(OtherModel(peer, stranger.difference))

    def _await_return(self, peer: PeerId, now: float) -> None:
        """Try a peer that is gone again in a while, as long as there is room: anybody can come and go."""
        if peer in self._candidates or len(self._candidates) < MAX_PEERS:
            self._candidates[peer] = now + REVISIT_S
            self._greet_at = min(self._greet_at, now + REVISIT_S)

    def _greet(self, now: float) -> None:
        due = [peer for peer, at in self._candidates.items() if at <= now]
        for peer in due:
            self._candidates[peer] = now + REVISIT_S
        self._greet_at = min(self._candidates.values(), default=math.inf)
        self._ping(due, now)

    def _ping(self, peers: Sequence[PeerId], now: float) -> None:
        """The same ping to all of them, to be answered: it is serialised once."""
        if not peers:
            return
        self._nonce += 1
        self._send_to_all(peers, Ping(nonce=self._nonce, sent_at=now, status=self.status), now)

    def _announce(self, now: float) -> None:
        self._announced_at, self._announce_at = now, math.inf
        self._tell(list(self._live), now)

    def _tell(self, peers: Sequence[PeerId], now: float) -> None:
        """As ``_ping``, but nobody answers."""
        if peers:
            self._send_to_all(peers, Ping(sent_at=now, status=self.status), now)

    def _send_to_all(self, peers: Sequence[PeerId], ping: Ping, now: float) -> None:
        for peer in peers:
            self._outgoing.append((peer, ping))
            if (info := self._live.get(peer)) is not None:
                info.told_at = now

    def _lose(self, peer: PeerId, reason: str, now: float) -> None:
        """It went without a word."""
        self._drop(peer, reason, now, with_word=False)
        self._await_return(peer, now)

    def _drop(self, peer: PeerId, reason: str, now: float, with_word: bool) -> None:
        if self._live.pop(peer, None) is not None:
            self._gone[peer] = now, with_word  # who is live is not in it: it comes to its end
            if len(self._gone) > MAX_PEERS:
                oldest = next(iter(self._gone))
                del self._gone[oldest]
                self._fell_silent.discard(oldest)
            self.revision += 1
            self.restarted.add(peer)  # if it is back before anybody has heard that it was gone
            self._events.append(Left(peer, reason))


def _keep(values: list[float], value: float, most: int) -> None:
    values.append(value)
    if len(values) > most:
        del values[0]
