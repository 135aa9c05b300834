"""What the run of a ticket asks of this machine: memory, disk, and how much of its link.

Law: reckoned by ``p2p_co2.planning`` from the verified settings and what was measured. Price: an own recipe's
size is not known before its file is named, so its needs are "unknown".
"""

from __future__ import annotations

from collections.abc import Iterator

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.planning import Link, even_fragments, forecast, setting_of
from peers.doctor.findings import Finding, MeasuredLink, State
from peers.doctor.machine import BASE_BYTES, available_memory_bytes, check_disk, check_memory

TRAINING_BYTES_PER_VALUE = 16
"""Weights, gradients and AdamW's two moments in fp32."""
CHECKPOINT_BYTES_PER_VALUE = 16
"""Agreed parameters and momentum, AdamW's two moments."""
_ASSUMED_PEERS = 4


def parameters_of(run: RunConfig) -> int | None:
    """Values of the built-in recipe's model, counted without making it; None for others. Imports torch."""
    import torch

    from p2p_co2.recipes.byte_gpt import ByteGPT, Shape
    from p2p_co2.recipes.recipe import BYTE_GPT

    if run.recipe != BYTE_GPT:
        return None
    shape = {key: int(value) for key, value in run.recipe_options.items() if key in Shape._fields}
    with torch.device("meta"):
        model = ByteGPT(Shape(**shape))
    return sum(parameter.numel() for parameter in model.parameters())


def look_at_needs(run: RunConfig, config: PeerConfig, peers: int, link: MeasuredLink) -> Iterator[Finding]:
    """Memory, disk and link against what ``run`` needs among ``peers`` other peers."""
    parameters = parameters_of(run)
    if parameters is None:
        advice = "ask the organiser for the recipe's file and plan with it: p2p-co2 plan RUN.toml"
        yield Finding("this run", State.UNKNOWN, f"own recipe {run.recipe}: size not known", advice)
        return
    known = link.up_bytes_per_s and link.down_bytes_per_s
    line = Link(
        up_bytes_per_s=link.up_bytes_per_s or 1.0,
        down_bytes_per_s=link.down_bytes_per_s or 1.0,
        round_trip_s=link.round_trip_s or 0.0,
    )
    links = [line] * (peers + 1 if peers else _ASSUMED_PEERS)
    train_bytes = BASE_BYTES + TRAINING_BYTES_PER_VALUE * parameters
    fragments = even_fragments(parameters, run.fragments)
    setting = setting_of(run, fragments, step_s=1.0, links=links, train_bytes=train_bytes)
    shown = forecast(setting)
    yield check_memory(available_memory_bytes(), shown.memory_bytes, "run's memory")
    yield check_disk(config.folder, 3 * CHECKPOINT_BYTES_PER_VALUE * parameters + 50e6, "run's disk")
    if known and run.clock.mode == "time":
        yield check_link(shown.floor_s, run.clock.round_s)


def check_link(floor_s: float, round_s: float) -> Finding:
    """``floor_s``: the least time in which this link moves one round of all fragments."""
    words = f"an exchange takes {floor_s:.3g} s of this link, a round is {round_s:g} s"
    if floor_s > round_s:
        return Finding(
            "run's link", State.LIMITED, words, "answers will be stale: a faster link, or a longer round"
        )
    if floor_s > 0.8 * round_s:
        return Finding(
            "run's link", State.LIMITED, words, "hardly enough: use a cable, not Wi-Fi, and spare the link"
        )
    return Finding("run's link", State.OK, words)
