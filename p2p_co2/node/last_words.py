"""What others said last of the states that they hold, those who have gone among them.

At a run's end peers leave when all that they hear is done, or when their time is up. Who is still there goes
on knowing where they were: what this peer lacks is lacking whoever is left, and where all finish in several
states who has gone counts beside those who are here (``apart``). Nobody goes anywhere by the word of who has
gone alone: two that lie and leave would send all others after what nobody has.

Law: it is kept only while this peer is done with its training, of ``WORDS_KEPT`` peers at most, and
only what honest peers can have held. Price: whoever says something and leaves is not asked again; who lies
of rounds that nobody has made lets all others say that they lack them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.limits import MAX_PEERS

WORDS_KEPT = 2 * MAX_PEERS

Held = tuple[tuple[int, ...], tuple[bytes, ...]]
"""Per fragment, a version and its digest."""
State = tuple[int, bytes]
"""The same of one fragment."""


class LastWords:
    def __init__(self) -> None:
        self._words: dict[PeerId, Held] = {}
        """By peer, the one that is heard last at the end."""
        self._here: frozenset[PeerId] = frozenset()

    def clear(self) -> None:
        """Nothing was said yet."""
        self._words, self._here = {}, frozenset()

    def note(self, heard: Mapping[PeerId, Held | None], limits: Sequence[int]) -> bool:
        """These are here, and say so; True if that is news, also of who has gone. None: nothing that counts,
        no more than what is not of this run's fragments. ``limits``: per fragment, the newest version at
        which anybody honest can be; who alone says more has said nothing of that fragment."""
        words = {name: word for name, word in self._words.items() if name not in heard}
        said = {
            name: held
            for name, held in heard.items()
            if held is not None and len(held[0]) == len(held[1]) == len(limits)
        }
        words |= said if _are_near(said.values(), limits) else _believed(said, limits)
        while len(words) > WORDS_KEPT:
            del words[next(iter(words))]
        before = self._words, self._here
        self._words, self._here = words, frozenset(heard)  # other threads look at those that are there
        return before != (self._words, self._here)

    def held(self) -> dict[str, tuple[int, int]]:
        """What strangers can make grow: (now, at most) by the name of the bound."""
        return {"WORDS_KEPT": (len(self._words), WORDS_KEPT)}

    def newest(self, fragment: int) -> int:
        """The newest version that anybody held; -1 if none is known."""
        return max((versions[fragment] for versions, _ in self._words.values()), default=-1)

    def gone_with(self, fragment: int) -> Counter[State]:
        """How many of those who have gone held which state."""
        if len(self._words) <= len(self._here) and self._words.keys() <= self._here:
            return Counter()
        return Counter(
            (versions[fragment], digests[fragment])
            for name, (versions, digests) in self._words.items()
            if name not in self._here and versions[fragment] >= 0 and digests[fragment]
        )


def _are_near(said: Iterable[Held], limits: Sequence[int]) -> bool:
    return all(all(map(int.__le__, versions, limits)) for versions, _ in said)


def _believed(said: Mapping[PeerId, Held], limits: Sequence[int]) -> dict[PeerId, Held]:
    """Beyond its limit a version counts if two of those that are heard hold that state: most of them may have
    been away for long. Else it is -1."""
    states = [Counter((held[0][f], held[1][f]) for held in said.values()) for f in range(len(limits))]

    def believed(fragment: int, version: int, digest: bytes) -> int:
        is_near = version <= limits[fragment] or states[fragment][version, digest] > 1
        return version if is_near else -1

    return {
        name: (tuple(map(believed, range(len(limits)), versions, digests)), digests)
        for name, (versions, digests) in said.items()
    }
