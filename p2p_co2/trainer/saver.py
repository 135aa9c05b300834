"""Checkpoints beside training. The saver's own thread writes the agreed states of one moment while rounds go
on. What training changes the training thread copies for it, a share between two steps
(``docs/design/memory.md``).

Laws: the agreed states are of one moment; the inner state of a parameter is of one step, those of two some
steps apart. No checkpoint ends training. What cannot be saved is left out and told once. A file that cannot
be written is told and tried again when the next is due.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from p2p_co2.config import CHECKPOINT_BYTES_PER_DAY, CHECKPOINT_LEAST_S
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.checkpoint.folder import Checkpoint, Saving, changing_parts
from p2p_co2.tensors.checkpoint.parts import trouble_with
from p2p_co2.tensors.checkpoint.tree import SavedTree, say
from p2p_co2.tensors.fragments import LiveParameters, large_tensor
from p2p_co2.tensors.names import named_buffers
from p2p_co2.trainer.exchanged_model import TrainingSetup
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.resuming import FAULTS, inner_of, shapes_of
from p2p_co2.trainer.synchroniser import REPORT_EVERY_S, Synchroniser

AT_ONCE_BYTES = 32 << 20
"""What the training thread copies between two steps, at least one parameter's state."""
MOST_STEPS = 64
"""Over so many steps a copy is spread at the most: more is copied at once where there is more."""
Part = Mapping[str, Tensor]


class Saver:
    """One per peer. Called by the training thread, but for what the other threads do."""

    def __init__(
        self, plan: TrainingSetup, ledger: TensorWorker, sync: Synchroniser, live: LiveParameters,
        report: Callable[[type[ev.Event], Mapping[str, Any]], None],
    ) -> None:  # fmt: skip
        self.plan = plan
        self._ledger = ledger
        self._sync = sync
        self._live = live
        self._report = report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="p2p-co2 checkpoint")
        self.under_way: Future[None] | None = None
        """Nothing else writes to the folder meanwhile."""
        self.copies: ShareQueue | None = None
        self._shapes = shapes_of(plan.model)
        """As they were joined with: what is frozen for a moment is in a checkpoint, too."""
        self._folder = plan.config.folder / "checkpoint"
        self._refused: EnvironmentFault | None = None
        """Why the last one was not written."""
        self.began_at = time.monotonic()
        self._told = set[str]()
        self.data_place: Callable[[], str] = str
        """Says where the program is in its data."""
        self.size_bytes = 0
        self._look()
        self.began_at -= max(0.0, self.every_s - REPORT_EVERY_S)  # who is killed soon has one to go on from

    @property
    def every_s(self) -> float:
        """Between two checkpoints: as configured, or as often as the budget of writes allows."""
        budget_s = 24 * 3600 * self.size_bytes / CHECKPOINT_BYTES_PER_DAY
        return self.plan.config.checkpoint_every_s or max(CHECKPOINT_LEAST_S, budget_s)

    def keep_up(self) -> None:
        """Begin a checkpoint if one is due, and do a step's share of the one under way; at once. Raises what
        is a bug."""
        if self.under_way is not None and self.under_way.done():
            self._end()
            if self._refused is not None:
                self._report(ev.Warned, {"text": f"no checkpoint was written: {self._refused}"})
        if self.under_way is None and time.monotonic() - self.began_at >= self.every_s:
            self._begin()
        if self.copies is not None:
            self.copies.copy()

    def save(self) -> None:
        """Write a checkpoint of this moment and wait until it is whole. Raises ``EnvironmentFault`` if the
        disk refuses; the previous one stays."""
        began_at = time.monotonic()
        try:
            self._finish()
            self._begin()
            self._finish()
        finally:
            self._sync.pause(time.monotonic() - began_at)
        if self._refused is not None:
            raise self._refused

    def close(self) -> None:
        """End the thread; what is under way is given up. May be called twice."""
        if self.copies is not None:
            self.copies.give_up("the peer ended")
        self._thread.shutdown(wait=True)

    def _finish(self) -> None:
        """Wait for what is under way, if anything is."""
        while self.under_way is not None:
            if self.copies is not None:
                self.copies.copy(0.02)
            if self.under_way.done():
                self._end()

    def _end(self) -> None:
        ended = self.under_way
        self.under_way = None
        self.copies = None
        self._refused = None
        assert ended is not None
        try:
            ended.result()
        except EnvironmentFault as error:
            self._refused = error
        except FAULTS as error:
            self._refused = EnvironmentFault(f"{type(error).__name__}: {error}")

    def _begin(self) -> None:
        began_at = self.began_at = time.monotonic()
        plan = self.plan
        sync = self._sync
        said, buffers = self._look()
        checkpoint = Checkpoint(
            run_config_json=plan.run.canonical_bytes().decode(), plan_digest=plan.fragments.digest,
            states=(), buffers=buffers, optimizer={}, position=sync.position, inner_steps=sync.inner_steps,
            tokens=sync.figures.tokens, inner=inner_of(plan.optimizer, plan.model),
            parameters=self._shapes, stage=plan.stage, data=self.data_place(),
        )  # fmt: skip
        stopped_s = time.monotonic() - began_at
        self.copies = copies = ShareQueue(changing_parts(checkpoint, said), self._live, stopped_s)
        self.under_way = self._thread.submit(self._write, checkpoint, said, copies, began_at)

    def _look(self) -> tuple[SavedTree, dict[str, Tensor]]:
        """What of the inner optimizer's state and of the buffers can be saved. Tells, once, what cannot."""
        troubles = []
        buffers = {}
        for name, buffer in named_buffers(self.plan.model, persistent=True).items():
            if trouble := trouble_with(buffer):
                troubles.append(f"the buffer {name} ({trouble})")
            else:
                buffers[name] = buffer.detach()
        try:
            said = say(self._live.state_of(self.plan.optimizer))
        except FAULTS as error:
            why = f"the inner optimizer (its state_dict raises {type(error).__name__}: {error})"
            said = SavedTree({"dict": []}, (), (why,))
        new = [text for text in (*troubles, *said.left_out) if text not in self._told]
        if new:
            self._told.update(new)
            text = f"checkpoints are without {'; '.join(new)}: after a resume that begins anew"
            self._report(ev.Warned, {"text": text})
        changing = [buffers, *said.tensors]
        self.size_bytes = 8 * self.plan.fragments.numel + sum(map(size_bytes_of, changing))
        return said, buffers

    def _write(self, checkpoint: Checkpoint, said: SavedTree, copies: ShareQueue, began_at: float) -> None:
        """On the saver's thread: the whole of a checkpoint."""
        saving = None
        states, residuals, past = self._ledger.borrow()
        versions = tuple(state.version for state in states)
        try:
            agreed = replace(checkpoint, states=states, residuals=residuals, past=past)
            saving = Saving(self._folder, agreed, said)
            del states, residuals, agreed
            saving.put_agreed(self._ledger.give_back)
            for _ in copies.shares:
                saving.put(copies.take())
            path = saving.finish()
        finally:
            if saving is not None:
                saving.give_up()
        fields = {"path": str(path), "versions": versions, "duration_s": copies.stopped_s}
        self._report(ev.CheckpointSaved, {**fields, "written_s": time.monotonic() - began_at})


