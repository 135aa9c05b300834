"""What pipeline stages reach over real sockets, each figure beside its bar and measured in one run with what
it is held against. Prints JSON.

    python benchmarks/pipeline.py [SECTION ...] [--turns 3] [--out FILE]

Every peer is a process of one thread (``pipeline_workers.py ours``). Sections:

- ``loopback``: tokens/s of byte-gpt in two stages, M = 16, fp32, by torch's ``Schedule1F1B`` over gloo and by
  a ``RemoteExpert`` of hivemind's: a server with the last stage and its loss, a client that computes the
  first and has several microbatches under way. In turns; ``--sequences`` of a microbatch.
- ``codecs``: int8 by fp32 on a line on which fp32's hop takes twice as long as computing, M = 32.
- ``dsl``: the share of time in which the slowest stage computes, on that line, M = 32: all in which its
  training thread does not wait. And tokens/s by what ``plan`` expects, told the computing as it was.
- ``bytes``: sent per token and hop by arithmetic, rounds off.
- ``rounds``: schedule points with a committed round, while microbatches fill the uplink.
- ``kills``: 2 x 2, a peer killed every 20 s for two minutes, and a newcomer at once.
- ``slow``: one of three replicas four times slower: what they count by what they would without waiting.
- ``memory``: peak of a stage's process by that of the same stage alone.

All but ``loopback``, ``bytes`` and ``memory`` train ``pipeline_recipe``, whose stages rest instead of
computing, so that two cores are enough. Lines are ``PeerConfig.slow_line``'s: carriers slowed down.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap import netns
from bootstrap.internet import Internet
from bootstrap.local_swarm import Child
from p2p_co2.config import ClockConfig, PipelineConfig, RunConfig, write_toml
from p2p_co2.planning.exchange import link_of
from p2p_co2.planning.pipeline import (
    PipelineForecast,
    StageCost,
    StagedSetting,
    StageMember,
    forecast_stages,
    loads_of,
)
from p2p_co2.planning.profiles import PROFILES, LinkProfile
from p2p_co2.recipes import recipe_digest
from p2p_co2.system.process import program
from p2p_co2.telemetry import events as ev
from tests.campaign import ROOT, START_S, Campaign

WORKERS = str(ROOT / "benchmarks" / "pipeline_workers.py")
RECIPE = f"{ROOT / 'benchmarks' / 'pipeline_recipe.py'}:make"
NO_ROUNDS_S = 1e6
POSITIONS, WIDTH = 512, 160
STAGE_S = 0.018
"""Of a forward; a microbatch takes three times that: 54 ms, as a stage of the demo's model does."""
COMPUTE_S = 3 * STAGE_S
FP32_BYTES = 4 * POSITIONS * WIDTH
DSL = "dsl"
CONGESTIONS = ("bbr", "cubic")
"""Of TCP with real packets: what it does at a loss decides on a line with any."""

Figures = dict[str, Any]


def run_of(
    stages: int, microbatches: int, codec: str = "fp32", *, recipe: str = RECIPE, sequences: int = 1,
    round_s: float = NO_ROUNDS_S, fragments: int = 1, **options: Any,
) -> RunConfig:  # fmt: skip
    if recipe == RECIPE:
        options = {"stage_s": STAGE_S, "positions": POSITIONS, "width": WIDTH} | options
    return RunConfig(
        name="pipeline", recipe=recipe, recipe_options=options,
        recipe_digest=recipe_digest(recipe, options), fragments=fragments,
        clock=ClockConfig(mode="time", round_s=round_s),
        pipeline=PipelineConfig.model_validate(
            {"stages": stages, "microbatches": microbatches, "sequences": sequences, "forward": codec,
             "backward": codec}
        ),
    )  # fmt: skip


