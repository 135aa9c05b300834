"""A recipe whose model is cut into stages, of which a peer holds one: ``recipe =
"examples/staged_recipe.py:make"`` and ``[pipeline] stages = 2`` (or 4) in the run file.

The model is a ``torch.nn.Sequential`` that learns text byte by byte: the names of its children are where it
can be cut. Each stage but the last sends one float tensor [sequences, ...] to the next. Without
``[pipeline]`` every peer trains the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_co2.recipes import Recipe, Stages
from p2p_co2.recipes.corpus import embedded_corpus

CONTEXT = 64
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Each position looks back ``reach`` positions: hidden [sequences, positions, width] to the same."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.norm = nn.LayerNorm(width)
        self.before, self.here = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        before = F.pad(normed, (0, 0, self.reach, 0))[:, : hidden.shape[1]]
        changed: Tensor = self.out(F.gelu(self.before(before) + self.here(normed)))
        return hidden + changed


def make(width: int = 64, blocks: int = 6) -> Recipe:
    """Arguments are the run file's ``[recipe_options]``."""
    model = nn.Sequential(
        nn.Embedding(256, width),
        *(Block(width, 2 ** (number % 6)) for number in range(blocks)),
        nn.Linear(width, 256),
    )
    corpus = embedded_corpus()

    def windows(text: Tensor, seed: int, batch: int) -> Iterator[Batch]:
        """Endless: bytes and the ones that follow them, int64 [batch, CONTEXT] each."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - CONTEXT, (batch, 1), generator=generator)
            window = text[starts + torch.arange(CONTEXT + 1)].long()
            yield window[:, :-1], window[:, 1:]

    def stage_input(batch: Batch) -> Batch:
        """What the first stage takes, and what the last needs beside: integers, here the targets."""
        return batch

    def stage_loss(output: Tensor, targets: Tensor) -> Tensor:
        """Of the last stage, the sum over tokens: each peer divides by how many have come back to it."""
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    def stages(count: int) -> Stages:
        """Cut points, before children of the model: [4] for two stages, [2, 4, 5] for four."""
        cuts = [1 + blocks * stage // count for stage in range(1, count)]
        return Stages.of_sequential(model, cuts, stage_input, stage_loss, side_range=(0, 256))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """Of the whole model: the mean over tokens."""
        device = next(model.parameters()).device
        return stage_loss(model(batch[0].to(device)), batch[1].to(device)) / batch[1].numel()

    def held_out(model: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(model, next(windows(corpus.held_out, 0, 64))))

    return Recipe(
        model=model,
        batches=lambda seed, batch: windows(corpus.train, seed, batch),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        held_out=held_out,
        stages=stages,
    )
