"""How a round is planned: parts by upload rate, pieces, the order of coordinators and quorums."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import PayloadShape, PeerView
from p2p_co2.protocol.rounds.assembly import (
    PIECE_S,
    PIECE_UNIT_BYTES,
    Assembly,
    piece_bytes,
    pieces,
)
from p2p_co2.protocol.rounds.attempt import Attempt, Share, read_senders, write_senders
from p2p_co2.protocol.rounds.exchange import PartState
from p2p_co2.protocol.rounds.parts import (
    FINEST_BYTES,
    PIPELINED_BYTES,
    BlockRange,
    Division,
    LineRates,
    covers,
    divide,
    parts_each,
    split_blocks,
)
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.rounds.swarm import Outlet, RoundSwarm, named
from p2p_co2.wire import messages_pb2 as wire
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_MEMBERS, MAX_PIECE_BYTES
from tests.round_machine import DIGEST, offer_of, one_machine
from tests.round_network import Network, make_identity

# ---- by hand


def test_parts_follow_the_upload_rates() -> None:
    assert split_blocks(9, [0.0, 0.0, 0.0]) == ((0, 3), (3, 6), (6, 9))
    assert split_blocks(9, [5.0, 0.0, 5.0]) == ((0, 3), (3, 6), (6, 9))  # unknown counts like the others
    assert split_blocks(1, [1.0, 1.0, 1.0])[-1].stop == 1
    # Four payloads/s against three of 2/s: alone the four needs 3/4 s, with the others (2 + 4) / 10 s. In 1.5
    # times that the links have 2.6 and 0.8 payloads left after their own: 2.6 / 5 is more than two of four
    # equal shares, so it owns these, and the others have the other half.
    assert split_blocks(50, [4.0, 2.0, 2.0, 2.0]) == ((0, 25), (25, 33), (33, 42), (42, 50))
    assert split_blocks(9, [1.0, 16.0, 1e300, 1.0]) == split_blocks(9, [1.0, 16.0, 16.0, 1.0])  # a boast


def divided(uploads: list[float], downloads: list[float] | None = None, round_: int = 1) -> Division:
    """A payload of 1200 blocks of one byte; nothing is cheap."""
    caps = downloads or [0.0] * len(uploads)
    rates = {
        PeerId(f"p{i}"): LineRates(up, down) for i, (up, down) in enumerate(zip(uploads, caps, strict=True))
    }
    return divide(1200, 1, rates, (0, round_), 0.0)


def test_a_large_share_is_cut_for_a_pipeline() -> None:
    rates = {PeerId(f"p{i}"): LineRates(1e6) for i in range(4)}
    blocks = 4 * 8 * PIPELINED_BYTES // 68
    division = divide(blocks, 68, rates, (0, 1), 0.0)
    assert Counter(division.owners) == {f"p{i}": 8 for i in range(4)}
    assert parts_each(blocks * 68, 4) == 8
    assert covers(division.ranges, blocks)
    assert {part.stop - part.start for part in division.ranges} <= {963, 964}
    lan = {peer: LineRates(50e6) for peer in rates}  # 0.4 MB in the time that a pipeline may wait
    assert Counter(divide(blocks, 68, lan, (0, 1), 0.0).owners) == {f"p{i}": 1 for i in range(4)}
    assert Counter(divide(8 * blocks, 68, lan, (0, 1), 0.0).owners) == {f"p{i}": 8 for i in range(4)}
    assert Counter(divide(4 * blocks, 68, lan, (0, 1), 0.0).owners) == {f"p{i}": 5 for i in range(4)}
    assert parts_each(4 * blocks * 68, 4, [50e6] * 4) == 5
    assert parts_each(64e6, 4, [1e12] * 4) == 8  # no part is larger for it than a message
    assert parts_each(4 * blocks * 68, 4, [1e12, 1e12, 1e6, 0.0]) == 8  # two of four claim it
    small = divide(blocks // 32, 68, rates, (0, 1), 0.0)  # one part of a quarter of what is worth a message
    assert len(small.ranges) == 4
    many = divide(1 << 20, 68, {PeerId(f"p{i:02}"): LineRates(1e6) for i in range(32)}, (0, 1), 0.0)
    assert len(many.ranges) == 32  # no votes of thousands of digests


def test_equal_links_share_equally_and_send_everything() -> None:
    division = divided([1200.0] * 4)
    assert division.ranges == ((0, 300), (300, 600), (600, 900), (900, 1200))
    assert division.owners == ("p0", "p1", "p2", "p3")
    assert set(division.senders) == {frozenset(("p0", "p1", "p2", "p3"))}
    assert division.transfer_s == pytest.approx(1.5)  # 2 (1 - 1/4) payloads


def test_measurements_of_equal_links_divide_a_round_as_equal_links_do() -> None:
    assert divided([1200.0, 1000.0, 1450.0, 1200.0]) == divided([1200.0] * 4)
    assert divided([1200.0, 1200.0, 1600.0, 1200.0]).ranges != divided([1200.0] * 4).ranges


@pytest.mark.parametrize("claim", [1.0, 1e3, 6e4])
def test_who_claims_to_be_slow_beside_one_other_does_not_make_that_one_slow(claim: float) -> None:
    """A claim of 1 byte/s made the other's line one of 16, and rounds wait 300 s for slices."""
    names = [PeerId("p0"), PeerId("p1")]
    rates = {names[0]: LineRates(1e6), names[1]: LineRates(claim)}
    division = divide(10_000, 100, rates, (0, 1), 0.25, own_upload=1e6)
    assert set(division.owners) == {"p0"}
    assert division.transfer_s <= 2.0
    assert divide(10_000, 100, rates, (0, 1), 0.25, own_upload=5e5).transfer_s <= 4.0
    boast = {names[0]: LineRates(1e6), names[1]: LineRates(1e9)}  # nothing is believed beyond what it was
    believed = divide(10_000, 100, boast, (0, 1), 0.25, own_upload=1e6)
    assert believed == divide(10_000, 100, boast, (0, 1), 0.25)


