"""The pipeline machine on virtual time: its laws under loss, doubling, overtaking, cuts and deaths."""

from __future__ import annotations

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.pipeline.machine import Pipeline, Place, Sizes
from p2p_co2.protocol.pipeline.routes import shares
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Backward, Dropped, Forward, MicrobatchKey, Neighbour
from tests.pipeline_world import Faults, World


def test_a_chain_steps_with_every_microbatch() -> None:
    world = World([1, 1, 1], [0.01] * 3)
    world.run(20)
    for replica in world.peers.values():
        assert set(replica.steps) == {8}
        assert not replica.dropped
    world.check()
    world.end()
    first, *_, last = world.peers.values()
    assert first.counted == last.counted


@pytest.mark.parametrize("microbatches", [16, 64])
def test_equal_replicas_are_busy(microbatches: int) -> None:
    """Emulated: 0.79 to 0.98 of the slowest stage's capacity, by microbatches in a step."""
    world = World([2, 2, 2], [0.05] * 3, microbatches=microbatches, window=8)
    world.run(120)
    busy = [replica.busy_s / 120 for replica in world.peers.values()]
    assert min(busy) > (0.7 if microbatches == 16 else 0.85), busy
    world.check()


def test_unequal_groups_are_busy_where_it_binds() -> None:
    world = World([3, 1, 2], [0.05, 0.02, 0.04], microbatches=32)
    world.run(120)
    binding = [r.busy_s / 120 for r in world.peers.values() if r.stage == 2]
    assert sum(binding) / 2 > 0.3
    world.check()
    world.end()


def test_a_slow_replica_holds_nobody_up() -> None:
    """One of three replicas four times slower costs little where the stage before binds anyway."""
    made = []
    for slower in (1.0, 4.0):
        world = World([2, 2], [0.05, 0.05], microbatches=32)
        third = world.start(1, slower=slower)
        world.run(200)
        world.check()
        made.append(sum(one.counted.total() for one in world.peers.values() if one.stage == 0))
    fast = [one for peer, one in world.peers.items() if one.stage == 1 and peer != third]
    assert world.peers[third].counted.total() < 0.5 * fast[0].counted.total()
    assert made[1] > 0.85 * made[0], made


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (3, 12), (4, 16)])
def test_the_drain_under_1f1b_is_p_of_2m(stages: int, microbatches: int) -> None:
    """Of all gradients that cross, where each stage has no more in flight than there are stages behind."""
    windows = [stages - stage for stage in range(stages)]
    world = World([1] * stages, [0.01] * stages, microbatches=microbatches, window=windows, latency_s=0.0)
    world.run(30)
    for machine in world.peers.values():
        assert len(machine.steps) > 20
    sent = sum(known.gradients for known in world.peers.values())
    urgent = sum(len(known.urgent) for known in world.peers.values())
    assert abs(urgent / sent - stages / (2 * microbatches)) < 0.01
    world.check()


def test_what_low_rank_leaves_out_has_an_heir_until_the_last() -> None:
    """Of the same path, whose gradient goes later; in each drain one has none, and flushes."""
    world = World([2, 2, 2, 2], [0.05, 0.03, 0.06, 0.02], microbatches=16, seed=3)
    world.run(60)
    world.check()
    for known in world.peers.values():
        order = {key: place for place, key in enumerate(known.counted)}
        for work in known.urgent:
            assert work.key is not None
            assert work.heir is None or order.get(work.heir, len(order)) > order[work.key]
    assert any(work.heir for known in world.peers.values() for work in known.urgent)
    assert any(not work.heir for known in world.peers.values() for work in known.urgent)


def test_gradients_are_urgent_where_the_line_binds() -> None:
    """And smaller ones then make more of it: three stages, a gradient takes twice as long as computing."""
    made = []
    for urgent in (0, 5_000):
        world = World([1, 1, 1], [0.01] * 3, microbatches=32, bytes_per_s=7e5, urgent=urgent)
        world.run(60)
        world.check()
        known = list(world.peers.values())
        made.append(known[0].counted.total())
        if urgent:
            assert all(len(one.urgent) > 0.9 * one.gradients > 0 for one in known[1:])
    assert made[1] > 1.1 * made[0], made
    fast = World([1, 1, 1], [0.01] * 3, microbatches=32)
    fast.run(30)
    assert all(len(one.urgent) < 0.5 * one.gradients for one in list(fast.peers.values())[1:])


