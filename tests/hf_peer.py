"""A program with a ``transformers.Trainer`` in a swarm, for ``co2.local_swarm``: accumulates, warms up,
trains in bf16 with gradient checkpointing and DataLoader workers, and is compiled in every second peer.

    python tests/hf_peer.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import p2p_co2 as co2

PEER = int(os.environ.get("P2P_CO2_PEER", "0"))
WORDS = (torch.arange(64 * 12) * 7 % 31).view(64, 12)


def gpt2(**more: Any) -> GPT2LMHeadModel:
    """Its head is its embedding."""
    torch.manual_seed(0)
    small = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, **small, **more))


class Words(torch.utils.data.Dataset[Any]):
    """Rows of words, which remembers in which order they were asked for, workers' too."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.asked = torch.zeros(1, dtype=torch.long).share_memory_()
        self.order = torch.zeros(1 << 16, dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return len(WORDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.order[self.asked] = index
        self.asked += 1
        time.sleep(self.pause_s)
        return {"input_ids": WORDS[index], "labels": WORDS[index]}


class Watch(TrainerCallback):
    """Notes at each micro-step how many steps the swarm had counted, and the rates at each step."""

    def __init__(self, swarm: Any) -> None:
        self.callback, self.met, self.rates = swarm, [], []

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.met.append((state.global_step, self.callback.swarm.inner_steps))
        self.rates.append(given["optimizer"].param_groups[0]["lr"])

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.met.append((state.global_step, self.callback.swarm.inner_steps))


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **(given | more))


TEXT = {"input_ids": WORDS[:8], "labels": WORDS[:8]}


def loss_of(model: Any, batch: dict[str, Tensor] = TEXT) -> float:
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    events = list[Any]()
    callback = co2.integrations.transformers.SwarmCallback(min_peers=2, on_event=events.append)
    watch, data, model = Watch(callback), Words(), gpt2()
    args = arguments(
        folder, max_steps=100_000, lr_scheduler_type="constant_with_warmup", warmup_steps=5, bf16=True,
        gradient_checkpointing=True, dataloader_num_workers=1, torch_compile=bool(PEER),
        torch_compile_backend="eager" if PEER else None, logging_steps=10,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback, watch])
    trainer.train()
    trainer.save_model(str(folder / "trainers"))
    callback.swarm.save_pretrained(folder / "swarms")
    kinds = {type(event).__name__: event for event in events}
    plain = gpt2()  # the Trainer's forward pass is in bf16 for good
    plain.load_state_dict(trainer.model.state_dict())
    saved = folder / "trainers", folder / "swarms"
    loaded = [loss_of(GPT2LMHeadModel.from_pretrained(one)) for one in saved]
    told = {
        "digest": kinds["PeerFinished"].digest,
        "reason": kinds["PeerFinished"].reason,
        "loss": loss_of(plain),
        "loaded": loaded,
        "steps": trainer.state.global_step,
        "inner_steps": callback.swarm.inner_steps,
        "tokens": kinds["Progress"].tokens,
        "met": watch.met,
        "rates": watch.rates[:8],
        "order": data.order[: min(int(data.asked), len(data))].tolist(),
    }
    print("told:", json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / str(PEER))
