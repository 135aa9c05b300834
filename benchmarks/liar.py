"""What a peer that lies about its work costs the others: real processes, with and without the defence.

Peers train the built-in recipe by inner steps (``clock.mode`` "steps"): the loss at a round depends on the
machine only where a peer comes too late for a mean. The liar trains too, claims ``--boast`` times its tokens
and adds normal noise of ``--noise`` to its parameters, after each inner step or once a round.
Reported per case: held-out loss of the agreed parameters after ``--rounds``, the peers that a mean held, and
how often each peer was told of as capped. JSON.

    python benchmarks/liar.py [--rounds 20] [--cases four three liar undefended]

Price: one run of each case says little of a per cent: ``--repeat`` gives other batches to all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from p2p_co2.config import ClockConfig, PeerConfig, RunConfig
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.telemetry.events import ContributionCapped, RoundCommitted
from p2p_co2.telemetry.journal import Journal
from p2p_co2.trained import Trained
from p2p_co2.trainer import connect
from tests.swarms import ROOT, Swarm

CASES = {
    "four": (4, 0, True),
    "three": (3, 0, True),
    "liar": (3, 1, True),
    "four undefended": (4, 0, False),
    "undefended": (3, 1, False),
}
"""(honest peers, liars, whether the run file has the defence)"""
END_BOUND_S = 3600.0
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30, help="inner steps in a round")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case, each on other batches")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--noise-each", choices=("step", "round"), default="step")
    parser.add_argument("--boast", type=float, default=1e6)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        ticket, folder, peers, number, lies = options.worker
        _work(ticket, Path(folder), int(peers), int(number), options if int(lies) else None)
        return
    cases = {}
    for name in options.cases:
        cases[name] = [_measure(options, *CASES[name], repeat) for repeat in range(options.repeat)]
        print(name, json.dumps(cases[name]), file=sys.stderr)
    job = {key: getattr(options, key) for key in ("rounds", "steps", "noise", "noise_each", "boast")}
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, **cases}, indent=2))


def _measure(options: argparse.Namespace, honest: int, liars: int, is_defended: bool, repeat: int) -> Figures:
    run = RunConfig(
        name="liar",
        recipe="byte-gpt",
        recipe_digest=recipe_digest("byte-gpt", {}),
        clock=ClockConfig(mode="steps", inner_steps_per_round=options.steps, rounds=options.rounds),
        **({} if is_defended else {"weight_cap": 0.0}),
    )
    names = [f"peer{number}" for number in range(honest + liars)]
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), run)
        try:
            for number, name in enumerate(names):
                lies = ["--noise", str(options.noise), "--noise-each", options.noise_each]
                lies += ["--boast", str(options.boast), "--steps", str(options.steps)]
                worker = [swarm.ticket, str(Path(folder) / name), str(len(names))]
                worker += [str(number + 100 * repeat), str(int(number >= honest))]
                script = str(ROOT / "benchmarks" / "liar.py")
                swarm.start(name, [sys.executable, script, *lies, "--worker", *worker])
            swarm.wait(*names, bound_s=END_BOUND_S)
            loss = Trained.load(Path(folder) / names[0] / "checkpoint").held_out_loss()
            events = {name: swarm.events(name) for name in names}
        finally:
            swarm.close()
    committed = [event for event in events[names[0]] if isinstance(event, RoundCommitted)]
    capped = Counter(event.other[-6:] for event in events[names[0]] if isinstance(event, ContributionCapped))
    return {
        "held_out_loss": round(loss, 4),
        "means": len(committed),
        "in_a_mean": round(statistics.mean(event.contributors for event in committed), 3),
        "told_of_as_capped": dict(capped),
    }


def _work(ticket: str, folder: Path, peers: int, number: int, lies: argparse.Namespace | None) -> None:
    """One peer: the recipe's loop through the library's front door. ``lies``: how, if it does."""
    torch.set_num_threads(1)
    recipe = load_recipe("byte-gpt", {}, seed=0)
    model, optimizer = recipe.model, recipe.optimizer(recipe.model.parameters())
    config = PeerConfig(folder=folder, min_peers=peers, carrier="grpc", checkpoint_every_s=1e6, board=False)
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator().manual_seed(number)
    with Journal(folder / "events.jsonl") as journal:
        peer = connect(ticket, config, journal.write).start(
            model, optimizer, learning_rate=recipe.learning_rate
        )
        signal.signal(signal.SIGINT, lambda *_: peer.stop())
        with peer:
            for batch in recipe.batches(1000 + number, recipe.default_batch):
                loss = recipe.loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                tokens = float(recipe.tokens(batch))
                if lies is not None:
                    tokens *= lies.boast
                    if lies.noise_each == "step" or (peer.inner_steps + 1) % lies.steps == 0:
                        with torch.no_grad():
                            for values in model.parameters():
                                values.add_(lies.noise * torch.randn(values.shape, generator=noise))
                if not peer.step(tokens=int(tokens), loss=loss.detach()):
                    break


if __name__ == "__main__":
    main()
