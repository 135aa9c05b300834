"""Figures for tools that people use already: TensorBoard and Weights & Biases, each an extra.

    pip install 'p2p-co2[tensorboard]'     p2p-co2 export TICKET --tensorboard FOLDER
    pip install 'p2p-co2[wandb]'           p2p-co2 export TICKET --wandb PROJECT

Law: a sink is a reader: it gets the swarm's facts once every ``EVERY_S`` and can change nothing. The step of
every figure is the swarm's tokens, so runs of any speed lie on one axis. Price: both libraries bring their
own dependencies, which is why neither is installed with p2p-co2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from monitoring.facts import SwarmFacts
from monitoring.history import History
from monitoring.model import Model
from monitoring.peer_state import ONLINE
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
            raise ConfigError(
                "command line", "--wandb", "needs wandb: pip install 'p2p-co2[wandb]'"
            ) from None
        self._run: Any = wandb.init(project=project)

    def write(self, figures: dict[str, float], step: int) -> None:
        self._run.log({**figures, "tokens": step}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(tensorboard: Path | None, wandb: str) -> list[Sink]:
    """The sinks that were asked for. Raises ``ConfigError`` if that is none, or one is not installed."""
    sinks: list[Sink] = []
    if tensorboard is not None:
        sinks.append(TensorBoardSink(tensorboard))
    if wandb:
        sinks.append(WandbSink(wandb))
    if not sinks:
        raise ConfigError("command line", "export", "where to? Give --tensorboard FOLDER or --wandb PROJECT")
    return sinks


def figures_of(facts: SwarmFacts) -> dict[str, float]:
    """What a sink gets: the swarm's figures, and some of each peer's, by name."""
    found: dict[str, float | None] = {
        "swarm/loss_agreed": facts.loss_agreed if facts.peers_online else None,
        "swarm/loss_training": facts.loss_training if facts.peers_online else None,
        "swarm/peers_online": float(facts.peers_online), "swarm/tokens_per_s": facts.tokens_per_s,
        "swarm/utilisation": facts.utilisation if facts.peers_online else None,
        "swarm/up_bytes_per_s": facts.up_bytes_per_s,
        "swarm/rounds_committed": float(facts.rounds_committed),
        "swarm/rounds_alone": float(facts.rounds_alone),
        "swarm/rounds_aborted": float(facts.rounds_aborted), "swarm/staleness_mean": facts.staleness_mean,
        "swarm/sync_delay_steps_mean": facts.sync_delay_steps_mean,
    }  # fmt: skip
    for peer in [peer for peer in facts.peers if peer.state in ONLINE][:MAX_PEERS]:
        name = "peer/" + "".join(
            char if char.isalnum() or char in "-_." else "_" for char in plain(peer.label, 40)
        )
        found[f"{name}/loss"] = peer.loss
        found[f"{name}/tokens_per_s"] = peer.tokens_per_s
        found[f"{name}/utilisation"] = peer.utilisation
        found[f"{name}/exposed_s"] = peer.exposed_s
        found[f"{name}/up_bytes"] = float(peer.up_bytes)
    return {name: value for name, value in found.items() if value is not None}


def export_feed(
    feed: Feed, sinks: Sequence[Sink], seconds: float = 0.0, say: Callable[[str], None] = print
) -> int:
    """Write to ``sinks`` until the run is over, Ctrl-C, or ``seconds`` have passed, a run's past included
    where the feed has it; ``say`` hears when the swarm comes or goes. Returns the exit status; closes feed
    and sinks."""
    model = Model(feed, History(None))

    wrote_any = False

    def write() -> None:
        nonlocal wrote_any
        facts = model.facts()
        for sink in sinks if facts.peers_known else ():
            sink.write(figures_of(facts), facts.tokens)
            wrote_any = True

    model.retold = write
    stop = StopSignals(lambda: None)
    ends_at = time.monotonic() + seconds if seconds else float("inf")
    told = ""
    try:
        with stop:
            while not stop.asked and time.monotonic() < ends_at:
                model.feed.watched(time.monotonic())
                model.step(time.time())
                model.keep(time.time())
                facts = model.facts()
                if facts.connection != told:
                    told = facts.connection
                    say(f"{told}: {plain(facts.connection_words, 300)}")
                write()
                if facts.connection == "ended":
                    break
                time.sleep(EVERY_S if not stop.asked else 0.0)
    finally:
        feed.close()
        model.history.close()
        for sink in sinks:
            sink.close()
    if not wrote_any:
        say("nothing was written: there were no figures")
    return 0
