"""What a board hands to others: metrics, sinks, the documents of its events, the terminal's picture."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from monitoring.event_docs import event_docs
from monitoring.metrics import MAX_PEERS, FactsCollector, exposition
from monitoring.model import Model
from monitoring.sinks import TensorBoardSink, export_feed, figures_of, open_sinks
from monitoring.watch import frame, line, watch_feed
from p2p_co2.errors import ConfigError
from p2p_co2.telemetry.events import EVENT_TYPES
from p2p_co2.telemetry.feed import FeedState
from tests.made_model import START, evil_model, model_after
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id
from tests.swarms import ROOT


@pytest.fixture(name="model", scope="module")
def _model() -> Iterator[Model]:
    model = model_after(100, dead=3, late=4)
    yield model
    model.history.close()


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
    told: dict[str, list[float]] = {}
    for record in records(path.read_bytes()):
        for value in TensorBoardEvent.FromString(record).summary.value:
            told.setdefault(value.tag, []).append(value.simple_value)
    online = told["swarm/peers_online"]
    assert (max(online), online[-1]) == (3.0, 0.0)  # nobody is, once the run is over
    assert told["swarm/loss_training"][-1] > 0
    assert told["peer/peer-1/tokens_per_s"][-1] == pytest.approx(1440.0)
    rounds = told["swarm/rounds_committed"]  # the past of a run, not its end alone
    assert len(rounds) > 10
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-1] / 2


def test_an_export_without_figures_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    feed = MadeFeed(MadeSwarm(0, start_at=START), FeedState("ended", "over"))
    said: list[str] = []
    assert export_feed(feed, [TensorBoardSink(tmp_path / "tb")], say=said.append) == 0
    assert said[-1] == "nothing was written: there were no figures"
    assert not (tmp_path / "tb").exists()


def records(data: bytes) -> Iterator[bytes]:
    """TFRecord: length (8 bytes, little-endian), its checksum (4), the bytes, their checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_a_sink_that_is_not_asked_for_or_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--tensorboard"):
        open_sinks(None, "")
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
    assert "4 troubles: Round 13" in line(model.facts())


def test_the_terminal_says_how_old_the_held_out_loss_is(model: Model) -> None:
    facts = model.facts()
    console = Console(width=160, record=True, force_terminal=True)
    console.print(frame(facts.model_copy(update={"loss_agreed_at": facts.at - 95.0}), 160, 40))
    assert "(held-out, 1:35 ago)" in console.export_text()


def test_watching_without_a_terminal_prints_lines_and_ends() -> None:
    feed = MadeFeed(MadeSwarm(2, start_at=START))
    feed.advance(20)
    console = Console(width=200, record=True, force_terminal=False)
    assert watch_feed(feed, 0.01, console) == 0
    assert "2 of 2 peers" in console.export_text() or "0 of 2 peers" in console.export_text()
