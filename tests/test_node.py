"""Links and progress, over carriers made for the purpose: choice, loss, bounds, priority, caps."""

from __future__ import annotations

import asyncio
import time

import pytest

from p2p_co2.net.transport.flow import LEAST_BYTES, Acknowledged
from p2p_co2.node.lanes import Bulk, Lane, Piece
from p2p_co2.node.links import MAX_CONTROL_BYTES, MAX_QUEUED_BYTES, MAX_SERVED_BYTES
from p2p_co2.node.meter import (
    DRAINED_BYTES,
    FAST_BYTES_PER_S,
    LONGEST_BURST_S,
    MEASURABLE_BYTES,
    LinePace,
    Opinion,
    Pace,
    UploadMeter,
)
from p2p_co2.protocol.rounds.assembly import PIECE_UNIT_BYTES
from p2p_co2.protocol.wire.limits import MAX_DATA_BYTES
from tests.made_links import B, C, FakeCarrier, FakeLink, Hands, links_over, turns


async def test_the_preferred_carrier_is_used_and_the_order_kept() -> None:
    grpc, libp2p = FakeCarrier("grpc"), FakeCarrier("libp2p")
    async with links_over(grpc, libp2p) as (links, heard):
        for number in range(5):
            assert links.post(B, bytes([number]), bulk=False)
        await turns()
        assert grpc.sent == [bytes([number]) for number in range(5)]
        assert (libp2p.sent, heard.opened) == ([], [(B, "grpc", "")])
        assert links.up_bytes == 5
        assert links.carriers_used() == {B: "grpc"}


async def test_the_other_carrier_serves_when_a_peer_cannot_be_dialled_and_says_why() -> None:
    grpc, libp2p = FakeCarrier("grpc", reachable=False), FakeCarrier("libp2p")
    async with links_over(grpc, libp2p) as (links, heard):
        links.post(B, b"x", bulk=True)
        await turns()
        assert libp2p.sent == [b"x"]
        assert heard.opened == [(B, "libp2p", "grpc: connection refused")]


async def test_a_peer_that_no_carrier_reaches_is_reported_and_its_queue_dropped() -> None:
    grpc = FakeCarrier("grpc", reachable=False)
    async with links_over(grpc) as (links, heard):
        links.post(B, b"x", bulk=True)
        links.post(C, b"y", bulk=False)
        await turns()
        assert dict(heard.unreachable) == {
            B: "grpc: connection refused",
            C: "no record of this peer is known",
        }
        grpc.reachable = True
        links.post(B, b"z", bulk=True)
        await turns()
        assert grpc.sent == [b"z"]


async def test_a_link_that_dies_idle_is_noticed_and_opened_again() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc) as (links, heard):
        links.post(B, b"1", bulk=False)
        await turns()
        grpc.links[0].closed.set_result("connection reset")
        await turns()
        assert heard.lost == [(B, "grpc", "connection reset")]
        assert len(grpc.links) == 2
        links.post(B, b"2", bulk=False)
        await turns()
        assert grpc.sent == [b"1", b"2"]


async def test_control_overtakes_bulk_and_bulk_is_bounded() -> None:
    grpc = FakeCarrier("grpc")
    grpc.gate.clear()
    async with links_over(grpc) as (links, _):
        links.post(B, b"bulk 1", bulk=True)
        await turns()
        links.post(B, b"bulk 2", bulk=True)
        links.post(B, b"control", bulk=False)
        grpc.gate.set()
        await turns()
        assert grpc.sent == [b"bulk 1", b"control", b"bulk 2"]
        grpc.gate.clear()
        links.post(B, b"x", bulk=True)
        await turns()
        assert not links.post(B, bytes(MAX_QUEUED_BYTES), bulk=True)
        assert links.post(B, b"control still passes", bulk=False)
        grpc.gate.set()
        await links.drain(1.0)


