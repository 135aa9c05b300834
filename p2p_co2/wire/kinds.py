"""The table of messages: one line for each kind that an envelope may carry; others are refused.

A line says which machine a kind is for, how large it may be, and what it costs its sender.
``kind_of(message)`` gives a message's line, ``KINDS`` all of them by the name of the envelope's field.

Structural checks that need no state of a machine are here: ``check`` raises ``RemoteProtocolError``, and what
it has read goes on with the message (``Opened.said``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from google.protobuf.message import Message

from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.limits import MAX_MESSAGE_BYTES, MAX_REVOCATION_BYTES, MAX_STATUS_BYTES
from p2p_co2.wire.model_table import MAX_TABLE_BYTES, check_rows
from p2p_co2.wire.status import read_status


class Machine(Enum):
    """Which machine a message is for."""

    MEMBERSHIP = auto()
    ROUNDS = auto()
    CATCHUP = auto()
    PIPELINE = auto()


class Cost(Enum):
    """What a message costs its sender: a unit and more by its size, next to nothing, or nothing as long as it
    is waited for."""

    CONTROL = auto()
    QUESTION = auto()
    BULK = auto()


class Role(Enum):
    """What a piece is a piece of: its ``data`` lies beside the message (``envelope``)."""

    SLICE = auto()
    MEAN = auto()
    CROSSING = auto()


@dataclass(frozen=True)
class Kind:
    """One line. ``is_quiet``: it moves no timer but its own machine's; ``is_asked_for``: the receiver asked
    for it, and may be asked to take it."""

    type: type[Message]
    machine: Machine
    cost: Cost = Cost.CONTROL
    most_bytes: int = MAX_MESSAGE_BYTES
    role: Role | None = None
    is_quiet: bool = False
    is_asked_for: bool = False
    check: Callable[[Any], object] = lambda body: None

    @property
    def is_bulk(self) -> bool:
        """Whether it waits for its turn, behind control messages."""
        return self.cost is Cost.BULK

    @cached_property
    def name(self) -> str:
        """Of the envelope's field."""
        return _FIELDS[self.type].name

    @cached_property
    def number(self) -> int:
        """Of the envelope's field."""
        return _FIELDS[self.type].number


def _read_status(said: wire.Ping | wire.Pong) -> object:
    return read_status(said.status)


_BODY = wire.Envelope.DESCRIPTOR.oneofs_by_name["body"]
_FIELDS = {type(getattr(wire.Envelope(), field.name)): field for field in _BODY.fields}
_TABLE = (
    Kind(wire.Ping, Machine.MEMBERSHIP, most_bytes=MAX_STATUS_BYTES, is_quiet=True, check=_read_status),
    Kind(wire.Pong, Machine.MEMBERSHIP, most_bytes=MAX_STATUS_BYTES, is_quiet=True, check=_read_status),
    Kind(wire.Revoked, Machine.MEMBERSHIP, most_bytes=2 * MAX_REVOCATION_BYTES),
    Kind(wire.Leave, Machine.MEMBERSHIP, most_bytes=MAX_STATUS_BYTES, is_quiet=True),
    Kind(wire.ModelTable, Machine.MEMBERSHIP, most_bytes=2 * MAX_TABLE_BYTES, check=check_rows),
    Kind(wire.Ready, Machine.ROUNDS),
    Kind(wire.Waiting, Machine.ROUNDS),
    Kind(wire.Begin, Machine.ROUNDS),
    Kind(wire.Part, Machine.ROUNDS, Cost.BULK, role=Role.SLICE),
    Kind(wire.Mean, Machine.ROUNDS, Cost.BULK, role=Role.MEAN),
    Kind(wire.Result, Machine.ROUNDS, is_quiet=True),
    Kind(wire.Decision, Machine.ROUNDS),
    Kind(wire.AskOutcome, Machine.ROUNDS),
    Kind(wire.Behind, Machine.ROUNDS),
    Kind(wire.Fetch, Machine.CATCHUP, Cost.QUESTION),
    Kind(wire.Manifest, Machine.CATCHUP, is_asked_for=True),
    Kind(wire.Chunk, Machine.CATCHUP, Cost.BULK, is_asked_for=True),
    Kind(wire.Refusal, Machine.CATCHUP),
    Kind(wire.Neighbour, Machine.PIPELINE, is_quiet=True),
    Kind(wire.Forward, Machine.PIPELINE, Cost.BULK, role=Role.CROSSING, is_quiet=True),
    Kind(wire.Backward, Machine.PIPELINE, Cost.BULK, role=Role.CROSSING, is_quiet=True),
    Kind(wire.Declined, Machine.PIPELINE, is_quiet=True),
    Kind(wire.Dropped, Machine.PIPELINE, is_quiet=True),
)
KINDS = {kind.name: kind for kind in _TABLE}
_OF_TYPE = {kind.type: kind for kind in _TABLE}


def kind_of(message: Message) -> Kind:
    """The table's line for a message that an envelope may carry."""
    return _OF_TYPE[message.__class__]
