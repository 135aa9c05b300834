"""A swarm in cells: who belongs where, how a fragment is cut alike in all of them, who sums what.

One group of all-to-all peers cannot grow for ever: its messages grow with the square of its size. So a large
swarm is cut into cells of some fifty peers, for good, by a hash of the peer's id. Each cell makes its round
as a swarm of its own would, up to the fp32 mean of its members; the owners of one slot in all cells then
average these among themselves, weighted by what arrived, encode once, and hand the mean to their cells. The
sum is the same, the bytes are the same in every cell, and nobody hears of more than its cell and the few
whom it meets over a slot (the two-level reduction of hierarchical all-reduce, as in NCCL and Horovod, with
owners instead of leaders, so that no link carries more than its share).

    READY ... gathering closes      in the cell, as ever
    CELL_READY, CELL_WAITING        a cell's coordinator to the council's: that of the first cell by hash
    CELL_BEGIN, then BEGIN          cells, roots of every slot, time; each cell begins with the council in it
    PART                            the fragment is cut into equal slots, the same in all cells
    CELL_PART, CELL_MEAN, MEAN      owner to root: its cell's mean and weight; back: the mean over all cells
    RESULT, CELL_RESULT             votes; digests of the slots, and of the cell's roster: who is in it
    CELL_DECISION, DECISION         the council's one outcome; the cell's coordinator adds its roster

Heartbeats, votes and look-ups stay in the cell; what cells know of one another beyond rounds (the swarm's
clock, the end of the run, who is to be waited for) is ``outlook``'s.

Laws: a peer's cell, the slots and the sub-slots are pure functions of what all know; a slot is the same
blocks in every cell; sub-slots are the slot, in order.

Price, with cells of M peers, payloads of N values at b bits: beyond the flat 2 (1 - 1/M) N b a peer sends
N (32 + b) / M bits on average. A root takes the sums of up to all cells but serves only a sub-slot of them:
one for every ``CELLS_PER_ROOT`` cells. The number of cells is the run's, and does not follow the swarm's
size. The death of a root or of the council's coordinator costs the round; a cell that was left out of one
loads whole states. Links to other cells stay open once they were used. Any id of a cell can speak for it, as
ids are free: that can cost a round, not bytes (``speakers``). At the end of a run there is no last round of
few: what less than half of the peers or cells still have to offer stays uncounted; one group counts all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.events import PayloadShape
from p2p_co2.protocol.rounds.parts import BlockRange
from p2p_co2.protocol.wire.identity import PeerId, cell_of
from p2p_co2.protocol.wire.limits import MAX_CELLS
from p2p_co2.protocol.wire.messages_pb2 import CellReady, Council, SlotRoots

CELLS_PER_ROOT = 8
"""A slot has one root for so many cells: more would cost messages, fewer would make roots wait for their
links."""
SMALLEST_SUM_BYTES = 16 << 10
"""A slot is not cut into sub-slots with smaller sums."""


def council_order(cells: Iterable[int], fragment: int, round_: int) -> list[int]:
    """The cells by rendezvous hash: the first one's coordinator decides for all."""
    return sorted(
        cells, key=lambda cell: hashlib.sha256(f"council/{cell}/{fragment}/{round_}".encode()).digest()
    )


def slot_ranges(blocks: int) -> tuple[BlockRange, ...]:
    """The slots of a fragment: equal, not empty, at most ``MAX_PARTS``."""
    return _equal(BlockRange(0, blocks), min(blocks, bounds.MAX_PARTS))


def sub_slots(slot: BlockRange, roots: int) -> tuple[BlockRange, ...]:
    """What each of a slot's ``roots`` sums."""
    return _equal(slot, roots)


