"""What is told of a swarm at one moment: pages, terminal, ``/api/swarm``, metrics and summary show it.

``known.swarm_facts`` makes it. Each field says its unit and whose word it is. ``own word``: the peer said so
itself, in a report that it signed. ``counted``: the certificates of committed rounds say so. ``observed``:
this reader saw it. A number that is not known is null. The JSON schema of ``GET /api/swarm`` is made from
these classes.

Law: whatever a peer said, no fact is negative, infinite or unbounded.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

STATES = (
    "starting", "joining", "behind", "training", "draining", "paused", "finished", "left", "gone", "silent",
    "unreachable", "reached", "unknown",
)  # fmt: skip
"""Of a peer. Silence alone is not death, and neither is the word of others: it is "gone" when both come
together. "reached": the reader's own peer has a link to it, and nobody has heard it yet."""
TRAINS = frozenset({"training", "draining"})
ONLINE = TRAINS | {"starting", "joining", "paused", "behind"}
OVER = frozenset({"finished", "left"})
ENDED = OVER | {"gone", "silent", "unreachable"}
NOT_HEARD = frozenset({"reached", "unknown"})
NOT_IN_THE_RUN = NOT_HEARD | {"starting", "joining", "behind"}
SILENT_AFTER_S = 10.0
"""Ten questions to a peer without an answer, and what rates are measured over. The word of others counts
after a third of it; what lasts three times as long is told to a person."""
RECENT_S = 120.0
"""Peers that ended within it ended together."""
OF_STAGES = ("waiting", "in_flight", "counted", "dropped", "waiting_share")
"""CommonFacts of ``WorkFacts`` that there are only in a run with stages."""


class RunState(StrEnum):
    """How a run is, in a word, as one reader sees it. The first that is true holds:

    ``OVER``: its rounds are made, and nobody trains; or all have finished or left; or its journals ended.
    ``LOST``: the reader cannot reach the run, or of the peers that were there none is online.
    ``ALONE``: all that are online are paused; or all but one, in a run of one stage, and the reader's own
    peer reaches nobody else.
    ``DEGRADED``: something bad (``Trouble.severity``) began in the last ``RECENT_S``; or a stage has no
    replica; or none of a fragment's exchanges has committed for ``OVERDUE_ROUNDS``.
    ``HEALTHY``: none of these. A run of which nobody has been heard yet has no state.
    """

    HEALTHY = "Healthy"
    ALONE = "Alone"
    DEGRADED = "Degraded"
    LOST = "Lost"
    OVER = "Over"


class FrozenFacts(BaseModel):
    """The base of all facts."""

    model_config = ConfigDict(frozen=True)


class LinkFacts(FrozenFacts):
    """One direction of one link, as its sender measured it (own word)."""

    other: str = Field(description="Peer id of the receiver.")
    carrier: str = Field(description='"grpc" or "libp2p".')
    relayed: bool = Field(description="Whether a third machine passes the bytes on.")
    round_trip_s: float | None = Field(description="Seconds, the smallest of late.")
    bytes_per_s: float | None = Field(description="Rate while payload was being sent, bytes per second.")
    sent_bytes: int = Field(description="Payload bytes since the peer's process started.")


class CommonFacts(FrozenFacts):
    """What a peer, the replicas of a stage or a swarm did."""

    tokens: int = Field(description="Trained so far; of a swarm in stages those of the first. Own word.")
    tokens_counted: float | None = Field(description="Work in committed means, by fragment. Counted.")
    tokens_per_s: float = Field(description="Of late, summed as tokens are. Own word.")
    utilisation: float | None = Field(description="Inner steps over wall time, 0 to 1; a mean. Own word.")


class WorkFacts(CommonFacts):
    """What may have a stage: a peer, or all replicas of one together. Of microbatches it is own word."""

    stage: int | None = Field(description="The first is 0; null in a run of one stage, or if unknown.")
    waiting: int | None = Field(description="Microbatches that are there and not begun.")
    in_flight: int | None = Field(description="Microbatches whose gradient has not come back from behind.")
    counted: int | None = Field(description="Microbatches in its gradients since its process started.")
    dropped: int | None = Field(description="Microbatches given up since its process started.")
    waiting_share: float | None = Field(description="Of its time it waits for microbatches, 0 to 1.")
    waits_for: str = Field(description="What for, in words; empty while there is work.")


class PeerFacts(WorkFacts):
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
    share_counted: float | None = Field(
        description="Its part of all counted work of its stage, 0 to 1. Counted."
    )
    loss: float | None = Field(description="Training loss of late, in loss_unit. Own word.")
    inner_steps: int = Field(description="Own word.")
    position: float = Field(description="Where it is, in rounds. Own word.")
    versions: tuple[int, ...] = Field(description="Outer version by fragment. Own word.")
    staleness_mean: float | None = Field(description="Outer steps, over all that it applied.")
    sync_delay_steps_mean: float | None = Field(description="Inner steps between send and apply.")
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
    loading: str = Field(description="The agreed state that it loads, in words; empty if it loads none.")
    loaded_share: float | None = Field(description="Of that state, there already, 0 to 1.")


class StageFacts(WorkFacts):
    """One stage of a run with several: what its replicas are and do together."""

    replicas: int | None = Field(
        description="Its peers online, or as those beside it hear if none is seen; null if unknown."
    )
    known: int = Field(description="Its peers that were ever seen.")
    versions_apart: int | None = Field(description="Outer versions between its foremost and last replica.")
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


class Trouble(FrozenFacts):
    """Something that is wrong now."""

    peer: str = Field(description="Peer id; empty if it is about the whole swarm.")
    words: str = Field(description="What and why, in one sentence, and what to do.")
    severity: str = Field(description='"bad" or "odd".')
    since_at: float = Field(description="Unix seconds.")


class RoundFacts(FrozenFacts):
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


class SwarmFacts(CommonFacts):
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
    loss_best: float | None = Field(description="Lowest held-out loss that was heard of them. Own word.")
    loss_best_round: float | None = Field(description="Where the run was then, rounds.")
    figures_agreed: dict[str, float] = Field(
        description="What else was measured of the agreed parameters, by name, the newest. Own word."
    )
    loss_training: float | None = Field(description="Mean training loss of the peers in the run.")
    loss_unit: str = Field(description="Known for the built-in recipe; empty where only its author knows.")
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
    peers: tuple[PeerFacts, ...] = Field(description="The reader's own first, then by label.")
    rounds: tuple[RoundFacts, ...] = Field(description="The newest fragment exchanges, newest first.")
    stages: tuple[StageFacts, ...] = Field(description="In their order; empty in a run of one stage.")

    @property
    def missed(self) -> Counter[str]:
        """Exchanges in which a peer's slices were not counted, by reason, over all peers."""
        return sum((Counter(peer.missed) for peer in self.peers), Counter[str]())

    @property
    def own(self) -> PeerFacts | None:
        """The reader's own peer; None if it has none, or it has not been heard."""
        first = self.peers[0] if self.peers and self.me else None
        return first if first is not None and first.peer == self.me else None

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
