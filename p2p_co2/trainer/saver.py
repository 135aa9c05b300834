"""Checkpoints beside training: what of it the training thread does, and what another thread does.

Law: what is saved is one moment. A ``Moment`` comes among the outcomes, so nobody waits for the agreed states
that the live parameters fit; there the training thread copies what it is about to change (live parameters,
buffers, the inner optimizer's state) into the file's pages, at the speed of memory, and goes on. The agreed
states, the digest, the disk and the renaming are for the saver's own thread, outside of the interpreter's
lock; a round that commits before its fragment's state was taken has it taken first (``loan``). A checkpoint
that cannot be written is told, and tried again when the next is due; training goes on.

Memory: no copy in this process. The file's pages are the kernel's, which writes them out and takes them back;
before a checkpoint those of the oldest file (at first, zeros) wait for it, since pages that are there cost a
tenth of fresh ones. From an accelerator all passes through 32 MiB of pinned memory.

Price: training stands still for the copy (where it was measured, 0.02 s for 200 MB on a quiet machine, 0.1 s
on a busy one; up to 1 s if the kernel has no page ready, or holds back a writer far ahead of the disk).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from p2p_co2.checkpoint import Checkpoint, Saving, reserve
from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.ledger import Moment, TensorLedger
from p2p_co2.trainer.loan import Loan
from p2p_co2.trainer.offered import Rebase
from p2p_co2.trainer.plan import Plan
from p2p_co2.trainer.synchroniser import Synchroniser

_PIECE = 1 << 16
"""Values that are changed at once: in memory they are there three times."""
_IN_PART = "a round failed while it took the agreed state, which is not taken whole (earlier ones are whole)"


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
        self._asked = self._is_last = False
        self._under_way: Future[None] | None = None
        """Nothing else writes to the folder meanwhile."""
        self._has_pages = False
        """Whether pages were made for the first one: the inner optimizer's state comes with training."""
        self._folder = plan.config.folder / "checkpoint"
        self._refused: EnvironmentFault | None = None
        """Why the last one was not written."""
        self._began_at = time.monotonic()
        sync.on_moment = self._take

    def keep_up(self) -> None:
        """Begin a checkpoint if one is due, and see to the one under way; at once. Raises what is a bug."""
        if self._under_way is not None and self._under_way.done():
            self._end()
            if self._refused is not None:
                self._report(ev.Warned, {"text": f"no checkpoint was written: {self._refused}"})
        elapsed_s, every_s = time.monotonic() - self._began_at, self._plan.config.checkpoint_every_s
        is_free = not self._asked and self._under_way is None
        if elapsed_s >= every_s / 2 and is_free and not self._has_pages:
            self._has_pages = True
            self._under_way = self._thread.submit(reserve, self._folder, self._size_bytes())
            return
        is_due = elapsed_s >= every_s
        if is_due and is_free:
            self._asked = True
            self._ledger.submit_moment()

    def save(self) -> None:
        """Write a checkpoint of this moment and wait until it is whole. Raises ``EnvironmentFault`` if the
        disk refuses; the previous one stays."""
        if self._under_way is not None:
            self._end()
        self._asked = self._is_last = True
        self._ledger.submit_moment().result()
        try:
            while self._asked:
                if self._ledger.failure is not None:
                    raise self._ledger.failure
                if not self._sync.take_outcomes():
                    self._ledger.agreed()  # a round took the moment back: it is told of anew after that
        finally:
            self._is_last = False
        if self._under_way is not None:
            self._end()
        if self._refused is not None:
            raise self._refused

    def close(self) -> None:
        """Wait for what is under way, and end the thread. May be called twice."""
        self._thread.shutdown(wait=True)

    def _end(self) -> None:
        assert self._under_way is not None
        self._refused = None
        try:
            self._under_way.result()
        except EnvironmentFault as error:
            self._refused = error
        finally:
            if self._under_way.done():  # else a Ctrl-C came first: two must not write to one file
                self._under_way = None

    def _take(self, moment: Moment) -> None:
        """The live parameters fit ``moment``: copy what will change."""
        if not moment.claim.take():
            return  # another one comes
        if not self._asked:
            _end(moment.loans)  # two were asked for, and one has served both
            return
        began_at = time.monotonic()
        self._asked, self._began_at, self._refused = False, began_at, None
        plan, sync = self._plan, self._sync
        checkpoint = Checkpoint(
            run_config_json=plan.run.canonical_bytes().decode(),
            plan_digest=plan.fragments.digest,
            states=moment.states,  # the list is emptied
            params={name: parameter.detach() for name, parameter in plan.model.named_parameters()},
            buffers=dict(plan.model.named_buffers()),
            optimizer=plan.optimizer.state_dict(),
            position=sync.position,
            inner_steps=sync.inner_steps,
            tokens=sync.tokens,
            residuals=moment.residuals,
        )
        versions, loans = tuple(state.version for state in moment.states), moment.loans
        try:
            saving = Saving(self._folder, checkpoint)
        except EnvironmentFault as error:
            _end(loans)
            self._under_way = Future()
            self._under_way.set_exception(error)
            return
        moment.residuals.clear()  # it has its own
        faults: list[EnvironmentFault] = []
        for fragment, loan in enumerate(loans):
            loan.offer(partial(self._put, saving, fragment, moment.rebases, faults))
        keep_spare, duration_s = not self._is_last, time.monotonic() - began_at

        def write() -> None:
            try:
                for loan in loans:
                    loan.settle()
                if faults:
                    raise faults[0]
                if not all(loan.has_ended for loan in loans):
                    raise EnvironmentFault(_IN_PART)
                path = saving.finish(keep_spare)
            finally:
                _end(loans)
                saving.give_up()
            took_s = time.monotonic() - began_at
            fields = {"path": str(path), "versions": versions, "duration_s": duration_s, "written_s": took_s}
            self._report(ev.CheckpointSaved, fields)

        self._under_way = self._thread.submit(write)

    def _size_bytes(self) -> int:
        """About what a checkpoint takes."""
        tensors: list[Tensor] = [*self._plan.model.parameters(), *self._plan.model.buffers()]
        for state in self._plan.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        agreed = 8 * sum(fragment.numel for fragment in self._plan.fragments.fragments)
        return agreed + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _put(
        self, saving: Saving, fragment: int, rebases: dict[int, Rebase], faults: list[EnvironmentFault]
    ) -> None:
        """Put a fragment's agreed state, and what its live parameters still have to gain, into the file. What
        the disk refuses is for who awaits the checkpoint, not for the round that came by."""
        rebase = rebases.pop(fragment, None)
        if faults:
            return
        try:
            if rebase is not None:
                self._rebase(saving, fragment, rebase)
            saving.put_agreed(fragment)
        except EnvironmentFault as fault:
            faults.append(fault)

    def _rebase(self, saving: Saving, fragment: int, rebase: Rebase) -> None:
        at = 0
        for part in self._plan.fragments.fragments[fragment].slices:
            for start in range(part.start, part.stop, _PIECE):
                stop = min(start + _PIECE, part.stop)
                first = at + start - part.start
                saving.add(part.name, start, rebase.addend(slice(first, first + stop - start)))
            at += part.stop - part.start


def _end(loans: Sequence[Loan]) -> None:
    for loan in loans:
        loan.end()