def test_a_link_ten_times_slower_averages_nothing_and_sends_what_it_can_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.protocol.rounds.parts.FINEST_BYTES", 1)
    asked: Counter[int] = Counter()
    for round_ in range(1, 61):
        division = divided([1200.0, 1200.0, 120.0, 1200.0], round_=round_)
        assert "p2" not in division.owners
        # The three fast ones alone: (2 + 3) / 3 s; in half as much again a quarter of the slow payload.
        assert division.transfer_s == pytest.approx(2.5)
        sent = [part for part, peers in zip(division.ranges, division.senders, strict=True) if "p2" in peers]
        assert 200 < sum(stop - start for start, stop in sent) <= 300
        asked.update(block for start, stop in sent for block in range(start, stop))
    assert len(asked) == 1200
    assert max(asked.values()) <= 4 * min(asked.values())


def test_a_link_hardly_slower_is_waited_for() -> None:
    division = divided([1200.0, 1200.0, 600.0, 1200.0])
    assert all("p2" in peers for peers in division.senders)
    assert len(division.ranges) == 3 + ("p2" in division.owners)


def test_nobody_is_left_out_of_a_round_that_is_cheap() -> None:
    rates = {PeerId("a"): LineRates(1e9), PeerId("b"): LineRates(1e9), PeerId("c"): LineRates(1e6)}
    division = divide(1000, 100, rates, (0, 1), 0.25)
    assert all(len(peers) == 3 for peers in division.senders)


def test_nobody_is_left_out_for_what_a_fast_line_seems_to_carry() -> None:
    measured = [12e6, 3e9, 60e6, 1e9]  # of four equal peers on one busy machine
    rates = {PeerId(f"p{index}"): LineRates(rate) for index, rate in enumerate(measured)}
    division = divide(1000, 16_000, rates, (0, 1), 0.25)
    assert all(len(peers) == 4 for peers in division.senders)
    assert {"p1", "p2", "p3"} <= set(division.owners)


def test_who_may_not_download_much_averages_little_but_sends_all() -> None:
    division = divided([1200.0] * 4, [0.0, 120.0, 0.0, 0.0])
    assert "p1" not in division.owners
    assert all("p1" in peers for peers in division.senders)


def test_a_claim_to_be_slow_does_not_cut_a_round_into_crumbs() -> None:
    blocks, round_ = 160_000 // 68, 1
    for claimed in (25_000.0, 1_000.0, 1e-9):
        rates = {PeerId(f"p{i}"): LineRates(2.5e6) for i in range(3)} | {PeerId("p3"): LineRates(claimed)}
        division = divide(blocks, 68, rates, (0, round_), 0.25)
        assert min(stop - start for start, stop in division.ranges) * 68 >= FINEST_BYTES
        assert max(stop - start for start, stop in division.ranges) * 68 < 2 * FINEST_BYTES
        assert covers(division.ranges, blocks)
    rates[PeerId("p3")] = LineRates(25_000.0)  # a hundredth: 6 kB in a round that is cheap
    brought = sum(
        (stop - start) * 68
        for round_ in range(1, 401)
        for division in [divide(blocks, 68, rates, (0, round_), 0.25)]
        for (start, stop), peers in zip(division.ranges, division.senders, strict=True)
        if "p3" in peers
    )
    assert 0.7 * 6250 < brought / 400 < 1.3 * 6250  # what it can, in fewer and larger pieces


def test_a_link_too_slow_for_any_part_sends_one_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_co2.protocol.rounds.parts.FINEST_BYTES", 1)
    division = divided([1200.0] * 3 + [1.0])
    assert len(division.ranges) <= MAX_MEMBERS
    times = [
        sum("p3" in peers for peers in divided([1200.0] * 3 + [1.0], round_=round_).senders)
        for round_ in range(1, 200)
    ]
    assert set(times) == {0, 1}
    assert 5 <= sum(times) <= 60  # 2.5 blocks a round, parts of about 20


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


