"""The laboratory of losses: stacked peers are separate peers, cases are what they are called, "worth" is read
off the lone peers, and the defence's rounds are by tokens and by the product's own rule."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from laboratory import load

from p2p_co2.recipes.corpus import Corpus

lab = load("loss")
LONE = lab.Case("lone", "lone", 1)
PLAIN = replace(lab.DEFAULT, lr=1.0, momentum=0.0, nesterov=False, clip="none", codec="fp32")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(97, 105, (5000,), generator=generator, dtype=torch.uint8)
    rows = Corpus(*(one.unfold(0, 65, 1) for one in (text[:4000], text[4000:])))
    monkeypatch.setattr(lab, "data", lambda one: rows)
    monkeypatch.setattr(lab, "HELD_OUT_ROWS", 16)
    monkeypatch.setattr(lab, "ROUND", 8)


def _losses(case: object, rounds: int = 2) -> tuple[float, float]:
    """Of the first peer's live model, and of what was agreed."""
    live, agreed = lab.train(case, rounds, 0)
    return lab.held_out_loss(lab.TEXT, live), lab.held_out_loss(lab.TEXT, agreed)


def _loss(case: object) -> float:
    return _losses(case)[1]


def _gradients(params: dict[str, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(lab.TEXT.each_loss(params, rows).sum(), list(params.values()))


def _params(models: int) -> dict[str, torch.Tensor]:
    params: dict[str, torch.Tensor] = lab.TEXT.start(3, models)
    generator = torch.Generator().manual_seed(1)
    for tensor in params.values():  # models that differ, and a head that is not zero
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02).requires_grad_(True)
    return params


def test_stacked_gradients_equal_separate_ones() -> None:
    params, windows = _params(4), torch.randint(256, (4, 1, 65))
    stacked = _gradients(params, windows)
    for peer in range(4):
        alone = {
            name: tensor[peer : peer + 1].detach().requires_grad_(True) for name, tensor in params.items()
        }
        for together, separate in zip(stacked, _gradients(alone, windows[peer : peer + 1]), strict=True):
            torch.testing.assert_close(together[peer : peer + 1], separate, rtol=1e-5, atol=1e-6)


def test_without_delay_every_peer_ends_at_the_agreed_parameters() -> None:
    live, agreed = _losses(replace(lab.BASE, every=8))
    assert live == pytest.approx(agreed, abs=1e-5)


def test_keep_conserves_every_drift_in_full_precision() -> None:
    names, every = ["out0", "out1"], 30
    params, generator = lab.TEXT.start(0, 4), torch.Generator().manual_seed(2)
    fragment = lab.HeldFragment(replace(PLAIN, delay=3, every=every), names, 0, params)
    start = fragment.state.params.clone()
    total = torch.zeros_like(start)
    for step in range(1, 3 * every + 1):
        drift = 1e-4 * torch.randn(4, len(start), generator=generator)
        lab.unflatten_(params, names, lab.flatten(params, names) + drift)
        total += drift.mean(0)
        fragment.boundary(step)
    fragment.flush()
    torch.testing.assert_close(fragment.state.params, start + total, rtol=0, atol=1e-5)


def test_a_swarm_of_one_without_outer_momentum_is_a_lone_peer() -> None:
    """Law 3 of the algorithms: keep, outer lr 1, beta 0 is plain local training."""
    alone = replace(PLAIN, peers=1, every=8, delay=3)
    assert _loss(alone) == pytest.approx(_loss(LONE), abs=1e-4)
    assert _loss(replace(alone, rule="co2", lr=0.3)) != pytest.approx(_loss(LONE), abs=1e-3)


def test_a_peer_alone_in_its_swarm_trains_as_if_there_were_none() -> None:
    """Whatever the run's outer step and codec are; what is agreed follows."""
    alone = replace(PLAIN, peers=1, every=8, delay=3, lr=0.7, momentum=0.9, codec="int4")
    plain, *coded = (_losses(case, 1) for case in (LONE, alone, replace(alone, feedback=True)))
    for live, agreed in coded:
        assert live == plain[0]
        assert agreed == pytest.approx(plain[1], abs=1e-2)


def test_a_swarm_that_averages_every_step_is_data_parallel_under_sgd_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Averaging parameters after each step is averaging gradients, if the inner optimizer is linear."""
    monkeypatch.setattr(lab, "adamw", lambda params: torch.optim.SGD(params.values(), lr=0.1))
    monkeypatch.setattr(lab, "learning_rate", lambda *of_the_step: 0.1 / lab.PEAK_LR)
    swarm = replace(PLAIN, peers=2, every=1, delay=0, whole=True)
    parallel = lab.Case("data-parallel 2", "data-parallel", 2)
    assert _loss(swarm) == pytest.approx(_loss(parallel), abs=1e-4)
    assert _loss(replace(swarm, every=8)) != pytest.approx(_loss(parallel), abs=1e-4)


def test_muon_of_stacked_models_is_torch_muon_of_each() -> None:
    params = lab.TEXT.start(1, 2)
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


def test_a_table_of_rules_compares_by_seed() -> None:
    losses = {(lab.BASE.name, 30): {0: 2.0, 1: 4.0}, ("keep d3", 30): {0: 2.1, 1: 4.4}}
    told = "| keep d3 | 3.250 ± 1.150 | +7.5 % (+5.0 to +10.0) | 2 |"
    assert told in lab.cases_table(lab.rule_cases(), losses, 30)


def test_other_settings_are_cases_of_their_own() -> None:
    for cases in (
        [*chain(*map(lab.sized_cases, lab.VARIETIES)), *lab.variant_cases()],
        lab.rule_cases(),
    ):
        assert len({case.name for case in cases}) == len(cases)
        assert len({replace(case, name="") for case in cases}) == len(cases)


@pytest.mark.parametrize("name", lab.LABS)
def test_every_model_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From even odds, or from a trained model; rows fit their model."""
    monkeypatch.undo()
    monkeypatch.setattr(lab, "ROUND", 1)
    model = replace(lab.LABS[name], width=16, layers=2, peak=0.02)
    case = lab.Case("lone", "lone", 1, model, peak=model.peak)
    losses = [lab.held_out_loss(model, lab.train(case, rounds, 0)[1]) for rounds in (1, 40)]
    assert losses[1] < losses[0]
    assert losses[0] < math.log(model.classes) + 0.1
    assert (losses[0] < 4.0) == (name == "tuning")


# ---- the defence against liars


def moved(drifts: list[float], cap: float) -> float:
    """By how much a round moves the agreed parameters, whose peers have moved by ``drifts``."""
    names, params = ["out0", "out1"], lab.TEXT.start(0, 4)
    rule = "centred" if cap else "mean"
    case = replace(PLAIN, delay=0, every=8, slow=2, cap=cap, aggregation=rule)
    fragment = lab.HeldFragment(case, names, 0, params)
    start = fragment.state.params.clone()
    lab.unflatten_(params, names, lab.flatten(params, names) + torch.tensor(drifts)[:, None])
    fragment.boundary(8)
    assert torch.equal(lab.flatten(params, names), fragment.state.params.expand(4, -1))
    change = fragment.state.params - start
    torch.testing.assert_close(change, change.mean().expand(len(change)))
    return float(change.mean())


def test_a_round_of_the_laboratory_is_by_tokens_and_by_the_defence() -> None:
    alike = [1.0, 1.0, 2.0, 2.0]
    assert moved(alike, 0.0) == pytest.approx((2 * 10 + 2 * 2) / (2 * 10 + 2))
    # With a cap of 4 the fast ones count as 4 steps, and a norm of 2 is clipped to the median of 1.
    assert moved(alike, 4.0) == pytest.approx((2 * 4 + 2) / (2 * 4 + 1))


def test_slow_peers_make_a_tenth_of_the_steps() -> None:
    apart = replace(PLAIN, slow=2, every=1000)
    start = lab.TEXT.start(0, 4)["head"]
    for rounds, slow in ((1, False), (2, True)):  # of 8 steps of the quick ones
        live, _ = lab.train(apart, rounds, 0)
        assert [not torch.equal(one, of) for one, of in zip(live["head"], start, strict=True)] == [
            True,
            True,
            slow,
            slow,
        ]
