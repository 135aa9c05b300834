"""Identities and limits: who signed what, and how much a stranger may make us hold."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError
from p2p_co2.wire import limits
from p2p_co2.wire.identity import Identity, peer_id_of, public_key_of, unseal, verify
from p2p_co2.wire.messages_pb2 import (
    Contributor,
    Envelope,
    LinkHello,
    Mean,
    Part,
    PeerRecord,
    RoundKey,
    Signed,
)
from tests.disks import fill

ME = Identity.generate()
CONTEXT = b"test"

# ---- by hand


def test_a_peer_id_is_libp2ps() -> None:
    """The example of the libp2p peer-ids specification: an Ed25519 key and the id that it makes."""
    peer = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    public = public_key_of(peer)
    assert len(public) == 32
    assert peer_id_of(public) == peer


def test_the_key_file_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == made.libp2p_bytes()
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert Identity.load_or_create(tmp_path / "other").peer_id != made.peer_id


def test_a_key_that_others_may_read_is_shut_to_them_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "identity"
    made = Identity.load_or_create(path)
    assert not caplog.messages
    path.chmod(0o644)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "open to others" in caplog.text


def test_a_full_disk_leaves_no_torn_key(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(EnvironmentFault, match="--folder"):
        Identity.load_or_create(small_disk / "identity")
    assert [path.name for path in small_disk.iterdir()] == ["filling"]
    (small_disk / "filling").unlink()
    made = Identity.load_or_create(small_disk / "identity")
    assert Identity.load_or_create(small_disk / "identity").peer_id == made.peer_id


def test_a_file_that_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.write_bytes(bytes(68))
    with pytest.raises(ConfigError, match="remove it"):
        Identity.load_or_create(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFault, match="--folder"):
        Identity.load_or_create(tmp_path / "file" / "identity")


# ---- laws


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_what_was_sealed_is_unsealed(content: bytes, context: bytes) -> None:
    assert unseal(context, ME.seal(context, content)) == (ME.peer_id, content)
    verify(ME.peer_id, context, content, ME.sign(context, content))


@given(st.binary(max_size=50), st.data())
def test_any_changed_byte_breaks_the_seal(content: bytes, data: st.DataObject) -> None:
    sealed = bytearray(ME.seal(CONTEXT, content))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    try:
        opened = unseal(CONTEXT, bytes(sealed))
    except RemoteProtocolError:
        return
    assert opened == (ME.peer_id, content)  # protobuf has more than one spelling for the same fields


@given(st.text(max_size=80))
def test_any_text_is_refused_as_a_peer(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        public_key_of(text)


# ---- faults


def test_a_seal_is_good_for_one_purpose() -> None:
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        unseal(b"another purpose", ME.seal(CONTEXT, b"x"))


def test_nobody_signs_for_another() -> None:
    signed = Signed.FromString(ME.seal(CONTEXT, b"x"))
    signed.signer = Identity.generate().peer_id
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        unseal(CONTEXT, signed.SerializeToString())


@pytest.mark.parametrize(
    "peer",
    [
        "",
        "12D3KooW",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "1" * 1000,
        base58.b58encode(bytes(38)).decode(),
    ],
)
def test_what_is_no_ed25519_peer_id(peer: str) -> None:
    with pytest.raises(RemoteProtocolError, match="bad peer id"):
        public_key_of(peer)


# ---- limits


def test_the_largest_messages_fit_their_limits() -> None:
    """Full data and full lists, so that no honest message is refused for its size."""
    key = RoundKey(fragment=limits.MAX_FRAGMENTS, round=2**63, attempt=os.urandom(16))
    data = bytes(limits.MAX_PIECE_BYTES)
    contributors = [Contributor(peer=ME.peer_id, weight=1.0)] * limits.MAX_MEMBERS
    for body in (
        Envelope(part=Part(key=key, part=63, generation=9, offset=2**40, total=2**40, data=data)),
        Envelope(mean=Mean(key=key, part=63, total=2**40, data=data, contributors=contributors)),
    ):
        body.version, body.run = limits.PROTOCOL_VERSION, bytes(32)
        assert body.ByteSize() <= limits.MAX_MESSAGE_BYTES
    hello = LinkHello(from_peer=ME.peer_id, to_peer=ME.peer_id, run=bytes(32), certificate_digest=bytes(32))
    assert len(ME.seal(CONTEXT, hello.SerializeToString())) < limits.MAX_STRING
    record = PeerRecord(
        peer=ME.peer_id, run=bytes(32), maddrs=[f"/dns4/{'x' * 200}/tcp/65535"] * limits.MAX_ADDRESSES
    )
    assert len(ME.seal(CONTEXT, record.SerializeToString())) <= limits.MAX_RECORD_BYTES
