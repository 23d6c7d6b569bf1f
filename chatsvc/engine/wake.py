"""How readers of a generation wait, and how often they look when there are very many of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Pace:
    """Of all readers of a process: how many steps' tokens go into one look.

    A look costs a task switch and a write to a socket, whatever it finds. As long as the loop keeps up, readers look at
    every step. When it is busy nearly all the time, they look at every second step, so that text gets older by a step
    and not by an ever longer queue of looks; never by more than ``LONGEST``. Not by more steps: the engine's own part
    of the load would stay, and nothing be won but age.

    Attributes:
        steps: how many notifications a reader waits for.
    """

    BUSY, IDLE = 0.8, 0.4  # of a core, for the loop's thread: look less often above the one, more often below the other
    MOST = 2
    LONGEST = 0.08  # seconds
    WINDOW = 0.5

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self.steps = 1
        self._clock = clock
        self._cpu = cpu
        self._since = clock()
        self._spent: float | None = None  # unknown until the loop's own thread has asked

    def noted(self) -> None:
        """A reader was notified; in the loop's thread."""
        now = self._clock()
        passed = now - self._since
        if passed < self.WINDOW:
            return
        spent, before = self._cpu(), self._spent
        self._since, self._spent = now, spent
        if before is None:
            return
        busy = (spent - before) / passed
        if passed > 4 * self.WINDOW:  # there was a rest
            self.steps = 1
        elif busy > self.BUSY:
            self.steps = min(self.MOST, self.steps + 1)
        elif busy < self.IDLE:
            self.steps = max(1, self.steps - 1)


class Wake:
    """Calling it wakes the one who waits, now or next. Cheaper than an ``asyncio.Event``.

    Args:
        pace: wait for as many calls as it says.
        urgent: when this says so, for one.
    """

    __slots__ = ("_calls", "_pace", "_timer", "_urgent", "_waiter")

    def __init__(self, pace: Pace | None = None, urgent: Callable[[], bool] = lambda: True) -> None:
        self._pace = pace
        self._urgent = urgent
        self._calls = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        self._calls += 1
        pace = self._pace
        if pace is not None:
            pace.noted()
            if self._calls < pace.steps and not self._urgent():
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(pace.LONGEST, self._fire)
                return
        if self._waiter is not None:
            self._fire()

    def _fire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self) -> None:
        """Until it was called, as often as it takes, since the last wait."""
        due = 1 if self._pace is None or self._urgent() else self._pace.steps
        if not self._calls or (self._calls < due and self._timer is not None):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._calls = 0
