"""How many cells a run of many peers should have, in numbers and in words.

A run fixes its number of cells and a peer's cell is a hash of its id, so the choice is made once, for the
largest swarm that is expected. Too few cells: of one with more than ``MAX_MEMBERS`` some sit out each round.
Too many: with M peers in a cell each sends (32 + b) / M bits a value on top, b being the codec's
(``rounds.cells``): with int4 and 51 peers 9 % beyond the flat formula at 32 peers, with 24 peers 16 %, with
8 peers 43 % (``python -m benchmarks.cells``).
"""

from __future__ import annotations

from p2p_co2.protocol.wire.limits import MAX_CELLS, MAX_MEMBERS

CELL_PEERS = 51
"""Peers of a cell where we choose: by chance 3 cells of 100 have more than ``MAX_MEMBERS`` of them then."""
FEW_IN_A_CELL = 16
"""In smaller cells each peer sends a fifth more than in one group, or worse."""
SHORTEST_ROUND_S = 20.0
"""Over cells. A round takes some ten seconds from the first offer on mixed home lines, and a cell that missed
one comes late to the next if that begins at once: of 1,024 simulated peers in rounds of 10 s a third stayed
out, of 256 in rounds of 20 s nobody."""


def cells_for(peers: int) -> int:
    """Into how many cells ``peers`` should be cut, as they are when most are there."""
    return 1 if peers <= MAX_MEMBERS else min(MAX_CELLS, max(2, round(peers / CELL_PEERS)))


def advice_on_cells(peers: int, cells: int) -> str:
    """What to change in a run with ``cells`` that expects ``peers``; empty if nothing."""
    wanted = cells_for(peers)
    is_small = cells > 1 and peers < FEW_IN_A_CELL * cells
    if not is_small and peers <= MAX_MEMBERS * cells:
        return ""
    setting = f"cells = {wanted}" + (f" and group_size = {MAX_MEMBERS}" if wanted > 1 else "")
    why = f"{cells} cells are many" if is_small else f"{cells} {'cell is' if cells == 1 else 'cells are'} few"
    return f"for {peers} peers {why}: set {setting} before the run starts, it cannot be changed later"


def advice_on_short_rounds(round_s: float, cells: int) -> str:
    """What to change in a run with ``cells`` and a round every ``round_s`` seconds; empty if nothing."""
    if cells == 1 or round_s >= SHORTEST_ROUND_S:
        return ""
    return (
        f"over cells a round every {round_s:g} s is short, those that miss one may stay out: "
        f"set round_s = {SHORTEST_ROUND_S:g} or more"
    )
