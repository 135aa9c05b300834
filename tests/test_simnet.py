"""The simulated swarm: same seed, same events; calm runs keep every law; planted bugs are caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.node.lanes import Piece
from p2p_co2.node.links import MAX_SERVED_BYTES, LinkObserver
from p2p_co2.planning.profiles import profile_of
from p2p_co2.planning.traffic import payload_bytes
from p2p_co2.protocol.schedule import STILL_LOADS
from p2p_co2.protocol.wire.envelope import Opened, enveloped
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import PROTOCOL_VERSION
from p2p_co2.protocol.wire.messages_pb2 import Envelope, Part, PeerRecord
from p2p_co2.simnet import EventLog, Settings, Storm, Swarm, simulate
from p2p_co2.simnet.campaign import storm_settings
from p2p_co2.simnet.internet import CONNECT_PATIENCE_S, Endpoint, Internet, Path
from p2p_co2.simnet.laws import Auditor, Books
from p2p_co2.simnet.ledger import CountingLedger, Saved, State, starts
from p2p_co2.simnet.links import VirtualLinks
from p2p_co2.simnet.parcel import Parcel
from p2p_co2.simnet.rendezvous import Rendezvous
from p2p_co2.simnet.virtual_time import VirtualTime
from p2p_co2.simnet.work import Work
from p2p_co2.telemetry.events import (
    CaughtUp,
    Event,
    PeerFinished,
    PeerLeft,
    RoundCommitted,
    TrainingEnded,
    Warned,
)

ROUND_S = 4.0


def run_of(rounds: int = 4, fragments: int = 2) -> RunConfig:
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=rounds)
    return RunConfig(name="simulated", fragments=fragments, clock=clock)


def test_a_calm_swarm_keeps_every_law_and_ends_with_one_state() -> None:
    result = simulate(Settings(run=run_of(), peers=6, seed=3))
    assert result.violations == []
    assert len(result.digests) == 6
    assert len(set(result.digests.values())) == 1
    assert result.forks == 0
    assert result.counts["round_committed"] >= 6 * 6
    assert result.written_off == {}


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    first, again, other = (simulate(Settings(run=run_of(2), peers=5, seed=seed)) for seed in (1, 1, 2))
    assert first.digest == again.digest
    assert first.digest != other.digest


def test_messages_that_many_receive_are_read_once_and_never_written_to() -> None:
    swarm = Swarm(storm_settings(5, peers=8), EventLog())
    read: dict[bytes, Opened] = {}
    once, asked, shared = swarm.open_message, 0, 0

    def keep(data: bytes, run: bytes) -> Opened:
        nonlocal asked, shared
        asked, shared = asked + 1, shared + (isinstance(data, Parcel) and data.opened is not None)
        read[bytes(data)] = once(data, run)
        return read[bytes(data)]

    swarm.open_message = keep
    swarm.run()
    head = Envelope(version=PROTOCOL_VERSION, run=swarm.run_config.digest()).SerializeToString()
    assert {message.kind.name for message in read.values()} >= {
        "ping",
        "pong",
        "ready",
        "begin",
        "mean",
        "result",
    }
    # As they were sent, but for the order of their fields: large data comes last on the wire.
    again = {data: enveloped(message.body, head) for data, message in read.items()}
    assert all(Envelope.FromString(made) == Envelope.FromString(data) for data, made in again.items())
    assert asked > shared > len(read)


def test_the_goodbye_of_a_peer_that_leaves_is_on_the_wire_before_it_is_gone() -> None:
    swarm = Swarm(Settings(run=run_of(3), peers=6, seed=1, profile="fibre"), EventLog())
    leaver = swarm.volunteers[0].identity.peer_id
    seen: list[tuple[str, str]] = []

    def look(event: Event) -> None:
        if isinstance(event, PeerLeft) and event.other == leaver and swarm.world.now < 10:
            seen.append((event.peer, event.reason))

    swarm.log.readers.append(look)
    swarm.world.call_at(6.0, _ask_the_first_to_leave, swarm)
    swarm.run()
    assert {peer for peer, _ in seen} == set(swarm.peer_ids()) - {leaver}
    assert {reason for _, reason in seen} == {"left: stopped"}


def test_a_peer_that_leaves_waits_for_no_answer_of_a_dht_that_is_out_of_reach() -> None:
    """What it decided of late was to be found there: that is given up after some 15 s."""
    swarm = Swarm(Settings(run=run_of(9), peers=2, seed=1, profile="fibre"), EventLog())
    leaver, *others = swarm.peer_ids()
    gone_at: list[float] = []

    def look(event: Event) -> None:
        if isinstance(event, PeerFinished) and event.peer == leaver:
            gone_at.append(swarm.world.now)

    swarm.log.readers.append(look)
    for seed in swarm.rendezvous.seeds:
        swarm.world.call_at(5.0, swarm.set_seed, seed, False)
    for other in others:
        swarm.world.call_at(5.0, swarm.cut_pair, leaver, other)
    swarm.world.call_at(14.0, _ask_the_first_to_leave, swarm)
    result = swarm.run()
    assert 14.0 < min(gone_at) < 16.0
    assert "deadlines" not in {broken.law for broken in result.violations}


def _ask_the_first_to_leave(swarm: Swarm) -> None:
    swarm.processes[0].ask_to_leave()


def test_a_storm_calls_nobody_back_before_it_sends_them_away() -> None:
    leaving = Storm(3.5, 6.6, crashing=0, powerless=0, stalling=0, assassinations=0, leaving=1)
    swarm = Swarm(Settings(run=run_of(), peers=200, seed=2), EventLog())
    calls: list[tuple[float, int, str, int]] = []

    def keep(when: float, callback: Callable[..., object], *args: object) -> None:
        if callback.__name__ in ("_go", "start"):
            index = next(arg for arg in args if isinstance(arg, int))
            calls.append((when, len(calls), callback.__name__, index))

    swarm.world.call_at = keep  # type: ignore[method-assign,assignment]
    leaving.plan(swarm)
    for index in range(200):
        assert [name for *_, name, called in sorted(calls) if called == index] == ["_go", "start"]


def test_a_record_that_is_not_renewed_is_listed_no_longer_though_the_dht_was_empty_at_first() -> None:
    world = VirtualTime()
    net = Rendezvous(Internet(world, random.Random(1), 1.0), random.Random(2))
    assert net.records(PeerId("a")) == []
    seen: list[list[str]] = []
    for peer, at in (("a", 1.0), ("b", 2.0), ("b", 50.0)):
        world.call_at(at, net.publish, PeerRecord(peer=peer), 60.0)
    for at in (3.0, 70.0, 120.0):
        world.call_at(at, lambda: seen.append([record.peer for record in net.records(PeerId("c"))]))
    world.run(121.0)
    assert seen == [["a", "b"], ["b"], []]


@pytest.mark.parametrize(("healed_at", "opens_at"), [(0.5, 1.0), (2.5, 3.0), (5.0, 7.0), (8.0, None)])
def test_who_knocks_at_a_cut_line_gets_through_when_tcp_knocks_again(
    healed_at: float, opens_at: float | None
) -> None:
    world = VirtualTime()
    net = Internet(world, random.Random(1), 1.0)
    here, there = (
        Endpoint(PeerId(name), profile_of("fibre", 1, index), world.loop()) for index, name in enumerate("ab")
    )
    net.endpoints = {one.peer: one for one in (here, there)}
    heard: list[tuple[str, float]] = []
    links = VirtualLinks(
        net,
        here,
        LinkObserver(
            opened=lambda *_: heard.append(("opened", world.now)),
            lost=lambda *_: heard.append(("lost", world.now)),
            unreachable=lambda *_: heard.append(("unreachable", world.now)),
        ),
    )
    world.call_at(0.0, net.cut_pair, here.peer, there.peer)
    world.call_at(0.0, links.post, there.peer, b"hello", False)
    world.call_at(healed_at, net.heal)
    world.run(15.0)
    ((what, at),) = heard
    path = net.path(here, there)
    assert isinstance(path, Path)
    if opens_at is None:
        assert (what, at) == ("unreachable", CONNECT_PATIENCE_S)
    else:
        assert what == "opened"
        assert at == pytest.approx(opens_at + 4 * path.delay_s)


@pytest.mark.parametrize("is_cut", [True, False])
def test_bulk_waits_while_its_receiver_is_cut_off_or_restarts(is_cut: bool) -> None:
    """It was lost at a machine that came back after a power cut; and what was held for a cut line could not
    be forgotten any more."""
    world = VirtualTime()
    net = Internet(world, random.Random(1), 1.0)
    here, there, again = (
        Endpoint(PeerId(name), profile_of("fibre", 1, index), world.loop())
        for index, name in enumerate(("a", "b", "b"))
    )
    net.endpoints = {one.peer: one for one in (here, there)}
    came: list[tuple[str, bytes]] = []
    nothing = LinkObserver(lambda *_: None, lambda *_: None, lambda *_: None)
    links = VirtualLinks(net, here, nothing)

    def hear(name: str) -> Callable[[PeerId, bytes], Coroutine[Any, Any, None]]:
        async def on_message(sender: PeerId, data: bytes) -> None:
            came.append((name, bytes(data)))

        return on_message

    there.on_message, again.on_message = hear("there"), hear("again")

    def break_off() -> None:
        if is_cut:
            net.cut_pair(here.peer, there.peer)
        else:
            net.died(there, host_up=False)
            net.endpoints[there.peer] = again

    world.call_at(0.0, links.post, there.peer, b"first", True)
    world.call_at(1.0, break_off)
    for number in range(3):
        piece = Piece(bytes([number]), False)
        world.call_at(2.0, links.post, there.peer, bytes([number]), True, False, piece)
    world.call_at(2.0, links.forget, b"\1", True)
    world.call_at(5.0, net.heal)
    world.run(15.0)
    receiver = "there" if is_cut else "again"
    assert came == [("there", b"first"), (receiver, b"\0"), (receiver, b"\2")]
    assert links.queued_bytes == 0


def test_a_way_that_stood_idle_carries_no_more_than_one_that_did_not() -> None:
    """It carried as much at the line's own rate as it could have carried meanwhile."""
    world = VirtualTime()
    net = Internet(world, random.Random(1), 1.0)
    here, there = (
        Endpoint(PeerId(name), profile_of("satellite", 1, index), world.loop())
        for index, name in enumerate("ab")
    )
    net.endpoints = {one.peer: one for one in (here, there)}
    came_at: list[float] = []

    async def on_message(sender: PeerId, data: bytes) -> None:
        came_at.append(world.now)

    there.on_message = on_message
    links = VirtualLinks(net, here, LinkObserver(lambda *_: None, lambda *_: None, lambda *_: None))
    for at in (0.0, 100.0, 100.0, 300.0):
        world.call_at(at, links.post, there.peer, bytes(100_000), True)
    world.run(400.0)
    path = net.path(here, there)
    assert isinstance(path, Path)
    takes_s = 100_000 / path.bytes_per_s
    assert 9.0 < takes_s < 11.0
    first, second, third, fourth = came_at
    assert first > takes_s
    assert [second - 100, third - 100, fourth - 300] == pytest.approx([takes_s, 2 * takes_s, takes_s], abs=3)


