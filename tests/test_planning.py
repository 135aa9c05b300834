"""planning: by hand, against the codecs and a round of the real machines, laws that advice keeps; and the
command, from a run file to a table, to JSON and to a picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from round_network import Faults, Network

from bootstrap.options import PlanOptions
from bootstrap.plan.plan import as_table, make_plan, print_plan, read_links, run_plan, verdict
from bootstrap.plan.stages import COPIES, make_staged_plan, print_staged_plan
from bootstrap.plan.stages import as_table as staged_table
from bootstrap.plan.step import quickest
from p2p_co2.codec_specs import SPECS
from p2p_co2.config import ApplyRule, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning import exchange, traffic
from p2p_co2.planning.advice import advise, bounds_of
from p2p_co2.planning.exchange import LinkFigures, RoundTime, flow, link_of, round_time
from p2p_co2.planning.forecast import (
    COPY_BYTES_PER_S,
    GPU_PROCESS_BYTES,
    NETWORK_BYTES,
    SETTLE_S,
    STEP_OVERHEAD_S,
    Setting,
    even_fragments,
    forecast,
    setting_of,
)
from p2p_co2.planning.memory import TRAIN_BYTES, MachineMemory, needed_bytes, plan_memory
from p2p_co2.planning.pipeline import StageCost, loads_of
from p2p_co2.planning.profiles import MIX_SHARES, PROFILES, LinkProfile, profile_of
from p2p_co2.planning.simulator import Job, utilisation
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.recipes import load_recipe
from p2p_co2.simnet.microbatches import Layout, StageVolunteer
from p2p_co2.simnet.stage_forecast import StagedSetting, cheapest_change, forecast_stages
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.stages.peer import AGREED_COPIES, TRAINED_COPIES
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope
from tests.envelopes import enveloped

# ---- the arithmetic

GRID = [10 ** (-1.0 + 4.0 / 49 * point) for point in range(50)]
"""The published table's bandwidths, Gbit/s."""
FAST = LinkFigures(up_bytes_per_s=1e9, down_bytes_per_s=1e9)


