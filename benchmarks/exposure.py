"""What exchange costs the training: the same peers, training with and without it, in turn, in a real swarm.

One seed and a few peer processes train the demo's model on the demo's data with the demo's settings (swarm
clock, a round of 4 fragments each 5 s, int4, rule keep, a journal), one torch thread each. By wall clock and
all together they alternate between phases of equal length: "off" never calls ``peer.step``, so nothing is
copied out, encoded, sent or merged and only heartbeats flow; "on" calls it after each inner step. Prints
JSON.

    python benchmarks/exposure.py [--layouts four two spare] [--phase-s 15] [--pairs 3]
    python benchmarks/exposure.py --layouts open --device cuda --model layers=12 width=768 heads=12

Three layouts are held to the same two cores, so that a larger machine does the same experiment:

- ``four``: the demo. Four peers share two cores, so each CPU second of exchange is taken from training.
- ``two``: a core per peer, but none to spare: the exchange still takes its CPU seconds from training.
- ``spare``: two peers whose training threads share one core, with all other threads and the libp2p daemons
  on the other: what a volunteer sees, whose machine has a core that training does not use.
- ``open``, if it is named: two peers, and all cores that there are; for peers that train on a GPU, which they
  then share.

What is reported, per layout, over the windows that are left of the phases without their first round:

- ``ratio``: inner steps per second on / off, all peers together, the median of the pairs; each pair beside
  it. ``ratio_of_quiet_pairs``: of those alone that no other work on the machine disturbed.
- ``ratio_at_equal_cpu``: inner steps per CPU second of all the peers' threads and daemons, on / off. Where
  the cores are never idle this is the ratio of throughputs, and other work on the machine does not touch it.
- ``ratio_of_cpu_for_training``: the share of a peer's CPU that its training thread got, on / off: what the
  exchange's own CPU costs the training where cores are full, whatever the speed of the host just then.
- ``exposed_share``: wall time inside ``peer.step`` in "on" phases, the peer with most counting. It holds all
  that ``exposed_s`` counts (``exposed_s_share``), and the reports to journal and network; on a GPU also the
  wait for the steps that are queued there, so that ``exposed_s_share`` is the one to read. A thread that
  loses its core inside ``peer.step`` counts as exposed while it waits for it.
- ``training_thread``: the kernel's account of it (/proc/self/task/*/schedstat): the share of wall time it
  ran, was ready but waited for a core, and slept (locks, the interpreter's among them), with the CPU time of
  a step.
- ``ratio_without_queue``: steps per second of CPU and sleep, on / off: what ``ratio`` would be if nobody had
  waited for a core. An estimate: caches and the interpreter's lock are shared all the same.
- ``cpu_s_per_s``: CPU of a peer's other threads and its daemon, by what they are for, in both phases; the
  difference is what exchange took.
- ``others_cpu_s_per_s``: CPU on the two cores that was not ours, on and off. If it is not small, run again.

Laws: both phases are in the same processes, minutes old, with the same models; all peers change over at the
same moment; the first rounds, for which training waits by design, are over before the first phase.
Price: "off" peers go on paying heartbeats (in ``cpu_s_per_s``); the first round of an "on" phase sends all
fragments at once, as after a pause, and is left out; a drift of the machine within a pair goes into its
ratio. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from exposure_figures import Figures, rounded, sum_up
from json_workers import answer_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap.local_swarm import environment
from p2p_co2.config import ClockConfig, PeerConfig, RunConfig, write_toml
from p2p_co2.recipes import load_recipe
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.journal import Journal
from p2p_co2.trainer import Peer, connect

ROOT = Path(__file__).resolve().parents[1]
RECIPE, ROUND_S, FRAGMENTS = "byte-gpt", 5.0, 4
CLOCK = ClockConfig(mode="time", round_s=ROUND_S)
"""The demo's; codec int4 and rule keep are the defaults."""
CORES = 2
LEAD_S = 1.0
BARS = {"ratio": 0.95, "exposed_share": 0.01}
NOTES = (
    "All threads of a layout share two cores. With four peers training wants four cores, so the run queue "
    "is never empty: each CPU second that a network or tensor thread or a daemon uses is a second that no "
    "training thread gets, and ratio falls by about (cpu_s_per_s on - off) * peers / cores even if training "
    "never waits for the network.",
    "On a volunteer's own machine these threads use an idle core: layout spare, and ratio_without_queue.",
    "training_thread.*.queued_share is the run queue's pressure: the share of wall time for which a training "
    "thread was ready and had no core.",
)


@dataclass(frozen=True)
class Layout:
    peers: int
    spare: bool
    words: str
    held: bool = True
    """To ``CORES`` cores."""


LAYOUTS = {
    "four": Layout(4, False, "4 peers on 2 cores, as in the demo"),
    "two": Layout(2, False, "2 peers on 2 cores: a core each, none to spare"),
    "spare": Layout(2, True, "2 peers whose training shares one core; all other threads have the second"),
    "open": Layout(2, False, "2 peers on all cores", held=False),
}


