"""The shell of one group in this process: what every group needs of the loop, its links and the clock.

    carriers -> router -> machines -> pump -> links
                             ^         |
                             +- events-+

    class Group(Shell)      says which machines it has, what their events mean, and when they are looked at
    run()                   a task: until ``stop``, or a bug of ours
    pump()                  after anything that a machine was told: send, handle events, until all are silent

A process may be in several groups over one set of carriers (``environment``), a shell for each. ``Node``
averages; ``PipelineNode`` carries microbatches between stages.

Laws: one loop, one TaskGroup. What a peer sends can at worst be counted against it; it never raises out of
here. Nothing waits for another turn of the loop to be sent, or longer than its timer says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import Message

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.net.transport.base import refused_for_s
from p2p_co2.node.environment import Environment, Links
from p2p_co2.node.links import LinkObserver, piece_of
from p2p_co2.node.router import Router
from p2p_co2.node.state import Effects
from p2p_co2.protocol.membership import Membership
from p2p_co2.system.clock import ProcessClock
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.envelope import Opened, Unsent, head_of, unsent
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import Machine, kind_of
from p2p_co2.wire.messages_pb2 import Fetch, Ping, Revoked, Status

EVENTS_AT_ONCE = 1000
"""Rounds of events that follow from one another; a machine that always has another has a bug."""


class Speaker(Protocol):
    """A machine, as the pump sees it."""

    def messages_to_send(self) -> Iterable[tuple[PeerId, Any]]: ...
    def get_timer(self) -> float | None: ...


class Lifetime:
    """From ``run`` to ``stop``, or to the first bug. ``tasks``: None before and after."""

    def __init__(self) -> None:
        self.tasks: asyncio.TaskGroup | None = None
        self.stopping = asyncio.Event()
        self.bug: Exception | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the shell's TaskGroup: an error in it is ours and ends the shell loudly."""
        if self.tasks is None or self.stopping.is_set():
            work.close()
        else:
            self.tasks.create_task(work)

    def crash(self, error: Exception) -> None:
        """A bug of ours outside the TaskGroup: end the shell with it."""
        self.bug = self.bug or error
        self.stopping.set()


