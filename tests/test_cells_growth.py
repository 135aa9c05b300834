"""What a peer sends for a round over cells: no more than a tenth beyond the flat formula at 32 peers, by
formula for sizes that no test plays; and the formula is what simulated peers send."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cells import FLAT_32, over_cells
from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.protocol.rounds import PayloadShape
from p2p_co2.simnet import EventLog, Settings, Swarm
from p2p_co2.simnet.links import VirtualLinks
from p2p_co2.telemetry.events import RoundCommitted
from p2p_co2.tensors.codec import get_codec

BAR = 1.1
BLOCK_BYTES, SUM_FACTOR = 16, 8
"""Of a simulated block, and how many times as much its sum is in fp32."""


@pytest.mark.parametrize("codec", ["int4", "int8", "fp16"])
@pytest.mark.parametrize(("peers", "cells"), [(1024, 20), (4096, 80)])
def test_a_thousand_peers_send_little_more_than_thirty_two(codec: str, peers: int, cells: int) -> None:
    coding = get_codec(codec)
    shape = PayloadShape(coding.block_bytes, (coding.blocks(25_000_000),), 4 * coding.block_values)
    assert 1.0 < over_cells(peers, cells, shape).sent / FLAT_32 < BAR


def test_simulated_peers_send_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, sums and means of one round at which all take part, heads of messages included."""
    peers, cells, blocks, real_bytes_per_block = 48, 3, 64, 64e3
    sent_bytes, commits, transmit = [0.0], list[RoundCommitted](), VirtualLinks._transmit

    def count(links: VirtualLinks, *what: Any, **more: Any) -> None:
        before = links.up_bytes
        transmit(links, *what, **more)
        sent_bytes[0] += (links.up_bytes - before) * bool(what[3])  # of bulk

    monkeypatch.setattr(VirtualLinks, "_transmit", count)
    run = RunConfig(
        name="growth", fragments=1, cells=cells, group_size=64,
        clock=ClockConfig(mode="time", round_s=20.0, rounds=2),
    )  # fmt: skip
    settings = Settings(
        run=run, peers=peers, seed=3, profile="fibre", blocks=(blocks,), sum_factor=SUM_FACTOR,
        real_bytes_per_block=real_bytes_per_block, state_factor=1, largest_skew_s=0.0, largest_drift=0.0,
    )  # fmt: skip
    swarm = Swarm(settings, EventLog(digests=False))
    swarm.log.readers_of[RoundCommitted].append(commits.append)
    assert swarm.run().violations == []
    rounds = {event.round for event in commits}
    assert len(commits) == peers * len(rounds)
    shape = PayloadShape(BLOCK_BYTES, (blocks,), SUM_FACTOR * BLOCK_BYTES)
    payload_bytes = blocks * real_bytes_per_block
    each = sent_bytes[0] / peers / len(rounds) / payload_bytes
    assert each == pytest.approx(over_cells(peers, cells, shape).sent, rel=0.03)
