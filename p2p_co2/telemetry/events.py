"""The events of a run, as frozen types.

Law: an event is written once, by the peer it happened to, and is never changed. Every number carries its
unit in its name; ``at`` is unix seconds by the writer's clock; ``peer`` is the writer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

_FIGURE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")


def check_figures(figures: Mapping[str, float], most: int = 16) -> None:
    """Raise ``ValueError`` for more figures beside a loss, or other names, than a board draws."""
    if len(figures) > most:
        raise ValueError(f"more than {most} figures beside the loss")
    if not all(isinstance(name, str) and _FIGURE.fullmatch(name) for name in figures):
        raise ValueError("a figure's name is a letter and up to 39 more letters, digits, dots, - or _")


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has. ``kind`` is the snake-case name used in ``events.jsonl``. Each subclass becomes a
    frozen dataclass that is made by names."""

    kind: ClassVar[str] = ""
    at: float
    peer: str

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """The event as a flat JSON object with its ``kind`` first."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


class PeerStarted(Event):
    """This process is up; ``parameters`` is N, ``fragments`` P. ``device`` is torch's name of it."""

    name: str
    pid: int
    software: str
    device: str
    parameters: int
    fragments: int
    run: str
    """Digest of the run, hex."""
    upload_cap_bytes_per_s: float = 0.0
    """The user's own cap on what this peer sends; 0 for none."""
    resumed_from: str = ""
    """Where the checkpoint lies that it goes on from; "" if it starts anew."""
    inner_steps: int = 0
    """Of that checkpoint, as is the next."""
    position: float = 0.0
    stage: int = 0
    """That it holds, of ``stages``; 1 where every peer holds the whole model."""
    stages: int = 1


class PeerJoined(Event):
    """Another peer was seen for the first time (or again)."""

    other: str
    name: str = ""
    """That its owner gave it; "" if it did not say one."""


class PeerLeft(Event):
    """Another peer is gone; ``reason`` says how we know."""

    other: str
    reason: str


class LinkOpened(Event):
    """We can send to ``other`` over ``carrier``; ``reason``: why not the preferred one, and what is
    between."""

    other: str
    carrier: str
    reason: str = ""


class LinkLost(Event):
    """We can no longer send to ``other`` over ``carrier``."""

    other: str
    carrier: str
    reason: str


class LinkMeasured(Event):
    """What the link to ``other`` has shown of late."""

    other: str
    carrier: str
    relayed: bool
    """Whether a third machine passes the bytes on."""
    round_trip_s: float
    """The smallest of late; 0 if not known."""
    bytes_per_s: float
    """Rate while payload was being sent; 0 if none was."""
    sent_bytes: int
    """To ``other`` since the process started."""


class Progress(Event):
    """About once a second: counters since the process started, but ``inner_steps`` and ``tokens`` go on from
    the checkpoint that it resumed. ``loss``: mean training loss since the last."""

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
    rounds: int = 0
    """When the run ends, which its organiser may amend; 0 for never, or if it is not said."""


class StageProgress(Event):
    """About once a second, in a run with stages: microbatches ``waiting`` here and ``in_flight`` behind,
    and since the start those that were ``counted`` and ``dropped``."""

    stage: int
    waiting: int
    in_flight: int
    counted: int
    dropped: int
    waiting_s: float
    """Seconds the training thread stood still for microbatches."""
    before: int
    """Live peers of the stage before, as is the next of the stage behind."""
    behind: int
    waits_for: str
    """In words, "" while there is work."""


class MicrobatchDropped(Event):
    """A microbatch counts nowhere from here on to its owner."""

    reason: str


class FragmentSent(Event):
    """This peer offered its outer gradient for a round."""

    fragment: int
    round: int
    payload_bytes: int
    weight: float


class SendSkipped(Event):
    """A schedule point passed with the round before still in flight: the gradient carries over."""

    fragment: int
    reason: str


class RoundBegan(Event):
    """Written by the coordinator."""

    fragment: int
    round: int
    group: tuple[str, ...]


class RoundCommitted(Event):
    """Written by every member. ``contributors`` reached every part, ``partial`` only some. A group of one
    made it alone."""

    fragment: int
    round: int
    coordinator: str
    group_size: int
    contributors: int
    partial: int
    duration_s: float
    """From this peer's READY to its knowing the outcome; this and the next three are 0 if not known."""
    begun_s: float = 0.0
    """To BEGIN."""
    parts_s: float = 0.0
    """To having averaged its own parts."""
    means_s: float = 0.0
    """To holding the mean of every part."""


class RoundCounted(Event):
    """Whose work is in a committed mean, as a certificate that the writer has checked says."""

    fragment: int
    round: int
    weights: dict[str, float]
    """By peer: its weight (tokens) times the share of the fragment whose mean holds its slice."""


