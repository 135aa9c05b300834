"""The twelve words that the board uses, each in a sentence or two, and where they are explained.

``GLOSSARY`` is the list behind the "?" of every page. ``explained`` finds the words of a caption or heading,
for the text that appears when a pointer rests on it.
"""

from __future__ import annotations

import re

GLOSSARY: dict[str, str] = {
    "peer": "A process that trains and exchanges what it learned. Its id is its public key.",
    "seed": "A machine that introduces peers to each other. It never trains and never sees a tensor.",
    "inner step": "One step of a peer's own optimizer, on its own data.",
    "fragment": "A part of the model's parameters. Each is exchanged by itself, at a time of its own.",
    "fragment exchange": "The peers average what they learned for one fragment. It commits, or is aborted "
    "and made up for by the next one.",
    "round": "All fragments exchanged once. The run's clock counts in rounds.",
    "outer step": "The update of the agreed parameters that a committed fragment exchange makes.",
    "agreed parameters": "What all peers hold alike after the last outer step: the model of the run. "
    "A peer's own parameters run ahead of it.",
    "staleness": "How many outer steps old the parameters were from which an outer step's gradient was "
    "measured. 0 is fresh; 1 is by design under the rules co2 and eager.",
    "exposed": "Time in which training stood still for communication. The rest is hidden: training went on.",
    "counted": "Confirmed by the certificates of committed fragment exchanges, which the members signed.",
    "own word": "Said by a peer of itself, in a report that it signed. Nobody else has checked it.",
}
"""By word, what it means."""
_ALSO = {
    "inner step": "inner steps|inner optimizer", "fragment exchange": "fragment exchanges|exchanges?",
    "fragment": "fragments", "round": "rounds|current round", "outer step": "outer steps",
    "peer": "peers", "seed": "seeds", "exposed": "hidden",
    "counted": "share",
}  # fmt: skip
_LONGEST_FIRST = sorted(GLOSSARY, key=len, reverse=True)
_FIND = {
    word: re.compile(rf"\b(?:{word}|{_ALSO[word]})\b" if word in _ALSO else rf"\b{word}\b", re.IGNORECASE)
    for word in _LONGEST_FIRST
}


def explained(caption: str) -> str:
    """The words of ``caption`` that the glossary has, explained; "" if it has none. Of words that lie in each
    other the longest is meant: "fragment exchange" is neither a fragment nor an exchange of another kind."""
    told = {}
    rest = caption
    for word in _LONGEST_FIRST:
        if _FIND[word].search(rest):
            told[word] = f"{word.capitalize()}: {GLOSSARY[word]}"
            rest = _FIND[word].sub(" ", rest)
    told.pop("peer", None)  # every heading says it
    return " ".join(told[word] for word in GLOSSARY if word in told)
