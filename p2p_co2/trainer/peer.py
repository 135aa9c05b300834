"""A training peer: the object in the user's own loop. ``step`` after each inner step, ``leave`` at the
end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, LocalProtocolError
from p2p_co2.recipes.measured import Measured, measured
from p2p_co2.system.governor import BY_HAND, Governor, WishFile
from p2p_co2.system.machine import peak_memory_bytes
from p2p_co2.system.owner import Owner
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.checkpoint.agreed import swarm_digest
from p2p_co2.tensors.device import random_state_kept
from p2p_co2.tensors.names import trained_parameters, unwrapped
from p2p_co2.tensors.pretrained import full_state
from p2p_co2.tensors.sharding import shard
from p2p_co2.trainer.exchanged_model import ExchangedModel, TrainingSetup
from p2p_co2.trainer.figures import loss_of, tokens_of
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.rates import LearningRates
from p2p_co2.trainer.saver import Saver
from p2p_co2.trainer.session import Participation
from p2p_co2.trainer.synchroniser import REPORT_EVERY_S, Progressed, Synchroniser


class Stepping:
    """Held by whoever trains or measures: two threads at once would mix their parameters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that joined."""
        return os.getpid() != self._process

    def must_be_here(self) -> None:
        """Raise ``ConfigError`` in a child of the process that joined."""
        if self.is_forked:
            problem = "belongs to the process that joined, and this one was forked from it: step there"
            raise ConfigError("peer", "", problem)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Raises ``LocalProtocolError`` while another thread is in it."""
        if not self._lock.acquire(blocking=False):
            raise LocalProtocolError(
                f"{what}: step, agreed or measure_agreed of this peer is under way; call one after the other"
            )
        try:
            yield
        finally:
            self._lock.release()


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards each module's mode, torch's random numbers and whether gradients are made are as before:
    what a user's evaluation changes there is no wish about training."""
    modes = [(module, module.training) for module in model.modules()]
    is_grad = torch.is_grad_enabled()
    with random_state_kept({one.device for one in model.parameters()}):
        try:
            yield
        finally:
            torch.set_grad_enabled(is_grad)
            for module, is_training in modes:
                module.training = is_training


class Asked(StopSignals):
    """From ``begin`` to ``at_the_end`` the first of these signals calls ``stop``, unless the program handles
    it in a way of its own. So SIGTERM saves and leaves, as ``p2p-co2 join`` does. In a group Ctrl-C does so,
    too, and torchrun's agent when the group is to end: all ranks stop with the same step."""

    def begin(self) -> None:
        is_free = signal.getsignal(self._numbers[0]) in (signal.SIG_DFL, signal.default_int_handler)
        if is_free and not self._before and threading.current_thread() is threading.main_thread():
            self.__enter__()

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """After this they are the program's again."""
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                self.__exit__()


