"""Filling a small disk, which the fixture ``small_disk`` gives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def fill(disk: Path) -> None:
    """Leave no room on ``disk``; removing the file "filling" gives it back."""
    with (disk / "filling").open("wb", buffering=0) as file:
        for size in (1 << 16, 1024, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
