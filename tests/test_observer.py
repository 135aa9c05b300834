"""The observer beside a network made for the purpose: what it does when that breaks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.errors import TransportError
from p2p_co2.node.reporting import Observer
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import peer_id_of
from tests.transport_peers import PATIENCE_S

SEED = peer_id_of(bytes(32))
TICKET = str(Ticket(bytes(32), SEED, (f"/ip4/203.0.113.5/tcp/31000/p2p/{SEED}",)))


class Lost:
    """A network whose seeds are away and whose daemon lives."""

    p2p, run = None, None

    async def find_peers(self) -> list[Any]:
        raise TransportError("no seed answers")

    rebootstrap = find_peers

    async def daemon_ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        """Nothing is held."""


def test_a_network_that_is_lost_for_long_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Lost] = []

    async def open_network(*of: object) -> Lost:
        opened.append(Lost())
        return opened[-1]

    monkeypatch.setattr("p2p_co2.node.reporting.Network.open", open_network)
    monkeypatch.setattr("p2p_co2.node.reporting.FIND_S", 0.01)
    observer = Observer(TICKET, tmp_path)
    ends_at = time.monotonic() + PATIENCE_S
    while len(opened) < 3 and time.monotonic() < ends_at:
        time.sleep(0.01)
    observer.close()
    assert len(opened) >= 3
    assert observer.state.words == "no seed answers"
