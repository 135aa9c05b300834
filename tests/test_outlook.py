"""What a peer knows of other cells: who watches whom, what liars can do, and whole swarms that end as one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.ledger import Reduced
from p2p_co2.protocol.outlook import (
    LOOK_EVERY_S,
    LOOK_UP_EVERY_S,
    MAX_WATCHED,
    QUICK_LOOK_UPS,
    SILENT_S,
    TRIES,
    WATCHERS,
    Outlook,
    check_sights,
)
from p2p_co2.protocol.wire.identity import PeerId, cell_of
from p2p_co2.protocol.wire.messages_pb2 import CellLook, CellSight, Status
from p2p_co2.protocol.wire.status import read_status
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.simnet.campaign import storm_settings
from p2p_co2.simnet.ledger import CountingLedger

STATE = bytes(32)


def named(cell: int, cells: int, count: int) -> list[PeerId]:
    """Names that belong to a cell."""
    names = (PeerId(f"peer {number}") for number in range(100_000))
    return [next(name for name in names if cell_of(name, cells) == cell) for _ in range(count)]


def seen(peer: str, cell: int, version: int = 3, position: float = 3.0, **more: Any) -> CellSight:
    return CellSight(cell=cell, peer=peer, versions=[version], digests=[STATE], position=position, **more)


def told(*sights: CellSight, at: float = 0.0) -> Any:
    return SimpleNamespace(status=read_status(Status(sights=sights)), status_at=at)


def test_every_cell_is_watched_by_a_few_and_nobody_watches_many() -> None:
    cells = 20
    peers = named(4, cells, 51)
    watched: Counter[int] = Counter()
    for me in peers:
        outlook = Outlook(me, cells)
        outlook.conclude({peer: told() for peer in peers if peer != me}, 0.0, 0.25)
        outlook.handle_timer(0.0)
        assert len(outlook.wanted) <= MAX_WATCHED
        watched.update(outlook.wanted)
    assert set(watched) == set(range(cells)) - {4}
    assert set(watched.values()) == {WATCHERS}


def watcher() -> tuple[Outlook, list[PeerId]]:
    """A peer that is alone in its cell, of two, and three peers of the other."""
    outlook = Outlook(named(0, 2, 1)[0], 2)
    outlook.conclude({}, 0.0, 0.25)
    outlook.handle_timer(0.0)
    assert outlook.wanted == [1]
    assert outlook.unanswered() == 1
    return outlook, named(1, 2, 3)


def test_who_does_not_answer_is_not_asked_for_ever() -> None:
    outlook, others = watcher()
    outlook.found(1, others, 0.0)
    asked, now = [], 0.0
    while now < LOOK_UP_EVERY_S + 10:
        asked += [peer for peer, _ in outlook.messages_to_send()]
        now = outlook.get_timer() or math.inf
        outlook.handle_timer(now)
    assert Counter(asked) == Counter({peer: TRIES for peer in others})
    assert 2 <= outlook.wanted.count(1) <= QUICK_LOOK_UPS  # all were in vain: the DHT is asked again


def test_a_late_answer_of_nobody_takes_no_one_away() -> None:
    outlook, others = watcher()
    outlook.found(1, others, 0.0)
    outlook.found(1, [], 1.0)
    outlook.unreachable(outlook.messages_to_send()[0][0])
    outlook.handle_timer(outlook.get_timer() or math.inf)
    assert len(outlook.messages_to_send()) == 1  # the next one, without another look-up


def test_a_cell_of_which_nobody_is_listed_yet_is_looked_up_again_soon() -> None:
    """All begin at once: a short run was over before two cells had met (run 803549 of ``ends.py drawn``)."""
    outlook, _ = watcher()
    asked_at = [0.0]
    while asked_at[-1] < 10 * LOOK_UP_EVERY_S:
        outlook.wanted = []
        outlook.found(1, [], asked_at[-1])
        now = asked_at[-1]
        while not outlook.wanted:
            now = outlook.get_timer() or math.inf
            outlook.handle_timer(now)
        asked_at.append(now)
    waits_s = [later - earlier for earlier, later in pairwise(asked_at)]
    assert all(wait_s <= LOOK_EVERY_S for wait_s in waits_s[: QUICK_LOOK_UPS - 1])
    assert all(wait_s >= LOOK_UP_EVERY_S for wait_s in waits_s[QUICK_LOOK_UPS - 1 :])


def test_nobody_can_make_an_id_that_all_watchers_ask_first() -> None:
    """Who knew in which order they ask made, in 51,246 tries, one that all three of a cell of 20 asked."""
    me, others = named(0, 2, 1)[0], named(1, 2, 20)

    def first_of(secret: str) -> PeerId:
        outlook = Outlook(me, 2, secret=secret)
        outlook.conclude({}, 0.0, 0.25)
        outlook.found(1, others, 0.0)
        return outlook.messages_to_send()[0][0]

    assert len({first_of(str(secret)) for secret in range(20)}) > 5
    assert first_of("the same") == first_of("the same")


def test_an_answer_makes_a_word_and_its_age_counts() -> None:
    outlook, others = watcher()
    outlook.found(1, others, 0.0)
    ((asked, question),) = outlook.messages_to_send()
    assert question == CellLook()
    outlook.receive(seen(asked, 1, trains=True), asked, 1.0)
    assert outlook.conclude({}, 2.0, 0.25)
    assert outlook.positions(3.0, 0.25) == [3.0 + 2 * 0.25]
    assert not outlook.is_done((3,), (STATE,), 2.0)
    assert outlook.is_done((3,), (STATE,), 2.0 + SILENT_S)
    assert not outlook.conclude({}, 2.0, 0.25)  # no news
    outlook.receive(seen(asked, 1, settled=True), asked, 4.0)
    outlook.conclude({}, 4.0, 0.25)
    assert outlook.is_done((3,), (STATE,), 4.0)
    assert not outlook.is_done((4,), (STATE,), 4.0)
    assert outlook.sights(7.0)[0].age_s == 3.0


def test_of_three_watchers_one_liar_moves_nothing() -> None:
    cells = 5
    peers = named(0, cells, 4)
    outlook = Outlook(peers[0], cells)
    lie, truth = seen("", 2, 1000, 1000.0, trains=True), seen("", 2, 3, 3.0, trains=True)
    for liar in peers[1:]:
        near = {peer: told(lie if peer == liar else truth) for peer in peers[1:]}
        outlook.words.clear()
        outlook.conclude(near, 0.0, 0.25)
        assert outlook.words[2].versions == (3,)
        assert outlook.positions(0.0, 0.25) == [3.0]


def test_nor_does_it_with_another_state_that_it_saw_last_nor_with_many_sights() -> None:
    cells, wrong = 5, bytes([1]) * 32
    peers = named(0, cells, 4)
    outlook = Outlook(peers[0], cells)
    lie, truth = CellSight(cell=2, peer="liar", versions=[3], digests=[wrong]), seen("", 2, 3, age_s=2.0)
    for liar in peers[1:]:
        near = {peer: told(lie if peer == liar else truth, at=10.0) for peer in peers[1:]}
        outlook.words.clear()
        outlook.conclude(near, 10.0, 0.25)
        assert outlook.words[2].digests == (STATE,)
        assert outlook.donors(0, 3, wrong) == ()
        near[liar] = told(CellSight(cell=2, versions=[9, 9], digests=[wrong, wrong]), at=10.0)
        outlook.words.clear()
        outlook.conclude(near, 10.0, 0.25)
        assert outlook.words[2].versions == (3,)
    check_sights([truth, seen("", 3)], cells)
    with pytest.raises(RemoteProtocolError, match="several sights of one cell"):
        check_sights([truth, truth], cells)


def test_most_cells_say_where_the_swarm_is_and_which_state_it_has() -> None:
    cells = 5
    me, other = named(3, cells, 2)
    outlook = Outlook(me, cells)
    wrong = bytes([1]) * 32
    far = [seen("a", 0, 7), seen("b", 1, 7), seen("c", 2, 6), CellSight(cell=4, peer="d")]
    outlook.conclude({other: told(*far)}, 0.0, 0.25)
    assert set(outlook.words) == {0, 1, 2}  # in the last one nobody has joined
    assert outlook.version(0, 6, over=False) == 7  # of 7, 7, 6 and ours, 6, half
    assert outlook.version(0, 5, over=False) == 7
    far[1] = seen("b", 1, 6)
    outlook.conclude({other: told(*far)}, 0.0, 0.25)
    assert outlook.version(0, 6, over=False) == 6  # one cell alone moves nobody
    assert outlook.version(0, 6, over=True) == 7  # but nothing else will come
    assert outlook.other_digest(0, 6, wrong, is_ours=True) == STATE
    assert outlook.other_digest(0, 6, STATE, is_ours=True) is None
    assert outlook.donors(0, 7) == ("a",)


def test_a_cell_of_two_minds_has_no_say_in_its_own_quarrel() -> None:
    me, other = named(0, 2, 2)
    outlook = Outlook(me, 2)
    wrong = bytes([1]) * 32
    assert outlook.other_digest(0, 3, wrong, is_ours=False) is None  # nobody else was seen
    outlook.conclude({other: told(seen("a", 1))}, 0.0, 0.25)
    assert outlook.other_digest(0, 3, wrong, is_ours=True) is None  # one cell against one, ours the lower
    assert outlook.other_digest(0, 3, wrong, is_ours=False) == STATE
    assert outlook.other_digest(0, 3, STATE, is_ours=False) is None


@pytest.mark.parametrize(
    "wrong",
    [
        CellSight(cell=2),
        CellSight(cell=1, position=math.nan),
        CellSight(cell=1, position=-1.0),
        CellSight(cell=1, age_s=math.inf),
        CellSight(cell=1, versions=[1]),
        CellSight(cell=1, versions=[1], digests=[b"short"]),
        CellSight(cell=1, versions=[1 << 60], digests=[STATE]),
        CellSight(cell=1, versions=[1] * 257, digests=[STATE] * 257),
        CellSight(cell=0),
        CellSight(cell=1, peer=named(0, 2, 1)[0]),
    ],
    ids=[
        "another cell",
        "nan",
        "negative",
        "infinite",
        "no digest",
        "short",
        "version",
        "fragments",
        "ours",
        "peer",
    ],
)
def test_wrong_sights_are_refused(wrong: CellSight) -> None:
    outlook, others = watcher()
    outlook.found(1, others, 0.0)
    ((asked, _),) = outlook.messages_to_send()
    with pytest.raises(RemoteProtocolError):
        outlook.receive(wrong, asked, 1.0)
    outlook.receive(seen(others[0], 1), next(peer for peer in others if peer != asked), 1.0)
    assert outlook.sights(1.0) == []  # of one who was not asked
    with pytest.raises(RemoteProtocolError):
        outlook.receive(CellLook(), named(0, 2, 2)[1], 1.0)
    with pytest.raises(RemoteProtocolError):
        check_sights([seen("", 1)] * (MAX_WATCHED + 1), 2)


# ---- whole swarms on virtual time


def in_cells(settings: Settings, cells: int) -> Settings:
    run = settings.run.model_copy(update={"cells": cells, "group_size": 64})
    return replace(settings, run=run, offers_within_s=0.0)


@pytest.mark.parametrize(("seed", "peers", "cells"), [(2, 12, 2), (8, 15, 3), (11, 15, 3), (13, 32, 2)])
def test_a_storm_over_cells_ends_in_one_state(seed: int, peers: int, cells: int) -> None:
    """All but the first once ended in two or three (``docs/LOG.md``)."""
    log = EventLog()
    result = Swarm(in_cells(storm_settings(seed, peers), cells), log).run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1


def calm() -> Settings:
    clock = ClockConfig(mode="time", round_s=4.0, rounds=4)
    return Settings(run=RunConfig(name="planted", fragments=2, cells=2, clock=clock), peers=8, seed=3)


def test_calm_cells_make_every_round_together() -> None:
    result = Swarm(calm(), EventLog()).run()
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    assert result.counts["round_committed"] >= 8 * 2 * 4


class CountsTwice(CountingLedger):
    """An owner that puts its first contributor into its cell's mean twice and names it once."""

    async def reduce(self, fragment: int, slices: Any, step: str = "mean") -> Reduced:
        mean, weights = await super().reduce(
            fragment, slices if step != "sum" else (*slices, slices[0]), step
        )
        return Reduced(mean, weights[: len(slices)])


class ForgetsACell(CountingLedger):
    """A root that names all cells and averages all but the last."""

    async def reduce(self, fragment: int, slices: Any, step: str = "mean") -> Reduced:
        mean, _ = await super().reduce(fragment, slices if step != "join" else slices[:-1], step)
        return Reduced(mean, tuple(weight for _, weight, _ in slices))


@pytest.mark.parametrize("make_ledger", [CountsTwice, ForgetsACell])
def test_a_planted_bug_over_cells_is_caught(make_ledger: type[CountingLedger]) -> None:
    broken = Swarm(calm(), EventLog(), make_ledger=make_ledger).run().violations
    assert "conservation" in {violation.law for violation in broken}
