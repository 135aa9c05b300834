"""The commands that look: ``status``, ``watch``, ``board``, ``metrics``. Read-only.

``SOURCE`` is a ticket (joins the run's DHT as an observer) or a folder with journals (a demo's, a peer's).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootstrap.options import says
from p2p_co2.cli.command import LOUDNESS, Loudness
from p2p_co2.cli.here import folder_called, names_in
from p2p_co2.errors import ConfigError
from p2p_co2.system.extras import require
from p2p_co2.system.folders import observer_folder, peer_folders
from p2p_co2.system.process import holder_of, is_kept, say
from p2p_co2.ticket import PREFIX, TICKET_VARIABLE, Ticket, read_ticket

if TYPE_CHECKING:
    from p2p_co2.telemetry.feed import Feed

_Source = Annotated[
    str,
    typer.Argument(
        metavar="TICKET", show_default=False,
        help="A run's ticket (a word, @FILE, or - for standard input), a folder with journals, "
        "or a peer of this machine by its name; $P2P_CO2_TICKET if absent.",
    ),
]  # fmt: skip
_Folder = Annotated[
    Path | None,
    says(
        "Keep the observer's identity and the board's history there; one for each run, if absent.",
        envvar="P2P_CO2_OBSERVER_FOLDER",
    ),
]


def board(
    source: _Source = "",
    folder: _Folder = None,
    host: Annotated[str, says("Serve here; anything but loopback asks for a token.")] = "127.0.0.1",
    port: Annotated[int, says("Serve on this port; 0 for any free one.")] = 0,
    token: Annotated[str, says("Ask everybody for this word; made up where one is needed.")] = "",
) -> None:
    """Serve the dashboard of a run, seen from outside: no training, no change to the run."""
    require("board", "the board")
    from monitoring.board.server import place_for, run_board

    place = place_for(host, port, token)
    feed, history = _feed(source, folder, "board")
    raise typer.Exit(run_board(feed, place, history))


def watch(
    source: _Source = "",
    folder: _Folder = None,
    seconds: Annotated[float, says("End after so long; 0 for never.")] = 0.0,
) -> None:
    """Show a run in this terminal, for machines reached over ssh. Ctrl-C ends it."""
    from monitoring.terminal import watch_feed

    feed, _ = _feed(source, folder, "watch")
    raise typer.Exit(watch_feed(feed, seconds))


def status(
    source: _Source = "",
    folder: _Folder = None,
    seconds: Annotated[
        float, says("Wait so long at most for peers; what is known is said after two.")
    ] = 20.0,
    as_json: Annotated[bool, says("Print JSON, as GET /api/swarm of a board.", "--json")] = False,
) -> None:
    """Say in some lines how a run is: its state, round, peers, and what is wrong. Without a ticket or folder:
    the peers of this machine. Exit status 0, also if nobody trains; 1 if the run cannot be reached."""
    from monitoring.status import look
    from monitoring.terminal import print_status

    if not source and not os.environ.get(TICKET_VARIABLE):
        _print_own_peers(as_json)
        return
    feed, _ = _feed(source, folder, "status")
    facts = look(feed, seconds, (lambda words: None) if LOUDNESS.get() is Loudness.QUIET else say)
    if as_json:
        print(facts.model_dump_json(indent=2))
        return
    print_status(facts, is_short=LOUDNESS.get() is Loudness.QUIET)


def _print_own_peers(as_json: bool) -> None:
    """The peers of this machine, by their folders."""
    found = []
    for folder in peer_folders():
        one: dict[str, Any] = {"folder": str(folder), "process": None, "state": "not running", "round": None}
        one["name"], one["run"] = names_in(folder)
        if is_kept(folder):
            holder = holder_of(folder)
            one |= {"process": int(holder) if holder.isdecimal() else None, "state": "running"}
        if (folder / "events.jsonl").is_file():
            from monitoring.feeds import JournalFeed
            from monitoring.status import look

            facts = look(JournalFeed(folder), 1.0)
            own = next((peer for peer in facts.peers if peer.joined_at is not None), None)
            if own is not None:
                one |= {"round": own.position, "tokens": own.tokens, "name": one["name"] or own.name}
                one |= {"state": own.state} if one["process"] else {}
        found.append(one)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        at = f", round {one['round']:.1f}" if one["round"] is not None else ""
        process = f", process {one['process']}" if one["process"] else ""
        who = f"{one['name']}, " if one["name"] else ""
        print(f"{who}{one['folder']}: {one['state']}{process}{at}")
    if not found:
        print(
            "no peer of yours has a folder on this machine; for a run give its ticket: p2p-co2 status TICKET"
        )


def metrics(
    source: _Source = "",
    folder: _Folder = None,
    tensorboard: Annotated[Path | None, says("Write TensorBoard files there.", metavar="FOLDER")] = None,
    wandb: Annotated[str, says("Log to this Weights & Biases project.", metavar="PROJECT")] = "",
    seconds: Annotated[float, says("End after so long; 0: when the run is over, or at Ctrl-C.")] = 0.0,
) -> None:
    """Copy a run's figures to TensorBoard or Weights & Biases while it goes on. Exit status 1 if the run was
    never reached."""
    from monitoring.sinks import export_feed, open_sinks

    sinks = open_sinks(tensorboard, wandb)
    feed, _ = _feed(source, folder, "metrics")
    raise typer.Exit(export_feed(feed, sinks, seconds))


def _feed(source: str, folder: Path | None, command: str) -> tuple[Feed, Path | None]:
    """The feed behind ``source``, and where its history may be kept (None: it is all there anyway). Raises
    ``TicketError``, ``EnvironmentFault``, ``ConfigError`` for what is neither."""
    source = read_ticket(source)
    place = Path(source)
    if not source.startswith(PREFIX):  # which may be longer than a file's name
        if not place.is_dir() and (named := folder_called(source)) is not None:
            place = named
            source = str(named)
        holds_events = any((place / one).exists() for one in ("events.jsonl", "peers"))
        if not holds_events and (place / "ticket").is_file():
            source = read_ticket(f"@{place / 'ticket'}")  # a seed's folder, or that of an own loop
    if source.startswith(PREFIX):
        ticket = Ticket.parse(source)
        from p2p_co2.node.reporting import Observer
        from p2p_co2.system.process import claim

        folder = folder or observer_folder(ticket.run, command)
        claim(folder)  # said now, rather than on a page by an observer that tries for ever
        return Observer(source, folder), folder / f"board-{ticket.run.hex()[:12]}.sqlite"
    if not place.is_dir():
        problem = f"{source[:80]!r} is neither a ticket, nor a folder, nor what a peer here is called"
        raise ConfigError.of_option("TICKET", f"{problem}; p2p-co2 status lists those")
    if not any((place / one).exists() for one in ("events.jsonl", "peers")):
        problem = f"{place} holds neither a run's journals nor a ticket"
        raise ConfigError.of_option("TICKET", f"{problem}; name a peer's, a seed's or a demo's folder")
    from monitoring.feeds import JournalFeed

    return JournalFeed(place), None
