"""What a member knows of one part of the mean: its owner, what has come of it, whose slices are in it."""

from __future__ import annotations

from p2p_co2.digest import digest
from p2p_co2.protocol.rounds.assembly import Assembly
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.owner import Contributors, list_contributors
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import PartOutcome


class PartState:
    """``place``: where its bytes go, part of the whole mean."""

    def __init__(self, owner: PeerId, generation: int, place: memoryview, due_at: float) -> None:
        self.owner = owner
        self.generation = generation
        self.due_at = due_at
        self.place = place
        self.transfer = Assembly(len(place), place)
        self.contributors: Contributors | None = None
        self.mean: memoryview | None = None
        self.digest = b""
        self._outcome: PartOutcome | None = None

    def hold(self, contributors: Contributors, attempt: Attempt) -> None:
        """The mean is in its place."""
        self.mean, self.contributors = self.place, contributors
        self.digest = digest(self.place)
        self._outcome = None

    def outcome(self, part: int, attempt: Attempt) -> PartOutcome:
        """What a vote says of it, the same object until that changes. A part that we do not hold has an empty
        digest; its generation is told all the same."""
        if self._outcome is None:
            (start, stop), held = attempt.ranges[part], self.contributors if self.mean is not None else None
            listed = [] if held is None else list_contributors(held)
            self._outcome = PartOutcome(
                start_block=start, stop_block=stop, generation=self.generation,
                digest=self.digest, contributors=listed,
            )  # fmt: skip
        return self._outcome
