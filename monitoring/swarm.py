"""Facts of a swarm, made from what is known of it.

Law: none fails to be made, whatever a peer said. Price: about 60 microseconds per peer.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monitoring.facts import (
    ENDED,
    NOT_IN_THE_RUN,
    ONLINE,
    OVER,
    SILENT_AFTER_S,
    LinkFacts,
    PeerFacts,
    RoundFacts,
    RunState,
    StageFacts,
    SwarmFacts,
)
from monitoring.known import Known, is_behind, where_all_are
from monitoring.troubles import run_state, staffing, troubles
from monitoring.words import loading_words, loss_unit
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.view import Outcomes, PeerRecord, RoundView, mean_of

ROUNDS_SHOWN = 240
MODEL = "every peer that took part has the model: p2p-co2 model FOLDER --out DIR"


def swarm_facts(known: Known) -> SwarmFacts:
    """The swarm at ``known.now``."""
    view = known.view
    run = known.run
    others = (known.sightings.keys() | known.reached.keys()) - view.peers.keys()
    everybody = [*view.peers.values(), *map(PeerRecord, others)]
    at, states = where_all_are(known, everybody)
    made = (_peer_facts(known, peer, *states[peer.peer]) for peer in everybody)
    peers = tuple(sorted(made, key=lambda peer: (not known.me or peer.peer != known.me, peer.label)))
    online = [peer for peer in peers if peer.state in ONLINE]
    in_run = [peer for peer in peers if peer.state not in NOT_IN_THE_RUN]
    figures = [peer for peer in in_run if peer.state in ONLINE] or in_run
    stages = _stage_facts(known, peers, in_run)
    # Each token is trained on once in every stage: those are the swarm's of the first that is heard.
    first = next((stage for stage in stages if known.by_stage[stage.stage or 0]), stages[0])
    measured = [view.peers[one.peer].agreed for one in in_run if one.peer in view.peers]
    agreed = max((one for one in measured if one), key=lambda event: event.at, default=None)
    bests = [view.peers[one.peer].best for one in in_run if one.peer in view.peers]
    best = min((one for one in bests if one), key=lambda event: event.loss, default=None)
    named = max((one for one in measured if one and one.figures), key=lambda event: event.at, default=None)
    training = mean_known(peer.loss for peer in figures if peer.stage in (None, 0, known.stages - 1))
    is_old = agreed is None or (training is not None and is_behind(agreed.position, at))
    staleness = view.staleness
    aborts = sum((of_stage.aborts for of_stage in known.outcomes.values()), Counter())
    rounds_total = _rounds_total(known, figures)
    told = [peer for peer in peers if peer.state != "unknown" or peer.peer in known.sightings]
    has_ended = at >= rounds_total > 0 and all(peer.state != "training" for peer in peers)
    have_left = bool(told) and all(peer.state in OVER for peer in told)
    over = "every peer has finished, left or ended" if have_left or known.is_over else ""
    if has_ended:
        over = f"ended at round {rounds_total} of {rounds_total}; {MODEL}"
    shown = stages if known.stages > 1 else ()
    wrong = () if has_ended or have_left else troubles(known, peers, shown)
    state, why = run_state(known, peers, wrong, shown, over)
    goes_on = state in {RunState.HEALTHY, RunState.ALONE, RunState.DEGRADED} and any(
        peer.state != "paused" for peer in online
    )
    newest = [round_facts(known, one) for one in list(view.rounds.values())[-ROUNDS_SHOWN:]]
    return SwarmFacts(
        at=known.now, me=known.me, state=state, state_words=why,
        progress=min(1.0, at / rounds_total) if rounds_total else None,
        time_left_s=_time_left_s(known, max(0.0, rounds_total - at), online) if rounds_total and goes_on
        else None,
        my_exchange=_newest_exchange(known, known.me),
        run=run.name if run else "", run_digest=run.digest().hex() if run else "", place=known.place,
        connection=known.state.phase, connection_words=known.state.words, fragments=known.fragments,
        parameters=sum(
            max((peer.start.parameters for peer in held), default=0) for held in known.by_stage.values()
        ),
        round_s=known.round_s, rounds_total=rounds_total, position=min(at, rounds_total or at),
        peers_online=len(online), peers_known=len(peers), loss_kind="training" if is_old else "held-out",
        loss=training if agreed is None or is_old else agreed.loss, loss_training=training,
        loss_agreed=agreed.loss if agreed else None, loss_agreed_at=agreed.at if agreed else None,
        loss_best=best.loss if best else None, loss_best_round=best.position if best else None,
        figures_agreed=_finite(named),
        loss_unit=loss_unit(run.recipe) if run else "", tokens=first.tokens,
        tokens_counted=first.tokens_counted, tokens_per_s=first.tokens_per_s,
        utilisation=mean_known(peer.utilisation for peer in figures), up_bytes=view.totals.up_bytes,
        up_bytes_per_s=sum(peer.up_bytes_per_s or 0.0 for peer in peers),
        rounds_committed=sum(stage.rounds_committed for stage in stages),
        rounds_alone=sum(of_stage.alone for of_stage in known.outcomes.values()),
        rounds_aborted=aborts.total(), rounds_counted=view.counted_rounds,
        staleness={str(value): staleness[value] for value in sorted(staleness)},
        staleness_mean=mean_of(staleness), sync_delay_steps_mean=mean_of(view.sync_delay_steps),
        abort_reasons=dict(aborts.most_common(16)), troubles=wrong, stages=shown, peers=peers,
        rounds=tuple(sorted(newest, key=lambda facts: -facts.at)),
    )  # fmt: skip


def _rounds_total(known: Known, peers: Sequence[PeerFacts]) -> int:
    """When the run ends, as most of ``peers`` say, for its organiser may have amended it; 0 for never."""
    heard = [known.view.peers[one.peer].progress.rounds for one in peers if one.peer in known.view.peers]
    told = Counter(rounds for rounds in heard if rounds > 0)
    of_file = known.run.clock.rounds if known.run else 0
    return told.most_common(1)[0][0] if told else known.state.rounds or of_file


def _finite(event: ev.AgreedMeasured | None) -> dict[str, float]:
    figures = event.figures if event else {}
    return {name: value for name, value in sorted(figures.items()) if math.isfinite(value)}


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


def _median_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _peer_facts(known: Known, peer: PeerRecord, state: str, reason: str) -> PeerFacts:
    sighting = known.sighting(peer)
    totals = peer.totals
    stage = known.stage_of(peer)
    fragments = known.stage_fragments.get(stage or 0, 0)
    online = state in ONLINE
    said = peer.pipeline if stage is not None else None
    up, down = _rates(known, peer) if state not in OVER | {"gone"} else (None, None)
    counted = known.view.counted.get(peer.peer)
    carriers = Counter(carrier[:16] for carrier in peer.open_links.values()) if online else Counter()
    carriers.update([known.reached[peer.peer][:16]] if state == "reached" else ())
    return PeerFacts.model_construct(
        peer=peer.peer, label=known.label(peer.peer), name=peer.name, state=state, reason=reason,
        stage=stage, device=peer.start.device, software=peer.start.software, joined_at=peer.first_seen_at,
        last_seen_at=peer.last_seen_at, clock_offset_s=sighting.clock_offset_s,
        answer_s=sighting.round_trip_s, tokens=totals.tokens,
        tokens_counted=counted / fragments if counted is not None and fragments else None,
        share_counted=(counted or 0.0) / of if (of := known.counted.get(stage or 0, 0.0)) else None,
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
        missed=dict(peer.tally.missed),
        nonsense=dict(sighting.refused), waiting=said.waiting if said and online else _zero(stage),
        in_flight=said.in_flight if said and online else _zero(stage),
        counted=said.counted if said else _zero(stage), dropped=said.dropped if said else _zero(stage),
        waiting_share=peer.waiting_share if stage is not None else None,
        waits_for=said.waits_for if said and online else "", loading=loading_words(peer.loading),
        loaded_share=peer.loading.received_bytes / max(1, peer.loading.total_bytes) if peer.loading else None,
    )  # fmt: skip


def _zero(stage: int | None) -> int | None:
    """Of microbatches, where none were told of; there are none at all without stages."""
    return None if stage is None else 0


def round_facts(known: Known, view: RoundView) -> RoundFacts:
    outcome = view.outcome
    reason = ""
    missed = view.missed_by
    aborts = view.aborts
    late_from = 2 if known.run is not None and known.run.outer.is_delayed else 1  # late by design
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


def _rates(known: Known, peer: PeerRecord) -> tuple[float | None, float | None]:
    """Bytes per second (up, down) of late; 0 when what is known is old. None before two points so far apart
    that a round's burst does not pass for the rate."""
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


