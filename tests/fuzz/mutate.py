"""Wrong messages out of right ones, as a tape of bytes decides.

The tape comes from hypothesis or from a coverage-guided fuzzer; an empty one changes nothing. Changes know
the schema (a field of the right type with a value at its edge, a list too long, a part of another message),
so they get past parsing into what reads the fields; some work on the raw bytes all the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message

from p2p_co2.protocol.catchup.manifest import MANIFEST_CONTEXT, content_of
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.messages_pb2 import Envelope, Outcome
from tests.certificates import certify

MOST_COPIES = 5000
_INTEGERS = {
    Field.TYPE_UINT32: 32, Field.TYPE_UINT64: 64, Field.TYPE_ENUM: 31, Field.TYPE_BOOL: 1,
}  # fmt: skip


class Tape:
    """Decisions, one after the other; ``over`` once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        if self.over:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def choose(self, count: int) -> int:
        """0 to ``count - 1``."""
        return (self.byte() << 8 | self.byte()) % count if count > 256 else self.byte() % count


class Mutator:
    """``known`` grows with the right messages it sees: by type, a few, to take parts from."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._known: dict[str, list[Message]] = {}

    def saw(self, data: bytes) -> str:
        """Remember a right message; returns its kind."""
        envelope = Envelope.FromString(data)
        kind = envelope.WhichOneof("body") or ""
        for message in _messages_in(envelope):
            kept = self._known.setdefault(message.DESCRIPTOR.name, [])
            kept.append(message)
            del kept[:-4]
        return kind

    def mutate(self, data: bytes, liar: Identity) -> bytes:
        """One to three changes; ``liar`` may sign them."""
        for _ in range(1 + self.tape.choose(3)):
            data = self._bytes(data) if self.tape.choose(6) == 0 else self._fields(data, liar)
        return data

    def mutate_one(self, right: Message) -> bytes:
        """One to three changes to a message that travels without an envelope."""
        wrong = type(right)()
        wrong.CopyFrom(right)
        for _ in range(1 + self.tape.choose(3)):
            inside = _messages_in(wrong)
            self._change(inside[self.tape.choose(len(inside))])
        data = wrong.SerializeToString()
        return self._bytes(data) if self.tape.choose(6) == 0 else data

    # ---- fields

    def _fields(self, data: bytes, liar: Identity) -> bytes:
        try:
            envelope = Envelope.FromString(data)
        except DecodeError:
            return self._bytes(data)
        if envelope.WhichOneof("body") == "decision" and self.tape.choose(2):
            self._outcome(envelope, liar)
            return envelope.SerializeToString()
        message: Message = envelope
        if self.tape.choose(32):
            message = getattr(envelope, envelope.WhichOneof("body") or "ping")
        while self.tape.choose(3):
            inside = [value for field, value in message.ListFields() if field.type == Field.TYPE_MESSAGE]
            if not inside:
                break
            chosen = inside[self.tape.choose(len(inside))]
            if not isinstance(chosen, Message):
                chosen = chosen[self.tape.choose(len(chosen))]
            message = chosen
        self._change(message)
        if envelope.WhichOneof("body") == "manifest" and self.tape.choose(2):
            with suppress(struct.error):  # numbers that no signed content can hold
                content = envelope.run + content_of(envelope.manifest)
                envelope.manifest.signature = liar.sign(MANIFEST_CONTEXT, content)
        return envelope.SerializeToString()

    def _outcome(self, envelope: Envelope, liar: Identity) -> None:
        """What a signature covers can be changed too: then the signature is wrong, or another's."""
        outcome = Outcome()
        try:
            outcome.ParseFromString(envelope.decision.outcome)
        except DecodeError:
            return
        self._change(outcome)
        if self.tape.choose(2):
            envelope.decision.CopyFrom(certify(outcome, liar))
        else:
            envelope.decision.outcome = outcome.SerializeToString()

    def _change(self, message: Message) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = fields[self.tape.choose(len(fields))]
        try:
            if field.is_repeated:
                self._repeated(message, field)
            elif field.type == Field.TYPE_MESSAGE:
                self._part_of_another(message, field)
            else:
                setattr(message, field.name, self._scalar(field, getattr(message, field.name)))
        except (ValueError, TypeError):  # a value that this field cannot hold: leave it as it is
            return

    def _repeated(self, message: Message, field: Field) -> None:
        values: Any = getattr(message, field.name)
        what = self.tape.choose(6)
        if what == 0 or not values:
            message.ClearField(field.name)
            if what:
                self._grow(values, field, 1 + self.tape.choose(3))
        elif what == 1:
            del values[self.tape.choose(len(values))]
        elif what == 2:
            values.append(values[self.tape.choose(len(values))])
        elif what == 3:
            values.extend([values[-1]] * self.tape.choose(MOST_COPIES))
        elif what == 4:
            held = list(values)
            del values[:]
            values.extend(reversed(held))
        elif field.type == Field.TYPE_MESSAGE:
            self._change(values[self.tape.choose(len(values))])
        else:
            index = self.tape.choose(len(values))
            values[index] = self._scalar(field, values[index])

    def _grow(self, values: Any, field: Field, count: int) -> None:
        for _ in range(count):
            if field.type == Field.TYPE_MESSAGE:
                self._change(values.add())
            else:
                values.append(self._scalar(field, _zero(field)))

    def _part_of_another(self, message: Message, field: Field) -> None:
        others = self._known.get(field.message_type.name, [])
        if others and self.tape.choose(4):
            getattr(message, field.name).CopyFrom(others[self.tape.choose(len(others))])
        else:
            message.ClearField(field.name)

    def _scalar(self, field: Field, value: Any) -> Any:
        if field.type in _INTEGERS:
            top = (1 << _INTEGERS[field.type]) - 1
            edges = (0, 1, 2, 63, 64, 65, 1 << 20, (1 << 31) - 1, top - 1, top, value + 1, max(0, value - 1))
            return min(top, edges[self.tape.choose(len(edges))])
        if field.type == Field.TYPE_DOUBLE:
            edges = (
                0.0,
                -1.0,
                math.nan,
                math.inf,
                -math.inf,
                1e-320,
                1e300,
                5e-1,
                value * 2,
                -value,
                value + 1,
            )
            return edges[self.tape.choose(len(edges))]
        if field.type == Field.TYPE_STRING:
            text = (
                "",
                "x",
                "x" * 65,
                "x" * 600,
                "\0\n\x1b[2J",
                value[:-1],
                value + "1",
                value.swapcase(),
                "é" * 40,
            )
            return text[self.tape.choose(len(text))]
        return self._bytes(value)

    # ---- bytes

    def _bytes(self, data: bytes) -> bytes:
        tape = self.tape
        ways: tuple[Callable[[], bytes], ...] = (
            lambda: b"",
            lambda: data[: tape.choose(len(data) + 1)],
            lambda: data + bytes((tape.byte(),)) * tape.choose(70_000),
            lambda: _changed(data, tape.choose(max(1, len(data))), tape.byte()),
            lambda: data[:16] * tape.choose(100),
            lambda: data[tape.choose(len(data) + 1) :],
            lambda: data + data,
            lambda: bytes(32),
        )
        return ways[tape.choose(len(ways))]()


def _changed(data: bytes, index: int, by: int) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[index] ^= by or 1
    return bytes(changed)


def _zero(field: Field) -> Any:
    return "" if field.type == Field.TYPE_STRING else b"" if field.type == Field.TYPE_BYTES else 0


def _messages_in(message: Message) -> list[Message]:
    found = [message]
    for field, value in message.ListFields():
        if field.type == Field.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                found += _messages_in(inner)
    return found
