"""Held-out loss at equal tokens, in a laboratory: apply rules, numbers of peers, the defence against liars.

    python benchmarks/loss.py table --rounds 30 --seeds 0 1 2          # every rule and delay against DiLoCo
    python benchmarks/loss.py efficiency --rounds 16 30                # what a swarm of N peers is worth
    python benchmarks/loss.py efficiency --rounds 30 --variants        # 4 peers with other settings
    python benchmarks/loss.py tax --rounds 150 --seeds 4               # the defence where nobody lies

The peers are stacked in one process and the network is a delay in inner steps. What a peer offers, the mean
and the outer step are the product's own. ``table`` and ``efficiency`` write a line of JSON for each run into
``--out``, skip what is there, and print tables. ``--only``: the cases of these names. With ``--show``
nothing is trained. A round is 30 inner steps whatever a case's own is, so equal rounds are equal tokens.

``efficiency``: **swarm** of N peers, each with its own batch, ``keep``, 4 fragments, a bit a value, rounds of
8 inner steps, means 2 late. **Data-parallel**, one model whose batch is the N peers' batches. Both with the
rate and the warm-up that fit N. **Lone**, one peer, also for longer.
"Worth" is the number of times a lone peer's tokens that a lone peer needs for the same loss, read off the
lone peers' losses by straight lines over the logarithm of tokens. Each length is a run of its own.

``tax``: four honest peers with the weight cap and rule "centred", against plain weights and
rule "mean"; equally fast, or two of them ten times as fast. Rounds of ``--steps`` inner steps.

Law: all cases of a seed have the same start, and at one number of peers the same windows of text, so they
compare pairwise. Price: 64 tokens per peer and inner step, so losses lie far above what the model can reach.
Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), Eager updates (2502.12996), CO2
(2401.16265).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Figures, command, note, parser_of, run
from torch import Tensor

from p2p_co2.config import ApplyRule, CodecConfig, OuterConfig, RunConfig
from p2p_co2.planning.advice import swarm_factor
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.protocol.rounds.attempt import Share, capped
from p2p_co2.recipes.corpus import Corpus, embedded_corpus
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import get_rule, reduce_slices
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.schedule import OfferState

# ---- the model: a byte GPT, several of them stacked on a leading dimension

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 2
PEAK_LR, FLOOR, WARMUP_STEPS = 2e-3, 0.1, 45
HELD_OUT_WINDOWS = 512

_ATTENTION = (("qkv", 3 * WIDTH), ("out", WIDTH))
# Fragments are contiguous in the flat vector: embeddings and head, all attention, and one MLP per block.
FRAGMENTS: tuple[tuple[tuple[str, int, int], ...], ...] = (
    (("wte", VOCAB, WIDTH), ("wpe", CONTEXT, WIDTH), ("smear", 1, WIDTH), ("head", WIDTH, VOCAB)),
    tuple((f"{name}{layer}", WIDTH, size) for layer in (0, 1) for name, size in _ATTENTION),
    (("up0", WIDTH, 4 * WIDTH), ("down0", 4 * WIDTH, WIDTH)),
    (("up1", WIDTH, 4 * WIDTH), ("down1", 4 * WIDTH, WIDTH)),
)
FED, FED_TIMES = ("wte", "head"), 4.0
"""Head and token table learn faster: while the head is small, the gradients of the matrices are noise."""
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


def each_loss(params: Stacked, windows: Tensor) -> Tensor:
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
    return list(torch.autograd.grad(each_loss(params, windows).sum(), list(params.values())))


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
    """Warm-up, then a cosine from ``PEAK_LR`` down to ``FLOOR`` of it: the papers' schedule, the same for all
    rows."""
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
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


def held_out_windows(corpus: Corpus, count: int, context: int) -> Sequence[Tensor]:
    """A fixed set, the same for all rows and seeds: int64 [at most 32, context + 1] each."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(corpus.held_out) - context - 1, (count, 1), generator=generator)
    return corpus.held_out[starts + torch.arange(context + 1)].long().split(32)


def held_out_loss(params: Stacked, corpus: Corpus) -> float:
    """Of the first model."""
    first = {name: tensor[:1].detach() for name, tensor in params.items()}
    windows = held_out_windows(corpus, HELD_OUT_WINDOWS, CONTEXT)
    with torch.no_grad():
        return float(torch.stack([each_loss(first, piece[None]) for piece in windows]).mean())


# ---- what is compared

ROUND = 30
"""Inner steps of what the tables call a round."""
SIZES = (1, 2, 4, 8)
NAMES = [[name for name, _, _ in fragment] for fragment in FRAGMENTS]


