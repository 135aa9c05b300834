"""``join``: a model and its optimizer into a swarm, by the ticket. Options have the command line's names."""

from __future__ import annotations

import difflib
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import nn

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, TicketError, TransportError
from p2p_co2.peer_options import bytes_per_s, peer_config
from p2p_co2.recipes.optimizers import Optimizers
from p2p_co2.swarm.swarm import Swarm
from p2p_co2.system.extras import missing
from p2p_co2.system.folders import peer_folder
from p2p_co2.system.process import say
from p2p_co2.telemetry.events import Event, Progress
from p2p_co2.telemetry.journal import Journal
from p2p_co2.ticket import Ticket, read_ticket
from p2p_co2.trainer import connection
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.ranks.group import form_group
from p2p_co2.trainer.ranks.peer import as_one_peer

EventSink = Callable[[Event], None]
_swarms = weakref.WeakSet[Swarm]()
"""Of this process: two peers would merge into one model."""


class Options(TypedDict, total=False):
    """What ``join``, ``co2.Optimizer`` and the callbacks take by name. Those of the command line have its
    names and its meaning; None, or left out, is the default."""

    run: str | None
    """The ticket, or "@file" that holds it; $P2P_CO2_TICKET if left out."""
    folder: str | Path | None
    """Of identity, checkpoint and events; if left out, one of the run's below the user's data home."""
    name: str | None
    resume: bool | None
    """True insists on a checkpoint in the folder; False begins with this model. Left out: as it comes."""
    start_over: bool
    """Begin anew, whatever others have trained and left."""
    lr_schedule: Callable[[float], float] | None
    """A factor on the optimizer's own rates at a position, in rounds. Left out: the rates are the
    program's."""
    evaluate: Callable[[nn.Module], float] | None
    """A held-out loss, measured on the agreed parameters now and then, for boards."""
    journal: bool
    """Whether the folder gets an ``events.jsonl``; it does if left out."""
    on_event: EventSink | None
    """Hears every event, from several threads. Left out: warnings are printed, and ``progress``."""
    progress: bool
    """A line each ten seconds on stderr, if ``on_event`` is left out: round, time left, share, loss."""
    scaler: torch.amp.GradScaler | None
    """With which ``Swarm.step`` steps: the loss is scaled by the program."""
    max_grad_norm: float | None
    """``Swarm.step`` clips gradients to this norm."""
    config: str | Path | PeerConfig | None
    """A peer file, or what was read of one: the other options override it."""
    threads: int | None
    carrier: str | None
    host: str | None
    announce_host: str | None
    grpc_port: int | None
    libp2p_port: int | None
    board: bool | None
    board_port: int | None
    min_peers: int | None
    upload: str | float | None
    download: str | float | None
    """"5Mbit", "500k", or bytes per second."""
    hours: str | None
    checkpoint_every: float | None
    """Seconds."""


def check_names(options: Options) -> None:
    """Raise ``TypeError`` for an option that there is not, before anything is done."""
    if unknown := sorted(set(options) - set(Options.__annotations__)):
        near = difflib.get_close_matches(unknown[0], Options.__annotations__, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"join has no option {unknown[0]!r}{hint}")


@overload
def join(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    **options: Unpack[Options],
) -> Swarm: ...  # fmt: skip


@overload
def join(
    ticket: str, model: nn.Module, optimizer: torch.optim.Optimizer, config: PeerConfig | None = None,
    on_event: EventSink | None = None, start_over: bool = False,
) -> Peer: ...  # fmt: skip


def join(*given: Any, **options: Any) -> Swarm | Peer:
    """Train ``model`` together with the swarm that a ticket invites to. Blocks until this peer is where the
    swarm is; use what it returns as a context manager.

        with co2.join(model, optimizer, run=TICKET) as swarm: ...

    ``optimizer``: one of ``torch.optim``'s, or a list of them. It goes on from the folder's checkpoint if
    there is one. ``Options`` has the options: ``run=TICKET``, ``folder=...``, ``upload="5Mbit"`` ...

    In a group of ``torchrun``'s all ranks call it and are one peer. The ranks hold one model together (DDP,
    ``fully_shard``), and rank 0 alone has the folder, the board and the sockets.

    With the ticket first, ``join(ticket, model, optimizer, config, on_event, start_over)`` gives the bottom
    layer, a ``Peer``.

    Raises ``ConfigError`` (an option; a model or optimizer that a swarm cannot train, or another one than the
    run's). Also ``TicketError``, ``RunOver``, ``TransportError`` (nobody answers), ``EnvironmentFault`` (this
    machine).
    """
    if "ticket" in options or (given and isinstance(given[0], str)):
        return connection.join(*given, **options)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end_in_one_line
    check_names(options)  # type: ignore[arg-type]  # as given
    return _join(*given, **options)


