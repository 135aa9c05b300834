"""What the models of two peers must have in common, row by row, and the first difference in words.

Each peer names its model by ``ModelSummary.digest`` in every heartbeat. Where two differ, each sends the
other its ``message`` once, so that both can say which parameter it is.

Law: equal digests mean equal names, shapes, dtypes, values of frozen parameters, and equal fragments; a
parameter that is trained counts without its values, which are what the swarm agrees on. Price: a table of
more than ``MAX_TABLE_BYTES`` is cut short, and a difference behind that has no name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from p2p_co2.digest import digest
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.limits import MAX_STRING
from p2p_co2.wire.messages_pb2 import ModelRow, ModelTable

MAX_TABLE_BYTES = 256 << 10
MAX_DIMENSIONS = 16
VALUES_DIGEST_BYTES = 16
MOST_SHOWN = 100
"""Characters of a stranger's word that are shown."""
SAME_BASE = "load the same base as the others, of the same revision and dtype"


class Row(NamedTuple):
    """One parameter. ``values``: ``VALUES_DIGEST_BYTES`` that name a frozen one's; empty for a trained
    one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool
    values: bytes = b""


class Difference(NamedTuple):
    """``name``: the first parameter that differs, "" if it has none; ``problem``: how, and what to do."""

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}" if self.name else self.problem


@dataclass(frozen=True)
class ModelSummary:
    """``rows``: all parameters in the module's order; ``plan``: the digest of its cut into fragments;
    ``numel``: elements that are trained."""

    rows: tuple[Row, ...]
    plan: bytes
    numel: int

    @cached_property
    def digest(self) -> int:
        """64 bits, never 0: enough against accidents; who wants to lie says whatever it likes."""
        rows = "\n".join(
            f"{row.name}\0{row.shape}\0{row.dtype}\0{row.is_trained}\0{row.values.hex()}" for row in self.rows
        )
        return int.from_bytes(digest(b"p2p-co2 model\0", self.plan, rows.encode())[:8], "little") or 1

    @cached_property
    def message(self) -> ModelTable:
        """What a peer with another model is sent."""
        trained = sum(row.is_trained for row in self.rows)
        table = ModelTable(model=self.digest, tensors=trained, numel=self.numel)
        size_bytes = 0
        for row in self.rows:
            said = ModelRow(
                name=row.name, shape=row.shape, dtype=row.dtype, trained=row.is_trained, digest=row.values
            )
            size_bytes += said.ByteSize() + 8
            if size_bytes > MAX_TABLE_BYTES:
                break
            table.rows.append(said)
        return table

    def difference(self, table: ModelTable) -> Difference:
        """How this model differs from the one that ``table`` (checked: ``check_rows``) describes, as this
        peer sees it."""
        theirs = [
            Row(row.name, tuple(row.shape[:]), row.dtype, row.trained, row.digest) for row in table.rows
        ]
        there = {row.name: row for row in theirs}
        here = {row.name for row in self.rows}
        mine = self.rows[: len(theirs)] if len(theirs) < len(self.rows) else self.rows  # it may be cut short
        trained = sum(row.is_trained for row in self.rows)
        sizes = (
            f"trained parameters: {self.numel:,} here (tensors: {trained}), "
            f"{table.numel:,} there (tensors: {table.tensors})"
        )
        for row in mine:
            if row.name not in there:
                return Difference(row.name, f"there is none of this name there; {sizes}")
            if problem := _in_form(row, there[row.name]):
                return Difference(row.name, f"{problem}; {sizes}")
        for row in theirs:
            if row.name not in here:
                return Difference(_shown(row.name), f"there is none of this name here; {sizes}")
        if frozen := [row.name for row in mine if row.values != there[row.name].values]:
            more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
            return Difference(frozen[0], f"the frozen values{more} differ from the others'; {SAME_BASE}")
        return Difference("", "the same parameters, but in another order or grouping of modules")


def _in_form(here: Row, there: Row) -> str:
    """How two parameters of one name differ, but for their values; "" if they do not."""
    if here.shape != there.shape:
        return f"shape {here.shape} here and {there.shape} there"
    if here.is_trained != there.is_trained:
        words = "frozen", "trained"
        return f"{words[here.is_trained]} here and {words[there.is_trained]} there"
    if here.dtype != there.dtype:
        cure = "" if here.is_trained else f"; {SAME_BASE}"
        return f"{here.dtype} here and {_shown(there.dtype)} there{cure}"
    return ""


def check_rows(table: ModelTable) -> None:
    """Raise ``RemoteProtocolError`` for rows out of bounds."""
    for row in table.rows:
        if (
            max(len(row.name), len(row.dtype)) > MAX_STRING
            or len(row.shape) > MAX_DIMENSIONS
            or len(row.digest) not in (0, VALUES_DIGEST_BYTES)
        ):
            raise RemoteProtocolError("bad model table", "a row out of bounds")


def _shown(word: str) -> str:
    """A stranger's word for people to read."""
    return "".join(character if character.isprintable() else "?" for character in word[:MOST_SHOWN])
