"""A run's setting, its forecast and what is advised: options in, plan out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bootstrap.options import PlanOptions
from bootstrap.plan.links import read_links
from p2p_co2.config import RunConfig, read_run_config
from p2p_co2.errors import ConfigError
from p2p_co2.planning.advice import Advice, advise
from p2p_co2.planning.forecast import Forecast, Setting, even_fragments, forecast, setting_of
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.system.ctrl_c import hand_over, take_back


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's setting with its forecast, and what is advised. ``sources``: where step time, model size and
    links come from, in words."""

    run: RunConfig
    setting: Setting
    forecast: Forecast
    advice: Advice
    sources: dict[str, str]


def make_plan(options: PlanOptions) -> Plan:
    """Read, measure, reckon. Raises ``ConfigError`` and ``EnvironmentFault``."""
    _check(options)
    run = read_run_config(options.run_file)
    links, link_source = read_links(options, run.seed)
    if options.peers > run.group_size:
        link_source += f"; of {options.peers} peers the slowest {run.group_size}, all that may come"
    sources = {"links": link_source, "step": "given", "parameters": "given"}
    fragments = even_fragments(options.parameters, run.fragments) if options.parameters else ()
    step_s, tokens, train_bytes = options.step_s, 0, 16.0 * options.parameters
    if not (fragments and step_s):
        take_back()
        from bootstrap.plan.step import load_model, measure_step

        hand_over()
        recipe, counted = load_model(run, options.device)
        if not fragments:
            fragments = counted
            sources["parameters"] = "counted"
        if not step_s:
            measured = measure_step(recipe, options.device, options.batch, options.threads)
            step_s, tokens, train_bytes = measured.step_s, measured.tokens, measured.train_bytes
            sources["step"] = measured.how
    setting = setting_of(run, fragments, step_s, links, tokens_per_step=tokens, train_bytes=train_bytes)
    return Plan(
        run=run,
        setting=setting,
        forecast=forecast(setting, options.hours * 3600),
        advice=advise(setting, options.target),
        sources=sources,
    )


def _check(options: PlanOptions) -> None:
    wrong = (
        ("--peers", not 1 <= options.peers <= MAX_MEMBERS, f"1 to {MAX_MEMBERS} (got {options.peers})"),
        ("--step-s", not 0 <= options.step_s < 1e6, f"seconds, above 0 (got {options.step_s:g})"),
        ("--parameters", not 0 <= options.parameters < 10**14, f"a count (got {options.parameters})"),
        ("--target", not 0 < options.target < 1, f"between 0 and 1, such as 0.95 (got {options.target:g})"),
        ("--hours", not 0 < options.hours < 1e6, f"above 0 (got {options.hours:g})"),
        ("--batch", options.batch < 0, f"at least 1, or 0 for the recipe's (got {options.batch})"),
        ("--threads", options.threads < 0, f"at least 1, or 0 for all cores (got {options.threads})"),
    )  # fmt: skip
    for option, is_wrong, problem in wrong:
        if is_wrong:
            raise ConfigError.of_option(option, problem)


def as_table(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON: ``given`` and ``advised`` with the same fields, and what binds."""
    advice = plan.advice
    return {
        "run": plan.run.name,
        "sources": plan.sources,
        "target": advice.target,
        "is_reached": advice.is_reached,
        "binding": advice.binding,
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