@pytest.mark.parametrize("seed", range(12))
def test_laws_hold_whatever_happens(seed: int) -> None:
    faults = Faults(lose=0.01, double=0.05, jitter_s=0.2)
    stages = 2 + seed % 3
    world = World([2 + seed % 2] * stages, [0.05] * stages, seed=seed, cap_s=20.0, faults=faults)
    draw = world.random
    for moment in range(12):
        world.run(5)
        world.check()
        up = [peer for peer, known in world.peers.items() if known.is_up]
        if moment % 3 == 0:
            victim = draw.choice(up)
            stage = world.peers[victim].stage
            world.kill(victim)
            again = victim if draw.random() < 0.5 else ""
            world.at(2.0, lambda stage=stage, again=again: world.start(stage, again))  # type: ignore[misc]
        elif moment % 3 == 1:
            world.cut(*draw.sample(up, 2), for_s=1.0)
        else:
            world.draw()
    made = sum(r.counted.total() for r in world.peers.values() if r.stage == 0)
    assert made > 50
    world._faults = Faults()
    world.run(40)
    world.end()


def test_an_empty_stage_is_said_and_comes_back() -> None:
    world = World([1, 1], [0.01, 0.01])
    world.run(5)
    lone = next(peer for peer, known in world.peers.items() if known.stage == 1)
    world.kill(lone)
    world.run(5)
    first = next(iter(world.peers.values()))
    assert first.machine.waits_for == "stage 1 has no replica"
    stood = first.counted.total()
    world.run(30)
    assert first.counted.total() == stood
    world.start(1)
    world.run(5)
    assert first.counted.total() > stood + 8
    world.check()


SIZES = Sizes(8, 4, 8, 1000, (1000, 500), b"b", 60.0)


def machine(stage: int, sizes: Sizes = SIZES) -> Pipeline:
    made = Pipeline(Place(PeerId("me"), 77, stage, 3), sizes)
    made.join(PeerId("before"), stage - 1)
    made.join(PeerId("behind"), stage + 1)
    for peer, number in (("before", stage - 1), ("behind", stage + 1)):
        said = Neighbour(stage=number, meeting=5, boundaries=b"b", tokens_per_s=1.0, granted=3)
        made.receive(said, PeerId(peer), 0.0)
    return made


def forward(number: int, data: bytes = bytes(1000), total: int = 1000) -> Forward:
    return Forward(key=MicrobatchKey(owner=1, number=number), offset=0, total=total, data=data)


def backward(number: int, tokens: int = 100, loss: float = 1.0, codec: int = 0, size: int = 1000) -> Backward:
    key = MicrobatchKey(owner=1, number=number)
    said = Backward(key=key, tokens=tokens, loss=loss, offset=0, total=size, data=bytes(size))
    said.codec = codec
    return said


