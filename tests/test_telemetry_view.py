"""The view: counted by hand, bounded, and the same however the peers' events were interleaved."""

from __future__ import annotations

import math
import typing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.telemetry.events import (
    Event,
    LinkLost,
    LinkOpened,
    MessageRefused,
    PeerFinished,
    PeerJoined,
    PeerLeft,
    RoundBegan,
    Warned,
)
from p2p_co2.telemetry.peer_view import MAX_DISTINCT, MAX_HISTORY_POINTS, OTHERS, LossHistory
from p2p_co2.telemetry.view import MAX_NOTABLE, SwarmView, fold, mean_of
from tests.event_samples import aborted, applied, committed, progress, started

# ---- by hand


def test_a_round_counts_once_although_every_member_reports_it() -> None:
    view = fold(
        [
            RoundBegan(at=0, peer="a", fragment=0, round=1, group=("a", "b", "c"), waited_s=0, deadline_s=1),
            committed("a", 1, duration_s=1.0),
            committed("b", 1, duration_s=3.0),
            committed("c", 1, duration_s=0.0),
            *(aborted(peer, 2, "too few") for peer in "abc"),
        ]
    )
    assert (view.committed, view.abort_reasons) == (1, {"too few": 1})
    first = view.rounds[0, 1]
    assert (first.outcome, first.group, first.contributors, first.partial, first.duration_s) == (
        "committed", ("a", "b", "c"), 3, 0, 3.0,
    )  # fmt: skip
    assert view.rounds[0, 2].outcome == "aborted"


def test_a_round_tried_again_counts_every_abort_and_the_commit() -> None:
    view = fold(
        [
            *(aborted(peer, 1, why) for why in ("owner lost", "too few") for peer in "ab"),
            *(committed(peer, 1) for peer in "ab"),
        ]
    )
    assert (view.committed, view.abort_reasons) == (1, {"owner lost": 1, "too few": 1})
    assert view.rounds[0, 1].missed_by == ()


def test_a_member_that_lost_only_the_answer_missed_a_committed_round() -> None:
    view = fold([committed("a", 1), committed("b", 1), aborted("c", 1, "coordinator silent")])
    assert (view.committed, view.abort_reasons.total()) == (1, 0)
    assert view.rounds[0, 1].missed_by == ("c",)


def test_histograms_are_over_all_peers() -> None:
    view = fold([applied("a", 0, 3), applied("b", 1, 9, gap=1.5), applied("b", 0, 3, gap=math.nan)])
    assert view.staleness == {0: 2, 1: 1}
    assert view.sync_delay_steps == {3: 2, 9: 1}
    assert (mean_of(view.sync_delay_steps), view.gap_max) == (5.0, 1.5)
    assert view.peers["b"].last_staleness == 0


def test_a_resumed_peer_keeps_the_counters_of_its_earlier_process() -> None:
    view = fold(
        [
            started("a"),
            progress("a", 1.0, inner_steps=10),
            PeerFinished(at=2.0, peer="a", reason="interrupted", digest="d1", versions=(1, 0)),
            started("a", at=3.0, pid=8),
            progress("a", 4.0, inner_steps=5),
        ]
    )
    peer = view.peers["a"]
    assert (peer.totals.inner_steps, peer.totals.up_bytes, peer.pid, peer.processes) == (15, 1000, 8, 2)
    assert (peer.finished, peer.digest, peer.utilisation) == (False, "", 0.9)


def test_nobody_works_more_than_all_of_the_time() -> None:
    """One that says so would set the mean of the swarm."""
    view = fold([started("a"), replace(progress("a", 1.0, inner_steps=1), train_s=1e15, wall_s=1e-300)])
    assert view.peers["a"].utilisation == 1.0


def test_who_left_and_why() -> None:
    view = fold([started("a"), PeerLeft(at=5.0, peer="a", other="b", reason="silent for 6 s")])
    assert not view.peers["b"].started
    assert view.peers["b"].left_reason == "silent for 6 s"
    view.add(PeerJoined(at=6.0, peer="a", other="b"))
    assert view.peers["b"].left_reason == ""
    view.add(PeerFinished(at=7.0, peer="b", reason="the run ended", digest="d", versions=()))
    assert view.peers["b"].left_reason == "the run ended"


