"""One peer on the network: its machines, its carriers, and what connects them with the tensor side.

    carriers -> router -> membership, rounds, catchup -> pump -> commits, fetches -> outer state -> ledger
                                  ^                                                        |
                                  +------------------ state (published) <------------------+

Nothing else in the library reads the clock for the machines, sets their timers or sends their messages; in
a simulation this same node runs on virtual time (``environment``).

Laws: one asyncio loop, one TaskGroup; what a peer sends can at worst be counted against it
(``MessageRefused``), never raise out of here; the tensor side is asked in the order in which rounds were
decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from p2p_co2.errors import LocalProtocolError
from p2p_co2.net.transport.base import refused_for_s
from p2p_co2.node.catchup import Agreement, CatchupController
from p2p_co2.node.commits import CommitHandler
from p2p_co2.node.environment import Environment, Links
from p2p_co2.node.links import LinkObserver
from p2p_co2.node.outer_state import Offers, OuterState
from p2p_co2.node.peer_finder import PeerFinder
from p2p_co2.node.progress import SwarmProgress
from p2p_co2.node.pump import Pump
from p2p_co2.node.router import Inbox, Router
from p2p_co2.node.state import Effects, LocalProgress, PeerState
from p2p_co2.node.status import StatusWriter, SwarmNews, Times
from p2p_co2.protocol.catchup.goals import TransferSizes, chunk_bytes_of
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.ledger import AgreedVersion, Ledger
from p2p_co2.protocol.membership import Joined, Left, Membership
from p2p_co2.protocol.rounds import Offer, PayloadShape, Rounds
from p2p_co2.protocol.strangers import OtherModel
from p2p_co2.system.clock import ProcessClock
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.heartbeat import HEARTBEAT_S, quiet_beat_s
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.model_table import ModelSummary


class Lifetime:
    """From ``run`` to ``stop``, or to the first bug. ``tasks``: None before and after."""

    def __init__(self) -> None:
        self.tasks: asyncio.TaskGroup | None = None
        self.stopping = asyncio.Event()
        self.bug: Exception | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the node's TaskGroup: an error in it is ours and ends the node loudly."""
        if self.tasks is None or self.stopping.is_set():
            work.close()
        else:
            self.tasks.create_task(work)

    def crash(self, error: Exception) -> None:
        """A bug of ours outside the TaskGroup: end the node with it."""
        self.bug = self.bug or error
        self.stopping.set()


