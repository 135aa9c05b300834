"""Links over carriers made for the purpose: choice, loss, bounds, priority, caps, turns, company."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2p_co2.net.transport.flow import LEAST_BYTES
from p2p_co2.node.links import (
    MAX_CONTROL_BYTES,
    MAX_QUEUED_BYTES,
    MAX_SERVED_BYTES,
    BeginOrder,
    Bulk,
    Lane,
    LinkObserver,
    LinkPool,
    Piece,
    Turn,
    Uplink,
)
from p2p_co2.node.meter import FAST_BYTES_PER_S
from p2p_co2.wire.envelope import unsent, with_data
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_FRAGMENTS
from p2p_co2.wire.messages_pb2 import Mean, PeerRecord
from tests.made_links import B, C, FakeCarrier, Hands, links_over, turns
from tests.transport_peers import PATIENCE_S, open_pair, until


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


async def test_a_peer_that_names_a_time_is_not_dialled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc, hands = FakeCarrier("grpc"), Hands()
    monkeypatch.setattr("p2p_co2.node.links.time", hands)
    async with links_over(grpc) as (links, heard):
        links.post(B, b"1", bulk=False)
        await turns()
        grpc.links[0].closed.set_result("the peer refused us: shut out: for 59 s more")
        for _ in range(50):
            links.post(B, b"2", bulk=False)
            await turns()
        assert (len(grpc.links), grpc.sent) == (1, [b"1"])
        assert heard.unreachable[-1] == (B, "it hears us no more for 59 s")
        hands.now += 60
        links.post(B, b"3", bulk=False)
        await turns()
        assert grpc.sent == [b"1", b"3"]


async def test_of_a_link_that_broke_nothing_is_left(tmp_path: Path) -> None:
    async with open_pair("grpc", tmp_path) as (a, b), asyncio.TaskGroup() as tasks:
        there, lost, records = PeerId(b.identity.peer_id), list[str](), [b.record]

        async def find(peer: PeerId, fresh: bool) -> PeerRecord | None:
            return records[0] if records else None

        observer = LinkObserver(lambda *_: None, lambda *of: lost.append(of[2]), lambda *_: None)
        links = LinkPool([a.carrier], find, observer, tasks, Uplink())
        links.post(there, b"x", bulk=False)
        await until(lambda: len(b.received) == 1)
        records.clear()  # so that it is not opened again
        await b.carrier.close()
        await until(lambda: bool(lost) and not a.carrier.links)
        await links.close()


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
    async with links_over(grpc, known=(B, C)) as (links, heard):
        links.set_paces({B: 1e-9})
        links.post(B, b"first of B", bulk=True)
        await turns()
        for number in range(500):
            assert links.post(B, b"%04d" % number, bulk=True)
            assert links.queued_bytes <= 500
        for number in range(50):
            assert links.post(C, b"C%03d" % number, bulk=True)
        await turns(200)
        assert [data for data in grpc.sent if data.startswith(b"C")] == [b"C%03d" % n for n in range(50)]
        lane = heard.uplink.lanes[0]
        assert lane.bulk[-1].data == b"0499"  # the oldest went
        assert links.queued_bytes == lane.bulk_bytes == sum(len(one.data) for one in lane.bulk)


async def test_what_a_peer_asks_for_has_room_whatever_of_our_rounds_waits_for_it() -> None:
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
        assert links.queued_bytes == 0
        assert links.post(B, chunk, bulk=True, served=True)
        await links.drain(1.0)


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


async def test_what_a_peer_says_it_has_is_what_was_sent() -> None:
    libp2p = FakeCarrier("libp2p", acknowledges=True)
    async with links_over(libp2p) as (links, heard):
        links.post(B, b"hello", bulk=False)
        await turns()
        said = libp2p.links[0].acknowledged
        assert said is not None
        for number in range(4):
            links.post(B, bytes([number]) * LEAST_BYTES, bulk=True)
        await turns()
        assert len(libp2p.sent) == 2  # no room for more until it is there
        links.post(B, b"ping", bulk=False)
        await turns()
        assert libp2p.sent[2:] == [b"ping"]
        assert links.traffic == {}
        said.hear(str(len(b"hello") + LEAST_BYTES).encode(), time.monotonic())
        await turns()
        assert (len(libp2p.sent), links.traffic[B].bulk_bytes) == (4, LEAST_BYTES)
        libp2p.acknowledges = False
        libp2p.links[0].closed.set_result("the peer is gone")  # with the rest under way
        await turns()
        assert heard.lost == [(B, "libp2p", "the peer is gone")]
        assert libp2p.sent[4:] == [bytes([2]) * LEAST_BYTES, bytes([3]) * LEAST_BYTES]  # over the next link


async def test_bulk_over_far_ways_takes_turns_on_a_line_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_co2.node.links.time", Hands())
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, heard):
        grpc.is_far = True
        heard.uplink.rate.bytes_per_s = 1e5
        for peer in (B, C):
            for _ in range(4):
                links.post(peer, bytes(10_000), bulk=True)
        await turns(100)
        assert len(grpc.sent) == 2  # what may be caught up with; the others' turns are yet to come
        links.post(C, b"control", bulk=False)
        await turns()
        assert grpc.sent[2:] == [b"control"]


@pytest.mark.parametrize(("others_s", "size_bytes"), [(0.0, 5_000), (0.0, 170_000), (0.3, 5_000)])
async def test_a_line_is_eased_while_our_queue_stands_before_it_and_never_for_good(
    others_s: float, size_bytes: int
) -> None:
    grpc, lane, uplink = FakeCarrier("grpc"), Lane(), Uplink()
    grpc.is_far = True
    link = await grpc.connect(PeerRecord(peer=B))
    lane.link = link  # type: ignore[assignment]
    uplink.lanes.append(lane)
    uplink.rate.bytes_per_s = 1e6
    lane.put(Bulk(bytes(size_bytes), None))  # type: ignore[arg-type]
    queues_s, sent_s = [0.0] * 20, 0.0
    for tick in range(1600):
        link.queued_s = others_s + queues_s[-20]  # a round trip ago
        queues_s.append(max(0.0, queues_s[-1] - 0.005))
        while queues_s[-1] < 1.0 and uplink.wait_s(lane, 0.0, 1000 + 0.005 * tick) <= 0:
            lane.turn, sent_s = Turn(), sent_s + size_bytes / 1e6
            queues_s[-1] += size_bytes / 1e6
    assert sent_s >= 8.0  # so a queue of others makes no line seem slower
    assert others_s or max(queues_s) < 0.4


async def test_links_at_rest_hide_neither_a_slower_line_nor_the_queue_before_it() -> None:
    """Of resting peers, of newcomers, of another stage's: 40 of them, and three that carry."""
    uplink, grpc = Uplink(), FakeCarrier("grpc")
    grpc.is_far = True
    for place in range(43):
        link = await grpc.connect(PeerRecord(peer=B))
        link.queued_s = 0.25 if place < 3 else None
        uplink.lanes.append(Lane(link=link))  # type: ignore[arg-type]
    uplink.rate.bytes_per_s = 4e6
    for lane in uplink.lanes[:3]:
        lane.put(Bulk(bytes(10_000), None))
    is_eased = False
    for tick in range(1000):  # a megabyte a second comes to be there
        uplink.watch(1000 + 0.01 * tick)
        for lane in uplink.lanes[:3]:
            lane.link.there_bytes += 3_333  # type: ignore[union-attr]
            if uplink.wait_s(lane, 0.0, 1000 + 0.01 * tick) <= 0:
                lane.turn = Turn()
            is_eased |= uplink._line.bytes_per_s < uplink.rate.bytes_per_s
    assert uplink.rate.bytes_per_s == pytest.approx(1e6, rel=0.1)
    assert is_eased


