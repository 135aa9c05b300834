"""rounds.forming: which cells a round needs, by what this peer knows, was told, and sees."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.protocol.rounds.council import Councils
from p2p_co2.protocol.rounds.deadline import Cadence
from p2p_co2.protocol.rounds.decision import Verdicts, sign_outcome
from p2p_co2.protocol.rounds.forming import Forming
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import Identity, PeerId, cell_of
from tests.round_network import RUN, make_identity

CELLS, ROUND = 5, 8
SHAPE = PayloadShape(8, (24,), 8)
STATE = b"s" * 32


def of_cell(cell: int) -> Identity:
    return next(one for one in map(make_identity, range(200)) if cell_of(one.peer_id, CELLS) == cell)


def ready_of(cell: int, before: tuple[int, ...] = ()) -> tuple[wire.CellReady, PeerId]:
    speaker = of_cell(cell).peer_id
    key = wire.RoundKey(fragment=0, round=ROUND, attempt=bytes([cell + 1]) * 16)
    ready = wire.CellReady(
        key=key, cell=cell, state_digest=STATE, members=8, parts_within_s=1.0, owners=24 * [speaker],
        before=before,
    )  # fmt: skip
    return ready, speaker


def outcome_of(cells: tuple[int, ...]) -> wire.Outcome:
    key = wire.RoundKey(fragment=0, round=ROUND - 1, attempt=bytes(16))
    outcome = wire.Outcome(key=key, run=RUN, state_digest=STATE, committed=True)
    for cell in cells:
        outcome.cells.add(cell=cell, roster_digest=b"r" * 32)
    return outcome


def may_begin(
    *came: int, known: tuple[int, ...] = (), heard: tuple[int, ...] = (), told: tuple[int, ...] = (),
    awake: tuple[int, ...] = (), finished: tuple[int, ...] = (),
) -> bool:  # fmt: skip
    """In cell 0. ``told``: by the first cell that came."""
    swarm = Swarm(of_cell(0).peer_id, SHAPE, 64, CELLS)
    swarm.awake = dict.fromkeys(awake, (ROUND - 1,))
    swarm.finished_in = dict.fromkeys(finished, frozenset[int]())
    forming = Forming(0, swarm, frozenset(known), lambda: frozenset(heard), frozenset(), 10.0, 30.0)
    for cell in came:
        forming.speakers.take(*ready_of(cell, told if cell == came[0] else ()), 0.0)
    return forming.may_begin()


@pytest.mark.parametrize(
    ("came", "given", "begins"),
    [
        ((2, 3, 4), {}, True),  # of all, most
        ((2, 3), {}, False),
        ((2, 3), {"known": (2, 3, 4)}, True),
        ((2, 3), {"told": (2, 3, 4)}, True),
        ((2, 3, 4), {"told": (1, 2), "heard": (0, 1)}, False),  # of these three it is one
        ((2, 3, 4), {"known": (2, 3), "told": (1, 2), "heard": (0, 1)}, True),  # what we know goes first
        ((2, 3, 4), {"heard": (1, 2)}, False),  # the higher half
        ((1, 3, 4), {"heard": (1, 2)}, True),
    ],
)
def test_a_round_needs_most_of_the_cells_that_made_the_one_before(
    came: tuple[int, ...], given: dict[str, tuple[int, ...]], begins: bool
) -> None:
    assert may_begin(*came, **given, awake=(1, 2, 3, 4)) == begins


@pytest.mark.parametrize(
    ("came", "heard", "seen", "begins"),
    [
        ((2, 3, 4), (1,), {}, True),  # nobody sees it any more
        ((2, 3, 4), (1,), {"awake": (1,)}, False),
        ((2, 3, 4), (1,), {"finished": (1,)}, False),
        ((2, 3, 4), (0, 1), {}, False),  # our own
        ((1, 2), (1, 2), {}, True),  # they are ready, and no others are needed
    ],
)
def test_what_was_told_binds_while_enough_of_the_named_cells_are_seen(
    came: tuple[int, ...], heard: tuple[int, ...], seen: dict[str, tuple[int, ...]], begins: bool
) -> None:
    assert may_begin(*came, heard=heard, **seen) == begins


def test_an_answer_that_comes_after_the_last_cell_counts() -> None:
    """Three of five cells would begin without those that made the round before."""
    swarm, outlet, verdicts = (
        Swarm(of_cell(0).peer_id, SHAPE, 64, CELLS),
        Outlet(of_cell(0).peer_id),
        Verdicts(),
    )
    swarm.awake = dict.fromkeys(range(1, CELLS), (ROUND - 1,))
    councils = Councils(of_cell(0), RUN, swarm, outlet, [Cadence(20.0)])
    for cell in (2, 3, 4):
        councils.on_ready(*ready_of(cell), verdicts, (ROUND - 1, STATE), 100.0, leads=True)
    assert not councils.close_complete(100.1)  # it waits for the others
    verdicts.hear(of_cell(1).peer_id, sign_outcome(of_cell(1), outcome_of((0, 1))), outcome_of((0, 1)))
    assert councils.close_complete(140.0)
    told = [message for _, message in outlet.messages]
    assert not [message for message in told if isinstance(message, wire.CellBegin)]
    assert "only 0 of 2 cells" in told[-1].refusal
