"""``p2p-co2 demo``: a whole swarm on this machine, each peer a process of its own, watched while it trains.

Laws: nothing is simulated: the peers are the program that a volunteer runs, they meet through a seed and the
DHT, and all that is shown comes from the events they write. Exit status 0 only if every peer ended with the
same digest and the held-out loss of the agreed parameters fell. Whatever happens, no process is left. The
watcher is handed in, so that starting a swarm and looking at one stay apart.

Price: all peers share this machine's cores, so a demo trains no faster than one process would; it shows that
the exchange works and what it costs, not that more peers learn faster.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from bootstrap.exit_status import exit_status_of
from bootstrap.local_swarm import (
    Child,
    LocalSwarm,
    environment,
    new_run_folder,
    remove_empty_run_folder,
    require_all_alive,
)
from p2p_co2.config import RunConfig, write_toml
from p2p_co2.errors import RUN_OVER, ConfigError
from p2p_co2.system.process import ctrl_c_ends, full_disk_named, program, require_supported_platform
from p2p_co2.telemetry.events import CaughtUp, Event, PeerFinished, Progress
from p2p_co2.telemetry.journal import Tail

FRAGMENTS = 4
STOPPED = "stopped; no process is left"
_LOOK_EVERY_S = 0.3
_SEED_READY_S = 60.0
_START_UP_S = 75.0
"""Peers import torch one beside the other on few cores; the run's clock may start after this at the
latest."""
_LEAVE_S = 20.0
_WITH_US = ["--parent", str(os.getpid())]
"""So that the swarm leaves even when the demo itself is killed."""
_SAMPLE_PROMPT = "def "
_SAMPLE_TOKENS = 240


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
        raise ConfigError("command line", "--peers", f"at least 1 (got {options.peers})")
    if options.carrier not in {"auto", "grpc", "libp2p"}:
        raise ConfigError("command line", "--carrier", f"auto, grpc or libp2p (got {options.carrier!r})")
    if not math.isfinite(options.seconds):
        raise ConfigError("command line", "--seconds", f"a number of seconds (got {options.seconds:g})")
    config = run_config(options)
    if options.seconds < options.round_s:
        raise ConfigError(
            "command line",
            "--seconds",
            f"at least one round of {options.round_s:g} s (got {options.seconds:g}); see --round-s",
        )
    trained_s = config.clock.rounds * options.round_s
    if trained_s != options.seconds:
        rounds = f"{config.clock.rounds} rounds of {options.round_s:g} s"
        print(f"--seconds {options.seconds:g} is made whole: {rounds}, {trained_s:g} s", flush=True)
    return exit_status_of(lambda: _in_folder(options, config, watch_with), STOPPED)


def _in_folder(
    options: DemoOptions, config: RunConfig, watch_with: Callable[[RunConfig, Path], Watch]
) -> list[str]:
    folder = new_run_folder(options.folder, "demo")
    with full_disk_named(folder):
        return _demonstrate(options, config, watch_with, folder)


def _demonstrate(
    options: DemoOptions, config: RunConfig, watch_with: Callable[[RunConfig, Path], Watch], folder: Path
) -> list[str]:
    try:
        config, loss_start = _prepared(options, config, folder)
    except BaseException:
        remove_empty_run_folder(folder)
        raise
    with LocalSwarm(folder / "logs") as swarm:
        demo = RunningDemo(options, config, folder, swarm)
        watch = watch_with(config, folder)
        try:
            demo.run(watch)
            return watch.finish(demo.end(loss_start))
        finally:
            watch.close()


def run_config(options: DemoOptions, recipe_digest: str = "") -> RunConfig:
    """The run that the options describe; raises ``ConfigError``."""
    table = {
        "name": "demo",
        "recipe": options.recipe,
        "recipe_options": {"text": str(options.text.resolve())} if options.text else {},
        "recipe_digest": recipe_digest,
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
        raise ConfigError(
            "command line", option.get(key, key), f"{first['msg']} (got {first['input']!r})"
        ) from None


def _prepared(options: DemoOptions, config: RunConfig, folder: Path) -> tuple[RunConfig, float]:
    """Write the run file with its recipe's digest; measure the loss of the parameters that every peer starts
    from."""
    print("preparing the recipe ...", flush=True)
    with ctrl_c_ends(STOPPED, lambda: remove_empty_run_folder(folder)):
        import torch

        from p2p_co2.recipes import load_recipe, recipe_digest

    torch.set_num_threads(1)  # beside busy peers a second thread waits longer than it helps
    config = run_config(options, recipe_digest(config.recipe, config.recipe_options))
    recipe = load_recipe(config.recipe, config.recipe_options, config.seed)
    if recipe.held_out is None:
        raise ConfigError(
            config.recipe, "held_out", "the demo judges a run by its held-out loss; give the recipe one"
        )
    (folder / "run.toml").write_text(write_toml(config), encoding="utf-8")
    return config, recipe.held_out(recipe.model)


class RunningDemo:
    """The swarm while it runs. ``tails``: each peer's journal by its name."""

    def __init__(self, options: DemoOptions, config: RunConfig, folder: Path, swarm: LocalSwarm) -> None:
        self.options, self.config, self.folder, self.swarm = options, config, folder, swarm
        self.ticket = ""
        self.peers: dict[str, Child] = {}
        self.tails: dict[str, Tail] = {}
        self.killed: tuple[str, ...] = ()
        self.deaths: dict[str, str] = {}
        self.training_since: float | None = None
        self.finished: set[str] = set()
        self.latecomer = ""
        self.caught_up: set[str] = set()
        self.notes: list[str] = []

    def run(self, watch: Watch) -> None:
        """Start everybody, look on until the peers have ended, then end the seed. Raises
        ``EnvironmentFault`` if one of them ends before there is anything to see."""
        seed = self.swarm.start("seed", self._seed_command(), environment())
        self.ticket = self.swarm.wait_for_line(seed, "ticket:", _SEED_READY_S)
        for number in range(1, self.options.peers + 1):
            self._start_peer(f"peer-{number}")
        self.look_on(watch)
        self.swarm.close()
        self._look(watch)

    def look_on(self, watch: Watch) -> None:
        """Until the peers have ended, which they are asked to when they are overdue."""
        latest_at = time.monotonic() + _START_UP_S + self.options.seconds + _LEAVE_S
        asked_at: float | None = None
        while any(child.running() for child in self.peers.values()):
            time.sleep(_LOOK_EVERY_S)
            others_ended = self._others_have_ended()
            self._look(watch)
            if others_ended:
                self._end_latecomer()
            self._report_deaths()
            if self.training_since is None and not self.finished:
                require_all_alive(self.peers.values())
            self._stage()
            if asked_at is None and time.monotonic() > latest_at:
                asked_at = time.monotonic()
                for child in self.peers.values():
                    self.swarm.interrupt(child)
            elif asked_at is not None and time.monotonic() > asked_at + _LEAVE_S:
                break
        self._look(watch)
        self._report_deaths()

    def _seed_command(self) -> list[str]:
        place = ["--host", "127.0.0.1", "--folder", str(self.folder / "seed"), *_WITH_US]
        return program("bootstrap", "seed", str(self.folder / "run.toml"), *place)

    def _start_peer(self, name: str) -> None:
        folder = self.folder / "peers" / name
        arguments = [
            "--folder", str(folder), "--name", name, "--threads", "1", "--carrier", self.options.carrier,
            "--device", self.options.device, "--host", "127.0.0.1",
            "--min-peers", str(1 if self.killed else self.options.peers),
        ]  # fmt: skip
        arguments += _WITH_US
        if own := self._own_recipe():
            arguments += ["--recipe", own]
        self.peers[name] = self.swarm.start(name, program("peers", self.ticket, *arguments), environment())
        self.tails[name] = Tail(folder / "events.jsonl")

    def _own_recipe(self) -> str:
        """Where the recipe lies, "" for the built-in one."""
        return self.config.recipe if ":" in self.config.recipe else ""

    def _look(self, watch: Watch) -> None:
        events: list[Event] = []
        for name, tail in self.tails.items():
            for event in tail.new_events():
                if isinstance(event, Progress) and event.inner_steps and self.training_since is None:
                    self.training_since = time.monotonic()
                if isinstance(event, PeerFinished):
                    self.finished.add(name)
                if isinstance(event, CaughtUp):
                    self.caught_up.add(name)
                events.append(event)
        watch.see(events)

    def _report_deaths(self) -> None:
        for child in self.swarm.dead_unasked():
            if child.name == self.latecomer and child.exit_status() == RUN_OVER:
                self._note_too_late()
            elif child.name not in self.deaths:
                self.deaths[child.name] = (
                    f"{child.name} ended unexpectedly with status {child.exit_status()}; "
                    f"its last lines ({child.log}):\n{child.last_lines()}"
                )

    def _stage(self) -> None:
        """Half-way, when it was asked for: one peer dies without a word, and somebody new comes."""
        if not self.options.kill_one or self.killed or self.training_since is None:
            return
        if time.monotonic() > self.training_since + self.options.seconds / 2:
            name = f"peer-{self.options.peers}"
            self.killed = (name,)
            self.swarm.kill(self.peers[name])
            self.latecomer = f"peer-{self.options.peers + 1}"
            self._start_peer(self.latecomer)

    def _others_have_ended(self) -> bool:
        return not any(child.running() for name, child in self.peers.items() if name != self.latecomer)

    def _end_latecomer(self) -> None:
        """Who is up only when all others have left finds nobody to catch up from: end it."""
        late = self.latecomer
        if not late or late in self.caught_up or not self.peers[late].running():
            return
        self.swarm.kill(self.peers[late])
        self._note_too_late()

    def _note_too_late(self) -> None:
        late = self.latecomer
        if late in self.killed:
            return
        up_s = time.time() - self.peers[late].started_at
        self.killed += (late,)
        self.notes.append(
            f"{late} came too late and was ended: {up_s:.0f} s after its start it had not caught up, and the "
            "others had ended the run; give more --seconds"
        )

    def end(self, loss_start: float) -> DemoEnd:
        """Collect what the peers left: one journal, one checkpoint, and what the trained model can do."""
        merge_journals([tail.path for tail in self.tails.values()], self.folder / "events.jsonl")
        loss_end, text = self._result()
        return DemoEnd(
            config=self.config,
            folder=self.folder,
            loss_start=loss_start,
            loss_end=loss_end,
            text=text,
            expected_peers=len(self.peers),
            killed=self.killed,
            deaths=tuple(self.deaths.values()),
            software=software_versions(),
            notes=tuple(self.notes),
        )

    def _result(self) -> tuple[float | None, str]:
        from p2p_co2.trained import Trained

        for name in sorted(self.finished):
            source = self.folder / "peers" / name / "checkpoint"
            if source.is_dir():
                shutil.copytree(source, self.folder / "checkpoint")
                trained = Trained.load(self.folder / "checkpoint", self._own_recipe())
                text = ""
                if trained.recipe.generate:
                    text = trained.sample(_SAMPLE_PROMPT, _SAMPLE_TOKENS, self.config.seed)
                return trained.held_out_loss(), text
        return None, ""


def merge_journals(journals: Sequence[Path], target: Path) -> None:
    """Write the lines of all ``journals`` to ``target``, sorted by their time; each peer's own order is
    kept."""
    import json

    lines: list[tuple[float, str]] = []
    for journal in journals:
        latest = 0.0
        text = journal.read_text(encoding="ascii", errors="replace") if journal.exists() else ""
        for line in text.splitlines():
            try:
                latest = max(latest, float(json.loads(line)["at"]))
            except (ValueError, KeyError, TypeError):
                continue  # the torn last line of a killed peer
            lines.append((latest, line))
    lines.sort(key=lambda item: item[0])
    target.write_text("".join(f"{line}\n" for _, line in lines), encoding="ascii")


def software_versions() -> dict[str, str]:
    """Versions of what a run's figures depend on, by package."""
    packages = ("p2p-co2", "torch", "hivemind", "grpcio", "bitsandbytes", "numpy", "protobuf")
    known = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # run from a source tree that was not installed
    return known
