"""One game: honest peers train together, and chance decides which of their messages come back changed, from
whom, how often.

What must hold, whatever comes (``Game.play``): no node ends, no training thread raises, no timer is overdue,
what is held stays within its bounds, and refusals name those alone who lied. If only a stranger lies, the
honest peers also stay agreed and go on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from google.protobuf.message import Message

from p2p_co2.errors import Blame, blame_of
from p2p_co2.protocol.rounds.gathering import behind_message
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.envelope import head_of
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.kinds import KINDS, Machine
from tests.envelopes import enveloped
from tests.fuzz.stages import StageWorld
from tests.fuzz.world import RUN, World, make_identity, run_virtual
from tests.fuzz.wrong import Wrong, each

KINDS_BETWEEN = sorted(name for name, kind in KINDS.items() if kind.machine is Machine.PIPELINE)
"""Those between stages."""
LIAR = make_identity("mallory")
LOOK_S = 0.8
LEAST_LOOKS = 10
MOST_LOOKS = 100
AFTER_S = 8.0
MOST_REPEATS = 40
AT_ONCE = 60
FEW_AT_ONCE = 3
"""Wrong ones beside one message; of kinds of which one wrong one spoils the next."""
SELDOM = {
    "behind",
    "ask_outcome",
    "leave",
    "refusal",
    "declined",
    "dropped",
    "model_table",
    "neighbour",
    "revoked",
}
"""Kinds that these worlds need too seldom: wrong ones are made of an example."""


def rounds_world() -> World:
    return World("a", "b", "c")


def stages_world() -> World:
    return StageWorld(2, 2, 1)


def world_for(kind: str) -> Callable[[], World]:
    """The world in which a kind of message is sent."""
    return stages_world if kind in KINDS_BETWEEN else rounds_world


class Game:
    """``most``: how many wrong messages chance makes. ``members_lie``: they may come in the name of a member;
    ``losses``: so many of the honest messages are lost, so that rarer kinds are sent at all. ``each_of``: a
    kind of which each field is tried at each wrong value besides."""

    def __init__(
        self, make_world: Callable[[], World], chance: random.Random, *, most: int, members_lie: bool = False,
        losses: float = 0.0, each_of: str = "",
    ) -> None:  # fmt: skip
        self._make_world = make_world
        self._chance = chance
        self._left = most
        self._members_lie = members_lie
        self._losses = losses
        self._kind = each_of
        self._made = examples()[each_of][-1] if each_of in SELDOM else b""
        self._is_over = False
        self.tried: set[str] = set()
        """Fields, by their full names."""
        self._tried_ways = 0
        self._has_tried_each = False
        self._away = PeerId("")
        self._wrong = Wrong(chance)
        self.liars = {LIAR.peer_id}
        self.refused: Counter[tuple[str, str, str]] = Counter()
        """By (sender, kind, reason)."""

    def play(self) -> None:
        """Raises ``AssertionError`` for a law that was broken, and whatever a node or a thread raises."""
        torch.set_num_threads(1)
        run_virtual(self._play())

    async def _play(self) -> None:
        self.world = world = self._make_world()
        self._members = {one.me: one.identity for one in world.members}
        world.start()
        await world.pass_time(1.5)  # they find each other
        await world.greet(LIAR.peer_id)  # live in their eyes, its messages are looked at
        world.tap = self._tap
        for number in range(MOST_LOOKS):
            if self._left <= 0 and (not self._kind or (self._has_tried_each and number > LEAST_LOOKS)):
                break
            # One that is away for a while has to catch up.
            self._away = world.members[-1].me if self._losses and number in (2, 3, 4) else PeerId("")
            await world.pass_time(LOOK_S)
        self._away = PeerId("")
        self._is_over = True
        before = world.done()
        await world.pass_time(AFTER_S)
        self._check(before)
        await world.close()

    def _tap(self, sender: PeerId, receiver: PeerId, data: bytes) -> bool:
        kind = self._wrong.saw(data)
        if self._is_over:
            return True
        is_looked_at = kind not in ("ping", "pong") or self._kind == kind or self._chance.random() < 0.1
        liars = [LIAR, self._members[sender]] if self._members_lie else [LIAR]
        lies: list[tuple[Identity, bytes]] = []
        if self._kind and (self._made or kind == self._kind) and is_looked_at:
            some = self._each(data if kind == self._kind else about_the_same(self._made, data))
            lies += [(liar, lie) for lie in some for liar in liars]
        if self._left > 0 and is_looked_at:
            self._left -= 1
            liar = self._chance.choice(liars)
            lies.append((liar, self._wrong.envelope(data, liar)))
        for liar, lie in lies:
            self.liars.add(liar.peer_id)
            for _ in range(MOST_REPEATS if self._chance.random() < 0.03 else 1):
                self.world.put(liar.peer_id, receiver, lie)
        return self._chance.random() >= self._losses and self._away not in (sender, receiver)

    def _each(self, data: bytes) -> list[bytes]:
        """The next wrong ones; in the end all of them."""
        ways = list(each(getattr(wire.Envelope.FromString(data), self._kind)))
        count = FEW_AT_ONCE if self._kind in {*KINDS_BETWEEN, "decision"} else AT_ONCE
        some = ways[self._tried_ways :][:count]
        self._tried_ways += len(some)
        if self._tried_ways >= len(ways):
            self._has_tried_each = True
            self._tried_ways = 0  # once more, at another time
        self.tried |= {name for name, _ in some}
        return [enveloped(make(), head_of(RUN.digest())) for _, make in some]

    def _check(self, before: list[int]) -> None:
        for one in self.world.members:
            self.refused.update(one.node.router.refusals)
        self.world.check()
        innocent = [one for one in self.refused if one[0] not in self.liars]
        assert not [one for one in innocent if blame_of(one[2]) is Blame.GRAVE or not self._losses], innocent
        if self.liars == {LIAR.peer_id} and not self._losses:
            self.world.check_agreed()
            assert all(later > sooner for sooner, later in zip(before, self.world.done(), strict=True))


def about_the_same(lie: bytes, seen: bytes) -> bytes:
    """``lie`` about the microbatch or attempt that ``seen`` is about, if both are about one of a kind."""
    made, known = wire.Envelope.FromString(lie), wire.Envelope.FromString(seen)
    body, other = (getattr(one, one.WhichOneof("body") or "ping") for one in (made, known))
    if type(getattr(body, "key", None)) is type(getattr(other, "key", 0)):
        body.key.CopyFrom(other.key)
    return made.SerializeToString()


@cache
def examples() -> dict[str, tuple[bytes, ...]]:
    """Some right messages of each kind, as they were sent in both worlds; by hand what is seldom needed."""
    found: dict[str, dict[bytes, None]] = {}
    key = wire.RoundKey(fragment=0, round=1, attempt=bytes(16))
    microbatch = wire.MicrobatchKey(owner=sum(b"s0 0") << 32, number=1)
    seldom: tuple[Message, ...] = (
        behind_message(0, 1, 1, bytes(32), [LIAR.peer_id]), wire.AskOutcome(key=key),
        wire.Leave(reason="done"),
        wire.Refusal(request=1, reason="busy", again=True), wire.Declined(key=microbatch, reason="no room"),
        wire.Dropped(key=microbatch, reason="late"),
        wire.ModelTable(model=1, rows=[wire.ModelRow(name="0", shape=[2], dtype="float32", trained=True)]),
        wire.Revoked(sealed=b"of another run"),
    )  # fmt: skip

    def keep(data: bytes) -> None:
        found.setdefault(wire.Envelope.FromString(data).WhichOneof("body") or "", {})[data] = None

    for message in seldom:
        keep(enveloped(message, head_of(RUN.digest())))

    async def record(world: World) -> None:
        cut_off: set[PeerId] = set()

        def tap(sender: PeerId, receiver: PeerId, data: bytes) -> bool:
            keep(data)
            return not {sender, receiver} & cut_off

        world.tap = tap
        world.start()
        await world.pass_time(6.0)
        cut_off.add(world.members[-1].me)
        await world.pass_time(2.5)
        cut_off.clear()
        await world.pass_time(4.0)
        await world.close()

    for make_world in (rounds_world, stages_world):

        async def play(make: Callable[[], World] = make_world) -> None:
            await record(make())

        run_virtual(play())
    assert found.keys() == KINDS.keys()
    return {kind: tuple(list(some)[:: max(1, len(some) // 8)]) for kind, some in sorted(found.items())}
