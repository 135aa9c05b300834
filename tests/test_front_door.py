"""The library as users write it: a model joins with a line, steps, has its own order of the data, and comes
out as all peers agreed on it."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import unittest.mock
import warnings
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import p2p_co2 as co2
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import ConfigError, TicketError
from p2p_co2.recipes.optimizers import Optimizers
from p2p_co2.swarm import joining
from p2p_co2.swarm.counting import BatchCounter, batch_tokens
from p2p_co2.swarm.data import Fetching, PeerOrder, Place, Stopped, passes, reseed, warn_of_a_stream
from p2p_co2.telemetry.events import AgreedMeasured, PeerFinished, PeerStarted, Progress
from p2p_co2.telemetry.journal import read_events


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def seed_of(epoch: int) -> int:
    return 100 + epoch


# ---- several optimizers as one


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [one for one in model.parameters() if one.dim() == 2]
    rest = [one for one in model.parameters() if one.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(8, 4, generator=draw)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_several_optimizers_go_on_from_their_state() -> None:
    model, other = small_model(), small_model()
    optimizer, loaded = Optimizers(two_optimizers(model)), Optimizers(two_optimizers(other))
    train(model, optimizer, 3)
    said = optimizer.state_dict()
    numbers = [number for group in said["param_groups"] for number in group["params"]]
    assert numbers == list(range(4))
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(said))
    train(model, optimizer, 2)
    train(other, loaded, 2)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    fewer = {**said, "param_groups": said["param_groups"][:1]}
    with pytest.raises(ValueError, match="1 groups"):
        loaded.load_state_dict(fewer)


def test_a_schedulers_rates_reach_every_optimizer_and_a_state_is_dropped_by_parameter() -> None:
    model = small_model()
    optimizer = Optimizers(two_optimizers(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 1)
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.005, 0.005]
    bias = next(one for one in model.parameters() if one.dim() == 1)
    assert bias in optimizer.state
    optimizer.state.pop(bias, None)
    assert bias not in optimizer.state
    assert len(optimizer.state) == 3


@pytest.mark.parametrize("several", [False, True])
def test_hooks_on_the_state_see_the_whole_of_it(several: bool) -> None:
    """As torch calls them: with this optimizer, and what a hook returns takes the state's place."""
    model, seen = small_model(), list[object]()
    parts = two_optimizers(model) if several else [torch.optim.SGD(model.parameters(), 0.1)]
    optimizer = Optimizers(parts)
    optimizer.register_state_dict_pre_hook(seen.append)
    optimizer.register_state_dict_post_hook(lambda _optimizer, said: {**said, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _optimizer, given: seen.append(given.pop("extra")))
    optimizer.register_load_state_dict_post_hook(seen.append)
    said = optimizer.state_dict()
    optimizer.load_state_dict(said)
    assert seen == [optimizer, 1, optimizer]
    assert said["extra"] == 1  # the caller's own is as it was
    assert len(said["param_groups"]) == len(parts)


def test_what_are_no_optimizers_is_refused_by_name() -> None:
    model = small_model()
    twice = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)]
    for wrong, why in (([], "none"), ([model], "Sequential"), (twice, "the same parameter")):
        with pytest.raises(ConfigError, match=why):
            co2.join(model, wrong, run="p2pco2-x")  # type: ignore[call-overload]


def test_a_drop_in_that_has_left_holds_its_model_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_co2.swarm.optimizer.join", lambda *_given: unittest.mock.MagicMock())
    model = small_model()
    optimizer = co2.Optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    left = weakref.ref(optimizer)
    optimizer.leave()
    del optimizer
    gc.collect()
    assert left() is None


class Told:
    """A peer that takes down the steps it is told of."""

    inner_steps, position, is_entered = 0, 0.0, False

    def __init__(self, *_given: Any, **_options: Any) -> None:
        self.steps = list[tuple[Any, float]]()

    def __enter__(self) -> None:
        self.is_entered = True

    def keep_place(self, place: Any) -> str:
        return ""

    def step(self, tokens: Any, loss: Any) -> bool:
        self.steps.append((tokens, float(torch.as_tensor(loss).detach())))
        return True


