"""ScaledInt4: by hand, then its law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.trainer import scaled_int4
from p2p_co2.trainer.scaled_int4 import BLOCK, ScaledInt4


def kept(values: list[float]) -> ScaledInt4:
    room = ScaledInt4(len(values))
    room.set(slice(0, len(values)), torch.tensor(values))
    return room


def test_what_a_seventh_can_say_comes_back_by_hand() -> None:
    values = [7.0, 1.0, 0.4, -7.9, -3.0] + [0.0] * (BLOCK - 6) + [-6.0]  # the last ones are the high halves
    assert kept(values)[:].tolist() == [7.0, 1.0, 0.0, -7.0, -3.0] + [0.0] * (BLOCK - 6) + [-6.0]
    assert kept([1e-44, 2.0**-101])[:].tolist() == [0.0, 0.0]
    assert kept([2.0**126, -(2.0**127)])[:].tolist() == [2.0**126, -(2.0**127)]
    assert kept([1.0, 2.0])[2:2].tolist() == []
    assert kept([1.0] * (BLOCK + 1)).held_bytes == BLOCK + 2


def test_however_many_blocks_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    values = torch.randn(5 * BLOCK + 9)
    at_once = kept(values.tolist())
    monkeypatch.setattr(scaled_int4, "_AT_ONCE", 2)
    in_turn = kept(values.tolist())
    assert torch.equal(in_turn[:], at_once[:])
    assert torch.equal(in_turn[BLOCK - 3 : 4 * BLOCK + 1], at_once[BLOCK - 3 : 4 * BLOCK + 1])


_FLOATS = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=9)


@given(_FLOATS, _FLOATS, st.integers(0, 2 * BLOCK), st.integers(0, 2 * BLOCK))
def test_values_come_back_as_exact_as_promised_and_then_stay(
    first: list[float], second: list[float], start: int, stop: int
) -> None:
    whole = torch.zeros(BLOCK + len(second))
    whole[: len(first)], whole[BLOCK:] = torch.tensor(first), torch.tensor(second)
    room, again = ScaledInt4(len(whole)), ScaledInt4(len(whole))
    for at in (slice(0, BLOCK), slice(BLOCK, len(whole))):
        room.set(at, whole[at])
        bound = whole[at].abs().max() * 2.0**-3 + 2.0**-100
        assert bool(((room[at] - whole[at]).abs() <= bound).all())
    again.set(slice(0, len(whole)), room[:])
    assert torch.equal(again[:], room[:])
    assert torch.equal(room[start:stop], room[:][start:stop])


def test_blocks_of_another_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    size = 3 * BLOCK + 7
    old, new = kept(torch.randn(size).tolist()), kept(torch.randn(size).tolist())
    parts = [slice(0, BLOCK), slice(3 * BLOCK, size)]
    for before, there in ((old, old[:]), (None, torch.zeros(size))):
        mixed = new.with_values_of(before, parts)
        expected = new[:]
        for part in parts:
            expected[part] = there[part]
        assert torch.equal(mixed[:], expected)
    assert new.with_values_of(old, []) is new