async def test_control_that_is_not_read_is_bounded_by_its_bytes() -> None:
    """One that asked for a manifest of half a MiB and read nothing had us hold 4096 of them."""
    grpc, manifest = FakeCarrier("grpc"), bytes(MAX_CONTROL_BYTES // 4)
    grpc.gate.clear()
    async with links_over(grpc) as (links, _):
        links.post(B, b"on its way", bulk=False)
        await turns()
        assert [links.post(B, manifest, bulk=False) for _ in range(6)] == [True] * 4 + [False] * 2
        assert links.post(C, manifest, bulk=False)
        grpc.gate.set()
        await links.drain(1.0)
        assert links.post(B, manifest, bulk=False)


async def test_who_takes_nothing_off_our_hands_takes_no_room_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.links.MAX_QUEUED_BYTES", 1000)
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, _):
        links.set_paces({B: 1e-9})
        links.post(B, b"first of B", bulk=True)
        await turns()
        for number in range(500):
            assert links.post(B, b"%04d" % number, bulk=True)
            assert links._queued_bytes <= 500
        for number in range(50):
            assert links.post(C, b"C%03d" % number, bulk=True)
        await turns(200)
        assert [data for data in grpc.sent if data.startswith(b"C")] == [b"C%03d" % n for n in range(50)]
        links.set_paces({})
        lane = links._lanes[B]
        assert lane.bulk[-1].data == b"0499"  # the oldest went
        assert links._queued_bytes == lane.bulk_bytes == sum(len(one.data) for one in lane.bulk)


async def test_what_a_peer_asks_for_has_room_whatever_of_our_rounds_waits_for_it() -> None:
    """A chunk of a round that it missed was dropped behind 4 MiB of the next one, and it asked again after
    two seconds: by then the next round had begun without it as well."""
    grpc, piece, chunk = FakeCarrier("grpc"), bytes(MAX_SERVED_BYTES), bytes(MAX_SERVED_BYTES // 8)
    async with links_over(grpc) as (links, _):
        links.post(B, b"first", bulk=True)
        await turns()
        grpc.gate.clear()
        links.post(B, b"on its way", bulk=True)
        await turns()
        assert links.post(B, piece, bulk=True, piece=Piece(b"1", False))
        assert [links.post(B, chunk, bulk=True, served=True) for _ in range(9)] == [True] * 8 + [False]
        links.forget(b"1", means=True)
        assert not links.post(B, chunk, bulk=True, served=True)
        assert links.post(B, b"ours", bulk=True)
        grpc.gate.set()
        await turns(200)
        assert [len(data) for data in grpc.sent[2:]] == [len(chunk)] * 8 + [len(b"ours")]
        assert (links._queued_bytes, links._lanes[B].bulk_bytes) == (0, 0)
        assert links.post(B, chunk, bulk=True, served=True)
        await links.drain(1.0)


async def test_the_upload_cap_holds() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, cap=1e6) as (links, _):
        started_at = asyncio.get_running_loop().time()
        for _ in range(10):
            links.post(B, bytes(20_000), bulk=True)
        await links.drain(5.0)
        assert (
            asyncio.get_running_loop().time() - started_at >= 0.15
        )  # 200 kB at 1 MB/s, the last sleep aside
        assert len(grpc.sent) == 10


async def test_control_does_not_wait_for_the_turn_of_bulk() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, cap=1000.0) as (links, _):
        for number in range(3):  # the second may go after 100 s
            links.post(B, bytes([number]) * 100_000, bulk=True)
        await turns()
        assert len(grpc.sent) == 1
        links.post(B, b"ping", bulk=False)
        await turns()
        assert grpc.sent[1:] == [b"ping"]


async def test_a_slow_receiver_gets_its_rate_and_does_not_hold_up_the_others() -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, cap=1e12, known=(B, C)) as (links, _):
        links.set_paces({B: 100.0})
        for _ in range(2):
            links.post(B, bytes(1000), bulk=True)  # the second may go after 10 s
        await turns()
        for _ in range(3):
            links.post(C, bytes(1001), bulk=True)
        await turns(100)
        assert [len(data) for data in grpc.sent] == [1000, 1001, 1001, 1001]


