"""What peers' work is worth by this peer's own: the score by hand, its law, newcomers, and what follows."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.protocol.rounds.events import Distrusted, Likeness
from p2p_co2.protocol.rounds.repute import LOW, Repute, truth_of
from p2p_co2.scores import FADES, KNOWN_AFTER, Scores
from p2p_co2.tensors.aggregation import get_rule, reduce_slices
from p2p_co2.tensors.aggregation.scored import borne_out
from p2p_co2.tensors.codec import get_codec
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_PEERS

CODEC = get_codec("fp32")
SIZE = 64 * CODEC.block_values


def scored(**cosines: list[float]) -> Scores:
    scores = Scores()
    for peer, told in cosines.items():
        for one in told:
            scores.tell(peer, one)
    return scores


def test_standing_by_hand() -> None:
    scores = scored(b=[0.4], c=[0.2, 0.2], d=[0.05], e=[-0.3], f=[0.3])
    by_hand = {"b": 2.0, "c": 1.0, "d": 0.25, "e": 0.0, "f": 1.5}
    assert scores.standing("bcdef") == scores.standing() == pytest.approx(by_hand)
    faded = (0.4 * FADES - 0.2) / (FADES + 1)
    assert scored(b=[0.4, -0.2], c=[0.5, 0.1], d=[0.1, 0.5]).standing("bcd")["b"] > 0.9  # it may be chance,
    assert scored(b=[0.4, -0.2], c=[0.3, 0.3], d=[0.3, 0.3]).standing("bcd")["b"] < 0.4  # not more than usual
    assert scored(b=[0.4, -0.2], c=[faded / 2], d=[0.01]).standing("bcd")["b"] == pytest.approx(2.0)
    scores.tell("g", -0.3, noise=0.2)
    assert scores.standing("bcdg")["g"] == pytest.approx(0.1 / 0.2)


def test_where_all_is_noise_nobody_stands_low() -> None:
    random_, scores = random.Random(0), Scores()
    low = 0
    for _ in range(200):
        for peer in "bcdefgh":
            scores.tell(peer, random_.gauss(0.001, 0.01), noise=0.01)
        low += sum(one < LOW for one in scores.standing().values())
    assert low < 0.02 * 7 * 200


def test_nobody_stands_low_where_most_differ_or_nothing_is_known() -> None:
    assert scored(b=[-0.4], c=[-0.2], d=[0.3]).standing("bcd") == dict.fromkeys("bcd", 1.0)
    assert Scores().standing("bc") == {"b": 1.0, "c": 1.0}
    assert scored(b=[0.4], c=[0.4]).standing("bcx")["x"] == 1.0


@given(st.lists(st.floats(0.1, 0.2), min_size=3, max_size=9), st.data())
def test_whatever_fewer_than_half_send_the_honest_stand_where_they_did(
    honest: list[float], data: st.DataObject
) -> None:
    lies = data.draw(st.lists(st.floats(-1, 1), max_size=len(honest) - 1))
    scores = Scores()
    for index, one in enumerate([*honest, *lies]):
        scores.tell(str(index), one)
    worth = scores.standing([str(index) for index in range(len(honest) + len(lies))])
    assert all(0.49 < worth[str(index)] < 2.01 for index in range(len(honest)))
    assert all(worth[str(len(honest) + at)] == 0.0 for at, one in enumerate(lies) if one <= 0)


def test_liars_gain_nothing_where_honest_peers_are_late() -> None:
    scores = scored(b=[0.3], c=[0.2], d=[0.3], e=[0.2], x=[-0.3], y=[-0.3], z=[-0.3])
    assert scores.standing("bxyz") == pytest.approx({"b": 1.5, "x": 0.0, "y": 0.0, "z": 0.0})


def test_memory_is_bounded_and_the_longest_silent_are_forgotten() -> None:
    scores = Scores()
    for index in range(MAX_PEERS + 9):
        scores.tell(str(index), 0.5)
    assert len(scores.standing()) == MAX_PEERS
    assert "8" not in scores.standing()


def test_who_is_new() -> None:
    known, new = [0.1] * KNOWN_AFTER, [0.1] * (KNOWN_AFTER // 2 - 1)
    assert scored(b=known, c=known, d=new).newcomers("bcdx") == {"d", "x"}
    assert scored(b=new, c=new).newcomers("bc") == set()
    assert scored(b=[*known, *known], c=known).newcomers("bc") == set()


# ---- the rule


def slice_of(seed: int, size: float = 1.0, noise: float = 2.0) -> bytes:
    """A common direction, and noise of one's own."""
    common = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    own = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    return bytes(CODEC.encode(size * (common + noise * own)).numpy())


