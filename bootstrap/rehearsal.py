"""``p2p-co2 rehearse RUN.toml``: the run as it would go over the internet, on this machine, before anybody is
invited.

Each peer is the program that a volunteer runs. All are on loopback, and their carriers are slowed down to the
line that a profile describes (``net.transport.slow``). Exit status 0 only if every peer ended with the same
digest. The speed of the training, on shared cores, is not that of the volunteers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bootstrap.options import RehearsalOptions
from bootstrap.run_file import recipe_of
from bootstrap.stage import (
    LOOPBACK,
    Line,
    Stage,
    WatchWith,
    prepare,
    require_carrier,
    require_peers,
    run_in_new_folder,
)
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError
from p2p_co2.planning.profiles import profile_of

EMULATION = "carriers slowed down on loopback: no real packets, no routers to get through"


def run_rehearsal(options: RehearsalOptions, watch_with: WatchWith) -> int:
    """Run it; returns the exit status, 130 if somebody stopped it.

    Raises ``ConfigError`` for options that make no rehearsal, ``EnvironmentFault`` if it cannot be started.
    """
    require_carrier(options.carrier)
    config = run_config(options)
    require_peers(options.peers, config.pipeline.stages)
    lines = lines_of(options, config.seed)

    def run(folder: Path) -> list[str]:
        with recipe_of(options.run_file, given=bool(options.recipe)):
            prepared, loss_start = prepare(config, folder)
        watch = watch_with(prepared, folder, EMULATION, lines)
        with Stage(prepared, folder, options.carrier, watch) as stage:
            _play(stage, lines)
        return stage.finish(loss_start)

    return run_in_new_folder(options.folder, "rehearsal", "stopped; no process is left", run)


def lines_of(options: RehearsalOptions, seed: int) -> list[Line]:
    """The lines of peer-1, peer-2 and so on, who have the named profiles in turn. Raises ``ConfigError``."""
    if not 1 <= options.peers <= 32:
        raise ConfigError.of_option("--peers", f"1 to 32 (got {options.peers})")
    names = [name.strip() for name in options.profile.split(",")]
    changes = _changes(options) | {"nat": "open"}  # nothing stands before a peer here
    return [
        Line(f"peer-{index + 1}", replace(profile_of(names[index % len(names)], seed, index), **changes))
        for index in range(options.peers)
    ]


def _changes(options: RehearsalOptions) -> dict[str, Any]:
    """Fields of every profile that get another value. Raises ``ConfigError`` for what no line has."""
    changes: dict[str, Any] = {}
    for option, value, field, unit, least, most in (
        ("--up-mbit", options.up_mbit, "up_bits_per_s", 1e6, 0.1, 1e4),
        ("--down-mbit", options.down_mbit, "down_bits_per_s", 1e6, 0.1, 1e4),
        ("--latency-ms", options.latency_ms, "latency_ms", 1.0, 0.0, 5000.0),
        ("--jitter-ms", options.jitter_ms, "jitter_ms", 1.0, 0.0, 1000.0),
        ("--loss", options.loss, "loss", 1.0, 0.0, 0.5),
    ):
        if value is not None:
            if not least <= value <= most:
                raise ConfigError.of_option(option, f"{least:g} to {most:g} (got {value:g})")
            changes[field] = value * unit
    return changes


def _play(stage: Stage, lines: Sequence[Line]) -> None:
    """Start everybody and look on until the peers have ended."""
    stage.start_seed()
    for number, line in enumerate(lines):
        slow_line = ",".join(f"{figure:g}" for figure in line.figures)
        stage.start_peer(line.peer, number, len(lines), (*LOOPBACK, "--slow-line", slow_line))
    stage.look_on()


def run_config(options: RehearsalOptions) -> RunConfig:
    """The run to rehearse: the file's, ended after ``seconds``. Raises ``ConfigError``."""
    run = read_run_config(options.run_file) if options.run_file else RunConfig()
    run = run.model_copy(update={"members": False})  # all are our own
    if options.recipe:
        run = run.model_copy(update={"recipe": options.recipe, "recipe_digest": ""})
    clock = run.clock
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        raise ConfigError.of_option("--seconds", f"above 0 (got {options.seconds:g})")
    if options.seconds is None and clock.rounds:
        return run
    if clock.mode == "steps":
        problem = 'with clock.mode = "steps" only the run file can say when the rehearsal ends: give a number'
        raise ConfigError(str(options.run_file), "clock.rounds", problem)
    seconds = options.seconds or 120.0
    rounds = round(seconds / clock.round_s)
    if rounds < 1:
        problem = f"at least one round of {clock.round_s:g} s (got {seconds:g}); or lower clock.round_s"
        raise ConfigError.of_option("--seconds", problem)
    return run.model_copy(update={"clock": clock.model_copy(update={"rounds": rounds})})
