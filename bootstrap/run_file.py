"""The default run as a file with every setting explained (``p2p-co2 init`` prints it), what a line changes in
it, and which file is at fault for a recipe. A test holds the file and the defaults together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bootstrap.options import InitOptions, PlanOptions
from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError

DEFAULT_RUN_FILE = """\
# A run of p2p-co2: what all its peers agree on. Any line may be left out; these are the defaults.
#   p2p-co2 seed run.toml        publishes it and prints a ticket
#   p2p-co2 join TICKET          on every volunteer's machine

name = "my-run"
recipe = "byte-gpt"            # built in, or your own: "path/to/file.py:function" (examples/own_recipe.py)
seed = 0                       # every peer starts from the same parameters
salt = ""                      # of chance: nobody can guess the run's ticket; "": the first seed makes one
members = false                # true: only whom you invite takes part (p2p-co2 invite NAME)
fragments = 4                  # the model is exchanged in this many pieces, one after the other
group_size = 64                # most peers that the run may have, 64 at most
weight_cap = 2.0               # a peer counts at most so many times the median; 0: no defence against liars

[recipe_options]               # go to the recipe by name; byte-gpt's are in docs/how-to/data.md

[clock]
mode = "time"                  # a round every round_s seconds; "steps": every inner_steps_per_round
round_s = 30.0                 # p2p-co2 plan says how short it may be
inner_steps_per_round = 30     # mode "steps" only; at least as many as fragments
rounds = 0                     # the run ends after this many; 0: never

[codec]
name = "q2"                    # fp32, fp16, bf16, int8, fp4, nf4, int4, e3m0, q2 or sign
error_feedback = ""            # carry what it lost into the next exchange: true, false; "": with q2 and sign
error_feedback_decay = 0.95

[outer]
rule = "keep"                  # how live parameters meet new agreed ones: keep, co2, blend or eager
lr = 0.7
momentum = 0.5
nesterov = true
gap_penalty = true             # CO2's staleness gap penalty
clip = "rms"                   # outer momentum clipping: none, elementwise or rms
clip_phi = 10.0
sync_delay_steps = 0           # apply no sooner than this many inner steps after the send
blend_alpha = 0.5              # rule "blend" only
blocking_rounds = 0            # training waits (bounded) for so many first exchanges of each fragment

[aggregation]
rule = ""                      # of slices: scored (among strangers), centred (friends), clipped, median, mean

[pipeline]                     # a model that fits no peer: cut into stages, of which a peer holds one
stages = 1                     # 1: every peer holds the whole model
microbatches = 64              # of an inner step of each replica of a stage; 8 to 16 for each stage
sequences = 1                  # in a microbatch
forward = "int8"               # how activations cross: fp32, bf16 or int8
backward = "int8"              # how their gradients come back: fp32, bf16, int8 or int4
backward_critical = ""         # of those that others wait for: int4, low rank ("rank16"), "" for the same
min_replicas = 2               # newcomers go to a stage with fewer first
tied = "no"                    # "fused": first and last stage share the token table
"""


def fitted(text: str, options: InitOptions) -> str:
    """``text``, the default run file, with rounds as short as the line of ``options`` allows for the built-in
    model, by ``plan``. Raises as ``make_plan``."""
    from bootstrap.plan.plan import make_plan

    file, up_mbit = Path("the built-in run"), options.up_mbit
    wanted = PlanOptions(run_file=file, peers=options.peers, up_mbit=up_mbit, step_s=options.step_s)
    plan = make_plan(wanted, RunConfig())
    best = plan.advice.setting
    steps = math.ceil(best.round_s / best.step_s)
    why = f"{steps} inner steps here; bound by {plan.advice.advised_binding} at {up_mbit:g} Mbit/s up"
    for name, default, fits in (
        ("fragments", "4", str(len(best.fragments))),
        ("round_s", "30.0", f"{best.round_s:g}"),
        ("name", '"q2"', f'"{best.codec}"'),
    ):
        line = f"{name} = {default}"
        assert f"\n{line} " in text
        text = text.replace(f"\n{line.ljust(30)}", f"\n{f'{name} = {fits}'.ljust(30)}", 1)
    return text.replace("p2p-co2 plan says how short it may be", f"for byte-gpt; {why}", 1)


@contextmanager
def recipe_of(run_file: Path | None, given: bool = False) -> Iterator[None]:
    """While entered, a recipe that is refused is so by the run file and its key, which the recipe does not
    know. ``given``: the recipe, but not its options, was named on the command line."""
    try:
        yield
    except ConfigError as error:
        where = str(run_file or "the run")
        if error.key.startswith(("recipe_options", "pipeline.")):
            raise ConfigError(where, error.key, error.problem) from None
        if given:
            raise ConfigError("command line", "--recipe", str(error)) from None
        raise ConfigError(where, "recipe", str(error)) from None
