"""What the defence against liars costs where nobody lies: held-out loss with the weight cap against without.

A laboratory, as ``loss_table``: four honest peers in one process, synchronous rounds, the byte GPT of
``loss_model``. The rules are the product's own: ``capped`` weights and rule "centred" for each part against
plain weights and rule "mean"; so are codec, outer step and outer settings (those of a new run file).
Peers are equally fast, or two of them ten times as fast as the others, and weigh by their tokens.

Law: both rules of a seed see the same start, the same windows of text and the same learning rates, so they
compare pairwise. Reported for each pair of speeds: the losses, and the median over seeds of the loss with
defence over that without, less 1. JSON.

    python benchmarks/defence_tax.py [--rounds 150] [--seeds 4]

Price: rounds of ``--steps`` 10 inner steps, a third of ``loss_table``'s, so that all of it takes minutes; a
slow peer makes one step in a round. No delay and no late parts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loss_model import (
    CONTEXT,
    FRAGMENTS,
    Stacked,
    Windows,
    flatten,
    gradients,
    held_out_loss,
    learning_rate,
    start_params,
    unflatten_,
)
from torch import Tensor

from p2p_co2.config import RunConfig
from p2p_co2.protocol.rounds.attempt import Share, capped
from p2p_co2.recipes.corpus import embedded_corpus
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import get_rule, reduce_slices
from p2p_co2.tensors.codec import get_codec
from p2p_co2.wire.identity import PeerId

SPEEDS = {"equal": (1, 1, 1, 1), "ten times": (1, 1, 10, 10)}
"""Inner steps of the fastest for one of each peer's."""
CAPS = (0.0, RunConfig().weight_cap)


class Together:
    """The peers of one speed: their models on one leading dimension, trained as one computation."""

    def __init__(self, seed: int, peers: Sequence[int], every: int) -> None:
        self.peers, self.every = tuple(peers), every
        self.params = start_params(seed, len(self.peers))
        for tensor in self.params.values():
            tensor.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            self.params.values(), betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )

    def step(self, windows: Tensor, lr: float) -> None:
        """``windows``: int64 [all peers, 1, CONTEXT + 1]"""
        parts = gradients(self.params, windows[list(self.peers)])
        for tensor, gradient in zip(self.params.values(), parts, strict=True):
            tensor.grad = gradient
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()


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


def train(rounds: int, steps: int, case: tuple[int, str, float]) -> float:
    """Held-out loss of the agreed parameters. ``case``: (seed, name of the speeds, weight cap)."""
    seed, speeds, cap = case
    torch.set_num_threads(1)
    run, corpus = RunConfig(weight_cap=cap), embedded_corpus()
    groups = by_speed(seed, SPEEDS[speeds])
    names = [[name for name, _, _ in fragment] for fragment in FRAGMENTS]
    fragments = [Averaged(run, some, groups[0].params) for some in names]
    play(groups, fragments, Windows(corpus, seed, rounds * steps, len(SPEEDS[speeds])), rounds, steps)
    return held_out_loss(groups[0].params, corpus)


def tax(rounds: int, steps: int, seeds: int, processes: int) -> dict[str, object]:
    """By name of the speeds: the losses by seed, and what the defence adds."""
    cases = list(product(range(seeds), SPEEDS, CAPS))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        losses = dict(zip(cases, pool.map(partial(train, rounds, steps), cases), strict=True))
    without, with_ = CAPS
    found = dict[str, object]()
    for speeds in SPEEDS:
        pairs = [(losses[seed, speeds, without], losses[seed, speeds, with_]) for seed in range(seeds)]
        found[speeds] = {
            "loss_undefended": [round(pair[0], 5) for pair in pairs],
            "loss_defended": [round(pair[1], 5) for pair in pairs],
            "median_relative_difference": round(statistics.median(b / a - 1 for a, b in pairs), 6),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--steps", type=int, default=10, help="inner steps in a round, a multiple of 10")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.steps % max(map(max, SPEEDS.values())):
        parser.error("--steps must be a multiple of 10: a slow peer makes one step in ten")
    began_at = time.monotonic()
    found = tax(options.rounds, options.steps, options.seeds, options.processes)
    job = {"rounds": options.rounds, "steps": options.steps, "seeds": options.seeds, "weight_cap": CAPS[1]}
    seconds = round(time.monotonic() - began_at, 1)
    print(json.dumps({"at": time.strftime("%F %R"), **job, "seconds": seconds, **found}, indent=2))


if __name__ == "__main__":
    main()
