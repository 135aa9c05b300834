"""telemetry: the journal gives back what was written and survives any bytes; the view counts by hand,
is bounded and is the same however the peers' events were interleaved."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.errors import EnvironmentFault
from p2p_co2.telemetry import events as ev
from p2p_co2.telemetry.events import EVENT_TYPES, Event, PeerLeft, Warned
from p2p_co2.telemetry.journal import MAX_LINE_BYTES, Journal, Tail, read_events
from p2p_co2.telemetry.view import MAX_DISTINCT, MAX_NOTABLE, OTHERS, SwarmView, recalled
from p2p_co2.wire.names import is_name, words_of
from tests.event_samples import aborted, applied, between, committed, fold, progress, sample, started

# ---- the journal


def test_an_event_is_one_line_of_json_with_its_kind_first(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    with Journal(path) as journal:
        journal.write(Warned(at=1.5, peer="a", text="two\nlines, ünïcode"))
        journal.write(PeerLeft(at=2.0, peer="a", other="b", reason="silent"))
        assert journal.failed is None
    first, second = path.read_bytes().splitlines()
    assert first == b'{"kind":"warned","at":1.5,"peer":"a","text":"two\\nlines, \\u00fcn\\u00efcode"}'
    assert json.loads(second)["other"] == "b"


def test_a_journal_opened_again_appends_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        journal.write(started("a"))
    with path.open("ab") as file:
        file.write(b'{"kind":"warn')
    with Journal(path) as journal:
        journal.write(started("a", pid=8))
    reader = read_events(path)
    assert list(reader) == [started("a"), started("a", pid=8)]
    assert reader.skipped == {"not JSON": 1}


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_VALUES: dict[object, st.SearchStrategy[typing.Any]] = {
    float: st.floats(allow_nan=False, allow_infinity=False), int: st.integers(-(2**62), 2**62),
    bool: st.booleans(), str: _TEXT,
}  # fmt: skip
for _kind in (int, float, str):
    _VALUES[tuple[_kind, ...]] = st.lists(_VALUES[_kind], max_size=4).map(tuple)  # type: ignore[valid-type]
    _VALUES[dict[str, _kind]] = st.dictionaries(_TEXT, _VALUES[_kind], max_size=4)  # type: ignore[valid-type]


def _events_of(event_type: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(event_type)
    fields = {field.name: _VALUES[hints[field.name]] for field in dataclasses.fields(event_type)}
    if "figures" in fields:  # whose names are checked
        names = st.text("abc._-9", max_size=8).map("f{}".format)
        fields["figures"] = st.dictionaries(names, _VALUES[float], max_size=4)
    return st.builds(event_type, **fields)


ANY_EVENT = st.one_of(*(_events_of(event_type) for event_type in EVENT_TYPES.values()))


@settings(max_examples=100, deadline=None)
@given(events=st.lists(ANY_EVENT, max_size=6))
def test_what_was_written_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "events.jsonl"
    with Journal(path) as journal:
        for event in events:
            journal.write(event)
    reader = read_events(path)
    assert list(reader) == events
    assert not reader.skipped


@settings(max_examples=60, deadline=None)
@given(events=st.lists(ANY_EVENT, min_size=1, max_size=4), data=st.data())
def test_a_tail_reads_the_same_however_the_file_grew(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("tail")
    with Journal(folder / "whole") as journal:
        for event in events:
            journal.write(event)
    content = (folder / "whole").read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    tail, seen = Tail(folder / "grown"), []
    for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True):
        with (folder / "grown").open("ab") as file:
            file.write(content[start:stop])
        seen += tail.new_events()
    assert seen == events
    assert not tail.skipped


_HOSTILE = st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), st.lists
).map(lambda value: json.dumps({"kind": "warned", "at": 1, "peer": value, "text": value}).encode())


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"kind":"warned","at":' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"kind":["warned"],"at":1}', "unknown kind"),
        (b'{"kind":"from_the_future","at":1,"peer":"a"}', "unknown kind"),
        (b'{"kind":"warned","at":1,"peer":"a"}', "missing field"),
        (b'{"kind":"warned","at":1,"peer":"a","text":3}', "wrong type"),
        (b'{"kind":"warned","at":true,"peer":"a","text":""}', "wrong type"),
        (b'{"kind":"warned","at":NaN,"peer":"a","text":""}', "no time"),
        (b'{"kind":"warned","at":null,"peer":"a","text":""}', "no time"),
        (b'{"kind":"warned","at":' + b"9" * 400 + b',"peer":"a","text":""}', "number too large"),
        (b"x" * (MAX_LINE_BYTES + 1), "line too long"),
    ],
)
def test_a_bad_line_is_counted_and_the_next_one_read(tmp_path: Path, line: bytes, cause: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + b'\n\n{"kind":"warned","at":1,"peer":"a","text":"\\ud800","from":"later"}\n')
    reader = read_events(path)
    assert list(reader) == [Warned(at=1.0, peer="a", text="?")]
    assert reader.skipped == {cause: 1}
    tail = Tail(path)
    assert len(tail.new_events()) == 1
    assert tail.skipped == {cause: 1}


def test_a_replaced_shorter_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        journal.write(progress("a", 1.0))
    tail = Tail(path)
    assert len(tail.new_events()) == 1
    path.write_bytes(b'{"kind":"warned","at":1,"peer":"a","text":"x"}\n')
    assert tail.new_events() == [Warned(at=1.0, peer="a", text="x")]


def test_a_full_disk_stops_the_journal_and_not_the_caller() -> None:
    journal = Journal(Path("/dev/full"))
    journal.write(started("a"))
    assert journal.failed is not None
    assert "No space left" in journal.failed
    journal.write(started("a"))
    journal.close()
    journal.close()
    journal.write(started("a"))


def test_the_journal_goes_on_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_co2.telemetry.journal.RETRY_S", 0.0)
    journal = Journal(tmp_path / "events.jsonl")
    journal.write(Warned(at=1.0, peer="a", text="before"))
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        journal.write(Warned(at=2.0, peer="a", text="lost"))
    assert journal.failed is not None
    journal.write(Warned(at=3.0, peer="a", text="after"))
    journal.close()
    assert journal.failed is None
    events = read_events(tmp_path / "events.jsonl")
    assert [event.at for event in events] == [1.0, 3.0]
    assert not events.skipped


def test_a_folder_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="choose a folder"):
        Journal(tmp_path / "file" / "events.jsonl")
    with pytest.raises(EnvironmentFault, match="cannot read"):
        read_events(tmp_path / "absent")
    tail = Tail(tmp_path)
    assert tail.new_events() == []
    assert tail.skipped == {"file unreadable": 1}


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:

        def write(name: str) -> None:
            for number in range(200):
                journal.write(Warned(at=float(number), peer=name, text="x" * number))

        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reader = read_events(path)
    events = list(reader)
    assert len(events) == 800
    assert not reader.skipped
    for name in "abcd":
        assert [event.at for event in events if event.peer == name] == list(map(float, range(200)))


# ---- the view


def test_a_peer_is_called_by_its_own_word_or_by_others_or_by_its_key() -> None:
    view = SwarmView()
    for peer, name in (("A", "anna"), ("B", "anna"), ("C", ""), ("D", "d\x1b[2J"), ("E", "d\u202eann")):
        view.add(sample("peer_started", peer, 1.0, name=name))
    heard = (("F", "fritz"), ("A", "another"), ("G", ""))
    for other, name in heard:
        view.add(ev.PeerJoined(at=2.0, peer="C", other=other, name=name))
    words = {peer: words_of(peer) for peer in "CDEG"}
    assert view.labels() == {"A": "anna~A", "B": "anna~B", "F": "fritz"} | words
    assert all(is_name(word) for word in words.values())
    assert len({words_of(str(number)) for number in range(400)}) > 360


def test_what_is_recalled_folds_to_the_same_peer() -> None:
    sent = sample("fragment_sent", "a", 1.0)
    told = [started("a"), progress("a", 1.0), sent, sent, applied("a", 1, 4), applied("a", 0, 4),
            sample("caught_up", "a", 3.0, fragment=1), sample("link_opened", "a", other="b"),
            *(sample("agreed_measured", "a", 3.0, loss=loss) for loss in (3.0, 2.0, 4.0))]  # fmt: skip
    early = fold(told)
    late = fold(recalled(early.peers["a"]))
    for _ in range(2):  # whoever lags gets it twice
        for event in recalled(early.peers["a"]):
            late.add(event)
        one, other = early.peers["a"], late.peers["a"]
        assert other.tally == one.tally
        for name in (
            "start",
            "progress",
            "sent",
            "arrived",
            "open_links",
            "totals",
            "first_seen_at",
            "agreed",
            "best",
        ):
            assert getattr(one, name) == getattr(other, name), name


_NAMES = st.sampled_from(["a", "b", "c"])
_SMALL = st.integers(0, 2)
_SWARM_EVENT = st.one_of(
    st.builds(started, _NAMES, st.floats(0, 9)),
    st.builds(started, _NAMES, st.floats(0, 9), stage=st.integers(0, 1), stages=st.just(2)),
    st.builds(between, _NAMES, st.floats(0, 9), st.integers(0, 1)),
    st.builds(progress, _NAMES, st.floats(0, 9), loss=st.floats(0, 9), inner_steps=st.integers(0, 50)),
    st.builds(applied, _NAMES, _SMALL, st.integers(0, 40), gap=st.floats(1, 9)),
    st.builds(committed, _NAMES, _SMALL, contributors=st.integers(1, 3), duration_s=st.floats(0, 9)),
    st.builds(aborted, _NAMES, _SMALL, st.sampled_from(["too few", "owner lost"])),
    st.builds(PeerLeft, at=st.floats(0, 9), peer=_NAMES, other=_NAMES, reason=st.sampled_from(["x", "y"])),
    st.builds(ev.PeerJoined, at=st.floats(0, 9), peer=_NAMES, other=_NAMES),
    st.builds(Warned, at=st.floats(0, 1), peer=_NAMES, text=st.sampled_from(["x", "y"])),
    st.builds(
        ev.RoundBegan, at=st.floats(0, 9), peer=_NAMES, fragment=st.just(0), round=_SMALL,
        group=st.just(("a", "b")),
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(events=st.lists(_SWARM_EVENT, max_size=40), order=st.randoms(use_true_random=False))
def test_the_view_does_not_depend_on_how_peers_were_interleaved(
    events: list[Event], order: typing.Any
) -> None:
    queues = {name: [event for event in events if event.peer == name] for name in "abc"}
    mixed: list[Event] = []
    while any(queues.values()):
        mixed.append(queues[order.choice([name for name, queue in queues.items() if queue])].pop(0))
    one, other = fold(events), fold(mixed)
    assert one == other
    for name in ("committed", "abort_reasons", "staleness", "totals"):
        assert getattr(one, name) == getattr(other, name)


def test_the_newest_notable_events_are_kept_in_any_order() -> None:
    events = [Warned(at=float(n), peer=f"p{n}", text=str(n)) for n in range(2 * MAX_NOTABLE)]
    forward, backward = fold(events), fold(reversed(events))
    assert forward.notable == backward.notable
    assert forward.notable == events[MAX_NOTABLE:]
    assert forward.warnings == 2 * MAX_NOTABLE


def test_a_flood_of_reasons_stays_bounded() -> None:
    told = (ev.MessageRefused(at=1.0, peer="a", other="b", reason=f"{n}") for n in range(10 * MAX_DISTINCT))
    view = fold(told)
    refused = view.peers["a"].tally.refused
    assert (len(refused), refused[OTHERS]) == (MAX_DISTINCT + 1, 9 * MAX_DISTINCT)
    assert list(view.peers) == ["a"]


def test_the_view_of_rounds_is_bounded_and_its_totals_are_not() -> None:
    view = SwarmView(rounds_kept=10)
    for number in range(1, 101):
        view.add(committed("a", number))
    assert len(view.rounds) == 10
    assert view.committed == 100
