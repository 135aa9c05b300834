"""Checkpoints: what they hold whatever happens while they are written, that none ends training, and disks
that refuse. Resuming where the program changed: the agreed state comes back or one error says why; the peer's
own comes back where it fits, or one line says that it does not."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.node.state import PeerState
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, PartWeights
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint import folder as checkpoint
from p2p_co2.tensors.checkpoint.folder import Checkpoint, load, save
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.names import named_buffers
from p2p_co2.trainer import resuming
from p2p_co2.trainer import saver as saver_module
from p2p_co2.trainer.exchanged_model import TrainingSetup
from p2p_co2.trainer.rates import LearningRates
from p2p_co2.trainer.saver import Saver
from p2p_co2.wire.identity import PeerId
from tests.trainer_bench import Bench

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
        self.plan = TrainingSetup(self.bench.run, config, fragments, self.model, self.optimizer)
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


def test_a_checkpoint_knows_its_own_past_unless_the_state_has_just_become_another(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    ledger, start = saving.bench.ledger, saving.bench.ledger.agreed()
    state = PeerState(PeerId("me"), start, ledger.past)
    for fragment in range(2):
        saving.others_move(fragment, 1.0)
    state.move(0, ledger.agreed()[0], [PeerId("other")])  # of the other one the network has yet to hear
    saving.save()
    saving.close()
    saved = load(saving.folder)
    assert saved.past == [{0: start[0].digest, 1: ledger.past[0][1]}, {}]

    again = Saving(tmp_path / "again")
    again.bench.ledger.restore({}, saved.past)
    held = [AgreedVersion(1, ledger.past[0][1]), AgreedVersion(1, b"another")]
    resumed = PeerState(PeerId("me"), held, again.bench.ledger.past)
    assert resumed.past(0) == saved.past[0]  # as if it had not been started again
    assert resumed.past(1) == {1: b"another"}
    again.close()


def test_what_is_saved_is_what_all_agreed_on_and_the_own_optimizer_and_nothing_frozen(tmp_path: Path) -> None:
    """Bytes by hand: 8 for each parameter that is trained, 8 for its optimizer, none for a frozen one."""

    def freeze(model: nn.Module, optimizer: Any) -> None:
        model.register_parameter("base", nn.Parameter(torch.zeros(1000, 1000), requires_grad=False))

    made = Saving(tmp_path, change=freeze)
    made.save()
    (path,) = made.folder.iterdir()
    trained = sum(parameter.numel() for parameter in made.optimizer.param_groups[0]["params"])
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 16 * trained < size < 16 * trained + 5000
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
    made.saver.began_at = time.monotonic() - 1700.0  # the first is due at once
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
    "an object in a group": (of_group(Odd()), "'kept' of a group (a Odd)"),
    "no state_dict": (
        without_state_dict(NotImplementedError("gather it first")),
        "raises NotImplementedError: gather it first",
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
    content = (path / "manifest.json").read_bytes()

    def fail(*_: object) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["p2p_co2.tensors.outer"], "take_piece_", fail)
        with pytest.raises(EnvironmentFault, match="in its middle"):
            saving.others_move(0, by=100.0)
    with pytest.raises(EnvironmentFault, match="in its middle"):
        asyncio.run(saving.bench.ledger.export(0))
    with pytest.raises(EnvironmentFault, match="in its middle"):
        saving.saver.save()
    (saved,) = saving.folder.glob("state-*")
    assert (saved, (saved / "manifest.json").read_bytes()) == (path, content)


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


# ---- resuming: what fits comes back

RUN = RunConfig(name="tested", fragments=2)
Maker = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.norm(self.first(inputs))))


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.1)


def two_groups(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    return Adam([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.1)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        dtype = next(model.parameters()).dtype
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def write(folder: Path, model: nn.Module, optimizer: Optimizer) -> Checkpoint:
    """As the saver does. The agreed parameters are the live ones plus 1."""
    plan = plan_fragments(model, RUN.fragments)
    live = LiveParameters(model, plan)
    written = Checkpoint(
        run_config_json=RUN.canonical_bytes().decode(),
        plan_digest=plan.digest,
        states=tuple(outer.init(live.snapshot(part.index).add_(1.0)) for part in plan.fragments),
        buffers=named_buffers(model, persistent=True),
        optimizer=optimizer.state_dict(),
        position=2.0,
        inner_steps=3,
        tokens=30,
        inner=resuming.inner_of(optimizer, model),
        parameters=resuming.shapes_of(model),
    )
    save(folder, written)
    return written


def resume(folder: Path, model: nn.Module, optimizer: Optimizer, keeps_rate: bool = False) -> list[str]:
    """What did not come back. Raises as ``start``."""
    saved, plan = load(folder), plan_fragments(model, RUN.fragments)
    resuming.check(saved, RUN, model, plan, "here")
    return resuming.restore(saved, LiveParameters(model, plan), model, optimizer, keeps_rate)


def same_states(left: Optimizer, right: Optimizer) -> bool:
    return repr(left.state_dict()) == repr(right.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        adam,
        two_groups,
        lambda model: AdamW(model.parameters(), lr=0.1, amsgrad=True),
        lambda model: Adam(model.parameters(), lr=torch.tensor(0.1)),
        lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
        lambda model: torch.optim.Adafactor(model.parameters()),
    ],
    ids=["Adam", "groups", "AMSGrad", "tensor-lr", "momentum", "SGD", "LBFGS", "Adafactor"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_the_inner_optimizer_that_was_saved(
    tmp_path: Path, make: Maker, dtype: torch.dtype
) -> None:
    model = Net().to(dtype)
    optimizer = make(model)

    def closure() -> Tensor:
        loss = model(torch.rand(8, 3).to(dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        return torch.as_tensor(loss)

    for _ in range(2):
        optimizer.step(closure)
    written = write(tmp_path, model, optimizer)
    again = Net().to(dtype)
    other = make(again)
    assert resume(tmp_path, again, other) == []
    assert same_states(optimizer, other)
    for (name, was), now in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(now, (was.float() + 1.0).to(dtype), msg=name)  # the agreed ones
    assert torch.equal(model.norm.running_var, again.norm.running_var)
    assert written.inner_steps == load(tmp_path).inner_steps


class Wide(SGD):
    """Keeps its state wider, and narrower, than its parameters, as quantised optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["wide"] = torch.full_like(parameter, 1 / 3, dtype=torch.float64)
            state["codes"] = torch.full_like(parameter, 200, dtype=torch.uint8)


