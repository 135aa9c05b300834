"""When the machines hear of who comes and goes, and of where the others are: in a storm, after each turn."""

from __future__ import annotations

import pytest

from p2p_co2.simnet import EventLog, Swarm
from p2p_co2.simnet.campaign import storm_settings
from p2p_co2.simnet.oversight import Oversight


def test_catching_up_looks_at_news_that_the_rounds_heard_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's message or timer has the machines told of a crowd at once; with that, nothing was news any
    more, and where the others are was looked at with the next heartbeat only."""
    turned, late, news = Oversight.turned, 0, 0

    def look(oversight: Oversight) -> None:
        nonlocal late, news
        node = oversight.node
        looked_at = node.catching._looked_at
        if isinstance(looked_at, tuple) and looked_at[0] != node.membership.revision:
            news += 1
            late += not node._has_news()
        turned(oversight)

    monkeypatch.setattr(Oversight, "turned", look)
    swarm = Swarm(storm_settings(5, peers=12), EventLog(digests=False))
    assert swarm.run().violations == []
    assert news > 0
    assert late == 0
