"""Held-out loss at equal tokens, in a laboratory: apply rules and numbers of peers.

    python benchmarks/loss.py table --rounds 30 --seeds 0 1 2          # every rule and delay against DiLoCo
    python benchmarks/loss.py efficiency --rounds 16 30                # what a swarm of N peers is worth
    python benchmarks/loss.py efficiency --rounds 30 --variants        # 4 peers with other settings

The peers are stacked in one process and the network is a delay in inner steps. What a peer offers, the mean
and the outer step are the product's own. Each run adds a line of JSON to ``--out``; what is there is not run
again. ``--only``: the cases of these names. ``--show``: print the tables, train nothing. A round is 30 inner
steps whatever a case's own is, so equal rounds are equal tokens.

``efficiency``: **swarm** of N peers, each with its own batch, ``keep``, 4 fragments, codec "sign", rounds of
8 inner steps, means 2 late. **Data-parallel**, one model whose batch is the N peers' batches. Both with the
rate and the warm-up that fit N. **Lone**, one peer, also for longer. The names of cases with Muon, or with
another model and data (``LABS``, codec "q2"), end in ", muon", ", large", ", tuning" and ", table".
"Worth" is the number of times a lone peer's tokens that a lone peer needs for the same loss, read off the
lone peers' losses by straight lines over the logarithm of tokens. Each length is a run of its own.

``hostile.py laboratory`` has liars in it, and the defence where nobody lies.

Law: all cases of a seed have the same start, and at one number of peers the same windows of text, so they
compare pairwise. Price: 64 tokens per peer and inner step, so losses lie far above what the model can reach.
Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), Eager updates (2502.12996), CO2
(2401.16265).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import chain, product
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Figures, command, note, parser_of, run
from torch import Tensor

from p2p_co2.config import AggregationConfig, ApplyRule, CodecConfig, OuterConfig, RunConfig
from p2p_co2.planning.advice import swarm_factor
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.protocol.rounds.attempt import Share, capped
from p2p_co2.recipes.corpus import Corpus, embedded_corpus, text_corpus
from p2p_co2.rule_specs import implied_rule
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import AggregationRule, Mean, Part, get_rule, reduce_slices
from p2p_co2.tensors.codec import Codec, get_codec
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.schedule import OfferState

# ---- what is trained: models stacked on a leading dimension, and the rows of data they read

VOCAB, HEADS = 256, 4
PEAK_LR, FLOOR, WARMUP_STEPS = 2e-3, 0.1, 45
HELD_OUT_ROWS = 512
FED, FED_TIMES = ("wte", "head"), 4.0
"""Head and token table learn faster: while the head is small, the gradients of the matrices are noise."""
BLOCK = {"qkv", "out", "up", "down"}
"""Names of the matrices of a block, without its number."""

Shapes = tuple[tuple[str, int, int], ...]
Stacked = dict[str, Tensor]
"""Parameters of M models: name -> fp32 [M, rows, columns], contiguous."""


@dataclass(frozen=True)
class Lab:
    """A model and its data. ``kind``: "text", a byte GPT; "tuning", the same from a trained one on other
    text; "table", a perceptron over columns of words. ``batch``: rows of ``context`` tokens and what is to be
    told from them, per peer and inner step. ``peak``: a lone peer's learning rate. ``warmup``: what fits
    data-parallel."""

    kind: str = "text"
    width: int = 128
    layers: int = 2
    context: int = 64
    batch: int = 1
    peak: float = PEAK_LR
    warmup: int = 300
    tokens: int = VOCAB
    classes: int = VOCAB

    @property
    def fragments(self) -> tuple[Shapes, ...]:
        """(name, rows, columns) of the parameters of each fragment: embeddings and head, all attention, and
        the perceptrons in two halves."""
        width, blocks = self.width, range(self.layers)
        ends = (("wte", self.tokens, width), ("head", width, self.classes))
        text = (ends[0], ("wpe", self.context, width), ("smear", 1, width), ends[1])
        attention = tuple(
            (f"{name}{block}", width, size)
            for block in blocks
            for name, size in (("qkv", 3 * width), ("out", width))
        )
        halves = [
            tuple(
                one
                for block in half
                for one in ((f"up{block}", width, 4 * width), (f"down{block}", 4 * width, width))
            )
            for half in (blocks[: self.layers // 2], blocks[self.layers // 2 :])
        ]
        return (ends, *halves) if self.kind == "table" else (text, attention, *halves)

    def start(self, seed: int, models: int) -> Stacked:
        """The same start for every model: matrices scaled by their inputs, a head of zeros, so the first loss
        is that of even odds. Of "tuning": a trained model."""
        if self.kind == "tuning":
            return {
                name: one.repeat(models, 1, 1) for name, one in trained(replace(self, kind="text")).items()
            }
        generator = torch.Generator().manual_seed(seed)
        scales = {"wte": 1.0, "wpe": 0.1, "smear": 0.0, "head": 0.0}
        params: Stacked = {}
        for name, rows, columns in chain(*self.fragments):
            scale = 0.0 if name[:-1] in {"out", "down"} else scales.get(name, rows**-0.5)
            params[name] = (torch.randn(rows, columns, generator=generator) * scale).repeat(models, 1, 1)
        return params

    def each_loss(self, params: Stacked, rows: Tensor) -> Tensor:
        """Mean cross-entropy of each model on its own rows, int64 [M, B, context + 1]. Returns fp32 [M], in
        nats per byte of text or row of a table."""
        models, batch, length = rows.shape
        length -= 1
        inputs, targets = rows[..., :-1], rows[..., 1:]
        places = (inputs + self.tokens * torch.arange(models)[:, None, None]).flatten()
        hidden = params["wte"].view(models * self.tokens, self.width)[places].view(models, batch, length, -1)
        if self.kind == "table":
            hidden, targets = hidden.sum(2), targets[..., -1:]
        else:
            # A learned share of the embedding before, as in the product's byte GPT: pairs of bytes are seen
            # from the start.
            hidden = hidden + (0.5 + params["smear"][:, None]) * F.pad(hidden[:, :, :-1], (0, 0, 1, 0))
            hidden = hidden + params["wpe"][:, None, :length]
        hidden = hidden.reshape(models, -1, self.width)
        for block in range(self.layers):
            if self.kind != "table":
                hidden = hidden + self._attended(params, block, hidden, batch)
            mixed = F.relu(torch.bmm(F.layer_norm(hidden, (self.width,)), params[f"up{block}"]))
            hidden = hidden + torch.bmm(mixed, params[f"down{block}"])
        logits = torch.bmm(F.layer_norm(hidden, (self.width,)), params["head"])
        each = F.cross_entropy(logits.view(-1, self.classes), targets.flatten(), reduction="none")
        return each.view(models, -1).mean(1)

    def _attended(self, params: Stacked, block: int, hidden: Tensor, batch: int) -> Tensor:
        models, width = len(hidden), self.width
        mixed = torch.bmm(F.layer_norm(hidden, (width,)), params[f"qkv{block}"])
        query, key, value = mixed.view(models * batch, -1, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key = F.layer_norm(query, query.shape[-1:]), F.layer_norm(key, key.shape[-1:])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.bmm(mixed.transpose(1, 2).reshape(models, -1, width), params[f"out{block}"])


DOCS = Path(__file__).parent.parent / "docs"
"""The other text: English, where the embedded corpus is Python."""
TEXT = Lab()
LABS = {
    "text": TEXT,
    "large": Lab(width=160, layers=4, context=128, batch=4),
    "tuning": Lab("tuning", peak=1e-3, warmup=WARMUP_STEPS),
    "table": Lab("table", warmup=WARMUP_STEPS, context=16, batch=4, tokens=1024, classes=64),
}


@cache
def trained(lab: Lab) -> Stacked:
    """By a lone peer, 150 rounds."""
    return train(Case("", "lone", 1, lab, peak=lab.peak), 150, 0)[1]


@cache
def data(lab: Lab) -> Corpus:
    """Train and held-out rows, uint8 or int16 [rows, context + 1]."""
    if lab.kind == "table":
        return characters(lab)
    corpus = embedded_corpus() if lab.kind == "text" else text_corpus(DOCS)
    return Corpus(*(one.unfold(0, lab.context + 1, 1) for one in corpus))


def characters(lab: Lab) -> Corpus:
    """Unicode's named characters as a table. A row has the character's category and its name's words but the
    first, hashed; then its class, the first word, with one for all that are rare."""
    every = [(one, unicodedata.name(one, "").replace("-", " ").split()) for one in map(chr, range(0x30000))]
    # The names of ideographs and syllables are counted or spelt, not given.
    named = [one for one in every if len(one[1]) > 1 and one[1][0] not in {"CJK", "HANGUL"}]
    first = Counter(words[0] for _, words in named).most_common(lab.classes - 1)
    classes = {word: number for number, (word, _) in enumerate(first)}
    kinds: tuple[list[list[int]], list[list[int]]] = ([], [])
    for character, words in named:
        told = [unicodedata.category(character), *words[1:]][: lab.context]
        row = [1 + zlib.crc32(word.encode()) % (lab.tokens - 1) for word in told]
        row += [0] * (lab.context - len(row)) + [classes.get(words[0], len(classes))]
        kinds[zlib.crc32(" ".join(words).encode()) % 20 == 0].append(row)
    return Corpus(*(torch.tensor(rows, dtype=torch.int16) for rows in kinds))


def flatten(params: Stacked, names: Sequence[str]) -> Tensor:
    """fp32 [M, n]: the named tensors, one flat vector per model."""
    return torch.cat([params[name].detach().flatten(1) for name in names], 1)


def unflatten_(params: Stacked, names: Sequence[str], flat: Tensor) -> None:
    """Write ``flat`` ([M, n]) back into the named tensors."""
    sizes = [params[name][0].numel() for name in names]
    with torch.no_grad():
        for name, piece in zip(names, flat.split(sizes, 1), strict=True):
            params[name].copy_(piece.view_as(params[name]))


def learning_rate(step: int, steps: int, warmup: int = WARMUP_STEPS) -> float:
    """Of the peak: warm-up, then a cosine down to ``FLOOR``, the papers' schedule."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


