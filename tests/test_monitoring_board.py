"""monitoring's facts, troubles, charts, metrics, sinks and terminal view, on swarms that were made up."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from monitoring import charts
from monitoring.board.server import Activity, Guard, place_for, swarm_schema
from monitoring.event_docs import event_docs
from monitoring.facts import SwarmFacts
from monitoring.history import SWARM, History
from monitoring.journals import JournalFeed
from monitoring.metrics import MAX_PEERS, FactsCollector, exposition
from monitoring.model import Model
from monitoring.portrait import Pace
from monitoring.predicted import predicted_utilisation
from monitoring.report import write_report
from monitoring.sinks import TensorBoardSink, export_feed, figures_of, open_sinks
from monitoring.watch import frame, line, watch_feed
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.events import EVENT_TYPES
from p2p_co2.telemetry.feed import FeedState, Sighting
from p2p_co2.telemetry.journal import Journal
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id
from tests.swarms import ROOT

START = 1_800_000_000.0
EVIL = "<img src=x onerror=alert(1)>{a|b}\x1b[2J"


def model_after(seconds: int, peers: int = 6, **options: Any) -> Model:
    feed = MadeFeed(MadeSwarm(peers, start_at=START, **options))
    feed.advance(seconds)
    model = Model(feed, History(None))
    model.step(START + seconds)
    model.keep(START + seconds)
    return model


@pytest.fixture(name="model", scope="module")
def _model() -> Iterator[Model]:
    model = model_after(100, dead=3, late=4)
    yield model
    model.history.close()


def walk(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)


# ---- facts


def test_a_burst_is_no_rate() -> None:
    pace = Pace()
    for at, up_bytes in ((0.0, 0), (0.4, 900_000)):
        pace.add(at, up_bytes, 0)
    assert pace.rates(0.4) == (None, None)
    pace.add(9.0, 1_800_000, 900)
    assert pace.rates(9.0) == (200_000.0, 100.0)
    assert pace.rates(60.0) == (0.0, 0.0)


def test_facts_add_up(model: Model) -> None:
    facts = model.facts()
    assert facts.peers_online == 5
    assert facts.peers_known == 6
    assert facts.tokens == sum(peer.tokens for peer in facts.peers)
    assert sum(peer.share_counted or 0.0 for peer in facts.peers) == pytest.approx(1.0)
    assert facts.tokens_counted == pytest.approx(sum(peer.tokens_counted or 0.0 for peer in facts.peers))
    assert facts.rounds_aborted == 2
    assert {peer.label: peer.state for peer in facts.peers}["peer-4"] == "gone"
    assert facts.loss_agreed is not None


def test_what_is_wrong_is_said_with_the_peer_and_the_reason(model: Model) -> None:
    words = [trouble.words for trouble in model.facts().troubles]
    assert any("peer-4 is gone" in text and "silent for 6 s" in text for text in words)
    assert any("was aborted: the owner of part 2 fell silent" in text for text in words)
    assert any("peer-3 spends 7.0 % of its time waiting" in text for text in words)
    assert any("peer-2 may send 60.0 kB/s" in text for text in words)


def test_the_planner_is_held_against_what_happens(model: Model) -> None:
    predicted = model.facts().utilisation_predicted
    assert predicted is not None
    assert 0.5 < predicted < 1.0  # one peer may send less than the rounds need
    assert predicted_utilisation(None, 1000, 4, model.facts().peers) is None
    assert predicted_utilisation(model.run, 2**53, 4, model.facts().peers) is None
    assert predicted_utilisation(model.run, 1000, 4, model.facts().peers[:1]) is None


def test_the_past_of_a_whole_feed_is_sampled_in_its_own_time(model: Model) -> None:
    rows = model.history.series(SWARM, *model.history.span())
    assert len(rows) > 40
    tokens = [row[charts.column("tokens")] for row in rows]
    assert tokens == sorted(tokens)


def test_the_api_follows_its_schema(model: Model) -> None:
    sent = json.loads(model.facts().model_dump_json())
    schema = swarm_schema()
    assert set(sent) == set(schema["properties"]) == set(schema["required"])
    assert SwarmFacts.model_validate(sent) == model.facts()
    peers = schema["$defs"]["PeerFacts"]
    assert set(sent["peers"][0]) == set(peers["properties"])
    described = [field for field in peers["properties"].values() if field.get("description")]
    assert len(described) == len(peers["properties"])


def test_a_board_without_peers_has_facts_charts_and_metrics() -> None:
    feed = MadeFeed(MadeSwarm(0, start_at=START), FeedState("connecting", "looking for a seed"))
    model = Model(feed, History(None))
    model.step(START)
    model.keep(START)
    facts = model.facts()
    assert facts.peers_known == 0
    for made in all_charts(model):
        json.dumps(made, allow_nan=False)
    assert b"p2p_co2_swarm_peers_online 0.0" in exposition(FactsCollector(model.facts))
    assert "looking for a seed" in line(facts)
    model.history.close()


def test_a_board_started_again_counts_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"

    def counted(until: int) -> tuple[float, int, int]:
        feed = MadeFeed(MadeSwarm(4, start_at=START))
        feed.advance(until)
        model = Model(feed, History(path))
        model.step(START + until)
        model.keep(START + until)
        lines = len(model.history.happenings(10_000))
        model.history.close()
        return model.facts().tokens_counted, model.facts().rounds_counted, lines

    assert counted(60) == counted(60)
    more = counted(80)
    assert more == counted(80)
    whole = model_after(80, peers=4)
    assert more[:2] == (whole.facts().tokens_counted, whole.facts().rounds_counted)
    assert more[2] == len(whole.history.happenings(10_000))
    whole.history.close()


# ---- hostile


def evil_model() -> Model:
    """A swarm in which one peer says all that the checks of a report let pass."""
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(40)
    feed.take()
    bad = peer_id(9)
    numbers = {
        "inner_steps": 2**53,
        "tokens": 2**53,
        "up_bytes": 2**53,
        "down_bytes": 0,
        "versions": (2**53,) * 256,
    }
    feed._news.events += [
        ev.PeerStarted(at=START, peer=bad, name=EVIL, pid=0, software=EVIL, device=EVIL, parameters=2**53,
                       fragments=2**53, run=EVIL),
        ev.Progress(at=START + 1, peer=bad, phase=EVIL, position=1e15, tokens_per_s=1e15, loss=math.nan,
                    train_s=1e15, exposed_s=1e15, wall_s=0.0, **numbers),
        ev.LinkMeasured(at=START + 1, peer=bad, other=peer_id(0), carrier=EVIL, relayed=True,
                        round_trip_s=1e15,
                        bytes_per_s=1e15, sent_bytes=2**53),
        ev.FragmentApplied(at=START + 1, peer=bad, fragment=255, version=2**40, contributed=True,
                           staleness=2**53, sync_delay_steps=2**53, sync_delay_s=1e15, gap=1e15,
                           gradient_norm=0.0, momentum_norm=1e15, clipped_share=1e15),
        ev.RoundCommitted(at=START + 1, peer=bad, fragment=255, round=2**40, coordinator=EVIL,
                          group_size=2**53,
                          contributors=0, partial=2**53, duration_s=1e15),
        ev.RoundAborted(at=START + 1, peer=bad, fragment=255, round=2**40, reason=EVIL),
        ev.Warned(at=START + 39, peer=bad, text=EVIL),
        ev.MessageRefused(at=START + 39, peer=bad, other=EVIL, reason=EVIL),
    ]  # fmt: skip
    feed._news.sightings.append(Sighting(bad, "answering", START, refused=ev_counter({EVIL: 3})))
    feed.is_whole = False
    model = Model(feed, History(None))
    model.step(START + 40)
    model.keep(START + 40)
    return model


def ev_counter(counts: dict[str, int]) -> Any:
    from collections import Counter

    return Counter(counts)


def all_charts(model: Model) -> list[charts.Options]:
    facts, palette = model.facts(), charts.DARK
    span = model.history.span()
    rows = model.history.series(SWARM, *span)
    fragments = {f: model.history.fragment_series(f, *span) for f in range(min(4, facts.fragments))}
    members = {peer_id(0): {"ready_at": 5.0, "begin_s": 0.1, "parts_s": 0.3, "mean_s": 0.2, "commit_s": 0.6}}
    return [
        charts.loss(palette, rows, model.history.agreed(), over_tokens=True),
        charts.loss(palette, rows, model.history.agreed(), over_tokens=False),
        charts.over_time(palette, rows, {"tokens/s": ("tokens_per_s", charts.GREEN, 1.0)}),
        charts.rounds(palette, facts.rounds, facts.fragments),
        charts.staleness(palette, {f: {0: 3, 7: 1} for f in range(3)}),
        charts.staleness(palette, {0: {2**53: 1}}),
        charts.ages(palette, facts.peers, facts.fragments),
        charts.link_matrix(palette, facts.peers),
        charts.hidden_and_exposed(palette, facts.peers),
        charts.fragment_lines(palette, fragments, 1),
        charts.round_time_line(palette, members, {peer_id(0): EVIL}),
    ]


def test_a_peer_that_says_nonsense_is_shown_as_such_and_breaks_nothing() -> None:
    model = evil_model()
    facts = model.facts()
    words = " ".join(trouble.words for trouble in facts.troubles)
    assert "publishes nonsense" in words
    assert "\x1b" not in words
    text = exposition(FactsCollector(model.facts)).decode()
    assert list(text_string_to_metric_families(text))
    console = Console(width=110, record=True, force_terminal=True)
    console.print(frame(facts, 110, 50))
    assert "\x1b[2J" not in console.export_text(styles=True)
    model.history.close()


def test_a_peers_text_is_never_a_key_of_a_chart_and_no_number_is_missing() -> None:
    """A key that begins with a colon would be run as a program in the browser."""
    model = evil_model()
    for made in all_charts(model):
        text = json.dumps(made, allow_nan=False)
        assert len(text) < 400_000
        keys = [key for value in walk(made) if isinstance(value, dict) for key in value]
        assert all(re.fullmatch(r"[A-Za-z]\w*", key) for key in keys), keys
        assert made["tooltip"]["renderMode"] == "richText"
        texts = [value for value in walk(made) if isinstance(value, str)]
        assert not any("\x1b" in value for value in texts)
    model.history.close()


def test_markup_cannot_leave_the_report(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for event in MadeSwarm(2, start_at=START).at(0):
            journal.write(event)
        name = "</script><img src=x onerror=alert(1)>"
        journal.write(
            ev.PeerStarted(at=START, peer=peer_id(7), name=name, pid=1, software=name, device=name,
                           parameters=1,
                           fragments=1, run="00")
        )  # fmt: skip
        journal.write(ev.Warned(at=START + 1, peer=peer_id(7), text=name))
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)


def test_the_report_says_the_newest_loss_whoever_measured_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for event in MadeSwarm(2, start_at=START).at(0):
            journal.write(event)
    agreed = [(START, 0.0, 4.976), (START + 60, 1e6, 1.4375)]
    write_report(tmp_path, tmp_path / "report.html", agreed)
    assert "1.438" in (tmp_path / "report.html").read_text().split("application/json")[0]
    write_report(tmp_path, tmp_path / "report.html", agreed[:1])
    assert "1.438" not in (tmp_path / "report.html").read_text()


# ---- metrics and other tools


def test_metrics_follow_the_conventions(model: Model) -> None:
    families = list(text_string_to_metric_families(exposition(FactsCollector(model.facts)).decode()))
    assert len(families) > 40
    for family in families:
        assert family.name.startswith("p2p_co2_")
        assert family.documentation
        assert not re.search(r"_(mb|kb|ms|percent|minutes)(_|$)", family.name)
        for sample in family.samples:
            assert math.isfinite(sample.value)
            assert set(sample.labels) <= {
                "peer",
                "name",
                "state",
                "outcome",
                "fragment",
                "carrier",
                "relayed",
            }
            assert sample.name.endswith("_total") == (family.type == "counter")


def test_a_peers_own_page_tells_of_itself_alone(model: Model) -> None:
    text = exposition(FactsCollector(model.facts, lambda: peer_id(1))).decode()
    labels = {
        sample.labels["peer"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "peer" in sample.labels
    }
    assert labels == {peer_id(1)}
    assert "swarm_tokens" not in text


def test_label_sets_are_bounded() -> None:
    model = model_after(5, peers=MAX_PEERS + 40)
    text = exposition(FactsCollector(model.facts)).decode()
    assert text.count("p2p_co2_peer_up{") == MAX_PEERS
    model.history.close()


def test_the_dashboard_file_asks_for_metrics_that_exist(model: Model) -> None:
    dashboard = json.loads((ROOT / "monitoring" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    text = exposition(FactsCollector(model.facts)).decode()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    for query in queries:
        asked = set(re.findall(r"p2p_co2_\w+", query))
        assert asked
        assert asked <= names, query


def test_the_schema_of_events_is_the_one_that_is_documented() -> None:
    made = event_docs()
    assert (ROOT / "docs" / "events.md").read_text() == made, "run: make docs"
    for kind in EVENT_TYPES:
        assert f"\n## {kind}\n" in made


def test_tensorboard_gets_what_the_swarm_did(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the tensorboard extra is not installed")
    from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent
    from tensorboardX.record_writer import RecordWriter

    assert RecordWriter
    feed = MadeFeed(MadeSwarm(3, start_at=START), FeedState("ended", "over"))
    feed.advance(60)
    assert export_feed(feed, [TensorBoardSink(tmp_path / "tb")]) == 0
    (path,) = (tmp_path / "tb").iterdir()
    told = {
        value.tag: value.simple_value
        for record in records(path.read_bytes())
        for value in TensorBoardEvent.FromString(record).summary.value
    }
    assert told["swarm/peers_online"] == 3.0
    assert told["swarm/loss_training"] > 0
    assert told["peer/peer-1/tokens_per_s"] == pytest.approx(1440.0)


def records(data: bytes) -> Iterator[bytes]:
    """TFRecord: length (8 bytes, little-endian), its checksum (4), the bytes, their checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_a_sink_that_is_not_asked_for_or_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--tensorboard"):
        open_sinks(None, "")
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"p2p-co2\[wandb\]"):
        open_sinks(None, "project")


