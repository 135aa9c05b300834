"""Training over internet lines: ours, torchft's DiLoCo and streaming DiLoCo, hivemind's ``Optimizer``.

    python benchmarks/wan.py --lines 20 50 200 1000        # against torchft: the grid
    python benchmarks/wan.py --lines dsl transatlantic     # against hivemind; dsl-gpt: a text's loss
    python benchmarks/wan.py --lines 20-gpt --systems ours --peers 1   # the loss of one alone

Needs root: four peers, each a network namespace behind its line (``lines``; ``line`` in the answer says what
the kernel emulates). Steps have a fixed length, slept, so that two cores do not decide. The grid trains 30.8
million parameters in four fragments, a round each ``--steps`` of 39 ms, on so many Mbit/s (20: 100 down) and
10 ms one way, ``near-50`` without. ``dsl`` and ``transatlantic`` take half of a round for an exchange at
best, ``slow`` twice a round. torchft is installed into a place of its own.

- ``utilisation``: time in inner steps over time, the slowest peer, between the first rounds and the end of
  the training. ``aside_share``: of that time, checkpoints and held-out loss. ``tokens_per_s``: of all peers.
- ``floor_s``: a round's payload at the line's upload rate, 2 (1 - 1/M) N b / rate, with b bits a value: our
  ``--codec``'s, 32 for torchft on a CPU, 8 for hivemind. ``against_best``: outer rounds by the best that the
  line allows, one in the longer of a round and ``floor_s``; in the sum for ``diloco``, which waits by design.
- ``steps_late``: inner steps from sending a fragment to applying its mean. ``line_used``: bytes on the line,
  headers included, by what it carries. ``transfer_share``: payload alone, from BEGIN to the last mean.
- ``loss``: held out; ours of the agreed parameters at the end, hivemind's of each peer's own. ``curve``:
  (wall seconds, loss) on the way, where the line asks for it.

Law: all systems run the same training on the same lines. Nobody is fast by being wrong: ours must end with
one digest, torchft's peers hold the same agreed values after the same outer step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import ROOT, Bench, Figures, bench, note, parser_of, run, spread
from lines import Lines
from recipes import PARTS, WIDTH

from bootstrap.local_swarm import Child, environment
from p2p_co2.codec_specs import SPECS
from p2p_co2.config import ClockConfig, CodecConfig, RunConfig, write_toml
from p2p_co2.planning.profiles import PROFILES, LinkProfile
from p2p_co2.recipes import recipe_digest
from p2p_co2.system.process import program
from p2p_co2.telemetry import events as ev
from p2p_co2.trained import Trained

PEERS = 4
STEP_S, ROWS = 0.039, 15_040
"""Of the grid."""
BITS = {"ours": 0.0, "diloco": 32.0, "streaming": 32.0, "hivemind": 8.0}
"""Per value; ours are the codec's."""
LEARNING_RATE_TIMES = {"tables": 20.0, "gpt": 1.4}
"""hivemind takes one step a round, on mean gradients, so it is given the best of several larger rates."""
READY_S, LEAVE_S, TIED_S = 90.0, 90.0, 32.0
"""To start, to leave, and until hivemind's peers begin together."""
ENVIRONMENT = Path("~/.cache/p2p-co2-bench/torchft").expanduser()
TORCHFT = ("torchft-nightly==2026.10.26", "torch==2.13.0", "numpy==2.3.5")
FAST = replace(PROFILES["fibre"], up_bits_per_s=10**9, down_bits_per_s=10**9, latency_ms=0.0, loss=0.0)


@dataclass(frozen=True)
class Case:
    """One line and what is trained over it. ``values``: parameters."""

    line: LinkProfile
    recipe: str
    options: dict[str, int | float | bool]
    values: int
    batch: int
    fragments: int
    step_s: float
    round_s: float
    rivals: tuple[str, ...]
    measure_every_s: float = 1e6
    peers: int = PEERS

    @property
    def path(self) -> str:
        return f"{ROOT}/benchmarks/recipes.py:{self.recipe}"

    def floor_s(self, system: str) -> float:
        return 2 * (1 - 1 / self.peers) * self.values * BITS[system] / self.line.up_bits_per_s

    def best_rounds_per_s(self, system: str) -> float:
        floor = self.floor_s(system)
        return 1 / (self.round_s + floor if system == "diloco" else max(self.round_s, floor))


