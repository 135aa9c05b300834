"""The rounds machine: by hand, against a reference, as laws, and under every fault that a network and a peer
can have."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from statistics import median

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.rounds import (
    ANNOUNCEMENT_CONTEXT,
    DECISION_CONTEXT,
    Aborted,
    Began,
    Committed,
    FellBehind,
    Offer,
    OutcomeWithoutBytes,
    PayloadShape,
    PeerView,
    ReduceJob,
    ReduceWanted,
    Refused,
    Rounds,
    announcement,
    open_decision,
)
from p2p_co2.rounds import bounds as limits
from p2p_co2.rounds.assembly import Assembly, pieces
from p2p_co2.rounds.attempt import Attempt, Share
from p2p_co2.rounds.deadline import Durations, ReadyHistory, adaptive_deadline_s, parts_deadline_s
from p2p_co2.rounds.decision import content_of, sign_outcome
from p2p_co2.rounds.early import EarlyPieces
from p2p_co2.rounds.parts import BlockRange, covers, split_blocks
from p2p_co2.rounds.swarm import coordination_order, named
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId, verify
from p2p_co2.wire.limits import MAX_DATA_BYTES, MAX_MEMBERS
from tests.round_network import RUN, Faults, Network, make_identity

DIGEST = hashlib.sha256(b"start").digest()
SHAPE = PayloadShape(8, (16,))


def coordinator_of(net: Network, round_: int = 1) -> PeerId:
    return coordination_order(net.names, 0, round_)[0]


def one_machine(*others: int) -> Rounds:
    """Peer 0 with the given live others, at version 0."""
    machine = Rounds(make_identity(0), RUN, SHAPE, 32)
    machine.set_state(0, 0, DIGEST)
    machine.set_peers({make_identity(i).peer_id: PeerView(1e6) for i in others}, 0.0)
    return machine


def offer_of(round_: int = 1, weight: float = 2.0, payload: bytes = bytes(range(128))) -> Offer:
    return Offer(0, round_, round_ - 1, DIGEST, payload, weight)


def drain(machine: Rounds) -> list[object]:
    events: list[object] = []
    while (event := machine.next_event()) is not None:
        events.append(event)
    return events


# ---- by hand


def test_one_peer_alone_commits_at_once() -> None:
    machine = one_machine()
    machine.offer(offer_of(), 10.0)
    began, wanted = drain(machine)
    assert isinstance(began, Began)
    assert isinstance(wanted, ReduceWanted)
    me = make_identity(0).peer_id
    assert [tuple(piece) for piece in wanted.job.slices] == [(me, 2.0, bytes(range(128)))]
    machine.reduced(wanted.job, bytes(128), 10.5)
    (committed,) = drain(machine)
    assert isinstance(committed, Committed)
    assert committed.mean == bytes(128)
    assert committed.duration_s == 0.5
    assert committed.contributed == (True,)
    assert committed.parts[0] == (0, 16, ((me, 2.0),))
    assert machine.messages_to_send() == []
    assert machine.get_timer() is None


def test_three_peers_agree_on_what_was_computed_by_hand() -> None:
    net = Network(3)
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert len(committed) == 3
    expected = bytes(
        sum(int(net.weight(name)) * net.payload(name)[i] for name in net.names) % 256 for i in range(128)
    )
    assert {event.mean for event in committed.values()} == {expected}
    assert not net.refused
    assert all(event.group == tuple(net.names) for event in committed.values())


def test_a_healthy_round_sends_each_slice_and_each_mean_once() -> None:
    net = Network(5)
    net.offer_all()
    net.run_until_settled()
    kinds = Counter(type(message).__name__ for _, _, message in net.sent)
    assert kinds == {"Ready": 4, "Waiting": 4, "Begin": 4, "Part": 20, "Mean": 20, "Result": 4, "Decision": 4}


def test_large_payloads_travel_in_pieces() -> None:
    shape = PayloadShape(1000, (2000,))  # 2 MB: each of two parts is two pieces
    net = Network(2, shape=shape)
    net.offer_all()
    net.run_until_settled()
    assert len(net.committed()) == 2
    pieces_sent = [m for _, _, m in net.sent if isinstance(m, wire.Part)]
    assert len(pieces_sent) == 4
    assert max(len(m.data) for m in pieces_sent) == MAX_DATA_BYTES
    assert len({event.mean for event in net.committed().values()}) == 1


def test_parts_follow_the_upload_rates() -> None:
    assert split_blocks(10, [1.0, 3.0, 1.0]) == ((0, 2), (2, 8), (8, 10))
    assert split_blocks(9, [0.0, 0.0, 0.0]) == ((0, 3), (3, 6), (6, 9))
    assert split_blocks(6, [2.0, 0.0, 4.0]) == ((0, 1), (1, 3), (3, 6))  # unknown counts as 3
    assert split_blocks(1, [1.0, 1.0, 1.0])[-1].stop == 1
    assert split_blocks(180, [1.0, 1.0, 1e300]) == ((0, 10), (10, 20), (20, 180))  # a boast counts as 16


def test_ready_carries_our_own_upload_rate() -> None:
    me, other = make_identity(0).peer_id, make_identity(1).peer_id
    names = sorted((me, other))
    round_ = next(n for n in range(1, 100) if coordination_order(names, 0, n)[0] == other)
    machine = one_machine()
    machine.set_state(0, round_ - 1, DIGEST)
    machine.set_peers({me: PeerView(3e6), other: PeerView(1e6)}, 0.0)
    machine.offer(offer_of(round_), 0.0)
    ((to, ready),) = machine.messages_to_send()
    assert to == other
    assert isinstance(ready, wire.Ready)
    assert ready.upload_bytes_per_s == 3e6


def test_parts_of_begin_follow_the_measured_rates_of_all_members_the_coordinator_too() -> None:
    net = Network(3)
    order = coordination_order(net.names, 0, 1)
    net.uploads = dict(zip(order, [4e6, 2e6, 2e6], strict=True))
    net.tell_everybody()
    net.offer_all()
    net.run_until_settled()
    begin = next(message for _, _, message in net.sent if isinstance(message, wire.Begin))
    blocks = {part.owner: part.stop_block - part.start_block for part in begin.parts}
    assert blocks == dict(zip(order, [8, 4, 4], strict=True))


def test_long_lists_of_peers_are_named_in_short() -> None:
    assert named([]) == ""
    assert named(["peer-000001", "peer-000002"]) == "000001, 000002"
    assert named([f"peer-{i:06}" for i in range(7)]) == "000000, 000001, 000002, 000003, 000004 and 2 more"


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


def test_deadline_is_median_and_spread_between_floor_and_cap() -> None:
    assert adaptive_deadline_s((), 10.0, 0.3, 30.0) == 10.0
    assert adaptive_deadline_s((1.0, 2.0, 3.0), 10.0, 0.3, 30.0) == 6.0  # 2 + 4 * 1
    assert adaptive_deadline_s((4.0, 4.0, 4.0), 10.0, 0.3, 30.0) == 5.0  # no spread: a quarter
    assert adaptive_deadline_s((0.01,), 10.0, 0.3, 30.0) == 0.3
    assert adaptive_deadline_s((100.0,), 10.0, 0.3, 30.0) == 30.0


def test_ready_deadline_learns_from_late_arrivals() -> None:
    history = ReadyHistory()
    assert history.deadline_s(1) == limits.GATHER_DEFAULT_S
    for round_ in range(1, 6):
        history.arrived(round_, 100.0 * round_)
        history.arrived(round_, 100.0 * round_ + 8.0)  # after BEGIN, perhaps: measured all the same
    assert history.deadline_s(6) == 10.0
    for round_ in range(6, 40):
        history.arrived(round_, 100.0 * round_)
        history.arrived(round_, 100.0 * round_ + 0.1)
    assert history.deadline_s(40) == limits.GATHER_FLOOR_S


def test_parts_deadline_uses_the_slowest_credible_rate() -> None:
    assert parts_deadline_s(1_000_000, [1e5, 1e6], Durations()) == 40.0
    assert parts_deadline_s(1000, [1e6], Durations()) == limits.PARTS_FLOOR_S
    assert (
        parts_deadline_s(1_000_000, [1.0, 1e6, 1e6], Durations()) == 64.0
    )  # the claim of 1 byte/s counts as 1/16
    slow = Durations()
    slow.add(8.0)
    assert parts_deadline_s(1_000_000, [1e6], slow) == 10.0
    slow.add(1000.0)
    assert parts_deadline_s(1_000_000, [1e6], slow) == 16.0


# ---- against a reference


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_deadline_against_the_statistics_module(samples: list[float]) -> None:
    middle = median(samples)
    mad = median([abs(sample - middle) for sample in samples])
    expected = min(max(middle + max(4 * mad, middle / 4), 0.3), 30.0)
    assert adaptive_deadline_s(samples, 10.0, 0.3, 30.0) == pytest.approx(expected)


def test_every_peer_computes_the_same_order_and_the_load_spreads() -> None:
    names = [make_identity(i).peer_id for i in range(5)]
    shuffled = random.Random(1).sample(names, 5)
    first = Counter()
    for round_ in range(500):
        order = coordination_order(names, 3, round_)
        assert order == coordination_order(shuffled, 3, round_)
        first[order[0]] += 1
    assert min(first.values()) > 60


# ---- laws


@given(st.integers(1, 500), st.lists(st.floats(0, 1e15), min_size=1, max_size=64))
def test_the_parts_are_the_whole(blocks: int, rates: list[float]) -> None:
    ranges = split_blocks(blocks, rates)
    assert len(ranges) == len(rates)
    assert covers([part for part in ranges if part.stop > part.start], blocks)


@given(st.integers(0, 2**32), st.integers(1, 3 * MAX_DATA_BYTES))
@settings(max_examples=20, deadline=None)
def test_pieces_come_together_in_any_order(seed: int, size: int) -> None:
    shuffle = random.Random(seed)
    data = shuffle.randbytes(size)
    sent = list(pieces(memoryview(data))) * 2
    shuffle.shuffle(sent)
    assembly = Assembly(size)
    completions = [assembly.add(offset, size, piece) for offset, piece in sent]
    assert assembly.whole == data
    assert sum(completions) == 1


@given(st.integers(1, 9), st.data())
def test_two_quorums_share_a_member(count: int, data: st.DataObject) -> None:
    names = [PeerId(str(i)) for i in range(count)]
    coordinator = data.draw(st.sampled_from([*names, PeerId("outside")]))
    attempt = Attempt(
        0, 1, bytes(16), {name: Share(1.0, 0) for name in names}, (BlockRange(0, 1),), (names[0],), DIGEST,
        coordinator, 1.0, 1.0,
    )  # fmt: skip
    one = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    other = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    if attempt.is_quorum(one) and attempt.is_quorum(other):
        assert one & other


@pytest.mark.parametrize("others", range(5))
def test_an_offer_ends_though_nobody_ever_answers(others: int) -> None:
    machine = one_machine(*range(1, others + 1))
    machine.offer(offer_of(), 0.0)
    endings, now, firings = [], 0.0, 0
    while not endings:
        for event in drain(machine):
            if isinstance(event, ReduceWanted):
                machine.reduced(event.job, bytes(128), now)
            elif isinstance(event, Committed | Aborted):
                endings.append(event)
        machine.messages_to_send()
        timer_at = machine.get_timer()
        if timer_at is not None:
            now = timer_at
            machine.handle_timer(now)
            firings += 1
    assert firings < 50
    assert now < 200
    assert machine.get_timer() is None


@pytest.mark.parametrize("seed", range(40))
def test_nobody_is_stuck_when_all_links_are_cut_at_any_moment(seed: int) -> None:
    net = Network(4, seed, Faults(latency_s=(0.01, 0.3)))
    net.offer_all()
    cut_at = net.now + net.random.uniform(0, 2.0)
    net.on_send = lambda source, to, message: net.now < cut_at
    net.run_until_settled()
    assert net.undecided() == []
    net.check_agreement()


@pytest.mark.parametrize("loss", [0.0, 0.03, 0.15, 0.35])
def test_agreement_under_loss_duplication_and_reordering(loss: float) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(50):
        net = Network(5, seed, Faults(loss, 0.2, (0.01, 0.4)))
        net.offer_all()
        net.run_until_settled()
        assert net.undecided() == [], seed
        net.check_agreement()
        outcomes.update(type(event).__name__ for event in net.endings().values())
        if loss == 0:
            assert net.refused == []
    if loss == 0:
        assert outcomes == {"Committed": 250}
    if loss == 0.03:
        assert outcomes["Aborted"] <= 10


def test_a_peer_that_could_not_get_the_bytes_is_told_who_has_them() -> None:
    net = Network(4)
    unlucky = coordination_order(net.names, 0, 1)[-1]
    net.on_send = lambda source, to, message: not (isinstance(message, wire.Mean) and to == unlucky)
    net.offer_all()
    net.run_until_settled()
    ending = net.endings()[unlucky]
    assert isinstance(ending, OutcomeWithoutBytes)
    assert ending.ends_offer
    assert len(net.committed()) == 3
    outcome = open_decision(wire.Decision.FromString(ending.decision), RUN, net.shape)
    assert hashlib.sha256(net.committed()[ending.donors[0]].mean[:32]).digest() == outcome.parts[0].digest


# ---- faults: crashes in every phase


def crash_when(
    net: Network, victim: PeerId, kind: type[Message], skip: int, sender: PeerId | None = None
) -> None:
    """``victim`` dies when ``sender`` (itself) is about to send its message number ``skip`` of a kind."""
    count = 0

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        nonlocal count
        if isinstance(message, kind) and source == (sender or victim) and net.peers[victim].alive:
            count += 1
            if count > skip:
                net.crash(victim)
                return source != victim
        return True

    net.on_send = on_send


def crash_before_ready(net: Network, victim: PeerId) -> None:
    net.planned.discard(victim)
    net.crash(victim)


def crash_at_reduce(net: Network, victim: PeerId) -> None:
    def on_reduce(peer: PeerId, job: ReduceJob) -> bool:
        if peer == victim:
            net.crash(victim)
        return peer != victim

    net.on_reduce = on_reduce


PHASES: dict[str, Callable[[Network, PeerId], None]] = {
    "before READY": crash_before_ready,
    "at READY": lambda net, victim: crash_when(net, victim, wire.Ready, 0),
    "after the first receipt": lambda net, victim: crash_when(net, victim, wire.Waiting, 1),
    "half of BEGIN": lambda net, victim: crash_when(net, victim, wire.Begin, 2),
    "before PARTS": lambda net, victim: crash_when(net, victim, wire.Part, 0),
    "half of PARTS": lambda net, victim: crash_when(net, victim, wire.Part, 2),
    "before MEAN": crash_at_reduce,
    "half of MEAN": lambda net, victim: crash_when(net, victim, wire.Mean, 2),
    "after MEAN": lambda net, victim: crash_when(
        net, victim, wire.Result, 0, coordination_order(net.names, 0, 1)[3]
    ),
    "before RESULT": lambda net, victim: crash_when(net, victim, wire.Result, 0),
    "before COMMIT": lambda net, victim: crash_when(net, victim, wire.Decision, 0),
    "COMMIT to one peer": lambda net, victim: crash_when(net, victim, wire.Decision, 1),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ["coordinator", "successor", "last"])
def test_a_crash_in_any_phase_leaves_nobody_behind(phase: str, role: str) -> None:
    for seed in range(8):
        for detect_s in (1.0, 100.0):  # membership may be quicker or slower than the rounds' own timers
            net = Network(5, seed, Faults(latency_s=(0.01, 0.1)))
            net.detect_s = detect_s
            order = coordination_order(net.names, 0, 1)
            victim = order[{"coordinator": 0, "successor": 1, "last": -1}[role]]
            net.offer_all()
            PHASES[phase](net, victim)
            net.run_until_settled()
            assert net.undecided() == []
            net.check_agreement()
            contents = {event.mean for name, event in net.committed().items()}
            assert len(contents) <= 1
            commits = [e for n, e in net.endings().items() if not isinstance(e, Aborted)]
            if detect_s == 1.0 and phase not in {"half of BEGIN"}:
                assert len(commits) >= 4, [getattr(e, "reason", "") for e in net.endings().values()]


@pytest.mark.parametrize("seed", range(60))
def test_two_crashes_at_random_moments(seed: int) -> None:
    net = Network(6, seed, Faults(0.02, 0.1, (0.01, 0.3)))
    net.offer_all()
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(0, 4.0), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run_until_settled()
    assert net.undecided() == []
    net.check_agreement()


@pytest.mark.parametrize("seed", range(12))
def test_a_long_run_under_faults_keeps_one_state(seed: int) -> None:
    """Rounds follow one another while messages are lost and peers crash; whoever holds a version holds the
    same."""
    net = Network(5, seed, Faults(0.03, 0.1, (0.01, 0.3)))
    net.keep_offering(period_s=5.0)
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(20, 80), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run(200.0)
    versions = [peer.version for peer in net.peers.values() if peer.alive]
    assert max(versions) >= 25
    assert max(versions) - min(versions) <= 2
    for round_ in range(1, max(versions) + 1):
        net.check_agreement(round_)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_peers_that_crash_and_come_back_end_with_the_others(count: int, seed: int) -> None:
    """Even if so many die that a minority goes on alone, all who are back end with one history."""
    net = Network(count, seed, Faults(0.02, 0.1, (0.01, 0.4)))
    net.keep_offering(period_s=5.0)
    for _ in range(4):
        victim, delay_s = net.random.choice(net.names), net.random.uniform(5, 100)
        net.at(net.now + delay_s, lambda victim=victim: net.crash(victim))  # type: ignore[misc]
        back_at = net.now + delay_s + net.random.uniform(1, 40)
        net.at(back_at, lambda victim=victim: net.restart(victim, 5.0))  # type: ignore[misc]
    net.run(200.0)
    net.faults = Faults()
    net.stop_offering()
    net.run(100.0)
    states = {peer.states[0] for peer in net.peers.values()}
    assert len({version for version, _ in states}) == len(states), "two histories at one version"
    assert max(version for version, _ in states) - min(version for version, _ in states) <= 1
    assert max(version for version, _ in states) >= 20


@pytest.mark.parametrize("seed", range(60))
def test_false_suspicions_never_commit_two_contents_of_one_attempt(seed: int) -> None:
    """Membership is wrong again and again, differently at every peer, while two peers really die."""
    net = Network(5, seed, Faults(0.05, 0.2, (0.01, 0.5)))
    net.offer_all()
    for _ in range(12):
        name = net.random.choice(net.names)
        net.at(net.now + net.random.uniform(0, 8), lambda name=name: net.mislead(name, 0.25))  # type: ignore[misc]
    for victim in net.random.sample(net.names, 2):
        net.at(net.now + net.random.uniform(0, 6), lambda victim=victim: net.crash(victim))  # type: ignore[misc]
    net.run_until_settled()
    net.run(60.0)
    assert net.undecided() == []
    contents: dict[bytes, set[bytes]] = {}
    for _, event in net.events:
        if isinstance(event, Committed | OutcomeWithoutBytes):
            outcome = open_decision(wire.Decision.FromString(event.decision), RUN, net.shape)
            contents.setdefault(outcome.key.attempt, set()).add(content_of(outcome))
    assert all(len(said) == 1 for said in contents.values())


def test_a_group_is_no_larger_than_its_size_and_the_others_learn_the_outcome() -> None:
    net = Network(4, group_size=2)
    net.offer_all()
    net.run_until_settled()
    assert len(net.committed()) == 2
    assert len([e for e in net.endings().values() if isinstance(e, OutcomeWithoutBytes)]) == 2


# ---- faults: slow, absent, behind


def test_a_slow_member_is_left_out_and_the_rest_commits() -> None:
    net = Network(4)
    slow = coordination_order(net.names, 0, 1)[2]
    net.on_send = lambda source, to, message: not (isinstance(message, wire.Part) and source == slow)
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert len(committed) == 4
    event = committed[slow]
    assert event.contributed.count(True) == 1  # only in the part that it owns
    assert all(len(part.contributors) >= 3 for part in event.parts)


def test_a_minority_does_not_begin_and_the_reason_says_who_was_missing() -> None:
    net = Network(4)
    lonely = coordinator_of(net)
    net.offer(lonely)
    net.run_until_settled()
    ending = net.endings()[lonely]
    assert isinstance(ending, Aborted)
    assert ending.reason.startswith("only 1 of 4 live peers were ready within 30.0 s (missing ")


def test_seventy_live_peers_of_which_one_is_ready() -> None:
    me = make_identity(0).peer_id
    names = sorted(make_identity(i).peer_id for i in range(70))
    round_ = next(n for n in range(1, 1000) if coordination_order(names, 0, n)[0] == me)
    machine = one_machine(*range(1, 70))
    machine.set_state(0, round_ - 1, DIGEST)
    machine.offer(offer_of(round_), 0.0)  # we coordinate, and hear our own outcome
    machine.handle_timer(limits.GATHER_CAP_S + 0.1)
    machine.handle_timer(limits.GATHER_CAP_S + 0.1)
    (event,) = [event for event in drain(machine) if isinstance(event, Aborted)]
    assert event.reason.startswith("only 1 of 70 live peers were ready")
    assert event.reason.endswith(" and 64 more)")


def test_a_large_group_that_falls_silent_has_a_short_reason() -> None:
    net = Network(40, shape=PayloadShape(8, (80,)), group_size=64)
    coordinator = coordinator_of(net)
    net.on_send = lambda source, to, message: not isinstance(message, wire.Result)
    net.offer_all()
    net.run(200.0)
    decisions = [message for source, _, message in net.sent if source == coordinator]
    outcome = next(
        open_decision(message, RUN, net.shape) for message in decisions if isinstance(message, wire.Decision)
    )
    assert not outcome.committed
    assert "no RESULT from" in outcome.reason
    assert outcome.reason.endswith(" and 34 more")
    assert len(outcome.reason) <= limits.MAX_REASON


def test_of_an_even_split_only_one_half_begins() -> None:
    net = Network(4)
    order = coordination_order(net.names, 0, 1)
    halves = [set(order[:2]), set(order[2:])]
    net.on_send = lambda source, to, message: any({source, to} <= half for half in halves)
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert set(committed) == halves[0]
    assert net.undecided() == []


def test_the_digest_minority_is_told_to_catch_up() -> None:
    net = Network(4)
    other = hashlib.sha256(b"another state").digest()
    drifted = coordination_order(net.names, 0, 1)[-1]
    net.set_state(drifted, 0, 0, other)
    for name in net.names:
        net.offer(name)
    net.run(5.0)
    (behind,) = [event for name, event in net.events if isinstance(event, FellBehind)]
    assert behind.version == 0
    assert behind.digest == DIGEST
    assert set(behind.donors) == set(net.names) - {drifted}
    assert behind.ends_offer
    assert len(net.committed()) == 3


def test_behind_that_names_our_own_state_is_refused_and_the_offer_goes_on() -> None:
    machine, begin, first, _ = begun_member()
    donors = [make_identity(1).peer_id]
    behind = wire.Behind(fragment=0, round=1, version=0, state_digest=DIGEST, donors=donors)
    assert refusal(machine, behind, first) == "impossible version"
    assert drain(machine) == []
    machine.receive(begin, first, 1.0)  # the offer is still open
    assert any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())


def test_three_histories_without_a_majority_become_one() -> None:
    net = Network(3)
    for name in net.names[1:]:
        net.set_state(name, 0, 0, hashlib.sha256(name.encode()).digest())
    net.keep_offering(period_s=1.0)
    net.run(60.0)
    assert len({peer.states[0] for peer in net.peers.values()}) == 1
    assert net.peers[net.names[0]].version >= 10


def test_a_peer_known_to_be_behind_is_not_waited_for_but_counts() -> None:
    net = Network(3)
    net.offer_all()
    net.run_until_settled()
    net.run(1.0)
    stale = coordination_order(net.names, 0, 2)[-1]
    live = {name: PeerView(1e6, True, (1 if name != stale else 0,)) for name in net.names}
    newcomer = make_identity(9).peer_id
    live[newcomer] = PeerView(1e6, True, (0,))
    for name in net.names:
        net.peers[name].machine.set_peers(live, net.now)
    for name in net.names:
        net.offer(name, 2)
    net.run_until_settled()
    net.run(2.0)
    began = [event for _, event in net.events if isinstance(event, Began) and event.round == 2]
    assert began[0].waited_s < 0.5  # the newcomer was not waited for
    assert set(began[0].group) == set(net.names)  # the one whose status is merely old was
    assert len(net.committed(2)) == 3


def test_a_late_ready_is_answered_with_the_decision() -> None:
    net = Network(4)
    late = coordination_order(net.names, 0, 1)[-1]
    for name in net.names:
        if name != late:
            net.offer(name)
    net.on_send = lambda source, to, message: to != late or not isinstance(message, wire.Decision)
    net.run(30.0)
    net.on_send = lambda source, to, message: True
    net.offer(late)
    net.run_until_settled()
    ending = [event for name, event in net.events if name == late][-1]
    assert isinstance(ending, OutcomeWithoutBytes | FellBehind)


def test_a_hostile_slice_is_dropped_and_the_job_comes_again() -> None:
    net = Network(3)
    liar = coordination_order(net.names, 0, 1)[-1]

    def on_reduce(peer: PeerId, job: ReduceJob) -> bool:
        if all(piece.peer != liar for piece in job.slices):
            return True
        net.peers[peer].machine.refused_slice(job, liar, "not finite", net.now)
        net.at(net.now, lambda: net.pump(peer))
        return False

    net.on_reduce = on_reduce
    net.offer_all()
    net.run_until_settled()
    committed = net.committed()
    assert len(committed) == 3
    assert all(liar not in dict(part.contributors) for part in committed[liar].parts)
    assert not any(committed[liar].contributed)
    refused = [event for _, event in net.events if isinstance(event, Refused)]
    assert {event.peer for event in refused} == {liar}


def test_an_equivocating_owner_commits_nothing() -> None:
    net = Network(4)
    liar = coordination_order(net.names, 0, 1)[1]

    def on_send(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, wire.Mean) and source == liar:
            twisted = wire.Mean.FromString(message.SerializeToString())
            twisted.data = bytes([net.names.index(to)]) * len(message.data)
            net.at(net.now + 0.01, lambda: net.deliver(source, to, twisted))
            return False
        return True

    net.on_send = on_send
    net.offer_all()
    net.run_until_settled()
    assert net.committed() == {}
    assert "hold the same mean" in {e.reason[-18:] for e in net.endings().values() if isinstance(e, Aborted)}


# ---- faults: forged messages


def begun_member() -> tuple[Rounds, wire.Begin, PeerId, PeerId]:
    """Machine of peer 0 in a round that peer ``coordinator`` of three began; part 0 is ours, part 1 the
    other's."""
    me = make_identity(0).peer_id
    names = sorted(make_identity(i).peer_id for i in range(3))
    machine = one_machine(1, 2)
    first = coordination_order(names, 0, 1)[0]
    if first == me:  # ask somebody else: we are not to coordinate here
        machine.set_peers({name: PeerView(1e6) for name in names}, 0.0)
    machine.offer(offer_of(), 0.0)
    machine.messages_to_send()
    begin = wire.Begin(
        key=wire.RoundKey(fragment=0, round=1, attempt=bytes(16)),
        members=[wire.Member(peer=name, weight=2.0, base_version=0) for name in names],
        parts=[
            wire.PartSpec(owner=me, start_block=0, stop_block=8),
            wire.PartSpec(owner=next(n for n in names if n not in (me, first)), start_block=8, stop_block=16),
        ],
        state_digest=DIGEST,
        parts_within_s=5.0,
        result_within_s=12.0,
    )
    other = next(name for name in names if name not in (me, first))
    return machine, begin, first, other


