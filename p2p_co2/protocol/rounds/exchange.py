"""A slot's owners over all cells: each gives its cell's mean, a root averages them, all take the result.

Laws: a root waits for no cell longer than ``sums_within_s``; a cell's mean counts once, whole, with the
weight that it came with; the average is of what arrived; a root answers whoever gave a mean, also late and
also a second owner (the first one died), with the mean and with which of its cell are in it, so that all
peers of a cell name the same contributors. What is held is at most ``MAX_GIVERS`` sums of a sub-slot for
each cell, as a rule one.

Price: the death of a root costs the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.protocol.rounds.assembly import Assembly, pieces
from p2p_co2.protocol.rounds.attempt import Attempt, check_weight
from p2p_co2.protocol.rounds.cells import read_who, sub_slots
from p2p_co2.protocol.rounds.events import ReduceJob, ReduceWanted, Slice
from p2p_co2.protocol.rounds.owner import Contributors, list_contributors
from p2p_co2.protocol.rounds.parts import BlockRange
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire.bulk import with_data
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_MEMBERS
from p2p_co2.protocol.wire.messages_pb2 import CellMean, CellPart
from p2p_co2.system.memory import Buffer, large_buffer

Joined = tuple[memoryview, tuple[PeerId, ...]]
"""A slot's mean over all cells, and who of our cell is in it."""
MAX_GIVERS = 4
"""Owners of one slot that a cell may have had, one after the other."""


@dataclass
class _Sum:
    """One cell's mean of a sub-slot. ``givers``: who sent it or wanted to."""

    weight: float = 0.0
    who: bytes = b""
    nobody: bytes = b""
    whole: Buffer | None = None
    givers: dict[PeerId, Assembly] = field(default_factory=dict)


class _Root:
    """One sub-slot that this peer averages."""

    def __init__(self, slot: int, sub_slot: int, blocks: BlockRange, cells: list[int]) -> None:
        self.slot, self.sub_slot, self.blocks = slot, sub_slot, blocks
        self.sums = {cell: _Sum() for cell in cells}
        self.job: ReduceJob | None = None
        self.mean: Buffer | None = None
        self.taken: dict[int, bytes] = {}
        """Of the cells that are in the mean: who of them."""


class _Slot:
    """One slot that this peer owns in its cell: the means of its sub-slots."""

    def __init__(self, whole: memoryview, edges: list[tuple[int, int]]) -> None:
        self.whole = whole
        self.transfers = [Assembly(stop - start, whole[start:stop]) for start, stop in edges]
        self.who = [b""] * len(edges)