def grid_case(mbit: int, steps: int, is_near: bool) -> Case:
    up, down, far = mbit * 1_000_000, max(mbit, 100 if mbit < 50 else 0) * 1_000_000, PROFILES["fibre"]
    latency_ms = 0.0 if is_near else far.latency_ms
    line = replace(far, up_bits_per_s=up, down_bits_per_s=down, loss=0.0, latency_ms=latency_ms)
    options, values = {"rows": ROWS, "step_s": STEP_S}, PARTS * WIDTH * ROWS
    return Case(line, "tables", options, values, 16, PARTS, STEP_S, steps * STEP_S, ("diloco", "streaming"))


def line_case(profile: str, rows: int, fragments: int, step_s: float, share: float, scale: float) -> Case:
    """``share``: of a round, what an exchange takes at best. ``scale``: model and rates smaller by this."""
    line, rows = scaled(profile, scale), round(rows * scale)
    values = PARTS * WIDTH * rows
    options = {"rows": rows, "step_s": step_s, "batch": 512, "plain": True}
    made = Case(line, "tables", options, values, 512, fragments, step_s, 1.0, ("hivemind",))
    return replace(made, round_s=made.floor_s("ours") / share)


def gpt_case() -> Case:
    values, options = 1_269_920, {"step_s": 0.5, "batch": 8}
    line = scaled("dsl", values / (8192 * WIDTH * PARTS))
    made = Case(line, "gpt", options, values, 8, 2, 0.5, 1.0, ("hivemind",), 5.0)
    return replace(made, round_s=made.floor_s("ours") / 0.5)


def scaled(profile: str, scale: float) -> LinkProfile:
    line = PROFILES[profile]
    up, down = int(scale * line.up_bits_per_s), int(scale * line.down_bits_per_s)
    return replace(line, up_bits_per_s=up, down_bits_per_s=down, loss=0.01 if profile == "dsl" else line.loss)


def case_of(name: str, scale: float, steps: int) -> Case:
    if (mbit := name.removeprefix("near-")).isdecimal():
        return grid_case(int(mbit), steps, mbit != name)
    return {
        "dsl": lambda: line_case("dsl", 8192, 2, 0.5, 0.5, scale),
        "transatlantic": lambda: line_case("transatlantic", 16384, 1, 1.0, 0.5, scale),
        "slow": lambda: line_case("dsl", 8192, 4, 0.5, 2.0, scale),
        "dsl-gpt": gpt_case,
        "20-gpt": lambda: replace(gpt_case(), line=grid_case(20, steps, False).line, round_s=4.0),
    }[name]()  # fmt: skip


# ---- ours


def ours(case: Case, seconds: float, swarm: Bench, lines: Lines, codec: str) -> Figures:
    rounds = max(3, round(seconds / case.round_s))
    run = RunConfig(
        name="wan", codec=CodecConfig(name=codec), recipe=case.path, recipe_options=case.options,
        recipe_digest=recipe_digest(case.path, case.options), fragments=case.fragments,
        clock=ClockConfig(mode="time", round_s=round(case.round_s, 3), rounds=rounds),
    )  # fmt: skip
    (swarm.folder / "run.toml").write_text(write_toml(run))
    address = lines.address("seed")
    place = ["--folder", str(swarm.folder / "seed"), "--host", address, "--announce-host", address]
    command = program("bootstrap", "seed", str(swarm.folder / "run.toml"), *place, "--port", "31337")
    seed = swarm.start("seed", lines.command("seed", command), environment())
    ticket, peers = swarm.wait_for_line(seed, "ticket:", READY_S), []
    names = [f"peer{index}" for index in range(case.peers)]
    for name in names:
        options = ["--folder", str(swarm.folder / name), "--name", name, "--threads", "1", "--no-board"]
        options += ["--min-peers", str(case.peers), "--recipe", case.path]
        command = lines.command(name, program("peers", ticket, *options))
        peers.append(swarm.start(name, command, environment()))
    swarm.wait(peers, READY_S + rounds * case.round_s + LEAVE_S)
    events = {name: swarm.all_events(name) for name in names}
    digests = {e.digest for own in events.values() for e in own if isinstance(e, ev.PeerFinished)}
    if len(digests) != 1 or any(peer.exit_status() for peer in peers):
        return {"failed": [peer.last_lines(4) for peer in peers], "digests": sorted(digests)}
    figures = figures_of_ours(case, lines, events)
    if "hivemind" in case.rivals:
        figures["loss"] = Trained.load(swarm.folder / names[0] / "checkpoint", case.path).held_out_loss()
    return figures


