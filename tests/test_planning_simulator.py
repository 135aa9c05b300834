"""planning.simulator: by hand where the answer is one line, then against the published table."""

from __future__ import annotations

import itertools

import pytest

from p2p_co2.planning.simulator import Job, bandwidth_grid, required_bandwidth, utilisation

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Streaming DiLoCo, arXiv 2501.18512, table 4: Gbit/s for each target, H = 100, 3 layers per fragment.
MODELS = {"1B": (1e9, 24, 0.1), "10B": (1e10, 48, 0.8), "100B": (1e11, 108, 4.9)}
TABLE = {
    "1B": {
        "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
        "overlapped 4-bit": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B": {
        "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
        "overlapped 4-bit": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100B": {
        "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
        "overlapped 4-bit": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}


def job_of(model: str, method: str) -> Job:
    parameters, layers, step_s = MODELS[model]
    streamed = layers // 3
    how = {
        "data-parallel": {},
        "diloco": {"round_steps": 100},
        "streaming": {"round_steps": 100, "fragments": streamed},
        "overlapped": {"round_steps": 100, "fragments": streamed, "delay_steps": 1},
        "overlapped 4-bit": {"round_steps": 100, "fragments": streamed, "delay_steps": 1},
    }[method]
    bits = 4 if "4-bit" in method else 16
    return Job(parameters=parameters, layers=layers, step_s=step_s, bits_per_value=bits, **how)


def printed(gbit_per_s: float) -> float:
    """As the table prints: two decimals first, then one, which is how 0.954 became 0.9 and 323.746 323.8."""
    return float(f"{round(gbit_per_s, 2):.1f}")


def test_two_steps_by_hand() -> None:
    # 2 layers, 5 pieces of 1 s each. Reductions take 1 s (1 value of 1 bit at 1 bit/s per layer).
    # Step 1: forward 1, 2; backward of layer 1 done at 4, of layer 0 at 5; reduced at 5 and at 6.
    # Step 2: layer 0 waits until 6, then 5 s of work to 11; its reductions end at 11 and 12.
    job = Job(parameters=2, layers=2, step_s=5.0, bits_per_value=1)
    assert utilisation(job, 1.0) == pytest.approx(10 / 12)


def test_a_channel_without_end_leaves_nothing_to_wait_for() -> None:
    assert utilisation(job_of("1B", "data-parallel"), 1e30) == pytest.approx(1.0)


def test_a_saturated_channel_sets_the_pace() -> None:
    job = job_of("1B", "overlapped")
    payload_s = job.parameters * job.bits_per_value / 1e6
    every = round(100 / 8)
    assert utilisation(job, 1e6) == pytest.approx(8 * every * job.step_s / payload_s, rel=0.01)


def test_more_peers_send_twice_the_payload_at_most() -> None:
    two, many = (Job(parameters=1e6, layers=4, step_s=0.1, bits_per_value=32, peers=n) for n in (2, 1000))
    assert utilisation(two, 1e8) == pytest.approx(utilisation(many, 2e8), rel=0.01)


@pytest.mark.parametrize("method", list(TABLE["1B"]))
def test_more_bandwidth_never_lowers_utilisation(method: str) -> None:
    for model in MODELS:
        curve = [utilisation(job_of(model, method), 1e9 * gbit) for gbit in bandwidth_grid()[::4]]
        assert all(later >= sooner - 1e-12 for sooner, later in itertools.pairwise(curve)), model


def test_the_published_table_is_reproduced() -> None:
    grid = bandwidth_grid()
    exact, far = 0, []
    for model, rows in TABLE.items():
        for method, row in rows.items():
            for target, published in zip(TARGETS, row, strict=True):
                ours = required_bandwidth(job_of(model, method), target)
                assert ours is not None
                at = min(range(len(grid)), key=lambda i: abs(printed(grid[i]) - published))
                assert printed(grid[at]) == published, "the table is not on this grid"
                exact += printed(ours) == published
                if abs(grid.index(ours) - at) > 1:
                    far.append((model, method, target, ours, published))
    assert exact == 70
    assert not far
