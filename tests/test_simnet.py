"""The simulated swarm: same seed, same events; calm runs keep every law; its net by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.net.transport.base import CONNECT_TIMEOUT_S
from p2p_co2.node.links import LinkObserver, Piece
from p2p_co2.planning.profiles import profile_of
from p2p_co2.simnet import EventLog, Settings, VirtualSwarm
from p2p_co2.simnet.campaign import storm_settings
from p2p_co2.simnet.internet import KNOCK_EVERY_S, Endpoint, Internet, Parcel, Path, VirtualLinks
from p2p_co2.simnet.rendezvous import Rendezvous
from p2p_co2.simnet.virtual_time import VirtualTime, loop_of
from p2p_co2.telemetry.events import Event, PeerLeft, RoundAborted, RoundCommitted
from p2p_co2.wire.envelope import Opened
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope, Part, PeerRecord
from tests.envelopes import enveloped

ROUND_S = 4.0


def run_of(rounds: int = 4, fragments: int = 2) -> RunConfig:
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=rounds)
    return RunConfig(name="simulated", fragments=fragments, clock=clock)


def test_a_calm_swarm_keeps_every_law_and_ends_with_one_state() -> None:
    result = VirtualSwarm(Settings(run=run_of(), peers=6, seed=3), EventLog()).run()
    assert result.violations == []
    assert len(result.digests) == 6
    assert len(set(result.digests.values())) == 1
    assert result.forks == 0
    assert result.counts["round_committed"] >= 6 * 6
    assert result.written_off == {}


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    first, again, other = (
        VirtualSwarm(storm_settings(seed, peers=8), EventLog()).run() for seed in (1, 1, 2)
    )
    assert first.digest == again.digest
    assert first.digest != other.digest


def test_messages_that_many_receive_are_read_once_and_never_written_to() -> None:
    swarm = VirtualSwarm(storm_settings(5, peers=8), EventLog())
    read: dict[bytes, Opened] = {}
    once, asked, shared = swarm.scene.open_message, 0, 0

    def keep(data: bytes, run: bytes) -> Opened:
        nonlocal asked, shared
        asked, shared = asked + 1, shared + (isinstance(data, Parcel) and data.opened is not None)
        read[bytes(data)] = once(data, run)
        return read[bytes(data)]

    swarm.scene.open_message = keep
    swarm.run()
    head = Envelope(version=PROTOCOL_VERSION, run=swarm.settings.run.digest()).SerializeToString()
    assert {message.kind.name for message in read.values()} >= {"ping", "ready", "begin", "mean", "result"}
    # As they were sent, but for the order of their fields: large data comes last on the wire.
    again = {data: enveloped(message.body, head) for data, message in read.items()}
    assert all(Envelope.FromString(made) == Envelope.FromString(data) for data, made in again.items())
    assert asked > shared > len(read)


def test_the_goodbye_of_a_peer_that_leaves_is_on_the_wire_before_it_is_gone() -> None:
    swarm = VirtualSwarm(Settings(run=run_of(3), peers=6, seed=1, profile="fibre"), EventLog())
    leaver = swarm.peer_ids()[0]
    seen: list[tuple[str, str]] = []

    def look(event: Event) -> None:
        if isinstance(event, PeerLeft) and event.other == leaver and swarm.world.now < 10:
            seen.append((event.peer, event.reason))

    swarm.log.readers.append(look)
    swarm.world.call_at(6.0, swarm.leave, 0)
    swarm.run()
    assert {peer for peer, _ in seen} == set(swarm.peer_ids()) - {leaver}
    assert {reason for _, reason in seen} == {"left: stopped"}


def test_peers_that_count_steps_are_in_nearly_all_means_however_far_apart_their_points_are() -> None:
    """They start up to a third of a round apart, and nothing brings them together."""
    clock = ClockConfig(mode="steps", inner_steps_per_round=30, rounds=15)
    settings = Settings(
        run=RunConfig(name="steps", clock=clock), peers=4, seed=2, profile="fibre", step_s=0.2,
        speed_spread=1.02,
    )  # fmt: skip
    log, held = EventLog(digests=False), dict[tuple[int, int], int]()
    log.readers_of[RoundCommitted].append(
        lambda event: held.update({(event.fragment, event.round): event.contributors})
    )
    assert VirtualSwarm(settings, log).run().violations == []
    assert sum(held.values()) > 0.95 * 4 * len(held)


@pytest.mark.parametrize(("peers", "quick"), [(4, 2), (5, 3)])
def test_a_run_that_counts_steps_is_over_when_most_have_made_them(peers: int, quick: int) -> None:
    """Three times as fast. Half of the peers go on to the end; fewer end with the others. No round is begun
    in vain, and all end with one state."""
    clock = ClockConfig(mode="steps", inner_steps_per_round=10, rounds=12)
    run = RunConfig(name="steps", fragments=2, clock=clock)
    settings = Settings(run=run, peers=peers, seed=0, profile="dsl", step_s=0.4, speed_spread=1.05)
    log, aborted = EventLog(digests=False), list[RoundAborted]()
    log.readers_of[RoundAborted].append(aborted.append)
    swarm = VirtualSwarm(settings, log)
    for volunteer in swarm.volunteers[quick:]:
        volunteer.step_s *= 3
    result = swarm.run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    assert len(aborted) <= 1
    assert (result.units < 110 * peers) == (2 * quick > peers)


# ---- the net by hand


class Net:
    """One end with its links, and others: a line for each of ``profiles``."""

    def __init__(self, *profiles: str, scale: float = 1.0) -> None:
        self.world = VirtualTime()
        self.internet = Internet(self.world, random.Random(1), scale)
        self.here, *self.others = (
            Endpoint(PeerId("abcd"[index]), profile_of(line, 1, index), loop_of(self.world))
            for index, line in enumerate(profiles)
        )
        self.internet.endpoints = {one.peer: one for one in (self.here, *self.others)}
        self.there = self.others[0].peer
        self.heard: list[tuple[str, float]] = []
        names = ("opened", "lost", "unreachable")
        self.links = VirtualLinks(self.internet, self.here, LinkObserver(*map(self._hear, names)))

    def _hear(self, what: str) -> Callable[..., None]:
        return lambda *_: self.heard.append((what, self.world.now))

    def path(self, number: int = 0) -> Path:
        return self.internet.path(self.here, self.others[number])


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


@pytest.mark.parametrize(("healed_at", "opens_at"), [(0.5, 1.0), (5.0, 5.0), (9.5, None)])
def test_who_knocks_at_a_cut_line_gets_through_when_it_knocks_again(
    healed_at: float, opens_at: float | None
) -> None:
    net = Net("fibre", "fibre")
    net.world.call_at(0.0, net.internet.cut_pair, net.here.peer, net.there)
    net.world.call_at(0.0, net.links.post, net.there, b"hello", False)
    net.world.call_at(healed_at, net.internet.heal)
    net.world.run(15.0)
    ((what, at),) = net.heard
    if opens_at is None:
        assert (what, at) == ("unreachable", CONNECT_TIMEOUT_S)
    else:
        assert what == "opened"
        assert at == pytest.approx(opens_at + 4 * net.path().delay_s, abs=KNOCK_EVERY_S / 10)


@pytest.mark.parametrize("is_cut", [True, False])
def test_bulk_waits_while_its_receiver_is_cut_off_or_restarts(is_cut: bool) -> None:
    """It was lost at a machine that came back after a power cut; and what was held for a cut line could not
    be forgotten any more."""
    net = Net("fibre", "fibre", "fibre")
    there, again = net.others
    again.peer = there.peer
    net.internet.endpoints = {one.peer: one for one in (net.here, there)}
    came: list[tuple[str, bytes]] = []

    def hear(name: str) -> Callable[[PeerId, bytes], Coroutine[Any, Any, None]]:
        async def on_message(sender: PeerId, data: bytes) -> None:
            came.append((name, bytes(data)))

        return on_message

    there.on_message, again.on_message = hear("there"), hear("again")

    def break_off() -> None:
        if is_cut:
            net.internet.cut_pair(net.here.peer, there.peer)
        else:
            net.internet.died(there, host_up=False)
            net.internet.endpoints[there.peer] = again

    net.world.call_at(0.0, net.links.post, there.peer, b"first", True)
    net.world.call_at(1.0, break_off)
    for number in range(3):
        piece = Piece(bytes([number]), False)
        net.world.call_at(2.0, net.links.post, there.peer, bytes([number]), True, False, piece)
    net.world.call_at(2.0, net.links.forget, b"\1", True)
    net.world.call_at(5.0, net.internet.heal)
    net.world.run(15.0)
    receiver = "there" if is_cut else "again"
    assert came == [("there", b"first"), (receiver, b"\0"), (receiver, b"\2")]
    assert not net.links.is_full


def test_a_way_that_stood_idle_carries_no_more_than_one_that_did_not() -> None:
    """It carried as much at the line's own rate as it could have carried meanwhile."""
    net, came_at = Net("satellite", "satellite"), list[float]()

    async def on_message(sender: PeerId, data: bytes) -> None:
        came_at.append(net.world.now)

    net.others[0].on_message = on_message
    for at in (0.0, 100.0, 100.0, 300.0):
        net.world.call_at(at, net.links.post, net.there, bytes(100_000), True)
    net.world.run(400.0)
    takes_s = 100_000 / net.path().bytes_per_s
    assert 9.0 < takes_s < 11.0
    first, second, third, fourth = came_at
    assert first > takes_s
    assert [second - 100, third - 100, fourth - 300] == pytest.approx([takes_s, 2 * takes_s, takes_s], abs=3)


def test_an_upload_shows_no_more_than_its_ways_carry() -> None:
    """A satellite's line of 625 kB/s showed all of that though its two relays carried 10 kB/s each: owners
    waited for slices for a twentieth of what they took, and hardly a round was made."""
    net = Net("satellite", "satellite", "satellite", "fibre", scale=10.0)
    rates = [net.path(number).bytes_per_s for number in range(3)]
    assert rates[0] == rates[1] < rates[2] / 3
    data = Envelope(part=Part(data=bytes(30_000))).SerializeToString()
    assert net.links.post(net.there, data, True)
    net.world.run(10.0)
    assert net.links.upload_bytes_per_s == pytest.approx(rates[0] / 10)
    for other in net.others[1:]:
        net.links.post(other.peer, data, True)
    net.world.run(20.0)
    assert net.links.upload_bytes_per_s == pytest.approx(sum(rates) / 10)
    assert sum(rates) < net.here.profile.up_bits_per_s / 8