def test_who_works_against_the_averaging_peer_counts_nothing_from_the_first_mean_on() -> None:
    rule = get_rule("scored", me="a")
    parts = [(peer, 1.0, slice_of(seed, size)) for peer, seed, size in
             (("a", 1, 1), ("b", 2, 1), ("c", 3, 1), ("d", 4, -1), ("e", 5, -1))]  # fmt: skip
    mean = reduce_slices(rule, CODEC, parts[::-1])
    assert mean.standing[-2:] == (pytest.approx(1.0, abs=0.3), math.inf)
    assert mean.standing[:2] == (0.0, 0.0)
    assert min(mean.weights[2:]) > 0.5
    assert max(mean.weights[:2]) == math.ulp(0.0)  # listed, so that they keep what contributors have
    values = CODEC.decode(torch.frombuffer(bytearray(mean.encoded), dtype=torch.uint8))
    assert float(values @ CODEC.decode(torch.frombuffer(bytearray(parts[0][2]), dtype=torch.uint8))) > 0


@pytest.mark.parametrize(
    ("standing", "most"), [(0.0, 0.0), (0.25, 0.25), (0.5, 1.0), (1.0, 1.0), (2.0, 4.0), (math.inf, math.inf)]
)
def test_what_a_standing_bears_out(standing: float, most: float) -> None:
    assert borne_out(standing) == most


def test_a_boast_gains_nothing_and_twice_the_work_counts_twice() -> None:
    def mean_of(scale: float, claim: float) -> float:
        """What d counts with beside three others, after a while."""
        rule = get_rule("scored", me="a")
        for turn in range(KNOWN_AFTER):
            parts = [(peer, 1.0, slice_of(9 * turn + seed)) for seed, peer in enumerate("abc")]
            common = slice_of(9 * turn + 3, scale, noise=2.0 / scale)
            weights = reduce_slices(rule, CODEC, [*parts, ("d", claim, common)]).weights
        return weights[3] / statistics.mean(weights[:3])

    assert mean_of(1.0, 2.0) == pytest.approx(1.0, abs=0.25)
    assert mean_of(math.sqrt(2), 2.0) > 1.4


def test_little_help_bears_out_no_long_slices_against_us() -> None:
    """Cosines know no length, and one's own changes of mind are no noise."""
    rule, counted = get_rule("scored", me="a"), []
    for turn in range(4 * KNOWN_AFTER):
        parts = [(peer, 1.0, slice_of(9 * turn + seed)) for seed, peer in enumerate("abc", 1)]
        size = -2.0 if turn % 2 else 0.05
        weights = reduce_slices(rule, CODEC, [*parts, ("d", 2.0, slice_of(0, size, noise=0.1))]).weights
        counted.append(weights[3] if size < 0 else 0.0)
    assert max(counted[KNOWN_AFTER:]) < 0.01


def test_who_does_little_work_stands_as_others_do_for_its_work() -> None:
    rule = get_rule("scored", me="a")
    for turn in range(KNOWN_AFTER):
        parts = [(peer, 25.0, slice_of(9 * turn + seed, noise=20.0)) for seed, peer in enumerate("abc")]
        slow = slice_of(9 * turn + 3, 0.04, noise=100.0)
        told = reduce_slices(rule, CODEC, [*parts, ("d", 1.0, slow)])
    assert told.standing[3] > LOW


