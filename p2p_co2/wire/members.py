"""Who takes part in a run with members, and who no more: what its key signed.

The run's key signs a ``Certificate`` of each person's key. Each machine of that person shows a ``Badge``: the
certificate, and the person's signature over the machine's peer id. It stands in every hello, record and
question to a peer. ``Members`` of each process checks them, so no seed need be up. A ``Revocation`` lists
whose certificates hold no more, and in any run what is amended (``terms``). The one with the highest number
is kept, and passed on.

Law: whoever shows nothing, or something forged, is refused before anything of it is kept. Price: two
signatures to check when a peer is met, and one person may come with many machines.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, Offence, RemoteProtocolError
from p2p_co2.wire.identity import Identity, PeerId, parsed, peer_id_of, unseal, verify
from p2p_co2.wire.limits import MAX_PEERS, MAX_REVOCATION_BYTES, MAX_REVOKED
from p2p_co2.wire.messages_pb2 import Badge, Certificate, PeerRecord, Revocation, RunPosition
from p2p_co2.wire.names import is_name
from p2p_co2.wire.terms import MAX_AMENDMENTS, RunTerms, is_bounded

MEMBER_CONTEXT = b"p2p-co2 member"
MACHINE_CONTEXT = b"p2p-co2 member's machine"
REVOKED_CONTEXT = b"p2p-co2 revoked"
BANNED = "banned by the owner's hand"


@dataclass(frozen=True)
class Pass:
    """What makes a ticket one person's: the ``certificate``, the run key's signature ``by_run``, and the
    person's private ``key`` (32 bytes), which is secret."""

    certificate: bytes
    by_run: bytes
    key: bytes = field(repr=False)

    @classmethod
    def issue(
        cls, run_key: Identity, run: bytes, name: str, expires_at: float, watches: bool = False
    ) -> Pass:
        """One for a new person."""
        key = Ed25519PrivateKey.generate()
        person = key.public_key().public_bytes_raw()
        said = Certificate(person=person, name=name, expires_at=int(expires_at), watches=watches)
        certificate = said.SerializeToString()
        by_run = run_key.sign(MEMBER_CONTEXT, run + certificate)
        return cls(certificate, by_run, key.private_bytes_raw())

    def badge(self, run: bytes, peer: PeerId) -> Badge:
        """What the machine ``peer`` of this person shows."""
        person = Identity(Ed25519PrivateKey.from_private_bytes(self.key))
        by_person = person.sign(MACHINE_CONTEXT, run + peer.encode())
        return Badge(certificate=self.certificate, by_run=self.by_run, by_person=by_person)


def read_certificate(run: bytes, run_key: PeerId, data: bytes, by_run: bytes) -> Certificate:
    """What the run's key signed. Raises ``RemoteProtocolError``."""
    verify(run_key, MEMBER_CONTEXT, run + data, by_run)
    certificate = parsed(Certificate, data)
    if len(certificate.person) != 32 or not is_name(certificate.name):
        raise RemoteProtocolError("wrong certificate", "out of bounds")
    return certificate


def read_revocation(run: bytes, run_key: PeerId, sealed: bytes) -> Revocation:
    """What the run's key sealed with ``REVOKED_CONTEXT``. Raises ``RemoteProtocolError``."""
    if len(sealed) > MAX_REVOCATION_BYTES:
        raise RemoteProtocolError(Offence.TOO_LARGE, f"a revocation of {len(sealed)} bytes")
    signer, content = unseal(REVOKED_CONTEXT, sealed)
    revocation = parsed(Revocation, content)
    is_whole = len(revocation.persons) <= MAX_REVOKED and all(len(one) == 32 for one in revocation.persons)
    is_whole = is_whole and len(revocation.amendments) <= MAX_AMENDMENTS
    is_whole = is_whole and all(map(is_bounded, revocation.amendments))
    if signer != run_key or revocation.run != run or not is_whole:
        raise RemoteProtocolError("wrong revocation", "not by this run's key, of another run, or too long")
    return revocation


