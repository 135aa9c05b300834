"""All that is known of a swarm at one moment, and the facts that follow: pure, once a second however many
look.

Laws: whatever a peer said, no fact is negative, infinite or unbounded, and none fails to be made. The run is
where the middle of the peers is that train; those that ended together last count instead if they are at least
as many and got further, so one liar that comes and goes moves nothing among several. A newcomer that has not
caught up, or that begins an ended run anew, is shown as "behind", and its figures are not the run's.

Price: about 60 microseconds per peer; the planner's word costs milliseconds, so it is asked for apart.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from monitoring.facts import BEHIND_ROUNDS, ONLINE, OVER, LinkFacts, PeerFacts, RoundFacts, SwarmFacts
from monitoring.troubles import troubles
from monitoring.words import LEFT_PREFIX, loss_unit
from p2p_co2.config import RunConfig
from p2p_co2.planning import Link, even_fragments, forecast, setting_of
from p2p_co2.telemetry.events import FragmentApplied
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.view import PeerView, RoundView, SwarmView, mean_of

CONNECTED = FeedState("connected", "waiting for the first peer")
ROUNDS_SHOWN = 240
RATE_OVER_S, RATE_FROM_S = 10.0, 3.0
"""A rate is over so many seconds; over fewer than the second a round's burst would pass for the rate."""
MAX_FRAGMENTS = 256
ASKS_PER_S = 64.0
"""As in ``reports.poller``: with more peers each is asked less often, and silence means less."""
SILENT_AFTER_S = 10.0
GONE_AFTER_S = 3.0
TOGETHER_S = 180.0
"""As in ``discovery.records``, which needs a DHT's imports."""
TRAINS = frozenset({"training", "draining", "paused"})
ENDED = OVER | {"gone", "silent", "unreachable"}
NOT_IN_THE_RUN = frozenset({"starting", "joining", "behind", "unknown"})
LATE_RULES = frozenset({"co2", "eager"})
"""Apply rules whose answers are one outer step old by design."""
MAX_PARAMETERS, MAX_LINKS = 10**13, 64
_STEP_S, _RATE, _MOST_TRIP_S = (1e-5, 1e4), (100.0, 1e12), 60.0
"""What the planner is asked about; what a peer says beyond it is not believed."""


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
    """All that facts are made of. ``now``: unix seconds. ``labels``, ``sightings``, ``paces``,
    ``received_at`` (when events of it last came, by the reader's clock): by peer. ``is_over``: nobody is left
    that could write more. ``predicted``: utilisation, as ``predicted_utilisation`` makes it."""

    view: SwarmView
    now: float
    run: RunConfig | None = None
    state: FeedState = CONNECTED
    place: str = ""
    labels: Mapping[str, str] | None = None
    sightings: Mapping[str, Sighting] = field(default_factory=dict)
    paces: Mapping[str, Pace] = field(default_factory=dict)
    received_at: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False
    predicted: float | None = None

    def label(self, peer: str) -> str:
        return self._labels.get(peer) or f"~{peer[-6:]}"

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        return self.view.labels() if self.labels is None else self.labels

    @cached_property
    def fragments(self) -> int:
        """As the peers cut the model, which may be in more pieces than asked for; at most what a run may."""
        told = Counter(peer.start.fragments for peer in self.view.peers.values())
        possible = [number for number, _ in told.most_common() if 0 < number <= MAX_FRAGMENTS]
        return possible[0] if possible else (self.run.fragments if self.run else 0)

    @cached_property
    def members(self) -> int:
        """Peers that were heard themselves."""
        return sum(peer.started for peer in self.view.peers.values())

    @cached_property
    def counted(self) -> float:
        """All work that was counted, summed over fragments."""
        return sum(self.view.counted.values())

    @property
    def round_s(self) -> float | None:
        """Seconds per round; None if rounds go by steps."""
        return self.run.clock.round_s if self.run is not None and self.run.clock.mode == "time" else None


# ---- where a peer stands, and the run


