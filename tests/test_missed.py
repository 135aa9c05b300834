"""Why a slice was not counted: from its owner's word to the pages. (``scenarios/rounds/missed.txt`` has the
other reasons.)"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from monitoring.board.pages import staleness_told
from monitoring.columns import PEER
from monitoring.terminal import frame
from monitoring.words import MISSED, missed_words
from p2p_co2.protocol.reports import check_event
from p2p_co2.protocol.rounds import MissedSlices, bounds
from p2p_co2.telemetry.events import SliceMissed
from p2p_co2.telemetry.view import recalled
from p2p_co2.wire import messages_pb2 as wire
from tests.event_samples import fold
from tests.round_network import Network
from tests.stories import START, Told, drawn
from tests.swarms import ROOT
from tests.test_commits import Place


def test_each_reason_of_the_wire_has_words_an_advice_and_a_row_in_troubleshooting() -> None:
    reasons = [name.lower() for name, number in wire.Missed.items() if number]
    assert list(MISSED) == reasons
    page = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
    assert all(f'slices "{missed_words({reason: 1})[2:]}"' in page for reason in reasons)


def test_who_found_no_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_OWNED_PAYLOADS", 0.0)  # one slice lies in the mean's place
    net = Network(3)
    net.offer_all()
    net.run(30.0)
    told = [event for _, event in net.events if isinstance(event, MissedSlices)]
    assert len(net.committed()) == 3
    assert {event.reason for event in told} == {wire.NO_ROOM}
    assert sum(event.parts for event in told) == 3


def test_it_goes_from_the_machine_to_the_journal() -> None:
    place = Place()
    place.commits.handle(MissedSlices(0, 7, wire.NOT_AWAITED, (), 2))
    ((kind, told),) = place.told
    event = kind(at=START, peer="ada", **told)
    assert event == missed("not_awaited", 7, parts=2)
    check_event(replace(event, owners=()), "ada", START)
    with pytest.raises(ValueError, match="cannot be"):
        check_event(replace(event, owners=("<b>",)), "ada", START)


def missed(reason: str, number: int, parts: int = 1) -> SliceMissed:
    return SliceMissed(
        at=START, peer="ada", fragment=0, round=number, reason=reason, owners=(), parts=parts
    )  # fmt: skip


def test_the_pages_say_how_often_why_and_what_to_do() -> None:
    told = Told()
    told.tell(0, "peer_started", "ada")
    happened = [missed("late", 1), missed("late", 2), missed("not_asked", 2), missed("later version's", 3)]
    told.news.events += happened
    view = fold(happened)
    assert fold(recalled(view.peers["ada"])).peers["ada"].tally.missed == view.peers["ada"].tally.missed
    told.tell(1, "progress", "ada")
    facts = told.at(2)
    assert facts.peers[0].missed == {"late": 2, "not_asked": 1, "later version's": 1}
    assert missed_words(facts.missed) == "2 late, 1 later version's, 1 not asked"
    assert PEER["missed"].number(facts.peers[0]) == missed_words(facts.missed)
    caption, value, _, hint = staleness_told(facts)["missed"]
    assert (caption, value) == ("Slices not counted", missed_words(facts.missed))
    for words in (hint, re.sub(r"\s+", " ", drawn(frame(facts, 400, 60), 400))):
        assert all(part in words for part in MISSED["late"])
