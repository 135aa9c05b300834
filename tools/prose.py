"""How long the sentences of a page are, as somebody would read it aloud.

python -m tools.prose                    the share of long ones, by page
python -m tools.prose docs/security.md   and which they are
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 25
_ENDS = re.compile(r"(?<=[.!?])[\"')*_]*\s+")


def sentences(markdown: str) -> list[str]:
    """The sentences of a page, without code blocks, pictures, and the marks of Markdown. A heading, an item,
    a row's cell and what stands before a block each end a sentence."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2[^\n]*$", "\n\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(
        r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)|^ {4,}\S[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\|[-| :]+\|$", "", text, flags=re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |#|\|))", text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            words = " ".join(re.sub(r"^\s*(?:[-*] |\d+\. |#+ )", "", cell).split())
            found += [sentence for sentence in _ENDS.split(words) if sentence]
    return found


def words_of(sentence: str) -> int:
    """Its words: what has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def long_ones(markdown: str) -> list[str]:
    return [sentence for sentence in sentences(markdown) if words_of(sentence) > MOST_WORDS]


def main(names: list[str]) -> int:
    paths = [Path(name) for name in names] or sorted((ROOT / "docs").rglob("*.md"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        long, every = long_ones(text), sentences(text)
        print(f"{len(long) / max(1, len(every)):6.1%} of {len(every):4} sentences: {path}")
        if names:
            print("\n".join(f"  {words_of(one)}: {one}" for one in long))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
