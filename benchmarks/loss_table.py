"""Loss at equal tokens: every apply rule and delay, in 4 bits, against synchronous DiLoCo and data-parallel.

A laboratory, not a swarm: four peers live in one process and the network is a number of inner steps. The
outer maths and the codec are the product's own (``p2p_co2.tensors.outer``, ``p2p_co2.tensors.codec``); only
the byte GPT is the laboratory's (``loss_model``). Rows "as held" go through what a peer's process holds, too
(``FragmentState``): what it keeps of its own offers takes four bits there (residuals of error feedback,
eager's corrections), here fp32.

Law: all rows of a seed see the same start, the same windows of text and the same
learning rates, so rows compare pairwise.
Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), Eager updates (2502.12996), CO2
(2401.16265).

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loss_model import (
    CONTEXT,
    FRAGMENTS,
    PARAMETERS,
    Stacked,
    Windows,
    flatten,
    gradients,
    held_out_loss,
    learning_rate,
    start_params,
    unflatten_,
)

from p2p_co2.config import ApplyRule, CodecConfig, OuterConfig, RunConfig
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.recipes.corpus import Corpus, embedded_corpus
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import get_rule, reduce_slices
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.outer_rules import Work
from p2p_co2.tensors.outer_rules import get_rule as get_outer_rule
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.wire.schedule import OfferState

PEERS, H = 4, 30
ID = bytes(8)
"""Of every offer: each peer has one at a time."""
Clip = Literal["none", "elementwise", "rms"]


@dataclass(frozen=True)
class Row:
    """One line of the table. ``delay`` in inner steps; ``rule`` "data-parallel" averages gradients at every
    step. ``feedback``: error feedback. ``as_held``: through the ledger of a peer's process."""

    name: str
    rule: str
    delay: int
    fragments: int = 1
    codec: str = "int4"
    lr: float = 0.7
    momentum: float = 0.5
    nesterov: bool = True
    gap_penalty: bool = True
    blocking_rounds: int = 0
    feedback: bool = False
    as_held: bool = False
    clip: Clip = "rms"

    @property
    def codec_config(self) -> CodecConfig:
        return CodecConfig(name=self.codec, error_feedback=self.feedback)

    def outer_config(self) -> OuterConfig:
        rule: ApplyRule = self.rule  # type: ignore[assignment]
        return OuterConfig(
            rule=rule,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            gap_penalty=self.gap_penalty,
            blocking_rounds=self.blocking_rounds,
            clip=self.clip,
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
    # What keeping one's own offers in four bits costs: each with fp32, and as a process holds it.
    for row in [row for row in rows if row.name in {"keep d3", f"co2 d{H}", f"eager d{H}"}]:
        corrected = replace(row, name=f"{row.name} feedback", feedback=True)
        rows.append(corrected)
        rows += [replace(one, name=f"{one.name} as held", as_held=True) for one in (row, corrected)]
    return rows


ROWS = _rows()


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
        self._residuals: list[Tensor | None] = [None] * PEERS
        self._rule = get_outer_rule(self._config)
        self._overwrites = self._rule.returns_work
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

    def _offered(self, peer: int, gradient: Tensor) -> Tensor:
        """What the others get of it. Every round commits with everybody here, so a residual moves on at
        once."""
        if not self._row.feedback:
            return self._transfer(gradient)
        decay = self._row.codec_config.error_feedback_decay
        wanted = gradient if self._residuals[peer] is None else gradient + self._residuals[peer] * decay
        sent = self._codec.decode(self._codec.encode(wanted))[: gradient.numel()]
        self._residuals[peer] = wanted - sent
        return sent

    def _send(self) -> None:
        self._snapshots = flatten(self._params, self._names)
        pairs = zip(self._snapshots, self._corrections, strict=True)
        self._gradients = torch.stack([self._measured(live, past) for live, past in pairs])
        self._base_version = self.state.version
        total = torch.zeros_like(self.state.params)
        for peer, gradient in enumerate(self._gradients):
            total += self._offered(peer, gradient)
        self._mean = self._transfer(total / PEERS)

    def _measured(self, live: Tensor, correction: Tensor | None) -> Tensor:
        """What was corrected at the last boundary has been offered already."""
        gradient = self.state.params - live
        return gradient if correction is None else gradient - correction

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
                # Progress since the send has not been offered, so (unlike in _exchange) it stays part of the
                # next offer.
                fresh, stale = old.params - live[peer], self._gradients[peer]
                fix = self._rule.correction(gap, 1 / PEERS, fresh, stale)
                change = outer.Merge(1.0, self.state.params - live[peer])
                if fix is not None:
                    change.addend.sub_(fix)
            else:
                gradient = old.params - self._snapshots[peer]
                merged = self._rule.merge(old, self.state, Work(gradient.__getitem__))
                assert merged is not None
                change = merged
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
            if mean is not None:
                fix = self._rule.correction(gap, 1 / PEERS, fresh[peer], stale[peer])
            self._corrections[peer] = fix
            change = outer.Merge(1.0, self.state.params - live[peer])
            if fix is not None:
                change.addend.sub_(fix)
            merged[peer] = live[peer] * change.keep + change.addend
        unflatten_(self._params, self._names, merged)


class HeldFragment:
    """One fragment of all peers, each with the ledger that its process would have: as ``FragmentLab``, with
    what a peer keeps between rounds as coarse as it is kept.

    Under co2 and eager the live parameters meet a mean at the next boundary, whenever it came. ``every``:
    inner steps of a round, ``H`` if 0. There are as many peers as ``params`` has models.
    """

    def __init__(self, row: Row, names: Sequence[str], offset: int, params: Stacked, every: int = 0) -> None:
        self._row, self._names, self._params, self._offset = row, names, params, offset
        self._every = every or H
        self._codec = get_codec(row.codec)
        run = RunConfig(outer=row.outer_config(), codec=row.codec_config)
        start = flatten(params, names)
        self._peers = [
            FragmentState(run, self._codec, str(peer), outer.init(one)) for peer, one in enumerate(start)
        ]
        everybody = {str(peer): 1.0 for peer in range(len(start))}
        ids = dict.fromkeys(everybody, ID)
        self._parts = [PartWeights(0, self._codec.blocks(start.shape[1]), everybody, ids)]
        self.gaps: list[float] = []
        self._mean: bytes | None = None  # in flight
        self._base_version = self._apply_at = self._sent_at = 0

    def boundary(self, step: int) -> None:
        """``step``: inner steps done so far. The first send is at ``offset``, as a peer's first one is."""
        if self._mean is not None and step >= self._apply_at:
            self._commit()
        if step and step % self._every == self._offset % self._every:
            self._send()
            self._sent_at, self._apply_at = step, step + self._row.delay
            if not self._row.delay:
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
        return self._peers[0].state.params[None]

    def _send(self) -> None:
        live, payloads = flatten(self._params, self._names), []
        for peer, ledger in enumerate(self._peers):
            offer = ledger.offer(live[peer].clone(), OfferState(ID))
            payloads.append((str(peer), 1.0, offer.payload))
            self._base_version = offer.base_version
            self._merge_(live, peer, offer.merge)
        self._mean = reduce_slices(get_rule("mean"), self._codec, payloads).encoded
        unflatten_(self._params, self._names, live)

    def _commit(self) -> None:
        mean = self._mean
        assert mean is not None
        live, round_ = flatten(self._params, self._names), self._peers[0].state.version + 1
        for peer, ledger in enumerate(self._peers):
            done = ledger.commit(round_, self._base_version, mean, self._parts)
            self._merge_(live, peer, done.merge)
        assert done.report is not None
        self.gaps.append(done.report.gap)
        self._mean = None
        unflatten_(self._params, self._names, live)

    def _decoded(self, mean: bytes) -> Tensor:
        values = self._codec.decode(torch.frombuffer(bytearray(mean), dtype=torch.uint8))
        return values[: self._peers[0].state.params.numel()]

    def _merge_(self, live: Tensor, peer: int, merge: outer.Merge | None) -> None:
        if merge is not None:
            live[peer] = live[peer] * merge.keep + merge.addend


def simulate(row: Row, rounds: int, seed: int, corpus: Corpus) -> dict[str, object]:
    """Train one row; returns its line of the output file."""
    steps, started_at = rounds * H, time.perf_counter()
    windows = Windows(corpus, seed, steps, PEERS)
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
    names = [[name for name, _, _ in fragment] for fragment in FRAGMENTS]
    return names if count == len(names) else [[name for group in names for name in group]]


def _fragments(row: Row, params: Stacked) -> Sequence[FragmentLab | HeldFragment]:
    groups = _names_of_fragments(row.fragments)
    offsets = [math.ceil(index * H / len(groups)) for index in range(len(groups))]
    kind = HeldFragment if row.as_held else FragmentLab
    return [kind(row, names, offset, params) for names, offset in zip(groups, offsets, strict=True)]


def _write_agreed(row: Row, params: Stacked, fragments: Sequence[FragmentLab | HeldFragment]) -> None:
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
