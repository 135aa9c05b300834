"""What follows from the rounds machine's events: reductions, commits, aborts, and what has to be fetched.

The machine decides, the tensor side computes, and this room carries results from one to the other in the
order of the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low

from p2p_co2.node.catchup import CatchupController
from p2p_co2.node.outer_state import LedgerCalls, Offers
from p2p_co2.node.state import Effects
from p2p_co2.protocol.ledger import Ledger, SliceRefused, agreed_mean, weights_of
from p2p_co2.protocol.rounds import PayloadShape, Rounds, claimed_weights, counted_weights, open_decision
from p2p_co2.protocol.rounds import events as said
from p2p_co2.telemetry import events as ev
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS
from p2p_co2.wire.messages_pb2 import Decision, Missed, Outcome

CAPPED_TOLD_S = 60.0
"""That a peer counts for far less than it claims is told so often at most."""


class CommitHandler:
    """``run`` and ``shape`` are what decisions are checked against; ``forget``: drop what waits to be sent of
    an attempt (``LinkPool.forget``). ``on_decision`` hears of every commit that this peer took part in:
    (fragment, round, decision)."""

    def __init__(
        self, rounds: Rounds, ledger: Ledger, outer: LedgerCalls, offers: Offers, fetches: CatchupController,
        run: bytes, shape: PayloadShape, forget: Callable[[bytes, bool], None], effects: Effects,
    ) -> None:  # fmt: skip
        self._rounds = rounds
        self._ledger = ledger
        self._outer = outer
        self._offers = offers
        self._fetches = fetches
        self._run = run
        self._shape = shape
        self._forget = forget
        self._do = effects
        self._capped: dict[str, tuple[float, int]] = {}
        """Of peers that count for far less than they claim, the last one last: when that was told, and its
        rounds since."""
        self.on_decision: Callable[[int, int, Decision], None] = lambda fragment, round_, decision: None

    def handle(self, event: said.RoundsEvent) -> None:
        do = self._do
        match event:
            case said.ReduceWanted():
                do.spawn(self._reduce(event))
            case said.CheckWanted():
                do.spawn(self._check(event))
            case said.Committed():
                do.spawn(self._committed(event))
            case said.MissedSlices():
                do.report(
                    ev.SliceMissed, fragment=event.fragment, round=event.round, parts=event.parts,
                    reason=Missed.Name(event.reason).lower(), owners=tuple(event.owners),
                )  # fmt: skip
            case said.Aborted():
                do.report(ev.RoundAborted, fragment=event.fragment, round=event.round, reason=event.reason)
                do.spawn(self._ledger.abort(event.fragment, event.offer_id))
            case said.Began():
                do.report(ev.RoundBegan, fragment=event.fragment, round=event.round, group=tuple(event.group))
            case said.FellBehind():
                self._fell_behind(event, event.version, event.digest)
            case said.OutcomeWithoutBytes():
                self._fell_behind(event, event.round, b"")
            case said.Stale():
                self._forget(event.attempt, event.means)
            case said.Doubted():
                do.spawn(self._ledger.doubt(event.fragment))
            case said.Refused():
                do.refuse(event.peer, event.reason, event.detail)
            case said.Distrusted():
                lasts = f" (for {event.lasts_s:.0f} s)" if event.lasts_s else ""
                text = f"peer {event.peer} is {event.reason}{lasts}"
                do.report(ev.Warned, text=text)

    def _fell_behind(
        self, event: said.FellBehind | said.OutcomeWithoutBytes, version: int, digest: bytes
    ) -> None:
        going = self._fetches.go_to(event.fragment, version, digest, tuple(event.donors))
        if event.ends_offer and not going:
            self._offers.give_up(event.fragment)

    async def _reduce(self, event: said.ReduceWanted) -> None:
        job = event.job
        try:
            mean, weights, standing = await self._ledger.reduce(job.fragment, job.slices)
        except SliceRefused as refused:
            self._rounds.refused_slice(job, PeerId(refused.peer), refused.reason, self._do.now())
        else:
            pairs = zip(job.slices, weights, strict=True)
            slices = tuple(one._replace(weight=weight) for one, weight in pairs)
            self._rounds.scored(dict(zip([one.peer for one in slices], standing, strict=False)))
            self._rounds.reduced(replace(job, slices=slices), mean, self._do.now())
        self._do.pump()

    async def _check(self, event: said.CheckWanted) -> None:
        likeness = await self._ledger.check(event.fragment, event.mine, event.mean)
        self._rounds.checked(event, likeness, self._do.now())
        self._do.pump()

    async def _committed(self, event: said.Committed) -> None:
        decision = Decision.FromString(event.decision)
        outcome = open_decision(decision, self._run, self._shape)
        of_parts = [set(part.weights) for part in weights_of(outcome)]
        everywhere = len(set.intersection(*of_parts))
        somewhere = len(set.union(*of_parts))
        place = {"fragment": event.fragment, "round": event.round}
        self._do.report(
            ev.RoundCommitted, **place, coordinator=event.coordinator, group_size=len(event.group),
            contributors=everywhere, partial=somewhere - everywhere, duration_s=event.duration_s,
            begun_s=event.begun_s, parts_s=event.parts_s, means_s=event.means_s,
        )  # fmt: skip
        self._do.report(ev.RoundCounted, **place, weights=counted_weights(outcome))
        self.tell_of_capped(outcome)
        self.on_decision(event.fragment, event.round, decision)
        await self._outer.take(agreed_mean(outcome, event.mean), decision)

    def tell_of_capped(self, outcome: Outcome) -> None:
        """Who counts for a quarter of its claim, or less: whoever was late claims more than others, too. Of
        two members nobody is told of: beside one that has just come any honest claim is large."""
        if len(outcome.members) < 3:
            return
        claimed = claimed_weights(outcome)
        now = self._do.now()
        for peer, weight in counted_weights(outcome).items():
            if 4 * weight > claimed[peer]:
                continue
            told_at, rounds = self._capped.pop(peer, (-math.inf, 0))
            is_told = now - told_at >= CAPPED_TOLD_S
            self._capped[peer] = (now, 0) if is_told else (told_at, rounds + 1)
            if len(self._capped) > MAX_PEERS:
                del self._capped[next(iter(self._capped))]
            if not is_told:
                continue
            self._do.report(
                ev.ContributionCapped, other=peer, fragment=outcome.key.fragment, round=outcome.key.round,
                claimed=claimed[peer], counted=weight,
                median=median_low(member.weight for member in outcome.members), rounds=rounds + 1,
            )  # fmt: skip
