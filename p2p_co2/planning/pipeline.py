"""What a model in stages will be like: bytes on each hop, what binds, how busy peers are, tokens a second.

    loads = loads_of(costs, "int8", "int8")          # costs: StageCost of each stage, by one microbatch
    shown = forecast_stages(StagedSetting(loads=loads, peers=peers, microbatches=64, tokens=64))
    shown.tokens_per_s, shown.binding, shown.stages[0].utilisation
    change = cheapest_change(costs, setting, "int8", "int8")

Each replica takes a microbatch in the longest of: computing it, its bytes on the uplink (forwards and
gradients share it) and on the downlink, what one connection over a lossy way carries, and the way to the last
stage and back shared by the ``window`` microbatches that are on it. Inner steps are drained: after the last
of ``M`` forwards a replica waits as long as a microbatch is away. Replicas of a stage drain one by one, so
that others go on meanwhile: each is draining by chance, as often as its drain is long.

Law: with one replica a stage and no latency that is the time of a flow shop, ``(M - 1)`` times the slowest
stage and once through all. Price: means only. Unequal replicas of a stage count as equal ones of their mean
rate; a stage sends on one connection a side, which matters on lossy ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from p2p_co2.codec_specs import SPECS
from p2p_co2.planning.exchange import SEGMENT_BYTES, Link
from p2p_co2.planning.traffic import LINK_OVERHEAD
from p2p_co2.protocol.pipeline import window_of

GAIN = 1.1
"""A change is worth naming from this factor in tokens a second."""
BINDS = 0.95
"""What takes no more than the rest of this does not bind: computing does."""
_Rate = Callable[[Link], float]


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one microbatch costs in a stage, before anything is encoded.

    ``forward_s``, ``backward_s``: of computing on a machine of speed 1. ``values``: that go on to the next
    stage, 0 at the last. ``side_bytes``: that travel with them. ``parameters``: of the stage.
    ``entry_bytes``: held between forward and backward.
    """

    forward_s: float
    backward_s: float
    values: int = 0
    side_bytes: int = 0
    parameters: int = 0
    entry_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one microbatch costs in one stage.

    ``forward_s``, ``backward_s``: of computing on a machine of speed 1; the last stage does both at once.
    ``ahead_bytes``: what it sends to the next stage, 0 at the last; ``back_bytes``: to the one before, 0 at
    the first. ``parameters``: of the stage. ``entry_bytes``: held between forward and backward.
    """

    forward_s: float
    backward_s: float
    ahead_bytes: int = 0
    back_bytes: int = 0
    parameters: int = 0
    entry_bytes: int = 0

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


def loads_of(costs: Sequence[StageCost], forward: str, backward: str) -> tuple[StageLoad, ...]:
    """With activations in the codec ``forward`` and their gradients in ``backward``."""
    before = [0, *(cost.values for cost in costs)]
    return tuple(
        StageLoad(
            forward_s=cost.forward_s,
            backward_s=cost.backward_s,
            ahead_bytes=SPECS[forward].payload_bytes(cost.values) + cost.side_bytes if cost.values else 0,
            back_bytes=SPECS[backward].payload_bytes(came) if came else 0,
            parameters=cost.parameters,
            entry_bytes=cost.entry_bytes,
        )
        for cost, came in zip(costs, before, strict=False)
    )


@dataclass(frozen=True)
class StageMember:
    """A replica of a stage: its link, and how fast it computes (1: as the loads say)."""

    link: Link
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StagedSetting:
    """``peers``: by stage. ``microbatches``: of an inner step of a replica; ``tokens``: of each. ``window``:
    0 for the product's. ``rounds_bytes_per_s``: what the rounds of a stage's group take of each uplink."""

    loads: tuple[StageLoad, ...]
    peers: tuple[tuple[StageMember, ...], ...]
    microbatches: int
    tokens: int
    window: int = 0
    rounds_bytes_per_s: tuple[float, ...] = ()

    def window_of(self, stage: int) -> int:
        return self.window or window_of(stage, len(self.loads), self.microbatches)


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """A stage's mean replica, by one microbatch: seconds of computing, on the uplink, on the downlink, on one
    lossy connection, and away divided by the window. ``capacity``: microbatches a second of all its replicas,
    if no other stage held them up. ``drain_s``: once in an inner step. ``utilisation``: share of the time in
    which it computes; ``uplink_share``: in which it sends. ``memory_bytes``: held for microbatches on their
    way."""

    replicas: int
    compute_s: float
    uplink_s: float
    downlink_s: float
    loss_s: float
    away_s: float
    drain_s: float
    capacity: float
    utilisation: float
    uplink_share: float
    window: int
    memory_bytes: int

    @property
    def slowest_s(self) -> float:
        return max(self.compute_s, self.uplink_s, self.downlink_s, self.loss_s, self.away_s)

    @property
    def binding(self) -> str:
        """What sets this stage's pace."""
        limits = {
            "uplink": self.uplink_s, "downlink": self.downlink_s, "loss": self.loss_s, "latency": self.away_s,
        }  # fmt: skip
        worst = max(limits, key=limits.__getitem__)
        return worst if limits[worst] * BINDS > self.compute_s else "computing"


