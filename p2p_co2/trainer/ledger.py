"""The tensor side of a node: all fragments' ledgers on one worker thread, with an asyncio face for the
network thread.

Three threads meet here, and only snapshots, bytes and merges cross between them: the training thread hands
over snapshots (``submit_offer``) and takes ``Outcome`` values from ``outcomes``; the network thread awaits
the ``Ledger`` methods; all tensor work is done by the one worker, in the order in which it was asked.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from p2p_co2.errors import DigestMismatch, RemoteProtocolError
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, PartWeights, Reduced, SliceRefused
from p2p_co2.protocol.catchup import chunk_bytes_of
from p2p_co2.system.memory import Buffer, Joined, return_holes
from p2p_co2.tensors.aggregation import HostileSlice, Rule, admit, weighted_mean
from p2p_co2.tensors.checkpoint import Values, state_digest, state_from_bytes, state_size_bytes, state_view
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.codec.base import CHUNK_BLOCKS
from p2p_co2.tensors.fragments.large_tensor import large_tensor
from p2p_co2.tensors.outer import Merge, OuterState, StepReport
from p2p_co2.trainer.fragment_ledger import EncodedOffer, FragmentLedger
from p2p_co2.trainer.loan import Loan, Turns

_T = TypeVar("_T")


@dataclass(frozen=True)
class Outcome:
    """News for the training thread. ``report`` is set when an outer step was taken; ``ends_offer`` when this
    ended this peer's offer: one that has yet to be encoded is another."""

    fragment: int
    version: int
    merge: Merge | None
    report: StepReport | None = None
    contributed: bool = False
    share: float = 0.0
    ends_offer: bool = True
    trouble: str = ""


@dataclass(frozen=True)
class Moment:
    """The agreed states of one moment, lent to a checkpoint. Tensors are held, not copied, and those of
    fragment f do not change until ``loans[f]`` has ended. ``residuals`` by fragment, if the codec keeps
    any."""

    states: list[OuterState]
    residuals: dict[int, Values]
    loans: list[Loan]


def _compute_as_all_do() -> None:
    """For the thread that computes what all peers agree on. It begins with its parent's settings of the
    processor, and one that flushes tiny numbers to zero would get other bits."""
    torch.set_flush_denormal(False)


