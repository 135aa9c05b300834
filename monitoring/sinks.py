"""Figures for tools that people use already: TensorBoard and Weights & Biases, each an extra.

    pip install '.[tensorboard]'     p2p-co2 metrics TICKET --tensorboard FOLDER
    pip install '.[wandb]'           p2p-co2 metrics TICKET --wandb PROJECT

Law: a sink is a reader: it gets the swarm's facts as often as a history has samples, and can change nothing.
The step of every figure is the swarm's tokens, so runs of any speed lie on one axis.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from monitoring.facts import ONLINE, SwarmFacts
from monitoring.history import TIERS
from monitoring.model import follow
from monitoring.words import plain
from p2p_co2.errors import ConfigError
from p2p_co2.system.extras import require
from p2p_co2.telemetry.feed import Feed

MAX_PEERS = 64
"""Peers that get lines of their own."""


class TensorBoardSink:
    """Event files in ``folder``, made with the first figures."""

    def __init__(self, folder: Path) -> None:
        self._make = partial(_library("tensorboardX", "tensorboard").SummaryWriter, logdir=str(folder))
        self._writer: Any = None

    def write(self, figures: dict[str, float], step: int) -> None:
        self._writer = self._writer or self._make()
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """A run of ``project``, online or offline as wandb's own settings (``WANDB_MODE``) say."""

    def __init__(self, project: str) -> None:
        self._run = _library("wandb", "wandb").init(project=project)

    def write(self, figures: dict[str, float], step: int) -> None:
        self._run.log({**figures, "tokens": step}, step=step)

    def close(self) -> None:
        self._run.finish()


Sink = TensorBoardSink | WandbSink


def _library(name: str, extra: str) -> Any:  # a library without types
    require(extra, f"--{extra}")
    return importlib.import_module(name)


def open_sinks(tensorboard: Path | None, wandb: str) -> list[Sink]:
    """The sinks that were asked for. Raises ``ConfigError`` if that is none, or one is not installed."""
    if tensorboard is None and not wandb:
        raise ConfigError("command line", "metrics", "where to? Give --tensorboard FOLDER or --wandb PROJECT")
    made: list[Sink] = [TensorBoardSink(tensorboard)] if tensorboard is not None else []
    return [*made, WandbSink(wandb)] if wandb else made


def figures_of(facts: SwarmFacts) -> dict[str, float]:
    """What a sink gets: the swarm's figures, and some of each stage's and peer's, by name."""
    names = ["peers_online", "tokens_per_s", "up_bytes_per_s", "rounds_committed", "rounds_alone",
             "rounds_aborted", "staleness_mean", "sync_delay_steps_mean"]  # fmt: skip
    names += ["loss_agreed", "loss_training", "utilisation"] if facts.peers_online else []
    found = {f"swarm/{name}": getattr(facts, name) for name in names}
    if facts.peers_online:
        found |= {f"swarm/agreed/{name}": value for name, value in facts.figures_agreed.items()}
    for stage in facts.stages:
        for name in ("replicas", "tokens_per_s", "waiting", "waiting_share", "dropped", "utilisation",
                     "forward_bytes_per_s", "back_bytes_per_s"):  # fmt: skip
            found[f"stage/{stage.stage}/{name}"] = getattr(stage, name)
    for peer in [peer for peer in facts.peers if peer.state in ONLINE][:MAX_PEERS]:
        label = re.sub(r"[^\w.-]", "_", plain(peer.label, 40))
        for name in ("loss", "tokens_per_s", "utilisation", "exposed_s", "up_bytes"):
            found[f"peer/{label}/{name}"] = getattr(peer, name)
    return {name: float(value) for name, value in found.items() if value is not None}


def export_feed(
    feed: Feed, sinks: Sequence[Sink], seconds: float = 0.0, say: Callable[[str], None] = print
) -> int:
    """Write to ``sinks`` until the run is over, Ctrl-C, or ``seconds`` have passed; a past that the feed has,
    too. ``say`` hears when the swarm comes or goes. Returns the exit status; closes feed and sinks. Raises
    ``TransportError`` if the run was never reached."""
    told = ""
    wrote_any = False
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        for model, moments in stack.enter_context(contextlib.closing(follow(feed, TIERS[0][0], seconds))):
            for _ in moments:
                facts = model.facts()
                for sink in sinks if facts.peers_known else ():
                    sink.write(figures_of(facts), facts.tokens)
                    wrote_any = True
            if feed.state.phase != told:
                told = feed.state.phase
                say(f"{told}: {plain(feed.state.words, 300)}")
            if told == "ended":
                break
    model.require_reached()
    if not wrote_any:
        say("nothing was written: there were no figures")
    return 0