@dataclass(frozen=True, kw_only=True)
class PipelineForecast:
    """``bottleneck``: the stage with the least capacity; ``binding``: what costs most there: "computing",
    "uplink", "downlink", "loss", "latency" or "drain". ``step_s``: an inner step of a first stage's replica.
    ``utilisation``: computing's share of the time at the bottleneck."""

    stages: tuple[StageForecast, ...]
    microbatches_per_s: float
    tokens_per_s: float
    step_s: float
    bottleneck: int
    binding: str
    utilisation: float


def forecast_stages(setting: StagedSetting) -> PipelineForecast:
    """What ``setting`` will be like."""
    drafts = _drafts(setting)
    capacities = [draft.capacity for draft in drafts]
    rate = _rate(setting, drafts)
    bottleneck = min(range(len(drafts)), key=capacities.__getitem__)
    shown = tuple(
        replace(
            draft,
            utilisation=rate * draft.compute_s / draft.replicas,
            uplink_share=rate * draft.uplink_s / draft.replicas,
        )
        for draft in drafts
    )
    computing = min(draft.replicas / draft.compute_s for draft in drafts)
    binding = shown[bottleneck].binding
    if rate / min(capacities) < min(BINDS, min(capacities) / computing):
        binding = "drain"
    return PipelineForecast(
        stages=shown,
        microbatches_per_s=rate,
        tokens_per_s=rate * setting.tokens,
        step_s=setting.microbatches * drafts[0].replicas / rate,
        bottleneck=bottleneck,
        binding=binding,
        utilisation=shown[bottleneck].utilisation,
    )


def _drafts(setting: StagedSetting) -> list[StageForecast]:
    """Each stage by itself, last to first: how long a microbatch is away depends on what is behind."""
    loads = setting.loads
    drafts = list[StageForecast]()
    beyond_s = 0.0  # from the end of its forward until its gradient is there
    for stage in reversed(range(len(loads))):
        load = loads[stage]
        group = setting.peers[stage]
        rounds = setting.rounds_bytes_per_s[stage] if setting.rounds_bytes_per_s else 0.0
        speed = _mean([member.speed for member in group])
        compute_s = load.compute_s / speed
        window = setting.window_of(stage)
        came = (loads[stage - 1].ahead_bytes if stage else 0) + (
            loads[stage + 1].back_bytes if stage + 1 < len(loads) else 0
        )
        largest = max(load.ahead_bytes, load.back_bytes)
        away_s = 0.0 if stage + 1 == len(loads) else (compute_s + beyond_s) / window
        draft = StageForecast(
            replicas=len(group),
            compute_s=compute_s,
            uplink_s=_on_links(group, load.ahead_bytes + load.back_bytes, _uplink, rounds),
            downlink_s=_on_links(group, came, _downlink),
            loss_s=_on_links(group, largest, _connection),
            away_s=away_s,
            drain_s=0.0,
            capacity=0.0,
            utilisation=0.0,
            uplink_share=0.0,
            window=window,
            memory_bytes=window * load.entry_bytes + 2 * window * came,
        )
        drain_s = max(0.0, compute_s + beyond_s - draft.slowest_s) if stage + 1 < len(loads) else 0.0
        drafts.append(replace(draft, drain_s=drain_s, capacity=len(group) / draft.slowest_s))
        if stage:
            ahead_s = _hop_s(setting.peers[stage - 1], group, loads[stage - 1].ahead_bytes)
            back_s = _hop_s(group, setting.peers[stage - 1], load.back_bytes)
            beyond_s += compute_s + ahead_s + back_s
    return drafts[::-1]


