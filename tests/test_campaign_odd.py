"""The storms of odd seeds; see ``storm_campaign``."""

from __future__ import annotations

from tests.storm_campaign import SEEDS, check_storms


def test_storms_of_odd_seeds_break_no_law() -> None:
    check_storms(range(1, SEEDS + 1, 2))