def figures_of_ours(case: Case, lines: Lines, events: Mapping[str, Sequence[ev.Event]]) -> Figures:
    training = {name: [e for e in own if _trains(e)] for name, own in events.items()}
    firsts = [next((e.at for e in own if min(e.versions, default=0) >= 1), 0) for own in training.values()]
    if not all(firsts):
        return {"failed": "a fragment had no round"}
    since, until = max(firsts), min(own[-1].at for own in training.values())
    inside = [e for own in events.values() for e in own if since <= e.at <= until]
    spans = [_ends(own, since, until) for own in training.values()]
    rates = [
        (sum(b.versions) - sum(a.versions)) / case.fragments / (b.at - a.at) for a, b in spans if b.at > a.at
    ]
    applied = [event for event in inside if isinstance(event, ev.FragmentApplied)]
    aside_s = sum(e.duration_s for e in inside if isinstance(e, ev.CheckpointSaved | ev.AgreedMeasured))
    steps = sum(b.inner_steps - a.inner_steps for a, b in spans)
    return common_figures(
        case, "ours", min((b.train_s - a.train_s) / (b.wall_s - a.wall_s) for a, b in spans),
        statistics.fmean(rates),
    ) | {
        "window_s": round(until - since, 1),
        "wall_s": round(max(own[-1].wall_s for own in training.values()), 1),
        "tokens_per_s": round(sum((b.tokens - a.tokens) / (b.wall_s - a.wall_s) for a, b in spans), 1),
        "step_ms": round(1e3 * sum(b.train_s - a.train_s for a, b in spans) / steps, 2),
        "exposed_share": round(max((b.exposed_s - a.exposed_s) / (b.wall_s - a.wall_s) for a, b in spans), 4),
        "aside_share": round(aside_s / case.peers / (until - since), 4),
        "steps_late": spread([event.sync_delay_steps for event in applied]),
        "partial_share": round(1 - statistics.fmean(event.contributed for event in applied), 4),
        "transfer_share": _transfers(case, inside),
        "line_used": lines.used(since, until),
        "aborted": sorted({e.reason for e in inside if isinstance(e, ev.RoundAborted)}),
        "curve": [
            (round(e.at - since, 1), round(e.loss, 4))
            for e in sorted(inside, key=lambda e: e.at) if isinstance(e, ev.AgreedMeasured)
        ],
    }  # fmt: skip


def _trains(event: ev.Event) -> bool:
    return isinstance(event, ev.Progress) and event.phase == "training" and event.inner_steps > 0


def _ends(own: Sequence[ev.Progress], since: float, until: float) -> tuple[ev.Progress, ev.Progress]:
    inside = [event for event in own if since <= event.at <= until]
    return inside[0], inside[-1]


def _transfers(case: Case, events: Sequence[ev.Event]) -> Figures:
    """Of each exchange of everybody: payload and means by what the line carries until the last mean."""
    payload = {e.fragment: e.payload_bytes for e in events if isinstance(e, ev.FragmentSent)}
    took_s: dict[tuple[int, int], list[float]] = {}
    for event in events:
        if isinstance(event, ev.RoundCommitted) and event.group_size == case.peers and event.means_s:
            took_s.setdefault((event.fragment, event.round), []).append(event.means_s - event.begun_s)
    bits = {fragment: 8 * 2 * (1 - 1 / case.peers) * size for fragment, size in payload.items()}
    return spread([
        bits[fragment] / max(*own, 1e-9) / case.line.up_bits_per_s
        for (fragment, _), own in took_s.items() if len(own) == case.peers and fragment in bits
    ])  # fmt: skip


