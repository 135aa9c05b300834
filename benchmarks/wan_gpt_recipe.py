"""The built-in byte GPT on its embedded text, in steps of a fixed length: for comparing losses over lines.

Four peers share two cores here, so a step takes ``step_s`` whether or not its computing is done sooner, as in
``wan_recipe``. Held-out loss is taken over few windows, so that measuring it often costs little; the same
windows for everybody.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from p2p_co2.recipes import Recipe, load_recipe
from p2p_co2.recipes.byte_gpt import next_token_loss
from p2p_co2.recipes.corpus import embedded_corpus

WINDOWS, CONTEXT = 48, 64


def make(step_s: float = 0.5, batch: int = 8, learning_rate: float = 2e-3) -> Recipe:
    """1.27 million parameters; ``batch`` sequences of 64 bytes per step."""
    made = load_recipe("byte-gpt", {"batch": batch, "learning_rate": learning_rate}, 0)
    tokens = embedded_corpus().held_out
    starts = torch.randint(len(tokens) - CONTEXT, (WINDOWS, 1), generator=torch.Generator().manual_seed(0))
    windows = tokens[starts + torch.arange(CONTEXT + 1)].long()
    ends_at = [0.0]

    def loss(model: nn.Module, of: tuple[Tensor, Tensor]) -> Tensor:
        ends_at[0] = max(ends_at[0] + step_s, time.monotonic() - step_s)
        time.sleep(max(0.0, ends_at[0] - time.monotonic()))
        return next_token_loss(model, of)

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return float(next_token_loss(model, (windows[:, :-1], windows[:, 1:])))

    return replace(made, loss=loss, held_out=held_out)
