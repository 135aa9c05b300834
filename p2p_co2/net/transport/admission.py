"""Who may open a link to us: the check of the first message of every link, shared by the carriers.

The dialler signs who it is, whom it wants, which run, which TLS certificate it sees, when, and a fresh nonce.
So a hello cannot be forged, shown to another peer, carried into another run, passed on by somebody in the
middle, or used twice. Within ``HELLO_WINDOW_S`` its nonce is remembered; after that it is too old. In a run
with members it shows a badge (``wire.members``).

Identities are free to make, so places are shared out by neighbourhood: 256 IPv4 addresses, 48 bits of IPv6,
or all that come by relays. This machine itself is none. One holds no more places than it leaves to all
others, or a few. Some places are kept for peers that work (``is_known``). Everything remembered is bounded.
Price: clocks must agree to two minutes, and newcomers may find no place while somebody in many neighbourhoods
holds them.
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.addresses import is_loopback
from p2p_co2.wire.identity import Identity, PeerId, parsed, unseal
from p2p_co2.wire.limits import HELLO_WINDOW_S
from p2p_co2.wire.members import Members
from p2p_co2.wire.messages_pb2 import LinkHello

_Key = TypeVar("_Key")
HELLO_CONTEXT = b"p2p-co2 link hello"
MAX_HELLO_BYTES = 1024
MAX_INBOUND_LINKS = 256
KEPT_LINKS = 64
"""Of all links so many are places for peers that we have worked with."""
MAX_INBOUND_LINKS_PER_PEER = 4
MAX_STRANGERS = 64
"""Those that have opened a link and have not said hello."""
FEW = 4
"""Places that any neighbourhood may hold."""
RELAYED = "relays"
"""The neighbourhood of all that do not come directly."""
MAX_NONCES = 16384
MAX_NONCES_PER_PEER = 64


class _Places:
    """At most ``most`` places, and those that are taken, by neighbourhood."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken: Counter[str] = Counter()

    def has_room(self, neighbourhood: str) -> bool:
        left = self._most - self.taken.total()
        may_hold = max(left, FEW) if neighbourhood else self._most
        return left > 0 and self.taken[neighbourhood] < may_hold


