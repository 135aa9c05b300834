"""Stories of a run as text: what peers tell second by second, and what every screen says then.

``tests/testdata/board/*.txt`` has them. A line that begins with ``==`` names a story. Then follow, in any
order:

    run KEY=VALUE ...          settings of the run file, dotted; else rounds of 5 s, 60 of them, two fragments
    me PEER                    the reader's own peer
    feed PHASE ROUND WORDS     how the reader's connection is from now on, and where a seed said the run was
    sighting PEER STATE WORDS  what the reader sees of a peer that does not answer
    TIME PEER ... EVENT KEY=VALUE ...    each peer tells that event; TIME is seconds, or FROM..TO/STEP
    at TIME                    look
    > PATH = VALUE             a fact of that look; ~ contains, !~ does not contain

EVENT is a kind of ``docs/events.md``, with plausible fields where none are given; or ``train`` (progress, and
a committed exchange) or ``sends`` (``made``, ``skipped``). A PATH is a field of ``/api/swarm``, where peers
stand under their names and troubles as words; or ``line``, ``frame``, ``metrics``, ``sinks``, ``summary``,
``verdict``, ``news``, ``own``, ``far``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from monitoring.board.cards import own_told, progress_words
from monitoring.facts import SwarmFacts
from monitoring.metrics import FactsCollector, exposition
from monitoring.model import Model
from monitoring.sinks import figures_of
from monitoring.summary import RunFacts, summarise, verdict
from monitoring.terminal import NEWS_LINES, frame, line
from monitoring.words import news
from p2p_co2.config import RunConfig
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, FeedState, News, Sighting
from tests.event_samples import between, committed, progress, sample, started
from tests.made_swarm import step

START = 1_800_000_000.0
SETTINGS = {"name": "told", "fragments": 2, "clock": {"mode": "time", "round_s": 5.0, "rounds": 60}}
RUN = RunConfig.model_validate(SETTINGS)
SKIPPED = "the round before is still in flight"


class Told(Feed):
    """A feed of what a test tells. Times are seconds since ``START``; peers are called as their ids."""

    place, state = "a test", FeedState("connected")

    def __init__(self, me: str = "", run: RunConfig = RUN) -> None:
        self.run, self.me = run, me
        self.news = News()
        self.model = Model(self)

    def take(self) -> News:
        news, self.news = self.news, News()
        return news

    def at(self, at: float) -> SwarmFacts:
        """Look at that time."""
        step(self.model, START + at)
        return self.model.facts()

    def tell(self, at: float, kind: str, *peers: str, **given: Any) -> None:
        """Each of ``peers`` tells an event of ``kind``; see the module."""
        for peer in peers:
            self.news.events += _events(START + at, peer, kind, len(peers), given)


def _events(at: float, peer: str, kind: str, size: int, given: dict[str, Any]) -> Iterator[ev.Event]:
    since = at - START
    match kind:
        case "train":
            yield from _events(at, peer, "progress", 1, given)
            yield from _events(at, peer, "round_committed", size, {"round": 1 + int(since)})
        case "sends":
            for _ in range(given.get("made", 0)):
                yield sample("fragment_sent", peer, at)
            for _ in range(given.get("skipped", 0)):
                yield sample("send_skipped", peer, at, reason=SKIPPED)
        case "peer_started":
            yield dataclasses.replace(started(peer, at, peer), **given)
        case "progress":
            figures = {"position": since / 5, "tokens": int(10 * since), "exposed_s": 0.0, "up_bytes": 0,
                       "down_bytes": 0, "versions": (1, 1)}  # fmt: skip
            yield dataclasses.replace(progress(peer, at), **figures | given)
        case "stage_progress":
            yield dataclasses.replace(between(peer, at, given["stage"]), **given)
        case "round_committed":
            made = committed(peer, 1, contributors=given.get("group_size", size), duration_s=0.5)
            yield dataclasses.replace(made, at=at, coordinator=peer, partial=0,
                                      **{"group_size": size} | given)  # fmt: skip
        case _:
            yield sample(kind, peer, at, **given)


def drawn(renderable: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(renderable)
    return console.export_text()


def _value(word: str) -> Any:
    with suppress(ValueError):
        value = json.loads(word)
        return tuple(value) if isinstance(value, list) else value
    return word


class Story:
    """One story, told line by line; ``AssertionError`` names the line that does not hold."""

    def __init__(self) -> None:
        self.told = Told()
        self._shown: dict[str, Callable[[], Any]] = {}

    def tell(self, line_: str) -> None:
        if line_.startswith(">"):
            path, operator, *wanted = line_.removeprefix(">").split(None, 2)
            self._check(path, operator, "".join(wanted))
            return
        match shlex.split(line_):
            case ["run", *settings]:
                table = json.loads(json.dumps(SETTINGS))
                for key, _, value in (setting.partition("=") for setting in settings):
                    *sections, name = key.split(".")
                    place = table
                    for section in sections:
                        place = place.setdefault(section, {})
                    place[name] = _value(value)
                self.told = Told(self.told.me, RunConfig.model_validate(table))
            case ["me", peer]:
                self.told = Told(peer, self.told.run or RUN)
            case ["feed", phase, position, *words]:
                self.told.state = FeedState(phase, " ".join(words), float(position))
            case ["sighting", peer, state, *words]:
                self.told.news.sightings.append(Sighting(peer, state, " ".join(words)))
            case ["at", at]:
                self._look(float(at))
            case [when, *words]:
                given = {key: _value(value) for key, equals, value in
                         (word.partition("=") for word in words) if equals}  # fmt: skip
                *peers, kind = [word for word in words if "=" not in word]
                for at in _times(when):
                    self.told.tell(at, kind, *peers, **given)

    def _look(self, at: float) -> None:
        facts = self.told.at(at)
        view = self.told.model.view
        run = self.told.run or RUN
        fields = facts.model_dump()
        fields["peers"] = {peer.label: peer.model_dump() for peer in facts.peers}
        fields["troubles"] = [trouble.words for trouble in facts.troubles]
        summary = summarise(view, RunFacts(config=run, expected_peers=2))
        self._shown = {
            **{name: lambda value=value: value for name, value in fields.items()},
            "line": lambda: line(facts),
            "frame": lambda: drawn(frame(facts, 120, 48, news=news(view, NEWS_LINES))),
            "metrics": lambda: exposition(FactsCollector(lambda: facts)).decode(),
            "sinks": lambda: figures_of(facts),
            "summary": lambda: summary,
            "verdict": lambda: verdict(summary),
            "news": lambda: [words for _, words in news(view, 99)],
            "own": lambda: own_told(facts, 80.0),
            "far": lambda: progress_words(facts),
        }

    def _check(self, path: str, operator: str, wanted: str) -> None:
        name, *keys = path.split(".")
        found = self._shown[name]()
        for key in keys:
            found = found[int(key)] if isinstance(found, list | tuple) else found[key]
        if operator == "=":
            value = wanted if isinstance(found, str) else _value(wanted)
            if isinstance(value, float) and found is not None:
                value = pytest.approx(value, rel=1e-3)
            found = tuple(found) if isinstance(found, list) else found
            assert found == value, f"{path} is {found!r}"
        else:
            assert (wanted in str(found)) == (operator == "~"), f"{path} is {found}"


def _times(when: str) -> Iterator[float]:
    first, _, rest = when.partition("..")
    last, _, every = rest.partition("/")
    at = float(first)
    while at <= float(last or first):
        yield at
        at += float(every or 1)


def stories(folder: Path) -> dict[str, list[str]]:
    """The lines of each story of a folder by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.txt")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line_ = text.strip()
            if line_.startswith("=="):
                name = f"{path.stem}: {line_.removeprefix('==').strip()}"
                assert name not in found
                found[name] = []
            elif line_ and not line_.startswith("#"):
                found[name].append(line_)
    return found
