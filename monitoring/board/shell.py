"""What all pages share: the frame with its navigation, tiles, cards, charts, tables, and the states of having
nothing to show.

Law: every text that may come from a peer is an element's text or a table's cell, which the browser never
reads as markup. An element is sent again only when what it shows has changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from monitoring.charts import (
    BLUE,
    DARK,
    LIGHT,
    MARKED,
    MAX_MARKS,
    TRENDS,
    ChartLook,
    Options,
    Palette,
    over_time,
    scale_end,
)
from monitoring.columns import Column
from monitoring.facts import SwarmFacts
from monitoring.glossary import GLOSSARY, explained
from monitoring.history import TIERS, Happening
from monitoring.model import Model, Recorder
from monitoring.words import UNKNOWN, clock, plain

PAGES = (("/", "Swarm"), ("/run", "Run"), ("/staleness", "Staleness"), ("/bandwidth", "Bandwidth"),
         ("/peers", "Peers"), ("/events", "Events"))  # fmt: skip
TICK_S = 1.0
"""A board looks for news, and an open page follows it."""
CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_STATES = {"connected": "live", "connecting": "connecting", "lost": "out of reach", "ended": "run is over"}
_SMOOTH = {"as measured": 0.0, "smooth": 0.8, "smoother": 0.95}
_AXES = {"linear": False, "log": True}
_RANGES = {"10 min": 600.0, "1 h": 3600.0, "1 day": 86400.0, "all": None}
_NOTHING = {
    "connecting": ("Looking for the swarm", "This takes some seconds, longer from behind NAT."),
    "empty": ("Nobody is training right now", "The run exists. As soon as a peer joins, it appears here."),
    "lost": (
        "The swarm is out of reach",
        "It is tried again every few seconds. If it stays so, the run is over or its seed is down: ask its "
        "organiser.",
    ),
    "ended": ("Nothing was written", "The journals of this folder hold no event."),
    "over": ("The run is over", "Its peers had left before this board looked."),
    "wrong": ("No such page", "This address leads nowhere on this board. Its pages are named above."),
}
"""The page while there is no peer to show, or at a wrong address."""


Told = dict[str, tuple[str, str, str, str]]
"""What tiles say, by test id: caption, number (it may bring its unit: "12 kB"), unit, line below."""
_HEADING = '<q-th :props="props" :title="props.col.title || null">{{ props.col.label }}</q-th>'
_LINK = """
<q-td :props="props"><a v-if="props.row.to" :href="props.row.to" class="b-link">{{ props.value }}</a>
<span v-else :title="props.row.title || null" :class="props.row.title && 'b-tap'">{{ props.value }}</span>
</q-td>
"""
"""Of a table's first column: a row's address can be reached by keyboard too."""
_OF = '<span class="b-of" :title="props.col.title || null">{{ props.col.label }}</span>'
"""The heading of a cell, where a phone shows each row as lines."""
_CELL = f'<q-td :props="props">{_OF}{{{{ props.value }}}}</q-td>'
_BAR = f"""
<q-td :props="props">{_OF}{{{{ props.value }}}}<div class="b-bar-of b-slim">
<div class="b-bar-done" :style="{{width: props.row.bar + '%'}}"></div></div></q-td>
"""
_TELL = """
document.addEventListener('click', event => {
  const told = document.querySelector('.b-told');
  const asked = matchMedia('(hover: none)').matches && event.target.closest('[title]');
  if (told) told.innerText = asked ? asked.title : '';
});
"""
"""Where no pointer can rest on a word, a tap explains it, until the next."""


class Page:
    """A page's body: built once there is something to show. ``refresh`` follows once a second, ``redraw``
    when charts and tables are due, or the colours changed."""

    def __init__(self, frame: Frame, told: Callable[[SwarmFacts], Told] = lambda facts: {}) -> None:
        self.frame = frame
        self._told = told
        self._tiles = Tiles(told(frame.model.facts()))

    def refresh(self, facts: SwarmFacts) -> None:
        """Bring tiles and lines up to date."""
        self._tiles.set(self._told(facts))

    def redraw(self, facts: SwarmFacts) -> None:
        """Bring charts and tables up to date."""


# ---- what pages are made of


def text(classes: str, words: str = "", test_id: str = "", tag: str = "div") -> TextElement:
    """A line of text; NiceGUI sends it again when it changes."""
    made = TextElement(tag=tag, text=words).classes(classes)
    return made.props(f"data-testid={test_id}") if test_id else made


def caption(classes: str, words: str, tag: str = "div") -> TextElement:
    """A line of text whose words of the glossary are explained where the pointer rests on it."""
    made = text(classes, words, tag=tag)
    if told := explained(words):
        made.classes("b-asked").props["title"] = told
    return made


def block(classes: str, kind: str = "div") -> Element:
    """An HTML element; use as a context."""
    return ui.element(kind).classes(classes)


class Tiles:
    """Rows of four figures, or one of five, each with caption, unit and a line below."""

    def __init__(self, told: Told) -> None:
        self._lines: dict[str, tuple[TextElement, TextElement, TextElement]] = {}
        with block(f"b-tiles {'five' if len(told) == 5 else 'four'}") if told else contextlib.nullcontext():
            for test_id, (words, *_) in told.items():
                with block("b-tile"):
                    caption("b-cap", words)
                    with block("b-num"):
                        with ui.element("span").props(f"data-testid={test_id}"):
                            number = text("b-inline")
                        unit = text("b-unit b-inline")
                    self._lines[test_id] = number, unit, text("b-sub", test_id=f"{test_id}-sub")

    def set(self, told: Told) -> None:
        for test_id, (_, figure, unit, sub) in told.items():
            number, _, own = figure.partition(" ")
            texts = (number, "" if number == UNKNOWN else unit or own, sub)
            for label, words in zip(self._lines[test_id], texts, strict=True):
                label.text = words


class Chart:
    """An ECharts chart whose options are replaced as a whole, and only when they differ. ``title``: what it
    shows, until its own sentence says more."""

    def __init__(
        self, test_id: str, title: str, kind: str = "", on_click: Callable[[Any], None] | None = None
    ) -> None:
        self._chart = ui.echart({}, on_point_click=on_click).classes(f"b-chart {kind}")
        self._chart.props(f"data-testid={test_id} role=img").props["aria-label"] = title
        self._made: Options = {}

    def set(self, options: Options) -> None:
        if options != self._made:
            self._made = options
            self._chart.options.clear()
            self._chart.options.update(options)


class Trends:
    """What the swarm, or a peer, did over time: a small chart for each of ``charts.TRENDS``."""

    def __init__(self, test_id: str) -> None:
        self._charts: dict[str, Chart] = {}
        with block("b-three"):
            for name, (title, unit, _) in TRENDS.items():
                with card(title, unit):
                    self._charts[name] = Chart(f"{test_id}-{name}", title, "low")

    def set(self, frame: Frame, rows: Sequence[tuple[float, ...]]) -> None:
        marks = frame.marks()
        for name, (title, _, lines) in TRENDS.items():
            made = over_time(frame.palette, rows, lines, title=title, look=frame.look, marks=marks)
            self._charts[name].set(made)


class BoardTable:
    """A table that is sorted, cut into pages and searched in the browser, and sent when its rows differ.

    ``rows_a_page``: 0 for all. ``to``: the address that a click on a row, or the link in its first cell,
    opens, or "". ``search``: with a field for what rows must contain, in the first line of the card that the
    table stands in. ``on_phone``: headings of the columns that a phone shows. If there are none it shows all
    of them, each row as lines. ``is_mine``: which rows are tinted. ``explain``: a row's first cell. ``bars``:
    the heading of the column that has bars, and of which the largest come first."""

    def __init__(
        self, test_id: str, columns: Sequence[Column], rows_a_page: int = 25,
        to: Callable[[Any], str] = lambda row: "", search: bool = False,
        on_phone: Sequence[str] = (), is_mine: Callable[[Any], bool] = lambda row: False,
        explain: Callable[[Any], str] = lambda row: "", bars: str = "",
    ) -> None:  # fmt: skip
        self._columns = columns
        self._to = to
        self._is_mine = is_mine
        self._explain = explain
        self._bars = next((str(place) for place, one in enumerate(columns) if one.heading == bars), "")
        made = [
            {"name": str(place), "label": one.heading, "field": str(place), "sortable": True,
             "align": "left" if one.unit.decimals < 0 else "right",
             ":format": _shown_with(max(0, one.unit.decimals)), "title": explained(one.heading),
             **({"classes": "b-wide", "headerClasses": "b-wide"}
                if on_phone and one.heading not in on_phone else {})}
            for place, one in enumerate(columns)
        ]  # fmt: skip
        shown = {"rowsPerPage": rows_a_page, "sortBy": self._bars or None, "descending": bool(self._bars)}
        self._table = ui.table(columns=made, rows=[], row_key="key", pagination=shown)
        if not on_phone:
            self._table.classes("b-stack")
        self._table.props[":rows-per-page-options"] = f"[{rows_a_page}]"
        self._table.props(f'dense flat no-data-label="Nothing yet" data-testid={test_id}')
        self._table.props[":table-row-class-fn"] = "row => row.mine ? 'b-mine' : row.to ? 'b-leads' : ''"
        self._table.add_slot("header-cell", _HEADING)
        self._table.add_slot("body-cell", _CELL)
        self._table.add_slot("body-cell-0", _LINK)
        if self._bars:
            self._table.add_slot(f"body-cell-{self._bars}", _BAR)
        if search:
            with ui.context.slot.parent.default_slot.children[0]:
                block("b-grow")
                field = ui.input(placeholder="search").props("dense outlined clearable data-testid=search")
                field.props["aria-label"] = "search in this table"
            self._table.bind_filter_from(field, "value")
        self._table.on("rowClick", self._open)

    def _open(self, click: Any) -> None:
        if place := click.args[1]["to"]:
            ui.navigate.to(place)

    def set(self, told: Iterable[Any]) -> None:
        rows = [
            {
                "key": key,
                "to": self._to(one),
                "mine": self._is_mine(one),
                "title": self._explain(one),
                **{str(place): column.number(one) for place, column in enumerate(self._columns)},
            }
            for key, one in enumerate(told)
        ]
        end = scale_end(row.get(self._bars) or 0.0 for row in rows)
        for row in rows if self._bars else ():
            row["bar"] = round(100 * min(1.0, max(0.0, row[self._bars] or 0.0) / end))
        if rows != self._table.rows:
            self._table.rows = rows


def _shown_with(decimals: int) -> str:
    """How a cell becomes text, in the browser: there it is also sorted by."""
    digits = f"{{minimumFractionDigits: {decimals}, maximumFractionDigits: {decimals}}}"
    return (
        "value => value === null || value === undefined ? '-' : typeof value === 'number' "
        f"? value.toLocaleString('en-US', {digits}) : value"
    )


def card(title: str, hint: str = "", controls: Callable[[], None] = lambda: None) -> Element:
    """A titled panel; use as a context. ``controls`` adds to the line with the title."""
    with block("b-card", "section") as panel, block("b-head"):
        caption("b-title", title, "h2")
        if hint:
            caption("b-hint", hint)
        controls()
    return panel


def _glossary() -> Element:
    """The words of the board, in a window of the browser's own that ``_SHOW_WORDS`` opens."""
    with block("b-words-shown", "dialog").props("aria-label=Words data-testid=words") as made:
        with ui.element("form").props("method=dialog").classes("b-head"):
            text("b-title", f"{len(GLOSSARY)} words", tag="h2")
            block("b-grow")
            text("b-button", "Close", tag="button")
        with block("", "dl"):
            for word, means in GLOSSARY.items():
                text("", word, tag="dt")
                text("", means, tag="dd")
    return made


