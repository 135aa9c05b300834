"""One peer's machines behind the way in that bytes take, without an event loop: for many small games.

``Bench`` is what ``Node`` does around the machines, with a toy for the tensor side; bytes come in through the
product's own ``Router`` (sizes, version, run, dispatch, allowances). Three benches play a story together
once; each one's part in it, what came in and what it did when, is kept and replayed with wrong messages in
between (``scenes``). Law: the same calls at the same times give the same history.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from p2p_co2.digest import digest as digest_of
from p2p_co2.digest import digest_of_chunks
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.links import MAX_SERVED_BYTES
from p2p_co2.node.router import Inbox, Router
from p2p_co2.node.state import Effects
from p2p_co2.protocol.catchup.goals import (
    ROUND,
    STATE,
    DonorRefused,
    ExportWanted,
    Fetched,
    FetchFailed,
    Goal,
    Shape,
)
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.rounds import (
    Committed,
    FellBehind,
    Offer,
    OutcomeWithoutBytes,
    PayloadShape,
    PeerView,
    ReduceWanted,
    Refused,
    Rounds,
)
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import Chunk, Decision, Envelope, Status
from p2p_co2.system.memory import Buffer
from tests.fuzz.world import make_identity
from tests.round_network import toy_mean

RUN = hashlib.sha256(b"a bench").digest()
SHAPE = PayloadShape(8192, (2, 12))
"""The second fragment's parts travel in more than one piece at ``UPLOAD_BYTES_PER_S``."""
ROUNDS_PER_S = 0.25
STATE_BYTES = (1000, 200_000)
UPLOAD_BYTES_PER_S = 50_000.0
LATENCY_S = 0.01
_FIELDS = {
    type(getattr(Envelope(), field.name)): field.name
    for field in Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
}


