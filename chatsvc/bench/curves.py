"""How the cost of a decode step grows: with the batch and with the context, with and without a shared prefix.

The executor's own steps, sampling included, on a pool of made-up K/V: what is measured does not depend on what the
numbers say, and eight chats of 8,000 tokens need not be read first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from chatsvc.errors import ConfigError
from chatsvc.runtime.local import LocalExecutor
from chatsvc.runtime.runner import ModelRunner
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8000)
AT_CONTEXT, AT_BATCH = 512, 8
SHARED = 0.75  # of the context


@dataclass(frozen=True, slots=True)
class Point:
    """Attributes:
    shared: tokens of the context that all sequences have in common.
    seconds: the median of several steps.
    """

    batch: int
    context: int
    shared: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def plan_of(batch: int, context: int, shared: int, block_size: int) -> SchedulerOutput:
    """A step in which ``batch`` sequences of ``context`` tokens decode; their first ``shared`` ones (whole blocks) are
    the same blocks."""
    common = shared // block_size
    each = -(-context // block_size) - common
    head = tuple(range(1, 1 + common))
    sampling = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, context)
    rows = []
    for i in range(batch):
        first = 1 + common + i * each
        table = (*head, *range(first, first + each))
        rows.append(ScheduledRow(i, (i + 1,), context - 1, table, context - 1, sampling))
    return SchedulerOutput(0, tuple(rows))


def blocks_of(plan: SchedulerOutput) -> int:
    """Blocks that the pool must have."""
    return max(max(row.block_table) for row in plan.rows)


def points(limit: int) -> Iterator[tuple[int, int, int]]:
    """(batch, context, shared) of both curves, up to ``limit`` tokens of context."""
    for shared in (0.0, SHARED):
        for batch in BATCHES:
            if limit >= AT_CONTEXT:
                yield batch, AT_CONTEXT, int(AT_CONTEXT * shared)
        for context in CONTEXTS:
            if context <= limit:
                yield AT_BATCH, context, int(context * shared)


def measure(executor: LocalExecutor, wanted: Sequence[tuple[int, int, int]], tries: int) -> list[Point]:
    """Time the points that the pool holds. The executor must be started and idle; its pool is overwritten.

    Raises: ConfigError when the pool holds none of them.
    """
    runner: ModelRunner | None = executor.runner
    assert runner is not None, "start() first"
    data = runner.cache.data
    torch.manual_seed(0)
    for block in data:  # one by one: a second pool's worth of random numbers may not fit
        block.normal_()
    found: dict[tuple[int, int, int], Point] = {}
    for key in dict.fromkeys(wanted):
        plan = plan_of(*key, executor.config.block_size)
        if blocks_of(plan) >= len(data):
            continue
        runner.run(plan)
        times = []
        for _ in range(tries):
            began = time.perf_counter()
            runner.run(plan)
            times.append(time.perf_counter() - began)
        found[key] = Point(*key, sorted(times)[tries // 2])
    if not found:
        raise ConfigError("the KV pool holds none of the points: raise --kv-cache-memory")
    return list(found.values())


__all__ = ["AT_BATCH", "AT_CONTEXT", "BATCHES", "CONTEXTS", "SHARED", "Point", "measure", "plan_of", "points"]
