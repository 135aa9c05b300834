"""Chunks of states on disk while a newcomer loads them, so that one which is interrupted need not begin anew.

One file per fragment, ``fragment-<index>-version-<version>.part``, as long as the state; what is not there
yet is a hole. Laws: bounded by the model's own size; gone when the peer has caught up; nothing here is
believed (see ``catchup.Store``), so nothing is synced. A disk that refuses ends the keeping and nothing else.
The same version must still be given: see ``catchup.donor``.

Price: the state is written once, 8 bytes a parameter, on the network thread: 0.2 ms per chunk.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from p2p_co2.protocol.wire.messages_pb2 import Manifest
from p2p_co2.system.memory import zeros

_NAME = re.compile(r"fragment-(\d{1,6})-version-(\d{1,16})\.part")


class KeptChunks:
    """A ``catchup.Store`` in ``folder``, which is its own. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = False

    def held_version(self, fragment: int, total_bytes: int) -> int:
        versions = [
            version for version, path in self._files(fragment).items() if _size_bytes(path) == total_bytes
        ]
        return 0 if self._ended else max(versions, default=0)

    def resume(self, manifest: Manifest) -> memoryview | None:
        path = self._path(manifest)
        if not self._ended and _size_bytes(path) == manifest.total_bytes:
            data = zeros(manifest.total_bytes)
            with contextlib.suppress(OSError), path.open("rb") as file:  # then it is loaded again
                if file.readinto(data) == manifest.total_bytes:
                    return data
        self._begin(manifest)
        return None

    def keep(self, manifest: Manifest, start: int, data: bytes) -> None:
        if self._ended:
            return
        try:
            file = os.open(self._path(manifest), os.O_WRONLY)
            try:
                os.pwrite(file, data, start)
            finally:
                os.close(file)
        except OSError:
            self.end()

    def end(self) -> None:
        """Keep nothing any more, and remove what there is. May be called twice."""
        self._ended = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, manifest: Manifest) -> None:
        """A file with nothing but a hole, in the place of the fragment's earlier one."""
        if self._ended:
            return
        try:
            for path in self._files(manifest.fragment).values():
                path.unlink(missing_ok=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path(manifest).open("wb") as file:
                file.truncate(manifest.total_bytes)
        except OSError:
            self.end()

    def _files(self, fragment: int) -> dict[int, Path]:
        """By version."""
        try:
            paths = list(self._folder.iterdir())
        except OSError:
            return {}  # nothing was kept yet
        named = [(found, path) for path in paths if (found := _NAME.fullmatch(path.name))]
        return {int(found[2]): path for found, path in named if int(found[1]) == fragment}

    def _path(self, manifest: Manifest) -> Path:
        return self._folder / f"fragment-{manifest.fragment}-version-{manifest.version}.part"


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
