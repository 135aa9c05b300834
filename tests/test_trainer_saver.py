"""Checkpoints beside training: one moment, whatever happens while they are written; and disks that refuse."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_co2.checkpoint import Checkpoint, load
from p2p_co2.codec import get_codec
from p2p_co2.config import PeerConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.fragments.plan import plan_fragments
from p2p_co2.node.ledger import AgreedMean, PartWeights
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer import saver as saver_module
from p2p_co2.trainer.offered import Rebase
from p2p_co2.trainer.plan import Plan
from p2p_co2.trainer.saver import Saver
from tests.test_trainer import Bench

BLOCK = 128


class Saving:
    """A bench whose every step is followed by a checkpoint."""

    def __init__(self, folder: Path, rule: str = "keep") -> None:
        self.bench = Bench(rule=rule, lr=1.0, momentum=0.0, gap_penalty=False)
        model = self.bench.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.train()
        config = PeerConfig(folder=folder, checkpoint_every_s=1e-9)
        plan = plan_fragments(model, 2)
        self.plan = Plan(self.bench.run, config, plan, model, self.optimizer, None, (0.1,))
        wire = self.bench.wire
        self.saver = Saver(self.plan, self.bench.ledger, self.bench.sync, wire.report)
        self.folder = folder / "checkpoint"

    def train(self) -> None:
        for parameter in self.bench.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def ask(self) -> None:
        """Have a moment among the outcomes."""
        self.saver.keep_up()  # the first time, pages are made
        self.finish()
        self.bench.ledger.agreed()  # the worker has told it

    def finish(self) -> None:
        self.saver._thread.submit(lambda: None).result()
        self.saver.keep_up()

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        """The thread that writes gets nowhere while the block runs."""
        go_on = threading.Event()
        self.saver._thread.submit(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    def others_move(self, fragment: int, by: float) -> None:
        """A round without us commits."""
        blocks = get_codec("fp32").blocks(self.plan.fragments.fragments[fragment].numel)
        mean = torch.full((blocks * BLOCK,), -by).numpy().tobytes()
        parts = (PartWeights(0, blocks, {"other": 1.0}),)
        start = self.bench.ledger._digests[fragment]  # not asked of the worker, which a test may hold
        asyncio.run(self.bench.ledger.commit(AgreedMean(fragment, 1, 0, start, mean, parts)))

    def live(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.bench.model.named_parameters()}

    def close(self) -> None:
        self.saver.close()
        self.bench.ledger.close()


@pytest.fixture(params=["keep", "co2"])
def saving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Saving]:
    made = Saving(tmp_path, request.param)
    yield made
    made.close()


def offered_by(made: Saving, saved: Checkpoint) -> list[float]:
    """What a resumed peer would offer of each fragment: the mean of its outer gradient."""
    offers = []
    for fragment, state in zip(made.plan.fragments.fragments, saved.states, strict=True):
        live = torch.cat([saved.params[p.name].reshape(-1)[p.start : p.stop] for p in fragment.slices])
        offers.append(float((state.params - live).mean()))
    return offers


def test_training_goes_on_while_a_checkpoint_of_one_moment_is_written(saving: Saving) -> None:
    before, moments = saving.live(), [state["exp_avg"].clone() for state in saving.optimizer.state.values()]
    saving.ask()
    with saving.slow_disk():
        saving.bench.sync.take_outcomes()
        saving.train()
        saving.bench.step()
        assert not list(saving.folder.glob("state-*"))
    saving.finish()
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [0, 0]
    for name, values in before.items():
        assert torch.equal(saved.params[name], values), name
    for index, values in enumerate(moments):
        assert torch.equal(saved.optimizer["state"][index]["exp_avg"], values)
    assert saved.inner_steps == 0
    (event,) = saving.bench.wire.seen(ev.CheckpointSaved)
    assert event["versions"] == (0, 0)


def test_a_round_that_commits_before_training_comes_by_is_in_the_checkpoint(saving: Saving) -> None:
    """It neither waits for the end of a step nor takes memory for a second state."""
    saving.ask()
    old = saving.bench.ledger._fragments[0].state
    saving.others_move(0, by=100.0)
    assert saving.bench.ledger._fragments[0].state.momentum.data_ptr() == old.momentum.data_ptr()
    saving.bench.sync.take_outcomes()
    saving.finish()
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [1, 0]
    assert offered_by(saving, saved) == pytest.approx([0.1, 0.1], abs=1e-4)
    assert len(saving.bench.wire.seen(ev.CheckpointSaved)) == 1


def test_of_two_moments_that_wait_a_round_has_to_wait_for_neither(saving: Saving) -> None:
    """A checkpoint was due, and then another was asked for. Only the last moment was taken back: the round
    waited a second for the other, and took memory for a second state."""
    saving.ask()
    saving.bench.ledger.submit_moment().result()
    old = saving.bench.ledger._fragments[0].state
    saving.others_move(0, by=100.0)
    assert saving.bench.ledger._fragments[0].state.momentum.data_ptr() == old.momentum.data_ptr()
    saving.bench.sync.take_outcomes()
    saving.finish()
    assert [state.version for state in load(saving.folder).states] == [1, 0]
    assert len(saving.bench.wire.seen(ev.CheckpointSaved)) == 1


def test_who_waits_for_a_checkpoint_leaves_the_processor_to_the_round_that_took_its_moment_back(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for the next one all the time held a commit of 0.11 s up for 0.2 to 1 s."""
    ledger, sync = saving.bench.ledger, saving.bench.sync
    fragment, looks = ledger._fragments[0], 0
    may_tell, may_step, is_asked, steps = (threading.Event() for _ in range(4))
    take_step, take_outcomes, agreed = fragment._take_step, sync.take_outcomes, ledger.agreed

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 20:
            may_step.set()
        return take_outcomes()

    def step(*args: Any) -> Any:
        steps.set()
        may_step.wait()
        return take_step(*args)

    def wait() -> Any:
        may_step.set()
        return agreed()

    monkeypatch.setattr(fragment, "_take_step", step)
    monkeypatch.setattr(sync, "take_outcomes", look)
    monkeypatch.setattr(ledger, "agreed", wait)
    ledger._worker.submit(may_tell.wait)
    submit_moment = ledger.submit_moment
    others = threading.Thread(target=saving.others_move, args=(0, 100.0))

    def submit() -> Any:
        """The round comes right behind the moment."""
        told = submit_moment()
        others.start()
        is_asked.wait()
        may_tell.set()
        steps.wait()
        return told

    async def ask(work: Any) -> Any:
        future = asyncio.get_running_loop().run_in_executor(ledger._worker, work)
        is_asked.set()
        return await future

    monkeypatch.setattr(ledger, "_ask", ask)
    monkeypatch.setattr(ledger, "submit_moment", submit)
    saving.saver.save()
    others.join()
    assert looks < 20
    assert [state.version for state in load(saving.folder).states] == [1, 0]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_state_that_is_taken_over_before_training_comes_by_is_in_the_checkpoint(
    saving: Saving, is_resumed: bool
) -> None:
    other = Saving(saving.folder.parent / "other", saving.bench.run.outer.rule)
    other.others_move(1, by=100.0)
    agreed, data = asyncio.run(other.bench.ledger.export(1))
    other.close()
    saving.bench.ledger._fragments[1].is_resumed = is_resumed
    saving.ask()
    asyncio.run(saving.bench.ledger.adopt(1, bytes(data), agreed))
    saving.bench.sync.take_outcomes()
    saving.finish()
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [0, 1]
    assert offered_by(saving, saved) == pytest.approx([0.1, 0.0 if is_resumed else 0.1], abs=1e-4)


