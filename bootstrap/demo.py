"""``p2p-co2 demo``: a whole swarm on this machine, each peer a process of its own, watched while it trains.

Nothing is simulated: the peers are the program that a volunteer runs. Exit status 0 only if every peer ended
with the same digest and the held-out loss of the agreed parameters fell. All peers share this machine's
cores: a demo shows what the exchange costs, not that more peers learn faster."""

from __future__ import annotations

import math
import time
from pathlib import Path

from pydantic import ValidationError

from bootstrap.options import DemoOptions
from bootstrap.stage import (
    LOOPBACK,
    Stage,
    WatchWith,
    prepare,
    require_carrier,
    require_peers,
    run_in_new_folder,
)
from p2p_co2.config import RunConfig, problems_of
from p2p_co2.errors import RUN_OVER, ConfigError

MICROBATCHES = 4
"""Of a demo's inner step, times its stages: small steps, since all peers share few cores."""


def run_demo(options: DemoOptions, watch_with: WatchWith) -> int:
    """Run it; returns the exit status, 130 if somebody stopped it.

    Raises ``ConfigError`` for options that make no run, ``EnvironmentFault`` if the swarm cannot be started.
    """
    if options.peers < 1:
        raise ConfigError.of_option("--peers", f"at least 1 (got {options.peers})")
    require_peers(options.peers, options.stages)
    require_carrier(options.carrier)
    if not math.isfinite(options.seconds):
        raise ConfigError.of_option("--seconds", f"a number of seconds (got {options.seconds:g})")
    config = run_config(options)
    if options.peers > config.group_size:
        raise ConfigError.of_option("--peers", f"at most {config.group_size} (got {options.peers})")
    if options.seconds < options.round_s:
        problem = f"at least one round of {options.round_s:g} s (got {options.seconds:g}); see --round-s"
        raise ConfigError.of_option("--seconds", problem)
    trained_s = config.clock.rounds * options.round_s
    if trained_s != options.seconds:
        rounds = f"{config.clock.rounds} rounds of {options.round_s:g} s"
        print(f"--seconds {options.seconds:g} is made whole: {rounds}, {trained_s:g} s", flush=True)

    def run(folder: Path) -> list[str]:
        from p2p_co2.tensors.device import training_device

        print(f"device: {training_device(options.device, is_tried=False).words}", flush=True)
        prepared, loss_start = prepare(config, folder, is_judged=True, text=options.text)
        watch = watch_with(prepared, folder, "", ())
        with Stage(prepared, folder, options.carrier, watch, options.text) as stage:
            demo = RunningDemo(options, stage)
            demo.run()
        killed = tuple(demo.killed)
        notes = tuple(demo.notes)
        return stage.finish(loss_start, ("def ", 240), killed=killed, notes=notes)

    return run_in_new_folder(options.folder, "demo", "stopped; no process is left", run)


def run_config(options: DemoOptions) -> RunConfig:
    """The run that the options describe; raises ``ConfigError``."""
    table = {
        "name": "demo",
        "recipe": options.recipe,
        "seed": options.seed,
        "fragments": 4,
        "clock": {
            "mode": "time",
            "round_s": options.round_s,
            "rounds": max(1, round(options.seconds / options.round_s)) if options.round_s > 0 else 1,
        },
        "codec": {"name": options.codec},
        "outer": {"rule": options.rule},
    }
    if options.stages > 1:
        table["pipeline"] = {"stages": options.stages, "microbatches": MICROBATCHES * options.stages}
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        option = {"outer.rule": "--rule", "codec.name": "--codec", "clock.round_s": "--round-s"}
        wrong = {".".join(place): problem for place, problem in problems_of(RunConfig, error).items()}
        raise ConfigError.of_all(
            [ConfigError.of_option(option.get(key, key), problem) for key, problem in wrong.items()]
        ) from None


class RunningDemo:
    """The peers of a demo on its stage; half-way, where it was asked for, one is killed for a newcomer."""

    def __init__(self, options: DemoOptions, stage: Stage) -> None:
        self._options = options
        self._stage = stage
        self.killed: list[str] = []
        self.latecomer = ""
        self.notes: list[str] = []

    def run(self) -> None:
        """Start everybody and look on until the peers have ended. Raises ``EnvironmentFault``."""
        self._stage.start_seed()
        for number in range(self._options.peers):
            self._start_peer(f"peer-{number + 1}", number, self._options.peers)
        self._stage.look_on(self.act)

    def act(self) -> None:
        """After each look at the peers."""
        stage = self._stage
        options = self._options
        since = stage.training_since
        half_s = options.seconds / 2
        if options.kill_one and not self.killed and since and time.monotonic() > since + half_s:
            self._kill(f"peer-{options.peers}")
            self.latecomer = f"peer-{options.peers + 1}"
            self._start_peer(self.latecomer, options.peers - 1, 1)
        late = stage.peers.get(self.latecomer)
        if late is None or self.latecomer in self.killed:
            return
        others = (child for name, child in stage.peers.items() if name != self.latecomer)
        is_alone = self.latecomer not in stage.caught_up and not any(child.running() for child in others)
        if late.exit_status() == RUN_OVER or (is_alone and late.running()):
            self._kill(self.latecomer)  # it would find nobody to catch up from
            self.notes.append(
                f"{late.name} came too late and was ended: {time.time() - late.started_at:.0f} s after its "
                "start it had not caught up, and the others had ended the run; give more --seconds"
            )

    def _kill(self, name: str) -> None:
        self._stage.swarm.kill(self._stage.peers[name])
        self.killed.append(name)

    def _start_peer(self, name: str, number: int, among: int) -> None:
        from p2p_co2.tensors.device import device_of

        device = device_of(number, self._options.device)
        self._stage.start_peer(name, number, among, ("--device", device, *LOOPBACK))
