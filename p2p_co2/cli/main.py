"""The console script ``p2p-co2``: reads the command line, starts an application, turns errors into one line.

It is the only place that wires the applications together (the demo of ``bootstrap`` is watched by
``monitoring``). ``--help`` and ``--version`` import neither torch nor hivemind. A mistake of the user's
gives one line on stderr that says how to mend it and exit status 2 (this machine or the network at fault: 1;
the run over: 3); a traceback is left to bugs."""

from __future__ import annotations

from p2p_co2.system.ctrl_c import hand_over, take_back, was_interrupted  # before all that takes time

# isort: split
import errno
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bootstrap.options import DemoOptions, OwnRecipe, Parent, RehearsalOptions, SeedOptions, says
from p2p_co2.cli import checks, views
from p2p_co2.cli import options as shared
from p2p_co2.cli.gather import gather
from p2p_co2.cli.options import takes
from p2p_co2.errors import RUN_OVER, ConfigError, LocalProtocolError, P2PCo2Error, RunOver, TicketError
from p2p_co2.system.folders import OLD_PEER, data_home, peer_folder
from p2p_co2.ticket import Ticket, is_of_run, read_ticket

hand_over()
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder.")]
app = typer.Typer(
    name="p2p-co2",
    help="Volunteers train one PyTorch model together over the internet: asynchronous, quantised, no server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
)


def main(arguments: Sequence[str] | None = None, program: str = "p2p-co2") -> int:
    """Run one command. Returns the exit status of an error; a command that ends by itself raises
    ``SystemExit``."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name=program)
    except SystemExit as end:
        if was_interrupted(end):
            print("stopped", file=sys.stderr)
        raise
    except LocalProtocolError:
        raise  # a bug of ours: the traceback is the report
    except P2PCo2Error as error:
        return _report(str(error), _status_of(error))
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


def _report(problem: str, status: int) -> int:
    """One line, whatever the problem's text holds; the log of a dead child may follow it."""
    first, _, rest = problem.partition("\n")
    print(f"error: {first}" + (f"\n{rest}" if rest else ""), file=sys.stderr)
    return status


