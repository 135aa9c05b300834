"""``p2p-co2 plan`` of a run with stages: memory, bytes on each hop, what binds, how busy peers are, and the
cheapest change. A run of whole models is planned as ever (``plan``).

Sizes of stages come from torch's meta device; computing is measured here on the first stage, a middle one and
the last, one after the other, or given with ``--step-s``: the computing of one inner step in the largest
stage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootstrap.options import PlanOptions
from bootstrap.plan.plan import check, read_links, seconds, size
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError
from p2p_co2.planning.exchange import LinkFigures
from p2p_co2.planning.forecast import NETWORK_BYTES, Forecast, even_fragments, forecast, setting_of
from p2p_co2.planning.pipeline import StageCost, loads_of
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.simnet.microbatches import Layout, StageVolunteer
from p2p_co2.simnet.stage_forecast import (
    Change,
    PipelineForecast,
    StagedSetting,
    StageForecast,
    cheapest_change,
    forecast_stages,
)
from p2p_co2.wire.limits import MAX_MEMBERS

COPIES = 8
"""Of a stage's parameters: trained, their gradient, two moments, and four for what its group agrees on."""


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """``rounds``: of each stage's group, which is an ordinary swarm. ``sources``: where computing and links
    come from, in words."""

    run: RunConfig
    costs: tuple[StageCost, ...]
    setting: StagedSetting
    forecast: PipelineForecast
    rounds: tuple[Forecast, ...]
    change: Change | None
    sources: dict[str, str]
    target: float

    def memory_bytes(self, stage: int) -> float:
        """Of a peer of ``stage``, about."""
        parameters = COPIES * 4 * self.costs[stage].parameters
        return NETWORK_BYTES + parameters + self.forecast.stages[stage].memory_bytes


def run_staged_plan(options: PlanOptions, say: Callable[[str], None] = print, is_brief: bool = False) -> int:
    """As ``run_plan``, of a run with stages."""
    plan = make_staged_plan(options)
    if options.as_json:
        say(json.dumps(as_table(plan), indent=2))
    elif is_brief:
        say(verdict(plan))
    else:
        print_staged_plan(plan)
    return 1 if options.check and not is_borne(plan) else 0


def is_borne(plan: StagedPlan) -> bool:
    """Whether its peers are as busy as was asked for, and nothing will not work."""
    return plan.forecast.utilisation >= plan.target and not troubles(plan)


def verdict(plan: StagedPlan) -> str:
    """Whether the links bear the run as it is given, in a sentence that begins with yes or no."""
    shown = plan.forecast
    found = troubles(plan)
    busy = f"peers compute for {shown.utilisation:.0%} of the time, {plan.target:.0%} asked for"
    if is_borne(plan):
        return f"yes: {busy}"
    if shown.utilisation >= plan.target and found:
        return f"no: {busy}, but {found[0]}"
    return f"no: {busy}; what binds is {shown.binding} of stage {shown.bottleneck}: {WHY[shown.binding]}"


def make_staged_plan(options: PlanOptions) -> StagedPlan:
    """Read, measure, reckon. Raises ``ConfigError`` and ``EnvironmentFault``."""
    run = read_run_config(options.run_file)
    check(options, MAX_MEMBERS * run.pipeline.stages)
    for option, given, why in (
        ("--parameters", options.parameters, "sizes of stages are the recipe's"),
        ("--batch", options.batch, "pipeline.sequences says it"),
        ("--plot", options.plot, "there is no picture of one"),
    ):
        if given:
            raise ConfigError.of_option(option, f"leave it out for a run with stages: {why}")
    links, link_source = read_links(options, run.seed)
    from bootstrap.plan.step import stage_costs
    from p2p_co2.tensors.device import training_device

    device = training_device(options.device).name
    costs, tokens, source = stage_costs(run, options.step_s, device, options.threads)
    sources = {"links": link_source, "computing": source}
    peers = in_stages(links, run.pipeline.stages)
    return staged_plan(run, costs, tokens, peers, sources, options.target)


