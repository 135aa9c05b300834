"""Models of ``transformers`` in real swarms: the Trainer with the callback, and accelerate."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
import datasets
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

import p2p_co2 as co2
from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.integrations.transformers import SwarmCallback
from p2p_co2.swarm.counting import BatchCounter
from p2p_co2.swarm.data import Place
from p2p_co2.telemetry.events import Progress
from p2p_co2.testing import TestSwarm
from p2p_co2.trainer import arrival
from tests.hf_peer import WORDS, Watch, Words, arguments, gpt2

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def endless() -> Iterator[TestSwarm]:
    """A swarm without an end, for peers in this process, one after the other."""
    with co2.local_swarm(rounds=10_000) as swarm:
        yield swarm


@pytest.fixture
def alone(endless: TestSwarm, monkeypatch: pytest.MonkeyPatch) -> TestSwarm:
    """Who joins it need not wait long for those who were there before."""
    monkeypatch.setattr(arrival, "LISTEN_S", 1.0)
    return endless


def same(model: nn.Module, values: dict[str, Tensor]) -> bool:
    return all(torch.equal(one, values[name]) for name, one in model.named_parameters())


# ---- the Trainer


@pytest.mark.swarm
def test_two_trainers_end_with_one_model_that_from_pretrained_loads(local_swarm: Any) -> None:
    clock = ClockConfig(mode="steps", inner_steps_per_round=6, rounds=4)
    swarm = local_swarm(peers=2, run=RunConfig(recipe=OWN_LOOP, fragments=2, clock=clock))
    peer = str(ROOT / "tests" / "hf_peer.py")
    outputs = swarm.run([sys.executable, "-W", "ignore", peer, str(swarm.folder / "out")], timeout_s=600)
    one, two = (json.loads(output.partition("told: ")[2].splitlines()[0]) for output in outputs)
    assert one["digest"] == two["digest"] != ""
    assert one["reason"] == "the run is over"
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    for told in (one, two):
        assert told["loaded"] == pytest.approx([told["loss"]] * 2, abs=1e-6)
        assert told["steps"] == told["inner_steps"] > 4
        assert told["tokens"] == told["steps"] * 2 * 4 * 12  # two micro-steps of four rows
        assert all(trainers == swarms for trainers, swarms in told["met"])  # micro-steps among them
        assert told["rates"][:5] == pytest.approx([0.0, 0.002, 0.004, 0.006, 0.008])
        assert len(told["order"]) == len(set(told["order"])) >= 32
    assert one["order"] != two["order"]


class Begins(TrainerCallback):
    """What the model and the optimizer are at the first step."""

    def __init__(self, swarm: SwarmCallback) -> None:
        self.swarm, self.agrees, self.moments = swarm, None, -1.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.agrees is None:
            assert self.swarm.swarm is not None
            self.agrees = same(given["model"], self.swarm.swarm.peer.agreed_parameters())
            states = given["optimizer"].state.values()
            self.moments = max((float(one["step"]) for one in states), default=0.0)


@pytest.mark.swarm
def test_a_trainer_resumes_with_its_own_counters_and_the_swarms_parameters(
    alone: TestSwarm, tmp_path: Path
) -> None:
    folder = tmp_path / "peer"
    first = SwarmCallback(alone.ticket, folder=folder)
    given = {
        "train_dataset": Words(pause_s=0.04),
        "args": arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=3),
    }
    Trainer(gpt2(), callbacks=[first], **given).train()
    assert first.swarm is not None
    assert not same(gpt2(), first.swarm.state_dict())  # there were rounds

    again = SwarmCallback(alone.ticket, folder=folder)
    begins, watch = Begins(again), Watch(again)
    trainer = Trainer(gpt2(), callbacks=[again, begins, watch], **given)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert begins.agrees  # the swarm's, not the checkpoint's nor the fresh model's
    assert begins.moments == 8  # of the inner optimizer: the swarm's folder is the newer one
    assert watch.met[0] == (3, 8)
    assert (trainer.state.global_step, again.swarm.inner_steps) == (8, 13)
    assert watch.rates == pytest.approx([0.01 * (8 - step) / 8 for step in range(3, 8)])
    assert same(trainer.model, again.swarm.state_dict())


@pytest.mark.swarm
def test_a_second_callback_is_refused_and_the_runs_schedule_holds_whatever_the_trainers_does(
    alone: TestSwarm, tmp_path: Path
) -> None:
    events = list[Any]()
    one = SwarmCallback(alone.ticket, folder=tmp_path / "one", start_over=True)
    two = SwarmCallback(
        alone.ticket, folder=tmp_path / "two", start_over=True, lr_schedule=lambda position: 0.5,
        on_event=events.append,
    )  # fmt: skip
    watch, args = Watch(two), arguments(tmp_path, max_steps=4)
    trainer = Trainer(gpt2(), args, train_dataset=Words(), callbacks=[one, two])
    with pytest.raises(ConfigError, match=r"in a swarm already.*one SwarmCallback"):
        trainer.train()
    trainer.remove_callback(one)
    one.leave()
    trainer.add_callback(watch)
    trainer.train()
    assert two.swarm is not None
    assert two.swarm.inner_steps == 4
    assert watch.rates == [0.005] * 4
    assert not [event for event in events if event.kind == "warned"]
    losses = [event.loss for event in events if isinstance(event, Progress) and math.isfinite(event.loss)]
    assert losses
    assert min(losses) > 2.5  # 3.5 at first: the accumulation does not halve it


# ---- the Trainer with a swarm of nobody


class FakeSwarm:
    """As the callback asks it."""

    optimizer, said = property(lambda self: self._optimizer), ""

    def __init__(self, model: nn.Module, optimizer: Any, **options: Any) -> None:
        self._optimizer, self.is_left = optimizer, False
        self.done, self.place = False, Place(self.data_seed, self.said)

    def __enter__(self) -> FakeSwarm:
        return self

    def data_seed(self, epoch: int) -> int:
        return 5 + epoch

    def exchange(self, *_told: object) -> bool:
        return True

    def leave(self, *_told: object, **_named: object) -> None:
        self.is_left = True

    def load_agreed(self) -> None:
        assert self.is_left


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_co2.integrations.transformers.join", FakeSwarm)


class Breaks(Words):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.asked >= 16:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_a_training_that_an_error_ended_leaves_and_can_begin_again(nobody: None, tmp_path: Path) -> None:
    callback, args = SwarmCallback(), arguments(tmp_path, max_steps=4)
    with pytest.raises(OSError, match="the disk is gone"):
        Trainer(gpt2(), args, train_dataset=Breaks(), callbacks=[callback]).train()
    broken = callback.swarm
    assert isinstance(broken, FakeSwarm)
    Trainer(gpt2(), args, train_dataset=Words(), callbacks=[callback]).train()
    assert broken.is_left
    assert callback.swarm is not broken


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for row in itertools.cycle(WORDS):
            yield {"input_ids": row, "labels": row}


def test_a_stream_in_everybodys_order_is_told_of(nobody: None, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    with pytest.warns(UserWarning, match="all train on the same batches"):
        Trainer(gpt2(), args, train_dataset=Stream(), callbacks=[SwarmCallback()]).train()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sharded_stream_is_in_this_peers_order(workers: int, nobody: None, tmp_path: Path) -> None:
    """It is made before the callback joins, and goes round."""
    callback = SwarmCallback()
    rows = datasets.Dataset.from_dict({"input_ids": WORDS[:16].tolist(), "labels": WORDS[:16].tolist()})
    stream = rows.to_iterable_dataset(num_shards=4)
    own, met = co2.shard(stream, callback, buffer=4), list[list[int]]()
    model = gpt2()
    model.register_forward_pre_hook(
        lambda _model, _given, named: met.extend(named["input_ids"].tolist()), with_kwargs=True
    )
    args = arguments(tmp_path, max_steps=4, dataloader_num_workers=workers, gradient_accumulation_steps=2)
    Trainer(model, args, train_dataset=own, callbacks=[callback]).train()
    assert callback.swarm is not None
    seeds = [callback.swarm.data_seed(epoch) for epoch in (0, 1)]
    loaders = [
        torch.utils.data.DataLoader(
            stream.shuffle(seed=seed % 2**32, buffer_size=4), None, num_workers=workers
        ) for seed in seeds
    ]  # fmt: skip
    assert met == [row["input_ids"] for loader in loaders for row in loader]
    assert sorted(met[:16]) == sorted(met[16:])


def test_a_trainer_goes_on_in_the_data_where_the_checkpoint_was(
    nobody: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": WORDS[:16].tolist(), "labels": WORDS[:16].tolist()})

    def met(said: str) -> tuple[list[list[int]], str]:
        monkeypatch.setattr(FakeSwarm, "said", said)
        callback, seen, model = SwarmCallback(), list[list[int]](), gpt2()
        model.register_forward_pre_hook(
            lambda _model, _given, named: seen.extend(named["input_ids"].tolist()), with_kwargs=True
        )
        args = arguments(tmp_path, max_steps=5)
        Trainer(model, args, train_dataset=rows, callbacks=[callback]).train()
        assert callback.swarm is not None
        return seen, str(callback.swarm.place)

    whole, place = met("")
    assert sorted(whole[:16]) == sorted(WORDS[:16].tolist())
    assert json.loads(place)[1:3] == [2, 2]  # 40 rows, 4 a batch
    later, _ = met(json.dumps([0, 0, 3, 4, None]))
    assert later[:20] == whole[12:32]


def test_shares_of_a_loss_are_added_and_losses_are_averaged() -> None:
    model = gpt2().train()
    counter = BatchCounter(model)
    whole = model(input_ids=WORDS, labels=WORDS).loss.item()
    assert counter.take() == (WORDS.numel(), pytest.approx(whole))
    halves = WORDS.chunk(2)
    for half in halves:
        model(input_ids=half, labels=half, num_items_in_batch=64 * 11)
    assert counter.take() == (WORDS.numel(), pytest.approx(whole, rel=0.1))  # dropout is at work
    means = [model.eval()(input_ids=half, labels=half).loss.item() for half in halves]
    assert counter.take()[0] == 1  # none in training
    counter.close()
    assert sum(means) / 2 == pytest.approx(whole, rel=0.1)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "p2p_co2.integrations.transformers")
    with pytest.raises(EnvironmentFault) as told:
        importlib.import_module("p2p_co2.integrations.transformers")
    assert (
        str(told.value) == "SwarmCallback needs an extra: pip install '.[transformers]' in a clone of p2p-co2"
    )


# ---- accelerate


@pytest.mark.swarm
def test_accelerates_loop_accumulates_clips_saves_and_loads(alone: TestSwarm, tmp_path: Path) -> None:
    arguments(tmp_path)  # ends what accelerate keeps of the Trainers before
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
    model = gpt2()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = co2.Optimizer(inner, model, run=alone.ticket, folder=tmp_path / "peer", start_over=True)
    swarm = own.swarm
    scheduler = torch.optim.lr_scheduler.LinearLR(own, 0.1, total_iters=4)
    loader = torch.utils.data.DataLoader(WORDS, batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, own, loader, scheduler)
    begun = {name: one.detach().clone() for name, one in model.named_parameters()}
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        model.transformer.wte.weight.add_(1.0)  # of another day
    accelerator.save_state(str(tmp_path / "other"))
    accelerator.load_state(str(tmp_path / "other"))  # before the first step: the swarm's parameters stay
    assert same(model, begun)

    met = list[int]()
    for batch in itertools.islice(loader, 6):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        met.append(swarm.inner_steps)
    assert met == [0, 1, 1, 2, 2, 3]
    assert not same(model, begun)
    accelerator.load_state(str(tmp_path / "state"))  # a step back of this peer's, as any other move
    assert same(model, begun)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    own.leave()
