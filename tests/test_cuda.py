"""What is different where training runs on a GPU: the same bits as on the host in snapshots, merges and
checkpoints; a whole swarm of which one peer trains on the GPU and one on the CPU.

Skipped where torch sees no CUDA device; everything else of the suite runs on the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.telemetry.events import PeerFinished, PeerStarted, Progress, RoundCommitted
from p2p_co2.tensors.checkpoint.folder import load, save
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.outer import Merge
from peers.doctor.findings import Grade
from peers.doctor.machine import check_device
from tests.campaign import Campaign
from tests.test_checkpoint import adamw, checkpoint_of, module, train
from tests.test_codec import gaussians
from tests.test_fragments import Odd
from tests.test_swarm import LEAVE_S, START_S, contributors, opened, run_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

DEVICES = {"gpu": "cuda", "host": "cpu"}


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with opened(tmp_path) as swarm:
        yield swarm


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    assert ours.dtype == theirs.dtype
    as_int = torch.uint8 if ours.dtype == torch.uint8 else torch.int32
    return torch.equal(ours.cpu().view(as_int), theirs.cpu().view(as_int))


# ---- live parameters and checkpoints


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.0])
def test_snapshots_and_merges_have_the_bits_of_the_host(keep: float) -> None:
    here = Odd()
    there = Odd()
    there.load_state_dict(here.state_dict())
    there.cuda()
    assert not there.transposed.is_contiguous()
    plan = plan_fragments(here, 3)
    host, gpu = LiveParameters(here, plan), LiveParameters(there, plan)
    for index, fragment in enumerate(plan.fragments):
        merge = Merge(keep, gaussians(fragment.numel, seed=index))
        for live in (host, gpu):
            live.merge_(index, merge)
        taken = gpu.snapshot(index)
        assert taken.device.type == "cpu"
        assert same_bits(taken, host.snapshot(index))
        gpu.load_(index, merge.addend)
        host.load_(index, merge.addend)
    assert all(
        torch.equal(one, other.cpu())
        for one, other in zip(here.parameters(), there.parameters(), strict=True)
    )


def test_the_time_of_queued_steps_is_told_apart_from_the_copy() -> None:
    model = nn.Linear(4096, 4096, bias=False).cuda()
    live = LiveParameters(model, plan_fragments(model, 1))
    merge = Merge(1.0, torch.zeros(4096 * 4096))
    live.snapshot(0)
    torch.randn(8192, 8192, device="cuda").square_().mm(torch.ones(8192, 8192, device="cuda"))
    torch.cuda.synchronize()  # what only the first product costs is over
    live.take_computing_s()

    def queue(copies: Callable[[], object]) -> float:
        """Seconds that it takes, by the device's clock."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        many = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):
            many = many @ many * 1e-2
        ended.record()
        copies()
        return began.elapsed_time(ended) / 1e3

    for copies in (lambda: live.snapshot(0), lambda: live.merge_(0, merge)):
        computed_s = queue(copies)
        assert live.take_computing_s() >= 0.5 * computed_s
        assert live.take_computing_s() == 0.0


def test_a_snapshot_is_there_when_it_is_returned() -> None:
    """Training goes on at once; what is copied is what was there, work that is still queued included."""
    model = nn.Linear(4096, 4096, bias=False).cuda()
    live = LiveParameters(model, plan_fragments(model, 1))
    with torch.no_grad():
        for turn in range(50):
            model.weight.fill_(float(turn))
            taken = live.snapshot(0)
            model.weight.fill_(-1.0)
            assert bool((taken == turn).all())


def test_a_checkpoint_of_a_gpu_is_that_of_the_host(tmp_path: Path) -> None:
    model = module()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(3))
    save(tmp_path / "host", checkpoint_of(model, optimizer, 3))
    there = module().cuda()
    there.load_state_dict(model.state_dict())
    moved = adamw(there.parameters())
    moved.load_state_dict(optimizer.state_dict())
    save(tmp_path / "gpu", checkpoint_of(there, moved, 3))
    one, other = load(tmp_path / "host"), load(tmp_path / "gpu")
    for name, values in one.buffers.items():
        assert torch.equal(values, other.buffers[name]), name
    assert repr(one.optimizer) == repr(other.optimizer)


# ---- whole peers


def test_doctor_names_the_gpu() -> None:
    finding = check_device("cuda")
    assert finding.state in {Grade.OK, Grade.LIMITED}
    assert torch.cuda.get_device_name() in finding.measured
    assert check_device(f"cuda:{torch.cuda.device_count()}").state is Grade.CANNOT


def test_a_peer_on_a_gpu_and_one_on_a_cpu_agree(swarm: Campaign) -> None:
    swarm.start_seed(run_of(rounds=6))
    peers = [
        swarm.join(name, "--min-peers", "2", "--device", device, recipe="")
        for name, device in DEVICES.items()
    ]
    assert swarm.wait(peers, START_S), swarm.tails()
    assert [peer.exit_status() for peer in peers] == [0, 0], swarm.tails()
    ends = [swarm.events(name, PeerFinished)[-1] for name in DEVICES]
    assert len({end.digest for end in ends}) == 1, ends
    assert min(ends[0].versions) >= 2
    for name in DEVICES:
        losses = [event.loss for event in swarm.events(name, Progress) if event.loss == event.loss]
        assert losses[-1] < losses[0]
        assert max(event.contributors for event in swarm.events(name, RoundCommitted)) == 2


def test_a_peer_on_a_gpu_leaves_and_goes_on_from_its_checkpoint(swarm: Campaign) -> None:
    swarm.start_seed(run_of(rounds=0))
    gpu, _ = (
        swarm.join(name, "--min-peers", "2", "--device", device, recipe="")
        for name, device in DEVICES.items()
    )
    swarm.wait_until("a round of both", lambda: contributors(swarm, "gpu") == 2)
    swarm.interrupt(gpu)
    assert swarm.wait([gpu], LEAVE_S), gpu.last_lines()
    assert gpu.exit_status() == 0, gpu.last_lines()
    left, steps = swarm.events("gpu", PeerFinished)[-1], swarm.events("gpu", Progress)[-1].inner_steps
    swarm.join("gpu", "--resume", "--min-peers", "2", "--device", "cuda", recipe="")
    swarm.wait_until("a step", lambda: swarm.events("gpu", Progress)[-1].inner_steps > steps)
    assert swarm.events("gpu", PeerStarted)[-1].inner_steps >= steps
    swarm.wait_until("a round of both", lambda: contributors(swarm, "gpu", left.at) == 2)
