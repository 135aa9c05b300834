"""``report.html``: a run on one page that needs nothing but a browser, neither server nor internet.

Made from the same facts and charts as the board; ECharts' own program (from NiceGUI's wheel) and the data lie
inside the file. Law: data is JSON in a script element that cannot be left (every "<" is escaped), text enters
the page as text, and the content policy allows no request to anywhere. Price: 1.2 MB, nearly all of it
ECharts.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from monitoring import charts
from monitoring.facts import PeerFacts, SwarmFacts
from monitoring.feeds import JournalFeed
from monitoring.history import SWARM, Batch, History
from monitoring.model import Model, Recorder
from monitoring.words import UNKNOWN, clock, date, figure, percent, plain, size
from p2p_co2.errors import EnvironmentFault

MAX_LINES = 200
_ECHARTS = "elements/echart/dist"
_CARDS = (
    ("loss", "Loss over time", "UNIT", ""), ("tokens", "Loss over tokens", "UNIT", ""),
    ("rounds", "Rounds", "group size inside, why on hover", "wide"),
    ("staleness", "Staleness", "outer steps", ""), ("speed", "Tokens per second", "all peers together", ""),
    ("links", "Links", "row sends to column: Mbit/s, below it the round trip in ms; R: relayed", ""),
    ("hidden", "Hidden and exposed communication",
     "seconds: behind training, and with training standing still", ""),
    ("traffic", "Traffic", "kB/s, all peers together", "wide"),
)  # fmt: skip
_STYLE = (
    "body{margin:0}.b-table{border-collapse:collapse;width:100%;font-size:13px;margin-top:8px}"
    ".b-table th{color:var(--soft);text-align:left;font-weight:600}"
    ".b-table td,.b-table th{padding:6px 10px 6px 0;border-top:1px solid var(--line);white-space:nowrap}"
    "summary{cursor:pointer}"
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


def write_report(folder: Path, target: Path, agreed: Sequence[tuple[float, float, float]] = ()) -> None:
    """Write the report of the run whose journals lie in ``folder``. ``agreed``: (at, tokens, held-out loss)
    of the agreed parameters that were measured outside of the run. Raises ``EnvironmentFault`` if ``target``
    cannot be written or there is no such folder."""
    model, history = Model(JournalFeed(folder)), History(None)
    try:
        Recorder(model, history).follow(time.time())
        history.write(Batch(at=model.now, agreed=agreed))
        page = _page(model, history, _at_the_end(model.facts(), agreed))
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"cannot write the report {target}: {error.strerror}") from None
    finally:
        history.close()


def _at_the_end(facts: SwarmFacts, agreed: Sequence[tuple[float, float, float]]) -> SwarmFacts:
    """The facts with the newest held-out loss, whoever measured it."""
    at, _, loss = max(agreed, default=(-math.inf, 0.0, 0.0))
    if at <= (facts.loss_agreed_at or 0.0):
        return facts
    headline = {"loss": loss, "loss_kind": "held-out"}
    return facts.model_copy(update={"loss_agreed": loss, "loss_agreed_at": at, **headline})


def _page(model: Model, history: History, facts: SwarmFacts) -> str:
    title = f"p2p-co2: {plain(facts.run or 'a run', 64)}"
    options = {
        theme: _options(model, history, facts, palette)
        for theme, palette in (("light", charts.LIGHT), ("dark", charts.DARK))
    }
    body = "".join((
        f'<header class="b-top"><div class="b-bar"><span class="b-name">p2p-co2</span>'
        f'<span class="b-run">{_text(facts.run)} · written {time.strftime("%d %b %Y %H:%M")}</span>'
        '</div><div style="height:10px"></div></header><main class="b-page">',
        _tiles(facts), _troubles(facts), _charts(facts.loss_unit), _peer_table(facts.peers),
        _happenings(history, model.view.started_at or 0.0),
        '<div class="b-foot">What peers say of themselves is their own word; work is counted from the '
        "group's signed decisions.</div></main>",
    ))  # fmt: skip
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


def _options(model: Model, history: History, facts: SwarmFacts, palette: charts.Palette) -> dict[str, Any]:
    rows, agreed = history.series(SWARM, *history.span()), history.agreed()
    return {
        "loss": charts.loss(palette, rows, agreed, over_tokens=False),
        "tokens": charts.loss(palette, rows, agreed, over_tokens=True),
        "speed": charts.over_time(palette, rows, {"tokens/s": ("tokens_per_s", charts.GREEN, 1.0)}),
        "traffic": charts.over_time(palette, rows, charts.TRAFFIC),
        "rounds": charts.rounds(palette, facts.rounds, facts.fragments),
        "staleness": charts.staleness(palette, model.view.fragment_staleness),
        "links": charts.link_matrix(palette, facts.peers),
        "hidden": charts.hidden_and_exposed(palette, facts.peers),
    }


def _charts(unit: str) -> str:
    colours = [
        f'<span><i style="background:{one[0]}"></i>{one[2]}</span>' for one in charts.OUTCOMES.values()
    ]
    legend = f'<div class="b-legend">{"".join(colours)}</div>'
    cards = [
        f'<div class="b-card" style="{"grid-column:1/-1" if wide else ""}"><div class="b-head">'
        f'<span class="b-title">{title}</span><span class="b-hint">{hint.replace("UNIT", unit)}</span></div>'
        f'{legend if name == "rounds" else ""}<div class="b-chart" data-chart="{name}"></div></div>'
        for name, title, hint, wide in _CARDS
    ]
    return f'<div class="b-two">{"".join(cards)}</div>'


def _tiles(facts: SwarmFacts) -> str:
    kind = "held-out, agreed parameters" if facts.loss_kind == "held-out" else "training, mean of peers"
    alone = f"{facts.rounds_alone} alone, " if facts.rounds_alone else ""
    tiles = (
        ("Loss", figure(facts.loss, 3), facts.loss_unit.replace(" per ", "/"), kind),
        ("Peers", figure(facts.peers_known), "", f"{facts.peers_online} online at the end"),
        ("Rounds committed", figure(facts.rounds_committed), "", f"{alone}{facts.rounds_aborted} aborted"),
        ("Tokens trained", figure(facts.tokens), "", f"{figure(facts.tokens_counted)} counted by the group"),
        ("Mean staleness", figure(facts.staleness_mean, 2), "outer steps", "0: within its own round"),
        ("Send to apply", figure(facts.sync_delay_steps_mean, 1), "inner steps", "mean"),
        ("Sent", size(facts.up_bytes), "", "all peers"),
        ("Parameters", figure(facts.parameters), "", f"in {facts.fragments} fragments"),
    )
    cells = [
        f'<div class="b-tile"><div class="b-cap">{caption}</div><div class="b-num">{_text(number)}'
        f'<span class="b-unit">{unit}</span></div><div class="b-sub">{_text(sub)}</div></div>'
        for caption, number, unit, sub in tiles
    ]
    return f'<div class="b-tiles four">{"".join(cells)}</div>'


def _troubles(facts: SwarmFacts) -> str:
    rows = [
        f'<div class="b-row {trouble.severity}"><span class="b-words">{_text(trouble.words)}</span></div>'
        for trouble in facts.troubles
    ]
    inside = "".join(rows) or '<div class="b-fine">Nothing was wrong at the end.</div>'
    return f'<div class="b-card"><div class="b-title">What was wrong at the end</div>{inside}</div>'


def _peer_table(peers: Sequence[PeerFacts]) -> str:
    heads = ("peer", "state", "device", "tokens (own word)", "share (counted)", "loss", "staleness", "used",
             "sent", "exposed", "why it left")  # fmt: skip
    rows = [
        (
            plain(peer.label, 40), peer.state, plain(peer.device, 20), figure(peer.tokens),
            percent(peer.share_counted), figure(peer.loss, 3), figure(peer.staleness_mean, 2),
            percent(peer.utilisation), size(peer.up_bytes), f"{figure(peer.exposed_s, 1)} s",
            plain(peer.reason, 90) or UNKNOWN,
        )
        for peer in peers
    ]  # fmt: skip

    def cells(tag: str, texts: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(text)}</{tag}>" for text in texts) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        '<div class="b-card"><div class="b-title">Peers</div><div style="overflow-x:auto"><table '
        f'class="b-table"><thead>{cells("th", heads)}</thead><tbody>{body}</tbody></table></div></div>'
    )


def _happenings(history: History, start: float) -> str:
    found = history.happenings(MAX_LINES)
    rows = [
        f'<div class="b-line"><span class="b-when">{clock(line.at - start)}</span>'
        f'<span class="b-kind">{_text(line.kind.replace("_", " "))}</span>'
        f'<span class="b-words">{_text(line.words)}</span></div>'
        for line in reversed(found)
    ]
    newest = f"the newest {MAX_LINES}, " if len(found) == MAX_LINES else ""
    return (
        '<details class="b-card"><summary class="b-title">What happened '
        f'<span class="b-hint">{newest}from {date(start)} on</span></summary>{"".join(rows)}</details>'
    )


def _text(text: str) -> str:
    return html.escape(plain(text, 400))


def _echarts() -> tuple[str, str]:
    """ECharts as one module, and the name under which it exports itself."""
    folder = importlib.resources.files("nicegui") / _ECHARTS
    index = (folder / "index.js").read_text(encoding="utf-8")
    found = re.search(r'import\{(\w+) as (\w+),[^}]*\}from"\./([\w.-]+)";export\{\2 as echarts', index)
    if found is None:
        raise EnvironmentFault("this version of NiceGUI packs ECharts otherwise; install the pinned one")
    return (folder / found[3]).read_text(encoding="utf-8"), found[1]