def test_who_waits_for_a_checkpoint_hears_of_a_state_that_was_torn_meanwhile(saving: Saving) -> None:
    saving.ask()
    fragment = saving.bench.ledger._fragments[0]

    def fail(*_: object) -> None:
        raise MemoryError

    fragment._take_step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(EnvironmentFault, match="in its middle"):
        saving.others_move(0, by=100.0)
    with pytest.raises(EnvironmentFault, match="in its middle"):
        saving.saver.save()
    assert not list(saving.folder.glob("state-*"))


def test_a_round_has_the_checkpoint_take_the_state_that_it_overwrites(saving: Saving) -> None:
    """So a disk that is slow costs no second copy of what commits meanwhile."""
    before = saving.live()
    saving.ask()
    old = saving.bench.ledger._fragments[0].state
    with saving.slow_disk():
        saving.bench.sync.take_outcomes()
        saving.others_move(0, by=100.0)
        new = saving.bench.ledger._fragments[0].state
    assert new.momentum.data_ptr() == old.momentum.data_ptr()
    saving.finish()
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [0, 0]
    assert float(saved.states[0].momentum.abs().max()) == 0.0
    for name, values in before.items():
        assert torch.equal(saved.params[name], values), name
    assert saving.bench.ledger.agreed()[0].version == 1