def test_sinks_get_plain_names_and_finite_numbers() -> None:
    model = evil_model()
    figures = figures_of(model.facts())
    assert all(re.fullmatch(r"[\w./-]+", name) for name in figures)
    assert all(math.isfinite(value) for value in figures.values())
    model.history.close()


# ---- terminal


def test_the_terminal_shows_swarm_and_staleness(model: Model) -> None:
    for width, height in ((80, 24), (120, 50), (40, 15)):
        console = Console(width=width, height=height, record=True, force_terminal=True)
        console.print(frame(model.facts(), width, height))
        text = console.export_text()
        assert "peer-1" in text
        assert "staleness" in text
        assert max(len(row) for row in text.splitlines()) <= width
    assert "5 troubles: Round 13" in line(model.facts())


def test_watching_without_a_terminal_prints_lines_and_ends() -> None:
    feed = MadeFeed(MadeSwarm(2, start_at=START))
    feed.advance(20)
    console = Console(width=200, record=True, force_terminal=False)
    assert watch_feed(feed, 0.01, console) == 0
    assert "2 of 2 peers" in console.export_text() or "0 of 2 peers" in console.export_text()


# ---- journals


def test_a_run_that_is_over_is_told_in_its_own_time(tmp_path: Path) -> None:
    swarm = MadeSwarm(2, start_at=START)
    for number in range(2):
        with Journal(tmp_path / "peers" / f"p{number}" / "events.jsonl") as journal:
            for t in range(40):
                for event in swarm.at(t):
                    if event.peer == peer_id(number):
                        journal.write(event)
            journal.write(
                ev.PeerFinished(
                    at=START + 41, peer=peer_id(number), reason="over", digest="ab", versions=(7,)
                )
            )
    model = Model(JournalFeed(tmp_path), History(None))
    model.step(START + 1e6)
    facts = model.facts()
    assert facts.tokens == sum(peer.tokens for peer in facts.peers) > 0
    assert {peer.state for peer in facts.peers} == {"finished"}
    assert len(model.history.series(SWARM, *model.history.span())) > 10
    model.history.close()


