"""Whom a peer knew, in its folder: asked when it joins again and no seed of its ticket answers.

Any peer is a node of the DHT and can lead to the others. The run's settings lie beside the addresses, with
the run key's signature, in case nobody keeps them. Laws: the file holds nothing that is believed: whoever
answers is as unproved as a seed, and settings are checked against the ticket. It is as small as
``MAX_ACQUAINTANCES`` peers, and readable by its owner alone.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

from p2p_co2.net.transport.addresses import is_relayed
from p2p_co2.protocol.wire.limits import MAX_RECORD_BYTES
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord
from p2p_co2.ticket import is_seed_address

MAX_ACQUAINTANCES, MAX_ADDRESSES_EACH = 16, 4
MAX_FILE_BYTES = 128 << 10


def direct_maddrs(record: PeerRecord) -> list[str]:
    """Where a peer can be dialled without a relay, as a ticket writes it."""
    return [maddr for maddr in record.maddrs if not is_relayed(maddr) and is_seed_address(maddr)]


class Acquaintances:
    """The file ``path`` for the run with this digest. ``maddrs``: as last kept; ``manifest``: the run's
    signed settings, empty if there are none."""

    def __init__(self, path: Path, run: bytes) -> None:
        self._path, self._run = path, run
        self.maddrs: tuple[str, ...] = ()
        self.manifest = b""
        self._read()

    def _read(self) -> None:
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                return
            kept = json.loads(self._path.read_text(encoding="ascii"))
            if kept["run"] != self._run.hex():
                return
            maddrs = [maddr for maddr in kept["maddrs"] if isinstance(maddr, str) and is_seed_address(maddr)]
            manifest = base64.b64decode(kept["manifest"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # a first start, or a file that is no help
        self.maddrs = tuple(maddrs[: MAX_ACQUAINTANCES * MAX_ADDRESSES_EACH])
        self.manifest = manifest[:MAX_RECORD_BYTES]

    def keep(self, records: Iterable[PeerRecord], manifest: bytes) -> bool:
        """Write whom we know now, unless that is nobody or those already kept; whether it was written. A disk
        that refuses is no trouble."""
        maddrs: list[str] = []
        for record in list(records)[:MAX_ACQUAINTANCES]:
            maddrs += direct_maddrs(record)[:MAX_ADDRESSES_EACH]
        if not maddrs or (tuple(maddrs), manifest) == (self.maddrs, self.manifest):
            return False
        self.maddrs, self.manifest = tuple(maddrs), manifest
        words = {"run": self._run.hex(), "maddrs": maddrs, "manifest": base64.b64encode(manifest).decode()}
        unfinished = self._path.with_suffix(".new")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump(words, file, indent=1)
            unfinished.replace(self._path)
        except OSError:
            return False  # the seeds are still asked
        return True
