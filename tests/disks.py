"""Filling a small disk, which the fixture ``small_disk`` gives."""

from __future__ import annotations

from pathlib import Path


def fill(disk: Path) -> None:
    """Leave no room on ``disk``; removing the file "filling" gives it back."""
    with (disk / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            return