@pytest.mark.parametrize(("is_far", "line"), [(False, 1e-3), (True, FAST_BYTES_PER_S), (True, 0.0)])
async def test_near_ways_and_lines_that_are_fast_or_not_known_need_no_turns(
    is_far: bool, line: float
) -> None:
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, heard):
        grpc.is_far = is_far
        heard.uplink.rate.bytes_per_s = line
        for peer in (B, B, C, C):
            links.post(peer, b"bulk", bulk=True)
        await turns(100)
        assert grpc.sent == [b"bulk"] * 4


async def test_a_lane_with_less_left_leaves_turns_to_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = Hands()
    monkeypatch.setattr("p2p_co2.node.links.time", hands)
    grpc = FakeCarrier("grpc")
    async with links_over(grpc, known=(B, C)) as (links, heard):
        grpc.is_far = True
        heard.uplink.rate.bytes_per_s = 1e5
        for peer, count in ((B, 12), (C, 5)):
            for _ in range(count):
                links.post(peer, peer.encode() * 12_000, bulk=True)
        for _ in range(400):
            await turns(5)
            for lane in heard.uplink.lanes:
                lane.wake.set()
            hands.now += 0.005
        order = "".join(data[:1].decode() for data in grpc.sent)
        assert sorted(order) == sorted("b" * 12 + "c" * 5)
        assert set(order[-4:]) == {"b", "c"}  # they end together
        assert order[:9].count("b") >= 6
        assert "c" in order[:9]  # nor does who has less wait for long


