"""The tensor side of a node: all fragments' states on one worker thread, which works in the order of asking.

Only snapshots, bytes and merges cross between threads. The training thread hands over snapshots
(``submit_offer``) and takes what became of them from ``outcomes``; the network thread awaits the ``Ledger``
methods.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from p2p_co2.digest import digest_of_chunks
from p2p_co2.errors import DigestMismatch, RemoteProtocolError
from p2p_co2.protocol.catchup.goals import chunk_bytes_of
from p2p_co2.protocol.ledger import AgreedMean, AgreedVersion, Exported, PartWeights, Reduced, SliceRefused
from p2p_co2.protocol.rounds import Likeness
from p2p_co2.system.memory import Buffer, return_holes
from p2p_co2.tensors.aggregation import AggregationRule, HostileSlice, compare, get_rule, reduce_slices
from p2p_co2.tensors.checkpoint.agreed import (
    state_chunk_digests,
    state_from_bytes,
    state_size_bytes,
    state_view,
)
from p2p_co2.tensors.checkpoint.parts import Values
from p2p_co2.tensors.codec import Codec
from p2p_co2.tensors.outer import AgreedState
from p2p_co2.trainer.ledger.fragment_state import EncodedOffer, FragmentOutcome, FragmentState
from p2p_co2.wire.schedule import OfferState

_T = TypeVar("_T")
_P = ParamSpec("_P")
NOT_FINITE = (
    "this peer's parameters were not finite (NaN or Inf): it took over the agreed ones, and its inner "
    "optimizer began anew; look at the data, the loss and the learning rate. This is told once"
)


def _on_worker(
    work: Callable[Concatenate[TensorWorker, _P], _T],
) -> Callable[Concatenate[TensorWorker, _P], Coroutine[Any, Any, _T]]:
    """What the network thread awaits and the worker does."""

    async def ask(self: TensorWorker, /, *asked: _P.args, **named: _P.kwargs) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, partial(work, self, *asked, **named))

    return ask


class TensorWorker:
    """Implements ``node.ledger.Ledger``. ``rule``: how slices are averaged. ``thread``: where the work is
    done, one thing after the other, if not on a thread of its own. ``close`` ends it."""

    def __init__(
        self, codec: Codec, fragments: Sequence[FragmentState], rule: AggregationRule | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:  # fmt: skip
        self._codec = codec
        self._rule = rule or get_rule("mean")
        self.fragments = list(fragments)
        self.thread = thread or ThreadPoolExecutor(  # one that flushed tiny numbers to zero got other bits
            1, "p2p-co2 tensors", initializer=torch.set_flush_denormal, initargs=(False,)
        )
        self.outcomes: queue.SimpleQueue[FragmentOutcome] = queue.SimpleQueue()
        self._told = [0] * len(self.fragments)
        """Number of the last outcome of each fragment."""
        self.failure: BaseException | None = None
        """A bug in work that nobody awaits; the training thread raises it."""
        self.chunk_bytes = chunk_bytes_of([state_size_bytes(one.numel) for one in self.fragments])
        """Of a state's chunks: its digest is that of theirs."""
        self._chunk_digests = [
            state_chunk_digests(fragment.state, self.chunk_bytes) for fragment in self.fragments
        ]
        self.past: list[dict[int, bytes]] = [{} for _ in self.fragments]
        """Of each fragment, as ``PeerState.past`` has it: the network thread writes it."""
        self._is_closed = False
        self._encoding: Future[None] | None = None

    def close(self) -> None:
        """End the worker; the agreed states stay, and change no more."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self._is_closed = True

    # ---- any thread

    def agreed(self) -> list[AgreedVersion]:
        """Where every fragment is, all at one moment. Waits for the worker. Raises as
        ``PoisonGuard.check``."""

        def read() -> list[AgreedVersion]:
            for fragment in self.fragments:
                fragment.guard.check()
            return [self._agreed(fragment) for fragment in range(len(self.fragments))]

        return self.thread.submit(read).result()

    def states(self) -> list[AgreedState]:
        """The agreed states of one moment. Waits for the worker; after ``close`` the last ones."""

        def read() -> list[AgreedState]:
            return [fragment.lend() for fragment in self.fragments]

        return read() if self._is_closed else self.thread.submit(read).result()

    def borrow(self) -> tuple[list[AgreedState], dict[int, Values], list[dict[int, bytes]]]:
        """The agreed states, the residuals and the ``past`` of one moment, for a checkpoint. Nothing writes
        to a state until it is given back. Waits for the worker. Raises as ``PoisonGuard.check``."""

        def read() -> tuple[list[AgreedState], dict[int, Values], list[dict[int, bytes]]]:
            states = [fragment.lend("saver") for fragment in self.fragments]
            agreed = [self._agreed(fragment) for fragment in range(len(self.fragments))]
            pairs = zip(map(dict.copy, self.past), agreed, strict=True)
            past = [known if known.get(at.version) == at.digest else {} for known, at in pairs]
            return states, {i: one.residual for i, one in enumerate(self.fragments) if one.residual}, past

        return self.thread.submit(read).result()

    def give_back(self, fragment: int, version: int) -> None:
        """What was borrowed of it at ``version`` is read."""
        self.thread.submit(self.fragments[fragment].give_back, version, "saver")

    def restore(self, residuals: Mapping[int, Values], past: Sequence[Mapping[int, bytes]] = ()) -> None:
        """Go on from a checkpoint, before the node runs: put saved residuals, and digests of the past, back.
        What the process before had offered is in doubt from now on."""
        for known, saved in zip(self.past, past, strict=False):
            known.update(saved)
        for index, fragment in enumerate(self.fragments):
            fragment.offers.in_doubt = True
            if index in residuals:
                fragment.set_residual(residuals[index])

    def submit_offer(
        self, fragment: int, snapshot: Tensor, state: OfferState, done: Callable[[EncodedOffer], None]
    ) -> Future[None]:
        """Encode an offer; ``done`` is called on the worker. Does not block.

        Nothing is offered if an outcome is on its way that ``snapshot`` has not met. Measured from that state
        the gradient would take the swarm's last step back. The work stays for the next point.
        """

        def encode() -> None:
            return_holes()  # the snapshot is there, and more is about to be made
            mine = self.fragments[fragment]
            agreed = self._agreed(fragment)
            if state.met != self._told[fragment]:
                self._tell(FragmentOutcome(fragment, agreed.version, None, ended=state))
                return
            try:
                offer = mine.offer(snapshot, state)
            except ValueError:  # NaN or Inf: this peer's own training has diverged
                self._reset(fragment, state)
                return
            if offer.merge is not None:
                self._tell(FragmentOutcome(fragment, agreed.version, offer.merge))
            done(replace(offer, state_digest=agreed.digest))

        future = self.thread.submit(encode)
        future.add_done_callback(self._note_failure)
        self._encoding = future
        return future

    def reset(self) -> None:
        """Have the parameters of all fragments start again from the agreed ones: they are not finite."""
        self.thread.submit(self._reset).result()

    @property
    def is_encoding(self) -> bool:
        """Whether the last snapshot waits for its encoding, which frees its memory."""
        return self._encoding is not None and not self._encoding.done()

    # ---- the Ledger protocol, awaited on the network thread

    @_on_worker
    def reduce(self, fragment: int, slices: Sequence[tuple[str, float, Buffer]]) -> Reduced:
        try:
            return Reduced(*reduce_slices(self._rule, self._codec, slices))
        except HostileSlice as hostile:
            raise SliceRefused(hostile.peer, str(hostile.cause)) from None

    @_on_worker
    def check(self, fragment: int, mine: Buffer, mean: Buffer) -> Likeness:
        return Likeness(*compare(self._codec, mine, mean))

    @_on_worker
    def commit(self, mean: AgreedMean) -> AgreedVersion:
        return_holes()
        before = self._agreed(mean.fragment)
        if before != AgreedVersion(mean.round - 1, mean.state_digest):
            return before
        fragment = self.fragments[mean.fragment]
        return self._moved(fragment.commit(mean.round, mean.base_version, mean.mean, mean.parts))

    @_on_worker
    def abort(self, fragment: int, offer_id: bytes) -> None:
        if (outcome := self.fragments[fragment].abort(offer_id)) is not None:
            self._tell(outcome)

    @_on_worker
    def doubt(self, fragment: int) -> None:
        self.fragments[fragment].offers.in_doubt = True

    @_on_worker
    def export(self, fragment: int) -> Exported:
        data = state_view(self.fragments[fragment].lend())
        return Exported(self._agreed(fragment), data, self._chunk_digests[fragment])

    @_on_worker
    def adopt(
        self, fragment: int, data: Buffer, agreed: AgreedVersion,
        parts: Sequence[PartWeights] | None = None, goes_back: bool = False,
    ) -> AgreedVersion:  # fmt: skip
        mine = self.fragments[fragment]
        if agreed == self._agreed(fragment):
            return agreed
        state = state_from_bytes(data, mine.numel)
        is_older = state.version < mine.state.version and not goes_back
        if state.version != agreed.version or is_older:
            raise RemoteProtocolError("bad state", f"version {state.version}, not {agreed.version}")
        digests = state_chunk_digests(state, self.chunk_bytes)
        if digest_of_chunks(digests) != agreed.digest:
            problem = f"the state of fragment {fragment} does not have the digest its donor promised"
            raise DigestMismatch(problem)
        return self._moved(mine.adopt(state, parts), digests)

    # ---- the worker thread

    def _agreed(self, fragment: int) -> AgreedVersion:
        digest = digest_of_chunks(self._chunk_digests[fragment])
        return AgreedVersion(self.fragments[fragment].state.version, digest)

    def _moved(self, outcome: FragmentOutcome, digests: list[bytes] | None = None) -> AgreedVersion:
        """``digests``: of the state's chunks, if they are known already."""
        # The training thread need not wait for the digest: its next offer queues up behind this work.
        fragment = outcome.fragment
        mine = self.fragments[outcome.fragment]
        with mine.guard.changing(f"telling of version {outcome.version}"):
            self._tell(outcome)
            self._chunk_digests[fragment] = digests or state_chunk_digests(mine.state, self.chunk_bytes)
        return self._agreed(fragment)

    def _reset(self, fragment: int = -1, ended: OfferState | None = None) -> None:
        """What is not finite in one fragment is soon so in all: one outcome resets them at one moment.
        ``ended``: the offer of ``fragment`` that was to be made."""
        news = [one.reset(NOT_FINITE) for one in self.fragments]
        if ended is not None:
            news[fragment] = replace(news[fragment], ended=ended)
        first, *others = map(self._numbered, news)
        self.outcomes.put(replace(first, others=[replace(one, trouble="") for one in others]))

    def _tell(self, outcome: FragmentOutcome) -> None:
        self.outcomes.put(self._numbered(outcome))

    def _numbered(self, outcome: FragmentOutcome) -> FragmentOutcome:
        self._told[outcome.fragment] += 1
        return replace(outcome, number=self._told[outcome.fragment])

    def _note_failure(self, future: Future[None]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self.failure = self.failure or future.exception()
