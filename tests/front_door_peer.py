"""A training program as users of ``co2.join`` and ``co2.Optimizer`` write theirs, for ``co2.local_swarm``.

Peer 0 is a loop of ``join``, peer 1 has the drop-in and a compiled model, the data of peer 2 stalls. The
model ties its head to its embedding and is frozen in part.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import p2p_co2 as co2
from p2p_co2.telemetry.events import Event, Progress

PEER = int(os.environ["P2P_CO2_PEER"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(words))
        return cast(Tensor, self.head(self.norm(hidden.flatten(0, 1)).view(hidden.shape)))


WORDS = torch.arange(64 * 8).view(64, 8) % 13


def loss_of(model: Any, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def held_out(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, WORDS))


def measure(model: nn.Module) -> dict[str, float]:
    """A loss, and what a board draws beside it."""
    with torch.no_grad():
        right = model(WORDS[:, :-1]).argmax(-1) == WORDS[:, 1:]
    return {"loss": held_out(model), "accuracy": float(right.float().mean())}


def by_join(plain: Tied, model: Any, events: list[Event]) -> tuple[co2.Swarm, list[int]]:
    inner = [
        torch.optim.AdamW([plain.embed.weight], 1e-2), torch.optim.SGD(plain.norm.parameters(), 1e-2),
    ]  # fmt: skip
    met = list[int]()
    loader = DataLoader(TensorDataset(WORDS), batch_size=8, shuffle=True)
    with co2.join(
        model, inner, evaluate=measure, min_peers=3, on_event=events.append, upload="5Mbit",
        max_grad_norm=1.0, lr_schedule=lambda position: min(1.0, 0.5 + position),
    ) as swarm:  # fmt: skip
        for (batch,) in swarm.until_done(loader):
            before = swarm.inner_steps
            for number, half in enumerate(batch.chunk(2)):
                loss = loss_of(model, half)
                (loss / 2).backward()
                swarm.step(loss, tokens=half.numel(), update=number == 1)
                met.append(swarm.inner_steps - before)
            time.sleep(0.005)  # a stand-in for the work of a larger model
        swarm.save_pretrained("out")
    return swarm, met


def by_optimizer(plain: Tied, model: Any, events: list[Event]) -> tuple[co2.Swarm, list[int]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = co2.Optimizer(
        torch.optim.AdamW(plain.parameters(), 1e-2), model, min_peers=3, on_event=events.append
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    steps = 0
    for (batch,) in optimizer.swarm.until_done(DataLoader(TensorDataset(WORDS), batch_size=8)):
        steps += 1
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        scaler.scale(loss * (float("inf") if steps == 3 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(0.005)
    progress = next(event for event in reversed(events) if isinstance(event, Progress))
    made = int(optimizer.state[plain.embed.weight]["step"])
    return optimizer.swarm, [steps, made, progress.inner_steps, progress.tokens]


class Stalls(IterableDataset[Tensor]):
    """A stream whose source is gone after some examples: it waits for ever."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from WORDS[:40]
        threading.Event().wait()


def by_stalled_stream(plain: Tied, model: Any, events: list[Event]) -> tuple[co2.Swarm, list[int]]:
    """It ends with the run all the same."""
    loader = DataLoader(Stalls(), batch_size=8)
    steps = 0
    optimizer = torch.optim.SGD(plain.parameters(), 1e-2)
    with co2.join(model, optimizer, min_peers=3, on_event=events.append) as swarm:
        for batch in swarm.until_done(loader):
            loss = loss_of(model, batch)
            loss.backward()
            swarm.step(loss, tokens=batch.numel())
            steps += 1
            time.sleep(0.005)
    return swarm, [steps]


KINDS = by_join, by_optimizer, by_stalled_stream


def main() -> None:
    torch.set_num_threads(1)
    events, plain = list[Event](), Tied()
    model = torch.compile(plain, backend="eager") if PEER == 1 else plain
    swarm, met = KINDS[PEER](plain, model, events)
    with swarm.agreed() as same:
        agreed = held_out(same)
    state = swarm.state_dict()
    shared = [name for name in sorted(state) if "running" not in name and "tracked" not in name]
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in shared))
    told = {
        "agreed": agreed,
        "steps": swarm.inner_steps,
        "met": met,
        "names": sorted(state),
        "digest": digest.hexdigest(),
        "kinds": sorted({type(event).__name__ for event in events}),
    }
    print("told:", json.dumps(told))


if __name__ == "__main__":
    main()
