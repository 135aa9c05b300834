"""node.catching, of what only other cells hold: nobody's word moves a peer there but its own watchers'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2p_co2.node.catching import HEARD_OF_S, NOTICE_FAR_AFTER_S, Catching
from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.node.progress import LocalProgress
from p2p_co2.protocol.catchup import STATE, Goal
from p2p_co2.protocol.membership import PeerInfo
from p2p_co2.protocol.outlook import Outlook
from p2p_co2.protocol.rounds.bounds import AHEAD_AT_MOST
from p2p_co2.protocol.wire.identity import PeerId, cell_of, peer_id_of
from p2p_co2.protocol.wire.messages_pb2 import CellSight, Status
from p2p_co2.protocol.wire.status import PeerStatus

CELLS, VERSION = 3, 7
OURS, NEW, LIE = b"o" * 32, b"n" * 32, b"l" * 32


IDS = [peer_id_of(i.to_bytes(32, "big")) for i in range(50)]


def named(cell: int, count: int) -> list[PeerId]:
    return [peer for peer in IDS if cell_of(peer, CELLS) == cell][:count]


class Cell:
    """One peer of cell 0, two others of it, and what their watchers see of the cells 1 and 2. Time goes on
    by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.goals: list[Goal] = []
        self.makers = frozenset[int]()
        """The cells that made our state."""
        self.me, *self.near = named(0, 3)
        self.outlook = Outlook(self.me, CELLS)
        self.agreed = [AgreedVersion(VERSION, OURS)]
        self.membership = SimpleNamespace(live={}, revision=0)
        node = SimpleNamespace(
            me=self.me,
            membership=self.membership,
            agreed=self.agreed,
            progress=SimpleNamespace(local=LocalProgress(phase=Status.TRAINING)),
            far=SimpleNamespace(
                cells=CELLS, is_near=lambda peer: cell_of(peer, CELLS) == 0, outlook=self.outlook
            ),
            rounds=SimpleNamespace(
                is_completing=lambda fragment: False, made_by=lambda fragment: self.makers
            ),
            catchup=SimpleNamespace(
                ask_swarm=lambda vouch: None,
                add_donors=lambda *of: None,
                want=lambda goal, now: self.goals.append(goal),
                shape=SimpleNamespace(replayable=lambda fragment: 8),
            ),
            now=lambda: self.now,
            report=lambda kind, **fields: None,
        )
        self.catching = Catching(node)  # type: ignore[arg-type]
        self.see(VERSION, OURS)

    def see(
        self,
        version: int,
        digest: bytes,
        cells: tuple[int, ...] = (1, 2),
        near: tuple[bytes, ...] = (OURS, OURS),
    ) -> None:
        """All watchers see the other cells, those of ``cells`` there and the others where ours is. ``near``:
        what the two others of our cell say that they hold."""
        held = {cell: (version, digest) if cell in cells else (VERSION, OURS) for cell in (1, 2)}
        sights = [
            CellSight(cell=cell, peer=named(cell, 1)[0], trains=True, versions=[at], digests=[state])
            for cell, (at, state) in held.items()
        ]
        self.membership.revision += 1
        self.membership.live = {
            peer: PeerInfo(
                status=PeerStatus(phase=Status.TRAINING, sights=sights),
                heard_at=self.now, status_at=self.now, versions=(VERSION,), digests=(held_here,),
            )
            for peer, held_here in zip(self.near, near, strict=True)
        }  # fmt: skip
        self.outlook.conclude(self.membership.live, self.now, 0.1)
        self.catching.look_around(self.now)

    def told(self, version: int, digest: bytes, donors: list[PeerId]) -> bool:
        return self.catching.go_to(0, version, digest, tuple(donors))


