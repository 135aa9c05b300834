"""A volunteer's peer: joins by ticket, refuses a recipe that is not the run's, trains, leaves cleanly.

The loop in ``_train`` is the one a user would write with the library (``examples/own_loop.py``); all of the
swarm is behind ``peer.step``. One Ctrl-C leaves cleanly, two at once; leaving waits for the inner step in
progress."""

from __future__ import annotations

import gc
import importlib
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, Self

from p2p_co2.config import OWN_LOOP, PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.net.transport.addresses import is_loopback
from p2p_co2.node.peer_finder import ALONE
from p2p_co2.system.extras import missing
from p2p_co2.system.machine import cores
from p2p_co2.system.process import StopSignals, claim, end_with_parent
from p2p_co2.telemetry.events import Event, PeerStarted, Warned
from p2p_co2.telemetry.journal import Journal
from p2p_co2.telemetry.watch import Watch
from p2p_co2.ticket import Ticket, line_to_join
from peers.doctor.findings import Grade
from peers.doctor.machine import look_at_machine

if TYPE_CHECKING:
    from p2p_co2.recipes import Recipe
    from p2p_co2.trainer import Connection, Peer
    from p2p_co2.trainer.stages.peer import StagePeer


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """``recipe``: where this run's own recipe lies here ("file.py:function"), "" for a built-in one.
    ``data``: recipe options that are this peer's own affair: its text, or the data of an own recipe.
    ``resume``: there must be a checkpoint in ``config.folder``; one that is there is gone on from anyway,
    unless ``start_over``. ``parent``: leave when that process ends; 0 for none."""

    ticket: str
    config: PeerConfig
    recipe: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    start_over: bool = False
    parent: int = 0


class PeerWatch(Watch, Protocol):
    """What shows a volunteer the peer; its methods may be called from any thread. ``know`` is told the run,
    before there is a peer; ``leave`` answers a first Ctrl-C."""

    def know(self, run: RunConfig) -> None: ...
    def leave(self) -> None: ...


def import_slow() -> None:
    """Import torch and all that joining needs."""
    # What is imported stays: looking for garbage among it takes a tenth of the time, and of each look later.
    gc.disable()
    try:
        importlib.import_module("p2p_co2.trainer")
    finally:
        gc.freeze()
        gc.enable()


def join_run(options: JoinOptions, watch: PeerWatch) -> None:
    """Train until the run is over or somebody stops us. Raises ``TicketError``, ``ConfigError``,
    ``EnvironmentFault``, ``TransportError`` as named in those."""
    running = _Running(watch.leave)
    try:
        with running:
            _look_and_join(options, running, watch)
    except KeyboardInterrupt:
        watch.say("stopped before the training began")
    finally:
        watch.close()


def _look_and_join(options: JoinOptions, running: _Running, watch: PeerWatch) -> None:
    end_with_parent(options.parent)
    _look_first(options.config, watch.say)
    options = replace(options, config=_on_a_device(options.config, watch.say))
    is_new = _look_into_folder(options)
    with Journal(options.config.folder / "events.jsonl") as journal:

        def on_event(event: Event) -> None:
            journal.write(event)
            watch.see([event])
            if isinstance(event, PeerStarted):
                watch.say(f"called {event.name}")
                at = f"step {event.inner_steps}, round {event.position:.2f}"
                if event.resumed_from:
                    watch.say(f"resumed from {event.resumed_from}: {at}")
            if isinstance(event, Warned) and event.text == ALONE:
                ticket = Ticket.parse(options.ticket)
                if ticket.admits is None:  # else the organiser alone can
                    watch.say(f"to invite somebody: p2p-co2 join {ticket}")

        _join_and_train(options, running, on_event, watch, is_new)
        if journal.failed:
            watch.say(f"warning: {journal.failed}")


def _look_into_folder(options: JoinOptions) -> bool:
    """What would end the peer once it has found the swarm, before it looks for it. Returns whether nothing
    was in the folder."""
    from p2p_co2.tensors.checkpoint.folder import has_checkpoint

    folder = options.config.folder
    is_new = not folder.is_dir() or {path.name for path in folder.iterdir()} <= {"lock"}
    claim(folder)
    if options.resume and options.start_over:
        raise ConfigError.of_option("--start-over", "begins anew, and --resume does not; leave one out")
    if options.resume and not has_checkpoint(folder / "checkpoint"):
        problem = f"{folder} has no checkpoint; leave it out, or name another --folder"
        raise ConfigError.of_option("--resume", problem)
    return is_new


def _look_first(config: PeerConfig, say: Callable[[str], None]) -> None:
    """The doctor's look at this machine: says what limits the peer. Raises ``EnvironmentFault`` for what
    forbids it, ``ConfigError`` for a device that is not there."""
    for finding in look_at_machine(config):
        if finding.state == Grade.CANNOT and finding.name == "device":
            raise ConfigError.of_option("--device", f"{finding.measured}; {finding.advice}")
        if finding.state == Grade.CANNOT:
            raise EnvironmentFault(f"{finding.name}: {finding.measured}; {finding.advice}")
        if finding.state == Grade.LIMITED and finding.name != "rest-while":  # the peer warns of that itself
            say(f"note: {finding.name}: {finding.measured}; {finding.advice}")


def _on_a_device(config: PeerConfig, say: Callable[[str], None]) -> PeerConfig:
    """``config`` with the device that ``auto`` stands for here, which is said."""
    from p2p_co2.tensors.device import training_device

    device = training_device(config.device)
    say(f"device: {device.words}")
    return config.model_copy(update={"device": device.name})