def burst(meter: UploadMeter, size_bytes: int, started_at: float, duration_s: float) -> None:
    """Of eight messages, one after the other at an even rate."""
    for number in range(8):
        meter.started(started_at + number * duration_s / 8)
        meter.finished("b", size_bytes // 8, started_at + (number + 1) * duration_s / 8)


def test_the_rate_is_that_of_the_second_best_burst_of_late() -> None:
    meter = UploadMeter()
    at = 0.0
    for wanted, size_bytes, duration_s in (
        (4, 4, 1.0),
        (4, 1, 5.0),  # the machine was busy
        (4, 40, 1.0),  # a queue on the way has filled meanwhile
        (40, 40, 1.0),  # the line is faster now
        (40, 1, 1.0),
        (40, 1, 1.0),
        (40, 1, 1.0),
        (1, 1, 1.0),  # only one of the last five was fast
    ):
        at += 100.0
        burst(meter, MEASURABLE_BYTES * size_bytes, at, duration_s)
        burst(meter, 8, at + 50.0, 0.001)  # too small to tell; it ends the one before
        assert meter.bytes_per_s == pytest.approx(MEASURABLE_BYTES * wanted)


def test_messages_close_together_are_one_burst() -> None:
    meter = UploadMeter()
    for number in range(10):
        meter.started(1.0 + number * 0.1)
        meter.finished("b", MEASURABLE_BYTES // 4, 1.05 + number * 0.1)
    burst(meter, 8, 10.0, 0.001)
    # Of ten quarters, the last five left in half a second.
    assert meter.bytes_per_s == pytest.approx(2.5 * MEASURABLE_BYTES)


def test_a_burst_that_has_ended_is_measured_without_another() -> None:
    meter = UploadMeter()
    burst(meter, 4 * MEASURABLE_BYTES, 1.0, 1.0)
    assert not meter.rest(2.05)  # it may go on
    assert meter.bytes_per_s == 0.0
    assert meter.rest(2.2)
    assert meter.bytes_per_s == pytest.approx(4 * MEASURABLE_BYTES)
    burst(meter, 8 * MEASURABLE_BYTES, 50.0, 1.0)  # since its own beginning, not since it was asked
    assert meter.rest(60.0)
    assert meter.bytes_per_s == pytest.approx(8 * MEASURABLE_BYTES)


def test_what_buffers_swallow_is_no_rate() -> None:
    meter = UploadMeter()
    burst(meter, DRAINED_BYTES, 1.0, 0.002)  # all of it into buffers
    burst(meter, 8, 10.0, 0.001)
    assert meter.bytes_per_s == 0.0
    for number in range(8):  # the first half into buffers, the rest at the speed of the link
        meter.started(20.0 + 0.1 * max(0, number - 3))
        meter.finished("b", 100_000, 20.0 + 0.1 * max(0, number - 3) + 0.001)
    burst(meter, 8, 30.0, 0.001)
    assert meter.bytes_per_s == pytest.approx(1e6)
    burst(meter, 4 * DRAINED_BYTES, 40.0, 0.02)  # no buffer holds so much
    burst(meter, 8, 50.0, 0.001)
    assert meter.bytes_per_s == pytest.approx(200 * DRAINED_BYTES)


def exchange(meter: UploadMeter, began_at: float, ends_s: dict[str, float], size_bytes: int) -> None:
    """``size_bytes`` to each receiver, who says evenly until its time that they come; then a rest."""
    words = [
        (began_at + end_s * (number + 1) / 20, to) for to, end_s in ends_s.items() for number in range(20)
    ]
    for _ in words:
        meter.started(began_at)
    for at, to in sorted(words):
        meter.finished(to, size_bytes // 20, at)
    meter.started(began_at + 100.0)
    meter.finished("b", 0, began_at + 100.0)


def test_one_receiver_of_three_makes_a_line_neither_slower_nor_faster() -> None:
    honest_s = 3.0  # 3 MB to three receivers over a line of 1 MB/s
    for lie_s in (honest_s, 90.0, 0.001):
        meter = UploadMeter()
        for number in range(5):
            exchange(meter, 200.0 * number, {"b": honest_s, "c": honest_s, "d": lie_s}, 1_000_000)
        # what the liar claims early has not gone in the stretch that is measured, what it claims late has not
        share = 1.0 if lie_s == honest_s else 2 / 3
        assert meter.bytes_per_s == pytest.approx(share * 1e6, rel=0.1)


def test_a_slow_receiver_alone_does_not_undo_what_the_others_showed() -> None:
    meter = UploadMeter()
    exchange(meter, 0.0, {"b": 3.0, "c": 3.0, "d": 3.0}, 1_000_000)
    for number in range(1, 5):
        exchange(meter, 100.0 * number, {"d": 50.0}, 1_000_000)  # it fetches a state over a bad line
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.1)
    for number in range(5, 30):
        exchange(meter, 100.0 * number, {"d": 50.0}, 1_000_000)  # and nobody else is there any more
    assert meter.bytes_per_s < 2e5


async def test_what_a_peer_says_it_has_is_what_was_sent() -> None:
    libp2p = FakeCarrier("libp2p")
    async with links_over(libp2p) as (links, heard):
        links.post(B, b"hello", bulk=False)
        await turns()
        said = libp2p.links[0].acknowledged = Acknowledged()
        said.on_news = lambda: links._hear(B, links._lanes[B], said)
        for number in range(4):
            links.post(B, bytes([number]) * LEAST_BYTES, bulk=True)
        await turns()
        assert len(libp2p.sent) == 2  # no room for more until it is there
        links.post(B, b"ping", bulk=False)
        await turns()
        assert libp2p.sent[2:] == [b"ping"]
        assert links.traffic == {}
        said.hear(str(LEAST_BYTES).encode(), time.monotonic())
        await turns()
        assert (len(libp2p.sent), links.traffic[B].bulk_bytes) == (5, LEAST_BYTES)
        assert links._meter.busy
        libp2p.links[0].closed.set_result("the peer is gone")  # with the rest under way
        await turns()
        assert heard.lost == [(B, "libp2p", "the peer is gone")]
        assert libp2p.sent[5:] == [bytes([3]) * LEAST_BYTES]  # over the next link
        assert not links._meter.busy


def test_a_burst_without_end_is_measured_all_the_same() -> None:
    meter = UploadMeter()
    for number in range(int(20 * LONGEST_BURST_S)):
        meter.started(number * 0.1)
        meter.finished("b", 50_000, number * 0.1 + 0.09)
    assert meter.bytes_per_s == pytest.approx(5e5, rel=0.05)


def test_turns_come_in_the_order_of_asking_and_keep_the_rate() -> None:
    pace = Pace(1000.0)
    assert [pace.admit_at(500, 10.0) for _ in range(4)] == [10.0, 10.5, 11.0, 11.5]
    assert pace.admit_at(500, 20.0) == 20.0
    pace.bytes_per_s = 100.0
    assert [pace.admit_at(10, 20.5), pace.admit_at(10, 20.5)] == [20.5, 20.6]


def test_who_asks_late_loses_nothing_up_to_a_bound() -> None:
    pace = Pace(1000.0, late_s=0.2)
    assert [pace.admit_at(100, 10.0) for _ in range(4)] == pytest.approx([10.0, 10.0, 10.0, 10.1])
    assert [pace.admit_at(100, 10.35) for _ in range(3)] == pytest.approx([10.35, 10.35, 10.4])
    assert [pace.admit_at(100, 99.0) for _ in range(4)] == pytest.approx([99.0, 99.0, 99.0, 99.1])


def test_a_line_that_was_measured_low_is_found_out_in_a_few_bursts() -> None:
    pace, line, shown, bursts = LinePace(), 2e6, 1e6, 0
    while shown < 0.99 * line:
        pace.follow(shown, 0.0, 0.0)
        shown, bursts = min(line, pace.bytes_per_s), bursts + 1
    assert bursts <= 4
    pace.follow(shown * 0.99, 0.0, 0.0)
    assert pace.bytes_per_s == pytest.approx(1.2 * 0.99 * line)  # full: turns bind again
    pace.follow(0.0, 0.0, 0.0)
    assert not pace.bytes_per_s
    pace.follow(FAST_BYTES_PER_S, 0.0, 0.0)
    assert not pace.bytes_per_s


async def test_bulk_over_far_ways_takes_turns_on_a_line_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.links.time", Hands())
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, _):
        grpc.is_far = True
        links._meter.bytes_per_s = 1e5
        for peer in (B, C):
            for _ in range(4):
                links.post(peer, bytes(10_000), bulk=True)
        await turns(100)
        assert len(grpc.sent) == 2  # what may be caught up with; the others' turns are yet to come
        links.post(C, b"control", bulk=False)
        await turns()
        assert grpc.sent[2:] == [b"control"]


async def test_who_loads_a_state_over_a_far_way_takes_no_turns_from_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.links.time", Hands())
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, _):
        grpc.is_far = True
        links._meter.bytes_per_s = 1e6
        for _ in range(4):
            links.post(B, bytes(MAX_DATA_BYTES), bulk=True, served=True)
        await turns(50)
        links.post(C, bytes(PIECE_UNIT_BYTES), bulk=True)
        await turns(50)
        assert len(grpc.sent[-1]) == PIECE_UNIT_BYTES


