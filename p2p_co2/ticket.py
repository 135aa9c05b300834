"""A ticket: one word that invites to a run.

It carries what a newcomer cannot look up: the digest of the run's settings, the key that signs them, and
addresses of seeds. Everything else comes from the swarm and is checked against these. Not a secret.

In a run with members a ticket is one person's: it holds a ``Pass`` besides, and **is a secret**.

Form: ``p2pco2-`` and the base58 of (version, run, run key, seeds, 4 bytes of sha256). Version 2 has the pass
behind the seeds: certificate, the run key's signature, private key. Base58 has no letters that look alike;
only the one spelling that ``str`` gives is taken. About 130 characters for one seed, 400 with a pass."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import base58

from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import RemoteProtocolError, TicketError
from p2p_co2.system.process import VARIABLES
from p2p_co2.wire.identity import PeerId, peer_id_of, public_key_of
from p2p_co2.wire.limits import MAX_ADDRESSES
from p2p_co2.wire.members import Pass, read_certificate
from p2p_co2.wire.messages_pb2 import Certificate

PREFIX = "p2pco2-"
TICKET_VARIABLE = VARIABLES + "TICKET"
VERSION = 1
VERSION_OF_ONE = 2
"""Of a ticket that is one person's."""
MAX_TICKET_CHARACTERS = 4096
MAX_SEED_CHARACTERS = 255
_CHECKSUM_BYTES = 4
_KEY_BYTES = 32
_SEED = re.compile(r"(/[a-z0-9-]+/[A-Za-z0-9.:%_-]+(?:/[A-Za-z0-9.:%_-]+)*)/p2p/([1-9A-HJ-NP-Za-km-z]+)")


@dataclass(frozen=True)
class Ticket:
    """``run``: digest of the ``RunConfig`` (32 bytes). ``run_key``: the peer that signs the manifest.
    ``seeds``: multiaddrs that end in ``/p2p/ID``. ``admits``: in a run with members, whom it is for. Raises
    ``TicketError`` for values that make no ticket."""

    run: bytes
    run_key: PeerId
    seeds: tuple[str, ...]
    admits: Pass | None = None

    def __post_init__(self) -> None:
        if len(self.run) != 32:
            raise TicketError(f"the digest of a run has 32 bytes, not {len(self.run)}")
        if not 0 < len(self.seeds) <= MAX_ADDRESSES:
            raise TicketError(f"a ticket names 1 to {MAX_ADDRESSES} seeds, not {len(self.seeds)}")
        _key_of(self.run_key)
        for seed in self.seeds:
            _split(seed)
        self.certificate()

    def certificate(self) -> Certificate | None:
        """Whom it admits, until when, to what; None for a ticket that is nobody's own."""
        if self.admits is None:
            return None
        try:
            return read_certificate(self.run, self.run_key, self.admits.certificate, self.admits.by_run)
        except RemoteProtocolError:
            problem = "the ticket's certificate is not signed by the run's key"
            raise TicketError(f"{problem}; ask the organiser for a new one") from None

    @property
    def open_part(self) -> Ticket:
        """What of it is no secret."""
        return replace(self, admits=None)

    def __str__(self) -> str:
        version = VERSION if self.admits is None else VERSION_OF_ONE
        parts = [bytes((version,)), self.run, _key_of(self.run_key), bytes((len(self.seeds),))]
        for seed in self.seeds:
            address, peer = _split(seed)
            parts += [bytes((len(address),)), address.encode(), _key_of(peer)]
        if (admits := self.admits) is not None:
            parts += [bytes((len(admits.certificate),)), admits.certificate, admits.by_run, admits.key]
        content = b"".join(parts)
        return PREFIX + base58.b58encode(content + _checksum(content)).decode()

    @property
    def is_local(self) -> bool:
        """Whether all seeds are on the loopback: a swarm of one machine."""
        return all(is_loopback(seed) for seed in self.seeds)

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Read what ``str`` wrote; spaces and line ends around it do not matter. Raises ``TicketError`` in
        one line."""
        word = text.strip()
        if len(word) > MAX_TICKET_CHARACTERS:
            raise TicketError(f"this is no ticket: {len(word)} characters, at most {MAX_TICKET_CHARACTERS}")
        if not word.startswith(PREFIX):
            raise TicketError(f'this is no ticket: a ticket begins with "{PREFIX}"')
        try:
            data = base58.b58decode(word.removeprefix(PREFIX).encode("ascii"))
        except ValueError:  # also UnicodeEncodeError
            raise TicketError("the ticket has a character that no ticket has; copy it as a whole") from None
        content = data[:-_CHECKSUM_BYTES]
        checksum = data[-_CHECKSUM_BYTES:]
        if _checksum(content) != checksum:
            raise TicketError("the ticket is damaged or cut short; copy it again, as a whole")
        version = content[0] if content else 0
        if version not in (VERSION, VERSION_OF_ONE):
            raise TicketError(
                f"the ticket is of version {version}, this program reads up to {VERSION_OF_ONE}; install the "
                "version that the organiser uses"
            )
        ticket = cls._read(content[1:], version == VERSION_OF_ONE)
        if str(ticket) != word:
            raise TicketError("the ticket is not spelt the way tickets are; ask the organiser for a new one")
        return ticket

    @classmethod
    def _read(cls, content: bytes, is_of_one: bool) -> Ticket:
        """The fields behind the version byte; the checksum was right, so a fault here is the writer's."""
        rest = io.BytesIO(content)

        def take(count: int) -> bytes:
            taken = rest.read(count)
            if len(taken) < count:
                raise TicketError("the ticket ends too early; ask the organiser for a new one")
            return taken

        run = take(32)
        run_key = take(_KEY_BYTES)
        seeds = []
        for _ in range(take(1)[0]):
            address = take(take(1)[0]).decode("latin-1")
            seeds.append(f"{address}/p2p/{peer_id_of(take(_KEY_BYTES))}")
        admits = Pass(take(take(1)[0]), take(64), take(32)) if is_of_one else None
        return cls(run, peer_id_of(run_key), tuple(seeds), admits)


