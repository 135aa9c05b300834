"""Checkpoints beside training: what they hold whatever happens while they are written, that none ends
training, and disks that refuse."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.config import PeerConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.node.ledger import AgreedMean, PartWeights
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import checkpoint
from p2p_co2.tensors.checkpoint import load
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments.plan import plan_fragments
from p2p_co2.trainer import saver as saver_module
from p2p_co2.trainer.exchanged_model import Plan
from p2p_co2.trainer.saver import Saver
from tests.test_trainer import Bench

BLOCK = 128
ARE_NONE_DUE_S = 1e9


class Saving:
    """A peer without a network, and its saver. A checkpoint is begun by ``ask``."""

    def __init__(
        self, folder: Path, rule: str = "keep", change: Callable[[nn.Module, Any], None] | None = None
    ) -> None:
        self.bench = Bench(rule=rule, lr=1.0, momentum=0.0, gap_penalty=False)
        self.model = self.bench.model
        self.optimizer = self.bench.optimizer
        self.train()
        if change is not None:
            change(self.model, self.optimizer)
        config = PeerConfig(folder=folder, checkpoint_every_s=ARE_NONE_DUE_S)
        fragments = plan_fragments(self.model, 2)
        self.plan = Plan(self.bench.run, config, fragments, self.model, self.optimizer)
        self.saver = Saver(
            self.plan, self.bench.ledger, self.bench.sync, self.bench.exchanged.live, self.bench.wire.report
        )
        self.folder = folder / "checkpoint"

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def ask(self) -> None:
        """Have a checkpoint begin at the end of this step."""
        self.saver.began_at -= 2 * ARE_NONE_DUE_S
        self.saver.keep_up()

    def finish(self) -> None:
        """Go on stepping until it is whole or told to have failed."""
        while (under_way := self.saver.under_way) is not None:
            wait([under_way], 0.002)
            self.saver.keep_up()

    def save(self) -> None:
        self.ask()
        self.finish()

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        """A checkpoint's agreed states are in the file, and what writes the rest gets nowhere while the block
        runs."""
        go_on, has_begun, take = threading.Event(), threading.Event(), saver_module.ShareQueue.take

        def take_late(copies: Any) -> Mapping[str, Tensor]:
            has_begun.set()
            go_on.wait()
            return take(copies)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver_module.ShareQueue, "take", take_late)
            self.ask()
            has_begun.wait()
            try:
                yield
            finally:
                go_on.set()

    def others_move(self, fragment: int, by: float) -> None:
        """A round without us commits."""
        blocks = get_codec("fp32").blocks(self.plan.fragments.fragments[fragment].numel)
        mean = torch.full((blocks * BLOCK,), -by).numpy().tobytes()
        parts = (PartWeights(0, blocks, {"other": 1.0}),)
        start = self.bench.ledger.agreed()[fragment].digest
        asyncio.run(self.bench.ledger.commit(AgreedMean(fragment, 1, 0, start, mean, parts)))

    @property
    def warnings(self) -> list[str]:
        return [str(event["text"]) for event in self.bench.wire.seen(ev.Warned)]

    def close(self) -> None:
        self.saver.close()
        self.bench.ledger.close()


@pytest.fixture(params=["keep", "co2"])
def saving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Saving]:
    made = Saving(tmp_path, request.param)
    yield made
    made.close()


def moments_of(saved: Mapping[str, Any]) -> list[Tensor]:
    return [state["exp_avg"].clone() for state in saved["state"].values()]


# ---- what a checkpoint holds


def test_training_goes_on_while_a_checkpoint_is_written(saving: Saving) -> None:
    agreed = [state.params.clone() for state in saving.bench.ledger.states()]
    with saving.slow_disk():
        for _ in range(3):
            saving.train()
            saving.bench.step()
            saving.saver.keep_up()
        assert not list(saving.folder.glob("state-*"))
    before = moments_of(saving.optimizer.state_dict())
    saving.finish()  # nothing trains in between
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [0, 0]
    assert all(torch.equal(state.params, was) for state, was in zip(saved.states, agreed, strict=True))
    assert all(map(torch.equal, moments_of(saved.optimizer), before))
    assert saved.inner_steps == 0
    (event,) = saving.bench.wire.seen(ev.CheckpointSaved)
    assert event["versions"] == (0, 0)


def test_what_is_saved_is_what_all_agreed_on_and_the_own_optimizer_and_nothing_frozen(tmp_path: Path) -> None:
    """Bytes by hand: 8 for each parameter that is trained, 8 for its optimizer, none for a frozen one."""

    def freeze(model: nn.Module, optimizer: Any) -> None:
        model.register_parameter("base", nn.Parameter(torch.zeros(1000, 1000), requires_grad=False))

    made = Saving(tmp_path, change=freeze)
    made.save()
    (path,) = made.folder.iterdir()
    trained = sum(parameter.numel() for parameter in made.optimizer.param_groups[0]["params"])
    assert 16 * trained < path.stat().st_size < 16 * trained + 5000
    made.close()


def test_each_parameters_state_is_of_one_step_and_a_step_copies_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the shares training goes on."""
    monkeypatch.setattr(saver_module, "AT_ONCE_BYTES", 1)
    made = Saving(tmp_path, change=lambda model, optimizer: model.register_buffer("seen", torch.zeros(1)))
    made.ask()
    copying, counts = made.saver.copies, []
    assert copying is not None
    while (under_way := made.saver.under_way) is not None:
        before = copying.given
        copying.copy(5.0)  # as soon as the last share was written
        counts.append(copying.given - before)
        made.train()
        if under_way.done() or copying.given + 1 == len(copying.shares):
            made.finish()
    assert [count for count in counts if count] == [1] * len(copying.shares)  # at most one a step
    states = load(made.folder).optimizer["state"].values()
    reference = [nn.Parameter(torch.zeros(1))]
    other = torch.optim.AdamW(reference, lr=0.1)
    by_step = {}
    for step in range(1, len(counts) + 3):
        reference[0].grad = torch.ones(1)
        other.step()
        by_step[step] = [float(other.state[reference[0]][key]) for key in ("exp_avg", "exp_avg_sq")]
    steps = [int(state["step"]) for state in states]
    assert len(set(steps)) == len(steps) > 1
    for step, state in zip(steps, states, strict=True):
        assert [float(state[key].min()) for key in ("exp_avg", "exp_avg_sq")] == by_step[step]
        assert [float(state[key].max()) for key in ("exp_avg", "exp_avg_sq")] == by_step[step]
    made.close()


