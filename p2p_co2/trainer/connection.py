"""From a ticket to a training peer: ``connect`` joins the network, ``Connection.start`` adds the model.
Between the two the caller knows the run's settings, and can refuse before anything large is downloaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.optim import Optimizer

from p2p_co2.config import OWN_LOOP, PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, TicketError
from p2p_co2.node.environment import RunGroup
from p2p_co2.node.node import Node
from p2p_co2.protocol.pipeline import Place
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.recipes.sizes import stage_sizes
from p2p_co2.rule_specs import AGGREGATION_RULES
from p2p_co2.system.extras import missing
from p2p_co2.system.memory import use_one_arena
from p2p_co2.system.process import say
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import get_rule
from p2p_co2.tensors.checkpoint import folder as checkpoints
from p2p_co2.tensors.checkpoint.agreed import state_size_bytes
from p2p_co2.tensors.checkpoint.folder import Checkpoint
from p2p_co2.tensors.checkpoint.layout import keep_layout
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.device import training_device
from p2p_co2.tensors.fragments import FragmentPlan, plan_fragments
from p2p_co2.ticket import Ticket
from p2p_co2.trainer import resuming
from p2p_co2.trainer.arrival import Arrival, Beginning, caught_up
from p2p_co2.trainer.exchanged_model import TrainingSetup, check_model
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.model_summary import ModelBuffers, summarise
from p2p_co2.trainer.peer import Peer
from p2p_co2.trainer.ranks.group import form_group, spread_buffers
from p2p_co2.trainer.ranks.parameters import Group
from p2p_co2.trainer.ranks.peer import LeadingPeer, as_one_peer
from p2p_co2.trainer.rates import LearningRates
from p2p_co2.trainer.session import Participation, Session
from p2p_co2.trainer.stages.peer import StagePeer, TrainedGroup, data_seed, fitting, sizes_of
from p2p_co2.trainer.stages.work import Crossings, StageWork
from p2p_co2.trainer.synchroniser import Progressed
from p2p_co2.wire.names import words_of

if TYPE_CHECKING:
    from p2p_co2.recipes import Recipe

EventSink = Callable[[ev.Event], None]
TIED = "tied"
"""In a peer's folder: that of the tied table's group."""


def connect(ticket: str, config: PeerConfig, on_event: EventSink) -> Connection:
    """Join the network of the run that ``ticket`` invites to, and verify its settings. Blocks; Ctrl-C is
    safe.

    ``on_event`` is called from several threads. Raises ``ConfigError`` (another type of argument, settings
    that this version does not know) and ``TicketError`` (damaged, foreign). Also ``TransportError`` (no seed
    answers) and ``EnvironmentFault`` (this machine; the board's port).
    """
    _check_call(ticket, config, on_event)
    use_one_arena()  # before there are threads: each stays with the arena that it had
    config = config.model_copy(update={"folder": config.folder.absolute()})  # wherever the program goes later
    given = Ticket.parse(ticket)
    if (certificate := given.certificate()) is not None and certificate.watches:
        cure = "look on with p2p-co2 watch or board, or ask the organiser for a ticket to join"
        raise TicketError(f"this ticket is for looking on alone; {cure}")
    session = Session(given, config, on_event)
    try:
        session.open()
        network = session.network
        if doubt := network.clock_doubt:
            session.warn(doubt)
        with suppress(OSError):  # by which commands find it
            called = config.name or words_of(network.identity.peer_id)
            (config.folder / "name").write_text(f"{called}\n{network.run.name}\n", encoding="utf-8")
        return Connection(Participation(session, RunGroup.whole(network.run)), config)
    except BaseException:
        session.close()
        raise


def print_warnings(event: ev.Event) -> None:
    """What a person should know, on stderr."""
    if isinstance(event, ev.Warned):
        say(f"warning: {event.text}")


def join(
    ticket: str, model: nn.Module, optimizer: Optimizer, config: PeerConfig | None = None,
    on_event: EventSink | None = None, start_over: bool = False,
) -> Peer:  # fmt: skip
    """``connect`` and ``start`` in one: for one's own training loop. Use the peer as a context manager.

    Prints where this peer's board is served, on stderr; ``PeerConfig(board=False)`` serves none. Without
    ``on_event`` it prints warnings there, too. Goes on from the folder's checkpoint if there is one;
    ``start_over`` begins anew. In a group of ``torchrun``'s all ranks call it and are one peer: those other
    than rank 0 get a ``FollowingPeer``, with the same methods. Raises as both; for a model or optimizer that
    a swarm cannot train ``ConfigError``, before the network is used.
    """
    group = form_group(model, optimizer)

    def lead() -> Peer:
        given = print_warnings if on_event is None else on_event
        connection = connect(ticket, PeerConfig() if config is None else config, given)
        if connection.config.board:
            say(f"board: {connection.board or missing('board')}")
        try:
            return connection.start(model, optimizer, start_over=start_over, group=group)
        except BaseException:
            connection.close()
            raise

    return cast(Peer, as_one_peer(group, model, optimizer, lead))


@dataclass(frozen=True)
class Connection:
    """A verified run, not yet trained in. End it with ``close``, or ``start`` and then the peer's
    ``leave``."""

    _part: Participation
    config: PeerConfig

    @property
    def run(self) -> RunConfig:
        """What all peers of the run agree on."""
        return self._part.network.run

    @property
    def board(self) -> str:
        """The address of this peer's own page on the loopback; "" if ``config.board`` is False or
        its extra is missing. Nothing runs for it until somebody looks, and then a process of its own."""
        return self._part.board

    @property
    def ticket(self) -> str:
        """An invitation: the ticket that this peer came by, with some peers as further seeds, so that it
        works when the first seeds are gone. It grows as this peer meets others. In a run with members it
        admits nobody."""
        return str(self._part.network.invitation)

    def close(self) -> None:
        """Leave the network. May be called twice."""
        self._part.close()

    @torch.inference_mode(False)
    def start(
        self, model: nn.Module, optimizer: Optimizer,
        learning_rate: Callable[[float], float] | None = None,
        resume: bool | None = None, start_over: bool = False, group: Group | None = None,
        fits_swarm: bool = False,
    ) -> Peer:  # fmt: skip
        """Become a training peer: cut the model, go on from the folder's checkpoint, wait for ``min_peers``,
        catch up with the swarm.

        ``model``'s parameters must be those that every peer starts from (same recipe, same seed); they are
        overwritten by the swarm's if it is further on. ``learning_rate`` maps the swarm's position (rounds)
        to a factor on each group's own learning rate (``initial_lr``, if a torch scheduler was made). Without
        it a resumed peer's rates are the saved ones, and a torch scheduler needs its own state loaded.
        ``fits_swarm``: the rates grow with the swarm, as ``Recipe.fits_swarm`` says.
        ``resume``: None goes on from the folder's checkpoint if it has one; True: it must, False: anew.
        ``start_over``: begin anew, whatever others have trained and left; the folder's checkpoint is set
        aside. ``group``: the ranks that hold the model together, of which this is rank 0 (``as_one_peer``).

        Blocks, bounded. Raises ``RunOver`` if the run has had its last round. ``ConfigError``: a model or
        optimizer that a swarm cannot train, or not the one that the run's peers train. Also for no checkpoint
        to resume from, or a foreign one. ``TransportError``: not enough peers, none that can help, or all
        that trained this run have left.
        """
        if start_over and resume:
            problem = "begins anew, and resume=True asks for a checkpoint; leave one out"
            raise ConfigError("start", "start_over", problem)
        check_model(model, optimizer, in_group=group is not None)
        rates = LearningRates(optimizer, learning_rate, self._part.warn, fits_swarm)
        if self.run.recipe != OWN_LOOP:
            rates.is_followed = True  # whose author alone could change them
        stages = self.run.pipeline.stages
        stage = self._part.group.number
        if stages > 1 and stage is None:
            raise ConfigError("start", "pipeline.stages", f"is {stages} in this run: use start_stage(recipe)")
        if stages == 1 and self.config.stage > 0:
            problem = f"this run has no stages, each peer holds the whole model (got {self.config.stage})"
            raise ConfigError.of_option("--stage", f"{problem}; leave it out")
        fragments = plan_fragments(model, self.run.fragments)
        terms = self._part.network.door.members.terms
        plan = TrainingSetup(self.run, self.config, fragments, model, optimizer, stage, group, terms)
        if group is not None:
            group.ranks.tell("begin", self.run.canonical_bytes().decode())
        saved = self._load(plan, False if start_over else resume)
        is_resumed = saved is not None
        position = None if saved is None else saved.position
        beginning = Beginning(self._part, terms.rounds, position, start_over)
        beginning.refuse_if_over()
        ledger, progressed = self._restored(plan, saved, is_scheduled=learning_rate is not None)
        saved = None  # its memory is the worker's to let go
        if progressed.inner_steps:
            rates.resumed()
        self._tell_of_start(plan, progressed, is_resumed)
        try:
            node = self._start_node(plan, ledger)
            self._arrive(node, beginning)
            self._share_buffers(model, not is_resumed and any(agreed.version for agreed in node.agreed))
            if group is not None:
                group.ranks.tell("buffers")
                spread_buffers(group.ranks, model)
        except BaseException:
            ledger.close()
            raise
        others = self._part.view.swarm_position()
        progressed = caught_up(progressed, others, self.run.clock, time.monotonic())
        if warning := outer.stability_warning(self.run.outer):
            self._part.warn(warning)
        if not is_resumed:
            checkpoints.set_aside(self._checkpoints)
        if self.run.recipe == OWN_LOOP:
            self._keep_layout(model, fragments)
        kind = Peer if group is None else LeadingPeer
        return kind(self._part, ledger, plan, rates, progressed)

    def start_stage(self, recipe: Recipe, resume: bool | None = None, start_over: bool = False) -> StagePeer:
        """As ``start``, for a run with stages: hold one of them, and meet the stages beside it. Which one:
        what ``config.stage`` names, or that of the folder's checkpoint, or the one that is needed most.

        Raises as ``start``, and ``ConfigError`` for a recipe without stages, a stage that the run has not,
        and where none fits this machine.
        """
        run = self.run
        pipeline = self.run.pipeline
        if pipeline.stages == 1:
            raise ConfigError(
                "start_stage", "pipeline.stages", "is 1 in this run: use start(model, optimizer)"
            )
        stages = recipe.in_stages(pipeline.stages)
        session = self._part.session
        me = session.network.identity.peer_id
        goes_on = resume is not False and not start_over
        wanted = self._wanted_stage(goes_on)
        device = training_device(self.config.device).name
        cache_bytes = self.config.cache_bytes
        stage = session.choose_stage(
            wanted, lambda: fitting(stage_sizes(recipe, run), run, device, cache_bytes)
        )
        module = stages.build(run.seed, stage).to(device)
        like = stages.microbatch(next(recipe.batches(0, pipeline.sequences)))
        codecs = pipeline.forward, pipeline.backward, pipeline.backward_critical
        crossings = Crossings.of(stages, *like, *codecs)
        place = Place(me, int.from_bytes(os.urandom(8)), stage, pipeline.stages)
        sizes = sizes_of(run, crossings, stage, cache_bytes)
        groups = self._start_groups(stage, recipe, stages.groups(stage, module), resume, start_over)
        try:
            peer = groups[0].peer
            draws = recipe.batches(data_seed(run, me, peer.inner_steps), pipeline.sequences)
            own = draws if stage == 0 else None
            work = StageWork(stages, module, stage, crossings, own, cache_bytes // 2)
            return StagePeer(groups, session.start_pipeline(place, sizes), place, work, recipe.max_grad_norm)
        except BaseException:
            for group in reversed(groups):
                group.peer.leave("could not meet the stages beside it")
            raise

    def _start_groups(
        self, stage: int | None, recipe: Recipe, models: Sequence[nn.Module], resume: bool | None,
        start_over: bool,
    ) -> list[TrainedGroup]:  # fmt: skip
        """Be a peer of the stage's own group, or the whole run's, then of the tied table's, if there is a
        second model."""
        run = self.run
        own = RunGroup.whole(run) if stage is None else RunGroup.of_stage(run, stage)
        tied = self.beside(RunGroup.of_table(run), TIED)
        places = replace(self, _part=Participation(self._part.session, own)), tied
        trained = list[TrainedGroup]()
        for model, connection in zip(models, places, strict=False):
            optimizer = recipe.optimizer(model.parameters())
            try:
                peer = connection.start(
                    model, optimizer, recipe.learning_rate, resume, start_over, fits_swarm=recipe.fits_swarm
                )
            except BaseException:
                for one in trained:
                    one.peer.leave("could not join the group of the tied table")
                raise
            trained.append(TrainedGroup(peer, optimizer))
        return trained

    def beside(self, group: RunGroup, folder: str) -> Connection:
        """This peer in a further group of the run; ``start`` it after this one, with a model of that group's
        own, and leave it before. ``group``: with a name, in which its warnings are told; ``folder``: in this
        one's, for its checkpoints."""
        config = self.config.model_copy(update={"folder": self.config.folder / folder})
        return Connection(Participation(self._part.session, group), config)

    def visit(self, recipe: Recipe) -> list[Peer]:
        """As ``start``, to read what others agree on and leave. In a run with stages it is a peer of those
        that hold ``config.stage``, and need not meet the stages beside it. With the first stage it is one of
        the tied table's group too, if there is one. Leave from the last to the first. Raises as ``start``."""
        models = [recipe.model]
        stage = None
        count = self.run.pipeline.stages
        session = self._part.session
        session.network.holds.visits = True
        if count > 1:
            stages = recipe.in_stages(count)
            stage = session.choose_stage(self.config.stage, lambda: range(count))
            models = stages.groups(stage, stages.build(self.run.seed, stage))
            if stage:
                models = models[:1]
        return [group.peer for group in self._start_groups(stage, recipe, models, None, False)]

    def _wanted_stage(self, goes_on: bool) -> int:
        """-1 for any. A peer that ``goes_on`` from its folder's checkpoint goes on with that one's stage."""
        folder = self._checkpoints
        wanted = self.config.stage
        if wanted < 0 and goes_on and checkpoints.has_checkpoint(folder):
            saved = checkpoints.load_agreed(folder)
            if saved.stage is not None and saved.run.digest() == self.run.digest():
                return saved.stage
        return wanted

    def _load(self, plan: TrainingSetup, resume: bool | None) -> Checkpoint | None:
        """The folder's checkpoint, if there is one or must be one."""
        folder = self._checkpoints
        if resume is False or (resume is None and not checkpoints.has_checkpoint(folder)):
            return None
        saved = checkpoints.load(folder)
        resuming.check(saved, self.run, plan.model, plan.fragments, str(folder), plan.stage)
        return saved

    @property
    def _checkpoints(self) -> Path:
        return self.config.folder / "checkpoint"

    def _restored(
        self, plan: TrainingSetup, saved: Checkpoint | None, is_scheduled: bool
    ) -> tuple[TensorWorker, Progressed]:
        """The tensor worker, and where the peer goes on: from ``saved``, which the model and its optimizer
        take over, or from the model."""
        live = plan.live()
        me = self._part.network.identity.peer_id
        codec = get_codec(self.run.codec.name)
        states = saved.states if saved is not None else [
            outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments.fragments
        ]  # fmt: skip
        uses = 2 if plan.stage == self.run.pipeline.stages else 1  # the tied table's group
        fragments = [
            FragmentState(self.run, codec, me, state, index, uses, plan.terms)
            for index, state in enumerate(states)
        ]
        ledger = TensorWorker(codec, fragments, get_rule(self.run.aggregation.rule, uses, me))
        if saved is None:
            return ledger, Progressed()
        for trouble in resuming.restore(saved, live, plan.model, plan.optimizer, is_scheduled):
            self._part.warn(trouble)
        ledger.restore(saved.residuals, saved.past)
        for damage in saved.passed_over:
            self._part.warn(f"a checkpoint is damaged, went on from the checkpoint before it: {damage}")
        return ledger, Progressed(saved.position, saved.inner_steps, saved.tokens, saved.data)

    def _start_node(self, plan: TrainingSetup, ledger: TensorWorker) -> Node:
        run = self.run
        codec = get_codec(self.run.codec.name)
        fragments = plan.fragments.fragments
        is_timed = run.clock.mode == "time"
        blocks = tuple(codec.blocks(one.numel) for one in fragments)
        shape = PayloadShape(
            codec.block_bytes, blocks, run.clock.round_s if is_timed else 0.0,
            chunk_bytes=ledger.chunk_bytes, weight_cap=run.weight_cap, counts_steps=not is_timed,
            cuts=AGGREGATION_RULES[run.aggregation.rule].cuts,
        )  # fmt: skip
        sizes = [state_size_bytes(fragment.numel) for fragment in fragments]
        summary = summarise(plan.model, plan.fragments, {} if plan.group is None else plan.group.frozen)
        node = self._part.start_node(shape, sizes, ledger, summary)
        if unread := [row.name for row in summary.rows if not (row.is_trained or row.values)]:
            names = ", ".join(unread[:4])
            self._part.warn(f"torch does not show frozen values, so nobody compares them: {names}")
        return node

    def _share_buffers(self, model: nn.Module, is_newcomer: bool) -> None:
        """Give newcomers this peer's buffers; begin with a donor's, if this peer ``is_newcomer``."""
        buffers = ModelBuffers(model)
        if buffers.running:
            self._part.warn(
                f"buffers such as {buffers.running[0]} are each peer's own: rounds do not average them, and "
                "a newcomer begins with a donor's"
            )
        taken = self._part.ask(self._part.view.take_buffers(buffers, is_newcomer))
        if is_newcomer and buffers.size_bytes:
            troubles = buffers.load_(taken) if taken else ["nobody gave them"]
            if troubles:
                self._part.warn(f"this peer begins with buffers of its own: {'; '.join(troubles)}")

    def _keep_layout(self, model: nn.Module, fragments: FragmentPlan) -> None:
        """So that ``p2p-co2 model`` needs no program of the user's. Tells what forbids it, and goes on."""
        try:
            keep_layout(model, fragments, self._checkpoints)
        except resuming.FAULTS as error:
            why = f"{type(error).__name__}: {error}"
            self._part.warn(f"p2p-co2 model will need --recipe: the model does not say its layout ({why})")

    def _tell_of_start(self, plan: TrainingSetup, progressed: Progressed, is_resumed: bool) -> None:
        fields = dict(
            name=self.config.name or words_of(self._part.network.identity.peer_id),
            pid=os.getpid(), software=self._part.network.software,
            device=str(next(plan.model.parameters()).device), parameters=plan.fragments.numel,
            fragments=len(plan.fragments.fragments), run=self.run.digest().hex(),
            upload_cap_bytes_per_s=self.config.limits.upload_bytes_per_s,
            resumed_from=str(self._checkpoints) if is_resumed else "",
            inner_steps=progressed.inner_steps, position=progressed.position,
            stage=self._part.network.holds.stage or 0, stages=self.run.pipeline.stages,
        )  # fmt: skip
        self._part.report(ev.PeerStarted, fields)

    def _arrive(self, node: Node, beginning: Beginning) -> None:
        """Wait until enough peers are live, and this one is where the swarm is, or is sure that it is
        alone."""

        def gathered(arrival: Arrival, now: float) -> bool:
            return arrival.is_gathered(self.config.min_peers, now)

        def there(arrival: Arrival, now: float) -> bool:
            has_met = node.progress.joining.has_met
            return arrival.is_there(now) and (has_met or beginning.is_allowed(node, arrival.has_waited(now)))

        for is_done in (gathered, there):
            arrival = Arrival(node, time.monotonic(), self.run.group_size)
            while not is_done(arrival, time.monotonic()):
                self._part.check()
                time.sleep(0.02)


def _check_call(ticket: str, config: PeerConfig, on_event: EventSink) -> None:
    checked = {
        "ticket": (isinstance(ticket, str), ticket, "give the word that the seed prints, as a str"),
        "config": (isinstance(config, PeerConfig), config, "give PeerConfig(folder=...)"),
        "on_event": (callable(on_event), on_event, "give a function that takes an event"),
    }
    for name, (is_right, given, right) in checked.items():
        if not is_right:
            raise ConfigError("join", name, f"is of type {type(given).__name__}; {right}")
