"""What the KV memory held, weighted by time.

::

    pool   | tokens | future | internal | external | free |
             ^        ^        ^          ^          ^ nobody's, and usable
             |        |        |          nobody can use it: the allocator's rounding, gaps too small for the next
             |        |        reserved and never used (an answer shorter than its reservation, a batch not yet over)
             |        reserved now, used later by the same sequence
             K/V of a token

The split is the PagedAttention paper's (section 3.1): reserved, internal and external.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chatsvc.bench.baselines import ContiguousManager
from chatsvc.scheduler.plan import SchedulerOutput
from chatsvc.scheduler.scheduler import Scheduler
from chatsvc.sim.contiguous import ReservingManager

LONG = 500  # tokens of prompt and answer from which a sequence counts as long


@dataclass(slots=True)
class Split:
    """Slots (one token each), or slot seconds when integrated."""

    tokens: float = 0.0
    future: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    free: float = 0.0

    def add(self, other: Split, weight: float) -> None:
        self.tokens += other.tokens * weight
        self.future += other.future * weight
        self.internal += other.internal * weight
        self.external += other.external * weight
        self.free += other.free * weight

    @property
    def held(self) -> float:
        return self.tokens + self.future + self.internal + self.external

    @property
    def pool(self) -> float:
        return self.held + self.free

    @property
    def waste(self) -> float:
        """Share of what is held that is no token's."""
        return 1 - self.tokens / self.held if self.held else 0.0


@dataclass(slots=True)
class Sample:
    """The memory at one moment."""

    time: float
    split: Split
    cached: int
    running: int
    waiting: int


@dataclass(slots=True)
class MemoryMeter:
    """Attributes:
    total: over all steps.
    crowded: over steps during which somebody waited although a sequence slot was free: memory was what was short.
    long_gap, long_held: slot seconds of sequences that end with :data:`LONG` tokens or more.
    """

    scheduler: Scheduler
    total: Split = field(default_factory=Split)
    crowded: Split = field(default_factory=Split)
    long_gap: float = 0.0
    long_held: float = 0.0
    running_seconds: float = 0.0
    crowded_running: float = 0.0
    crowded_seconds: float = 0.0
    seconds: float = 0.0
    peak_running: int = 0

    @property
    def long_waste(self) -> float:
        return self.long_gap / self.long_held if self.long_held else 0.0

    @property
    def mean_running(self) -> float:
        """While memory was short; over the whole run when it never was."""
        if self.crowded_seconds:
            return self.crowded_running / self.crowded_seconds
        return self.running_seconds / self.seconds if self.seconds else 0.0

    def observe(self, plan: SchedulerOutput, now: float, seconds: float) -> Sample:
        """To be called between ``schedule`` and ``update``: the step's tokens count as written."""
        scheduler = self.scheduler
        manager = scheduler.manager
        size = manager.block_size
        ends = {row.seq_id: row.start + len(row.token_ids) for row in plan.rows}
        held = manager.pool.num_used * size
        tokens = gap = future = long_gap = long_held = 0
        for seq in scheduler.running:
            end = ends.get(seq.seq_id, seq.num_computed)
            covered = len(seq.table.blocks) * size
            final = seq.num_prompt + seq.request.params.max_tokens
            tokens += end
            gap += covered - end
            future += min(final, covered) - end
            if final >= LONG:
                long_gap += covered - end
                long_held += covered
        if manager.prefix_caching:
            tokens = held - gap  # shared blocks are full, and count once
        rounding = held - manager.reserved_tokens if isinstance(manager, ReservingManager) else 0
        waits = len(scheduler.waiting) + len(scheduler.preempted)
        crowded = waits > 0 and len(scheduler.running) < scheduler.config.max_num_seqs
        free = manager.pool.num_available * size
        external = rounding
        if isinstance(manager, ContiguousManager):
            left_over = manager.pool.num_blocks % manager.extent * size
            external, free = left_over, free - left_over
        elif isinstance(manager, ReservingManager) and crowded:
            external, free = rounding + free, 0
        split = Split(tokens, future, held - tokens - future - rounding, external, free)
        self.total.add(split, seconds)
        self.seconds += seconds
        self.running_seconds += len(scheduler.running) * seconds
        if crowded:
            self.crowded.add(split, seconds)
            self.crowded_seconds += seconds
            self.crowded_running += len(scheduler.running) * seconds
        self.long_gap += long_gap * seconds
        self.long_held += long_held * seconds
        self.peak_running = max(self.peak_running, len(scheduler.running))
        return Sample(now, split, manager.pool.num_cached * size, len(scheduler.running), waits)
