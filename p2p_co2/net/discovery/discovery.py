"""Finding peers, the run's settings, and where the run is, as signed records in the DHT.

Law: nothing is returned that ``records`` has not checked. Price: a record stands on five nodes until it
expires, so records have to be published again before they do, and for that long a dead peer is still listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from p2p_co2 import __version__
from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TicketError, TransportError
from p2p_co2.net.discovery.dht import Dht, Entries, Entry
from p2p_co2.net.discovery.records import (
    MANIFEST_CONTEXT,
    MAX_LIFETIME_S,
    NOBODY,
    PEER_CONTEXT,
    PEER_SHARDS,
    POSITION_CONTEXT,
    POSITION_LIFETIME_S,
    OnForged,
    Records,
    manifest_key,
    peers_key,
    position_key,
    run_digest,
    shard_of,
)
from p2p_co2.net.transport.libp2p.hivemind import P2P, get_dht_time
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS, MAX_RECORD_BYTES, PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord, RunManifest, RunPosition

_Content = TypeVar("_Content", PeerRecord, RunManifest, RunPosition)


class Discovery:
    """One node of the run's DHT. ``run`` is the run's digest (32 bytes); ``on_refused`` hears of records that
    are forged or malformed. ``start``, ``rebootstrap``, ``greet``, ``close``: see ``Dht``."""

    def __init__(self, p2p: P2P, identity: Identity, run: bytes, on_refused: OnForged) -> None:
        self._identity, self._run, self._on_refused = identity, run, on_refused
        self._records = Records(run, on_refused, get_dht_time)
        self._dht = Dht(p2p, identity.peer_id, self._records)
        self.start, self.rebootstrap = self._dht.start, self._dht.rejoin
        self.greet, self.close = self._dht.greet, self._dht.close
        self.sealed_manifest = b""
        """The run's signed settings, as they were published, fetched or taken; empty before that."""

    def _checked(
        self, entries: Iterable[tuple[str, bytes]], read: Callable[[str, bytes], _Content]
    ) -> Iterator[tuple[_Content, bytes]]:
        """What right records say, and the sealed records themselves; others are reported."""
        for writer, sealed in entries:
            try:
                yield read(writer, sealed), sealed
            except RemoteProtocolError as error:
                self._on_refused(NOBODY, error)

    # ---- peers

    async def publish_self(self, record: PeerRecord, lifetime_s: float) -> None:
        """Publish where we can be reached; again before ``lifetime_s`` is over. Raises ``TransportError``."""
        own, me = PeerRecord(), self._identity.peer_id
        own.CopyFrom(record)
        own.peer, own.run, own.expires_at = me, self._run, get_dht_time() + lifetime_s
        sealed = self._identity.seal(PEER_CONTEXT, own.SerializeToString())
        await self._dht.store(Entry(peers_key(self._run, shard_of(me)), me, sealed, own.expires_at))

    async def find_peers(self) -> list[PeerRecord]:
        """The checked, unexpired records of all other peers, sorted by peer. Raises ``TransportError``."""
        found = await self._dht.find([peers_key(self._run, shard) for shard in range(PEER_SHARDS)])
        records = self._checked(_all_of(found), self._records.peer_record)
        now, me = get_dht_time(), self._identity.peer_id
        others = [record for record, _ in records if record.expires_at > now and record.peer != me]
        return sorted(others, key=lambda record: record.peer)[:MAX_PEERS]

    # ---- the run's settings

    async def publish_manifest(
        self, config: bytes, recipe_digest: bytes, lifetime_s: float = MAX_LIFETIME_S
    ) -> None:
        """Publish the run's settings (canonical bytes of ``RunConfig``) and the recipe's digest (32 bytes).

        Our identity becomes the run's key: tickets must name it. Raises ``ConfigError`` for settings that do
        not fit, ``TransportError``.
        """
        if run_digest(config) != self._run or len(recipe_digest) != 32:
            raise LocalProtocolError("the manifest of another run, or a recipe digest that is not 32 bytes")
        manifest = RunManifest(
            run=self._run, config=config, recipe_digest=recipe_digest, software=__version__,
            protocol=PROTOCOL_VERSION,
        )  # fmt: skip
        sealed = self._identity.seal(MANIFEST_CONTEXT, manifest.SerializeToString())
        if len(sealed) > MAX_RECORD_BYTES:
            size = f"{len(sealed)} bytes when published, at most {MAX_RECORD_BYTES}"
            raise ConfigError("the run file", "", f"{size}; shorten recipe_options")
        self._records.run_key, self.sealed_manifest = self._identity.peer_id, sealed
        await self.keep_manifest(lifetime_s)

    async def fetch_manifest(self, run_key: PeerId) -> RunManifest:
        """The run's manifest, if ``run_key`` (from the ticket) signed it and its settings have the run's
        digest. From now on this node stores no other.

        Raises ``TransportError`` when it is not there, ``TicketError`` when the run's peers speak another
        version of the protocol: nobody would answer, and a peer that hears nobody trains alone.
        """
        self._records.run_key = run_key
        found = await self._dht.find([manifest_key(self._run)])
        for _, sealed in self._checked(_all_of(found), self._records.manifest):
            return self.take_manifest(run_key, sealed)
        raise TransportError(
            f"the settings of run {self._run[:8].hex()} are not in the DHT; ask the organiser to start "
            "a seed of this run"
        )

    def take_manifest(self, run_key: PeerId, sealed: bytes) -> RunManifest:
        """The manifest inside ``sealed``, which was kept elsewhere, as if it had been fetched. Raises
        ``RemoteProtocolError`` if it is not the run's, ``TicketError`` as ``fetch_manifest``."""
        self._records.run_key = run_key
        manifest = self._records.manifest(run_key, sealed)
        _require_our_protocol(manifest)
        self.sealed_manifest = sealed
        return manifest

    async def keep_manifest(self, lifetime_s: float = MAX_LIFETIME_S) -> None:
        """Store the manifest that we published or fetched once more, so that it outlives its author. It
        carries its signature with it, so anybody may. Raises ``TransportError``."""
        run_key, key = self._records.run_key, manifest_key(self._run)
        if run_key is None or not self.sealed_manifest:
            raise LocalProtocolError("no manifest to keep: publish or fetch it first")
        await self._dht.store(Entry(key, run_key, self.sealed_manifest, get_dht_time() + lifetime_s))

    # ---- where the run is

    async def publish_position(self, said: RunPosition) -> None:
        """Tell those that come later where the run is. Raises ``TransportError``."""
        own = RunPosition()
        own.CopyFrom(said)
        own.peer, own.run, own.written_at = self._identity.peer_id, self._run, get_dht_time()
        entry = self._position(own, self._identity.seal(POSITION_CONTEXT, own.SerializeToString()))
        await self._dht.tell_seeds(entry)
        await self._dht.store(entry)

    async def find_positions(self) -> list[RunPosition]:
        """Where each peer was that ever said so, checked, as the seeds have it. Raises ``TransportError`` if
        none of them answers."""
        return [said for said, _ in self._newest(await self._dht.ask_seeds(self._position_keys()))]

    async def gather_positions(self) -> list[tuple[str, bytes]]:
        """For a seed: hold what all of the DHT knows of positions, and return it sealed, by writer;
        ``hold_positions`` takes it back after a restart. Raises ``TransportError``."""
        sealed = _all_of(await self._dht.find(self._position_keys()))
        self.hold_positions(sealed)
        return sealed

    def hold_positions(self, sealed: Iterable[tuple[str, bytes]]) -> None:
        """Answer for these from now on; what is no position of this run is reported and dropped."""
        for said, value in self._newest(sealed):
            self._dht.hold(self._position(said, value))

    def _position_keys(self) -> Sequence[str]:
        return [position_key(self._run, shard) for shard in range(PEER_SHARDS)]

    def _position(self, said: RunPosition, sealed: bytes) -> Entry:
        writer = PeerId(said.peer)
        key = position_key(self._run, shard_of(writer))
        return Entry(key, writer, sealed, said.written_at + POSITION_LIFETIME_S)

    def _newest(self, sealed: Iterable[tuple[str, bytes]]) -> Iterable[tuple[RunPosition, bytes]]:
        """The newest position of this run by each writer, as it says and sealed; others are reported."""
        said = sorted(self._checked(sealed, self._records.position), key=lambda one: one[0].written_at)
        return {one[0].peer: one for one in said}.values()


def _all_of(found: Iterable[Entries]) -> list[tuple[str, bytes]]:
    return [entry for entries in found for entry in entries.items()]


def _require_our_protocol(manifest: RunManifest) -> None:
    spoken = manifest.protocol or 1  # the first version did not write it
    if spoken != PROTOCOL_VERSION:
        theirs = "".join(character if character.isprintable() else "?" for character in manifest.software)
        raise TicketError(
            f"this run speaks version {spoken} of the protocol (p2p-co2 {theirs}), and this p2p-co2 "
            f"{__version__} speaks {PROTOCOL_VERSION}; install the organiser's version"
        )
