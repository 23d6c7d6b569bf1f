"""A task ends although whoever it waits for swallows a cancellation."""

from __future__ import annotations

import asyncio

from chatsvc.tasks import end


async def test_a_swallowed_cancellation_is_repeated() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end(task), 30)
    assert task.cancelled() and swallowed == 3


async def test_a_task_that_has_ended_stays_as_it_is() -> None:
    async def done() -> None: ...

    task = asyncio.create_task(done())
    await asyncio.sleep(0)
    await end(task)
    assert not task.cancelled()
