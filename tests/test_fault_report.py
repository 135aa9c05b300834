"""What the report on kills says of the swarm's commits and aborts, from times and reasons."""

from __future__ import annotations

import pytest
from laboratory import load

from p2p_co2.protocol.rounds import Aborted
from tests.round_machine import drain, offer_of, one_machine

faults = load("faults")


def test_the_longest_time_without_a_commit_is_of_one_fragment() -> None:
    made_at = {(0, 1): 1.0, (0, 2): 5.0, (0, 3): 9.0, (1, 1): 3.0, (1, 2): 7.0, (1, 3): 13.5}
    assert faults.longest_gap(made_at, 2, 2.0, 12.0) == (6.5, 1)  # it began before the end of the time
    assert faults.longest_gap(made_at, 2, 2.0, 6.0) == (4.0, 1)
    assert faults.longest_gap(made_at, 2, 2.0, 30.0) == (21.0, 0)  # and never ended


def test_a_time_without_any_commit_is_as_long_as_it_is() -> None:
    assert faults.longest_gap({}, 1, 2.0, 12.0) == (10.0, 0)
    assert faults.longest_gap({(0, 1): 4.0}, 2, 2.0, 12.0) == (10.0, 1)


def test_a_peer_that_goes_over_to_the_agreed_state_aborts_no_round() -> None:
    machine = one_machine(1, 2)
    machine.offer(offer_of(), 0.0)
    machine.set_state(0, 1, bytes(32))
    (event,) = [one for one in drain(machine) if isinstance(one, Aborted)]
    assert faults.went_over(event.reason)


@pytest.mark.parametrize("reason", ["version 1 was replaced by another state", "the coordinator was lost"])
def test_other_ends_of_an_offer_are_aborts(reason: str) -> None:
    assert not faults.went_over(reason)