def test_an_upload_shows_no_more_than_its_ways_carry() -> None:
    """A satellite's line of 625 kB/s showed all of that though its two relays carried 10 kB/s each: owners
    waited for slices for a twentieth of what they took, and hardly a round was made."""
    world = VirtualTime()
    net = Internet(world, random.Random(1), 10.0)
    lines = ["satellite"] * 3 + ["fibre"]
    here, *others = (
        Endpoint(PeerId(f"{index}"), profile_of(line, 1, index), world.loop())
        for index, line in enumerate(lines)
    )
    net.endpoints = {one.peer: one for one in (here, *others)}
    links = VirtualLinks(net, here, LinkObserver(lambda *_: None, lambda *_: None, lambda *_: None))
    ways = [net.path(here, other) for other in others]
    rates = [way.bytes_per_s for way in ways if isinstance(way, Path)]
    assert rates[0] == rates[1] < rates[2] / 3
    data = Envelope(part=Part(data=bytes(30_000))).SerializeToString()
    assert links.post(others[0].peer, data, True)
    world.run(10.0)
    assert links.upload_bytes_per_s == pytest.approx(rates[0] / 10)
    for other in others[1:]:
        links.post(other.peer, data, True)
    world.run(20.0)
    assert links.upload_bytes_per_s == pytest.approx(sum(rates) / 10)
    assert sum(rates) < here.profile.up_bits_per_s / 8


