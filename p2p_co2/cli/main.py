"""The console script ``p2p-co2``: reads the command line, starts an application, turns errors into one line.

It alone wires the applications together: ``monitoring`` watches the demo of ``bootstrap``. Each file beside
it holds a group of commands. ``--help``, ``--version`` and completion import neither torch nor hivemind. A
mistake on the command line is told by typer. One in a file or a ticket is a line on stderr that says how to
mend it, several a line each. Both have exit status 2 (this machine or the network at fault: 1; the run over:
3). A traceback is left to bugs and ``--verbose``."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from bootstrap.options import says
from p2p_co2.cli import here, models, organise, try_out, views, volunteer
from p2p_co2.cli.command import LINE, LOUDNESS, SETTINGS, Loudness, add
from p2p_co2.cli.credit import credit
from p2p_co2.cli.gather import gather
from p2p_co2.cli.model import model
from p2p_co2.errors import RUN_OVER, ConfigError, LocalProtocolError, P2PCo2Error, RunOver, TicketError

app = typer.Typer(
    name="p2p-co2",
    help="Volunteers train one PyTorch model together over the internet.",
    epilog="`p2p-co2 COMMAND -h` explains a command. `p2p-co2 demo` is a start.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=SETTINGS,
)
GROUPS: dict[str, dict[str, tuple[Callable[..., Any], str]]] = {
    "Try": {
        "demo": (try_out.demo, "A whole swarm on this machine, in three minutes."),
        "simulate": (try_out.simulate, "Many peers on virtual time, with faults."),
    },
    "Organise": {
        "init": (organise.init, "Print a run file with every setting explained."),
        "plan": (organise.plan, "What a run costs on given links, and whether they bear it."),
        "rehearse": (organise.rehearse, "The run over slowed lines, on this machine."),
        "seed": (organise.seed, "Publish a run and print its ticket."),
        "amend": (organise.amend, "A setting is another from a round on."),
        "invite": (organise.invite, "A ticket for one person, in a run with members."),
        "members": (organise.members, "Whom you invited, and until when."),
        "revoke": (organise.revoke, "A person's tickets hold no more."),
    },
    "Volunteer": {
        "doctor": (volunteer.doctor, "Whether this machine can take part, and how."),
        "join": (volunteer.join, "Join a run and train."),
        "pause": (here.pause, "Have a peer of this machine rest."),
        "resume": (here.resume, "Have it go on."),
        "leave": (here.leave, "Have it leave cleanly."),
        "ban": (here.ban, "Have it do nothing with another peer."),
        "prune": (here.prune, "What old runs hold on this disk, and delete it."),
        "credit": (credit, "What a peer gave to its run, with the proof."),
    },
    "Look": {
        "status": (views.status, "How a run is, in some lines."),
        "watch": (views.watch, "A run in this terminal."),
        "board": (views.board, "A run in a browser."),
        "metrics": (views.metrics, "A run's figures to TensorBoard or Weights & Biases."),
    },
    "Model": {
        "model": (model, "A trained model as from_pretrained loads it."),
        "gather": (gather, "One checkpoint out of those of all stages."),
        "eval": (models.evaluate, "The held-out loss of a checkpoint."),
        "sample": (models.sample, "Text from a checkpoint."),
    },
}
"""All commands as ``--help`` lists them: by group, each with its line."""
COMMANDS = {name: run for group in GROUPS.values() for name, (run, _) in group.items()}
for _group, _commands in GROUPS.items():
    for _name, (_run, _short) in _commands.items():
        add(app, _group, _name, _short, _run)


def _help(words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None) -> None:
    """As `p2p-co2 COMMAND -h`."""
    app(args=[*(words or ()), "--help"], prog_name=LINE.get()[0])


add(app, "", "help", "Explain a command.", _help, hidden=True)
add(app, "", "version", "Show the version.", lambda: _show_version(True), hidden=True)


def main(arguments: Sequence[str] | None = None, program: str = "p2p-co2") -> int:
    """Run one command. Returns the exit status of an error; a command that ends by itself, and a mistake on
    the command line, raise ``SystemExit``."""
    LINE.set([program, *(sys.argv[1:] if arguments is None else arguments)])
    try:
        app(args=None if arguments is None else list(arguments), prog_name=program)
    except LocalProtocolError:
        raise  # a bug of ours: the traceback is the report
    except P2PCo2Error as error:
        return _report(str(error), _status_of(error), is_a_line_each=isinstance(error, ConfigError))
    except OSError as error:
        if error.strerror is None:
            raise
        return _report(_in_words(error), 1)
    return 0


def _status_of(error: P2PCo2Error) -> int:
    if isinstance(error, RunOver):
        return RUN_OVER
    return 2 if isinstance(error, ConfigError | TicketError) else 1


def _in_words(error: OSError) -> str:
    what = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"{what}; free some space, or write to another disk"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return f"{what}; use a file or folder that is yours"
    return what


def _report(problem: str, status: int, is_a_line_each: bool = False) -> int:
    """A line for the error, or each of several; else the log of a dead child may follow the line."""
    if LOUDNESS.get() is Loudness.VERBOSE:
        traceback.print_exc()
    lines = problem.splitlines() if is_a_line_each else [problem]
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return status


def _show_version(wanted: bool) -> None:
    if wanted:
        from p2p_co2.version import __version__

        print(f"p2p-co2 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, says("Show the version and end.", "--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass
