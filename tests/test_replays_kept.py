"""How long the newest mean is kept for others to replay: by what is known of who has it."""

from __future__ import annotations

import asyncio

import pytest

from p2p_co2.protocol.catchup import history
from p2p_co2.protocol.rounds import PayloadShape, PeerView, Rounds, exchange
from p2p_co2.system.memory import large_buffer
from p2p_co2.trainer.synchroniser import Activity
from p2p_co2.wire.envelope import opened
from p2p_co2.wire.identity import PeerId
from tests.fuzz.world import RUN, World, run_virtual
from tests.round_machine import begun_member
from tests.round_network import RUN as RUN_DIGEST
from tests.round_network import make_identity

ME, A, B = (make_identity(index) for index in range(3))


@pytest.mark.parametrize(
    ("versions", "is_everywhere"),
    [((4,), True), ((5,), True), ((3,), False), ((), False)],
)
def test_a_version_is_everywhere_once_all_live_peers_say_so(
    versions: tuple[int, ...], is_everywhere: bool
) -> None:
    rounds = Rounds(ME, RUN_DIGEST, PayloadShape(8, (4,)))
    rounds.set_peers({A.peer_id: PeerView(versions=(4,)), B.peer_id: PeerView(versions=versions)}, 1.0)
    rounds.set_state(0, 4, bytes(32))
    assert rounds.is_everywhere(0, 4) is is_everywhere


def test_who_is_left_alone_keeps_what_it_has() -> None:
    """Those it lost may come back, and nobody else can give it to them."""
    rounds = Rounds(ME, RUN_DIGEST, PayloadShape(8, (4,)))
    rounds.set_peers({A.peer_id: PeerView(versions=(4,))}, 1.0)
    rounds.set_state(0, 4, bytes(32))
    assert rounds.is_everywhere(0, 4)
    rounds.set_peers({}, 2.0)
    assert not rounds.is_everywhere(0, 4)


def test_a_mean_goes_when_all_have_begun_the_next_round_and_stays_while_one_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "LARGE_SHARE", 0.0)  # as if means were large

    async def work() -> None:
        world = World("a", "b", "c")
        world.start()
        await asyncio.sleep(1.5)
        of = {trainer.me: trainer for trainer in world.trainers}
        held: list[bool] = []

        def tap(sender: PeerId, receiver: PeerId, data: bytes) -> bool:
            message = opened(data, RUN.digest())
            if message.kind.name == "mean" and message.body.key.round > 1:
                kept, key = of[sender].node.catchup.donor.history, message.body.key
                held.append(kept.find(key.fragment, key.round - 1) is not None)
            return True

        world.tap = tap
        await world.train(4)
        assert held
        assert not any(held)
        held.clear()
        _, _, late = world.trainers  # live, and not training: its rounds are over
        late.sync.activity = Activity.RESTING
        late.sync.report()
        world.trainers.remove(late)
        behind = late.node.agreed[0].version
        while world.trainers[0].node.agreed[0].version < behind + 2:
            await world.train(1)
        assert any(held)
        world.trainers.append(late)
        await world.close()

    run_virtual(work())


def test_what_the_last_round_took_may_be_let_go_before_the_next_mean_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its pages are not there for the new mean, and as many fresh ones are paid for in each round."""
    order: list[str] = []

    def taken(size_bytes: int) -> memoryview:
        order.append("mean")
        return large_buffer(size_bytes)

    monkeypatch.setattr(exchange, "large_buffer", taken)
    machine, begin, coordinator, _ = begun_member()
    machine.outlet.on_begun = lambda: order.append("let go")
    machine.receive(begin, coordinator, 0.1)
    assert order == ["let go", "mean"]
