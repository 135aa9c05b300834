"""The processes of ``pipeline.py``: a peer of ours, and what it is held against. After each inner step each
prints ``step: {JSON}``, with the time, what was counted so far and the CPU seconds of the process.

    python benchmarks/pipeline_workers.py ours TICKET FOLDER STAGE PEER.json
    python benchmarks/pipeline_workers.py torch RANK FOLDER JOB.json       # Schedule1F1B over gloo
    python benchmarks/pipeline_workers.py server FOLDER JOB.json           # the last stage as an expert
    python benchmarks/pipeline_workers.py client MADDR PEER JOB.json       # stage 0, and RemoteExpert calls
    python benchmarks/pipeline_workers.py alone STAGE JOB.json             # one stage, without a network

JOB.json: recipe, options, stages, microbatches, sequences, seed, steps, and for ``client`` threads.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from p2p_co2.config import PeerConfig
from p2p_co2.recipes import load_recipe, load_run_recipe
from p2p_co2.recipes.stages import Stages
from p2p_co2.telemetry.journal import Journal

Job = dict[str, Any]


def say(**figures: float) -> None:
    """One inner step is over."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    print("step:", json.dumps({"at": time.time(), "cpu_s": cpu_s, **figures}), flush=True)


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def stage_of(job: Job, stage: int) -> tuple[Any, Stages, nn.Module, torch.optim.Optimizer]:
    """(recipe, stages, the module, its optimizer) as a peer of ours has them."""
    torch.set_num_threads(1)
    recipe = load_recipe(job["recipe"], job["options"], job["seed"], job["stages"])
    stages = recipe.in_stages(job["stages"])
    module = stages.build(job["seed"], stage)
    return recipe, stages, module, recipe.optimizer(module.parameters())


def mean_step(optimizer: torch.optim.Optimizer, module: nn.Module, tokens: int) -> None:
    """Gradients of a sum over ``tokens`` become the mean's, and are applied."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(tokens)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def ours(ticket: str, folder: str, stage: str, config: str) -> None:
    """A peer with a stage, until it is interrupted."""
    from p2p_co2.trainer.connection import connect
    from p2p_co2.trainer.stages.peer import StagePeer

    torch.set_num_threads(1)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    settings = {"folder": place, "stage": int(stage), "board": False, "host": "127.0.0.1"}
    settings |= {"carrier": "grpc", "checkpoint_every_s": 1e6}

    def after_step(me: StagePeer) -> None:
        node = me._pipeline.node
        up_bytes, _ = node.traffic_bytes()
        say(
            counted=node.handed.counted, waited_s=node.handed.waited_s, up_bytes=up_bytes,
            peak_bytes=peak_bytes(),
        )  # fmt: skip

    with Journal(place / "events.jsonl") as journal:
        connection = connect(ticket, PeerConfig(**(settings | json.loads(config))), journal.write)
        try:
            run = connection.run
            peer = connection.start_stage(load_run_recipe(run, run.recipe if run.is_own_recipe else ""))
            signal.signal(signal.SIGINT, lambda *_: peer.stop())
            print("ready:", json.dumps({"stage": peer.stage, "at": time.time()}), flush=True)
            peer.train(after_step)
        finally:
            connection.close()


def torch_rank(rank: str, folder: str, job_file: str) -> None:
    """One stage under torch's own schedule."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    job = json.loads(Path(job_file).read_text())
    stage, last = int(rank), job["stages"] - 1
    recipe, stages, module, optimizer = stage_of(job, stage)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=stage, world_size=job["stages"])
    count = job["microbatches"]
    piped = PipelineStage(module, stage, job["stages"], torch.device("cpu"))
    schedule = Schedule1F1B(piped, count, loss_fn=stages.loss, scale_grads=False)
    draws = recipe.batches(job["seed"], count * job["sequences"])
    for step in range(job["steps"]):
        inputs, side = stages.split(next(draws))
        if stage == 0:
            schedule.step(inputs, return_outputs=False)
        elif stage == last:
            losses: list[Tensor] = []
            schedule.step(target=side, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        mean_step(optimizer, module, stages.tokens(side))
        say(counted=(step + 1) * count)
    dist.destroy_process_group()


class WithLoss(nn.Module):
    """The last stage and its loss as one expert: hidden and side to the sum of each sequence, so that no
    logits travel."""

    def __init__(self, module: nn.Module, loss: Any) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, hidden: Tensor, side: Tensor) -> Tensor:
        output = self.module(hidden)
        return torch.stack([self.loss(one[None], of[None]) for one, of in zip(output, side, strict=True)])