@dataclass(frozen=True)
class Case:
    """One way to train. ``kind``: "swarm", "data-parallel" or "lone". ``windows``: of 64 tokens, per peer and
    inner step. ``every``: inner steps of a swarm's round. ``delay``: inner steps from a send to its mean.
    ``feedback``: error feedback. ``optimizer``: "adamw", or "muon" (matrices of the blocks; AdamW for the
    rest). ``peak``: its learning rate after ``warmup`` inner steps."""

    name: str
    kind: str = "swarm"
    peers: int = 4
    windows: int = 1
    every: int = ROUND
    delay: int = 7
    rule: str = "keep"
    fragments: int = len(NAMES)
    lr: float = 0.7
    momentum: float = 0.5
    nesterov: bool = True
    gap_penalty: bool = True
    clip: str = "rms"
    codec: str = "int4"
    feedback: bool = False
    optimizer: str = "adamw"
    peak: float = PEAK_LR
    warmup: int = WARMUP_STEPS

    def run_config(self) -> RunConfig:
        rule: ApplyRule = self.rule  # type: ignore[assignment]
        return RunConfig(
            codec=CodecConfig(name=self.codec, error_feedback=self.feedback),
            outer=OuterConfig(
                rule=rule, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov,
                gap_penalty=self.gap_penalty, clip=self.clip,  # type: ignore[arg-type]
            ),
        )  # fmt: skip

    def names(self) -> list[list[str]]:
        """Of the parameters of each fragment."""
        return NAMES if self.fragments == len(NAMES) else [[name for group in NAMES for name in group]]


DEFAULT = Case("swarm of 4")
SHORT = replace(DEFAULT, codec="sign", feedback=True, every=8, delay=2)
"""As many bytes in shorter rounds."""
WHOLE = replace(DEFAULT, fragments=1)
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


def sized_cases(optimizer: str, peak: float) -> list[Case]:
    """Of one inner optimizer, by number of peers; the most important first."""
    kind = "" if optimizer == "adamw" else f", {optimizer}"
    cases = [Case(f"lone{kind}", "lone", 1, optimizer=optimizer, peak=peak)]
    for peers in (4, 2, 8, 1):
        swarm = replace(SHORT, name=f"swarm of {peers}{kind}", peers=peers, optimizer=optimizer, peak=peak)
        cases.append(fitted(swarm))
        if peers > 1:
            name = f"data-parallel {peers}{kind}"
            cases.append(fitted(Case(name, "data-parallel", peers, optimizer=optimizer, peak=peak)))
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
        self._matrices = {
            name: one for name, one in params.items() if name[:-1] in {"qkv", "out", "up", "down"}
        }
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
    """The peers of one speed: their models on one leading dimension, trained as one computation."""

    def __init__(self, seed: int, peers: Sequence[int], every: int, optimizer: str = "adamw") -> None:
        self.peers, self.every = tuple(peers), every
        self.params = start_params(seed, len(self.peers))
        for tensor in self.params.values():
            tensor.requires_grad_(True)
        self._optimizer = (StackedMuon if optimizer == "muon" else adamw)(self.params)

    def step(self, windows: Tensor, lr: float) -> None:
        """``windows``: int64 [all peers, batch, CONTEXT + 1]"""
        parts = gradients(self.params, windows[list(self.peers)])
        for tensor, gradient in zip(self.params.values(), parts, strict=True):
            tensor.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("times", 1.0)
        self._optimizer.step()


def rate(case: Case, step: int, steps: int) -> float:
    """The learning rate of inner step ``step`` of ``steps``."""
    return learning_rate(step, steps, case.warmup) * case.peak / PEAK_LR


def train(case: Case, rounds: int, seed: int, corpus: Corpus) -> dict[str, object]:
    """Train one case; returns its line of the output file."""
    steps, started_at = rounds * ROUND, time.perf_counter()
    windows = Windows(corpus, seed, steps, case.peers * case.windows)
    models = case.peers if case.kind == "swarm" else 1
    together = Together(seed, range(models), 1, case.optimizer)
    params = together.params
    groups = case.names() if case.kind == "swarm" else []
    fragments = [
        HeldFragment(case, names, math.ceil(index * case.every / len(groups)), params)
        for index, names in enumerate(groups)
    ]
    for step in range(steps):
        batch = windows.step(step).view(models, -1, CONTEXT + 1)
        together.step(batch, rate(case, step, steps))
        for fragment in fragments:
            fragment.boundary(step + 1)
    one_peer = held_out_loss(params, corpus)
    for fragment, names in zip(fragments, groups, strict=True):
        fragment.flush(steps)
        unflatten_(params, names, fragment.agreed().expand(models, -1))
    return asdict(case) | {
        "rounds": rounds, "seed": seed, "parameters": PARAMETERS,
        "tokens": steps * case.peers * case.windows * CONTEXT, "loss": held_out_loss(params, corpus),
        "loss_one_peer": one_peer, "seconds": time.perf_counter() - started_at,
    }  # fmt: skip


