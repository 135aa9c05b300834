"""The outer optimizer: three numbers by hand, torch.optim.SGD as reference, the laws of ALGORITHMS section
6, faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_co2.config import OuterConfig
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.tensors import outer

PLAIN = OuterConfig(rule="keep", lr=1.0, momentum=0.0, nesterov=False, gap_penalty=False, clip="none")


def plain(**changes: Any) -> OuterConfig:
    return PLAIN.model_copy(update=changes)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def values(tensor: Tensor) -> list[float]:
    return [float(value) for value in tensor]


# ---- by hand


def test_outer_gradient_points_from_the_live_to_the_agreed_parameters() -> None:
    state = outer.init(numbers(1, 2, 3))
    assert values(outer.outer_gradient(state, numbers(0, 2, 5))) == [1, 0, -2]


def test_heavy_ball_by_hand() -> None:
    config = plain(lr=0.5, momentum=0.5)
    first, report = outer.step(config, outer.init(numbers(1, 2, 3)), numbers(1, 0, -2), 0)
    assert values(first.params) == [0.5, 2, 4]
    assert values(first.momentum) == [1, 0, -2]
    assert report.gap == 1.0
    assert report.gradient_norm == pytest.approx(math.sqrt(5))
    second, _ = outer.step(config, first, numbers(1, 1, 0), 1)
    assert values(second.momentum) == [1.5, 1, -1]
    assert values(second.params) == [-0.25, 1.5, 4.5]
    assert second.version == 2
    assert second.moved_norms == pytest.approx((math.sqrt(1.25), math.sqrt(0.75**2 + 0.25 + 0.25)))


def test_nesterov_by_hand() -> None:
    config = plain(lr=0.5, momentum=0.5, nesterov=True)
    first, _ = outer.step(config, outer.init(numbers(1, 2, 3)), numbers(1, 0, -2), 0)
    assert values(first.params) == [0.25, 2, 4.5]
    assert values(first.momentum) == [1, 0, -2]


def test_gap_is_one_plus_the_distance_moved_over_the_gradient() -> None:
    config = plain(gap_penalty=True)
    first, _ = outer.step(config, outer.init(numbers(0, 0, 0)), numbers(3, 0, 4), 0)
    second, report = outer.step(config, first, numbers(0, 5, 0), 0)
    assert report.gap == pytest.approx(2.0)
    assert values(second.params) == pytest.approx([-3, -2.5, -4])
    assert values(second.momentum) == pytest.approx([0, 2.5, 0])
    _, fresh = outer.step(config, first, numbers(0, 5, 0), 1)
    assert fresh.gap == 1.0
    _, without = outer.step(plain(), first, numbers(0, 5, 0), 0)
    assert without.gap == 1.0


def test_gap_beyond_the_remembered_steps_is_charged_at_their_average() -> None:
    config = plain(gap_penalty=True)
    state = outer.init(numbers(0))
    for version in range(6):
        state, _ = outer.step(config, state, numbers(1), version)
    assert state.moved_norms == (1.0,) * outer.MOVED_NORMS_KEPT
    _, report = outer.step(config, state, numbers(1), 0)
    assert report.gap == pytest.approx(1 + 6)


def test_a_zero_mean_has_no_gap() -> None:
    config = plain(gap_penalty=True)
    first, _ = outer.step(config, outer.init(numbers(0, 0)), numbers(1, 1), 0)
    assert outer.step(config, first, numbers(0, 0), 0)[1].gap == 1.0


def test_the_elementwise_clip_is_what_is_stored_and_what_is_applied() -> None:
    config = plain(clip="elementwise", clip_phi=1.5, momentum=0.5)
    state, report = outer.step(config, outer.init(numbers(0, 0, 0)), numbers(1, -4, 2), 0)
    assert values(state.momentum) == [1, -1.5, 1.5]
    assert values(state.params) == [-1, 1.5, -1.5]
    assert report.clipped_share == pytest.approx(2 / 3)
    assert report.momentum_norm == pytest.approx(math.sqrt(1 + 2 * 1.5**2))
    # Had the unclipped momentum been stored, the second value would be -2 here.
    state, _ = outer.step(config, state, numbers(0, 0, 0), 1)
    assert values(state.momentum) == [0.5, -0.75, 0.75]


def test_the_rms_clip_follows_the_running_mean_square() -> None:
    config = plain(clip="rms", clip_phi=1.0)
    state, report = outer.step(config, outer.init(numbers(0, 0)), numbers(1, 7), 0)
    assert state.mean_square == pytest.approx(25)
    assert values(state.momentum) == pytest.approx([1, 5])
    assert report.clipped_share == 0.5
    state, _ = outer.step(config, state, numbers(10, 0), 1)
    assert state.mean_square == pytest.approx(0.9 * 25 + 0.1 * 50)
    assert values(state.momentum) == pytest.approx([math.sqrt(27.5), 0])


def test_keep_lets_the_drift_since_the_snapshot_survive() -> None:
    old = outer.init(numbers(1, 1, 1))
    snapshot = numbers(2, 3, 4)
    new, _ = outer.step(PLAIN, old, numbers(-5, -5, -5), 0)
    merge = outer.merge(PLAIN, old, new, snapshot, [slice(1, 2)])
    live = merge.keep * (snapshot + 0.5) + merge.addend
    # Counted: new + drift since the snapshot. Missed: new + all drift since the old agreed parameters.
    assert values(live) == [6.5, 6 + 2.5, 6.5]
    assert values(outer.merge(PLAIN, old, new, None, []).addend) == [5, 5, 5]


def test_blend_and_its_fall_back_when_work_was_missed() -> None:
    config = plain(rule="blend", blend_alpha=0.25)
    old = outer.init(numbers(0, 0))
    new, _ = outer.step(config, old, numbers(-4, 8), 0)
    merge = outer.merge(config, old, new, numbers(1, 1), [])
    assert merge.keep == 0.25
    assert values(merge.addend) == [3, -6]
    missed = outer.merge(config, old, new, numbers(1, 1), [slice(0, 1)])
    assert missed.keep == 1.0
    assert values(missed.addend) == [4, -9]


def test_the_boundary_merge_overwrites_up_to_the_drift_since_its_snapshot() -> None:
    config = plain(rule="co2")
    new = outer.init(numbers(10, 20))
    lost = outer.lost_work_of(numbers(1, 2), [slice(0, 1)])
    merge = outer.boundary_merge(config, new, numbers(3, 4), lost, numbers(0.5, 0.25))
    live = merge.keep * numbers(3.125, 4.125) + merge.addend
    assert values(live) == [10 + 0.125 - 1 - 0.5, 20 + 0.125 - 0.25]
    assert outer.lost_work_of(numbers(1, 2), []) is None


def test_stability_warning_speaks_only_of_settings_that_diverge() -> None:
    wild = plain(rule="co2", lr=0.7, momentum=0.9)
    text = outer.stability_warning(wild, delayed=True)
    assert text is not None
    assert "outer.gap_penalty = true" in text
    for calm in (
        wild.model_copy(update={"gap_penalty": True}),
        wild.model_copy(update={"momentum": 0.5}),
        wild.model_copy(update={"rule": "keep"}),
    ):
        assert outer.stability_warning(calm, delayed=True) is None
    assert outer.stability_warning(wild, delayed=False) is None


# ---- against a reference


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_steps_equal_torch_sgd(nesterov: bool, beta: float) -> None:
    """Law 4: without delay the outer step is DiLoCo's."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(1000, generator=generator))
    reference = torch.optim.SGD([weight], lr=0.7, momentum=beta, nesterov=nesterov and beta > 0)
    config = plain(lr=0.7, momentum=beta, nesterov=nesterov)
    state = outer.init(weight)
    for version in range(5):
        weight.grad = torch.randn(1000, generator=generator)
        state, _ = outer.step(config, state, weight.grad.clone(), version)
        reference.step()
        torch.testing.assert_close(state.params, weight.detach(), rtol=1e-6, atol=1e-6)


