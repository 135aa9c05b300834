"""The board on swarms that were made up: facts, troubles, runs that are over, metrics, sinks, liars,
and who may look."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from monitoring import charts
from monitoring.board import server
from monitoring.board.cards import own_told
from monitoring.board.pages import fact_rows
from monitoring.board.server import Guard, place_for, recall_journal, run_activated, swarm_schema
from monitoring.facts import OF_STAGES, RunState, SwarmFacts
from monitoring.feeds import JournalFeed
from monitoring.history import AGREED, SWARM, BoardHistory
from monitoring.known import run_position
from monitoring.metrics import MAX_PEERS, FactsCollector, exposition
from monitoring.model import MAX_PEERS as MAX_PEERS_LISTED
from monitoring.model import Model, Recorder
from monitoring.report import write_report
from monitoring.sinks import TensorBoardSink, export_feed, figures_of, open_sinks
from monitoring.status import look
from monitoring.terminal import frame, line, watch_feed
from p2p_co2.errors import ConfigError, EnvironmentFault, TransportError
from p2p_co2.protocol.reports import check_event
from p2p_co2.system.owner import SENSES
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import Feed, FeedState, News
from p2p_co2.telemetry.journal import MAX_LINE_BYTES, Journal, event_line
from p2p_co2.telemetry.view import MAX_VALUES, recalled
from p2p_co2.wire.limits import MAX_STRING
from tests.event_samples import applied, progress, sample, started
from tests.made_swarm import MadeFeed, MadeSwarm, add_evil, peer_id, step
from tests.stories import RUN, START, Told
from tests.swarms import ROOT


def followed(feed: Feed, now: float, history: BoardHistory | None = None) -> tuple[Model, BoardHistory]:
    """A model of all that ``feed`` gives by ``now``, and the history that was kept of it."""
    model, kept = Model(feed), history or BoardHistory(None)
    Recorder(model, kept).follow(now)
    return model, kept


def model_after(seconds: int, peers: int = 6, **options: Any) -> tuple[Model, BoardHistory]:
    feed = MadeFeed(MadeSwarm(peers, start_at=START, **options))
    feed.advance(seconds)
    return followed(feed, START + seconds)


def evil_model() -> tuple[Model, BoardHistory]:
    """A swarm in which one peer says all that the checks of a report let pass."""
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(40)
    feed.take()
    add_evil(feed, START + 39)
    feed.is_whole = False
    return followed(feed, START + 40)


def all_charts(model: Model, history: BoardHistory) -> list[charts.Options]:
    facts, palette = model.facts(), charts.DARK
    rows, agreed = (history.series(key, *history.span()) for key in (SWARM, AGREED))
    return [
        charts.loss(palette, rows, agreed, over_tokens=True),
        charts.loss(palette, rows, agreed),
        *(charts.over_time(palette, rows, lines) for _, _, lines in charts.TRENDS.values()),
        charts.rounds(palette, facts.rounds, facts.fragments),
        charts.staleness(palette, {f: {0: 3, 7: 1} for f in range(3)}),
        charts.staleness(palette, {0: {2**53: 1}}),
        charts.links(palette, facts.peers),
    ]


@pytest.fixture(name="made", scope="module")
def _made() -> tuple[Model, BoardHistory]:
    return model_after(100, dead=3, late=4)


@pytest.fixture(name="facts")
def _facts(made: tuple[Model, BoardHistory]) -> SwarmFacts:
    return made[0].facts()


# ---- facts


def test_facts_add_up_and_say_what_is_wrong_with_the_peer_and_the_reason(facts: SwarmFacts) -> None:
    assert (facts.peers_online, facts.peers_known, facts.rounds_aborted) == (5, 6, 2)
    assert facts.tokens == sum(peer.tokens for peer in facts.peers)
    assert sum(peer.share_counted or 0.0 for peer in facts.peers) == pytest.approx(1.0)
    assert facts.tokens_counted == pytest.approx(sum(peer.tokens_counted or 0.0 for peer in facts.peers))
    assert facts.loss_agreed is not None
    assert facts.figures_agreed.keys() == {"accuracy", "log.odds"}
    words = "\n".join(trouble.words for trouble in facts.troubles)
    for part in (
        "peer-4 is gone: others say: silent for 6 s", "aborted: the owner of part 2 fell silent",
        "peer-3 spends 7.0 % of its time waiting", "peer-2 may send 60.0 kB/s",
    ):  # fmt: skip
        assert part in words
    assert "4 troubles: exchange 13" in line(facts)


def test_the_api_follows_its_schema(facts: SwarmFacts) -> None:
    sent = json.loads(facts.model_dump_json())
    schema = swarm_schema()
    assert set(sent) == set(schema["properties"]) == set(schema["required"])
    assert SwarmFacts.model_validate(sent) == facts
    peers = schema["$defs"]["PeerFacts"]
    assert set(sent["peers"][0]) == set(peers["properties"])
    described = [field for field in peers["properties"].values() if field.get("description")]
    assert len(described) == len(peers["properties"])


def test_a_board_without_peers_has_facts_charts_and_metrics() -> None:
    feed = MadeFeed(MadeSwarm(0, start_at=START), FeedState("connecting", "looking for a seed"))
    model, history = followed(feed, START)
    facts = model.facts()
    assert facts.peers_known == 0
    for made in all_charts(model, history):
        json.dumps(made, allow_nan=False)
    assert b"p2p_co2_swarm_peers_online 0.0" in exposition(FactsCollector(model.facts))
    assert "looking for a seed" in line(facts)


def test_a_board_started_again_counts_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"

    def counted(until: int) -> tuple[float, int, int]:
        feed = MadeFeed(MadeSwarm(4, start_at=START))
        feed.advance(until)
        model, history = followed(feed, START + until, BoardHistory(path))
        lines = len(history.happenings(10_000))
        history.close()
        return model.facts().tokens_counted, model.facts().rounds_counted, lines

    assert counted(60) == counted(60)
    more = counted(80)
    assert more == counted(80)
    whole, history = model_after(80, peers=4)
    assert more[:2] == (whole.facts().tokens_counted, whole.facts().rounds_counted)
    assert more[2] == len(history.happenings(10_000))


# ---- journals


def test_a_run_that_is_over_is_told_in_its_own_time(tmp_path: Path) -> None:
    swarm = MadeSwarm(2, start_at=START)
    for number in range(2):
        with Journal(tmp_path / "peers" / f"p{number}" / "events.jsonl") as journal:
            for t in range(40):
                for event in swarm.at(t):
                    if event.peer == peer_id(number):
                        journal.write(event)
            end = ev.PeerFinished(
                at=START + 41, peer=peer_id(number), reason="over", digest="", versions=(7,)
            )
            journal.write(end)
    model, history = followed(JournalFeed(tmp_path), START + 42)
    facts = model.facts()
    assert facts.tokens == sum(peer.tokens for peer in facts.peers) > 0
    assert {peer.state for peer in facts.peers} == {"finished"}
    assert len(history.series(SWARM, *history.span())) > 10


def test_a_peers_own_folder_is_seen_as_its_own_and_is_over_when_it_has_ended(tmp_path: Path) -> None:
    """The others wrote no line in it, and its links are company enough."""
    (tmp_path / "lock").touch()
    with Journal(tmp_path / "events.jsonl") as journal:
        journal.write(started("ada", START, "ada"))
        journal.write(sample("link_opened", "ada", START + 1, other="bob"))
        journal.write(sample("progress", "ada", START + 2))
        model = Model(JournalFeed(tmp_path))
        step(model, START + 3)
        assert (model.facts().state, model.facts().me) == (RunState.HEALTHY, "ada")
        journal.write(sample("peer_finished", "ada", START + 4))
    step(model, START + 5)
    assert model.facts().state == RunState.OVER


def test_the_report_has_the_loss_that_others_measured_and_the_summary(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for event in MadeSwarm(2, start_at=START).at(0):
            journal.write(event)
    agreed, whole = [(START, 0.0, 4.976), (START + 60, 1e6, 1.4375)], [(START + 60, 1e6, 1.5)]
    write_report(tmp_path, "run <made-up>", agreed, whole)
    page = (tmp_path / "report.html").read_text()
    assert "1.4375" in page
    assert charts.WHOLE in page
    assert ">run &lt;made-up&gt;</pre>" in page
    assert '<h2 class="b-title">Run: ' in page
    assert ">ran for: 0:" in page
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(EnvironmentFault, match="cannot write the report"):
        write_report(tmp_path)


# ---- where the run is


@pytest.mark.parametrize(
    ("trains", "ended", "expected"),
    [
        ([], [], 0.0),
        ([3.0], [], 3.0),
        ([50.0, 50.0, 1e15], [], 50.0),
        ([50.0, 1e15], [], 50.0),
        ([0.3], [(900, 60.0), (900, 60.0)], 60.0),  # a newcomer after the end
        ([50.0, 50.1, 50.0], [(900, 1e15)], 50.0),  # a liar that came and went
        ([50.0], [(100, 5.0), (110, 5.0)], 50.0),  # who left early was not further
        ([], [(100, 5.0), (100, 5.0), (100, 5.0), (900, 60.0)], 60.0),
    ],
)
def test_a_run_is_where_its_peers_are_or_where_they_ended_it(
    trains: list[float], ended: list[tuple[float, float]], expected: float
) -> None:
    assert run_position(trains, ended) == expected


# ---- lines end, and begin


def rows(history: BoardHistory) -> list[tuple[float, float]]:
    """(seconds since the start, loss) of all samples of the finest tier."""
    place = charts.column("loss")
    return [(row[0] - START, row[place]) for row in history.series(SWARM, *history.span())]


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_lines_end_at_the_last_report(how: str) -> None:
    told, history = Told(), BoardHistory(None)
    recorder = Recorder(told.model, history)
    told.tell(0, "peer_started", "ada", "bob")
    for at in range(0, 60, 2):
        if at < 20:
            told.tell(at, "progress", "ada", "bob")
        elif how == "lost":
            told.state = FeedState("lost", "no seed can be reached")
        recorder.follow(START + at)
    ends_at = 20 if how == "lost" else 30  # of silence it is sure only after a while
    facts, known = told.model.facts(), [at for at, loss in rows(history) if math.isfinite(loss)]
    assert (known[0], known[-1]) == (0, ends_at - 2)
    assert max(at for at, _ in rows(history)) == 58
    series = history.series(SWARM, *history.span())
    drawn_line = charts.loss(charts.LIGHT, series, [])["series"][1]
    assert drawn_line["connectNulls"] is False
    assert [value for _, value in drawn_line["data"]][-10:] == [None] * 10
    if how == "silent":
        assert facts.peers_online == 0
        assert b"\np2p_co2_swarm_training_loss " not in exposition(FactsCollector(lambda: facts))
        assert "swarm/loss_training" not in figures_of(facts)


def test_a_line_is_broken_where_no_board_looked() -> None:
    times = [*range(0, 60, 2), *range(1000, 1060, 2)]
    series = [(float(at), *[1.0] * 6) for at in times]
    made = charts.over_time(charts.LIGHT, series, {"x": ("tokens_per_s", charts.GREEN, 1.0)})
    data = made["series"][0]["data"]
    assert [at for at, value in data if value is None] == [58001.0]
    assert len(data) == len(series) + 1


def journal_of(path: Path, until: int) -> None:
    told = Told()
    told.tell(0, "peer_started", "me")
    for at in range(1, until):
        told.tell(at, "progress", "me", loss=5.0 - at / 100)
        if at == 50:
            told.tell(at, "round_committed", "me", round=3, group_size=2)
    with Journal(path) as journal:
        for event in told.news.events:
            journal.write(event)


def test_history_begins_with_the_peers_own_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: START + 320)
    path = tmp_path / "events.jsonl"
    journal_of(path, 300)
    hostile = ev.Warned(at=START + 1, peer="another", text="not of this peer")
    with path.open("ab") as file:
        file.write(b"\x00\xff{}\n" + b"x" * (MAX_LINE_BYTES + 9) + b"\n[1]\n" + event_line(hostile))
        for at in (math.inf, 1e300, -1e300, START + 1e6):  # a future that this board will not tell
            file.write(b'{"kind":"warned","peer":"me","text":"x","at":%s}\n' % str(at).encode())
        file.write(b'{"kind":"warned","peer":"me","at":')
    history = BoardHistory(tmp_path / "board.sqlite")
    recall_journal(path, "me", RUN, history)
    told = rows(history)
    assert told[0][0] <= 4
    assert told[-1][0] >= 290
    assert told[0][1] > 4.9
    assert told[-1][1] < 2.2
    lines = history.happenings(99)
    assert {line.peer for line in lines} == {"me"}
    before = len(told), len(lines)
    recall_journal(path, "me", RUN, history)  # a board that is opened again tells nothing twice
    assert (len(rows(history)), len(history.happenings(99))) == before
    recall_journal(tmp_path / "none", "me", RUN, history)
    history.close()


def test_a_board_waits_for_a_peer_that_answers_late_and_has_its_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    feed = MadeFeed(MadeSwarm(1), FeedState("connecting", "asking the peer of this machine"))

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 40.0:
            feed.me, feed.run = "me", RUN

    async def served(model: object, history: BoardHistory, *others: Any) -> None:
        await asyncio.to_thread(others[-1])
        told.extend(rows(history))

    told: list[tuple[float, float]] = []
    made = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: START + 320, sleep=sleep)
    monkeypatch.setattr(server, "time", made)
    monkeypatch.setattr(server, "serve", served)
    journal_of(tmp_path / "events.jsonl", 300)
    with socket.socket() as bound:
        assert run_activated(feed, bound, tmp_path / "board.sqlite", None, tmp_path / "events.jsonl") == 0
    assert len(told) > 100


# ---- metrics, sinks, documents


def told_of(facts: SwarmFacts, only: str = "") -> str:
    return exposition(FactsCollector(lambda: facts, lambda: only)).decode()


def test_metrics_follow_the_conventions(facts: SwarmFacts) -> None:
    families = list(text_string_to_metric_families(told_of(facts)))
    assert len(families) > 40
    for family in families:
        assert family.name.startswith("p2p_co2_")
        assert family.documentation
        assert not re.search(r"_(mb|kb|ms|percent|minutes)(_|$)", family.name)
        for one in family.samples:
            assert math.isfinite(one.value)
            names = {"peer", "name", "state", "outcome", "fragment", "carrier", "relayed", "figure"}
            assert set(one.labels) <= names
            assert one.name.endswith("_total") == (family.type == "counter")


def test_a_peers_own_page_tells_of_itself_alone_and_label_sets_are_bounded(facts: SwarmFacts) -> None:
    text = told_of(facts, peer_id(1))
    labels = [one.labels for family in text_string_to_metric_families(text) for one in family.samples]
    assert {label["peer"] for label in labels if "peer" in label} == {peer_id(1)}
    assert "swarm_tokens" not in text
    crowd = told_of(model_after(5, peers=MAX_PEERS + 40)[0].facts())
    assert crowd.count("p2p_co2_peer_up{") == MAX_PEERS


def test_the_dashboard_file_asks_for_metrics_that_exist(facts: SwarmFacts) -> None:
    dashboard = json.loads((ROOT / "monitoring" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    families = text_string_to_metric_families(told_of(facts))
    names = {one.name for family in families for one in family.samples}
    for query in queries:
        asked = set(re.findall(r"p2p_co2_\w+", query))
        assert asked
        assert asked <= names, query


def test_tensorboard_gets_what_the_swarm_did(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the tensorboard extra is not installed")
    from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent
    from tensorboardX.record_writer import RecordWriter

    assert RecordWriter
    feed = MadeFeed(MadeSwarm(3, start_at=START), FeedState("ended", "over"))
    feed.advance(60)
    assert export_feed(feed, [TensorBoardSink(tmp_path / "tb")]) == 0
    (path,) = (tmp_path / "tb").iterdir()
    told: dict[str, list[float]] = {}
    for record in records(path.read_bytes()):
        for value in TensorBoardEvent.FromString(record).summary.value:
            told.setdefault(value.tag, []).append(value.simple_value)
    online = told["swarm/peers_online"]
    assert (max(online), online[-1]) == (3.0, 0.0)  # nobody is, once the run is over
    assert told["swarm/loss_training"][-1] > 0
    assert told["swarm/agreed/accuracy"] == sorted(told["swarm/agreed/accuracy"])
    assert told["swarm/agreed/log.odds"][-1] < 0
    assert told["peer/peer-1/tokens_per_s"][-1] == pytest.approx(1440.0)
    rounds = told["swarm/rounds_committed"]  # the past of a run, not its end alone
    assert len(rounds) > 10
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-1] / 2


def records(data: bytes) -> Iterator[bytes]:
    """TFRecord: length (8 bytes, little-endian), its checksum (4), the bytes, their checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_a_sink_that_is_not_asked_for_or_not_installed_or_never_reached_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="--tensorboard"):
        open_sinks(None, "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentFault, match="--wandb needs an extra"):
        open_sinks(None, "project")
    feed = MadeFeed(MadeSwarm(0, start_at=START), FeedState("lost", "no seed can be reached"))
    with pytest.raises(TransportError, match="no seed can be reached"):
        export_feed(feed, [], seconds=0.01)


# ---- hostile peers


def test_watching_without_a_terminal_prints_lines_and_ends() -> None:
    feed = MadeFeed(MadeSwarm(2, start_at=START))
    feed.advance(20)
    console = Console(width=200, record=True, force_terminal=False)
    assert watch_feed(feed, 0.01, console) == 0
    assert "2 of 2 peers" in console.export_text() or "0 of 2 peers" in console.export_text()


def walk(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)


def test_a_peer_that_says_nonsense_is_shown_as_such_and_breaks_nothing() -> None:
    facts = evil_model()[0].facts()
    words = " ".join(trouble.words for trouble in facts.troubles)
    assert "publishes nonsense" in words
    assert "rounds behind" not in words
    assert "\x1b" not in words
    assert list(text_string_to_metric_families(told_of(facts)))
    console = Console(width=110, record=True, force_terminal=True)
    console.print(frame(facts, 110, 50))
    assert "\x1b[2J" not in console.export_text(styles=True)
    figures = figures_of(facts)
    assert all(re.fullmatch(r"[\w./-]+", name) for name in figures)
    assert all(math.isfinite(value) for value in figures.values())


def test_a_peers_text_is_never_a_key_of_a_chart_and_no_number_is_missing() -> None:
    """A key that begins with a colon would be run as a program in the browser."""
    for made in all_charts(*evil_model()):
        text = json.dumps(made, allow_nan=False)
        assert len(text) < 400_000
        keys = [key for value in walk(made) if isinstance(value, dict) for key in value]
        assert all(re.fullmatch(r"[A-Za-z]\w*", key) for key in keys), keys
        assert made["tooltip"]["renderMode"] == "richText"
        texts = [value for value in walk(made) if isinstance(value, str)]
        assert not any("\x1b" in value for value in texts)


def test_every_fact_of_a_peer_can_be_shown(facts: SwarmFacts) -> None:
    for peer in (*facts.peers, *evil_model()[0].facts().peers):
        told = fact_rows(peer)
        hidden = {"links", *OF_STAGES}
        assert [row[0].replace(" ", "_") for row in told] == [
            name for name in type(peer).model_fields if name not in hidden
        ]
        assert all(len(value) <= 80 and value.isprintable() and what for _, value, what in told)


def test_markup_cannot_leave_the_report(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for event in MadeSwarm(2, start_at=START).at(0):
            journal.write(event)
        name = "</script><img src=x onerror=alert(1)>"
        evil = dataclasses.replace(started(peer_id(7), START, name), software=name, device=name)
        journal.write(evil)
        journal.write(ev.Warned(at=START + 1, peer=peer_id(7), text=name))
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)


# ---- floods


def watched_swarm(peers: int = 4) -> tuple[MadeFeed, Model]:
    feed = MadeFeed(MadeSwarm(peers, start_at=START))
    feed.advance(30)
    feed.is_whole = False
    model = Model(feed)
    step(model, START + 30)
    return feed, model


def test_the_reason_of_a_rest_is_told_to_all_and_to_its_owner_as_you() -> None:
    feed, model = watched_swarm()
    feed.me = me = peer_id(0)
    resting = dataclasses.replace(progress(me, START + 30), phase="paused")
    feed.news.events += [ev.Paused(at=START + 30, peer=me, reason=SENSES["gpu"]), resting]
    step(model, START + 31)
    own = model.facts().own
    assert own is not None
    assert (own.state, own.reason) == ("paused", "its owner is using the GPU")
    assert own_told(model.facts())["you-state"][1:] == ("Paused", "", "you are using the GPU")
    assert "resting: you are using the GPU" in line(model.facts())
    feed.news.events += [ev.Resumed(at=START + 31, peer=me, paused_s=1.0), progress(me, START + 31)]
    step(model, START + 32)
    assert "resting" not in line(model.facts())


def test_a_number_of_hundreds_of_digits_ends_no_board() -> None:
    """No float can hold it, so the mean of a histogram that has it cannot be made."""
    feed, model = watched_swarm()
    told = recalled(model.view.peers[peer_id(1)])[0]
    assert isinstance(told, ev.Recalled)
    huge = "9" * MAX_STRING
    told = dataclasses.replace(
        told, staleness={f"0:{huge[:-2]}": 1, f"{huge[:-2]}:0": 1, "0:2": 3},
        sync_delay_steps={huge: 1, "4": 3},
    )  # fmt: skip
    check_event(told, peer_id(1), START + 30)  # may be said
    feed.news.events.append(told)
    step(model, START + 31)
    assert model.facts().staleness_mean is not None
    assert dict(model.view.peers[peer_id(1)].staleness) == {2: 3}
    assert dict(model.view.peers[peer_id(1)].tally.sync_delay_steps) == {4: 3}


class Told100sAgo(MadeFeed):
    """What peers answer to the first three questions is old, as the first of a long story is."""

    def __init__(self, swarm: MadeSwarm) -> None:
        super().__init__(swarm)
        self.takes, self.is_whole = 0, False

    def take(self) -> News:
        self.takes += 1
        self.advance(50 if self.takes < 4 else 100)
        return super().take()


def test_status_waits_for_what_is_new_of_a_long_story() -> None:
    feed = Told100sAgo(MadeSwarm(4, start_at=time.time() - 100, round_s=5.0))
    assert look(feed, 20.0).position > 18
    assert feed.takes >= 4


def test_the_own_peer_keeps_its_name_when_its_beginning_is_told_as_a_summary() -> None:
    """As every peer's is that has run for a while, to a board that is opened then."""
    _, seen = watched_swarm()
    late = MadeFeed(MadeSwarm(4, start_at=START))
    late.is_whole, late.me = False, peer_id(1)
    late.news.events += recalled(seen.view.peers[late.me])
    model = Model(late)
    step(model, START + 31)
    (own,) = (peer for peer in model.facts().peers if peer.peer == late.me)
    (then,) = (peer for peer in seen.facts().peers if peer.peer == late.me)
    assert own.joined_at is not None
    assert (own.label, own.device, own.joined_at) == (then.label, then.device, then.joined_at)
    assert own.label == "peer-2"


def test_peers_that_one_peer_only_speaks_of_are_bounded() -> None:
    feed, model = watched_swarm()
    for number in range(1000, 1000 + 2 * MAX_PEERS_LISTED):
        left = ev.PeerLeft(at=START + 30, peer=peer_id(0), other=peer_id(number), reason="so it says")
        feed.news.events.append(left)
    step(model, START + 31)
    assert len(model.view.peers) == MAX_PEERS_LISTED
    assert {peer_id(number) for number in range(4)} <= set(model.view.peers)


def test_figures_that_no_peer_has_are_left_out_of_histograms() -> None:
    feed, model = watched_swarm()
    feed.news.events += [
        dataclasses.replace(applied(peer_id(0), 7 * number, 13 * number), at=START + 30, fragment=number % 4)
        for number in range(2 * MAX_VALUES)
    ]
    step(model, START + 31)
    assert len(model.view.peers[peer_id(0)].tally.staleness) == MAX_VALUES
    assert len(model.view.peers[peer_id(0)].tally.sync_delay_steps) == MAX_VALUES
    assert len(model.view.staleness) <= MAX_VALUES + 2


# ---- who may look


async def answer(token: str, headers: dict[str, str], query: str = "", kind: str = "http") -> dict[str, Any]:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "query_string": query.encode(),
             "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}  # fmt: skip
    await Guard(app, token)(scope, receive, send)
    return sent[0]


LOOKS = """
200  host=127.0.0.1:80
200  host=localhost:80
200  host=[::1]:80
200  host=127.0.0.2:80
200  host=LocalHost:80
403  host=10.0.0.1:80
403  host=localhost.example:80
403  host=rebound.example:80
403
403  page host=127.0.0.1:80 origin=http://evil.example
200  page host=127.0.0.1:80 origin=http://127.0.0.1:80
403  host=127.0.0.1:80 origin=http://evil.example
403  host=127.0.0.1:80 origin=null
200  host=127.0.0.1:80 origin=http://127.0.0.1:80
403  host=127.0.0.1:80 sec-fetch-site=cross-site sec-fetch-mode=no-cors
403  host=127.0.0.1:80 sec-fetch-site=same-site sec-fetch-mode=no-cors
200  host=127.0.0.1:80 sec-fetch-site=cross-site sec-fetch-mode=navigate
200  host=127.0.0.1:80 sec-fetch-site=same-origin sec-fetch-mode=cors
403  secret ?token=secret host=board.example origin=http://evil.example
403  secret host=board.example
403  secret ?token=wrong host=board.example
200  secret ?token=secret host=board.example
200  secret host=board.example cookie=p2p_co2_board=secret
200  secret host=board.example cookie=a@b=1;p2p_co2_board=secret
403  secret host=board.example cookie=a@b=1
200  secret host=board.example authorization=Bearer+secret
403  secret page host=board.example cookie=p2p_co2_board=tecres
"""
"""The answer; of a board with the token "secret" or without one; to a page's socket; with query, headers."""


@pytest.mark.parametrize("look", LOOKS.strip().splitlines())
async def test_who_may_look(look: str) -> None:
    status, *words = look.split()
    given = [word.split("=", 1) for word in words if "=" in word and not word.startswith("?")]
    headers = {name: value.replace("+", " ").replace(";", "; ") for name, value in given}
    query = next((word.removeprefix("?") for word in words if word.startswith("?")), "")
    kind = "websocket" if "page" in words else "http"
    told = await answer("secret" if "secret" in words else "", headers, query, kind)
    assert told.get("status", 403) == int(status)
    if kind == "http":  # no page of another site shows the board, or what it says, in a frame
        assert (b"content-security-policy", b"frame-ancestors 'none'") in told["headers"]
        assert (b"x-frame-options", b"DENY") in told["headers"]


def test_anything_but_loopback_asks_for_a_token() -> None:
    assert place_for("127.0.0.1", 0).token == ""
    assert len(place_for("0.0.0.0", 0).token) > 20
    assert place_for("0.0.0.0", 0).token != place_for("0.0.0.0", 0).token
    assert place_for("0.0.0.0", 0, "mine").token == "mine"
    with pytest.raises(ConfigError, match="--host: 'my host' is no IP address"):
        place_for("my host", 0)
    with pytest.raises(ConfigError, match="--port"):
        place_for("127.0.0.1", 70_000)
    with pytest.raises(ConfigError, match="--token"):
        place_for("0.0.0.0", 0, "mine & yours")
