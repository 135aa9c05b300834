"""What is known of a swarm at one moment, made from the fold: pages, terminal, ``/api/swarm`` and metrics
show it.

Each field of a fact says its unit and whose word it is. ``own word``: the peer said so itself, in a report it
signed. ``counted``: the rounds' certificates say so. ``observed``: this reader saw it. The JSON schema of
``GET /api/swarm`` is made from these classes. A number that is not known is null.

Laws: whatever a peer said, no fact is negative, infinite or unbounded, and none fails to be made. The run is
where the middle of the peers is that train; those that ended together last count instead if they are at least
as many and got further. So one liar moves nothing among several. A peer that has not caught up is "behind",
and its figures are not the run's. A trouble rests on something observed, counted or signed, goes away when it
is over (``RECENT_S``), and never tells of what every healthy run has. Price: about 60 microseconds per peer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field

from monitoring.words import LEFT_PREFIX, clock, describe, loss_unit, percent, plain, size
from p2p_co2.config import RunConfig
from p2p_co2.protocol.reports import ASKS_PER_S
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.view import PeerView, RoundView, SwarmView, mean_of, numbered
from p2p_co2.wire.limits import MAX_FRAGMENTS

STATES = (
    "starting", "joining", "behind", "training", "draining", "paused", "finished", "left", "gone", "silent",
    "unreachable", "unknown",
)  # fmt: skip
"""Of a peer. Silence alone is not death, and neither is the word of others: it is "gone" when both come
together."""
ONLINE = frozenset({"starting", "joining", "training", "draining", "paused", "behind"})
OVER = frozenset({"finished", "left"})
BEHIND_ROUNDS = 2.0
"""A peer that lags so far is not where the run is."""
OVERDUE_ROUNDS = 3.0
"""Without a committed exchange of any fragment."""
ROUNDS_SHOWN = 240
SILENT_AFTER_S = 10.0
"""Ten questions to a peer without an answer, and what rates are measured over. The word of others counts
after a third of it; what lasts three times as long is told to a person."""
TRAINS = frozenset({"training", "draining"})
ENDED = OVER | {"gone", "silent", "unreachable"}
NOT_IN_THE_RUN = frozenset({"starting", "joining", "behind", "unknown"})
LATE_RULES = frozenset({"co2", "eager"})
"""Apply rules whose answers are one outer step old by design."""
RECENT_S = 120.0
"""Peers that ended within it ended together."""
MAX_TROUBLES = 24
EXPOSED_SHARE = 0.05
"""Of a peer's wall time; the aim of the whole house is 1 %."""
SKIPPED_SHARE, MIN_SENDS = 0.2, 5
"""Of the sends of late that were due: below, or among fewer, a skipped one is nothing to act on."""
LINE_SHARE = 0.5
"""Of a line's cap or rate; with less traffic over some seconds it is not the line that holds rounds up."""
BAD = "bad"
ODD = "odd"
_UPDATE = "its owner should install the organiser's version"
_ADVICE = {
    "round_aborted": (BAD, "its work goes into the next one; if that goes on, look at the peer it names"),
    "message_refused": (ODD, _UPDATE),
    "warned": (ODD, "its own terminal or log says more"),
}
"""What to do about an event, by its kind."""
ALL_ENDED = "every peer has finished, left or ended"
MODEL = "every peer that took part has the model: p2p-co2 model FOLDER --out DIR"
INVITE = "invite others with: p2p-co2 join TICKET (the word that the seed printed)"
_ABSENT = {
    "gone": ("is gone", "the others go on; if it is yours, join again there"),
    "silent": ("is silent", "if it is yours, see whether that machine sleeps or starves"),
    "unreachable": ("cannot be reached", "if it is yours, ask p2p-co2 doctor there"),
}


class RunState(StrEnum):
    """How a run is, in a word, as one reader sees it. The first that is true holds:

    ``OVER``: its rounds are made, which a seed knows too, and nobody trains; or every peer has finished or
    left; or its journals ended.
    ``LOST``: the reader cannot reach the run, or of the peers that were there none is online.
    ``ALONE``: all that are online are paused; or all but one, in a run of one stage; whom the reader's own
    peer has a link to, and nobody has heard yet, is taken for one at work.
    ``DEGRADED``: training goes on, and something bad (``Trouble.severity``) began in the last ``RECENT_S``;
    or a stage has no replica; or none of a fragment's exchanges has committed for ``OVERDUE_ROUNDS``.
    ``HEALTHY``: none of these. A run of which nobody has been heard yet has no state.
    """

    HEALTHY = "Healthy"
    ALONE = "Alone"
    DEGRADED = "Degraded"
    LOST = "Lost"
    OVER = "Over"


_UNSEEN = Sighting("")
_WAITING = FeedState("connected", "waiting for the first peer")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class LinkFacts(_Frozen):
    """One direction of one link, as its sender measured it (own word)."""

    other: str = Field(description="Peer id of the receiver.")
    carrier: str = Field(description='"grpc" or "libp2p".')
    relayed: bool = Field(description="Whether a third machine passes the bytes on.")
    round_trip_s: float | None = Field(description="Seconds, the smallest of late.")
    bytes_per_s: float | None = Field(description="Rate while payload was being sent, bytes per second.")
    sent_bytes: int = Field(description="Payload bytes since the peer's process started.")


class PipelineFacts(_Frozen):
    """A peer's place in a run with stages, and its microbatches (own word)."""

    stage: int = Field(description="That it holds; the first is 0.")
    waiting: int = Field(description="Microbatches that are here and not begun.")
    in_flight: int = Field(description="Microbatches whose gradient has not come back from behind.")
    counted: int = Field(description="Microbatches in its gradients since its process started.")
    dropped: int = Field(description="Microbatches given up since its process started.")
    waiting_share: float | None = Field(description="Of its time it waits for microbatches, 0 to 1.")
    waits_for: str = Field(description="What for, in words; empty while there is work.")


