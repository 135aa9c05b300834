"""What stages cost in held-out loss at equal tokens: whole-model peers, then stages with each pair of codecs.

A laboratory, not a swarm: all replicas of all stages live in one process and nothing is lost on the way. The
rest is the product's own: stages and payloads (``StageWork``, ``Crossings``), the shares that routes are
drawn by, and a stage group's outer step with its codec, applied half a round late (``FragmentState``). The
model is the byte GPT, small.

    python benchmarks/pipeline_loss.py --stages 2 4           # 4 microbatches, 2 replicas of each
    python benchmarks/pipeline_loss.py --stages 2 --microbatches 32 --sequences 1
    python benchmarks/pipeline_loss.py --stages 4 --replicas 4 --variants whole fp32 int8
    python benchmarks/pipeline_loss.py --law                  # split against unsplit, no outer rounds
    python benchmarks/pipeline_loss.py --table                # of what is done; trains nothing

Law: all variants of a seed and a case see the same first parameters, microbatches and learning rates, so they
compare pairwise. Variant "again" differs from "fp32" in the routes alone: what it is off by is noise, and
smaller differences say nothing. "int4" is the other control: no run may have it, and the loss must show why.
Price: a few hundred thousand tokens, so losses lie above what the model can reach.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loss_model import learning_rate, unflatten_
from loss_table import HeldFragment, Row

from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import WINDOW, Do
from p2p_co2.protocol.pipeline.routes import shares
from p2p_co2.recipes.byte_gpt import ByteGPTStage, Shape, next_token_loss, next_token_sum, stage_edges
from p2p_co2.recipes.corpus import Corpus, embedded_corpus
from p2p_co2.recipes.stages import Stages
from p2p_co2.tensors.stages import Chain
from p2p_co2.trainer.stages.work import Crossings, Done, StageWork
from p2p_co2.wire.identity import PeerId

SHAPE = Shape(layers=4, width=64, heads=4, context=64)
STEPS = 20
"""Inner steps of a round."""
HELD_OUT_WINDOWS = 1024
Batch = tuple[Tensor, Tensor]


# What is compared


@dataclass(frozen=True)
class Variant:
    """``forward``, ``backward``: codecs at the boundaries. ``split`` False: whole-model peers. ``routes``:
    number of the draw. ``scattered``: drawn anew for each microbatch, not each round. ``critical``: of all
    gradients, as where every line binds; the last of an inner step flushes. ``drain``: of those alone that
    are sent when no forward is left."""

    name: str
    forward: str = "fp32"
    backward: str = "fp32"
    split: bool = True
    routes: int = 0
    scattered: bool = False
    critical: str = ""
    drain: bool = False


VARIANTS = (
    Variant("whole", split=False),
    Variant("fp32"),
    Variant("again", routes=1),
    Variant("scattered", scattered=True),
    Variant("int8", "int8", "int8"),
    Variant("int8-int4", "int8", "int4"),
    Variant("int8-rank16", "int8", "int8", critical="rank16"),
    Variant("int8-rank8", "int8", "int8", critical="rank8"),
    Variant("drain-int4", "int8", "int8", critical="int4", drain=True),
    Variant("drain-rank8", "int8", "int8", critical="rank8", drain=True),
    Variant("int4", "int4", "int4"),
)


class Case(NamedTuple):
    """One replica's inner step has ``microbatches`` of ``sequences``."""

    stages: int
    replicas: int
    microbatches: int
    sequences: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        per_step = self.replicas * self.microbatches * self.sequences * SHAPE.context
        return self.rounds * STEPS * per_step

    def __str__(self) -> str:
        sizes = f"{self.microbatches} microbatches of {self.sequences} x {SHAPE.context} tokens"
        return f"S = {self.stages}, R = {self.replicas}, {sizes}, {self.rounds} rounds of {STEPS} inner steps"


class Bar(NamedTuple):
    """``variant`` may be so much worse than ``against``, in percent, where ``applies``."""

    kind: str
    variant: str
    against: str
    percent: float
    applies: Callable[[Case], bool] = lambda case: True


