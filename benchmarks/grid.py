"""The grid of lines: ours and torchft's DiLoCo and streaming DiLoCo, on the same lines, in one run.

    python benchmarks/grid.py [--lines 20 50 200 1000] [--systems ours diloco streaming] [--seconds 36]
                              [--torchft-env ~/.cache/p2p-co2-bench/torchft] [--folder DIR]

Four peers in network namespaces (root; see ``p2p-co2 rehearse``), each behind a line of so many Mbit/s up and
down (20: up, 100 down) and 10 ms one way, without loss. All train ``grid_recipe``: 30.8 million parameters in
four fragments, inner steps of 39 ms (slept, so that two cores do not decide), an outer round of each fragment
every 100 steps: 3.9 s. Prints JSON, by line and system:

- ``utilisation``: time in inner steps over time, the slowest peer; ``outside``: 1 minus it. Ours: between the
  first rounds and the end of the training. torchft's: from its first step to the end of an outer step.
- ``tokens_per_s``: of all peers together, in the same time. ``step_ms``: of an inner step, 39 if the machine
  is quiet.
- ``outer_rounds_per_s``, of the whole model; ``best_rounds_per_s``: what the line allows. ``floor_s`` is a
  round's payload at the line's upload rate, 2 (1 - 1/M) N b / rate for all systems: a reduce-scatter and an
  all-gather, or a ring. b is 4.25 bits for ours (int4), 32 for torchft: on a CPU its gloo process groups send
  fp32, and its quantised all-reduce needs CUDA. The best is the longer of 3.9 s and ``floor_s`` a round; for
  ``diloco``, whose training waits by design, the sum. ``against_best``: the one over the other.
- ``steps_late``: inner steps from sending a fragment to applying its mean (torchft: its
  ``fragment_sync_delay``; it waits for the rest). ``points_late``: the fragment's schedule points between.
- ``line_used``: bytes on the line (headers included) over what it carries up in that time, mean over peers.
- Ours: ``transfer_s``, a fragment from BEGIN to the last member's last mean; ``partial_share``, a peer's
  means that lack some or all of its work, ``partial_in_a_row`` at most; ``exposed_share``, of ``outside``:
  in ``peer.step``; ``aside_share``, of it: checkpoints and held-out loss.

torchft has what its documentation and the papers advise: an outer step every 100 inner ones, Nesterov SGD;
``streaming`` has a fragment for each module and the longest ``fragment_sync_delay`` that it takes (24, of 25
steps from one fragment to the next), timeouts far above a round. It is installed into ``--torchft-env``,
never into this project's environment.

Laws: every system runs the same training on the same kind of machines and lines; nobody is fast by being
wrong: ours must end with one digest, torchft's peers hold the same agreed values after the same outer step.
Price: one run of each; ``--seconds`` is short by default, so that the whole grid takes 12 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap.internet import Internet
from grid_recipe import PARAMETERS

from bootstrap import netns
from bootstrap.local_swarm import Child, LocalSwarm, environment
from monitoring.lines import Sample, SteadyState, timed_exchanges
from p2p_co2.planning.profiles import PROFILES, LinkProfile
from p2p_co2.system.process import program
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.journal import read_events
from p2p_co2.telemetry.view import SwarmView

ROOT = Path(__file__).resolve().parents[1]
RECIPE = f"{ROOT}/benchmarks/grid_recipe.py:make"
PEERS, FRAGMENTS, STEPS, STEP_S = 4, 4, 100, 0.039
ROUND_S = STEPS * STEP_S
LINES = (20, 50, 200, 1000)
SYSTEMS = ("ours", "diloco", "streaming")
BITS_PER_VALUE = {"ours": 4.25, "diloco": 32, "streaming": 32}
"""int4: four bits, and a scale and a bias of 16 bits each for 128 values. gloo: fp32."""
SEED, SEED_PORT = "seed", 31337
READY_S, LEAVE_S = 90.0, 90.0
ENVIRONMENT = Path("~/.cache/p2p-co2-bench/torchft").expanduser()
TORCHFT, TORCH = "torchft-nightly==2026.10.26", ("torch==2.13.0", "numpy==2.3.5")
LIGHTHOUSE_PORT = 29510

Figures = dict[str, Any]


def line_of(mbit: int) -> LinkProfile:
    """A line without faults."""
    up, down = mbit * 1_000_000, max(mbit, 100 if mbit < 50 else 0) * 1_000_000
    return replace(PROFILES["fibre"], up_bits_per_s=up, down_bits_per_s=down, jitter_ms=0.0, loss=0.0)


def floor_s(system: str, line: LinkProfile) -> float:
    """Seconds of a whole model's exchange at the line's upload rate."""
    return 2 * (1 - 1 / PEERS) * PARAMETERS * BITS_PER_VALUE[system] / line.up_bits_per_s


def best_rounds_per_s(system: str, line: LinkProfile) -> float:
    """Outer rounds of the whole model that the line allows."""
    floor = floor_s(system, line)
    return 1 / (ROUND_S + floor if system == "diloco" else max(ROUND_S, floor))


@dataclass
class Lines:
    """Machines behind lines of one kind, and their counters, read ten times a second."""

    internet: Internet
    swarm: LocalSwarm
    folder: Path
    line: LinkProfile
    samples: list[Sample] = field(default_factory=list)

    def used(self, since: float, until: float) -> float:
        """Share of the lines' upload rate that was used between two moments (unix), mean over the peers."""
        inside = [sample for sample in self.samples if since <= sample[0] <= until]
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        peers = [name for name in first if name != SEED]
        bits = statistics.fmean(8 * (last[name][0] - first[name][0]) for name in peers)
        return round(bits / (last_at - first_at) / self.line.up_bits_per_s, 3)


