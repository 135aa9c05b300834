"""A loop of ``accelerate``'s in a swarm: ``co2.Optimizer`` around the optimizer, and batches until the run is
over. Accumulation, bf16, clipping and the scheduler are accelerate's, as ever.

    p2p-co2 seed examples/own_loop.toml            # prints a ticket
    python examples/accelerate_loop.py TICKET      # in as many terminals, on as many machines, as you like

Needs ``pip install '.[transformers]'`` in a clone of p2p-co2. An outer step falls between two updates, never
between the micro-steps of one.
"""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import p2p_co2 as co2
from p2p_co2.recipes.corpus import embedded_corpus

CONTEXT = 64


def main(ticket: str | None = None, out: str = f"runs/accelerate-{os.getpid()}") -> None:
    torch.set_num_threads(1)  # several peers may share this machine, and steps this small need no more
    set_seed(0)  # every peer starts from the same parameters
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")

    tokens = embedded_corpus(200_000).train.long()  # a byte is a token
    blocks = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    held_out, blocks = blocks[:16], blocks[16:]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.to(accelerator.device)  # before it joins
    optimizer = co2.Optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model, run=ticket)
    swarm = optimizer.swarm
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    loader = DataLoader(blocks, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for batch in swarm.until_done(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    swarm.save_pretrained(out)
    with swarm.agreed(), torch.no_grad():
        there = held_out.to(accelerator.device)
        loss = model.eval()(input_ids=there, labels=there).loss
    print(f"{swarm.inner_steps} inner steps, loss of the agreed parameters {loss.item():.4f}, in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
