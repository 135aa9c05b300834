"""What a peer is called: by its owner's word, else by two words of its key. No proof of anything: the key is.

A host's name would tell strangers something of its owner, so it is never taken. Of two peers with one name
the ends of their ids are shown, too. Law: a name is a few printable characters, so that none rewrites a
terminal or turns a line round.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_ADJECTIVES = (
    "able amber bold brave brief bright brisk broad busy calm civil clean clear clever cool coral crisp deep "
    "dry eager early easy even fair fast fine firm fond fresh frank full gentle glad golden good grand green "
    "happy hardy honest humble keen kind large late light lively loyal lucky mellow merry mild modest neat "
    "noble proud quick quiet rapid ready silver sunny swift tidy"
)
_NOUNS = (
    "acorn alder aspen badger beech birch bison brook canyon cedar cliff cloud comet crane creek daisy deer "
    "delta dune eagle elm falcon fern field finch fjord forest fox glacier gull harbour hare hazel heron "
    "hill island ivy lake lark linden lynx maple marsh meadow moon moss oak ocean otter owl pebble pine "
    "plover pond poplar raven reef river robin shore sparrow spruce star willow"
)


@lru_cache(maxsize=8192)
def words_of(peer: str) -> str:
    """The two words of the peer with this id: the same ones everywhere. One in 4096 has the same."""
    drawn = hashlib.sha256(peer.encode(errors="replace")).digest()
    first, second = (of.split()[byte % 64] for of, byte in zip((_ADJECTIVES, _NOUNS), drawn, strict=False))
    return f"{first}-{second}"


def is_name(text: str) -> bool:
    """Whether a peer may be called that. ``~`` stands before the end of an id."""
    return 0 < len(text) <= 32 and text.strip() == text and text.isprintable() and "~" not in text
