"""A group that averages: its machines, and what connects them with the tensor side.

    carriers -> router -> membership, rounds, catchup -> pump -> commits, fetches -> outer state -> ledger
                                  ^                                                        |
                                  +------------------ state (published) <------------------+

Nothing else in the library reads the clock for the machines or sends their messages (``Shell``). In a
simulation this same node runs on virtual time (``environment``).

Law: the tensor side is asked in the order in which rounds were decided.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from p2p_co2.errors import LocalProtocolError
from p2p_co2.node.catchup import Agreement, CatchupController
from p2p_co2.node.commits import CommitHandler
from p2p_co2.node.environment import Environment
from p2p_co2.node.outer_state import LedgerCalls, Offers
from p2p_co2.node.peer_finder import PeerFinder
from p2p_co2.node.progress import SwarmProgress
from p2p_co2.node.shell import Shell
from p2p_co2.node.state import LocalProgress, PeerState
from p2p_co2.node.status import StatusWriter, SwarmNews, Times
from p2p_co2.protocol.catchup.goals import TransferSizes, chunk_bytes_of
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.ledger import AgreedVersion, Ledger
from p2p_co2.protocol.membership import Left, Membership, NewPeer
from p2p_co2.protocol.rounds import Offer, PayloadShape, Rounds
from p2p_co2.protocol.strangers import OtherModel
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.envelope import Opened
from p2p_co2.wire.heartbeat import HEARTBEAT_S, quiet_beat_s
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.kinds import Machine
from p2p_co2.wire.limits import MAX_PEERS
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.model_table import ModelSummary

_MEETINGS = {ev.PeerJoined, ev.PeerLeft, ev.LinkOpened, ev.LinkLost, ev.LinkMeasured}


class Node(Shell):
    """This peer in a group, after its model is known.

    ``state``: where it is. ``model`` is compared with the others' models; None compares none. ``past`` as
    ``PeerState`` has it."""

    def __init__(
        self, environment: Environment, shape: PayloadShape, state_bytes: Sequence[int], ledger: Ledger,
        agreed: Sequence[AgreedVersion], report: Callable[[ev.Event], None],
        model: ModelSummary | None = None, past: Sequence[dict[int, bytes]] = (),
    ) -> None:  # fmt: skip
        super().__init__(environment, report)
        self._visitors = set[PeerId]()
        network = environment.network
        group = environment.group
        pace = network.run.clock
        identity = network.identity
        me = network.identity.peer_id
        limits = network.config.limits
        do = self.do
        by_time = pace.mode == "time"
        rounds_per_s = 1.0 / pace.round_s if by_time else 0.0
        times = Times(
            self.now, self.clock.monotonic, rounds_per_s, environment.members.terms.rounds,
            lambda now: environment.switch.elsewhere(now, rounds_per_s),
        )  # fmt: skip
        # the machines
        membership = Membership(me, quiet_beat_s(pace.round_s) if by_time else 0.0, model)
        self.rounds = Rounds(identity, group, shape)
        chunk_bytes = shape.chunk_bytes or chunk_bytes_of(state_bytes)
        sizes = TransferSizes(shape.mean_bytes, tuple(state_bytes), chunk_bytes, shape.scale)
        self.catchup = CatchUp(identity, group, sizes, self.rounds.is_everywhere)
        self.rounds.outlet.on_begun = self.catchup.donor.history.shrink
        # what follows from their events
        self.state = PeerState(me, agreed, past)
        self.state.has_worked = self.rounds.swarm.voters.has_worked
        self.state.counts = self.rounds.swarm.voters.counts
        for fragment, version in enumerate(agreed):
            self.catchup.donor.moved(fragment, version.version)
        self.state.when_moved(lambda fragment, version: self.catchup.donor.moved(fragment, version.version))
        self._offers = Offers(self.rounds, ledger, self.state, do)
        self.outer = LedgerCalls(ledger, self.state, self.rounds, self.catchup.donor, do)
        agreement = Agreement(membership, self.state)
        self._fetches = CatchupController(
            self.catchup, self.rounds, agreement, self.state, self.outer, self._offers, group, shape, do
        )
        self.commits = CommitHandler(
            self.rounds, ledger, self.outer, self._offers, self._fetches, group, shape, self._forget, do
        )
        """What follows from rounds; its ``on_decision`` may be set."""
        # what this peer tells and concludes
        host = Status(
            download_bytes_per_s=limits.download_bytes_per_s,
            process=int(1000 * self.clock.unix()) & 0xFFFFFFFF,  # another for each process of this peer
            name=network.config.name,
            visits=network.visits,
        )
        writer = StatusWriter(self.state, membership, times, host, self.upload_bytes_per_s)
        self.progress = SwarmProgress(
            self.state, membership, agreement, writer, times, self._fetches, network.run.group_size
        )
        self._news = SwarmNews(
            self.state, membership, self.rounds, writer, self.now, self._fetches.is_watching, self._set_paces
        )
        self.serve(membership, (membership, self.rounds, self.catchup), writer.status)
        self._finder = PeerFinder(environment, membership, writer, do)
        self.state.when_moved(self._moved)

    # ---- the shell's questions

    def has_worked(self, peer: PeerId) -> bool:
        return self.rounds.swarm.voters.has_worked(peer)

    def _works(self) -> Sequence[Coroutine[Any, Any, None]]:
        daemon = [self._watch_daemon()] if self.environment.is_first else []
        return self._finder.run(), *daemon

    def deliver(self, message: Opened, sender: PeerId, now: float) -> bool:
        kind = message.kind
        if kind.machine is Machine.CATCHUP:
            self.catchup.receive(message.body, sender, now)
            return True
        if kind.machine is not Machine.ROUNDS:
            return super().deliver(message, sender, now)
        self._news.tell_of_strangers()
        useful = self.rounds.receive(message.body, sender, now)
        if useful and kind.is_bulk:
            self.catchup.is_busy(sender, now)
        return useful

    def _look(self, now: float) -> None:
        beat_at = self.membership.get_timer()
        if now >= self._news.due_at() or (beat_at is not None and now >= beat_at):
            self._news.look()
            self._fetches.look_around(now)
        self.membership.handle_timer(now)
        if (rounds_at := self.rounds.get_timer()) is not None and now >= rounds_at:
            self._news.tell_of_strangers()
            self.rounds.handle_timer(now)
        self.catchup.handle_timer(now)
        self.pump()
        if self.progress.conclude(self.now()):
            self._tell_all()

    def _handle_events(self) -> bool:
        handled = False
        while (event := self.membership.next_event()) is not None:
            handled = True
            self._on_membership(event)
        while (round_event := self.rounds.next_event()) is not None:
            handled = True
            self.commits.handle(round_event)
        while (catch_event := self.catchup.next_event()) is not None:
            handled = True
            self._fetches.handle(catch_event)
        return handled

    def _revision(self) -> int:
        return self.rounds.revision

    def _news_at(self) -> float:
        return min(self._news.due_at(), self.progress.conclude_at())

    def _idle_s(self) -> float:
        """One that rests looks twice in a slow heartbeat whether anything is due."""
        return max(HEARTBEAT_S, self.membership.quiet_s / 2 if self.progress.writer.rests else 0.0)

    @property
    def agreed(self) -> list[AgreedVersion]:
        """By fragment, where it is. Other threads may read it."""
        return self.state.agreed

    def timers(self) -> dict[str, float | None]:
        """When each machine wants to be called next."""
        membership, rounds, catchup = (machine.get_timer() for machine in self._machines)
        return {"membership": membership, "rounds": rounds, "catching up": catchup}

    def _tell_all(self) -> None:
        """What this peer says of itself has changed: the machines and the others hear it now."""
        self._news.tell()
        self.membership.announce(self.now())
        self.pump()

    # ---- what the trainer asks

    def offer(self, offer: Offer) -> None:
        """Start a round with this peer's encoded outer gradient."""
        self._news.tell()
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
            self._fetches.wake(self.now())
        self._tell_all()

    def rest(self) -> None:
        """Say that this peer rests, until ``show`` says what it does."""
        self.show(replace(self.state.local, phase=Status.PAUSED))

    def unheard_peers(self) -> int:
        """Peers that the DHT lists and that we have not heard: dead since less than a record's lifetime, or
        about to answer. Before it was asked there may be any."""
        unasked = not self.membership.candidates.has_looked
        return self.membership.awaited + unasked

    def upload_bytes_per_s(self) -> float:
        """What this peer can send: measured, at most its own cap; 0 when not measured yet."""
        cap = self.environment.network.config.limits.upload_bytes_per_s
        measured = self._links.upload_bytes_per_s if self._links is not None else 0.0
        return min(cap, measured) if cap and measured else cap or measured

    # ---- what comes in

    def _on_membership(self, event: NewPeer | Left | OtherModel) -> None:
        if isinstance(event, OtherModel):
            why = f": {event.difference}" if event.difference is not None else ""
            self.report(ev.Warned, text=f"peer {event.peer} trains another model and is left out{why}")
            return
        if isinstance(event, NewPeer):
            self._finder.unreached.met(event.peer)
            self._visitors.discard(event.peer)
            if event.visits and len(self._visitors) < MAX_PEERS:
                self._visitors.add(event.peer)
            self.report(ev.PeerJoined, other=event.peer, name=event.name)
        else:
            self.report(ev.PeerLeft, other=event.peer, reason=event.reason)
            self.catchup.fetcher.forget_donor(event.peer, "the donor left", self.now())
        self._news.somebody_came_or_went()

    def _moved(self, fragment: int, version: AgreedVersion) -> None:
        """The agreed state is another: those that wait to see it, or would for long, hear it at once."""
        self._news.tell()
        if self.state.local.phase == Status.DRAINING or self.membership.quiet_s:
            self.membership.announce(self.now())

    # ---- links

    def _forget(self, attempt: bytes, means: bool) -> None:
        self.links.forget(attempt, means)

    def _set_paces(self, bytes_per_s: Mapping[PeerId, float]) -> None:
        if self._links is not None:
            self._links.set_paces(bytes_per_s)

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        self._finder.unreached.failed(peer, reason)
        super()._unreachable(peer, reason)

    def report(self, kind: type[ev.Event], **fields: Any) -> None:
        """But that a visitor comes, goes, and is linked with is news to nobody."""
        if kind not in _MEETINGS or fields["other"] not in self._visitors:
            super().report(kind, **fields)

    async def _watch_daemon(self) -> None:
        words = await self.environment.network.daemon_ended()
        text = f"the libp2p daemon has ended ({words}): gRPC links go on; restart this peer to be found"
        self.report(ev.Warned, text=text)
