"""``p2p-co2 rehearse RUN.toml``: the run as it would go over the internet, on this machine, before anybody is
invited.

Each peer is the program that a volunteer runs, in a network namespace of its own behind the line that its
profile describes (``internet``); the seed is on a public machine. Without root, or where the kernel has no
namespaces, the peers run on loopback and their carriers are slowed down instead; the user is told which.

Nothing survives a rehearsal; one that was killed is swept up by the next. Exit status 0 only if every peer
ended with the same digest. The lines are real; the speed of the training, on shared cores, is not."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from bootstrap import netns
from bootstrap.internet import EMULATION, Internet
from bootstrap.local_swarm import POLL_S
from bootstrap.options import RehearsalOptions
from bootstrap.run_file import recipe_of
from bootstrap.stage import (
    LOOPBACK,
    Line,
    Stage,
    Traffic,
    WatchWith,
    prepare,
    require_carrier,
    require_peers,
    run_in_new_folder,
)
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning.profiles import PROFILES, NatKind, profile_of

NO_EMULATION = "carriers slowed down on loopback: no real packets, no routers to get through"


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
        with ExitStack() as exits:
            kernel = netns.examine()
            problem = "it was asked for" if options.in_carrier else kernel.problem
            if problem:
                internet = None
                emulation = f"{NO_EMULATION} ({problem})"
                # Nothing stands before a peer there.
                built = [replace(line, profile=replace(line.profile, nat="open")) for line in lines]
            else:
                internet = exits.enter_context(Internet(kernel, folder, config.seed, options.congestion))
                built = _built(internet, lines)
                emulation = EMULATION
            watch = watch_with(prepared, folder, emulation, built)
            with Stage(prepared, folder, options.carrier, watch) as stage, _sampled(internet) as traffic:
                _play(stage, internet, built)
            if internet is not None:
                internet.close()
            forwarded = internet.forwarded if internet else {}
            return stage.finish(loss_start, traffic=traffic, forwarded=forwarded)

    stopped = "stopped; no process and no namespace is left"
    return run_in_new_folder(options.folder, "rehearsal", stopped, run)


def lines_of(options: RehearsalOptions, seed: int) -> list[Line]:
    """The lines of peer-1, peer-2 and so on, who have the named profiles in turn. Raises ``ConfigError``."""
    if not 1 <= options.peers <= 32:
        raise ConfigError.of_option("--peers", f"1 to 32 (got {options.peers})")
    names = [name.strip() for name in options.profile.split(",")]
    changes = _changes(options)
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
    if options.nat != "profile":
        if options.nat not in get_args(NatKind):
            problem = f"profile, {', '.join(get_args(NatKind))} (got {options.nat!r})"
            raise ConfigError.of_option("--nat", problem)
        changes["nat"] = options.nat
    return changes


def _built(internet: Internet, lines: Sequence[Line]) -> list[Line]:
    """Let the lines carry packets; returns them with their addresses."""
    internet.add("seed", PROFILES["fibre"])
    for line in lines:
        internet.add(line.peer, line.profile)
    internet.start()
    return [replace(line, address=internet.machines[line.peer].public_address) for line in lines]


def _play(stage: Stage, internet: Internet | None, lines: Sequence[Line]) -> None:
    """Start everybody and look on until the peers have ended."""
    if internet is None:
        stage.start_seed()
    else:
        seed = internet.machines["seed"]
        place = ("--host", seed.address, "--announce-host", seed.address, "--port", "31337")
        stage.start_seed(place, seed.command)
    for number, line in enumerate(lines):
        if internet is None:
            slow_line = ",".join(f"{figure:g}" for figure in line.figures)
            stage.start_peer(line.peer, number, len(lines), (*LOOPBACK, "--slow-line", slow_line))
        else:
            stage.start_peer(line.peer, number, len(lines), (), internet.machines[line.peer].command)
    stage.look_on()


@contextmanager
def _sampled(internet: Internet | None) -> Iterator[Sequence[Traffic]]:
    """While entered, the lines' counters are read on a thread of their own, so often that an exchange of a
    second can be held against its line: the last five and a half hours of them."""
    ended = threading.Event()
    traffic = deque[Traffic](maxlen=200_000)

    def sample() -> None:
        while internet is not None and not ended.wait(POLL_S):
            try:
                traffic.append((time.time(), internet.traffic_bytes()))
            except EnvironmentFault:
                return  # somebody took the namespaces away: the peers' end will tell

    thread = threading.Thread(target=sample, name="line counters")
    thread.start()
    try:
        yield traffic
    finally:
        ended.set()
        thread.join()


def run_config(options: RehearsalOptions) -> RunConfig:
    """The run to rehearse: the file's, ended after ``seconds``. Raises ``ConfigError``."""
    run = read_run_config(options.run_file) if options.run_file else RunConfig()
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
