"""A run's setting, its forecast and what is advised: options in; a table for a reader, or JSON, out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootstrap.options import PlanOptions
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError
from p2p_co2.planning.advice import Advice, advise, swarm_factor
from p2p_co2.planning.exchange import LinkFigures, link_of
from p2p_co2.planning.forecast import Forecast, Setting, even_fragments, forecast, setting_of
from p2p_co2.planning.memory import TRAIN_BYTES, MachineMemory, MemoryPlan, plan_memory
from p2p_co2.planning.profiles import profile_of
from p2p_co2.system.extras import require
from p2p_co2.system.machine import available_memory_bytes
from p2p_co2.wire.limits import MAX_MEMBERS


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run's setting with its forecast, what is advised, and what it takes of a peer's memory. ``sources``:
    where step time, model size and links come from, in words."""

    run: RunConfig
    setting: Setting
    forecast: Forecast
    advice: Advice
    memory: MemoryPlan
    sources: dict[str, str]

    @property
    def is_good(self) -> bool:
        """Whether links reach the target, and the memory that was given for peers bears the run."""
        return self.advice.is_reached and not (self.memory.room.is_given and self.memory.troubles)


def make_plan(options: PlanOptions, run: RunConfig | None = None) -> RunPlan:
    """Read, measure, reckon. ``run``: in the place of the file. Raises ``ConfigError`` and
    ``EnvironmentFault``."""
    check(options)
    run = run or read_run_config(options.run_file)
    links, link_source = read_links(options, run.seed)
    if options.peers > run.group_size:
        link_source += f"; of {options.peers} peers the slowest {run.group_size}, all that may come"
    sources = {"links": link_source, "step": "given", "parameters": "given"}
    fragments = even_fragments(options.parameters, run.fragments) if options.parameters else ()
    step_s = options.step_s
    tokens = 0
    train_bytes = TRAIN_BYTES * options.parameters
    if not (fragments and step_s):
        from bootstrap.plan.step import load_model, measure_step
        from p2p_co2.tensors.device import training_device

        options = replace(options, device=training_device(options.device).name)
        recipe, counted = load_model(run, options.device)
        if not fragments:
            fragments = counted
            sources["parameters"] = "counted"
        if not step_s:
            measured = measure_step(recipe, options.device, options.batch, options.threads)
            step_s = measured.step_s
            tokens = measured.tokens
            train_bytes = measured.train_bytes
            sources["step"] = measured.how
    setting = setting_of(
        run, fragments, step_s, links, tokens_per_step=tokens, on_gpu=on_gpu(options),
        train_bytes=train_bytes or TRAIN_BYTES * sum(fragments),
    )  # fmt: skip
    shown = forecast(setting, options.hours * 3600)
    return RunPlan(
        run=run,
        setting=setting,
        forecast=shown,
        advice=advise(setting, options.target),
        memory=plan_memory(setting, shown, room_of(options)),
        sources=sources,
    )


def on_gpu(options: PlanOptions) -> bool:
    """Whether the plan is for peers that train on a GPU."""
    return options.device.startswith("cuda") or options.gpu_memory_gb > 0


def room_of(options: PlanOptions) -> MachineMemory:
    """What the peers' machine has: as given, else this one."""
    host_bytes = 1e9 * options.memory_gb or available_memory_bytes()
    if host_bytes == float("inf"):
        raise ConfigError.of_option("--memory-gb", "say how much a peer has: this system was not asked")
    how = "given" if options.memory_gb else "free on this machine"
    is_given = options.memory_gb > 0 or options.gpu_memory_gb > 0
    if not on_gpu(options):
        return MachineMemory(host_bytes=host_bytes, gpu_bytes=None, how=how, is_given=is_given)
    gpu_bytes = 1e9 * options.gpu_memory_gb
    if not gpu_bytes and "torch" in sys.modules:  # a plan that measures nothing does not import it
        from bootstrap.plan.step import gpu_memory_bytes

        gpu_bytes = gpu_memory_bytes(options.device)
    return MachineMemory(host_bytes=host_bytes, gpu_bytes=gpu_bytes, how=how, is_given=is_given)