def test_a_state_keeps_its_dtype_whatever_its_parameters_is(tmp_path: Path) -> None:
    model = Net()
    optimizer = Wide(model.parameters())
    optimizer.step()
    write(tmp_path, model, optimizer)
    again = Net()
    other = Wide(again.parameters())
    assert resume(tmp_path, again, other) == []
    assert same_states(optimizer, other)


@pytest.mark.parametrize("was_wrapped", [True, False])
def test_a_compiled_model_and_a_plain_one_go_on_from_each_other(tmp_path: Path, was_wrapped: bool) -> None:
    model, again = Net(), Net()
    saved, resumed = (
        cast(nn.Module, torch.compile(one, backend="eager")) if is_wrapped else one
        for one, is_wrapped in ((model, was_wrapped), (again, not was_wrapped))
    )
    optimizer, other = adam(saved), adam(resumed)
    train(model, optimizer)
    write(tmp_path, saved, optimizer)
    assert resume(tmp_path, resumed, other) == []
    assert same_states(optimizer, other)
    assert torch.equal(model.norm.running_mean, again.norm.running_mean)


def test_frozen_parameters_stay_where_the_model_came_from(tmp_path: Path) -> None:
    model, again = Net(), Net()
    for net in (model, again):
        net.first.requires_grad_(False)
    with torch.no_grad():
        again.first.weight.fill_(7.0)
    optimizer, other = adam(model), adam(again)
    train(model, optimizer)
    write(tmp_path, model, optimizer)
    assert resume(tmp_path, again, other) == []
    assert float(again.first.weight.min()) == float(again.first.weight.max()) == 7.0


# ---- the learning rate


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: ExponentialLR(optimizer, 0.5),
        lambda optimizer: StepLR(optimizer, 2, 0.5),
        lambda optimizer: CosineAnnealingLR(optimizer, 20),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: OneCycleLR(optimizer, 1.0, 20),
    ],
    ids=["Exponential", "Step", "Cosine", "Lambda", "OneCycle"],
)
def test_a_scheduler_goes_on_from_the_rate_that_was_saved(tmp_path: Path, make: Any) -> None:
    expected, found, told = rates_after_resume(tmp_path, make, 3, kept=True)
    assert found == pytest.approx(expected)
    assert not told


