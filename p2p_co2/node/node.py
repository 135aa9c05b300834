"""The pump: feeds the machines with messages, timers and answers, and carries out what they ask.

Nothing else in the library reads the clock for the machines, sets their timers or sends their messages; in
a simulation this same node runs on virtual time (``environment``).

Laws: one asyncio loop, one TaskGroup; what a peer sends can at worst be counted against it
(``MessageRefused``), never raise out of here; the tensor side is asked in the order in which rounds were
decided.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import Message

from p2p_co2.errors import LocalProtocolError
from p2p_co2.node.agreement import Agreement
from p2p_co2.node.catchup import CatchupController, CatchupEffects
from p2p_co2.node.deciding import Deciding
from p2p_co2.node.environment import Environment, Links
from p2p_co2.node.lanes import piece_of
from p2p_co2.node.ledger import AgreedVersion, Ledger
from p2p_co2.node.links import LinkObserver
from p2p_co2.node.peer_finder import BackgroundTasks, FinderEvents, PeerFinder
from p2p_co2.node.progress import LocalProgress, SwarmProgress
from p2p_co2.node.router import Inbox, Router, RouterEvents
from p2p_co2.protocol.catchup import CatchUp, Shape, chunk_bytes_of
from p2p_co2.protocol.heartbeat import HEARTBEAT_S, quiet_beat_s
from p2p_co2.protocol.membership import Joined, Left, Membership
from p2p_co2.protocol.rounds import Offer, PayloadShape, Rounds
from p2p_co2.protocol.schedule import Stage
from p2p_co2.protocol.strangers import OtherModel
from p2p_co2.protocol.wire.envelope import Unsent, head_of, kind_of, unsent
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Fetch, Status
from p2p_co2.protocol.wire.model_table import ModelSummary
from p2p_co2.telemetry import events as ev

QUIET_IDLE = 0.5
"""Of a slow heartbeat, after which one that rests looks whether anything is due, though nothing called it."""
LAST_WORDS_S = 1.0
"""What is said last may take so long to be on its way."""
CROWD_S = 0.05
"""Who comes or goes within this time after another is told of together with it; among many, within half of
``_refresh_s``."""
REFRESH_S, SLOWEST_REFRESH_S, REFRESHED_PEERS_PER_S = 0.25, 1.0, 64.0
"""The machines hear of statuses at most this often, but for changes of their own making; more rarely among
many, because each time costs in proportion to the peers."""


class Node:
    """One peer on the network, after its model is known. Make it on the network thread, then run ``run`` as a
    task."""

    def __init__(
        self,
        environment: Environment,
        shape: PayloadShape,
        state_bytes: Sequence[int],
        ledger: Ledger,
        agreed: Sequence[AgreedVersion],
        report: Callable[[ev.Event], None],
        model: ModelSummary | None = None,
    ) -> None:
        network, clock = environment.network, environment.clock
        self._environment, self.clock = environment, clock
        self._unix_at_start = clock.unix() - clock.monotonic()
        self.process = int(1000 * clock.unix()) & 0xFFFFFFFF
        """Another number for each process of this peer (``Status.process``)."""
        self._network, self._ledger, self._report_event = network, ledger, report
        self.identity = network.identity
        self.me = network.identity.peer_id
        self.run_digest = environment.group
        self._envelope_head = head_of(environment.group)
        self.shape, self.most_peers = shape, network.run.group_size
        self.agreed = list(agreed)
        pace = network.run.clock
        quiet_s = quiet_beat_s(pace.round_s) if pace.mode == "time" else 0.0
        self.membership = Membership(self.me, quiet_s, model)
        self.rounds = Rounds(network.identity, self.run_digest, shape)
        chunk_bytes = shape.chunk_bytes or chunk_bytes_of(state_bytes)
        sizes = Shape(shape.mean_bytes, tuple(state_bytes), chunk_bytes, shape.scale)
        self.catchup = CatchUp(network.identity, self.run_digest, sizes, self.rounds.is_everywhere)
        self.rounds.when_begun(self.catchup.donor.history.shrink)
        for fragment, version in enumerate(agreed):
            self.catchup.moved(fragment, version.version)
            self.rounds.set_state(fragment, version.version, version.digest)
        self.software = network.software
        self.progress = SwarmProgress(self, 1.0 / pace.round_s if pace.mode == "time" else 0.0, pace.rounds)
        self.deciding = Deciding(self, ledger)
        self.catching = self._make_controller()
        self._beat_at, self._sleeps_until = 0.0, -math.inf
        self._alarm: asyncio.TimerHandle | None = None
        self._told: object = None
        """What the rounds machine was last told of this peer and the others."""
        self._looked_revision, self._pumped_revisions = -1, (-1, -1)
        self._has_strangers = False
        """Whether somebody came or went of whom the rounds machine has not heard."""
        inbox = Inbox(self.membership, self.rounds, self.catchup, self.progress.status, self.know_all)
        heard = RouterEvents(self._refused, self.shut_out, self.pump, self.crash)
        download, open_ = network.config.limits.download_bytes_per_s, environment.open_message
        self.router = Router(environment.group, inbox.take, heard, self.now, download, open_)
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._early: dict[int, Offer] = {}
        """By fragment: an offer upon a state that this thread has yet to hear of."""
        self._tasks: asyncio.TaskGroup | None = None
        self._background = BackgroundTasks()
        self._links: Links | None = None
        asked = FinderEvents(
            self.now, self.progress.status, lambda: self.progress.rests, self.pump,
            lambda text: self.report(ev.Warned, text=text),
        )  # fmt: skip
        self._finder = PeerFinder(network, self.membership, asked)
        self._bug: Exception | None = None

    def _make_controller(self) -> CatchupController:
        deciding = self.deciding
        effects = CatchupEffects(
            self.now, self.report, self.spawn, self.refuse, self.give_up_offer, deciding.settle_offer,
            deciding.take, deciding.adopt, deciding.export, self.pump,
        )  # fmt: skip
        agreement = Agreement(self.me, self.membership, self.agreed, self._standing)
        return CatchupController(
            self.catchup, self.rounds, agreement, self.agreed, self.run_digest, self.shape, effects
        )

    def _standing(self) -> tuple[Status.Phase, frozenset[int]]:
        """This peer's phase, and the fragments for which it has nothing more to offer."""
        return self.progress.local.phase, self.progress.local.finished

    # ---- life

    async def run(self) -> None:
        """Until ``stop``. Raises ``EnvironmentFault`` if a carrier cannot listen."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            observer = LinkObserver(self._link_opened, self._link_lost, self._unreachable)
            environment, heard = self._environment, (self.router.on_message, self.router.on_link_refused)
            carriers = await environment.switch.join(environment.group, *heard, self.rounds.has_worked)
            find = self._network.find_record
            self._links = environment.make_links(carriers, find, observer, tasks, environment.uplink)
            works = self._finder.run(), self._keep_time(), self._watch_daemon()
            background = [tasks.create_task(work) for work in works]
            await self._stopping.wait()
            for task in background:
                task.cancel()
            await asyncio.gather(self._links.drain(LAST_WORDS_S), self._background.end(LAST_WORDS_S))
            environment.switch.leave(environment.group)
            await self._links.close()
        if self._bug is not None:
            raise self._bug

    def stop(self) -> None:
        self._stopping.set()

    @property
    def links(self) -> Links:
        if self._links is None:
            raise LocalProtocolError("the node is not running")
        return self._links

    def now(self) -> float:
        """The machines' clock: monotonic, and near unix time so that offsets between peers mean something."""
        return self._unix_at_start + self.clock.monotonic()

    # ---- what the trainer asks

    def offer(self, offer: Offer) -> None:
        """Start a round with this peer's encoded outer gradient."""
        agreed, now = self.agreed[offer.fragment], self.now()
        if agreed.version < offer.round - 1:
            # The tensor side is ahead of us by a commit whose news is on its way; or it went back since.
            self._early[offer.fragment] = offer
            return
        if (agreed.version, agreed.digest) != (offer.round - 1, offer.state_digest):
            self.spawn(self._ledger.abort(offer.fragment, offer.offer_id))
            return
        self.rounds.set_peers(self.progress.views(), now)
        try:
            self.rounds.offer(offer, now)
            self.deciding.opened(offer)
        except LocalProtocolError as error:
            self.crash(error)
        self.pump()

    def offer_early(self, fragment: int) -> None:
        """The news of a commit has come: an offer that waits for it sets out."""
        if (offer := self._early.pop(fragment, None)) is not None:
            asyncio.get_running_loop().call_soon(self.offer, offer)

    def show(self, progress: LocalProgress) -> None:
        """Where the training thread is; a new phase and a fragment that is finished are announced at once,
        the rest goes with the heartbeats."""
        known = self.progress.local
        news = (progress.phase, progress.finished) != (known.phase, known.finished)
        rested = known.phase == Status.PAUSED
        self.progress.show(progress)
        if news:
            if rested:
                self.catching.wake(self.now())
            self.refresh()
            self.membership.announce(self.now())
            self.pump()

    def say_goodbye(self, reason: str) -> None:
        self.membership.say_goodbye(reason)
        self.pump()

    def live_peers(self) -> int:
        """Peers heard of late, without this one."""
        return len(self.membership.live)

    def unheard_peers(self) -> int:
        """Peers that the DHT lists and that we have not heard: dead since less than a record's lifetime, or
        about to answer. Before it was asked there may be any."""
        unasked = not self.membership.candidates.has_looked
        return self.membership.awaited + unasked

    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of messages (up, down)."""
        return (self._links.up_bytes if self._links is not None else 0), self.router.down_bytes

    # ---- messages in

    def crash(self, error: Exception) -> None:
        """A bug of ours outside the TaskGroup: end the node with it, loudly."""
        self._bug = self._bug or error
        self._stopping.set()

    def refuse(self, peer: str, reason: str, detail: str) -> None:
        """Count a broken rule against ``peer``."""
        self.router.refuse(peer, reason, detail)

    def _refused(self, peer: str, message: str, reason: str, detail: str) -> None:
        self.report(ev.MessageRefused, other=peer, message=message, reason=reason, detail=detail)

    def shut_out(self, peer: PeerId, why: str) -> None:
        """``peer`` is not heard any more: it is no member either."""
        self.membership.unreachable(peer, f"shut out: {why}", self.now())
        self.pump()

    # ---- the pump

    def pump(self, timers: bool = True) -> None:
        """Send what the machines have to send and carry out their events until they are silent. ``timers``:
        whether rounds or catching up may have anything to say, or another timer."""
        if self._links is None or self._stopping.is_set():
            return
        timers = timers or self.rounds.revision != self._pumped_revisions[1]
        revisions = self.membership.revision, self.rounds.revision
        if not timers and self.membership.is_idle and revisions == self._pumped_revisions:
            return  # most heartbeats, and most votes, are no news
        for _ in range(1000 if timers or not self.membership.is_idle else 0):
            self._send_all()
            if not self._handle_all():
                break
            timers = True
        self._pumped_revisions = self.membership.revision, self.rounds.revision
        # The timers' task costs more than a message: it is woken for an earlier timer, or to conclude.
        if self._sleeps_until > -math.inf:
            self._sleep_until(self._next_timer_at() if timers else self._news_at())

    def _send_all(self) -> None:
        links = self.links
        last: Message | None = None
        data: Unsent = b""
        for machine in (self.membership, self.rounds, self.catchup):
            for peer, message in machine.messages_to_send():
                if message is not last:  # a mean goes to all members, one after the other
                    last, data, kind = message, unsent(message, self._envelope_head), kind_of(message)
                served = kind.is_bulk and kind.is_asked_for
                taken = links.post(peer, data, kind.is_bulk, served, piece_of(message, kind))
                if kind.is_asked_for and not taken:
                    self.router.overasked(peer)
                if isinstance(message, Fetch) and message.want_chunk:
                    self.router.asked(peer)

    def _handle_all(self) -> bool:
        handled = False
        while (event := self.membership.next_event()) is not None:
            handled = True
            self._on_membership(event)
        while (round_event := self.rounds.next_event()) is not None:
            handled = True
            self.deciding.handle(round_event)
        while (catch_event := self.catchup.next_event()) is not None:
            handled = True
            self.catching.handle(catch_event)
        return handled

    async def _keep_time(self) -> None:
        while True:
            self._sleeps_until = -math.inf  # nobody need wake it: it looks for the next timer as it ends
            now = self.now()
            beat_at = self.membership.get_timer()
            if (now >= self._beat_at and self._has_news()) or (beat_at is not None and now >= beat_at):
                self._looked_revision = self.membership.revision
                self.refresh()
                self.catching.look_around(now)
            self.membership.handle_timer(now)
            if (rounds_at := self.rounds.get_timer()) is not None and now >= rounds_at:
                self.know_all()
                self.rounds.handle_timer(now)
            self.catchup.handle_timer(now)
            self.pump()
            self.progress.conclude(self.now())
            self._wake.clear()
            self._sleeps_until = math.inf
            quiet_s = self.membership.quiet_s
            idle_s = QUIET_IDLE * quiet_s if quiet_s and self.progress.rests else 0.0
            until = min(self._next_timer_at(), now + max(HEARTBEAT_S, idle_s))
            self._sleep_until(until)
            await self._wake.wait()

    def _sleep_until(self, at: float) -> None:
        """Let the timers' task sleep no longer than until ``at``."""
        if at >= self._sleeps_until:
            return
        self._sleeps_until = at
        if self._alarm is not None:
            self._alarm.cancel()
        wait_s = max(0.001, at - self.now())
        self._alarm = asyncio.get_running_loop().call_later(wait_s, self._wake.set)  # cheaper than a timeout

    def timers(self) -> dict[str, float | None]:
        """When each machine wants to be called next."""
        return {
            "membership": self.membership.get_timer(),
            "rounds": self.rounds.get_timer(),
            "catching up": self.catchup.get_timer(),
        }

    def _next_timer_at(self) -> float:
        until = self._news_at()
        for machine in (self.membership, self.rounds, self.catchup):
            if (at := machine.get_timer()) is not None and at < until:
                until = at
        return until

    def _news_at(self) -> float:
        """When what the others said lately is to be looked at."""
        return min(self._beat_at if self._has_news() else math.inf, self.progress.conclude_at())

    def _has_news(self) -> bool:
        """Whether the machines should hear of the others again, when ``REFRESH_S`` have passed."""
        return self.membership.revision != self._looked_revision or self.catching.is_watching

    def _refresh_s(self) -> float:
        """Between two refreshes among as many as are live, by what they cost."""
        return min(SLOWEST_REFRESH_S, len(self.membership.live) / REFRESHED_PEERS_PER_S)

    def refresh(self) -> None:
        """Tell the machines where this peer and the others stand."""
        now = self.now()
        self._beat_at = now + max(REFRESH_S, self._refresh_s())
        self.membership.set_rests(self.progress.rests, now)
        self.membership.status = self.progress.status()
        self._has_strangers = False
        phase, finished = self.progress.local.phase, self.progress.local.finished
        revision = self.membership.revision
        news = (revision, tuple(self.agreed), self.upload_bytes_per_s(), phase, finished)
        if news == self._told:
            return
        self._told = news
        views = self.progress.views()
        if restarted := self.membership.take_restarted():
            self.rounds.set_peers({peer: view for peer, view in views.items() if peer not in restarted}, now)
        self.rounds.set_peers(views, now)
        if self._links is not None:
            self._links.set_paces(self.progress.paces())

    @property
    def download_bytes_per_s(self) -> float:
        """This peer's download cap; 0 for none."""
        return self._network.config.limits.download_bytes_per_s

    def stage(self, fragment: int) -> Stage:
        """How far the round of our offer is; other threads may ask."""
        return self.rounds.stage(fragment)

    def is_line_full(self) -> bool:
        """Whether bulk waits for our line; other threads may ask."""
        return self._links is not None and self._links.is_full

    def upload_bytes_per_s(self) -> float:
        """What this peer can send: measured, at most its own cap; 0 when not measured yet."""
        cap = self._network.config.limits.upload_bytes_per_s
        measured = self._links.upload_bytes_per_s if self._links is not None else 0.0
        return min(cap, measured) if cap and measured else cap or measured

    def give_up_offer(self, fragment: int) -> None:
        """The last offer for ``fragment`` that the rounds machine opened came to nothing."""
        if not self.rounds.withdraw(fragment, "given up to catch up", self.now()):
            self.deciding.end_offer(fragment)

    # ---- events of the membership machine

    def _on_membership(self, event: Joined | Left | OtherModel) -> None:
        now = self.now()
        if isinstance(event, OtherModel):
            why = f": {event.difference}" if event.difference is not None else ""
            self.report(ev.Warned, text=f"peer {event.peer} trains another model and is left out{why}")
            return
        if isinstance(event, Joined):
            self._finder.unreached.met(event.peer)
            self.report(ev.PeerJoined, other=event.peer)
        else:
            self.report(ev.PeerLeft, other=event.peer, reason=event.reason)
            self.catchup.forget_donor(event.peer, now)
        self._has_strangers = True  # they come and go in crowds, and each telling costs as many as there are
        self._beat_at = min(self._beat_at, now + max(CROWD_S, self._refresh_s() / 2))

    def know_all(self) -> None:
        """Let the rounds machine hear of all who came and went before it hears more of them."""
        if self._has_strangers or self.membership.restarted:
            self.refresh()

    # ---- links and discovery

    def _link_opened(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkOpened, other=peer, carrier=carrier, reason=reason)
        self.membership.link_opened(peer, self.now())
        self.pump(timers=False)

    def _link_lost(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkLost, other=peer, carrier=carrier, reason=reason)
        self.membership.link_broke(peer)

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        self._finder.unreached.failed(peer, reason)
        self.membership.unreachable(peer, f"unreachable: {reason}", self.now())
        self.pump()

    async def _watch_daemon(self) -> None:
        words = await self._network.daemon_ended()
        text = f"the libp2p daemon has ended ({words}): gRPC links go on; restart this peer to be found"
        self.report(ev.Warned, text=text)

    def spawn(self, work: Coroutine[Any, Any, None], is_errand: bool = False) -> None:
        """Run ``work`` in the node's TaskGroup: an error in it is ours and ends the node loudly."""
        if self._tasks is None or self._stopping.is_set():
            work.close()
            return
        task = self._tasks.create_task(work)
        if is_errand:
            self._background.add(task)

    def report(self, kind: type[ev.Event], **fields: Any) -> None:  # the fields of one frozen event type
        self._report_event(kind(at=self.clock.unix(), peer=self.me, **fields))
