"""Several processes, one peer: a model in FSDP2 shards under torchrun, one process to a GPU (or to a core).

    p2p-co2 seed examples/own_loop.toml            # prints a ticket
    export P2P_CO2_TICKET=p2pco2-...
    torchrun --nproc-per-node=2 examples/torchrun_fsdp.py [OUT]

Rank 0 speaks to the swarm, the others follow. Another peer of the same run may be one process: leave torchrun
out. With DDP in the place of ``fully_shard`` nothing else changes. OUT: a folder for the agreed model.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import p2p_co2 as co2


def main(out: str = "") -> None:
    torch.set_num_threads(1)  # several peers may share this machine
    torch.manual_seed(0)  # all peers start from the same parameters
    model = nn.Sequential(
        nn.Linear(16, 64), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1)
    )
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if dist.is_torchelastic_launched():
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
        for block in model[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after the model is sharded

    inputs = torch.randn(4096, 16, device=device)
    loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=32)
    with co2.join(model, optimizer) as swarm:
        for x, y in swarm.until_done(loader):  # each rank's own order
            loss = (model(x) - y).square().mean()
            loss.backward()
            swarm.step(loss, tokens=len(x))
        if out:
            swarm.save_pretrained(out)  # rank 0 writes
        print(f"{swarm.inner_steps} inner steps, loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