# ---- torchft


def torchft(case: Case, system: str, seconds: float, swarm: Bench, lines: Lines, there: Path) -> Figures:
    """With its lighthouse on the public machine. Ends with an outer step of all peers after ``seconds``."""
    job = swarm.folder / "job.json"
    job.write_text(json.dumps({"options": case.options, "steps": round(case.round_s / STEP_S)}))
    bind = ["--bind", "0.0.0.0:29510", "--min_replicas", str(case.peers), "--join_timeout_ms", "60000"]
    swarm.start("seed", lines.command("seed", [str(there / "bin" / "torchft_lighthouse"), *bind]))
    lighthouse = f"http://{lines.address('seed')}:29510"
    script = [str(there / "bin" / "python"), str(ROOT / "benchmarks" / "rivals.py"), "--worker", "torchft"]
    peers = []
    for index in range(case.peers):
        name = f"peer{index}"
        words = [*script, system, str(index), lines.address(name), lighthouse, str(job)]
        peers.append(swarm.start(name, lines.command(name, words), environment()))
    ends_at = time.monotonic() + READY_S + seconds + 2 * (case.round_s + case.floor_s(system))
    told = [swarm.said(peer) for peer in peers]
    while not all(figures and figures[-1]["wall_s"] >= seconds for figures in told):
        time.sleep(0.5)
        told = [swarm.said(peer) for peer in peers]
        if time.monotonic() > ends_at or any(not peer.running() for peer in peers):
            break
    for peer in peers:
        swarm.kill(peer)
    common = min((figures[-1]["outer_steps"] for figures in told if figures), default=0)
    lasts = [one for figures in told for one in figures if one["outer_steps"] == common]
    if len(lasts) != case.peers or len({last["digest"] for last in lasts}) != 1:
        return {"failed": [peer.last_lines(6) for peer in peers], "outer_steps": common}
    wall_s, until = max(last["wall_s"] for last in lasts), max(last["at"] for last in lasts)
    one = lasts[0]
    rounds_per_s = one["outer_steps"] / one["fragments"] / wall_s
    return common_figures(case, system, min(x["train_s"] / x["wall_s"] for x in lasts), rounds_per_s) | {
        "window_s": round(wall_s, 1),
        "tokens_per_s": round(sum(last["tokens"] / last["wall_s"] for last in lasts)),
        "step_ms": round(1e3 * statistics.fmean(last["train_s"] / last["inner_steps"] for last in lasts), 2),
        "steps_late": {"fixed": one["delay_steps"]},
        "line_used": lines.used(until - wall_s, until),
        "syncs_that_failed": sum(last["failed"] for last in lasts),
    }


def install_torchft(there: Path) -> None:
    """A virtual environment with torchft and the torch of this project, if there is none yet."""
    if not (there / "bin" / "torchft_lighthouse").exists():
        subprocess.run([sys.executable, "-m", "venv", str(there)], check=True)
        subprocess.run([str(there / "bin" / "pip"), "install", "--quiet", *TORCHFT], check=True)


# ---- hivemind


