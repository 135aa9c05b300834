"""reports: what a peer tells observers, and what of it an observer believes."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_co2.config import RunConfig, stage_digest
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.node import reporting
from p2p_co2.protocol.reports import (
    ANSWER_BYTES,
    MAX_ANSWERS_PER_S,
    MAX_EVENT_BYTES,
    MAX_EVENTS_KEPT,
    MAX_SIGNATURES,
    REPORT_CONTEXT,
    Poller,
    Responder,
    check_event,
    open_report,
    read_decision,
)
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.journal import event_line
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.limits import MAX_STAGES
from p2p_co2.wire.messages_pb2 import Decision, Outcome, Report, ReportRequest
from tests import event_samples as samples
from tests.certificates import certify
from tests.event_samples import fold

RUN = bytes(range(32))
A, B, C = (Identity.generate() for _ in range(3))
ASKER = Identity.generate().peer_id
NOW = 1_800_000_000.0


def progress(number: int, who: Identity = A, **changes: Any) -> ev.Progress:
    made = samples.progress(who.peer_id, NOW + number, inner_steps=number)
    figures = {"train_s": 0.9 * number, "wall_s": float(number), "versions": (number // 5,), **changes}
    return replace(made, **figures)


def applied(number: int, who: Identity = A) -> ev.FragmentApplied:
    return replace(samples.applied(who.peer_id, number % 3, number % 5), at=NOW + number, version=number)


def committed(number: int, who: Identity, coordinator: Identity) -> ev.RoundCommitted:
    return replace(samples.committed(who.peer_id, number), at=NOW + number, coordinator=coordinator.peer_id)


def decision(number: int, coordinator: Identity, members: dict[str, float], run: bytes = RUN) -> Decision:
    """A commit that all of A, B and C that are its members signed."""
    outcome = Outcome(run=run, coordinator=coordinator.peer_id, state_digest=bytes(32), live=len(members))
    outcome.key.fragment, outcome.key.round, outcome.key.attempt = 0, number, bytes(16)
    for peer, weight in sorted(members.items()):
        outcome.members.add(peer=peer, weight=weight)
    part = outcome.parts.add(start_block=0, stop_block=10, digest=bytes(32))
    for peer, weight in sorted(members.items()):
        part.contributors.add(peer=peer, weight=weight)
    return certify(outcome, A, B, C)


def responder(who: Identity = A, process: int = 7) -> Responder:
    return Responder(who, RUN, process)


class Talk:
    """A poller that asks responders, second by second."""

    def __init__(self, *responders: tuple[Identity, Responder]) -> None:
        self.responders = {who.peer_id: table for who, table in responders}
        self.poller = Poller(RUN)
        self.poller.listed(self.responders, 0.0)
        self.now = 0.0

    def turn(self, offset_s: float = 0.0) -> list[ev.Event]:
        """Ask everybody once; the events that came."""
        self.now += 1.0
        for peer, question in self.poller.due(self.now):
            unix_now = NOW + 9000.0 + self.now
            answer = self.responders[peer].answer(question, ASKER, self.now, unix_now + offset_s)
            self.poller.answered(peer, answer, self.now, unix_now)
        return self.poller.take().events


def sealed(report: Report, who: Identity = A) -> bytes:
    return who.seal(REPORT_CONTEXT, report.SerializeToString())


def lines(*records: object) -> bytes:
    return zlib.compress(b"".join(json.dumps(record).encode() + b"\n" for record in records))


# ---- by hand


def test_an_observer_hears_what_happened_and_then_only_what_is_new() -> None:
    table = responder()
    for number in range(3):
        table.see(progress(number))
    talk = Talk((A, table))
    assert talk.turn() == [progress(number) for number in range(3)]
    assert talk.turn() == []
    table.see(progress(3))
    assert talk.turn() == [progress(3)]


def test_a_late_observer_learns_what_an_early_one_knows() -> None:
    """What fell out of the ring is told as one event, and comes to the same."""
    table, everything = responder(), []
    for number in range(1, MAX_EVENTS_KEPT + 500):
        event = progress(number) if number % 4 else applied(number)
        everything.append(event)
        table.see(event)
    talk, told = Talk((A, table)), []
    while news := talk.turn():
        told += news
    assert isinstance(told[0], ev.Recalled)
    late, early = fold(told).peers[A.peer_id], fold(everything).peers[A.peer_id]
    for name in ("totals", "tally", "progress", "arrived"):
        assert getattr(late, name) == getattr(early, name), name


def test_a_restarted_peer_is_heard_from_its_beginning() -> None:
    first = responder(process=1)
    for number in range(5):
        first.see(progress(number))
    talk = Talk((A, first))
    assert len(talk.turn()) == 5
    second = responder(process=2)
    second.see(progress(9))
    talk.responders[A.peer_id] = second
    assert talk.turn() == [progress(9)]


def test_times_of_a_peer_with_a_wrong_clock_are_brought_to_ours() -> None:
    table = responder()
    table.see(progress(1, at=NOW + 500.0))
    (event,) = Talk((A, table)).turn(offset_s=500.0)
    assert event.at == NOW
    table.see(progress(2, at=NOW + 9090.0))
    again = Talk((A, table))
    again.now = 60.0  # one who asks for what was told already is answered more rarely
    (event,) = again.turn()[-1:]
    assert event.at <= NOW + 9062.0


# ---- what is counted


def weights_told(*tables: tuple[Identity, Responder]) -> list[dict[str, float]]:
    talk = Talk(*tables)
    told = [event for _ in range(4) for event in talk.turn()]
    return [event.weights for event in told if isinstance(event, ev.RoundCounted)]


def test_a_commit_that_two_tellers_signed_counts_once() -> None:
    members = {A.peer_id: 300.0, B.peer_id: 100.0}
    tables = ((A, responder(A)), (B, responder(B)))
    for who, table in tables:
        table.see(committed(1, who, coordinator=A))
        table.remember(0, 1, decision(1, A, members))
    assert weights_told(*tables) == [members]


def test_a_coordinator_need_not_be_a_member() -> None:
    members = {A.peer_id: 300.0, B.peer_id: 100.0}
    tables = tuple((who, responder(who)) for who in (A, B, C))
    for who, table in tables[:2]:
        table.see(committed(1, who, coordinator=C))
        table.remember(0, 1, decision(1, C, members))
    talk = Talk(*tables)
    told = [event for _ in range(4) for event in talk.turn()]
    assert [event.weights for event in told if isinstance(event, ev.RoundCounted)] == [members]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_certificate_of_strangers_counts_nothing(is_there: bool) -> None:
    """Keys are free: only what peers signed that tell of the round themselves is believed."""
    strangers = [Identity.generate() for _ in range(3)]
    outcome = Outcome(run=RUN, coordinator=A.peer_id, state_digest=bytes(32), live=3)
    outcome.key.fragment, outcome.key.round, outcome.key.attempt = 0, 1, bytes(16)
    for peer in sorted(one.peer_id for one in strangers):
        outcome.members.add(peer=peer, weight=1e9)
    part = outcome.parts.add(start_block=0, stop_block=10, digest=bytes(32))
    part.contributors.add(peer=strangers[0].peer_id, weight=1e9)
    tables = ((A, responder(A)), (B, responder(B)), (C, responder(C)))
    for who, table in tables:
        table.see(committed(1, who, coordinator=A))
    tables[2][1].remember(0, 1, certify(outcome, *strangers))
    members = {A.peer_id: 300.0, B.peer_id: 100.0}
    if is_there:
        tables[0][1].remember(0, 1, decision(1, A, members))
    assert weights_told(*tables) == [members] * is_there


def test_a_decision_of_another_run_or_with_a_wrong_signature_counts_nothing() -> None:
    members = {A.peer_id: 300.0, B.peer_id: 100.0}
    forged = decision(1, A, members)
    forged.votes[0].signature = bytes(64)
    for bad in (forged, decision(1, A, members, run=bytes(32))):
        tables = ((A, responder(A)), (B, responder(B)))
        for who, table in tables:
            table.see(committed(1, who, coordinator=A))
            table.remember(0, 1, bad)
        assert weights_told(*tables) == []


@pytest.mark.parametrize("is_own", [True, False])
def test_a_stage_counts_by_certificates_of_its_own_group(is_own: bool) -> None:
    """Two stages make a round of the same number: each has a certificate under its own digest."""
    held = ((A, 0), (B, 0), (C, 1))
    tables = tuple((who, responder(who)) for who, _ in held)
    for (who, stage), (_, table) in zip(held, tables, strict=True):
        members = {C.peer_id: 7.0} if stage else {A.peer_id: 300.0, B.peer_id: 100.0}
        group = stage_digest(RUN, stage if is_own else 1 - stage, 2)
        table.see(samples.started(who.peer_id, NOW, stage=stage, stages=2))
        table.see(replace(committed(1, who, coordinator=who), group_size=len(members)))
        table.remember(0, 1, decision(1, C if stage else A, members, run=group))
    told = [{C.peer_id: 7.0}, {A.peer_id: 300.0, B.peer_id: 100.0}] if is_own else []
    found = weights_told(*tables)
    assert sorted(found, key=len) == told


def test_a_stage_that_no_run_has_is_refused() -> None:
    told = samples.started(A.peer_id, NOW, stage=MAX_STAGES, stages=2)
    with pytest.raises(ValueError, match="impossible number"):
        check_event(told, A.peer_id, NOW)


def test_a_peers_own_word_of_a_count_is_refused() -> None:
    counted = ev.RoundCounted(at=NOW, peer=A.peer_id, fragment=0, round=1, weights={A.peer_id: 9e9})
    table = responder()
    table.see(counted)
    assert Talk((A, table)).turn() == []
    report = Report(run=RUN, peer=A.peer_id, process=1, first=1, last=1, newest=1, sent_at=NOW)
    report.events = lines(counted.to_json())
    opened = open_report(sealed(report), A.peer_id, RUN)
    assert opened.events == []
    assert opened.refused.total() == 1


# ---- hostile


@pytest.mark.parametrize(
    "nonsense",
    [
        {"tokens": -1}, {"tokens": 2**60}, {"tokens_per_s": None}, {"tokens_per_s": 1e300}, {"up_bytes": -5},
        {"wall_s": -1.0}, {"phase": "x" * 5000}, {"versions": [1] * 5000}, {"at": 0.0}, {"at": 1e18},
        {"peer": B.peer_id}, {"loss": 1e30}, {"versions": [-3]},
    ],
)  # fmt: skip
def test_nonsense_is_counted_and_goes_no_further(nonsense: dict[str, object]) -> None:
    record = {**progress(1).to_json(), **nonsense}
    report = Report(run=RUN, peer=A.peer_id, process=1, first=1, last=2, newest=2, sent_at=NOW)
    report.events = lines(record, progress(2).to_json())
    opened = open_report(sealed(report), A.peer_id, RUN)
    assert opened.events == [progress(2)]
    assert opened.refused.total() == 1


@pytest.mark.parametrize(
    "figures",
    [{"<b>": 1.0}, {"": 1.0}, {"x" * 41: 1.0}, {"accuracy": 1e300}, {"accuracy": "high"},
     {f"figure{number}": 1.0 for number in range(17)}],
)  # fmt: skip
def test_figures_of_a_measurement_may_be_negative_but_not_of_any_name_or_number(
    figures: dict[str, object],
) -> None:
    good = ev.AgreedMeasured(
        at=NOW, peer=A.peer_id, loss=-1.0, position=1.0, tokens=1, duration_s=0.1, figures={"log.odds": -3.0}
    )
    report = Report(run=RUN, peer=A.peer_id, process=1, first=1, last=2, newest=2, sent_at=NOW)
    report.events = lines({**good.to_json(), "figures": figures}, good.to_json())
    opened = open_report(sealed(report), A.peer_id, RUN)
    assert opened.events == [good]
    assert opened.refused.total() == 1


def test_a_peer_that_cannot_be_is_not_let_into_the_view() -> None:
    link = ev.LinkOpened(at=NOW, peer=A.peer_id, other="<script>alert(1)</script>", carrier="grpc")
    report = Report(run=RUN, peer=A.peer_id, process=1, first=1, last=1, newest=1, sent_at=NOW)
    report.events = lines(link.to_json())
    assert open_report(sealed(report), A.peer_id, RUN).events == []


def test_a_report_that_unpacks_to_too_much_is_refused() -> None:
    report = Report(run=RUN, peer=A.peer_id, process=1, first=1, last=1, newest=1, sent_at=NOW)
    report.events = zlib.compress(b"0" * (1 << 24))
    with pytest.raises(RemoteProtocolError, match="too large"):
        open_report(sealed(report), A.peer_id, RUN)


def test_a_report_of_somebody_else_or_damaged_is_refused() -> None:
    report = Report(run=RUN, peer=A.peer_id, process=1, newest=0, sent_at=NOW)
    for data in (sealed(report, B), sealed(report)[:-3], b"", b"\0" * 70):
        with pytest.raises(RemoteProtocolError):
            open_report(data, A.peer_id, RUN)
    for field, value in (("sent_at", math.nan), ("again_in_s", -1.0), ("newest", 2**62)):
        bad = Report()
        bad.CopyFrom(report)
        setattr(bad, field, value)
        with pytest.raises(RemoteProtocolError):
            open_report(sealed(bad), A.peer_id, RUN)


def test_a_desk_refuses_requests_that_break_the_rules() -> None:
    for question in (b"\xff" * 10, b"x" * 9000, ReportRequest(run=bytes(32)).SerializeToString()):
        with pytest.raises(RemoteProtocolError):
            responder().answer(question, PeerId(ASKER), 0.0, NOW)


# ---- bounds


def checked_of(told: list[int], sent: list[Decision], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many certificates are checked of one report that tells of the rounds ``told``."""
    checked: list[Decision] = []

    def read(one: Decision, run: bytes, at: float) -> tuple[ev.RoundCounted, frozenset[str]]:
        checked.append(one)
        return read_decision(one, run, at)

    monkeypatch.setattr("p2p_co2.protocol.reports.read_decision", read)
    count = len(told)
    report = Report(
        run=RUN,
        peer=A.peer_id,
        process=1,
        first=1,
        last=count,
        newest=count,
        sent_at=NOW + 100,
        decisions=sent,
    )
    report.events = zlib.compress(b"".join(event_line(committed(number, A, A)) for number in told))
    poller = Poller(RUN)
    poller.listed([A.peer_id], 0.0)
    poller.answered(A.peer_id, sealed(report), 1.0, NOW + 200)
    return len(checked)


