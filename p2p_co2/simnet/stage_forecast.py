"""What a model in stages will be like: machines of real peers play some inner steps of it in virtual time.

    setting = StagedSetting(Layout(stages=loads_of(costs, "int8", "int8"), microbatches=64, tokens=64), peers)
    shown = forecast_stages(setting)
    shown.tokens_per_s, shown.binding, shown.stages[0].utilisation
    change = cheapest_change(costs, setting, "int8", "int8")

Nobody goes, and no message is lost but where a line loses packets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from p2p_co2.codec_specs import SPECS
from p2p_co2.planning.exchange import SEGMENT_BYTES
from p2p_co2.planning.pipeline import StageCost, loads_of
from p2p_co2.planning.traffic import LINK_OVERHEAD
from p2p_co2.protocol.pipeline import window_of
from p2p_co2.simnet.microbatches import Layout, StageVolunteer, VirtualStages

GAIN = 1.1
"""A change is worth naming from this factor in tokens a second."""
BINDS = 0.9
"""Whatever is in use for this share of the time sets the pace."""
_WARM_STEPS = 1
"""Inner steps of each first stage's replica that are played before any is counted."""
_COUNTED_STEPS = 2
"""Inner steps that are counted."""
_MOST_MICROBATCHES = 2_000
"""That are played at most, of all first stages: a second of a core."""
_STANDSTILL = 20.0
"""Who takes so many times what one machine would take for all stages stands still."""


