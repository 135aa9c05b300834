"""A peer's record of its own credit, a file in its folder: ``credit-<end of its id>-<group>.jsonl``.

Each round in which it was counted is one line more (``protocol.credit``). A line that a kill tore is dropped
at the next start, and a round that is replayed then counts after all.

Law: the newest rounds keep their certificates, all rounds are in the sums. Price: 1 kB a round of two
members, 4 kB of eight, at most ``Holder.most_bytes``; no fsync but where the older half is dropped. A round
that a peer missed and loads as part of a whole state is not in its record.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from p2p_co2.protocol.credit import CreditLine, Holder, credit_line, line_of, whole_lines
from p2p_co2.wire.messages_pb2 import Decision


class CreditFile:
    """``warn`` hears, once, that the disk refuses; the rounds meanwhile are not counted."""

    def __init__(self, folder: Path, holder: Holder, warn: Callable[[str], None]) -> None:
        self._path = folder / f"credit-{holder.peer[-6:]}-{holder.group.hex()[:12]}.jsonl"
        self._holder = holder
        self._warn = warn
        self._lock = threading.Lock()
        self._known: set[str] | None = None
        """Digests of the outcomes that are counted; None: not read since the disk last refused."""
        self._last: CreditLine | None = None
        self._has_failed = False

    def take(self, decision: Decision) -> None:
        """Count a committed round, whose certificate was checked. Any thread; it waits for the disk."""
        with self._lock:
            try:
                self._take(decision)
            except OSError as error:
                self._known = None
                if not self._has_failed:
                    self._warn(f"credit is not written to {self._path}: {error.strerror}; free its disk")
                self._has_failed = True

    def _take(self, decision: Decision) -> None:
        if self._known is None:
            text = self._path.read_bytes() if self._path.exists() else b""
            self._write(list(whole_lines(text)))
        line = credit_line(self._holder, decision, time.time(), self._last)
        if line is None or self._known is None or line.outcome in self._known:
            return
        with self._path.open("ab") as file:
            file.write(line.model_dump_json().encode() + b"\n")
        self._known.add(line.outcome)
        self._last = line
        if self._path.stat().st_size > self._holder.most_bytes:
            lines = list(whole_lines(self._path.read_bytes()))
            self._write(lines[len(lines) // 2 :])

    def _write(self, lines: list[CreditLine]) -> None:
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.writelines(one.model_dump_json().encode() + b"\n" for one in (self._holder, *lines))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        self._known = {line.outcome for line in lines}
        self._last = lines[-1] if lines else None


def credit_files(folder: Path) -> list[Path]:
    """The records in a peer's folder, one for each run or stage, the newest last."""
    return sorted(folder.glob("credit-*.jsonl"), key=lambda path: path.stat().st_mtime)


def read_credit(path: Path) -> tuple[Holder, list[CreditLine]]:
    """A record on this disk. Raises ``RemoteProtocolError`` for what is none."""
    text = path.read_bytes()
    return line_of(Holder, text.partition(b"\n")[0]), list(whole_lines(text))


def last_counted(folder: Path) -> CreditLine | None:
    """The newest round in which the peer of ``folder`` was counted, with its sums; None if there is none."""
    for path in credit_files(folder)[-1:]:
        with path.open("rb") as file:
            # longer than any line
            file.seek(max(0, os.fstat(file.fileno()).st_size - Holder.most_bytes // 8))
            return next(whole_lines(b"\n".join(file.read().split(b"\n")[:-4:-1])), None)
    return None