@contextmanager
def lines(folder: Path, line: LinkProfile) -> Iterator[Lines]:
    """``PEERS`` machines behind ``line`` and a public one, until the block is left."""
    ended = threading.Event()
    with Internet(netns.examine(), folder, seed=0) as internet, LocalSwarm(folder) as swarm:
        internet.add(SEED, replace(PROFILES["fibre"], up_bits_per_s=10**9, down_bits_per_s=10**9))
        for index in range(PEERS):
            internet.add(f"peer{index}", line)
        internet.start()
        made = Lines(internet, swarm, folder, line)

        def sample() -> None:
            while not ended.wait(0.1):
                made.samples.append((time.time(), internet.traffic_bytes()))

        sampler = threading.Thread(target=sample, name="line counters")
        sampler.start()
        try:
            yield made
        finally:
            ended.set()
            sampler.join()


# ---- ours


def ours(place: Lines, seconds: float) -> Figures:
    """Our programs, with a run file as ``p2p-co2 init`` leaves it but for the recipe and the round."""
    folder, rounds = place.folder, max(3, round(seconds / ROUND_S))
    (folder / "run.toml").write_text(
        f'name = "grid"\nrecipe = "{RECIPE}"\nfragments = {FRAGMENTS}\n[recipe_options]\nstep_s = {STEP_S}\n'
        f"[clock]\nround_s = {ROUND_S:.3f}\nrounds = {rounds}\n"
    )
    peers = _start_ours(place)
    place.swarm.wait(peers, READY_S + rounds * ROUND_S + LEAVE_S)
    journals = [read_events(folder / f"peer{index}" / "events.jsonl") for index in range(PEERS)]
    events = sorted((event for journal in journals for event in journal), key=lambda event: event.at)
    digests = {event.digest for event in events if isinstance(event, ev.PeerFinished)}
    if len(digests) != 1 or any(peer.exit_status() for peer in peers):
        return {"failed": [peer.last_lines(4) for peer in peers], "digests": sorted(digests)}
    return _figures_of_ours(place, events)


def _start_ours(place: Lines) -> list[Child]:
    machine = place.internet.machines[SEED]
    here = ["--host", machine.address, "--announce-host", machine.address, "--port", str(SEED_PORT)]
    run = ["seed", str(place.folder / "run.toml"), "--folder", str(place.folder / SEED), *here]
    seed = place.swarm.start(SEED, machine.command(program("bootstrap", *run)), environment())
    ticket = place.swarm.wait_for_line(seed, "ticket:", READY_S)
    peers = []
    for index in range(PEERS):
        name = f"peer{index}"
        options = ["--folder", str(place.folder / name), "--name", name, "--threads", "1"]
        options += ["--min-peers", str(PEERS), "--recipe", RECIPE]
        command = place.internet.machines[name].command(program("peers", ticket, *options))
        peers.append(place.swarm.start(name, command, environment()))
    return peers


