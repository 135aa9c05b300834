"""What exchange costs the training: with and without, in turn, in real swarms.

    python benchmarks/exposure.py phases [--layouts four two spare] [--phase-s 15] [--pairs 3]

``phases``: peers train the demo's model with the demo's settings (a round of 4 fragments each 5 s, int4,
keep), one torch thread each. By wall clock and all together they alternate: "off" never calls ``peer.step``,
so only heartbeats flow; "on" calls it after each inner step. The first round of a phase is left out. Layouts
are held to the same two cores: ``four`` peers, as the demo. ``two``, a core each. ``spare``, two whose
training shares one core, with all else on the other, as on a machine that has a core to spare.

- ``ratio``: inner steps per second on / off, all peers together, median of the pairs.
- ``exposed_share``: wall time inside ``peer.step`` in "on" phases, the peer with most counting.
- ``cpu_s_per_s``: of a peer with its daemon; the difference of on and off is what exchange took.
  ``others_cpu_s_per_s``: not ours, on those cores; run again if it is not small.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from common import Figures, bench, command, joined, note, parser_of, rounded, run, say

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.telemetry.events import Event, FragmentApplied, RoundCommitted

RECIPE, FRAGMENTS, CORES, LEAD_S = "byte-gpt", 4, 2, 1.0
BARS = {"ratio": 0.95, "exposed_share": 0.01}


class Layout(NamedTuple):
    peers: int
    spare: bool = False


LAYOUTS = {"four": Layout(4), "two": Layout(2), "spare": Layout(2, spare=True)}


class Timetable(NamedTuple):
    """Phases of ``phase_s`` seconds from ``begin_at`` (unix), off first; a window is a phase but for its
    first round."""

    begin_at: float
    phase_s: float
    pairs: int
    round_s: float

    def windows(self) -> list[tuple[bool, float, float]]:
        """(whether exchange is on, start, end) of each."""
        starts = [(turn % 2 == 1, self.begin_at + turn * self.phase_s) for turn in range(2 * self.pairs)]
        return [(on, start + self.round_s, start + self.phase_s) for on, start in starts]


# ---- phases: the parent


def phases(options: argparse.Namespace) -> Figures:
    """Inner steps with and without exchange."""
    there = sorted(os.sched_getaffinity(0))
    if len(there) < CORES or options.phase_s < 2 * options.round_s:
        raise SystemExit(f"this needs {CORES} cores and phases of at least {2 * options.round_s} s")
    answer: Figures = {"bars": BARS}
    os.sched_setaffinity(0, there[:CORES])
    for name in options.layouts:
        answer[name] = _phases_of(name, there[:CORES], options)
        note(name, answer[name])
    return answer


def _phases_of(name: str, cores: Sequence[int], options: argparse.Namespace) -> Figures:
    settings = RunConfig(
        name="exposure", recipe=RECIPE, recipe_digest=recipe_digest(RECIPE, {}), fragments=FRAGMENTS,
        clock=ClockConfig(mode="time", round_s=options.round_s),
    )  # fmt: skip
    with bench(settings) as swarm:
        told = (swarm.folder, swarm.ticket)
        peers = [swarm.ask(__file__, "phases", name, index, *told) for index in range(LAYOUTS[name].peers)]
        for peer in peers:
            peer.answer()
        table = Timetable(time.time() + LEAD_S, options.phase_s, options.pairs, options.round_s)
        for peer in peers:
            peer.tell(" ".join(map(str, table)))
        others = [_others(cores, start, end) for _, start, end in table.windows()]
        answers = [peer.answer()["windows"] for peer in peers]
    return _sum_up(answers, others)


def _others(cores: Sequence[int], start: float, end: float) -> float:
    """CPU seconds per second on ``cores`` that were not ours, the hypervisor's share among them."""
    time.sleep(max(0.0, start - time.time()))
    before_s = _busy_s(cores) - _cpu_s()
    time.sleep(max(0.0, end - time.time()))
    return (_busy_s(cores) - _cpu_s() - before_s) / (end - start)


def _busy_s(cores: Sequence[int]) -> float:
    times = [psutil.cpu_times(percpu=True)[core] for core in cores]
    return sum(sum(one) - one.idle - one.iowait - one.guest - one.guest_nice for one in times)