class Alarm:
    """When the shell looks at its timers next: one sleeper, woken at the earliest time that anybody names.
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


class Shell:
    """A base. A group makes its machines, then calls ``serve``. Make it on the network thread.

    ``clock``: the real one; ``now``: the machines' own, which stands while this process does; ``do``: what a
    part may ask of its shell."""

    is_urgent = False
    """Whether a peer stands still for this group's bulk: it goes before other groups'."""
    membership: Membership
    router: Router
    _machines: Sequence[Speaker]

    def __init__(self, environment: Environment, report: Callable[[ev.Event], None]) -> None:
        self.environment = environment
        self.clock = environment.clock
        self.life = Lifetime()
        self._me = environment.network.identity.peer_id
        self._report_event = report
        process_clock = ProcessClock(self.clock.monotonic, self.clock.unix())
        self.now = process_clock.now

        def refuse(peer: str, reason: str, detail: str) -> None:
            self.router.refuse(peer, reason, detail)  # which ``serve`` makes

        self.do = Effects(self.now, self.report, self.life.spawn, refuse, self.pump)
        self._alarm = Alarm(process_clock)
        self._envelope_head = head_of(environment.group)
        self._links: Links | None = None
        self._pumped = -1, -1
        """The revisions of membership and the other machines at the end of the last ``pump``."""

    def serve(
        self, membership: Membership, machines: Sequence[Speaker], status: Callable[[], Status]
    ) -> None:
        """``machines``: all that send, membership first; ``status``: what this peer says of itself now."""
        environment = self.environment
        self.membership = membership
        self._machines = machines
        self._current_status = status
        self.router = Router(
            environment.group, self.deliver, self.do, self.shut_out, self.life.crash, environment.quotas,
            environment.open_message,
        )  # fmt: skip

    # ---- what a group says

    def has_worked(self, peer: PeerId) -> bool:
        """Whether ``peer`` keeps its place among this process's links."""
        raise NotImplementedError

    def _look(self, now: float) -> None:
        """Call the machines that are due, and pump."""
        raise NotImplementedError

    def _handle_events(self) -> bool:
        """Carry out what the machines say. Whether there was anything: more may be to send."""
        raise NotImplementedError

    def _revision(self) -> int:
        """Another number when other machines than membership may have something to say."""
        return 0

    def _news_at(self) -> float:
        """When to look again, whatever the machines' timers say."""
        return math.inf

    def _idle_s(self) -> float:
        """How long it sleeps at most."""
        return HEARTBEAT_S

    def _works(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs in the background, until ``stop``."""
        return ()

    # ---- life

    async def run(self) -> None:
        """Until ``stop``. Raises ``EnvironmentFault`` if a carrier cannot listen."""
        async with asyncio.TaskGroup() as tasks:
            self.life.tasks = tasks
            environment = self.environment
            heard = (self.router.on_message, self.router.on_link_refused)
            carriers = await environment.switch.join(environment.group, *heard, self.has_worked)
            observer = LinkObserver(self._link_opened, self._link_lost, self._unreachable)
            find = environment.network.find_record
            links = environment.make_links(carriers, find, observer, tasks, environment.uplink)
            links.is_urgent = self.is_urgent
            self._links = links
            part = partial(_part, self)
            environment.members.changed.append(part)
            _tell_terms(self)
            background = [tasks.create_task(work) for work in (*self._works(), self._keep_time())]
            await self.life.stopping.wait()
            for task in background:
                task.cancel()
            await links.drain(HEARTBEAT_S)
            environment.switch.leave(environment.group)
            environment.members.changed.remove(part)
            await links.close()
        if self.life.bug is not None:
            raise self.life.bug

    def stop(self) -> None:
        self.life.stopping.set()

    @property
    def links(self) -> Links:
        if self._links is None:
            raise LocalProtocolError("the node is not running")
        return self._links

    def say_goodbye(self, reason: str) -> None:
        self.membership.say_goodbye(reason)
        self.pump()

    def live_peers(self) -> int:
        """Peers heard of late, without this one."""
        return len(self.membership.live)

    def traffic_bytes(self) -> tuple[int, int]:
        """Of messages (up, down) since the start."""
        return (self._links.up_bytes if self._links is not None else 0), self.router.down_bytes

    # ---- the pump

    def pump(self, timers: bool = True) -> None:
        """Send what the machines have to send and carry out their events until they are silent. ``timers``:
        whether others than membership may have anything to say, or another timer."""
        links = self._links
        membership = self.membership
        if links is None or self.life.stopping.is_set():
            return
        timers = timers or self._revision() != self._pumped[1]
        if not timers and membership.is_idle and membership.revision == self._pumped[0]:
            return  # most heartbeats, and most votes, are no news
        for _ in range(EVENTS_AT_ONCE if timers or not membership.is_idle else 0):
            self._send_all(links)
            if not self._handle_events():
                break
            timers = True
        self._pumped = membership.revision, self._revision()
        # The timers' task costs more than a message: it is woken for an earlier timer, or for news.
        if not self._alarm.is_awake:
            self._alarm.ring_by(self._next_look_at() if timers else self._news_at())

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
                piece = piece_of(message, kind) if kind.machine is Machine.ROUNDS else None
                taken = links.post(peer, data, kind.is_bulk, served, piece)
                if kind.is_asked_for and not taken:
                    self.router.overasked(peer)
                if isinstance(message, Fetch) and message.want_chunk:
                    self.router.asked(peer)

    async def _keep_time(self) -> None:
        """Until cancelled."""
        while True:
            now = self.now()
            self._look(now)
            if await self._alarm.sleep(min(self._next_look_at(), now + self._idle_s())):
                self.membership.announce(self.now())  # others may have taken this peer for gone

    def _next_look_at(self) -> float:
        until = self._news_at()
        for machine in self._machines:
            if (at := machine.get_timer()) is not None and at < until:
                until = at
        return until

    # ---- links, and what comes in

    def deliver(self, message: Opened, sender: PeerId, now: float) -> bool:
        """As ``router.Deliver``; a group takes what its own machines know."""
        if message.kind.machine is not Machine.MEMBERSHIP:
            raise RemoteProtocolError("wrong group", f"a {message.kind.name}")
        if isinstance(message.body, Revoked):
            self.environment.members.take(message.body.sealed)
            return True
        if isinstance(message.body, Ping) and message.body.nonce:
            self.membership.status = self._current_status()  # a pong says where we are, not were
        self.membership.receive(message.body, sender, now, message.said)
        return True

    def shut_out(self, peer: PeerId, why: str) -> None:
        """``peer`` is not heard any more: it is no member either."""
        self.membership.unreachable(peer, f"shut out: {why}", self.now())
        self.pump()

    def _link_opened(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkOpened, other=peer, carrier=carrier, reason=reason)
        _pass_on(self, [peer])
        self.membership.link_opened(peer, self.now())
        self.pump(timers=False)

    def _link_lost(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkLost, other=peer, carrier=carrier, reason=reason)
        if shut_out_s := refused_for_s(reason):
            text = f"peer {peer} has shut this peer out: {reason}; it is dialled again in {shut_out_s:.0f} s"
            self.report(ev.Warned, text=text)
        self.membership.link_broke(peer)

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        self.membership.unreachable(peer, f"unreachable: {reason}", self.now())
        self.pump()

    def report(self, kind: type[ev.Event], **fields: Any) -> None:  # the fields of one frozen event type
        self._report_event(kind(at=self.clock.unix(), peer=self._me, **fields))


def _part(shell: Shell) -> None:
    """Others may take part than before, or something is amended: tell all, and go on without those who may
    not."""
    membership = shell.membership
    _tell_terms(shell)
    _pass_on(shell, list(membership.live))
    for peer in list(membership.live):
        if trouble := shell.environment.members.trouble_with(peer):
            membership.unreachable(peer, trouble, shell.now())
    shell.pump()


def _pass_on(shell: Shell, peers: Iterable[PeerId]) -> None:
    """Tell ``peers`` whose tickets were revoked, and what is amended."""
    if sealed := shell.environment.members.sealed:
        message = unsent(Revoked(sealed=sealed), head_of(shell.environment.group))
        for peer in peers:
            shell.links.post(peer, message, bulk=False)


def _tell_terms(shell: Shell) -> None:
    """Tell this peer's owner what is amended, in one of its groups."""
    news = shell.environment.members.terms.news
    while news:
        shell.report(ev.Warned, text=news.pop(0))
