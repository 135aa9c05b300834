"""The swarm's facts, made from what is known at one moment: pure, once a second however many look.

Law: whatever a peer said, no fact is negative, infinite or unbounded, and none fails to be made. Price: about
60 microseconds per peer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from monitoring.facts import LinkFacts, PeerFacts, RoundFacts, SwarmFacts
from monitoring.peer_state import ONLINE, OVER, peer_state
from monitoring.standing import ENDED, TRAINS, is_behind, run_position
from monitoring.troubles import troubles
from monitoring.words import loss_unit
from p2p_co2.config import RunConfig
from p2p_co2.telemetry.events import LinkMeasured
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.peer_view import PeerView
from p2p_co2.telemetry.view import RoundView, SwarmView, mean_of

ROUNDS_SHOWN = 240
RATE_OVER_S, RATE_FROM_S = 10.0, 3.0
"""A rate is over so many seconds; over fewer than the second a round's burst would pass for the rate."""
MAX_FRAGMENTS = 256
ASKS_PER_S = 64.0
"""As in ``reports.poller``: with more peers each is asked less often, and silence means less."""
NOT_IN_THE_RUN = frozenset({"starting", "joining", "behind", "unknown"})
"""States of peers whose figures are not the run's."""
LATE_RULES = frozenset({"co2", "eager"})
"""Apply rules whose answers are one outer step old by design."""


@dataclass
class Pace:
    """A peer's counters of late: (at, up bytes, down bytes)."""

    points: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, at: float, up_bytes: int, down_bytes: int) -> None:
        if self.points and at <= self.points[-1][0]:
            return
        if self.points and (up_bytes < self.points[-1][1] or down_bytes < self.points[-1][2]):
            self.points.clear()  # another process counts from 0
        self.points.append((at, up_bytes, down_bytes))
        while len(self.points) > 2 and at - self.points[0][0] > RATE_OVER_S:
            self.points.popleft()

    def rates(self, now: float) -> tuple[float | None, float | None]:
        """Bytes per second (up, down); None before two points far enough apart, 0 when they are old."""
        if len(self.points) < 2:
            return None, None
        (start, up0, down0), (end, up1, down1) = self.points[0], self.points[-1]
        if now - end > RATE_OVER_S:
            return 0.0, 0.0
        if end - start < RATE_FROM_S:
            return None, None
        return (up1 - up0) / (end - start), (down1 - down0) / (end - start)


@dataclass
class Known:
    """All that facts are made of. ``paces``, ``sightings``, ``labels``: by peer; ``now``: unix seconds."""

    view: SwarmView
    sightings: Mapping[str, Sighting]
    paces: Mapping[str, Pace]
    labels: Mapping[str, str]
    run: RunConfig | None
    state: FeedState
    place: str
    now: float
    received_at: Mapping[str, float]
    """When events of a peer last came from it, unix seconds; by the reader's clock."""
    is_over: bool = False
    """Whether nobody is left who could write more."""
    predicted: float | None = None
    """Utilisation, as ``predicted`` makes it."""

    @cached_property
    def fragments(self) -> int:
        """As the peers cut the model, which may be in more pieces than asked for; at most what a run may."""
        told = Counter(
            peer.fragments for peer in self.view.peers.values() if 0 < peer.fragments <= MAX_FRAGMENTS
        )
        return told.most_common(1)[0][0] if told else (self.run.fragments if self.run else 0)

    @cached_property
    def members(self) -> int:
        """Peers that were heard themselves."""
        return sum(peer.started for peer in self.view.peers.values())

    @cached_property
    def counted(self) -> float:
        """All work that was counted, summed over fragments."""
        return sum(self.view.counted.values())