def _figures_of_ours(place: Lines, events: Sequence[ev.Event]) -> Figures:
    steady = SteadyState(1)
    view = SwarmView()
    for event in events:
        steady.add(event)
        view.add(event)
    since = steady.since()
    trained = [e for e in events if isinstance(e, ev.Progress) and e.phase == "training" and e.inner_steps]
    if since is None:
        return {"failed": "a fragment had no round"}
    until = min(max(e.at for e in trained if e.peer == peer) for peer in {e.peer for e in trained})
    inside = [event for event in events if since <= event.at <= until]
    spans = [_ends(inside, peer) for peer in sorted({event.peer for event in trained})]
    rounds = [
        (sum(last.versions) - sum(first.versions)) / FRAGMENTS / (last.at - first.at) for first, last in spans
    ]
    applied = [event for event in inside if isinstance(event, ev.FragmentApplied)]
    transfers = [each.transfer_s for each in timed_exchanges(view) if since <= each.began_at <= until]
    used = [(b.train_s - a.train_s) / (b.wall_s - a.wall_s) for a, b in spans]
    aside_s = sum(e.duration_s for e in inside if isinstance(e, ev.CheckpointSaved | ev.AgreedMeasured))
    return {
        "window_s": round(until - since, 1),
        **_common("ours", place.line, min(used), statistics.fmean(rounds)),
        "tokens_per_s": round(sum((b.tokens - a.tokens) / (b.wall_s - a.wall_s) for a, b in spans)),
        "step_ms": round(
            1e3 * sum(b.train_s - a.train_s for a, b in spans)
            / sum(b.inner_steps - a.inner_steps for a, b in spans), 2,
        ),
        "exposed_share": round(max((b.exposed_s - a.exposed_s) / (b.wall_s - a.wall_s) for a, b in spans), 4),
        "aside_share": round(aside_s / PEERS / (until - since), 4),
        "steps_late": _spread([event.sync_delay_steps for event in applied]),
        "points_late": _spread([event.staleness for event in applied]),
        "transfer_s": _spread(transfers),
        "line_used": place.used(since, until),
        **_wholeness(applied, {e.peer: e.name for e in events if isinstance(e, ev.PeerStarted)}),
        "skipped_sends": sum(isinstance(event, ev.SendSkipped) for event in inside),
        "aborted": sorted({e.reason for e in inside if isinstance(e, ev.RoundAborted)}),
    }  # fmt: skip


def _ends(events: Sequence[ev.Event], peer: str) -> tuple[ev.Progress, ev.Progress]:
    own = [e for e in events if isinstance(e, ev.Progress) and e.peer == peer and e.phase == "training"]
    return own[0], own[-1]


def _wholeness(applied: Sequence[ev.FragmentApplied], names: Mapping[str, str]) -> Figures:
    """By peer: how often a mean lacks some or all of what the peer offered for it."""
    whole: dict[str, list[bool]] = {}
    for event in applied:
        whole.setdefault(names[event.peer], []).append(event.contributed)
    return {
        "partial_share": {peer: round(1 - statistics.fmean(each), 4) for peer, each in whole.items()},
        "partial_in_a_row": max((_longest_run(each) for each in whole.values()), default=0),
    }


def _longest_run(whole: Sequence[bool]) -> int:
    longest = current = 0
    for each in whole:
        current = 0 if each else current + 1
        longest = max(longest, current)
    return longest


# ---- torchft


def install_torchft(environment: Path) -> None:
    """A virtual environment with torchft and the torch of this project, if there is none yet."""
    if (environment / "bin" / "torchft_lighthouse").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (environment / "constraints.txt").write_text("\n".join(TORCH))
    asked = ["install", "--quiet", "-c", str(environment / "constraints.txt"), TORCHFT, "numpy"]
    subprocess.run([str(environment / "bin" / "pip"), *asked], check=True)