def _show_version(wanted: bool) -> None:
    if wanted:
        from p2p_co2 import __version__

        print(f"p2p-co2 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, says("Show the version and end.", "--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@takes(SeedOptions)
def seed(options: SeedOptions) -> int:
    """Publish a run and print its ticket; peers find each other through this process, which never trains."""
    from bootstrap.seed import serve_run

    return serve_run(options)


def join(
    ticket: shared.TicketWord = "",
    config_file: shared.ConfigFile = None,
    folder: Annotated[
        Path | None, says("Keeps identity, checkpoints and events; one for each run, if absent.")
    ] = None,
    name: Annotated[str | None, says("What others see beside the peer's id.")] = None,
    device: shared.Device = None,
    batch: Annotated[int | None, says("Sequences per inner step; 0 for the recipe's.")] = None,
    stage: Annotated[
        int | None, says("Of a run with stages: which to hold, from 0; else the neediest.")
    ] = None,
    threads: Annotated[int | None, says("CPU threads for training; 0 for the number of cores.")] = None,
    carrier: shared.Carrier = None,
    host: Annotated[
        str | None, says("Address to listen on; all of this machine's, if the seeds are elsewhere.")
    ] = None,
    announce_host: shared.AnnounceHost = None,
    grpc_port: shared.Port = None,
    libp2p_port: shared.Port = None,
    board: Annotated[
        bool | None, says("Serve a page on loopback; idle until looked at.", "--board/--no-board")
    ] = None,
    board_port: Annotated[int | None, says("Of that page; 0 for any.")] = None,
    min_peers: Annotated[int | None, says("Wait (bounded) for this many before training.")] = None,
    upload: Annotated[
        str | None, says("Upload cap: bytes per second, or 500k, 2M, 20Mbit.", metavar="RATE")
    ] = None,
    download: Annotated[str | None, says("Download cap, likewise.", metavar="RATE")] = None,
    hours: Annotated[
        str | None, says("Train only then, local time: 22:00-07:00, or several with commas.")
    ] = None,
    resume: Annotated[
        bool, says("Insist on the checkpoint in the folder: it is gone on from anyway.", "--resume")
    ] = False,
    start_over: Annotated[bool, says("Begin anew, whatever was trained before.", "--start-over")] = False,
    restart_stage: Annotated[
        bool, says("With --stage, where nobody has that stage any more: begin it anew.", "--restart-stage")
    ] = False,
    checkpoint_every: Annotated[
        float | None, says("Between checkpoints; 0 for what 100 GB of writes a day allow.", metavar="SECONDS")
    ] = None,
    recipe: Annotated[str, says("This run's own recipe, here.", metavar="FILE.py:function")] = "",
    text: Annotated[Path | None, says("Train on your own file or folder of text.")] = None,
    tokens: Annotated[Path | None, says("Train on your own file of token ids.")] = None,
    slow_line: Annotated[str | None, says("Of a rehearsal without root.", hidden=True)] = None,
    parent: Parent = 0,
) -> None:
    """Join a run and train. Ctrl-C leaves cleanly, a second Ctrl-C at once; SIGUSR1 pauses and goes on."""
    from p2p_co2.peer_options import bytes_per_s, peer_config

    if restart_stage and stage is None:
        raise ConfigError.of_option("--restart-stage", "say which stage is to begin anew, with --stage N")
    ticket = read_ticket(ticket)
    config = peer_config(
        config_file,
        {
            "folder": folder, "name": name, "device": device, "batch": batch, "stage": stage,
            "carrier": carrier, "host": host, "announce_host": announce_host, "grpc_port": grpc_port,
            "libp2p_port": libp2p_port, "min_peers": min_peers, "slow_line": slow_line, "board": board,
            "board_port": board_port,
            "checkpoint_every_s": checkpoint_every,
            "limits.threads": threads, "limits.hours": hours,
            "limits.upload_bytes_per_s": bytes_per_s("--upload", upload),
            "limits.download_bytes_per_s": bytes_per_s("--download", download),
        },
        ticket,
        partial(_peer_folder, ticket),
    )  # fmt: skip
    take_back()
    from peers.daemon import JoinOptions, import_slow, join_run

    data = {key: str(path.resolve()) for key, path in (("text", text), ("tokens", tokens)) if path}
    options = JoinOptions(
        ticket=ticket, config=config, recipe=recipe, data=data, resume=resume,
        start_over=start_over or restart_stage, parent=parent,
    )  # fmt: skip
    import_slow()
    from p2p_co2.cli.join import JoinWatch

    hand_over()
    join_run(options, JoinWatch())


def _peer_folder(ticket: str) -> Path:
    """Where a peer keeps its files that was told no folder; says so where that is the old place."""
    run = Ticket.parse(ticket).run
    folder = peer_folder(run, OLD_PEER if is_of_run(OLD_PEER, run) else None)
    if folder == OLD_PEER:
        print(f"going on in {folder}, which is of this run; new ones are kept in {data_home() / 'runs'}")
    return folder


@takes(DemoOptions)
def demo(options: DemoOptions) -> int:
    """A whole swarm on this machine: one seed and several peers, each a process of its own, on real text."""
    take_back()
    from bootstrap.demo import run_demo
    from p2p_co2.cli.demo import RunWatch

    hand_over()
    return run_demo(options, partial(RunWatch, board=options.board))


@takes(RehearsalOptions)
def rehearse(options: RehearsalOptions) -> int:
    """The run over emulated internet lines, before anybody is invited: needs root for real packets."""
    take_back()
    from bootstrap.rehearsal import run_rehearsal
    from p2p_co2.cli.demo import RunWatch

    hand_over()
    return run_rehearsal(options, RunWatch)


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, says("What the text begins with.")] = "def ",
    length: Annotated[int, says("Tokens to add.", min=1)] = 300,
    seed: Annotated[int, says("Of the sampling.")] = 0,
    recipe: OwnRecipe = "",
) -> None:
    """Generate text from a checkpoint."""
    take_back()
    from p2p_co2.trained import Trained

    hand_over()
    print(Trained.load(checkpoint, recipe).sample(prompt, length, seed))


def evaluate(checkpoint: Checkpoint, recipe: OwnRecipe = "") -> None:
    """Held-out loss of a checkpoint, as its recipe measures it (byte-gpt: nats per token)."""
    take_back()
    from p2p_co2.trained import Trained

    hand_over()
    print(f"{Trained.load(checkpoint, recipe).held_out_loss():.4f}")


def init() -> None:
    """Print a run file with every setting explained; `p2p-co2 init > run.toml` is a start."""
    from bootstrap.run_file import DEFAULT_RUN_FILE

    print(DEFAULT_RUN_FILE, end="")


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo, "init": init, "plan": checks.plan, "rehearse": rehearse, "simulate": checks.simulate,
    "seed": seed, "doctor": checks.doctor, "join": join, "board": views.board, "watch": views.watch,
    "export": views.export, "gather": gather, "sample": sample, "eval": evaluate,
}  # fmt: skip
"""As somebody meets them who starts with nothing."""
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