def test_a_disk_that_refuses_a_round_that_came_by_is_told_and_the_round_commits(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving.ask()

    def fail(file: int, pieces: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    with saving.slow_disk():
        saving.bench.sync.take_outcomes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            saving.others_move(0, by=100.0)
        assert saving.bench.ledger.agreed()[0].version == 1
    saving.finish()
    (warned,) = saving.bench.wire.seen(ev.Warned)
    assert "the disk is full" in warned["text"]
    assert not list(saving.folder.glob("state-*"))
    saving.saver.save()
    assert [state.version for state in load(saving.folder).states] == [1, 0]


def test_a_state_that_was_taken_in_part_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends in the round that takes it: what it had begun must not be begun again, on top."""
    made = Saving(tmp_path, "co2")
    for _ in range(4):
        made.bench.step()  # both fragments are offered: the saved parameters have to take that back
    made.bench.sync.take_outcomes()
    made.ask()

    def fail(rebase: Rebase, at: slice) -> Tensor:
        raise MemoryError

    with made.slow_disk():
        made.bench.sync.take_outcomes()
        with monkeypatch.context() as patch:
            patch.setattr(Rebase, "addend", fail)
            with pytest.raises(MemoryError):
                made.others_move(0, by=100.0)
    made.finish()
    assert not list(made.folder.glob("state-*"))
    (warned,) = made.bench.wire.seen(ev.Warned)
    assert "not taken whole" in warned["text"]
    made.saver.save()
    expected = [0.1 - 4.0] * 2
    assert offered_by(made, load(made.folder)) == pytest.approx(expected, abs=1e-2)
    made.close()


def test_what_had_committed_by_then_is_in_the_checkpoint_and_in_its_live_parameters(saving: Saving) -> None:
    saving.others_move(0, by=100.0)
    saving.ask()
    saving.bench.sync.take_outcomes()
    saving.finish()
    saved = load(saving.folder)
    assert [state.version for state in saved.states] == [1, 0]
    assert offered_by(saving, saved) == pytest.approx([0.1, 0.1], abs=1e-4)  # its own step, still


def test_work_in_flight_is_in_the_checkpoint_under_every_rule(saving: Saving) -> None:
    for _ in range(4):  # both fragments are offered
        saving.bench.step()
    saving.bench.sync.take_outcomes()  # under "co2" the offered work leaves the live parameters
    saving.saver.save()
    expected = [0.1 - 4.0] * 2  # one step of AdamW down from the start, and 4 up
    assert offered_by(saving, load(saving.folder)) == pytest.approx(expected, abs=1e-2)


def test_a_save_that_was_interrupted_is_awaited_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the end of a checkpoint is awaited, and the one at leaving: they share a file."""
    made = Saving(tmp_path)
    made.ask()
    go_on, alone = threading.Event(), []
    made.saver._thread.submit(go_on.wait)
    made.bench.sync.take_outcomes()
    first = made.saver._under_way
    assert first is not None
    end = first.result

    def interrupted() -> None:
        monkeypatch.setattr(first, "result", lambda: (go_on.set(), end()))
        raise KeyboardInterrupt

    def begin(folder: Path, checkpoint: Checkpoint) -> saver_module.Saving:
        alone.append(first.done())
        begun = checkpoint_saving(folder, checkpoint)
        go_on.set()
        return begun

    checkpoint_saving = saver_module.Saving
    monkeypatch.setattr(first, "result", interrupted)
    monkeypatch.setattr(saver_module, "Saving", begin)
    with pytest.raises(KeyboardInterrupt):
        made.saver.save()
    made.train()
    made.saver.save()
    assert alone == [True]
    for name, values in made.live().items():
        assert torch.equal(load(made.folder).params[name], values), name
    made.close()
