"""All events of a simulated swarm in one stream: counted, digested, shown to whoever asks, written if wanted.

Law: the digest is the sha256 of the very bytes of ``events.jsonl``, so equal digests mean equal runs, event
by event. Price: about 10 microseconds an event for its JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry.events import Event

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class EventLog:
    """``path``: where ``events.jsonl`` goes, None for nowhere. ``readers`` get every event, ``readers_of``
    those of one type. ``digests`` False and no path: nothing is serialised. Raises ``EnvironmentFault`` if
    the file cannot be made."""

    def __init__(self, path: Path | None = None, digests: bool = True) -> None:
        self._serialises = digests or path is not None
        self.counts: Counter[str] = Counter()
        self.readers: list[Callable[[Event], None]] = []
        self.readers_of: defaultdict[type[Event], list[Callable[[Any], None]]] = defaultdict(list)
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._file = path.open("wb")
            except OSError as error:
                raise EnvironmentFault(
                    f"cannot write {path}: {error.strerror}; choose another folder with --folder"
                ) from None

    def write(self, event: Event) -> None:
        self.counts[event.kind] += 1
        if self._serialises:
            self._serialise(event)
        for reader in self.readers:
            reader(event)
        for reader in self.readers_of[type(event)]:
            reader(event)

    def _serialise(self, event: Event) -> None:
        record = {"kind": event.kind, **vars(event)}
        try:
            line = _ENCODER.encode(record).encode("ascii") + b"\n"
        except ValueError:  # a number that is not finite
            line = _ENCODER.encode(dict(map(_finite, record.items()))).encode("ascii") + b"\n"
        self._digest.update(line)
        if self._file is not None:
            self._file.write(line)

    def digest(self) -> str:
        """sha256 of everything written so far, hex; empty without ``digests`` and a path."""
        return self._digest.hexdigest() if self._serialises else ""

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(field: tuple[str, object]) -> tuple[str, object]:
    name, value = field
    return name, None if isinstance(value, float) and not math.isfinite(value) else value