def test_equal_peers_without_delay_are_diloco() -> None:
    """Law 4 for several peers: quadratic losses, plain SGD inside, torch's SGD with Nesterov outside."""
    targets = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.zeros(50))
    reference = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    config = plain(lr=0.7, momentum=0.9, nesterov=True)
    state = outer.init(torch.zeros(50))
    lives = [torch.zeros(50) for _ in targets]
    for version in range(8):
        theirs = [weight.detach().clone() for _ in targets]
        for peer, target in enumerate(targets):
            for _ in range(5):
                lives[peer] -= 0.1 * (lives[peer] - target)
                theirs[peer] -= 0.1 * (theirs[peer] - target)
        weight.grad = torch.stack([weight.detach() - one for one in theirs]).mean(0)
        reference.step()
        mean = torch.stack([outer.outer_gradient(state, live) for live in lives]).mean(0)
        new, _ = outer.step(config, state, mean, version)
        for peer, live in enumerate(lives):
            merge = outer.merge(config, state, new, live, [])
            lives[peer] = merge.keep * live + merge.addend
        state = new
        torch.testing.assert_close(state.params, weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e-20, 3e37])
def test_exact_norm_is_close_to_torchs(scale: float) -> None:
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(5)) * scale
    assert outer.exact_norm(tensor) == pytest.approx(float(tensor.double().norm()), rel=1e-5)


