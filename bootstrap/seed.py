"""The seed: where peers find each other and the run's settings. It never trains and never sees a tensor.

Laws: the identity lies in the folder, so a seed that is started again (with a fixed port) is the one that its
tickets name; the settings are signed by the first seed's key alone, and a further seed passes them on
unchanged; what the DHT forgets is published again, and where the run was outlives this process (the file
``positions``); a libp2p daemon that dies or hangs is started anew, where
it was. A seed may be away for a while: peers that know each other go on without it. It imports no torch, so
it needs little memory.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bootstrap.run_file import recipe_of
from p2p_co2.config import OWN_LOOP, RunConfig, read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError, TicketError, TransportError
from p2p_co2.protocol.wire.identity import Identity, PeerId
from p2p_co2.protocol.wire.limits import MAX_ADDRESSES, MAX_PEERS, MAX_RECORD_BYTES
from p2p_co2.run_recipe import is_own
from p2p_co2.system.process import (
    FolderLock,
    StopSignals,
    ctrl_c_ends,
    end_with_parent,
    full_disk_named,
    require_supported_platform,
)
from p2p_co2.ticket import Ticket

if TYPE_CHECKING:
    from p2p_co2.net.discovery import Discovery
    from p2p_co2.net.transport.libp2p.hivemind import P2P

RENEW_S = 600.0
"""Between two publications of the settings; far below the time for which the DHT keeps them."""
_LOOK_EVERY_S = 10.0
POSITIONS_EVERY_S = 60.0
"""Between two looks where the run is; each is kept for the case of a restart."""
_DAEMON_TIMEOUT_S = 15.0
MAX_SEED_ADDRESSES = 8
"""Of one seed in a ticket: a ticket has to be short enough to be pasted."""


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    """``run_file`` None: the built-in default run, or the one of ``also`` (a ticket: be a further seed of its
    run). ``announce_host``: what others dial; needs a fixed ``port``. ``relay``: pass on traffic between
    peers that cannot reach each other. ``parent``: leave when that process ends; 0 for none."""

    run_file: Path | None = None
    host: str = "0.0.0.0"
    port: int = 0
    folder: Path = Path("runs/seed")
    announce_host: str = ""
    also: str = ""
    relay: bool = True
    parent: int = 0


@dataclass
class _Seed:
    """A seed about to serve: ``run`` None if its settings are still to be fetched. ``others``: seeds to
    join."""

    options: SeedOptions
    identity: Identity
    run: RunConfig | None
    run_digest: bytes
    run_key: PeerId
    others: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    """Seeds that served the run when this one was last up."""


def serve_run(options: SeedOptions, say: Callable[[str], None] = print) -> int:
    """Serve until somebody stops us; returns the exit status.

    Raises ``ConfigError``, ``TicketError``, ``EnvironmentFault`` (port, disk, daemon), ``TransportError``
    (the run of ``also`` cannot be reached).
    """
    given = Ticket.parse(options.also) if options.also else None
    if not 0 <= options.port < 65536:
        raise ConfigError(
            "command line", "--port", f"from 1 to 65535, or 0 for any free one (got {options.port})"
        )
    run = None if given and options.run_file is None else _run_of(options, say)
    if given and run and run.digest() != given.run:
        raise TicketError(
            "the ticket is for another run than the run file; leave the file out, or correct it"
        )
    require_supported_platform()
    end_with_parent(options.parent)
    with full_disk_named(options.folder):
        lock = FolderLock(options.folder)  # held until this process ends
        try:
            asyncio.run(_until_stopped(_seed_of(options, run, given), say))
        finally:
            lock.release()
    return 0


def _seed_of(options: SeedOptions, run: RunConfig | None, given: Ticket | None) -> _Seed:
    identity = Identity.load_or_create(options.folder / "identity")
    if given:
        return _Seed(options, identity, run, given.run, PeerId(given.run_key), tuple(given.seeds))
    assert run is not None
    seed = _Seed(options, identity, run, run.digest(), identity.peer_id)
    seed.known = _known_seeds(options.folder, seed)
    return seed


def _run_of(options: SeedOptions, say: Callable[[str], None]) -> RunConfig:
    run = read_run_config(options.run_file) if options.run_file else RunConfig()
    if run.recipe_digest:
        return run
    say(f"computing the digest of recipe {run.recipe} (imports torch) ...")
    with ctrl_c_ends():
        from p2p_co2.recipes import BYTE_GPT, check_data, recipe_digest

    with recipe_of(options.run_file):
        if run.recipe == BYTE_GPT:
            files = (str(run.recipe_options.get(key, "")) for key in ("text", "tokens"))
            if note := check_data(*files):
                say(f"note: {note}")
        digest = recipe_digest(run.recipe, run.recipe_options)
    return run.model_copy(update={"recipe_digest": digest})


def _known_seeds(folder: Path, seed: _Seed) -> tuple[str, ...]:
    """The other seeds of this run, from the ticket that this seed printed when it was last up."""
    try:
        ticket = Ticket.parse((folder / "ticket").read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError, TicketError):
        return ()  # a first start, or a file that is no help
    if ticket.run != seed.run_digest:
        return ()
    return tuple(maddr for maddr in ticket.seeds if not maddr.endswith(f"/p2p/{seed.identity.peer_id}"))


async def _until_stopped(seed: _Seed, say: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    with StopSignals(lambda: _set_from_signal(loop, stop)):
        serving = asyncio.create_task(_serve(seed, say), name="seed")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            serving.cancel()
            await asyncio.wait({serving, stopping})
        if not serving.cancelled() and (error := serving.exception()):
            raise _first(error)
    say("the seed has left")


def _set_from_signal(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)


def _first(error: BaseException) -> BaseException:
    """The cause inside the groups that ``TaskGroup`` wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(seed: _Seed, say: Callable[[str], None]) -> None:
    from p2p_co2.net.discovery import Discovery
    from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
    from p2p_co2.net.transport.probe import ProbeServer

    def refused(peer: PeerId, error: RemoteProtocolError) -> None:
        say(f"{time.strftime('%H:%M:%S')} refused a record: {error}")

    options = seed.options
    async with AsyncExitStack() as stack:
        p2p = await start_p2p(
            options.folder / "identity", options.host, options.port,
            announce_host=options.announce_host, public=bool(options.announce_host), relay=options.relay,
        )  # fmt: skip
        stack.push_async_callback(stop_p2p, p2p)
        discovery = Discovery(p2p, seed.identity, seed.run_digest, refused)
        stack.push_async_callback(discovery.close)
        run = await _publish(seed, discovery, say)
        discovery.hold_positions(read_positions(options.folder))
        probes = ProbeServer(p2p, seed.run_digest)
        stack.push_async_callback(probes.close)
        await probes.start()
        say(f'run "{run.name}", recipe {run.recipe}, digest {seed.run_digest.hex()[:16]}')
        ticket = await _print_ticket(p2p, seed, say)
        say(f"join with: {how_to_join(run.recipe)}")
        say("Ctrl-C ends the seed; peers that know each other go on")
        if options.port == 0 and not options.also:
            say("the port is a free one: for a ticket that outlives a restart, give --port")
        async with asyncio.TaskGroup() as group:
            group.create_task(_keep_up(discovery, options.folder, say), name="keep up")
            group.create_task(_keep_daemon(p2p, seed, discovery, ticket, say), name="keep the daemon")


