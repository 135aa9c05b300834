"""What a checkpoint beside training does with its files: which memory serves again, and disks that refuse."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from p2p_co2.checkpoint import load
from p2p_co2.config import PeerConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.saver import Saver
from tests.test_trainer_saver import Saving


def test_the_memory_of_an_old_checkpoint_serves_again_but_never_a_copy_of_it(tmp_path: Path) -> None:
    made = Saving(tmp_path)
    for step in range(1, 5):
        made.bench.step()
        made.ask()
        made.bench.sync.take_outcomes()
        made.finish()
        assert (made.folder / "state.part").stat().st_size == next(made.folder.glob("state-*")).stat().st_size
        if step == 2:
            first = made.folder / "state-000000000001.safetensors"
            os.link(first, tmp_path / "copy")
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "state-000000000003.safetensors",
        "state-000000000004.safetensors",
        "state.part",
    ]
    assert load(tmp_path / "copy").inner_steps == 1
    made.bench.step()
    made.saver.save()
    assert [load(path).inner_steps for path in sorted(made.folder.iterdir())] == [4, 5]  # no spare at the end
    made.close()


@pytest.mark.parametrize("is_mapped", [True, False])
def test_who_still_reads_a_checkpoint_keeps_what_it_read(tmp_path: Path, is_mapped: bool) -> None:
    """The format's own readers map a file: it must not serve another checkpoint while they do."""
    made = Saving(tmp_path)

    def save() -> None:
        made.bench.step()
        made.ask()
        made.bench.sync.take_outcomes()
        made.finish()

    save()
    (first,) = made.folder.glob("state-*")
    mapped, before = load_file(first) if is_mapped else {}, load_file(first)["live.weight"].clone()
    with first.open("rb") as file:
        if is_mapped:
            file.close()
        content = first.read_bytes()
        for _ in range(3):
            save()
        assert len(list(made.folder.iterdir())) == 3
        assert not is_mapped or torch.equal(mapped["live.weight"], before)
        assert is_mapped or file.read() == content
    made.close()


def test_pages_for_the_first_checkpoint_are_made_before_it_is_due(tmp_path: Path) -> None:
    made = Saving(tmp_path)
    config = PeerConfig(folder=tmp_path, checkpoint_every_s=1e9)
    plan = replace(made.plan, config=config)
    saver = Saver(plan, made.bench.ledger, made.bench.sync, made.bench.wire.report)
    saver._began_at -= 2e9
    go_on = threading.Event()
    saver._thread.submit(go_on.wait)
    saver.keep_up()
    saver.keep_up()  # due, but nobody writes to a file that is still filled with zeros
    made.bench.ledger.states()
    assert made.bench.ledger.outcomes.empty()
    go_on.set()
    saver._thread.submit(lambda: None).result()
    reserved = (made.folder / "state.part").stat().st_size
    saver.save()
    (saved,) = made.folder.iterdir()
    assert reserved == pytest.approx(saved.stat().st_size, abs=5000)  # but for its header
    assert load(made.folder).inner_steps == 0
    saver.close()
    made.close()


def test_a_disk_that_refuses_is_told_and_training_goes_on(tmp_path: Path) -> None:
    made = Saving(tmp_path)
    made.folder.write_text("a file in the place of the folder")
    made.ask()
    made.bench.sync.take_outcomes()
    made.finish()
    (warned,) = made.bench.wire.seen(ev.Warned)
    assert warned["text"].startswith("no checkpoint was written: cannot write the checkpoint")
    with pytest.raises(EnvironmentFault, match="cannot write the checkpoint"):
        made.saver.save()
    made.folder.unlink()
    made.saver.save()
    assert load(made.folder).inner_steps == 0
    made.close()


def test_a_disk_that_refuses_at_the_end_of_the_writing_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Saving(tmp_path)
    made.saver.save()

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        made.bench.step()
        made.ask()
        made.bench.sync.take_outcomes()
        made.finish()
    (warned,) = made.bench.wire.seen(ev.Warned)
    assert "Input/output error" in warned["text"]
    assert [path.name for path in made.folder.iterdir()] == ["state-000000000000.safetensors"]
    made.close()
