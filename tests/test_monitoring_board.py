"""monitoring's facts and troubles, runs that are over, and who may look, on swarms that were made up."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitoring import charts
from monitoring.board.server import Activity, Guard, place_for, swarm_schema
from monitoring.facts import SwarmFacts
from monitoring.history import SWARM, History
from monitoring.journals import JournalFeed
from monitoring.metrics import FactsCollector, exposition
from monitoring.model import FORGET_AFTER_S, Model
from monitoring.predicted import predicted_utilisation
from monitoring.report import write_report
from monitoring.swarm_facts import Pace
from monitoring.troubles import troubles
from monitoring.watch import line
from monitoring.words import capped_words, news
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.feed import FeedState
from p2p_co2.telemetry.journal import Journal
from p2p_co2.telemetry.view import fold
from tests.made_model import START, all_charts, model_after
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id


@pytest.fixture(name="model", scope="module")
def _model() -> Iterator[Model]:
    model = model_after(100, dead=3, late=4)
    yield model
    model.history.close()


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


def test_a_peer_that_counts_for_less_than_it_claims_is_one_line_until_it_is_over() -> None:
    view = fold(
        ev.ContributionCapped(
            at=at, peer=peer, other="12D3KooWliar", fragment=fragment, round=9, claimed=4e6, counted=16.0,
            median=4.0, rounds=1,
        )
        for peer, at, fragment in (("a", 100.0, 0), ("b", 100.5, 0), ("a", 161.0, 3))
    )  # fmt: skip
    claims = "claims 1,000,000 times the median work: counted as 4.0 times"

    def wrong(now: float) -> list[tuple[str, str]]:
        found = troubles(view, {"12D3KooWliar": "~WXYZ99"}, (), {}, FeedState("live", ""), now)
        return [(trouble.peer, trouble.words.partition(";")[0]) for trouble in found]

    assert wrong(170.0) == [("12D3KooWliar", f"~WXYZ99 {claims}")]
    assert wrong(300.0) == []
    assert [words for _, words in news(view, 9)] == [f"~oWliar {claims}"]
    large = ev.ContributionCapped(
        at=1.0, peer="a", other="b", fragment=0, round=1, claimed=10.0, counted=0.1, median=9.0
    )
    assert capped_words(large) == "sends far larger changes than the others: counted as 1.0 % of its work"


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


# ---- who is gone


def test_who_is_gone_for_a_day_is_listed_no_more_and_still_counts() -> None:
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(30)
    feed.is_whole = False
    model = Model(feed, History(None))
    model.step(START + 30)
    before, gone = model.facts(), peer_id(2)
    last = next(peer for peer in before.peers if peer.peer == gone)
    steps = model.view.staleness.total()
    day = FORGET_AFTER_S + 60
    for at in (day, 2 * day):
        for number in range(2):
            feed._news.events.append(progress_of(model, peer_id(number), START + at))
        model.step(START + at)
    facts = model.facts()
    assert {peer.peer for peer in facts.peers} == {peer_id(0), peer_id(1)}
    assert (facts.tokens, facts.up_bytes) == (before.tokens, before.up_bytes)
    assert model.view.staleness.total() == steps
    # It comes back as another process, which counts from 0.
    feed._news.events += [
        ev.PeerStarted(at=START + 2 * day, peer=gone, name="back", pid=1, software="", device="",
                       parameters=1, fragments=4, run=""),
        dataclasses.replace(progress_of(model, peer_id(0), START + 2 * day), peer=gone, tokens=5),
    ]  # fmt: skip
    model.step(START + 2 * day + 1)
    back = next(peer for peer in model.facts().peers if peer.peer == gone)
    assert back.tokens == last.tokens + 5
    assert model.facts().tokens == before.tokens + 5
    model.history.close()


def progress_of(model: Model, peer: str, at: float) -> ev.Progress:
    """What ``peer`` says at ``at`` if it has done nothing since its last word."""
    known = model.view.peers[peer]
    return ev.Progress(
        at=at, peer=PeerId(peer), phase="training", position=known.position, versions=known.versions,
        tokens_per_s=0.0, loss=math.nan, **dataclasses.asdict(known.totals),
    )  # fmt: skip


def test_a_peer_that_is_gone_has_no_open_links() -> None:
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(30)
    for at, other in ((1, 0), (2, 1)):
        opened = ev.LinkOpened(
            at=START + at, peer=peer_id(2), other=peer_id(other), carrier="grpc", reason=""
        )
        feed._news.events.append(opened)
    said = ev.PeerLeft(at=START + 29, peer=peer_id(0), other=peer_id(2), reason="silent for 6 s")
    feed._news.events.append(said)
    model = Model(feed, History(None))
    model.step(START + 30)
    assert {peer.label: peer.carriers for peer in model.facts().peers}["peer-3"] == {"grpc": 2}
    model.step(START + 60)
    (gone,) = [peer for peer in model.facts().peers if peer.state == "gone"]
    assert (gone.label, gone.carriers, gone.up_bytes_per_s) == ("peer-3", {}, None)
    model.history.close()


def test_who_still_reads_a_peers_past_does_not_call_it_silent() -> None:
    """An observer that comes late gets the last minutes piece by piece."""
    feed = MadeFeed(MadeSwarm(2, start_at=START))
    feed.advance(30)
    feed.is_whole = False
    model = Model(feed, History(None))
    model.step(START + 200)
    assert [peer.state for peer in model.facts().peers] == ["training", "training"]
    model.step(START + 215)
    assert [(peer.state, peer.reason) for peer in model.facts().peers] == [("silent", "no word for 15 s")] * 2
    model.history.close()


def test_out_of_reach_is_said_once_and_not_of_every_peer() -> None:
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(30)
    feed.is_whole = False
    model = Model(feed, History(None))
    model.step(START + 30)
    feed.state = FeedState("lost", "no seed can be reached")
    model.step(START + 90)
    words = [trouble.words for trouble in model.facts().troubles]
    advice = "what is shown is old, and it is looked for again"
    assert words == [f"The swarm is out of reach: no seed can be reached; {advice}"]
    model.history.close()


def test_what_stands_in_a_cell_of_the_link_matrix_fits_a_phone(model: Model) -> None:
    """Of some 40 pixels; a browser leaves out what does not fit."""
    (series,) = charts.link_matrix(charts.LIGHT, model.facts().peers)["series"]
    lines = [line for cell in series["data"] for line in cell["value"][3].split("\n")]
    assert lines
    assert max(map(len, lines)) <= 6, lines


def test_a_swarm_that_fell_silent_as_a_whole_stays_listed() -> None:
    feed = MadeFeed(MadeSwarm(3, start_at=START))
    feed.advance(30)
    feed.is_whole = False
    model = Model(feed, History(None))
    model.step(START + 30)
    model.step(START + 9 * FORGET_AFTER_S)
    assert model.facts().peers_known == 3
    model.history.close()


def test_a_history_that_cannot_be_written_is_told_and_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = History.or_in_memory(tmp_path / "file" / "board.sqlite")
    model = Model(MadeFeed(MadeSwarm(2, start_at=START)), history)
    model.step(START + 1)
    model.keep(START + 1)
    assert "--folder" in model.trouble_with_history
    assert history.span() != (0.0, 0.0)
    history.close()
    assert not History.or_in_memory(None).trouble


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


def test_the_report_says_the_newest_loss_whoever_measured_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "events.jsonl") as journal:
        for event in MadeSwarm(2, start_at=START).at(0):
            journal.write(event)
    agreed = [(START, 0.0, 4.976), (START + 60, 1e6, 1.4375)]
    write_report(tmp_path, tmp_path / "report.html", agreed)
    assert "1.438" in (tmp_path / "report.html").read_text().split("application/json")[0]
    write_report(tmp_path, tmp_path / "report.html", agreed[:1])
    assert "1.438" not in (tmp_path / "report.html").read_text()


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