def made_of(fragment: int, mean: Buffer) -> bytes:
    """The state that a round with this mean makes."""
    size = STATE_BYTES[fragment]
    return (-(-size // 32) * hashlib.sha256(mean).digest())[:size]


class Bench:
    """One peer at version 0 of every fragment. ``sent``: (receiver, bytes), to be taken away; nothing where
    nobody ``is_heard``."""

    def __init__(self, name: str, now: float = 1000.0, *, is_heard: bool = True) -> None:
        self.is_heard = is_heard
        self.identity = make_identity(name)
        self.me, self.run_digest, self.at = self.identity.peer_id, RUN, now
        self.membership = Membership(self.me)
        self.rounds = Rounds(self.identity, RUN, SHAPE)
        means = tuple(blocks * SHAPE.block_bytes for blocks in SHAPE.blocks)
        self.catchup = CatchUp(self.identity, RUN, Shape(means, STATE_BYTES))
        inbox = Inbox(self.membership, self.rounds, self.catchup, self.status, lambda: None)
        effects = Effects(self.now, self.report, lambda work: None, lambda *of: None, self.pump)
        self.router = Router(RUN, inbox, effects, self.shut_out, self.crash)
        self.versions, self.states = [0] * len(means), [bytes(size) for size in STATE_BYTES]
        self.digests = [digest_of_chunks([digest_of(state)]) for state in self.states]
        self.sent: list[tuple[PeerId, bytes]] = []
        self.shut: set[str] = set()
        self.reported: Counter[str] = Counter()
        self.unread_bytes: Counter[str] = Counter()
        for fragment, digest in enumerate(self.digests):
            self.rounds.set_state(fragment, 0, digest)

    # ---- what ``Inbox`` and ``Router`` ask of a node

    def now(self) -> float:
        return self.at

    def status(self) -> Status:
        return Status(
            phase=Status.TRAINING, versions=self.versions, digests=self.digests,
            upload_bytes_per_s=UPLOAD_BYTES_PER_S,
        )  # fmt: skip

    def report(self, kind: type, **fields: Any) -> None:
        self.reported[kind.__name__] += 1

    def crash(self, error: Exception) -> None:
        raise error

    def shut_out(self, peer: PeerId, why: str) -> None:
        self.shut.add(peer)
        self.membership.unreachable(peer, why, self.at)

    def pump(self, timers: bool = True) -> None:
        for _ in range(100):
            for machine in (self.membership, self.rounds, self.catchup):
                going = machine.messages_to_send()
                self._serve(going)
                if self.is_heard:
                    self.sent += [(peer, envelope(message)) for peer, message in going]
            if not self._handle_all():
                return
        raise AssertionError("the machines never fall silent")

    def _serve(self, going: Sequence[tuple[PeerId, Message]]) -> None:
        """Chunks wait until their receiver takes them, up to the bound of ``LinkPool``."""
        for peer, message in going:
            if isinstance(message, Chunk):
                self.unread_bytes[peer] += len(message.data)
                if self.unread_bytes[peer] > MAX_SERVED_BYTES:
                    self.router.overasked(peer)

    # ---- driving

    def take(self, sender: PeerId, data: bytes, at: float) -> None:
        """One message as a carrier would hand it over; who is shut out is not heard."""
        self.tick(at)
        try:
            self.router.take(sender, data)
        except RemoteProtocolError as error:
            self.router.on_link_refused(sender, error)

    def tick(self, at: float) -> None:
        """Fire what is due until ``at``."""
        self._tick(at, self.membership, self.rounds, self.catchup)

    def come_to_rest(self, within_s: float) -> None:
        """Let time pass until no offer is open, at most ``within_s`` seconds; the heart beats no more."""
        end = self.at + within_s
        while self.rounds.open_offers() and self.at < end:
            due = self._timer_at(self.rounds, self.catchup)
            self._tick(end if due is None else min(due, end), self.rounds, self.catchup)

    def _tick(self, at: float, *machines: Membership | Rounds | CatchUp) -> None:
        while (due := self._timer_at(*machines)) is not None and due <= at:
            self.at = max(self.at, due)
            for machine in machines:
                machine.handle_timer(self.at)
            self.pump()
            later = self._timer_at(*machines)
            assert later is None or later > due, "a timer that fires for ever"
        self.at = max(self.at, at)

    def timer_at(self) -> float | None:
        return self._timer_at(self.membership, self.rounds, self.catchup)

    def _timer_at(self, *machines: Membership | Rounds | CatchUp) -> float | None:
        times = [at for machine in machines if (at := machine.get_timer()) is not None]
        return min(times, default=None)

    def meet(self, *others: Bench) -> None:
        self.membership.status = self.status()
        self.membership.found([other.me for other in others], self.at)
        self.pump()

    def offer(self, fragment: int) -> None:
        """Offer for the next round, unless lies have kept the last offer open."""
        if fragment in {offer.fragment for offer in self.rounds.open_offers()}:
            return
        self._see()
        version, size = self.versions[fragment], SHAPE.payload_bytes(fragment)
        seed = hashlib.sha256(f"{self.me}/{fragment}/{version}".encode()).digest()
        payload = seed * (size // len(seed))
        offer = Offer(fragment, version + 1, version, self.digests[fragment], payload, 2.0)
        self.rounds.offer(offer, self.at)
        self.pump()

    def fetch(self, what: Any, fragment: int, version: int) -> None:
        donors = tuple(sorted(self.membership.live))
        self.catchup.fetcher.want(Goal(what, fragment, version, donors), self.at)
        self.pump()

    def leave(self) -> None:
        self.membership.say_goodbye("done")
        self.pump()

    # ---- events

    def _see(self) -> None:
        self.membership.status = self.status()
        views = {
            peer: PeerView(
                info.status.upload_bytes_per_s, info.status.phase == Status.TRAINING, info.versions
            )
            for peer, info in self.membership.live.items()
        }
        mine = PeerView(UPLOAD_BYTES_PER_S, True, tuple(self.versions))
        self.rounds.set_peers({**views, self.me: mine}, self.at)

    def _handle_all(self) -> bool:
        handled = False
        while self.membership.next_event() is not None:
            handled = True
            self._see()
        while (event := self.rounds.next_event()) is not None:
            handled = True
            self._on_round(event)
        while (caught := self.catchup.next_event()) is not None:
            handled = True
            self._on_catch_up(caught)
        return handled

    def _on_round(self, event: Any) -> None:
        if isinstance(event, ReduceWanted):
            self.rounds.reduced(event.job, toy_mean(event.job), self.at)
        elif isinstance(event, Committed):
            decision = Decision.FromString(event.decision)
            self._moved(event.fragment, event.round, made_of(event.fragment, event.mean))
            self.catchup.donor.history.remember(event.fragment, event.round, decision, event.mean)
        elif isinstance(event, OutcomeWithoutBytes):
            self.catchup.fetcher.want(Goal(ROUND, event.fragment, event.round, event.donors), self.at)
        elif isinstance(event, FellBehind):
            donors = event.donors or tuple(sorted(self.membership.live))
            self.catchup.fetcher.want(Goal(STATE, event.fragment, event.version, donors), self.at)
        elif isinstance(event, Refused):
            self.router.refuse(event.peer, event.reason, event.detail)

    def _on_catch_up(self, event: Any) -> None:
        if isinstance(event, ExportWanted):
            data, version = self.states[event.fragment], self.versions[event.fragment]
            self.catchup.donor.exported(
                event.fragment, version, data, self.digests[event.fragment], [digest_of(data)], self.at
            )
        elif isinstance(event, Fetched) and event.version > self.versions[event.goal.fragment]:
            fragment, data = event.goal.fragment, bytes(event.data)
            state = data if event.goal.what == STATE else made_of(fragment, data)
            self._moved(fragment, event.version, state)
        elif isinstance(event, DonorRefused):
            self.router.refuse(event.peer, event.reason, event.detail)
        elif isinstance(event, FetchFailed):
            self.rounds.forget_outcome(event.goal.fragment, event.goal.version)

    def _moved(self, fragment: int, version: int, state: bytes) -> None:
        digest = digest_of_chunks([digest_of(state)])
        self.versions[fragment], self.states[fragment], self.digests[fragment] = version, state, digest
        self.catchup.donor.moved(fragment, version)
        self.rounds.set_state(fragment, version, digest)
        self._see()


class Together:
    """Benches on one virtual clock. ``cut``: peers whose messages are lost. ``came``: per peer, what
    came in and what it did itself: (time, sender, bytes) or (time, None, action)."""

    def __init__(self, *names: str) -> None:
        self.now = 1000.0
        self.benches = [Bench(name, self.now) for name in names]
        self.cut: set[PeerId] = set()
        self.came: dict[PeerId, list[tuple[float, Any, Any]]] = {bench.me: [] for bench in self.benches}
        self._by_id = {bench.me: bench for bench in self.benches}
        self._queue: list[tuple[float, int, PeerId, PeerId, bytes]] = []
        self._count = 0

    def do(self, bench: Bench, action: Callable[[Bench], None]) -> None:
        """Let one peer do something now."""
        bench.tick(self.now)
        self.came[bench.me].append((self.now, None, action))
        action(bench)
        self._post(bench)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            timers = [(at, bench) for bench in self.benches if (at := bench.timer_at()) is not None]
            timer_at, bench = min(timers, key=lambda pair: pair[0], default=(end + 1, self.benches[0]))
            message_at = self._queue[0][0] if self._queue else end + 1
            if min(timer_at, message_at) > end:
                break
            if message_at <= timer_at:
                self.now, _, sender, to, data = heapq.heappop(self._queue)
                self.came[to].append((self.now, sender, data))
                bench = self._by_id[to]
                bench.take(sender, data, self.now)
            else:
                self.now = timer_at
                bench.tick(timer_at)
            self._post(bench)
        self.now = end

    def _post(self, bench: Bench) -> None:
        for to, data in bench.sent:
            if to in self._by_id and not {to, bench.me} & self.cut:
                self._count += 1
                heapq.heappush(self._queue, (self.now + LATENCY_S, self._count, bench.me, to, data))
        bench.sent = []


def envelope(message: Message) -> bytes:
    kind = message.__class__
    body = {_FIELDS[kind]: kind.FromString(message.SerializeToString())}  # its data may lie beside it
    return Envelope(version=PROTOCOL_VERSION, run=RUN, **body).SerializeToString()  # type: ignore[arg-type]