def setting(**changes: object) -> Setting:
    base = Setting(
        fragments=even_fragments(1_000_000, 4), codec="int4", rule="keep", round_s=10.0, rounds=0, step_s=0.5,
        links=(FAST,) * 4, tokens_per_step=100,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def plain_time(transfer_s: float, rest_s: float = 0.0) -> RoundTime:
    return RoundTime(floor_s=transfer_s, transfer_s=transfer_s, latency_s=rest_s, compute_s=0.0)


# ---- bytes


@pytest.mark.parametrize("name", list(SPECS))
def test_payloads_are_as_large_as_the_codec_makes_them(name: str) -> None:
    codec = get_codec(name)
    for values in (1, 127, 128, 129, 1_000_001):
        assert SPECS[name].payload_bytes(values) == codec.payload_bytes(values)


@pytest.mark.parametrize(("peers", "blocks"), [(2, 64), (4, 3000), (7, 40_000)])
def test_a_round_of_the_real_machines_sends_what_is_foretold(peers: int, blocks: int) -> None:
    world = Network(peers, seed=3, shape=PayloadShape(68, (blocks,)))
    world.offer_all(spread_s=0.0)
    world.run_until_settled()
    assert len(world.committed()) == peers
    head = Envelope(version=PROTOCOL_VERSION, run=bytes(32)).SerializeToString()
    total = sum(len(enveloped(message, head)) for source, to, message in world.sent if source != to)
    payload = blocks * 68
    expected = 2 * (1 - 1 / peers) * payload + traffic.round_control_bytes(peers, payload)
    assert total / peers == pytest.approx(expected, rel=0.02)


def test_a_round_of_the_real_machines_takes_the_messages_one_way_that_are_counted() -> None:
    one_way_s = 0.1
    world = Network(4, faults=Faults(latency_s=(one_way_s, one_way_s)))
    world.reduce_s, began_at = 0.0, world.now
    world.offer_all(spread_s=0.0)
    world.run_until_settled()
    assert len(world.committed()) == 4
    assert world.now - began_at == pytest.approx(exchange.ONE_WAY_MESSAGES * one_way_s)


def test_slices_and_means_are_the_published_traffic_whatever_the_shares() -> None:
    shares = traffic.shares_of([1e6, 2e6, 5e6])
    # The fastest may own two of three equal shares; the second needs (1 / 3 + 1) / 2 for the third one. In
    # 1.5 times that the links have 0, 1 and 4 payloads left, of which the 4 are too many.
    assert shares == pytest.approx([0, 1 / 3, 2 / 3], abs=1e-5)
    sums = [
        sum(column) for column in zip(*(traffic.sent_and_received(800, s, 3) for s in shares), strict=True)
    ]
    # Over all peers each way: (M - 1) slices' worth of payload, and as much again of means.
    assert sums == pytest.approx([1600, 1600, 1600, 1600])


# ---- one round


def test_the_floor_is_the_one_of_the_documents() -> None:
    home = LinkFigures(up_bytes_per_s=20e6 / 8, down_bytes_per_s=100e6 / 8)
    many = [home] * 1000  # 1 - 1/M is nearly 1
    assert exchange.floor_s(100e6 * 4 / 8, many) == pytest.approx(40, rel=0.01)
    assert exchange.floor_s(1e9 * 4 / 8, many) == pytest.approx(400, rel=0.01)


def test_a_round_by_hand() -> None:
    link = LinkFigures(up_bytes_per_s=1e5, down_bytes_per_s=1e9, round_trip_s=0.1)
    time = round_time(6_800_000, 12_800_000, 3.0, [link, link])
    sent = 3_400_000 + traffic.round_control_bytes(2, 6_800_000) / 2
    assert time.transfer_s == pytest.approx(2 * 1.04 * sent / (0.85 * 1e5))
    assert time.limited_by == "upload"
    # 0.1 s times 0.85e5 bytes per s are less than the first window: no slow start to wait for.
    # Of five messages one way, the slices' way is hidden: the first means travel beside the last of them.
    assert time.latency_s == pytest.approx(4 * 0.05)
    assert round_time(68_000, 128_000, 3.0, [link, link]).latency_s == pytest.approx(5 * 0.05)
    assert (time.gather_s, time.spread_s) == pytest.approx((3.0 * (2 / 3 - 1 / 2), 3.0 / 3))
    assert time.compute_s == pytest.approx(4 * 12_800_000 / 270e6)
    assert time.to_apply_s > time.transfer_s > time.floor_s == pytest.approx(68.0)


def test_what_limits_a_transfer_is_named() -> None:
    slow_down = LinkFigures(up_bytes_per_s=1e9, down_bytes_per_s=1e5)
    lossy = LinkFigures(up_bytes_per_s=1e9, down_bytes_per_s=1e9, round_trip_s=0.1, loss=0.01)
    assert round_time(10**6, 10**6, 0.1, [slow_down] * 3).limited_by == "download"
    limited = round_time(10**6, 10**6, 0.1, [lossy] * 2)
    assert limited.limited_by == "loss"
    # One connection each way: 1448 * 1.22 / (0.1 * sqrt(0.01)) bytes per s (Mathis et al. 1997).
    assert limited.transfer_s == pytest.approx(1.04 * 10**6 / (1448 * 1.22 / 0.01), rel=0.01)


# ---- rounds after rounds


def test_with_time_to_spare_a_delay_is_that_of_the_round_alone() -> None:
    alone = plain_time(0.2, rest_s=0.3)
    shown = flow([alone] * 4, round_s=1.0)
    assert (shown.to_apply_s, shown.slowest_s) == pytest.approx((0.5, 0.5))
    assert (shown.staleness, shown.sent_share) == (0, 1)


def test_a_link_that_lacks_a_little_is_used_whole() -> None:
    """Where every second point was made up only by the next one, half of the rounds were lost."""
    shown = flow([plain_time(1.1, rest_s=0.02)], round_s=1.0)
    assert shown.sent_share == pytest.approx(1 / 1.12, abs=0.04)
    several = flow([plain_time(0.275, rest_s=0.02)] * 4, round_s=1.0)
    assert several.sent_share == pytest.approx(1 / 1.1, abs=0.03)


# ---- a run


def test_a_runs_figures_by_hand() -> None:
    run = setting(rounds=20, round_s=10.0)
    shown = forecast(run)
    time = round_time(SPECS["int4"].payload_bytes(250_000), 250_000, 0.5, run.links)
    per_round = 4 * (
        2 * 0.75 * SPECS["int4"].payload_bytes(250_000) + traffic.round_control_bytes(4, 132_812)
    )
    assert shown.up_bytes_per_round == pytest.approx(
        per_round + 10 * traffic.heartbeat_bytes_per_s(4, 4), rel=1e-3
    )
    # Every fragment has one round in each of 20, and but for the first to be sent one more at the end.
    assert shown.run_up_bytes == pytest.approx(shown.up_bytes_per_round * (20 + 3 / 4))
    steady_s = 20 * (8e6 / COPY_BYTES_PER_S + 20 * STEP_OVERHEAD_S)
    assert shown.flow.left_s == 0.0
    last_s = 4 * time.transfer_s + time.spread_s + 2 * (time.latency_s + time.compute_s) + SETTLE_S
    assert shown.utilisation == pytest.approx(1 - (steady_s + last_s) / (200 + last_s))
    assert shown.run_tokens == pytest.approx(4 * 100 * (200 - steady_s - last_s) / 0.5)
    assert (shown.run_s, shown.endless, shown.delay_steps) == (200, False, 1)
    assert shown.memory_bytes == pytest.approx(NETWORK_BYTES + 4e6 * shown.exchange_copies)


def test_with_a_gpu_training_lies_there_and_what_is_agreed_in_host_memory() -> None:
    on_host, split = setting(train_bytes=16e6), setting(train_bytes=16e6, on_gpu=True)
    alone, shown = forecast(on_host), forecast(split)
    assert alone.gpu_bytes == 0
    assert alone.memory_bytes == pytest.approx(16e6 + NETWORK_BYTES + 4e6 * alone.exchange_copies)
    assert shown.memory_bytes == pytest.approx(
        GPU_PROCESS_BYTES + NETWORK_BYTES + 4e6 * shown.exchange_copies
    )
    # Parameters, gradients, two moments; one copy while the agreed ones are measured; a fragment on its way.
    assert shown.gpu_bytes == pytest.approx(4 * 4e6 + 4e6 + 1e6)


@pytest.mark.parametrize(("parameters", "least_gb", "most_gb"), [(10**9, 12, 20), (7 * 10**9, 87, 140)])
@pytest.mark.parametrize("codec", ["int4", "int8", "fp16"])
@pytest.mark.parametrize("rule", ["keep", "co2", "eager"])
def test_the_host_of_a_gpu_holds_three_to_five_copies_of_a_large_model(
    parameters: int, least_gb: float, most_gb: float, codec: str, rule: ApplyRule
) -> None:
    run = setting(
        fragments=even_fragments(parameters, 8), codec=codec, rule=rule, on_gpu=True, rounds=100,
        round_s=600.0, train_bytes=TRAIN_BYTES * parameters,
    )  # fmt: skip
    host = forecast(run).memory_bytes
    assert 0.9 * least_gb < host / 1e9 < most_gb
    small = MachineMemory(host_bytes=8e9, gpu_bytes=80e9, how="given")
    planned = plan_memory(run, forecast(run), small)
    assert f"needs {host / 1e9:.3g} GB of host memory, and 8 GB are there" in planned.troubles[0]
    assert "agreed parameters lie in host memory beside a GPU, too" in planned.troubles[0]


@pytest.mark.parametrize(
    ("host_gb", "gpu_gb", "limited_by"),
    [(16.0, None, "host memory"), (16.0, 80.0, "host memory"), (64.0, 8.0, "GPU memory")],
)
def test_the_largest_model_fits_and_one_of_a_tenth_more_does_not(
    host_gb: float, gpu_gb: float | None, limited_by: str
) -> None:
    run = setting(on_gpu=gpu_gb is not None)
    room = MachineMemory(
        host_bytes=1e9 * host_gb, gpu_bytes=None if gpu_gb is None else 1e9 * gpu_gb, how="given"
    )
    planned = plan_memory(run, forecast(run), room)
    assert (planned.limited_by, planned.troubles) == (limited_by, ())
    has = 1e9 * (host_gb if limited_by == "host memory" else gpu_gb or 0.0)
    most = planned.largest_parameters
    assert needed_bytes(run, most)[limited_by] <= has < needed_bytes(run, most + most // 10)[limited_by]
    # By hand: a parameter takes its training and the exchange's copies of four bytes.
    copies = forecast(setting(fragments=even_fragments(most, 4))).exchange_copies
    each = {"GPU memory": 16 + 4 + 1.0, "host memory": 4 * copies + 16 * (gpu_gb is None)}[limited_by]
    base = (NETWORK_BYTES + GPU_PROCESS_BYTES * (gpu_gb is not None)) * (limited_by == "host memory")
    assert most == pytest.approx((has - base) / each, rel=0.05)


def test_a_machine_that_bears_nothing_and_one_that_is_not_known_are_told_apart() -> None:
    run = setting(on_gpu=True)
    tiny = plan_memory(run, forecast(run), MachineMemory(host_bytes=1e6, gpu_bytes=0.0, how="given"))
    assert (tiny.largest_parameters, tiny.limited_by, len(tiny.troubles)) == (0, "host memory", 1)
    unknown = plan_memory(run, forecast(run), MachineMemory(host_bytes=0.0, gpu_bytes=0.0, how="not known"))
    assert (unknown.largest_parameters, unknown.limited_by, unknown.troubles) == (0, "", ())


def test_memory_grows_with_what_the_rule_and_error_feedback_keep() -> None:
    def copies(**changed: Any) -> float:
        return forecast(setting(rounds=20, **changed)).exchange_copies

    payload = 4 * SPECS["int4"].payload_bytes(250_000) / 4e6
    plain = 2 + payload + 0.5 * (0.5 + 3 * payload) + 3 * 0.25  # two of four fragments open at the end
    assert copies() == pytest.approx(plain)
    assert copies(rule="co2") == pytest.approx(plain - 0.5 * 0.375)
    assert copies(rule="eager") == pytest.approx(plain - 0.5 * 0.5 + 0.25)
    assert copies(error_feedback=True) == pytest.approx(plain - 0.5 * 0.375 + 0.125)
    assert copies(codec="fp16") == pytest.approx(3.75, abs=1e-3)  # but for the last blocks
    plain = 2 + 0.5 + 0.5 * 3 + 3 * 0.25  # fp32 loses nothing, so nothing is kept of that
    for changed in ({}, {"rule": "co2"}, {"error_feedback": True}):
        assert copies(codec="fp32", **changed) == pytest.approx(plain, abs=1e-2)
    assert copies(codec="fp32", rule="eager") == pytest.approx(plain + 2, abs=1e-2)


def test_a_run_that_cannot_commit_is_said_to_be_one() -> None:
    satellite = (link_of(PROFILES["satellite"]),) * 4
    seven_billion = even_fragments(7_000_000_000, 1)
    huge = forecast(setting(fragments=seven_billion, round_s=600.0, links=satellite))
    assert "none would commit" in huge.troubles[0]
    patient = forecast(setting(fragments=seven_billion, round_s=36_000.0, links=satellite))
    assert not any("none would commit" in trouble for trouble in patient.troubles)  # it waits as long
    assert "peers wait 30 s" in forecast(setting(step_s=45.0, round_s=600.0)).troubles[0]
    assert "less than one inner step" in forecast(setting(round_s=1.0)).troubles[-1]


def test_a_setting_is_read_from_a_run_file() -> None:
    run = RunConfig.model_validate(
        {"clock": {"mode": "steps", "inner_steps_per_round": 40, "rounds": 9}, "group_size": 2}
    )
    slow = LinkFigures(up_bytes_per_s=1.0, down_bytes_per_s=1.0)
    read = setting_of(run, (10, 20), 0.5, [FAST, slow, FAST])
    assert (read.round_s, read.rounds, read.parameters) == (20.0, 9, 30)
    assert read.links == (slow, FAST)


# ---- advice


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({"links": (LinkFigures(up_bytes_per_s=1e5, down_bytes_per_s=1e9),) * 4}, "upload"),
        ({"links": (LinkFigures(up_bytes_per_s=1e9, down_bytes_per_s=1e5),) * 4}, "download"),
        ({"links": (replace(FAST, round_trip_s=0.2, loss=0.05),) * 4}, "loss"),
        ({"links": (replace(FAST, round_trip_s=5.0),) * 4}, "latency"),
        ({"step_s": 30.0, "round_s": 300.0}, "inner step"),
        ({"fragments": even_fragments(10**9, 4), "links": (FAST,) * 2}, "copies"),
        (
            {"rounds": 1, "round_s": 2.0, "step_s": 0.1, "fragments": (10**5,), "blocking_rounds": 3},
            "first and last rounds",
        ),
    ],
)
def test_the_constraint_that_binds_is_named(changes: dict[str, object], binding: str) -> None:
    assert advise(setting(**changes), 0.95).binding == binding


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("codec", ["int4", "fp32"])
@pytest.mark.parametrize("parameters", [10**6, 10**8])
def test_advice_keeps_its_promise(profile: str, codec: str, parameters: int) -> None:
    given = setting(
        fragments=even_fragments(parameters, 4), codec=codec, links=(link_of(PROFILES[profile]),) * 4,
        round_s=1.0, rounds=100,
    )  # fmt: skip
    advice = advise(given, 0.9)
    assert advice.forecast.utilisation >= 0.9
    assert advice.forecast.utilisation_if_waiting >= 0.9
    assert advice.forecast.flow.staleness < 1
    assert not advice.forecast.troubles
    assert max(bounds_of(advice.setting, 0.9).values()) <= advice.setting.round_s
    assert advice.inner_steps >= len(advice.setting.fragments)


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
    return Job(
        parameters=parameters, layers=layers, step_s=step_s, bits_per_value=4 if "4-bit" in method else 16,
        round_steps=1 if method == "data-parallel" else 100, delay_steps=int("overlapped" in method),
        fragments=1 if method in {"data-parallel", "diloco"} else layers // 3,
    )  # fmt: skip