class PeerFacts(_Frozen):
    """One peer."""

    peer: str = Field(description="Peer id; its public key, so nobody else can speak in its name.")
    label: str = Field(description="Short and unique here: its name, or the end of its id.")
    name: str = Field(description="Own word.")
    state: str = Field(description=", ".join(STATES))
    reason: str = Field(description="Why it is in that state, in words; may be empty.")
    device: str = Field(description="torch's name of it. Own word.")
    software: str = Field(description="Own word.")
    joined_at: float | None = Field(description="First event, unix seconds.")
    last_seen_at: float | None = Field(description="Newest event, unix seconds.")
    clock_offset_s: float | None = Field(description="Its clock minus the reader's, seconds. Observed.")
    answer_s: float | None = Field(description="Seconds it took to answer the last question. Observed.")
    tokens: int = Field(description="Trained by its processes so far. Own word.")
    tokens_counted: float | None = Field(description="Work in committed means, by fragment. Counted.")
    share_counted: float | None = Field(
        description="Its part of all counted work of its stage, 0 to 1. Counted."
    )
    tokens_per_s: float = Field(description="Own word.")
    loss: float | None = Field(description="Training loss of late, in loss_unit. Own word.")
    inner_steps: int = Field(description="Own word.")
    position: float = Field(description="Where it is, in rounds. Own word.")
    versions: tuple[int, ...] = Field(description="Outer version by fragment. Own word.")
    staleness_mean: float | None = Field(description="Outer steps, over all that it applied.")
    sync_delay_steps_mean: float | None = Field(description="Inner steps between send and apply.")
    utilisation: float | None = Field(description="Inner steps over wall seconds, 0 to 1. Own word.")
    wall_s: float = Field(description="Seconds since its first inner step. Own word.")
    exposed_s: float = Field(description="Seconds training stood still for communication. Own word.")
    hidden_s: float = Field(description="Seconds of communication behind which training went on. Own word.")
    up_bytes: int = Field(description="Sent since its process started. Own word.")
    down_bytes: int = Field(description="Received since its process started. Own word.")
    up_bytes_per_s: float | None = Field(description="Over the last ten seconds.")
    down_bytes_per_s: float | None = Field(description="Over the last ten seconds.")
    upload_cap_bytes_per_s: float | None = Field(description="Its owner's cap; null for none. Own word.")
    needed_bytes_per_s: float | None = Field(description="What rounds ask of the average member each way.")
    fragment_age_s: tuple[float | None, ...] = Field(description="Since agreed parameters reached each.")
    carriers: dict[str, int] = Field(description="Its open links by carrier; none once it is not online.")
    links: tuple[LinkFacts, ...] = Field(description="Measured links, by receiver.")
    skipped_sends: int = Field(description="Schedule points passed with the exchange before still in flight.")
    refused: dict[str, int] = Field(description="Messages that it refused, by reason. Own word.")
    missed: dict[str, int] = Field(
        description="Exchanges in which slices of it were not counted, by reason. Own word."
    )
    nonsense: dict[str, int] = Field(description="What it told that cannot be, by cause. Observed.")
    pipeline: PipelineFacts | None = Field(description="Null in a run of one stage, or if unknown.")

    @property
    def stage(self) -> int | None:
        """None in a run of one stage, or if it has not said so."""
        return None if self.pipeline is None else self.pipeline.stage


class StageFacts(_Frozen):
    """One stage of a run with several: what its replicas are and do together."""

    stage: int = Field(description="The first is 0.")
    replicas: int | None = Field(
        description="Its peers online, or as those beside it hear if none is seen; null if unknown."
    )
    known: int = Field(description="Its peers that were ever seen.")
    versions_apart: int | None = Field(description="Outer versions between its foremost and last replica.")
    tokens: int = Field(description="Sum of its peers' own words.")
    tokens_counted: float = Field(description="By certificates.")
    tokens_per_s: float = Field(description="Sum of its replicas' own words.")
    waiting: int = Field(description="Its queue: microbatches that are at a replica and not begun. Own word.")
    in_flight: int = Field(description="Microbatches behind it whose gradient has not come. Own word.")
    counted: int = Field(description="Microbatches in its gradients. Own word.")
    dropped: int = Field(description="Microbatches that its peers gave up. Own word.")
    waiting_share: float | None = Field(
        description="Of its replicas' time they wait, mean, 0 to 1. Own word."
    )
    waits_for: str = Field(description="What most of its waiting replicas wait for; empty if none waits.")
    utilisation: float | None = Field(description="Mean of its replicas, 0 to 1. Own word.")
    forward_bytes_per_s: float | None = Field(
        description="To the stage behind while payload is under way: the median link. Own word."
    )
    back_bytes_per_s: float | None = Field(description="The same to the stage before.")
    forward_round_trip_s: float | None = Field(
        description="Of the median link to the stage behind. Own word."
    )
    back_round_trip_s: float | None = Field(description="The same to the stage before.")
    forward_bytes: int = Field(description="Sent to the stage behind, payload. Own word.")
    back_bytes: int = Field(description="Sent to the stage before, payload. Own word.")
    rounds_committed: int = Field(description="Fragment exchanges that several replicas committed.")
    rounds_alone: int = Field(description="Made by one replica with nobody else.")
    rounds_aborted: int = Field(description="Fragment exchanges that were given up.")
    trouble: str = Field(description="That it has no replica, or too few, and what to do; empty if neither.")
    trouble_since_at: float | None = Field(description="Unix seconds.")

    @property
    def is_empty(self) -> bool:
        """Whether it is known to have no replica, so that training waits."""
        return self.replicas == 0 and bool(self.trouble)


class Trouble(_Frozen):
    """Something that is wrong now."""

    peer: str = Field(description="Peer id; empty if it is about the whole swarm.")
    words: str = Field(description="What and why, in one sentence, and what to do.")
    severity: str = Field(description='"bad" or "odd".')
    since_at: float = Field(description="Unix seconds.")


class RoundFacts(_Frozen):
    """One fragment exchange: the peers average what they learned for one fragment, in one round."""

    stage: int = Field(description="Whose replicas made it; 0 in a run of one stage.")
    fragment: int
    round: int = Field(description="That it belongs to: the outer version that it would make.")
    at: float = Field(description="Unix seconds of its newest news.")
    outcome: str = Field(description="open, committed, partial, late, alone (by one peer) or aborted.")
    group_size: int
    contributors: int
    staleness: int = Field(description="Of the most stale outer step that came of it; -1 if unknown.")
    duration_s: float = Field(
        description="READY to certificate at the slowest member, seconds; 0 if unknown."
    )
    reason: str = Field(description="Why attempts were aborted, or who missed it; may be empty.")
    counted: bool = Field(description="Whether a certificate was seen and checked.")


