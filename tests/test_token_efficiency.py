"""The laboratory of token efficiency: its cases are what they are called, and "worth" is read off the lone
peers."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from laboratory import load

from p2p_co2.recipes.corpus import Corpus

lab = load("token_efficiency")
model = sys.modules["loss_model"]
PLAIN = replace(lab.DEFAULT, lr=1.0, momentum=0.0, nesterov=False, clip="none", codec="fp32")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "HELD_OUT_WINDOWS", 16)
    monkeypatch.setattr(lab, "ROUND", 8)


def _corpus() -> Corpus:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(97, 105, (5000,), generator=generator, dtype=torch.uint8)
    return Corpus(text[:4000], text[4000:])


def _loss(case: object) -> float:
    return float(lab.train(case, 2, 0, _corpus())["loss"])


def test_a_swarm_of_one_without_outer_momentum_is_a_lone_peer() -> None:
    """Law 3 of the algorithms: keep, outer lr 1, beta 0 is plain local training."""
    alone = replace(PLAIN, peers=1, every=8, delay=3)
    assert _loss(alone) == pytest.approx(_loss(lab.LONE), abs=1e-4)
    assert _loss(replace(alone, lr=0.3)) != pytest.approx(_loss(lab.LONE), abs=1e-3)


def test_a_swarm_that_averages_every_step_is_data_parallel_under_sgd_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Averaging parameters after each step is averaging gradients, if the inner optimizer is linear."""
    monkeypatch.setattr(lab, "adamw", lambda params: torch.optim.SGD(params, lr=0.1))
    monkeypatch.setattr(lab, "rate", lambda case, step, steps: 0.1)
    monkeypatch.setattr(lab, "NAMES", [[name for group in lab.NAMES for name in group]])
    swarm = replace(PLAIN, peers=2, every=1, delay=0)
    parallel = lab.Case("data-parallel 2", "data-parallel", 2)
    assert _loss(swarm) == pytest.approx(_loss(parallel), abs=1e-4)
    assert _loss(replace(swarm, every=8)) != pytest.approx(_loss(parallel), abs=1e-4)


def test_muon_of_stacked_models_is_torch_muon_of_each() -> None:
    params = model.start_params(1, 2)
    generator = torch.Generator().manual_seed(3)
    for tensor in params.values():
        tensor.requires_grad_(True)
        tensor.grad = torch.randn(tensor.shape, generator=generator)
    up = params["up0"]
    expected = torch.nn.Parameter(up[1].detach().clone())
    expected.grad = up.grad[1].clone() if up.grad is not None else None
    optimizer = lab.StackedMuon(params)
    reference = torch.optim.Muon([expected], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    before = params["head"].detach().clone()
    optimizer.step()
    reference.step()
    torch.testing.assert_close(up[1].detach(), expected.detach())
    assert not torch.equal(params["head"].detach(), before)


def test_worth_is_read_off_the_lone_peers_over_the_logarithm_of_tokens() -> None:
    curve = {30: 3.0, 60: 2.5, 120: 2.0, 240: 2.1}
    assert lab.worth(3.0, 30, curve) == 1.0
    assert lab.worth(2.5, 30, curve) == pytest.approx(2.0)
    assert lab.worth(2.25, 30, curve) == pytest.approx(2**1.5)
    assert lab.worth(2.0, 60, curve) == pytest.approx(2.0)
    assert math.isinf(lab.worth(1.9, 30, curve))
    assert math.isnan(lab.worth(3.5, 30, curve))  # shorter runs than any that was made


def test_the_tables_pair_by_seed_and_finished_cases_are_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    losses = {
        ("lone", 30): (3.0, 3.2),
        ("lone", 60): (2.4, 2.6),
        ("lone", 120): (2.0, 2.0),
        ("swarm of 2", 30): (2.75, 2.85),
        ("data-parallel 2", 30): (2.5, 2.5),
        ("swarm of 4", 30): (2.2, 2.2),
        ("H 100", 30): (2.42, 2.2),
    }
    lines = [
        json.dumps({"name": name, "rounds": rounds, "seed": seed, "loss": loss})
        for (name, rounds), pair in losses.items()
        for seed, loss in enumerate(pair)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(lab, "train", lambda *_: pytest.fail("it is there"))
    only = ["--only", "H 100", "swarm of 2", "lone", "--seeds", "0", "1", "--rounds", "30"]
    lab.main([*only, "--peers", "1", "2", "4", "--out", str(path)])
    shown = capsys.readouterr().out
    assert (
        "| 2 | 2.800 ± 0.050 | 2.500 ± 0.000 | 2.500 ± 0.100 | +12.0 % (+10.0 to +14.0) | 1.4 | 2.0 | 2 |"
        in shown
    )
    assert "| H 100 | 2.310 ± 0.110 | +5.0 % (+0.0 to +10.0) | 2 |" in shown


def test_other_settings_are_cases_of_their_own() -> None:
    cases = [*lab.table_cases(), *lab.variant_cases()]
    assert len({case.name for case in cases}) == len(cases)
    assert len({replace(case, name="") for case in cases}) == len(cases)
