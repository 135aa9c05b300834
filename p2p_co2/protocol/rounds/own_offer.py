"""This peer's part in the next round of a fragment, from its offer to its ending. ``NEXT`` says what may
follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2p_co2.errors import LocalProtocolError
from p2p_co2.protocol.rounds.asking import Asking
from p2p_co2.protocol.rounds.events import Offer
from p2p_co2.protocol.rounds.member import Completion, Member


@dataclass(frozen=True)
class Waiting:
    """An attempt at its round that this peer left is not over: nobody is asked before it is."""


Role = Waiting | Asking | Member | Completion
NEXT: Mapping[type[Role], type[Role] | None] = {
    Waiting: Asking, Asking: Member, Member: Completion, Completion: None,
}  # fmt: skip
"""What may follow; in each an offer may end."""


class OwnOffer:
    """One offer, since when it is open, and its present role; None and none while nothing is offered."""

    def __init__(self, offer: Offer | None = None, now: float = 0.0) -> None:
        self.offer = offer
        self.offered_at = now
        self.role: Role | None = None if offer is None else Waiting()

    def become(self, role: Role) -> None:
        if self.role is None or NEXT[type(self.role)] is not type(role):
            raise LocalProtocolError(f"no {type(role).__name__} follows {type(self.role).__name__}")
        self.role = role

    @property
    def asking(self) -> Asking | None:
        return self.role if isinstance(self.role, Asking) else None

    @property
    def completion(self) -> Completion | None:
        """Set while some means of our committed attempt are still on their way to us."""
        return self.role if isinstance(self.role, Completion) else None

    @property
    def member(self) -> Member | None:
        """Its part in an attempt, also once that has committed."""
        if isinstance(self.role, Completion):
            return self.role.member
        return self.role if isinstance(self.role, Member) else None

    def is_in(self, attempt: bytes) -> bool:
        """Whether we are in the attempt of this id now."""
        return self.member is not None and self.member.attempt.id == attempt
