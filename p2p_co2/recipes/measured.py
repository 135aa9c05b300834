"""What a measurement of a model on data that nobody trains on gives: a loss, or a loss and more figures.

    def evaluate(model):
        return {"loss": 2.31, "accuracy": 0.48, "perplexity": 10.1}

The loss is what a run is judged by. The others, 16 at most, are drawn beside it under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

from p2p_co2.errors import ConfigError
from p2p_co2.telemetry.events import check_figures

Measured = SupportsFloat | Mapping[str, SupportsFloat]


def measured(told: Measured) -> tuple[float, dict[str, float]]:
    """(The loss, the other figures by name.) Raises ``ConfigError`` for a mapping without a loss, or with
    figures that cannot be told to others."""
    if not isinstance(told, Mapping):
        return float(told), {}
    try:
        figures = {name: float(value) for name, value in told.items()}
        loss = figures.pop("loss")
        check_figures(figures)
    except (KeyError, ValueError) as error:
        problem = 'several figures without one called "loss"; give it' if "loss" not in told else str(error)
        raise ConfigError("the program", "evaluate", problem) from None
    return loss, figures