def test_exact_norm_at_its_edges() -> None:
    assert outer.exact_norm(torch.zeros(0)) == 0.0
    assert outer.exact_norm(torch.zeros(5)) == 0.0
    assert outer.exact_norm(numbers(3, -4)) == 5.0
    assert outer.exact_norm(numbers(-(2.0**-149))) == 2.0**-149
    assert outer.exact_norm(numbers(1, math.inf)) == math.inf
    assert outer.exact_norm(numbers(1, math.nan)) == math.inf
    # The worst case for the integer sum: every value at the top of the scale.
    assert outer.exact_norm(torch.full((1 << 19,), 1 - 2.0**-24)) == pytest.approx(math.sqrt(1 << 19))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_eager_correction_is_the_step_with_its_own_fresh_share(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    mean, fresh, stale, momentum, params = torch.randn(5, 64, generator=generator).unbind()
    config = plain(rule="eager", lr=0.7, momentum=0.6, nesterov=nesterov)
    state = outer.OuterState(1, params, momentum, 1.0, (0.1,))
    agreed, report = outer.step(config, state, mean, 0)
    own, _ = outer.step(config, state, mean + 0.25 * (fresh - stale), 0)
    correction = outer.eager_correction(config, report.gap, 0.25, fresh, stale)
    torch.testing.assert_close(agreed.params - correction, own.params, rtol=1e-5, atol=1e-6)


# ---- laws


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.randoms())
def test_exact_norm_has_no_order(items: list[float], random: Any) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)
    norm = outer.exact_norm(numbers(*items))
    assert norm == outer.exact_norm(numbers(*shuffled))
    assert norm == pytest.approx(float(numbers(*items).double().norm()), rel=1e-5)


def test_agreed_state_has_the_same_bits_whatever_the_number_of_threads() -> None:
    """Law 1, with everything on: gap, Nesterov, clipping."""
    config = OuterConfig(rule="co2", clip="rms", clip_phi=0.5)
    threads = torch.get_num_threads()
    ends = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        generator = torch.Generator().manual_seed(9)
        state = outer.init(torch.randn(100_003, generator=generator))
        for version in range(4):
            mean = torch.randn(100_003, generator=generator)
            state, _ = outer.step(config, state, mean, max(0, version - 1))
        ends.append(state)
    torch.set_num_threads(threads)
    for end in ends[1:]:
        assert torch.equal(end.params, ends[0].params)
        assert torch.equal(end.momentum, ends[0].momentum)
        assert (end.mean_square, end.moved_norms) == (ends[0].mean_square, ends[0].moved_norms)


