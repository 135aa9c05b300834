"""A run's DHT over real libp2p daemons on this machine, and the records in it without any."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError, TicketError, TransportError
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.discovery import records as rec
from p2p_co2.net.discovery.discovery import TicketHolders
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S, MESSAGE_TIMEOUT_S
from p2p_co2.net.transport.libp2p.control import own_maddrs, reach
from p2p_co2.net.transport.libp2p.hivemind import (
    DHTID,
    P2P,
    DHTNode,
    DHTRecord,
    MSGPackSerializer,
    PeerID,
    get_dht_time,
)
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import (
    HELLO_WINDOW_S,
    MAX_ADDRESSES,
    MAX_FRAGMENTS,
    MAX_PEERS,
    MAX_RECORD_BYTES,
    MAX_STRING,
)
from p2p_co2.wire.messages_pb2 import PeerRecord, RunManifest, RunPosition
from tests.transport_peers import PATIENCE_S, free_port, open_daemon

CONFIG = RunConfig(name="test")
RUN = CONFIG.digest()
RECIPE = hashlib.sha256(b"recipe").digest()
DEAD = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"


@dataclass
class Member:
    identity: Identity
    p2p: P2P
    discovery: Discovery
    maddrs: list[str]
    refused: list[RemoteProtocolError] = field(default_factory=list)

    @property
    def record(self) -> PeerRecord:
        return PeerRecord(peer=self.identity.peer_id, run=RUN, maddrs=self.maddrs, software="test")


@asynccontextmanager
async def open_member(folder: Path, seeds: list[str], port: int = 0) -> AsyncIterator[Member]:
    async with open_daemon(folder, port) as (p2p, identity):
        refused: list[RemoteProtocolError] = []
        discovery = Discovery(p2p, identity, RUN, lambda _, error: refused.append(error))
        try:
            await discovery.start(seeds)
            yield Member(identity, p2p, discovery, [str(m) for m in await p2p.get_visible_maddrs()], refused)
        finally:
            await discovery.close()
            await discovery.close()


# ---- by hand


async def test_peers_find_each_other_and_the_run(tmp_path: Path) -> None:
    async with open_member(tmp_path / "seed", []) as seed:
        await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
        async with (
            open_member(tmp_path / "a", seed.maddrs) as a,
            open_member(tmp_path / "b", [DEAD, *seed.maddrs]) as b,
        ):
            manifest = await a.discovery.fetch_manifest(seed.identity.peer_id)
            assert RunConfig.from_canonical_bytes(manifest.config) == CONFIG
            assert manifest.recipe_digest == RECIPE
            assert await a.discovery.find_peers() == []
            await asyncio.gather(*(m.discovery.publish_self(m.record) for m in (a, b)))
            (found,) = await a.discovery.find_peers()
            assert (found.peer, list(found.maddrs)) == (b.identity.peer_id, b.maddrs)
            assert get_dht_time() < found.expires_at <= get_dht_time() + MESSAGE_TIMEOUT_S
            both = sorted((a.identity.peer_id, b.identity.peer_id))
            assert [record.peer for record in await seed.discovery.find_peers()] == both
            assert not a.refused + b.refused + seed.refused


async def test_who_has_read_the_settings_answers_with_them_when_no_seed_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nobody hands records on: the one whose task that was may be the seed that died first."""

    async def takes_nothing(*_: object, **__: object) -> None: ...

    async with AsyncExitStack() as seeds:
        seed = await seeds.enter_async_context(open_member(tmp_path / "seed", []))
        run_key = seed.identity.peer_id
        node = seed.discovery._running()
        monkeypatch.setattr(type(node.protocol), "call_store", takes_nothing)
        await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
        async with open_member(tmp_path / "b", seed.maddrs) as b:
            await b.discovery.fetch_manifest(run_key)
            await seeds.aclose()
            async with open_member(tmp_path / "c", b.maddrs) as c:
                assert (await c.discovery.fetch_manifest(run_key)).recipe_digest == RECIPE


