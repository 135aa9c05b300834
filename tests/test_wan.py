"""The emulated internet without a kernel: delay, order, loss, rates; and the lines of a rehearsal."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from bootstrap.forwarder import HEADER_BYTES, QUEUE_S, Wan, segment_count
from bootstrap.options import RehearsalOptions
from bootstrap.rehearsal import Line, lines_of
from p2p_co2.errors import ConfigError
from p2p_co2.planning.profiles import PROFILES, LinkProfile

A, B = socket.inet_aton("192.0.0.67"), socket.inet_aton("192.0.0.69")
FAST = 1e12


def link(
    latency_s: float, jitter_s: float = 0.0, loss: float = 0.0, up: float = FAST, down: float = FAST
) -> LinkProfile:
    return LinkProfile("test", int(up), int(down), 1e3 * latency_s, 1e3 * jitter_s, loss, "open")


PLAIN = link(0.04)


def packet(mark: int = 0, size: int = 1400, source: bytes = A, target: bytes = B) -> bytes:
    ip = bytes((0x45,)) + bytes(11) + source + target
    return bytes(HEADER_BYTES) + ip + struct.pack("!I", mark) + bytes(size - 24)


def mark(data: bytes) -> int:
    return int(struct.unpack_from("!I", data, HEADER_BYTES + 20)[0])


def test_half_of_the_way_at_each_end() -> None:
    wan = Wan({A: PLAIN, B: link(0.02)}, seed=0)
    wan.receive(packet(), 1.0)
    assert wan.next_at() == pytest.approx(1.03)
    assert wan.due(1.0299) == []
    assert wan.due(1.0301) == [packet()]
    assert wan.next_at() is None


def test_jitter_never_reorders() -> None:
    line = link(0.04, jitter_s=0.02)
    wan = Wan({A: line, B: line}, seed=1)
    arrivals = []
    for step in range(3000):
        wan.receive(packet(step), step / 1000)
        arrivals += [(step / 1000, mark(data)) for data in wan.due(step / 1000)]
    numbers = [number for _, number in arrivals]
    assert numbers == sorted(numbers)
    delays = [at - number / 1000 for at, number in arrivals]
    assert min(delays) < 0.03
    assert max(delays) > 0.05


def test_losses_are_as_many_as_asked_for_and_come_again_with_the_seed() -> None:
    line = link(0.0, loss=0.05)

    def survivors(seed: int) -> list[int]:
        wan = Wan({A: line, B: line}, seed)
        for step in range(20_000):
            wan.receive(packet(step), 0.0)
        return [mark(data) for data in wan.due(1.0)]

    assert 18_800 < len(survivors(3)) < 19_200
    assert survivors(3) == survivors(3) != survivors(4)


def test_a_queue_keeps_the_rate_and_drops_what_is_too_much() -> None:
    size_bits = 8 * len(packet())
    line = link(0.0, up=100 * size_bits, down=1000 * size_bits)
    wan = Wan({A: line, B: line}, seed=0)
    for step in range(100):
        wan.receive(packet(step), 0.0)
    came = wan.due(10.0)
    assert abs(len(came) - (QUEUE_S * 100 + 1)) <= 1
    assert wan.count.queue_full == 100 - len(came)
    wan.receive(packet(7), 20.0)
    assert wan.next_at() == pytest.approx(20.01)
    assert wan.due(20.0105) == []
    assert wan.due(20.0111) == [packet(7)]


def test_of_many_segments_in_one_packet_each_may_be_the_one_that_is_lost() -> None:
    virtio = struct.pack("<BBHHHH", 1, 1, 40, 1400, 20, 16)
    large = virtio + packet(size=14_000)[HEADER_BYTES:]
    assert (segment_count(packet()), segment_count(large)) == (1, 10)
    line = link(0.0, loss=0.05)
    wan = Wan({A: line, B: line}, seed=1)
    for _ in range(10_000):
        wan.receive(large, 0.0)
    assert wan.count.lost == pytest.approx(10_000 * (1 - 0.95**10), rel=0.05)


def test_lines_are_profiles_with_changes() -> None:
    def lines(**options: Any) -> list[Line]:
        return lines_of(RehearsalOptions(**options), 0)

    first, second = lines(peers=2, profile="dsl, fibre", up_mbit=5, loss=0.01, nat="open")
    assert (first.peer, first.profile.up_bits_per_s, first.profile.loss) == ("peer-1", 5_000_000, 0.01)
    assert (first.profile.nat, second.profile.name) == ("open", "fibre")
    assert lines()[0].profile == PROFILES["dsl"]
    for option, wrong in (
        ("--up-mbit", {"up_mbit": 0}),
        ("--loss", {"loss": 0.9}),
        ("--latency-ms", {"latency_ms": -1}),
        ("--nat", {"nat": "wall"}),
        ("--peers", {"peers": 0}),
        ("--profile", {"profile": "modem"}),
    ):
        with pytest.raises(ConfigError, match=option):
            lines(**wrong)