class Peer:
    """Made by ``Connection.start`` or ``join``. A context manager: leaving the block leaves the swarm.

    After ``leave`` it trains and saves no more, and tells what it did: ``agreed_parameters`` and
    ``measure_agreed`` give the final state. ``rates``: the optimizer's; ``rates.suggested(base)`` is one that
    fits the swarm.
    """

    def __init__(
        self, part: Participation, ledger: TensorWorker, plan: TrainingSetup, rates: LearningRates,
        start: Progressed,
    ) -> None:  # fmt: skip
        self._part = part
        self._ledger = ledger
        self._plan = plan
        self._model = ExchangedModel(plan, part.warn)
        self._sync = Synchroniser(plan.run, self._model, ledger, part.view, start, terms=plan.terms)
        self._saver = Saver(plan, ledger, self._sync, self._model.live, part.report)
        self.rates = rates
        self._saver.data_place = lambda: start.data
        self._left = False
        self._stepping = Stepping()
        self._signals = Asked(self.stop, signal.SIGTERM)
        limits = plan.config.limits
        self._owner = Owner(limits.rest_while, limits.rest_for, limits.idle_for_s)
        self._governor = Governor(limits.hours, WishFile(plan.config.folder).news, self._owner.using)
        self._sync.take_outcomes()  # the first step starts from what catching up brought
        self._sync.report()
        self.rates.set(self._sync.position, self._sync.account.peers)
        if self._governor.resting(_minute_of_the_day()) == BY_HAND:
            part.warn("this peer was paused before and rests: p2p-co2 resume lets it go on")
        for words in self._owner.missing:
            part.warn(words)
        self._owner.begin()

    @property
    def run(self) -> RunConfig:
        return self._plan.run

    @property
    def board(self) -> str:
        """The address of this peer's own page on the loopback; "" if ``PeerConfig.board`` is False, and after
        ``leave``."""
        return "" if self._left else self._part.board

    @property
    def ticket(self) -> str:
        """An invitation that names some of the peers as further seeds (``Connection.ticket``)."""
        return str(self._part.network.invitation)

    @property
    def position(self) -> float:
        """Where the swarm is, in rounds."""
        return self._sync.position

    @property
    def inner_steps(self) -> int:
        return self._sync.inner_steps

    @property
    def over(self) -> bool:
        """True when the run has reached its last round."""
        return self._sync.account.is_over(self._sync.position)

    def keep_place(self, place: Callable[[], str]) -> str:
        """Keep in each checkpoint what ``place`` says then: where the program is in its data. Returns what
        was kept in the one that this peer goes on from; "" if it begins."""
        before = self._saver.data_place()
        self._saver.data_place = place
        return before

    @torch.inference_mode(False)  # what is made here is changed in other threads, which are not in it
    def step(self, tokens: int | Tensor, loss: float | Tensor) -> bool:
        """Tell the swarm of one inner optimizer step over ``tokens`` tokens with training ``loss``.

        ``tokens``: a whole number of any type, ``mask.sum()`` too. ``loss``: one number; NaN and Inf count as
        unknown. Copies a fragment out when it is due, merges what the others have agreed on into the model's
        parameters, and otherwise returns at once. Returns False when the run is over or ``stop`` was called:
        leave the loop then.

        Raises ``ConfigError`` for other arguments. So it does, about once a second, if the model is not the
        one that ``join`` was given any more (parameters replaced, added, frozen). Raises
        ``LocalProtocolError`` after ``leave`` and while another thread is in it. Else only for faults of this
        machine (``EnvironmentFault``) and bugs, never for what another peer did.
        """
        self._stepping.must_be_here()
        count = tokens_of(tokens)
        value = loss_of(loss)
        with self._stepping.alone("step"):
            if self._left:
                raise LocalProtocolError("step: this peer has left the swarm; join again to train on")
            self._sync.after_step(count, value)
            self.rates.set(self._sync.position, self._sync.account.peers)
            self._part.view.give_buffers()
            self._rest()
            self._saver.keep_up()
            self._sync.stood_still()  # for a checkpoint
        return not (self._sync.stopped or self.over)

    def idle(self, waited_s: float, between_steps: bool) -> bool:
        """Where ``step`` is far: for ``waited_s`` seconds there was nothing to compute. ``between_steps``: no
        gradient is under way, so that what is agreed may be merged. False when the run is over or ``stop``
        was called. A stage that nobody else holds begins no further back than the stages beside it are."""
        sync = self._sync
        view = self._part.view
        with self._stepping.alone("idle"):
            self._part.check()
            sync.pause(waited_s)
            self._saver.keep_up()
            if between_steps:
                sync.take_outcomes()
                sync.stood_still()
                self._rest()
            now = time.monotonic()
            if now - sync.figures.made_at >= 10 * REPORT_EVERY_S:
                sync.report()
            position = sync.clock.position(now, sync.inner_steps)
            others = view.swarm_position() or (0.0, now)
            if others[0] > position and not (sync.figures.has_begun or view.live_trainers()):
                position = others[0]
                sync.clock.start(position, now, sync.inner_steps)
            if (over := sync.account.is_over(position)) and between_steps:
                sync.position = position  # though no step brings it there; one that is under way counts
        return not (sync.stopped or over)

    def stop(self) -> None:
        """Ask the loop to end: the next ``step`` returns False. Safe in a signal handler."""
        self._sync.stopped = True

    def pause(self) -> None:
        """Rest from the next ``step`` on, which then does not return until ``go_on``, ``stop`` or the run's
        end: no training, no fetching, only heartbeats. The swarm does not wait for this peer, and it keeps
        its place.
        Others judge without it where the swarm is. Newcomers ask it only for what nobody else has. Safe in a
        signal handler and from other threads, as is the next one."""
        self._governor.pause()

    def go_on(self) -> None:
        """End a pause, or the rest outside the configured hours until they next turn, or the rest while the
        owner uses the machine until that is over."""
        self._governor.go_on()

    def _rest(self) -> None:
        is_ending = self._sync.stopped or self._sync.account.is_near_end(self._sync.position)
        if (reason := self._governor.resting(_minute_of_the_day())) and not is_ending:
            try:
                if reason != self._owner.using():  # which may come often
                    self._saver.save()  # a machine that rests may be switched off
            except EnvironmentFault as error:
                self._part.warn(f"no checkpoint was written: {error}")
            self._sync.rest(lambda: self._governor.resting(_minute_of_the_day()))
            self.rates.set(self._sync.position, self._sync.account.peers)

    def agreed_parameters(self) -> dict[str, Tensor]:
        """A copy of the agreed parameters by name (fp32, host memory): evaluate and publish these, not the
        live ones. After ``leave`` the final ones.

        Names are the model's own, without those of wrappers such as ``torch.compile``'s. A tied parameter is
        there under each of its names, one tensor for all. What is frozen, and buffers, are not in it, so load
        it with ``strict=False``. Load it into the module without wrappers: into a wrapped one nothing is
        loaded.

            plain = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
            loaded = plain.load_state_dict(agreed, strict=False)
            assert not loaded.unexpected_keys
        """
        self._stepping.must_be_here()
        return self._model.named(self._ledger.states())

    def state_dict(self) -> dict[str, Tensor]:
        """As ``agreed_parameters``, in the parameters' own dtypes, with buffers and with what is frozen: all
        that a state dict of the model holds."""
        return full_state(unwrapped(self._plan.model), self.agreed_parameters())

    @contextmanager
    def agreed(self, back: bool = True) -> Iterator[nn.Module]:
        """Have the agreed parameters in the model, and the live ones ``back`` afterwards.

            with peer.agreed() as model:
                evaluate(model)

        It takes one more copy of the parameters meanwhile, in their own dtype and place. Its time is counted
        as a pause, neither training nor communication. ``step`` may not be called inside."""
        self._stepping.must_be_here()
        started_at = time.monotonic()
        with self._stepping.alone("agreed"):
            self._model.look(self._sync.position)
            try:
                with self._model.live.set_aside() if back else nullcontext():
                    for fragment, state in enumerate(self._ledger.states()):
                        self._model.live.load_(fragment, state.params)
                    with as_it_was(self._plan.model):
                        yield self._plan.model
            finally:
                self._sync.pause(time.monotonic() - started_at)

    @property
    def peer_id(self) -> str:
        """Who this peer is to the others."""
        return self._part.network.identity.peer_id

    def has_turn(self, number: int, is_ready: bool = True) -> bool:
        """Whether ``number`` (of a round, say) falls on this peer, of those that train now: for work that one
        of them is enough for. All of them agree on it as long as nobody comes or goes. False if it is not
        ``is_ready``: of several ranks that are one peer rank 0's word counts."""
        if not is_ready:
            return False
        trainers = sorted((self.peer_id, *self._part.view.live_trainers()))
        return trainers[number % len(trainers)] == self.peer_id

    def measure_agreed(self, held_out: Callable[[nn.Module], Measured]) -> float:
        """Report the agreed parameters' loss, in whatever unit ``held_out`` gives it, as an event; how long
        it took, seconds. It may give several figures (``recipes.measured``).

        They take the live ones' place in the model meanwhile, as in ``agreed``.
        """
        started_at = time.monotonic()
        with self.agreed() as model:
            loss, more = measured(held_out(model))
        duration_s = time.monotonic() - started_at
        fields = {"loss": loss, "position": self._sync.position, "tokens": self._sync.figures.tokens}
        self._part.report(ev.AgreedMeasured, {**fields, "duration_s": duration_s, "figures": more})
        return duration_s

    def save(self) -> None:
        """Write a checkpoint now, and wait until it is whole. Raises ``EnvironmentFault`` if the disk
        refuses, ``LocalProtocolError`` after ``leave``, which wrote the last one; the previous one stays."""
        self._stepping.must_be_here()
        if self._left:
            raise LocalProtocolError("save: this peer has left the swarm, and saved itself then")
        self._saver.save()

    def leave(self, reason: str = "") -> None:
        """Leave the swarm: finish what is in flight (the whole run's last round, if it is over), save, say
        goodbye.

        Bounded; may be called twice; does nothing in a child that was forked. After it no thread, process or
        socket of this peer is left. If the last checkpoint cannot be written, a warning tells it at the very
        end. The one before it stays, and what was agreed can still be read and published.
        """
        if self._left or self._stepping.is_forked:
            return
        self._left = True
        last: dict[str, Any] = {"digest": "", "versions": tuple(self._sync.versions), "carriers": {}}
        reason = reason or (ev.THE_RUN_IS_OVER if self.over and not self._sync.stopped else "stopped")
        with self._signals.at_the_end(), ExitStack() as ending:
            ending.callback(self._owner.close)
            ending.callback(self._save_and_finish, reason, last)
            ending.callback(self._part.close)
            if not self._model.is_changed:
                self._sync.flush(self.over and not self._sync.stopped)
            agreed = self._ledger.agreed()
            last["digest"] = swarm_digest([version.digest for version in agreed]).hex()
            last["versions"] = tuple(version.version for version in agreed)
            last["carriers"] = self._part.goodbye(reason, last)

    def _save_and_finish(self, reason: str, last: Mapping[str, Any]) -> None:
        is_saved = False
        trouble = ""
        try:
            if not self._model.is_changed:  # its parameters are the ones that belong to the agreed state
                self._saver.save()
                is_saved = True
        except EnvironmentFault as error:
            trouble = f"the last checkpoint was not written, the one before it stays: {error}"
        finally:
            reason += "" if is_saved else ", without a last checkpoint"
            self._saver.close()
            self._ledger.close()
            self._part.report(
                ev.PeerFinished, {"reason": reason, "peak_memory_bytes": peak_memory_bytes(), **last}
            )
            if trouble:
                self._part.warn(trouble)

    def __enter__(self) -> Self:
        self._signals.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop()
        self.leave("" if kind is None else f"{kind.__name__} in the training loop")


def heal(peer: Peer) -> None:
    """Have a peer take over the agreed parameters if its live ones are not finite, between two steps."""
    if not all(bool(shard(one).isfinite().all()) for one in trained_parameters(peer._plan.model).values()):
        peer._ledger.reset()
        peer._sync.take_outcomes()


def _minute_of_the_day() -> int:
    """By this machine's local clock."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min
