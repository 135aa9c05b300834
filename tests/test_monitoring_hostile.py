"""monitoring among liars: what a peer says is shown as text, held in bounds, and ends no board."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from monitoring.history import History
from monitoring.metrics import FactsCollector, exposition
from monitoring.model import Model
from monitoring.report import write_report
from monitoring.watch import frame
from p2p_co2.protocol.reports.reader import check_event
from p2p_co2.protocol.wire.limits import MAX_STRING
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.journal import Journal
from p2p_co2.telemetry.peer_view import MAX_VALUES, Counters, recalled
from p2p_co2.telemetry.view import MAX_MENTIONED, SwarmView
from tests.made_model import START, all_charts, evil_model
from tests.made_swarm import MadeFeed, MadeSwarm, peer_id


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


# ---- floods


def watched_swarm(peers: int = 4) -> tuple[MadeFeed, Model]:
    feed = MadeFeed(MadeSwarm(peers, start_at=START))
    feed.advance(30)
    feed.is_whole = False
    model = Model(feed, History(None))
    model.step(START + 30)
    return feed, model


def test_a_number_of_hundreds_of_digits_ends_no_board() -> None:
    """No float can hold it, so the mean of a histogram that has it cannot be made."""
    feed, model = watched_swarm()
    told = recalled(model.view.peers[peer_id(1)], START + 30)
    huge = "9" * MAX_STRING
    told = dataclasses.replace(
        told, staleness={f"0:{huge[:-2]}": 1, f"{huge[:-2]}:0": 1, "0:2": 3},
        sync_delay_steps={huge: 1, "4": 3}, applied_at={huge: START}, payload_bytes={huge: 1},
    )  # fmt: skip
    check_event(told, peer_id(1), START + 30)  # may be said
    feed._news.events.append(told)
    model.step(START + 31)
    assert model.facts().staleness_mean is not None
    assert dict(model.view.peers[peer_id(1)].staleness) == {2: 3}
    assert dict(model.view.peers[peer_id(1)].sync_delay_steps) == {4: 3}
    model.history.close()


def test_peers_that_one_peer_only_speaks_of_are_bounded() -> None:
    feed, model = watched_swarm()
    for number in range(1000, 1000 + 2 * MAX_MENTIONED):
        left = ev.PeerLeft(at=START + 30, peer=peer_id(0), other=peer_id(number), reason="so it says")
        feed._news.events.append(left)
    model.step(START + 31)
    assert len(model.view.peers) == 4 + MAX_MENTIONED
    assert {peer_id(number) for number in range(4)} <= set(model.view.peers)
    assert peer_id(1000 + 2 * MAX_MENTIONED - 1) in model.view.peers  # the newest stay
    model.history.close()


def test_figures_that_no_peer_has_are_left_out_of_histograms() -> None:
    feed, model = watched_swarm()
    feed._news.events += [
        ev.FragmentApplied(at=START + 30, peer=peer_id(0), fragment=number % 4, version=1, contributed=True,
                           staleness=7 * number, sync_delay_steps=13 * number, sync_delay_s=1.0, gap=1.0,
                           gradient_norm=0.0, momentum_norm=1.0, clipped_share=0.0)
        for number in range(2 * MAX_VALUES)
    ]  # fmt: skip
    model.step(START + 31)
    assert len(model.view.peers[peer_id(0)].staleness) == MAX_VALUES
    assert len(model.view.peers[peer_id(0)].sync_delay_steps) == MAX_VALUES
    assert len(model.view.staleness) <= MAX_VALUES + 2
    model.history.close()


def test_a_flood_of_measurements_or_names_weighs_the_whole_swarm_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed, model = watched_swarm()
    weighed = Counter[str]()
    totals, labels = SwarmView.totals, SwarmView.labels

    def counted_totals(view: SwarmView) -> Counters:
        weighed["totals"] += 1
        return totals.__get__(view)

    def counted_labels(view: SwarmView) -> dict[str, str]:
        weighed["labels"] += 1
        return labels(view)

    monkeypatch.setattr(SwarmView, "totals", property(counted_totals))
    monkeypatch.setattr(SwarmView, "labels", counted_labels)
    for number in range(50):
        feed._news.events += [
            ev.AgreedMeasured(at=START + 30, peer=peer_id(0), position=1.0, loss=2.0, tokens=1,
                              duration_s=1.0),
            ev.PeerStarted(at=START + 30, peer=peer_id(0), name=f"n{number}", pid=0, software="", device="",
                           parameters=1, fragments=1, run=""),
        ]  # fmt: skip
    model.step(START + 31)
    assert weighed == {"totals": 1, "labels": 2}
    assert {peer.label for peer in model.facts().peers} == {"n49", "peer-2", "peer-3", "peer-4"}
    model.history.close()