class SwarmFacts(_Frozen):
    """A swarm at one moment."""

    at: float = Field(description="Unix seconds of this view.")
    me: str = Field(description="Peer id of the reader's own peer; empty if it belongs to none.")
    state: str = Field(description=f"{', '.join(RunState)}; empty until a peer is heard.")
    state_words: str = Field(description="Why it is in that state, in words.")
    progress: float | None = Field(description="Of the run's rounds, made, 0 to 1; null if it has no end.")
    time_left_s: float | None = Field(
        description="Until the run's last round, seconds, at the pace of its clock or of its peers' steps. "
        "Null if it has no end, does not go on, or its pace is not known."
    )
    my_exchange: RoundFacts | None = Field(
        description="The newest committed fragment exchange that the reader's own peer took part in."
    )
    run: str = Field(description="The run's name; empty until it is known.")
    run_digest: str = Field(description="sha256 of the run's settings, hex; empty until it is known.")
    place: str = Field(description="Where these facts come from.")
    connection: str = Field(description='"connecting", "connected", "lost" or "ended".')
    connection_words: str
    fragments: int
    parameters: int = Field(description="Own word of the peers.")
    round_s: float | None = Field(description="Seconds per round; null if rounds go by steps.")
    rounds_total: int = Field(description="When the run ends; 0 for never.")
    position: float = Field(description="Where the run is, rounds: median of the peers that are in it.")
    peers_online: int
    peers_known: int
    loss: float | None = Field(description="loss_agreed, or loss_training where that is two rounds old.")
    loss_kind: str = Field(description='"held-out" or "training": which of them that is.')
    loss_agreed: float | None = Field(description="Newest held-out loss of the agreed parameters.")
    loss_agreed_at: float | None
    loss_training: float | None = Field(description="Mean training loss of the peers in the run.")
    loss_unit: str = Field(description="Known for the built-in recipe; empty where only its author knows.")
    tokens: int = Field(description="Sum of the peers' own words; with stages, of the first that is heard.")
    tokens_counted: float = Field(description="By certificates; the same peers'.")
    tokens_per_s: float = Field(description="Sum of the same peers' own words.")
    utilisation: float | None = Field(description="Mean of the peers online, else of all; 0 to 1.")
    up_bytes: int = Field(description="Sum of the peers' own words.")
    up_bytes_per_s: float = Field(description="Sum over the peers.")
    rounds_committed: int = Field(description="Fragment exchanges that several peers committed.")
    rounds_alone: int = Field(description="Made by one peer with nobody else: nothing was exchanged.")
    rounds_aborted: int = Field(description="Fragment exchanges that were given up.")
    rounds_counted: int = Field(description="Committed fragment exchanges whose certificate was checked.")
    staleness: dict[str, int] = Field(description="Applied outer steps by staleness.")
    staleness_mean: float | None
    sync_delay_steps_mean: float | None
    abort_reasons: dict[str, int]
    troubles: tuple[Trouble, ...]
    peers: tuple[PeerFacts, ...]
    rounds: tuple[RoundFacts, ...] = Field(description="The newest fragment exchanges, newest first.")
    stages: tuple[StageFacts, ...] = Field(description="In their order; empty in a run of one stage.")

    @property
    def missed(self) -> Counter[str]:
        """Exchanges in which a peer's slices were not counted, by reason, over all peers."""
        return sum((Counter(peer.missed) for peer in self.peers), Counter[str]())

    @property
    def has_figures(self) -> bool:
        """Whether any peer was heard itself; else sums over the peers say nothing of the run."""
        return any(peer.last_seen_at is not None for peer in self.peers)

    @property
    def nothing(self) -> str:
        """Why there is no swarm to show: "over" before anybody was heard, or the connection; else ""."""
        is_past = self.state == RunState.OVER and not self.has_figures
        return "over" if is_past else "" if self.peers_known else self.connection

    @property
    def how(self) -> str:
        """How the run is, in words."""
        return f"{self.state}: {self.state_words}" if self.state else self.connection_words


# ---- what facts are made of


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

    def label(self, peer: str) -> str:
        return self.labels.get(peer) or f"~{peer[-6:]}"

    @cached_property
    def labels(self) -> Mapping[str, str]:
        return self.view.labels()

    @cached_property
    def stages(self) -> int:
        """Of the run; 1 where every peer holds the whole model."""
        return self.run.pipeline.stages if self.run is not None else self.view.stages

    @cached_property
    def fragments(self) -> int:
        """As the peers cut the model, which may be in more pieces than asked for; at most what a run may. In
        a run with stages, as most peers cut theirs."""
        return self._fragments_of(list(self.view.peers.values()))

    @cached_property
    def committed(self) -> Counter[int]:
        """Rounds that were seen to be committed by several peers, by stage."""
        return self.view.committed_by_stage

    @cached_property
    def committed_at(self) -> float:
        """When several peers committed an exchange last, unix seconds: of any fragment, in whatever order the
        rounds were heard of. 0.0: not seen."""
        rounds = [one for one in self.view.rounds.values() if one.outcome == "committed"]
        return max((commit.at for one in rounds for commit in one.commits.values()), default=0.0)

    @cached_property
    def alone(self) -> Counter[int]:
        """Rounds that one peer made with nobody else, by stage."""
        return self.view.alone_by_stage

    @cached_property
    def aborts(self) -> Mapping[int, Counter[str]]:
        """Aborted rounds by reason, by stage."""
        return self.view.aborts_by_stage

    @cached_property
    def by_stage(self) -> Mapping[int, Sequence[PeerView]]:
        """Peers that were heard themselves, by the stage that they hold."""
        found: dict[int, list[PeerView]] = {stage: [] for stage in range(self.stages)}
        for peer in self.view.peers.values():
            if peer.started and peer.stage in found:
                found[peer.stage].append(peer)
        return found

    @cached_property
    def first_stage(self) -> int:
        """Whose tokens are the swarm's: each is trained on once in every stage. The first of which somebody
        was heard."""
        return next((stage for stage, peers in self.by_stage.items() if peers), 0)

    @cached_property
    def stage_fragments(self) -> Mapping[int, int]:
        """As ``fragments``, by stage."""
        return {stage: self._fragments_of(peers) for stage, peers in self.by_stage.items()}

    def _fragments_of(self, peers: Sequence[PeerView]) -> int:
        told = Counter(peer.start.fragments for peer in peers)
        possible = [number for number, _ in told.most_common() if 0 < number <= MAX_FRAGMENTS]
        return possible[0] if possible else (self.run.fragments if self.run else 0)

    @cached_property
    def counted(self) -> Mapping[int, float]:
        """Work that was counted, summed over fragments, by stage."""
        found: dict[int, float] = dict.fromkeys(range(self.stages), 0.0)
        for peer, weight in self.view.counted.items():
            known = self.view.peers.get(peer)
            stage = 0 if self.stages == 1 else known.stage if known is not None and known.started else -1
            if stage in found:
                found[stage] += weight
        return found

    @property
    def round_s(self) -> float | None:
        """Seconds per round; None if rounds go by steps."""
        return self.run.clock.round_s if self.run is not None and self.run.clock.mode == "time" else None


