"""Stages on virtual time: storms, what may go wrong one by one, and bugs that the laws find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_co2.planning.pipeline import StageLoad
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.protocol.pipeline import Key, Pipeline, transit
from p2p_co2.protocol.pipeline.neighbours import Neighbours
from p2p_co2.simnet import microbatches
from p2p_co2.simnet.campaign import play_stage_storm
from p2p_co2.simnet.internet import Noise
from p2p_co2.simnet.microbatches import Layout, MicrobatchBooks, StageVolunteer, VirtualStages
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Declined, Dropped

STORMS = 40
LINE = LinkProfile("line", 800_000_000, 800_000_000, 10.0, 0.0, 0.0, "open")


def loads(*forward_s: float, size: int = 40_000) -> tuple[StageLoad, ...]:
    """Stages with so many seconds of a forward; a backward takes twice as much."""
    last = len(forward_s) - 1
    return tuple(
        StageLoad(
            forward_s=seconds,
            backward_s=2 * seconds,
            ahead_bytes=size if stage < last else 0,
            back_bytes=size if stage else 0,
        )
        for stage, seconds in enumerate(forward_s)
    )


def world_of(
    counts: list[int], forward_s: float = 0.05, line: LinkProfile = LINE, **layout: Any
) -> VirtualStages:
    stages = loads(*[forward_s] * len(counts))
    return VirtualStages(
        Layout(stages=stages, **layout), [[StageVolunteer(line)] * count for count in counts]
    )


def named(world: VirtualStages, stage: int) -> list[PeerId]:
    return [replica.me for replica in world.of_stage(stage)]


def finish(world: VirtualStages) -> None:
    world.end()
    assert not world.books.violations, world.books.violations[:3]
    assert not world.world.errors


# ---- storms


@pytest.mark.parametrize("first", [1, 2])
def test_storms_break_no_law(first: int) -> None:
    failures = []
    for seed in range(first, STORMS + 1, 2):
        books = play_stage_storm(seed).books
        assert min(books.tokens) > 0
        if books.violations:
            failures += [
                f"p2p-co2 simulate --storm --stages {len(books.counted)} --seed {seed}",
                *map(str, books.violations[:3]),
            ]
    assert not failures, "\n  ".join(failures)


def test_a_storm_is_the_same_again() -> None:
    first, again, other = (play_stage_storm(seed).books.digest() for seed in (3, 3, 4))
    assert first == again != other


def test_neighbours_are_told_of_their_room_in_one_order() -> None:
    """So a storm is the same in any process."""
    told = list[PeerId]()
    neighbours = Neighbours(PeerId("me"), 1, 7, b"", lambda peer, said: told.append(peer))
    for number in range(8):
        neighbours.join(PeerId(f"peer {number}"), 0)
    del told[:]
    neighbours.grant(8)
    assert told == sorted(told)
    assert len(told) == 8


class SendsAgain(Pipeline):
    """Takes any doubt for a no: what was dropped behind goes to another replica."""

    def receive(self, message: Any, sender: PeerId, now: float) -> bool:
        if isinstance(message, Dropped):
            message = Declined(key=message.key, reason=message.reason)
        return super().receive(message, sender, now)


def test_a_microbatch_that_is_sent_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "Pipeline", SendsAgain)
    laws = {broken.law for seed in (4, 5) for broken in play_stage_storm(seed).books.violations}
    assert "once" in laws


def test_what_is_held_without_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class HoldsAll(Pipeline):
        def held(self) -> dict[str, tuple[int, int]]:
            return {name: (now, now - 1) for name, (now, _) in super().held().items()}

    monkeypatch.setattr(microbatches, "Pipeline", HoldsAll)
    world = world_of([1, 1])
    world.run(1.0)
    assert {broken.law for broken in world.books.violations} == {"memory"}


def test_the_books_know_each_law() -> None:
    books = MicrobatchBooks(2, lambda: 1.0)
    a, b, one, two = PeerId("a"), PeerId("b"), Key(1, 1), Key(1, 2)
    books.make(a, one, 100)
    books.count(b, 1, one, 100)
    books.count(a, 0, one, 100)
    books.step(a, 0, [one], 100, most=1)
    assert not books.violations
    books.count(b, 1, one, 100)
    books.count(a, 0, two, 100)
    books.step(a, 0, [one, one], 200, most=2)
    books.step(a, 0, [one, two], 100, most=1)
    laws = [broken.law for broken in books.violations]
    assert laws == ["once", "suffix", "conservation", "conservation", "conservation"]


# ---- urgent gradients


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (3, 12), (4, 16)])
def test_the_drain_under_1f1b_is_p_of_2m(stages: int, microbatches: int) -> None:
    """Of all gradients that cross, where each stage has no more in flight than there are stages behind."""
    windows = tuple(stages - stage for stage in range(stages))
    world = world_of([1] * stages, microbatches=microbatches, window=windows)
    world.run(200)
    assert all(sum(steps.values()) > 20 for steps in world.books.steps)
    urgent = sum(world.books.urgent) / sum(world.books.gradients)
    assert abs(urgent - stages / (2 * microbatches)) < 0.01
    finish(world)


def test_what_a_gradient_leaves_out_has_an_heir_until_the_last() -> None:
    """The law "heir" holds for unequal replicas of four stages, and those that share no path are found."""
    peers = [[StageVolunteer(LINE), StageVolunteer(LINE, 0.6)] for _ in range(4)]
    world = VirtualStages(Layout(stages=loads(0.05, 0.03, 0.06, 0.02), microbatches=16), peers)
    world.run(60)
    assert all(
        0 < urgent < sent
        for urgent, sent in zip(world.books.urgent[1:], world.books.gradients[1:], strict=True)
    )
    finish(world)


def test_an_heir_of_another_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transit, "_onward", lambda path, *here: 0)
    laws = {broken.law for seed in (1, 2) for broken in play_stage_storm(seed).books.violations}
    assert laws == {"heir"}


def test_an_heir_is_counted_in_the_inner_step_of_what_it_inherits() -> None:
    """Also where the line binds, so that gradients are urgent before the step's last forward: the queue of
    the last stage holds more than the step begins."""
    narrow = LinkProfile("narrow", 5_000_000, 800_000_000, 10.0, 0.0, 0.0, "open")
    peers = [
        [StageVolunteer(LINE), StageVolunteer(LINE, 0.75)],
        [StageVolunteer(LINE), StageVolunteer(LINE, 0.75)],
    ]
    stages = loads(0.01, 0.005, 0.02)
    world = VirtualStages(
        Layout(stages=stages, microbatches=8, urgent_bytes=5_000), [*peers, [StageVolunteer(narrow)]]
    )
    world.run(60)
    assert world.books.urgent[2] > 0.9 * world.books.gradients[2] > 0
    finish(world)


def test_gradients_are_urgent_where_the_line_binds() -> None:
    """And smaller ones then make more of it: three stages, two payloads take four times as long as
    computing."""
    made = []
    line = LinkProfile("narrow", 5_000_000, 800_000_000, 10.0, 0.0, 0.0, "open")
    for urgent in (0, 5_000):
        world = VirtualStages(
            Layout(stages=loads(0.01, 0.01, 0.01), microbatches=32, urgent_bytes=urgent),
            [[StageVolunteer(line)]] * 3,
        )
        world.run(120)
        finish(world)
        made.append(world.books.tokens[0])
        sent = world.books.gradients
        assert all(
            urgent > 0.9 * sent > 0 for urgent, sent in zip(world.books.urgent[1:], sent[1:], strict=True)
        )
    assert made[1] > 1.1 * made[0], made
    fast = world_of([1, 1, 1], microbatches=32)
    fast.run(60)
    assert all(
        u < 0.5 * sent for u, sent in zip(fast.books.urgent[1:], fast.books.gradients[1:], strict=True)
    )
    finish(fast)


# ---- speed


@pytest.mark.parametrize("microbatches", [16, 64])
def test_equal_replicas_are_busy(microbatches: int) -> None:
    world = world_of([2, 2, 2], microbatches=microbatches)
    world.run(120)
    busy = [replica.spent.busy_s / 120 for replica in world.replicas.values()]
    assert min(busy) > (0.75 if microbatches == 16 else 0.9), busy
    finish(world)
    assert all(set(steps) <= {microbatches, *range(microbatches)} for steps in world.books.steps)


def test_unequal_groups_are_busy_where_it_binds() -> None:
    stages = loads(0.05, 0.02, 0.04)
    peers = [[StageVolunteer(LINE)] * count for count in (3, 1, 2)]
    world = VirtualStages(Layout(stages=stages, microbatches=32), peers)
    world.run(120)
    busy = [sum(r.spent.busy_s for r in world.of_stage(stage)) / 120 for stage in range(3)]
    assert busy[1] > 0.85, busy  # one at 0.06 s a microbatch, two at 0.12, three at 0.15
    finish(world)


def test_a_slow_replica_holds_nobody_up() -> None:
    """One of three replicas four times slower costs little where the stage before binds anyway."""
    made = []
    for speed in (1.0, 0.25):
        world = world_of([2, 2], microbatches=32)
        slow = world.add(1, StageVolunteer(LINE, speed))
        world.run(200)
        made.append(world.books.tokens[0])
    counted = [list(world.books.counted[1].values()).count(me) for me in named(world, 1)]
    assert list(world.books.counted[1].values()).count(slow) < 0.5 * max(counted)
    assert made[1] > 0.85 * made[0], made
    finish(world)


# ---- what may go wrong, one by one


def test_a_chain_counts_every_microbatch_everywhere() -> None:
    world = world_of([1, 1, 1], forward_s=0.01)
    world.run(20)
    finish(world)
    first, *others = (set(counted) for counted in world.books.counted)
    assert all(first == other for other in others)
    assert set(world.books.made) == first
    assert not any(replica.spent.dropped for replica in world.replicas.values())


def test_a_replica_that_leaves_declines_and_another_takes_it() -> None:
    world = world_of([1, 2])
    world.run(20)
    leaving, _ = world.of_stage(1)
    before = world.books.tokens[0]
    leaving.close()
    world.run(20)
    first = world.of_stage(0)[0]
    assert leaving.machine.is_drained
    assert not first.spent.dropped
    assert world.books.tokens[0] > before
    finish(world)
    assert set(world.books.counted[0]) == set(world.books.counted[1])


def test_a_next_replica_that_dies_takes_with_it_what_it_had() -> None:
    world = world_of([1, 2, 1], microbatches=16)
    world.run(20)
    victim = named(world, 1)[0]
    world.kill(victim)
    world.run(20)
    first, held = world.of_stage(0)[0], 16
    assert 0 < first.spent.dropped.total() <= held
    behind, above = set(world.books.counted[2]), set(world.books.counted[0])
    assert above < behind  # what the last stage has counted stays
    counted = world.books.tokens[0]
    world.run(20)
    assert world.books.tokens[0] > counted
    finish(world)


def test_a_way_that_is_cut_is_gone_round() -> None:
    world = world_of([1, 2], cap_s=30.0)
    world.run(20)
    first, cut_off = named(world, 0)[0], named(world, 1)[0]
    world.cut(first, cut_off, for_s=60.0)
    world.run(50)
    alone = list(world.books.counted[1].values()).count(cut_off)
    counted = world.books.tokens[0]
    world.run(10)
    assert world.books.tokens[0] > counted
    assert list(world.books.counted[1].values()).count(cut_off) == alone
    world.run(60)
    assert list(world.books.counted[1].values()).count(cut_off) > alone, "it is used again when it answers"
    finish(world)


def test_what_a_dead_owner_made_is_counted_behind_if_it_was_there() -> None:
    world = world_of([2, 1])
    world.run(20)
    owner = named(world, 0)[0]
    world.kill(owner)
    world.run(20)
    orphans = set(world.books.counted[1]) - set(world.books.counted[0])
    assert orphans
    assert len(orphans) <= 8 + world.layout.window
    finish(world)


def test_a_gradient_that_is_late_counts_nowhere_before_and_blames_nobody() -> None:
    world = world_of([1, 1], cap_s=20.0)
    world.run(20)
    first, last = named(world, 0)[0], named(world, 1)[0]
    world.stall(last, for_s=12.0)
    world.run(30)
    reasons = world.replicas[first].spent.dropped
    assert "the gradient did not come in time" in reasons
    counted = world.books.tokens[0]
    world.run(20)
    assert world.books.tokens[0] > counted
    finish(world)


def test_a_long_queue_that_moves_is_not_late() -> None:
    """Where the uplink binds, a window takes several times as long as the first microbatch of a step."""
    slow = replace(LINE, up_bits_per_s=20_000_000)
    stages = loads(*[0.02] * 4, size=500_000)
    world = VirtualStages(Layout(stages=stages, microbatches=128), [[StageVolunteer(slow)]] * 4)
    world.run(150)
    assert not any(replica.spent.dropped for replica in world.replicas.values())
    finish(world)


def test_who_dies_in_an_inner_step_begins_anew() -> None:
    world = world_of([1, 1, 1])
    world.run(20)
    middle = named(world, 1)[0]
    world.kill(middle)
    world.world.call_at(world.now + 3.0, world.start, middle)
    world.run(10)
    counted = list(world.books.tokens)
    world.run(20)
    assert all(now > before for now, before in zip(world.books.tokens, counted, strict=True))
    finish(world)


def test_an_empty_stage_is_said_and_comes_back() -> None:
    world = world_of([1, 1], forward_s=0.01)
    world.run(5)
    first, lone = world.of_stage(0)[0], named(world, 1)[0]
    world.kill(lone)
    world.run(5)
    assert first.machine.waits_for == "stage 1 has no replica"
    stood = world.books.tokens[0]
    world.run(30)
    assert world.books.tokens[0] == stood
    world.add(1, StageVolunteer(LINE))
    world.run(5)
    assert world.books.tokens[0] > stood + 8 * world.layout.tokens
    finish(world)


def test_a_newcomer_counts_soon_and_takes_its_share() -> None:
    world = world_of([2, 1, 2], microbatches=16)
    world.run(30)
    newcomer = world.add(1, StageVolunteer(LINE))
    world.run(5)
    mine = list(world.books.counted[1].values()).count(newcomer)
    assert mine > 0
    world.run(60)
    old, new = (list(world.books.counted[1].values())[-200:].count(me) for me in named(world, 1))
    assert new > 0.6 * old
    finish(world)


def test_lost_messages_cost_microbatches_and_wedge_nothing() -> None:
    """Over TCP none is lost; what a link held when it broke is."""
    world = world_of([1, 1, 1], microbatches=16, cap_s=20.0)
    world.run(50)
    calm = world.books.tokens[0]
    world.internet.set_noise(Noise(lost=0.03))
    world.run(200)
    world.internet.set_noise(Noise())
    world.run(50)
    counted = world.books.tokens[0]
    world.run(50)
    assert world.books.tokens[0] - counted > 0.9 * calm
    finish(world)


# ---- what is foretold