def _needed_bytes_per_s(known: Known, peer: PeerRecord) -> float | None:
    seconds = known.round_s
    steps = peer.totals.inner_steps
    if seconds is None and known.run is not None and steps:
        seconds = known.run.clock.inner_steps_per_round * peer.totals.wall_s / steps
    members = len(known.by_stage.get(known.stage_of(peer) or 0, ()))
    if not seconds or not peer.sent or members < 2:
        return None
    return 2 * (1 - 1 / members) * sum(one.payload_bytes for one in peer.sent.values()) / seconds


# ---- stages


def _stage_facts(
    known: Known, peers: Sequence[PeerFacts], in_run: Sequence[PeerFacts]
) -> tuple[StageFacts, ...]:
    """All stages; ``in_run``: the peers whose figures are the run's. Peers whose stage is not known may be
    of any, so they spare every stage the reproach of too few replicas."""
    by_peer = {peer.peer: peer for peer in peers}
    held = [[by_peer[peer.peer] for peer in known.by_stage[stage]] for stage in range(known.stages)]
    told = [_replicas(known, stage, mine, by_peer) for stage, mine in enumerate(held)]
    unplaced = sum(peer.stage is None and peer.state not in ENDED for peer in peers)
    is_going = any(peer.state in ONLINE - {"draining"} for peer in peers)
    joined_at = (peer.joined_at for peer in peers if peer.state in ONLINE)
    began_at = min((at for at in joined_at if at is not None), default=known.now)
    made = []
    for stage, mine in enumerate(held):
        # Who stands beside an empty stage alone could say more of the one behind it.
        is_cut_off = told[stage] is None and 0 in told[max(0, stage - 1) : stage + 2]
        replicas = 0 if is_cut_off else told[stage]
        ended_at = (one.last_seen_at or 0.0 for one in mine if one.state in ENDED)
        since_at = max([began_at, *ended_at])
        words = ""
        if is_going and known.stages > 1 and known.now - since_at >= SILENT_AFTER_S:
            wanted = known.run.pipeline.min_replicas if known.run is not None else 1
            words = staffing(stage, known.stages, replicas, unplaced, wanted)
        figures = [peer for peer in in_run if peer.stage == stage or known.stages == 1]
        figures = [peer for peer in figures if peer.state in ONLINE] or figures
        made.append(StageFacts.model_construct(
            stage=stage, replicas=replicas, trouble=words, trouble_since_at=since_at if words else None,
            **_stage_figures(known, stage, mine, figures, by_peer),
        ))  # fmt: skip
    return tuple(made)


