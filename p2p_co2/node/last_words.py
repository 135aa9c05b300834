"""What others said last of the states that they hold, those who have gone among them.

At a run's end peers leave when all that they hear is done, or when their time is up. Who is still there goes
on knowing where they were: what this peer lacks is lacking whoever is left, a state that many left with is no
invention of the one who is left with it, and who holds it does not give it up for an older one.

Law: it is kept only while this peer is done with its training, of ``WORDS_KEPT`` peers and cells at most, and
only what honest peers can have held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS

WORDS_KEPT = 2 * MAX_PEERS

Held = tuple[tuple[int, ...], tuple[bytes, ...]]
"""Per fragment, a version and its digest."""


class LastWords:
    def __init__(self) -> None:
        self._words: dict[PeerId | int, Held] = {}
        """By peer, or by cell, the one that is heard last at the end."""
        self._here: frozenset[PeerId | int] = frozenset()

    def clear(self) -> None:
        """Nothing was said yet."""
        self._words, self._here = {}, frozenset()

    def note(self, heard: Mapping[PeerId | int, Held | None], is_too_far: Callable[[int, int], bool]) -> None:
        """These are here, and say so; None: nothing that counts. Of a fragment of which nobody can be where
        they say they are, it is as if they had said nothing."""
        words = {name: word for name, word in self._words.items() if name not in heard}
        words |= {name: _believed(held, is_too_far) for name, held in heard.items() if held is not None}
        while len(words) > WORDS_KEPT:
            del words[next(iter(words))]
        self._words, self._here = words, frozenset(heard)  # other threads look at those that are there

    def newest(self, fragment: int) -> int:
        """The newest version that anybody held; -1 if none is known."""
        words = self._words.values()
        return max((versions[fragment] for versions, _ in words if fragment < len(versions)), default=-1)

    def gone_with(self, fragment: int, version: int) -> list[tuple[int, bytes]]:
        """The states of ``version`` and later that those held who have gone."""
        return [
            (versions[fragment], digests[fragment])
            for name, (versions, digests) in self._words.items()
            if name not in self._here and fragment < len(versions) and versions[fragment] >= version
        ]


def _believed(held: Held, is_too_far: Callable[[int, int], bool]) -> Held:
    versions, digests = held
    if not any(is_too_far(fragment, version) for fragment, version in enumerate(versions)):
        return held
    kept = [-1 if is_too_far(fragment, version) else version for fragment, version in enumerate(versions)]
    return tuple(kept), digests
