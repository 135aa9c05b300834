"""Forged messages: refused with their reason, bounded in what they cost, and never an exception."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import Aborted, ReduceWanted
from p2p_co2.protocol.rounds.assembly import ReorderBuffer
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.wire import messages_pb2 as wire
from tests.certificates import signed_mean
from tests.round_machine import DIGEST, begun_key, begun_member, drain, one_machine, part_of, refusal
from tests.round_network import RUN, make_identity


def test_the_forging_tests_have_a_foreign_coordinator() -> None:
    _, _, first, _ = begun_member()
    assert first != make_identity(0).peer_id


# ---- READY and BEGIN


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300])
def test_ready_with_an_impossible_weight(weight: float) -> None:
    ready = wire.Ready(fragment=0, round=1, state_digest=DIGEST, weight=weight)
    assert refusal(one_machine(1), ready, make_identity(1).peer_id) == "impossible weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fragment": 1}, "unknown fragment"),
        ({"fragment": 2**32 - 1}, "unknown fragment"),
        ({"round": 0}, "unknown round"),
        ({"round": 2**63}, "unknown round"),
        ({"state_digest": b"short"}, "wrong digest length"),
        ({"state_digest": bytes(33)}, "wrong digest length"),
        ({"upload_bytes_per_s": math.nan}, "impossible rate"),
        ({"upload_bytes_per_s": -1.0}, "impossible rate"),
        ({"base_version": 1}, "impossible version"),
    ],
)
def test_forged_ready(change: dict[str, object], reason: str) -> None:
    fields = {"fragment": 0, "round": 1, "state_digest": DIGEST, "weight": 1.0} | change
    ready = wire.Ready(**fields)  # type: ignore[arg-type]
    assert refusal(one_machine(1), ready, make_identity(1).peer_id) == reason


def test_ready_of_a_stranger() -> None:
    ready = wire.Ready(fragment=0, round=1, state_digest=DIGEST, weight=1.0)
    assert refusal(one_machine(1), ready, make_identity(7).peer_id) == "unknown peer"


def _members(begin: wire.Begin, index: int, **change: object) -> None:
    for name, value in change.items():
        setattr(begin.members[index], name, value)


BEGIN_FORGERIES: dict[str, tuple[Callable[[wire.Begin], object], str]] = {
    "gap": (lambda b: setattr(b.parts[1], "start_block", 9), "wrong parts"),
    "overlap": (lambda b: setattr(b.parts[1], "start_block", 7), "wrong parts"),
    "too short": (lambda b: setattr(b.parts[1], "stop_block", 15), "wrong parts"),
    "too long": (lambda b: setattr(b.parts[1], "stop_block", 2**32 - 1), "wrong parts"),
    "no parts": (lambda b: b.ClearField("parts"), "wrong parts"),
    "owner outside": (lambda b: setattr(b.parts[1], "owner", "nobody"), "wrong owner"),
    "owns it all": (lambda b: setattr(b.parts[1], "owner", b.parts[0].owner), "wrong owner"),
    "owner sends nothing": (lambda b: setattr(b.parts[0], "senders", b"\0"), "wrong owner"),
    "senders outside": (lambda b: setattr(b.parts[0], "senders", b"\xff"), "wrong group"),
    "senders too long": (lambda b: setattr(b.parts[0], "senders", bytes(9)), "wrong group"),
    "live peers": (lambda b: setattr(b, "live", 99), "wrong group"),
    "no members": (lambda b: b.ClearField("members"), "wrong group"),
    "members twice": (lambda b: b.members.append(b.members[0]), "wrong group"),
    "crowd": (lambda b: b.members.extend([b.members[0]] * 100), "wrong group"),
    "NaN weight": (lambda b: _members(b, 0, weight=math.nan), "impossible weight"),
    "our weight": (lambda b: [_members(b, i, weight=3.0) for i in range(3)], "wrong group"),
    "digest": (lambda b: setattr(b, "state_digest", bytes(32)), "wrong group"),
    "digest length": (lambda b: setattr(b, "state_digest", b""), "wrong digest length"),
    "NaN time": (lambda b: setattr(b, "parts_within_s", math.nan), "impossible duration"),
    "endless": (lambda b: setattr(b, "result_within_s", 1e9), "impossible duration"),
    "negative time": (lambda b: setattr(b, "parts_within_s", -1.0), "impossible duration"),
    "attempt length": (lambda b: setattr(b.key, "attempt", bytes(17)), "wrong attempt length"),
    "round": (lambda b: setattr(b.key, "round", 5), "unknown round"),
    "another's attempt": (lambda b: setattr(b.key, "attempt", bytes(16)), "wrong attempt"),
    "no nonce": (lambda b: b.ClearField("nonce"), "wrong attempt"),
}


@pytest.mark.parametrize("name", BEGIN_FORGERIES)
def test_forged_begin(name: str) -> None:
    machine, begin, first, _ = begun_member()
    change, reason = BEGIN_FORGERIES[name]
    change(begin)
    if reason not in ("wrong attempt", "wrong attempt length"):
        seal_begin(begin, first)  # or it would be refused for that
    assert refusal(machine, begin, first) == reason
    assert not any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())


def test_begin_by_a_peer_that_was_not_asked() -> None:
    machine, begin, _, other = begun_member()
    assert refusal(machine, begin, other) == "wrong attempt"  # another's words as one's own
    seal_begin(begin, other)
    assert refusal(machine, begin, other) == "wrong sender"


@pytest.mark.parametrize(
    "change",
    [
        lambda begin: setattr(begin.parts[1], "owner", begin.parts[0].owner),
        lambda begin: setattr(begin.parts[0], "senders", b"\x07"),
        lambda begin: setattr(begin.members[2], "weight", 7.0),
        lambda begin: setattr(begin, "nonce", bytes(range(16))),
    ],
)
def test_a_coordinator_that_tells_two_begins_for_one_attempt_is_named(
    change: Callable[[wire.Begin], object],
) -> None:
    """Each member sees only the BEGIN that it was told: one of the two does not fit the attempt's id."""
    machine, begin, first, _ = begun_member()
    told = wire.Begin()
    told.CopyFrom(begin)
    change(told)
    assert told != begin
    assert refusal(machine, told, first) == "wrong attempt"
    machine.receive(begin, first, 1.0)  # the other one
    begin.parts_within_s /= 2
    machine.receive(begin, first, 1.0)  # repeated for one that missed it: less time is left
    assert refusal(machine, told, first) == "wrong attempt"