def test_rounds_that_commit_while_a_disk_is_slow_step_in_the_old_memory_and_the_checkpoint_is_as_it_was(
    saving: Saving,
) -> None:
    old = saving.bench.ledger.fragments[0].state
    with saving.slow_disk():
        saving.others_move(0, by=100.0)
        new = saving.bench.ledger.fragments[0].state
    assert new.momentum is old.momentum
    saving.finish()
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [0, 0]
    assert float(saved.states[0].momentum.abs().max()) == 0.0


def test_the_copy_counts_as_standing_still(saving: Saving) -> None:
    saving.bench.step()
    before = saving.bench.sync.figures.exposed_s
    saving.ask()
    saving.bench.sync.stood_still()
    after = saving.bench.sync.figures.exposed_s
    saving.finish()
    (event,) = saving.bench.wire.seen(ev.CheckpointSaved)
    assert event["duration_s"] > 0.0
    assert after > before


# ---- how often


def test_the_interval_follows_from_size_and_the_budget_of_writes(tmp_path: Path) -> None:
    made = Saving(tmp_path)
    assert made.saver.every_s == ARE_NONE_DUE_S  # as configured
    made.saver.plan = replace(made.plan, config=PeerConfig(folder=tmp_path))
    assert made.saver.every_s == 60.0
    made.saver.size_bytes = 16 * 124_000_000
    assert made.saver.every_s == pytest.approx(16 * 124e6 / (100e9 / 86400))  # 1714 s
    made.saver.began_at -= 1700.0
    made.saver.keep_up()
    assert made.saver.under_way is None
    made.saver.began_at -= 20.0
    made.saver.keep_up()
    assert made.saver.under_way is not None
    made.finish()
    made.close()


# ---- no checkpoint ends training


class Odd:
    """Only pickle could save it."""


def of_buffer(values: Any, persistent: bool = True) -> Callable[[nn.Module, Any], None]:
    return lambda model, optimizer: model.register_buffer("kept", values, persistent)


