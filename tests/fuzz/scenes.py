"""Scenes: three simulated peers that train and exchange for some seconds, with wrong messages in between.

A scene costs about 100 milliseconds (``play`` has games over real tensors, ten times as long), so a
coverage-guided fuzzer gets far. What must hold, whatever the tape says: nothing is raised, no timer is
overdue, every offer ends, what is held stays within the bounds that the machines name, and refusals name
those who sent what was refused; where peers crash, those for which there is no innocent explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

from google.protobuf.message import Message

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import Blame, blame_of
from p2p_co2.protocol.rounds.gathering import behind_message
from p2p_co2.simnet import EventLog, Settings, Storm, Swarm
from p2p_co2.simnet.internet import Endpoint
from p2p_co2.telemetry.events import MessageRefused
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import (
    AskOutcome,
    Envelope,
    ModelRow,
    ModelTable,
    Refusal,
    RoundKey,
)
from tests.envelopes import enveloped
from tests.fuzz.mutate import Mutator, Tape
from tests.fuzz.world import make_identity

RUN = RunConfig(name="scenes", fragments=2, clock=ClockConfig(mode="time", round_s=4.0, rounds=2))
STRANGERS = tuple(make_identity(f"mallory {number}") for number in range(12))
SEEDS, MOST_REPEATS, STOP_S = 8, 20, 400.0
Delivered = Callable[[PeerId, Endpoint, bytes], None]


def swarm_of(seed: int, before_each: Delivered) -> Swarm:
    """Half of the seeds are calm. ``before_each`` hears of each message: (sender, receiver, bytes)."""
    faults = Storm(3.5, 8.0) if seed % 2 else None
    settings = Settings(
        run=RUN, peers=3, seed=seed, profile="fibre", faults=faults, blocks=(2, 12), checkpoint_every_s=4.0
    )
    swarm = Swarm(settings, EventLog(digests=False))
    deliver = swarm.internet.deliver

    def deliver_after(
        sender: Endpoint, receiver: Endpoint, departs_at: float, data: bytes, size: float
    ) -> None:
        before_each(sender.peer, receiver, data)
        deliver(sender, receiver, departs_at, data, size)

    swarm.internet.deliver = deliver_after  # type: ignore[method-assign]
    swarm.world.call_at(STOP_S, swarm.stop)
    return swarm


class Scene:
    """The tape says which swarm, whether its members may lie (else strangers), and before which messages
    what comes in; ``kind`` makes the wrong messages from right ones of that kind alone."""

    def __init__(self, data: bytes, kind: str = "") -> None:
        self._tape, self._kind = Tape(data), kind
        self._mutator = Mutator(self._tape)
        self.swarm = swarm_of(self._tape.choose(SEEDS), self._lie)
        members = [volunteer.identity for volunteer in self.swarm.volunteers] if self._tape.choose(2) else []
        self._liars: tuple[Identity, ...] = (*STRANGERS, *members, *members, *members)
        self._next = self._tape.choose(200)
        self.wrong = 0
        self.refused: Counter[str] = Counter()

    def _lie(self, sender: PeerId, receiver: Endpoint, data: bytes) -> None:
        self._next -= 1
        if self._tape.over or self._next > 0 or not receiver.is_up:
            return
        self._next = self._tape.choose(16)
        source = self._liars[self._tape.choose(len(self._liars))]
        if self._kind or self._tape.choose(3) == 0:
            some = examples()[self._kind or sorted(examples())[self._tape.choose(len(examples()))]]
            data = some[self._tape.choose(len(some))]
        wrong = self._mutator.mutate(data, source)
        self.wrong += 1
        for _ in range(MOST_REPEATS if self._tape.choose(32) == 0 else 1):
            receiver.receive(source.peer_id, wrong)

    def play(self) -> None:
        """Raises ``AssertionError`` for a law that was broken, and whatever a machine raises."""
        is_calm = self.swarm.settings.faults is None
        liars = {one.peer_id for one in self._liars}

        def note(event: MessageRefused) -> None:
            self.refused[event.other] += 1
            assert event.other in liars or not (is_calm or blame_of(event.reason) is Blame.GRAVE), event

        self.swarm.log.readers_of[MessageRefused].append(note)
        result = self.swarm.run()
        # What a liar contributes is not in the books: only the laws that hold beside liars are asked.
        broken = [one for one in result.violations if one.law in {"memory", "deadlines", "bug"}]
        assert not broken, broken


@cache
def examples() -> dict[str, tuple[bytes, ...]]:
    """Right messages by kind, to be made wrong."""
    found: dict[str, dict[bytes, None]] = {}

    def keep(sender: PeerId, receiver: Endpoint, data: bytes) -> None:
        kind = Envelope.FromString(data).WhichOneof("body") or ""
        found.setdefault(kind, {})[bytes(data)] = None

    for seed in range(SEEDS):
        swarm_of(seed, keep).run()
    key, names = RoundKey(fragment=0, round=1, attempt=bytes(16)), [one.peer_id for one in STRANGERS[:3]]
    seldom: tuple[Message, ...] = (
        behind_message(0, 1, 1, bytes(32), names), AskOutcome(key=key),
        Refusal(request=1, reason="busy", again=True),
        ModelTable(model=1, rows=[ModelRow(name="0.weight", shape=[2], dtype="float32", trained=True)]),
    )  # fmt: skip
    for message in seldom:  # in most runs nobody needs them
        data = enveloped(message, head_of(RUN.digest()))
        found.setdefault(Envelope.FromString(data).WhichOneof("body") or "", {})[data] = None
    return {kind: tuple(list(some)[:: max(1, len(some) // 8)]) for kind, some in sorted(found.items())}
