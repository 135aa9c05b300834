"""Streams that others open to us for one protocol, each served by one coroutine of ours.

Laws: at most ``most_streams`` at once and ``most_per_peer`` of one peer, whoever opens more is hung up on
unread; a stream is hung up on when its coroutine ends, however that comes about; no task is left after
``close``. libp2p has proved who opened a stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from p2p_co2.net.transport.hivemind_quiet import P2P, P2PDaemonError, StreamInfo
from p2p_co2.net.transport.libp2p_control import hang_up
from p2p_co2.protocol.wire.identity import PeerId

_DAEMON_TIMEOUT_S = 5.0

Serve = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What is done with one stream. ``OSError``, ``TimeoutError`` and ``IncompleteReadError`` end it quietly: the
other end is gone, or has no more questions."""


class ServedStreams:
    """Serves ``protocol`` over a started ``P2P``, which stays the caller's."""

    def __init__(self, p2p: P2P, protocol: str, serve: Serve, most_streams: int, most_per_peer: int) -> None:
        self._p2p, self._protocol, self._serve = p2p, protocol, serve
        self._most_streams, self._most_per_peer = most_streams, most_per_peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._of: Counter[PeerId] = Counter()
        self._listening = False

    def __len__(self) -> int:
        """How many are being served."""
        return len(self._tasks)

    async def start(self) -> None:
        await self._p2p.add_binary_stream_handler(self._protocol, self._take)
        self._listening = True

    async def close(self) -> None:
        """Stop serving; no task is left. May be called twice."""
        listening, self._listening = self._listening, False
        if listening:
            try:
                async with asyncio.timeout(_DAEMON_TIMEOUT_S):
                    await self._p2p.remove_binary_stream_handler(self._protocol)
            except (TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError):
                pass  # the daemon is gone, and its handlers with it
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer, task = PeerId(info.peer_id.to_base58()), asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= self._most_streams or self._of[peer] >= self._most_per_peer:
            await hang_up(writer)
            return
        self._tasks.add(task)
        self._of[peer] += 1
        try:
            await self._serve(info, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the other end is gone, or has no more questions
        except asyncio.CancelledError:
            if self._listening:
                raise
            # `close` did it: just end, because asyncio's streams complain about a cancelled handler
        finally:
            self._tasks.discard(task)
            self._of[peer] -= 1
            if not self._of[peer]:
                del self._of[peer]
            await hang_up(writer)