def _replicas(
    known: Known, stage: int, mine: Sequence[PeerFacts], by_peer: Mapping[str, PeerFacts]
) -> int | None:
    """How many ``stage`` has: those online, or as the peers beside it hear, the lower median of their words;
    None if nobody says so."""
    online = sum(peer.state in ONLINE for peer in mine)
    words = [
        said.behind if said.stage < stage else said.before
        for beside in (stage - 1, stage + 1)
        for peer in known.by_stage.get(beside, ())
        if (said := peer.pipeline) is not None and by_peer[peer.peer].state in ONLINE - {"draining"}
    ]
    return online or (statistics.median_low(words) if words else 0 if mine else None)


def _stage_figures(
    known: Known, stage: int, mine: Sequence[PeerFacts], figures: Sequence[PeerFacts],
    by_peer: Mapping[str, PeerFacts],
) -> dict[str, Any]:  # fmt: skip
    there = [peer for peer in mine if peer.state in ONLINE] or mine
    columns = list(zip(*(peer.versions for peer in mine if peer.versions), strict=False))
    apart = zip(*(peer.versions for peer in there if peer.versions), strict=False)
    # Each outer version is a round, but for those that a peer made alone. Seen rounds where versions lag.
    reached = sum(int(sorted(column)[len(column) // 2]) for column in columns)
    outcomes = known.outcomes.get(stage) or Outcomes()
    fragments = known.stage_fragments[stage]
    forward, back = (
        [link for peer in there for link in peer.links
         if (other := by_peer.get(link.other)) is not None and other.stage == beside and beside is not None]
        for beside in (stage + 1 if stage < known.stages - 1 else None, stage - 1)
    )  # fmt: skip
    waits_for = Counter(peer.waits_for for peer in mine if peer.waits_for)
    return dict(
        known=len(mine),
        versions_apart=max((max(column) - min(column) for column in apart), default=None),
        tokens=sum(peer.tokens for peer in mine),
        tokens_counted=known.counted[stage] / fragments if fragments else 0.0,
        tokens_per_s=sum(peer.tokens_per_s for peer in figures),
        utilisation=mean_known(peer.utilisation for peer in figures),
        waiting=sum(peer.waiting or 0 for peer in mine), in_flight=sum(peer.in_flight or 0 for peer in mine),
        counted=sum(peer.counted or 0 for peer in mine), dropped=sum(peer.dropped or 0 for peer in mine),
        waiting_share=mean_known(peer.waiting_share for peer in figures),
        waits_for=waits_for.most_common(1)[0][0] if waits_for else "",
        forward_bytes_per_s=_median_known(link.bytes_per_s for link in forward),
        back_bytes_per_s=_median_known(link.bytes_per_s for link in back),
        forward_round_trip_s=_median_known(link.round_trip_s for link in forward),
        back_round_trip_s=_median_known(link.round_trip_s for link in back),
        forward_bytes=sum(link.sent_bytes for link in forward),
        back_bytes=sum(link.sent_bytes for link in back),
        rounds_committed=max(reached - outcomes.alone, outcomes.committed), rounds_alone=outcomes.alone,
        rounds_aborted=outcomes.aborts.total(),
    )  # fmt: skip
