"""The laboratory's byte GPT: several models stacked on a leading dimension, trained as one computation.

Law: the models' gradients are independent; a stacked step equals separate ones to 1e-5
(tests/test_loss_table.py). Every model of a seed has the same start.
Price: 64 tokens per peer and inner step, so gradients are noisy and losses lie far above what the model can
reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from p2p_co2.recipes.corpus import Corpus

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 2
PEAK_LR, FLOOR, WARMUP_STEPS = 2e-3, 0.1, 45
HELD_OUT_WINDOWS = 512

# Fragments are contiguous in the flat vector: embeddings and head, all attention, and one MLP per block.
FRAGMENTS: tuple[tuple[tuple[str, int, int], ...], ...] = (
    (("wte", VOCAB, WIDTH), ("wpe", CONTEXT, WIDTH), ("smear", 1, WIDTH), ("head", WIDTH, VOCAB)),
    (
        ("qkv0", WIDTH, 3 * WIDTH),
        ("out0", WIDTH, WIDTH),
        ("qkv1", WIDTH, 3 * WIDTH),
        ("out1", WIDTH, WIDTH),
    ),
    (("up0", WIDTH, 4 * WIDTH), ("down0", 4 * WIDTH, WIDTH)),
    (("up1", WIDTH, 4 * WIDTH), ("down1", 4 * WIDTH, WIDTH)),
)
SHAPES = {name: (rows, columns) for fragment in FRAGMENTS for name, rows, columns in fragment}
PARAMETERS = sum(rows * columns for rows, columns in SHAPES.values())

Stacked = dict[str, Tensor]
"""Parameters of M models: name -> fp32 [M, rows, columns], contiguous."""


def start_params(seed: int, models: int) -> Stacked:
    """The same start for every model: matrices scaled by their inputs, a head of zeros, so the first loss is
    ln 256."""
    generator = torch.Generator().manual_seed(seed)
    scales = {"wte": 1.0, "wpe": 0.1, "smear": 0.0, "head": 0.0}
    params: Stacked = {}
    for name, (rows, columns) in SHAPES.items():
        scale = 0.0 if name[:-1] in {"out", "down"} else scales.get(name, rows**-0.5)
        params[name] = (torch.randn(rows, columns, generator=generator) * scale).repeat(models, 1, 1)
    return params


def losses(params: Stacked, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each model on its own windows.

    ``windows``: int64 [M, B, T + 1]. Returns fp32 [M], nats per byte.
    """
    models, batch, length = windows.shape
    length -= 1
    inputs, targets = windows[..., :-1], windows[..., 1:]
    rows = (inputs + VOCAB * torch.arange(models)[:, None, None]).flatten()
    hidden = params["wte"].view(models * VOCAB, WIDTH)[rows].view(models, batch, length, WIDTH)
    # A learned share of the embedding before, as in the product's byte GPT: pairs of bytes are seen from the
    # start.
    hidden = hidden + (0.5 + params["smear"][:, None]) * F.pad(hidden[:, :, :-1], (0, 0, 1, 0))
    hidden = (hidden + params["wpe"][:, None, :length]).view(models, batch * length, WIDTH)
    for layer in range(LAYERS):
        mixed = torch.bmm(F.layer_norm(hidden, (WIDTH,)), params[f"qkv{layer}"])
        query, key, value = mixed.view(models * batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key = F.layer_norm(query, query.shape[-1:]), F.layer_norm(key, key.shape[-1:])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(models, batch * length, WIDTH)
        hidden = hidden + torch.bmm(mixed, params[f"out{layer}"])
        mixed = F.relu(torch.bmm(F.layer_norm(hidden, (WIDTH,)), params[f"up{layer}"]))
        hidden = hidden + torch.bmm(mixed, params[f"down{layer}"])
    logits = torch.bmm(F.layer_norm(hidden, (WIDTH,)), params["head"])
    each = F.cross_entropy(logits.view(-1, VOCAB), targets.flatten(), reduction="none")
    return each.view(models, -1).mean(1)


def gradients(params: Stacked, windows: Tensor) -> list[Tensor]:
    """One gradient per tensor of ``params``; the sum over models keeps them independent."""
    return list(torch.autograd.grad(losses(params, windows).sum(), list(params.values())))


def flatten(params: Stacked, names: Sequence[str]) -> Tensor:
    """fp32 [M, n]: the named tensors, one flat vector per model."""
    return torch.cat([params[name].detach().flatten(1) for name in names], 1)


def unflatten_(params: Stacked, names: Sequence[str], flat: Tensor) -> None:
    """Write ``flat`` ([M, n]) back into the named tensors."""
    sizes = [params[name][0].numel() for name in names]
    with torch.no_grad():
        for name, piece in zip(names, flat.split(sizes, 1), strict=True):
            params[name].copy_(piece.view_as(params[name]))


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine from ``PEAK_LR`` down to ``FLOOR`` of it: the papers' schedule, the same for all
    rows."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LR * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


class Windows:
    """The text as windows of ``CONTEXT + 1`` tokens: ``step`` gives [peers, 1, CONTEXT + 1] int64, fixed by
    the seed."""

    def __init__(self, corpus: Corpus, seed: int, steps: int, peers: int) -> None:
        generator = torch.Generator().manual_seed(7919 * seed + 1)
        self._text, self._span = corpus.train, torch.arange(CONTEXT + 1)
        self._starts = torch.randint(len(self._text) - CONTEXT - 1, (steps, peers, 1, 1), generator=generator)

    def step(self, index: int) -> Tensor:
        return self._text[self._starts[index] + self._span].long()


def held_out_loss(params: Stacked, corpus: Corpus) -> float:
    """Loss of the first model on a fixed set of held-out windows, the same for all rows and seeds."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(corpus.held_out) - CONTEXT - 1, (HELD_OUT_WINDOWS, 1), generator=generator)
    windows = corpus.held_out[starts + torch.arange(CONTEXT + 1)].long()
    first = {name: tensor[:1].detach() for name, tensor in params.items()}
    with torch.no_grad():
        pieces = [losses(first, piece[None]) for piece in windows.split(32)]
    return float(torch.stack(pieces).mean())
