"""Where to go when most of those who are here are elsewhere, and not simply ahead.

A peer that trains alone while the others are suspended makes versions of its own, and is ahead when they
wake: its word alone moves nobody, and they make the same versions anew. So it is the one that turns back, as
soon as they contradict what it remembers of its own past; or when they have stood for long where it came
from, because nobody gives its versions any more.

Law: more than half of all who move, of those that the DHT lists and that are not heard, and of us, must be
elsewhere, two of them in one state: two liars take nobody back who hears more honest peers than them. Of
versions that others helped to make nobody turns back before they are contradicted. Where all finish in
several states of which none has a majority, the largest digest decides among equals: a liar who finishes with
them may be who it is. Who loaded a state that its makers have given up, goes to where most others finish.
Neither leads from a state that somebody left with to one that fewer hold or left with: one liar less than
hold another state, who say that they hold ours or more and leave, can keep us there.
Price: the versions made alone are lost; their work is offered again, unless somebody was given any of them
(``trainer.alone``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_co2.node.ledger import AgreedVersion
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import Status

if TYPE_CHECKING:
    from p2p_co2.node.majority import Majority
    from p2p_co2.node.node import Node

PAST_KEPT = 256
"""Own versions of each fragment that are remembered, with who made them."""
TURN_AFTER_S = 3.0
"""What the others contradict is given up after this: who wakes tells where it was left."""
STANDING_S = 15.0
"""They stand where our lonely rounds began: long enough for them to have begun to fetch these."""
TAKING_S = 40.0
"""The same where anybody was given any of them: over a slow way the others take so long, and came to where
this peer had been while it went to where they were."""
STRONGEST_AFTER_S = 8.0
"""Where all finish in several states, of which none has a majority: last rounds that are on their way to
others come first."""
HOLDERS = 2


@dataclass(frozen=True)
class Camp:
    """Where most of the others are, who is there, and how long that must last before one goes."""

    version: int
    digest: bytes
    holders: tuple[PeerId, ...]
    wait_s: float


class Apart:
    """``since``: per fragment, from when on most others were elsewhere."""

    def __init__(self, node: Node, majority: Majority) -> None:
        self._node, self._majority = node, majority
        self._past: dict[int, dict[int, tuple[bytes, bool]]] = {}
        """Per fragment: by version its digest, and whether this peer made it alone."""
        self.since: dict[int, float] = {}
        self.given_up: dict[int, int] = {}
        """Per fragment: rounds that this peer made alone, which the last state that it took over lacks."""

    def moved(self, fragment: int, agreed: AgreedVersion, group: Collection[PeerId] | None) -> None:
        """Our state is about to be ``agreed``: by a round of ``group``, or (None) somebody else's whole
        state, of whose past we know nothing."""
        past, before = self._past.setdefault(fragment, {}), self._node.agreed[fragment]
        if group is None:
            self.given_up[fragment] = self._alone_beyond(fragment, agreed.version, agreed.digest)
            past.clear()
        elif not past:
            past[before.version] = before.digest, False
        past[agreed.version] = agreed.digest, group is not None and set(group) == {self._node.me}
        while len(past) > PAST_KEPT:
            del past[next(iter(past))]

    def _alone_beyond(self, fragment: int, version: int, digest: bytes) -> int:
        """How many rounds in a row, the newest, this peer made alone that a state of ``version`` lacks: at
        most, since it may come of one of ours; 0 of a newer one, which may hold all of them."""
        past, newest = self._past.get(fragment, {}), self._node.agreed[fragment].version
        if version > newest:
            return 0
        held = version if past.get(version, (b"",))[0] == digest else -1
        made = newest
        while made > held and past.get(made, (b"", False))[1]:
            made -= 1
        return newest - made

    def is_unshared(self, fragment: int) -> bool:
        """Whether nobody can have any of the newest rounds in a row that this peer made alone."""
        return self._made_alone(fragment) > 0 and self.may_stay_unshared(fragment)

    def may_stay_unshared(self, fragment: int) -> bool:
        """The same, or there are none yet. Where this is false, it is so until the next round with others."""
        made = self._made_alone(fragment)
        if made >= PAST_KEPT:  # of more, nobody remembers what was given away
            return False
        given = max(self._node.catchup.given(fragment), self._node.rounds.given(fragment))
        return given <= self._node.agreed[fragment].version - made

    def _made_alone(self, fragment: int) -> int:
        return self._alone_beyond(fragment, self._node.agreed[fragment].version, b"")

    def loss(self, fragment: int, camp: Camp) -> str:
        """What going there costs, in words."""
        alone = self._alone_beyond(fragment, camp.version, camp.digest)
        rounds = f"{alone} round{'s' if alone > 1 else ''} of this peer alone"
        if alone and self.is_unshared(fragment):
            return f"what only our history holds is lost; the work of {rounds} is kept for our next offer"
        return "what only our history holds is lost" + (f", {rounds} among it" if alone else "")

    def where_to(self, fragment: int, now: float) -> Camp | None:
        """As ``camp``, once it has lasted."""
        camp = self.camp(fragment)
        if camp is None:
            self.since.pop(fragment, None)
            return None
        return camp if now - self.since.setdefault(fragment, now) >= camp.wait_s else None

    def camp(self, fragment: int) -> Camp | None:
        """Where to go; None where this peer is with most others, or on its way to them."""
        middle = self._majority.swarm_version(fragment)
        is_ahead = middle < self._node.agreed[fragment].version
        return (self._behind(fragment, middle) if is_ahead else None) or self._strongest(fragment, middle)

    def _behind(self, fragment: int, middle: int) -> Camp | None:
        """The state of most others, who are behind us and not on our way; one that is further than half of
        them have come (``middle``) only where there is no other: two that say so may have made it up."""
        node, mine = self._node, self._node.agreed[fragment].version
        past, moving = self._past.get(fragment, {}), 0
        elsewhere: dict[PeerId, tuple[int, bytes]] = {}
        standing: set[PeerId] = set()
        for peer, info in node.membership.live.items():
            if fragment >= len(info.digests) or info.status.phase not in (Status.TRAINING, Status.DRAINING):
                continue
            moving += 1
            held = info.versions[fragment], info.digests[fragment]
            known = past.get(held[0])
            if known is None or held[0] >= mine:
                continue
            if known[0] != held[1]:
                elsewhere[peer] = held
            elif all(past[version][1] for version in range(held[0] + 1, mine + 1)):
                elsewhere[peer] = held
                standing.add(peer)
        if 2 * len(elsewhere) <= moving + len(node.membership.candidates) + 1:
            return None
        counts, ours = Counter(elsewhere.values()), {elsewhere[peer] for peer in standing}
        held = max(counts, key=lambda held: (held[0] <= middle, counts[held], held in ours, held))
        if counts[held] < HOLDERS:
            return None
        holders = tuple(sorted(peer for peer in elsewhere if elsewhere[peer] == held))
        if not standing:
            return Camp(*held, holders, TURN_AFTER_S)
        return Camp(*held, holders, STANDING_S if self.is_unshared(fragment) else TAKING_S)

    def _strongest(self, fragment: int, middle: int) -> Camp | None:
        """Where all finish, in several states of which none has a majority, nobody makes a round that could
        heal them: the state to go to that all choose who hear the same. ``middle``: the version that half
        of them have reached; one that is further alone may have made it up. Not where some have left with
        ours, or with more than that where no two here hold more, and those and who is here with ours are more
        than with the other, or as many and ours is the larger: that is where the run ended."""
        camp, agreed = self._choice(fragment, middle), self._node.agreed[fragment]
        if camp is None:
            return None
        gone = self._majority.last_words.gone_with(fragment)
        ours, theirs = (agreed.version, agreed.digest), (camp.version, camp.digest)
        here = [
            (info.versions[fragment], info.digests[fragment])
            for info in self._node.membership.live.values()
            if info.status.phase == Status.DRAINING and fragment < len(info.digests)
        ]
        left, with_us = gone[ours], 1 + here.count(ours)
        further = [held for held, count in Counter(here).items() if held > ours and count >= HOLDERS]
        if camp.version < agreed.version and not further:
            left += sum(count for (version, _), count in gone.items() if version > agreed.version)
        with_them = gone[theirs] + len(camp.holders)
        return None if left and (left + with_us, ours) > (with_them, theirs) else camp

    def _choice(self, fragment: int, middle: int) -> Camp | None:
        """The same by those who are here alone."""
        node = self._node
        if node.progress.local.phase != Status.DRAINING:
            return None
        live = {peer: info for peer, info in node.membership.live.items() if fragment < len(info.digests)}
        if any(info.status.phase == Status.TRAINING for info in live.values()):
            return None
        infos = {peer: info for peer, info in live.items() if info.status.phase == Status.DRAINING}
        mine = node.agreed[fragment].version, node.agreed[fragment].digest
        states = {peer: (info.versions[fragment], info.digests[fragment]) for peer, info in infos.items()}
        counts = Counter([*states.values(), mine])
        past = self._past.get(fragment, {})
        with_us = sum(held == mine or past.get(held[0], (b"",))[0] == held[1] for held in states.values()) + 1
        if 2 * max(with_us, *counts.values()) > counts.total():
            return self._standing(mine, past, states, counts)
        best = max(counts, key=lambda held: (held[0] <= middle, counts[held], held))
        if best == mine:
            return None
        return Camp(*best, tuple(sorted(peer for peer in states if states[peer] == best)), STRONGEST_AFTER_S)

    def _standing(
        self, mine: tuple[int, bytes], past: dict[int, tuple[bytes, bool]],
        states: dict[PeerId, tuple[int, bytes]], counts: Counter[tuple[int, bytes]],
    ) -> Camp | None:  # fmt: skip
        """Where all finish: the state of most others, if we loaded a later one of whose past we know nothing.
        Who made the rounds since then turned back, and nobody can give them any more."""
        most, count = counts.most_common(1)[0]
        if 2 * count <= counts.total() or most[0] >= mine[0] or most[0] in past:
            return None
        return Camp(*most, tuple(sorted(peer for peer in states if states[peer] == most)), STANDING_S)
