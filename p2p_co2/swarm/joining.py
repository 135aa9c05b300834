"""``join``: a model and its optimizer into a swarm, by the ticket.

An option is declared once. One of a peer is a field of ``PeerConfig``, which the command line reads too; one
of ``join`` alone a parameter of ``_join``. For type checkers and editors ``make docs`` writes both into
``options.pyi``: a test fails where that is old."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Unpack, overload

import torch
from torch import nn

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, TicketError, TransportError
from p2p_co2.peer_options import peer_config, peer_options
from p2p_co2.recipes.optimizers import as_one
from p2p_co2.swarm.swarm import Swarm
from p2p_co2.system.extras import missing
from p2p_co2.system.folders import peer_folder
from p2p_co2.system.process import say
from p2p_co2.telemetry.events import THE_RUN_IS_OVER, Event, PeerFinished, Progress
from p2p_co2.telemetry.journal import Journal
from p2p_co2.ticket import Ticket, read_ticket
from p2p_co2.trainer import connection
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.ranks.group import form_group
from p2p_co2.trainer.ranks.peer import as_one_peer

if TYPE_CHECKING:
    from p2p_co2.swarm.options import Options

EventSink = Callable[[Event], None]
_swarms = weakref.WeakSet[Swarm]()
"""Of this process: two peers would merge into one model."""


def taken_by_name(kind: type[PeerConfig] = PeerConfig) -> dict[str, inspect.Parameter]:
    """What ``join``, ``co2.Optimizer`` and the callbacks take by name: the options of ``_join``, and the
    settings of a peer that are a program's affair. The annotation of each is (type, help) as text."""
    options = {
        name: one.replace(annotation=_told(one.annotation))
        for name, one in inspect.signature(_join).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    for name, setting in peer_options(kind).items():
        if setting.declared.in_program:
            told = setting.hint, setting.declared.help
            options[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=told
            )
    return options


def _told(annotation: str) -> tuple[str, str]:
    """(type, help) of an ``Annotated[type, "help"]``."""
    within = ast.parse(annotation, mode="eval").body.slice.elts  # type: ignore[attr-defined]
    return ast.unparse(within[0]), ast.literal_eval(within[1])


def check_names(options: Mapping[str, Any], kind: type[PeerConfig] = PeerConfig) -> None:
    """Raise ``TypeError`` for an option that there is not, before anything is done."""
    known = taken_by_name(kind)
    if unknown := sorted(set(options) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1)
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
    check_names(options)
    return _join(*given, **options)


def _end_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """How a program ends by what its user can mend: in its message, without a traceback."""
    if issubclass(kind, ConfigError | TicketError | TransportError | EnvironmentFault):
        say(f"{kind.__name__}: {error}")
    else:
        sys.__excepthook__(kind, error, trace)


def _progress_printer(run: RunConfig, folder: Path) -> EventSink:
    """What prints warnings, a line each ten seconds of where this peer is, and what to do at the run's end.
    ``folder``: the peer's."""
    told_at = math.inf
    clock = run.clock

    def hear(event: Event) -> None:
        nonlocal told_at
        connection.print_warnings(event)
        if isinstance(event, PeerFinished) and event.reason == THE_RUN_IS_OVER:
            say(f"the run is over; what it came to: p2p-co2 status {folder}")
            say(f"the model: p2p-co2 model {folder} --out DIR")
        if not isinstance(event, Progress):
            return
        told_at = min(told_at, event.at)  # the first of them begins the ten seconds
        if event.at - told_at < 10.0:
            return
        told_at = event.at
        words = f"round {event.position:.1f}"
        rounds = event.rounds or clock.rounds
        if rounds:
            words += f" of {rounds}"
        if rounds and clock.mode == "time":
            left_s = max(0.0, rounds - event.position) * clock.round_s
            words += f", {left_s // 60:.0f}:{left_s % 60:02.0f} left"
        if event.phase == "paused":
            words += ", resting"
        elif (both_s := event.train_s + event.exposed_s) > 0.0:
            words += f", {event.train_s / both_s:.0%} of the time training"
        say(words + (f", loss {event.loss:.4g}" if math.isfinite(event.loss) else ""))

    return hear


def _join(
    model: nn.Module, optimizer: Any, *,
    run: Annotated[str | None, 'The ticket, or "@file" that holds it; $P2P_CO2_TICKET if left out.'] = None,
    config: Annotated[
        str | Path | PeerConfig | None, "A peer file, or what was read of one: the other options override it."
    ] = None,
    resume: Annotated[
        bool | None,
        "True insists on a checkpoint in the folder; False begins with this model. Left out: as it comes.",
    ] = None,
    start_over: Annotated[bool, "Begin anew, whatever others have trained and left."] = False,
    lr_schedule: Annotated[
        Callable[[float], float] | None,
        "A factor on the optimizer's own rates at a position, in rounds. Left out: the rates are the "
        "program's.",
    ] = None,
    fits_swarm: Annotated[
        bool, "Multiply the rates, one machine's, by the root of the number of peers in the last means."
    ] = False,
    evaluate: Annotated[
        Callable[[nn.Module], float | Mapping[str, float]] | None,
        "A held-out loss, measured on the agreed parameters now and then, for boards; or a mapping of "
        'figures, one of them "loss".',
    ] = None,
    journal: Annotated[bool, "Whether the folder gets an `events.jsonl`; it does if left out."] = True,
    on_event: Annotated[
        EventSink | None,
        "Hears every event, from several threads. Left out: warnings are printed, and `progress`.",
    ] = None,
    progress: Annotated[
        bool, "A line each ten seconds on stderr, if `on_event` is left out: round, time left, share, loss."
    ] = True,
    scaler: Annotated[
        torch.amp.GradScaler | None, "With which `Swarm.step` steps: the loss is scaled by the program."
    ] = None,
    max_grad_norm: Annotated[float | None, "`Swarm.step` clips gradients to this norm."] = None,
    **settings: Any,
) -> Swarm:  # fmt: skip
    """``settings``: of a peer, by the options' names."""
    if any(swarm.model is model and not swarm.done for swarm in _swarms):
        problem = "is in a swarm already; leave that one first (a Trainer takes one SwarmCallback)"
        raise ConfigError("join", "model", problem)
    inner = as_one(optimizer)
    group = form_group(model, inner, lr_schedule)
    if settings.get("threads"):
        torch.set_num_threads(settings["threads"])
    journals = list[Journal]()

    def lead() -> Peer:
        ticket = read_ticket(run or "")
        peers = _peer_config(ticket, config, settings)
        if peers.limits.threads:
            torch.set_num_threads(peers.limits.threads)
        if journal:
            journals.append(Journal(peers.folder / "events.jsonl"))
        hears = [connection.print_warnings if on_event is None else on_event]

        def tell(event: Event) -> None:
            for written in journals:
                written.write(event)
            hears[-1](event)

        connected = connection.connect(ticket, peers, tell)
        if progress and on_event is None:
            hears.append(_progress_printer(connected.run, peers.folder))
        if peers.board:
            say(f"board: {connected.board or missing('board')}")
        try:
            return connected.start(model, inner, lr_schedule, resume, start_over, group, fits_swarm)
        except BaseException:
            connected.close()
            raise

    try:
        peer = as_one_peer(group, model, inner, lead, lr_schedule, fits_swarm)
    except BaseException:
        for written in journals:
            written.close()
        raise
    swarm = Swarm(peer, model, inner, scaler, max_grad_norm, evaluate, next(iter(journals), None))
    _swarms.add(swarm)
    return swarm


join.__signature__ = inspect.Signature([  # type: ignore[attr-defined]  # for notebooks and ``help``
    *list(inspect.signature(_join).parameters.values())[:2],
    *(one.replace(annotation=one.annotation[0]) for one in taken_by_name().values()),
])  # fmt: skip


def _peer_config(
    ticket: str, config: str | Path | PeerConfig | None, settings: Mapping[str, Any]
) -> PeerConfig:
    """As the command line makes them of its options."""
    base = config if config is None or isinstance(config, PeerConfig) else Path(config)
    run = Ticket.parse(ticket).run
    return peer_config(base, settings, ticket, lambda: peer_folder(run), where="join")