def read_ticket(text: str = "") -> str:
    """The ticket that ``text`` is or leads to: a ticket, ``@FILE``, ``-`` for standard input, or nothing for
    ``$P2P_CO2_TICKET`` (which may be any of these).

    A file or the input may hold more than the ticket, as what a seed prints does. The first word that looks
    like one is taken. What is a word already is returned as it is; ``Ticket.parse`` judges it. Raises
    ``TicketError``."""
    word = (text or os.environ.get(TICKET_VARIABLE, "")).strip()
    if not word:
        raise TicketError(
            f"no ticket: give the word that the seed printed, @FILE, -, or set ${TICKET_VARIABLE}"
        )
    if word == "-":
        return _first_ticket(sys.stdin, "standard input")
    if word.startswith("@"):
        try:
            with Path(word[1:]).expanduser().open(encoding="utf-8-sig", errors="ignore") as lines:
                return _first_ticket(lines, word[1:])
        except (OSError, RuntimeError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise TicketError(f"cannot read a ticket from {word[1:]}: {problem}") from None
    return word


def line_to_join(ticket: str, run: RunConfig) -> str:
    """What a volunteer of ``run`` types, beside a copy of its recipe's file or of its program."""
    if run.recipe == OWN_LOOP:  # every own loop's `join` reads the variable
        return f"{TICKET_VARIABLE}={ticket} python my_loop.py"
    file, _, function = run.recipe.rpartition(":")
    recipe = f" --recipe {shlex.quote(f'{Path(file).name}:{function}')}" if run.is_own_recipe else ""
    return f"p2p-co2 join {ticket}{recipe}"


def _first_ticket(lines: Iterable[str], where: str) -> str:
    """Looks no further than the line that has it: a seed that prints into a pipe goes on."""
    for line in islice(lines, 1000):
        for word in line.replace("\0", "").split():  # UTF-16 of a ticket has a zero beside each letter
            if word.startswith(PREFIX):
                return word
    raise TicketError(f'no ticket in {where}: a ticket begins with "{PREFIX}"')


def kept_seeds(folder: Path, run: bytes, file: str = "ticket") -> tuple[str, ...]:
    """Those of the ticket of ``run`` that a peer or seed keeps in its ``folder``; empty if there is none."""
    try:
        ticket = Ticket.parse((folder / file).read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, TicketError):
        return ()  # a first start, or a file that is no help
    return ticket.seeds if ticket.run == run else ()


def is_seed_address(maddr: str) -> bool:
    """Whether a ticket can name this multiaddr."""
    try:
        _split(maddr)
    except TicketError:
        return False
    return True


def by_peer(maddrs: Iterable[str]) -> dict[PeerId, list[str]]:
    """Multiaddrs that end in /p2p/ID by that id: one peer may have several."""
    found: dict[PeerId, list[str]] = {}
    for maddr in maddrs:
        found.setdefault(PeerId(maddr.rpartition("/p2p/")[2]), []).append(maddr)
    return found


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + content).digest()[:_CHECKSUM_BYTES]


def _key_of(peer: str) -> bytes:
    try:
        return public_key_of(peer)
    except RemoteProtocolError:
        raise TicketError(f"{peer[:64]!r} is no peer id of ours (Ed25519)") from None


def _split(seed: str) -> tuple[str, PeerId]:
    """("/ip4/203.0.113.5/tcp/31000", peer) of a seed's multiaddr."""
    found = _SEED.fullmatch(seed)
    if found is None or len(found[1]) > MAX_SEED_CHARACTERS:
        raise TicketError(
            f"{seed[:80]!r} is no seed address; one is /ip4/203.0.113.5/tcp/31000/p2p/12D3Koo..."
        )
    _key_of(found[2])
    return found[1], PeerId(found[2])


def is_loopback(seed: str) -> bool:
    """Whether a multiaddr is of this machine alone."""
    address = _address_of(seed)
    return address is not None and address.is_loopback


def is_private(seed: str) -> bool:
    """Whether a multiaddr leads nowhere from outside a local network."""
    address = _address_of(seed)
    return address is not None and address.is_private


def _address_of(seed: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    kind, host = seed.split("/")[1:3]
    try:
        return ipaddress.ip_address(host) if kind in {"ip4", "ip6"} else None
    except ValueError:
        return None