@dataclass(frozen=True)
class Timetable:
    """Phases of ``phase_s`` seconds from ``begin_at`` (unix), off first; a window is a phase but for its
    first round."""

    begin_at: float
    phase_s: float
    pairs: int

    def windows(self) -> list[tuple[bool, float, float]]:
        """(whether exchange is on, start, end) of each."""
        starts = [(turn % 2 == 1, self.begin_at + turn * self.phase_s) for turn in range(2 * self.pairs)]
        return [(on, start + ROUND_S, start + self.phase_s) for on, start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=["four", "two", "spare"])
    parser.add_argument("--device", default="cpu", help="all peers train on it")
    parser.add_argument("--model", nargs="*", default=[], metavar="KEY=NUMBER", help="of byte-gpt: layers=8")
    parser.add_argument("--phase-s", type=float, default=15.0, help="a round is left out of each phase")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = {key: int(number) for key, _, number in (word.partition("=") for word in options.model)}
    run = RunConfig(name="exposure", recipe=RECIPE, recipe_options=model, fragments=FRAGMENTS, clock=CLOCK)
    if options.worker:
        name, index, folder, ticket = options.worker
        _work(LAYOUTS[name], int(index), Path(folder), Work(ticket, run, options.device))
        return
    there = sorted(os.sched_getaffinity(0))
    if len(there) < CORES or options.phase_s < 2 * ROUND_S:
        parser.error(f"this needs {CORES} cores and phases of at least {2 * ROUND_S} s")
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "device": options.device}
    job = {"round_s": ROUND_S, "phase_s": options.phase_s, "pairs": options.pairs, "model": model}
    measured = {}
    for name in options.layouts:
        cores = there[:CORES] if LAYOUTS[name].held else there
        os.sched_setaffinity(0, cores)
        measured[name] = {"cores_used": cores} | _measure(name, cores, run, options)
    result = {"at": time.strftime("%F %R"), **machine, **job, "bars": BARS, **measured, "notes": NOTES}
    print(json.dumps(result, indent=2))


# ---- the parent: starts a swarm, gives the time to begin, sums up


def _measure(name: str, cores: Sequence[int], run: RunConfig, options: argparse.Namespace) -> Figures:
    layout = LAYOUTS[name]
    asked = ["--device", options.device, "--model", *options.model, "--worker"]
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), run)
        try:
            ticket = swarm.start_seed()
            for index in range(layout.peers):
                swarm.start_peer(*asked, name, str(index), str(Path(folder) / f"peer{index}"), ticket)
            for process in swarm.peers:
                answer_of(process)
            timetable = Timetable(time.time() + LEAD_S, options.phase_s, options.pairs)
            swarm.tell(timetable)
            others = [swarm.others(cores, start, end) for _, start, end in timetable.windows()]
            answers = [answer_of(process) for process in swarm.peers]
        finally:
            swarm.stop()
    figures = sum_up(layout.words, answers, others)
    figures["others_cpu_s_per_s"] = {"off": rounded(others[::2]), "on": rounded(others[1::2])}
    figures["load_1_min"] = round(os.getloadavg()[0], 2)
    print(name, json.dumps(figures), file=sys.stderr)
    return figures


class Swarm:
    """A seed and the peers, each a process, each ended by its own id."""

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self._folder, self._run = folder, run
        self.peers: list[subprocess.Popen[str]] = []
        self._environment = {**os.environ, **environment()}

    def start_seed(self) -> str:
        """Returns the ticket."""
        (self._folder / "run.toml").write_text(write_toml(self._run))
        place = [str(self._folder / "run.toml"), "--folder", str(self._folder / "seed")]
        self._seed = subprocess.Popen(
            [sys.executable, "-m", "bootstrap", "seed", *place],
            stdout=subprocess.PIPE, text=True, env=self._environment, cwd=ROOT,
        )  # fmt: skip
        assert self._seed.stdout is not None
        for line in self._seed.stdout:
            if found := re.search(r"p2pco2-\w+", line):
                return found.group()
        raise SystemExit("the seed gave no ticket")

    def start_peer(self, *arguments: str) -> None:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment, cwd=ROOT,
        )  # fmt: skip
        self.peers.append(process)

    def tell(self, timetable: Timetable) -> None:
        for process in self.peers:
            assert process.stdin is not None
            process.stdin.write(f"{timetable.begin_at} {timetable.phase_s} {timetable.pairs}\n")
            process.stdin.flush()

    def others(self, cores: Sequence[int], start: float, end: float) -> float:
        """CPU seconds per second on ``cores`` that were not this swarm's, the hypervisor's share among
        them."""
        time.sleep(max(0.0, start - time.time()))
        before_s = _busy_s(cores) - self._cpu_s()
        time.sleep(max(0.0, end - time.time()))
        used_s = _busy_s(cores) - self._cpu_s() - before_s
        return used_s / (end - start)

    def _cpu_s(self) -> float:
        total_s = 0.0
        for root in (psutil.Process(process.pid) for process in (self._seed, *self.peers)):
            for one in (root, *root.children(recursive=True)):
                times = one.cpu_times()
                total_s += times.user + times.system
        return total_s

    def stop(self) -> None:
        for process in (*self.peers, self._seed):
            if process.poll() is None and process is self._seed:
                process.send_signal(signal.SIGINT)
            elif process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _busy_s(cores: Sequence[int]) -> float:
    times = [psutil.cpu_times(percpu=True)[core] for core in cores]
    return sum(sum(one) - one.idle - one.iowait - one.guest - one.guest_nice for one in times)


