"""Loss at equal tokens: every apply rule and delay, in 4 bits, against synchronous DiLoCo and data-parallel.

A laboratory, not a swarm: four peers live in one process and the network is a number of inner steps. The
outer maths and the codec are the product's own (``p2p_co2.outer``, ``p2p_co2.codec``); only the byte GPT is
the laboratory's, because the peers' parameters are stacked on a leading dimension and trained as one
computation.

Law: the peers' gradients are independent; a stacked step equals four separate ones to 1e-5
(tests/test_loss_table.py). All rows of a seed see the same start, the same windows of text and the same
learning rates, so rows compare pairwise.
Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), Eager updates (2502.12996), CO2
(2401.16265).
Price: 64 tokens per peer and inner step, so gradients are noisy and losses lie far above what the model can
reach.

    python benchmarks/loss_table.py --rounds 30 --out loss_30.jsonl     # appends; skips rows that are there
    python benchmarks/loss_table.py --rounds 30 --out loss_30.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2 import outer
from p2p_co2.codec import get_codec
from p2p_co2.config import ApplyRule, CodecName, OuterConfig
from p2p_co2.recipes.corpus import Corpus, embedded_corpus

PEERS, H = 4, 30
VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 2
PEAK_LR, FLOOR, WARMUP_STEPS = 2e-3, 0.1, 45
HELD_OUT_WINDOWS = 512

# Fragments are contiguous in the flat vector: embeddings and head, all attention, and one MLP per block.
_FRAGMENTS: tuple[tuple[tuple[str, int, int], ...], ...] = (
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
SHAPES = {name: (rows, columns) for fragment in _FRAGMENTS for name, rows, columns in fragment}
PARAMETERS = sum(rows * columns for rows, columns in SHAPES.values())

Stacked = dict[str, Tensor]
"""Parameters of M models: name -> fp32 [M, rows, columns], contiguous."""


@dataclass(frozen=True)
class Row:
    """One line of the table. ``delay`` in inner steps; ``rule`` "data-parallel" averages gradients at every
    step."""

    name: str
    rule: str
    delay: int
    fragments: int = 1
    codec: CodecName = "int4"
    lr: float = 0.7
    momentum: float = 0.5
    nesterov: bool = True
    gap_penalty: bool = True
    blocking_rounds: int = 0

    def outer_config(self) -> OuterConfig:
        rule: ApplyRule = self.rule  # type: ignore[assignment]
        return OuterConfig(
            rule=rule,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            gap_penalty=self.gap_penalty,
            blocking_rounds=self.blocking_rounds,
        )


def _rows() -> list[Row]:
    """The table, the most important rows first."""
    rows = [Row("synchronous DiLoCo fp32", "keep", 0, codec="fp32"), Row("data-parallel", "data-parallel", 0)]
    for delay in (0, 3, 7, H):
        rows.append(Row(f"keep d{delay}", "keep", delay))
        rows.append(Row(f"co2 d{delay}", "co2", delay, lr=1.0, nesterov=False))
    rows += [Row(f"keep 4 fragments d{delay}", "keep", delay, fragments=4) for delay in (1, 3, 7, H)]
    rows += [Row(f"blend d{delay}", "blend", delay) for delay in (0, 3, 7, H)]
    rows += [Row(f"blend 4 fragments d{delay}", "blend", delay, fragments=4) for delay in (1, 3)]
    # With delay 0 rule eager has nothing stale to replace: it is co2 d0.
    rows += [Row(f"eager d{delay}", "eager", delay, lr=1.0, nesterov=False) for delay in (3, 7, H)]
    # The rule apart from its settings: co2 with those of keep.
    rows += [Row(f"co2 d{delay} as keep", "co2", delay) for delay in (3, 7, H)]
    rows.append(Row(f"co2 d{H} plain", "co2", H, lr=1.0, nesterov=False, gap_penalty=False))
    rows.append(Row(f"keep d{H} momentum 0", "keep", H, lr=0.7, momentum=0.0))
    # What waiting for the first round is worth: training stands still, and its answer is not stale.
    rows.append(Row("keep 4 fragments d1 first awaited", "keep", 1, fragments=4, blocking_rounds=1))
    for delay in (7, H):
        rows.append(Row(f"keep d{delay} first awaited", "keep", delay, blocking_rounds=1))
    rows.append(Row(f"blend d{H} first awaited", "blend", H, blocking_rounds=1))
    rows.append(Row(f"co2 d{H} first awaited", "co2", H, lr=1.0, nesterov=False, blocking_rounds=1))
    return rows


ROWS = _rows()


# The stacked model


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
    """The text as windows of ``CONTEXT + 1`` tokens: ``step`` gives [PEERS, 1, CONTEXT + 1] int64, fixed by
    the seed."""

    def __init__(self, corpus: Corpus, seed: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(7919 * seed + 1)
        self._text, self._span = corpus.train, torch.arange(CONTEXT + 1)
        self._starts = torch.randint(len(self._text) - CONTEXT - 1, (steps, PEERS, 1, 1), generator=generator)

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


# The outer loop


class FragmentLab:
    """One fragment of all peers: the agreed state, the mean that travels, and the apply rule.

    ``boundary(step)`` is called after every inner step. The delay of a round is counted in inner steps; the
    row's first ``blocking_rounds`` of the fragment are applied at once. (Under co2 and eager with a whole
    round of delay that is kinder than the product, whose live parameters meet the first answer at the next
    boundary, awaited or not.)
    """

    def __init__(self, row: Row, names: Sequence[str], offset: int, params: Stacked) -> None:
        self._row, self._config, self._names, self._params = row, row.outer_config(), names, params
        self._offset = offset
        self._codec = get_codec(row.codec)
        self.state = outer.init(flatten(params, names)[0])
        self.gaps: list[float] = []
        self._mean: Tensor | None = None  # in flight
        self._gradients = self._snapshots = torch.empty(0)
        self._base_version = self._apply_at = 0
        self._corrections: list[Tensor | None] = [None] * PEERS
        self._overwrites = row.rule in {"co2", "eager"}
        self._exchanges = self._overwrites and row.delay >= H
        self._awaited = row.blocking_rounds

    def boundary(self, step: int) -> None:
        """``step``: inner steps done so far."""
        send = step >= H and step % H == self._offset
        if self._exchanges and self.state.version >= self._awaited:
            if send:
                self._exchange()
            return
        if self._mean is not None and step >= self._apply_at:
            self._apply()
        if send:
            self._send()
            self._apply_at = step + (self._row.delay if self.state.version >= self._awaited else 0)
            if self._apply_at == step:
                self._apply()

    def flush(self) -> None:
        """The run ends: what is in flight is awaited and applied to the agreed state."""
        if self._mean is not None:
            self._step()

    def agreed(self) -> Tensor:
        """fp32 [1, n]"""
        return self.state.params[None]

    def _transfer(self, values: Tensor) -> Tensor:
        return self._codec.decode(self._codec.encode(values))[: values.numel()]

    def _send(self) -> None:
        self._snapshots = flatten(self._params, self._names)
        pairs = zip(self._snapshots, self._corrections, strict=True)
        self._gradients = torch.stack([outer.outer_gradient(self.state, live, past) for live, past in pairs])
        self._base_version = self.state.version
        total = torch.zeros_like(self.state.params)
        for gradient in self._gradients:
            total += self._transfer(gradient)
        self._mean = self._transfer(total / PEERS)

    def _step(self) -> tuple[outer.OuterState, float]:
        """Apply the mean in flight; returns the old state and the gap."""
        assert self._mean is not None
        old = self.state
        self.state, report = outer.step(self._config, old, self._mean, self._base_version)
        self._mean = None
        self.gaps.append(report.gap)
        return old, report.gap

    def _apply(self) -> None:
        old, gap = self._step()
        live = flatten(self._params, self._names)
        for peer in range(PEERS):
            if self._overwrites:
                fix = None
                if self._row.rule == "eager":
                    # Progress since the send has not been offered, so (unlike in _exchange) it stays part of
                    # the next offer.
                    fresh, stale = old.params - live[peer], self._gradients[peer]
                    fix = outer.eager_correction(self._config, gap, 1 / PEERS, fresh, stale)
                change = outer.boundary_merge(self._config, self.state, live[peer], None, fix)
            else:
                change = outer.merge(self._config, old, self.state, self._snapshots[peer], [])
            live[peer] = live[peer] * change.keep + change.addend
        unflatten_(self._params, self._names, live)

    def _exchange(self) -> None:
        """A full round of delay under co2 and eager: measure, apply the previous mean, overwrite."""
        mean, base_version, stale = self._mean, self._base_version, self._gradients
        self._send()
        live, fresh, sent, sent_base = self._snapshots, self._gradients, self._mean, self._base_version
        gap = 1.0
        if mean is not None:
            self._mean, self._base_version = mean, base_version
            _, gap = self._step()
            self._mean, self._base_version = sent, sent_base
        merged = torch.empty_like(live)
        for peer in range(PEERS):
            fix = None
            if self._row.rule == "eager" and mean is not None:
                fix = outer.eager_correction(self._config, gap, 1 / PEERS, fresh[peer], stale[peer])
            self._corrections[peer] = fix
            change = outer.boundary_merge(self._config, self.state, live[peer], None, fix)
            merged[peer] = live[peer] * change.keep + change.addend
        unflatten_(self._params, self._names, merged)


def simulate(row: Row, rounds: int, seed: int, corpus: Corpus) -> dict[str, object]:
    """Train one row; returns its line of the output file."""
    steps, started_at = rounds * H, time.perf_counter()
    windows = Windows(corpus, seed, steps)
    data_parallel = row.rule == "data-parallel"
    params = start_params(seed, 1 if data_parallel else PEERS)
    for tensor in params.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(params.values(), betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    fragments = [] if data_parallel else _fragments(row, params)
    for step in range(steps):
        batch = windows.step(step)
        # One model on the windows of all peers: the mean gradient at every step.
        parts = gradients(params, batch.transpose(0, 1) if data_parallel else batch)
        for tensor, gradient in zip(params.values(), parts, strict=True):
            tensor.grad = gradient
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
        for fragment in fragments:
            fragment.boundary(step + 1)
    trained_s = time.perf_counter() - started_at
    live_loss = held_out_loss(params, corpus)
    gaps = [gap for fragment in fragments for gap in fragment.gaps]
    if fragments:
        for fragment in fragments:
            fragment.flush()
        _write_agreed(row, params, fragments)
    return asdict(row) | {
        "rounds": rounds,
        "seed": seed,
        "parameters": PARAMETERS,
        "tokens": steps * PEERS * CONTEXT,
        "loss_agreed": held_out_loss(params, corpus),
        "loss_live": live_loss,
        "gap_mean": statistics.mean(gaps) if gaps else 1.0,
        "ms_per_peer_step": 1e3 * trained_s / steps / PEERS,
        "seconds": time.perf_counter() - started_at,
    }


def _names_of_fragments(count: int) -> list[list[str]]:
    names = [[name for name, _, _ in fragment] for fragment in _FRAGMENTS]
    return names if count == len(names) else [[name for group in names for name in group]]


def _fragments(row: Row, params: Stacked) -> list[FragmentLab]:
    groups = _names_of_fragments(row.fragments)
    offsets = [math.ceil(index * H / len(groups)) for index in range(len(groups))]
    return [FragmentLab(row, names, offset, params) for names, offset in zip(groups, offsets, strict=True)]


def _write_agreed(row: Row, params: Stacked, fragments: Sequence[FragmentLab]) -> None:
    for names, fragment in zip(_names_of_fragments(row.fragments), fragments, strict=True):
        unflatten_(params, names, fragment.agreed().expand(PEERS, -1))


# The table


def read_rows(path: Path, rounds: int) -> list[dict[str, object]]:
    """The finished rows of ``path`` for this number of rounds; none if there is no such file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if row["rounds"] == rounds]


