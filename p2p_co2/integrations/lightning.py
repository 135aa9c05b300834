"""A callback for Lightning's ``Trainer``: the module that it trains becomes a peer of a swarm.

    from p2p_co2.integrations.lightning import SwarmCallback

    trainer = lightning.Trainer(callbacks=[SwarmCallback(TICKET)], max_steps=-1)

It joins when training starts and exchanges after each optimizer step, never between the micro-steps of
``accumulate_grad_batches``. The training data gets this peer's own order. It stops the trainer when the run
is over. Then it leaves, and the module holds the agreed parameters; a trainer that must go on, as with
``min_steps``, trains them further by itself. Rates are those of Lightning's schedulers, or the run's with
``lr_schedule``. Checkpoints: Lightning's hold the live parameters and its own counters; what the swarm has
agreed on takes their place when training starts again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from p2p_co2.swarm.counting import batch_tokens
from p2p_co2.swarm.data import reseed, warn_of_a_stream
from p2p_co2.swarm.joining import check_names, join
from p2p_co2.swarm.swarm import Swarm
from p2p_co2.system.extras import require
from p2p_co2.tensors.private import fetcher_of

if TYPE_CHECKING:
    from p2p_co2.swarm.options import Options

require("lightning", "SwarmCallback")
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402  # once it is known to be there


class SwarmCallback(Callback):
    """``run``: the ticket; the options are those of ``co2.join``. ``swarm``: once training has started."""

    def __init__(self, run: str | None = None, /, **options: Unpack[Options]) -> None:
        check_names(options)
        self._options: Options = {"progress": False, **options}
        if run is not None:
            self._options["run"] = run
        self.swarm: Swarm | None = None
        self._steps = 0
        self._goes_on = False
        """By ``ckpt_path``, with Lightning's own counters."""
        self._has_left = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swarm = join(pl_module, trainer.optimizers, **self._options)
        self._steps = trainer.global_step
        self._goes_on = bool(self._steps)
        self._has_left = False
        for loader in fetcher_of(trainer).combined_loader.flattened:
            warn_of_a_stream(loader)
        self.on_train_epoch_start(trainer, pl_module)
        iter(fetcher_of(trainer))  # the first pass had begun, and workers have drawn from it

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.swarm is None:
            return
        place = self.swarm.place
        if self._goes_on:  # it passes over what it has had by itself
            place.epoch, place.batches = trainer.current_epoch, 0
        first, *others = fetcher_of(trainer).combined_loader.flattened
        if place.begin(first):  # a loader that must be read again: its epoch begins
            place.batches = 0
        for loader in others:
            reseed(loader, trainer.current_epoch, self.swarm.data_seed)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.swarm is not None and (self._has_left or not trainer.should_stop):
            self.swarm.place.end()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        swarm = self.swarm
        if swarm is None or swarm.done:
            return
        swarm.place.batches += 1
        tokens = batch_tokens(batch)
        loss = _loss_of(outputs) * trainer.accumulate_grad_batches
        if trainer.global_step == self._steps:
            swarm.add(tokens, loss)
            return
        self._steps = trainer.global_step
        if not swarm.exchange(tokens, loss):
            trainer.should_stop = True
            self.on_train_end(trainer, pl_module)  # now: it goes on where ``min_steps`` or so asks for more

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.swarm is not None and not self._has_left:
            self._has_left = True
            self.swarm.leave()
            self.swarm.load_agreed()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.swarm is not None:
            self.swarm.leave(error=exception)


def _loss_of(outputs: Any) -> float | Tensor:
    """As Lightning has divided it by the micro-steps of an update."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return found if isinstance(found, Tensor) and found.numel() == 1 else float("nan")
