"""When a peer measures the held-out loss of the agreed parameters, so that boards can draw it."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from p2p_co2.recipes.measured import Measured
from p2p_co2.trainer.ranks.peer import AnyPeer

SHARE = 0.005
AT_MOST_EVERY_S = 10.0


class AgreedLoss:
    """Call ``begin`` before the first step and ``after_step`` after each.

    All peers of one version hold the same parameters, so they take turns, a round each. But for a first one
    it costs at most ``SHARE`` of the training thread's time. ``held_out``: loss of a model on a small slice
    that nobody trains on; None measures nothing."""

    def __init__(self, held_out: Callable[[nn.Module], Measured] | None) -> None:
        self._held_out = held_out
        self._next_at = 0.0
        self._round = -1
        """The last one whose turn was looked at."""

    def begin(self, peer: AnyPeer) -> None:
        """Before the first step: where the run, or this peer, begins."""
        self._round = int(peer.position)
        self._measure(peer)
        self._next_at = time.monotonic() + AT_MOST_EVERY_S  # a first one takes longer than those that follow

    def after_step(self, peer: AnyPeer) -> None:
        """Measure if a round has begun that is this peer's to measure."""
        if int(peer.position) == self._round or self._held_out is None:
            return
        self._round = int(peer.position)
        if peer.has_turn(self._round, time.monotonic() >= self._next_at):
            self._measure(peer)

    def _measure(self, peer: AnyPeer) -> None:
        if self._held_out is not None:
            duration_s = peer.measure_agreed(self._held_out)
            self._next_at = time.monotonic() + max(AT_MOST_EVERY_S, duration_s / SHARE)
