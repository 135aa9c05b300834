"""How long things may take among simulated peers: what is slow on slow lines is no fault, and is awaited."""

from __future__ import annotations

from functools import partial

import pytest

from p2p_co2.config import ClockConfig, OuterConfig, RunConfig
from p2p_co2.node.catchup import CatchupController
from p2p_co2.planning.profiles import PROFILES
from p2p_co2.planning.traffic import payload_bytes
from p2p_co2.protocol.catchup.lines import Lines
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.protocol.rounds.bounds import READY_CAP_S, ROUND_CAP_S
from p2p_co2.protocol.schedule import FIRST_ROUND_BOUND_S, SLEW
from p2p_co2.simnet import Churn, EventLog, Settings, Swarm, Violation
from p2p_co2.simnet.internet import way_between
from p2p_co2.simnet.patience import loading_s, offer_bound_s, run_bound_s
from p2p_co2.telemetry.events import Event, TrainingEnded

CLOCK = ClockConfig(mode="time", round_s=4.0, rounds=5)
HOME, SLOW, SPACE = PROFILES["cable"], PROFILES["dsl"], PROFILES["satellite"]

# ---- by hand


def test_the_bound_of_an_offer_follows_from_payload_and_lines() -> None:
    home, slow = PROFILES["cable"], PROFILES["dsl"]
    small = PayloadShape(8, (4, 8))
    parts_s = 4 * 2.0  # nothing to send: the floor, and four times that if past rounds were slow
    assert offer_bound_s(small, 1.0, [home]) == 150 + 7 * (2 * parts_s + 4) + 4 * parts_s
    assert offer_bound_s(small, 1.0, [home, slow]) == offer_bound_s(small, 1.0, [home])
    large = PayloadShape(8, (4, 1 << 16))
    slowest = way_between(slow, slow, relayed=True).bytes_per_s
    assert slowest < slow.up_bits_per_s / 8 / 10  # deadlines follow from what uploads have shown
    parts_s = 4 * 4 * 2 * (1 << 19) / slowest
    assert 2 < parts_s < 300
    assert offer_bound_s(large, 1.0, [home, slow]) == pytest.approx(150 + 7 * (2 * parts_s + 4) + 4 * parts_s)
    assert offer_bound_s(large, 1e6, [slow]) == READY_CAP_S + 2 * 604 + ROUND_CAP_S + 1200


def test_a_run_is_over_when_the_last_peer_has_joined_trained_and_flushed() -> None:
    """Each of them by its own longest wait: to gather 120 s, to catch up 600, to flush 600 and 625 more,
    and 600 for a state that is on its way."""
    bound_s = partial(run_bound_s, 10.0, 900.0, 2.0)
    one_s = 10 + 120 + 600 * (1 + 3) + 900 / 0.9 + 2 + 600 + 625 + 600 + 60
    assert bound_s(fragments=3) == one_s


def test_states_are_loaded_over_the_worst_peers_median_way() -> None:
    """A line of 5 Mbit/s to a satellite, and through a relay to another one, carries 10 kB/s by TCP."""
    far = way_between(SPACE, SPACE, relayed=True).bytes_per_s
    near = way_between(HOME, SPACE, relayed=True).bytes_per_s
    assert 9e3 < far < 11e3 < near < 30e3
    assert loading_s([1000, 500], 2.0, [SPACE] * 3) == pytest.approx(3000 / far)
    assert loading_s([1000, 500], 2.0, [SPACE, HOME, SPACE, HOME, HOME]) == pytest.approx(3000 / near)
    fibre = PROFILES["fibre"]
    assert (
        loading_s([1000], 1.0, [fibre, fibre]) == 1000 / way_between(fibre, fibre, relayed=False).bytes_per_s
    )
    assert loading_s([1000], 1.0, [SPACE]) == 0.0


# ---- a run


def swarm_of(
    peers: int, rounds: int, profile: str, real_bytes_per_block: float = 16.0, seed: int = 5
) -> Swarm:
    run = RunConfig(name="patient", fragments=2, clock=CLOCK.model_copy(update={"rounds": rounds}))
    return Swarm(
        Settings(run=run, peers=peers, seed=seed, profile=profile, real_bytes_per_block=real_bytes_per_block),
        EventLog(),
    )


def forks(violations: list[Violation]) -> list[Violation]:
    return [violation for violation in violations if violation.law == "forks"]


def test_a_fork_may_last_for_as_long_as_slow_ways_load_the_states() -> None:
    """200 MB of a fragment over a satellite take hours, whatever a round's length."""
    calm_s = 3 * CLOCK.round_s + 40.0
    large_s = 2 * 8 * 15 * (1 << 20) / way_between(SPACE, SPACE, relayed=True).bytes_per_s
    heal_s = swarm_of(3, 5, "satellite", float(1 << 20)).inspector.heal_s
    assert heal_s == pytest.approx(calm_s + large_s)
    assert swarm_of(3, 5, "fibre").inspector.heal_s == pytest.approx(calm_s, abs=0.1)