def scaled_steps(optimizer: torch.optim.Optimizer, model: nn.Module, scaler: Any, step: Any) -> None:
    """The second of three steps is skipped."""
    for scale in (1.0, float("inf"), 2.0):
        loss = model(torch.ones(2, 4)).sum() * scale
        scaler.scale(loss).backward()
        step(loss)
        optimizer.zero_grad()


@pytest.mark.parametrize(("fused", "enabled"), [(True, True), (False, True), (False, False)])
def test_a_step_that_the_scaler_skips_is_told_as_one_of_no_tokens(fused: bool, enabled: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1, enabled=enabled)
    peer: Any = Told()
    swarm = co2.Swarm(peer, model, optimizer, scaler)
    scaled_steps(optimizer, model, scaler, lambda loss: swarm.step(loss, tokens=8))
    assert [tokens for tokens, _ in peer.steps] == [8, 0 if enabled else 8, 8]


@pytest.mark.parametrize("unscaled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_the_drop_in_tells_no_tokens_of_a_step_that_the_scaler_skips(
    monkeypatch: pytest.MonkeyPatch, fused: bool, unscaled: bool
) -> None:
    peer: Any = Told()
    monkeypatch.setattr(
        "p2p_co2.swarm.optimizer.join", lambda model, inner, **_given: co2.Swarm(peer, model, inner)
    )
    model, plain = small_model(), small_model()
    optimizer = co2.Optimizer(torch.optim.SGD(model.parameters(), 0.01, fused=fused), model)
    reference = torch.optim.SGD(plain.parameters(), 0.01)
    for mine, net in ((optimizer, model), (reference, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

        def step(_loss: Any, mine: Any = mine, scaler: Any = scaler) -> None:
            if unscaled:
                scaler.unscale_(mine)
            scaler.step(mine)
            scaler.update()

        scaled_steps(mine, net, scaler, step)
    assert [tokens for tokens, _ in peer.steps] == [8, 0, 8]
    assert peer.is_entered  # so that SIGTERM asks
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    optimizer._call_off()


def test_an_exchange_after_micro_steps_tells_their_loss() -> None:
    peer: Any = Told()
    swarm = co2.Swarm(peer, small_model(), unittest.mock.Mock())
    swarm.add(8, 1.0)
    swarm.add(8, 3.0)
    swarm.exchange()
    swarm.add(8, 1.0)
    swarm.exchange(8, torch.tensor(5.0))
    swarm.exchange()
    assert peer.steps[:2] == [(16, 2.0), (16, 3.0)]
    assert peer.steps[2][0] == 0


def test_an_own_loop_is_told_where_it_is_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    hear = joining._progress_printer(
        RunConfig(clock=ClockConfig(mode="time", round_s=60.0, rounds=30)), Path("runs/me")
    )
    known: dict[str, Any] = {
        "peer": "me", "inner_steps": 1, "tokens": 1, "tokens_per_s": 1.0, "wall_s": 1.0,
        "up_bytes": 0, "down_bytes": 0, "versions": (1,), "train_s": 49.0, "exposed_s": 1.0,
    }  # fmt: skip
    for at in (100.0, 105.0, 111.0, 120.0, 122.0, 133.0):
        known |= {"phase": "training" if at < 133.0 else "paused"}
        hear(Progress(at=at, position=28.5, loss=2.25 if at == 111.0 else float("nan"), **known))
    end = {"at": 140.0, "peer": "me", "digest": "", "versions": (), "carriers": {}, "peak_memory_bytes": 0}
    hear(PeerFinished(**end, reason="stopped"))
    hear(PeerFinished(**end, reason="the run is over"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "round 28.5 of 30, 1:30 left, 98% of the time training, loss 2.25",
        "round 28.5 of 30, 1:30 left, 98% of the time training",
        "round 28.5 of 30, 1:30 left, resting",
        "the run is over; what it came to: p2p-co2 status runs/me",
        "the model: p2p-co2 model runs/me --out DIR",
    ]


def test_what_the_user_can_mend_ends_a_program_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (ConfigError("join", "run", "is no ticket"), KeyError("a bug")):
        joining._end_in_one_line(type(error), error, None)
    one, *rest = capsys.readouterr().err.splitlines()
    assert one == "ConfigError: join: run: is no ticket"
    assert rest == ["KeyError: 'a bug'"]


# ---- data


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def first_epochs(loader: Any, epochs: int, seeds: Any = seed_of) -> list[list[int]]:
    found = [list[int]() for _ in range(epochs)]
    batches = passes(loader, Place(seeds), lambda _: True)
    for numbers in found:
        while len(numbers) < 20:
            numbers.extend(next(batches).tolist())
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_gone_round_in_this_peers_own_order(shuffle: bool, workers: int) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(), batch_size=4, shuffle=shuffle, num_workers=workers)

    mine, again, theirs = (
        first_epochs(loader(), 2, seeds) for seeds in (seed_of, seed_of, lambda epoch: 7 * epoch)
    )
    assert mine == again
    assert all(sorted(epoch) == list(range(20)) for epoch in mine + theirs)
    assert mine[0] != mine[1]
    assert mine != theirs


def test_a_loader_of_ones_own_making_keeps_its_ways() -> None:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 20)
    loader = DataLoader(Numbers(), batch_size=4, sampler=weights)
    mine, theirs = first_epochs(loader, 1), first_epochs(loader, 1, lambda epoch: 3)
    assert max(mine[0] + theirs[0]) < 10
    assert mine != theirs

    class Told:
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[Tensor]:
            yield torch.arange(20)

    first_epochs(Told(), 3)
    assert Told.epochs == [0, 1, 2]


class Rows(Numbers):
    def __len__(self) -> int:
        return 10_000


class StreamOfRows(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10_000))


