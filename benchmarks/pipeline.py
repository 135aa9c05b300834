"""What pipeline stages reach over real sockets, each figure beside its bar.

    python benchmarks/pipeline.py codecs [--stages 2 4] [--turns 3] [--seconds 20]
    python benchmarks/pipeline.py dsl [--turns 3]
    python benchmarks/pipeline.py kills [--kills 6] [--seed 0] [--choose]
    python benchmarks/pipeline.py slow [--turns 3]
    python benchmarks/pipeline.py loss [--stages 2 4] [--replicas 2] [--variants whole int8]

Peers are ``p2p-co2 join`` with one thread each, and train ``recipes.stages``, which rest instead of
computing, so that two cores are enough. Lines are carriers slowed down (``--slow-line``): no packets, no
slow start.

- ``codecs``: int8 by fp32 microbatches per second, where fp32's hop takes twice as long as computing, M =
  32.
- ``dsl``: the share of time in which the slowest of two stages computes, on that line, int8, M = 32.
- ``kills``: 2 x 2, a peer killed every 20 s, and a newcomer at once: tokens dropped, and microbatches per
  second by what the peers that are left would do undisturbed.
- ``slow``: one of three replicas four times slower: what they count by what they would without waiting.
- ``loss``: held-out loss at equal tokens of whole-model peers, and of stages with each pair of codecs; a
  laboratory, with the product's stages, payloads and shares of routes, and a stage group's outer step half a
  round late. Variants of a seed see the same start, microbatches and rates. "again" differs from "fp32" in
  the routes alone: what it is off by is noise. "int4", which no run may have, must show why."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from common import ROOT, Bench, Figures, against, bench, command, note, parser_of, run
from loss import PEAK_LR, HeldFragment, held_out_rows, learning_rate, unflatten_
from loss import Case as Setting
from loss import against as against_base
from torch import Tensor, nn

from bootstrap.local_swarm import Child
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.pipeline.machine import WINDOW, Do
from p2p_co2.protocol.pipeline.routes import shares
from p2p_co2.recipes import recipe_digest
from p2p_co2.recipes.byte_gpt import Shape, byte_gpt_stages, next_token_loss
from p2p_co2.recipes.corpus import Corpus, embedded_corpus
from p2p_co2.recipes.stages import Stages
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.stages import Chain
from p2p_co2.trainer.stages.work import Crossings, Done, StageWork
from p2p_co2.wire.identity import PeerId

RECIPE = f"{ROOT / 'benchmarks' / 'recipes.py'}:stages"
NO_ROUNDS_S = 1e6
POSITIONS, WIDTH = 512, 160
STAGE_S = 0.018
"""Of a forward; a microbatch takes three times that: 54 ms, as a stage of the demo's model does."""
COMPUTE_S = 3 * STAGE_S
FP32_BYTES = 4 * POSITIONS * WIDTH


def run_of(
    stages: int, microbatches: int, codec: str, round_s: float = NO_ROUNDS_S, fragments: int = 1,
    **options: Any,
) -> RunConfig:  # fmt: skip
    options = {"stage_s": STAGE_S, "positions": POSITIONS, "width": WIDTH} | options
    piped = {"stages": stages, "microbatches": microbatches, "sequences": 1, "forward": codec,
             "backward": codec}  # fmt: skip
    return RunConfig(
        name="pipeline", recipe=RECIPE, recipe_options=options, fragments=fragments,
        recipe_digest=recipe_digest(RECIPE, options), clock=ClockConfig(mode="time", round_s=round_s),
        pipeline=PipelineConfig.model_validate(piped),
    )  # fmt: skip


def join(swarm: Bench, name: str, stage: int, *options: str, slower: float = 1.0) -> Child:
    """A peer with ``stage``, or with that which it chooses (-1)."""
    place = ["--host", "127.0.0.1", "--carrier", "grpc", "--no-board", "--checkpoint-every", "1000000"]
    place += ["--stage", str(stage)] if stage >= 0 else []
    return swarm.join(name, *place, *options, recipe=RECIPE, variables={"STAGE_SLOWER": str(slower)})


def last_of(swarm: Bench, name: str) -> ev.StageProgress | None:
    known = swarm.events(name, ev.StageProgress)
    return known[-1] if known else None


def wait_until_counted(swarm: Bench, names: Sequence[str], count: int) -> None:
    swarm.wait_until(
        f"{count} microbatches of {names}",
        lambda: all(_counted(swarm, [name]) >= count for name in names), 300.0,
    )  # fmt: skip


