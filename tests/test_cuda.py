"""What is different where training runs on a GPU: the same bits as on the host in codecs, snapshots, merges
and checkpoints; a whole swarm of which one peer trains on the GPU and one on the CPU.

Skipped where torch sees no CUDA device; everything else of the suite runs on the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.codec_specs import SPECS
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.telemetry.events import PeerFinished, PeerStarted, Progress, RoundCommitted
from p2p_co2.tensors.checkpoint import load, save
from p2p_co2.tensors.codec import Codec, encode_with_residual, get_codec, relative_error
from p2p_co2.tensors.codec.base import SCALE_BYTES
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.outer import Merge
from peers.doctor.findings import State
from peers.doctor.machine import check_device
from tests.codec_blocks import gaussians, hostile
from tests.test_checkpoint import adamw, checkpoint_of, module, train
from tests.test_codec_passes import values_of_all_sizes
from tests.test_fragments import Odd
from tests.test_swarm import LEAVE_S, Swarm, assert_agreed, opened, run_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

NAMES: tuple[str, ...] = tuple(SPECS)
OF_BITSANDBYTES: tuple[str, ...] = ("fp4", "nf4")
"""Whose encoder on a GPU is bitsandbytes' kernel: of two codes equally near it may take the other."""
DEVICES = {"gpu": "cuda", "host": "cpu"}
PLAIN: tuple[str, ...] = ("fp32", "fp16", "bf16")
SIZES = (1, 127, 128, 129, 2049 * 128 + 5)


@pytest.fixture(params=NAMES)
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with opened(tmp_path) as swarm:
        yield swarm


def wide(numel: int) -> Tensor:
    """Gaussians whose blocks differ by many powers of two."""
    return (
        gaussians(numel) * torch.exp(4.0 * gaussians(numel // 128 + 1, seed=1)).repeat_interleave(128)[:numel]
    )


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    assert ours.dtype == theirs.dtype
    as_int = torch.uint8 if ours.dtype == torch.uint8 else torch.int32
    return torch.equal(ours.cpu().view(as_int), theirs.cpu().view(as_int))


# ---- codecs


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_BITSANDBYTES])
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_encodes_to_the_bits_of_the_host(name: str, size: int) -> None:
    codec = get_codec(name)
    for values in (gaussians(size), wide(size), values_of_all_sizes(size)):
        assert same_bits(codec.encode(values.cuda()), codec.encode(values))


@pytest.mark.parametrize("name", OF_BITSANDBYTES)
def test_bitsandbytes_kernels_take_the_code_of_the_host_or_its_neighbour(name: str) -> None:
    codec = get_codec(name)
    values = wide((1 << 20) + 77)
    here, there = (codec.decode(codec.encode(one).cpu()) for one in (values, values.cuda()))
    differ = float((here != there).float().mean())
    assert differ < 2e-3, f"{differ:.2%} of the values differ"
    errors = [relative_error(values, decoded) for decoded in (here, there)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_decodes_to_the_bits_of_the_host(codec: Codec, size: int) -> None:
    for values in (gaussians(size), wide(size), values_of_all_sizes(size)):
        payload = codec.encode(values)
        assert same_bits(codec.decode(payload.cuda()), codec.decode(payload))


def test_any_bytes_that_pass_the_check_decode_alike(codec: Codec) -> None:
    rows = codec.encode(wide(2048 * 128)).view(2048, codec.block_bytes)
    last = codec.block_bytes if codec.name in PLAIN else -SCALE_BYTES  # the scales stay
    generator = torch.Generator().manual_seed(3)
    rows[:, :last] = torch.randint(0, 256, rows[:, :last].shape, generator=generator).to(torch.uint8)
    good = [row for row in rows if passes_check(codec, row)]
    payload = torch.cat(good)
    codec.check(payload.cuda())
    assert same_bits(codec.decode(payload.cuda()), codec.decode(payload))
    bad = [row for row in rows[:64] if not passes_check(codec, row)]
    assert len(bad) > 0 or codec.name not in PLAIN
    assert not any(passes_check(codec, row.cuda()) for row in bad)


def passes_check(codec: Codec, row: Tensor) -> bool:
    try:
        codec.check(row.contiguous())
    except RemoteProtocolError:
        return False
    return True


def test_hostile_scales_and_values_that_are_not_finite_are_refused_there_too(codec: Codec) -> None:
    with pytest.raises(ValueError, match="diverged"):
        codec.encode(torch.tensor([1.0, float("nan")]).cuda())
    with pytest.raises(RemoteProtocolError, match="not finite"):
        codec.check(hostile(codec, b"\xff\xff\xff\x7f").cuda())


def test_what_error_feedback_carries_on_is_the_same() -> None:
    codec, values = get_codec("int4"), wide(1000)
    _, residual = encode_with_residual(codec, values, None, 0.95)
    here = encode_with_residual(codec, values, residual, 0.95)
    there = encode_with_residual(codec, values.cuda(), residual.cuda(), 0.95)
    assert all(same_bits(one, other) for one, other in zip(here, there, strict=True))


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


def test_a_model_that_lies_on_two_devices() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])
    model[1].cuda()
    live = LiveParameters(model, plan_fragments(model, 1))
    assert torch.equal(live.snapshot(0), expected)
    live.merge_(0, Merge(1.0, torch.ones(len(expected))))
    assert torch.equal(live.snapshot(0), expected + 1.0)


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
    assert finding.state in {State.OK, State.LIMITED}
    assert torch.cuda.get_device_name() in finding.measured
    assert check_device(f"cuda:{torch.cuda.device_count()}").state is State.CANNOT


def test_a_peer_on_a_gpu_and_one_on_a_cpu_agree(swarm: Swarm) -> None:
    swarm.publish(run_of(rounds=6))
    for name, device in DEVICES.items():
        swarm.join(name, "--min-peers", "2", "--device", device)
    assert_agreed(swarm.finished(*DEVICES))
    for name in DEVICES:
        losses = [event.loss for event in swarm.events(name, Progress) if event.loss == event.loss]
        assert losses[-1] < losses[0]
        assert max(event.contributors for event in swarm.events(name, RoundCommitted)) == 2


def test_a_peer_on_a_gpu_leaves_and_goes_on_from_its_checkpoint(swarm: Swarm) -> None:
    swarm.publish(run_of(rounds=0))
    gpu, _ = (swarm.join(name, "--min-peers", "2", "--device", device) for name, device in DEVICES.items())
    swarm.wait_until("a round of both", lambda: contributors(swarm, "gpu") == 2)
    swarm.interrupt(gpu)
    assert swarm.wait([gpu], LEAVE_S), gpu.last_lines()
    assert gpu.exit_status() == 0, gpu.last_lines()
    left, steps = swarm.events("gpu", PeerFinished)[-1], swarm.events("gpu", Progress)[-1].inner_steps
    swarm.join("gpu", "--resume", "--min-peers", "2", "--device", "cuda")
    swarm.wait_for_step("gpu", steps + 1)
    assert swarm.events("gpu", PeerStarted)[-1].inner_steps >= steps
    swarm.wait_until("a round of both", lambda: contributors(swarm, "gpu", left.at) == 2)


def contributors(swarm: Swarm, name: str, since: float = 0.0) -> int:
    rounds = [event for event in swarm.events(name, RoundCommitted) if event.at > since]
    return max((event.contributors for event in rounds), default=0)
