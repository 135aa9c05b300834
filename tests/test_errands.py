"""Questions that a node asks beside its machines, and what becomes of them when it stops."""

from __future__ import annotations

import asyncio

from p2p_co2.node.errands import Errands


async def test_errands_may_come_to_their_end_but_no_later() -> None:
    errands, told = Errands(), list[str]()

    async def ask(answer: asyncio.Event) -> None:
        await answer.wait()
        told.append("answered")

    soon, never = asyncio.Event(), asyncio.Event()
    answered, unanswered = (asyncio.create_task(ask(answer)) for answer in (soon, never))
    for task in (answered, unanswered):
        errands.add(task)
    asyncio.get_running_loop().call_soon(soon.set)
    await errands.end(0.05)
    await asyncio.wait({answered, unanswered}, timeout=5.0)
    assert told == ["answered"]
    assert unanswered.cancelled()
    assert not errands._tasks, "none is kept"
