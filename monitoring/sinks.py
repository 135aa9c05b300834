"""Figures for tools that people use already: TensorBoard and Weights & Biases, each an extra.

    pip install 'p2p-co2[tensorboard]'     p2p-co2 export TICKET --tensorboard FOLDER
    pip install 'p2p-co2[wandb]'           p2p-co2 export TICKET --wandb PROJECT

Law: a sink is a reader: it gets the swarm's facts once every ``EVERY_S`` and can change nothing. The step of
every figure is the swarm's tokens, so runs of any speed lie on one axis. Price: both libraries bring their
own dependencies, which is why neither is installed with p2p-co2.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from monitoring.facts import ONLINE, SwarmFacts
from monitoring.model import Model
from monitoring.words import plain
from p2p_co2.errors import ConfigError
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry.feed import Feed

EVERY_S = 2.0
MAX_PEERS = 64
"""Peers that get lines of their own."""


class Sink(Protocol):
    """Takes figures by name at a step; ``close`` writes out the last ones."""

    def write(self, figures: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in ``folder``, made with the first figures. Raises ``ConfigError`` if tensorboardX is not
    installed."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise ConfigError(
                "command line", "--tensorboard", "needs tensorboardX: pip install 'p2p-co2[tensorboard]'"
            ) from None
        self._make: Callable[[], Any] = lambda: tensorboardX.SummaryWriter(logdir=str(folder))
        self._writer: Any = None

    def write(self, figures: dict[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._make()
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """A run of ``project``, online or offline as wandb's own settings (``WANDB_MODE``) say. Raises
    ``ConfigError`` if wandb is not installed."""

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError:
            words = "needs wandb: pip install 'p2p-co2[wandb]'"
            raise ConfigError("command line", "--wandb", words) from None
        self._run: Any = wandb.init(project=project)

    def write(self, figures: dict[str, float], step: int) -> None:
        self._run.log({**figures, "tokens": step}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(tensorboard: Path | None, wandb: str) -> list[Sink]:
    """The sinks that were asked for. Raises ``ConfigError`` if that is none, or one is not installed."""
    if tensorboard is None and not wandb:
        raise ConfigError("command line", "export", "where to? Give --tensorboard FOLDER or --wandb PROJECT")
    sinks: list[Sink] = [TensorBoardSink(tensorboard)] if tensorboard is not None else []
    return sinks + ([WandbSink(wandb)] if wandb else [])


def figures_of(facts: SwarmFacts) -> dict[str, float]:
    """What a sink gets: the swarm's figures, and some of each peer's, by name."""
    online = [peer for peer in facts.peers if peer.state in ONLINE][:MAX_PEERS]
    names = ("peers_online", "tokens_per_s", "up_bytes_per_s", "rounds_committed", "rounds_alone",
             "rounds_aborted", "staleness_mean", "sync_delay_steps_mean")  # fmt: skip
    found = {f"swarm/{name}": getattr(facts, name) for name in names}
    if facts.peers_online:
        of_peers = ("loss_agreed", "loss_training", "utilisation")
        found |= {f"swarm/{name}": getattr(facts, name) for name in of_peers}
    for peer in online:
        label = re.sub(r"[^\w.-]", "_", plain(peer.label, 40))
        for name in ("loss", "tokens_per_s", "utilisation", "exposed_s", "up_bytes"):
            found[f"peer/{label}/{name}"] = getattr(peer, name)
    return {name: float(value) for name, value in found.items() if value is not None}


def export_feed(
    feed: Feed, sinks: Sequence[Sink], seconds: float = 0.0, say: Callable[[str], None] = print
) -> int:
    """Write to ``sinks`` until the run is over, Ctrl-C, or ``seconds`` have passed, a run's past included
    where the feed has it; ``say`` hears when the swarm comes or goes. Returns the exit status; closes feed
    and sinks."""
    model, stop = Model(feed), StopSignals(lambda: None)
    ends_at = time.monotonic() + seconds if seconds else float("inf")
    told, wrote_any = "", False
    try:
        with stop:
            while not stop.asked and time.monotonic() < ends_at and told != "ended":
                feed.watched(time.monotonic())
                for _ in model.moments(time.time()):
                    facts = model.facts()
                    for sink in sinks if facts.peers_known else ():
                        sink.write(figures_of(facts), facts.tokens)
                        wrote_any = True
                if feed.state.phase != told:
                    told = feed.state.phase
                    say(f"{told}: {plain(feed.state.words, 300)}")
                time.sleep(EVERY_S if not stop.asked and told != "ended" else 0.0)
    finally:
        feed.close()
        for sink in sinks:
            sink.close()
    if not wrote_any:
        say("nothing was written: there were no figures")
    return 0