def peer_state(
    peer: PeerView, sighting: Sighting | None, now: float, answer_every_s: float = 1.0, received_at: float = 0
) -> tuple[str, str]:
    """(state, reason) of a peer at ``now`` (unix seconds); ``answer_every_s``: how often it is asked;
    ``received_at``: when words of its last came, which may be old ones."""
    if peer.end is not None:
        return "finished", peer.end.reason
    out_of_reach = sighting.reason if sighting is not None and sighting.state == "unreachable" else ""
    said, nonsense = peer.left_reason, sighting.refused if sighting is not None else None
    if peer.last_seen_at is None:
        unheard = [("gone", f"others say: {said}")] if said else []
        unheard += [("unreachable", out_of_reach)] if out_of_reach else []
        words = (sighting and sighting.reason) or "sends nothing that can be read"
        return (*unheard, ("unknown", words if nonsense else "no word of its own yet"))[0]
    silent_s = now - max(peer.last_seen_at, received_at) - (answer_every_s - 1.0)
    if said and silent_s > GONE_AFTER_S:
        left = said.startswith(LEFT_PREFIX)
        return ("left", said.removeprefix(LEFT_PREFIX)) if left else ("gone", f"others say: {said}")
    if silent_s > SILENT_AFTER_S:
        return ("unreachable", out_of_reach) if out_of_reach else ("silent", f"no word for {silent_s:.0f} s")
    return peer.phase or "starting", ""