class ShareQueue:
    """What training changes, on its way to the saver's thread. The training thread copies a share between two
    steps; the saver's asks for the next when it has written the last.

    A Ctrl-C may come between any two lines of the training thread's: a share may be copied again, whole."""

    def __init__(self, all_of_it: Sequence[Part], live: LiveParameters, stopped_s: float) -> None:
        self.shares, self._live, self.stopped_s = shares_of(all_of_it), live, stopped_s
        """How long the training thread stood still for it."""
        self._wanted = self.given = -1
        """Numbers of shares."""
        self._news = threading.Event()
        self._ways: queue.SimpleQueue[tuple[int, Part | str]] = queue.SimpleQueue()

    def take(self) -> Part:
        """The next share, once it is copied. The saver's thread. Raises ``EnvironmentFault`` if it was given
        up."""
        self._wanted += 1
        self._news.set()
        while True:
            number, share = self._ways.get()
            if isinstance(share, str):
                raise EnvironmentFault(share)
            if number == self._wanted:
                return share

    def copy(self, within_s: float = 0.0) -> None:
        """Copy the next share, if it is wanted ``within_s`` from now. The training thread."""
        if within_s and self._wanted == self.given:
            self._news.wait(within_s)
            self._news.clear()
        number = self._wanted
        if number == self.given:
            return
        share = self.shares[number]
        self._live.await_computed({tensor.device for tensor in share.values()})
        began_at = time.monotonic()
        at = 0
        given: dict[str, Tensor] = {}
        try:
            room = large_tensor(sum(map(_room_bytes, share.values())), torch.uint8)
            for name, tensor in share.items():
                given[name] = room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self._live.copy_(given[name], tensor)
                at += _room_bytes(tensor)
        except (RuntimeError, MemoryError) as error:
            why = str(error) or type(error).__name__
            self.give_up(f"the inner optimizer's state cannot be copied ({why})")
        self._ways.put((number, given))
        self.given = number
        self.stopped_s += time.monotonic() - began_at

    def give_up(self, why: str) -> None:
        """Whoever waits for more hears why none comes."""
        self._ways.put((-1, why))


def _room_bytes(tensor: Tensor) -> int:
    """So that the next one lies where its dtype asks for."""
    return -(-tensor.nbytes // 16) * 16


def size_bytes_of(part: Part) -> int:
    return sum(tensor.nbytes for tensor in part.values())


def shares_of(all_of_it: Sequence[Part]) -> list[dict[str, Tensor]]:
    """What is copied at once: whole parts."""
    sizes = list(map(size_bytes_of, all_of_it))
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