def hivemind(case: Case, seconds: float, swarm: Bench, lines: Lines) -> Figures:
    job = swarm.folder / "job.json"
    job.write_text(json.dumps({
        "recipe": case.path, "options": case.options, "seconds": seconds,
        "target_batch_size": max(1, round(case.peers * case.batch * case.round_s / case.step_s)),
        "learning_rate_times": LEARNING_RATE_TIMES[case.recipe],
        "measure_every_s": case.measure_every_s, "begin_at": time.time() + TIED_S,
    }))  # fmt: skip
    workers: list[Child] = []
    seed, script = "-", [sys.executable, str(ROOT / "benchmarks" / "rivals.py"), "--worker", "optimizer"]
    for index in range(case.peers):
        name = f"peer{index}"
        words = [*script, str(swarm.folder), str(index), lines.address(name), seed, str(job)]
        workers.append(swarm.start(name, lines.command(name, words), environment()))
        if not index:
            seed = swarm.first_answer(workers[0])["maddr"]
    swarm.wait(workers, TIED_S + seconds + 2 * READY_S)
    told = [swarm.said(worker, '{"tokens') for worker in workers]
    if any(not figures or "loss" not in figures[-1] for figures in told):
        return {"failed": [worker.last_lines(5) for worker in workers]}
    steps = min(figures[-1]["epoch"] for figures in told)
    walls = [figures[-1]["wall_s"] for figures in told]
    rates = [steps / wall_s for wall_s in walls]
    used = min(_growth(figures, "train_s") for figures in told)
    return common_figures(case, "hivemind", used, statistics.fmean(rates)) | {
        "wall_s": round(max(walls), 1),
        "tokens_per_s": round(sum(_growth(figures, "tokens") for figures in told), 1),
        "outer_steps": steps,
        "loss": [round(figures[-1]["loss"], 4) for figures in told],
        "curve": [
            (round(one["wall_s"], 1), round(one["loss"], 4)) for one in told[0] if "loss" in one
        ],
    }  # fmt: skip


def _growth(figures: Sequence[Figures], name: str) -> float:
    """Of ``name`` per second since the first outer step, or since the start if there was none."""
    first = next((each for each in figures if each["epoch"]), figures[0])
    first = figures[0] if first is figures[-1] else first
    seconds = figures[-1]["wall_s"] - first["wall_s"]
    return float((figures[-1][name] - first[name]) / seconds) if seconds else 0.0


# ---- all


def common_figures(case: Case, system: str, utilisation: float, rounds_per_s: float) -> Figures:
    best = case.best_rounds_per_s(system)
    return {
        "utilisation": round(utilisation, 4), "round_s": round(case.round_s, 2),
        "floor_s": round(case.floor_s(system), 2), "outer_rounds_per_s": round(rounds_per_s, 4),
        "best_rounds_per_s": round(best, 4), "against_best": round(rounds_per_s / best, 3),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> Figures:
    BITS["ours"] = SPECS[options.codec].bits
    report: Figures = {"bits_per_value": BITS}
    for name in options.lines:
        case = replace(case_of(name, options.scale, options.steps), peers=options.peers)
        systems = [one for one in options.systems or ("ours", *case.rivals) if one in ("ours", *case.rivals)]
        report[name] = {}
        for system in systems:
            profiles = {"seed": FAST} | {f"peer{index}": case.line for index in range(case.peers)}
            with bench(None, options.folder, f"{name}-{system}") as swarm, Lines(swarm, profiles) as lines:
                report["line"] = lines.words
                if system == "ours":
                    figures = ours(case, options.seconds, swarm, lines, options.codec)
                elif system == "hivemind":
                    figures = hivemind(case, options.seconds, swarm, lines)
                else:
                    install_torchft(ENVIRONMENT)
                    figures = torchft(case, system, options.seconds, swarm, lines, ENVIRONMENT)
            report[name][system] = figures
            note(name, system, figures)
    return report


def main() -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(run_it=measure)
    parser.add_argument("--lines", nargs="+", default=["20", "50", "200", "1000"], help="as above, near-50")
    parser.add_argument("--systems", nargs="+", choices=tuple(BITS), help="ours, and those of the line")
    parser.add_argument("--seconds", type=float, default=36.0, help="of training, for each line and system")
    parser.add_argument("--codec", default="q2", help="ours")
    parser.add_argument("--peers", type=int, default=PEERS, help="so many")
    parser.add_argument("--steps", type=int, default=100, help="inner steps of a round on Mbit/s")
    parser.add_argument("--scale", type=float, default=1.0, help="of dsl, transatlantic and slow")
    parser.add_argument("--folder", type=Path, help="keep the runs here, one folder each")
    run(parser)


if __name__ == "__main__":
    main()