@pytest.mark.parametrize(("version", "digest"), [(VERSION + 1, LIE), (VERSION + 1, b""), (10**6, LIE)])
def test_one_word_of_a_state_that_nobody_sees_elsewhere_sends_nobody_after_it(
    version: int, digest: bytes
) -> None:
    """A cell loaded a liar's own state of any version, from donors that it named itself: such a word comes
    with CELL_WAITING, as BEHIND from a coordinator that believed one, and with CELL_DECISION."""
    cell = Cell()
    assert not cell.told(version, digest, named(1, 3)[1:])
    for _ in range(60):
        cell.now += 1.0
        cell.see(VERSION, OURS)
    assert cell.goals == []
    assert not cell.catching.busy()
    assert not cell.catching.is_watching  # it is forgotten
    assert HEARD_OF_S < 60


def test_a_state_that_most_cells_hold_is_loaded_as_soon_as_it_is_seen_there() -> None:
    """At once if somebody said so before, else after some seconds; by the digest that was seen."""
    cell = Cell()
    cell.outlook.messages_to_send()
    cell.told(VERSION + 1, LIE, named(1, 3)[1:])
    cell.see(VERSION + 1, NEW, cells=(1,))  # one of two others: ours and the other are most
    assert cell.goals == []
    cell.now += 1.0
    cell.see(VERSION + 1, NEW)
    (goal,) = cell.goals
    assert (goal.what, goal.version, goal.digest) == (STATE, VERSION + 1, NEW)
    assert set(goal.donors) == {named(1, 1)[0], named(2, 1)[0]}  # those that were seen, not those named
    vouch, donor = cell.catching._vouch, named(1, 2)[1]
    assert vouch(donor, 0, VERSION + 1, NEW) is True
    assert vouch(donor, 0, VERSION + 1, LIE) is False
    assert vouch(donor, 0, VERSION + 2, LIE) is None  # made since, for all we know
    assert vouch(donor, 0, VERSION + 2 + 2 * AHEAD_AT_MOST, LIE) is False

    untold = Cell()
    untold.see(VERSION + 1, NEW)
    assert untold.goals == []
    untold.now += NOTICE_FAR_AFTER_S
    untold.see(VERSION + 1, NEW)
    assert [one.digest for one in untold.goals] == [NEW]


def test_a_cell_that_most_cells_contradict_goes_over_whole_though_one_of_it_has_gone_before() -> None:
    """The first who went over was taken for somebody near who holds the state: the rest loaded the state that
    most of their cell held, their own, and brought the first one back. A storm over cells (seed 6) did so
    every 8 s for 100 s, and ended in two states."""
    rest = Cell()
    for _ in range(2):
        rest.see(VERSION, NEW, near=(NEW, OURS))  # the first has gone
        rest.now += NOTICE_FAR_AFTER_S
    (goal,) = rest.goals
    assert (goal.what, goal.version, goal.digest) == (STATE, VERSION, NEW)
    assert set(goal.donors) == {named(1, 1)[0], named(2, 1)[0]}

    first = Cell()
    first.agreed[0] = AgreedVersion(VERSION, NEW)
    for _ in range(4):
        first.see(VERSION, NEW)  # both others still hold the old one
        first.now += NOTICE_FAR_AFTER_S
    assert first.goals == []
    outvoted = Cell()
    outvoted.agreed[0] = AgreedVersion(VERSION, LIE)
    for _ in range(2):
        outvoted.see(VERSION, OURS)
        outvoted.now += NOTICE_FAR_AFTER_S
    assert [goal.digest for goal in outvoted.goals] == [OURS]


@pytest.mark.parametrize(
    ("makers", "goes"), [((), False), ((1, 2), True), ((2,), False), ((0, 1), False), ((0, 1, 2), False)]
)
def test_who_loaded_a_state_goes_after_those_that_made_it_though_most_cells_stay(
    makers: tuple[int, ...], goes: bool
) -> None:
    """Only they make the next one: where one of three cells went on alone, as it may, the two others had
    waited for it to the end of the run, and without knowing they made a version of their own."""
    cell = Cell()
    cell.makers = frozenset(makers)
    for _ in range(3):
        cell.see(VERSION + 1, NEW, cells=(1,))
        cell.now += NOTICE_FAR_AFTER_S
    wanted = [(goal.what, goal.version, goal.digest, set(goal.donors)) for goal in cell.goals]
    assert wanted == ([(STATE, VERSION + 1, NEW, {named(1, 1)[0]})] if goes else [])
