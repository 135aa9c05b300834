"""How a round grows with the swarm, flat and over cells: computed from the very cuts and messages.

    python -m benchmarks.cells [--parameters 100e6] [--fragments 4] [--codec int4] [--cell 51]

For each size: bytes that a peer sends per round of a fragment, in payloads, and what that is beyond the flat
formula at 32 peers; the most that a root of sub-slots sends or takes; messages that a peer sends; what the
coordinator of a cell and the council's send in a round. Payloads and means by formula, everything else as
serialised messages with ids of real length. No network and no clock: what was run is in docs/LOG.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.protocol.rounds.cells import assign_roots, slot_ranges, sub_slots
from p2p_co2.protocol.rounds.parts import BlockRange
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.identity import peer_id_of
from p2p_co2.tensors.codec import get_codec

SIZES = (32, 64, 128, 512, 1024, 4096)
FLAT_32 = 2 * (1 - 1 / 32)
KEY = wire.RoundKey(fragment=3, round=1000, attempt=bytes(16))


@dataclass(frozen=True)
class Growth:
    """Of one size. ``sent``, ``root_up``, ``root_down``: payloads; ``messages``: sent by a peer, each slice
    and mean counted once, heartbeats not."""

    peers: int
    cells: int
    roots: int
    sent: float
    root_up: float
    root_down: float
    messages: float
    coordinator_bytes: int
    council_bytes: int


def peer_id(number: int) -> str:
    return peer_id_of(number.to_bytes(32, "big"))


def flat(peers: int, blocks: int) -> Growth:
    """One group of all, as today."""
    names = sorted(peer_id(n) for n in range(peers))
    members = [wire.Member(peer=name, weight=1e6, base_version=999) for name in names]
    contributors = [wire.Contributor(peer=name, weight=1e6) for name in names]
    begin = wire.Begin(key=KEY, members=members, state_digest=bytes(32), parts_within_s=9, nonce=bytes(16))
    outcome = wire.Outcome(key=KEY, run=bytes(32), committed=True, state_digest=bytes(32), members=members)
    for index, name in enumerate(names):
        start, stop = blocks * index // peers, blocks * (index + 1) // peers
        begin.parts.add(owner=name, start_block=start, stop_block=stop)
        outcome.parts.add(start_block=start, stop_block=stop, digest=bytes(32), contributors=contributors)
    sent = (begin.ByteSize() + outcome.ByteSize() + 64) * (peers - 1)
    traffic = 2 * (1 - 1 / peers)
    return Growth(peers, 1, 0, traffic, traffic, traffic, 2 * (peers - 1) + 4, sent, 0)


def over_cells(peers: int, cells: int, shape: PayloadShape) -> Growth:
    """Cells of equal size."""
    blocks, size = shape.blocks[0], peers / cells
    slots = slot_ranges(blocks)
    owned = len(slots) / size
    owners = {
        cell: [peer_id(cell * 64 + int(slot * size / len(slots))) for slot in range(len(slots))]
        for cell in range(cells)
    }
    roots = assign_roots(owners, (0, 1), shape)
    load: Counter[str] = Counter()
    for slot, chosen in zip(slots, roots, strict=True):
        for part, peer in zip(sub_slots(slot, len(chosen.peers)), chosen.peers, strict=True):
            load[peer] += part.stop - part.start
    other = 1 - 1 / cells
    ratio = shape.sum_block_bytes / shape.block_bytes
    sent = 2 * (1 - 1 / size) + other * (ratio + 1) / size
    most = max(load.values()) / blocks
    count = sum(len(chosen.peers) for chosen in roots) / len(roots)
    names = sorted(set(owners[0]))
    coordinator, council = _decisions(names, owners, roots, slots)
    return Growth(
        peers, cells, round(count), sent,
        2 * (1 - 1 / size) + ratio / size + (cells - 1) * most,
        2 * (1 - 1 / size) + 1 / size + (cells - 1) * most * ratio,
        2 * len(slots) * (1 - 1 / size) + 2 * owned * count * other + 4, coordinator, council,
    )  # fmt: skip


def _decisions(
    names: list[str],
    owners: dict[int, list[str]],
    roots: list[wire.SlotRoots],
    slots: tuple[BlockRange, ...],
) -> tuple[int, int]:
    """Bytes that a cell's coordinator sends to its members, and the council's to the cells."""
    council = wire.Council(key=KEY, coordinator=names[0], cells=owners, roots=roots, sums_within_s=9)
    members = [wire.Member(peer=name, weight=1e6, base_version=999) for name in names]
    begin = wire.Begin(
        key=KEY, members=members, state_digest=bytes(32), parts_within_s=9, nonce=bytes(16), council=council
    )
    outcome = wire.Outcome(key=KEY, run=bytes(32), committed=True, state_digest=bytes(32), base_version=999)
    roster = wire.Outcome(key=KEY, run=bytes(32), committed=True, members=members)
    who = bytes(-(-len(names) // 8))
    for (start, stop), owner in zip(slots, owners[0], strict=True):
        begin.parts.add(owner=owner, start_block=start, stop_block=stop)
        outcome.parts.add(start_block=start, stop_block=stop, digest=bytes(32))
        roster.parts.add(start_block=start, stop_block=stop, who=who)
    for cell in owners:
        outcome.cells.add(cell=cell, roster_digest=bytes(32), coordinator=names[0])
    decision = outcome.ByteSize() + roster.ByteSize() + 128
    told = wire.CellBegin(council=council, attempt=bytes(16)).ByteSize() + outcome.ByteSize() + 64
    return (begin.ByteSize() + decision) * (len(names) - 1), told * (len(owners) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--cell", type=int, default=51, help="Peers in a cell.")
    options = parser.parse_args()
    codec = get_codec(options.codec)
    blocks = codec.blocks(int(options.parameters / options.fragments))
    shape = PayloadShape(codec.block_bytes, (blocks,), 4 * codec.block_values)
    payload_mb = blocks * codec.block_bytes / 1e6
    print(f"payload {payload_mb:.2f} MB; bytes per peer in payloads, flat formula at 32 peers {FLAT_32:.4f}")
    print("peers cells roots  sent  beyond  root up  root down  messages  coordinator kB  council kB")
    for peers in SIZES:
        cells = 1 if peers <= 64 else round(peers / options.cell)
        one = flat(peers, blocks) if cells == 1 else over_cells(peers, cells, shape)
        beyond = 100 * (one.sent / FLAT_32 - 1)
        print(
            f"{one.peers:5} {one.cells:5} {one.roots:5} {one.sent:6.3f} {beyond:6.1f}% {one.root_up:8.3f} "
            f"{one.root_down:10.3f} {one.messages:9.1f} {one.coordinator_bytes / 1e3:15.0f} "
            f"{one.council_bytes / 1e3:11.0f}"
        )


if __name__ == "__main__":
    main()
