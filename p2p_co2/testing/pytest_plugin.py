"""The pytest fixture ``local_swarm``, known wherever p2p-co2 is installed:

def test_my_loop(local_swarm):
    swarm = local_swarm(peers=2)
    swarm.run([sys.executable, "my_loop.py"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from p2p_co2.testing import TestSwarm


@pytest.fixture
def local_swarm() -> Iterator[Callable[..., TestSwarm]]:
    """``p2p_co2.local_swarm``, entered; its swarms end with the test."""
    from p2p_co2.testing import made

    yield from made()