def test_links_keep_the_last_carrier_and_say_what_was_lost() -> None:
    view = fold(
        [
            LinkOpened(at=0, peer="a", other="b", carrier="grpc"),
            LinkLost(at=1, peer="a", other="b", carrier="grpc", reason="reset"),
        ]
    )
    assert (view.peers["a"].carriers, view.peers["a"].lost_links) == ({"b": "grpc"}, {"b": "reset"})
    view.add(LinkOpened(at=2, peer="a", other="b", carrier="libp2p", reason="grpc refused"))
    assert (view.peers["a"].carriers, view.peers["a"].lost_links) == ({"b": "libp2p"}, {})


def test_labels_are_unique_and_names_stay_where_they_can() -> None:
    view = fold(
        [started("id-000001", name="ada"), started("id-000002", name="bob"), started("id-000003", name="bob")]
    )
    view.add(started("id-000004"))
    assert view.labels() == {
        "id-000001": "ada",
        "id-000002": "bob~000002",
        "id-000003": "bob~000003",
        "id-000004": "~000004",
    }


def test_an_unknown_loss_is_no_point_and_not_the_latest() -> None:
    peer = fold([progress("a", 1.0, loss=2.0), progress("a", 2.0, loss=math.nan)]).peers["a"]
    assert (peer.loss, len(peer.history.points)) == (2.0, 1)


# ---- laws


@given(count=st.integers(1, 5 * MAX_HISTORY_POINTS))
@settings(max_examples=15, deadline=None)
def test_a_long_history_is_bounded_and_unbiased(count: int) -> None:
    history = LossHistory()
    for number in range(count):
        history.add(float(number), number / 10, float(number))
    assert len(history.points) < MAX_HISTORY_POINTS
    whole = len(history.points) * history.stride
    assert 0 <= count - whole < history.stride
    mean = sum(loss for _, _, loss in history.points) / len(history.points)
    assert mean == pytest.approx((whole - 1) / 2)


_NAMES = st.sampled_from(["a", "b", "c"])
_SMALL = st.integers(0, 2)
_SWARM_EVENT = st.one_of(
    st.builds(started, _NAMES, st.floats(0, 9)),
    st.builds(progress, _NAMES, st.floats(0, 9), loss=st.floats(0, 9), inner_steps=st.integers(0, 50)),
    st.builds(applied, _NAMES, _SMALL, st.integers(0, 40), gap=st.floats(1, 9)),
    st.builds(committed, _NAMES, _SMALL, contributors=st.integers(1, 3), duration_s=st.floats(0, 9)),
    st.builds(aborted, _NAMES, _SMALL, st.sampled_from(["too few", "owner lost"])),
    st.builds(PeerLeft, at=st.floats(0, 9), peer=_NAMES, other=_NAMES, reason=st.sampled_from(["x", "y"])),
    st.builds(PeerJoined, at=st.floats(0, 9), peer=_NAMES, other=_NAMES),
    st.builds(Warned, at=st.floats(0, 1), peer=_NAMES, text=st.sampled_from(["x", "y"])),
    st.builds(
        RoundBegan,
        at=st.floats(0, 9),
        peer=_NAMES,
        fragment=st.just(0),
        round=_SMALL,
        group=st.just(("a", "b")),
        waited_s=st.just(0.0),
        deadline_s=st.just(1.0),
    ),
)


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
    assert (one.committed, one.abort_reasons, one.labels()) == (
        other.committed,
        other.abort_reasons,
        other.labels(),
    )
    incremental = SwarmView()
    for event in events:
        incremental.add(event)
    assert incremental == one


def test_the_newest_notable_events_are_kept_in_any_order() -> None:
    events = [
        Warned(at=float(number), peer=f"p{number}", text=str(number)) for number in range(2 * MAX_NOTABLE)
    ]
    forward, backward = fold(events), fold(reversed(events))
    assert forward.notable == backward.notable
    assert [note[3] for note in forward.notable] == events[MAX_NOTABLE:]
    assert forward.warnings == 2 * MAX_NOTABLE


# ---- faults


def test_a_flood_of_refusals_stays_bounded() -> None:
    view = fold(
        MessageRefused(at=1.0, peer="a", other=f"stranger {number}", reason="bad signature")
        for number in range(10 * MAX_DISTINCT)
    )
    peer = view.peers["a"]
    assert peer.refused == {"bad signature": 10 * MAX_DISTINCT}
    assert len(peer.refused_from) == MAX_DISTINCT + 1
    assert peer.refused_from[OTHERS] == 9 * MAX_DISTINCT
    assert list(view.peers) == ["a"]


def test_nothing_happened_is_a_view_too() -> None:
    view = fold([])
    assert (view.committed, view.abort_reasons.total(), view.started_at, view.last_at) == (0, 0, None, None)
    assert (view.gap_max, view.labels(), mean_of(view.staleness)) == (1.0, {}, None)
