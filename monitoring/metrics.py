"""``/metrics`` for Prometheus, on the board and on every peer's own page.

Names follow Prometheus' conventions (base units, ``_total``, ``_seconds``, ``_bytes``, ``_ratio``) under
``p2p_co2_``. Law: label sets are bounded, ``peer`` by ``MAX_PEERS``, ``fragment`` and ``stage`` by the run. A
peer's text is a label's value only, and a number that is not known has no sample. Price: made anew for each
scrape, some milliseconds for a hundred peers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from monitoring.charts import OUTCOMES
from monitoring.facts import ONLINE, STATES, PeerFacts, RunState, StageFacts, SwarmFacts
from monitoring.words import plain

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PEERS = 512
PREFIX = "p2p_co2_"

_PEER_COUNTERS = {
    "peer_tokens": "tokens", "peer_counted_tokens": "tokens_counted", "peer_inner_steps": "inner_steps",
    "peer_sent_bytes": "up_bytes", "peer_received_bytes": "down_bytes", "peer_exposed_seconds": "exposed_s",
    "peer_hidden_seconds": "hidden_s", "peer_skipped_sends": "skipped_sends",
    "peer_refused_messages": "refused", "peer_nonsense": "nonsense",
    "peer_missed_exchanges": "missed",
}  # fmt: skip
"""By name, the field of ``PeerFacts`` (of a table the sum), whose description says what it is."""
_PEER_GAUGES = {
    "peer_up": "state", "peer_tokens_per_second": "tokens_per_s", "peer_training_loss": "loss",
    "peer_utilisation_ratio": "utilisation", "peer_work_share_ratio": "share_counted",
    "peer_staleness_mean_steps": "staleness_mean", "peer_position_rounds": "position",
    "peer_last_seen_timestamp_seconds": "last_seen_at",
    "peer_upload_cap_bytes_per_second": "upload_cap_bytes_per_s",
    "peer_clock_offset_seconds": "clock_offset_s",
}  # fmt: skip
_SWARM_COUNTERS = {
    "swarm_tokens": "tokens", "swarm_counted_tokens": "tokens_counted", "swarm_sent_bytes": "up_bytes",
    "swarm_rounds_committed": "rounds_committed", "swarm_rounds_alone": "rounds_alone",
    "swarm_rounds_aborted": "rounds_aborted",
}  # fmt: skip
_SWARM_GAUGES = {
    "swarm_peers_online": "peers_online", "swarm_peers_known": "peers_known",
    "swarm_tokens_per_second": "tokens_per_s", "swarm_agreed_loss": "loss_agreed",
    "swarm_training_loss": "loss_training", "swarm_utilisation_ratio": "utilisation",
    "swarm_position_rounds": "position", "swarm_staleness_mean_steps": "staleness_mean",
    "swarm_progress_ratio": "progress", "swarm_time_left_seconds": "time_left_s",
    "swarm_troubles": "troubles", "reader_connected": "connection",
}  # fmt: skip
_STAGE_COUNTERS = {
    "stage_tokens": "tokens", "stage_counted_tokens": "tokens_counted",
    "stage_counted_microbatches": "counted", "stage_dropped_microbatches": "dropped",
    "stage_forward_bytes": "forward_bytes", "stage_back_bytes": "back_bytes",
    "stage_rounds_committed": "rounds_committed", "stage_rounds_aborted": "rounds_aborted",
}  # fmt: skip
_STAGE_GAUGES = {
    "stage_replicas": "replicas", "stage_tokens_per_second": "tokens_per_s",
    "stage_waiting_microbatches": "waiting", "stage_microbatches_in_flight": "in_flight",
    "stage_waiting_ratio": "waiting_share", "stage_utilisation_ratio": "utilisation",
    "stage_versions_apart": "versions_apart", "stage_forward_bytes_per_second": "forward_bytes_per_s",
    "stage_back_bytes_per_second": "back_bytes_per_s", "stage_forward_round_trip_seconds":
    "forward_round_trip_s", "stage_back_round_trip_seconds": "back_round_trip_s",
}  # fmt: skip
"""Only in a run with stages."""
_PIPELINE_GAUGES = {
    "peer_waiting_microbatches": "waiting", "peer_microbatches_in_flight": "in_flight",
    "peer_counted_microbatches": "counted", "peer_dropped_microbatches": "dropped",
    "peer_waiting_ratio": "waiting_share",
}  # fmt: skip
"""By name, the field of ``PeerFacts``; only in a run with stages."""
_WHILE_ONLINE = {"loss_training", "utilisation"}


class FactsCollector(Collector):
    """Metrics out of facts. ``only``: the one peer whose figures are told (a peer's own page), "" for all and
    the swarm's."""

    def __init__(self, facts: Callable[[], SwarmFacts], only: Callable[[], str] = lambda: "") -> None:
        self._facts = facts
        self._only = only

    def collect(self) -> Iterator[Metric]:
        facts = self._facts()
        only = self._only()
        peers = [peer for peer in facts.peers if only in ("", peer.peer)][:MAX_PEERS]
        if not only:
            yield from _of(CounterMetricFamily, _SWARM_COUNTERS, SwarmFacts, [facts])
            yield from _of(GaugeMetricFamily, _SWARM_GAUGES, SwarmFacts, [facts])
            states = {(state,): sum(peer.state == state for peer in facts.peers) for state in STATES}
            yield _gauge("swarm_peers", "Peers by state.", ["state"], states)
            outcomes = {(kind,): sum(found.outcome == kind for found in facts.rounds) for kind in OUTCOMES}
            words = "The newest fragment exchanges by outcome."
            yield _gauge("swarm_recent_rounds", words, ["outcome"], outcomes)
            is_in = {(state.lower(),): float(facts.state == state) for state in RunState}
            yield _gauge("swarm_state", "1 for the state that the run is in.", ["state"], is_in)
            words = _description(SwarmFacts, "figures_agreed")
            named = {(name,): value for name, value in facts.figures_agreed.items()}
            yield _gauge("swarm_agreed_figure", words, ["figure"], named)
            if facts.stages:
                yield from _of(CounterMetricFamily, _STAGE_COUNTERS, StageFacts, facts.stages, ["stage"])
                yield from _of(GaugeMetricFamily, _STAGE_GAUGES, StageFacts, facts.stages, ["stage"])
        yield from _of(CounterMetricFamily, _PEER_COUNTERS, PeerFacts, peers, ["peer", "name"])
        yield from _of(GaugeMetricFamily, _PEER_GAUGES, PeerFacts, peers, ["peer", "name"])
        for name, field in _PIPELINE_GAUGES.items() if facts.stages else ():
            values = {(*_names(one), str(one.stage)): getattr(one, field) for one in peers}
            yield _gauge(name, _description(PeerFacts, field), ["peer", "name", "stage"], values)
        yield _ages(peers)
        yield from _links(peers)


def _of(
    family: Any, table: Mapping[str, str], kind: type[PeerFacts | StageFacts | SwarmFacts],
    told: Sequence[Any], labels: Sequence[str] = (),
) -> Iterator[Metric]:  # fmt: skip
    for name, field in table.items():
        made = family(PREFIX + name, _description(kind, field), labels=labels or None)
        for facts in told:
            value = getattr(facts, field)
            match value:
                case dict():
                    value = sum(value.values())
                case tuple():
                    value = len(value)
                case str():
                    value = value in ONLINE or value == "connected"
            if isinstance(facts, SwarmFacts) and field in _WHILE_ONLINE and not facts.peers_online:
                value = None
            if value is not None:
                made.add_metric(_names(facts) if labels else [], float(value))
        yield made


def _description(kind: type[BaseModel], field: str) -> str:
    return kind.model_fields[field].description or field.replace("_", " ")


def _names(told: PeerFacts | StageFacts) -> list[str]:
    return [str(told.stage)] if isinstance(told, StageFacts) else [told.peer, plain(told.label, 40)]


def _gauge(name: str, words: str, labels: Sequence[str], values: Mapping[Any, float | None]) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, words, labels=labels)
    for key, value in values.items():
        if value is not None:
            gauge.add_metric(key, float(value))
    return gauge


