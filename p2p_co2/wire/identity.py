"""Who a peer is: an Ed25519 key whose public half *is* its libp2p peer id.

libp2p inlines Ed25519 keys into the peer id (an identity multihash over the protobuf-encoded key, libp2p
peer-ids specification). So a signature can be checked from the id alone, without an authority or an account.
The price: an id is free to make, so an id proves continuity, not merit.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import NewType, TypeVar

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError, Message

from p2p_co2.errors import ConfigError, EnvironmentFault, Offence, RemoteProtocolError
from p2p_co2.system.folders import keep_private
from p2p_co2.wire.limits import MAX_PEER_ID, MAX_PEERS
from p2p_co2.wire.messages_pb2 import Signed

logger = logging.getLogger(__name__)
_Read = TypeVar("_Read", bound=Message)
PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58 ("12D3Koo...")."""

_KEY_PREFIX = bytes((0x08, 0x01, 0x12, 0x20))
"""libp2p PublicKey protobuf: type = Ed25519 (1), data = 32 bytes."""
_MULTIHASH_PREFIX = bytes((0x00, 0x24))
"""Identity multihash of 36 bytes."""
_PRIVATE_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))
"""libp2p PrivateKey protobuf: type = Ed25519, data = 64 bytes (seed, public)."""


class Identity:
    """A private key and the peer id it makes."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = peer_id_of(key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file (libp2p format), or make one with mode 600. One that others of this machine may
        read is shut to them, with a warning in the log.

        Raises ``ConfigError`` for a file that is no Ed25519 key, ``EnvironmentFault`` when it cannot be read
        or made.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return cls._create(path)
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
                cure = "its mode is 600 now; if somebody may have copied it, remove it for a new identity"
                logger.warning("the identity file %s was open to others of this machine: %s", path, cure)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot use the identity file {path}: {error.strerror}; choose another folder with --folder"
            ) from None
        if len(data) != 68 or not data.startswith(_PRIVATE_PREFIX):
            raise ConfigError(str(path), "", "not a libp2p Ed25519 key; remove it and a new identity is made")
        return cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))

    @classmethod
    def _create(cls, path: Path) -> Identity:
        identity = cls.generate()
        keep_private(path, identity.libp2p_bytes())
        return identity

    def libp2p_bytes(self) -> bytes:
        """The private key as the libp2p daemon reads it: secret."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self._key.public_key().public_bytes_raw()

    def sign(self, context: bytes, content: bytes) -> bytes:
        """Ed25519 signature (RFC 8032) of 64 bytes; ``context`` keeps signatures of one purpose from serving
        another."""
        return self._key.sign(context + b"\0" + content)

    def seal(self, context: bytes, content: bytes) -> bytes:
        """A serialised ``Signed`` message that ``unseal`` opens."""
        signed = Signed(signer=self.peer_id, content=content, signature=self.sign(context, content))
        return signed.SerializeToString()


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw Ed25519 public key (32 bytes)."""
    return PeerId(base58.b58encode(_MULTIHASH_PREFIX + _KEY_PREFIX + public_key).decode())


def public_key_of(peer_id: str) -> bytes:
    """The 32 key bytes inside a peer id; raises ``RemoteProtocolError`` if there are none."""
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= MAX_PEER_ID else b""
    except ValueError:
        raw = b""
    if len(raw) != 38 or not raw.startswith(_MULTIHASH_PREFIX + _KEY_PREFIX):
        raise RemoteProtocolError(Offence.BAD_PEER_ID, repr(peer_id[:64]))
    return raw[6:]


def verify(signer: str, context: bytes, content: bytes, signature: bytes) -> None:
    """Raise ``RemoteProtocolError(Offence.WRONG_SIGNATURE)`` unless ``signer`` signed ``content`` for
    ``context``."""
    try:
        _key_of(signer).verify(signature, context + b"\0" + content)
    except InvalidSignature:
        raise RemoteProtocolError(Offence.WRONG_SIGNATURE, f"claimed by {signer}") from None


@lru_cache(maxsize=MAX_PEERS)
def _key_of(peer_id: str) -> Ed25519PublicKey:
    """Kept, because base58 costs half as much as the signature."""
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def parsed(kind: type[_Read], data: bytes) -> _Read:
    """A message of the schema out of its bytes. Raises ``RemoteProtocolError``."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RemoteProtocolError(Offence.UNREADABLE, f"not a {kind.DESCRIPTOR.name}") from None


def unseal(context: bytes, data: bytes) -> tuple[PeerId, bytes]:
    """Open what ``Identity.seal`` made: (signer, content). Raises ``RemoteProtocolError``."""
    signed = parsed(Signed, data)
    verify(signed.signer, context, signed.content, signed.signature)
    return PeerId(signed.signer), signed.content