def run_position(trains: Sequence[float], ended: Sequence[tuple[float, float]]) -> float:
    """In rounds; 0 without anybody. ``trains``: positions; ``ended``: (last heard at, position)."""
    newest_at = max((at for at, _ in ended), default=0.0)
    last = sorted(position for at, position in ended if at >= newest_at - TOGETHER_S)
    now = statistics.median_low(trains) if trains else 0.0
    return max(now, last[len(last) // 2]) if last and len(last) >= len(trains) else now


def is_behind(position: float, run: float) -> bool:
    """Whether the figures of a peer at ``position`` say nothing of a run that is at ``run``."""
    return position < run - BEHIND_ROUNDS


def in_the_run(peers: Iterable[PeerView]) -> list[PeerView]:
    """Those whose figures are the run's, where nothing is known but their events: all but those that join, or
    were behind when they were last heard."""
    known = [peer for peer in peers if peer.started and peer.phase not in {"starting", "joining"}]
    ended = [peer for peer in known if peer.finished or peer.seen_left]
    trains = [peer for peer in known if not (peer.finished or peer.seen_left)]

    def run_as_it_was(peer: PeerView) -> float:
        before = [
            (one.last_seen_at or 0.0, one.progress.position)
            for one in ended
            if (one.last_seen_at or 0.0) < (peer.last_seen_at or 0.0)
        ]
        return run_position([one.progress.position for one in trains] if peer in trains else [], before)

    return [peer for peer in known if not is_behind(peer.progress.position, run_as_it_was(peer))]


def predicted_utilisation(
    run: RunConfig | None, parameters: int, fragments: int, peers: Sequence[PeerFacts]
) -> float | None:
    """What the planner would have said of the peers online by now, 0 to 1, from the run's settings, measured
    steps and measured links; None while something is not measured yet, or what peers say cannot be."""
    online = [peer for peer in peers if peer.state in ONLINE and peer.inner_steps][:MAX_LINKS]
    links = [link for peer in online if (link := _planned_link(peer, peers)) is not None]
    if run is None or len(links) < 2 or not 0 < fragments <= parameters <= MAX_PARAMETERS:
        return None
    step_s = statistics.median((one.utilisation or 0.0) * one.wall_s / one.inner_steps for one in online)
    elapsed_s = max(peer.wall_s for peer in online)
    if not _STEP_S[0] <= step_s <= _STEP_S[1] or elapsed_s <= 0:
        return None
    setting = setting_of(run, even_fragments(parameters, fragments), step_s, links)
    so_far = dataclasses.replace(setting, rounds=0)
    return forecast(so_far, horizon_s=max(elapsed_s, setting.round_s)).utilisation


def _planned_link(peer: PeerFacts, peers: Sequence[PeerFacts]) -> Link | None:
    """What its link has shown: its fastest burst out, at most its cap, the fastest burst to it, and the
    median round trip."""
    rates = [link.bytes_per_s for link in peer.links if link.bytes_per_s]
    trips = [link.round_trip_s for link in peer.links if link.round_trip_s]
    inward = [
        link.bytes_per_s
        for other in peers
        for link in other.links
        if link.other == peer.peer and link.bytes_per_s
    ]
    if not rates or not inward:
        return None
    up = min(max(rates), peer.upload_cap_bytes_per_s or max(rates))
    down, trip_s = max(inward), statistics.median(trips) if trips else 0.0
    if not all(_RATE[0] <= rate <= _RATE[1] for rate in (up, down)) or trip_s > _MOST_TRIP_S:
        return None
    return Link(up_bytes_per_s=up, down_bytes_per_s=down, round_trip_s=trip_s)


# ---- facts


def swarm_facts(known: Known) -> SwarmFacts:
    """The swarm at ``known.now``."""
    view, run, state = known.view, known.run, known.state
    unheard = [PeerView(peer) for peer in known.sightings if peer not in view.peers]
    unplaced = [_peer_facts(known, peer) for peer in (*view.peers.values(), *unheard)]
    at = run_position(
        [peer.position for peer in unplaced if peer.state in TRAINS],
        [(one.last_seen_at or 0.0, one.position) for one in unplaced if one.state in ENDED and one.position],
    )
    peers = tuple(sorted((_placed(peer, at) for peer in unplaced), key=lambda facts: facts.label))
    online = [peer for peer in peers if peer.state in ONLINE]
    in_run = {peer.peer: peer for peer in peers if peer.state not in NOT_IN_THE_RUN}
    figures = [peer for peer in in_run.values() if peer.state in ONLINE] or list(in_run.values())
    measured = [one.agreed for one in view.peers.values() if one.agreed and one.peer in in_run]
    agreed = max(measured, key=lambda event: event.at, default=None)
    used = [peer.utilisation for peer in figures if peer.utilisation is not None]
    losses = [peer.loss for peer in figures if peer.loss is not None]
    training = sum(losses) / len(losses) if losses else None
    is_old = agreed is None or (training is not None and is_behind(agreed.position, at))
    staleness, aborts, alone = view.staleness, view.abort_reasons, view.alone
    totals, fragments = view.totals, known.fragments
    rounds_total = run.clock.rounds if run else 0
    ended = at >= rounds_total > 0 and all(peer.state != "training" for peer in peers)
    is_over = ended or (bool(peers) and all(peer.state in OVER for peer in peers))
    newest = [round_facts(known, view) for view in list(view.rounds.values())[-ROUNDS_SHOWN:]]
    return SwarmFacts(
        at=known.now, run=run.name if run else "", run_digest=run.digest().hex() if run else "",
        place=known.place, connection=state.phase, connection_words=state.words, fragments=fragments,
        parameters=max((peer.start.parameters for peer in view.peers.values()), default=0),
        round_s=known.round_s, rounds_total=rounds_total, position=at, peers_online=len(online),
        peers_known=len(peers), loss=training if agreed is None or is_old else agreed.loss,
        loss_kind="training" if is_old else "held-out", loss_agreed=agreed.loss if agreed else None,
        loss_agreed_at=agreed.at if agreed else None, loss_training=training,
        loss_unit=loss_unit(run.recipe) if run else "", tokens=totals.tokens,
        tokens_counted=known.counted / fragments if fragments else 0.0,
        tokens_per_s=sum(peer.tokens_per_s for peer in figures),
        utilisation=sum(used) / len(used) if used else None, utilisation_predicted=known.predicted,
        up_bytes=totals.up_bytes, up_bytes_per_s=sum(peer.up_bytes_per_s or 0.0 for peer in peers),
        rounds_committed=_committed(view, alone), rounds_alone=alone, rounds_aborted=aborts.total(),
        rounds_counted=view.counted_rounds,
        staleness={str(value): staleness[value] for value in sorted(staleness)},
        staleness_mean=mean_of(staleness), sync_delay_steps_mean=mean_of(view.sync_delay_steps),
        abort_reasons=dict(aborts.most_common(16)),
        troubles=() if is_over else troubles(view, known.label, peers, known.sightings, state, known.now),
        peers=peers, rounds=tuple(sorted(newest, key=lambda facts: -facts.at)),
    )  # fmt: skip


def _placed(peer: PeerFacts, at: float) -> PeerFacts:
    """``peer`` with the state "behind" if the run, which is at ``at``, is further on than it."""
    if peer.state not in TRAINS or not is_behind(peer.position, at):
        return peer
    words = f"at round {peer.position:.1f}, the run is at {at:.1f}: it has not caught up, or begins anew"
    return peer.model_copy(update={"state": "behind", "reason": words})


def _peer_facts(known: Known, peer: PeerView) -> PeerFacts:
    sighting, fragments, totals = known.sightings.get(peer.peer), known.fragments, peer.totals
    every_s = max(1.0, len(known.sightings) / ASKS_PER_S)
    state, reason = peer_state(peer, sighting, known.now, every_s, known.received_at.get(peer.peer, 0.0))
    if known.is_over and state in ONLINE:
        state, reason = "gone", "it ended without a word"
    over, online = state in OVER or state == "gone", state in ONLINE
    up, down = known.paces[peer.peer].rates(known.now) if peer.peer in known.paces else (None, None)
    counted = known.view.counted.get(peer.peer)
    carriers = Counter(carrier[:16] for carrier in peer.open_links.values()) if online else {}
    links = sorted(((other, link.measured) for other, link in peer.links.items()), key=lambda found: found[0])
    return PeerFacts.model_construct(
        peer=peer.peer, label=known.label(peer.peer), name=peer.start.name, state=state, reason=reason,
        device=peer.start.device, software=peer.start.software, joined_at=peer.first_seen_at,
        last_seen_at=peer.last_seen_at, clock_offset_s=sighting.clock_offset_s if sighting else None,
        answer_s=sighting.round_trip_s if sighting else None, tokens=totals.tokens,
        tokens_counted=counted / fragments if counted is not None and fragments else None,
        share_counted=(counted or 0.0) / known.counted if known.counted else None,
        tokens_per_s=peer.tokens_per_s if online else 0.0, loss=peer.loss, inner_steps=totals.inner_steps,
        position=peer.progress.position, versions=peer.versions, staleness_mean=mean_of(peer.staleness),
        sync_delay_steps_mean=mean_of(peer.tally.sync_delay_steps), utilisation=peer.utilisation,
        wall_s=totals.wall_s, exposed_s=totals.exposed_s,
        hidden_s=max(0.0, peer.tally.in_flight_s - totals.exposed_s), up_bytes=totals.up_bytes,
        down_bytes=totals.down_bytes, up_bytes_per_s=None if over else up,
        down_bytes_per_s=None if over else down,
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
            for other, link in links
            if link is not None
        ),
        skipped_sends=peer.tally.skipped_sends.total(), refused=dict(peer.tally.refused),
        nonsense=dict(sighting.refused) if sighting else {},
    )  # fmt: skip


def round_facts(known: Known, view: RoundView) -> RoundFacts:
    outcome, reason, missed, aborts = view.outcome, "", view.missed_by, view.aborts
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
    at = max(
        (commit.at for commit in view.commits.values()), default=view.begun[0] if view.begun else known.now
    )
    return RoundFacts(
        fragment=view.fragment, round=view.round, at=at, outcome=outcome, group_size=view.group_size,
        contributors=view.contributors, staleness=view.staleness, duration_s=view.duration_s,
        reason=reason[:300], counted=bool(view.weights),
    )  # fmt: skip


def _committed(view: SwarmView, alone: int) -> int:
    """Rounds committed since the run began: each outer version is one, but for those that a peer made alone.
    Seen rounds where versions lag."""
    columns = zip(*(peer.versions for peer in view.peers.values() if peer.versions), strict=False)
    reached = sum(sorted(column)[len(column) // 2] for column in columns)
    return max(int(reached) - alone, view.committed)


def _needed_bytes_per_s(known: Known, peer: PeerView) -> float | None:
    seconds, steps = known.round_s, peer.totals.inner_steps
    if seconds is None and known.run is not None and steps:
        seconds = known.run.clock.inner_steps_per_round * peer.totals.wall_s / steps
    if not seconds or not peer.sent or known.members < 2:
        return None
    return 2 * (1 - 1 / known.members) * sum(one.payload_bytes for one in peer.sent.values()) / seconds


def fragment_measures(known: Known) -> dict[int, tuple[float, float, float]]:
    """(largest gap, mean momentum norm, largest staleness) by fragment, over the outer steps of late."""
    newest: dict[int, list[FragmentApplied]] = {}
    for peer in known.view.peers.values():
        for fragment, event in peer.arrived.items():
            if isinstance(event, FragmentApplied) and known.now - event.at < 3 * (known.round_s or 60.0):
                newest.setdefault(fragment, []).append(event)
    return {
        fragment: (
            max(event.gap for event in found),
            sum(event.momentum_norm for event in found) / len(found),
            float(max(event.staleness for event in found)),
        )
        for fragment, found in newest.items()
    }
