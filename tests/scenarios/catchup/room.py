"""A peer that comes late and its donors D1, D2, ..., on virtual time (``tests.catchup_world``).

Fragment 0 has a state of 4 chunks, 1 and 2 of 40 each: too large for two at once. All donors are at version
7. ``run`` says what has come of it, with seconds since there are donors; bytes of states are checked.
"""

from __future__ import annotations

from itertools import count

from p2p_co2.protocol.catchup.goals import (
    ROUND,
    STATE,
    CatchUpEvent,
    CatchUpMessage,
    DonorRefused,
    Fetched,
    Goal,
)
from p2p_co2.protocol.catchup.machine import CatchUp
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import Chunk, Decision
from tests.catchup_world import DONORS, LARGE, LATE, MEAN, World, export, lying, named, state_of, zero

NAMES = {peer: f"D{number}" for number, peer in enumerate(DONORS, 1)}
PEERS = {name: peer for peer, name in NAMES.items()}


def shorten(chunk: Chunk) -> None:
    chunk.data = chunk.data[:-1]


LIES = {"zeros": zero, "short": shorten}


class Room:
    def __init__(self) -> None:
        self.donors("2")

    def donors(self, number: str, rate: str = "50e6") -> None:
        """So many, each of which sends ``rate`` bytes per second."""
        self.world = World(int(number), float(rate))
        self.began_at = self.world.now
        self.silent: dict[PeerId, int] = {}
        """How many chunks each still gives."""
        self.world.tamper = self._tamper
        self.told = 0

    def rate(self, donor: str, rate: str) -> None:
        self.world.rates[PEERS[donor]] = float(rate)

    def at_version(self, version: str, *donors: str) -> None:
        for donor in donors:
            self.world.move(PEERS[donor], int(version))

    def keeps(self, donor: str, version: str) -> None:
        """A donor has the round of fragment 0 that made ``version``."""
        self.world.machines[PEERS[donor]].donor.history.remember(0, int(version), Decision(), MEAN)

    def gives(self, donor: str, chunks: str) -> None:
        """So many, and is silent then."""
        self.silent[PEERS[donor]] = int(chunks)

    def loses(self, chunk: str) -> None:
        """The chunk that is sent so many-th is lost."""
        sent = count(1)
        self.world.tamper = lambda sender, message: (
            None if isinstance(message, Chunk) and next(sent) == int(chunk) else message
        )

    def lies(self, donor: str, how: str, after: str = "0") -> None:
        given = count()
        lie = lying(PEERS[donor], lambda chunk: LIES[how](chunk) if next(given) >= int(after) else None)
        self.world.tamper = lie

    def promises_falsely(self, donor: str, version: str) -> None:
        """Bytes of its own as a state of fragment 1, whole and well signed."""
        self.world.move(PEERS[donor], int(version))
        export(self.world.machines[PEERS[donor]], 1, int(version), bytes(LARGE), self.world.now)

    def vouch(self, answer: str) -> None:
        """What the swarm says of a state that is not the honest one of version 7."""
        honest = named(state_of(1, 7))
        says = {"no": False, "nothing": None}[answer]
        self._late.fetcher.ask_swarm(
            lambda donor, fragment, version, digest: None if (version, digest) == (7, honest) else says
        )

    # ---- the late peer

    def want(self, fragment: str, version: str = "7", oldest: str = "0", known: str = "") -> None:
        """A state. ``known``: most report the digest of this version."""
        digest = named(state_of(int(fragment), int(known))) if known else b""
        self.world.want(int(fragment), int(version), oldest=int(oldest), digest=digest)

    def want_from(self, fragment: str, *donors: str) -> None:
        peers = tuple(PEERS[donor] for donor in donors)
        self._late.fetcher.want(Goal(STATE, int(fragment), 7, peers), self.world.now)

    def add(self, fragment: str, *donors: str) -> None:
        self._late.fetcher.add_donors(int(fragment), [PEERS[donor] for donor in donors], self.world.now)

    def replay(self, version: str) -> None:
        """The round of fragment 0 that made ``version``."""
        donors = tuple(peer for peer in self.world.machines if peer != LATE)
        self._late.fetcher.want(Goal(ROUND, 0, int(version), donors), self.world.now)

    def forget(self, fragment: str) -> None:
        self._late.fetcher.forget(int(fragment), self.world.now)

    def leaves(self, donor: str) -> None:
        del self.world.machines[PEERS[donor]]
        self._late.fetcher.forget_donor(PEERS[donor], "left", self.world.now)

    def exports_go(self, donor: str) -> None:
        self.world.machines[PEERS[donor]].donor.exports.clear()

    def run(self, seconds: str = "600", ends: str = "1") -> list[str]:
        """Until so many goals have ended, or so long."""
        self.world.run(float(seconds), enough=int(ends))
        events = self.world.events[self.told :]
        self.told = len(self.world.events)
        return [self._said(event) for event in events] or [f"{self._seconds}: nothing"]

    def chunks(self) -> list[str]:
        """How many each donor sent, and how many were sent again."""
        sent = {name: len(self.world.chunks_from(peer)) for name, peer in PEERS.items()}
        again = sum(times - 1 for times in self.world.chunks_sent().values())
        return [", ".join(f"{name} {number}" for name, number in sent.items() if number), f"{again} again"]

    def is_done(self) -> str:
        return "yes" if self._late.get_timer() is None and self._late.fetcher.is_idle else "no"

    # ---- inside

    @property
    def _late(self) -> CatchUp:
        return self.world.machines[LATE]

    @property
    def _seconds(self) -> str:
        return f"{self.world.now - self.began_at:.1f} s"

    def _tamper(self, sender: PeerId, message: CatchUpMessage) -> CatchUpMessage | None:
        if sender not in self.silent or not self.silent[sender]:
            return None if sender in self.silent else message
        self.silent[sender] -= isinstance(message, Chunk)
        return message

    def _said(self, event: CatchUpEvent) -> str:
        if isinstance(event, DonorRefused):
            return f"{NAMES[event.peer]} refused: {event.reason}"
        if not isinstance(event, Fetched):
            return f"{self._seconds}: fragment {event.goal.fragment} failed"
        if event.goal.what == STATE and not event.goal.oldest:
            self.world.check(event)
        donors = " ".join(sorted(NAMES[donor] for donor in event.donors))
        return f"{self._seconds}: fragment {event.goal.fragment} at version {event.version} from {donors}"
