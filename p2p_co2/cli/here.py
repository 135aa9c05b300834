"""The peers of this machine, by their names or folders: ``pause``, ``resume``, ``leave``, ``ban``, and
``prune``."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import says
from p2p_co2.cli.command import LOUDNESS, Loudness
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError
from p2p_co2.system.folders import data_home, keep_private, peer_folders
from p2p_co2.system.governor import Wish, wish_in
from p2p_co2.system.process import FolderLock, holder_of, is_kept
from p2p_co2.telemetry.events import PeerJoined
from p2p_co2.telemetry.journal import read_events
from p2p_co2.wire.identity import public_key_of
from p2p_co2.wire.names import words_of

PeerWord = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FOLDER", show_default=False,
        help="The peer's name, or its folder; the only peer that runs here, if absent.",
    ),
]  # fmt: skip
Everyone = Annotated[bool, says("Take every peer of yours that runs on this machine.", "--all")]


def names_in(folder: Path) -> tuple[str, str]:
    """(what the peer is called that keeps ``folder``, the name of its run); "" for what it does not say."""
    try:
        with (folder / "name").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(512).splitlines()
    except OSError:
        lines = []
    peer, run, *_ = *lines, "", ""
    return peer, run


def folder_called(name: str) -> Path | None:
    """The folder of this machine's peer with that name, of one that runs before others; None if nobody is
    called so. Raises ``ConfigError`` if several are."""
    found = [folder for folder in peer_folders() if names_in(folder)[0] == name]
    found = [folder for folder in found if is_kept(folder)] or found
    if len(found) > 1:
        which = ", ".join(map(str, found))
        raise ConfigError.of_option(
            "NAME", f"{len(found)} peers here are called {name}; name one's folder: {which}"
        )
    return found[0] if found else None


def pause(peer: PeerWord = "", everyone: Everyone = False) -> None:
    """Have a peer of this machine rest after its inner step: it writes a checkpoint, trains nothing, and
    keeps its place in the swarm. Paused already, it stays so. It rests until `p2p-co2 resume`, also when it
    is started again meanwhile."""
    _wish(Wish.PAUSE, peer, everyone, "rests from its next inner step on")


def resume(peer: PeerWord = "", everyone: Everyone = False) -> None:
    """Have a peer of this machine that rests go on: after `p2p-co2 pause`, and outside its hours until they
    next turn. One that trains goes on training."""
    _wish(Wish.GO_ON, peer, everyone, "goes on")


def leave(peer: PeerWord = "", everyone: Everyone = False) -> None:
    """Have a running peer of this machine leave, as Ctrl-C does: what is in flight is awaited, then it writes
    a checkpoint, says goodbye, and its process ends."""
    for folder in _peers_here(peer, everyone):
        process = _process_of(folder)
        os.kill(process, signal.SIGTERM)
        _say(f"{_told(folder)} leaves (process {process})")


def ban(
    other: Annotated[
        str, typer.Argument(metavar="PEER", show_default=False, help="The other peer's name, or its id.")
    ],
    peer: PeerWord = "",
    undo: Annotated[bool, says("Let it come back.", "--undo")] = False,
) -> None:
    """Have a peer of this machine do nothing with PEER any more: it neither dials it nor lets it in. Others
    go on with it. It holds within seconds, and when your peer is started again."""
    from p2p_co2.node.doorkeeper import banned_in

    for folder in _peers_here(peer, False):
        banned = banned_in(folder)
        found = _peer_met(other, folder)
        banned = banned - {found} if undo else banned | {found}
        keep_private(folder / "banned", "\n".join(banned).encode("ascii"))
        _say(f"{_told(folder)} {'may meet' if undo else 'does nothing with'} {other} ({found})")


def _peer_met(word: str, folder: Path) -> str:
    """The id of the peer called ``word`` that the peer of ``folder`` has met. Raises ``ConfigError``."""
    with suppress(RemoteProtocolError):
        public_key_of(word)
        return word
    journal = folder / "events.jsonl"
    events = read_events(journal) if journal.exists() else ()
    joined = [one for one in events if isinstance(one, PeerJoined)]
    met = {one.other for one in joined if word in {one.name, words_of(one.other)}}
    if len(met) != 1:
        called = f"{len(met)} peers that it met are called {word}; name its id, as its board shows it"
        raise ConfigError.of_option("PEER", called)
    return met.pop()


def prune(
    yes: Annotated[bool, says("Delete what no running process keeps.", "--yes")] = False,
) -> None:
    """List what runs hold on this machine's disk where nobody named a folder: size, when it was last written
    to, folder, run. Seeds are left alone: without its key a run takes no newcomers."""
    from monitoring.words import date, size

    freed_bytes = 0
    for folder in _folders_of_runs():
        held_bytes, used_at = _held(folder)
        state = f", in use by process {holder_of(folder)}" if is_kept(folder) else ""
        if yes and not state:
            state = _deleted(folder)
        freed_bytes += 0 if state.startswith(", in use") else held_bytes
        run = names_in(folder)[1]
        print(f"{size(held_bytes):>8}  {date(used_at)}  {folder}{f', run {run}' if run else ''}{state}")
    if yes:
        _say(f"{size(freed_bytes)} freed")
    else:
        _say(f"p2p-co2 prune --yes deletes {size(freed_bytes)}: checkpoints, identities, credits and events")


def _folders_of_runs() -> Iterator[Path]:
    """Of all peers and observers of this user, as far as nobody named others; never what a link leads to."""
    runs = data_home() / "runs"
    for folder in sorted(runs.glob("*/*")):
        is_linked = any(one.is_symlink() for one in (runs, folder.parent, folder, folder / "lock"))
        if folder.is_dir() and not is_linked:
            yield folder


def _held(folder: Path) -> tuple[int, float]:
    """(bytes, when something in it was last written)."""
    found = [folder.lstat()]
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):  # a peer that runs cleared it away
                found.append((Path(place) / name).lstat())
    return sum(one.st_size for one in found[1:]), max(one.st_mtime for one in found)


def _deleted(folder: Path) -> str:
    """Delete it, unless a process has taken it by now; what became of it in words."""
    try:
        lock = FolderLock(folder)  # nobody begins there meanwhile
    except EnvironmentFault as error:
        return f", in use: {error}"
    shutil.rmtree(folder)
    lock.release()
    with suppress(OSError):  # others are in it
        folder.parent.rmdir()
    return ", deleted"


def _wish(wish: Wish, named: str, everyone: bool, words: str) -> None:
    for folder in _peers_here(named, everyone):
        wish_in(folder, wish)
        who = f"process {holder_of(folder)}" if is_kept(folder) else "no process runs there now"
        _say(f"{_told(folder)} {words} ({who})")


def _told(folder: Path) -> str:
    name = names_in(folder)[0]
    return f"{name}, the peer in {folder}," if name else f"the peer in {folder}"


def _say(text: str) -> None:
    if LOUDNESS.get() is not Loudness.QUIET:
        print(text)


def _process_of(folder: Path) -> int:
    """The process that keeps ``folder``: that which it names and which has its lock open, since a number may
    be of another container's. Raises ``EnvironmentFault``."""
    holder = holder_of(folder)
    if is_kept(folder) and holder.isdecimal():
        with suppress(OSError):
            for one in os.listdir(f"/proc/{holder}/fd"):
                if os.path.samefile(f"/proc/{holder}/fd/{one}", folder / "lock"):
                    return int(holder)
    raise EnvironmentFault(f"no process of yours runs in {folder}; p2p-co2 status lists those that do")


def _peers_here(named: str, everyone: bool) -> list[Path]:
    """Raises ``ConfigError``, ``EnvironmentFault``."""
    if named:
        if everyone:
            raise ConfigError.of_option("--all", "means every peer; leave NAME|FOLDER out")
        folder = Path(named).expanduser()
        if (folder / "identity").is_file() and not (folder / "positions").exists():
            return [folder]
        if called := folder_called(named):
            return [called]
        problem = f"{named} is no peer's folder, nor what a peer here is called; p2p-co2 status lists them"
        raise ConfigError.of_option("NAME|FOLDER", problem)
    running = [folder for folder in peer_folders() if is_kept(folder)]
    if not running:
        raise EnvironmentFault(
            "no peer runs here in a folder of its run; name the FOLDER that join was given"
        )
    if len(running) > 1 and not everyone:
        which = ", ".join(names_in(folder)[0] or str(folder) for folder in running)
        raise ConfigError.of_option(
            "NAME|FOLDER", f"{len(running)} peers run here; name one, or --all: {which}"
        )
    return running
