"""Who may open a link to us: the check of the first message of every link, shared by the carriers.

The dialler signs (who it is, whom it wants, which run, which TLS certificate it sees, when, a fresh nonce).
So a hello cannot be forged, shown to another peer, carried into another run, passed on by somebody in the
middle (his certificate differs), or used twice: within ``HELLO_WINDOW_S`` its nonce is remembered, after that
it is too old.

Pure but for the injected clock. Everything it remembers is bounded: ``MAX_INBOUND_LINKS``,
``MAX_INBOUND_LINKS_PER_PEER``, ``MAX_NONCES``, ``MAX_NONCES_PER_PEER``. Price: peers' clocks must agree to
within two minutes, and a peer that dials very often is refused for a while.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.wire.identity import Identity, PeerId, unseal
from p2p_co2.wire.limits import HELLO_WINDOW_S
from p2p_co2.wire.messages_pb2 import LinkHello

HELLO_CONTEXT = b"p2p-co2 link hello"
MAX_HELLO_BYTES = 1024
MAX_INBOUND_LINKS = 256
"""Links that all peers together may hold to us, strangers that have not said hello included."""
MAX_INBOUND_LINKS_PER_PEER = 4
MAX_NONCES = 16384
MAX_NONCES_PER_PEER = 64


class Door:
    """Signs our hellos and checks those of others. ``run`` is the digest of the run (32 bytes); ``clock``
    gives unix seconds."""

    def __init__(self, identity: Identity, run: bytes, clock: Callable[[], float]) -> None:
        self._identity, self._run, self._clock = identity, run, clock
        self._inside: Counter[PeerId] = Counter()
        self._strangers = 0
        self._nonces: OrderedDict[tuple[PeerId, bytes], float] = OrderedDict()
        self._nonces_of: Counter[PeerId] = Counter()

    def hello(self, to_peer: PeerId, certificate_digest: bytes) -> bytes:
        """Our sealed hello for one new link."""
        hello = LinkHello(
            from_peer=self._identity.peer_id,
            to_peer=to_peer,
            run=self._run,
            certificate_digest=certificate_digest,
            sent_at=self._clock(),
            nonce=os.urandom(16),
        )
        return self._identity.seal(HELLO_CONTEXT, hello.SerializeToString())

    def knock(self) -> None:
        """A stranger dialled; every ``knock`` is followed by one ``forget``. Raises ``RemoteProtocolError``
        when full."""
        if self._strangers + self._inside.total() >= MAX_INBOUND_LINKS:
            raise RemoteProtocolError("too many links", f"all {MAX_INBOUND_LINKS} are taken")
        self._strangers += 1

    def forget(self) -> None:
        """The stranger has been admitted or is gone."""
        self._strangers -= 1

    def admit(self, sealed: bytes, certificate_digest: bytes) -> PeerId:
        """The peer behind a hello that passed every check; ``leave`` it later. Raises
        ``RemoteProtocolError``."""
        if len(sealed) > MAX_HELLO_BYTES:
            raise RemoteProtocolError("wrong hello", f"{len(sealed)} bytes")
        signer, content = unseal(HELLO_CONTEXT, sealed)
        hello = LinkHello()
        try:
            hello.ParseFromString(content)
        except DecodeError:
            raise RemoteProtocolError("wrong hello", "unreadable") from None
        self._check(hello, signer, certificate_digest)
        if self._inside[signer] >= MAX_INBOUND_LINKS_PER_PEER:
            raise RemoteProtocolError("too many links", f"{signer} holds {self._inside[signer]}")
        self._remember(signer, hello.nonce)
        self._inside[signer] += 1
        return signer

    def leave(self, peer: PeerId) -> None:
        """A link of an admitted peer ended."""
        self._inside[peer] -= 1
        if self._inside[peer] <= 0:
            del self._inside[peer]

    def _check(self, hello: LinkHello, signer: PeerId, certificate_digest: bytes) -> None:
        if hello.from_peer != signer:
            raise RemoteProtocolError("wrong hello", "not signed by its sender")
        if hello.to_peer != self._identity.peer_id:
            raise RemoteProtocolError("wrong addressee", f"meant for {hello.to_peer[:64]!r}")
        if hello.run != self._run:
            raise RemoteProtocolError(
                "other run", f"run {hello.run[:8].hex()}, this is {self._run[:8].hex()}"
            )
        if hello.certificate_digest != certificate_digest:
            raise RemoteProtocolError("other certificate", "the link was opened to somebody in between")
        age_s = self._clock() - hello.sent_at
        if not abs(age_s) <= HELLO_WINDOW_S:  # written so that NaN is refused
            raise RemoteProtocolError(
                "stale hello",
                f"signed {age_s:.0f} s ago; if that is the clock, set it (within {HELLO_WINDOW_S:.0f} s)",
            )
        if len(hello.nonce) != 16:
            raise RemoteProtocolError("wrong hello", "nonce is not 16 bytes")

    def _remember(self, signer: PeerId, nonce: bytes) -> None:
        now = self._clock()
        while self._nonces and next(iter(self._nonces.values())) <= now:
            (old, _), _ = self._nonces.popitem(last=False)
            self._nonces_of[old] -= 1
            if not self._nonces_of[old]:
                del self._nonces_of[old]
        if (signer, nonce) in self._nonces:
            raise RemoteProtocolError("replayed hello", f"by {signer}")
        if len(self._nonces) >= MAX_NONCES or self._nonces_of[signer] >= MAX_NONCES_PER_PEER:
            raise RemoteProtocolError("too many links", "dialled too often; wait a few minutes")
        self._nonces[signer, nonce] = (
            now + 2 * HELLO_WINDOW_S
        )  # the latest moment at which it could still pass as fresh
        self._nonces_of[signer] += 1
