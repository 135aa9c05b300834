"""Whether a peer that meets nobody may begin the run: only if nobody has trained it before.

Law: a peer that meets one that trains asks nothing. One that meets none, and has no checkpoint, goes by what
peers left word of (``discovery.records``): a run that is over is refused, and so is one that all have left.
One that goes on from a checkpoint may begin, and is told which rounds are lost. Price: records are claims, so
a liar can keep newcomers out of a run in which nobody trains, until one says ``start_over``.
"""

from __future__ import annotations

import contextlib
from typing import NoReturn

from p2p_co2.errors import RunOver, TransportError
from p2p_co2.node.node import Node
from p2p_co2.protocol.wire.messages_pb2 import RunPosition
from p2p_co2.trainer.network_thread import NetworkThread


class Beginning:
    """Of one start. ``rounds``: when the run ends, 0 for never. ``resumed_at``: the position, in rounds, of
    the checkpoint that this peer goes on from; None without one."""

    def __init__(
        self, thread: NetworkThread, rounds: int, resumed_at: float | None, start_over: bool
    ) -> None:
        self._thread, self._rounds, self._resumed_at = thread, rounds, resumed_at
        self._start_over = start_over
        self._refusal: TransportError | RunOver | None = None
        self._has_asked = False

    def refuse_if_over(self) -> None:
        """Before anything large is made: raises ``RunOver`` if the run has ended and nobody is listed."""
        if self._start_over or not self._rounds:
            return
        with contextlib.suppress(TransportError):  # it is asked once more before anything is begun
            if self._is_over(self._thread.run_position()) and self._thread.is_listed_empty():
                raise RunOver(self._rounds)

    def is_allowed(self, node: Node, has_waited: bool) -> bool:
        """Whether to begin without having met anybody. False: wait, somebody that is heard may be about to
        come back with the state; raises instead once this peer ``has_waited`` or hears nobody: ``RunOver``,
        ``TransportError`` (all have left, or no seed says whether they have)."""
        if self._start_over:
            return True
        if not self._has_asked:
            try:
                last = self._thread.run_position()
            except TransportError:
                if has_waited and self._resumed_at is None:
                    raise
                return has_waited
            self._refusal, self._has_asked = self._refused(last), True
            if self._refusal is None:
                self._tell_of_lost(last)
        if self._refusal is not None and (has_waited or not node.live_peers()):
            self._refuse(self._refusal, node)
        return self._refusal is None

    def _tell_of_lost(self, last: RunPosition | None) -> None:
        if last is not None and self._resumed_at is not None and last.position > self._resumed_at + 1:
            text = (
                f"this run was at round {last.position:.1f} when it was last heard of, and this "
                f"checkpoint is of round {self._resumed_at:.1f}: the rounds between are trained again; "
                "if a peer has a later checkpoint, stop, and start that one first"
            )
            self._thread.warn(text)

    def _refuse(self, refusal: TransportError | RunOver, node: Node) -> NoReturn:
        """Whoever is listed and does not answer left a moment ago, or is there and out of reach."""
        advice = self._thread.network.reach_advice if node.unheard_peers() else ""
        if not advice or isinstance(refusal, RunOver):
            raise refusal
        raise TransportError(f"{refusal}; or, if somebody is still there: {advice}")

    def _refused(self, last: RunPosition | None) -> TransportError | RunOver | None:
        if self._is_over(last):
            return RunOver(self._rounds)
        if last is None or self._resumed_at is not None:
            return None
        return TransportError(
            f"the others left at round {last.position:.1f}; join with the checkpoint of one of them, wait "
            "until one is back, or begin anew with --start-over (start_over=True in an own loop)"
        )

    def _is_over(self, last: RunPosition | None) -> bool:
        """Whether the run has ended, unless this peer can go on from before its end."""
        reached = [last.position] if last is not None else []
        reached += [self._resumed_at] if self._resumed_at is not None else []
        ends = [position >= self._rounds > 0 for position in reached]
        return any(ends) and (self._resumed_at is None or self._resumed_at >= self._rounds)