def how_to_join(recipe: str) -> str:
    """What a volunteer types."""
    if recipe == OWN_LOOP:
        return "your own program: python my_loop.py TICKET"
    if is_own(recipe):
        return "p2p-co2 join TICKET --recipe FILE.py:function, with a copy of the recipe's file"
    return "p2p-co2 join TICKET"


async def _print_ticket(p2p: P2P, seed: _Seed, say: Callable[[str], None], before: str = "") -> str:
    """Print and keep the ticket, unless that of ``before`` still leads here; returns the one that counts."""
    from p2p_co2.net.transport.libp2p.control import own_maddrs

    own = seed_addresses(await own_maddrs(p2p, _DAEMON_TIMEOUT_S))
    if before and set(own).intersection(Ticket.parse(before).seeds):
        return before
    seeds = tuple(dict.fromkeys((*own, *seed.others, *seed.known)))[:MAX_ADDRESSES]
    ticket = str(Ticket(seed.run_digest, seed.run_key, seeds))
    _keep_ticket(seed.options.folder, ticket)
    say(f"ticket: {ticket}")
    return ticket


async def _publish(seed: _Seed, discovery: Discovery, say: Callable[[str], None]) -> RunConfig:
    """Join the other seeds, if there are any, and put the run's settings into the DHT."""
    try:
        await discovery.start(seed.others or seed.known)
    except TransportError as error:
        if seed.others:
            raise
        say(f"warning: the other seeds of this run are away ({error}); going on alone")
    if seed.run_key == seed.identity.peer_id and seed.run is not None:
        await discovery.publish_manifest(seed.run.canonical_bytes(), bytes.fromhex(seed.run.recipe_digest))
        return seed.run
    manifest = await discovery.fetch_manifest(seed.run_key)
    await discovery.keep_manifest()
    return RunConfig.from_canonical_bytes(manifest.config)