@dataclass
class Bench(Campaign):
    """Processes of ``pipeline_workers``, and what they print."""

    internet: Internet | None = None
    """With a machine for each name, "seed" too; None: all on loopback."""

    def on(self, name: str, command: list[str]) -> list[str]:
        return command if self.internet is None else self.internet.machines[name].command(command)

    def work(self, name: str, role: str, *arguments: object, **variables: str) -> Child:
        command = [sys.executable, WORKERS, role, *(str(argument) for argument in arguments)]
        return self.start(name, self.on(name, command), variables)

    def start_seed_on(self, run: RunConfig) -> None:
        """On its machine of the internet."""
        assert self.internet is not None
        address = self.internet.machines["seed"].address
        (self.folder / "run.toml").write_text(write_toml(run))
        place = ["--folder", str(self.folder / "seed"), "--host", address, "--announce-host", address]
        command = program("bootstrap", "seed", str(self.folder / "run.toml"), *place, "--port", "31337")
        self.ticket = self.wait_for_line(self.start("seed", self.on("seed", command)), "ticket:", START_S)

    def ours(self, name: str, stage: int, slower: float = 1.0, **config: Any) -> Child:
        """A peer with ``stage``."""
        folder = self.folder / name
        return self.work(
            name, "ours", self.ticket, folder, stage, json.dumps(config), STAGE_SLOWER=str(slower)
        )

    def said(self, child: Child) -> list[Figures]:
        """What a process has said of its inner steps so far."""
        lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.startswith("step:") and line.endswith("\n")]
        return [json.loads(line.removeprefix("step:")) for line in whole]

    def wait_for_steps(self, child: Child, count: int, timeout_s: float = 240.0) -> list[Figures]:
        self.wait_until(f"{count} steps of {child.name}", lambda: len(self.said(child)) >= count, timeout_s)
        return self.said(child)

    def last(self, name: str) -> ev.StageProgress | None:
        known = self.events(name, ev.StageProgress)
        return known[-1] if known else None


@contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), grace_s=2.0) as made:
        yield made


def rate(steps: Sequence[Figures], tokens: int, since: int) -> float:
    """Tokens/s after ``since`` steps; ``tokens``: of a microbatch."""
    first, last = steps[since - 1], steps[-1]
    return float((last["counted"] - first["counted"]) * tokens / (last["at"] - first["at"]))


def against(figure: float, bar: float, *, at_most: bool = False) -> Figures:
    is_met = figure <= bar if at_most else figure >= bar
    return {"figure": round(figure, 4), "bar": bar, "met": is_met}


# ---- loopback

WARM = 2


def loopback(options: argparse.Namespace) -> Figures:
    return {f"{count} sequences": _loopback(options, count) for count in options.sequences}


def _loopback(options: argparse.Namespace, sequences: int) -> Figures:
    steps = WARM + max(4, round(options.seconds / (1.0 * max(0.25, sequences / 8))))
    run = run_of(2, 16, recipe="byte-gpt", sequences=sequences)
    job = {
        "recipe": "byte-gpt", "options": {}, "seed": 0, "stages": 2, "microbatches": 16,
        "sequences": sequences, "steps": steps, "threads": 4,
    }  # fmt: skip
    tokens = 64 * sequences
    turns: dict[str, list[Figures]] = {"ours": [], "torch": [], "hivemind": []}
    for turn in range(options.turns):
        names = list(turns) if turn % 2 == 0 else list(turns)[::-1]
        for name in names:
            with bench() as swarm:
                peers = _START[name](swarm, run, job)
                said = swarm.wait_for_steps(peers[0], steps)
                cpu = [_cpu_ms(swarm.said(peer), 16) for peer in peers]
                figures = {"tokens_per_s": round(rate(said, tokens, WARM), 1), "cpu_ms_per_microbatch": cpu}
                turns[name].append(figures)
            print(sequences, name, figures, os.getloadavg()[0], file=sys.stderr)
    medians = {name: statistics.median(one["tokens_per_s"] for one in all_) for name, all_ in turns.items()}
    return {
        "against_1f1b": against(medians["ours"] / medians["torch"], 0.9),
        "against_remote_expert": against(medians["ours"] / medians["hivemind"], 1.5),
        "tokens_per_s": medians, "turns": turns,
    }  # fmt: skip


def _cpu_ms(said: Sequence[Figures], microbatches: int) -> float:
    """Of the process itself, after the first steps."""
    if len(said) <= WARM:
        return 0.0
    used = said[-1]["cpu_s"] - said[WARM - 1]["cpu_s"]
    return round(1e3 * used / (microbatches * (len(said) - WARM)), 1)


def _start_ours(swarm: Bench, run: RunConfig, job: Figures) -> list[Child]:
    swarm.start_seed(run)
    return [swarm.ours(f"stage{stage}", stage) for stage in range(run.pipeline.stages)]


def _start_torch(swarm: Bench, run: RunConfig, job: Figures) -> list[Child]:
    file = _job_file(swarm, job)
    return [swarm.work(f"rank{rank}", "torch", rank, swarm.folder, file) for rank in range(job["stages"])]


