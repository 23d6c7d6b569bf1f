"""Request-level batches on a virtual clock: when may the next one start?

::

    static    when it is full, or nobody else will come
    dynamic   when it is full, or its oldest member has waited for ``timeout`` seconds

Both then run until the last member has ended (:class:`chatsvc.bench.baselines.StaticScheduler`). Continuous batching is
the engine's own scheduler, which never waits.
"""

from __future__ import annotations

from chatsvc.bench.baselines import StaticScheduler

DYNAMIC_TIMEOUT = 0.1


class BatchGate:
    """Attributes:
    size: members of a full batch.
    timeout: seconds; None: a batch waits until it is full.
    """

    def __init__(self, size: int, timeout: float | None) -> None:
        self.size = size
        self.timeout = timeout

    def opens_at(self, scheduler: StaticScheduler, now: float, more_to_come: bool) -> float:
        """The earliest time at which a step may start as things stand: ``now``, later, or infinity."""
        if scheduler.batch or len(scheduler.waiting) >= self.size or not more_to_come:
            return now
        if self.timeout is None:
            return float("inf")
        oldest = next(iter(scheduler.waiting.values())).request.arrival
        return max(now, oldest + self.timeout)
