"""``/metrics`` for Prometheus, on the board and on every peer's own page.

Names follow Prometheus' conventions (base units, ``_total``, ``_seconds``, ``_bytes``, ``_ratio``) under
``p2p_co2_``. Law: label sets are bounded: ``peer`` by ``MAX_PEERS``, ``fragment`` by what a run may have, the
rest are fixed words; a peer's text is a label's value only, and a number that is not known has no sample.
Figures a peer told of itself and figures the group counted have names of their own. Price: made anew for each
scrape, some milliseconds for a hundred peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monitoring.charts import OUTCOMES
from monitoring.facts import PeerFacts, SwarmFacts
from monitoring.peer_state import ONLINE
from monitoring.words import plain

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PEERS = 512
MAX_FRAGMENTS = 256
PREFIX = "p2p_co2_"
STATES = (
    "starting", "joining", "behind", "training", "draining", "paused", "finished", "left", "gone", "silent",
    "unreachable", "unknown",
)  # fmt: skip

_PEER_COUNTERS: tuple[tuple[str, str, Callable[[PeerFacts], float | None]], ...] = (
    ("peer_tokens", "Tokens trained; the peer's own word.", lambda peer: float(peer.tokens)),
    (
        "peer_counted_tokens",
        "Tokens of work in committed means, by signed decisions.",
        lambda peer: peer.tokens_counted,
    ),
    ("peer_inner_steps", "Inner optimizer steps; own word.", lambda peer: float(peer.inner_steps)),
    ("peer_sent_bytes", "Bytes sent; own word.", lambda peer: float(peer.up_bytes)),
    ("peer_received_bytes", "Bytes received; own word.", lambda peer: float(peer.down_bytes)),
    (
        "peer_exposed_seconds",
        "Time training stood still for communication; own word.",
        lambda peer: peer.exposed_s,
    ),
    (
        "peer_hidden_seconds",
        "Communication behind which training went on; own word.",
        lambda peer: peer.hidden_s,
    ),
    (
        "peer_skipped_sends",
        "Schedule points passed with the round before still in flight.",
        lambda peer: float(peer.skipped_sends),
    ),
    (
        "peer_refused_messages",
        "Messages that the peer refused; own word.",
        lambda peer: float(sum(peer.refused.values())),
    ),
    (
        "peer_nonsense",
        "What the peer told this reader and cannot be.",
        lambda peer: float(sum(peer.nonsense.values())),
    ),
)
_PEER_GAUGES: tuple[tuple[str, str, Callable[[PeerFacts], float | None]], ...] = (
    ("peer_up", "1 if the peer is online.", lambda peer: float(peer.state in ONLINE)),
    ("peer_tokens_per_second", "Tokens per second of late; own word.", lambda peer: peer.tokens_per_s),
    ("peer_training_loss", "Training loss, in the recipe's unit; own word.", lambda peer: peer.loss),
    (
        "peer_utilisation_ratio",
        "Time in inner steps over wall time; own word.",
        lambda peer: peer.utilisation,
    ),
    ("peer_work_share_ratio", "Part of all counted work.", lambda peer: peer.share_counted),
    ("peer_staleness_mean_steps", "Mean staleness of applied outer steps.", lambda peer: peer.staleness_mean),
    ("peer_position_rounds", "Where the peer is, in rounds; own word.", lambda peer: peer.position),
    ("peer_last_seen_timestamp_seconds", "Newest event, unix time.", lambda peer: peer.last_seen_at),
    ("peer_upload_cap_bytes_per_second", "Its owner's cap.", lambda peer: peer.upload_cap_bytes_per_s),
    ("peer_clock_offset_seconds", "Its clock minus this reader's.", lambda peer: peer.clock_offset_s),
)
_SWARM_COUNTERS: tuple[tuple[str, str, Callable[[SwarmFacts], float | None]], ...] = (
    ("swarm_tokens", "Tokens trained, the peers' own words together.", lambda facts: float(facts.tokens)),
    (
        "swarm_counted_tokens",
        "Tokens of work in committed means, by signed decisions.",
        lambda facts: facts.tokens_counted,
    ),
    ("swarm_sent_bytes", "Bytes sent by all peers.", lambda facts: float(facts.up_bytes)),
    (
        "swarm_rounds_committed",
        "Rounds that several peers committed since the run began.",
        lambda facts: float(facts.rounds_committed),
    ),
    (
        "swarm_rounds_alone",
        "Rounds that one peer made with nobody else.",
        lambda facts: float(facts.rounds_alone),
    ),
    (
        "swarm_rounds_aborted",
        "Attempts aborted that this reader heard of.",
        lambda facts: float(facts.rounds_aborted),
    ),
)
_SWARM_GAUGES: tuple[tuple[str, str, Callable[[SwarmFacts], float | None]], ...] = (
    ("swarm_peers_online", "Peers online.", lambda facts: float(facts.peers_online)),
    (
        "swarm_peers_known",
        "Peers heard of, those that left included.",
        lambda facts: float(facts.peers_known),
    ),
    ("swarm_tokens_per_second", "Tokens per second, all peers.", lambda facts: facts.tokens_per_s),
    (
        "swarm_agreed_loss",
        "Held-out loss of the agreed parameters, in the recipe's unit.",
        lambda facts: facts.loss_agreed,
    ),
    (
        "swarm_training_loss",
        "Mean training loss, in the recipe's unit, while anybody is online.",
        lambda facts: facts.loss_training if facts.peers_online else None,
    ),
    (
        "swarm_predicted_utilisation_ratio",
        "Compute utilisation that the planner expects of these links.",
        lambda facts: facts.utilisation_predicted,
    ),
    (
        "swarm_utilisation_ratio",
        "Mean compute utilisation, while anybody is online.",
        lambda facts: facts.utilisation if facts.peers_online else None,
    ),
    ("swarm_position_rounds", "Where the run is, in rounds.", lambda facts: facts.position),
    (
        "swarm_staleness_mean_steps",
        "Mean staleness of applied outer steps.",
        lambda facts: facts.staleness_mean,
    ),
    ("swarm_troubles", "Things that are wrong now.", lambda facts: float(len(facts.troubles))),
    (
        "reader_connected",
        "1 if this reader reaches the swarm.",
        lambda facts: float(facts.connection == "connected"),
    ),
)


class FactsCollector(Collector):
    """Metrics out of facts. ``only``: the one peer whose figures are told (a peer's own page), "" for all and
    the swarm's."""

    def __init__(self, facts: Callable[[], SwarmFacts], only: Callable[[], str] = lambda: "") -> None:
        self._facts, self._only = facts, only

    def collect(self) -> Iterator[Metric]:
        facts, only = self._facts(), self._only()
        peers = [peer for peer in facts.peers if only in ("", peer.peer)][:MAX_PEERS]
        if not only:
            yield from _of_swarm(facts)
        yield from _of_peers(peers)
        yield _ages(peers)
        yield from _links(peers)


def _of_swarm(facts: SwarmFacts) -> Iterator[Metric]:
    for name, words, of in _SWARM_COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, words)
        _add(counter, [], of(facts))
        yield counter
    for name, words, swarm_of in _SWARM_GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, words)
        _add(gauge, [], swarm_of(facts))
        yield gauge
    states = GaugeMetricFamily(PREFIX + "swarm_peers", "Peers by state.", labels=["state"])
    for state in STATES:
        _add(states, [state], float(sum(peer.state == state for peer in facts.peers)))
    yield states
    outcomes = GaugeMetricFamily(
        PREFIX + "swarm_recent_rounds", "The newest rounds by outcome.", labels=["outcome"]
    )
    for outcome in OUTCOMES:
        _add(outcomes, [outcome], float(sum(found.outcome == outcome for found in facts.rounds)))
    yield outcomes