class Batches:
    """What each peer trains on: ``step`` gives int64 [peers, batch, context + 1], fixed by the seed."""

    def __init__(self, lab: Lab, seed: int, steps: int, peers: int, shards: bool = False) -> None:
        generator = torch.Generator().manual_seed(7919 * seed + 1)
        self._rows = data(lab).train
        self._places = torch.randint(len(self._rows) - 1, (steps, peers, lab.batch), generator=generator)
        if shards:
            self._places = (self._places + torch.arange(peers)[:, None] * (len(self._rows) - 1)) // peers

    def step(self, index: int) -> Tensor:
        return self._rows[self._places[index]].long()


def held_out_rows(rows: Tensor, count: int) -> tuple[Tensor, ...]:
    """A fixed set, the same for all cases and seeds: int64 [at most 32, context + 1] each."""
    places = torch.randint(len(rows) - 1, (count,), generator=torch.Generator().manual_seed(0))
    return rows[places].long().split(32)


def held_out_loss(lab: Lab, params: Stacked) -> float:
    """Of the first model."""
    first = {name: tensor[:1].detach() for name, tensor in params.items()}
    rows = held_out_rows(data(lab).held_out, HELD_OUT_ROWS)
    with torch.no_grad():
        each = [lab.each_loss(first, piece[None]) for piece in rows]
        return float(torch.stack(each).mean())


