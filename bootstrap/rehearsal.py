"""``p2p-co2 rehearse RUN.toml``: the run as it would go over the internet, on this machine, before anybody is
invited.

Each peer is the program that a volunteer runs, in a network namespace of its own behind the line that its
profile describes (``internet``); the seed is on a public machine. Without root, or where the kernel has no
namespaces, the peers run on loopback and their carriers are slowed down instead; the user is told which.

Nothing survives a rehearsal, whatever ends it: no process, no namespace; one that was killed is swept up by
the next. Exit status 0 only if every peer ended with the same digest. All peers share this machine's cores,
so the lines are real and the speed of the training is not."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bootstrap import netns
from bootstrap.internet import EMULATION, Internet
from bootstrap.lines import Line, LineChanges, lines_of
from bootstrap.local_swarm import LocalSwarm
from bootstrap.run_file import recipe_of
from bootstrap.stage import (
    LOOPBACK,
    See,
    Stage,
    Traffic,
    WatchWith,
    prepare,
    require_carrier,
    run_in_new_folder,
)
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.system.process import require_supported_platform

DEFAULT_SECONDS = 120.0
STOPPED = "stopped; no process and no namespace is left"
NO_EMULATION = "carriers slowed down on loopback: no real packets, no routers to get through"
_SAMPLE_EVERY_S = 0.1
"""So often that an exchange of a second can be held against its line."""
_MAX_SAMPLES = 200_000
"""Five and a half hours of traffic; of a longer rehearsal the end is kept."""
_SEED, _SEED_PORT, _SEED_PROFILE = "seed", "31337", PROFILES["fibre"]


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """``profile``: a name, or several with commas, given to the peers in turn; ``line`` changes its figures.
    ``seconds``: length of the training, None for the run file's ``clock.rounds`` or ``DEFAULT_SECONDS``.
    ``congestion``: TCP's congestion control on the emulated machines, "" for this machine's own.
    ``in_carrier``: slow the carriers down on loopback even where namespaces are allowed."""

    run_file: Path | None = None
    peers: int = 4
    profile: str = "dsl"
    line: LineChanges = field(default_factory=LineChanges)
    seconds: float | None = None
    folder: Path | None = None
    carrier: str = "auto"
    recipe: str = ""
    congestion: str = ""
    in_carrier: bool = False


def run_rehearsal(options: RehearsalOptions, watch_with: WatchWith) -> int:
    """Run it; returns the exit status, 130 if somebody stopped it.

    Raises ``ConfigError`` for options that make no rehearsal, ``EnvironmentFault`` if it cannot be started.
    """
    require_supported_platform()
    require_carrier(options.carrier)
    config = run_config(options)
    lines = lines_of(options.peers, options.profile, options.line, config.seed)

    def run(folder: Path) -> list[str]:
        with recipe_of(options.run_file, given=bool(options.recipe)):
            prepared, loss_start = prepare(config, folder)
        with ExitStack() as stack:
            kernel = netns.examine()
            problem = "it was asked for" if options.in_carrier else kernel.problem
            if problem:
                internet, emulation = None, f"{NO_EMULATION} ({problem})"
                # Nothing stands before a peer there.
                built = [replace(line, profile=replace(line.profile, nat="open")) for line in lines]
            else:
                internet = stack.enter_context(Internet(kernel, folder, config.seed, options.congestion))
                built, emulation = _built(internet, lines), EMULATION
            watch = watch_with(prepared, folder, emulation, built)
            stack.callback(watch.close)
            traffic: deque[Traffic] = deque(maxlen=_MAX_SAMPLES)
            with LocalSwarm(folder / "logs") as swarm, _sampled(internet, traffic):
                played = Stage(swarm, prepared, folder, options.carrier)
                _play(played, internet, built, watch.see)
            played.look(watch.see)
            if internet is not None:
                internet.close()
            forwarded = internet.forwarded if internet else {}
            return watch.finish(played.end(loss_start, traffic=traffic, forwarded=forwarded))

    return run_in_new_folder(options.folder, "rehearsal", STOPPED, run)


def _built(internet: Internet, lines: Sequence[Line]) -> list[Line]:
    """Let the lines carry packets; returns them with their addresses."""
    internet.add(_SEED, _SEED_PROFILE)
    for line in lines:
        internet.add(line.peer, line.profile)
    internet.start()
    return [replace(line, address=internet.machines[line.peer].public_address) for line in lines]


def _play(played: Stage, internet: Internet | None, lines: Sequence[Line], see: See) -> None:
    """Start everybody and look on until the peers have ended."""
    if internet is None:
        played.start_seed()
    else:
        seed = internet.machines[_SEED]
        place = ("--host", seed.address, "--announce-host", seed.address, "--port", _SEED_PORT)
        played.start_seed(place, seed.command)
    for line in lines:
        if internet is None:
            slow_line = ",".join(f"{figure:g}" for figure in line.figures)
            played.start_peer(line.peer, len(lines), (*LOOPBACK, "--slow-line", slow_line))
        else:
            played.start_peer(line.peer, len(lines), (), internet.machines[line.peer].command)
    played.look_on(see)


@contextmanager
def _sampled(internet: Internet | None, traffic: deque[Traffic]) -> Iterator[None]:
    """While entered, the lines' counters are read into ``traffic`` on a thread of their own."""
    ended = threading.Event()

    def sample() -> None:
        while internet is not None and not ended.wait(_SAMPLE_EVERY_S):
            try:
                traffic.append((time.time(), internet.traffic_bytes()))
            except EnvironmentFault:
                return  # somebody took the namespaces away: the peers' end will tell

    thread = threading.Thread(target=sample, name="line counters")
    thread.start()
    try:
        yield
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
    seconds = options.seconds or DEFAULT_SECONDS
    rounds = round(seconds / clock.round_s)
    if rounds < 1:
        problem = f"at least one round of {clock.round_s:g} s (got {seconds:g}); or lower clock.round_s"
        raise ConfigError.of_option("--seconds", problem)
    return run.model_copy(update={"clock": clock.model_copy(update={"rounds": rounds})})