def in_stages(links: Sequence[LinkFigures], stages: int) -> list[list[LinkFigures]]:
    """Peers over the stages, one after the other. Raises ``ConfigError`` if a stage has none."""
    if len(links) < stages:
        problem = f"{stages} stages need a peer each (got {len(links)}); two each bear that one goes"
        raise ConfigError.of_option("--peers", problem)
    return [list(links[stage::stages]) for stage in range(stages)]


def staged_plan(
    run: RunConfig, costs: Sequence[StageCost], tokens: int, links: Sequence[Sequence[LinkFigures]],
    sources: dict[str, str], target: float = 0.95,
) -> StagedPlan:  # fmt: skip
    """``tokens``: of a microbatch. The rounds of a group take their share of its uplinks."""
    pipeline = run.pipeline
    rounds = tuple(
        forecast(
            setting_of(
                run,
                even_fragments(cost.parameters, run.fragments),
                pipeline.microbatches * (cost.forward_s + cost.backward_s),
                group,
                train_bytes=16.0 * cost.parameters,
            )
        )
        for cost, group in zip(costs, links, strict=True)
    )
    round_s = run.clock.round_s if run.clock.mode == "time" else 0.0
    taken = [shown.up_bytes_per_round / round_s if round_s else 0.0 for shown in rounds]
    peers = tuple(
        tuple(StageVolunteer(_line(link, by_rounds)) for link in group)
        for group, by_rounds in zip(links, taken, strict=True)
    )
    loads = loads_of(costs, pipeline.forward, pipeline.backward)
    setting = StagedSetting(Layout(stages=loads, microbatches=pipeline.microbatches, tokens=tokens), peers)
    return StagedPlan(
        run=run,
        costs=tuple(costs),
        setting=setting,
        forecast=forecast_stages(setting),
        rounds=rounds,
        change=cheapest_change(costs, setting, pipeline.forward, pipeline.backward),
        sources=sources,
        target=target,
    )


def _line(link: LinkFigures, by_rounds: float) -> LinkProfile:
    """What the rounds of a stage's group leave of a link: they take at most an eighth of a full uplink."""
    up_bytes_per_s = link.up_bytes_per_s - min(by_rounds, link.up_bytes_per_s / 8)
    down_bits_per_s = round(8 * link.down_bytes_per_s)
    latency_ms = 500 * link.round_trip_s
    up_bits_per_s = round(8 * up_bytes_per_s)
    return LinkProfile("planned", up_bits_per_s, down_bits_per_s, latency_ms, 0.0, link.loss, "open")


def as_table(plan: StagedPlan) -> dict[str, Any]:
    """The plan as plain JSON."""
    shown = plan.forecast
    stages = [
        {
            **asdict(stage),
            "binding": stage.binding,
            "memory_bytes": plan.memory_bytes(number),
            "parameters": plan.costs[number].parameters,
            "ahead_bytes": plan.setting.layout.stages[number].ahead_bytes,
            "back_bytes": plan.setting.layout.stages[number].back_bytes,
            "round_up_bytes": plan.rounds[number].up_bytes_per_round,
        }
        for number, stage in enumerate(shown.stages)
    ]
    change = plan.change
    return {
        "run": plan.run.name,
        "sources": plan.sources,
        "verdict": verdict(plan),
        "is_reached": is_borne(plan),
        "tokens_per_s": shown.tokens_per_s,
        "inner_step_s": shown.step_s,
        "bottleneck": shown.bottleneck,
        "binding": shown.binding,
        "utilisation": shown.utilisation,
        "target": plan.target,
        "stages": stages,
        "troubles": troubles(plan),
        "change": change and {"set": change.words, "tokens_per_s": change.forecast.tokens_per_s},
    }


# ---- for a reader

WHY = {
    "computing": "its peers compute all the time, as they should",
    "uplink": "its uplinks carry activations forward and gradients back, and can carry no more",
    "downlink": "its downlinks carry activations and gradients from both sides, and can carry no more",
    "loss": "lost packets slow each of its connections down below what the line could carry",
    "latency": "too few microbatches are on their way at once for so long a way",
    "drain": "after the last microbatch of an inner step its peers wait until all have come back",
}