def _start_hivemind(swarm: Bench, run: RunConfig, job: Figures) -> list[Child]:
    file = _job_file(swarm, job)
    expert = swarm.work("server", "server", swarm.folder, file)
    maddr, peer = swarm.wait_for_line(expert, "expert:", START_S).split()
    return [swarm.work("client", "client", maddr, peer, file)]


_START: dict[str, Callable[[Bench, RunConfig, Figures], list[Child]]] = {
    "ours": _start_ours, "torch": _start_torch, "hivemind": _start_hivemind,
}  # fmt: skip


def _job_file(swarm: Bench, job: Figures) -> Path:
    file = swarm.folder / "job.json"
    file.write_text(json.dumps(job))
    return file


# ---- lines


def _chain(run: RunConfig, steps: int, line: str) -> tuple[list[list[Figures]], int]:
    """What one replica of each stage says of ``steps`` inner steps, all behind such lines; and how many
    microbatches the first has dropped."""
    with bench() as swarm:
        swarm.start_seed(run)
        peers = [swarm.ours(f"stage{s}", s, slow_line=line) for s in range(run.pipeline.stages)]
        swarm.wait_for_steps(peers[0], steps)
        return [swarm.said(peer) for peer in peers], len(swarm.events("stage0", ev.MicrobatchDropped))


def codecs(options: argparse.Namespace) -> Figures:
    up = 8 * FP32_BYTES / (2 * COMPUTE_S)
    line = f"{up:.0f},{10 * up:.0f},0.01,0,0"
    found: Figures = {"line": line}
    for stages, bar in ((2, 1.8), (4, 2.8)):
        turns: dict[str, list[float]] = {"fp32": [], "int8": []}
        dropped = 0
        for _ in range(options.turns):
            for codec, rates in turns.items():
                steps = 4 if codec == "fp32" else 6
                (said, *_), drops = _chain(run_of(stages, 32, codec), steps, line)
                rates.append(round(rate(said, POSITIONS, 1), 1))
                dropped += drops
            print("codecs", stages, turns, os.getloadavg()[0], file=sys.stderr)
        medians = {codec: statistics.median(rates) for codec, rates in turns.items()}
        most = POSITIONS / COMPUTE_S
        found[f"{stages} stages"] = {
            "int8_by_fp32": against(medians["int8"] / medians["fp32"], bar),
            "share_of_computing": {codec: round(one / most, 3) for codec, one in medians.items()},
            "turns": turns, "dropped": dropped,
        }  # fmt: skip
    return found


