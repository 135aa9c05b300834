"""From a ticket to a training peer: ``connect`` joins the swarm's network, ``Connection.start`` adds the
model.

Between the two the caller knows the run's settings and can refuse, before anything large has been downloaded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, TransportError
from p2p_co2.node.node import Node
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.protocol.wire.model_table import ModelSummary
from p2p_co2.system.memory import return_large_blocks
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import checkpoint as checkpoints
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import clipped_mean, weighted_mean
from p2p_co2.tensors.checkpoint import Checkpoint, state_size_bytes
from p2p_co2.tensors.codec import Codec, get_codec
from p2p_co2.tensors.fragments.live import LiveParameters
from p2p_co2.tensors.fragments.plan import FragmentPlan, plan_fragments
from p2p_co2.ticket import Ticket
from p2p_co2.trainer import resuming
from p2p_co2.trainer.arrival import GATHER_BOUND_S, LISTEN_TO_LISTED_S, Arrival, caught_up
from p2p_co2.trainer.beginning import Beginning
from p2p_co2.trainer.buffers import ModelBuffers
from p2p_co2.trainer.exchanged_model import Plan
from p2p_co2.trainer.fragment_state import FragmentState
from p2p_co2.trainer.model_check import check_model
from p2p_co2.trainer.network_thread import NetworkThread
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.rates import base_rates, check_factor, most_rates, warming_up
from p2p_co2.trainer.summary import summarise
from p2p_co2.trainer.synchroniser import Progressed
from p2p_co2.trainer.worker import TensorWorker

STRANGERS_ANSWER_S = 2.5
"""Peers with another model are believed after this: the table that says how theirs differs has come, or does
not, and so have those that have ours."""
FP32_BYTES = 4
EventSink = Callable[[ev.Event], None]


def connect(ticket: str, config: PeerConfig, on_event: EventSink) -> Connection:
    """Join the network of the run that ``ticket`` invites to, and verify its settings. Blocks; Ctrl-C is
    safe.

    ``on_event`` is called from several threads. Raises ``ConfigError`` (another type of argument),
    ``TicketError`` (damaged, foreign), ``TransportError``
    (no seed answers), ``EnvironmentFault`` (this machine; the board's port), ``ConfigError`` (settings that
    this version does not know).
    """
    _check_call(ticket, config, on_event)
    return_large_blocks()  # before there are threads: each stays with the arena that it had
    config = config.model_copy(update={"folder": config.folder.absolute()})  # wherever the program goes later
    thread = NetworkThread(Ticket.parse(ticket), config, on_event)
    try:
        thread.open()
        if doubt := thread.network.clock_doubt:
            thread.warn(doubt)
    except BaseException:
        thread.close()
        raise
    return Connection(thread, config, thread.on_event)


def print_warnings(event: ev.Event) -> None:
    """What a person should know, on stderr."""
    if isinstance(event, ev.Warned):
        print(f"warning: {event.text}", file=sys.stderr, flush=True)


def join(
    ticket: str,
    model: nn.Module,
    optimizer: Optimizer,
    config: PeerConfig | None = None,
    on_event: EventSink | None = None,
    start_over: bool = False,
) -> Peer:
    """``connect`` and ``start`` in one: for one's own training loop. Use the peer as a context manager.

    Prints where this peer's board is served, on stderr; ``PeerConfig(board=False)`` serves none. Without
    ``on_event`` it prints warnings there, too. Goes on from the folder's checkpoint if there is one;
    ``start_over`` begins anew. Raises as both; for a model or optimizer that a swarm cannot train
    ``ConfigError``, before the network is used.
    """
    check_model(model, optimizer)
    base_rates(optimizer, is_scheduled=False)
    given = print_warnings if on_event is None else on_event
    connection = connect(ticket, PeerConfig() if config is None else config, given)
    if connection.board:
        print(f"board: {connection.board}", file=sys.stderr, flush=True)
    try:
        return connection.start(model, optimizer, start_over=start_over)
    except BaseException:
        connection.close()
        raise


@dataclass(frozen=True)
class Connection:
    """A verified run, not yet trained in. End it with ``close``, or ``start`` and then the peer's
    ``leave``."""

    _thread: NetworkThread
    config: PeerConfig
    _on_event: EventSink

    @property
    def run(self) -> RunConfig:
        """What all peers of the run agree on."""
        return self._thread.network.run

    @property
    def board(self) -> str:
        """The address of this peer's own page on the loopback; "" if ``config.board`` is False. Nothing runs
        for it until somebody looks, and then a process of its own."""
        return self._thread.board

    @property
    def ticket(self) -> str:
        """An invitation: the ticket that this peer came by, with some peers as further seeds, so that it
        works when the first seeds are gone. It grows as this peer meets others."""
        return str(self._thread.network.invitation)

    def close(self) -> None:
        """Leave the network. May be called twice."""
        self._thread.close()

    @torch.inference_mode(False)
    def start(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: Callable[[float], float] | None = None,
        resume: bool | None = None,
        start_over: bool = False,
    ) -> Peer:
        """Become a training peer: cut the model, go on from the folder's checkpoint, wait for ``min_peers``,
        catch up with the swarm.

        ``model``'s parameters must be those that every peer starts from (same recipe, same seed); they are
        overwritten by the swarm's if it is further on. ``learning_rate`` maps the swarm's position (rounds)
        to a factor on each group's own learning rate (``initial_lr``, if a torch scheduler was made); without
        it a resumed peer's rates are the saved ones, and a torch scheduler needs its own state loaded, or
        begins anew from them. ``resume``: None goes on from the folder's checkpoint if
        it has one; True: it must, False: anew. ``start_over``: begin anew, whatever others have trained and
        left, and although the folder has a checkpoint, which is set aside.

        Blocks, bounded. Raises ``RunOver`` (the run has had its last round), ``ConfigError`` (a model or
        optimizer that a swarm cannot train, as ``model_check`` says; a model too small for the fragments, or
        not the one that the run's peers train; no checkpoint to resume from, or one of another run or model),
        ``TransportError`` (not enough peers, none that can help, or all that trained this run have left).
        """
        if start_over and resume:
            problem = "begins anew, and resume=True asks for a checkpoint; leave one out"
            raise ConfigError("start", "start_over", problem)
        resume = False if start_over else resume
        check_model(model, optimizer)
        base_lr = base_rates(optimizer, is_scheduled=learning_rate is not None)
        check_factor(learning_rate)
        run = self.run
        plan = plan_fragments(model, run.fragments)
        saved = self._load(plan, model, resume)
        resumed_at = None if saved is None else saved.position
        beginning = Beginning(self._thread, run.clock.rounds, resumed_at, start_over)
        beginning.refuse_if_over()
        codec = get_codec(run.codec.name)
        live = LiveParameters(model, plan)
        me = self._thread.network.identity.peer_id
        states = (
            [outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments]
            if saved is None
            else list(saved.states)
        )
        rule = clipped_mean if run.weight_cap else weighted_mean
        fragments = [FragmentState(run, codec, me, state, index) for index, state in enumerate(states)]
        ledger = TensorWorker(codec, fragments, rule)
        del states, fragments  # they are the worker's, which lets go of them when it takes over others
        progressed, most_lr, is_warming_up = Progressed(), tuple[float, ...](), warming_up(optimizer)
        if saved is not None:
            for trouble in resuming.restore(saved, live, model, optimizer, learning_rate is not None):
                self._thread.warn(trouble)
            most_lr = most_rates(optimizer, base_lr, is_warming_up)
            ledger.restore(saved.residuals)
            progressed = Progressed(saved.position, saved.inner_steps, saved.tokens)
            self._tell_of_damaged(saved)
        is_resumed, saved = saved is not None, None  # its memory is the worker's to let go
        shape = _shape(run, codec, plan, ledger.chunk_bytes)
        self._tell_of_start(model, plan, progressed, is_resumed)
        sizes = [state_size_bytes(fragment.numel) for fragment in plan.fragments]
        try:
            summary = summarise(model, plan)
            node = self._thread.start_node(shape, sizes, ledger, summary).node
            self._tell_of_unread(summary)
            self._gather(node)
            self._catch_up(node, beginning)
            buffers = self._take_buffers(node, model, is_new=not is_resumed)
        except BaseException:
            ledger.close()
            raise
        progressed = caught_up(progressed, self._thread.view.swarm_position(), run.clock, time.monotonic())
        if warning := outer.stability_warning(run.outer, delayed=run.outer.rule in {"co2", "eager"}):
            self._thread.warn(warning)
        if not is_resumed:
            checkpoints.set_aside(self._checkpoints)
        plan_of_peer = Plan(run, self.config, plan, model, optimizer, learning_rate, base_lr, most_lr)
        return Peer(self._thread, ledger, plan_of_peer, progressed, buffers)

    def _tell_of_start(
        self, model: nn.Module, plan: FragmentPlan, progressed: Progressed, is_resumed: bool
    ) -> None:
        self._on_event(
            ev.PeerStarted(
                at=time.time(),
                peer=self._thread.network.identity.peer_id,
                name=self.config.name,
                pid=os.getpid(),
                software=self._thread.network.software,
                device=str(next(model.parameters()).device),
                parameters=plan.numel,
                fragments=len(plan.fragments),
                run=self.run.digest().hex(),
                upload_cap_bytes_per_s=self.config.limits.upload_bytes_per_s,
                resumed_from=str(self._checkpoints) if is_resumed else "",
                inner_steps=progressed.inner_steps,
                position=progressed.position,
            )
        )

    def _load(self, plan: FragmentPlan, model: nn.Module, resume: bool | None) -> Checkpoint | None:
        """The folder's checkpoint, if there is one or must be one."""
        folder = self._checkpoints
        if resume is False or (resume is None and not checkpoints.has_checkpoint(folder)):
            return None
        saved = checkpoints.load(folder)
        resuming.check(saved, self.run, model, plan, str(folder))
        return saved

    @property
    def _checkpoints(self) -> Path:
        return self.config.folder / "checkpoint"

    def _tell_of_damaged(self, saved: Checkpoint) -> None:
        for damage in saved.passed_over:
            self._thread.warn(f"a checkpoint is damaged, went on from the checkpoint before it: {damage}")

    def _tell_of_unread(self, model: ModelSummary) -> None:
        unread = [row.name for row in model.rows if not (row.is_trained or row.values)]
        if unread:
            names = ", ".join(unread[:4])
            self._thread.warn(f"torch does not show frozen values, so nobody compares them: {names}")

    def _in_doubt(self, node: Node, began_at: float) -> bool:
        """Whether those heard so far mostly train another model, which the next answers may change. Raises
        ``ConfigError`` when they do not."""
        now = time.monotonic()
        alike = [info.status for info in list(node.membership.live.values())]
        stranger = node.membership.strangers.outnumber(alike)
        if stranger is None:
            return False
        listened_s = LISTEN_TO_LISTED_S if node.unheard_peers() else STRANGERS_ANSWER_S
        if now - began_at > listened_s and node.now() - stranger.since > STRANGERS_ANSWER_S:
            name, problem = stranger.difference or ("", "the others would not say how it differs")
            raise ConfigError("the model is not the one that this run's peers train", name, problem)
        return True

    def _gather(self, node: Node) -> None:
        """Wait until enough peers are live."""
        wanted = self.config.min_peers - 1
        began_at = time.monotonic()
        ends_at = began_at + GATHER_BOUND_S
        while node.live_peers() < wanted:
            self._thread.check()
            self._in_doubt(node, began_at)
            if time.monotonic() > ends_at:
                raise TransportError(
                    f"only {node.live_peers() + 1} of {self.config.min_peers} peers after "
                    f"{GATHER_BOUND_S:.0f} s; start the others, or ask for fewer with --min-peers"
                )
            time.sleep(0.02)

    def _take_buffers(self, node: Node, model: nn.Module, is_new: bool) -> ModelBuffers:
        """Begin with a donor's buffers, if this peer is new to a run that is under way."""
        buffers = ModelBuffers(model)
        if left_out := buffers.left_out:
            name, why = next(iter(left_out.items()))
            self._thread.warn(f"newcomers begin with some buffers of their own, such as {name} ({why})")
        if not buffers.size_bytes:
            return buffers
        if buffers.running:
            self._thread.warn(
                f"buffers such as {buffers.running[0]} are each peer's own: rounds do not average them, and "
                "a newcomer begins with a donor's"
            )
        is_newcomer = is_new and any(agreed.version for agreed in node.agreed)
        wanted = self._thread.view.take_buffers(buffers.layout, buffers.size_bytes, is_newcomer)
        taken = self._thread.ask(wanted)
        if not is_newcomer:
            return buffers
        if trouble := buffers.load_(taken) if taken else "nobody gave them":
            self._thread.warn(
                f"this peer goes on with buffers of its own, such as {buffers.names[0]}: {trouble}"
            )
        return buffers

    def _catch_up(self, node: Node, beginning: Beginning) -> None:
        """Wait until this peer is where the swarm is, or is sure that it is alone."""
        arrival = Arrival(node, time.monotonic())
        while True:
            self._thread.check()
            if node.progress.conclusions.full:
                raise TransportError(
                    f"this run has {self.run.group_size} peers already, as many as its group_size allows; "
                    "join again when one has left"
                )
            in_doubt = self._in_doubt(node, arrival.began_at)
            now = time.monotonic()
            listened = now - arrival.began_at > LISTEN_TO_LISTED_S
            if arrival.is_there(now, in_doubt) and (
                node.progress.conclusions.met or beginning.is_allowed(node, listened)
            ):
                return
            time.sleep(0.02)


def _shape(run: RunConfig, codec: Codec, plan: FragmentPlan, chunk_bytes: int) -> PayloadShape:
    return PayloadShape(
        codec.block_bytes,
        tuple(codec.blocks(fragment.numel) for fragment in plan.fragments),
        run.clock.round_s if run.clock.mode == "time" else 0.0,
        chunk_bytes=chunk_bytes,
        weight_cap=run.weight_cap,
        counts_steps=run.clock.mode == "steps",
    )


def _check_call(ticket: str, config: PeerConfig, on_event: EventSink) -> None:
    if not isinstance(ticket, str):
        raise ConfigError(
            "join",
            "ticket",
            f"is of type {type(ticket).__name__}; give the word that the seed prints, as a str",
        )
    if not isinstance(config, PeerConfig):
        raise ConfigError(
            "join", "config", f"is of type {type(config).__name__}; give PeerConfig(folder=...)"
        )
    if not callable(on_event):
        raise ConfigError(
            "join", "on_event", f"is of type {type(on_event).__name__}; give a function that takes an event"
        )