async def _keep_up(discovery: Discovery, folder: Path, say: Callable[[str], None]) -> None:
    """Publish the settings again and again, keep where the run is, and tell how many peers there are when
    that changes."""
    renew_at, positions_at = time.monotonic() + RENEW_S, time.monotonic()
    peers = 0
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            if time.monotonic() > renew_at:
                await discovery.keep_manifest()
                renew_at = time.monotonic() + RENEW_S
            found = len(await discovery.find_peers())
            if time.monotonic() > positions_at or found < peers:  # who left said where it was
                keep_positions(folder, await discovery.gather_positions())
                positions_at = time.monotonic() + POSITIONS_EVERY_S
        except (TransportError, EnvironmentFault) as error:
            say(f"{time.strftime('%H:%M:%S')} warning: {error}")
            continue
        if found != peers:
            peers = found
            say(f"{time.strftime('%H:%M:%S')} peers: {peers}")


def keep_positions(folder: Path, sealed: Iterable[tuple[str, bytes]]) -> None:
    """Write where the run is, one sealed word of a peer to a line. Raises ``EnvironmentFault``."""
    lines = [f"{writer} {base64.b64encode(value).decode('ascii')}\n" for writer, value in sealed]
    try:
        (folder / "positions.new").write_text("".join(lines), encoding="ascii")
        (folder / "positions.new").replace(folder / "positions")
    except OSError as error:
        raise EnvironmentFault(f"cannot write to {folder}: {error.strerror}") from None


def read_positions(folder: Path) -> list[tuple[str, bytes]]:
    """What ``keep_positions`` wrote; empty without a file, and without what is damaged in it."""
    found = list[tuple[str, bytes]]()
    try:
        with (folder / "positions").open("rb") as file:
            lines = file.read(2 * MAX_PEERS * MAX_RECORD_BYTES).split(b"\n")
    except OSError:
        return found  # a first start
    for line in lines[:MAX_PEERS]:
        writer, _, value = line.partition(b" ")
        if not value:
            continue
        try:
            found.append((writer.decode("ascii"), base64.b64decode(value, validate=True)))
        except (UnicodeDecodeError, binascii.Error):
            continue  # of a torn write
    return found


async def _keep_daemon(
    p2p: P2P, seed: _Seed, discovery: Discovery, ticket: str, say: Callable[[str], None]
) -> None:
    """Start the libp2p daemon again whenever it dies. Raises ``EnvironmentFault`` when it cannot."""
    from p2p_co2.net.transport.libp2p.daemon import keep_alive

    async def revived(words: str) -> None:
        nonlocal ticket
        say(f"{time.strftime('%H:%M:%S')} the libp2p daemon had ended ({words}); it was started again")
        try:
            await discovery.rebootstrap(seed.others or seed.known)
            await discovery.keep_manifest()
            ticket = await _print_ticket(p2p, seed, say, before=ticket)
        except (TransportError, EnvironmentFault) as error:
            say(f"{time.strftime('%H:%M:%S')} warning: {error}")

    words = await keep_alive(p2p, revived)
    raise EnvironmentFault(f"the libp2p daemon ended ({words}); start the seed again")


def seed_addresses(visible: Sequence[str]) -> tuple[str, ...]:
    """Which of our own addresses a ticket names: not the loopback, unless there is nothing else. Raises
    ``EnvironmentFault`` if there is none at all."""
    if not visible:
        raise EnvironmentFault(
            "this machine has no address that a ticket could name; bring its network up, or listen on the "
            "loopback alone with --host 127.0.0.1"
        )
    reachable = [maddr for maddr in visible if not _is_loopback(maddr)]
    return tuple((reachable or list(visible))[:MAX_SEED_ADDRESSES])


def _is_loopback(maddr: str) -> bool:
    _, kind, host, *_ = maddr.split("/")
    return kind in {"ip4", "ip6"} and ipaddress.ip_address(host).is_loopback


def _keep_ticket(folder: Path, ticket: str) -> None:
    try:
        (folder / "ticket").write_text(f"{ticket}\n", encoding="ascii")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --folder"
        ) from None
