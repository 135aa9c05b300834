"""Decisions: what is announced of them, which are refused, and what follows from those that hold."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.rounds import (
    ANNOUNCEMENT_CONTEXT,
    DECISION_CONTEXT,
    Committed,
    Distrusted,
    Doubted,
    FellBehind,
    Offer,
    OutcomeWithoutBytes,
    ReduceWanted,
    announcement,
    open_decision,
)
from p2p_co2.protocol.rounds import bounds as limits
from p2p_co2.protocol.rounds.decision import Verdicts, sign_outcome
from p2p_co2.protocol.rounds.derived import OUTCOMES_KEPT, Derived
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import verify
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from tests.round_machine import DIGEST, SHAPE, begun_member, drain, offer_of, one_machine, refusal
from tests.round_network import RUN, make_identity

# ---- announced in short


def test_an_announcement_is_a_decision_in_short() -> None:
    machine = one_machine()
    machine.offer(offer_of(), 10.0)
    wanted = drain(machine)[1]
    assert isinstance(wanted, ReduceWanted)
    machine.reduced(wanted.job, bytes(128), 10.5)
    (committed,) = drain(machine)
    assert isinstance(committed, Committed)
    decision = wire.Decision.FromString(committed.decision)
    short = wire.Decision.FromString(announcement(decision, make_identity(0)))
    said, full = wire.Outcome.FromString(short.outcome), wire.Outcome.FromString(decision.outcome)
    verify(said.decided_by, ANNOUNCEMENT_CONTEXT, short.outcome, short.signature)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        open_decision(short, RUN, SHAPE)  # it is not taken for a decision
    assert said.committed
    assert (said.key, said.run, said.state_digest) == (full.key, RUN, DIGEST)
    assert [(p.start_block, p.stop_block, p.digest) for p in said.parts] == [
        (p.start_block, p.stop_block, p.digest) for p in full.parts
    ]
    assert not said.members
    assert not any(part.contributors for part in said.parts)
    with pytest.raises(LocalProtocolError, match="decided by"):
        announcement(decision, make_identity(1))


def test_what_is_derived_of_an_outcome_is_worked_out_once_and_bounded() -> None:
    asked: list[int] = []

    def round_of(outcome: wire.Outcome) -> int:
        asked.append(outcome.key.round)
        return outcome.key.round

    derived = Derived(round_of)
    outcomes = [wire.Outcome(key=wire.RoundKey(round=number)) for number in range(OUTCOMES_KEPT + 1)]
    for _ in range(2):
        assert [derived(outcome) for outcome in outcomes[:-1]] == list(range(OUTCOMES_KEPT))
    assert asked == list(range(OUTCOMES_KEPT))
    for outcome in (outcomes[-1], outcomes[0]):  # the oldest had to go
        assert derived(outcome) == outcome.key.round
    assert asked[OUTCOMES_KEPT:] == [OUTCOMES_KEPT, 0]


def test_peers_of_one_process_may_derive_from_a_thread_each() -> None:
    derived, often, switches_s = Derived(lambda outcome: outcome.key.round), 20_000, sys.getswitchinterval()

    def ask() -> int:
        return sum(
            derived(wire.Outcome(key=wire.RoundKey(round=round_))) == round_ for round_ in range(often)
        )

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert [asked.result() for asked in [threads.submit(ask) for _ in range(4)]] == [often] * 4
    finally:
        sys.setswitchinterval(switches_s)


@pytest.mark.parametrize("committed", [True, False])
def test_the_largest_group_is_announced_in_4_kib(committed: bool) -> None:
    names = sorted(make_identity(i).peer_id for i in range(MAX_MEMBERS))
    contributors = [wire.Contributor(peer=name, weight=2.0) for name in names]
    step = 2**32 // MAX_MEMBERS
    outcome = wire.Outcome(
        key=wire.RoundKey(fragment=255, round=limits.MAX_ROUND, attempt=bytes(16)),
        run=RUN,
        committed=committed,
        reason="\N{SNOWMAN}" * 512,
        state_digest=DIGEST,
        members=[wire.Member(peer=name, weight=2.0) for name in names],
        parts=[
            wire.PartOutcome(
                start_block=i * step, stop_block=(i + 1) * step - 1, generation=11, digest=DIGEST,
                contributors=contributors,
            )
            for i in range(MAX_MEMBERS)
        ],
    )  # fmt: skip
    decision = sign_outcome(make_identity(0), outcome)
    assert decision.ByteSize() > 200_000
    assert len(announcement(decision, make_identity(0))) < 4096 - 256  # with room for the publisher's seal


# ---- forged, repeated, out of order


def signed(signer: int, **change: object) -> wire.Decision:
    """A commit of round 1 by peers 0, 1 and 2, signed by peer ``signer``."""
    names = sorted(make_identity(i).peer_id for i in range(3))
    identity = make_identity(signer)
    contributors = [wire.Contributor(peer=name, weight=2.0) for name in names]
    fields: dict[str, object] = {
        "key": wire.RoundKey(fragment=0, round=1, attempt=b"y" * 16),
        "run": RUN,
        "committed": True,
        "decided_by": identity.peer_id,
        "state_digest": DIGEST,
        "members": [wire.Member(peer=name, weight=2.0) for name in names],
        "parts": [
            wire.PartOutcome(start_block=0, stop_block=16, digest=bytes(32), contributors=contributors)
        ],
    }
    outcome = wire.Outcome(**(fields | change)).SerializeToString()  # type: ignore[arg-type]
    return wire.Decision(outcome=outcome, signature=identity.sign(DECISION_CONTEXT, outcome))


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (signed(1, decided_by=make_identity(2).peer_id), "wrong signature"),
        (signed(1, decided_by="nobody"), "bad peer id"),
        (signed(1, run=bytes(32)), "wrong run"),
        (signed(7), "wrong signer"),
        (signed(1, state_digest=b""), "wrong digest length"),
        (signed(1, parts=[]), "wrong parts"),
        (signed(1, parts=[wire.PartOutcome(start_block=0, stop_block=16)]), "wrong digest length"),
        (signed(1, members=[]), "wrong group"),
        (signed(1, key=wire.RoundKey(fragment=9, round=1, attempt=bytes(16))), "unknown fragment"),
        (signed(1, reason="x" * 10_000, committed=False), "too large"),
        (wire.Decision(outcome=b"\xff\xff", signature=b""), "unreadable"),
        (wire.Decision(outcome=bytes(2 << 20), signature=b""), "too large"),
    ],
)
def test_forged_decisions(decision: wire.Decision, reason: str) -> None:
    assert refusal(one_machine(1, 2), decision, make_identity(1).peer_id) == reason


def test_a_second_decision_must_say_the_same() -> None:
    machine = one_machine(1, 2)
    sender = make_identity(1).peer_id
    machine.receive(signed(1), sender, 1.0)
    (event,) = drain(machine)
    assert isinstance(event, OutcomeWithoutBytes)
    machine.receive(signed(2), sender, 1.0)  # a successor that repeats the verdict
    other = signed(2, key=wire.RoundKey(fragment=0, round=1, attempt=b"z" * 16))
    assert refusal(machine, other, sender) == "conflicting decision"
    assert drain(machine) == []
    machine.forget_outcome(0, 1)
    (news,) = drain(machine)
    assert isinstance(news, Distrusted)
    assert news.peer == sender
    machine.receive(signed(1), sender, 2.0)  # nobody had its bytes: once is enough
    assert drain(machine) == []
    machine.receive(other, sender, 2.0)
    assert len(drain(machine)) == 1


def test_commits_that_follow_one_another_are_replayed_in_order() -> None:
    machine = one_machine(1, 2)
    after_one, after_two = hashlib.sha256(b"1").digest(), hashlib.sha256(b"2").digest()
    second = signed(1, key=wire.RoundKey(fragment=0, round=2, attempt=b"b" * 16), state_digest=after_one)
    for decision in (signed(1), second):
        machine.receive(decision, make_identity(1).peer_id, 1.0)
    assert [event.round for event in drain(machine) if isinstance(event, OutcomeWithoutBytes)] == [1, 2]
    machine.set_state(0, 1, after_one)
    assert [event.round for event in drain(machine) if isinstance(event, OutcomeWithoutBytes)] == [2]
    machine.set_state(0, 2, after_two)
    assert drain(machine) == []
    machine.set_state(0, 1, after_two)  # another history: its commits do not follow our state
    assert drain(machine) == []
    machine.offer(Offer(0, 2, 1, after_two, bytes(128), 1.0), 2.0)
    assert drain(machine) == []


def test_a_decision_far_ahead_says_that_we_fell_behind_once() -> None:
    machine = one_machine(1, 2)
    for round_ in (9, 5, 5, 5):  # most are said to be at version 0: nobody honest is at 8
        far = signed(1, key=wire.RoundKey(fragment=0, round=round_, attempt=b"z" * 16))
        machine.receive(far, make_identity(1).peer_id, 1.0)
    (event,) = drain(machine)
    assert isinstance(event, FellBehind)
    assert event.version == 4
    assert not event.ends_offer


def test_a_foreign_commit_waits_until_our_attempt_has_failed() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    machine.receive(signed(2), make_identity(2).peer_id, 1.0)
    assert not [event for event in drain(machine) if isinstance(event, OutcomeWithoutBytes)]
    abort = wire.Outcome(
        key=begin.key, run=RUN, reason="no", decided_by=first, state_digest=DIGEST, members=begin.members
    ).SerializeToString()
    signer = next(make_identity(i) for i in range(3) if make_identity(i).peer_id == first)
    machine.receive(wire.Decision(outcome=abort, signature=signer.sign(DECISION_CONTEXT, abort)), other, 2.0)
    doubt, event = drain(machine)
    assert doubt == Doubted(0)  # nobody can say that ours has not committed as well
    assert isinstance(event, OutcomeWithoutBytes)
    assert event.ends_offer


def test_however_many_listen_in_one_attempt_the_others_are_remembered() -> None:
    """What may be counted in one of them is doubted when another commits."""
    verdicts = Verdicts()
    verdicts.join(1, b"first", 1.0)
    for _ in range(2 * limits.KEEP_ATTEMPTS):
        verdicts.join(1, b"second", 2.0)
    committed = wire.Outcome(key=wire.RoundKey(round=1, attempt=b"second"))
    assert verdicts.was_elsewhere(committed)