def rates_after_resume(
    folder: Path, make: Any, steps_before: int, kept: bool
) -> tuple[list[float], list[float], list[str]]:
    """12 rates that steps train with: as they would be without a stop, and after it; what is said. ``kept``:
    the scheduler's own state is loaded once the peer has started."""
    expected, found, told = list[float](), list[float](), list[str]()
    model = Net()
    optimizer = adam(model)
    scheduler = make(optimizer)
    for step in range(steps_before + 12):
        if step == steps_before:
            write(folder, model, optimizer)
            state = scheduler.state_dict()
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    model = Net()
    optimizer = adam(model)
    scheduler = make(optimizer)
    rates = LearningRates(optimizer, None, told.append)
    assert resume(folder, model, optimizer) == []
    rates.resumed()
    if kept:
        scheduler.load_state_dict(state)
    for _ in range(12):
        optimizer.step()
        scheduler.step()
        rates.set(2.0)
        found.append(optimizer.param_groups[0]["lr"])
    return expected[steps_before:], found, told


def warm(optimizer: Optimizer) -> Any:
    return LinearLR(optimizer, 0.1, total_iters=5)


def warm_then_fall(optimizer: Optimizer) -> Any:
    return SequentialLR(optimizer, [warm(optimizer), CosineAnnealingLR(optimizer, 20)], [5])


@pytest.mark.parametrize("make", [warm, warm_then_fall, lambda one: ConstantLR(one, 0.1, 5)])
@pytest.mark.parametrize("steps_before", [2, 3, 9])
def test_a_warm_up_whose_state_is_loaded_goes_on_and_one_made_anew_does_not_multiply_the_saved_rate(
    tmp_path: Path, make: Any, steps_before: int
) -> None:
    expected, found, told = rates_after_resume(tmp_path, make, steps_before, kept=True)
    assert found == pytest.approx(expected)
    assert not told
    _, found, told = rates_after_resume(tmp_path, make, steps_before, kept=False)
    assert max(found) <= 0.1 * (1 + 1e-6)
    assert len(told) <= 1
    if steps_before == 9:
        assert "load its state (scheduler.load_state_dict)" in told[0]
        assert "last_epoch=peer.inner_steps" in told[0]


def test_a_warm_up_that_names_its_rates_goes_as_high_as_it_says(tmp_path: Path) -> None:
    def make(optimizer: Optimizer) -> Any:
        return LambdaLR(optimizer, lambda step: 0.5 + step)

    expected, found, _ = rates_after_resume(tmp_path, make, 9, kept=True)
    assert found[-6:] == pytest.approx(expected[-6:])


def test_where_the_swarm_schedules_the_rate_the_programs_is_its_base(tmp_path: Path) -> None:
    model, again = Net(), Net()
    optimizer, other = adam(model), Adam(again.parameters(), lr=0.7)
    optimizer.param_groups[0]["lr"] = 1e-9  # the factor of that moment is in it
    write(tmp_path, model, optimizer)
    assert resume(tmp_path, again, other, keeps_rate=True) == []
    assert other.param_groups[0]["lr"] == 0.7


# ---- what does not fit is said


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda m: SGD(m.parameters(), lr=0.1),
            "is Adam with groups of [6] parameters, this one SGD with groups of [6]",
        ),
        (two_groups, "this one Adam with groups of [1, 5]"),
        (lambda m: Adam(list(m.parameters())[:4], lr=0.1), "this one Adam with groups of [4]"),
        (
            lambda m: Adam(list(m.parameters())[::-1], lr=0.1),
            "has first.weight (4, 3) where this one has last.bias (2,)",
        ),
        (lambda m: AdamW(m.parameters(), lr=0.1), "this one AdamW with groups of [6]"),
    ],
    ids=["class", "groups", "fewer", "order", "similar"],
)
def test_another_inner_optimizer_begins_anew_on_the_agreed_state_and_one_line_says_so(
    tmp_path: Path, make: Maker, words: str
) -> None:
    model, again = Net(), Net()
    optimizer, other = adam(model), make(again)
    train(model, optimizer)
    write(tmp_path, model, optimizer)
    (line,) = resume(tmp_path, again, other)
    assert words in line
    assert "begins anew, the agreed state does not; to keep both, pass the same optimizer" in line
    assert not other.state
    assert torch.equal(again.last.bias, model.last.bias + 1.0)
    train(again, other)  # it works


