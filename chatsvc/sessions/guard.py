"""Runs store operations so that neither a caller who leaves nor a store that hangs can do harm.

A command that is cut off in the middle is the start of the worst faults: a reply left on the wire is read by the next
caller, a connection is lost to the pool, a transaction stays open. So the caller's cancellation never reaches the
operation: it runs in a task of its own to its end (its own time-outs bound it), and only the waiting is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from chatsvc.errors import StoreError

T = TypeVar("T")
log = logging.getLogger(__name__)


class Guard:
    """Owns the operations under way of one store.

    Args:
        what: the store's name in messages ("Redis").
        deadline: seconds after which the caller gets StoreError; the operation itself may still end later.
        errors: the driver's exceptions, which become StoreError.
        away: those among them that say that the store is not there; past the deadline it is not there either.

    Attributes:
        lost_at: monotonic seconds when the store was last found away; None: never.
    """

    def __init__(
        self,
        what: str,
        deadline: float,
        errors: tuple[type[Exception], ...],
        away: tuple[type[Exception], ...] = (),
    ) -> None:
        self._what = what
        self._deadline = deadline
        self._errors = errors
        self._away = away
        self.lost_at: float | None = None
        self._tasks: set[asyncio.Future[object]] = set()

    async def run(self, operation: Awaitable[T]) -> T:
        """The operation's result. Raises StoreError for the driver's errors and past the deadline."""
        task: asyncio.Future[T] = asyncio.ensure_future(operation)
        self._tasks.add(task)  # type: ignore[arg-type]
        task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=self._deadline)
        if not done:
            self.lost_at = time.monotonic()
            raise StoreError(f"The {self._what} session store did not answer within {self._deadline:g} s.", away=True)
        if task.cancelled():
            raise StoreError(f"The {self._what} session store is being closed.")
        try:
            return task.result()
        except self._errors as error:
            # Callers of the API read the message: it names no address. The log has it all.
            log.warning("%s: %s: %s", self._what, type(error).__name__, error)
            away = isinstance(error, self._away)
            if away:
                self.lost_at = time.monotonic()
            raise StoreError(f"The {self._what} session store cannot answer.", away=away) from error

    def _ended(self, task: asyncio.Future[T]) -> None:
        self._tasks.discard(task)  # type: ignore[arg-type]
        if not task.cancelled():
            task.exception()  # the caller may be gone; mark it as seen

    async def drain(self) -> None:
        """Waits for what is under way, at most the deadline; cancels the rest."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._deadline)
            for task in late:
                task.cancel()