def _of_peers(peers: list[PeerFacts]) -> Iterator[Metric]:
    labels = [[peer.peer, plain(peer.label, 40)] for peer in peers]
    for name, words, of in _PEER_COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, words, labels=["peer", "name"])
        for peer, label in zip(peers, labels, strict=True):
            _add(counter, label, of(peer))
        yield counter
    for name, words, of in _PEER_GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, words, labels=["peer", "name"])
        for peer, label in zip(peers, labels, strict=True):
            _add(gauge, label, of(peer))
        yield gauge


def _ages(peers: list[PeerFacts]) -> Metric:
    """The oldest peer's age of each fragment: peers times fragments would be too many series."""
    oldest: dict[int, float] = {}
    for peer in peers:
        if peer.state in ONLINE:
            for fragment, age in enumerate(peer.fragment_age_s[:MAX_FRAGMENTS]):
                oldest[fragment] = max(oldest.get(fragment, 0.0), age or 0.0)
    gauge = GaugeMetricFamily(
        PREFIX + "fragment_age_seconds",
        "Longest time since agreed parameters reached this fragment on a peer that is online.",
        labels=["fragment"],
    )
    for fragment, age in sorted(oldest.items()):
        _add(gauge, [str(fragment)], age)
    return gauge


def _links(peers: list[PeerFacts]) -> Iterator[Metric]:
    """Per sender, over its links: links squared would be too many series."""
    fast = GaugeMetricFamily(
        PREFIX + "peer_link_bytes_per_second",
        "Rate while sending, its slowest link.",
        labels=["peer", "name"],
    )
    slow = GaugeMetricFamily(
        PREFIX + "peer_round_trip_seconds", "Round trip, its farthest peer.", labels=["peer", "name"]
    )
    count = GaugeMetricFamily(
        PREFIX + "peer_links", "Measured links.", labels=["peer", "name", "carrier", "relayed"]
    )
    for peer in peers:
        label = [peer.peer, plain(peer.label, 40)]
        rates = [link.bytes_per_s for link in peer.links if link.bytes_per_s]
        trips = [link.round_trip_s for link in peer.links if link.round_trip_s]
        _add(fast, label, min(rates, default=None))
        _add(slow, label, max(trips, default=None))
        for carrier in ("grpc", "libp2p"):
            for relayed in (False, True):
                links = sum(link.carrier == carrier and link.relayed == relayed for link in peer.links)
                _add(count, [*label, carrier, str(relayed).lower()], float(links))
    yield from (fast, slow, count)


def _add(family: CounterMetricFamily | GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)


def exposition(collector: FactsCollector) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
