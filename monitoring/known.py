"""What a reader knows of a swarm, and by it where each peer and the run stand.

Law: the run is where the middle of the peers is that train. Those that ended together count instead if they
are at least as many and got further, so one liar moves nothing among several. A peer that has not caught up
is "behind", and its figures are not the run's.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from monitoring.facts import ENDED, ONLINE, RECENT_S, SILENT_AFTER_S, TRAINS
from monitoring.words import LEFT_PREFIX
from p2p_co2.config import RunConfig
from p2p_co2.protocol.reports import ASKS_PER_S
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.view import Outcomes, PeerRecord, SwarmView
from p2p_co2.wire.limits import MAX_FRAGMENTS
from p2p_co2.wire.names import words_of

BEHIND_ROUNDS = 2.0
"""A peer that lags so far is not where the run is."""
_WAITING = FeedState("connected", "waiting for the first peer")


@dataclass(frozen=True)
class Known:
    """All that facts are made of. ``now``: unix seconds. ``sightings``, ``received_at`` (when its events
    last came, by the reader's clock): by peer. ``is_over``: nobody is left that could write more. ``me``: the
    reader's own peer, "" if it has none."""

    view: SwarmView
    now: float
    run: RunConfig | None = None
    state: FeedState = _WAITING
    place: str = ""
    sightings: Mapping[str, Sighting] = field(default_factory=dict)
    received_at: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False
    me: str = ""

    def sighting(self, peer: PeerRecord) -> Sighting:
        return self.sightings.get(peer.peer) or Sighting(peer.peer)

    def label(self, peer: str) -> str:
        return self.labels.get(peer) or words_of(peer)

    @cached_property
    def labels(self) -> Mapping[str, str]:
        return self.view.labels()

    @cached_property
    def stages(self) -> int:
        """Of the run; 1 where every peer holds the whole model."""
        return self.run.pipeline.stages if self.run is not None else self.view.stages

    def stage_of(self, peer: PeerRecord) -> int | None:
        """That it holds; None in a run of one stage, or if neither it nor a certificate has said so."""
        if self.stages > 1 and peer.started and peer.start.stages > 1:
            return peer.start.stage
        return self._certified.get(peer.peer) if self.stages > 1 else None

    @cached_property
    def _certified(self) -> Mapping[str, int]:
        """The stage by peer whose work certificates count."""
        return {peer: one.stage for one in self.view.rounds.values() for peer in one.weights}

    @cached_property
    def by_stage(self) -> Mapping[int, Sequence[PeerRecord]]:
        """Peers that were heard themselves, by the stage that they hold; all of stage 0 in a run of one."""
        found: dict[int, list[PeerRecord]] = {stage: [] for stage in range(self.stages)}
        for peer in self.view.peers.values():
            stage = 0 if self.stages == 1 else self.stage_of(peer)
            if peer.started and stage in found:
                found[stage].append(peer)
        return found

    @cached_property
    def reached(self) -> Mapping[str, str]:
        """The carrier by peer to which the reader's own peer, if that is online, has a link."""
        own = self.view.peers.get(self.me)
        is_online = own is not None and own.started and peer_state(self, own)[0] in ONLINE
        return own.open_links if own is not None and is_online else {}

    @cached_property
    def fragments(self) -> int:
        """As most peers cut the model or their stage, which may be in more pieces than asked for; at most
        what a run may have."""
        return self._fragments_of(list(self.view.peers.values()))

    @cached_property
    def stage_fragments(self) -> Mapping[int, int]:
        """The same by stage."""
        return {stage: self._fragments_of(peers) for stage, peers in self.by_stage.items()}

    def _fragments_of(self, peers: Sequence[PeerRecord]) -> int:
        told = Counter(peer.start.fragments for peer in peers)
        possible = [number for number, _ in told.most_common() if 0 < number <= MAX_FRAGMENTS]
        return possible[0] if possible else (self.run.fragments if self.run else 0)

    @cached_property
    def outcomes(self) -> Mapping[int, Outcomes]:
        """Of the rounds that were seen, by stage."""
        return self.view.outcomes

    @cached_property
    def committed_at(self) -> float:
        """When several peers committed an exchange last, unix seconds: of any fragment, in whatever order the
        rounds were heard of. 0.0: not seen."""
        rounds = [one for one in self.view.rounds.values() if one.outcome == "committed"]
        return max((commit.at for one in rounds for commit in one.commits.values()), default=0.0)

    @cached_property
    def counted(self) -> Mapping[int, float]:
        """Work that was counted, summed over fragments, by stage."""
        found: dict[int, float] = dict.fromkeys(range(self.stages), 0.0)
        for peer, weight in self.view.counted.items():
            known = self.view.peers.get(peer)
            stage = 0 if self.stages == 1 else None if known is None else self.stage_of(known)
            if stage in found:
                found[stage] += weight
        return found

    @property
    def round_s(self) -> float | None:
        """Seconds per round; None if rounds go by steps."""
        return self.run.clock.round_s if self.run is not None and self.run.clock.mode == "time" else None


# ---- where a peer stands, and the run


def peer_state(known: Known, peer: PeerRecord) -> tuple[str, str]:
    """(state, reason) of a peer, wherever the run is."""
    if peer.end is not None:
        return "finished", peer.end.reason
    sighting = known.sighting(peer)
    said = peer.left_reason
    out_of_reach = [("unreachable", sighting.reason)] if sighting.state == "unreachable" else []
    gone = ("gone", f"others say: {said}")
    if said.startswith(LEFT_PREFIX):
        gone = ("left", said.removeprefix(LEFT_PREFIX))
    if peer.last_seen_at is None:
        words = sighting.reason or "sends nothing that can be read"
        unknown = ("unknown", words if sighting.refused else "no word of its own yet")
        reached = [("reached", "")] if not (said or sighting.refused) and peer.peer in known.reached else []
        return [*([gone] if said else []), *out_of_reach, *reached, unknown][0]
    # What came last may be old. In a crowd each is asked more rarely, and silence means less.
    heard_at = max(peer.last_seen_at, known.received_at.get(peer.peer, 0.0))
    silent_s = known.now - heard_at - max(0.0, len(known.sightings) / ASKS_PER_S - 1)
    if said and silent_s > 0.3 * SILENT_AFTER_S:
        return gone
    if silent_s > SILENT_AFTER_S:
        return [*out_of_reach, ("silent", f"no word for {silent_s:.0f} s")][0]
    return ("gone", "it ended without a word") if known.is_over else (peer.phase or "starting", peer.paused)


def run_position(trains: Sequence[float], ended: Sequence[tuple[float, float]]) -> float:
    """In rounds; 0 without anybody. ``trains``: positions; ``ended``: (last heard at, position)."""
    newest_at = max((at for at, _ in ended), default=0.0)
    last = sorted(position for at, position in ended if at >= newest_at - RECENT_S)
    now = statistics.median_low(trains) if trains else 0.0
    return max(now, last[len(last) // 2]) if last and len(last) >= len(trains) else now


def is_behind(position: float, run: float) -> bool:
    """Whether the figures of a peer at ``position`` say nothing of a run that is at ``run``."""
    return position < run - BEHIND_ROUNDS


def where_all_are(known: Known, everybody: Iterable[PeerRecord]) -> tuple[float, dict[str, tuple[str, str]]]:
    """(where the run is, state and reason by peer)."""
    states = {}
    at_by_state: dict[str, list[tuple[float, float]]] = {}
    for peer in everybody:
        states[peer.peer] = peer_state(known, peer)
        heard = (peer.last_seen_at or 0.0, peer.progress.position)
        at_by_state.setdefault(states[peer.peer][0], []).append(heard)
    trains = [position for state in TRAINS for _, position in at_by_state.get(state, ())]
    paused = [position for _, position in at_by_state.get("paused", ())]  # who rests stands still
    ended = [one for state in ENDED for one in at_by_state.get(state, ()) if one[1]]
    at = run_position(trains or paused, ended)
    at = at if trains else max(at, known.state.position)
    for name, (state, _) in states.items():
        position = known.view.peers[name].progress.position if state in TRAINS else at
        if is_behind(position, at):
            words = f"at round {position:.1f}, the run is at {at:.1f}: it has not caught up, or begins anew"
            states[name] = ("behind", words)
    return at, states
