"""Certificates made by hand."""

from __future__ import annotations

from p2p_co2.protocol.rounds import DECISION_CONTEXT
from p2p_co2.protocol.wire.identity import Identity
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome, Vote


def certify(outcome: Outcome, *signers: Identity) -> Decision:
    """``outcome`` with the signatures of those of its members."""
    content = outcome.SerializeToString(deterministic=True)
    names = [member.peer for member in outcome.members]
    votes = [
        Vote(member=names.index(one.peer_id), signature=one.sign(DECISION_CONTEXT, content))
        for one in signers
        if one.peer_id in names
    ]
    return Decision(outcome=content, votes=votes)