def refusal(machine: Rounds, message: Message, sender: PeerId, now: float = 1.0) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        machine.receive(message, sender, now)
    return caught.value.reason


def test_the_forging_tests_have_a_foreign_coordinator() -> None:
    _, _, first, _ = begun_member()
    assert first != make_identity(0).peer_id


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
    "owner twice": (lambda b: setattr(b.parts[1], "owner", b.parts[0].owner), "wrong owner"),
    "generation": (lambda b: setattr(b.parts[1], "generation", 1), "wrong generation"),
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
}


@pytest.mark.parametrize("name", BEGIN_FORGERIES)
def test_forged_begin(name: str) -> None:
    machine, begin, first, _ = begun_member()
    change, reason = BEGIN_FORGERIES[name]
    change(begin)
    assert refusal(machine, begin, first) == reason
    assert not any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())


def test_begin_by_a_peer_that_was_not_asked() -> None:
    machine, begin, _, other = begun_member()
    assert refusal(machine, begin, other) == "wrong sender"


def _part(**change: object) -> wire.Part:
    key = wire.RoundKey(fragment=0, round=1, attempt=bytes(16))
    fields = {"key": key, "part": 0, "offset": 0, "total": 64, "data": bytes(64)} | change
    return wire.Part(**fields)  # type: ignore[arg-type]


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
        ({"key": wire.RoundKey(fragment=0, round=7, attempt=bytes(16))}, ""),
        ({"key": wire.RoundKey(fragment=0, round=1, attempt=b"x" * 16)}, "unknown round"),
    ],
)
def test_forged_part(change: dict[str, object], reason: str) -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    if reason:
        assert refusal(machine, _part(**change), other) == reason
    else:
        machine.receive(_part(**change), other, 1.0)  # the attempt is what identifies a round


