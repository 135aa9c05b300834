"""Peers that a round began without: they hear its means, cost the members nothing, and can do no harm."""

from __future__ import annotations

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.rounds import Aborted, Began, Committed, OutcomeWithoutBytes, Overheard, PayloadShape
from p2p_co2.protocol.rounds.attempt import seal_begin
from p2p_co2.protocol.rounds.bounds import GRACE_S, MAX_HEARD, MAX_LISTENERS, MEMBERS_PER_LISTENER
from p2p_co2.protocol.rounds.deadline import MISSES
from p2p_co2.protocol.rounds.rank import coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.telemetry.events import Event, FragmentApplied
from tests.round_machine import begun_member
from tests.round_network import Network, make_identity

ROUND_S = 3.0

# ---- a swarm whose rounds take most of the time


def contributions(
    rounds: int,
    left_out: int,
    stall_s: float,
    *,
    seed: int = 3,
    step_s: float = 0.075,
    payload_mb: float = 8.0,
) -> dict[str, str]:
    """Four peers on lines of 100 Mbit/s, 45 ms apart; each exchange of 8 MB takes about 2.0 s of a round of
    3.0 s, and the replay of a round 1.5 s. One peer stands still as a round begins. By peer, a letter for
    each round: x if it contributed, . if not."""
    clock = ClockConfig(mode="time", round_s=ROUND_S, rounds=rounds)
    settings = Settings(
        run=RunConfig(name="left-out", fragments=1, clock=clock), peers=4, seed=seed, blocks=(64,),
        real_bytes_per_block=payload_mb * 1e6 / 64, step_s=step_s, speed_spread=1.0, start_spread_s=0.1,
        largest_skew_s=0.0, largest_drift=0.0,
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    line = LinkProfile("line", 100_000_000, 100_000_000, 45.0, 0.0, 0.0, "open")
    for volunteer in swarm.volunteers:
        volunteer.profile = line
    names = {volunteer.identity.peer_id: volunteer.name for volunteer in swarm.volunteers}
    marks: dict[str, dict[int, str]] = {name: {} for name in names.values()}

    def read(event: Event) -> None:
        if isinstance(event, FragmentApplied):
            marks[names[PeerId(event.peer)]][event.version] = "x" if event.contributed else "."

    swarm.log.readers.append(read)
    at = (left_out - 0.02) * ROUND_S
    swarm.world.call_at(at, lambda: swarm.stall(1, swarm.world.now + stall_s))
    result = swarm.run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    return {name: "".join(of[version] for version in sorted(of)) for name, of in marks.items()}


def test_a_peer_that_missed_a_round_is_not_behind_for_good() -> None:
    """Its replay takes longer than the pause before the next round: it missed all but the last after that."""
    marks = contributions(rounds=12, left_out=4, stall_s=1.8)
    left_out = marks.pop("peer-1")
    assert set(marks.values()) == {"x" * len(left_out)}
    assert "." in left_out
    assert left_out.count(".") <= 2
    assert left_out.endswith("xxxxx")


@pytest.mark.parametrize(("seed", "payload_mb"), [(6, 8.0), (8, 9.6), (4, 11.0), (5, 11.0)])
def test_where_steps_are_long_and_rounds_short_nobody_is_left_out(seed: int, payload_mb: float) -> None:
    """Steps are a quarter of a round, and an exchange takes 2.3 to 3 s of it: a mean may come just before a
    peer's next point or just after it, and of peers that end their steps at other moments one was ready after
    BEGIN. One of four missed up to nine rounds in a row."""
    marks = contributions(
        rounds=16, left_out=5, stall_s=0.0, seed=seed, step_s=ROUND_S / 4, payload_mb=payload_mb
    )
    assert set("".join(marks.values())) == {"x"}


@pytest.mark.parametrize(
    ("seed", "payload_mb", "stall_s"), [(6, 8.0, 3.0), (6, 9.6, 3.0), (6, 9.6, 4.0), (5, 11.0, 1.8)]
)
def test_who_missed_a_round_is_not_ready_just_after_the_others_have_begun_for_good(
    seed: int, payload_mb: float, stall_s: float
) -> None:
    """Its replay ends as the others begin the next: they wait for it, and it offers as soon as it has met it,
    not at its next point. It missed up to eleven in a row."""
    marks = contributions(
        rounds=16, left_out=5, stall_s=stall_s, seed=seed, step_s=ROUND_S / 4, payload_mb=payload_mb
    )
    assert 1 <= max(of.count(".") for of in marks.values()) <= 2


# ---- one round


def late_network(count: int = 4, late: int = 1) -> tuple[Network, list[PeerId]]:
    """All but the ``late`` ones offer; those are seen, and can offer, when the round has begun."""
    net = Network(count, shape=PayloadShape(8, (1 << 15,)))
    absent = coordination_order(net.names, 0, 1)[-late:]
    views = {name: net._view(name) for name in net.names if name not in absent}
    for name in views:
        net.peers[name].machine.set_peers(views, net.now)
        net.pump(name)
    for name in views:
        net.offer(name)
    for _ in range(1000):
        if any(isinstance(event, Began) for _, event in net.events):
            break
        net.run(0.005)
    net.tell_everybody()
    return net, absent


def test_a_late_peer_has_the_mean_with_the_members_and_its_work_is_not_in_it() -> None:
    net, (late,) = late_network()
    net.offer(late)
    net.run_until_settled()
    (heard,) = [event for name, event in net.events if name == late and isinstance(event, Overheard)]
    assert heard.ends_offer
    committed = net.committed()
    assert set(committed) == set(net.names) - {late}
    for event in committed.values():
        assert bytes(event.mean) == bytes(heard.mean)
        assert all(peer != late for part in event.parts for peer, _ in part.contributors)
    assert not [event for name, event in net.events if name == late and isinstance(event, Aborted)]
    net.run(5.0)
    assert {peer.states[0] for peer in net.peers.values()} == {net.peers[late].states[0]}
    assert not net.refused


def test_its_next_offer_is_in_the_next_round() -> None:
    net, (late,) = late_network()
    net.offer(late)
    net.run_until_settled()
    net.tell_everybody()
    net.offer_all(round_=2)
    net.run_until_settled()
    net.run(30.0)
    assert late in net.committed(2)
    assert all(net.committed(2)[late].contributed)


def test_nobody_waits_for_one_that_listens_and_falls_silent() -> None:
    net, (late,) = late_network()
    net.on_send = lambda source, to, message: not (to == late and isinstance(message, wire.Mean))
    net.offer(late)
    net.run(1.0)
    assert set(net.committed()) == set(net.names) - {late}
    assert not [name for name, event in net.events if name == late and isinstance(event, OutcomeWithoutBytes)]
    net.run(GRACE_S)  # it does not wait long for what was promised, but fetches it
    (ended,) = [
        event for name, event in net.events if name == late and isinstance(event, OutcomeWithoutBytes)
    ]
    assert ended.ends_offer
    assert net.peers[late].version == 1


def test_an_owner_that_sends_a_drop_at_a_time_keeps_no_listener_from_the_donors() -> None:
    net, (late,) = late_network()
    drops = iter(range(1000))

    def drip(source: PeerId, to: PeerId, message: object) -> bool:
        if isinstance(message, wire.Mean) and to == late and message.offset:
            at = net.now + GRACE_S * 0.9 * (1 + next(drops))
            net.at(at, lambda: net.deliver(source, to, message))
            return False
        return True

    net.on_send = drip
    net.offer(late)
    net.run(1.0 + 2 * GRACE_S)
    assert net.peers[late].version == 1
    assert [name for name, event in net.events if name == late and isinstance(event, OutcomeWithoutBytes)]


def test_means_that_are_not_what_was_committed_are_not_taken() -> None:
    net, (late,) = late_network()
    liar = next(name for name in net.names if name != late)

    def lie(source: PeerId, to: PeerId, message: object) -> bool:
        if isinstance(message, wire.Mean) and (source, to) == (liar, late):
            message.data = bytes(len(message.data))
        return True

    net.on_send = lie
    net.offer(late)
    net.run(60.0)
    assert not [event for name, event in net.events if name == late and isinstance(event, Overheard)]
    assert {peer.states[0] for peer in net.peers.values()} == {net.peers[late].states[0]}
    assert net.peers[late].version == 1


def test_an_owner_sends_to_few_that_listen_and_the_others_fetch() -> None:
    net, late = late_network(12, late=4)
    for name in late:
        net.offer(name)
    net.run(30.0)
    heard: dict[PeerId, set[PeerId]] = {}
    for source, to, message in net.sent:
        if isinstance(message, wire.Mean) and to in late:
            heard.setdefault(source, set()).add(to)
    most = 8 // MEMBERS_PER_LISTENER
    assert 1 <= most <= MAX_LISTENERS
    assert {len(listeners) for listeners in heard.values()} == {most}
    assert len({peer.states[0] for peer in net.peers.values()}) == 1
    assert {peer.version for peer in net.peers.values()} == {1}


def test_a_stranger_does_not_listen() -> None:
    net, _ = late_network()
    begin = next(message for _, _, message in net.sent if isinstance(message, wire.Begin))
    stranger = make_identity(100).peer_id
    for key in (begin.key, wire.RoundKey(fragment=0, round=1)):
        with pytest.raises(RemoteProtocolError, match="unknown peer"):
            net.peers[PeerId(begin.parts[0].owner)].machine.receive(wire.Listen(key=key), stranger, net.now)


def test_a_coordinator_that_begins_without_end_has_nobody_flood_the_others() -> None:
    """Each attempt that a peer hears costs one message to each owner: they would hear it no more for that."""
    machine, begin, first, other = begun_member()
    del begin.members[[member.peer for member in begin.members].index(machine._me)]
    begin.parts[0].owner = first
    sent: list[PeerId] = []
    for number in range(50):
        begin.nonce = number.to_bytes(16)
        seal_begin(begin, first)
        machine.receive(begin, first, 1.0 + number)
        sent += [to for to, message in machine.messages_to_send() if isinstance(message, wire.Listen)]
    assert sorted(sent) == sorted(MAX_HEARD * [first, other])


def test_a_member_that_listens_gets_nothing_twice() -> None:
    net = Network(3, shape=PayloadShape(8, (1 << 15,)))

    def listen(source: PeerId, to: PeerId, message: object) -> bool:
        if isinstance(message, wire.Begin):
            for owner in {part.owner for part in message.parts} - {to}:
                net.peers[PeerId(owner)].machine.receive(wire.Listen(key=message.key), to, net.now)
        return True

    net.on_send = listen
    net.offer_all()
    net.run_until_settled()
    assert set(net.committed()) == set(net.names)
    assert all(isinstance(event, Committed) for event in net.endings().values())
    means = [
        (source, to, message.part, message.offset)
        for source, to, message in net.sent
        if isinstance(message, wire.Mean)
    ]
    assert len(means) == len(set(means))


def test_nobody_is_sent_a_mean_before_its_owner_has_all_of_them() -> None:
    """What is sent to a listener shares the owner's line with what goes to the members."""
    net, (late,) = late_network(5)
    net.offer(late)
    net.run_until_settled()
    means = [(source, to) for source, to, message in net.sent if isinstance(message, wire.Mean)]
    assert any(to == late for _, to in means)
    for owner in {source for source, to in means if to == late}:
        heard_at = means.index((owner, late))
        assert not [source for source, to in means[heard_at:] if to == owner]


def test_who_asks_to_listen_and_is_ready_in_time_counts_as_punctual() -> None:
    for listens in (False, True):
        net, (late,) = late_network(5)
        coordinator = next(source for source, _, message in net.sent if isinstance(message, wire.Begin))
        readies = net.peers[coordinator].machine._swarm.readies
        for number in range(MISSES):
            readies.missed(late, number)
        assert not readies.is_awaited(late)
        key, held = wire.RoundKey(fragment=0, round=1), net.peers[late].states[0][1]
        if listens:
            net.deliver(late, coordinator, wire.Listen(key=key, state_digest=held))
        ready = wire.Ready(fragment=0, round=1, base_version=0, state_digest=held, weight=1.0)
        net.deliver(late, coordinator, ready)
        assert readies.is_awaited(late)
