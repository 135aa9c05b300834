"""A small GPT over bytes (or other small vocabularies) that learns visibly within a minute on one CPU core.

After karpathy/nanochat: no biases, no learned norms, rotary positions, norm on queries and keys, squared
ReLU, projections back into the residual stream start at zero, and the head is the embedding. One addition:
each position starts with a learned share of the embedding before it (a "smear"), so pairs of bytes are seen
before attention has learned anything. The model is causal. There is no key-value cache, so sampling computes
the whole context for each byte."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shape(NamedTuple):
    """What decides the parameters. ``width`` is a multiple of ``heads``, and each head's width is even."""

    layers: int = 4
    width: int = 160
    heads: int = 4
    context: int = 64
    vocab_size: int = 256


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix_in = nn.Linear(width, 3 * width, bias=False, dtype=torch.float32)
        self.mix_out = nn.Linear(width, width, bias=False, dtype=torch.float32)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False, dtype=torch.float32)
        self.mlp_out = nn.Linear(4 * width, width, bias=False, dtype=torch.float32)
        bound = (3.0 / width) ** 0.5  # uniform with the deviation width ** -0.5
        for layer in (self.mix_in, self.mlp_in):
            nn.init.uniform_(layer.weight, -bound, bound)
        for layer in (self.mix_out, self.mlp_out):
            nn.init.zeros_(layer.weight)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``hidden`` [B, T, width]; ``cos``, ``sin`` [T, width / heads / 2]."""
        batch, length, width = hidden.shape
        mixed = self.mix_in(_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        query, key = _norm(_rotate(query, cos, sin)), _norm(_rotate(key, cos, sin))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix_out(mixed.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = self.mlp_out(F.relu(self.mlp_in(_norm(hidden))).square())
        return hidden + changed


class ByteGPT(nn.Module):
    """``forward``: token ids int64 [B, T], T at most ``shape.context``, to logits [B, T, vocab_size]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.width, dtype=torch.float32)
        nn.init.normal_(self.embedding.weight, std=0.02)
        device = self.embedding.weight.device
        self.smear = nn.Parameter(torch.full((shape.width,), 0.5, dtype=torch.float32, device=device))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        half = shape.width // shape.heads // 2
        places = torch.arange(shape.context, dtype=torch.float32, device=device)
        angles = places[:, None] * 1000.0 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = _norm(self.embedding(tokens))
        hidden = hidden + self.smear * F.pad(hidden[:, :-1], (0, 0, 1, 0))
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return F.linear(_norm(hidden), self.embedding.weight)


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in nats per token; ``batch``: inputs and targets, int64 [B, T], on any device."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def sample_text(model: nn.Module, prompt: str, length: int, seed: int, temperature: float = 0.8) -> str:
    """``prompt`` and ``length`` more bytes drawn from the model, as text (bytes that are no UTF-8 become
    U+FFFD).

    The same seed and parameters give the same text on the same kind of machine. ``temperature`` above 0;
    below 1 prefers likely bytes.
    """
    assert isinstance(model, ByteGPT)
    device = model.embedding.weight.device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    text = list(prompt.encode()) or [ord("\n")]
    for _ in range(length):
        context = torch.tensor([text[-model.shape.context :]], dtype=torch.int64, device=device)
        chances = (model(context)[0, -1].float().cpu() / temperature).softmax(0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")


def _norm(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864): [B, heads, T, even] turned pairwise by the position's
    angle."""
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
