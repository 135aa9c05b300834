"""From a ticket to a training peer: ``connect`` joins the swarm's network, ``Connection.start`` adds the
model.

Between the two the caller knows the run's settings and can refuse, before anything large has been downloaded.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from p2p_co2 import checkpoint as checkpoints
from p2p_co2 import outer
from p2p_co2.checkpoint import Checkpoint, state_size_bytes
from p2p_co2.codec import get_codec
from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, TransportError
from p2p_co2.fragments.live import LiveParameters
from p2p_co2.fragments.plan import FragmentPlan, plan_fragments
from p2p_co2.memory import return_large_blocks
from p2p_co2.node.node import Node
from p2p_co2.rounds import PayloadShape
from p2p_co2.telemetry import events as ev
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.fragment_ledger import FragmentLedger
from p2p_co2.trainer.ledger import TensorLedger
from p2p_co2.trainer.network_thread import NetworkThread
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.plan import Plan
from p2p_co2.trainer.synchroniser import Progressed

LISTEN_S, LISTEN_TO_LISTED_S = 3.0, 12.0
"""A peer that hears nobody for this long after its start is the first one; the longer time if the DHT lists
others, who may only be slow to answer."""
FP32_BYTES = 4
GATHER_BOUND_S = 120.0
"""Waiting for ``min_peers``."""
CATCH_UP_BOUND_S = 600.0
"""For the first fragment that a peer without the agreed state is to be given, and for each further one."""
LEFT_BEHIND_BOUND_S = 30.0
"""When all who have the agreed state said goodbye before this peer had it: how long one of them is waited
for. Who went without a word may only be out of reach, and is waited for as long as for the state."""

EventSink = Callable[[ev.Event], None]


def connect(ticket: str, config: PeerConfig, on_event: EventSink) -> Connection:
    """Join the network of the run that ``ticket`` invites to, and verify its settings. Blocks; Ctrl-C is
    safe.

    ``on_event`` is called from several threads. Raises ``TicketError`` (damaged, foreign), ``TransportError``
    (no seed answers), ``EnvironmentFault`` (this machine; the board's port), ``ConfigError`` (settings that
    this version does not know).
    """
    return_large_blocks()  # before there are threads: each stays with the arena that it had
    config = config.model_copy(update={"folder": config.folder.absolute()})  # wherever the program goes later
    thread = NetworkThread(Ticket.parse(ticket), config, on_event)
    try:
        thread.open()
    except BaseException:
        thread.close()
        raise
    return Connection(thread, config, thread.on_event)


def join(
    ticket: str,
    model: nn.Module,
    optimizer: Optimizer,
    config: PeerConfig | None = None,
    on_event: EventSink = lambda event: None,
) -> Peer:
    """``connect`` and ``start`` in one: for one's own training loop. Use the peer as a context manager.

    Prints where this peer's board is served, on stderr; ``PeerConfig(board=False)`` serves none.
    """
    connection = connect(ticket, config or PeerConfig(), on_event)
    if connection.board:
        print(f"board: {connection.board}", file=sys.stderr, flush=True)
    try:
        return connection.start(model, optimizer)
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

    def close(self) -> None:
        """Leave the network. May be called twice."""
        self._thread.close()

    @torch.inference_mode(False)
    def start(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: Callable[[float], float] | None = None,
        resume: bool = False,
    ) -> Peer:
        """Become a training peer: cut the model, resume from this peer's checkpoint if asked, wait for
        ``min_peers``, catch up with the swarm.

        ``model``'s parameters must be those that every peer starts from (same recipe, same seed); they are
        overwritten by the swarm's if it is further on. ``learning_rate`` maps the swarm's position (rounds)
        to a factor on each group's learning rate. Blocks, bounded. Raises ``ConfigError`` (model too small
        for the fragments, no checkpoint to resume from, or one of another run), ``TransportError`` (not
        enough peers, or none that can help).
        """
        run = self.run
        plan = plan_fragments(model, run.fragments)
        saved = self._load(plan) if resume else None
        codec = get_codec(run.codec.name)
        live = LiveParameters(model, plan)
        me = self._thread.network.identity.peer_id
        states = (
            [outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments]
            if saved is None
            else list(saved.states)
        )
        ledger = TensorLedger(codec, [FragmentLedger(run, codec, me, state) for state in states])
        del states  # they are the ledger's, which lets go of them when it takes over others
        progressed = Progressed()
        base_lr = tuple(float(group["lr"]) for group in optimizer.param_groups)
        if saved is not None:
            restore(saved, model, optimizer, ledger)
            progressed = Progressed(saved.position, saved.inner_steps, saved.tokens)
        sum_bytes = FP32_BYTES * codec.block_values if run.cells > 1 else 0
        shape = PayloadShape(
            codec.block_bytes,
            tuple(codec.blocks(f.numel) for f in plan.fragments),
            sum_bytes,
            run.clock.round_s if run.clock.mode == "time" else 0.0,
            chunk_bytes=ledger.chunk_bytes,
        )
        self._tell_of_damaged(saved)
        self._on_event(
            ev.PeerStarted(
                at=time.time(),
                peer=me,
                name=self.config.name,
                pid=os.getpid(),
                software=self._thread.network.software,
                device=str(next(model.parameters()).device),
                parameters=plan.numel,
                fragments=len(plan.fragments),
                run=run.digest().hex(),
                upload_cap_bytes_per_s=self.config.limits.upload_bytes_per_s,
                resumed_from="" if saved is None else str(self.config.folder / "checkpoint"),
                inner_steps=progressed.inner_steps,
                position=progressed.position,
            )
        )
        sizes = [state_size_bytes(fragment.numel) for fragment in plan.fragments]
        node = self._thread.start_node(shape, sizes, ledger)
        try:
            self._gather()
            self._catch_up(node)
            self._thread.caught_up()
        except BaseException:
            ledger.close()
            raise
        others = self._thread.swarm_position()
        if others is not None:
            at_swarm = others[0] + (time.monotonic() - others[1]) * self._thread.rounds_per_s()
            progressed = Progressed(
                max(at_swarm, progressed.position), progressed.inner_steps, progressed.tokens
            )
        if warning := outer.stability_warning(run.outer, delayed=run.outer.rule in {"co2", "eager"}):
            self._thread.report(ev.Warned, {"text": warning})
        plan_of_peer = Plan(run, self.config, plan, model, optimizer, learning_rate, base_lr)
        return Peer(self._thread, ledger, plan_of_peer, progressed)

    def _load(self, plan: FragmentPlan) -> Checkpoint:
        saved = checkpoints.load(self.config.folder / "checkpoint")
        where = str(self.config.folder / "checkpoint")
        if RunConfig.from_canonical_bytes(saved.run_config_json.encode()).digest() != self.run.digest():
            raise ConfigError(where, "", "is of another run; join without --resume, or with another --folder")
        if saved.plan_digest != plan.digest:
            raise ConfigError(
                where, "", "is of another model; join without --resume, or with another --folder"
            )
        return saved

    def _tell_of_damaged(self, saved: Checkpoint | None) -> None:
        for damage in saved.passed_over if saved is not None else ():
            text = f"a checkpoint is damaged, went on from the checkpoint before it: {damage}"
            self._thread.report(ev.Warned, {"text": text})

    def _gather(self) -> None:
        """Wait until enough peers are live."""
        wanted = self.config.min_peers - 1
        ends_at = time.monotonic() + GATHER_BOUND_S
        while self._thread.live_peers() < wanted:
            self._thread.check()
            if time.monotonic() > ends_at:
                raise TransportError(
                    f"only {self._thread.live_peers() + 1} of {self.config.min_peers} peers after "
                    f"{GATHER_BOUND_S:.0f} s; start the others, or ask for fewer with --min-peers"
                )
            time.sleep(0.02)

    def _catch_up(self, node: Node) -> None:
        """Wait until this peer is where the swarm is, or is sure that it is alone."""
        started_at = followed_at = given_at = time.monotonic()
        began_with, given = tuple(node.agreed), 0
        while True:
            self._thread.check()
            now = time.monotonic()
            if (moved := sum(map(operator.ne, node.agreed, began_with))) > given:
                given, given_at = moved, now
            # Of others that just came, or went, it is concluded only in a moment what that means.
            waited_s, heard = now - started_at, node.progress.heard
            if not node.progress.left_behind or node.progress.may_be_back:
                followed_at = now
            if not node.progress.left_behind and (heard or self._thread.live_peers() == 0):
                unheard = self._thread.unheard_peers()
                listened = waited_s > (LISTEN_TO_LISTED_S if unheard else LISTEN_S)
                # Those who join as we do know no more than we: who is listed may be about to answer.
                found = waited_s > 0.2 and (node.progress.met or not unheard or listened)
                if found and self._thread.abreast() if heard else listened:
                    return
            if now - followed_at > LEFT_BEHIND_BOUND_S:
                raise TransportError(
                    "the others left before this peer had their state; join again when one is back"
                )
            if now - given_at > CATCH_UP_BOUND_S:
                raise TransportError("no peer could give this one the agreed state; try again later")
            time.sleep(0.02)


def restore(saved: Checkpoint, model: nn.Module, optimizer: Optimizer, ledger: TensorLedger) -> None:
    """Put a checkpoint's live parameters, buffers, inner optimizer and residuals back."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in saved.params:
                parameter.copy_(saved.params[name])
        for name, buffer in model.named_buffers():
            if name in saved.buffers:
                buffer.copy_(saved.buffers[name])
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(saved.optimizer))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the saved one holds the schedule's factor of that moment
    ledger.set_residuals(saved.residuals)
