"""``p2p-co2 demo``: a whole swarm on this machine, each peer a process of its own, watched while it trains.

Nothing is simulated: the peers are the program that a volunteer runs, they meet through a seed and the DHT,
and all that is shown comes from the events they write. Exit status 0 only if every peer ended with the same
digest and the held-out loss of the agreed parameters fell. No process is left, whatever happens. All peers
share this machine's cores: a demo shows what the exchange costs, not that more peers learn faster."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from bootstrap.local_swarm import LocalSwarm
from bootstrap.stage import LOOPBACK, See, Stage, WatchWith, prepare, require_carrier, run_in_new_folder
from p2p_co2.config import RunConfig
from p2p_co2.errors import RUN_OVER, ConfigError
from p2p_co2.system.process import require_supported_platform

FRAGMENTS = 4
STOPPED = "stopped; no process is left"
_PROMPT = "def ", 240


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


def run_demo(options: DemoOptions, watch_with: WatchWith) -> int:
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
        prepared, loss_start = prepare(config, folder, is_judged=True)
        with LocalSwarm(folder / "logs") as swarm:
            demo = RunningDemo(options, Stage(swarm, prepared, folder, options.carrier), swarm)
            watch = watch_with(prepared, folder, "", ())
            try:
                demo.run(watch.see)
                swarm.close()
                demo.stage.look(watch.see)
                notes = {"killed": tuple(demo.killed), "notes": tuple(demo.notes)}
                return watch.finish(demo.stage.end(loss_start, _PROMPT, **notes))
            finally:
                watch.close()

    return run_in_new_folder(options.folder, "demo", STOPPED, run)


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

    def run(self, see: See) -> None:
        """Start everybody and look on until the peers have ended. Raises ``EnvironmentFault``."""
        self.stage.start_seed()
        for number in range(1, self._options.peers + 1):
            self._start_peer(f"peer-{number}", self._options.peers)
        self.stage.look_on(see, self.act)

    def act(self) -> None:
        """After each look at the peers."""
        self._replace_one()
        late = self.stage.peers.get(self.latecomer)
        others = (child for name, child in self.stage.peers.items() if name != self.latecomer)
        if late is None or self.latecomer in self.killed or any(child.running() for child in others):
            return
        if self.latecomer not in self.stage.caught_up and (late.running() or late.exit_status() == RUN_OVER):
            self._swarm.kill(late)  # it would find nobody to catch up from
            self.killed.append(late.name)
            self.stage.excused.add(late.name)
            self.notes.append(
                f"{late.name} came too late and was ended: {time.time() - late.started_at:.0f} s after its "
                "start it had not caught up, and the others had ended the run; give more --seconds"
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