class _Running(StopSignals):
    """What a first Ctrl-C meets: before there is a peer it breaks off, later it asks the peer to stop. A
    thread answers it, since the interrupted one may be in the middle of saying something."""

    def __init__(self, answer: Callable[[], None]) -> None:
        super().__init__(self._stop)
        self._peer: Peer | StagePeer | None = None
        self._asked = SimpleQueue[bool]()  # whose ``put`` is safe in a signal handler
        self._answering = threading.Thread(target=self._answer, args=(answer,), daemon=True)

    def __enter__(self) -> Self:
        self._answering.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._asked.put(False)
        self._answering.join(1.0)  # unless its terminal stands still

    def _answer(self, answer: Callable[[], None]) -> None:
        if self._asked.get():
            answer()

    def _stop(self) -> bool:
        if self._peer is None:
            return True
        self._asked.put(True)
        self._peer.stop()
        return False

    def take(self, peer: Peer | StagePeer) -> None:
        """From now on a Ctrl-C means this peer; one that was swallowed on the way to it too."""
        self._peer = peer
        if self.asked:
            peer.stop()


def _join_and_train(
    options: JoinOptions, running: _Running, on_event: Callable[[Event], None], watch: PeerWatch, is_new: bool
) -> None:
    """``is_new``: whether the folder goes again if the run is refused."""
    import torch

    from p2p_co2.recipes import load_run_recipe
    from p2p_co2.trainer import connect

    torch.set_num_threads(options.config.limits.threads or cores())
    watch.say("looking for the swarm ...")
    connection = connect(options.ticket, options.config, on_event)
    try:
        try:
            watch.know(connection.run)
            _refuse_own_loop(connection.run, options.ticket)
            if options.config.board:
                watch.say(f"board: {connection.board or missing('board')}")
            what = f'run "{connection.run.name}", recipe {connection.run.recipe}'
            watch.say(f"{what}; kept in {connection.config.folder}")
            if opened := what_is_opened(options.config):
                watch.say(opened)
            recipe = load_run_recipe(connection.run, options.recipe, options.data)
            watch.say(f"trains on: {_what_is_trained_on(connection.run, options)}")
        except ConfigError:
            if is_new:
                shutil.rmtree(connection.config.folder, ignore_errors=True)
            raise
        _train(connection, recipe, options, running)
    finally:
        connection.close()


def _refuse_own_loop(run: RunConfig, ticket: str) -> None:
    """Raises ``ConfigError`` for a run that ``join`` cannot train."""
    if run.recipe == OWN_LOOP:
        line = line_to_join("TICKET" if run.members else ticket, run)  # a member's is a secret
        cure = f"get that from the organiser, and start it: {line}"
        raise ConfigError(f'run "{run.name}"', "", f"is trained by a program of its own; {cure}")


def _what_is_trained_on(run: RunConfig, options: JoinOptions) -> str:
    """The files of this machine that training reads, in words: only what its user named."""
    named = [f"{key} {path}" for key, path in options.data.items()]
    if options.recipe:
        named = [*(named or ["what the recipe itself brings"]), f"by the recipe {options.recipe}"]
    given = ", ".join(f"{key} = {value!r}" for key, value in run.recipe_options.items())
    words = ", ".join(named) or "Python's own text (--text PATH for yours)"
    return f"{words}, with the run's options {given}" if given and options.recipe else words


def what_is_opened(config: PeerConfig) -> str:
    """What a peer does for others on its network, in words; "" on the loopback, where nobody comes in."""
    doings = ["asks the router to let others in (--no-upnp)"] if config.upnp else []
    doings += ["passes on traffic of those that cannot reach each other (--no-relay)"] if config.relay else []
    return "" if is_loopback(config.host) or not doings else f"this peer {' and '.join(doings)}"


def _train(connection: Connection, recipe: Recipe, options: JoinOptions, running: _Running) -> None:
    if connection.run.pipeline.stages > 1:
        stage_peer = connection.start_stage(recipe, options.resume or None, options.start_over)
        running.take(stage_peer)
        stage_peer.train()
        return
    from p2p_co2.recipes import InnerStep
    from p2p_co2.swarm.data import Place, Stopped, passes
    from p2p_co2.trainer.agreed_loss import AgreedLoss
    from p2p_co2.trainer.stages.peer import data_seed

    model = recipe.model.to(options.config.device)
    optimizer = recipe.optimizer(model.parameters())  # a first one imports much of torch
    peer = connection.start(
        model, optimizer, recipe.learning_rate, options.resume or None, options.start_over,
        fits_swarm=recipe.fits_swarm,
    )  # fmt: skip
    running.take(peer)
    sequences = options.config.batch or recipe.default_batch
    measuring = AgreedLoss(recipe.glance or recipe.held_out)
    with peer, suppress(Stopped):
        measuring.begin(peer)
        step = InnerStep(recipe, model, optimizer)
        seed = partial(data_seed, connection.run, peer.peer_id)
        if recipe.loader is None:
            batches = iter(recipe.batches(seed(peer.inner_steps), sequences))
        else:
            place = Place(seed, peer.keep_place(lambda: str(place)))

            def goes_on(waited_s: float) -> bool:
                return peer.idle(waited_s, all(one.grad is None for one in model.parameters()))

            batches = passes(recipe.loader, place, goes_on)
        while (taken := step.take(batches)) is not None:
            if not peer.step(taken.tokens, taken.loss):
                break
            measuring.after_step(peer)