def _ages(peers: Sequence[PeerFacts]) -> Metric:
    """The oldest peer's age of each fragment: peers times fragments would be too many series."""
    oldest: dict[int, float] = {}
    for peer in peers:
        if peer.state in ONLINE:
            for fragment, age in enumerate(peer.fragment_age_s):
                oldest[fragment] = max(oldest.get(fragment, 0.0), age or 0.0)
    words = "Longest time since agreed parameters reached this fragment on a peer that is online."
    ages = {(str(fragment),): age for fragment, age in sorted(oldest.items())}
    return _gauge("fragment_age_seconds", words, ["fragment"], ages)


def _links(peers: Sequence[PeerFacts]) -> Iterator[Metric]:
    """Per sender, over its links: links squared would be too many series."""
    fast = {}
    slow = {}
    count = dict[tuple[str, ...], int]()
    for peer in peers:
        key = tuple(_names(peer))
        fast[key] = min((link.bytes_per_s for link in peer.links if link.bytes_per_s), default=None)
        slow[key] = max((link.round_trip_s for link in peer.links if link.round_trip_s), default=None)
        kinds = Counter((link.carrier, link.relayed) for link in peer.links)
        for carrier, relayed in itertools.product(("grpc", "libp2p"), (False, True)):
            count[*key, carrier, str(relayed).lower()] = kinds[carrier, relayed]
    names = ["peer", "name"]
    yield _gauge("peer_link_bytes_per_second", "Rate while sending, its slowest link.", names, fast)
    yield _gauge("peer_round_trip_seconds", "Round trip, its farthest peer.", names, slow)
    yield _gauge("peer_links", "Measured links.", [*names, "carrier", "relayed"], count)


def exposition(collector: FactsCollector) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