class EachSo:
    """An optimizer that steps once for ``count`` calls, as an inner step of ``count`` microbatches does."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, count: int, tokens: int) -> None:
        self.optimizer, self.module, self.count, self.tokens = optimizer, module, count, tokens
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        if self.calls % self.count == 0:
            mean_step(self.optimizer, self.module, self.tokens)

    def zero_grad(self) -> None:
        """``mean_step`` does it."""


def server(folder: str, job_file: str) -> None:
    """hivemind's server of the last stage."""
    import hivemind
    from hivemind.moe.server import ModuleBackend, Server
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    job = json.loads(Path(job_file).read_text())
    recipe, stages, module, optimizer = stage_of(job, job["stages"] - 1)
    inputs, side = stages.split(next(recipe.batches(0, job["sequences"])))
    hidden = BatchTensorDescriptor(*stages.crossing(inputs)[-1], dtype=torch.float32, requires_grad=True)
    each = EachSo(optimizer, module, job["microbatches"], job["microbatches"] * stages.tokens(side))
    backend = ModuleBackend(
        "stage.1", WithLoss(module, stages.loss), optimizer=each,
        args_schema=(hidden, BatchTensorDescriptor.from_tensor(side)),
        outputs_schema=BatchTensorDescriptor(dtype=torch.float32, requires_grad=True),
        max_batch_size=job["sequences"],
    )  # fmt: skip
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, startup_timeout=60)
    running = Server(dht, {"stage.1": backend}, num_connection_handlers=2, start=True)
    print(f"expert: {dht.get_visible_maddrs()[0]} {dht.peer_id}", flush=True)
    with suppress(KeyboardInterrupt):
        signal.pause()
    running.shutdown()


def client(maddr: str, peer: str, job_file: str) -> None:
    """Stage 0, whose microbatches go through the expert, several at a time."""
    import hivemind
    from hivemind.moe.client.expert import create_remote_experts
    from hivemind.moe.expert_uid import ExpertInfo
    from hivemind.p2p import PeerID

    job = json.loads(Path(job_file).read_text())
    recipe, stages, module, optimizer = stage_of(job, 0)
    dht = hivemind.DHT(
        initial_peers=[maddr], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, startup_timeout=60
    )
    expert = create_remote_experts([ExpertInfo("stage.1", PeerID.from_base58(peer))], dht)[0]
    draws, count = recipe.batches(job["seed"], job["sequences"]), job["microbatches"]

    def microbatch(batch: Any) -> int:
        inputs, side = stages.split(batch)
        expert(module(inputs), side).sum().backward()
        return stages.tokens(side)

    with ThreadPoolExecutor(job["threads"]) as threads:
        for step in range(job["steps"]):
            tokens = sum(threads.map(microbatch, [next(draws) for _ in range(count)]))
            mean_step(optimizer, module, tokens)
            say(counted=(step + 1) * count)
        signal.pause()  # until it is killed: hivemind's end is no matter of ours


def alone(stage: str, job_file: str) -> None:
    """One stage trained by itself, on noise, with as many graphs at a time as 1F1B has."""
    job = json.loads(Path(job_file).read_text())
    place = int(stage)
    recipe, stages, module, optimizer = stage_of(job, place)
    draws = recipe.batches(job["seed"], job["sequences"])
    shapes = stages.crossing(stages.split(next(draws))[0])
    for step in range(job["steps"]):
        tokens = 0
        for _ in range(job["microbatches"]):
            inputs, side = stages.split(next(draws))
            if place:
                inputs = torch.randn(job["sequences"], *shapes[place - 1], requires_grad=True)
            output = module(inputs)
            if place == len(stages) - 1:
                stages.loss(output, side).backward()
            else:
                output.backward(torch.randn_like(output))
            tokens += stages.tokens(side)
        mean_step(optimizer, module, tokens)
        say(counted=(step + 1) * job["microbatches"], peak_bytes=peak_bytes())


ROLES = {"ours": ours, "torch": torch_rank, "server": server, "client": client, "alone": alone}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
