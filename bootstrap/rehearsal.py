"""``p2p-co2 rehearse RUN.toml``: the run as it would go over the internet, on this machine, before anybody is
invited.

Each peer is the program that a volunteer runs, in a network namespace of its own behind the line that its
profile describes (``internet``); the seed is on a public machine. Without root, or where the kernel has no
namespaces, the peers run on loopback and their carriers are slowed down instead; the user is told which.

Laws: nothing survives a rehearsal, whatever ends it: no process, no namespace; one that was killed is swept
up by the next. Exit status 0 only if every peer ended with the same digest. Price: all peers share this
machine's cores, so the lines are real and the speed of the training is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bootstrap.demo import software_versions
from bootstrap.exit_status import exit_status_of
from bootstrap.lines import Line, LineChanges, lines_of
from bootstrap.local_swarm import new_run_folder, remove_empty_run_folder
from bootstrap.rehearsal_swarm import RehearsalSwarm, Traffic
from bootstrap.run_file import recipe_of
from p2p_co2.config import RunConfig, read_run_config, write_toml
from p2p_co2.errors import ConfigError
from p2p_co2.system.process import ctrl_c_ends, full_disk_named, require_supported_platform
from p2p_co2.telemetry.events import Event

if TYPE_CHECKING:
    from p2p_co2.recipes import Recipe

DEFAULT_SECONDS = 120.0
STOPPED = "stopped; no process and no namespace is left"


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


@dataclass(frozen=True, kw_only=True)
class RehearsalEnd:
    """What a watcher cannot know from events. Losses in the recipe's unit, None if not measured.
    ``emulation``: which one was in use, in words; ``traffic``: samples of the lines' counters, empty on
    loopback; ``forwarded``: the packet forwarder's own account; ``deaths``: last words of those that died by
    themselves."""

    config: RunConfig
    folder: Path
    loss_start: float | None
    loss_end: float | None
    expected_peers: int
    deaths: tuple[str, ...]
    software: dict[str, str]
    emulation: str
    lines: tuple[Line, ...]
    traffic: Sequence[Traffic] = ()
    forwarded: dict[str, float] = field(default_factory=dict)


class RehearsalWatch(Protocol):
    """Who shows the rehearsal. ``begin`` is told the lines before the peers start; ``see`` gets new events of
    all peers; ``finish`` writes and prints the end, and returns why the run was no success (nothing if it was
    one); ``close`` gives the terminal back and may be called twice."""

    def begin(self, emulation: str, lines: Sequence[Line]) -> None: ...
    def see(self, events: Sequence[Event]) -> None: ...
    def finish(self, end: RehearsalEnd) -> list[str]: ...
    def close(self) -> None: ...


def run_rehearsal(options: RehearsalOptions, watch_with: Callable[[RunConfig, Path], RehearsalWatch]) -> int:
    """Run it; returns the exit status, 130 if somebody stopped it.

    Raises ``ConfigError`` for options that make no rehearsal, ``EnvironmentFault`` if it cannot be started.
    """
    require_supported_platform()
    if options.carrier not in {"auto", "grpc", "libp2p"}:
        raise ConfigError("command line", "--carrier", f"auto, grpc or libp2p (got {options.carrier!r})")
    config = run_config(options)
    lines = lines_of(options.peers, options.profile, options.line, config.seed)
    return exit_status_of(lambda: _in_folder(options, config, lines, watch_with), STOPPED)


def _in_folder(
    options: RehearsalOptions,
    config: RunConfig,
    lines: list[Line],
    watch_with: Callable[[RunConfig, Path], RehearsalWatch],
) -> list[str]:
    folder = new_run_folder(options.folder, "rehearsal")
    with full_disk_named(folder):
        return _rehearse(options, config, lines, watch_with, folder)


def _rehearse(
    options: RehearsalOptions,
    config: RunConfig,
    lines: list[Line],
    watch_with: Callable[[RunConfig, Path], RehearsalWatch],
    folder: Path,
) -> list[str]:
    try:
        config, recipe = _prepared(options, config, folder)
    except BaseException:
        remove_empty_run_folder(folder)
        raise
    loss_start = recipe.held_out(recipe.model) if recipe.held_out is not None else None
    with ExitStack() as stack:
        swarm = RehearsalSwarm(config, folder, options.carrier)
        emulation, lines = swarm.prepare(stack, lines, options.congestion, options.in_carrier)
        watch = watch_with(config, folder)
        stack.callback(watch.close)
        watch.begin(emulation, lines)
        swarm.run(watch.see)
        end = RehearsalEnd(
            config=config,
            folder=folder,
            loss_start=loss_start,
            loss_end=swarm.collect(),
            expected_peers=options.peers,
            deaths=tuple(swarm.deaths.values()),
            software=software_versions(),
            emulation=emulation,
            lines=tuple(lines),
            traffic=swarm.traffic,
            forwarded=swarm.forwarded,
        )
        return watch.finish(end)


def run_config(options: RehearsalOptions) -> RunConfig:
    """The run to rehearse: the file's, ended after ``seconds``. Raises ``ConfigError``."""
    run = read_run_config(options.run_file) if options.run_file else RunConfig()
    clock = run.clock
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        raise ConfigError("command line", "--seconds", f"above 0 (got {options.seconds:g})")
    if options.seconds is None and clock.rounds:
        return run
    if clock.mode == "steps":
        raise ConfigError(
            str(options.run_file),
            "clock.rounds",
            'with clock.mode = "steps" only the run file can say when the rehearsal ends: give a number',
        )
    seconds = options.seconds or DEFAULT_SECONDS
    rounds = round(seconds / clock.round_s)
    if rounds < 1:
        raise ConfigError(
            "command line",
            "--seconds",
            f"at least one round of {clock.round_s:g} s (got {seconds:g}); or lower clock.round_s",
        )
    return run.model_copy(update={"clock": clock.model_copy(update={"rounds": rounds})})


def _prepared(options: RehearsalOptions, config: RunConfig, folder: Path) -> tuple[RunConfig, Recipe]:
    """Write the run file with its recipe's digest; build what every peer starts from."""
    print("preparing the recipe ...", flush=True)
    with ctrl_c_ends(STOPPED, lambda: remove_empty_run_folder(folder)):
        import torch

        from p2p_co2.recipes import load_recipe, recipe_digest

    torch.set_num_threads(1)  # beside busy peers a second thread waits longer than it helps
    if options.recipe:
        config = config.model_copy(update={"recipe": options.recipe, "recipe_digest": ""})
    with recipe_of(options.run_file, given=bool(options.recipe)):
        if not config.recipe_digest:
            digest = recipe_digest(config.recipe, config.recipe_options)
            config = config.model_copy(update={"recipe_digest": digest})
        recipe = load_recipe(config.recipe, config.recipe_options, config.seed)
    (folder / "run.toml").write_text(write_toml(config), encoding="utf-8")
    return config, recipe