def _chain_on(
    profile: LinkProfile, run: RunConfig, steps: int, congestion: str
) -> tuple[list[list[Figures]], int]:
    """As ``_chain``, with real packets on such lines. ``congestion``: TCP's answer to it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Internet(netns.examine(), Path(folder), 0, congestion) as internet,
    ):
        internet.add("seed", PROFILES["fibre"])
        names = [f"stage{stage}" for stage in range(run.pipeline.stages)]
        for name in names:
            internet.add(name, replace(profile, nat="open"))
        internet.start()
        with Bench(Path(folder), grace_s=2.0) as swarm:
            swarm.internet = internet
            swarm.start_seed_on(run)
            peers = [swarm.ours(name, stage, host="") for stage, name in enumerate(names)]
            swarm.wait_for_steps(peers[0], steps)
            return [swarm.said(peer) for peer in peers], len(swarm.events(names[0], ev.MicrobatchDropped))


def dsl(options: argparse.Namespace) -> Figures:
    """With real packets where this machine has namespaces, and with carriers slowed down."""
    found = {"carriers slowed down": _dsl(options, "")}
    if not netns.examine().problem:
        found |= {f"real packets, {name}": _dsl(options, name) for name in CONGESTIONS}
    return found


def _dsl(options: argparse.Namespace, congestion: str) -> Figures:
    profile = PROFILES[DSL]
    line = ",".join(
        f"{figure:g}" for figure in (
            profile.up_bits_per_s, profile.down_bits_per_s, profile.latency_ms / 1e3,
            profile.jitter_ms / 1e3, profile.loss,
        )
    )  # fmt: skip
    shares, planned, waited, off = [], [], [], []
    for _ in range(options.turns):
        run = run_of(2, 32, "int8")
        said, dropped = _chain_on(profile, run, 8, congestion) if congestion else _chain(run, 8, line)
        waited.append([round(_waited(one), 3) for one in said])
        computing = [(1 - share) / rate(one, 1, 2) for share, one in zip(waited[-1], said, strict=True)]
        # a slowed carrier and bbr go on at their rate after a lost packet; ``plan`` expects cubic
        forecast = _planned(replace(profile, loss=profile.loss * (congestion == "cubic")), computing)
        shares.append(1 - min(waited[-1]))
        planned.append(round(forecast.utilisation, 3))
        off.append(abs(rate(said[0], POSITIONS, 2) / forecast.tokens_per_s - 1))
        said_so = shares[-1], planned[-1], computing, dropped
        print("dsl", congestion, said_so, os.getloadavg()[0], file=sys.stderr)
    return {
        "computing": against(statistics.median(shares), 0.85),
        "tokens_per_s_off_plan": against(statistics.median(off), 0.15, at_most=True),
        "planned_computing": planned, "waited_share": waited, "line": line,
    }  # fmt: skip


def _planned(profile: LinkProfile, computing: Sequence[float]) -> PipelineForecast:
    """What ``p2p-co2 plan`` expects of stages that take so many seconds for a microbatch."""
    costs = [
        StageCost(forward_s=one / 3, backward_s=2 * one / 3, values=stage == 0 and POSITIONS * WIDTH,
                  side_bytes=8 * POSITIONS)
        for stage, one in enumerate(computing)
    ]  # fmt: skip
    peers = ((StageMember(link_of(profile)),),) * len(costs)
    loads = loads_of(costs, "int8", "int8")
    return forecast_stages(StagedSetting(loads=loads, peers=peers, microbatches=32, tokens=POSITIONS))


def _waited(said: Sequence[Figures]) -> float:
    first, last = said[1], said[-1]
    return float((last["waited_s"] - first["waited_s"]) / (last["at"] - first["at"]))


def bytes_(options: argparse.Namespace) -> Figures:
    found: Figures = {}
    worst = 0.0
    for codec, bits in (("fp32", 32.0), ("bf16", 16.0), ("int8", 8.25)):
        run = run_of(3, 16, codec, recipe="byte-gpt", sequences=2, layers=3)
        tokens, side = 2 * 64, 8
        with bench() as swarm:
            swarm.start_seed(run)
            peers = [swarm.ours(f"stage{s}", s) for s in range(3)]
            swarm.wait_for_steps(peers[0], 8)
            said = [swarm.said(peer) for peer in peers]
        one = 160 * bits / 8
        expected = [one + side, 2 * one + side, one]  # forward and its side; both; back
        sent = []
        for steps in said:
            first, last = steps[1], steps[min(len(steps), 8) - 1]
            counted = last["counted"] - first["counted"]
            sent.append((last["up_bytes"] - first["up_bytes"]) / counted / tokens)
        over = [a / b - 1 for a, b in zip(sent, expected, strict=True)]
        worst = max(worst, *(abs(share) for share in over))
        found[codec] = {
            "bytes_per_token": [round(one, 2) for one in sent], "arithmetic": expected,
            "over": [round(share, 4) for share in over],
        }  # fmt: skip
    return {"off": against(worst, 0.03, at_most=True), **found}


# ---- rounds, faults


def rounds(options: argparse.Namespace) -> Figures:
    """Two replicas a stage, fp32 and the line of ``codecs``: a hop takes twice as long as computing."""
    up = 8 * FP32_BYTES / (2 * COMPUTE_S)
    round_s, fragments, seconds = 10.0, 2, max(60.0, options.seconds)
    run = run_of(2, 32, "fp32", round_s=round_s, fragments=fragments, bulk=3_000_000)
    with bench() as swarm:
        swarm.start_seed(run)
        names = [f"stage{stage}-{replica}" for stage in range(2) for replica in range(2)]
        peers = [
            swarm.ours(name, int(name[5]), slow_line=f"{up:.0f},{10 * up:.0f},0.01,0,0") for name in names
        ]
        for peer in peers:
            swarm.wait_for_steps(peer, 1)
        swarm.wait_for_commits(*names, count=1, group=1)
        began_at = time.time()
        time.sleep(seconds)
        ended_at = time.time()
        found: Figures = {}
        for name, peer in zip(names, peers, strict=True):
            within = [e for e in swarm.events(name, ev.RoundCommitted, began_at) if e.at < ended_at]
            points = fragments * (ended_at - began_at) / round_s
            found[name] = {
                "share": round(sum(e.group_size >= 2 for e in within) / points, 3),
                "whole": round(sum(e.contributors >= 2 for e in within) / points, 3),
                "committed": len(within), "points": round(points, 1),
                "aborted": [e.reason for e in swarm.aborts(name, began_at)][:5],
                "skipped": len(swarm.events(name, ev.SendSkipped, began_at)),
                "duration_s": [round(e.duration_s, 2) for e in within],
                "steps": len(swarm.said(peer)),
            }  # fmt: skip
    share = statistics.mean(one["share"] for one in found.values())
    return {"committed": against(share, 0.95), **found}


def _counted(swarm: Bench, names: Sequence[str]) -> int:
    return sum(last.counted for name in names if (last := swarm.last(name)) is not None)


@dataclass
class Life:
    """From when to when a replica of ``stage`` has counted microbatches."""

    stage: int
    since: float = 0.0
    until: float = math.inf


def kills(options: argparse.Namespace) -> Figures:
    random_ = random.Random(options.seed)
    every_s, kill_count = 20.0, 6
    with bench() as swarm:
        swarm.start_seed(run_of(2, 16, "int8", round_s=10.0, fragments=2, bulk=20_000))
        lives = {f"s{stage}-{replica}": Life(stage) for stage in range(2) for replica in range(2)}
        children = {name: swarm.ours(name, life.stage) for name, life in lives.items()}
        for child in children.values():
            swarm.wait_for_steps(child, 2)
        calm_at, before = time.time(), _counted(swarm, _owners(lives))
        time.sleep(every_s)
        began_at, made_before = time.time(), _counted(swarm, _owners(lives))
        calm_rate = (made_before - before) / (began_at - calm_at)
        newcomers, deaths = list[Figures](), list[Figures]()
        for number in range(kill_count):
            victim = random_.choice(sorted(name for name, life in lives.items() if life.until == math.inf))
            stage, killed_at, last = lives[victim].stage, time.time(), swarm.last(victim)
            lives[victim].until = killed_at
            swarm.kill(children[victim])
            deaths.append({"stage": stage, "in_flight": last.in_flight if last else 0})
            name = f"new{number}"
            children[name] = swarm.ours(name, -1 if options.choose else stage)
            ready = json.loads(swarm.wait_for_line(children[name], "ready:", START_S))
            lives[name] = Life(ready["stage"], _first_counted(swarm, name, every_s * 2))
            newcomers.append({
                "stage": ready["stage"], "ready_s": round(ready["at"] - killed_at, 1),
                "counted_s": round(lives[name].since - killed_at, 1),
            })  # fmt: skip
            print("kills", deaths[-1], newcomers[-1], os.getloadavg()[0], file=sys.stderr)
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
    """Three replicas a stage; one of the last stage is four times slower in every other turn."""
    turns: dict[str, list[float]] = {"alike": [], "slower": []}
    of_capacity: dict[str, list[float]] = {"alike": [], "slower": []}
    shares: list[Figures] = []
    for _ in range(options.turns):
        for case, found in turns.items():
            with bench() as swarm:
                swarm.start_seed(run_of(2, 32, "int8", round_s=10.0))
                names = [f"s{stage}-{replica}" for stage in range(2) for replica in range(3)]
                peers = {
                    name: swarm.ours(name, int(name[1]), 4.0 if case == "slower" and name == "s1-0" else 1.0)
                    for name in names
                }
                for name in names[:3]:
                    swarm.wait_for_steps(peers[name], 4)
                owners, last = names[:3], names[3:]
                began = {name: swarm.last(name) for name in names}
                time.sleep(max(30.0, options.seconds))
                grown = {name: _grown(began[name], swarm.last(name)) for name in names}
                found.append(sum(grown[name][0] for name in owners))
                capacity = sum(grown[name][1] for name in last)
                of_capacity[case].append(sum(grown[name][0] for name in last) / capacity)
                shares.append({"case": case, **{name: round(grown[name][0], 2) for name in last}})
            print("slow", case, found[-1], shares[-1], os.getloadavg()[0], file=sys.stderr)
    alike, slower = (statistics.median(rates) for rates in turns.values())
    return {
        "of_capacity_left": against(statistics.median(of_capacity["slower"]), 0.85),
        "of_capacity": of_capacity,
        "by_all_alike_and_2.25_of_3": round(slower / alike / 0.75, 3),
        "microbatches_per_s": turns, "last_stage": shares,
    }  # fmt: skip


def _grown(first: ev.StageProgress | None, last: ev.StageProgress | None) -> tuple[float, float]:
    """Microbatches per second that a peer has counted, and that it would have without waiting."""
    assert first is not None
    assert last is not None
    seconds, counted = last.at - first.at, last.counted - first.counted
    return counted / seconds, counted / (seconds - (last.waiting_s - first.waiting_s))


# ---- memory


def memory(options: argparse.Namespace) -> Figures:
    width, layers, cache = 512, 6, 32 << 20
    settings: Figures = {"layers": layers, "width": width, "heads": 8}
    run = run_of(2, 8, "int8", recipe="byte-gpt", round_s=8.0, fragments=4, **settings)
    job = {
        "recipe": "byte-gpt", "options": settings, "seed": 0, "stages": 2, "microbatches": 8,
        "sequences": 1, "steps": 4,
    }  # fmt: skip
    copy_bytes = 4 * (layers // 2) * 12 * width * width
    found: Figures = {"copy_mb": round(copy_bytes / 1e6, 1), "cache_mb": round(cache / 1e6, 1)}
    with bench() as swarm:
        alone = []
        for stage in range(2):
            child = swarm.work(f"alone{stage}", "alone", stage, _job_file(swarm, job))
            alone.append(swarm.wait_for_steps(child, 4)[-1]["peak_bytes"])
        swarm.start_seed(run)
        names = [f"s{stage}-{replica}" for stage in range(2) for replica in range(2)]
        peers = {name: swarm.ours(name, int(name[1]), cache_bytes=cache) for name in names}
        swarm.wait_for_commits(*names, count=12)
        peaks = {name: swarm.said(peer)[-1]["peak_bytes"] for name, peer in peers.items()}
    tiny = _tiny_bytes(options)
    beyond = {name: peak - alone[int(name[1])] - tiny[int(name[1])] for name, peak in peaks.items()}
    copies = {name: round((over - cache) / copy_bytes, 2) for name, over in beyond.items()}
    found |= {"alone_mb": [round(one / 1e6) for one in alone], "imports_mb": [round(t / 1e6) for t in tiny]}
    found |= {"peak_mb": {name: round(peak / 1e6) for name, peak in peaks.items()}}
    found |= {"copies_without_cache": {n: round(over / copy_bytes, 2) for n, over in beyond.items()}}
    return {"copies": against(max(copies.values()), 4.0, at_most=True), **found}


def _tiny_bytes(options: argparse.Namespace) -> list[int]:
    """What imports, threads and sockets cost: the same with a model of next to nothing."""
    settings: Figures = {"layers": 2, "width": 8, "heads": 2}
    job = {
        "recipe": "byte-gpt", "options": settings, "seed": 0, "stages": 2, "microbatches": 8,
        "sequences": 1, "steps": 4,
    }  # fmt: skip
    run = run_of(2, 8, "int8", recipe="byte-gpt", round_s=8.0, fragments=4, **settings)
    with bench() as swarm:
        alone = []
        for stage in range(2):
            child = swarm.work(f"alone{stage}", "alone", stage, _job_file(swarm, job))
            alone.append(swarm.wait_for_steps(child, 4)[-1]["peak_bytes"])
        swarm.start_seed(run)
        names = [f"s{stage}-{replica}" for stage in range(2) for replica in range(2)]
        peers = [swarm.ours(name, int(name[1])) for name in names]
        swarm.wait_for_commits(*names, count=4)
        peaks = [swarm.said(peer)[-1]["peak_bytes"] for peer in peers]
    return [int(statistics.mean(peaks[2 * s : 2 * s + 2])) - alone[s] for s in range(2)]


SECTIONS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "loopback": loopback, "codecs": codecs, "dsl": dsl, "bytes": bytes_, "rounds": rounds, "kills": kills,
    "slow": slow, "memory": memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a measurement, about")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--seed", type=int, default=0, help="of whom kills hit")
    parser.add_argument("--choose", action="store_true", help="newcomers choose their stage themselves")
    parser.add_argument("--out", type=Path, help="add a line of JSON per section")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no process is left behind
    for name in options.sections or SECTIONS:
        if name not in SECTIONS:
            parser.error(f"no section is called {name}: {', '.join(SECTIONS)}")
    for name in options.sections or SECTIONS:
        load = os.getloadavg()[0]
        figures = {
            "section": name,
            "at": time.strftime("%F %R"),
            "load": [load, 0.0],
            **SECTIONS[name](options),
        }
        figures["load"][1] = os.getloadavg()[0]
        print(json.dumps(figures, indent=2), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
