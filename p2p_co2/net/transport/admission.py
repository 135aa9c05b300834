"""Who may open a link to us: the check of the first message of every link, shared by the carriers.

The dialler signs who it is, whom it wants, which run, which TLS certificate it sees, when, and a fresh nonce.
So a hello cannot be forged, shown to another peer, carried into another run, passed on by somebody in the
middle, or used twice. Within ``HELLO_WINDOW_S`` its nonce is remembered; after that it is too old.

Identities are free to make, so places are shared out by network (``network_of``; all that come by relays are
one, this machine is none). Some places are kept for peers that work (``is_known``), some for neighbourhoods
(256 IPv4 addresses, 48 bits of IPv6) that hold few. Everything remembered is bounded. Price: clocks must
agree to two minutes, and newcomers may find no place while somebody in many neighbourhoods holds them all.
"""

from __future__ import annotations

import ipaddress
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.addresses import is_loopback, network_of
from p2p_co2.protocol.wire.identity import Identity, PeerId, unseal
from p2p_co2.protocol.wire.limits import HELLO_WINDOW_S
from p2p_co2.protocol.wire.messages_pb2 import LinkHello

_Key = TypeVar("_Key")
HELLO_CONTEXT = b"p2p-co2 link hello"
MAX_HELLO_BYTES = 1024
MAX_INBOUND_LINKS, MAX_INBOUND_LINKS_PER_PEER, MAX_LINKS_PER_NETWORK = 256, 4, 96
KEPT_LINKS = 64
"""Of ``MAX_INBOUND_LINKS``, places for peers that we have worked with."""
SPREAD_LINKS, SPREAD_STRANGERS, FEW = 64, 24, 4
"""The last places for strangers are for neighbourhoods that hold fewer than ``FEW``."""
MAX_STRANGERS, MAX_STRANGERS_PER_NETWORK = 64, 24
"""Those that have opened a link and have not said hello."""
RELAYED = "relays"
"""The network of all that do not come directly."""
MAX_NONCES, MAX_NONCES_PER_PEER = 16384, 64


class _Places:
    """Places that are taken, by network and by neighbourhood; the last ``spread`` of ``most`` are for those
    whose neighbourhood holds few."""

    def __init__(self, most: int, per_network: int, spread: int) -> None:
        self._most, self._per_network, self._spread = most, per_network, spread
        self._networks: Counter[str] = Counter()
        self._around: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._networks.total()

    def of(self, network: str) -> int:
        return self._networks[network]

    def has_room(self, network: str) -> bool:
        left = self._most - self.taken
        is_crowded = bool(network) and (
            self._networks[network] >= self._per_network
            or (left <= self._spread and self._around[_neighbourhood(network)] >= FEW)
        )
        return left > 0 and not is_crowded

    def take(self, network: str) -> None:
        self._networks[network] += 1
        self._around[_neighbourhood(network)] += 1

    def give_back(self, network: str) -> None:
        _take_off(self._networks, network)
        _take_off(self._around, _neighbourhood(network))


class Admission:
    """Signs our hellos and checks those of others. ``run``: the run's digest (32 bytes); ``clock``: unix
    seconds."""

    def __init__(self, identity: Identity, run: bytes, clock: Callable[[], float]) -> None:
        self._identity, self._run, self._clock = identity, run, clock
        self.is_known: Callable[[PeerId], bool] = lambda peer: False
        """Whether a peer has worked with us of late."""
        self._strangers = _Places(MAX_STRANGERS, MAX_STRANGERS_PER_NETWORK, SPREAD_STRANGERS)
        self._links = _Places(MAX_INBOUND_LINKS - KEPT_LINKS, MAX_LINKS_PER_NETWORK, SPREAD_LINKS)
        self._inside: Counter[PeerId] = Counter()
        self._nonces: OrderedDict[tuple[PeerId, bytes], float] = OrderedDict()
        self._nonces_of: Counter[PeerId] = Counter()

    @property
    def links(self) -> int:
        """How many admitted links are open."""
        return self._inside.total()

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
        """A stranger dialled from ``network`` (empty for this machine); ``forget`` follows. Raises
        ``RemoteProtocolError`` when full."""
        if not self._strangers.has_room(network):
            raise RemoteProtocolError("too many links", "too many have dialled and not said hello")
        self._strangers.take(network)

    def forget(self, network: str = "") -> None:
        """The stranger has been admitted or is gone."""
        self._strangers.give_back(network)

    def admit(self, sealed: bytes, certificate_digest: bytes, network: str = "") -> PeerId:
        """The peer behind a hello that passed every check; ``leave`` follows. Raises
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
        taken = self._links.taken
        if not self._links.has_room(network) and (taken >= MAX_INBOUND_LINKS or not self.is_known(signer)):
            detail = f"{taken} are open, {self._links.of(network)} from there"
            raise RemoteProtocolError("too many links", detail)
        self._remember(signer, hello.nonce)
        self._inside[signer] += 1
        self._links.take(network)
        return signer

    def leave(self, peer: PeerId, network: str = "") -> None:
        """A link of an admitted peer ended."""
        _take_off(self._inside, peer)
        self._links.give_back(network)

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

    def _remember(self, signer: PeerId, nonce: bytes) -> None:
        now = self._clock()
        while self._nonces and next(iter(self._nonces.values())) <= now:
            (old, _), _ = self._nonces.popitem(last=False)
            _take_off(self._nonces_of, old)
        if (signer, nonce) in self._nonces:
            raise RemoteProtocolError("replayed hello", f"by {signer}")
        is_full = len(self._nonces) >= MAX_NONCES and not self.is_known(signer)
        if is_full or len(self._nonces) >= 2 * MAX_NONCES or self._nonces_of[signer] >= MAX_NONCES_PER_PEER:
            raise RemoteProtocolError("too many links", "dialled too often; wait a few minutes")
        # Until the latest moment at which it could still pass as fresh.
        self._nonces[signer, nonce] = now + 2 * HELLO_WINDOW_S
        self._nonces_of[signer] += 1


def network_at(address: str) -> str:
    """The network of an address at which we see somebody: empty for this machine itself."""
    return "" if is_loopback(address) else network_of(address)


def _neighbourhood(network: str) -> str:
    """Addresses that one customer may have."""
    if not network or network == RELAYED:
        return network
    parsed = ipaddress.ip_network(network)
    return str(parsed.supernet(new_prefix=24 if parsed.version == 4 else 48))


def _take_off(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
