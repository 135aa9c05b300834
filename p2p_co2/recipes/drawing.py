"""Random numbers for a model's first parameters, without a trace in torch's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Inside, torch draws from ``seed``; afterwards its random state is what it was."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else []):
        torch.manual_seed(seed)
        yield
    if not used:  # accelerators that nobody had drawn from were seeded too: as the user's own seed has them
        torch.cuda.manual_seed_all(torch.initial_seed())