class StagedSetting(NamedTuple):
    """What is played. ``peers``: by stage."""

    layout: Layout
    peers: tuple[tuple[StageVolunteer, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """A stage's mean replica.

    ``compute_s``, ``uplink_s``, ``downlink_s``: of a microbatch. ``away_s``: from its forward until its
    gradient is back, at most. ``drain_s``: waited for gradients in an inner step. ``utilisation``: share of
    the time in which it computes. ``uplink_share``, ``downlink_share``, ``loss_share``: in which its line,
    or each of its connections over a lossy way, carries them. ``memory_bytes``: held for those on their way.
    """

    replicas: int
    compute_s: float
    uplink_s: float
    downlink_s: float
    away_s: float
    drain_s: float
    utilisation: float
    uplink_share: float
    downlink_share: float
    loss_share: float
    window: int
    memory_bytes: int

    @property
    def shares(self) -> dict[str, float]:
        """How busy it is with what."""
        return {
            "computing": self.utilisation, "uplink": self.uplink_share, "downlink": self.downlink_share,
            "loss": self.loss_share,
        }  # fmt: skip

    @property
    def binding(self) -> str:
        """What sets its pace. It drains once in an inner step: a replica that waits for longer than one
        microbatch is away waits at a full window, for the way."""
        most = max(self.shares, key=self.shares.__getitem__)
        if self.shares[most] >= BINDS:
            return most
        return "latency" if self.drain_s > self.away_s else "drain"


@dataclass(frozen=True, kw_only=True)
class PipelineForecast:
    """``bottleneck``: the busiest stage; if none is busy, the one that waits most for gradients.
    ``binding``: what costs most there: "computing", "uplink",
    "downlink", "loss", "latency" or "drain". ``step_s``: an inner step of a first stage's replica.
    ``utilisation``: computing's share of the time at the bottleneck."""

    stages: tuple[StageForecast, ...]
    microbatches_per_s: float
    tokens_per_s: float
    step_s: float
    bottleneck: int
    binding: str
    utilisation: float


def forecast_stages(setting: StagedSetting) -> PipelineForecast:
    """Play ``setting``. A run that stands still has a rate of 0."""
    layout = setting.layout
    world = VirtualStages(layout, setting.peers)
    of_a_step = layout.microbatches * len(setting.peers[0])
    alone_s = sum(layout.microbatches * load.compute_s for load in layout.stages)
    warm = min(_WARM_STEPS * of_a_step, _MOST_MICROBATCHES // 4)
    counted = min(_COUNTED_STEPS * of_a_step, _MOST_MICROBATCHES - warm)
    began = _played(world, warm, alone_s)
    ended = _played(world, warm + counted, alone_s)
    lasted_s = ended.at - began.at
    rate = (ended.counted - began.counted) / lasted_s
    stages = []
    for stage in range(len(layout.stages)):
        utilisation = (ended.busy_s[stage] - began.busy_s[stage]) / lasted_s
        waiting = (ended.waited_s[stage] - began.waited_s[stage]) / lasted_s
        step_s = layout.microbatches * len(setting.peers[stage]) / rate if rate else 0.0
        stages.append(_stage(setting, stage, rate, utilisation, waiting * step_s))
    busiest = max(range(len(stages)), key=lambda stage: max(stages[stage].shares.values()))
    waits_most = max(range(len(stages)), key=lambda stage: stages[stage].drain_s)
    bottleneck = busiest if max(stages[busiest].shares.values()) >= BINDS else waits_most
    return PipelineForecast(
        stages=tuple(stages),
        microbatches_per_s=rate,
        tokens_per_s=rate * layout.tokens,
        step_s=of_a_step / rate if rate else math.inf,
        bottleneck=bottleneck,
        binding=stages[bottleneck].binding,
        utilisation=stages[bottleneck].utilisation,
    )


class _Reading(NamedTuple):
    """At a time: microbatches that the first stage has counted; what a mean replica has computed and waited
    for gradients, by stage."""

    at: float
    counted: int
    busy_s: list[float]
    waited_s: list[float]


def _played(world: VirtualStages, counted: int, alone_s: float) -> _Reading:
    """Until the first stage has counted so many, or it stands still."""
    ends_at = world.now + _STANDSTILL * alone_s
    while len(world.books.counted[0]) < counted and world.now < ends_at:
        world.run(alone_s / 32)
    groups = [[one.spent for one in world.of_stage(stage)] for stage in range(len(world.layout.stages))]
    waits = [[math.fsum(s for why, s in one.waited_s.items() if why.startswith("gradients")) for one in group]
             for group in groups]  # fmt: skip
    busy_s = [_mean([one.busy_s for one in group]) for group in groups]
    return _Reading(world.now, len(world.books.counted[0]), busy_s, [_mean(group) for group in waits])


def _stage(
    setting: StagedSetting, stage: int, rate: float, utilisation: float, drain_s: float
) -> StageForecast:
    loads = setting.layout.stages
    load = loads[stage]
    group = setting.peers[stage]
    is_last = stage + 1 == len(loads)
    came = (loads[stage - 1].ahead_bytes if stage else 0) + (0 if is_last else loads[stage + 1].back_bytes)
    sent = load.ahead_bytes + load.back_bytes
    uplink_s = 8 * LINK_OVERHEAD * sent / _mean([peer.line.up_bits_per_s for peer in group])
    downlink_s = 8 * LINK_OVERHEAD * came / _mean([peer.line.down_bits_per_s for peer in group])
    connection_bytes_per_s = _mean([_connection(peer) for peer in group])
    ahead_s, back_s = (
        LINK_OVERHEAD * size / connection_bytes_per_s / len(setting.peers[other % len(loads)])
        for size, other in ((load.ahead_bytes, stage + 1), (load.back_bytes, stage - 1))
    )
    window = setting.layout.window or window_of(stage, len(loads), setting.layout.microbatches)
    assert isinstance(window, int)
    each = rate / len(group)
    return StageForecast(
        replicas=len(group),
        compute_s=load.compute_s / _mean([peer.speed for peer in group]),
        uplink_s=uplink_s,
        downlink_s=downlink_s,
        away_s=window / each if each and not is_last else 0.0,
        drain_s=drain_s,
        utilisation=utilisation,
        uplink_share=each * uplink_s,
        downlink_share=each * downlink_s,
        loss_share=each * max(ahead_s, back_s),
        window=window,
        memory_bytes=window * load.entry_bytes + 2 * window * came,
    )


def _connection(peer: StageVolunteer) -> float:
    """Bytes a second of one connection over a lossy way (Mathis et al. 1997)."""
    round_trip_s = 2e-3 * peer.line.latency_ms
    if peer.line.loss <= 0 or round_trip_s <= 0:
        return math.inf
    return SEGMENT_BYTES * 1.22 / (round_trip_s * math.sqrt(peer.line.loss))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---- what to change


@dataclass(frozen=True)
class Change:
    """What to write where, in words, and what ``setting`` is then like."""

    words: str
    setting: StagedSetting
    forecast: PipelineForecast


def cheapest_change(
    costs: Sequence[StageCost], setting: StagedSetting, forward: str, backward: str
) -> Change | None:
    """The first that makes ``GAIN`` times as many tokens a second, of those that cost nothing, then little,
    then another peer; None if there is none."""
    now = forecast_stages(setting)
    for words, changed in _changes(costs, setting, now.bottleneck, forward, backward):
        shown = forecast_stages(changed)
        if shown.tokens_per_s >= GAIN * now.tokens_per_s:
            return Change(words, changed, shown)
    return None


def _changes(
    costs: Sequence[StageCost], setting: StagedSetting, bottleneck: int, forward: str, backward: str
) -> Iterator[tuple[str, StagedSetting]]:
    layout = setting.layout
    for ahead, back in (("int8", "int8"), ("int8", "int4")):
        is_less = SPECS[ahead].bits + SPECS[back].bits < SPECS[forward].bits + SPECS[backward].bits
        if is_less and SPECS[ahead].bits <= SPECS[forward].bits and SPECS[back].bits <= SPECS[backward].bits:
            loads = loads_of(costs, ahead, back)
            words = f'pipeline.forward = "{ahead}", pipeline.backward = "{back}"'
            yield words, setting._replace(layout=replace(layout, stages=loads))
    for times in (2, 4):
        more = times * layout.microbatches
        yield f"pipeline.microbatches = {more}", setting._replace(layout=replace(layout, microbatches=more))
    peers = [list(group) for group in setting.peers]
    peers[bottleneck].append(peers[bottleneck][0])
    yield f"one more peer in stage {bottleneck}", setting._replace(peers=tuple(map(tuple, peers)))
    if len(costs) % 2 == 0:
        yield (
            f"pipeline.stages = {len(costs) // 2}, if twice the memory is there",
            _in_half(costs, setting, forward, backward),
        )


def _in_half(
    costs: Sequence[StageCost], setting: StagedSetting, forward: str, backward: str
) -> StagedSetting:
    """Two stages in one each, with the peers of both."""
    joined = [
        StageCost(
            forward_s=first.forward_s + second.forward_s,
            backward_s=first.backward_s + second.backward_s,
            values=second.values,
            side_bytes=second.side_bytes,
            parameters=first.parameters + second.parameters,
            entry_bytes=first.entry_bytes + second.entry_bytes,
        )
        for first, second in zip(costs[::2], costs[1::2], strict=True)
    ]
    peers = tuple(
        (*first, *second) for first, second in zip(setting.peers[::2], setting.peers[1::2], strict=True)
    )
    loads = loads_of(joined, forward, backward)
    return StagedSetting(replace(setting.layout, stages=loads), peers)
