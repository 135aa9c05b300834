"""Certificates made by hand."""

from __future__ import annotations

from struct import pack

from p2p_co2.digest import digest
from p2p_co2.protocol.rounds import DECISION_CONTEXT
from p2p_co2.protocol.rounds.certificate import MEAN_CONTEXT
from p2p_co2.wire.identity import Identity
from p2p_co2.wire.messages_pb2 import Decision, Mean, Outcome, PartOutcome, SignedMean, Vote


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


def signed_mean(mean: Mean, blocks: tuple[int, int], owner: Identity, run: bytes) -> SignedMean:
    """What ``owner`` signs of a mean that goes in one piece, or whose bytes are all in it."""
    outcome = PartOutcome(
        start_block=blocks[0], stop_block=blocks[1], digest=digest(mean.data),
        contributors=mean.contributors, missed=mean.missed,
    )  # fmt: skip
    said = digest(outcome.SerializeToString(deterministic=True))
    content = run + mean.key.attempt + pack("<II", mean.part, mean.generation) + said
    signature = owner.sign(MEAN_CONTEXT, content)
    return SignedMean(part=mean.part, generation=mean.generation, digest=said, signature=signature)