# ---- PART, MEAN, RESULT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"total": 65}, "wrong size"),
        ({"total": 2**62}, "wrong size"),
        ({"offset": 2**62}, "wrong piece"),
        ({"offset": 1}, "wrong piece"),
        ({"data": bytes(63)}, "wrong piece"),
        ({"data": b""}, "wrong piece"),
        ({"part": 1}, "wrong owner"),
        ({"part": 2}, "wrong parts"),
        ({"part": 2**32 - 1}, "wrong parts"),
        ({"generation": 99}, "wrong generation"),
        ({"key": wire.RoundKey(fragment=0, round=7, attempt=begun_key().attempt)}, ""),
        ({"key": wire.RoundKey(fragment=0, round=1, attempt=b"x" * 16)}, "unknown round"),
    ],
)
def test_forged_part(change: dict[str, object], reason: str) -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    if reason:
        assert refusal(machine, part_of(**change), other) == reason
    else:
        machine.receive(part_of(**change), other, 1.0)  # the attempt is what identifies a round


def test_a_doubled_part_is_no_offence_and_a_changed_one_is() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    machine.receive(part_of(), other, 1.0)
    machine.receive(part_of(), other, 1.0)
    assert refusal(machine, part_of(data=b"x" * 64), other) == "conflicting duplicate"
    assert refusal(machine, part_of(), make_identity(7).peer_id) == "not a member"


def test_parts_of_a_round_that_does_not_exist() -> None:
    machine = one_machine(1)
    assert refusal(machine, part_of(), make_identity(1).peer_id) == "unknown round"
    machine.set_state(0, 1, DIGEST)
    assert refusal(machine, part_of(), make_identity(1).peer_id) == "replayed round"


def test_pieces_that_overtake_begin_are_held_up_to_a_bound() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(part_of(), other, 0.2)
    machine.receive(begin, first, 0.5)
    machine.receive(part_of(), first, 0.6)
    (wanted,) = [event for event in drain(machine) if isinstance(event, ReduceWanted)]
    assert [piece.peer for piece in wanted.job.slices] == sorted(piece.peer for piece in wanted.job.slices)
    assert len(wanted.job.slices) == 3
    early = ReorderBuffer(0)
    flood = wire.Part(data=bytes(1 << 19))
    for _ in range(7):
        early.hold(flood, first)
    with pytest.raises(RemoteProtocolError, match="too much held"):
        early.hold(flood, first)
    assert sum(len(piece.data) for _, piece in early.release() if isinstance(piece, wire.Part)) <= 4 << 20


def test_forged_means_and_results() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    good = wire.Contributor(peer=other, weight=2.0)

    owner = next(identity for identity in map(make_identity, range(3)) if identity.peer_id == other)

    def mean(*contributors: wire.Contributor) -> wire.Mean:
        whole = wire.Mean(
            key=begin.key, part=1, total=64, data=bytes(64), contributors=contributors,
            missed=[wire.LATE] * (3 - len(contributors)),
        )  # fmt: skip
        whole.signature = signed_mean(whole, (8, 16), owner, RUN).signature
        return whole

    assert not machine.receive(mean(good), first, 0.6)  # nobody passes on what its owner can send
    assert refusal(machine, mean(), other) == "wrong contributors"
    assert refusal(machine, mean(wire.Contributor(peer=other, weight=99.0)), other) == "wrong contributors"
    assert refusal(machine, mean(good, good), other) == "wrong contributors"
    assert refusal(machine, mean(wire.Contributor(peer="x", weight=2.0)), other) == "wrong contributors"
    whole = mean(good)
    for reasons in ([wire.LATE], [wire.LATE] * 3, [0, 1], [1, 6]):
        whole.missed[:] = reasons  # type: ignore[assignment]
        assert refusal(machine, whole, other) == "wrong reasons"
    machine.receive(mean(good), other, 1.0)
    result = wire.Result(key=begin.key, lost=[wire.LostPart(part=7)])
    assert refusal(machine, result, other) == "wrong parts"
    result = wire.Result(key=begin.key, digest=b"short", signature=bytes(64))
    assert refusal(machine, result, other) == "wrong digest length"
    assert refusal(machine, wire.Result(key=begin.key), make_identity(7).peer_id) == "not a member"
    machine.receive(wire.Result(key=begin.key, digest=bytes(32), signature=bytes(64)), other, 1.0)
    result = wire.Result(key=begin.key, digest=b"2" * 32, signature=bytes(64))
    assert refusal(machine, result, other) == "two votes"