def test_certificates_are_checked_of_rounds_that_were_told_only_and_not_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = {one.peer_id: 1.0 for one in (A, B, C)}
    sent = [decision(number, A, members) for number in range(1, 101)]
    assert checked_of([], sent, monkeypatch) == 0
    assert checked_of([5, 7], sent, monkeypatch) == 2
    assert checked_of(list(range(1, 101)), sent, monkeypatch) == MAX_SIGNATURES // 3


def test_who_says_that_there_is_more_and_brings_nothing_is_not_asked_at_once() -> None:
    poller = Poller(RUN)
    poller.listed([A.peer_id], 0.0)
    report = Report(run=RUN, peer=A.peer_id, process=1, first=1, last=0, newest=9, sent_at=NOW)
    poller.answered(A.peer_id, sealed(report), 1.0, NOW)
    assert poller.due(1.0) == []
    assert poller.due(3.0) != []


def test_an_asker_that_always_asks_for_the_whole_story_is_bounded_and_a_newcomer_is_not_held_up() -> None:
    table = responder()
    for number in range(1, 2000):
        table.see(progress(number))

    def told_bytes(asker: PeerId, now: float, after: int = 0) -> int:
        question = ReportRequest(run=RUN, process=7, after=after).SerializeToString()
        opened = open_report(table.answer(question, asker, now, NOW + 2000), A.peer_id, RUN)
        return sum(len(event_line(event)) for event in opened.events)

    greedy = [told_bytes(ASKER, 10 + tick / 50) for tick in range(500)]  # for ten seconds
    assert 0 < sum(map(bool, greedy)) <= 6
    assert told_bytes(B.peer_id, 21.0) == max(greedy)
    crowd = [Identity.generate().peer_id for _ in range(50)]
    answered = sum(told_bytes(asker, 30.0) for asker in crowd)
    assert answered <= MAX_EVENT_BYTES + MAX_ANSWERS_PER_S * ANSWER_BYTES


