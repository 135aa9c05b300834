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
        try:
            self._file = path.open("wb") if path is not None else None
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write {path}: {error.strerror}; choose another folder with --folder"
            ) from None

    def write(self, event: Event) -> None:
        self.counts[event.kind] += 1
        if self._serialises:
            fields = {name: _finite(value) for name, value in vars(event).items()}
            line = json.dumps({"kind": event.kind, **fields}, separators=(",", ":")).encode("ascii") + b"\n"
            self._digest.update(line)
            if self._file is not None:
                self._file.write(line)
        for reader in (*self.readers, *self.readers_of[type(event)]):
            reader(event)

    def digest(self) -> str:
        """sha256 of everything written so far, hex; empty without ``digests`` and a path."""
        return self._digest.hexdigest() if self._serialises else ""

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