def swarm_facts(known: Known) -> SwarmFacts:
    """The swarm at ``known.now``."""
    view, run = known.view, known.run
    labels = known.labels
    unsorted = [_peer_facts(known, peer, labels.get(peer.peer)) for peer in _listed(known)]
    at = _run_position(unsorted)
    peers = tuple(sorted((_placed(peer, at) for peer in unsorted), key=lambda facts: facts.label))
    online = [peer for peer in peers if peer.state in ONLINE]
    in_run = [peer for peer in peers if peer.state not in NOT_IN_THE_RUN]
    figures = [peer for peer in in_run if peer.state in ONLINE] or in_run
    measured = {peer.peer for peer in in_run}
    agreed = max(
        (one.agreed.points[-1] for one in view.peers.values() if one.agreed.points and one.peer in measured),
        default=None,
    )
    staleness = view.staleness
    used = [peer.utilisation for peer in figures if peer.utilisation is not None]
    losses = [peer.loss for peer in figures if peer.loss is not None]
    training = sum(losses) / len(losses) if losses else None
    is_old = agreed is None or (training is not None and is_behind(agreed[1], at))
    fragments, totals, committed = known.fragments, view.totals, _committed(known)
    return SwarmFacts(
        at=known.now,
        run=run.name if run else "",
        run_digest=run.digest().hex() if run else "",
        place=known.place,
        connection=known.state.phase,
        connection_words=known.state.words,
        fragments=fragments,
        parameters=max((peer.parameters for peer in view.peers.values()), default=0),
        round_s=round_s(known),
        rounds_total=run.clock.rounds if run else 0,
        position=at,
        peers_online=len(online),
        peers_known=len(peers),
        loss=training if agreed is None or is_old else agreed[2],
        loss_kind="training" if is_old else "held-out",
        loss_agreed=agreed[2] if agreed else None,
        loss_agreed_at=agreed[0] if agreed else None,
        loss_training=training,
        loss_unit=loss_unit(run.recipe) if run else "",
        tokens=totals.tokens,
        tokens_counted=known.counted / fragments if fragments else 0.0,
        tokens_per_s=sum(peer.tokens_per_s for peer in figures),
        utilisation=sum(used) / len(used) if used else None,
        utilisation_predicted=known.predicted,
        up_bytes=totals.up_bytes,
        up_bytes_per_s=sum(peer.up_bytes_per_s or 0.0 for peer in peers),
        rounds_committed=committed,
        rounds_alone=view.alone,
        rounds_aborted=view.abort_reasons.total(),
        rounds_counted=view.counted_rounds,
        staleness={str(value): staleness[value] for value in sorted(staleness)},
        staleness_mean=mean_of(staleness),
        sync_delay_steps_mean=mean_of(view.sync_delay_steps),
        abort_reasons=dict(view.abort_reasons.most_common(16)),
        troubles=()
        if _is_over(known, peers, at)
        else troubles(view, labels, peers, known.sightings, known.state, known.now),
        peers=peers,
        rounds=tuple(_newest_rounds(known)),
    )


def _run_position(peers: Sequence[PeerFacts]) -> float:
    trains = [peer.position for peer in peers if peer.state in TRAINS]
    ended = [
        (peer.last_seen_at or 0.0, peer.position)
        for peer in peers
        if peer.state in ENDED and peer.position > 0
    ]
    return run_position(trains, ended)


def _placed(peer: PeerFacts, at: float) -> PeerFacts:
    """``peer`` with the state "behind" if the run, which is at ``at``, is further on than it."""
    if peer.state not in TRAINS or not is_behind(peer.position, at):
        return peer
    words = f"at round {peer.position:.1f}, the run is at {at:.1f}: it has not caught up, or begins anew"
    return peer.model_copy(update={"state": "behind", "reason": words})


def _is_over(known: Known, peers: Sequence[PeerFacts], at: float) -> bool:
    """Whether the run has had its last round, or all have left it: then nothing is wrong with it any more."""
    rounds = known.run.clock.rounds if known.run else 0
    has_ended = at >= rounds > 0 and all(peer.state != "training" for peer in peers)
    return has_ended or (bool(peers) and all(peer.state in OVER for peer in peers))


def _listed(known: Known) -> Iterable[PeerView]:
    """Every peer that we know anything of."""
    unheard = [PeerView(peer) for peer in known.sightings if peer not in known.view.peers]
    return [*known.view.peers.values(), *unheard]