def check(options: PlanOptions, most_peers: int = MAX_MEMBERS) -> None:
    """Raises ``ConfigError`` for figures that no run has."""
    wrong = (
        ("--peers", not 1 <= options.peers <= most_peers, f"1 to {most_peers} (got {options.peers})"),
        ("--step-s", not 0 <= options.step_s < 1e6, f"seconds, above 0 (got {options.step_s:g})"),
        ("--parameters", not 0 <= options.parameters < 10**14, f"a count (got {options.parameters})"),
        ("--target", not 0 < options.target < 1, f"between 0 and 1, such as 0.95 (got {options.target:g})"),
        ("--memory-gb", not 0 <= options.memory_gb < 1e6, f"above 0 (got {options.memory_gb:g})"),
        ("--gpu-memory-gb", not 0 <= options.gpu_memory_gb < 1e6, f"above 0 (got {options.gpu_memory_gb:g})"),
        ("--hours", not 0 < options.hours < 1e6, f"above 0 (got {options.hours:g})"),
        ("--batch", options.batch < 0, f"at least 1, or 0 for the recipe's (got {options.batch})"),
        ("--threads", options.threads < 0, f"at least 1, or 0 for all cores (got {options.threads})"),
    )  # fmt: skip
    for option, is_wrong, problem in wrong:
        if is_wrong:
            raise ConfigError.of_option(option, problem)


def as_table(plan: RunPlan) -> dict[str, Any]:
    """The plan as plain JSON: ``given`` and ``advised`` with the same fields, and what binds."""
    advice = plan.advice
    return {
        "run": plan.run.name,
        "sources": plan.sources,
        "target": advice.target,
        "verdict": verdict(plan),
        "is_reached": advice.is_reached,
        "binding": advice.binding,
        "memory": asdict(plan.memory),
        "shortest_round_s": {name: round(bound, 6) for name, bound in advice.bounds.items()},
        "given": _described(plan.setting, plan.forecast),
        "advised": {
            **_described(advice.setting, advice.forecast),
            "inner_steps_per_round": advice.inner_steps,
            "binding": advice.advised_binding,
        },
    }


def _described(setting: Setting, shown: Forecast) -> dict[str, Any]:
    fields = asdict(setting)
    fields["fragment_values"] = list(fields.pop("fragments"))
    fields["fragments"] = len(setting.fragments)
    fields["parameters"] = setting.parameters
    predicted = asdict(shown)
    predicted["round_time_s"] = shown.largest.slowest_member_s
    return {"setting": fields, "forecast": predicted}


# ---- links: one source at a time; a measured or given one is everybody's, so that of the slowest

_RATES_BYTES_PER_S = 1.0, 1.25e12
"""The least and the most that a link carries."""


def read_links(options: PlanOptions, seed: int) -> tuple[tuple[LinkFigures, ...], str]:
    """One link for each peer, and where they come from in words. Raises ``ConfigError``."""
    peers = options.peers
    figures = bool(options.up_mbit or options.down_mbit or options.rtt_ms or options.loss)
    if figures + bool(options.profile) + (options.link is not None) > 1:
        raise ConfigError.of_option("--profile", "give a profile, figures of a link, or --link, not several")
    if options.link is not None:
        link = _measured(options.link)
        return (link,) * peers, f"measured ({options.link}): {described(link)}"
    if figures:
        link = _figures(options)
        return (link,) * peers, f"given: {described(link)}"
    name = options.profile or "dsl"  # an ordinary home line
    links = tuple(link_of(profile_of(name, seed, index)) for index in range(peers))
    note = "" if options.profile else ", assumed: measure yours with p2p-co2 doctor TICKET --json"
    kinds = described(links[0]) if len(set(links)) == 1 else f"{len(set(links))} kinds"
    return links, f"profile {name} ({kinds}){note}"


def described(link: LinkFigures) -> str:
    """A link in words."""
    words = f"{8e-6 * link.up_bytes_per_s:,.3g} Mbit/s up, {8e-6 * link.down_bytes_per_s:,.3g} down"
    return f"{words}, {1e3 * link.round_trip_s:.3g} ms round trip, {link.loss:.2%} loss"


def _figures(options: PlanOptions) -> LinkFigures:
    least_mbit = 8e-6 * _RATES_BYTES_PER_S[0]
    down_mbit = options.down_mbit or 10 * options.up_mbit
    for option, value, least, most in (
        ("--up-mbit", options.up_mbit, least_mbit, 1e7),
        ("--down-mbit", down_mbit, least_mbit, 1e8),
        ("--rtt-ms", options.rtt_ms, 0, 1e5),
        ("--loss", options.loss, 0, 0.99),
    ):
        if not least <= value <= most:
            raise ConfigError.of_option(option, f"what the link has, {least:g} to {most:g} (got {value:g})")
    return LinkFigures(
        up_bytes_per_s=options.up_mbit * 1e6 / 8,
        down_bytes_per_s=down_mbit * 1e6 / 8,
        round_trip_s=options.rtt_ms / 1e3,
        loss=options.loss,
    )