OFFER_ID = bytes(8)
"""Of every offer: each peer has one at a time."""


class HeldFragment:
    """One fragment of all peers, each with the ledger that its process would have."""

    def __init__(self, case: Case, names: Sequence[str], offset: int, params: Stacked) -> None:
        self._case, self._names, self._params, self._offset = case, names, params, offset
        settings = case.run_config()
        self._codec = get_codec(case.codec)
        start = flatten(params, names)
        self._peers = [
            FragmentState(settings, self._codec, str(peer), outer.init(one)) for peer, one in enumerate(start)
        ]
        everybody = {str(peer): 1.0 for peer in range(len(start))}
        ids = dict.fromkeys(everybody, OFFER_ID)
        self._parts = [PartWeights(0, self._codec.blocks(start.shape[1]), everybody, ids)]
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
        live, payloads = flatten(self._params, self._names), []
        for peer, ledger in enumerate(self._peers):
            offer = ledger.offer(live[peer].clone(), OfferState(OFFER_ID))
            payloads.append((str(peer), 1.0, offer.payload))
            self._base_version = offer.base_version
            self._merge_(live, peer, offer.merge)
        self._mean = reduce_slices(get_rule("mean"), self._codec, payloads).encoded
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


def variants_table(losses: Losses, rounds: int) -> str:
    """Markdown, one line a variant: its loss, and against 4 peers as in the table."""
    base = losses.get(("swarm of 4", rounds), {})
    lines = _head("4 peers | loss | against the table's | seeds")
    for case in variant_cases():
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


def rules_table(losses: Losses, rounds: int) -> str:
    """Markdown, one line a rule and delay: median over seeds, half the spread, and against synchronous
    DiLoCo."""
    base = losses.get((BASE.name, rounds), {})
    lines = _head("case | outer lr, momentum | codec | seeds | loss | ± | against DiLoCo")
    for case in rule_cases():
        if not (seeds := losses.get((case.name, rounds))):
            continue
        kind = "Nesterov" if case.nesterov else "heavy ball"
        setting = f"{case.lr}, {case.momentum} {kind} | {case.codec}" if case.kind == "swarm" else "- | -"
        each = list(seeds.values())
        lines.append(
            f"| {case.name} | {setting} | {len(each)} | {statistics.median(each):.3f} "
            f"| {(max(each) - min(each)) / 2:.3f} | {against(seeds, base)} |"
        )
    return "\n".join(lines)


def table(options: argparse.Namespace) -> Figures:
    """Every apply rule and delay, against synchronous DiLoCo."""
    return _play([(case, (1,)) for case in rule_cases()], options, {"rules": rules_table})


def efficiency(options: argparse.Namespace) -> Figures:
    """What a swarm is worth, against data-parallel and a lone peer."""
    sized = [*sized_cases("adamw", PEAK_LR), *sized_cases("muon", 2 * PEAK_LR)]
    sized = [case for case in sized if case.kind == "lone" or case.peers in options.peers]
    # The table's lone peer trains as long as each number of peers together, too.
    cases = [(case, tuple(options.peers) if case.kind == "lone" else (1,)) for case in sized]
    if options.variants or options.only:
        cases = [(case, (1,)) for case in variant_cases()] + (cases if options.only else [])
    return _play(cases, options, {
        "by peers": efficiency_table, "by peers, Muon": partial(efficiency_table, kind=", muon"),
        "variants": variants_table,
    })  # fmt: skip


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
                line = train(case, rounds * times, seed, embedded_corpus())
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                note(f"{case.name}, {rounds * times} rounds, seed {seed}: {line['loss']:.4f}")
    losses = by_case(read_lines(options.out))
    for rounds in sorted({rounds for _, rounds in losses}):
        for title, told in tables.items():
            if (text := told(losses, rounds)).count("\n") > 1:
                note(f"\n{rounds} rounds, {title}\n\n{text}")
    return {"losses": {f"{name}, {rounds} rounds": seeds for (name, rounds), seeds in losses.items()}}


# ---- the defence against liars

SPEEDS = {"equal": (1, 1, 1, 1), "ten times": (1, 1, 10, 10)}
"""Inner steps of the fastest for one of each peer's."""
CAPS = (0.0, RunConfig().weight_cap)