def test_a_run_that_its_lines_are_too_slow_for_is_played_to_its_end() -> None:
    """Its last rounds took ten minutes, and it was cut after four: "did not finish"."""
    swarm = swarm_of(3, 200, "transatlantic", 4e7)
    result = swarm.run()
    assert len(result.digests) == 3
    assert not any("did not finish" in one.text for one in result.violations)
    assert result.virtual_s > swarm.planned_s + 300
    assert result.longest_offer_s < swarm.inspector.offer_bound_s


@pytest.mark.parametrize("until", [100.0, 150.0])
def test_a_fork_is_given_its_time_once_the_cut_is_over(until: float) -> None:
    """Two halves make rounds of their own for as long as the net is cut, which no protocol can help."""
    swarm = swarm_of(4, 60, "fibre")
    heal_s = swarm.inspector.heal_s
    sides = {peer: number % 2 for number, peer in enumerate(swarm.peer_ids())}
    swarm.world.call_at(20.0, swarm.split, sides)
    swarm.world.call_at(until, swarm.heal)
    result = swarm.run()
    assert result.violations == []
    assert result.forks == 2
    assert heal_s < until - 40.0 < result.longest_fork_s < until - 20.0 + heal_s


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fork_heals_over_ways_of_10_kb_s(seed: int) -> None:
    """Of 200,000 parameters, int4: no satellite gave another half a megabyte before it counted as silent, and
    both fragments stayed forked to the end."""
    values, round_s = 100_000, 60.0
    encoded = payload_bytes("int4", values)
    clock = ClockConfig(mode="time", round_s=round_s, rounds=12)
    settings = Settings(
        run=RunConfig(name="far", fragments=2, clock=clock), peers=6, seed=seed, profile="satellite",
        blocks=(16, 16), real_bytes_per_block=encoded / 16, state_factor=round(8 * values / encoded),
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    assert 750e3 < swarm.state_bytes[0] * swarm.internet.scale < 850e3
    swarm.world.call_at(100.0, swarm.split, {peer: n % 2 for n, peer in enumerate(swarm.peer_ids())})
    swarm.world.call_at(300.0, swarm.heal)
    result = swarm.run()
    assert result.violations == []
    assert result.forks == 2
    assert result.longest_fork_s < 200.0 + 2.5 * round_s


def test_slices_of_a_round_say_that_a_donor_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    told = set[str]()
    monkeypatch.setattr(Lines, "is_busy", lambda lines, peer, now: told.add(peer))
    swarm = swarm_of(3, 2, "fibre")
    assert swarm.run().violations == []
    assert told == set(swarm.peer_ids())


def test_two_halves_that_never_find_together_again_are_called_out() -> None:
    """Nobody looks around: what is still forked when its time is up is said, and how the run ended."""
    swarm, healed_at = swarm_of(4, 25, "fibre"), 40.0
    swarm.world.call_at(20.0, swarm.split, {peer: n % 2 for n, peer in enumerate(swarm.peer_ids())})
    swarm.world.call_at(healed_at, swarm.heal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CatchupController, "look_around", lambda catching, now: None)
        patch.setattr(CatchupController, "go_to", lambda catching, *where: False)
        found = swarm.run().violations
    assert [one.at for one in forks(found)] == pytest.approx([healed_at + swarm.inspector.heal_s] * 2)
    assert found[-1].text.endswith("different states at the end")


def test_a_peer_that_stands_still_at_its_end_goes_so_much_later() -> None:
    """And as long as it does, views may come to differ: a fork's time begins when it goes on."""
    swarm, wrong_at, stands_s = swarm_of(3, 5, "fibre"), list[float | None](), 200.0

    def look() -> None:
        wrong_at.append(swarm.went_wrong_at())

    def stop_first(event: Event) -> None:
        if isinstance(event, TrainingEnded) and event.peer == swarm.peer_ids()[0]:
            now = swarm.world.now
            swarm.stall(0, now + stands_s)
            wrong_at.append(now + stands_s - 1.0)
            swarm.world.call_at(now + stands_s - 1.0, look)

    swarm.log.readers.append(stop_first)
    result = swarm.run()
    assert {one.law for one in result.violations} <= {"end"}  # the others have gone without it
    assert result.virtual_s > swarm.planned_s + stands_s
    assert wrong_at[0] == wrong_at[1]


def test_a_run_is_given_time_for_who_starts_last_and_for_rounds_that_are_awaited() -> None:
    """Without them it would be cut off while its peers are still in time."""
    limits = list[float]()
    for blocking, faults in ((0, None), (3, None), (0, Churn(0.0, 500.0))):
        run = RunConfig(name="patient", fragments=2, clock=CLOCK, outer=OuterConfig(blocking_rounds=blocking))
        swarm = Swarm(Settings(run=run, peers=3, seed=5, faults=faults), EventLog())
        swarm.world.run = limits.append  # type: ignore[method-assign]
        swarm.run()
    assert limits[1] == limits[0] + 3 * 2 * FIRST_ROUND_BOUND_S / (1 - SLEW)
    assert limits[2] == limits[0] - 2.0 + 500.0
