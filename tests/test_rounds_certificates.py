"""rounds: votes, certificates, and what becomes of an attempt that cannot be committed."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from p2p_co2.digest import digest
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import (
    DECISION_CONTEXT,
    Aborted,
    Committed,
    FellBehind,
    OutcomeWithoutBytes,
    ReduceWanted,
    Refused,
    Rounds,
    open_decision,
)
from p2p_co2.protocol.rounds.member import Signed
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import Identity, PeerId
from tests.certificates import certify, signed_mean
from tests.round_machine import DIGEST, SHAPE, begun_member, drain, offer_of, one_machine
from tests.round_network import RUN, Faults, Network, make_identity

IDS = sorted((make_identity(index) for index in range(3)), key=lambda one: one.peer_id)


def outcome_of(round_: int = 1, live: int = 3, **change: Any) -> wire.Outcome:
    fields: dict[str, Any] = {
        "key": wire.RoundKey(fragment=0, round=round_, attempt=b"a" * 16), "run": RUN, "live": live,
        "coordinator": IDS[0].peer_id, "state_digest": DIGEST,
        "members": [
            wire.Member(peer=one.peer_id, weight=2.0, base_version=round_ - 1, offer_id=bytes(8))
            for one in IDS
        ],
        "parts": [
            wire.PartOutcome(
                start_block=0, stop_block=16, digest=hashlib.sha256(b"mean").digest(),
                contributors=[wire.Contributor(peer=one.peer_id, weight=2.0) for one in IDS],
            )
        ],
    }  # fmt: skip
    return wire.Outcome(**(fields | change))


def signed(round_: int = 1, *, by: tuple[Identity, ...] = tuple(IDS), **change: Any) -> wire.Decision:
    """A commit that all three signed."""
    return certify(outcome_of(round_, **change), *by)


@pytest.mark.parametrize(
    ("live", "signers", "is_one"),
    [
        (3, (0, 1), True), (3, (0,), False), (4, (1, 2), False), (4, (0, 1), True), (4, (0, 1, 2), True),
        (5, (0, 1, 2), True), (5, (0, 1), False), (6, (0, 1, 2), True), (7, (0, 1, 2), False),
        (2, (0, 1, 2), False),
    ],
)  # fmt: skip
def test_a_quorum_is_more_than_half_of_the_live_peers_or_half_with_the_coordinator(
    live: int, signers: tuple[int, ...], is_one: bool
) -> None:
    decision = certify(outcome_of(live=live), *(IDS[index] for index in signers))
    if is_one:
        assert open_decision(decision, RUN, SHAPE).key.round == 1
    else:
        with pytest.raises(RemoteProtocolError):
            open_decision(decision, RUN, SHAPE)


def test_two_quorums_of_the_same_live_peers_share_one() -> None:
    """Whatever groups they are of: that two attempts of a round cannot both be committed rests on it."""
    from itertools import combinations

    from p2p_co2.protocol.rounds.attempt import is_quorum

    for live in range(1, 8):
        peers = [PeerId(str(number)) for number in range(live)]
        sets = [set(some) for size in range(live + 1) for some in combinations(peers, size)]
        # Of an even number, half decides only with the one that is first by hash (``Gathering``).
        quorums = [some for some in sets if is_quorum(some, live, peers[0])]
        assert all(one & other for one in quorums for other in quorums)


@pytest.mark.parametrize("seed", [0, 8])
def test_where_two_members_vote_differently_the_coordinators_vote_decides(seed: int) -> None:
    """On late links each closes a part without the other's slice."""
    net = Network(2, seed, Faults(0.02, 0.0, (0.01, 4.0)))
    net.keep_offering(4.0)
    net.run(100.0)
    aborts = [event.reason for _, event in net.events if isinstance(event, Aborted)]
    assert not [reason for reason in aborts if "signed the same mean" in reason]


def test_what_no_honest_quorum_signs_is_refused() -> None:
    wrong = signed()
    wrong.votes[1].signature = wrong.votes[0].signature
    other_run, stranger = signed(run=bytes(32)), signed()
    stranger.votes[0].member = 9
    twice = signed(by=(IDS[0],))
    twice.votes.add(member=0, signature=twice.votes[0].signature)
    holes = signed(parts=[wire.PartOutcome(start_block=0, stop_block=15, digest=bytes(32))])
    boast = signed(
        parts=[
            wire.PartOutcome(
                start_block=0, stop_block=16, digest=bytes(32),
                contributors=[wire.Contributor(peer=IDS[0].peer_id, weight=9.0)],
            )
        ]
    )  # fmt: skip
    for decision, reason in (
        (wrong, "wrong signature"), (other_run, "wrong run"), (stranger, "wrong group"), (twice, "no quorum"),
        (holes, "wrong parts"), (boast, "wrong contributors"), (wire.Decision(outcome=b"\xff"), "unreadable"),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError) as caught:
            open_decision(decision, RUN, SHAPE)
        assert caught.value.reason == reason