BARS = (
    Bar("bar", "fp32", "whole", 0.5),
    Bar("bar", "int8", "fp32", 0.3),
    Bar("kill", "int8", "fp32", 0.5),
    Bar("kill", "int8-int4", "fp32", 0.5),
    *(
        Bar("kill", name, "int8", 0.5)
        for name in ("int8-int4", "int8-rank16", "int8-rank8", "drain-int4", "drain-rank8")
    ),
    Bar("kill", "int8", "whole", 1.0, lambda case: case.stages == case.replicas == 4),
)


# Training


def cut(count: int) -> Stages:
    """The byte GPT in ``count`` stages."""
    edges = stage_edges(SHAPE.layers, count)
    makers = [lambda pair=pair: ByteGPTStage(SHAPE, *pair) for pair in edges]  # type: ignore[misc]
    return Stages(makers, lambda batch: batch, next_token_sum, side_range=(0, SHAPE.vocab_size))


def uncut(stages: Stages, seed: int) -> Stages:
    """The same model in one stage, with the same first parameters."""

    def make() -> Chain:
        return Chain(stages.build(seed, stage) for stage in range(len(stages)))

    return Stages([make], stages.split, stages.loss, stages.tokens, stages.side_range)


class Windows:
    """The microbatches of all owners, fixed by the seed."""

    def __init__(self, corpus: Corpus, seed: int, case: Case) -> None:
        generator = torch.Generator().manual_seed(7919 * seed + 1)
        count = case.rounds * STEPS * case.microbatches
        self._text, self._span = corpus.train, torch.arange(SHAPE.context + 1)
        size = (case.replicas, count, case.sequences, 1)
        self._starts = torch.randint(len(self._text) - SHAPE.context - 1, size, generator=generator)

    def of(self, owner: int) -> Iterator[Batch]:
        for starts in self._starts[owner]:
            windows = self._text[starts + self._span].long()
            yield windows[:, :-1], windows[:, 1:]


def held_out(corpus: Corpus) -> list[Batch]:
    """A fixed set, the same for all variants and seeds."""
    generator = torch.Generator().manual_seed(0)
    last = len(corpus.held_out) - SHAPE.context - 1
    starts = torch.randint(last, (HELD_OUT_WINDOWS, 1), generator=generator)
    windows = corpus.held_out[starts + torch.arange(SHAPE.context + 1)].long()
    return [(piece[:, :-1], piece[:, 1:]) for piece in windows.split(32)]


