"""``p2p-co2 demo``: a whole swarm on this machine, each peer a process of its own, watched while it trains.

Nothing is simulated: the peers are the program that a volunteer runs, they meet through a seed and the DHT,
and all that is shown comes from the events they write. Exit status 0 only if every peer ended with the same
digest and the held-out loss of the agreed parameters fell. No process is left, whatever happens. All peers
share this machine's cores: a demo shows what the exchange costs, not that more peers learn faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from bootstrap.local_swarm import LocalSwarm
from bootstrap.stage import LOOPBACK, Stage, prepare, require_carrier, run_in_new_folder, software_versions
from p2p_co2.config import RunConfig
from p2p_co2.errors import RUN_OVER, ConfigError
from p2p_co2.system.process import require_supported_platform
from p2p_co2.telemetry.events import Event

FRAGMENTS = 4
STOPPED = "stopped; no process is left"
_SAMPLE_PROMPT, _SAMPLE_TOKENS = "def ", 240


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """``seconds``: length of the training, a round of every fragment each ``round_s``. ``kill_one``: half-way
    one peer is killed and a new one joins. ``folder`` None makes runs/demo-<time>. ``text``: a file or folder
    to train on."""

    peers: int = 4
    seconds: float = 150.0
    round_s: float = 5.0
    rule: str = "keep"
    codec: str = "int4"
    carrier: str = "auto"
    device: str = "cpu"
    folder: Path | None = None
    text: Path | None = None
    recipe: str = "byte-gpt"
    kill_one: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DemoEnd:
    """What a watcher cannot know from events. Losses in the recipe's unit, None if not measured; ``killed``:
    names of the peers that were killed on purpose; ``deaths``: last words of those that died by themselves;
    ``notes``: what else the reader should know, a sentence each."""

    config: RunConfig
    folder: Path
    loss_start: float | None
    loss_end: float | None
    text: str
    expected_peers: int
    killed: tuple[str, ...]
    deaths: tuple[str, ...]
    software: dict[str, str]
    notes: tuple[str, ...] = ()


class Watch(Protocol):
    """Who shows the demo. ``see`` gets new events of all peers; ``finish`` writes and prints the end, and
    returns why the run was no success (nothing if it was one); ``close`` gives the terminal back and may be
    called twice."""

    def see(self, events: Sequence[Event]) -> None: ...
    def finish(self, end: DemoEnd) -> list[str]: ...
    def close(self) -> None: ...


def run_demo(options: DemoOptions, watch_with: Callable[[RunConfig, Path], Watch]) -> int:
    """Run it; returns the exit status, 130 if somebody stopped it.

    Raises ``ConfigError`` for options that make no run, ``EnvironmentFault`` if the swarm cannot be started.
    """
    require_supported_platform()
    if options.peers < 1:
        raise ConfigError.of_option("--peers", f"at least 1 (got {options.peers})")
    require_carrier(options.carrier)
    if not math.isfinite(options.seconds):
        raise ConfigError.of_option("--seconds", f"a number of seconds (got {options.seconds:g})")
    config = run_config(options)
    if options.seconds < options.round_s:
        problem = f"at least one round of {options.round_s:g} s (got {options.seconds:g}); see --round-s"
        raise ConfigError.of_option("--seconds", problem)
    trained_s = config.clock.rounds * options.round_s
    if trained_s != options.seconds:
        rounds = f"{config.clock.rounds} rounds of {options.round_s:g} s"
        print(f"--seconds {options.seconds:g} is made whole: {rounds}, {trained_s:g} s", flush=True)

    def run(folder: Path) -> list[str]:
        return _demonstrate(options, config, watch_with, folder)

    return run_in_new_folder(options.folder, "demo", STOPPED, run)


def _demonstrate(
    options: DemoOptions, config: RunConfig, watch_with: Callable[[RunConfig, Path], Watch], folder: Path
) -> list[str]:
    config, loss_start = prepare(config, folder, is_judged=True)
    with LocalSwarm(folder / "logs") as swarm:
        demo = RunningDemo(options, Stage(swarm, config, folder, options.carrier), swarm)
        watch = watch_with(config, folder)
        try:
            demo.run(watch.see)
            swarm.close()
            demo.stage.look(watch.see)
            trained = demo.stage.collect()
            text = ""
            if trained and trained.recipe.generate:
                text = trained.sample(_SAMPLE_PROMPT, _SAMPLE_TOKENS, config.seed)
            end = DemoEnd(
                config=config,
                folder=folder,
                loss_start=loss_start,
                loss_end=trained.held_out_loss() if trained else None,
                text=text,
                expected_peers=len(demo.stage.peers),
                killed=tuple(demo.killed),
                deaths=tuple(demo.stage.deaths.values()),
                software=software_versions(),
                notes=tuple(demo.notes),
            )
            return watch.finish(end)
        finally:
            watch.close()


def run_config(options: DemoOptions) -> RunConfig:
    """The run that the options describe; raises ``ConfigError``."""
    table = {
        "name": "demo",
        "recipe": options.recipe,
        "recipe_options": {"text": str(options.text.resolve())} if options.text else {},
        "seed": options.seed,
        "fragments": FRAGMENTS,
        "clock": {
            "mode": "time",
            "round_s": options.round_s,
            "rounds": max(1, round(options.seconds / options.round_s)) if options.round_s > 0 else 1,
        },
        "codec": {"name": options.codec},
        "outer": {"rule": options.rule},
    }
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        option = {"outer.rule": "--rule", "codec.name": "--codec", "clock.round_s": "--round-s"}
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError.of_option(
            option.get(key, key), f"{first['msg']} (got {first['input']!r})"
        ) from None


class RunningDemo:
    """The swarm of a demo: starts the peers and, half-way where it was asked for, kills one for a
    newcomer."""

    def __init__(self, options: DemoOptions, stage: Stage, swarm: LocalSwarm) -> None:
        self.stage, self._options, self._swarm = stage, options, swarm
        self.killed: list[str] = []
        self.latecomer = ""
        self.notes: list[str] = []
        self._others_had_ended = False

    def run(self, see: Callable[[Sequence[Event]], None]) -> None:
        """Start everybody and look on until the peers have ended. Raises ``EnvironmentFault``."""
        self.stage.start_seed()
        for number in range(1, self._options.peers + 1):
            self._start_peer(f"peer-{number}", self._options.peers)
        self.stage.look_on(see, self.act)

    def act(self) -> None:
        """After each look at the peers."""
        self._replace_one()
        late = self.stage.peers.get(self.latecomer)
        if late is None or self.latecomer in self.killed:
            return
        if late.exit_status() == RUN_OVER:
            self._note_too_late(late.started_at)
        elif self._others_had_ended and self.latecomer not in self.stage.caught_up and late.running():
            self._swarm.kill(late)  # it would find nobody to catch up from
            self._note_too_late(late.started_at)
        self._others_had_ended = not any(
            child.running() for name, child in self.stage.peers.items() if name != self.latecomer
        )

    def _replace_one(self) -> None:
        since = self.stage.training_since
        if not self._options.kill_one or self.killed or since is None:
            return
        if time.monotonic() > since + self._options.seconds / 2:
            number = self._options.peers
            self.killed = [f"peer-{number}"]
            self._swarm.kill(self.stage.peers[self.killed[0]])
            self.latecomer = f"peer-{number + 1}"
            self._start_peer(self.latecomer, 1)

    def _start_peer(self, name: str, min_peers: int) -> None:
        self.stage.start_peer(name, min_peers, ("--device", self._options.device, *LOOPBACK))

    def _note_too_late(self, started_at: float) -> None:
        late = self.latecomer
        self.killed.append(late)
        self.stage.excused.add(late)
        self.notes.append(
            f"{late} came too late and was ended: {time.time() - started_at:.0f} s after its start it had "
            "not caught up, and the others had ended the run; give more --seconds"
        )
