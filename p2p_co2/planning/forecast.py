"""What a run will be like on given links: bytes, delay, staleness, utilisation, memory, the whole run's time.

``utilisation`` is what the program's summary will say: training waits only for the last rounds, for the
first ones if the run says so, and for copies. ``utilisation_if_waiting`` is that of peers that stood still
whenever an answer is more than one round late, CO2's bound of one step of staleness: it says whether the
links are enough. Pure; one step time for all peers, steady links, no churn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_co2.codec_specs import COARSE_BITS, SPECS
from p2p_co2.config import ApplyRule, RunConfig
from p2p_co2.planning.exchange import Flow, LinkFigures, RoundTime, flow, round_time
from p2p_co2.planning.traffic import heartbeat_bytes_per_s, round_control_bytes
from p2p_co2.protocol.catchup.history import LARGE_SHARE
from p2p_co2.protocol.rounds.bounds import GATHER_CAP_S, parts_cap_s, round_cap_s
from p2p_co2.rule_specs import OUTER_RULES
from p2p_co2.wire.schedule import FIRST_ROUND_BOUND_S, FLUSH_CAP_S, few_at_once

COPY_BYTES_PER_S = 3e9
"""fp32 bytes per second that the training thread copies out or merges in."""
STEP_OVERHEAD_S = 0.0004
"""``peer.step`` in an inner step in which nothing is due (``benchmarks/offline.py plan``)."""
SETTLE_S = 0.5
"""From the last commit until all have merged it and heard that all agree (0.3 to 1.3 s, measured)."""
NETWORK_BYTES = 150e6
"""The network libraries, their threads and buffers, beside a process that trains alone."""
GPU_PROCESS_BYTES = 1e9
"""About: host memory of a process that trains on a GPU, with torch and CUDA's libraries, and no model."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run as the planner sees it.

    ``fragments``: values in each. ``round_s``: between two schedule points of a fragment; in mode "steps" it
    is ``inner_steps_per_round * step_s``. ``rounds``: 0 if the run has no end. ``step_s``: pure compute of
    one inner step. ``links``: one per peer of a group. ``train_bytes``: what training alone holds, on the GPU
    if the peers train ``on_gpu``.
    """

    fragments: tuple[int, ...]
    codec: str
    rule: ApplyRule
    round_s: float
    rounds: int
    step_s: float
    links: tuple[LinkFigures, ...]
    tokens_per_step: int = 0
    blocking_rounds: int = 0
    sync_delay_steps: int = 0
    error_feedback: bool = False
    train_bytes: float = 0.0
    on_gpu: bool = False
    in_steps: bool = False
    """Whether the clock counts inner steps: heartbeats do not know the length of a round then."""

    @property
    def parameters(self) -> int:
        return sum(self.fragments)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Figures of one peer, the mean over peers where they differ.

    ``up_bytes_per_round``: messages sent while every fragment has one round, heartbeats included.
    ``encoded_bytes``: one outer gradient of the whole model. ``floor_s``: the least time in which the slowest
    link can move one round of every fragment. ``largest``: the largest fragment's round, alone.
    ``delay_steps``: inner steps from send to apply. ``hidden_s``, ``exposed_s``: of the exchange per round of
    every fragment, beside training and in its place. ``memory_bytes``: of the host; ``gpu_bytes``: of a GPU
    that it trains on, one more copy of the parameters while the agreed ones are measured included.
    ``exchange_copies``: memory for the exchange, in copies
    of the parameters in fp32. ``run_s``: the run, or the horizon of one without an end (``endless``).
    ``troubles``: what will not work, a sentence each.
    """

    up_bytes_per_round: float
    down_bytes_per_round: float
    encoded_bytes: int
    bits_per_value: float
    floor_s: float
    largest: RoundTime
    flow: Flow
    delay_steps: int
    hidden_s: float
    exposed_s: float
    utilisation: float
    utilisation_if_waiting: float
    memory_bytes: float
    gpu_bytes: float
    exchange_copies: float
    run_s: float
    endless: bool
    run_up_bytes: float
    run_tokens: float
    troubles: tuple[str, ...]


def setting_of(
    run: RunConfig, fragments: Sequence[int], step_s: float, links: Sequence[LinkFigures], *,
    tokens_per_step: int = 0, train_bytes: float = 0.0, on_gpu: bool = False,
) -> Setting:  # fmt: skip
    """The setting of a run file. Of more peers than ``group_size`` allows it takes the slowest uploads: a
    plan is for the worst."""
    clock = run.clock
    group = sorted(links, key=lambda link: link.up_bytes_per_s)[: run.group_size]
    return Setting(
        fragments=tuple(fragments),
        codec=run.codec.name,
        rule=run.outer.rule,
        round_s=clock.round_s if clock.mode == "time" else clock.inner_steps_per_round * step_s,
        rounds=clock.rounds,
        step_s=step_s,
        links=tuple(group),
        tokens_per_step=tokens_per_step,
        blocking_rounds=run.outer.blocking_rounds,
        sync_delay_steps=run.outer.sync_delay_steps,
        error_feedback=run.codec.error_feedback,
        train_bytes=train_bytes,
        on_gpu=on_gpu,
        in_steps=clock.mode == "steps",
    )