def _peer_facts(known: Known, peer: PeerView, label: str | None) -> PeerFacts:
    sighting = known.sightings.get(peer.peer)
    answer_every_s = max(1.0, len(known.sightings) / ASKS_PER_S)
    received_at = known.received_at.get(peer.peer, 0.0)
    state, reason = peer_state(peer, sighting, known.now, answer_every_s, received_at)
    if known.is_over and state in ONLINE:
        state, reason = "gone", "it ended without a word"
    over = state in OVER or state == "gone"
    up, down = known.paces[peer.peer].rates(known.now) if peer.peer in known.paces else (None, None)
    totals, fragments = peer.totals, known.fragments
    counted = known.view.counted.get(peer.peer)
    return PeerFacts.model_construct(
        peer=peer.peer,
        label=label or f"~{peer.peer[-6:]}",
        name=peer.name,
        state=state,
        reason=reason,
        device=peer.device,
        software=peer.software,
        joined_at=peer.first_seen_at,
        last_seen_at=peer.last_seen_at,
        clock_offset_s=sighting.clock_offset_s if sighting else None,
        answer_s=sighting.round_trip_s if sighting else None,
        tokens=totals.tokens,
        tokens_counted=counted / fragments if counted is not None and fragments else None,
        share_counted=(counted or 0.0) / known.counted if known.counted else None,
        tokens_per_s=0.0 if over or state not in ONLINE else peer.tokens_per_s,
        loss=peer.loss,
        inner_steps=totals.inner_steps,
        position=peer.position,
        versions=peer.versions,
        staleness_mean=mean_of(peer.staleness),
        sync_delay_steps_mean=mean_of(peer.sync_delay_steps),
        utilisation=peer.utilisation,
        wall_s=totals.wall_s,
        exposed_s=totals.exposed_s,
        hidden_s=max(0.0, peer.in_flight_s - totals.exposed_s),
        up_bytes=totals.up_bytes,
        down_bytes=totals.down_bytes,
        up_bytes_per_s=None if over else up,
        down_bytes_per_s=None if over else down,
        upload_cap_bytes_per_s=peer.upload_cap_bytes_per_s or None,
        needed_bytes_per_s=_needed_bytes_per_s(known, peer),
        fragment_age_s=tuple(
            max(0.0, known.now - peer.applied_at[fragment]) if fragment in peer.applied_at else None
            for fragment in range(fragments)
        ),
        carriers=_open_links(peer) if state in ONLINE else {},
        links=tuple(_link(link) for link in sorted(peer.links.values(), key=lambda link: link.other)),
        skipped_sends=peer.skipped_sends.total(),
        refused=dict(peer.refused),
        nonsense=dict(sighting.refused) if sighting else {},
    )


def _newest_rounds(known: Known) -> list[RoundFacts]:
    newest = list(known.view.rounds.values())[-ROUNDS_SHOWN:]
    return sorted((round_facts(known, view) for view in newest), key=lambda facts: -facts.at)


def round_facts(known: Known, view: RoundView) -> RoundFacts:
    outcome, reason = view.outcome, ""
    late_from = 2 if known.run is not None and known.run.outer.rule in {"co2", "eager"} else 1
    if outcome == "committed":
        if view.missed_by or view.staleness >= late_from:
            outcome = "late"
        elif view.partial or view.contributors < view.group_size:
            outcome = "partial"
    if view.missed_by:
        labels = known.labels
        reason = f"missed by {', '.join(labels.get(peer, peer[-6:]) for peer in view.missed_by[:8])}"
    elif view.aborts:
        reason = "; ".join(f"{why} ({times})" for why, times in view.aborts.most_common(3))
    ats = [report.committed_at for report in view.reports.values() if report.committed]
    at = max(ats, default=view.begun[0] if view.begun else known.now)
    return RoundFacts(
        fragment=view.fragment,
        round=view.round,
        at=at,
        outcome=outcome,
        group_size=view.group_size,
        contributors=view.contributors,
        staleness=view.staleness,
        duration_s=view.duration_s,
        reason=reason[:300],
        counted=bool(view.weights),
    )


def round_s(known: Known) -> float | None:
    if known.run is None or known.run.clock.mode != "time":
        return None
    return known.run.clock.round_s


def _committed(known: Known) -> int:
    """Rounds committed since the run began: each outer version is one, but for those that a peer made alone.
    Seen rounds where versions lag."""
    columns = zip(*(peer.versions for peer in known.view.peers.values() if peer.versions), strict=False)
    reached = sum(sorted(column)[len(column) // 2] for column in columns)
    return max(int(reached) - known.view.alone, known.view.committed)


def _needed_bytes_per_s(known: Known, peer: PeerView) -> float | None:
    seconds, members = round_s(known) or _round_of_steps_s(known, peer), known.members
    if not seconds or not peer.payload_bytes or members < 2:
        return None
    return 2 * (1 - 1 / members) * sum(peer.payload_bytes.values()) / seconds


def _round_of_steps_s(known: Known, peer: PeerView) -> float | None:
    """Seconds that a round of a run by steps takes this peer."""
    if known.run is None or not peer.totals.inner_steps:
        return None
    return known.run.clock.inner_steps_per_round * peer.totals.wall_s / peer.totals.inner_steps


def _open_links(peer: PeerView) -> dict[str, int]:
    counts: dict[str, int] = {}
    for other, carrier in peer.carriers.items():
        if other not in peer.lost_links:
            counts[carrier[:16]] = counts.get(carrier[:16], 0) + 1
    return dict(sorted(counts.items())[:4])


def _link(link: LinkMeasured) -> LinkFacts:
    return LinkFacts.model_construct(
        other=link.other,
        carrier=link.carrier[:16],
        relayed=link.relayed,
        round_trip_s=link.round_trip_s or None,
        bytes_per_s=link.bytes_per_s or None,
        sent_bytes=link.sent_bytes,
    )
