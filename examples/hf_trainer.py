"""A ``transformers.Trainer`` in a swarm: the callback is the one line. A small GPT-2 learns Python's text.

    p2p-co2 seed examples/own_loop.toml            # prints a ticket
    python examples/hf_trainer.py TICKET           # in as many terminals, on as many machines, as you like

Needs ``pip install '.[transformers]'`` in a clone of p2p-co2. When the run is over the Trainer stops, and its
model holds what all peers have agreed on. Nothing is downloaded: the model is made from a config, and the
tokenizer is trained here. Peers need the same one: in a run of your own, send its files with the ticket.
"""

from __future__ import annotations

import os
import sys

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import p2p_co2 as co2
from p2p_co2.recipes.corpus import embedded_corpus

CONTEXT = 64


def trained_tokenizer(text: str, folder: str) -> GPT2TokenizerFast:
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator([text], vocab_size=512, special_tokens=["<|endoftext|>"], show_progress=False)
    os.makedirs(folder, exist_ok=True)
    trainer.save_model(folder)
    return GPT2TokenizerFast.from_pretrained(folder, pad_token="<|endoftext|>")


def main(ticket: str | None = None, out: str = f"runs/hf-trainer-{os.getpid()}") -> None:
    torch.set_num_threads(1)  # several peers may share this machine, and steps this small need no more
    text = bytes(embedded_corpus(200_000).train.tolist()).decode(errors="replace")
    tokenizer = trained_tokenizer(text, out)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    blocks = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    held_out, blocks = blocks[:16], blocks[16:]

    set_seed(0)  # every peer starts from the same parameters
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            out, max_steps=1_000_000, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            learning_rate=2e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=10,
            save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
        processing_class=tokenizer,
        callbacks=[co2.integrations.transformers.SwarmCallback(ticket)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    with torch.no_grad():
        loss = trainer.model.eval()(input_ids=held_out, labels=held_out).loss
    print(
        f"{trainer.state.global_step} inner steps, loss of the agreed parameters {loss.item():.4f}, in {out}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