def grown(swarm: Bench, names: Sequence[str], seconds: float) -> dict[str, tuple[float, float]]:
    """By peer, over so many seconds from now: microbatches counted a second, and the share of time waited."""
    first = {name: last_of(swarm, name) for name in names}
    time.sleep(seconds)
    swarm.wait_until(
        "newer reports", lambda: all(last_of(swarm, name) != first[name] for name in names), 60.0
    )
    found = {}
    for name, before in first.items():
        after = last_of(swarm, name)
        assert before is not None
        assert after is not None
        took_s = after.at - before.at
        found[name] = (after.counted - before.counted) / took_s, (after.waiting_s - before.waiting_s) / took_s
    return found


def chain(settings: RunConfig, line: str, seconds: float) -> dict[str, tuple[float, float]]:
    """``grown`` of one replica of each stage, all behind such lines."""
    with bench(settings, grace_s=2.0) as swarm:
        names = [f"stage{stage}" for stage in range(settings.pipeline.stages)]
        for stage, name in enumerate(names):
            join(swarm, name, stage, "--slow-line", line)
        wait_until_counted(swarm, names, settings.pipeline.microbatches)
        return grown(swarm, names, seconds)


def codecs(options: argparse.Namespace) -> Figures:
    """int8 boundaries by fp32 ones."""
    up = 8 * FP32_BYTES / (2 * COMPUTE_S)
    line, found = f"{up:.0f},{10 * up:.0f},0.01,0,0", Figures()
    for stages in options.stages:
        turns: dict[str, list[float]] = {"fp32": [], "int8": []}
        for _ in range(options.turns):
            for codec, rates in turns.items():
                rates.append(chain(run_of(stages, 32, codec), line, options.seconds)["stage0"][0])
            note("codecs", stages, turns)
        medians = {codec: statistics.median(rates) for codec, rates in turns.items()}
        found[f"{stages} stages"] = {
            "int8_by_fp32": against(medians["int8"] / medians["fp32"], 1.8 if stages == 2 else 2.8),
            "share_of_computing": {codec: round(one * COMPUTE_S, 3) for codec, one in medians.items()},
            "microbatches_per_s": turns,
        }  # fmt: skip
    return found


def dsl(options: argparse.Namespace) -> Figures:
    """The share of time in which the slowest stage computes, on a dsl line."""
    line = PROFILES["dsl"]
    rates, times = (line.up_bits_per_s, line.down_bits_per_s), (line.latency_ms, line.jitter_ms)
    figures = (*rates, *(time_ms / 1e3 for time_ms in times), line.loss)
    words, computing = ",".join(f"{one:g}" for one in figures), list[float]()
    for _ in range(options.turns):
        waited = [share for _, share in chain(run_of(2, 32, "int8"), words, options.seconds).values()]
        computing.append(1 - min(waited))
        note("dsl", waited)
    return {"computing": against(statistics.median(computing), 0.85), "turns": computing, "line": words}


# ---- faults


def _counted(swarm: Bench, names: Sequence[str]) -> int:
    return sum(last.counted for name in names if (last := last_of(swarm, name)) is not None)


@dataclass
class Life:
    """From when to when a replica of ``stage`` has counted microbatches."""

    stage: int
    since: float = 0.0
    until: float = math.inf


