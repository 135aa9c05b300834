"""The pump of a node: carries what its machines say to the links and to their handlers, and keeps their time.

    pump()        after anything that a machine was told: send, handle events, until all are silent
    keep_time()   a task: calls the machines when their timers are due, and lets others' news be looked at

Law: nothing waits for another turn of the loop to be sent, or longer than its timer says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from google.protobuf.message import Message

from p2p_co2.node.catchup import CatchupController
from p2p_co2.node.commits import CommitHandler
from p2p_co2.node.environment import Links
from p2p_co2.node.links import piece_of
from p2p_co2.node.progress import SwarmProgress
from p2p_co2.node.router import Router
from p2p_co2.node.status import SwarmNews
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.membership import Membership, MembershipEvent
from p2p_co2.protocol.rounds import Rounds
from p2p_co2.system.clock import ProcessClock
from p2p_co2.wire.envelope import Unsent, head_of, unsent
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.kinds import kind_of
from p2p_co2.wire.messages_pb2 import Fetch

EVENTS_AT_ONCE = 1000
"""Rounds of events that follow from one another; a machine that always has another has a bug."""

Machines = tuple[Membership, Rounds, CatchUp]


class Alarm:
    """When the node looks at its timers next: one sleeper, woken at the earliest time that anybody names.
    ``sleep`` is for one task; ``ring_by`` for anybody on its loop, at no cost but for an earlier time."""

    def __init__(self, clock: ProcessClock) -> None:
        self._clock = clock
        self._rung = asyncio.Event()
        self._at = -math.inf
        """Until when the task sleeps; it looks for the next time itself as long as it is awake."""
        self._handle: asyncio.TimerHandle | None = None

    async def sleep(self, until: float) -> bool:
        """Until then, or an earlier time that is named meanwhile. Whether the process has stood still."""
        self._rung.clear()
        self._at = math.inf
        self.ring_by(until)
        try:
            await self._rung.wait()
        finally:
            self._at = -math.inf
        return self._clock.woke()

    def ring_by(self, at: float) -> None:
        """Let it sleep no longer than until ``at``."""
        if at >= self._at:
            return
        self._at = at
        if self._handle is not None:
            self._handle.cancel()
        wait_s = max(0.001, at - self._clock.now())
        self._clock.wakes_by(self._clock.now() + wait_s)
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._rung.set)  # cheaper than a timeout

    @property
    def is_awake(self) -> bool:
        """Whether nobody need wake the task."""
        return self._at == -math.inf


class Pump:
    """``links``: None until the node runs; ``is_open``: whether anything is sent; ``on_membership`` handles
    who comes and goes."""

    def __init__(
        self, machines: Machines, group: bytes, router: Router, news: SwarmNews, commits: CommitHandler,
        fetches: CatchupController, progress: SwarmProgress, clock: ProcessClock,
        on_membership: Callable[[MembershipEvent], None],
    ) -> None:  # fmt: skip
        self._machines = machines
        self._router = router
        self._now = clock.now
        self.news = news
        self.commits = commits
        self.fetches = fetches
        self._progress = progress
        self._alarm = Alarm(clock)
        self._on_membership = on_membership
        self._envelope_head = head_of(group)
        self.links: Links | None = None
        self.is_open = False
        self._pumped = -1, -1
        """The revisions of membership and rounds at the end of the last call."""

    def pump(self, timers: bool = True) -> None:
        """Send what the machines have to send and carry out their events until they are silent. ``timers``:
        whether rounds or catching up may have anything to say, or another timer."""
        membership, rounds, _ = self._machines
        if self.links is None or not self.is_open:
            return
        timers = timers or rounds.revision != self._pumped[1]
        if not timers and membership.is_idle and membership.revision == self._pumped[0]:
            return  # most heartbeats, and most votes, are no news
        for _ in range(EVENTS_AT_ONCE if timers or not membership.is_idle else 0):
            self._send_all(self.links)
            if not self._handle_all():
                break
            timers = True
        self._pumped = membership.revision, rounds.revision
        # The timers' task costs more than a message: it is woken for an earlier timer, or to conclude.
        if not self._alarm.is_awake:
            self._alarm.ring_by(self._next_timer_at() if timers else self._news_at())

    def _send_all(self, links: Links) -> None:
        last: Message | None = None
        data: Unsent = b""
        for machine in self._machines:
            for peer, message in machine.messages_to_send():
                if message is not last:  # a mean goes to all members, one after the other
                    last = message
                    data = unsent(message, self._envelope_head)
                    kind = kind_of(message)
                served = kind.is_bulk and kind.is_asked_for
                taken = links.post(peer, data, kind.is_bulk, served, piece_of(message, kind))
                if kind.is_asked_for and not taken:
                    self._router.overasked(peer)
                if isinstance(message, Fetch) and message.want_chunk:
                    self._router.asked(peer)

    def _handle_all(self) -> bool:
        membership, rounds, catchup = self._machines
        handled = False
        while (event := membership.next_event()) is not None:
            handled = True
            self._on_membership(event)
        while (round_event := rounds.next_event()) is not None:
            handled = True
            self.commits.handle(round_event)
        while (catch_event := catchup.next_event()) is not None:
            handled = True
            self.fetches.handle(catch_event)
        return handled

    async def keep_time(self) -> None:
        """Until cancelled."""
        membership, rounds, catchup = self._machines
        while True:
            now = self._now()
            beat_at = membership.get_timer()
            if now >= self.news.due_at() or (beat_at is not None and now >= beat_at):
                self.news.look()
                self.fetches.look_around(now)
            membership.handle_timer(now)
            if (rounds_at := rounds.get_timer()) is not None and now >= rounds_at:
                self.news.tell_of_strangers()
                rounds.handle_timer(now)
            catchup.handle_timer(now)
            self.pump()
            if self._progress.conclude(self._now()):
                self.tell_all()
            # One that rests looks twice in a slow heartbeat whether anything is due.
            idle_s = membership.quiet_s / 2 if self._progress.writer.rests else 0.0
            if await self._alarm.sleep(min(self._next_timer_at(), now + max(HEARTBEAT_S, idle_s))):
                membership.announce(self._now())  # others may have taken this peer for gone

    def tell_all(self) -> None:
        """What this peer says of itself has changed: the machines and the others hear it now."""
        self.news.tell()
        self._machines[0].announce(self._now())
        self.pump()

    def timers(self) -> dict[str, float | None]:
        """When each machine wants to be called next."""
        membership, rounds, catchup = (machine.get_timer() for machine in self._machines)
        return {"membership": membership, "rounds": rounds, "catching up": catchup}

    def _next_timer_at(self) -> float:
        until = self._news_at()
        for machine in self._machines:
            if (at := machine.get_timer()) is not None and at < until:
                until = at
        return until

    def _news_at(self) -> float:
        """When what the others said lately is to be looked at."""
        return min(self.news.due_at(), self._progress.conclude_at())
