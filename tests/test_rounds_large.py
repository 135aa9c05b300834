"""Rounds of large payloads on slow lines: deadlines follow the bytes, the lines and the length of a round."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import PayloadShape, bounds
from p2p_co2.protocol.rounds.attempt import read_begin
from p2p_co2.protocol.rounds.cells import slot_ranges
from p2p_co2.protocol.rounds.deadline import SAFETY, Durations, parts_deadline_s
from p2p_co2.protocol.rounds.events import ReduceWanted
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.protocol.rounds.parts import Rates, divide_slots
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.simnet import EventLog, Settings
from p2p_co2.simnet import Swarm as SimulatedSwarm
from p2p_co2.telemetry.events import Event, RoundAborted, RoundBegan, RoundCommitted
from tests.round_network import Network

PEERS = 6


@pytest.mark.parametrize("cells", [1, 2])
def test_the_first_round_of_a_large_payload_commits_at_the_first_try(cells: int) -> None:
    """10 MB each on lines of 2.5 MB/s that nobody has measured yet."""
    clock = ClockConfig(mode="time", round_s=60.0, rounds=1)
    run = RunConfig(name="large", fragments=1, clock=clock, cells=cells, group_size=64 if cells > 1 else 32)
    events: list[Event] = []
    log = EventLog()
    log.readers.append(events.append)
    settings = Settings(
        run=run, peers=PEERS, seed=1, profile="dsl", blocks=(16,), real_bytes_per_block=1e7 / 16, step_s=2.0
    )
    result = SimulatedSwarm(settings, log).run()
    began = [event for event in events if isinstance(event, RoundBegan)]
    assert not [event for event in events if isinstance(event, RoundAborted)]
    assert sum(isinstance(event, RoundCommitted) for event in events) == PEERS
    assert len(set(result.digests.values())) == 1
    # (1 + (members - 2) / members) payloads at 1 MB/s, four times: 40 s for two members, 66.7 for six.
    expected = [SAFETY * 10.0 * (2 - 2 / len(event.group)) for event in began]
    assert [event.parts_deadline_s for event in began] == pytest.approx(expected)


def test_slices_are_waited_for_as_long_as_a_round_where_rounds_are_long() -> None:
    short, long = PayloadShape(8, (16,), round_s=20.0), PayloadShape(8, (16,), round_s=3600.0)
    assert (short.parts_cap_s, short.round_cap_s) == (bounds.PARTS_CAP_S, bounds.ROUND_CAP_S)
    assert (long.parts_cap_s, long.round_cap_s) == (3600.0, 6 * 3600.0)
    assert parts_deadline_s(400.0, Durations(), short.parts_cap_s) == 300.0
    assert parts_deadline_s(400.0, Durations(), long.parts_cap_s) == 1600.0
    liar = Durations()
    liar.add(1e9)
    assert parts_deadline_s(400.0, liar, long.parts_cap_s) == 3600.0
    assert parts_deadline_s(1e9, Durations(), long.parts_cap_s) == 3600.0


@pytest.mark.parametrize("round_s", [0.0, 3600.0])
def test_a_begin_that_asks_for_more_than_the_runs_cap_is_refused(round_s: float) -> None:
    net = Network(2, shape=PayloadShape(8, (16,), round_s=round_s))
    net.offer_all()
    net.run(15.0)
    begin, sender = next((m, source) for source, _, m in net.sent if isinstance(m, wire.Begin))
    cap_s = net.shape.parts_cap_s
    begin.parts_within_s = cap_s
    read_begin(begin, sender, net.shape)
    begin.parts_within_s = cap_s + 1
    with pytest.raises(RemoteProtocolError, match="impossible duration"):
        read_begin(begin, sender, net.shape)


def test_the_exchange_among_cells_has_the_time_that_its_sums_need() -> None:
    """Two owners of 100 slots of 1000 bytes, 8000 as fp32, at 10 and 20 kB/s: the faster one has the more."""
    slots = slot_ranges(64)
    rates = {PeerId("a"): Rates(10_000.0), PeerId("b"): Rates(20_000.0)}
    division = divide_slots(slots, 1000, 8000, rates, (0, 1), 0.0)
    loads = {peer: division.owners.count(peer) * 9000 for peer in rates}
    assert loads[PeerId("a")] + loads[PeerId("b")] == 64 * 9000
    assert division.sums_s == max(loads[peer] / rates[peer].upload for peer in rates)
    assert division.sums_s > 3 * division.transfer_s  # in a small cell sums weigh more than all slices
    alone = divide_slots(slots, 1000, 8000, {PeerId("a"): Rates(10_000.0)}, (0, 1), 0.0)
    assert alone.sums_s == 57.6


def test_a_council_is_told_what_the_sums_of_a_small_cell_need() -> None:
    net = Network(6, shape=PayloadShape(1000, (64,), 8000), cells=2)
    net.uploads = dict.fromkeys(net.names, 10_000.0)
    net.tell_everybody()
    net.on_reduce = lambda peer, job: False  # toy means are as large as payloads
    net.offer_all()
    net.run(40.0)
    told = [message for _, _, message in net.sent if isinstance(message, wire.CellReady)]
    assert told
    for message in told:
        most = max(Counter(message.owners).values())
        assert message.parts_within_s == pytest.approx(SAFETY * most * 0.9 / 2)


def test_a_slot_that_comes_back_to_its_owner_is_given_once() -> None:
    """Else a root, which may be the same peer, is told two means by one giver, and calls that a lie."""
    net = Network(12, shape=PayloadShape(8, (24,), 8), cells=3)
    net.offer_all()
    net.run(60.0)
    begins = [(source, m) for source, _, m in net.sent if isinstance(m, wire.Begin)]
    attempts = [read_begin(message, source, net.shape, 3) for source, message in begins]
    attempt, slot = next(
        (attempt, slot)
        for attempt in attempts
        for slot, owner in enumerate(attempt.owners)
        if attempt.council is not None and attempt.council.roots[slot].peers == [owner]
    )
    me, members = attempt.owners[slot], list(attempt.shares)
    swarm, outlet = Swarm(me, net.shape, 32, 3), Outlet(me)
    exchange = Exchange(attempt, swarm, outlet, 0.0)
    first = tuple((peer, attempt.shares[peer].weight) for peer in members)
    assert exchange.give(slot, b"\1" * 8, first) is None
    given = outlet.loop.popleft()
    assert isinstance(given, wire.CellPart)
    exchange.cell_part(given, me)
    assert exchange.give(slot, b"\2" * 8, first[:1]) is None
    assert not outlet.loop
    assert not outlet.messages
    exchange.handle_timer(1e6)
    wanted = outlet.events.pop()
    assert isinstance(wanted, ReduceWanted)
    assert [bytes(piece.data) for piece in wanted.job.slices] == [b"\1" * 8]
    exchange.reduced(wanted.job, b"\3" * 8)
    mean = outlet.loop.popleft()
    assert isinstance(mean, wire.CellMean)
    exchange.cell_mean(mean, me)
    joined = exchange.give(slot, b"\2" * 8, first[:1])
    assert joined is not None
    assert (bytes(joined[0]), joined[1]) == (b"\3" * 8, tuple(members))
