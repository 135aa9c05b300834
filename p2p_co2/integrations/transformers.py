"""A ``transformers.Trainer`` in a swarm: one line besides the import.

    import p2p_co2 as co2

    callbacks = [co2.integrations.transformers.SwarmCallback(TICKET)]
    trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    trainer.save_model("out")             # the agreed model

It joins when training begins, exchanges after each optimizer step, and ends the training when the run is
over. Then the model holds the agreed parameters. The Trainer ends at its own ``max_steps`` or epochs, too:
give it more than the run takes.

Whose is what: parameters are the swarm's, wherever they were loaded from; steps, epochs and the scheduler are
the Trainer's. So ``resume_from_checkpoint`` goes on with the Trainer's counters from where the swarm is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from p2p_co2.swarm.counting import BatchCounter
from p2p_co2.swarm.data import warn_of_a_stream
from p2p_co2.swarm.joining import check_names, join
from p2p_co2.swarm.swarm import Swarm, at_exit
from p2p_co2.system.extras import require
from p2p_co2.trainer.rates import put_rate

if TYPE_CHECKING:
    from p2p_co2.swarm.options import Options

require("transformers", "SwarmCallback")
from transformers import TrainerCallback  # noqa: E402  # once it is known to be there


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # a library without types
    """``run``: the ticket, or "@file" that holds it; $P2P_CO2_TICKET if left out. The options are those of
    ``co2.join``. ``swarm``: the ``Swarm``, once training has begun.

    Raises in ``Trainer.train``, as ``co2.join``. Tokens are counted as the Trainer counts them if it does
    (``include_num_input_tokens_seen``), else as the elements of ``input_ids``, or of whatever the model is
    fed. With ``lr_schedule`` the rates are the run's, and the Trainer's own scheduler changes nothing, though
    it logs its rates. Each peer goes through the data in an order of its own; a stream does if it is
    ``co2.shard(stream, callback)``.

    A training that an error ended leaves the swarm with the program, or when the Trainer trains again;
    ``leave`` does so at once.
    """

    def __init__(self, run: str | None = None, /, **options: Unpack[Options]) -> None:
        check_names(options)
        self._options: Options = {"progress": False, **options}
        if run is not None:
            self._options["run"] = run
        self.swarm: Swarm | None = None
        self._schedules = options.get("lr_schedule") is not None
        self._counter: BatchCounter | None = None
        self._counted = 0
        """Tokens, by the Trainer's count."""
        self._goes_on = False
        """By ``resume_from_checkpoint``, with the Trainer's own counters."""
        self._logged_loss = float("nan")
        """For the next step, where the model does not return its loss."""
        self._rates = list[Any]()
        """Of the swarm's schedule, by group, which the Trainer's scheduler has overwritten since."""

    # ---- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.leave()
        model = given["model"]
        optimizer = given["optimizer"]
        inner = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's
        rates = _rates_of(inner)
        self.swarm = join(model, inner, **self._options).__enter__()  # SIGTERM asks, as in a block
        if not self._schedules:
            _set_rates(inner, rates)  # after a resume they are still the Trainer's
        self._rates = _rates_of(inner)
        self._counter = BatchCounter(model)
        self._counted = state.num_input_tokens_seen
        self._goes_on = bool(state.global_step)
        self._call_off = at_exit(self._leave_at_exit)
        warn_of_a_stream(given["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.swarm is None:
            return
        place = self.swarm.place
        if self._goes_on:  # it passes over what it has had by itself
            place.epoch, place.batches = int(state.epoch or 0), 0
        if place.begin(given["train_dataloader"]):  # a loader that must be read again: its epoch begins
            place.batches = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.swarm is not None:
            self.swarm.place.batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        swarm = self.swarm
        counter = self._counter
        if swarm is None or counter is None:
            return
        swarm.place.batches += 1
        tokens, loss = counter.take()
        if args.include_num_input_tokens_seen not in ("no", False):
            tokens = state.num_input_tokens_seen - self._counted
            self._counted = state.num_input_tokens_seen
        if not isinstance(loss, Tensor):
            loss = self._logged_loss
            self._logged_loss = float("nan")
        if self._schedules:
            _set_rates(swarm.optimizer, self._rates)
        was_skipped = getattr(given["optimizer"], "step_was_skipped", False)  # by a GradScaler
        if not (swarm.exchange() if was_skipped else swarm.exchange(tokens, loss)):
            control.should_training_stop = True
            # As after the Trainer's own last step.
            control.should_save |= args.save_strategy == "steps"
            control.should_evaluate |= args.eval_strategy == "steps"
        self._rates = _rates_of(swarm.optimizer)
        if control.should_training_stop:
            self._end()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._logged_loss = given["logs"].get("loss", float("nan"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if control.should_training_stop:  # such as by early stopping
            self._end()
        elif self.swarm is not None:
            self.swarm.place.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._end()

    # ---- the end

    def _end(self) -> None:
        """Leave, with the agreed parameters in the model."""
        if self.swarm is not None and self._counter is not None:
            self.leave()
            self.swarm.load_agreed()

    def leave(self, reason: str = "") -> None:
        """Leave the swarm, if it was joined. May be called twice."""
        if self.swarm is not None and self._counter is not None:
            self._call_off()
            self._counter.close()
            self._counter = None
            self.swarm.leave(reason)

    def _leave_at_exit(self) -> None:
        if self.swarm is not None and self._counter is not None:
            self.swarm.leave(error=getattr(sys, "last_value", None))


def _rates_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[Any]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        put_rate(group, rate)
