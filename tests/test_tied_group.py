"""The tied table's group: what it trains, what a stage's group has left, and the run that says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2p_co2.config import CodecConfig, OuterConfig, PipelineConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.node.environment import RunGroup
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.recipes import Stages, load_recipe, load_run_recipe, recipe_digest
from p2p_co2.recipes.byte_gpt import byte_gpt_stages
from p2p_co2.recipes.stages import TiedTable
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation.centred import centred
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import plan_fragments
from p2p_co2.trainer.gather import gather_folders
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.views import NodeView
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.schedule import OfferState
from tests.fuzz.stages import StageWorld
from tests.fuzz.world import Trainer, run_virtual
from tests.test_gather import loaded, write
from tests.test_stages import SHAPE

OPTIONS: dict[str, Any] = {"layers": 3, "width": 16, "heads": 2, "context": 8}


def run_of(stages: int = 3, **pipeline: Any) -> RunConfig:
    return RunConfig(
        recipe_options=OPTIONS,
        recipe_digest=recipe_digest("byte-gpt", OPTIONS),
        pipeline=PipelineConfig.model_validate({"stages": stages, **pipeline}),
    )


# ---- what each group trains


@pytest.mark.parametrize("count", [2, 3])
def test_the_groups_of_a_stage_hold_each_of_its_parameters_once(count: int) -> None:
    stages = byte_gpt_stages(SHAPE, count, tied=True)
    digests = set()
    for stage in range(count):
        module = stages.build(7, stage)
        own, *tables = stages.groups(stage, module)
        assert len(tables) == (stage in {0, count - 1})
        ids = [id(one) for group in (own, *tables) for one in group.parameters()]
        assert sorted(ids) == sorted(map(id, module.parameters()))
        assert [id(one) for one in own.buffers()] == [id(one) for one in module.buffers()]
        digests |= {plan_fragments(table, 2).digest for table in tables}
        module(torch.zeros(1, 4, dtype=torch.long) if stage == 0 else torch.zeros(1, 4, SHAPE.width))
    assert len(digests) == 1  # both sides cut the table alike


def test_a_stage_that_is_a_table_and_nothing_else_is_refused() -> None:
    def loss(output: Tensor, side: Tensor) -> Tensor:
        return output.sum()

    table = TiedTable("weight", "0.weight", nn.init.normal_)
    makers = [lambda: nn.Embedding(5, 4), lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 1))]
    stages = Stages(makers, split=lambda batch: batch, loss=loss, tied=table)
    with pytest.raises(ConfigError, match="stage 0 of 2 has no parameter to train; cut the model elsewhere"):
        stages.groups(0, stages.build(0, 0))
    assert len(stages.groups(1, stages.build(0, 1))) == 2


# ---- the outer step


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_the_table_steps_by_both_uses(rule: Any) -> None:
    """Two peers, one of each stage, at lr 1: the agreed table loses the sum of what they have learned."""
    outer_config = OuterConfig(
        rule=rule, lr=1.0, momentum=0.0, nesterov=False, clip="none", gap_penalty=False
    )
    run = RunConfig(codec=CodecConfig(name="fp32"), outer=outer_config)
    codec, start = get_codec("fp32"), torch.arange(8.0)
    sides = [FragmentState(run, codec, name, outer.init(start.clone()), uses=2) for name in "ab"]
    learned = [torch.full((8,), 0.25), torch.full((8,), 0.5)]
    offers = [
        side.offer(start - one, OfferState(b"%d" % at, 10))
        for at, (side, one) in enumerate(zip(sides, learned, strict=True))
    ]
    sent = [codec.decode(torch.frombuffer(bytearray(offer.payload), dtype=torch.uint8)) for offer in offers]
    mean = codec.encode((sent[0] + sent[1])[:8] / 2).numpy().data
    parts = [PartWeights(0, codec.blocks(8), {"a": 10.0, "b": 10.0}, {"a": b"0", "b": b"1"})]
    for side in sides:
        outcome = side.commit(1, 0, mean, parts)
        assert outcome.share == 1.0
        assert torch.equal(side.state.params, start - 0.75)


def test_the_use_with_the_longer_slices_is_no_lie() -> None:
    """A head's outer gradient is several times as long as an embedding's; noise is longer than all heads'."""
    embeddings, heads = [1.0, 1.5, 2.0], [6.0, 7.0, 8.0]

    def counted(*lengths: float) -> tuple[float, ...]:
        products = [[a * a if i == j else 0.0 for j in range(len(lengths))] for i, a in enumerate(lengths)]
        return centred(products, [1.0] * len(lengths), uses=2)

    assert counted(embeddings[0], heads[0]) == (
        1.0,
        1.0,
    )  # one of each: the sum of both, whatever their lengths
    assert counted(*embeddings, *heads) == pytest.approx((1.0, 1.0, 1.0, 1.0, 1.0, 7 / 8), rel=1e-3)
    for noisy in range(6):
        norms = [*embeddings, *heads]
        norms[noisy] = 1e6
        told = counted(*norms)
        assert told[noisy] * 1e6 <= 1.001 * max(heads)
        assert all(weight == 1.0 for weight, norm in zip(told, norms, strict=True) if norm <= min(heads))
    assert counted(0.0, 5.0) == (1.0, 1.0)


# ---- the run's settings


