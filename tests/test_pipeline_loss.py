"""The laboratory of stages: split is unsplit where nothing is lost, codecs reach the boundaries, and each
replica gets its share."""

from __future__ import annotations

import pytest
import torch
from laboratory import load

from p2p_co2.recipes.byte_gpt import Shape
from p2p_co2.recipes.corpus import Corpus

lab = load("pipeline")
CASE = lab.Case(stages=2, replicas=2, microbatches=2, sequences=1, rounds=2)
VARIANTS = {variant.name: variant for variant in lab.VARIANTS}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "SHAPE", Shape(layers=4, width=16, heads=2, context=8))
    monkeypatch.setattr(lab, "STEPS", 4)
    monkeypatch.setattr(lab, "HELD_OUT_WINDOWS", 32)


def _corpus() -> Corpus:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(97, 105, (5000,), generator=generator, dtype=torch.uint8)
    return Corpus(text[:4000], text[4000:])


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_split_equals_unsplit(stages: int) -> None:
    assert lab.law(CASE._replace(stages=stages), _corpus()) <= 1e-6


def test_a_coarser_codec_is_farther_from_exact_gradients() -> None:
    ends = {}
    for name in ("fp32", "int8", "int8-int4"):
        case = CASE._replace(replicas=1)
        swarm = lab.Swarm(VARIANTS[name], case, 0, lab.Microbatches(_corpus(), 0, case), rounds=False)
        swarm.train(lambda round_, loss: None)
        ends[name] = torch.cat([p.detach().flatten() for p in swarm.modules[0][0].parameters()])
    int8, int4 = ((ends[name] - ends["fp32"]).norm() for name in ("int8", "int8-int4"))
    assert 0 < int8 < int4


@pytest.mark.parametrize("name", ["whole", "int8", "scattered"])
def test_a_group_agrees_and_counts_all_tokens(name: str) -> None:
    """The replicas of every stage end at the same parameters, which are not the first ones."""
    case, corpus = CASE._replace(replicas=3, stages=4), _corpus()
    swarm, losses = lab.Swarm(VARIANTS[name], case, 1, lab.Microbatches(corpus, 1, case)), []
    first = [[p.detach().clone() for p in modules[0].parameters()] for modules in swarm.modules]
    swarm.train(lambda round_, loss: losses.append(loss))
    assert len(swarm.modules) == (1 if name == "whole" else 4)
    assert len(losses) == case.rounds
    for modules, before in zip(swarm.modules, first, strict=True):
        for *replicas, old in zip(*(module.parameters() for module in modules), before, strict=True):
            assert all(torch.equal(replicas[0], other) for other in replicas[1:])
            assert not torch.equal(replicas[0], old)
