"""Checkpoints beside training: what of it the training thread does, and what another thread does.

The agreed states are lent by the ledger and written, with the digest, the disk and the renaming, by the
saver's own thread; a round that commits before its fragment's state was taken has it taken first (``loan``).
What training changes, the inner optimizer's state and the buffers, only the training thread may read: step
after step it copies some of it, and the saver writes that.

Laws: the agreed states are of one moment; the state of a parameter is of one step, those of two parameters
some steps apart (they are no agreement, only the inner optimizer's acceleration); no checkpoint ends
training: what cannot be saved is left out and told once, when the peer starts or when it first appears, and a
file that cannot be written is told and tried again when the next is due.

Price: training stands still for a copy of ``AT_ONCE_BYTES`` at a time, or of the largest parameter's state,
and as much memory is taken until it is written; all of it counts as standing still. Numbers in the
optimizer's state that are no tensors are those of the first step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from p2p_co2.config import CHECKPOINT_BYTES_PER_DAY, CHECKPOINT_LEAST_S, DAY_S
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.checkpoint import Checkpoint, Said, Saving, parts, say, trouble_with
from p2p_co2.tensors.fragments.large_tensor import large_tensor
from p2p_co2.trainer.ledger import TensorLedger
from p2p_co2.trainer.loan import Loan
from p2p_co2.trainer.plan import Plan
from p2p_co2.trainer.resuming import FAULTS, inner_of, kept_buffers, trained_parameters
from p2p_co2.trainer.synchroniser import Synchroniser

AT_ONCE_BYTES = 32 << 20
"""What the training thread copies between two steps, at least one parameter's state."""
MOST_STEPS = 64
"""Over so many steps a copy is spread at the most: more is copied at once where there is more."""
_BEAT_S = 0.05
Part = Mapping[str, Tensor]


class Saver:
    """One per peer. Called by the training thread, but for what its own thread does."""

    def __init__(
        self,
        plan: Plan,
        ledger: TensorLedger,
        sync: Synchroniser,
        report: Callable[[type[ev.Event], Mapping[str, Any]], None],
    ) -> None:
        self._plan, self._ledger, self._sync, self._report = plan, ledger, sync, report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="p2p-co2 checkpoint")
        self._under_way: Future[None] | None = None
        """Nothing else writes to the folder meanwhile."""
        self._copying: _Copying | None = None
        self._folder = plan.config.folder / "checkpoint"
        self._refused: EnvironmentFault | None = None
        """Why the last one was not written."""
        self._began_at = time.monotonic()
        self._told = set[str]()
        self._size_bytes = 0
        self._look()

    @property
    def every_s(self) -> float:
        """Between two checkpoints: as configured, or as often as the budget of writes allows."""
        budget_s = DAY_S * self._size_bytes / CHECKPOINT_BYTES_PER_DAY
        return self._plan.config.checkpoint_every_s or max(CHECKPOINT_LEAST_S, budget_s)

    def keep_up(self) -> None:
        """Begin a checkpoint if one is due, and do a step's share of the one under way; at once. Raises what
        is a bug."""
        if self._under_way is not None and self._under_way.done():
            self._end()
            if self._refused is not None:
                self._report(ev.Warned, {"text": f"no checkpoint was written: {self._refused}"})
        if self._under_way is None and time.monotonic() - self._began_at >= self.every_s:
            self._begin()
        if self._copying is not None:
            self._copying.copy()

    def save(self) -> None:
        """Write a checkpoint of this moment and wait until it is whole. Raises ``EnvironmentFault`` if the
        disk refuses; the previous one stays."""
        self._finish()
        self._begin()
        self._finish()
        if self._refused is not None:
            raise self._refused

    def close(self) -> None:
        """End the thread; what is under way is given up. May be called twice."""
        if self._copying is not None:
            self._copying.give_up("the peer ended")
        self._thread.shutdown(wait=True)

    def _finish(self) -> None:
        """Wait for what is under way, if anything is."""
        while self._under_way is not None:
            if self._copying is not None:
                self._copying.copy(_BEAT_S)
            if self._under_way.done():
                self._end()

    def _end(self) -> None:
        assert self._under_way is not None
        self._refused, ended, self._copying = None, self._under_way, None
        self._under_way = None
        try:
            ended.result()
        except EnvironmentFault as error:
            self._refused = error
        except FAULTS as error:
            self._refused = EnvironmentFault(f"{type(error).__name__}: {error}")

    def _begin(self) -> None:
        """The agreed states of this moment, and what follows of the rest."""
        began_at = self._began_at = time.monotonic()
        plan, sync = self._plan, self._sync
        said, buffers = self._look()
        checkpoint = Checkpoint(
            run_config_json=plan.run.canonical_bytes().decode(),
            plan_digest=plan.fragments.digest,
            states=(),
            buffers=buffers,
            optimizer={},
            position=sync.position,
            inner_steps=sync.inner_steps,
            tokens=sync.tokens,
            inner=inner_of(plan.optimizer, plan.model),
            parameters=trained_parameters(plan.model),
        )
        self._copying = copying = _Copying(parts(checkpoint, said), sync, time.monotonic() - began_at)
        self._under_way = self._thread.submit(self._write, checkpoint, said, copying, began_at)

    def _look(self) -> tuple[Said, dict[str, Tensor]]:
        """What of the inner optimizer's state and of the buffers can be saved. Tells, once, what cannot."""
        troubles, buffers = [], {}
        for name, buffer in kept_buffers(self._plan.model).items():
            if trouble := trouble_with(buffer):
                troubles.append(f"the buffer {name} ({trouble})")
            else:
                buffers[name] = buffer.detach()
        try:
            said = say(self._plan.optimizer.state_dict())
        except FAULTS as error:
            why = f"the inner optimizer (its state_dict raises {type(error).__name__}: {error})"
            said = Said({"dict": []}, (), (why,))
        new = [text for text in (*troubles, *said.left_out) if text not in self._told]
        if new:
            self._told.update(new)
            text = f"checkpoints are without {'; '.join(new)}: after a resume that begins anew"
            self._report(ev.Warned, {"text": text})
        changing = [*buffers.values(), *(tensor for part in said.tensors for tensor in part.values())]
        agreed_bytes = 8 * self._plan.fragments.numel
        self._size_bytes = agreed_bytes + sum(tensor.numel() * tensor.element_size() for tensor in changing)
        return said, buffers

    def _write(self, checkpoint: Checkpoint, said: Said, copying: _Copying, began_at: float) -> None:
        """On the saver's thread: the whole of a checkpoint."""
        moment = self._ledger.moment()
        versions, loans = tuple(state.version for state in moment.states), moment.loans
        saving: Saving | None = None
        try:
            saving = Saving(
                self._folder, replace(checkpoint, states=moment.states, residuals=moment.residuals), said
            )
            moment.residuals.clear()  # it has its own
            faults: list[EnvironmentFault] = []
            for fragment, loan in enumerate(loans):
                loan.offer(partial(_put, saving, fragment, faults))
            for loan in loans:
                loan.settle()
            if faults:
                raise faults[0]
            if not all(loan.has_ended for loan in loans):
                raise EnvironmentFault(
                    "a round failed while it took the agreed state, which is not taken whole (earlier "
                    "checkpoints are whole)"
                )
            while copied := copying.take():
                saving.put(copied)
            path = saving.finish()
        finally:
            _end(loans)
            if saving is not None:
                saving.give_up()
        fields = {"path": str(path), "versions": versions, "duration_s": copying.stopped_s}
        self._report(ev.CheckpointSaved, {**fields, "written_s": time.monotonic() - began_at})


