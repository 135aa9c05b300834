"""Lanes that share a line: whose turn it is, when the line is eased, and how fast a link is told to be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from p2p_co2.net.transport.flow import Acknowledged, Seen
from p2p_co2.node.envelope import unsent
from p2p_co2.node.lanes import BeginOrder, Bulk, Lane, LineTurns, Piece
from p2p_co2.node.meter import FAST_BYTES_PER_S, LinePace, UploadMeter
from p2p_co2.protocol.wire.bulk import with_data
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Mean
from tests.made_links import B, C, FakeCarrier, FakeLink, Hands, links_over, turns
from tests.test_node import burst


def test_a_line_with_a_queue_before_it_is_eased_until_it_is_gone() -> None:
    pace = LinePace()
    for queued_s, times in ((0.0, 1.2), (0.2, 0.95), (0.05, 1.2)):
        assert pace.follow(1e6, queued_s, 0.0) == (times < 1)
        assert pace.bytes_per_s == pytest.approx(times * 1e6)
    pace.follow(12e6, 0.0, 0.0)  # a line of 100 Mbit/s
    assert pace.turn_s(500_000) == pytest.approx(0.5 / 12 / 1.2)
    for not_to_be_held in (0.0, FAST_BYTES_PER_S):
        assert not pace.follow(not_to_be_held, 9.0, 0.0)
        assert not pace.bytes_per_s


@pytest.mark.parametrize("measured", [0.8, 1.0, 1.15])
def test_the_queue_goes_whatever_a_line_was_measured_to_be(measured: float) -> None:
    pace, queued_bytes, now, waits_s, carried_bytes = LinePace(), 200_000.0, 0.0, [], 0.0
    while now < 6.0:  # of a line of 1 MB/s that is never without something to carry
        pace.follow(measured * 1e6, queued_bytes / 1e6, now)
        now += 0.01
        sent_bytes = 0.01 * pace.bytes_per_s
        carried_bytes += min(1e4, queued_bytes + sent_bytes)
        queued_bytes = min(200_000.0, max(0.0, queued_bytes + sent_bytes - 1e4))  # the router's room
        waits_s.append(queued_bytes / 1e6)
    assert max(waits_s[300:]) < 0.07
    assert carried_bytes > (0.95 if measured == 0.8 else 0.99) * 6e6


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
            if pace.follow(meter.bytes_per_s, waits_s, now):
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


def test_a_line_is_what_receivers_acknowledge_while_it_is_full_not_what_buffers_take() -> None:
    meter = UploadMeter()
    for number, full_s in enumerate((0.0, 0.0, 1.0, 1.0, 1.0)):
        now = 1000.0 + 10 * number
        for part in range(40):
            meter.started(now)
            is_full = part * 0.05 >= 2.0 - full_s
            meter.came(50_000 if is_full else 40_000, 0.05, is_full, now + 0.05)
            now += 0.05
            meter.finished("b", 250_000 if part > 35 else 20_000, now)  # buffers take it all at the end
        assert meter.rest(now + 1)
        assert meter.bytes_per_s == pytest.approx(
            1e6 if number > 2 else 0.8e6, rel=0.3 if number == 2 else 0.01
        )


@pytest.mark.parametrize(
    ("share_that_came", "may_ease"), [(0.97, [True] * 8), (0.88, [True] * 3 + [False] * 5)]
)
def test_who_is_eased_need_not_fill_the_line_to_know_it_where_more_comes_than_is_sent(
    share_that_came: float, may_ease: list[bool]
) -> None:
    meter, seen = UploadMeter(), []
    for number in range(9):
        now = 1000.0 + 10 * number
        if number:
            meter.eased(now)
        for _ in range(40):
            meter.started(now)
            meter.came(50_000 if not number else int(share_that_came * 50_000), 0.05, True, now + 0.05)
            now += 0.05
            meter.finished("b", 40_000, now)
        assert meter.rest(now + 1)
        seen.append(meter.may_ease)
        assert meter.bytes_per_s == pytest.approx(1e6, rel=0.04)
    assert seen[1:] == may_ease


def test_too_little_seen_of_a_burst_says_nothing_of_the_line() -> None:
    meter = UploadMeter()
    meter.started(1000.0)
    meter.came(10_000, 0.4, True, 1000.4)
    meter.finished("b", 500_000, 1000.5)
    meter.started(1000.5)
    meter.finished("b", 500_000, 1001.0)
    assert meter.rest(1002.0)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.01)


async def test_what_came_is_counted_of_connections_that_were_seen_before() -> None:
    came: list[tuple[int, bool]] = []

    class Told(UploadMeter):
        def came(self, size_bytes: int, took_s: float, is_full: bool, now: float) -> None:
            assert took_s == pytest.approx(0.05)
            came.append((size_bytes, is_full))

    grpc, meter = FakeCarrier("grpc"), Told()
    grpc.is_far, meter.bytes_per_s = True, 1e6
    first, second, beside = FakeLink(grpc, B), FakeLink(grpc, C), FakeLink(grpc, C)
    lanes = {B: Lane(link=first, carrying=1), C: Lane(link=second)}  # the line may still carry what C gets
    line_turns = LineTurns(lanes, meter)

    def look(at: float, first_bytes: int, second_bytes: int, beside_bytes: int, waits_s: float) -> None:
        first.there_bytes, second.there_bytes, beside.there_bytes = first_bytes, second_bytes, beside_bytes
        first.queued_s = second.queued_s = beside.queued_s = waits_s
        line_turns.ask(lanes[B], 16_000, at)

    look(5.0, 1_000, 500, 0, 0.1)
    look(5.05, 31_000, 10_500, 0, 0.1)
    lanes[C].link_beside = beside
    look(5.1, 61_000, 20_500, 7_000, 0.0)  # the new one's bytes may be older
    look(5.15, 91_000, 20_500, 9_000, 0.1)
    lanes[C].link_beside = None
    look(5.2, 91_000, 0, 0, 0.1)  # C's kernel does not say any more
    look(5.22, 96_000, 0, 0, 0.1)  # too soon
    look(7.0, 996_000, 0, 0, 0.1)  # after a pause
    assert came == [(40_000, True), (40_000, False), (32_000, False), (0, True)]


async def test_what_came_is_not_the_line_beside_bulk_that_the_kernel_does_not_tell_of() -> None:
    came: list[int] = []

    class Told(UploadMeter):
        def came(self, size_bytes: int, took_s: float, is_full: bool, now: float) -> None:
            came.append(size_bytes)

    grpc, libp2p, meter = FakeCarrier("grpc"), FakeCarrier("libp2p"), Told()
    grpc.is_far, meter.bytes_per_s = True, 1e6
    first, relayed = FakeLink(grpc, B), FakeLink(libp2p, C)
    relayed.acknowledged = Acknowledged()
    lanes = {B: Lane(link=first, carrying=1), C: Lane(link=relayed)}
    line_turns = LineTurns(lanes, meter)
    for number, relays in enumerate((0, 0, 1, 1, 0)):
        lanes[C].carrying = relays
        first.there_bytes += 10_000 * (number + 1)
        line_turns.ask(lanes[B], 16_000, 5.0 + 0.05 * number)
    assert came == [20_000, 50_000]


@pytest.mark.parametrize("has_queue", [False, True])
def test_a_receiver_that_reads_slowly_does_not_make_the_line_seem_slower(has_queue: bool) -> None:
    meter, message_bytes = UploadMeter(), 16_384
    for number in range(6):
        now = 1000.0 + 100 * number
        for step in range(100):  # "d" goes on alone, behind a queue of its own
            sent = "bbbcccd" if step < 25 else "d"
            for to in sent:
                meter.started(now)
                meter.finished(to, message_bytes, now + 0.05)
            now += 0.05
            meter.came(len(sent) * message_bytes, 0.05, has_queue and step >= 25, now)
        assert meter.rest(now + 1)
        assert meter.bytes_per_s == pytest.approx(7 * message_bytes / 0.05, rel=0.1)


def test_a_long_way_does_not_make_the_line_seem_slower_from_burst_to_burst() -> None:
    meter, trip_s = UploadMeter(), 0.3
    burst(meter, 1_000_000, 1000.0, 1.0)
    for number in range(30):
        now = 2000.0 + 10 * number
        meter.rest(now)
        pace, looked_at, sent, seen = 1.2 * meter.bytes_per_s, now, deque[float](), 0
        for _ in range(92):  # 1.5 MB over a line that has room for more
            meter.started(now)
            now += 16_384 / pace
            sent.append(now)
            meter.finished("b", 16_384, now)
            if now - looked_at >= 0.04:
                there = sum(at + trip_s <= now for at in sent)
                meter.came(16_384 * (there - seen), now - looked_at, False, now)
                looked_at, seen = now, there
        assert meter.rest(now + 1)
        if meter.bytes_per_s > 2e6:
            return
    pytest.fail(f"{meter.bytes_per_s:.0f} after 30 bursts at 1.2 of what was shown")


async def test_a_connection_that_crawls_begins_anew() -> None:
    grpc, meter = FakeCarrier("grpc"), UploadMeter()
    grpc.is_far, meter.bytes_per_s = True, 1.6e6  # so 0.8 MB/s for each lane with bulk, and 0.1 crawl
    told = {B: (0.09e6, 0.5e6), C: (0.0, 0.11e6), PeerId("d"): (0.01e6, 0.01e6)}
    lanes = {}
    for peer, rates in told.items():
        links = [FakeLink(grpc, peer) for _ in rates]
        for link, rate in zip(links, rates, strict=True):
            link.at_most_bytes_per_s = rate
        bulk = deque([Bulk(b"", None)] if peer in (B, C) else [])
        lanes[peer] = Lane(link=links[0], link_beside=links[1], bulk=bulk, carrying=1)
    LineTurns(lanes, meter).ask(lanes[B], 16_000, 5.0)
    began = {
        peer: [link.began_anew for link in lane.links if isinstance(link, FakeLink)]
        for peer, lane in lanes.items()
    }
    assert began == {B: [[5.0], []], C: [[], []], PeerId("d"): [[], []]}  # what is unknown may be fast


async def test_few_of_many_lanes_are_asked_what_waits_before_the_line() -> None:
    looked: list[int] = []

    class Looked(FakeLink):
        def look(self) -> Seen:
            looked.append(1)
            return Seen(0.2)

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


@pytest.mark.parametrize(
    ("waits_s", "is_eased"),
    [
        ("0.5", True),
        ("0.5 0.5 0.0", False),  # two ways that are long by themselves
        ("0.5 0.4 0.3", True),
        ("0.5 0.4/0.0 0.3", False),  # the second connection of one does not wait
        ("0.5 0.4/- 0.3", True),
        ("-/0.5 0.4/- 0.3", True),
        ("- - -", False),
        ("0.5 0.5 0.5 0.0", True),  # one of many is left out
        ("0.5 0.5 0.0 0.0", False),
    ],
)
async def test_only_what_waits_on_all_ways_waits_before_the_line(waits_s: str, is_eased: bool) -> None:
    grpc, meter = FakeCarrier("grpc"), UploadMeter()
    grpc.is_far, meter.bytes_per_s = True, 1e6
    lanes = {}
    for name, told in zip("bcde", waits_s.split(), strict=False):
        peer = PeerId(name)
        links = [FakeLink(grpc, peer) for _ in told.split("/")]
        for link, queued_s in zip(links, told.split("/"), strict=True):
            link.queued_s = None if queued_s == "-" else float(queued_s)
        lanes[peer] = Lane(link=links[0], link_beside=links[1] if len(links) > 1 else None, carrying=1)
    line_turns = LineTurns(lanes, meter)
    assert line_turns.ask(lanes[B], 16_000, 5.0) == (5.0, True)
    assert (line_turns._line.bytes_per_s < 1e6) == is_eased


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


async def test_data_that_waits_is_joined_as_it_is_sent_and_once_for_all_who_take_it_then() -> None:
    """Else each waits beside what it was taken from, in pieces that leave holes in the allocator's arena."""
    payload, grpc = bytearray(16384), FakeCarrier("grpc")
    grpc.gate.clear()
    async with links_over(grpc, known=(B, C)) as (links, _):
        mean = unsent(with_data(Mean(part=1), memoryview(payload)), b"")
        for peer in (B, C):
            links.post(peer, b"on its way", bulk=True)
            await turns()
            links.post(peer, mean, bulk=True)
            links.post(peer, b"behind it", bulk=True)
        payload[:] = b"x" * len(payload)  # as nobody does
        grpc.gate.set()
        await links.drain(10.0)
        sent = [data for data in grpc.sent if data not in (b"on its way", b"behind it")]
        assert len(sent) == 2
        assert sent[0] is sent[1]
        assert sent[0].endswith(payload)
        assert links._joined_last == (None, b"")


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


