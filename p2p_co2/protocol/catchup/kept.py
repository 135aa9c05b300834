"""What a peer keeps of a state that it has not loaded whole, beyond its own end.

The machine hands over every chunk that proved right, and asks for it when it loads the same version of the
same fragment again. Law: what a store gives back is checked like any stranger's bytes, chunk by chunk,
against the manifest of the day; so it may be torn, old or wrong, and costs at worst the download that it
would have saved.
"""

from __future__ import annotations

from typing import Protocol

from p2p_co2.protocol.wire.messages_pb2 import Manifest
from p2p_co2.system.memory import zeros


class Store(Protocol):
    """``node.kept_chunks`` has one on disk. No call raises for the disk's sake."""

    def held_version(self, fragment: int, total_bytes: int) -> int:
        """The version of a fragment's state (``total_bytes`` long) of which there are chunks; 0 if there are
        none."""

    def buffer(self, manifest: Manifest) -> memoryview:
        """Memory for what a checked manifest promises, with what was kept of it in its place."""

    def begin(self, manifest: Manifest) -> None:
        """What follows is of this promise, and of its fragment nothing else is kept."""

    def keep(self, manifest: Manifest, start: int, data: bytes) -> None:
        """Keep bytes at ``start`` that have proved right."""


class NothingKept:
    """A peer that was interrupted begins anew."""

    def held_version(self, fragment: int, total_bytes: int) -> int:
        return 0

    def buffer(self, manifest: Manifest) -> memoryview:
        return zeros(manifest.total_bytes)

    def begin(self, manifest: Manifest) -> None:
        return

    def keep(self, manifest: Manifest, start: int, data: bytes) -> None:
        return
