"""A swarm as a training loop sees it: step, data, the agreed model.

    with co2.join(model, optimizer, run=TICKET) as swarm:
        for batch in swarm.until_done(loader):
            loss = model(**batch).loss
            loss.backward()
            swarm.step(loss, tokens=batch["labels"].numel())
        swarm.save_pretrained("out/")

``Swarm`` is made by ``join``. It owns the inner optimizer's steps; ``swarm.peer`` is the bottom layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import RunConfig
from p2p_co2.recipes.inner_step import make_step
from p2p_co2.recipes.measured import Measured
from p2p_co2.swarm.data import Place, Stopped, passes, warn_of_a_stream
from p2p_co2.system.private import call_before_threads_end
from p2p_co2.telemetry.journal import Journal
from p2p_co2.tensors.pretrained import write_pretrained
from p2p_co2.trainer.agreed_loss import AgreedLoss
from p2p_co2.trainer.ranks.peer import AnyPeer
from p2p_co2.trainer.stages.peer import data_seed

_Batch = TypeVar("_Batch")


def at_exit(leave: Callable[[], None]) -> Callable[[], None]:
    """Have ``leave`` called when the program ends, before the threads that it needs are ended. What is
    returned calls it off, and lets go of what it holds: a model, say."""
    held = [leave]
    call_before_threads_end(lambda: [one() for one in held])
    return held.clear


class Swarm:
    """Made by ``join``. A context manager: leaving the block leaves the swarm.

    ``peer``: the bottom layer. ``model``, ``optimizer``: as given to ``join``. ``done``: whether the run is
    over, or somebody stopped this peer. Once it is done, what is read here is the final state.
    """

    def __init__(
        self, peer: AnyPeer, model: nn.Module, optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None = None, max_grad_norm: float | None = None,
        evaluate: Callable[[nn.Module], Measured] | None = None,
        journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.model = model
        self.optimizer = optimizer
        self._scaler = scaler
        self._max_grad_norm = max_grad_norm
        self._journal = journal
        self.done = False
        self._tokens, self._losses = 0, list[Any]()
        """Of the micro-steps since the last update."""
        said = peer.keep_place(lambda: str(self.place))
        self.place = Place(self.data_seed, said, peer.inner_steps)
        """In the first loader that ``until_done`` is given; callbacks keep theirs here."""
        self._loader: Any = None
        self._measuring = AgreedLoss(evaluate)
        self._measuring.begin(peer)

    # ---- training

    def suggested_lr(self, base: float) -> float:
        """The learning rate that fits the swarm as it is now. ``base``: the best for one machine alone in a
        run of this length, times the root of the number of peers. Ask it before each step, for a program that
        sets its rates itself, and warm up for 300 steps or more."""
        return self.peer.rates.suggested(base)

    def step(self, loss: float | Tensor, *, tokens: int | Tensor, update: bool = True) -> bool:
        """Use the gradients: clip them, step the optimizer, set them to none, exchange. Call it after
        ``loss.backward()``. False when the run is over: leave the loop then.

        ``tokens``: what the batch was made of, this peer's weight in the mean. ``update=False``: a micro-step
        of gradient accumulation, which only adds its tokens and its loss; no outer step falls between it and
        the update. ``loss``: as it is shown, not divided by the number of micro-steps. A step that a
        ``GradScaler`` skips is one of no tokens; ten in a row are warned of. Raises as ``Peer.step``.
        """
        if not update:
            self.add(tokens, loss)
            return not self.done
        moved = make_step(self.optimizer, self._scaler, self._max_grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        if moved:
            return self.exchange(tokens, loss)
        self.forget()
        return self.exchange()

    def add(self, tokens: int | Tensor, loss: float | Tensor) -> None:
        """Count a micro-step, for the exchange that follows its update."""
        self._tokens = self._tokens + tokens  # type: ignore[assignment]  # a tensor stays one
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def forget(self) -> None:
        """Count nothing of the micro-steps since the last update: it was skipped."""
        self._tokens = 0
        self._losses = []

    def exchange(self, tokens: int | Tensor = 0, loss: float | Tensor = float("nan")) -> bool:
        """Tell the swarm of an optimizer step that is made, and of the micro-steps before it. False when the
        run is over. As ``step``, for programs that step the optimizer themselves. A step of no ``tokens``
        weighs next to nothing in the mean; ten in a row are warned of."""
        if self.done:
            self.leave()  # the loop goes on all the same: nothing may be lost, and signals are its own again
            return False
        if self._losses:
            if isinstance(loss, Tensor) or not math.isnan(loss):  # NaN: no loss but the micro-steps'
                self.add(0, loss)
            tokens = self._tokens + tokens
            loss = sum(self._losses) / len(self._losses)
            self.forget()
        self.done = not self.peer.step(tokens, loss)
        if not self.done:
            self._measuring.after_step(self.peer)
        return not self.done

    # ---- data

    def until_done(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Batches of ``loader``, pass after pass of it, until the run is over; then this peer has left, and
        what it agreed on is final.

        Each pass of a ``DataLoader`` is in this peer's own order, shuffled or not; what else has
        ``set_epoch`` is told the pass. A stream keeps its order, which is warned of, unless ``shard`` made
        it. One that stalls holds up this peer's steps and nothing else. A peer that comes back goes on where
        its checkpoint was, in the first loader that it gives. Raises ``ConfigError`` for a loader without
        batches, or one that cannot begin again."""
        warn_of_a_stream(loader)
        self._loader = loader if self._loader is None else self._loader
        place = self.place if loader is self._loader else Place(self.data_seed, first=self.inner_steps)
        try:
            for batch in passes(loader, place, self._wait):
                if self.done:
                    break
                yield batch
                if self.done:
                    break
        except Stopped:
            self.done = True
        if self.done:
            self.leave()

    def data_seed(self, epoch: int) -> int:
        """A seed for this peer's data in its ``epoch``, counted from where it began."""
        return data_seed(self.peer.run, self.peer.peer_id, self.place.first + epoch)

    def _wait(self, waited_s: float) -> bool:
        """While there is no data: merge what the others agree on, if no gradient is under way."""
        under_way = self._losses or any(one.grad is not None for one in self.model.parameters())
        return self.peer.idle(waited_s, between_steps=not under_way)

    # ---- the agreed model

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """Have the agreed parameters in the model, and the live ones back afterwards."""
        self._settle()
        with self.peer.agreed():
            yield self.model

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict with the agreed parameters, on the host, without wrappers' prefixes."""
        self._settle()
        return self.peer.state_dict()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the agreed model: safetensors in the model's own layout; of a PEFT model its adapters.
        ``from_pretrained`` loads it if the model is one of ``transformers``. Raises ``EnvironmentFault`` if
        the disk refuses."""
        self._settle()
        if state := self.peer.state_dict():  # rank 0 of several writes
            write_pretrained(self.model, state, Path(folder))

    def load_agreed(self) -> None:
        """Put the agreed parameters into the model for good, in the place of the live ones. Call it after
        ``leave`` or the run's end, or before the first step."""
        self._settle()
        for inner in getattr(self.optimizer, "parts", (self.optimizer,)) if self.done else ():
            if callable(rest := getattr(inner, "eval", None)):
                rest()  # schedule-free ones: later it would move what is loaded now
        with self.peer.agreed(back=False):
            pass

    def _settle(self) -> None:
        """Once the run is over, what is agreed is what its last round brings."""
        if self.done:
            self.leave()

    # ---- where it stands

    @property
    def run(self) -> RunConfig:
        """What all peers agreed on."""
        return self.peer.run

    @property
    def position(self) -> float:
        """Where the swarm is, in rounds."""
        return self.peer.position

    @property
    def inner_steps(self) -> int:
        """Optimizer steps of this peer, those before a resume too."""
        return self.peer.inner_steps

    @property
    def board(self) -> str:
        """The address of this peer's own page; "" if there is none."""
        return self.peer.board

    @property
    def ticket(self) -> str:
        """An invitation that names some of the peers, too."""
        return self.peer.ticket

    def stop(self) -> None:
        """Ask the loop to end with its next step. Safe in a signal handler."""
        self.peer.stop()

    def pause(self) -> None:
        """Rest from the next step on, until ``go_on``; any thread."""
        self.peer.pause()

    def go_on(self) -> None:
        """End a pause."""
        self.peer.go_on()

    def leave(self, reason: str = "", error: BaseException | None = None) -> None:
        """Finish what is in flight, save, say goodbye. May be called twice. ``error``: the one that ended the
        loop, of which others are told; of several ranks that are one peer it ends all."""
        self.done = True
        try:
            if error is None:
                self.peer.leave(reason)
            else:
                self.peer.__exit__(type(error), error, None)
        finally:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> Swarm:
        self.peer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error=error)