@pytest.mark.parametrize("size_bytes", [PIECE_UNIT_BYTES, MAX_DATA_BYTES // 4])
@pytest.mark.parametrize("low", [2e4, 1e5])
async def test_turns_never_hold_a_line_that_was_measured_low_for_long(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, low: float
) -> None:
    """Fifty exchanges of 2 MB, message after message, over a line of 1 MB/s."""
    clock, line = Hands(), 1e6
    monkeypatch.setattr("p2p_co2.node.links.time", clock)
    far = FakeCarrier("grpc")
    far.is_far = True
    async with links_over(far) as (links, _):
        links._meter._seen[B] = Opinion((low,), clock.now, is_rough=False)
        links._meter.bytes_per_s = low
        lane = Lane(link=FakeLink(far, B))
        for _ in range(50):
            for _ in range(4 * MAX_DATA_BYTES // size_bytes):
                lane.bulk.append(Bulk(bytes(size_bytes), None))
                while (wait_s := links._wait_s(B, lane, clock.now)) > 0:
                    clock.now += wait_s
                links._next_bulk(lane)
                links._meter.started(clock.now)
                clock.now += size_bytes / line
                links._meter.finished(B, size_bytes, clock.now)
            clock.now += 5.0
        assert links.upload_bytes_per_s == pytest.approx(line)


@pytest.mark.parametrize(("is_far", "line"), [(False, 1e-3), (True, FAST_BYTES_PER_S), (True, 0.0)])
async def test_near_ways_and_lines_that_are_fast_or_not_known_need_no_turns(
    is_far: bool, line: float
) -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, _):
        grpc.is_far = is_far
        links._meter.bytes_per_s = line
        for peer in (B, B, C, C):
            links.post(peer, b"bulk", bulk=True)
        await turns(100)
        assert grpc.sent == [b"bulk"] * 4


def test_no_rate_is_no_limit() -> None:
    assert [Pace().admit_at(1 << 30, 5.0) for _ in range(3)] == [5.0, 5.0, 5.0]
