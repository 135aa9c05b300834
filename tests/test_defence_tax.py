"""The laboratory of what the defence costs: its rounds are by tokens, and by the product's own rule."""

from __future__ import annotations

import pytest
import torch
from laboratory import load

from p2p_co2.config import CodecConfig, OuterConfig, RunConfig

NAMES = ("out0", "out1")

lab = load("defence_tax")


def moved(drifts: list[float], tokens: list[float], cap: float) -> float:
    """By how much a round moves the agreed parameters, whose peers have moved by ``drifts``."""
    run = RunConfig(weight_cap=cap, codec=CodecConfig(name="fp32"), outer=OuterConfig(lr=1.0, momentum=0.0))
    groups = [lab.Together(0, [0, 1], 1), lab.Together(0, [2, 3], 10)]
    fragment = lab.Averaged(run, NAMES, groups[0].params)
    start = fragment.state.params.clone()
    for group in groups:
        with torch.no_grad():
            for name in NAMES:
                for index, peer in enumerate(group.peers):
                    group.params[name][index] += drifts[peer]
    fragment.average(groups, tokens)
    for group in groups:
        assert torch.equal(lab.flatten(group.params, NAMES), fragment.state.params.expand(2, -1))
    change = fragment.state.params - start
    torch.testing.assert_close(change, change.mean().expand(len(change)))
    return float(change.mean())


def test_a_round_of_the_laboratory_is_by_tokens_and_by_the_defence() -> None:
    tokens, alike = [640.0, 640.0, 64.0, 64.0], [1.0, 1.0, 2.0, 2.0]
    assert moved(alike, tokens, 0.0) == pytest.approx((2 * 640 + 2 * 2 * 64) / (2 * 640 + 2 * 64))
    # With a cap of 4 the fast ones count as 256 tokens, and a norm of 2 is clipped to the median of 1.
    assert moved(alike, tokens, 4.0) == pytest.approx((2 * 256 + 2 * 64) / (2 * 256 + 64))


def test_slow_peers_make_a_tenth_of_the_steps_and_both_rules_see_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[list[float]] = []
    average = lab.Averaged.average

    def noted(self: object, groups: object, tokens: list[float]) -> None:
        counted.append(tokens)
        average(self, groups, tokens)

    monkeypatch.setattr(lab.Averaged, "average", noted)
    losses = [lab.train(1, 10, (0, "ten times", 0.0)) for _ in range(2)]
    assert losses[0] == losses[1] < 5.5
    assert counted[0] == [640.0, 640.0, 64.0, 64.0]