def _rate(setting: StagedSetting, drafts: Sequence[StageForecast]) -> float:
    """Microbatches a second through all stages: found by halving, since drains are the more frequent the
    higher it is."""
    low = 0.0
    high = min(draft.capacity for draft in drafts)
    for _ in range(50):
        middle = (low + high) / 2
        if _through(drafts, middle, setting.microbatches) >= middle:
            low = middle
        else:
            high = middle
    return low or high


def _through(drafts: Sequence[StageForecast], rate: float, microbatches: int) -> float:
    """What gets through all stages, on average over who drains, if their replicas step as often as ``rate``
    makes them. Groups drain independently of each other; lone replicas of a chain all at once."""
    groups = [
        _open(draft, min(1.0, draft.drain_s * rate / draft.replicas / microbatches)) for draft in drafts
    ]
    most = min(draft.capacity for draft in drafts)
    through = before = 0.0
    for level in sorted({min(most, carried) for group in groups for carried, _ in group}):
        chances = [math.fsum(chance for carried, chance in group if carried >= level) for group in groups]
        chain = [chance for chance, group in zip(chances, groups, strict=True) if len(group) == 2]
        others = [chance for chance, group in zip(chances, groups, strict=True) if len(group) > 2]
        through += (level - before) * min(chain, default=1.0) * math.prod(others)
        before = level
    return through


def _open(draft: StageForecast, draining: float) -> list[tuple[float, float]]:
    """(what a stage carries, the chance of it) by how many of its replicas do not drain."""
    count = draft.replicas
    return [
        (
            up * draft.capacity / count,
            math.comb(count, up) * (1 - draining) ** up * draining ** (count - up),
        )
        for up in range(count + 1)
    ]


def _on_links(group: Sequence[StageMember], size: int, rate: _Rate, taken_bytes_per_s: float = 0.0) -> float:
    """Seconds of ``size`` bytes on the mean link; at most an eighth of it is taken by others on a full
    one."""
    rates = [max(rate(member.link) - taken_bytes_per_s, 7 / 8 * rate(member.link)) for member in group]
    return LINK_OVERHEAD * size / _mean(rates)


def _hop_s(senders: Sequence[StageMember], receivers: Sequence[StageMember], size: int) -> float:
    """Seconds of one payload on its way, with nothing else on it."""
    trip_s = _mean([member.link.round_trip_s for member in (*senders, *receivers)]) / 2
    slowest = min(
        _mean([min(_uplink(m.link), _connection(m.link)) for m in senders]),
        _mean([_downlink(m.link) for m in receivers]),
    )
    return LINK_OVERHEAD * size / slowest + trip_s


def _uplink(link: Link) -> float:
    return link.up_bytes_per_s


def _downlink(link: Link) -> float:
    return link.down_bytes_per_s


def _connection(link: Link) -> float:
    """What one connection carries over a lossy way (Mathis et al. 1997)."""
    if link.loss <= 0 or link.round_trip_s <= 0:
        return math.inf
    return SEGMENT_BYTES * 1.22 / (link.round_trip_s * math.sqrt(link.loss))


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
    now = forecast_stages(setting).tokens_per_s
    for words, changed in _changes(costs, setting, forward, backward):
        shown = forecast_stages(changed)
        if shown.tokens_per_s >= GAIN * now:
            return Change(words, changed, shown)
    return None


def _changes(
    costs: Sequence[StageCost], setting: StagedSetting, forward: str, backward: str
) -> Iterator[tuple[str, StagedSetting]]:
    for ahead, back in (("int8", "int8"), ("int8", "int4")):
        is_less = SPECS[ahead].bits + SPECS[back].bits < SPECS[forward].bits + SPECS[backward].bits
        if is_less and SPECS[ahead].bits <= SPECS[forward].bits and SPECS[back].bits <= SPECS[backward].bits:
            loads = loads_of(costs, ahead, back)
            words = f'pipeline.forward = "{ahead}", pipeline.backward = "{back}"'
            yield words, replace(setting, loads=loads)
    for times in (2, 4):
        more = times * setting.microbatches
        yield f"pipeline.microbatches = {more}", replace(setting, microbatches=more)
    bottleneck = forecast_stages(setting).bottleneck
    peers = [list(group) for group in setting.peers]
    peers[bottleneck].append(peers[bottleneck][0])
    yield f"one more peer in stage {bottleneck}", replace(setting, peers=tuple(map(tuple, peers)))
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
    return replace(setting, loads=loads, peers=peers, rounds_bytes_per_s=())