def test_pieces_of_the_round_that_began_first_go_first_and_nothing_overtakes_what_is_no_piece() -> None:
    """Of two rounds on a full line one ends as soon as it would alone; a state that a newcomer loads is not
    put off for ever."""
    order, lane = BeginOrder(), Lane()
    first, second, third = (Piece(name, False) for name in (b"1", b"2", b"3"))
    means = Piece(b"1", True)
    for piece, data in (
        (first, b"a"), (second, b"c"), (second, b"d"), (means, b"b"), (None, b"e"), (third, b"g"),
        (means, b"f"),
    ):  # fmt: skip
        lane.put(Bulk(data, piece, order=order.of(piece)))
    lane.put(Bulk(b"0", second, order=order.of(second)), first=True)  # given back: it had its turn
    assert b"".join(bytes(message.data) for message in lane.bulk) == b"0abcdefg"
    assert lane.bulk_bytes == 8


def test_the_first_message_of_a_lane_keeps_its_turn() -> None:
    order, lane = BeginOrder(), Lane()
    order.of(Piece(b"1", False))
    for name in (b"2", b"2", b"1"):
        piece = Piece(name, False)
        lane.put(Bulk(name, piece, order=order.of(piece)))
    assert [message.data for message in lane.bulk] == [b"2", b"1", b"2"]