def loaders(kind: str) -> Any:
    if kind == "list":
        return list(torch.arange(10_000).split(8))
    data: Any = {
        "shard": co2.shard(Rows(), FakeSwarm(5)), "stream": co2.shard(StreamOfRows(), FakeSwarm(5), 64)
    }.get(kind, Rows())  # fmt: skip
    return DataLoader(data, batch_size=8, shuffle=kind == "shuffled", num_workers=2 * (kind == "workers"))


@pytest.mark.parametrize("kind", ["plain", "shuffled", "workers", "shard", "stream", "list"])
def test_a_peer_that_comes_back_goes_on_where_its_checkpoint_was(kind: str) -> None:
    """It is killed twice on its way through 10,000 rows, and once more in the second epoch. Every row is seen
    in each epoch; those since the last checkpoint twice."""
    seen, said = [list[int](), list[int]()], ""
    for killed_after in (400, 500, 600, 10_000):
        place = Place(seed_of, said)
        assert str(place) == said
        batches = passes(loaders(kind), place, lambda _: True)
        for taken, batch in enumerate(batches, 1):
            seen[min(place.epoch, 1)] += batch.tolist()
            if taken % 150 == 0:
                said = str(place)  # a checkpoint
            if taken == killed_after or (place.epoch == 1 and place.batches == 1250):
                break
    assert sorted(set(seen[0])) == list(range(10_000)) == sorted(set(seen[1]))
    twice = [len(rows) - 10_000 for rows in seen]
    assert twice == [8 * (100 + 50), 0]
    assert seen[0][:10_000] != seen[1][:10_000] or kind == "list"