def table(done: Sequence[dict[str, object]]) -> str:
    """Markdown: median over seeds, half the spread, and the loss against synchronous DiLoCo, paired by
    seed."""
    losses_of: dict[str, dict[int, tuple[float, float]]] = {}
    for line in done:
        pair = (float(str(line["loss_agreed"])), float(str(line["loss_live"])))
        losses_of.setdefault(str(line["name"]), {})[int(str(line["seed"]))] = pair
    base = losses_of.get(ROWS[0].name, {})
    lines = [
        "| row | outer lr, momentum | codec | seeds | loss agreed | ± | loss one peer | against DiLoCo |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        seeds = losses_of.get(row.name)
        if not seeds:
            continue
        agreed = [pair[0] for pair in seeds.values()]
        ratios = [pair[0] / base[seed][0] - 1 for seed, pair in seeds.items() if seed in base]
        against = f"{100 * statistics.median(ratios):+.1f} %" if ratios else ""
        kind = "Nesterov" if row.nesterov else "heavy ball"
        setting = "-" if row.rule == "data-parallel" else f"{row.lr}, {row.momentum} {kind}"
        lines.append(
            f"| {row.name} | {setting} | {'-' if row.rule == 'data-parallel' else row.codec} | {len(seeds)} "
            f"| {statistics.median(agreed):.3f} | {(max(agreed) - min(agreed)) / 2:.3f} "
            f"| {statistics.median(pair[1] for pair in seeds.values()):.3f} | {against} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Loss at equal tokens, by apply rule and delay.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of 30 inner steps (30 or 150)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rules", nargs="*", help="only rows with one of these rules, or with this exact name"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("loss_table.jsonl"), help="JSON lines; finished rows are kept"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the table of what is done, train nothing")
    options = parser.parse_args(arguments)
    if not options.table:
        torch.set_num_threads(options.threads)
        _train(options.rounds, options.seeds, options.rules, options.out)
    print(table(read_rows(options.out, options.rounds)))


def _train(rounds: int, seeds: int, rules: Sequence[str] | None, out: Path) -> None:
    corpus = embedded_corpus()
    finished = {(line["name"], line["seed"]) for line in read_rows(out, rounds)}
    for row in ROWS:
        if rules and row.rule not in rules and row.name not in rules:
            continue
        for seed in range(seeds):
            if (row.name, seed) in finished:
                continue
            line = simulate(row, rounds, seed, corpus)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