async def test_where_a_run_is_is_known_when_everybody_has_left(tmp_path: Path) -> None:
    """Also by a seed that was started again, and by one that no peer has told."""
    async with open_member(tmp_path / "seed", []) as seed:
        assert await seed.discovery.find_positions() == []
        async with open_member(tmp_path / "a", seed.maddrs) as a, open_member(tmp_path / "b", a.maddrs) as b:
            assert await a.discovery.find_positions() == []
            await a.discovery.publish_position(RunPosition(position=1.0, versions=[1]))
            older = await seed.discovery.gather_positions()
            await a.discovery.publish_position(RunPosition(position=2.5, versions=[2, 3], software="test"))
            await b.discovery.publish_position(RunPosition(position=2.0, versions=[2, 2]))
            kept = await seed.discovery.gather_positions()
            writers = {a.identity.peer_id, b.identity.peer_id}
            assert {writer for writer, _ in kept} == writers
        async with open_member(tmp_path / "late", seed.maddrs) as late:
            said = {one.peer: one for one in await late.discovery.find_positions()}
            assert said.keys() == writers
            of_a = said[a.identity.peer_id]
            assert (of_a.position, list(of_a.versions), of_a.software) == (2.5, [2, 3], "test")
    async with open_member(tmp_path / "again", []) as again:
        again.discovery.hold_positions([*kept, ("stranger", kept[0][1]), *older])
        assert [error.reason for error in again.refused] == ["foreign record"]
        async with open_member(tmp_path / "later", again.maddrs) as later:
            found = {one.peer: one.position for one in await later.discovery.find_positions()}
            assert found == {a.identity.peer_id: 2.5, b.identity.peer_id: 2.0}  # of one writer the newest
    with pytest.raises(TransportError):
        async with open_member(tmp_path / "alone", seed.maddrs):
            raise AssertionError("nobody is there to join")


# ---- the world fails


async def test_no_seed_can_be_reached(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"no seed.*tcp/9.*refused"):
        async with open_member(tmp_path / "a", [DEAD, "/ip4/127.0.0.1/tcp/9/p2p/nobody"]):
            pass