def test_slices_of_zeros_and_a_mean_without_ones_own_slice_tell_nothing() -> None:
    rule = get_rule("scored", me="a")
    zeros = bytes(CODEC.encode(torch.zeros(SIZE)).numpy())
    parts = [("a", 1.0, slice_of(1)), ("b", 1.0, slice_of(2)), ("c", 1.0, zeros)]
    for _ in range(3):
        assert reduce_slices(rule, CODEC, parts).standing == (math.inf, 1.0, 1.0)
    without = [("b", 1.0, slice_of(2)), ("c", 1.0, slice_of(3, -1)), ("d", 1.0, slice_of(4))]
    assert reduce_slices(rule, CODEC, without).standing == (math.inf, math.inf, math.inf)


def test_twenty_new_names_beside_ten_known_peers_have_a_tenth_of_the_mean() -> None:
    rule = get_rule("scored", me="00")
    known = [(f"{index:02}", 1.0, slice_of(index + 1)) for index in range(10)]
    for _ in range(KNOWN_AFTER):
        reduce_slices(rule, CODEC, known)
    names = [(f"{index:02}", 1.0, slice_of(99)) for index in range(20, 40)]
    weights = reduce_slices(rule, CODEC, known + names).weights
    assert sum(weights[10:]) == pytest.approx(sum(weights) / 10)
    for _ in range(KNOWN_AFTER):
        weights = reduce_slices(rule, CODEC, known + names).weights
    assert sum(weights[10:]) > sum(weights) / 3  # they have worked as the others did


# ---- what a peer makes of it


def test_who_works_against_a_peer_is_asked_last_averages_nothing_and_is_named_once() -> None:
    repute, told = Repute(), list[Distrusted]()
    repute.emit = told.append
    liar, honest = PeerId("liar"), PeerId("honest")
    for times in range(2 * KNOWN_AFTER):
        repute.scored({liar: 0.0, honest: 1.0})
        assert (repute.is_doubted(liar), repute.is_doubted(honest)) == (True, False)
        assert len(told) == (times >= KNOWN_AFTER - 1)
    assert told[0].peer == liar
    assert repute.is_passed_over(liar, 0, 0.0)
    repute.scored({liar: 0.3})
    assert not repute.is_doubted(liar)


@pytest.mark.parametrize(
    ("cosine", "length", "truth"),
    [(0.5, 0.5, 0.5), (0.5, 1.0, 0.25), (0.5, 0.1, 0.1), (0.5, 0.25, 0.25), (0.0, 1.0, 0.0),
     (-0.3, 0.3, -0.3), (-1.0, math.inf, -1.0), (0.0, 0.0, 0.0)],
)  # fmt: skip
def test_what_a_mean_has_of_the_slices(cosine: float, length: float, truth: float) -> None:
    assert truth_of(Likeness(cosine, length, 1.0)) == pytest.approx(truth)


def test_a_mean_of_equal_slices_is_as_long_as_its_cosine_says() -> None:
    random_ = torch.Generator().manual_seed(3)
    slices = torch.randn(8, 4096, generator=random_) + torch.randn(4096, generator=random_)
    mean = slices.mean(0)
    cosines = slices @ mean / slices.norm(dim=1) / mean.norm()
    lengths = mean.norm() / slices.norm(dim=1)
    torch.testing.assert_close(cosines.mean(), lengths.mean(), rtol=0.01, atol=0)


def test_an_owner_whose_means_are_other_than_the_slices_averages_no_more_for_now() -> None:
    repute = Repute()
    likenesses = {
        "a": (0.5, 0.6), "b": (0.4, 0.4), "c": (0.5, 0.4), "d": (0.45, 0.5), "noise": (0.01, 0.5),
        "flip": (-0.19, 0.5), "long": (0.3, 1.2), "e": (0.5, 0.5), "f": (0.4, 0.5),
        "short": (0.5, 0.05), "zeros": (0.0, 0.0),
    }  # fmt: skip
    for _ in range(8):
        for owner, (cosine, length) in likenesses.items():
            repute.looked_at(PeerId(owner), Likeness(cosine, length, 1.0))
    doubted = {owner for owner in likenesses if repute.is_doubted(PeerId(owner))}
    assert doubted == {"noise", "flip", "long", "short", "zeros"}
    assert not repute.has_lied(PeerId("noise"))