def test_a_doubled_part_is_no_offence_and_a_changed_one_is() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(begin, first, 0.5)
    machine.receive(_part(), other, 1.0)
    machine.receive(_part(), other, 1.0)
    assert refusal(machine, _part(data=b"x" * 64), other) == "conflicting duplicate"
    assert refusal(machine, _part(), make_identity(7).peer_id) == "not a member"


def test_parts_of_a_round_that_does_not_exist() -> None:
    machine = one_machine(1)
    assert refusal(machine, _part(), make_identity(1).peer_id) == "unknown round"
    machine.set_state(0, 1, DIGEST)
    assert refusal(machine, _part(), make_identity(1).peer_id) == "replayed round"


def test_pieces_that_overtake_begin_are_held_up_to_a_bound() -> None:
    machine, begin, first, other = begun_member()
    machine.receive(_part(), other, 0.2)
    machine.receive(begin, first, 0.5)
    machine.receive(_part(), first, 0.6)
    (wanted,) = [event for event in drain(machine) if isinstance(event, ReduceWanted)]
    assert [piece.peer for piece in wanted.job.slices] == sorted(piece.peer for piece in wanted.job.slices)
    assert len(wanted.job.slices) == 3
    early = EarlyPieces(0)
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

    def mean(*contributors: wire.Contributor) -> wire.Mean:
        return wire.Mean(key=begin.key, part=1, total=64, data=bytes(64), contributors=contributors)

    assert refusal(machine, mean(good), first) == "wrong owner"
    assert refusal(machine, mean(), other) == "wrong contributors"
    assert refusal(machine, mean(wire.Contributor(peer=other, weight=99.0)), other) == "wrong contributors"
    assert refusal(machine, mean(good, good), other) == "wrong contributors"
    assert refusal(machine, mean(wire.Contributor(peer="x", weight=2.0)), other) == "wrong contributors"
    machine.receive(mean(good), other, 1.0)
    unknown = wire.Result(key=wire.RoundKey(fragment=0, round=1, attempt=b"x" * 16))
    assert refusal(machine, unknown, other) == "unknown round"
    reassign = wire.Reassign(key=begin.key, part=1, owner=first, generation=1, parts_within_s=5.0)
    machine.messages_to_send()
    machine.receive(reassign, other, 1.0)  # by a member that we do not follow (yet): no offence, no effect
    assert machine.messages_to_send() == []
    assert refusal(machine, reassign, make_identity(7).peer_id) == "not a member"
    reassign.owner = "nobody"
    assert refusal(machine, reassign, first) == "wrong owner"
    reassign.owner, reassign.generation = first, 1000
    assert refusal(machine, reassign, first) == "wrong generation"


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
    far = signed(1, key=wire.RoundKey(fragment=0, round=9, attempt=b"z" * 16))
    for _ in range(3):
        machine.receive(far, make_identity(1).peer_id, 1.0)
    (event,) = drain(machine)
    assert isinstance(event, FellBehind)
    assert event.version == 8
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
    (event,) = drain(machine)
    assert isinstance(event, OutcomeWithoutBytes)
    assert event.ends_offer


