"""What is known of a swarm at one moment, as plain typed values: what pages, ``/api/swarm`` and metrics show.

Each field says its unit and whose word it is. ``own word``: the peer said so itself, in a report it signed.
``counted``: the group's signed decisions say so. ``observed``: this reader saw it. The JSON schema of
``GET /api/swarm`` is made from these classes, so it cannot differ from what is sent. A number that is not
known is null.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

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


class PeerFacts(_Frozen):
    """One peer."""

    peer: str = Field(description="Peer id; its public key, so nobody else can speak in its name.")
    label: str = Field(description="Short and unique here: its name, or the end of its id.")
    name: str = Field(description="Own word.")
    state: str = Field(
        description="starting, joining, behind, training, draining, paused, finished, left, gone, silent, "
        "unreachable or unknown."
    )
    reason: str = Field(description="Why it is in that state, in words; may be empty.")
    device: str = Field(description="torch's name of it. Own word.")
    software: str = Field(description="Own word.")
    joined_at: float | None = Field(description="First event, unix seconds.")
    last_seen_at: float | None = Field(description="Newest event, unix seconds.")
    clock_offset_s: float | None = Field(description="Its clock minus the reader's, seconds. Observed.")
    answer_s: float | None = Field(description="Seconds it took to answer the last question. Observed.")
    tokens: int = Field(description="Trained by its processes so far. Own word.")
    tokens_counted: float | None = Field(
        description="Mean over the fragments of the weights that signed decisions give it. Counted."
    )
    share_counted: float | None = Field(description="Its part of all counted work, 0 to 1. Counted.")
    tokens_per_s: float = Field(description="Own word.")
    loss: float | None = Field(description="Training loss of late, in loss_unit. Own word.")
    inner_steps: int = Field(description="Own word.")
    position: float = Field(description="Where it is, in rounds. Own word.")
    versions: tuple[int, ...] = Field(description="Outer version by fragment. Own word.")
    staleness_mean: float | None = Field(description="Outer steps, over all that it applied.")
    sync_delay_steps_mean: float | None = Field(description="Inner steps between send and apply.")
    utilisation: float | None = Field(
        description="Seconds in inner steps over wall seconds, 0 to 1. Own word."
    )
    wall_s: float = Field(description="Seconds since its first inner step. Own word.")
    exposed_s: float = Field(description="Seconds training stood still for communication. Own word.")
    hidden_s: float = Field(description="Seconds of communication behind which training went on. Own word.")
    up_bytes: int = Field(description="Sent since its process started. Own word.")
    down_bytes: int = Field(description="Received since its process started. Own word.")
    up_bytes_per_s: float | None = Field(description="Over the last ten seconds.")
    down_bytes_per_s: float | None = Field(description="Over the last ten seconds.")
    upload_cap_bytes_per_s: float | None = Field(description="Its owner's cap; null for none. Own word.")
    needed_bytes_per_s: float | None = Field(
        description="The floor: what the rounds ask of each direction of the average member, 2 (1 - 1/M) "
        "payload bytes per round. Slow members are given less."
    )
    fragment_age_s: tuple[float | None, ...] = Field(
        description="By fragment, seconds since agreed parameters last reached its live ones."
    )
    carriers: dict[str, int] = Field(description="Its open links by carrier; none once it is not online.")
    links: tuple[LinkFacts, ...] = Field(description="Measured links, by receiver.")
    skipped_sends: int = Field(description="Schedule points passed with the round before still in flight.")
    refused: dict[str, int] = Field(description="Messages that it refused, by reason. Own word.")
    nonsense: dict[str, int] = Field(
        description="What it told this reader and cannot be, by cause. Observed."
    )


class Trouble(_Frozen):
    """Something that is wrong now."""

    peer: str = Field(description="Peer id; empty if it is about the whole swarm.")
    words: str = Field(description="What and why, in one sentence, and what to do.")
    severity: str = Field(description='"bad" or "odd".')
    since_at: float = Field(description="Unix seconds.")


class RoundFacts(_Frozen):
    """One round of one fragment."""

    fragment: int
    round: int = Field(description="The outer version that it would make.")
    at: float = Field(description="Unix seconds of its newest news.")
    outcome: str = Field(
        description='"open", "committed", "partial", "late", "alone" (by one peer) or "aborted".'
    )
    group_size: int
    contributors: int
    staleness: int = Field(description="Of the most stale outer step that came of it; -1 if unknown.")
    duration_s: float = Field(description="READY to COMMIT at the slowest member, seconds; 0 if unknown.")
    reason: str = Field(description="Why attempts were aborted, or who missed it; may be empty.")
    counted: bool = Field(description="Whether a signed decision was seen and checked.")


class SwarmFacts(_Frozen):
    """A swarm at one moment."""

    at: float = Field(description="Unix seconds of this view.")
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
    loss: float | None = Field(
        description="loss_agreed, or loss_training where that is older than two rounds, in loss_unit."
    )
    loss_kind: str = Field(description='"held-out" or "training": which of them that is.')
    loss_agreed: float | None = Field(
        description="Newest held-out loss of the agreed parameters, in loss_unit."
    )
    loss_agreed_at: float | None
    loss_training: float | None = Field(
        description="Mean of the training losses of the peers that are in the run, in loss_unit."
    )
    loss_unit: str = Field(description="Known for the built-in recipe; empty where only its author knows.")
    tokens: int = Field(description="Sum of the peers' own words.")
    tokens_counted: float = Field(description="By signed decisions.")
    tokens_per_s: float
    utilisation: float | None = Field(
        description="Mean over the peers online, of all once nobody is; 0 to 1."
    )
    utilisation_predicted: float | None = Field(
        description="What the planner expects of these settings, step times and measured links, 0 to 1."
    )
    up_bytes: int = Field(description="Sum of the peers' own words.")
    up_bytes_per_s: float = Field(description="Sum over the peers.")
    rounds_committed: int = Field(description="By several peers.")
    rounds_alone: int = Field(description="Made by one peer with nobody else: nothing was exchanged.")
    rounds_aborted: int
    rounds_counted: int = Field(description="Committed rounds whose signed decision was checked.")
    staleness: dict[str, int] = Field(description="Applied outer steps by staleness.")
    staleness_mean: float | None
    sync_delay_steps_mean: float | None
    abort_reasons: dict[str, int]
    troubles: tuple[Trouble, ...]
    peers: tuple[PeerFacts, ...]
    rounds: tuple[RoundFacts, ...] = Field(description="The newest rounds, newest first.")
