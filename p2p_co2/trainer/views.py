"""What the training thread reads of a running node and asks of it; only ``PipelineView.wait`` waits."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from p2p_co2.node.catchup import fetch_buffers
from p2p_co2.node.network import ModelShare
from p2p_co2.node.node import Node
from p2p_co2.node.pipeline_node import PipelineNode, Result
from p2p_co2.node.shell import Shell
from p2p_co2.node.state import LocalProgress
from p2p_co2.protocol.catchup.donor import EXPORT_SLOWEST_BYTES_PER_S, LOADS_S
from p2p_co2.protocol.catchup.goals import BUFFERS, Goal
from p2p_co2.protocol.pipeline import Key, Work
from p2p_co2.protocol.rounds import Offer
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer.model_summary import ModelBuffers
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Status
from p2p_co2.wire.schedule import LOADS_QUIET_S, Stage

MAX_BUFFER_DONORS = 3
"""A newcomer asks so many for their buffers."""


class NodeView:
    """Of a group that averages. ``shells``: of all groups of this process, which grow; None for this one
    alone."""

    def __init__(
        self, node: Node, loop: asyncio.AbstractEventLoop,
        report: Callable[[type[ev.Event], Mapping[str, Any]], None],
        failure: Callable[[], BaseException | None], shells: Collection[Shell] | None = None,
    ) -> None:  # fmt: skip
        self.node = node
        self._loop = loop
        self.report = report
        self.failure = failure
        self._shells = [node] if shells is None else shells
        self._buffers: ModelBuffers | None = None

    def offer(self, offer: Offer) -> None:
        self._loop.call_soon_threadsafe(self.node.offer, offer)

    def show(self, progress: LocalProgress) -> None:
        self._loop.call_soon_threadsafe(self._show, progress)

    def _show(self, progress: LocalProgress) -> None:
        """On the loop. This process's other groups rest with this one: one thread trains for all."""
        self.node.show(progress)
        for shell in self._shells:
            if progress.phase == Status.PAUSED and isinstance(shell, Node) and shell is not self.node:
                shell.rest()

    def swarm_position(self) -> tuple[float, float] | None:
        return self.node.progress.swarm_position

    def settled(self, versions: Sequence[int]) -> bool:
        """Whether all live peers are done at ``versions``, and this thread knows that we are there too."""
        known = [agreed.version for agreed in self.node.agreed]
        return known == list(versions) and self.node.progress.settled

    def loads(self, settled: bool) -> bool:
        """Whether others need this peer though its time is up, or it them; where all have ``settled``, one
        that still joins."""
        return self.node.progress.is_needed(LOADS_QUIET_S, settled)

    def tell_what_is_missing(self) -> None:
        """Warn if the run is over for this peer before it has what others hold."""
        if text := self.node.progress.missing():
            self.report(ev.Warned, {"text": text})

    def over(self) -> frozenset[int]:
        """Fragments of which no more rounds are made in this run."""
        return self.node.state.over

    def stage(self, fragment: int) -> Stage:
        """How far the round of the fragment's offer is."""
        return self.node.rounds.stage(fragment)

    def is_line_full(self) -> bool:
        """Whether bulk waits for our line."""
        return self.node.links.is_full

    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of messages (up, down) since the start, those of this process's other groups too."""
        up, down = map(sum, zip(*(shell.traffic_bytes() for shell in list(self._shells)), strict=True))
        return up, down

    def live_trainers(self) -> list[str]:
        """The other peers that train, as they said last."""
        live = list(self.node.membership.live.items())  # one step: the loop's thread may not come between
        return [peer for peer, info in live if info.status.phase == Status.TRAINING]

    def give_buffers(self) -> None:
        """Hand this peer's buffers to newcomers, if any wait for them."""
        if self._buffers is None or not self.node.catchup.donor.buffers.are_wanted:
            return
        if not (data := self._buffers.to_bytes()):
            text = "newcomers are not given this peer's buffers: they are other ones than in join"
            self.report(ev.Warned, {"text": text})
        self._loop.call_soon_threadsafe(lambda: self.node.catchup.donor.give_buffers(data, self.node.now()))

    async def take_buffers(self, buffers: ModelBuffers, is_newcomer: bool) -> bytearray:
        """Give ``buffers`` from now on. Those of a peer that trains, if this one ``is_newcomer``; empty if
        nobody gave them in time. On the loop."""
        self._buffers = buffers
        given = self.node.catchup.donor.buffers
        given.layout = buffers.layout
        given.size_bytes = buffers.size_bytes
        donors = self.live_trainers() if is_newcomer and buffers.size_bytes else []
        within_s = LOADS_S + buffers.size_bytes / EXPORT_SLOWEST_BYTES_PER_S
        node = self.node
        for peer in random.Random().sample(donors, min(len(donors), MAX_BUFFER_DONORS)):
            # One by one: of several the quickest would be taken, and a liar needs no training thread.
            place = BUFFERS, len(node.agreed), buffers.layout
            goal = Goal(*place, (PeerId(peer),), size_bytes=buffers.size_bytes)
            if data := await fetch_buffers(node.catchup, goal, within_s, node.now, node.pump):
                return bytearray(data)
        return bytearray()


class PipelineView:
    """Of the group between neighbouring stages."""

    def __init__(self, node: PipelineNode, loop: asyncio.AbstractEventLoop, holds: ModelShare) -> None:
        self.node = node
        self._loop = loop
        self._holds = holds

    def exchange(self, result: Result | None) -> None:
        """As ``PipelineNode.exchange``."""
        self._loop.call_soon_threadsafe(self.node.exchange, result)

    def wait(self, timeout_s: float) -> Work | None:
        """The work that was asked for; None if there is none within ``timeout_s``."""
        with contextlib.suppress(queue.Empty):
            return self.node.handed.work.get(timeout=timeout_s)
        return None

    def dropped(self) -> Iterator[Key]:
        """Microbatches that were dropped since this was asked last."""
        while not self.node.handed.dropped.empty():
            yield self.node.handed.dropped.get_nowait()

    def draw(self, round_: int, tokens_per_s: float) -> None:
        """As ``PipelineNode.draw``; this peer's record says the rate, too."""
        self._holds.tokens_per_s = tokens_per_s
        self._loop.call_soon_threadsafe(self.node.draw, round_, tokens_per_s)

    def finish(self, at_once: bool) -> None:
        """As ``PipelineNode.finish``."""
        self._loop.call_soon_threadsafe(self.node.finish, at_once)
