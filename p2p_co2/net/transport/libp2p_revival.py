"""A libp2p daemon that died or hangs is started again under the ``P2P`` that used it: same identity, same
port, same handlers.

All that the daemon held is lost: links, places at relays, and what it knew of others. All that hivemind's
client holds in our process stays: the handlers are told to the new daemon, and calls that waited for the old
one fail. So whoever uses the ``P2P`` (carrier, DHT, probes, reports) keeps it and only sees links that end.

Laws: a daemon that leaves ``MISSES`` questions in a row unanswered hangs, and is killed: after 45 s with the
figures below. A machine that stood still loses one question by it, and keeps its daemon. A daemon is tried
``TRIES`` times within about two minutes; one that dies again within ``STEADY_S`` is still the same trouble,
so a daemon that cannot live costs a bounded number of starts. Price: for these seconds nobody is reached over
libp2p; gRPC goes on. It reaches into hivemind's client (1.1.12), which has no words for this; a test kills a
daemon, stops it, and sees all kinds of handlers answer again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from p2p_co2.errors import EnvironmentFault
from p2p_co2.net.transport.hivemind_quiet import P2P, P2PDaemonError
from p2p_co2.net.transport.libp2p_control import answers
from p2p_co2.net.transport.libp2p_daemon import (
    STARTUP_TIMEOUT_S,
    DaemonP2P,
    launch_for,
    wait_p2p_exit,
)

logger = logging.getLogger(__name__)

TRIES = 8
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
STEADY_S = 60.0
LOOK_EVERY_S = 5.0
ANSWER_WITHIN_S = 10.0
MISSES = 3
"""Questions in a row without an answer after which a daemon hangs."""
CLOSE_WITHIN_S = 2.0
"""Nothing is lost with a daemon that is killed when its process leaves, but goodbyes over libp2p."""
OTHER_PORT_AFTER = 4
"""Tries after which a port that nobody chose may be another."""


async def keep_alive(p2p: P2P, revived: Callable[[str], Awaitable[None]]) -> str:
    """Start the daemon of ``p2p`` again whenever it ends or hangs; ``revived`` hears of it, with the old
    one's last words. Returns why it is given up, in words. Safe to cancel."""
    failures, began_at = 0, -STEADY_S
    while True:
        words = await _end_of(p2p)
        if not isinstance(p2p, DaemonP2P) or p2p.daemon is None:
            return words  # it was stopped by us
        if time.monotonic() - began_at > STEADY_S:
            failures = 0
        while True:
            if failures >= TRIES:
                return f"{words}; {TRIES} starts in a row came to nothing"
            if failures:
                await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**failures))
            failures += 1
            try:
                await revive(p2p, any_port=failures > OTHER_PORT_AFTER)
            except EnvironmentFault as error:
                logger.warning("the libp2p daemon did not come back: %s", error)
                words = str(error)
                continue
            break
        began_at = time.monotonic()
        await revived(words)


async def _end_of(p2p: P2P) -> str:
    """Wait until the daemon has ended, and end one that hangs; returns why, in words."""
    ended = asyncio.create_task(wait_p2p_exit(p2p), name="the libp2p daemon's end")
    misses = 0
    try:
        while misses < MISSES:
            await asyncio.wait({ended}, timeout=LOOK_EVERY_S)
            if ended.done() or not isinstance(p2p, DaemonP2P) or p2p.daemon is None:
                return await ended
            misses = 0 if _is_heard(p2p) and await answers(p2p, ANSWER_WITHIN_S) else misses + 1
        if not ended.done():
            logger.warning("the libp2p daemon hangs; ending it")
            p2p.daemon.kill()
        await ended
        return f"it hung: no answer to {MISSES} questions in a row"
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def end_if_hung(p2p: P2P) -> None:
    """To be called before all that needs the daemon is closed: each of them would wait for one that hangs.
    Safe to cancel."""
    daemon = p2p.daemon if isinstance(p2p, DaemonP2P) else None
    if daemon is not None and not daemon.has_ended and not await answers(p2p, CLOSE_WITHIN_S):
        daemon.kill()


def _is_heard(p2p: P2P) -> bool:
    """Whether hivemind's client still reads what the daemon says, and writes; else each call waits for
    ever."""
    control = p2p._client.control
    return not control._read_task.done() and not control._write_task.done()


async def revive(p2p: DaemonP2P, any_port: bool = False) -> None:
    """A new daemon in the place of one that has ended. ``any_port``: another port will do, if none was asked
    for. Raises ``EnvironmentFault``; then ``p2p`` is as it was, and may be revived later. Safe to cancel."""
    control = p2p._client.control
    await _part(p2p)
    daemon = launch_for(p2p, any_port)
    unary = dict(control.unary_handlers)
    try:
        async with asyncio.timeout(STARTUP_TIMEOUT_S):
            await daemon.wait_ready()
            p2p.point_to(daemon)
            await control._ensure_persistent_conn()
            for protocol, handler in list(control.handlers.items()):
                await control.stream_handler(protocol, handler)
            control.unary_handlers.clear()
            for protocol, answer in unary.items():
                await control.add_unary_handler(protocol, answer)
            await p2p._ping_daemon()
    except (TimeoutError, OSError, asyncio.IncompleteReadError, P2PDaemonError) as error:
        await daemon.stop()
        raise EnvironmentFault(f"the libp2p daemon did not start again: {error or 'it hangs'}") from None
    except BaseException:
        await daemon.stop()
        raise
    finally:
        control.unary_handlers.update(unary)
    p2p.daemon = daemon


async def _part(p2p: DaemonP2P) -> None:
    """End what is left of the old daemon: its folder, and in hivemind's client its connection and those who
    wait for it."""
    control = p2p._client.control
    if p2p.daemon is not None:
        await p2p.daemon.stop()
    tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    control._handler_tasks.clear()
    while not control._pending_messages.empty():
        control._pending_messages.get_nowait()
    for call in control._pending_calls.values():
        if not call.done():
            call.set_exception(ConnectionResetError("the libp2p daemon has ended"))