# ---- against a reference


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


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(0, 1e13), st.floats(0, 1e13)), min_size=1, max_size=64),
    st.integers(1, 2**40),
    st.floats(0, 100),
)
def test_a_division_is_whole_and_its_owners_send(
    blocks: int, links: list[tuple[float, float]], round_: int, cheap_s: float
) -> None:
    rates = {PeerId(f"p{i:02}"): LineRates(up, down) for i, (up, down) in enumerate(links)}
    division = divide(blocks, 7, rates, (3, round_), cheap_s)
    assert covers(division.ranges, blocks)
    assert len(division.ranges) <= MAX_MEMBERS
    assert all(owner in peers for owner, peers in zip(division.owners, division.senders, strict=True))
    assert 0 < division.transfer_s < math.inf or len(links) == 1
    names = tuple(sorted(rates))
    for peers in division.senders:
        assert read_senders(write_senders(peers, names), names) == peers


@given(st.integers(0, 2**32), st.integers(1, 3 * MAX_PIECE_BYTES), st.integers(0, 5))
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


def test_what_comes_in_one_piece_is_not_copied() -> None:
    data = random.Random(0).randbytes(PIECE_UNIT_BYTES + 7)
    assembly = Assembly(len(data))
    assert assembly.add(0, len(data), data)
    assert assembly.whole is not None
    assert assembly.whole.obj is data
    assert not assembly.add(0, len(data), bytes(data))
    with pytest.raises(RemoteProtocolError, match="conflicting duplicate"):
        assembly.add(0, len(data), bytes(len(data)))
    place = memoryview(bytearray(len(data)))
    assert Assembly(len(data), place).add(0, len(data), data)
    assert place == data


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ([], MAX_PIECE_BYTES),
        ([0.0, 1e9], MAX_PIECE_BYTES),
        ([3.9e6], 512 << 10),
        ([1e6, 3e5], 64 << 10),
        ([10_000], PIECE_UNIT_BYTES),
    ],
)
def test_pieces_are_as_small_as_the_slowest_link_needs(rates: list[float], size: int) -> None:
    assert piece_bytes(rates) == size
    assert piece_bytes([5 * rate for rate in rates], PIECE_S / 5) == size


def test_impossible_pieces_are_refused_and_change_nothing() -> None:
    unit, total = PIECE_UNIT_BYTES, 2 * MAX_PIECE_BYTES + 7
    assembly = Assembly(total)
    assert assembly.add(unit, total, bytes(2 * unit))
    for reason, offset, claimed, data in [
        ("wrong size", 0, total + 1, bytes(unit)),
        ("wrong piece", 1, total, bytes(unit)),
        ("wrong piece", 0, total, bytes(unit - 1)),
        ("wrong piece", 0, total, b""),
        ("wrong piece", 0, total, bytes(MAX_PIECE_BYTES + unit)),
        ("wrong piece", 2 * MAX_PIECE_BYTES, total, bytes(8)),
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


def test_a_mean_travels_in_finer_pieces_than_the_slices_before_it() -> None:
    """One of two connections to a peer stood still with an eighth of a megabyte that all waited for."""
    me, other = PeerId("p0"), PeerId("p1")
    attempt = Attempt(
        0, 1, bytes(16), {me: Share(1.0, 0), other: Share(1.0, 0)}, (BlockRange(0, 16),), (me,),
        (frozenset((me, other)),), DIGEST, me, 5.0, 12.0,
    )  # fmt: skip
    swarm, outlet = RoundSwarm(me, PayloadShape(8, (16,))), Outlet(me)
    swarm.set_live({me: PeerView(upload_bytes_per_s=1e6), other: PeerView()})
    mean = random.Random(0).randbytes(256 << 10)
    PartState(me, 0, memoryview(bytearray(mean)), 0.0).send(attempt, swarm, outlet)
    sent = [wire.Mean.FromString(message.SerializeToString()) for _, message in outlet.messages]
    assert [message.offset for message in sent] == list(range(0, len(mean), 64 << 10))
    assert b"".join(message.data for message in sent) == mean


@pytest.mark.parametrize(
    ("payload_mib", "size"), [(1, 16 << 10), (8, 32 << 10), (16, 64 << 10), (999, 64 << 10)]
)
def test_pieces_are_no_finer_than_a_round_could_notice(payload_mib: int, size: int) -> None:
    me, other = PeerId("p0"), PeerId("p1")
    swarm = RoundSwarm(me, PayloadShape(1 << 20, (payload_mib,)))
    swarm.set_live({me: PeerView(upload_bytes_per_s=3e5), other: PeerView()})
    assert swarm.piece_bytes([me, other]) == size


@pytest.mark.parametrize("upload_bytes_per_s", [4.1e6, 8e6, 14e6, 15e6])
def test_pieces_of_the_largest_payload_are_no_larger_than_a_message_bears(upload_bytes_per_s: float) -> None:
    me, other = PeerId("p0"), PeerId("p1")
    swarm = RoundSwarm(me, PayloadShape(1 << 20, (999,)))
    swarm.set_live({me: PeerView(upload_bytes_per_s=upload_bytes_per_s), other: PeerView()})
    assert swarm.piece_bytes([me, other]) == MAX_PIECE_BYTES
