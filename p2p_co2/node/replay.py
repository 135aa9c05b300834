"""What a donor gave of a missed round, held against what this peer knows, before it is taken.

Law: a round is replayed only upon the state that it was made upon, only if most of those that this peer is
with made it; its certificate proves that a quorum did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2p_co2.digest import digest as digest_of
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.ledger import AgreedMean, agreed_mean
from p2p_co2.protocol.catchup import Fetched
from p2p_co2.protocol.rounds import open_decision
from p2p_co2.protocol.wire.identity import PeerId

if TYPE_CHECKING:
    from p2p_co2.node.node import Node

OTHER_HISTORY = "other history"
"""The reason of a refusal that blames nobody: it may be this peer that went astray."""


def checked_mean(node: Node, event: Fetched) -> AgreedMean | None:
    """The mean of a replayed round, held against its signed decision; None if this peer is past it already.
    Raises ``RemoteProtocolError``."""
    fragment, majority = event.goal.fragment, node.catching.majority
    outcome = open_decision(event.decision, node.run_digest, node.shape)
    if (outcome.key.fragment, outcome.key.round) != (fragment, event.version):
        raise RemoteProtocolError("bad decision", "of another round")
    group = {PeerId(member.peer) for member in outcome.members}
    if not majority.is_most(group, fragment):
        raise RemoteProtocolError(OTHER_HISTORY, "most peers that train here are not in its group")
    agreed = node.agreed[fragment]
    if agreed.version != event.version - 1:
        return None
    if outcome.state_digest != agreed.digest:
        raise RemoteProtocolError(OTHER_HISTORY, "the round follows another state than ours")
    block_bytes = node.shape.block_bytes
    for part in outcome.parts:
        piece = event.data[part.start_block * block_bytes : part.stop_block * block_bytes]
        if digest_of(piece) != part.digest:
            raise RemoteProtocolError("wrong digest", f"of the mean of round {event.version}")
    return agreed_mean(outcome, event.data)
