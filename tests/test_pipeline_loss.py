"""The laboratory of stages: split is unsplit where nothing is lost, codecs reach the boundaries, each replica
gets its share, and the table says what the numbers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from laboratory import load

from p2p_co2.recipes.byte_gpt import Shape
from p2p_co2.recipes.corpus import Corpus

lab = load("pipeline_loss")
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
        swarm = lab.Swarm(VARIANTS[name], case, 0, lab.Windows(_corpus(), 0, case), rounds=False)
        swarm.train(lambda round_, loss: None)
        ends[name] = torch.cat([p.detach().flatten() for p in swarm.modules[0][0].parameters()])
    int8, int4 = ((ends[name] - ends["fp32"]).norm() for name in ("int8", "int8-int4"))
    assert 0 < int8 < int4


@pytest.mark.parametrize("name", ["whole", "int8", "scattered"])
def test_a_group_agrees_and_counts_all_tokens(name: str) -> None:
    """The replicas of every stage end at the same parameters, which are not the first ones."""
    case, corpus = CASE._replace(replicas=3, stages=4), _corpus()
    swarm, losses = lab.Swarm(VARIANTS[name], case, 1, lab.Windows(corpus, 1, case)), []
    first = [[p.detach().clone() for p in modules[0].parameters()] for modules in swarm.modules]
    swarm.train(lambda round_, loss: losses.append(loss))
    assert len(swarm.modules) == (1 if name == "whole" else 4)
    assert len(losses) == case.rounds
    for modules, before in zip(swarm.modules, first, strict=True):
        for *replicas, old in zip(*(module.parameters() for module in modules), before, strict=True):
            assert all(torch.equal(replicas[0], other) for other in replicas[1:])
            assert not torch.equal(replicas[0], old)


def test_the_table_pairs_seeds_and_says_which_bar_fires(tmp_path: Path) -> None:
    losses = {"whole": [2.0, 2.0, 4.0], "fp32": [2.002, 2.02, 4.0], "int8": [2.002, 2.04, 4.04]}
    out = tmp_path / "out.jsonl"
    common = {**CASE._asdict(), "steps": lab.STEPS, "shape": list(lab.SHAPE)}
    lines = [
        {**common, "name": name, "seed": seed, "loss": loss}
        for name, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    lines.append({**common, "steps": lab.STEPS + 1, "name": "int8", "seed": 0, "loss": 9.0})
    out.write_text("\n".join(map(json.dumps, lines)))
    told = lab.table(lab.read_lines(out))
    assert "| fp32 | 2.0020, 2.0200, 4.0000 | 2.0200 | +0.10 (+0.10, +1.00, +0.00) |  |" in told
    assert "bar +0.5 %: fp32 against whole, +0.10 (+0.10, +1.00, +0.00): holds" in told
    assert "kill +0.5 %: int8 against fp32, +0.99 (+0.00, +0.99, +1.00): FIRES" in told
    assert "int8 against whole" not in told
    assert "9.0000" not in told