class Members:
    """What one process knows of who may take part. A run that is not ``is_closed`` is everybody's, but for
    those whom this peer's owner banned. ``clock``: unix seconds. ``settings``: the run's. One thread."""

    def __init__(
        self, run: bytes, run_key: PeerId | None = None, is_closed: bool = False,
        clock: Callable[[], float] = time.time, settings: RunConfig | None = None,
    ) -> None:  # fmt: skip
        self._run = run
        self._run_key = run_key or Identity.generate().peer_id  # nobody's
        self.terms = RunTerms(settings or RunConfig())
        self.is_closed = is_closed
        self._clock = clock
        self.badge: Badge | None = None
        """What this process shows; nothing where nobody asks."""
        self.sealed = b""
        """The newest revocation; empty if there is none."""
        self.changed: list[Callable[[], None]] = []
        """What is called when others are out than were before, or something is amended."""
        self._revoked = frozenset[bytes]()
        self._number = 0
        """Of that revocation."""
        self._banned = frozenset[str]()
        """By this peer's owner."""
        self._met: OrderedDict[PeerId, tuple[bytes, Certificate]] = OrderedDict()
        """Those that showed a right badge: its digest, and what it says."""

    def check(self, peer: PeerId, shown: Badge, looks: bool = False, at: float | None = None) -> None:
        """Raise ``RemoteProtocolError`` unless ``peer`` may take part by what it shows, or look. ``at``: when
        it did, if that is not now."""
        if peer in self._banned:
            raise RemoteProtocolError(Offence.NO_MEMBER, BANNED)
        if not self.is_closed:
            return
        digest = hashlib.sha256(shown.SerializeToString()).digest()
        certificate = self._met[peer][1] if self._met.get(peer, (b"",))[0] == digest else None
        if certificate is None:
            if not shown.certificate:
                cure = "this run takes members alone; ask the organiser for a ticket of your own"
                raise RemoteProtocolError(Offence.NO_MEMBER, cure)
            certificate = read_certificate(self._run, self._run_key, shown.certificate, shown.by_run)
            person = peer_id_of(certificate.person)
            verify(person, MACHINE_CONTEXT, self._run + peer.encode(), shown.by_person)
        if trouble := self._trouble(certificate, at):
            raise RemoteProtocolError(Offence.NO_MEMBER, trouble)
        if certificate.watches and not looks:
            raise RemoteProtocolError(Offence.NO_MEMBER, "its ticket is for looking on alone")
        if at is None and not certificate.watches:  # else it may send nothing by that
            self._met[peer] = digest, certificate
            if len(self._met) > 2 * MAX_PEERS:  # a look into the DHT puts out nobody heard since the last
                self._met.popitem(last=False)

    def admits(self, said: PeerRecord | RunPosition, at: float | None = None) -> bool:
        """Whether who has written it may take part, or might ``at`` that time."""
        try:
            self.check(PeerId(said.peer), said.badge, at=at)
        except RemoteProtocolError:
            return False
        return True

    def take(self, sealed: bytes) -> None:
        """A revocation, from whomever. Raises ``RemoteProtocolError``."""
        if sealed == self.sealed:
            return
        revocation = read_revocation(self._run, self._run_key, sealed)
        if revocation.number > self._number:
            try:
                self.terms.amend(revocation.amendments)
            except ConfigError as error:
                raise RemoteProtocolError("wrong revocation", str(error)) from None
            self._number = revocation.number
            self._revoked = frozenset(revocation.persons)
            self.sealed = sealed
            self._tell()

    def ban(self, peers: frozenset[str]) -> None:
        """Have nothing to do with ``peers``, and no others."""
        if peers != self._banned:
            self._banned = peers
            self._tell()

    def _tell(self) -> None:
        for tell in self.changed:
            tell()

    def trouble_with(self, peer: PeerId) -> str:
        """Why nothing is taken from ``peer``, and nothing sent to it; "" if it may take part."""
        met = self._met.get(peer)
        if peer in self._banned:
            return BANNED
        if not self.is_closed:
            return ""
        if met is None:
            return "it has not shown a ticket of its own"
        self._met.move_to_end(peer)  # who is at work is not forgotten for those that pass by
        return self._trouble(met[1])

    def _trouble(self, certificate: Certificate, at: float | None = None) -> str:
        """Why it holds no more; "" if it does."""
        if certificate.person in self._revoked:
            return "its ticket was revoked by the organiser"
        if certificate.expires_at < (self._clock() if at is None else at):
            return "its ticket has expired; ask the organiser for a new one"
        return ""