def _measured(path: Path) -> LinkFigures:
    """The link that ``doctor --json`` measured."""
    cure = "write it with: p2p-co2 doctor TICKET --json"
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(1 << 20))
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(str(path), "", f"not JSON; {cure}") from None
    measured = table.get("link") if isinstance(table, dict) else None
    if not isinstance(measured, dict):
        raise ConfigError(str(path), "link", f"missing; {cure}")
    figures = {}
    for name, (least, most) in {
        "up_bytes_per_s": _RATES_BYTES_PER_S,
        "down_bytes_per_s": _RATES_BYTES_PER_S,
        "round_trip_s": (1e-9, 100.0),
    }.items():
        value = measured.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            problem = f"was not measured (got {str(value)[:40]}); run doctor with a ticket"
            raise ConfigError(str(path), f"link.{name}", problem)
        figures[name] = float(value)
    return LinkFigures(**figures)


# ---- for a reader

WHY = {
    "upload": "the slowest upload has to carry every fragment once a round, idle a fifth of the time",
    "download": "the slowest download has to carry every fragment once a round, idle a fifth of the time",
    "loss": "lost packets slow every connection down below what the link could carry",
    "latency": "an answer has to be back within a round",
    "processor": "the exchange's own arithmetic has to fit into half of a core",
    "inner step": "each fragment needs one of its own, and rounds of fewer than eight teach no more",
    "copies": "copying fragments out of the model and merging them in stops training for a moment",
    "first and last rounds": "training waits for a run's last rounds, and for as many first ones as it sets",
}

Row = tuple[str, Callable[[Setting, Forecast], str]]


def run_plan(options: PlanOptions, say: Callable[[str], None] = print, is_brief: bool = False) -> int:
    """Print the plan of a run of whole models; of one that ``is_brief`` the verdict alone.

    Returns the exit status: 1 with ``options.check`` if the verdict is no. Raises ``ConfigError`` and
    ``EnvironmentFault``."""
    if options.plot is not None:
        require("plot", "--plot")
    plan = make_plan(options)
    if options.as_json:
        say(json.dumps(as_table(plan), indent=2))
    elif is_brief:
        say(verdict(plan))
    else:
        print_plan(plan)
    if options.plot is not None:
        from bootstrap.plan.picture import draw_plan

        draw_plan(plan.run.name, plan.setting, plan.advice, options.plot)
    return 1 if options.check and not plan.is_good else 0


def verdict(plan: RunPlan) -> str:
    """Whether the links bear the run as it is given, and the memory that was given for its peers, in a
    sentence that begins with yes or no."""
    advice = plan.advice
    shown = plan.forecast
    share = min(shown.utilisation, shown.utilisation_if_waiting)
    busy = f"peers compute for {share:.1%} of the time, {advice.target:.0%} asked for"
    if advice.is_reached and not plan.is_good:
        return f"no: {busy}, but {plan.memory.troubles[0]}"
    if advice.is_reached:
        return f"yes: {busy}, and no answer is more than one outer step late"
    if share >= advice.target and shown.troubles:
        return f"no: {busy}, but {shown.troubles[0]}"
    return f"no: {busy}; what binds is {advice.binding}: {WHY[advice.binding]}"


def print_plan(plan: RunPlan, console: Console | None = None) -> None:
    """Print ``plan`` to ``console``; stdout if None."""
    console = console or Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    setting = plan.setting
    advice = plan.advice
    shown = {"given": (setting, plan.forecast)}
    console.print(Text(verdict(plan), style="bold green" if plan.is_good else "bold red"))
    if not plan.is_good:
        shown["advised"] = advice.setting, advice.forecast
        console.print(Text(_advised(plan), style="bold"))
    console.print()
    what = f": {setting.parameters:,} parameters ({plan.sources['parameters']}), "
    console.print(
        Text.assemble((f'plan of "{plan.run.name}"', "bold"), what, f"{len(setting.links)} peers in a round")
    )
    console.print(Text(f"inner step {setting.step_s:.3g} s ({plan.sources['step']})"))
    console.print(Text(f"links: {plan.sources['links']}"))
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for how in shown:
        table.add_column(f"as {how}", justify="right")
    for name, cell in _ROWS:
        table.add_row(name, *(Text(cell(*one)) for one in shown.values()))
    console.print(table)
    if advice.is_reached and not plan.is_good:
        binds = f"What keeps the round from being shorter: {advice.binding} ({WHY[advice.binding]})."
        console.print(Text(binds))
    console.print(Text(largest_words(plan.memory)))
    for trouble in plan.memory.troubles:
        console.print(Text(f"memory: {trouble}", style="bold red"))
    for how, (_, foreseen) in shown.items():
        for trouble in foreseen.troubles:
            console.print(Text(f"as {how}: {trouble}", style="red"))


