"""What may stand in the DHT: records that prove who wrote them.

Every record is an entry (key, subkey = peer id of the writer, value = ``Signed`` by that peer). Three kinds:
where a peer can be reached, what the run is (only the run's key may write it), and where the run is. Whoever
stores or reads a record checks it, so a forged one gets nowhere, and nobody overwrites another's entry. A
position outlives its writer: with nobody left it is how a newcomer knows that the run was trained already.

Peers are spread over ``PEER_SHARDS`` keys by the digest of their id: the DHT answers with all entries of a
key at once. Everything is bounded. Price: ids are free to make, so a stranger can still fill keys with
useless but correctly signed records. Or claim an end that never came, which costs a ``--start-over``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from p2p_co2.config import run_digest
from p2p_co2.errors import Offence, RemoteProtocolError
from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S, OnRefused
from p2p_co2.net.transport.libp2p.hivemind import DHTID, DHTRecord, MSGPackSerializer, RecordValidatorBase
from p2p_co2.wire.identity import PeerId, parsed, unseal
from p2p_co2.wire.limits import (
    HELLO_WINDOW_S,
    MAX_ADDRESSES,
    MAX_FRAGMENTS,
    MAX_PEERS,
    MAX_RECORD_BYTES,
    MAX_STRING,
)
from p2p_co2.wire.messages_pb2 import PeerRecord, RunManifest, RunPosition

_Content = TypeVar("_Content", PeerRecord, RunManifest, RunPosition)
PEER_CONTEXT = b"p2p-co2 peer record"
MANIFEST_CONTEXT = b"p2p-co2 run manifest"
POSITION_CONTEXT = b"p2p-co2 run position"
PEER_SHARDS = 8
MAX_LIFETIME_S = 30 * 86400.0
"""Where a run is, and its settings, are asked for when everybody is gone, which may be long ago."""
_PACKED_STRING = frozenset((*range(0xA0, 0xC0), 0xD9, 0xDA))
"""First bytes of a msgpack string of less than 64 KiB."""
_PACKED_BYTES = frozenset((0xC4, 0xC5))
"""First bytes of a msgpack byte string of less than 64 KiB."""


def shard_of(peer: PeerId) -> int:
    """The shard that holds a peer's record."""
    return hashlib.sha256(peer.encode()).digest()[0] % PEER_SHARDS


def peers_keys(run: bytes) -> list[str]:
    """By shard."""
    return [f"p2p-co2/{run.hex()}/peers/{shard}" for shard in range(PEER_SHARDS)]


def position_keys(run: bytes) -> list[str]:
    """By shard."""
    return [f"p2p-co2/{run.hex()}/position/{shard}" for shard in range(PEER_SHARDS)]


def manifest_key(run: bytes) -> str:
    return f"p2p-co2/{run.hex()}/manifest"


