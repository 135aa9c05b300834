"""What each peer of a stage sends to each of the next; the machine's scenarios are in tests/scenarios."""

from __future__ import annotations

import pytest

from p2p_co2.protocol.pipeline.routes import shares
from p2p_co2.wire.identity import PeerId


def test_shares_are_a_permutation_for_equals() -> None:
    peers = [PeerId(f"p{i}") for i in range(5)]
    rates, behind = dict.fromkeys(peers, 1.0), {PeerId(f"q{i}"): 2.0 for i in range(5)}
    chosen = []
    for peer in peers:
        mine = shares(peer, rates, behind, b"round 1")
        assert list(mine.values()) == [1.0]
        chosen += mine
    assert len(set(chosen)) == 5
    assert chosen != [next(iter(shares(peer, rates, behind, b"round 2"))) for peer in peers]


def test_shares_follow_speed() -> None:
    rates = {PeerId("a"): 1.0, PeerId("b"): 3.0}
    behind = {PeerId("x"): 0.0, PeerId("y"): 2.0, PeerId("z"): 2.0}
    total = dict.fromkeys(behind, 0.0)
    for peer, rate in rates.items():
        for receiver, share in shares(peer, rates, behind, b"seed").items():
            total[receiver] += share * rate / 4
    assert all(abs(part - 1 / 3) < 0.06 for part in total.values()), total
    assert shares(PeerId("a"), rates, {}, b"") == {}


@pytest.mark.parametrize("rate", [1e308, 5e-324, 0.0])
def test_shares_add_up_whatever_rate_others_claim(rate: float) -> None:
    rates = {PeerId("a"): 1.0, PeerId("b"): rate, PeerId("c"): rate}
    behind = {PeerId("x"): rate, PeerId("y"): 3.0, PeerId("z"): rate}
    for peer in rates:
        assert sum(shares(peer, rates, behind, b"seed").values()) == pytest.approx(1.0)