# ---- a peer


class Work(NamedTuple):
    ticket: str
    run: RunConfig
    device: str


def _work(layout: Layout, index: int, folder: Path, work: Work) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if layout.spare:  # threads and processes inherit it; then the training thread moves away
        os.sched_setaffinity(0, {cores[1]})
    seen: list[ev.Event] = []
    folder.mkdir()
    with Journal(folder / "events.jsonl") as journal:

        def on_event(event: ev.Event) -> None:
            journal.write(event)
            seen.append(event)

        training = Training(layout, index, folder, work, on_event)
        if layout.spare:
            os.sched_setaffinity(0, {cores[0]})
        with training.peer:
            training.warm_up()
            print(json.dumps({"ready": True}), flush=True)
            begin_at, phase_s, pairs = sys.stdin.readline().split()
            timetable = Timetable(float(begin_at), float(phase_s), int(pairs))
            windows = [training.window(*window) for window in timetable.windows()]
            exchanging = [(start, end) for on, start, end in timetable.windows() if on]
            inside = [event for event in seen if any(start <= event.at < end for start, end in exchanging)]
        print(json.dumps({"windows": windows, **_rounds(inside)}), flush=True)


def _rounds(events: Sequence[ev.Event]) -> Figures:
    names = Counter(event.kind for event in events if event.kind != "progress")
    committed = [event for event in events if isinstance(event, ev.RoundCommitted)]
    names.update(f"contributors_{event.contributors}" for event in committed)
    return {"events": names, "round_s": [event.duration_s for event in committed if event.duration_s]}


class Training:
    """One peer and its inner steps."""

    def __init__(self, layout: Layout, index: int, folder: Path, work: Work, on_event: Any) -> None:
        recipe = load_recipe(RECIPE, work.run.recipe_options, work.run.seed)
        self._recipe, self._model = recipe, recipe.model.to(work.device)
        self._optimizer = recipe.optimizer(recipe.model.parameters())
        self._batches = recipe.batches(1 + index, recipe.default_batch)
        config = PeerConfig(folder=folder, min_peers=layout.peers, checkpoint_every_s=1e6)
        connection = connect(work.ticket, config, on_event)
        self._network = connection._thread  # the benchmark looks behind the front door for the bytes
        self.peer: Peer = connection.start(self._model, self._optimizer, recipe.learning_rate)
        self._in_step_s = self._longest_s = 0.0
        self._steps = 0

    def warm_up(self) -> None:
        """Until every fragment's first round is over: training waits for those by design."""
        while min(self.peer._sync.versions) < 1:
            self._step(True)

    def window(self, on: bool, start: float, end: float) -> Figures:
        """Train, and say what happened from ``start`` to ``end`` (unix)."""
        while time.time() < start:
            self._step(on)
        self._longest_s = 0.0
        before = self._reading()
        while time.time() < end:
            self._step(on)
        after = self._reading()
        figures = {key: after[key] - before[key] for key in after if key != "cpu_s"}
        kinds = after["cpu_s"]
        figures["cpu_s"] = {kind: kinds[kind] - before["cpu_s"].get(kind, 0.0) for kind in kinds}
        figures["longest_s"] = self._longest_s
        return figures

    def _step(self, on: bool) -> None:
        batch = next(self._batches)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._recipe.loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._steps += 1
        if on:
            entered_at = time.perf_counter()
            self.peer.step(self._recipe.tokens(batch), loss)
            took_s = time.perf_counter() - entered_at
            self._in_step_s += took_s
            self._longest_s = max(self._longest_s, took_s)

    def _reading(self) -> Figures:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a step counts when it is computed
        return {
            "wall_s": time.perf_counter(),
            "steps": self._steps,
            "in_step_s": self._in_step_s,
            "exposed_s": self.peer._sync.figures.exposed_s,
            "up_bytes": self._network.traffic_bytes()[0],
            "cpu_s": _cpu_s(),
        }


def _cpu_s() -> Mapping[str, float]:
    """CPU seconds of this process by kind of thread; ``queued``: seconds that this thread waited for a
    core."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    result = dict.fromkeys(("training", "queued", "network", "tensors", "other threads", "daemon"), 0.0)
    for task in Path("/proc/self/task").iterdir():
        try:
            ran_ns, queued_ns, _ = (int(word) for word in (task / "schedstat").read_text().split())
        except FileNotFoundError:  # the thread has just ended
            continue
        name = names.get(int(task.name), "")
        kind = name.removeprefix("p2p-co2 ").split("_")[0]
        if int(task.name) == threading.get_native_id():
            kind, result["queued"] = "training", queued_ns / 1e9
        result[kind if kind in result else "other threads"] += ran_ns / 1e9
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        result["daemon"] += times.user + times.system
    return result


if __name__ == "__main__":
    main()
