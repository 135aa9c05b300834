"""A small GPT over bytes (or other small vocabularies) that learns visibly within a minute on one CPU core.

After karpathy/nanochat: no biases, no learned norms, rotary positions, norm on queries and keys, squared
ReLU. Projections back into the residual stream start at zero. The head is the embedding. One addition: each
position starts with a learned share of the embedding before it (a "smear"). So pairs of bytes are seen before
attention has learned anything. The model is causal. There is no key-value cache, so sampling computes the
whole context for each byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_co2.errors import ConfigError
from p2p_co2.recipes.stages import Stages, TiedTable


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
        query = _norm(_rotate(query, cos, sin))
        key = _norm(_rotate(key, cos, sin))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix_out(mixed.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = self.mlp_out(F.relu(self.mlp_in(_norm(hidden))).square())
        return hidden + changed


class _Body(nn.Module):
    """What the whole model and its stages share: blocks, and the angles of rotary positions."""

    embedding: nn.Embedding
    smear: nn.Parameter

    def _make_embedding(self, shape: Shape) -> None:
        self.embedding = nn.Embedding(shape.vocab_size, shape.width, dtype=torch.float32)
        _draw_table_(self.embedding.weight)
        device = self.embedding.weight.device
        self.smear = nn.Parameter(torch.full((shape.width,), 0.5, dtype=torch.float32, device=device))

    def _make_blocks(self, shape: Shape, start: int, stop: int) -> None:
        self.shape = shape
        self.blocks = nn.ModuleList()
        for number in range(start, stop):  # which a stage calls as the whole model does
            self.blocks.add_module(str(number), Block(shape.width, shape.heads))
        device = torch.get_default_device()
        half = shape.width // shape.heads // 2
        places = torch.arange(shape.context, dtype=torch.float32, device=device)
        angles = places[:, None] * 1000.0 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @property
    def config(self) -> dict[str, str | int]:
        """What goes out with the model: its kind and shape."""
        return {"model_type": "byte-gpt", **self.shape._asdict()}

    def _embed(self, tokens: Tensor) -> Tensor:
        hidden = _norm(self.embedding(tokens))
        return hidden + self.smear * F.pad(hidden[:, :-1], (0, 0, 1, 0))

    def _through_blocks(self, hidden: Tensor) -> Tensor:
        cos, sin = (self.get_buffer(name)[: hidden.shape[1]] for name in ("cos", "sin"))
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return hidden


class ByteGPT(_Body):
    """``forward``: token ids int64 [B, T], T at most ``shape.context``, to logits [B, T, vocab_size]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._make_embedding(shape)
        self._make_blocks(shape, 0, shape.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(_norm(self._through_blocks(self._embed(tokens))), self.embedding.weight)


def numel_of(shape: Shape) -> int:
    """Values of the model's parameters, counted without making it."""
    with torch.device("meta"):
        one, two = (
            sum(parameter.numel() for parameter in ByteGPT(shape._replace(layers=layers)).parameters())
            for layers in (1, 2)
        )
    return one + (shape.layers - 1) * (two - one)


class ByteGPTStage(_Body):
    """A stage of the same model: blocks ``start`` to ``stop``, all of them for the stages' whole. The first
    takes token ids int64 [B, T] and embeds them. The last makes logits [B, T, vocab_size] by a head of its
    own, since the embedding is elsewhere."""

    def __init__(self, shape: Shape, start: int, stop: int) -> None:
        super().__init__()
        self._is_first = start == 0
        self._is_last = stop == shape.layers
        if self._is_first:
            self._make_embedding(shape)
        self._make_blocks(shape, start, stop)
        if self._is_last:
            self.head = nn.Linear(shape.width, shape.vocab_size, bias=False, dtype=torch.float32)
            _draw_table_(self.head.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Token ids, or the output of the stage before: float [B, T, width]."""
        hidden = self._through_blocks(self._embed(inputs) if self._is_first else inputs)
        return self.head(_norm(hidden)) if self._is_last else hidden


def _draw_table_(table: Tensor) -> None:
    nn.init.normal_(table, std=0.02)


def stage_edges(layers: int, stages: int) -> list[tuple[int, int]]:
    """(first block, the one behind the last) of each of ``stages`` stages, as equal as they can be. The last
    has fewer if they are not: it has the head."""
    each, more = divmod(layers, stages)
    sizes = [each + (stage < more) for stage in range(stages)]
    return [(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


def byte_gpt_stages(shape: Shape, count: int, tied: bool = False) -> Stages:
    """``count`` stages of the model, from 2 to its layers, else ``ConfigError``. Batches: as of
    ``next_token_loss``. ``tied``: the head is the embedding, as in the whole model; else it is its own."""
    if not 2 <= count <= shape.layers:
        cure = f"use 2 to {shape.layers}, or more recipe_options.layers"
        if shape.layers < 2:
            cure = f"use recipe_options.layers = {count} or more"
        problem = f"is {count}, but a stage needs a layer and byte-gpt has {shape.layers} here; {cure}"
        raise ConfigError("the run", "pipeline.stages", problem)
    return Stages(
        [partial(ByteGPTStage, shape, *edges) for edges in stage_edges(shape.layers, count)],
        split=tuple,
        loss=next_token_sum,
        side_range=(0, shape.vocab_size),
        join=partial(_joined, tied=tied),
        tied=TiedTable("embedding.weight", "head.weight", _draw_table_) if tied else None,
    )


def _joined(stages: Sequence[nn.Module], tied: bool) -> ByteGPTStage:
    """One stage of all blocks, under the names that they have in theirs."""
    first = stages[0]
    last = stages[-1]
    assert isinstance(first, ByteGPTStage)
    assert isinstance(last, ByteGPTStage)
    with torch.device("meta"):
        whole = ByteGPTStage(first.shape, 0, first.shape.layers)
    whole.embedding = first.embedding
    whole.smear = first.smear
    if tied:
        whole.head.weight = first.embedding.weight
    else:
        whole.head = last.head
    whole.blocks = nn.ModuleList(
        block for stage in stages for block in stage.get_submodule("blocks").children()
    )
    whole.cos = first.get_buffer("cos")
    whole.sin = first.get_buffer("sin")
    return whole


def next_token_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over tokens: the loss of the last stage."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


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
    assert isinstance(model, ByteGPT | ByteGPTStage)
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
