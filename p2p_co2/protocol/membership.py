"""Who is alive, how far away, and where they are in the run: a machine without I/O or clock.

Each peer tells each other its ``Status`` every ``heartbeat_s``, in a ping that asks for no answer (``nonce``
0). A peer is live from its first message until it says goodbye, or its link breaks and cannot be opened
again. So it is once it is silent for longer than the gaps seen before explain. Whoever heard our status of
late is left out. Among many the heart beats more slowly. A peer that only trains (``rests``) says so
beforehand, beats every ``quiet_s``, and is missed only after ``QUIET_BEATS_MISSED``.

Law: ``live`` holds only peers that were heard directly. Time is compared with this machine's clock alone.
Price: each peer hears from each other one, so this serves groups of up to a few hundred. In the quiet of a
round a program that hangs is taken for live for up to ``QUIET_BEATS_MISSED`` beats and one more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_co2.protocol.strangers import OtherModel, Strangers
from p2p_co2.wire.heartbeat import (
    HEARTBEAT_S,
    SILENCE_CAP_S,
    SILENCE_FLOOR_S,
    SLOWEST_HEARTBEAT_S,
    heartbeat_among_s,
    measure_every_s,
)
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS, MAX_STRING
from p2p_co2.wire.messages_pb2 import Leave, ModelTable, Ping, Pong, Status
from p2p_co2.wire.model_table import ModelSummary
from p2p_co2.wire.status import PeerStatus, read_status

QUIET_BEATS_MISSED = 2.5
TOLD_LATELY = 0.75
"""Of a heartbeat: who was told more lately waits for the next one."""
ANNOUNCED_AGAIN = 0.125
"""Of a heartbeat, between two announcements."""
NEWS_GATHERED_S = 0.05
"""News of a peer comes in bursts: its last offer ends, so it is done with a fragment, and with all."""
CUT_OFF_S = 3 * SLOWEST_HEARTBEAT_S + HEARTBEAT_S
"""Who lost most others within this time is rather cut off than alone: time to try them again."""
BROKEN_PER_GOODBYE = 4
"""Where peers end their run, so many links may break before goodbyes have come, for each that says it."""
GAPS_KEPT = 16
TRIPS_KEPT = 9


@dataclass(frozen=True)
class NewPeer:
    """``name``, ``visits``: as its first status says."""

    peer: PeerId
    name: str = ""
    visits: bool = False


@dataclass(frozen=True)
class Left:
    """``reason`` in words: what we saw, not what we guess."""

    peer: PeerId
    reason: str


MembershipEvent = NewPeer | Left | OtherModel
MembershipMessage = Ping | Pong | Leave | ModelTable


@dataclass
class PeerInfo:
    """What is known of one live peer. ``round_trip_s`` is the smallest of late."""

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
    """The last ``TRIPS_KEPT``."""
    round_trip_s: float = 0.2

    def measured(self, round_trip_s: float) -> None:
        _keep(self.round_trips_s, round_trip_s, TRIPS_KEPT)
        self.round_trip_s = min(self.round_trips_s)

    def silence_limit_s(self, quiet_s: float) -> float:
        """Seconds without a word after which the peer counts as gone; ``quiet_s``: it may beat so seldom."""
        habit = 4.0 * max(self.gaps_s, default=HEARTBEAT_S)
        announced = QUIET_BEATS_MISSED * min(self.status.heartbeat_s, quiet_s)
        return max(announced, min(SILENCE_CAP_S, max(SILENCE_FLOOR_S, habit)))


class Candidates:
    """Peers that the DHT lists and that are not live, and when to try them next. ``has_looked``: whether it
    has said whom it lists."""

    def __init__(self) -> None:
        self.next_at: dict[PeerId, float] = {}
        self.has_looked = False
        self._one_way_until: dict[PeerId, float] = {}
        self.timer_at = math.inf
        """When somebody is to be tried."""

    def listed(self, peers: Collection[PeerId], known: Collection[PeerId], now: float) -> None:
        """The DHT lists ``peers`` and no others; those that are ``known`` need not be tried."""
        self.has_looked = True
        self.next_at = {peer: at for peer, at in self.next_at.items() if peer in peers}
        for peer in peers:
            if peer not in known and len(self.next_at) < MAX_PEERS:
                self.next_at.setdefault(peer, now)

    def revisit(self, peer: PeerId, now: float) -> None:
        """Try a peer that is gone again in a while, as long as there is room: anybody can come and go."""
        if peer in self.next_at or len(self.next_at) < MAX_PEERS:
            self.next_at[peer] = now + SLOWEST_HEARTBEAT_S
            self.timer_at = min(self.timer_at, now + SLOWEST_HEARTBEAT_S)

    def take_due(self, now: float) -> list[PeerId]:
        """Those that are to be tried now."""
        due = [peer for peer, at in self.next_at.items() if at <= now]
        self.next_at |= dict.fromkeys(due, now + SLOWEST_HEARTBEAT_S)
        self.timer_at = min(self.next_at.values(), default=math.inf)
        return due

    def is_one_way(self, peer: PeerId, now: float) -> bool:
        """Whether it was out of reach a moment ago, though we hear it: it is no peer."""
        return bool(self._one_way_until) and self._one_way_until.get(peer, 0.0) > now

    def unreachable(self, peer: PeerId, now: float) -> None:
        while self._one_way_until:
            oldest, until = next(iter(self._one_way_until.items()))
            if until > now and len(self._one_way_until) < MAX_PEERS:
                break
            del self._one_way_until[oldest]
        self._one_way_until.pop(peer, None)
        self._one_way_until[peer] = now + 2 * HEARTBEAT_S  # it would join and leave all the time

    def held(self) -> dict[str, tuple[int, int]]:
        return {
            "MAX_PEERS candidates": (len(self.next_at), MAX_PEERS),
            "MAX_PEERS one way": (len(self._one_way_until), MAX_PEERS),
        }


@dataclass
class Gone:
    """A peer that was live, as ``process``; 0 if it did not say. ``is_silent``: its link did not break, so it
    may be suspended."""

    at: float
    with_word: bool
    is_silent: bool
    process: int


class Departed:
    """Peers that were live, when they went, and whether with a word; the last ones at the end."""

    def __init__(self) -> None:
        self._gone: dict[PeerId, Gone] = {}

    def went(self, peer: PeerId, gone: Gone) -> None:
        self._gone[peer] = gone  # who is live is not in it: it comes to its end
        if len(self._gone) > MAX_PEERS:
            del self._gone[next(iter(self._gone))]

    def came_back(self, peer: PeerId) -> None:
        self._gone.pop(peer, None)

    def say_goodbye(self, peer: PeerId) -> bool:
        """Its word came after its link broke; whether it had gone."""
        if (gone := self._gone.get(peer)) is not None:
            gone.with_word = True
            gone.is_silent = False
        return gone is not None

    def has_said_goodbye(self, peer: PeerId) -> bool:
        return (gone := self._gone.get(peer)) is not None and gone.with_word

    def has_ended(self, peer: PeerId, process: int) -> bool:
        """Whether it was this process that said goodbye: until its links are closed it may answer."""
        return process != 0 and self.has_said_goodbye(peer) and self._gone[peer].process == process

    def listed(self, peers: Collection[PeerId]) -> None:
        """Who fell silent may only be suspended as long as the DHT lists it."""
        for peer, gone in self._gone.items():
            gone.is_silent &= peer in peers

    def is_cut_off(self, live: int, now: float) -> bool:
        """Whether more peers went without a word of late than are ``live``, or went with those that said
        goodbye. Those that fell silent, and are listed, went of late however long ago that is."""
        for peer, gone in list(self._gone.items()):
            if now - gone.at > CUT_OFF_S and not gone.is_silent:
                del self._gone[peer]
        goodbyes = sum(gone.with_word for gone in self._gone.values())
        return len(self._gone) - goodbyes > live + BROKEN_PER_GOODBYE * goodbyes


class Membership:
    """The five verbs of a machine, plus ``found`` (the DHT lists these) and ``unreachable`` (no carrier gets
    through). ``quiet_s``: what ``quiet_beat_s`` says of this run's rounds. ``model``: of this peer; None
    compares none."""

    def __init__(self, me: PeerId, quiet_s: float = 0.0, model: ModelSummary | None = None) -> None:
        self.me = me
        self.quiet_s = quiet_s
        self.status = Status()
        self.live: dict[PeerId, PeerInfo] = {}
        """Live peers other than this one."""
        self.candidates = Candidates()
        self.departed = Departed()
        self.strangers = Strangers(model)
        self.revision = 0
        """Grows with everything that is news of the others, but not with their positions and counters."""
        self.restarted: set[PeerId] = set()
        """Of whom ``take_restarted`` has yet to tell."""
        self._rests = False
        self._next_heartbeat_at: float | None = None
        self._announced_at = -math.inf
        self._announce_at = math.inf
        self._outgoing: list[tuple[PeerId, MembershipMessage]] = []
        self._events: deque[MembershipEvent] = deque()

    @property
    def heartbeat_s(self) -> float:
        """Seconds between this peer's heartbeats."""
        return heartbeat_among_s(len(self.live), self.quiet_s if self._rests else 0.0)

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
    def awaited(self) -> int:
        """Peers that the DHT lists and that may yet be heard: who said goodbye of late is listed for a while,
        and is gone. Other threads may ask."""
        return sum(not self.departed.has_said_goodbye(peer) for peer in list(self.candidates.next_at))

    # ---- what the node tells us

    def found(self, peers: Iterable[PeerId], now: float) -> None:
        """The DHT lists these peers; those not yet live are pinged."""
        listed = dict.fromkeys(peers)  # in their order: the same run gives the same history
        self.departed.listed(listed)
        self.strangers.forget(listed, now)
        self.candidates.listed(listed, {self.me, *self.live, *self.strangers.known}, now)
        self._send(self.candidates.take_due(now), now, answer=True)
        if self._next_heartbeat_at is None:
            self._next_heartbeat_at = now + HEARTBEAT_S

    def unreachable(self, peer: PeerId, reason: str, now: float) -> None:
        """No carrier can open a link to ``peer``: it is gone until the DHT lists it again."""
        self._lose(peer, reason, now)
        self.candidates.unreachable(peer, now)

    def link_broke(self, peer: PeerId) -> None:
        """Until it is heard again nobody should wait for its part in anything."""
        info = self.live.get(peer)
        if info is not None and not info.is_missed:
            info.is_missed = True
            info.view = None
            self.revision += 1

    def link_opened(self, peer: PeerId, now: float) -> None:
        """Ask one that was missed how it is: it may be another process by now."""
        info = self.live.get(peer)
        if info is not None and info.is_missed:
            self._send([peer], now, answer=True)

    def take_restarted(self) -> set[PeerId]:
        """Live peers that began anew since this was asked last, before they were missed: what their last
        processes had in hand is gone."""
        restarted = self.restarted & self.live.keys()
        self.restarted = set()
        return restarted

    def announce(self, now: float) -> None:
        """Tell every live peer this peer's status soon, instead of at the next heartbeat. What changes within
        a moment is told at once; in a while, if they were told a moment ago."""
        again_at = self._announced_at + ANNOUNCED_AGAIN * self.heartbeat_s
        self._announce_at = min(self._announce_at, max(now + NEWS_GATHERED_S, again_at))

    def say_goodbye(self, reason: str) -> None:
        """Tell every live peer that this one leaves."""
        leave = Leave(reason=reason)  # the same to all of them: it is serialised once
        self._outgoing.extend((peer, leave) for peer in self.live)

    # ---- the pump

    def receive(
        self, message: MembershipMessage, sender: PeerId, now: float, status: PeerStatus | None = None
    ) -> None:
        """Handle one message of the membership part; raises ``RemoteProtocolError`` for nonsense in it.
        ``status``: what it says of its sender, if that was read already."""
        if isinstance(message, ModelTable):
            told = self.strangers.take_table(message, sender)
            self.revision += 1
            self._events.extend([told] if told is not None else [])
        elif isinstance(message, Leave):
            self.strangers.known.pop(sender, None)
            self.revision += self.departed.say_goodbye(sender)  # its link broke before its goodbye came
            reason = message.reason[:MAX_STRING] or "no reason given"
            self._drop(sender, f"left: {reason}", now, with_word=True)
        elif not self.candidates.is_one_way(sender, now):
            self._take_status(message, sender, status or read_status(message.status), now)

    def handle_timer(self, now: float) -> None:
        if now >= self._announce_at:
            self._announced_at = now
            self._announce_at = math.inf
            self._send(list(self.live), now)
        if now >= self.candidates.timer_at:
            self._send(self.candidates.take_due(now), now, answer=True)
        self._events.extend(self.strangers.overdue(now))
        if self._next_heartbeat_at is not None and now >= self._next_heartbeat_at:
            self._beat(now)

    def get_timer(self) -> float | None:
        if self._next_heartbeat_at is None:
            return None
        return min(self._announce_at, self._next_heartbeat_at, self.candidates.timer_at)

    def messages_to_send(self) -> list[tuple[PeerId, MembershipMessage]]:
        messages = self._outgoing
        self._outgoing = []
        return messages

    def next_event(self) -> MembershipEvent | None:
        return self._events.popleft() if self._events else None

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        live = {"MAX_PEERS live": (len(self.live), MAX_PEERS)}
        return {**live, **self.candidates.held(), **self.strangers.held()}

    # ---- inside

    def _take_status(self, message: Ping | Pong, sender: PeerId, status: PeerStatus, now: float) -> None:
        if self.strangers.is_strange(status):
            info = None
            self._heard_stranger(sender, status, now)
        else:
            info = self._heard(sender, status, now)
        if isinstance(message, Ping):
            if message.nonce:
                sent_at = message.sent_at
                nonce = message.nonce
                pong = Pong(nonce=nonce, ping_sent_at=sent_at, status=self.status)
                self._outgoing.append((sender, pong))
                if info is not None:
                    info.told_at = now
            return
        round_trip_s = now - message.ping_sent_at
        if info is not None and 0 <= round_trip_s < SILENCE_CAP_S:
            info.answered_us_at = now
            info.measured(round_trip_s)

    def _heard(self, peer: PeerId, status: PeerStatus, now: float) -> PeerInfo | None:
        """Note what a peer says of itself; None if it has said goodbye, or if as many peers as we take are
        live already."""
        info = self.live.get(peer)
        self.strangers.known.pop(peer, None)
        if info is None:
            if len(self.live) >= MAX_PEERS or self.departed.has_ended(peer, status.process):
                return None
            info = self.live[peer] = PeerInfo(status, now, now, status.versions, status.digests)
            self.revision += 1
            self.candidates.next_at.pop(peer, None)
            self.departed.came_back(peer)
            self._events.append(NewPeer(peer, status.name, status.visits))
            if self._next_heartbeat_at is None:
                self._next_heartbeat_at = now
            return info
        if status.process != info.status.process:
            self.restarted.add(peer)
            self.revision += 1
        _keep(info.gaps_s, now - info.heard_at, GAPS_KEPT)
        info.heard_at = info.status_at = now
        known = info.status
        info.status = status
        if status.is_news_after(known) or info.is_missed:
            info.is_missed = False
            info.versions = status.versions
            info.digests = status.digests
            info.view = None
            self.revision += 1
        return info

    def _heard_stranger(self, peer: PeerId, status: PeerStatus, now: float) -> None:
        """Note what a peer with another model says of itself, and tell it once by how ours differs."""
        is_new, is_to_be_told = self.strangers.hear(peer, status, now)
        if is_new:
            self._drop(peer, "its model is another one", now, with_word=True)
            self.candidates.next_at.pop(peer, None)
            self.revision += 1
        if is_to_be_told and self.strangers.model is not None:
            self._send([peer], now)  # first, since a table is taken from strangers only
            self._outgoing.append((peer, self.strangers.model.message))

    def _beat(self, now: float) -> None:
        """A heartbeat: tell those that were not told of late, and ask those whose way is to be measured.
        Those that are silent for too long are gone."""
        beat_s = self.heartbeat_s
        quick_s = heartbeat_among_s(len(self.live))
        self._next_heartbeat_at = now + beat_s
        asked = list[PeerId]()
        told = list[PeerId]()
        for peer, info in list(self.live.items()):
            silent_s = now - info.heard_at
            if silent_s > SILENCE_FLOOR_S and silent_s > max(
                info.silence_limit_s(self.quiet_s), 4.0 * quick_s
            ):
                self._lose(peer, f"silent for {silent_s:.0f} s", now, is_silent=True)
            elif now - info.answered_us_at > measure_every_s(beat_s):
                asked.append(peer)
            elif now - info.told_at > TOLD_LATELY * beat_s:
                told.append(peer)
        self._send(asked, now, answer=True)
        self._send(told, now)

    def _send(self, peers: Sequence[PeerId], now: float, *, answer: bool = False) -> None:
        """The same ping to all of them, which is serialised once; ``answer``: it is to be answered."""
        if not peers:
            return
        ping = Ping(nonce=int(answer), sent_at=now, status=self.status)
        for peer in peers:
            self._outgoing.append((peer, ping))
            if (info := self.live.get(peer)) is not None:
                info.told_at = now

    def _lose(self, peer: PeerId, reason: str, now: float, is_silent: bool = False) -> None:
        """It went without a word."""
        self._drop(peer, reason, now, with_word=False, is_silent=is_silent)
        self.candidates.revisit(peer, now)

    def _drop(self, peer: PeerId, reason: str, now: float, with_word: bool, is_silent: bool = False) -> None:
        if (info := self.live.pop(peer, None)) is not None:
            self.departed.went(peer, Gone(now, with_word, is_silent, info.status.process))
            self.revision += 1
            self.restarted.add(peer)  # if it is back before anybody has heard that it was gone
            self._events.append(Left(peer, reason))


def positions(live: Iterable[PeerInfo], now: float, rounds_per_s: float) -> list[float]:
    """Where the training peers are now on the swarm clock, in rounds, from their last status. If none trains
    any more, where those that finish have stopped."""
    infos = list(live)
    moving = [
        info.status.position + (now - info.status_at + info.round_trip_s / 2) * rounds_per_s
        for info in infos
        if info.status.phase == Status.TRAINING
    ]
    return moving or [info.status.position for info in infos if info.status.phase == Status.DRAINING]


def _keep(values: list[float], value: float, most: int) -> None:
    values.append(value)
    if len(values) > most:
        del values[0]