def kills(options: argparse.Namespace) -> Figures:
    """A peer is killed every 20 s, and a newcomer comes at once."""
    random_ = random.Random(options.seed)
    every_s = 20.0
    with bench(run_of(2, 16, "int8", 10.0, 2, bulk=20_000), grace_s=2.0) as swarm:
        lives = {f"s{stage}-{replica}": Life(stage) for stage in range(2) for replica in range(2)}
        children = {name: join(swarm, name, life.stage) for name, life in lives.items()}
        wait_until_counted(swarm, list(lives), 32)
        calm_at, before = time.time(), _counted(swarm, _owners(lives))
        time.sleep(every_s)
        began_at, made_before = time.time(), _counted(swarm, _owners(lives))
        calm_rate = (made_before - before) / (began_at - calm_at)
        newcomers, deaths = list[Figures](), list[Figures]()
        for number in range(options.kills):
            victim = random_.choice(sorted(name for name, life in lives.items() if life.until == math.inf))
            stage, killed_at, last = lives[victim].stage, time.time(), last_of(swarm, victim)
            lives[victim].until = killed_at
            swarm.kill(children[victim])
            deaths.append({"stage": stage, "in_flight": last.in_flight if last else 0})
            name = f"new{number}"
            children[name] = join(swarm, name, -1 if options.choose else stage)
            since = _first_counted(swarm, name, every_s * 2)
            last = last_of(swarm, name)
            lives[name] = Life(last.stage if last else stage, since)
            newcomers.append({"stage": lives[name].stage, "counted_s": round(since - killed_at, 1)})
            note("kills", deaths[-1], newcomers[-1])
            time.sleep(max(0.0, killed_at + every_s - time.time()))
        ended_at, owners = time.time(), _owners(lives)
        counted = _counted(swarm, owners) - made_before
        drops = [e for name in owners for e in swarm.events(name, ev.MicrobatchDropped, began_at)]
    dropped = len(drops) + sum(d["in_flight"] for d in deaths if d["stage"] == 0)
    left_s = _left_s(lives, began_at, ended_at)
    return {
        "dropped": against(dropped / (counted + dropped), 0.03, at_most=True),
        "of_what_is_left": against(counted / (calm_rate * left_s), 0.8),
        "newcomer_s": against(max(n["counted_s"] for n in newcomers), 20.0, at_most=True),
        "of_all": round(counted / (calm_rate * (ended_at - began_at)), 3),
        "left_share": round(left_s / (ended_at - began_at), 3),
        "newcomers": newcomers, "deaths": deaths, "dropped_microbatches": dropped, "counted": counted,
        "calm_microbatches_per_s": round(calm_rate, 2),
        "reasons": sorted({e.reason.split(" 12D")[0][:60] for e in drops}),
    }  # fmt: skip


def _owners(lives: Mapping[str, Life]) -> list[str]:
    return [name for name, life in lives.items() if life.stage == 0]


def _left_s(lives: Mapping[str, Life], began_at: float, ended_at: float) -> float:
    """Seconds at the capacity of two replicas in either stage: the smaller stage decides."""
    times = {began_at, ended_at, *(life.since for life in lives.values())}
    times |= {life.until for life in lives.values()}
    edges = sorted(at for at in times if began_at <= at <= ended_at)
    left_s = 0.0
    for since, until in itertools.pairwise(edges):
        alive = [life.stage for life in lives.values() if life.since <= since and life.until >= until]
        left_s += (until - since) * min(alive.count(0), alive.count(1)) / 2
    return left_s


def _first_counted(swarm: Bench, name: str, timeout_s: float) -> float:
    """When a newcomer's first microbatch was counted, or when it was waited for no more."""
    until = time.time() + timeout_s
    while time.time() < until:
        known = [e for e in swarm.events(name, ev.StageProgress) if e.counted]
        if known:
            return known[0].at
        time.sleep(0.1)
    return time.time()


def slow(options: argparse.Namespace) -> Figures:
    """Three replicas a stage; one of the last stage is four times slower."""
    of_capacity, each = list[float](), list[Figures]()
    names = [f"s{stage}-{replica}" for stage in range(2) for replica in range(3)]
    for _ in range(options.turns):
        with bench(run_of(2, 32, "int8", round_s=10.0), grace_s=2.0) as swarm:
            for name in names:
                join(swarm, name, int(name[1]), slower=4.0 if name == "s1-0" else 1.0)
            wait_until_counted(swarm, names, 64)
            last = {name: one for name, one in grown(swarm, names, options.seconds).items() if name[1] == "1"}
        counted, could = sum(rate for rate, _ in last.values()), sum(r / (1 - w) for r, w in last.values())
        of_capacity.append(counted / could)
        each.append({name: round(rate, 2) for name, (rate, _) in last.items()})
        note("slow", of_capacity[-1], each[-1])
    return {"of_capacity_left": against(statistics.median(of_capacity), 0.85), "turns": of_capacity,
            "microbatches_per_s": each}  # fmt: skip


# ---- losses

SHAPE = Shape(layers=4, width=64, heads=4, context=64)
STEPS = 20
"""Inner steps of a round."""
HELD_OUT_WINDOWS = 1024
Batch = tuple[Tensor, Tensor]


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


def uncut(stages: Stages, seed: int) -> Stages:
    """The same model in one stage, with the same first parameters."""

    def make() -> Chain:
        return Chain(stages.build(seed, stage) for stage in range(len(stages)))

    return Stages([make], stages.split, stages.loss, stages.tokens, stages.side_range)


