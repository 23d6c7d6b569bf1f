"""What a run of the scheduler looked like: who waited how long, and what the KV memory held, weighted by time.

Slots are counted at the end of each step, before anybody is freed: everything that the step wrote is in use. Time is
the wall's, or (for the simulated executor) modelled: a fixed part for each step and a part for each token, so that a
run without a model is instant and the same every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from chatsvc.bench.baselines import StaticScheduler
from chatsvc.cache.manager import BlockManager, BlockTable
from chatsvc.scheduler.plan import SchedulerOutput, StepResult
from chatsvc.scheduler.request import Request, Sequence, SequenceUpdate
from chatsvc.scheduler.scheduler import Scheduler

LONG = 500  # tokens of prompt and answer from which a sequence counts as long


class Clock:
    """Seconds. ``cost`` gives the modelled seconds of a step of that many tokens; None: the wall clock."""

    def __init__(self, cost: Callable[[int], float] | None = None) -> None:
        self._cost = cost
        self._now = 0.0

    def now(self) -> float:
        return time.perf_counter() if self._cost is None else self._now

    def stepped(self, tokens: int) -> None:
        if self._cost is not None:
            self._now += self._cost(tokens)


@dataclass(slots=True)
class Timing:
    """One sequence. Times by the run's clock; ``tokens`` are those of the answer."""

    arrival: float
    prompt: int
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    cached: int = 0

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        return None if self.first is None or self.tokens < 2 else (self.last - self.first) / (self.tokens - 1)


@dataclass(slots=True)
class Slots:
    """KV slots integrated over time (slot seconds)."""

    reserved: float = 0.0
    used: float = 0.0

    def add(self, used: int, reserved: int, seconds: float) -> None:
        self.used += used * seconds
        self.reserved += reserved * seconds

    @property
    def waste(self) -> float:
        """Share of the reserved slots that held nothing of use."""
        return 1 - self.used / self.reserved if self.reserved else 0.0


@dataclass(slots=True)
class Recorder:
    """Attributes:
    slots: all sequences, a shared block counted once: what ``chatsvc_kv_waste_ratio`` shows live.
    long_slots: the same over sequences that end with :data:`LONG` tokens or more; only when ``by_length``.
    own_slots, long_own_slots: each sequence's own table, as if it shared nothing; only when ``by_length``.
    busy: seconds in steps.
    peak_running: most sequences that owned KV memory at a time and were not finished.
    running_seconds: integral of their number.
    check: prove every invariant after every step (tests).
    """

    clock: Clock
    by_length: bool = False
    check: bool = False
    timings: dict[int, Timing] = field(default_factory=dict)
    slots: Slots = field(default_factory=Slots)
    long_slots: Slots = field(default_factory=Slots)
    own_slots: Slots = field(default_factory=Slots)
    long_own_slots: Slots = field(default_factory=Slots)
    busy: float = 0.0
    steps: int = 0
    peak_running: int = 0
    running_seconds: float = 0.0
    _planned: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds from the first arrival to the last token."""
        times = self.timings.values()
        return max(t.last for t in times) - min(t.arrival for t in times)

    def planned(self) -> None:
        self._planned = self.clock.now()

    def stepped(self, scheduler: Scheduler, plan: SchedulerOutput) -> None:
        """The step is done; nothing has been freed yet."""
        self.clock.stepped(plan.num_tokens)
        seconds = self.clock.now() - self._planned
        ends = {row.seq_id: row.start + len(row.token_ids) for row in plan.rows}
        held = [(s, ends.get(s.seq_id, s.num_computed)) for s in scheduler.running]
        self.busy += seconds
        self.steps += 1
        self.peak_running = max(self.peak_running, len(held))
        self.running_seconds += len(held) * seconds
        self.slots.add(*scheduler.manager.filled_slots((s.table, n) for s, n in held), seconds)
        if self.by_length:
            self._by_length(scheduler, held, seconds)

    def _by_length(self, scheduler: Scheduler, held: list[tuple[Sequence, int]], seconds: float) -> None:
        size = scheduler.manager.block_size
        long: list[tuple[BlockTable, int]] = []
        for seq, computed in held:
            reserved = len(seq.table.blocks) * size
            self.own_slots.add(computed, reserved, seconds)
            if seq.num_prompt + seq.request.params.max_tokens >= LONG:
                self.long_own_slots.add(computed, reserved, seconds)
                long.append((seq.table, computed))
        # Not the manager's own: a baseline's may add what finished sequences of any length still hold.
        self.long_slots.add(*BlockManager.filled_slots(scheduler.manager, long), seconds)

    def took(self, update: SequenceUpdate) -> None:
        timing = self.timings[update.sequence.seq_id]
        if update.tokens:
            timing.last = self.clock.now()
            timing.first = timing.last if timing.first is None else timing.first
            timing.tokens += len(update.tokens)
        timing.cached = update.sequence.cached_tokens or 0


class RecordedScheduler(Scheduler):
    """The engine's scheduler with a recorder beside it."""

    recorder: Recorder

    def add(self, request: Request) -> None:
        super().add(request)
        for seq in request.sequences:
            self.recorder.timings[seq.seq_id] = Timing(self.recorder.clock.now(), seq.num_prompt)

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        self.recorder.planned()
        return plan

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        self.recorder.stepped(self, plan)
        updates = super().update(plan, result)
        for update in updates:
            self.recorder.took(update)
        if self.recorder.check:
            self.check_integrity()
        return updates


class RecordedStaticScheduler(RecordedScheduler, StaticScheduler):
    """The static baseline with a recorder beside it."""
