"""How a round is planned: parts by upload rate, pieces, the order of coordinators, quorums and deadlines."""

from __future__ import annotations

import random
from collections import Counter
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.rounds import PeerView
from p2p_co2.rounds import bounds as limits
from p2p_co2.rounds.assembly import PIECE_UNIT_BYTES, Assembly, piece_bytes, pieces
from p2p_co2.rounds.attempt import Attempt, Share
from p2p_co2.rounds.deadline import Durations, ReadyHistory, adaptive_deadline_s, parts_deadline_s
from p2p_co2.rounds.parts import BlockRange, covers, split_blocks
from p2p_co2.rounds.swarm import coordination_order, named
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_DATA_BYTES
from tests.round_machine import DIGEST, offer_of, one_machine
from tests.round_network import Network, make_identity

# ---- by hand


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


@given(st.integers(0, 2**32), st.integers(1, 3 * MAX_DATA_BYTES), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_pieces_come_together_in_any_order(seed: int, size: int, doublings: int) -> None:
    shuffle = random.Random(seed)
    data = shuffle.randbytes(size)
    cut = list(pieces(memoryview(data), PIECE_UNIT_BYTES << doublings))
    sent = cut * 2
    shuffle.shuffle(sent)
    assembly = Assembly(size)
    news = [assembly.add(offset, size, piece) for offset, piece in sent]
    assert assembly.whole == data
    assert sum(news) == len(cut)


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ([], MAX_DATA_BYTES),
        ([0.0, 1e9], MAX_DATA_BYTES),
        ([1e6, 3e5], 64 << 10),
        ([10_000], PIECE_UNIT_BYTES),
    ],
)
def test_pieces_are_as_small_as_the_slowest_link_needs(rates: list[float], size: int) -> None:
    assert piece_bytes(rates) == size


def test_impossible_pieces_are_refused_and_change_nothing() -> None:
    unit, total = PIECE_UNIT_BYTES, 2 * MAX_DATA_BYTES + 7
    assembly = Assembly(total)
    assert assembly.add(unit, total, bytes(2 * unit))
    for reason, offset, claimed, data in [
        ("wrong size", 0, total + 1, bytes(unit)),
        ("wrong piece", 1, total, bytes(unit)),
        ("wrong piece", 0, total, bytes(unit - 1)),
        ("wrong piece", 0, total, b""),
        ("wrong piece", 0, total, bytes(MAX_DATA_BYTES + unit)),
        ("wrong piece", 2 * MAX_DATA_BYTES, total, bytes(8)),
        ("wrong piece", 1 << 60, total, bytes(unit)),
        ("conflicting duplicate", unit, total, b"x" * 2 * unit),
        ("conflicting duplicate", 2 * unit, total, bytes(2 * unit)),
        ("conflicting duplicate", 0, total, bytes(2 * unit)),
    ]:
        with pytest.raises(RemoteProtocolError) as refused:
            assembly.add(offset, claimed, data)
        assert refused.value.reason == reason
    assert not assembly.add(unit, total, bytes(2 * unit))
    for offset, piece in pieces(memoryview(bytes(total)), unit):
        if not unit <= offset < 3 * unit:
            assert assembly.add(offset, total, piece)
    assert assembly.whole == bytes(total)


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