class Swarm:
    """All replicas of all stages, ``modules[stage][replica]``, and one optimizer for them: AdamW treats each
    value alone, so it is what separate ones would be. ``rounds`` False: no outer steps."""

    def __init__(
        self, variant: Variant, case: Case, seed: int, windows: Windows, rounds: bool = True
    ) -> None:
        self._variant, self._case, self._seed = variant, case, seed
        whole = cut(case.stages)
        self._stages = whole if variant.split else uncut(whole, seed)
        replicas = range(case.replicas)
        self.modules = [[self._stages.build(seed, at) for _ in replicas] for at in range(len(self._stages))]
        self._params = [_stacked(modules) for modules in self.modules]
        row = Row("stages", "keep", delay=STEPS // 2)
        self._groups = [
            HeldFragment(row, list(params), 0, params, every=STEPS) for params in self._params if rounds
        ]
        first = next(windows.of(0))
        codecs = variant.forward, variant.backward, variant.critical
        crossings = Crossings.of(self._stages, *first, *codecs)
        self._works = [
            [
                StageWork(self._stages, module, at, crossings, None if at else windows.of(replica))
                for replica, module in enumerate(modules)
            ]
            for at, modules in enumerate(self.modules)
        ]
        values = [p for modules in self.modules for module in modules for p in module.parameters()]
        self._optimizer = torch.optim.AdamW(values, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def train(self, progress: Callable[[int, float], None]) -> None:
        """All inner steps of the run. ``progress``: told each round and its mean loss so far."""
        steps, loss = self._case.rounds * STEPS, 0.0
        for step in range(steps):
            self._optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
            loss += self._inner_step(step)
            for group in self._groups:
                group.boundary(step + 1)
            if (step + 1) % STEPS == 0:
                progress((step + 1) // STEPS, loss / STEPS)
                loss = 0.0
        for group, params in zip(self._groups, self._params, strict=False):  # no groups, nothing agreed
            group.flush()
            unflatten_(params, list(params), group.agreed().expand(self._case.replicas, -1))

    def _inner_step(self, step: int) -> float:
        """Returns the mean loss over its tokens."""
        for number in range(self._case.microbatches):
            when = f"{step} {number}" if self._variant.scattered else f"{step // STEPS}"
            for path in self._draw(when):
                self._microbatch(path, step * self._case.microbatches + number)
        done = [[work.compute(Work(Do.STEP)).counted for work in works] for works in self._works]
        # Equal shares: each replica counts as many tokens as any other, so all weigh alike in a round.
        assert {one.microbatches for each in done for one in each if one} == {self._case.microbatches}
        self._optimizer.step()
        self._optimizer.zero_grad()
        last = [one for one in done[-1] if one]
        return sum(one.loss for one in last) / sum(one.tokens for one in last)

    def _microbatch(self, path: list[int], number: int) -> None:
        """Forward and back through ``path``, which has a replica of each stage; ``number`` of its owner's."""
        key, works = Key(path[0], number), [self._works[at][replica] for at, replica in enumerate(path)]
        done = Done(Work(Do.FORWARD, key))
        for at, work in enumerate(works):
            done = work.compute(self._sending(at, Work(Do.FORWARD, key, done.payload)))
            assert not done.refused, done.refused
        for at in reversed(range(len(works) - 1)):
            asked = Work(Do.BACKWARD, key, done.payload, done.tokens, done.loss, codec=done.codec)
            done = works[at].compute(self._sending(at, asked))
            assert not done.refused, done.refused

    def _sending(self, at: int, work: Work) -> Work:
        """``work`` as the machine of stage ``at`` hands it out: urgent or not, and with an heir, the next of
        the same owner in this inner step, if routes stay for as long."""
        assert work.key is not None
        left = self._case.microbatches - 1 - work.key.number % self._case.microbatches
        is_last = at == len(self._works) - 1
        window = 1 if is_last else WINDOW * (len(self._works) - at)
        is_urgent = bool(self._variant.critical) and (left < window or not self._variant.drain)
        has_heir = is_urgent and left > 0 and not self._variant.scattered
        heir = Key(work.key.owner, work.key.number + 1) if has_heir else None
        return replace(work, is_urgent=is_urgent, heir=heir)

    def _draw(self, when: str) -> list[list[int]]:
        """The path of each owner's next microbatch. Equal peers: each sender has one receiver."""
        rates = {PeerId(str(replica)): 1.0 for replica in range(self._case.replicas)}
        paths = [[owner] for owner in range(self._case.replicas)]
        for boundary in range(len(self._stages) - 1):
            seed = f"{self._seed} {self._variant.routes} {when} {boundary}".encode()
            for path in paths:
                found = shares(PeerId(str(path[-1])), rates, rates, seed)
                path.append(int(max(found, key=found.__getitem__)))
        return paths


def _stacked(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters of all replicas, name -> [replicas, ...]; the modules' own become views of them."""
    stacked = {}
    for name, values in modules[0].named_parameters():
        stacked[name] = values.detach().repeat(len(modules), *[1] * values.dim())
        for module, one in zip(modules, stacked[name], strict=True):
            module.get_parameter(name).data = one
    return stacked


def measure(variant: Variant, case: Case, seed: int, corpus: Corpus) -> dict[str, object]:
    """Train one variant; returns its line of the output file."""
    started_at = time.perf_counter()
    swarm = Swarm(variant, case, seed, Windows(corpus, seed, case))

    def progress(round_: int, loss: float) -> None:
        took_s = time.perf_counter() - started_at
        print(f"  round {round_}: {loss:.4f} nats per byte, {took_s:.0f} s", file=sys.stderr, flush=True)

    swarm.train(progress)
    agreed = Chain(modules[0] for modules in swarm.modules)
    with torch.no_grad():
        losses = [float(next_token_loss(agreed, batch)) for batch in held_out(corpus)]
    return {
        **asdict(variant), **case._asdict(), "seed": seed, "steps": STEPS,
        "shape": list(SHAPE), "tokens": case.tokens, "loss": statistics.mean(losses),
        "seconds": time.perf_counter() - started_at,
    }  # fmt: skip


def law(case: Case, corpus: Corpus) -> float:
    """The largest difference of any parameter between split and unsplit after a round's inner steps: fp32,
    one replica, no outer rounds."""
    case = case._replace(replicas=1, rounds=1)
    ends = []
    for variant in (VARIANTS[0], VARIANTS[1]):
        swarm = Swarm(variant, case, 0, Windows(corpus, 0, case), rounds=False)
        swarm.train(lambda round_, loss: None)
        ends.append([p.detach() for modules in swarm.modules for p in modules[0].parameters()])
    return max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True))


# The table

Losses = dict[str, dict[int, float]]
"""By variant and seed."""


def read_lines(path: Path) -> dict[Case, Losses]:
    """The finished runs of ``path``, by case; none if there is no such file."""
    found: dict[Case, Losses] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        run = json.loads(line)
        if run["steps"] == STEPS and run["shape"] == list(SHAPE):
            case = Case(*(run[name] for name in Case._fields))
            found.setdefault(case, {}).setdefault(run["name"], {})[run["seed"]] = run["loss"]
    return found


def percents(losses: Losses, variant: str, against: str) -> list[float]:
    """How much worse, paired by seed, in the order of seeds."""
    ours, theirs = losses.get(variant, {}), losses.get(against, {})
    return [100 * (ours[seed] / theirs[seed] - 1) for seed in sorted(ours) if seed in theirs]


def table(done: dict[Case, Losses]) -> str:
    """Markdown: each seed's loss, the medians, and what the bars say."""
    lines = []
    for case, losses in done.items():
        lines += [
            f"{case}: {case.tokens / 1e6:.2f}M tokens", "",
            "| variant | loss, by seed | median | against whole, % | against fp32, % |",
            "|---|---|---|---|---|",
        ]  # fmt: skip
        for name, seeds in losses.items():
            each = [seeds[seed] for seed in sorted(seeds)]
            cells = [", ".join(f"{loss:.4f}" for loss in each), f"{statistics.median(each):.4f}"]
            cells += [
                _told(percents(losses, name, base)) if name != base else "" for base in ("whole", "fp32")
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
        for bar in BARS:
            worse = percents(losses, bar.variant, bar.against)
            if worse and bar.applies(case):
                passes = statistics.median(worse) <= bar.percent
                says = "holds" if passes else "is missed" if bar.kind == "bar" else "FIRES"
                says = "does not fire" if passes and bar.kind == "kill" else says
                told = f"{bar.variant} against {bar.against}, {_told(worse)}"
                lines.append(f"- {bar.kind} {bar.percent:+.1f} %: {told}: {says}")
        lines.append("")
    return "\n".join(lines)


def _told(worse: Sequence[float]) -> str:
    """Median, then each."""
    if not worse:
        return ""
    return f"{statistics.median(worse):+.2f} ({', '.join(f'{one:+.2f}' for one in worse)})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="*", choices=names, default=names)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--stages", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4, help="in a microbatch")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--out", type=Path, default=Path("pipeline_loss.jsonl"), help="JSON lines; finished runs are kept"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--law", action="store_true", help="only split against unsplit, S = 2, 3, 4")
    parser.add_argument("--table", action="store_true", help="print the table of what is done, train nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sizes = options.replicas, options.microbatches, options.sequences, options.rounds
    if options.law:
        corpus = embedded_corpus()
        for stages in (2, 3, 4):
            print(f"S = {stages}: differs by {law(Case(stages, *sizes), corpus):.1e} at most", flush=True)
        return
    if not options.table:
        _train([Case(stages, *sizes) for stages in options.stages], options)
    print(table(read_lines(options.out)))


def _train(cases: Sequence[Case], options: argparse.Namespace) -> None:
    corpus = embedded_corpus()
    chosen = [variant for variant in VARIANTS if variant.name in options.variants]
    done = read_lines(options.out)
    # Seed by seed, so that what is cut short still compares.
    for case, seed, variant in itertools.product(cases, options.seeds, chosen):
        if seed in done.get(case, {}).get(variant.name, {}):
            continue
        print(f"{case}, seed {seed}, {variant.name}", file=sys.stderr, flush=True)
        line = measure(variant, case, seed, corpus)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