class SliceMissed(Event):
    """Work of this peer is not in ``parts`` of a committed mean. ``reason``: as ``owners``, who averaged
    these, say: not_asked, late, no_room, not_awaited or hostile."""

    fragment: int
    round: int
    reason: str
    owners: tuple[str, ...]
    parts: int


class ContributionCapped(Event):
    """In a committed mean the work of ``other`` counted for a quarter of its claim, or less. Written by every
    member, of each peer at most once a minute; ``rounds``: how many since the last time. Weights are
    tokens."""

    other: str
    fragment: int
    round: int
    claimed: float
    counted: float
    median: float
    """What the median member of the round claims."""
    rounds: int = 1


class RoundAborted(Event):
    """An attempt ended without a mean: the outer gradient carries over. Written by every member."""

    fragment: int
    round: int
    reason: str


class FragmentApplied(Event):
    """An outer step reached the live parameters. ``staleness``: schedule points passed between measuring this
    peer's gradient and applying the mean (0: within its own round, 1: CO2). ``sync_delay_steps``: inner steps
    between. ``gap``: CO2's penalty divisor (1: none)."""

    fragment: int
    version: int
    contributed: bool
    staleness: int
    sync_delay_steps: int
    sync_delay_s: float
    gap: float
    momentum_norm: float


class AgreedMeasured(Event):
    """Held-out loss of the agreed parameters as this peer measured it, in its recipe's unit."""

    loss: float
    position: float
    tokens: int
    """This peer's own, as in ``Progress``."""
    duration_s: float
    """What measuring cost the training thread."""
    figures: dict[str, float] = field(default_factory=dict)
    """What else was measured, by name; 16 at most."""

    def __post_init__(self) -> None:
        check_figures(self.figures)


class CaughtUp(Event):
    """``how``: "replay" of missed rounds or whole "state" of the fragment."""

    fragment: int
    from_version: int
    to_version: int
    how: str
    donor: str
    bytes: int
    duration_s: float
    donors: int = 1
    """How many took part; ``donor`` is the one that gave most."""
    rounds_given_up: int = 0
    """At most so many rounds that it had made alone are lost: the state of others lacks them."""


class StateLoading(Event):
    """Every 2 s while agreed states of ``fragments`` are being loaded from ``donors`` peers."""

    fragments: tuple[int, ...]
    received_bytes: int
    total_bytes: int
    donors: int


class MessageRefused(Event):
    """A peer broke the rules; ``reason``: which; ``message``: the kind of message, "" if it is none of
    ours."""

    other: str
    reason: str
    detail: str = ""
    message: str = ""


class CheckpointSaved(Event):
    """This peer's checkpoint is on its disk, whole, at ``path``."""

    path: str
    versions: tuple[int, ...]
    """Outer version by fragment."""
    duration_s: float
    """How long the training thread stood still for it."""
    written_s: float = 0.0
    """From its beginning until it was whole."""


class Warned(Event):
    """Something that a person should know, in words."""

    text: str


class Paused(Event):
    """This peer rests: it keeps its place, trains nothing and fetches nothing. Again, if the ``reason``
    changes meanwhile."""

    reason: str


class Resumed(Event):
    """It goes on after ``paused_s`` seconds, which are in no other figure."""

    paused_s: float


class TrainingEnded(Event):
    """The run has had its last round. This peer waits until its work in ``fragments`` is counted, at most
    ``offers_within_s``. Then it waits until all peers agree, at most ``settles_within_s``."""

    fragments: tuple[int, ...]
    offers_within_s: float
    settles_within_s: float


THE_RUN_IS_OVER = "the run is over"
"""Why a peer that trained to the end has finished."""


class PeerFinished(Event):
    """The last event of a process. ``digest`` covers the whole agreed state, hex."""

    reason: str
    digest: str
    versions: tuple[int, ...]
    carriers: dict[str, str] = field(default_factory=dict)
    """Carrier in use per other peer when it ended."""
    peak_memory_bytes: int = 0


class Recalled(Event):
    """What this peer's older events come to, for a reader that was not there: only in reports. Reading begins
    anew with it; the newest of the older events follow and are not in its counts."""

    in_flight_s: float = 0.0
    sends: int = 0
    rounds_alone: int = 0
    """Rounds that it made with nobody else."""
    staleness: dict[str, int] = field(default_factory=dict)
    """Applied outer steps by "fragment:staleness"."""
    sync_delay_steps: dict[str, int] = field(default_factory=dict)
    skipped_sends: dict[str, int] = field(default_factory=dict)
    caught_up: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    """Microbatches, in a run with stages."""
    missed: dict[str, int] = field(default_factory=dict)
    """Exchanges with slices of it that were not counted, by reason."""


EVENT_TYPES: dict[str, type[Event]] = {event_type.kind: event_type for event_type in Event.__subclasses__()}
