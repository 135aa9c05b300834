"""Scenarios as text: what a room is told, and what it does, in files that are read without Python.

    === A commit that two of three sign stands          a scenario: it starts with a new room
    # A line of comment, for the reader.
    offer b round=1                                     a command: words, and key=value pairs
        weight: 3                                       more keys, one a line, indented
    ----
    b -> a READY                                        what the command says, up to an empty line or a title

Each folder ``tests/scenarios/<room>`` has files of scenarios and a ``room.py`` with a class ``Room``, whose
methods are the commands: words are passed in order, keys by name, all as text. A method returns its lines (a
text, several texts, or None for nothing). A ``RemoteProtocolError`` is said as ``refused: <reason>``.
``pytest --rewrite-scenarios`` writes what is said now into the files; look at the difference before you
commit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from p2p_co2.errors import RemoteProtocolError

FOLDER = Path(__file__).parent
RULE = "----"
TITLE = "=== "


@dataclass
class Step:
    """One command of a scenario; ``source``: its lines as they stand in the file, down to the rule."""

    line: int
    command: str
    words: list[str]
    keys: dict[str, str]
    source: list[str]
    expected: list[str]
    said: list[str] | None = None
    """What the room said; None before it was asked."""


@dataclass
class Scenario:
    """Commands that follow one another in a room of their own."""

    title: str
    path: Path
    steps: list[Step] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}: {self.title}"

    def play(self) -> list[str]:
        """Play it in a new room; where it says other things than the file, in words."""
        room = import_module(f"tests.scenarios.{self.path.parent.name}.room").Room()
        wrong: list[str] = []
        for step in self.steps:
            step.said = said_by(room, step)
            if step.said != step.expected:
                wrong += [f"{self.path}:{step.line}: {step.command}"]
                wrong += [f"  - {line}" for line in step.expected] + [f"  + {line}" for line in step.said]
        return wrong


def said_by(room: object, step: Step) -> list[str]:
    """The lines that a room answers a command with."""
    do: Any = getattr(room, step.command.replace("-", "_"))
    try:
        said: str | Iterable[str] | None = do(*step.words, **step.keys)
    except RemoteProtocolError as error:
        said = f"refused: {error.reason}"
    lines = said.splitlines() if isinstance(said, str) else [*(said or ())]
    assert all(line.strip() for line in lines), f"{step.command} says an empty line, which would end its step"
    return [line.rstrip() for line in lines]


def read(path: Path) -> Iterator[Scenario | Step | str]:
    """A file's scenarios, each before its steps, and the lines between them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        first = at
        at += 1
        if _is_title(line):
            yield Scenario(line.removeprefix(TITLE).strip(), path)
        if _is_title(line) or not line.strip() or line.startswith("#"):
            yield line
            continue
        command, *rest = line.split()
        words = [word for word in rest if "=" not in word]
        keys = dict(word.split("=", 1) for word in rest if "=" in word)
        while at < len(lines) and lines[at].startswith(" "):
            name, _, value = lines[at].partition(":")
            keys[name.strip()] = value.strip()
            at += 1
        source = lines[first:at]
        expected: list[str] = []
        if at < len(lines) and lines[at] == RULE:
            ends = (end for end in range(at, len(lines)) if not lines[end].strip() or _is_title(lines[end]))
            stop = next(ends, len(lines))
            expected = [said.rstrip() for said in lines[at + 1 : stop]]
            at = stop
        yield Step(first + 1, command, words, keys, source, expected)


def _is_title(line: str) -> bool:
    return line.startswith(TITLE)


def scenarios(room: str = "*") -> list[Scenario]:
    """Those of a room, or of all."""
    found: list[Scenario] = []
    for path in sorted(FOLDER.glob(f"{room}/*.txt")):
        for item in read(path):
            if isinstance(item, Scenario):
                found.append(item)
            elif isinstance(item, Step):
                found[-1].steps.append(item)
    return found


def rewrite(path: Path) -> None:
    """Play a file's scenarios, and write what they say into it."""
    played = iter([step for one in scenarios(path.parent.name) if one.path == path for step in _played(one)])
    written: list[str] = []
    is_open = False
    said: list[str] = []
    for item in read(path):
        if isinstance(item, Step):
            said = next(played).said or []
            written += [""] * is_open + item.source + ([RULE, *said] if said else [])
        elif isinstance(item, str):
            written.append(item)
        is_open = isinstance(item, Step) and bool(said)
    path.write_text("\n".join(written) + "\n", encoding="utf-8")


def _played(scenario: Scenario) -> list[Step]:
    scenario.play()
    return scenario.steps
