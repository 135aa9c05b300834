"""Events on disk: one JSON object per line, written by one process, read by anybody at any time.

Laws: a whole event is a whole line. What ``Journal`` wrote, ``read_events`` gives back equal; floats that are
not finite travel as null and come back as NaN. A file is hostile until checked, so a reader counts what it
cannot use and never raises for content. Writing never raises into the caller. Format: JSON Lines, RFC 8259 in
ASCII. Price: some 26 MB a day and peer; no fsync, so a power cut may lose the last lines.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.events import EVENT_TYPES, Event

MAX_LINE_BYTES = 1 << 18
"""A longer line is no event of ours: a reader drops it without holding it."""
MAX_ITEMS = 4096
"""Most entries of a list or table in one event."""
MAX_INTEGER = 2**63 - 1
RETRY_S = 10.0


class Journal:
    """Appends events to ``path``; may be called from any thread.

    Raises ``EnvironmentFault`` if the file cannot be opened. After that nothing raises. While the disk
    refuses, events are dropped, a begun line is taken back, and ``failed`` says why. It is tried again every
    ``RETRY_S``. Events after ``close`` are dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: str | None = None
        self._retry_at = 0.0
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(path, flags, 0o644)
            torn = _ends_torn(path)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write the event journal {path}: {error.strerror}; choose a folder you may write to"
            ) from None
        if torn:
            # A process that died in mid-line left no line end: our first event would be lost with its last.
            self._append(b"\n")

    def write(self, event: Event) -> None:
        """Append one event as one line. Raises nothing for the disk's sake; see ``failed``."""
        self._append(event_line(event))

    def _append(self, line: bytes) -> None:
        with self._lock:
            if self._file is None or time.monotonic() < self._retry_at:
                return
            before = None
            try:
                before = os.fstat(self._file)
                while line:
                    line = line[os.write(self._file, line) :]
                self.failed = None
            except OSError as error:
                self.failed = f"events are not written to {self.path}: {error.strerror}"
                self._retry_at = time.monotonic() + RETRY_S
                if before is not None and stat.S_ISREG(before.st_mode):
                    with suppress(OSError):
                        os.ftruncate(self._file, before.st_size)  # no torn line

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_error: object) -> None:
        self.close()


def _ends_torn(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def event_line(event: Event) -> bytes:
    """The event as one line of JSON, its line end included."""
    return json.dumps(_without_nan(event.to_json()), separators=(",", ":")).encode("ascii") + b"\n"


def _without_nan(value: Any) -> Any:
    """``value`` with null for every float that JSON has no word for, in tables and lists too."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
    return value


class Tail:
    """The events of one journal, also while it grows. A file that is not there yet has no events yet; one
    that became shorter is read anew. ``skipped`` counts, by cause, the lines that were no events. It holds at
    most ``MAX_LINE_BYTES`` of an unfinished line."""

    def __init__(self, path: Path, newest_bytes: int = 0) -> None:
        self.path = path
        self.skipped: Counter[str] = Counter()
        self._offset = max(0, path.stat().st_size - newest_bytes) if newest_bytes else 0
        self._rest = b""
        self._dropping = False

    def new_events(self) -> list[Event]:
        """The events whose lines were completed since the last call. Raises nothing: an unreadable file
        counts as skipped."""
        events: list[Event] = []
        try:
            events.extend(self)
        except FileNotFoundError:
            pass  # the peer has not started yet: nothing to read, nothing wrong
        except OSError:
            self.skipped["file unreadable"] += 1
        return events

    def __iter__(self) -> Iterator[Event]:
        """The same, one by one."""
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0
                self._rest = b""
                self._dropping = False
            file.seek(self._offset)
            while data := file.read(MAX_LINE_BYTES):
                self._offset += len(data)
                yield from self._cut(data)

    def _cut(self, data: bytes) -> Iterator[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._dropping:
                self._dropping = False
            elif len(line) > MAX_LINE_BYTES:
                self.skipped["line too long"] += 1
            elif line:
                try:
                    yield parse_event(line)
                except ValueError as error:
                    self.skipped[str(error)] += 1
        if len(self._rest) > MAX_LINE_BYTES:
            self.skipped["line too long"] += not self._dropping
            self._dropping = True
        if self._dropping:
            self._rest = b""


def read_events(path: Path, newest_bytes: int = 0) -> Tail:
    """All events of a journal, in order, or those in its ``newest_bytes``, to be iterated once. Unknown
    kinds, damaged lines and a torn last line are skipped. Raises ``EnvironmentFault`` if the file cannot be
    opened."""
    try:
        path.open("rb").close()
        return Tail(path, newest_bytes)
    except OSError as error:
        raise EnvironmentFault(f"cannot read the event journal {path}: {error.strerror}") from None


def parse_event(line: bytes) -> Event:
    """One line as an event; raises ``ValueError`` with a short cause if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("not an object")
    kind = record.get("kind")
    # A name that cannot be a key (a list, say) is as unknown as any other.
    event_type = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if event_type is None:
        raise ValueError("unknown kind")
    checks = _CHECKS[event_type].items()
    values: dict[str, Any] = {name: check(record[name]) for name, check in checks if name in record}
    try:
        event = event_type(**values)
    except TypeError:
        raise ValueError("missing field") from None
    if not math.isfinite(event.at):
        raise ValueError("no time")
    return event


_Check = Callable[[Any], Any]
"""Lets a value of JSON pass, as the field's type; raises ``ValueError``."""


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, float):
        return float(_integer(value))
    return value if math.isfinite(value) else math.nan


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("wrong type")
    if abs(value) > MAX_INTEGER:
        raise ValueError("number too large")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("wrong type")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("wrong type")
    # A lone surrogate is legal JSON and would raise in the first print.
    return value.encode("utf-8", "replace").decode("utf-8")


def _each(kind: type[list[Any]] | type[dict[str, Any]], check: _Check) -> _Check:
    """The check of a list or of a table from text, of which ``check`` lets each item pass."""

    def checked(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError("wrong type")
        if len(value) > MAX_ITEMS:
            raise ValueError("too many items")
        if isinstance(value, dict):
            return {_text(key): check(item) for key, item in value.items()}
        return tuple(check(item) for item in value)

    return checked


_OF_TYPE: dict[object, _Check] = {float: _number, int: _integer, bool: _flag, str: _text}
_OF_TYPE |= {tuple[kind, ...]: _each(list, _OF_TYPE[kind]) for kind in (int, float, str)}  # type: ignore[valid-type]
_OF_TYPE |= {dict[str, kind]: _each(dict, _OF_TYPE[kind]) for kind in (str, int, float)}  # type: ignore[valid-type]
_CHECKS: dict[type[Event], dict[str, _Check]] = {
    event_type: {
        name: _OF_TYPE[hint]
        for name, hint in typing.get_type_hints(event_type).items()
        if typing.get_origin(hint) is not typing.ClassVar
    }
    for event_type in EVENT_TYPES.values()
}