def troubles(plan: StagedPlan) -> list[str]:
    """What will not work, a sentence each."""
    found = []
    run = plan.run
    for number, stage in enumerate(plan.forecast.stages):
        if run.clock.mode == "time" and stage.away_s > run.clock.round_s:
            found.append(
                f"stage {number}: a gradient may come back after {seconds(stage.away_s)}, "
                f"and peers give it up after clock.round_s = {run.clock.round_s:g}: make rounds longer or "
                "microbatches smaller"
            )
        if stage.replicas < run.pipeline.min_replicas:
            found.append(
                f"stage {number} has {stage.replicas} of pipeline.min_replicas = "
                f"{run.pipeline.min_replicas} peers: if it goes, all stand still"
            )
    return found


def print_staged_plan(plan: StagedPlan, console: Console | None = None) -> None:
    """Print ``plan`` to ``console``; stdout if None."""
    console = console or Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    run = plan.run
    shown = plan.forecast
    console.print(Text(verdict(plan), style="bold green" if is_borne(plan) else "bold red"))
    if plan.change is not None and not is_borne(plan):
        gain = plan.change.forecast.tokens_per_s / shown.tokens_per_s
        console.print(Text(f"the cheapest change: {plan.change.words}: {gain:.2g} times the tokens", "bold"))
    console.print()
    parameters = sum(cost.parameters for cost in plan.costs)
    peers = sum(map(len, plan.setting.peers))
    what = f": {parameters:,} parameters in {len(plan.costs)} stages, {peers} peers"
    console.print(Text.assemble((f'plan of "{run.name}"', "bold"), what))
    pipeline = run.pipeline
    console.print(
        Text(
            f"an inner step has {pipeline.microbatches} microbatches of {plan.setting.layout.tokens} tokens; "
            f"{pipeline.forward} forward, {pipeline.backward} back"
        )
    )
    console.print(Text(f"computing: {plan.sources['computing']}"))
    console.print(Text(f"links: {plan.sources['links']}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("by microbatch")
    for number in range(len(plan.costs)):
        table.add_column(f"stage {number}", justify="right")
    for name, cell in _ROWS:
        table.add_row(name, *(cell(plan, number, stage) for number, stage in enumerate(shown.stages)))
    console.print(table)
    colour = "green" if shown.binding == "computing" else "bold red"
    console.print(
        Text.assemble(
            (f"{shown.tokens_per_s:,.0f} tokens a second", "bold"),
            f", an inner step takes {seconds(shown.step_s)}. What binds: ",
            (f"{shown.binding} of stage {shown.bottleneck}", colour),
            f" ({WHY[shown.binding]}).",
        )
    )
    for trouble in troubles(plan):
        console.print(Text(trouble, style="red"))


def _sent(count: int) -> str:
    return size(count) if count else "-"


_ROWS: tuple[tuple[str, Callable[[StagedPlan, int, StageForecast], str]], ...] = (
    ("peers", lambda p, n, s: str(s.replicas)),
    ("parameters", lambda p, n, s: f"{p.costs[n].parameters:,}"),
    ("memory of a peer", lambda p, n, s: size(p.memory_bytes(n))),
    ("sends forward", lambda p, n, s: _sent(p.setting.layout.stages[n].ahead_bytes)),
    ("sends back", lambda p, n, s: _sent(p.setting.layout.stages[n].back_bytes)),
    ("computes", lambda p, n, s: seconds(s.compute_s)),
    ("takes on the uplink", lambda p, n, s: seconds(s.uplink_s)),
    ("takes on the downlink", lambda p, n, s: seconds(s.downlink_s)),
    ("at once on the way, at most", lambda p, n, s: str(s.window)),
    ("its pace is set by", lambda p, n, s: s.binding),
    ("waits for gradients, per inner step", lambda p, n, s: seconds(s.drain_s)),
    ("compute utilisation", lambda p, n, s: f"{s.utilisation:.0%}"),
    ("uplink used", lambda p, n, s: f"{s.uplink_share:.0%}"),
    ("a round of its group sends", lambda p, n, s: size(p.rounds[n].up_bytes_per_round)),
)
