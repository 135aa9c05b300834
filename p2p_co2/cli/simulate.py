"""``p2p-co2 simulate``: a swarm on virtual time, its figures and the laws it broke, if any.

``simnet`` plays, ``monitoring`` sums up: the same ``events.jsonl`` and ``summary.json`` as a real run
writes. Exit status 0 only if no law was broken. A Ctrl-C or SIGTERM ends it with what was played by then,
status 130. A model's size counts on the links, not its values: nothing is said about its loss. A run with
stages has figures of its own (``simulate_stages``)."""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from monitoring.summary import RunFacts, summarise
from p2p_co2.cli.options import SimulationOptions
from p2p_co2.cli.simulate_stages import play, play_storm, write_summary
from p2p_co2.codec_specs import SPECS
from p2p_co2.config import read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning.profiles import profile_of
from p2p_co2.simnet import Churn, EventLog, Result, Settings, VirtualSwarm
from p2p_co2.simnet.campaign import storm_settings
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry.view import SwarmView
from p2p_co2.wire.limits import MAX_MEMBERS

BLOCKS = 16
"""Simulated blocks per fragment; each stands for its share of the real bytes."""
STEP_S, STEPS_IN_A_LONG_ROUND = 0.5, 120
"""A typical peer's inner step where nobody says: models whose rounds take minutes have slower ones."""
MICROBATCH_SHARE = 0.1
"""Of such a step: one microbatch of a stage, where nobody says."""
MAX_HOURS = 1e5
MIN_STEP_S = 1e-3
MAX_STEP_S = 86_400.0


def read_churn(text: str) -> float:
    """ "0.1/h" or "0.1": times an hour. Raises ``ConfigError``."""
    try:
        rate = float(text.removesuffix("/h"))
    except ValueError:
        rate = math.nan
    if not 0 <= rate < 1e4:
        raise ConfigError.of_option(
            "--churn", f"times an hour that a peer goes, such as 0.1/h (got {text!r})"
        )
    return rate