def whole(machine: Rounds, begin: wire.Begin, coordinator: PeerId, other: PeerId) -> wire.Result:
    """The member has all means: what it votes."""
    machine.receive(begin, coordinator, 0.5)
    mean = wire.Mean(key=begin.key, part=1, total=64, data=bytes(64))
    mean.contributors.extend(wire.Contributor(peer=member.peer, weight=2.0) for member in begin.members)
    owner = next(identity for identity in map(make_identity, range(3)) if identity.peer_id == other)
    mean.signature = signed_mean(mean, (8, 16), owner, RUN).signature
    machine.receive(mean, other, 0.6)
    for peer in (coordinator, other):
        machine.receive(wire.Part(key=begin.key, part=0, total=64, data=bytes(64)), peer, 0.7)
    (job,) = [event.job for event in drain(machine) if isinstance(event, ReduceWanted)]
    machine.reduced(job, bytes(64), 0.8)
    votes = [m for _, m in machine.messages_to_send() if isinstance(m, wire.Result) and m.digest]
    assert len(votes) == 2
    return votes[0]


def outcome_signed(machine: Rounds) -> bytes:
    member = machine._fragments[0].mine.member
    assert member is not None
    assert isinstance(member.state, Signed)
    return member.state.outcome


def test_a_second_equal_vote_of_three_commits_and_is_passed_on_as_a_certificate() -> None:
    machine, begin, coordinator, other = begun_member()
    vote = whole(machine, begin, coordinator, other)
    outcome = outcome_signed(machine)
    assert vote.digest == digest(outcome)
    identity = next(make_identity(n) for n in range(3) if make_identity(n).peer_id == other)
    machine.receive(
        wire.Result(key=begin.key, digest=vote.digest, signature=identity.sign(DECISION_CONTEXT, outcome)),
        other, 1.0,
    )  # fmt: skip
    (event,) = [event for event in drain(machine) if isinstance(event, Committed)]
    decision = wire.Decision.FromString(event.decision)
    assert len(decision.votes) == 2
    assert open_decision(decision, RUN, SHAPE).key == begin.key


def test_a_vote_with_a_bad_signature_counts_nothing_and_is_refused() -> None:
    machine, begin, coordinator, other = begun_member()
    vote = whole(machine, begin, coordinator, other)
    machine.receive(wire.Result(key=begin.key, digest=vote.digest, signature=bytes(64)), other, 1.0)
    events = drain(machine)
    assert [event.peer for event in events if isinstance(event, Refused)] == [other]
    assert not [event for event in events if isinstance(event, Committed)]


def test_a_member_that_gives_up_waits_for_all_who_live_and_commits_no_more_by_itself() -> None:
    """One of them may have committed: it answers with the certificate."""
    machine, begin, coordinator, other = begun_member()
    vote = whole(machine, begin, coordinator, other)
    outcome = outcome_signed(machine)
    identity = next(make_identity(n) for n in range(3) if make_identity(n).peer_id == other)
    machine.receive(wire.Result(key=begin.key, gave_up=True), coordinator, 1.0)
    machine.receive(wire.Result(key=begin.key, digest=b"2" * 32, signature=bytes(64)), other, 1.0)
    told = [m for _, m in machine.messages_to_send() if isinstance(m, wire.Result)]
    assert all(message.gave_up for message in told)  # three votes that differ: nothing can be committed
    assert told
    assert not drain(machine)
    late = wire.Result(key=begin.key, digest=b"2" * 32, signature=bytes(64), gave_up=True)
    machine.receive(late, other, 2.0)
    (aborted,) = drain(machine)
    assert isinstance(aborted, Aborted)
    machine.offer(offer_of(weight=3.0), 3.0)  # the round may be tried again
    assert machine.stage(0) == "asking"
    assert vote.digest == digest(outcome)
    assert identity.peer_id == other


@pytest.mark.parametrize(("signers", "is_believed"), [((0, 1), True), ((), False)])
def test_a_commit_of_others_is_believed_if_most_live_peers_are_in_it(
    signers: tuple[int, ...], is_believed: bool
) -> None:
    others = [one for one in IDS if one.peer_id != make_identity(0).peer_id]
    strangers = [make_identity(index) for index in (7, 8)]
    chosen = sorted(others if signers else strangers, key=lambda one: one.peer_id)
    machine = one_machine(1, 2)
    outcome = outcome_of(
        live=2, members=[wire.Member(peer=one.peer_id, weight=2.0, offer_id=bytes(8)) for one in chosen],
        parts=[wire.PartOutcome(
            stop_block=16, digest=bytes(32),
            contributors=[wire.Contributor(peer=one.peer_id, weight=2.0) for one in chosen],
        )],
    )  # fmt: skip
    machine.receive(certify(outcome, *chosen), chosen[0].peer_id, 1.0)
    told = [event for event in drain(machine) if isinstance(event, OutcomeWithoutBytes)]
    assert bool(told) is is_believed
    far = wire.Outcome()
    far.CopyFrom(outcome)
    far.key.round, far.state_digest = 3, bytes(32)
    machine.receive(certify(far, *chosen), chosen[0].peer_id, 2.0)
    assert bool([event for event in drain(machine) if isinstance(event, FellBehind)]) is is_believed
    machine.set_state(0, 2, bytes(32))  # nobody says it again: an offer would wait for a round that is over
    told = [event for event in drain(machine) if isinstance(event, OutcomeWithoutBytes)]
    assert [event.round for event in told] == [3] * is_believed
    machine.set_state(0, 2, DIGEST)
    assert machine.next_commit(0) is None
