"""When a peer measures the held-out loss of the agreed parameters, so that boards can draw it.

Law: measuring costs at most ``SHARE`` of the training thread's time: the next one is as far away as the last
one was long, over ``SHARE``. All peers of one version hold the same agreed parameters and the same held-out
data, so each measures rarely and their points together make one curve; where a peer begins is drawn from its
id, so that they do not measure all at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from p2p_co2.trainer import Peer

SHARE = 0.003
FIRST_WITHIN_S = 30.0
AT_MOST_EVERY_S = 15.0


class AgreedLoss:
    """``held_out``: the recipe's; None measures nothing. ``peer_id`` spreads the peers."""

    def __init__(self, held_out: Callable[[nn.Module], float] | None, peer_id: str) -> None:
        self._held_out = held_out
        spread = hashlib.sha256(peer_id.encode()).digest()[0] / 255
        self._next_at = time.monotonic() + 5.0 + FIRST_WITHIN_S * spread

    def after_step(self, peer: Peer) -> None:
        """Measure if it is time."""
        if self._held_out is None or time.monotonic() < self._next_at:
            return
        duration_s = peer.measure_agreed(self._held_out)
        self._next_at = time.monotonic() + max(AT_MOST_EVERY_S, duration_s / SHARE)