def test_the_run_says_whether_its_table_is_tied() -> None:
    plain, fused = run_of(), run_of(tied="fused")
    assert plain.digest() != fused.digest()
    assert len({fused.stage_digest(group) for group in range(4)}) == 4
    assert run_of(1, tied="fused").canonical_bytes() == run_of(1).canonical_bytes()
    assert b"pipeline" not in run_of(1).canonical_bytes()
    whole = dict(load_run_recipe(fused).model.named_parameters(remove_duplicate=False))
    assert whole["embedding.weight"] is whole["head.weight"]
    assert load_run_recipe(plain).in_stages(3).tied is None


OWN = """
from torch import nn
from p2p_co2.recipes import Recipe, Stages
from p2p_co2.recipes.stages import TiedTable

def stages(tied):
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    table = TiedTable("0.weight", "1.weight", nn.init.normal_) if tied else None
    cut = Stages([make, make], lambda batch: batch, lambda output, side: output.sum(), tied=table)
    return Recipe(nn.Linear(1, 1), lambda seed, batch: iter(()), lambda model, batch: None, stages=cut)

def plain():
    return stages(False)

def shared():
    return stages(True)
"""


def test_a_recipe_that_shares_no_table_is_refused_and_so_is_one_that_the_run_does_not_know_of(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(ConfigError, match=r'pipeline.tied: is "fused", but .* share no table; .*tied = "no"'):
        load_recipe(f"{own}:plain", {}, 0, 2, is_tied=True)
    with pytest.raises(ConfigError, match=r'pipeline.tied: is "no", but .* share a table; .*tied = "fused"'):
        load_recipe(f"{own}:shared", {}, 0, 2)
    assert load_recipe(f"{own}:shared", {}, 0, 2, is_tied=True).in_stages(2).tied is not None


# ---- gathering


def test_the_whole_takes_the_table_from_beside_a_stage(tmp_path: Path) -> None:
    run = run_of(tied="fused")
    stages = load_run_recipe(run).in_stages(3)
    modules = [stages.build(run.seed, stage) for stage in range(3)]
    with torch.no_grad():
        for module in modules:
            for one in module.parameters():
                one.add_(torch.randn(one.shape))
    folders = []
    for stage, module in enumerate(modules):
        own, *tables = stages.groups(stage, module)
        folders.append(write(tmp_path / str(stage) / "checkpoint", run, stage, own, [4] * run.fragments))
        for table in tables:  # the last stage's peer is a round behind
            versions = [4 - bool(stage)] * run.fragments
            write(tmp_path / str(stage) / "tied" / "checkpoint", run, 3, table, versions)
    taken = gather_folders(folders, tmp_path / "whole")
    assert [source.holds for source in taken] == ["stage 0", "stage 1", "stage 2", "tied table"]
    assert taken[-1].folder == tmp_path / "0" / "tied" / "checkpoint"
    values = loaded(tmp_path / "whole", load_run_recipe(run).model)
    whole = stages.join(modules).state_dict()
    assert values.keys() == whole.keys() - {"head.weight"}
    assert all(torch.equal(values[name], whole[name]) for name in values)

    (tmp_path / "0" / "tied").rename(tmp_path / "0" / "elsewhere")
    taken = gather_folders(folders, tmp_path / "again")
    assert taken[-1].folder == tmp_path / "2" / "tied" / "checkpoint"
    (tmp_path / "2" / "tied").rename(tmp_path / "2" / "elsewhere")
    with pytest.raises(ConfigError, match=r"the tied table is missing; it lies in .*0/tied/checkpoint"):
        gather_folders(folders, tmp_path / "never")


def test_two_tables_of_one_round_are_one(tmp_path: Path) -> None:
    run = run_of(2, tied="fused")
    stages = load_run_recipe(run).in_stages(2)
    folders = []
    for stage in range(2):
        own, table = stages.groups(stage, stages.build(stage, stage))
        folders.append(write(tmp_path / str(stage) / "checkpoint", run, stage, own, [4] * run.fragments))
        write(tmp_path / str(stage) / "tied" / "checkpoint", run, 2, table, [4] * run.fragments)
    with pytest.raises(ConfigError, match="holds another state of tied table at round 4 than"):
        gather_folders(folders, tmp_path / "whole")


# ---- groups of one process


def test_the_groups_of_a_process_rest_together_and_have_one_clock() -> None:
    """Else the table's, alone, is behind after a pause, and its peer goes on when the run is over."""

    async def work() -> None:
        world = StageWorld(1, 1)
        one = world.volunteers[0]
        table = RunGroup.of_table(run_of(2, tied="fused"))
        main = Trainer(world, "s0 0", one.environment)
        beside = Trainer(world, "s0 0", one.environment.beside(table))
        shells = [main.node, beside.node]
        views = [
            NodeView(shell, asyncio.get_running_loop(), lambda kind, fields: None, lambda: None, shells)
            for shell in shells
        ]

        async def shown(view: NodeView, phase: Status.Phase, position: float) -> list[tuple[int, float]]:
            view.show(LocalProgress(phase, position=position))
            await asyncio.sleep(0)
            return [(node.state.local.phase, node.state.local.position) for node in shells]

        training, paused = Status.TRAINING, Status.PAUSED
        await shown(views[1], training, 3.5)
        assert await shown(views[0], training, 4.5) == [(training, 4.5), (training, 3.5)]
        assert await shown(views[0], paused, 4.5) == [(paused, 4.5), (paused, 3.5)]
        assert await shown(views[1], training, 6.0) == [(paused, 4.5), (training, 6.0)]

        for view in views:
            assert view.swarm_position() is None
        one.environment.switch.elsewhere = lambda now, rounds_per_s: [9.0]
        for node in shells:
            node.progress.conclude(node.now())
            assert node.progress.swarm_position is not None

    run_virtual(work())
