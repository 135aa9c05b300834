"""LoRA adapters of ``peft``, trained by a swarm: only the adapters travel, a few percent of the model.

    p2p-co2 seed examples/own_loop.toml            # prints a ticket
    python examples/lora.py TICKET                 # in as many terminals, on as many machines, as you like

Needs ``pip install peft transformers``. The frozen base stays where it is. Peers compare theirs when they
join: one with another base is told which parameter differs. What is saved are adapters:

    PeftModel.from_pretrained(base, "runs/lora-...")
"""

from __future__ import annotations

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import p2p_co2 as co2
from p2p_co2.recipes.corpus import embedded_corpus

CONTEXT = 64


def frozen_base() -> GPT2LMHeadModel:
    """In a run of your own: the same ``from_pretrained("...")`` on every peer."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def main(ticket: str | None = None, out: str = f"runs/lora-{os.getpid()}") -> None:
    torch.set_num_threads(1)  # several peers may share this machine, and steps this small need no more
    tokens = embedded_corpus(200_000).train.long()  # a byte is a token
    blocks = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    held_out, blocks = blocks[:16], blocks[16:]
    adapters = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(frozen_base(), adapters)
    model.print_trainable_parameters()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)

    with co2.join(model, optimizer, run=ticket) as swarm:
        for batch in swarm.until_done(DataLoader(blocks, batch_size=8, shuffle=True)):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            swarm.step(loss, tokens=batch.numel())
        swarm.save_pretrained(out)
        with swarm.agreed(), torch.no_grad():
            loss = model.eval()(input_ids=held_out, labels=held_out).loss
    print(f"{swarm.inner_steps} inner steps, loss of the agreed parameters {loss.item():.4f}, in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
