"""The commands that look: ``board``, ``watch``, ``metrics``. Read-only.

``SOURCE`` is a ticket (joins the run's DHT as an observer) or a folder with journals (a demo's, a peer's).
"""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootstrap.options import says
from p2p_co2.errors import ConfigError
from p2p_co2.system.ctrl_c import hand_over, take_back
from p2p_co2.system.extras import require
from p2p_co2.system.folders import observer_folder
from p2p_co2.ticket import PREFIX, Ticket, read_ticket

if TYPE_CHECKING:
    from p2p_co2.telemetry.feed import Feed

_Source = Annotated[
    str,
    typer.Argument(
        metavar="TICKET", show_default=False,
        help="A run's ticket (a word, @FILE, or - for standard input), or a folder with journals; "
        "$P2P_CO2_TICKET if absent.",
    ),
]  # fmt: skip
_Folder = Annotated[
    Path | None, says("Keeps the observer's identity and the board's history; one for each run, if absent.")
]


def board(
    source: _Source = "",
    folder: _Folder = None,
    host: Annotated[str, says("Address to serve on; anything but loopback asks for a token.")] = "127.0.0.1",
    port: Annotated[int, says("0 for any free one.")] = 0,
    token: Annotated[str, says("Asked of everybody; made up where one is needed.")] = "",
) -> None:
    """Serve the dashboard of a run, seen from outside: no training, no change to the run."""
    require("board", "the board")
    take_back()  # nothing to give back yet, and these imports take a second
    from monitoring.board.server import place_for, run_board

    hand_over()
    place = place_for(host, port, token)
    feed, history = _feed(source, folder, "board")
    raise typer.Exit(run_board(feed, place, history))


def watch(
    source: _Source = "",
    folder: _Folder = None,
    seconds: Annotated[float, says("End after this; 0 for never.")] = 0.0,
) -> None:
    """Show a run in this terminal, for machines reached over ssh. Ctrl-C ends it."""
    take_back()
    from monitoring.terminal import watch_feed

    hand_over()
    feed, _ = _feed(source, folder, "watch")
    raise typer.Exit(watch_feed(feed, seconds))


def metrics(
    source: _Source = "",
    folder: _Folder = None,
    tensorboard: Annotated[Path | None, says("Write TensorBoard files there.", metavar="FOLDER")] = None,
    wandb: Annotated[str, says("Log to this Weights & Biases project.", metavar="PROJECT")] = "",
    seconds: Annotated[float, says("End after this; 0: when the run is over, or at Ctrl-C.")] = 0.0,
) -> None:
    """Copy a run's figures to TensorBoard or Weights & Biases while it goes on."""
    take_back()
    from monitoring.sinks import export_feed, open_sinks

    hand_over()
    sinks = open_sinks(tensorboard, wandb)
    feed, _ = _feed(source, folder, "metrics")
    raise typer.Exit(export_feed(feed, sinks, seconds))


@wraps(metrics)
def export(**given: Any) -> None:
    """Former name of `metrics`."""
    print("export is called metrics now; this name goes in the next version", file=sys.stderr)
    metrics(**given)


def _feed(source: str, folder: Path | None, command: str) -> tuple[Feed, Path | None]:
    """The feed behind ``source``, and where its history may be kept (None: it is all there anyway). Raises
    ``TicketError``, ``EnvironmentFault``, ``ConfigError`` for what is neither."""
    source = read_ticket(source)
    if source.startswith(PREFIX):
        ticket = Ticket.parse(source)
        take_back()
        from p2p_co2.node.reporting import Observer

        hand_over()
        from p2p_co2.system.process import claim, require_supported_platform

        require_supported_platform()
        folder = folder or observer_folder(ticket.run, command)
        claim(folder)  # said now, rather than on a page by an observer that tries for ever
        return Observer(source, folder), folder / f"board-{ticket.run.hex()[:12]}.sqlite"
    if not Path(source).is_dir():
        raise ConfigError("command line", "TICKET", f"{source[:80]!r} is neither a ticket nor a folder")
    from monitoring.feeds import JournalFeed

    return JournalFeed(Path(source)), None
