"""Wrong messages out of right ones, by the schema's own descriptors: a new field or kind is tried without a
word here.

``each`` makes one message for each wrong value of each field; ``Wrong`` a few of those changes together, and
changes of the raw bytes, as ``chance`` decides.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from p2p_co2.protocol.catchup.manifest import MANIFEST_CONTEXT, content_of
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.messages_pb2 import Envelope, Outcome
from tests.certificates import certify

M = TypeVar("M", bound=Message)
MANY = 5000
INTEGER_BITS = {
    Field.CPPTYPE_UINT32: 32,
    Field.CPPTYPE_UINT64: 64,
    Field.CPPTYPE_ENUM: 31,
    Field.CPPTYPE_BOOL: 1,
}
DOUBLES = (0.0, -0.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e-320, 1e300)
TEXTS = ("", "x", "x" * 65, "x" * 600, "\0\n\x1b[2J", "é" * 40)


def copied(message: M) -> M:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def messages_in(message: Message) -> list[Message]:
    """It, and all that are set inside."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                found += messages_in(inner)
    return found


def values_of(field: Field, value: Any) -> list[Any]:
    """Values at the edges of a scalar field, or beyond what it means; an enum's unknown ones, too."""
    if field.cpp_type in INTEGER_BITS:
        top = (1 << INTEGER_BITS[field.cpp_type]) - 1
        edges = (0, 1, 2, 63, 64, 65, 1 << 20, (1 << 31) - 1, top - 1, top, value + 1, value - 1)
        return sorted({edge for edge in edges if 0 <= edge <= top})
    if field.cpp_type == Field.CPPTYPE_DOUBLE:
        return [*DOUBLES, value * 2, -value, value + 1]
    if field.type == Field.TYPE_STRING:
        return [*TEXTS, value[:-1], value + "1", value.swapcase()]
    flipped = bytes(value[:-1]) + bytes((value[-1] ^ 1,)) if value else b"\1"
    return [b"", value[:-1], value + b"x", flipped, value * 2, bytes(32), bytes(70_000)]


def changes(message: Message) -> Iterator[tuple[str, Callable[[], object]]]:
    """What can be wrong in the fields of ``message`` itself: (field, what makes it so)."""
    for field in message.DESCRIPTOR.fields:
        held: Any = getattr(message, field.name)
        ways: list[Callable[[], object]] = [partial(message.ClearField, field.name)]
        if not field.is_repeated:
            if field.message_type is None:
                ways += [partial(setattr, message, field.name, value) for value in values_of(field, held)]
            else:
                ways.append(held.SetInParent)
        elif field.message_type is not None:
            ways += [
                held.add,
                partial(_repeat, held, held[-1:] or [GetMessageClass(field.message_type)()], MANY),
            ]
        else:
            some = list(held) or ["" if field.type == Field.TYPE_STRING else field.default_value or 0]
            some = some if field.type != Field.TYPE_BYTES or held else [b""]
            for value in values_of(field, some[-1]):
                ways.append(partial(_repeat, held, [value], 1))
            ways.append(partial(_repeat, held, some[-1:], MANY))
        if field.is_repeated and len(held) > 1:
            ways += [held.pop, held.reverse]
        for way in ways:
            yield field.full_name, way


def _repeat(held: Any, values: list[Any], times: int) -> None:
    held.extend(values * times)


def each(right: M) -> Iterator[tuple[str, Callable[[], M]]]:
    """(field, what makes the message), for each wrong value of each field of ``right`` and of all inside."""

    def make(place: int, number: int) -> M:
        wrong = copied(right)
        list(changes(messages_in(wrong)[place]))[number][1]()
        return wrong

    for place, inner in enumerate(messages_in(right)):
        for number, (name, _) in enumerate(changes(inner)):
            yield name, partial(make, place, number)


class Wrong:
    """One to three changes at a time. ``saw`` shows it right messages, to take parts from."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._known: dict[str, list[Message]] = {}

    def saw(self, data: bytes) -> str:
        """Remember parts of a right message; returns its kind."""
        envelope = Envelope.FromString(data)
        for message in messages_in(envelope):
            kept = self._known.setdefault(message.DESCRIPTOR.name, [])
            kept.append(message)
            del kept[:-4]
        return envelope.WhichOneof("body") or ""

    def message(self, right: M) -> M:
        wrong = copied(right)
        for _ in range(self._chance.randint(1, 3)):
            inside = messages_in(wrong)
            # The envelope's own fields are few, and wrong ones are seen at once.
            inner = self._chance.choice(inside[1:] if self._chance.random() < 0.95 and inside[1:] else inside)
            others = self._known.get(inner.DESCRIPTOR.name, [])
            if others and inner is not wrong and self._chance.random() < 0.25:
                inner.CopyFrom(self._chance.choice(others))
            elif some := list(changes(inner)):
                self._chance.choice(some)[1]()
        return wrong

    def bytes(self, data: bytes) -> bytes:
        cut = self._chance.randint(0, len(data))
        ways = (b"", data[:cut], data[cut:], data * 2, data[:16] * 99, bytes(32), data + bytes(70_000))
        return self._chance.choice((*ways, data[:cut] + self._chance.randbytes(1) + data[cut + 1 :]))

    def envelope(self, data: bytes, liar: Identity) -> bytes:
        """A right envelope made wrong; ``liar`` may sign what is signed inside."""
        try:
            right = Envelope.FromString(data)
        except DecodeError:
            return self.bytes(data)
        if right.WhichOneof("body") == "decision" and self._chance.random() < 0.5:
            outcome = self.message(Outcome.FromString(right.decision.outcome))
            right.decision.outcome = outcome.SerializeToString()
            if self._chance.random() < 0.5:
                right.decision.CopyFrom(certify(outcome, liar))
            return right.SerializeToString()
        wrong = self.message(right)
        if wrong.WhichOneof("body") == "manifest" and self._chance.random() < 0.5:
            with suppress(struct.error):  # numbers that no signed content can hold
                content = wrong.run + content_of(wrong.manifest)
                wrong.manifest.signature = liar.sign(MANIFEST_CONTEXT, content)
        made = wrong.SerializeToString()
        return self.bytes(made) if self._chance.random() < 0.2 else made