class Admission:
    """Signs our hellos and checks those of others. ``run``: the run's digest (32 bytes); ``clock``: unix
    seconds."""

    def __init__(self, identity: Identity, run: bytes, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._run = run
        self._clock = clock
        self.is_known: Callable[[PeerId], bool] = lambda peer: False
        """Whether a peer has worked with us of late."""
        self.members = Members(run)
        self._strangers = _Places(MAX_STRANGERS)
        self._links = _Places(MAX_INBOUND_LINKS - KEPT_LINKS)
        self._inside: Counter[PeerId] = Counter()
        self._nonces: OrderedDict[tuple[PeerId, bytes], float] = OrderedDict()
        self._nonces_of: Counter[PeerId] = Counter()

    @property
    def links(self) -> int:
        """How many admitted links are open."""
        return self._inside.total()

    def is_inside(self, peer: PeerId) -> bool:
        """Whether it holds a link to us."""
        return peer in self._inside

    def hello(self, to_peer: PeerId, certificate_digest: bytes) -> bytes:
        """Our sealed hello for one new link."""
        hello = LinkHello(
            from_peer=self._identity.peer_id,
            to_peer=to_peer,
            run=self._run,
            certificate_digest=certificate_digest,
            sent_at=self._clock(),
            nonce=os.urandom(16),
            badge=self.members.badge,
        )
        return self._identity.seal(HELLO_CONTEXT, hello.SerializeToString())

    def knock(self, network: str = "") -> None:
        """A stranger dialled from ``network`` (see ``network_at``); ``forget`` follows. Raises
        ``RemoteProtocolError`` when full."""
        if not self._strangers.has_room(network):
            raise RemoteProtocolError("too many links", "too many have dialled and not said hello")
        self._strangers.taken[network] += 1

    def forget(self, network: str = "") -> None:
        """The stranger has been admitted or is gone."""
        _take_off(self._strangers.taken, network)

    def admit(self, sealed: bytes, certificate_digest: bytes, network: str = "") -> PeerId:
        """The peer behind a hello that passed every check; ``leave`` follows. Raises
        ``RemoteProtocolError``."""
        if len(sealed) > MAX_HELLO_BYTES:
            raise RemoteProtocolError("wrong hello", f"{len(sealed)} bytes")
        signer, content = unseal(HELLO_CONTEXT, sealed)
        hello = parsed(LinkHello, content)
        self._check(hello, signer, certificate_digest)
        if self._inside.get(signer, 0) >= MAX_INBOUND_LINKS_PER_PEER:
            raise RemoteProtocolError("too many links", f"{signer} holds {self._inside[signer]}")
        taken = self._links.taken
        if not self._links.has_room(network) and (
            self.links >= MAX_INBOUND_LINKS or not self.is_known(signer)
        ):
            raise RemoteProtocolError("too many links", f"{self.links} are open, {taken[network]} from there")
        self._remember(signer, hello.nonce)
        self._inside[signer] += 1
        taken[network] += 1
        return signer

    def leave(self, peer: PeerId, network: str = "") -> None:
        """A link of an admitted peer ended."""
        _take_off(self._inside, peer)
        _take_off(self._links.taken, network)

    def _check(self, hello: LinkHello, signer: PeerId, certificate_digest: bytes) -> None:
        age_s = self._clock() - hello.sent_at
        if hello.from_peer != signer:
            raise RemoteProtocolError("wrong hello", "not signed by its sender")
        if hello.to_peer != self._identity.peer_id:
            raise RemoteProtocolError("wrong addressee", f"meant for {hello.to_peer[:64]!r}")
        if hello.run != self._run:
            runs = f"run {hello.run[:8].hex()}, this is {self._run[:8].hex()}"
            raise RemoteProtocolError("other run", runs)
        if hello.certificate_digest != certificate_digest:
            raise RemoteProtocolError("other certificate", "the link was opened to somebody in between")
        if not abs(age_s) <= HELLO_WINDOW_S:  # written so that NaN is refused
            raise RemoteProtocolError(
                "stale hello",
                f"signed {age_s:.0f} s ago; if that is the clock, set it (within {HELLO_WINDOW_S:.0f} s)",
            )
        if len(hello.nonce) != 16:
            raise RemoteProtocolError("wrong hello", "nonce is not 16 bytes")
        self.members.check(signer, hello.badge)

    def _remember(self, signer: PeerId, nonce: bytes) -> None:
        now = self._clock()
        while self._nonces and next(iter(self._nonces.values())) <= now:
            (old, _), _ = self._nonces.popitem(last=False)
            _take_off(self._nonces_of, old)
        if (signer, nonce) in self._nonces:
            raise RemoteProtocolError("replayed hello", f"by {signer}")
        is_full = len(self._nonces) >= MAX_NONCES and not self.is_known(signer)
        if is_full or len(self._nonces) >= 2 * MAX_NONCES or self._nonces_of[signer] >= MAX_NONCES_PER_PEER:
            raise RemoteProtocolError("too many links", f"dialled too often, for {HELLO_WINDOW_S:.0f} s more")
        # Until the latest moment at which it could still pass as fresh.
        self._nonces[signer, nonce] = now + 2 * HELLO_WINDOW_S
        self._nonces_of[signer] += 1


def network_at(address: str) -> str:
    """The neighbourhood of an address at which we see somebody: empty for this machine itself."""
    if is_loopback(address):
        return ""
    bits = 24 if ipaddress.ip_address(address).version == 4 else 48
    return str(ipaddress.ip_network((address, bits), strict=False))


def _take_off(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