def _cpu_s(*others: psutil.Process) -> float:
    """CPU seconds of what this process has started, and of ``others``."""
    each = [one.cpu_times() for one in (*psutil.Process().children(recursive=True), *others)]
    return float(sum(times.user + times.system for times in each))


def _sum_up(peers: Sequence[Sequence[Figures]], others: Sequence[float]) -> Figures:
    """``peers``: the windows of each (off, on, off, ...); ``others``: foreign CPU per window."""
    rates = [[window["steps"] / window["wall_s"] for window in windows] for windows in peers]
    together = [sum(each) for each in zip(*rates, strict=True)]
    pairs = [on / off for off, on in zip(together[::2], together[1::2], strict=True)]
    off, on = ([w for windows in peers for w in windows[turn::2]] for turn in (0, 1))
    return {
        "ratio": round(statistics.median(pairs), 4),
        "ratio_of_pairs": rounded(pairs),
        "exposed_share": round(max(_share(windows[1::2], "in_step_s") for windows in peers), 5),
        "longest_step_call_ms": round(1e3 * max(w["longest_s"] for w in on), 1),
        "cpu_s_per_s": {"off": round(_share(off, "cpu_s"), 4), "on": round(_share(on, "cpu_s"), 4)},
        "others_cpu_s_per_s": {"off": rounded(others[::2]), "on": rounded(others[1::2])},
        "rounds": sum(w["rounds"] for w in on),
    }


def _share(windows: Sequence[Figures], key: str) -> float:
    return float(sum(w[key] for w in windows) / sum(w["wall_s"] for w in windows))


# ---- phases: a peer


def _phases_peer(name: str, index: str, folder: str, ticket: str) -> None:
    layout, cores = LAYOUTS[name], sorted(os.sched_getaffinity(0))
    if layout.spare:  # threads and processes inherit it; then the training thread moves away
        os.sched_setaffinity(0, {cores[1]})
    recipe = load_recipe(RECIPE, {}, RunConfig().seed)
    net, optimizer = recipe.model, recipe.optimizer(recipe.model.parameters())
    batches, fresh = recipe.batches(1 + int(index), recipe.default_batch), set(range(FRAGMENTS))

    def hear(event: Event) -> None:
        if isinstance(event, RoundCommitted):
            count["rounds"] += 1
        elif isinstance(event, FragmentApplied):
            fresh.discard(event.fragment)

    place = Path(folder) / f"peer{index}"
    count = {"steps": 0, "rounds": 0, "in_step_s": 0.0, "longest_s": 0.0}
    with joined(
        ticket, place, net, optimizer, hear, recipe.learning_rate, min_peers=layout.peers
    ) as peer:  # fmt: skip
        if layout.spare:
            os.sched_setaffinity(0, {cores[0]})

        def step(on: bool) -> None:
            batch = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = recipe.loss(net, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            count["steps"] += 1
            if on:
                entered_at = time.perf_counter()
                peer.step(recipe.tokens(batch), loss)
                took_s = time.perf_counter() - entered_at
                count["in_step_s"] += took_s
                count["longest_s"] = max(count["longest_s"], took_s)

        while fresh:  # training waits for the first rounds by design
            step(True)
        say({"ready": True})
        begin_at, phase_s, pairs, round_s = sys.stdin.readline().split()
        table, windows = Timetable(float(begin_at), float(phase_s), int(pairs), float(round_s)), []
        for on, start, end in table.windows():
            while time.time() < start:
                step(on)
            count["longest_s"] = 0.0
            before = _reading(count)
            while time.time() < end:
                step(on)
            after = _reading(count)
            figures = {key: after[key] - before[key] for key in before}
            windows.append({**figures, "longest_s": count["longest_s"]})
    say({"windows": windows})


def _reading(count: Mapping[str, float]) -> Figures:
    return {"wall_s": time.perf_counter(), **count, "cpu_s": _cpu_s(psutil.Process())}


# ---- a slow peer


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    made = command(
        commands, "phases", phases, pairs=(3, "of phases"), phase_s=(15.0, "a round is left out of each"),
        round_s=(5.0, "of four fragments"),
    )  # fmt: skip
    made.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=["four", "two", "spare"])
    run(parser, {"phases": _phases_peer})


if __name__ == "__main__":
    main()
