"""The examples of transformers, accelerate, PEFT and Lightning run as they stand, in a real swarm."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = re.compile(
    r"^(\d+) inner steps, loss of the agreed parameters (\d+\.\d+)(?:, in (\S+))?$", re.MULTILINE
)
LINE = torch.tensor([list(b"import sys\n" * 5)])


def run(example: str, local_swarm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[float, Path]:
    """The loss on which both agree, and where the first has put its model."""
    monkeypatch.chdir(folder)
    swarm = local_swarm(peers=2, rounds=8)
    outputs = swarm.run([sys.executable, str(EXAMPLES / example), swarm.ticket], timeout_s=400)
    found = [SAYS.findall(output) for output in outputs]
    assert all(len(one) == 1 for one in found), outputs
    (steps, loss, out), (other_steps, other_loss, other_out) = (one[0] for one in found)
    assert min(int(steps), int(other_steps)) > 0
    assert loss == other_loss
    assert out != other_out or not out
    return float(loss), folder / out


def loss_of(model: Any, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


def check_trainer(loss: float, out: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    tokens = tokenizer("import sys\n" * 20, return_tensors="pt")["input_ids"][:, :64]
    assert len(tokenizer) == model.config.vocab_size == 512
    assert max(loss, loss_of(model, tokens)) < 6.2  # 6.24 is the logarithm of the vocabulary


def check_accelerate(loss: float, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(out)
    assert max(loss, loss_of(model, LINE)) < 5.4  # 5.55 is that of 256 bytes


def check_adapters(loss: float, out: Path) -> None:
    base = runpy.run_path(str(EXAMPLES / "lora.py"))["frozen_base"]
    assert loss_of(PeftModel.from_pretrained(base(), out), LINE) < loss_of(base(), LINE)
    assert (out / "adapter_model.safetensors").stat().st_size < 100_000  # of a base of half a megabyte


def check_lightning(loss: float, out: Path) -> None:
    assert loss < 7  # 6.9 is the variance of what is to be learned


@pytest.mark.parametrize(
    ("example", "check"),
    [
        ("hf_trainer.py", check_trainer), ("accelerate_loop.py", check_accelerate),
        ("lora.py", check_adapters), ("lightning_loop.py", check_lightning),
    ],
)  # fmt: skip
def test_an_example_runs_as_it_stands(
    example: str, check: Callable[[float, Path], None], local_swarm: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    check(*run(example, local_swarm, tmp_path, monkeypatch))
