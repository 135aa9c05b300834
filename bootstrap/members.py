"""The members of a run: the book that its organiser keeps, and the tickets made from it.

The book is the file ``members`` in the folder of the run's first seed, a certificate in each line. The
seed begins it where its run file says ``members = true``; it need not be up for what is done here. Private
keys are in the tickets alone: one that is lost is revoked, and another made.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError, RemoteProtocolError, TransportError
from p2p_co2.system.folders import data_home, keep_private
from p2p_co2.system.process import full_disk_named
from p2p_co2.ticket import Ticket, kept_seeds, read_ticket
from p2p_co2.wire.envelope import head_of, unsent
from p2p_co2.wire.identity import Identity, parsed
from p2p_co2.wire.limits import MAX_ADDRESSES, MAX_REVOKED
from p2p_co2.wire.members import REVOKED_CONTEXT, Pass, read_revocation
from p2p_co2.wire.messages_pb2 import Certificate, PeerRecord, Revocation, Revoked
from p2p_co2.wire.names import is_name

if TYPE_CHECKING:
    from p2p_co2.node.network import Network

KNOWN = "known-peers"
"""In the folder of the seed: a ticket by way of peers that it saw last, for when it is down itself."""


class Book:
    """That in ``folder``; of the only seed here that has one, if None. Raises ``ConfigError``."""

    def __init__(self, folder: Path | None) -> None:
        kept = [path.parent for path in sorted((data_home() / "seeds").glob("*/members"))]
        if folder is None and len(kept) != 1:
            which = f", such as {', '.join(map(str, kept))}" if kept else ""
            raise ConfigError.of_option("--folder", f"name the folder of the run's first seed{which}")
        self.folder = folder or kept[0]
        self._path = self.folder / "members"
        self._revoked = self.folder / "revoked"
        if not self._path.is_file():
            cure = 'set "members = true" in its run file and start the seed once'
            raise ConfigError.of_option("--folder", f"{self.folder} is of no run with members; {cure}")
        self.key = Identity.load_or_create(self.folder / "identity")
        self.ticket = Ticket.parse(read_ticket(f"@{self.folder / 'ticket'}"))

    def certificates(self) -> list[Certificate]:
        """All that were ever made, in that order. Raises ``ConfigError`` for a line that is none."""
        try:
            lines = self._path.read_text(encoding="ascii").split()
            return [parsed(Certificate, bytes.fromhex(line)) for line in lines]
        except (ValueError, RemoteProtocolError):
            raise ConfigError(str(self._path), "", "has a line that is no certificate; take it out") from None

    def invite(self, name: str, days: float, watches: bool) -> Ticket:
        """A ticket for one person. Raises ``ConfigError``."""
        if not is_name(name):
            raise ConfigError.of_option("NAME", "at most 32 printable characters, none of them ~")
        if not 0 < days <= 3650:  # written so that NaN is refused
            raise ConfigError.of_option("--days", f"above 0, at most 3650 (got {days:g})")
        admits = Pass.issue(self.key, self.ticket.run, name, time.time() + days * 86400, watches)
        ticket = replace(self.ticket, admits=admits)  # refused if the key here is not the run's
        with full_disk_named(self.folder), self._path.open("a", encoding="ascii") as book:
            book.write(f"{admits.certificate.hex()}\n")
        return ticket

    def revocation(self) -> Revocation:
        """The newest one; an empty one if nobody was revoked."""
        if not self._revoked.exists():
            return Revocation(run=self.ticket.run)
        try:
            return read_revocation(self.ticket.run, self.key.peer_id, self._revoked.read_bytes())
        except RemoteProtocolError as error:
            cure = "move it away, and revoke anew whom it named"
            raise ConfigError(str(self._revoked), "", f"is of no use: {error}; {cure}") from None

    def revoke(self, name: str) -> bytes:
        """All tickets of ``name`` hold no more. Returns the sealed revocation, to be handed to the peers."""
        from p2p_co2.net.discovery.records import MAX_LIFETIME_S

        # What one wrote into the DHT while his ticket held is believed for as long as it may stand there.
        known = self.certificates()
        past = {one.person for one in known if one.expires_at < time.time() - MAX_LIFETIME_S - 86400}
        named = {one.person for one in known if one.name == name} - past
        if not named:
            raise ConfigError.of_option("NAME", f"nobody here is called {name}; p2p-co2 members lists all")
        last = self.revocation()
        persons = named.union(last.persons) - past  # also those whose line the book has lost
        if len(persons) > MAX_REVOKED:
            raise ConfigError.of_option("NAME", f"{MAX_REVOKED} are revoked already; wait until some expire")
        number = max(last.number + 1, int(time.time()))  # also where the last one is lost
        said = Revocation(run=self.ticket.run, number=number, persons=sorted(persons))
        sealed = self.key.seal(REVOKED_CONTEXT, said.SerializeToString())
        with full_disk_named(self.folder):
            keep_private(self._revoked, sealed)
        return sealed


def revoke(book: Book, name: str, say: Callable[[str], None]) -> None:
    """Revoke all tickets of ``name``, and tell the peers that are up; they tell each other. Raises
    ``ConfigError``, and ``TransportError`` if nobody could be told."""
    sealed = book.revoke(name)
    seeds = (*book.ticket.seeds, *kept_seeds(book.folder, book.ticket.run, KNOWN))[:MAX_ADDRESSES]
    admits = Pass.issue(book.key, book.ticket.run, "organiser", time.time() + 86400)
    try:
        with tempfile.TemporaryDirectory() as folder:
            told = asyncio.run(_hand_out(replace(book.ticket, seeds=seeds, admits=admits), sealed, folder))
        if not told:
            raise TransportError("no peer is up")
    except TransportError as error:
        raise TransportError(f"{name} is revoked, but no peer was told: {error}; run this again") from None
    say(f"{name} is revoked; {told} peers were told, and tell the others")


async def _hand_out(ticket: Ticket, sealed: bytes, folder: str) -> int:
    """How many peers took it."""
    from p2p_co2.node.network import Network

    config = PeerConfig(folder=Path(folder), upnp=False, relay=False)
    network = await Network.open(ticket, config, lambda *_: None)
    try:
        await network.start_carriers(_ignore, lambda *_: None)
        network.door.members.take(sealed)
        records = await network.find_peers()
        return sum(await asyncio.gather(*(_hand_to(network, record, sealed) for record in records)))
    finally:
        await network.close()


async def _hand_to(network: Network, record: PeerRecord, sealed: bytes) -> bool:
    message = unsent(Revoked(sealed=sealed), head_of(network.run.stage_digest(record.stage)))
    for carrier in network.carriers:
        try:
            link = await carrier.connect(record)
            await link.send(bytes(message))
            await link.close()
        except (TransportError, RemoteProtocolError):
            continue
        return True
    return False


async def _ignore(*_: object) -> None:
    """What peers say to this process."""
