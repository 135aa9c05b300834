"""What the other end says it has: lines played by hand, and words that cannot be true."""

from __future__ import annotations

import heapq

import pytest

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.net.transport.acknowledged import LEAST_BYTES, MOST_BYTES, MOST_MESSAGES, WAITING_S, Acknowledged

PIECE_BYTES = 16 << 10


def carry(bytes_per_s: float, way_s: float, for_s: float) -> tuple[Acknowledged, float, float]:
    """Pieces without end over a line behind buffers that take all: (what was found out, bytes that came per
    second of the later half, the longest that a piece waited in it)."""
    said, now, came, waited_s = Acknowledged(), 0.0, 0, 0.0
    line_free_at = 0.0
    arrivals: list[tuple[float, int, float]] = []
    while now < for_s:
        while said.has_room:
            said.sent(PIECE_BYTES, now)
            line_free_at = max(now, line_free_at) + PIECE_BYTES / bytes_per_s
            heapq.heappush(arrivals, (line_free_at + way_s, said.sent_bytes, now))
        now, total_bytes, sent_at = heapq.heappop(arrivals)
        said.hear(str(total_bytes).encode(), now)
        if now > for_s / 2:
            came += PIECE_BYTES
            waited_s = max(waited_s, now - sent_at - way_s)
    return said, came / (now - for_s / 2), waited_s


@pytest.mark.parametrize("bytes_per_s", [83e3, 250e3, 2.5e6, 25e6])
@pytest.mark.parametrize("way_s", [0.0005, 0.04, 0.2])
def test_a_line_is_kept_full_and_little_waits_before_it(bytes_per_s: float, way_s: float) -> None:
    _, came_bytes_per_s, waited_s = carry(bytes_per_s, way_s, 6.0)
    assert 0.93 * bytes_per_s < came_bytes_per_s < 1.07 * bytes_per_s
    least_s = (LEAST_BYTES + 2 * PIECE_BYTES) / bytes_per_s
    assert waited_s < 2 * WAITING_S + least_s


def test_there_is_always_room_for_some_and_never_for_all() -> None:
    said = Acknowledged()
    for number in range(1, 200):  # later and later
        said.sent(PIECE_BYTES, 10.0 * number)
        said.hear(str(number * PIECE_BYTES).encode(), 10.0 * number + number)
    assert said.room_bytes == LEAST_BYTES
    said = Acknowledged()
    for number in range(40):  # at once, whatever it is
        said.sent(1 << number, float(number))
        said.hear(str((2 << number) - 1).encode(), float(number))
    assert said.room_bytes == MOST_BYTES


def test_what_is_not_used_does_not_grow() -> None:
    said = Acknowledged()
    for number in range(1, 1000):
        said.sent(100, float(number))
        said.hear(str(number * 100).encode(), number + 0.001)
    assert said.room_bytes == LEAST_BYTES


def test_news_are_told_once() -> None:
    said, news = Acknowledged(), []
    said.on_news = lambda: news.append(said.arrived_bytes)
    said.sent(100, 1.0)
    said.sent(100, 1.0)
    for word in (b"0", b"150", b"150", b"200"):
        said.hear(word, 2.0)
    assert news == [150, 200]


@pytest.mark.parametrize(
    "word", [b"", b"-1", b"1e2", b"201", b"99", b"9" * 400, b"\xd9\xa1", b" 150", b"1" * 19]
)
def test_words_that_cannot_be_true_are_refused(word: bytes) -> None:
    said = Acknowledged()
    said.sent(200, 1.0)
    said.hear(b"100", 1.0)
    with pytest.raises(RemoteProtocolError, match="wrong acknowledgement"):
        said.hear(word, 2.0)
    assert said.arrived_bytes == 100


def test_a_receiver_that_never_says_what_came_costs_bounded_memory() -> None:
    """Control messages wait for no room, and a link may last for weeks."""
    said = Acknowledged()
    for second in range(3 * MOST_MESSAGES):
        said.sent(200, float(second))
    assert len(said._messages) == MOST_MESSAGES
    said.hear(str(said.sent_bytes).encode(), 1e6)
    assert said.arrived_bytes == said.sent_bytes
    assert not said._messages
