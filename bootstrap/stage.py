"""A run whose seed and peers are all processes of this machine: what a demo and a rehearsal share.

``run_in_new_folder`` gives it a folder and an exit status, ``prepare`` its recipe. ``Stage`` starts the
processes, shows them to a ``SwarmWatch`` until they have ended, and tells what they leave as a ``RunEnd``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from bootstrap.local_swarm import POLL_S, Child, LocalSwarm
from p2p_co2.config import RunConfig, write_toml
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.system.process import StopSignals, full_disk_named, program
from p2p_co2.telemetry.events import CaughtUp, Event, PeerFinished, Progress
from p2p_co2.telemetry.journal import Tail
from p2p_co2.telemetry.watch import Watch

LOOPBACK = ("--host", "127.0.0.1")
_START_UP_S = 120.0
"""Peers import torch one beside the other on few cores; the run's clock may start after this at the latest.
They may take half of it to leave."""
_DIED = "ended unexpectedly with"
_WITH_US = ("--parent", str(os.getpid()))
"""So that the swarm leaves even when this process is killed."""


@dataclass(frozen=True)
class Line:
    """The line that a peer's carriers are slowed down to."""

    peer: str
    profile: LinkProfile

    @property
    def figures(self) -> tuple[float, ...]:
        """As a slowed carrier takes them: bits/s up and down, latency and jitter in seconds, loss."""
        profile = self.profile
        times_s = profile.latency_ms / 1e3, profile.jitter_ms / 1e3
        return profile.up_bits_per_s, profile.down_bits_per_s, *times_s, profile.loss


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What a watcher cannot know from events. Losses in the recipe's unit, None if not measured.
    ``loss_whole`` is of all that nobody trains on, the others of what peers measure while they train.
    ``deaths``: last words of those that died by themselves. ``killed``: peers that need not have finished.
    ``notes``: what else the reader should know, a sentence each."""

    loss_start: float | None
    loss_end: float | None
    loss_whole: float | None
    expected_peers: int
    deaths: tuple[str, ...]
    software: dict[str, str]
    text: str = ""
    killed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class SwarmWatch(Watch, Protocol):
    """What shows a run of one's own swarm. ``finish`` writes and prints the end, and returns why the run was
    no success; nothing if it was one."""

    def finish(self, end: RunEnd) -> list[str]: ...


WatchWith = Callable[[RunConfig, Path, str, Sequence[Line]], SwarmWatch]
"""Makes a watch of the run in a folder. A rehearsal says how lines are emulated, and which."""


def run_in_new_folder(folder: Path | None, kind: str, stopped: str, run: Callable[[Path], list[str]]) -> int:
    """The exit status of ``run`` in ``folder`` (None: ``runs/KIND-<time>``). It gives the reasons why it was
    no success: 0 without any, else they are told and it is 1. After Ctrl-C or SIGTERM ``stopped`` is said,
    and the status is 130; a second one ends all at once. Folders of a run that did not begin are taken back.
    Raises ``ConfigError``, ``EnvironmentFault``."""
    if folder and (folder / "logs").exists():
        raise ConfigError.of_option("--folder", f"{folder} holds a run already; name a new folder")
    print("preparing the recipe ...", flush=True)
    import p2p_co2.recipes  # noqa: F401  # slow, and nothing is to be given back yet

    made = folder or Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")
    try:
        with StopSignals():
            try:
                (made / "logs").mkdir(parents=True)
            except OSError as error:
                cure = "choose another with --folder"
                raise EnvironmentFault(f"cannot make {made}: {error.strerror}; {cure}") from None
            with full_disk_named(made):
                reasons = run(made)
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        with suppress(OSError):  # something is in it, and so in those above
            for empty in (made / "logs", made, made.parent):
                empty.rmdir()
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def require_carrier(name: str) -> None:
    """Raises ``ConfigError`` for a name that no carrier has."""
    if name not in {"auto", "grpc", "libp2p"}:
        raise ConfigError.of_option("--carrier", f"auto, grpc or libp2p (got {name!r})")


def require_peers(peers: int, stages: int) -> None:
    """Raises ``ConfigError`` if there are too few for the stages of a run."""
    if peers < stages:
        problem = f"each of {stages} stages needs a peer (got {peers}); two each are better"
        raise ConfigError.of_option("--peers", problem)


def prepare(
    config: RunConfig, folder: Path, *, is_judged: bool = False, text: Path | None = None
) -> tuple[RunConfig, float | None]:
    """(the run with its recipe's digest, the held-out loss before the first step as peers measure it, None if
    the recipe has none). ``text``: what all peers train on, if not Python's own. Writes ``run.toml``. Raises
    ``ConfigError``, for a recipe without held-out loss too if the run ``is_judged`` by it."""
    import torch

    from p2p_co2.recipes import load_recipe, recipe_digest
    from p2p_co2.recipes.measured import measured

    torch.set_num_threads(1)  # beside busy peers a second thread waits longer than it helps
    if not config.recipe_digest:
        digest = recipe_digest(config.recipe, config.recipe_options)
        config = config.model_copy(update={"recipe_digest": digest})
    recipe = load_recipe(
        config.recipe, config.recipe_options, config.seed, config.pipeline.stages, config.pipeline.is_tied,
        data=_own_data(text),
    )  # fmt: skip
    if is_judged and recipe.held_out is None:
        problem = "the demo judges a run by its held-out loss; give the recipe one"
        raise ConfigError(config.recipe, "held_out", problem)
    (folder / "run.toml").write_text(write_toml(config), encoding="utf-8")
    measure = recipe.glance or recipe.held_out
    return config, measured(measure(recipe.whole_model(config)))[0] if measure else None


def _own_data(text: Path | None) -> dict[str, str]:
    """What a peer that trains on ``text`` names as its own."""
    return {"text": str(text.resolve())} if text else {}


class Stage:
    """The swarm while it runs: use as ``with Stage(...) as stage``, then ``finish``. Leaving the block ends
    every process. ``text``: as of ``prepare``."""

    def __init__(
        self, config: RunConfig, folder: Path, carrier: str, watch: SwarmWatch, text: Path | None = None
    ) -> None:
        self._config = config
        self._folder = folder
        self._carrier = carrier
        self._watch = watch
        self._data = _own_data(text)
        self.swarm = LocalSwarm(folder / "logs")
        self.peers: dict[str, Child] = {}
        self.training_since: float | None = None
        self.caught_up: set[str] = set()
        self._finished: set[str] = set()
        self._deaths: dict[str, str] = {}
        """Last words of those that died by themselves."""
        self._tails: dict[str, Tail] = {}
        self._ticket = ""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.swarm.close()
            self._look()
        finally:
            self._watch.close()

    @property
    def _own_recipe(self) -> str:
        """Where the run's own recipe lies here, "" for the built-in one."""
        return self._config.recipe if self._config.is_own_recipe else ""

    def start_seed(self) -> None:
        """Start the seed and wait for its ticket. Raises ``EnvironmentFault``."""
        arguments = ["seed", str(self._folder / "run.toml"), "--folder", str(self._folder / "seed")]
        command = program("bootstrap", *arguments, *_WITH_US, *LOOPBACK)
        seed = self.swarm.start("seed", command)
        self._ticket = self.swarm.wait_for_line(seed, "ticket:", _START_UP_S)

    def start_peer(self, name: str, number: int, among: int, place: Sequence[str] = LOOPBACK) -> None:
        """Start a peer of one thread: ``number`` (from 0) of ``among`` that wait for each other. In a run
        with stages they hold these in turn. ``place``: more of its options."""
        folder = self._folder / "peers" / name
        stages = self._config.pipeline.stages
        if stages > 1:
            place = ("--stage", str(number % stages), *place)
        arguments = [
            self._ticket, "--folder", str(folder), "--name", name, "--threads", "1",
            "--carrier", self._carrier, "--min-peers", str(max(1, among // stages)), *_WITH_US, *place,
        ]  # fmt: skip
        if self._own_recipe:
            arguments += ["--recipe", self._own_recipe]
        arguments += [word for key, path in self._data.items() for word in (f"--{key}", path)]
        self.adopt(self.swarm.start(name, program("peers", *arguments)), folder)

    def adopt(self, child: Child, folder: Path) -> None:
        """Look on at a peer that writes its journal to ``folder``."""
        self.peers[child.name] = child
        self._tails[child.name] = Tail(folder / "events.jsonl")

    def look_on(self, act: Callable[[], None] = lambda: None) -> None:
        """Show events until the peers have ended, which they are asked to when they are overdue. ``act`` is
        called after each look. Raises ``EnvironmentFault`` if one ends before there is anything to see."""
        clock = self._config.clock
        length_s = clock.rounds * clock.round_s if clock.mode == "time" else float("inf")
        overdue_at = time.monotonic() + 1.5 * _START_UP_S + length_s
        is_asked = False
        while any(child.running() for child in self.peers.values()):
            time.sleep(3 * POLL_S)
            self._look()
            act()
            self._note_deaths()
            if self.training_since is None and not self._finished and self._deaths:  # all wait for all
                problem = "ended before the training began, with"
                raise EnvironmentFault(next(iter(self._deaths.values())).replace(_DIED, problem, 1))
            if time.monotonic() > overdue_at:
                if is_asked:
                    break
                is_asked = True
                overdue_at = time.monotonic() + _START_UP_S / 2
                for child in self.peers.values():
                    self.swarm.interrupt(child)
        self._note_deaths()

    def _look(self) -> None:
        """Show what is new in the journals."""
        events: list[Event] = []
        for name, tail in self._tails.items():
            for event in tail.new_events():
                if isinstance(event, Progress) and event.inner_steps and self.training_since is None:
                    self.training_since = time.monotonic()
                elif isinstance(event, PeerFinished):
                    self._finished.add(name)
                elif isinstance(event, CaughtUp):
                    self.caught_up.add(name)
                events.append(event)
        self._watch.see(events)

    def finish(self, loss_start: float | None, prompt: tuple[str, int] = ("", 0), **more: Any) -> list[str]:
        """Once all have left: put the journals together, measure a checkpoint, which alone is kept, and have
        the watch tell of it. ``prompt``: what to generate from, and how many tokens. ``more``: what only the
        caller knows of a ``RunEnd``. Returns why the run was no success, nothing if it was one."""
        from p2p_co2.recipes.measured import measured
        from p2p_co2.trained import Trained

        merge_journals([tail.path for tail in self._tails.values()], self._folder / "events.jsonl")
        loss_end = None
        loss_whole = None
        text = ""
        if self._has_checkpoint():
            trained = Trained.load(self._folder / "checkpoint", self._own_recipe, self._data)
            recipe = trained.recipe
            for older in set(trained.path.parent.glob("state-*")) - {trained.path}:
                shutil.rmtree(older, ignore_errors=True)
            if measure := recipe.glance or recipe.held_out:
                loss_end = measured(measure(recipe.model))[0]
            loss_whole = trained.held_out_loss() if recipe.held_out and recipe.glance else None
            if recipe.generate and prompt[0]:
                text = trained.sample(*prompt, self._config.seed)
        end = RunEnd(
            loss_start=loss_start, loss_end=loss_end, loss_whole=loss_whole, text=text,
            expected_peers=len(self.peers), deaths=tuple(self._deaths.values()),
            software=software_versions(), **more,
        )  # fmt: skip
        return self._watch.finish(end)

    def _has_checkpoint(self) -> bool:
        """Take one that a peer has left, or gather one of the whole model from those of all stages; the
        peers' own go. Whether there is any."""
        folders = [self._folder / "peers" / name / "checkpoint" for name in sorted(self._finished)]
        left = [folder for folder in folders if folder.is_dir()]
        target = self._folder / "checkpoint"
        if left and self._config.pipeline.stages == 1:
            left[0].rename(target)
        elif left:
            from p2p_co2.trainer.gather import gather_folders

            try:
                gather_folders(left, target, self._own_recipe)
            except ConfigError as error:  # of a stage nobody is left
                print(f"note: no checkpoint of the whole model: {error}", flush=True)
                return False
        for folder in (self._folder / "peers").glob("*/checkpoint") if left else ():
            shutil.rmtree(folder, ignore_errors=True)
        return bool(left)

    def _note_deaths(self) -> None:
        for child in self.swarm.dead_unasked():
            self._deaths.setdefault(child.name, f"{child.name} {_DIED} {child.last_words()}")


def merge_journals(journals: Sequence[Path], target: Path) -> None:
    """Write the lines of all ``journals`` to ``target``, sorted by their time; each peer's own order is
    kept."""
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
    known = {"python": sys.version.split()[0]}
    for package in ("p2p-co2", "torch", "hivemind", "grpcio", "bitsandbytes", "numpy", "protobuf"):
        with suppress(metadata.PackageNotFoundError):  # run from a source tree that was not installed
            known[package] = metadata.version(package)
    return known
