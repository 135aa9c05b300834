"""How a peer looks for others: what the DHT refuses keeps it from nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.membership import Membership
from p2p_co2.node.finding import Finding
from p2p_co2.telemetry.events import Warned
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.messages_pb2 import PeerRecord, Status


@pytest.mark.parametrize("fails", [(), ("publish",), ("find",), ("publish", "find")])
def test_a_peer_that_cannot_be_listed_still_looks_for_others(fails: tuple[str, ...]) -> None:
    """A first peer waited twelve seconds for three: it had not looked."""

    class Net:
        async def publish_self(self, somebody_unmet: bool) -> str:
            return self.answer("publish", "")

        async def find_peers(self, cell: int) -> list[PeerRecord]:
            return self.answer("find", [PeerRecord(peer="other", expires_at=9.0)])

        def answer(self, what: str, value: Any) -> Any:
            if what in fails:
                raise TransportError("the DHT is out of reach")
            return value

    warnings: list[str] = []
    node: Any = SimpleNamespace(
        membership=Membership(PeerId("me")), now=lambda: 5.0, far=SimpleNamespace(cell=0), pump=lambda: None,
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
