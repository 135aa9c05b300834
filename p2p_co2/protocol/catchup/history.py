"""The means of the last rounds, kept so that a peer that missed a few can replay them.

Law: all means together stay below ``HISTORY_BYTES_SHARE`` of the model. Where one round of all fragments is
more than ``LARGE_SHARE`` of it none is kept. Beyond that the newest of each fragment is kept until all live
peers have it (``is_everywhere``), and what a peer that loads a state needs next (``hold``). Of one fragment
there are at most ``HISTORY_ROUNDS_KEPT``.

Price: with a codec of 8 bits or more a peer that was not live for a round loads the state. That is two to
eight times the bytes of one mean. With four bits one or two rounds are there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_co2.digest import chunk_digests
from p2p_co2.protocol.catchup.goals import TransferSizes
from p2p_co2.system.memory import Buffer
from p2p_co2.wire.messages_pb2 import Decision, Manifest

HISTORY_ROUNDS_KEPT = 8
"""Rounds per fragment whose mean a donor can replay, if memory allows."""
HISTORY_BYTES_SHARE = 0.25
"""All kept means together, as a share of the model's fp32 size."""
LARGE_SHARE = 0.2
"""Means of one round above this share (8 bits and more) save little against loading the state."""


@dataclass
class KeptRound:
    decision: Decision
    mean: Buffer
    manifest: Manifest | None = None
    """Signed when somebody asks for the first time, for all who ask."""
    _digests: list[bytes] = field(default_factory=list)

    def chunk_digests(self, chunk_bytes: int) -> list[bytes]:
        """Computed when somebody asks: most rounds are never replayed."""
        if not self._digests:
            self._digests = list(chunk_digests(self.mean, chunk_bytes))
        return self._digests


class RoundHistory:
    """Kept rounds by (fragment, version), oldest first."""

    def __init__(self, shape: TransferSizes, is_everywhere: Callable[[int, int], bool]) -> None:
        """``is_everywhere``: whether nobody who is live lacks a fragment's version any more."""
        self._shape = shape
        self._is_everywhere = is_everywhere
        self._rounds: OrderedDict[tuple[int, int], KeptRound] = OrderedDict()
        self._held: dict[int, int] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._rounds)

    def find(self, fragment: int, version: int) -> KeptRound | None:
        return self._rounds.get((fragment, version))

    def remember(self, fragment: int, version: int, decision: Decision, mean: Buffer) -> None:
        """Keep a committed round."""
        if (fragment, version) in self._rounds:
            return
        self._rounds[fragment, version] = KeptRound(decision, mean)
        self.held_bytes += len(mean)
        mine = [known for known in self._rounds if known[0] == fragment]
        if len(mine) > HISTORY_ROUNDS_KEPT:
            self._forget(mine[0])
        self.shrink()

    def drop(self, fragment: int) -> None:
        """Forget all rounds of a fragment."""
        for key in [key for key in self._rounds if key[0] == fragment]:
            self._forget(key)

    def hold(self, held: dict[int, int]) -> None:
        """Of the fragments in ``held``, keep the rounds after the version given there."""
        self._held = held
        self.shrink()

    def shrink(self) -> None:
        """Let go of what the law does not keep, as far as the bound asks for it. To be asked when a round has
        begun: then its members have the one before, whose pages the new mean can have."""
        model_bytes = sum(self._shape.state_bytes) / 2  # a state is params and momentum
        is_large = sum(self._shape.mean_bytes) > LARGE_SHARE * model_bytes
        bound = 0 if is_large else HISTORY_BYTES_SHARE * model_bytes
        newest = {fragment: version for fragment, version in self._rounds}
        for fragment, version in list(self._rounds):
            if self.held_bytes <= bound:
                return
            is_held = version > self._held.get(fragment, version)
            if not is_held and (version < newest[fragment] or self._is_everywhere(fragment, version)):
                self._forget((fragment, version))

    def _forget(self, key: tuple[int, int]) -> None:
        self.held_bytes -= len(self._rounds.pop(key).mean)