def run_position(said: Sequence[RunPosition], now: float) -> RunPosition | None:
    """What at least half of those claim, or more, that were there last; None if nobody was. Last means: with
    a word that is not much older than the newest. ``now``: unix seconds; what is dated later counts as of
    now. Peers write every minute, at the latest at their end."""
    newest_at = min(now, max((one.written_at for one in said), default=0.0))
    last = [one for one in said if one.written_at >= newest_at - 3 * MESSAGE_TIMEOUT_S]
    return sorted(last, key=lambda one: one.position)[len(last) // 2] if last else None


class Records(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no annotations
    """hivemind's hook: ``validate`` is asked before a record is stored and after one is fetched.

    ``stored_under(key_id)`` are the writers whose entries this node stores under a key. ``run_key``, once it
    is known, is the only one that may write the manifest. ``clock`` gives unix seconds.
    """

    def __init__(self, run: bytes, on_refused: OnRefused, clock: Callable[[], float]) -> None:
        self._run = run
        self._on_refused = on_refused
        self._clock = clock
        self.run_key: PeerId | None = None
        self.stored_under: Callable[[bytes], Collection[str]] = lambda _: ()
        self._checks: dict[bytes, tuple[Callable[[str, bytes], Any], int]] = {
            _key_id(manifest_key(run)): (self.manifest, -1)
        }
        """By key: what checks a record, and the shard that it is of."""
        for read, keys in ((self.peer_record, peers_keys(run)), (self.position, position_keys(run))):
            self._checks |= {_key_id(key): (read, shard) for shard, key in enumerate(keys)}
        self._unseal = lru_cache(maxsize=MAX_PEERS)(unseal)  # a record is met many times and checked once

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may stand in this run's DHT; what may not is reported."""
        try:
            writer = _unpack(record.subkey, _PACKED_STRING)
            sealed = _unpack(record.value, _PACKED_BYTES)
            stored = self.stored_under(record.key)
            if writer not in stored and len(stored) >= MAX_PEERS // PEER_SHARDS:
                raise RemoteProtocolError("too many records", f"{len(stored)} under one key")
            if record.key not in self._checks:
                raise RemoteProtocolError("unknown record", "under no key of this run")
            read, shard = self._checks[record.key]
            latest = self._ends_at(read(writer, sealed))
            if shard not in (-1, shard_of(PeerId(writer))):
                raise RemoteProtocolError("wrong record", f"of peer {writer}: wrong shard")
            if not record.expiration_time <= latest:  # written so that NaN is refused
                raise RemoteProtocolError("wrong record", f"of peer {writer}: lives too long")
        except RemoteProtocolError as error:
            self._on_refused(None, error)
            return False
        return True

    def peer_record(self, writer: str, sealed: bytes) -> PeerRecord:
        """The peer record inside a value; raises ``RemoteProtocolError``."""
        record = self._open(PeerRecord, PEER_CONTEXT, writer, sealed)
        strings = [*record.maddrs, *record.grpc_addresses, record.software]
        if (
            record.peer != writer
            or max(len(record.maddrs), len(record.grpc_addresses)) > MAX_ADDRESSES
            or max(map(len, strings)) > MAX_STRING
            or len(record.certificate_digest) not in ({32} if record.grpc_addresses else {0, 32})
            or not math.isfinite(record.expires_at)
            or not 0 <= record.tokens_per_s < math.inf  # written so that NaN is refused
        ):
            raise RemoteProtocolError("wrong record", f"of peer {writer}: out of bounds")
        return record

    def manifest(self, writer: str, sealed: bytes) -> RunManifest:
        """The run manifest inside a value; raises ``RemoteProtocolError``."""
        manifest = self._open(RunManifest, MANIFEST_CONTEXT, writer, sealed)
        if self.run_key not in (None, writer):
            raise RemoteProtocolError("foreign manifest", f"signed by {writer[:64]!r}, not by the run's key")
        if run_digest(manifest.config) != self._run:
            raise RemoteProtocolError("wrong manifest", "its settings do not have the run's digest")
        if len(manifest.recipe_digest) != 32 or len(manifest.software) > MAX_STRING:
            raise RemoteProtocolError("wrong manifest", "out of bounds")
        return manifest

    def position(self, writer: str, sealed: bytes) -> RunPosition:
        """The run's position inside a value, as its writer says; raises ``RemoteProtocolError``."""
        said = self._open(RunPosition, POSITION_CONTEXT, writer, sealed)
        if (
            said.peer != writer
            or len(said.versions) > MAX_FRAGMENTS
            or len(said.software) > MAX_STRING
            or not 0 <= said.position < math.inf  # written so that NaN is refused
            or not said.written_at <= self._clock() + HELLO_WINDOW_S
        ):
            raise RemoteProtocolError("wrong record", f"position by {writer}: out of bounds")
        return said

    def _ends_at(self, said: PeerRecord | RunManifest | RunPosition) -> float:
        """The latest end of a record. That of a position follows from what it says, so an old one that others
        keep alive cannot outlast a newer one. A peer's own word bounds that of its record, which is renewed
        all the time: who makes many ids keeps no places without that."""
        if isinstance(said, RunPosition):
            return said.written_at + MAX_LIFETIME_S + 1.0
        latest = self._clock() + HELLO_WINDOW_S
        if isinstance(said, PeerRecord):
            return min(said.expires_at + 1.0, latest + MESSAGE_TIMEOUT_S)
        return latest + MAX_LIFETIME_S

    def _open(self, kind: type[_Content], context: bytes, writer: str, sealed: bytes) -> _Content:
        """The message that ``writer`` has sealed it for this run."""
        if len(sealed) > MAX_RECORD_BYTES:
            raise RemoteProtocolError("record too large", f"{len(sealed)} bytes; at most {MAX_RECORD_BYTES}")
        signer, plain = self._unseal(context, sealed)
        if signer != writer:
            raise RemoteProtocolError("foreign record", f"signed by {signer}, filed under {writer[:64]!r}")
        content = parsed(kind, plain)
        if content.run != self._run:
            raise RemoteProtocolError("wrong record", f"by {writer}: of another run")
        return content


def _key_id(key: str) -> bytes:
    return bytes(DHTID.generate(source=key).to_bytes())


def _unpack(packed: bytes, heads: frozenset[int]) -> Any:
    """A msgpack string or byte string, and nothing else: other types could carry objects and nesting."""
    if not packed or packed[0] not in heads or len(packed) > 2 * MAX_RECORD_BYTES:
        raise RemoteProtocolError(Offence.UNREADABLE, "not a signed record")
    try:
        return MSGPackSerializer.loads(packed)
    except ValueError:
        raise RemoteProtocolError(Offence.UNREADABLE, "damaged msgpack") from None