# ---- what is compared

ROUND = 30
"""Inner steps of what the tables call a round."""
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """One way to train. ``kind``: "swarm", "data-parallel" or "lone". ``every``: inner steps of a swarm's
    round. ``delay``: inner steps from a send to its mean. ``whole``: all parameters are one fragment.
    ``feedback``: error feedback. ``slow``: so many of the peers, the last. ``shards``: each learns a piece of
    the text. ``cap``: the weight cap; 0 is the plain mean. ``aggregation``: its rule. ``optimizer``:
    "adamw", or "muon" (matrices of the blocks; AdamW for the rest). ``peak``: its learning rate after
    ``warmup`` inner steps."""

    name: str
    kind: str = "swarm"
    peers: int = 4
    lab: Lab = TEXT
    every: int = ROUND
    delay: int = 7
    rule: str = "keep"
    whole: bool = False
    lr: float = 0.7
    momentum: float = 0.5
    nesterov: bool = True
    gap_penalty: bool = True
    clip: str = "rms"
    codec: str = "int4"
    feedback: bool = False
    slow: int = 0
    shards: bool = False
    cap: float = 0.0
    aggregation: str = ""
    optimizer: str = "adamw"
    peak: float = PEAK_LR
    warmup: int = WARMUP_STEPS

    def run_config(self) -> RunConfig:
        rule: ApplyRule = self.rule  # type: ignore[assignment]
        return RunConfig(
            weight_cap=self.cap,
            aggregation=AggregationConfig(rule=self.aggregation or implied_rule(self.cap)),
            codec=CodecConfig(name=self.codec, error_feedback=self.feedback),
            outer=OuterConfig(
                rule=rule, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov,
                gap_penalty=self.gap_penalty, clip=self.clip,  # type: ignore[arg-type]
            ),
        )  # fmt: skip

    def names(self) -> list[list[str]]:
        """Of the parameters of each fragment."""
        names = [[name for name, _, _ in fragment] for fragment in self.lab.fragments]
        return [list(chain(*names))] if self.whole else names