# ---- floods and noise


def test_a_flood_of_rounds_holds_one_gathering_per_sender() -> None:
    machine = one_machine(1, 2)
    for round_ in range(1, 2000):
        ready = wire.Ready(fragment=0, round=round_, state_digest=DIGEST, weight=1.0)
        machine.receive(ready, make_identity(1).peer_id, 1.0)
        machine.messages_to_send()
    assert len(machine._coordination._gatherings) == 1


def test_a_coordinator_that_allows_half_an_hour_keeps_nobody_for_longer_than_lines_explain() -> None:
    """Its members wait a few times as long as they would have allowed themselves: else 80 minutes here."""
    machine, begin, first, _ = begun_member()
    begin.parts_within_s, begin.result_within_s = 299.0, 1799.0
    machine.receive(begin, first, 0.5)
    now, events = 0.5, drain(machine)
    while not any(isinstance(event, Aborted) for event in events):
        due_at = machine.get_timer()
        assert due_at is not None
        now = due_at
        machine.handle_timer(now)
        events += drain(machine)
    assert now < 360.0


def test_what_a_round_may_take_is_reckoned_for_nobody_who_was_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs twice what reading a BEGIN does, and whoever likes may send one."""
    machine, begin, _, other = begun_member()
    reckoned: list[object] = []
    monkeypatch.setattr(machine._coordination, "clamped", lambda attempt: reckoned.append(attempt) or attempt)
    seal_begin(begin, other)
    with pytest.raises(RemoteProtocolError, match="not asked"):
        machine.receive(begin, other, 0.5)
    del begin.members[:], begin.parts[:]
    begin.members.add(peer=other, weight=1.0)
    begin.parts.add(owner=other, start_block=0, stop_block=16)
    begin.live = 1
    seal_begin(begin, other)
    machine.receive(begin, other, 0.5)
    assert not reckoned


def fill(message: Message, chance: random.Random, strings: list[str], blobs: list[bytes]) -> None:
    """Fill a message with values that are impossible, extreme, or nearly right."""
    numbers = [0, 1, 2, 8, 16, 64, 2**31, 2**32 - 1]
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.1:
            continue
        for _ in range(chance.choice([1, 1, 2, 3]) if field.is_repeated else 1):
            if field.message_type is not None:
                inner = getattr(message, field.name)
                fill(inner.add() if field.is_repeated else inner, chance, strings, blobs)
                continue
            value: object = {
                field.CPPTYPE_UINT32: chance.choice(numbers),
                field.CPPTYPE_UINT64: chance.choice([*numbers, 2**63]),
                field.CPPTYPE_DOUBLE: chance.choice([0.0, 1.0, 2.0, 5.0, -1.0, math.nan, math.inf, 1e300]),
                field.CPPTYPE_ENUM: chance.choice([0, 1, 5, 6, 2**31 - 1]),
                field.CPPTYPE_BOOL: chance.random() < 0.5,
                field.CPPTYPE_STRING: chance.choice(blobs if field.type == field.TYPE_BYTES else strings),
            }[field.cpp_type]
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)


HEARD: list[type[Message]] = [
    wire.Ready, wire.Waiting, wire.Begin, wire.Part, wire.Mean, wire.Result, wire.Decision,
    wire.AskOutcome, wire.Behind,
]  # fmt: skip


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_arbitrary_messages_never_break_the_machine(seed: int) -> None:
    chance = random.Random(seed)
    machine, begin, first, other = begun_member()
    if chance.random() < 0.7:
        machine.receive(begin, first, 0.5)
    strings = [first, other, make_identity(0).peer_id, "", "nobody", "x" * 1000]
    reasons: list[str] = []
    blobs = [begin.key.attempt, DIGEST, RUN, bytes(64), b"", b"short"]
    for step in range(30):
        message = chance.choice(HEARD)()
        fill(message, chance, strings, blobs)
        try:
            machine.receive(message, chance.choice([first, other]), 1.0 + step)
        except RemoteProtocolError as error:
            reasons.append(error.reason)
        for event in drain(machine):
            if isinstance(event, ReduceWanted):
                size = 8 * (event.job.stop_block - event.job.start_block)
                machine.reduced(event.job, bytes(size), 1.0 + step)
        timer_at = machine.get_timer()
        if timer_at is not None and timer_at <= 1.0 + step:
            machine.handle_timer(1.0 + step)
    assert all(reasons)