def even_fragments(parameters: int, count: int) -> tuple[int, ...]:
    """``parameters`` values in ``count`` fragments, as equal as can be."""
    return tuple((index + 1) * parameters // count - index * parameters // count for index in range(count))


def forecast(setting: Setting, horizon_s: float = 24 * 3600.0) -> Forecast:
    """What ``setting`` will be like. ``horizon_s``: how much of a run without an end is looked at."""
    sizes = [SPECS[setting.codec].payload_bytes(values) for values in setting.fragments]
    times = [time_of(setting, values) for values in setting.fragments]
    rounds = flow(times, setting.round_s)
    endless = setting.rounds == 0
    run_s = horizon_s if endless else setting.rounds * setting.round_s
    sweeps = run_s / setting.round_s
    first_s, last_s = exposed_ends_s(setting, times, rounds)
    step_overhead_s = setting.round_s / setting.step_s * STEP_OVERHEAD_S
    copies_s = rounds.sent_share * 8 * setting.parameters / COPY_BYTES_PER_S  # out and in, 4 bytes each
    exposed_run_s = first_s + last_s + sweeps * (copies_s + step_overhead_s)
    moved_bytes = _bytes_per_round(setting, sizes, rounds.sent_share)
    copies = _exchange_copies(setting, sizes, rounds)
    exposed_s = exposed_run_s / sweeps
    utilisation = max(0.0, 1.0 - exposed_run_s / (run_s + last_s))
    under_way_s = rounds.sent_share * math.fsum(time.to_apply_s for time in times)
    extra = 0.0 if endless else (len(times) - 1) / len(times)  # the rounds that end a run
    slowest = max(times, key=lambda time: time.to_apply_s)
    tokens_per_s = len(setting.links) * setting.tokens_per_step / setting.step_s
    return Forecast(
        up_bytes_per_round=moved_bytes,
        down_bytes_per_round=moved_bytes,
        encoded_bytes=sum(sizes),
        bits_per_value=SPECS[setting.codec].bits,
        floor_s=math.fsum(time.floor_s for time in times),
        largest=slowest,
        flow=rounds,
        delay_steps=_delay_steps(setting, rounds),
        hidden_s=max(0.0, under_way_s - exposed_s),
        exposed_s=exposed_s,
        utilisation=utilisation,
        utilisation_if_waiting=min(utilisation, _if_waiting(setting, times)),
        memory_bytes=_host_bytes(setting, copies),
        gpu_bytes=_gpu_bytes(setting),
        exchange_copies=copies,
        run_s=run_s,
        endless=endless,
        run_up_bytes=moved_bytes * (sweeps + extra),
        run_tokens=tokens_per_s * max(0.0, run_s - exposed_run_s),
        troubles=tuple(_troubles(setting, slowest, rounds)),
    )


def time_of(setting: Setting, values: int) -> RoundTime:
    """The round of a fragment of so many values, alone."""
    payload_bytes = SPECS[setting.codec].payload_bytes(values)
    return round_time(payload_bytes, values, setting.step_s, setting.links)


def exposed_ends_s(setting: Setting, times: Sequence[RoundTime], rounds: Flow) -> tuple[float, float]:
    """Seconds that training stands still for the first rounds of all fragments, if the run waits for them,
    and at the end of the run: the last steps end one after the other, what is open then is finished, and
    every fragment has one more round, a few of them at once (``schedule.few_at_once``)."""
    if len(setting.links) < 2:
        return 0.0, 0.0
    first_s = setting.blocking_rounds * math.fsum(min(FIRST_ROUND_BOUND_S, time.to_apply_s) for time in times)
    if not setting.rounds:
        return first_s, 0.0
    moving_s = rounds.left_s + math.fsum(time.transfer_s for time in times)
    one_after_the_other = -(-len(times) // few_at_once(len(times))) + (rounds.left_s > 0)
    around_s = one_after_the_other * max(time.latency_s + time.compute_s for time in times)
    spread_s = max(time.spread_s for time in times)
    return first_s, min(2 * FLUSH_CAP_S, moving_s + around_s + spread_s + SETTLE_S)


def _delay_steps(setting: Setting, rounds: Flow) -> int:
    """Inner steps from send to apply. The rules "co2" and "eager" apply at the fragment's next point."""
    delay_s = max(rounds.to_apply_s, setting.sync_delay_steps * setting.step_s)
    if OUTER_RULES[setting.rule].returns_work:
        delay_s = max(1, math.ceil(delay_s / setting.round_s)) * setting.round_s
    return max(1, math.ceil(delay_s / setting.step_s - 1e-9))


def _if_waiting(setting: Setting, times: Sequence[RoundTime]) -> float:
    """Utilisation if nobody went on beyond one round without its answer."""
    needed_s = max(math.fsum(time.transfer_s for time in times), *(time.to_apply_s for time in times))
    return min(1.0, setting.round_s / needed_s) if needed_s > 0 else 1.0


def _bytes_per_round(setting: Setting, sizes: Sequence[int], sent_share: float) -> float:
    """Bytes of messages that the average peer sends, and receives, per round of every fragment."""
    peers = len(setting.links)
    if peers < 2:
        return 0.0
    payloads = 2 * (1 - 1 / peers) * sum(sizes)
    control = math.fsum(round_control_bytes(peers, size) for size in sizes)
    heartbeats = heartbeat_bytes_per_s(peers, len(sizes), 0.0 if setting.in_steps else setting.round_s)
    return sent_share * (payloads + control) + heartbeats * setting.round_s


def _exchange_copies(setting: Setting, sizes: Sequence[int], rounds: Flow) -> float:
    """Memory of the exchange in copies of the parameters (fp32), at its largest moment: agreed parameters
    and momentum; what the rule and error feedback keep, of each open offer (half of all fragments at the end
    of a run) and beside it (``trainer.ledger.kept``); the newest means, for late peers (large ones until the
    next round begins); and three payloads for each open round: our own, the slices of our part, the mean."""
    count = len(sizes)
    at_once = min(1.0, max(1.0, rounds.slowest_s / setting.round_s * count) / count)
    in_flight = max(0.5, at_once) if setting.rounds else at_once
    payload = sum(sizes) / (4 * setting.parameters)
    is_exact = payload >= 1.0  # fp32 loses nothing, and what is kept beyond the round is kept whole
    lost, kept_whole = (0.0, 1.0) if is_exact else (0.125, 0.125)
    means = payload * (1.0 - in_flight) if payload > LARGE_SHARE else payload
    rule = OUTER_RULES[setting.rule]
    if rule.copies:
        offer = 0.0  # it is kept until the next one
    elif rule.returns_work or setting.error_feedback:
        offer = lost
    else:
        offer = 0.5 if payload < COARSE_BITS / 32 else 0.0
    kept = 2.0 + rule.copies * kept_whole + lost * setting.error_feedback + means
    # On their way between threads: a snapshot, a decoded mean, a merge.
    temporary = 3 * max(setting.fragments) / setting.parameters
    return kept + in_flight * (offer + 3 * payload) + temporary


def _host_bytes(setting: Setting, copies: float) -> float:
    training = GPU_PROCESS_BYTES if setting.on_gpu else setting.train_bytes
    return training + NETWORK_BYTES + 4 * setting.parameters * copies


def _gpu_bytes(setting: Setting) -> float:
    """A fragment's snapshot or merge passes through it, and live parameters are set aside while the agreed
    ones are measured."""
    return setting.train_bytes + 4 * (setting.parameters + max(setting.fragments)) if setting.on_gpu else 0.0


def _troubles(setting: Setting, slowest: RoundTime, rounds: Flow) -> list[str]:
    troubles = []
    round_s = 0.0 if setting.in_steps else setting.round_s
    parts_s = parts_cap_s(round_s)
    whole_s = round_cap_s(round_s)
    if slowest.transfer_s / 2 > parts_s or slowest.slowest_member_s > whole_s:
        troubles.append(
            f"a fragment exchange takes {slowest.slowest_member_s:,.0f} s; peers give up after "
            f"{parts_s:,.0f} s for its slices or {whole_s:,.0f} s in all, so none would commit: "
            "use more fragments or a codec with fewer bits"
        )
    if setting.step_s > GATHER_CAP_S:
        troubles.append(
            f"an inner step takes {setting.step_s:.0f} s, and peers wait {GATHER_CAP_S:.0f} s for each other "
            "at the most: take a smaller batch"
        )
    if rounds.sent_share < 1.0:
        troubles.append(
            f"{1 - rounds.sent_share:.0%} of the sends are left out because the fragment's last exchange is "
            "still open: the link needs a longer round"
        )
    if setting.round_s < len(setting.fragments) * setting.step_s:
        troubles.append(
            f"{len(setting.fragments)} fragments in a round of {setting.round_s:g} s leave less than one "
            f"inner step ({setting.step_s:.3g} s) between two sends"
        )
    return troubles
