"""What a member knows of one part of the mean: its owner, what has come of it, whose slices are in it."""

from __future__ import annotations

from p2p_co2.digest import digest
from p2p_co2.rounds.assembly import Assembly
from p2p_co2.rounds.attempt import Attempt
from p2p_co2.rounds.owner import Contributors, list_contributors
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Contributor


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
        self.listed: list[Contributor] = []
        self.who = b""

    def hold(self, contributors: Contributors, attempt: Attempt) -> None:
        """The mean is in its place."""
        self.mean, self.contributors = self.place, contributors
        self.digest = digest(self.place)
        self.listed, self.who = list_contributors(attempt, contributors)