def test_a_flood_of_rounds_holds_one_gathering_per_sender() -> None:
    machine = one_machine(1, 2)
    for round_ in range(1, 2000):
        ready = wire.Ready(fragment=0, round=round_, state_digest=DIGEST, weight=1.0)
        machine.receive(ready, make_identity(1).peer_id, 1.0)
        machine.messages_to_send()
    assert len(machine._coordination._gatherings) == 1


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
                field.CPPTYPE_BOOL: chance.random() < 0.5,
                field.CPPTYPE_STRING: chance.choice(blobs if field.type == field.TYPE_BYTES else strings),
            }[field.cpp_type]
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)


HEARD: list[type[Message]] = [
    wire.Ready, wire.Waiting, wire.Begin, wire.Part, wire.Mean, wire.Result, wire.Reassign, wire.Decision,
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
    blobs = [bytes(16), DIGEST, RUN, bytes(64), b"", b"short"]
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


# ---- our own mistakes are loud


def test_offers_that_do_not_fit_are_local_errors() -> None:
    machine = one_machine(1)
    with pytest.raises(LocalProtocolError, match="bytes"):
        machine.offer(offer_of(payload=b"short"), 0.0)
    with pytest.raises(LocalProtocolError, match="at version 0"):
        machine.offer(offer_of(round_=3), 0.0)
    with pytest.raises(LocalProtocolError, match="weight"):
        offer_of(weight=0.0)
    machine.offer(offer_of(), 0.0)
    with pytest.raises(LocalProtocolError, match="open offer"):
        machine.offer(offer_of(), 0.0)
    with pytest.raises(LocalProtocolError, match="not for the rounds machine"):
        machine.receive(wire.Ping(), make_identity(1).peer_id, 0.0)


def test_an_offer_ends_when_the_state_moves_past_it() -> None:
    machine = one_machine(1)
    machine.offer(offer_of(), 0.0)
    machine.set_state(0, 1, DIGEST)
    (event,) = [event for event in drain(machine) if isinstance(event, Aborted)]
    assert event.reason == "version 1 is the agreed state now"


def test_an_offer_ends_when_its_state_is_healed_at_the_same_version() -> None:
    machine, begin, first, _ = begun_member()
    other = hashlib.sha256(b"the majority's").digest()
    machine.set_state(0, 0, DIGEST)  # no news: the offer stays open
    assert drain(machine) == []
    machine.set_state(0, 0, other)
    (event,) = drain(machine)
    assert isinstance(event, Aborted)
    assert "replaced by another state" in event.reason
    machine.offer(Offer(0, 1, 0, other, bytes(128), 2.0), 1.0)
    machine.receive(begin, first, 1.5)  # answers the READY of before: nobody's fault
    assert drain(machine) == []


# ---- offers that are withdrawn


def test_a_withdrawn_offer_ends_and_may_be_made_again() -> None:
    machine, begin, first, other = begun_member()
    assert machine.withdraw(0, "the bytes are nowhere", 0.5)
    (event,) = drain(machine)
    assert event == Aborted(0, 1, "the bytes are nowhere", 0.5)
    assert machine.messages_to_send() == []
    assert machine.get_timer() is None
    assert not machine.withdraw(0, "twice", 0.6)
    assert drain(machine) == []
    machine.offer(offer_of(weight=3.0), 1.0)
    machine.receive(begin, first, 1.1)  # for the READY that we withdrew: no offence, no effect
    machine.receive(_part(), other, 1.2)
    assert not any(isinstance(message, wire.Part) for _, message in machine.messages_to_send())
    begin.key.attempt = b"n" * 16
    for member in begin.members:
        member.weight = 3.0
    machine.receive(begin, first, 1.3)
    assert machine.withdraw(0, "after BEGIN", 2.0)
    assert [type(event) for event in drain(machine)] == [Aborted]
    assert machine.get_timer() is None


@pytest.mark.parametrize("role", [0, -1])
@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.4, 0.5])
def test_everybody_has_an_ending_though_one_withdraws_and_offers_again(role: int, after_s: float) -> None:
    for seed in range(10):
        net = Network(4, seed, Faults(latency_s=(0.01, 0.2)))
        fickle = coordination_order(net.names, 0, 1)[role]
        net.offer_all()

        def withdraw(net: Network = net, fickle: PeerId = fickle) -> None:
            if net.peers[fickle].machine.withdraw(0, "changed our mind", net.now):
                net.pump(fickle)
                net.at(net.now + 0.1, lambda: net.offer(fickle) if not net.peers[fickle].version else None)

        net.at(net.now + after_s, withdraw)
        net.run_until_settled()
        net.run(300.0)
        assert net.undecided() == []
        net.check_agreement()
        assert net.refused == []
        assert net.peers[fickle].machine.get_timer() is None
        assert len({peer.states[0] for peer in net.peers.values() if peer.name != fickle}) == 1