def test_hostile_messages_are_refused() -> None:
    one = machine(1)
    before, behind = PeerId("before"), PeerId("behind")
    with pytest.raises(RemoteProtocolError, match="not the one before"):
        one.receive(forward(1), behind, 1.0)
    with pytest.raises(RemoteProtocolError, match="wrong size"):
        one.receive(forward(1, total=2000), before, 1.0)
    with pytest.raises(RemoteProtocolError, match="did not go there"):
        one.receive(backward(9), behind, 1.0)
    with pytest.raises(RemoteProtocolError, match="boundaries"):
        one.receive(Neighbour(stage=2, meeting=5, boundaries=b"x"), behind, 1.0)
    nan = Neighbour(stage=2, meeting=5, boundaries=b"b", tokens_per_s=float("nan"))
    with pytest.raises(RemoteProtocolError, match="out of range"):
        one.receive(nan, behind, 1.0)
    assert one.receive(forward(1), before, 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    for wrong in (backward(1, tokens=101), backward(1, loss=float("inf"))):
        with pytest.raises(RemoteProtocolError, match="wrong count"):
            one.receive(wrong, behind, 3.0)
    with pytest.raises(RemoteProtocolError, match="did not go there"):
        one.receive(backward(1), before, 3.0)
    assert one.receive(backward(1), behind, 3.0)
    assert not one.receive(forward(1), PeerId("stranger"), 3.0)


def sent_on(one: Pipeline) -> Pipeline:
    """A microbatch comes, is computed and goes to the next stage."""
    one.receive(forward(1), PeerId("before"), 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    return one


def test_a_gradient_is_of_a_codec_that_the_run_has() -> None:
    """Its size is that codec's, and all its pieces are of one."""
    behind = PeerId("behind")
    wrong = [(2, 1000, "none of this run"), (2**32 - 1, 500, "none of this run")]
    wrong += [(0, 500, "wrong size"), (1, 1000, "wrong size"), (1, 2**31, "wrong size")]
    for codec, total, why in wrong:
        one, message = sent_on(machine(1)), backward(1, codec=codec, size=8)
        message.total = total
        with pytest.raises(RemoteProtocolError, match=why):
            one.receive(message, behind, 3.0)
    one = sent_on(machine(1))
    assert one.receive(backward(1, codec=1, size=500), behind, 3.0)
    work = one.next_work(4.0)
    assert work is not None
    assert (work.codec, len(work.payload or b"")) == (1, 500)


def test_pieces_of_two_codecs_are_no_gradient() -> None:
    sizes = Sizes(8, 4, 8, 1000, (1 << 15, (1 << 15) + 512), b"b", 60.0)
    one = sent_on(machine(1, sizes))
    first = backward(1, size=1 << 14)
    first.total = 1 << 15
    assert one.receive(first, PeerId("behind"), 3.0)
    first.codec, first.offset = 1, 1 << 14
    with pytest.raises(RemoteProtocolError, match="in two codecs"):
        one.receive(first, PeerId("behind"), 3.0)


def test_no_more_is_taken_than_was_granted() -> None:
    one = machine(1)
    list(one.messages_to_send())
    taken = [one.receive(forward(number), PeerId("before"), 1.0) for number in range(1, 30)]
    assert sum(taken) == SIZES.room
    declined = [message for _, message in one.messages_to_send() if hasattr(message, "reason")]
    assert len(declined) == 29 - SIZES.room


def test_what_was_declined_is_never_taken() -> None:
    """A second copy that comes when there is room again: another replica may have it by then. Whoever sends
    it here once more hears nothing and drops it, and what it was granted for that is granted anew."""
    one, before = machine(1), PeerId("before")
    for number in range(SIZES.room + 1):
        one.receive(forward(number), before, 1.0)
    for number in range(SIZES.room):
        one.receive(Dropped(key=MicrobatchKey(owner=1, number=number)), before, 2.0)
    one.handle_timer(2.0)
    said = [message.granted for _, message in one.messages_to_send() if isinstance(message, Neighbour)]
    assert not one.receive(forward(SIZES.room), before, 3.0)
    assert one.next_work(3.0) is None
    for _ in range(2):
        one.receive(Dropped(key=MicrobatchKey(owner=1, number=SIZES.room)), before, 4.0)
    again = [message.granted for _, message in one.messages_to_send() if isinstance(message, Neighbour)]
    assert again == [max(said) + 1]


def test_a_gradient_that_comes_late_counts_nowhere_and_gives_more_time() -> None:
    one = machine(1)
    one.receive(forward(1), PeerId("before"), 1.0)
    work = one.next_work(1.0)
    assert work is not None
    assert work.key is not None
    one.forwarded(work.key, bytes(1000), 100, 2.0)
    timer = one.get_timer()
    assert timer is not None
    one.handle_timer(timer)
    assert not one.receive(backward(1), PeerId("behind"), timer + 1)
    assert one.next_work(timer + 1) is None
    assert one.in_flight == 0


def test_shares_are_a_permutation_for_equals() -> None:
    peers = [PeerId(f"p{i}") for i in range(5)]
    rates, behind = dict.fromkeys(peers, 1.0), {PeerId(f"q{i}"): 2.0 for i in range(5)}
    chosen = []
    for peer in peers:
        mine = shares(peer, rates, behind, b"round 1")
        assert list(mine.values()) == [1.0]
        chosen += mine
    assert len(set(chosen)) == 5
    assert chosen != [next(iter(shares(peer, rates, behind, b"round 2"))) for peer in peers]


def test_shares_follow_speed() -> None:
    rates = {PeerId("a"): 1.0, PeerId("b"): 3.0}
    behind = {PeerId("x"): 0.0, PeerId("y"): 2.0, PeerId("z"): 2.0}
    total = dict.fromkeys(behind, 0.0)
    for peer, rate in rates.items():
        for receiver, share in shares(peer, rates, behind, b"seed").items():
            total[receiver] += share * rate / 4
    assert all(abs(part - 1 / 3) < 0.06 for part in total.values()), total
    assert shares(PeerId("a"), rates, {}, b"") == {}
