"""The steps that the executor has."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Future

from chatsvc.errors import EngineError
from chatsvc.runtime.executor import Executor
from chatsvc.scheduler.plan import SchedulerOutput, StepResult


class Flight:
    """Oldest first, and in this order they are run.

    Attributes:
        since: when it was last seen that the executor began with one (``time.perf_counter``); None: it has none.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps: deque[tuple[SchedulerOutput, Future[StepResult]]] = deque()
        self.since: float | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, plan: SchedulerOutput, now: float) -> None:
        """An executor that refuses it is as one whose step fails."""
        try:
            future = self._executor.submit(plan)
        except Exception as e:
            future = Future()
            future.set_exception(e)
        self._steps.append((plan, future))
        self.since = self.since or now

    def withdraw(self) -> bool:
        """Take the newest step back, unless the executor has begun with it. Returns whether it was."""
        if not self._steps[-1][1].cancel():
            return False
        self._steps.pop()
        return True

    @property
    def oldest(self) -> SchedulerOutput:
        return self._steps[0][0]

    async def result(self) -> StepResult:
        """What the oldest step made. Raises what it raised; EngineError if the executor dropped it."""
        try:
            return await asyncio.wrap_future(self._steps[0][1])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineError("the executor dropped the step") from None

    def landed(self) -> None:
        """The oldest step is over."""
        self._steps.popleft()
        self.since = time.perf_counter() if self._steps else None

    async def crashed(self) -> None:
        """The oldest step has failed: wait for those after it, which nobody asks for any more."""
        self._steps.popleft()
        await asyncio.gather(*(asyncio.wrap_future(later) for _, later in self._steps), return_exceptions=True)
        self._steps.clear()
        self.since = None
