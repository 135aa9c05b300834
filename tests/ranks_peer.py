"""A test's peer of one process or of several ranks, which trains a small model on batches that depend on the
step alone: what one process has as one batch, ranks share out.

    python tests/ranks_peer.py TICKET FOLDER OPTIONS_AS_JSON            # or under torchrun

Writes what is agreed after the run to FOLDER/agreed.safetensors. With the option ``ranks`` it forks so many,
for torch to be imported once; with ``apart`` each writes to FOLDER/../rank-N.log, and their exit statuses are
printed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import p2p_co2
from p2p_co2.system.process import end_with_parent

WIDTH, BATCH = 10, 8


class Model(nn.Module):
    """Odd numbers of rows, a tied head, a frozen base, running statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(5, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH)) for _ in range(3)
        )
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(5, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.base(self.embed(inputs))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden @ self.embed.weight


def batch(seed: int, step: int, rank: int, ranks: int) -> Tensor:
    draw = torch.Generator().manual_seed(1_000_000 * seed + step)
    return torch.randn(BATCH, 5, generator=draw)[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]


def wrapped(model: Model, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        for block in model.blocks[:2]:
            fully_shard(block)
        fully_shard(model)
    return model


def values(model: nn.Module) -> list[Tensor]:
    """What of the parameters lies here."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    return [one.detach().clone() for one in local]


def look_at_agreed(peer: p2p_co2.Peer, model: nn.Module, inputs: Tensor) -> None:
    """Have the agreed parameters in place for an evaluation, and tell how it was."""
    before = values(model)
    with peer.agreed() as there, torch.no_grad():
        is_other = not all(map(torch.equal, values(model), before))
        there(inputs)
    is_back = all(map(torch.equal, values(model), before))
    how_it_was = f"{'other than live, ' * is_other}{'and back' * is_back}"
    sys.stdout.write(f"agreed in place: {how_it_was}\n")  # in one piece: ranks share the file


def fork_ranks(count: int, logs: Path | None) -> None:
    """Return in each of ``count`` forked ranks; this process waits for them, and ends with the worst status,
    or with 0 where ``logs`` is the folder of what each writes."""
    parent = os.getpid()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + parent % 20000)}
    children = []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(place, WORLD_SIZE=str(count), RANK=str(rank))
        end_with_parent(parent)
        if logs is not None:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT), stream.fileno())
        return
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if logs is not None:
        print(json.dumps(statuses))
    sys.exit(0 if logs is not None else max(map(abs, statuses)))


def main() -> None:
    ticket, folder, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    options: dict[str, Any] = {
        "how": "plain",
        "steps": 10**6,
        "step_s": 0.0,
        "min_peers": 1,
        "ranks": 1,
        **given,
    }
    torch.set_num_threads(1)
    if options["ranks"] > 1 and not options.get("torchrun"):
        fork_ranks(options["ranks"], folder.parent if options.get("apart") else None)
    if options["how"] != "plain":
        dist.init_process_group("gloo")
    if "bound_s" in options:  # of a group's making
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=options["bound_s"])
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = wrapped(Model(options.get("model", [0, 0])[rank] if ranks == 2 else 0), options["how"])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    if options.get("die") == [rank, "join"]:
        os._exit(9)
    config = p2p_co2.PeerConfig(
        folder=folder, board=False, min_peers=options["min_peers"], checkpoint_every_s=1.0
    )
    with p2p_co2.join(ticket, model, optimizer, config) as peer:
        print(f"rank {rank} starts at {peer.inner_steps} of round {peer.position:.2f}", flush=True)
        for _ in range(options["steps"]):
            inputs = batch(options.get("seed", 1), peer.inner_steps, rank, ranks)
            is_last = options.get("die") == [rank, peer.inner_steps]
            if is_last and options["where"] == "backward":
                os._exit(9)
            loss = (model(inputs) - inputs.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(options["step_s"])
            if is_last and options["where"] == "step":
                os._exit(9)
            if is_last and options["where"] == "save":
                peer.save()
            if not peer.step(tokens=len(inputs), loss=loss):
                break
            if peer.inner_steps == options.get("measure"):
                look_at_agreed(peer, model, inputs)
    if agreed := peer.agreed_parameters():
        save_file({name: one.clone() for name, one in agreed.items()}, folder / "agreed.safetensors")
    print(f"rank {rank} ends after {peer.inner_steps} loss {loss.item():.5f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
