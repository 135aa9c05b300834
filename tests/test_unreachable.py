"""Peers that are there and cannot be reached, told from those that are gone."""

from __future__ import annotations

import pytest

from p2p_co2.node import unreachable as room
from p2p_co2.node.unreachable import Unreachable
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord

B = PeerId("b")


def record(expires_at: float, peer: str = "b") -> PeerRecord:
    return PeerRecord(peer=peer, expires_at=expires_at)


def test_only_a_peer_that_renews_its_record_is_told_of_and_once() -> None:
    known = Unreachable()
    assert known.listed([record(60.0)]) == []
    known.failed(B, "grpc: refused")
    assert known.listed([record(60.0)]) == []
    assert known.listed([record(60.0)]) == []
    assert known.listed([record(80.0)]) == [(B, "grpc: refused")]
    known.failed(B, "grpc: refused again")
    assert known.listed([record(100.0)]) == []


def test_a_peer_that_was_met_is_told_of_again() -> None:
    known = Unreachable()
    for expires_at in (60.0, 200.0):
        known.failed(B, "no answer")
        assert known.listed([record(expires_at)]) == []
        assert known.listed([record(expires_at + 20)]) == [(B, "no answer")]
        known.met(B)
    assert known.listed([record(400.0)]) == []


def test_somebody_is_unmet_who_renews_a_record_and_is_not_heard() -> None:
    known = Unreachable()
    for expires_at, live, unmet in (
        (60.0, (), False),  # it may be about to answer, or dead
        (60.0, (), False),
        (80.0, (B,), False),
        (100.0, (B,), False),
        (120.0, (), False),  # it was heard until now
        (140.0, (), True),
        (160.0, (), True),
        (160.0, (B,), False),
    ):
        known.listed([record(expires_at)], live)
        assert known.is_somebody_unmet == unmet, expires_at
    known.listed([], ())
    assert not known.is_somebody_unmet


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PEERS", 2)
    known = Unreachable()
    for name in "abcd":
        known.failed(PeerId(name), "no answer")
    known.listed([record(60.0, name) for name in "abcd"])
    assert [peer for peer, _ in known.listed([record(80.0, name) for name in "abcd"])] == ["a", "b"]