def test_an_up_to_date_asker_that_hurries_is_told_to_wait() -> None:
    table = responder()
    question = ReportRequest(run=RUN, process=7, after=0).SerializeToString()
    table.answer(question, ASKER, 10.0, NOW)
    assert open_report(table.answer(question, ASKER, 10.1, NOW), A.peer_id, RUN).report.again_in_s > 0
    assert open_report(table.answer(question, ASKER, 10.5, NOW), A.peer_id, RUN).report.again_in_s == 0


def test_a_peer_that_cannot_be_reached_is_asked_ever_more_rarely() -> None:
    poller, asked_at = Poller(RUN), []
    poller.listed([A.peer_id], 0.0)
    for tick in range(1200):
        for peer, _ in poller.due(tick / 10):
            asked_at.append(tick / 10)
            poller.failed(peer, "refused", tick / 10)
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert gaps == sorted(gaps)
    assert max(gaps) <= 33.0


class Starting:
    """A node whose carriers take their time."""

    def __init__(self) -> None:
        self.membership = SimpleNamespace(live=dict[PeerId, object]())
        self.running, self.told = False, asyncio.Event()

    @property
    def links(self) -> SimpleNamespace:
        if not self.running:
            raise LocalProtocolError("the node is not running")
        return SimpleNamespace(carriers_used=lambda: {B.peer_id: "grpc"}, traffic={})

    def report(self, *_: object, **__: object) -> None:
        self.told.set()


def test_the_links_of_a_node_that_runs_late_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "HEARTBEAT_S", 1e-3)
    monkeypatch.setattr(reporting, "ways_to_peers", lambda *_: asyncio.sleep(0, {}))

    async def measured() -> None:
        network = cast(Any, SimpleNamespace(identity=A, run=RunConfig(), p2p=None))
        service = reporting.ReportService(network, asyncio.get_running_loop(), lambda *_: None)
        node = Starting()
        service.measure(cast(Any, node))
        await asyncio.sleep(0.05)
        node.running = True
        node.membership.live[B.peer_id] = SimpleNamespace(round_trips_s=())
        await asyncio.wait_for(node.told.wait(), 5.0)
        await service.close()

    asyncio.run(measured())