def _advised(plan: RunPlan) -> str:
    """What to write into the run file."""
    advice = plan.advice
    best = advice.setting
    rate = swarm_factor(len(best.links))
    length = f"inner_steps_per_round = {advice.inner_steps}"
    if plan.run.clock.mode == "time":
        length = f"round_s = {best.round_s:g}"
    return (
        f'advised: clock.{length}, fragments = {len(best.fragments)}, codec.name = "{best.codec}", '
        f"outer.sync_delay_steps = 0; the shortest round that reaches {advice.target:.0%} and leaves a fifth "
        f"of the line idle (an answer comes after {_steps(advice.forecast.delay_steps)}). The learning rate "
        f"that fits {len(best.links)} equal peers is {rate:.3g} times that of one alone, after a warm-up of "
        "300 inner steps; byte-gpt takes both by itself"
    )


def largest_words(memory: MemoryPlan) -> str:
    """The largest model that fits, in words."""
    room = memory.room
    has = f"{size(room.host_bytes)} of host memory ({room.how})"
    if room.gpu_bytes is not None:
        has += f" and {size(room.gpu_bytes) if room.gpu_bytes else 'an unknown amount'} of GPU memory"
    if not memory.largest_parameters:
        return f"{has}: no model fits"
    return (
        f"{has}: up to {memory.largest_parameters:,} parameters in fp32 with Adam fit, by {memory.limited_by}"
    )


def _memory(setting: Setting, shown: Forecast) -> str:
    gpu = f", GPU {size(shown.gpu_bytes)}" if setting.on_gpu else ""
    return f"{size(shown.memory_bytes)}{gpu}, exchange {shown.exchange_copies:.1f} copies"


def seconds(value: float) -> str:
    """A duration with the unit that suits it."""
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    if value < 600:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def size(value: float) -> str:
    """Bytes with the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes every value")


def _steps(count: int) -> str:
    return f"{count} inner step{'' if count == 1 else 's'}"


def _floor(setting: Setting, shown: Forecast) -> str:
    return f"{seconds(shown.floor_s)}, {shown.floor_s / setting.round_s:.0%} of the round"


_ROWS: tuple[Row, ...] = (
    ("round", lambda s, f: f"{seconds(s.round_s)}, {_steps(round(s.round_s / s.step_s))}"),
    ("fragments, codec", lambda s, f: f"{len(s.fragments)}, {s.codec} ({f.bits_per_value:g} bits per value)"),
    ("a peer sends per round", lambda s, f: size(f.up_bytes_per_round)),
    ("least time that takes (floor)", _floor),
    ("a fragment exchange", lambda s, f: seconds(f.largest.slowest_member_s)),
    ("answer applied after", lambda s, f: f"{seconds(f.flow.to_apply_s)}, {_steps(f.delay_steps)}"),
    ("staleness, outer steps", lambda s, f: f"{f.flow.staleness:.2f}"),
    ("sends left out", lambda s, f: f"{1 - f.flow.sent_share:.0%}"),
    ("exchange hidden, per round", lambda s, f: seconds(f.hidden_s)),
    ("exchange exposed, per round", lambda s, f: seconds(f.exposed_s)),
    ("compute utilisation", lambda s, f: f"{f.utilisation:.1%}"),
    ("... if it waited for late answers", lambda s, f: f"{f.utilisation_if_waiting:.1%}"),
    ("memory of a peer", _memory),
    ("whole run" , lambda s, f: ("no end; per " if f.endless else "") + seconds(f.run_s)),
    ("... a peer sends", lambda s, f: size(f.run_up_bytes)),
    ("... tokens of all peers", lambda s, f: f"{f.run_tokens:.3g}" if f.run_tokens else "not known"),
)  # fmt: skip
