"""The seed: where peers find each other and the run's settings. It never trains and never sees a tensor.

Its identity lies in the folder, so a seed that is started again (with a fixed port) is the one that its
tickets name. The first seed's key alone signs the settings; a further seed passes them on unchanged. Where
the run was outlives this process (the file ``positions``). Peers that know each other go on while a seed is
away."""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bootstrap.members import KNOWN
from bootstrap.options import SeedOptions
from bootstrap.run_file import recipe_of
from p2p_co2.config import OWN_LOOP, RunConfig, read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError, TicketError, TransportError
from p2p_co2.system.folders import seed_folder
from p2p_co2.system.process import FolderLock, StopSignals, end_with_parent, full_disk_named
from p2p_co2.ticket import Ticket, is_loopback, is_private, kept_seeds, line_to_join, read_ticket
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_ADDRESSES, MAX_PEERS, MAX_RECORD_BYTES
from p2p_co2.wire.members import Members
from p2p_co2.wire.names import words_of

if TYPE_CHECKING:
    from p2p_co2.net.discovery import Discovery
    from p2p_co2.net.transport.libp2p.hivemind import P2P
    from p2p_co2.wire.messages_pb2 import PeerRecord


Say = Callable[[str], None]


@dataclass(frozen=True)
class Invitation:
    """What a seed publishes: how others come. ``join``: the whole line that a volunteer types; ``others``:
    what they need beside it, "" if nothing."""

    run: str
    recipe: str
    digest: str
    folder: str
    ticket: str
    join: str
    others: str
    reach: str
    """Who can use it: "everywhere", "local network" or "this machine"."""
    members: bool = False
    """Whether the ticket admits nobody, and ``join`` is the organiser's line that makes one that does."""


def say_invitation(invitation: Invitation, say: Say) -> None:
    """The line to copy last."""
    say(f"ticket: {invitation.ticket}")
    if doubt := doubt_of(invitation):
        say(doubt)
    if invitation.members:
        say("it admits nobody; this line makes a ticket for one person, who joins with that:")
    else:
        say(f"volunteers join with this line{invitation.others}:")
    say(invitation.join)


def doubt_of(invitation: Invitation) -> str:
    """Who cannot use it, and what to do; "" if everybody can, as far as its addresses tell."""
    if invitation.reach == "this machine":
        return (
            "warning: the ticket names the loopback alone, so only processes of this machine can join; leave "
            "--host out, or give the address that others dial with --announce-host"
        )
    if invitation.reach == "local network":
        return (
            "note: the ticket names addresses of a local network alone; for volunteers elsewhere forward a "
            "port and give --port and --announce-host"
        )
    return ""


def serve_run(
    options: SeedOptions, say: Say = print, invite: Callable[[Invitation], None] | None = None
) -> int:
    """Serve until somebody stops us; returns the exit status. ``invite`` is told of each ticket, the first
    and those after it; without it they are said like all else.

    Raises ``ConfigError``, ``TicketError``, ``EnvironmentFault`` (port, disk, daemon), ``TransportError``
    (the run of ``also`` cannot be reached).
    """
    given = Ticket.parse(read_ticket(options.also)) if options.also else None
    if not 0 <= options.port < 65536:
        raise ConfigError.of_option("--port", f"1 to 65535, or 0 for any free one (got {options.port})")
    run = None if given and options.run_file is None else _run_of(options, say)
    end_with_parent(options.parent)
    # A further seed's is named after the run's digest: it may not know the name yet.
    folder = options.folder or seed_folder(given.run.hex()[:12] if given else run.name if run else "")
    with full_disk_named(folder):
        lock = FolderLock(folder)  # held until this process ends
        try:
            me = Identity.load_or_create(folder / "identity").peer_id
            if run is not None and (given is None or given.run_key == me):  # else it has its own
                run = salted(run, folder, say)
            asyncio.run(_until_stopped(SeedServer(replace(options, folder=folder), run, given, say, invite)))
        finally:
            lock.release()
    return 0


