"""A run that is over, as files: ``report.html``, one page that needs nothing but a browser, and ``loss.png``.

The page is made from the facts and charts of the board; ECharts' own program (from NiceGUI's wheel) and the
data lie inside the file. It needs the extra ``board``, the picture the extra ``plot``.

Law: data is JSON in a script element that cannot be left, since every "<" is escaped. Text enters the page as
text, and the content policy allows no request to anywhere. Price: 1.2 MB, nearly all of it ECharts.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monitoring import charts
from monitoring.facts import SwarmFacts
from monitoring.feeds import JournalFeed
from monitoring.history import AGREED, MAX_LINES, MEASURES, SWARM, BoardHistory, Happening
from monitoring.model import Model, Recorder
from monitoring.words import as_lines, clock, end_told, plain
from p2p_co2.errors import EnvironmentFault
from p2p_co2.system.extras import missing

Agreed = Sequence[tuple[float, float, float]]
"""(at, tokens, held-out loss) of the agreed parameters, measured outside of the run."""
_ECHARTS = "elements/echart/dist"
_CARDS = (
    ("loss", "Loss over time", "UNIT"), ("over_tokens", "Loss over tokens", "UNIT"),
    ("rounds", "Fragment exchanges", "group size inside, why on hover"),
    ("staleness", "Staleness", "outer steps"),
    ("tokens", "Tokens per second", "all peers together"),
    ("traffic", "Traffic", "kB/s, all peers together"),
)  # fmt: skip
_STYLE = (
    "body{margin:0}pre{overflow-x:auto;font-size:12.5px}"
    ".b-page>.b-card:first-child pre{white-space:pre-wrap}"  # what it came to is words, no table
)
_DRAW = """
const read = id => JSON.parse(document.getElementById(id).textContent);
const url = URL.createObjectURL(new Blob([read('echarts')], {type: 'text/javascript'}));
import(url).then(module => {
  const options = read('options');
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  document.body.classList.toggle('body--dark', dark);
  for (const place of document.querySelectorAll('[data-chart]')) {
    const chart = module.EXPORT.init(place);
    chart.setOption(options[dark ? 'dark' : 'light'][place.dataset.chart]);
    addEventListener('resize', () => chart.resize());
  }
  document.body.dataset.drawn = 'yes';
});
"""


def write_report(folder: Path, summary: str = "", agreed: Agreed = (), whole: Agreed = ()) -> list[str]:
    """Write ``report.html`` and ``loss.png`` of the run whose journals lie in ``folder`` into it.
    ``summary``: it in words; ``whole``: as ``agreed``, on all of the held-out data. Returns a sentence for
    each of the two that an extra is missing for. Raises ``EnvironmentFault`` if they cannot be written or
    there is no such folder."""
    extras = {"report.html": missing("board"), "loss.png": missing("plot")}
    model = Model(JournalFeed(folder))
    history = BoardHistory(None)
    try:
        Recorder(model, history).follow(time.time())
        facts = model.facts()
        span = history.span()
        rows = history.series(SWARM, *span)
        measured = history.series(AGREED, *span)
        blank = dict.fromkeys(MEASURES, math.nan)
        measured, last = (
            sorted([*rows, *((at, *{**blank, "tokens": n, "loss": loss}.values()) for at, n, loss in added)])
            for rows, added in ((measured, agreed), ((), whole))
        )
        if not extras["report.html"]:
            themes = {"light": charts.LIGHT, "dark": charts.DARK}
            marks = history.happenings(charts.MAX_MARKS, kinds=tuple(charts.MARKED))
            options = {theme: _charts(themes[theme], model, rows, measured, last, marks) for theme in themes}
            start = model.view.started_at or 0.0
            happened = reversed(history.happenings(MAX_LINES))
            news = "\n".join(f"{clock(line.at - start):>8}  {line.words}" for line in happened)
            page = _page(facts, options, {"Summary": summary, f"What happened, the newest {MAX_LINES}": news})
            (folder / "report.html").write_text(page, encoding="utf-8")
        if not extras["loss.png"]:
            from monitoring.picture import draw_loss

            draw_loss(folder / "loss.png", facts, rows, measured, last, model.view.staleness)
    except OSError as error:
        raise EnvironmentFault(f"cannot write the report in {folder}: {error.strerror}") from None
    finally:
        history.close()
    return [f"no {name}: it {words}" for name, words in extras.items() if words]


def _charts(
    palette: charts.Palette, model: Model, rows: charts.Series, agreed: charts.Series, whole: charts.Series,
    marks: Sequence[Happening],
) -> dict[str, charts.Options]:  # fmt: skip
    facts = model.facts()
    return {
        "loss": charts.loss(palette, rows, agreed, whole, marks=marks),
        "over_tokens": charts.loss(palette, rows, agreed, whole, over_tokens=True),
        "rounds": charts.rounds(palette, facts.rounds, facts.fragments, len(facts.stages)),
        "staleness": charts.staleness_of(palette, model.view, bool(facts.stages)),
        **{
            name: charts.over_time(palette, rows, lines, title=title, marks=marks)
            for name, (title, _, lines) in charts.TRENDS.items()
        },
    }


def _page(facts: SwarmFacts, options: dict[str, Any], texts: dict[str, str]) -> str:
    title = f"p2p-co2: {plain(facts.run or 'a run', 64)}"
    legend = "".join(
        f'<span><i style="background:{one[0]}"></i>{one[2]}</span>' for one in charts.OUTCOMES.values()
    )
    tall = " tall" if len(facts.stages) * facts.fragments > charts.MAX_LOW_ROWS else ""
    cards = "".join(
        f'<div class="b-card"><div class="b-head"><h2 class="b-title">{name}</h2><span class="b-hint">'
        f"{hint.replace('UNIT', facts.loss_unit)}</span></div>"
        f'{f"""<div class="b-legend">{legend}</div>""" if key == "rounds" else ""}'
        f'<div class="b-chart{tall if key == "rounds" else ""}" data-chart="{key}" role="img" '
        f'aria-label="{name}"></div></div>'
        for key, name, hint in _CARDS
    )
    came_to = {f"Run: {plain(facts.how, 300)}": "\n".join(as_lines(end_told(facts)))}
    body = (
        f'<header class="b-top"><div class="b-bar"><h1 class="b-name">p2p-co2</h1>'
        f'<span class="b-run">{_text(facts.run)} · written {time.strftime("%d %b %Y %H:%M")}</span>'
        '</div><div style="height:10px"></div></header><main class="b-page">'
        f'{_texts(came_to)}<div class="b-two">{cards}</div>{_texts(texts)}'
        '<div class="b-foot">What peers say of themselves is their own word; work is counted from the '
        "certificates of fragment exchanges.</div></main>"
    )
    program, name = _echarts()
    data, blob = (json.dumps(one).replace("<", "\\u003c") for one in (options, program))
    style = importlib.resources.files("monitoring.board") / "style.css"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(title)}</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline' blob:\">"
        f"<style>{style.read_text(encoding='utf-8')}{_STYLE}</style><body>{body}"
        f'<script type="application/json" id=options>{data}</script>'
        f'<script type="application/json" id=echarts>{blob}</script>'
        f"<script>{_DRAW.replace('EXPORT', name)}</script></body></html>"
    )


def _texts(texts: Mapping[str, str]) -> str:
    return "".join(
        f'<div class="b-card"><h2 class="b-title">{_text(title)}</h2>'
        f'<pre tabindex="0" role="region" aria-label="{_text(title)}">{html.escape(words)}</pre></div>'
        for title, words in texts.items()
    )


def _text(text: str, limit: int = 400) -> str:
    return html.escape(plain(text, limit))


def _echarts() -> tuple[str, str]:
    """ECharts as one module, and the name under which it exports itself."""
    folder = importlib.resources.files("nicegui") / _ECHARTS
    index = (folder / "index.js").read_text(encoding="utf-8")
    found = re.search(r'import\{(\w+) as (\w+),[^}]*\}from"\./([\w.-]+)";export\{\2 as echarts', index)
    if found is None:
        raise EnvironmentFault("this version of NiceGUI packs ECharts otherwise; install the pinned one")
    return (folder / found[3]).read_text(encoding="utf-8"), found[1]
