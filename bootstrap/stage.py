"""A run whose seed and peers are all processes of this machine: what a demo and a rehearsal share.

``run_in_new_folder`` gives it a folder and an exit status, ``prepare`` its recipe, ``Stage`` starts the
processes, looks on until the peers have ended, and collects what they leave.
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
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from bootstrap.local_swarm import Child, LocalSwarm, environment
from p2p_co2.config import RunConfig, write_toml
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.system.ctrl_c import hand_over, take_back
from p2p_co2.system.process import full_disk_named, program
from p2p_co2.telemetry.events import CaughtUp, Event, PeerFinished, Progress
from p2p_co2.telemetry.journal import Tail

if TYPE_CHECKING:
    from p2p_co2.trained import Trained

LOOPBACK = ("--host", "127.0.0.1")
_LOOK_EVERY_S = 0.3
_SEED_READY_S = 90.0
_START_UP_S = 120.0
"""Peers import torch one beside the other on few cores; the run's clock may start after this at the
latest."""
_LEAVE_S = 60.0
_WITH_US = ("--parent", str(os.getpid()))
"""So that the swarm leaves even when this process is killed."""

See = Callable[[Sequence[Event]], None]
Wrap = Callable[[list[str]], list[str]]
"""A command line as it is to be run: on another machine, say."""


def run_in_new_folder(folder: Path | None, kind: str, stopped: str, run: Callable[[Path], list[str]]) -> int:
    """The exit status of ``run`` in ``folder`` (None: ``runs/KIND-<time>``): see ``exit_status_of``."""
    require_new(folder)
    print("preparing the recipe ...", flush=True)
    take_back()
    import p2p_co2.recipes  # noqa: F401 (slow, and nothing is to be given back yet)

    hand_over()

    def inside() -> list[str]:
        made = new_run_folder(folder, kind)
        with full_disk_named(made):
            return run(made)

    return exit_status_of(inside, stopped)


def exit_status_of(run: Callable[[], list[str]], stopped: str) -> int:
    """Call ``run``, which gives the reasons why it was no success, and tell them: 0 without any, else 1.
    While it lasts SIGTERM counts as Ctrl-C; after either ``stopped`` is said, and the status is 130."""
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        reasons = run()
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def require_new(folder: Path | None) -> None:
    """Raises ``ConfigError`` if ``folder`` holds a run already."""
    if folder and (folder / "logs").exists():
        raise ConfigError.of_option("--folder", f"{folder} holds a run already; name a new folder")


def new_run_folder(folder: Path | None, kind: str) -> Path:
    """Make ``folder`` (None: ``runs/KIND-<time>``) with its ``logs``. Raises ``EnvironmentFault``."""
    folder = folder or Path("runs") / time.strftime(f"{kind}-%Y%m%d-%H%M%S")
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make {folder}: {error.strerror}; choose another with --folder"
        ) from None
    return folder


def remove_empty_run_folder(folder: Path) -> None:
    """Take back the folders of a run that did not begin, as far as nothing is in them."""
    for empty in (folder / "logs", folder, folder.parent):
        try:
            empty.rmdir()
        except OSError:
            return  # something is in it, and so in those above


def require_carrier(name: str) -> None:
    """Raises ``ConfigError`` for a name that no carrier has."""
    if name not in {"auto", "grpc", "libp2p"}:
        raise ConfigError.of_option("--carrier", f"auto, grpc or libp2p (got {name!r})")


def prepare(config: RunConfig, folder: Path, *, is_judged: bool = False) -> tuple[RunConfig, float | None]:
    """(the run with its recipe's digest, the held-out loss before the first step, None if the recipe has
    none). Writes ``run.toml``. A failure or Ctrl-C takes an empty ``folder`` back. Raises ``ConfigError``,
    for a recipe without held-out loss too if the run ``is_judged`` by it."""
    import torch

    from p2p_co2.recipes import load_recipe, recipe_digest

    torch.set_num_threads(1)  # beside busy peers a second thread waits longer than it helps
    try:
        if not config.recipe_digest:
            digest = recipe_digest(config.recipe, config.recipe_options)
            config = config.model_copy(update={"recipe_digest": digest})
        recipe = load_recipe(config.recipe, config.recipe_options, config.seed)
        if is_judged and recipe.held_out is None:
            problem = "the demo judges a run by its held-out loss; give the recipe one"
            raise ConfigError(config.recipe, "held_out", problem)
        (folder / "run.toml").write_text(write_toml(config), encoding="utf-8")
        return config, recipe.held_out(recipe.model) if recipe.held_out else None
    except BaseException:
        remove_empty_run_folder(folder)
        raise


class Stage:
    """The swarm while it runs. ``excused``: peers whose death is no failure of the run."""

    def __init__(self, swarm: LocalSwarm, config: RunConfig, folder: Path, carrier: str) -> None:
        self._swarm, self._config, self._folder, self._carrier = swarm, config, folder, carrier
        self.peers: dict[str, Child] = {}
        self.deaths: dict[str, str] = {}
        """Last words of those that died by themselves."""
        self.excused: set[str] = set()
        self.training_since: float | None = None
        self.caught_up: set[str] = set()
        self.finished: set[str] = set()
        self._tails: dict[str, Tail] = {}
        self._ticket = ""

    @property
    def own_recipe(self) -> str:
        """Where the run's own recipe lies here, "" for the built-in one."""
        return self._config.recipe if self._config.is_own_recipe else ""

    def start_seed(self, place: Sequence[str] = LOOPBACK, wrap: Wrap = list) -> None:
        """Start the seed and wait for its ticket. Raises ``EnvironmentFault``."""
        arguments = ["seed", str(self._folder / "run.toml"), "--folder", str(self._folder / "seed")]
        command = program("bootstrap", *arguments, *_WITH_US, *place)
        seed = self._swarm.start("seed", wrap(command), environment())
        self._ticket = self._swarm.wait_for_line(seed, "ticket:", _SEED_READY_S)

    def start_peer(
        self, name: str, min_peers: int, place: Sequence[str] = LOOPBACK, wrap: Wrap = list
    ) -> None:
        """Start a peer of one thread. ``place``: more of its options."""
        folder = self._folder / "peers" / name
        arguments = [
            self._ticket, "--folder", str(folder), "--name", name, "--threads", "1",
            "--carrier", self._carrier, "--min-peers", str(min_peers), *_WITH_US, *place,
        ]  # fmt: skip
        if self.own_recipe:
            arguments += ["--recipe", self.own_recipe]
        self.adopt(self._swarm.start(name, wrap(program("peers", *arguments)), environment()), folder)

    def adopt(self, child: Child, folder: Path) -> None:
        """Look on at a peer that writes its journal to ``folder``."""
        self.peers[child.name] = child
        self._tails[child.name] = Tail(folder / "events.jsonl")

    def look_on(self, see: See, act: Callable[[], None] = lambda: None) -> None:
        """Show events until the peers have ended, which they are asked to when they are overdue. ``act`` is
        called after each look. Raises ``EnvironmentFault`` if one ends before there is anything to see."""
        clock = self._config.clock
        length_s = clock.rounds * clock.round_s if clock.mode == "time" else float("inf")
        latest_at = time.monotonic() + _START_UP_S + length_s + _LEAVE_S
        asked_at: float | None = None
        while any(child.running() for child in self.peers.values()):
            time.sleep(_LOOK_EVERY_S)
            self.look(see)
            act()
            self._note_deaths()
            if self.training_since is None and not self.finished:
                self._require_all_alive()
            if asked_at is None and time.monotonic() > latest_at:
                asked_at = time.monotonic()
                for child in self.peers.values():
                    self._swarm.interrupt(child)
            elif asked_at is not None and time.monotonic() > asked_at + _LEAVE_S:
                break
        self.look(see)
        self._note_deaths()

    def look(self, see: See) -> None:
        """Show what is new in the journals."""
        events: list[Event] = []
        for name, tail in self._tails.items():
            for event in tail.new_events():
                if isinstance(event, Progress) and event.inner_steps and self.training_since is None:
                    self.training_since = time.monotonic()
                elif isinstance(event, PeerFinished):
                    self.finished.add(name)
                elif isinstance(event, CaughtUp):
                    self.caught_up.add(name)
                events.append(event)
        see(events)

    def collect(self) -> Trained | None:
        """Put the journals together and copy a checkpoint: the trained model, None if no peer finished."""
        from p2p_co2.trained import Trained

        merge_journals([tail.path for tail in self._tails.values()], self._folder / "events.jsonl")
        for name in sorted(self.finished):
            source = self._folder / "peers" / name / "checkpoint"
            if source.is_dir():
                shutil.copytree(source, self._folder / "checkpoint")
                return Trained.load(self._folder / "checkpoint", self.own_recipe)
        return None

    def _note_deaths(self) -> None:
        for child in self._swarm.dead_unasked():
            if child.name not in self.deaths and child.name not in self.excused:
                self.deaths[child.name] = f"{child.name} ended unexpectedly with {child.last_words()}"

    def _require_all_alive(self) -> None:
        """As long as nobody trains, all wait for all."""
        for child in self.peers.values():
            if not child.running():
                raise EnvironmentFault(
                    f"{child.name} ended before the training began, with {child.last_words()}"
                )


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