class Microbatches:
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


class Swarm:
    """All replicas of all stages, ``modules[stage][replica]``, and one optimizer for them: AdamW treats each
    value alone, so it is what separate ones would be. ``rounds`` False: no outer steps."""

    def __init__(
        self, variant: Variant, case: Case, seed: int, windows: Microbatches, rounds: bool = True
    ) -> None:
        self._variant, self._case, self._seed = variant, case, seed
        whole = byte_gpt_stages(SHAPE, case.stages)
        self._stages = whole if variant.split else uncut(whole, seed)
        replicas = range(case.replicas)
        self.modules = [[self._stages.build(seed, at) for _ in replicas] for at in range(len(self._stages))]
        self._params = [_stacked(modules) for modules in self.modules]
        setting = Setting("stages", delay=STEPS // 2, every=STEPS)
        self._groups = [HeldFragment(setting, list(params), 0, params) for params in self._params if rounds]
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
            self._optimizer.param_groups[0]["lr"] = PEAK_LR * learning_rate(step, steps)
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


def measure(variant: Variant, case: Case, seed: int, corpus: Corpus) -> float:
    """Train one variant; its held-out loss."""
    swarm = Swarm(variant, case, seed, Microbatches(corpus, seed, case))
    swarm.train(lambda round_, loss: None)
    agreed = Chain(modules[0] for modules in swarm.modules)
    windows = held_out_rows(corpus.held_out.unfold(0, SHAPE.context + 1, 1), HELD_OUT_WINDOWS)
    with torch.no_grad():
        each = (next_token_loss(agreed, (one[:, :-1], one[:, 1:])) for one in windows)
        return statistics.mean(map(float, each))


def law(case: Case, corpus: Corpus) -> float:
    """The largest difference of any parameter between split and unsplit after a round's inner steps: fp32,
    one replica, no outer rounds."""
    case = case._replace(replicas=1, rounds=1)
    ends = []
    for variant in (VARIANTS[0], VARIANTS[1]):
        swarm = Swarm(variant, case, 0, Microbatches(corpus, 0, case), rounds=False)
        swarm.train(lambda round_, loss: None)
        ends.append([p.detach() for modules in swarm.modules for p in modules[0].parameters()])
    return max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True))


def loss(options: argparse.Namespace) -> Figures:
    """What stages cost in held-out loss at equal tokens."""
    corpus, answer = embedded_corpus(), Figures()
    sizes = options.replicas, options.microbatches, options.sequences, options.rounds
    for stages in options.stages:
        case = Case(stages, *sizes)
        losses: dict[str, dict[int, float]] = {name: {} for name in options.variants}
        for seed, variant in itertools.product(options.seeds, VARIANTS):
            if variant.name in losses:  # seed by seed, so that what is cut short still compares
                losses[variant.name][seed] = measure(variant, case, seed, corpus)
                note(stages, "stages", variant.name, seed, losses[variant.name][seed])
        answer[f"{stages} stages"] = {
            "tokens": case.tokens,
            **{
                name: {"loss": seeds} | {
                    f"against {base}": against_base(seeds, losses[base])
                    for base in ("whole", "fp32") if base != name and base in losses
                } for name, seeds in losses.items()
            },
        }  # fmt: skip
    return answer


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    seconds = (20.0, "of a measurement")
    command(commands, "codecs", codecs, stages=([2, 4], "2, 4"), turns=(3, "in turn"), seconds=seconds)
    command(commands, "dsl", dsl, turns=(3, "in turn"), seconds=seconds)
    command(
        commands, "kills", kills, kills=(6, "of them"), seed=(0, "of whom they hit"),
        choose=(False, "newcomers choose their stage themselves"),
    )  # fmt: skip
    command(commands, "slow", slow, turns=(3, "in turn"), seconds=(30.0, "of a measurement"))
    made = command(
        commands, "loss", loss, stages=([2, 4], "2, 3, 4"), replicas=(2, "of each"),
        microbatches=(4, "a step"), sequences=(4, "in a microbatch"), rounds=(12, "of 20 inner steps"),
        seeds=([0, 1, 2], "which ones"),
    )  # fmt: skip
    names = [variant.name for variant in VARIANTS]
    made.add_argument("--variants", nargs="+", choices=names, default=names)
    run(parser)


if __name__ == "__main__":
    main()
