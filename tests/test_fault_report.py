"""Which ends of an offer the report on kills counts as rounds that failed."""

from __future__ import annotations

import pytest
from laboratory import load

from p2p_co2.protocol.rounds import Aborted
from tests.round_machine import drain, offer_of, one_machine

faults = load("faults")


def test_a_peer_that_goes_over_to_the_agreed_state_aborts_no_round() -> None:
    machine = one_machine(1, 2)
    machine.offer(offer_of(), 0.0)
    machine.set_state(0, 1, bytes(32))
    (event,) = [one for one in drain(machine) if isinstance(one, Aborted)]
    assert faults.went_over(event.reason)


@pytest.mark.parametrize("reason", ["version 1 was replaced by another state", "the coordinator was lost"])
def test_other_ends_of_an_offer_are_aborts(reason: str) -> None:
    assert not faults.went_over(reason)