@settings(max_examples=60)
@given(st.data())
def test_keep_counts_every_committed_drift_exactly_once(data: st.DataObject) -> None:
    """Law 2: any delay, abort, absence or partial arrival; integers, so that fp32 is exact and equality is
    equality."""
    peers, rounds, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), 6
    halves = [slice(0, 3), slice(3, 6)]
    state = outer.init(torch.zeros(size))
    lives = [torch.zeros(size) for _ in range(peers)]
    drifted = torch.zeros(peers, size)  # work since the last time it was counted, by our own books
    expected = torch.zeros(size)

    def train(peer: int) -> None:
        # Multiples of 12 divide exactly by the number of contributors, 1 to 4.
        drift = 12.0 * numbers(*data.draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size)))
        lives[peer] += drift
        drifted[peer] += drift

    for _ in range(rounds):
        for peer in range(peers):
            train(peer)
        offers = {peer: lives[peer].clone() for peer in range(peers) if data.draw(st.booleans())}
        offered = drifted.clone()
        for peer in range(peers):
            if data.draw(st.booleans()):
                train(peer)  # training goes on while the round is in flight
        if not offers or data.draw(st.booleans(), label="abort"):
            continue
        arrived = [[peer for peer in offers if data.draw(st.booleans())] for _ in halves]
        if not all(arrived):
            continue  # a part with no contributor aborts the round
        mean = torch.zeros(size)
        for part, contributors in zip(halves, arrived, strict=True):
            for peer in sorted(contributors):
                mean[part] += outer.outer_gradient(state, offers[peer])[part] / len(contributors)
                expected[part] += offered[peer][part] / len(contributors)
                drifted[peer][part] -= offered[peer][part]
        new, _ = outer.step(PLAIN, state, mean, state.version)
        for peer in range(peers):
            missed = [
                part for part, contributors in zip(halves, arrived, strict=True) if peer not in contributors
            ]
            merge = outer.merge(PLAIN, state, new, offers.get(peer), missed)
            lives[peer] = merge.keep * lives[peer] + merge.addend
        state = new
        torch.testing.assert_close(state.params, expected, rtol=0, atol=1e-3)
        for peer in range(peers):
            # What a peer would offer next is exactly what has not been counted yet.
            gradient = outer.outer_gradient(state, lives[peer])
            torch.testing.assert_close(gradient, -drifted[peer], rtol=0, atol=1e-3)


def test_one_peer_with_keep_is_plain_local_training() -> None:
    """Law 3, with the answer coming three inner steps late."""
    target = torch.randn(100, generator=torch.Generator().manual_seed(4))
    alone = live = torch.zeros(100)
    state = outer.init(live)
    offer: Tensor | None = None
    for inner_step in range(60):
        alone = alone - 0.05 * (alone - target)
        live = live - 0.05 * (live - target)
        if inner_step % 10 == 4:
            offer = live.clone()
        if inner_step % 10 == 7 and offer is not None:
            new, _ = outer.step(PLAIN, state, outer.outer_gradient(state, offer), state.version)
            merge = outer.merge(PLAIN, state, new, offer, [])
            live, state = merge.keep * live + merge.addend, new
    torch.testing.assert_close(live, alone, rtol=0, atol=1e-6)


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=2, max_size=12), st.booleans())
def test_co2_and_eager_lose_no_work_when_an_offer_is_not_counted(counted: list[bool], eager: bool) -> None:
    """One peer, lr 1: the agreed parameters end where the counted drifts add up to, late but each once."""
    config = plain(rule="eager" if eager else "co2")
    state = outer.init(torch.zeros(1))
    live = torch.zeros(1)
    flight: Tensor | None = None
    base_version = 0
    correction: Tensor | None = None
    total = 0.0
    for arrives in [*counted, True, True]:
        live = live + 1.0
        total += 1.0
        fresh = outer.outer_gradient(state, live, correction)
        new, lost, correction = state, None, None
        if flight is not None:
            if arrives:
                new, report = outer.step(config, state, flight, base_version)
            else:
                lost = outer.lost_work_of(flight, [slice(0, 1)])
            if eager and arrives:
                correction = outer.eager_correction(config, report.gap, 1.0, fresh, flight)
        merge = outer.boundary_merge(config, new, live, lost, correction)
        live = merge.keep * live + merge.addend
        flight, base_version, state = fresh, state.version, new
    assert flight is not None
    state, _ = outer.step(config, state, flight, base_version)  # the final flush
    assert float(state.params) == total