def _run_of(options: SeedOptions, say: Say) -> RunConfig:
    run = read_run_config(options.run_file) if options.run_file else RunConfig()
    if run.recipe_digest:
        return run
    say(f"computing the digest of recipe {run.recipe} (imports torch) ...")
    from p2p_co2.recipes import check_stages, recipe_digest

    with recipe_of(options.run_file):
        check_stages(run)
        digest = recipe_digest(run.recipe, run.recipe_options)
    return run.model_copy(update={"recipe_digest": digest})


def salted(run: RunConfig, folder: Path, say: Say) -> RunConfig:
    """``run``, with a salt that this seed alone can make where its file has none: the same at each start. A
    run that this folder published without one stays as it was."""
    if run.salt or kept_seeds(folder, run.digest()):
        return run
    made = Identity.load_or_create(folder / "identity").sign(b"p2p-co2 salt", run.canonical_bytes())
    salt = made.hex()[:16]
    say(f'salt = "{salt}" in the run file makes it the same run without this folder')
    return run.model_copy(update={"salt": salt})


async def _until_stopped(seed: SeedServer) -> None:
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(seed.serve(), name="seed")
    with StopSignals(partial(loop.call_soon_threadsafe, serving.cancel)):
        await asyncio.wait({serving})
    error = None if serving.cancelled() else serving.exception()
    while isinstance(error, BaseExceptionGroup):  # ``TaskGroup`` wraps the cause
        error = error.exceptions[0]
    if error is not None:
        raise error
    seed.say("the seed has left")


