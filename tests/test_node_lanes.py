"""Lanes that share a line: whose turn it is, when the line is eased, and how fast a link is told to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p_co2.node.lanes import Bulk, Lane, LineTurns, Piece
from p2p_co2.node.meter import FAST_BYTES_PER_S, LinePace, UploadMeter
from p2p_co2.wire.identity import PeerId
from tests.test_node import B, C, FakeCarrier, FakeLink, Hands, burst, links_over, turns


def test_a_line_with_a_queue_before_it_is_eased_until_it_is_gone() -> None:
    pace = LinePace()
    for queued_s, times in ((0.0, 1.2), (0.2, 0.95), (0.05, 1.2)):
        assert pace.follow(1e6, queued_s) == (times < 1)
        assert pace.bytes_per_s == pytest.approx(times * 1e6)
    for not_to_be_held in (0.0, FAST_BYTES_PER_S):
        assert not pace.follow(not_to_be_held, 9.0)
        assert not pace.bytes_per_s


def eased_bursts(meter: UploadMeter, bytes_per_s: float, count: int, since: float) -> None:
    for number in range(count):
        now = since + 10 * number
        for _ in range(20):
            meter.eased(now)
            meter.started(now)
            now += 50_000 / bytes_per_s
            meter.finished("b", 50_000, now)
        assert meter.rest(now + 1)


def test_who_leaves_others_room_on_a_line_does_not_find_it_slower_for_that() -> None:
    meter = UploadMeter()
    burst(meter, 1_000_000, 1000.0, 1.0)
    assert meter.rest(1010.0)
    shown = meter.bytes_per_s
    eased_bursts(meter, 0.95 * shown, 20, 2000.0)
    assert meter.bytes_per_s == shown
    eased_bursts(meter, 0.5 * shown, 5, 3000.0)
    assert meter.bytes_per_s == pytest.approx(0.5 * shown, rel=0.05)  # that is the line's doing
    eased_bursts(meter, 2 * shown, 2, 4000.0)
    assert meter.bytes_per_s == pytest.approx(2 * shown, rel=0.05)


def exchanges(
    meter: UploadMeter, line_bytes_per_s: float, queued_s: Callable[[float], float], count: int, since: float
) -> None:
    """Bursts of 2 MB over a line of this rate, at the pace that the meter asks for; ``queued_s``: at a pace,
    what waits before the line."""
    pace, now = LinePace(), since
    for _ in range(count):
        meter.rest(now)
        free_at = now
        for number in range(120):
            waits_s = queued_s(pace.bytes_per_s) if meter.may_ease else 0.0
            if pace.follow(meter.bytes_per_s, waits_s):
                meter.eased(now)
            at = pace.admit_at(16_384, now)
            meter.held(now, at)
            meter.started(max(now, at))
            free_at = max(free_at, now, at) + 16_384 / line_bytes_per_s
            now = max(now, at, free_at - 32_768 / line_bytes_per_s)
            meter.finished("bcd"[number % 3], 16_384, max(now, free_at))
        now = free_at + 5.0
    meter.rest(now)


def test_a_line_is_measured_though_a_queue_stands_before_it_for_good() -> None:
    meter = UploadMeter()
    exchanges(meter, 1e6, lambda pace: 0.0, 6, 1000.0)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.02)
    exchanges(meter, 1e6, lambda pace: 0.08, 60, 2000.0)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.02)
    exchanges(meter, 0.35e6, lambda pace: 0.08, 8, 4000.0)  # others have most of it
    assert meter.bytes_per_s == pytest.approx(0.35e6, rel=0.02)
    exchanges(meter, 1e6, lambda pace: 0.08, 60, 6000.0)  # they have gone, the queue is another's
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.02)
    exchanges(meter, 0.78e6, lambda pace: 0.3 if pace > 0.78e6 else 0.0, 25, 8000.0)
    assert meter.bytes_per_s == pytest.approx(0.78e6, rel=0.02)


async def test_few_of_many_lanes_are_asked_what_waits_before_the_line() -> None:
    looked: list[int] = []

    class Looked(FakeLink):
        @property
        def queued_s(self) -> float:
            looked.append(1)
            return 0.2

        @queued_s.setter
        def queued_s(self, value: float) -> None: ...

    grpc, meter = FakeCarrier("grpc"), UploadMeter()
    grpc.is_far, meter.bytes_per_s = True, 1e6
    for count, looks in ((0, 0), (1, 1), (9, 9), (10, 5), (63, 9)):
        peers = [PeerId(f"{number}") for number in range(count)]
        lanes = {peer: Lane(link=Looked(grpc, peer), carrying=1) for peer in peers}
        looked.clear()
        LineTurns(lanes, meter).ask(lanes.get(PeerId("0"), Lane()), 16_000, 5.0)
        assert len(looked) == looks


async def test_a_lane_with_less_left_leaves_turns_to_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = Hands()
    monkeypatch.setattr("p2p_co2.node.links.time", hands)
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, _):
        grpc.is_far = True
        links._meter.bytes_per_s = 1e5
        for peer, count in ((B, 12), (C, 5)):
            for _ in range(count):
                links.post(peer, peer.encode() * 12_000, bulk=True)
        for _ in range(400):
            await turns(5)
            for lane in links._lanes.values():
                lane.wake.set()
            hands.now += 0.005
        order = "".join(data[:1].decode() for data in grpc.sent)
        assert sorted(order) == sorted("b" * 12 + "c" * 5)
        assert set(order[-4:]) == {"b", "c"}  # they end together
        assert order[:9].count("b") >= 6
        assert "c" in order[:9]  # nor does who has less wait for long


@pytest.mark.parametrize(("waits_s", "is_eased"), [((0.5, 0.0, 0.0), False), ((0.5, 0.4, 0.0), True)])
async def test_one_way_that_is_long_by_itself_eases_no_line(
    waits_s: tuple[float, ...], is_eased: bool
) -> None:
    grpc, meter = FakeCarrier("grpc"), UploadMeter()
    grpc.is_far, meter.bytes_per_s = True, 1e6
    lanes = {PeerId(name): Lane(link=FakeLink(grpc, PeerId(name)), carrying=1) for name in "bcd"}
    for lane, queued_s in zip(lanes.values(), waits_s, strict=True):
        assert isinstance(lane.link, FakeLink)
        lane.link.queued_s = queued_s
    line_turns = LineTurns(lanes, meter)
    assert line_turns.ask(lanes[B], 16_000, 5.0) == (5.0, True)
    assert line_turns._line.bytes_per_s == pytest.approx((0.95 if is_eased else 1.2) * 1e6)


async def test_a_link_is_as_fast_as_its_turns_and_time_without_bulk_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = Hands()
    monkeypatch.setattr("p2p_co2.node.links.time", hands)
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, _):
        grpc.is_far = True
        links._meter.bytes_per_s = 1e5  # so 1.2e5 for both, and the carrier takes all at once
        for _ in range(2):
            hands.now += 100.0  # with nothing to carry
            for peer in (B, C):
                for _ in range(8):
                    links.post(peer, bytes(12_000), bulk=True)
            for _ in range(200):
                await turns(5)
                links._lanes[B].wake.set()
                links._lanes[C].wake.set()
                hands.now += 0.01
        assert len(grpc.sent) == 32
        # Of each burst two go at once (``LATE_S``), the others in turns of 0.1 s.
        assert [links.traffic[peer].bulk_bytes for peer in (B, C)] == [16 * 12_000] * 2
        took_s = sorted(links.traffic[peer].bulk_s for peer in (B, C))
        assert took_s[1] == pytest.approx(2 * 1.4, abs=0.05)
        assert 2 * 1.1 - 0.05 < took_s[0] < took_s[1]


async def test_what_nobody_needs_any_more_is_not_sent() -> None:
    grpc = FakeCarrier("grpc")
    grpc.gate.clear()
    async with links_over(grpc, known=(B, C)) as (links, _):
        for peer in (B, C):
            links.post(peer, b"on its way", bulk=True)
        await turns()
        for peer in (B, C):
            for attempt in (b"1", b"2"):
                links.post(peer, b"slice " + attempt, bulk=True, piece=Piece(attempt, False))
                links.post(peer, b"mean " + attempt, bulk=True, piece=Piece(attempt, True))
            links.post(peer, b"chunk", bulk=True, served=True)
        for peer in (B, C):
            links._lanes[peer].turn_at = links._lanes[peer].left_at = 1.0
        links.forget(b"1", means=False)
        assert {(lane.turn_at, lane.left_at) for lane in links._lanes.values()} == {
            (None, None)
        }  # of the dropped
        assert [one.data for one in links._lanes[B].bulk] == [b"mean 1", b"slice 2", b"mean 2", b"chunk"]
        links.forget(b"1", means=True)
        assert links._queued_bytes == 2 * len(b"slice 2mean 2chunk")
        grpc.gate.set()
        await links.drain(10.0)
        assert sorted(grpc.sent) == sorted(2 * [b"on its way", b"slice 2", b"mean 2", b"chunk"])
        assert links._queued_bytes == links._lanes[B].bulk_bytes == 0


async def test_the_cap_is_not_spent_on_what_is_dropped() -> None:
    """Each lane's first message had its turn: an upload of 125 kB/s rested for 0.9 s, to 31 peers for 4."""
    peers = tuple(PeerId(letter * 4) for letter in "bcdefgh")
    async with links_over(FakeCarrier("grpc"), cap=125e3) as (links, _):
        for peer in peers:
            lane = links._lanes[peer] = Lane()
            for attempt in (b"old", b"old", b"new"):
                lane.bulk.append(Bulk(bytes(16384), Piece(attempt, False)))
            links._wait_s(peer, lane, 100.0)
        links.forget(b"old", means=True)
        waits_s = [links._wait_s(peer, links._lanes[peer], 100.0) for peer in peers]
        assert waits_s == pytest.approx([number * 16384 / 125e3 for number in range(len(peers))])
        links._lanes.clear()