def test_a_state_has_no_part_that_nobody_needs_to_load() -> None:
    """It was filled up with zeros, which is what a newcomer's memory holds."""
    world = VirtualTime()
    loop = world.loop()
    begin = starts([4], [960], 100)
    books = Books(begin, lambda: world.now)
    work = books.works["a"] = Work("a")
    ledger = CountingLedger("a", begin, 1.0, work=work, audit=Auditor(books, "a"), loop=loop)
    ledger.restore([Saved(State.of(begin[0].form, 3, range(1, 9)), (0,) * 4)])
    task = loop.create_task(ledger.export(0))
    world.run(1.0)
    agreed, data = task.result()
    assert (agreed.version, len(data)) == (3, 960)
    assert all(any(data[start : start + 32]) for start in range(0, 960, 32))


def test_what_a_peer_asks_for_has_room_whatever_of_our_rounds_waits_for_it() -> None:
    world = VirtualTime()
    net = Internet(world, random.Random(1), 1.0)
    here, there = (
        Endpoint(PeerId(name), profile_of("fibre", 1, index), world.loop())
        for index, name in enumerate(("a", "b"))
    )
    net.endpoints = {one.peer: one for one in (here, there)}
    links = VirtualLinks(net, here, LinkObserver(lambda *_: None, lambda *_: None, lambda *_: None))
    slice_, chunk = bytes(MAX_SERVED_BYTES), bytes(MAX_SERVED_BYTES // 4)
    assert links.post(there.peer, slice_, bulk=True, piece=Piece(b"1", False))
    taken = [links.post(there.peer, chunk, bulk=True, served=True) for _ in range(5)]
    assert taken == [True] * 4 + [False]


@pytest.mark.parametrize("state_factor", [16, 64])
def test_who_comes_back_in_the_last_round_ends_with_the_state_of_the_others(state_factor: int) -> None:
    """They left while it loaded their states, or where these are large replayed their rounds: all agreed, and
    a newcomer has no word in that."""
    run = run_of(6).model_copy(update={"clock": ClockConfig(mode="time", round_s=10.0, rounds=6)})
    settings = Settings(
        run=run, peers=3, seed=1, profile="dsl", blocks=(16,) * 2, real_bytes_per_block=2e5,
        state_factor=state_factor,
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    swarm.world.call_at(15.0, swarm.kill, 2, True)
    swarm.world.call_at(52.0, swarm.start, 2, False)
    ended_at: list[float] = []
    swarm.log.readers.append(
        lambda event: ended_at.append(swarm.world.now) if isinstance(event, TrainingEnded) else None
    )
    result = swarm.run()
    assert result.violations == []
    assert len(result.digests) == 3
    assert len(set(result.digests.values())) == 1
    others_at, _, its_own_at = sorted(ended_at)
    assert its_own_at > others_at + 40.0


@pytest.mark.parametrize("seed", [3, 8])
def test_over_relays_too_slow_for_its_rounds_a_swarm_ends_in_one_state(seed: int) -> None:
    """A state was one chunk, however large the model: no donor behind a relay gave it before patience with it
    ended, and each peer ended with a state of its own."""
    clock = ClockConfig(mode="time", round_s=2.67, rounds=23)
    run = RunConfig(name="over", fragments=4, clock=clock)
    real_bytes = 2.2e6 / 16
    swarm = Swarm(
        Settings(
            run=run, peers=4, seed=seed, profile="dsl", blocks=(16,) * 4, real_bytes_per_block=real_bytes,
            state_factor=4,
        ),
        EventLog(digests=False),
    )  # fmt: skip
    assert 65e3 < swarm.shape.chunk_bytes * swarm.internet.scale < 70e3  # a 128th
    result = swarm.run()
    assert result.violations == []
    assert len(result.digests) == 4
    assert len(set(result.digests.values())) == 1


def far_too_slow(seed: int) -> Swarm:
    """Three behind relays of 89 kB/s, 10 million parameters in two fragments, rounds of 30 s."""
    encoded = payload_bytes("int4", 10_000_000)
    run = RunConfig(name="slow", fragments=2, clock=ClockConfig(mode="time", round_s=30.0, rounds=4))
    return Swarm(
        Settings(
            run=run, peers=3, seed=seed, profile="4g", blocks=(16, 16), real_bytes_per_block=encoded / 16,
            state_factor=15,
        ),
        EventLog(digests=False),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [5, 19])
def test_nobody_leaves_at_the_end_while_the_others_make_a_last_round(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On lines that show ten times what their ways carry a round takes minutes. All left when they had waited
    their time for each other, one of them a second before it had the last mean of a round that the others
    had committed."""

    def boast(links: VirtualLinks) -> None:
        links._shown_bytes_per_s = links._uplink_bytes_per_s / links._internet.scale

    monkeypatch.setattr(VirtualLinks, "_measure_ways", boast)
    swarm, told = far_too_slow(seed), list[str]()
    swarm.log.readers.append(
        lambda event: told.append(event.text) if isinstance(event, Warned) else None
    )  # fmt: skip
    result = swarm.run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    assert told == [STILL_LOADS] * 3
    assert result.virtual_s < 230.0


def test_who_missed_a_round_loads_it_while_others_make_the_next_one() -> None:
    """A simulated chunk was two and a half times as large as a real one: its donors counted as silent, all of
    the state was asked for instead, and ten minutes later the others left."""
    swarm, how = far_too_slow(1), list[str]()
    assert 500e3 < swarm.shape.chunk_bytes * swarm.internet.scale < 550e3
    swarm.log.readers.append(lambda event: how.append(event.how) if isinstance(event, CaughtUp) else None)
    result = swarm.run()
    assert result.violations == []
    assert result.counts.get("round_aborted", 0) == 0
    assert how == ["replay"]


def test_peers_that_count_steps_are_in_nearly_all_means_however_far_apart_their_points_are() -> None:
    """They start up to a third of a round apart, and nothing brings them together."""
    clock = ClockConfig(mode="steps", inner_steps_per_round=30, rounds=15)
    settings = Settings(
        run=RunConfig(name="steps", clock=clock),
        peers=4,
        seed=2,
        min_peers=4,
        profile="fibre",
        step_s=0.2,
        speed_spread=1.02,
    )
    log, held = EventLog(digests=False), dict[tuple[int, int], int]()
    log.readers_of[RoundCommitted].append(
        lambda event: held.update({(event.fragment, event.round): event.contributors})
    )
    assert Swarm(settings, log).run().violations == []
    assert sum(held.values()) > 0.95 * 4 * len(held)
