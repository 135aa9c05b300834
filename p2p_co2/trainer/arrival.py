"""Whether a peer that joins is where the swarm is, or may begin the run alone; asked again and again.

Law: no thread, no clock and no waiting here: ``now`` is an argument. A peer that meets one that trains asks
nothing. One that meets none goes by what peers left word of (``discovery.records``). A run that is over is
refused, and without a checkpoint so is one that all have left. With one it may begin, and is told which
rounds are lost. Price: records are claims, so a liar can keep newcomers out of a run in which nobody trains,
until one says ``start_over``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import replace

from p2p_co2.config import ClockConfig
from p2p_co2.errors import ConfigError, RunOver, TransportError
from p2p_co2.node.node import Node
from p2p_co2.node.progress import LISTENED_S, Where
from p2p_co2.trainer.session import Participation
from p2p_co2.trainer.synchroniser import Progressed
from p2p_co2.wire.messages_pb2 import RunPosition

GATHER_BOUND_S = 120.0
"""Waiting for ``min_peers``; half of it for those who have the state and went before this peer had it."""
LISTEN_S = 3.0
"""A peer that hears nobody for this long after its start is the first one. Peers with another model are
believed after it: their table has come by then, or does not."""
CATCH_UP_BOUND_S = 600.0
"""For the first fragment that a peer without the agreed state is to be given, and for each further one."""


class Arrival:
    """Of a ``node`` that has run since ``began_at``, in seconds of the ``now`` that is given. ``group_size``:
    how many peers the run can have."""

    def __init__(self, node: Node, began_at: float, group_size: int) -> None:
        self._node = node
        self._began_at = began_at
        self._group_size = group_size
        self._followed_at = self._given_at = began_at
        self._began_with = tuple(node.agreed)
        self._given = 0

    def has_waited(self, now: float) -> bool:
        """Whether all who are listed had the time to answer."""
        return now - self._began_at > LISTENED_S

    def _has_listened(self, now: float) -> bool:
        is_alone = not self._node.unheard_peers()
        return (is_alone and now - self._began_at > LISTEN_S) or self.has_waited(now)

    def is_in_doubt(self, now: float) -> bool:
        """Whether those heard so far mostly train another model, which the next answers may change. Raises
        ``ConfigError`` when they do not."""
        membership = self._node.membership
        stranger = membership.strangers.outnumber([info.status for info in list(membership.live.values())])
        if stranger is None:
            return False
        if self._has_listened(now) and self._node.now() - stranger.since > LISTEN_S:
            name, problem = stranger.difference or ("", "the others would not say how it differs")
            raise ConfigError("the model is not the one that this run's peers train", name, problem)
        return True

    def is_gathered(self, min_peers: int, now: float) -> bool:
        """Whether enough peers are live, this one too. Raises as ``is_in_doubt``, and ``TransportError``."""
        self.is_in_doubt(now)
        live = self._node.live_peers() + 1
        if live < min_peers and now - self._began_at > GATHER_BOUND_S:
            raise TransportError(
                f"only {live} of {min_peers} peers after {GATHER_BOUND_S:.0f} s; start the others, or ask "
                "for fewer with --min-peers"
            )
        return live >= min_peers

    def is_there(self, now: float) -> bool:
        """Whether it has arrived; not while it ``is_in_doubt``, and raises as that. Raises
        ``TransportError`` if it cannot arrive any more."""
        node = self._node
        known = self._node.progress.joining
        if known.where is Where.NO_ROOM:
            raise TransportError(
                f"this run has {self._group_size} peers already, as many as its group_size allows; "
                "join again when one has left"
            )
        if (moved := sum(map(operator.ne, node.agreed, self._began_with))) > self._given:
            self._given = moved
            self._given_at = now
        is_left_behind = known.where is Where.LEFT_BEHIND
        if not is_left_behind:
            self._followed_at = now
        in_doubt = self.is_in_doubt(now) or is_left_behind
        # Of others that just came, or went, it is concluded only in a moment what that means.
        is_alone = known.where is Where.ALONE
        if not in_doubt and (not is_alone or node.live_peers() == 0):
            listened = self._has_listened(now)
            # Those who join as we do know no more than we: who is listed may be about to answer.
            knows = known.has_met or not node.unheard_peers() or listened
            found = knows and now - self._began_at > 0.2
            if listened if is_alone else found and known.where is Where.ABREAST:
                return True
        if now - self._followed_at > GATHER_BOUND_S / 2:
            raise TransportError(
                "the others left before this peer had their state; join again when one is back"
            )
        if now - self._given_at > CATCH_UP_BOUND_S:
            raise TransportError("no peer could give this one the agreed state; try again later")
        return False


class Beginning:
    """Whether a peer may begin without having met anybody. ``rounds``: when the run ends, as it is at a
    position; 0 for never. ``resumed_at``: the position, in rounds, of the checkpoint that this peer goes on
    from; None without one."""

    def __init__(
        self, part: Participation, rounds: Callable[[float], int], resumed_at: float | None, start_over: bool
    ) -> None:
        self._part = part
        self._rounds = rounds
        self._resumed_at = resumed_at
        self._is_allowed = start_over
        self._refusal: TransportError | RunOver | None = None

    def refuse_if_over(self) -> None:
        """Before anything large is made: raises ``RunOver`` if the run has ended and nobody is listed."""
        if self._is_allowed or not self._rounds(0.0):
            return
        with contextlib.suppress(TransportError):  # it is asked once more before anything is begun
            if (end := self._end(self._part.run_position())) and self._part.is_listed_empty():
                raise RunOver(end)

    def is_allowed(self, node: Node, has_waited: bool) -> bool:
        """Whether to begin. False: wait, somebody that is heard may be about to come back with the state.
        Once this peer ``has_waited`` or hears nobody it raises instead: ``RunOver``, or ``TransportError``
        (all have left, or no seed says whether they have)."""
        if not self._is_allowed and self._refusal is None:
            try:
                last = self._part.run_position()
            except TransportError:
                if has_waited and self._resumed_at is None:
                    raise
                return has_waited
            self._judge(last)
        refusal = self._refusal
        if refusal is None or not (has_waited or not node.live_peers()):
            return self._is_allowed
        # Whoever is listed and does not answer left a moment ago, or is there and out of reach.
        advice = self._part.network.reach_advice if node.unheard_peers() else ""
        if not advice or isinstance(refusal, RunOver):
            raise refusal
        raise TransportError(f"{refusal}; or, if somebody is still there: {advice}")

    def _judge(self, last: RunPosition | None) -> None:
        """Allow or refuse, and tell what is lost. ``last``: where the run was when it was heard of last."""
        resumed_at = self._resumed_at
        if end := self._end(last):
            self._refusal = RunOver(end)
        elif last is not None and resumed_at is None:
            stage = self._part.network.holds.stage
            how = "--start-over" if stage is None else f"--stage {stage} --restart-stage"
            self._refusal = TransportError(
                f"the others left at round {last.position:.1f}; join with the checkpoint of one of them, "
                f"wait until one is back, or begin anew with {how} (start_over=True in an own loop)"
            )
        else:
            self._is_allowed = True
            if last is not None and resumed_at is not None and last.position > resumed_at + 1:
                self._part.warn(
                    f"this run was at round {last.position:.1f} when it was last heard of, and this "
                    f"checkpoint is of round {resumed_at:.1f}: the rounds between are trained again; "
                    "if a peer has a later checkpoint, stop, and start that one first"
                )

    def _end(self, last: RunPosition | None) -> int:
        """The round that the run has ended with; 0 if this peer can begin, or go on from before its end. What
        others say of an amended end is not signed by the organiser."""
        at = self._resumed_at if self._resumed_at is not None else last.position if last is not None else 0.0
        rounds, said = self._rounds(at), last.rounds if last is not None else 0
        if rounds and (self._resumed_at is None or said > rounds):  # no stranger's word keeps a state away
            rounds = said or rounds
        return rounds if at >= rounds else 0


def caught_up(
    progressed: Progressed, others: tuple[float, float] | None, clock: ClockConfig, now: float
) -> Progressed:
    """``progressed`` at the position of ``others`` (it, and when it was that), if that is further on."""
    if others is None:
        return progressed
    moved = (now - others[1]) / clock.round_s if clock.mode == "time" else 0.0
    return replace(progressed, position=max(others[0] + moved, progressed.position))