DEFAULT = Case("swarm of 4")
SHORT = replace(DEFAULT, codec="sign", feedback=True, every=8, delay=2)
"""As many bytes in shorter rounds."""
WHOLE = replace(DEFAULT, whole=True)
PAPER = replace(WHOLE, lr=1.0, nesterov=False)
"""The settings of CO2 and eager."""
BASE = replace(WHOLE, name="synchronous DiLoCo fp32", delay=0, codec="fp32")


def rule_cases() -> list[Case]:
    """The table of rules and delays, the most important first."""
    cases = [BASE, Case("data-parallel", "data-parallel")]
    for delay in (0, 3, 7, ROUND):
        cases.append(replace(WHOLE, name=f"keep d{delay}", delay=delay))
        cases.append(replace(PAPER, name=f"co2 d{delay}", rule="co2", delay=delay))
        cases.append(replace(WHOLE, name=f"blend d{delay}", rule="blend", delay=delay))
    for delay in (1, 3, 7, ROUND):
        cases.append(replace(DEFAULT, name=f"keep 4 fragments d{delay}", delay=delay))
    for delay in (3, 7, ROUND):
        cases.append(replace(PAPER, name=f"eager d{delay}", rule="eager", delay=delay))
        cases.append(replace(WHOLE, name=f"co2 d{delay} as keep", rule="co2", delay=delay))
    cases.append(replace(PAPER, name=f"co2 d{ROUND} plain", rule="co2", delay=ROUND, gap_penalty=False))
    return [*cases, replace(WHOLE, name=f"keep d{ROUND} momentum 0", delay=ROUND, momentum=0.0)]


def fitted(case: Case) -> Case:
    """With the rate and warm-up that fit its number of peers."""
    return replace(case, peak=case.peak * swarm_factor(case.peers), warmup=300)


VARIETIES = {
    "": (TEXT, SHORT),
    ", muon": (replace(TEXT, peak=2 * PEAK_LR), replace(SHORT, optimizer="muon")),
} | {f", {name}": (lab, replace(SHORT, codec="q2")) for name, lab in LABS.items() if name != "text"}
"""What the cases' names end in: a model and its data, and the swarm's settings."""


def sized_cases(variety: str) -> list[Case]:
    """By number of peers; the most important first."""
    lab, short = VARIETIES[variety]
    base = replace(short, lab=lab, peak=lab.peak)
    cases = [replace(base, name=f"lone{variety}", kind="lone", peers=1)]
    for peers in (4, 2, 8, 1):
        cases.append(fitted(replace(base, name=f"swarm of {peers}{variety}", peers=peers)))
        if peers > 1:
            name = f"data-parallel {peers}{variety}"
            cases.append(replace(cases[-1], name=name, kind="data-parallel", warmup=lab.warmup))
    return cases


