"""The events of a run, as frozen types.

Law: an event is written once, by the peer it happened to, and is never changed. Every number carries its
unit in
its name; ``at`` is unix seconds by the writer's clock; ``peer`` is the writer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has. ``kind`` is the snake-case name used in ``events.jsonl``."""

    kind: ClassVar[str] = ""
    at: float
    peer: str

    def to_json(self) -> dict[str, Any]:
        """The event as a flat JSON object with its ``kind`` first."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PeerStarted(Event):
    """This process is up; ``parameters`` is N, ``fragments`` P. ``device`` is torch's name of it."""

    kind: ClassVar[str] = "peer_started"
    name: str
    pid: int
    software: str
    device: str
    parameters: int
    fragments: int
    run: str
    """Digest of the run, hex."""


@dataclass(frozen=True, kw_only=True)
class PeerJoined(Event):
    """Another peer was seen for the first time (or again)."""

    kind: ClassVar[str] = "peer_joined"
    other: str


@dataclass(frozen=True, kw_only=True)
class PeerLeft(Event):
    """Another peer is gone; ``reason`` says how we know."""

    kind: ClassVar[str] = "peer_left"
    other: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LinkOpened(Event):
    """We can send to ``other`` over ``carrier``; ``reason`` says why not the preferred one, if so."""

    kind: ClassVar[str] = "link_opened"
    other: str
    carrier: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkLost(Event):
    kind: ClassVar[str] = "link_lost"
    other: str
    carrier: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """About once a second: counters since this process started, ``loss`` the mean training loss since the
    last one."""

    kind: ClassVar[str] = "progress"
    phase: str
    position: float
    inner_steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    train_s: float
    """Seconds in inner steps."""
    exposed_s: float
    """Seconds the training thread stood still for communication."""
    wall_s: float
    """Seconds since the first inner step began."""
    up_bytes: int
    down_bytes: int
    versions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FragmentSent(Event):
    """This peer offered its outer gradient for a round. ``relative_error`` is ||x - q||^2 / ||x||^2 of the
    encode."""

    kind: ClassVar[str] = "fragment_sent"
    fragment: int
    round: int
    payload_bytes: int
    weight: float
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class SendSkipped(Event):
    """A schedule point passed while the fragment's previous round was still in flight: the gradient carries
    over."""

    kind: ClassVar[str] = "send_skipped"
    fragment: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RoundBegan(Event):
    """Written by the coordinator."""

    kind: ClassVar[str] = "round_began"
    fragment: int
    round: int
    group: tuple[str, ...]
    waited_s: float
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class RoundCommitted(Event):
    """Written by every member that learned of it. ``contributors`` reached every part, ``partial`` only
    some."""

    kind: ClassVar[str] = "round_committed"
    fragment: int
    round: int
    coordinator: str
    group_size: int
    contributors: int
    partial: int
    duration_s: float
    """From this peer's offer to its knowing the outcome; 0 if it did not offer."""


@dataclass(frozen=True, kw_only=True)
class RoundAborted(Event):
    kind: ClassVar[str] = "round_aborted"
    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class FragmentApplied(Event):
    """An outer step reached the live parameters.

    ``staleness``: the fragment's schedule points passed between measuring this peer's gradient and applying
    the mean (0: within
    its own round, 1: CO2). ``sync_delay_steps``: inner steps between. ``gap``: CO2's penalty divisor (1 =
    none).
    """

    kind: ClassVar[str] = "fragment_applied"
    fragment: int
    version: int
    contributed: bool
    staleness: int
    sync_delay_steps: int
    sync_delay_s: float
    gap: float
    gradient_norm: float
    momentum_norm: float
    clipped_share: float
    """Share of momentum values that clipping changed, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class CaughtUp(Event):
    """``how``: "replay" of missed rounds or whole "state" of the fragment."""

    kind: ClassVar[str] = "caught_up"
    fragment: int
    from_version: int
    to_version: int
    how: str
    donor: str
    bytes: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class MessageRefused(Event):
    """A peer broke the rules; ``reason`` is the constant of ``RemoteProtocolError``."""

    kind: ClassVar[str] = "message_refused"
    other: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint_saved"
    path: str
    versions: tuple[int, ...]
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something that a person should know, in words."""

    kind: ClassVar[str] = "warned"
    text: str


@dataclass(frozen=True, kw_only=True)
class PeerFinished(Event):
    """The last event of a process. ``digest`` covers the whole agreed state, hex."""

    kind: ClassVar[str] = "peer_finished"
    reason: str
    digest: str
    versions: tuple[int, ...]
    carriers: dict[str, str] = field(default_factory=dict)
    """Carrier in use per other peer when it ended."""
    peak_memory_bytes: int = 0


EVENT_TYPES: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        PeerStarted, PeerJoined, PeerLeft, LinkOpened, LinkLost, Progress, FragmentSent, SendSkipped,
        RoundBegan, RoundCommitted, RoundAborted, FragmentApplied, CaughtUp, MessageRefused, CheckpointSaved,
        Warned, PeerFinished,
    )
}  # fmt: skip
