"""A real swarm in cells: the console script's peers as processes on loopback, two cells of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_co2.protocol.wire.identity import Identity, PeerId, cell_of
from p2p_co2.telemetry.events import LinkOpened, PeerFinished, RoundCommitted, RoundCounted
from tests.campaign import START_S, Campaign, paced_run

pytestmark = pytest.mark.swarm

NAMES = ("a1", "a2", "b1", "b2")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path) as swarm:
        yield swarm


def identity_in(cell: int, folder: Path) -> PeerId:
    """A new identity that belongs to a cell."""
    folder.mkdir()
    while True:
        identity = Identity.load_or_create(folder / "identity")
        if cell_of(identity.peer_id, 2) == cell:
            return identity.peer_id
        (folder / "identity").unlink()


def test_two_cells_of_two_agree_over_real_sockets(swarm: Campaign) -> None:
    peers = {name: identity_in(int(name[0] == "b"), swarm.folder / name) for name in NAMES}
    run = paced_run(round_s=4.0, rounds=4)
    swarm.start_seed(run.model_copy(update={"cells": 2}))
    children = [swarm.join(name, "--min-peers", "2") for name in NAMES]
    assert swarm.wait(children, START_S), swarm.tails()
    assert [child.exit_status() for child in children] == [0] * 4, swarm.tails()

    states: dict[tuple[int, int], set[str]] = {}
    for name in NAMES:
        (end,) = swarm.events(name, PeerFinished)
        for fragment, version in enumerate(end.versions):
            digest = end.digest[64 * fragment : 64 * (fragment + 1)]
            states.setdefault((fragment, version), set()).add(digest)
    assert all(len(digests) == 1 for digests in states.values()), states
    assert max(version for _, version in states) >= 1
    sizes = {event.group_size for name in NAMES for event in swarm.events(name, RoundCommitted)}
    assert 2 in sizes <= {1, 2}
    for first, second in (NAMES[:2], NAMES[2:]):
        counted = [event for name in (first, second) for event in swarm.events(name, RoundCounted)]
        assert all(set(event.weights) <= {peers[first], peers[second]} for event in counted)
    met = {(name, event.other) for name in NAMES for event in swarm.events(name, LinkOpened)}
    assert any(cell_of(other, 2) != int(name[0] == "b") for name, other in met)