class TensorLedger:
    """Implements ``node.ledger.Ledger``. ``rule``: how slices are averaged. ``close`` ends the worker."""

    def __init__(self, codec: Codec, fragments: Sequence[FragmentLedger], rule: Rule = weighted_mean) -> None:
        self._rule = rule
        self._codec = codec
        self._fragments = list(fragments)
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="p2p-co2 tensors", initializer=_compute_as_all_do
        )
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._told = [0] * len(self._fragments)
        """Outcomes of each fragment so far."""
        self.failure: BaseException | None = None
        """A bug in work that nobody awaits; the training thread raises it."""
        sizes = [state_size_bytes(fragment.state.params.numel()) for fragment in self._fragments]
        self.chunk_bytes = chunk_bytes_of(sizes)
        """Of a state's chunks: its digest is that of theirs."""
        self._digests = [state_digest(fragment.state, self.chunk_bytes) for fragment in self._fragments]
        self._exchanged: dict[int, bytes] = {}
        """By fragment, the digest of the state that was given up for a donor's last."""
        self._is_closed = False

    def close(self) -> None:
        """End the worker; the agreed states stay, and change no more."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._is_closed = True

    def agreed(self) -> list[AgreedVersion]:
        """Where every fragment is, all at one moment. Any thread; waits for the worker. Raises as
        ``Wholeness.check``."""

        def read() -> list[AgreedVersion]:
            for fragment in self._fragments:
                fragment.wholeness.check()
            pairs = zip(self._fragments, self._digests, strict=True)
            return [AgreedVersion(fragment.state.version, digest) for fragment, digest in pairs]

        return self._worker.submit(read).result()

    def states(self) -> list[OuterState]:
        """The agreed states, consistent with each other. Any thread; waits for the worker. After ``close``
        the last ones."""

        def read() -> list[OuterState]:
            return [fragment.lend() for fragment in self._fragments]

        return read() if self._is_closed else self._worker.submit(read).result()

    def set_residuals(self, residuals: Mapping[int, Values]) -> None:
        """Go on from a checkpoint, before the node runs: put saved residuals back. What the process before
        had offered is in doubt from now on."""
        for fragment, residual in residuals.items():
            self._fragments[fragment].set_residual(residual)
        for ledger in self._fragments:
            ledger.is_resumed = True

    def moment(self) -> Moment:
        """Lend the agreed states. Any thread; waits for the worker. Raises as ``Wholeness.check``."""

        def lend() -> Moment:
            for one in self._fragments:
                one.wholeness.check()
            busy = Turns()
            loans = [Loan(busy) for _ in self._fragments]
            states = [one.lend(loan) for one, loan in zip(self._fragments, loans, strict=True)]
            residuals: dict[int, Values] = {
                f: one.residual for f, one in enumerate(self._fragments) if one.residual is not None
            }
            return Moment(states, residuals, loans)

        return self._worker.submit(lend).result()

    def submit_offer(
        self,
        fragment: int,
        snapshot: Tensor,
        weight: float,
        outcomes_taken: int,
        done: Callable[[int, EncodedOffer, AgreedVersion], None],
    ) -> Future[None]:
        """Encode an offer; ``done(fragment, offer, agreed)`` is called on the worker. Does not block.

        ``outcomes_taken``: how many of the fragment's outcomes ``snapshot`` has met. If another one is on its
        way, the agreed state is not the one that the snapshot set out from: measured from it, the gradient
        would take the swarm's last step back. Then nothing is offered and the work stays for the next point.
        """

        def encode() -> None:
            return_holes()  # the snapshot is there, and more is about to be made
            ledger = self._fragments[fragment]
            if outcomes_taken != self._told[fragment]:
                self._tell(Outcome(fragment, ledger.state.version, None))
                return
            agreed = AgreedVersion(ledger.state.version, self._digests[fragment])
            try:
                offer = ledger.offer(snapshot, weight)
            except ValueError:
                # NaN or Inf: this peer's own training has diverged. It starts again from the agreed state.
                trouble = "this peer's parameters were not finite; took over the agreed ones"
                self._tell(Outcome(fragment, agreed.version, ledger.reset(), trouble=trouble))
                return
            if offer.merge is not None:
                self._tell(Outcome(fragment, agreed.version, offer.merge, ends_offer=False))
            done(fragment, offer, agreed)

        future = self._worker.submit(encode)
        future.add_done_callback(self._note_failure)
        return future

    def _tell(self, outcome: Outcome) -> None:
        self._told[outcome.fragment] += 1
        self.outcomes.put(outcome)

    def _note_failure(self, future: Future[None]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self.failure = self.failure or future.exception()

    # ---- the Ledger protocol, awaited on the network thread

    async def reduce(self, fragment: int, slices: Sequence[tuple[str, float, Buffer]]) -> Reduced:
        def work() -> Reduced:
            try:
                return Reduced(*self._rule(self._codec, slices, self._codec))
            except HostileSlice as hostile:
                raise SliceRefused(hostile.peer, str(hostile.cause)) from None

        return await self._ask(work)

    async def commit(self, mean: AgreedMean) -> AgreedVersion:
        def work() -> AgreedVersion:
            return_holes()
            ledger = self._fragments[mean.fragment]
            before = AgreedVersion(ledger.state.version, self._digests[mean.fragment])
            if before != AgreedVersion(mean.round - 1, mean.state_digest):
                if mean.state_digest == self._exchanged.get(mean.fragment):
                    ledger.stays_out(mean.parts)
                return before
            ended = ledger.has_offered
            decode = partial(self._decode, mean.mean, ledger.state.params.numel())
            applied = ledger.commit(mean.round, mean.base_version, decode, mean.parts, mean.mean)
            return self._moved(
                mean.fragment,
                lambda: Outcome(
                    mean.fragment,
                    mean.round,
                    applied.merge,
                    applied.report,
                    applied.contributed,
                    applied.share,
                    ended,
                    applied.refused,
                ),
            )

        return await self._ask(work)

    async def abort(self, fragment: int, round_: int, weight: float) -> None:
        def work() -> None:
            ledger = self._fragments[fragment]
            ended, merge = ledger.abort(round_, weight)
            if ended:
                self._tell(Outcome(fragment, ledger.state.version, merge))

        await self._ask(work)

    async def doubt(self, fragment: int) -> None:
        def work() -> None:
            self._fragments[fragment].in_doubt = True

        await self._ask(work)

    async def export(self, fragment: int) -> tuple[AgreedVersion, Joined]:
        def work() -> tuple[AgreedVersion, Joined]:
            state = self._fragments[fragment].lend()
            return AgreedVersion(state.version, self._digests[fragment]), state_view(state)

        return await self._ask(work)

    async def adopt(
        self,
        fragment: int,
        data: Buffer,
        agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None = None,
        goes_back: bool = False,
    ) -> AgreedVersion:
        def work() -> AgreedVersion:
            ledger = self._fragments[fragment]
            if agreed == AgreedVersion(ledger.state.version, self._digests[fragment]):
                return agreed
            state = state_from_bytes(data, ledger.state.params.numel())
            is_older = state.version < ledger.state.version and not goes_back
            if state.version != agreed.version or is_older:
                raise RemoteProtocolError("bad state", f"version {state.version}, not {agreed.version}")
            if state_digest(state, self.chunk_bytes) != agreed.digest:
                raise DigestMismatch(
                    f"the state of fragment {fragment} does not have the digest its donor promised"
                )
            self._exchanged[fragment] = self._digests[fragment]
            ended, merge = ledger.has_offered, ledger.adopt(state, parts)
            return self._moved(fragment, lambda: Outcome(fragment, state.version, merge, ends_offer=ended))

        return await self._ask(work)

    def _moved(self, fragment: int, outcome: Callable[[], Outcome]) -> AgreedVersion:
        # The training thread need not wait for the digest: its next offer queues up behind this work.
        ledger = self._fragments[fragment]
        with ledger.wholeness.changing(f"telling of version {ledger.state.version}"):
            self._tell(outcome())
            self._digests[fragment] = state_digest(ledger.state, self.chunk_bytes)
        return AgreedVersion(ledger.state.version, self._digests[fragment])

    def _admitted(self, data: Buffer, blocks: int) -> Iterator[Tensor]:
        """``admit`` piece by piece: a copy of the whole costs more than the check. Raises as ``admit``."""
        width = CHUNK_BLOCKS * self._codec.block_bytes
        if len(data) != blocks * self._codec.block_bytes:
            raise RemoteProtocolError(
                "wrong size", f"{len(data)} bytes for {blocks} {self._codec.name} blocks"
            )
        for start in range(0, len(data), width):
            piece = memoryview(data)[start : start + width]
            yield admit(self._codec, piece, len(piece) // self._codec.block_bytes)

    def _decode(self, mean: Buffer, numel: int) -> Tensor:
        """fp32 [numel]; NaN if an owner signed a mean that is not finite, which every peer refuses alike."""
        values, at = large_tensor(numel), 0
        if self._codec.decode_sound(mean, values):
            return values
        try:
            for piece in self._admitted(mean, self._codec.blocks(numel)):
                size = len(piece) // self._codec.block_bytes * self._codec.block_values
                if at + size <= numel:
                    self._codec.decode(piece, values[at : at + size])
                else:
                    values[at:] = self._codec.decode(piece)[: numel - at]
                at += size
        except RemoteProtocolError:
            values.fill_(math.nan)
        return values

    async def _ask(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)