def printed(gbit_per_s: float) -> float:
    """As the table prints: two decimals first, then one, which is how 0.954 became 0.9 and 323.746 323.8."""
    return float(f"{round(gbit_per_s, 2):.1f}")


def test_the_published_table_is_reproduced() -> None:
    exact, far = 0, []
    for model, rows in TABLE.items():
        for method, row in rows.items():
            busy = [utilisation(job_of(model, method), 1e9 * rate) for rate in GRID]
            for target, published in zip(TARGETS, row, strict=True):
                ours = max(rate for rate, share in zip(GRID, busy, strict=True) if share < target)
                at = min(range(len(GRID)), key=lambda i: abs(printed(GRID[i]) - published))
                assert printed(GRID[at]) == published, "the table is not on this GRID"
                exact += printed(ours) == published
                if abs(GRID.index(ours) - at) > 1:
                    far.append((model, method, target, ours, published))
    assert exact == 70
    assert not far


def test_every_link_is_possible_and_no_uplink_beats_its_downlink() -> None:
    for name, profile in PROFILES.items():
        assert name == profile.name
        assert 0 < profile.up_bits_per_s <= profile.down_bits_per_s
        assert 0 <= profile.loss < 1
        assert 0 <= 3 * profile.jitter_ms <= profile.latency_ms, "jitter must not send packets back in time"