class Exchange:
    """One member's part in the exchange of one attempt."""

    def __init__(self, attempt: Attempt, swarm: Swarm, outlet: Outlet, now: float) -> None:
        assert attempt.council is not None
        self.attempt, self.council = attempt, attempt.council
        self._swarm, self._outlet = swarm, outlet
        self._due_at = now + attempt.parts_within_s + self.council.sums_within_s
        self._is_due = False
        self._cells = list(self.council.cells)
        self._members = tuple(attempt.shares)
        self._roots: dict[tuple[int, int], _Root] = {}
        self._slots: dict[int, _Slot] = {}
        for slot, roots in enumerate(self.council.roots):
            for sub_slot, blocks in enumerate(sub_slots(attempt.ranges[slot], len(roots.peers))):
                if roots.peers[sub_slot] == swarm.me:
                    self._roots[slot, sub_slot] = _Root(slot, sub_slot, blocks, self._cells)

    # ---- the owner of a slot

    def give(self, slot: int, mean: Buffer, contributors: Contributors) -> Joined | None:
        """Our cell's mean of a slot (fp32), to its roots; theirs will come as ``cell_mean``. It goes once: a
        slot that was taken from us and comes back is summed again, perhaps of others, but a root counts what
        it was given first, and its answer may be here."""
        if slot in self._slots:
            return self._joined(self._slots[slot])
        who = list_contributors(self.attempt, contributors)[1]
        weight = sum(weight for _, weight in contributors)
        start = self.attempt.ranges[slot].start
        width, sum_width = self._swarm.shape.block_bytes, self._swarm.shape.sum_block_bytes
        view, roots = memoryview(mean), self.council.roots[slot].peers
        edges = []
        for sub_slot, blocks in enumerate(sub_slots(self.attempt.ranges[slot], len(roots))):
            first, last = blocks.start - start, blocks.stop - start
            edges.append((first * width, last * width))
            part = view[first * sum_width : last * sum_width]
            for offset, data in pieces(part, self._swarm.piece_bytes([PeerId(roots[sub_slot])])):
                head = CellPart(
                    key=self.council.key, slot=slot, sub_slot=sub_slot, cell=self._swarm.cell, weight=weight,
                    who=who, offset=offset, total=len(part),
                )  # fmt: skip
                self._outlet.send(PeerId(roots[sub_slot]), with_data(head, data))
        self._slots[slot] = _Slot(large_buffer(edges[-1][1]), edges)
        return None

    def cell_mean(self, message: CellMean, sender: PeerId) -> Joined | None:
        """A piece of the mean over all cells: the slot's mean and who of our cell is in it, once it is all
        here. Raises ``RemoteProtocolError``."""
        if message.slot >= len(self.council.roots):
            raise RemoteProtocolError("wrong parts", f"slot {message.slot}")
        roots = self.council.roots[message.slot].peers
        if message.sub_slot >= len(roots) or roots[message.sub_slot] != sender:
            raise RemoteProtocolError("wrong owner", f"CELL_MEAN of slot {message.slot}")
        slot = self._slots.get(message.slot)
        if slot is None:
            return None
        read_who(message.who, self._members)
        slot.who[message.sub_slot] = message.who
        is_new = slot.transfers[message.sub_slot].add(message.offset, message.total, message.data)
        return self._joined(slot) if is_new else None

    def _joined(self, slot: _Slot) -> Joined | None:
        """The mean of a slot and who of our cell is in it, if it is all here."""
        if any(transfer.whole is None for transfer in slot.transfers):
            return None
        if len(set(slot.who)) > 1:
            return None  # an owner died while it gave: no list of contributors fits the whole slot
        return slot.whole, read_who(slot.who[0], self._members)

    # ---- a root

    def cell_part(self, message: CellPart, sender: PeerId) -> bool:
        """A piece of a cell's mean; False if it came for nothing. Raises ``RemoteProtocolError``."""
        root = self._roots.get((message.slot, message.sub_slot))
        if root is None:
            raise RemoteProtocolError("wrong owner", f"CELL_PART of slot {message.slot}")
        if message.cell not in root.sums or self._swarm.cell_of(sender) != message.cell:
            raise RemoteProtocolError("wrong cell", f"{message.cell}")
        check_weight(message.weight / MAX_MEMBERS)
        if len(message.who) > MAX_MEMBERS // 8:
            raise RemoteProtocolError("wrong contributors", f"{len(message.who)} bytes")
        given = root.sums[message.cell]
        given.nobody = bytes(len(message.who))
        transfer = given.givers.get(sender)
        if transfer is None:
            if len(given.givers) >= MAX_GIVERS:
                raise RemoteProtocolError("wrong owner", "a slot does not change its owner so often")
            transfer = given.givers[sender] = Assembly(
                (root.blocks.stop - root.blocks.start) * self._swarm.shape.sum_block_bytes
            )
        is_new = transfer.add(message.offset, message.total, message.data)
        if not is_new or transfer.whole is None:
            return is_new
        if root.mean is not None:
            self._answer(root, message.cell, sender)
        elif given.whole is None and root.job is None:
            given.weight, given.who, given.whole = message.weight, message.who, transfer.whole
            self._check(root)
        return True

    def _check(self, root: _Root) -> None:
        """Ask for the average once all cells' means are here, or the time is up."""
        if root.job is not None or root.mean is not None:
            return
        missing = any(given.whole is None for given in root.sums.values())
        if not missing or (self._is_due and any(given.whole is not None for given in root.sums.values())):
            self._ask(root)

    def _ask(self, root: _Root) -> None:
        slices = tuple(
            Slice(PeerId(f"cell {cell:05}"), given.weight, given.whole)
            for cell, given in root.sums.items()
            if given.whole is not None
        )
        if not slices:
            return  # all were hostile: the slot is lost
        root.job = ReduceJob(
            self.council.key.attempt, self.attempt.fragment, self.attempt.round, root.slot, root.sub_slot,
            *root.blocks, slices, "join",
        )  # fmt: skip
        self._outlet.emit(ReduceWanted(root.job))

    def reduced(self, job: ReduceJob, mean: Buffer) -> None:
        """The encoded mean over all cells: to everybody who gave."""
        root = self._roots[job.part, job.generation]
        if root.job is not job:
            return
        if len(mean) != (job.stop_block - job.start_block) * self._swarm.shape.block_bytes:
            raise LocalProtocolError(f"the mean of slot {job.part} has {len(mean)} bytes")
        root.mean, root.job = mean, None
        root.taken = {cell: given.who for cell, given in root.sums.items() if given.whole is not None}
        for cell, given in root.sums.items():
            given.whole = None
            for giver in given.givers:
                self._answer(root, cell, giver)

    def refused_slice(self, job: ReduceJob, name: PeerId) -> bool:
        """A cell's mean is hostile: average the others. False if the job is not open any more."""
        root = self._roots[job.part, job.generation]
        if root.job is not job:
            return False
        root.sums[int(name.removeprefix("cell "))].whole = None
        root.job = None
        self._ask(root)
        return True

    def _answer(self, root: _Root, cell: int, giver: PeerId) -> None:
        assert root.mean is not None
        who = root.taken.get(cell, root.sums[cell].nobody)
        view = memoryview(root.mean)
        for offset, data in pieces(view, self._swarm.piece_bytes([giver])):
            head = CellMean(
                key=self.council.key, slot=root.slot, sub_slot=root.sub_slot, who=who,
                offset=offset, total=len(view),
            )  # fmt: skip
            self._outlet.send(giver, with_data(head, data))

    # ---- time

    def get_timer(self) -> float | None:
        waiting = any(root.job is None and root.mean is None for root in self._roots.values())
        return self._due_at if waiting and not self._is_due else None

    def handle_timer(self, now: float) -> None:
        if now >= self._due_at and not self._is_due:
            self._is_due = True
            for root in self._roots.values():
                self._check(root)
