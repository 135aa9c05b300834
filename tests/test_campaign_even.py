"""The storms of even seeds, and what a storm that fails says; see ``storm_campaign``."""

from __future__ import annotations

from p2p_co2.simnet import EventLog, Swarm
from p2p_co2.simnet.campaign import failure_of, storm_settings
from tests.storm_campaign import SEEDS, check_storms
from tests.test_simnet_bugs import CountsTwice


def test_storms_of_even_seeds_break_no_law() -> None:
    check_storms(range(2, SEEDS + 1, 2))


def test_a_storm_that_breaks_a_law_says_how_to_play_it_again() -> None:
    result = Swarm(storm_settings(3, peers=6), EventLog(), make_ledger=CountsTwice).run()
    told = str(failure_of(3, 6, result))
    assert "p2p-co2 simulate --storm --peers 6 --seed 3" in told
    assert "conservation" in told