def of_group(values: Any) -> Callable[[nn.Module, Any], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update(kept=values)


def of_state(values: Any) -> Callable[[nn.Module, Any], None]:
    return lambda model, optimizer: next(iter(optimizer.state.values())).update(kept=values)


def without_state_dict(error: Exception) -> Callable[[nn.Module, Any], None]:
    def refuse() -> Any:
        raise error

    return lambda model, optimizer: setattr(optimizer, "state_dict", refuse)


ODD: dict[str, tuple[Callable[[nn.Module, Any], None], str]] = {
    "a sparse buffer": (
        of_buffer(torch.eye(3).to_sparse()),
        "the buffer kept (a tensor of layout sparse_coo)",
    ),
    "a wide complex buffer": (of_buffer(torch.zeros(2, dtype=torch.complex128)), "a tensor of complex128"),
    "an object in a group": (of_group(Odd()), "'kept' of a group (a Odd)"),
    "a function in a group": (of_group(print), "'kept' of a group"),
    "an object in a state": (of_state(Odd()), "the state of a parameter (a Odd)"),
    "no state_dict": (
        without_state_dict(NotImplementedError("gather it first")),
        "raises NotImplementedError: gather it first",
    ),
    "a state_dict that asserts": (
        without_state_dict(AssertionError("one group")),
        "AssertionError: one group",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_saved_is_told_at_the_start_and_once_and_left_out(tmp_path: Path, kind: str) -> None:
    change, words = ODD[kind]
    made = Saving(tmp_path, change=change)
    (told,) = made.warnings
    assert words in told
    assert told.startswith("checkpoints are without ")
    made.save()
    made.saver.save()
    assert made.warnings == [told]
    assert load(made.folder).states[0].version == 0
    made.close()


def test_what_turns_out_later_to_be_odd_is_told_then_and_the_rest_saved(tmp_path: Path) -> None:
    made = Saving(tmp_path)
    made.save()
    of_state(Odd())(made.model, made.optimizer)
    made.bench.step()
    made.save()
    made.save()
    (told,) = made.warnings
    assert "the state of a parameter (a Odd)" in told
    assert len(load(made.folder).optimizer["state"]) == len(made.optimizer.state) - 1
    made.close()


def test_a_peer_that_ends_in_the_middle_of_a_checkpoint_does_not_wait_for_it(saving: Saving) -> None:
    saving.ask()
    saving.saver.close()
    assert not list(saving.folder.glob("state*"))


# ---- disks that refuse, states that tear


def test_a_disk_that_refuses_is_told_and_training_goes_on(tmp_path: Path) -> None:
    made = Saving(tmp_path)
    made.folder.write_text("a file in the place of the folder")
    made.save()
    (warned,) = made.warnings
    assert warned.startswith("no checkpoint was written: cannot write the checkpoint")
    with pytest.raises(EnvironmentFault, match="cannot write the checkpoint"):
        made.saver.save()
    made.folder.unlink()
    made.saver.save()
    assert load(made.folder).inner_steps == 0
    made.close()


def test_who_waits_for_a_checkpoint_hears_of_a_state_that_was_torn_meanwhile(saving: Saving) -> None:
    """The one before it stays; nothing is given away."""
    saving.saver.save()
    (path,) = saving.folder.iterdir()
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["p2p_co2.tensors.outer.step"], "take_piece_", fail)
        with pytest.raises(EnvironmentFault, match="in its middle"):
            saving.others_move(0, by=100.0)
    with pytest.raises(EnvironmentFault, match="in its middle"):
        asyncio.run(saving.bench.ledger.export(0))
    with pytest.raises(EnvironmentFault, match="in its middle"):
        saving.saver.save()
    (saved,) = saving.folder.glob("state-*")
    assert (saved, saved.read_bytes()) == (path, content)


def test_a_save_that_was_interrupted_is_awaited_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the end of a checkpoint is awaited, and the one at leaving: they share a file."""
    made = Saving(tmp_path)
    copy, begun, alone = saver_module.ShareQueue.copy, saver_module.Saving.__init__, []

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(saver_module.ShareQueue, "copy", copy)
        raise KeyboardInterrupt

    monkeypatch.setattr(saver_module.ShareQueue, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.saver.save()
    first = made.saver.under_way
    assert first is not None

    def begin(self: checkpoint.Saving, *arguments: Any) -> None:
        alone.append(first.done())
        begun(self, *arguments)

    made.train()
    monkeypatch.setattr(saver_module.Saving, "__init__", begin)
    made.saver.save()
    assert alone[-1] is True
    assert all(
        map(torch.equal, moments_of(load(made.folder).optimizer), moments_of(made.optimizer.state_dict()))
    )
    made.close()