def test_the_mixture_is_drawn_from_seed_and_index_alone() -> None:
    assert sum(MIX_SHARES.values()) == pytest.approx(1.0)
    drawn = [profile_of("home-mix", 7, index) for index in range(2000)]
    assert drawn == [profile_of("home-mix", 7, index) for index in range(2000)]
    assert drawn != [profile_of("home-mix", 8, index) for index in range(2000)]
    counts = Counter(profile.name for profile in drawn)
    for name, share in MIX_SHARES.items():
        assert abs(counts[name] / 2000 - share) < 0.035


# ---- the command

ROOT = Path(__file__).resolve().parent.parent
RUN = """
name = "small"
fragments = 2
[recipe_options]
layers = 1
width = 16
heads = 2
context = 8
[clock]
round_s = 4.0
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def options(path: Path, **changes: object) -> PlanOptions:
    slow = PlanOptions(run_file=path, parameters=10**8, step_s=0.5, up_mbit=20, down_mbit=100, rtt_ms=80)
    return replace(slow, **changes)  # type: ignore[arg-type]


def links_of(**given: Any) -> tuple[tuple[LinkFigures, ...], str]:
    return read_links(PlanOptions(run_file=Path(), **given), 0)


def test_the_model_is_counted_and_its_step_measured(run_file: Path) -> None:
    plan = make_plan(PlanOptions(run_file=run_file, threads=1, batch=128))  # steps of others' time slices
    recipe = load_recipe("byte-gpt", plan.run.recipe_options, 0)
    assert plan.setting.parameters == sum(p.numel() for p in recipe.model.parameters())
    assert len(plan.setting.fragments) == 2
    assert plan.setting.tokens_per_step == 128 * 8
    assert 0 < plan.setting.step_s < 1
    assert plan.setting.train_bytes > 50e6  # torch alone is more
    assert "quickest tenth" in plan.sources["step"]


def test_a_step_is_the_quickest_tenth_and_no_figure_where_times_say_nothing() -> None:
    assert quickest([3.0, 1.0, 1.1, 1.2, 1.3]) == 1.0
    assert quickest([9.0, *(1.0 + 0.01 * turn for turn in range(20))]) == pytest.approx(1.02)
    assert quickest([22.0, 40.0]) == 22.0
    for times_s in ([3.55, 0.08], [1.0] * 4, [0.08, 3.5, 3.6, 3.7, 3.8], [55.0, 6.0], [75.0]):
        with pytest.raises(EnvironmentFault, match=r"not measurable now \(.*give --step-s"):
            quickest(times_s)


def test_what_is_given_is_not_measured_and_needs_no_torch(run_file: Path) -> None:
    script = (
        "import sys\nfrom p2p_co2.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print(sorted({'torch', 'hivemind', 'grpc', 'matplotlib'} & set(sys.modules)))"
    )
    arguments = ["plan", str(run_file), "--parameters", "100000000", "--step-s", "0.5", "--json"]
    said = subprocess.check_output([sys.executable, "-c", script, *arguments], cwd=ROOT, text=True)
    table, modules = said.rsplit("\n", 2)[:2]
    assert modules == "[]"
    assert json.loads(table)["given"]["setting"]["parameters"] == 10**8


def test_the_table_says_what_binds_and_what_to_write(run_file: Path) -> None:
    text = StringIO()
    print_plan(make_plan(options(run_file)), Console(file=text, width=200))
    shown = " ".join(text.getvalue().split())
    assert shown.startswith("no: peers compute for ")
    for words in ("95% asked for; what binds is upload", "clock.round_s = ", "sends are left out"):
        assert words in shown


@pytest.mark.parametrize(("up_mbit", "word", "status"), [(0.5, "no", 1), (1000.0, "yes", 0)])
def test_the_verdict_comes_first_and_a_check_exits_by_it(
    run_file: Path, up_mbit: float, word: str, status: int
) -> None:
    asked = options(run_file, parameters=10**7, up_mbit=up_mbit, down_mbit=10 * up_mbit)
    plan, text = make_plan(asked), StringIO()
    print_plan(plan, Console(file=text, width=200))
    assert text.getvalue().startswith(f"{word}: peers compute for ")
    assert ("advised" in text.getvalue()) == (word == "no")
    said: list[str] = []
    assert run_plan(asked, said.append, is_brief=True) == 0
    assert run_plan(replace(asked, check=True), said.append, is_brief=True) == status
    assert said == [verdict(plan)] * 2
    assert as_table(plan)["verdict"] == verdict(plan)


def test_the_plan_lays_the_model_beside_the_machine_that_is_given(run_file: Path) -> None:
    run_file.write_text(RUN.replace("round_s = 4.0", "round_s = 600.0"))
    billion = options(run_file, parameters=10**9, memory_gb=8, gpu_memory_gb=24)
    plan, text = make_plan(billion), StringIO()
    print_plan(plan, Console(file=text, width=200))
    shown = " ".join(text.getvalue().split())
    assert "memory: a peer needs" in shown
    assert "a fragment exchange " in shown
    assert "of host memory, and 8 GB are there" in shown
    assert "8 GB of host memory (given) and 24 GB of GPU memory: up to" in shown
    assert "by host memory" in shown
    table = as_table(plan)["memory"]
    assert table["room"] == {"host_bytes": 8e9, "gpu_bytes": 24e9, "how": "given", "is_given": True}
    assert table["gpu_bytes"] == plan.forecast.gpu_bytes
    fast = replace(billion, up_mbit=10_000, down_mbit=10_000, rtt_ms=1, target=0.5, check=True)
    said: list[str] = []
    assert run_plan(fast, said.append, is_brief=True) == 1
    assert re.match(
        r"no: peers compute .* but a peer needs .* GB of host memory, and 8 GB are there", said[0]
    )
    assert run_plan(replace(fast, memory_gb=64), said.append, is_brief=True) == 0
    here = make_plan(options(run_file)).memory
    assert here.room.how == "free on this machine"
    assert here.room.gpu_bytes is None
    assert here.largest_parameters > 0


def test_of_more_peers_than_a_run_may_have_the_plan_says_which_it_is_of(run_file: Path) -> None:
    run_file.write_text("group_size = 8" + RUN)
    plan = make_plan(options(run_file, peers=10))
    assert len(plan.setting.links) == 8
    assert "of 10 peers the slowest 8, all that may come" in plan.sources["links"]


@pytest.mark.parametrize("mode", ["time", "steps"])
def test_advice_is_in_the_words_of_the_runs_clock(run_file: Path, mode: str) -> None:
    run_file.write_text(RUN + f'mode = "{mode}"\n')
    text = StringIO()
    print_plan(make_plan(options(run_file)), Console(file=text, width=200))
    assert ("clock.inner_steps_per_round = " in text.getvalue()) == (mode == "steps")


def test_a_picture_is_drawn(run_file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert run_plan(options(run_file, plot=tmp_path / "plan.png", as_json=True), said.append) == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "plan.png").stat().st_size > 20_000


# ---- links


def test_links_by_profile_figures_and_measurement(tmp_path: Path) -> None:
    cable, words = links_of(profile="cable", peers=3)
    assert len(cable) == 3
    assert cable[0].up_bytes_per_s == 5e6
    assert "cable" in words
    (given,), _ = links_of(up_mbit=8, rtt_ms=50, loss=0.01, peers=1)
    assert given == LinkFigures(up_bytes_per_s=1e6, down_bytes_per_s=1e7, round_trip_s=0.05, loss=0.01)
    path = tmp_path / "link.json"
    path.write_text(
        json.dumps({"link": {"up_bytes_per_s": 5.0, "down_bytes_per_s": 6.0, "round_trip_s": 0.5}})
    )
    (measured,), words = links_of(link=path, peers=1)
    assert (measured.up_bytes_per_s, measured.down_bytes_per_s, measured.round_trip_s) == (5.0, 6.0, 0.5)
    assert "measured" in words
    assert "assumed" in links_of()[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json", "not JSON"),
        ("[]", "link: missing"),
        ('{"link": {"up_bytes_per_s": null}}', "link.up_bytes_per_s: was not"),
        ('{"link": {"up_bytes_per_s": true}}', "link.up_bytes_per_s: was not"),
        ('{"link": {"up_bytes_per_s": 1e-308}}', "link.up_bytes_per_s: was not"),
        ('{"link": {"up_bytes_per_s": 1, "down_bytes_per_s": -1}}', "link.down_bytes_per_s"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_measurement_that_is_none_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        links_of(link=path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": 0}, "--peers"),
        ({"peers": 10**9}, r"--peers: 1 to 64 \(got 1000000000\)"),
        ({"target": 1.0}, "--target"),
        ({"target": float("nan")}, "--target"),
        ({"step_s": -1.0}, "--step-s"),
        ({"step_s": float("nan")}, "--step-s"),
        ({"parameters": -1}, "--parameters"),
        ({"hours": 0.0}, "--hours"),
        ({"up_mbit": 0, "down_mbit": 0, "rtt_ms": 0, "profile": "pigeon"}, "'pigeon'"),
        ({"up_mbit": -1.0}, "--up-mbit"),
        ({"up_mbit": 0, "down_mbit": 0}, "--up-mbit"),
        ({"loss": 1.5}, "--loss"),
        ({"profile": "dsl"}, "not several"),
        ({"run_file": Path("no.toml")}, "no such file"),
        ({"step_s": 0.0, "device": "abacus"}, "--device"),
    ],
)
def test_impossible_options_are_refused_by_name(
    run_file: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(options(run_file, **changes))


# ---- stages


def staged(
    counts: tuple[int, ...] = (1, 1), microbatches: int = 32, up_bits_per_s: int = 8 * 10**12
) -> StagedSetting:
    line = LinkProfile("line", up_bits_per_s, 8 * 10**12, 0.0, 0.0, 0.0, "open")
    loads = loads_of(stage_costs(len(counts)), "int8", "int8")
    peers = tuple((StageVolunteer(line),) * count for count in counts)
    return StagedSetting(Layout(stages=loads, microbatches=microbatches, tokens=64), peers)


def stage_costs(stages: int) -> list[StageCost]:
    return [
        StageCost(forward_s=0.01, backward_s=0.02, values=128_000 if stage + 1 < stages else 0)
        for stage in range(stages)
    ]


def test_a_chain_takes_the_time_of_a_flow_shop() -> None:
    """By hand: 31 times 0.03 s, and once through both stages: 0.06."""
    shown = forecast_stages(staged())
    assert shown.step_s == pytest.approx(31 * 0.03 + 0.06, rel=0.05)
    assert shown.tokens_per_s == pytest.approx(32 * 64 / shown.step_s)
    assert shown.binding == "computing"


def test_bytes_of_a_hop_are_those_of_its_codecs() -> None:
    first, middle, last = loads_of(stage_costs(3), "bf16", "int4")
    assert (first.ahead_bytes, first.back_bytes) == (256_000, 0)
    assert (middle.ahead_bytes, middle.back_bytes) == (256_000, 128_000 * 68 // 128)
    assert (last.ahead_bytes, last.back_bytes) == (0, middle.back_bytes)


def test_a_middle_stage_sends_both_ways_on_one_uplink() -> None:
    shown = forecast_stages(staged((1, 1, 1), up_bits_per_s=8_000_000))
    assert shown.binding == "uplink"
    assert shown.bottleneck == 1
    assert shown.stages[1].uplink_s == pytest.approx(traffic.LINK_OVERHEAD * 2 * 132_000 / 1e6)
    assert shown.microbatches_per_s == pytest.approx(1 / shown.stages[1].uplink_s, rel=0.1)


def test_more_microbatches_drain_less_and_the_advice_says_so() -> None:
    short = staged((1, 1, 1), microbatches=4)
    assert forecast_stages(short).binding == "drain"
    change = cheapest_change(stage_costs(3), short, "int8", "int8")
    assert change is not None
    assert change.words == "pipeline.microbatches = 8"
    assert change.forecast.tokens_per_s > 1.1 * forecast_stages(short).tokens_per_s


def test_a_long_way_is_named_where_the_window_is_full() -> None:
    line = LinkProfile("line", 8 * 10**12, 8 * 10**12, 400.0, 0.0, 0.0, "open")
    setting = staged(microbatches=64)._replace(peers=((StageVolunteer(line),),) * 2)
    assert forecast_stages(setting).binding == "latency"


def test_fewer_bits_are_advised_where_the_uplink_binds() -> None:
    setting = staged(up_bits_per_s=8_000_000)
    loads = loads_of(stage_costs(2), "bf16", "bf16")
    setting = setting._replace(layout=replace(setting.layout, stages=loads))
    change = cheapest_change(stage_costs(2), setting, "bf16", "bf16")
    assert change is not None
    assert change.words == 'pipeline.forward = "int8", pipeline.backward = "int8"'
    gain = change.forecast.tokens_per_s / forecast_stages(setting).tokens_per_s
    assert gain == pytest.approx(256 / 132, rel=0.1)


STAGED = (
    'name = "staged"\n[clock]\nround_s = 30.0\n[pipeline]\nstages = 2\nmicrobatches = 32\nsequences = 8\n'
)


@pytest.fixture
def staged_file(tmp_path: Path) -> Path:
    path = tmp_path / "staged.toml"
    path.write_text(STAGED)
    return path


def test_a_run_with_stages_is_planned_by_stage(staged_file: Path) -> None:
    plan = make_staged_plan(PlanOptions(run_file=staged_file, step_s=1.664))
    table = json.loads(json.dumps(staged_table(plan)))
    first, last = table["stages"]
    assert first["ahead_bytes"] == 84_480 + 8 * 8 * 64  # int8 of 8 x 64 x 160 values, and the targets
    assert (first["back_bytes"], last["ahead_bytes"], last["back_bytes"]) == (0, 0, 84_480)
    assert first["replicas"] == last["replicas"] == 2
    assert first["memory_bytes"] > 4 * COPIES * first["parameters"]
    assert COPIES == TRAINED_COPIES + AGREED_COPIES
    assert 0 < table["utilisation"] <= 1
    console = Console(file=StringIO(), width=140)
    print_staged_plan(plan, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "stage 1" in shown
    assert "What binds:" in shown


def test_what_peers_would_refuse_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[pipeline]\nstages = 2\nbackward_critical = "rank500"\n')
    with pytest.raises(ConfigError, match=r"backward_critical: rank 500 is more than .*; use at most rank64"):
        make_staged_plan(PlanOptions(run_file=path, step_s=1.0))


def test_too_few_peers_and_what_stages_do_not_take_are_refused(staged_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--peers: 2 stages need a peer each"):
        make_staged_plan(PlanOptions(run_file=staged_file, step_s=1.0, peers=1))
    with pytest.raises(ConfigError, match=r"--parameters"):
        make_staged_plan(PlanOptions(run_file=staged_file, step_s=1.0, parameters=10))