@pytest.mark.parametrize("error", [KeyError("moment"), AssertionError("moment"), OverflowError("moment")])
def test_an_optimizer_that_does_not_take_its_state_back_begins_anew(tmp_path: Path, error: Exception) -> None:
    class Refusing(Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            raise error

    model, again = Net(), Net()
    optimizer = Refusing(model.parameters())
    write(tmp_path, model, optimizer)
    (line,) = resume(tmp_path, again, Refusing(again.parameters()))
    assert f"does not take the checkpoint's ({type(error).__name__}: " in line


def test_buffers_that_do_not_fit_stay_and_are_named(tmp_path: Path) -> None:
    model, again = Net(), Net()
    model.register_buffer("shape", torch.ones(3))
    again.register_buffer("shape", torch.zeros(4))
    model.register_buffer("kind", torch.ones(2, dtype=torch.complex64))
    again.register_buffer("kind", torch.zeros(2))
    model.register_buffer("gone", torch.ones(1))
    again.register_buffer("new", torch.zeros(1))
    again.register_buffer("own", torch.zeros(1), persistent=False)
    again.register_buffer("wide", torch.zeros(1).expand(5))
    model.register_buffer("wide", torch.ones(5))
    optimizer = adam(model)
    train(model, optimizer)
    write(tmp_path, model, optimizer)
    lines = resume(tmp_path, again, adam(again))
    kept = [f"the buffer {name} stays as it is" for name in ("shape", "kind", "new", "wide")]
    assert [line.split(":")[0] for line in lines] == [
        *kept, "the checkpoint's buffer gone is none of this model",
    ]  # fmt: skip
    assert torch.equal(again.norm.running_var, model.norm.running_var)
    assert float(again.shape.sum()) == 0.0


# ---- another model, another run


def without(name: str) -> nn.Module:
    model = Net()
    model.get_parameter(name).requires_grad_(False)
    return model


def renamed() -> nn.Module:
    model = Net()
    model.head = model.last
    del model.last
    return model


def reordered() -> nn.Module:
    model = Net()
    first, model.first = model.first, nn.Identity()
    del model.first
    model.first = first
    return model


def turned() -> nn.Module:
    model = Net()
    model.first = nn.Linear(4, 3)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Net(5), r"first.weight is \(4, 3\) there and \(5, 3\) here"),
        (turned, r"first.weight is \(4, 3\) there and \(3, 4\) here"),
        (renamed, "it has no head.weight"),
        (lambda: without("first.weight"), "it has first.weight, which is not trained here"),
        (reordered, "its parameters come in another order"),
    ],
    ids=["wider", "turned", "renamed", "frozen", "reordered"],
)
def test_a_checkpoint_of_another_model_names_the_difference_and_the_ways_out(
    tmp_path: Path, make: Callable[[], nn.Module], words: str
) -> None:
    model, other = Net(), make()
    write(tmp_path, model, adam(model))
    before = {name: values.clone() for name, values in other.state_dict().items()}
    with pytest.raises(
        ConfigError, match=rf"is of another model: {words}; give another folder .*--start-over"
    ):
        resume(tmp_path, other, adam(other))
    assert all(torch.equal(before[name], values) for name, values in other.state_dict().items())


def test_a_checkpoint_of_another_run_says_so(tmp_path: Path) -> None:
    model = Net()
    other = RunConfig(name="other", fragments=2).canonical_bytes().decode()
    save(tmp_path, replace(write(tmp_path, model, adam(model)), run_config_json=other))
    with pytest.raises(ConfigError, match=r"is of another run; give another folder .*--start-over"):
        resume(tmp_path, model, adam(model))


# ---- stages


def test_a_stages_checkpoint_says_so_and_only_its_own_stage_goes_on_from_it(
    tmp_path: Path, saving: Saving
) -> None:
    saving.save()
    whole = load(saving.folder)
    assert whole.stage is None
    saving.saver.plan = replace(saving.plan, stage=1)
    saving.save()
    saved = load(saving.folder)
    assert (saved.stage, saved.holds) == (1, "stage 1")
    assert saved.parameters == whole.parameters
    plan, run, model = saving.plan.fragments, saving.bench.run, saving.model
    resuming.check(saved, run, model, plan, "here", 1)
    resuming.check(whole, run, model, plan, "here")
    for found, stage, words in (
        (saved, 0, "holds stage 1 of this run, and this peer stage 0; join with --stage 1, give another fol"),
        (saved, None, "holds stage 1 of this run, and this peer the whole model; join with --stage 1, give"),
        (whole, 0, "holds the whole model of this run, and this peer stage 0; give another folder"),
    ):
        with pytest.raises(ConfigError, match=f"here: {words}.*--start-over"):
            resuming.check(found, run, model, plan, "here", stage)
    with pytest.raises(
        ConfigError, match=r"is of stage 1 of another run; give another folder .*--start-over"
    ):
        resuming.check(saved, RUN, model, plan, "here", 1)
