"""The end of tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

AGAIN = 0.2  # seconds


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended, and say in the log which of them had a fault.

    One cancellation is not always enough: what a task waits for may swallow it (a driver whose reply comes at the same
    moment, a time limit that ends just then), and then nobody would end the task any more.
    """
    late = {task for task in tasks if not task.done()}
    while late:
        for task in late:
            task.cancel()
        _, late = await asyncio.wait(late, timeout=AGAIN)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task ended with an error: %s", task.get_name(), exc_info=error)