class Node:
    """One peer, after its model is known. Make it on the network thread, then run ``run`` as a task.

    ``state``: where it is; ``clock``: the real one; ``now``: the machines' own, which stands while this
    process does. ``model`` is compared with the others' models; None compares none. ``past`` as
    ``PeerState`` has it."""

    def __init__(
        self, environment: Environment, shape: PayloadShape, state_bytes: Sequence[int], ledger: Ledger,
        agreed: Sequence[AgreedVersion], report: Callable[[ev.Event], None],
        model: ModelSummary | None = None, past: Sequence[dict[int, bytes]] = (),
    ) -> None:  # fmt: skip
        network = environment.network
        group = environment.group
        pace = environment.network.run.clock
        identity = network.identity
        me = network.identity.peer_id
        limits = network.config.limits
        self.environment = environment
        self.clock = environment.clock
        self._report_event = report
        self.life = Lifetime()
        process_clock = ProcessClock(self.clock.monotonic, self.clock.unix())
        self.now = process_clock.now
        do = Effects(self.now, self.report, self.life.spawn, self.refuse, self.pump)
        by_time = pace.mode == "time"
        rounds_per_s = 1.0 / pace.round_s if by_time else 0.0
        times = Times(
            self.now, self.clock.monotonic, rounds_per_s, pace.rounds,
            lambda now: environment.elsewhere(now, rounds_per_s),
        )  # fmt: skip
        # the machines
        self.membership = Membership(me, quiet_beat_s(pace.round_s) if by_time else 0.0, model)
        self.rounds = Rounds(identity, group, shape)
        chunk_bytes = shape.chunk_bytes or chunk_bytes_of(state_bytes)
        sizes = TransferSizes(shape.mean_bytes, tuple(state_bytes), chunk_bytes, shape.scale)
        self.catchup = CatchUp(identity, group, sizes, self.rounds.is_everywhere)
        self.rounds.when_begun(self.catchup.donor.history.shrink)
        # what follows from their events
        self.state = PeerState(me, agreed, past)
        self.state.has_worked = self.rounds.has_worked
        self.state.counts = self.rounds.counts
        for fragment, version in enumerate(agreed):
            self.catchup.donor.moved(fragment, version.version)
        self.state.when_moved(lambda fragment, version: self.catchup.donor.moved(fragment, version.version))
        self._offers = Offers(self.rounds, ledger, self.state, do)
        self.outer = OuterState(ledger, self.state, self.rounds, self.catchup.donor, do)
        agreement = Agreement(self.membership, self.state)
        fetches = CatchupController(
            self.catchup, self.rounds, agreement, self.state, self.outer, self._offers, group, shape, do
        )
        commits = CommitHandler(
            self.rounds, ledger, self.outer, self._offers, fetches, group, shape,
            self._forget, do,
        )  # fmt: skip
        # what this peer tells and concludes
        host = Status(
            download_bytes_per_s=limits.download_bytes_per_s,
            process=int(1000 * self.clock.unix()) & 0xFFFFFFFF,  # another for each process of this peer
        )
        writer = StatusWriter(self.state, self.membership, times, host, self.upload_bytes_per_s)
        self.progress = SwarmProgress(
            self.state, self.membership, agreement, writer, times, fetches, network.run.group_size
        )
        news = SwarmNews(
            self.state, self.membership, self.rounds, writer, self.now, fetches.is_watching, self._set_paces
        )
        # messages in, and out
        inbox = Inbox(self.membership, self.rounds, self.catchup, writer.status, news.tell_of_strangers)
        self.router = Router(
            group, inbox, do, self.shut_out, self.life.crash, environment.quotas,
            environment.open_message,
        )  # fmt: skip
        self._pump = Pump(
            (self.membership, self.rounds, self.catchup), group, self.router, news, commits, fetches,
            self.progress, process_clock, self._on_membership,
        )  # fmt: skip
        self._finder = PeerFinder(network, self.membership, writer, do)
        self.state.when_moved(self._moved)

    # ---- life

    async def run(self) -> None:
        """Until ``stop``. Raises ``EnvironmentFault`` if a carrier cannot listen."""
        async with asyncio.TaskGroup() as tasks:
            self.life.tasks = tasks
            observer = LinkObserver(self._link_opened, self._link_lost, self._unreachable)
            environment = self.environment
            heard = (self.router.on_message, self.router.on_link_refused)
            carriers = await environment.switch.join(environment.group, *heard, self.rounds.has_worked)
            find = environment.network.find_record
            links = environment.make_links(carriers, find, observer, tasks, environment.uplink)
            self._pump.links = links
            self._pump.is_open = True
            works = self._finder.run(), self._pump.keep_time(), self._watch_daemon()
            background = [tasks.create_task(work) for work in works]
            await self.life.stopping.wait()
            self._pump.is_open = False
            for task in background:
                task.cancel()
            await links.drain(HEARTBEAT_S)
            environment.switch.leave(environment.group)
            await links.close()
        if self.life.bug is not None:
            raise self.life.bug

    def stop(self) -> None:
        self._pump.is_open = False
        self.life.stopping.set()

    @property
    def agreed(self) -> list[AgreedVersion]:
        """By fragment, where it is. Other threads may read it."""
        return self.state.agreed

    @property
    def links(self) -> Links:
        if self._pump.links is None:
            raise LocalProtocolError("the node is not running")
        return self._pump.links

    @property
    def commits(self) -> CommitHandler:
        """What follows from rounds; its ``on_decision`` may be set."""
        return self._pump.commits

    def pump(self, timers: bool = True) -> None:
        """As ``Pump.pump``."""
        self._pump.pump(timers)

    def timers(self) -> dict[str, float | None]:
        """When each machine wants to be called next."""
        return self._pump.timers()

    # ---- what the trainer asks

    def offer(self, offer: Offer) -> None:
        """Start a round with this peer's encoded outer gradient."""
        self._pump.news.tell()
        try:
            self._offers.open(offer)
        except LocalProtocolError as error:
            self.life.crash(error)
        self.pump()

    def show(self, progress: LocalProgress) -> None:
        """Where the training thread is; a new phase and a fragment that is finished are announced at once,
        the rest goes with the heartbeats."""
        known = self.state.local
        self.state.show(progress)
        if (progress.phase, progress.finished) == (known.phase, known.finished):
            return
        if known.phase == Status.PAUSED:
            self._pump.fetches.wake(self.now())
        self._pump.tell_all()

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

    def upload_bytes_per_s(self) -> float:
        """What this peer can send: measured, at most its own cap; 0 when not measured yet."""
        cap = self.environment.network.config.limits.upload_bytes_per_s
        measured = self._pump.links.upload_bytes_per_s if self._pump.links is not None else 0.0
        return min(cap, measured) if cap and measured else cap or measured

    # ---- what comes in

    def refuse(self, peer: str, reason: str, detail: str) -> None:
        """Count a broken rule against ``peer``."""
        self.router.refuse(peer, reason, detail)

    def shut_out(self, peer: PeerId, why: str) -> None:
        """``peer`` is not heard any more: it is no member either."""
        self.membership.unreachable(peer, f"shut out: {why}", self.now())
        self.pump()

    def _on_membership(self, event: Joined | Left | OtherModel) -> None:
        if isinstance(event, OtherModel):
            why = f": {event.difference}" if event.difference is not None else ""
            self.report(ev.Warned, text=f"peer {event.peer} trains another model and is left out{why}")
            return
        if isinstance(event, Joined):
            self._finder.unreached.met(event.peer)
            self.report(ev.PeerJoined, other=event.peer)
        else:
            self.report(ev.PeerLeft, other=event.peer, reason=event.reason)
            self.catchup.fetcher.forget_donor(event.peer, "the donor left", self.now())
        self._pump.news.somebody_came_or_went()

    def _moved(self, fragment: int, version: AgreedVersion) -> None:
        """The agreed state is another: those that wait to see it, or would for long, hear it at once."""
        self._pump.news.tell()
        if self.state.local.phase == Status.DRAINING or self.membership.quiet_s:
            self.membership.announce(self.now())

    # ---- links

    def _forget(self, attempt: bytes, means: bool) -> None:
        self.links.forget(attempt, means)

    def _set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        if self._pump.links is not None:
            self._pump.links.set_paces(bytes_per_s)

    def _link_opened(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkOpened, other=peer, carrier=carrier, reason=reason)
        self.membership.link_opened(peer, self.now())
        self.pump(timers=False)

    def _link_lost(self, peer: PeerId, carrier: str, reason: str) -> None:
        self.report(ev.LinkLost, other=peer, carrier=carrier, reason=reason)
        if shut_out_s := refused_for_s(reason):
            text = f"peer {peer} has shut this peer out: {reason}; it is dialled again in {shut_out_s:.0f} s"
            self.report(ev.Warned, text=text)
        self.membership.link_broke(peer)

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        self._finder.unreached.failed(peer, reason)
        self.membership.unreachable(peer, f"unreachable: {reason}", self.now())
        self.pump()

    def report(self, kind: type[ev.Event], **fields: Any) -> None:  # the fields of one frozen event type
        self._report_event(kind(at=self.clock.unix(), peer=self.state.me, **fields))

    async def _watch_daemon(self) -> None:
        words = await self.environment.network.daemon_ended()
        text = f"the libp2p daemon has ended ({words}): gRPC links go on; restart this peer to be found"
        self.report(ev.Warned, text=text)
