"""Lightning's Trainer with the callback: real Trainers, a real swarm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from p2p_co2.swarm.data import Place

ROOT = Path(__file__).parent.parent

PROGRAM = textwrap.dedent('''
    import sys, torch, lightning
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import p2p_co2 as co2

    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    seen, met = [], []

    class Manual(lightning.LightningModule):
        """Two optimizers, stepped by hand, every second batch; bf16 autocast; a model in two parts."""
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        def training_step(self, batch, number):
            (inputs,) = batch
            seen.append(inputs[0, 0].item())
            loss = self.second(self.first(inputs).tanh()).square().mean()
            self.manual_backward(loss / 2)
            if number % 2:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss
        def on_train_batch_start(self, batch, number):
            if callback.swarm is not None:
                met.append((number % 2, callback.swarm.inner_steps))
        def configure_optimizers(self):
            return (torch.optim.SGD(self.first.parameters(), 0.01),
                    torch.optim.Adam(self.second.parameters(), 0.01))

    callback = co2.integrations.lightning.SwarmCallback(
        min_peers=2, evaluate=lambda model: float(model.second.weight.detach().norm()))
    inputs = torch.arange(64.0)[:, None].repeat(1, 4) / 64
    module = Manual()
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback])
    trainer.fit(module, DataLoader(TensorDataset(inputs), batch_size=8, num_workers=0))
    # Of two batches the first steps nothing, the second once, whatever the number of optimizers.
    steps = [after - before for (half, before), (_, after) in zip(met, met[1:])]
    halves = [half for half, _ in met[:-1]]
    print("met", sorted({(half, step) for half, step in zip(halves, steps)}))
    print("first", seen[:8], seen[8:16])
    print("agreed", sum(one.double().sum().item() for one in module.parameters()), callback.swarm.done)
''')  # fmt: skip


@pytest.mark.swarm
def test_two_trainers_with_optimizers_stepped_by_hand_end_with_one_model(local_swarm: Any) -> None:
    swarm = local_swarm(peers=2, rounds=4)
    (swarm.folder / "manual.py").write_text(PROGRAM)
    outputs = swarm.run([sys.executable, "-W", "ignore", str(swarm.folder / "manual.py")])
    agreed = [re.findall(r"^agreed (\S+) True$", output, re.MULTILINE) for output in outputs]
    assert agreed[0] == agreed[1] != []
    orders = [re.findall(r"^first (\[.*\]) (\[.*\])$", output, re.MULTILINE) for output in outputs]
    assert orders[0] != orders[1]  # each peer's own
    assert orders[0][0][0] != orders[0][0][1]  # another one in the second epoch
    for output in outputs:
        assert "met [(0, 0), (1, 1)]" in output


def test_without_the_library_one_line_says_what_to_install() -> None:
    program = textwrap.dedent("""
        import sys
        sys.modules["lightning"] = None
        import p2p_co2 as co2
        try:
            co2.integrations.lightning
        except co2.errors.EnvironmentFault as error:
            print(error)
    """)
    told = subprocess.run(
        [sys.executable, "-c", "import p2p_co2.errors\n" + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install '.[lightning]'" in told.stdout, told.stderr


def test_an_option_that_there_is_not_is_refused_at_once() -> None:
    from p2p_co2.integrations.lightning import SwarmCallback

    with pytest.raises(TypeError, match="did you mean upload"):
        SwarmCallback("p2pco2-x", uplod="1M")  # type: ignore[call-arg]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class FakeSwarm:
    """As the callback asks it: in no swarm."""

    done = False

    def __init__(self, first: int, said: str = "") -> None:
        self.first, self.place = first, Place(self.data_seed, said)

    def data_seed(self, epoch: int) -> int:
        return self.first + epoch

    def exchange(self, *_told: object) -> bool:
        return True

    def add(self, *_told: object) -> None:
        pass

    def leave(self, error: BaseException | None = None) -> None:
        pass

    def load_agreed(self) -> None:
        pass


class EndingSwarm(FakeSwarm):
    """Its run is over after three exchanges."""

    def __init__(self, module: torch.nn.Linear) -> None:
        super().__init__(0)
        self.module, self.exchanges, self.left_after = module, 0, list[int]()

    def exchange(self, *_told: object) -> bool:
        self.exchanges += 1
        self.done = self.exchanges == 3
        return not self.done

    def leave(self, error: BaseException | None = None) -> None:
        assert error is None
        self.left_after.append(self.exchanges)

    def load_agreed(self) -> None:
        torch.nn.init.constant_(self.module.weight, 1000.0)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_trainer_that_must_go_on_has_left_and_its_later_work_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    from p2p_co2.integrations import lightning as callbacks

    class Plain(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps_left = torch.nn.Linear(1, 1), list[bool]()

        def training_step(self, batch: Tensor) -> Any:
            self.steps_left.append(bool(swarm.left_after))
            return self.inner(batch[:, None].float()).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1.0)

    module = Plain()
    swarm = EndingSwarm(module.inner)
    monkeypatch.setattr(callbacks, "join", lambda *_given, **_named: swarm)
    lightning.Trainer(
        accelerator="cpu", max_epochs=2, min_steps=8, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callbacks.SwarmCallback()],
    ).fit(module, DataLoader(Numbers(), 4, num_workers=0))  # fmt: skip
    assert swarm.left_after == [3]
    assert module.steps_left == [False] * 3 + [True] * (len(module.steps_left) - 3)
    assert len(module.steps_left) >= 8
    assert module.inner.weight.item() < 999.0


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_each_pass_is_in_this_peers_order(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Lightning begins the first pass before training starts, and workers fetch from it at once."""
    lightning = pytest.importorskip("lightning")
    from p2p_co2.integrations import lightning as callbacks

    class Seeing(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = torch.nn.Linear(1, 1), list[int]()

        def training_step(self, batch: dict[str, Tensor]) -> Any:
            self.seen.extend(int(one) for one in batch["only"])
            return self.inner(batch["only"][:, None].float()).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    def passes(seed: int, said: str = "") -> list[int]:
        swarm = FakeSwarm(seed, said)
        monkeypatch.setattr(callbacks, "join", lambda *_given, **_named: swarm)
        lightning.seed_everything(0, verbose=False)
        module = Seeing()
        # A mapping of loaders, as Lightning takes them too.
        loaders = {"only": DataLoader(Numbers(), 4, shuffle=True, num_workers=workers)}
        lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[callbacks.SwarmCallback()],
        ).fit(module, loaders)  # fmt: skip
        return module.seen

    for seed in (5, 50):
        orders = [torch.randperm(20, generator=torch.Generator().manual_seed(seed + n)) for n in (0, 1)]
        whole = [int(one) for order in orders for one in order]
        assert passes(seed) == whole
        assert passes(seed, json.dumps([0, 0, 3, 4, None])) == whole[12:]  # came back after three batches