_SHOW_WORDS = "() => document.querySelector('dialog.b-words-shown').showModal()"


class _Header:
    """Which run this is, how it is reached, the pages."""

    def __init__(self, here: str, on_dark: Callable[[], None]) -> None:
        self._phase = ""
        with block("b-top", "header"):
            with block("b-bar"):
                text("b-name", "p2p-co2")
                self._run = text("b-run", test_id="run")
                block("b-grow")
                with block("b-state", "span"):
                    self._dot = block("b-dot", "span")
                    self._state = text("", test_id="state")
                words = text("b-button", "?", "ask", tag="button").props('aria-label="what the words mean"')
                words.on("click", js_handler=_SHOW_WORDS)
                toggle = ui.button(icon="contrast", on_click=on_dark, color=None)
                toggle.props('flat dense round size=sm aria-label="light or dark" data-testid=dark')
            with block("b-nav", "nav").props("aria-label=Pages"):
                for path, name in PAGES:
                    link = ui.link(name, path).classes("here" if path == here else "")
                    if path == here:
                        link.props("aria-current=page")
        _glossary()

    def set(self, facts: SwarmFacts) -> None:
        where = f"{plain(facts.run, 64)}  ·  " if facts.run else ""
        self._run.text = f"{where}{plain(facts.place, 120)}"
        self._state.text = _STATES.get(facts.connection, facts.connection)
        if facts.connection != self._phase:
            self._dot.classes(remove=self._phase, add=facts.connection)
            self._phase = facts.connection