# ---- where a peer stands, and the run


def peer_state(known: Known, peer: PeerView) -> tuple[str, str]:
    """(state, reason) of a peer."""
    if peer.end is not None:
        return "finished", peer.end.reason
    sighting = known.sightings.get(peer.peer, _UNSEEN)
    said = peer.left_reason
    out_of_reach = [("unreachable", sighting.reason)] if sighting.state == "unreachable" else []
    gone = ("gone", f"others say: {said}")
    if said.startswith(LEFT_PREFIX):
        gone = ("left", said.removeprefix(LEFT_PREFIX))
    if peer.last_seen_at is None:
        words = sighting.reason or "sends nothing that can be read"
        unknown = ("unknown", words if sighting.refused else "no word of its own yet")
        return [*([gone] if said else []), *out_of_reach, unknown][0]
    # What came last may be old. In a crowd each is asked more rarely, and silence means less.
    heard_at = max(peer.last_seen_at, known.received_at.get(peer.peer, 0.0))
    silent_s = known.now - heard_at - max(0.0, len(known.sightings) / ASKS_PER_S - 1)
    if said and silent_s > 0.3 * SILENT_AFTER_S:
        return gone
    if silent_s > SILENT_AFTER_S:
        return [*out_of_reach, ("silent", f"no word for {silent_s:.0f} s")][0]
    return peer.phase or "starting", ""


