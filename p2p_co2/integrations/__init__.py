"""Callbacks for trainers of other libraries, each imported when it is first used:
``co2.integrations.transformers.SwarmCallback``, ``co2.integrations.lightning.SwarmCallback``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_KNOWN = ("lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _KNOWN:
        return importlib.import_module(f"p2p_co2.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
