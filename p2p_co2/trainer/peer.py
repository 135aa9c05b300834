"""A training peer: the object in the user's own loop. ``step`` after each inner step, ``leave`` at the
end."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from p2p_co2.checkpoint import swarm_digest
from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, LocalProtocolError
from p2p_co2.governor import Governor
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.ledger import TensorLedger
from p2p_co2.trainer.network_thread import NetworkThread
from p2p_co2.trainer.plan import Plan
from p2p_co2.trainer.saver import Saver
from p2p_co2.trainer.synchroniser import Progressed, Synchroniser


class Peer:
    """Made by ``Connection.start`` or ``join``. A context manager: leaving the block leaves the swarm."""

    def __init__(self, thread: NetworkThread, ledger: TensorLedger, plan: Plan, start: Progressed) -> None:
        self._thread, self._ledger, self._plan = thread, ledger, plan
        self._sync = Synchroniser(plan.run, plan.model, plan.fragments, ledger, thread, start)
        self._saver = Saver(plan, ledger, self._sync, thread.report)
        self._stopped = self._left = False
        self._process = os.getpid()
        self._governor = Governor(plan.config.limits.hours)
        self._sync.on_reset = self._forget_optimizer
        self._sync.take_outcomes()  # the first step starts from what catching up brought
        self._sync.report()
        self._set_learning_rate()

    @property
    def run(self) -> RunConfig:
        return self._plan.run

    @property
    def board(self) -> str:
        """The address of this peer's own page on the loopback; "" if ``PeerConfig.board`` is False."""
        return self._thread.board

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
        rounds = self._plan.run.clock.rounds
        return rounds > 0 and self._sync.position >= rounds

    @torch.inference_mode(False)  # what is made here is changed in other threads, which are not in it
    def step(self, tokens: int, loss: float | Tensor) -> bool:
        """Tell the swarm of one inner optimizer step over ``tokens`` tokens with training ``loss``.

        Copies a fragment out when it is due, merges what the others have agreed on into the model's
        parameters, and otherwise returns at once. Returns False when the run is over or ``stop`` was called:
        leave the loop then. Raises only for faults of this machine (``EnvironmentFault``) and bugs, never for
        what another peer did.
        """
        self._must_be_here()
        self._sync.after_step(tokens, loss.detach() if isinstance(loss, Tensor) else loss)
        self._set_learning_rate()
        self._rest()
        self._saver.keep_up()
        return not (self._stopped or self.over)

    def stop(self) -> None:
        """Ask the loop to end: the next ``step`` returns False. Safe in a signal handler."""
        self._stopped = self._sync.stopped = True

    def pause(self) -> None:
        """Rest from the next ``step`` on, which then does not return until ``go_on`` or ``stop``: no
        training, no fetching, only heartbeats. The swarm does not wait for this peer and it keeps its place;
        where the swarm is, others judge without it, and newcomers ask it only for what nobody else has.
        Safe in a signal handler and from other threads, as are the next two."""
        self._governor.pause()

    def go_on(self) -> None:
        """End a pause, or the rest outside the configured hours until they next turn."""
        self._governor.go_on()

    def toggle_pause(self) -> None:
        """``pause`` if it works, ``go_on`` if it rests."""
        self._governor.toggle(_minute_of_the_day())

    def _rest(self) -> None:
        if self._governor.resting(_minute_of_the_day()) and not self._stopped:
            try:
                self.save()  # a machine that rests may be switched off
            except EnvironmentFault as error:
                self._thread.report(ev.Warned, {"text": f"no checkpoint was written: {error}"})
            self._sync.rest(lambda: self._governor.resting(_minute_of_the_day()))
            self._set_learning_rate()

    def agreed_parameters(self) -> dict[str, Tensor]:
        """A copy of the agreed parameters by name (fp32, host memory): evaluate and publish these, not the
        live ones."""
        self._must_be_here()
        shapes = {name: parameter.shape for name, parameter in self._plan.model.named_parameters()}
        flat: dict[str, Tensor] = {}
        for fragment, state in zip(self._plan.fragments.fragments, self._ledger.states(), strict=True):
            at = 0
            for part in fragment.slices:
                stop = at + part.stop - part.start
                numel = shapes[part.name].numel()
                values = flat.setdefault(part.name, torch.empty(numel, dtype=torch.float32, device="cpu"))
                values[part.start : part.stop] = state.params[at:stop]
                at = stop
        return {name: values.view(shapes[name]) for name, values in flat.items()}

    @property
    def peer_id(self) -> str:
        """Who this peer is to the others."""
        return self._thread.network.identity.peer_id

    def measure_agreed(self, held_out: Callable[[nn.Module], float]) -> float:
        """Report the agreed parameters' loss, in whatever unit ``held_out`` gives it, as an event; how long
        it took, seconds.

        They take the live ones' place in the model meanwhile: one more copy of them for that time. Counted as
        a pause, neither training nor communication.
        """
        self._must_be_here()
        started_at = time.monotonic()
        parameters = dict(self._plan.model.named_parameters())
        live = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            with torch.no_grad():
                for name, values in self.agreed_parameters().items():
                    parameters[name].copy_(values)
            loss = float(held_out(self._plan.model))
        finally:
            with torch.no_grad():
                for name, values in live.items():
                    parameters[name].copy_(values)
        duration_s = time.monotonic() - started_at
        self._sync.pause(duration_s)
        fields = {"loss": loss, "position": self._sync.position, "tokens": self._sync.tokens}
        self._thread.report(ev.AgreedMeasured, {**fields, "duration_s": duration_s})
        return duration_s

    def save(self) -> None:
        """Write a checkpoint now, and wait until it is whole. Raises ``EnvironmentFault`` if the disk
        refuses; the previous one stays."""
        self._must_be_here()
        started_at = time.monotonic()
        try:
            self._saver.save()
        finally:
            self._sync.pause(time.monotonic() - started_at)

    def _must_be_here(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(
                "peer", "", "belongs to the process that joined, and this one was forked from it: step there"
            )

    def _forget_optimizer(self, fragment: int) -> None:
        """Drop the inner optimizer's state of a fragment whose parameters were not finite: its moments are
        not either."""
        parameters = dict(self._plan.model.named_parameters())
        for part in self._plan.fragments.fragments[fragment].slices:
            self._plan.optimizer.state.pop(parameters[part.name], None)

    def leave(self, reason: str = "") -> None:
        """Leave the swarm: finish what is in flight (the whole run's last round, if it is over), save, say
        goodbye.

        Bounded; may be called twice; does nothing in a child that was forked. After it no thread, process or
        socket of this peer is left. Raises ``EnvironmentFault`` if the last checkpoint cannot be written; the
        one before it stays.
        """
        if self._left or os.getpid() != self._process:
            return
        self._left = True
        last: dict[str, Any] = {"digest": "", "versions": tuple(self._sync.versions), "carriers": {}}
        reason = reason or ("the run is over" if self.over and not self._stopped else "stopped")
        try:
            self._sync.flush(self.over and not self._stopped)
            agreed = self._ledger.agreed()
            last["digest"] = swarm_digest([version.digest for version in agreed]).hex()
            last["versions"] = tuple(version.version for version in agreed)
            last["carriers"] = self._thread.carriers_used()
            self._thread.goodbye(reason, last)
        finally:
            try:
                self._thread.close()
            finally:
                self._save_and_finish(reason, last)

    def _save_and_finish(self, reason: str, last: Mapping[str, Any]) -> None:
        try:
            self.save()
        except (EnvironmentFault, LocalProtocolError):
            reason += ", without a last checkpoint"
            raise
        finally:
            self._saver.close()
            self._ledger.close()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
            self._thread.report(ev.PeerFinished, {"reason": reason, "peak_memory_bytes": peak, **last})

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop()
        self.leave("" if kind is None else f"{kind.__name__} in the training loop")

    def _set_learning_rate(self) -> None:
        if self._plan.learning_rate is None:
            return
        factor = self._plan.learning_rate(self._sync.position)
        for group, base in zip(self._plan.optimizer.param_groups, self._plan.base_lr, strict=True):
            group["lr"] = base * factor


def _minute_of_the_day() -> int:
    """By this machine's local clock."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min