class Frame:
    """One browser's view: header, banner, and the page's body or what stands in its place. Pages read
    ``model``, ``history``, ``palette`` and ``look``. ``here``: one of ``PAGES``, or "" for none of them."""

    def __init__(self, model: Model, recorder: Recorder, here: str, make: Callable[[Frame], Page]) -> None:
        self.model = model
        self.history = recorder.history
        self.palette: Palette = LIGHT
        self.look = ChartLook()
        self._recorder = recorder
        self._range_s: float | None = None
        self._make = make
        self._here = here
        self._page: Page | None = None
        self._drawn_at = 0.0
        ui.add_css(CSS)
        ui.add_head_html(f"<script>{_TELL}</script>")
        ui.colors(primary=BLUE)
        self._dark = ui.dark_mode(None)
        self._header = _Header(here, self._toggle_dark)
        with block("b-page"):  # Quasar puts it into the main landmark
            text("b-hidden", dict(PAGES).get(here, "p2p-co2"), tag="h1")
            self._banner = text("b-banner", test_id="banner")
            self._body = ui.element("div").style("display:contents")
        text("b-told", test_id="told").props("role=status")
        self._instead = ""
        self.tick()
        ui.timer(TICK_S, self.tick)
        ui.timer(0.1, self._learn_colours, once=True)

    def tick(self) -> None:
        """Bring the page up to date."""
        self.model.feed.watched(time.monotonic())
        facts = self.model.facts()
        self._header.set(facts)
        self._set_banner(facts)
        if not self._here:
            self._show_nothing("wrong", "")
            return
        # Who is alone needs the invitation most.
        if facts.nothing and (self._here != "/run" or self.model.known.run is None):
            self._show_nothing("empty" if facts.nothing == "connected" else facts.nothing, facts.how)
            return
        if self._page is None:
            self._instead = ""
            self._body.clear()
            with self._body:
                self._page = self._make(self)
            self._drawn_at = 0.0
        self._page.refresh(facts)
        if time.monotonic() - self._drawn_at >= TIERS[0][0]:  # as often as the history has new samples
            self._drawn_at = time.monotonic()
            self._page.redraw(facts)

    def span(self, facts: SwarmFacts) -> tuple[float, float]:
        """From when to when charts over time reach, unix seconds."""
        first, last = self.history.span()
        until = max(last, facts.at if facts.connection != "ended" else last)
        return first if self._range_s is None else max(first, until - self._range_s), until

    def marks(self) -> list[Happening]:
        """Who came and went, newest first."""
        return self.history.happenings(MAX_MARKS, kinds=tuple(MARKED))

    def range_choice(self) -> None:
        """Buttons for how smooth charts over time are drawn, and how far back they reach."""

        def choose(range_s: float | None) -> None:
            self._range_s = range_s

        block("b-grow")
        self.choice("how smooth lines are", _SMOOTH, lambda smooth: self._look_on(smooth=smooth))
        self.choice("how far back", _RANGES, choose, "all")

    def axis_choice(self) -> None:
        """Buttons for whether losses are drawn over a logarithmic axis."""
        self.choice("axis of the loss", _AXES, lambda log: self._look_on(log=log))

    def choice(
        self, of: str, values: Mapping[str, Any], choose: Callable[[Any], None], chosen: str = ""
    ) -> None:
        """Buttons of which one is pressed; charts follow. ``of``: what they choose; ``chosen``: at first, the
        first if ""."""

        def pressed(chosen: Any) -> None:
            choose(values[str(chosen.value)])
            self._drawn_at = 0.0

        made = ui.toggle(list(values), value=chosen or next(iter(values)), on_change=pressed)
        made.props("dense unelevated no-caps size=sm toggle-color=primary").props["aria-label"] = of

    def _look_on(self, **changed: Any) -> None:
        self.look = self.look._replace(**changed)

    def _set_banner(self, facts: SwarmFacts) -> None:
        said = plain(self._recorder.trouble, 300)
        if facts.connection == "lost" and facts.peers_known:
            newest = max((peer.last_seen_at or 0.0 for peer in facts.peers), default=facts.at)
            old = f"what is shown is {clock(max(0.0, facts.at - newest))} old"
            said = f"The swarm is out of reach, {old}. {plain(facts.connection_words, 300)}"
        said = said or ". ".join(stage.trouble.capitalize() for stage in facts.stages if stage.is_empty)
        self._banner.text = said
        self._banner.visible = bool(said)

    def _show_nothing(self, kind: str, how: str) -> None:
        """Say why there is no swarm to show, or no page."""
        if self._instead == kind + how:
            return
        self._instead = kind + how
        self._page = None
        self._body.clear()
        big, small = _NOTHING.get(kind, ("Nothing to show", ""))
        with self._body, block("b-empty").props(f"data-testid=nothing-{kind}"):
            block("b-pulse" if kind == "connecting" else "b-ring")
            text("b-big", big, tag="h2")
            text("b-sub", small)
            text("b-sub", plain(how, 400)).style("margin-top:10px")

    def _toggle_dark(self) -> None:
        self._dark.value = self.palette is not DARK
        self._use(bool(self._dark.value))

    async def _learn_colours(self) -> None:
        """Ask the browser whether it is dark: charts are drawn, so they have to be told."""
        try:
            await ui.context.client.connected()
            dark = await ui.run_javascript("Quasar.Dark.isActive", timeout=30 * TICK_S)  # it may be busy
        except TimeoutError:
            return  # it has gone again, or is too busy to say: light colours can be read on both
        self._use(bool(dark))

    def _use(self, dark: bool) -> None:
        self.palette = DARK if dark else LIGHT
        self._drawn_at = 0.0
        self.tick()
