"""A torchrun group as one peer: it trains as one process does, goes on from its checkpoint, and ends whole.

Groups are real: processes with a gloo group of their own, real sockets and a real seed.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from p2p_co2.config import OWN_LOOP, ClockConfig, CodecConfig, OuterConfig, RunConfig, read_run_config
from p2p_co2.errors import ConfigError, EnvironmentFault, P2PCo2Error, RunOver, TicketError, TransportError
from p2p_co2.swarm.data import reseed
from p2p_co2.tensors.checkpoint.folder import load as load_checkpoint
from p2p_co2.tensors.sharding import held, trouble_with_cut
from p2p_co2.testing import local_swarm
from p2p_co2.trainer.ranks import collectives as ranks
from p2p_co2.trainer.ranks.collectives import error_of, text_of
from tests.swarms import ENVIRONMENT, ROOT, START_BOUND_S, Swarm, swarm

SCRIPT = str(ROOT / "tests" / "ranks_peer.py")
CLOSE = 1e-5
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def exact(rounds: int) -> RunConfig:
    """A run whose states follow from the batches alone: fp32, and training waits for each round."""
    return RunConfig(
        name="ranks", recipe=OWN_LOOP, fragments=3, codec=CodecConfig(name="fp32"),
        clock=ClockConfig(mode="steps", inner_steps_per_round=6, rounds=rounds),
        outer=OuterConfig(blocking_rounds=1000),
    )  # fmt: skip


# ---- by hand, and against torch


@pytest.fixture(params=range(4))
def rank_of_four(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (5,), (2, 2), (1,), (3, 0)])
def test_held_is_where_torch_puts_a_shard(rank_of_four: int, shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    mesh = init_device_mesh("cpu", (4,))
    chunks = whole.chunk(4)
    mine = chunks[rank_of_four] if rank_of_four < len(chunks) else whole[:0]
    tensor = DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    start, stop = held(tensor)
    assert torch.equal(whole.reshape(-1)[start:stop], mine.reshape(-1))
    assert trouble_with_cut(tensor) == ""


@pytest.mark.usefixtures("rank_of_four")
def test_other_cuts_are_named() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.zeros(4, 4)

    def cut(*placements: Any) -> Tensor:
        local = torch.zeros(2 if Shard(0) in placements else 4, 2 if Shard(1) in placements else 4)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    assert trouble_with_cut(whole) == ""
    assert trouble_with_cut(cut(Replicate(), Shard(0))) == ""
    assert "cut as" in trouble_with_cut(cut(Replicate(), Shard(1)))
    assert "cut as" in trouble_with_cut(cut(Shard(0), Shard(1)))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("model", "head", "is odd"),
        RunOver(7),
        TicketError("damaged"),
        TransportError("nobody"),
        EnvironmentFault("disk full"),
    ],
)
def test_an_error_is_the_same_in_another_process(error: P2PCo2Error) -> None:
    there = error_of(json.loads(json.dumps(text_of(error))))
    assert (type(there), str(there)) == (type(error), str(error))


def test_a_rank_that_joins_alone_is_told_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ""

    def wait(**_: object) -> None:  # as torch's does for the others, until there is a line
        nonlocal told
        while not told:
            told = capsys.readouterr().err

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", wait)
    monkeypatch.setattr(ranks, "SILENCE_FLOOR_S", 0.01)
    ranks.Ranks()
    assert "rank 0 of 4" in told
    assert "all ranks" in told


def test_ranks_have_orders_of_their_own_but_for_samplers_that_deal_out() -> None:
    data = list(range(40))

    def order(rank: int, deals_out: bool) -> list[int]:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            sampler = DistributedSampler(data) if deals_out else None
            loader = DataLoader(data, batch_size=4, sampler=sampler)
            reseed(loader, 0, lambda epoch: 5 + epoch)
            return [int(one) for batch in loader for one in batch]
        finally:
            dist.destroy_process_group()

    own = [order(rank, deals_out=False) for rank in range(2)]
    assert own[0] != own[1]
    assert [sorted(one) for one in own] == [data, data]
    dealt = [order(rank, deals_out=True) for rank in range(2)]
    assert sorted(dealt[0] + dealt[1]) == data


# ---- real groups


def start(running: Swarm, name: str, how: str, folder: str, **options: Any) -> None:
    """A peer of one process ("plain") or of two ranks; these may be ``torchrun``'s."""
    command = TORCHRUN if options.get("torchrun") else [sys.executable]
    given = json.dumps({"how": how, "ranks": 1 if how == "plain" else 2, **options})
    running.start(name, [*command, SCRIPT, running.ticket, str(running.folder / folder), given])


