"""What follows from the rounds machine's events: reductions, commits, aborts, and the state after them.

The machine decides, the tensor side computes, and this room carries results from one to the other in the
order of the decisions. Law: the machine hears of a new state only after the tensor side has it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING

from p2p_co2.digest import chunk_digests
from p2p_co2.node.ledger import AgreedMean, AgreedVersion, Ledger, SliceRefused, agreed_mean, weights_of
from p2p_co2.protocol.rounds import (
    Aborted,
    Began,
    Committed,
    Distrusted,
    Doubted,
    FellBehind,
    Offer,
    OutcomeWithoutBytes,
    Overheard,
    ReduceWanted,
    Refused,
    RoundsEvent,
    Stale,
    claimed_weights,
    counted_weights,
    open_decision,
)
from p2p_co2.protocol.rounds.certificate import Derived
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS
from p2p_co2.protocol.wire.messages_pb2 import Decision, Outcome, Status
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry import events as ev

if TYPE_CHECKING:
    from p2p_co2.node.node import Node

CAPPED_TOLD_S = 60.0
"""That a peer counts for far less than it claims is told so often at most."""


@Derived
def _contributors(outcome: Outcome) -> tuple[int, int]:
    """How many peers are in all parts of a committed mean, and how many in any."""
    of_parts = [set(part.weights) for part in weights_of(outcome)]
    return len(set.intersection(*of_parts)), len(set.union(*of_parts))


def members_of(decision: Decision) -> tuple[PeerId, ...]:
    return tuple(PeerId(member.peer) for member in Outcome.FromString(decision.outcome).members)


class Deciding:
    def __init__(self, node: Node, ledger: Ledger) -> None:
        self._node, self._ledger = node, ledger
        self._opened: dict[int, bytes] = {}
        """By fragment, the id of the last offer that was opened."""
        self._owed: set[int] = set()
        """Fragments whose offer has ended in a commit that is to be fetched: by that the tensor side hears of
        it."""
        self._capped: dict[str, tuple[int, float]] = {}
        """By peer: rounds in which it counted for far less than it claims since that was told, and when; of
        the last ``MAX_PEERS`` that were told of."""
        self.on_decision: Callable[[int, int, Decision], None] = lambda fragment, round_, decision: None
        """Hears of every commit that this peer took part in: (fragment, round, signed decision)."""

    def handle(self, event: RoundsEvent) -> None:
        if isinstance(event, ReduceWanted):
            self._node.spawn(self._reduce(event))
        elif isinstance(event, Committed):
            self._node.spawn(self._committed(event))
        elif isinstance(event, Aborted):
            self._node.progress.note_over()
            self._node.report(
                ev.RoundAborted, fragment=event.fragment, round=event.round, reason=event.reason
            )
            self._node.spawn(self._ledger.abort(event.fragment, event.offer_id))
        elif isinstance(event, Began):
            self._node.report(
                ev.RoundBegan,
                fragment=event.fragment,
                round=event.round,
                group=tuple(event.group),
            )
        elif isinstance(event, FellBehind | OutcomeWithoutBytes):
            self._fell_behind(event)
        elif isinstance(event, Overheard):
            if event.ends_offer:
                self._owed.add(event.fragment)
            self._node.catching.overheard(event)
        elif isinstance(event, Stale):
            self._node.links.forget(event.attempt, event.means)
        elif isinstance(event, Doubted):
            self._node.spawn(self._ledger.doubt(event.fragment))
        elif isinstance(event, Refused | Distrusted):
            self._blame(event)

    def _fell_behind(self, event: FellBehind | OutcomeWithoutBytes) -> None:
        version, digest = (
            (event.version, event.digest) if isinstance(event, FellBehind) else (event.round, b"")
        )
        going = self._node.catching.go_to(event.fragment, version, digest, tuple(event.donors))
        if event.ends_offer and not going:
            self._node.give_up_offer(event.fragment)
        elif event.ends_offer and self._node.catching.is_fetching(event.fragment):
            self._owed.add(event.fragment)  # else it was given up at once

    def _blame(self, event: Refused | Distrusted) -> None:
        if isinstance(event, Refused):
            self._node.refuse(event.peer, event.reason, event.detail)
        else:
            text = f"peer {event.peer} is {event.reason} (for {event.lasts_s:.0f} s)"
            self._node.report(ev.Warned, text=text)

    async def _reduce(self, event: ReduceWanted) -> None:
        job = event.job
        try:
            mean, weights = await self._ledger.reduce(job.fragment, job.slices)
        except SliceRefused as refused:
            self._node.rounds.refused_slice(job, PeerId(refused.peer), refused.reason, self._node.now())
        else:
            if any(piece.weight != weight for piece, weight in zip(job.slices, weights, strict=True)):
                pairs = zip(job.slices, weights, strict=True)
                job = replace(job, slices=tuple(one._replace(weight=weight) for one, weight in pairs))
            self._node.rounds.reduced(job, mean, self._node.now())
        self._node.pump()

    async def _committed(self, event: Committed) -> None:
        decision = Decision()
        decision.ParseFromString(event.decision)
        outcome = open_decision(decision, self._node.run_digest, self._node.shape)
        agreed = agreed_mean(outcome, event.mean)
        everywhere, somewhere = _contributors(outcome)
        self._node.report(
            ev.RoundCommitted,
            fragment=event.fragment,
            round=event.round,
            coordinator=event.coordinator,
            group_size=len(event.group),
            contributors=everywhere,
            partial=somewhere - everywhere,
            duration_s=event.duration_s,
            begun_s=event.begun_s,
            parts_s=event.parts_s,
            means_s=event.means_s,
        )
        self._node.report(
            ev.RoundCounted,
            fragment=event.fragment,
            round=event.round,
            weights=counted_weights(outcome),
        )
        self._tell_of_capped(outcome)
        self.on_decision(event.fragment, event.round, decision)
        await self.take(agreed, decision)

    def _tell_of_capped(self, outcome: Outcome) -> None:
        """Who counts for a quarter of its claim, or less: whoever was late claims more than others, too."""
        claimed, now = claimed_weights(outcome), self._node.now()
        for peer, weight in counted_weights(outcome).items():
            if 4 * weight > claimed[peer]:
                continue
            rounds, told_at = self._capped.get(peer, (0, -math.inf))
            if now - told_at < CAPPED_TOLD_S:
                self._capped[peer] = rounds + 1, told_at
                continue
            self._capped.pop(peer, None)  # so that who was told of longest ago is the first
            self._capped[peer] = 0, now
            if len(self._capped) > MAX_PEERS:
                del self._capped[next(iter(self._capped))]
            self._node.report(
                ev.ContributionCapped,
                other=peer,
                fragment=outcome.key.fragment,
                round=outcome.key.round,
                claimed=claimed[peer],
                counted=weight,
                median=median_low(member.weight for member in outcome.members),
                rounds=rounds + 1,
            )

    async def take(self, mean: AgreedMean, decision: Decision) -> bool:
        """Apply an agreed mean; False if it does not follow this peer's version."""
        version = await self._ledger.commit(mean)
        if version.version == mean.round - 1 and version.digest != mean.state_digest:
            text = f"round {mean.round} of fragment {mean.fragment} is not applied here: it came upon a state"
            self._node.report(ev.Warned, text=f"{text} that this peer has exchanged for another meanwhile")
        if version.version == mean.round == self._node.agreed[mean.fragment].version + 1:
            self._node.rounds.replayed(decision)
        moved = self._agree(mean.fragment, version, members_of(decision)) and version.version == mean.round
        if moved:
            self._node.catchup.remember(mean.fragment, mean.round, decision, mean.mean)
        self._node.pump()
        return moved

    async def adopt(
        self, fragment: int, data: Buffer, agreed: AgreedVersion, goes_back: bool = False
    ) -> None:
        """Take over a donor's state; errors and ``goes_back`` as ``Ledger.adopt``. Our own state changes
        nothing: an offer that is open goes on, and the tensor side must not take it for ended."""
        if agreed == self._node.agreed[fragment]:
            return
        known = self._node.rounds.next_commit(fragment)
        parts = None if known is None else weights_of(known)
        version = await self._ledger.adopt(fragment, data, agreed, parts, goes_back)
        is_here = version == self._node.agreed[fragment]  # a round made that state meanwhile
        if goes_back and not is_here:
            self._node.catchup.turned_back(fragment)
        self._agree(fragment, version, None)
        self._node.pump()

    def settle_offer(self, fragment: int) -> None:
        """What was to be fetched is here, or wanted no more. If our state did not change, the tensor side has
        not heard that its offer ended, and would make no other in the whole run."""
        is_open = any(offer.fragment == fragment for offer in self._node.rounds.open_offers())
        if fragment in self._owed and not is_open:
            self.end_offer(fragment)
        self._owed.discard(fragment)

    def opened(self, offer: Offer) -> None:
        """The rounds machine has it."""
        self._opened[offer.fragment] = offer.offer_id

    def end_offer(self, fragment: int) -> None:
        """The offer that was opened last came to nothing, should the tensor side still hold it in flight. The
        next one may be there already, and be on its way to be opened: that one goes on."""
        if fragment in self._opened:
            self._node.spawn(self._ledger.abort(fragment, self._opened[fragment]))

    async def export(self, fragment: int) -> None:
        version, data = await self._ledger.export(fragment)
        digests = []
        for chunk in chunk_digests(data, self._node.catchup.shape.chunk_bytes):
            digests.append(chunk)
            await asyncio.sleep(0)  # a large state takes long, and the rounds go on
        self._node.catchup.exported(
            fragment, version.version, data, version.digest, digests, self._node.now()
        )
        self._node.pump()

    def _agree(self, fragment: int, version: AgreedVersion, group: Collection[PeerId] | None) -> bool:
        """``group`` as ``Agreement.moved``."""
        changed = self._node.agreed[fragment] != version
        if changed:
            self._owed.discard(fragment)
            self._node.catching.majority.moved(fragment, version, group)
        self._node.progress.unsettle()
        self._node.agreed[fragment] = version
        self._node.catchup.moved(fragment, version.version)
        if changed and group is not None:
            self._node.catching.overtaken(fragment)
        self._node.rounds.set_state(fragment, version.version, version.digest)
        if changed:
            self._node.refresh()
            if self._node.progress.local.phase == Status.DRAINING or self._node.membership.quiet_s:
                self._node.membership.announce(self._node.now())  # others wait to see it, or for long
        self._node.offer_early(fragment)
        return changed
