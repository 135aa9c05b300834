"""How a peer looks for others: what the DHT refuses keeps it from nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.node.finding import Finding, find_every_s
from p2p_co2.protocol.membership import Membership
from p2p_co2.protocol.wire.identity import PeerId
from p2p_co2.protocol.wire.messages_pb2 import PeerRecord, Status
from p2p_co2.telemetry.events import Warned


@pytest.mark.parametrize("fails", [(), ("publish",), ("find",), ("publish", "find")])
def test_a_peer_that_cannot_be_listed_still_looks_for_others(fails: tuple[str, ...]) -> None:
    """A first peer waited twelve seconds for three: it had not looked."""

    class Net:
        async def publish_self(self, somebody_unmet: bool) -> str:
            return self.answer("publish", "")

        async def find_peers(self) -> list[PeerRecord]:
            return self.answer("find", [PeerRecord(peer="other", expires_at=9.0)])

        def answer(self, what: str, value: Any) -> Any:
            if what in fails:
                raise TransportError("the DHT is out of reach")
            return value

    warnings: list[str] = []
    node: Any = SimpleNamespace(
        membership=Membership(PeerId("me")), now=lambda: 5.0, pump=lambda: None,
        progress=SimpleNamespace(rests=False, status=Status),
        report=lambda kind, text: warnings.append(text) if kind is Warned else None,
    )  # fmt: skip

    async def look() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(Finding(node, cast(Any, Net())).run(), 0.05)

    asyncio.run(look())
    assert node.membership.has_looked is ("find" not in fails)
    assert node.membership.unheard == ("find" not in fails)
    assert warnings == bool(fails) * ["peer discovery: the DHT is out of reach"]


@pytest.mark.parametrize(("live", "every_s"), [(1, 10.0), (4, 10.0), (8, 20.0), (23, 57.5), (40, 60.0)])
def test_among_many_that_are_all_heard_a_search_is_rare(live: int, every_s: float) -> None:
    """It costs as much as there are peers listed: 24 peers searched for 20 kB/s each."""
    assert find_every_s(live) == every_s


def test_who_comes_or_goes_makes_a_peer_look_again_at_once() -> None:
    now, peers = [100.0], {PeerId(str(number)) for number in range(8)}
    membership: Any = SimpleNamespace(live=set(peers), unheard=0)
    finding = Finding(cast(Any, SimpleNamespace(now=lambda: now[0], membership=membership)), cast(Any, None))

    def looks() -> bool:
        if is_due := finding._is_due():
            finding._found_at, finding._found_among = now[0], frozenset(membership.live)
        return is_due

    assert looks()
    now[0] += 10.0
    assert not looks()
    now[0] += 10.0
    assert looks()
    now[0] += 1.0
    membership.live.pop()
    assert looks()
    membership.unheard = 1  # somebody is listed that was not heard
    assert looks()
    membership.unheard, membership.live = 0, set()
    assert looks()
    assert looks()  # alone, it looks each time