@lru_cache(1 << 12)
def _equal(whole: BlockRange, count: int) -> tuple[BlockRange, ...]:
    size = whole.stop - whole.start
    edges = [whole.start + size * index // count for index in range(count + 1)]
    return tuple(BlockRange(*edges[index : index + 2]) for index in range(count))


def assign_roots(
    owners: Mapping[int, Sequence[str]], place: tuple[int, int], shape: PayloadShape
) -> list[SlotRoots]:
    """Who sums what, of the ``owners`` of every slot by cell. The roots of a slot are its owners in some of
    the cells, others for each slot and round."""
    cells = sorted(owners)
    wanted = -(-len(cells) // CELLS_PER_ROOT)
    roots = []
    for index, slot in enumerate(slot_ranges(shape.blocks[place[0]])):
        blocks = slot.stop - slot.start
        count = max(1, min(wanted, blocks, blocks * shape.sum_block_bytes // SMALLEST_SUM_BYTES))
        order = council_order(cells, place[0], place[1] * bounds.MAX_PARTS + index)
        roots.append(SlotRoots(peers=[owners[cell][index] for cell in order[:count]]))
    return roots


def are_enough(came: Collection[int], makers: Collection[int]) -> bool:
    """Whether a round may begin with the cells that ``came`` of those that made the one before: more than
    half, or half with the lowest."""
    return 2 * len(came) > len(makers) or (2 * len(came) == len(makers) > 0 and min(makers) in came)


def failure_of(cell: int, why: str = "") -> str:
    """How the reason of an abort begins that one cell is the cause of, by the council's word."""
    return f"cell {cell}: {why}"


def write_who(peers: Collection[str], members: Sequence[PeerId]) -> bytes:
    """Some of the members as bits, lowest first."""
    bits = sum(1 << index for index, peer in enumerate(members) if peer in peers)
    return bits.to_bytes(-(-len(members) // 8), "little")


def read_who(bits: bytes, members: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """What ``write_who`` wrote, in the members' order; raises ``RemoteProtocolError``."""
    number = int.from_bytes(bits, "little")
    if len(bits) != -(-len(members) // 8) or number >> len(members):
        raise RemoteProtocolError("wrong contributors", "bits of peers that are no members")
    return tuple(peer for index, peer in enumerate(members) if number >> index & 1)


def _is_of(peer: str, cells: int, some: Collection[int]) -> bool:
    """Whether this may be the id of a peer of one of ``some`` cells."""
    return len(peer) <= bounds.MAX_PEER_ID and cell_of(peer, cells) in some


def check_cell_ready(message: CellReady, sender: PeerId, cells: int, shape: PayloadShape) -> None:
    """Raise ``RemoteProtocolError`` for a CELL_READY that no honest coordinator sends."""
    if message.cell >= cells or cell_of(sender, cells) != message.cell:
        raise RemoteProtocolError("wrong cell", f"{message.cell}")
    if len(message.state_digest) != bounds.DIGEST_BYTES:
        raise RemoteProtocolError("wrong digest length", f"{len(message.state_digest)} bytes")
    if len(message.owners) != len(slot_ranges(shape.blocks[message.key.fragment])):
        raise RemoteProtocolError("wrong parts", f"{len(message.owners)} owners")
    if any(not _is_of(owner, cells, (message.cell,)) for owner in set(message.owners)):
        raise RemoteProtocolError("wrong owner", "an owner of another cell")
    if not 0 <= message.parts_within_s <= shape.parts_cap_s or message.base_version >= message.key.round:
        raise RemoteProtocolError("impossible duration", "or version")
    if len(message.before) > cells or any(cell >= cells for cell in message.before):
        raise RemoteProtocolError("wrong cell", "of the round before")
    if not 1 <= message.members <= bounds.MAX_PARTS:
        raise RemoteProtocolError("wrong group", f"{message.members} members")


def check_council(message: Council, cells: int, shape: PayloadShape) -> None:
    """Raise ``RemoteProtocolError`` for a council that no honest coordinator writes."""
    taking_part = list(message.cells)
    if not taking_part or len(taking_part) > MAX_CELLS or taking_part != sorted(set(taking_part)):
        raise RemoteProtocolError("wrong cell", "cells must be ascending")
    if taking_part[-1] >= cells or len(message.coordinator) > bounds.MAX_PEER_ID:
        raise RemoteProtocolError("wrong cell", str(taking_part[-1]))
    slots = slot_ranges(shape.blocks[message.key.fragment])
    if len(message.roots) != len(slots):
        raise RemoteProtocolError("wrong parts", f"roots of {len(message.roots)} slots")
    most = -(-len(taking_part) // CELLS_PER_ROOT)
    for slot, roots in zip(slots, message.roots, strict=True):
        if not 1 <= len(roots.peers) <= min(most, slot.stop - slot.start):
            raise RemoteProtocolError("wrong parts", f"{len(roots.peers)} roots of a slot")
        if any(not _is_of(peer, cells, taking_part) for peer in roots.peers):
            raise RemoteProtocolError("wrong cell", "a root that does not take part")
    if not 0 <= message.sums_within_s <= 2 * shape.parts_cap_s + bounds.GRACE_S:
        raise RemoteProtocolError("impossible duration", f"{message.sums_within_s} s")