def run_position(trains: Sequence[float], ended: Sequence[tuple[float, float]]) -> float:
    """In rounds; 0 without anybody. ``trains``: positions; ``ended``: (last heard at, position)."""
    newest_at = max((at for at, _ in ended), default=0.0)
    last = sorted(position for at, position in ended if at >= newest_at - RECENT_S)
    now = statistics.median_low(trains) if trains else 0.0
    return max(now, last[len(last) // 2]) if last and len(last) >= len(trains) else now


def is_behind(position: float, run: float) -> bool:
    """Whether the figures of a peer at ``position`` say nothing of a run that is at ``run``."""
    return position < run - BEHIND_ROUNDS


# ---- facts


def swarm_facts(known: Known) -> SwarmFacts:
    """The swarm at ``known.now``."""
    view = known.view
    run = known.run
    state = known.state
    everybody = [
        *view.peers.values(),
        *(PeerView(peer) for peer in known.sightings if peer not in view.peers),
    ]
    unplaced = [_peer_facts(known, peer) for peer in everybody]
    trains = [peer.position for peer in unplaced if peer.state in TRAINS]
    at = run_position(
        trains or [peer.position for peer in unplaced if peer.state == "paused"],  # who rests stands still
        [(one.last_seen_at or 0.0, one.position) for one in unplaced if one.state in ENDED and one.position],
    )
    at = at if trains else max(at, state.position)
    peers = tuple(sorted((_placed(peer, at) for peer in unplaced), key=lambda facts: facts.label))
    online = [peer for peer in peers if peer.state in ONLINE]
    in_run = {peer.peer: peer for peer in peers if peer.state not in NOT_IN_THE_RUN}
    figures = [peer for peer in in_run.values() if peer.state in ONLINE] or list(in_run.values())
    measured = [one.agreed for one in view.peers.values() if one.agreed and one.peer in in_run]
    agreed = max(measured, key=lambda event: event.at, default=None)
    training = mean_known(peer.loss for peer in figures if peer.stage in (None, 0, known.stages - 1))
    is_old = agreed is None or (training is not None and is_behind(agreed.position, at))
    staleness = view.staleness
    first = known.first_stage
    aborts = sum(known.aborts.values(), Counter[str]())
    stages = _stage_facts(known, peers) if known.stages > 1 else ()
    rounds_total = run.clock.rounds if run else 0
    ended = at >= rounds_total > 0 and all(peer.state != "training" for peer in peers)
    told = [peer for peer in peers if peer.state != "unknown" or peer.peer in known.sightings]
    is_over = ended or (bool(told) and all(peer.state in OVER for peer in told))
    how_over = f"ended at round {rounds_total} of {rounds_total}; {MODEL}" if ended else ALL_ENDED
    newest = [round_facts(known, view) for view in list(view.rounds.values())[-ROUNDS_SHOWN:]]
    wrong = () if is_over else troubles(known, peers, stages)
    run_is, why = run_state(known, peers, wrong, stages, how_over if is_over or known.is_over else "")
    goes_on = run_is in {RunState.HEALTHY, RunState.ALONE, RunState.DEGRADED} and any(
        peer.state in ONLINE - {"paused"} for peer in peers
    )
    left = max(0.0, rounds_total - at)
    return SwarmFacts(
        at=known.now, me=known.me, state=run_is, state_words=why,
        progress=min(1.0, at / rounds_total) if rounds_total else None,
        time_left_s=_time_left_s(known, left, online) if rounds_total and goes_on else None,
        my_exchange=_newest_exchange(known, known.me),
        run=run.name if run else "", run_digest=run.digest().hex() if run else "",
        place=known.place, connection=state.phase, connection_words=state.words, fragments=known.fragments,
        parameters=sum(
            max((peer.start.parameters for peer in held), default=0) for held in known.by_stage.values()
        ),
        round_s=known.round_s, rounds_total=rounds_total, position=at, peers_online=len(online),
        peers_known=len(peers), loss=training if agreed is None or is_old else agreed.loss,
        loss_kind="training" if is_old else "held-out", loss_agreed=agreed.loss if agreed else None,
        loss_agreed_at=agreed.at if agreed else None, loss_training=training,
        loss_unit=loss_unit(run.recipe) if run else "",
        tokens=sum(peer.totals.tokens for peer in known.by_stage[first]),
        tokens_counted=_tokens_counted(known, first),
        tokens_per_s=sum(peer.tokens_per_s for peer in figures if peer.stage in (None, first)),
        utilisation=mean_known(peer.utilisation for peer in figures),
        up_bytes=view.totals.up_bytes, up_bytes_per_s=sum(peer.up_bytes_per_s or 0.0 for peer in peers),
        rounds_committed=sum(_committed(known, stage) for stage in known.by_stage),
        rounds_alone=known.alone.total(), rounds_aborted=aborts.total(),
        rounds_counted=view.counted_rounds,
        staleness={str(value): staleness[value] for value in sorted(staleness)},
        staleness_mean=mean_of(staleness), sync_delay_steps_mean=mean_of(view.sync_delay_steps),
        abort_reasons=dict(aborts.most_common(16)),
        troubles=wrong, stages=stages,
        peers=peers, rounds=tuple(sorted(newest, key=lambda facts: -facts.at)),
    )  # fmt: skip


def run_state(
    known: Known, peers: Sequence[PeerFacts], wrong: Sequence[Trouble], stages: Sequence[StageFacts],
    over: str,
) -> tuple[str, str]:  # fmt: skip
    """(the run's ``RunState``, why); both empty until a peer is heard. ``wrong``: its troubles now; ``over``:
    how it ended, empty if it goes on."""
    heard = [peer for peer in peers if peer.state != "unknown"]
    online = [peer for peer in peers if peer.state in ONLINE]
    at_work = [peer for peer in online if peer.state != "paused"]
    own = known.view.peers.get(known.me) if any(peer.peer == known.me for peer in online) else None
    unheard = own.open_links.keys() - {peer.peer for peer in heard} if own is not None else set()
    at_work_now = len(at_work) + len(unheard)
    name = plain(at_work[0].label, 40) if at_work else "one other peer"
    bad = [stage.trouble for stage in stages if stage.is_empty]
    bad += [one.words for one in wrong if one.severity == BAD and known.now - one.since_at <= RECENT_S]
    if (quiet_s := _overdue_s(known, peers)) > 0:
        bad.append(f"no fragment exchange has committed for {clock(quiet_s)}")
    rules = (
        (bool(over) and bool(heard or known.state.position), RunState.OVER, over),
        (known.state.phase == "lost", RunState.LOST, plain(known.state.words, 240)),
        (not heard, "", ""),
        (not online, RunState.LOST, "of the peers that were there none is online"),
        (not at_work_now, RunState.ALONE, "all peers online are paused; it goes on when one resumes"),
        (at_work_now < 2 and known.stages == 1, RunState.ALONE,
         f"only {name} is at work, so nothing is exchanged; {INVITE}"),
        (bool(bad), RunState.DEGRADED, next(iter(bad), "")),
        (True, RunState.HEALTHY, f"{at_work_now} peers are at work, and nothing bad happened of late"),
    )  # fmt: skip
    return next((str(state), words) for holds, state, words in rules if holds)


def _overdue_s(known: Known, peers: Sequence[PeerFacts]) -> float:
    """Seconds without a committed exchange; 0 unless they are too many for how long peers have trained."""
    since = sorted(peer.joined_at or known.now for peer in peers if peer.state == "training")
    if known.round_s is None or len(since) < 2:
        return 0.0
    quiet_s = known.now - max(known.committed_at, since[1])
    return quiet_s if quiet_s > max(OVERDUE_ROUNDS * known.round_s, SILENT_AFTER_S) else 0.0


def _time_left_s(known: Known, rounds: float, online: Sequence[PeerFacts]) -> float | None:
    """Seconds for so many ``rounds``: by the clock, or at the pace of the median peer's inner steps."""
    if known.round_s is not None:
        return rounds * known.round_s
    steps_s = []
    for peer in (known.view.peers[one.peer] for one in online if one.inner_steps):
        made = peer.progress.inner_steps - peer.start.inner_steps  # by this process, as its time is
        if made > 0 and peer.progress.wall_s > 0:
            steps_s.append(peer.progress.wall_s / made)
    if known.run is None or not steps_s:
        return None
    return rounds * known.run.clock.inner_steps_per_round * statistics.median(steps_s)


def _newest_exchange(known: Known, peer: str) -> RoundFacts | None:
    """The newest that ``peer`` says it committed."""
    rounds = reversed(known.view.rounds.values()) if peer else ()
    return next((round_facts(known, one) for one in rounds if peer in one.commits), None)


def mean_known(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _placed(peer: PeerFacts, at: float) -> PeerFacts:
    """``peer`` with the state "behind" if the run, which is at ``at``, is further on than it."""
    if peer.state not in TRAINS or not is_behind(peer.position, at):
        return peer
    words = f"at round {peer.position:.1f}, the run is at {at:.1f}: it has not caught up, or begins anew"
    return peer.model_copy(update={"state": "behind", "reason": words})


def _peer_facts(known: Known, peer: PeerView) -> PeerFacts:
    sighting = known.sightings.get(peer.peer, _UNSEEN)
    totals = peer.totals
    fragments = known.stage_fragments.get(peer.stage, 0)
    state, reason = peer_state(known, peer)
    if known.is_over and state in ONLINE:
        state = "gone"
        reason = "it ended without a word"
    over = state in OVER or state == "gone"
    online = state in ONLINE
    up, down = _rates(known, peer) if not over else (None, None)
    counted = known.view.counted.get(peer.peer)
    carriers = Counter(carrier[:16] for carrier in peer.open_links.values()) if online else {}
    return PeerFacts.model_construct(
        peer=peer.peer, label=known.label(peer.peer), name=peer.start.name, state=state, reason=reason,
        device=peer.start.device, software=peer.start.software, joined_at=peer.first_seen_at,
        last_seen_at=peer.last_seen_at, clock_offset_s=sighting.clock_offset_s,
        answer_s=sighting.round_trip_s, tokens=totals.tokens,
        tokens_counted=counted / fragments if counted is not None and fragments else None,
        share_counted=(counted or 0.0) / of if (of := known.counted.get(peer.stage, 0.0)) else None,
        tokens_per_s=peer.progress.tokens_per_s if online and state != "paused" else 0.0, loss=peer.loss,
        inner_steps=totals.inner_steps, position=peer.progress.position, versions=peer.versions,
        staleness_mean=mean_of(peer.staleness), sync_delay_steps_mean=mean_of(peer.tally.sync_delay_steps),
        utilisation=peer.utilisation, wall_s=totals.wall_s, exposed_s=totals.exposed_s,
        hidden_s=max(0.0, peer.tally.in_flight_s - totals.exposed_s), up_bytes=totals.up_bytes,
        down_bytes=totals.down_bytes, up_bytes_per_s=up, down_bytes_per_s=down,
        upload_cap_bytes_per_s=peer.start.upload_cap_bytes_per_s or None,
        needed_bytes_per_s=_needed_bytes_per_s(known, peer),
        fragment_age_s=tuple(
            max(0.0, known.now - peer.arrived[fragment].at) if fragment in peer.arrived else None
            for fragment in range(fragments)
        ),
        carriers=dict(sorted(carriers.items())[:4]),
        links=tuple(
            LinkFacts.model_construct(
                other=other, carrier=link.carrier[:16], relayed=link.relayed, sent_bytes=link.sent_bytes,
                round_trip_s=link.round_trip_s or None, bytes_per_s=link.bytes_per_s or None,
            )
            for other, one in sorted(peer.links.items(), key=lambda item: item[0])
            if (link := one.measured) is not None
        ),
        skipped_sends=peer.tally.skipped_sends.total(), refused=dict(peer.tally.refused),
        missed=dict(peer.tally.missed), nonsense=dict(sighting.refused),
        pipeline=_pipeline_facts(known, peer, online),
    )  # fmt: skip


def _pipeline_facts(known: Known, peer: PeerView, online: bool) -> PipelineFacts | None:
    if known.stages == 1 or not peer.started or peer.start.stages == 1:
        return None
    said = peer.pipeline
    return PipelineFacts.model_construct(
        stage=peer.stage, waiting=said.waiting if said and online else 0,
        in_flight=said.in_flight if said and online else 0, counted=said.counted if said else 0,
        dropped=said.dropped if said else 0, waiting_share=peer.waiting_share,
        waits_for=said.waits_for if said and online else "",
    )  # fmt: skip


def round_facts(known: Known, view: RoundView) -> RoundFacts:
    outcome = view.outcome
    reason = ""
    missed = view.missed_by
    aborts = view.aborts
    late_from = 2 if known.run is not None and known.run.outer.rule in LATE_RULES else 1
    if outcome == "committed":
        if missed or view.staleness >= late_from:
            outcome = "late"
        elif view.partial or view.contributors < view.group_size:
            outcome = "partial"
    if missed:
        reason = f"missed by {', '.join(known.label(peer) for peer in missed[:8])}"
    elif aborts:
        reason = "; ".join(f"{why} ({times})" for why, times in aborts.most_common(3))
    told_at = [commit.at for commit in view.commits.values()] or [view.begun[0] if view.begun else known.now]
    return RoundFacts(
        stage=view.stage, fragment=view.fragment, round=view.round, at=max(told_at), outcome=outcome,
        group_size=view.group_size, contributors=view.contributors, staleness=view.staleness,
        duration_s=view.duration_s, reason=reason[:300], counted=bool(view.weights),
    )  # fmt: skip


def _committed(known: Known, stage: int) -> int:
    """Rounds committed since the run began: each outer version is one, but for those that a peer made alone.
    Seen rounds where versions lag."""
    columns = zip(*(peer.versions for peer in known.by_stage[stage] if peer.versions), strict=False)
    reached = sum(sorted(column)[len(column) // 2] for column in columns)
    return max(int(reached) - known.alone[stage], known.committed[stage])


def _tokens_counted(known: Known, stage: int) -> float:
    fragments = known.stage_fragments[stage]
    return known.counted[stage] / fragments if fragments else 0.0


def _rates(known: Known, peer: PeerView) -> tuple[float | None, float | None]:
    """Bytes per second (up, down) of late; 0 when what is known is old, and None before two points so far
    apart that a round's burst does not pass for the rate."""
    points = [point for point in peer.recent_bytes if peer.recent_bytes[-1][0] - point[0] <= SILENT_AFTER_S]
    if len(points) < 2:
        return None, None
    (start, *before) = points[0]
    (end, *after) = points[-1]
    if known.now - end > SILENT_AFTER_S:
        return 0.0, 0.0
    if end - start < 0.3 * SILENT_AFTER_S:
        return None, None
    up, down = (max(0.0, (now - then) / (end - start)) for then, now in zip(before, after, strict=True))
    return up, down


def _needed_bytes_per_s(known: Known, peer: PeerView) -> float | None:
    seconds = known.round_s
    steps = peer.totals.inner_steps
    if seconds is None and known.run is not None and steps:
        seconds = known.run.clock.inner_steps_per_round * peer.totals.wall_s / steps
    members = len(known.by_stage.get(peer.stage, ()))
    if not seconds or not peer.sent or members < 2:
        return None
    return 2 * (1 - 1 / members) * sum(one.payload_bytes for one in peer.sent.values()) / seconds


# ---- stages


def _stage_facts(known: Known, peers: Sequence[PeerFacts]) -> tuple[StageFacts, ...]:
    """All stages. Peers whose stage is not known may be of any, so they spare every stage the reproach of too
    few replicas."""
    unplaced = sum(peer.stage is None and peer.state not in ENDED for peer in peers)
    by_peer = {peer.peer: peer for peer in peers}
    told = [_one_stage(known, stage, by_peer) for stage in range(known.stages)]
    is_going = any(peer.state in ONLINE - {"draining"} for peer in peers)
    joined_at = (peer.joined_at for peer in peers if peer.state in ONLINE)
    began_at = min((at for at in joined_at if at is not None), default=known.now)
    made: list[StageFacts] = []
    for facts in told:
        # Who stands beside an empty stage alone could say more of the one behind it.
        beside = told[max(0, facts.stage - 1) : facts.stage + 2]
        is_cut_off = facts.replicas is None and any(one.replicas == 0 for one in beside)
        replicas = 0 if is_cut_off else facts.replicas
        seen_at = (
            one.last_seen_at or 0.0 for one in peers if one.stage == facts.stage and one.state in ENDED
        )
        since_at = max([began_at, *seen_at])
        words = _staffing(known, facts.stage, replicas, unplaced)
        is_told = bool(words) and is_going and known.now - since_at >= SILENT_AFTER_S
        found = {"replicas": replicas, "trouble": words if is_told else ""}
        made.append(facts.model_copy(update={**found, "trouble_since_at": since_at if is_told else None}))
    return tuple(made)


def _staffing(known: Known, stage: int, replicas: int | None, unplaced: int) -> str:
    """What is wrong with so many replicas, and what to do; "" if that is nothing."""
    name = f"stage {stage} of {known.stages}"
    cure = f"join with --stage {stage}"
    wanted = known.run.pipeline.min_replicas if known.run is not None else 1
    if replicas == 0:
        return f"{name} has no replica: training waits; {cure}"
    if replicas is not None and replicas + unplaced < wanted:
        return f"{name} is understaffed: {replicas} of at least {wanted} replicas; {cure}"
    return ""


def _one_stage(known: Known, stage: int, peers: Mapping[str, PeerFacts]) -> StageFacts:
    """Without its troubles."""
    held = (peers[peer.peer] for peer in known.by_stage[stage])
    mine = [(peer, peer.pipeline) for peer in held if peer.pipeline]
    online = [(peer, said) for peer, said in mine if peer.state in ONLINE]
    figures = online or mine
    last = known.stages - 1
    columns = zip(*(peer.versions for peer, _ in figures if peer.versions), strict=False)
    forward, back = (
        [
            link
            for peer, _ in figures
            for link in peer.links
            if link.other in peers and peers[link.other].stage == beside
        ]
        for beside in (stage + 1 if stage < last else -1, stage - 1)
    )
    waits_for = Counter(said.waits_for for _, said in online if said.waits_for)
    heard = _heard(known, stage, peers)
    seen = len(online) if mine else None
    return StageFacts(
        stage=stage, replicas=seen or (seen if heard is None else heard), known=len(mine),
        versions_apart=max((max(column) - min(column) for column in columns), default=None),
        tokens=sum(peer.tokens for peer, _ in mine), tokens_counted=_tokens_counted(known, stage),
        tokens_per_s=sum(peer.tokens_per_s for peer, _ in figures),
        waiting=sum(said.waiting for _, said in online), in_flight=sum(said.in_flight for _, said in online),
        counted=sum(said.counted for _, said in mine), dropped=sum(said.dropped for _, said in mine),
        waiting_share=mean_known(said.waiting_share for _, said in figures),
        waits_for=waits_for.most_common(1)[0][0] if waits_for else "",
        utilisation=mean_known(peer.utilisation for peer, _ in figures),
        forward_bytes_per_s=_median_known(link.bytes_per_s for link in forward),
        back_bytes_per_s=_median_known(link.bytes_per_s for link in back),
        forward_round_trip_s=_median_known(link.round_trip_s for link in forward),
        back_round_trip_s=_median_known(link.round_trip_s for link in back),
        forward_bytes=sum(link.sent_bytes for link in forward),
        back_bytes=sum(link.sent_bytes for link in back),
        rounds_committed=_committed(known, stage), rounds_alone=known.alone[stage],
        rounds_aborted=known.aborts.get(stage, Counter()).total(), trouble="", trouble_since_at=None,
    )  # fmt: skip


def _heard(known: Known, stage: int, peers: Mapping[str, PeerFacts]) -> int | None:
    """How many replicas of ``stage`` the peers beside it hear, the lower median of their words; None if
    nobody says so."""
    words = [
        said.behind if said.stage < stage else said.before
        for beside in (stage - 1, stage + 1)
        for peer in known.by_stage.get(beside, ())
        if (said := peer.pipeline) is not None and peers[peer.peer].state in ONLINE - {"draining"}
    ]
    return statistics.median_low(words) if words else None


def _median_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# ---- what is wrong


def troubles(
    known: Known, peers: Sequence[PeerFacts], stages: Sequence[StageFacts] = ()
) -> tuple[Trouble, ...]:
    """All that is wrong at ``known.now``, worst first."""
    found: list[Trouble] = []
    if known.state.phase == "lost":
        # Everybody is silent to us then, which says nothing of anybody.
        what = f"The swarm is out of reach: {plain(known.state.words, 240)}"
        found.append(_trouble("", BAD, what, "what is shown is old, and it is looked for again", known.now))
    else:
        leading = Counter[int | None]()
        for peer in peers:
            leading[peer.stage] = max(leading[peer.stage], sum(peer.versions))
        for peer in peers:
            since_at = (peer.last_seen_at or known.now) if peer.state in _ABSENT else known.now
            found += [_trouble(peer.peer, *told, since_at) for told in _of_peer(peer)]
            if peer.state == "training":
                found += [
                    _trouble(peer.peer, ODD, *told, known.now)
                    for told in _of_training(peer, leading[peer.stage])
                ]
        found += _alone(known, peers)
        found += [
            Trouble(peer="", words=one.trouble, severity=BAD if one.is_empty else ODD, since_at=told_at)
            for one in stages
            if (told_at := one.trouble_since_at) is not None
        ]
    found += _skipped(known, peers)
    found += _of_events(known)
    first = {one.trouble for one in stages}  # without a stage nobody trains
    found.sort(key=lambda one: (one.severity != BAD, one.words not in first, -one.since_at, one.words))
    return tuple(found[:MAX_TROUBLES])


def _trouble(peer: str, severity: str, what: str, advice: str, since_at: float) -> Trouble:
    return Trouble(peer=peer, words=f"{what}; {advice}", severity=severity, since_at=since_at)


def _of_peer(peer: PeerFacts) -> Iterator[tuple[str, str, str]]:
    """(severity, what, what to do)"""
    name = plain(peer.label, 40)
    reason = plain(peer.reason, 160)
    if peer.state in _ABSENT:
        word, advice = _ABSENT[peer.state]
        yield BAD, f"{name} {word}: {reason}", advice
    elif peer.state == "unknown" and peer.reason and peer.nonsense:
        yield BAD, f"{name} says nothing that can be read: {reason}", _UPDATE
    elif peer.state == "behind":
        yield ODD, f"{name} is left out: {reason}", "wait until it has caught up"
    if peer.nonsense:
        causes = ", ".join(f"{plain(cause, 60)} ({times})" for cause, times in peer.nonsense.items())
        what = f"{name} publishes nonsense, which is left out: {plain(causes, 200)}"
        yield BAD, what, "if you know its owner, ask what runs there"
    if peer.clock_offset_s is not None and abs(peer.clock_offset_s) > 3 * SILENT_AFTER_S:
        what = f"{name}'s clock is {peer.clock_offset_s:+.0f} s off; its times are corrected here"
        yield ODD, what, "set that machine's clock by NTP"


def _of_training(peer: PeerFacts, leading: int) -> Iterator[tuple[str, str]]:
    """(what, what to do)"""
    name = plain(peer.label, 40)
    behind = (leading - sum(peer.versions)) / max(1, len(peer.versions))
    if peer.versions and behind >= BEHIND_ROUNDS:
        advice = "it fetches them; if that lasts, look at its line with p2p-co2 plan"
        yield f"{name} is {behind:.0f} rounds behind the foremost peer", advice
    if peer.exposed_s > max(5.0, EXPOSED_SHARE * peer.wall_s):
        share = percent(peer.exposed_s / (peer.exposed_s + peer.hidden_s))
        what = (
            f"{name} spends {percent(peer.exposed_s / max(peer.wall_s, peer.exposed_s))} of its time waiting"
        )
        what += f" ({share} of its communication is not hidden)"
        yield what, "p2p-co2 plan says what rounds its line bears"
    cap = peer.upload_cap_bytes_per_s
    needed = peer.needed_bytes_per_s
    if cap and needed and cap < needed:
        advice = "its owner may raise --upload; till then it is given a smaller share"
        yield f"{name} may send {size(cap)}/s, and the rounds need {size(needed)}/s at least", advice


def _alone(known: Known, peers: Sequence[PeerFacts]) -> list[Trouble]:
    """One peer trains, and nobody else is there, or only out of our reach. In a run with stages a stage that
    is understaffed says so."""
    here = [peer for peer in peers if peer.state not in OVER and peer.state != "gone"]
    if known.stages > 1 or len(here) != 1 or here[0].state not in ONLINE or not here[0].inner_steps:
        return []
    left = [peer.last_seen_at or 0.0 for peer in peers if peer is not here[0]]
    since_at = max([here[0].joined_at or known.now, known.committed_at, *left])
    alone_s = known.now - since_at
    if alone_s < 3 * SILENT_AFTER_S:
        return []
    what = f"{plain(here[0].label, 40)} has trained alone for {clock(alone_s)}, and exchanges nothing"
    return [_trouble(here[0].peer, BAD, what, INVITE, since_at)]


def _skipped(known: Known, peers: Sequence[PeerFacts]) -> list[Trouble]:
    """One line for all skipped sends of late, if there are many among those that were due. A line is at fault
    only where its traffic is near its cap, or near the rate at which it was seen to send."""
    recent = [
        (peer.peer, at, why)
        for peer in known.view.peers.values()
        for at, why in peer.recent_sends
        if known.now - at <= RECENT_S
    ]
    skipped = [(peer, at, why) for peer, at, why in recent if why]
    if len(recent) < MIN_SENDS or len(skipped) <= SKIPPED_SHARE * len(recent):
        return []
    reason = Counter(why for _, _, why in skipped).most_common(1)[0][0]
    by_peer = Counter(peer for peer, _, _ in sorted(skipped)).most_common()
    of = ", ".join([*(plain(known.label(peer), 24) for peer, _ in by_peer[:4]), "..."][: len(by_peer)])
    share = percent(len(skipped) / len(recent))
    what = f"{share} of the sends of late were skipped ({of}): {plain(reason, 100)}"
    advice = "the lines" if _is_a_line_full(peers) else "no line is full, so the machines"
    advice += " are too slow for these rounds: p2p-co2 plan says which they bear"
    return [_trouble("", ODD, what, advice, max(at for _, at, _ in skipped))]


def _is_a_line_full(peers: Sequence[PeerFacts]) -> bool:
    """Whether one moves much of its cap, or of the best rate seen on any of its links, either way."""
    up = Counter[str]()
    down = Counter[str]()
    for sender, link in ((one.peer, link) for one in peers for link in one.links):
        up[sender] = max(up[sender], int(link.bytes_per_s or 0))
        down[link.other] = max(down[link.other], int(link.bytes_per_s or 0))
    ways = [(one.up_bytes_per_s, up[one.peer]) for one in peers]
    ways += [(one.down_bytes_per_s, down[one.peer]) for one in peers]
    ways += [(one.up_bytes_per_s, int(one.upload_cap_bytes_per_s or 0)) for one in peers]
    return any(moved and rate and moved >= LINE_SHARE * rate for moved, rate in ways)


def _of_events(known: Known) -> list[Trouble]:
    """Recent events that a person should act on, each kind and reason once, with how often."""
    alike: dict[tuple[str, str], dict[str, tuple[ev.Event, str]]] = {}
    for event in known.view.notable:
        if event.kind not in _ADVICE or known.now - event.at > RECENT_S:
            continue
        if isinstance(event, ev.RoundAborted):
            place = numbered(known.view.stage_of(event) or 0, event.fragment)
            if (made := known.view.rounds.get((place, event.round))) is not None and made.commits:
                continue  # an attempt of one member, and the others have made that exchange
        about = next(filter(None, (getattr(event, name, "") for name in ("reason", "text", "other"))), "")
        key, words = describe(event, known.labels, known.view.stage_of(event))
        alike.setdefault((event.kind, about), {})[key] = event, words
    found = []
    for (kind, _), told in alike.items():
        event, what = list(told.values())[-1]
        severity, advice = _ADVICE[kind]
        what += f" ({len(told) - 1} more of late)" if len(told) > 1 else ""
        found.append(_trouble(event.peer, severity, what, advice, event.at))
    return found