async def test_a_run_of_another_protocol_is_refused_by_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody in it would answer, and a peer that hears nobody trains alone."""
    async with open_member(tmp_path / "seed", []) as seed, open_member(tmp_path / "a", seed.maddrs) as a:
        with monkeypatch.context() as later:
            later.setattr("p2p_co2.net.discovery.discovery.PROTOCOL_VERSION", 99)
            later.setattr("p2p_co2.net.discovery.discovery.__version__", "9.8\x1b[2J")
            await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
        with pytest.raises(
            TicketError, match=r"speaks version 99.*p2p-co2 9\.8\?\[2J.*install the organiser"
        ) as refused:
            await a.discovery.fetch_manifest(seed.identity.peer_id)
        assert str(refused.value).isprintable()


async def test_a_seed_dies_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    async with open_member(tmp_path / "seed", [], port=port) as seed:
        seeds = seed.maddrs
        a_open, b_open = open_member(tmp_path / "a", seeds), open_member(tmp_path / "b", seeds)
        a = await a_open.__aenter__()
        assert not await a.discovery.greet(seeds)  # it is the one that it joined through
    with pytest.raises(TransportError, match="no seed"):
        await a.discovery.greet(seeds)
    async with open_member(tmp_path / "seed", [], port=port) as again:
        assert again.maddrs == seeds
        b = await b_open.__aenter__()
        try:
            async with asyncio.timeout(PATIENCE_S):  # libp2p does not dial for a while after each failure
                while True:
                    with contextlib.suppress(TransportError):
                        assert await a.discovery.greet(seeds)  # it was started anew
                        break
            assert not await a.discovery.greet(seeds)
            await asyncio.gather(*(m.discovery.publish_self(m.record) for m in (a, b)))
            for one, other in ((a, b), (b, a)):
                assert [r.peer for r in await one.discovery.find_peers()] == [other.identity.peer_id]
        finally:
            await b_open.__aexit__(None, None, None)
            await a_open.__aexit__(None, None, None)


async def test_every_call_fails_in_words_when_the_daemon_is_killed(tmp_path: Path) -> None:
    async with (
        open_member(tmp_path / "seed", []) as seed,
        open_member(tmp_path / "a", seed.maddrs) as a,
    ):
        await a.discovery.publish_self(a.record)
        os.kill(a.p2p.daemon.process.pid, signal.SIGKILL)
        await a.p2p.daemon.wait_exit()
        calls = [
            lambda: own_maddrs(a.p2p, PATIENCE_S),
            lambda: a.discovery.publish_self(a.record),
            a.discovery.find_peers,
            lambda: a.discovery.rebootstrap(seed.maddrs),
        ]
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for call in calls:
                with pytest.raises(TransportError, match="daemon of this process is gone"):
                    await call()
        await a.discovery.close()
        with pytest.raises(TransportError, match="daemon of this process is gone"):
            await a.discovery.start([])


def test_only_what_fits_is_published() -> None:
    identity = Identity.generate()
    discovery = Discovery(None, identity, RUN, lambda *_: None)
    with pytest.raises(LocalProtocolError):
        asyncio.run(discovery.publish_manifest(b"{}", RECIPE))
    large = RunConfig(recipe_options={"words": "x" * MAX_RECORD_BYTES})
    discovery = Discovery(None, identity, large.digest(), lambda *_: None)
    with pytest.raises(ConfigError, match="recipe_options"):
        asyncio.run(discovery.publish_manifest(large.canonical_bytes(), RECIPE))
    with pytest.raises(LocalProtocolError):
        asyncio.run(discovery.find_peers())


# ---- liars


async def test_a_liar_in_the_dht_gets_nowhere(tmp_path: Path) -> None:
    """A node that checks nothing serves and stores forged records; honest nodes neither take nor show
    them."""
    async with (
        open_member(tmp_path / "seed", []) as seed,
        open_member(tmp_path / "a", seed.maddrs) as a,
        open_daemon(tmp_path / "liar") as (p2p, liar),
    ):
        await a.discovery.publish_self(a.record)
        await reach(p2p, seed.identity.peer_id, seed.maddrs, PATIENCE_S)
        node = await DHTNode.create(
            p2p=p2p, cache_locally=False, cache_nearest=0, authorizer=TicketHolders(RUN)
        )
        await node.protocol.call_ping(PeerID.from_base58(seed.identity.peer_id))
        victim = PeerRecord(peer=a.identity.peer_id, run=RUN, maddrs=["/ip4/6.6.6.6/tcp/6"], expires_at=2e9)
        forged = liar.seal(rec.PEER_CONTEXT, victim.SerializeToString())
        key = rec.peers_keys(RUN)[rec.shard_of(a.identity.peer_id)]
        expires_at = get_dht_time() + 2 * MESSAGE_TIMEOUT_S
        await node.store(key, forged, expires_at, subkey=a.identity.peer_id)
        await node.store(rec.manifest_key(RUN), b"x", expires_at)
        (found,) = await seed.discovery.find_peers()
        assert list(found.maddrs) == a.maddrs
        with pytest.raises(TransportError):
            await seed.discovery.fetch_manifest(seed.identity.peer_id)
        assert {error.reason for error in seed.refused} >= {"foreign record", "unreadable"}
        await node.shutdown()


async def test_a_stranger_that_found_the_port_learns_nothing_of_the_run(tmp_path: Path) -> None:
    """Records name the run: one that is in the DHT, or asks for a key, would have what a ticket holds."""
    async with open_member(tmp_path / "seed", []) as seed, open_daemon(tmp_path / "stranger") as (p2p, _):
        await reach(p2p, seed.identity.peer_id, seed.maddrs, PATIENCE_S)
        node = await DHTNode.create(p2p=p2p, cache_locally=False, cache_nearest=0)
        peer, key = PeerID.from_base58(seed.identity.peer_id), DHTID.generate(source=rec.manifest_key(RUN))
        assert await node.protocol.call_ping(peer) is None
        await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
        assert await node.protocol.call_find(peer, [key]) is None
        assert not len(node.protocol.storage), "nothing was handed to it to keep"
        async with open_member(tmp_path / "a", seed.maddrs) as a:
            assert (
                await a.discovery.fetch_manifest(seed.identity.peer_id)
            ).config == CONFIG.canonical_bytes()
        await node.shutdown()


def test_forked_processes_draw_ids_of_their_own() -> None:
    """A generator's state would be copied with the process."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, DHTID.generate().to_bytes())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        assert file.read() != DHTID.generate().to_bytes()


