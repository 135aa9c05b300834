"""Random numbers for a model's first parameters, without a trace in torch's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from p2p_co2.tensors.device import devices_in_use, random_state_kept, seed_accelerators


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Inside, torch draws from ``seed``; afterwards its random state is what it was."""
    used = devices_in_use()
    with random_state_kept(used):
        torch.manual_seed(seed)
        yield
    if not used:  # accelerators that nobody had drawn from were seeded too: as the user's own seed has them
        seed_accelerators(torch.initial_seed())
