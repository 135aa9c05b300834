"""Who may take part in what this process does, itself included; who may not any more is hung up on.

The newest revocation lies in the peer's folder (``revoked``), with what is amended, so it holds for a peer
that comes back while no seed is up. Messages of those who are out are refused by ``GroupSwitch``, links to
them by ``find_record``; the links that were open before are ended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from p2p_co2.config import RunConfig
from p2p_co2.errors import RemoteProtocolError, TicketError
from p2p_co2.net.transport.base import Carrier
from p2p_co2.system.folders import keep_private
from p2p_co2.ticket import Ticket
from p2p_co2.wire.heartbeat import HEARTBEAT_S
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_REVOCATION_BYTES
from p2p_co2.wire.members import Members
from p2p_co2.wire.messages_pb2 import Badge


class Doorkeeper:
    """Of the process with ``folder``, in the ``run`` that ``ticket`` invites to. ``enter`` first, and
    ``keep`` it up as a task. ``members``: who may take part, this process included."""

    def __init__(self, me: PeerId, ticket: Ticket, folder: Path, run: RunConfig) -> None:
        self._me = me
        self._ticket = ticket
        self._folder = folder
        self._invited = ""
        """The ticket that was written into the folder last."""
        self.members = Members(ticket.run, ticket.run_key, run.members, settings=run)
        self.news = ""
        """What this peer's owner should know; empty if there is nothing."""
        self._changed = asyncio.Event()
        self.members.changed.append(self._changed.set)

    def enter(self) -> None:
        """Be one of the members, if the run has some. Raises ``TicketError``."""
        members = self.members
        with suppress(OSError, RemoteProtocolError), (self._folder / "revoked").open("rb") as file:  # if any
            members.take(file.read(MAX_REVOCATION_BYTES))
        if members.is_closed and self._ticket.admits is not None:
            members.badge = self._ticket.admits.badge(self._ticket.run, self._me)
        try:
            members.check(self._me, members.badge or Badge(), looks=True)
        except RemoteProtocolError as error:
            raise TicketError(f"this ticket admits nobody to the run: {error.detail}") from None

    def keep_ticket(self, invitation: Ticket) -> None:
        """Write ``invitation`` into the folder, as this peer's own ticket."""
        if (ticket := str(replace(invitation, admits=self._ticket.admits))) != self._invited:
            with suppress(OSError):  # whoever needs it can ask this peer's owner
                keep_private(self._folder / "ticket", f"{ticket}\n".encode("ascii"))
                self._invited = ticket

    async def keep(self, carriers: Sequence[Carrier]) -> None:
        """Until cancelled."""
        members = self.members
        kept = members.sealed
        while True:
            self._changed.clear()  # what comes while a link is ended is seen to next
            members.ban(banned_in(self._folder))
            if members.sealed != kept:
                kept = members.sealed
                with suppress(OSError):  # a full disk: the others tell it again
                    keep_private(self._folder / "revoked", kept)
            for link in [link for carrier in carriers for link in carrier.links]:
                if trouble := members.trouble_with(link.peer):
                    await link.drop(trouble)
            if trouble := members.trouble_with(self._me):
                self.news = f"others hear this peer no more: {trouble}"
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()


def banned_in(folder: Path) -> frozenset[str]:
    """Whom the owner of the peer with ``folder`` wants nothing to do with (``p2p-co2 ban``)."""
    with suppress(OSError, UnicodeDecodeError):  # else nobody
        return frozenset((folder / "banned").read_text(encoding="ascii").split())
    return frozenset()