def _end_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """How a program ends by what its user can mend: in its message, without a traceback."""
    if issubclass(kind, ConfigError | TicketError | TransportError | EnvironmentFault):
        say(f"{kind.__name__}: {error}")
    else:
        sys.__excepthook__(kind, error, trace)


def _progress_printer(run: RunConfig) -> EventSink:
    """What prints warnings, and a line each ten seconds of where this peer is."""
    told_at = math.inf
    clock = run.clock

    def hear(event: Event) -> None:
        nonlocal told_at
        connection.print_warnings(event)
        if not isinstance(event, Progress):
            return
        told_at = min(told_at, event.at)  # the first of them begins the ten seconds
        if event.at - told_at < 10.0:
            return
        told_at = event.at
        words = f"round {event.position:.1f}"
        if clock.rounds:
            words += f" of {clock.rounds}"
        if clock.rounds and clock.mode == "time":
            left_s = max(0.0, clock.rounds - event.position) * clock.round_s
            words += f", {left_s // 60:.0f}:{left_s % 60:02.0f} left"
        if event.phase == "paused":
            words += ", resting"
        elif (both_s := event.train_s + event.exposed_s) > 0.0:
            words += f", {event.train_s / both_s:.0%} of the time training"
        say(words + (f", loss {event.loss:.4g}" if math.isfinite(event.loss) else ""))

    return hear


def _join(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], *,
    run: str | None = None, folder: str | Path | None = None, name: str | None = None,
    resume: bool | None = None, start_over: bool = False,
    lr_schedule: Callable[[float], float] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None, journal: bool = True,
    on_event: EventSink | None = None, progress: bool = True, scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float | None = None, config: str | Path | PeerConfig | None = None,
    threads: int | None = None, carrier: str | None = None, host: str | None = None,
    announce_host: str | None = None, grpc_port: int | None = None, libp2p_port: int | None = None,
    board: bool | None = None, board_port: int | None = None, min_peers: int | None = None,
    upload: str | float | None = None, download: str | float | None = None, hours: str | None = None,
    checkpoint_every: float | None = None,
) -> Swarm:  # fmt: skip
    if any(swarm.model is model and not swarm.done for swarm in _swarms):
        problem = "is in a swarm already; leave that one first (a Trainer takes one SwarmCallback)"
        raise ConfigError("join", "model", problem)
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _one(optimizer)
    group = form_group(model, inner, lr_schedule)
    if threads:
        torch.set_num_threads(threads)
    journals = list[Journal]()

    def lead() -> Peer:
        ticket = read_ticket(run or "")
        settings = _settings(
            ticket, config,
            {
                "folder": folder, "name": name, "carrier": carrier, "host": host,
                "announce_host": announce_host, "grpc_port": grpc_port, "libp2p_port": libp2p_port,
                "board": board, "board_port": board_port, "min_peers": min_peers,
                "checkpoint_every_s": checkpoint_every, "limits.threads": threads, "limits.hours": hours,
            },
            upload, download,
        )  # fmt: skip
        if settings.limits.threads:
            torch.set_num_threads(settings.limits.threads)
        if journal:
            journals.append(Journal(settings.folder / "events.jsonl"))
        hears = [connection.print_warnings if on_event is None else on_event]

        def tell(event: Event) -> None:
            for written in journals:
                written.write(event)
            hears[-1](event)

        connected = connection.connect(ticket, settings, tell)
        if progress and on_event is None:
            hears.append(_progress_printer(connected.run))
        if settings.board:
            say(f"board: {connected.board or missing('board')}")
        try:
            return connected.start(model, inner, lr_schedule, resume, start_over, group)
        except BaseException:
            connected.close()
            raise

    try:
        peer = as_one_peer(group, model, inner, lead, lr_schedule)
    except BaseException:
        for written in journals:
            written.close()
        raise
    swarm = Swarm(peer, model, inner, scaler, max_grad_norm, evaluate, next(iter(journals), None))
    _swarms.add(swarm)
    return swarm


def _one(optimizer: Any) -> torch.optim.Optimizer:
    """Several as one; what is no list is looked at by ``check_model``."""
    return Optimizers(optimizer) if isinstance(optimizer, list | tuple) else optimizer


def _settings(
    ticket: str, config: str | Path | PeerConfig | None, given: dict[str, Any],
    upload: str | float | None, download: str | float | None,
) -> PeerConfig:  # fmt: skip
    """As the command line makes them of its options."""
    base = config if config is None or isinstance(config, PeerConfig) else Path(config)
    run = Ticket.parse(ticket).run
    try:
        for option, rate in (("upload", upload), ("download", download)):
            text = rate if rate is None or isinstance(rate, str) else f"{rate:f}"
            given[f"limits.{option}_bytes_per_s"] = bytes_per_s(f"--{option}", text)
        return peer_config(base, given, ticket, lambda: peer_folder(run))
    except ConfigError as error:
        if error.where != "command line":
            raise
        option = error.key.removeprefix("--").replace("-", "_")
        raise ConfigError("join", option, error.problem) from None
