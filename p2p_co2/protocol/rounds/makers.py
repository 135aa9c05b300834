"""Which cells made the state that a peer has loaded: it asks, so that it can coordinate the next round.

Over cells a round begins with more than half of the cells that made the one before (``forming``). Who was in
that one knows them, and so does who replayed it. Who loads a state, or starts from one on its disk, does not:
it let any half of all cells go on, beside those that had made the state, to two states of one version.

    ASK_OUTCOME, NO_ATTEMPT -> CELL_DECISION, NO_ATTEMPT: the council's signed outcome, without a roster

Laws: only a signed commit of the version that this peer holds counts, of one that it asked; of several words
all cells that they name, since with fewer a round would begin sooner; nobody waits for an answer, a few are
asked at a time and not for long; what was heard is forgotten with the state. Such words bind only the peer
that heard them, as long as enough of the named cells are seen (``forming``); who goes after those that made
its state (``node.majority``) does so only where several tell of the same cells.

Price: a question to four peers and their answers, some kilobytes, for each state that is loaded; to twelve
where they contradict each other. An outcome does not say what its round made: who signs one that never was
lets a round begin sooner, or later, as a council that lies can.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.protocol.rounds import bounds
from p2p_co2.protocol.rounds.decision import Verdicts
from p2p_co2.protocol.rounds.swarm import Outlet, Swarm
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import AskOutcome, CellDecision, Decision, Outcome, RoundKey

NO_ATTEMPT = bytes(bounds.ATTEMPT_BYTES)
"""Whichever attempt at the round has committed."""
ASKED_AT_ONCE = 2
"""Peers of our own cell, and as many of others."""
TIMES, ANSWER_S = 3, 1.5
ENOUGH = 2
"""Words that tell of the same cells, after which nobody else is asked: one may lie."""
WORD_BYTES, WORD_BYTES_PER_CELL = 16 << 10, 256
"""An honest outcome is smaller: it names slots, at most ``MAX_PARTS``, and cells."""


class Makers:
    """Of the state that this peer holds of one fragment."""

    def __init__(self, fragment: int, swarm: Swarm, outlet: Outlet, verdicts: Verdicts) -> None:
        self.donors: Sequence[PeerId] = ()
        """Who gave the state that comes next: asked first."""
        self._fragment, self._swarm, self._outlet, self._verdicts = fragment, swarm, outlet, verdicts
        self._at = 0, b""
        self._asked: set[PeerId] = set()
        self._times = TIMES
        """How often others were asked; as often as they are, if nobody need be."""
        self._again_at: float | None = None

    def moved(self, version: int, digest: bytes, now: float) -> None:
        """Our state is this one now."""
        if (version, digest) == self._at:
            return
        self._at = version, digest
        self._verdicts.drop_hearsay()
        self._asked = set()
        self._again_at = None
        self._times = 0 if version > 0 and self._verdicts.commit(version) is None else TIMES
        self._ask(now)

    def peers_changed(self, now: float) -> None:
        """Who starts from its disk hears of others only later."""
        if self._again_at is None:
            self._ask(now)

    def get_timer(self) -> float | None:
        return self._again_at

    def handle_timer(self, now: float) -> None:
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self._ask(now)

    def _ask(self, now: float) -> None:
        asked = self._whom() if self._times < TIMES else []
        if not asked:
            return
        self._times += 1
        self._again_at = now + ANSWER_S
        key = RoundKey(fragment=self._fragment, round=self._at[0], attempt=NO_ATTEMPT)
        for peer in asked:
            self._asked.add(peer)
            self._outlet.send(peer, AskOutcome(key=key))

    def _whom(self) -> list[PeerId]:
        """Who has not been asked: donors first, of our cell who says that it holds this very state, and then
        who comes after us, so that not all ask the same."""
        swarm, fragment = self._swarm, self._fragment

        def place(peer: PeerId) -> tuple[bool, bool, bool, PeerId]:
            held = swarm.version_of(peer, fragment), swarm.digest_of(peer, fragment)
            return peer not in self.donors, held != self._at, peer < swarm.me, peer

        near = [
            p for p in swarm.live if (swarm.version_of(p, fragment) or 0) >= self._at[0] and p != swarm.me
        ]
        far = [peer for peer in self.donors if not swarm.is_near(peer)]
        far += [
            peer
            for turn in range(TIMES)
            for known in swarm.others.values()
            for peer in known[turn : turn + 1]
        ]
        fresh = ([p for p in peers if p not in self._asked] for peers in (sorted(near, key=place), far))
        return [peer for peers in fresh for peer in list(dict.fromkeys(peers))[:ASKED_AT_ONCE]]

    def answer(self, round_: int, sender: PeerId) -> None:
        """``sender`` asks us."""
        word = self._verdicts.council_word(round_, ENOUGH)
        if word is not None:
            self._outlet.send(sender, CellDecision(decision=word, attempt=NO_ATTEMPT))

    def told(self, decision: Decision, outcome: Outcome, sender: PeerId) -> None:
        """``sender`` says that this made a state: ``decision``, whose signature holds. Raises
        ``RemoteProtocolError`` for what no honest council signs."""
        if sender not in self._asked or outcome.key.round != self._at[0] or self._verdicts.has_told(sender):
            return  # a second word would take the first one back, and nobody else would be asked
        cells = [share.cell for share in outcome.cells]
        if len(decision.outcome) > WORD_BYTES + WORD_BYTES_PER_CELL * self._swarm.cells:
            raise RemoteProtocolError("too large", f"outcome of {len(decision.outcome)} bytes")
        if (
            not outcome.committed
            or not cells
            or cells != sorted(set(cells))
            or cells[-1] >= self._swarm.cells
        ):
            raise RemoteProtocolError("wrong cell", "of a commit")
        self._verdicts.hear(sender, decision, outcome)
        if self._verdicts.cells_agreed(self._at[0], ENOUGH):
            self._times, self._again_at = TIMES, None