@pytest.mark.parametrize(("batch", "drops"), [(5, False), (10, False), (8, True)])
def test_an_epoch_that_was_over_is_not_begun_and_another_batch_size_misses_nothing(
    batch: int, drops: bool
) -> None:
    def loader(size: int) -> Any:
        return DataLoader(Numbers(), batch_size=size, drop_last=drops)

    whole, half = Place(seed_of), Place(seed_of)
    list(islice(passes(loader(batch), whole, lambda _: True), len(loader(batch))))
    again = Place(seed_of, str(whole))
    assert again.begin(loader(batch)) == 0
    assert (again.epoch, again.batches) == (1, 0)
    had = [int(one) for one in next(passes(loader(batch), half, lambda _: True))]
    later = passes(loader(2), Place(seed_of, str(half)), lambda _: True)
    had += [int(number) for one in islice(later, 10 - batch // 2) for number in one]
    assert sorted(set(had)) == list(range(20))


def test_a_stream_of_the_datasets_library_goes_on_by_its_own_state() -> None:
    datasets = pytest.importorskip("datasets")
    drawn = list[int]()

    def take_down(one: Any) -> Any:
        drawn.append(one["row"])
        return one

    rows = datasets.Dataset.from_dict({"row": range(10_000)}).to_iterable_dataset(num_shards=4).map(take_down)
    loader = DataLoader(rows, batch_size=8)
    place = Place(seed_of)
    had = [batch["row"].tolist() for batch in islice(passes(loader, place, lambda _: True), 700)]
    said = str(place)
    drawn.clear()
    again = passes(loader, Place(seed_of, said), lambda _: True)
    rest = [batch["row"].tolist() for batch in islice(again, 550)]
    assert sorted(row for batch in had + rest for row in batch) == list(range(10_000))
    assert len(drawn) < 5_000  # what it has had is not drawn again
    assert len(list(islice(again, 1250))) == 1250


def test_a_distributed_sampler_gets_the_peers_seed() -> None:
    sampler = torch.utils.data.DistributedSampler(Numbers(), num_replicas=2, rank=0)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    reseed(loader, 3, seed_of)
    assert (sampler.seed, sampler.epoch) == (103, 3)


def test_loaders_that_cannot_be_gone_round_are_refused() -> None:
    for loader, why in ((iter([1]), "once"), ([], "no batch")):
        with pytest.raises(ConfigError, match=why):
            next(passes(loader, Place(seed_of), lambda _: True))


class FakeSwarm:
    """As ``shard`` asks it."""

    def __init__(self, first: int) -> None:
        self.first = first

    def data_seed(self, epoch: int) -> int:
        return self.first + epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_is_all_of_a_dataset_in_this_peers_order(workers: int) -> None:
    def orders(first: int, dataset: Any) -> list[list[int]]:
        sharded = co2.shard(dataset, FakeSwarm(first), buffer=8)
        streams = isinstance(dataset, IterableDataset)
        count = 0 if streams else workers
        loader = DataLoader(sharded, batch_size=4, num_workers=count, persistent_workers=count > 0)
        return first_epochs(loader, 2)

    for dataset in (Numbers(), Stream()):
        mine, theirs = orders(5, dataset), orders(50, dataset)
        assert mine == orders(5, dataset)
        assert mine != theirs
        assert mine[0] != mine[1]
        assert all(sorted(epoch) == list(range(20)) for epoch in mine + theirs)
    with pytest.raises(ConfigError, match="generator"):
        co2.shard((number for number in range(3)), FakeSwarm(0))


def test_shards_of_the_datasets_library_keep_their_kind() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": [str(number) for number in range(20)]})
    for dataset in (whole, whole.to_iterable_dataset(num_shards=4)):
        mine, theirs = (co2.shard(dataset, FakeSwarm(first)) for first in (1, 2))
        assert type(mine) is type(dataset)
        told = [[row["text"] for row in one] for one in (mine, theirs)]
        assert sorted(told[0]) == sorted(told[1]) == sorted(whole["text"])
        assert told[0] != told[1]


def test_a_stream_that_keeps_its_order_is_warned_of() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()
    for stream in (Stream(), rows, rows.shuffle(seed=0)):
        with pytest.warns(UserWarning, match=r"co2\.shard"):
            warn_of_a_stream(DataLoader(stream))
        with warnings.catch_warnings(action="error"):
            warn_of_a_stream(DataLoader(co2.shard(stream, FakeSwarm(1))))
            warn_of_a_stream(DataLoader(Numbers()))
    with warnings.catch_warnings(action="error"):
        own = co2.shard(rows, FakeSwarm(1))
        warn_of_a_stream(DataLoader(own.map(dict).filter(bool).batch(2).with_format("torch")))


def test_a_stream_that_stalls_lets_its_reader_do_something_else_and_give_up() -> None:
    released, waits = torch.tensor(0), list[float]()

    def slow() -> int:
        while not released:
            pass_on.wait(0.01)
        return 7

    pass_on = threading.Event()

    def goes_on(waited_s: float) -> bool:
        waits.append(waited_s)
        if len(waits) == 2:
            released.fill_(1)
        return True

    with Fetching() as fetching:
        assert fetching.fetch(slow, goes_on) == 7
        assert len(waits) >= 2
        released.fill_(0)
        with pytest.raises(Stopped):
            fetching.fetch(slow, lambda _: False)
        released.fill_(1)
    with Fetching() as fetching, pytest.raises(ZeroDivisionError):
        fetching.fetch(lambda: 1 // 0, lambda _: True)


def test_a_fetch_that_nobody_waits_for_has_ended_before_its_reader_goes_on() -> None:
    def slow() -> int:
        time.sleep(0.4)
        return 7

    with Fetching() as fetching, pytest.raises(Stopped):
        fetching.fetch(slow, lambda _: False)
    assert "p2p-co2 data" not in {thread.name for thread in threading.enumerate()}


class OfOneThread:
    """Rows that only the thread which opened them may read, all or the third."""

    def __init__(self, only_the_third: bool = False) -> None:
        self._base = sqlite3.connect(":memory:")
        self._only_the_third = only_the_third

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return (
            index
            if self._only_the_third and index != 3
            else self._base.execute(f"select {index}").fetchone()[0]
        )


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_dataset_of_one_thread_is_fetched_in_the_loops_thread_and_told(as_stream: bool) -> None:
    rows = OfOneThread()

    class Loader:
        def __iter__(self) -> Iterator[int]:
            yield from map(rows.__getitem__, range(20))

    loader = Loader() if as_stream else DataLoader(rows, batch_size=None, shuffle=True)
    batches = passes(loader, Place(seed_of), lambda _: True)
    with pytest.warns(UserWarning, match=r"(?s)same thread.*stands still.*opens.*first use"):
        first = next(batches)
    assert sorted([int(first), *(int(row) for row in islice(batches, 19))]) == list(range(20))
    assert sorted(int(row) for row in islice(batches, 20)) == list(range(20))  # and is told once


def test_a_dataset_of_one_thread_that_is_met_later_says_whose_thread_it_was() -> None:
    loader = DataLoader(OfOneThread(only_the_third=True), batch_size=None, shuffle=True)
    reseeded = [int(row) for row in PeerOrder(20, seed_of)]
    assert reseeded[0] != 3
    with pytest.raises(sqlite3.ProgrammingError) as told:
        list(islice(passes(loader, Place(seed_of), lambda _: True), 20))
    assert "until_done" in told.value.__notes__[0]


class Faulty:
    """Fails as many ``times`` as it is gone through."""

    def __init__(self, times: int) -> None:
        self.times, self.threads = times, list[str]()

    def __iter__(self) -> Iterator[int]:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) <= self.times:
            raise OSError("the connection was reset")
        yield 7


def test_a_fault_of_a_stream_ends_no_thread_and_is_not_blamed_on_one() -> None:
    """It is tried once more; then it is raised as in a plain loop."""
    passing, lasting = Faulty(1), Faulty(2)
    with warnings.catch_warnings(action="error"):
        assert list(islice(passes(passing, Place(seed_of), lambda _: True), 2)) == [7, 7]
        with pytest.raises(OSError, match="reset") as told:
            next(passes(lasting, Place(seed_of), lambda _: True))
    assert passing.threads == ["p2p-co2 data", threading.current_thread().name, "p2p-co2 data"]
    assert not hasattr(told.value, "__notes__")


def test_batches_are_made_on_the_default_device_of_the_loop() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(2)

    torch.set_default_device("meta")
    try:
        assert next(passes(Loader(), Place(seed_of), lambda _: True)).device.type == "meta"
    finally:
        torch.set_default_device("cpu")


def test_the_order_of_an_epoch_is_the_same_wherever_it_is_made() -> None:
    order = PeerOrder(5, seed_of)
    order.set_epoch(1)
    by_hand = torch.randperm(5, generator=torch.Generator().manual_seed(101)).tolist()
    assert list(order) == by_hand


# ---- tokens and losses seen at the forward pass


def test_batches_are_counted_where_a_model_trains() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, mask: Tensor, words: Tensor) -> Any:
            return type("Output", (), {"loss": self.inner(mask).mean() * 0 + words.numel()})()

    model = Model()
    counter = BatchCounter(model)
    model(torch.ones(2, 3), torch.arange(6))
    model(torch.ones(2, 3), words=torch.arange(8))
    with torch.no_grad():
        model(torch.ones(2, 3), torch.arange(6))
    model.eval()
    model(torch.ones(2, 3), torch.arange(6))
    tokens, loss = counter.take()
    assert (tokens, float(loss)) == (14, 7.0)
    tokens, loss = counter.take()
    assert tokens == 1  # none was seen
    assert float(loss) != float(loss)
    assert batch_tokens({"x": [torch.ones(2, 2)]}) == 4
    assert batch_tokens("text") == 1


# ---- with a real swarm

NAMES = {
    "embed.weight", "head.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
    "norm.num_batches_tracked", "frozen.weight", "frozen.bias",
}  # fmt: skip


def told(output: str) -> dict[str, Any]:
    found = re.search(r"^told: (.*)$", output, re.MULTILINE)
    assert found, output
    return dict(json.loads(found.group(1)))


@pytest.mark.swarm
def test_a_loop_of_few_lines_a_drop_in_and_one_whose_data_stalls_agree(
    local_swarm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    swarm = local_swarm(peers=3, rounds=8)
    program = Path(__file__).with_name("front_door_peer.py")
    loop, drop_in, stalled = (told(output) for output in swarm.run([sys.executable, str(program)]))
    assert loop["digest"] == drop_in["digest"] == stalled["digest"]
    assert loop["names"] == drop_in["names"] == sorted(NAMES)

    assert set(loop["met"][::2]) == {0}  # no exchange between micro-steps
    assert set(loop["met"][1::2]) == {1}
    assert {"AgreedMeasured", "RoundCommitted"} <= set(loop["kinds"])
    assert loop["agreed"] < 2.5  # ln 13 is 2.56
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(weights) == [name for name in loop["names"] if name != "head.weight"]
    events = list(read_events(swarm.folder / "peer-0" / "events.jsonl"))
    assert any(isinstance(event, PeerStarted) for event in events)
    assert sum(isinstance(event, Progress) for event in events) > 1
    measured = [event.figures for event in events if isinstance(event, AgreedMeasured)]
    assert all(0.0 <= figures["accuracy"] <= 1.0 for figures in measured)
    assert measured

    steps, made, told_steps, told_tokens = drop_in["met"]
    assert drop_in["steps"] == steps  # also the one that the scaler skipped: the clock goes on with it
    assert made == steps - 1
    assert told_steps > 3
    assert told_tokens == (told_steps - 1) * 8 * 7  # that one was of no tokens

    assert stalled["met"] == [stalled["steps"]]  # all that its stream gave
    assert 0 < stalled["steps"] <= 5 < loop["steps"]


@pytest.mark.swarm
def test_the_seed_of_a_test_that_is_killed_ends_with_it() -> None:
    program = """
        import os, signal
        import p2p_co2 as co2
        from p2p_co2.system.process import processes_below
        with co2.local_swarm():
            print(*processes_below(os.getpid()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    left = [Path(f"/proc/{number}") for number in told.stdout.split()]
    assert left, told.stderr
    deadline_at = time.monotonic() + 60
    while any(one.exists() for one in left):
        assert time.monotonic() < deadline_at, left
        time.sleep(0.1)


@pytest.mark.swarm
def test_it_goes_on_by_itself_and_a_program_that_only_ends_leaves_cleanly(local_swarm: Any) -> None:
    """Without a with block, a folder or ``leave``: two processes after each other, one peer."""
    program = textwrap.dedent("""
        import torch, sys
        import p2p_co2 as co2
        torch.set_num_threads(1); torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = co2.Optimizer(torch.optim.SGD(model.parameters(), 0.01), model)
        begun = optimizer.swarm.inner_steps
        for _ in range(20):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("steps", begun, optimizer.swarm.inner_steps, optimizer.swarm.peer.peer_id, flush=True)
    """)
    swarm = local_swarm(peers=1, rounds=400)
    (swarm.folder / "ends.py").write_text(program)
    home = swarm.folder / "home"
    variables = {
        **os.environ, "XDG_DATA_HOME": str(home), "P2P_CO2_TICKET": swarm.ticket,
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }  # fmt: skip
    told = []
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, str(swarm.folder / "ends.py")], env=variables, text=True, capture_output=True,
            timeout=200, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr
        told.append(re.findall(r"steps (\d+) (\d+) (\w+)", ended.stdout)[0])
    assert [one[:2] for one in told] == [("0", "20"), ("20", "40")]
    assert told[0][2] == told[1][2]
    (folder,) = (home / "p2p-co2" / "runs").glob("*/peer")
    assert (folder / "checkpoint").is_dir()


def test_without_a_ticket_or_with_a_wrong_option_join_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("P2P_CO2_TICKET", raising=False)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TicketError, match="P2P_CO2_TICKET"):
        co2.join(model, optimizer)
    with pytest.raises(ConfigError, match="join: optimizer: is of type int"):
        co2.join(model, 3, run="p2pco2-x")  # type: ignore[call-overload]
    ticket = (
        "p2pco2-3gFh6QoQhgaHhEqzfZJpZHuP6sSekjaZLt93je9eEFUi7erPYYexN3HWpiKRk9BHyGMTDCSJH6Ei9RVeVRFhLrxBmuF5A"
        "DtVR93ZgjgxpdJz8yZmtnV6Kgm61mj2dEpHrnVxCpwn4TE4mZHjcSeQXo7j4YnYUQ3Ajj7JzQkDYpL99"
    )
    for options, told in (
        ({"upload": "fast"}, "join: upload: is no rate"),
        ({"hours": "9"}, "join: hours"),
        ({"rest_while": "mouse"}, "join: rest_while: 'mouse' is nothing to rest for"),
        ({"idle_for": "1s"}, "join: idle_for"),
        ({"grpc_port": -1}, "join: grpc_port"),
        ({"lr_schedule": 3}, "learning_rate: is 3"),
    ):
        with pytest.raises(ConfigError, match=told):
            co2.join(model, optimizer, run=ticket, folder=tmp_path, **options)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="uplod"):
        co2.join(model, optimizer, run=ticket, uplod="1M")  # type: ignore[call-overload]


def test_names_are_loaded_when_they_are_used() -> None:
    program = "import sys, p2p_co2; print('torch' in sys.modules, sorted(p2p_co2.__all__))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.startswith("False")
    assert {"Optimizer", "Swarm", "join", "shard", "local_swarm"} <= set(co2.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = co2.nothing
