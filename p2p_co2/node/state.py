"""Where this peer is: the one published value of a node, and what the node's parts may ask of it.

``agreed`` has a version and its digest for each fragment; ``local`` is what the training thread says. The
node's loop alone writes them, and anybody reads them: machines, heartbeats, other threads. What must act upon
a new agreed state registers with ``when_moved``; those calls depend on no order among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2p_co2.protocol.ledger import AgreedVersion
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Status

PAST_KEPT = 256
"""Own versions of each fragment whose digests are remembered."""


@dataclass(frozen=True)
class LocalProgress:
    """What the training thread says of itself; replaced whole, so that the network thread may read it at any
    time. ``position``: in rounds, at ``position_at`` of the node's monotonic clock. ``finished``: fragments
    for which it has nothing more to offer in this run. ``is_over``: it takes no more steps, and its position
    stands still."""

    phase: Status.Phase = Status.JOINING
    position: float = 0.0
    position_at: float = 0.0
    inner_steps: int = 0
    finished: frozenset[int] = frozenset()
    is_over: bool = False


@dataclass(frozen=True)
class Effects:
    """What a part may ask of its node. ``now``: the machines' clock; ``report``: an event's type and fields;
    ``spawn``: work in the node's TaskGroup; ``refuse``: (peer, reason, detail); ``pump``: ``Pump.pump``."""

    now: Callable[[], float]
    report: Callable[..., None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    refuse: Callable[[str, str, str], None]
    pump: Callable[..., None]


class PeerState:
    """``me``: this peer. ``step_s``: what its last inner steps took, each; 0 if not known. ``over``: the
    fragments of which no more rounds are made in this run. By fragment ``alone``: how many of the newest
    rounds in a row this peer made alone; ``given_up``: those that the last state taken over lacks. ``past``:
    digests of earlier versions, as a checkpoint has them; they are written to, and may be read, from now
    on."""

    def __init__(
        self, me: PeerId, agreed: Sequence[AgreedVersion], past: Sequence[dict[int, bytes]] = ()
    ) -> None:
        self.me = me
        self.agreed = list(agreed)
        self.local = LocalProgress()
        self.step_s = 0.0
        self.over: frozenset[int] = frozenset()
        self.alone = [0] * len(agreed)
        self.given_up = dict[int, int]()
        self._past = past or [{} for _ in agreed]
        for known, version in zip(self._past, agreed, strict=True):
            known[version.version] = version.digest
        self._told: list[Callable[[int, AgreedVersion], None]] = []
        self.has_worked: Callable[[PeerId], bool] = lambda peer: False
        self.counts: Callable[[PeerId], bool] = lambda peer: True
        """As ``Rounds`` says."""

    def when_moved(self, call: Callable[[int, AgreedVersion], None]) -> None:
        """Have ``call`` made with (fragment, where it is) after each change of the agreed state."""
        self._told.append(call)

    @property
    def held(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """(versions, digests) of all fragments."""
        agreed = list(self.agreed)
        return tuple(one.version for one in agreed), tuple(one.digest for one in agreed)

    @property
    def works(self) -> bool:
        """Whether this peer has a part in rounds. One that drains has as long as an offer of it is in flight:
        others must not make that round without it."""
        return works(self.local.phase, len(self.local.finished) == len(self.agreed))

    def past(self, fragment: int) -> Mapping[int, bytes]:
        """Digests of this peer's own versions, since it last took over somebody else's state."""
        return self._past[fragment]

    def show(self, local: LocalProgress) -> None:
        """What the training thread says now."""
        known = self.local
        self.local = local
        steps = local.inner_steps - known.inner_steps
        if steps > 0 and known.inner_steps:  # time before the first was no step
            self.step_s = (local.position_at - known.position_at) / steps

    def move(self, fragment: int, version: AgreedVersion, group: Collection[PeerId] | None) -> bool:
        """The tensor side is at ``version`` now, by a round of ``group``, or (None) by somebody else's whole
        state, of whose past nothing is known. False if that is nothing new."""
        before = self.agreed[fragment]
        past = self._past[fragment]
        if version == before:
            return False
        if group is None:
            is_newer = version.version > before.version
            self.given_up[fragment] = 0 if is_newer else self.alone[fragment]
            past.clear()
        is_alone = group is not None and set(group) == {self.me}
        self.alone[fragment] = self.alone[fragment] + 1 if is_alone else 0
        past[version.version] = version.digest
        while len(past) > PAST_KEPT:
            del past[next(iter(past))]
        self.agreed[fragment] = version
        for call in self._told:
            call(fragment, version)
        return True


def works(phase: Status.Phase, has_finished: bool) -> bool:
    """Whether a peer has a part in rounds (``PeerState.works``)."""
    return phase == Status.TRAINING or (phase == Status.DRAINING and not has_finished)