class Averaged:
    """One fragment of all peers: the agreed state, and the round that makes the next one."""

    def __init__(self, run: RunConfig, names: Sequence[str], params: Stacked) -> None:
        self._run, self._names, self._codec = run, names, get_codec(run.codec.name)
        self.state = outer.init(flatten(params, names)[0])

    def average(self, groups: Sequence[Together], tokens: Sequence[float]) -> None:
        """A round with everybody: offers, the mean of each part by the run's rule, the outer step, and all
        models at the agreed parameters."""
        shares = {PeerId(str(peer)): Share(amount, 0) for peer, amount in enumerate(tokens)}
        weights = capped(shares, self._run.weight_cap)
        offers = {}
        for group in groups:
            for peer, live in zip(group.peers, flatten(group.params, self._names), strict=True):
                gradient = self.state.params - live
                offers[PeerId(str(peer))] = self._codec.encode(gradient).numpy()
        size = len(next(iter(offers.values())))
        part_bytes = -(-size // self._codec.block_bytes // len(tokens)) * self._codec.block_bytes
        rule = get_rule(self._run.aggregation.rule)
        means = bytearray()
        for start in range(0, size, part_bytes):
            slices = [
                (peer, weights[peer], memoryview(offer[start : start + part_bytes]))
                for peer, offer in offers.items()
            ]
            means += reduce_slices(rule, self._codec, slices).encoded
        mean = self._codec.decode(torch.frombuffer(means, dtype=torch.uint8))[: self.state.params.numel()]
        self.state, _ = outer.step(self._run.outer, self.state, mean, self.state.version)
        for group in groups:
            unflatten_(group.params, self._names, self.state.params.expand(len(group.peers), -1))


def by_speed(seed: int, every: Sequence[int]) -> list[Together]:
    """``every``: by peer, inner steps of the fastest for one of its own."""
    speeds = sorted(set(every))
    return [
        Together(seed, [peer for peer, one in enumerate(every) if one == speed], speed) for speed in speeds
    ]


def play(
    groups: Sequence[Together], fragments: Sequence[Averaged], windows: Windows, rounds: int, steps: int
) -> None:
    """Rounds of ``steps`` inner steps of the fastest peers, after each of which everybody averages."""
    every = {peer: group.every for group in groups for peer in group.peers}
    tokens = [float(CONTEXT * (steps // every[peer])) for peer in sorted(every)]
    for round_ in range(rounds):
        for step in range(round_ * steps, (round_ + 1) * steps):
            batch, lr = windows.step(step), learning_rate(step, rounds * steps)
            for group in groups:
                if (step + 1) % group.every == 0:
                    group.step(batch, lr)
        for fragment in fragments:
            fragment.average(groups, tokens)


def train_defended(rounds: int, steps: int, case: tuple[int, str, float]) -> float:
    """Held-out loss of the agreed parameters. ``case``: (seed, name of the speeds, weight cap)."""
    seed, speeds, cap = case
    torch.set_num_threads(1)
    settings, corpus = RunConfig(weight_cap=cap), embedded_corpus()
    groups = by_speed(seed, SPEEDS[speeds])
    fragments = [Averaged(settings, some, groups[0].params) for some in NAMES]
    play(groups, fragments, Windows(corpus, seed, rounds * steps, len(SPEEDS[speeds])), rounds, steps)
    return held_out_loss(groups[0].params, corpus)


def tax(options: argparse.Namespace) -> Figures:
    """What the defence adds where nobody lies, by name of the speeds."""
    rounds, steps, seeds = options.rounds, options.steps, options.seeds
    if steps % max(map(max, SPEEDS.values())):
        raise SystemExit("error: --steps must be a multiple of 10: a slow peer makes one step in ten")
    cases = list(product(range(seeds), SPEEDS, CAPS))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        losses = dict(zip(cases, pool.map(partial(train_defended, rounds, steps), cases), strict=True))
    without, with_ = CAPS
    found: Figures = {}
    for speeds in SPEEDS:
        pairs = [(losses[seed, speeds, without], losses[seed, speeds, with_]) for seed in range(seeds)]
        found[speeds] = {
            "loss_undefended": [round(pair[0], 5) for pair in pairs],
            "loss_defended": [round(pair[1], 5) for pair in pairs],
            "median_relative_difference": round(statistics.median(b / a - 1 for a, b in pairs), 6),
        }
    return found


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
    command(
        commands, "tax", tax, rounds=(150, "of --steps"), steps=(10, "inner steps of a round, tens of them"),
        seeds=(4, "so many"), processes=(2, "at a time"),
    )  # fmt: skip
    run(parser)


if __name__ == "__main__":
    main()