def contraction(config: OuterConfig, delta: float, rounds: int, delayed: bool) -> float:
    """|distance to the optimum| after ``rounds``, from 1: each round a peer walks the share ``delta`` of
    its way."""
    state = outer.init(numbers(1))
    flight: tuple[Tensor, int] | None = None
    for _ in range(rounds):
        gradient = (state.params * delta, state.version)
        apply = flight if delayed else gradient
        if apply is not None:
            state, _ = outer.step(config, state, *apply)
        flight = gradient
        if abs(float(state.params)) > 1e6:
            break
    return abs(float(state.params))


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 0.9])
def test_the_stability_bounds_of_the_linear_model(beta: float) -> None:
    config = plain(rule="co2", momentum=beta, lr=1.0)
    late = 1.0 - beta
    assert contraction(config, 0.9 * late, 800, delayed=True) < 0.1
    assert contraction(config, 1.1 * late, 800, delayed=True) > 10
    on_time = 2.0 * (1.0 + beta)
    assert contraction(config, 0.9 * on_time, 400, delayed=False) < 1e-3
    assert contraction(config, 1.1 * on_time, 400, delayed=False) > 10


def test_diloco_settings_under_a_naive_delay_diverge_and_the_gap_penalty_holds_them() -> None:
    naive = plain(rule="co2", lr=0.7, momentum=0.9, nesterov=True)
    assert contraction(naive, 0.30, 400, delayed=True) < 1.0
    assert contraction(naive, 0.45, 400, delayed=True) > 10
    assert contraction(naive.model_copy(update={"gap_penalty": True}), 0.45, 400, delayed=True) < 5


# ---- faults


def test_an_aborted_round_and_a_step_leave_the_old_state_as_it_was() -> None:
    """Law 5: what a round did not commit exists only in values that are dropped."""
    config = OuterConfig()
    state, _ = outer.step(config, outer.init(numbers(1, 2, 3)), numbers(1, 0, -2), 0)
    params, momentum = state.params.clone(), state.momentum.clone()
    mean, snapshot = numbers(5, 5, 5), numbers(0, 0, 0)
    new, _ = outer.step(config, state, mean, 0)
    outer.merge(config, state, new, snapshot, [slice(0, 2)])
    outer.outer_gradient(state, snapshot, mean)
    outer.boundary_merge(config.model_copy(update={"rule": "co2"}), new, snapshot, mean, mean)
    assert torch.equal(state.params, params)
    assert torch.equal(state.momentum, momentum)
    assert values(mean) == [5, 5, 5]
    assert values(snapshot) == [0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_mean_that_would_leave_fp32_is_refused_by_everybody_alike(bad: float) -> None:
    state = outer.init(numbers(-3e38, 1))
    with pytest.raises(RemoteProtocolError, match="not_finite"):
        outer.step(plain(momentum=0.5, nesterov=True), state, numbers(bad, 0), 0)
    assert state.version == 0


def test_our_own_mistakes_are_loud() -> None:
    state = outer.init(numbers(1, 2))
    with pytest.raises(LocalProtocolError, match="base version"):
        outer.step(PLAIN, state, numbers(1, 2), 1)
    with pytest.raises(LocalProtocolError, match="the state float32"):
        outer.step(PLAIN, state, numbers(1), 0)
    with pytest.raises(LocalProtocolError, match="the state float32"):
        outer.step(PLAIN, state, numbers(1, 2).double(), 0)
    with pytest.raises(LocalProtocolError, match="boundary_merge"):
        outer.merge(plain(rule="co2"), state, state, None, [])
    with pytest.raises(LocalProtocolError, match="use merge"):
        outer.boundary_merge(PLAIN, state, numbers(1, 2))