def test_a_folder_that_is_not_there_is_told() -> None:
    with pytest.raises(EnvironmentFault, match="no folder"):
        JournalFeed(Path("/nowhere"))


# ---- who may look


async def asked(token: str, headers: dict[str, str], query: str = "", kind: str = "http") -> int:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "query_string": query.encode(),
             "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}  # fmt: skip
    await Guard(app, token, Activity())(scope, receive, send)
    return int(sent[0].get("status", 403))


@pytest.mark.parametrize(
    ("token", "headers", "query", "kind", "status"),
    [
        ("", {"host": "127.0.0.1:80"}, "", "http", 200),
        ("", {"host": "localhost:80"}, "", "http", 200),
        ("", {"host": "[::1]:80"}, "", "http", 200),
        ("", {"host": "127.0.0.2:80"}, "", "http", 200),
        ("", {"host": "LocalHost:80"}, "", "http", 200),
        ("", {"host": "10.0.0.1:80"}, "", "http", 403),
        ("", {"host": "localhost.example:80"}, "", "http", 403),
        ("", {"host": "rebound.example:80"}, "", "http", 403),
        ("", {}, "", "http", 403),
        ("", {"host": "127.0.0.1:80", "origin": "http://evil.example"}, "", "websocket", 403),
        ("", {"host": "127.0.0.1:80", "origin": "http://127.0.0.1:80"}, "", "websocket", 200),
        ("secret", {"host": "board.example"}, "", "http", 403),
        ("secret", {"host": "board.example"}, "token=wrong", "http", 403),
        ("secret", {"host": "board.example"}, "token=secret", "http", 200),
        ("secret", {"host": "board.example", "cookie": "p2p_co2_board=secret"}, "", "http", 200),
        ("secret", {"host": "board.example", "cookie": "a@b=1; p2p_co2_board=secret"}, "", "http", 200),
        ("secret", {"host": "board.example", "cookie": "a@b=1"}, "", "http", 403),
        ("secret", {"host": "board.example", "authorization": "Bearer secret"}, "", "http", 200),
        ("secret", {"host": "board.example", "cookie": "p2p_co2_board=tecres"}, "", "websocket", 403),
    ],
)
async def test_who_may_look(token: str, headers: dict[str, str], query: str, kind: str, status: int) -> None:
    assert await asked(token, headers, query, kind) == status


def test_anything_but_loopback_asks_for_a_token() -> None:
    assert place_for("127.0.0.1", 0).token == ""
    assert len(place_for("0.0.0.0", 0).token) > 20
    assert place_for("0.0.0.0", 0).token != place_for("0.0.0.0", 0).token
    assert place_for("0.0.0.0", 0, "mine").token == "mine"
    with pytest.raises(EnvironmentFault, match="no IP address"):
        place_for("my host", 0)
    with pytest.raises(ConfigError, match="--port"):
        place_for("127.0.0.1", 70_000)
    with pytest.raises(ConfigError, match="--token"):
        place_for("0.0.0.0", 0, "mine & yours")