class SeedServer:
    """A seed of ``run`` (None if its settings are still to be fetched), or a further one of the run that
    ``given`` invites to."""

    def __init__(
        self, options: SeedOptions, run: RunConfig | None, given: Ticket | None, say: Say,
        invite: Callable[[Invitation], None] | None = None,
    ) -> None:  # fmt: skip
        assert options.folder is not None
        self.say = say
        self._options = options
        self._folder = options.folder
        self._run = run
        self._invite = invite or partial(say_invitation, say=say)
        self._identity = Identity.load_or_create(self._folder / "identity")
        if given:
            self._digest = given.run
            self._key = PeerId(given.run_key)
            self._others = tuple(given.seeds)
        else:
            assert run is not None
            self._digest = run.digest()
            self._key = self._identity.peer_id
            self._others = self._known_seeds()
        self._named: tuple[str, ...] = ()
        """Seeds of the ticket that was printed last."""

    async def serve(self) -> None:
        """Until cancelled. Raises ``EnvironmentFault``, ``TransportError``."""
        from p2p_co2.net.discovery import Discovery
        from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
        from p2p_co2.net.transport.libp2p.relay import start_relay
        from p2p_co2.net.transport.probe import ProbeServer

        options = self._options
        async with AsyncExitStack() as stack:
            where = self._folder / "identity", options.host, options.port
            if options.announce_host and options.relay:
                p2p = await start_relay(*where, options.announce_host, options.upnp)
            else:
                p2p = await start_p2p(
                    *where, announce_host=options.announce_host, public=bool(options.announce_host),
                    relay=options.relay, upnp=options.upnp,
                )  # fmt: skip
            stack.push_async_callback(stop_p2p, p2p)
            discovery = Discovery(p2p, self._identity, self._digest, self._refused)
            stack.push_async_callback(discovery.close)
            run = await self._publish(discovery)
            discovery.hold_positions(read_positions(self._folder))
            probes = ProbeServer(p2p, self._digest)
            stack.push_async_callback(probes.close)
            await probes.start()
            self.say(f'run "{run.name}", recipe {run.recipe}, digest {self._digest.hex()[:16]}')
            words = words_of(self._identity.peer_id)
            self.say(f"this seed is {words}; its identity, and where the run is, are kept in {self._folder}")
            self.say("Ctrl-C ends the seed; peers that know each other go on")
            if options.port == 0 and not options.also:
                self.say("the port is a free one: for a ticket that outlives a restart, give --port")
            await self._print_ticket(p2p, run)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_up(discovery, run.members), name="keep up")
                group.create_task(self._keep_daemon(p2p, discovery, run), name="keep the daemon")

    def _known_seeds(self) -> tuple[str, ...]:
        """The other seeds of this run, from the ticket that this seed printed when it was last up."""
        own = f"/p2p/{self._identity.peer_id}"
        return tuple(one for one in kept_seeds(self._folder, self._digest) if not one.endswith(own))

    def _say_now(self, text: str) -> None:
        self.say(f"{time.strftime('%H:%M:%S')} {text}")

    def _refused(self, peer: PeerId | None, error: RemoteProtocolError) -> None:
        self._say_now(f"refused a record: {error}")

    async def _publish(self, discovery: Discovery) -> RunConfig:
        """Join the other seeds, if there are any, and put the run's settings into the DHT."""
        try:
            await discovery.start(self._others)
        except TransportError as error:
            if self._options.also:
                raise
            self.say(f"warning: the other seeds of this run are away ({error}); going on alone")
        run = self._run
        if self._key != self._identity.peer_id or run is None:
            manifest = await discovery.fetch_manifest(self._key)
            await discovery.keep_manifest()
            published = RunConfig.from_canonical_bytes(manifest.config)
            run = published if run is None else run.model_copy(update={"salt": published.salt})
        if run.digest() != self._digest:
            cure = "leave the file out, or mend it"
            raise TicketError(f"the ticket is for another run than the run file; {cure}")
        if self._key == self._identity.peer_id and self._run is not None:
            await discovery.publish_manifest(run.canonical_bytes(), bytes.fromhex(run.recipe_digest))
        return run

    async def _print_ticket(self, p2p: P2P, run: RunConfig) -> None:
        """Print and keep the ticket, unless the one before still leads here."""
        from p2p_co2.net.transport.addresses import address_of, is_own
        from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S
        from p2p_co2.net.transport.libp2p.control import own_maddrs

        own = await own_maddrs(p2p, CONNECT_TIMEOUT_S)
        if not self._options.announce_host:  # beside its own, libp2p has what others say that they saw
            own = [maddr for maddr in own if (place := address_of(maddr)) and is_own(place[0])]
        named = seed_addresses(own)
        if not set(named).intersection(self._named):
            self._named = tuple(dict.fromkeys((*named, *self._others)))[:MAX_ADDRESSES]
            ticket = Ticket(self._digest, self._key, self._named)
            if run.members and self._key == self._identity.peer_id:
                (self._folder / "members").touch(0o600)  # see ``members``
            _keep(self._folder, "ticket", f"{ticket}\n")
            self._invite(invitation_of(run, ticket, self._folder))

    async def _keep_up(self, discovery: Discovery, has_members: bool) -> None:
        """Publish the settings again and again, far sooner than the DHT forgets them. Keep where the run is,
        as often as peers say it. Tell how many peers there are when that changes."""
        from p2p_co2.net.transport.base import MESSAGE_TIMEOUT_S

        members = Members(self._digest, self._key, has_members)
        positions_at = time.monotonic()
        renew_at = positions_at + 10 * MESSAGE_TIMEOUT_S
        peers = 0
        while True:
            await asyncio.sleep(MESSAGE_TIMEOUT_S / 6)
            try:
                if time.monotonic() > renew_at:
                    await discovery.keep_manifest()
                    renew_at = time.monotonic() + 10 * MESSAGE_TIMEOUT_S
                records = list(filter(members.admits, await discovery.find_peers()))
                found = len(records)
                if time.monotonic() > positions_at or found != peers:  # who left said where it was
                    self._keep_known(records)
                    keep_positions(self._folder, await discovery.gather_positions())
                    positions_at = time.monotonic() + MESSAGE_TIMEOUT_S
            except (TransportError, EnvironmentFault) as error:
                self._say_now(f"warning: {error}")
                continue
            if found != peers:
                peers = found
                self._say_now(f"peers: {peers}")

    def _keep_known(self, records: Sequence[PeerRecord]) -> None:
        """The way to the swarm for when this seed is down: some of its peers."""
        from p2p_co2.net.transport.addresses import seed_addresses_of

        ways = [seed_addresses_of(one.peer, one.maddrs)[:1] for one in records]
        if known := tuple(way for one in ways for way in one)[:MAX_ADDRESSES]:
            _keep(self._folder, KNOWN, f"{Ticket(self._digest, self._key, known)}\n")

    async def _keep_daemon(self, p2p: P2P, discovery: Discovery, run: RunConfig) -> None:
        """Start the libp2p daemon again when it dies. Raises ``EnvironmentFault`` if it cannot."""
        from p2p_co2.net.transport.libp2p.daemon import keep_alive

        async def revived(words: str) -> None:
            self._say_now(f"the libp2p daemon had ended ({words}); it was started again")
            try:
                await discovery.rebootstrap(self._others)
                await discovery.keep_manifest()
                await self._print_ticket(p2p, run)
            except (TransportError, EnvironmentFault) as error:
                self._say_now(f"warning: {error}")

        words = await keep_alive(p2p, revived)
        raise EnvironmentFault(f"the libp2p daemon ended ({words}); start the seed again")