def agreed(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "agreed.safetensors")


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What one process agrees on with itself: in one go, and with a stop after 13 steps."""
    found = []
    for stops in ((), (13,)):
        folder = tmp_path_factory.mktemp("alone")
        with swarm(folder, exact(4)) as running:
            for number, steps in enumerate((*stops, 10**6)):
                start(running, f"part-{number}", "plain", "peer", steps=steps)
                running.wait(f"part-{number}")
        found.append(agreed(folder / "peer"))
    assert furthest(*found) > 100 * CLOSE  # a stop is seen, so what comes of it can be compared
    return found[0], found[1]


@pytest.mark.swarm
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_process_does(
    tmp_path: Path, how: str, one_process: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> None:
    with swarm(tmp_path, exact(4)) as running:
        start(running, "group", how, "peer", measure=7)
        running.wait("group")
        log = running.log("group")
    assert furthest(agreed(tmp_path / "peer"), one_process[0]) < CLOSE
    assert log.count("ends after 24") == 2
    kept = re.findall(r"agreed in place: (.*)", log)
    assert len(kept) == 2
    assert set(kept) == {"other than live, and back"}


@pytest.mark.swarm
@pytest.mark.parametrize("then", ["fsdp", "plain"])
def test_a_group_goes_on_from_its_checkpoint(
    tmp_path: Path, then: str, one_process: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> None:
    """Also as another kind of group, or as one process: the file is the same."""
    with swarm(tmp_path, exact(4)) as running:
        start(running, "first", "fsdp", "peer", steps=13)
        running.wait("first")
        start(running, "second", then, "peer")
        running.wait("second")
        log = running.log("second")
    assert log.count("starts at 13 of") == (1 if then == "plain" else 2)
    assert "begins anew" not in log
    assert furthest(agreed(tmp_path / "peer"), one_process[1]) < CLOSE


def by_hand(folder: Path, ticket: str, ranks: int, **options: Any) -> list[tuple[int, str]]:
    """A group without torchrun, which ends all ranks when one ends: exit status and output of each."""
    given = json.dumps({**options, "ranks": ranks, "apart": True})
    done = subprocess.run(
        [sys.executable, SCRIPT, ticket, str(folder / "peer"), given], env=ENVIRONMENT, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, timeout=START_BOUND_S, check=True,
    )  # fmt: skip
    statuses = json.loads(done.stdout)
    return [(status, (folder / f"rank-{rank}.log").read_text()) for rank, status in enumerate(statuses)]


def last_error(output: str) -> str:
    return [line for line in output.splitlines() if "p2p_co2.errors." in line][-1].partition(": ")[2]


@pytest.mark.swarm
@pytest.mark.parametrize(("how", "dies", "where"), [("ddp", 1, "backward"), ("fsdp", 0, "step")])
def test_a_rank_that_dies_ends_the_peer_on_all_others(
    tmp_path: Path, how: str, dies: int, where: str
) -> None:
    with swarm(tmp_path, exact(8)) as running:
        ended = by_hand(tmp_path, running.ticket, 3, how=how, die=[dies, 25], where=where, step_s=0.1)
        assert ended[dies][0] == 9
        for rank, (status, output) in enumerate(ended):
            if rank != dies:
                assert status == 1, output
                assert "start all ranks again" in output
        start(running, "again", "plain", "peer", steps=3)
        running.wait("again")
        assert min(map(int, re.findall(r"starts at (\d+) of", running.log("again")))) > 0


@pytest.mark.swarm
def test_a_rank_that_does_not_come_to_join_is_missed(tmp_path: Path) -> None:
    ended = by_hand(tmp_path, "no-ticket", 3, how="ddp", die=[1, "join"], bound_s=5)
    assert [status for status, _ in ended] == [1, 9, 1]
    for _, output in ended[::2]:
        assert "not all ranks of this peer came to join" in last_error(output), output


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"how": "ddp"}, "ticket"),
        ({"how": "loose", "model": [0, 1]}, "model: embed.weight: has other values on rank 1 than on rank 0"),
    ],
)
def test_what_rank_0_fails_with_all_ranks_raise(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    ended = by_hand(tmp_path, "no-ticket", 2, **options)
    assert [status for status, _ in ended] == [1, 1]
    errors = [last_error(output) for _, output in ended]
    assert errors[0] == errors[1]
    assert words in errors[0]


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"how": "loose"}, "the ranks' parameters differ after the first step"),
        ({"how": "ddp", "die": [1, 3], "where": "save"}, "step: is called by rank 0 where rank 1 calls save"),
    ],
)
def test_ranks_that_are_not_together_are_told(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with swarm(tmp_path, exact(4)) as running:
        ended = by_hand(tmp_path, running.ticket, 2, **options)
    for status, output in ended:
        assert status == 1, output
        assert words in last_error(output)


@pytest.mark.swarm
def test_a_ctrl_c_stops_all_ranks_with_the_same_step(tmp_path: Path) -> None:
    """torchrun's agent hands it on, once to each rank."""
    with swarm(tmp_path, exact(10**4)) as running:
        start(running, "group", "fsdp", "peer", torchrun=True, step_s=0.05)
        ends_at = time.monotonic() + START_BOUND_S
        while not list(tmp_path.glob("peer/checkpoint/state-*/manifest.json")) and time.monotonic() < ends_at:
            time.sleep(0.1)
        running.processes["group"].send_signal(signal.SIGINT)
        running.processes["group"].wait(START_BOUND_S)
        log = running.log("group")
    ended = set(re.findall(r"rank (\d) ends after (\d+)", log))
    assert {rank for rank, _ in ended} == {"0", "1"}, log[-3000:]
    assert len({steps for _, steps in ended}) == 1
    assert load_checkpoint(tmp_path / "peer" / "checkpoint").inner_steps == int(ended.pop()[1])


@pytest.mark.swarm
def test_a_group_and_a_peer_of_one_process_agree_by_the_example(tmp_path: Path) -> None:
    run = read_run_config(ROOT / "examples" / "own_loop.toml")
    run = run.model_copy(update={"clock": run.clock.model_copy(update={"rounds": 10})})
    example = str(ROOT / "examples" / "torchrun_fsdp.py")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with local_swarm(2, run=run, folder=tmp_path / "swarm") as running:
        group = running.start([*TORCHRUN, example, str(ours)], 0)
        alone = running.start([sys.executable, example, str(theirs)], 1)
        ends_at = time.monotonic() + START_BOUND_S
        while (group.running() or alone.running()) and time.monotonic() < ends_at:
            time.sleep(0.1)
        assert (group.exit_status(), alone.exit_status()) == (0, 0), group.last_lines() + alone.last_lines()
        assert group.log.read_text().count("inner steps, loss") == 2
    saved = [load_file(out / "model.safetensors") for out in (ours, theirs)]
    assert saved[0]["0.weight"].shape == (64, 16)
    assert furthest(*saved) == 0.0
