"""Who may open a link to us: the check of the first message of every link, shared by the carriers.

The dialler signs (who it is, whom it wants, which run, which TLS certificate it sees, when, a fresh nonce).
So a hello cannot be forged, shown to another peer, carried into another run, passed on by somebody in the
middle (his certificate differs), or used twice: within ``HELLO_WINDOW_S`` its nonce is remembered, after that
it is too old.

Identities are free to make, so places are also shared out by network (an IPv4 address, 64 bits of an IPv6
one; all that come by relays are one network, this machine itself is none). Some places are kept for those
who work: peers whose slices are in a mean of late (``is_known``); and some for networks whose neighbourhood
(256 IPv4 addresses, 48 bits of IPv6, which one customer may have) holds ``FEW`` at most. So whoever wants all
places needs dozens of neighbourhoods, and even then those who are in the swarm get in again.

Pure but for the injected clock. Everything it remembers is bounded: ``MAX_INBOUND_LINKS``,
``MAX_INBOUND_LINKS_PER_PEER``, ``MAX_NONCES``, ``MAX_NONCES_PER_PEER``. Price: peers' clocks must agree to
within two minutes, a peer that dials very often is refused for a while, and newcomers may find no place while
somebody in many neighbourhoods holds them all, or, by relays, while somebody floods those.
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.addresses import is_loopback
from p2p_co2.net.transport.probe_limits import network_of
from p2p_co2.protocol.wire.identity import Identity, PeerId, unseal
from p2p_co2.protocol.wire.limits import HELLO_WINDOW_S
from p2p_co2.protocol.wire.messages_pb2 import LinkHello

_Key = TypeVar("_Key")
HELLO_CONTEXT = b"p2p-co2 link hello"
MAX_HELLO_BYTES = 1024
MAX_INBOUND_LINKS = 256
"""Links that all peers together may hold to us."""
KEPT_LINKS = 64
"""Of these, places for peers that we have worked with."""
SPREAD_LINKS, FEW = 64, 4
"""Of the others, places for networks whose neighbourhood holds no more than so many."""
MAX_LINKS_PER_NETWORK = 96
"""What peers behind one address may hold together, but for those that we have worked with."""
MAX_STRANGERS, MAX_STRANGERS_PER_NETWORK = 64, 24
"""Who has opened a link and has not said hello."""
SPREAD_STRANGERS = 24
"""As ``SPREAD_LINKS``, of them."""
MAX_INBOUND_LINKS_PER_PEER = 4
RELAYED = "relays"
"""The network of all that do not come directly."""
MAX_NONCES = 16384
MAX_NONCES_PER_PEER = 64


class Admission:
    """Signs our hellos and checks those of others. ``run`` is the digest of the run (32 bytes); ``clock``
    gives unix seconds."""

    def __init__(self, identity: Identity, run: bytes, clock: Callable[[], float]) -> None:
        self._identity, self._run, self._clock = identity, run, clock
        self.is_known: Callable[[PeerId], bool] = lambda peer: False
        """Whether a peer has worked with us of late."""
        self._inside: Counter[PeerId] = Counter()
        self._strangers: Counter[str] = Counter()
        self._networks: Counter[str] = Counter()
        self._around: Counter[str] = Counter()
        """Links by neighbourhood, and in ``_knocking`` strangers."""
        self._knocking: Counter[str] = Counter()
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

    def knock(self, network: str = "") -> None:
        """A stranger dialled from ``network`` (empty for this machine); every ``knock`` is followed by one
        ``forget``. Raises ``RemoteProtocolError`` when full."""
        here = self._strangers[network] if network else 0
        all_ = self._strangers.total()
        is_full = all_ >= MAX_STRANGERS or here >= MAX_STRANGERS_PER_NETWORK
        if is_full or (all_ >= MAX_STRANGERS - SPREAD_STRANGERS and _has_many(self._knocking, network)):
            raise RemoteProtocolError("too many links", "too many have dialled and not said hello")
        self._strangers[network] += 1
        self._knocking[_neighbourhood(network)] += 1

    def forget(self, network: str = "") -> None:
        """The stranger has been admitted or is gone."""
        _take_off(self._strangers, network)
        _take_off(self._knocking, _neighbourhood(network))

    def admit(self, sealed: bytes, certificate_digest: bytes, network: str = "") -> PeerId:
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
        if self._inside.get(signer, 0) >= MAX_INBOUND_LINKS_PER_PEER:
            raise RemoteProtocolError("too many links", f"{signer} holds {self._inside[signer]}")
        self._check_room(signer, network)
        self._remember(signer, hello.nonce)
        self._inside[signer] += 1
        self._networks[network] += 1
        self._around[_neighbourhood(network)] += 1
        return signer

    def leave(self, peer: PeerId, network: str = "") -> None:
        """A link of an admitted peer ended."""
        _take_off(self._inside, peer)
        _take_off(self._networks, network)
        _take_off(self._around, _neighbourhood(network))

    def _check_room(self, peer: PeerId, network: str) -> None:
        taken = self._inside.total()
        left = MAX_INBOUND_LINKS - KEPT_LINKS - taken
        has_many = _has_many(self._around, network) if left <= SPREAD_LINKS else False
        if left > 0 and not has_many and (not network or self._networks[network] < MAX_LINKS_PER_NETWORK):
            return
        if taken >= MAX_INBOUND_LINKS or not self.is_known(peer):
            raise RemoteProtocolError(
                "too many links", f"{taken} are open, {self._networks[network]} from there"
            )

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
        is_full = len(self._nonces) >= MAX_NONCES and not self.is_known(signer)
        if is_full or len(self._nonces) >= 2 * MAX_NONCES or self._nonces_of[signer] >= MAX_NONCES_PER_PEER:
            raise RemoteProtocolError("too many links", "dialled too often; wait a few minutes")
        self._nonces[signer, nonce] = (
            now + 2 * HELLO_WINDOW_S
        )  # the latest moment at which it could still pass as fresh
        self._nonces_of[signer] += 1


def network_at(address: str) -> str:
    """What an address at which we see somebody counts as: empty for this machine itself."""
    return "" if is_loopback(address) else network_of(address)


def _neighbourhood(network: str) -> str:
    """Addresses that one customer may have."""
    if not network or network == RELAYED:
        return network
    parsed = ipaddress.ip_network(network)
    return str(parsed.supernet(new_prefix=24 if parsed.version == 4 else 48))


def _has_many(held: Counter[str], network: str) -> bool:
    return bool(network) and held[_neighbourhood(network)] >= FEW


def _take_off(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