def invitation_of(run: RunConfig, ticket: Ticket, folder: Path) -> Invitation:
    """What is said of ``ticket``: the line that a volunteer types, and who can use it."""
    others = f", beside a copy of {run.recipe.rpartition(':')[0]}" if run.is_own_recipe else ""
    if run.recipe == OWN_LOOP:
        others = ", or as your own program takes a ticket"
    reach = "local network" if all(map(is_private, ticket.seeds)) else "everywhere"
    invite = f"p2p-co2 invite NAME --folder {shlex.quote(str(folder))}"
    line = invite if run.members else line_to_join(str(ticket), run)
    return Invitation(
        run=run.name, recipe=run.recipe, digest=ticket.run.hex(), folder=str(folder), ticket=str(ticket),
        join=line, others=others,
        reach="this machine" if ticket.is_local else reach, members=run.members,
    )  # fmt: skip


def keep_positions(folder: Path, sealed: Iterable[tuple[str, bytes]]) -> None:
    """Write where the run is, one sealed word of a peer to a line. Raises ``EnvironmentFault``."""
    lines = [f"{writer} {base64.b64encode(value).decode('ascii')}\n" for writer, value in sealed]
    _keep(folder, "positions", "".join(lines))


def read_positions(folder: Path) -> list[tuple[str, bytes]]:
    """What ``keep_positions`` wrote; empty without a file, and without what is damaged in it."""
    found = list[tuple[str, bytes]]()
    with suppress(OSError), (folder / "positions").open("rb") as file:  # else a first start
        for line in file.read(2 * MAX_PEERS * MAX_RECORD_BYTES).split(b"\n")[:MAX_PEERS]:
            writer, _, value = line.partition(b" ")
            with suppress(UnicodeDecodeError, binascii.Error):  # else of a torn write
                if value:
                    found.append((writer.decode("ascii"), base64.b64decode(value, validate=True)))
    return found


def seed_addresses(visible: Sequence[str]) -> tuple[str, ...]:
    """Which of our own addresses a ticket names: not the loopback, unless there is nothing else; and eight at
    most, since a ticket is pasted. Raises ``EnvironmentFault`` if there is none at all."""
    if not visible:
        raise EnvironmentFault(
            "this machine has no address that a ticket could name; bring its network up, or listen on the "
            "loopback alone with --host 127.0.0.1"
        )
    reachable = [maddr for maddr in visible if not is_loopback(maddr)]
    return tuple((reachable or list(visible))[:8])


def _keep(folder: Path, name: str, text: str) -> None:
    try:
        (folder / f"{name}.new").write_text(text, encoding="ascii")
        (folder / f"{name}.new").replace(folder / name)
    except OSError as error:
        cure = "choose another folder with --folder"
        raise EnvironmentFault(f"cannot write to {folder}: {error.strerror}; {cure}") from None
