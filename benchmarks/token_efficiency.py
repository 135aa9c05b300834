"""Token efficiency: how much training a swarm of N peers is worth, against data-parallel and a lone peer.

A laboratory, not a swarm: the peers are stacked in one process (``loss_model``), and the network is a delay
in inner steps. What a peer offers, the mean and the outer step are the product's own (``FragmentState``,
int4). At the end of a run peers offer the rest, as the product's do.

- **swarm**: N peers, each with its own batch, ``keep``, 4 fragments, means applied 7 inner steps late.
- **data-parallel**: one model whose batch is the N peers' batches: the same tokens in the same steps.
- **lone**: one peer without a swarm; also for longer, up to the tokens of all N.

"Worth" is the number of times a lone peer's tokens that a lone peer needs for the same held-out loss. It is
read off the lone peers' losses, mean over seeds, by straight lines over the logarithm of tokens. A lone run
twice as long has a learning rate that falls over its own length, so each length is a run of its own.

Law: all cases of a seed have the same start; at one number of peers they see the same windows of text.
A "round" is 30 inner steps whatever a variant's own round is, so equal rounds are equal tokens.

    python benchmarks/token_efficiency.py --rounds 16 30                # appends; skips what is there
    python benchmarks/token_efficiency.py --rounds 30 --variants        # 4 peers, other settings
    python benchmarks/token_efficiency.py --rounds 30 --only "H 100"    # one of them
    python benchmarks/token_efficiency.py --table
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loss_model import (
    CONTEXT,
    FRAGMENTS,
    PARAMETERS,
    PEAK_LR,
    WARMUP_STEPS,
    Stacked,
    Windows,
    gradients,
    held_out_loss,
    learning_rate,
    start_params,
    unflatten_,
)
from loss_table import Clip, HeldFragment, Row

from p2p_co2.recipes.corpus import Corpus, embedded_corpus

ROUND = 30
"""Inner steps of what the tables call a round."""
SIZES = (1, 2, 4, 8)
NAMES = [[name for name, _, _ in fragment] for fragment in FRAGMENTS]


@dataclass(frozen=True)
class Case:
    """One way to train. ``kind``: "swarm", "data-parallel" or "lone". ``windows``: of 64 tokens, per peer and
    inner step. ``every``: inner steps of a swarm's round. ``delay``: inner steps from a send to its mean.
    ``optimizer``: "adamw", or "muon" (matrices of the blocks; AdamW for the rest). ``peak``: its learning
    rate, at most; ``schedule``: "cosine" down to a tenth, or "constant" after the warm-up."""

    name: str
    kind: str = "swarm"
    peers: int = 4
    windows: int = 1
    every: int = ROUND
    delay: int = 7
    lr: float = 0.7
    momentum: float = 0.5
    nesterov: bool = True
    clip: Clip = "rms"
    codec: str = "int4"
    optimizer: str = "adamw"
    peak: float = PEAK_LR
    schedule: str = "cosine"

    def row(self) -> Row:
        return Row(
            self.name, "keep", self.delay, len(NAMES), self.codec, self.lr, self.momentum, self.nesterov,
            clip=self.clip,
        )  # fmt: skip


DEFAULT = Case("swarm of 4")
LONE = Case("lone", "lone", 1)
MUON = replace(DEFAULT, name="swarm of 4, muon", optimizer="muon", peak=4e-3)
OUTER = ((1.0, 0.5), (0.5, 0.5), (0.7, 0.3), (0.7, 0.7), (0.7, 0.9), (1.0, 0.3), (1.0, 0.0))


def table_cases() -> list[Case]:
    """Those of the table by number of peers; the most important first."""
    cases = [LONE]
    for peers in (4, 2, 8, 1):
        cases.append(replace(DEFAULT, name=f"swarm of {peers}", peers=peers))
        if peers > 1:
            cases.append(Case(f"data-parallel {peers}", "data-parallel", peers))
    return cases


def variant_cases() -> list[Case]:
    """4 peers with other settings, against ``DEFAULT``."""
    cases = [
        replace(DEFAULT, name=f"outer {lr}, {momentum}", lr=lr, momentum=momentum) for lr, momentum in OUTER
    ]
    cases += [replace(DEFAULT, name=f"H {every}", every=every) for every in (10, 100, 300)]
    cases += [replace(DEFAULT, name="delay 1", delay=1), replace(DEFAULT, name="no clip", clip="none")]
    cases.append(replace(DEFAULT, name="fp32", codec="fp32"))
    for optimizer, peak in (
        ("adamw", 1e-3),
        ("adamw", 4e-3),
        *(("muon", peak) for peak in (2e-3, 4e-3, 8e-3)),
    ):
        cases += _three(f"{optimizer} {peak:g}", optimizer=optimizer, peak=peak)
    cases += [
        replace(MUON, name=f"muon, outer {lr}, {momentum}", lr=lr, momentum=momentum)
        for lr, momentum in OUTER
    ]
    cases += [replace(MUON, name=f"muon, H {every}", every=every) for every in (10, 100, 300)]
    cases += [replace(MUON, name=f"muon, swarm of {peers}", peers=peers) for peers in (1, 2, 8)]
    for windows in (4, 8):
        cases += _three(f"batch {windows}", windows=windows)
        cases += _three(f"muon, batch {windows}", windows=windows, optimizer="muon", peak=MUON.peak)
    cases += _three("constant", schedule="constant")
    return [*cases, *_three("muon, constant", schedule="constant", optimizer="muon", peak=MUON.peak)]


def _three(name: str, **changes: Any) -> list[Case]:
    """A swarm, data-parallel and a lone peer with the same settings."""
    bases = (DEFAULT, Case("data-parallel 4", "data-parallel"), LONE)
    return [replace(base, name=f"{base.name}, {name}", **changes) for base in bases]


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
        rest = [one for name, one in params.items() if name not in self._matrices]
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


def adamw(params: Iterable[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def rate(case: Case, step: int, steps: int) -> float:
    """The learning rate of inner step ``step`` of ``steps``."""
    if case.schedule == "constant":
        return case.peak * min(1.0, (step + 1) / WARMUP_STEPS)
    return learning_rate(step, steps) * case.peak / PEAK_LR


def train(case: Case, rounds: int, seed: int, corpus: Corpus) -> dict[str, object]:
    """Train one case; returns its line of the output file."""
    steps, started_at = rounds * ROUND, time.perf_counter()
    windows = Windows(corpus, seed, steps, case.peers * case.windows)
    models = case.peers if case.kind == "swarm" else 1
    params = start_params(seed, models)
    for tensor in params.values():
        tensor.requires_grad_(True)
    optimizer = StackedMuon(params) if case.optimizer == "muon" else adamw(params.values())
    fragments = _fragments(case, params) if case.kind == "swarm" else []
    for step in range(steps):
        batch = windows.step(step).view(models, -1, CONTEXT + 1)
        for tensor, gradient in zip(params.values(), gradients(params, batch), strict=True):
            tensor.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate(case, step, steps)
        optimizer.step()
        for fragment in fragments:
            fragment.boundary(step + 1)
    for fragment, names in zip(fragments, NAMES if fragments else [], strict=True):
        fragment.flush(steps)
        unflatten_(params, names, fragment.agreed().expand(models, -1))
    return asdict(case) | {
        "rounds": rounds,
        "seed": seed,
        "parameters": PARAMETERS,
        "tokens": steps * case.peers * case.windows * CONTEXT,
        "loss": held_out_loss(params, corpus),
        "seconds": time.perf_counter() - started_at,
    }


def _fragments(case: Case, params: Stacked) -> list[HeldFragment]:
    offsets = [math.ceil(index * case.every / len(NAMES)) for index in range(len(NAMES))]
    return [
        HeldFragment(case.row(), names, offset, params, case.every)
        for names, offset in zip(NAMES, offsets, strict=True)
    ]


# The tables

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


def efficiency_table(losses: Losses, rounds: int) -> str:
    """Markdown, one line a number of peers: what a swarm and data-parallel reach in ``rounds``."""
    curve = {
        length: statistics.mean(seeds.values()) for (name, length), seeds in losses.items() if name == "lone"
    }
    lines = [
        "| peers | swarm: loss | data-parallel: loss | a lone peer, as many tokens: loss | swarm against "
        "data-parallel | swarm is worth | data-parallel is worth | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for peers in SIZES:
        swarm = losses.get((f"swarm of {peers}", rounds))
        if swarm is None:
            continue
        # With one peer data-parallel is the lone peer.
        parallel = losses.get(("lone" if peers == 1 else f"data-parallel {peers}", rounds), {})
        lone = losses.get(("lone", peers * rounds), {})
        lines.append(
            f"| {peers} | {_mean(swarm)} | {_mean(parallel)} | {_mean(lone)} | {against(swarm, parallel)} "
            f"| {_worth(swarm, rounds, curve)} | {_worth(parallel, rounds, curve)} | {len(swarm)} |"
        )
    return "\n".join(lines)


def variants_table(losses: Losses, rounds: int) -> str:
    """Markdown, one line a variant: its loss, and against 4 peers with the defaults."""
    base = losses.get((DEFAULT.name, rounds), {})
    lines = ["| 4 peers | loss | against the default | seeds |", "|---|---|---|---|"]
    for case in [DEFAULT, *variant_cases()]:
        if seeds := losses.get((case.name, rounds)):
            lines.append(f"| {case.name} | {_mean(seeds)} | {against(seeds, base)} | {len(seeds)} |")
    return "\n".join(lines)


def _mean(seeds: Mapping[int, float]) -> str:
    if not seeds:
        return ""
    spread = (max(seeds.values()) - min(seeds.values())) / 2
    return f"{statistics.mean(seeds.values()):.3f} ± {spread:.3f}"


def _worth(seeds: Mapping[int, float], rounds: int, curve: Mapping[int, float]) -> str:
    if not seeds:
        return ""
    found = worth(statistics.mean(seeds.values()), rounds, curve)
    return f"> {max(curve) / rounds:.1f}" if math.isinf(found) else f"{found:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Loss at equal tokens: swarm, data-parallel, a lone peer.")
    parser.add_argument(
        "--rounds", type=int, nargs="*", default=[30], help="of 30 inner steps: 16 30 150 600"
    )
    parser.add_argument("--peers", type=int, nargs="*", default=SIZES, help="numbers of peers of the table")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="which ones")
    parser.add_argument("--variants", action="store_true", help="4 peers with other settings, not the table")
    parser.add_argument("--only", nargs="*", help="the cases of these names")
    parser.add_argument("--out", type=Path, default=Path("token_efficiency.jsonl"), help="JSON lines, kept")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--table", action="store_true", help="print the tables of what is done, train nothing"
    )
    options = parser.parse_args(arguments)
    if not options.table:
        torch.set_num_threads(options.threads)
        known = [*table_cases(), *variant_cases()]
        sized = [case for case in table_cases() if case == LONE or case.peers in options.peers]
        cases = variant_cases() if options.variants else sized
        if options.only:
            cases = [case for case in known if case.name in options.only]
        _train(cases, options)
    losses = by_case(read_lines(options.out))
    for rounds in sorted({rounds for _, rounds in losses}):
        for title, table in (("by peers", efficiency_table), ("variants", variants_table)):
            if (text := table(losses, rounds)).count("\n") > 1:
                print(f"\n{rounds} rounds, {title}\n\n{text}")


def _train(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """The table's lone peer trains as long as each number of peers together, too."""
    corpus = embedded_corpus()
    for rounds in options.rounds:
        for seed in options.seeds:
            for case in cases:
                for peers in options.peers if case == LONE else [1]:
                    _train_one(case, rounds * peers, seed, corpus, options.out)


def _train_one(case: Case, rounds: int, seed: int, corpus: Corpus, out: Path) -> None:
    if seed in by_case(read_lines(out)).get((case.name, rounds), {}):
        return
    line = train(case, rounds, seed, corpus)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"{case.name}, {rounds} rounds, seed {seed}: {line['loss']:.4f}, {line['seconds']:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