def theirs(place: Lines, system: str, seconds: float, environment_at: Path) -> Figures:
    """torchft, with its lighthouse on the public machine. Ends with an outer step of all peers after
    ``seconds``."""
    machine, swarm = place.internet.machines[SEED], place.swarm
    bind = [
        "--bind",
        f"0.0.0.0:{LIGHTHOUSE_PORT}",
        "--min_replicas",
        str(PEERS),
        "--join_timeout_ms",
        "60000",
    ]
    swarm.start(SEED, machine.command([str(environment_at / "bin" / "torchft_lighthouse"), *bind]))
    lighthouse = f"http://{machine.address}:{LIGHTHOUSE_PORT}"
    script = [str(environment_at / "bin" / "python"), str(ROOT / "benchmarks" / "grid_torchft.py"), system]
    peers = []
    for index in range(PEERS):
        there = place.internet.machines[f"peer{index}"]
        command = [*script, str(index), there.address, lighthouse, str(STEPS), str(STEP_S)]
        peers.append(swarm.start(there.name, there.command(command), environment()))
    ends_at = time.monotonic() + READY_S + seconds + 2 * (ROUND_S + floor_s(system, place.line))
    told: list[list[Figures]] = [[]]
    while not all(figures and figures[-1]["wall_s"] >= seconds for figures in told):
        time.sleep(0.5)
        told = [_told(peer) for peer in peers]
        if time.monotonic() > ends_at or any(not peer.running() for peer in peers):
            break
    for peer in peers:
        swarm.kill(peer)
    common = min((figures[-1]["outer_steps"] for figures in told if figures), default=0)
    lasts = [next((one for one in figures if one["outer_steps"] == common), None) for figures in told]
    if None in lasts or len({last["digest"] for last in lasts if last}) != 1:
        return {"failed": [peer.last_lines(6) for peer in peers], "outer_steps": common}
    return _figures_of_theirs(place, system, [last for last in lasts if last])


def _told(peer: Child) -> list[Figures]:
    lines = peer.log.read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"outer') and line.endswith("\n")]


def _figures_of_theirs(place: Lines, system: str, lasts: Sequence[Figures]) -> Figures:
    wall_s, until = max(last["wall_s"] for last in lasts), max(last["at"] for last in lasts)
    one = lasts[0]
    return {
        "window_s": round(wall_s, 1),
        **_common(
            system, place.line, min(last["train_s"] / last["wall_s"] for last in lasts),
            one["outer_steps"] / one["fragments"] / wall_s,
        ),
        "tokens_per_s": round(sum(last["tokens"] / last["wall_s"] for last in lasts)),
        "step_ms": round(1e3 * statistics.fmean(last["train_s"] / last["inner_steps"] for last in lasts), 2),
        "steps_late": {"fixed": one["delay_steps"]},
        "line_used": place.used(until - wall_s, until),
        "syncs_that_failed": sum(last["syncs"] - last["outer_steps"] for last in lasts),
    }  # fmt: skip


# ---- both


def _common(system: str, line: LinkProfile, utilisation: float, rounds_per_s: float) -> Figures:
    best = best_rounds_per_s(system, line)
    return {
        "utilisation": round(utilisation, 4),
        "outside": round(1 - utilisation, 4),
        "floor_s": round(floor_s(system, line), 2),
        "outer_rounds_per_s": round(rounds_per_s, 4),
        "best_rounds_per_s": round(best, 4),
        "against_best": round(rounds_per_s / best, 3),
    }


def _spread(values: Sequence[float]) -> Figures:
    if not values:
        return {}
    ordered = sorted(values)
    ninth = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    return {
        "median": round(statistics.median(ordered), 2),
        "90 %": round(ninth, 2),
        "most": round(ordered[-1], 2),
    }


@contextmanager
def _folder(kept: Path | None, name: str) -> Iterator[Path]:
    """A new folder for a case, removed afterwards unless it is to be ``kept``."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept / name if kept else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", nargs="+", type=int, default=list(LINES), metavar="MBIT")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=36.0, help="of training, for each line and system")
    parser.add_argument("--torchft-env", type=Path, default=ENVIRONMENT)
    parser.add_argument("--folder", type=Path, help="keep the runs here, one folder each")
    options = parser.parse_args()
    if set(options.systems) - {"ours"}:
        install_torchft(options.torchft_env)
    head = {"at": time.strftime("%F %R"), "peers": PEERS, "parameters": PARAMETERS, "round_s": ROUND_S}
    report: dict[str, Any] = {**head, "bits_per_value": BITS_PER_VALUE}
    for mbit in options.lines:
        table = report[f"{mbit} Mbit/s"] = {}
        for system in options.systems:
            with _folder(options.folder, f"{mbit}-{system}") as folder, lines(folder, line_of(mbit)) as place:
                if system == "ours":
                    table[system] = ours(place, options.seconds)
                else:
                    table[system] = theirs(place, system, options.seconds, options.torchft_env)
            print(mbit, system, json.dumps(table[system]), file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