def variant_cases() -> list[Case]:
    """4 peers with other settings, against ``SHORT``."""
    rate = fitted(replace(DEFAULT, name="int4, H 30, rate that fits"))
    short = fitted(replace(SHORT, name="H 8"))
    cases = [replace(DEFAULT, name="int4, H 30, a lone peer's rate"), rate]
    cases += [replace(rate, name=f"int4, H {h}", every=h, delay=h // 4) for h in (8, 16)]
    cases += [replace(short, name=f"sign, H {h}", every=h, delay=max(1, h // 4)) for h in (4, 16, 30)]
    cases.append(replace(short, name="q2, H 16", codec="q2", every=16, delay=4))
    cases.append(replace(short, name="no feedback", feedback=False))
    outer_ = ((1.0, 0.0), (0.7, 0.3), (0.7, 0.7))
    cases += [replace(short, name=f"outer {lr}, {beta}", lr=lr, momentum=beta) for lr, beta in outer_]
    cases += [replace(short, name=f"rate {peak:g}", peak=peak) for peak in (PEAK_LR, 3 * PEAK_LR)]
    for peak, steps in ((PEAK_LR, 45), (2 * PEAK_LR, 150), (3 * PEAK_LR, 300)):
        cases.append(Case(f"data-parallel 4, {peak:g}, {steps}", "data-parallel", peak=peak, warmup=steps))
    return cases


# Training


class StackedMuon:
    """``torch.optim.Muon`` for the matrices of the blocks, each model's by itself, and AdamW for the rest.
    Muon's steps are as large as AdamW's ("match_rms_adamw"), so they share their learning rate."""

    def __init__(self, params: Stacked) -> None:
        self._params = params
        self._matrices = {name: one for name, one in params.items() if name[:-1] in BLOCK}
        self._slices = [
            torch.nn.Parameter(piece) for one in self._matrices.values() for piece in one.detach().unbind()
        ]
        rest = {name: one for name, one in params.items() if name not in self._matrices}
        self._each = [
            torch.optim.Muon(self._slices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            adamw(rest),
        ]
        self.param_groups = [group for one in self._each for group in one.param_groups]

    def step(self) -> None:
        pieces = [piece for one in self._matrices.values() for piece in _gradient(one).unbind()]
        for piece, gradient in zip(self._slices, pieces, strict=True):
            piece.grad = gradient
        for one in self._each:
            one.step()


def adamw(params: Stacked) -> torch.optim.AdamW:
    fed = [one for name, one in params.items() if name in FED]
    rest = [one for name, one in params.items() if name not in FED]
    groups = [{"params": fed, "times": FED_TIMES}, {"params": rest, "times": 1.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


class Together:
    """Peers of one speed, trained as one computation. ``params``: the models of all peers, of which theirs,
    ``peers``, are trained in place. ``every``: inner steps of the fastest peer for one of theirs."""

    def __init__(self, case: Case, params: Stacked, peers: slice, every: int) -> None:
        self._lab, self._peers, self._every = case.lab, peers, every
        self._params = {name: tensor[peers].requires_grad_() for name, tensor in params.items()}
        self._optimizer = (StackedMuon if case.optimizer == "muon" else adamw)(self._params)

    def step(self, step: int, rows: Tensor, lr: float) -> None:
        """``step``: of the fastest peer. ``rows``: int64 [all peers, batch, context + 1]"""
        if (step + 1) % self._every:
            return
        losses = self._lab.each_loss(self._params, rows[self._peers])
        # The sum over models keeps their gradients independent.
        parts = torch.autograd.grad(losses.sum(), list(self._params.values()))
        for tensor, gradient in zip(self._params.values(), parts, strict=True):
            tensor.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("times", 1.0)
        self._optimizer.step()


def train(case: Case, rounds: int, seed: int, liars: Liars | None = None) -> tuple[Stacked, Stacked]:
    """Train one case. Returns its models, and what they agreed on, as many times."""
    steps = rounds * ROUND
    batches = Batches(case.lab, seed, steps, case.peers, case.shards)
    liars = liars or Liars()
    models = case.peers if case.kind == "swarm" else 1
    params = case.lab.start(seed, models)
    together = [Together(case, params, slice(models - case.slow), 1)]
    if case.slow:
        together.append(Together(case, params, slice(models - case.slow, models), SLOW_TIMES))
    groups = case.names() if case.kind == "swarm" else []
    fragments = [
        HeldFragment(case, names, math.ceil(index * case.every / len(groups)), params, liars)
        for index, names in enumerate(groups)
    ]
    for step in range(steps):
        rows = liars.read(batches.step(step).view(models, -1, case.lab.context + 1))
        for one in together:
            one.step(step, rows, learning_rate(step, steps, case.warmup) * case.peak)
        for fragment in fragments:
            fragment.boundary(step + 1)
    live = {name: one.detach().clone() for name, one in params.items()}
    for fragment, names in zip(fragments, groups, strict=True):
        fragment.flush(steps)
        unflatten_(params, names, fragment.agreed().expand(models, -1))
    return live, params


SLOW_TIMES = 10
"""A quick peer makes so many inner steps for one of a slow one's."""
OFFER_ID = bytes(8)
"""Of every offer: each peer has one at a time."""


class Liars:
    """What peers do to each other's work: nothing, all are honest. ``hostile.py`` has those that lie.
    ``names``: of those; ``claim``: how many times a step's work each says it has done."""

    def __init__(self) -> None:
        self.names: list[PeerId] = []
        self.claim = 1.0
        self._rules: dict[PeerId, AggregationRule] = {}

    def read(self, rows: Tensor) -> Tensor:
        """What each peer trains on, int64 [peers, batch, context + 1]."""
        return rows

    def send(self, payloads: dict[PeerId, memoryview], codec: Codec, fragment: str) -> None:
        """Change what peers send of a fragment, which its first parameter names."""

    def owners(self, payloads: Iterable[PeerId]) -> list[PeerId]:
        """Who averages a part each."""
        return list(payloads)

    def mean(self, owner: PeerId, name: str, slices: Sequence[Part], codec: Codec) -> Mean:
        """By the run's rule ``name``, and what ``owner`` has seen."""
        return reduce_slices(self._rules.setdefault(owner, get_rule(name, 1, owner)), codec, slices)


class HeldFragment:
    """One fragment of all peers, each with the ledger that its process would have."""

    def __init__(
        self, case: Case, names: Sequence[str], offset: int, params: Stacked, liars: Liars | None = None
    ) -> None:
        self._case, self._names, self._params, self._offset = case, names, params, offset
        self._liars = liars or Liars()
        settings = case.run_config()
        self._codec = get_codec(case.codec)
        start = flatten(params, names)
        self._peers = [
            FragmentState(settings, self._codec, str(peer), outer.init(one)) for peer, one in enumerate(start)
        ]
        quick = len(start) - case.slow
        shares = {
            PeerId(str(peer)): Share(1.0 if peer < quick else 1 / SLOW_TIMES, 0) for peer in range(len(start))
        }
        shares |= {peer: Share(self._liars.claim, 0) for peer in self._liars.names}
        self._weights = capped(shares, case.cap)
        self._rule = settings.aggregation.rule
        self._parts: list[PartWeights] = []
        self._mean: bytes | None = None  # in flight
        self._base_version = self._apply_at = self._sent_at = 0

    @property
    def state(self) -> outer.AgreedState:
        return self._peers[0].state

    def boundary(self, step: int) -> None:
        """``step``: inner steps done so far. The first send is at ``offset``, as a peer's first one is."""
        if self._mean is not None and step >= self._apply_at:
            self._commit()
        if step and step % self._case.every == self._offset % self._case.every:
            self._send()
            self._sent_at, self._apply_at = step, step + self._case.delay
            if not self._case.delay:
                self._commit()

    def flush(self, step: int = 0) -> None:
        """The run ends: what is in flight is awaited and applied to the agreed state. ``step``, if given:
        what was trained since the last send is offered too, as peers do at the end of a run."""
        if self._mean is not None:
            self._commit()
        if step > self._sent_at:
            self._send()
            self._commit()

    def agreed(self) -> Tensor:
        """fp32 [1, n]"""
        return self.state.params[None]

    def _send(self) -> None:
        live, payloads = flatten(self._params, self._names), {}
        for peer, ledger in enumerate(self._peers):
            offer = ledger.offer(live[peer].clone(), OfferState(OFFER_ID))
            payloads[PeerId(str(peer))] = memoryview(offer.payload)
            self._base_version = offer.base_version
            self._merge_(live, peer, offer.merge)
        self._liars.send(payloads, self._codec, self._names[0])
        blocks, self._parts, self._mean = self._codec.blocks(live.shape[1]), [], b""
        ids: dict[str, bytes] = dict.fromkeys(payloads, OFFER_ID)
        owners = self._liars.owners(payloads)
        each = -(-blocks // len(owners))
        for owner, first in zip(owners, range(0, blocks, each), strict=False):
            part = slice(first * self._codec.block_bytes, (first + each) * self._codec.block_bytes)
            slices = [(peer, self._weights[peer], one[part]) for peer, one in payloads.items()]
            mean = self._liars.mean(owner, self._rule, slices, self._codec)
            self._mean += mean.encoded
            counted: dict[str, float] = dict(zip(payloads, mean.weights, strict=True))
            self._parts.append(PartWeights(first, min(first + each, blocks), counted, ids))
        unflatten_(self._params, self._names, live)

    def _commit(self) -> None:
        mean = self._mean
        assert mean is not None
        live, round_ = flatten(self._params, self._names), self.state.version + 1
        for peer, ledger in enumerate(self._peers):
            done = ledger.commit(round_, self._base_version, mean, self._parts)
            self._merge_(live, peer, done.merge)
        self._mean = None
        unflatten_(self._params, self._names, live)

    def _merge_(self, live: Tensor, peer: int, merge: outer.Merge | None) -> None:
        if merge is not None:
            live[peer] = live[peer] * merge.keep + merge.addend


# ---- tables

Losses = dict[tuple[str, int], dict[int, float]]
"""(case, rounds): held-out loss by seed."""


def read_lines(path: Path) -> list[dict[str, object]]:
    """The finished cases of ``path``; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def by_case(lines: Iterable[Mapping[str, object]]) -> Losses:
    found: Losses = {}
    for line in lines:
        key = str(line["name"]), int(str(line["rounds"]))
        found.setdefault(key, {})[int(str(line["seed"]))] = float(str(line["loss"]))
    return found


def worth(loss: float, rounds: int, curve: Mapping[int, float]) -> float:
    """How many times ``rounds`` a lone peer trains to reach ``loss``. ``curve``: rounds to a lone peer's
    loss. inf where it has not got there, nan below its shortest run."""
    reached = math.inf  # a longer run that came out worse is noise: the best so far counts
    before: tuple[int, float] | None = None
    for length in sorted(curve):
        reached = min(reached, curve[length])
        if reached <= loss:
            if before is None:
                return 1.0 if reached == loss and length == rounds else math.nan
            share = (before[1] - loss) / (before[1] - reached)
            return math.exp(math.log(before[0]) + share * math.log(length / before[0])) / rounds
        before = length, reached
    return math.inf


def against(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Per cent above ``other``, median over the seeds that both have, with the least and the most."""
    ratios = [100 * (one[seed] / other[seed] - 1) for seed in sorted(one) if seed in other]
    if not ratios:
        return ""
    spread = f" ({min(ratios):+.1f} to {max(ratios):+.1f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):+.1f} %{spread}"


def efficiency_table(losses: Losses, rounds: int, kind: str = "") -> str:
    """Markdown, one line a number of peers: what a swarm and data-parallel reach in ``rounds``. ``kind``:
    what its cases' names end in."""
    own = f"lone{kind}"
    curve = {
        length: statistics.mean(seeds.values()) for (name, length), seeds in losses.items() if name == own
    }
    lines = _head(
        "peers | swarm: loss | data-parallel: loss | a lone peer, as many tokens: loss | swarm against "
        "data-parallel | swarm is worth | data-parallel is worth | seeds"
    )
    for peers in SIZES:
        swarm = losses.get((f"swarm of {peers}{kind}", rounds))
        if swarm is None:
            continue
        # With one peer data-parallel is the lone peer.
        parallel = losses.get((own if peers == 1 else f"data-parallel {peers}{kind}", rounds), {})
        lone = losses.get((own, peers * rounds), {})
        lines.append(
            f"| {peers} | {_mean(swarm)} | {_mean(parallel)} | {_mean(lone)} | {against(swarm, parallel)} "
            f"| {_worth(swarm, rounds, curve)} | {_worth(parallel, rounds, curve)} | {len(swarm)} |"
        )
    return "\n".join(lines)


def cases_table(cases: Sequence[Case], losses: Losses, rounds: int) -> str:
    """Markdown, one line a case, each against the first."""
    base = losses.get((cases[0].name, rounds), {})
    lines = _head(f"case | loss | against {cases[0].name} | seeds")
    for case in cases:
        if seeds := losses.get((case.name, rounds)):
            lines.append(f"| {case.name} | {_mean(seeds)} | {against(seeds, base)} | {len(seeds)} |")
    return "\n".join(lines)


def _head(titles: str) -> list[str]:
    return [f"| {titles} |", "|---" * len(titles.split("|")) + "|"]


def _mean(seeds: Mapping[int, float]) -> str:
    if not seeds:
        return ""
    spread = (max(seeds.values()) - min(seeds.values())) / 2
    return f"{statistics.mean(seeds.values()):.3f} ± {spread:.3f}"


def _worth(seeds: Mapping[int, float], rounds: int, curve: Mapping[int, float]) -> str:
    if not seeds or not curve:
        return ""
    found = worth(statistics.mean(seeds.values()), rounds, curve)
    return f"> {max(curve) / rounds:.1f}" if math.isinf(found) else f"{found:.1f}"


def table(options: argparse.Namespace) -> Figures:
    """Every apply rule and delay, against synchronous DiLoCo."""
    return _play(
        [(case, (1,)) for case in rule_cases()], options, {"rules": partial(cases_table, rule_cases())}
    )


def efficiency(options: argparse.Namespace) -> Figures:
    """What a swarm is worth, against data-parallel and a lone peer."""
    sized = [case for variety in VARIETIES for case in sized_cases(variety)]
    sized = [case for case in sized if case.kind == "lone" or case.peers in options.peers]
    # The table's lone peer trains as long as each number of peers together, too.
    cases = [(case, tuple(options.peers) if case.kind == "lone" else (1,)) for case in sized]
    if options.variants or options.only:
        cases = [(case, (1,)) for case in variant_cases()] + (cases if options.only else [])
    tables = {f"by peers{variety}": partial(efficiency_table, kind=variety) for variety in VARIETIES}
    return _play(
        cases, options, tables | {"variants": partial(cases_table, [fitted(SHORT), *variant_cases()])}
    )


def _play(
    cases: Sequence[tuple[Case, tuple[int, ...]]], options: argparse.Namespace,
    tables: Mapping[str, Callable[[Losses, int], str]],
) -> Figures:  # fmt: skip
    """Train what is not in ``--out`` yet, and print its tables. ``cases``: each with how many times the
    rounds it is trained for."""
    chosen = [] if options.show else [one for one in cases if not options.only or one[0].name in options.only]
    for rounds, seed, (case, lengths) in product(options.rounds, options.seeds, chosen):
        for times in lengths:
            if seed not in by_case(read_lines(options.out)).get((case.name, rounds * times), {}):
                started_at = time.perf_counter()
                loss = held_out_loss(case.lab, train(case, rounds * times, seed)[1])
                line = asdict(case) | {"rounds": rounds * times, "seed": seed, "loss": loss}
                line |= {"seconds": time.perf_counter() - started_at}
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                note(f"{case.name}, {rounds * times} rounds, seed {seed}: {loss:.4f}")
    losses = by_case(read_lines(options.out))
    for rounds in sorted({rounds for _, rounds in losses}):
        for title, told in tables.items():
            if (text := told(losses, rounds)).count("\n") > 1:
                note(f"\n{rounds} rounds, {title}\n\n{text}")
    return {"losses": {f"{name}, {rounds} rounds": seeds for (name, rounds), seeds in losses.items()}}


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    for made in (
        command(commands, "table", table, out=(Path("loss_table.jsonl"), "JSON lines, kept")),
        command(
            commands, "efficiency", efficiency, peers=(list(SIZES), "numbers of peers"),
            out=(Path("token_efficiency.jsonl"), "JSON lines, kept"),
            variants=(False, "4 peers with other settings, not the table"),
        ),
    ):  # fmt: skip
        made.add_argument("--rounds", type=int, nargs="+", default=[30], help="of 30 inner steps: 30 150")
        made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="which ones")
        made.add_argument("--only", nargs="*", help="the cases of these names")
        made.add_argument("--show", action="store_true", help="the tables of what is done; train nothing")
    run(parser)


if __name__ == "__main__":
    main()