def make_records(run_key: PeerId | None = None) -> tuple[rec.Records, list[str]]:
    reasons: list[str] = []
    records = rec.Records(RUN, lambda _, error: reasons.append(error.reason), time.time)
    records.run_key = run_key
    return records, reasons


def dht_record(
    key: str, writer: object, value: object, lifetime_s: float = MESSAGE_TIMEOUT_S, **changes: bytes
) -> DHTRecord:
    pack = MSGPackSerializer.dumps
    key_id = DHTID.generate(source=key).to_bytes()
    return DHTRecord(key_id, changes.get("subkey", pack(writer)), pack(value), time.time() + lifetime_s)


def peer_record(identity: Identity, **changes: object) -> PeerRecord:
    """``changes``: the fields that differ; ``expires_at`` counts from now."""
    values: dict[str, object] = {
        "peer": identity.peer_id,
        "run": RUN,
        "expires_at": MESSAGE_TIMEOUT_S,
        **changes,
    }
    values["expires_at"] += time.time()  # type: ignore[operator]
    return PeerRecord(**values)  # type: ignore[arg-type]


ME, OTHER = Identity.generate(), Identity.generate()
MY_KEY = rec.peers_keys(RUN)[rec.shard_of(ME.peer_id)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": bytes(32)}, "wrong record"),
        ({"peer": OTHER.peer_id}, "wrong record"),
        ({"maddrs": ["/x"] * (MAX_ADDRESSES + 1)}, "wrong record"),
        ({"maddrs": ["x" * (MAX_STRING + 1)]}, "wrong record"),
        ({"software": "x" * (MAX_STRING + 1)}, "wrong record"),
        ({"certificate_digest": bytes(31)}, "wrong record"),
        ({"grpc_addresses": ["h:1"]}, "wrong record"),
        ({"expires_at": float("nan")}, "wrong record"),
        ({"expires_at": 5.0}, "wrong record"),
        ({"maddrs": ["x" * 500] * 16, "grpc_addresses": ["x" * 500] * 16}, "record too large"),
    ],
)
def test_a_wrong_peer_record_is_refused(changes: dict[str, object], reason: str) -> None:
    records, reasons = make_records()
    sealed = ME.seal(rec.PEER_CONTEXT, peer_record(ME, **changes).SerializeToString())
    assert not records.validate(dht_record(MY_KEY, ME.peer_id, sealed))
    assert reasons == [reason]


def test_a_record_is_only_good_where_it_belongs() -> None:
    records, _ = make_records()
    content = peer_record(ME).SerializeToString()
    sealed = ME.seal(rec.PEER_CONTEXT, content)
    other_shard = rec.peers_keys(RUN)[rec.shard_of(ME.peer_id) - 1]
    assert records.validate(dht_record(MY_KEY, ME.peer_id, sealed))
    assert not records.validate(dht_record(other_shard, ME.peer_id, sealed))
    assert not records.validate(dht_record(MY_KEY, OTHER.peer_id, sealed))
    assert not records.validate(dht_record(MY_KEY, None, sealed))
    for_an_hour = ME.seal(rec.PEER_CONTEXT, peer_record(ME, expires_at=3600.0).SerializeToString())
    assert not records.validate(dht_record(MY_KEY, ME.peer_id, for_an_hour, 3600.0))  # it would keep a place
    assert not records.validate(dht_record(MY_KEY, ME.peer_id, ME.seal(rec.MANIFEST_CONTEXT, content)))
    assert not records.validate(dht_record(rec.manifest_key(RUN), ME.peer_id, sealed))
    assert not records.validate(dht_record("under no key of this run", ME.peer_id, sealed))