async def test_what_nobody_needs_any_more_is_not_sent() -> None:
    grpc = FakeCarrier("grpc")
    grpc.gate.clear()
    async with links_over(grpc, known=(B, C)) as (links, heard):
        for peer in (B, C):
            links.post(peer, b"on its way", bulk=True)
        await turns()
        lanes = heard.uplink.lanes
        for peer in (B, C):
            for attempt in (b"1", b"2"):
                links.post(peer, b"slice " + attempt, bulk=True, piece=Piece(attempt, False))
                links.post(peer, b"mean " + attempt, bulk=True, piece=Piece(attempt, True))
            links.post(peer, b"chunk", bulk=True, served=True)
        for lane in lanes:
            lane.turn = Turn(at=1.0)
        links.forget(b"1", means=False)
        assert {lane.turn.at for lane in lanes} == {None}  # of the dropped
        assert [one.data for one in lanes[0].bulk] == [b"mean 1", b"slice 2", b"mean 2", b"chunk"]
        links.forget(b"1", means=True)
        assert links.queued_bytes == 2 * len(b"slice 2mean 2chunk")
        grpc.gate.set()
        await links.drain(10.0)
        assert sorted(grpc.sent) == sorted(2 * [b"on its way", b"slice 2", b"mean 2", b"chunk"])
        assert links.queued_bytes == lanes[0].bulk_bytes == 0


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
    assert b"".join(bytes(message.data) for message in lane.bulk) == b"abcdefg"
    assert lane.bulk_bytes == 7
    for number in range(MAX_FRAGMENTS):
        order.of(Piece(b"later %d" % number, False))
    assert order.of(first) > MAX_FRAGMENTS, "so many are remembered"


LINE_BYTES_PER_S = 250_000.0


PIECE_BYTES, PIECES = 16 << 10, 32