class _Copying:
    """What training changes, on its way from the training thread, which copies between its steps, to the
    saver's, which asks for more when it has written the last. One room serves all shares, and is made by the
    saver's thread: pages that are fresh cost many times the copy.

    A Ctrl-C may come between any two lines of the training thread's: a share is copied once, and may be given
    twice."""

    def __init__(self, all_of_it: Sequence[Part], sync: Synchroniser, stopped_s: float) -> None:
        self._sync = sync
        self.stopped_s = stopped_s
        """How long the training thread stood still for it."""
        self._shares = _shares(all_of_it)
        self._room: Tensor | None = None
        self._wanted = self._copied = self._given = -1
        """Numbers of shares."""
        self._is_wanted = threading.Event()
        self._ways: queue.SimpleQueue[tuple[int, Part | str]] = queue.SimpleQueue()

    def take(self) -> Part:
        """The next share, once it is copied; nothing when all was taken. The saver's thread. Raises
        ``EnvironmentFault`` if it was given up."""
        if self._wanted + 1 == len(self._shares):
            return {}
        if self._room is None:
            sizes = (sum(map(_room_bytes, share.values())) for share in self._shares)
            self._room = large_tensor(max(sizes), torch.uint8).zero_()
        self._wanted += 1
        self._is_wanted.set()
        while True:
            number, share = self._ways.get()
            if isinstance(share, str):
                raise EnvironmentFault(share)
            if number == self._wanted:
                return share

    def copy(self, within_s: float = 0.0) -> None:
        """Copy the next share, if it is wanted ``within_s`` from now. The training thread."""
        self._is_wanted.wait(within_s)
        number = self._wanted
        if number == self._given:
            return
        share, room = self._shares[number], self._room
        assert room is not None
        self._sync.live.await_computed({tensor.device for tensor in share.values()})
        began_at, at = time.monotonic(), 0
        given: dict[str, Tensor] = {}
        try:
            for name, tensor in share.items():
                stop = at + tensor.numel() * tensor.element_size()
                given[name] = room[at:stop].view(tensor.dtype).view(tensor.shape)
                if self._copied != number:
                    given[name].copy_(tensor.detach())
                at += _room_bytes(tensor)
        except RuntimeError as error:
            self.give_up(f"the inner optimizer's state cannot be copied ({error})")
        else:
            self._copied = number
            self._ways.put((number, given))
        self._given = number
        self._is_wanted.clear()
        self.stopped_s += time.monotonic() - began_at

    def give_up(self, why: str) -> None:
        """Whoever waits for more hears why none comes."""
        self._ways.put((-1, why))


def _room_bytes(tensor: Tensor) -> int:
    """So that the next one lies where its dtype asks for."""
    return -(-tensor.numel() * tensor.element_size() // 16) * 16


def _shares(all_of_it: Sequence[Part]) -> list[dict[str, Tensor]]:
    """What is copied at once: whole parts."""
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in part.values()) for part in all_of_it]
    most_bytes = max(AT_ONCE_BYTES, sum(sizes) // MOST_STEPS)
    shares: list[dict[str, Tensor]] = []
    room = 0
    for part, size in zip(all_of_it, sizes, strict=True):
        if not shares or size > room:
            shares.append({})
            room = most_bytes
        shares[-1].update(part)
        room -= size
    return shares


def _put(saving: Saving, fragment: int, faults: list[EnvironmentFault]) -> None:
    """Put a fragment's agreed state into the file. What the disk refuses is for who awaits the checkpoint,
    not for the round that came by."""
    if faults:
        return
    try:
        saving.put_agreed(fragment)
    except EnvironmentFault as fault:
        faults.append(fault)


def _end(loans: Sequence[Loan]) -> None:
    for loan in loans:
        loan.end()
