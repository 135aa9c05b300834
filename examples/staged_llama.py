"""A Llama of transformers, cut into stages: ``recipe = "examples/staged_llama.py:make"`` and ``[pipeline]
stages = 2`` (or as many as it has layers) in the run file.

A folder ``pretrained`` beside this file, as ``save_pretrained`` or ``huggingface-cli download`` writes one,
gives the config and the first parameters. Without one a small Llama begins at random. ``p2p-co2 model``
writes what ``from_pretrained`` loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from p2p_co2.recipes import Recipe, Stages
from p2p_co2.recipes.corpus import embedded_corpus

PRETRAINED = Path(__file__).parent / "pretrained"
CONTEXT = 64
Batch = tuple[Tensor, Tensor]


class LlamaStage(nn.Module):
    """Layers ``start`` to ``stop``, under the names that they have in the whole Llama. The first stage has
    the token table, too, and the last the norm and the head."""

    def __init__(self, config: LlamaConfig, start: int, stop: int) -> None:
        super().__init__()
        self.config, self.model = config, nn.Module()
        layers = {str(number): LlamaDecoderLayer(config, number) for number in range(start, stop)}
        self.model.layers = nn.ModuleDict(layers)
        self.rotary = LlamaRotaryEmbedding(config)
        if start == 0:
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if stop == config.num_hidden_layers:
            self.model.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for matrix in (one for one in self.parameters() if one.ndim == 2):
            nn.init.normal_(matrix, std=config.initializer_range)
        if PRETRAINED.is_dir() and torch.get_default_device().type != "meta":
            self.load_state_dict(read(list(self.state_dict())))

    def forward(self, inputs: Tensor) -> Tensor:
        """Token ids [sequences, positions], or what the stage before has made: float [.., .., width]."""
        hidden = self.model.embed_tokens(inputs) if hasattr(self.model, "embed_tokens") else inputs
        positions = self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        for layer in self.model.layers.values():
            hidden = layer(hidden, position_embeddings=positions)
        return self.lm_head(self.model.norm(hidden)) if hasattr(self, "lm_head") else hidden


def read(names: Sequence[str]) -> dict[str, Tensor]:
    """Those tensors of ``pretrained``, and nothing else: a peer reads its own stage. A head that was tied to
    the token table begins as a copy of it."""
    found = dict[str, Tensor]()
    for path in sorted(PRETRAINED.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            found |= {name: file.get_tensor(name) for name in {*names} & {*file.keys()}}
    if "lm_head.weight" in {*names} - {*found}:
        found["lm_head.weight"] = read(["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    return found


def join(stages: Sequence[nn.Module]) -> LlamaForCausalLM:
    """The library's own model of the stages' tensors: what ``p2p-co2 model`` saves."""
    first, last = stages[0], stages[-1]
    with torch.device("meta"):
        whole = LlamaForCausalLM(first.config)
    whole.model.embed_tokens, whole.model.norm = first.model.embed_tokens, last.model.norm
    whole.model.layers = nn.ModuleList(layer for stage in stages for layer in stage.model.layers.values())
    whole.model.rotary_emb, whole.lm_head = first.rotary, last.lm_head
    return whole


def config_here(width: int, layers: int) -> LlamaConfig:
    """That of ``pretrained``, else of a small Llama that reads bytes."""
    if PRETRAINED.is_dir():
        config = LlamaConfig.from_pretrained(PRETRAINED)
    else:
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=4, max_position_embeddings=CONTEXT,
        )  # fmt: skip
    config.tie_word_embeddings = False  # the table is the first stage's, the head the last one's
    config._attn_implementation = "sdpa"
    return config


def texts(data: str) -> tuple[Tensor, Tensor]:
    """Token ids to train on, and held out: of the text file ``data`` by the tokenizer of ``pretrained``, else
    bytes of Python's own source."""
    if not data:
        corpus = embedded_corpus()
        return corpus.train, corpus.held_out
    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    ids = torch.tensor(tokenizer(Path(data).expanduser().read_text())["input_ids"])
    return ids[len(ids) // 10 :], ids[: len(ids) // 10]


def make(width: int = 64, layers: int = 4, data: str = "") -> Recipe:
    """Arguments are the run file's ``[recipe_options]``; ``data`` is each peer's own (``--data FILE``)."""
    config, (train, kept) = config_here(width, layers), texts(data)

    def windows(text: Tensor, seed: int, batch: int) -> Iterator[Batch]:
        """Endless: tokens and the ones that follow them, int64 [batch, CONTEXT] each; all of one shape."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - CONTEXT, (batch, 1), generator=generator)
            window = text[starts + torch.arange(CONTEXT + 1)].long()
            yield window[:, :-1], window[:, 1:]

    def stage_loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Of the last stage, the sum over tokens."""
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def stages(count: int) -> Stages:
        edges = [config.num_hidden_layers * stage // count for stage in range(count + 1)]
        makers = [partial(LlamaStage, config, *pair) for pair in itertools.pairwise(edges)]
        return Stages(
            makers, split=lambda batch: batch, loss=stage_loss, side_range=(0, config.vocab_size), join=join
        )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """Of the whole model: the mean over tokens."""
        device = next(model.parameters()).device
        logits = model(input_ids=batch[0].to(device)).logits
        return stage_loss(logits, batch[1].to(device)) / batch[1].numel()

    def held_out(model: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(model, next(windows(kept, 0, 64))))

    with torch.device("meta"):
        outline = LlamaForCausalLM(config)
    return Recipe(
        model=outline,  # only there in stages
        batches=partial(windows, train),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        held_out=held_out,
        stages=stages,
        max_grad_norm=1.0,  # of each stage's gradient: a peer sees no more
        tokenizer=sorted(PRETRAINED.glob("tokenizer*")),
    )