def run_simulation(options: SimulationOptions, say: Callable[[str], None] = print) -> int:
    """Play it and print its figures: as JSON if that was asked for, else ``say`` each line. Returns 0 if
    every law held, 130 if somebody stopped it. Raises ``ConfigError``, ``EnvironmentFault``."""
    if options.storm and options.stages > 1:
        return play_storm(options, say)
    settings = settings_of(options)
    folder = _new_folder(options)
    if settings.run.pipeline.stages > 1:
        step_s = options.step_s or MICROBATCH_SHARE * STEP_S * settings.run.pipeline.microbatches
        told, status = play(options, settings.run, step_s, read_churn(options.churn), say)
        table = write_summary(folder, options, step_s, told)
        if options.as_json:
            print(json.dumps(table, indent=2))
        else:
            say(f"written to {folder}")
        return status
    view = SwarmView()
    log = EventLog(folder / "events.jsonl")
    log.readers.append(view.add)
    began_at = time.monotonic()
    try:
        swarm = VirtualSwarm(settings, log)
        with StopSignals(swarm.stop):
            result = swarm.run()
    finally:
        log.close()
    wall_s = time.monotonic() - began_at
    facts = RunFacts(config=settings.run, expected_peers=options.peers)
    summary = summarise(view, facts)
    asked = asdict(options) | {"step_s": settings.step_s}
    summary["simulation"] = {
        **{name: asked[name] for name in ("peers", "profile", "hours")},
        "churn_per_h": read_churn(options.churn),
        **{name: asked[name] for name in ("seed", "parameters", "step_s", "storm")},
        **figures(result, wall_s),
        "planned_s": round(settings.planned_s, 3),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print(json.dumps(summary, indent=2))
    else:
        for line in (*lines_of(summary, result), f"written to {folder}"):
            say(line)
    if result.ended_early:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return 1 if result.violations else 0


def settings_of(options: SimulationOptions) -> Settings:
    """What the options ask for; raises ``ConfigError``."""
    churn_per_h = read_churn(options.churn)
    if not 1 <= options.peers <= MAX_MEMBERS:
        raise ConfigError.of_option("--peers", f"1 to {MAX_MEMBERS} (got {options.peers})")
    if options.storm:
        if options.run_file is not None:
            problem = f"a run of its own: leave {options.run_file} or --storm out"
            raise ConfigError.of_option("--storm", problem)
        return storm_settings(options.seed, options.peers)
    if options.run_file is None:
        raise ConfigError.of_option("RUN.toml", "name a run file, or ask for --storm")
    if options.stages != 1:
        raise ConfigError.of_option("--stages", "of a storm; a run's are pipeline.stages in its file")
    steps = f"{MIN_STEP_S:g} to {MAX_STEP_S:g} seconds, or 0 to choose"
    is_step = options.step_s == 0 or MIN_STEP_S <= options.step_s <= MAX_STEP_S
    for option, value, is_possible, words in (  # NaN fails every comparison
        ("--hours", options.hours, 0 < options.hours < MAX_HOURS, f"above 0, below {MAX_HOURS:g}"),
        ("--parameters", options.parameters, options.parameters >= 1, "at least 1"),
        ("--step-s", options.step_s, is_step, steps),
    ):
        if not is_possible:
            raise ConfigError.of_option(option, f"{words} (got {value:g})")
    profile_of(options.profile, options.seed, 0)
    run = read_run_config(options.run_file)
    clock = run.clock
    step_s = options.step_s or STEP_S
    if clock.mode == "time" and not options.step_s:
        step_s = max(STEP_S, clock.round_s / STEPS_IN_A_LONG_ROUND)
    round_s = clock.round_s if clock.mode == "time" else clock.inner_steps_per_round * step_s
    rounds = max(1, math.ceil(3600 * options.hours / round_s))
    rounds = min(rounds, clock.rounds or rounds)
    # Peers come and go until nine tenths of the run, so that its end can be judged.
    calm_at = 0.9 * min(3600 * options.hours, rounds * round_s)
    run = run.model_copy(update={"clock": clock.model_copy(update={"rounds": rounds})})
    values = max(1, options.parameters // run.fragments)
    encoded = SPECS[run.codec.name].payload_bytes(values)
    return Settings(
        run=run,
        peers=options.peers,
        seed=options.seed,
        profile=options.profile,
        faults=Churn(churn_per_h, calm_at) if churn_per_h else None,
        parameters=options.parameters,
        step_s=step_s,
        blocks=(BLOCKS,) * run.fragments,
        real_bytes_per_block=max(1.0, encoded / BLOCKS),
        state_factor=max(2, round(2 * SPECS["fp32"].payload_bytes(values) / encoded)),
    )


def _new_folder(options: SimulationOptions) -> Path:
    folder = options.folder or Path("runs") / f"simulation-{options.peers}-peers-seed-{options.seed}"
    try:
        folder.mkdir(parents=True, exist_ok=options.folder is None)
    except FileExistsError:
        raise ConfigError.of_option("--folder", f"{folder} exists; name a new folder") from None
    except OSError as error:
        cure = "choose another with --folder"
        raise EnvironmentFault(f"cannot make {folder}: {error.strerror}; {cure}") from None
    return folder


def figures(result: Result, wall_s: float) -> dict[str, Any]:
    """What a simulation knows beyond a real run's summary: plain JSON."""
    return {
        "digest": result.digest,
        "virtual_s": round(result.virtual_s, 3),
        "ended_early": round(result.virtual_s, 3) if result.ended_early else None,
        "wall_s": round(wall_s, 2),
        "turns": result.turns,
        "turns_per_s": round(result.turns / wall_s) if wall_s > 0 else None,
        "violations": [str(violation) for violation in result.violations],
        "faults": result.faults,
        "left_behind": result.left_behind,
        "lacking": result.lacking,
        "forks": {"seen": result.forks, "longest_s": result.longest_fork_s},
        "longest_offer_s": round(result.longest_offer_s, 3),
        "recovery_s": quantiles(result.recoveries_s),
        "first_contribution_s": quantiles(result.first_contributions_s),
        "work": {"units": result.units, "written_off": result.written_off},
        "held_most": {name: {"held": held, "bound": bound} for name, (held, bound) in result.held.items()},
    }


def quantiles(samples: Sequence[float]) -> dict[str, float | int | None]:
    """Count, median, 90th percentile and largest; None where there are none."""
    if not samples:
        return {"count": 0, "median": None, "p90": None, "max": None}
    ordered = sorted(samples)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    named = {"median": statistics.median(ordered), "p90": p90, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(value, 3) for name, value in named.items()}}


def lines_of(summary: dict[str, Any], result: Result) -> list[str]:
    """The figures in words."""
    rounds = summary["rounds"]
    told = summary["simulation"]
    sent = summary["bytes"]["up_per_peer"]
    back = told["recovery_s"]
    staleness = ", ".join(f"{n}: {count}" for n, count in summary["staleness"]["histogram"].items())
    again = f"median {back['median']} s, longest {back['max']} s" if back["count"] else "nobody came back"
    lines = [
        f"{told['virtual_s']:.0f} s of {told['peers']} peers in {told['wall_s']:.1f} s: "
        f"{told['turns']} turns, {told['turns_per_s']} a second",
        f"fragment exchanges: {rounds['committed']} committed, {rounds['aborted']} aborted",
        f"staleness: {staleness or 'none'}",
        f"sent per peer: {statistics.fmean(sent.values()) / 1e6 if sent else 0:.2f} MB",
        f"start to training again: {back['count']} times, {again}",
        f"faults: {', '.join(f'{kind} {count}' for kind, count in result.faults.items()) or 'none'}",
        f"forks: {result.forks}, the longest {result.longest_fork_s:.0f} s",
        f"events: sha256 {result.digest}",
    ]
    if result.ended_early:
        share = f"{result.virtual_s:.0f} of {told['planned_s']:.0f} virtual s"
        lines.insert(0, f"ended early, after {share}: how the run ends was not judged")
    for peers, words in (
        (result.left_behind, "joined too late to finish"),
        (result.lacking, "left without what others hold, and said so"),
    ):
        lines += [f"{words}: {', '.join(peers)}"] if peers else []
    lines.append(f"law violations: {len(result.violations)}")
    return lines + [f"  {violation}" for violation in result.violations[:10]]
