"""What the organiser of a run keeps and signs: its members, with their tickets, and what is amended.

The book of members is the file ``members`` in the folder of the run's first seed, a certificate in each line.
The seed begins it where its run file says ``members = true``; it need not be up for what is done here.
Private keys are in the tickets alone: one that is lost is revoked, and another made. Any run can be amended.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, RemoteProtocolError, TransportError
from p2p_co2.system.folders import data_home, keep_private
from p2p_co2.system.process import full_disk_named
from p2p_co2.ticket import Ticket, kept_seeds, read_ticket
from p2p_co2.wire.envelope import head_of, unsent
from p2p_co2.wire.identity import Identity, parsed
from p2p_co2.wire.limits import MAX_ADDRESSES, MAX_REVOKED, MAX_VERSION
from p2p_co2.wire.members import REVOKED_CONTEXT, Pass, read_revocation
from p2p_co2.wire.messages_pb2 import Amendment, Certificate, PeerRecord, Revocation, Revoked
from p2p_co2.wire.names import is_name
from p2p_co2.wire.terms import MAX_AMENDMENTS, RunTerms, amended, value_of

if TYPE_CHECKING:
    from p2p_co2.node.network import Network

KNOWN = "known-peers"
"""In the folder of the seed: a ticket by way of peers that it saw last, for when it is down itself."""


class Book:
    """That in ``folder``; of the only seed here that has one, if None. ``of_any``: the run needs no members.
    Raises ``ConfigError``."""

    def __init__(self, folder: Path | None, of_any: bool = False) -> None:
        file = "ticket" if of_any else "members"
        kept = [path.parent for path in sorted((data_home() / "seeds").glob(f"*/{file}"))]
        if folder is None and len(kept) != 1:
            which = f", such as {', '.join(map(str, kept))}" if kept else ""
            raise ConfigError.of_option("--folder", f"name the folder of the run's first seed{which}")
        self.folder = folder or kept[0]
        self._path = self.folder / "members"
        self._revoked = self.folder / "revoked"
        if not (self.folder / file).is_file():
            cure = 'set "members = true" in its run file and start the seed once'
            cure = "name that of the run's first seed" if of_any else f"it is of no run with members; {cure}"
            raise ConfigError.of_option("--folder", f"{self.folder} has no file {file}; {cure}")
        self.key = Identity.load_or_create(self.folder / "identity")
        self.ticket = Ticket.parse(read_ticket(f"@{self.folder / 'ticket'}"))
        if of_any and self.key.peer_id != self.ticket.run_key:
            raise ConfigError.of_option("--folder", f"{self.folder} is not of the run's first seed")

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
        """The newest one; an empty one if nobody was revoked, and nothing amended."""
        if not self._revoked.exists():
            return Revocation(run=self.ticket.run)
        try:
            return read_revocation(self.ticket.run, self.key.peer_id, self._revoked.read_bytes())
        except RemoteProtocolError as error:
            cure = "move it away, and revoke and amend anew what it named"
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
        sealed = self._seal(last, persons, last.amendments)
        self.keep(sealed)
        return sealed

    def amend(self, one: Amendment) -> bytes:
        """Returns what is to be handed to the peers; it is not kept yet."""
        last = self.revocation()
        rest = [old for old in last.amendments if (old.setting, old.round) != (one.setting, one.round)]
        if len(rest) >= MAX_AMENDMENTS:
            raise ConfigError.of_option(one.setting, f"a run has at most {MAX_AMENDMENTS} amendments")
        return self._seal(last, last.persons, [*rest, one])

    def _seal(self, last: Revocation, persons: Iterable[bytes], amendments: Iterable[Amendment]) -> bytes:
        number = max(last.number + 1, int(time.time()))  # also where the last one is lost
        said = Revocation(run=self.ticket.run, number=number, persons=sorted(persons), amendments=amendments)
        return self.key.seal(REVOKED_CONTEXT, said.SerializeToString())

    def keep(self, sealed: bytes) -> None:
        """It is the newest."""
        with full_disk_named(self.folder):
            keep_private(self._revoked, sealed)


def revoke(book: Book, name: str, say: Callable[[str], None]) -> None:
    """Revoke all tickets of ``name``, and tell the peers that are up; they tell each other. Raises
    ``ConfigError``, and ``TransportError`` if nobody could be told."""
    sealed = book.revoke(name)

    async def made(network: Network) -> bytes:
        return sealed

    try:
        told = _hand_out(book, made)
    except TransportError as error:
        raise TransportError(f"{name} is revoked, but no peer was told: {error}; run this again") from None
    say(f"{name} is revoked; {told} peers were told, and tell the others")


def amend(book: Book, setting: str, value: str, first: int | None, say: Callable[[str], None]) -> None:
    """Have ``setting`` be ``value`` from round ``first`` on, and tell the peers that are up; they tell each
    other. Raises ``ConfigError``, and ``TransportError`` if nobody could be told: then nothing is amended."""
    amended(RunConfig(), setting, value)  # what no run allows is refused offline
    made = Amendment()

    async def sealed(network: Network) -> bytes:
        newest = await _newest(network)
        made.MergeFrom(amendment(book.revocation(), network.run, newest, setting, value, first))
        return book.amend(made)

    try:
        told = _hand_out(book, sealed, book.keep)
    except TransportError as error:
        raise TransportError(f"nothing is amended, for no peer was told: {error}") from None
    words = f"from round {made.round} on {made.setting} is {made.value}"
    say(f"{words}; {told} peers were told, and tell the others")


async def _newest(network: Network) -> float:
    """The position that the run has reached by now, as peers left word of it."""
    from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S

    if (last := await network.run_position()) is None:
        raise TransportError("no peer has said yet where the run is")
    clock = network.run.clock
    age_s = min(MESSAGE_TIMEOUT_S, max(0.0, time.time() - last.written_at))  # while they are at work
    return last.position + (age_s / clock.round_s if clock.mode == "time" else 0.0)


def amendment(
    last: Revocation, run: RunConfig, newest: float, setting: str, value: str, first: int | None
) -> Amendment:
    """What is signed, of a ``run`` that is at ``newest``, after the ``last`` that was. ``first``: None for
    ten rounds ahead and two minutes, by when all have heard. Raises ``ConfigError``."""
    soonest = math.ceil(newest) + 2
    if first is None:
        first = soonest + max(8, math.ceil(120 / run.clock.round_s) if run.clock.mode == "time" else 0)
    if not soonest <= first <= MAX_VERSION:
        problem = f"the run is at round {newest:.1f}, and peers must hear of it before"
        raise ConfigError.of_option("--from", f"{problem}; name {soonest} or later (got {first})")
    terms = RunTerms(run)
    terms.amend(last.amendments)
    if 0 < (end := terms.rounds(first - 1)) <= first:
        raise ConfigError.of_option(
            "--from", f"the run ends at round {end}; name an earlier one (got {first})"
        )
    changed = amended(terms.at(first), setting, value)
    if 0 < changed.clock.rounds <= first:
        raise ConfigError.of_option(setting, f"name more rounds than {first}, from which on it holds")
    return Amendment(round=first, setting=setting, value=value_of(changed, setting))


def _hand_out(
    book: Book, make: Callable[[Network], Awaitable[bytes]], done: Callable[[bytes], None] = lambda _: None
) -> int:
    """How many peers took what is made; ``done`` with it if one did. Raises ``TransportError``."""
    seeds = (*book.ticket.seeds, *kept_seeds(book.folder, book.ticket.run, KNOWN))[:MAX_ADDRESSES]
    admits = Pass.issue(book.key, book.ticket.run, "organiser", time.time() + 86400)
    with tempfile.TemporaryDirectory() as folder:
        ticket = replace(book.ticket, seeds=seeds, admits=admits)
        told, sealed = asyncio.run(_among_peers(ticket, make, folder))
    if not told:
        raise TransportError("no peer is up")
    done(sealed)
    return told


async def _among_peers(
    ticket: Ticket, make: Callable[[Network], Awaitable[bytes]], folder: str
) -> tuple[int, bytes]:
    from p2p_co2.node.network import Network

    config = PeerConfig(folder=Path(folder), upnp=False, relay=False)
    network = await Network.open(ticket, config, lambda *_: None)
    try:
        await network.start_carriers(_ignore, lambda *_: None)
        sealed = await make(network)
        network.door.members.take(sealed)
        records = await network.find_peers()
        told = await asyncio.gather(*(_hand_to(network, record, sealed) for record in records))
        return sum(told), sealed
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