@pytest.mark.parametrize(
    ("changes", "lives_s", "is_right"),
    [
        ({}, rec.MAX_LIFETIME_S, True),
        ({}, rec.MAX_LIFETIME_S + 60, False),
        ({"written_at": -86400.0}, rec.MAX_LIFETIME_S, False),  # its end goes with it
        ({"written_at": 2 * HELLO_WINDOW_S}, 60.0, False),
        ({"written_at": float("nan")}, 60.0, False),
        ({"position": float("nan")}, 60.0, False),
        ({"position": float("inf")}, 60.0, False),
        ({"position": -1.0}, 60.0, False),
        ({"versions": [1] * (MAX_FRAGMENTS + 1)}, 60.0, False),
        ({"software": "x" * (MAX_STRING + 1)}, 60.0, False),
        ({"run": bytes(32)}, 60.0, False),
        ({"peer": OTHER.peer_id}, 60.0, False),
    ],
)
def test_a_position_is_checked(changes: dict[str, object], lives_s: float, is_right: bool) -> None:
    records, reasons = make_records()
    values = {"peer": ME.peer_id, "run": RUN, "position": 2.5, "written_at": 0.0, **changes}
    values["written_at"] += time.time()  # type: ignore[operator]
    sealed = ME.seal(rec.POSITION_CONTEXT, RunPosition(**values).SerializeToString())  # type: ignore[arg-type]
    shard, keys = rec.shard_of(ME.peer_id), rec.position_keys(RUN)
    key = keys[shard]
    assert records.validate(dht_record(key, ME.peer_id, sealed, lives_s)) is is_right
    assert reasons == (not is_right) * ["wrong record"]
    assert not records.validate(dht_record(keys[shard - 1], ME.peer_id, sealed, 60.0))
    assert not records.validate(dht_record(key, OTHER.peer_id, sealed, 60.0))


def test_only_the_run_key_writes_the_manifest() -> None:
    def sealed(identity: Identity, **changes: object) -> bytes:
        values = {"run": RUN, "config": CONFIG.canonical_bytes(), "recipe_digest": RECIPE}
        return identity.seal(
            rec.MANIFEST_CONTEXT,
            RunManifest(**{**values, **changes}).SerializeToString(),  # type: ignore[arg-type]
        )

    records, reasons = make_records(ME.peer_id)
    key = rec.manifest_key(RUN)
    assert records.validate(dht_record(key, ME.peer_id, sealed(ME)))
    assert not records.validate(dht_record(key, OTHER.peer_id, sealed(OTHER)))
    assert not records.validate(dht_record(key, ME.peer_id, sealed(ME, config=b"{}")))
    assert not records.validate(dht_record(key, ME.peer_id, sealed(ME, recipe_digest=b"")))
    assert reasons == ["foreign manifest", "wrong manifest", "wrong manifest"]


def test_entries_under_one_key_are_bounded() -> None:
    records, reasons = make_records()
    sealed = ME.seal(rec.PEER_CONTEXT, peer_record(ME).SerializeToString())
    full = [str(i) for i in range(MAX_PEERS // rec.PEER_SHARDS)]
    record = dht_record(MY_KEY, ME.peer_id, sealed)
    records.stored_under = lambda _: full
    assert not records.validate(record)
    assert reasons == ["too many records"]
    full[0] = ME.peer_id  # it may still replace its own
    assert records.validate(record)
    assert reasons == ["too many records"]


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_bytes_are_refused_quietly(subkey: bytes, value: bytes) -> None:
    records, reasons = make_records()
    record = DHTRecord(DHTID.generate(source=MY_KEY).to_bytes(), subkey, value, time.time() + 1)
    assert not records.validate(record)
    assert len(reasons) == 1