class ThinLine:
    """A way to ``port`` on this machine that carries ``LINE_BYTES_PER_S`` and holds little."""

    def __init__(self, port: int) -> None:
        self._port, self.port = port, 0
        self.marks: list[tuple[float, int]] = [(0.0, 0)]
        """(when, bytes carried there by then)"""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        async with await asyncio.start_server(self._carry, sock=listener, limit=8 << 10):
            yield

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.closing(writer), contextlib.closing(other_writer):
            back = asyncio.create_task(_copy(other_reader, writer))
            free_at = time.monotonic()
            with contextlib.suppress(OSError):
                while data := await reader.read(2 << 10):
                    free_at = max(free_at, time.monotonic()) + len(data) / LINE_BYTES_PER_S
                    await asyncio.sleep(free_at - time.monotonic())
                    other_writer.write(data)
                    self.marks.append((time.monotonic(), self.marks[-1][1] + len(data)))
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    @property
    def bytes_per_s(self) -> float:
        """Of all that it has carried: less than it can on a busy machine."""
        (began_at, _), (ended_at, carried) = self.marks[1], self.marks[-1]
        return carried / (ended_at - began_at)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)


async def test_a_claimed_upload_is_the_lines_and_a_heartbeat_does_not_wait_behind_bulk(
    tmp_path: Path,
) -> None:
    async with open_pair("libp2p", tmp_path) as (a, b):
        line = ThinLine(int(b.record.maddrs[0].split("/tcp/")[1].split("/")[0]))
        async with line.open(), asyncio.TaskGroup() as tasks:
            there = b.identity.peer_id
            record = PeerRecord(peer=there, maddrs=[f"/ip4/127.0.0.1/tcp/{line.port}/p2p/{there}"])

            async def find(peer: PeerId, fresh: bool) -> PeerRecord | None:
                return record

            observer = LinkObserver(lambda *_: None, lambda *_: None, lambda *_: None)
            links = LinkPool([a.carrier], find, observer, tasks, Uplink())
            for _ in range(PIECES):
                links.post(there, bytes(PIECE_BYTES), bulk=True)
            await until(lambda: len(b.received) >= 4)
            links.post(there, b"heartbeat", bulk=False)
            await until(lambda: (a.identity.peer_id, b"heartbeat") in b.received)
            assert len(b.received) < 20  # it did not wait behind what the daemon would have taken
            await until(lambda: len(b.received) == PIECES + 1)
            carried_bytes_per_s = line.bytes_per_s
            async with asyncio.timeout(PATIENCE_S):
                while not links.upload_bytes_per_s:  # told when the next burst begins
                    links.post(there, b"next", bulk=True)
                    await asyncio.sleep(0.2)
            claimed = links.upload_bytes_per_s
            await links.close()
        # The later half is measured: a machine that stands still then, or before, moves it so far at most.
        assert 0.5 * carried_bytes_per_s < claimed < 1.5 * LINE_BYTES_PER_S


async def test_microbatches_go_before_a_round_which_keeps_one_turn_in_eight() -> None:
    """On a line that both fill: the round is not starved, and nothing is while the other lane has no link."""
    link = await FakeCarrier("grpc").connect(PeerRecord(peer=B))
    link.is_far = True
    uplink, sent = Uplink(), {True: 0, False: 0}
    uplink.rate.bytes_per_s = 1e6
    lanes = [Lane(is_urgent=urgent, link=link) for urgent in (True, False)]  # type: ignore[arg-type]
    uplink.lanes.extend(lanes)
    for lane in lanes:
        lane.put(Bulk(bytes(10_000), None))
    for tick in range(20_000):
        for lane in lanes:
            if uplink.wait_s(lane, 0.0, 1000 + 0.001 * tick) <= 0:
                lane.turn, sent[lane.is_urgent] = Turn(yielded=lane.turn.yielded), sent[lane.is_urgent] + 1
    assert sent[True] > 4 * sent[False] > 0
    assert sent[False] >= sum(sent.values()) // 16
    lanes[0].link = None
    before = sent[False]
    for tick in range(20_000, 22_000):
        if uplink.wait_s(lanes[1], 0.0, 1000 + 0.001 * tick) <= 0:
            lanes[1].turn, sent[False] = Turn(yielded=lanes[1].turn.yielded), sent[False] + 1
    assert sent[False] - before > 150
