"""Microbatches between the stages of a model: who has which, and what is to be computed next."""

from __future__ import annotations

from p2p_co2.protocol.pipeline.machine import Pipeline, Work, window_of
from p2p_co2.protocol.pipeline.routes import shares
from p2p_co2.protocol.pipeline.transit import (
    DroppedMicrobatch,
    Key,
    Place,
    Sizes,
    UselessPayload,
    WorkReady,
)

__all__ = [
    "DroppedMicrobatch",
    "Key",
    "Pipeline",
    "Place",
    "Sizes",
    "UselessPayload",
    "Work",
    "WorkReady",
    "shares",
    "window_of",
]
